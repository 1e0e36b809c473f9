"""What the report says of a run's predictions: by class, label or target, how far scores can be believed, and what thresholds do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from hiresvis.run.events import is_of
from hiresvis.ui import charts
from hiresvis.ui.run_files import RunFiles
from hiresvis.ui.score_charts import Bin, reliability_chart, threshold_chart
from hiresvis.ui.scores import (
    SplitScores,
    class_rankings,
    label_scores,
    mask_scores,
    split_scores,
    target_scores,
    threshold_curve,
)

SPLITS = {"val": "Validation", "test": "Test"}
TABLE_CLASSES = 20  # a confusion table with numbers up to here, a grid of shades up to GRID_CLASSES
GRID_CLASSES = 120
NUM_CONFUSED = 12
NUM_CURVES = 12


def scores_of(run: RunFiles, splits: Sequence[str]) -> dict[str, Any]:
    """What the predictions are worth, by the task: `scores` (classify), `labels` (multilabel), `targets` (regress) or `masks` (segment)."""
    found: dict[str, Any] = {"scores": [], "labels": [], "targets": [], "masks": []}
    for split in splits:
        if run.task == "segment":
            if masks := mask_scores(split, run.predictions, run.classes):
                found["masks"].append({"split": SPLITS[split], "found": masks})
        elif run.task == "regress":
            rows = target_scores(split, run.predictions, run.classes)
            drawn = [(row, charts.scatter(row.name, row.points)) for row in rows]
            found["targets"].append({"split": SPLITS[split], "rows": drawn, "num_images": len(rows[0].points) if rows else 0})
        elif run.task == "multilabel":
            if labels := label_scores(split, run.predictions, run.classes):
                found["labels"].append({"split": SPLITS[split], "found": labels})
        elif scores := split_scores(split, run.predictions, run.classes):
            found["scores"].append(_score_context(scores))
    return found


def _score_context(found: SplitScores) -> dict[str, Any]:
    size = len(found.classes)
    return {
        "split": SPLITS[found.split],
        "found": found,
        "table": size <= TABLE_CLASSES,
        "grid": charts.confusion_grid(found.counts, found.classes) if TABLE_CLASSES < size <= GRID_CLASSES else "",
        "shares": [[count / (sum(line) or 1) for count in line] for line in found.counts],
        "confused": found.confused[:NUM_CONFUSED],
    }


def calibration_of(run: RunFiles) -> dict[str, Any]:
    """Reliability diagrams by split, and the temperature; no drawings where the run wrote none."""
    words = "scores" if run.task == "multilabel" else "predictions"
    drawn = []
    for split in ("test", "val"):
        found = run.reliability.get(split)
        after, before = (_bins(found.get(key)) if isinstance(found, Mapping) else [] for key in ("after", "before"))
        if after:
            errors = [(name, _error(bins)) for name, bins in (("before", before), ("after", after)) if bins]
            drawn.append(
                {"split": SPLITS[split], "drawing": reliability_chart(after, before, words), "errors": errors, "both": bool(before)}
            )
    return {"drawn": drawn, "temperature": run.contract.get("temperature"), "words": words}


def _bins(rows: Any) -> list[Bin]:
    """Whole rows alone: a file that someone has changed is no reason for no page."""
    return [(int(row[0]), float(row[1]), float(row[2])) for row in (rows if isinstance(rows, list) else ()) if _is_bin(row)]


def _is_bin(row: Any) -> bool:
    if not isinstance(row, list) or len(row) != 3:
        return False
    return all(is_of(one, "int") and one >= 0 for one in row) and max(row[1:]) <= 1


def _error(bins: Sequence[Bin]) -> float:
    """The calibration error: how far scores are from shares, weighted by predictions."""
    total = sum(count for count, _, _ in bins)
    return sum(count * abs(right - score) for count, score, right in bins) / total if total else math.nan


def thresholds_of(run: RunFiles, splits: Sequence[str]) -> dict[str, Any]:
    """Precision and recall by threshold, of the first split that there is, for each label or each of two classes."""
    split = next(iter(splits), "")
    rankings = class_rankings(split, run.predictions, run.classes, run.task) if split else {}
    fitted = run.contract.get("thresholds") or ()
    used: dict[str, float | None] = {name: 0.5 for name in rankings}
    used.update(zip(run.classes, fitted, strict=False))
    drawn: list[tuple[str, Markup]] = []
    for name, ranked in list(rankings.items())[:NUM_CURVES]:
        points = threshold_curve(ranked)
        if len(points) > 1:
            drawn.append((name, threshold_chart(name, points, used[name])))
    return {"split": SPLITS.get(split, ""), "drawn": drawn, "more": max(0, len(rankings) - NUM_CURVES)}
