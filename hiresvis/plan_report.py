"""What `hiresvis plan` tells: the ladder, the chosen plan stage by stage, the peak by part, and what the run takes.

No torch here: everything follows from the profile and the plan.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hiresvis.ladder import segments_of, unit_rows
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.peak import StepSetting
from hiresvis.memory.plan import CheckpointPlan, Segment, store_all
from hiresvis.memory.search import Candidate, Planner
from hiresvis.memory.timing import Rates, images_per_second, run_seconds
from hiresvis.plan_stages import TREATMENTS, StageRow, stage_rows, word_of
from hiresvis.run.events import LadderRow, to_json
from hiresvis.ui.text import UNICODE, Glyphs, cell_width, image_size_text, pad, shorten, speed
from hiresvis.units import MIB, format_duration, format_size

LOG_BYTES = 64 * MIB  # events, metrics, report
PART_NAMES = {
    "baseline": "before training",
    "optimizer": "optimizer state",
    "images": "one micro-batch",
    "saved": "saved for backward",
    "interior": "inside a unit",
    "step": "optimizer's step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEstimate:
    """What the whole run takes.

    Attributes:
        images_per_second: in training; None: no rate of the device is known.
        seconds: of training, evaluation aside; None: that, or the number of images is not known.
        basis: what the estimate rests on, or why there is none.
        disk_bytes: of the run folder at most (a snapshot is written beside the one before; best and last weights).
        price: of `seconds`; None: not asked for, or not known.
        resized: the first epochs see smaller images (`train.resize`), and `seconds` are an upper bound.
    """

    images_per_second: float | None
    seconds: float | None
    num_train: int | None
    epochs: int
    basis: str
    disk_bytes: int
    price_per_hour: float | None
    price: float | None
    resized: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The plan of a recipe, as `hiresvis plan` shows it.

    Attributes:
        profile: the traced chain.
        plan: the chosen plan; setting: how steps are run.
        device: what it is made for.
        ladder: every way to plan, with images per second where a rate is known; the chosen one last.
        stages: the chosen plan, stage by stage.
        where: the moment of the predicted peak.
        stored_peak_bytes: predicted peak of the same micro-batch with everything stored.
        waiting_fraction: waiting for offloaded tensors over a step's FLOPs, in FLOPs.
        run: what the whole run takes.
    """

    profile: MemoryProfile
    plan: CheckpointPlan
    setting: StepSetting
    device: str
    ladder: tuple[LadderRow, ...]
    stages: tuple[StageRow, ...]
    where: str
    stored_peak_bytes: int
    waiting_fraction: float
    run: RunEstimate

    def to_json(self) -> dict[str, Any]:
        """Plain values, stable between releases; keys are added, not changed.

        - All of `CheckpointPlan` but `segments` and `unit_modules`: `version`, `model`, `image_size` [height, width],
          `precision`, `micro_batch`, `batch`, `accumulation`, `eval_batch`, `budget_bytes`, `predicted_peak_bytes`,
          `predicted_counted_bytes`, `recompute_fraction` (of a step's FLOPs), `stages` (phrases), `parts` (bytes by name, adding
          up to the predicted peak), `host_bytes`, `versions` (of torch and timm), `why`.
        - `device`, `peak_at` (the moment of the peak), `stored_peak_bytes` (nothing recomputed), `waiting_fraction`.
        - `ladder`: rows with `rung`, `spacing`, `micro_batch` (0: none fits), `predicted_peak_bytes`, `recompute_fraction`,
          `images_per_second` (null: not estimated), `verdict`.
        - `stage_rows`: `stage`, `num_units`, `stored_bytes`, `kept_bytes`, `treatment`.
        - `units`: `name`, `stage`, `kind`, `decision`, `segment`, `saved_bytes`, `kept_bytes`, `flops` (of a
          forward), `runs` (a forward and backward over a forward, in FLOPs).
        - `run`: `images_per_second`, `seconds`, `num_train`, `epochs`, `basis`, `disk_bytes`, `price_per_hour`, `price`;
          null: not estimated; `resized`: `seconds` are an upper bound.
        - `checkpoint_plan`: the whole plan, as `CheckpointPlan.from_json` reads it.
        """
        plan = self.plan.to_json()
        return {
            **{key: value for key, value in plan.items() if key not in ("segments", "unit_modules")},
            "device": self.device,
            "peak_at": self.where,
            "stored_peak_bytes": self.stored_peak_bytes,
            "waiting_fraction": self.waiting_fraction,
            "ladder": [to_json(row) for row in self.ladder],
            "stage_rows": [_plain(row) for row in self.stages],
            "units": unit_rows(self.profile, self.plan),
            "run": _plain(self.run),
            "checkpoint_plan": plan,
        }

    def lines(self, width: int = 80, glyphs: Glyphs = UNICODE) -> list[str]:
        """Text for a terminal of `width` columns that can draw `glyphs`."""
        plan = self.plan
        facts = (
            plan.model,
            f"{image_size_text(plan.image_size)} px",
            plan.precision,
            self.device,
            f"budget {format_size(plan.budget_bytes)}",
        )
        lines = [
            *textwrap.wrap("  ".join(facts), width, break_on_hyphens=False),
            "",
            *_table(self._ladder_cells(glyphs), "llrrrrl", width, glyphs),
            "",
        ]
        lines += _item("plan", f"micro-batch {plan.micro_batch} x {plan.accumulation} = batch {plan.batch}: {plan.why}", width)
        if plan.recomputed:
            stored = format_size(self.stored_peak_bytes)
            lines += _item("", f"with everything stored, micro-batch {plan.micro_batch} needs {stored}", width)
        lines.append("")
        lines += [*_table(self._stage_cells(), "lrrrl", width, glyphs), *self._legend(width), ""]
        peak = f"{format_size(plan.predicted_peak_bytes)} predicted of {format_size(plan.budget_bytes)}, at the {self.where}"
        lines += [*_item("peak", peak, width), *self._part_lines(width, glyphs)]
        if plan.host_bytes:
            waiting = f"waiting for it adds {self.waiting_fraction:.1%} to a step"
            lines += _item("host", f"{format_size(plan.host_bytes)} of its memory hold what is offloaded; {waiting}", width)
        lines += ["", *self._run_lines(width)]
        return [glyphs.clean(line).rstrip() for line in lines]

    def plot(self, path: Path) -> None:
        """Draws a step's memory along the chain as PNG (SVG or PDF where the name ends so).

        Raises:
            MissingExtra: matplotlib is not installed.
            EnvironmentFailed: the file cannot be written.
        """
        from hiresvis.plan_plot import draw

        title = f"{self.plan.model}  {image_size_text(self.plan.image_size)} px  {self.plan.precision}  {self.device}"
        draw(self.profile, self.plan, self.setting, path, title=title)

    def _ladder_cells(self, glyphs: Glyphs) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("", "spacing", "micro", "predicted", "recompute", "img/s", "verdict")]
        for row in self.ladder:
            mark = glyphs.mark if row.verdict.startswith("chosen") else ""
            micro = str(row.micro_batch) if row.micro_batch else "none"
            again = f"+{row.recompute_fraction:.1%}" if row.recompute_fraction else "0%"
            rate = speed(row.images_per_second)
            rows.append((mark, row.spacing, micro, format_size(row.predicted_peak_bytes), again, rate, row.verdict))
        return rows

    def _stage_cells(self) -> list[tuple[str, ...]]:
        head = ("stage", "units", "stored", "planned", "what is done")
        return [
            head,
            *(
                (row.stage, str(row.num_units), format_size(row.stored_bytes), format_size(row.kept_bytes), row.treatment)
                for row in self.stages
            ),
        ]

    def _legend(self, width: int) -> list[str]:
        used = {word_of(segment) for segment in self.plan.segments} - {"store"}
        return [line for word, text in TREATMENTS.items() if word in used for line in _item("", f"{word}: {text}", width)]

    def _part_lines(self, width: int, glyphs: Glyphs) -> list[str]:
        parts = [(PART_NAMES.get(name, name), size) for name, size in self.plan.parts.items() if size]
        label = max(cell_width(name) for name, _ in parts)
        room = max(8, min(60, width - 7 - label - 2 - 10 - 2))
        most = max(size for _, size in parts)
        lines = []
        for name, size in parts:
            lines.append(f"{'':7}{pad(name, label)}  {format_size(size):>10}  {_bar(size / most, room, glyphs)}")
        return lines

    def _run_lines(self, width: int) -> list[str]:
        run = self.run
        lines = []
        if run.images_per_second is None:
            lines += _item("speed", run.basis, width)
        else:
            lines += _item("speed", f"{speed(run.images_per_second)} images/s: {run.basis}", width)
        if run.seconds is not None:
            took = (
                f"{format_duration(run.seconds)} for {run.epochs} epochs of {run.num_train} images, evaluation and reading of images aside"
                f"{'; less, for the first epochs see smaller images' if run.resized else ''}"
            )
            lines += _item("time", took, width)
        elif run.images_per_second is not None:
            lines += _item("time", "not estimated: the number of training images is not known", width)
        disk = f"{format_size(run.disk_bytes)} at most: two snapshots while one replaces the other, best and last weights"
        lines += _item("disk", disk, width)
        if run.price is not None:
            price = f"{run.price:.2f}" if run.price >= 0.01 else "below 0.01"
            lines += _item("price", f"{price} at {run.price_per_hour:g} an hour", width)
        elif run.price_per_hour is not None:
            lines += _item("price", "not estimated: it follows from the time", width)
        return lines


def make_report(
    planner: Planner,
    candidate: Candidate,
    plan: CheckpointPlan,
    ladder: tuple[LadderRow, ...],
    *,
    rates: Rates | None,
    device: str,
    num_train: int | None,
    epochs: int,
    price_per_hour: float | None = None,
    snapshot_bytes: int,
    resized: bool = False,
) -> PlanReport:
    """The report of a plan.

    Args:
        planner: what made the plan and the ladder.
        candidate: the chosen plan with its numbers; plan: the same, frozen.
        ladder: its rows, from `hiresvis.ladder.ladder_rows`.
        rates: what training reaches of the device's data sheet, or was measured there; None: not known.
        device: the card's name, or "cpu".
        num_train: training images; None: not known.
        price_per_hour: of the device, in whatever currency.
        snapshot_bytes: of one snapshot on disk.
        resized: the first epochs see smaller images.
    """
    profile = planner.profile
    scored = planner.score(candidate.segments, candidate.micro_batch)
    stored = planner.score(store_all(profile), candidate.micro_batch)
    rows = tuple(_with_rate(planner, row, candidate, plan.batch, rates) for row in ladder)
    rate = _rate(profile, candidate.segments, candidate.micro_batch, plan.batch, rates)
    name = "this CPU" if device.lower() == "cpu" else device
    basis = f"no rate is known for {name}: not estimated"
    if rates is not None:
        basis = "estimated from what each unit took here" if rates.pace else f"estimated from the data-sheet rates of {name}"
    waiting = sum(planner.limits.prices.waiting(profile, segment) for segment in plan.segments)
    seconds = None if rate is None or num_train is None else run_seconds(num_train, epochs, rate)
    run = RunEstimate(
        images_per_second=rate,
        seconds=seconds,
        num_train=num_train,
        epochs=epochs,
        basis=basis,
        disk_bytes=2 * snapshot_bytes + 2 * (profile.weights + profile.buffers) + LOG_BYTES,
        price_per_hour=price_per_hour,
        price=None if seconds is None or price_per_hour is None else seconds / 3600 * price_per_hour,
        resized=resized,
    )
    return PlanReport(
        profile=profile,
        plan=plan,
        setting=replace(planner.setting, accumulates=plan.accumulation > 1),
        device=device,
        ladder=rows,
        stages=stage_rows(profile, plan.segments, plan.micro_batch),
        where=scored.peak.where,
        stored_peak_bytes=stored.peak.total_bytes,
        waiting_fraction=waiting / max(1, planner.limits.prices.of_step(profile)),
        run=run,
    )


def _with_rate(planner: Planner, row: LadderRow, chosen: Candidate, batch: int, rates: Rates | None) -> LadderRow:
    """The row with its estimated images per second; None where nothing fits or no rate is known."""
    segments = segments_of(planner, row, chosen)
    if not row.micro_batch or segments is None:
        return row
    return replace(row, images_per_second=_rate(planner.profile, segments, row.micro_batch, batch, rates))


def _rate(profile: MemoryProfile, segments: Sequence[Segment], micro_batch: int, batch: int, rates: Rates | None) -> float | None:
    if rates is None:
        return None
    return images_per_second(profile, segments, micro_batch, max(batch, micro_batch), rates)


def _plain(row: StageRow | RunEstimate) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__slots__}


def _item(label: str, text: str, width: int) -> list[str]:
    """A label and its text, which goes on below itself."""
    wrapped = textwrap.wrap(text, max(20, width - 7), break_on_hyphens=False) or [""]
    return [f"{label if number == 0 else '':<7}{line}" for number, line in enumerate(wrapped)]


def _table(rows: Sequence[tuple[str, ...]], sides: str, width: int, glyphs: Glyphs) -> list[str]:
    """Aligned columns (l or r each), two spaces apart; the last one wraps below itself."""
    spaces = [max(cell_width(row[column]) for row in rows) for column in range(len(sides))]
    before = sum(spaces[:-1]) + 2 * (len(sides) - 1)
    lines = []
    for row in rows:
        cells = [pad(cell, space, right=side == "r") for cell, space, side in zip(row[:-1], spaces, sides, strict=False)]
        first, *more = textwrap.wrap(row[-1], max(16, width - before), break_on_hyphens=False) or [""]
        lines.append(shorten("  ".join([*cells, first]), max(width, before), glyphs.ellipsis))
        lines += [" " * before + text for text in more]
    return lines


def _bar(share: float, room: int, glyphs: Glyphs) -> str:
    """A bar of at most `room` columns, in eighths where they can be drawn; never nothing."""
    eighths = max(1, round(share * room * 8))
    whole, part = divmod(eighths, 8)
    if not glyphs.fill_parts:
        return glyphs.fill * max(1, round(eighths / 8))
    return glyphs.fill * whole + (glyphs.fill_parts[part - 1] if part else "")
