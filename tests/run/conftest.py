"""Runs as short event streams."""

from __future__ import annotations

import pytest

from hiresvis.run.events import EpochDone, EpochStarted, Evaluated, Event, Notice, RunFinished, RunStarted, StepDone


@pytest.fixture
def epoch_events():
    """The events of one epoch, as the trainer orders them."""

    def events(epoch: int, loss: float = 0.5, accuracy: float = 0.9) -> list[Event]:
        return [
            EpochStarted(time=1000.0 + epoch, epoch=epoch, num_steps=1),
            StepDone(
                time=1001.0,
                epoch=epoch,
                step=1,
                num_steps=1,
                loss=loss,
                lr=1e-4,
                grad_norm=1.0,
                num_images=8,
                step_ms=10.0,
                data_wait_ms=1.0,
                memory_bytes=2**20,
            ),
            Evaluated(
                time=1002.0,
                epoch=epoch,
                split="val",
                loss=loss + 0.1,
                metrics={"accuracy": accuracy, "macro_f1": 0.8},
                metric="accuracy",
                value=accuracy,
                is_best=True,
                best_value=accuracy,
                best_epoch=epoch,
            ),
            EpochDone(time=1003.0, epoch=epoch, train_loss=loss, lr=1e-4, seconds=2.5, images_per_second=3.2),
        ]

    return events


@pytest.fixture
def started() -> Event:
    return RunStarted(
        time=1000.0,
        run_name="boards",
        run_dir="runs/boards",
        model="resnet18",
        image_size=(720, 1280),
        task="classify",
        classes=("good", "bad"),
        num_train=80,
        num_val=20,
        epochs=2,
        batch=8,
        device="cpu",
        budget_bytes=2**30,
        capacity_bytes=2**31,
    )


@pytest.fixture
def finished() -> Event:
    return RunFinished(
        time=2000.0,
        reason="completed",
        epochs=2,
        metric="accuracy",
        best_value=0.9,
        best_epoch=2,
        test_metrics={"accuracy": 0.88},
        predicted_peak_bytes=2**30,
        measured_peak_bytes=2**30,
        seconds=90.0,
    )


@pytest.fixture
def notice() -> Event:
    return Notice(time=1000.5, level="warning", text="skipped a.jpg: truncated")
