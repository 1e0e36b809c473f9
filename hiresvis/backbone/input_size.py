"""Which image sizes a timm model takes, found by trying them without computing anything.

timm's families differ: a ResNet takes any size, a ViT is built for one, Swin needs multiples of 32, some take squares alone, and
ConvNeXt runs at 1000 px but never reads the last rows of its feature maps. No table can hold that for 1300 models, so the model is
built on the meta device (no memory, no arithmetic) and given an image of the size; what it refuses, or what its patch convolutions
leave unread, is the answer. The bound: a model whose code reads values out of tensors cannot run on the meta device; then nothing
is known ahead, and a note says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import nn

from hiresvis.errors import Problem, RecipeError, first_line

# What constructors and forward passes raise for a size they do not take; anything else is a fault worth seeing.
_REFUSALS = (RuntimeError, AssertionError, ValueError, TypeError, IndexError, ZeroDivisionError, AttributeError)


@dataclass(frozen=True, slots=True)
class InputFit:
    """How to build a model for one image size.

    Attributes:
        kwargs: arguments for `timm.create_model` (`img_size` where the model takes it).
        stride: pixels of the image per pixel of the last feature map.
        notes: what the user should know.
    """

    kwargs: dict[str, Any]
    stride: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Trial:
    """Outcome of one size: arguments that work, or the reason why none do."""

    kwargs: dict[str, Any] | None
    stride: int
    patch: int
    reason: str = ""


def fit_input(name: str, size: tuple[int, int], in_chans: int = 3) -> InputFit:
    """Check that a model takes images of a size (height, width) in pixels.

    Raises:
        RecipeError: it does not; the message gives the nearest sizes that it takes.
    """
    trial = _try_size(name, size, in_chans)
    if trial.kwargs is not None and (trial.kwargs or min(size) >= trial.stride):
        return InputFit(trial.kwargs, trial.stride)
    native = tuple(timm.get_pretrained_cfg(name).input_size[-2:])
    if trial.kwargs is None and _try_size(name, native, in_chans).kwargs is None:
        kwargs = {"img_size": size} if timm.get_pretrained_cfg(name).fixed_input_size else {}
        return InputFit(kwargs, trial.stride, (f"{name} cannot be tried without memory, so its image size was not checked ahead",))
    raise RecipeError([Problem(_advice(name, size, native, trial, in_chans), key="model.image_size")])


def for_other_sizes(name: str, kwargs: Mapping[str, Any], sizes: Sequence[tuple[int, int]], in_chans: int = 3) -> dict[str, Any]:
    """What a model that is built for one size needs besides to run at others too: nothing, or timm's `dynamic_img_size`.

    Args:
        kwargs: that build it for its size.

    Raises:
        RecipeError: it does not take one of them.
    """
    refusals = []
    for more in ({}, {"dynamic_img_size": True}):
        trials = [(size, _try_kwargs(name, {**kwargs, **more}, size, in_chans)) for size in sizes]
        bad = next(((size, trial.reason) for size, trial in trials if trial.kwargs is None), None)
        if bad is None:
            return more
        refusals.append(bad)
    size, why = refusals[0] if "dynamic_img_size" in refusals[1][1] else refusals[1]
    can = "most ConvNets, plain ViTs and Swin are trained at several sizes, each a multiple of the stride or patch"
    raise RecipeError([Problem(f"{name} does not take {_text(size)} beside its own size ({why}); {can}", key="train.resize")])


def _advice(name: str, size: tuple[int, int], native: tuple[int, ...], trial: _Trial, in_chans: int) -> str:
    """The value against the constraint, and sizes that were tried and work."""
    if min(size) < trial.stride:
        return f"{_text(size)} is smaller than the stride of {name}; at least {trial.stride} is needed"
    for unit in (trial.patch, trial.stride, 2 * trial.stride, 4 * trial.stride, 8 * trial.stride):
        off = [side for side in dict.fromkeys(size) if side % unit] if unit > 1 else []
        if not off:
            continue
        near = [tuple(side // unit * unit + (unit if up and side % unit else 0) for side in size) for up in (False, True)]
        if all(min(pair) > 0 and _try_size(name, pair, in_chans).kwargs is not None for pair in near):
            return "; ".join(
                f"{side} is not a multiple of {unit}; {side // unit * unit} and {side // unit * unit + unit} are" for side in off
            )
    if size[0] != size[1] and _try_size(name, (max(size), max(size)), in_chans).kwargs is not None:
        return f"{name} takes square images only, not {_text(size)}; {max(size)} works"
    return f"{name} does not take {_text(size)} ({trial.reason}); its own size, {_text(native)}, works"


def _text(size: tuple[int, ...]) -> str:
    return str(size[0]) if size[0] == size[1] else f"{size[0]}x{size[1]}"


def _try_size(name: str, size: tuple[int, int] | tuple[int, ...], in_chans: int) -> _Trial:
    """Build on the meta device and run one image through; with `img_size` where the model is made for one size."""
    with_size = {"img_size": tuple(size)}
    # Models that take any size may still accept img_size (and ignore it), so it is the second choice there.
    attempts = [with_size] if timm.get_pretrained_cfg(name).fixed_input_size else [{}, with_size]
    stride, patch, reasons = 32, 1, []
    for kwargs in attempts:
        trial = _try_kwargs(name, kwargs, size, in_chans)
        if trial.kwargs is not None:
            return trial
        stride, patch = (stride, patch) if trial.stride == 0 else (trial.stride, trial.patch or patch)
        if "img_size" not in trial.reason:  # no such argument: says nothing about the size
            reasons.append(trial.reason)
    return _Trial(None, stride, patch, reasons[0] if reasons else "no reason given")


def _try_kwargs(name: str, kwargs: Mapping[str, Any], size: tuple[int, ...], in_chans: int) -> _Trial:
    """One way to build, one size. A stride of 0: it could not be built; a patch of 0: none was found."""
    stride = patch = 0
    unread: list[tuple[int, int]] = []
    try:
        with torch.device("meta"), torch.no_grad():
            model = timm.create_model(name, in_chans=in_chans, **kwargs).eval()
            stride = _stride(model, name)
            patch = _watch_patches(model, unread)
            model(torch.empty(1, in_chans, *size))
    except _REFUSALS as error:
        return _Trial(None, stride, patch, first_line(error))
    if not unread:
        return _Trial(dict(kwargs), stride, patch or 1)
    pixels, kernel = unread[0]
    return _Trial(None, stride, patch, f"{pixels % kernel} of {pixels} rows or columns would be left unread by a patch of {kernel}")


def _watch_patches(model: nn.Module, unread: list[tuple[int, int]]) -> int:
    """Report convolutions that cut the map into patches and leave a rest over; returns the first one's patch side, 0 without."""
    first = 0

    def look(module: nn.Conv2d, args: tuple[torch.Tensor, ...]) -> None:
        height, width = args[0].shape[-2:]
        unread.extend((side, k) for side, k in ((height, module.kernel_size[0]), (width, module.kernel_size[1])) if side % k)

    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == module.stride and module.stride[0] > 1 and module.padding == (0, 0):
            first = first or module.kernel_size[0]
            module.register_forward_pre_hook(look)
    return first


def _stride(model: nn.Module, name: str) -> int:
    """Reduction of the last feature map: what the model says, else what its pretraining says."""
    info = getattr(model, "feature_info", None)
    if isinstance(info, list) and info:
        return int(info[-1]["reduction"])
    if info is not None and hasattr(info, "reduction"):
        return int(info.reduction()[-1])
    cfg = timm.get_pretrained_cfg(name)
    return cfg.input_size[-1] // cfg.pool_size[-1] if cfg.pool_size else 32
