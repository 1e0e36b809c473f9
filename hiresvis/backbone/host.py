"""Host memory for what a plan offloads: tensors leave the device while the next segment runs, and come back one ahead.

On CUDA copies run on their own stream. At most one tensor set is on its way out: its device memory is let go when the next
set leaves, or when backward asks for the first one, and only once the computing stream has waited for its copy, so the
bound holds in stream order and no allocation is deferred. Coming back works the same way: when a segment's tensors are
asked for, those of the segment before it in the same forward are sent for at once. A set that nobody comes for, sent for or
on its way out, is waited for too before its memory goes.

Pinned memory is taken in slabs of one size and used again, whatever the sizes of the sets: a set fills slabs one after
another, tensors across their borders. Torch rounds what it pins up to a power of two; a slab is one, so nothing is lost to
that, and a set takes less than a slab more than its bytes (`memory.search.host_bytes` counts it). Slabs go back to the
system when the plan is off and no graph holds any.

On the CPU the "host" is the device's own memory, so nothing is gained there; the same steps run, without streams, so that
plans can be tested anywhere. The branch for CUDA has run only with streams that are stand-ins (`tests/backbone/test_host.py`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from hiresvis.memory.peak import HOST_SLAB_BYTES


@dataclass(frozen=True, slots=True)
class _Leaving:
    """Device tensors whose copy to the host is under way, and the stream that may not use their memory before."""

    left: torch.cuda.Event
    computing: torch.cuda.Stream
    tensors: Sequence[torch.Tensor]


class HostMemory:
    """Slabs, streams and the order of what has been offloaded by one model."""

    def __init__(self) -> None:
        self.free: list[torch.Tensor] = []  # pinned slabs that hold nothing
        self.leaving: _Leaving | None = None
        self._order: list[weakref.ref[Offloaded]] = []  # of the forward under way
        self._owners: set[int] = set()  # who has offloaded in it
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __reduce__(self) -> tuple[type[HostMemory], tuple[()]]:
        """A copy of a planned model begins with none: slabs and streams are the original's."""
        return HostMemory, ()

    def __del__(self) -> None:
        if self.free and not sys.is_finalizing():
            self.free.clear()
            _unpin()

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The copying stream of a device."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def slabs(self, nbytes: int) -> list[torch.Tensor]:
        """Pinned slabs for so many bytes."""
        return [self.free.pop() if self.free else _pinned() for _ in range(-(-nbytes // HOST_SLAB_BYTES))]

    def let_go(self) -> None:
        """The set on its way out, if any, leaves the device: what is computed from now on has waited for its copy."""
        if self.leaving is not None:
            self.leaving.computing.wait_event(self.leaving.left)
            self.leaving = None

    def enter(self, found: Offloaded, owner: object) -> list[weakref.ref[Offloaded]]:
        """The order of the forward that this belongs to, this at its end. A segment that offloads again does so in another forward."""
        if owner is None or id(owner) in self._owners:
            self._order, self._owners = [], set()
        self._owners.add(id(owner))
        self._order.append(weakref.ref(found))
        return self._order


class Offloaded:
    """Tensors of one segment in host memory, until backward asks for them.

    Args:
        tensors: what to move, the first of them on the segment's device; what lies elsewhere (a fused attention returns its seed
            on the CPU) stays as it is. The caller drops its own references.
        memory: where to.
        owner: the segment, which offloads once in a forward; None: a forward of its own.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], memory: HostMemory, owner: object = None) -> None:
        self.slabs: list[torch.Tensor] = []
        self.left: torch.cuda.Event | None = None
        self.arrived: tuple[torch.cuda.Event, torch.cuda.Stream] | None = None  # while nobody has waited for it
        self.here: list[torch.Tensor] | None = None
        self.copies: list[torch.Tensor] = []
        self.memory = memory
        self.device = tensors[0].device
        self.fake = isinstance(tensors[0], FakeTensor)
        self.stays = {index: tensor for index, tensor in enumerate(tensors) if tensor.device != self.device}
        moved = [tensor for tensor in tensors if tensor.device == self.device]
        self.layouts = [(tensor.dtype, tensor.shape, _strides(tensor)) for tensor in moved]
        self.order = memory.enter(self, owner)
        if self.fake:
            return
        if _has_streams(self.device):
            self._leave_gpu(moved)
            return
        with _disable_current_modes():  # host memory is not the device's: nobody counts it
            self.copies = [_dense(tensor, strides).clone() for tensor, (_, _, strides) in zip(moved, self.layouts, strict=True)]

    def _leave_gpu(self, tensors: Sequence[torch.Tensor]) -> None:
        memory, stream, computing = self.memory, self.memory.stream(self.device), torch.cuda.current_stream(self.device)
        memory.let_go()
        stream.wait_stream(computing)
        with torch.no_grad(), torch.cuda.stream(stream), _disable_current_modes():
            runs = [_bytes(_dense(tensor, strides)) for tensor, (_, _, strides) in zip(tensors, self.layouts, strict=True)]
            self.slabs = memory.slabs(sum(run.numel() for run in runs))
            for run, place in _places(runs, self.slabs):
                place.copy_(run, non_blocking=True)
            self.left = torch.cuda.Event()
            self.left.record(stream)
        memory.leaving = _Leaving(self.left, computing, list(tensors))

    def send_for(self) -> None:
        """Start bringing the tensors back."""
        if self.here is not None:
            return
        here = [_empty(layout, self.device) for layout in self.layouts]
        if not self.fake:
            with torch.no_grad(), _disable_current_modes():
                if _has_streams(self.device):
                    self._come_to_gpu(here)
                else:
                    for tensor, saved in zip(here, self.copies, strict=True):
                        _fill(tensor, saved)
        self.here = here

    def _come_to_gpu(self, here: Sequence[torch.Tensor]) -> None:
        stream, computing = self.memory.stream(self.device), torch.cuda.current_stream(self.device)
        stream.wait_stream(computing)
        with torch.cuda.stream(stream):
            elements = [_ordered(tensor) for tensor in here]
            flat = [part.reshape(-1) if part.is_contiguous() else part.new_empty(part.numel()) for part in elements]
            for run, place in _places([_bytes(part) for part in flat], self.slabs):
                run.copy_(place, non_blocking=True)
            for part, run in zip(elements, flat, strict=True):
                if not part.is_contiguous():
                    part.copy_(run.view(part.shape))
            arrived = torch.cuda.Event()
            arrived.record(stream)
        self.arrived = arrived, computing

    def take(self) -> list[torch.Tensor]:
        """The tensors on the device again; the next ones to be wanted are sent for."""
        self.memory.let_go()
        self.send_for()
        if self.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived[0])
            self.arrived = None
        earlier = self._before()
        if earlier is not None:
            earlier.send_for()
        assert self.here is not None
        found = iter(self.here)
        return [self.stays[index] if index in self.stays else next(found) for index in range(len(self.here) + len(self.stays))]

    def _before(self) -> Offloaded | None:
        """What the same forward offloaded just before this and still wants."""
        previous = None
        for reference in self.order:
            other = reference()
            if other is self:
                return previous
            if other is not None:
                previous = other
        return None

    def __del__(self) -> None:
        if self.arrived is not None:  # nobody came for it; the copy may still be writing
            self.arrived[1].wait_event(self.arrived[0])
        if self.memory.leaving is not None and self.memory.leaving.left is self.left:
            self.memory.let_go()
        self.memory.free.extend(self.slabs)  # used again on the copying stream alone, so after what it still has to do


def _has_streams(device: torch.device) -> bool:
    """Whether copies to and from the host run beside the computing."""
    return device.type == "cuda"


def _pinned() -> torch.Tensor:
    return torch.empty(HOST_SLAB_BYTES, dtype=torch.uint8, pin_memory=True)


def _unpin() -> None:
    """Torch keeps what was pinned for later; now the system has it back."""
    empty_cache = getattr(torch._C, "_host_emptyCache", None)
    if empty_cache is not None:
        empty_cache()


def _places(runs: Sequence[torch.Tensor], slabs: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of the runs of bytes, each with its place in a slab."""
    at = 0
    for run in runs:
        begin = 0
        while begin < run.numel():
            slab, used = divmod(at, HOST_SLAB_BYTES)
            size = min(run.numel() - begin, HOST_SLAB_BYTES - used)
            yield run.narrow(0, begin, size), slabs[slab].narrow(0, used, size)
            begin, at = begin + size, at + size


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    """A flat tensor's bytes: the same memory, but for one with gaps or whose numbers are yet to be conjugated."""
    whole = flat.resolve_conj().resolve_neg().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def _empty(layout: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    dtype, shape, strides = layout
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own, gaps and expanded dimensions included: kernels may add in another order for others. Row by row where elements
    overlap in some other way."""
    dense = 1
    whole = _ordered(tensor)
    for size, stride in zip(reversed(whole.shape), reversed(whole.stride()), strict=True):
        if size > 1 and stride < dense:
            return torch.empty(tensor.shape, device="meta").stride()
        dense = max(dense, size * stride)
    return tensor.stride()


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the elements in the order in which they lie in memory, without what is expanded."""
    found = tensor.detach()
    for dim in range(found.dim()):
        if found.stride(dim) == 0 and found.size(dim) > 1:
            found = found.narrow(dim, 0, 1)
    return found.permute(sorted(range(found.dim()), key=lambda dim: (-found.stride(dim), -found.size(dim))))


def _dense(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The elements as one flat run of memory, in the order of the strides they come back with: a view without gaps, else a copy."""
    elements = _ordered(tensor) if strides == tensor.stride() else tensor.detach()
    return elements.reshape(-1)


def _fill(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    """Put back what `_dense` took of a tensor with these strides."""
    elements = _ordered(tensor)
    elements.copy_(saved.view(elements.shape), non_blocking=True)
