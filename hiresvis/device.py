"""The machine: capacity, budget, what is in use, its highest value, and how running out of memory is recognised."""

from __future__ import annotations

import gc
import os
import platform
import sys
import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hiresvis.errors import Problem, RecipeError
from hiresvis.memory.budget import (
    CPU_BLOCK_BYTES,
    CPU_BUDGET_SHARE,
    CUDA_BLOCK_BYTES,
    CUDA_BUDGET_SHARE,
    CUDA_CONTEXT_BYTES,
    Budget,
    num_cores,
    reserve_of,
)
from hiresvis.units import MIB, format_size

AUTOCAST_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


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
        # This process's context is neither free nor its allocator's, and every budget has it in the baseline.
        return total, max(0, total - free - torch.cuda.memory_reserved(device) - CUDA_CONTEXT_BYTES)
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    limit, used = control_group()
    if limit is not None and limit < total:
        total, available = limit, max(0, limit - used)
    return total, max(0, total - available - in_use(device))


def system() -> str:
    """The operating system, its release and the processor's kind."""
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def machine(device: torch.device, name: str) -> dict[str, Any]:
    """What a run is made on, in plain values: device (its name), memory_bytes (of the device), cores, system, python, and packages."""
    versions = {}
    for package in ("hiresvis", "torch", "torchvision", "timm", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "device": name,
        "memory_bytes": capacity(device)[0],
        "cores": num_cores(),
        "system": system(),
        "python": platform.python_version(),
        "packages": versions,
    }


def control_group(root: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, int]:
    """Limit and use of this process's control group (version 2, then 1), where there is one.

    The kernel counts the pages of every file that was read as used; those it would give up first (`inactive_file`) are as good as free.
    """
    for limit_file, use_file, stat_file, cache in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        try:
            text = (root / limit_file).read_text().strip()
            if text != "max":
                used = int((root / use_file).read_text())
                return int(text), max(0, used - _cached(root / stat_file, cache))
        except (OSError, ValueError):
            continue
    return None, 0


def _cached(stat: Path, name: str) -> int:
    """One figure of a memory.stat; 0 where there is none."""
    try:
        figures = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines())
        return int(figures.get(name, 0))
    except (OSError, ValueError):
        return 0


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
        RecipeError: more is asked for than the device has.
    """
    if not elsewhere:
        refuse_budget(device, wanted)
    total, others = capacity(device)
    free = total - others
    if wanted == "auto":
        share = CUDA_BUDGET_SHARE if device.type == "cuda" else CPU_BUDGET_SHARE
        limit, why = int(free * share), f"{share:.0%} of the {format_size(free)} that are free of {format_size(total)}"
    elif isinstance(wanted, float):
        limit, why = int(total * wanted), f"{wanted:.0%} of {format_size(total)}"
    else:
        limit, why = int(wanted), "given"
    if device.type == "cuda":
        baseline = CUDA_CONTEXT_BYTES
    else:
        release()
        baseline = max(0, in_use(device) - weight_bytes)
    return Budget(limit, baseline, total, others, reserve_of(limit), why)


def refuse_budget(device: torch.device, wanted: str | int | float) -> None:
    """A size (shares and auto follow the device) that the device does not have.

    Raises:
        RecipeError: so it is; both numbers.
    """
    total, _ = capacity(device)
    if isinstance(wanted, int) and wanted > total:
        message = f"{format_size(wanted)} is above the {format_size(total)} that the {device.type} device has; lower it or use auto"
        raise RecipeError([Problem(message, key="memory.budget")])


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
    heap and fragment it. A fixed threshold costs page faults and keeps the measured peak honest. MaxViT-T at 224 px, four images, whose
    tensors are mostly just below 1 MiB, under a plan of 600 MiB of live storages: the resident size rose by 832 MiB with a threshold of
    1 MiB, 672 with 512 KiB, 643 with 256 KiB, 641 with 128 KiB, in the same CPU time (8 s).
    """
    libc = _libc()
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is not None:
        m_mmap_threshold, m_trim_threshold = -3, -1
        mallopt(m_mmap_threshold, MIB // 4)
        mallopt(m_trim_threshold, 1 * MIB)


class PeakMeter:
    """The highest memory use since `start()`: the allocator's counter on a GPU, the kernel's high-water mark on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.base_bytes = 0
        self._retries_before = 0

    def start(self) -> None:
        """Forget the highest value so far."""
        release()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            _reset_high_water()
        self.base_bytes = in_use(self.device)
        self._retries_before = self._retries()

    def peak_bytes(self) -> int:
        """The highest value since start()."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_reserved(self.device) + CUDA_CONTEXT_BYTES  # fragmentation included
        return max(_high_water(), in_use(self.device))

    def num_retries(self) -> int:
        """How often since start() a GPU's allocator had to give its cache back before it could go on: what fits only so is too large."""
        return self._retries() - self._retries_before

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)) if self.device.type == "cuda" else 0


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


def is_out_of_memory(error: BaseException, device: torch.device | None = None) -> bool:
    """Whether the error says that memory ran out: CUDA's, the CPU allocator's, cuDNN's or cuBLAS's, Python's.

    Args:
        device: whose memory is asked about; on a GPU's account, what the host lacks does not count. None: any.
    """
    if device is not None and device.type != "cpu" and (isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)):
        return False
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
