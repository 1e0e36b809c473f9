"""How far outputs are from classes: the forms of cross entropy that a recipe can ask for, as functions of outputs and targets.

All are means over the classes where each class is a question of its own, sums over the classes where they share one probability, and
exact where a probability comes near 0 or 1: logarithms are taken of logits, never of rounded probabilities.

- focal (Lin et al. 2017, "Focal loss for dense object detection"): each term times (1 - p)^2, p the probability of what is right, so that
  what is learnt counts little. Its alpha is left out: class weights do the same and are counted from the data.
- bce for one class an image: one question a class, "this or not", over one-hot targets (Wightman et al. 2021, "ResNet strikes back";
  DeiT III). Mixed images then have two right answers instead of two halves.
- asl (Ridnik et al. 2021, "Asymmetric loss for multi-label classification"): positives as in bce; a negative counts nothing below a
  probability of 0.05, and by the fourth power of what is above. Its probabilities are ranks more than shares: thresholds matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

FOCUS = 2.0  # focal's gamma: the paper's, at which it was best
_NEGATIVE_FOCUS, _MARGIN = 4, 0.05  # asl's gamma and shift of probabilities, the paper's; positives are not focused


def spread(targets: Tensor, outputs: Tensor, smoothing: float) -> Tensor:
    """Targets as shares of all classes (b, k), in the outputs' type.

    Args:
        targets: (b,) int64, or (b, k) shares already (mixed images).
        smoothing: share that is spread evenly.
    """
    shares = F.one_hot(targets, outputs.shape[1]) if targets.ndim == 1 else targets
    shares = shares.to(outputs.dtype)
    return shares * (1 - smoothing) + smoothing / outputs.shape[1] if smoothing else shares


def _cross_entropy(outputs: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    wanted = targets if targets.ndim == 1 else targets.to(outputs.dtype)
    return F.cross_entropy(outputs, wanted, label_smoothing=smoothing, reduction="none")


def _focal(outputs: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    logs = outputs.log_softmax(dim=1)
    return -(spread(targets, outputs, smoothing) * _missing(logs).pow(FOCUS) * logs).sum(dim=1)


def _one_against_rest(outputs: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, spread(targets, outputs, smoothing), reduction="none").mean(dim=1)


def _binary(outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets, pos_weight=weights, reduction="none")


def _binary_focal(outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    yes, no = F.logsigmoid(outputs), F.logsigmoid(-outputs)
    positive = targets if weights is None else targets * weights
    return -(positive * _missing(yes).pow(FOCUS) * yes + (1 - targets) * _missing(no).pow(FOCUS) * no)


def _asymmetric(outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    positive = targets if weights is None else targets * weights
    shifted = (outputs.sigmoid() - _MARGIN).clamp(min=0)  # at most 0.95, so that its logarithm has all its digits
    return -(positive * F.logsigmoid(outputs) + (1 - targets) * shifted.pow(_NEGATIVE_FOCUS) * torch.log1p(-shifted))


def _missing(logs: Tensor) -> Tensor:
    """1 - p of log p, with its digits where p is nearly 1."""
    return -torch.expm1(logs)


OneClass = Callable[[Tensor, Tensor, float], Tensor]
ONE_CLASS: Mapping[str, OneClass] = {"cross_entropy": _cross_entropy, "focal": _focal, "bce": _one_against_rest}
"""Of outputs (b, k), targets (b,) or (b, k), and label smoothing: losses (b,)."""
AnyClasses = Callable[[Tensor, Tensor, Tensor | None], Tensor]
ANY_CLASSES: Mapping[str, AnyClasses] = {"bce": _binary, "asl": _asymmetric, "focal": _binary_focal}
"""Of outputs and targets (b, k), and weights (k,) of the positives: losses (b, k)."""
