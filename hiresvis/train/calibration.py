"""What is fitted to the validation set after training, so that scores can be read: a temperature, and thresholds of labels.

- `fit_temperature`: one number by which logits are divided, of the highest likelihood (Guo et al. 2017, "On calibration of modern neural
  networks"). It changes no prediction. The likelihood is concave in its inverse, so Newton's steps within a bracket find the one maximum,
  in float64 and without a random number. With few images a maximum means little, and it is kept only where it is worth a parameter (Akaike
  1974: the log likelihood of all images rises by more than 1).
- `fit_thresholds`: for each label the threshold with the highest F1 (Lipton et al. 2014, "Optimal thresholding of classifiers to maximize
  F1"). A best F1 of few positives is luck, so labels with fewer than `LEAST_POSITIVES` keep 0.5.

Both are fitted to the images that also chose the epoch: how well they do is for a test set to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hiresvis.train.evaluate import Evaluation
from hiresvis.train.metrics import THRESHOLD, tm

LEAST_POSITIVES = 10
NUM_BINS = 15  # of the calibration error, as in Guo et al.
_HOTTEST, _COLDEST = 20.0, 0.05  # temperatures: nearly even scores, and nearly certain ones
_WORTH = 1.0  # of a parameter, in log likelihood
_MOST_STEPS, _CLOSE = 200, 1e-12
_SHOWN = 12  # thresholds in a line


def fit_temperature(outputs: Tensor, targets: Tensor) -> tuple[float, str]:
    """The temperature, and in words how it came.

    Args:
        outputs: logits (n, k) on the CPU.
        targets: (n,) class numbers.

    Returns:
        1.0 where no temperature is better or none is best: all images right, so that ever surer scores would fit better.
    """
    logits, rows = outputs.double(), torch.arange(len(targets))
    logits = logits - logits.max(dim=1, keepdim=True).values  # changes no probability, and squares keep their digits
    chosen = logits[rows, targets]
    if not chosen.any():
        return 1.0, f"kept: all of {len(targets)} validation images are right, so that ever surer scores would fit them better"

    def log_likelihood(inverse: float) -> float:
        return float((chosen * inverse - (logits * inverse).logsumexp(dim=1)).sum())

    low, high, inverse = 1 / _HOTTEST, 1 / _COLDEST, 1.0
    for _ in range(_MOST_STEPS):
        slope, curve = _slope_and_curve(logits, chosen, inverse)
        low, high = (inverse, high) if slope > 0 else (low, inverse)
        newton = inverse + slope / curve if curve > 0 else high
        before, inverse = inverse, newton if low < newton < high else (low + high) / 2
        if abs(inverse - before) <= _CLOSE * inverse:
            break
    temperature = 1 / inverse
    if not log_likelihood(inverse) - log_likelihood(1.0) > _WORTH:
        return 1.0, f"kept: {temperature:.3g} fits {len(targets)} validation images hardly better"
    if not _COLDEST * 1.001 < temperature < _HOTTEST / 1.001:
        return temperature, f"as far as it may go, of {len(targets)} validation images: the network has learnt little, or they are few"
    return temperature, f"the likeliest of {len(targets)} validation images"


def _slope_and_curve(logits: Tensor, chosen: Tensor, inverse: float) -> tuple[float, float]:
    """First derivative of the log likelihood by the inverse temperature, and the second with its sign turned."""
    weights = (logits * inverse).softmax(dim=1)
    mean = (weights * logits).sum(dim=1)
    return float((chosen - mean).sum()), float(((weights * logits * logits).sum(dim=1) - mean * mean).sum())


def fit_thresholds(scores: Tensor, targets: Tensor) -> tuple[float, ...]:
    """For each label the threshold with the highest F1 over a split; 0.5 where that is as good, or where positives are few.

    It lies half way between two scores of the split, so that rounding moves no image across it.

    Args:
        scores, targets: (n, k) on the CPU.
    """
    columns = zip(scores.double().numpy().T, targets.bool().numpy().T, strict=True)
    return tuple(_best_threshold(found, wanted) for found, wanted in columns)


def _best_threshold(scores: np.ndarray, positive: np.ndarray) -> float:
    if not LEAST_POSITIVES <= positive.sum() < len(positive):
        return THRESHOLD
    edges, order = np.unique(scores, return_inverse=True)
    hits = np.bincount(order, weights=positive, minlength=len(edges))[::-1].cumsum()[::-1]  # positives at or above each score
    taken = np.bincount(order, minlength=len(edges))[::-1].cumsum()[::-1]
    f1 = 2 * hits / (taken + positive.sum())
    at_half = np.searchsorted(edges, THRESHOLD)  # the lowest score that 0.5 takes
    best = np.flatnonzero(f1 == f1.max())
    if at_half in best:
        return THRESHOLD
    lower = np.r_[0.0, edges[:-1]]
    middles = (lower[best] + edges[best]) / 2
    return float(middles[np.abs(middles - THRESHOLD).argmin()])


def calibration_error(scores: Tensor, targets: Tensor) -> float:
    """Expected calibration error to classify: how far the sureness of predictions is from their accuracy, over 15 bins of sureness."""
    return float(tm.multiclass_calibration_error(scores, targets, scores.shape[1], n_bins=NUM_BINS, norm="l1"))


def reliability(scores: Tensor, right: Tensor) -> list[tuple[int, float, float]]:
    """A reliability diagram: (predictions, mean score, share that is right) of each of the calibration error's 15 bins that has some.

    Args:
        scores: (n,) of predictions, 0 to 1.
        right: (n,) whether each is right.
    """
    # As in torchmetrics: a score on a border counts above it, and 1 in the last bin.
    bins = torch.bucketize(scores.float(), torch.linspace(0, 1, NUM_BINS + 1), right=True).sub(1).clamp(0, NUM_BINS - 1)
    found = []
    for number in bins.unique().tolist():
        mine = bins == number
        found.append((int(mine.sum()), float(scores[mine].double().mean()), float(right[mine].double().mean())))
    return found


def at_thresholds(scores: Tensor, thresholds: Sequence[float]) -> Tensor:
    """Which labels are predicted (n, k): those at or above their threshold."""
    return scores.double() >= torch.tensor(thresholds, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Fitted:
    """What `fit_scores` found; `told` says in a line how it came, and is empty for a task that has nothing to fit."""

    temperature: float = 1.0
    thresholds: tuple[float, ...] = ()
    told: str = ""


def fit_scores(found: Evaluation, names: Sequence[str]) -> Fitted:
    """Temperature or thresholds, by the task, from the validation set.

    Args:
        found: its evaluation by the best weights.
        names: of the classes.
    """
    if found.task == "classify":
        temperature, why = fit_temperature(found.outputs, found.targets)
        before, after = (calibration_error((found.outputs / value).softmax(dim=1), found.targets) for value in (1.0, temperature))
        error = f"{before:.4f}" if temperature == 1 else f"{before:.4f} before, {after:.4f} with it"
        return Fitted(temperature, (), f"temperature {temperature:.4g}, {why}; calibration error of validation {error}")
    if found.task == "multilabel":
        thresholds, few = fit_thresholds(found.scores, found.targets), found.targets.sum(dim=0) < LEAST_POSITIVES
        by_name = ", ".join(f"{name} {value:.3g}" for name, value in list(zip(names, thresholds, strict=True))[:_SHOWN])
        more = f" and {len(names) - _SHOWN} more in contract.json" if len(names) > _SHOWN else ""
        kept = f"; {int(few.sum())} with fewer than {LEAST_POSITIVES} images of validation keep {THRESHOLD}" if few.any() else ""
        return Fitted(1.0, thresholds, f"thresholds of the highest F1 of validation: {by_name}{more}{kept}")
    return Fitted()
