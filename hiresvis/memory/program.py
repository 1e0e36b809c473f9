"""The dynamic program: for one micro-batch and one amount of room, the cheapest way to treat every unit of the chain.

State: the position, whether the boundary there is already kept, and the bytes kept so far; value: the cost. Going on from
a position means storing one unit, recomputing it by itself in one of its ways, or recomputing a segment of any length that
starts there, at once or nested (unit by unit). An option is allowed where bytes kept plus its own highest need, forward
and backward, stay within the room.

Two programs share the options. `cheapest` keeps bytes on a grid (they round up to its units) and is exact up to it.
`least_kept` asks only whether anything fits: for that the path that keeps the fewest bytes is the best one in every
respect, so one number per state is enough, and it is exact. Boundaries shared by units that are not neighbours are counted
twice; the walk of `memory.peak` gives the chosen plan's exact peak.

(Recompute with segments of any length: Chen et al. 2016; the general problem with nesting: Herrmann, Beaumont et al.,
*Optimal checkpointing for heterogeneous chains*, 2019. Nesting here is two levels deep, the inner one unit by unit.)

The grid's unit is a power of two, at most 1/2048 of the room. Within one grid more room allows every plan that less room
does; where the grid gets coarser, the plan of the largest room of the finer one is still considered.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .costs import MemoryProfile, Recompute, Tier
from .peak import StepSetting, offloaded_bytes
from .plan import Segment
from .prices import Prices

GRID_BYTES = 4096  # the finest
MAX_GRID_POINTS = 4096
MAX_NESTED_UNITS = 8  # a longer nest holds more inputs than it saves
MAX_NESTED_CHOICES = 4  # amounts of room that a nest's units are fitted to

Freedom = str  # what a plan may use: recompute (segments at once), nested, keep, offload, chunk


@dataclass(frozen=True, slots=True)
class Option:
    """One way to go from `segment.start` to `segment.end`.

    Attributes:
        cost: what the option adds to a step per image, in FLOPs (`Prices.of_segment`), and one to settle ties.
        opening_kept: the boundary at the start must be kept already; closing_kept: the one at the end is, afterwards.
        added: bytes kept from then on; need: highest bytes above those kept before.
    """

    segment: Segment
    cost: int
    opening_kept: bool
    closing_kept: bool
    added: int
    need: int


class Program:
    """The options of one micro-batch in so much room, and the two programs over them.

    Args:
        profile: the traced chain.
        batch: images in one forward.
        room: the most bytes for activations, gradients and interiors (the budget less what is resident) that will be asked for.
        setting: whether gradients persist.
        allow: what plans may use.
        prices: how work is weighed, and where offloaded tensors go.
        host_price: cost per offloaded byte, to keep within the host's memory.
        thorough: prepare for `cheapest`; without, only for `least_kept`, to which a nest's dearer choices mean nothing.
    """

    def __init__(
        self,
        profile: MemoryProfile,
        batch: int,
        room: int,
        setting: StepSetting,
        allow: Collection[Freedom],
        prices: Prices,
        host_price: float = 0.0,
        *,
        thorough: bool = True,
    ) -> None:
        self.profile, self.batch, self.room, self.setting = profile, batch, room, setting
        self.thorough = thorough
        self.allow, self.prices, self.host_price = allow, prices, host_price
        self.images_id = profile.units[0].input_id
        self.casts = [0]
        for unit in profile.units:
            self.casts.append(self.casts[-1] + unit.cast)
        self.later_gradients = [0] * (len(profile.units) + 1)
        for index in reversed(range(len(profile.units))):
            self.later_gradients[index] = self.later_gradients[index + 1] + profile.units[index].parameter_gradients
        self.boundaries = [boundary.at(batch) for boundary in profile.boundaries]
        count = len(profile.units)
        self.sizes = [_Sizes(self, index) for index in range(count)]
        self.live = [(self._live(index, False), self._live(index, True)) for index in range(count)]
        self.options: dict[tuple[int, int], list[Option]] = {}
        for start in range(count):
            for bit in (0, 1):
                found = self._options(start, bool(bit))
                self.options[start, bit] = _undominated(found) if thorough else list(found)
        self.images = self.boundaries[self.images_id]

    def least_kept(self, room: int) -> tuple[Segment, ...] | None:
        """A plan that fits in `room` bytes, found by keeping the fewest; None when there is none."""
        count = len(self.profile.units)
        least: dict[tuple[int, int], int] = {(0, 1): self.images}
        reached: dict[tuple[int, int], Option] = {}
        for start in range(count):
            for bit in (0, 1):
                before = least.get((start, bit))
                if before is None:
                    continue
                for option in self.options[start, bit]:
                    if before + option.need > room:
                        continue
                    state, after = (option.segment.end, int(option.closing_kept)), before + option.added
                    if after < least.get(state, after + 1):
                        least[state], reached[state] = after, option
        ends = [state for state in ((count, 0), (count, 1)) if state in least]
        if not ends:
            return None
        state = min(ends, key=lambda end: least[end])
        segments: list[Segment] = []
        while state[0] > 0:
            option = reached[state]
            segments.append(option.segment)
            state = (option.segment.start, int(option.opening_kept))
        return tuple(reversed(segments))

    def cheapest(self, room: int) -> tuple[Segment, ...] | None:
        """The plan of least cost within `room` bytes, up to the grid; None when none fits it."""
        grid = GRID_BYTES
        while room >= grid * MAX_GRID_POINTS:
            grid *= 2
        found = self._cheapest(room, grid)
        if grid > GRID_BYTES:
            finer = self._cheapest(grid // 2 * MAX_GRID_POINTS - 1, grid // 2)
            if finer is not None and (found is None or self.cost(finer) < self.cost(found)):
                return finer
        return found

    def cost(self, segments: Sequence[Segment]) -> int:
        """What these segments add to a step, per image, in FLOPs."""
        return self.prices.of(self.profile, segments)

    def _cheapest(self, room: int, grid: int) -> tuple[Segment, ...] | None:
        if room <= 0:
            return None
        count = len(self.profile.units)
        points = min(room, self._most_kept() + (2 * len(self.profile.units) + 2) * grid) // grid + 1  # every amount is rounded up
        infinite = np.iinfo(np.int64).max
        values = np.full((count + 1, 2, points), infinite, dtype=np.int64)
        choice = np.full((count + 1, 2, points), -1, dtype=np.int32)
        images = -(-self.images // grid)
        if images >= points:
            return None
        values[0, 1, images] = 0
        listed: list[Option] = []
        for start in range(count):
            for bit in (0, 1):
                source = values[start, bit]
                reached = np.flatnonzero(source < infinite)
                if not len(reached):
                    continue
                first, last = int(reached[0]), int(reached[-1])
                for option in self.options[start, bit]:
                    shift = -(-option.added // grid)
                    top = min((room - option.need) // grid + 1, points - shift, last + 1)
                    if top > first:
                        end, closing = option.segment.end, int(option.closing_kept)
                        proposal = source[first:top] + option.cost
                        proposal[source[first:top] == infinite] = infinite
                        target = values[end, closing, first + shift : top + shift]
                        better = proposal < target
                        target[better] = proposal[better]
                        choice[end, closing, first + shift : top + shift][better] = len(listed)
                    listed.append(option)
        final = values[count].min(axis=0)
        if not (final < infinite).any():
            return None
        # The least cost; among equals the fewest bytes kept.
        point = int(np.argmin(final))
        bit = int(np.argmin(values[count, :, point]))
        segments: list[Segment] = []
        position = count
        while position > 0:
            option = listed[choice[position, bit, point]]
            segments.append(option.segment)
            position, bit, point = option.segment.start, int(option.opening_kept), point - -(-option.added // grid)
        return tuple(reversed(segments))

    def _most_kept(self) -> int:
        """A bound on what any plan keeps: a boundary is counted with each unit that keeps it, as the options may."""
        everything = self.images
        for unit, size in zip(self.profile.units, self.sizes, strict=True):
            kept = size.interior + sum(self.boundaries[number] for number in unit.saves) + size.input
            everything += max([kept, *(size.input + way.kept.at(self.batch) for way, *_ in size.ways)])
        return everything

    def _options(self, start: int, opening_kept: bool) -> Iterator[Option]:
        units = self.profile.units
        yield self._stored(start, opening_kept)
        if not units[start].opens_segment or "recompute" not in self.allow:
            return
        found = self._alone(start, opening_kept)
        for option in itertools.chain(found, self._longer(start, opening_kept)):
            yield option
            if "offload" in self.allow and not opening_kept:
                yield self._offloaded(option)

    def _live(self, index: int, opening_kept: bool) -> int:
        """Live bytes above those kept, when the forward of a unit begins."""
        unit = self.profile.units[index]
        before = {self.images_id, unit.input_id} if opening_kept else {self.images_id}
        persisting = self.profile.gradients if self.setting.accumulates else 0
        return sum(self.boundaries[number] for number in set(unit.held) - before) + self.casts[index] + persisting

    def _stored(self, index: int, opening_kept: bool) -> Option:
        unit, size = self.profile.units[index], self.sizes[index]
        before = {self.images_id, unit.input_id} if opening_kept else {self.images_id}
        added = size.interior + sum(self.boundaries[number] for number in set(unit.saves) - before)
        backward = added + size.output + size.backward + self.casts[index + 1] + size.gradients
        need = max(self.live[index][opening_kept] + size.forward_stored, backward)
        closing = unit.output_id in unit.saves or (unit.output_id == unit.input_id and opening_kept)
        return Option(Segment(index, index + 1), 0, opening_kept, closing, added, need)

    def _alone(self, index: int, opening_kept: bool) -> Iterator[Option]:
        """One unit recomputed by itself, in each of its ways."""
        unit, size = self.profile.units[index], self.sizes[index]
        opener = (0 if opening_kept else size.input) + self._besides(index, index + 1)
        for way, forward, backward, cost in size.ways:
            kept = opener + way.kept.at(self.batch)
            need = max(
                opener + self.live[index][True] + forward,
                kept + size.output + backward + self.casts[index] + size.gradients,
            )
            tier: Tier = "chunk" if way.sliced else "keep" if way.keep else "recompute"
            segment = Segment(index, index + 1, tier, (way.passes,), way.keep, unit.sliceable if way.sliced else ())
            yield Option(segment, cost + 1, opening_kept, False, kept, need)

    def _besides(self, start: int, end: int) -> int:
        """Bytes that a second run of these units needs from outside, the input aside."""
        return sum(self.boundaries[number] for number in self.profile.given_besides(start, end))

    def _longer(self, start: int, opening_kept: bool) -> Iterator[Option]:
        """Segments that start here, with what they are given besides their input."""
        for option in self._longer_from_input(start, opening_kept):
            besides = self._besides(start, option.segment.end)
            yield replace(option, added=option.added + besides, need=option.need + besides) if besides else option

    def _longer_from_input(self, start: int, opening_kept: bool) -> Iterator[Option]:
        """Segments that start here, run again at once or nested; their highest needs grow with them, so each is a step from the last."""
        units, numbers = self.profile.units, {self.profile.units[start].input_id}
        opener = 0 if opening_kept else self.sizes[start].input
        forward = 0  # highest of the first forward
        again = back = interior = kept_boundaries = 0  # highest of the second run, and of the backward that follows, all at once
        before = cost = 0  # work of the units so far, and of a second run that ends with the last saved tensor
        dropped = inputs = work = 0  # of a nested first rerun; inputs that it holds; FLOPs that it takes
        choices: list[_Choices] = []
        flat, nested = True, "nested" in self.allow
        index = start
        while index < len(units) and units[index].recomputable and (flat or nested):
            unit, size = units[index], self.sizes[index]
            forward = max(forward, opener + self.live[index][index == start] + size.forward_dropped)
            gradient = size.output + size.gradients
            if flat:
                new_input = 0 if unit.input_id in numbers else self.boundaries[unit.input_id]
                again = max(again, interior + kept_boundaries + new_input + size.forward_stored)
                interior += size.interior
                kept_boundaries += sum(self.boundaries[number] for number in set(unit.saves) - numbers)
                numbers |= set(unit.saves)
                back = max(back, interior + kept_boundaries + gradient + size.backward)
                base = opener + self.casts[index + 1]
                need = max(forward, base + again + gradient, base + back)
                if size.saves:
                    cost = before + size.work_to_save
                before += size.work
                if index > start or not unit.ways:
                    yield Option(Segment(start, index + 1, "recompute"), cost + 1, opening_kept, False, opener, need)
                # A longer segment needs more, but for what its second run finds there: its output's gradient, and later units'.
                flat = need - gradient <= self.room
            nested = nested and bool(size.ways) and index - start < MAX_NESTED_UNITS
            if nested:
                if index > start:
                    inputs += size.input
                held = opener + inputs + self.casts[index]
                choices.append(_Choices(size, held + gradient))
                if index > start:
                    yield from self._nests(start, opening_kept, opener, choices, max(forward, dropped + gradient), work)
                dropped = max(dropped, held + size.forward_dropped)
                work += size.work
            index += 1

    def _nests(self, start: int, opening_kept: bool, opener: int, choices: list[_Choices], least: int, work: int) -> Iterator[Option]:
        """For so much room, each unit is recomputed in the cheapest way that it allows: one option per amount at which that changes."""
        units = self.profile.units
        lowest = max(least, *(choice.needs[0] for choice in choices))
        needs = sorted({lowest, *(need for choice in choices for need in choice.needs if need > lowest)})
        for most in needs[:: -(-len(needs) // MAX_NESTED_CHOICES)] if self.thorough else needs[:1]:
            picked = [choice.best[bisect_right(choice.needs, most) - 1] for choice in choices]
            need = max(least, *(found for found, _, _ in picked))
            slices = tuple(name for offset, (_, _, way) in enumerate(picked) if way.sliced for name in units[start + offset].sliceable)
            passes = tuple(way.passes for _, _, way in picked)
            segment = Segment(start, start + len(choices), "chunk" if slices else "recompute", passes, (), slices)
            cost = work + sum(cost for _, cost, _ in picked) + 1
            yield Option(segment, cost, opening_kept, False, opener, need)

    def _offloaded(self, option: Option) -> Option:
        """The same with what it keeps in host memory; beside it another such transfer may be under way."""
        segment = replace(option.segment, tier="offload")
        neighbour = self.sizes[max(0, segment.start - 1)].input
        price = int(self.host_price * offloaded_bytes(self.profile, segment, 1))
        cost = option.cost + self.prices.waiting(self.profile, segment) + price
        return Option(segment, cost, option.opening_kept, False, 0, option.need + max(neighbour, option.added))


class _Sizes:
    """A unit's figures at one batch size: plain numbers, since options ask for them many times."""

    def __init__(self, program: Program, index: int) -> None:
        unit, batch, setting = program.profile.units[index], program.batch, program.setting
        self.input, self.interior = unit.input.at(batch), unit.interior.at(batch)
        # As a gradient, with others that wait for earlier units.
        self.output = unit.output.at(batch) + sum(program.boundaries[number] for number in unit.gradients_beside)
        self.forward_stored, self.forward_dropped = unit.forward_stored.at(batch), unit.forward_dropped.at(batch)
        self.backward = (unit.backward_more if setting.accumulates else unit.backward_first).at(batch)
        self.gradients = program.profile.gradients if setting.accumulates else program.later_gradients[index + 1]
        prices = program.prices
        self.work = prices.work(index, unit.flops.slope, unit.traffic.slope)
        self.work_to_save, self.saves = prices.work(index, unit.flops_to_save.slope, unit.traffic.slope), unit.saves_anything
        self.ways: list[tuple[Recompute, int, int, int]] = []  # with their bytes forward and backward, and their cost
        for way in unit.ways:
            asks = {"keep": bool(way.keep), "nested": bool(way.passes), "chunk": way.sliced}
            if all(freedom in program.allow for freedom, asked in asks.items() if asked):
                excess = way.backward_more if setting.accumulates else way.backward_first
                cost = prices.work(index, way.flops.slope, way.traffic.slope) + (prices.of_slices(unit, index) if way.sliced else 0)
                self.ways.append((way, way.forward.at(batch), excess.at(batch), cost))


class _Choices:
    """A nested unit's ways by rising need: `best[n]` is the cheapest of the first n + 1."""

    def __init__(self, size: _Sizes, beside: int) -> None:
        ways = sorted(((beside + backward, cost, way) for way, _, backward, cost in size.ways if not way.keep), key=lambda found: found[:2])
        self.needs = [need for need, _, _ in ways]
        self.best: list[tuple[int, int, Recompute]] = []
        for found in ways:
            self.best.append(found if not self.best or found[1] < self.best[-1][1] else self.best[-1])


def _undominated(options: Iterator[Option]) -> list[Option]:
    """Of the options with the same ends, those that no other one beats in cost, bytes kept and need."""
    groups: dict[tuple[int, bool], list[Option]] = {}
    for option in options:
        groups.setdefault((option.segment.end, option.closing_kept), []).append(option)
    found: list[Option] = []
    for group in groups.values():
        best: list[Option] = []
        for option in sorted(group, key=lambda one: (one.cost, one.added, one.need)):
            if not any(other.added <= option.added and other.need <= option.need for other in best):
                best.append(option)
        found.extend(best)
    return found
