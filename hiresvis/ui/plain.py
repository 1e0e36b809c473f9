"""Lines for logs, pipes and CI: no carriage return, no colour, no cursor; each line flushed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TextIO

from hiresvis.run.events import (
    AutoResolved,
    Evaluated,
    Event,
    LadderRow,
    Notice,
    PlanChosen,
    RunFinished,
    RunInterrupted,
    RunStarted,
    StepDone,
    to_json,
)
from hiresvis.run.files import json_text
from hiresvis.ui.state import RunState, advance
from hiresvis.ui.text import (
    evaluated_text,
    final_lines,
    glyphs_for,
    image_size_text,
    interrupted_lines,
    ladder_cells,
    ladder_table,
    next_commands,
    number,
    percent,
    plan_peak_text,
    plan_text,
    seconds_text,
    speed,
)
from hiresvis.ui.view import View
from hiresvis.units import format_duration, format_size

MIN_SECONDS = 30.0  # between two step lines
MIN_EPOCH_SHARE = 0.05


class PlainView(View):
    """The first step, then a `key=value` line every max(30 s, 5% of the epoch); everything lasting as a line of its own."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._glyphs = glyphs_for(getattr(stream, "encoding", None))
        self._state = RunState()
        self._line_time = -math.inf
        self._line_place = -math.inf  # in epochs
        self._told: StepDone | None = None  # the last step that has a line

    def _show(self, event: Event) -> None:
        was_finding, self._state = self._state.finding, advance(self._state, event)
        state = self._state
        match event:
            case RunStarted():
                self._started(event)
            case AutoResolved():
                self._line(f"auto {event.key}={_value(event.value)} reason={_value(event.reason)}")
            case Notice():
                for text in event.text.splitlines():
                    self._line(f"{event.level}: {text}")
            case LadderRow():
                self._ladder_row(event)
            case PlanChosen():
                if was_finding:
                    self._ladder()
                self._plan(event)
            case StepDone():
                self._step(event)
            case Evaluated():
                number_text = f"{event.epoch}/{state.num_epochs}" if state.num_epochs else str(event.epoch)
                train_loss = state.epoch_loss if event.split == "val" else None
                self._line(f"epoch {number_text}  {evaluated_text(event, train_loss)}")
            case RunFinished():
                for label, text in final_lines(state, event):
                    self._line(f"{label:<8}{text}")
                self._commands(next_commands(state.started.run_dir, state.started.task) if state.started else ())
            case RunInterrupted():
                for label, text in interrupted_lines(state, event):
                    self._line(f"{label:<8}{text}")
                self._commands((event.resume_command,))

    def _stay(self) -> None:
        step = self._state.step
        if step is not None and step is not self._told and self._state.phase in ("train", "evaluate"):
            self._tell_step(step)

    def _close(self, *, stopped: bool) -> None:
        if self._state.finding:
            self._ladder()

    def _started(self, event: RunStarted) -> None:
        pairs = {
            "name": event.run_name,
            "model": event.model,
            "image_size": image_size_text(event.image_size),
            "task": event.task,
            "targets" if event.task == "regress" else "classes": len(event.classes),
            "train_images": event.num_train,
            "val_images": event.num_val,
            "epochs": event.epochs,
            "batch": event.batch or "auto",
            "device": event.device,
            "budget": _size(event.budget_bytes),
            "capacity": _size(event.capacity_bytes),
            "dir": event.run_dir,
        }
        if event.resumed_from_epoch is not None:
            pairs["resumed_from_epoch"] = event.resumed_from_epoch
        self._pairs("run", pairs)

    def _ladder_row(self, event: LadderRow) -> None:
        # The whole table comes with the plan; a probe takes long enough to be told at once.
        if event.measured_peak_bytes is not None or event.verdict.startswith("out of memory"):
            cells = ladder_cells(event, self._glyphs)
            self._line(f"probe spacing={_value(cells[1])} micro_batch={cells[2]} predicted={_value(cells[3].replace(' ', ''))} "
                       f"measured={_value(cells[4].replace(' ', ''))} verdict={_value(cells[7])}")  # fmt: skip

    def _ladder(self) -> None:
        for line in ladder_table(self._state.ladder, self._glyphs):
            self._line(line)

    def _plan(self, event: PlanChosen) -> None:
        batch, stages = plan_text(event, self._glyphs.dot)
        self._line(f"plan: {batch}; {stages}; {event.precision}")
        self._line(f"plan: {plan_peak_text(event)}")
        if event.why:
            self._line(f"plan: {event.why}")

    def _step(self, event: StepDone) -> None:
        now, place = self._clock(), event.epoch - 1 + event.step / max(1, event.num_steps)
        if now - self._line_time < MIN_SECONDS or place - self._line_place < MIN_EPOCH_SHARE - 1e-9:
            return
        self._line_time, self._line_place = now, place
        self._tell_step(event)

    def _tell_step(self, event: StepDone) -> None:
        self._told, state = event, self._state
        pairs = {
            "epoch": f"{event.epoch}/{state.num_epochs}" if state.num_epochs else event.epoch,
            "step": f"{event.step}/{event.num_steps}",
            "loss": number(event.loss, 4),
            "smooth_loss": number(state.smooth_loss, 4),
            "lr": f"{event.lr:.2e}",
            "grad_norm": f"{event.grad_norm:.3g}",
            "images_per_s": speed(state.images_per_second),
            "step_time": seconds_text(state.step_seconds),
            "data_wait": percent(state.data_wait_share),
            "memory": _size(event.memory_bytes),
            "skipped": event.num_skipped,
            "non_finite": event.num_non_finite,
            "epoch_left": _duration(state.epoch_seconds_left),
            "run_left": _duration(state.run_seconds_left),
        }
        self._pairs("step", pairs)

    def _commands(self, commands: tuple[str, ...]) -> None:
        for command in commands:
            self._line(f"next    {command}")

    def _pairs(self, label: str, pairs: dict[str, Any]) -> None:
        self._line(" ".join([label, *(f"{key}={_value(str(value))}" for key, value in pairs.items())]))

    def _line(self, text: str) -> None:
        self._stream.write(self._glyphs.clean(text) + "\n")
        self._stream.flush()


class JsonView(View):
    """One event per line, as `hiresvis.run.events.to_json` gives it; a number that is not finite becomes null."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def _show(self, event: Event) -> None:
        # Escaped to ASCII: any stream can carry it, whatever its encoding.
        self._stream.write(json.dumps(json.loads(json_text(to_json(event)))) + "\n")
        self._stream.flush()


def _value(text: str) -> str:
    """A value that a reader of key=value lines takes as one: quoted where it is empty or has spaces or quotes."""
    plain = text and not any(char.isspace() or char in "\"'=" for char in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


def _size(num_bytes: int) -> str:
    return format_size(num_bytes).replace(" ", "")


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)
