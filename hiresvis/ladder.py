"""The planner's answers for people: the ladder as rows, why a plan was chosen, why none fits and what would help."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hiresvis.errors import DoesNotFit
from hiresvis.memory.budget import RESERVE_SHARE
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.peak import offloaded_bytes
from hiresvis.memory.plan import CheckpointPlan, NoPlan, Segment, store_all, uniform
from hiresvis.memory.search import FREEDOMS, Candidate, Limits, Planner, Rung
from hiresvis.run.events import LadderRow, PlanChosen
from hiresvis.units import GIB, MIB, format_size

EVAL_IMAGES = 16  # an evaluation batch above this gains nothing


def with_eval_batch(planner: Planner, candidate: Candidate) -> Planner:
    """The planner with the largest evaluation batch, up to EVAL_IMAGES, that does not raise the candidate's peak."""
    best = planner
    for count in range(2, EVAL_IMAGES + 1):
        trial = planner.with_eval_batch(count)
        if trial.score(candidate.segments, candidate.micro_batch).peak.total_bytes > candidate.peak.total_bytes:
            break
        best = trial
    return best


def explain(planner: Planner, candidate: Candidate) -> str:
    """Why this plan, in one sentence with numbers."""
    limits, largest = planner.limits, planner.largest() if planner.limits.micro_batch is None else candidate.micro_batch
    share = candidate.recompute_fraction(planner.profile)
    if candidate.cost:
        stored = planner.largest_of(store_all(planner.profile))
        again = f"{share:.1%} of a step's FLOPs are done twice" if share >= 0.0005 else "only norms and activations run again"
        cost = f"{again}, since with everything stored {stored or 'not one'} would fit"
    else:
        cost = "nothing is recomputed"
    if limits.micro_batch is not None:
        return f"micro-batch {limits.micro_batch} was given; {cost}"
    if limits.batch is None:
        return f"micro-batch {candidate.micro_batch} is the largest that fits; {cost}"
    if largest >= limits.batch:
        return f"the whole batch of {limits.batch} fits at once; {cost}"
    passes = -(-limits.batch // candidate.micro_batch)
    even = "" if candidate.micro_batch == largest else f", or {candidate.micro_batch} at a time"
    return f"of {limits.batch} images {largest} fit at once; that takes {passes} passes{even}; {cost}"


def ladder_rows(planner: Planner, rungs: tuple[Rung, ...], chosen: Candidate) -> tuple[LadderRow, ...]:
    """The ladder as events: spacing off, smaller and smaller, the best mix, and the chosen plan last.

    A spacing that gives the same numbers as the one before it (stages shorter than it) is left out.
    """
    wanted = planner.limits.micro_batch or planner.limits.batch
    rows: list[LadderRow] = []
    others = [rung for rung in rungs if rung.candidate != chosen]
    for rung in others:
        fits = rung.candidate.micro_batch if rung.fits else 0
        if not rung.fits:
            verdict = "too large"
        elif wanted is not None and fits < wanted:
            verdict = f"fits {fits} of {wanted}"
        else:
            verdict = "fits"
        row = _row(planner, len(rows), rung.spacing, rung.candidate, fits, verdict)
        if not rows or replace(row, rung=0, spacing="") != replace(rows[-1], rung=0, spacing=""):
            rows.append(row)
    name = next((rung.spacing for rung in rungs if rung.candidate == chosen), finest_tier(chosen))
    rows.append(_row(planner, len(rows), name, chosen, chosen.micro_batch, "chosen"))
    return tuple(rows)


def segments_of(planner: Planner, row: LadderRow, chosen: Candidate) -> tuple[Segment, ...] | None:
    """The segments behind a row; the planner remembers those that it searched."""
    if row.verdict.startswith("chosen"):
        return chosen.segments
    if row.spacing == "off":
        return store_all(planner.profile)
    if row.spacing.isdecimal():
        return uniform(planner.profile, int(row.spacing))
    allow = dict(FREEDOMS).get(row.spacing)
    found = planner.best(row.micro_batch, allow) if allow and row.micro_batch else None
    return None if found is None else found.segments


def finest_tier(candidate: Candidate) -> str:
    """The rung of the ladder that a plan belongs to: the last one whose tier it uses."""
    segments = candidate.segments
    used = {
        "offload": any(segment.tier == "offload" for segment in segments),
        "chunk": any(segment.slices for segment in segments),
        "nested": any(segment.nested for segment in segments),
        "keep": any(segment.keep for segment in segments),
    }
    return next((name for name, found in used.items() if found), "mixed")


def _row(planner: Planner, number: int, spacing: str, candidate: Candidate, fits: int, verdict: str) -> LadderRow:
    return LadderRow(
        rung=number,
        spacing=spacing,
        micro_batch=fits,
        predicted_peak_bytes=candidate.peak.total_bytes,
        recompute_fraction=round(candidate.recompute_fraction(planner.profile), 4),
        verdict=verdict,
    )


def plan_chosen(plan: CheckpointPlan, measured_peak_bytes: int | None) -> PlanChosen:
    """The event that tells of a plan."""
    return PlanChosen(
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        batch=plan.batch,
        precision=plan.precision,
        stages=plan.stages,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        measured_peak_bytes=measured_peak_bytes,
        budget_bytes=plan.budget_bytes,
        recompute_fraction=plan.recompute_fraction,
        why=plan.why,
    )


def other_micro_batch(before: int, plan: CheckpointPlan) -> str:
    """What it means that a run goes on with a smaller micro-batch."""
    text = f"micro-batch {before} leaves no plan that fits: {plan.micro_batch} from here on. The batch stays {plan.batch}, so only "
    return f"{text}rounding differs (and batch statistics, where the model takes any)"


def refusal(profile: MemoryProfile, answer: NoPlan, limits: Limits, remedies: tuple[str, ...], *, recipe: bool = True) -> DoesNotFit:
    """The error that nothing fits, with the need, the largest part and the ways out.

    Args:
        recipe: name settings as a recipe does (memory.spacing), not as arguments (spacing).
    """
    height, width = profile.image_size
    model = f"{profile.model} at {height}x{width} px"
    if answer.most_images:
        most, name = answer.most_images, _setting("memory.micro_batch", recipe)
        text = (
            f"Micro-batch {answer.micro_batch} of {model} has a tensor of 2**31 elements or more, which kernels refuse: at most {most} "
            f"images at once. Lower {name} to {most}, or leave it at auto."
        )
        return _does_not_fit(text, answer, ())
    if answer.where == "evaluation":
        name = "train.eval_batch" if recipe else "the evaluation batch"
        text = (
            f"Evaluation of {model} does not fit: predicted peak {format_size(answer.need_bytes)}, budget "
            f"{format_size(answer.budget_bytes)}; training at micro-batch {answer.micro_batch} needs no more. Lower {name}, or raise "
            f"{_setting('memory.budget', recipe)}."
        )
        return _does_not_fit(text, answer, ())
    part, part_bytes = answer.largest_part
    pinned = "" if limits.spacing == "auto" else f" with {_setting('memory.spacing', recipe)} {limits.spacing}"
    advice = "; ".join(remedies) or f"raise {_setting('memory.budget', recipe)}"
    text = (
        f"Micro-batch {answer.micro_batch} of {model} does not fit{pinned}: predicted peak {format_size(answer.need_bytes)}, budget "
        f"{format_size(answer.budget_bytes)}, at the tightest plan. Largest part: {part}, {format_size(part_bytes)}. Ways out: {advice}."
    )
    return _does_not_fit(text, answer, remedies)


def _does_not_fit(text: str, answer: NoPlan, remedies: tuple[str, ...]) -> DoesNotFit:
    return DoesNotFit(
        text,
        need_bytes=answer.need_bytes,
        budget_bytes=answer.budget_bytes,
        largest_part=answer.largest_part,
        remedies=remedies,
    )


def ways_out(profile: MemoryProfile, stride: int, answer: NoPlan, *, may_freeze: bool, recipe: bool = True) -> tuple[str, ...]:
    """What would help when nothing fits, with the estimated need: a smaller image, half precision, frozen stages, more memory.

    Activations follow the number of pixels (attention maps are never stored); weights, gradients and optimizer do not.

    Args:
        stride: sides of the image stay multiples of it.
        may_freeze: nothing is frozen yet, so freezing can be advised.
        recipe: name settings as a recipe does.
    """
    fixed = sum(answer.parts[name] for name in ("baseline", "weights", "optimizer", "gradients", "reserve"))
    moving = answer.need_bytes - fixed
    found = []
    height, width = profile.image_size
    for share in range(95, 5, -5):
        size = (max(stride, int(height * share / 100) // stride * stride), max(stride, int(width * share / 100) // stride * stride))
        need = fixed + moving * size[0] * size[1] // (height * width)
        if need <= answer.budget_bytes * 0.97:
            text = f"{size[0]}" if size[0] == size[1] else f"[{size[0]}, {size[1]}]"
            found.append(f"{_setting('model.image_size', recipe)} {text} (about {format_size(need)})")
            break
    if profile.precision == "fp32" and fixed + moving // 2 < answer.budget_bytes:
        found.append(f"{_setting('memory.precision', recipe)} bf16 (about {format_size(fixed + moving // 2)})")
    if may_freeze and is_pyramid(profile) and moving > answer.need_bytes // 3:
        found.append("model.freeze 2: frozen stages keep nothing" if recipe else "frozen first stages: they keep nothing")
    # The reserve grows with the budget; rounded up, so that following the advice is enough.
    enough = answer.need_bytes * (1 + 2 * RESERVE_SHARE)
    text = f"{math.ceil(enough / MIB)}MiB" if enough < GIB else f"{math.ceil(enough / GIB * 10) / 10:.1f}GiB"
    found.append(f"{_setting('memory.budget', recipe)} {text} or more")
    return tuple(found)


def _setting(key: str, recipe: bool) -> str:
    return key if recipe else key.rpartition(".")[2]


def missing_stages(profile: MemoryProfile, spacing: str | int | Mapping[str, int]) -> str:
    """What a spacing by stage names that the model has not, in words; empty when there is nothing."""
    stages = list(dict.fromkeys(unit.stage for unit in profile.units if unit.recomputable))
    unknown = [name for name in spacing if name not in stages] if isinstance(spacing, Mapping) else []
    return f"{profile.model} has no stage {', '.join(unknown)}; it has {', '.join(stages)}" if unknown else ""


def is_pyramid(profile: MemoryProfile) -> bool:
    """Whether the first stages hold the largest activations."""
    units = [unit for unit in profile.units if unit.recomputable]
    return len(units) > 2 and units[0].output.slope > 4 * units[-2].output.slope


def unit_rows(profile: MemoryProfile, plan: CheckpointPlan) -> list[dict[str, Any]]:
    """One row per unit: what it would keep when stored, and what it keeps on the device under the plan, at the plan's micro-batch; FLOPs of
    its forward, and how often as much its forward and backward take together."""
    rows = []
    for number, segment in enumerate(plan.segments):
        for index in range(segment.start, segment.end):
            unit = profile.units[index]
            saved = unit.interior.at(plan.micro_batch) + profile.boundary_bytes(unit.saves, plan.micro_batch)
            kept = saved
            if segment.tier == "offload" or index > segment.start:
                kept = 0
            elif segment.tier != "store":
                kept = offloaded_bytes(profile, segment, plan.micro_batch)  # what such a segment would offload is what this one keeps
            rows.append(
                {
                    "name": unit.name,
                    "stage": unit.stage,
                    "kind": unit.kind,
                    "decision": segment.tier,
                    "segment": None if segment.tier == "store" else number,
                    "saved_bytes": saved,
                    "kept_bytes": kept,
                    "flops": unit.flops.slope * plan.micro_batch,
                    "runs": unit.num_runs,
                }
            )
    return rows
