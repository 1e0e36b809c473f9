"""Progressive resizing: the first epochs see smaller images, which cost less, and the last ones the size that counts.

What a network learns first are coarse things, which small images hold as well (Howard 2018, the fast.ai entry to DAWNBench; Tan and Le
2021, *EfficientNetV2*). Each size has its own plan, made for the micro-batch of the largest: batch statistics are then of as many images
throughout, and the smaller sizes recompute less. Evaluation is at the last size in every epoch, so that epochs compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.plan import CheckpointPlan
from hiresvis.train.relief import Relief


@dataclass(frozen=True, slots=True)
class SizePhase:
    """Epochs at one image size.

    Attributes:
        first_epoch: from 1.
        plan: of a step at this size; profile: that it was made by.
        pipeline: what makes images of this size.
    """

    first_epoch: int
    plan: CheckpointPlan
    profile: MemoryProfile
    pipeline: Any


class Sizes:
    """Switches plan and pipeline with the epoch.

    Args:
        phases: in their order, of which the last is what `relief` and `train_loader` begin with.
        relief: holds the plan applied.
        train_loader: `set_pipeline(pipeline)`.

    Attributes:
        last_epoch: before the last size.
    """

    def __init__(self, phases: Sequence[SizePhase], relief: Relief, train_loader: Any) -> None:
        self._phases, self._relief, self._train_loader = list(phases), relief, train_loader
        self._now = len(self._phases) - 1
        self.last_epoch = self._phases[-1].first_epoch - 1

    def begins(self, epoch: int) -> bool:
        """Whether an epoch is the first of another size than the one before it."""
        return any(phase.first_epoch == epoch for phase in self._phases[1:])

    def enter(self, epoch: int) -> str:
        """Readies an epoch; returns what to tell where it has another size than what was before."""
        number = max(index for index, phase in enumerate(self._phases) if phase.first_epoch <= epoch)
        if number == self._now:
            return ""
        self._phases[self._now] = replace(self._phases[self._now], plan=self._relief.plan)  # it may have been tightened
        self._now, phase = number, self._phases[number]
        self._relief.change(phase.plan, phase.profile)
        self._train_loader.set_pipeline(phase.pipeline)
        height, width = phase.plan.image_size
        until = f"up to epoch {self._phases[number + 1].first_epoch - 1}" if number + 1 < len(self._phases) else "from here on"
        again = f"{phase.plan.recompute_fraction:.1%} of a step's FLOPs recomputed" if phase.plan.recomputed else "everything stored"
        return f"epoch {epoch}: images of {height}x{width} px {until}, micro-batch {phase.plan.micro_batch}, {again}"
