"""The shipped recipe for circuit boards, on the real panels: accuracy, time, and memory as seen from outside."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PANELS = ROOT.parent / "shared" / "data" / "pcb" / "panels"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
POLL_S = 0.005

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(45 * 60),
    pytest.mark.skipif(not (PANELS / "train").is_dir(), reason=f"the real panels are not at {PANELS}; data/README.md says how to get them"),
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident size from outside is read under /proc"),
]


@dataclass(frozen=True)
class Watched:
    """A finished fit: its last screen, its files, and the resident size of its process over time, polled from this one."""

    screen: str
    plan: dict[str, Any]
    events: list[dict[str, Any]]
    sizes: list[tuple[float, int]]

    def only(self, kind: str) -> dict[str, Any]:
        (row,) = (row for row in self.events if row["event"] == kind)
        return row

    @property
    def test_accuracy(self) -> float:
        return float(self.only("run_finished")["test_metrics"]["accuracy"])

    def resident_rise(self) -> int:
        """Highest resident size in training, less that just before the first step."""
        begin = next(row["time"] for row in self.events if row["event"] == "epoch_started")
        end = max(row["time"] for row in self.events if row["event"] == "snapshot_saved")
        before = [size for moment, size in self.sizes if moment <= begin]
        during = [size for moment, size in self.sizes if begin < moment <= end]
        assert before
        assert during
        return max(during) - before[-1]


def fit_pcb(run_dir: Path, *overrides: str, recipe: Path = ROOT / "recipes" / "pcb.yaml") -> Watched:
    """The recipe's own command, as its own process."""
    data = (f"data.train={PANELS}/train", f"data.test={PANELS}/test")
    call = [sys.executable, "-m", "hiresvis", "fit", str(recipe), *data, f"log.dir={run_dir}", *overrides, "--ui", "plain"]
    sizes: list[tuple[float, int]] = []
    screen = run_dir.with_name(f"{run_dir.name}.txt")
    with screen.open("w", encoding="utf-8") as stream, subprocess.Popen(call, cwd=ROOT, stdout=stream, stderr=stream) as process:
        try:
            while process.poll() is None:
                pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1:2]
                if pages:
                    sizes.append((time.time(), int(pages[0]) * PAGE_BYTES))
                time.sleep(POLL_S)
        finally:
            process.kill()
    text = screen.read_text(encoding="utf-8")
    assert process.returncode == 0, text[-3000:]
    plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    rows = (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return Watched(text, plan, [json.loads(row) for row in rows], sizes)


def assert_memory_as_predicted(run: Watched) -> None:
    """The peak stays under the budget; it was predicted within 5% by counted storages, within 10% by resident size."""
    plan, measured = run.plan, run.plan["measured"]
    assert measured["resident_peak_bytes"] <= plan["budget_bytes"]
    assert run.only("run_finished")["measured_peak_bytes"] <= plan["budget_bytes"]
    assert measured["counted_peak_bytes"] == pytest.approx(measured["predicted_counted_bytes"], rel=0.05)
    # Weights and buffers are there before the first step; everything else of the prediction rises with training.
    predicted = plan["predicted_peak_bytes"] - plan["parts"]["baseline"] - plan["parts"]["weights"]
    assert run.resident_rise() == pytest.approx(predicted, rel=0.10)
    by_probe = measured["resident_peak_bytes"] - measured["baseline_bytes"]
    assert by_probe == pytest.approx(predicted, rel=0.10)
    assert re.search(r"peak +predicted [\d.]+ [MG]iB, measured [\d.]+ [MG]iB \(resident size\)", run.screen)
    assert re.search(r"predicted [\d.]+ [MG]iB, measured [\d.]+ [MG]iB \(counted storages\)", run.screen)


def test_boards_are_told_apart_at_768_px_within_the_budget(tmp_path):
    """At least 95% of boards never seen, with a budget that makes the plan recompute."""
    run = fit_pcb(tmp_path / "large")
    assert run.plan["image_size"] == [768, 768]
    assert any(unit["decision"] != "store" for unit in run.plan["units"])
    assert run.plan["batch"] == 8
    assert_memory_as_predicted(run)
    assert run.test_accuracy >= 0.95


def test_at_224_px_the_defects_are_nearly_gone(tmp_path):
    """The same recipe on small images reaches at most 88%: the size is what makes the difference."""
    run = fit_pcb(tmp_path / "small", "model.image_size=224")
    assert run.plan["image_size"] == [224, 224]
    assert run.test_accuracy <= 0.88
