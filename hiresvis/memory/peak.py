"""Predicts the peak of a plan by walking one training step over the profile's integers.

A step is: forward over the chain, backward over it in reverse (a recomputed segment first runs forward again), the
optimizer's step, and, at another time, an evaluation forward. The walk keeps the set of boundary storages that are
alive, so a storage that two units hold counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .costs import MemoryProfile, Recompute, UnitCosts
from .plan import Segment

HOST_SLAB_BYTES = 16 << 20  # pinned host memory is taken in pieces of this size; a power of two, to which torch rounds in any case


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSetting:
    """How steps are run, apart from the plan.

    Attributes:
        accumulates: several micro-batches make a step, so gradients persist while forwards run.
        eval_batch: images in one evaluation forward.
        baseline_bytes: in use before training besides weights (interpreter, GPU context).
        reserve_bytes: stated safety, and what earlier probes measured above the prediction.
    """

    accumulates: bool
    eval_batch: int
    baseline_bytes: int = 0
    reserve_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPeak:
    """Highest bytes of a step, where they occur, and what they consist of (the parts add up to `total_bytes`)."""

    total_bytes: int
    counted_bytes: int
    where: str
    parts: Mapping[str, int]


def resident_bytes(profile: MemoryProfile, setting: StepSetting, micro_batch: int) -> int:
    """Live all the time in training besides gradients: weights, buffers, optimizer state, EMA, the raw micro-batch."""
    return profile.weights + profile.buffers + profile.optimizer_state + profile.ema + profile.raw_image.at(micro_batch)


def predict_peak(profile: MemoryProfile, segments: Sequence[Segment], micro_batch: int, setting: StepSetting) -> PredictedPeak:
    """The peak of a plan at a micro-batch. Pure; microseconds per unit.

    Args:
        profile: the traced chain.
        segments: the whole chain in order.
        micro_batch: images in one forward.
        setting: accumulation, evaluation batch, baseline and reserve.
    """
    walk = Walk(profile, micro_batch, setting)
    segments = tuple(_as_they_run(profile, segments))
    for segment in segments:
        walk.forward(segment)
    for segment in reversed(segments):
        walk.backward(segment)
    constant = resident_bytes(profile, setting, micro_batch)
    peak, where, gradients, saved = walk.peak, walk.where, walk.peak_gradients, walk.peak_saved
    step = profile.gradients + profile.optimizer_temporaries
    more_images = profile.raw_image.at(setting.eval_batch) - profile.raw_image.at(micro_batch)
    evaluation = max(0, profile.evaluation.at(setting.eval_batch) + more_images)
    if step > peak:
        peak, where, gradients, saved = step, "optimizer step", profile.gradients, 0
    if evaluation > peak:
        peak, where, gradients, saved = evaluation, "evaluation", 0, 0
    counted = constant + peak
    parts = {
        "baseline": setting.baseline_bytes,
        "weights": profile.weights + profile.buffers + profile.ema,
        "optimizer": profile.optimizer_state,
        "gradients": gradients,
        "images": profile.raw_image.at(micro_batch),
        "saved": saved,
        "interior": peak - gradients - saved,
        "reserve": setting.reserve_bytes,
    }
    total = counted + setting.baseline_bytes + setting.reserve_bytes
    assert sum(parts.values()) == total
    return PredictedPeak(total_bytes=total, counted_bytes=counted, where=where, parts=parts)


def _as_they_run(profile: MemoryProfile, segments: Sequence[Segment]) -> Iterator[Segment]:
    """Of a segment that saves nothing backward asks for nothing, so that not even its input is kept: as if it were stored."""
    for segment in segments:
        if any(unit.saves_anything for unit in profile.units[segment.start : segment.end]):
            yield segment
        else:
            yield from (Segment(index, index + 1) for index in range(segment.start, segment.end))


def find_way(unit: UnitCosts, segment: Segment, passes: tuple[int, ...]) -> Recompute:
    """The unit's way that the segment asks for, with these passes."""
    sliced = bool(unit.sliceable) and set(unit.sliceable) <= set(segment.slices)
    for way in unit.ways:
        if way.keep == segment.keep and way.passes == passes and way.sliced == sliced:
            return way
    raise ValueError(f"{unit.name} has no way to recompute with kept operators {segment.keep} and passes {passes}; plan again")


def way_of(profile: MemoryProfile, segment: Segment) -> Recompute | None:
    """How a single unit is recomputed; None for what is stored, runs all at once, or has several units."""
    if not segment.passes or segment.end > segment.start + 1:
        return None
    return find_way(profile.units[segment.start], segment, segment.passes[0])


def offloaded_bytes(profile: MemoryProfile, segment: Segment, batch: int) -> int:
    """What an offloaded segment has in host memory: its input and its kept outputs."""
    way = way_of(profile, segment)
    return profile.units[segment.start].input.at(batch) + (way.kept.at(batch) if way else 0)


class Walk:
    """The state of one forward and backward: what is kept, and the highest value so far (above the resident bytes)."""

    def __init__(self, profile: MemoryProfile, batch: int, setting: StepSetting) -> None:
        self.profile, self.batch, self.setting = profile, batch, setting
        self.sizes = [boundary.at(batch) for boundary in profile.boundaries]
        self.kept: list[tuple[int, frozenset[int]]] = []  # (interior bytes, boundaries) per segment so far
        self.kept_bytes = 0  # of all that is kept, each boundary once
        self.holders = [0] * len(self.sizes)  # how many of `kept` hold a boundary
        self.gradients = profile.gradients if setting.accumulates else 0
        self.casts = 0  # weights in the autocast precision that the forward's cache holds; it goes when the forward ends
        self.stored_casts = 0  # of these, what stored units keep until their backward; recomputed ones make theirs again
        self.in_transfer = 0  # on the way to or from the host, beside what the present segment holds
        self.offloaded: list[Segment] = []
        self.peak = 0
        self.where = ""
        self.peak_gradients = 0
        self.peak_saved = 0

    def _push(self, interior: int, boundaries: frozenset[int] = frozenset()) -> None:
        self.kept.append((interior, boundaries))
        self.kept_bytes += interior
        for number in boundaries:
            if not self.holders[number]:
                self.kept_bytes += self.sizes[number]
            self.holders[number] += 1

    def _pop(self) -> tuple[int, frozenset[int]]:
        interior, boundaries = self.kept.pop()
        self.kept_bytes -= interior
        for number in boundaries:
            self.holders[number] -= 1
            if not self.holders[number]:
                self.kept_bytes -= self.sizes[number]
        return interior, boundaries

    def _replace(self, interior: int, boundaries: frozenset[int] | None = None) -> None:
        """What the last entry keeps now; the same boundaries unless told otherwise."""
        _, before = self._pop()
        self._push(interior, before if boundaries is None else boundaries)

    def saved(self, extra: Iterable[int] = ()) -> int:
        """Bytes kept for backward, each boundary once, `extra` boundaries included."""
        return self.kept_bytes + sum(self.sizes[number] for number in set(extra) if not self.holders[number])

    def note(self, value: int, where: str) -> None:
        """A level that the step reaches, above the resident bytes."""
        if value > self.peak:
            self.peak, self.where, self.peak_gradients, self.peak_saved = value, where, self.gradients, self.saved()

    def forward(self, segment: Segment) -> None:
        units = self.profile.units[segment.start : segment.end]
        stored = segment.tier == "store"
        way = way_of(self.profile, segment)
        besides = frozenset[int]() if stored else self.profile.given_besides(segment.start, segment.end)
        if not stored:
            self._push(0, besides | {units[0].input_id})
        for unit in units:
            excess = unit.forward_stored if stored else way.forward if way else unit.forward_dropped
            live = self.saved(unit.held) + self.casts + self.gradients + self.in_transfer
            self.note(live + excess.at(self.batch), f"forward of {unit.name}")
            self.casts += unit.cast
            if stored:
                self.stored_casts += unit.cast
                self._push(unit.interior.at(self.batch), frozenset(unit.saves))
        if segment.tier == "offload":
            # It leaves the device while the next segment runs; the one before has arrived by then.
            self.in_transfer = offloaded_bytes(self.profile, segment, self.batch)
            self._replace(0, besides)
            self.offloaded.append(segment)
        elif way:
            self._replace(way.kept.at(self.batch))

    def backward(self, segment: Segment) -> None:
        units = self.profile.units[segment.start : segment.end]
        if segment.tier == "store":
            self._backward_of(segment.start, self.stored_casts)
            self.stored_casts -= units[0].cast
            self._pop()
            return
        if segment.tier == "offload":
            # Back on the device; the next one to be needed is already on its way.
            self.offloaded.pop()
            way = way_of(self.profile, segment)
            besides = self.profile.given_besides(segment.start, segment.end)
            self._replace(way.kept.at(self.batch) if way else 0, besides | {units[0].input_id})
            self.in_transfer = offloaded_bytes(self.profile, self.offloaded[-1], self.batch) if self.offloaded else 0
        if segment.passes:
            self._backward_in_passes(segment)
        else:
            self._backward_at_once(segment)
        self._pop()

    def _gradient(self, unit: UnitCosts) -> int:
        """The gradient of the unit's output, and others that wait for earlier units."""
        return unit.output.at(self.batch) + sum(self.sizes[number] for number in unit.gradients_beside)

    def _backward_at_once(self, segment: Segment) -> None:
        """The segment's own entry holds its input; recompute stacks every unit's saved tensors on top of it."""
        units = self.profile.units[segment.start : segment.end]
        output_gradient = self._gradient(units[-1])
        casts = self.stored_casts
        for unit in units:
            live = self.saved((unit.input_id,)) + casts + self.gradients + output_gradient + self.in_transfer
            self.note(live + unit.forward_stored.at(self.batch), f"recompute of {unit.name}")
            casts += unit.cast
            self._push(unit.interior.at(self.batch), frozenset(unit.saves))
        for index in reversed(range(segment.start, segment.end)):
            self._backward_of(index, casts)
            casts -= self.profile.units[index].cast
            self._pop()

    def _backward_in_passes(self, segment: Segment) -> None:
        """The first rerun leaves each unit's input; then unit after unit, from the last, is recomputed by itself."""
        units = self.profile.units[segment.start : segment.end]
        output_gradient = self._gradient(units[-1])
        casts = self.stored_casts
        for unit in units[:-1]:
            live = self.saved((unit.input_id,)) + casts + self.gradients + output_gradient + self.in_transfer
            self.note(live + unit.forward_dropped.at(self.batch), f"recompute of {unit.name}")
            casts += unit.cast
            self._push(0, frozenset((unit.output_id, *unit.makes)))
        casts = self.stored_casts
        for unit, passes in zip(reversed(units), reversed(segment.passes), strict=True):
            way = find_way(unit, segment, passes)
            excess = way.backward_more if self.setting.accumulates else way.backward_first
            live = self.saved() + casts + self.gradients + self._gradient(unit) + self.in_transfer
            self.note(live + excess.at(self.batch), f"recompute and backward of {unit.name}")
            if not self.setting.accumulates:
                self.gradients += unit.parameter_gradients
            if unit is not units[0]:
                self._pop()

    def _backward_of(self, index: int, casts: int) -> None:
        unit = self.profile.units[index]
        excess = unit.backward_more if self.setting.accumulates else unit.backward_first
        live = self.saved() + casts + self.gradients + self._gradient(unit) + self.in_transfer
        self.note(live + excess.at(self.batch), f"backward of {unit.name}")
        if not self.setting.accumulates:
            self.gradients += unit.parameter_gradients
