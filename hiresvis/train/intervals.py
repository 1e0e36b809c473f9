"""How far a metric could be off by the draw of the images: percentile intervals of the bootstrap (Efron 1979), 95%.

The split is drawn again with replacement, and the metric taken of each draw. Where images belong to groups (patients, slides) whole groups
are drawn, since images of one group say nearly the same (the cluster bootstrap; Field and Welsh 2007): intervals by image would be too
narrow. What it does not tell is how another training run would do, nor that the best of many epochs was chosen on the same images.

A draw is a count for each sample, and every metric here is a formula of counts: sums, or for ranks cumulated sums over scores in their
order. So no sample is moved, and a thousand draws of 10,000 images take a second or so. Of few images percentiles are somewhat too narrow;
at 0 or 1 they have no width, which says that no draw showed another value and not that none is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from hiresvis.recipe.tasks import METRICS
from hiresvis.train.metrics import THRESHOLD

MOST_DRAWS, FEWEST_DRAWS = 1000, 200
COVERAGE = 0.95
RANKED = ("auroc", "map")  # cost a pass over the samples for each class, where the others cost a few in all
_SEED = 0
_COUNTS_AT_ONCE = 100_000  # draws x samples: what stays in a core's cache, three times as fast as 2 million
_PASSES = 5  # that the metrics without ranks cost
_MOST_WORK = 100_000_000  # draws x samples x passes, about 2 s; above it fewer draws, and where the fewest are twice that, no ranks

Interval = tuple[float, float]
Tally = Callable[[np.ndarray], Mapping[str, np.ndarray]]
"""Metrics of counts (n, draws): values (draws,) by name, NaN where a draw has none."""


def intervals(
    task: str, scores: Tensor, targets: Tensor, *, names: Sequence[str], groups: Sequence[Hashable] | None = None
) -> dict[str, Interval]:
    """The interval of each metric; the same images in the same order give the same digits.

    Args:
        task, scores, targets: as in `metrics.compute_metrics`.
        names: of metrics of the task.
        groups: what each sample belongs to; None: each stands by itself.

    Returns:
        (low, high) by name; without those of ranks where samples x classes are above a million.
    """
    ranked = len(targets) * scores.shape[1]
    if FEWEST_DRAWS * ranked > 2 * _MOST_WORK:
        names = [name for name in names if name not in RANKED]
    units = np.arange(len(targets)) if groups is None else _numbered(groups)
    if not names or units.max(initial=0) == 0:  # of one image or group there is no other draw
        return {}
    tally = _TALLIES[task](scores.double().numpy(), targets.numpy(), names)
    work = _PASSES * len(targets) + ranked * sum(name in RANKED for name in names)
    found: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for counts in _draws(units, min(MOST_DRAWS, max(FEWEST_DRAWS, _MOST_WORK // work))):
        values = tally(counts)
        for name in names:
            found[name].append(values[name])
    told = {name: _percentiles(np.concatenate(values)) for name, values in found.items()}
    return {name: interval for name, interval in told.items() if interval is not None}


def told_with_interval(task: str, metric: str) -> tuple[str, ...]:
    """The metrics of a task whose intervals are worth their cost: the one that decides, and all that are not ranked.

    >>> told_with_interval("classify", "auroc")
    ('accuracy', 'balanced_accuracy', 'macro_f1', 'auroc', 'kappa')
    """
    return tuple(name for name in METRICS[task] if name == metric or name not in RANKED)


def _numbered(groups: Sequence[Hashable]) -> np.ndarray:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in groups])


def _draws(units: np.ndarray, num_draws: int) -> Iterator[np.ndarray]:
    """Counts (n, some draws) until there are as many as wanted.

    Args:
        units: (n,) the number of each sample's group.
    """
    rng, num_units = np.random.default_rng(_SEED), int(units.max(initial=0)) + 1
    at_once = max(1, _COUNTS_AT_ONCE // len(units))
    for start in range(0, num_draws, at_once):
        drawn = [
            np.bincount(rng.integers(num_units, size=num_units), minlength=num_units) for _ in range(start, min(start + at_once, num_draws))
        ]
        yield np.stack(drawn, axis=1)[units].astype(np.float64)


def _percentiles(values: np.ndarray) -> Interval | None:
    """None where half of the draws or more have no value: a class or two in so few images that it is a matter of luck."""
    known = values[~np.isnan(values)]
    if 2 * len(known) <= len(values):
        return None
    low, high = np.percentile(known, [50 * (1 - COVERAGE), 50 * (1 + COVERAGE)])
    return float(low), float(high)


def _classify(scores: np.ndarray, targets: np.ndarray, names: Sequence[str]) -> Tally:
    predicted, num_classes = scores.argmax(axis=1), scores.shape[1]
    right = predicted == targets
    columns = [_Curve(scores[:, label], targets == label) for label in range(num_classes)] if set(names) & set(RANKED) else []

    def tally(counts: np.ndarray) -> dict[str, np.ndarray]:
        labelled, chosen = (_sums_by(values, counts, num_classes) for values in (targets, predicted))
        hits, total = _sums_by(targets[right], counts[right], num_classes), counts.sum(axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            by_chance = (labelled * chosen).sum(axis=0) / total**2
            found = {
                "accuracy": hits.sum(axis=0) / total,
                "balanced_accuracy": _mean_over_classes(hits / labelled),
                "macro_f1": _mean_over_classes(2 * hits / (labelled + chosen)),
                "kappa": np.nan_to_num((hits.sum(axis=0) / total - by_chance) / (1 - by_chance)),
            }
        return {**found, **_ranked(columns, counts, names)}

    return tally


def _multilabel(scores: np.ndarray, targets: np.ndarray, names: Sequence[str]) -> Tally:
    chosen, positive = scores >= THRESHOLD, targets > 0
    all_right = (chosen == positive).all(axis=1).astype(np.float64)
    flags = [np.ascontiguousarray(part.T, dtype=np.float64) for part in (chosen & positive, chosen, positive)]
    columns = [_Curve(*column) for column in zip(scores.T, positive.T, strict=True)] if set(names) & set(RANKED) else []

    def tally(counts: np.ndarray) -> dict[str, np.ndarray]:
        hits, taken, labelled = (part @ counts for part in flags)
        with np.errstate(invalid="ignore"):
            f1 = _mean_over_classes(2 * hits / (taken + labelled))
        return {"macro_f1": f1, "accuracy": all_right @ counts / counts.sum(axis=0), **_ranked(columns, counts, names)}

    return tally


def _regress(scores: np.ndarray, targets: np.ndarray, names: Sequence[str]) -> Tally:
    del names
    errors, middle = (scores - targets).T, (targets - targets.mean(axis=0)).T
    absolute, squares = np.abs(errors).mean(axis=0), errors**2

    def tally(counts: np.ndarray) -> dict[str, np.ndarray]:
        total = counts.sum(axis=0)
        summed = squares @ counts
        with np.errstate(invalid="ignore", divide="ignore"):
            spread = middle**2 @ counts - (middle @ counts) ** 2 / total
            r2 = np.where(spread > 0, 1 - summed / spread, np.nan)
        return {"mae": absolute @ counts / total, "rmse": np.sqrt(summed / total).mean(axis=0), "r2": r2.mean(axis=0)}

    return tally


_TALLIES: Mapping[str, Callable[[np.ndarray, np.ndarray, Sequence[str]], Tally]] = {
    "classify": _classify,
    "multilabel": _multilabel,
    "regress": _regress,
}


def _sums_by(labels: np.ndarray, counts: np.ndarray, num_classes: int) -> np.ndarray:
    """Counts (n, draws) summed by label: (classes, draws)."""
    sums = np.zeros((num_classes, counts.shape[1]))
    if len(labels):
        order = labels.argsort(kind="stable")
        present, starts = np.unique(labels[order], return_index=True)
        sums[present] = np.add.reduceat(counts[order], starts, axis=0)
    return sums


def _mean_over_classes(values: np.ndarray) -> np.ndarray:
    """(classes, draws) to (draws,): over the classes that a draw has, which the others' 0/0 tells."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.where(known, values, 0.0).sum(axis=0) / known.sum(axis=0)


def _ranked(columns: Sequence[_Curve], counts: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The rank metrics among the names: means over classes."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in names if name in RANKED}
    for curve in columns if found else ():
        hits, beside, above = curve.at_steps(counts)
        positives, negatives = hits.sum(axis=0), counts.sum(axis=0) - hits.sum(axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            if "map" in found:
                precision = np.divide(hits.cumsum(axis=0), above, out=np.zeros_like(hits), where=above > 0)
                found["map"].append((precision * hits).sum(axis=0) / positives)
            if "auroc" in found:
                beaten = negatives - (above - hits.cumsum(axis=0)) + (beside - hits) / 2
                found["auroc"].append((beaten * hits).sum(axis=0) / (positives * negatives))
    return {name: _mean_over_classes(np.stack(values)) for name, values in found.items()}


class _Curve:
    """The samples in the order of one class's score, the highest first. Only the steps at which the class has samples decide its metrics;
    all between two of them are one sum.

    Args:
        scores, positive: (n,).
    """

    def __init__(self, scores: np.ndarray, positive: np.ndarray) -> None:
        self._order = np.argsort(-scores, kind="stable")
        of_class = positive[self._order]
        bounds = np.flatnonzero(np.r_[True, np.diff(scores[self._order]) != 0, True])  # equal scores are one step
        step = np.searchsorted(bounds, np.flatnonzero(of_class), side="right") - 1
        steps, self._firsts = np.unique(step, return_index=True)
        self._members = self._order[of_class]
        edges = np.unique(np.r_[0, bounds[steps], bounds[steps + 1]])
        self._edges = edges[edges < len(scores)]
        self._places = np.searchsorted(self._edges, bounds[steps])

    def at_steps(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """At each step with samples of the class: how many of those, how many samples, and how many down to there; each (steps, draws)."""
        if not len(self._members):
            none = np.zeros((0, counts.shape[1]))
            return none, none, none
        sums = np.add.reduceat(counts[self._order], self._edges, axis=0)
        hits = np.add.reduceat(counts[self._members], self._firsts, axis=0)
        return hits, sums[self._places], sums.cumsum(axis=0)[self._places]
