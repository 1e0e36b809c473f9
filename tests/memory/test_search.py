"""The search against brute force on random chains, and along falling budgets on traced models."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hiresvis.memory import program
from hiresvis.memory.peak import StepSetting, predict_peak, resident_bytes
from hiresvis.memory.plan import NoPlan, Segment, store_all, uniform
from hiresvis.memory.prices import Host, Prices
from hiresvis.memory.program import Program
from hiresvis.memory.search import FREEDOMS, Limits, Planner, balanced
from hiresvis.units import MIB

BATCH = 2
TRACED = ("vit_tiny_patch16_224", "resnet18")
# (model, budgets): a few here; the whole sweep of forty over four models takes minutes.
SWEEPS = [
    *((name, 10) for name in TRACED),
    *(pytest.param(name, 40, marks=pytest.mark.slow) for name in (*TRACED, "convnext_atto", "tf_efficientnet_lite0")),
]


HOST = Host(total_bytes=10**9, link_bytes_per_s=1.0, flops_per_s=30.0)  # 30 FLOPs a byte
PRICES = Prices(host=HOST)


def _segmentations(profile, allow, start: int = 0) -> Iterator[tuple[Segment, ...]]:
    """Every plan of the chain from `start` on."""
    units = profile.units
    if start == len(units):
        yield ()
        return
    ends: dict[int, list[tuple[Segment, ...]]] = {}
    for segment in _first_segments(profile, allow, start):
        rests = ends.setdefault(segment.end, list(_segmentations(profile, allow, segment.end)))
        yield from ((segment, *rest) for rest in rests)


def _first_segments(profile, allow, start: int) -> Iterator[Segment]:
    units = profile.units
    yield Segment(start, start + 1)
    if not units[start].opens_segment:
        return
    end = start + 1
    while end <= len(units) and units[end - 1].recomputable:
        inside = units[start:end]
        found = [] if all(unit.ways for unit in inside) and end == start + 1 else [Segment(start, end, "recompute")]
        if end == start + 1:
            found.extend(
                Segment(start, end, "keep" if way.keep else "recompute", (way.passes,), way.keep)
                for way in units[start].ways
                if (not way.keep or "keep" in allow) and (not way.passes or "nested" in allow)
            )
        elif "nested" in allow and all(unit.ways for unit in inside):
            plain = [[way.passes for way in unit.ways if not way.keep] for unit in inside]
            found.extend(Segment(start, end, "recompute", passes) for passes in itertools.product(*plain))
        for segment in found:
            yield segment
            if "offload" in allow:
                yield replace(segment, tier="offload")
        end += 1


def _cost(profile, segments) -> int:
    return PRICES.of(profile, segments)


def _found(profile, allow, room: int, setting: StepSetting) -> tuple[Segment, ...] | None:
    return Program(profile, BATCH, room, setting, allow, PRICES).cheapest(room)


@st.composite
def ways(draw, opens: bool, flops: int):
    """None, or the plain way and a few that keep something, run in passes, or both."""
    hand = _hand()
    if not opens or draw(st.booleans()):
        return ()
    found = []
    for number, (keep, passes) in enumerate((((), ()), ((0,), ()), ((), (1,)), ((0,), (1,)))):
        if number == 0 or draw(st.booleans()):
            kept = draw(st.integers(1, 80)) if keep else 0
            backward = draw(st.integers(1, 300))
            found.append(
                hand.way(
                    keep=keep,
                    passes=passes,
                    kept=hand.line(kept),
                    forward=hand.peak(kept + draw(st.integers(1, 60))),
                    backward_first=hand.peak(backward),
                    backward_more=hand.peak(backward + draw(st.integers(0, 30))),
                    flops=hand.line(flops if number == 0 else 100 * draw(st.integers(0, 80))),
                )
            )
    return tuple(found)


@st.composite
def chains(draw, *, shared: bool, most: int):
    """Up to `most` units of random sizes; `shared` lets units keep any boundary and copy weights, which the program bounds from above."""
    hand = draw(st.just(_hand()))
    count = draw(st.integers(2, most))
    sizes = st.integers(1, 60)
    boundaries = [draw(sizes) for _ in range(count + 1)]
    units = []
    for index in range(count):
        opens = draw(st.integers(0, 5)) > 0
        interior = draw(st.integers(0, 200))
        flops = 100 * draw(st.integers(1, 50))  # the program adds 1 a segment, so that fewer win a tie
        kept = {index} if index == 0 or draw(st.booleans()) else set()  # the program takes the images as kept throughout
        if draw(st.integers(0, 3)) == 0:
            kept.add(index + 1)
        if shared:
            kept |= draw(st.sets(st.integers(0, index), max_size=2))
        units.append(
            hand.unit(
                index,
                recomputable=opens or (index > 0 and draw(st.booleans())),
                opens_segment=opens,
                input=hand.line(boundaries[index]),
                output=hand.line(boundaries[index + 1]),
                saves=tuple(sorted(kept)),
                interior=hand.line(interior),
                held=(0, index) if index else (0,),
                cast=draw(st.integers(0, 50)) if shared else 0,
                forward_stored=hand.peak(interior + draw(st.integers(1, 300))),
                forward_dropped=hand.peak(draw(sizes)),
                backward_first=hand.peak(draw(sizes)),
                backward_more=hand.peak(draw(sizes)),
                parameter_gradients=draw(st.integers(0, 40)),
                flops=hand.line(flops),
                ways=draw(ways(opens, flops)),
            )
        )
    gradients = sum(unit.parameter_gradients for unit in units)
    return hand.profile(*units, boundaries=tuple(map(hand.line, boundaries)), gradients=gradients, evaluation=hand.peak(1))


def _hand():
    import sys

    return sys.modules["planner_by_hand"]


def _room(profile, budget: int, setting: StepSetting) -> int:
    return budget - resident_bytes(profile, setting, BATCH)


def _every_plan(profile, allow, setting: StepSetting) -> list[tuple[int, int]]:
    """(peak, cost) of every plan."""
    return [
        (predict_peak(profile, segments, BATCH, setting).total_bytes, _cost(profile, segments))
        for segments in _segmentations(profile, allow)
    ]


def _budgets(every: list[tuple[int, int]]) -> list[int]:
    """From just below the tightest plan's peak to above the cheapest one's."""
    low, (_, high) = min(every)[0], min((cost, peak) for peak, cost in every)
    return sorted({low - 1, low, *(low + (high - low) * part // 4 for part in range(5)), high})


RECOMPUTE, KEEP, NESTED = (allow for _, allow in FREEDOMS[:3])


@pytest.mark.parametrize(("allow", "most"), [(RECOMPUTE, 8), (KEEP, 6), (NESTED, 4)])
@given(data=st.data(), accumulates=st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_the_program_finds_what_brute_force_finds(hand, monkeypatch, allow, most: int, data, accumulates: bool) -> None:
    """On a grid of one byte, where units keep boundaries of their own: the same least cost at every budget, and no plan where there is
    none; the search for the fewest bytes kept finds one exactly when there is one."""
    monkeypatch.setattr(program, "GRID_BYTES", 1)
    monkeypatch.setattr(program, "MAX_NESTED_CHOICES", 1000)
    profile = data.draw(chains(shared=False, most=most))
    setting = StepSetting(accumulates=accumulates, eval_batch=0)
    every = _every_plan(profile, allow, setting)
    for budget in _budgets(every):
        room = _room(profile, budget, setting)
        found = _found(profile, allow, room, setting)
        least = min((cost for peak, cost in every if peak <= budget), default=None)
        assert (None if found is None else _cost(profile, found)) == least, budget
        anything = Program(profile, BATCH, room, setting, allow, PRICES).least_kept(room)
        assert (anything is None) == (least is None)
        for segments in (found, anything):
            assert segments is None or predict_peak(profile, segments, BATCH, setting).total_bytes <= budget


@pytest.mark.parametrize(("allow", "most"), [(RECOMPUTE, 7), (NESTED, 4)])
@given(data=st.data(), accumulates=st.booleans(), grid=st.sampled_from([1, 5, 16]))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_the_program_never_promises_too_much(hand, monkeypatch, allow, most: int, data, accumulates: bool, grid: int) -> None:
    """With boundaries shared at will, weight copies and a coarse grid: a plan found is whole, within the budget by the walk, and no
    cheaper than brute force."""
    monkeypatch.setattr(program, "GRID_BYTES", grid)
    profile = data.draw(chains(shared=True, most=most))
    setting = StepSetting(accumulates=accumulates, eval_batch=0)
    every = _every_plan(profile, allow, setting)
    for budget in _budgets(every):
        found = _found(profile, allow, _room(profile, budget, setting), setting)
        if found is None:
            continue
        assert [segment.start for segment in found] == [0, *(segment.end for segment in found[:-1])]
        assert found[-1].end == len(profile.units)
        assert predict_peak(profile, found, BATCH, setting).total_bytes <= budget
        assert _cost(profile, found) >= min(cost for peak, cost in every if peak <= budget)


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_offload_is_within_the_budget_and_never_dearer_than_without(hand, monkeypatch, data) -> None:
    """With a host allowed, the planner's plan keeps to budget and host, and costs no more than the best plan without."""
    monkeypatch.setattr(program, "GRID_BYTES", 1)
    monkeypatch.setattr("hiresvis.memory.search.HOST_SLAB_BYTES", 1)
    monkeypatch.setattr(program, "MAX_NESTED_CHOICES", 1000)
    profile = data.draw(chains(shared=False, most=4))
    setting = StepSetting(accumulates=False, eval_batch=0)
    every = _every_plan(profile, NESTED, setting)
    host = replace(HOST, total_bytes=data.draw(st.integers(0, 200)))
    for budget in _budgets(every):
        candidate = Planner(profile, budget, setting, Limits(batch=BATCH, micro_batch=BATCH, prices=Prices(host=host))).choose()
        least = min((cost for peak, cost in every if peak <= budget), default=None)
        if isinstance(candidate, NoPlan):
            assert least is None
            continue
        assert candidate.peak.total_bytes <= budget
        assert candidate.host_bytes <= host.total_bytes
        assert least is None or candidate.cost <= least


def _setting(**changes: int) -> StepSetting:
    return StepSetting(**{"accumulates": False, "eval_batch": 1, "baseline_bytes": 100 * MIB, **changes})


def _planner(profile, budget: int, **limits: object) -> Planner:
    return Planner(profile, budget, _setting(), Limits(**{"batch": 16, **limits}))


def _sweep(profile, batch: int, count: int = 40) -> list[int]:
    """Budgets from just too small for one image to all of `batch` stored, rising ever faster."""
    one = Planner(profile, 0, _setting(), Limits(batch=batch)).refusal(1).need_bytes
    high = predict_peak(profile, store_all(profile), batch, _setting()).total_bytes
    return [one - 1, *(int(one * (high / one) ** (step / (count - 1))) for step in range(1, count - 1)), high]


@pytest.mark.parametrize(("name", "count"), SWEEPS)
def test_more_memory_never_means_more_recompute(lab, name: str, count: int) -> None:
    """At a fixed micro-batch over rising budgets: recompute falls or stays, the peak is never above the budget."""
    profile = lab.large_profile(name)
    recomputed = []
    for budget in _sweep(profile, 16, count):
        candidate = _planner(profile, budget, micro_batch=16).choose()
        if isinstance(candidate, NoPlan):
            assert not recomputed, "a plan fitted at a smaller budget"
            continue
        assert candidate.peak.total_bytes <= budget
        recomputed.append(candidate.cost)
    assert len(recomputed) > count // 5
    assert all(later <= earlier for earlier, later in pairwise(recomputed))
    assert recomputed[0] > recomputed[-1] == 0


@pytest.mark.parametrize(("name", "count"), SWEEPS)
def test_more_memory_never_means_a_smaller_micro_batch(lab, name: str, count: int) -> None:
    """Goal largest over rising budgets: the micro-batch rises or stays, the peak is within the budget, the optimizer's batch is 16."""
    profile = lab.large_profile(name)
    micro_batches = []
    for budget in _sweep(profile, 16, count):
        planner = _planner(profile, budget)
        candidate = planner.choose()
        if isinstance(candidate, NoPlan):
            assert not micro_batches
            continue
        plan = planner.plan(candidate, "")
        assert plan.predicted_peak_bytes <= budget
        assert plan.batch == 16
        assert (plan.accumulation - 1) * plan.micro_batch < 16 <= plan.accumulation * plan.micro_batch
        micro_batches.append(plan.micro_batch)
    assert all(earlier <= later for earlier, later in pairwise(micro_batches))
    assert micro_batches[0] < 16
    assert micro_batches[-1] == 16


@pytest.mark.parametrize(("name", "count"), SWEEPS)
def test_a_falling_budget_takes_more_work_and_then_the_micro_batch(lab, name: str, count: int) -> None:
    """At the whole batch what is done again rises step by step; only when no plan is left does the micro-batch fall."""
    profile = lab.large_profile(name)
    costs: list[int] = []
    split = False
    for budget in reversed(_sweep(profile, 16, count)):
        candidate = _planner(profile, budget).choose()
        if isinstance(candidate, NoPlan):
            break
        if candidate.micro_batch < 16:
            split = True
            assert _planner(profile, budget, micro_batch=16).choose().need_bytes > budget
            continue
        assert not split, "the micro-batch rose again as the budget fell"
        costs.append(candidate.cost)
    assert split
    assert costs[0] == 0
    assert all(later >= earlier for earlier, later in pairwise(costs))
    assert len(set(costs)) >= 3


def test_no_plan_carries_the_need_and_the_largest_part(lab) -> None:
    """Below the floor: what one image needs at the tightest plan, the budget, and the largest of the parts, which add up to the need."""
    profile = lab.large_profile("resnet18")
    answer = _planner(profile, 120 * MIB).choose()
    assert isinstance(answer, NoPlan)
    assert (answer.micro_batch, answer.budget_bytes) == (1, 120 * MIB)
    assert answer.need_bytes == sum(answer.parts.values()) > answer.budget_bytes
    assert answer.largest_part == max(answer.parts.items(), key=lambda part: part[1])
    assert not isinstance(_planner(profile, answer.need_bytes).choose(), NoPlan)


def test_a_pinned_micro_batch_that_does_not_fit_is_refused_by_its_own_need(lab) -> None:
    """memory.micro_batch 16 in room for fewer: the need is that of 16."""
    profile = lab.large_profile("resnet18")
    budget = _sweep(profile, 16)[5]
    assert not isinstance(_planner(profile, budget).choose(), NoPlan)
    answer = _planner(profile, budget, micro_batch=16).choose()
    assert isinstance(answer, NoPlan)
    assert answer.micro_batch == 16


def test_pinned_spacing_off_stores_all(lab) -> None:
    """Spacing off recomputes nothing, and gives a smaller micro-batch rather than a plan."""
    profile = lab.large_profile("resnet18")
    candidate = _planner(profile, _sweep(profile, 16)[20], spacing="off").choose()
    assert candidate.segments == store_all(profile)
    assert candidate.micro_batch < 16


def test_pinned_spacing_holds_everywhere_or_by_stage(lab) -> None:
    """A number recomputes every stage in segments of that length; a mapping only the stages it names."""
    profile = lab.large_profile("resnet18")
    assert _planner(profile, 2**40, spacing=2).choose().segments == uniform(profile, 2)
    by_stage = _planner(profile, 2**40, spacing={"stage1": 1}).choose().segments
    recomputed = [profile.units[segment.start] for segment in by_stage if segment.tier == "recompute"]
    assert [unit.name for unit in recomputed] == ["layer2.0", "layer2.1"]


def test_goal_fastest_takes_the_least_recompute(lab) -> None:
    """Where the largest micro-batch needs recompute and a smaller one none, fastest takes the largest of those that need least."""
    profile = lab.large_profile("resnet18")
    budget = _sweep(profile, 16)[10]
    largest, fastest = (_planner(profile, budget, goal=goal).choose() for goal in ("largest", "fastest"))
    assert largest.cost > fastest.cost == 0
    assert fastest.micro_batch < largest.micro_batch
    larger = [micro for micro in {balanced(16, n) for n in range(1, 17)} if micro > fastest.micro_batch]
    for micro in larger:
        better = _planner(profile, budget, micro_batch=micro).choose()
        assert isinstance(better, NoPlan) or better.cost > 0


def test_batch_auto_is_the_largest_that_fits_at_once(lab) -> None:
    """Without a batch: the micro-batch is the largest, one more does not fit, and nothing is accumulated."""
    profile = lab.large_profile("resnet18")
    budget = _sweep(profile, 16)[20]
    planner = _planner(profile, budget, batch=None)
    plan = planner.plan(planner.choose(), "")
    assert plan.batch == plan.micro_batch
    assert plan.accumulation == 1
    assert isinstance(_planner(profile, budget, batch=None, micro_batch=plan.micro_batch + 1).choose(), NoPlan)


@pytest.mark.parametrize(
    ("batch", "largest", "micro"), [(16, 16, 16), (16, 15, 8), (16, 7, 6), (16, 5, 4), (16, 1, 1), (7, 3, 3), (100, 33, 25)]
)
def test_a_batch_is_split_evenly(batch: int, largest: int, micro: int) -> None:
    """As few forwards as the largest micro-batch needs, and no larger than that takes."""
    assert balanced(batch, largest) == micro
    assert -(-batch // micro) == -(-batch // largest)


def test_an_element_limit_bounds_the_micro_batch(lab) -> None:
    """The micro-batch never goes above the profile's max_batch, whatever the budget."""
    profile = replace(lab.large_profile("resnet18"), max_batch=5)
    assert _planner(profile, 2**45).choose().micro_batch == 4  # of at most 5: 16 in four passes
    assert _planner(profile, 2**45, batch=None).choose().micro_batch == 5


def test_the_ladder_goes_from_off_to_the_best_mix(lab) -> None:
    """Rows off, 4, 2, 1, the best mix, then finer tiers; each row's size fits, one more image of an even spacing does not; each tier
    fits at least as many as the one before."""
    profile = lab.large_profile("vit_tiny_patch16_224")
    budget = _sweep(profile, 64)[12]
    planner = _planner(profile, budget, batch=64)
    rungs = planner.ladder()
    assert [rung.spacing for rung in rungs] == ["off", "4", "2", "1", "mixed", "keep", "nested", "chunk"]
    for rung in rungs:
        assert rung.candidate.peak.total_bytes <= budget
    for rung in rungs[:4]:
        if rung.candidate.micro_batch < 64:
            assert not planner.fits(planner.score(rung.candidate.segments, rung.candidate.micro_batch + 1))
    sizes = [rung.candidate.micro_batch for rung in rungs]
    assert sizes[3:] == sorted(sizes[3:])
    assert sizes[-1] == max(sizes) > sizes[0]
    assert rungs[0].candidate.recomputed_flops == 0


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_the_need_that_a_refusal_names_is_enough(hand, data) -> None:
    """Whatever is shared between units, and however little the host holds: with the budget that was named, a plan is found."""
    profile = data.draw(chains(shared=data.draw(st.booleans()), most=5))
    if data.draw(st.booleans()):  # units that are given the output of the one before the last, too
        units = [replace(unit, needs=(index - 1,)) if index > 1 else unit for index, unit in enumerate(profile.units)]
        profile = replace(profile, units=tuple(units))
    host = replace(HOST, total_bytes=data.draw(st.integers(0, 200)))
    limits = Limits(batch=BATCH, micro_batch=BATCH, prices=Prices(host=host if data.draw(st.booleans()) else None))
    setting = StepSetting(accumulates=False, eval_batch=0)
    refused = Planner(profile, 0, setting, limits).choose()
    assert isinstance(refused, NoPlan)
    for budget in (refused.need_bytes, refused.need_bytes + 1):
        found = Planner(profile, budget, setting, limits).choose()
        assert not isinstance(found, NoPlan)
        assert found.peak.total_bytes <= budget
    below = Planner(profile, refused.need_bytes - 1, setting, limits).choose()
    assert not isinstance(below, NoPlan) or below.need_bytes > below.budget_bytes


def test_a_pinned_micro_batch_with_too_many_elements_is_refused(hand) -> None:
    """Memory is not what speaks against it, and the refusal says so; at the limit it is planned."""
    profile = hand.profile(*(hand.unit(index) for index in range(3)), max_batch=7)
    answers = {n: Planner(profile, 10**9, _setting(baseline_bytes=0), Limits(batch=16, micro_batch=n)).choose() for n in (7, 8)}
    assert not isinstance(answers[7], NoPlan)
    assert isinstance(answers[8], NoPlan)
    assert answers[8].most_images == 7


def test_waiting_hides_behind_what_the_device_does_meanwhile(hand) -> None:
    """A transfer as long as the unit's work costs nothing on the way out; work counts traffic and pace."""
    unit = hand.unit(0, traffic=hand.line(500), ways=(hand.way(),))
    profile = hand.profile(unit)
    segment = Segment(0, 1, "offload", ((),))
    moved = 10 * 30  # bytes times FLOPs a byte
    for prices, forward, again in (
        (Prices(host=HOST, flops_per_byte=9.0), 1000, 1000),
        (Prices(host=HOST, flops_per_byte=0.0, pace=(0.1,)), 100, 100),
        (Prices(host=HOST, flops_per_byte=0.1, pace=(0.01,)), 10.5, 10),
    ):
        expected = max(0, moved - forward) + max(0, moved - 2 * forward - again)
        assert prices.waiting(profile, segment) == pytest.approx(expected, abs=2)
