"""Host memory for what a plan offloads: tensors leave the device while the next segment runs, and come back one ahead.

On CUDA copies run on their own stream, between pinned buffers that are used again. At most one tensor set is on its way
out: the device memory of the one before is let go only once the computing stream has waited for its copy, so the bound
holds in stream order and no allocation is deferred. Coming back works the same way: when a segment's tensors are asked
for, those of the segment before it in the chain are sent for at once.

On the CPU the "host" is the device's own memory, so nothing is gained there; the same steps run, without streams, so that
plans can be tested anywhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes


class HostMemory:
    """Buffers, streams and the order of what has been offloaded by one model."""

    def __init__(self) -> None:
        self.free: dict[int, list[torch.Tensor]] = {}  # pinned buffers by size
        self.order: list[weakref.ref[Offloaded]] = []
        self.leaving: tuple[torch.cuda.Event, Sequence[torch.Tensor]] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __reduce__(self) -> tuple[type[HostMemory], tuple[()]]:
        """A copy of a planned model begins with none: buffers and streams are the original's."""
        return HostMemory, ()

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The copying stream of a device."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def buffer(self, nbytes: int) -> torch.Tensor:
        """A pinned buffer of so many bytes."""
        ready = self.free.get(nbytes)
        return ready.pop() if ready else torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def before(self, found: Offloaded) -> Offloaded | None:
        """What was offloaded just before this and is still wanted."""
        previous = None
        for reference in self.order:
            other = reference()
            if other is found:
                return previous
            if other is not None:
                previous = other
        return None


class Offloaded:
    """Tensors of one segment in host memory, until backward asks for them.

    Args:
        tensors: what to move; the caller drops its own references.
        memory: where to.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], memory: HostMemory) -> None:
        self.memory = memory
        self.layouts = [(tensor.dtype, tensor.shape, _strides(tensor)) for tensor in tensors]
        self.device = tensors[0].device
        self.fake = isinstance(tensors[0], FakeTensor)
        self.here: list[torch.Tensor] | None = None
        self.arrived: torch.cuda.Event | None = None
        self.copies: list[torch.Tensor] = []
        memory.order = [reference for reference in memory.order if reference() is not None]
        memory.order.append(weakref.ref(self))
        if self.fake:
            return
        if self.device.type == "cuda":
            self._leave_gpu(tensors)
            return
        with _disable_current_modes():  # host memory is not the device's: nobody counts it
            self.copies = [_dense(tensor, strides).clone() for tensor, (_, _, strides) in zip(tensors, self.layouts, strict=True)]

    def _leave_gpu(self, tensors: Sequence[torch.Tensor]) -> None:
        memory, stream, computing = self.memory, self.memory.stream(self.device), torch.cuda.current_stream(self.device)
        if memory.leaving is not None:
            computing.wait_event(memory.leaving[0])
        stream.wait_stream(computing)
        with torch.no_grad(), torch.cuda.stream(stream), _disable_current_modes():
            for tensor, (_, _, strides) in zip(tensors, self.layouts, strict=True):
                dense = _dense(tensor, strides)
                buffer = memory.buffer(dense.nbytes)
                buffer.view(dense.dtype).copy_(dense, non_blocking=True)
                self.copies.append(buffer)
            left = torch.cuda.Event()
            left.record(stream)
        memory.leaving = (left, list(tensors))  # held until the next one leaves

    def send_for(self) -> None:
        """Start bringing the tensors back."""
        if self.here is not None:
            return
        here = [_empty(layout, self.device) for layout in self.layouts]
        if self.fake:
            self.here = here
            return
        with torch.no_grad(), _disable_current_modes():
            if self.device.type != "cuda":
                for tensor, saved in zip(here, self.copies, strict=True):
                    _fill(tensor, saved)
            else:
                stream = self.memory.stream(self.device)
                stream.wait_stream(torch.cuda.current_stream(self.device))
                with torch.cuda.stream(stream):
                    for tensor, saved in zip(here, self.copies, strict=True):
                        _fill(tensor, saved.view(tensor.dtype))
                    self.arrived = torch.cuda.Event()
                    self.arrived.record(stream)
        self.here = here

    def take(self) -> list[torch.Tensor]:
        """The tensors on the device again; the next ones to be wanted are sent for."""
        self.send_for()
        if self.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
        earlier = self.memory.before(self)
        if earlier is not None:
            earlier.send_for()
        here = self.here
        assert here is not None
        return here

    def __del__(self) -> None:
        if self.device.type == "cuda":
            for buffer in self.copies:
                self.memory.free.setdefault(buffer.nbytes, []).append(buffer)


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
