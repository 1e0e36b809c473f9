"""What each unit of a backbone costs in bytes and FLOPs, as integers: the planner's only input.

A `MemoryProfile` is traced once (by `hiresvis.backbone.trace`) and holds for every micro-batch, since every size is
affine in it, and every peak the highest of such lines. Boundaries, the tensors handed from unit to unit, are counted by
storage: each has a number, and two units that hold the same storage name the same number, so a residual or a norm input
shared across a border counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Kind = Literal["stem", "block", "downsample", "norm", "head", "glue"]
Tier = Literal["store", "keep", "recompute", "offload", "chunk", "tile"]

PROFILE_VERSION = 5


@dataclass(frozen=True, slots=True)
class Affine:
    """`base + slope * batch`.

    >>> Affine(10, 3).at(4)
    22
    >>> Affine.through(2, 16, 4, 22)
    Affine(base=10, slope=3)
    """

    base: int = 0
    slope: int = 0

    def at(self, batch: int) -> int:
        """The figure at this micro-batch, never below zero."""
        return max(0, self.base + self.slope * batch)

    @classmethod
    def through(cls, batch_a: int, value_a: int, batch_b: int, value_b: int) -> Affine:
        """The line through two traces; a slope that is not whole is rounded up, so that from `batch_b` on it never predicts too little."""
        slope = -(-(value_b - value_a) // (batch_b - batch_a))
        return cls(value_b - slope * batch_b, slope)

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.base + other.base, self.slope + other.slope)


@dataclass(frozen=True, slots=True)
class Highest:
    """The highest of several lines, never below zero.

    A peak lies at one operator for small batches (where a weight's gradient is made) and at another for large ones (where an
    activation is). One line through the peaks of two small batches would predict too little beyond them.

    >>> Highest((Affine(10, 0), Affine(0, 3))).at(2), Highest((Affine(10, 0), Affine(0, 3))).at(9)
    (10, 27)
    """

    lines: tuple[Affine, ...] = (Affine(),)

    def at(self, batch: int) -> int:
        """The highest line at this micro-batch."""
        return max(line.at(batch) for line in self.lines)

    @classmethod
    def through(cls, batch_a: int, levels_a: Sequence[int], batch_b: int, levels_b: Sequence[int]) -> Highest:
        """The highest of the lines through two traces' levels, which are taken at the same moments.

        Traces of different lengths (a model that does something else at another batch) give the one line through their peaks.

        >>> Highest.through(1, [5, 7, 1], 2, [5, 7, 4])
        Highest(lines=(Affine(base=7, slope=0), Affine(base=-2, slope=3)))
        """
        if len(levels_a) != len(levels_b):
            levels_a, levels_b = [max(levels_a, default=0)], [max(levels_b, default=0)]
        lines = {Affine.through(batch_a, a, batch_b, b) for a, b in set(zip(levels_a, levels_b, strict=True))}
        rest = sorted(lines, key=lambda line: (line.base + line.slope, line.slope))  # by height at one image
        highest: list[Affine] = []
        while rest:
            last = rest.pop() if not highest else min(rest, key=lambda line: (_crossing(highest[-1], line), -line.slope))
            highest.append(last)
            rest = [line for line in rest if line.slope > last.slope]
        return cls(tuple(highest) or (Affine(),))


def _crossing(lower: Affine, steeper: Affine) -> float:
    """The batch from which the steeper line is the higher one."""
    return (lower.base - steeper.base) / (steeper.slope - lower.slope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """One way to recompute a unit by itself. The plain one keeps nothing but the input and runs once more.

    Attributes:
        keep: numbers of the costly operators (matrix products, convolutions, attention, in call order within the unit) whose
            outputs are kept, so that they are not run again.
        sliced: the unit's token-wise modules (`UnitCosts.sliceable`) run in slices.
        passes: numbers of the saved tensors at which another pass begins. With one number the unit is run again twice:
            to its end, filling the second part of its saved tensors, and later up to that border, filling the first.
        kept: bytes of the kept outputs.
        forward: highest live bytes above those at entry, in forward.
        backward_first, backward_more: highest live bytes in backward, second runs included, above the input, the kept outputs
            and the output's gradient; when parameter gradients are new, and when they are added to older ones.
        flops, traffic: what is run again, and the bytes that it reads and writes.
    """

    keep: tuple[int, ...]
    passes: tuple[int, ...]
    sliced: bool
    kept: Affine
    forward: Highest
    backward_first: Highest
    backward_more: Highest
    flops: Affine
    traffic: Affine

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Recompute:
        """What `asdict` made of it."""
        figures: dict[str, Any] = {
            name: _figure(row[name]) for name in ("kept", "forward", "backward_first", "backward_more", "flops", "traffic")
        }
        return cls(keep=tuple(row["keep"]), passes=tuple(row["passes"]), sliced=row["sliced"], **figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """One link of the chain, in call order. Bytes unless the name says otherwise.

    Attributes:
        name: the first module's dotted name ("stages.0.blocks.1"), or "glue.N" for operators between modules.
        modules: the modules that make up the unit, called one after another; empty for glue.
        stage: timm's resolution level, for people ("stem", "stage0", "head").
        recomputable: whether a segment may contain the unit.
        opens_segment: whether a segment may begin here (its input stays unchanged until backward).
        input_id, output_id: numbers of the boundary storages.
        input, output: their sizes.
        saves: numbers of all boundaries that the unit's autograd nodes keep.
        needs: numbers of what it is given besides its input, which a second run needs too.
        makes: numbers of what it makes besides its output and hands to other units.
        gradients_beside: numbers of what was made by then whose gradients later units have left when its backward begins, its
            output's aside.
        interior: other storages made here that autograd keeps, when the unit is stored.
        cast: copies of weights in the autocast precision; cached until the forward ends, whatever the plan.
        held: numbers of boundaries that Python frames hold while the unit runs forward.
        forward_stored, forward_dropped: highest live bytes above those at entry, with and without keeping saved tensors.
        backward_first, backward_more: highest live bytes above those at the start of the unit's backward (which include
            the output's gradient), when parameter gradients are new, and when they are added to older ones.
        input_gradient: whether the input gets a gradient.
        parameters: bytes of the unit's parameters, each counted at the first unit that has it.
        parameter_gradients: of these, bytes of the gradients that the unit's backward leaves.
        flops: multiply-adds times two of one forward.
        flops_to_save: of these, what comes before the last saved tensor, where a second run ends.
        traffic: bytes that the operators of one forward read and write.
        sliceable: names of modules inside that work position by position, so that they can run in slices.
        ways: how the unit can be recomputed by itself, the plain way first; empty when it cannot.
    """

    name: str
    modules: tuple[str, ...]
    stage: str
    kind: Kind
    recomputable: bool
    opens_segment: bool
    input_id: int
    output_id: int
    input: Affine
    output: Affine
    saves: tuple[int, ...]
    interior: Affine
    cast: int
    held: tuple[int, ...]
    forward_stored: Highest
    forward_dropped: Highest
    backward_first: Highest
    backward_more: Highest
    input_gradient: bool
    parameters: int
    parameter_gradients: int
    flops: Affine
    flops_to_save: Affine
    traffic: Affine
    sliceable: tuple[str, ...]
    ways: tuple[Recompute, ...]
    needs: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    gradients_beside: tuple[int, ...] = ()

    @property
    def num_runs(self) -> float:
        """Forwards that a step's work on the unit amounts to: its backward is two where the input needs a gradient too, one where only
        its weights do, none where all is frozen. Where few of its weights are trained (adapters beside frozen ones), their gradients are
        as much less work as they have fewer numbers."""
        return 1 + int(self.input_gradient) + self.parameter_gradients / max(1, self.parameters)

    @property
    def saves_anything(self) -> bool:
        """Whether autograd keeps anything of the unit; a frozen one with nothing trained before it never runs again."""
        return bool(self.interior.slope or self.interior.base or self.saves or self.ways)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Everything the planner knows about a model at one image size, precision and set of frozen parameters.

    Attributes:
        model: timm name; image_size: (height, width) in px.
        units: the chain, in call order.
        boundaries: sizes of the boundary storages, by number.
        raw_image: bytes of one micro-batch as the loader hands it over (uint8 or float32).
        weights, buffers: bytes that are always there.
        gradients: bytes of all parameter gradients.
        optimizer_state, optimizer_temporaries: after the first step, and on top during a step.
        ema: bytes of the average of what training changes, on the device.
        evaluation: peak of an evaluation forward above the resident bytes, by the evaluation batch.
        block_size: allocator granularity in bytes that storages were rounded up to.
        max_batch: where one tensor would reach 2**31 elements, less one.
        versions: torch and timm releases the trace was made with.
    """

    model: str
    image_size: tuple[int, int]
    precision: str
    units: tuple[UnitCosts, ...]
    boundaries: tuple[Affine, ...]
    raw_image: Affine
    weights: int
    buffers: int
    gradients: int
    optimizer: str
    optimizer_state: int
    optimizer_temporaries: int
    ema: int
    evaluation: Highest
    block_size: int
    max_batch: int
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return {"version": PROFILE_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> MemoryProfile:
        """The profile that `to_json` wrote.

        Raises:
            ValueError: the row is of another format version.
        """
        if row.get("version") != PROFILE_VERSION:
            raise ValueError(f"memory profile of version {row.get('version')!r}, expected {PROFILE_VERSION}; trace it again")
        values = {field.name: row[field.name] for field in fields(cls)}
        values["units"] = tuple(_unit_from_json(unit) for unit in row["units"])
        values["boundaries"] = tuple(Affine(**boundary) for boundary in row["boundaries"])
        values["image_size"] = tuple(row["image_size"])
        values["raw_image"] = Affine(**row["raw_image"])
        values["evaluation"] = _figure(row["evaluation"])
        return cls(**values)

    def boundary_bytes(self, numbers: Iterable[int], batch: int) -> int:
        """Total size of these boundaries, each counted once."""
        return sum(self.boundaries[number].at(batch) for number in set(numbers))

    def given_besides(self, start: int, end: int) -> frozenset[int]:
        """Boundaries that a second run of these units needs from outside, the input aside."""
        units = self.units[start:end]
        made = {number for unit in units for number in (*unit.makes, unit.output_id)}
        return frozenset(number for unit in units for number in unit.needs) - made - {units[0].input_id}

    @property
    def forward_flops(self) -> int:
        """FLOPs of one image's forward pass."""
        return sum(unit.flops.slope for unit in self.units)

    @property
    def step_flops(self) -> int:
        """FLOPs of one image's forward and backward."""
        return int(sum(unit.num_runs * unit.flops.slope for unit in self.units))


def _unit_from_json(row: Mapping[str, Any]) -> UnitCosts:
    values = dict(row)
    values["ways"] = tuple(Recompute.from_json(way) for way in row["ways"])
    for field in fields(UnitCosts):
        value = values[field.name]
        if isinstance(value, Mapping):
            values[field.name] = _figure(value)
        elif isinstance(value, list):
            values[field.name] = tuple(value)
    return UnitCosts(**values)


def _figure(row: Mapping[str, Any]) -> Affine | Highest:
    return Highest(tuple(Affine(**line) for line in row["lines"])) if "lines" in row else Affine(**row)
