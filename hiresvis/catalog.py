"""`hiresvis models`: timm's models, and what the planner can do for each.

What was traced before is read from disk, without torch.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

from hiresvis import profiles
from hiresvis.errors import EnvironmentFailed, Problem, RecipeError
from hiresvis.memory.budget import CUDA_BLOCK_BYTES
from hiresvis.memory.costs import MemoryProfile
from hiresvis.profiles import Entry, Facts, ProfileKey
from hiresvis.run.files import json_text, write_text

MOST_TRACED = 10  # a trace takes seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """One model at its own image size; what was not traced is None.

    Attributes:
        image_size: (height, width) in px.
        stride: pixels of the image per pixel of the last feature map.
        parameters: numbers in all weights, classifier included.
        num_units: links of the chain that the planner sees.
        recomputable: share of what a step saves for backward that lies in units which can be recomputed.
        tiers: what plans can use.
        why_not: why the planner can do nothing; empty where it can.
    """

    name: str
    image_size: tuple[int, int]
    stride: int | None = None
    parameters: int | None = None
    num_units: int | None = None
    recomputable: float | None = None
    tiers: tuple[str, ...] = ()
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Catalog:
    """What `hiresvis models` prints; `traced` is False where too many match to be traced."""

    rows: tuple[ModelRow, ...]
    traced: bool

    def to_json(self) -> dict[str, Any]:
        """Plain values: `traced`, and `models`, a list of `ModelRow`s (null: not traced)."""
        return {"traced": self.traced, "models": [asdict(row) for row in self.rows]}

    def lines(self) -> list[str]:
        """Text for a terminal."""
        if not self.traced:
            names = [f"{row.name}  {_size(row.image_size)}" for row in self.rows]
            return [
                *names,
                f"{len(names)} models; narrow the pattern to {MOST_TRACED} or fewer to see what the planner can do, or give --all",
            ]
        cells = [("model", "size", "stride", "params", "units", "recomputable", "the planner can")]
        for row in self.rows:
            units = "-" if row.num_units is None else str(row.num_units)
            share = "-" if row.recomputable is None else f"{row.recomputable:.0%}"
            can = f"nothing: {row.why_not}" if row.why_not else ", ".join(row.tiers)
            cells.append((row.name, _size(row.image_size), str(row.stride or "-"), _millions(row.parameters), units, share, can))
        widths = [max(len(row[column]) for row in cells) for column in range(6)]
        return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip() for row in cells]


def models(pattern: str | None = None, *, everything: bool = False, progress: Callable[[str], None] = lambda _: None) -> Catalog:
    """The models whose names match.

    Args:
        pattern: with * or ?, the whole name; else a part of it; None: all.
        everything: trace however many match.
        progress: told of each trace before it starts.

    Raises:
        RecipeError: nothing matches.
    """
    sizes = _default_sizes()
    wanted = "*" if pattern is None else pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    names = fnmatch.filter(sizes, wanted)
    if not names:
        raise RecipeError([Problem(f"no model of timm matches {pattern!r}; a part of a name, or a pattern such as 'convnext*', does")])
    if len(names) > MOST_TRACED and not everything:
        return Catalog(tuple(ModelRow(name=name, image_size=sizes[name][1:]) for name in names), traced=False)
    return Catalog(tuple(_row(name, sizes[name], progress) for name in names), traced=True)


def _row(name: str, size: tuple[int, int, int], progress: Callable[[str], None]) -> ModelRow:
    key = _key(name, size)
    entry = profiles.read(key)
    if entry is None:
        progress(f"tracing {name}")
        entry = _trace(key)
        profiles.write(key, entry)
    profile, facts = entry.profile, entry.facts
    row = ModelRow(name=name, image_size=size[1:], stride=facts.stride or None, parameters=facts.parameters or None, why_not=entry.refusal)
    if profile is None:
        return row
    tiers = tiers_of(profile)
    why_not = "" if tiers else "no unit can be run again"
    return replace(row, num_units=len(profile.units), recomputable=recomputable_share(profile), tiers=tiers, why_not=why_not)


def _key(name: str, size: tuple[int, int, int]) -> ProfileKey:
    """A plain fine-tuning of all layers on a GPU, at the model's own size."""
    channels, height, width = size
    return ProfileKey(
        model=name,
        image_size=(height, width),
        in_chans=channels,
        num_classes=-1,  # the model's own
        precision="bf16",
        channels_last=True,
        block=CUDA_BLOCK_BYTES,
        raw_image_bytes=channels * height * width,
        optimizer="adamw",
        clip_grad=1.0,
        freeze="none",
        adapt="full",
        norm="batch",
        drop_path="auto",
        rules="cuda",
    )


def _trace(key: ProfileKey) -> Entry:
    """The model's costs, or why there are none; a model that fails in its own way is no fault of ours."""
    import torch

    from hiresvis.backbone.catalog import bare_model
    from hiresvis.costing import trace_by
    from hiresvis.train.optim import build_optimizer

    stride = parameters = 0
    try:
        model, stride = bare_model(key.model, key.image_size, key.in_chans)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        model.to(memory_format=torch.channels_last)
        profile = trace_by(key, model, lambda fake: build_optimizer(fake, name="adamw", lr=1e-3))
    except MemoryError:
        raise
    except Exception as error:
        said = error.problems[0].message if isinstance(error, RecipeError) else str(error)
        reason = (said.splitlines() or [""])[0] or type(error).__name__
        return Entry(None, Facts(stride=stride, batch_norm=False, parameters=parameters), reason)
    batch_norm = any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in model.modules())
    return Entry(profile, Facts(stride=stride, batch_norm=batch_norm, parameters=parameters))


def recomputable_share(profile: MemoryProfile) -> float:
    """Of the bytes that a step saves per image with everything stored, those that lie in units which can be recomputed."""
    everything = _saved(profile, only_fixed=False)
    return 1 - _saved(profile, only_fixed=True) / max(1, everything)


def _saved(profile: MemoryProfile, *, only_fixed: bool) -> int:
    units = [unit for unit in profile.units if not (only_fixed and unit.recomputable)]
    numbers = {number for unit in units for number in unit.saves}
    return sum(unit.interior.slope for unit in units) + sum(profile.boundaries[number].slope for number in numbers)


def tiers_of(profile: MemoryProfile) -> tuple[str, ...]:
    """What plans can use."""
    ways = [way for unit in profile.units for way in unit.ways]
    able = {
        "recompute": any(unit.recomputable and unit.opens_segment for unit in profile.units),
        "keep": any(way.keep for way in ways),
        "nested": any(way.passes for way in ways),
        "chunk": any(way.sliced for way in ways),
        "offload": any(unit.recomputable and unit.opens_segment for unit in profile.units),
    }
    return tuple(name for name, there in able.items() if there)


def _default_sizes() -> dict[str, tuple[int, int, int]]:
    """Names and image sizes of this release of timm, remembered on disk so that a list needs no timm."""
    path = profiles.cache_folder() / f"models-{metadata.version('timm')}.json"
    with suppress(OSError, ValueError, AttributeError, TypeError):
        return {str(name): (int(c), int(h), int(w)) for name, (c, h, w) in json.loads(path.read_bytes()).items()}
    from hiresvis.backbone.catalog import default_sizes

    sizes = default_sizes()
    with suppress(EnvironmentFailed, OSError):
        write_text(path, json_text(sizes))
    return sizes


def _size(size: tuple[int, int]) -> str:
    return str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"


def _millions(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.1f}M"
