"""Draws which class is taken for which: a square a pair, darker for a larger share of the label's images."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hiresvis.errors import RecipeError
from hiresvis.plan_plot import DOTS_PER_INCH, INK, need_matplotlib
from hiresvis.run.files import write_bytes

MOST_NAMED, MOST_NUMBERED = 60, 25  # classes with their names, and with numbers in the squares
_SIDE_INCHES, _LEAST_INCHES, _MOST_INCHES = 0.42, 4.0, 14.0
_DARK = 0.6  # shares above it have white numbers


def refuse_task(task: str) -> None:
    """What can be known before anything is evaluated.

    Raises:
        RecipeError: the task has no confusion of classes.
    """
    if task != "classify":
        what = f"--plot draws which class is taken for which, and the run's task is {task}"
        raise RecipeError(f"{what}; leave it out, report.html has the other tasks' drawings")


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Writes a PNG with a square for each split of what `evaluate` gives for task classify.

    Raises:
        MissingExtra: matplotlib is not installed.
        EnvironmentFailed: the file cannot be written.
    """
    splits = {name: result for name, result in found.items() if "confusion" in result}
    content = io.BytesIO()
    figure(splits).savefig(content, format="png", dpi=DOTS_PER_INCH, bbox_inches="tight")
    write_bytes(path, content.getvalue())


def figure(splits: Mapping[str, Any]) -> Any:
    """The picture as a matplotlib figure, a part for each split."""
    need_matplotlib()
    from matplotlib.figure import Figure

    classes = [*next(iter(splits.values()))["classes"]]
    side = min(_MOST_INCHES, max(_LEAST_INCHES, _SIDE_INCHES * len(classes)))
    drawn = Figure(figsize=(side * len(splits), side), layout="constrained")
    for axes, (name, result) in zip(drawn.subplots(1, len(splits), squeeze=False)[0], splits.items(), strict=True):
        _square(axes, name, classes, result)
    return drawn


def _square(axes: Any, split: str, classes: Sequence[str], result: Mapping[str, Any]) -> None:
    place = {name: index for index, name in enumerate(classes)}
    shares = [[0.0] * len(classes) for _ in classes]
    for pair in result["confusion"]:
        row, column, images = place[pair["label"]], place[pair["predicted"]], pair["images"]
        shares[row][column] = images / result["classes"][pair["label"]]["images"]
        if len(classes) <= MOST_NUMBERED:
            colour = "white" if shares[row][column] > _DARK else INK
            axes.text(column, row, str(images), ha="center", va="center", color=colour, fontsize=8)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    named = len(classes) <= MOST_NAMED
    axes.set_xticks(range(len(classes)) if named else [], classes if named else [], rotation=90, parse_math=False)
    axes.set_yticks(range(len(classes)) if named else [], classes if named else [], parse_math=False)
    axes.set_xlabel("predicted as")
    axes.set_ylabel("label")
    axes.set_title(f"{split}: {result['images']} images, accuracy {result['accuracy']:.3f}")
