"""Whether a process works on a run: it holds a lock on events.jsonl, which the system takes back however that process ends."""

from __future__ import annotations

import os
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from hiresvis.errors import RunFolderError

if sys.platform != "win32":  # no such locks there: nothing is held, and nobody can tell
    import fcntl

_ATTEMPTS, _PAUSE_S = 5, 0.1  # who looks whether a run goes on has the lock himself for a moment


class Hold:
    """The lock of one run, taken by the process that trains it.

    Locks by another machine on a shared file system count where that file system passes them on.
    """

    def __init__(self) -> None:
        self._handle: int | None = None
        _ALL.add(self)

    def take(self, events: Path) -> None:
        """Holds the run whose events go to this file, which is made where it is missing.

        Raises:
            RunFolderError: another process works on the run.
        """
        if sys.platform == "win32":
            return
        try:
            handle = os.open(events, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError:  # told where events are written
            return
        for attempt in range(_ATTEMPTS):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if attempt == _ATTEMPTS - 1:
                    os.close(handle)
                    ways = f"watch it: hiresvis show {events.parent} --follow, or stop it first"
                    raise RunFolderError(f"{events.parent}: another process works on this run; {ways}") from error
                time.sleep(_PAUSE_S)
            except OSError:  # a file system without locks
                os.close(handle)
                return
            else:
                self._handle = handle
                return

    def release(self) -> None:
        """Lets go. Can be called twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def is_held(events: Path) -> bool | None:
    """Whether a process works on the run with this events file; None where that cannot be told. Needs no right to write."""
    if sys.platform == "win32":
        return None
    try:
        handle = os.open(events, os.O_RDONLY | os.O_NONBLOCK)  # a pipe in the place of the file would block for ever
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)
    return False


_ALL: weakref.WeakSet[Hold] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child shares its parent's lock: a loader process that outlives a killed run for a moment would keep it."""
    for hold in _ALL:
        with suppress(OSError):
            hold.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
