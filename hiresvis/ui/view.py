"""What all views have in common: they are shown events, and their failures stay their own."""

from __future__ import annotations

import logging
from types import TracebackType

from hiresvis.run.events import Event

_log = logging.getLogger(__name__)


class View:
    """A display of events. A view that fails says so once and is silent from then on: training goes on."""

    failure: Exception | None = None
    tells_failure = True  # in the log; False where whoever shows the events tells it

    def handle(self, event: Event) -> None:
        """Show one event."""
        if self.failure is not None:
            return
        try:
            self._show(event)
        except Exception as error:  # any failure of a display, a closed terminal for one, must not stop training
            self._give_up(error)

    def stopping(self, signal_name: str) -> None:
        """A signal has asked the run to stop, which takes until its next safe point. Called from the signal's handler: it only notes."""

    def stay(self) -> None:
        """Leave on the screen what is drawn of the run as it is now: nothing comes any more, and it has not ended."""
        if self.failure is not None:
            return
        try:
            self._stay()
        except Exception as error:  # as in `handle`
            self._give_up(error)

    def __enter__(self) -> View:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            self._close(stopped=kind is not None)
        except Exception as failure:  # as in `handle`
            self._give_up(failure)

    def _give_up(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = error
            self._restore()
            if self.tells_failure:
                _log.warning("The live view failed (%s: %s); the run goes on without it.", type(error).__name__, error)

    def _show(self, event: Event) -> None:
        """Show one event; may raise."""

    def _stay(self) -> None:
        """Make what moves last; may raise."""

    def _close(self, *, stopped: bool) -> None:
        """End the display; `stopped` when an error or an interrupt ends it. May raise."""

    def _restore(self) -> None:
        """Leave the terminal usable after a failure; must not raise."""


class SilentView(View):
    """Shows nothing."""
