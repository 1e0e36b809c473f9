"""What a split says of a trained network: metrics, how far they could be off, how far scores can be believed, and all of it class by class.
The end of `fit` and `evaluate` tell the same digits, since both ask here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hiresvis.data.contract import Contract
from hiresvis.data.sources import Sample
from hiresvis.train.calibration import at_thresholds, calibration_error, reliability
from hiresvis.train.evaluate import Evaluation
from hiresvis.train.intervals import intervals, told_with_interval
from hiresvis.train.mask_evaluation import PixelCounts
from hiresvis.train.metrics import THRESHOLD, class_iou, compute_metrics, mean_average_precision


def split_result(found: Evaluation, contract: Contract, samples: Sequence[Sample], *, metric: str) -> dict[str, Any]:
    """One split in plain values.

    Args:
        found: read by the contract.
        samples: of the split, in the evaluation's order.
        metric: the one that decided which epoch is best.

    Returns:
        images, loss, and metrics by name; intervals: [low, high] by metric, 95%; intervals_by: image or group, what was drawn for them.
        classify: calibration: temperature, error, and error_before, without the temperature. multilabel, where thresholds are fitted:
        at_thresholds: the metrics that depend on a threshold, with intervals; those beside it are at 0.5. segment: classes, by name their
        iou and share, without intervals.
    """
    if found.pixels is not None:
        return {"images": len(found.names), "loss": found.loss, **found.metrics, "classes": _by_class(found.pixels, contract.classes)}
    groups = [sample.group for sample in samples]
    by_group = bool(groups) and None not in groups
    drawn = groups if by_group else None
    names = told_with_interval(found.task, metric)
    result: dict[str, Any] = {
        "images": len(found.names),
        "loss": found.loss,
        **found.metrics,
        "intervals": _lists(intervals(found.task, found.scores, found.targets, names=names, groups=drawn)),
        "intervals_by": "group" if by_group else "image",
    }
    if found.task == "classify":
        before = calibration_error(found.outputs.softmax(dim=1), found.targets)
        after = calibration_error(found.scores, found.targets)
        result["calibration"] = {"temperature": contract.temperature, "error": after, "error_before": before}
    elif contract.thresholds:
        flags = at_thresholds(found.scores, contract.thresholds).double()  # 0 and 1 lie on the same sides of 0.5
        metrics, names = compute_metrics(found.task, flags, found.targets), ("macro_f1", "accuracy")
        ends = _lists(intervals(found.task, flags, found.targets, names=names, groups=drawn))
        result["at_thresholds"] = {**{name: metrics[name] for name in names}, "intervals": ends}
    return result


def class_result(found: Evaluation, contract: Contract) -> dict[str, Any]:
    """A split class by class, or target by target, in plain values. None where there is nothing to divide by.

    Returns:
        classify: classes (by name images, predicted, precision, recall, f1), confusion (label, predicted, images of each pair that occurs,
        the most frequent first), absent (classes without images). multilabel, at the run's thresholds: classes (those, and
        average_precision), absent. regress: targets (by name mae, rmse, r2). segment: absent; its classes are in `split_result`.
    """
    names = contract.classes
    if found.pixels is not None:
        return {"absent": _absent(names, found.pixels.total()[0])}
    if found.task == "regress":
        columns = ((found.scores[:, [place]], found.targets[:, [place]]) for place in range(len(names)))
        return {"targets": {name: compute_metrics("regress", *column) for name, column in zip(names, columns, strict=True)}}
    if found.task == "classify":
        predicted = found.scores.argmax(dim=1)
        labelled, chosen, right = (
            torch.bincount(numbers, minlength=len(names)) for numbers in (found.targets, predicted, predicted[predicted == found.targets])
        )
        codes, counts = torch.unique(found.targets * len(names) + predicted, return_counts=True)  # of thousands of classes few pairs occur
        cells = sorted(zip(counts.tolist(), codes.tolist(), strict=True), key=lambda cell: (-cell[0], cell[1]))
        confusion = [{"label": names[code // len(names)], "predicted": names[code % len(names)], "images": count} for count, code in cells]
        return {"classes": _class_table(names, labelled, chosen, right), "confusion": confusion, "absent": _absent(names, labelled)}
    flags = at_thresholds(found.scores, contract.thresholds or (THRESHOLD,) * len(names)).bool()
    wanted = found.targets.bool()
    table = _class_table(names, wanted.sum(dim=0), flags.sum(dim=0), (flags & wanted).sum(dim=0))
    for place, row in enumerate(table.values()):
        row["average_precision"] = mean_average_precision(found.scores[:, [place]], wanted[:, [place]].long()) if row["images"] else None
    return {"classes": table, "absent": _absent(names, wanted.sum(dim=0))}


def _class_table(names: Sequence[str], labelled: Tensor, predicted: Tensor, right: Tensor) -> dict[str, dict[str, Any]]:
    """By class, from numbers of images (k,): with the label, predicted, and both."""
    table = {}
    for name, true, chosen, hits in zip(names, labelled.tolist(), predicted.tolist(), right.tolist(), strict=True):
        either = true + chosen
        table[name] = {
            "images": true,
            "predicted": chosen,
            "precision": hits / chosen if chosen else None,
            "recall": hits / true if true else None,
            "f1": 2 * hits / either if either else None,
        }
    return table


def _absent(names: Sequence[str], counts: Tensor) -> list[str]:
    return [name for name, count in zip(names, counts.tolist(), strict=True) if not count]


def reliability_of(found: Evaluation, contract: Contract) -> dict[str, list[tuple[int, float, float]]]:
    """Reliability diagrams of a split, see `calibration.reliability`; empty for a task whose outputs are no probabilities.

    Returns:
        classify: after (as scores are read) and, where a temperature is fitted, before, of each image's prediction. multilabel: after, of
        each score of each image.
    """
    if found.task == "multilabel":
        return {"after": reliability(found.scores.flatten(), found.targets.bool().flatten())}
    if found.task != "classify":
        return {}
    best, predicted = found.scores.max(dim=1)
    right = predicted == found.targets
    after = {"after": reliability(best, right)}
    if contract.temperature == 1:
        return after
    return {**after, "before": reliability(found.outputs.softmax(dim=1).max(dim=1).values, right)}


def _by_class(pixels: PixelCounts, classes: Sequence[str]) -> dict[str, Any]:
    """Of segment: each class's intersection over union (None where it is neither there nor predicted) and share of the labelled pixels."""
    true, predicted, right = pixels.total()
    found, total = class_iou(true, predicted, right), int(true.sum())
    return {
        name: {"iou": float(found[index]) if index in found else None, "share": int(true[index]) / total if total else None}
        for index, name in enumerate(classes)
    }


def _lists(found: dict[str, tuple[float, float]]) -> dict[str, list[float]]:
    return {name: list(interval) for name, interval in found.items()}
