"""A run knows its own data again, and says what is different about other."""

from __future__ import annotations

import csv
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hiresvis.data.sources import Dataset, Datasets, Sample
from hiresvis.errors import RunFolderError
from hiresvis.own_data import SAMPLES, fingerprints, keep_data, read_held_out, refuse_other_data
from hiresvis.run import RunDirectory

CLASSES = ("cat", "dog")
ODD = ("with, comma.png", 'with "quotes".png', "two\nlines.png", "carriage\r.png", "\u00e9.png", os.fsdecode(b"\xff\xfe.png"))


def split(*names: str, dogs: tuple[str, ...] = ()) -> Dataset:
    return Dataset(tuple(Sample(f"/data/{name}", int(name in dogs), f"/data/{name}", name=name) for name in names), CLASSES)


def data(train: Dataset, val: Dataset, *, is_drawn: bool = False) -> Datasets:
    return Datasets(train, val, None, CLASSES, is_drawn=is_drawn)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", "task: classify\n", need_bytes=0)


def test_own_data_in_any_order_is_own(run: RunDirectory) -> None:
    """Names as file systems have them come back as they were."""
    own = data(split("1.png", *ODD, dogs=ODD[:2]), split("1.png"), is_drawn=True)
    keep_data(run, own)
    refuse_other_data(run, fingerprints(own), data(split(*ODD[::-1], "1.png", dogs=ODD[:2]), split("1.png")))
    with pytest.raises(RunFolderError, match=r"data\.train: 7 files when the run was begun, 6 now: 1 gone \(1\.png\)\. Resume"):
        refuse_other_data(run, fingerprints(own), data(split(*ODD, dogs=ODD[:2]), split("1.png")))
    assert read_held_out(run) == ("1.png",)


def test_what_differs_is_named_split_by_split(run: RunDirectory) -> None:
    """New, gone and labelled otherwise, the first three of each; a split that is the same is not spoken of."""
    own = data(split(*(f"{number}.png" for number in range(9)), dogs=("0.png",)), split("a.png", "b.png"))
    keep_data(run, own)
    other = data(split("0.png", "1.png", "x.png", dogs=("1.png",)), own.val)
    with pytest.raises(RunFolderError) as caught:
        refuse_other_data(run, fingerprints(own), other)
    assert str(caught.value).startswith(
        f"{run.root}: data.train: 9 files when the run was begun, 3 now: 1 new (x.png), 7 gone (2.png; 3.png; 4.png; 4 more), "
        "2 labelled otherwise (0.png: dog, now cat; 1.png: cat, now dog). Resume"
    )
    moved = data(replace(own.train, samples=own.train.samples[1:]), replace(own.val, samples=(*own.val.samples, own.train.samples[0])))
    with pytest.raises(RunFolderError, match=r"8 now: 1 gone \(0\.png\); data\.val: 2 files when .*, 3 now: 1 new \(0\.png\)\. Resume"):
        refuse_other_data(run, fingerprints(own), moved)


@pytest.mark.parametrize("content", [None, b"", b"no table", b"split,name\n1,2\n", b"a,b,c\n1,2,3\n", b"split,name,label\ntrain,x\n"])
def test_without_a_list_the_counts_are_said(run: RunDirectory, content: bytes | None) -> None:
    """A run of an earlier release, a damaged file, another one in its place: the data is refused all the same."""
    own = data(split(*(f"{number}.png" for number in range(40))), split("a.png"))
    keep_data(run, own)
    run.path(SAMPLES).unlink()
    if content is not None:
        run.path(SAMPLES).write_bytes(content)
    with pytest.raises(RunFolderError, match=r"data\.val: 1 files when the run was begun, as many, with other names or classes\. Resume"):
        refuse_other_data(run, fingerprints(own), data(own.train, split("b.png")))


def test_the_list_is_a_table_that_others_read(run: RunDirectory) -> None:
    """A header and a row for each sample, and the same bytes for the same data."""
    own = data(split("1.png", "2, 3.png", dogs=("1.png",)), split("a.png"))
    keep_data(run, own)
    with run.path(SAMPLES).open(encoding="utf-8", newline="") as stream:
        header, *rows = csv.reader(stream)
    assert header == ["split", "name", "label"]
    assert rows == [["train", "1.png", "dog"], ["train", "2, 3.png", "cat"], ["val", "a.png", "cat"]]
    before = run.path(SAMPLES).read_bytes()
    keep_data(run, own)
    assert run.path(SAMPLES).read_bytes() == before
