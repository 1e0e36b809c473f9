"""`report.html`: one page that holds the whole run. Reads files only, needs no network, no script and no training library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hiresvis.run.events import Notice
from hiresvis.run.files import write_text
from hiresvis.ui import charts
from hiresvis.ui.report_scores import SPLITS, calibration_of, scores_of, thresholds_of
from hiresvis.ui.run_files import Picture, Prediction, RunFiles, read_run, worst
from hiresvis.ui.state import RunState
from hiresvis.ui.svg import hatch
from hiresvis.ui.text import (
    UNICODE,
    deviation,
    image_size_text,
    interval_text,
    intervals_of,
    is_cpu,
    ladder_cells,
    next_commands,
    number,
    percent,
    speed,
)
from hiresvis.ui.thumbnails import thumbnail
from hiresvis.ui.times import cost_of, step_shares
from hiresvis.units import format_duration, format_size

TABLE_LABELS = 200
NUM_NOTICES = 40  # a broken disk may skip thousands of files

_ENDS = {
    "completed": ("good", "completed"),
    "early_stop": ("good", "completed: stopped early, no better epoch came"),
    "max_time": ("good", "completed: the time allowed was used up"),
}


def write_report(run_dir: Path, *, price_per_hour: float | None = None) -> Path:
    """Write `report.html` into a run folder and return its path; the page before it stays until the new one is whole.

    Args:
        price_per_hour: of the device, in whatever currency; None: the page tells hours alone.

    Raises:
        RunFolderError: the folder holds none of a run's files.
        EnvironmentFailed: the page cannot be written.
    """
    target = run_dir / "report.html"
    write_text(target, render_report(read_run(run_dir), price_per_hour=price_per_hour))
    return target


def render_report(run: RunFiles, *, price_per_hour: float | None = None) -> str:
    """The page as text."""
    return page("report.html.j2", _context(run, price_per_hour))


def page(template: str, context: Mapping[str, Any]) -> str:
    """A page of this folder's templates, whatever comes from outside escaped."""
    environment = Environment(
        loader=PackageLoader("hiresvis", "ui"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        size=format_size, number=number, percent=percent, speed=speed, duration=format_duration, rate=_rate, told=_told, hours=_hours
    )
    return environment.get_template(template).render(context)


def _context(run: RunFiles, price_per_hour: float | None) -> dict[str, Any]:
    state = run.state
    splits = [split for split in ("test", "val") if any(row.split == split for row in run.predictions)]
    model, image_size = model_of(run)
    serious = sorted((notice for notice in state.notices if notice.level != "info"), key=lambda notice: notice.level != "error")
    return {
        "title": state.started.run_name if state.started else run.folder.resolve().name,
        "model": model,
        "image_size": image_size,
        "started": state.started,
        "status": status_of(state),
        "when": _when(state.started.time) if state.started and state.started.time else "",
        "tiles": _tiles(run),
        "charts": _charts(state),
        "epochs": state.epochs,
        "metric_names": list(dict.fromkeys(name for epoch in state.epochs for name in epoch.metrics)),
        "best": state.best,
        "test_metrics": dict(state.finished.test_metrics) if state.finished else dict(state.test.metrics) if state.test else {},
        "plan": run.plan,
        "plans": state.plans,
        "plan_svg": charts.plan_chart(run.plan),
        "peak_svg": charts.peak_chart(run.plan, _how(state)),
        "peaks": _peaks(run),
        "parts": [(charts.part_style(name), charts.PART_NAMES.get(name, name), size) for name, size in charts.plan_parts(run.plan)],
        "ladder": _ladder(run),
        **scores_of(run, splits),
        "calibration": calibration_of(run),
        "thresholds": thresholds_of(run, splits),
        "time": _time(run),
        "cost": cost_of(state, run.times, price_per_hour),
        "data": _data(run),
        "machine": _machine(run),
        "device": (run.plan.get("machine") or {}).get("device") or (state.started.device if state.started else ""),
        "recipe_text": run.recipe,
        "worst": _worst(run),
        "has_evidence": bool(run.pictures),
        "is_regression": run.task in ("regress", "segment"),
        "resolved": state.resolved,
        "resolved_text": run.resolved,
        "notices": serious[:NUM_NOTICES],
        "more_notices": max(0, len(serious) - NUM_NOTICES),
        "infos": [notice for notice in state.notices if notice.level == "info" and not _is_finding(state, notice)],
        "commands": _commands(run),
        "gaps": run.gaps,
        "hatches": Markup("").join([hatch("again", "hatch-line"), hatch("measured", "hatch-measured")]),
    }


def _when(time: float) -> str:
    """Empty where it is no time that a calendar has."""
    try:
        return datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return ""


def _is_finding(state: RunState, notice: Notice) -> bool:
    """Told before training begins: what was found of data and weights."""
    return state.started is not None and notice.time <= state.started.time


def _data(run: RunFiles) -> dict[str, Any]:
    """Samples of each label by split, and what was told of data and weights before training."""
    state = run.state
    splits = [split for split in ("train", "val", "test") if split in run.labels]
    table = []
    if run.task in ("classify", "multilabel"):
        names = list(dict.fromkeys([*run.classes, *(name for split in splits for name in run.labels[split])]))
        table = [(name, [run.labels[split].get(name, 0) for split in splits]) for name in names]
    findings = [notice for notice in state.notices if _is_finding(state, notice)]
    return {
        "splits": [SPLITS.get(split, "Training") for split in splits],
        "table": table[:TABLE_LABELS],
        "more": max(0, len(table) - TABLE_LABELS),
        "findings": findings[:NUM_NOTICES],
        "more_findings": max(0, len(findings) - NUM_NOTICES),
    }


def _time(run: RunFiles) -> list[tuple[str, float, float, str]]:
    """(what, seconds, share of all, how it is known) of the run's time; the parts of a step's own work are told by FLOPs."""
    times = run.times
    if times.total <= 0:
        return []
    rows = [
        ("before the first step: check, costs, probe", times.prepare, "measured"),
        ("steps: waiting for data", times.wait, "measured"),
        ("steps: at work", times.compute, "measured"),
        *((f"of which {name}", times.compute * share, "predicted, by FLOPs") for name, share in step_shares(run.plan)),
        ("evaluation", times.evaluate, "measured"),
        ("the rest: snapshots, workers, report", times.rest, "measured"),
    ]
    return [(what, seconds, seconds / times.total, how) for what, seconds, how in rows]


def _machine(run: RunFiles) -> list[tuple[str, str]]:
    """(what, value) of the machine and the releases that the run was made with, as far as plan.json tells."""
    found = run.plan.get("machine") or {}
    rows = [(name, found.get(name)) for name in ("device", "cores", "system", "python")]
    if found.get("memory_bytes"):
        rows.insert(1, ("memory of the device", format_size(found["memory_bytes"])))
    rows += list((found.get("packages") or {}).items())
    rows.append(("augmentation", run.plan.get("augmented_by")))
    return [(name, str(value)) for name, value in rows if value]


def _hours(value: float | None) -> str:
    """Hours of a device, as they are paid.

    >>> _hours(12.345), _hours(0.0312), _hours(None)
    ('12.35 h', '0.031 h', '-')
    """
    return "-" if value is None else f"{value:.2f} h" if value >= 0.995 else f"{value:.3f} h"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def _told(picture: Picture) -> str:
    """What a picture of evidence shows."""
    if picture.what == "seen":
        return f"as the model was given it, {picture.size[1]}x{picture.size[0]}" if len(picture.size) == 2 else "as the model was given it"
    if picture.empty:
        return f"nothing speaks for {picture.name}"
    return {"detail": "detail, pixel for pixel", "value": f"what moves {picture.name}"}.get(picture.what) or (
        f"for {picture.name} ({'the label' if picture.what == 'label' else picture.what})"
    )


def model_of(run: RunFiles) -> tuple[str, str]:
    """The model's name and its image size in words."""
    started = run.state.started
    if started:
        return started.model, image_size_text(started.image_size)
    size = run.plan.get("image_size") or run.contract.get("image_size") or ()
    return str(run.plan.get("model") or ""), image_size_text(size)


def status_of(state: RunState) -> tuple[str, str]:
    """Style and words for how the run ended."""
    if state.finished:
        return _ENDS.get(state.finished.reason, ("good", state.finished.reason))
    if state.interrupted:
        return "warn", f"interrupted by {state.interrupted.signal} in epoch {state.interrupted.epoch}; it can be resumed"
    if state.epoch:
        return "warn", f"not finished: last seen in epoch {state.epoch_number}, step {state.steps_done} of {state.num_steps}"
    return "warn", "not finished: no training step is recorded"


def _tiles(run: RunFiles) -> list[tuple[str, str, str, str]]:
    """The few numbers that matter most: (name, value, its interval, remark)."""
    state, tiles = run.state, []
    if state.best:
        metric, value, epoch = state.best
        ends = interval_text(intervals_of(state.finished, "val").get(metric))
        tiles.append((f"best {metric}, validation", number(value, 4), ends, f"epoch {epoch} of {state.num_epochs or '?'}"))
    tests = state.finished.test_metrics if state.finished else state.test.metrics if state.test else {}
    if tests:
        name = state.best[0] if state.best and state.best[0] in tests else next(iter(tests))
        others = ", ".join(f"{key} {number(value)}" for key, value in tests.items() if key != name)
        ends = interval_text(intervals_of(state.finished, "test").get(name))
        tiles.append((f"{name}, test", number(tests[name], 4), ends, others))
    measured, _ = charts.measured_peaks(run.plan)
    if state.finished and not measured:
        measured = state.finished.measured_peak_bytes
    budget = int(run.plan.get("budget_bytes") or (state.plan.budget_bytes if state.plan else 0))
    if measured and budget:
        tiles.append(("measured peak", format_size(measured), "", f"{percent(measured / budget)} of {format_size(budget)} budget"))
    if state.plan:
        batch = f"{state.plan.micro_batch} x {state.plan.accumulation}"
        tiles.append(("micro-batch x accum", batch, "", f"batch {state.plan.batch}, {state.plan.precision}"))
    speeds = [epoch.images_per_second for epoch in state.epochs if epoch.images_per_second]
    pace = sum(speeds) / len(speeds) if speeds else state.images_per_second
    if pace:
        seconds = state.finished.seconds if state.finished else 0.0
        tiles.append(("images per second", speed(pace), "", f"{format_duration(seconds)} in all" if seconds else "in training"))
    return tiles


def _charts(state: RunState) -> list[tuple[str, Markup, list[tuple[str, str]]]]:
    """(heading, drawing, legend as (name, style)); empty drawings are left out."""
    loss_names = [("train step", "thin"), ("train mean", "c1"), ("val", "c2")]
    if not state.losses.all_points:
        loss_names = [("train", "c1"), ("val", "c2")]
    drawn = [
        ("Loss", charts.loss_chart(state), loss_names),
        ("Validation metrics", charts.metric_chart(state), charts.metric_names(state)),
        ("Learning rate", charts.rate_chart(state), []),
    ]
    return [entry for entry in drawn if entry[1]]


def _how(state: RunState) -> str:
    return "resident size" if is_cpu(state) else "device allocator"


def _peaks(run: RunFiles) -> list[tuple[str, int, int, str]]:
    """Predicted against measured, in each way it was measured: (how, predicted, measured, how far off)."""
    resident, measured = charts.measured_peaks(run.plan)
    finished = run.state.finished
    predicted = int(run.plan.get("predicted_peak_bytes") or (finished.predicted_peak_bytes if finished else 0))
    resident = resident or (finished.measured_peak_bytes if finished else 0)
    counted = int(measured.get("counted_peak_bytes") or (finished.counted_peak_bytes if finished else 0) or 0)
    predicted_counted = int(measured.get("predicted_counted_bytes") or (finished.predicted_counted_bytes if finished else 0) or 0)
    baseline = int(measured.get("baseline_bytes") or 0)
    rows = []
    if predicted and resident:
        rows.append((_how(run.state), predicted, resident))
        if 0 < baseline < min(predicted, resident):
            rows.append((f"{_how(run.state)}, less what was there before the first step", predicted - baseline, resident - baseline))
    if counted and predicted_counted:
        rows.append(("counted storages", predicted_counted, counted))
    return [(how, first, second, deviation(first, second)) for how, first, second in rows]


def _ladder(run: RunFiles) -> list[dict[str, Any]]:
    """The ladder's rows as words, from the events or, where those are missing, from the plan."""
    if run.state.ladder:
        return [{"chosen": row.verdict.startswith("chosen"), "cells": ladder_cells(row, UNICODE)[1:]} for row in run.state.ladder]
    found = []
    for row in run.plan.get("ladder") or ():
        verdict = str(row.get("verdict") or "")
        peak, measured, pace = (row.get(key) for key in ("predicted_peak_bytes", "measured_peak_bytes", "images_per_second"))
        cells = (
            str(row.get("spacing", "")),
            str(row.get("micro_batch") or "none"),
            format_size(peak) if peak else "-",
            format_size(measured) if measured else "-",
            percent(row.get("recompute_fraction")),
            speed(pace),
            verdict,
        )
        found.append({"chosen": verdict.startswith("chosen"), "cells": cells})
    return found


def _worst(run: RunFiles) -> list[dict[str, Any]]:
    """The worst samples: with pictures of where the evidence lies, else a preview where the image can be read."""
    return [
        {"row": row, "name": _short_path(row.path), "pictures": run.pictures.get((row.split, row.path)), "image": _preview(run, row)}
        for row in worst(run.predictions)
    ]


def _short_path(path: str) -> str:
    """The file and its folder: what tells two samples apart."""
    return "/".join(Path(path).parts[-2:])


def _preview(run: RunFiles, row: Prediction) -> str | None:
    if (row.split, row.path) in run.pictures:
        return None
    path = Path(row.path)
    for candidate in (path, run.folder / path):
        with suppress(OSError):  # no name that a file can have
            if candidate.is_file():
                return thumbnail(candidate)
    return None


def _commands(run: RunFiles) -> Sequence[str]:
    folder = run.state.started.run_dir if run.state.started else str(run.folder)
    resume = (run.state.interrupted.resume_command,) if run.state.interrupted else ()
    return (*resume, *next_commands(folder, run.task))
