"""Losses per sample: the step sums them over a batch, evaluation reports them one by one."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class CrossEntropy:
    """Cross entropy with label smoothing, unreduced.

    Args:
        label_smoothing: share of the target spread over all classes, 0 to below 1.
    """

    def __init__(self, *, label_smoothing: float = 0.0) -> None:
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing {label_smoothing} is not in 0 <= value < 1")
        self.label_smoothing = label_smoothing

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Losses (b,) of logits (b, classes) and targets (b,) int64."""
        return F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing, reduction="none")
