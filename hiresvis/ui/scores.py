"""What predictions are worth, class by class or target by target: counted again from `predictions.csv`, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hiresvis.ui.run_files import Prediction


@dataclass(frozen=True, slots=True)
class ClassScore:
    """Precision, recall and F1 of one class, multilabel its average precision; None where there is nothing to divide by."""

    name: str
    num_labelled: int
    num_predicted: int
    precision: float | None
    recall: float | None
    f1: float | None
    average_precision: float | None = None


@dataclass(frozen=True, slots=True)
class SplitScores:
    """One split's confusion matrix and its per-class scores, classes in the contract's order."""

    split: str
    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]  # [label][predicted]
    scores: tuple[ClassScore, ...]
    num_images: int
    accuracy: float
    macro_f1: float | None
    confused: tuple[tuple[str, str, int], ...]  # label, predicted, images; the most frequent first


def split_scores(split: str, predictions: Sequence[Prediction], classes: Sequence[str]) -> SplitScores | None:
    """The scores of one split's labelled rows; None when it has none.

    F1 of a class is 2 hits / (labelled + predicted); the macro mean is over classes that occur as label or as
    prediction, as in the metric that training reports.
    """
    rows = [row for row in predictions if row.split == split and row.label]
    if not rows:
        return None
    extra = sorted({name for row in rows for name in (row.label, row.predicted)} - set(classes))
    names = (*classes, *extra)
    place = {name: index for index, name in enumerate(names)}
    counts = [[0] * len(names) for _ in names]
    for row in rows:
        counts[place[row.label]][place[row.predicted]] += 1
    scores = tuple(_class_score(name, index, counts) for index, name in enumerate(names))
    confused = sorted(
        ((names[i], names[j], n) for i, line in enumerate(counts) for j, n in enumerate(line) if n and i != j),
        key=lambda pair: -pair[2],
    )
    return SplitScores(
        split=split,
        classes=names,
        counts=tuple(tuple(line) for line in counts),
        scores=scores,
        num_images=len(rows),
        accuracy=sum(row.right for row in rows) / len(rows),
        macro_f1=_mean([score.f1 for score in scores]),
        confused=tuple(confused),
    )


@dataclass(frozen=True, slots=True)
class LabelScores:
    """One split of multilabel: each class against the rest."""

    split: str
    scores: tuple[ClassScore, ...]
    num_images: int
    all_right: float  # share of the images whose classes are all right
    macro_f1: float | None
    mean_average_precision: float | None


@dataclass(frozen=True, slots=True)
class TargetScore:
    """One target of one split: errors in its own units; r2 is None where all true values are alike. `points`: (true, predicted)."""

    name: str
    mae: float
    rmse: float
    r2: float | None
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class MaskScore:
    """One class of one split of segment, over the pixels of all images; None where there is nothing to divide by."""

    name: str
    share: float | None  # of the labelled pixels
    iou: float | None
    dice: float | None
    precision: float | None
    recall: float | None


@dataclass(frozen=True, slots=True)
class MaskScores:
    """One split of segment, class by class; means over the classes that occur as label or as prediction, as in training's metrics."""

    split: str
    scores: tuple[MaskScore, ...]
    num_images: int
    miou: float | None
    pixel_accuracy: float | None


def mask_scores(split: str, predictions: Sequence[Prediction], classes: Sequence[str]) -> MaskScores | None:
    """The scores of one split of segment; None when it has no rows."""
    rows = [row for row in predictions if row.split == split and row.hits]
    if not rows:
        return None
    true, found, hits = (
        [sum(column) for column in zip(*(getattr(row, name) for row in rows), strict=True)] for name in ("true", "values", "hits")
    )
    scores = tuple(
        MaskScore(
            name=name,
            share=_share(true[place], sum(true)),
            iou=_share(hits[place], true[place] + found[place] - hits[place]),
            dice=_share(2 * hits[place], true[place] + found[place]),
            precision=_share(hits[place], found[place]),
            recall=_share(hits[place], true[place]),
        )
        for place, name in enumerate(classes)
    )
    return MaskScores(split, scores, len(rows), _mean([score.iou for score in scores]), _share(sum(hits), sum(true)))


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def label_scores(split: str, predictions: Sequence[Prediction], classes: Sequence[str]) -> LabelScores | None:
    """The scores of one split of multilabel; None when it has no rows. Means are over the classes that training's metrics count too."""
    rows = [row for row in predictions if row.split == split]
    if not rows:
        return None
    labelled, predicted = (
        [set(text.split("|")) for text in texts] for texts in zip(*((row.label, row.predicted) for row in rows), strict=True)
    )
    scores = []
    for position, name in enumerate(classes):
        hits = sum(name in label and name in chosen for label, chosen in zip(labelled, predicted, strict=True))
        found = _score(name, hits, sum(name in label for label in labelled), sum(name in chosen for chosen in predicted))
        ranked = [(row.values[position], name in label) for row, label in zip(rows, labelled, strict=True)]
        scores.append(replace(found, average_precision=_average_precision(ranked)))
    return LabelScores(
        split=split,
        scores=tuple(scores),
        num_images=len(rows),
        all_right=sum(row.right for row in rows) / len(rows),
        macro_f1=_mean([score.f1 for score in scores]),
        mean_average_precision=_mean([score.average_precision for score in scores]),
    )


def target_scores(split: str, predictions: Sequence[Prediction], names: Sequence[str]) -> list[TargetScore]:
    """The scores of one split's targets; empty when it has no rows."""
    rows = [row for row in predictions if row.split == split and row.true]
    found = []
    for position, name in enumerate(names) if rows else ():
        points = tuple((row.true[position], row.values[position]) for row in rows)
        errors = [value - true for true, value in points]
        middle = sum(true for true, _ in points) / len(points)
        spread = sum((true - middle) ** 2 for true, _ in points)
        squares = sum(error**2 for error in errors)
        mae, rmse = sum(map(abs, errors)) / len(points), (squares / len(points)) ** 0.5
        found.append(TargetScore(name, mae, rmse, 1 - squares / spread if spread else None, points))
    return found


def _average_precision(ranked: Sequence[tuple[float, bool]]) -> float | None:
    """Sum over the distinct scores, from the highest down, of precision times the recall gained; None without samples of the class.

    >>> _average_precision([(0.9, True), (0.8, False), (0.7, True)])
    0.8333333333333333
    """
    total = sum(flag for _, flag in ranked)
    if not total:
        return None
    area, hits, seen = 0.0, 0, 0
    for _, group in groupby(sorted(ranked, reverse=True), key=lambda entry: entry[0]):
        flags = [flag for _, flag in group]
        hits, seen = hits + sum(flags), seen + len(flags)
        area += hits / seen * sum(flags) / total
    return area


def threshold_curve(ranked: Sequence[tuple[float, bool]], most: int = 200) -> list[tuple[float, float, float]]:
    """(threshold, precision, recall) of predicting a class at or above each threshold, the lowest first; at most about `most` of them.

    >>> threshold_curve([(0.9, True), (0.8, False), (0.7, True)])
    [(0.7, 0.6666666666666666, 1.0), (0.8, 0.5, 0.5), (0.9, 1.0, 0.5)]
    """
    total = sum(flag for _, flag in ranked)
    points, hits, seen = [], 0, 0
    for score, group in groupby(sorted(ranked, reverse=True), key=lambda entry: entry[0]) if total else ():
        flags = [flag for _, flag in group]
        hits, seen = hits + sum(flags), seen + len(flags)
        points.append((score, hits / seen, hits / total))
    step = -(-len(points) // most)
    return points[::-1][:: max(1, step)]


def class_rankings(split: str, predictions: Sequence[Prediction], classes: Sequence[str], task: str) -> dict[str, list[tuple[float, bool]]]:
    """(score, whether it is the label) of each sample of a split, by class: of the labels, or of two classes; else nothing, since the
    score of a class that was not predicted is not in `predictions.csv`."""
    rows = [row for row in predictions if row.split == split and row.label]
    if task == "multilabel":
        labels = [set(row.label.split("|")) for row in rows]
        return {
            name: [(row.values[position], name in label) for row, label in zip(rows, labels, strict=True)]
            for position, name in enumerate(classes)
        }
    if task != "classify" or len(classes) != 2:
        return {}
    return {name: [(row.score if row.predicted == name else 1 - row.score, row.label == name) for row in rows] for name in classes}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _class_score(name: str, index: int, counts: Sequence[Sequence[int]]) -> ClassScore:
    return _score(name, counts[index][index], sum(counts[index]), sum(line[index] for line in counts))


def _score(name: str, hits: int, labelled: int, predicted: int) -> ClassScore:
    return ClassScore(
        name=name,
        num_labelled=labelled,
        num_predicted=predicted,
        precision=hits / predicted if predicted else None,
        recall=hits / labelled if labelled else None,
        f1=2 * hits / (labelled + predicted) if labelled + predicted else None,
    )
