"""Chains found by watching: timm's families, and small models made to be difficult."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hiresvis.backbone.chain import Chain, find_chain
from hiresvis.backbone.record import fake_copy
from hiresvis.backbone.segments import apply_segments
from hiresvis.memory.plan import Segment

PX = {"swin_tiny_patch4_window7_224": 56, "eva02_tiny_patch14_224": 56}
EXTRA = {"eva02_tiny_patch14_224": {"img_size": 56, "depth": 3}}


def _chain(model: nn.Module, px: int = 64) -> Chain:
    """Found on fake tensors, with the real model left alone."""
    mode, fake = fake_copy(model)
    with mode:
        images = torch.zeros(2, 3, px, px)
        return find_chain(fake, lambda: fake(images))


def _family(lab, name: str) -> Chain:
    return _chain(lab.make_model(name, **EXTRA.get(name, {})), PX.get(name, 64))


EXPECTED = {
    "vit_tiny_patch16_224": ["stem: patch_embed", "blocks: blocks.0 blocks.1 blocks.2 blocks.3", "head: norm head"],
    "convnext_atto": [
        "stem: stem",
        "stage0: stages.0.blocks.0",
        "stage1: stages.1.downsample stages.1.blocks.0",
        "stage2: stages.2.downsample stages.2.blocks.0 stages.2.blocks.1",
        "stage3: stages.3.downsample stages.3.blocks.0",
        "head: head",
    ],
    "resnet18": [
        "stem: conv1 bn1+act1 maxpool",
        "stage0: layer1.0 layer1.1",
        "stage1: layer2.0 layer2.1",
        "stage2: layer3.0 layer3.1",
        "stage3: layer4.0 layer4.1",
        "head: global_pool fc",
    ],
    "tf_efficientnet_lite0": [
        "stem: conv_stem bn1",
        "stage0: blocks.0.0",
        "stage1: blocks.1.0 blocks.1.1",
        "stage2: blocks.2.0 blocks.2.1",
        "stage3: blocks.3.0 blocks.3.1 blocks.3.2",
        "stage4: blocks.4.0 blocks.4.1 blocks.4.2",
        "stage5: blocks.5.0 blocks.5.1 blocks.5.2 blocks.5.3",
        "stage6: blocks.6.0",
        "head: conv_head bn2 global_pool classifier",
    ],
    "swin_tiny_patch4_window7_224": [
        "stem: patch_embed",
        "stage0: layers.0.blocks.0 layers.0.blocks.1",
        "stage1: layers.1.downsample layers.1.blocks.0",
        "stage2: layers.2.downsample layers.2.blocks.0",
        "stage3: layers.3.downsample layers.3.blocks.0",
        "head: norm head",
    ],
    "eva02_tiny_patch14_224": ["stem: patch_embed", "blocks: blocks.0 blocks.1 blocks.2", "head: fc_norm head"],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_chain_of_a_family_is_its_blocks_in_order(lab, name: str) -> None:
    """Stem, every block, every transition and the head, under readable stages; a module that works in place joins its producer."""
    stages: dict[str, list[str]] = {}
    for unit in _family(lab, name).units:
        stages.setdefault(unit.stage, []).append("+".join(unit.modules))
    assert [f"{stage}: {' '.join(units)}" for stage, units in stages.items()] == EXPECTED[name]


def test_in_place_activations_join_the_unit_before(lab) -> None:
    """vgg11_bn: each batch norm and the in-place ReLU after it are one unit; convolutions and pools stand alone."""
    chain = _family(lab, "vgg11_bn")
    grouped = [unit.modules for unit in chain.units if len(unit.modules) > 1]
    assert len(grouped) == 8
    assert grouped[0] == ("features.1", "features.2")
    assert [name for unit in chain.units for name in unit.modules] == [*(f"features.{n}" for n in range(29)), "pre_logits", "head"]
    assert all(unit.opens_segment for unit in chain.units)


def test_kinds_tell_stem_block_downsample_norm_and_head(lab) -> None:
    """swin_tiny: each kind where it belongs."""
    kinds = {unit.name: unit.kind for unit in _family(lab, "swin_tiny_patch4_window7_224").units}
    assert (kinds["patch_embed"], kinds["layers.0.blocks.1"], kinds["layers.1.downsample"]) == ("stem", "block", "downsample")
    assert (kinds["norm"], kinds["head"]) == ("norm", "head")


def test_watching_changes_nothing_and_leaves_no_hook(lab) -> None:
    """Buffers are as before, and later forwards are not watched."""
    model = lab.make_model("resnet18")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    chains = [_chain(model), _chain(model)]
    assert chains[0] == chains[1]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


class _Model(nn.Module):
    """Named parts and a forward over them."""

    def __init__(self, forward: Callable[[nn.Module, torch.Tensor], torch.Tensor], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self._forward = forward

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self._forward(self, images)


def _conv(chans: int = 3) -> nn.Module:
    return nn.Sequential(nn.Conv2d(chans, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1))


def test_a_module_that_is_called_twice_is_no_unit() -> None:
    """Shared weights: the module runs twice in a forward, so it is left to the glue."""
    model = _Model(lambda self, x: self.last(self.twice(self.twice(self.first(x)))), first=_conv(), twice=_conv(), last=_conv())
    assert not [name for name in _chain(model).names if name.startswith("twice")]
    assert {name.partition(".")[0] for name in _chain(model).names} == {"first", "last"}


def test_parallel_branches_are_not_opened() -> None:
    """A block whose children run side by side is one unit; what stands around it is found."""
    branches = _Model(lambda self, x: self.a(x) + self.b(x), a=_conv(), b=_conv())
    model = _Model(
        lambda self, x: self.last(self.middle(self.first(x))), first=nn.Conv2d(3, 3, 1), middle=branches, last=nn.Conv2d(3, 3, 1)
    )
    assert _chain(model).names == ("first", "middle", "last")


def test_a_unit_whose_input_is_changed_in_place_opens_no_segment() -> None:
    """The input's version after the forward tells; its neighbours may open segments."""

    def forward(self, images):
        first = self.a(images)
        second = self.b(first)
        first.mul_(2)
        return self.c(second)

    units = _chain(_Model(forward, a=nn.Conv2d(3, 3, 1), b=nn.Conv2d(3, 3, 1), c=nn.Conv2d(3, 3, 1))).units
    assert {unit.name: unit.opens_segment for unit in units} == {"a": True, "b": False, "c": True}
    assert {unit.name: unit.linked for unit in units} == {"a": False, "b": True, "c": False}


def test_an_operator_between_units_breaks_the_link() -> None:
    """The unit after it is found but may not join a segment of the one before."""
    model = _Model(lambda self, x: self.b(self.a(x) * 2), a=nn.Conv2d(3, 3, 1), b=nn.Conv2d(3, 3, 1))
    assert [(unit.name, unit.linked) for unit in _chain(model).units] == [("a", False), ("b", False)]


def test_a_residual_that_is_used_later_survives_recompute() -> None:
    """An early output is added again at the end: units stay a chain, and a segment over them gives the same gradients."""

    def forward(self, images):
        early = self.a(images)
        return self.d(self.c(self.b(early)) + early)

    torch.manual_seed(0)
    model = _Model(forward, **{name: nn.Conv2d(3, 3, 3, padding=1) for name in "abcd"})
    chain = _chain(model)
    assert chain.names == ("a", "b", "c", "d")
    assert [unit.linked for unit in chain.units] == [False, True, True, False]
    images = torch.randn(2, 3, 8, 8)
    model(images).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    handle = apply_segments(model, [Segment(0, 3, "recompute"), Segment(3, 4)], [unit.modules for unit in chain.units])
    model(images).square().sum().backward()
    handle.remove()
    assert all(torch.equal(parameter.grad, value) for parameter, value in zip(model.parameters(), expected, strict=True))


def test_blocks_that_share_extra_arguments_recompute_to_the_same_bits(lab) -> None:
    """eva02 hands position terms to every block: they are captured, and gradients are the bare model's."""
    name = "eva02_tiny_patch14_224"
    images = torch.randn(2, 3, 56, 56)
    gradients = []
    for planned in (False, True):
        model = lab.make_model(name, drop_path=0.0, **EXTRA[name])
        chain = _chain(model, 56)
        segments = [Segment(0, 1), Segment(1, 4, "recompute"), *(Segment(n, n + 1) for n in range(4, len(chain.units)))]
        handle = apply_segments(model, segments if planned else [], [unit.modules for unit in chain.units])
        model(images).square().sum().backward()
        handle.remove()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("name", ["densenet121", "tiny_vit_5m_224", "mobilenetv3_small_050", "regnetx_002", "mixer_s32_224"])
@pytest.mark.slow
def test_other_families_have_a_chain_of_several_units(lab, name: str) -> None:
    """Families that no rule was written for."""
    import timm

    torch.manual_seed(0)
    assert len(_chain(timm.create_model(name, num_classes=4).train(), 224).units) >= 5
