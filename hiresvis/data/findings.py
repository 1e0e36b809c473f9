"""What the check found of each file, remembered from one start to the next.

A small database (sqlite, from the standard library) in the cache folder: results are added in batches while files are looked at, so a
check that is stopped loses seconds; two processes add to the same file in turn. A database that cannot be read is begun anew, and one
that cannot be written is done without: what is lost is time, and `FindingStore.off` says so.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from hiresvis.data.header import Header
from hiresvis.data.likeness import Look
from hiresvis.run.files import reason

CACHE_NAME = "checked.sqlite"
_BATCH_S = 2.0
_AT_ONCE = 500  # names in one question
_MOST_ROWS = 1_000_000
_WAIT_S = 30.0  # for another process that writes


@dataclass(frozen=True, slots=True)
class Finding:
    """What one file was found to be.

    Attributes:
        key: tells whether the file, what is asked of it, or what decodes changed since; empty where that is not to be remembered.
        header: None where it cannot be read.
        error: what is wrong with the file, None for nothing.
        digest: of all the file's bytes; None where nothing was decoded.
        look: of its pixels.
    """

    key: str
    header: Header | None = None
    error: str | None = None
    digest: bytes | None = None
    look: Look | None = None

    @property
    def decoded(self) -> bool:
        """Whether it says all there is to say: its pixels were read, or it was refused."""
        return self.digest is not None or self.error is not None


class Keyed(Protocol):
    """A finding of whatever kind."""

    @property
    def key(self) -> str: ...


_Found = TypeVar("_Found", bound=Keyed)


@dataclass(frozen=True, slots=True)
class Kind(Generic[_Found]):
    """What the database holds of one kind of finding.

    Attributes:
        table: its name. columns: with their types, after path and key.
        cells: of a finding, after path and key. found: the finding again, of its key and cells.
    """

    table: str
    columns: str
    cells: Callable[[_Found], tuple[object, ...]]
    found: Callable[..., _Found]


class FindingStore(Generic[_Found]):
    """Findings of one kind by absolute path (of a region, with its place). Not shared between threads.

    Attributes:
        off: why nothing new is kept, once that is so; what is there is still read.
    """

    def __init__(self, folder: Path | None, kind: Kind[_Found]) -> None:
        self.off = ""
        self._kind = kind
        self._path = None if folder is None else folder / CACHE_NAME
        self._new: dict[str, _Found] = {}
        self._written_at = time.monotonic()
        self._database = self._open()

    def read(self, keys: Mapping[str, str]) -> dict[str, _Found]:
        """Those of the paths whose key is still this one."""
        found: dict[str, _Found] = {}
        paths = iter(keys)
        while self._database is not None and (some := [os.fsencode(path) for path in islice(paths, _AT_ONCE)]):
            try:
                marks = ",".join("?" * len(some))
                rows = self._database.execute(f"SELECT * FROM {self._kind.table} WHERE path IN ({marks})", some).fetchall()
                known = {os.fsdecode(path): self._kind.found(*values) for path, *values in rows}
            except (sqlite3.Error, ValueError, TypeError):
                return found
            found.update((path, finding) for path, finding in known.items() if finding.key == keys[path])
        return found

    def add(self, path: str, finding: _Found) -> None:
        """Keeps a finding; written with others every two seconds."""
        self._new[path] = finding
        if time.monotonic() - self._written_at > _BATCH_S:
            self.write()

    def write(self) -> None:
        """Writes what was added."""
        if self._database is not None and self._new:
            table = self._kind.table
            rows = [(os.fsencode(path), finding.key, *self._kind.cells(finding)) for path, finding in self._new.items()]
            try:
                with self._database:
                    self._database.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({','.join('?' * len(rows[0]))})", rows)
                    self._database.execute(f"DELETE FROM {table} WHERE rowid <= (SELECT max(rowid) FROM {table}) - ?", [_MOST_ROWS])
            except sqlite3.Error as error:
                self.off = str(error)
        self._new = {}
        self._written_at = time.monotonic()

    def close(self) -> None:
        """Writes what was added and lets go of the file."""
        self.write()
        if self._database is not None:
            with suppress(sqlite3.Error):
                self._database.close()
            self._database = None

    def _open(self) -> sqlite3.Connection | None:
        if self._path is None:
            return None
        for _ in range(2):
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                database = sqlite3.connect(self._path, timeout=_WAIT_S)
                with database:
                    database.execute(
                        f"CREATE TABLE IF NOT EXISTS {self._kind.table} (path BLOB PRIMARY KEY, key TEXT, {self._kind.columns})"
                    )
            except sqlite3.OperationalError as error:  # not writable, or a folder in its place
                self.off = str(error)
                return None
            except sqlite3.DatabaseError as error:  # damaged, or no database at all
                self.off = str(error)
                with suppress(OSError):
                    os.unlink(self._path)
            except OSError as error:
                self.off = reason(error)
                return None
            else:
                self.off = ""
                return database
        return None


def _cells(finding: Finding) -> tuple[object, ...]:
    header = None if finding.header is None else json.dumps(astuple(finding.header))
    error = None if finding.error is None else finding.error.encode("utf-8", "backslashreplace").decode()  # it may quote a file's name
    look = (None, None) if finding.look is None else (finding.look.signature, finding.look.spread)
    return header, error, finding.digest, *look


def _finding(
    key: str, header: str | None, error: str | None, digest: bytes | None, signature: bytes | None, spread: float | None
) -> Finding:
    look = None if signature is None or spread is None else Look(signature, spread)
    return Finding(key, None if header is None else Header(*json.loads(header)), error, digest, look)


IMAGES = Kind("findings", "header TEXT, error TEXT, digest BLOB, signature BLOB, spread REAL", _cells, _finding)
