"""Draws one training step's memory along the chain: forward to the right, then backward, stored against planned."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from hiresvis.errors import EnvironmentFailed, MissingExtra
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.peak import StepSetting, Walk, resident_bytes
from hiresvis.memory.plan import CheckpointPlan, Segment, store_all
from hiresvis.units import GIB, MIB

PLANNED, SAVED, STORED, BUDGET, FIXED, INK = "#0b5cad", "#a8cdf0", "#6b6b6b", "#b3261e", "#d9d9d9", "#222222"
LABEL = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
INCHES, DOTS_PER_INCH = (10.0, 5.2), 130
WIDE, NAME_HEIGHT = 0.07, 0.018  # shares of the axis: room for a name along it, and across
_BACKWARD = ("backward of ", "recompute and backward of ")


@dataclass(frozen=True, slots=True)
class Level:
    """Bytes while one thing runs.

    Attributes:
        start, end: on the axis of units: 0 to n forward, n to 2n backward.
        saved: what waits for backward; live: the highest bytes, everything included.
    """

    start: float
    end: float
    saved: int
    live: int


class _Course(Walk):
    """The walk that predicts the peak, every level of it kept."""

    def __init__(self, profile: MemoryProfile, batch: int, setting: StepSetting) -> None:
        super().__init__(profile, batch, setting)
        self.levels: list[tuple[str, int, int]] = []

    def note(self, value: int, where: str) -> None:
        super().note(value, where)
        self.levels.append((where, self.saved(), value))


def levels(profile: MemoryProfile, segments: Sequence[Segment], micro_batch: int, setting: StepSetting) -> list[Level]:
    """Every level of a step's forward and backward, in time.

    A segment that runs again does so within the place of its last unit's backward, which it shares.
    """
    course = _Course(profile, micro_batch, setting)
    for segment in segments:
        course.forward(segment)
    for segment in reversed(segments):
        course.backward(segment)
    fixed = resident_bytes(profile, setting, micro_batch) + setting.baseline_bytes + setting.reserve_bytes
    count = len(profile.units)
    found: list[Level] = []
    waiting: list[tuple[int, int]] = []
    for number, (where, saved, value) in enumerate(course.levels):
        if number < count:
            found.append(Level(number, number + 1, saved, fixed + value))
            continue
        waiting.append((saved, fixed + value))
        if where.startswith(_BACKWARD):
            place = found[-1].end
            for part, (inside, live) in enumerate(waiting):
                found.append(Level(place + part / len(waiting), place + (part + 1) / len(waiting), inside, live))
            found[-1] = replace(found[-1], end=round(found[-1].end))
            waiting = []
    return found


def need_matplotlib() -> None:
    """Asks whether a picture can be drawn, before the work that leads to it.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtra('--plot needs matplotlib: pip install "hiresvis[plot]"')


def draw(profile: MemoryProfile, plan: CheckpointPlan, setting: StepSetting, path: Path, *, title: str) -> None:
    """Writes the picture.

    Raises:
        MissingExtra: matplotlib is not installed.
        EnvironmentFailed: the file cannot be written.
    """
    kind = path.suffix.lower().removeprefix(".")
    picture = io.BytesIO()
    figure(profile, plan, setting, title).savefig(picture, format=kind if kind in ("svg", "pdf") else "png", dpi=DOTS_PER_INCH)
    try:
        path.write_bytes(picture.getvalue())
    except OSError as error:
        raise EnvironmentFailed(f"{path}: not written ({error.strerror or error}); give another file to --plot") from error


def figure(profile: MemoryProfile, plan: CheckpointPlan, setting: StepSetting, title: str) -> Any:
    """The picture as a matplotlib figure.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    need_matplotlib()
    from matplotlib.figure import Figure

    planned = levels(profile, plan.segments, plan.micro_batch, setting)
    stored = levels(profile, store_all(profile), plan.micro_batch, setting) if plan.recomputed else planned
    fixed = resident_bytes(profile, setting, plan.micro_batch) + setting.baseline_bytes + setting.reserve_bytes
    top = max(*(level.live for level in (*planned, *stored)), plan.budget_bytes)
    unit, name = (GIB, "GiB") if top >= GIB else (MIB, "MiB")
    count = len(profile.units)

    made = Figure(figsize=INCHES, layout="constrained")
    axes = made.add_subplot()
    axes.axhspan(0, fixed / unit, color=FIXED, lw=0, label="weights, optimizer, images, baseline, reserve")
    _fill(axes, planned, fixed, unit)
    if plan.recomputed:
        _line(axes, stored, unit, STORED, "--", "everything stored: highest live bytes")
    _line(axes, planned, unit, PLANNED, "-", "the plan: highest live bytes")
    axes.axhline(plan.budget_bytes / unit, color=BUDGET, ls="-.", lw=1.6, label=f"budget {plan.budget_bytes / unit:.1f} {name}")
    for course, color in ((stored, STORED), (planned, PLANNED)) if plan.recomputed else ((planned, PLANNED),):
        highest = max(course, key=lambda level: level.live)
        place = ((highest.start + highest.end) / 2, highest.live / unit)
        axes.plot(*place, marker="v", color=color, ls="none", ms=6)
        axes.annotate(f"{place[1]:.1f} {name}", place, (0, 5), textcoords="offset points", ha="center", fontsize=9, color=color, bbox=LABEL)
    axes.axvline(count, color=INK, lw=0.8)
    axes.set_xlim(0, 2 * count)
    axes.set_ylim(0, top / unit * 1.1)
    axes.set_ylabel(f"memory, {name}")
    axes.set_title(f"{title}  micro-batch {plan.micro_batch}", loc="left", pad=20, fontsize=11, color=INK)
    _name_stages(axes, [unit.stage for unit in profile.units])
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    made.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    return made


def _fill(axes: Any, found: Sequence[Level], fixed: int, unit: int) -> None:
    edges = [edge for level in found for edge in (level.start, level.end)]
    heights = [(fixed + level.saved) / unit for level in found for _ in range(2)]
    axes.fill_between(edges, fixed / unit, heights, color=SAVED, lw=0, label="the plan: saved for backward")


def _line(axes: Any, found: Sequence[Level], unit: int, color: str, style: str, label: str) -> None:
    edges = [edge for level in found for edge in (level.start, level.end)]
    axes.plot(edges, [level.live / unit for level in found for _ in range(2)], color=color, ls=style, lw=1.5, label=label)


def _name_stages(axes: Any, stages: Sequence[str]) -> None:
    """Stages as the axis' names, forward and mirrored, every other one shaded; a name without room is left out."""
    count, start = len(stages), 0
    bands: list[tuple[float, float, str]] = []
    for number, (stage, units) in enumerate(groupby(stages)):
        end = start + len(list(units))
        for left, right in ((start, end), (2 * count - end, 2 * count - start)):
            if number % 2:
                axes.axvspan(left, right, color=INK, alpha=0.05, lw=0, zorder=0)
            bands.append((float(left), float(right), stage))
        start = end
    bands.sort()
    ticks: list[float] = []
    names: list[str] = []
    turned: list[bool] = []
    free = 0.0  # where the next name may begin
    for begin, close, stage in bands:
        middle, wide = (begin + close) / 2, (close - begin) / (2 * count) > WIDE
        half = (close - begin) / 2 if wide else NAME_HEIGHT * count
        if middle - half >= free - 1e-9:
            ticks.append(middle)
            names.append(stage)
            turned.append(not wide)
            free = middle + half
    axes.set_xticks(ticks, names, fontsize=8.5)
    for label, turn in zip(axes.get_xticklabels(), turned, strict=True):
        label.set_rotation(90 if turn else 0)
    axes.tick_params(axis="x", length=0)
    for middle, text in ((0.25, "forward"), (0.75, "backward")):
        axes.text(middle, 1.01, text, transform=axes.transAxes, ha="center", va="bottom", fontsize=9, color=INK)
