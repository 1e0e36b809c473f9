"""Losses per sample, and what the outputs of a network that was trained with them mean.

The step sums the losses over a batch, evaluation reports them one by one. A loss knows its task, so that whoever has it can read outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Loss(Protocol):
    """What training and evaluation ask of a loss. `task`: classify | multilabel | regress."""

    task: str

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses (b,) of outputs (b, k) and targets, for training."""

    def plain(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses (b,) without what training adds (smoothing), so that runs can be compared."""

    def scores(self, outputs: Tensor) -> Tensor:
        """What the outputs mean (b, k): probabilities, or values in the targets' own units."""

    def blank_targets(self, num_images: int) -> Tensor:
        """Targets of the shape and type that the loader gives, for steps that only measure."""


def _smoothing(label_smoothing: float) -> float:
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing {label_smoothing} is not in 0 <= value < 1")
    return label_smoothing


class CrossEntropy:
    """One class an image: cross entropy over targets (b,) int64, or over shares of classes (b, k) where images are mixed.

    Args:
        label_smoothing: share of the target spread over all classes, 0 to below 1.
    """

    task = "classify"

    def __init__(self, *, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = _smoothing(label_smoothing)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        shares = targets if targets.dim() == 1 else targets.to(outputs.dtype)
        return F.cross_entropy(outputs, shares, label_smoothing=self.label_smoothing, reduction="none")

    def plain(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(dim=1)

    def blank_targets(self, num_images: int) -> Tensor:
        return torch.zeros(num_images, dtype=torch.int64)


class BinaryCrossEntropy:
    """Any number of classes an image: binary cross entropy over targets (b, k) of 0 and 1, the mean over classes.

    Args:
        num_classes: k.
        label_smoothing: share of each target spread over yes and no, 0 to below 1.
    """

    task = "multilabel"

    def __init__(self, num_classes: int, *, label_smoothing: float = 0.0) -> None:
        self.num_classes, self.label_smoothing = num_classes, _smoothing(label_smoothing)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.plain(outputs, targets * (1 - self.label_smoothing) + self.label_smoothing / 2)

    def plain(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none").mean(dim=1)

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def blank_targets(self, num_images: int) -> Tensor:
        return torch.zeros(num_images, self.num_classes, dtype=torch.float64)


class Regression:
    """Numbers: a distance between outputs and targets (b, k) that are scaled to mean 0 and deviation 1, the mean over targets.

    Args:
        kind: huber (squares up to one deviation, absolute beyond), mse or l1.
        mean, std: of each target in train, in its own units.
    """

    task = "regress"

    def __init__(self, kind: str, mean: Sequence[float], std: Sequence[float]) -> None:
        self._distance = _DISTANCES[kind]
        # float64 for reading: a small deviation around a large mean must not be rounded away.
        self._mean, self._std = (torch.tensor(values, dtype=torch.float64) for values in (mean, std))

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, std = self._mean.to(targets.device), self._std.to(targets.device)
        return self._distance(outputs, ((targets.double() - mean) / std).to(outputs.dtype), reduction="none").mean(dim=1)

    plain = __call__

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.double() * self._std.to(outputs.device) + self._mean.to(outputs.device)

    def blank_targets(self, num_images: int) -> Tensor:
        return torch.zeros(num_images, len(self._mean), dtype=torch.float64)


_DISTANCES: Mapping[str, Callable[..., Tensor]] = {"huber": F.huber_loss, "mse": F.mse_loss, "l1": F.l1_loss}


def make_loss(name: str, *, num_outputs: int, label_smoothing: float = 0.0, mean: Sequence[float] = (), std: Sequence[float] = ()) -> Loss:
    """The loss of a recipe.

    Args:
        name: cross_entropy | bce | huber | mse | l1.
        num_outputs: classes, or targets.
        label_smoothing: of cross_entropy and bce.
        mean, std: of the targets, for the others.
    """
    if name == "cross_entropy":
        return CrossEntropy(label_smoothing=label_smoothing)
    if name == "bce":
        return BinaryCrossEntropy(num_outputs, label_smoothing=label_smoothing)
    return Regression(name, mean, std)
