"""What a folder or a table is taken for, by names and cells alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from hiresvis.data.columns import readings
from hiresvis.data.layout import look
from hiresvis.data.tables import Head, read_head
from hiresvis.errors import DataError

IMAGES = [f"images/{number:02d}.png" for number in range(24)]


def read(given: dict | None = None, **columns: list) -> list[tuple]:
    """(task, label, split, group) of every reading of a table of these columns beside the paths."""
    head = Head(("path", *columns), tuple(zip(IMAGES, *columns.values(), strict=False)))
    return [
        (found.task, found.columns["label"], found.columns.get("split"), found.columns.get("group"))
        for found in readings(head, Path("t.csv"), given or {})
    ]


def cells(*values: object) -> list[str]:
    return [str(values[number % len(values)]) for number in range(24)]


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        ({"label": cells("a", "b")}, ("classify", "label")),
        ({"Class Name": cells("a", "b", "c")}, ("classify", "Class Name")),
        ({"grade": cells(0, 1, 2, 3)}, ("classify", "grade")),
        ({"label": cells(0, 1)}, ("classify", "label")),
        ({"label": [f"{number / 7:.3f}" for number in range(24)]}, ("regress", "label")),
        ({"label": [str(number) for number in range(24)]}, ("regress", "label")),
        ({"kinds": cells("a|b", "b", "")}, ("multilabel", "kinds")),
        ({"wet": cells(0, 1), "cold": cells("True", "false")}, ("multilabel", ("wet", "cold"))),
        ({"wet": cells(0, 1)}, ("classify", "wet")),
        ({"mask_path": [f"masks/{number}.png" for number in range(24)]}, ("segment", "mask_path")),
        ({"mask": cells("masks/1.png", "")}, ("segment", "mask")),
        ({"height_cm": [str(1.5 * number) for number in range(24)]}, ("regress", "height_cm")),
        ({"number": [str(number) for number in range(24)], "colour": cells("red", "blue")}, ("classify", "colour")),
        ({"remark": [f"seen {number}" for number in range(24)], "label": cells("a", "b", "NaN")}, ("classify", "label")),
    ],
)
def test_the_likeliest_reading_comes_first(columns, wanted):
    """By the name of a column where that says it, else by what its cells are."""
    assert read(**columns)[0][:2] == wanted


def test_every_other_reading_follows():
    """Each can be asked for by its task or its label."""
    columns = {"label": cells("a", "b"), "kinds": cells("x|y", ""), "count": [str(number % 9) for number in range(24)]}
    assert [found[:2] for found in read(**columns)] == [("classify", "label"), ("multilabel", "kinds"), ("regress", "count")]
    assert [found[:2] for found in read({"task": "regress"}, **columns)] == [("regress", "count")]
    assert [found[:2] for found in read({"label": "count"}, **columns)] == [("regress", "count")]
    assert [found[:2] for found in read({"label": ("count", "age")}, **columns)] == [("regress", ("count", "age"))]


@pytest.mark.parametrize(
    ("columns", "split", "group"),
    [
        ({"split": cells("train", "val", "test")}, "split", None),
        ({"phase": cells("Training", "DEV")}, "phase", None),
        ({"set": cells("train", "", "test")}, None, None),
        ({"set": cells("test", "val")}, None, None),
        ({"patient": cells(1, 2, 3, 4)}, None, "patient"),
        ({"patient": cells(1, 2, 3, "")}, None, None),
        ({"slide_id": [str(number) for number in range(24)]}, None, None),
    ],
)
def test_splits_and_groups_are_columns_that_are_filled_in_everywhere(columns, split, group):
    """A split names a train; a group has several images, and is one of several."""
    assert read(label=cells("a", "b"), **columns)[0][2:] == (split, group)


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (Head(("id", "label"), (("0a1b", "a"), ("2c3d", "b"))), r"no column names image files \(columns: id, label\)"),
        (Head(("path", "label"), ()), r"has a header \(path, label\) and no rows"),
        (Head(("path", "remark"), (("1.png", "x"), ("2.png", "y"), ("3.png", "z"))), r"no column looks like what the images show"),
    ],
)
def test_a_table_that_says_nothing_of_its_images_is_refused(head, said):
    """With the columns that there are."""
    with pytest.raises(DataError, match=said):
        readings(head, Path("t.csv"), {})


def test_a_region_is_read_where_files_repeat_alone(tmp_path):
    """Four numbers beside images that are there once are something else."""
    boxes = {"x": cells(0, 8), "y": cells(0, 8), "width": cells(8, 9), "height": cells(8, 9), "label": cells("a", "b")}
    rows = tuple(zip(["1.png", "2.png"] * 12, *boxes.values(), strict=True))
    (found, *_) = readings(Head(("path", *boxes), rows), tmp_path / "t.csv", {})
    assert found.columns["region"] == ("x", "y", "width", "height")
    (found, *_) = readings(Head(("path", *boxes), tuple(zip(IMAGES, *boxes.values(), strict=True))), tmp_path / "t.csv", {})
    assert "region" not in found.columns


def test_a_column_that_is_joined_by_another_sign_is_told(tmp_path):
    """It cannot be read as labels, and is no class either."""
    head = Head(("path", "tags", "label"), tuple(zip(IMAGES, cells("a;b", "b", "a;c", "c"), cells("x", "y"), strict=True)))
    found = readings(head, tmp_path / "t.csv", {"label": "label"})
    assert any("joined by ';': written with | they are labels" in note for note in found[0].notes)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_the_head_of_a_table_is_the_same_in_every_format(tmp_path, suffix):
    """Stripped cells by column, as many rows as asked for."""
    if suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"path": ["1.png", "2.png", "3.png"], "n": [1, 2, 3]}), tmp_path / "t.parquet")
    else:
        sign = "," if suffix == ".csv" else "\t"
        text = "\ufeff" + "".join(
            f"{first}{sign} {second}\r\n" for first, second in (("path", "n"), ("1.png", 1), ("2.png", 2), ("3.png", 3))
        )
        (tmp_path / f"t{suffix}").write_text(text, encoding="utf-8", newline="")
    assert read_head(tmp_path / f"t{suffix}", 2) == Head(("path", "n"), (("1.png", "1"), ("2.png", "2")))


def test_masks_in_folders_of_the_splits_are_pairs(make_folders, tmp_path):
    """images/ and masks/ in train/ and val/."""
    for split in ("train", "val"):
        make_folders(f"set/{split}", {"images": 2, "masks": 2})
    (found,) = look(tmp_path / "set", {})
    assert (found.task, found.data["train"], found.data["val"]) == ("segment", tmp_path / "set/train", tmp_path / "set/val")


def test_folders_are_no_classes_where_a_table_says_what_they_hold(make_folders, tmp_path):
    """`images` and `thumbnails` are places, not things."""
    make_folders("set", {"images": 3, "thumbnails": 3})
    names = [f"images/{number:03d}.png,{label}\n" for number, label in enumerate("aab")]
    (tmp_path / "set" / "labels.csv").write_text("path,label\n" + "".join(names))
    (found,) = look(tmp_path / "set", {})
    assert found.data["train"] == tmp_path / "set" / "labels.csv"


def test_a_table_beside_class_folders_is_named(make_folders, tmp_path):
    """It may say more, such as groups; the folders are a whole data set."""
    make_folders("set", {"cat": 3, "dog": 3})
    (tmp_path / "set" / "predictions.csv").write_text("path,label\ncat/000.png,dog\n")
    (found,) = look(tmp_path / "set", {})
    assert found.data["train"] == tmp_path / "set"
    assert any("predictions.csv lies beside" in note for note in found.notes)
