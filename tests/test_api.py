"""The planner in anyone's own loop: what is predicted, what is changed, what is refused."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import timm
import torch
from torch import nn

import hiresvis
from hiresvis import api, verify
from hiresvis.device import StorageCounter
from hiresvis.memory.budget import CUDA_CONTEXT_BYTES, RESERVE_BYTES, RESERVE_SHARE
from hiresvis.memory.plan import CheckpointPlan

PX = 96
MIB = 2**20


def make(name: str = "test_resnet", *, seed: int = 0, **kwargs) -> nn.Module:
    torch.manual_seed(seed)
    return timm.create_model(name, **{"num_classes": 4, "drop_path_rate": 0.2, **kwargs}).train()


def plan(model: nn.Module, **changes) -> CheckpointPlan:
    return hiresvis.plan_memory(model, **{"image_size": PX, "budget": "4GiB", "batch": 8, **changes})


def budget_for(need_bytes: float) -> int:
    """A budget in which this much is left after the stated reserve."""
    return int((need_bytes + RESERVE_BYTES) / (1 - RESERVE_SHARE)) + 1


def tight_budget(**changes) -> int:
    """A budget for 0.8 of what 8 images of `make()` take with everything stored."""
    stored = plan(make(), spacing="off", micro_batch=8, **changes)
    return budget_for((stored.predicted_peak_bytes - stored.parts["reserve"]) * 0.8)


@pytest.fixture(scope="module")
def tight() -> int:
    """A budget that 8 images fit only with recompute."""
    return tight_budget()


@pytest.fixture(scope="module")
def recomputing() -> CheckpointPlan:
    """A plan of `make()` in fp32 for 8 images at once, some of it recomputed."""
    found = plan(make(), budget=tight_budget(precision="fp32"), micro_batch=8, precision="fp32")
    assert found.recomputed
    return found


@pytest.fixture(autouse=True)
def _one_thread():
    """Sums are reassociated by the number of threads, and the tests here compare bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(model: nn.Module, *, steps: int = 3, micro_batches: int = 2, count: int = 4) -> list[torch.Tensor]:
    """A plain loop: AdamW, clipping, gradients accumulated; everything that it leaves."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    for _ in range(steps):
        for _ in range(micro_batches):
            images = torch.rand(count, 3, PX, PX, generator=generator)
            (nn.functional.cross_entropy(model(images), torch.arange(count) % 4) / micro_batches).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    state = [value.clone() for value in model.state_dict().values()]
    return [*state, *(value for row in optimizer.state.values() for value in row.values()), torch.get_rng_state()]


def test_planning_changes_nothing(tight):
    """Weights, buffers, gradients, modes, hooks, attributes and random state are as before."""
    model = make()
    model.layer1.eval()
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    attributes = [dict(module.__dict__) for module in model.modules()]
    random_state = torch.get_rng_state()
    plan(model, budget=tight)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [dict(module.__dict__) for module in model.modules()] == attributes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_plan_stays_within_its_budget_and_wants_no_more_than_the_batch(tight):
    """Roomy: the whole batch, nothing recomputed. Tight: still the whole batch, some recomputed. Tighter: a part of it."""
    model = make()
    roomy, less = plan(model), plan(model, budget=tight)
    assert (roomy.micro_batch, roomy.accumulation, roomy.recompute_fraction) == (8, 1, 0)
    assert less.predicted_peak_bytes <= tight
    assert less.micro_batch < 8 or less.recomputed
    least = plan(model, budget=less.predicted_peak_bytes - MIB)
    assert least.predicted_peak_bytes <= less.predicted_peak_bytes - MIB
    assert least.micro_batch * least.accumulation >= 8
    assert plan(model, batch=2).micro_batch == 2
    pinned = plan(model, micro_batch=3)
    assert (pinned.micro_batch, pinned.accumulation) == (3, 3)


def test_frozen_parameters_and_modes_count_as_they_are():
    """A frozen stem and batch norms in eval mode keep less; the mask at planning time is the one that counts."""
    model = make()
    full = plan(model, spacing="off", micro_batch=8)
    for parameter in [*model.conv1.parameters(), *model.bn1.parameters(), *model.layer1.parameters()]:
        parameter.requires_grad_(False)
    frozen = plan(model, spacing="off", micro_batch=8)
    assert frozen.predicted_counted_bytes < full.predicted_counted_bytes
    assert frozen.parts["optimizer"] < full.parts["optimizer"]


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_the_prediction_is_what_a_plain_loop_takes(name):
    """On the CPU in fp32 the counted bytes of a real loop with torch's AdamW are within 1% of the prediction, and not above."""
    model = make(name, **({"img_size": PX} if name == "test_vit" else {}))
    predicted = plan(model, device="cpu", budget="8GiB", spacing=1, micro_batch=4, batch=4)
    counter = StorageCounter(64)
    counter.track([*model.parameters(), *model.buffers()])
    with hiresvis.apply_plan(model, predicted), counter:
        train(model, micro_batches=1)
    assert counter.peak_bytes == pytest.approx(predicted.predicted_counted_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, "bf16"),
        ({"device": "cpu"}, "fp32"),
        ({"budget": "A100-40GB"}, "bf16"),
        ({"budget": "T4"}, "fp16"),
        ({"precision": "fp32"}, "fp32"),
        ({"device": torch.device("cpu"), "precision": "bf16"}, "bf16"),
    ],
    ids=str,
)
def test_precision_follows_the_target(asked, found):
    """bf16 for a GPU that is not named, fp32 on the CPU, a card's own where one is named; what is asked for goes first."""
    target = api._target(**{"budget": "8GiB", "device": None, "precision": "auto", **asked})
    assert target.precision == found


def test_what_is_there_before_depends_on_the_target():
    """A size for a GPU has no baseline, a card has its context in it, the CPU the size of this process."""
    model = make()
    assert plan(model, budget=4 * 2**30).parts["baseline"] == 0
    card = plan(model, budget="T4")
    assert card.parts["baseline"] == CUDA_CONTEXT_BYTES
    assert card.budget_bytes < 16e9
    cpu = plan(model, device="cpu", budget="8GiB")
    assert cpu.parts["baseline"] > 100 * MIB


def test_a_model_elsewhere_is_planned_alike():
    """Only shapes count: a model on the meta device, which has no values, gives the same plan."""
    there = make().to("meta")
    assert plan(there, spacing=2).to_json() == plan(make(), spacing=2).to_json()
    assert all(parameter.device.type == "meta" for parameter in there.parameters())


def test_an_optimizer_of_ones_own_is_counted():
    """A function that builds it takes the place of a name; SGD without momentum has no state."""
    plain = plan(make(), optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert (plain.parts["optimizer"], plan(make(), optimizer="sgd").parts["optimizer"] > 0) == (0, True)


def test_training_is_the_same_bit_for_bit_in_a_plain_loop(recomputing):
    """Accumulated gradients, clipping, AdamW: weights, buffers, optimizer and random state equal those without the plan."""
    bare = train(make())
    model = make()
    handle = hiresvis.apply_plan(model, recomputing)
    counts = verify.count_forwards(model, recomputing.unit_modules)
    planned = train(model)
    handle.remove()
    assert len(bare) == len(planned)
    assert all(torch.equal(one, other) for one, other in zip(bare, planned, strict=True))
    assert max(counts.values()) > 3 * 2  # three steps of two micro-batches: some units ran again


def test_the_state_dict_is_that_of_the_bare_model(recomputing):
    """Keys do not change while a plan is applied, and the state loads into a bare model."""
    model = make()
    with hiresvis.apply_plan(model, recomputing):
        keys = list(model.state_dict())
        make(seed=1).load_state_dict(model.state_dict())
    assert keys == list(make().state_dict())


def test_a_removed_plan_leaves_the_model_as_it_was(recomputing):
    """No hook, no attribute, no check is left; removing twice is nothing; it can be applied again."""
    model = make()
    attributes = [{name: value for name, value in module.__dict__.items() if not name.startswith("_")} for module in model.modules()]
    handle = hiresvis.apply_plan(model, recomputing)
    handle.remove()
    handle.remove()
    after = [{name: value for name, value in module.__dict__.items() if not name.startswith("_")} for module in model.modules()]
    assert after == attributes
    assert not any(module._forward_pre_hooks for module in model.modules())
    model(torch.rand(9, 3, PX + 32, PX))  # neither planned size nor micro-batch
    hiresvis.apply_plan(model, recomputing).remove()


def test_a_plan_survives_json(recomputing):
    """A stored plan applies like the one that was made."""
    again = CheckpointPlan.from_json(json.loads(json.dumps(recomputing.to_json())))
    assert again == recomputing
    hiresvis.apply_plan(make(), again).remove()


def test_other_images_than_planned_are_refused_with_gradients(recomputing):
    """Another size or more images would need other memory: said, not done. Without gradients anything goes."""
    model, most = make(), recomputing.micro_batch
    with hiresvis.apply_plan(model, recomputing):
        with pytest.raises(ValueError, match=f"images of {PX}x{PX} px, and these have 128x{PX}"):
            model(torch.rand(1, 3, 128, PX))
        with pytest.raises(ValueError, match=f"micro-batch of {most}, and these are {most + 1} images"):
            model(x=torch.rand(most + 1, 3, PX, PX))
        model(torch.rand(most - 1, 3, PX, PX))  # the last batch of an epoch
        with torch.no_grad():
            model(torch.rand(most + 1, 3, 128, PX))


def _other_classes(model, found):
    return make(num_classes=5), found


def _other_architecture(model, found):
    return make("test_vit", img_size=PX), found


def _frozen_since(model, found):
    model.fc.requires_grad_(False)
    return model, found


def _other_torch(model, found):
    return model, replace(found, versions={**found.versions, "torch": "2.0.0"})


def _other_timm(model, found):
    return model, replace(found, versions={**found.versions, "timm": "1.0.0"})


class Around(nn.Module):
    """As DistributedDataParallel holds a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def _wrapped(model, found):
    return Around(model), found


def _applied(model, found):
    hiresvis.apply_plan(model, found)
    return model, found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_other_classes, r"for another model, .* made for ResNet with \d+ parameters in \d+ tensors.*, and this ResNet has"),
        (_other_architecture, "this VisionTransformer has"),
        (_frozen_since, r"other trained parameters: .* of them trained"),
        (_other_torch, r"made with torch 2\.0\.0, and this is torch"),
        (_other_timm, r"made with timm 1\.0\.0, and this is timm"),
        (_wrapped, r"for the model inside this Around; apply it to that: model\.module"),
        (_applied, "a plan is applied already"),
    ],
)
def test_a_plan_for_something_else_is_refused(recomputing, change, said):
    """Never a silent fallback: applying and verifying name what differs, and the model stays as it was."""
    model, found = change(make(), recomputing)
    before = [set(module.__dict__) for module in model.modules()]
    for function in (hiresvis.apply_plan, hiresvis.verify_plan):
        with pytest.raises(ValueError, match=said):
            function(model, found)
    assert [set(module.__dict__) for module in model.modules()] == before


def test_another_build_of_the_same_torch_is_the_same_release(recomputing):
    """A plan made with the CPU build applies on a machine with a GPU."""
    release = torch.__version__.partition("+")[0]
    hiresvis.apply_plan(make(), replace(recomputing, versions={**recomputing.versions, "torch": f"{release}+other"})).remove()


class OneModule(nn.Module):
    """A single module: nobody hands a tensor on."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.only(x).relu().mean(dim=(2, 3))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budget": "24"}, "has no unit; write 24GiB"),
        ({"budget": "lots"}, "is no size"),
        ({"budget": "T4", "device": "cpu"}, "is a card, and device is cpu"),
        ({"budget": "T4", "precision": "bf16"}, "T4 has no bf16"),
        ({"batch": 0}, "at least 1"),
        ({"micro_batch": 9}, "micro_batch 9 is neither auto nor between 1 and batch, 8"),
        ({"micro_batch": "large"}, "micro_batch 'large' is neither"),
        ({"goal": "best"}, "goal 'best' is neither largest nor fastest"),
        ({"exact": "roughly"}, "exact 'roughly' is neither bitwise nor close"),
        ({"spacing": "wide"}, "spacing 'wide'"),
        ({"spacing": {"stage0": 0}}, "numbers by stage"),
        ({"spacing": {"stage9": 1}}, r"has no stage stage9; it has .*stage0"),
        ({"precision": "int8"}, "int8"),
        ({"optimizer": "lion"}, "lion"),
        ({"device": "mps"}, "mps"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(changes, said):
    """Each with its value and what would do."""
    with pytest.raises(ValueError, match=said):
        plan(make(), **changes)


def test_models_that_cannot_be_planned_say_why():
    """A size that the model refuses, a single module, nothing to train, a plan that is applied."""
    with pytest.raises(ValueError, match=r"VisionTransformer cannot be run on images of 3x100x100: .*100"):
        plan(make("test_vit", img_size=PX), image_size=100)
    with pytest.raises(ValueError, match="OneModule is no chain"):
        plan(OneModule())
    with pytest.raises(ValueError, match="no parameter of ResNet requires a gradient"):
        plan(make().requires_grad_(False))
    model = make()
    with hiresvis.apply_plan(model, plan(model, spacing=1)), pytest.raises(ValueError, match="a plan is applied already"):
        plan(model)


def test_a_budget_below_the_weights_tells_what_is_needed():
    """Before any image: weights, gradients, optimizer, reserve, each with its size, and their sum."""
    model = make(num_classes=200_000)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    with pytest.raises(hiresvis.DoesNotFit, match="before the first image") as refused:
        plan(model, budget=weights)
    assert refused.value.need_bytes > 4 * weights
    assert refused.value.budget_bytes == weights
    assert refused.value.largest_part[0] == "optimizer's state"


def test_images_that_do_not_fit_tell_how_far_off():
    """One image at the tightest plan, the need, and ways out in this function's own words."""
    with pytest.raises(hiresvis.DoesNotFit, match=r"Micro-batch 1 of ResNet at 1024x1024 px does not fit: .*image_size \d+") as refused:
        plan(make(), image_size=1024, budget=budget_for(20 * MIB), batch=4)
    assert refused.value.need_bytes > refused.value.budget_bytes
    assert "memory." not in str(refused.value)
    assert "model." not in str(refused.value)


def test_a_plan_is_verified(recomputing):
    """Three steps are equal bit for bit, stored units ran once a step, recomputed ones more often, and the model is untouched."""
    model = make()
    before = copy.deepcopy(model.state_dict())
    found = hiresvis.verify_plan(model, recomputing, image_size=64)
    assert (found.steps, found.micro_batch, found.image_size, found.tolerance) == (3, 2, (64, 64), 0)
    stored = {recomputing.unit_modules[s.start][0] for s in recomputing.segments if s.tier == "store" and recomputing.unit_modules[s.start]}
    assert {found.forwards[name] for name in stored} == {1}
    assert max(found.forwards.values()) >= 2
    assert "equal bit for bit" in str(found)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    hiresvis.apply_plan(model, recomputing).remove()


class Counting(nn.Module):
    """A block that is never the same twice: it counts its calls outside of any buffer."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.calls = block, 0

    def forward(self, x):
        self.calls += 1
        return torch.sin(self.block(x) * self.calls)


def test_the_first_difference_is_named():
    """A block whose second run is another one gives wrong gradients: the step and a gradient are named."""
    model = make(drop_path_rate=0.0)
    model.layer1[0] = Counting(model.layer1[0])
    found = plan(model, precision="fp32", spacing=1)
    with pytest.raises(hiresvis.HiresvisError, match=r"step 1: the gradient of \S+ differs with the plan: \d+ of \d+ values, by "):
        hiresvis.verify_plan(model, found, image_size=64)


def test_a_difference_in_buffers_is_seen(monkeypatch):
    """A second run that advanced batch statistics again would leave equal gradients: the buffer is named."""
    model = make(drop_path_rate=0.0)
    found = plan(model, precision="fp32", spacing=1)
    monkeypatch.setattr("hiresvis.backbone.segments._cloned_buffers", lambda values: nullcontext())
    with pytest.raises(hiresvis.HiresvisError, match=r"step 1: the buffer \S+ differs"):
        hiresvis.verify_plan(model, found, image_size=64)


def test_what_reassociates_sums_needs_leave_and_is_held_to_rounding():
    """At the tightest budget a transformer's plan cuts its perceptrons in slices unless exact is bitwise; it is verified by norms."""
    model = make("vit_tiny_patch16_224", img_size=PX, depth=4)
    asked = {"batch": 64, "micro_batch": 64, "precision": "fp32"}
    with pytest.raises(hiresvis.DoesNotFit) as refused:
        plan(model, budget=4 * sum(parameter.nbytes for parameter in model.parameters()) + 70 * MIB, **asked)
    close = plan(model, budget=int(refused.value.need_bytes * 1.04), **asked)
    assert any(segment.slices for segment in close.segments)
    assert 0 < hiresvis.verify_plan(model, close).tolerance <= 1e-3
    with pytest.raises(hiresvis.DoesNotFit):
        plan(model, budget=int(refused.value.need_bytes * 1.04), exact="bitwise", **asked)


def test_plans_that_reassociate_sums_are_held_to_a_tolerance():
    """Where a plan has such a tier, norms are compared; a difference beyond rounding is an error there too."""
    one = torch.linspace(0, 1, 1000)
    assert verify._difference(one, one * (1 + 1e-6), tolerance=1e-4) is None
    assert verify._difference(one, one * (1 + 1e-6), tolerance=0) is not None
    assert verify._difference(one, one * 1.01, tolerance=1e-4) is not None
    assert verify._difference(torch.tensor([float("nan")]), torch.tensor([float("nan")]), tolerance=0) is None
    assert verify._difference(torch.arange(3), torch.arange(1, 4), tolerance=1e-4) == "3 of 3 values, by 1 at most"
    assert verify._difference(one, None, tolerance=0) == "there is none with it"


def test_a_step_tells_of_all_that_it_leaves() -> None:
    """Loss, random state, and every gradient, parameter, buffer and momentum: what `verify_plan` compares."""
    model = make()
    left = verify.Training(model, "fp32").step(torch.rand(2, 3, 96, 96), 1)
    parameters = [name for name, _ in model.named_parameters()]
    expected = {"loss", "random state", *(f"buffer {name}" for name, _ in model.named_buffers())}
    for kind in ("gradient of {}", "parameter {}", "optimizer state momentum_buffer of {}"):
        expected |= {kind.format(name) for name in parameters}
    assert set(left) == expected


class _Rearranges(nn.Module):
    """Takes pixels apart before its first convolution, as TResNet does."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Conv2d(48, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU()) for _ in range(3)]
        self.fold, self.blocks, self.head = nn.PixelUnshuffle(4), nn.Sequential(*blocks), nn.Linear(48, 5)

    def forward(self, images):
        return self.head(self.blocks(self.fold(images)).mean((2, 3)))


def test_a_model_that_rearranges_pixels_first_is_planned_and_verified():
    """The first convolution's 48 channels are not the images'."""
    model = _Rearranges()
    found = plan(model, image_size=64, batch=4, spacing=1, precision="fp32")
    assert hiresvis.verify_plan(model, found).micro_batch == 2
    assert api.image_channels(model, (64, 64)) == 3
    assert api.image_channels(nn.Sequential(nn.Conv2d(5, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2)), (8, 8)) == 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"image_size": "64"},
        {"image_size": (64,)},
        {"image_size": 64.5},
        {"image_size": True},
        {"batch": 2.5},
        {"batch": "8"},
        {"batch": 0},
        {"micro_batch": True},
        {"budget": True},
        {"budget": 1.5e9},
        {"budget": -5},
        {"spacing": 1.5},
    ],
)
def test_an_argument_that_is_none_is_named(wrong):
    """A slip of type or sign is a ValueError that names the argument and the value."""
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        plan(make(), **wrong)


def test_a_plan_is_made_inside_no_grad():
    """What is traced is training, wherever the call stands."""
    with torch.no_grad():
        assert plan(make()).micro_batch == 8


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"segments": []}, "end at unit 0"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"batch": "x"}, "batch"),
        ({"stages": None}, "no plan"),
    ],
)
def test_what_is_no_plan_is_refused_on_reading(recomputing, change, said):
    """Counts and segments are looked at before anything is applied."""
    with pytest.raises(ValueError, match=said):
        CheckpointPlan.from_json({**recomputing.to_json(), **change})


def test_a_plan_with_a_gap_or_an_unknown_tier_is_refused(recomputing):
    """Segments are the whole chain, each in a tier that there is."""
    row = recomputing.to_json()
    first = row["segments"][0]
    for changed, said in ((row["segments"][1:], "begins at unit"), ([{**first, "tier": "bogus"}, *row["segments"][1:]], "bogus")):
        with pytest.raises(ValueError, match=said):
            CheckpointPlan.from_json({**row, "segments": changed})
