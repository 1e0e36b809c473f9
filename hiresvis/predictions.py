"""What a trained network says of images, in words, by task: a run's own table, and the rows of `predict`."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hiresvis.data.labels import SEPARATOR, label_text
from hiresvis.train.evaluate import Evaluation
from hiresvis.train.metrics import THRESHOLD


def predictions_text(results: Mapping[str, Evaluation], names: Sequence[str], thresholds: Sequence[float] = ()) -> str:
    """predictions.csv: one row a sample of each split.

    - classify: split, path, label, predicted, score (of the predicted class), loss;
    - multilabel: split, path, label and predicted (`a|b`), loss, and score_CLASS for each class;
    - regress: split, path, loss, and true_TARGET and predicted_TARGET for each target;
    - segment: split, path, loss, and true_CLASS, predicted_CLASS and right_CLASS, pixels of each class.

    Args:
        results: by split.
        names: of the outputs, in order.
        thresholds: of multilabel, one a class; empty: 0.5.
    """
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    for number, (split, found) in enumerate(results.items()):
        if number == 0:
            writer.writerow(["split", "path", *_COLUMNS[found.task](names)])
        rows = _multilabel_rows(found, names, thresholds) if found.task == "multilabel" else _ROWS[found.task](found, names)
        writer.writerows([split, path, *cells] for path, cells in zip(found.names, rows, strict=True))
    return table.getvalue()


def predicted_row(
    task: str, scores: Sequence[float] | None, names: Sequence[str], thresholds: Sequence[float] = (), *, top: int = 0
) -> dict[str, Any]:
    """What `predict` says of one image; None for all of it where there are no scores.

    Args:
        thresholds: as in `predictions_text`.
        top: of classify, so many of the best classes besides.

    Returns:
        classify: label, score, scores by class, and with `top` the best classes, each with label and score; multilabel: labels (those at or
        above their threshold) and scores by class; regress: values by target. Of segment see `mask_row`.
    """
    if scores is None:
        return dict.fromkeys((*_SAID[task], *(("top",) if top else ())))
    named = dict(zip(names, scores, strict=True))
    if task == "regress":
        return {"values": named}
    if task == "multilabel":
        flags = _chosen(scores, thresholds)
        return {"labels": [name for name, flag in zip(names, flags, strict=True) if flag], "scores": named}
    best = max(names, key=named.__getitem__)
    said = {"label": best, "score": named[best], "scores": named}
    if not top:
        return said
    ranked = sorted(names, key=named.__getitem__, reverse=True)[:top]  # of equal ones the first, as above
    return {**said, "top": [{"label": name, "score": named[name]} for name in ranked]}


def mask_row(path: str | None, shares: Mapping[str, float] | None) -> dict[str, Any]:
    """What `predict` says of one image of segment: its mask's file, and the share of each class; None where there are none."""
    return {"mask": path, "shares": shares}


def table_columns(task: str, names: Sequence[str], *, top: int = 0) -> tuple[str, ...]:
    """Columns of the rows of `predict` as a table: a score_CLASS (segment: share_CLASS) for each class, or a predicted_TARGET for each
    target; with `top` a top1 and top1_score for the best class, and so on."""
    single = [key for key in _SAID[task] if key not in _PREFIX]
    best = [column for place in range(1, top + 1) for column in _top_columns(place)]
    return (
        "path",
        *single,
        *(f"{_PREFIX[key]}_{name}" for key in _SAID[task] if key in _PREFIX for name in names),
        *best,
        "drift",
        "error",
    )


def _top_columns(place: int) -> tuple[str, str]:
    return f"top{place}", f"top{place}_score"


def table_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `predict` by those columns; what is None is left out."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat.update({f"{_PREFIX[key]}_{name}": number for name, number in value.items()})
        elif key == "top":
            for place, best in enumerate(value or (), start=1):
                flat.update(zip(_top_columns(place), (best["label"], best["score"]), strict=True))
        elif value is not None:
            flat[key] = SEPARATOR.join(value) if isinstance(value, list) else value
    return flat


def _classify_rows(found: Evaluation, names: Sequence[str]) -> Iterable[list[str]]:
    best, predicted = found.scores.max(dim=1)
    columns = zip(found.targets.tolist(), predicted.tolist(), best.tolist(), found.losses.tolist(), strict=True)
    for label, chosen, score, loss in columns:
        yield [names[label], names[chosen], f"{score:.6f}", f"{loss:.6f}"]


def _multilabel_rows(found: Evaluation, names: Sequence[str], thresholds: Sequence[float]) -> Iterable[list[str]]:
    for target, scores, loss in zip(found.targets.tolist(), found.scores.tolist(), found.losses.tolist(), strict=True):
        said = (label_text(tuple(flags), found.task, names) for flags in (target, _chosen(scores, thresholds)))
        yield [*said, f"{loss:.6f}", *(f"{score:.6f}" for score in scores)]


def _chosen(scores: Sequence[float], thresholds: Sequence[float]) -> tuple[float, ...]:
    """1.0 for each label at or above its threshold, as targets are written."""
    return tuple(float(score >= threshold) for score, threshold in zip(scores, thresholds or (THRESHOLD,) * len(scores), strict=True))


def _regress_rows(found: Evaluation, names: Sequence[str]) -> Iterable[list[str]]:
    del names
    for target, values, loss in zip(found.targets.tolist(), found.scores.tolist(), found.losses.tolist(), strict=True):
        pairs = (text for true, value in zip(target, values, strict=True) for text in (f"{true:.9g}", f"{value:.9g}"))
        yield [f"{loss:.6f}", *pairs]


def _segment_rows(found: Evaluation, names: Sequence[str]) -> Iterable[list[str]]:
    del names
    assert found.pixels is not None
    columns = (found.pixels.true.tolist(), found.pixels.predicted.tolist(), found.pixels.right.tolist(), found.losses.tolist())
    for *counts, loss in zip(*columns, strict=True):
        yield [f"{loss:.6f}", *(str(number) for of_class in zip(*counts, strict=True) for number in of_class)]


_SAID = {
    "classify": ("label", "score", "scores"),
    "multilabel": ("labels", "scores"),
    "regress": ("values",),
    "segment": ("mask", "shares"),
}
_PREFIX = {"scores": "score", "values": "predicted", "shares": "share"}
_COLUMNS = {
    "classify": lambda names: ["label", "predicted", "score", "loss"],
    "multilabel": lambda names: ["label", "predicted", "loss", *(f"score_{name}" for name in names)],
    "regress": lambda names: ["loss", *(column for name in names for column in (f"true_{name}", f"predicted_{name}"))],
    "segment": lambda names: ["loss", *(f"{kind}_{name}" for name in names for kind in ("true", "predicted", "right"))],
}
_ROWS = {"classify": _classify_rows, "regress": _regress_rows, "segment": _segment_rows}
