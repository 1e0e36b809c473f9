"""How far a long look at many files is: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from hiresvis.ui import interactive
from hiresvis.units import format_duration

FIRST_S, BETWEEN_S = 5.0, 30.0  # a short look says nothing


@contextmanager
def counting(what: str, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[int, int | None], None]]:
    """A function to call with (done, total), total None where nobody knows it; what it shows is gone, or stays as lines, when the block
    is left."""
    if not interactive(stream):
        yield _Lines(what, stream, clock)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(file=stream), transient=True)

    def show(done: int, total: int | None) -> None:
        if not bar.tasks:  # the bar comes with the first file: models are built and tables read before
            bar.start()
            bar.add_task(what, total=total)
        bar.update(bar.tasks[0].id, completed=done, total=total)

    try:
        yield show
    finally:
        bar.stop()


class _Lines:
    """The first line after five seconds, then one every thirty."""

    def __init__(self, what: str, stream: TextIO, clock: Callable[[], float]) -> None:
        self._what, self._stream, self._clock = what, stream, clock
        self._begun = clock()
        self._next = self._begun + FIRST_S
        self._first = math.nan  # files that were known before anything was looked at

    def __call__(self, done: int, total: int | None) -> None:
        now = self._clock()
        if math.isnan(self._first):
            self._first, self._begun = done, now
        if now < self._next:
            return
        self._next = now + BETWEEN_S
        rate = (done - self._first) / max(now - self._begun, 1e-9)
        if total is None:
            print(f"{self._what}: {done}", file=self._stream, flush=True)
            return
        left = f", {format_duration((total - done) / rate)} left" if rate > 0 and done < total else ""
        print(f"{self._what}: {done} of {total}{left}", file=self._stream, flush=True)
