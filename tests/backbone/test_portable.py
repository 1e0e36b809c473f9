"""A model handed on is built again by timm alone, from config.json and the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import _factory

from hiresvis.backbone.build import Backbone, build_backbone
from hiresvis.backbone.portable import CONFIG, WEIGHTS, rebuild, timm_config

MODELS = [
    ("test_resnet", (64, 96), 3, None),
    ("test_resnet.r160_in1k", 64, 1, 0.2),
    ("test_vit", (64, 96), 5, 0.1),  # built for one size
    ("test_convnext", 64, 4, None),
]


def hand_on(folder: Path, name: str, size: int | tuple[int, int], channels: int, drop_path: float | None) -> Backbone:
    made = build_backbone(name, num_classes=7, image_size=size, in_chans=channels, pretrained=False, drop_path=drop_path, seed=4)
    height, width = (size, size) if isinstance(size, int) else size
    config = timm_config(
        made,
        classes=[f"class {number}" for number in range(7)],
        image_size=(height, width),
        mean=made.mean,
        std=made.std,
        interpolation="bilinear",
    )
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(made.model.state_dict(), folder / WEIGHTS)
    return made


def logits(model: torch.nn.Module, size: int | tuple[int, int], channels: int) -> torch.Tensor:
    height, width = (size, size) if isinstance(size, int) else size
    with torch.no_grad():
        return model.eval()(torch.rand(2, channels, height, width, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(("name", "size", "channels", "drop_path"), MODELS)
def test_timm_builds_the_same_model_again(tmp_path, name, size, channels, drop_path):
    """Whatever its size, channels and drop path: the same logits, bit for bit."""
    made = hand_on(tmp_path, name, size, channels, drop_path)
    again = rebuild(tmp_path)
    assert torch.equal(logits(again, size, channels), logits(made.model, size, channels))
    config = json.loads((tmp_path / CONFIG).read_text())
    assert drop_path is None or config["model_args"]["drop_path_rate"] == drop_path
    # timm 1.0.15 begins that layer anew, with no more than a warning, where it is named and the channels are not 3
    assert (config["pretrained_cfg"]["first_conv"] is None) == (channels != 3)


@pytest.mark.skipif("local-dir" not in getattr(_factory, "_MODEL_SOURCES", ()), reason="this release of timm loads no local folders")
@pytest.mark.parametrize(("name", "size", "channels", "drop_path"), MODELS)
def test_the_folder_is_one_that_timm_itself_loads(tmp_path, name, size, channels, drop_path):
    """By its own name for such folders, weights and class names included; it could be a hub's repository as it is."""
    made = hand_on(tmp_path, name, size, channels, drop_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert torch.equal(logits(again, size, channels), logits(made.model, size, channels))
    assert again.pretrained_cfg["mean"] == list(made.mean)
    assert again.pretrained_cfg["label_names"][6] == "class 6"
