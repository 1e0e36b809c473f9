"""What a recipe should say of these images: their size in the model, how they meet it, classes of unequal size, groups in their names."""

from __future__ import annotations

import os
import re
import statistics
from collections import Counter

from hiresvis.data.sources import Dataset, Datasets
from hiresvis.data.survey import Look
from hiresvis.recipe.draft import Line

HUGE_PX = 6144  # long side from which an image is read in windows: reduced to what a model takes, too little of it would be left
LEAST_PX = 64
_MULTIPLE = 32  # the stride of nearly all models
_SAME_SHAPE = 1.05  # ratio of the widest to the tallest shape up to which images are taken for alike
_UNEQUAL = 4  # times the smallest class, from which on classes are weighted
_ID = re.compile(r"((?:[^\W\d_]+[-_. ])?[^-_. ]*\d[^-_. ]*)[-_. ]")  # a number that begins a name, `p12_` or `patient_12_`, and goes on


def fitted(look: Look, most_px: int) -> dict[str, Line]:
    """data.fit and model.image_size for images of these sizes.

    Args:
        most_px: of the long side.
    """
    longs = sorted(max(size) for size in look.sizes)
    long = int(statistics.median(longs))
    span = _span(look)
    if long > HUGE_PX:
        side = min(1024, most_px)
        fit = Line("tile", f"images of {long} px are read in windows at full resolution; reduced, small things in them would be gone")
        return {"data.fit": fit, "model.image_size": Line(side, f"px of a window; images have {span}")}
    shapes = [width / height for height, width in look.sizes]
    scale = min(1.0, most_px / long)
    kept = f"images have {span}" + ("" if scale == 1 else f", reduced to {scale:.0%}: a side of twice the length takes four times as long")
    if max(shapes) / min(shapes) <= _SAME_SHAPE:
        height, width = (_rounded(statistics.median(size[axis] for size in look.sizes) * scale) for axis in (0, 1))
        size = height if height == width else [height, width]
        return {
            "data.fit": Line("resize", "the images have one shape, which image_size keeps"),
            "model.image_size": Line(size, f"px{'' if height == width else ', [height, width]'}; {kept}"),
        }
    side = _rounded(long * scale)
    return {
        "data.fit": Line("letterbox", f"shapes differ (width / height {min(shapes):.2f} to {max(shapes):.2f}): kept, and padded"),
        "model.image_size": Line(side, f"px; {kept}"),
    }


def _rounded(side: float) -> int:
    return max(LEAST_PX, round(side / _MULTIPLE) * _MULTIPLE)


def _span(look: Look) -> str:
    """The sizes in words, width x height."""
    low, high = min(look.sizes, key=lambda size: size[0] * size[1]), max(look.sizes, key=lambda size: size[0] * size[1])
    least, most = (f"{width} x {height}" for height, width in (low, high))
    return f"{least} px" if low == high else f"{least} to {most} px"


def described(look: Look) -> str:
    """What headers said, for people: `8 bit JPEG of 2048 x 2048 px`."""
    formats = " and ".join(name for name, _ in Counter(look.formats).most_common())
    bits = " and ".join(str(number) for number in sorted(look.bits))
    refused = f"; {look.num_refused} of {len(look.sizes) + look.num_refused} looked at cannot be read" if look.num_refused else ""
    return f"{bits} bit {formats} of {_span(look)}{refused}"


def counted(dataset: Dataset, most: int = 8) -> str:
    """How many images a split has, and of what: `120 images: defect 60, ok 60`."""
    counts = sorted(dataset.class_counts().items(), key=lambda item: -item[1]) if dataset.task in ("classify", "multilabel") else []
    text = ", ".join(f"{name} {count}" for name, count in counts[:most]) + (f" and {len(counts) - most} more" if len(counts) > most else "")
    spread = dataset.target_spread()
    if spread:
        text = ", ".join(f"{name} {low:g} to {high:g}" for name, (low, _, high) in list(spread.items())[:most])
    return f"{len(dataset)} images{f': {text}' if text else ''}"


def balanced(train: Dataset) -> dict[str, Line]:
    """data.balance and train.metric where classes are of unequal size."""
    counts = {name: count for name, count in train.class_counts().items() if count} if train.task == "classify" else {}
    if not counts or max(counts.values()) < _UNEQUAL * min(counts.values()):
        return {}
    largest, smallest = max(counts, key=lambda name: counts[name]), min(counts, key=lambda name: counts[name])
    why = f"{largest} has {counts[largest]} images and {smallest} {counts[smallest]}: each counts by the inverse of its class's number"
    metric = f"every class counts alike; guessing {largest} gives an accuracy of {counts[largest] / len(train):.2f}"
    return {"data.balance": Line("weights", why), "train.metric": Line("balanced_accuracy", metric)}


def named_groups(datasets: Datasets, *, is_table: bool) -> list[str]:
    """Comments on groups that file names may tell of: beginnings with a number in them that several images share."""
    of_split = {name: Counter(_beginning(sample.name) for sample in dataset.samples) for name, dataset in datasets.splits().items()}
    found = sum((counts for counts in of_split.values()), Counter[str]())
    number, total = len(found), sum(found.values())
    if "" in found or not 2 < number <= total / 2:
        return []
    example = ", ".join(sorted(found)[:2])
    text = f"group: names begin in {number} ways ({example}, ...), {total / number:.1f} images each. Where these are patients or sites, "
    both = {name for counts in of_split.values() for name in counts if sum(name in other for other in of_split.values()) > 1}
    where = "" if not both else f"; {len(both)} are on both sides of a split now"
    table = "a column with them" if is_table else "a manifest with a column of them"
    return [f"{text}make {table}, and name it here: no group is then in training and validation both{where}."]


def _beginning(name: str) -> str:
    found = _ID.match(os.path.splitext(name.rpartition("/")[2])[0])
    return found[1] if found else ""


def sized_batch(num_train: int, most: int) -> int:
    """Images a step of the optimizer: a power of two, at most a quarter of them all."""
    batch = most
    while batch > 2 and batch * 4 > num_train:
        batch //= 2
    return batch
