"""The machine's figures on this machine, and how running out of memory is recognised."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from hiresvis import device
from hiresvis.device import StorageCounter, is_out_of_memory
from hiresvis.errors import EnvironmentFailed
from hiresvis.units import MIB

CPU = torch.device("cpu")


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
    with pytest.raises(EnvironmentFailed, match=r"memory\.budget is .* but the cpu device has"):
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


def test_shared_parameters_count_once() -> None:
    """Parameters and buffers in bytes; a tied weight is one."""
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.BatchNorm1d(2)])
    model[1].weight = model[0].weight
    assert device.module_bytes(model) == (4 * 4 * 4 + 2 * 2 * 4, 2 * 2 * 4 + 8)


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
