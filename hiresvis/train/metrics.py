"""Metrics of each task over a whole split at once, so that no figure depends on the evaluation batch size."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

THRESHOLD = 0.5  # multilabel: a class is predicted where its probability is at least this
_IMBALANCE = 3.0  # largest class over smallest, above which accuracy hides the small ones


class _Torchmetrics:
    """A module of torchmetrics, imported with its first metric: 1.4 s and 90 MiB (most of it scipy.signal) that only evaluation needs."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, metric: str) -> Callable[..., Tensor]:
        found: Callable[..., Tensor] = getattr(import_module(f"torchmetrics.functional.{self._name}"), metric)
        return found


tm, tr = _Torchmetrics("classification"), _Torchmetrics("regression")


def load() -> None:
    """Imports now what metrics need, so that it is in the process's size when the memory of a run is measured."""
    import_module("torchmetrics.functional")


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


def class_average_precision(scores: Tensor, targets: Tensor) -> float:
    """Mean over the classes that have samples of the area under precision against recall, each class against the rest."""
    return mean_average_precision(scores, F.one_hot(targets, scores.shape[1]))


def kappa(scores: Tensor, targets: Tensor) -> float:
    """Cohen's kappa, unweighted; 0 where labels and predictions are all one class (0/0)."""
    value = float(tm.multiclass_cohen_kappa(scores, targets, scores.shape[1]))
    return 0.0 if math.isnan(value) else value


def mean_average_precision(scores: Tensor, targets: Tensor) -> float:
    """Mean over the classes that have samples of the area under precision against recall; NaN where none has."""
    columns = [label for label in range(scores.shape[1]) if targets[:, label].any()]
    return _mean(tm.binary_average_precision(scores[:, label], targets[:, label]) for label in columns)


def label_auroc(scores: Tensor, targets: Tensor) -> float:
    """Mean area under the ROC curve over the classes that have samples on both sides; NaN where none has."""
    columns = [label for label in range(scores.shape[1]) if targets[:, label].any() and not targets[:, label].all()]
    return _mean(tm.binary_auroc(scores[:, label], targets[:, label]) for label in columns)


def label_f1(scores: Tensor, targets: Tensor) -> float:
    """Mean F1 over the classes that occur as label or as prediction; NaN where none does."""
    predicted = scores >= THRESHOLD
    columns = [label for label in range(scores.shape[1]) if targets[:, label].any() or predicted[:, label].any()]
    return _mean(tm.binary_f1_score(predicted[:, label].long(), targets[:, label]) for label in columns)


def exact_match(scores: Tensor, targets: Tensor) -> float:
    """Share of samples whose classes are all right."""
    return float(((scores >= THRESHOLD) == targets.bool()).all(dim=1).double().mean())


def mae(scores: Tensor, targets: Tensor) -> float:
    """Mean absolute error, the mean over targets, in their own units."""
    return float(tr.mean_absolute_error(scores, targets))


def rmse(scores: Tensor, targets: Tensor) -> float:
    """Root of the mean squared error, the mean over targets, in their own units."""
    return float(tr.mean_squared_error(scores, targets, squared=False, num_outputs=scores.shape[1]).mean())


def r2(scores: Tensor, targets: Tensor) -> float:
    """Share of the variance explained, the mean over targets; NaN of a single sample."""
    if len(targets) < 2:
        return math.nan
    # torchmetrics takes a difference of sums of squares, which has no digits for values far from 0, and takes sums below 1e-4 for 0.
    middle, spread = targets.mean(dim=0), targets.std(dim=0, correction=0)
    spread = torch.where(spread > 0, spread, 1.0)
    return float(tr.r2_score((scores - middle) / spread, (targets - middle) / spread))


def miou(true: Tensor, predicted: Tensor, right: Tensor) -> float:
    """Mean intersection over union over the classes that occur as label or as prediction; NaN where none does."""
    return _mean(class_iou(true, predicted, right).values())


def mean_dice(true: Tensor, predicted: Tensor, right: Tensor) -> float:
    """Mean Dice (F1 of pixels) over the same classes."""
    either = true + predicted
    return _mean(2 * right[index].double() / either[index] for index in either.nonzero().flatten().tolist())


def pixel_accuracy(true: Tensor, predicted: Tensor, right: Tensor) -> float:
    """Share of the pixels whose class is right; NaN where there are none."""
    del predicted
    return float(right.sum().double() / true.sum())


def class_iou(true: Tensor, predicted: Tensor, right: Tensor) -> dict[int, Tensor]:
    """Intersection over union of the classes that occur as label or as prediction, by their number.

    Args:
        true, predicted, right: (k,) pixels of each class by label, by prediction, and by both.
    """
    union = true + predicted - right
    return {index: right[index].double() / union[index] for index in union.nonzero().flatten().tolist()}


METRICS: Mapping[str, Mapping[str, Callable[..., float]]] = {
    "classify": {
        "accuracy": accuracy,
        "balanced_accuracy": balanced_accuracy,
        "macro_f1": macro_f1,
        "auroc": auroc,
        "map": class_average_precision,
        "kappa": kappa,
    },
    "multilabel": {"map": mean_average_precision, "auroc": label_auroc, "macro_f1": label_f1, "accuracy": exact_match},
    "regress": {"mae": mae, "rmse": rmse, "r2": r2},
    "segment": {"miou": miou, "dice": mean_dice, "pixel_accuracy": pixel_accuracy},
}
HIGHER_IS_BETTER: Mapping[str, bool] = {name: name not in ("mae", "rmse") for metrics in METRICS.values() for name in metrics}


def compute_metrics(task: str, scores: Tensor, targets: Tensor) -> dict[str, float]:
    """All metrics of a split (of segment see `mask_metrics`).

    Args:
        task: classify | multilabel | regress.
        scores: (n, k) on the CPU: probabilities, or values in the targets' units.
        targets: (n,) int64 to classify, else (n, k).
    """
    if task == "multilabel":
        targets = targets.long()
    return {name: compute(scores, targets) for name, compute in METRICS[task].items()}


def mask_metrics(true: Tensor, predicted: Tensor, right: Tensor) -> dict[str, float]:
    """All metrics of a split of segment, from pixels counted over all of it; see `class_iou`."""
    return {name: compute(true, predicted, right) for name, compute in METRICS["segment"].items()}


def auto_metric(task: str, class_counts: Sequence[int]) -> tuple[str, str]:
    """The metric that decides which epoch is best, and the reason.

    Args:
        task: classify | multilabel | regress.
        class_counts: training samples of each class; empty classes are left out.
    """
    if task == "multilabel":
        return "map", "it ranks the images of each class and needs no threshold, and rare classes count as much as frequent ones"
    if task == "segment":
        return "miou", "every class counts the same, however few its pixels, and what is wrongly added counts as what is missed"
    if task == "regress":
        return "mae", "the error in the targets' own units; lower is better"
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


def _mean(values: Iterable[Tensor]) -> float:
    found = [float(value) for value in values]
    return sum(found) / len(found) if found else math.nan


def _present(scores: Tensor, targets: Tensor) -> Tensor:
    return torch.bincount(targets, minlength=scores.shape[1]) > 0
