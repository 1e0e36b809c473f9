"""Where a run's time went, as far as its events tell; and what it was planned to take.

Waiting for data, and the rest of each step, are measured. What of a step is forward, recompute and backward nobody measures: that would
mean to wait for the device between them. By the plan's FLOPs it is told as a prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hiresvis.run.events import AutoResolved, EpochStarted, Evaluated, EvaluationStep, Event, Notice, RunStarted, StepDone
from hiresvis.ui.state import RunState


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of all sessions of a run.

    Attributes:
        prepare: before the first step: check, costs, probe.
        wait: of steps, for data. compute: of steps besides. evaluate: of splits.
        rest: snapshots, workers that start, the end.
        images: that were trained on, as often as they were.
    """

    prepare: float = 0.0
    wait: float = 0.0
    compute: float = 0.0
    evaluate: float = 0.0
    rest: float = 0.0
    images: int = 0

    @property
    def total(self) -> float:
        """All of it: as long as the device was taken."""
        return self.prepare + self.wait + self.compute + self.evaluate + self.rest


def times_of(events: Sequence[Event]) -> Times:
    """The times of a run from its recorded events, hours between two sessions left out."""
    spent = dict.fromkeys(("prepare", "wait", "compute", "evaluate", "rest"), 0.0)
    images = 0
    for session in _sessions([event for event in events if event.time > 0]):
        trains = False
        for before, event in pairwise(session):
            seconds = max(0.0, event.time - before.time)
            trains = trains or isinstance(event, EpochStarted | StepDone)
            if isinstance(event, StepDone):
                step, wait = event.step_ms / 1000, min(event.data_wait_ms, event.step_ms) / 1000
                spent["wait"] += wait
                spent["compute"] += step - wait
                spent["rest"] += max(0.0, seconds - step)
                images += event.num_images
            elif isinstance(event, EvaluationStep | Evaluated):
                spent["evaluate"] += seconds
            else:
                spent["rest" if trains else "prepare"] += seconds
    return Times(**spent, images=images)


def _sessions(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
    """The events of each process. What a process tells before its RunStarted belongs to it: it begins at the longest silence there."""
    begins = [0]
    for index, event in enumerate(events):
        if isinstance(event, RunStarted) and any(isinstance(earlier, RunStarted) for earlier in events[:index]):
            first = index
            while isinstance(events[first - 1], Notice | AutoResolved) and first - 1 > begins[-1]:
                first -= 1
            begins.append(max(range(first, index + 1), key=lambda at: events[at].time - events[at - 1].time))
    for begin, end in pairwise([*begins, len(events)]):
        yield events[begin:end]


def step_shares(plan: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(part, share) of a step's FLOPs: forward, recompute, backward; empty where plan.json does not tell."""
    units = [unit for unit in plan.get("units") or () if isinstance(unit, dict)]
    if not units or not all(isinstance(unit.get(key), int | float) for unit in units for key in ("flops", "runs")):
        return []
    forward, both = sum(unit["flops"] for unit in units), sum(unit["flops"] * unit["runs"] for unit in units)
    again = float(plan.get("recompute_fraction") or 0.0)
    if not both:
        return []
    parts = {"forward": forward / both, "recompute": again, "backward": 1 - forward / both}
    return [(name, share / (1 + again)) for name, share in parts.items()]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run was planned to take and what it took, in hours of its device; money where a price is given.

    Attributes:
        planned_hours: of training alone, by the speed that the probe measured; None: not known.
        trained_hours: steps alone, for comparison. spent_hours: all sessions from start to end.
    """

    planned_hours: float | None
    trained_hours: float
    spent_hours: float
    price_per_hour: float | None

    def money(self, hours: float | None) -> float | None:
        """What so many hours cost; None where that is not known."""
        return None if hours is None or self.price_per_hour is None else hours * self.price_per_hour


def cost_of(state: RunState, times: Times, price_per_hour: float | None = None) -> Cost:
    """The cost of a run; planned is the whole of its epochs, also where it stopped early."""
    chosen = next((row for row in state.ladder if row.verdict.startswith("chosen") and row.images_per_second), None)
    planned = None
    if chosen is not None and chosen.images_per_second and state.started is not None:
        planned = state.started.num_train * state.started.epochs / chosen.images_per_second / 3600
    return Cost(planned, (times.wait + times.compute) / 3600, times.total / 3600, price_per_hour)
