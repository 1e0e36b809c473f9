"""The reducer: numbers from events alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from hiresvis.run.events import EpochStarted, Evaluated, EvaluationStep, Event, LadderRow, RunStarted, StepDone
from hiresvis.ui.state import RunState, Series, advance, replay


def step(number: int, *, epoch: int = 1, loss: float = 1.0, num_images: int = 16, time: float = 0.0) -> StepDone:
    return StepDone(
        time=time, epoch=epoch, step=number, num_steps=10, loss=loss, lr=1e-4, grad_norm=1.0, num_images=num_images,
        step_ms=2000.0, data_wait_ms=500.0, memory_bytes=100,
    )  # fmt: skip


def test_reducer_leaves_the_former_state_as_it_was(make_events: Callable[..., list[Event]]) -> None:
    """`advance` is pure: the state before an event is unchanged after it."""
    state = RunState()
    for event in make_events(1, 5):
        before = repr(state)
        after = advance(state, event)
        assert repr(state) == before
        state = after


def test_ladder_row_of_the_same_rung_replaces_the_earlier_one(make_events: Callable[..., list[Event]]) -> None:
    """A measurement takes the place of its prediction, and rows stay in the rungs' order."""
    rows = [event for event in make_events(1, 2) if isinstance(event, LadderRow)]
    first = replace(rows[0], images_per_second=None)
    state = replay([first, rows[-1], rows[2], replace(first, verdict="later", images_per_second=1.5)])
    assert [row.rung for row in state.ladder] == [0, 2, 4]
    assert state.ladder[0].verdict == "later"


def test_planning_again_begins_a_new_ladder(make_events: Callable[..., list[Event]]) -> None:
    """Rung 0 without a measured rate voids the rows of the plan that did not run."""
    rows = [event for event in make_events(1, 2) if isinstance(event, LadderRow)]
    first = replace(rows[0], images_per_second=None)
    state = replay([first, rows[1], rows[2], replace(first, micro_batch=1)])
    assert [(row.rung, row.micro_batch) for row in state.ladder] == [(0, 1)]


def test_speed_and_data_wait_are_means_of_the_recent_steps() -> None:
    """16 images in 2 s are 8 a second, and half a second of waiting in two is 25%."""
    state = replay([EpochStarted(epoch=1, num_steps=10), step(1), step(2)])
    assert state.images_per_second == 8.0
    assert state.data_wait_share == 0.25
    assert state.step_seconds == 2.0


def test_time_left_counts_the_steps_and_the_pauses_that_remain(make_events: Callable[..., list[Event]]) -> None:
    """Epoch: its steps to come. Run: also the whole epochs to come, each with a pause as long as those seen."""
    started = next(event for event in make_events(3, 10) if isinstance(event, RunStarted))
    events = [
        replace(started, epochs=3),
        EpochStarted(time=100, epoch=1, num_steps=10),
        *(step(number, time=100 + 2 * number) for number in range(1, 11)),
        EpochStarted(time=150, epoch=2, num_steps=10),  # 30 s after the last step
        step(1, epoch=2, time=152),
    ]
    state = replay(events)
    assert state.pause_seconds == 30
    assert state.epoch_seconds_left == 9 * 2
    assert state.run_seconds_left == 9 * 2 + 30 + (10 * 2 + 30)
    halfway = replay([*events, *(step(n, epoch=2) for n in range(2, 11)), EvaluationStep(epoch=2, step=2, num_steps=4)])
    assert halfway.run_seconds_left == 15 + (10 * 2 + 30)


def test_hours_between_interruption_and_resumption_are_no_pause(make_events: Callable[..., list[Event]]) -> None:
    """A run taken up next day does not foresee a day's pause after every epoch."""
    events = make_events(2, 5, end="interrupted")
    resumed = replace(events[0], time=events[-1].time + 86400)
    state = replay([*events, resumed, EpochStarted(time=resumed.time + 9, epoch=3, num_steps=5)])
    assert max(state.pauses) < 60
    assert state.interrupted is None
    assert state.phase == "train"


def test_resumed_run_replaces_the_steps_that_it_repeats() -> None:
    """Curves hold each place once, with the values of the later pass."""
    first = [EpochStarted(epoch=1, num_steps=10), *(step(n, loss=5.0) for n in range(1, 9))]
    again = [EpochStarted(epoch=1, num_steps=10, first_step=4), *(step(n, loss=1.0) for n in range(4, 11))]
    points = replay([*first, *again]).losses.all_points
    assert [round(10 * x) for x, _ in points] == list(range(1, 11))
    assert [y for _, y in points] == [5.0] * 3 + [1.0] * 7


def test_non_finite_losses_leave_the_means_alone() -> None:
    """NaN and inf are kept out of the curve, the smoothed loss and the epoch's mean."""
    state = replay([EpochStarted(epoch=1, num_steps=10), step(1, loss=2.0), step(2, loss=math.nan), step(3, loss=math.inf)])
    assert state.smooth_loss == pytest.approx(2.0)
    assert state.epoch_loss == 2.0
    assert state.losses.values == (2.0,)


def test_epoch_loss_weighs_steps_by_their_images() -> None:
    """The last, smaller batch counts for its images, not for a whole step."""
    state = replay([EpochStarted(epoch=1, num_steps=10), step(1, loss=1.0, num_images=30), step(2, loss=4.0, num_images=10)])
    assert state.epoch_loss == 1.75


def test_epoch_taken_up_in_the_middle_has_no_mean_of_its_own() -> None:
    """Half an epoch's losses are not shown as the epoch's."""
    assert replay([EpochStarted(epoch=1, num_steps=10, first_step=5), step(5)]).epoch_loss is None


def test_series_stays_bounded_and_keeps_its_shape() -> None:
    """Ten thousand values become at most 512 points, whose means are those of the values they stand for."""
    series = Series()
    for index in range(10_000):
        series = series.add(index, 2.0 * index)
    points = series.all_points
    assert 256 <= len(points) <= Series.limit
    assert all(y == pytest.approx(2 * x) for x, y in points)
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert points[-1][0] > 9_900
    gaps = {round(b[0] - a[0], 6) for a, b in pairwise(points[:-1])}
    assert len(gaps) == 1, "every point but the last stands for as many values"


def test_phase_follows_the_run(make_events: Callable[..., list[Event]]) -> None:
    """start, find, train, evaluate and the end, each when its events come."""
    state, phases = RunState(), []
    for event in make_events(1, 3):
        state = advance(state, event)
        phases.append(state.phase)
    assert list(dict.fromkeys(phases)) == ["start", "find", "train", "evaluate", "finished"]


def test_best_is_none_until_an_epoch_was_evaluated(make_events: Callable[..., list[Event]]) -> None:
    """No best value is made up before the first evaluation."""
    events = make_events(1, 3)
    first = next(index for index, event in enumerate(events) if isinstance(event, Evaluated))
    assert replay(events[:first]).best is None
    found = events[first]
    assert isinstance(found, Evaluated)
    assert replay(events[: first + 1]).best == ("macro_f1", found.value, 1)


def test_figures_of_the_test_split_go_with_the_weights_that_they_are_of(make_events: Callable[..., list[Event]]) -> None:
    """A run that ended and goes on keeps them until it finds better weights."""
    events = make_events(2, 3)
    found = next(event for event in events if isinstance(event, Evaluated))
    ended = replay([*events, replace(found, split="test", is_best=False), next(e for e in events if isinstance(e, RunStarted))])
    assert ended.test is not None
    assert advance(ended, replace(found, epoch=3, is_best=False)).test is not None
    assert advance(ended, replace(found, epoch=3, is_best=True)).test is None
