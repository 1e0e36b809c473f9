"""Losses per sample, and what the outputs of a network that was trained with them mean.

The step sums the losses over a batch, evaluation reports them one by one. A loss knows its task, so that whoever has it can read outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hiresvis.train.class_losses import ANY_CLASSES, ONE_CLASS
from hiresvis.train.mask_losses import MaskLoss


class Loss(Protocol):
    """What training and evaluation ask of a loss. `task`: classify | multilabel | regress | segment."""

    task: str

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses (b,) of outputs (b, k) and targets, for training."""

    def plain(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses (b,) that compare runs of other settings: of classes and labels (binary) cross entropy, whichever form is trained, without
        smoothing or weights."""

    def scores(self, outputs: Tensor) -> Tensor:
        """What the outputs mean (b, k): probabilities, or values in the targets' own units."""

    def blank_targets(self, num_images: int) -> Tensor:
        """Targets of the shape and type that the loader gives, for steps that only measure."""


def _smoothing(label_smoothing: float) -> float:
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing {label_smoothing} is not in 0 <= value < 1")
    return label_smoothing


class CrossEntropy:
    """One class an image: cross entropy, or another of its forms, over targets (b,) int64, or (b, k) shares of mixed images.

    Args:
        kind: cross_entropy, focal or bce (see `class_losses`).
        label_smoothing: share of the target spread over all classes, 0 to below 1.
        weights: k of them; a sample's loss is multiplied by its class's, a mixed one's by its share of each. Empty: none.
        temperature: what outputs are divided by before they are read as probabilities.
    """

    task = "classify"

    def __init__(
        self, kind: str = "cross_entropy", *, label_smoothing: float = 0.0, weights: Sequence[float] = (), temperature: float = 1.0
    ) -> None:
        self._losses, self.label_smoothing, self.temperature = ONE_CLASS[kind], _smoothing(label_smoothing), temperature
        self._weights = _tensor_or_none(weights)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = self._losses(outputs, targets, self.label_smoothing)
        if self._weights is None:
            return losses
        weights = self._weights.to(outputs)
        return losses * (weights[targets] if targets.ndim == 1 else targets.to(outputs) @ weights)

    def plain(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    def scores(self, outputs: Tensor) -> Tensor:
        return (outputs if self.temperature == 1 else outputs / self.temperature).softmax(dim=1)

    def blank_targets(self, num_images: int) -> Tensor:
        return torch.zeros(num_images, dtype=torch.int64)


class BinaryCrossEntropy:
    """Any number of classes an image: binary cross entropy, or another of its forms, over targets (b, k) of 0 to 1, the mean over classes.

    Args:
        num_classes: k.
        kind: bce, focal or asl (see `class_losses`).
        label_smoothing: share of each target spread over yes and no, 0 to below 1.
        weights: k of them, on each class's positives. Empty: none.
    """

    task = "multilabel"

    def __init__(self, num_classes: int, kind: str = "bce", *, label_smoothing: float = 0.0, weights: Sequence[float] = ()) -> None:
        self._losses, self.num_classes, self.label_smoothing = ANY_CLASSES[kind], num_classes, _smoothing(label_smoothing)
        self._weights = _tensor_or_none(weights)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        wanted = (targets * (1 - self.label_smoothing) + self.label_smoothing / 2).to(outputs.dtype)
        return self._losses(outputs, wanted, None if self._weights is None else self._weights.to(outputs)).mean(dim=1)

    def plain(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none").mean(dim=1)

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def blank_targets(self, num_images: int) -> Tensor:
        return torch.zeros(num_images, self.num_classes, dtype=torch.float64)


def _tensor_or_none(values: Sequence[float]) -> Tensor | None:
    return torch.tensor(values, dtype=torch.float64) if len(values) else None


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


def make_loss(
    name: str,
    *,
    task: str,
    num_outputs: int,
    label_smoothing: float = 0.0,
    weights: Sequence[float] = (),
    temperature: float = 1.0,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    mask_size: tuple[int, int] = (0, 0),
) -> Loss:
    """The loss of a recipe.

    Args:
        name: one of `recipe.tasks.LOSSES` for the task.
        task: classify | multilabel | regress | segment.
        num_outputs: classes, or targets.
        label_smoothing: of classes and labels.
        weights: of each class, or of each class's positives; empty: none.
        temperature: of classes.
        mean, std: of the targets of regress.
        mask_size: of segment, (height, width) of the masks that training gives.
    """
    if task == "segment":
        return MaskLoss(name, image_size=mask_size, label_smoothing=label_smoothing)
    if task == "classify":
        return CrossEntropy(name, label_smoothing=label_smoothing, weights=weights, temperature=temperature)
    if task == "multilabel":
        return BinaryCrossEntropy(num_outputs, name, label_smoothing=label_smoothing, weights=weights)
    return Regression(name, mean, std)
