"""Models by name: heads, sizes, channels, random parts, and the messages for what does not go."""

from __future__ import annotations

import pytest
import torch

from hiresvis.backbone.build import build_backbone
from hiresvis.backbone.input_size import fit_input
from hiresvis.errors import RecipeError


def _message(name: str, **kwargs: object) -> str:
    arguments = {"num_classes": 2, "image_size": 224, "pretrained": False} | kwargs
    with pytest.raises(RecipeError) as caught:
        build_backbone(name, **arguments)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "size", "in_chans", "stride"),
    [
        ("vit_tiny_patch16_224", (224, 320), 3, 16),
        ("convnext_atto", (64, 96), 1, 32),
        ("swin_tiny_patch4_window7_224", (128, 192), 3, 32),
        ("resnet18", (100, 75), 5, 32),
    ],
)
def test_models_take_rectangles_channels_and_any_head(name: str, size: tuple[int, int], in_chans: int, stride: int) -> None:
    """A built model turns images of exactly the asked shape into the asked number of outputs."""
    backbone = build_backbone(name, num_classes=3, image_size=size, in_chans=in_chans, pretrained=False)
    with torch.no_grad():
        out = backbone.model.eval()(torch.zeros(2, in_chans, *size))
    assert out.shape == (2, 3)
    assert backbone.stride == stride
    assert len(backbone.mean) == len(backbone.std) == in_chans


@pytest.mark.parametrize(
    ("name", "size", "wanted"),
    [
        ("convnext_atto", 1000, "1000 is not a multiple of 32; 992 and 1024 are"),
        ("vit_tiny_patch16_224", (224, 1000), "1000 is not a multiple of 16; 992 and 1008 are"),
        ("hiera_tiny_224", (1000, 1010), "1000 is not a multiple of 32; 992 and 1024 are; 1010 is not a multiple of 32; 992 and 1024 are"),
        ("convit_tiny", (224, 320), "convit_tiny takes square images only, not 224x320; 320 works"),
        ("resnet18", 20, "20 is smaller than the stride of resnet18; at least 32 is needed"),
        ("efficientformer_l1", 448, "its own size, 224, works"),
    ],
)
def test_a_size_that_does_not_fit_names_the_nearest_that_do(name: str, size: int | tuple[int, int], wanted: str) -> None:
    """The message gives the value, the constraint, and sizes below and above that were tried and work."""
    message = _message(name, image_size=size)
    assert "model.image_size" in message
    assert wanted in message


def test_convolutional_models_take_any_size_from_their_stride_on() -> None:
    """A network that loses no pixels at an odd size is not held to multiples."""
    assert fit_input("resnet18", (1001, 333)).kwargs == {}
    assert fit_input("tf_efficientnet_lite0", (1000, 1000)).stride == 32


def test_unknown_names_and_tags_get_suggestions() -> None:
    """A misspelt model or a tag it does not have is answered with what there is."""
    assert "did you mean resnet18" in _message("resnet17")
    assert "a1_in1k" in _message("resnet18.imagenet")
    assert "model.name" in _message("resnet17")


def test_drop_path_is_set_or_refused() -> None:
    """Stochastic depth reaches the blocks of models that have it, and is a recipe error in those that have not."""
    model = build_backbone("convnext_atto", num_classes=2, image_size=64, pretrained=False, drop_path=0.2).model
    rates = [module.drop_prob for module in model.modules() if type(module).__name__ == "DropPath"]
    assert max(rates) == pytest.approx(0.2)
    assert "vgg11 has no drop path" in _message("vgg11", drop_path=0.2)


def test_random_parts_follow_from_the_seed_and_leave_the_global_state_alone() -> None:
    """The same seed gives the same weights whatever was drawn before; another seed others; torch's generator is untouched."""
    first = build_backbone("resnet18", num_classes=2, image_size=64, pretrained=False, seed=1).model.state_dict()
    torch.rand(7)
    before = torch.get_rng_state()
    again = build_backbone("resnet18", num_classes=2, image_size=64, pretrained=False, seed=1).model.state_dict()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[key], again[key]) for key in first)
    other = build_backbone("resnet18", num_classes=2, image_size=64, pretrained=False, seed=2).model.state_dict()
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
