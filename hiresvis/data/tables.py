"""The wanted columns of tables, row by row: csv as people's tools write it (BOM, Windows line ends, `;` or tab, quotes), and parquet."""

from __future__ import annotations

import csv
import difflib
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

from hiresvis.data.folders import is_image_name
from hiresvis.data.labels import SEPARATOR
from hiresvis.errors import DataError, MissingExtra, Problem

_PLAIN = (bool, int, float, Decimal, date)  # what str() writes as a csv would have it
_SHOWN_BYTES = 20  # of a cell in a message
_SHOWN_COLUMNS = 20

Row = tuple[str, Sequence[str | None]]  # place, and the cells of the wanted columns, stripped; None: null


def csv_rows(source: Path, columns: Sequence[tuple[str, str]], problems: list[Problem]) -> Generator[Row, None, None]:
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
        raise DataError([_empty(source)])


@dataclass(frozen=True, slots=True)
class Head:
    """The first rows of a table.

    Attributes:
        columns: their names, stripped, in order.
        rows: cells by column, stripped; None: null. Rows of another length than the header's are left out.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str | None, ...], ...]


def read_head(source: Path, limit: int) -> Head:
    """The columns of a table and at most `limit` rows, to see what the columns are.

    Raises:
        DataError: it is no table, has no header, or one that names a column twice.
        MissingExtra: it is a parquet table, and pyarrow is not installed.
    """
    if source.suffix.lower() == ".parquet":
        head = _parquet_head(source, limit)
    else:
        lines = [values for _, values in islice(_csv_lines(source), limit + 1)]
        if not lines:
            raise DataError([_empty(source)])
        names = tuple(name.strip() for name in lines[0])
        head = Head(names, tuple(tuple(cell.strip() for cell in values) for values in lines[1:] if len(values) == len(names)))
    twice = [name for name, count in Counter(head.columns).items() if count > 1]
    if twice:
        raise DataError([Problem(f"column {twice[0]!r} is there twice; give each its own name", f"{source.name}:1")])
    return head


def _empty(source: Path) -> Problem:
    return Problem("is empty; its first line names the columns, and each other one is an image", str(source))


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
        mend = "; a quote that opens a value has to close it" if "unexpected end" in str(error) else ""
        raise DataError([Problem(f"is not a csv table: {error}{mend}", f"{source.name}:{reader.line_num}")]) from error
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


def parquet_rows(
    source: Path, columns: Sequence[tuple[str, str]], problems: list[Problem], *, lists: Sequence[str]
) -> Generator[Row, None, None]:
    """Every row, counted from 1; only the columns that are asked for are read. Cells that are no text or number are problems.

    Args:
        lists: columns that may hold lists of names.
    """
    with _parquet_table(source) as table:
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


@contextmanager
def _parquet_table(source: Path) -> Iterator[Any]:
    """The open table.

    Raises:
        DataError: it is none.
        MissingExtra: pyarrow is not installed.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingExtra(f"{source}: parquet needs pyarrow: pip install 'hiresvis[parquet]'; or save the table as .csv") from error
    try:
        with parquet.ParquetFile(source) as table:
            yield table
    except (arrow.ArrowException, OSError) as error:
        raise DataError([Problem(f"is not a parquet table: {' '.join(str(error).split())}", str(source))]) from error


def _parquet_head(source: Path, limit: int) -> Head:
    with _parquet_table(source) as table:
        names = tuple(name.strip() for name in table.schema_arrow.names)
        batch = next(table.iter_batches(batch_size=limit), None)
        columns = [] if batch is None else [[_told(value) for value in _values(column)] for column in batch.columns]
    return Head(names, tuple(zip(*columns, strict=True)))


def _told(value: Any) -> str | None:
    """A cell to look at; what no column may hold is an empty text."""
    try:
        return _cell(value, is_list=True)
    except ValueError:
        return ""


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
    there = ", ".join(names[:_SHOWN_COLUMNS]) + (f" and {len(names) - _SHOWN_COLUMNS} more" if len(names) > _SHOWN_COLUMNS else "")
    problems = []
    for key, name in columns:
        if names.count(name) == 1:
            continue
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        what = "is there twice" if name in names else f"is missing{hint}"
        problems.append(Problem(f"column {name!r} {what} (columns: {there})", place, f"data.{key.split()[0]}"))
    if problems:
        remedy = _remedy(names, len(columns))
        raise DataError([replace(problem, message=f"{problem.message}; {remedy}") for problem in problems])
    return [names.index(name) for _, name in columns]


def _remedy(names: Sequence[str], num_wanted: int) -> str:
    """What to do about columns that are not there."""
    if len(names) == 1 < num_wanted:
        return "there is one column alone; separate values by comma, semicolon or tab"
    if any(is_image_name(name) for name in names):
        return "the first line looks like a row; it has to name the columns"
    return "give the name of one that is there"
