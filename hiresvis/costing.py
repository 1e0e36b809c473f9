"""The recipe's model taken apart for planning: parts frozen, costs traced (or found on disk), the budget measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import psutil
import torch
from torch import nn

from hiresvis import assemble, profiles
from hiresvis.assemble import Trainable
from hiresvis.backbone.build import Backbone
from hiresvis.backbone.record import TracedLoss
from hiresvis.backbone.trace import trace_costs
from hiresvis.data.contract import Contract
from hiresvis.data.sources import Datasets
from hiresvis.data.transforms import Pipeline
from hiresvis.device import AUTOCAST_DTYPES, block_bytes, budget, pick_device
from hiresvis.errors import RecipeError
from hiresvis.memory.budget import Budget
from hiresvis.memory.cards import Card, find_card
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.search import Limits
from hiresvis.memory.timing import HOST_BYTES
from hiresvis.profiles import Entry, Facts, ProfileKey
from hiresvis.recipe import LoadedRecipe, Resolution
from hiresvis.settle import complete, key_of, limits_of, settle_costs
from hiresvis.train import metrics
from hiresvis.train.mask_losses import MaskLoss
from hiresvis.train.pace import time_units

_HOST_SHARE = 0.5  # of the host's free memory; the loader's workers need the rest


@dataclass(frozen=True, slots=True)
class Parts:
    """What training is made of."""

    datasets: Datasets
    contract: Contract
    trainable: Trainable
    profile: MemoryProfile
    key: ProfileKey
    budget: Budget
    limits: Limits
    precision: str
    pipeline: Pipeline
    raw_image: tuple[tuple[int, int, int], torch.dtype]
    average_on_host: bool


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
    """Freezes, traces (or reads what was traced before) and measures the budget.

    Args:
        norm: batch statistics as an earlier start of the run settled them (batch | frozen); None: from the recipe.

    Raises:
        RecipeError: the model is no chain.
    """
    precision = assemble.settle_precision(loaded, resolution, device)
    pipeline = assemble.make_pipeline(loaded, contract)
    raw = assemble.raw_image(contract, datasets, pipeline)
    if device.type == "cpu":
        metrics.load()  # as with what decodes: the budget is of the memory beside what the process is without the model
    limits = limits_of(loaded, card_of(device), precision, free_host_bytes())
    frozen: dict[str, Trainable] = {}
    keys: dict[str, ProfileKey] = {}

    def cost(kind: str) -> tuple[MemoryProfile, Facts]:
        trainable = frozen[kind] = assemble.freeze_parts(loaded, resolution, backbone, norm=kind)
        key = keys[kind] = key_of(
            loaded,
            in_chans=contract.channels,
            num_classes=len(contract.classes),
            precision=precision,
            block=block_bytes(device),
            raw_image_bytes=math.prod(raw[0]) * raw[1].itemsize,
            rules="cuda" if device.type == "cuda" else "cpu",
            norm=kind,
        )
        return complete(loaded, profiles.read_or_trace(key, lambda: entry_of(loaded, trainable, key)))

    costs = settle_costs(
        loaded,
        resolution,
        loaded.recipe.model.norm if norm is None else norm,
        cost,
        lambda profile, _: budget(device, loaded.recipe.memory.budget, profile.weights + profile.buffers),
        limits,
    )
    if loaded.recipe.memory.budget == "auto":
        resolution.set("memory.budget", costs.budget.total_bytes, costs.budget.why)
    norm = costs.norm
    return Parts(
        datasets,
        contract,
        frozen[norm],
        costs.profile,
        keys[norm],
        costs.budget,
        limits,
        precision,
        pipeline,
        raw,
        costs.average_on_host,
    )


def tracer(loaded: LoadedRecipe, resolution: Resolution, *, classes: Sequence[str], channels: int) -> Callable[[ProfileKey], Entry]:
    """Traces the recipe's model, built once and without weights, as a key says.

    Raises (when called):
        RecipeError: name or size do not fit, or the model is no chain.
    """
    built: list[Backbone] = []

    def trace_key(key: ProfileKey) -> Entry:
        if not built:
            built.append(assemble.build_model(loaded, num_classes=len(classes), channels=channels, with_weights=False, initialise=False))
        return entry_of(loaded, assemble.freeze_parts(loaded, resolution, built[0], norm=key.norm), key)

    return trace_key


def entry_of(loaded: LoadedRecipe, trainable: Trainable, key: ProfileKey) -> Entry:
    """Traces what the model costs, unit by unit, and notes what else planning asks of it.

    Raises:
        RecipeError: the model is no chain.
    """
    profile = _trace(loaded, trainable, key)
    held = profile.weights + profile.buffers
    facts = Facts(
        stride=trainable.backbone.stride,
        batch_norm=assemble.has_batch_norm(trainable.model),
        parameters=sum(parameter.numel() for parameter in trainable.model.parameters()),
        process_bytes=_process_bytes(held) if key.rules == "cpu" else None,
    )
    return Entry(profile, facts)


def _process_bytes(held: int) -> int:
    """Resident size, weights aside, of a process that is about to train: with what training imports and planning does not."""
    import_module("hiresvis.train.trainer")
    metrics.load()
    return budget(torch.device("cpu"), 0, held).baseline_bytes


def trace_by(key: ProfileKey, model: nn.Module, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> MemoryProfile:
    """The costs that a key asks for, of its model in its training mode.

    Raises:
        ValueError: the model is no chain.
    """
    _, profile = trace_costs(
        model,
        name=key.model,
        image_size=key.image_size,
        in_chans=key.in_chans,
        num_classes=key.num_classes,
        precision=key.precision,
        channels_last=key.channels_last,
        block=key.block,
        raw_image_bytes=key.raw_image_bytes,
        make_optimizer=make_optimizer,
        optimizer_name=key.optimizer,
        clip_grad=key.clip_grad,
        ema=key.ema,
        rules=key.rules,
        loss=_traced_loss(key),
    )
    return profile


@dataclass(frozen=True, slots=True)
class _Bare:
    """A model without data or loss, as the device runs it."""

    model: nn.Module
    device: torch.device
    precision: str

    def predict(self, images: torch.Tensor) -> Any:
        dtype = AUTOCAST_DTYPES[self.precision]
        with torch.no_grad(), torch.autocast(self.device.type, dtype=dtype) if dtype else nullcontext():
            return self.model(images)


def time_here(loaded: LoadedRecipe, profile: MemoryProfile, *, classes: Sequence[str], channels: int, norm: str) -> dict[int, float]:
    """Seconds of each unit's forward of one image on this device, by its index, of the recipe's model with random weights."""
    built = assemble.build_model(loaded, num_classes=len(classes), channels=channels, with_weights=False)
    model = assemble.freeze_parts(loaded, Resolution(loaded), built, norm=norm).model.eval()
    device = pick_device()
    images = torch.rand(1, channels, *loaded.recipe.model.image_size, generator=torch.Generator().manual_seed(0)).to(device)
    bare = _Bare(model.to(device), device, profile.precision)
    bare.predict(images)  # the first forward of a process chooses kernels, which can take longer than all others together
    return time_units(bare, [unit.modules for unit in profile.units], images)


def _traced_loss(key: ProfileKey) -> TracedLoss | None:
    if not key.mask_loss:
        return None
    loss = MaskLoss(key.mask_loss, image_size=key.image_size, label_smoothing=key.label_smoothing)
    return TracedLoss(loss, loss.blank_targets)


def _trace(loaded: LoadedRecipe, trainable: Trainable, key: ProfileKey) -> MemoryProfile:
    trainable.train_mode()
    try:
        return trace_by(key, trainable.model, lambda model: assemble.make_optimizer(loaded, model, trainable.layer_decay))
    except ValueError as error:
        raise RecipeError([loaded.problem("model.name", str(error))]) from error


def card_of(device: torch.device) -> Card | None:
    """The device's data sheet, where there is one."""
    try:
        return find_card(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    except RecipeError:
        return None


def device_name(device: torch.device) -> str:
    """What times on this device are kept under."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else profiles.cpu_name()


def free_host_bytes() -> int:
    """Memory of this host that may hold what is offloaded."""
    return min(HOST_BYTES, int(psutil.virtual_memory().available * _HOST_SHARE))
