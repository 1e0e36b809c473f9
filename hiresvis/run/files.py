"""Whole files or none: writes that a crash, a full disk or a second reader never sees half done."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hiresvis.errors import EnvironmentFailed
from hiresvis.units import format_size


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """The content of a file in a folder that somebody else may have made: no link out of it is followed, and nothing is waited for.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than that; `strerror` says so.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags)
    except ValueError as error:  # no name that a file can have
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.ELOOP, "a link, which is not followed", str(path)) from error
        raise
    with open(handle, "rb") as stream:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        if found.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"{format_size(found.st_size)}, above the {format_size(most_bytes)} that are read", str(path))
        return stream.read(most_bytes)


def write_text(path: Path, text: str) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file under a temporary name, syncs it and renames it into place; the folder is made when missing.

    Raises:
        EnvironmentFailed: the disk is full or not writable; a file that was there before is intact.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise EnvironmentFailed(f"{path}: not written ({reason(error)}); {_remedy(error)}") from error
    sync(path.parent)


def append_line(path: Path, line: str) -> None:
    """Adds one line, after closing a torn one that a killed process may have left.

    Raises:
        EnvironmentFailed: the disk is full or not writable.
    """
    assert "\n" not in line, "one line"
    try:
        with path.open("ab+") as stream:
            if stream.seek(0, os.SEEK_END):
                stream.seek(-1, os.SEEK_END)
                if stream.read(1) != b"\n":
                    line = f"\n{line}"
            stream.write(f"{line}\n".encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise EnvironmentFailed(f"{path}: not written ({reason(error)}); {_remedy(error)}") from error


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON: numbers that JSON cannot hold (nan, inf) become null, paths become text.

    >>> json_text({"loss": float("nan"), "size": (1, 2)})
    '{"loss": null, "size": [1, 2]}'
    """
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def reason(error: OSError) -> str:
    """What the system said, in short.

    >>> reason(FileNotFoundError(2, "No such file or directory"))
    'no such file or directory'
    """
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:]


def _remedy(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space, or choose another log.dir"
    return "check that the folder is there and can be written, or choose another log.dir"


def sync(path: Path) -> None:
    """Makes a file's bytes, or the renames in a folder, last, as far as the file system can."""
    with suppress(OSError):  # some network file systems refuse to sync folders; the rename is done all the same
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
