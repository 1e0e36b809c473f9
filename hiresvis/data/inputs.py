"""What `predict` is asked about: files, folders, patterns, manifests, and paths that come on standard input.

A file that is named is read whatever it is called; of a folder, and of a pattern without an extension of its own, what is an image by
name. Each file comes once, at its first place. What is wrong with a file is the matter of its row, so only paths that lead nowhere are
refused here, before anything is computed; on standard input and in manifests, which programs write, those have a row too.
"""

from __future__ import annotations

import glob
import os
import queue
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from hiresvis.data.folders import Entry, Scan, is_ignored, is_image_name, limited, scan_unlabelled
from hiresvis.data.labels import Unlabelled
from hiresvis.data.manifest import MANIFEST_SUFFIXES, read_manifest
from hiresvis.data.regions import named
from hiresvis.data.sources import Sample
from hiresvis.errors import DataError, Problem

STANDARD_INPUT = "-"
_BLOCK_BYTES = 1 << 16
_AHEAD = 10_000  # paths that wait


@dataclass(frozen=True, slots=True)
class Columns:
    """How manifests are read.

    Attributes:
        image: the column of paths. region: those of x, y, width and height; None: rows mean whole files.
        root: a folder that paths may name files below, besides the manifest's own.
    """

    image: str = "path"
    region: Sequence[str] | None = None
    root: Path | None = None


@dataclass(slots=True)
class Inputs:
    """The images asked about, as they are found.

    Attributes:
        samples: without labels, in the order asked.
        skipped: files passed over, by extension.
        num_again: paths that were there before.
    """

    columns: Columns = field(default_factory=Columns)
    samples: list[Sample] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    num_again: int = 0
    _seen: set[str] = field(default_factory=set)

    def add(self, arguments: Sequence[str]) -> None:
        """Paths, patterns and manifests as a command line names them.

        Raises:
            DataError: paths that do not exist, patterns that nothing matches, manifests that cannot be read: all at once.
        """
        problems: list[Problem] = []
        for argument in arguments:
            if os.path.lexists(argument):
                self._add_path(argument, problems)
            elif glob.has_magic(argument):
                self._add_pattern(argument, problems)
            else:
                problems.append(Problem("does not exist", argument))
        if problems:
            raise DataError(limited(problems))

    def take(self, paths: Sequence[str]) -> list[Sample]:
        """Paths as a program names them, without patterns and manifests, now; gives what is new in them."""
        before = len(self.samples)
        for path in paths:
            self._add_scan(path)
        return self.samples[before:]

    def _add_path(self, path: str, problems: list[Problem]) -> None:
        if os.path.splitext(path)[1].lower() in MANIFEST_SUFFIXES and os.path.isfile(path):
            try:
                self._add_manifest(Path(path))
            except DataError as error:
                problems += error.problems
        else:
            self._add_scan(path, problems)

    def _add_pattern(self, pattern: str, problems: list[Problem]) -> None:
        """What a pattern matches, sorted; hidden and system files never are."""
        found = [path for path in sorted(glob.glob(pattern, recursive=True)) if not is_ignored(os.path.basename(path.rstrip(os.sep)))]
        ending = os.path.splitext(pattern)[1]
        if ending and not glob.has_magic(ending):
            kept = found
        else:
            kept = [path for path in found if is_image_name(path) or (os.path.isdir(path) and "**" not in pattern)]
            self.skipped.update(
                os.path.splitext(path)[1].lower() or "(no extension)" for path in found if path not in {*kept} and not os.path.isdir(path)
            )
        if not kept:
            problems.append(Problem("matches no file" if not found else f"matches no image{self.skipped_text()}", pattern))
        for path in kept:
            self._add_path(path, problems)

    def _add_manifest(self, source: Path) -> None:
        columns = self.columns
        scan, problems = read_manifest(
            source,
            image_column=columns.image,
            labels=Unlabelled(),
            group_column=None,
            split_column=None,
            region_columns=columns.region,
            root=columns.root,
            look_for_files=False,
        )
        if problems:
            raise DataError(problems)
        if not scan.entries:
            raise DataError([Problem("has no rows", str(source))])
        for entry in scan.entries:
            self._add_entry(entry)

    def _add_scan(self, path: str, problems: list[Problem] | None = None) -> None:
        """A file, or what a folder holds. A folder that cannot be listed is a problem, or where none are wanted a row, as a file is.

        A folder called like an image that holds none is taken for one, so that its row says what is wrong with it.
        """
        try:
            scan = scan_unlabelled([Path(path)])
        except DataError as error:
            if problems is not None:
                problems += error.problems
                return
            scan = Scan(())
        except (OSError, ValueError):  # a name that no file can have
            scan = Scan(())
        self.skipped += Counter(scan.skipped)
        alone = not scan.entries and (problems is None or is_image_name(path))
        for entry in (Entry(path, path, path, None),) if alone else scan.entries:
            self._add_entry(entry)

    def _add_entry(self, entry: Entry) -> None:
        """Unless the file, or the region of it, was named before, however its path is written; links count as files of their own."""
        key = named(os.path.abspath(entry.file), entry.region)
        if key in self._seen:
            self.num_again += 1
            return
        self._seen.add(key)
        self.samples.append(Sample(entry.file, None, entry.row, None, entry.name, entry.region))

    def skipped_text(self) -> str:
        """Files passed over, in brackets; nothing where there are none."""
        counts = ", ".join(f"{count} {extension}" for extension, count in sorted(self.skipped.items()))
        return f" (files passed over, no image by name: {counts})" if counts else ""


def find_inputs(arguments: Sequence[str], columns: Columns | None = None) -> Inputs:
    """The images that a command line asks about.

    Raises:
        DataError: as `Inputs.add`; or there is no image at all.
    """
    found = Inputs(columns or Columns())
    found.add(arguments)
    if not found.samples:
        raise DataError(f"no images in {', '.join(arguments)}{found.skipped_text()}")
    return found


def split_paths(stream: BinaryIO) -> Iterator[str]:
    """The paths of a stream that nothing was read of, each as soon as its end is read: a line each, or where there is a NUL among the first
    of them, up to each NUL (`find -print0`, for names that hold a line end). Empty ones are left out, and a carriage return before a line
    end."""
    separator, rest = b"", b""
    while block := _read(stream):
        rest += block
        separator = separator or (b"\0" if b"\0" in rest else b"\n" if b"\n" in rest else b"")
        if separator:
            *whole, rest = rest.split(separator)
            yield from _named(whole, separator)
    yield from _named([rest], separator)


def _read(stream: BinaryIO) -> bytes:
    """What is there now, at least a byte unless it is the end.

    Past the stream's buffer where it has a descriptor: a thread that waits in there holds a lock which Python wants when it ends, and not
    getting it aborts.
    """
    try:
        descriptor = stream.fileno()
    except OSError:  # a stream in memory
        read_some = getattr(stream, "read1", stream.read)
        found: bytes = read_some(_BLOCK_BYTES)
        return found
    return os.read(descriptor, _BLOCK_BYTES)


def _named(parts: Sequence[bytes], separator: bytes) -> Iterator[str]:
    for part in parts:
        name = part if separator == b"\0" else part.removesuffix(b"\r")
        if name:
            yield os.fsdecode(name)


def waves(stream: BinaryIO, most: int) -> Iterator[list[str]]:
    """The paths of a stream in groups: each what has come while the one before was worked on, at least one and at most `most`. So rows of
    a slow source come at once, and of a fast one many files are read together."""
    waiting: queue.Queue[str | BaseException | None] = queue.Queue(_AHEAD)

    def read() -> None:
        try:
            for path in split_paths(stream):
                waiting.put(path)
        except BaseException as error:
            waiting.put(error)
        else:
            waiting.put(None)

    threading.Thread(target=read, daemon=True, name="paths").start()
    at_end = False
    while not at_end:
        found = [waiting.get()]
        while len(found) < most and found[-1] is not None:
            try:
                found.append(waiting.get_nowait())
            except queue.Empty:
                break
        at_end = found[-1] is None or isinstance(found[-1], BaseException)
        if paths := [path for path in found if isinstance(path, str)]:
            yield paths
        if isinstance(found[-1], BaseException):
            raise found[-1]
