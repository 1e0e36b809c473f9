"""timm's families under plans: the same bits, for a few of every kind at once, for all module by module in the slow step."""

from __future__ import annotations

import datetime
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from hiresvis.backbone.chain import find_chain
from hiresvis.backbone.host import HostMemory, Offloaded
from hiresvis.backbone.record import fake_copy
from hiresvis.backbone.segments import apply_segments
from hiresvis.memory.peak import StepSetting, predict_peak
from hiresvis.memory.plan import Segment, uniform

SHARDS = 32  # of the slow table; a few minutes each on one core


def _load() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "bench_families.py"
    spec = importlib.util.spec_from_file_location("bench_families", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


bench = _load()

# Several tensors handed along in tuples and lists; branches; classes of their own for tokens; blocks inside stages that do
# something themselves; batch statistics; shared position terms; and the plain ones.
QUICK = (
    "convit",
    "cspnet",
    "dla",
    "efficientvim",
    "efficientvit_msra",
    "ghostnet",
    "mobilenetv3",
    "pit",
    "pvt_v2",
    "regnet",
    "shvit",
    "starnet",
)


def _todays_modules() -> list[str]:
    """A part of all modules, another one each day; HIRESVIS_FAMILIES=all or =3/16 chooses."""
    wanted = os.environ.get("HIRESVIS_FAMILIES", "")
    if wanted == "all":
        return bench.modules()
    return bench.shard(bench.modules(), wanted or f"{datetime.date.today().toordinal() % SHARDS + 1}/{SHARDS}")


@pytest.mark.parametrize("module", QUICK)
def test_a_family_trains_to_the_same_bits_with_every_unit_recomputed(module: str) -> None:
    """Unit by unit, and in segments as long as the chain allows: loss, gradients, parameters, buffers, optimizer and random state after
    three steps, and each unit runs forward twice a step."""
    assert bench.quick(bench.family_of(module)) == {"recompute": "exact", "segments": "exact"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("module", _todays_modules())
def test_a_module_of_timm_is_planned_and_exact_in_every_tier(module: str) -> None:
    """All that the table says of it: planned, bit for bit the same in every tier that keeps the bits, slices within 1e-5."""
    row = bench.run(bench.family_of(module))
    assert not row.refused
    assert row.exact, (row.tiers, row.slices)


def test_shards_are_all_modules_once() -> None:
    """The parts of the table together are the whole, and differ by one module at most."""
    names = bench.modules()
    parts = [bench.shard(names, f"{number}/{SHARDS}") for number in range(1, SHARDS + 1)]
    assert sorted(name for part in parts for name in part) == names
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


class _Block(nn.Module):
    """A residual block over two tensors, the second of which only some outputs use."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8))

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], *, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, extra = pair
        return tokens + self.parts(tokens + extra) * scale, extra * tokens.mean()


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(_Block() for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        pair, scale = (tokens, tokens.flip(-1)), self.scale * 2
        for block in self.blocks:
            pair = block(pair, scale=scale)
        return pair[0] + pair[1]


class _TwoTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.encoder, self.head = nn.Linear(8, 8), _Encoder(), nn.Linear(8, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.stem(images)))


def test_blocks_inside_a_module_that_does_something_itself_are_units() -> None:
    """An encoder that prepares what its blocks share is opened, and blocks that hand on a tuple are linked."""
    mode, fake = fake_copy(_TwoTensors())
    with mode:
        chain = find_chain(fake, lambda: fake(torch.zeros(2, 5, 8)))
    assert chain.names == ("stem", *(f"encoder.blocks.{number}" for number in range(4)), "head")
    assert [unit.linked for unit in chain.units] == [False, False, True, True, True, False]


def _gradients(model: nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(images).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("passes", [(), ((), (), (), ()), ((3,), (2,), (4,), (1,))], ids=["at once", "nested", "nested in passes"])
@pytest.mark.parametrize("tier", ["recompute", "offload"])
def test_a_segment_of_blocks_that_hand_on_tuples_recomputes_to_the_same_bits(tier: str, passes: tuple[tuple[int, ...], ...]) -> None:
    """Tuples and keyword arguments, at once, nested and in passes, in host memory or not; and a second backward gives the same again."""
    torch.manual_seed(0)
    model, images = _TwoTensors(), torch.randn(2, 5, 8)
    expected = _gradients(model, images)
    names = [("stem",), *((f"encoder.blocks.{number}",) for number in range(4)), ("head",)]
    handle = apply_segments(model, [Segment(0, 1), Segment(1, 5, tier, passes), Segment(5, 6)], names)
    for _ in range(2):
        found = _gradients(model, images)
        assert all(torch.equal(value, found[name]) for name, value in expected.items())
    handle.remove()


def test_a_change_in_place_to_a_second_tensor_of_a_segment_raises() -> None:
    """Not only the input is looked at: what else a unit was given must be as it was."""
    model = _TwoTensors()
    scale = torch.ones(8)
    handle = apply_segments(model.encoder, [Segment(0, 1, "recompute")], [("blocks.0",)])
    tokens, _ = model.encoder.blocks[0]((torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 5, 8)), scale=scale)
    scale.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place after the forward"):
        tokens.sum().backward()
    handle.remove()


def _with_gaps() -> dict[str, torch.Tensor]:
    whole = torch.arange(2 * 5 * 6, dtype=torch.float32).reshape(2, 5, 6)
    return {
        "part of each row": whole[:, :, 1:],
        "all but the first token, turned": whole[:, 1:].transpose(1, 2),
        "expanded": torch.arange(6.0)[None, :, None].expand(2, 6, 4),
        "overlapping": torch.arange(8.0).unfold(0, 4, 1),
        "dense": whole.transpose(0, 2),
    }


@pytest.mark.parametrize("kind", _with_gaps())
def test_offloaded_tensors_come_back_as_they_lay(kind: str) -> None:
    """The same numbers and, where elements do not overlap, the same strides: in another layout kernels would add in another order."""
    tensor = _with_gaps()[kind]
    (found,) = Offloaded([tensor], HostMemory()).take()
    assert torch.equal(found, tensor)
    assert (found.stride() == tensor.stride()) == (kind != "overlapping")


class _Pair(nn.Module):
    """A block over two maps of the same size, each of which the next block needs whole."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Sequential(nn.Conv2d(16, 16, 1), nn.GELU(), nn.Conv2d(16, 16, 1), nn.GELU()) for _ in range(2))

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return one + self.other(other), other + self.one(one)


class _Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 1), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(_Pair() for _ in range(4))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        one = self.stem(images)
        other = one.flip(-1)
        for block in self.blocks:
            one, other = block(one, other)
        return self.head((one + other).mean((2, 3)))


@pytest.mark.parametrize("plan", ["stored", "alone", "pairs", "nested"])
def test_the_peak_of_blocks_that_hand_on_tuples_is_predicted(lab, plan: str) -> None:
    """What a second run needs besides its input, and gradients that wait beside the output's, are counted: within 1%."""
    torch.manual_seed(0)
    model = _Pairs().train().to(memory_format=torch.channels_last)
    _, profile = lab.trace(model, (16, 16))
    first = next(index for index, unit in enumerate(profile.units) if unit.name == "blocks.0")
    inner = {
        "stored": [],
        "alone": [Segment(first + n, first + n + 1, "recompute") for n in range(4)],
        "pairs": [Segment(first + n, first + n + 2, "recompute") for n in (0, 2)],
        "nested": [Segment(first, first + 4, "recompute", ((), (), (), ()))],
    }[plan]
    covered = {index for segment in inner for index in range(segment.start, segment.end)}
    stored = [Segment(index, index + 1) for index in range(len(profile.units)) if index not in covered]
    segments = tuple(sorted([*stored, *inner], key=lambda segment: segment.start))
    measured = lab.measure_steps(model, profile, segments, 33, fake=True)
    predicted = predict_peak(profile, segments, 33, StepSetting(accumulates=False, eval_batch=0)).counted_bytes
    # Run again all at once, a unit is taken to make both its outputs, though its second run may end before.
    above = 2 * profile.units[first].output.at(33) if plan in ("alone", "pairs") else 0
    assert measured.single * 0.99 <= predicted <= measured.single * 1.01 + above


class _Beside(nn.Module):
    """A block that works on its second map and hands the first one through."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Conv2d(16, 16, 1), nn.GELU(), nn.Conv2d(16, 16, 1))

    def forward(self, kept: torch.Tensor, small: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return kept, small + self.parts(small)


class _HandsThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 1), nn.Linear(16, 4)
        self.wide = nn.Sequential(nn.Conv2d(16, 64, 1), nn.GELU(), nn.Conv2d(64, 16, 1), nn.GELU())
        self.blocks = nn.ModuleList(_Beside() for _ in range(3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        kept = self.wide(self.stem(images))
        small = nn.functional.avg_pool2d(kept, 2)
        for block in self.blocks:
            kept, small = block(kept, small)
        return self.head(small.mean((2, 3)))


def test_a_tensor_that_later_units_only_hand_through_leaves_backward_to_its_maker(lab) -> None:
    """Its gradient comes once for all that were given it; what backward then holds is the maker's, and its peak is predicted."""
    torch.manual_seed(0)
    model = _HandsThrough().train().to(memory_format=torch.channels_last)
    _, profile = lab.trace(model, (16, 16))
    segments = uniform(profile, 1)
    measured = lab.measure_steps(model, profile, segments, 33, fake=True)
    predicted = predict_peak(profile, segments, 33, StepSetting(accumulates=False, eval_batch=0))
    assert predicted.counted_bytes == pytest.approx(measured.single, rel=0.01)
    assert "wide" in predicted.where
