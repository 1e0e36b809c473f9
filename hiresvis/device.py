"""The machine: capacity, budget, what is in use, its highest value, and how running out of memory is recognised."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hiresvis.errors import EnvironmentFailed
from hiresvis.units import MIB, format_size

CUDA_BLOCK_BYTES = 512
CPU_BLOCK_BYTES = 64
CUDA_CONTEXT_BYTES = 600 * MIB
CPU_BUDGET_SHARE = 0.8
CUDA_BUDGET_SHARE = 0.95
RESERVE_BYTES, RESERVE_SHARE = 48 * MIB, 0.03  # oneDNN's scratch alone came to 2-4% of the live tensors


@dataclass(frozen=True, slots=True)
class Budget:
    """What the process may use, and what it uses before training starts.

    Attributes:
        total_bytes: the limit, everything included.
        baseline_bytes: in use besides weights and activations (interpreter, libraries, GPU context), before the first step.
        capacity_bytes: what the device has.
        others_bytes: what other processes use of it.
        reserve_bytes: stated share that the planner leaves free for what no count of tensors shows: kernels' scratch memory,
            fragmentation, decoding.
        why: one line for people.
    """

    total_bytes: int
    baseline_bytes: int
    capacity_bytes: int
    others_bytes: int
    reserve_bytes: int
    why: str


def pick_device() -> torch.device:
    """The first CUDA device, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def block_bytes(device: torch.device) -> int:
    """Granularity of the device's allocator."""
    return CUDA_BLOCK_BYTES if device.type == "cuda" else CPU_BLOCK_BYTES


def capacity(device: torch.device) -> tuple[int, int]:
    """(bytes in all, bytes used by others) on the device; on the CPU a control group's limit counts."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, max(0, total - free - torch.cuda.memory_reserved(device))
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    limit, used = _control_group()
    if limit is not None and limit < total:
        total, available = limit, max(0, limit - used)
    return total, max(0, total - available - in_use(device))


def _control_group() -> tuple[int | None, int]:
    """Limit and use of this process's control group (version 2, then 1), where there is one."""
    for limit_file, use_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            text = Path(limit_file).read_text().strip()
            if text != "max":
                return int(text), int(Path(use_file).read_text())
        except (OSError, ValueError):
            continue
    return None, 0


def in_use(device: torch.device) -> int:
    """Bytes in use now: allocated on a GPU, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def budget(device: torch.device, wanted: str | int | float, weight_bytes: int, *, elsewhere: bool = False) -> Budget:
    """The budget that `memory.budget` asks for.

    Args:
        device: where training runs.
        wanted: "auto", bytes, or a share of the capacity (float in 0-1).
        elsewhere: the size is another device's, so this one's capacity is no limit.
        weight_bytes: parameters and buffers already on the device, so that the baseline excludes them.

    Raises:
        EnvironmentFailed: more is asked for than the device has.
    """
    total, others = capacity(device)
    free = total - others
    if wanted == "auto":
        share = CUDA_BUDGET_SHARE if device.type == "cuda" else CPU_BUDGET_SHARE
        limit, why = int(free * share), f"{share:.0%} of the {format_size(free)} that are free of {format_size(total)}"
    elif isinstance(wanted, float):
        limit, why = int(total * wanted), f"{wanted:.0%} of {format_size(total)}"
    else:
        limit, why = int(wanted), "given"
    if limit > total and not elsewhere:
        raise EnvironmentFailed(
            f"memory.budget is {format_size(limit)}, but the {device.type} device has {format_size(total)}; lower it or use auto"
        )
    if device.type == "cuda":
        baseline = CUDA_CONTEXT_BYTES
    else:
        release()
        baseline = max(0, in_use(device) - weight_bytes)
    return Budget(limit, baseline, total, others, RESERVE_BYTES + int(limit * RESERVE_SHARE), why)


def release() -> None:
    """Give back what nobody holds: garbage, the CUDA cache, the C allocator's free pages."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _libc() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    return ctypes.CDLL(None)


def return_memory_to_system() -> None:
    """Make the C allocator hand large blocks back at once, so that the resident size follows the live tensors.

    glibc raises its threshold for mapped blocks up to 32 MiB as it sees them freed; tensors below it then stay in the
    heap and fragment it. A fixed threshold costs page faults and keeps the measured peak honest.
    """
    libc = _libc()
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is not None:
        m_mmap_threshold, m_trim_threshold = -3, -1
        mallopt(m_mmap_threshold, 1 * MIB)
        mallopt(m_trim_threshold, 1 * MIB)


class PeakMeter:
    """The highest memory use since `start()`: the allocator's counter on a GPU, the kernel's high-water mark on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.base_bytes = 0

    def start(self) -> None:
        """Forget the highest value so far."""
        release()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            _reset_high_water()
        self.base_bytes = in_use(self.device)

    def peak_bytes(self) -> int:
        """The highest value since start()."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_reserved(self.device) + CUDA_CONTEXT_BYTES  # fragmentation included
        return max(_high_water(), in_use(self.device))


def _reset_high_water() -> None:
    try:
        Path(f"/proc/{os.getpid()}/clear_refs").write_text("5")
    except OSError:
        return  # other systems: the mark covers the process's whole life, never less than the truth


def _high_water() -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out: CUDA's, the CPU allocator's, cuDNN's or cuBLAS's, Python's."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    signs = (
        "DefaultCPUAllocator: can't allocate memory",
        "DefaultCPUAllocator: not enough memory",
        "CUDA out of memory",
        "CUDNN_STATUS_ALLOC_FAILED",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDA error: out of memory",
    )
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


def module_bytes(module: torch.nn.Module) -> tuple[int, int]:
    """(bytes of parameters, bytes of buffers), shared ones once."""
    parameters = {id(tensor): tensor.nbytes for tensor in module.parameters()}
    buffers = {id(tensor): tensor.nbytes for tensor in module.buffers()}
    return sum(parameters.values()), sum(buffers.values())


class StorageCounter(TorchDispatchMode):
    """Counts live storages, each once, rounded up to the allocator's block; works on real and on fake tensors.

    `live_bytes` is what is alive now, `peak_bytes` the highest value since `reset_peak()`. Storages that existed before
    the mode was entered count only when given to `track`; kernels' own scratch memory is never seen.
    """

    def __init__(self, block: int = 1) -> None:
        super().__init__()
        self.block = block
        self.live_bytes = 0
        self.peak_bytes = 0
        self.sizes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._next = 0
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                self._see(value)
        return out

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these, which exist already."""
        for tensor in tensors:
            self._see(tensor)

    def number(self, tensor: torch.Tensor) -> int | None:
        """The number of the tensor's storage, or None when it was never seen."""
        return self._numbers.get(tensor.untyped_storage())

    def alive(self) -> set[int]:
        """Numbers of the storages alive now."""
        return set(self._alive)

    def reset_peak(self) -> None:
        """Start a new peak from what is alive."""
        self.peak_bytes = self.live_bytes

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage in self._numbers:
            return
        number, size = self._next, -(-storage.nbytes() // self.block) * self.block
        self._next += 1
        self._numbers[storage] = number
        self.sizes[number] = size
        self._alive[number] = weakref.ref(storage, partial(self._forget, number, size))
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.created(number)

    def _forget(self, number: int, size: int, _: object) -> None:
        self._alive.pop(number, None)
        self.live_bytes -= size

    def created(self, number: int) -> None:
        """Called for each new storage; for subclasses."""
