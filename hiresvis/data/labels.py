"""What a row says of its image, by task: one class (classify), any number of them (multilabel), or numbers (regress).

A label is first what the table says (`Label`: names, or numbers), and once the classes of train are known what training takes
(`Target`): the index of the class, one 0.0 or 1.0 for each class, or the numbers in their own units. Equal labels are one object, so that
a table of many rows holds each combination once.
"""

from __future__ import annotations

import difflib
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path

from hiresvis.data.folders import Label, Scan
from hiresvis.errors import DataError, Problem

Target = int | tuple[float, ...] | None
SEPARATOR = "|"  # between the names of one image
_LARGEST = 1e30  # of a target: squares and float32 hold it, and what is larger stands for a missing value
_SHOWN = 20  # names in a message
MOST_MASK_CLASSES = 255  # of one byte, whose last value is no class
MISSING_TEXTS = ("", "nan", "<na>")  # of a cell that has no value, in lower case
FLAGS = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}


class LabelReader:
    """Reads the label cells of rows.

    Args:
        task: classify | multilabel | regress | segment.
        label: the column, or a list of columns (multilabel: of 0 and 1; regress: of numbers). Of segment a cell is the mask's path, left as
            it is written; empty: there is nothing but the first class.
    """

    def __init__(self, task: str, label: str | Sequence[str]) -> None:
        self.task = task
        self.columns = (label,) if isinstance(label, str) else tuple(label)
        self.names = self.columns if task == "regress" or not isinstance(label, str) else ()
        self.reads_names = task == "multilabel" and not self.names  # joined in one cell
        self._seen: dict[tuple[str | None, ...], Label] = {}
        self._combinations: dict[Label, Label] = {}

    def __call__(self, cells: tuple[str | None, ...]) -> tuple[Label, list[str]]:
        """The label of one row, or what is wrong with it.

        Args:
            cells: one for each column, stripped; None: null.
        """
        if cells in self._seen:
            return self._seen[cells], []
        problems: list[str] = []
        if self.task == "segment":
            return self._path(cells[0], problems), problems
        if self.task == "regress":
            numbers = [self._number(cell, column, problems) for cell, column in zip(cells, self.columns, strict=True)]
            return tuple(numbers), problems
        if self.task == "classify":
            label: Label = self._class(cells[0], problems)
        elif self.names:
            label = tuple(name for cell, name in zip(cells, self.columns, strict=True) if self._flag(cell, name, problems))
        else:
            label = self._names(cells[0], problems)
        if not problems:
            label = self._seen[cells] = self._combinations.setdefault(label, label)
        return label, problems

    def _class(self, cell: str | None, problems: list[str]) -> str:
        if cell is None or cell.lower() in MISSING_TEXTS:
            problems.append(f"no label in column {self.columns[0]!r}{_kind(cell)}; fill it in, or leave the row out")
        return cell or ""

    def _path(self, cell: str | None, problems: list[str]) -> str:
        if cell is None or (cell and cell.lower() in MISSING_TEXTS):
            text = f"no mask in column {self.columns[0]!r}{_kind(cell)}"
            problems.append(f"{text}; an image of nothing but the first class has an empty text there")
        return cell or ""

    def _names(self, cell: str | None, problems: list[str]) -> tuple[str, ...]:
        if cell == "":
            return ()
        column = self.columns[0]
        if cell is None or cell.lower() in MISSING_TEXTS:
            problems.append(f"no labels in column {column!r}{_kind(cell)}; an image of none of the classes has an empty text there")
            return ()
        names = [name.strip() for name in cell.split(SEPARATOR)]
        if "" in names:
            problems.append(f"{cell!r} in column {column!r} has an empty name; write a{SEPARATOR}b")
        twice = [name for name, count in Counter(names).items() if count > 1 and name]
        if twice:
            problems.append(f"{cell!r} in column {column!r} names {twice[0]!r} twice")
        return tuple(sorted(names))

    @staticmethod
    def _flag(cell: str | None, column: str, problems: list[str]) -> bool:
        flag = None if cell is None else FLAGS.get(cell.lower())
        if flag is None:
            problems.append(f"{cell_text(cell)} in column {column!r} is not 0 or 1")
        return bool(flag)

    @staticmethod
    def _number(cell: str | None, column: str, problems: list[str]) -> float:
        try:
            value = math.nan if cell is None or "_" in cell else float(cell)  # float reads 1_000, and no table means that
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            hint = f"; write {cell.replace(',', '.')}" if cell and re.fullmatch(r"[-+]?\d+,\d+", cell) else ""
            problems.append(f"{cell_text(cell)} in column {column!r} is not a finite number{hint}")
        elif abs(value) > _LARGEST:
            problems.append(f"{cell_text(cell)} in column {column!r} is beyond {_LARGEST:g}; mark what is missing by leaving its row out")
        return value


class Unlabelled:
    """Stands for a `LabelReader` where rows have no labels: what is predicted."""

    task = ""
    columns: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    reads_names = False

    def __call__(self, cells: tuple[str | None, ...]) -> tuple[Label, list[str]]:
        """No label, and nothing wrong with it."""
        del cells
        return None, []


def _kind(cell: str | None) -> str:
    return " (null)" if cell is None else " (NaN)" if cell else ""


def cell_text(cell: str | None) -> str:
    """A cell as messages show it."""
    return "null" if cell is None else "an empty cell" if not cell else repr(cell)


def names_in(label: Label) -> tuple[str, ...]:
    """The classes that a label of classify or multilabel names."""
    return (label,) if isinstance(label, str) else tuple(name for name in label or () if isinstance(name, str))


def label_text(target: Target, task: str, classes: Sequence[str]) -> str:
    """A target as text: `a`, `a|b`, or `3.5|-1.0`; empty where it is not known, or for none of the classes.

    >>> label_text(1, "classify", ("a", "b")), label_text((1.0, 1.0), "multilabel", ("a", "b")), label_text((3.5,), "regress", ("x",))
    ('b', 'a|b', '3.5')
    """
    if target is None:
        return ""
    if isinstance(target, int):
        return classes[target]
    if task == "regress":
        return SEPARATOR.join(map(repr, target))
    return SEPARATOR.join(name for name, flag in zip(classes, target, strict=True) if flag)


def name_counts(scan: Scan) -> Counter[str]:
    """Images of each class that a source names; combinations first, of which there are few."""
    found = Counter[str]()
    for label, number in Counter(entry.label for entry in scan.entries).items():
        found.update(dict.fromkeys(names_in(label), number))
    return found


def class_names(scan: Scan, train: Path, task: str, given: Sequence[str] | None, findings: list[Problem]) -> tuple[str, ...]:
    """The outputs' names in order: the given list; else the columns, or the sorted names of train, empty class folders included.

    Raises:
        DataError: the given list lacks some, names one twice, or a name cannot stand in a list of names.
    """
    if task == "regress":
        return scan.folders
    found = name_counts(scan)
    if given is not None:
        names = tuple(given)
    else:
        names = scan.folders if task == "multilabel" and scan.folders else tuple(sorted({*found, *scan.folders}))
    extra = sorted({*found, *(scan.folders if task == "multilabel" else ())} - set(names))
    if extra:
        counts = ", ".join(f"{name} ({found[name]} images)" for name in extra[:_SHOWN]) + _more(extra)
        raise DataError(
            [Problem(f"data.classes lacks classes that train holds: {counts}; add them or remove the files", str(train), "data.classes")]
        )
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise DataError([Problem(f"given twice: {', '.join(twice)}", key="data.classes")])
    joined = [name for name in names if SEPARATOR in name] if task == "multilabel" else []
    if joined:
        raise DataError([Problem(f"{joined[0]!r} has {SEPARATOR} in it, which stands between names; rename it", str(train), "data.label")])
    findings += [
        Problem(f"class {name!r} has no images; it stays a class, and the model cannot learn it", str(train), "data.train")
        for name in names
        if not found[name]
    ]
    findings += _written_in_two_ways(names, found, train)
    return names


def _written_in_two_ways(names: Sequence[str], found: Mapping[str, int], train: Path) -> Iterator[Problem]:
    """Classes that are one by any reading: `1` and `1.0`, `Cat` and `cat`, as tables of two programs have them."""
    ways: dict[str | float, list[str]] = {}
    for name in names:
        ways.setdefault(_reading(name), []).append(name)
    for same in ways.values():
        if len(same) > 1:
            shown = " and ".join(f"{name!r} ({found[name]} images)" for name in same)
            yield Problem(f"{shown} are classes of their own; write them alike if they are one", str(train), "data.label")


def _reading(name: str) -> str | float:
    try:
        return float(name)
    except ValueError:
        return " ".join(name.replace("_", " ").split()).casefold()


def refuse_flags_as_names(scan: Scan, train: Path, column: str | Sequence[str]) -> None:
    """A single column of multilabel that holds 0 or 1 in every row: a yes or no, of which nobody wants two classes called 0 and 1.

    Raises:
        DataError: so it is.
    """
    labels = Counter(entry.label for entry in scan.entries)
    if not isinstance(column, str) or not all(len(names := names_in(label)) == 1 and names[0].lower() in FLAGS for label in labels):
        return
    counts = " and ".join(f"{names_in(label)[0]} in {number}" for label, number in sorted(labels.items(), key=lambda item: str(item[0])))
    classes = ", ".join(sorted(f'"{names_in(label)[0]}"' for label in labels))
    text = (
        f"column {column!r} says {counts} rows and no names; for a class {column!r} that is there or not, write data.label: [{column}]; "
        f"for classes that are called so, data.classes: [{classes}]"
    )
    raise DataError([Problem(text, str(train), "data.label")])


def mask_classes(
    scan: Scan, train: Path, given: Sequence[str] | None, read_values: Callable[[Sequence[Path]], Iterable[int]]
) -> tuple[str, ...]:
    """The classes of masks in the order of their values: the given list; else classes.txt; else the values that the masks of train hold.

    Raises:
        DataError: fewer than two, more than a mask of one byte can tell apart, or one of them twice.
    """
    names = tuple(given) if given is not None else scan.folders
    if not names:
        found = set(read_values([entry.mask for entry in scan.entries if entry.mask is not None]))
        names = tuple(map(str, sorted(found)))
    key = "data.classes" if given is not None else "data.train"
    if len(names) < 2:
        found_text = f"the masks hold the value {names[0]} alone" if names else "no mask holds a class"
        text = f"{names[0] if names else 'none'} is the only class" if given is not None else f"{found_text}, the ignored one aside"
        mend = "two are needed to tell apart; data.ignore_index says which value is ignored, 255 where nothing is given"
        raise DataError([Problem(f"{text}; {mend}", str(train), key)])
    if len(names) > MOST_MASK_CLASSES:
        text = (
            f"{len(names)} classes, from {names[0]} to {names[-1]}, and {MOST_MASK_CLASSES} are the most; numbers of objects are no classes"
        )
        raise DataError([Problem(text, str(train), key)])
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise DataError([Problem(f"given twice: {', '.join(twice)}", key="data.classes")])
    return names


def without_unseen(scan: Scan, split: str, classes: tuple[str, ...], unseen: str, findings: list[Problem], problems: list[Problem]) -> Scan:
    """The scan without the labels that train lacks; what they are goes to `findings` (drop) or `problems` (error)."""
    known = set(classes)
    strange = {name: count for name, count in name_counts(scan).items() if name not in known}
    if not strange:
        return scan
    kept = tuple(entry for entry in scan.entries if known.issuperset(names_in(entry.label)))
    parts = []
    for name, count in sorted(strange.items())[:_SHOWN]:
        near = [known_name for known_name in classes if _reading(known_name) == _reading(name)]
        near = near or difflib.get_close_matches(name, classes, n=1, cutoff=0.6)
        parts.append(f"{name!r} ({count} images{f'; did you mean {near[0]!r}?' if near else ''})")
    there = ", ".join(map(repr, classes[:_SHOWN])) + _more(classes)
    text = f"labels that train lacks: {', '.join(parts)}{_more(strange)}; train has {there}"
    if unseen == "drop":
        findings.append(Problem(f"{len(scan.entries) - len(kept)} images dropped, {text}", key=f"data.{split}"))
    else:
        problems.append(
            Problem(
                f"{text}. Correct the labels, or set data.unseen: drop (evaluate --data: --unseen drop) to leave these images out",
                key=f"data.{split}",
            )
        )
    return replace(scan, entries=kept)


def _more(names: Sized) -> str:
    """A column taken by mistake has as many classes as rows: a message shows some."""
    return f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""


def targets_of(labels: Iterable[Label], task: str, classes: Sequence[str]) -> list[Target]:
    """The labels as training takes them."""
    if task == "regress":
        return [None if label is None else label for label in labels]  # type: ignore[misc]
    index = {name: position for position, name in enumerate(classes)}
    known: dict[Label, Target] = {None: None}

    def target(label: Label) -> Target:
        if isinstance(label, str):
            return index[label]
        on = set(names_in(label))
        return tuple(float(name in on) for name in classes)

    found: list[Target] = []
    for label in labels:
        if label not in known:
            known[label] = target(label)
        found.append(known[label])
    return found


def constant_targets(values: Sequence[tuple[float, ...]], names: Sequence[str], place: str) -> list[Problem]:
    """Targets that have one value in all of train: there is nothing to learn, and no deviation to scale by."""
    return [
        Problem(f"target {name!r} is {values[0][position]:g} in every row; a regression needs different values", place, "data.label")
        for position, (name, std) in enumerate(zip(names, mean_and_std(values)[1], strict=True))
        if not std > 0
    ]


def mean_and_std(values: Sequence[tuple[float, ...]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and population standard deviation of each target: exactly rounded sums, so that the order of rows changes no bit."""
    means, stds = [], []
    for column in zip(*values, strict=True):
        means.append(math.fsum(column) / len(column))
        stds.append(math.sqrt(math.fsum((value - means[-1]) ** 2 for value in column) / len(column)))
    return tuple(means), tuple(stds)


def spread_of(values: Sequence[float]) -> list[float]:
    """[min, median, max], or nothing."""
    return [min(values), statistics.median(values), max(values)] if values else []
