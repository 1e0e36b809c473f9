"""Stop requests and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from hiresvis.errors import Interrupted
from hiresvis.train.stop import StopRequest


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_first_signal_is_noted_and_handlers_are_put_back(signum, code):
    """Inside, a signal only sets the request; afterwards the handlers are the caller's own again, also when entered twice."""
    stop = StopRequest()

    def own(number, frame):
        raise AssertionError("the caller's handler ran")

    before = {number: signal.signal(number, own) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with stop, stop:
            stop.raise_if_requested("nothing yet")
            os.kill(os.getpid(), signum)
            assert (stop.requested, stop.signal_name, stop.exit_code) == (True, signal.Signals(signum).name, code)
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == (own, own)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    with pytest.raises(Interrupted, match="while probing") as raised:
        stop.raise_if_requested("stopped while probing; nothing to save")
    assert raised.value.exit_code == code


def test_whoever_watches_is_told_at_once():
    """The signal's name comes from its handler, before the work that goes on has an event to tell."""
    told = []
    with StopRequest(told.append):
        os.kill(os.getpid(), signal.SIGTERM)
        assert told == ["SIGTERM"]


def test_second_interrupt_stops_at_once():
    """Two SIGINT: the second is a KeyboardInterrupt, whatever is going on."""
    with pytest.raises(KeyboardInterrupt), StopRequest():  # noqa: PT012 - the second signal is the statement under test
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_second_termination_ends_the_process():
    """Two SIGTERM: the process dies of the second one."""
    code = textwrap.dedent("""
        import os, signal
        from hiresvis.train.stop import StopRequest
        with StopRequest():
            os.kill(os.getpid(), signal.SIGTERM)
            print("still here", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            print("not reached", flush=True)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "still here\n")


def test_other_threads_can_use_it_without_signals():
    """Outside the main thread it works by hand."""
    found = []

    def work():
        with StopRequest() as stop:
            stop.request(signal.SIGTERM)
            found.append(stop.exit_code)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [143]
