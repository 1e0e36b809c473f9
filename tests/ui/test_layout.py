"""The live area as a function of state and width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hiresvis.run.events import Event, PlanChosen, RunStarted, StepDone
from hiresvis.ui.layout import line_text, line_width, live_lines
from hiresvis.ui.state import RunState, advance, replay
from hiresvis.ui.text import ASCII, UNICODE

MakeEvents = Callable[..., list[Event]]
GIB = 2**30


def in_training(make_events: MakeEvents) -> RunState:
    events = make_events(3, 40)
    last = next(i for i, event in enumerate(events) if isinstance(event, StepDone) and (event.epoch, event.step) == (2, 20))
    return replay(events[: last + 1])


def drawn(state: RunState, width: int, now: float = 0.0) -> str:
    return "\n".join(line_text(line) for line in live_lines(state, width, now, UNICODE))


@pytest.mark.parametrize("glyphs", [ASCII, UNICODE])
@pytest.mark.parametrize("width", [1, 5, 20, 49, 59, 60, 61, 79, 80, 99, 100, 119, 200])
def test_no_line_is_wider_than_the_terminal(make_events: MakeEvents, width: int, glyphs: object) -> None:
    """At any moment of a run and with long, wide and bracketed names."""
    state = RunState()
    for event in make_events(1, 8, end="none"):
        if isinstance(event, RunStarted):
            event = replace(event, run_name="とても長い名前" * 6, model="a_very_long_model_name.with_a_tag_of_its_own")
        if isinstance(event, PlanChosen):
            event = replace(event, stages=tuple(f"stage{i} spacing {i}" for i in range(9)))
        state = advance(state, event)
        for line in live_lines(state, width, state.time, glyphs):  # type: ignore[arg-type]
            assert line_width(line) <= width, line_text(line)


def test_full_view_holds_the_run_at_a_glance(make_events: MakeEvents) -> None:
    """100 columns: model, progress, loss, metric, memory against budget, plan, data."""
    text = drawn(in_training(make_events), 119)
    for part in (
        "hiresvis fit  convnextv2_base 2048x2048  run lesions[03]", "epoch 2/3", "20/40", "epoch 00:47 left", "lr ", "grad ",
        "val macro_f1 0.581 (best 0.581 @1)", "20.4 / 22.0 GiB budget", "(card 24.0)", "predicted peak 20.9 GiB",
        "micro 2 x accum 8 = 16", "stage0 spacing 1 · stage1 spacing 2 · rest stored", "bf16", "wait 4%", "6.7 img/s", "step 2.35s",
        "skipped 1", "non-finite 0",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(("width", "lines"), [(119, 7), (99, 7), (98, 3), (59, 3), (58, 1), (30, 1)])
def test_height_follows_the_width(make_events: MakeEvents, width: int, lines: int) -> None:
    """Everything (after a blank line) on a terminal of 100 columns, three lines on one of 60, or one."""
    assert len(live_lines(in_training(make_events), width, 0.0, UNICODE)) == lines


def test_what_matters_most_stays_on_the_narrowest_view(make_events: MakeEvents) -> None:
    """Below 60 columns: epoch, step, loss; at 80 the metric and the memory too."""
    state = in_training(make_events)
    assert "2/3" in drawn(state, 40)
    assert "train 20/40" in drawn(state, 40)
    assert "20.4 / 22.0 GiB" in drawn(state, 80)
    assert "best 0.581 @1" in drawn(state, 80)


def test_memory_over_the_budget_is_said_in_words(make_events: MakeEvents) -> None:
    """Not by colour alone, at every width that shows memory."""
    state = in_training(make_events)
    assert state.step is not None
    over = replace(state, step=replace(state.step, memory_bytes=23 * GIB))
    assert "over budget" in drawn(over, 120)
    assert "over budget" in drawn(over, 80)
    assert "over budget" not in drawn(state, 120)


def test_memory_of_other_processes_is_told_where_there_is_any(make_events: MakeEvents) -> None:
    """Beside what the card has, in the same unit; first to go where room is short."""
    state = in_training(make_events)
    assert state.started is not None
    assert "others" not in drawn(state, 120)
    shared = replace(state, started=replace(state.started, others_bytes=GIB * 2 // 5))
    assert "22.0 GiB budget   (card 24.0)   predicted peak 20.9 GiB   others 0.4" in drawn(shared, 120)
    assert "others" not in drawn(shared, 100)


def test_trouble_outlasts_lesser_news_when_room_is_short(make_events: MakeEvents) -> None:
    """A non-finite step is shown even where counts of zero are dropped."""
    state = in_training(make_events)
    assert state.step is not None
    troubled = replace(state, step=replace(state.step, num_non_finite=2, num_skipped=0))
    assert "non-finite 2" in drawn(troubled, 62)
    assert "skipped" not in drawn(troubled, 62)


@pytest.mark.parametrize("width", [119, 80, 50, 9])
def test_a_stop_that_was_asked_for_is_told_until_it_happens(make_events: MakeEvents, width: int) -> None:
    """Steps can take long: the first Ctrl-C is seen to be heard, with what a second one would do."""
    state = in_training(make_events)
    *lines, last = live_lines(state, width, 0.0, UNICODE, "SIGINT")
    assert lines == live_lines(state, width, 0.0, UNICODE)
    told = "stop  SIGINT: the step is finished and saved first; Ctrl-C again ends at once"
    assert line_text(last) == (told if width >= len(told) else told[: width - 1] + "…")
    finding = replay(make_events(1, 3)[:10])
    assert "stop  SIGINT: ends at the next safe point" in line_text(live_lines(finding, 119, 0.0, UNICODE, "SIGINT")[-1])
    assert line_text(live_lines(state, 119, 0.0, UNICODE, "SIGUSR1")[-1]) == "stop  SIGUSR1: the step is finished and saved first"
    assert live_lines(replay(make_events(1, 3)), 119, 0.0, UNICODE, "SIGINT") == []


def test_snapshot_age_grows_with_the_clock(make_events: MakeEvents) -> None:
    """`now` is what the age is counted to."""
    state = in_training(make_events)
    assert state.snapshot is not None
    assert "snapshot 40s ago" in drawn(state, 120, state.snapshot.time + 40)
    assert "snapshot 10min ago" in drawn(state, 120, state.snapshot.time + 600)


def test_ladder_fills_while_the_batch_is_found(make_events: MakeEvents) -> None:
    """Rows appear one by one; the measured one replaces its prediction; after the plan the table has left the live area."""
    state, heights = RunState(), []
    for event in make_events(1, 3):
        state = advance(state, event)
        if state.phase == "find":
            heights.append(len(live_lines(state, 119, 0.0, UNICODE)))
    assert heights == [4, 5, 6, 7, 8, 8]
    assert "verdict" not in drawn(in_training(make_events), 119)


def test_the_wanted_batch_is_named_where_there_is_one(make_events: MakeEvents) -> None:
    """train.batch auto has no number before the plan."""
    started, *rest = make_events(1, 3)
    row = next(event for event in rest if event.kind == "ladder_row")
    assert "largest micro-batch, up to 16, with a peak under 22.0 GiB" in drawn(replay([started, row]), 119)
    auto = replace(started, batch=None)
    assert "largest micro-batch with a peak under 22.0 GiB" in drawn(replay([auto, row]), 119)


def test_evaluation_has_its_own_bar(make_events: MakeEvents) -> None:
    """While a split is evaluated, its progress is what is shown."""
    events = make_events(1, 8)
    last = next(i for i, event in enumerate(events) if event.kind == "evaluation_step") + 1
    for width in (120, 80, 50):
        text = drawn(replay(events[: last + 1]), width)
        assert "val" in text
        assert "2/5" in text


def test_nothing_is_drawn_before_and_after_the_run(make_events: MakeEvents) -> None:
    """The area is empty until the run starts and once it ended."""
    assert live_lines(RunState(), 120, 0.0, UNICODE) == []
    assert live_lines(replay(make_events(1, 3)), 120, 0.0, UNICODE) == []
