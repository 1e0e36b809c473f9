"""Proves a plan on the spot: the same steps with and without it, compared bit for bit."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hiresvis.api import height_and_width, image_channels, in_channels_last
from hiresvis.backbone import segments
from hiresvis.backbone.match import check_plan
from hiresvis.device import AUTOCAST_DTYPES
from hiresvis.errors import HiresvisError
from hiresvis.memory.plan import CheckpointPlan

_CLOSE = ("chunk", "tile")  # tiers that reassociate sums
_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}  # of a tensor's norm, where they are used


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was compared and found equal.

    Attributes:
        tolerance: 0: every bit was compared. Else the share of each tensor's norm that was let pass, since the plan uses tiers that
            reassociate sums.
        forwards: how often each unit ran in one step with the plan: 1 stored, 2 and more recomputed.
    """

    steps: int
    micro_batch: int
    image_size: tuple[int, int]
    tolerance: float
    forwards: Mapping[str, int]

    def __str__(self) -> str:
        again = sum(count > 1 for count in self.forwards.values())
        equal = f"equal within {self.tolerance:g} of each tensor's norm" if self.tolerance else "equal bit for bit"
        return f"{self.steps} steps with and without the plan are {equal}; {again} of {len(self.forwards)} units ran again"


def verify_plan(
    model: nn.Module,
    plan: CheckpointPlan,
    *,
    image_size: int | tuple[int, int] | None = None,
    steps: int = 3,
    micro_batch: int | None = None,
    device: str | torch.device | None = None,
) -> Verification:
    """Runs SGD steps on random images with and without the plan, on copies of the model, and compares after each one.

    Args:
        model: the one that was planned for; it is not changed.
        image_size: None: the plan's. A smaller one is faster, where the model takes it.
        micro_batch: None: 2, or the plan's where that is smaller.
        device: None: the model's. On a GPU deterministic kernels are taken where there are any.

    Raises:
        HiresvisError: something differs; the step and the first difference are named (loss, random state, gradient, parameter, buffer, or
            optimizer state).
        ValueError: the plan is for another model, or was made with another release of torch or timm.
    """
    check_plan(model, plan)
    if image_size is None:
        image_size = plan.image_size
    size = height_and_width(image_size)
    channels, last = image_channels(model, size), in_channels_last(model)
    micro_batch = min(plan.micro_batch, 2) if micro_batch is None else micro_batch
    where = next(model.parameters()).device if device is None else torch.device(device)
    close = any(segment.tier in _CLOSE or segment.slices for segment in plan.segments)
    tolerance = _TOLERANCE[plan.precision] if close else 0.0
    with _deterministic(where), torch.random.fork_rng(devices=[where] if where.type == "cuda" else []):
        bare, planned = (Training(copy.deepcopy(model).to(where), plan.precision) for _ in range(2))
        handle = segments.apply_plan(planned.model, plan)
        counts = count_forwards(planned.model, plan.unit_modules)
        for step in range(1, steps + 1):
            images = random_images((micro_batch, channels, *size), step, channels_last=last).to(where)
            counts.clear()
            difference = first_difference(bare.step(images, step), planned.step(images, step), tolerance)
            if difference is not None:
                name, told = difference
                raise HiresvisError(f"step {step}: the {name} differs with the plan: {told}")
        handle.remove()
    return Verification(steps=steps, micro_batch=micro_batch, image_size=size, tolerance=tolerance, forwards=dict(counts))


class Training:
    """A model under training with SGD and momentum; its steps tell what they leave.

    Args:
        model: is trained itself, not a copy of it.
        precision: fp32, bf16 or fp16 (autocast).
    """

    def __init__(self, model: nn.Module, precision: str) -> None:
        self.model, self.dtype = model, AUTOCAST_DTYPES[precision]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)

    def step(self, images: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
        """One step from a seed; everything that it leaves, by name."""
        torch.manual_seed(seed)
        kind = images.device.type
        with torch.autocast(kind, dtype=self.dtype) if self.dtype else nullcontext():
            logits = self.model(images)
        logits = logits[0] if isinstance(logits, (tuple, list)) else logits
        targets = torch.arange(len(images), device=images.device) % logits.shape[1]
        loss = nn.functional.cross_entropy(logits.float(), targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        left = {"loss": loss.detach(), "random state": torch.get_rng_state()}
        if kind == "cuda":
            left["random state of the GPU"] = torch.cuda.get_rng_state(images.device)
        left |= {f"gradient of {name}": p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.step()
        left |= {f"parameter {name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        left |= {f"buffer {name}": buffer for name, buffer in self.model.named_buffers()}
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            left |= {f"optimizer state {key} of {name}": torch.as_tensor(value) for key, value in state.items() if value is not None}
        return left


def random_images(shape: tuple[int, int, int, int], seed: int, *, channels_last: bool) -> torch.Tensor:
    """Images of a seed; shape is (batch, channels, height, width)."""
    images = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return images.to(memory_format=torch.channels_last) if channels_last else images


def count_forwards(model: nn.Module, unit_modules: Sequence[Sequence[str]]) -> Counter[str]:
    """A count of each unit's forwards from now on, by the name of its first module."""
    counts: Counter[str] = Counter()

    def count(name: str) -> Any:
        return lambda *_: counts.update([name])

    modules = dict(model.named_modules())
    for names in unit_modules:
        if names:
            modules[names[0]].register_forward_pre_hook(count(names[0]))
    return counts


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, NaN included."""
    bits = [value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (one, other)]
    return bool(torch.equal(*bits))


def _close(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    return one.is_floating_point() and bool((one.double() - other.double()).norm() <= tolerance * one.double().norm())


def first_difference(
    before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], tolerance: float = 0.0
) -> tuple[str, str] | None:
    """The name of the first tensor that differs and in what, bit for bit or by more than a share of its norm; None: none does."""
    for name in [*before, *(name for name in after if name not in before)]:
        told = _difference(before.get(name), after.get(name), tolerance)
        if told is not None:
            return name, told
    return None


def _difference(one: torch.Tensor | None, other: torch.Tensor | None, tolerance: float) -> str | None:
    """In what two tensors differ; None: in nothing."""
    if one is None or other is None:
        return "there is none without it" if one is None else "there is none with it"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"
    if _same(one, other) or (tolerance and _close(one, other, tolerance)):
        return None
    most = (one.double() - other.double()).abs().max().item()
    return f"{int((one != other).sum())} of {one.numel()} values, by {most:.3g} at most"


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Deterministic kernels on a GPU, as far as there are any; as it was, afterwards."""
    if device.type != "cuda":
        yield
        return
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was, warn_only=warned)
