"""The search against brute force on random chains, and along falling budgets on traced models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hiresvis.memory import search
from hiresvis.memory.peak import StepSetting, predict_peak, resident_bytes
from hiresvis.memory.plan import NoPlan, Segment, store_all, uniform
from hiresvis.memory.search import Limits, Planner, balanced, best_segments, recomputed_flops
from hiresvis.units import MIB

BATCH = 2
TRACED = ("vit_tiny_patch16_224", "resnet18")


def _segmentations(profile, start: int = 0) -> Iterator[tuple[Segment, ...]]:
    """Every plan of the chain from `start` on."""
    units = profile.units
    if start == len(units):
        yield ()
        return
    for rest in _segmentations(profile, start + 1):
        yield (Segment(start, start + 1), *rest)
    if units[start].opens_segment:
        end = start + 1
        while end <= len(units) and units[end - 1].recomputable:
            for rest in _segmentations(profile, end):
                yield (Segment(start, end, "recompute"), *rest)
            end += 1


def _brute_force(profile, budget: int, setting: StepSetting) -> int | None:
    """The least recompute of all plans whose predicted peak is within the budget."""
    costs = [
        recomputed_flops(profile, segments)
        for segments in _segmentations(profile)
        if predict_peak(profile, segments, BATCH, setting).total_bytes <= budget
    ]
    return min(costs, default=None)


@st.composite
def chains(draw, *, shared: bool):
    """Up to seven units of random sizes; `shared` lets units keep any boundary and copy weights, which the program bounds from above."""
    hand = draw(st.just(_hand()))
    count = draw(st.integers(2, 7))
    sizes = st.integers(1, 60)
    boundaries = [draw(sizes) for _ in range(count + 1)]
    units = []
    for index in range(count):
        opens = draw(st.integers(0, 5)) > 0
        interior = draw(st.integers(0, 200))
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
                flops=hand.line(100 * draw(st.integers(1, 50))),  # the program adds 1 a segment, so that fewer win a tie
            )
        )
    gradients = sum(unit.parameter_gradients for unit in units)
    return hand.profile(*units, boundaries=tuple(map(hand.line, boundaries)), gradients=gradients, evaluation=hand.peak(1))


def _hand():
    import sys

    return sys.modules["planner_by_hand"]


def _room(profile, budget: int, setting: StepSetting) -> int:
    return budget - resident_bytes(profile, setting, BATCH)


def _budgets(profile, setting: StepSetting) -> list[int]:
    """From just below the tightest plan's peak to all stored."""
    peaks = [predict_peak(profile, segments, BATCH, setting).total_bytes for segments in _segmentations(profile)]
    low, high = min(peaks), predict_peak(profile, store_all(profile), BATCH, setting).total_bytes
    return sorted({low - 1, low, *(low + (high - low) * part // 4 for part in range(5)), high})


@given(data=st.data(), accumulates=st.booleans())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_the_program_finds_what_brute_force_finds(hand, monkeypatch, data, accumulates: bool) -> None:
    """On a grid of one byte, where units keep boundaries of their own: the same least recompute at every budget, and no plan where
    there is none."""
    monkeypatch.setattr(search, "GRID_BYTES", 1)
    profile = data.draw(chains(shared=False))
    setting = StepSetting(accumulates=accumulates, eval_batch=0)
    for budget in _budgets(profile, setting):
        found = best_segments(profile, BATCH, _room(profile, budget, setting), setting)
        least = _brute_force(profile, budget, setting)
        assert (None if found is None else recomputed_flops(profile, found)) == least, budget
        if found is not None:
            assert predict_peak(profile, found, BATCH, setting).total_bytes <= budget


@given(data=st.data(), accumulates=st.booleans(), grid=st.sampled_from([1, 5, 16]))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_the_program_never_promises_too_much(hand, monkeypatch, data, accumulates: bool, grid: int) -> None:
    """With boundaries shared at will, weight copies and a coarse grid: a plan found is whole, within the budget by the walk, and no
    cheaper than brute force."""
    monkeypatch.setattr(search, "GRID_BYTES", grid)
    profile = data.draw(chains(shared=True))
    setting = StepSetting(accumulates=accumulates, eval_batch=0)
    for budget in _budgets(profile, setting):
        found = best_segments(profile, BATCH, _room(profile, budget, setting), setting)
        if found is None:
            continue
        assert [segment.start for segment in found] == [0, *(segment.end for segment in found[:-1])]
        assert found[-1].end == len(profile.units)
        assert predict_peak(profile, found, BATCH, setting).total_bytes <= budget
        least = _brute_force(profile, budget, setting)
        assert least is not None
        assert recomputed_flops(profile, found) >= least


def _setting(**changes: int) -> StepSetting:
    return StepSetting(**{"accumulates": False, "eval_batch": 1, "baseline_bytes": 100 * MIB, **changes})


def _planner(profile, budget: int, **limits: object) -> Planner:
    return Planner(profile, budget, _setting(), Limits(**{"batch": 16, **limits}))


def _sweep(profile, batch: int, count: int = 40) -> list[int]:
    """Budgets from just too small for one image to all of `batch` stored, rising."""
    one = Planner(profile, 0, _setting(), Limits(batch=batch)).refusal(1).need_bytes
    high = predict_peak(profile, store_all(profile), batch, _setting()).total_bytes
    return [one - 1 + (high - one + 1) * step // (count - 1) for step in range(count)]


@pytest.mark.parametrize("name", TRACED)
def test_more_memory_never_means_more_recompute(lab, name: str) -> None:
    """At a fixed micro-batch over 40 rising budgets: recompute falls or stays, the peak is never above the budget."""
    profile = lab.large_profile(name)
    recomputed = []
    for budget in _sweep(profile, 16):
        candidate = _planner(profile, budget, micro_batch=16).choose()
        if isinstance(candidate, NoPlan):
            assert not recomputed, "a plan fitted at a smaller budget"
            continue
        assert candidate.peak.total_bytes <= budget
        recomputed.append(candidate.recomputed_flops)
    assert len(recomputed) > 10
    assert all(later <= earlier for earlier, later in pairwise(recomputed))
    assert recomputed[0] > recomputed[-1] == 0


@pytest.mark.parametrize("name", TRACED)
def test_more_memory_never_means_a_smaller_micro_batch(lab, name: str) -> None:
    """Goal largest over 40 rising budgets: the micro-batch rises or stays, the peak is within the budget, the optimizer's batch is 16."""
    profile = lab.large_profile(name)
    micro_batches = []
    for budget in _sweep(profile, 16):
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
    assert micro_batches[0] < 4
    assert micro_batches[-1] == 16


@pytest.mark.parametrize("name", TRACED)
def test_a_falling_budget_takes_stored_units_then_spacing_then_the_micro_batch(lab, name: str) -> None:
    """At the whole batch the stored share falls step by step; only when no plan is left does the micro-batch fall."""
    profile = lab.large_profile(name)
    stored: list[int] = []
    split = False
    for budget in reversed(_sweep(profile, 16)):
        candidate = _planner(profile, budget).choose()
        if isinstance(candidate, NoPlan):
            break
        if candidate.micro_batch < 16:
            split = True
            assert _planner(profile, budget, micro_batch=16).choose().need_bytes > budget
            continue
        assert not split, "the micro-batch rose again as the budget fell"
        stored.append(sum(profile.units[segment.start].flops.slope for segment in candidate.segments if segment.tier == "store"))
    assert split
    assert stored[0] == profile.forward_flops
    assert all(later <= earlier for earlier, later in pairwise(stored))
    assert len(set(stored)) >= 3


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
    assert largest.recomputed_flops > 0
    assert fastest.recomputed_flops == 0
    assert fastest.micro_batch < largest.micro_batch
    larger = [micro for micro in {balanced(16, n) for n in range(1, 17)} if micro > fastest.micro_batch]
    for micro in larger:
        better = _planner(profile, budget, micro_batch=micro).choose()
        assert isinstance(better, NoPlan) or better.recomputed_flops > 0


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
    """Rows off, 4, 2, 1, mixed; each row's size fits, one more image does not; the mix is at least as large as any."""
    profile = lab.large_profile("vit_tiny_patch16_224")
    budget = _sweep(profile, 64)[12]
    planner = _planner(profile, budget, batch=64)
    rungs = planner.ladder()
    assert [rung.spacing for rung in rungs] == ["off", "4", "2", "1", "mixed"]
    for rung in rungs:
        assert rung.candidate.peak.total_bytes <= budget
    for rung in rungs[:-1]:
        if rung.candidate.micro_batch < 64:
            assert not planner.fits(planner.score(rung.candidate.segments, rung.candidate.micro_batch + 1))
    sizes = [rung.candidate.micro_batch for rung in rungs]
    assert sizes[-1] == max(sizes) > sizes[0]
    assert rungs[0].candidate.recomputed_flops == 0
