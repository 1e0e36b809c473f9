"""The report's own drawings: curves, the plan along the chain, the peak by part, the confusion grid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from hiresvis.ui.state import RunState
from hiresvis.ui.svg import BOTTOM, LEFT, RIGHT, TOP, Curve, Scale, drawing, element, frame, line_chart, tick_text, ticks
from hiresvis.ui.text import number, shorten
from hiresvis.units import GIB, KIB, MIB, format_size

PLAN_WIDTH, PLAN_HEIGHT = 1080, 344
BAR_WIDTH, BAR_LEFT = 1080, 92
SCATTER_SIDE, SCATTER_POINTS = 380, 2000
PART_NAMES = {
    "baseline": "before the first step",
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "saved": "saved for backward",
    "interior": "inside a unit",
    "reserve": "reserve",
}


def loss_chart(state: RunState) -> Markup:
    """Training loss by step (thin) and its mean, validation loss by epoch."""
    curves = [
        Curve("train, by step", state.losses.all_points, "thin"),
        Curve("train, mean", centred_mean(state.losses.all_points), "c1"),
        Curve("val", [(e.epoch, e.val_loss) for e in state.epochs if e.val_loss is not None], "c2", dots=True),
    ]
    if not curves[1].points:  # no steps known: metrics.csv alone
        curves[1] = Curve("train", [(e.epoch, e.train_loss) for e in state.epochs if e.train_loss is not None], "c1", dots=True)
    return line_chart(curves, label="Training and validation loss by epoch")


def centred_mean(points: Sequence[tuple[float, float]], share: float = 0.06) -> list[tuple[float, float]]:
    """Each point as the mean of those around it, `share` of the curve wide: unlike a running mean it does not lag behind.

    >>> centred_mean([(0, 1.0), (1, 4.0), (2, 1.0)], share=0.5)
    [(0, 2.5), (1, 2.0), (2, 2.5)]
    """
    reach = max(1, round(len(points) * share / 2)) if len(points) > 2 else 0
    means = []
    for index, (x, _) in enumerate(points):
        near = points[max(0, index - reach) : index + reach + 1]
        means.append((x, sum(y for _, y in near) / len(near)))
    return means


def metric_chart(state: RunState) -> Markup:
    """Validation metrics by epoch, the best epoch of the deciding one marked."""
    names = list(dict.fromkeys(name for epoch in state.epochs for name in epoch.metrics))
    best = state.best
    names.sort(key=lambda name: best is None or name != best[0])
    curves = [
        Curve(name, [(e.epoch, e.metrics[name]) for e in state.epochs if name in e.metrics], f"c{2 + index}", dots=index == 0)
        for index, name in enumerate(names[:3])
    ]
    mark = (float(best[2]), best[1], f"best {number(best[1])}") if best else None
    return line_chart(curves, label="Validation metrics by epoch", mark=mark)


def metric_names(state: RunState) -> list[tuple[str, str]]:
    """The metric chart's names with their styles."""
    names = list(dict.fromkeys(name for epoch in state.epochs for name in epoch.metrics))
    best = state.best
    names.sort(key=lambda name: best is None or name != best[0])
    return [(name, f"c{2 + index}") for index, name in enumerate(names[:3])]


def rate_chart(state: RunState) -> Markup:
    """Learning rate by step, or by epoch where no steps are known."""
    points = state.rates.all_points or tuple((e.epoch, e.lr) for e in state.epochs if e.lr is not None)
    return line_chart(
        [Curve("learning rate", points, "c1")], label="Learning rate by epoch", y_text=lambda value: f"{value:.1e}" if value else "0"
    )


def size_unit(num_bytes: float) -> tuple[int, str]:
    """The unit a chart of such sizes is labelled in."""
    return (GIB, "GiB") if num_bytes >= 2 * GIB else (MIB, "MiB") if num_bytes >= 2 * MIB else (KIB, "KiB")


def _units(plan: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [unit for unit in plan.get("units") or () if isinstance(unit, dict) and "name" in unit]


def plan_chart(plan: Mapping[str, Any]) -> Markup:
    """One bar per unit along the chain: its outline is what it would save when stored, the filled part what the plan keeps."""
    units = _units(plan)
    if not units:
        return Markup("")
    top_bytes = max(max(unit.get("saved_bytes") or 0, unit.get("kept_bytes") or 0) for unit in units) or 1
    factor, name = size_unit(top_bytes)
    y_ticks = ticks(0.0, top_bytes / factor, 4)
    base = PLAN_HEIGHT - 76
    y = Scale(0.0, y_ticks[-1], base, 30)
    x = Scale(0.0, len(units), 62, PLAN_WIDTH - 10)
    parts = frame(x, y, (), y_ticks, lambda value: f"{value:g}", "")
    parts.append(element("text", f"{name} per unit", x=x.start, y=16, class_="tick"))
    width = x(1) - x(0)
    for index, unit in enumerate(units):
        parts.append(_unit_bar(unit, x(index) + width * 0.1, width * 0.8, y, factor))
    parts += _segment_marks(units, x, base) + _stage_marks(units, x, base)
    return drawing(PLAN_WIDTH, PLAN_HEIGHT, parts, "Memory that each unit of the chain saves and keeps")


def _unit_bar(unit: Mapping[str, Any], left: float, width: float, y: Scale, factor: int) -> Markup:
    saved, kept = (float(unit.get(key) or 0) for key in ("saved_bytes", "kept_bytes"))
    store = unit.get("decision") == "store"
    words = f"{unit['name']} ({unit.get('kind', 'unit')}): {unit.get('decision', '?')}"
    words += f", saves {format_size(saved)} when stored, keeps {format_size(kept)}"
    bars = [element("title", words)]
    for size, style in ((saved, "stored faint" if store else "again"), (kept, "stored" if store else "kept")):
        height = y.start - y(size / factor)
        bars.append(element("rect", x=left, y=y.start - height, width=width, height=height, class_=style))
    return element("g", Markup("").join(bars))


def _groups(units: Sequence[Mapping[str, Any]], key: str) -> list[tuple[object, int, int]]:
    """Runs of neighbours with the same value: (value, first, after the last)."""
    groups: list[tuple[object, int, int]] = []
    for index, unit in enumerate(units):
        value = unit.get(key)
        if groups and groups[-1][0] == value:
            groups[-1] = (value, groups[-1][1], index + 1)
        else:
            groups.append((value, index, index + 1))
    return groups


def _segment_marks(units: Sequence[Mapping[str, Any]], x: Scale, base: float) -> list[Markup]:
    """A bracket under each segment: its units are recomputed together."""
    marks = []
    for segment, first, after in _groups(units, "segment"):
        if segment is not None:
            left, right = x(first) + 2, x(after) - 2
            path = f"M{left:.1f} {base + 5:.1f}v5H{right:.1f}v-5"
            marks.append(element("path", element("title", f"segment {segment}: {after - first} units"), d=path, class_="segment"))
    return marks


def _stage_marks(units: Sequence[Mapping[str, Any]], x: Scale, base: float) -> list[Markup]:
    marks = []
    row_ends = [-1.0, -1.0, -1.0]  # rows of names, so that short stages side by side do not cover each other
    for stage, first, after in _groups(units, "stage"):
        left, right = x(first), x(after)
        if first:
            marks.append(element("line", x1=left, x2=left, y1=30, y2=base + 14, class_="border"))
        name = shorten(str(stage or ""), 16)
        half = 3.6 * len(name)
        middle = min(max((left + right) / 2, x.start + half), x.end - half)
        row = next((row for row, end in enumerate(row_ends) if middle - half > end), None)
        if row is None:  # the bars' own titles still tell
            continue
        row_ends[row] = middle + half + 6
        marks.append(element("text", name, x=middle, y=base + 30 + 15 * row, class_="tick mid"))
    return marks


def peak_chart(plan: Mapping[str, Any], how: str) -> Markup:
    """The predicted peak by part over the measured one, with the budget's line and the capacity's."""
    parts_bytes = plan_parts(plan)
    measured, measured_of_plan = measured_peaks(plan)
    if not parts_bytes and not measured:
        return Markup("")
    budget, capacity = int(plan.get("budget_bytes") or 0), int(plan.get("capacity_bytes") or 0)
    top = max(sum(size for _, size in parts_bytes), budget, measured or 0)
    if top < capacity <= 1.6 * top:
        top = capacity
    factor, name = size_unit(top)
    x_ticks = [tick for tick in ticks(0.0, 1.04 * top / factor, 8) if tick <= 1.06 * top / factor]
    x = Scale(0.0, 1.04 * top / factor, BAR_LEFT, BAR_WIDTH - 16)
    height = 166
    parts = [element("text", f"{value:g}", x=x(value), y=height - 14, class_="tick mid") for value in x_ticks]
    parts.append(element("text", name, x=BAR_LEFT - 10, y=height - 14, class_="tick end"))
    parts += _stack("predicted", parts_bytes, 50, x, factor)
    if measured:
        baseline = int(measured_of_plan.get("baseline_bytes") or 0)
        pieces = [("baseline", baseline), (how, measured - baseline)] if 0 < baseline < measured else [(how, measured)]
        parts += _stack("measured", pieces, 98, x, factor)
    for row, (size, word) in enumerate(((capacity, "capacity"), (budget, "budget"))):  # a row each: the two may lie close together
        if size and size <= top:
            place = x(size / factor)
            parts.append(element("line", x1=place, x2=place, y1=18 + 16 * row, y2=height - 30, class_=word))
            parts.append(element("text", f"{word} {format_size(size)}", x=place - 5, y=16 + 16 * row, class_="tick end"))
    return drawing(BAR_WIDTH, height, parts, "Predicted peak by part, measured peak and budget")


def plan_parts(plan: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The parts of the predicted peak that are not zero, in the plan's order."""
    return [(name, int(size)) for name, size in (plan.get("parts") or {}).items() if size]


def measured_peaks(plan: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
    """The measured peak of process or device in bytes (0: none), and all that the probe measured."""
    measured = plan.get("measured") or {}
    return int(measured.get("resident_peak_bytes") or 0), measured


def part_style(name: str) -> str:
    """A part's class on the page."""
    return f"part-{name}" if name in PART_NAMES else "part-measured"


def _stack(label: str, pieces: Sequence[tuple[str, int]], top: int, x: Scale, factor: int) -> list[Markup]:
    bars = [element("text", label, x=BAR_LEFT - 10, y=top + 21, class_="tick end strong")]
    at = 0
    for name, size in pieces:
        left, right = x(at / factor), x((at + size) / factor)
        words = f"{PART_NAMES.get(name, name)} {format_size(size)}"
        bar = element(
            "rect", element("title", words), x=left, y=top, width=max(0.5, right - left), height=34, class_=f"part {part_style(name)}"
        )
        bars.append(bar)
        short = PART_NAMES.get(name, name)
        if right - left > 7.2 * len(short):
            bars.append(element("text", short, x=(left + right) / 2, y=top + 21, class_="inside mid" if name in PART_NAMES else "over mid"))
        at += size
    return bars


def scatter(name: str, points: Sequence[tuple[float, float]]) -> Markup:
    """Predicted values against true ones, with the line on which they are equal; of very many images an even pick."""
    values = [value for point in points for value in point if math.isfinite(value)]
    if not values:
        return Markup("")
    both = ticks(min(values), max(values), 5)
    side = SCATTER_SIDE
    x, y = Scale(both[0], both[-1], LEFT, side - RIGHT), Scale(both[0], both[-1], side - BOTTOM, TOP)
    parts = frame(x, y, both, both, tick_text, "true")
    parts.append(element("line", x1=x.start, y1=y.start, x2=x.end, y2=y.end, class_="border"))
    shown = points[:: -(-len(points) // SCATTER_POINTS)]
    parts.extend(element("circle", cx=x(true), cy=y(value), r=2.5, class_="dot c1", fill_opacity=0.6) for true, value in shown)
    return drawing(side, side, parts, f"{name}: predicted values against true ones")


def confusion_grid(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> Markup:
    """Many classes: a grid without numbers; rows are labels, columns predictions, darkness the share of the row."""
    size = len(classes)
    cell = max(4.0, min(14.0, 760 / max(1, size)))
    parts = [element("rect", x=0, y=0, width=cell * size, height=cell * size, class_="field")]
    for row, line in enumerate(counts):
        total = sum(line) or 1
        for column, count in enumerate(line):
            if count:
                words = f"{classes[row]} taken for {classes[column]}: {count} of {total}"
                style = "hit" if row == column else "miss"
                parts.append(
                    element("rect", element("title", words), x=column * cell, y=row * cell, width=cell, height=cell,
                            class_=style, fill_opacity=0.25 + 0.75 * count / total)
                )  # fmt: skip
    side = int(cell * size) + 1
    return drawing(side, side, parts, "Confusion of labels (rows) and predictions (columns)")
