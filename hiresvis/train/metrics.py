"""Classification metrics over a whole split at once, so that no figure depends on the evaluation batch size."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics.functional import classification as tm

_IMBALANCE = 3.0  # largest class over smallest, above which accuracy hides the small ones


def accuracy(scores: Tensor, targets: Tensor) -> float:
    """Share of samples whose highest score is the label's."""
    return float(tm.multiclass_accuracy(scores, targets, scores.shape[1], average="micro"))


def balanced_accuracy(scores: Tensor, targets: Tensor) -> float:
    """Mean recall over the classes that the split has (torchmetrics' macro average also counts absent classes that were predicted)."""
    recall = tm.multiclass_recall(scores, targets, scores.shape[1], average="none")
    return float(recall[_present(scores, targets)].mean())


def macro_f1(scores: Tensor, targets: Tensor) -> float:
    """Mean F1 over the classes that occur as label or as prediction."""
    return float(tm.multiclass_f1_score(scores, targets, scores.shape[1], average="macro"))


def auroc(scores: Tensor, targets: Tensor) -> float:
    """Mean one-against-rest area under the ROC curve, over classes that have samples on both sides; NaN where none has."""
    counts = torch.bincount(targets, minlength=scores.shape[1])
    usable = (counts > 0) & (counts < len(targets))
    if not usable.any():
        return math.nan
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(positive|negative) samples in targets.*")  # those classes are left out below
        areas = tm.multiclass_auroc(scores, targets, scores.shape[1], average="none")
    return float(areas[usable].mean())


def kappa(scores: Tensor, targets: Tensor) -> float:
    """Cohen's kappa, unweighted; 0 where labels and predictions are all one class (0/0)."""
    value = float(tm.multiclass_cohen_kappa(scores, targets, scores.shape[1]))
    return 0.0 if math.isnan(value) else value


METRICS: Mapping[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": accuracy,
    "balanced_accuracy": balanced_accuracy,
    "macro_f1": macro_f1,
    "auroc": auroc,
    "kappa": kappa,
}
HIGHER_IS_BETTER: Mapping[str, bool] = dict.fromkeys(METRICS, True)


def compute_metrics(scores: Tensor, targets: Tensor) -> dict[str, float]:
    """All metrics of a split.

    Args:
        scores: (n, classes) float32 probabilities on the CPU.
        targets: (n,) int64.
    """
    return {name: compute(scores, targets) for name, compute in METRICS.items()}


def auto_metric(class_counts: Sequence[int]) -> tuple[str, str]:
    """The metric that decides which epoch is best, and the reason.

    Args:
        class_counts: training samples of each class; empty classes are left out.
    """
    counts = [count for count in class_counts if count]
    if not counts:
        return "accuracy", "no class has samples"
    ratio = max(counts) / min(counts)
    if ratio > _IMBALANCE:
        return "balanced_accuracy", f"the largest class is {ratio:.1f} times the smallest, above {_IMBALANCE:g}"
    return "accuracy", f"the largest class is {ratio:.1f} times the smallest, at most {_IMBALANCE:g}"


def is_better(metric: str, value: float, than: float | None) -> bool:
    """Whether value beats the best so far. Ties do not: the earlier epoch stays. NaN beats nothing but no value at all."""
    if than is None:
        return True
    if math.isnan(value) or math.isnan(than):
        return math.isnan(than) and not math.isnan(value)
    return value > than if HIGHER_IS_BETTER[metric] else value < than


def _present(scores: Tensor, targets: Tensor) -> Tensor:
    return torch.bincount(targets, minlength=scores.shape[1]) > 0
