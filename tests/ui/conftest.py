"""A believable run, event by event, and its folder: what the views and the report are tried on."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hiresvis.run.events import (
    AutoResolved,
    EpochDone,
    EpochStarted,
    Evaluated,
    EvaluationStep,
    Event,
    LadderRow,
    Notice,
    PlanChosen,
    RunFinished,
    RunInterrupted,
    RunStarted,
    SnapshotSaved,
    StepDone,
    to_json,
)

# The terminal that tests look at is a module of its own, `views_screen`, found by this name.
_SPEC = importlib.util.spec_from_file_location("views_screen", Path(__file__).with_name("views_screen.py"))
assert _SPEC
assert _SPEC.loader
sys.modules["views_screen"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sys.modules["views_screen"])

GIB = 2**30
CLASSES = ("intact", "short", "open circuit", "mouse bite", "spur", "<b>pinhole</b>")
T0 = 1_760_000_000.0


def opening(epochs: int, num_steps: int) -> Iterator[Event]:
    """From the start to the plan: 20 seconds."""
    time = T0
    yield RunStarted(
        time=time, run_name="lesions[03]", run_dir="runs/lesions[03]", model="convnextv2_base", image_size=(2048, 2048),
        task="classify", classes=CLASSES, num_train=16 * num_steps - 5, num_val=120, epochs=epochs, batch=16,
        device="cuda:0 NVIDIA RTX 4090", budget_bytes=22 * GIB, capacity_bytes=24 * GIB,
    )  # fmt: skip
    for key, value, reason in (
        ("memory.budget", "22.0GiB", "free on the card, less 1 GiB for what the allocator does not count"),
        ("memory.precision", "bf16", "the device has it"),
        ("optim.lr", "1.0e-04", "AdamW fine-tuning from pretrained weights: 1e-4 x sqrt(batch / 16)"),
        ("optim.layer_decay", "0.8", "a pretrained backbone with 4 stages"),
        ("train.metric", "macro_f1", "the largest class is 4.2x the smallest"),
        ("data.workers", "6", "8 CPU cores, two left to the rest"),
    ):
        yield AutoResolved(time=time + 1, key=key, value=value, reason=reason)
    yield Notice(time=time + 1, level="warning", text="data/train: 3 files are rotated by EXIF; they are turned [as everywhere]")
    rungs = [
        (0, "off", 0, 25.3, 0.0, "too large: one image needs 25.3 GiB"),
        (1, "4", 1, 17.2, 0.31, ""),
        (2, "2", 1, 14.8, 0.31, ""),
        (3, "1", 2, 21.4, 0.32, ""),
        (4, "stage0 1 · stage1 2 · rest stored", 2, 20.9, 0.11, ""),
    ]
    for i, (rung, spacing, micro, peak, recompute, verdict) in enumerate(rungs):
        yield LadderRow(
            time=time + 2 + i, rung=rung, spacing=spacing, micro_batch=micro, predicted_peak_bytes=int(peak * GIB),
            recompute_fraction=recompute, images_per_second=None if not micro else 7.1 - 4 * recompute, verdict=verdict,
        )  # fmt: skip
    yield LadderRow(
        time=time + 15, rung=4, spacing="stage0 1 · stage1 2 · rest stored", micro_batch=2, predicted_peak_bytes=int(20.9 * GIB),
        recompute_fraction=0.11, measured_peak_bytes=int(20.4 * GIB), images_per_second=6.8, verdict="chosen: least recompute",
    )  # fmt: skip
    yield PlanChosen(
        time=time + 20, micro_batch=2, accumulation=8, batch=16, precision="bf16",
        stages=("stage0 spacing 1", "stage1 spacing 2", "rest stored"), predicted_peak_bytes=int(20.9 * GIB),
        measured_peak_bytes=int(20.4 * GIB), budget_bytes=22 * GIB, recompute_fraction=0.11,
        why="spacing off does not hold one image; a mixed plan holds 2 with 11% more compute",
    )  # fmt: skip


def one_epoch(epoch: int, num_steps: int, time: float, best: tuple[float, int], chance: random.Random) -> Iterator[Event]:
    """Training, evaluation, snapshot: 2.35 s a step, 20 s for the rest."""
    yield EpochStarted(time=time, epoch=epoch, num_steps=num_steps)
    lr = 1e-4
    for step in range(1, num_steps + 1):
        time += 2.35
        place = epoch - 1 + step / num_steps
        lr = 1e-4 * min(1.0, place) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, place / 20)))
        loss = 0.25 + 1.5 * math.exp(-place / 2) + 0.15 * chance.gauss(0, 1) * math.exp(-place / 6)
        yield StepDone(
            time=time, epoch=epoch, step=step, num_steps=num_steps, loss=loss, lr=lr, grad_norm=0.9 + 0.2 * chance.random(),
            num_images=16 if step < num_steps else 11, step_ms=2350, data_wait_ms=94, memory_bytes=int(20.4 * GIB),
            num_skipped=1 if epoch > 1 else 0,
        )  # fmt: skip
    for step in range(1, 6):
        yield EvaluationStep(time=time + 3 * step, epoch=epoch, step=step, num_steps=5)
    value = 0.95 - 0.55 * math.exp(-epoch / 2.5) - (0.02 if epoch % 4 == 3 else 0)
    is_best = value > best[0]
    best = (value, epoch) if is_best else best
    yield Evaluated(
        time=time + 16, epoch=epoch, split="val", loss=0.3 + math.exp(-epoch / 2), metrics={"macro_f1": value, "accuracy": value + 0.02},
        metric="macro_f1", value=value, is_best=is_best, best_value=best[0], best_epoch=best[1],
    )  # fmt: skip
    yield EpochDone(
        time=time + 17, epoch=epoch, train_loss=0.25 + 1.5 * math.exp(-epoch / 2), lr=lr, seconds=num_steps * 2.35, images_per_second=6.8
    )
    yield SnapshotSaved(time=time + 18, epoch=epoch, step=num_steps, path="runs/lesions[03]/snapshot")


def whole_run(epochs: int = 3, num_steps: int = 40, *, end: str = "finished") -> list[Event]:
    """A run of 40 steps an epoch; `end`: finished | interrupted | none."""
    chance = random.Random(0)
    events = list(opening(epochs, num_steps))
    best, time = (0.0, 0), T0 + 20
    for epoch in range(1, epochs + 1):
        events += one_epoch(epoch, num_steps, time, best, chance)
        best = next((e.best_value, e.best_epoch) for e in reversed(events) if isinstance(e, Evaluated))
        time = events[-1].time + 2
    if end == "finished":
        events.append(
            RunFinished(
                time=time, reason="completed", epochs=epochs, metric="macro_f1", best_value=best[0], best_epoch=best[1],
                test_metrics={"macro_f1": 0.881, "accuracy": 0.9}, predicted_peak_bytes=int(20.9 * GIB),
                measured_peak_bytes=int(20.4 * GIB), counted_peak_bytes=int(19.0 * GIB), predicted_counted_bytes=int(19.1 * GIB),
                num_skipped=1, seconds=time - T0,
                results={
                    "val": {"images": 120, "loss": 0.4, "macro_f1": best[0], "intervals": {"macro_f1": [0.8412, 0.907]}},
                    "test": {"images": 90, "loss": 0.5, "macro_f1": 0.881, "intervals": {"macro_f1": [0.8326, 0.9181]}},
                },
            )
        )  # fmt: skip
    elif end == "interrupted":
        resume = "hiresvis fit recipe.yaml --resume"
        events.append(RunInterrupted(time=time, signal="SIGINT", epoch=epochs, step=num_steps, resume_command=resume))
    return events


def plan_json() -> dict[str, Any]:
    """A plan like that of a four-stage pyramid."""
    chance = random.Random(1)
    units: list[dict[str, Any]] = [{"name": "stem", "stage": "stem", "kind": "stem", "decision": "recompute", "segment": 0}]
    segment = 0
    for stage, depth in enumerate((3, 3, 27, 3)):
        if stage:
            units.append({"name": f"stages.{stage}.downsample", "stage": f"stage{stage}", "kind": "downsample", "decision": "store"})
        for block in range(depth):
            recompute = stage == 0 or (stage == 1 and block < 2)
            segment += 1 if recompute and (stage == 0 or block == 0) else 0
            units.append(
                {"name": f"stages.{stage}.blocks.{block}", "stage": f"stage{stage}", "kind": "block",
                 "decision": "recompute" if recompute else "store", "segment": segment if recompute else None}
            )  # fmt: skip
    units.append({"name": "head", "stage": "head", "kind": "head", "decision": "store", "segment": None})
    for unit in units:
        scale = {"stem": 700, "stage0": 1900, "stage1": 950, "stage2": 240, "stage3": 120, "head": 6}[unit["stage"]]
        saved = int(scale * (0.5 if unit["kind"] == "downsample" else 0.95 + 0.1 * chance.random()) * 2**20)
        kept = saved if unit["decision"] == "store" else saved // 11
        unit.update({"segment": unit.get("segment"), "saved_bytes": saved, "kept_bytes": kept, "flops": 10**10, "runs": 3.0})
    rows = {row.rung: row for row in opening(3, 40) if isinstance(row, LadderRow)}
    return {
        "version": 1, "model": "convnextv2_base", "image_size": [2048, 2048], "precision": "bf16", "batch": 16, "micro_batch": 2,
        "accumulation": 8, "eval_batch": 4, "budget_bytes": 22 * GIB, "capacity_bytes": 24 * GIB, "predicted_peak_bytes": int(20.9 * GIB),
        "measured": {"resident_peak_bytes": int(20.4 * GIB), "counted_peak_bytes": int(19.0 * GIB),
                     "predicted_counted_bytes": int(19.1 * GIB), "baseline_bytes": int(0.6 * GIB)},
        "recompute_fraction": 0.11,
        "parts": {"baseline": int(0.6 * GIB), "weights": int(0.33 * GIB), "gradients": int(0.33 * GIB), "optimizer": int(0.66 * GIB),
                  "saved": int(15.8 * GIB), "interior": int(2.6 * GIB), "reserve": int(0.58 * GIB)},
        "stages": ["stage0 spacing 1", "stage1 spacing 2", "rest stored"], "units": units,
        "ladder": [to_json(rows[rung]) for rung in sorted(rows)],
        "why": "spacing off does not hold one image; a mixed plan holds 2 with 11% more compute",
        "augmented_by": "albumentations 2.0.8",
        "machine": {"device": "NVIDIA RTX 4090", "memory_bytes": 24 * GIB, "cores": 8, "system": "Linux 6.1 x86_64", "python": "3.11.2",
                    "packages": {"hiresvis": "0.1.0", "torch": "2.9.0", "timm": "1.0.22"}},
    }  # fmt: skip


RESOLVED = """\
version: 1  # default
task: classify  # given
data:
  train: data/train  # given
  workers: 6  # auto: 8 CPU cores, two left to the rest
optim:
  lr: 0.0001  # auto: AdamW fine-tuning from pretrained weights
"""


def write_run(folder: Path, events: list[Event], images: int = 12) -> Path:
    """A run folder as `fit` leaves it, with small images for its predictions."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(2)
    (folder / "events.jsonl").write_text("".join(json.dumps(to_json(event)) + "\n" for event in events), encoding="utf-8")
    (folder / "plan.json").write_text(json.dumps(plan_json()), encoding="utf-8")
    (folder / "contract.json").write_text(
        json.dumps({"version": 1, "classes": CLASSES, "image_size": [2048, 2048], "fit": "resize", "channels": 3}), encoding="utf-8"
    )
    (folder / "recipe.resolved.yaml").write_text(RESOLVED, encoding="utf-8")
    (folder / "recipe.yaml").write_text("task: classify  # <b>given</b>\n", encoding="utf-8")
    bins = {"after": [[40, 0.62, 0.6], [80, 0.91, 0.9]], "before": [[20, 0.7, 0.5], [100, 0.97, 0.875]]}
    (folder / "reliability.json").write_text(json.dumps({"val": bins}), encoding="utf-8")
    rows = []
    for index in range(120):
        label = CLASSES[min(int(chance.expovariate(0.45)), 5)]
        right = chance.random() < 0.86
        predicted = label if right else chance.choice(CLASSES)
        path = folder / "images" / f"{index:03d}.jpg"
        if index < images:
            path.parent.mkdir(exist_ok=True)
            colour = tuple(chance.randrange(40, 220) for _ in range(3))
            Image.new("RGB", (320, 200 + 10 * index), colour).save(path)
        score = 0.5 + chance.random() / 2
        loss = -math.log(score) if predicted == label else 2 + 4 * chance.random() + (3 if index < images else 0)
        rows.append(["val", str(path), label, predicted, f"{score:.4f}", f"{loss:.4f}"])
    with (folder / "samples.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["split", "name", "label"], *([row[0], row[1], row[2]] for row in rows)])
    with (folder / "predictions.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["split", "path", "label", "predicted", "score", "loss"], *rows])
    return folder


@pytest.fixture
def make_events() -> Callable[..., list[Event]]:
    """`whole_run`: the events of a run."""
    return whole_run


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run folder for the given events."""

    def make(events: list[Event], **options: Any) -> Path:
        return write_run(tmp_path / "run", events, **options)

    return make
