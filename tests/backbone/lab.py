"""Small real models, their traced costs, plans for them, and a whole training step measured by counting storages."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import timm
import timm.optim
import torch
from torch import nn

from hiresvis.backbone.chain import Chain
from hiresvis.backbone.record import TracedLoss, fake_copy
from hiresvis.backbone.segments import apply_segments
from hiresvis.backbone.trace import trace_costs
from hiresvis.device import StorageCounter
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.plan import Segment, store_all, uniform

CLASSES = 4
BLOCK_BYTES = 64
# Name: image side in px, and what makes the model smaller than it is published (as many kinds of units, fewer of them).
SMALL: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "vit_tiny_patch16_224": (64, {"img_size": 64, "depth": 4}),
    "convnext_atto": (64, {"depths": (1, 1, 2, 1)}),
    "resnet18": (64, {}),
    "tf_efficientnet_lite0": (64, {}),
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56, "depths": (2, 1, 1, 1)}),
}
WITHOUT_DROP_PATH = ("vgg", "tiny_vit")


def make_model(name: str, *, drop_path: float = 0.2, **kwargs: Any) -> nn.Module:
    """A seeded model in training mode, channels last, with small classes; `kwargs` on top of those of SMALL."""
    torch.manual_seed(0)
    _, small = SMALL.get(name, (0, {}))
    drop = {} if name.startswith(WITHOUT_DROP_PATH) else {"drop_path_rate": drop_path}
    model = timm.create_model(name, num_classes=CLASSES, **{**small, **drop, **kwargs})
    return model.train().to(memory_format=torch.channels_last)


def narrow(name: str, **kwargs: Any) -> nn.Module:
    """As `make_model`; a ResNet a quarter as wide, whose chain and saved tensors are the same in a sixth of the time."""
    return make_model(name, **({"channels": (16, 32, 64, 128)} if name.startswith("resnet") else {}), **kwargs)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)


def trace(
    model: nn.Module, image_size: tuple[int, int], *, name: str = "model", precision: str = "fp32", loss: TracedLoss | None = None
) -> tuple[Chain, MemoryProfile]:
    """`trace_costs` with this lab's settings."""
    return trace_costs(
        model,
        name=name,
        image_size=image_size,
        in_chans=3,
        num_classes=CLASSES,
        precision=precision,
        channels_last=True,
        block=BLOCK_BYTES,
        raw_image_bytes=0,
        make_optimizer=make_optimizer,
        optimizer_name="adamw",
        clip_grad=1.0,
        loss=loss,
    )


@cache
def small_profile(name: str, precision: str = "fp32") -> MemoryProfile:
    """The costs of a model of SMALL, traced once."""
    px, _ = SMALL[name]
    return trace(make_model(name), (px, px), name=name, precision=precision)[1]


@cache
def large_profile(name: str) -> MemoryProfile:
    """The costs of a published model at a size where activations rule, traced once."""
    px = 512
    size = {"img_size": px} if name.startswith("vit") else {}
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=CLASSES, **size).train().to(memory_format=torch.channels_last)
    return trace(model, (px, px), name=name)[1]


def five_plans(profile: MemoryProfile) -> dict[str, tuple[Segment, ...]]:
    """Store all, three uniform spacings, and the first half recomputed at spacing 1."""
    half = len(profile.units) // 2
    mixed = tuple(
        segment if segment.end <= half else Segment(index, index + 1)
        for segment in uniform(profile, 1)
        for index in range(segment.start, segment.end)
    )
    return {"off": store_all(profile), **{str(n): uniform(profile, n) for n in (4, 2, 1)}, "half": mixed}


def mixed_plan(profile: MemoryProfile, shift: int = 0) -> tuple[Segment, ...]:
    """Every tier that keeps the bits, in turn along the chain: kept outputs, passes, segments of two (at once, nested), the host."""
    units, segments, index = profile.units, [], 0
    turns = itertools.islice(itertools.cycle(("nest", "keep", "at once", "passes", "host", "store", "nest on the host")), shift, None)
    while index < len(units):
        unit = units[index]
        if not (unit.ways and unit.recomputable and unit.opens_segment):
            segments.append(Segment(index, index + 1))
            index += 1
            continue
        turn = next(turns)
        ways = [way for way in unit.ways if not way.sliced]
        kept = max(ways, key=lambda way: (len(way.keep), len(way.passes)))
        passes = max((way.passes for way in ways if not way.keep), key=len)
        pairs = "nest" in turn or turn == "at once"
        end = index + 2 if pairs and index + 1 < len(units) and units[index + 1].recomputable and units[index + 1].ways else index + 1
        nested = (passes, ()) if end > index + 1 else (passes,)
        kinds = {
            "nest": Segment(index, end, "recompute", nested),
            "keep": Segment(index, index + 1, "keep", (kept.passes,), kept.keep),
            "at once": Segment(index, end, "recompute"),
            "passes": Segment(index, index + 1, "recompute", (passes,)),
            "host": Segment(index, index + 1, "offload", (kept.passes,), kept.keep),
            "store": Segment(index, index + 1),
            "nest on the host": Segment(index, end, "offload", nested),
        }
        segments.append(kinds[turn])
        index = end
    return tuple(segments)


def unit_modules(profile: MemoryProfile) -> list[tuple[str, ...]]:
    return [unit.modules for unit in profile.units]


@dataclass(frozen=True)
class StepPeaks:
    """Highest live bytes of a whole optimizer step: of one micro-batch, and of two that are accumulated."""

    single: int
    accumulated: int


def measure_steps(
    model: nn.Module, profile: MemoryProfile, segments: tuple[Segment, ...], batch: int, *, fake: bool, loss: TracedLoss | None = None
) -> StepPeaks:
    """Count a copy of the model's storages through forward, backward, clipping and the optimizer's step, its state in being."""
    mode: Any
    mode, model = fake_copy(model) if fake else (nullcontext(), copy.deepcopy(model))
    counter = StorageCounter(BLOCK_BYTES)
    counter.track([*model.parameters(), *model.buffers()])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    losses = partial(nn.functional.cross_entropy, reduction="none") if loss is None else loss.losses
    targets = None if loss is None else loss.targets(batch)  # not counted, as the loader's images are not

    def micro_batch() -> None:
        height, width = profile.image_size
        images = torch.zeros(batch, 3, height, width).to(memory_format=torch.channels_last)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=profile.precision == "bf16"):
            value = losses(model(images).float(), torch.zeros(batch, dtype=torch.int64) if targets is None else targets).sum() / batch
        del images
        value.backward()

    def step(micro_batches: int) -> int:
        counter.reset_peak()
        for _ in range(micro_batches):
            micro_batch()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return counter.peak_bytes

    with mode, counter, applied(model, profile, segments):
        optimizer = make_optimizer(model)
        step(1)  # the optimizer's state comes into being
        return StepPeaks(step(1), step(2))


@contextmanager
def applied(model: nn.Module, profile: MemoryProfile, segments: tuple[Segment, ...]) -> Iterator[None]:
    """The segments applied inside."""
    handle = apply_segments(model, segments, unit_modules(profile))
    try:
        yield
    finally:
        handle.remove()
