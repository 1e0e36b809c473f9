"""Damaged files of every format: refused by name, or read; never a crash, a hang, memory taken for a lie, or half an image."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "fuzz_images.py"


@pytest.mark.parametrize("count", [160, pytest.param(1200, marks=pytest.mark.slow)])
def test_damaged_files_are_refused_or_read_and_nothing_else(count: int) -> None:
    """The tool finds no fault among so many files, and most of what it damaged was refused."""
    call = [sys.executable, str(TOOL), "--count", str(count)]
    done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (\w+)", done.stdout.splitlines()[-1])}
    assert sum(counts.values()) == count
    assert counts["refused"] > count / 2
    assert counts["right"] > count / 20
