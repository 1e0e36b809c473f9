"""The program: `python -m hiresvis`, the same as the installed `hiresvis`."""

import os
import signal
from types import FrameType

_INTERRUPTED = 130


def main() -> None:
    """Imports and runs the command line. A Ctrl-C before there is anything to save ends it at once, and quietly."""
    signal.signal(signal.SIGINT, _leave)
    from hiresvis.cli import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _leave(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
