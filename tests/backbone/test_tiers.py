"""Finer tiers: kept outputs, passes, nested segments and offload. The same bits as bare training, and the predicted peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from hiresvis.backbone.segments import apply_segments
from hiresvis.backbone.slices import why_not
from hiresvis.memory.costs import MemoryProfile, UnitCosts
from hiresvis.memory.peak import StepSetting, predict_peak
from hiresvis.memory.plan import Segment
from hiresvis.memory.prices import segment_flops

FAMILIES = ("vit_tiny_patch16_224", "convnext_atto", "resnet18", "tf_efficientnet_lite0", "swin_tiny_patch4_window7_224")
TOLERANCE = 0.01


def _cases(first: str, second: str, *, quick: tuple[str, ...]) -> list[object]:
    """Every family in both precisions; all but the quick ones in the first are slow."""
    return [
        (name, precision) if precision == first and name in quick else pytest.param(name, precision, marks=pytest.mark.slow)
        for name in FAMILIES
        for precision in (first, second)
    ]


def _alone(profile: MemoryProfile, number: int) -> tuple[Segment, ...]:
    """Each unit by itself, in its way of that number (counted around), so that neighbours differ in kind."""
    segments = []
    for index, unit in enumerate(profile.units):
        if not unit.ways:
            segments.append(Segment(index, index + 1))
            continue
        ways = [way for way in unit.ways if not way.sliced]
        way = ways[(number + index) % len(ways)]
        segments.append(Segment(index, index + 1, "keep" if way.keep else "recompute", (way.passes,), way.keep))
    return tuple(segments)


def _nested(profile: MemoryProfile, length: int) -> tuple[Segment, ...]:
    """Segments of that many units where the chain allows, unit by unit, each in the most passes it has."""
    segments: list[Segment] = []
    index = 0
    while index < len(profile.units):
        end = index
        while end < len(profile.units) and end - index < length and _can_nest(profile.units[end], first=end == index):
            end += 1
        if end - index < 2:
            segments.append(Segment(index, index + 1))
            index += 1
            continue
        passes = tuple(
            max((way.passes for way in unit.ways if not way.keep and not way.sliced), key=len) for unit in profile.units[index:end]
        )
        segments.append(Segment(index, end, "recompute", passes))
        index = end
    return tuple(segments)


def _can_nest(unit: UnitCosts, *, first: bool) -> bool:
    return bool(unit.ways) and unit.recomputable and (unit.opens_segment or not first)


def _offloaded(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    return tuple(segment if segment.tier == "store" else replace(segment, tier="offload") for segment in segments)


def _plans(profile: MemoryProfile) -> Iterator[tuple[str, tuple[Segment, ...]]]:
    yield "ways", _alone(profile, 0)
    yield "other ways", _alone(profile, 5)
    yield "nested", _nested(profile, 3)
    yield "offloaded nest", _offloaded(_nested(profile, 4))
    yield "offloaded ways", _offloaded(_alone(profile, 3))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_plans_of_this_file_use_every_tier(lab, name: str) -> None:
    """Kept outputs, several passes and both together occur in each family's plans; else the tests below would show nothing."""
    profile = lab.small_profile(name)
    ways = {(bool(segment.keep), any(segment.passes)) for _, plan in _plans(profile) for segment in plan if segment.tier != "store"}
    assert ways == {(False, False), (True, False), (False, True), (True, True)}
    assert any(segment.end - segment.start > 1 for segment in _nested(profile, 3))


def _train(lab, model: nn.Module, px: int, precision: str) -> dict[str, torch.Tensor]:
    """Three AdamW steps of two micro-batches: parameters, buffers, the last step's gradients, the random state."""
    optimizer = lab.make_optimizer(model)
    images = torch.randn(6, 3, px, px, generator=torch.Generator().manual_seed(1)).to(memory_format=torch.channels_last)
    torch.manual_seed(7)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        for part in images.split(3):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                logits = model(part)
            nn.functional.cross_entropy(logits.float(), torch.arange(3)).backward()
        optimizer.step()
    gradients = {f"gradient of {name}": parameter.grad.clone() for name, parameter in model.named_parameters()}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    return {**state, **gradients, "random state": torch.get_rng_state()}


@pytest.mark.parametrize(("name", "precision"), _cases("bf16", "fp32", quick=("vit_tiny_patch16_224", "tf_efficientnet_lite0")))
def test_every_tier_trains_to_the_same_bits(lab, name: str, precision: str) -> None:
    """Drop-path and dropout on, accumulation, running statistics: nothing differs from bare training."""
    px, _ = lab.SMALL[name]
    extra = {"proj_drop_rate": 0.1} if name.startswith(("vit", "swin")) else {}
    profile = lab.small_profile(name, precision)
    bare = _train(lab, lab.make_model(name, **extra), px, precision)
    for label, segments in _plans(profile):
        model = lab.make_model(name, **extra)
        with lab.applied(model, profile, segments):
            planned = _train(lab, model, px, precision)
        different = [key for key, value in bare.items() if not torch.equal(value, planned[key])]
        assert not different, f"{label}: {len(different)} differ, first {different[0]}"


@pytest.mark.parametrize(("name", "precision"), _cases("fp32", "bf16", quick=("vit_tiny_patch16_224", "resnet18", "convnext_atto")))
def test_every_tiers_peak_is_predicted(lab, name: str, precision: str) -> None:
    """33 images on fake tensors, accumulated and not: within 1% of counted storages. Transfers to the host are bounded from above:
    there the prediction is never below, and at most one segment's input above."""
    profile, model = lab.small_profile(name, precision), lab.make_model(name)
    for label, segments in _plans(profile):
        measured = lab.measure_steps(model, profile, segments, 33, fake=True)
        for kind in ("single", "accumulated"):
            setting = StepSetting(accumulates=kind == "accumulated", eval_batch=0)
            predicted = predict_peak(profile, segments, 33, setting).counted_bytes
            counted = getattr(measured, kind)
            slack = max((unit.input.at(33) + unit.ways[-1].kept.at(33) for unit in profile.units if unit.ways), default=0)
            above = slack if label.startswith("offloaded") else 0
            assert counted * (1 - TOLERANCE) <= predicted <= counted * (1 + TOLERANCE) + above, (
                f"{label}, {kind}: {predicted / counted - 1:+.2%}"
            )


def _sliced(profile: MemoryProfile) -> tuple[Segment, ...]:
    """Every unit that can in slices, by itself, in the last of its ways; two that follow each other as a nest."""
    segments: list[Segment] = []
    for index, unit in enumerate(profile.units):
        ways = [way for way in unit.ways if way.sliced]
        if not ways:
            segments.append(Segment(index, index + 1))
            continue
        before = segments[-1] if segments else None
        if len(ways) > 1 and before and before.tier == "chunk" and before.end - before.start == 1 and unit.recomputable and not before.keep:
            plain = next(way for way in reversed(ways) if not way.keep)
            segments[-1] = Segment(before.start, index + 1, "chunk", (*before.passes, plain.passes), (), (*before.slices, *unit.sliceable))
            continue
        way = ways[-1] if index % 3 else next(way for way in reversed(ways) if not way.keep)
        segments.append(Segment(index, index + 1, "chunk", (way.passes,), way.keep, unit.sliceable))
    return tuple(segments)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto", "swin_tiny_patch4_window7_224"])
def test_slices_give_the_same_gradients_but_for_the_order_of_sums(lab, name: str) -> None:
    """chunk: each gradient within 1e-5 of its norm, the loss within 1e-6, the peak predicted within 1%."""
    px, _ = lab.SMALL[name]
    profile, gradients, losses = lab.small_profile(name), [], []
    segments = _sliced(profile)
    assert sum(bool(segment.slices) for segment in segments) >= 2
    for planned in (False, True):
        model = lab.make_model(name)
        images = torch.randn(3, 3, px, px, generator=torch.Generator().manual_seed(1)).to(memory_format=torch.channels_last)
        torch.manual_seed(7)
        with lab.applied(model, profile, segments) if planned else nullcontext():
            loss = nn.functional.cross_entropy(model(images), torch.arange(3))
            loss.backward()
        losses.append(loss.detach())
        gradients.append({key: parameter.grad for key, parameter in model.named_parameters()})
    assert float(losses[1]) == pytest.approx(float(losses[0]), rel=1e-6)
    for key, expected in gradients[0].items():
        assert (gradients[1][key] - expected).norm() <= 1e-5 * expected.norm() + 1e-9, key
    measured = lab.measure_steps(lab.make_model(name), profile, segments, 33, fake=True)
    predicted = predict_peak(profile, segments, 33, StepSetting(accumulates=False, eval_batch=0)).counted_bytes
    assert predicted == pytest.approx(measured.single, rel=TOLERANCE)


def test_only_what_works_position_by_position_runs_in_slices() -> None:
    """MLPs and pointwise convolutions qualify; attention, squeeze-excite, a global response norm and active dropout are refused by name."""
    from timm.layers import ConvMlp, GlobalResponseNormMlp, Mlp, SqueezeExcite, SwiGLU
    from timm.models.vision_transformer import Attention

    assert why_not(Mlp(8, 32), (4, 64, 8)) is None
    assert why_not(SwiGLU(8, 32), (4, 64, 8)) is None
    assert why_not(ConvMlp(8, 32), (4, 8, 16, 16)) is None
    assert why_not(SqueezeExcite(32), (4, 32, 16, 16)) == "its output at one position depends on others"
    assert why_not(GlobalResponseNormMlp(8, 32), (4, 16, 16, 8)) == "GlobalResponseNorm may mix positions"
    assert "depends on others" in why_not(Attention(8, num_heads=2), (4, 64, 8))
    assert why_not(Mlp(8, 32, drop=0.5).train(), (4, 64, 8)) == "dropout draws random numbers"
    assert why_not(nn.Sequential(nn.Linear(8, 8)), (4, 64, 8)) == "it has no pair of linear layers or 1x1 convolutions"
    assert "no 8 slices" in why_not(Mlp(8, 32), (4, 7, 8))


def test_units_run_as_often_as_the_plan_says(lab) -> None:
    """Pre-hooks per unit of a ViT: once stored, twice recomputed, once more for each pass; in a nest of three the first two once more."""
    profile, model = lab.small_profile("vit_tiny_patch16_224"), lab.make_model("vit_tiny_patch16_224")
    blocks = [index for index, unit in enumerate(profile.units) if unit.kind == "block" and unit.ways]
    two_passes = next(way.passes for way in profile.units[blocks[0]].ways if len(way.passes) == 1)
    first, second, _, fourth = blocks
    segments = (
        *(Segment(index, index + 1) for index in range(first)),
        Segment(first, first + 1, "recompute", (two_passes,)),
        Segment(second, fourth + 1, "recompute", ((), two_passes, ())),
        *(Segment(index, index + 1) for index in range(fourth + 1, len(profile.units))),
    )
    calls: Counter[str] = Counter()
    for index in blocks:
        name = profile.units[index].name
        model.get_submodule(name).register_forward_pre_hook(partial(_count, calls, name))
    with lab.applied(model, profile, segments):
        nn.functional.cross_entropy(model(torch.zeros(2, 3, 64, 64)), torch.zeros(2, dtype=torch.int64)).backward()
    assert [calls[profile.units[index].name] for index in blocks] == [3, 3, 4, 2]


def _count(calls: Counter[str], name: str, *_: object) -> None:
    calls[name] += 1


@pytest.mark.parametrize("name", FAMILIES)
def test_recomputed_flops_are_those_that_run(lab, name: str) -> None:
    """FLOPs of a fake step under each plan, less those of the bare step, are what the plan is said to add."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from hiresvis.backbone.flops import forward_flops
    from hiresvis.backbone.record import fake_copy

    class Flops(TorchDispatchMode):
        total = 0
        recomputing = False

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if self.recomputing:
                self.total += forward_flops(func, args, out)
            return out

    from hiresvis.backbone import segments as module

    profile, px = lab.small_profile(name), lab.SMALL[name][0]
    run_again = module._SegmentRunner.run_again
    for label, segments in _plans(profile):
        mode, model = fake_copy(lab.make_model(name))
        flops = Flops()

        def counted(runner, *args, flops=flops):
            flops.recomputing = True
            try:
                run_again(runner, *args)
            finally:
                flops.recomputing = False

        module._SegmentRunner.run_again = counted
        try:
            handle = apply_segments(model, segments, [unit.modules for unit in profile.units])
            with mode, flops:
                model(torch.zeros(5, 3, px, px).to(memory_format=torch.channels_last)).sum().backward()
            handle.remove()
        finally:
            module._SegmentRunner.run_again = run_again
        assert flops.total == 5 * sum(segment_flops(profile, segment) for segment in segments), label


def test_a_kept_output_that_was_changed_is_refused(lab) -> None:
    """An operator's output that is kept and then written to: an error that names both operators, not a wrong gradient."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.linear(value).mul_(2.0).tanh()

    model = nn.Sequential(Block(), Block())
    handle = apply_segments(model, [Segment(0, 1, "keep", ((),), (0,)), Segment(1, 2)], [("0",), ("1",)])
    with pytest.raises(RuntimeError, match=r"mul_.* changes the output of operator 0, which the plan keeps"):
        model(torch.randn(3, 4))
    handle.remove()


def test_the_planner_keeps_no_output_that_is_changed_later(lab) -> None:
    """Operators whose output an in-place operator writes to are not offered for keeping."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(value).relu_().sin()).sin() + value

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())
            self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, lab.CLASSES))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks(value))

    _, profile = lab.trace(Model(), (16, 16))
    blocks = [unit for unit in profile.units if unit.name.startswith("blocks.")]
    assert blocks
    assert all(0 not in way.keep for unit in blocks for way in unit.ways)
    assert any(1 in way.keep for unit in blocks for way in unit.ways)
