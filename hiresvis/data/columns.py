"""What the columns of a table may be, by their names and the values of the first rows: image, label, split, group, region.

Only proposals come of it, the likeliest first. Whether a table can be read by one of them is for its reader to say (manifest.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hiresvis.data.folders import SPLIT_WORDS, is_image_name
from hiresvis.data.labels import FLAGS, MISSING_TEXTS, SEPARATOR
from hiresvis.data.tables import Head
from hiresvis.errors import DataError, Problem

MOST_ROWS = 20_000  # that are looked at
_MOST_CLASSES = 50  # of whole numbers in a column named as a label; more are values
_IMAGES = ("path", "image_path", "img_path", "file_path", "filepath", "image", "img", "file", "filename", "file_name", "image_file")
_LABELS = ("label", "labels", "class", "class_name", "classes", "category", "target", "diagnosis", "grade", "y")
_GROUPS = ("group", "patient", "patient_id", "subject", "subject_id", "slide", "slide_id", "case", "case_id", "site", "lot", "specimen")
_MASK_WORDS = ("mask", "segmentation", "annotation", "ground_truth")
_REGION = ("x", "y", "width", "height")
_SPLITS = ("split", "set", "subset", "partition", "fold", "phase")
_OTHER_SEPARATORS = (";", ",", "/", " ")


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read a table, in the words of a recipe.

    Attributes:
        columns: of data.image, data.label, data.split, data.group and data.region, those that there are.
        reasons: why, for task and for the keys of `columns`.
    """

    task: str
    columns: Mapping[str, str | tuple[str, ...]]
    reasons: Mapping[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    values: tuple[str, ...]  # without the missing ones
    num_missing: int
    counts: Counter[str] = field(repr=False)

    @property
    def plain(self) -> str:
        """The name as it is compared."""
        return "_".join(self.name.casefold().replace("-", " ").replace("_", " ").split())

    @property
    def kind(self) -> str:
        """images | flags | whole | numbers | joined | names | nothing, by what most or all of its values are."""
        if not self.values:
            return "nothing"
        if sum(map(is_image_name, self.values)) >= 0.9 * len(self.values):
            return "images"
        if all(value.casefold() in FLAGS for value in self.counts):
            return "flags"
        if all(map(_is_number, self.counts)):
            return "whole" if all(float(value).is_integer() for value in self.counts) else "numbers"
        return "joined" if any(SEPARATOR in value for value in self.counts) else "names"

    def says(self, words: Sequence[str]) -> bool:
        """Whether it is called so."""
        return self.plain in words


def readings(head: Head, table: Path, given: Mapping[str, str | tuple[str, ...]]) -> tuple[Reading, ...]:
    """Every way to read the table, the likeliest first; at least one.

    Args:
        table: where it is, for messages and to tell images that are there.
        given: columns of data.image, data.label, ... that are settled, and the task where that is.

    Raises:
        DataError: no column names images, or none says anything of them; with the columns that there are.
    """
    columns = [_column(name, [row[place] for row in head.rows]) for place, name in enumerate(head.columns)]
    there = ", ".join(head.columns)
    if not head.rows:
        raise DataError([Problem(f"has a header ({there}) and no rows; each row after it is an image", str(table))])
    image = _image_column(columns, table, given.get("image"))
    if image is None:
        text = f"no column names image files (columns: {there}); one has to, as images/001.png, from the table's own folder"
        raise DataError([Problem(text, str(table))])
    rest = [column for column in columns if column is not image]
    found: dict[str, str | tuple[str, ...]] = {"image": image.name}
    reasons = {"image": "the column that names image files"}
    for key, pick, why in (
        ("split", _split_column(rest), "it says train, val or test of each row"),
        ("group", _group_column(rest, len(head.rows)), "rows of one group stay together: never on both sides of a split"),
    ):
        if (name := given.get(key, None if pick is None else pick.name)) is not None:
            found[key], reasons[key] = name, why
    region = _region_columns(rest, image, given.get("region"))
    if region is not None:
        found["region"], reasons["region"] = region, "several rows are parts of one file"
    taken = {name for value in found.values() for name in ((value,) if isinstance(value, str) else value)}
    rest = [column for column in rest if column.name not in taken]
    ways = list(_labels(rest, len(head.rows)))
    if (label := given.get("label")) is not None:
        ways = [way for way in ways if way[1] == label] or [(_task_of(rest, label), label, "given")]
    task = given.get("task")
    ways = [way for way in ways if task in (None, way[0])]
    if not ways:
        what = "what the images show" if task is None else f"labels for task {task}"
        text = f"no column looks like {what} (columns: {there}); name one: data.label=COLUMN"
        raise DataError([Problem(text, str(table), "data.label")])
    notes = tuple(_hints(rest, ways))
    return tuple(Reading(task, {**found, "label": label}, {**reasons, "task": why, "label": why}, notes) for task, label, why in ways)


def _column(name: str, cells: Sequence[str | None]) -> _Column:
    values = tuple(cell for cell in cells if cell is not None and cell.casefold() not in MISSING_TEXTS)
    return _Column(name, values, len(cells) - len(values), Counter(values))


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and "_" not in text
    except ValueError:
        return False


def _image_column(columns: Sequence[_Column], table: Path, given: object) -> _Column | None:
    """The one given, called so, or the first whose images are there; a column of masks is none."""
    if given is not None:
        return next((column for column in columns if column.name == given), None)
    able = [column for column in columns if column.kind == "images" and not _is_mask(column)]
    rank = {name: number for number, name in enumerate(_IMAGES)}
    able.sort(key=lambda column: (not _is_there(table, column.values[0]), rank.get(column.plain, len(rank))))
    return able[0] if able else None


def _is_there(table: Path, written: str) -> bool:
    return "\0" not in written and (table.parent / written.replace("\\", "/")).exists()


def _is_mask(column: _Column) -> bool:
    return any(word in column.plain for word in _MASK_WORDS)


def _split_column(columns: Sequence[_Column]) -> _Column | None:
    """Every row says train, val or test, by whatever name; one called so, or any that has a train."""
    able = [column for column in columns if not column.num_missing and {value.casefold() for value in column.counts} <= SPLIT_WORDS.keys()]
    able = [column for column in able if any(SPLIT_WORDS[value.casefold()] == "train" for value in column.counts)]
    return next((column for column in able if column.says(_SPLITS)), able[0] if able else None)


def _group_column(columns: Sequence[_Column], num_rows: int) -> _Column | None:
    """One called so, filled in everywhere, of more than two groups that are not one for each row."""
    able = (column for column in columns if column.says(_GROUPS) and not column.num_missing)
    return next((column for column in able if 2 < len(column.counts) < num_rows), None)


def _region_columns(columns: Sequence[_Column], image: _Column, given: object) -> tuple[str, ...] | None:
    if isinstance(given, tuple):
        return given
    named = {column.plain: column.name for column in columns if column.kind in ("whole", "flags")}
    repeated = len(image.counts) < len(image.values)
    return tuple(named[key] for key in _REGION) if repeated and all(key in named for key in _REGION) else None


def _labels(columns: Sequence[_Column], num_rows: int) -> Iterator[tuple[str, str | tuple[str, ...], str]]:
    """(task, label, why) of every column or set of columns that can be learnt."""
    named = sorted((column for column in columns if column.says(_LABELS)), key=lambda column: _LABELS.index(column.plain))
    others = [column for column in columns if column not in named]
    for column in named:
        if (way := _way(column, num_rows, named=True)) is not None:
            yield way
    flags = tuple(column.name for column in others if column.kind == "flags" and not column.num_missing and len(column.counts) == 2)
    if len(flags) > 1:
        yield "multilabel", flags, f"{len(flags)} columns of 0 and 1"
    for kind in ("joined", "names", "images", "numbers", "whole"):
        for column in others:
            if column.kind == kind and (way := _way(column, num_rows, named=False)) is not None:
                yield way
    if len(flags) == 1:
        yield "classify", flags[0], f"column {flags[0]} is 0 or 1"


def _way(column: _Column, num_rows: int, *, named: bool) -> tuple[str, str, str] | None:
    """(task, label, why) of one column, or None where nothing can be learnt from it."""
    kind, number, name = column.kind, len(column.counts), column.name
    if kind == "joined":
        return "multilabel", name, f"column {name} joins names by {SEPARATOR}"
    if kind == "images":
        return ("segment", name, f"column {name} names masks") if _is_mask(column) else None
    if number < 2:
        return None
    if kind in ("numbers", "whole") and not (named and kind == "whole" and number <= min(_MOST_CLASSES, num_rows // 2)):
        is_count_of_rows = kind == "whole" and number == num_rows and not named
        return None if is_count_of_rows or column.num_missing else ("regress", name, f"column {name} holds {number} different numbers")
    if number > max(2, num_rows // (2 if named else 5)):
        return None
    return "classify", name, f"column {name} holds {number} different values"


def _task_of(columns: Sequence[_Column], label: str | tuple[str, ...]) -> str:
    """Of columns that were given and are no likely ones."""
    kinds = {column.kind for column in columns if column.name in ((label,) if isinstance(label, str) else label)}
    if isinstance(label, str):
        return "segment" if kinds == {"images"} else "classify"
    return "multilabel" if kinds == {"flags"} else "regress"


def _hints(columns: Sequence[_Column], ways: Sequence[tuple[str, str | tuple[str, ...], str]]) -> Iterator[str]:
    """What else a column may mean that cannot be read as it is: several names in a cell, joined by another sign."""
    for column in columns:
        if column.kind != "names" or column.name in (label for _, label, _ in ways):
            continue
        for sign in _OTHER_SEPARATORS:
            parts = Counter(part.strip() for value in column.values for part in value.split(sign))
            if any(sign in value for value in column.counts) and len(parts) < len(column.counts):
                yield f"column {column.name} may hold several names joined by {sign!r}: written with {SEPARATOR} they are labels"
                break
