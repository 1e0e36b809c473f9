"""Freezing and module modes."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.layers import DropPath
from torch.nn.modules.batchnorm import _BatchNorm

from hiresvis.errors import RecipeError
from hiresvis.train.freezing import TrainMode, classifier_parameters, freeze, freeze_norm, needs_two_images, train_adapters, train_head_only


def test_stem_and_first_stages_are_frozen_by_name():
    """A ResNet's stem and two stages; the returned names are exactly the parameters without gradient."""
    model = timm.create_model("test_resnet", num_classes=3)
    names = freeze(model, 2)
    assert {name.split(".")[0] for name in names} == {"conv1", "bn1", "layer1", "layer2"}
    assert names == tuple(name for name, parameter in model.named_parameters() if not parameter.requires_grad)


def test_stem_alone_and_none():
    """stem is zero stages; none freezes nothing."""
    for value in ("stem", 0):
        model = timm.create_model("test_convnext", num_classes=3)
        assert {name.split(".")[0] for name in freeze(model, value)} == {"stem"}
    assert freeze(timm.create_model("test_convnext"), "none") == ()


def test_blocks_count_as_stages_in_a_plain_transformer():
    """Freezing 2 of a ViT takes embeddings and the first two blocks."""
    names = freeze(timm.create_model("test_vit", num_classes=3), 2)
    assert {"cls_token", "pos_embed", "patch_embed.proj.weight"} <= set(names)
    assert {name.split(".")[1] for name in names if name.startswith("blocks.")} == {"0", "1"}


def test_more_stages_than_there_are_is_an_error_with_the_number():
    """The message has the wanted and the available number."""
    with pytest.raises(RecipeError, match=r"model.freeze  9 stages to freeze, but the model has 4; give none, stem, or 0 to 4"):
        freeze(timm.create_model("test_resnet"), 9)


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext", "test_efficientnet"])
def test_freezing_all_stages_leaves_the_head_to_train(name):
    """With every stage frozen the classifier still learns."""
    model = timm.create_model(name, num_classes=3)
    with pytest.raises(RecipeError) as refused:
        freeze(model, 99)
    freeze(model, int(str(refused.value).rsplit(" ", 1)[1]))
    assert set(classifier_parameters(model)) <= {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_frozen_parts_stay_in_eval_mode_when_training_begins_again():
    """Neither batch statistics nor drop-path go on in frozen stages; the rest trains."""
    model = timm.create_model("test_resnet", num_classes=3, drop_path_rate=0.5)
    freeze(model, 3)
    mode = TrainMode(model)
    model.eval()
    mode()
    assert not any(module.training for stage in (model.bn1, model.layer1, model.layer2, model.layer3) for module in stage.modules())
    assert any(isinstance(module, DropPath) for module in model.layer3.modules())
    assert all(module.training for module in model.layer4.modules())
    before = {name: value.clone() for name, value in model.state_dict().items() if "running" in name}
    model(torch.randn(4, 3, 64, 64))
    changed = {name.split(".")[0] for name, value in before.items() if not torch.equal(value, model.state_dict()[name])}
    assert changed == {"layer4"}


def test_head_alone_is_trained():
    """adapt: head leaves gradients to the classifier; the body is in eval mode, dropout before the head is not."""
    model = timm.create_model("test_vit", num_classes=3, drop_rate=0.5)
    train_head_only(model)
    TrainMode(model)()
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == {"head.weight", "head.bias"}
    assert not any(module.training for module in model.blocks.modules())
    assert model.head_drop.training


def test_adapters_and_head_alone_are_trained():
    """adapt: lora: no norm, bias or weight of the body has a gradient, and its batch norms keep their statistics; drop-path is on."""
    model = timm.create_model("test_efficientnet", num_classes=3, drop_path_rate=0.5)
    names = train_adapters(model, rank=4, alpha=8, frozen=(), image_size=(64, 64), in_chans=3, seed=0)
    TrainMode(model)()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"{name}.{part}" for name in names for part in ("lora_a", "lora_b")} | {"classifier.weight", "classifier.bias"}
    assert not any(module.training for module in model.modules() if isinstance(module, _BatchNorm))
    assert any(module.training for module in model.modules() if isinstance(module, DropPath))


@pytest.mark.parametrize("name", ["test_vit", "test_convnext"])
def test_frozen_stages_get_no_adapters(name):
    """With freeze: 2, adapters begin after it, and what is frozen is in eval mode."""
    model = timm.create_model(name, num_classes=3)
    frozen = set(freeze(model, 2))
    size = (160, 160)
    names = train_adapters(model, rank=4, alpha=8, frozen=frozen, image_size=size, in_chans=3, seed=0)
    assert names
    assert not {f"{layer}.weight" for layer in names} & frozen
    all_layers = train_adapters(timm.create_model(name, num_classes=3), rank=4, alpha=8, frozen=(), image_size=size, in_chans=3, seed=0)
    assert set(names) == {layer for layer in all_layers if f"{layer}.weight" not in frozen}
    TrainMode(model)()
    stages = model.blocks if name == "test_vit" else model.stages
    assert [any(module.training for module in stage.modules()) for stage in stages][:3] == [False, False, True]


def test_a_model_that_adapters_cannot_reach_is_refused():
    """A network of 3x3 convolutions has no layer for them; with everything frozen there is none left."""
    given = {"rank": 4, "alpha": 8, "in_chans": 3, "seed": 0, "image_size": (160, 160)}
    with pytest.raises(
        RecipeError, match=r"model.adapt  lora, but the model has no linear layer and no 1x1 convolution to adapt, the head"
    ):
        train_adapters(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3)), frozen=(), **given)
    model = timm.create_model("test_vit", num_classes=3)
    frozen = [name for name, _ in model.named_parameters() if not name.startswith("head")]
    with pytest.raises(RecipeError, match="convolution outside of the frozen stages to adapt"):
        train_adapters(model, frozen=frozen, **given)


def test_head_without_a_classifier_is_refused():
    """A model without a head cannot be adapted by its head."""
    with pytest.raises(RecipeError, match=r"model.adapt  head, but the model has no classifier"):
        train_head_only(timm.create_model("test_vit", num_classes=0))


def test_frozen_norm_keeps_statistics_and_trains_weights():
    """Statistics stay through train mode and forwards; the affine weights get gradients."""
    model = timm.create_model("test_resnet", num_classes=3)
    names = freeze_norm(model)
    TrainMode(model, frozen_norm=names)()
    assert set(names) == {name for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    before = {name: value.clone() for name, value in model.state_dict().items() if "running" in name or "tracked" in name}
    model(torch.randn(4, 3, 64, 64)).sum().backward()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert model.bn1.weight.grad is not None
    assert model.layer1.training


@pytest.mark.parametrize(
    ("name", "px", "needs"),
    [
        ("test_resnet", 32, True),
        ("test_resnet", 64, False),
        ("resnest14d", 64, True),  # pools to a single pixel in its attention, whatever the image
        ("test_convnext", 32, False),
    ],
)
def test_networks_that_need_two_images_are_those_that_raise_on_one(name, px, needs):
    """What is told without computing anything is what torch does; the model, its mode and the random state stay as they are."""
    model = timm.create_model(name, num_classes=3).train()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    assert needs_two_images(model, (px, px), 3) == needs
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert all(module.training and not module._forward_pre_hooks for module in model.modules())
    image = torch.zeros(1, 3, px, px)
    if needs:
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            model(image)
        freeze_norm(model)
        assert not needs_two_images(model, (px, px), 3)
    model(image)
