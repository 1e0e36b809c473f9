"""Reads manifests: csv as people's tools write it (BOM, Windows line ends, `;` or tab, quoted names, relative paths), and parquet.

Rows are looked at one by one as they are read, and only texts are handled here, so that a table of 200,000 rows takes seconds.
"""

from __future__ import annotations

import csv
import difflib
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

from hiresvis.data.bounds import Bounds
from hiresvis.data.folders import Entry, Scan
from hiresvis.data.labels import MISSING_TEXTS, SEPARATOR, LabelReader
from hiresvis.data.regions import REGION_KEYS, Region, named, region_problems, whole_number
from hiresvis.errors import DataError, MissingExtra, Problem

MANIFEST_SUFFIXES = (".csv", ".tsv", ".parquet")
_SPLITS = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
_PLAIN = (bool, int, float, Decimal, date)  # what str() writes as a csv would have it
_SHOWN_BYTES = 20  # of a cell in a message

_Row = tuple[str, Sequence[str | None]]  # place, and the cells of the wanted columns, stripped; None: null


def read_manifest(
    source: Path,
    *,
    image_column: str,
    labels: LabelReader,
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
        labels: reads the label columns.
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
        found_rows = _parquet_rows(source, columns, rows.problems, lists=labels.columns if labels.reads_names else ())
    else:
        found_rows = _csv_rows(source, columns, rows.problems)
    with closing(found_rows) as found:
        for place, cells in found:
            rows.add(place, cells)
    return Scan(tuple(rows.entries), labels.names), [*rows.bounds.problems(), *rows.problems]


class _Rows:
    """The rows of one manifest, as they come."""

    def __init__(self, source: Path, columns: Sequence[tuple[str, str]], labels: LabelReader, bounds: Bounds, look_for_files: bool) -> None:
        self.bounds = bounds
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
        if not written or "\0" in written or (inside and self._look and not os.path.lexists(file)):
            said.insert(0, f"no such file: {file}".replace("\0", "\\0") if written else f"no path in column {self._named['image']!r}")
        group = split = region = None
        if self._group is not None:
            group = self._group_of(cells[self._group], said)
        if self._region is not None:
            region = self._region_of(cells, said)
        if self._split is not None:
            split = _SPLITS.get((cells[self._split] or "").lower())
            if split is None:
                said.append(f"{cells[self._split]!r} in column {self._named['split']!r} is not train, val or test")
        if inside and not said:
            name = named(_normal(written), region)
            earlier = self._earlier(name, written, file, region)
            if earlier is None:
                self.entries.append(Entry(file, name, place, label, group, split, region))
                return
            first = self.entries[earlier]
            other = f" with label {first.label!r}" if first.label != label else ""
            what = "an image" if region is None else "a region"
            said = [f"{name} is listed before, at {first.row}{other}; keep one row {what}"]
        self.problems += [Problem(text, place) for text in said]

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


def _csv_rows(source: Path, columns: Sequence[tuple[str, str]], problems: list[Problem]) -> Generator[_Row, None, None]:
    """Every row that is not blank, by its line; rows of another length than the header's are problems."""
    header: list[str] | None = None
    positions: list[int] = []
    table = source.name
    for line, values in _csv_lines(source):
        if header is None:
            header, positions = values, _find_columns(f"{table}:1", values, columns)
        elif len(values) != len(header):
            text = f"{len(values)} fields where the header has {len(header)}; quote a value that holds a comma"
            problems.append(Problem(text, f"{table}:{line}"))
        else:
            yield f"{table}:{line}", [values[position].strip() for position in positions]
    if header is None:
        _find_columns(f"{table}:1", [], columns)


def _csv_lines(source: Path) -> Iterator[tuple[int, list[str]]]:
    """(line number, values) of every row that is not blank, header included."""
    line = 1
    try:
        with source.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=_delimiter(head, source), strict=True)
            for values in reader:
                if "".join(values).strip():
                    yield line, values
                line = reader.line_num + 1
    except UnicodeDecodeError as error:
        raise DataError([_not_utf8(source, error)]) from error
    except csv.Error as error:
        raise DataError([Problem(f"is not a csv table: {error}", f"{source.name}:{reader.line_num}")]) from error
    except OSError as error:
        raise DataError([Problem(f"cannot be read: {error.strerror}", str(source))]) from error


def _not_utf8(source: Path, error: UnicodeDecodeError) -> Problem:
    """Names the line: the error itself counts bytes within the block that was being read."""
    text = source.read_bytes()
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as first:
        error = first
    line = text.count(b"\n", 0, error.start) + 1
    return Problem(f"byte {text[error.start]:#04x} is not UTF-8; save the file as UTF-8", f"{source.name}:{line}")


def _delimiter(head: str, source: Path) -> str:
    """The one that the header uses; spreadsheet programs write `;` in many countries."""
    if source.suffix.lower() == ".tsv":
        return "\t"
    return max(",;\t", key=head.count)


def _parquet_rows(
    source: Path, columns: Sequence[tuple[str, str]], problems: list[Problem], *, lists: Sequence[str]
) -> Generator[_Row, None, None]:
    """Every row, counted from 1; only the columns that are asked for are read. Cells that are no text or number are problems.

    Args:
        lists: columns that may hold lists of names.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingExtra(f"{source}: parquet needs pyarrow: pip install 'hiresvis[parquet]'; or save the table as .csv") from error
    try:
        with parquet.ParquetFile(source) as table:
            header = table.schema_arrow.names
            names = [header[position] for position in _find_columns(source.name, header, columns)]
            number = 0
            for batch in table.iter_batches(batch_size=16384, columns=names):
                found = [_values(batch.column(name)) for name in names]
                for values in zip(*found, strict=True):
                    number += 1
                    place, cells, said = f"{source.name}:row {number}", list[str | None](), list[str]()
                    for value, (_, name) in zip(values, columns, strict=True):
                        try:
                            cells.append(_cell(value, is_list=name in lists))
                        except ValueError as error:
                            said.append(f"column {name!r} {error}")
                    if said:
                        problems += [Problem(text, place) for text in said]
                    else:
                        yield place, cells
    except (arrow.ArrowException, OSError) as error:
        raise DataError([Problem(f"is not a parquet table: {' '.join(str(error).split())}", str(source))]) from error


def _values(column: Any) -> list[Any]:
    """An arrow column as Python has it; texts that are none (parquet does not hold writers to UTF-8) as bytes."""
    try:
        found: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        found = [_value(cell) for cell in column]
    return found


def _value(cell: Any) -> Any:
    try:
        return cell.as_py()
    except UnicodeDecodeError as error:
        return error.object


def _cell(value: Any, *, is_list: bool = False) -> str | None:
    """A parquet value as csv would have it; null stays apart from an empty text.

    Raises:
        ValueError: csv would not have it: bytes that are no text, a structure, a list elsewhere or of names that cannot be joined.
    """
    if isinstance(value, str):
        return value.strip()
    if value is None:
        return None
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"holds {value[:_SHOWN_BYTES]!r}, which is not UTF-8; save it as text") from error
    if isinstance(value, list) and is_list:
        return SEPARATOR.join(map(_item, value))
    if isinstance(value, _PLAIN):
        return str(value)
    kind = "a list; only the column of data.task: multilabel takes one" if isinstance(value, list) else f"a {type(value).__name__}"
    raise ValueError(f"holds {kind}; save it as text or a number")


def _item(value: Any) -> str:
    """One name of a list."""
    name = _cell(value)
    if not name:
        raise ValueError(f"holds a list with {'null' if name is None else 'an empty name'} in it; an image of no class has an empty list")
    if SEPARATOR in name:
        raise ValueError(f"holds a list with {name!r} in it, and {SEPARATOR} stands between names; rename it")
    return name


def _find_columns(place: str, header: Sequence[str], columns: Sequence[tuple[str, str]]) -> list[int]:
    """Where each wanted (recipe key, column) is in the header.

    Raises:
        DataError: a column is missing, or there twice.
    """
    names = [name.strip() for name in header]
    problems = []
    for key, name in columns:
        if names.count(name) == 1:
            continue
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        what = "is there twice" if name in names else f"is missing{hint}"
        problems.append(Problem(f"column {name!r} {what} (columns: {', '.join(names) or 'none'})", place, f"data.{key.split()[0]}"))
    if problems:
        raise DataError(problems)
    return [names.index(name) for _, name in columns]
