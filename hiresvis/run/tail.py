"""The events of a run that may still go on, read as its file grows."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from hiresvis.errors import RunFolderError
from hiresvis.run import files
from hiresvis.run.directory import parse_event
from hiresvis.run.events import Event

_CHUNK_BYTES = 2**20
_HEAD_BYTES = 256  # the first event has the run's name and time in it


class Tail:
    """Hands out the events of an events.jsonl as they come.

    The file is opened anew for each look and known by its first bytes, so that a copy of it that grows by being copied again (rsync) is
    followed, and another run's in its place is not.

    Args:
        path: of events.jsonl.
    """

    def __init__(self, path: Path) -> None:
        self.replaced = False
        self._path = path
        self._head = b""
        self._offset = 0
        self._rest = b""

    def news(self) -> Iterator[Event]:
        """The events that came since the last call, up to the end that the file has now.

        A last line without its end waits for it. One that was torn by a killed process, and closed by the next, is passed over. Where
        another run's file is in the path's place, or this one was cut, `replaced` is set and there is no news any more.

        Raises:
            RunFolderError: there is no such file, or it cannot be read.
        """
        try:
            # Without waiting: a pipe in the place of the file would block for ever.
            with open(os.open(self._path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as stream:
                found = os.fstat(stream.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise RunFolderError(f"{self._path}: no regular file; give a folder that hiresvis fit made")
                if found.st_size < self._offset or stream.read(len(self._head)) != self._head:
                    self.replaced = True
                if self.replaced:
                    return
                stream.seek(self._offset)
                while chunk := stream.read(_CHUNK_BYTES):
                    self._head += chunk[: max(0, _HEAD_BYTES - len(self._head))]
                    self._offset += len(chunk)
                    *lines, self._rest = (self._rest + chunk).split(b"\n")
                    for line in lines:
                        if (event := parse_event(line.decode("utf-8", errors="replace"))) is not None:
                            yield event
        except OSError as error:
            reason = f"cannot be read ({files.reason(error)}); give a folder that hiresvis fit made, which it makes once the batch is found"
            raise RunFolderError(f"{self._path}: {reason}") from error
