"""What predictions are worth, class by class: counted again from `predictions.csv`, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hiresvis.ui.run_files import Prediction


@dataclass(frozen=True, slots=True)
class ClassScore:
    """Precision, recall and F1 of one class; None where there is nothing to divide by."""

    name: str
    num_labelled: int
    num_predicted: int
    precision: float | None
    recall: float | None
    f1: float | None


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
    f1s = [score.f1 for score in scores if score.f1 is not None]
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
        macro_f1=sum(f1s) / len(f1s) if f1s else None,
        confused=tuple(confused),
    )


def _class_score(name: str, index: int, counts: Sequence[Sequence[int]]) -> ClassScore:
    hits = counts[index][index]
    labelled, predicted = sum(counts[index]), sum(line[index] for line in counts)
    return ClassScore(
        name=name,
        num_labelled=labelled,
        num_predicted=predicted,
        precision=hits / predicted if predicted else None,
        recall=hits / labelled if labelled else None,
        f1=2 * hits / (labelled + predicted) if labelled + predicted else None,
    )
