"""The held-out share of each task: as near to the share as can be, in every stratum, and the same for the same seed."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiresvis.data.folders import Entry, Label, Scan
from hiresvis.data.labels import name_counts
from hiresvis.data.split import split_as_before, split_fraction
from hiresvis.errors import DataError


def scan_of(labels: list[Label], groups: list[str] | None = None) -> Scan:
    return Scan(
        tuple(
            Entry(Path(f"{index}.png"), f"{index}.png", f"t.csv:{index + 2}", label, None if groups is None else groups[index])
            for index, label in enumerate(labels)
        )
    )


def held(scan: Scan, fraction: float, task: str, seed: int = 0) -> tuple[Scan, Scan]:
    train, val, _ = split_fraction(scan, fraction, task=task, seed=seed, place="t.csv")
    return train, val


label_sets = st.lists(st.sets(st.sampled_from("abcde")).map(lambda names: tuple(sorted(names))), min_size=8, max_size=80)


@settings(deadline=None, max_examples=50)
@given(label_sets, st.sampled_from([0.1, 0.2, 0.3, 0.5]), st.integers(0, 5))
def test_no_label_leaves_train_and_each_image_is_on_one_side(labels, fraction, seed):
    """Whatever the combinations; the same call gives the same side for each name."""
    scan = scan_of(labels)
    train, val = held(scan, fraction, "multilabel", seed)
    names = [{entry.name for entry in part.entries} for part in (train, val)]
    assert names[0] | names[1] == {entry.name for entry in scan.entries}
    assert not names[0] & names[1]
    assert set(name_counts(train)) == set(name_counts(scan))
    assert held(Scan(scan.entries[::-1]), fraction, "multilabel", seed)[1].entries == val.entries[::-1]


@pytest.mark.parametrize("fraction", [0.1, 0.25])
def test_rare_labels_keep_their_share_beside_frequent_ones(fraction):
    """1000 images, labels on 2% to 60% of them, drawn independently: every share within one image or a fiftieth of what was asked."""
    rng = random.Random(1)
    rates = {"rare": 0.02, "few": 0.05, "some": 0.2, "most": 0.6}
    labels = [tuple(sorted(name for name, rate in rates.items() if rng.random() < rate)) for _ in range(1000)]
    scan = scan_of(labels)
    _, val = held(scan, fraction, "multilabel")
    total, got = name_counts(scan), name_counts(val)
    for name, count in total.items():
        assert abs(got[name] - fraction * count) <= max(1, 0.02 * count), name
    assert abs(len(val.entries) - fraction * 1000) <= 20
    chance = {entry.name for entry in held(scan, fraction, "multilabel", seed=1)[1].entries}
    assert chance != {entry.name for entry in val.entries}


def test_images_without_a_class_are_shared_out_too():
    """None of the classes is a stratum of its own."""
    _, val = held(scan_of([("a",)] * 40 + [()] * 60), 0.2, "multilabel")
    assert Counter(entry.label for entry in val.entries) == {("a",): 8, (): 12}


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-100, 100), min_size=20, max_size=200, unique=True), st.sampled_from([0.1, 0.2, 0.5]))
def test_a_target_is_held_out_over_its_whole_range(values, fraction):
    """Each tenth of the sorted values gives its share, and all of them together the share that was asked for."""
    train, val = held(scan_of([(value, 0.0) for value in values]), fraction, "regress")
    num_bins = min(10, int(len(values) * fraction))
    bins = {value: rank * num_bins // len(values) for rank, value in enumerate(sorted(values))}
    sizes, taken = Counter(bins.values()), Counter(bins[entry.label[0]] for entry in val.entries)
    assert all(abs(taken[number] - size * len(val.entries) / len(values)) <= 1 for number, size in sizes.items())
    assert len(val.entries) == round(len(values) * fraction)
    assert len(train.entries) + len(val.entries) == len(values)


@pytest.mark.parametrize("task", ["multilabel", "regress"])
def test_groups_stay_whole_in_every_task(task):
    """A patient is on one side, and the share comes near to what was asked."""
    tags: list[Label] = [("a",), ("b", "c"), ("b",), ("a", "c")]
    labels = [(float(index % 7),) if task == "regress" else tags[index % 4] for index in range(200)]
    train, val = held(scan_of(labels, [f"g{index // 4}" for index in range(200)]), 0.2, task)
    assert not {entry.group for entry in train.entries} & {entry.group for entry in val.entries}
    assert 30 <= len(val.entries) <= 50


def test_names_held_out_before_are_held_out_again():
    """Whatever else there is now; those that are gone are an error with their number and a name."""
    scan = scan_of([("a",)] * 6)
    train, val = split_as_before(scan, ["4.png", "1.png"], "t.csv")
    assert [entry.name for entry in val.entries] == ["1.png", "4.png"]
    assert len(train.entries) == 4
    with pytest.raises(DataError, match=r"1 of the 2 images that the run holds out .* the first: 9\.png"):
        split_as_before(scan, ["4.png", "9.png"], "t.csv")


def test_a_label_drawn_away_by_others_goes_back_to_train():
    """In few images with many labels the others may deal all of one label's images to validation."""
    scan = scan_of([("a", "c"), ("d",), (), ("a", "b", "d")])
    train, _ = held(scan, 0.5, "multilabel", seed=1)
    assert name_counts(train).keys() == name_counts(scan).keys()
