"""Predicted peaks against sums done by hand, on chains small enough to do that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hiresvis.memory.costs import Affine, Highest
from hiresvis.memory.peak import StepSetting, predict_peak, resident_bytes
from hiresvis.memory.plan import Segment, store_all

ONE = StepSetting(accumulates=False, eval_batch=1)
MANY = replace(ONE, accumulates=True)


@pytest.fixture
def three(hand):
    """Three units."""
    return hand.profile(hand.unit(0), hand.unit(1), hand.unit(2))


CONSTANT = 1000 + 50 + 2000 + 3 * 2  # weights, buffers, optimizer, two raw images


def test_stored_units_pile_up_until_the_last_backward(three) -> None:
    """Three stored units at two images: the third's forward, over what the first two keep, is the highest."""
    kept_by_two = 2 * (2 * 100 + 2 * 10)
    forward = kept_by_two + 2 * 10 + 2 * 130  # the third's input is held
    backward = 2 * (3 * 100 + 3 * 10) + 2 * 10 + 2 * 20
    assert (forward, backward) == (720, 720)  # a tie: the earlier moment is named
    peak = predict_peak(three, store_all(three), 2, ONE)
    assert (peak.counted_bytes, peak.where) == (CONSTANT + 720, "forward of u2")
    parts = {"baseline": 0, "weights": 1050, "optimizer": 2000, "gradients": 0, "images": 6, "saved": 440, "interior": 280, "reserve": 0}
    assert peak.parts == parts


def test_a_recomputed_segment_keeps_its_input_and_piles_up_in_backward(three) -> None:
    """One segment of three: the last unit's recompute, on what the second run has kept so far and the output's gradient."""
    segments = (Segment(0, 3, "recompute"),)
    recompute_of_last = 2 * (10 + 2 * 100 + 10 + 10) + 2 * 10 + 2 * 130
    backward_of_last = 2 * (3 * 100 + 3 * 10) + 2 * 10 + 2 * 20
    assert (recompute_of_last, backward_of_last) == (740, 720)
    peak = predict_peak(three, segments, 2, ONE)
    assert (peak.counted_bytes, peak.where) == (CONSTANT + 740, "recompute of u2")


def test_segments_of_one_hold_one_unit_at_a_time(three) -> None:
    """Spacing 1: three inputs and one unit's interior at the highest moment."""
    segments = tuple(Segment(index, index + 1, "recompute") for index in range(3))
    peak = predict_peak(three, segments, 2, ONE)
    assert (peak.counted_bytes, peak.where) == (CONSTANT + 2 * 30 + 2 * 10 + 2 * 130, "recompute of u2")


def test_persisting_gradients_count_in_every_forward(three) -> None:
    """Accumulating: all gradients stay while forwards run, and backward needs what adding to them takes."""
    peak = predict_peak(three, store_all(three), 2, MANY)
    assert (peak.counted_bytes, peak.where) == (CONSTANT + 2 * 330 + 2 * 10 + 2 * 25 + 21, "backward of u2")
    assert peak.parts["gradients"] == 21


def test_gradients_grow_as_backward_goes_on(hand) -> None:
    """Not accumulating: the first unit's backward finds the later units' gradients there."""
    heavy_start = hand.profile(hand.unit(0, backward_first=hand.peak(1000)), hand.unit(1), hand.unit(2))
    peak = predict_peak(heavy_start, store_all(heavy_start), 2, ONE)
    assert (peak.counted_bytes, peak.where) == (CONSTANT + 2 * 110 + 2 * 10 + 2000 + 14, "backward of u0")
    assert peak.parts["gradients"] == 14


def test_a_boundary_that_two_units_keep_counts_once(three, hand) -> None:
    """The third unit also keeps the second's input (a residual): nothing is added, and dropping the second unit does not free it."""
    shared = hand.profile(hand.unit(0), hand.unit(1), hand.unit(2, saves=(1, 2)))
    same = predict_peak(shared, store_all(shared), 2, ONE).counted_bytes
    assert same == predict_peak(three, store_all(three), 2, ONE).counted_bytes
    without_own = hand.profile(hand.unit(0), hand.unit(1, saves=()), hand.unit(2, saves=(1, 2)))
    last = (Segment(0, 1), Segment(1, 2, "recompute"), Segment(2, 3))
    assert predict_peak(without_own, last, 2, ONE).parts["saved"] == 2 * (100 + 10 + 10)


def test_an_input_that_python_holds_counts_while_the_unit_runs(hand) -> None:
    """A stored unit that keeps nothing still has its input alive during its forward, once with what others keep of it."""
    free = hand.profile(hand.unit(0, saves=(), interior=hand.line(0), backward_first=hand.peak(0)))
    assert predict_peak(free, store_all(free), 2, ONE).counted_bytes == CONSTANT + 2 * 10 + 2 * 130
    unheld = hand.profile(hand.unit(0, saves=(), held=(), interior=hand.line(0), backward_first=hand.peak(0)))
    assert predict_peak(unheld, store_all(unheld), 2, ONE).counted_bytes == CONSTANT + 2 * 130


def test_weight_copies_are_cached_in_forward_and_kept_by_stored_units_alone(hand) -> None:
    """Autocast: a later unit's forward has all earlier copies; in backward only those of stored units and of the open segment."""
    cast = hand.profile(hand.unit(0, cast=500), hand.unit(1, cast=300), hand.unit(2, cast=100, backward_first=hand.peak(1000)))
    stored = predict_peak(cast, store_all(cast), 2, ONE)
    assert stored.counted_bytes == CONSTANT + 2 * 330 + 2 * 10 + 2000 + 900
    mixed = (Segment(0, 1, "recompute"), Segment(1, 2), Segment(2, 3))
    assert predict_peak(cast, mixed, 2, ONE).counted_bytes == CONSTANT + 2 * (10 + 110 + 110) + 2 * 10 + 2000 + 400
    last = (Segment(0, 1, "recompute"), Segment(1, 2), Segment(2, 3, "recompute"))
    assert predict_peak(cast, last, 2, ONE).counted_bytes == CONSTANT + 2 * (10 + 110 + 110) + 2 * 10 + 2000 + 400
    in_forward = hand.profile(hand.unit(0, cast=500), hand.unit(1, cast=300), hand.unit(2, forward_stored=hand.peak(3000)))
    assert predict_peak(in_forward, store_all(in_forward), 2, ONE).counted_bytes == CONSTANT + 2 * 220 + 2 * 10 + 6000 + 800


def test_the_optimizers_step_can_be_the_peak(hand) -> None:
    """Gradients and temporaries, no activations."""
    heavy = hand.profile(hand.unit(0), hand.unit(1), gradients=5000, optimizer_temporaries=600)
    peak = predict_peak(heavy, store_all(heavy), 2, ONE)
    assert (peak.counted_bytes, peak.where) == (CONSTANT + 5600, "optimizer step")
    assert (peak.parts["gradients"], peak.parts["saved"]) == (5000, 0)


def test_evaluation_can_be_the_peak(three) -> None:
    """At its own batch, with its own raw images instead of the training ones."""
    peak = predict_peak(three, store_all(three), 2, replace(ONE, eval_batch=50))
    assert (peak.counted_bytes, peak.where) == (1000 + 50 + 2000 + 50 * 3 + 50 * 40, "evaluation")


def test_baseline_and_reserve_count_in_the_total_alone(three) -> None:
    """counted_bytes is what a counter of storages sees; the total is what the budget is held against; the parts add up to it."""
    plain = predict_peak(three, store_all(three), 2, ONE)
    peak = predict_peak(three, store_all(three), 2, replace(ONE, baseline_bytes=10_000, reserve_bytes=77))
    assert peak.counted_bytes == plain.counted_bytes
    assert peak.total_bytes == plain.total_bytes + 10_077 == sum(peak.parts.values())


def test_resident_bytes_are_weights_buffers_state_average_and_images(three) -> None:
    """The constant part, by hand."""
    assert resident_bytes(replace(three, ema=900), ONE, 4) == 1000 + 50 + 2000 + 900 + 12


def test_step_flops_follow_the_gradients_that_are_needed(hand) -> None:
    """Backward costs twice the forward, once where the input needs no gradient, nothing where all is frozen."""
    mixed = hand.profile(
        hand.unit(0, input_gradient=False, parameter_gradients=0), hand.unit(1, input_gradient=False), hand.unit(2), hand.unit(3)
    )
    assert (mixed.forward_flops, mixed.step_flops) == (4000, 1000 + 2000 + 3000 + 3000)
    assert hand.profile(hand.unit(0, parameters=70)).step_flops == 2100  # adapters: a tenth of the numbers is trained


def test_a_segment_that_saves_nothing_keeps_nothing(hand) -> None:
    """A frozen stem that the plan recomputes is never run again, and its input is let go: the peak is that of a stored one."""
    frozen = {"saves": (), "interior": hand.line(0), "input_gradient": False, "parameter_gradients": 0}
    profile = hand.profile(hand.unit(0, **frozen), hand.unit(1, **frozen), hand.unit(2), hand.unit(3))
    for rest in ((Segment(2, 3), Segment(3, 4)), (Segment(2, 4, "recompute"),)):
        stored = predict_peak(profile, (Segment(0, 1), Segment(1, 2), *rest), 2, ONE)
        for recomputed in ((Segment(0, 2, "recompute"),), (Segment(0, 1, "recompute"), Segment(1, 2, "recompute"))):
            assert predict_peak(profile, (*recomputed, *rest), 2, ONE) == stored


@pytest.mark.parametrize("batch", [1, 3, 4, 5, 40])
def test_the_highest_of_lines_is_never_below_any(batch: int) -> None:
    """Levels that grow differently: at every batch the figure is the highest line's, though both traces had it elsewhere."""
    few, many = [100, 10, 55, 0], [100, 40, 60, -3]
    figure = Highest.through(2, few, 4, many)
    assert figure.at(batch) == max(Affine.through(2, a, 4, b).at(batch) for a, b in zip(few, many, strict=True))


def test_levels_of_different_lengths_give_the_line_through_the_peaks() -> None:
    """What cannot be aligned is bounded by its maxima."""
    assert Highest.through(2, [5, 9], 4, [3, 2, 15]) == Highest((Affine(3, 3),))
