"""Reads csv manifests as people's tools write them: BOM, Windows line ends, `;` or tab, quoted names, relative paths."""

from __future__ import annotations

import csv
import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hiresvis.data.folders import Entry, Scan
from hiresvis.data.regions import REGION_KEYS, Region, named, region_problems, whole_number
from hiresvis.errors import DataError, Problem

_SPLITS = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip


def read_manifest(
    source: Path,
    *,
    image_column: str,
    label_column: str,
    group_column: str | None,
    split_column: str | None,
    region_columns: Sequence[str] | None = None,
) -> tuple[Scan, list[Problem]]:
    """The rows of a manifest, in their order, and every problem with its line in the file.

    Relative paths start at the manifest's folder. Empty labels and NaN are problems, not classes. A file may be listed once, or with
    `region_columns` once for each of its regions.

    Raises:
        DataError: the table as a whole cannot be read: encoding, no header, a missing column.
    """
    lines = _read_rows(source)
    header = lines[0][1] if lines else []
    wanted: dict[str, str | None] = {"image": image_column, "label": label_column, "group": group_column, "split": split_column}
    wanted |= dict(zip(REGION_KEYS, region_columns or (), strict=False))
    columns = _find_columns(source, header, {key: name for key, name in wanted.items() if name is not None})
    entries: list[Entry] = []
    problems: list[Problem] = []
    first_rows: dict[str, Entry] = {}  # by name as written, and by where the file is
    folders: dict[str, str] = {}
    for line, values in lines[1:]:
        place = f"{source.name}:{line}"
        if len(values) != len(header):
            problems.append(Problem(f"{len(values)} fields where the header has {len(header)}; quote a value that holds a comma", place))
            continue
        row = {key: values[position].strip() for key, position in columns.items()}
        found = _row_problems(source, row, wanted, place)
        if not found:
            entry = _entry(source, row, place)
            located = named(_located(entry.path, folders), entry.region)
            earlier = first_rows.get(entry.name) or first_rows.get(located)
            if earlier is not None:
                other = f" with label {earlier.label!r}" if earlier.label != entry.label else ""
                what = "an image" if entry.region is None else "a region"
                found = [Problem(f"{entry.name} is listed before, at {earlier.row}{other}; keep one row {what}", place)]
            else:
                first_rows[entry.name] = first_rows[located] = entry
                entries.append(entry)
        problems += found
    return Scan(tuple(entries)), problems


def _read_rows(source: Path) -> list[tuple[int, list[str]]]:
    """(line number, values) of every row that is not blank, header included."""
    try:
        with source.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=_delimiter(head, source), strict=True)
            rows, first_line = [], 1
            for values in reader:
                if any(value.strip() for value in values):
                    rows.append((first_line, values))
                first_line = reader.line_num + 1
            return rows
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


def _find_columns(source: Path, header: list[str], wanted: Mapping[str, str]) -> dict[str, int]:
    names = [name.strip() for name in header]
    problems = []
    for key, name in wanted.items():
        if names.count(name) == 1:
            continue
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        what = "is there twice" if name in names else f"is missing{hint}"
        text = f"column {name!r} {what} (columns: {', '.join(names) or 'none'})"
        problems.append(Problem(text, f"{source.name}:1", f"data.{key.split()[0]}"))
    if problems:
        raise DataError(problems)
    return {key: names.index(name) for key, name in wanted.items()}


def _row_problems(source: Path, row: Mapping[str, str], wanted: Mapping[str, str | None], place: str) -> list[Problem]:
    problems = []
    if not row["image"]:
        problems.append(Problem(f"no path in column {wanted['image']!r}", place))
    elif not os.path.lexists(_locate(source, row["image"])):
        problems.append(Problem(f"no such file: {_locate(source, row['image'])}", place))
    if row["label"].lower() in ("", "nan"):
        problems.append(Problem(f"no label in column {wanted['label']!r}{' (NaN)' if row['label'] else ''}", place))
    if "group" in row and row["group"].lower() in ("", "nan"):
        problems.append(Problem(f"no group in column {wanted['group']!r}; an image without one could be on both sides of the split", place))
    problems += [Problem(text, place) for text in region_problems({wanted[key]: row[key] for key in REGION_KEYS if key in row})]
    if "split" in row and row["split"].lower() not in _SPLITS:
        problems.append(Problem(f"{row['split']!r} in column {wanted['split']!r} is not train, val or test", place))
    return problems


def _locate(source: Path, written: str) -> Path:
    """The file that a row names, from the manifest's folder. Backslashes are tried as separators where the name itself is not there."""
    path = source.parent / written
    if "\\" in written and not os.path.lexists(path):
        return source.parent / written.replace("\\", "/")
    return path


def _located(path: Path, folders: dict[str, str]) -> str:
    """One text for one file, however its folder is written: relative, absolute, through links. `folders` remembers those seen.

    A file that is a link itself is left as it is, as a copy would be: stores of files by content link alike images to one file.
    """
    folder = str(path.parent)
    if folder not in folders:
        folders[folder] = os.path.realpath(folder)
    return os.path.join(folders[folder], path.name)


def _entry(source: Path, row: Mapping[str, str], place: str) -> Entry:
    path = _locate(source, row["image"])
    name = Path(os.path.normpath(row["image"].replace("\\", "/") if "\\" in str(row["image"]) else row["image"])).as_posix()
    split = _SPLITS[row["split"].lower()] if "split" in row else None
    region = Region(*(whole_number(row[key]) for key in REGION_KEYS)) if REGION_KEYS[0] in row else None
    return Entry(path, named(name, region), place, row["label"], row.get("group"), split, region)
