"""From folders and tables to lists of samples: what is an image, what is its label, and which split holds it.

Two layouts are read: class folders (`train/cat/001.jpg`, see folders.py) and csv manifests (see manifest.py). Everything that can be
known without opening an image is checked here, and all problems are reported at once. Class names come from the training data alone
(or from an ordered list that the user gives), are matched by name, and their order is part of the result.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hiresvis.data.folders import Entry, Scan, scan_class_folders, scan_unlabelled
from hiresvis.data.manifest import read_manifest
from hiresvis.data.regions import Region
from hiresvis.data.split import split_fraction
from hiresvis.errors import DataError, Problem

MANIFEST_SUFFIXES = (".csv", ".tsv")
MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One image file, or a region of it, and what is known about it.

    Attributes:
        path: where the file is.
        label: index into the classes; None where the label is not known (prediction).
        row: the place for messages: `train.csv:17`, or the path.
        group: patient, slide or site; never on both sides of a split.
        name: the path below the folder or as the table writes it, with forward slashes; with the region, where there is one.
        region: the part of the file that the sample is; None: all of it.
    """

    path: Path
    label: int | None
    row: str
    group: str | None = None
    name: str = ""
    region: Region | None = None

    @property
    def title(self) -> str:
        """What tells it from all others, for people: the path, with the region where there is one."""
        return str(self.path) if self.region is None else f"{self.path}[{self.region}]"


@dataclass(frozen=True, slots=True)
class Dataset:
    """The samples of one split, in a fixed order, and what was passed over to get them.

    Attributes:
        samples: in the order of relative paths (folders) or of rows (tables).
        classes: the names, in the order that labels count in.
        ignored: hidden and system files and folders (`.ipynb_checkpoints/`, `Thumbs.db`), by relative path.
        skipped_extensions: extension -> number of files that are no images by name.
        warnings: lines for people.
    """

    samples: tuple[Sample, ...]
    classes: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    skipped_extensions: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.samples)

    def fingerprint(self) -> dict[str, Any]:
        """What tells this set from another: the number of files, and a hash of their names and classes, whatever their order."""
        rows = sorted(f"{sample.name}\t{'' if sample.label is None else self.classes[sample.label]}\n" for sample in self.samples)
        return {"files": len(rows), "sha256": hashlib.sha256("".join(rows).encode("utf-8", "surrogateescape")).hexdigest()}

    def class_counts(self) -> dict[str, int]:
        """Samples per class, every class named, in the order of the classes."""
        counts = Counter(sample.label for sample in self.samples)
        return {name: counts.get(index, 0) for index, name in enumerate(self.classes)}


@dataclass(frozen=True, slots=True)
class Datasets:
    """All splits with one list of classes. `findings` are warnings; what is an error was raised."""

    train: Dataset
    val: Dataset
    test: Dataset | None
    classes: tuple[str, ...]
    findings: tuple[Problem, ...] = ()

    def splits(self) -> dict[str, Dataset]:
        """The splits that exist, by name: train, val, test."""
        found = {"train": self.train, "val": self.val}
        return found if self.test is None else {**found, "test": self.test}


def load_datasets(
    train: Path,
    val: Path | float,
    test: Path | None = None,
    *,
    image_column: str = "path",
    label_column: str = "label",
    split_column: str | None = None,
    group_column: str | None = None,
    region_columns: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    seed: int = 0,
    unseen: str = "error",
) -> Datasets:
    """Reads all splits of a classification data set.

    Args:
        train: a folder of class folders, or a csv manifest.
        val: another one, or the share of `train` to hold out: stratified by class, whole groups only, the same files for the same
            seed whatever order the file system lists them in.
        test: another one, or None.
        image_column, label_column, split_column, group_column: columns of the manifests. Where `split_column` is given, the manifest
            `train` holds all splits, and a `val` that is a share applies only when no row says val.
        region_columns: columns of the manifests with x, y, width and height of the part of the file that a row means.
        classes: ordered class names; None: the sorted names found in `train`.
        seed: of the held-out share.
        unseen: "error" or "drop": what to do with labels of val and test that train lacks.

    Raises:
        DataError: with everything that was found, places and counts.
    """
    reader = _Reader(image_column, label_column, group_column, region_columns)
    scans, unread = _read_sources(reader, {"train": train, "val": val, "test": test}, split_column)
    if unread:
        raise DataError(unread)
    findings: list[Problem] = []
    if split_column is not None:
        if train.is_dir():
            raise DataError(
                f"data.split names the column {split_column!r}, and {train} is a folder; give a csv manifest or remove data.split"
            )
        scans = {**scans, **_by_split_column(scans["train"], train, val, test, findings)}
    names = _class_names(scans["train"], train, classes, findings)
    if "val" not in scans:
        assert not isinstance(val, Path)
        scans["train"], scans["val"], notes = split_fraction(scans["train"], float(val), names, seed=seed, place=str(train))
        findings += [Problem(note, str(train), "data.val") for note in notes]
    _check_groups(scans)
    datasets = {"train": _to_dataset(scans["train"], names)}
    problems: list[Problem] = []
    for name in ("val", "test"):
        if name in scans:
            datasets[name] = _to_dataset(_without_unseen(scans[name], name, names, unseen, findings, problems), names)
            if not problems and not datasets[name].samples:
                problems.append(Problem("holds no images", f"data.{name}"))
    if len(names) == 1:
        lone = f"{names[0]!r} is the only class; a classifier needs two: add images of another"
        problems.insert(0, Problem(lone, str(train), "data.train"))
    if problems:
        raise DataError(problems)
    for name, dataset in datasets.items():
        findings += [Problem(text, key=f"data.{name}") for text in dataset.warnings]
    return Datasets(datasets["train"], datasets["val"], datasets.get("test"), names, tuple(findings))


def load_dataset(
    source: Path,
    *,
    classes: Sequence[str],
    image_column: str = "path",
    label_column: str = "label",
    region_columns: Sequence[str] | None = None,
    unseen: str = "error",
) -> Dataset:
    """Reads one labelled source against classes that are fixed already (the evaluate command).

    Raises:
        DataError: as `load_datasets`.
    """
    scan = _Reader(image_column, label_column, None, region_columns).read(source, None)
    problems: list[Problem] = []
    findings: list[Problem] = []
    kept = _without_unseen(scan, "data", tuple(classes), unseen, findings, problems)
    if problems:
        raise DataError(problems)
    dataset = _to_dataset(kept, tuple(classes))
    if not dataset.samples:
        raise DataError(f"{source} holds no images of the classes {', '.join(classes)}")
    return replace(dataset, warnings=(*dataset.warnings, *(finding.message for finding in findings)))


def load_unlabelled(paths: Sequence[Path]) -> Dataset:
    """Images for prediction: files as given, folders with everything below them. Labels are None.

    Raises:
        DataError: a path that does not exist, or no image at all.
    """
    missing = [Problem("does not exist", str(path)) for path in paths if not os.path.lexists(path)]
    if missing:
        raise DataError(limited(missing))
    scan = scan_unlabelled(paths)
    if not scan.entries:
        raise DataError(f"no images in {', '.join(str(path) for path in paths)}{_skipped_text(scan)}")
    return _to_dataset(scan, ())


def limited(problems: Sequence[Problem], limit: int = MAX_PROBLEMS) -> list[Problem]:
    """The first problems, and one that counts the rest."""
    rest = len(problems) - limit
    return [*problems] if rest <= 0 else [*problems[:limit], Problem(f"... and {rest} more of these")]


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads either layout with one set of column names."""

    image_column: str
    label_column: str
    group_column: str | None
    region_columns: Sequence[str] | None

    def read(self, source: Path, split_column: str | None) -> Scan:
        if not source.exists():
            near = difflib.get_close_matches(source.name, _siblings(source), n=1)
            hint = f"; did you mean {source.parent / near[0]}?" if near else ""
            raise DataError([Problem(f"does not exist{hint}", str(source))])
        if source.is_dir():
            if self.group_column is not None:
                raise DataError(
                    f"data.group names the column {self.group_column!r}, and {source} is a folder; give a csv manifest or remove data.group"
                )
            if self.region_columns is not None:
                columns = ", ".join(self.region_columns)
                raise DataError(
                    f"data.region names the columns {columns}, and {source} is a folder; give a csv manifest or remove data.region"
                )
            return scan_class_folders(source)
        if source.suffix.lower() not in MANIFEST_SUFFIXES:
            known = "a folder of class folders, a .csv or a .tsv manifest"
            raise DataError([Problem(f"a {source.suffix or 'nameless'} file is no data source; known are {known}", str(source))])
        scan, problems = read_manifest(
            source,
            image_column=self.image_column,
            label_column=self.label_column,
            group_column=self.group_column,
            split_column=split_column,
            region_columns=self.region_columns,
        )
        if problems:
            raise DataError(limited(problems))
        return scan


def _read_sources(
    reader: _Reader, sources: Mapping[str, Path | float | None], split_column: str | None
) -> tuple[dict[str, Scan], list[Problem]]:
    """The sources that can be read, and what is wrong with the others, each once."""
    scans: dict[str, Scan] = {}
    problems: list[Problem] = []
    for name, source in sources.items():
        if not isinstance(source, Path):
            continue
        try:
            scans[name] = reader.read(source, split_column if name == "train" else None)
        except DataError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    return scans, problems


def _siblings(source: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(source.parent)]
    except OSError:
        return []


def _by_split_column(scan: Scan, train: Path, val: Path | float, test: Path | None, findings: list[Problem]) -> dict[str, Scan]:
    """One manifest cut by its split column. A path for a split that the column fills too is an error."""
    parts = {name: [entry for entry in scan.entries if entry.split == name] for name in ("train", "val", "test")}
    problems = [
        Problem(f"{len(parts[name])} rows of {train} say {name}, and data.{name} names {source}; keep one of the two", key=f"data.{name}")
        for name, source in (("val", val), ("test", test))
        if isinstance(source, Path) and parts[name]
    ]
    if not parts["train"]:
        counts = ", ".join(f"{name} {len(rows)}" for name, rows in parts.items())
        problems.append(Problem(f"no row says train in the split column ({counts})", str(train), "data.split"))
    if problems:
        raise DataError(problems)
    if parts["val"] and not isinstance(val, Path):
        findings.append(
            Problem(f"validation comes from the split column ({len(parts['val'])} rows), not from a share", str(train), "data.val")
        )
    return {name: replace(scan, entries=tuple(rows)) for name, rows in parts.items() if rows or name == "train"}


def _class_names(scan: Scan, train: Path, given: Sequence[str] | None, findings: list[Problem]) -> tuple[str, ...]:
    """The classes in order: the given list, or the sorted names of train, empty class folders included."""
    if not scan.entries:
        raise DataError([Problem(f"holds no images{_skipped_text(scan)}", str(train), "data.train")])
    found = Counter(str(entry.label) for entry in scan.entries)
    names = tuple(given) if given is not None else tuple(sorted({*found, *scan.folders}))
    extra = sorted(set(found) - set(names))
    if extra:
        counts = ", ".join(f"{name} ({found[name]} images)" for name in extra)
        raise DataError(
            [Problem(f"data.classes lacks classes that train holds: {counts}; add them or remove the files", str(train), "data.classes")]
        )
    if len(set(names)) != len(names):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        raise DataError([Problem(f"given twice: {', '.join(twice)}", key="data.classes")])
    findings += [
        Problem(f"class {name!r} has no images; it stays a class, and the model cannot learn it", str(train), "data.train")
        for name in names
        if not found[name]
    ]
    return names


def _without_unseen(
    scan: Scan, split: str, classes: tuple[str, ...], unseen: str, findings: list[Problem], problems: list[Problem]
) -> Scan:
    """The scan without the labels that train lacks; what they are goes to `findings` (drop) or `problems` (error)."""
    known = set(classes)
    strange = Counter(str(entry.label) for entry in scan.entries if entry.label not in known)
    if not strange:
        return scan
    parts = []
    for name, count in sorted(strange.items()):
        near = difflib.get_close_matches(name, classes, n=1, cutoff=0.6) or [
            known_name for known_name in classes if known_name.lower() == name.lower()
        ]
        parts.append(f"{name!r} ({count} images{f'; did you mean {near[0]!r}?' if near else ''})")
    text = f"labels that train lacks: {', '.join(parts)}; train has {', '.join(repr(name) for name in classes)}"
    if unseen == "drop":
        findings.append(Problem(f"{sum(strange.values())} images dropped, {text}", key=f"data.{split}"))
    else:
        problems.append(Problem(f"{text}. Correct the labels, or set data.unseen: drop to leave these images out", key=f"data.{split}"))
    return replace(scan, entries=tuple(entry for entry in scan.entries if entry.label in known))


def _check_groups(scans: Mapping[str, Scan]) -> None:
    """Groups never straddle splits.

    Raises:
        DataError: the groups that do, with rows on both sides.
    """
    where: dict[str, dict[str, list[str]]] = {}
    for split, scan in scans.items():
        for entry in scan.entries:
            if entry.group is not None:
                where.setdefault(entry.group, {}).setdefault(split, []).append(entry.row)
    problems = [
        Problem(
            f"group {group!r} is in "
            + " and ".join(f"{split} ({len(rows)} rows, {rows[0]})" for split, rows in splits.items())
            + "; a group belongs to one split",
            key="data.group",
        )
        for group, splits in sorted(where.items())
        if len(splits) > 1
    ]
    if problems:
        raise DataError(limited(problems))


def _to_dataset(scan: Scan, classes: tuple[str, ...]) -> Dataset:
    index = {name: position for position, name in enumerate(classes)}
    samples = tuple(_to_sample(entry, index) for entry in scan.entries)
    return Dataset(samples, classes, scan.ignored, dict(scan.skipped), scan.warnings)


def _to_sample(entry: Entry, index: Mapping[str, int]) -> Sample:
    label = None if entry.label is None else index[entry.label]
    return Sample(entry.path, label, entry.row, entry.group, entry.name, entry.region)


def _skipped_text(scan: Scan) -> str:
    if not scan.skipped:
        return ""
    counts = ", ".join(f"{count} {extension}" for extension, count in sorted(scan.skipped.items()))
    return f" (files passed over, no image by name: {counts})"
