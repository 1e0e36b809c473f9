"""What is trained and what is not: frozen stages, a frozen body, frozen batch statistics, and the module modes that go with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hiresvis.backbone.build import layers_of
from hiresvis.backbone.lora import PARTS, add_adapters
from hiresvis.backbone.record import fake_copy
from hiresvis.errors import Problem, RecipeError

Freeze = Literal["none", "stem"] | int


def freeze(model: nn.Module, freeze: Freeze) -> tuple[str, ...]:
    """Takes the stem, or the stem and the first n stages, out of training.

    Stages are timm's coarse parameter groups: the resolution levels of a pyramid, the blocks of a plain transformer. Follow with a
    `TrainMode`, which keeps the frozen part in eval mode: its batch statistics and drop-path would otherwise go on.

    Returns:
        The names of the frozen parameters, in the model's order.

    Raises:
        RecipeError: more stages than the model has.
    """
    if freeze == "none":
        return ()
    wanted = 0 if freeze == "stem" else int(freeze)
    layers = layers_of(model, coarse=True)
    head = {layers[name] for name in classifier_parameters(model) if name in layers}
    num_stages = (min(head) if head else max(layers.values()) + 1) - 1
    if not 0 <= wanted <= num_stages:
        message = f"{wanted} stages to freeze, but the model has {num_stages}; give none, stem, or 0 to {num_stages}"
        raise RecipeError([Problem(message, key="model.freeze")])
    frozen = []
    for name, parameter in model.named_parameters():
        if layers[name] <= wanted:
            parameter.requires_grad_(False)
            frozen.append(name)
    return tuple(frozen)


def train_head_only(model: nn.Module) -> tuple[str, ...]:
    """Takes everything but the classifier out of training; returns the names of the frozen parameters.

    Raises:
        RecipeError: the model has no classifier with parameters.
    """
    head = frozenset(classifier_parameters(model))
    if not head:
        raise RecipeError([Problem("head, but the model has no classifier to train; use full", key="model.adapt")])
    frozen = []
    for name, parameter in model.named_parameters():
        if name not in head:
            parameter.requires_grad_(False)
            frozen.append(name)
    return tuple(frozen)


def train_adapters(
    model: nn.Module, *, rank: int, alpha: float, frozen: Collection[str], image_size: tuple[int, int], in_chans: int, seed: int
) -> tuple[str, ...]:
    """Gives low-rank adapters to the model outside of its classifier, and takes all but the two out of training (`backbone.lora`).

    Norms stay as they are, affine weights and statistics (as in Hu et al. 2021): so no result depends on the micro-batch.

    Args:
        frozen: names of parameters whose layers get none (from `freeze`).

    Returns:
        The names of the layers that have adapters.

    Raises:
        RecipeError: no layer is left that could have one.
    """
    head = frozenset(classifier_parameters(model))
    without = head.union(frozen)
    adapted = add_adapters(model, rank=rank, alpha=alpha, image_size=image_size, in_chans=in_chans, without=without, seed=seed)
    if not adapted:
        where = " outside of the frozen stages" if frozen else ""
        message = f"lora, but the model has no linear layer and no 1x1 convolution{where} to adapt, the head aside; use full or head"
        raise RecipeError([Problem(message, key="model.adapt")])
    trained = head.union(f"{name}.{part}" for name in adapted for part in PARTS)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    return adapted


def freeze_norm(model: nn.Module) -> tuple[str, ...]:
    """Puts BatchNorm layers into eval mode, so that their statistics stay; their weights go on training.

    Returns:
        The layers' names, to hand to `TrainMode` (model.train() alone would wake them again).
    """
    names = tuple(name for name, module in model.named_modules() if isinstance(module, _BatchNorm))
    for name in names:
        model.get_submodule(name).eval()
    return names


def needs_two_images(model: nn.Module, image_size: tuple[int, int], in_chans: int) -> bool:
    """Whether a BatchNorm in train mode sees a single value per channel and image: of one image it then has no variance, and raises.

    It is so after a global pooling (in the attention or the head of some networks), and where the image is as small as the stride.
    A forward on fake tensors tells; the model is not changed.

    Args:
        model: in the mode it is trained in.
        image_size: (height, width) in px.
    """
    mode, fake = fake_copy(model)
    seen = []

    def see(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if module.training:
            batch, channels = args[0].shape[:2]
            seen.append(args[0].numel() // (batch * channels))

    for module in fake.modules():
        if isinstance(module, _BatchNorm):
            module.register_forward_pre_hook(see)
    with mode, torch.no_grad():
        fake(torch.zeros(2, in_chans, *image_size))
    return 1 in seen


def classifier_parameters(model: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of timm's classifier (two of them in distilled models)."""
    found = model.get_classifier() if hasattr(model, "get_classifier") else ()
    parts = found if isinstance(found, tuple | list) else (found,)
    owned = {id(parameter) for part in parts if isinstance(part, nn.Module) for parameter in part.parameters()}
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) in owned)


class TrainMode:
    """Calling it is `model.train()` for what is trained; frozen parts stay in eval mode (no drop-path, no new statistics).

    Args:
        model: with `requires_grad` already as it will be in training.
        frozen_norm: names of further layers that stay in eval mode (from `freeze_norm`).
    """

    def __init__(self, model: nn.Module, *, frozen_norm: Iterable[str] = ()) -> None:
        self._model = model
        self._still = (*_frozen_modules(model), *(model.get_submodule(name) for name in frozen_norm))

    def __call__(self) -> None:
        self._model.train()
        for module in self._still:
            module.eval()


def _frozen_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The largest submodules that have parameters, none of them trained."""
    parameters = list(module.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        yield module
        return
    for child in module.children():
        yield from _frozen_modules(child)
