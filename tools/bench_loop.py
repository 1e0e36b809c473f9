"""What the trainer costs beside a bare loop: the same steps with every guard and without any.

    python tools/bench_loop.py [--model resnet18] [--px 160] [--batch 8] [--steps 12] [--repeats 5]

The bare loop is forward, backward, clipping and the optimizer. The trainer adds what protects a run: the mark to go back to, per-sample
losses, the look whether loss and gradient are finite, progress, events written to a run folder, and the plain view. Both alternate on the
same images and are timed in CPU seconds of one thread, which other processes disturb little. Evaluation is in neither; snapshots are timed
by themselves, since they come by the clock: what one costs is a share of `train.save_every`.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hiresvis.run import RunDirectory
from hiresvis.run.events import StepDone
from hiresvis.train.freezing import TrainMode
from hiresvis.train.keeper import Keeper
from hiresvis.train.losses import CrossEntropy
from hiresvis.train.optim import build_optimizer, build_schedule
from hiresvis.train.progress import Progress, RunLimits
from hiresvis.train.step import TrainStep
from hiresvis.train.trainer import Trainer
from hiresvis.ui.plain import PlainView

CLASSES = 10
SAVE_EVERY_S = 600.0


@dataclass
class Item:
    images: Tensor
    targets: Tensor
    indices: tuple[int, ...]
    batch_images: int
    closes_batch: bool = True


class Images:
    """Random images in memory, the same each epoch."""

    def __init__(self, px: int, batch: int, steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        targets = torch.arange(batch) % CLASSES
        shape = (batch, px, px, 3)
        images = [torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for _ in range(steps)]
        self.items = [Item(each, targets, (*range(batch),), batch) for each in images]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Every epoch is the same."""


def make_step(model_name: str) -> TrainStep:
    torch.manual_seed(0)
    model = timm.create_model(model_name, num_classes=CLASSES).train().to(memory_format=torch.channels_last)
    optimizer = build_optimizer(model, name="adamw", lr=1e-4)
    return TrainStep(model, optimizer, CrossEntropy(), prepare=prepare, device=torch.device("cpu"), clip_grad=1.0)


def prepare(images: Tensor) -> Tensor:
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


def bare(step: TrainStep, images: Images) -> float:
    """CPU seconds a step of forward, backward, clipping and the optimizer."""
    model, optimizer = step.model, step.optimizer
    started = time.process_time()
    for item in images:
        loss = torch.nn.functional.cross_entropy(model(prepare(item.images)), item.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return (time.process_time() - started) / len(images)


def guarded(step: TrainStep, images: Images, folder: Path) -> float:
    """CPU seconds a step of the trainer, each event recorded and shown; between the first step's end and the last one's."""
    run = RunDirectory.create(folder, "")
    trainer = Trainer(
        step=step,
        train_loader=images,
        val_loader=Images(32, 2, 1),
        schedule=build_schedule(lr=1e-4, schedule="cosine", warmup=0, steps=len(images)),
        train_mode=TrainMode(step.model),
        limits=RunLimits(epochs=1, save_every=SAVE_EVERY_S),
        metric="accuracy",
        run_dir=folder,
    )
    view, at = PlainView(io.StringIO(), time.monotonic), list[float]()
    for event in trainer.fit():
        run.record(event)
        view.handle(event)
        if isinstance(event, StepDone):
            at.append(time.process_time())
    return (at[-1] - at[0]) / (len(at) - 1)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--px", type=int, default=160)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    step, images = make_step(options.model), Images(options.px, options.batch, options.steps)
    bare(step, images)
    ratios, seconds = [], []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            one, two = bare(step, images), guarded(step, images, Path(folder) / str(repeat))
            seconds.append(one)
            ratios.append(two / one)
        keeper, started = Keeper(step, Path(folder) / "snapshots"), time.process_time()
        keeper.save(Progress(metric="accuracy", num_steps=len(images)))
        snapshot = time.process_time() - started
    print(f"{options.model} at {options.px} px, batch {options.batch}: a bare step takes {statistics.median(seconds):.3f} CPU s")
    print(f"guarded / bare: median {statistics.median(ratios):.4f}, {min(ratios):.4f} to {max(ratios):.4f}, {options.repeats} repeats")
    print(f"a snapshot: {snapshot:.2f} CPU s, {snapshot / SAVE_EVERY_S:.2%} of {SAVE_EVERY_S:.0f} s")


if __name__ == "__main__":
    main()
