"""Plans in the loops that people have: compiled blocks, two calls a step, a head of one's own, loss scaling, added parameters, failures."""

from __future__ import annotations

import copy
import pickle
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch import nn

import hiresvis
from hiresvis.backbone.compiled import without_finer_ways
from hiresvis.backbone.segments import apply_segments
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.plan import Segment, uniform

VIT, RESNET = "vit_tiny_patch16_224", "resnet18"
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def logits_loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(images).float(), torch.arange(len(images)))


def train(
    lab, model: nn.Module, px: int, *, loss: Loss = logits_loss, dtype: torch.dtype | None = None, channels_last: bool = True
) -> dict[str, torch.Tensor]:
    """Three AdamW steps of two micro-batches, scaled in fp16: everything that they leave, and the last gradients."""
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype is torch.float16)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(7)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        for _ in range(2):
            images = torch.randn(2, 3, px, px, generator=generator)
            images = images.to(memory_format=torch.channels_last) if channels_last else images
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                value = loss(model, images)
            scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
    left = {name: value.clone() for name, value in model.state_dict().items()}
    left |= {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**left, "scale": torch.tensor(scaler.get_scale()), "random state": torch.get_rng_state()}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


def compare(lab, name: str, make: Callable[[], nn.Module], segments: tuple[Segment, ...], modules: list[tuple[str, ...]], **how) -> None:
    """The bare model and one with the plan, trained alike, end with the same bits."""
    px, _ = lab.SMALL[name]
    bare, model = train(lab, make(), px, **how), make()
    apply_segments(model, segments, modules)
    assert differing(bare, train(lab, model, px, **how)) == []


def mixed(lab, name: str) -> tuple[tuple[Segment, ...], list[tuple[str, ...]]]:
    profile = lab.small_profile(name)
    return lab.mixed_plan(profile), lab.unit_modules(profile)


# Compiled blocks.


@pytest.fixture(autouse=True)
def _nothing_compiled():
    """What a test compiles is not another's."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def compile_blocks(model: nn.Module, profile: MemoryProfile, backend: str) -> nn.Module:
    for unit in profile.units:
        if unit.kind == "block" and unit.name in unit.modules:
            model.get_submodule(unit.name).compile(backend=backend)
    return model


def whole_again(lab, name: str) -> tuple[Segment, ...]:
    """Every tier that is left for compiled units: the mixed plan of costs without finer ways."""
    profile = lab.small_profile(name)
    return lab.mixed_plan(without_finer_ways(profile, compile_blocks(lab.narrow(name), profile, "eager")), shift=6)


# torch, while it compiles a block after the first one; not ours to change.
compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ on the CPU: no g++ here")],
    ),
]


@compiles
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [VIT, RESNET])
def test_compiled_blocks_train_to_the_same_bits(lab, name: str, backend: str) -> None:
    """Blocks compiled one by one, then the plan: as the compiled model without it; segments of several blocks, nests and the host too."""
    profile, segments = lab.small_profile(name), whole_again(lab, name)
    assert {segment.tier for segment in segments} >= {"store", "recompute", "offload"}
    assert any(len(segment.passes) > 1 for segment in segments)

    def make() -> nn.Module:
        return compile_blocks(lab.narrow(name), profile, backend)

    if backend == "inductor":  # compiling what is in no cache yet moves the random state, with a plan or without
        train(lab, make(), lab.SMALL[name][0])
    compare(lab, name, make, segments, lab.unit_modules(profile))


@compiles
def test_a_compiled_block_stays_compiled_under_a_plan_and_after_it(lab) -> None:
    """The compiler sees no graph that it would not see without the plan, and after removal the compiled call is the one from before."""
    profile, seen = lab.small_profile(VIT), []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    model = compile_blocks(lab.make_model(VIT, drop_path=0.0), profile, backend)
    block = model.blocks[0]
    before = block._compiled_call_impl
    images = torch.randn(2, 3, 64, 64)
    model(images).sum().backward()
    graphs = len(seen)
    handle = apply_segments(model, uniform(profile, 2), lab.unit_modules(profile))
    assert block._compiled_call_impl is not before
    model(images).sum().backward()
    handle.remove()
    model(images).sum().backward()
    assert block._compiled_call_impl is before
    assert "forward" not in block.__dict__
    assert len(seen) == graphs > 0


def test_finer_tiers_of_a_compiled_block_are_refused(lab) -> None:
    """Kept outputs and passes cannot see into a compiled graph: refused by name before anything is wrapped, also for a compiled part."""
    segments, modules = mixed(lab, VIT)
    for part in ("blocks.0", "blocks.0.mlp", "blocks.3"):
        model = lab.make_model(VIT)
        model.get_submodule(part).compile(backend="eager")
        with pytest.raises(ValueError, match=rf"'{part[:8]}' is compiled, and the plan keeps .*plan again with the model compiled"):
            apply_segments(model, segments, modules)
        assert not any("forward" in module.__dict__ for module in model.modules())


@compiles
def test_a_plan_for_a_compiled_model_runs_its_blocks_again_as_a_whole(lab) -> None:
    """`plan_memory` of a model that is compiled already uses no kept output, pass or slice of a compiled block, and applies."""
    model = lab.make_model(VIT)
    found = hiresvis.plan_memory(model, image_size=64, budget="200MiB", batch=400, precision="fp32")
    assert any(segment.keep or any(segment.passes) or segment.slices for segment in found.segments)
    compile_blocks(model, lab.small_profile(VIT), "eager")
    plan = hiresvis.plan_memory(model, image_size=64, budget="200MiB", batch=400, precision="fp32")
    assert plan.recomputed
    with hiresvis.apply_plan(model, plan):
        model(torch.randn(2, 3, 64, 64)).sum().backward()


@compiles
def test_compiling_after_the_plan_is_refused(lab) -> None:
    """A block, the whole model in place, and the whole model wrapped: the first call says in which order it works."""
    profile = lab.small_profile(VIT)
    for late in ("block", "model", "wrapper"):
        model = lab.make_model(VIT)
        run: Callable[..., torch.Tensor] = model
        apply_segments(model, uniform(profile, 1), lab.unit_modules(profile))
        if late == "wrapper":
            run = torch.compile(model, backend="eager")
        else:
            (model.blocks[1] if late == "block" else model).compile(backend="eager")
        with pytest.raises(RuntimeError, match="was compiled after a plan was applied to it; remove the plan, compile block by block"):
            run(torch.randn(2, 3, 64, 64))


@compiles
def test_what_is_compiled_as_a_whole_takes_no_plan(lab) -> None:
    """The model or a container of blocks compiled, or replaced by torch.compile's wrapper: refused when planning and when applying."""
    profile = lab.small_profile(VIT)
    whole, container, replaced = (lab.make_model(VIT) for _ in range(3))
    whole.compile(backend="eager")
    container.blocks.compile(backend="eager")
    replaced.blocks[1] = torch.compile(replaced.blocks[1], backend="eager")
    wrapper = torch.compile(lab.make_model(VIT), backend="eager")
    for model, said in (
        (whole, "the model is compiled as a whole"),
        (container, "'blocks' is compiled as a whole"),
        (replaced, r"'blocks\.1' is wrapped by torch\.compile"),
        (wrapper, r"the model is wrapped by torch\.compile"),
    ):
        with pytest.raises(ValueError, match=said):
            apply_segments(model, uniform(profile, 1), lab.unit_modules(profile))
        with pytest.raises(ValueError, match=said):
            hiresvis.plan_memory(model, image_size=64, budget="4GiB", batch=2, precision="fp32")


# Loops.


def twice_loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return (model(images) * model(images.flip(-1))).sum()


class Head(nn.Module):
    """A head of one's own on `forward_features`."""

    def __init__(self, backbone: nn.Module, features: int) -> None:
        super().__init__()
        self.backbone, self.own = backbone, nn.Linear(features, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.backbone.forward_features(images)
        return self.own(features.flatten(2).mean(2) if features.dim() == 4 else features.mean(1))


@pytest.mark.parametrize("name", [VIT, RESNET])
def test_a_model_called_twice_in_a_step(lab, name: str) -> None:
    """Two forwards, then one backward through both: each has its own second runs, and running statistics advance twice."""
    compare(lab, name, lambda: lab.narrow(name), *mixed(lab, name), loss=twice_loss)


@pytest.mark.parametrize("name", [VIT, RESNET])
def test_forward_features_with_a_head_of_ones_own(lab, name: str) -> None:
    """A plan of the backbone works where only `forward_features` is called: the head's units then never run."""
    px, _ = lab.SMALL[name]
    segments, modules = mixed(lab, name)

    def make() -> Head:
        return Head(lab.narrow(name), 192 if name == VIT else 128)

    bare, model = train(lab, make(), px), make()
    apply_segments(model.backbone, segments, modules)
    assert differing(bare, train(lab, model, px)) == []


@pytest.mark.parametrize(("name", "dtype"), [(VIT, torch.float16), (VIT, torch.bfloat16), (RESNET, torch.bfloat16)])
def test_autocast_and_loss_scaling(lab, name: str, dtype: torch.dtype) -> None:
    """bf16, and fp16 with a loss scaler: the scale ends as it does without the plan."""
    compare(lab, name, lambda: lab.narrow(name), *mixed(lab, name), dtype=dtype)


@pytest.mark.parametrize("name", [VIT, RESNET])
def test_a_model_row_by_row_in_memory(lab, name: str) -> None:
    """Weights and images not in channels-last order, under a plan that was traced in it."""

    def make() -> nn.Module:
        return lab.narrow(name).to(memory_format=torch.contiguous_format)

    compare(lab, name, make, *mixed(lab, name), channels_last=False)


class LowRank(nn.Module):
    """A frozen linear layer with a trained term of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.base(value) + self.up(self.down(value))


def with_low_rank(lab) -> nn.Module:
    model = lab.make_model(VIT).requires_grad_(False)
    model.head.requires_grad_(True)
    for block in model.blocks:
        block.attn.qkv = LowRank(block.attn.qkv)
        block.mlp.fc1 = LowRank(block.mlp.fc1)
    for part in model.modules():
        if isinstance(part, LowRank):
            part.down.requires_grad_(True)
            part.up.requires_grad_(True)
    return model


def test_parameters_that_were_added_to_frozen_layers(lab) -> None:
    """Terms of low rank in every block, all else frozen: planned with them, the same bits, and frozen parts get no gradient."""
    _, profile = lab.trace(with_low_rank(lab), (64, 64))
    segments = lab.mixed_plan(profile)
    assert {segment.tier for segment in segments} >= {"recompute", "keep"}
    compare(lab, VIT, lambda: with_low_rank(lab), segments, lab.unit_modules(profile))
    model = with_low_rank(lab)
    apply_segments(model, segments, lab.unit_modules(profile))
    assert {name.split(".")[-2] for name in train(lab, model, 64) if name.startswith("gradient")} == {"down", "up", "gradient of head"}


# Failures.


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("name", [VIT, RESNET])
def test_a_failed_second_run_leaves_nothing_behind(lab, name: str, error: type[BaseException]) -> None:
    """An error within each unit's second run in turn: buffers are the model's own with their values, the random state is that of the
    forward's end, no mode or hook stays on; once state is put back, the next steps give the bare run's bits."""
    px, _ = lab.SMALL[name]
    segments, modules = mixed(lab, name)
    bare, model = train(lab, lab.narrow(name), px), lab.narrow(name)
    before = copy.deepcopy(model.state_dict())
    apply_segments(model, segments, modules)
    fell = 0
    for segment in segments:
        if segment.tier == "store":
            continue
        inner = [part for part in model.get_submodule(modules[segment.end - 1][-1]).modules() if not any(True for _ in part.children())][-1]
        torch.manual_seed(3)
        loss = logits_loss(model, torch.randn(2, 3, px, px).to(memory_format=torch.channels_last))
        buffers = {key: (buffer, buffer.clone()) for key, buffer in model.named_buffers()}
        random = torch.get_rng_state()

        def fail(*_: object) -> None:
            raise error("in the middle")

        with ExitStack() as stack:
            stack.callback(inner.register_forward_pre_hook(fail).remove)
            try:
                loss.backward()
            except error:
                fell += 1
        assert torch.equal(random, torch.get_rng_state())
        for key, buffer in model.named_buffers():
            assert buffer is buffers[key][0]
            assert torch.equal(buffer, buffers[key][1]), key
        assert not torch.is_autocast_enabled("cpu")
        assert torch._C._len_torch_dispatch_stack() == 0
        model.zero_grad(set_to_none=True)
        del loss
    assert fell >= 3
    model.load_state_dict(before)
    assert differing(bare, train(lab, model, px)) == []


@pytest.mark.parametrize("name", [VIT, RESNET])
def test_a_copy_of_a_planned_model_is_a_model_of_its_own(lab, name: str) -> None:
    """What copies a model in training (an average of its weights) gets one that runs on its own weights, under a plan of its own."""
    px, _ = lab.SMALL[name]
    model = lab.narrow(name)
    apply_segments(model, *mixed(lab, name))
    bare = train(lab, lab.narrow(name), px)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert differing(bare, train(lab, copied, px)) == []
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_copy_is_made_between_steps_of_any_kind(lab) -> None:
    """Also when a segment's last unit was not called, and copies and pickles alike take nothing of a forward along."""
    profile, model = lab.small_profile(RESNET), lab.narrow(RESNET)
    names = [unit.name for unit in profile.units]
    first = names.index("layer4.1")
    assert names[first + 1] == "global_pool"
    alone = {index: Segment(index, index + 1) for index in range(len(names))}
    segments = (*(alone[index] for index in range(first)), Segment(first, first + 2, "offload"), *list(alone.values())[first + 2 :])
    apply_segments(model, segments, lab.unit_modules(profile))
    images = torch.randn(2, 3, 64, 64)
    model.forward_features(images).sum().backward()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.zero_grad()
        copied(images).sum().backward()
    assert all(parameter.grad is not None for parameter in copied.parameters())


def test_a_second_run_that_saves_other_tensors_raises() -> None:
    """As many tensors as in the forward but of another shape, as from another compiled graph: an error, never a wrong gradient."""

    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return value.exp().flatten().view(value.shape) if self.calls == 1 else value.flatten().exp().view(value.shape)

    model = nn.Sequential(nn.Linear(4, 4), Fickle(), nn.Linear(4, 4))
    apply_segments(model, [Segment(0, 1), Segment(1, 2, "recompute"), Segment(2, 3)], [("0",), ("1",), ("2",)])
    with pytest.raises(
        RuntimeError, match=r"recomputing 1 saves another tensor than its forward did: \(8,\) of torch\.float32, not \(2, 4\)"
    ):
        model(torch.randn(2, 4)).sum().backward()


def _sliced(lab, name: str = "vit_tiny_patch16_224"):
    """A small model, images, and a plan with every MLP in slices, by segments and modules."""
    model = lab.make_model(name, drop_path=0.0)
    profile = lab.small_profile(name)
    segments = []
    for index, unit in enumerate(profile.units):
        way = next((way for way in unit.ways if way.sliced), None)
        chunk = way and Segment(index, index + 1, "chunk", (way.passes,), way.keep, unit.sliceable)
        segments.append(chunk or Segment(index, index + 1))
    assert any(segment.slices for segment in segments)
    return model, torch.rand(2, 3, 64, 64), segments, [unit.modules for unit in profile.units]


def test_second_derivatives_through_slices_raise(lab) -> None:
    """A slice's own graph ends in its backward: a penalty on gradients would be silently wrong."""
    model, images, segments, names = _sliced(lab, "convnext_atto")
    apply_segments(model, segments, names)
    images.requires_grad_()
    (gradient,) = torch.autograd.grad(model(images).square().mean(), images, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


def test_a_hook_inside_what_runs_in_slices_raises(lab) -> None:
    """It would see parts without gradients; on the whole it is fine."""
    model, images, segments, names = _sliced(lab)
    apply_segments(model, segments, names)
    handle = model.blocks[1].mlp.act.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="bitwise"):
        model(images)
    handle.remove()
    model.blocks[1].mlp.register_forward_hook(lambda *_: None)
    model(images).sum().backward()


def test_a_copy_of_a_model_with_slices_trains_and_pickles(lab) -> None:
    """Its slices are its own: gradients land in the copy."""
    model, images, segments, names = _sliced(lab)
    apply_segments(model, segments, names)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(images).square().mean().backward()
        assert all(parameter.grad is not None for parameter in other.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_slices_of_what_is_no_token_wise_pair_are_refused(lab) -> None:
    """An edited plan does not fail in the middle of training."""
    model, _, segments, names = _sliced(lab)
    edited = [replace(segment, slices=("head",)) if segment.slices else segment for segment in segments]
    with pytest.raises(ValueError, match="slices"):
        apply_segments(model, edited, names)
