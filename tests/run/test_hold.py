"""Whether a process works on a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hiresvis.errors import RunFolderError
from hiresvis.run.hold import Hold, is_held

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_run_is_held_until_it_is_let_go(tmp_path):
    """Taking makes the file where it is missing; letting go twice is fine."""
    events = tmp_path / "events.jsonl"
    assert is_held(events) is None, "there is no run"
    with Hold() as hold:
        hold.take(events)
        assert is_held(events)
    hold.release()
    assert is_held(events) is False
    assert events.read_bytes() == b""


def test_a_second_process_is_refused_with_the_ways_on(tmp_path):
    """Two processes in one run folder would write over each other's snapshots."""
    with Hold() as first, Hold() as second:
        first.take(tmp_path / "events.jsonl")
        with pytest.raises(RunFolderError, match=r"another process works on this run; watch it: hiresvis show .* --follow"):
            second.take(tmp_path / "events.jsonl")
    with Hold() as third:
        third.take(tmp_path / "events.jsonl")


def test_looking_needs_no_right_to_write(tmp_path, monkeypatch):
    """The file is opened to be read, and nothing is made: told by what is asked of the system, as root may write anywhere."""
    events, asked, really = tmp_path / "events.jsonl", [], os.open

    def spied(path, flags, *rest, **named):
        asked.append(flags)
        return really(path, flags, *rest, **named)

    with Hold() as hold:
        hold.take(events)
        monkeypatch.setattr(os, "open", spied)
        assert is_held(events)
        monkeypatch.undo()
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
    assert asked
    assert not any(flags & writing for flags in asked)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_process_holds_nothing_even_where_its_children_live_on(tmp_path):
    """SIGKILL lets go at once; a child by fork, as a loader process is, does not keep its parent's lock."""
    code = (
        "import os, sys, time; from pathlib import Path; from hiresvis.run.hold import Hold\n"
        "hold = Hold(); hold.take(Path(sys.argv[1])); child = os.fork()\n"
        "if child: print(child, flush=True)\n"
        "time.sleep(60)\n"
    )
    call = [sys.executable, "-c", code, str(tmp_path / "events.jsonl")]
    process = subprocess.Popen(call, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        assert is_held(tmp_path / "events.jsonl")
        process.kill()
        process.wait()
        deadline = time.monotonic() + 10
        while is_held(tmp_path / "events.jsonl") and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(child, 0)  # still there
        assert is_held(tmp_path / "events.jsonl") is False
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_a_pipe_in_the_place_of_the_events_is_not_waited_for(tmp_path):
    """A foreign folder may hold anything; looking at it ends at once."""
    os.mkfifo(tmp_path / "events.jsonl")
    assert is_held(tmp_path / "events.jsonl") in (False, None)
