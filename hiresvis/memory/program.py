"""The dynamic program: for one micro-batch and one amount of room, the cheapest way to treat every unit of the chain.

State: the position, whether the boundary there is already kept, and the bytes kept so far; value: the cost. Going on from
a position means storing one unit, recomputing it by itself in one of its ways, or recomputing a segment of any length that
starts there, at once or nested (unit by unit). An option is allowed where bytes kept plus its own highest need, forward
and backward, stay within the room.

Two programs share the options. `cheapest` keeps bytes on a grid (they round up to `GRID_BYTES` units) and is exact up to
it. `least_kept` asks only whether anything fits: for that the path that keeps the fewest bytes is the best one in every
respect, so one number per state is enough, and it is exact. Boundaries shared by units that are not neighbours are counted
twice; the walk of `memory.peak` gives the chosen plan's exact peak.

(Recompute with segments of any length: Chen et al. 2016; the general problem with nesting: Herrmann, Beaumont et al.,
*Optimal checkpointing for heterogeneous chains*, 2019. Nesting here is two levels deep, the inner one unit by unit.)

The grid is absolute and does not depend on the room, so that more room allows every plan that less room does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from hiresvis.units import MIB

from .costs import Highest, MemoryProfile, Recompute, Tier, UnitCosts
from .peak import StepSetting, find_way, offloaded_bytes
from .plan import Segment

GRID_BYTES = 2 * MIB
MAX_GRID_POINTS = 8192
MAX_NESTED_UNITS = 12  # a longer nest holds more inputs than it saves
MAX_NESTED_CHOICES = 8  # amounts of room that a nest's units are fitted to

Freedom = str  # what a plan may use: recompute (segments at once), nested, keep, offload, chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Host memory that inputs can be offloaded to, and what waiting for it costs.

    Attributes:
        total_bytes: what may be used there.
        link_bytes_per_s: bandwidth in each direction.
        flops_per_s: the device's rate, which says how much of a transfer hides behind compute.
    """

    total_bytes: int
    link_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Option:
    """One way to go from `segment.start` to `segment.end`.

    Attributes:
        cost: what the option adds to a step per image, in FLOPs (`segment_cost`), and one to settle ties.
        opening_kept: the boundary at the start must be kept already; closing_kept: the one at the end is, afterwards.
        added: bytes kept from then on; need: highest bytes above those kept before.
    """

    segment: Segment
    cost: int
    opening_kept: bool
    closing_kept: bool
    added: int
    need: int


def segment_flops(profile: MemoryProfile, segment: Segment) -> int:
    """FLOPs per image that the plan runs again for this segment; a second run ends with its last saved tensor."""
    units = profile.units[segment.start : segment.end]
    if segment.tier == "store":
        return 0
    if segment.passes:
        again = sum(unit.flops.slope for unit in units[:-1])
        return again + sum(find_way(unit, segment, passes).flops.slope for unit, passes in zip(units, segment.passes, strict=True))
    saving = [index for index, unit in enumerate(units) if saves_anything(unit)]
    if not saving:
        return 0  # frozen: backward asks for nothing
    return sum(unit.flops.slope for unit in units[: saving[-1]]) + units[saving[-1]].flops_to_save.slope


def segment_traffic(profile: MemoryProfile, segment: Segment) -> int:
    """Bytes per image that the segment's second runs read and write."""
    units = profile.units[segment.start : segment.end]
    if segment.tier == "store" or not any(saves_anything(unit) for unit in units):
        return 0
    if segment.passes:
        again = sum(unit.traffic.slope for unit in units[:-1])
        return again + sum(find_way(unit, segment, passes).traffic.slope for unit, passes in zip(units, segment.passes, strict=True))
    return sum(unit.traffic.slope for unit in units)


def saves_anything(unit: UnitCosts) -> bool:
    """Whether autograd keeps anything of the unit; a frozen one never runs again."""
    return bool(unit.interior.slope or unit.interior.base or unit.saves or unit.ways)


def segment_cost(profile: MemoryProfile, segment: Segment, host: Host | None, flops_per_byte: float) -> int:
    """What a segment adds to a step, per image, in FLOPs: work done again, its memory traffic, and waiting for the host."""
    again = segment_flops(profile, segment) + int(flops_per_byte * segment_traffic(profile, segment))
    return again + waiting_flops(profile, segment, host)


def waiting_flops(profile: MemoryProfile, segment: Segment, host: Host | None) -> int:
    """What a segment's transfers cost beyond what hides behind its own compute, per image, in FLOPs of the device."""
    if segment.tier != "offload":
        return 0
    assert host is not None, "a plan with offload needs to know the host"
    moved = offloaded_bytes(profile, segment, 1) / host.link_bytes_per_s * host.flops_per_s
    forward = sum(profile.units[index].flops.slope for index in range(segment.start, segment.end))
    backward = 2 * forward + segment_flops(profile, segment)
    return int(max(0.0, moved - forward) + max(0.0, moved - backward))


class Program:
    """The options of one micro-batch in so much room, and the two programs over them.

    Args:
        profile: the traced chain.
        batch: images in one forward.
        room: the most bytes for activations, gradients and interiors (the budget less what is resident) that will be asked for.
        setting: whether gradients persist.
        allow: what plans may use.
        host: where offloaded tensors go; None: no offload.
        host_price: cost per offloaded byte, to keep within the host's memory.
        flops_per_byte: FLOPs that the device does while it moves a byte to or from its memory.
    """

    def __init__(
        self,
        profile: MemoryProfile,
        batch: int,
        room: int,
        setting: StepSetting,
        allow: Collection[Freedom],
        host: Host | None = None,
        host_price: float = 0.0,
        flops_per_byte: float = 1.0,
    ) -> None:
        self.profile, self.batch, self.room, self.setting = profile, batch, room, setting
        self.allow, self.host, self.host_price, self.flops_per_byte = allow, host, host_price, flops_per_byte
        self.images_id = profile.units[0].input_id
        self.casts = [0]
        for unit in profile.units:
            self.casts.append(self.casts[-1] + unit.cast)
        self.later_gradients = [0] * (len(profile.units) + 1)
        for index in reversed(range(len(profile.units))):
            self.later_gradients[index] = self.later_gradients[index + 1] + profile.units[index].parameter_gradients
        self.options: dict[tuple[int, int], list[Option]] = {}
        count = len(profile.units)
        for start in range(count):
            for bit in (0, 1):
                self.options[start, bit] = _undominated(self._options(start, bool(bit)))
        self.images = profile.boundary_bytes((self.images_id,), batch)

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
        count = len(self.profile.units)
        grid, points = self._grid(room)
        if points <= 0:
            return None
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

    def _grid(self, room: int) -> tuple[int, int]:
        """Bytes of a grid unit, and their number."""
        everything = self.images
        for unit in self.profile.units:  # an upper bound: a boundary is counted with each unit that keeps it, as the options may
            kept = unit.interior.at(self.batch) + self.profile.boundary_bytes(unit.saves, self.batch) + unit.input.at(self.batch)
            everything += max([kept, *(unit.input.at(self.batch) + way.kept.at(self.batch) for way in unit.ways)])
        grid = GRID_BYTES * max(1, ceil(everything / (MAX_GRID_POINTS * GRID_BYTES)))
        most_kept = everything + (2 * len(self.profile.units) + 2) * grid  # every amount is rounded up
        return grid, min(room, most_kept) // grid + 1

    def _options(self, start: int, opening_kept: bool) -> Iterator[Option]:
        yield self._stored(start, opening_kept)
        units = self.profile.units
        if not units[start].opens_segment or "recompute" not in self.allow:
            return
        yield from self._alone(start, opening_kept)
        end = start + 1
        flat = nested = True
        while end <= len(units) and units[end - 1].recomputable and (flat or nested):
            if flat:
                option = self._at_once(start, end, opening_kept)
                if end > start + 1 or not units[start].ways:
                    yield option
                    if "offload" in self.allow and not opening_kept:
                        yield self._offloaded(option)
                # A longer segment needs more, but for what its second run finds there: its output's gradient, and later units'.
                flat = option.need - units[end - 1].output.at(self.batch) - self._gradients(end - 1) <= self.room
            nested = "nested" in self.allow and end - start <= MAX_NESTED_UNITS and all(unit.ways for unit in units[start:end])
            if nested and end > start + 1:
                for option in self._nested(start, end, opening_kept):
                    yield option
                    if "offload" in self.allow and not opening_kept:
                        yield self._offloaded(option)
            end += 1

    def _kept_before(self, unit: UnitCosts, opening_kept: bool) -> set[int]:
        return {self.images_id, unit.input_id} if opening_kept else {self.images_id}

    def _gradients(self, index: int) -> int:
        return self.profile.gradients if self.setting.accumulates else self.later_gradients[index + 1]

    def _live(self, index: int, opening_kept: bool) -> int:
        """Live bytes above those kept, when the forward of a unit begins."""
        unit = self.profile.units[index]
        held = set(unit.held) - self._kept_before(unit, opening_kept)
        persisting = self.profile.gradients if self.setting.accumulates else 0
        return self.profile.boundary_bytes(held, self.batch) + self.casts[index] + persisting

    def _stored(self, index: int, opening_kept: bool) -> Option:
        unit, batch = self.profile.units[index], self.batch
        new = set(unit.saves) - self._kept_before(unit, opening_kept)
        added = unit.interior.at(batch) + self.profile.boundary_bytes(new, batch)
        excess = unit.backward_more if self.setting.accumulates else unit.backward_first
        backward = added + unit.output.at(batch) + excess.at(batch) + self.casts[index + 1] + self._gradients(index)
        need = max(self._live(index, opening_kept) + unit.forward_stored.at(batch), backward)
        closing = unit.output_id in unit.saves or (unit.output_id == unit.input_id and opening_kept)
        return Option(Segment(index, index + 1), 0, opening_kept, closing, added, need)

    def _alone(self, index: int, opening_kept: bool) -> Iterator[Option]:
        """One unit recomputed by itself, in each of its ways."""
        unit, batch = self.profile.units[index], self.batch
        opener = 0 if opening_kept else unit.input.at(batch)
        for way in unit.ways:
            if not self._allowed(way):
                continue
            kept = opener + way.kept.at(batch)
            forward = self._live(index, opening_kept) + way.forward.at(batch)
            backward = kept + unit.output.at(batch) + self._excess(way).at(batch) + self.casts[index] + self._gradients(index)
            tier: Tier = "chunk" if way.sliced else "keep" if way.keep else "recompute"
            segment = Segment(index, index + 1, tier, (way.passes,), way.keep, unit.sliceable if way.sliced else ())
            option = Option(segment, self._cost(segment), opening_kept, False, kept, max(opener + forward, backward))
            yield option
            if "offload" in self.allow and not opening_kept:
                yield self._offloaded(option)

    def _at_once(self, start: int, end: int, opening_kept: bool) -> Option:
        units, batch = self.profile.units, self.batch
        opener = 0 if opening_kept else units[start].input.at(batch)
        need = 0
        for index in range(start, end):
            need = max(need, opener + self._live(index, index == start) + units[index].forward_dropped.at(batch))
        inside = _Inside(self.profile, start, end, batch)
        gradient = units[end - 1].output.at(batch)
        base = opener + self.casts[end]
        for offset, index in enumerate(range(start, end)):
            unit = units[index]
            again = inside.saved_before[offset] + unit.forward_stored.at(batch) + gradient + self._gradients(end - 1)
            excess = unit.backward_more if self.setting.accumulates else unit.backward_first
            back = inside.saved_before[offset + 1] + unit.output.at(batch) + excess.at(batch) + self._gradients(index)
            need = max(need, base + again, base + back)
        segment = Segment(start, end, "recompute")
        return Option(segment, self._cost(segment), opening_kept, False, opener, need)

    def _nested(self, start: int, end: int, opening_kept: bool) -> Iterator[Option]:
        """Unit by unit: as cheaply as can be, and with the least need."""
        units, batch = self.profile.units, self.batch
        opener = 0 if opening_kept else units[start].input.at(batch)
        forward = inputs = 0  # of the units, held from the first rerun on
        gradient = units[end - 1].output.at(batch) + self._gradients(end - 1)
        held = []
        for index in range(start, end):
            dropped = units[index].forward_dropped.at(batch)
            forward = max(forward, opener + self._live(index, index == start) + dropped)
            if index > start:
                inputs += units[index].input.at(batch)
            held.append(opener + inputs + self.casts[index])
            if index < end - 1:
                forward = max(forward, held[-1] + gradient + dropped)
        choices = []
        for index in range(start, end):
            unit, fixed = units[index], held[index - start] + units[index].output.at(batch) + self._gradients(index)
            ways = [way for way in unit.ways if not way.keep and self._allowed(way)]
            choices.append([(fixed + self._excess(way).at(batch), way) for way in ways])
        # For so much room, each unit is recomputed in the cheapest way that it allows: one option per amount at which that changes.
        least = max(forward, *(min(need for need, _ in ways) for ways in choices))
        needs = sorted({least, *(need for ways in choices for need, _ in ways if need > least)})
        for most in needs[:: -(-len(needs) // MAX_NESTED_CHOICES)]:
            picked = [min((found for found in ways if found[0] <= most), key=lambda found: found[1].flops.slope) for ways in choices]
            slices = tuple(name for unit, (_, way) in zip(units[start:end], picked, strict=True) if way.sliced for name in unit.sliceable)
            segment = Segment(start, end, "chunk" if slices else "recompute", tuple(way.passes for _, way in picked), (), slices)
            need = max(forward, *(found for found, _ in picked))
            yield Option(segment, self._cost(segment), opening_kept, False, opener, need)

    def _allowed(self, way: Recompute) -> bool:
        asks = {"keep": bool(way.keep), "nested": bool(way.passes), "chunk": way.sliced}
        return all(freedom in self.allow for freedom, asked in asks.items() if asked)

    def _cost(self, segment: Segment) -> int:
        return segment_cost(self.profile, segment, self.host, self.flops_per_byte) + 1

    def _excess(self, way: Recompute) -> Highest:
        return way.backward_more if self.setting.accumulates else way.backward_first

    def _offloaded(self, option: Option) -> Option:
        """The same with what it keeps in host memory; beside it another such transfer may be under way."""
        found = option.segment
        segment = replace(found, tier="offload")
        neighbour = self.profile.units[max(0, found.start - 1)].input.at(self.batch)
        price = int(self.host_price * offloaded_bytes(self.profile, segment, 1))
        return Option(segment, self._cost(segment) + price, option.opening_kept, False, 0, option.need + max(neighbour, option.added))


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


class _Inside:
    """Bytes that a segment recomputed at once stacks up: before each of its units, beyond its kept input, inputs held included."""

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
