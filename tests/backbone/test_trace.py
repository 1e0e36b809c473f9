"""Costs traced on fake tensors against real steps, and FLOPs against figures counted by hand."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import timm
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hiresvis.backbone.flops import forward_flops
from hiresvis.backbone.trace import trace_costs
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.peak import StepSetting, predict_peak
from hiresvis.train.optim import build_optimizer

FAMILIES = ("vit_tiny_patch16_224", "convnext_atto", "resnet18", "tf_efficientnet_lite0", "swin_tiny_patch4_window7_224")
TOLERANCE = 0.005


def _differences(profile: MemoryProfile, segments, measured, batch: int) -> dict[str, float]:
    """Predicted over measured, less one, for one micro-batch per step and for two."""
    predicted = {
        kind: predict_peak(profile, segments, batch, StepSetting(accumulates=kind == "accumulated", eval_batch=0)).counted_bytes
        for kind in ("single", "accumulated")
    }
    return {kind: predicted[kind] / getattr(measured, kind) - 1 for kind in predicted}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_predicted_peak_is_that_of_real_steps(lab, name: str, precision: str) -> None:
    """At a batch beyond the traced ones, stored and recomputed, accumulated and not: within 0.5% of storages counted in real steps."""
    profile, model = lab.small_profile(name, precision), lab.make_model(name)
    plans = lab.five_plans(profile)
    for plan in ("off", "2") if precision == "fp32" else ("half",):  # the others: in the slow test below
        segments = plans[plan]
        measured = lab.measure_steps(model, profile, segments, 5, fake=False)
        for kind, difference in _differences(profile, segments, measured, 5).items():
            assert abs(difference) <= TOLERANCE, f"{plan}, {kind}: {difference:+.2%}"


@pytest.mark.parametrize("name", FAMILIES)
def test_predicted_peak_is_that_of_fake_steps_where_activations_rule(lab, name: str) -> None:
    """At 33 images, where weights hardly count: within 0.5% of storages counted in steps on fake tensors."""
    profile = lab.small_profile(name)
    segments = lab.five_plans(profile)["2"]
    measured = lab.measure_steps(lab.make_model(name), profile, segments, 33, fake=True)
    predicted = predict_peak(profile, segments, 33, StepSetting(accumulates=True, eval_batch=0))
    assert predicted.where != "optimizer step"
    for kind, difference in _differences(profile, segments, measured, 33).items():
        assert abs(difference) <= TOLERANCE, f"{kind}: {difference:+.2%}"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_predicted_peak_is_that_of_steps_for_every_plan(lab, name: str, precision: str) -> None:
    """Five plans in both precisions, 33 images on fake tensors and 5 real ones: within 0.5%."""
    profile, model = lab.small_profile(name, precision), lab.make_model(name)
    for plan, segments in lab.five_plans(profile).items():
        for fake, batch in ((True, 33), (False, 5)):
            measured = lab.measure_steps(model, profile, segments, batch, fake=fake)
            for kind, difference in _differences(profile, segments, measured, batch).items():
                assert abs(difference) <= TOLERANCE, f"{plan}, {kind}, {batch} images: {difference:+.2%}"


def test_a_frozen_stem_and_stages_save_nothing_and_get_no_gradient(lab) -> None:
    """Units whose parameters are frozen up to a point keep nothing, leave no gradients and cost no backward; the peak is still right."""
    model = lab.make_model("resnet18")
    for name in ("conv1", "bn1", "layer1", "layer2"):
        model.get_submodule(name).requires_grad_(False)
    _, profile = lab.trace(model, (64, 64))
    frozen = [unit for unit in profile.units if unit.name.startswith(("conv1", "bn1", "maxpool", "layer1", "layer2"))]
    assert len(frozen) == 7
    for unit in frozen:
        assert (unit.saves, unit.interior.at(8), unit.parameter_gradients, unit.input_gradient) == ((), 0, 0, False), unit.name
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert profile.gradients == sum(-(-parameter.nbytes // 64) * 64 for parameter in trained)
    assert profile.optimizer_state == pytest.approx(2 * profile.gradients, rel=0.01)
    whole = lab.small_profile("resnet18")
    assert profile.step_flops < 0.7 * whole.step_flops
    for segments in (lab.five_plans(profile)["off"], lab.five_plans(profile)["2"]):
        measured = lab.measure_steps(model, profile, segments, 5, fake=False)
        for kind, difference in _differences(profile, segments, measured, 5).items():
            assert abs(difference) <= TOLERANCE, f"{kind}: {difference:+.2%}"


@pytest.mark.parametrize("name", ["lion", "muon"])
def test_each_optimizers_state_is_counted_as_it_is(lab, name: str) -> None:
    """What real steps leave in the optimizer is what the trace of fake ones said."""
    model = timm.create_model("test_vit", num_classes=10).train()
    _, profile = trace_costs(
        model,
        name="test_vit",
        image_size=(160, 160),
        in_chans=3,
        num_classes=10,
        precision="fp32",
        channels_last=False,
        block=64,
        raw_image_bytes=160 * 160 * 3,
        make_optimizer=lambda traced: build_optimizer(traced, name=name, lr=1e-3),
        optimizer_name=name,
        clip_grad=1.0,
    )
    optimizer = build_optimizer(model, name=name, lr=1e-3)
    model(torch.rand(2, 3, 160, 160)).sum().backward()
    optimizer.step()
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    assert profile.optimizer_state == sum(-(-tensor.nbytes // 64) * 64 for tensor in tensors)


def test_a_rectangle_is_traced_as_it_is(lab) -> None:
    """(height, width) is not swapped (a ViT built for it would refuse) or squared: FLOPs are those of its tokens, and the peak is right."""
    model = lab.make_model("vit_tiny_patch16_224", img_size=(96, 32), depth=2)
    _, profile = lab.trace(model, (96, 32))
    by_name = {unit.name: unit for unit in profile.units}
    assert by_name["patch_embed"].flops.slope == 2 * (6 * 2) * 192 * 3 * 16 * 16
    assert by_name["blocks.0"].output.slope == (6 * 2 + 1) * 192 * 4
    assert profile.image_size == (96, 32)
    segments = lab.five_plans(profile)["1"]
    measured = lab.measure_steps(model, profile, segments, 5, fake=False)
    assert all(abs(difference) <= TOLERANCE for difference in _differences(profile, segments, measured, 5).values())


def test_tracing_changes_nothing(lab) -> None:
    """The model's weights, buffers, gradients, modes and the random state are as before."""
    model = lab.make_model("resnet18")
    model.layer1.eval()
    before = copy.deepcopy(model.state_dict())
    modes = {name: module.training for name, module in model.named_modules()}
    random = torch.get_rng_state()
    lab.trace(model, (64, 64))
    assert torch.equal(random, torch.get_rng_state())
    assert modes == {name: module.training for name, module in model.named_modules()}
    assert all(parameter.grad is None for parameter in model.parameters())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_evaluation_is_the_peak_of_a_forward_without_gradients(lab) -> None:
    """Predicted evaluation bytes at 7 images are those counted in a real evaluation forward."""
    model, profile = lab.make_model("convnext_atto").eval(), lab.small_profile("convnext_atto")
    counter = lab.StorageCounter(lab.BLOCK_BYTES)
    counter.track([*model.parameters(), *model.buffers()])
    resident = counter.live_bytes
    with torch.no_grad(), counter:
        model(torch.zeros(7, 3, 64, 64).to(memory_format=torch.channels_last))
    assert counter.peak_bytes - resident == profile.evaluation.at(7)


def test_the_largest_batch_keeps_every_tensor_below_two_to_the_31_elements(lab) -> None:
    """`max_batch` images stay below the limit, one more reaches it (the largest tensor of resnet18 is the stem's output)."""
    profile = lab.small_profile("resnet18")
    largest = 64 * 32 * 32
    assert profile.max_batch * largest < 2**31 <= (profile.max_batch + 1) * largest


def test_a_model_that_is_no_chain_is_refused(lab) -> None:
    """One module that does everything: an error that says that nothing can be planned."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 3))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.mean((2, 3)) @ self.weight.T

    with pytest.raises(ValueError, match="model is no chain of modules: only 0 found"):
        lab.trace(Whole(), (8, 8))


class _Flops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.total += forward_flops(func, args, out)
        return out


def _flops(run) -> int:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    counter = _Flops()
    with mode, counter:
        run()
    return counter.total


HAND_COUNTED = {
    "convolution": (lambda: nn.Conv2d(3, 8, 5, stride=2, padding=2)(torch.zeros(2, 3, 16, 12)), 2 * 2 * 8 * 8 * 6 * 3 * 25),
    "grouped convolution": (lambda: nn.Conv2d(8, 16, 3, padding=1, groups=4)(torch.zeros(2, 8, 6, 5)), 2 * 2 * 16 * 6 * 5 * 2 * 9),
    "depthwise convolution": (lambda: nn.Conv2d(8, 8, 7, padding=3, groups=8)(torch.zeros(1, 8, 6, 5)), 2 * 8 * 6 * 5 * 49),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 6, 2, stride=2)(torch.zeros(3, 4, 5, 7)), 2 * 3 * 4 * 5 * 7 * 6 * 4),
    "linear": (lambda: nn.Linear(10, 7)(torch.zeros(2, 5, 10)), 2 * 2 * 5 * 10 * 7),
    "linear without bias": (lambda: nn.Linear(10, 7, bias=False)(torch.zeros(5, 10)), 2 * 5 * 10 * 7),
    "batched product": (lambda: torch.bmm(torch.zeros(3, 4, 5), torch.zeros(3, 5, 6)), 2 * 3 * 4 * 5 * 6),
    "attention": (
        lambda: nn.functional.scaled_dot_product_attention(torch.zeros(2, 3, 9, 8), torch.zeros(2, 3, 11, 8), torch.zeros(2, 3, 11, 8)),
        2 * 2 * 3 * 9 * 11 * (8 + 8),
    ),
    "what is no product": (lambda: nn.GELU()(torch.zeros(100)).softmax(0), 0),
}


@pytest.mark.parametrize("name", HAND_COUNTED)
def test_flops_are_multiply_adds_times_two(name: str) -> None:
    """Each kind of product against its formula, groups included."""
    run, expected = HAND_COUNTED[name]
    assert _flops(run) == expected


def test_a_profile_survives_json(lab) -> None:
    """A traced profile read back is equal, so it predicts the same."""
    import json

    profile = lab.small_profile("resnet18")
    assert MemoryProfile.from_json(json.loads(json.dumps(profile.to_json()))) == replace(profile)
