"""A real run seen from beside it: by `show`, by a second `fit`, and in the log that `nohup` leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_in_another_process_is_known_by_its_life(workshop, start):
    """While it trains `show` says so and a second `fit` is refused; after kill -9 `show --follow` says that, and ends."""
    run = workshop.path("")
    fit = ("fit", workshop.recipe, f"log.dir={run}", "train.epochs=60", "train.early_stop=null")
    process = start(*fit)
    process.wait_for("step_done", epoch=2, step=1)
    done = workshop("show", run)
    assert (done.code, done.err.count("\n")) == (0, 1)
    assert "\nrun name=recipe model=test_resnet image_size=64x64 task=classify classes=2 train_images=16 " in done.out
    assert "The run goes on, at epoch " in done.err
    refused = workshop.fit("--resume", ok=False)
    assert refused.code == 6
    assert f"{run}: another process works on this run; watch it: hiresvis show {run} --follow" in refused.err
    killer = threading.Timer(1.0, process.send, (signal.SIGKILL,))
    killer.start()
    done = workshop("show", run, "--follow", "--ui", "json")
    killer.join()
    assert done.code == 0
    assert done.out.splitlines() == run.joinpath("events.jsonl").read_text().rpartition("\n")[0].splitlines()
    assert "The run ended without a word at epoch " in done.err


@pytest.mark.slow
def test_nohup_of_a_thousand_steps_is_a_short_log(open_workshop, draw, tmp_path):
    """Started as people start it, with nobody watching: under 200 lines, no carriage return, the commands at the end; and `show
    --follow`, a process of its own started while it trained, has shown the same lines of the run.
    """
    data = draw(tmp_path / "data", {"train": {"blue": 100, "red": 100}, "val": {"blue": 4, "red": 4}}, size_px=32)
    work = open_workshop(data)
    run, log = work.path(""), tmp_path / "nohup.out"
    overrides = ["data.test=null", "model.image_size=32", "train.batch=2", "train.epochs=10", "train.early_stop=null", f"log.dir={run}"]
    environ = {name: value for name, value in os.environ.items() if name not in ("CI", "COLUMNS")} | {
        "TERM": "xterm",
        "OMP_NUM_THREADS": "1",
    }
    call = [sys.executable, "-m", "hiresvis"]
    with log.open("w") as stream:
        nohup = subprocess.Popen(
            ["nohup", *call, "fit", work.recipe, *overrides], cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
        )
    while nohup.poll() is None and not (run / "events.jsonl").exists():
        time.sleep(0.05)
    beside = subprocess.run([*call, "show", run, "--follow"], cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert nohup.wait() == 0, log.read_text()
    text = log.read_text(encoding="utf-8")
    assert len(work.events("step_done")) == 1000
    assert 30 < len(text.splitlines()) < 200
    assert not set(text) & {"\r", "\x1b"}
    assert "next    hiresvis report" in text
    assert (beside.returncode, beside.stderr) == (0, "")
    lasting = [line for line in text.splitlines() if line and not line.startswith(("step ", "nohup:"))]
    assert [line for line in beside.stdout.splitlines() if not line.startswith("step ")] == lasting
