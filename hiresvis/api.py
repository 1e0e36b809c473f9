"""The planner for people with their own model and their own loop: predict a plan, apply it, take it off again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hiresvis.backbone import segments
from hiresvis.backbone.compiled import refuse_compiled_around, refuse_wrappers, without_finer_ways
from hiresvis.backbone.match import FINGERPRINT, check_plan, fingerprint, planned_already
from hiresvis.backbone.record import fake_copy
from hiresvis.backbone.trace import trace_costs
from hiresvis.device import block_bytes, in_use, release
from hiresvis.errors import DoesNotFit, RecipeError, first_line
from hiresvis.ladder import explain, missing_stages, refusal, ways_out, with_eval_batch
from hiresvis.memory.budget import CUDA_BLOCK_BYTES, CUDA_CONTEXT_BYTES, Budget, budget_elsewhere, reserve_of
from hiresvis.memory.cards import Card, find_card
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.peak import StepSetting
from hiresvis.memory.plan import CheckpointPlan, NoPlan
from hiresvis.memory.search import Limits, Planner
from hiresvis.settle import limits_on
from hiresvis.units import format_size, parse_size

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
_STRIDE = 32  # that smaller images are advised in
_CHANNELS = 3
_MOMENTUM = 0.9


def plan_memory(
    model: nn.Module,
    *,
    image_size: int | tuple[int, int],
    budget: str | int,
    batch: int,
    exact: Literal["bitwise", "close"] = "close",
    spacing: str | int | Mapping[str, int] = "auto",
    micro_batch: str | int = "auto",
    goal: Literal["largest", "fastest"] = "largest",
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto",
    optimizer: str | MakeOptimizer = "adamw",
    device: str | torch.device | None = None,
) -> CheckpointPlan:
    """The largest micro-batch that fits a budget, and what to keep and what to recompute for it. Pure prediction: nothing is run.

    Args:
        model: takes (batch, channels, height, width), returns logits (batch, classes) or a tuple that begins with them. Its modes
            and its `requires_grad` mask are taken as they are; the model is not changed. It may be on any device.
        image_size: height and width in px, or the side of a square.
        budget: "24GiB", bytes, or a card's name ("A100-40GB": 95% of its memory, GPU context included; what is kept may go to the
            memory of its host). A size means what this
            process may use of a GPU besides the context; on the CPU the process's present size, weights aside, counts in it. In
            either case 48 MiB and 3% are left free for what no count of tensors shows.
        batch: the most images that are wanted at once. When fewer fit, gradients are expected to be accumulated.
        exact: bitwise, or close: also what reassociates sums.
        spacing: auto, off, or blocks per recomputed segment, for all stages or by stage.
        micro_batch: auto, or pinned.
        goal: largest micro-batch first, or fastest: least work for the batch.
        precision: of autocast; auto: the device's, bf16 where no device is named.
        optimizer: adamw or sgd (with momentum) as torch makes them by default, or a function from a model to an optimizer.
        device: cuda or cpu; None: a GPU that is not here.

    Raises:
        DoesNotFit: with the numbers, and what would help.
        ValueError: an argument that is none, an image size that the model refuses, a model that is no chain, or a plan that is
            applied already.
    """
    size = height_and_width(image_size)
    if not _is_count(batch):
        raise ValueError(f"batch {batch!r} is no whole number of at least 1")
    limits = _limits(batch=batch, micro_batch=micro_batch, spacing=spacing, goal=goal, exact=exact)
    target = _target(budget, device, precision)
    profile = _profile(
        model, size, target, _make_optimizer(optimizer, on_gpu=target.on_gpu), optimizer if isinstance(optimizer, str) else "custom"
    )
    limit = target.budget(profile)
    _check_fixed(profile, limit)
    missing = missing_stages(profile, spacing)
    if missing:
        raise ValueError(f"spacing: {missing}")
    if target.card is not None:
        limits = limits_on(limits, target.card, target.precision)
    setting = StepSetting(accumulates=False, eval_batch=1, baseline_bytes=limit.baseline_bytes, reserve_bytes=limit.reserve_bytes)
    planner = Planner(profile, limit.total_bytes, setting, limits)
    candidate = planner.choose()
    if isinstance(candidate, NoPlan):
        may_freeze = all(parameter.requires_grad for parameter in model.parameters())
        raise refusal(profile, candidate, limits, ways_out(profile, _STRIDE, candidate, may_freeze=may_freeze, recipe=False), recipe=False)
    planner = with_eval_batch(planner, candidate)
    return planner.plan(planner.score(candidate.segments, candidate.micro_batch), explain(planner, candidate))


class PlanHandle:
    """A plan that is applied to a model; as a context manager it is taken off at the end."""

    def __init__(self, handle: segments.PlanHandle, hook: RemovableHandle) -> None:
        self._handle, self._hook = handle, hook

    def remove(self) -> None:
        """Take the plan off; the model is as it was. A second call does nothing."""
        self._handle.remove()
        self._hook.remove()

    def __enter__(self) -> PlanHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def apply_plan(model: nn.Module, plan: CheckpointPlan) -> PlanHandle:
    """Makes the model recompute in backward what the plan says. State-dict keys stay as they are.

    From then on a forward with gradients takes images of the planned size, the planned micro-batch at most; without gradients
    everything is as before.

    Raises:
        ValueError: the plan is for another model, for other trained parameters, or was made with another release of torch or timm; or a
            plan is applied already.
    """
    check_plan(model, plan)
    handle = segments.apply_plan(model, plan)
    return PlanHandle(handle, model.register_forward_pre_hook(_InputCheck(plan), with_kwargs=True))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def height_and_width(image_size: object) -> tuple[int, int]:
    """Height and width.

    Raises:
        ValueError: neither a side nor a pair of sides in whole pixels.
    """
    sides = (image_size, image_size) if isinstance(image_size, int) else image_size
    if not isinstance(sides, (tuple, list)) or len(sides) != 2 or not all(_is_count(side) for side in sides):
        raise ValueError(f"image_size {image_size!r} is neither a side in px nor a pair (height, width), in whole numbers of at least 1")
    return sides[0], sides[1]


@dataclass(frozen=True, slots=True)
class _InputCheck:
    """Before a forward: the images are those that were planned for."""

    plan: CheckpointPlan

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        images = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.dim() == 4), None)
        if images is None:
            return
        (height, width), planned = images.shape[-2:], self.plan.image_size
        if (height, width) != planned:
            raise ValueError(f"the plan is for images of {planned[0]}x{planned[1]} px, and these have {height}x{width}; plan again")
        if len(images) > self.plan.micro_batch:
            raise ValueError(
                f"the plan is for a micro-batch of {self.plan.micro_batch}, and these are {len(images)} images: more than "
                f"{format_size(self.plan.predicted_peak_bytes)} would be needed; accumulate gradients, or plan again"
            )


def _limits(*, batch: int, micro_batch: str | int, spacing: str | int | Mapping[str, int], goal: str, exact: str) -> Limits:
    """What is asked of the search.

    Raises:
        ValueError: a value that is none of those allowed.
    """
    for name, value, known in (("goal", goal, ("largest", "fastest")), ("exact", exact, ("bitwise", "close"))):
        if value not in known:
            raise ValueError(f"{name} {value!r} is neither {known[0]} nor {known[1]}")
    if micro_batch != "auto" and not (_is_count(micro_batch) and int(micro_batch) <= batch):
        raise ValueError(f"micro_batch {micro_batch!r} is neither auto nor between 1 and batch, {batch}")
    lengths = spacing.values() if isinstance(spacing, Mapping) else (spacing,)
    words = () if isinstance(spacing, Mapping) else ("auto", "off")
    if not all(length in words or (_is_count(length)) for length in lengths):
        raise ValueError(f"spacing {spacing!r} is not auto, off, a number of blocks, or such numbers by stage")
    pinned = micro_batch if isinstance(micro_batch, int) else None
    return Limits(batch=batch, micro_batch=pinned, spacing=spacing, goal=goal, exact=exact)


@dataclass(frozen=True, slots=True)
class _Target:
    """What is planned for."""

    on_gpu: bool
    precision: str
    block: int
    limit_bytes: int
    card: Card | None = None

    def budget(self, profile: MemoryProfile) -> Budget:
        """The limit with what is in use before the first step."""
        if self.card is not None:
            return budget_elsewhere(self.card.memory_bytes, self.limit_bytes, CUDA_CONTEXT_BYTES, self.card.name)
        baseline = 0
        if not self.on_gpu:
            release()
            baseline = max(0, in_use(torch.device("cpu")) - profile.weights - profile.buffers)
        return Budget(self.limit_bytes, baseline, self.limit_bytes, 0, reserve_of(self.limit_bytes), "given")


def _target(budget: str | int, device: str | torch.device | None, precision: str) -> _Target:
    """Device, precision and limit.

    Raises:
        ValueError: a budget that is neither a size nor a card, a device that is neither cuda nor cpu, or both at odds.
    """
    if precision not in ("auto", "bf16", "fp16", "fp32"):
        raise ValueError(f"precision {precision!r} is not one of auto, bf16, fp16, fp32")
    kind = "cuda" if device is None else torch.device(device).type
    if kind not in ("cuda", "cpu"):
        raise ValueError(f"device {device} is neither cuda nor cpu")
    card, limit = _limit(budget)
    if card is not None and kind == "cpu":
        raise ValueError(f"budget {budget!r} is a card, and device is cpu; give a size, or another device")
    if precision == "auto":
        precision = _auto_precision(kind, device, card)
    elif card is not None and not getattr(card, f"{precision}_flops"):
        raise ValueError(f"{card.name} has no {precision}; give another precision, or auto")
    if kind == "cpu":
        return _Target(False, precision, block_bytes(torch.device("cpu")), limit)
    return _Target(True, precision, CUDA_BLOCK_BYTES, limit, card)


def _auto_precision(kind: str, device: str | torch.device | None, card: Card | None) -> str:
    if kind == "cpu":
        return "fp32"
    if card is not None:
        return card.auto_precision
    here = device is not None and torch.cuda.is_available()
    return "fp16" if here and not torch.cuda.is_bf16_supported(including_emulation=False) else "bf16"


def _limit(budget: str | int) -> tuple[Card | None, int]:
    """A card with the share of its memory that is used, or a size in bytes.

    Raises:
        ValueError: neither.
    """
    if _is_count(budget):
        return None, int(budget)
    if not isinstance(budget, str):
        raise ValueError(f"budget {budget!r} is neither a size (24GiB), a number of bytes, nor a card's name")
    if budget.strip().replace(".", "", 1).isdigit():
        raise ValueError(f"budget {budget!r} has no unit; write {budget.strip()}GiB")
    try:
        return None, parse_size(budget)
    except ValueError:
        try:
            card = find_card(budget)
        except RecipeError as unknown:
            raise ValueError(f"budget {budget!r} is no size (write 24GiB); as a card: {unknown}") from None
    return card, budget_elsewhere(card.memory_bytes, "auto", 0, card.name).total_bytes


def _make_optimizer(optimizer: str | MakeOptimizer, *, on_gpu: bool) -> MakeOptimizer:
    """Builds the optimizer over what is trained. By default torch steps all tensors together on a GPU, which takes memory for a moment.

    Raises:
        ValueError: an unknown name.
    """
    if not isinstance(optimizer, str):
        return optimizer
    if optimizer == "adamw":
        return lambda model: torch.optim.AdamW(_trained(model), foreach=on_gpu)
    if optimizer == "sgd":
        return lambda model: torch.optim.SGD(_trained(model), lr=1e-3, momentum=_MOMENTUM, foreach=on_gpu)
    raise ValueError(f"optimizer {optimizer!r} is not one of adamw, sgd; give a function from a model to an optimizer")


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _profile(model: nn.Module, size: tuple[int, int], target: _Target, make_optimizer: MakeOptimizer, optimizer: str) -> MemoryProfile:
    """What the model costs on the target.

    Raises:
        ValueError: see `plan_memory`.
    """
    name = type(model).__name__
    refuse_wrappers(model)
    taken = planned_already(model)
    if taken is not None:
        raise ValueError(f"a plan is applied already (at {taken!r}); remove it first, then plan")
    if not _trained(model):
        raise ValueError(f"no parameter of {name} requires a gradient: nothing would be trained")
    channels = image_channels(model, size)
    try:
        with torch.enable_grad():
            _, profile = trace_costs(
                _on_cpu(model),
                name=name,
                image_size=size,
                in_chans=channels,
                num_classes=0,
                precision=target.precision,
                channels_last=in_channels_last(model),
                block=target.block,
                raw_image_bytes=0,  # the images are the model's input, which the trace counts
                make_optimizer=make_optimizer,
                optimizer_name=optimizer,
                clip_grad=1.0,
                rules="cuda" if target.on_gpu else "cpu",
            )
    except ValueError:
        raise
    except Exception as error:  # whatever a model raises for a size that it does not take
        raise ValueError(f"{name} cannot be run on images of {channels}x{size[0]}x{size[1]}: {first_line(error)}") from error
    refuse_compiled_around(model, [name for unit in profile.units for name in unit.modules])
    return replace(without_finer_ways(profile, model), versions={**profile.versions, FINGERPRINT: fingerprint(model)})


def _on_cpu(model: nn.Module) -> nn.Module:
    """The model with room for its tensors on the CPU, where they are not; the trace looks at no value, so none is copied."""
    tensors = [*model.parameters(), *model.buffers()]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return model
    memo: dict[int, Any] = {}
    for tensor in tensors:
        empty = torch.empty_like(tensor, device="cpu", requires_grad=False)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def image_channels(model: nn.Module, size: tuple[int, int]) -> int:
    """Channels of the images: those that the first convolution takes, or 3 where it does not take the images themselves.

    A model may rearrange pixels first (space to depth, a cosine transform); what it takes is then tried on fake tensors.
    """
    first = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), _CHANNELS)
    if first == _CHANNELS:
        return first
    mode, fake = fake_copy(_on_cpu(model))
    for channels in (first, _CHANNELS):
        with suppress(Exception), mode, torch.no_grad():  # a refusal in whatever words
            fake(torch.zeros(2, channels, *size))
            return channels
    return first


def in_channels_last(model: nn.Module) -> bool:
    """Whether the model's weights lie with channels innermost, so that its images should."""
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 4 and not parameter.is_contiguous()]
    return any(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)


def _check_fixed(profile: MemoryProfile, limit: Budget) -> None:
    """That the budget holds what is there before the first image.

    Raises:
        DoesNotFit: it does not.
    """
    parts = {
        "weights": profile.weights + profile.buffers,
        "gradients": profile.gradients,
        "optimizer's state": profile.optimizer_state,
        "reserve": limit.reserve_bytes,
        "in use before": limit.baseline_bytes,
    }
    need = sum(parts.values())
    if need < limit.total_bytes:
        return
    told = ", ".join(f"{name} {format_size(size)}" for name, size in parts.items() if size)
    raise DoesNotFit(
        f"{profile.model} does not fit: before the first image training needs {format_size(need)} ({told}), and the budget is "
        f"{format_size(limit.total_bytes)}. Raise budget, freeze parts, or take an optimizer with less state.",
        need_bytes=need,
        budget_bytes=limit.total_bytes,
        largest_part=max(parts.items(), key=lambda part: part[1]),
    )
