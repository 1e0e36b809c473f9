"""The live view on a terminal: what lasts, what is redrawn, and what is left behind."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console
from rich.text import Text
from views_screen import screen

from hiresvis.run.events import AutoResolved, Event, Notice, RunStarted, StepDone
from hiresvis.ui.console import ConsoleView, make_console_view
from hiresvis.ui.live import LiveArea
from hiresvis.ui.text import cell_width

MakeEvents = Callable[..., list[Event]]
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def console_of(width: int, height: int = 50, encoding: str = "utf-8", **environ: str) -> tuple[Console, Callable[[], str]]:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="", write_through=True)
    console = Console(
        file=stream, force_terminal=True, width=width, height=height, _environ=environ, highlight=False, markup=False, emoji=False,
        color_system="standard",
    )  # fmt: skip
    return console, lambda: raw.getvalue().decode(encoding)


def shown(events: list[Event], width: int, **options: str) -> str:
    console, output = console_of(width, **options)  # type: ignore[arg-type]
    with ConsoleView(console, lambda: 0.0, refresh_seconds=None) as view:
        for event in events:
            view.handle(event)
    assert view.failure is None
    return output()


@pytest.mark.parametrize("width", [40, 50, 80, 120])
def test_no_row_is_wider_than_the_terminal(make_events: MakeEvents, width: int) -> None:
    """Lasting lines are wrapped, tables cut, the live area fitted; commands alone are left to the terminal."""
    for row in screen(shown(make_events(2, 6), width)):
        if "hiresvis " not in row:
            assert cell_width(row) <= width, row


def test_live_area_leaves_only_lasting_lines(make_events: MakeEvents) -> None:
    """At the end no bar is left, and everything that lasts stands in order."""
    rows = screen(shown(make_events(3, 8), 120))
    text = "\n".join(rows)
    assert "━" not in text
    assert "img/s   step" not in text
    labels = [row.split("  ")[0] for row in rows if row and not row.startswith((" ", "▸"))]
    assert labels == [
        "run", *["auto"] * 6, "warning", "plan", "epoch 1", "epoch 2", "epoch 3", "done", "best", "test", "peak", "skipped", "next",
    ]  # fmt: skip


def test_live_area_stands_below_what_lasts(make_events: MakeEvents) -> None:
    """In training the last rows are the live area, once."""
    events = make_events(3, 8)
    last = next(i for i, e in enumerate(events) if isinstance(e, StepDone) and (e.epoch, e.step) == (2, 3))
    console, output = console_of(120)
    with ConsoleView(console, lambda: 0.0, refresh_seconds=None) as view:
        for event in events[: last + 1]:
            view.handle(event)
        rows = screen(output())
    assert rows[-6].startswith("hiresvis fit  convnextv2_base")
    assert rows[-6].endswith("epoch 2/3")
    assert "3/8" in rows[-5]
    assert sum("hiresvis fit" in row for row in rows) == 1


def test_final_screen_has_results_peaks_and_commands(make_events: MakeEvents) -> None:
    """Best metric and epoch, both peaks with their difference, skipped files, commands that can be copied."""
    text = "\n".join(screen(shown(make_events(3, 8), 120)))
    for part in (
        "macro_f1 0.7643 (0.841-0.907) at epoch 3",
        "test     macro_f1 0.881 (0.833-0.918)  accuracy 0.900",
        "predicted 20.9 GiB, measured 20.4 GiB (device allocator): predicted 2.5% above measured",
        "predicted 19.1 GiB, measured 19.0 GiB (counted storages): predicted 0.5% above measured",
        "1 file that could not be read",
        "hiresvis evaluate 'runs/lesions[03]'",
        "hiresvis predict 'runs/lesions[03]' IMAGE... --out predictions.csv",
        "hiresvis report 'runs/lesions[03]'",
    ):
        assert part in text


def test_commands_are_not_broken_on_a_narrow_terminal(make_events: MakeEvents) -> None:
    """The terminal wraps them, we do not: a copy has no line end in it."""
    assert any("hiresvis predict 'runs/lesions[03]' IMAGE... --out predictions.csv" in row for row in screen(shown(make_events(1, 3), 50)))


def test_brackets_in_names_are_shown_as_they_are(make_events: MakeEvents) -> None:
    """Nothing is read as markup: run names, notices, reasons."""
    started = next(event for event in make_events(1, 3) if isinstance(event, RunStarted))
    events: list[Event] = [
        replace(started, run_name="[bold]x[/]", model="m[red]"),
        Notice(level="warning", text="bad file [/b] [link=x]y"),
        AutoResolved(key="a[0]", value="[v]", reason="[dim]because"),
    ]
    text = "\n".join(screen(shown(events, 120)))
    for part in ("[bold]x[/]", "m[red]", "bad file [/b] [link=x]y", "a[0] = [v]", "[dim]because"):
        assert part in text


def test_no_color_sends_no_colour(make_events: MakeEvents) -> None:
    """With NO_COLOR there is weight but no colour code; without it there is."""
    colour = re.compile(r"\x1b\[[0-9;]*\b(3[0-7]|9[0-7])m")
    events = make_events(2, 4)
    assert colour.search(shown(events, 120))
    assert not colour.search(shown(events, 120, NO_COLOR="1"))


def test_ascii_terminal_gets_ascii_alone(make_events: MakeEvents) -> None:
    """Every drawing, separator and name can be written."""
    assert shown(make_events(2, 6), 120, encoding="ascii").isascii()


@pytest.mark.parametrize("end", ["finished", "interrupted", "none"])
def test_cursor_comes_back(make_events: MakeEvents, end: str) -> None:
    """However a run ends, the last word on the cursor is: show."""
    output = shown(make_events(1, 4, end=end), 120)
    assert HIDE in output
    assert output.rfind(SHOW) > output.rfind(HIDE)


def test_interrupt_restores_the_cursor_and_names_the_place(make_events: MakeEvents) -> None:
    """An exception passes through; the live area is gone, the cursor there, the step told."""
    console, output = console_of(120)
    events = make_events(1, 8)
    with pytest.raises(KeyboardInterrupt), ConsoleView(console, lambda: 0.0, refresh_seconds=None) as view:  # noqa: PT012
        for event in events:
            view.handle(event)
            if isinstance(event, StepDone) and event.step == 5:
                raise KeyboardInterrupt
    rows = screen(output())
    assert output().rfind(SHOW) > output().rfind(HIDE)
    assert rows[-2] == "stopped  at epoch 1, step 5 of 8"
    assert "━" not in "".join(rows)


def test_a_stop_is_drawn_without_an_event(make_events: MakeEvents) -> None:
    """Noted by a signal's handler, it stands in the next drawing, and is gone with the live area."""
    console, output = console_of(120)
    with ConsoleView(console, lambda: 0.0, refresh_seconds=None) as view:
        for event in make_events(1, 8, end="none")[:20]:
            view.handle(event)
        before = len(output())
        view.stopping("SIGTERM")
        assert len(output()) == before
        view._area.refresh()
        assert screen(output())[-1].startswith("stop  SIGTERM: the step is finished and saved first")
    assert "SIGTERM" not in "".join(screen(output()))


def test_resume_command_stands_on_the_last_screen(make_events: MakeEvents) -> None:
    """After Ctrl-C the way on is there to be copied."""
    assert "resume   hiresvis fit recipe.yaml --resume" in screen(shown(make_events(1, 4, end="interrupted"), 120))


def test_narrowed_window_is_cleaned_by_the_rows_it_wrapped_to() -> None:
    """Two lines of 80 columns take four rows at 50: the area goes up by three rows, not by one."""
    console, output = console_of(100)
    area = LiveArea(console, lambda columns, rows: [Text("x" * min(80, columns))] * 2, pytest.fail, None)
    area.start()
    area.refresh()
    before = len(output())
    console.width = 50
    area.refresh()
    assert output()[before:].startswith("\r\x1b[3A\x1b[J")
    before = len(output())
    area.refresh()
    assert output()[before:].startswith("\r\x1b[1A\x1b[J")
    area.stop()


def test_area_never_grows_past_the_terminal_height() -> None:
    """A cursor cannot go back to rows that scrolled away; the last lines are kept."""
    console, output = console_of(80, height=5)
    area = LiveArea(console, lambda columns, rows: [Text(f"line {n}") for n in range(20)], pytest.fail, None)
    area.start()
    area.refresh()
    assert screen(output()) == ["line 16", "line 17", "line 18", "line 19"]
    area.stop()


def test_prints_of_others_go_above_the_area(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning on standard error stands above; a bar redrawn by carriage returns leaves its last state."""
    console, output = console_of(80)
    monkeypatch.setattr(sys, "stderr", console.file)
    area = LiveArea(console, lambda columns, rows: [Text("live")], pytest.fail, None)
    area.start()
    area.refresh()
    print("a warning [x]", file=sys.stderr)
    sys.stderr.write("10% of all\r50% of all\r100%\n")
    sys.stderr.write("no line end")
    assert screen(output()) == ["a warning [x]", "100%", "live"]
    area.stop()
    assert sys.stderr is console.file
    assert screen(output()) == ["a warning [x]", "100%", "no line end", ""]


def test_standard_output_is_left_alone_when_it_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results piped into a file stay there."""
    console, _ = console_of(80)
    piped = io.StringIO()
    monkeypatch.setattr(sys, "stdout", piped)
    area = LiveArea(console, lambda columns, rows: [Text("live")], pytest.fail, None)
    area.start()
    assert sys.stdout is piped
    area.stop()


def test_refreshing_thread_draws_by_itself_and_ends(make_events: MakeEvents) -> None:
    """Without new events the area is drawn again; after the end no thread is left."""
    console, _ = console_of(120)
    drawn = threading.Event()

    def clock() -> float:
        if threading.current_thread().name == "hiresvis-live":
            drawn.set()
        return 0.0

    with ConsoleView(console, clock, refresh_seconds=0.01) as view:
        for event in make_events(1, 4)[:14]:
            view.handle(event)
        assert drawn.wait(10)
    assert view.failure is None
    assert not any(thread.name == "hiresvis-live" for thread in threading.enumerate())


def test_area_can_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After it was taken off the screen: one thread, the cursor hidden, standard error above it; and all given back at the end."""
    console, output = console_of(80)
    monkeypatch.setattr(sys, "stderr", console.file)
    drawn = threading.Semaphore(0)

    def draw(columns: int, rows: int) -> list[Text]:
        drawn.release()
        return [Text("live")]

    area = LiveArea(console, draw, pytest.fail, 0.01)
    for _ in range(2):
        area.start()
        print("told", file=sys.stderr)
        for _ in range(5):
            assert drawn.acquire(timeout=10)
        assert sum(thread.name == "hiresvis-live" for thread in threading.enumerate()) == 1
        assert output().rfind(HIDE) > output().rfind(SHOW)
        area.stop()
        assert sys.stderr is console.file
    assert screen(output()) == ["told", "told", ""]


def test_failing_drawing_in_the_thread_ends_the_view_alone(caplog: pytest.LogCaptureFixture) -> None:
    """An error while refreshing is kept and told once; the cursor is shown again and later events are no error."""
    console, output = console_of(120)
    view = ConsoleView(console, lambda: 0.0, refresh_seconds=0.01)
    failed = threading.Event()

    def draw(columns: int, rows: int) -> list[Text]:
        failed.set()
        raise ZeroDivisionError("broken")

    with view:
        view._area._draw = draw
        assert failed.wait(10)
        thread = view._area._thread
        assert thread is not None
        thread.join(10)
        assert isinstance(view.failure, ZeroDivisionError)
        view.handle(Notice(level="info", text="later"))
    assert isinstance(view.failure, ZeroDivisionError)
    assert "goes on without it" in caplog.text
    assert output().rfind(SHOW) > output().rfind(HIDE)


def test_columns_of_the_environment_are_honoured() -> None:
    """COLUMNS decides the width."""
    view = make_console_view(io.StringIO(), {"COLUMNS": "71", "TERM": "xterm"}, lambda: 0.0)
    assert view._console.width == 71


def test_dumb_terminal_gets_lines_without_cursor_codes(make_events: MakeEvents) -> None:
    """Asked for by name on TERM=dumb, the view prints what lasts and moves no cursor."""
    stream = io.StringIO()
    with make_console_view(stream, {"TERM": "dumb", "COLUMNS": "100"}, lambda: 0.0) as view:
        for event in make_events(1, 3):
            view.handle(event)
    assert "\x1b" not in stream.getvalue()
    assert "epoch 1" in stream.getvalue()
