"""Runs that are killed, stopped and starved of disk at random moments lose nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("how", "count"),
    [
        ("kill", 3),
        *(pytest.param(how, count, marks=pytest.mark.slow) for how, count in (("kill", 10), ("full", 5))),
    ],
)
def test_run_hit_at_random_moments_ends_as_one_left_in_peace(how: str, count: int) -> None:
    """No snapshot is lost, none is torn, none goes back, and the weights of all that were resumed are the same, bit for bit."""
    call = [sys.executable, str(ROOT / "tools" / "torture.py"), "--how", how, "--count", str(count)]
    done = subprocess.run(call, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{how}: {count} hits in ")
    assert "0 lost, 0 back, 0 failed, 0 other" in done.stdout
