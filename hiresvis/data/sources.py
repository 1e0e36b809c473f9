"""From folders and tables to lists of samples: what is an image, what is its label, and which split holds it.

Two layouts are read: class folders (`train/cat/001.jpg`, see folders.py) and csv or parquet manifests (see manifest.py). Everything that
can be known without opening an image is checked here, and all problems are reported at once. Class names come from the training data
alone (or from an ordered list that the user gives), are matched by name, and their order is part of the result.
"""

from __future__ import annotations

import difflib
import gc
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hiresvis.data.folders import Scan, limited, listed_classes, scan_class_folders, scan_pairs
from hiresvis.data.labels import (
    LabelReader,
    Target,
    class_names,
    constant_targets,
    label_text,
    mask_classes,
    mean_and_std,
    refuse_flags_as_names,
    spread_of,
    targets_of,
    without_unseen,
)
from hiresvis.data.manifest import MANIFEST_SUFFIXES, read_manifest
from hiresvis.data.regions import Region
from hiresvis.data.split import split_as_before, split_fraction
from hiresvis.errors import DataError, Problem

_SHEETS = (".xlsx", ".xls", ".ods")


@dataclass(frozen=True, slots=True)
class Sample:
    """One image file, or a region of it, and what is known about it.

    Attributes:
        file: where the file is, as text.
        label: index of the class; multilabel: 1.0 or 0.0 for each class; regress: the targets in their own units; None where the label is
            not known (prediction).
        row: the place for messages: `train.csv:17`, or the path.
        group: patient, slide or site; never on both sides of a split.
        name: the path below the folder or as the table writes it, with forward slashes; with the region, where there is one.
        region: the part of the file that the sample is; None: all of it.
        mask: segment: the file with its class numbers; None: every pixel is of the first class, or the masks are not known (prediction).
    """

    file: str | Path
    label: Target
    row: str
    group: str | None = None
    name: str = ""
    region: Region | None = None
    mask: Path | None = None

    @property
    def path(self) -> Path:
        """Where the file is. Made when it is asked for: with its parts it takes more than all the rest."""
        return Path(self.file)

    @property
    def title(self) -> str:
        """What tells it from all others, for people: the path, with the region where there is one."""
        return str(self.path) if self.region is None else f"{self.path}[{self.region}]"


@dataclass(frozen=True, slots=True)
class Dataset:
    """The samples of one split, in a fixed order, and what was passed over to get them.

    Attributes:
        samples: in the order of relative paths (folders) or of rows (tables).
        classes: the outputs' names, in the order that labels count in: classes, or for regress the targets.
        ignored: hidden and system files and folders (`.ipynb_checkpoints/`, `Thumbs.db`), by relative path.
        skipped_extensions: extension -> number of files that are no images by name.
        warnings: lines for people.
    """

    samples: tuple[Sample, ...]
    classes: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    skipped_extensions: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    task: str = "classify"

    def __len__(self) -> int:
        return len(self.samples)

    def label_text(self, sample: Sample) -> str:
        """The label of one of the samples, as text."""
        return label_text(sample.label, self.task, self.classes)

    def fingerprint(self) -> dict[str, Any]:
        """What tells this set from another: the number of files, and a hash of their names and labels, whatever their order."""
        labels = [self.label_text(sample) if sample.mask is None else sample.mask.name for sample in self.samples]
        rows = sorted(f"{sample.name}\t{label}\n" for sample, label in zip(self.samples, labels, strict=True))
        return {"files": len(rows), "sha256": hashlib.sha256("".join(rows).encode("utf-8", "surrogateescape")).hexdigest()}

    def class_counts(self) -> dict[str, int]:
        """Samples of each class, every class named, in the order of the classes; of none where the task has no classes."""
        if self.task == "regress":
            return {}
        counts = Counter[str]()
        for label, number in Counter(sample.label for sample in self.samples).items():
            on = [label] if isinstance(label, int) else [index for index, flag in enumerate(label or ()) if flag]
            counts.update({self.classes[index]: number for index in on})
        return {name: counts[name] for name in self.classes}

    def values(self) -> list[tuple[float, ...]]:
        """The targets of regress, sample by sample."""
        return [sample.label for sample in self.samples if isinstance(sample.label, tuple)]

    def target_spread(self) -> dict[str, list[float]]:
        """[min, median, max] of each target of regress; of none for other tasks."""
        columns = zip(*self.values(), strict=True) if self.task == "regress" else ()
        return {name: spread_of(column) for name, column in zip(self.classes, columns, strict=False)}

    def target_scale(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each target of regress; nothing for other tasks."""
        return mean_and_std(self.values()) if self.task == "regress" else ((), ())


@dataclass(frozen=True, slots=True)
class Datasets:
    """All splits with one list of classes. `findings` are warnings; what is an error was raised.

    `is_drawn`: val was drawn from train's source as a share, so that only the names tell what is held out.
    """

    train: Dataset
    val: Dataset
    test: Dataset | None
    classes: tuple[str, ...]
    findings: tuple[Problem, ...] = ()
    is_drawn: bool = False

    def splits(self) -> dict[str, Dataset]:
        """The splits that exist, by name: train, val, test."""
        found = {"train": self.train, "val": self.val}
        return found if self.test is None else {**found, "test": self.test}


@contextmanager
def _no_collection() -> Iterator[None]:
    """Nothing that is read is let go, so a collection in between walks every row and finds nothing: a quarter of the time of a table."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_no_collection()
def load_datasets(
    train: Path,
    val: Path | float,
    test: Path | None = None,
    *,
    task: str = "classify",
    image_column: str = "path",
    label_column: str | Sequence[str] = "label",
    split_column: str | None = None,
    group_column: str | None = None,
    region_columns: Sequence[str] | None = None,
    root: Path | None = None,
    classes: Sequence[str] | None = None,
    seed: int = 0,
    unseen: str = "error",
    held_out: Collection[str] | None = None,
    look_for_files: bool = True,
    read_mask_values: Callable[[Sequence[Path]], Iterable[int]] = lambda _: (),
) -> Datasets:
    """Reads all splits of a data set.

    Args:
        train: a csv or parquet manifest, or, to classify, a folder of class folders; to segment, one of images and masks.
        val: another one, or the share of `train` to hold out: stratified, whole groups only, the same files for the same seed whatever
            order the file system lists them in.
        test: another one, or None.
        task: classify | multilabel | regress | segment.
        image_column, label_column, split_column, group_column: columns of the manifests; of labels, one or a list of them (see
            `LabelReader`). Where `split_column` is given, the manifest `train` holds all splits, and a `val` that is a share applies only
            when no row says val.
        region_columns: columns of the manifests with x, y, width and height of the part of the file that a row means.
        root: a folder that manifests may name files below, besides their own.
        classes: ordered class names; None: those found in `train`.
        seed: of the held-out share.
        unseen: "error" or "drop": what to do with labels of val and test that train lacks.
        held_out: names that an earlier start drew as the share; they are held out again, whatever else there is now.
        look_for_files: False: manifests are read without asking whether their images are there.
        read_mask_values: segment: of mask files, the values that they hold but for the ignored one; asked where nothing else names classes.

    Raises:
        DataError: with everything that was found, places and counts.
    """
    reader = _Reader(task, image_column, label_column, group_column, region_columns, root, look_for_files)
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
    if not scans["train"].entries:
        raise DataError([Problem(f"holds no images{_skipped_text(scans['train'])}", str(train), "data.train")])
    if task == "multilabel" and classes is None:
        refuse_flags_as_names(scans["train"], train, label_column)
    if task == "segment":
        names = mask_classes(scans["train"], train, classes, read_mask_values)
    else:
        names = class_names(scans["train"], train, task, classes, findings)
    is_drawn = "val" not in scans
    if is_drawn and held_out is not None:
        scans["train"], scans["val"] = split_as_before(scans["train"], held_out, str(train))
    elif is_drawn:
        assert not isinstance(val, Path)
        scans["train"], scans["val"], notes = split_fraction(scans["train"], float(val), task=task, seed=seed, place=str(train))
        findings += [Problem(note, str(train), "data.val") for note in notes]
    _check_groups(scans)
    datasets = {"train": _to_dataset(scans["train"], task, names)}
    problems = _nothing_to_learn(datasets["train"], str(train))
    for name in ("val", "test"):
        if name in scans:
            unknown: list[Problem] = []
            datasets[name] = _to_dataset(without_unseen(scans[name], name, names, unseen, findings, unknown), task, names)
            if not unknown and not datasets[name].samples:
                unknown.append(Problem("holds no images", f"data.{name}"))
            problems += unknown
    if problems:
        raise DataError(problems)
    for name, dataset in datasets.items():
        findings += [Problem(text, key=f"data.{name}") for text in dataset.warnings]
    return Datasets(datasets["train"], datasets["val"], datasets.get("test"), names, tuple(findings), is_drawn)


def _nothing_to_learn(train: Dataset, place: str) -> list[Problem]:
    """A classifier of one class, labels that are never given, targets of one value."""
    if train.task == "regress":
        return constant_targets(train.values(), train.classes, place)
    if train.task == "classify" and len(train.classes) == 1:
        return [Problem(f"{train.classes[0]!r} is the only class; a classifier needs two: add images of another", place, "data.train")]
    if train.task == "multilabel" and not train.classes:
        return [Problem("no row names a class; write names such as a|b in the column of data.label", place, "data.label")]
    return []


@_no_collection()
def load_dataset(
    source: Path,
    *,
    classes: Sequence[str],
    task: str = "classify",
    image_column: str = "path",
    label_column: str | Sequence[str] = "label",
    region_columns: Sequence[str] | None = None,
    root: Path | None = None,
    unseen: str = "error",
) -> Dataset:
    """Reads one labelled source against classes that are fixed already (the evaluate command).

    Raises:
        DataError: as `load_datasets`.
    """
    scan = _Reader(task, image_column, label_column, None, region_columns, root, True).read(source, None)
    problems: list[Problem] = []
    findings: list[Problem] = []
    kept = without_unseen(scan, "data", tuple(classes), unseen, findings, problems)
    if problems:
        raise DataError(problems)
    dataset = _to_dataset(kept, task, tuple(classes))
    if not dataset.samples:
        raise DataError(f"{source} holds no images" + ("" if task in ("regress", "segment") else f" of the classes {', '.join(classes)}"))
    return replace(dataset, warnings=(*dataset.warnings, *(finding.message for finding in findings)))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads either layout with one set of column names."""

    task: str
    image_column: str
    label_column: str | Sequence[str]
    group_column: str | None
    region_columns: Sequence[str] | None
    root: Path | None
    look_for_files: bool

    def read(self, source: Path, split_column: str | None) -> Scan:
        refuse_missing(source)
        if source.is_dir():
            if self.task not in ("classify", "segment"):
                raise DataError(
                    [Problem(f"a folder: class folders give one class an image, and the task is {self.task}; give a manifest", str(source))]
                )
            if self.group_column is not None:
                raise DataError(
                    f"data.group names the column {self.group_column!r}, and {source} is a folder; give a csv manifest or remove data.group"
                )
            if self.region_columns is not None:
                columns = ", ".join(self.region_columns)
                raise DataError(
                    f"data.region names the columns {columns}, and {source} is a folder; give a csv manifest or remove data.region"
                )
            if self.task == "segment":
                return replace(scan_pairs(source), folders=listed_classes(source))
            return scan_class_folders(source)
        if source.suffix.lower() not in MANIFEST_SUFFIXES:
            known = f"a folder of class folders, and {', '.join(MANIFEST_SUFFIXES)} manifests"
            mend = "; save the sheet as .csv" if source.suffix.lower() in _SHEETS else ""
            raise DataError([Problem(f"a {source.suffix or 'nameless'} file is no data source; known are {known}{mend}", str(source))])
        scan, problems = read_manifest(
            source,
            image_column=self.image_column,
            labels=LabelReader(self.task, self.label_column),
            group_column=self.group_column,
            split_column=split_column,
            region_columns=self.region_columns,
            root=self.root,
            look_for_files=self.look_for_files,
        )
        if problems:
            raise DataError(limited(problems))
        return replace(scan, folders=listed_classes(source.parent)) if self.task == "segment" else scan


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


def refuse_missing(source: Path) -> None:
    """A source that is not there.

    Raises:
        DataError: so it is, with the name beside it that comes nearest.
    """
    if not source.exists():
        near = difflib.get_close_matches(source.name, _siblings(source), n=1)
        hint = f"; did you mean {source.parent / near[0]}?" if near else ""
        raise DataError([Problem(f"does not exist{hint}", str(source))])


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


def _to_dataset(scan: Scan, task: str, classes: tuple[str, ...]) -> Dataset:
    targets = targets_of((entry.label for entry in scan.entries), task, classes)
    samples = tuple(
        Sample(entry.file, target, entry.row, entry.group, entry.name, entry.region, entry.mask)
        for entry, target in zip(scan.entries, targets, strict=True)
    )
    return Dataset(samples, classes, scan.ignored, dict(scan.skipped), scan.warnings, task)


def _skipped_text(scan: Scan) -> str:
    if not scan.skipped:
        return ""
    counts = ", ".join(f"{count} {extension}" for extension, count in sorted(scan.skipped.items()))
    return f" (files passed over, no image by name: {counts})"
