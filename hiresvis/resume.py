"""What a run keeps to be resumed by, beside its snapshot and its data: plan.json; and what a resume holds against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hiresvis.backbone.match import FINGERPRINT, check_plan
from hiresvis.costing import Parts
from hiresvis.data.augment import Augment, usable_library
from hiresvis.data.contract import Contract
from hiresvis.errors import RunFolderError
from hiresvis.ladder import unit_rows
from hiresvis.memory.plan import CheckpointPlan
from hiresvis.run import RunDirectory
from hiresvis.run.events import LadderRow, to_json
from hiresvis.train.finder import MeasuredPeak
from hiresvis.units import format_size

PLAN_FORMAT = 1


def plan_json(parts: Parts, plan: CheckpointPlan) -> dict[str, Any]:
    """What plan.json says of the plan: to apply it again, and for people and the report."""
    own = replace(plan, versions={**plan.versions, FINGERPRINT: parts.trainable.fingerprint})
    return {
        "version": PLAN_FORMAT,
        "model": plan.model,
        "image_size": plan.image_size,
        "precision": plan.precision,
        "batch": plan.batch,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "eval_batch": plan.eval_batch,
        "eval_bytes": eval_bytes(parts, plan.eval_batch),
        "norm": parts.trainable.norm,
        "budget_bytes": plan.budget_bytes,
        "capacity_bytes": parts.budget.capacity_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "recompute_fraction": plan.recompute_fraction,
        "parts": dict(plan.parts),
        "stages": plan.stages,
        "units": unit_rows(parts.profile, plan),
        "why": plan.why,
        "augmented_by": None if parts.pipeline.augment is None else parts.pipeline.augment.made_by,
        "checkpoint_plan": own.to_json(),
    }


def eval_bytes(parts: Parts, eval_batch: int) -> int:
    """What evaluation of so many images at once takes beside the weights."""
    return parts.profile.evaluation.at(eval_batch) + parts.profile.raw_image.at(eval_batch)


def measured_json(plan: CheckpointPlan, measured: MeasuredPeak, ladder: Sequence[LadderRow]) -> dict[str, Any]:
    """What plan.json says of the search and the probe."""
    return {
        "measured": {
            "resident_peak_bytes": measured.peak_bytes,
            "counted_peak_bytes": measured.counted_bytes,
            "predicted_counted_bytes": plan.predicted_counted_bytes,
            "baseline_bytes": measured.base_bytes,
            "images_per_second": measured.images_per_second,
        },
        "ladder": [to_json(row) for row in ladder],
    }


def refuse_other_augmentation(before: str | None, now: Augment | None, folder: Path) -> None:
    """Augmentation by another library or release than the run's: the same seeds would give other images.

    Args:
        before: what `Augment.made_by` said when the run was begun; None where nothing was augmented.

    Raises:
        RunFolderError: it is another, and why it is, where this process had no choice.
    """
    if now is None or before is None or before == now.made_by:
        return
    why = f", since {reason}" if (reason := usable_library()[1]) else ""
    raise RunFolderError(
        f"{folder}: images were augmented by {before} when the run was begun, and would be by {now.made_by} now{why}. "
        f"Install {before.replace(' ', '==')}, or start a new run: log.dir=NEW_FOLDER"
    )


def refuse_other_classes(before: Contract, classes: tuple[str, ...], folder: Path) -> None:
    """Other classes (or targets) than the run's, or the same in another order.

    Raises:
        RunFolderError: which are missing and which are new.
    """
    if before.classes == classes:
        return
    gone = [name for name in before.classes if name not in classes]
    new = [name for name in classes if name not in before.classes]
    what = "; ".join(part for part in (f"missing: {', '.join(gone)}" if gone else "", f"new: {', '.join(new)}" if new else "") if part)
    outputs = "targets" if before.task == "regress" else "classes"
    raise RunFolderError(
        f"{folder}: the run knows the {outputs} {', '.join(before.classes)}, and the data now has {', '.join(classes)} "
        f"({what or 'another order'}). Resume with the run's own data, or start a new run."
    )


def refuse_other_contract(before: Contract, now: Contract, folder: Path) -> None:
    """Images that would be read otherwise than the run has read them.

    Raises:
        RunFolderError: each value that was and is.
    """
    old, new = before.unfitted.to_json(), now.unfitted.to_json()
    differ = "; ".join(f"{key} was {old[key]}, is {new[key]}" for key in old if old[key] != new[key])
    if differ:
        raise RunFolderError(
            f"{folder}: images would be read otherwise than the run has read them ({differ}). Resume with the run's own recipe."
        )


def read_plan(run: RunDirectory) -> tuple[dict[str, Any], CheckpointPlan]:
    """plan.json, and the plan to apply in it.

    Raises:
        RunFolderError: it is not what `plan_json` wrote.
    """
    path, stored = run.root / "plan.json", run.read_json("plan.json")
    try:
        plan = CheckpointPlan.from_json(stored["checkpoint_plan"])
        for key in ("resident_peak_bytes", "counted_peak_bytes"):
            int(stored["measured"][key])
        str(stored["norm"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise RunFolderError(
            f"{path} cannot be used: {why}. It was changed or damaged after the run wrote it; put it back, or start a new run from this "
            f"one's weights: log.dir=NEW_FOLDER model.pretrained={run.best_weights}"
        ) from error
    return stored, plan


def too_little_memory(stored: Mapping[str, Any], parts: Parts) -> str | None:
    """What to say where the plan took more on the machine that it was made on than there is to use here; None: it fits."""
    measured, budget = stored["measured"], parts.budget
    peak = int(stored["predicted_peak_bytes"] if measured.get("of_an_earlier_plan") else measured["resident_peak_bytes"])
    if peak <= budget.total_bytes:
        return None
    return (
        f"the run's plan took {format_size(peak)} where it was made, and {format_size(budget.total_bytes)} can be used here "
        f"({budget.why}): planning again, with the same batch"
    )


def refuse_other_plan(plan: CheckpointPlan, parts: Parts, run: RunDirectory) -> None:
    """A plan that does not hold for what is there now: another precision, other trained parameters, another torch or timm.

    Raises:
        RunFolderError: what differs.
    """
    if parts.precision != plan.precision:
        raise RunFolderError(
            f"{run.root}: the run's plan is for {plan.precision}, and memory.precision is {parts.precision} now. "
            "Resume with the run's own recipe, or start a new run."
        )
    try:
        check_plan(parts.trainable.model, plan)
    except ValueError as error:
        raise RunFolderError(
            f"{run.root}: the run's plan does not hold here: {error}: resume with what it was begun with, or start a new run from this "
            f"one's weights: log.dir=NEW_FOLDER model.pretrained={run.best_weights}"
        ) from error
