"""Manifests in both formats: the same rows and the same problems, whatever the file."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from hiresvis.data.sources import load_dataset, load_datasets
from hiresvis.errors import DataError, EnvironmentFailed

Write = Callable[..., Path]


@pytest.fixture(params=["csv", "parquet"])
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Write:
    """write(columns, rows) -> the table, with an empty file for each path that does not begin with `missing`."""

    def write(columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "table") -> Path:
        for row in rows:
            if row[0] and not row[0].startswith("missing"):
                (tmp_path / row[0]).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / row[0]).touch()
        path = tmp_path / f"{name}.{request.param}"
        if request.param == "parquet":
            pyarrow.parquet.write_table(pyarrow.table(dict(zip(columns, zip(*rows, strict=True), strict=True))), path)
        else:
            with path.open("w", newline="") as stream:
                csv.writer(stream).writerows([columns, *(["" if cell is None else cell for cell in row] for row in rows)])
        return path

    return write


def place_of(table: Path, row: int) -> str:
    """How messages name a row, counted from 1."""
    return f"{table.name}:{row + 1}" if table.suffix == ".csv" else f"{table.name}:row {row}"


def test_rows_are_read_alike(write: Write) -> None:
    """Paths from the table's folder, columns in any order, others left alone."""
    table = write(["path", "note", "label"], [("my scans/1.png", 7, " b "), ("2.png", None, "a")])
    found = load_dataset(table, classes=("a", "b"))
    assert [(sample.name, sample.label, sample.row) for sample in found.samples] == [
        ("my scans/1.png", 1, place_of(table, 1)),
        ("2.png", 0, place_of(table, 2)),
    ]
    assert all(sample.path.is_file() for sample in found.samples)


def test_every_bad_row_is_told_with_its_place(write: Write) -> None:
    """A missing file, no label, NaN, a repeated image, a split and a group that are none: the same messages in both formats."""
    rows = [
        ("1.png", "a", "train", "g1"),
        ("missing.png", "a", "train", "g2"),
        ("2.png", None, "train", "g3"),
        ("3.png", "NaN", "train", "g4"),
        ("./1.png", "b", "train", "g5"),
        ("4.png", "a", "tarin", "g6"),
        ("5.png", "a", "val", None),
        ("", "a", "val", "g7"),
    ]
    table = write(["path", "label", "part", "site"], rows)
    with pytest.raises(DataError) as caught:
        load_datasets(table, 0.5, split_column="part", group_column="site")
    found = {problem.place: problem.message for problem in caught.value.problems}
    assert list(found) == [place_of(table, row) for row in range(2, 9)]
    for message, part in zip(
        found.values(),
        (
            "no such file",
            "no label in column 'label'",
            "no label in column 'label' (NaN)",
            f"1.png is listed before, at {place_of(table, 1)} with label 'a'",
            "'tarin' in column 'part' is not train, val or test",
            "no group in column 'site'",
            "no path in column 'path'",
        ),
        strict=True,
    ):
        assert part in message


def test_missing_columns_are_told_at_once(write: Write) -> None:
    """With what there is, and the nearest name."""
    table = write(["paths", "y"], [("1.png", "a")])
    with pytest.raises(DataError, match=r"column 'path' is missing; did you mean 'paths'\? \(columns: paths, y\)") as caught:
        load_datasets(table, 0.5, task="regress", label_column=["y", "z"])
    assert [problem.key for problem in caught.value.problems] == ["data.image", "data.label"]


def test_flags_and_numbers_may_be_of_any_type(write: Write) -> None:
    """0 and 1 as numbers, floats or true and false; whole numbers as targets."""
    rows = [(f"{index}.png", index % 2, float(index > 2), index > 4, index) for index in range(8)]
    table = write(["path", "a", "b", "c", "age"], rows)
    flags = load_datasets(table, 0.25, task="multilabel", label_column=["a", "b", "c"])
    by_name = {sample.name: sample.label for split in flags.splits().values() for sample in split.samples}
    assert by_name == {name: (float(a), b, float(c)) for name, a, b, c, _ in rows}
    ages = load_datasets(table, 0.25, task="regress", label_column="age")
    assert {sample.name: sample.label for split in ages.splits().values() for sample in split.samples} == {
        name: (float(age),) for name, *_, age in rows
    }


def test_lists_in_parquet_are_lists_of_names(tmp_path: Path) -> None:
    """A column of lists needs no separator; an empty list is none of the classes, null is no label."""
    (tmp_path / "1.png").touch()
    (tmp_path / "2.png").touch()
    table = pyarrow.table({"path": ["1.png", "2.png"], "tags": [["b", "a"], []]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    found = load_dataset(tmp_path / "t.parquet", classes=("a", "b"), task="multilabel", label_column="tags")
    assert [sample.label for sample in found.samples] == [(1.0, 1.0), (0.0, 0.0)]
    pyarrow.parquet.write_table(table.set_column(1, "tags", pyarrow.array([["a"], None])), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet:row 2  no labels in column 'tags' \(null\)"):
        load_dataset(tmp_path / "t.parquet", classes=("a", "b"), task="multilabel", label_column="tags")


def read_columns(tmp_path: Path, columns: dict[str, Any], **options: Any) -> Any:
    """A parquet table of these columns, with an image for each row, read."""
    names = [f"{number}.png" for number in range(len(next(iter(columns.values()))))]
    for name in names:
        (tmp_path / name).touch()
    pyarrow.parquet.write_table(pyarrow.table({"path": names, **columns}), tmp_path / "t.parquet")
    return load_dataset(tmp_path / "t.parquet", classes=("a", "b"), **options)


def unchecked(*texts: bytes) -> pyarrow.Array:
    """A column of texts that no one held to UTF-8."""
    return pyarrow.Array.from_buffers(pyarrow.string(), len(texts), pyarrow.array(texts, pyarrow.binary()).buffers())


def test_bytes_in_parquet_are_text(tmp_path: Path) -> None:
    """Writers leave out the note that a column is text, in lists too; the names are the same."""
    assert [sample.label for sample in read_columns(tmp_path, {"label": [b"b ", b"a"]}).samples] == [1, 0]
    found = read_columns(tmp_path, {"tags": [[b"b"], [b"a", b"b"]]}, task="multilabel", label_column="tags")
    assert [sample.label for sample in found.samples] == [(0.0, 1.0), (1.0, 1.0)]


@pytest.mark.parametrize("column", [pyarrow.array([b"a", b"\xff1"]), unchecked(b"a", b"\xff1")])
def test_bytes_that_are_no_text_are_told_with_their_row(tmp_path: Path, column: pyarrow.Array) -> None:
    """In a column of bytes, and in one that claims to be text."""
    with pytest.raises(DataError) as caught:
        read_columns(tmp_path, {"label": column})
    assert str(caught.value) == r"t.parquet:row 2  column 'label' holds b'\xff1', which is not UTF-8; save it as text"


@pytest.mark.parametrize(
    ("cell", "task", "part"),
    [
        ({"name": "a"}, "classify", "holds a dict; save it as text or a number"),
        (timedelta(1), "classify", "holds a timedelta; save it as text or a number"),
        (["a", "b"], "classify", "holds a list; only the column of data.task: multilabel takes one"),
        (["a|b"], "multilabel", "holds a list with 'a|b' in it, and | stands between names; rename it"),
        ([""], "multilabel", "holds a list with an empty name in it; an image of no class has an empty list"),
        (["a", None], "multilabel", "holds a list with null in it; an image of no class has an empty list"),
        ([["a"]], "multilabel", "holds a list; only"),
    ],
)
def test_cells_that_are_no_label_are_told_and_not_made_one(tmp_path: Path, cell: Any, task: str, part: str) -> None:
    """Structures, spans of time, lists where there is one class, and names that would be others once joined."""
    with pytest.raises(DataError) as caught:
        read_columns(tmp_path, {"label": [cell]}, task=task)
    assert str(caught.value).startswith(f"t.parquet:row 1  column 'label' {part}")


@pytest.mark.parametrize("content", [b"", b"path,label\n1.png,a\n", b"PAR1 cut"])
def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path, content: bytes) -> None:
    """Empty, a csv under the wrong name, a cut one: the file and the reason."""
    (tmp_path / "t.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"t\.parquet  is not a parquet table: \w"):
        load_datasets(tmp_path / "t.parquet", 0.5)


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine lacks something, and the message says what to type."""
    (tmp_path / "t.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EnvironmentFailed, match=r"pip install 'hiresvis\[parquet\]'"):
        load_datasets(tmp_path / "t.parquet", 0.5)


def test_images_need_not_be_there_for_a_plan(write: Write) -> None:
    """The number of outputs and of images comes from the table alone."""
    table = write(["path", "label"], [(f"missing{index}.png", "abc"[index % 3]) for index in range(12)])
    found = load_datasets(table, 0.25, look_for_files=False)
    assert (found.classes, len(found.train), len(found.val)) == (("a", "b", "c"), 9, 3)
