"""Applies a plan to a model, and takes it off again: recompute of segments through saved-tensor hooks.

Within a segment every tensor that autograd wants to save is replaced by a numbered place. The first place that backward
asks for runs the segment's modules again, from the kept input, and fills all places in the same order. The graph of the
first forward stays the one that backward walks, so a segment may span modules whose caller is not ours to change, and
gradients come from the same kernels on the same numbers. This is the scheme of torch's non-reentrant checkpoint (Chen et
al., *Training deep nets with sublinear memory cost*, 2016, for the idea), without its need for one function to call.

What makes a second run give the same numbers and leave no second trace:
- random numbers (torch's, and those of Python's `random`): the generators' states from the segment's start are put back for
  the second run, and the present ones after it; a segment that drew no numbers skips this. A kept operator that draws (fused
  attention with dropout) is not run again, so the state that it left is put in its place;
- buffers that the forward changes or puts others in place of: the second run gets clones of what they held when their unit
  began, dropped afterwards. These values are held from the forward on: as many bytes as such buffers have, which no prediction
  counts, and nothing in models without them. Batch norm's statistics of the batch do not depend on its buffers, so of those
  nothing is held, and the second run gets clones of the present ones;
- autocast: the second run has the first one's settings.
A changed input or kept output, another number of saved tensors, and a second run that changes a buffer that the first did
not change, raise. What is not seen: draws from numpy's generator, and attributes that a forward changes and that are no
buffers (a Python counter). These go on twice.

Modules may take and return several tensors, in tuples, lists or by keyword. What comes from within the segment is made
again; what comes from outside is held with the frame.

A plan may ask for more than one second run. In a *nested* segment the first rerun only notes each unit's input; the units
are then run again one by one, from the last, and a unit may itself be run in passes that each fill one part of its places.
Outputs of operators that a plan *keeps* are held from the first forward and handed out in place of running them again. An
*offloaded* segment has its input and kept outputs in host memory until backward comes near (`backbone.host`).

Module hooks (`register_forward_hook`) of modules inside a segment fire again in the second run.
"""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from hiresvis.backbone.chain import first_tensor, handed_on
from hiresvis.backbone.compiled import refuse_compiled_around, refuse_finer, refuse_wrappers
from hiresvis.backbone.flops import PRODUCTS
from hiresvis.backbone.host import HostMemory, Offloaded
from hiresvis.backbone.slices import parts_refuse, run_in_slices
from hiresvis.memory.plan import CheckpointPlan, Segment


class _AllFilled(Exception):
    pass


class _Place:
    """Stands for one saved tensor; autograd holds it, so it lives exactly as long as the tensor would have."""

    __slots__ = ("__weakref__", "frame", "number", "value")

    def __init__(self, frame: _Frame, number: int) -> None:
        self.frame, self.number = frame, number
        self.value: torch.Tensor | None = None


class _RandomState:
    """States of the generators that a forward may draw from."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self.python = random.getstate()

    def restore(self) -> None:
        random.setstate(self.python)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)

    def same_as(self, other: _RandomState) -> bool:
        if self.python != other.python or not torch.equal(self.cpu, other.cpu):
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


@dataclass(slots=True)
class _Output:
    """What an operator returned: its tensors, and whatever else (an attention kernel also returns sizes and seeds)."""

    leaves: list[Any]
    spec: TreeSpec

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @classmethod
    def of(cls, out: Any) -> _Output:
        leaves, spec = tree_flatten(out)
        return cls([leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)

    def replace(self, tensors: Iterable[torch.Tensor]) -> None:
        new = iter(tensors)
        self.leaves = [next(new) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]

    def again(self) -> Any:
        """The same value in other objects over the same memory: autograd marks what an operator returns."""
        return tree_unflatten([leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves], self.spec)


# What helps against a unit that a second run cannot repeat: planning again alone would give the same plan.
_REMEDY = (
    'plan again with spacing "off", or with a spacing by stage that leaves the stage of this unit out (it is stored then), and prove '
    "the plan by hiresvis.verify_plan(model, plan) or `hiresvis doctor --verify MODEL`"
)


class _Kept(TorchDispatchMode):
    """Holds the outputs of a unit's costly operators in the first forward, and hands them out in a second run."""

    def __init__(self, keep: Sequence[int], label: str, device: torch.device | None, first: _Kept | None = None) -> None:
        """`device`: where operators may draw random numbers, None on fake tensors; `first`: of the first forward, to hand out from."""
        super().__init__()
        self.keep, self.label, self.device = frozenset(keep), label, device
        self.replaying = first is not None
        self.outputs: dict[int, _Output] = {} if first is None else first.outputs
        self.random: dict[int, _RandomState] = {} if first is None else first.random  # after those that drew numbers
        self.returned: list[weakref.ref[torch.Tensor]] = []  # what the model has of them
        self.number = 0
        self.storages: dict[int, int] = {}  # of what is kept, by identity

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS:
            if self.storages and func._schema.is_mutable and not self.replaying:
                self._refuse_change(func, args)
            return func(*args, **(kwargs or {}))
        number, self.number = self.number, self.number + 1
        if self.replaying and number in self.keep:
            if number in self.random:
                self.random[number].restore()
            return self.outputs[number].again()
        before = _RandomState(self.device) if number in self.keep and self.device is not None else None
        out = func(*args, **(kwargs or {}))
        if number in self.keep:
            if before is not None and not before.same_as(after := _RandomState(before.device)):
                self.random[number] = after
            self.outputs[number] = _Output.of(out)
            self.returned.extend(weakref.ref(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
            self.storages.update((tensor.untyped_storage()._cdata, number) for tensor in self.outputs[number].tensors)
        return out

    def _refuse_change(self, func: Any, args: Any) -> None:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                number = self.storages.get(value.untyped_storage()._cdata)
                if number is not None:
                    raise RuntimeError(f"in {self.label} {func} changes the output of operator {number}, which the plan keeps; {_REMEDY}")

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for output in self.outputs.values() for tensor in output.tensors]


@dataclass(frozen=True, slots=True)
class _Made:
    """Stands for a tensor among a call's arguments: output `leaf` of the module at `position` of the segment; at -1 the segment's input."""

    position: int
    leaf: int


_INPUT = _Made(-1, 0)


@dataclass(slots=True)
class _Arguments:
    """What a module was called with: places of tensors made in the segment, tensors from outside, and whatever else."""

    leaves: list[Any]
    spec: TreeSpec

    @property
    def made(self) -> set[_Made]:
        return {leaf for leaf in self.leaves if isinstance(leaf, _Made)}

    def filled(self, values: Mapping[_Made, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tree_unflatten([values[leaf] if isinstance(leaf, _Made) else leaf for leaf in self.leaves], self.spec)


@dataclass(slots=True)
class _Run:
    """One second run: which unit it begins and ends with, and which places it fills."""

    unit: int
    first: int
    end: int


class _Frame:
    """One forward of one segment: what is needed to run it again."""

    def __init__(self, segment: _SegmentRunner, args: tuple[Any, ...], device: torch.device) -> None:
        self.segment = segment
        self.calls: list[_Arguments] = []
        tensor = first_tensor(args)
        assert tensor is not None
        self.fake = isinstance(tensor, FakeTensor)
        self.device = device
        self.inputs: dict[int, dict[_Made, torch.Tensor]] = {0: {_INPUT: _alone(tensor)}}  # what each unit needs
        self.requires_grad: dict[_Made, bool] = {_INPUT: tensor.requires_grad}
        self.found: dict[int, tuple[weakref.ref[torch.Tensor], _Made]] = {id(tensor): (weakref.ref(tensor), _INPUT)}  # by identity
        self.outside: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self.versions: list[tuple[str, torch.Tensor, int]] = [("its input", self.inputs[0][_INPUT], tensor._version)]
        self.random: list[_RandomState | None] = []  # at each unit's start
        self.autocast = _Autocast(device.type)
        self.places: list[weakref.ref[_Place]] = []
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []  # of what each place stands for
        self.unit_places: list[int] = []  # the first place of each unit
        self.changed: list[_Values] = []  # by unit, the buffers that its forward changed, as they were before
        self.kept: _Kept | None = _Kept(segment.keep, segment.label, None if self.fake else device) if segment.keep else None
        self.away: Offloaded | None = None

    def note_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called; its arguments are remembered without keeping what the segment makes."""
        leaves, spec = tree_flatten((args, kwargs))
        self.calls.append(_Arguments([self._place_of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec))

    def _place_of(self, tensor: torch.Tensor) -> _Made | torch.Tensor:
        found = self.found.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return found[1]
        held = self.outside.get(id(tensor))
        if held is None or held[0]() is not tensor:
            # Not the tensor itself: its graph would be held with it.
            held = self.outside[id(tensor)] = (weakref.ref(tensor), _alone(tensor))
            self.versions.append(("a tensor that it was given", held[1], tensor._version))
        return held[1]

    def note_output(self, position: int, output: Any) -> None:
        """A module has returned; its tensors can be told among the arguments of later ones."""
        for index, leaf in enumerate(tree_leaves(output)):
            if isinstance(leaf, torch.Tensor):
                place = _Made(position, index)
                self.found[id(leaf)] = (weakref.ref(leaf), place)
                self.requires_grad[place] = leaf.requires_grad

    def begin_unit(self) -> None:
        """The next unit of the first forward begins."""
        self.unit_places.append(len(self.places))
        self.changed.append({})
        # Reruns begin at the segment's input, and in a nest at any unit's.
        wanted = not self.fake and (self.segment.passes or not self.random)
        self.random.append(_RandomState(self.device) if wanted else None)

    def finish(self) -> None:
        """The first forward is over: random states that nobody drew from are forgotten, and what is offloaded leaves."""
        self.found.clear()
        self.outside.clear()
        first = self.random[0]
        if first is not None and first.same_as(_RandomState(self.device)):
            self.random = [None] * len(self.random)
        if self.kept and not self.segment.offload:
            # Not what is kept itself: it was taken beneath autograd, where nothing counts changes.
            seen = [tensor.detach() for tensor in (found() for found in self.kept.returned) if tensor is not None]
            self.versions.extend(("an output that the plan keeps", tensor, tensor._version) for tensor in seen)
        if self.segment.offload:
            kept = self.kept.tensors if self.kept else []
            del self.versions[0]
            self.away = Offloaded([self.inputs[0].pop(_INPUT), *kept], self.segment.host, self.segment)
            for output in self.kept.outputs.values() if self.kept else ():
                output.replace(torch.empty(0, device="meta") for _ in output.tensors)

    def pack(self, tensor: torch.Tensor) -> _Place:
        place = _Place(self, len(self.places))
        self.places.append(weakref.ref(place))
        self.kinds.append((tensor.shape, tensor.dtype))
        return place

    @staticmethod
    def unpack(place: _Place) -> torch.Tensor:
        if place.value is None:
            place.frame.recompute(place.number)
            assert place.value is not None
        return place.value

    def _run_for(self, number: int) -> _Run:
        """The run that fills this place."""
        if not self.segment.passes:
            return _Run(self.segment.unit_of[-1], 0, len(self.places))
        unit = max(index for index, first in enumerate(self.unit_places) if first <= number)
        first = self.unit_places[unit]
        last = self.unit_places[unit + 1] if unit + 1 < len(self.unit_places) else len(self.places)
        # Borders are numbers of saved tensors as traced. On this device the unit may save more or fewer; the passes shift then.
        edges = sorted({first, *(min(first + border, last) for border in self.segment.passes[unit]), last})
        for begin, end in itertools.pairwise(edges):
            if begin <= number < end:
                return _Run(unit, begin, end)
        raise AssertionError((number, edges))

    def _bring_back(self) -> None:
        """Take what was offloaded."""
        if self.away is None:
            return
        found = iter(self.away.take())
        tensor = next(found).requires_grad_(self.requires_grad[_INPUT])
        self.inputs[0][_INPUT] = tensor
        self.versions.insert(0, ("its input", tensor, tensor._version))
        for output in self.kept.outputs.values() if self.kept else ():
            output.replace(next(found) for _ in output.tensors)
        self.away = None

    def _check_unchanged(self) -> None:
        for what, tensor, version in self.versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"cannot recompute {self.segment.label}: {what} was changed in place after the forward "
                    f"(version {tensor._version}, was {version}); {_REMEDY}"
                )

    def recompute(self, number: int) -> None:
        """Run what is needed again and fill the places that belong together with this one and that backward still holds."""
        self._bring_back()
        self._check_unchanged()
        run = self._run_for(number)
        begin = max(unit for unit in self.inputs if unit <= run.unit)
        for unit in [unit for unit in self.inputs if unit > run.unit]:
            del self.inputs[unit]
        now = self.unit_places[begin] if self.segment.passes else 0

        def fill(tensor: torch.Tensor) -> None:
            nonlocal now
            if now >= run.end:
                raise RuntimeError(f"recomputing {self.segment.label} saves more tensors than its forward did ({run.end}); {_REMEDY}")
            if (tensor.shape, tensor.dtype) != self.kinds[now]:
                raise RuntimeError(
                    f"recomputing {self.segment.label} saves another tensor than its forward did: {tuple(tensor.shape)} of {tensor.dtype}, "
                    f"not {tuple(self.kinds[now][0])} of {self.kinds[now][1]}; the model does not do the same twice, so it cannot be "
                    f"checkpointed here; {_REMEDY}"
                )
            place = self.places[now]() if now >= run.first else None
            if place is not None:
                place.value = tensor.detach()
            now += 1
            if now == run.end:
                raise _AllFilled

        def refuse(_: None) -> torch.Tensor:
            raise AssertionError("the graph of a recompute is never walked")

        with ExitStack() as stack:
            state = self.random[begin]
            if state is not None:
                stack.callback(_RandomState(self.device).restore)
                state.restore()
            stack.enter_context(self.segment.unchanged_buffers(begin, run.unit, self.changed))
            stack.enter_context(self.autocast.entered())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(fill, refuse))
            if self.kept:
                stack.enter_context(_Kept(self.segment.keep, self.segment.label, None, self.kept))
            with suppress(_AllFilled):
                self.segment.run_again(self, begin, run.unit)
        if now != run.end:
            raise RuntimeError(
                f"recomputing {self.segment.label} saved {now} tensors, its forward {run.end}; "
                f"the model does not do the same twice, so it cannot be checkpointed here; {_REMEDY}"
            )

    def note_inputs(self, unit: int, values: Mapping[_Made, torch.Tensor]) -> None:
        """What a unit and those after it need, in a nested rerun: later reruns start there."""
        self.inputs[unit] = {place: value.detach().requires_grad_(self.requires_grad[place]) for place, value in values.items()}

    def last_uses(self) -> dict[_Made, int]:
        """The last position at which each tensor that the segment makes is an argument."""
        return {place: position for position, call in enumerate(self.calls) for place in call.made}


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


# Buffers by module and name, and what they held.
_Values = dict[nn.Module, dict[str, torch.Tensor | None]]


class _Buffers:
    """A module's buffers before its forward. The tensors are held, so that one put in place of another is told by identity."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before = dict(module._buffers)
        self.versions = {name: buffer._version for name, buffer in self.before.items() if buffer is not None}
        self.values: dict[str, torch.Tensor | None] = {}
        if not _is_batch_norm(module):
            self.values = {name: None if buffer is None else buffer.detach().clone() for name, buffer in self.before.items()}

    def changed(self) -> dict[str, torch.Tensor | None] | None:
        """What a second run must begin with; None where nothing changed. All of a batch norm that is not torch's: it may use them."""
        if _advances_statistics(self.module):
            return self.values
        now = self.module._buffers
        names = [
            name
            for name, buffer in self.before.items()
            if now.get(name) is not buffer or (buffer is not None and buffer._version != self.versions[name])
        ]
        return {name: self.values[name] for name in names if name in self.values} if names else None


@contextmanager
def _cloned_buffers(values: Mapping[nn.Module, Mapping[str, torch.Tensor | None]]) -> Iterator[None]:
    """Inside, these modules have clones of the values given and, for their other buffers, of the present ones."""
    originals = [(module, dict(module._buffers)) for module in values]
    try:
        for module, buffers in originals:
            found = {**buffers, **values[module]}
            module._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in found.items()})
        yield
    finally:
        for module, buffers in originals:
            module._buffers.clear()
            module._buffers.update(buffers)


class _SegmentRunner:
    """The modules of one segment, and the state of its forward while it is under way.

    Args:
        names: dotted names of each unit's modules.
        modules: all modules of the model by name.
        segment: what the plan says of it.
        host: where offloaded tensors go.
    """

    def __init__(self, names: Sequence[Sequence[str]], modules: Mapping[str, nn.Module], segment: Segment, host: HostMemory) -> None:
        self.names = tuple(name for unit in names for name in unit)
        self.modules = tuple(modules[name] for name in self.names)
        self.unit_of = tuple(index for index, unit in enumerate(names) for _ in unit)
        self.label = self.names[0] if len(self.names) == 1 else f"{self.names[0]} to {self.names[-1]}"
        self.passes, self.keep, self.offload, self.host = segment.passes, segment.keep, segment.tier == "offload", host
        self.buffered = [[module for module in top.modules() if module._buffers] for top in self.modules]  # by position
        self.frame: _Frame | None = None
        self.last_output: weakref.ref[torch.Tensor] | None = None
        self.recomputing = False

    def __getstate__(self) -> dict[str, Any]:
        """For a copy of the model: what is under way stays with the original. A head that was not called leaves a forward unfinished."""
        return {**self.__dict__, "frame": None, "last_output": None, "recomputing": False}

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
                "the model's chain is not the one that was planned, or a hook put on one of them hands on another tensor; take such hooks "
                "off, or plan with them in place"
            )
        frame = self.frame
        if position == 0 or self.unit_of[position] != self.unit_of[position - 1]:
            frame.begin_unit()
        frame.note_call(args, kwargs)
        before = [_Buffers(module) for module in self.buffered[position]]
        try:
            with torch.autograd.graph.saved_tensors_hooks(frame.pack, frame.unpack), frame.kept or nullcontext():
                output = original(*args, **kwargs)
        except BaseException:
            self.frame = None
            raise
        for buffers in before:
            changed = buffers.changed()
            if changed is not None:
                earlier = frame.changed[-1].get(buffers.module, {})
                frame.changed[-1][buffers.module] = {**changed, **earlier}
        del before
        result = handed_on(output, args)
        assert result is not None
        self.last_output = weakref.ref(result)
        frame.note_output(position, output)
        if position == len(self.modules) - 1:
            frame.finish()
            self.frame = None
        return output

    @contextmanager
    def unchanged_buffers(self, begin: int, end: int, changed: Sequence[_Values]) -> Iterator[None]:
        """Around a second run of units `begin` to `end`: buffers start as they were at the first one's start, and end as they are now."""
        values: _Values = {}
        for unit in changed[begin : end + 1]:  # of those that were called
            for module, held in unit.items():
                values[module] = {**held, **values.get(module, {})}
        positions = zip(self.unit_of, self.buffered, strict=True)
        others = [module for unit, modules in positions if begin <= unit <= end for module in modules if module not in values]
        before = [(module, dict(module._buffers), _buffer_versions(module)) for module in others]
        with _cloned_buffers(values):
            yield
        for module, buffers, versions in before:
            same = all(module._buffers.get(name) is buffer for name, buffer in buffers.items())
            if not same or _buffer_versions(module) != versions:
                raise RuntimeError(
                    f"recomputing {self.label} changes buffers of a {type(module).__name__} that its forward did not change; {_REMEDY}"
                )

    def run_again(self, frame: _Frame, begin: int, end: int) -> None:
        """Units `begin` to `end`, from the input that the frame holds for the first of them."""
        values = dict(frame.inputs[begin])
        last_uses = frame.last_uses()
        self.recomputing = True
        try:
            for position, (module, call) in enumerate(zip(self.modules, frame.calls, strict=True)):
                unit = self.unit_of[position]
                if unit < begin:
                    continue
                if unit > end:
                    break
                if self.passes and unit > begin and unit != self.unit_of[position - 1]:
                    frame.note_inputs(unit, values)
                args, kwargs = call.filled(values)
                for leaf, value in enumerate(tree_leaves(module(*args, **kwargs))):
                    if last_uses.get(_Made(position, leaf), -1) > position:
                        values[_Made(position, leaf)] = value
                values = {place: value for place, value in values.items() if last_uses.get(place, -1) > position}
                del args, kwargs
        finally:
            self.recomputing = False


def _buffer_versions(module: nn.Module) -> list[int]:
    return [buffer._version for buffer in module._buffers.values() if buffer is not None]


def _is_batch_norm(module: nn.Module) -> bool:
    """Torch's own and timm's, whose output in training does not depend on the buffers that they change."""
    return isinstance(module, _BatchNorm) and type(module).__module__.startswith(("torch.", "timm."))


def _advances_statistics(module: nn.Module) -> bool:
    """Batch norm's kernels write the running statistics without raising their version."""
    return module.training and module._buffers.get("running_mean") is not None


class _Around:
    """Stands before a module's forward while a plan is applied.

    Of a module that is compiled (`module.compile()`) it stands before the compiled call: the compiler must not look into what a
    plan does, and what it makes is one operator to the plan, which saves other tensors than the module would.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self.module, self.run = module, run
        self.place = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"
        self.before = module.__dict__.get(self.place)
        self.original = getattr(module, self.place)
        module.__dict__[self.place] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # a compiler runs what follows as it is written: only so does the error come out
            raise RuntimeError(_COMPILED_LATE)
        return self.run(self.original, args, kwargs)

    def remove(self) -> None:
        """The module is as it was."""
        if self.before is None:
            del self.module.__dict__[self.place]
        else:
            self.module.__dict__[self.place] = self.before


_COMPILED_LATE = (
    "a module was compiled after a plan was applied to it; remove the plan, compile block by block (block.compile()), then apply it again"
)


def is_planned(module: nn.Module) -> bool:
    """Whether a plan, or something else, stands before the module's forward."""
    return "forward" in module.__dict__ or isinstance(module.__dict__.get("_compiled_call_impl"), _Around)


@contextmanager
def without_plan(model: nn.Module) -> Iterator[None]:
    """Inside, the model runs as if no plan were applied; afterwards as before."""
    taken = [
        (module, place, around)
        for module in model.modules()
        for place in ("forward", "_compiled_call_impl")
        if isinstance(around := module.__dict__.get(place), _Around)
    ]
    try:
        for _, _, around in taken:
            while isinstance(around.before, _Around):  # a module that runs in slices, within a segment
                around = around.before
            around.remove()
        yield
    finally:
        for module, place, around in taken:
            module.__dict__[place] = around


class PlanHandle:
    """A plan that is applied to a model. The state dict's keys are those of the bare model."""

    def __init__(self, wrapped: Sequence[_Around]) -> None:
        self._wrapped = list(wrapped)

    def remove(self) -> None:
        """Take the plan off; the model is as it was. A second call does nothing."""
        for around in reversed(self._wrapped):
            around.remove()
        self._wrapped = []


def apply_plan(model: nn.Module, plan: CheckpointPlan) -> PlanHandle:
    """Make `model` recompute the plan's segments in backward.

    Raises:
        ValueError: the plan is for another model (a unit's module is missing), a plan is applied already, or the model is compiled in a
            way that the plan cannot hold.
    """
    return apply_segments(model, plan.segments, plan.unit_modules)


def apply_segments(model: nn.Module, segments: Sequence[Segment], unit_modules: Sequence[Sequence[str]]) -> PlanHandle:
    """As `apply_plan`, from the segments alone."""
    refuse_wrappers(model)
    modules = dict(model.named_modules())
    names = [name for unit in unit_modules for name in unit]
    missing = [name for name in names if name not in modules]
    if missing:
        raise ValueError(f"the plan is for another model: {len(missing)} of {len(names)} modules are missing, first {missing[0]!r}")
    taken = [name for name in names if is_planned(modules[name])]
    if taken:
        raise ValueError(f"a plan is applied already (at {taken[0]!r}); remove it first")
    refuse_compiled_around(model, names)
    for segment in segments:
        refuse_finer(segment, [(name, modules[name]) for unit in unit_modules[segment.start : segment.end] for name in unit])
    wrapped = []
    host = HostMemory()
    for name in [name for segment in segments for name in segment.slices]:
        if name not in modules:
            raise ValueError(f"the plan is for another model: it runs {name!r} in slices, which is missing")
        why = parts_refuse(modules[name])
        if why is not None:
            raise ValueError(f"the plan is for another model: {name!r} cannot run in slices, for {why}")
        wrapped.append(_Around(modules[name], partial(_in_slices, modules[name])))
    for segment in segments:
        if segment.tier == "store":
            continue
        runner = _SegmentRunner(unit_modules[segment.start : segment.end], modules, segment, host)
        for position, module in enumerate(runner.modules):
            wrapped.append(_wrap(module, runner, position))
    return PlanHandle(wrapped)


def _in_slices(module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run_in_slices(module, original, *args, **kwargs)


def _wrap(module: nn.Module, runner: _SegmentRunner, position: int) -> _Around:
    return _Around(module, partial(runner.forward, position))
