"""What a step costs in time, from the same profile as its bytes: a roofline per unit.

A unit's forward takes the longer of its arithmetic and its memory traffic; its backward as often as long as it has kinds of
gradients to make (`MemoryProfile.step_flops` counts alike). What is run again, and what offloaded tensors are waited for,
comes on top. Estimates compare plans and cards; only a measured step says how fast a machine is, and `measured_rates`
scales the model to one.

(Roofline: Williams, Waterman, Patterson, 2009. It overlaps a unit's arithmetic with all of its traffic, which is more than
any machine does; `cards.EFFICIENCY` was fitted with that included.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from hiresvis.units import GIB

from .cards import EFFICIENCY, MEMORY_EFFICIENCY, Card
from .costs import MemoryProfile, UnitCosts
from .plan import Segment
from .program import Host, segment_flops, segment_traffic, waiting_flops

HOST_BYTES = 64 * GIB  # where the host's memory is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device reaches in training, per second.

    Attributes:
        flops_per_s: multiply-adds times two.
        memory_bytes_per_s: its own memory, reads and writes together.
        link_bytes_per_s: to and from host memory, each.
    """

    flops_per_s: float
    memory_bytes_per_s: float = inf
    link_bytes_per_s: float = inf

    @property
    def flops_per_byte(self) -> float:
        """FLOPs done while one byte is read or written."""
        return self.flops_per_s / self.memory_bytes_per_s


def rates_of(card: Card, precision: str) -> Rates:
    """What training reaches of a card's data sheet.

    Raises:
        RecipeError: the card has no such arithmetic.
    """
    return Rates(
        flops_per_s=card.flops_per_s(precision) * EFFICIENCY,
        memory_bytes_per_s=card.memory_bytes_per_s * MEMORY_EFFICIENCY,
        link_bytes_per_s=card.link_bytes_per_s or inf,
    )


def host_of(card: Card, precision: str, total_bytes: int = HOST_BYTES) -> Host | None:
    """The host behind a card, for plans that offload; None where its memory is the card's own.

    Raises:
        RecipeError: the card has no such arithmetic.
    """
    if not card.link_bytes_per_s:
        return None
    flops_per_s = rates_of(card, precision).flops_per_s
    return Host(total_bytes=total_bytes, link_bytes_per_s=card.link_bytes_per_s, flops_per_s=flops_per_s)


def step_seconds(profile: MemoryProfile, segments: Sequence[Segment], micro_batch: int, rates: Rates) -> float:
    """Seconds of one micro-batch's forward and backward under a plan. Pure."""
    seconds = 0.0
    for unit in profile.units:
        passes = 1 + int(unit.input_gradient) + int(unit.parameter_gradients > 0)
        seconds += passes * _forward_seconds(unit, micro_batch, rates)
    for segment in segments:
        seconds += _again_seconds(profile, segment, micro_batch, rates)
        seconds += _waiting_seconds(profile, segment, micro_batch, rates)
    return seconds


def optimizer_seconds(profile: MemoryProfile, rates: Rates) -> float:
    """Seconds of the optimizer's step: gradients are read, weights and state read and written."""
    return (profile.gradients + 2 * profile.gradients + 2 * profile.optimizer_state) / rates.memory_bytes_per_s


def images_per_second(profile: MemoryProfile, segments: Sequence[Segment], micro_batch: int, batch: int, rates: Rates) -> float:
    """Training images per second, the optimizer's step once per batch included."""
    seconds = batch / micro_batch * step_seconds(profile, segments, micro_batch, rates) + optimizer_seconds(profile, rates)
    return batch / seconds


def run_seconds(num_train: int, epochs: int, images_per_second: float) -> float:
    """Seconds of training, evaluation aside.

    >>> run_seconds(100, 2, 8.0)
    25.0
    """
    return num_train * epochs / images_per_second


def measured_rates(
    profile: MemoryProfile, segments: Sequence[Segment], micro_batch: int, seconds: float, like: Rates | None = None
) -> Rates:
    """Rates with which this plan's forward and backward take the seconds they were measured to take.

    Args:
        seconds: of one micro-batch's forward and backward.
        like: rates whose proportions hold; None: arithmetic alone takes time.
    """
    like = Rates(flops_per_s=1.0) if like is None else like
    scale = step_seconds(profile, segments, micro_batch, like) / seconds
    return Rates(
        flops_per_s=like.flops_per_s * scale,
        memory_bytes_per_s=like.memory_bytes_per_s * scale,
        link_bytes_per_s=like.link_bytes_per_s * scale,
    )


def _forward_seconds(unit: UnitCosts, batch: int, rates: Rates) -> float:
    return max(unit.flops.at(batch) / rates.flops_per_s, unit.traffic.at(batch) / rates.memory_bytes_per_s)


def _again_seconds(profile: MemoryProfile, segment: Segment, batch: int, rates: Rates) -> float:
    """Seconds of what the plan runs again for a segment; of several units, their forward's time in proportion to the FLOPs."""
    flops, traffic = segment_flops(profile, segment), segment_traffic(profile, segment)
    units = profile.units[segment.start : segment.end]
    forward = sum(unit.flops.slope for unit in units)
    if len(units) == 1 or not flops or not forward:
        return batch * max(flops / rates.flops_per_s, traffic / rates.memory_bytes_per_s)
    return flops / forward * sum(_forward_seconds(unit, batch, rates) for unit in units)


def _waiting_seconds(profile: MemoryProfile, segment: Segment, batch: int, rates: Rates) -> float:
    host = Host(total_bytes=0, link_bytes_per_s=rates.link_bytes_per_s, flops_per_s=rates.flops_per_s)
    return batch * waiting_flops(profile, segment, host) / rates.flops_per_s
