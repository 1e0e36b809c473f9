"""Traces what each unit costs, and puts it together as a `MemoryProfile`.

Two recorded passes (`backbone.record`) per batch size: forward and backward, and a forward that keeps no saved tensor,
which is what a recomputed segment's first forward does. Two batch sizes make every size affine in the batch, and every peak
the highest of the lines through what was live at the same moment of both.

What it does badly: kernels' own scratch memory is not seen (the probe measures it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import timm
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hiresvis.backbone.chain import Chain, find_chain
from hiresvis.backbone.record import TRACE_BATCHES, Recorder, Setting, TracedLoss, Tracer, fake_copy, resident
from hiresvis.backbone.slices import run_in_slices, why_not
from hiresvis.backbone.ways import Tape, flops_to_last_save, ways_of
from hiresvis.device import AUTOCAST_DTYPES, StorageCounter
from hiresvis.memory.costs import Affine, Highest, Kind, MemoryProfile, Recompute, UnitCosts

MAX_TENSOR_ELEMENTS = 2**31


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
    loss: TracedLoss | None = None,
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
        loss: of outputs that are maps; None for any loss over a row of outputs.

    Returns:
        The chain, and the profile (bytes and FLOPs, affine in the batch).

    Raises:
        ValueError: the model is no chain: fewer than two modules hand a tensor on.
    """
    mode, fake = fake_copy(model)
    setting = Setting(image_size, in_chans, num_classes, AUTOCAST_DTYPES[precision], channels_last, block, rules, loss)
    probe = Tracer(mode, fake, Chain(()), setting)
    with mode:
        images = probe.images(TRACE_BATCHES[0])
        chain = find_chain(fake, lambda: fake(images))
    if len(chain.units) < 2:
        raise ValueError(f"{name} is no chain of modules: only {len(chain.units)} found that hand a tensor on; nothing can be planned")
    tracer = Tracer(mode, fake, chain, setting)
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
        ema=gradients + buffers if ema else 0,  # of what is trained, and of running statistics
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


class _AnyNumber(TorchDispatchMode):
    """A number read from a fake tensor is 1: some optimizers read their step count, on which no size depends."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 1.0 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))


def _optimizer_bytes(
    model: nn.Module, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], clip_grad: float | None, block: int
) -> tuple[int, int]:
    """(bytes of the optimizer's state, bytes on top while it steps), from two fake steps; clipping counts as its part."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    counter = StorageCounter(block)
    counter.track(resident(model))
    states, temporaries = [], []
    with counter, _AnyNumber():
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


def _sliceable(model: nn.Module, chain: Chain, tracer: Tracer) -> list[tuple[str, ...]]:
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

    def own_bytes(names: tuple[str, ...]) -> tuple[int, int]:
        """Of parameters that no unit before has, and of those that are trained."""
        total = trained = 0
        for module_name in names:
            for parameter in modules[module_name].parameters():
                if id(parameter) not in owned:
                    owned.add(id(parameter))
                    total += parameter.nbytes
                    trained += parameter.nbytes if parameter.requires_grad else 0
        return total, trained

    own = {unit.name: own_bytes(unit.modules) for unit in chain.units}
    rest = own_bytes(("",))  # parameters that glue uses (position embedding, class token): the first glue's

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
        mine = own[unit.name] if unit else rest
        if unit is None:
            rest = (0, 0)
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
                parameters=mine[0],
                parameter_gradients=mine[1],
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

    def __init__(self, first: Recorder, dropped: Recorder) -> None:
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
        given = [number for number in dict.fromkeys([dropped.input_number, *dropped.besides]) if number is not None]
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
            inputs=[(self.dropped.sizes[number], stored.gone[number]) for number in given if number in stored.gone],
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
