"""A polite stop: the first SIGINT, SIGTERM or SIGUSR1 asks, the second one does not."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from hiresvis.errors import Interrupted

# SIGUSR1 is what batch systems send some minutes before they kill (Slurm's --signal=USR1@300).
_SIGNALS = (signal.SIGINT, signal.SIGTERM, *((signal.SIGUSR1,) if hasattr(signal, "SIGUSR1") else ()))


class StopRequest:
    """While entered, the first SIGINT, SIGTERM or SIGUSR1 is only noted, for long work to end at its next safe point.

    A SIGINT or SIGTERM after that meets the handlers that Python starts with, and stops at once: KeyboardInterrupt, or death by SIGTERM.
    A SIGUSR1 only warns: after it the first of the others still asks. Handlers are as before on leaving. It can be entered again while
    entered, so that probing and training can share one. Outside the main thread, where Python allows no handlers, only `request` sets it.

    Args:
        told: called with the signal's name when one asks, from its handler: it may note that, and do no more.
    """

    def __init__(self, told: Callable[[str], None] | None = None) -> None:
        self._told = told
        self._signal: signal.Signals | None = None
        self._depth = 0
        self._before: dict[signal.Signals, object] = {}

    @property
    def requested(self) -> bool:
        return self._signal is not None

    @property
    def signal_name(self) -> str:
        """SIGINT, SIGTERM or SIGUSR1; empty while nothing is requested."""
        return self._signal.name if self._signal else ""

    @property
    def exit_code(self) -> int:
        """What the shell expects of a process ended by this signal: 130, or 143, also for a warning that came before SIGTERM."""
        return 128 + (signal.SIGINT if self._signal in (None, signal.SIGINT) else signal.SIGTERM)

    def request(self, signum: int = signal.SIGINT) -> None:
        """Asks for a stop, as the signal would."""
        self._signal = signal.Signals(signum)
        if self._told is not None:
            self._told(self._signal.name)

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
        if signum not in (signal.SIGINT, signal.SIGTERM):
            if not self.requested:
                self.request(signum)
            return
        self.request(signum)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
