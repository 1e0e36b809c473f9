"""Lines for logs: cadence, content, encoding; JSON lines."""

from __future__ import annotations

import io
import json
import math
import shlex
from collections.abc import Callable
from dataclasses import replace

import pytest

from hiresvis.run.events import EpochStarted, Event, Notice, RunFinished, StepDone, from_json
from hiresvis.ui.plain import JsonView, PlainView

MakeEvents = Callable[..., list[Event]]


class Stream(io.StringIO):
    """Counts lines that were flushed."""

    flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def step(number: int, num_steps: int, epoch: int = 1) -> StepDone:
    return StepDone(
        epoch=epoch, step=number, num_steps=num_steps, loss=0.5, lr=1e-4, grad_norm=1.0, num_images=4, step_ms=1000, data_wait_ms=0,
        memory_bytes=2**30,
    )  # fmt: skip


def steps_told(num_steps: int, seconds_a_step: float) -> list[int]:
    """The steps that get a line in one epoch."""
    stream, clock = Stream(), Clock()
    view = PlainView(stream, clock)
    view.handle(EpochStarted(epoch=1, num_steps=num_steps))
    for number in range(1, num_steps + 1):
        clock.now += seconds_a_step
        view.handle(step(number, num_steps))
    return [int(line.split("step=")[1].split("/")[0]) for line in stream.getvalue().splitlines() if line.startswith("step ")]


def test_first_step_then_every_thirty_seconds_in_a_short_epoch() -> None:
    """100 steps of 2 s: 5% are 10 s, so 30 s decide."""
    assert steps_told(100, 2.0) == [1, 16, 31, 46, 61, 76, 91]


def test_first_step_then_every_twentieth_of_a_long_epoch() -> None:
    """100 steps of 60 s: 30 s are half a step, so 5% decide."""
    assert steps_told(100, 60.0) == list(range(1, 101, 5))


def test_short_epochs_do_not_repeat_the_first_line() -> None:
    """The cadence runs over epochs: ten epochs of 3 s give two step lines at most."""
    stream, clock = Stream(), Clock()
    view = PlainView(stream, clock)
    for epoch in range(1, 11):
        view.handle(EpochStarted(epoch=epoch, num_steps=3))
        for number in range(1, 4):
            clock.now += 1.0
            view.handle(step(number, 3, epoch))
    assert sum(line.startswith("step ") for line in stream.getvalue().splitlines()) == 1


@pytest.mark.parametrize(("epochs", "seconds_a_step"), [(1, 2.0), (2, 20.0), (10, 0.05), (10, 3.0), (20, 1.0)])
def test_a_thousand_steps_are_under_two_hundred_lines(make_events: MakeEvents, epochs: int, seconds_a_step: float) -> None:
    """A log of a night can be read in the morning: all of it, from the start to the commands at the end."""
    stream, clock = Stream(), Clock()
    with PlainView(stream, clock) as view:
        for event in make_events(epochs, 1000 // epochs):
            clock.now += seconds_a_step if isinstance(event, StepDone) else 0
            view.handle(event)
    lines = stream.getvalue().splitlines()
    assert 30 < len(lines) < 200
    assert lines[-1].startswith("next ")
    assert not set(stream.getvalue()) & {"\r", "\x1b"}


def test_every_line_is_flushed_and_has_no_carriage_return_or_escape(make_events: MakeEvents) -> None:
    """After each event nothing is held back, and a log file stays text."""
    stream = Stream()
    view = PlainView(stream, Clock())
    for event in make_events(2, 4):
        view.handle(event)
        assert stream.flushed == stream.getvalue()
    assert not set(stream.getvalue()) & {"\r", "\x1b"}


def test_step_line_is_key_value(make_events: MakeEvents) -> None:
    """Each word after the label is key=value, as shlex reads it."""
    stream = Stream()
    view = PlainView(stream, Clock())
    for event in make_events(1, 40):
        view.handle(event)
    line = next(line for line in stream.getvalue().splitlines() if line.startswith("step "))
    pairs = dict(word.split("=", 1) for word in shlex.split(line)[1:])
    assert pairs["epoch"] == "1/1"
    assert pairs["step"] == "1/40"
    assert pairs["memory"] == "20.4GiB"
    assert pairs["images_per_s"] == "6.8"
    assert pairs["data_wait"] == "4%"
    assert pairs["epoch_left"] == "1m32s"


def test_lasting_lines_tell_the_run(make_events: MakeEvents) -> None:
    """Start, settings with reasons, ladder as an aligned table, plan, epochs, end, commands."""
    stream = Stream()
    with PlainView(stream, Clock()) as view:
        for event in make_events(2, 4):
            view.handle(event)
    lines = stream.getvalue().splitlines()
    text = stream.getvalue()
    assert lines[0].startswith("run name=lesions[03] model=convnextv2_base image_size=2048x2048")
    assert 'auto memory.precision=bf16 reason="the device has it"' in lines
    assert "warning: data/train: 3 files are rotated by EXIF; they are turned [as everywhere]" in lines
    head = next(index for index, line in enumerate(lines) if line.endswith("verdict"))
    assert lines[head + 1].index("too large") == lines[head].index("verdict") == lines[head + 5].index("chosen")
    assert text.count("verdict\n") == 1
    assert "epoch 2/2  val macro_f1 0.703 (new best)" in text
    assert "predicted 2.5% above measured" in text
    assert lines[-1] == "next    hiresvis report 'runs/lesions[03]'"


def test_files_passed_over_are_counted_on_the_last_screen(make_events: MakeEvents) -> None:
    """By extension, beside those that could not be read."""
    stream = Stream()
    with PlainView(stream, Clock()) as view:
        for event in make_events(1, 2):
            view.handle(replace(event, passed_over={".txt": 1, ".gif": 2}) if isinstance(event, RunFinished) else event)
    assert "\n        passed over by extension: 2 .gif, 1 .txt\n" in stream.getvalue()


def test_probe_is_told_when_it_has_run(make_events: MakeEvents) -> None:
    """A measured rung has a line at once, before the table."""
    stream = Stream()
    view = PlainView(stream, Clock())
    for event in make_events(1, 3):
        if event.kind == "plan_chosen":
            break
        view.handle(event)
    assert stream.getvalue().splitlines()[-1].startswith('probe spacing="stage0 1 · stage1 2 · rest stored" micro_batch=2')


def test_ladder_is_shown_when_no_plan_came(make_events: MakeEvents) -> None:
    """When nothing fits, the table is what explains it."""
    stream = Stream()
    with PlainView(stream, Clock()) as view:
        for event in make_events(1, 3):
            if event.kind == "plan_chosen":
                break
            view.handle(event)
    assert "too large: one image needs 25.3 GiB" in stream.getvalue()


def test_other_encodings_are_survived(make_events: MakeEvents) -> None:
    """A log in ASCII gets ASCII lines."""
    raw = io.BytesIO()
    with PlainView(io.TextIOWrapper(raw, encoding="ascii", write_through=True), Clock()) as view:
        for event in [*make_events(2, 4), Notice(level="warning", text="画像/é.png: torn\x1b[2J")]:
            view.handle(event)
    assert view.failure is None
    assert raw.getvalue().endswith(b"warning: \\u753b\\u50cf/\\xe9.png: torn [2J\n")
    assert b"stage0 1 | stage1 2" in raw.getvalue()


def test_json_lines_are_the_events(make_events: MakeEvents) -> None:
    """Each line read back gives the event that was shown; a number that is not finite is null."""
    stream = Stream()
    view = JsonView(stream)
    events = make_events(2, 4)
    for event in events:
        view.handle(event)
        assert stream.flushed == stream.getvalue()
    lines = stream.getvalue().splitlines()
    assert [from_json(json.loads(line)) for line in lines] == events
    view.handle(replace(step(1, 2), loss=math.nan))
    assert json.loads(stream.getvalue().splitlines()[-1])["loss"] is None
    assert stream.getvalue().isascii()


@pytest.mark.parametrize("view_of", [lambda stream: PlainView(stream, Clock()), JsonView])
def test_closed_stream_never_stops_the_run(
    view_of: Callable[[io.StringIO], PlainView | JsonView], make_events: MakeEvents, caplog: pytest.LogCaptureFixture
) -> None:
    """A view that cannot write says so once and is silent from then on."""
    stream = Stream()
    stream.close()
    with view_of(stream) as view:
        for event in make_events(1, 3):
            view.handle(event)
    assert isinstance(view.failure, ValueError)
    assert caplog.text.count("goes on without it") == 1
