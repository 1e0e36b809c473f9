"""When a run is saved, and what is said of it: snapshots by time and at epoch ends, and a disk or memory that fails in the middle of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from hiresvis.device import is_out_of_memory, release
from hiresvis.errors import EnvironmentFailed, first_line
from hiresvis.run.events import Event, Notice, SnapshotSaved
from hiresvis.train.keeper import Keeper
from hiresvis.train.progress import Progress


class Saver:
    """Saves through a keeper, and keeps the run's time.

    Args:
        keeper: writes the files.
        clock: seconds that only go forward. wall_clock: seconds since 1970, the events' time.

    Attributes:
        saved_at: (epoch, step) of the snapshot on disk; None: there is none.
    """

    def __init__(self, keeper: Keeper, *, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time) -> None:
        self.saved_at: tuple[int, int] | None = None
        self._keeper, self._clock, self._wall_clock = keeper, clock, wall_clock
        self._last_save = self._last_count = 0.0

    def start(self) -> None:
        """Time counts from here."""
        self._last_save = self._last_count = self._clock()

    def is_due(self, every: float | None) -> bool:
        """Whether the last try to save lies so many seconds back; None: never."""
        return every is not None and self._clock() - self._last_save >= every

    def is_saved(self, progress: Progress) -> bool:
        """Whether the snapshot on disk is of this very point."""
        return self.saved_at == (progress.epoch, progress.step)

    def seconds(self, progress: Progress) -> float:
        """Of the whole run, earlier starts included."""
        return progress.total_seconds + self._clock() - self._last_count

    def snapshot(self, progress: Progress) -> Iterator[Event]:
        """A snapshot of this point. A failing disk is told, and training goes on with the previous one."""
        progress.total_seconds = self.seconds(progress)
        self.start()  # after a failure, too: the next try is at the next interval
        failures = list(self.tried(self._keeper.save, progress))
        yield from failures
        if not failures:
            self.saved_at = (progress.epoch, progress.step)
            yield SnapshotSaved(time=self._wall_clock(), epoch=progress.epoch, step=progress.step, path=str(self._keeper.snapshot_dir))

    def tried(self, save: Callable[..., None], *args: Any) -> Iterator[Notice]:
        """A notice when saving fails. Memory that runs out is given back first, and saving tried once more."""
        for again in (True, False):
            try:
                save(*args)
                return
            except EnvironmentFailed as error:
                yield self._error(str(error))
                return
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                ran_out = first_line(error)
            if again:
                release()
        yield self._error(f"not saved: memory ran out ({ran_out}); what was saved before is whole")

    def _error(self, text: str) -> Notice:
        return Notice(time=self._wall_clock(), level="error", text=text)
