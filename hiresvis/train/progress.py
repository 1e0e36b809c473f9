"""Where a run is, and where it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hiresvis.train.divergence import LossTrend


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """When to stop and when to save.

    Attributes:
        epochs: in all, those before a resume included.
        early_stop: epochs without a better metric or loss of validation after which the run ends; None: never.
        max_time: seconds since this start (a resumed run has its time anew), checked after each step; None: no limit.
        save_every: seconds between snapshots within an epoch; None: at epoch ends only.
        rollbacks: how often a run that diverges goes back to its last sound snapshot, with a lower learning rate.
    """

    epochs: int
    early_stop: int | None = None
    max_time: float | None = None
    save_every: float | None = None
    rollbacks: int = 0


@dataclass(slots=True)
class Progress:
    """What a snapshot keeps beside tensors, as JSON values.

    Attributes:
        metric: the one that decides which epoch is best.
        num_steps: optimizer steps an epoch.
        epoch: the one under way, from 1.
        step: steps done in it; equal to num_steps while it waits for its evaluation.
        loss_sum: over loss_images, the images of this epoch's applied steps.
        num_images: of this epoch, those of skipped steps included.
        seconds: of this epoch's steps.
        best_value, best_epoch, best_loss: of the weights in best.safetensors (the loss of validation); None and 0 while there are none.
        lowest_loss: of validation, so far.
        epochs_since_best: since the metric, or the loss of validation, was better than ever before.
        total_seconds: of all earlier starts up to their last snapshot.
        lr_scale: factor on the schedule's learning rate; below 1 after a rollback.
        num_rollbacks: so far.
        trend: of the loss, see `LossTrend`.
    """

    metric: str
    num_steps: int
    epoch: int = 1
    step: int = 0
    loss_sum: float = 0.0
    loss_images: int = 0
    num_images: int = 0
    seconds: float = 0.0
    best_value: float | None = None
    best_epoch: int = 0
    best_loss: float | None = None
    lowest_loss: float | None = None
    epochs_since_best: int = 0
    num_non_finite: int = 0
    non_finite_in_a_row: int = 0
    total_seconds: float = 0.0
    lr_scale: float = 1.0
    num_rollbacks: int = 0
    trend: LossTrend = field(default_factory=LossTrend)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Progress:
        """What `dataclasses.asdict` made of one."""
        return cls(**{**values, "trend": LossTrend(**values.get("trend", {}))})

    @property
    def global_step(self) -> int:
        """Optimizer steps done in the whole run, skipped ones included."""
        return (self.epoch - 1) * self.num_steps + self.step

    @property
    def train_loss(self) -> float:
        """Mean loss over the epoch so far; NaN when no step was applied."""
        return self.loss_sum / self.loss_images if self.loss_images else float("nan")

    def next_phase(self) -> None:
        """Forgets what was to be expected of the loss and the metric, and what a rollback made of the rate: something else is trained from
        here on, at a rate of its own."""
        self.epochs_since_best, self.trend = 0, LossTrend()
        self.lr_scale, self.num_rollbacks = 1.0, 0

    def next_size(self) -> None:
        """Forgets what was to be expected of the loss and the metric: the images are larger from here on."""
        self.epochs_since_best, self.trend = 0, LossTrend()

    def next_epoch(self) -> None:
        """Opens the next epoch."""
        self.epoch += 1
        self.step = self.loss_images = self.num_images = 0
        self.loss_sum = self.seconds = 0.0
