"""Time from integers: what a step takes on chains made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hiresvis.memory.cards import EFFICIENCY, MEMORY_EFFICIENCY, PCIE_4, find_card
from hiresvis.memory.plan import Segment, store_all
from hiresvis.memory.prices import Prices
from hiresvis.memory.search import recomputed_flops
from hiresvis.memory.timing import (
    Rates,
    host_of,
    images_per_second,
    measured_rates,
    optimizer_seconds,
    priced_by,
    rates_of,
    step_seconds,
)
from hiresvis.units import GIB

FLOPS = Rates(flops_per_s=1000.0)  # a unit's forward of one image takes a second


def test_a_step_takes_a_forward_and_two_backwards(hand):
    """Per unit and image: three times its FLOPs over the rate."""
    profile = hand.profile(*(hand.unit(index) for index in range(4)))
    assert step_seconds(profile, store_all(profile), 2, FLOPS) == 2 * 4 * 3
    assert step_seconds(profile, store_all(profile), 2, FLOPS) == 2 * profile.step_flops / FLOPS.flops_per_s


@pytest.mark.parametrize(
    ("changes", "passes"),
    [({"input_gradient": False}, 2), ({"parameter_gradients": 0}, 2), ({"input_gradient": False, "parameter_gradients": 0}, 1)],
)
def test_frozen_parts_take_less(hand, changes, passes):
    """A unit makes only the gradients that are asked for; a frozen one runs forward alone."""
    profile = hand.profile(hand.unit(0, **changes))
    assert step_seconds(profile, store_all(profile), 1, FLOPS) == passes


def test_a_unit_takes_the_longer_of_arithmetic_and_traffic(hand):
    """One unit is bound by FLOPs, the other by memory; each counts by itself."""
    units = hand.unit(0, traffic=hand.line(5)), hand.unit(1, flops=hand.line(10), traffic=hand.line(50))
    profile = hand.profile(*units)
    rates = Rates(flops_per_s=1000.0, memory_bytes_per_s=10.0)
    assert step_seconds(profile, store_all(profile), 1, rates) == 3 * (1 + 5)
    assert rates.flops_per_byte == 100


def test_what_is_run_again_takes_its_forward_once_more(hand):
    """With arithmetic alone, time follows the recomputed FLOPs, whatever the segments."""
    way = {"ways": (hand.way(), hand.way(passes=(1,), flops=hand.line(1500)))}
    profile = hand.profile(*(hand.unit(index, **way) for index in range(4)))
    stored = step_seconds(profile, store_all(profile), 2, FLOPS)
    for segments in (
        (Segment(0, 2, "recompute"), Segment(2, 3), Segment(3, 4)),
        (Segment(0, 4, "recompute", ((1,), (1,), (), ())),),
        (Segment(0, 1, "recompute", ((1,),)), Segment(1, 4, "recompute")),
    ):
        again = 2 * recomputed_flops(profile, segments) / FLOPS.flops_per_s
        assert step_seconds(profile, segments, 2, FLOPS) == pytest.approx(stored + again)


def test_a_segment_bound_by_memory_is_run_again_at_memorys_pace(hand):
    """A whole forward again takes as long as the first."""
    units = [hand.unit(index, flops=hand.line(10), traffic=hand.line(50)) for index in range(3)]
    profile = hand.profile(*units)
    rates = Rates(flops_per_s=1000.0, memory_bytes_per_s=10.0)
    segments = (Segment(0, 3, "recompute"),)
    assert step_seconds(profile, segments, 1, rates) - step_seconds(profile, store_all(profile), 1, rates) == pytest.approx(3 * 5)


def test_kept_products_leave_the_traffic_of_the_rest(hand):
    """With the costly outputs kept few FLOPs are left, but what is run again still reads and writes."""
    way = hand.way(keep=(0,), passes=(), kept=hand.line(4), flops=hand.line(10), traffic=hand.line(30))
    profile = hand.profile(hand.unit(0, traffic=hand.line(40), ways=(hand.way(), way)))
    rates = Rates(flops_per_s=1e6, memory_bytes_per_s=10.0)
    segments = (Segment(0, 1, "keep", ((),), (0,)),)
    assert step_seconds(profile, segments, 1, rates) - step_seconds(profile, store_all(profile), 1, rates) == pytest.approx(3)


def test_offload_waits_for_what_compute_does_not_hide(hand):
    """A slow link adds the part of both transfers that the segment's own compute leaves; a fast one nothing."""
    profile = hand.profile(hand.unit(0))
    recompute, offload = (Segment(0, 1, "recompute"),), (Segment(0, 1, "offload"),)
    before = step_seconds(profile, recompute, 1, FLOPS)
    fast = replace(FLOPS, link_bytes_per_s=10.0)  # the input's 10 bytes in a second: as long as the forward
    assert step_seconds(profile, offload, 1, fast) == before
    slow = replace(FLOPS, link_bytes_per_s=2.0)  # in five seconds: forward hides one, backward three
    assert step_seconds(profile, offload, 1, slow) == pytest.approx(before + 4 + 2)


def test_images_per_second_counts_the_optimizer_once_a_batch(hand):
    """Two micro-batches of three and one optimizer step; the gradients are read, weights and state read and written."""
    profile = hand.profile(hand.unit(0), gradients=10, optimizer_state=20)
    rates = Rates(flops_per_s=1000.0, memory_bytes_per_s=7.0)
    assert optimizer_seconds(profile, rates) == 10
    assert images_per_second(profile, store_all(profile), 3, 6, rates) == pytest.approx(6 / (6 * 3 + 10))


def test_measured_rates_find_a_devices_two_rates(hand):
    """Units timed on a machine that adds arithmetic and traffic give its rates back, and every pace is one."""
    units = [hand.unit(0), hand.unit(1, traffic=hand.line(50)), hand.unit(2, flops=hand.line(10), traffic=hand.line(200))]
    profile = hand.profile(*units)
    seconds = {index: unit.flops.slope / 500 + unit.traffic.slope / 20 for index, unit in enumerate(units)}
    rates = measured_rates(profile, seconds)
    assert (rates.flops_per_s, rates.memory_bytes_per_s) == (pytest.approx(500), pytest.approx(20))
    assert rates.pace == pytest.approx((1, 1, 1))


def test_the_pace_makes_up_for_what_two_rates_cannot_say(hand):
    """Whatever the units took, a step by the measured rates takes that, and a unit that was not timed goes at the rates."""
    profile = hand.profile(*(hand.unit(index, traffic=hand.line(index)) for index in range(4)))
    seconds = {0: 1.0, 1: 7.0, 3: 0.5}
    rates = measured_rates(profile, seconds)
    assert all(rates.seconds(index, 1000, index) == pytest.approx(taken) for index, taken in seconds.items())
    assert rates.pace[2] == 1
    assert min(rates.flops_per_s, rates.memory_bytes_per_s) > 0


@pytest.mark.parametrize("seconds", [{0: 1.0}, {0: 1.0, 1: 1.0}, {0: 1e-9, 1: 1.0}, {1: 3.0, 2: 1e-3}])
def test_few_or_odd_times_still_give_rates(hand, seconds):
    """One unit alone, equal times for unequal work, or times that no rates explain: rates stay positive."""
    units = [hand.unit(0), hand.unit(1, traffic=hand.line(10**6)), hand.unit(2, flops=hand.line(0), traffic=hand.line(7))]
    rates = measured_rates(hand.profile(*units), seconds)
    assert 0 < rates.flops_per_s < float("inf")
    assert rates.memory_bytes_per_s > 0
    assert all(pace >= 0 for pace in rates.pace)


def test_prices_follow_the_measured_rates(hand):
    """Recompute of a unit that is slow for its work costs more than of one that is quick, in proportion to their times."""
    profile = hand.profile(*(hand.unit(index) for index in range(2)))
    prices = priced_by(Prices(), measured_rates(profile, {0: 3.0, 1: 1.0}))
    slow, quick = (prices.of_segment(profile, Segment(index, index + 1, "recompute")) for index in range(2))
    assert slow == pytest.approx(3 * quick, rel=0.01)
    assert prices.of_step(profile) == pytest.approx(3 * (slow + quick), rel=0.01)


def test_a_cards_rates_are_shares_of_its_data_sheet():
    """Arithmetic and memory are derated, the link is what copies reach already."""
    card = find_card("RTX 4090")
    rates = rates_of(card, "bf16")
    assert rates.flops_per_s == card.bf16_flops * EFFICIENCY
    assert rates.memory_bytes_per_s == card.memory_bytes_per_s * MEMORY_EFFICIENCY
    assert rates.link_bytes_per_s == PCIE_4
    assert rates_of(card, "fp32").flops_per_s == card.fp32_flops * EFFICIENCY


def test_a_card_has_a_host_unless_its_memory_is_the_hosts():
    """64 GiB where nothing is known; unified memory has nowhere to offload to."""
    host = host_of(find_card("A100-80GB"), "bf16")
    assert host is not None
    assert (host.total_bytes, host.link_bytes_per_s) == (64 * GIB, PCIE_4)
    assert host.flops_per_s == rates_of(find_card("A100-80GB"), "bf16").flops_per_s
    assert host_of(find_card("M3 Max"), "bf16") is None
