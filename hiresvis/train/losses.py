"""Losses per sample: the step sums them over a batch, evaluation reports them one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class CrossEntropy:
    """Cross entropy with label smoothing and optional class weights, unreduced.

    Args:
        label_smoothing: share of the target spread over all classes, 0 to below 1.
        class_weights: one factor per class; they should average 1 over the training samples, or they scale the learning rate too.
    """

    def __init__(self, *, label_smoothing: float = 0.0, class_weights: Sequence[float] | None = None) -> None:
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing {label_smoothing} is not in 0 <= value < 1")
        self.label_smoothing = label_smoothing
        self._weights = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float32)

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Losses (b,) of logits (b, classes) and targets (b,) int64."""
        if self._weights is not None and self._weights.device != logits.device:
            self._weights = self._weights.to(logits.device)
        return F.cross_entropy(logits, targets, weight=self._weights, label_smoothing=self.label_smoothing, reduction="none")
