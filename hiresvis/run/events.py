"""What happens in a run, as frozen values: the one stream that the run folder, the live view and the report all read.

Every event is flat enough for one JSON line: `to_json` and `from_json` are inverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events. `time` is seconds since the epoch, set by whoever emits it."""

    kind: ClassVar[str] = ""
    time: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    kind: ClassVar[str] = "run_started"
    run_name: str
    run_dir: str
    model: str
    image_size: tuple[int, int]
    task: str
    classes: tuple[str, ...]  # names of the outputs; to regress, of the targets
    num_train: int
    num_val: int
    epochs: int
    batch: int | None  # None: auto, PlanChosen tells it
    device: str
    budget_bytes: int
    capacity_bytes: int
    others_bytes: int = 0  # what other processes used of the capacity when the run began
    resumed_from_epoch: int | None = None  # whole epochs done before; None: a new run

    @property
    def outputs(self) -> str:
        """What the network says, counted: `3 classes`, `1 target`."""
        one, several = ("target", "targets") if self.task == "regress" else ("class", "classes")
        return f"{len(self.classes)} {one if len(self.classes) == 1 else several}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoResolved(Event):
    """One `auto` became a value, with its reason (printed once, as a lasting line)."""

    kind: ClassVar[str] = "auto_resolved"
    key: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Event):
    """A lasting line for people. level: info | warning | error."""

    kind: ClassVar[str] = "notice"
    level: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderRow(Event):
    """One rung of the ladder table. micro_batch 0: nothing fits at this rung.

    verdict: "" (candidate) | "chosen" | "too large" | "out of memory" | "fits"; free text is allowed after it.
    A row with the same `rung` replaces the earlier one (prediction first, measurement later); rung 0 without images per second begins
    a new table, when planning starts again.
    """

    kind: ClassVar[str] = "ladder_row"
    rung: int
    spacing: str
    micro_batch: int
    predicted_peak_bytes: int
    recompute_fraction: float
    measured_peak_bytes: int | None = None
    images_per_second: float | None = None
    verdict: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChosen(Event):
    """The plan that training uses (again when it changes: `why` says what happened)."""

    kind: ClassVar[str] = "plan_chosen"
    micro_batch: int
    accumulation: int
    batch: int
    precision: str
    stages: tuple[str, ...]  # "stage0 spacing 1", "stage2 spacing 2 on 9 of 27", "rest stored"
    predicted_peak_bytes: int
    measured_peak_bytes: int | None
    budget_bytes: int
    recompute_fraction: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStarted(Event):
    kind: ClassVar[str] = "epoch_started"
    epoch: int  # from 1
    num_steps: int
    first_step: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone(Event):
    """One optimizer step. loss is the batch's mean; memory_bytes is what is in use at most so far."""

    kind: ClassVar[str] = "step_done"
    epoch: int
    step: int  # from 1, within the epoch
    num_steps: int
    loss: float
    lr: float
    grad_norm: float
    num_images: int
    step_ms: float
    data_wait_ms: float
    memory_bytes: int
    num_skipped: int = 0  # unreadable files so far
    num_non_finite: int = 0  # steps skipped so far


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationStep(Event):
    kind: ClassVar[str] = "evaluation_step"
    epoch: int
    step: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Event):
    """Metrics of one split. `metric` is the one that decides which epoch is best."""

    kind: ClassVar[str] = "evaluated"
    epoch: int
    split: str  # val | test
    loss: float
    metrics: Mapping[str, float]
    metric: str
    value: float
    is_best: bool
    best_value: float
    best_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSaved(Event):
    kind: ClassVar[str] = "snapshot_saved"
    epoch: int
    step: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochDone(Event):
    kind: ClassVar[str] = "epoch_done"
    epoch: int
    train_loss: float
    lr: float
    seconds: float
    images_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(Event):
    """The last event of a run that ended by itself. reason: completed | early_stop | max_time. results: by split, as `evaluate --json`."""

    kind: ClassVar[str] = "run_finished"
    reason: str
    epochs: int
    metric: str
    best_value: float
    best_epoch: int
    test_metrics: Mapping[str, float] = field(default_factory=dict)
    results: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    predicted_peak_bytes: int
    measured_peak_bytes: int
    counted_peak_bytes: int | None = None  # every live storage counted (probe)
    predicted_counted_bytes: int | None = None
    num_skipped: int = 0
    passed_over: Mapping[str, int] = field(default_factory=dict)  # extension: files that are no images by name
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInterrupted(Event):
    kind: ClassVar[str] = "run_interrupted"
    signal: str  # SIGINT | SIGTERM | SIGUSR1
    epoch: int
    step: int
    resume_command: str


EVENTS: Mapping[str, type[Event]] = {cls.kind: cls for cls in Event.__subclasses__()}
TYPES: Mapping[str, Mapping[str, str]] = {kind: {item.name: str(item.type) for item in fields(cls)} for kind, cls in EVENTS.items()}


def to_json(event: Event) -> dict[str, Any]:
    """The event as plain JSON values; `event` names its kind."""
    return {"event": event.kind, **asdict(event)}


def from_json(row: Mapping[str, Any]) -> Event:
    """The event that `to_json` wrote.

    Raises:
        ValueError: the row's kind or one of its keys is unknown, or a value is not of its key's type.
    """
    values = dict(row)
    cls = EVENTS.get(values.pop("event", ""))
    if cls is None:
        raise ValueError(f"unknown event {row.get('event')!r}")
    types = TYPES[cls.kind]
    if unknown := set(values) - set(types):
        raise ValueError(f"event {cls.kind}: unknown keys {sorted(unknown)}")
    for key, value in values.items():
        if not is_of(value, types[key]):
            raise ValueError(f"event {cls.kind}: {key} is {value!r}, not {types[key]}")
    arguments: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return cls(**arguments)


def is_of(value: Any, form: str) -> bool:
    """Whether a JSON value can stand for a field of this type. A number fits both kinds of number, and is one that a float can hold."""
    if form.endswith(" | None"):
        return value is None or is_of(value, form.removesuffix(" | None"))
    match form:
        case "str":
            return isinstance(value, str)
        case "bool":
            return isinstance(value, bool)
        case "int" | "float":
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _TOO_LARGE
            return number or (form == "float" and value != value)  # nan
        case "tuple[str, ...]":
            return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        case "tuple[float, ...]":
            return isinstance(value, list | tuple) and all(is_of(item, "float") for item in value)
        case "tuple[int, int]":
            return isinstance(value, list | tuple) and len(value) == 2 and all(is_of(item, "int") for item in value)
        case "Mapping[str, float]" | "Mapping[str, int]":  # null: a number that is not finite
            return isinstance(value, Mapping) and all(item is None or is_of(item, "float") for item in value.values())
        case "Mapping[str, Mapping[str, Any]]":
            return isinstance(value, Mapping) and all(isinstance(item, Mapping) for item in value.values())
    raise AssertionError(f"a field of type {form}: say here which JSON values it takes")


_TOO_LARGE = 1e18  # bytes, seconds or counts that no run has
