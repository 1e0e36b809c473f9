"""Planning for a recipe: the model's costs traced, batch statistics settled, the plan as people and the report read it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hiresvis import assemble
from hiresvis.assemble import Trainable
from hiresvis.backbone.build import Backbone
from hiresvis.backbone.trace import trace_costs
from hiresvis.data.contract import Contract
from hiresvis.data.sources import Datasets
from hiresvis.data.transforms import Pipeline, Scale
from hiresvis.device import RESERVE_SHARE, Budget, block_bytes, budget, pick_device
from hiresvis.errors import DataError, RecipeError
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.peak import StepSetting
from hiresvis.memory.plan import CheckpointPlan, NoPlan, store_all
from hiresvis.memory.search import Limits, Planner
from hiresvis.recipe import LoadedRecipe, Resolution
from hiresvis.run.events import LadderRow, to_json
from hiresvis.train.finder import MeasuredPeak, explain, ladder_rows, refusal, with_eval_batch
from hiresvis.units import GIB, format_size

PLAN_FORMAT = 1


def trace(
    loaded: LoadedRecipe, trainable: Trainable, contract: Contract, precision: str, raw_bytes: int, device: torch.device
) -> MemoryProfile:
    """What the model costs, unit by unit.

    Raises:
        RecipeError: the model is no chain.
    """
    recipe = loaded.recipe
    trainable.train_mode()
    channels_last = recipe.memory.channels_last
    try:
        _, profile = trace_costs(
            trainable.model,
            name=recipe.model.name,
            image_size=contract.image_size,
            in_chans=contract.channels,
            num_classes=len(contract.classes),
            precision=precision,
            channels_last=True if channels_last == "auto" else channels_last,
            block=block_bytes(device),
            raw_image_bytes=raw_bytes,
            make_optimizer=lambda model: assemble.make_optimizer(loaded, model, trainable.layer_decay),
            optimizer_name=recipe.optim.name,
            clip_grad=recipe.optim.clip_grad,
        )
    except ValueError as error:
        raise RecipeError([loaded.problem("model.name", str(error))]) from error
    return profile


def _check_stages(loaded: LoadedRecipe, profile: MemoryProfile) -> None:
    """A spacing by stage names stages that the model has."""
    spacing = loaded.recipe.memory.spacing
    stages = list(dict.fromkeys(unit.stage for unit in profile.units if unit.recomputable))
    unknown = [name for name in spacing if name not in stages] if isinstance(spacing, dict) else []
    if unknown:
        message = f"{profile.model} has no stage {', '.join(unknown)}; it has {', '.join(stages)}"
        raise RecipeError([loaded.problem("memory.spacing", message)])


def limits_of(loaded: LoadedRecipe) -> Limits:
    """What the recipe asks of the search."""
    memory, train = loaded.recipe.memory, loaded.recipe.train
    return Limits(
        batch=None if train.batch == "auto" else train.batch,
        micro_batch=None if memory.micro_batch == "auto" else memory.micro_batch,
        spacing=memory.spacing,
        goal=memory.goal,
    )


def remedies(loaded: LoadedRecipe, profile: MemoryProfile, stride: int, answer: NoPlan) -> tuple[str, ...]:
    """What would help when nothing fits, with the estimated need: a smaller image, half precision, frozen stages, more memory.

    Activations follow the number of pixels (attention maps are never stored); weights, gradients and optimizer do not.
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
            found.append(f"model.image_size {text} (about {format_size(need)})")
            break
    if profile.precision == "fp32" and fixed + moving // 2 < answer.budget_bytes:
        found.append(f"memory.precision bf16 (about {format_size(fixed + moving // 2)})")
    if loaded.recipe.model.freeze == "none" and is_pyramid(profile) and moving > answer.need_bytes // 3:
        found.append("model.freeze 2: frozen stages keep nothing")
    # The reserve grows with the budget; rounded up, so that following the advice is enough.
    tenths = math.ceil(answer.need_bytes * (1 + 2 * RESERVE_SHARE) / GIB * 10)
    found.append(f"memory.budget {tenths / 10:.1f}GiB or more")
    return tuple(found)


def is_pyramid(profile: MemoryProfile) -> bool:
    """Whether the first stages hold the largest activations."""
    units = [unit for unit in profile.units if unit.recomputable]
    return units[0].output.slope > 4 * units[-2].output.slope


@dataclass(frozen=True, slots=True)
class Parts:
    """What training is made of."""

    datasets: Datasets
    contract: Contract
    trainable: Trainable
    profile: MemoryProfile
    budget: Budget
    precision: str
    pipeline: Pipeline
    raw_image: tuple[tuple[int, int, int], torch.dtype]


def make_parts(
    loaded: LoadedRecipe,
    resolution: Resolution,
    datasets: Datasets,
    contract: Contract,
    backbone: Backbone,
    device: torch.device,
    *,
    norm: str | None,
) -> Parts:
    """Freezes, traces and measures the budget.

    Args:
        norm: batch statistics as an earlier start of the run settled them (batch | frozen); None: from the recipe.
    """
    precision = assemble.settle_precision(loaded, resolution, device)
    pipeline = assemble.make_pipeline(loaded, contract)
    raw = assemble.raw_image(contract, datasets, pipeline)
    raw_bytes = math.prod(raw[0]) * raw[1].itemsize
    wanted = loaded.recipe.model.norm if norm is None else norm
    trainable, profile, limit = _traced(loaded, resolution, contract, backbone, device, precision, raw_bytes, wanted)
    if loaded.recipe.memory.budget == "auto":
        resolution.set("memory.budget", limit.total_bytes, limit.why)
    return Parts(datasets, contract, trainable, profile, limit, precision, pipeline, raw)


def _traced(
    loaded: LoadedRecipe,
    resolution: Resolution,
    contract: Contract,
    backbone: Backbone,
    device: torch.device,
    precision: str,
    raw_bytes: int,
    norm: str,
    *,
    elsewhere: bool = False,
) -> tuple[Trainable, MemoryProfile, Budget]:
    """Costs and budget; under norm auto, batch statistics are frozen when the micro-batch that fits is too small for them."""
    first = "batch" if norm == "auto" else norm
    trainable = assemble.freeze_parts(loaded, resolution, backbone, norm=first)
    profile = trace(loaded, trainable, contract, precision, raw_bytes, device)
    _check_stages(loaded, profile)
    limit = budget(device, loaded.recipe.memory.budget, profile.weights + profile.buffers, elsewhere=elsewhere)
    if norm != "auto":
        return trainable, profile, limit
    if loaded.recipe.model.pretrained is False:
        resolution.set("model.norm", "batch", "random weights have no statistics to keep")
        return trainable, profile, limit
    if not assemble.has_batch_norm(trainable.model):
        resolution.set("model.norm", "batch", "no trained layer keeps batch statistics")
        return trainable, profile, limit
    setting = StepSetting(accumulates=False, eval_batch=1, baseline_bytes=limit.baseline_bytes, reserve_bytes=limit.reserve_bytes)
    answer = Planner(profile, limit.total_bytes, setting, limits_of(loaded)).choose()
    micro, least = answer.micro_batch, assemble.SMALL_MICRO_BATCH
    if not isinstance(answer, NoPlan) and micro >= least:
        resolution.set("model.norm", "batch", f"micro-batch {micro} is large enough for batch statistics")
        return trainable, profile, limit
    why = f"micro-batch {micro} is below {least}: statistics of so few images are noise; those of the weights are kept"
    resolution.set("model.norm", "frozen", why)
    trainable = assemble.freeze_parts(loaded, resolution, backbone, norm="frozen")
    return trainable, trace(loaded, trainable, contract, precision, raw_bytes, device), limit


def plan_json(parts: Parts, plan: CheckpointPlan, measured: MeasuredPeak, ladder: Sequence[LadderRow]) -> dict[str, Any]:
    """plan.json: the plan to apply again, and what people and the report want to know of it."""
    return {
        "version": PLAN_FORMAT,
        "model": plan.model,
        "image_size": plan.image_size,
        "precision": plan.precision,
        "batch": plan.batch,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "eval_batch": plan.eval_batch,
        "norm": parts.trainable.norm,
        "budget_bytes": plan.budget_bytes,
        "capacity_bytes": parts.budget.capacity_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "measured": {
            "resident_peak_bytes": measured.peak_bytes,
            "counted_peak_bytes": measured.counted_bytes,
            "predicted_counted_bytes": plan.predicted_counted_bytes,
            "baseline_bytes": measured.base_bytes,
        },
        "recompute_fraction": plan.recompute_fraction,
        "parts": dict(plan.parts),
        "stages": plan.stages,
        "units": unit_rows(parts.profile, plan),
        "ladder": [to_json(row) for row in ladder],
        "why": plan.why,
        "checkpoint_plan": plan.to_json(),
    }


def unit_rows(profile: MemoryProfile, plan: CheckpointPlan) -> list[dict[str, Any]]:
    """One row per unit: what it would keep when stored, and what it keeps under the plan, at the plan's micro-batch."""
    rows = []
    for number, segment in enumerate(plan.segments):
        for index in range(segment.start, segment.end):
            unit = profile.units[index]
            saved = unit.interior.at(plan.micro_batch) + profile.boundary_bytes(unit.saves, plan.micro_batch)
            opener = unit.input.at(plan.micro_batch) if index == segment.start else 0
            rows.append(
                {
                    "name": unit.name,
                    "stage": unit.stage,
                    "kind": unit.kind,
                    "decision": segment.tier,
                    "segment": None if segment.tier == "store" else number,
                    "saved_bytes": saved,
                    "kept_bytes": saved if segment.tier == "store" else opener,
                    "flops": unit.flops.slope * plan.micro_batch,
                }
            )
    return rows


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What `hiresvis plan` prints."""

    profile: MemoryProfile
    plan: CheckpointPlan
    ladder: tuple[LadderRow, ...]
    stored_peak_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain values: the plan, the ladder, the units."""
        return {
            **{key: value for key, value in self.plan.to_json().items() if key not in ("segments", "unit_modules")},
            "stored_peak_bytes": self.stored_peak_bytes,
            "ladder": [to_json(row) for row in self.ladder],
            "units": unit_rows(self.profile, self.plan),
            "checkpoint_plan": self.plan.to_json(),
        }

    def lines(self) -> list[str]:
        """Text for a terminal."""
        plan = self.plan
        height, width = plan.image_size
        lines = [
            f"{plan.model} at {height}x{width} px, {plan.precision}, budget {format_size(plan.budget_bytes)}",
            "",
            f"{'spacing':<9} {'micro-batch':>11} {'predicted peak':>15} {'recompute':>10}  verdict",
        ]
        for row in self.ladder:
            micro = str(row.micro_batch) if row.micro_batch else "-"
            peak = format_size(row.predicted_peak_bytes)
            lines.append(f"{row.spacing:<9} {micro:>11} {peak:>15} {row.recompute_fraction:>10.1%}  {row.verdict}")
        lines += ["", f"micro-batch {plan.micro_batch} x {plan.accumulation} = batch {plan.batch}: {plan.why}"]
        lines += [f"  {stage}" for stage in plan.stages]
        lines += [f"  without recompute micro-batch {plan.micro_batch} needs {format_size(self.stored_peak_bytes)}"]
        lines += ["", f"predicted peak {format_size(plan.predicted_peak_bytes)} of {format_size(plan.budget_bytes)}"]
        for name, size in plan.parts.items():
            if size:
                lines.append(f"  {name:<10} {format_size(size):>10}  {'#' * max(1, round(40 * size / plan.predicted_peak_bytes))}")
        return lines


def plan(loaded: LoadedRecipe) -> PlanReport:
    """Predicts and plans on fake tensors; of the images, only headers are read, and nothing is run.

    Raises:
        DoesNotFit: no allowed plan fits.
    """
    resolution, device = Resolution(loaded), pick_device()
    classes, channels = _classes_and_channels(loaded, resolution)
    backbone = assemble.build_model(loaded, num_classes=len(classes), channels=channels, with_weights=False)
    contract = assemble.make_contract(loaded, classes, channels, Scale(), backbone)
    precision = assemble.settle_precision(loaded, resolution, device)
    raw_bytes = math.prod(contract.image_size) * channels
    traced = (contract, backbone, device, precision, raw_bytes, loaded.recipe.model.norm)
    _, profile, limit = _traced(loaded, resolution, *traced, elsewhere=True)
    limits = limits_of(loaded)
    eval_batch = loaded.recipe.train.eval_batch
    setting = StepSetting(
        accumulates=False,
        eval_batch=1 if isinstance(eval_batch, str) else eval_batch,
        baseline_bytes=limit.baseline_bytes,
        reserve_bytes=limit.reserve_bytes,
    )
    planner = Planner(profile, limit.total_bytes, setting, limits)
    candidate = planner.choose()
    if isinstance(candidate, NoPlan):
        raise refusal(profile, candidate, limits, remedies(loaded, profile, backbone.stride, candidate))
    if eval_batch == "auto":
        planner = with_eval_batch(planner, candidate)
    chosen = planner.plan(planner.score(candidate.segments, candidate.micro_batch), explain(planner, candidate))
    stored = planner.score(store_all(profile), candidate.micro_batch).peak.total_bytes
    return PlanReport(profile, chosen, ladder_rows(planner, planner.ladder(), candidate), stored)


def _classes_and_channels(loaded: LoadedRecipe, resolution: Resolution) -> tuple[tuple[str, ...], int]:
    """From the data where it is there; else two classes and three channels, for the head hardly counts."""
    data = loaded.recipe.data
    try:
        datasets = assemble.read_datasets(loaded, resolution)
        channels, _ = assemble.settle_pixels(loaded, resolution, datasets)
    except DataError:
        classes = ("a", "b") if isinstance(data.classes, str) else data.classes
        return classes, 3 if isinstance(data.channels, str) else data.channels
    return datasets.classes, channels
