"""Traces what each unit costs, on fake tensors: a whole training step without memory and without arithmetic.

The model's copy consists of fake CPU tensors, so attention takes the flash kernel, whose saved tensors are the ones a GPU
kernel saves as well. Every storage is counted by identity while it is alive, and stamped with the unit that made it.
Two passes per batch size: forward and backward (a parameter's gradient stays where it is new, and is let go where it is
added to an older one; both peaks are read off one pass), and a forward that keeps no saved tensor, which is what a
recomputed segment's first forward does. Two batch sizes make every size affine in the batch, and every peak
the highest of the lines through what was live at the same moment of both.

For a GPU autocast follows CUDA's rules: what CUDA computes in fp32 and the CPU does not gets its inputs cast beforehand.

What it does badly: kernels' own scratch memory is not seen (the probe measures it).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import timm
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from hiresvis.backbone.chain import Chain, find_chain, first_tensor, handed_on, tensors_in
from hiresvis.backbone.flops import PRODUCTS, forward_flops
from hiresvis.backbone.slices import run_in_slices, why_not
from hiresvis.backbone.ways import Place, Product, Tape, flops_to_last_save, ways_of
from hiresvis.device import StorageCounter
from hiresvis.memory.costs import Affine, Highest, Kind, MemoryProfile, Recompute, UnitCosts

TRACE_BATCHES = (2, 4)
MAX_TENSOR_ELEMENTS = 2**31
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


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


class _Recorder(StorageCounter):
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


def fake_copy(model: nn.Module) -> tuple[FakeTensorMode, nn.Module]:
    """A copy of the model whose parameters and buffers take no memory, and the mode to run it in."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        return mode, copy.deepcopy(model)


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


@contextmanager
def _unit_hooks(model: nn.Module, chain: Chain, recorder: _Recorder) -> Iterator[None]:
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


@dataclass(frozen=True, slots=True)
class _Setting:
    """How a step is run, apart from the batch."""

    image_size: tuple[int, int]
    in_chans: int
    num_classes: int
    dtype: torch.dtype | None
    channels_last: bool
    block: int
    rules: str

    def by_rules(self) -> AbstractContextManager[Any]:
        """The target's autocast rules, around a whole step: backward may run a forward again."""
        return _CudaRules() if self.rules == "cuda" and self.dtype is not None else nullcontext()


class _Tracer:
    def __init__(self, mode: FakeTensorMode, model: nn.Module, chain: Chain, setting: _Setting) -> None:
        self.mode, self.model, self.chain, self.setting = mode, model, chain, setting
        self.names = [name for index, unit in enumerate(chain.units) for name in (f"glue.{index}", unit.name)]
        self.names.append(f"glue.{len(chain.units)}")
        self.weights = {id(tensor) for tensor in model.parameters()}

    def images(self, batch: int) -> torch.Tensor:
        height, width = self.setting.image_size
        images = torch.zeros(batch, self.setting.in_chans, height, width)
        return images.to(memory_format=torch.channels_last) if self.setting.channels_last else images

    def recorder(self) -> _Recorder:
        recorder = _Recorder(self.names, self.setting.block, self.weights)
        recorder.track(_resident(self.model))
        recorder.intervals[0].made.clear()
        return recorder

    def _loss(self, batch: int, recorder: _Recorder) -> torch.Tensor:
        images = self.images(batch)
        recorder.track([images])
        recorder.enter(0)
        recorder.intervals[0].input_number = recorder.number(images)
        with torch.autocast("cpu", dtype=self.setting.dtype or torch.bfloat16, enabled=self.setting.dtype is not None):
            logits = self.model(images)
            if isinstance(logits, (tuple, list)):
                logits = logits[0]
            target = torch.zeros(batch, dtype=torch.int64)
            return nn.functional.cross_entropy(logits.float(), target, reduction="none").sum() / batch

    def stored(self, batch: int) -> _Recorder:
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

    def dropped(self, batch: int) -> _Recorder:
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


def trace_costs(
    model: nn.Module,
    *,
    name: str,
    image_size: tuple[int, int],
    in_chans: int,
    num_classes: int,
    precision: str,
    channels_last: bool,
    block: int,
    raw_image_bytes: int,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    optimizer_name: str,
    clip_grad: float | None = None,
    ema: bool = False,
    rules: Literal["cpu", "cuda"] = "cpu",
) -> tuple[Chain, MemoryProfile]:
    """The chain of a model and what its units cost.

    Args:
        model: in the training mode and with the `requires_grad` mask it will be trained with; it is not changed.
        image_size: (height, width) in px.
        precision: fp32, bf16 or fp16 (autocast).
        block: granularity of the device's allocator in bytes.
        raw_image_bytes: bytes of one image as the loader hands it over.
        make_optimizer: builds the optimizer for a (fake) model.
        rules: whose autocast decides dtypes.

    Returns:
        The chain, and the profile (bytes and FLOPs, affine in the batch).

    Raises:
        ValueError: the model is no chain: fewer than two modules hand a tensor on.
    """
    mode, fake = fake_copy(model)
    setting = _Setting(image_size, in_chans, num_classes, _AUTOCAST.get(precision), channels_last, block, rules)
    probe = _Tracer(mode, fake, Chain(()), setting)
    with mode:
        images = probe.images(TRACE_BATCHES[0])
        chain = find_chain(fake, lambda: fake(images))
    if len(chain.units) < 2:
        raise ValueError(f"{name} is no chain of modules: only {len(chain.units)} found that hand a tensor on; nothing can be planned")
    tracer = _Tracer(mode, fake, chain, setting)
    layouts = [_Layout(tracer.stored(batch), tracer.dropped(batch)) for batch in TRACE_BATCHES]
    sliceable = _sliceable(model, chain, tracer)
    in_slices: list[_Layout] = []
    alike: dict[int, int] = {}
    if any(sliceable):
        alike = _first_alike(layouts, sliceable)
        with _running_in_slices(fake, chain, sliceable, set(alike.values()), layouts[0]):
            in_slices = [_Layout(tracer.stored(batch), tracer.dropped(batch)) for batch in TRACE_BATCHES]
    few, many = TRACE_BATCHES
    evaluation = Highest.through(few, tracer.evaluation(few), many, tracer.evaluation(many))
    units, boundaries = _assemble(fake, chain, layouts, in_slices, sliceable, alike)
    weights, buffers = _rounded(fake.parameters(), block), _rounded(fake.buffers(), block)
    gradients = _rounded((p for p in fake.parameters() if p.requires_grad), block)
    with mode:
        state, temporaries = _optimizer_bytes(fake, make_optimizer, clip_grad, block)
    return chain, MemoryProfile(
        model=name,
        image_size=image_size,
        precision=precision,
        units=units,
        boundaries=boundaries,
        raw_image=Affine(0, raw_image_bytes),
        weights=weights,
        buffers=buffers,
        gradients=gradients,
        optimizer=optimizer_name,
        optimizer_state=state,
        optimizer_temporaries=temporaries,
        ema=weights + buffers if ema else 0,
        evaluation=evaluation,
        block_size=block,
        max_batch=_max_batch(Highest.through(few, layouts[0].first.elements, many, layouts[1].first.elements)),
        versions={"torch": torch.__version__, "timm": timm.__version__},
    )


def _max_batch(elements: Highest) -> int:
    """The most images with which no tensor has MAX_TENSOR_ELEMENTS; those that do not grow with the batch do not count."""
    growing = [line for line in elements.lines if line.slope > 0]
    return max(1, min((MAX_TENSOR_ELEMENTS - 1 - line.base) // line.slope for line in growing))


def _rounded(tensors: Any, block: int) -> int:
    return sum(-(-size // block) * block for size in {id(tensor): tensor.nbytes for tensor in tensors}.values())


def _optimizer_bytes(
    model: nn.Module, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], clip_grad: float | None, block: int
) -> tuple[int, int]:
    """(bytes of the optimizer's state, bytes on top while it steps), from two fake steps; clipping counts as its part."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    counter = StorageCounter(block)
    counter.track(_resident(model))
    states, temporaries = [], []
    with counter:
        optimizer = make_optimizer(model)
        before = counter.live_bytes
        for _ in range(2):
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            counter.reset_peak()
            if clip_grad is not None:
                torch.nn.utils.clip_grad_norm_(trained, clip_grad, foreach=True)
            optimizer.step()
            temporaries.append(counter.peak_bytes - counter.live_bytes)
            optimizer.zero_grad(set_to_none=True)
            states.append(counter.live_bytes - before)
    return states[-1], max(0, temporaries[-1])


def _resident(model: nn.Module) -> Iterator[torch.Tensor]:
    """What is there before a step: parameters, buffers, gradients of earlier micro-batches."""
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()


def _sliceable(model: nn.Module, chain: Chain, tracer: _Tracer) -> list[tuple[str, ...]]:
    """For each unit the names of the outermost modules inside that can run in slices."""
    modules = dict(model.named_modules())
    candidates = {
        name: module
        for unit in chain.units
        if unit.opens_segment
        for top in unit.modules
        for name, module in modules.items()
        if name.startswith(f"{top}.") and any(True for _ in module.children())
    }
    shapes = tracer.input_shapes(candidates)
    answers: dict[object, str | None] = {}  # modules built alike are tried once
    found: list[tuple[str, ...]] = []
    for unit in chain.units:
        names: list[str] = []
        for name, module in candidates.items():
            inside = name.startswith(tuple(f"{top}." for top in unit.modules)) and not name.startswith(tuple(f"{one}." for one in names))
            if not inside or name not in shapes:
                continue
            kind = (type(module), repr(module), shapes[name], module.training)
            if kind not in answers:
                answers[kind] = why_not(module, shapes[name])
            if answers[kind] is None:
                names.append(name)
        found.append(tuple(names))
    return found


def _first_alike(layouts: list[_Layout], sliceable: list[tuple[str, ...]]) -> dict[int, int]:
    """For each unit with modules that can run in slices, the first one that behaves alike: only that one is traced so."""
    first: dict[object, int] = {}
    found = {}
    for number, names in enumerate(sliceable):
        if names:
            behaviour = (len(names), *(layout.tape(2 * number + 1).signature() for layout in layouts))
            found[number] = first.setdefault(behaviour, number)
    return found


@contextmanager
def _running_in_slices(
    model: nn.Module, chain: Chain, sliceable: list[tuple[str, ...]], wanted: set[int], layout: _Layout
) -> Iterator[None]:
    """The wanted units' modules run in slices; other units only hand on a tensor of the right kind where that is what they make."""
    replaced = []
    for number, unit in enumerate(chain.units):
        if number in wanted:
            for module in map(model.get_submodule, sliceable[number]):
                module.__dict__["forward"] = partial(run_in_slices, module, module.forward)
                replaced.append(module)
        elif len(unit.modules) == 1 and layout.first.intervals[2 * number + 1].keeps_shape:
            module = model.get_submodule(unit.name)
            module.__dict__["forward"] = _hand_on
            replaced.append(module)
    try:
        yield
    finally:
        for module in replaced:
            del module.__dict__["forward"]


def _hand_on(value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return value.clone()


def _assemble(
    model: nn.Module,
    chain: Chain,
    layouts: list[_Layout],
    in_slices: list[_Layout],
    sliceable: list[tuple[str, ...]],
    alike: dict[int, int],
) -> tuple[tuple[UnitCosts, ...], tuple[Affine, ...]]:
    """Units with affine figures from the traces at both batch sizes; ways in slices from those in which modules ran in slices."""
    first = layouts[0]
    modules = dict(model.named_modules())
    owned: set[int] = set()

    def own_gradients(names: tuple[str, ...]) -> int:
        total = 0
        for module_name in names:
            for parameter in modules[module_name].parameters():
                if parameter.requires_grad and id(parameter) not in owned:
                    owned.add(id(parameter))
                    total += parameter.nbytes
        return total

    gradients = {unit.name: own_gradients(unit.modules) for unit in chain.units}
    rest = own_gradients(("",))  # parameters that glue uses (position embedding, class token): the first glue's

    known: dict[object, tuple[Recompute, ...]] = {}  # units that behave alike are worked out once

    def ways_by(tapes: tuple[Tape, ...], *, sliced: bool) -> tuple[Recompute, ...]:
        behaviour = (sliced, *(tape.signature() for tape in tapes))
        if behaviour not in known:
            known[behaviour] = ways_of(tapes[0], tapes[1], *TRACE_BATCHES, sliced=sliced)
        return known[behaviour]

    units = []
    for position, index in enumerate(first.kept):
        is_unit = index % 2 == 1
        unit = chain.units[index // 2] if is_unit else None
        neighbour = chain.units[min(index // 2, len(chain.units) - 1)]
        stage, kind = (unit.stage, unit.kind) if unit else (neighbour.stage if index else "stem", "glue")
        kind_value: Kind = kind  # type: ignore[assignment]

        sizes = [layout.sizes(position, index) for layout in layouts]
        levels = [layout.levels(index) for layout in layouts]
        few, many = TRACE_BATCHES
        by_batch: dict[str, Any] = {
            **{name: Affine.through(few, sizes[0][name], many, sizes[1][name]) for name in sizes[0]},
            **{name: Highest.through(few, levels[0][name], many, levels[1][name]) for name in levels[0]},
        }
        tapes = tuple(layout.tape(index) for layout in layouts)
        ways: tuple[Recompute, ...] = ()
        if unit is not None and unit.opens_segment:
            ways = ways_by(tapes, sliced=False)
            if sliceable[index // 2]:
                ways += ways_by(tuple(layout.tape(2 * alike[index // 2] + 1) for layout in in_slices), sliced=True)
        mine = gradients[unit.name] if unit else 0
        if unit is None and rest:
            mine, rest = rest, 0
        opens = unit is not None and unit.opens_segment
        units.append(
            UnitCosts(
                name=unit.name if unit else f"glue.{index // 2}",
                modules=unit.modules if unit else (),
                stage=stage,
                kind=kind_value,
                recomputable=unit is not None and (opens or unit.linked),
                opens_segment=opens,
                input_id=first.boundary_ids[position],
                output_id=first.boundary_ids[position + 1],
                saves=first.saved_boundaries(index),
                needs=first.needs(index),
                makes=first.makes(index),
                gradients_beside=first.gradients_beside(index),
                cast=first.casts(index),
                held=first.held(index),
                input_gradient=first.input_gradient(index),
                parameter_gradients=mine,
                flops_to_save=Affine.through(few, flops_to_last_save(tapes[0]), many, flops_to_last_save(tapes[1])),
                sliceable=sliceable[index // 2] if unit else (),
                ways=ways,
                **by_batch,
            )
        )
    boundaries = tuple(
        Affine.through(TRACE_BATCHES[0], a, TRACE_BATCHES[1], b)
        for a, b in zip(*(layout.boundary_sizes for layout in layouts), strict=True)
    )
    return tuple(units), boundaries


class _Layout:
    """The passes at one batch size, with boundaries numbered along the chain."""

    def __init__(self, first: _Recorder, dropped: _Recorder) -> None:
        self.first, self.dropped = first, dropped
        intervals = self.first.intervals
        last = len(intervals) - 1
        self.kept = [
            index for index, interval in enumerate(intervals) if index % 2 == 1 or interval.operators or interval.parts or index == last
        ]
        numbers = [intervals[index].input_number for index in self.kept] + [intervals[last].output_number]
        numbers_dropped = [dropped.intervals[index].input_number for index in self.kept] + [None]
        self.boundary_numbers = numbers
        distinct: dict[int | None, int] = {}
        self.boundary_ids = [distinct.setdefault(number, len(distinct)) for number in numbers]
        self.id_of = {number: identity for number, identity in distinct.items() if number is not None}
        self.id_of_dropped = {
            number: identity for number, identity in zip(numbers_dropped, self.boundary_ids, strict=True) if number is not None
        }
        made = set().union(*(interval.made for interval in intervals))
        for interval, other in zip(intervals, dropped.intervals, strict=True):
            for given, given_dropped in zip(interval.besides, other.besides, strict=True):
                if given in made:  # neither a weight nor a buffer
                    identity = self.id_of.setdefault(given, distinct.setdefault(given, len(distinct)))
                    self.id_of_dropped.setdefault(given_dropped, identity)
        self.boundary_sizes = [0] * len(distinct)
        for number, identity in distinct.items():
            if number is not None:
                self.boundary_sizes[identity] = self.first.sizes[number]
        self.maker = {number: index for index, interval in enumerate(intervals) for number in interval.made if number in self.id_of}
        self.last_gradient = {number: index for index, interval in enumerate(intervals) for number in interval.gradients}
        self.all_saved = set().union(*(interval.saved for interval in intervals))
        self.all_casts = set().union(*(interval.casts for interval in intervals))

    def sizes(self, position: int, index: int) -> dict[str, int]:
        """What one entry of the chain has that grows with the batch, by the names of `UnitCosts`."""
        return {
            "input": self.boundary_size(position),
            "output": self.boundary_size(position + 1),
            "interior": self.interior(index),
            "flops": self.first.intervals[index].flops,
            "traffic": self.first.intervals[index].traffic,
        }

    def levels(self, index: int) -> dict[str, list[int]]:
        """Live bytes above those at entry, moment by moment, by the names of `UnitCosts`."""
        interval = self.first.intervals[index]
        return {
            "forward_stored": interval.forward_levels,
            "forward_dropped": self.dropped.intervals[index].forward_levels,
            "backward_first": interval.backward_levels,
            "backward_more": interval.backward_more_levels,
        }

    def tape(self, index: int) -> Tape:
        """What happened in one entry of the chain."""
        stored, dropped = self.first.intervals[index], self.dropped.intervals[index]
        opening = dropped.input_number
        return Tape(
            dropped=dropped.forward_levels,
            backward_first=stored.backward_levels,
            backward_more=stored.backward_more_levels,
            sizes={number: self.dropped.sizes[number] for number in dropped.born},
            born=dropped.born,
            died=dropped.died,
            alive_at_backward=stored.alive_at_backward,
            gone=stored.gone,
            places=dropped.places,
            unpacked=stored.unpacked,
            released=stored.released,
            products=[replace(found, changed=not self.dropped.changed.isdisjoint(found.outputs)) for found in dropped.products],
            flops=dropped.flops,
            backward_flops=stored.again_flops,
            backward_traffic=stored.again_traffic,
            input_size=0 if opening is None else self.dropped.sizes[opening],
            input_gone=None if opening is None else stored.gone.get(opening),
            output=dropped.output_number,
        )

    def boundary_size(self, position: int) -> int:
        return self.boundary_sizes[self.boundary_ids[position]]

    def saved_boundaries(self, index: int) -> tuple[int, ...]:
        return tuple(sorted({self.id_of[number] for number in self.first.intervals[index].saved if number in self.id_of}))

    def needs(self, index: int) -> tuple[int, ...]:
        return tuple(sorted({self.id_of[number] for number in self.first.intervals[index].besides if number in self.id_of}))

    def makes(self, index: int) -> tuple[int, ...]:
        interval = self.first.intervals[index]
        found = {self.id_of[number] for number in interval.made if number in self.id_of and number != interval.output_number}
        return tuple(sorted(found))

    def gradients_beside(self, index: int) -> tuple[int, ...]:
        output = self.first.intervals[index].output_number
        waiting = {number for number, maker in self.maker.items() if maker <= index < self.last_gradient.get(number, -1)}
        return tuple(sorted({self.id_of[number] for number in waiting if number != output}))

    def interior(self, index: int) -> int:
        made = self.first.intervals[index].made & self.all_saved
        return sum(self.first.sizes[number] for number in made if number not in self.id_of and number not in self.all_casts)

    def casts(self, index: int) -> int:
        return sum(self.first.sizes[number] for number in self.first.intervals[index].casts)

    def held(self, index: int) -> tuple[int, ...]:
        alive = self.dropped.intervals[index].alive_at_entry
        return tuple(sorted({self.id_of_dropped[number] for number in alive if number in self.id_of_dropped}))

    def input_gradient(self, index: int) -> bool:
        interval = self.first.intervals[index]
        return interval.input_gradient if index % 2 == 1 else True
