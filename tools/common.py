"""What the planner's benchmarks share: published models at a size, and their traced costs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hiresvis.backbone.trace import trace_costs
from hiresvis.memory.costs import MemoryProfile


def make_model(name: str, px: int, classes: int) -> nn.Module:
    """The published model in training mode at this image side, with random weights."""
    torch.manual_seed(0)
    try:
        return timm.create_model(name, num_classes=classes, img_size=px).train()
    except TypeError:
        return timm.create_model(name, num_classes=classes).train()


def trace(
    model: nn.Module,
    name: str,
    px: int,
    classes: int,
    *,
    precision: str,
    block: int,
    channels_last: bool,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> MemoryProfile:
    """The model's costs at three channels, images as they come to the model."""
    return trace_costs(
        model,
        name=name,
        image_size=(px, px),
        in_chans=3,
        num_classes=classes,
        precision=precision,
        channels_last=channels_last,
        block=block,
        raw_image_bytes=0,
        make_optimizer=make_optimizer,
        optimizer_name="bench",
    )[1]
