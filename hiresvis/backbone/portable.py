"""A model for those who have timm alone: what builds it again, in the layout of timm's own folders and hub repositories."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
from safetensors.torch import load_file
from torch import nn

from hiresvis.backbone.build import Backbone, weights_config

CONFIG, WEIGHTS = "config.json", "model.safetensors"  # the names that timm looks for


def timm_config(
    backbone: Backbone,
    *,
    classes: Sequence[str],
    image_size: tuple[int, int],
    mean: Sequence[float],
    std: Sequence[float],
    interpolation: str,
) -> dict[str, Any]:
    """config.json: architecture, arguments, class names, and what timm's own transforms want to know of the images.

    timm's transforms come near to the contract, not to its bits: the contract is the truth.
    """
    cfg = weights_config(backbone.name)
    arguments = {key: list(value) if isinstance(value, tuple) else value for key, value in backbone.arguments.items()}
    channels, num_classes = arguments["in_chans"], arguments.pop("num_classes")
    return {
        "architecture": backbone.name.partition(".")[0],
        "num_classes": num_classes,
        "label_names": list(classes),
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [channels, *image_size],
            "fixed_input_size": bool(cfg.fixed_input_size),
            "interpolation": interpolation,
            "crop_pct": 1.0,
            "crop_mode": "squash",
            "mean": list(mean),
            "std": list(std),
            "num_classes": num_classes,
            # timm adapts this layer to other channels than 3; these weights have their own number already, and older releases of it would
            # begin the layer anew
            "first_conv": cfg.first_conv if channels == 3 else None,
            "classifier": cfg.classifier,
            "custom_load": False,
        },
    }


def rebuild(folder: Path) -> nn.Module:
    """The model of such a folder, built by timm as the README shows it; in eval mode, on the CPU."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    model = timm.create_model(config["architecture"], num_classes=config["num_classes"], **config["model_args"]).eval()
    model.load_state_dict(load_file(folder / WEIGHTS))
    return model
