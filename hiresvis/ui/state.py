"""What a run looks like now, worked out of its events: the numbers that every view and the report show.

`RunState` is frozen and `advance` is pure, so a reader in another thread always sees a whole state, and replaying
`events.jsonl` gives the same numbers as watching the run. Memory is bounded: curves are thinned as they grow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from hiresvis.run.events import (
    AutoResolved,
    EpochDone,
    EpochStarted,
    Evaluated,
    EvaluationStep,
    Event,
    LadderRow,
    Notice,
    PlanChosen,
    RunFinished,
    RunInterrupted,
    RunStarted,
    SnapshotSaved,
    StepDone,
)

Phase = Literal["start", "find", "train", "evaluate", "finished", "interrupted"]

SMOOTHING = 0.95  # weight of the past in the smoothed loss: about the last 20 steps
WINDOW_STEPS = 32  # speed and data wait are means over this many steps
FORWARD_SHARE = 0.35  # an evaluated image costs about a third of a trained one; only used until one evaluation was timed


@dataclass(frozen=True, slots=True)
class Series:
    """A curve of at most `limit` points: when full, neighbours are averaged and each point stands for twice as many values."""

    limit: ClassVar[int] = 512
    points: tuple[tuple[float, float], ...] = ()
    stride: int = 1
    open_x: float = 0.0  # sums of the last, not yet full point
    open_y: float = 0.0
    open_count: int = 0

    def add(self, x: float, y: float) -> Series:
        """The curve with one more value; a value that is not finite is left out."""
        if not math.isfinite(y):
            return self
        open_x, open_y, count = self.open_x + x, self.open_y + y, self.open_count + 1
        if count < self.stride:
            return replace(self, open_x=open_x, open_y=open_y, open_count=count)
        points, stride = (*self.points, (open_x / count, open_y / count)), self.stride
        if len(points) >= self.limit:
            points = tuple(((a[0] + b[0]) / 2, (a[1] + b[1]) / 2) for a, b in zip(points[::2], points[1::2], strict=True))
            stride *= 2
        return Series(points, stride)

    def before(self, x: float) -> Series:
        """The curve without what lies after `x` (a resumed run repeats those steps)."""
        kept = self.all_points
        if not kept or kept[-1][0] <= x:
            return self
        return Series(tuple(point for point in kept if point[0] <= x), self.stride)

    @property
    def all_points(self) -> tuple[tuple[float, float], ...]:
        """The points (x, y) in order, the last one a mean of what came so far."""
        if not self.open_count:
            return self.points
        return (*self.points, (self.open_x / self.open_count, self.open_y / self.open_count))

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(y for _, y in self.all_points)


@dataclass(frozen=True, slots=True)
class EpochSummary:
    """What is known of one epoch; a value is None until its event came."""

    epoch: int
    train_loss: float | None = None
    lr: float | None = None
    seconds: float | None = None
    images_per_second: float | None = None
    val_loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metric: str = ""
    value: float | None = None


@dataclass(frozen=True, slots=True)
class RunState:
    """The run after the events so far. `time` is that of the last event (seconds since the epoch)."""

    time: float = 0.0
    started: RunStarted | None = None
    resolved: tuple[AutoResolved, ...] = ()
    notices: tuple[Notice, ...] = ()
    ladder: tuple[LadderRow, ...] = ()  # by rung
    finding: bool = False  # rows have come, and the plan they lead to has not
    plans: tuple[PlanChosen, ...] = ()
    epoch: EpochStarted | None = None
    step: StepDone | None = None
    evaluation: EvaluationStep | None = None
    val: Evaluated | None = None
    test: Evaluated | None = None
    snapshot: SnapshotSaved | None = None
    finished: RunFinished | None = None
    interrupted: RunInterrupted | None = None
    epochs: tuple[EpochSummary, ...] = ()
    recent: tuple[StepDone, ...] = ()
    losses: Series = Series()  # x: epochs done, y: loss of the step
    smooth_losses: Series = Series()
    rates: Series = Series()  # learning rate
    smooth_sum: float = 0.0
    smooth_weight: float = 0.0
    epoch_loss_sum: float = 0.0  # over images of this epoch
    epoch_images: int = 0
    pauses: tuple[float, ...] = ()  # seconds between an epoch's last step and the next epoch's start

    @property
    def phase(self) -> Phase:
        if self.finished:
            return "finished"
        if self.interrupted:
            return "interrupted"
        if self.evaluation:
            return "evaluate"
        if self.epoch or self.step:
            return "train"
        return "find" if self.finding else "start"

    @property
    def plan(self) -> PlanChosen | None:
        return self.plans[-1] if self.plans else None

    @property
    def num_epochs(self) -> int:
        return self.started.epochs if self.started else 0

    @property
    def epoch_number(self) -> int:
        return self.epoch.epoch if self.epoch else 0

    @property
    def num_steps(self) -> int:
        """Optimizer steps in the running epoch."""
        return self.epoch.num_steps if self.epoch else 0

    @property
    def steps_done(self) -> int:
        """Optimizer steps of the running epoch that are done."""
        if self.epoch is None:
            return 0
        if self.step is not None and self.step.epoch == self.epoch.epoch:
            return self.step.step
        return self.epoch.first_step - 1

    @property
    def smooth_loss(self) -> float | None:
        """Exponential mean of the loss, without the bias towards its start."""
        return self.smooth_sum / self.smooth_weight if self.smooth_weight else None

    @property
    def epoch_loss(self) -> float | None:
        """Mean training loss over the images of the running epoch so far; None where a part of it ran before a resumption."""
        whole = self.epoch is not None and self.epoch.first_step == 1 and self.epoch_images > 0
        return self.epoch_loss_sum / self.epoch_images if whole else None

    @property
    def step_seconds(self) -> float | None:
        """Mean wall time of a recent step, data wait included."""
        return sum(step.step_ms for step in self.recent) / len(self.recent) / 1000 if self.recent else None

    @property
    def images_per_second(self) -> float | None:
        spent_ms = sum(step.step_ms for step in self.recent)
        return 1000 * sum(step.num_images for step in self.recent) / spent_ms if spent_ms > 0 else None

    @property
    def data_wait_share(self) -> float | None:
        """Share of the recent steps' time that was spent waiting for data, 0 to 1."""
        spent_ms = sum(step.step_ms for step in self.recent)
        return min(1.0, sum(step.data_wait_ms for step in self.recent) / spent_ms) if spent_ms > 0 else None

    @property
    def pause_seconds(self) -> float:
        """Evaluation and saving after an epoch: timed once an epoch has passed, estimated before."""
        if self.pauses:
            return sum(self.pauses) / len(self.pauses)
        if self.started is None or not self.images_per_second:
            return 0.0
        return FORWARD_SHARE * self.started.num_val / self.images_per_second

    @property
    def epoch_seconds_left(self) -> float | None:
        """Of the running epoch's steps, without its evaluation; None before the first step."""
        return None if self.step_seconds is None else max(0, self.num_steps - self.steps_done) * self.step_seconds

    @property
    def run_seconds_left(self) -> float | None:
        """If no epoch is cut by early stopping; None before the first step."""
        if self.step_seconds is None or self.epoch_seconds_left is None:
            return None
        pause = self.pause_seconds
        if self.evaluation and self.evaluation.num_steps:
            pause *= 1 - min(1.0, self.evaluation.step / self.evaluation.num_steps)
        whole_epochs = max(0, self.num_epochs - self.epoch_number)
        return self.epoch_seconds_left + pause + whole_epochs * (self.num_steps * self.step_seconds + self.pause_seconds)

    @property
    def best(self) -> tuple[str, float, int] | None:
        """Metric, best value and its epoch; None while no epoch was evaluated."""
        source = self.finished or self.val
        return (source.metric, source.best_value, source.best_epoch) if source and source.best_epoch else None

    @property
    def memory_bytes(self) -> int:
        """In use at most so far; 0 when not measured yet."""
        return self.step.memory_bytes if self.step else 0


def advance(state: RunState, event: Event) -> RunState:
    """The state after one more event. Pure."""
    state = replace(state, time=max(state.time, event.time))
    match event:
        case RunStarted():
            begun = replace(state, started=event, finding=False, finished=None, interrupted=None)
            return replace(begun, epoch=None, step=None, evaluation=None, recent=())
        case AutoResolved():
            others = tuple(entry for entry in state.resolved if entry.key != event.key)
            return replace(state, resolved=(*others, event))
        case Notice():
            return replace(state, notices=(*state.notices, event))
        case LadderRow():
            begins = event.rung == 0 and event.images_per_second is None  # planned again: the old rows are void
            rows = {} if begins else {row.rung: row for row in state.ladder}
            rows[event.rung] = event
            return replace(state, ladder=tuple(rows[rung] for rung in sorted(rows)), finding=True)
        case PlanChosen():
            return replace(state, plans=(*state.plans, event), finding=False)
        case EpochStarted():
            return _after_epoch_start(state, event)
        case StepDone():
            return _after_step(state, event)
        case EvaluationStep():
            return replace(state, evaluation=event)
        case Evaluated():
            return _after_evaluation(state, event)
        case SnapshotSaved():
            return replace(state, snapshot=event)
        case EpochDone():
            return _with_epoch(
                state,
                replace(
                    _summary(state, event.epoch),
                    train_loss=event.train_loss,
                    lr=event.lr,
                    seconds=event.seconds,
                    images_per_second=event.images_per_second,
                ),
            )
        case RunFinished():
            return replace(state, finished=event, evaluation=None)
        case RunInterrupted():
            return replace(state, interrupted=event, evaluation=None)
    return state


def replay(events: Iterable[Event]) -> RunState:
    """The state after all events."""
    state = RunState()
    for event in events:
        state = advance(state, event)
    return state


def _after_epoch_start(state: RunState, event: EpochStarted) -> RunState:
    # The step is forgotten at a run's start, so the hours between an interrupted run and its resumption are no pause.
    pauses = state.pauses
    if state.step is not None and state.step.time > 0 and event.time >= state.step.time:
        pauses = (*pauses[-7:], event.time - state.step.time)
    begin = event.epoch - 1 + (event.first_step - 1) / max(1, event.num_steps)
    return replace(
        state,
        epoch=event,
        evaluation=None,
        pauses=pauses,
        losses=state.losses.before(begin),
        smooth_losses=state.smooth_losses.before(begin),
        rates=state.rates.before(begin),
        epochs=tuple(summary for summary in state.epochs if summary.epoch < event.epoch),
        epoch_loss_sum=0.0,
        epoch_images=0,
    )


def _after_step(state: RunState, event: StepDone) -> RunState:
    epoch = state.epoch
    if epoch is None or epoch.epoch != event.epoch:  # joined in the middle: `show` of a run that goes on
        epoch = EpochStarted(time=event.time, epoch=event.epoch, num_steps=event.num_steps)
    place = event.epoch - 1 + event.step / max(1, event.num_steps)
    smooth_sum, smooth_weight = state.smooth_sum, state.smooth_weight
    loss_sum, images = state.epoch_loss_sum, state.epoch_images
    if math.isfinite(event.loss):
        smooth_sum = SMOOTHING * smooth_sum + (1 - SMOOTHING) * event.loss
        smooth_weight = SMOOTHING * smooth_weight + (1 - SMOOTHING)
        loss_sum, images = loss_sum + event.loss * event.num_images, images + event.num_images
    return replace(
        state,
        epoch=epoch,
        step=event,
        evaluation=None,
        recent=(*state.recent[-(WINDOW_STEPS - 1) :], event),
        losses=state.losses.add(place, event.loss),
        smooth_losses=state.smooth_losses.add(place, smooth_sum / smooth_weight if smooth_weight else math.nan),
        rates=state.rates.add(place, event.lr),
        smooth_sum=smooth_sum,
        smooth_weight=smooth_weight,
        epoch_loss_sum=loss_sum,
        epoch_images=images,
    )


def _after_evaluation(state: RunState, event: Evaluated) -> RunState:
    state = replace(state, evaluation=None)
    if event.split == "test":
        return replace(state, test=event)
    summary = replace(
        _summary(state, event.epoch),
        val_loss=event.loss,
        metrics=dict(event.metrics),
        metric=event.metric,
        value=event.value,
    )
    test = None if event.is_best else state.test  # of the best weights, which were others
    return _with_epoch(replace(state, val=event, test=test), summary)


def _summary(state: RunState, epoch: int) -> EpochSummary:
    return next((summary for summary in state.epochs if summary.epoch == epoch), EpochSummary(epoch))


def _with_epoch(state: RunState, summary: EpochSummary) -> RunState:
    epochs = {old.epoch: old for old in state.epochs} | {summary.epoch: summary}
    return replace(state, epochs=tuple(epochs[number] for number in sorted(epochs)))
