"""Weights and orders for classes of unequal size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiresvis.data.augment import make_augment
from hiresvis.data.balance import MOST_POSITIVE, balanced_order, class_weights, positive_weights, sampling, weighing
from hiresvis.data.loader import TrainLoader
from hiresvis.data.micro_batch import MicroBatch
from hiresvis.data.mixing import Mixing
from hiresvis.data.sources import Dataset, Sample
from hiresvis.data.transforms import Pipeline, Preprocess

SIZE = (24, 32)
LABELS = (0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2)  # of eleven images


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8).filter(any))
def test_class_weights_give_every_class_the_same_part(counts):
    """Images times weight is alike for all classes that have images; the mean over the images is 1."""
    weights = class_weights(counts)
    parts = [count * weight for count, weight in zip(counts, weights, strict=True) if count]
    assert parts == pytest.approx([sum(counts) / len(parts)] * len(parts))
    assert sum(parts) == pytest.approx(sum(counts))


def test_positive_weights_are_odds_within_a_limit():
    """Three without for one with is 3; one in a thousand would be 999, and all but one a thousandth: both are cut."""
    assert positive_weights([25, 1, 999, 0, 1000], 1000) == pytest.approx((MOST_POSITIVE, 20.0, 1 / 20, 1.0, 1.0))
    assert positive_weights([250, 750], 1000) == pytest.approx((3.0, 1 / 3))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(0, 2**32 - 1))
def test_every_class_and_every_image_of_it_come_equally_often(labels, seed):
    """Give or take one; the number of draws is that of the images, and a draw is told from the earlier ones of its image."""
    values = np.array(labels)
    order = balanced_order(values, np.random.default_rng(seed))
    assert len(order) == len(set(order.tolist())) == len(labels)
    by_class = Counter(values[order % len(labels)].tolist())
    assert max(by_class.values()) - min(by_class.values()) <= 1
    assert set(by_class) == set(labels)
    times = Counter((order % len(labels)).tolist())
    for label in by_class:
        of_class = [times[index] for index in np.flatnonzero(values == label).tolist()]
        assert max(of_class) - min(of_class) <= 1
    repeats = sorted((order // len(labels)).tolist())
    assert repeats == sorted(number for count in times.values() for number in range(count))


def dataset(labels: tuple[Any, ...], classes: tuple[str, ...], task: str = "classify") -> Dataset:
    samples = tuple(Sample(Path(f"{index}.png"), label, f"t.csv:{index + 2}") for index, label in enumerate(labels))
    return Dataset(samples, classes, task=task)


def test_what_is_done_is_told_with_its_numbers():
    """The lightest and the heaviest class by name; how often the images of the rarest and of the commonest come; what was cut."""
    train = dataset(LABELS, ("common", "few", "one", "none"))
    assert weighing(train)[1] == "a sample's loss is weighed by its class, 0.458 (common) to 3.67 (one); the mean over train is 1"
    assert sampling(train) == "an epoch of 11 images has 3.667 of each class: those of one come 3.67 times, of common comes 46%"
    rows = tuple((float(index == 0), float(index % 2)) for index in range(50))
    weights, said = weighing(dataset(rows, ("rare", "half"), "multilabel"))
    assert weights == (20.0, 1.0)
    assert said == "a label that an image has is weighed, 1 (half) to 20 (rare), against one that it has not; 1 of 2 are cut at 20"


@pytest.fixture
def make(tmp_path: Path, save_image: Callable[..., Path]) -> Callable[..., TrainLoader]:
    """make(**changes) -> a loader of eleven images, eight of them of one class."""
    paths = [save_image(tmp_path / f"{index:02d}.png", seed=index) for index in range(len(LABELS))]
    samples = tuple(Sample(path, LABELS[index], f"t.csv:{index + 2}", None, path.name) for index, path in enumerate(paths))
    pipeline = Pipeline(Preprocess(SIZE), make_augment("heavy", image_size=SIZE))

    def build(**changes: Any) -> TrainLoader:
        options: dict[str, Any] = {"max_pixels": 10**6, "batch": 4, "micro_batch": 3, "seed": 5, "balanced": True, **changes}
        return TrainLoader(samples, pipeline, **options)

    return build


def epoch(loader: TrainLoader, number: int, first_batch: int = 0) -> list[MicroBatch]:
    with closing(loader):
        loader.set_epoch(number, first_batch)
        return list(loader)


def same(first: list[MicroBatch], second: list[MicroBatch]) -> bool:
    return len(first) == len(second) and all(
        a.indices == b.indices and torch.equal(a.images, b.images) and torch.equal(a.targets, b.targets)
        for a, b in zip(first, second, strict=True)
    )


def test_a_balanced_epoch_is_the_same_with_workers_and_from_its_middle(make):
    """Order and augmentation follow from seed and epoch; other epochs show other images of the common class."""
    whole = epoch(make(), 3)
    assert same(whole, epoch(make(workers=2), 3))
    assert same([item for item in whole if item.batch_index >= 1], epoch(make(), 3, first_batch=1))
    assert not same(whole, epoch(make(), 4))
    assert sorted(Counter(label for item in whole for label in item.targets.tolist()).values()) == [3, 4, 4]
    seen = {index for number in range(12) for item in epoch(make(), number) for index in item.indices}
    assert seen == set(range(len(LABELS)))


def test_an_image_that_comes_again_is_augmented_anew(make):
    """The only one of its class comes three or four times, each time as other pixels, however the batches are cut."""
    drawn = [(index, image) for item in epoch(make(micro_batch=4), 1) for index, image in zip(item.indices, item.images, strict=True)]
    again = [image for index, image in drawn if index == 10]
    assert len(again) >= 3
    assert all(not torch.equal(one, other) for place, one in enumerate(again) for other in again[:place])
    cut = [(index, image) for item in epoch(make(micro_batch=1), 1) for index, image in zip(item.indices, item.images, strict=True)]
    assert all(one[0] == other[0] and torch.equal(one[1], other[1]) for one, other in zip(drawn, cut, strict=True))


def test_images_that_come_again_are_mixed_by_numbers_of_their_own(make):
    """With mixup each draw has a share of its own, and shares do not depend on the cut into micro-batches."""
    rows = torch.cat([item.targets for item in epoch(make(mixing=Mixing(1.0, 0.0, 3)), 2)])
    cut = torch.cat([item.targets for item in epoch(make(mixing=Mixing(1.0, 0.0, 3), micro_batch=1), 2)])
    assert torch.equal(rows, cut)
    assert len({tuple(row) for row in rows.tolist()}) > 6


def test_a_bad_file_that_would_come_again_is_told_once(make, tmp_path):
    """It is left out each time, and listed as one file."""
    loader = make(bad_images="skip")
    (tmp_path / "10.png").write_bytes(b"no image")
    items = epoch(loader, 0)
    assert [Path(path).name for path, _ in loader.skipped] == ["10.png"]
    assert sum(len(item.indices) for item in items) in (7, 8)
    assert all(item.batch_images == sum(len(other.indices) for other in items if other.batch_index == item.batch_index) for item in items)
