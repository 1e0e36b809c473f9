"""One split in numbers: what it holds, what stands out, and what of it deserves a word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hiresvis.data.findings import Finding
from hiresvis.data.labels import spread_of
from hiresvis.data.likeness import BLANK_SPREAD
from hiresvis.data.sources import Dataset, Sample
from hiresvis.data.transforms import Preprocess
from hiresvis.errors import Problem

STRETCH_NOTED = 1.25
KEPT_NOTED = 0.5
FEW_IMAGES = 5  # of a class in train: too few to learn from
UNEVEN = 20  # largest class to smallest
PLACES_SHOWN = 5


def count(dataset: Dataset, findings: Sequence[Finding], preprocess: Preprocess | None) -> dict[str, Any]:
    """Counts, sizes as [min, median, max], and the images at either end; plain JSON values.

    Args:
        dataset: of one split.
        findings: of each sample, in its order.
        preprocess: with it, what the model's size does to the images is counted too.
    """
    headers = [finding.header for finding in findings if finding.header is not None]
    shown = shown_sizes(dataset.samples, findings)
    counts: dict[str, Any] = {
        "images": len(dataset),
        "unreadable": sum(finding.error is not None for finding in findings),
        "classes": dataset.class_counts(),
        "balance": _balance(dataset.class_counts()),
        "targets": dataset.target_spread(),
        "groups": _groups(dataset),
        "formats": dict(sorted(Counter(header.format for header in headers).items())),
        "modes": dict(sorted(Counter(header.mode for header in headers).items())),
        "bits": {str(bits): number for bits, number in sorted(Counter(header.bits for header in headers).items())},
        "channels": {str(channels): number for channels, number in sorted(Counter(header.channels for header in headers).items())},
        "exif_rotated": sum(header.orientation != 1 for header in headers),
        "height": spread_of([height for height, _ in shown]),
        "width": spread_of([width for _, width in shown]),
        "blank": [place_of(sample) for sample, finding in zip(dataset.samples, findings, strict=True) if _is_blank(finding)],
        "skipped_extensions": dict(sorted(dataset.skipped_extensions.items())),
        "ignored": list(dataset.ignored),
    }
    if preprocess is not None:
        counts["share_kept"] = spread_of([preprocess.share_kept(*size) for size in shown])
        if preprocess.fit == "tile":
            counts["windows"] = spread_of([preprocess.num_windows(*size) for size in shown])
        counts["shrink"] = spread_of([shrink(preprocess, *size) for size in shown])
    return {**counts, "extremes": _extremes(dataset.samples, findings, preprocess)}


def place_of(sample: Sample) -> dict[str, str]:
    """Where a sample is: its path and its row."""
    return {"path": sample.title, "row": sample.row}


def shown_sizes(samples: Sequence[Sample], findings: Sequence[Finding]) -> list[tuple[int, int]]:
    """(height, width) of those that can be read: the file's, or the region's."""
    return [
        finding.header.shown_size if sample.region is None else sample.region.size
        for sample, finding in zip(samples, findings, strict=True)
        if finding.header is not None
    ]


def shrink(preprocess: Preprocess, height: int, width: int) -> float:
    """Stored pixels to one of the model's, along the axis that loses more; windows keep every pixel as it is."""
    if preprocess.in_windows:
        return 1.0
    fitted = preprocess.fitted_size(height, width)
    return round(max(height / fitted[0], width / fitted[1]), 3)


def stretch(preprocess: Preprocess, height: int, width: int) -> float:
    """By how much the shape changes: 1 for not at all, 2 for twice as long one way as the other."""
    if preprocess.in_windows:
        return 1.0
    fitted = preprocess.fitted_size(height, width)
    change = height / width / (fitted[0] / fitted[1])
    return round(max(change, 1 / change), 3)


def image_warnings(split: str, counts: Mapping[str, Any], shown: Sequence[tuple[int, int]], preprocess: Preprocess | None) -> list[Problem]:
    """Images whose shape changes, images of which much is left out, and images without anything on them.

    Args:
        counts: of `count`. shown: of `shown_sizes`.
    """
    if preprocess is None:
        return []
    problems = []
    wanted = f"{preprocess.image_size[0]} x {preprocess.image_size[1]}"
    cut = [size for size in shown if preprocess.share_kept(*size) < KEPT_NOTED]
    if cut:
        text = (
            f"{len(cut)} of {len(shown)} images lose more than half of their area to data.fit: crop, as {cut[0][0]} x {cut[0][1]}, of "
            f"which {wanted} (height x width) keeps {preprocess.share_kept(*cut[0]):.0%}; data.fit: tile sees all of it, resize all at once"
        )
        problems.append(Problem(text, key=f"data.{split}"))
    stretched = [size for size in shown if stretch(preprocess, *size) > STRETCH_NOTED]
    if preprocess.fit == "resize" and stretched:
        height, width = stretched[0]
        text = (
            f"{len(stretched)} of {len(shown)} images change their shape by more than a quarter, as {height} x {width} to "
            f"{wanted} (height x width); data.fit: letterbox keeps it, or give model.image_size as [height, width]"
        )
        problems.append(Problem(text, key=f"data.{split}"))
    if blank := counts["blank"]:
        shown_blank = ", ".join(place["path"] for place in blank[:PLACES_SHOWN])
        more = f" and {len(blank) - PLACES_SHOWN} more (--json lists them)" if len(blank) > PLACES_SHOWN else ""
        text = f"{len(blank)} images are of one colour or nearly blank: {shown_blank}{more}; remove them if they are none on purpose"
        problems.append(Problem(text, key=f"data.{split}"))
    return problems


def class_notes(counts: Mapping[str, Mapping[str, Any]], task: str) -> list[Problem]:
    """Classes with too few images in train, without one in val, and sizes far apart. Classes without any in train were told before."""
    notes = []
    train, val = counts["train"]["classes"], counts["val"]["classes"]
    few = [f"{name} ({number})" for name, number in train.items() if 0 < number < FEW_IMAGES]
    if few:
        notes.append(
            Problem(f"classes with fewer than {FEW_IMAGES} images in train: {_listed(few)}; gather more, or join classes", key="data.train")
        )
    unproved = [name for name, number in train.items() if number and not val.get(name)]
    if unproved:
        notes.append(Problem(f"classes of train without an image in val: {_listed(unproved)}; no metric speaks of them", key="data.val"))
    balance = counts["train"]["balance"]
    if task == "classify" and balance and balance["ratio"] > UNEVEN:  # each label of multilabel is a question of its own
        text = (
            f"{balance['largest']} has {balance['ratio']:g} times the images of {balance['smallest']} in train; accuracy alone says little"
        )
        ways = "train.metric balanced_accuracy or macro_f1 tell more, data.balance weights or sampler make up for it"
        notes.append(Problem(f"{text}: {ways}", key="data.train"))
    return notes


def _listed(names: Sequence[str], limit: int = 10) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def _balance(classes: Mapping[str, int]) -> dict[str, Any]:
    """Largest and smallest class that has images, and how many times the one is the other."""
    present = {name: number for name, number in classes.items() if number}
    if not present:
        return {}
    largest, smallest = max(present, key=present.__getitem__), min(present, key=present.__getitem__)
    return {"largest": largest, "smallest": smallest, "ratio": round(present[largest] / present[smallest], 2)}


def _groups(dataset: Dataset) -> dict[str, Any]:
    groups = Counter(sample.group for sample in dataset.samples if sample.group is not None)
    if not groups:
        return {}
    largest, images = groups.most_common(1)[0]
    return {"number": len(groups), "largest": largest, "images_of_largest": images}


def _is_blank(finding: Finding) -> bool:
    return finding.look is not None and finding.look.spread <= BLANK_SPREAD


def _extremes(samples: Sequence[Sample], findings: Sequence[Finding], preprocess: Preprocess | None) -> dict[str, Any]:
    """The image at the end of each scale, with its size and what was measured."""
    readable = [sample for sample, finding in zip(samples, findings, strict=True) if finding.header is not None]
    sized = [(sample, *size) for sample, size in zip(readable, shown_sizes(samples, findings), strict=True)]
    if not sized:
        return {}
    scales: dict[str, tuple[Callable[[int, int], float], bool]] = {
        "smallest": (lambda height, width: height * width, False),
        "largest": (lambda height, width: height * width, True),
    }
    if preprocess is not None:
        scales["most_stretched"] = (lambda height, width: stretch(preprocess, height, width), True)
        scales["most_shrunk"] = (lambda height, width: shrink(preprocess, height, width), True)
        scales["least_kept"] = (lambda height, width: preprocess.share_kept(height, width), False)
    found = {}
    for name, (measure, highest) in scales.items():
        sample, height, width = (max if highest else min)(sized, key=lambda row, measure=measure: measure(row[1], row[2]))  # type: ignore[misc]
        found[name] = {**place_of(sample), "height": height, "width": width, "value": measure(height, width)}
    return found
