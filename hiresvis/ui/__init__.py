"""Views of a run: live in a terminal, plain lines, JSON lines, and the report page. No torch, and rich only when it is used."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Literal, TextIO

from hiresvis.ui.view import SilentView, View

__all__ = ["Ui", "View", "interactive", "make_view"]

Ui = Literal["auto", "rich", "plain", "json", "off"]


def make_view(
    ui: Ui,
    *,
    stream: TextIO | None = None,
    environ: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> View:
    """The view that `ui` names; `auto` is rich on an interactive terminal, plain elsewhere, in CI and with TERM=dumb.

    Args:
        ui: the recipe's `log.ui` or the command's `--ui`.
        stream: where it is shown; standard error when None, so that results alone go to standard output.
        environ: where NO_COLOR, COLUMNS, TERM and CI are read; the process's own when None.
        clock: seconds, rising; only differences count.

    Returns:
        A context manager with `handle(event)`. Its failures never reach the caller.
    """
    stream = sys.stderr if stream is None else stream
    environ = os.environ if environ is None else environ
    if ui == "auto":
        ui = "rich" if interactive(stream, environ) else "plain"
    if ui == "off":
        return SilentView()
    if ui == "rich":
        from hiresvis.ui.console import make_console_view

        return make_console_view(stream, environ, clock)
    from hiresvis.ui.plain import JsonView, PlainView

    return JsonView(stream) if ui == "json" else PlainView(stream, clock)


def interactive(stream: TextIO, environ: Mapping[str, str] | None = None) -> bool:
    """Whether a person watches: a terminal that can move its cursor, and no CI."""
    environ = os.environ if environ is None else environ
    if environ.get("TERM", "").lower() == "dumb" or environ.get("CI", "").lower() not in ("", "0", "false"):
        return False
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # a stream without isatty, or a closed one
        return False
