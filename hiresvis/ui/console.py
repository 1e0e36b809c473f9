"""The live view: lasting lines above, the run's state in the last lines of the terminal, a last screen at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console
from rich.text import Text

from hiresvis.run.events import (
    AutoResolved,
    Evaluated,
    Event,
    Notice,
    PlanChosen,
    RunFinished,
    RunInterrupted,
    RunStarted,
)
from hiresvis.ui.layout import FULL_COLUMNS, Line, ladder_lines, live_lines
from hiresvis.ui.live import REFRESH_SECONDS, LiveArea
from hiresvis.ui.state import RunState, advance
from hiresvis.ui.text import (
    cell_width,
    evaluated_text,
    final_lines,
    glyphs_for,
    image_size_text,
    interrupted_lines,
    next_commands,
    pad,
    plan_peak_text,
    plan_text,
)
from hiresvis.ui.view import View

LABEL_COLUMNS = 9
AUTO_COLUMNS = 36  # of `key = value`, where the reason has a column of its own
_NOTICE_STYLES = {"warning": "bold yellow", "error": "bold red"}


def make_console_view(stream: TextIO, environ: Mapping[str, str], clock: Callable[[], float]) -> ConsoleView:
    """A live view on `stream`, drawn as its encoding and the environment allow."""
    console = Console(
        file=stream,
        force_terminal=environ.get("TERM", "").lower() != "dumb" or None,
        _environ=environ,
        highlight=False,
        markup=False,
        emoji=False,
    )
    return ConsoleView(console, clock)


class ConsoleView(View):
    """Shows events on a rich console.

    Args:
        console: where; its width is asked at each drawing, so the window may be resized.
        clock: seconds, rising; tells how old the last event is.
        refresh_seconds: time between two drawings; None: at events alone.
    """

    def __init__(self, console: Console, clock: Callable[[], float], refresh_seconds: float | None = REFRESH_SECONDS) -> None:
        self._console = console
        self._clock = clock
        self._glyphs = glyphs_for(console.encoding)
        self._state = RunState()
        self._event_clock = clock()
        self._was_finding = False  # before the event that is being shown
        self._stayed = False
        self._stop_signal = ""
        self._draw_at_events = refresh_seconds is None
        self._area = LiveArea(console, self._draw, self._give_up, refresh_seconds)

    def __enter__(self) -> ConsoleView:
        try:
            self._area.start()
        except (OSError, ValueError) as error:  # the terminal is gone already
            self._give_up(error)
        return self

    def stopping(self, signal_name: str) -> None:
        self._stop_signal = signal_name  # drawn with the next refresh

    def _show(self, event: Event) -> None:
        with self._area.lock:
            self._was_finding, self._state = self._state.finding, advance(self._state, event)
            self._event_clock = self._clock()
            if not self._show_lasting(event) and self._draw_at_events:
                self._area.refresh()

    def _stay(self) -> None:
        with self._area.lock:
            lines = self._draw(max(1, self._console.width - 1), self._console.height)
            self._area.stop()
        self._stayed = True
        for line in lines if self._state.phase != "find" else ():  # the ladder comes at the end anyway
            self._console.print(line)

    def _close(self, *, stopped: bool) -> None:
        self._area.stop()
        if self._state.phase == "find":
            self._ladder()
        if stopped and not self._stayed and self._state.phase in ("train", "evaluate"):
            state = self._state
            self._labelled("stopped", f"at epoch {state.epoch_number}, step {state.steps_done} of {state.num_steps}", "bold")

    def _restore(self) -> None:
        try:
            self._area.stop()
        except (OSError, ValueError):  # the stream is closed: there is no cursor left to restore
            return

    def _draw(self, columns: int, rows: int) -> list[Text]:
        now = self._state.time + max(0.0, self._clock() - self._event_clock)
        return [_rich(line) for line in live_lines(self._state, columns, now, self._glyphs, self._stop_signal)]

    def _show_lasting(self, event: Event) -> bool:
        """Print what stays; False where the event only changes the live area."""
        match event:
            case RunStarted():
                self._started(event)
            case AutoResolved():
                self._auto(event)
            case Notice():
                self._labelled(event.level, event.text, _NOTICE_STYLES.get(event.level, "bold"))
            case PlanChosen():
                self._plan(event)
            case Evaluated():
                self._evaluated(event)
            case RunFinished():
                self._finished(event)
            case RunInterrupted():
                self._interrupted(event)
            case _:
                return False
        return True

    def _started(self, event: RunStarted) -> None:
        self._area.start()  # again, where a run that was stopped goes on: its events are in one file
        text = f"{event.run_name}: {event.model} at {image_size_text(event.image_size)}"
        text += f", {event.num_train} training and {event.num_val} validation images"
        text += f", {event.outputs}" if event.classes else ""
        self._labelled("run", f"{text}; {event.device}", "bold")
        if event.resumed_from_epoch is not None:
            self._labelled("", f"resumed after epoch {event.resumed_from_epoch}")

    def _auto(self, event: AutoResolved) -> None:
        head = f"{event.key} = {event.value}"
        if self._console.width >= FULL_COLUMNS and cell_width(head) <= AUTO_COLUMNS:
            self._labelled("auto", [(event.reason, "dim")], "dim", pad(head, AUTO_COLUMNS + 2))
        else:
            self._labelled("auto", [(head, ""), (f"  {event.reason}", "dim")], "dim")

    def _plan(self, event: PlanChosen) -> None:
        if self._was_finding:
            self._ladder()
        batch, stages = plan_text(event, self._glyphs.dot)
        self._labelled("plan", f"{batch}   {stages}   {event.precision}", "bold green")
        self._labelled("", plan_peak_text(event))
        if event.why:
            self._labelled("", [(event.why, "dim")])

    def _ladder(self) -> None:
        width = max(1, self._console.width - 1)
        for line in ladder_lines(self._state, width, self._glyphs):
            self._console.print(_rich(line), no_wrap=True, overflow="crop")

    def _evaluated(self, event: Evaluated) -> None:
        train_loss = self._state.epoch_loss if event.split == "val" else None
        text = evaluated_text(event, train_loss)
        self._labelled(f"epoch {event.epoch}", [(text, "green" if event.is_best else "")], "bold")

    def _finished(self, event: RunFinished) -> None:
        self._area.stop()
        self._console.print()
        for label, text in final_lines(self._state, event):
            self._labelled(label, text, "bold green" if label in ("done", "best") else "bold")
        if self._state.started:
            self._commands("next", next_commands(self._state.started.run_dir, self._state.started.task))

    def _interrupted(self, event: RunInterrupted) -> None:
        self._area.stop()
        for label, text in interrupted_lines(self._state, event):
            self._labelled(label, text, "bold yellow")
        self._commands("resume", (event.resume_command,))

    def _commands(self, label: str, commands: tuple[str, ...]) -> None:
        """One command a line, never wrapped by us: a copy of it must run."""
        for index, command in enumerate(commands):
            line = Text.assemble((pad("" if index else label, LABEL_COLUMNS), "bold"), (self._glyphs.clean(command), "cyan"))
            self._console.print(line, soft_wrap=True)

    def _labelled(self, label: str, text: str | Line, style: str = "bold", column: str = "") -> None:
        """A lasting line with its label, and what is to stand in a second `column`; wrapped text stays right of them."""
        body = Text()
        for part, part_style in [(text, "")] if isinstance(text, str) else text:
            body.append("\n".join(self._glyphs.clean(line) for line in part.splitlines()), part_style)
        width = max(1, self._console.width - 1)
        indent = LABEL_COLUMNS if width >= 40 else 2
        label, column = self._glyphs.clean(label), self._glyphs.clean(column)
        head = pad(label, indent)
        if cell_width(head) > indent:  # a narrow terminal: the label takes the line before
            self._console.print(Text(label, style))
            head = " " * indent
        room = max(1, width - indent - cell_width(column))
        for index, line in enumerate(body.wrap(self._console, room, tab_size=4)):
            line.rstrip()
            before = (head, style), column
            if index:
                before = (" " * indent, ""), " " * cell_width(column)
            self._console.print(Text.assemble(*before, line), no_wrap=True, overflow="crop")


def _rich(line: Line) -> Text:
    text = Text(no_wrap=True, overflow="crop", end="")
    for part, style in line:
        text.append(part, style)
    return text
