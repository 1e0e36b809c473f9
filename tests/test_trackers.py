"""TensorBoard, wandb and MLflow: numbers arrive, and whatever goes wrong there costs the run nothing."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hiresvis import trackers as trackers_module
from hiresvis.errors import EnvironmentFailed
from hiresvis.run.events import EpochStarted, Evaluated, Notice, StepDone
from hiresvis.trackers import Trackers


def _step(epoch: int, step: int, loss: float) -> StepDone:
    numbers = {"lr": 0.1, "grad_norm": 1.0, "num_images": 4, "step_ms": 5.0, "data_wait_ms": 0.1, "memory_bytes": 7}
    return StepDone(epoch=epoch, step=step, num_steps=3, loss=loss, **numbers)


EVALUATED = Evaluated(
    epoch=2, split="val", loss=0.5, metrics={"accuracy": 0.75}, metric="accuracy", value=0.75, is_best=True, best_value=0.75, best_epoch=2
)
TESTED = replace(EVALUATED, split="test", epoch=1)  # the best epoch, which need not be the last
EVENTS = (EpochStarted(epoch=1, num_steps=3), _step(1, 1, 3.0), _step(2, 3, 2.0), EVALUATED, TESTED)


def _run(trackers: Trackers) -> list[Notice]:
    return [*trackers.start({"optim.lr": 0.1}), *(notice for event in EVENTS for notice in trackers.record(event)), *trackers.close()]


def test_tensorboard_holds_the_numbers_by_optimizer_step(tmp_path: Path):
    """Training by the run's step, evaluation at its epoch's end; read back by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert _run(Trackers(["csv", "tensorboard"], tmp_path)) == []
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(1, 3.0), (6, 2.0)]
    for split in ("val", "test"):
        assert [(event.step, event.value) for event in found.Scalars(f"{split}/accuracy")] == [(6, 0.75)]


@pytest.mark.filterwarnings("ignore")  # theirs, of their own libraries
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_others_take_the_numbers_where_they_are_installed(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    """Their own offline modes; a resumed run goes on with the same entry."""
    pytest.importorskip(name, reason="not installed here; pip install 'hiresvis[loggers]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/tracked.db")
    for _ in range(2):
        assert _run(Trackers([name], tmp_path / "run")) == []
    if name == "mlflow":
        import mlflow

        client = mlflow.MlflowClient()
        (run,) = client.search_runs([client.get_experiment_by_name("hiresvis").experiment_id])
        assert run.data.metrics["val/accuracy"] == 0.75
        assert run.data.params["optim.lr"] == "0.1"


def test_missing_tracker_is_refused_before_training_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Named, with what to install."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(EnvironmentFailed, match=r"log\.to names wandb \(.*\), which cannot be imported; pip install 'hiresvis\[loggers\]'"):
        Trackers(["jsonl", "wandb"], tmp_path)


@pytest.mark.parametrize("when", ["open", "log", "close"])
def test_tracker_that_fails_is_told_once_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str):
    """Whenever it fails, and whatever it raises; the others get everything."""
    got = []

    class Failing:
        def __init__(self, run_dir, config):
            if when == "open":
                raise KeyError("no key")

        def log(self, values, step):
            if when == "log":
                raise RuntimeError("the server is gone\nand a long trace")

        def close(self):
            if when == "close":
                raise OSError("no space left")

    class Working:
        def __init__(self, run_dir, config):
            pass

        def log(self, values, step):
            got.append(step)

        def close(self):
            got.append("closed")

    monkeypatch.setattr(trackers_module, "_OPEN", {"tensorboard": Failing, "wandb": Working})
    monkeypatch.setattr(trackers_module, "_missing", lambda name: "")
    (notice,) = _run(Trackers(["tensorboard", "wandb"], tmp_path))
    assert notice.level == "warning"
    assert notice.text.startswith("tensorboard failed (")
    assert "\n" not in notice.text
    assert got == [1, 6, 6, 6, "closed"]
