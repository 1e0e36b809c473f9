"""timm's models by name: their own sizes, and models without weights or memory to look at."""

from __future__ import annotations

import timm
import torch
from torch import nn

from hiresvis.backbone.input_size import fit_input


def default_sizes() -> dict[str, tuple[int, int, int]]:
    """Every model of timm with the image (channels, height, width) that its weights were made for."""
    return {name: timm.get_pretrained_cfg(name).input_size for name in timm.list_models()}


def bare_model(name: str, image_size: tuple[int, int], in_chans: int) -> tuple[nn.Module, int]:
    """A model with its own number of classes whose tensors are there and hold nothing, and its stride.

    Its pages are never touched, so the largest models take no memory; the values mean nothing.

    Raises:
        RecipeError: the model does not take this size.
    """
    fit = fit_input(name, image_size, in_chans)
    with torch.device("meta"):
        model = timm.create_model(name, in_chans=in_chans, **fit.kwargs)
    return model.to_empty(device="cpu").train(), fit.stride
