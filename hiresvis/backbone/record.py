"""Runs a training step on fake tensors and records what happens in each unit: no memory, no arithmetic.

The model's copy consists of fake CPU tensors, so attention takes the flash kernel, which saves what a GPU's flash kernel saves
but for small things: on the CPU 5 tensors, on CUDA 7, with the seed and offset of its random numbers; and batch norm saves 6, with
cuDNN 7, with a reserve of its own. So bytes are right, and the *numbers* of saved tensors, which are where a plan's passes begin,
can be off on a GPU: passes then begin a few tensors earlier than was reckoned, which moves their peaks, never gradients
(`segments`). Every storage is counted by identity while it is alive, and stamped with the unit that made it. A
parameter's gradient stays where it is new, and is let go where it is added to an older one; both peaks are read off one
backward.

For a GPU autocast follows CUDA's rules: what CUDA computes in fp32 and the CPU does not gets its inputs cast beforehand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from hiresvis.backbone.chain import Chain, first_tensor, handed_on, tensors_in
from hiresvis.backbone.flops import PRODUCTS, forward_flops
from hiresvis.backbone.ways import Place, Product
from hiresvis.device import StorageCounter

TRACE_BATCHES = (2, 4)


def fake_copy(model: nn.Module) -> tuple[FakeTensorMode, nn.Module]:
    """A copy of the model whose parameters and buffers take no memory, and the mode to run it in."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        return mode, copy.deepcopy(model)


def resident(model: nn.Module) -> Iterator[torch.Tensor]:
    """What is there before a step: parameters, buffers, gradients of earlier micro-batches."""
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()


@dataclass(frozen=True, slots=True)
class TracedLoss:
    """A loss that is worth tracing: one whose memory grows with the pixels.

    Attributes:
        losses: of outputs (b, ...) and targets, per-sample losses (b,).
        targets: of so many images, as the loader gives them.
    """

    losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    targets: Callable[[int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Setting:
    """How a step is run, apart from the batch. `loss`: None for cross entropy over a row of outputs, which takes hardly any memory."""

    image_size: tuple[int, int]
    in_chans: int
    num_classes: int
    dtype: torch.dtype | None
    channels_last: bool
    block: int
    rules: str
    loss: TracedLoss | None = None

    def by_rules(self) -> AbstractContextManager[Any]:
        """The target's autocast rules, around a whole step: backward may run a forward again."""
        return _CudaRules() if self.rules == "cuda" and self.dtype is not None else nullcontext()


class Tracer:
    def __init__(self, mode: FakeTensorMode, model: nn.Module, chain: Chain, setting: Setting) -> None:
        self.mode, self.model, self.chain, self.setting = mode, model, chain, setting
        self.names = [name for index, unit in enumerate(chain.units) for name in (f"glue.{index}", unit.name)]
        self.names.append(f"glue.{len(chain.units)}")
        # Autocast's cache holds casts of what is trained alone; a frozen weight's copy lives as long as something has it.
        self.weights = {id(tensor) for tensor in model.parameters() if tensor.requires_grad}

    def images(self, batch: int) -> torch.Tensor:
        height, width = self.setting.image_size
        images = torch.zeros(batch, self.setting.in_chans, height, width)
        return images.to(memory_format=torch.channels_last) if self.setting.channels_last else images

    def recorder(self) -> Recorder:
        recorder = Recorder(self.names, self.setting.block, self.weights)
        recorder.track(resident(self.model))
        recorder.intervals[0].made.clear()
        return recorder

    def _loss(self, batch: int, recorder: Recorder) -> torch.Tensor:
        images = self.images(batch)
        targets = torch.zeros(0) if self.setting.loss is None else self.setting.loss.targets(batch)  # there before the step, as images are
        recorder.track([images])
        recorder.enter(0)
        recorder.intervals[0].input_number = recorder.number(images)
        with torch.autocast("cpu", dtype=self.setting.dtype or torch.bfloat16, enabled=self.setting.dtype is not None):
            logits = self.model(images)
            if (loss := self.setting.loss) is not None:
                return loss.losses(logits.float(), targets).sum() / batch
            if isinstance(logits, (tuple, list)):
                logits = logits[0]
            target = torch.zeros(batch, dtype=torch.int64)
            return nn.functional.cross_entropy(logits.float(), target, reduction="none").sum() / batch

    def stored(self, batch: int) -> Recorder:
        """A step that keeps everything."""
        recorder = self.recorder()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        handles = [handle for parameter in trained for handle in recorder.watch_gradient(parameter)]
        with self.mode, recorder, self.setting.by_rules(), _unit_hooks(self.model, self.chain, recorder):
            with torch.autograd.graph.saved_tensors_hooks(recorder.pack, _Held.unpack):
                loss = self._loss(batch, recorder)
            recorder.enter_backward(len(self.names) - 1)
            loss.backward()
        for handle in handles:
            handle.remove()
        for parameter in trained:
            parameter.grad = None
        return recorder

    def dropped(self, batch: int) -> Recorder:
        """A forward whose saved tensors are let go at once."""
        recorder = self.recorder()
        let_go = torch.autograd.graph.saved_tensors_hooks(recorder.drop, lambda _: None)
        with self.mode, recorder, self.setting.by_rules(), _unit_hooks(self.model, self.chain, recorder), let_go:
            self._loss(batch, recorder)
        return recorder

    def input_shapes(self, modules: Mapping[str, nn.Module]) -> dict[str, tuple[int, ...]]:
        """Input shapes of those modules (by their names) that one forward calls once, with one tensor."""
        seen: dict[str, list[Any]] = {}
        handles = [
            self.model.get_submodule(name).register_forward_pre_hook(
                lambda _, args, kwargs, name=name: seen.setdefault(name, []).append((args, kwargs)), with_kwargs=True
            )
            for name in modules
        ]
        with self.mode, torch.no_grad():
            self.model(self.images(TRACE_BATCHES[0]))
        for handle in handles:
            handle.remove()
        shapes = {}
        for name, calls in seen.items():
            args, kwargs = calls[0]
            if len(calls) == 1 and not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
                shapes[name] = tuple(args[0].shape)
        return shapes

    def evaluation(self, batch: int) -> list[int]:
        """Live bytes above the resident ones, moment by moment, of a forward without gradients in evaluation mode."""
        training = {module: module.training for module in self.model.modules()}
        self.model.eval()
        recorder = self.recorder()
        recorder.enter(0)
        with self.mode, torch.no_grad(), recorder, self.setting.by_rules():
            images = self.images(batch)
            with torch.autocast("cpu", dtype=self.setting.dtype or torch.bfloat16, enabled=self.setting.dtype is not None):
                self.model(images)
        for module, was_training in training.items():
            module.training = was_training
        return recorder.intervals[0].forward_levels


# Of the operators that CUDA's autocast runs in fp32 (AT_FORALL_FP32 in torch's autocast_mode.h), those that the CPU's leaves
# alone and that models use.
_FP32_ON_CUDA = frozenset(
    {
        nn.functional.layer_norm,
        nn.functional.group_norm,
        nn.functional.softmax,
        nn.functional.log_softmax,
        nn.functional.softplus,
        nn.functional.normalize,
        nn.functional.cosine_similarity,
        torch.layer_norm,
        torch.group_norm,
        torch.softmax,
        torch.log_softmax,
        torch.exp,
        torch.log,
        torch.pow,
        torch.rsqrt,
        torch.reciprocal,
        torch.norm,
        torch.cumsum,
        torch.sum,
        torch.Tensor.softmax,
        torch.Tensor.log_softmax,
        torch.Tensor.exp,
        torch.Tensor.log,
        torch.Tensor.pow,
        torch.Tensor.__pow__,
        torch.Tensor.rsqrt,
        torch.Tensor.reciprocal,
        torch.Tensor.norm,
        torch.Tensor.cumsum,
        torch.Tensor.sum,
    }
)


class _CudaRules(TorchFunctionMode):
    """CUDA's autocast on fake CPU tensors: casts the inputs of its fp32 list."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FP32_ON_CUDA and torch.is_autocast_enabled("cpu"):
            args = tuple(
                value.float() if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value
                for value in args
            )
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class _Interval:
    """What was seen during one entry of the chain (a unit, or the glue before it)."""

    name: str
    forward_entry: int = 0
    forward_levels: list[int] = field(default_factory=list)  # live bytes above those at entry, moment by moment
    backward_entry: int = 0
    backward_levels: list[int] = field(default_factory=list)
    backward_more_levels: list[int] = field(default_factory=list)
    flops: int = 0
    traffic: int = 0
    again_flops: int = 0  # of forwards inside backward
    again_traffic: int = 0
    operators: int = 0
    parts: bool = False  # the units before and after do not hand a tensor on, though no operator is between them
    made: set[int] = field(default_factory=set)
    saved: set[int] = field(default_factory=set)
    casts: set[int] = field(default_factory=set)
    alive_at_entry: set[int] = field(default_factory=set)
    alive_at_backward: set[int] = field(default_factory=set)
    input_number: int | None = None
    besides: list[int] = field(default_factory=list)  # other storages that the unit is given
    gradients: set[int] = field(default_factory=set)  # of all that it is given, those that get one
    output_number: int | None = None
    input_gradient: bool = False
    keeps_shape: bool = False  # a unit's output is of its input's kind
    products: list[Product] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    born: dict[int, int] = field(default_factory=dict)  # storages made here, by the forward moment they came, and went
    died: dict[int, int] = field(default_factory=dict)
    gone: dict[int, int] = field(default_factory=dict)  # any storage, by the backward moment it went
    unpacked: dict[int, int] = field(default_factory=dict)
    released: dict[int, int] = field(default_factory=dict)


def _moved_bytes(func: Any, args: Any, out: torch.Tensor) -> int:
    """What an operator reads and writes; nothing for one that only looks at memory in another way."""
    if func.is_view:
        return 0
    return out.nbytes + sum(value.nbytes for value in args if isinstance(value, torch.Tensor))


class _Held:
    """A saved tensor that tells when it is let go."""

    __slots__ = ("interval", "place", "tensor")

    def __init__(self, interval: _Interval, place: int, tensor: torch.Tensor) -> None:
        self.interval, self.place, self.tensor = interval, place, tensor

    def unpack(self) -> torch.Tensor:
        self.interval.unpacked.setdefault(self.place, len(self.interval.backward_levels))
        return self.tensor

    def __del__(self) -> None:
        self.interval.released[self.place] = len(self.interval.backward_levels)


class Recorder(StorageCounter):
    """Counts storages and books them to intervals: 0 is the glue before unit 0, 1 is unit 0, 2 the glue after it, ..."""

    def __init__(self, names: list[str], block: int, weights: set[int]) -> None:
        super().__init__(block)
        self.intervals = [_Interval(name) for name in names]
        self.now = 0
        self.in_backward = False
        self.landing = False
        self.landed_bytes = 0
        self.elements: list[int] = []  # of each operator's output
        self.changed: set[int] = set()  # storages that an operator wrote to after they were made
        self.weight_tensors = weights

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        interval = self.intervals[self.now]
        tensor = first_tensor(out)
        if tensor is not None:
            self.elements.append(tensor.numel())
            if not self.in_backward:
                interval.operators += 1
                self._note_product(interval, func, args, out, _moved_bytes(func, args, tensor))
                if func is torch.ops.aten._to_copy.default and id(args[0]) in self.weight_tensors:
                    number = self.number(tensor)
                    if number is not None:
                        interval.casts.add(number)
            elif torch.is_grad_enabled():  # a module that runs in slices does its forward once more
                interval.again_flops += forward_flops(func, args, out)
                interval.again_traffic += _moved_bytes(func, args, tensor)
        self.note_level()
        return out

    def _note_product(self, interval: _Interval, func: Any, args: Any, out: Any, traffic: int) -> None:
        interval.traffic += traffic
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                    number = self.number(value)
                    if number is not None:
                        self.changed.add(number)
        if func in PRODUCTS:
            flops = forward_flops(func, args, out)
            numbers = {self.number(value) for value in tree_iter(out) if isinstance(value, torch.Tensor)}
            interval.products.append(Product(flops, traffic, tuple(sorted(number for number in numbers if number is not None))))
            interval.flops += flops

    def created(self, number: int) -> None:
        interval = self.intervals[self.now]
        interval.made.add(number)
        if not self.in_backward:
            interval.born[number] = len(interval.forward_levels)
        self.note_level()

    def _forget(self, number: int, size: int, gone: object) -> None:
        super()._forget(number, size, gone)
        interval = self.intervals[self.now]
        if self.in_backward:
            interval.gone[number] = len(interval.backward_levels)
        elif number in interval.born:
            interval.died[number] = len(interval.forward_levels)

    def note_level(self) -> None:
        interval = self.intervals[self.now]
        if not self.in_backward:
            interval.forward_levels.append(self.live_bytes - interval.forward_entry)
            return
        level = self.live_bytes - interval.backward_entry
        interval.backward_levels.append(level)
        more = interval.backward_more_levels
        more.append((more[-1] if more else 0) if self.landing else level - self.landed_bytes)

    def enter(self, index: int) -> None:
        if self.in_backward:
            return
        self.now = index
        interval = self.intervals[index]
        interval.forward_entry, interval.forward_levels = self.live_bytes, []
        interval.alive_at_entry = self.alive()

    def enter_backward(self, index: int) -> None:
        if self.in_backward and index > self.now:
            return  # a tensor that later units only hand through has its gradient when the one that made it begins
        self.now, self.in_backward, self.landed_bytes = index, True, 0
        interval = self.intervals[index]
        interval.backward_entry, interval.backward_levels, interval.backward_more_levels = self.live_bytes, [], []
        interval.alive_at_backward = interval.made & self._alive.keys()

    def watch_gradient(self, parameter: torch.Tensor) -> tuple[Any, Any]:
        """Hooks at both ends of a parameter's gradient coming to rest.

        A new one stays (copied when its strides are not the parameter's); one added to an older one is let go, and no
        copy is made. So one backward shows both peaks.
        """

        def arrive(_: torch.Tensor) -> None:
            self.landing = True

        def land(parameter: torch.Tensor) -> None:
            self.landing = False
            number = None if parameter.grad is None else self.number(parameter.grad)
            self.landed_bytes += 0 if number is None else self.sizes[number]

        return parameter.register_hook(arrive), parameter.register_post_accumulate_grad_hook(land)

    def pack(self, tensor: torch.Tensor) -> _Held:
        interval = self.intervals[self.now]
        self._note_place(interval, tensor)
        return _Held(interval, len(interval.places) - 1, tensor.detach())

    def drop(self, tensor: torch.Tensor) -> None:
        self._note_place(self.intervals[self.now], tensor)

    def _note_place(self, interval: _Interval, tensor: torch.Tensor) -> None:
        number = self.number(tensor)
        if number is not None:
            interval.saved.add(number)
        interval.places.append(Place(len(interval.forward_levels), number, interval.flops, interval.traffic, len(interval.products)))


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


@contextmanager
def _unit_hooks(model: nn.Module, chain: Chain, recorder: Recorder) -> Iterator[None]:
    """Move the recorder from interval to interval as the model's modules are called."""
    modules = dict(model.named_modules())
    handles = []
    inputs: dict[int, object] = {}

    def begin(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            tensor = first_tensor(args)
            assert tensor is not None
            before, unit = recorder.intervals[2 * index], recorder.intervals[2 * index + 1]
            unit.input_number = before.output_number = recorder.number(tensor)
            for given in tensors_in((args, kwargs)):
                number = recorder.number(given)
                if number is not None and number != unit.input_number:
                    unit.besides.append(number)
                if number is not None and given.requires_grad:
                    unit.gradients.add(number)
            unit.input_gradient = tensor.requires_grad
            inputs[index] = _kind_of(tensor)
            if tensor.requires_grad and before.operators:
                tensor.register_hook(lambda _: recorder.enter_backward(2 * index))
            recorder.enter(2 * index + 1)

        return hook

    def begin_backward(number: int) -> None:
        # With several outputs it begins at the last gradient that comes before any of its operators runs.
        if not recorder.intervals[number].unpacked:
            recorder.enter_backward(number)

    def end(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensor = handed_on(output, args)
            assert tensor is not None
            number = recorder.number(tensor)
            recorder.intervals[2 * index + 1].output_number = recorder.intervals[2 * index + 2].input_number = number
            alike = inputs.pop(index) == _kind_of(tensor)
            recorder.intervals[2 * index + 1].keeps_shape = alike and tensor is output and isinstance(args[0], torch.Tensor)
            given = set(map(id, tensors_in(args))) - {id(tensor)}
            for made in tensors_in(output):
                if made.requires_grad and id(made) not in given:
                    made.register_hook(lambda _: begin_backward(2 * index + 1))
            recorder.enter(2 * index + 2)

        return hook

    for index, unit in enumerate(chain.units):
        recorder.intervals[2 * index].parts = index > 0 and not unit.linked
        handles.append(modules[unit.modules[0]].register_forward_pre_hook(begin(index), with_kwargs=True))
        handles.append(modules[unit.modules[-1]].register_forward_hook(end(index)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
