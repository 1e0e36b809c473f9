"""Runs side by side in one page: results with their intervals, curves over each other, what their recipes differ in, plans and times."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hiresvis.errors import RunFolderError
from hiresvis.recipe.changes import parse_resolved
from hiresvis.run.files import write_text
from hiresvis.ui.charts import centred_mean
from hiresvis.ui.report import model_of, page, status_of
from hiresvis.ui.report_scores import SPLITS
from hiresvis.ui.run_files import RunFiles, read_run
from hiresvis.ui.svg import Curve, line_chart
from hiresvis.ui.text import image_size_text, interval_text, intervals_of, number, percent, speed
from hiresvis.ui.times import Cost, cost_of
from hiresvis.units import format_duration, format_size

MOST_RUNS = 6  # colours that can be told apart
_LOWER_IS_BETTER = {"loss", "mae", "rmse"}
_OWN = {"log.dir", "log.ui", "log.to", "log.report"}  # of each run by itself

Cell = tuple[str, bool]  # what is said of one run, and whether it is the best


def write_comparison(folders: Sequence[Path], out: Path, *, price_per_hour: float | None = None) -> Path:
    """Writes the page of several runs, the first of which is the one that others are held against.

    Args:
        price_per_hour: of the device, in whatever currency.

    Raises:
        RunFolderError: a folder holds no run, one is given twice, or they are more than can be told apart.
        EnvironmentFailed: the page cannot be written.
    """
    if len(folders) > MOST_RUNS:
        raise RunFolderError(f"{len(folders)} runs are too many for one page; compare up to {MOST_RUNS} at a time")
    real = [os.path.realpath(folder) for folder in folders]
    if twice := [str(folder) for folder, path in zip(folders, real, strict=True) if real.count(path) > 1]:
        raise RunFolderError(f"{twice[0]} is given twice; a run does not compare with itself")
    runs = [read_run(folder) for folder in folders]
    write_text(out, page("compare.html.j2", _context(runs, price_per_hour)))
    return out


def _context(runs: Sequence[RunFiles], price_per_hour: float | None) -> dict[str, Any]:
    names = _names(runs)
    costs = [cost_of(run.state, run.times, price_per_hour) for run in runs]
    heads = []
    for position, (name, run) in enumerate(zip(names, runs, strict=True), start=1):
        model, size = model_of(run)
        heads.append({"name": name, "style": f"c{position}", "model": model, "size": size, "status": status_of(run.state)})
    return {
        "runs": heads,
        "cautions": _cautions(runs),
        "results": [(SPLITS[split], rows) for split in ("test", "val") if (rows := _results(runs, split))],
        "charts": _charts(runs),
        "recipes": _differences(runs),
        "plans": _plans(runs),
        "times": _times(runs, costs),
        "price_per_hour": price_per_hour,
    }


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """Each run's name; with its folder's parent where two have the same."""
    short = [run.state.started.run_name if run.state.started else run.folder.resolve().name for run in runs]
    return [name if short.count(name) == 1 else "/".join(run.folder.resolve().parts[-2:]) for name, run in zip(short, runs, strict=True)]


def _cautions(runs: Sequence[RunFiles]) -> list[str]:
    """Why figures may not be held against each other."""
    said = []
    if len({run.task for run in runs}) > 1:
        said.append("The runs have different tasks.")
    if len({run.classes for run in runs}) > 1:
        said.append("The runs know different classes.")
    for split, what in (("val", "validated"), ("train", "trained")):
        hashes = {str((run.plan.get("data") or {}).get(split, {}).get("sha256")) for run in runs}
        if len(hashes) > 1:
            said.append(f"The runs were {what} on different images or labels.")
    if any(run.state.finished is None for run in runs):
        said.append("A run has not finished: its figures are those so far.")
    return said


def _figures(run: RunFiles, split: str) -> Mapping[str, Any]:
    """A split's figures by name: of the run's end, or, of one that has not come so far, the best epoch's."""
    finished = run.state.finished
    if finished is not None and finished.results.get(split):
        return finished.results[split]
    if split == "test":
        return {}
    best = run.state.best
    epoch = next((one for one in run.state.epochs if best is not None and one.epoch == best[2]), None)
    return {} if epoch is None else {"loss": epoch.val_loss, **epoch.metrics}


def _results(runs: Sequence[RunFiles], split: str) -> list[tuple[str, list[Cell]]]:
    """(metric, a cell a run); the best of each row is marked."""
    figures = [_figures(run, split) for run in runs]
    rows = []
    for name in dict.fromkeys(name for found in figures for name in found):
        values = [found.get(name) for found in figures]
        numbers = [value for value in values if isinstance(value, int | float)]
        if not numbers or name == "images":
            continue
        best = (min if name in _LOWER_IS_BETTER else max)(numbers) if len(set(numbers)) > 1 else None
        cells = []
        for run, value in zip(runs, values, strict=True):
            ends = interval_text(intervals_of(run.state.finished, split).get(name))
            known = isinstance(value, int | float)
            cells.append((f"{number(value, 4)}{ends}" if known else "-", known and value == best))
        rows.append((name, cells))
    return rows


def _charts(runs: Sequence[RunFiles]) -> list[tuple[str, Markup]]:
    """Curves of all runs over each other; those that nobody has are left out."""
    metric = next((run.state.best[0] for run in runs if run.state.best), "")

    def drawn(heading: str, points_of: Sequence[Sequence[tuple[float, float]]], **options: Any) -> tuple[str, Markup]:
        curves = [Curve(str(at), points, f"c{at}", dots=len(points) < 40) for at, points in enumerate(points_of, start=1)]
        return heading, line_chart(curves, label=f"{heading} by epoch, of each run", **options)

    trained = [centred_mean(run.state.losses.all_points) or _by_epoch(run, "train_loss") for run in runs]
    found = [
        drawn("Training loss", trained),
        drawn("Validation loss", [_by_epoch(run, "val_loss") for run in runs]),
        drawn(f"Validation {metric}", [[(e.epoch, e.metrics[metric]) for e in run.state.epochs if metric in e.metrics] for run in runs]),
        drawn("Learning rate", [run.state.rates.all_points for run in runs], y_text=lambda value: f"{value:.1e}" if value else "0"),
    ]
    return [entry for entry in found if entry[1]]


def _by_epoch(run: RunFiles, name: str) -> list[tuple[float, float]]:
    return [(epoch.epoch, value) for epoch in run.state.epochs if (value := getattr(epoch, name)) is not None]


def _differences(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Keys whose values differ, by run; what each run has by itself aside."""
    found = []
    unread = []
    for run in runs:
        try:
            entries = parse_resolved(run.resolved, run.folder / "recipe.resolved.yaml")
            found.append({key: (_shown(entry.value), entry.origin) for key, entry in entries.items() if key not in _OWN})
        except RunFolderError:
            unread.append(run.folder.name)
            found.append({})
    known = [entries for entries in found if entries]
    keys = list(dict.fromkeys(key for entries in known for key in entries))
    rows = [
        (key, [entries.get(key, ("-", "")) for entries in found])
        for key in keys
        if len({entries.get(key, ("", ""))[0] for entries in known}) > 1
    ]
    return {"rows": rows, "unread": unread, "known": len(known)}


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _plans(runs: Sequence[RunFiles]) -> list[tuple[str, list[str]]]:
    plans = [run.plan for run in runs]

    def sizes(key: str) -> list[str]:
        return [format_size(plan[key]) if plan.get(key) else "-" for plan in plans]

    measured = [(plan.get("measured") or {}).get("resident_peak_bytes") for plan in plans]
    rows = [
        ("image size", [image_size_text(plan.get("image_size") or ()) or "-" for plan in plans]),
        ("micro-batch x accum", [f"{plan.get('micro_batch', '?')} x {plan.get('accumulation', '?')}" for plan in plans]),
        ("precision", [str(plan.get("precision") or "-") for plan in plans]),
        ("budget", sizes("budget_bytes")),
        ("predicted peak", sizes("predicted_peak_bytes")),
        ("measured peak", [format_size(size) if size else "-" for size in measured]),
        ("recompute", [percent(plan.get("recompute_fraction")) for plan in plans]),
        ("stages", [" · ".join(map(str, plan.get("stages") or ())) or "-" for plan in plans]),
    ]
    return rows if any(plans) else []


def _times(runs: Sequence[RunFiles], costs: Sequence[Cost]) -> list[tuple[str, list[str]]]:
    """Speeds, waits and hours, and money where a price is given."""
    times = [run.times for run in runs]
    steps = [one.wait + one.compute for one in times]
    rows = [
        ("images per second", [speed(one.images / taken) if taken else "-" for one, taken in zip(times, steps, strict=True)]),
        ("data wait", [percent(one.wait / taken) if taken else "-" for one, taken in zip(times, steps, strict=True)]),
        ("epochs trained", [str(len(run.state.epochs)) for run in runs]),
        ("planned, steps alone", [_duration(cost.planned_hours) for cost in costs]),
        ("spent on steps", [_duration(cost.trained_hours) for cost in costs]),
        ("spent in all", [_duration(cost.spent_hours) for cost in costs]),
    ]
    if any(cost.price_per_hour is not None for cost in costs):
        for what, hours in (("planned", [cost.planned_hours for cost in costs]), ("spent", [cost.spent_hours for cost in costs])):
            money = [cost.money(own) for cost, own in zip(costs, hours, strict=True)]
            rows.append((f"price, {what}", ["-" if sum_ is None else f"{sum_:.2f}" for sum_ in money]))
    return rows


def _duration(hours: float | None) -> str:
    return format_duration(hours * 3600) if hours else "-"
