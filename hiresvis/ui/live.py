"""The redrawn area at the foot of a terminal.

rich's own `Live` moves up by the number of lines it drew, so after the window gets narrower, when the terminal has wrapped those
lines into more rows, it leaves the old ones behind. This area counts rows at the width of now. It also leaves standard output
alone unless that is the same terminal: results stay results.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.control import Control
from rich.segment import ControlType, Segment
from rich.text import Text

REFRESH_SECONDS = 0.25
_ERASE_BELOW = Segment("\x1b[J", None, [(ControlType.CLEAR,)])


class LiveArea(RenderHook):
    """Lines that stay below everything that is printed.

    Args:
        console: where the area lives; prints through it go above.
        draw: gives the lines for (columns, rows); called from the refreshing thread as well.
        on_failure: called, once, when drawing fails in that thread.
        refresh_seconds: time between two drawings; None: only when asked.
    """

    def __init__(
        self,
        console: Console,
        draw: Callable[[int, int], list[Text]],
        on_failure: Callable[[Exception], None],
        refresh_seconds: float | None = REFRESH_SECONDS,
    ) -> None:
        self.lock = threading.RLock()
        self._console = console
        self._draw = draw
        self._on_failure = on_failure
        self._refresh_seconds = refresh_seconds
        self._drawn: list[int] = []  # columns of each line on the screen
        self._active = False
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._streams: list[tuple[str, TextIO]] = []

    def start(self) -> None:
        """Hide the cursor and begin, also again after `stop`; nothing happens on what cannot move its cursor."""
        if self._active or not self._console.is_terminal or self._console.is_dumb_terminal:
            return
        self._active = True
        self._console.show_cursor(False)
        self._console.push_render_hook(self)
        self._redirect()
        if self._refresh_seconds is not None:
            self._done = threading.Event()
            self._thread = threading.Thread(target=self._keep_fresh, args=(self._done,), name="hiresvis-live", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Take the area off the screen and give cursor and streams back. Can be called twice."""
        if not self._active:
            return
        self._done.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=2)
        with self.lock:
            self._active = False
            self._console.pop_render_hook()
            unfinished = self._give_back()
            try:
                self._console.control(self._above())
            finally:
                self._drawn = []
                self._console.show_cursor(True)
            for stream in unfinished:
                stream.finish()

    def refresh(self) -> None:
        """Draw again."""
        if self._active:
            with self.lock:
                self._console.print(Control())

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Called by rich for each print: the area goes, the print comes, the area comes back."""
        if not self._active:
            return renderables
        return [self._above(), *renderables, cast(ConsoleRenderable, _Drawing(self._lines))]

    def _above(self) -> Control:
        """The way back to the area's first row, and a clean screen from there."""
        if not self._drawn:
            return Control()
        columns = max(1, self._console.width)
        rows = sum(max(1, math.ceil(drawn / columns)) for drawn in self._drawn)
        control = Control(ControlType.CARRIAGE_RETURN, *([(ControlType.CURSOR_UP, rows - 1)] if rows > 1 else []))
        return _with_erasure(control)

    def _lines(self) -> list[Text]:
        # One column and one row stay free: a full line wraps on some terminals, and the cursor needs a row it can return from.
        rows = max(1, self._console.height - 1)
        lines = self._draw(max(1, self._console.width - 1), rows)[-rows:]
        self._drawn = [line.cell_len for line in lines]
        return lines

    def _keep_fresh(self, done: threading.Event) -> None:
        while not done.wait(self._refresh_seconds):
            try:
                with self.lock:
                    if not done.is_set():
                        self.refresh()
            except Exception as error:  # told by the view; an error here would only end the thread, with a traceback on the screen
                self._on_failure(error)
                return

    def _redirect(self) -> None:
        """What others print to this terminal meanwhile goes above the area."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and (stream is self._console.file or (name == "stdout" and _is_terminal(stream))):
                self._streams.append((name, stream))
                setattr(sys, name, _Above(self._console, stream, self.lock))

    def _give_back(self) -> list[_Above]:
        """Put the standard streams back; returns the stand-ins, which may hold a line without an end."""
        stand_ins = []
        for name, stream in self._streams:
            stand_in = getattr(sys, name)
            if isinstance(stand_in, _Above):
                setattr(sys, name, stream)
                stand_ins.append(stand_in)
        self._streams = []
        return stand_ins


def _with_erasure(control: Control) -> Control:
    erasing = Control()
    erasing.segment = Segment(control.segment.text + _ERASE_BELOW.text, None, _ERASE_BELOW.control)
    return erasing


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


class _Drawing:
    """The area's lines, worked out when rich comes to them."""

    def __init__(self, lines: Callable[[], list[Text]]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._segments(console, options)

    def _segments(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for index, line in enumerate(self._lines()):
            if index:
                yield Segment.line()
            yield from line.render(console)


class _Above:
    """A standard stream whose whole lines are printed above the area."""

    def __init__(self, console: Console, stream: TextIO, lock: threading.RLock) -> None:
        self._console = console
        self._stream = stream
        self._lock = lock
        self._rest = ""

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                self._print(line)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """An unfinished line waits for its end: it would be drawn over."""

    def finish(self) -> None:
        """Write out what has no line end yet."""
        if self._rest:
            self._print(self._rest)
            self._rest = ""

    def _print(self, line: str) -> None:
        # A bar that draws itself again and again with carriage returns leaves its last state only.
        self._console.print(Text.from_ansi(line.rstrip("\r").rsplit("\r", 1)[-1]), soft_wrap=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
