"""A whole `fit` in small, on this machine's own device: images are drawn, planned for, trained on and evaluated, and what was predicted is
held against what was measured. Everything lies in a temporary folder and is gone afterwards.

The model is built from random numbers, so nothing is fetched, and its accuracy after so few steps says nothing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hiresvis.data.samples import draw_boards
from hiresvis.errors import HiresvisError
from hiresvis.fit import fit
from hiresvis.recipe import parse_recipe
from hiresvis.run.events import PlanChosen, RunFinished, RunStarted, StepDone

MODEL, IMAGE_PX, BATCH = "convnext_atto", 192, 8
_BOARD_PX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What one small run did.

    Attributes:
        device: that it ran on.
        images_per_second: in training, waiting for images included.
        waiting: the share of training's time that was spent so, 0 to 1.
        predicted_counted_bytes, counted_bytes: live tensors at the peak of a step, as the plan has them and as they were counted.
        predicted_peak_bytes, measured_peak_bytes: of the process, or of the GPU.
        seconds: of all of it, drawing included.
    """

    device: str
    micro_batch: int
    num_steps: int
    images_per_second: float
    waiting: float
    predicted_counted_bytes: int | None
    counted_bytes: int | None
    predicted_peak_bytes: int
    measured_peak_bytes: int
    seconds: float


def rehearse(*, model: str = MODEL, image_px: int = IMAGE_PX) -> Rehearsal:
    """Runs it: some twenty seconds on two cores.

    Raises:
        HiresvisError: whatever `fit` raises on this machine.
    """
    began = time.perf_counter()
    started: RunStarted | None = None
    plan: PlanChosen | None = None
    finished: RunFinished | None = None
    steps: list[StepDone] = []
    with tempfile.TemporaryDirectory(prefix="hiresvis-doctor-") as folder:
        draw_boards(Path(folder) / "boards", num_train=2 * BATCH, num_val=BATCH, num_test=0, size_px=_BOARD_PX)
        recipe = (
            "task: classify",
            'data: {train: boards/train, val: boards/val, cache: "off"}',
            f"model: {{name: {model}, pretrained: false, image_size: {image_px}}}",
            f"train: {{epochs: 2, batch: {BATCH}}}",
            "log: {dir: run}",
        )
        for event in fit(parse_recipe("\n".join(recipe), Path(folder) / "recipe.yaml")):
            if isinstance(event, RunStarted):
                started = event
            elif isinstance(event, PlanChosen):
                plan = event
            elif isinstance(event, StepDone):
                steps.append(event)
            elif isinstance(event, RunFinished):
                finished = event
    if started is None or plan is None or finished is None or not steps:
        raise HiresvisError("the small run ended without its last event")
    pace = pace_of(steps)
    return Rehearsal(
        device=started.device,
        micro_batch=plan.micro_batch,
        num_steps=len(steps),
        images_per_second=pace.images_per_second,
        waiting=pace.waiting,
        predicted_counted_bytes=finished.predicted_counted_bytes,
        counted_bytes=finished.counted_peak_bytes,
        predicted_peak_bytes=finished.predicted_peak_bytes,
        measured_peak_bytes=finished.measured_peak_bytes,
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True, slots=True)
class Pace:
    """Images a second, and the share of the time that steps waited for them."""

    images_per_second: float
    waiting: float


def pace_of(steps: Sequence[StepDone]) -> Pace:
    """The pace of steps whose events are given; a step's time has its wait in it.

    Args:
        steps: one at least, none of which took no time.
    """
    milliseconds = sum(step.step_ms for step in steps)
    return Pace(sum(step.num_images for step in steps) / milliseconds * 1000, sum(step.data_wait_ms for step in steps) / milliseconds)
