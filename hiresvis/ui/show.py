"""A run shown again from its events: as it stands, or while it goes on, from any terminal. Reads one file, and writes none.

The folder may be anybody's. Events are values of checked types, text is cleaned of control characters by the views, and a command that
stands in the file is shown only where a shell reads nothing but words in it.
"""

from __future__ import annotations

import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TextIO

from hiresvis.errors import Interrupted, RunFolderError
from hiresvis.run.events import Event, RunFinished, RunInterrupted, RunStarted, StepDone
from hiresvis.run.hold import is_held
from hiresvis.run.tail import Tail
from hiresvis.ui import Ui, View, make_view
from hiresvis.units import format_duration

LOOK_SECONDS = 0.5  # between two looks at a file that may grow


def show(
    folder: Path,
    *,
    follow: bool = False,
    ui: Ui = "auto",
    stream: TextIO,
    environ: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.time,
    wait: Callable[[float], None] = time.sleep,
) -> str:
    """Shows a run in the view that `ui` names.

    Args:
        folder: the run's.
        follow: stay until the run ends, however it does; else the run is shown as it stands.
        ui, stream, environ: as `make_view` takes them.
        clock: seconds since the epoch, as events are stamped.
        wait: called with seconds before each further look.

    Returns:
        How the run stands, where its last screen does not say so: that it goes on, or that it ended without a word; else nothing.

    Raises:
        RunFolderError: there are no events.
        Interrupted: SIGINT or SIGTERM; the run is not touched.
    """
    events = folder / "events.jsonl"
    if not events.exists():
        what = "it has no events.jsonl" if folder.exists() else "no such folder"
        raise RunFolderError(f"{folder}: {what}; give a run's folder, which fit makes once the batch is found")
    with _interruptible(events):
        while True:
            tail, shown, time_shown = Tail(events), _Shown(), _Time(clock)
            with make_view(ui, stream=stream, environ=environ, clock=time_shown) as view:
                view.tells_failure = False
                try:
                    for event in _until_end(tail, events, follow, wait):
                        with time_shown.at(event.time):
                            view.handle(event if ui == "json" else _as_seen_from_here(event, folder))
                        shown.add(event)
                        _raise_failure(view)
                finally:
                    view.stay()
                _raise_failure(view)
            if not tail.replaced:
                return shown.standing(folder, is_held(events), clock(), follow=follow)


def _until_end(tail: Tail, events: Path, follow: bool, wait: Callable[[float], None]) -> Iterator[Event]:
    """The events there are, and, to follow, those to come: until no process works on the run any more."""
    ended = False
    while not tail.replaced:
        held = is_held(events)  # before the look, so that nothing is missed of what came before the end
        for event in tail.news():
            ended = isinstance(event, RunFinished | RunInterrupted) or (ended and not isinstance(event, RunStarted))
            yield event
        if not follow or held is False or (held is None and ended):
            return
        wait(LOOK_SECONDS)


@dataclass(slots=True)
class _Time:
    """The time of the event that is being shown, so that a view's cadence is that of the run; between events, the present."""

    clock: Callable[[], float]
    past: float | None = None

    def __call__(self) -> float:
        past = self.past
        return self.clock() if past is None else past

    @contextmanager
    def at(self, moment: float) -> Iterator[None]:
        self.past = moment
        try:
            yield
        finally:
            self.past = None


@dataclass(slots=True)
class _Shown:
    """What the last sentence needs of the events."""

    last: Event | None = None
    place: str = "before its first step"
    ended: bool = False

    def add(self, event: Event) -> None:
        self.last = event
        if isinstance(event, RunStarted):
            self.ended, self.place = False, "before its first step"
        elif isinstance(event, StepDone):
            self.place = f"at epoch {event.epoch}, step {event.step} of {event.num_steps}"
        elif isinstance(event, RunFinished | RunInterrupted):
            self.ended = True

    def standing(self, folder: Path, held: bool | None, now: float, *, follow: bool) -> str:
        """How the run stands.

        Raises:
            RunFolderError: nothing was shown, and nothing will come.
        """
        if self.last is None:
            if held:
                return "The run has begun; nothing is told yet."
            raise RunFolderError(f"{folder / 'events.jsonl'}: no event in it; give a folder that hiresvis fit made")
        ago = f"its last event came {format_duration(max(0.0, now - self.last.time))} ago"
        if held and not follow:
            return f"The run goes on, {self.place}; {ago}. Watch it: hiresvis show {shlex.quote(str(folder))} --follow"
        if self.ended or held:
            return ""
        if held is None:
            return f"The run is {self.place}; {ago}. Whether it goes on cannot be told here."
        return f"The run ended without a word {self.place}: killed, or stopped by an error; {ago}. Go on with it: fit with --resume"


def _as_seen_from_here(event: Event, folder: Path) -> Event:
    """The event with commands that work here and do what they seem to."""
    if isinstance(event, RunStarted):
        return replace(event, run_dir=str(folder))
    if isinstance(event, RunInterrupted) and not _is_plain_command(event.resume_command):
        return replace(event, resume_command="hiresvis fit RECIPE --resume")
    return event


def _is_plain_command(command: str) -> bool:
    """Whether a shell would run hiresvis with these words and do nothing else."""
    try:
        words = shlex.split(command)
    except ValueError:
        return False
    return words[:2] == ["hiresvis", "fit"] and command.isprintable() and shlex.join(words) == command


def _raise_failure(view: View) -> None:
    """Here the view is all there is to do."""
    if view.failure is not None:
        raise view.failure


@contextmanager
def _interruptible(events: Path) -> Iterator[None]:
    """SIGINT and SIGTERM leave, with the terminal as it was."""

    def terminated(signum: int, frame: FrameType | None) -> None:
        raise Interrupted("Left.", exit_code=128 + signum)

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, terminated) if in_main else None
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("Left; the run goes on." if is_held(events) else "Left.") from None
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)
