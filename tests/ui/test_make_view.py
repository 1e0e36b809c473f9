"""Which view is chosen, and what it costs to choose."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from hiresvis.run.events import Event
from hiresvis.ui import SilentView, View, make_view
from hiresvis.ui.console import ConsoleView
from hiresvis.ui.plain import JsonView, PlainView


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "stream", "expected"),
    [
        ({"TERM": "xterm-256color"}, Terminal(), ConsoleView),
        ({}, Terminal(), ConsoleView),
        ({"CI": "false"}, Terminal(), ConsoleView),
        ({"TERM": "dumb"}, Terminal(), PlainView),
        ({"TERM": "xterm", "CI": "true"}, Terminal(), PlainView),
        ({"TERM": "xterm", "CI": "1"}, Terminal(), PlainView),
        ({"TERM": "xterm"}, io.StringIO(), PlainView),
    ],
)
def test_auto_is_rich_on_an_interactive_terminal_alone(environ: dict[str, str], stream: io.StringIO, expected: type[View]) -> None:
    """A pipe, TERM=dumb and CI get plain lines."""
    assert type(make_view("auto", stream=stream, environ=environ)) is expected


def test_named_views_are_given_whatever_the_stream() -> None:
    """What the user names is what the user gets."""
    stream = io.StringIO()
    assert type(make_view("rich", stream=stream, environ={})) is ConsoleView
    assert type(make_view("plain", stream=Terminal(), environ={})) is PlainView
    assert type(make_view("json", stream=stream, environ={})) is JsonView
    assert type(make_view("off", stream=stream, environ={})) is SilentView


def test_closed_stream_counts_as_no_terminal() -> None:
    """Choosing a view never fails."""
    stream = Terminal()
    stream.close()
    assert isinstance(make_view("auto", stream=stream, environ={}), View)


def test_failing_view_tells_once_and_stays_silent(caplog: pytest.LogCaptureFixture) -> None:
    """The first failure is kept; neither later events nor the end raise or repeat it."""

    class Broken(View):
        calls = 0

        def _show(self, event: Event) -> None:
            self.calls += 1
            raise RuntimeError("first")

        def _close(self, *, stopped: bool) -> None:
            raise RuntimeError("second")

    with Broken() as view:
        view.handle(Event())
        view.handle(Event())
    assert isinstance(view, Broken)
    assert view.calls == 1
    assert str(view.failure) == "first"
    assert caplog.text.count("goes on without it") == 1


def test_plain_view_loads_neither_rich_nor_a_training_library() -> None:
    """A log starts at once."""
    code = (
        "import sys, hiresvis.ui as ui; ui.make_view('plain'); print([m for m in ('rich', 'jinja2', 'torch', 'timm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
