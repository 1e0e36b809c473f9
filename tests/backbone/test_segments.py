"""Applied plans against plain training: the same bits, each unit run once or twice, nothing left behind."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import nn

from hiresvis.backbone.segments import apply_plan, apply_segments
from hiresvis.device import StorageCounter
from hiresvis.memory.peak import StepSetting
from hiresvis.memory.plan import Segment, store_all, uniform
from hiresvis.memory.search import Limits, Planner

FAMILIES = ("vit_tiny_patch16_224", "convnext_atto", "resnet18", "tf_efficientnet_lite0", "swin_tiny_patch4_window7_224")
DROPOUT = {"vit_tiny_patch16_224": {"proj_drop_rate": 0.1}, "swin_tiny_patch4_window7_224": {"proj_drop_rate": 0.1}}


def _whole_chain(profile) -> tuple[Segment, ...]:
    """Segments as long as the chain allows: only what cannot be recomputed breaks them."""
    segments: list[Segment] = []
    for index, unit in enumerate(profile.units):
        last = segments[-1] if segments else None
        if unit.recomputable and last and last.tier == "recompute" and last.end == index:
            segments[-1] = Segment(last.start, index + 1, "recompute")
        elif unit.recomputable and unit.opens_segment:
            segments.append(Segment(index, index + 1, "recompute"))
        else:
            segments.append(Segment(index, index + 1))
    return tuple(segments)


def _plans(profile) -> dict[str, tuple[Segment, ...]]:
    return {**{f"spacing {n}": uniform(profile, n) for n in (1, 2, 3)}, "whole chain": _whole_chain(profile)}


def _train(lab, model: nn.Module, px: int, *, precision: str = "fp32", micro_batches: int = 1, steps: int = 3):
    """Three AdamW steps; everything that training changes, and the last step's gradients."""
    optimizer = lab.make_optimizer(model)
    images = torch.randn(4 * micro_batches, 3, px, px, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(len(images)) % lab.CLASSES
    torch.manual_seed(7)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        for part, wanted in zip(images.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                logits = model(part.to(memory_format=torch.channels_last))
            (nn.functional.cross_entropy(logits.float(), wanted, reduction="sum") / len(images)).backward()
        optimizer.step()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    moments = {
        f"{number}.{key}": torch.as_tensor(value).clone()
        for number, row in optimizer.state_dict()["state"].items()
        for key, value in row.items()
    }
    return {"state": state, "gradients": gradients, "moments": moments, "random": {"cpu": torch.get_rng_state()}}


def _assert_same_bits(one, other) -> None:
    for part in one:
        assert one[part].keys() == other[part].keys(), part
        different = [key for key, value in one[part].items() if not torch.equal(value, other[part][key])]
        assert not different, f"{part}: {len(different)} of {len(one[part])} differ, first {different[0]}"


def _compare(lab, name: str, plans: Sequence[str], **how) -> None:
    px, _ = lab.SMALL[name]
    profile = lab.small_profile(name)
    extra = DROPOUT.get(name, {})
    bare = _train(lab, lab.make_model(name, **extra), px, **how)
    for plan in plans:
        model = lab.make_model(name, **extra)
        with lab.applied(model, profile, _plans(profile)[plan]):
            _assert_same_bits(bare, _train(lab, model, px, **how))


@pytest.mark.parametrize("name", FAMILIES)
def test_three_steps_give_the_same_bits_with_a_plan(lab, name: str) -> None:
    """Drop-path and dropout on, spacing 1 to 3 and segments over the whole chain: parameters, gradients, buffers, moments and random
    state are those of the bare run."""
    _compare(lab, name, ("spacing 1", "spacing 2", "spacing 3", "whole chain"))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_bits_under_autocast_and_accumulation(lab, name: str) -> None:
    """bf16 autocast and two micro-batches a step change nothing about it."""
    _compare(lab, name, ("spacing 2", "whole chain"), precision="bf16", micro_batches=2, steps=2)


def _count(calls: Counter[str], name: str, *_: object) -> None:
    calls[name] += 1


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_stored_units_run_once_and_recomputed_ones_twice(lab, name: str) -> None:
    """Forward pre-hooks per unit in one step: 1 where stored, 2 where recomputed, never 3; twice that for two micro-batches."""
    px, _ = lab.SMALL[name]
    profile, model = lab.small_profile(name), lab.make_model(name)
    for segments in (store_all(profile), *_plans(profile).values(), lab.five_plans(profile)["half"]):
        calls: Counter[str] = Counter()
        hooks = []
        expected = {}
        for segment in segments:
            for index in range(segment.start, segment.end):
                unit = profile.units[index]
                for module in unit.modules:
                    hooks.append(model.get_submodule(module).register_forward_pre_hook(partial(_count, calls, module)))
                    recomputed = segment.tier == "recompute" and any(
                        profile.units[i].saves or profile.units[i].interior.slope for i in range(segment.start, segment.end)
                    )
                    expected[module] = 2 if recomputed else 1
        with lab.applied(model, profile, segments):
            for times in (1, 2):
                model(torch.randn(2, 3, px, px)).sum().backward()
                counted = {module: calls[module] for module in expected}
                # a segment's last modules, from whose inside nothing is saved, may be left out of its second run
                assert all(times <= counted[module] <= times * expected[module] for module in expected)
                exact = [module for module in expected if any(True for _ in model.get_submodule(module).parameters())]
                assert {module: counted[module] for module in exact} == {module: times * expected[module] for module in exact}
        for hook in hooks:
            hook.remove()


def test_state_dict_keys_are_those_of_the_bare_model(lab) -> None:
    """Keys and modules' names are unchanged while a plan is applied, and a copy of the weights loads into a bare model."""
    profile, model, bare = lab.small_profile("resnet18"), lab.make_model("resnet18"), lab.make_model("resnet18")
    names = [name for name, _ in model.named_modules()]
    with lab.applied(model, profile, uniform(profile, 2)):
        assert list(model.state_dict()) == list(bare.state_dict())
        assert [name for name, _ in model.named_modules()] == names
        bare.load_state_dict(model.state_dict())


def _is_bare(model: nn.Module) -> bool:
    return not any("forward" in module.__dict__ for module in model.modules())


def test_a_removed_plan_leaves_the_model_as_it_was(lab) -> None:
    """After remove (also a second one) no module is wrapped, units run once, and steps give the bare run's bits."""
    profile, model = lab.small_profile("resnet18"), lab.make_model("resnet18")
    handle = apply_segments(model, uniform(profile, 2), lab.unit_modules(profile))
    assert not _is_bare(model)
    handle.remove()
    handle.remove()
    assert _is_bare(model)
    _assert_same_bits(_train(lab, lab.make_model("resnet18"), 64), _train(lab, model, 64))


class _Trouble(Exception):
    pass


def _raise(*_: object) -> None:
    raise _Trouble


@pytest.mark.parametrize("place", ["forward", "recompute", "backward"])
def test_after_an_exception_the_plan_goes_on_and_comes_off(lab, place: str) -> None:
    """An exception in the middle of a forward, of the second run, or of backward: the next steps still give the bare run's bits, with the
    plan and, once it is removed, without."""
    profile, model = lab.small_profile("resnet18"), lab.make_model("resnet18")
    before = copy.deepcopy(model.state_dict())
    handle = apply_segments(model, uniform(profile, 3), lab.unit_modules(profile))
    inner = model.layer2[1].conv2
    images = torch.randn(2, 3, 64, 64)
    if place == "forward":
        hook = inner.register_forward_pre_hook(_raise)
        with pytest.raises(_Trouble):
            model(images)
    else:
        loss = model(images).sum()
        hook = (
            inner.register_forward_pre_hook(_raise)
            if place == "recompute"
            else model.layer2[0].conv1.weight.register_hook(lambda _: _raise())
        )
        with pytest.raises(_Trouble):
            loss.backward()
        del loss
    hook.remove()
    model.zero_grad(set_to_none=True)
    model.load_state_dict(before)
    bare = _train(lab, lab.make_model("resnet18"), 64, steps=2)
    _assert_same_bits(bare, _train(lab, model, 64, steps=2))
    handle.remove()
    assert _is_bare(model)
    model.load_state_dict(before)
    _assert_same_bits(bare, _train(lab, model, 64, steps=2))


def test_buffers_are_the_models_own_after_a_failed_recompute(lab) -> None:
    """An exception in a second run leaves the running statistics of the first one, in the same tensors."""
    profile, model = lab.small_profile("resnet18"), lab.make_model("resnet18")
    with lab.applied(model, profile, uniform(profile, 3)):
        loss = model(torch.randn(2, 3, 64, 64)).sum()
        buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
        random = torch.get_rng_state()
        hook = model.layer2[1].conv2.register_forward_pre_hook(_raise)
        with pytest.raises(_Trouble):
            loss.backward()
        hook.remove()
    assert torch.equal(random, torch.get_rng_state())
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name][0]
        assert torch.equal(buffer, buffers[name][1]), name


def test_a_plan_for_another_model_is_refused(lab) -> None:
    """Missing modules are counted and the first named; nothing is wrapped."""
    profile, model = lab.small_profile("resnet18"), lab.make_model("convnext_atto")
    with pytest.raises(ValueError, match=r"the plan is for another model: \d+ of \d+ modules are missing, first 'conv1'"):
        apply_segments(model, uniform(profile, 1), lab.unit_modules(profile))
    assert _is_bare(model)


def test_a_second_plan_is_refused_while_one_is_applied(lab) -> None:
    """Apply raises and leaves the first plan in place."""
    profile, model = lab.small_profile("resnet18"), lab.make_model("resnet18")
    with lab.applied(model, profile, uniform(profile, 1)):
        with pytest.raises(ValueError, match="a plan is applied already"):
            apply_segments(model, uniform(profile, 2), lab.unit_modules(profile))
        assert not _is_bare(model)
    assert _is_bare(model)


def test_a_stored_plan_applies_from_json(lab) -> None:
    """A searched plan goes through JSON and back, and recomputes what it says."""
    import json

    profile, model = lab.small_profile("resnet18"), lab.make_model("resnet18")
    planner = Planner(profile, 2**40, StepSetting(accumulates=False, eval_batch=1), Limits(batch=2, spacing=2))
    candidate = planner.choose()
    plan = planner.plan(candidate, "given")
    again = type(plan).from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    calls: Counter[str] = Counter()
    model.layer1[0].register_forward_pre_hook(lambda *_: calls.update(["unit"]))
    handle = apply_plan(model, again)
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    handle.remove()
    assert calls["unit"] == 2


def test_forwards_without_gradients_are_untouched(lab) -> None:
    """In eval mode, and under no_grad, outputs are the bare model's and nothing is kept for a second run."""
    profile, model, bare = lab.small_profile("resnet18"), lab.make_model("resnet18"), lab.make_model("resnet18")
    images = torch.randn(2, 3, 64, 64)
    with lab.applied(model, profile, uniform(profile, 2)):
        with torch.no_grad():
            assert torch.equal(model(images), bare(images))
        model.eval()
        bare.eval()
        with torch.inference_mode():
            assert torch.equal(model(images), bare(images))
        output = model(images)
        assert torch.equal(output, bare(images))
        output.sum().backward()
        bare(images).sum().backward()
    for (name, one), other in zip(model.named_parameters(), bare.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


def test_backward_a_second_time_gives_the_same_gradients(lab) -> None:
    """With retain_graph the segment's tensors are there again; the second backward doubles the gradients exactly."""
    profile, model = lab.small_profile("vit_tiny_patch16_224"), lab.make_model("vit_tiny_patch16_224")
    with lab.applied(model, profile, uniform(profile, 2)):
        loss = model(torch.randn(2, 3, 64, 64)).sum()
        loss.backward(retain_graph=True)
        once = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, 2 * once[name]), name


def test_a_segment_whose_input_is_changed_in_place_raises() -> None:
    """The version of the kept input is checked before the second run; the message says what to do."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1))

    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            first = self.parts[0](images)
            second = self.parts[1](first)
            first.mul_(2)
            return self.parts[2](second)

    changes = Changes()
    handle = apply_segments(changes, [Segment(0, 1), Segment(1, 2, "recompute"), Segment(2, 3)], [("parts.0",), ("parts.1",), ("parts.2",)])
    loss = changes(torch.randn(1, 3, 4, 4)).sum()
    with pytest.raises(RuntimeError, match=r"cannot recompute parts\.1: its input was changed in place after the forward"):
        loss.backward()
    handle.remove()


def test_a_segment_that_does_something_else_the_second_time_raises() -> None:
    """Another number of saved tensors in the second run is an error, never a guess."""

    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.calls = 0

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return value * self.weight if self.calls > 1 else (value * self.weight).exp().exp()

    model = nn.Sequential(nn.Linear(4, 4), Fickle(), nn.Linear(4, 4))
    handle = apply_segments(model, [Segment(0, 1), Segment(1, 2, "recompute"), Segment(2, 3)], [("0",), ("1",), ("2",)])
    loss = model(torch.randn(2, 4)).sum()
    with pytest.raises(RuntimeError, match="does not do the same twice"):
        loss.backward()
    handle.remove()


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18"])
def test_no_activation_outlives_backward_and_the_loss(lab, name: str) -> None:
    """Counted by storage, without the garbage collector's help: after backward, and after a loss that is dropped unused, what is alive is
    what was before, gradients aside."""
    px, _ = lab.SMALL[name]
    profile, model = lab.small_profile(name), lab.make_model(name)
    counter = StorageCounter()
    counter.track([*model.parameters(), *model.buffers()])
    gc.collect()
    gc.disable()
    try:
        with lab.applied(model, profile, uniform(profile, 2)), counter:
            model(torch.randn(2, 3, px, px)).sum().backward()
            gradients = sum(parameter.grad.nbytes for parameter in model.parameters())
            before = counter.live_bytes
            for unused in (False, True, False):
                loss = model(torch.randn(2, 3, px, px)).sum()
                if not unused:
                    loss.backward()
                del loss
                assert counter.live_bytes == before
    finally:
        gc.enable()
    resident = sum(tensor.untyped_storage().nbytes() for tensor in (*model.parameters(), *model.buffers()))
    assert before == resident + gradients


def test_frames_die_with_the_graph(lab) -> None:
    """While the loss lives the plan keeps segment inputs only: far fewer bytes than the bare model keeps."""
    name = "vit_tiny_patch16_224"
    profile = lab.small_profile(name)
    kept = {}
    for plan, segments in (("off", store_all(profile)), ("1", uniform(profile, 1))):
        model = lab.make_model(name)
        counter = StorageCounter()
        counter.track([*model.parameters(), *model.buffers()])
        resident = counter.live_bytes
        with lab.applied(model, profile, segments), counter:
            loss = model(torch.randn(4, 3, 64, 64)).sum()
            kept[plan] = counter.live_bytes - resident
            del loss
    inputs = sum(unit.input.at(4) for unit in profile.units if unit.recomputable)
    assert kept["1"] < inputs * 1.2
    assert kept["1"] < kept["off"] / 5
