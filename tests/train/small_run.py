"""A small real run for the tests here: timm's test models on random images held in memory. As a script it trains in a folder.

    python small_run.py FOLDER MODEL EPOCHS [--slow]

--slow waits at each validation batch and after each step, for signals to arrive there. The script
prints one line per event, prints `interrupted` and exits as the command line tool does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hiresvis.backbone.trace import trace_costs
from hiresvis.errors import Interrupted
from hiresvis.memory.costs import MemoryProfile
from hiresvis.train.freezing import TrainMode
from hiresvis.train.losses import CrossEntropy
from hiresvis.train.optim import build_optimizer, build_schedule
from hiresvis.train.progress import RunLimits
from hiresvis.train.step import Precision, TrainStep
from hiresvis.train.trainer import Trainer

CLASSES, SIZE_PX = 3, 64


@dataclass
class Item:
    images: Tensor
    targets: Tensor
    indices: tuple[int, ...]
    batch_images: int
    closes_batch: bool


class Images:
    """num_images labelled uint8 images; the label shows as a brighter channel. A real DataLoader underneath, which draws from torch's
    global generator at each start as the real loader's does."""

    def __init__(
        self, num_images: int, *, batch: int, micro_batch: int | None = None, shuffle: bool = True, dtype: torch.dtype = torch.uint8
    ) -> None:
        generator = torch.Generator().manual_seed(num_images)
        self.targets = torch.arange(num_images) % CLASSES
        self.images = torch.randint(0, 160, (num_images, SIZE_PX, SIZE_PX, 3), generator=generator, dtype=torch.uint8)
        self.images[torch.arange(num_images), :, :, self.targets] += 60
        self.images = self.images.to(dtype)
        self.batch, self.micro_batch, self.shuffle = batch, micro_batch or batch, shuffle
        self.skipped: list[tuple[str, str]] = []
        self.delay: Callable[[], None] = lambda: None
        self._epoch, self._first = 1, 0

    def __len__(self) -> int:
        return -(-len(self.targets) // self.batch)

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        self._epoch, self._first = epoch, first_batch

    def __iter__(self) -> Iterator[Item]:
        return iter(DataLoader(list(self._parts()), batch_size=None, collate_fn=self._item))

    def _parts(self) -> Iterator[tuple[list[int], int, bool]]:
        order = list(range(len(self.targets)))
        if self.shuffle:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(self._epoch)).tolist()
        for start in range(self._first * self.batch, len(order), self.batch):
            batch = order[start : start + self.batch]
            num_parts = -(-len(batch) // self.micro_batch)
            edges = [len(batch) * part // num_parts for part in range(num_parts + 1)]
            for part in range(num_parts):
                yield batch[edges[part] : edges[part + 1]], len(batch), part == num_parts - 1

    def _item(self, part: tuple[list[int], int, bool]) -> Item:
        indices, batch_images, closes = part
        self.delay()
        return Item(self.images[indices], self.targets[indices], tuple(indices), batch_images, closes)


def prepare(images: Tensor) -> Tensor:
    """(b, h, w, c) to (b, c, h, w) float32 about -1..1 (float64 stays, for exact sums)."""
    images = images if images.dtype == torch.float64 else images.float()
    return images.permute(0, 3, 1, 2) / 127.5 - 1


def make_step(
    model_name: str = "test_vit",
    *,
    optimizer: str = "adamw",
    lr: float = 1e-3,
    layer_decay: float | None = None,
    precision: Precision = "fp32",
    clip_grad: float | None = 1.0,
    drop: bool = True,
    dtype: torch.dtype = torch.float32,
) -> TrainStep:
    """A step over a seeded model, in train mode, with drop-path (and dropout where the model has it) unless told otherwise."""
    torch.manual_seed(0)
    size = {"img_size": SIZE_PX} if "vit" in model_name else {}
    drops = {"drop_path_rate": 0.3, "drop_rate": 0.2} if drop else {}
    model = timm.create_model(model_name, num_classes=CLASSES, **size, **drops).to(dtype).train()
    built = build_optimizer(model, name=optimizer, lr=lr, weight_decay=0.05, layer_decay=layer_decay)
    device = torch.device("cpu")
    return TrainStep(model, built, CrossEntropy(), prepare=prepare, device=device, precision=precision, clip_grad=clip_grad)


def trace(step: TrainStep, model_name: str, size_px: int, *, ema: bool = False) -> MemoryProfile:
    """The costs of a step's model, trained by AdamW on square bytes."""
    _, profile = trace_costs(
        step.model,
        name=model_name,
        image_size=(size_px, size_px),
        in_chans=3,
        num_classes=CLASSES,
        precision="fp32",
        channels_last=False,
        block=64,
        raw_image_bytes=size_px * size_px * 3,
        make_optimizer=lambda model: build_optimizer(model, name="adamw", lr=1e-3),
        optimizer_name="adamw",
        clip_grad=1.0,
        ema=ema,
    )
    return profile


def make_trainer(
    folder: Path,
    model_name: str = "test_vit",
    *,
    limits: RunLimits | None = None,
    step: TrainStep | None = None,
    train_loader: Images | None = None,
    val_loader: Images | None = None,
    **kwargs: object,
) -> Trainer:
    """A trainer of three steps an epoch (batches of 8, 8 and 6 in uneven micro-batches), 9 validation images in 3 batches."""
    step = step or make_step(model_name)
    limits = limits or RunLimits(epochs=2)
    train_loader = train_loader or Images(22, batch=8, micro_batch=3)
    kwargs = {"schedule": build_schedule(lr=1e-3, schedule="cosine", warmup=1, steps=6), **kwargs}
    return Trainer(
        step=step,
        train_loader=train_loader,
        val_loader=val_loader or Images(9, batch=3, shuffle=False),
        train_mode=TrainMode(step.model),
        limits=limits,
        metric="accuracy",
        run_dir=folder,
        name_of=lambda index: f"image{index}.png",
        **kwargs,
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("model")
    parser.add_argument("epochs", type=int)
    parser.add_argument("--slow", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    val_loader = Images(9, batch=3, shuffle=False)
    if options.slow:
        val_loader.delay = lambda: time.sleep(0.3)
    trainer = make_trainer(options.folder, options.model, limits=RunLimits(epochs=options.epochs), val_loader=val_loader)
    try:
        for event in trainer.fit():
            print(event.kind, getattr(event, "epoch", ""), getattr(event, "step", ""), flush=True)
            if options.slow and event.kind == "step_done":
                time.sleep(0.3)
    except Interrupted as stopped:
        print("interrupted", flush=True)
        return stopped.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
