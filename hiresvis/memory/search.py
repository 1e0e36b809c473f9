"""Chooses the plan: the largest micro-batch that fits, and for it the least recompute.

For one micro-batch this is a dynamic program over the chain. State: the position, whether the boundary there is already
kept, and the bytes kept so far on a grid; value: recomputed FLOPs. Going on from a position means storing one unit, or
recomputing a segment of any length that starts there; an option is allowed where bytes kept plus its own highest need,
forward and backward, stay within the budget. It is exact up to the grid (kept bytes round up to `GRID_BYTES` units) and
to boundaries shared by units that are not neighbours, which it counts twice; the walk of `memory.peak` then gives the
chosen plan's exact peak. (Recompute with segments of any length: Chen et al. 2016; the general problem with nesting:
Herrmann, Beaumont et al., *Optimal checkpointing for heterogeneous chains*, 2019.)

The grid is absolute and does not depend on the budget, so that a larger budget allows every plan that a smaller one does.
The largest micro-batch is found by bisection: every figure is affine in the batch with slopes that are not negative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

import numpy as np

from hiresvis.units import MIB

from .costs import MemoryProfile, UnitCosts
from .peak import PredictedPeak, StepSetting, predict_peak, resident_bytes
from .plan import CheckpointPlan, NoPlan, Segment, describe_stages, store_all, uniform

GRID_BYTES = 2 * MIB
MAX_GRID_POINTS = 8192
UNIFORM_SPACINGS = (4, 2, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the user asked for.

    Attributes:
        batch: images the optimizer sees, the most that a micro-batch may have; None: the largest that fits.
        micro_batch: pinned, or None.
        spacing: "auto", "off", blocks per segment everywhere, or by stage.
        goal: largest (micro-batch first) or fastest (least work for the batch first).
        most: a micro-batch never tried above this.
    """

    batch: int | None
    micro_batch: int | None = None
    spacing: str | int | Mapping[str, int] = "auto"
    goal: str = "largest"
    most: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan with its numbers at one micro-batch."""

    segments: tuple[Segment, ...]
    micro_batch: int
    peak: PredictedPeak
    recomputed_flops: int

    def recompute_fraction(self, profile: MemoryProfile) -> float:
        """Recomputed FLOPs over those of a step without recompute."""
        return self.recomputed_flops / max(1, profile.step_flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One row of the ladder: a way to space checkpoints, and the largest micro-batch that fits with it (0: none)."""

    spacing: str
    candidate: Candidate
    fits: bool


def recomputed_flops(profile: MemoryProfile, segments: Sequence[Segment]) -> int:
    """FLOPs per image that the plan runs a second time.

    A segment's last product is not run again when nothing after it in the segment is saved; that gain is not counted.
    """
    return sum(
        profile.units[index].flops.slope
        for segment in segments
        if segment.tier != "store"
        for index in range(segment.start, segment.end)
        if _has_saved(profile, segment)
    )


def _has_saved(profile: MemoryProfile, segment: Segment) -> bool:
    """A segment that saves nothing (frozen) never recomputes."""
    return any(profile.units[index].interior.slope or profile.units[index].saves for index in range(segment.start, segment.end))


def best_segments(profile: MemoryProfile, micro_batch: int, room_bytes: int, setting: StepSetting) -> tuple[Segment, ...] | None:
    """The cheapest plan whose activations, gradients and interiors stay within `room_bytes`; None when there is none.

    Args:
        profile: the traced chain.
        micro_batch: images in one forward.
        room_bytes: budget less what is resident (weights, optimizer, baseline, reserve).
        setting: whether gradients persist.
    """
    if room_bytes <= 0:
        return None
    program = _Program(profile, micro_batch, room_bytes, setting)
    return program.solve()


@dataclass(frozen=True, slots=True)
class _Option:
    start: int
    end: int
    stored: bool
    cost: int
    opening_kept: bool  # the boundary at `start` must be kept already
    closing_kept: bool  # ... and the one at `end` is, afterwards
    added: int
    need: int


class _Program:
    """One dynamic program. `values[bit, g]` at a position: least FLOPs with at most g grid units kept."""

    def __init__(self, profile: MemoryProfile, batch: int, room: int, setting: StepSetting) -> None:
        self.profile, self.batch, self.room, self.setting = profile, batch, room, setting
        everything = profile.boundary_bytes((profile.units[0].input_id,), batch)
        for unit in profile.units:  # an upper bound: a boundary is counted with each unit that keeps it, as the options may
            everything += unit.interior.at(batch) + profile.boundary_bytes(unit.saves, batch) + unit.input.at(batch)
        self.grid = GRID_BYTES * max(1, ceil(everything / (MAX_GRID_POINTS * GRID_BYTES)))
        most_kept = everything + (2 * len(profile.units) + 2) * self.grid  # every amount is rounded up
        self.points = min(room, most_kept) // self.grid + 1
        self.images_id = profile.units[0].input_id
        self.casts = [0]
        for unit in profile.units:
            self.casts.append(self.casts[-1] + unit.cast)
        self.later_gradients = [0] * (len(profile.units) + 1)
        for index in reversed(range(len(profile.units))):
            self.later_gradients[index] = self.later_gradients[index + 1] + profile.units[index].parameter_gradients

    def solve(self) -> tuple[Segment, ...] | None:
        count = len(self.profile.units)
        infinite = np.iinfo(np.int64).max
        values = np.full((count + 1, 2, self.points), infinite, dtype=np.int64)
        choice = np.full((count + 1, 2, self.points), -1, dtype=np.int32)
        options: list[_Option] = []
        images = -(-self.profile.boundary_bytes((self.images_id,), self.batch) // self.grid)
        if images >= self.points:
            return None
        values[0, 1, images] = 0  # the caller holds the images whatever is planned, so they are kept from the start
        for start in range(count):
            for bit in (0, 1):
                if not (values[start, bit] < infinite).any():
                    continue
                for option in self._options(start, bool(bit)):
                    self._relax(option, bit, values, choice, len(options))
                    options.append(option)
        final = values[count].min(axis=0)
        if not (final < infinite).any():
            return None
        # The least cost; among equals the fewest bytes kept.
        point = int(np.argmin(final))
        bit = int(np.argmin(values[count, :, point]))
        return self._walk_back(count, bit, point, choice, options)

    def _relax(self, option: _Option, bit: int, values: np.ndarray, choice: np.ndarray, number: int) -> None:
        shift = -(-option.added // self.grid)
        top = min((self.room - option.need) // self.grid + 1, self.points - shift)
        if top <= 0:
            return
        source = values[option.start, bit, :top]
        reached = source < np.iinfo(np.int64).max
        proposal = np.where(reached, source + option.cost * reached, source)
        target = values[option.end, int(option.closing_kept), shift : shift + top]
        better = proposal < target
        target[better] = proposal[better]
        choice[option.end, int(option.closing_kept), shift : shift + top][better] = number

    def _walk_back(self, position: int, bit: int, point: int, choice: np.ndarray, options: list[_Option]) -> tuple[Segment, ...]:
        segments: list[Segment] = []
        while position > 0:
            option = options[choice[position, bit, point]]
            segments.append(Segment(option.start, option.end, "store" if option.stored else "recompute"))
            position, bit, point = option.start, int(option.opening_kept), point - -(-option.added // self.grid)
        return tuple(reversed(segments))

    def _options(self, start: int, opening_kept: bool) -> Iterator[_Option]:
        yield self._stored(start, opening_kept)
        units = self.profile.units
        if not units[start].opens_segment:
            return
        end = start + 1
        while end <= len(units) and units[end - 1].recomputable:
            option = self._recomputed(start, end, opening_kept)
            yield option
            if option.need - units[end - 1].output.at(self.batch) - self._gradients(end - 1) > self.room:
                return  # a longer segment needs more, but for what its second run finds there: its output's gradient, and later units'
            end += 1

    def _kept_before(self, unit: UnitCosts, opening_kept: bool) -> set[int]:
        return {self.images_id, unit.input_id} if opening_kept else {self.images_id}

    def _gradients(self, index: int) -> int:
        return self.profile.gradients if self.setting.accumulates else self.later_gradients[index + 1]

    def _forward_need(self, index: int, opening_kept: bool, dropped: bool) -> int:
        """Highest live bytes above those kept, in the forward of one unit."""
        unit = self.profile.units[index]
        held = set(unit.held) - self._kept_before(unit, opening_kept)
        excess = unit.forward_dropped if dropped else unit.forward_stored
        persisting = self.profile.gradients if self.setting.accumulates else 0
        return self.profile.boundary_bytes(held, self.batch) + excess.at(self.batch) + self.casts[index] + persisting

    def _stored(self, index: int, opening_kept: bool) -> _Option:
        unit, batch = self.profile.units[index], self.batch
        new = set(unit.saves) - self._kept_before(unit, opening_kept)
        added = unit.interior.at(batch) + self.profile.boundary_bytes(new, batch)
        excess = unit.backward_more if self.setting.accumulates else unit.backward_first
        backward = added + unit.output.at(batch) + excess.at(batch) + self.casts[index + 1] + self._gradients(index)
        need = max(self._forward_need(index, opening_kept, dropped=False), backward)
        closing = unit.output_id in unit.saves or (unit.output_id == unit.input_id and opening_kept)
        return _Option(index, index + 1, True, 0, opening_kept, closing, added, need)

    def _recomputed(self, start: int, end: int, opening_kept: bool) -> _Option:
        units, batch = self.profile.units, self.batch
        opener = 0 if opening_kept else units[start].input.at(batch)
        need = 0
        for index in range(start, end):
            kept_input = index == start
            held = self._forward_need(index, kept_input, dropped=True)
            need = max(need, opener + held)
        inside = _Inside(self.profile, start, end, batch)
        gradient = units[end - 1].output.at(batch)
        base = opener + self.casts[end]
        for offset, index in enumerate(range(start, end)):
            unit = units[index]
            again = inside.saved_before[offset] + unit.forward_stored.at(batch) + gradient + self._gradients(end - 1)
            excess = unit.backward_more if self.setting.accumulates else unit.backward_first
            back = inside.saved_before[offset + 1] + unit.output.at(batch) + excess.at(batch) + self._gradients(index)
            need = max(need, base + again, base + back)
        cost = sum(units[index].flops.slope for index in range(start, end))
        if not _has_saved(self.profile, Segment(start, end, "recompute")):
            cost = 0
        return _Option(start, end, False, cost + 1, opening_kept, False, opener, need)


class _Inside:
    """Bytes that a recomputed segment stacks up: before each of its units, beyond its kept input, inputs held included."""

    def __init__(self, profile: MemoryProfile, start: int, end: int, batch: int) -> None:
        opened = {profile.units[start].input_id}
        self.saved_before: list[int] = []
        interior, numbers = 0, set(opened)
        for index in range(start, end):
            unit = profile.units[index]
            self.saved_before.append(interior + profile.boundary_bytes((numbers | {unit.input_id}) - opened, batch))
            interior += unit.interior.at(batch)
            numbers |= set(unit.saves)
        self.saved_before.append(interior + profile.boundary_bytes(numbers - opened, batch))


class Planner:
    """Searches plans of one profile within one budget.

    Args:
        profile: the traced chain.
        budget_bytes: the limit, baseline and reserve included.
        setting: baseline, reserve, evaluation batch; `accumulates` is decided per micro-batch.
        limits: what the user asked for.
    """

    def __init__(self, profile: MemoryProfile, budget_bytes: int, setting: StepSetting, limits: Limits) -> None:
        self.profile, self.budget_bytes, self.setting, self.limits = profile, budget_bytes, setting, limits
        self.best = lru_cache(maxsize=None)(self._best)

    def _setting(self, micro_batch: int) -> StepSetting:
        batch = self.limits.batch
        return replace(self.setting, accumulates=batch is not None and micro_batch < batch)

    def score(self, segments: tuple[Segment, ...], micro_batch: int) -> Candidate:
        """The candidate with these segments."""
        peak = predict_peak(self.profile, segments, micro_batch, self._setting(micro_batch))
        flops = recomputed_flops(self.profile, segments)
        return Candidate(segments=segments, micro_batch=micro_batch, peak=peak, recomputed_flops=flops)

    def fits(self, candidate: Candidate) -> bool:
        """Whether the predicted peak is within the budget."""
        return candidate.peak.total_bytes <= self.budget_bytes

    def _best(self, micro_batch: int) -> Candidate | None:
        """The cheapest plan that fits at this micro-batch, pins respected."""
        pinned = self._pinned()
        found: list[Candidate] = []
        if pinned is not None:
            found = [self.score(pinned, micro_batch)]
        else:
            setting = self._setting(micro_batch)
            constant = resident_bytes(self.profile, setting, micro_batch) + setting.baseline_bytes + setting.reserve_bytes
            room = self.budget_bytes - constant
            while (searched := best_segments(self.profile, micro_batch, room, setting)) is not None:
                found.append(self.score(searched, micro_batch))
                if self.fits(found[-1]) or found[-1].peak.where in ("evaluation", "optimizer step"):  # which no plan changes
                    break
                room -= max(GRID_BYTES, found[-1].peak.total_bytes - self.budget_bytes)  # the walk saw more than the program: ask for less
            found.extend(self.score(segments, micro_batch) for segments in self._simple())
        fitting = [candidate for candidate in found if self.fits(candidate)]
        return min(fitting, key=lambda candidate: (candidate.recomputed_flops, candidate.peak.total_bytes), default=None)

    def _pinned(self) -> tuple[Segment, ...] | None:
        spacing = self.limits.spacing
        if spacing == "auto":
            return None
        if spacing == "off":
            return store_all(self.profile)
        assert not isinstance(spacing, str)
        return uniform(self.profile, spacing)

    def _simple(self) -> list[tuple[Segment, ...]]:
        return [store_all(self.profile), *(uniform(self.profile, spacing) for spacing in UNIFORM_SPACINGS)]

    def most(self) -> int:
        """The largest micro-batch worth trying: the batch, a tensor's element limit, the caller's own limit."""
        asked = self.limits.micro_batch or self.limits.batch or self.limits.most
        return max(1, min(asked, self.profile.max_batch, self.limits.most))

    def largest(self) -> int:
        """The largest micro-batch with a plan that fits; 0 when one image does not fit."""
        return _bisect(lambda micro: self.best(micro) is not None, self.most())

    def largest_of(self, segments: tuple[Segment, ...]) -> int:
        """The largest micro-batch that fits with these segments; 0 when one image does not fit."""
        return _bisect(lambda micro: self.fits(self.score(segments, micro)), self.most())

    def choose(self) -> Candidate | NoPlan:
        """The plan for the goal, or the numbers of why there is none."""
        smallest = self.limits.micro_batch or 1
        if self.limits.micro_batch is not None:
            candidate = self.best(smallest)
            return candidate if candidate is not None else self.refusal(smallest)
        largest = self.largest()
        if largest == 0:
            return self.refusal(1)
        if self.limits.batch is None:
            micro = largest
        elif self.limits.goal == "fastest":
            micro = self._fastest(largest)
        else:
            micro = balanced(self.limits.batch, largest)
        # Persisting gradients, or the grid, can refuse a smaller micro-batch where a larger one fits.
        return self.best(micro) or self.best(largest) or self.refusal(micro)

    def _fastest(self, largest: int) -> int:
        """The micro-batch with the least recompute; among equals the largest."""
        assert self.limits.batch is not None
        options = sorted({balanced(self.limits.batch, micro) for micro in range(1, largest + 1)}, reverse=True)
        candidates = [candidate for micro in options if (candidate := self.best(micro)) is not None]
        return min(candidates, key=lambda candidate: (candidate.recomputed_flops, -candidate.micro_batch)).micro_batch

    def refusal(self, micro_batch: int) -> NoPlan:
        """The tightest plan that is allowed at this micro-batch, and its parts."""
        pinned = self._pinned()
        choices = [pinned] if pinned is not None else self._simple()
        tightest = min((self.score(segments, micro_batch) for segments in choices), key=lambda found: found.peak.total_bytes)
        largest = max(tightest.peak.parts.items(), key=lambda part: part[1])
        return NoPlan(
            micro_batch=micro_batch,
            need_bytes=tightest.peak.total_bytes,
            budget_bytes=self.budget_bytes,
            largest_part=largest,
            parts=tightest.peak.parts,
        )

    def ladder(self) -> tuple[Rung, ...]:
        """For spacing off, then smaller and smaller spacing, then the best mix: the largest micro-batch that fits.

        A uniform spacing that gives the same segments as a larger one is left out.
        """
        rungs: list[Rung] = []
        seen: set[tuple[Segment, ...]] = set()
        named = [("off", store_all(self.profile)), *((str(n), uniform(self.profile, n)) for n in UNIFORM_SPACINGS)]
        for name, segments in named:
            if segments in seen:
                continue
            seen.add(segments)

            largest = self.largest_of(segments)
            rungs.append(Rung(spacing=name, candidate=self.score(segments, max(1, largest)), fits=largest > 0))
        largest = self.largest()
        if largest:
            candidate = self.best(largest)
            assert candidate is not None
            rungs.append(Rung(spacing="mixed", candidate=candidate, fits=True))
        return tuple(rungs)

    def plan(self, candidate: Candidate, why: str) -> CheckpointPlan:
        """The frozen plan of a candidate."""
        batch = self.limits.batch or candidate.micro_batch
        return CheckpointPlan(
            model=self.profile.model,
            image_size=self.profile.image_size,
            precision=self.profile.precision,
            segments=candidate.segments,
            unit_modules=tuple(unit.modules for unit in self.profile.units),
            micro_batch=candidate.micro_batch,
            batch=batch,
            accumulation=ceil(batch / candidate.micro_batch),
            eval_batch=self.setting.eval_batch,
            budget_bytes=self.budget_bytes,
            predicted_peak_bytes=candidate.peak.total_bytes,
            predicted_counted_bytes=candidate.peak.counted_bytes,
            recompute_fraction=candidate.recompute_fraction(self.profile),
            stages=describe_stages(self.profile, candidate.segments),
            parts=candidate.peak.parts,
            why=why,
        )


def balanced(batch: int, largest: int) -> int:
    """The smallest micro-batch that needs no more forwards than `largest` does: 16 in thirds is 6, not 7.

    >>> balanced(16, 7), balanced(16, 16), balanced(16, 5)
    (6, 16, 4)
    """
    return ceil(batch / ceil(batch / largest))


def _bisect(fits: Callable[[int], bool], most: int) -> int:
    """The largest n in 1..most that fits, 0 when 1 does not.

    `most` is tried by itself: it may be the whole batch, which needs no gradients to persist and can fit where less does not.
    """
    if fits(most):
        return most
    if not fits(1):
        return 0
    low, high = 1, most - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
