"""What a person sees of one recorded run, kept as text files to look at: `golden/*.txt`.

`recorded.jsonl` are the events of a real run of `recipes/quickstart.yaml`: stopped by Ctrl-C in its second epoch, and resumed with less
memory (`hiresvis fit recipes/quickstart.yaml --resume memory.budget=1700MiB`). Paths were made relative. After a change that is meant:

    python tests/ui/test_golden.py

writes the files again; look at their difference before it is committed.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from views_screen import Screen

from hiresvis.run import read_events
from hiresvis.run.events import Evaluated, EvaluationStep, Event, LadderRow, PlanChosen, RunFinished, RunInterrupted, StepDone
from hiresvis.ui.console import ConsoleView
from hiresvis.ui.plain import JsonView, PlainView

HERE = Path(__file__).resolve().parent
EVENTS = list(read_events(HERE / "recorded.jsonl"))


def last(wanted: Callable[[Event], bool]) -> int:
    """Where in the recording the last such event is."""
    return max(index for index, event in enumerate(EVENTS) if wanted(event))


MOMENTS = {
    # a third row of the ladder has come
    "finding the batch": 2 + next(i for i, event in enumerate(EVENTS) if isinstance(event, LadderRow)),
    "training, in the first epoch": next(i for i, event in enumerate(EVENTS) if isinstance(event, StepDone) and event.step == 7),
    "evaluation": next(i for i, event in enumerate(EVENTS) if isinstance(event, EvaluationStep) and event.step == 2),
    "the epoch's result, a lasting line": next(i for i, event in enumerate(EVENTS) if isinstance(event, Evaluated)),
    "stopped": last(lambda event: isinstance(event, RunInterrupted)),
    "resumed with another plan": 1 + last(lambda event: isinstance(event, PlanChosen)),
    "training, in the second epoch": last(lambda event: isinstance(event, StepDone) and event.step == 10),
    "last screen": last(lambda event: isinstance(event, RunFinished)),
}


class Clock:
    """The recording's own time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def console(columns: int, rows: int, encoding: str = "utf-8", **environ: str) -> tuple[Console, Callable[[], str]]:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="", write_through=True)
    made = Console(
        file=stream, force_terminal=True, width=columns, height=rows, _environ={"TERM": "xterm-256color", **environ}, highlight=False,
        markup=False, emoji=False,
    )  # fmt: skip
    return made, lambda: raw.getvalue().decode(encoding)


def windows(columns: int, rows: int, encoding: str = "utf-8") -> str:
    """The window of a terminal at each moment, and the last screen in full."""
    made, output = console(columns, rows, encoding)
    clock, screen, fed, found = Clock(), Screen(columns, rows), 0, []
    names = {index: name for name, index in MOMENTS.items()}
    with ConsoleView(made, clock, refresh_seconds=None) as view:
        for index, event in enumerate(EVENTS):
            clock.now = event.time
            view.handle(event)
            written = output()
            screen.feed(written[fed:])
            fed = len(written)
            if index in names:
                found.append(f"{names[index]} ".ljust(columns, "=") + "\n" + "\n".join(screen.lines()).rstrip("\n") + "\n")
    assert view.failure is None
    assert screen.feed(output()[fed:]).cursor_shown
    assert len(found) == len(MOMENTS)
    return "\n".join(found)


def codes(**environ: str) -> str:
    """What is sent for one drawing of the live area and one lasting line, with the codes to be seen."""
    made, output = console(120, 30, **environ)
    clock, sent = Clock(), ""
    with ConsoleView(made, clock, refresh_seconds=None) as view:
        for event in EVENTS[: MOMENTS["the epoch's result, a lasting line"] + 1]:
            clock.now, before = event.time, len(output())
            view.handle(event)
            sent = output()[before:]
    return sent.replace("\x1b", "<ESC>").replace("\r", "<CR>")


def plain(encoding: str = "utf-8") -> str:
    raw, clock = io.BytesIO(), Clock()
    with PlainView(io.TextIOWrapper(raw, encoding=encoding, newline="", write_through=True), clock) as view:
        for event in EVENTS:
            clock.now = event.time
            view.handle(event)
    assert view.failure is None
    return raw.getvalue().decode(encoding)


def json_lines() -> str:
    """The first event of each kind."""
    stream = io.StringIO()
    with JsonView(stream) as view:
        for event in {event.kind: event for event in reversed(EVENTS)}.values():
            view.handle(event)
    return "".join(sorted(stream.getvalue().splitlines(keepends=True), key=lambda line: json.loads(line)["time"]))


GOLDEN: dict[str, Callable[[], str]] = {
    "terminal_120x30": lambda: windows(120, 30),
    "terminal_80x24": lambda: windows(80, 24),
    "terminal_50x20": lambda: windows(50, 20),
    "terminal_120x30_ascii": lambda: windows(120, 30, "ascii"),
    "codes": codes,
    "codes_no_color": lambda: codes(NO_COLOR="1"),
    "plain": plain,
    "plain_ascii": lambda: plain("ascii"),
    "json": json_lines,
}


def file_of(name: str) -> Path:
    return HERE / "golden" / f"{name}.txt"


@pytest.mark.parametrize("name", GOLDEN)
def test_the_recorded_run_looks_as_it_did(name: str) -> None:
    """Each view of the recording is the file's text, to the letter."""
    assert GOLDEN[name]() == file_of(name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["terminal_120x30_ascii", "plain_ascii", "json"])
def test_terminals_without_utf8_get_ascii(name: str) -> None:
    """Not one other letter, and the same rows as elsewhere."""
    text = file_of(name).read_text(encoding="utf-8")
    assert text.isascii()
    other = file_of(name.removesuffix("_ascii")).read_text(encoding="utf-8")
    assert len(text.splitlines()) == len(other.splitlines())


@pytest.mark.parametrize("columns", [120, 80, 50])
def test_no_row_of_the_window_is_left_over(columns: int) -> None:
    """In no window is a header or a bar of an earlier drawing, and none has more rows than the window."""
    rows = {120: 30, 80: 24, 50: 20}[columns]
    for window in file_of(f"terminal_{columns}x{rows}").read_text(encoding="utf-8").split("=\n")[1:]:
        lines = window.splitlines()
        assert sum("img/s   step" in line or "wait 1%  " in line for line in lines) <= 1
        assert sum("━" in line for line in lines) <= 1
        assert len(lines) <= rows + 2  # the next window's title stands below


if __name__ == "__main__":
    for name, make in GOLDEN.items():
        file_of(name).parent.mkdir(exist_ok=True)
        file_of(name).write_text(make(), encoding="utf-8")
