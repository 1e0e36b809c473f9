"""What a step costs in time, from the same profile as its bytes: a roofline per unit.

A unit's forward takes the longer of its arithmetic and its memory traffic; its backward as often as long as it has kinds of
gradients to make (`MemoryProfile.step_flops` counts alike). What is run again, and what offloaded tensors are waited for,
comes on top. Estimates compare plans and cards. Of the device at hand, `measured_rates` makes rates and each unit's pace out
of what the units' forwards took there.

(Roofline: Williams, Waterman, Patterson, 2009. It overlaps a unit's arithmetic with all of its traffic, which is more than
any machine does; `cards.EFFICIENCY` was fitted with that included.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from hiresvis.units import GIB

from .cards import EFFICIENCY, MEMORY_EFFICIENCY, Card
from .costs import MemoryProfile
from .peak import offloaded_bytes
from .plan import Segment
from .prices import Host, Prices, runs_again

HOST_BYTES = 64 * GIB  # where the host's memory is not known
_LEAST_SHARE = 0.005  # of a forward's time, below which a unit says nothing of the device's rates
_FASTEST = 20.0  # times the average rate, which arithmetic is never taken to exceed


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device reaches in training, per second.

    Attributes:
        flops_per_s: multiply-adds times two.
        memory_bytes_per_s: its own memory, reads and writes together.
        link_bytes_per_s: to and from host memory, each.
        pace: of each unit, where units were timed: its time over that of its arithmetic and its traffic one after the other.
    """

    flops_per_s: float
    memory_bytes_per_s: float = inf
    link_bytes_per_s: float = inf
    pace: tuple[float, ...] = ()

    @property
    def flops_per_byte(self) -> float:
        """FLOPs done while one byte is read or written."""
        return self.flops_per_s / self.memory_bytes_per_s

    def seconds(self, index: int, flops: float, traffic: float) -> float:
        """What so many FLOPs and bytes of unit `index` take."""
        arithmetic, moving = flops / self.flops_per_s, traffic / self.memory_bytes_per_s
        return self.pace[index] * (arithmetic + moving) if self.pace else max(arithmetic, moving)


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


def priced_by(prices: Prices, rates: Rates) -> Prices:
    """The prices on a device of these rates."""
    host = None if prices.host is None else replace(prices.host, flops_per_s=rates.flops_per_s)
    return Prices(host=host, flops_per_byte=rates.flops_per_byte, pace=rates.pace)


def step_seconds(profile: MemoryProfile, segments: Sequence[Segment], micro_batch: int, rates: Rates) -> float:
    """Seconds of one micro-batch's forward and backward under a plan. Pure."""
    seconds = 0.0
    for index, unit in enumerate(profile.units):
        seconds += unit.num_runs * rates.seconds(index, unit.flops.at(micro_batch), unit.traffic.at(micro_batch))
    for segment in segments:
        seconds += micro_batch * sum(rates.seconds(*again) for again in runs_again(profile, segment))
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


def measured_rates(profile: MemoryProfile, seconds: Mapping[int, float]) -> Rates:
    """The device's rates by what units' forwards took there: the two that fit best, and of each unit how far it is from them.

    Args:
        seconds: of one image's forward, by the unit's index. What is not there (operators between units) goes at the rates.
    """
    total = sum(seconds.values())
    rows = [(profile.units[index], taken) for index, taken in seconds.items() if taken >= _LEAST_SHARE * total]
    # Least squares of the relative errors of a * FLOPs + b * bytes, neither below zero.
    points = [(unit.flops.slope / taken, unit.traffic.slope / taken) for unit, taken in rows]
    ff, ft, tt = (sum(a * b for a, b in pairs) for pairs in ([(f, f) for f, _ in points], points, [(t, t) for _, t in points]))
    f, t = sum(f for f, _ in points), sum(t for _, t in points)
    determinant = ff * tt - ft * ft
    a, b = ((f * tt - t * ft) / determinant, (t * ff - f * ft) / determinant) if determinant > 0 else (f / ff, 0.0)
    if b <= 0:
        a, b = f / ff, 0.0
    least = total / max(1, sum(unit.flops.slope for unit in profile.units)) / _FASTEST  # arithmetic is never quite free
    if a < least:
        a, b = least, max(0.0, (t - least * ft) / tt)
    pace = [1.0] * len(profile.units)
    for index, taken in seconds.items():
        expected = a * profile.units[index].flops.slope + b * profile.units[index].traffic.slope
        pace[index] = taken / expected if expected else 1.0
    return Rates(flops_per_s=1 / a, memory_bytes_per_s=1 / b if b else inf, pace=tuple(pace))


def _waiting_seconds(profile: MemoryProfile, segment: Segment, batch: int, rates: Rates) -> float:
    """Seconds of a segment's transfers, out and back, that do not hide behind its own work."""
    if segment.tier != "offload":
        return 0.0
    moved = offloaded_bytes(profile, segment, batch) / rates.link_bytes_per_s
    units = [(index, profile.units[index]) for index in range(segment.start, segment.end)]
    forward = sum(rates.seconds(index, unit.flops.at(batch), unit.traffic.at(batch)) for index, unit in units)
    backward = 2 * forward + batch * sum(rates.seconds(*again) for again in runs_again(profile, segment))
    return max(0.0, moved - forward) + max(0.0, moved - backward)
