"""Applies a plan to a model, and takes it off again: recompute of segments through saved-tensor hooks.

Within a segment every tensor that autograd wants to save is replaced by a numbered place. The first place that backward
asks for runs the segment's modules again, from the kept input, and fills all places in the same order. The graph of the
first forward stays the one that backward walks, so a segment may span modules whose caller is not ours to change, and
gradients come from the same kernels on the same numbers. This is the scheme of torch's non-reentrant checkpoint (Chen et
al., *Training deep nets with sublinear memory cost*, 2016, for the idea), without its need for one function to call.

What makes a second run give the same numbers and leave no second trace:
- random numbers: the generators' states from the segment's start are put back for the second run, and the present ones
  after it; a segment that drew no numbers skips this;
- buffers that the forward changes (running statistics): the second run gets clones, dropped afterwards;
- autocast: the second run has the first one's settings.
A changed input, or another number of saved tensors, raises; nothing is ever guessed.

Module hooks (`register_forward_hook`) of modules inside a segment fire again in the second run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm

from hiresvis.backbone.chain import first_tensor
from hiresvis.memory.plan import CheckpointPlan, Segment


class _AllFilled(Exception):
    pass


class _Place:
    """Stands for one saved tensor; autograd holds it, so it lives exactly as long as the tensor would have."""

    __slots__ = ("__weakref__", "frame", "value")

    def __init__(self, frame: _Frame) -> None:
        self.frame = frame
        self.value: torch.Tensor | None = None


class _RandomState:
    """States of the generators that a forward may draw from."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)

    def same_as(self, other: _RandomState) -> bool:
        if not torch.equal(self.cpu, other.cpu):
            return False
        return self.cuda is None or (other.cuda is not None and torch.equal(self.cuda, other.cuda))


class _Autocast:
    """Autocast settings of the moment, to be entered again."""

    def __init__(self, device_type: str) -> None:
        self.settings = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in dict.fromkeys((device_type, "cpu"))
        ]
        self.cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, enabled, dtype in self.settings:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cache))
            yield


class _Frame:
    """One forward of one segment: what is needed to run it again."""

    def __init__(self, segment: _SegmentRunner, args: tuple[Any, ...], device: torch.device) -> None:
        self.segment = segment
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        tensor = first_tensor(args)
        assert tensor is not None
        self.input = tensor.detach().requires_grad_(tensor.requires_grad)
        self.input_version = tensor._version
        self.random: _RandomState | None = None if isinstance(tensor, FakeTensor) else _RandomState(device)
        self.autocast = _Autocast(device.type)
        self.places: list[weakref.ref[_Place]] = []
        self.changed: list[nn.Module] = []

    def pack(self, tensor: torch.Tensor) -> _Place:
        place = _Place(self)
        self.places.append(weakref.ref(place))
        return place

    @staticmethod
    def unpack(place: _Place) -> torch.Tensor:
        if place.value is None:
            place.frame.recompute()
            assert place.value is not None
        return place.value

    def recompute(self) -> None:
        """Run the segment again and fill the places that backward still holds."""
        if self.input._version != self.input_version:
            raise RuntimeError(
                f"cannot recompute {self.segment.label}: its input was changed in place after the forward "
                f"(version {self.input._version}, was {self.input_version}); plan again with this unit stored"
            )
        filled = 0

        def fill(tensor: torch.Tensor) -> None:
            nonlocal filled
            if filled == len(self.places):
                raise RuntimeError(f"recomputing {self.segment.label} saves more tensors than its forward did ({filled})")
            place = self.places[filled]()
            if place is not None:
                place.value = tensor.detach()
            filled += 1
            if filled == len(self.places):
                raise _AllFilled

        def refuse(_: None) -> torch.Tensor:
            raise AssertionError("the graph of a recompute is never walked")

        with ExitStack() as stack:
            if self.random is not None:
                stack.callback(_RandomState(self.random.device).restore)
                self.random.restore()
            stack.enter_context(_cloned_buffers(self.changed))
            stack.enter_context(self.autocast.entered())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(fill, refuse))
            with suppress(_AllFilled):
                self.segment.run_again(self.input, self.calls)
        if filled != len(self.places):
            raise RuntimeError(
                f"recomputing {self.segment.label} saved {filled} tensors, its forward {len(self.places)}; "
                "the model does not do the same twice, so it cannot be checkpointed here"
            )


@contextmanager
def _cloned_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    originals = [(module, dict(module._buffers)) for module in modules]
    try:
        for module, buffers in originals:
            module._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
        yield
    finally:
        for module, buffers in originals:
            module._buffers.update(buffers)


class _SegmentRunner:
    """The modules of one segment, and the state of its forward while it is under way."""

    def __init__(self, names: Sequence[str], modules: Sequence[nn.Module]) -> None:
        self.names = tuple(names)
        self.modules = tuple(modules)
        self.label = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        self.buffered = [module for top in modules for module in top.modules() if module._buffers]
        self.frame: _Frame | None = None
        self.last_output: weakref.ref[torch.Tensor] | None = None
        self.recomputing = False

    def forward(self, position: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One module's part of the segment's forward."""
        tensor = first_tensor(args)
        if self.recomputing or not torch.is_grad_enabled() or tensor is None:
            return original(*args, **kwargs)
        if position == 0:
            self.frame = _Frame(self, args, tensor.device)
        elif self.last_output is None or self.last_output() is not tensor or self.frame is None:
            raise RuntimeError(
                f"{self.names[position]} did not get the output of {self.names[position - 1]}: "
                "the model's chain is not the one that was planned"
            )
        frame = self.frame
        frame.calls.append((_without(args, tensor), kwargs))
        versions = [_buffer_versions(module) for module in self.buffered]
        try:
            with torch.autograd.graph.saved_tensors_hooks(frame.pack, frame.unpack):
                output = original(*args, **kwargs)
        except BaseException:
            self.frame = None
            raise
        for module, version in zip(self.buffered, versions, strict=True):
            if (_advances_statistics(module) or _buffer_versions(module) != version) and module not in frame.changed:
                frame.changed.append(module)
        result = first_tensor(output)
        assert result is not None
        self.last_output = weakref.ref(result)
        if position == len(self.modules) - 1:
            if frame.random is not None and frame.random.same_as(_RandomState(frame.random.device)):
                frame.random = None
            self.frame = None
        return output

    def run_again(self, value: torch.Tensor, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        self.recomputing = True
        try:
            for module, (args, kwargs) in zip(self.modules, calls, strict=True):
                value = first_tensor(module(*_with(args, value), **kwargs))  # type: ignore[assignment]
        finally:
            self.recomputing = False


def _buffer_versions(module: nn.Module) -> list[int]:
    return [buffer._version for buffer in module._buffers.values() if buffer is not None]


def _advances_statistics(module: nn.Module) -> bool:
    """Batch norm's kernels write the running statistics without raising their version."""
    return isinstance(module, _BatchNorm) and module.training and module.track_running_stats


class _ChainTensor:
    """Marks where the chain's tensor goes among captured arguments."""


_CHAIN_TENSOR = _ChainTensor()


def _without(args: tuple[Any, ...], tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(_CHAIN_TENSOR if value is tensor else value for value in args)


def _with(args: tuple[Any, ...], tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor if value is _CHAIN_TENSOR else value for value in args)


class PlanHandle:
    """A plan that is applied to a model. The state dict's keys are those of the bare model."""

    def __init__(self, wrapped: Sequence[nn.Module]) -> None:
        self._wrapped = list(wrapped)

    def remove(self) -> None:
        """Take the plan off; the model is as it was. A second call does nothing."""
        for module in self._wrapped:
            del module.__dict__["forward"]
        self._wrapped = []


def apply_plan(model: nn.Module, plan: CheckpointPlan) -> PlanHandle:
    """Make `model` recompute the plan's segments in backward.

    Raises:
        ValueError: the plan is for another model (a unit's module is missing), or a plan is applied already.
    """
    return apply_segments(model, plan.segments, plan.unit_modules)


def apply_segments(model: nn.Module, segments: Sequence[Segment], unit_modules: Sequence[Sequence[str]]) -> PlanHandle:
    """As `apply_plan`, from the segments alone."""
    modules = dict(model.named_modules())
    names = [name for unit in unit_modules for name in unit]
    missing = [name for name in names if name not in modules]
    if missing:
        raise ValueError(f"the plan is for another model: {len(missing)} of {len(names)} modules are missing, first {missing[0]!r}")
    taken = [name for name in names if "forward" in modules[name].__dict__]
    if taken:
        raise ValueError(f"a plan is applied already (at {taken[0]!r}); remove it first")
    wrapped = []
    for segment in segments:
        if segment.tier == "store":
            continue
        assert segment.tier == "recompute", f"tier {segment.tier} is not applied by this release"
        inside = [name for unit in unit_modules[segment.start : segment.end] for name in unit]
        runner = _SegmentRunner(inside, [modules[name] for name in inside])
        for position, module in enumerate(runner.modules):
            _wrap(module, runner, position)
            wrapped.append(module)
    return PlanHandle(wrapped)


def _wrap(module: nn.Module, runner: _SegmentRunner, position: int) -> None:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return runner.forward(position, original, args, kwargs)

    module.__dict__["forward"] = forward
