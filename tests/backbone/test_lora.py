"""Low-rank adapters: which layers have them, what they compute, that they merge, and that plans see them as they are."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hiresvis.backbone.lora import LoraConv2d, LoraLinear, adapters, add_adapters, merged_state, remove_adapters
from hiresvis.memory.peak import StepSetting, predict_peak
from hiresvis.train.freezing import TrainMode, train_adapters

MODELS = {"test_vit": 64, "test_convnext": 64, "test_efficientnet": 64, "test_resnet": 64, "test_maxvit": 64}
TOLERANCE = 0.005


def adapted(name: str, px: int, *, rank: int = 8, classes: int = 3) -> nn.Module:
    """A small model with adapters whose second half is no longer zero."""
    torch.manual_seed(0)
    size = {"img_size": px} if "vit" in name else {}
    model = timm.create_model(name, num_classes=classes, **size).to(memory_format=torch.channels_last)
    train_adapters(model, rank=rank, alpha=16, frozen=(), image_size=(px, px), in_chans=3, seed=1)
    for _, layer in adapters(model):
        nn.init.normal_(layer.lora_b, std=0.02, generator=torch.Generator().manual_seed(2))
    return model


def images(px: int) -> torch.Tensor:
    return torch.randn(3, 3, px, px, generator=torch.Generator().manual_seed(3)).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", MODELS)
def test_training_begins_with_the_outputs_of_the_weights(name):
    """The first forward of an adapted model gives the plain one's bits in eval mode, and its values in train mode."""
    px = MODELS[name]
    model = timm.create_model(name, num_classes=3, **({"img_size": px} if "vit" in name else {})).eval()
    before = model(images(px))
    names = add_adapters(model, rank=4, alpha=16, image_size=(px, px), in_chans=3)
    assert names == tuple(name for name, _ in adapters(model))
    assert names
    assert torch.equal(model(images(px)), before)
    for _, layer in adapters(model):
        layer.train()
    torch.testing.assert_close(model(images(px)), before)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_merged_weights_give_the_bits_of_the_adapted_model(name, precision):
    """A plain model with the merged weights computes what the adapted one does in eval mode, to the last bit, under autocast too; in
    train mode the two products beside each other agree within rounding."""
    px = MODELS[name]
    model = adapted(name, px).eval()
    plain = timm.create_model(name, num_classes=3, **({"img_size": px} if "vit" in name else {})).to(memory_format=torch.channels_last)
    plain.load_state_dict(merged_state(model))  # strict: the very names of the plain model
    plain.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        expected = plain(images(px))
        assert torch.equal(model(images(px)), expected)
        for _, layer in adapters(model):
            layer.train()
        rounding = 1e-5 if precision == "fp32" else 0.05
        assert (model(images(px)) - expected).abs().max() <= rounding * expected.abs().max()
    assert list(merged_state(model)) == list(plain.state_dict())
    remove_adapters(model)
    assert [(name, type(layer)) for name, layer in model.named_modules()] == [(name, type(layer)) for name, layer in plain.named_modules()]
    assert list(model.state_dict()) == list(plain.state_dict())


def test_gradients_are_those_of_the_merged_weight():
    """The gradient of W + s B A by the chain rule, in float64: of A it is s B^T dW, of B it is s dW A^T; W and its bias have none."""
    torch.manual_seed(0)
    for plain, given in ((nn.Linear(6, 5), torch.randn(4, 7, 6)), (nn.Conv2d(6, 5, 1, stride=2), torch.randn(2, 6, 5, 5))):
        model = nn.Sequential(copy.deepcopy(plain))
        add_adapters(model, rank=2, alpha=3, image_size=tuple(given.shape[-2:]), in_chans=6)
        layer = model[0].double()
        nn.init.normal_(layer.lora_b)
        layer.weight.requires_grad_(False)
        given = given.double()
        layer.train()(given).square().sum().backward()
        whole = plain.double()
        with torch.no_grad():
            whole.weight.copy_(layer.merged())
        whole(given).square().sum().backward()
        full = whole.weight.grad.flatten(1)
        assert layer.scale == 1.5
        assert layer.weight.grad is None
        torch.testing.assert_close(layer.lora_a.grad.flatten(1), 1.5 * layer.lora_b.flatten(1).T @ full)
        torch.testing.assert_close(layer.lora_b.grad.flatten(1), 1.5 * full @ layer.lora_a.flatten(1).T)


def test_layers_that_have_adapters_are_the_wide_products():
    """Projections of attention and MLP, and 1x1 convolutions; not the head, larger kernels, grouped ones, nor frozen layers."""
    vit = adapted("test_vit", 64)
    assert {name.split(".", 2)[-1] for name, _ in adapters(vit)} == {"attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"}
    assert all(isinstance(layer, LoraLinear) for _, layer in adapters(vit))
    net = adapted("test_efficientnet", 64)
    assert all(isinstance(layer, LoraConv2d) and layer.kernel_size == (1, 1) and layer.groups == 1 for _, layer in adapters(net))
    others = [layer for layer in net.modules() if type(layer) is nn.Conv2d]
    assert others
    assert all(layer.kernel_size != (1, 1) or layer.groups > 1 for layer in others)


def test_a_weight_that_is_used_without_its_layer_gets_no_adapter():
    """BEiT adds a bias of its own to the product of qkv's weight: an adapter would not be seen there. Every one that is there learns."""
    model = timm.create_model("beit_base_patch16_224", num_classes=3, depth=2, embed_dim=48, num_heads=2, img_size=32)
    names = train_adapters(model, rank=2, alpha=4, frozen=(), image_size=(32, 32), in_chans=3, seed=0)
    assert {name.split(".", 2)[-1] for name in names} == {"attn.proj", "mlp.fc1", "mlp.fc2"}
    for _, layer in adapters(model):
        nn.init.normal_(layer.lora_b)
    TrainMode(model)()
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    silent = [name for name, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert not silent


@pytest.mark.parametrize(("sides", "rank", "own"), [((64, 64), 8, 8), ((8, 32), 8, 6), ((1, 5), 8, 1), ((300, 4), 8, 3)])
def test_a_layer_s_rank_is_limited_by_its_size(sides, rank, own):
    """No adapter has more numbers than the weight beside it, and alpha is divided by the layer's own rank."""
    model = nn.Sequential(nn.Linear(*sides))
    add_adapters(model, rank=rank, alpha=16, image_size=(1, sides[0]), in_chans=3)
    layer = model[0]
    assert (layer.lora_a.shape, layer.lora_b.shape) == ((own, sides[0]), (sides[1], own))
    assert layer.scale == 16 / own
    assert own == 1 or layer.lora_a.numel() + layer.lora_b.numel() <= layer.weight.numel()


def test_adapters_follow_from_the_seed_alone_and_are_given_once():
    """The global random state is as before; a second call changes nothing; another seed gives others."""
    random = torch.get_rng_state()
    first, again, other = (timm.create_model("test_vit", num_classes=3, img_size=64) for _ in range(3))
    random = torch.get_rng_state()
    for model, seed in ((first, 5), (again, 5), (again, 9), (other, 9)):
        add_adapters(model, rank=4, alpha=8, image_size=(64, 64), in_chans=3, seed=seed)
    assert torch.equal(random, torch.get_rng_state())
    halves = [torch.cat([layer.lora_a.flatten() for _, layer in adapters(model)]) for model in (first, again, other)]
    assert torch.equal(halves[0], halves[1])
    assert not torch.equal(halves[0], halves[2])


def lab_model(lab, name: str) -> nn.Module:
    """A model of the lab as it is trained by adapters."""
    px, _ = lab.SMALL[name]
    model = lab.make_model(name)
    train_adapters(model, rank=8, alpha=16, frozen=(), image_size=(px, px), in_chans=3, seed=0)
    TrainMode(model)()
    return model


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("vit_tiny_patch16_224", "fp32"),
        ("convnext_atto", "bf16"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("vit_tiny_patch16_224", "bf16"), ("convnext_atto", "fp32"))),
        *(pytest.param("tf_efficientnet_lite0", precision, marks=pytest.mark.slow) for precision in ("fp32", "bf16")),
    ],
)
def test_predicted_peak_is_that_of_real_steps(lab, name, precision):
    """Frozen weights keep nothing but what their inputs' gradients ask for: within 0.5% of counted storages, stored, at spacing 1 and in
    every tier that keeps the bits, accumulating or not."""
    px, _ = lab.SMALL[name]
    model = lab_model(lab, name)
    _, profile = lab.trace(model, (px, px), name=name, precision=precision)
    plans = {"off": lab.five_plans(profile)["off"], "1": lab.five_plans(profile)["1"], "mixed": lab.mixed_plan(profile)}
    for plan, segments in plans.items():
        measured = lab.measure_steps(model, profile, segments, 5, fake=False)
        for kind in ("single", "accumulated"):
            setting = StepSetting(accumulates=kind == "accumulated", eval_batch=0)
            ratio = predict_peak(profile, segments, 5, setting).counted_bytes / getattr(measured, kind)
            assert abs(ratio - 1) <= TOLERANCE, f"{plan}, {kind}: {ratio - 1:+.2%}"


def test_a_step_is_reckoned_at_the_flops_that_it_has(lab):
    """Forward, gradients of inputs, and of the few trained weights: within 10% of what torch counts (of the first block's backward only
    what its weights need is reckoned, and it is one of four), a third less than training everything."""
    name = "vit_tiny_patch16_224"
    px, _ = lab.SMALL[name]
    model = lab_model(lab, name)
    _, profile = lab.trace(model, (px, px), name=name)
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(2, 3, px, px)).sum().backward()
    assert 2 * profile.step_flops == pytest.approx(counter.get_total_flops(), rel=0.1)
    assert profile.step_flops < 0.75 * lab.small_profile(name).step_flops


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "tf_efficientnet_lite0"])
def test_a_planned_model_trains_to_the_same_bits(lab, name):
    """Three steps of two micro-batches, drop-path on, in every tier that keeps the bits: adapters, head and random state are those of
    training without a plan, and nothing else has moved."""
    px, _ = lab.SMALL[name]
    start = lab_model(lab, name)
    _, profile = lab.trace(start, (px, px), name=name)
    ends = []
    for segments in (lab.five_plans(profile)["off"], lab.mixed_plan(profile)):
        model = copy.deepcopy(start)
        optimizer = lab.make_optimizer(model)
        data = torch.randn(6, 3, px, px, generator=torch.Generator().manual_seed(1)).to(memory_format=torch.channels_last)
        torch.manual_seed(7)
        with lab.applied(model, profile, segments):
            for _ in range(3):
                for part in data.split(3):
                    nn.functional.cross_entropy(model(part), torch.arange(3)).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        ends.append({**model.state_dict(), "random": torch.get_rng_state()})
    assert not [key for key, value in ends[0].items() if not torch.equal(value, ends[1][key])]
    trained = {key for key, parameter in start.named_parameters() if parameter.requires_grad}
    moved = {key for key, value in start.state_dict().items() if not torch.equal(value, ends[0][key])}
    assert moved == trained


@pytest.mark.parametrize("name", ["test_vit", "test_efficientnet"])
def test_eight_images_are_learnt_by_heart(name):
    """Random labels of noise, with a head that does not move: through the adapters alone the loss goes to zero."""
    model = adapted(name, 64, classes=4)
    for part, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in part)
    nn.init.normal_(model.get_classifier().weight, std=0.3)  # as new, some heads are nearly zero
    TrainMode(model)()
    data = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(4))
    targets = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.0)
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(data), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert loss < 0.02
