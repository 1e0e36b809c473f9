"""What is proposed for images: a size that keeps their shape, classes that count alike, groups that names tell of."""

from __future__ import annotations

from pathlib import Path

import pytest

from hiresvis.data.sources import Dataset, Datasets, Sample
from hiresvis.data.survey import Look
from hiresvis.new.images import balanced, fitted, named_groups, sized_batch


def look(*sizes: tuple[int, int]) -> Look:
    return Look(sizes, {"JPEG": len(sizes)}, {8: len(sizes)}, 0)


@pytest.mark.parametrize(
    ("sizes", "most_px", "fit", "image_size"),
    [
        ([(1024, 1024)] * 3, 2048, "resize", 1024),
        ([(3000, 4000)] * 3, 2048, "resize", [1536, 2048]),
        ([(720, 1280)] * 3, 2048, "resize", [704, 1280]),
        ([(3000, 4000), (4000, 3000), (3000, 3000)], 2048, "letterbox", 2048),
        ([(500, 333), (333, 500)], 2048, "letterbox", 512),
        ([(30000, 20000)] * 3, 2048, "tile", 1024),
        ([(30000, 20000)] * 3, 512, "tile", 512),
        ([(20, 30)], 2048, "resize", 64),
    ],
)
def test_the_size_follows_the_images(sizes, most_px, fit, image_size):
    """One shape is kept, several are padded, huge ones are read in windows; a multiple of 32 within the limit, each with its reason."""
    found = fitted(look(*sizes), most_px)
    assert (found["data.fit"].value, found["model.image_size"].value) == (fit, image_size)
    assert all(line.why for line in found.values())


def dataset(counts: dict[str, int], names: str = "{label}_{number}.png", task: str = "classify") -> Dataset:
    classes = tuple(counts)
    samples = [
        Sample(Path("x"), classes.index(label), "x", name=f"{label}/{names.format(label=label, number=number)}")
        for label, count in counts.items()
        for number in range(count)
    ]
    return Dataset(tuple(samples), classes, task=task)


@pytest.mark.parametrize(
    ("counts", "weighted"), [({"a": 10, "b": 39}, False), ({"a": 10, "b": 40}, True), ({"a": 0, "b": 5, "c": 5}, False)]
)
def test_classes_of_unequal_size_count_alike(counts, weighted):
    """From four times the smallest; a class without images is no measure."""
    assert ("data.balance" in balanced(dataset(counts))) is weighted


@pytest.mark.parametrize(
    "names", ["p{number}{label}_1.png", "{number}.png", "board_{number}.png", "board2_{number}.png", "{label}.x_{number}"]
)
def test_names_that_tell_of_no_groups_say_nothing(names):
    """One for each image, or one for all."""
    whole = dataset({"a": 12, "b": 12}, names)
    assert named_groups(Datasets(whole, Dataset((), whole.classes), None, whole.classes), is_table=False) == []


def test_groups_on_both_sides_of_a_split_are_counted():
    """`p3_x.png` in train and in val."""
    samples = tuple(Sample(Path("x"), 0, "x", name=f"a/p{number // 4}_{number}.png") for number in range(24))
    train, val = Dataset(samples[:18], ("a",)), Dataset(samples[18:], ("a",))
    (text,) = named_groups(Datasets(train, val, None, ("a",)), is_table=False)
    assert "names begin in 6 ways (p0, p1, ...), 4.0 images each" in text
    assert "1 are on both sides of a split now" in text


@pytest.mark.parametrize(("num_train", "batch"), [(1000, 16), (64, 16), (63, 8), (20, 4), (3, 2)])
def test_a_batch_is_at_most_a_quarter_of_the_images(num_train, batch):
    """Down to two."""
    assert sized_batch(num_train, 16) == batch
