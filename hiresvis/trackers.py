"""TensorBoard, Weights & Biases and MLflow: where a run's numbers go besides its own folder, when `log.to` names them.

None of them may cost a run anything: what a tracker raises is told once, and the run goes on without it. The run folder stays the truth;
a tracker gets plain numbers by the optimizer step: loss, learning rate, gradient norm, speed and memory in training, and the metrics of
each evaluation. Each keeps its own settings (WANDB_MODE, MLFLOW_TRACKING_URI and so on).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from hiresvis.errors import EnvironmentFailed
from hiresvis.run.events import EpochDone, Evaluated, Event, Notice, StepDone

_MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


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
        run_dir: where TensorBoard's files and the trackers' names come from.
        config: dotted keys of the recipe to plain values.

    Raises:
        EnvironmentFailed: a tracker is not installed: told before training, not an hour later.
    """

    def __init__(self, names: Sequence[str], run_dir: Path, config: Mapping[str, Any]) -> None:
        self._names = tuple(name for name in names if name in _MODULES)
        self._run_dir, self._config = run_dir, config
        self._open: dict[str, Tracker] = {}
        self._num_steps = 0
        missing = [name for name in self._names if not _is_there(name)]
        if missing:
            raise EnvironmentFailed(
                f"log.to names {', '.join(missing)}, which cannot be imported; pip install 'hiresvis[loggers]', or leave it out of log.to"
            )

    def start(self) -> Iterator[Notice]:
        """Opens them; one that fails is told."""
        for name in self._names:
            yield from self._tried(name, partial(self._begin, name))

    def record(self, event: Event) -> Iterator[Notice]:
        """Hands an event's numbers on; a tracker that fails is told, and left out from then on."""
        if isinstance(event, StepDone):
            self._num_steps = event.num_steps
        values = _numbers(event)
        if not values:
            return
        step = _step_of(event, self._num_steps)
        for name, tracker in list(self._open.items()):
            yield from self._tried(name, partial(tracker.log, values, step))

    def close(self) -> Iterator[Notice]:
        """Closes them."""
        for name, tracker in list(self._open.items()):
            yield from self._tried(name, tracker.close)
        self._open = {}

    def _begin(self, name: str) -> None:
        self._open[name] = _OPEN[name](self._run_dir, self._config)

    def _tried(self, name: str, do: Callable[[], object]) -> Iterator[Notice]:
        try:
            do()
        except Exception as error:  # another program's fault, of whatever kind, is no reason to lose a run
            self._open.pop(name, None)
            text = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            yield Notice(level="warning", text=f"{name} failed ({text}); training goes on without it, the run folder has everything")


def _is_there(name: str) -> bool:
    try:
        import_module(_MODULES[name])
    except ImportError:
        return False
    return True


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


def _step_of(event: Event, num_steps: int) -> int:
    """Optimizer steps done in the whole run at the event."""
    epoch = int(getattr(event, "epoch", 0))
    return (epoch - 1) * num_steps + event.step if isinstance(event, StepDone) else epoch * num_steps


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

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

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
    """A name that a resumed run has again, and no other."""
    return hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:16]


_OPEN: Mapping[str, Callable[[Path, Mapping[str, Any]], Tracker]] = {"tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _MLflow}
