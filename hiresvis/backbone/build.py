"""A timm model by name: any head, any image size it takes, any number of channels, with weights from three sources."""

from __future__ import annotations

import difflib
import statistics
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import group_parameters
from timm.optim._param_groups import auto_group_layers  # timm's own answer for models that bring no group_matcher
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hiresvis.backbone import weights
from hiresvis.backbone.input_size import fit_input, for_other_sizes
from hiresvis.errors import Problem, RecipeError


@dataclass(frozen=True, slots=True)
class Backbone:
    """A model ready to be fine-tuned, and what its weights expect of an image.

    Attributes:
        model: on the CPU, in float32, in training mode.
        name: timm's name, as asked for.
        mean: per channel, of images in 0..1.
        std: per channel, of images in 0..1.
        stride: pixels of the image per pixel of the last feature map.
        interpolation: how the weights' images were resized (`bicubic`, ...).
        arguments: what `timm.create_model` was given besides the name, but for the weights: they build the model again.
        notes: what was decided on the way, for the user.
    """

    model: nn.Module
    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    stride: int
    interpolation: str
    arguments: Mapping[str, Any]
    notes: tuple[str, ...]


def build_backbone(
    name: str,
    *,
    num_classes: int,
    image_size: int | tuple[int, int],
    in_chans: int = 3,
    pretrained: bool | str = True,
    drop_path: float | None = None,
    seed: int = 0,
    initialise: bool = True,
    other_sizes: Sequence[tuple[int, int]] = (),
) -> Backbone:
    """Build a timm model for one image size, with a head for `num_classes`.

    What is random (a new head, or all of it) follows from `seed`; the global random state is as before afterwards.

    Args:
        name: a timm name, with or without the tag of its weights.
        num_classes: outputs of the head; 0: no head.
        image_size: pixels, one side or (height, width).
        in_chans: channels of the image; timm's rule adapts pretrained weights.
        pretrained: True (timm's hub), False, `package:MODULE`, or the path of a weights file.
        drop_path: stochastic depth rate; None keeps the model's own.
        seed: of the random parts.
        initialise: False leaves random weights as the memory they lie in, for a model that is only traced.
        other_sizes: that it is to run at as well, (height, width).

    Raises:
        RecipeError: the name, size, drop path or weights do not fit; every key that differs is listed.
        HubUnreachable: timm's weights are neither in the cache nor to be had.
        MissingExtra: the package that ships the weights is not installed.
    """
    cfg = weights_config(name)
    size = (image_size, image_size) if isinstance(image_size, int) else (int(image_size[0]), int(image_size[1]))
    with torch.random.fork_rng(devices=[]):
        fit = fit_input(name, size, in_chans)
        more = for_other_sizes(name, fit.kwargs, other_sizes, in_chans) if other_sizes else {}
        kwargs = {**fit.kwargs, **more, "in_chans": in_chans} | ({} if drop_path is None else {"drop_path_rate": drop_path})
        with nullcontext() if initialise else NotInitialising():
            model, notes = _with_weights(name, cfg, pretrained, num_classes, seed, kwargs)
    mean, std, said = _normalisation(cfg, pretrained, in_chans)
    arguments = {"num_classes": num_classes, **kwargs}
    return Backbone(model.train(), name, mean, std, fit.stride, cfg.interpolation, arguments, (*fit.notes, *notes, *said))


class NotInitialising(TorchDispatchMode):
    """Skips the operators that fill new weights with random numbers and scale those: seconds for a large model.

    Memory that nothing writes to is not even there: a new ViT-L then takes none of its 1.2 GB.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unfilled: weakref.WeakSet[Any] = weakref.WeakSet()  # storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FILLING:
            self.unfilled.add(args[0].untyped_storage())
            return args[0]
        if func in _SCALING and args[0].untyped_storage() in self.unfilled:
            return args[0]
        return func(*args, **(kwargs or {}))


_FILLING = {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default, torch.ops.aten.erfinv_.default}
_SCALING = {torch.ops.aten.mul_.Tensor, torch.ops.aten.add_.Tensor, torch.ops.aten.clamp_.default}  # of a truncated normal distribution


def weights_config(name: str) -> Any:
    """timm's description of a model's weights.

    Raises:
        RecipeError: no such model, or no such tag; the closest names are given.
    """
    base, _, tag = name.partition(".")
    if not timm.is_model(base):
        near = difflib.get_close_matches(base, timm.list_models(), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() gives all names"
        raise RecipeError([Problem(f"timm has no model {base!r}; {hint}", key="model.name")])
    tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{base}.*")]
    if tag and tag not in tags:
        has = f"it has {', '.join(tags)}" if tags else "it has none"
        raise RecipeError([Problem(f"{base} has no weights tagged {tag!r}; {has}", key="model.name")])
    return timm.get_pretrained_cfg(name)


def _create(name: str, seed: int, num_classes: int, **kwargs: Any) -> nn.Module:
    """timm's model, random parts from the seed.

    Raises:
        RecipeError: the model has no drop path.
    """
    torch.default_generator.manual_seed(seed)  # the CPU's alone: torch.manual_seed would reach a GPU's as well
    try:
        return timm.create_model(name, num_classes=num_classes, **kwargs)
    except TypeError as error:
        if "drop_path_rate" not in str(error):
            raise
        raise RecipeError([Problem(f"{name} has no drop path; leave it at auto", key="model.drop_path")]) from error


def _with_weights(
    name: str, cfg: Any, pretrained: bool | str, num_classes: int, seed: int, kwargs: dict[str, Any]
) -> tuple[nn.Module, tuple[str, ...]]:
    """The model with its weights loaded and its head as wanted.

    Weights are loaded with the classifier they came with, so that nothing of them goes unchecked; then the head is replaced.
    """
    if pretrained is False:
        return _create(name, seed, num_classes, **kwargs), (f"{name} starts from random weights",)
    if pretrained is True:
        model, rows, source = _from_hub(name, cfg, seed, kwargs)
    else:
        model, rows, source = _from_state(name, cfg, pretrained, num_classes, seed, kwargs)
    if rows == num_classes:
        return model, (f"weights from {source}",)
    torch.default_generator.manual_seed(seed)
    model.reset_classifier(num_classes)
    if not num_classes:
        return model, (f"weights from {source}", "without their head")
    was = f"the weights' own has {rows}" if rows else "the weights have none"
    return model, (f"weights from {source}", f"new head with {num_classes} outputs ({was})")


def _from_hub(name: str, cfg: Any, seed: int, kwargs: dict[str, Any]) -> tuple[nn.Module, int, str]:
    file = weights.hub_file(name, cfg)
    if file is None:
        with weights.url_download(name):
            return _create(name, seed, cfg.num_classes, pretrained=True, **kwargs), cfg.num_classes, cfg.url
    overlay = {"file": str(file), "custom_load": False}
    model = _create(name, seed, cfg.num_classes, pretrained=True, pretrained_cfg_overlay=overlay, **kwargs)
    return model, cfg.num_classes, f"timm's hub ({cfg.hf_hub_id})"


def _from_state(name: str, cfg: Any, pretrained: str, num_classes: int, seed: int, kwargs: dict[str, Any]) -> tuple[nn.Module, int, str]:
    package = pretrained.removeprefix("package:") if pretrained.startswith("package:") else None
    if package is not None:
        state, path = weights.read_package(package)
        place = f"package {package}, {path.name}"
        model = _create(name, seed, weights.num_classes_in(state, cfg) or cfg.num_classes, **kwargs)
        state = weights.pair_in_order(model, state, place)
    else:
        place = pretrained
        state = weights.read_state(Path(pretrained))
        model = _create(name, seed, weights.num_classes_in(state, cfg) or num_classes, **kwargs)
    rows = (weights.num_classes_in(state, cfg) or 0) if weights.load_state(model, state, cfg, place) else 0
    return model, rows, place


def _normalisation(cfg: Any, pretrained: bool | str, in_chans: int) -> tuple[tuple[float, ...], tuple[float, ...], tuple[str, ...]]:
    """Mean and std per channel: the weights' own; for other channels their average, as the weights are summed or repeated over them."""
    mean, std = tuple(cfg.mean), tuple(cfg.std)
    notes: tuple[str, ...] = ()
    if isinstance(pretrained, str) and (known := weights.PACKAGES.get(pretrained.removeprefix("package:"))) is not None:
        mean, std = known.mean, known.std
        notes = (f"images are normalised with mean {mean[0]} and std {std[0]}, as in the package's training",)
    if len(mean) != in_chans:
        mean, std = (statistics.fmean(mean),) * in_chans, (statistics.fmean(std),) * in_chans
        spread = "" if pretrained is False else "; a first layer for 3 is summed or repeated over them"
        notes = (*notes, f"{in_chans} input channel(s): mean {mean[0]:.3f} and std {std[0]:.3f} for each{spread}")
    return mean, std, notes


def layers_of(model: nn.Module, *, coarse: bool) -> dict[str, int]:
    """Parameter name to layer number: 0 the stem, then the stages (coarse) or the blocks, then the head."""
    if hasattr(model, "group_matcher"):
        return group_parameters(model, model.group_matcher(coarse=coarse), reverse=True)
    return auto_group_layers(model)
