"""The training loop on image files, through the real loader."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest
import torch
from PIL import Image

from hiresvis.data.augment import make_augment
from hiresvis.data.contract import Contract, make_prepare
from hiresvis.data.loader import EvalLoader, TrainLoader
from hiresvis.data.sources import Sample
from hiresvis.data.transforms import Pipeline, Preprocess, Scale
from hiresvis.errors import Interrupted
from hiresvis.run.events import Notice, StepDone
from hiresvis.train.progress import RunLimits
from hiresvis.train.snapshot import load_snapshot
from hiresvis.train.step import StepOutcome

SIZE_PX = 64
SLOW_SECONDS = 0.05


@pytest.fixture
def samples(tmp_path) -> list[Sample]:
    """22 PNG files of three classes; one of them is no image."""
    generator = np.random.default_rng(0)
    found = []
    for number in range(22):
        path = tmp_path / f"{number}.png"
        Image.fromarray(generator.integers(0, 255, (80, 70, 3), dtype=np.uint8)).save(path)
        found.append(Sample(path, number % 3, str(path)))
    found[4].path.write_bytes(b"no image")
    return found


def _make_trainer(small, samples, folder, *, workers: int):
    contract = Contract(
        classes=("a", "b", "c"), image_size=(SIZE_PX, SIZE_PX), fit="resize", background=(255, 255, 255), channels=3, scale=Scale(),
        mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bilinear", max_pixels=10_000,
    )  # fmt: skip
    pipeline = Pipeline(contract.preprocess(), make_augment("heavy", image_size=contract.image_size))
    options = {"max_pixels": contract.max_pixels, "workers": workers}
    train = TrainLoader(samples, pipeline, batch=8, micro_batch=3, seed=1, bad_images="skip", **options)
    step = small.make_step("test_resnet")
    step.prepare = make_prepare(contract, torch.device("cpu"), False)
    val = EvalLoader(samples[5:12], contract.preprocess(), batch=3, **options)
    return small.make_trainer(folder, step=step, train_loader=train, val_loader=val), train


def test_resume_in_mid_epoch_with_workers_and_augmentation_is_exact(small, samples, tmp_path):
    """A run stopped in its first epoch with a worker process, resumed without one, ends with the bits of an undisturbed run."""
    straight, _ = _make_trainer(small, samples, tmp_path / "straight", workers=0)
    events = list(straight.fit())
    assert sum("4.png" in event.text for event in events if isinstance(event, Notice)) == 1
    assert sum(event.num_images for event in events if isinstance(event, StepDone)) == 2 * 21
    stopped, loader = _make_trainer(small, samples, tmp_path / "resumed", workers=1)
    with pytest.raises(Interrupted):  # noqa: PT012 - the loop is the statement
        for event in stopped.fit():
            if isinstance(event, StepDone) and event.step == 2:
                stopped._stop.request(signal.SIGINT)
    loader.close()
    resumed, _ = _make_trainer(small, samples, tmp_path / "resumed", workers=0)
    resumed.restore(load_snapshot(tmp_path / "resumed" / "snapshot"))
    list(resumed.fit())
    expected, got = (load_snapshot(tmp_path / run / "snapshot").tensors for run in ("straight", "resumed"))
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, got[name]), name


class Slow:
    """Augmentation that takes its time, asleep: the cores are free meanwhile."""

    def __call__(self, array: np.ndarray, seed: int) -> np.ndarray:
        time.sleep(SLOW_SECONDS)
        return array


@pytest.mark.parametrize(
    ("workers", "busy_seconds", "least", "most"),
    [(0, 0.0, 1.0, 2.0), (0, 0.1, 1.0, 2.0), (1, 0.0, 0.6, 2.0), (1, 0.1, 0.0, 0.5), (3, 0.0, 0.1, 0.8), (3, 0.1, 0.0, 0.5)],
)
def test_waiting_for_data_is_what_loading_takes_beyond_training(small, samples, tmp_path, workers, busy_seconds, least, most):
    """Without workers all of it, with one all that training does not hide, with three a third: shares of the time that loading takes."""
    pipeline = Pipeline(Preprocess((SIZE_PX, SIZE_PX)), Slow())
    loader = TrainLoader(samples[5:21], pipeline, batch=1, micro_batch=1, seed=1, max_pixels=10_000, workers=workers)
    trainer = small.make_trainer(tmp_path, train_loader=loader, limits=RunLimits(epochs=1))
    trainer._step.accumulate = lambda *_, **__: time.sleep(busy_seconds)
    trainer._step.apply = lambda: StepOutcome(loss=1.0, grad_norm=1.0, applied=True)
    steps = [event for event in trainer.fit() if isinstance(event, StepDone)]
    loader.close()
    steps = steps[6:]  # the first ones wait for workers to start, and then have what those did meanwhile
    waited = sum(event.data_wait_ms for event in steps) / len(steps) / 1e3
    assert least * SLOW_SECONDS <= waited <= most * SLOW_SECONDS
    assert all(event.step_ms >= event.data_wait_ms + busy_seconds * 1e3 for event in steps)
