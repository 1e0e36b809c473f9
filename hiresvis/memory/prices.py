"""What a plan costs: work that runs again, memory traffic, waiting for the host; all in FLOPs of the device, per image.

A unit's work is its FLOPs and its memory traffic, the traffic at the device's ratio of the two. Where units were timed on
the device, each has a *pace* besides: how much longer it takes than that work would at the average rate (a depthwise
convolution over a large map takes several times as long per FLOP as a matrix product). Costs only compare plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .costs import MemoryProfile, UnitCosts
from .peak import find_way, offloaded_bytes
from .plan import Segment

SLICES_PRICE = 0.1  # of a unit's FLOPs: bit-identity is given up only for more than that


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """How work is weighed.

    Attributes:
        host: where offloaded tensors go; None: nothing can be offloaded.
        flops_per_byte: FLOPs that the device does while it moves a byte to or from its memory.
        pace: of each unit; empty: 1 everywhere.
    """

    host: Host | None = None
    flops_per_byte: float = 1.0
    pace: tuple[float, ...] = ()

    def work(self, index: int, flops: int, traffic: int) -> int:
        """What so many FLOPs and bytes of unit `index` count."""
        work = flops + self.flops_per_byte * traffic
        return int(work * self.pace[index] if self.pace else work)

    def of_slices(self, unit: UnitCosts, index: int) -> int:
        """What running a unit's modules in slices is held to cost beyond its work."""
        return self.work(index, int(SLICES_PRICE * unit.flops.slope), 0) if unit.sliceable else 0

    def of_segment(self, profile: MemoryProfile, segment: Segment) -> int:
        """What a segment adds to a step."""
        cost = sum(self.work(*again) for again in runs_again(profile, segment)) + self.waiting(profile, segment)
        for index in range(segment.start, segment.end) if segment.slices else ():
            unit = profile.units[index]
            if set(unit.sliceable) <= set(segment.slices):
                cost += self.of_slices(unit, index)
        return cost

    def waiting(self, profile: MemoryProfile, segment: Segment) -> int:
        """What a segment's transfers take beyond what hides behind its own work, on the way out and on the way back."""
        if segment.tier != "offload":
            return 0
        assert self.host is not None, "a plan with offload needs to know the host"
        moved = offloaded_bytes(profile, segment, 1) / self.host.link_bytes_per_s * self.host.flops_per_s
        units = [(index, profile.units[index]) for index in range(segment.start, segment.end)]
        forward = sum(self._surely(index, unit.flops.slope, unit.traffic.slope) for index, unit in units)
        backward = 2 * forward + sum(self._surely(*again) for again in runs_again(profile, segment))
        return int(max(0.0, moved - forward) + max(0.0, moved - backward))

    def _surely(self, index: int, flops: int, traffic: int) -> int:
        """What so much takes at least: arithmetic and traffic may overlap, unless the unit was timed."""
        return self.work(index, flops, traffic) if self.pace else flops

    def of(self, profile: MemoryProfile, segments: Sequence[Segment]) -> int:
        """What a plan adds to a step."""
        return sum(self.of_segment(profile, segment) for segment in segments)

    def of_step(self, profile: MemoryProfile) -> int:
        """A step without recompute: forward, and backward as often as it has kinds of gradients to make."""
        return int(sum(unit.num_runs * self.work(index, unit.flops.slope, unit.traffic.slope) for index, unit in enumerate(profile.units)))


def segment_flops(profile: MemoryProfile, segment: Segment) -> int:
    """FLOPs per image that the plan runs again for this segment; a second run ends with its last saved tensor."""
    return sum(flops for _, flops, _ in runs_again(profile, segment))


def runs_again(profile: MemoryProfile, segment: Segment) -> Iterator[tuple[int, int, int]]:
    """(unit, FLOPs, bytes moved) of the segment's second runs, per image."""
    if segment.tier == "store":
        return
    units = [(index, profile.units[index]) for index in range(segment.start, segment.end)]
    if segment.passes:
        for index, unit in units[:-1]:  # the first rerun, which notes the units' inputs
            yield index, unit.flops.slope, unit.traffic.slope
        for (index, unit), passes in zip(units, segment.passes, strict=True):
            way = find_way(unit, segment, passes)
            yield index, way.flops.slope, way.traffic.slope
        return
    while units and not units[-1][1].saves_anything:  # frozen: backward asks for nothing
        units.pop()
    for index, unit in units[:-1]:
        yield index, unit.flops.slope, unit.traffic.slope
    for index, unit in units[-1:]:
        yield index, unit.flops_to_save.slope, unit.traffic.slope
