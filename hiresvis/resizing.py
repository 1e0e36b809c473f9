"""`train.resize`: plans for the smaller images of the first epochs, beside the run's own plan, and what plan.json keeps of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hiresvis import assemble, profiles
from hiresvis.costing import Parts, entry_of
from hiresvis.errors import RunFolderError
from hiresvis.memory.peak import StepSetting
from hiresvis.memory.plan import CheckpointPlan, NoPlan
from hiresvis.memory.search import Planner
from hiresvis.recipe import LoadedRecipe
from hiresvis.recipe.schema import size_phases
from hiresvis.settle import complete
from hiresvis.train.sizes import SizePhase


def phases_of(loaded: LoadedRecipe, parts: Parts, plan: CheckpointPlan, kept: Sequence[Mapping[str, Any]] | None) -> list[SizePhase]:
    """The phases of a run, the last one with its own plan; empty without `train.resize`.

    Args:
        parts: of the last size; plan: that the run has found for it.
        kept: what plan.json has of an earlier start (`phases_json`); None: this is the first. A phase without a plan gets one now.

    Raises:
        RecipeError: the model cannot be planned at one of the sizes.
        RunFolderError: `kept` is not what was written.
    """
    sizes = size_phases(loaded.recipe)[:-1]
    if not sizes:
        return []
    last = size_phases(loaded.recipe)[-1][0] if kept is None else _number(kept[-1])
    phases = [_phase(loaded, parts, plan, first, size, None if kept is None else kept[index]) for index, (first, size) in enumerate(sizes)]
    return [*phases, SizePhase(last, plan, parts.profile, parts.pipeline)]


def phases_json(phases: Sequence[SizePhase]) -> list[dict[str, Any]]:
    """What plan.json keeps: more epochs at a resume move no size, and the same plans go on. The last phase has the run's own plan."""
    rows = [{"first_epoch": phase.first_epoch, "image_size": phase.plan.image_size, "plan": phase.plan.to_json()} for phase in phases]
    return [*rows[:-1], {**rows[-1], "plan": None}] if rows else []


def _phase(
    loaded: LoadedRecipe, parts: Parts, plan: CheckpointPlan, first: int, size: tuple[int, int], kept: Mapping[str, Any] | None
) -> SizePhase:
    model = loaded.recipe.model.model_copy(update={"image_size": size})
    smaller = replace(loaded, recipe=loaded.recipe.model_copy(update={"model": model}))
    contract = replace(parts.contract, image_size=size)
    pipeline = assemble.make_pipeline(smaller, contract)
    shape, dtype = assemble.raw_image(contract, parts.datasets, pipeline)
    key = replace(parts.key, image_size=size, raw_image_bytes=math.prod(shape) * dtype.itemsize)
    profile, _ = complete(smaller, profiles.read_or_trace(key, lambda: entry_of(smaller, parts.trainable, key)))
    if parts.average_on_host:
        profile = replace(profile, ema=0)
    if kept is not None and kept["plan"] is not None:
        try:
            return SizePhase(_number(kept), CheckpointPlan.from_json(kept["plan"]), profile, pipeline)
        except (ValueError, KeyError, TypeError) as error:
            raise RunFolderError(f"{loaded.run_dir / 'plan.json'}: sizes cannot be used ({error}); put the file back") from error
    # What the process is without training, and what is kept free, were corrected by the finder: they are the found plan's.
    base, reserve = plan.parts["baseline"], plan.parts["reserve"]
    setting = StepSetting(accumulates=False, eval_batch=plan.eval_batch, baseline_bytes=base, reserve_bytes=reserve)
    limits = replace(parts.limits, batch=plan.batch, micro_batch=plan.micro_batch)
    planner = Planner(profile, plan.budget_bytes, setting, limits)
    found = planner.choose()
    if isinstance(found, NoPlan):  # the larger images had room
        found = planner.tightest(plan.micro_batch)
    why = f"for the micro-batch of {plan.image_size[0]}x{plan.image_size[1]} px"
    return SizePhase(first if kept is None else _number(kept), planner.plan(found, why), profile, pipeline)


def _number(kept: Mapping[str, Any]) -> int:
    return int(kept["first_epoch"])
