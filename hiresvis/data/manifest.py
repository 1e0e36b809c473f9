"""What the rows of a manifest mean: image, label, group, split and region of each, and every problem with its place.

Rows are looked at one by one as they are read, and only texts are handled here, so that a table of 200,000 rows takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from hiresvis.data.bounds import Bounds
from hiresvis.data.folders import SPLIT_WORDS, Entry, Label, Scan
from hiresvis.data.labels import MISSING_TEXTS, LabelReader, Unlabelled, cell_text
from hiresvis.data.regions import REGION_KEYS, Region, named, region_problems, whole_number
from hiresvis.data.tables import csv_rows, parquet_rows
from hiresvis.errors import Problem

MANIFEST_SUFFIXES = (".csv", ".tsv", ".parquet")
_MANY = 5  # missing files: it is the table, or where it lies, rather than a file


def read_manifest(
    source: Path,
    *,
    image_column: str,
    labels: LabelReader | Unlabelled,
    group_column: str | None,
    split_column: str | None,
    region_columns: Sequence[str] | None = None,
    root: Path | None = None,
    look_for_files: bool = True,
) -> tuple[Scan, list[Problem]]:
    """The rows of a manifest, in their order, and every problem with its place: `t.csv:17` is a line, `t.parquet:row 17` counts from 1.

    Relative paths start at the manifest's folder. Nulls, NaN and, but for a multilabel list, empty labels are problems, not classes. A
    file may be listed once, or with `region_columns` once for each of its regions. Files outside of the manifest's folder and `root` are
    problems, and nothing is said of whether they are there.

    Args:
        source: .csv, .tsv or .parquet.
        labels: reads the label columns. Where rows have no labels, one that is there twice is no problem, and comes twice.
        look_for_files: False: whether the images are there is not asked.

    Raises:
        DataError: the table as a whole cannot be read: encoding, no header, a missing column.
        MissingExtra: it is a parquet table, and pyarrow is not installed.
    """
    wanted = {"image": (image_column,), "label": labels.columns, "group": (group_column,), "split": (split_column,)}
    columns = [(key, name) for key, names in wanted.items() for name in names if name is not None]
    columns += zip(REGION_KEYS, region_columns or (), strict=False)
    rows = _Rows(source, columns, labels, Bounds([source.parent, *([] if root is None else [root])]), look_for_files)
    if source.suffix.lower() == ".parquet":
        found_rows = parquet_rows(source, columns, rows.problems, lists=labels.columns if labels.reads_names else ())
    else:
        found_rows = csv_rows(source, columns, rows.problems)
    with closing(found_rows) as found:
        for place, cells in found:
            rows.add(place, cells)
    problems = [*rows.bounds.problems(), *rows.problems]
    if rows.num_missing >= _MANY:
        text = f"names {rows.num_missing} files that are not there; relative paths start at {source.absolute().parent}"
        problems.insert(0, Problem(text, source.name, "data.image"))
    return Scan(tuple(rows.entries), labels.names), problems


class _Rows:
    """The rows of one manifest, as they come."""

    def __init__(
        self,
        source: Path,
        columns: Sequence[tuple[str, str]],
        labels: LabelReader | Unlabelled,
        bounds: Bounds,
        look_for_files: bool,
    ) -> None:
        self.bounds = bounds
        self.num_missing = 0
        self.entries: list[Entry] = []
        self.problems: list[Problem] = []
        self._root, self._labels, self._look = str(source.parent), labels, look_for_files
        names = [key for key, _ in columns]
        self._named = dict(columns)
        self._num_labels = len(labels.columns)
        self._group = names.index("group") if "group" in names else None
        self._split = names.index("split") if "split" in names else None
        self._region = names.index(REGION_KEYS[0]) if REGION_KEYS[0] in names else None  # the others follow it
        self._groups: dict[str, str] = {}  # one text for each
        self._at: dict[str, int] = {}  # position in entries, by where the file is
        self._renamed: dict[str, int] = {}  # and by name, of rows that write it otherwise
        self._folders: dict[str, str] = {}

    def add(self, place: str, cells: Sequence[str | None]) -> None:
        """One row: an entry, or problems."""
        written = cells[0] or ""
        file = self._locate(written)
        label, said = self._labels(tuple(cells[1 : 1 + self._num_labels]))
        inside = "\0" in written or self.bounds.hold(place, written, file)
        if not written:
            said.insert(0, f"no path in column {self._named['image']!r}")
        elif "\0" in written or (inside and self._look and not os.path.lexists(file)):
            said.insert(0, f"no such file: {file}".replace("\0", "\\0"))
            self.num_missing += 1
        mask = None
        if self._labels.task == "segment":
            mask, label = self._mask_of(place, label, said), None
        group = split = region = None
        if self._group is not None:
            group = self._group_of(cells[self._group], said)
        if self._region is not None:
            region = self._region_of(cells, said)
        if self._split is not None:
            split = SPLIT_WORDS.get((cells[self._split] or "").lower())
            if split is None:
                said.append(f"{cell_text(cells[self._split])} in column {self._named['split']!r} is not train, val or test")
        if inside and not said:
            name = named(_normal(written), region)
            earlier = self._earlier(name, written, file, region)
            if earlier is None or not self._labels.columns:
                self.entries.append(Entry(file, name, place, label, group, split, region, mask))
                return
            first = self.entries[earlier]
            other = f" with label {first.label!r}" if first.label != label else ""
            what = "an image" if region is None else "a region"
            said = [f"{name} is listed before, at {first.row}{other}; keep one row {what}"]
        self.problems += [Problem(text, place) for text in said]

    def _mask_of(self, place: str, label: Label, said: list[str]) -> Path | None:
        """The file of a mask; None where there is nothing but the first class, and where there are problems."""
        if not isinstance(label, str) or not label:
            return None
        file = self._locate(label)
        if "\0" in label or (self.bounds.hold(place, label, file) and self._look and not os.path.lexists(file)):
            said.append(f"no such mask: {file}".replace("\0", "\\0"))
            return None
        return Path(file)

    def _group_of(self, cell: str | None, said: list[str]) -> str | None:
        if cell is None or cell.lower() in MISSING_TEXTS:
            said.append(f"no group in column {self._named['group']!r}; an image without one could be on both sides of the split")
            return cell
        return self._groups.setdefault(cell, cell)

    def _region_of(self, cells: Sequence[str | None], said: list[str]) -> Region | None:
        """From x, y, width and height as written; None where there are problems."""
        texts: dict[str | None, str] = {self._named[key]: cell or "" for key, cell in zip(REGION_KEYS, cells[self._region :], strict=True)}
        problems = list(region_problems(texts))
        said += problems
        return None if problems else Region(*map(whole_number, texts.values()))

    def _earlier(self, name: str, written: str, file: str, region: Region | None) -> int | None:
        """The position of the entry with this name or of this file; where there is none, the next entry is noted as it.

        A name as written leads to its file, so only names that a row writes otherwise (`./1.png`) are kept beside the files.
        """
        located = named(self._located(file), region)
        earlier = self._at.get(located)
        if earlier is None and self._renamed:
            earlier = self._renamed.get(name)
        if name != named(written, region) and earlier is None:
            plain = named(self._located(os.path.join(self._root, _normal(written))), region)
            earlier = self._at.get(plain)
            if earlier is None:
                self._renamed[name] = len(self.entries)
        if earlier is None:
            self._at[located] = len(self.entries)
        return earlier

    def _locate(self, written: str) -> str:
        """The file that a row names, from the manifest's folder. Backslashes are tried as separators where the name itself is not there."""
        path = os.path.join(self._root, written)
        return os.path.join(self._root, written.replace("\\", "/")) if "\\" in written and not os.path.lexists(path) else path

    def _located(self, file: str) -> str:
        """One text for one file, however its folder is written: relative, absolute, through links.

        A file that is a link itself is left as it is, as a copy would be: stores of files by content link alike images to one file.
        """
        folder, _, name = file.rpartition(os.sep)
        if folder not in self._folders:
            self._folders[folder] = os.path.realpath(folder or os.sep)
        real = self._folders[folder]
        return file if real == folder else f"{real}/{name}"


def _normal(written: str) -> str:
    """A path as written, with forward slashes and nothing superfluous."""
    name = written.replace("\\", "/")
    return os.path.normpath(name).replace(os.sep, "/") if "./" in name or "//" in name else name
