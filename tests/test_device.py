"""The machine's figures on this machine, and how running out of memory is recognised."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch

from hiresvis import device
from hiresvis.device import StorageCounter, is_out_of_memory
from hiresvis.errors import RecipeError
from hiresvis.memory.budget import CUDA_CONTEXT_BYTES
from hiresvis.units import GIB, MIB

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_capacity_and_use_are_consistent() -> None:
    """What others use plus what this process uses is within the capacity."""
    total, others = device.capacity(CPU)
    assert 0 <= others < total
    assert 0 < device.in_use(CPU) < total


def test_a_budget_of_bytes_is_taken_and_explained() -> None:
    """The limit is the given one; the baseline is the process without its weights."""
    found = device.budget(CPU, 900 * MIB, weight_bytes=10 * MIB)
    assert (found.total_bytes, found.why) == (900 * MIB, "given")
    assert found.baseline_bytes == pytest.approx(device.in_use(CPU) - 10 * MIB, abs=64 * MIB)


def test_a_share_is_of_the_capacity_and_auto_of_what_is_free() -> None:
    """0.25 of everything; auto 80% of what others leave."""
    total, others = device.capacity(CPU)
    assert device.budget(CPU, 0.25, 0).total_bytes == total // 4
    assert device.budget(CPU, "auto", 0).total_bytes == pytest.approx(0.8 * (total - others), rel=0.1)


def test_a_budget_above_the_capacity_is_refused() -> None:
    """The message has both numbers."""
    total, _ = device.capacity(CPU)
    with pytest.raises(RecipeError, match=r"memory\.budget  .* is above the .* that the cpu device has; lower it or use auto"):
        device.budget(CPU, total + MIB, 0)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried ..."),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_allocation_failures_are_recognised(error: BaseException) -> None:
    """CUDA's, the CPU allocator's, cuDNN's, cuBLAS's and Python's."""
    assert is_out_of_memory(error)


def test_the_cpu_allocators_own_refusal_is_recognised() -> None:
    """A real one: a tensor that no machine has room for."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("CUDA out of memory"), OSError()])
def test_other_errors_are_not_taken_for_it(error: BaseException) -> None:
    """Shapes, values, files."""
    assert not is_out_of_memory(error)


def test_the_peak_meter_sees_memory_that_came_and_went() -> None:
    """200 MiB written and freed stand in the peak, not in what is in use; a second start forgets them."""
    meter = device.PeakMeter(CPU)
    meter.start()
    block = torch.ones(200 * MIB, dtype=torch.uint8)
    del block
    device.release()
    assert meter.peak_bytes() - meter.base_bytes == pytest.approx(200 * MIB, rel=0.1)
    assert device.in_use(CPU) - meter.base_bytes < 100 * MIB
    meter.start()
    assert meter.peak_bytes() - meter.base_bytes < 100 * MIB


class Card:
    """A GPU of 24 GiB behind torch.cuda's functions: what others hold, this process's context, what its allocator holds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, others: int, context: int) -> None:
        self.total, self.others, self.context, self.reserved, self.retries = 24 * GIB, others, context, 0, 0
        for name, value in {
            "mem_get_info": lambda _: (self.total - self.others - self.context - self.reserved, self.total),
            "memory_reserved": lambda _: self.reserved,
            "max_memory_reserved": lambda _: self.reserved,
            "memory_allocated": lambda _: self.reserved,
            "memory_stats": lambda _: {"num_alloc_retries": self.retries},
            "synchronize": lambda _: None,
            "reset_peak_memory_stats": lambda _: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.parametrize("context", [450 * MIB, 600 * MIB, 900 * MIB])
@pytest.mark.parametrize("others", [0, 2 * GIB])
def test_the_context_of_a_gpu_counts_once(monkeypatch: pytest.MonkeyPatch, context: int, others: int) -> None:
    """What a budget leaves for tensors is its share of the card less others and less one context, whatever that really takes."""
    card = Card(monkeypatch, others=others, context=context)
    everything = device.budget(CUDA, 1.0, 0)
    room = everything.total_bytes - everything.others_bytes - everything.baseline_bytes
    really = card.total - others - context
    assert room == (really if others else min(really, card.total - CUDA_CONTEXT_BYTES))
    auto = device.budget(CUDA, "auto", 0)
    assert auto.total_bytes == int(0.95 * (card.total - auto.others_bytes))
    assert auto.total_bytes - auto.baseline_bytes <= 0.95 * really
    card.reserved = 3 * GIB  # weights that are there already are not others'
    assert device.capacity(CUDA) == (card.total, everything.others_bytes)


def test_a_measured_peak_on_a_gpu_is_held_against_the_same_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that take all of a budget's room measure as the whole budget."""
    card = Card(monkeypatch, others=0, context=CUDA_CONTEXT_BYTES)
    found = device.budget(CUDA, 8 * GIB, 0)
    card.reserved = found.total_bytes - found.baseline_bytes
    assert device.PeakMeter(CUDA).peak_bytes() == found.total_bytes


def test_flushes_of_the_allocators_cache_are_counted_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before `start` are not this measurement's; the CPU has none."""
    card = Card(monkeypatch, others=0, context=0)
    card.retries = 4
    meter = device.PeakMeter(CUDA)
    meter.start()
    assert meter.num_retries() == 0
    card.retries = 6
    assert meter.num_retries() == 2
    meter.start()
    assert meter.num_retries() == 0
    assert device.PeakMeter(CPU).num_retries() == 0


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"memory.max": "1000\n", "memory.current": "900\n", "memory.stat": "anon 300\nfile 600\ninactive_file 450\n"}, (1000, 450)),
        ({"memory.max": "1000\n", "memory.current": "900\n"}, (1000, 900)),
        ({"memory.max": "1000\n", "memory.current": "900\n", "memory.stat": "inactive_file 901\n"}, (1000, 0)),
        ({"memory.max": "max\n", "memory.current": "900\n", "memory.stat": "inactive_file 450\n"}, (None, 0)),
        (
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "900\n",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
            },
            (1000, 400),
        ),
        ({}, (None, 0)),
    ],
    ids=["version 2", "without figures", "cache above use", "no limit", "version 1", "no group"],
)
def test_files_that_the_kernel_would_give_up_are_not_in_use(tmp_path: Path, files: dict[str, str], found: tuple[int | None, int]) -> None:
    """A control group counts the cache of read images as used; it is taken off, in either version."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert device.control_group(tmp_path) == found


def test_storages_count_once_and_round_up_to_blocks() -> None:
    """Views add nothing, a block is the least, freed storages leave, the peak stays."""
    counter = StorageCounter(64)
    with counter:
        one = torch.zeros(10)
        view = one[2:].view(2, 4)
        assert counter.live_bytes == 64
        two = torch.zeros(100)
        assert counter.live_bytes == 64 + 448
        del two
        assert (counter.live_bytes, counter.peak_bytes) == (64, 512)
        del one
        assert counter.live_bytes == 64  # the view holds it
        del view
        assert counter.live_bytes == 0
        counter.reset_peak()
        assert counter.peak_bytes == 0


def test_what_existed_before_counts_when_tracked() -> None:
    """Tracked twice it counts once; operators on it then add only their results."""
    weight = torch.zeros(16)
    counter = StorageCounter()
    counter.track([weight, weight])
    with counter:
        doubled = weight * 2
        assert counter.live_bytes == 128
        assert counter.number(doubled) in counter.alive()
    del doubled
    gc.collect()
    assert counter.live_bytes == 64


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the C allocator's settings are glibc's")
def test_freed_tensors_below_a_mebibyte_leave_the_process() -> None:
    """Small ones that live on between them hold no heap together: the resident size follows what is alive."""
    device.return_memory_to_system()
    device.release()
    before = device.in_use(torch.device("cpu"))
    pairs = [(torch.ones(128 * 1024), torch.ones(8 * 1024)) for _ in range(400)]
    full = device.in_use(torch.device("cpu")) - before
    alive = [small for _, small in pairs]
    del pairs
    assert full > 190 * MIB
    assert device.in_use(torch.device("cpu")) - before < 40 * MIB
    assert len(alive) == 400
