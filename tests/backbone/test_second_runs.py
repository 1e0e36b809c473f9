"""What a second run must find as the first found it: buffers that a forward uses and changes, random numbers, borders of passes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from hiresvis.backbone import flops
from hiresvis.backbone.segments import apply_segments
from hiresvis.device import StorageCounter
from hiresvis.memory.plan import Segment

WIDTH = 16


class Centring(nn.Module):
    """Takes off a running mean that it has just moved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("constant", torch.ones(64, WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.linear(value)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * value.detach().mean(0))
        return torch.tanh(value - self.mean) * self.constant[0]


class Counting(nn.Module):
    """Puts another tensor in the buffer's place, and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        before, self.last = self.last, value.detach().mean(0)
        return torch.tanh(self.linear(value if before is None else value - before)) / self.calls


class Renorm(nn.BatchNorm1d):
    """A batch norm that uses its running statistics in training too."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        before = self.running_mean.clone()
        return torch.tanh(super().forward(value) - before)


def spectral() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


def stored_around(*middle: Segment) -> tuple[Segment, ...]:
    """Of a chain of six, the first and the last units stored."""
    return (Segment(0, 1), *middle, Segment(5, 6))


SEGMENTS = {
    "each alone": stored_around(*(Segment(index, index + 1, "recompute") for index in range(1, 5))),
    "at once": stored_around(Segment(1, 5, "recompute")),
    "nested, in passes": stored_around(Segment(1, 5, "recompute", ((1,), (), (1, 2), (1,)))),
    "on the host": stored_around(Segment(1, 5, "offload", ((), (), (), ()))),
}
NAMES = [(str(index),) for index in range(6)]


def chain(make: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(make() for _ in range(4)), nn.Linear(WIDTH, WIDTH)).train()


def train(model: nn.Module) -> dict[str, torch.Tensor]:
    """Three steps of two forwards and one backward: parameters, buffers and the last gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    random.seed(2)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        images = torch.randn(8, WIDTH, generator=generator)
        (model(images) * model(images.flip(0))).sum().backward()
        optimizer.step()
    left = {name: value.clone() for name, value in model.state_dict().items()}
    return left | {f"gradient of {name}": parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same(make: Callable[[], nn.Module], segments: tuple[Segment, ...]) -> None:
    bare, model = train(chain(make)), chain(make)
    apply_segments(model, segments, NAMES)
    planned = train(model)
    assert bare.keys() == planned.keys()
    assert [name for name, value in bare.items() if not torch.equal(value, planned[name])] == []


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("make", [Centring, Counting, Renorm, spectral, normed])
def test_a_buffer_that_a_forward_uses_and_changes(make: Callable[[], nn.Module], segments: tuple[Segment, ...]) -> None:
    """Changed in place or another put there: the second run begins with what the first began with, and leaves what the first left."""
    assert_same(make, segments)


def test_a_module_that_two_units_share() -> None:
    """One running mean that two units move in turn: each unit's second run begins with what that unit's first run began with."""
    shared = []

    def make() -> nn.Module:
        if not shared:
            shared.append(Centring())
        unit = nn.Sequential(nn.Linear(WIDTH, WIDTH), shared[0])
        return unit

    for segments in SEGMENTS.values():
        results = []
        for planned in (False, True):
            shared.clear()
            model = chain(make)
            if planned:
                apply_segments(model, segments, NAMES)
            results.append(train(model))
        assert [name for name, value in results[0].items() if not torch.equal(value, results[1][name])] == []


def test_values_are_held_only_of_buffers_that_change() -> None:
    """After the forward the plan holds the units' inputs and the values of running means: no constants, nothing of batch norm."""
    images = torch.randn(8, WIDTH, requires_grad=True)
    held = {}
    for make in (Centring, normed):
        model = chain(make)
        apply_segments(model, SEGMENTS["each alone"], NAMES)
        counter = StorageCounter(1)
        counter.track([*model.parameters(), *model.buffers(), images])
        before = counter.live_bytes
        with counter:
            loss = model(images)
            held[make] = counter.live_bytes - before
        del loss
    assert held[Centring] - held[normed] == 4 * WIDTH * 4


def test_a_second_run_that_changes_other_buffers_raises() -> None:
    """A buffer that only the second run changes: an error that names the unit, since nothing was held for it."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 2:
                self.mean.add_(1)
            return torch.tanh(value)

    model = nn.Sequential(nn.Linear(4, 4), Late(), nn.Linear(4, 4))
    apply_segments(model, [Segment(0, 1), Segment(1, 2, "recompute"), Segment(2, 3)], NAMES[:3])
    with pytest.raises(
        RuntimeError, match=r"recomputing 1 changes buffers of a Late that its forward did not change; plan again with spacing"
    ):
        model(torch.randn(2, 4)).sum().backward()


class Draws(nn.Module):
    """Draws in an operator that a plan may keep, and again after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = torch.native_dropout(self.first(value), 0.5, True)[0]
        return nn.functional.dropout(torch.tanh(self.second(value)), 0.5)


@pytest.mark.parametrize("tier", ["keep", "offload"])
@pytest.mark.parametrize("borders", [(), (2,)])
def test_a_kept_operator_that_draws_random_numbers(monkeypatch: pytest.MonkeyPatch, tier: str, borders: tuple[int, ...]) -> None:
    """As CUDA's fused attention with dropout: it is not run again, and what is drawn after it is the same all the same."""
    monkeypatch.setattr("hiresvis.backbone.segments.PRODUCTS", flops.PRODUCTS | {torch.ops.aten.native_dropout.default})
    for keep in ((0,), (1,), (0, 1, 2)):
        assert_same(Draws, stored_around(*(Segment(index, index + 1, tier, (borders,), keep) for index in range(1, 5))))


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(value) * random.uniform(0.5, 2.0))


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_python_s_own_random_numbers(segments: tuple[Segment, ...]) -> None:
    """Drawn again alike, and the generator ends where it does without a plan."""
    assert_same(Chooses, segments)
    planned = random.getstate()
    train(chain(Chooses))
    assert planned == random.getstate()


@pytest.mark.parametrize("borders", [(40,), (1, 40), (2, 3, 4, 40, 41)])
def test_borders_beyond_what_a_device_saves(borders: tuple[int, ...]) -> None:
    """A unit that saves fewer tensors here than where it was traced: passes that have nothing to fill are left out."""
    assert_same(Centring, stored_around(Segment(1, 5, "recompute", ((), borders, (), borders))))


def test_messages_name_the_unit_and_what_can_be_done() -> None:
    """A kept output that the unit itself changes, and one that is changed after it: which unit, and a remedy that the API has."""

    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.linear(value).mul_(2)

    class Hands(Doubles):
        def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            value = self.linear(value)
            return value, torch.tanh(value * 2)

    class Changes(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return pair[0].mul_(3) + pair[1]

    segments = [Segment(0, 1), Segment(1, 2, "keep", ((),), (0,)), Segment(2, 3)]
    remedy = r'plan again with spacing "off", or .* leaves the stage of this unit out .* `hiresvis doctor --verify MODEL`'
    for last, said in (
        (nn.Sequential(nn.Identity(), Doubles(), nn.Identity()), "in 1 .*mul_.* changes the output of operator 0, which the plan keeps; "),
        (
            nn.Sequential(nn.Identity(), Hands(), Changes()),
            r"cannot recompute 1: an output that the plan keeps was changed in place after the forward \(version 1, was 0\); ",
        ),
    ):
        apply_segments(last, segments, NAMES[:3])
        with pytest.raises(RuntimeError, match=said + remedy):
            last(torch.randn(3, WIDTH)).sum().backward()
