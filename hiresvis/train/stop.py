"""A polite stop: the first SIGINT or SIGTERM asks, the second one does not."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

from hiresvis.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While entered, the first SIGINT or SIGTERM is only noted, for long work to end at its next safe point.

    The second signal of either kind meets the handlers that Python starts with, and stops at once: KeyboardInterrupt, or death by SIGTERM.
    Handlers are as before on leaving. It can be entered again while entered, so that probing and training can share one. Outside
    the main thread, where Python allows no handlers, only `request` sets it.
    """

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._depth = 0
        self._before: dict[signal.Signals, object] = {}

    @property
    def requested(self) -> bool:
        return self._signal is not None

    @property
    def signal_name(self) -> str:
        """SIGINT or SIGTERM; empty while nothing is requested."""
        return self._signal.name if self._signal else ""

    @property
    def exit_code(self) -> int:
        """What the shell expects of a process ended by this signal: 130 or 143."""
        return 128 + (self._signal or signal.SIGINT)

    def request(self, signum: int = signal.SIGINT) -> None:
        """Asks for a stop, as the signal would."""
        self._signal = signal.Signals(signum)

    def raise_if_requested(self, message: str) -> None:
        """For work with nothing to save, such as probing.

        Raises:
            Interrupted: a stop was requested.
        """
        if self.requested:
            raise Interrupted(message, exit_code=self.exit_code)

    def __enter__(self) -> StopRequest:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth == 0:
            for number, handler in self._before.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            self._before = {}

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.request(signum)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
