"""TensorBoard, Weights & Biases and MLflow: where a run's numbers go besides its own folder, when `log.to` names them.

None of them may cost a run anything: what a tracker raises is told once, and the run goes on without it. The run folder stays the truth;
a tracker gets plain numbers by the optimizer step: loss, learning rate, gradient norm, speed and memory in training, and the metrics of
each evaluation. Each keeps its own settings (WANDB_MODE, MLFLOW_TRACKING_URI and so on).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from hiresvis.errors import EnvironmentFailed, first_line
from hiresvis.run.events import EpochDone, EpochStarted, Evaluated, Event, Notice, StepDone
from hiresvis.run.files import write_text

_AXIS = "optimizer_step"


class Tracker(Protocol):
    """One place that numbers go to."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Numbers at an optimizer step of the run, counted from 1."""

    def close(self) -> None:
        """Sends what is left."""


class Trackers:
    """All trackers of a run.

    Args:
        names: of those that `log.to` may name; others (csv, jsonl) are the run folder's own.
        run_dir: where TensorBoard's files and the trackers' names come from; a name drawn once is kept there (`trackers.json`).

    Raises:
        EnvironmentFailed: a tracker is not installed: told before training, not an hour later.
    """

    def __init__(self, names: Sequence[str], run_dir: Path) -> None:
        self._names = tuple(name for name in names if name in _OPEN)
        self._run_dir = run_dir
        self._open: dict[str, Tracker] = {}
        self._step = 0
        missing = {name: why for name in self._names if (why := _missing(name))}
        if missing:
            named = ", ".join(f"{name} ({why})" for name, why in missing.items())
            raise EnvironmentFailed(
                f"log.to names {named}, which cannot be imported; pip install 'hiresvis[loggers]', or leave it out of log.to"
            )

    def start(self, config: Mapping[str, Any]) -> Iterator[Notice]:
        """Opens them; one that fails is told.

        Args:
            config: dotted keys of the recipe to plain values, autos settled.
        """
        for name in self._names:
            yield from self._tried(name, partial(self._begin, name, config))

    def record(self, event: Event) -> Iterator[Notice]:
        """Hands an event's numbers on; a tracker that fails is told, and left out from then on."""
        if isinstance(event, EpochStarted):
            self._step = (event.epoch - 1) * event.num_steps + event.first_step - 1
        elif isinstance(event, StepDone):
            self._step = (event.epoch - 1) * event.num_steps + event.step
        values = _numbers(event)
        if not values:
            return
        for name, tracker in list(self._open.items()):
            yield from self._tried(name, partial(tracker.log, values, self._step))

    def close(self) -> Iterator[Notice]:
        """Closes them."""
        for name, tracker in list(self._open.items()):
            yield from self._tried(name, tracker.close)
        self._open = {}

    def _begin(self, name: str, config: Mapping[str, Any]) -> None:
        self._open[name] = _OPEN[name](self._run_dir, config)

    def _tried(self, name: str, do: Callable[[], object]) -> Iterator[Notice]:
        try:
            do()
        except Exception as error:  # another program's fault, of whatever kind, is no reason to lose a run
            self._open.pop(name, None)
            yield Notice(
                level="warning", text=f"{name} failed ({first_line(error)}); training goes on without it, the run folder has everything"
            )


def _missing(name: str) -> str:
    """Why a tracker cannot be imported; empty where it can. A broken one raises whatever it likes."""
    try:
        import_module(name)
    except Exception as error:
        return first_line(error)
    return ""


def _numbers(event: Event) -> dict[str, float]:
    match event:
        case StepDone():
            values = {"loss": event.loss, "lr": event.lr, "grad_norm": event.grad_norm, "step_ms": event.step_ms}
            return {f"train/{name}": float(value) for name, value in {**values, "memory_bytes": event.memory_bytes}.items()}
        case EpochDone():
            return {"train/epoch_loss": event.train_loss, "train/images_per_second": event.images_per_second}
        case Evaluated():
            return {f"{event.split}/{name}": float(value) for name, value in {"loss": event.loss, **event.metrics}.items()}
    return {}


class _TensorBoard:
    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))
        self._writer.add_text("recipe", "\n".join(f"    {key}: {value}" for key, value in config.items()))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project="hiresvis", name=run_dir.name, id=_id_of(run_dir), resume="allow", dir=str(run_dir), config=dict(config)
        )
        # An axis of our own: wandb drops what comes at an earlier step than the last, as after a rollback or a resume.
        self._run.define_metric("*", step_metric=_AXIS)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, _AXIS: step})

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        import mlflow

        self._client = mlflow.MlflowClient()
        experiment = self._client.get_experiment_by_name("hiresvis")
        number = experiment.experiment_id if experiment else self._client.create_experiment("hiresvis")
        found = self._client.search_runs([number], filter_string=f"tags.hiresvis_run = '{_id_of(run_dir)}'", max_results=1)
        self._run = found[0] if found else self._client.create_run(number, run_name=run_dir.name, tags={"hiresvis_run": _id_of(run_dir)})
        if not found:
            for key, value in config.items():
                self._client.log_param(self._run.info.run_id, key, str(value)[:500])

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run.info.run_id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run.info.run_id)


def _id_of(run_dir: Path) -> str:
    """A name drawn when the run began and kept in its folder, so that a resumed run has it again, and no other run."""
    path = run_dir / "trackers.json"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError, TypeError):
        drawn = uuid.uuid4().hex[:16]
        write_text(path, json.dumps({"id": drawn}))
        return drawn


_OPEN: Mapping[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {"tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _MLflow}
