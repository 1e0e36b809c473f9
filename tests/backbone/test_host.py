"""Host memory for offloaded tensors. The branch for CUDA runs over CPU tensors, with stand-ins for streams and events."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn

from hiresvis.backbone import host
from hiresvis.backbone.host import HostMemory, Offloaded
from hiresvis.backbone.segments import apply_segments
from hiresvis.memory.peak import HOST_SLAB_BYTES, StepSetting, offloaded_bytes, predict_peak
from hiresvis.memory.plan import Segment, uniform
from hiresvis.memory.search import host_bytes

BATCH = 16
SLAB = 1024


@dataclass
class Gpu:
    """What would run on the device, in the order in which the program asks for it."""

    log: list[str] = field(default_factory=list)
    events: int = 0
    slabs: int = 0
    unpinned: int = 0

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """The log tells when the tensor's memory goes."""
        weakref.finalize(tensor.untyped_storage(), self.log.append, f"{name} goes")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """The device of these tests: every CPU tensor is taken for one that has streams."""
    found = Gpu()

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: Event) -> None:
            found.log.append(f"{self.name} waits for {event.name}")

        def wait_stream(self, other: Stream) -> None:
            found.log.append(f"{self.name} waits for {other.name}")

    class Event:
        def record(self, stream: Stream) -> None:
            self.name = f"copy {found.events}"
            assert (stream.name, current[-1].name) == ("copying", "copying")
            found.events += 1
            found.log.append(f"{self.name} asked for")

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def pinned() -> torch.Tensor:
        found.slabs += 1
        return torch.empty(SLAB, dtype=torch.uint8)

    def unpin() -> None:
        found.unpinned += 1

    current = [Stream("computing")]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copying"))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(host, "HOST_SLAB_BYTES", SLAB)
    monkeypatch.setattr(host, "_has_streams", lambda device: True)
    monkeypatch.setattr(host, "_pinned", pinned)
    monkeypatch.setattr(host, "_unpin", unpin)
    return found


def _offload(gpu: Gpu, memory: HostMemory, names: Sequence[str]) -> dict[str, Offloaded]:
    """One set by each owner of these names; the device tensors are watched, and dropped."""
    sets = {}
    for name in names:
        tensor = torch.randn(30, 20)
        gpu.watch(name, tensor)
        sets[name] = Offloaded([tensor], memory, name)
        del tensor
    return sets


def test_device_memory_goes_once_the_computing_stream_has_waited_for_the_copy(gpu: Gpu) -> None:
    memory = HostMemory()
    sets = _offload(gpu, memory, ("a", "b"))
    assert gpu.log == [
        "copying waits for computing",
        "copy 0 asked for",
        "computing waits for copy 0",
        "a goes",
        "copying waits for computing",
        "copy 1 asked for",
    ]
    gpu.log.clear()
    sets.pop("b").take()
    # The last set goes before anything comes back; then the next one is on its way.
    assert gpu.log == [
        "computing waits for copy 1",
        "b goes",
        "copying waits for computing",
        "copy 2 asked for",
        "computing waits for copy 2",
        "copying waits for computing",
        "copy 3 asked for",
    ]
    gpu.log.clear()
    sets.pop("a").take()
    assert gpu.log == ["computing waits for copy 3"]


def test_a_set_that_nobody_comes_for_is_waited_for(gpu: Gpu) -> None:
    """Backward raised after the next set was sent for; or there is no backward at all."""
    memory = HostMemory()
    sets = _offload(gpu, memory, ("a", "b"))
    sets["b"].take()
    assert sets["a"].here is not None
    gpu.watch("a again", sets["a"].here[0])
    gpu.log.clear()
    sets.clear()
    assert gpu.log == ["computing waits for copy 3", "a again goes"]
    _offload(gpu, memory, ("c",))
    assert gpu.log[-2:] == ["computing waits for copy 4", "c goes"]
    assert memory.leaving is None


def test_only_the_same_forwards_tensors_are_sent_for(gpu: Gpu) -> None:
    """Two forwards before their backwards: what the first one offloaded stays where it is."""
    memory = HostMemory()
    first, second = (_offload(gpu, memory, ("a", "b")) for _ in range(2))
    second.pop("b").take()
    assert second["a"].here is not None
    second.pop("a").take()
    assert first["b"].here is None
    first.pop("b").take()
    assert first["a"].here is not None


def _kinds() -> dict[str, torch.Tensor]:
    whole = torch.randn(2, 64, 16)
    return {
        "dense": whole.transpose(0, 2),
        "columns": whole[:, :, 3:11],
        "every other": torch.arange(50)[::2],
        "expanded": torch.randn(2, 1, 16).expand(2, 8, 16),
        "one of many": torch.randn(7, 5)[2:3, ::5],
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "truth": torch.rand(1030) > 0.5,
        "half": torch.randn(40, 9).bfloat16(),
        "conjugate": torch.randn(8, 9, dtype=torch.complex64).conj(),
    }


def test_tensors_come_back_as_they_lay_over_the_slabs_borders(gpu: Gpu) -> None:
    """Sets of all kinds of tensors, in slabs smaller than some of them."""
    before = list(_kinds().values())
    for found, tensor in zip(Offloaded(before, HostMemory()).take(), before, strict=True):
        assert torch.equal(found, tensor)
        assert (found.stride(), found.dtype) == (tensor.stride(), tensor.dtype)


def test_what_is_on_another_device_stays_there(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention kernel's seed and offset are on the CPU while all else is on the GPU (here: on no device, and on the CPU)."""
    moved, seed, other = torch.randn(5), torch.empty((), device="meta"), torch.randn(3)
    for streams in (True, False):
        monkeypatch.setattr(host, "_has_streams", lambda device, streams=streams: streams)
        one, two, three = Offloaded([moved, seed, other], HostMemory()).take()
        assert two is seed
        assert torch.equal(one, moved)
        assert torch.equal(three, other)
        assert one is not moved


def test_sets_of_other_sizes_take_no_more_of_the_host(gpu: Gpu) -> None:
    """Micro-batches of other sizes (the last of an epoch, another image size) share the slabs of the largest."""
    memory = HostMemory()

    def forward(batch: int) -> None:
        sets = [Offloaded([torch.zeros(batch, 100), torch.zeros(batch, 7)], memory, number) for number in range(4)]
        for found in reversed(sets):
            found.take()

    for batch in (10, 7, 5, 9, 10):
        forward(batch)
    assert gpu.slabs == 4 * 5  # 10 x 107 x 4 bytes in slabs of 1024
    forward(12)
    assert gpu.slabs == 4 * 6
    assert len(memory.free) == gpu.slabs


def test_a_plan_states_whole_slabs(lab) -> None:
    profile = lab.small_profile("vit_tiny_patch16_224")
    segments = [replace(segment, tier="offload") for segment in uniform(profile, 1) if segment.tier == "recompute"]
    for batch in (1, 1000):
        stated = host_bytes(profile, segments, batch)
        moved = [offloaded_bytes(profile, segment, batch) for segment in segments]
        assert stated == sum(-(-nbytes // HOST_SLAB_BYTES) for nbytes in moved) * HOST_SLAB_BYTES
    assert HOST_SLAB_BYTES.bit_count() == 1


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.other(torch.tanh(self.one(x)))


class _Model(nn.Module):
    """Blocks alike, so that one set more or less in transit tells."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 32, 1), nn.Linear(32, 4)
        self.blocks = nn.Sequential(*(nn.Sequential(_Block(), _Block()) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def _planned(lab, model: nn.Module):
    _, profile = lab.trace(model, (32, 32))
    segments = tuple(
        replace(segment, tier="offload") if profile.units[segment.start].name.startswith("blocks") else Segment(segment.start, segment.end)
        for segment in uniform(profile, 1)
    )
    assert sum(segment.tier == "offload" for segment in segments) == 8
    return profile, segments


def _model() -> nn.Module:
    torch.manual_seed(0)
    return _Model().train().to(memory_format=torch.channels_last)


def test_the_walk_counts_what_is_in_transit(lab, gpu: Gpu) -> None:
    """A whole step with the branch for CUDA holds what the walk predicts, and no set more."""
    model = _model()
    profile, segments = _planned(lab, model)
    measured = lab.measure_steps(model, profile, segments, BATCH, fake=False)
    assert gpu.slabs
    for counted, accumulates in ((measured.single, False), (measured.accumulated, True)):
        predicted = predict_peak(profile, segments, BATCH, StepSetting(accumulates=accumulates, eval_batch=0))
        assert counted == pytest.approx(predicted.counted_bytes, rel=1e-4)


def test_it_trains_to_the_same_bits(lab, gpu: Gpu) -> None:
    model = _model()
    profile, segments = _planned(lab, model)
    images = torch.randn(2, 3, 32, 32)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(images).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    bare = gradients()
    with lab.applied(model, profile, segments):
        assert all(torch.equal(one, other) for one, other in zip(gradients(), bare, strict=True))
    assert gpu.slabs


def test_slabs_are_given_back_when_the_plan_comes_off(lab, gpu: Gpu) -> None:
    """At once, without a garbage collection; and while a graph still holds some, when the graph goes."""
    model = _model()
    profile, segments = _planned(lab, model)
    gc.collect()
    gc.disable()
    try:
        handle = apply_segments(model, segments, lab.unit_modules(profile))
        model(torch.randn(2, 3, 32, 32)).sum().backward()
        assert (gpu.slabs > 0, gpu.unpinned) == (True, 0)
        handle.remove()
        assert gpu.unpinned == 1
        handle = apply_segments(model, segments, lab.unit_modules(profile))
        output = model(torch.randn(2, 3, 32, 32))
        handle.remove()
        assert gpu.unpinned == 1
        output.sum().backward()
        del output
        assert gpu.unpinned == 2
    finally:
        gc.enable()
