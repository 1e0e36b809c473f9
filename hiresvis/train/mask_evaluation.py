"""Evaluation against masks: losses and pixels of each class, image by image at its own size, so that metrics are those of the masks that
`predict` writes. Only the strips under way are held, whatever the number and the size of the images."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hiresvis.train.batches import fetch
from hiresvis.train.mapping import MapJoin, Strip
from hiresvis.train.mask_losses import NO_CLASS, MaskLoss, PixelSums
from hiresvis.train.step import TrainStep


@dataclass(frozen=True, slots=True, eq=False)
class PixelCounts:
    """Pixels of each class, (n, k) int64: by the masks, by the prediction, and by both. Ignored pixels count nowhere."""

    true: Tensor
    predicted: Tensor
    right: Tensor

    def total(self) -> tuple[Tensor, Tensor, Tensor]:
        """Over all images, (k,) each."""
        return self.true.sum(dim=0), self.predicted.sum(dim=0), self.right.sum(dim=0)


def mask_steps(
    step: TrainStep, loader: Any, *, flips: bool = False
) -> Generator[tuple[int, int], None, tuple[list[int], Tensor, PixelCounts]]:
    """Evaluates a split batch by batch; the model's mode is the caller's.

    Args:
        flips: each image is also seen mirrored.

    Yields:
        (batches done, batches in all) after each batch.

    Returns:
        the samples' indices in the order of their completion, their losses (n,) float32, and their pixels.
    """
    loss_fn = step.loss_fn
    assert isinstance(loss_fn, MaskLoss)
    join, indices = MapJoin(), list[int]()
    outputs_of = step.predict_with_flips if flips else step.predict
    losses, counts = list[Tensor](), list[Tensor]()
    image: _Image | None = None
    for done, item in enumerate(fetch(loader), start=1):
        for strip in join.add(item, outputs_of(item.images).cpu()):
            image = image or _Image(loss_fn, strip.logits.shape[0])
            image.add(strip)
            if strip.is_last:
                indices.append(strip.index)
                losses.append(image.loss())
                counts.append(image.counts)
                image = None
        yield done, len(loader)
    if not indices:
        raise ValueError("the split to evaluate is empty")
    return indices, torch.cat(losses), PixelCounts(*torch.stack(counts).unbind(dim=1))


class _Image:
    """What is known of the image under way."""

    def __init__(self, loss_fn: MaskLoss, num_classes: int) -> None:
        self._loss_fn = loss_fn
        self._sums: PixelSums | None = None
        self.counts = torch.zeros(3, num_classes, dtype=torch.int64)

    def add(self, strip: Strip) -> None:
        """Counts the strip in."""
        assert strip.truth is not None
        sums = self._loss_fn.sums(strip.logits[None], strip.truth[None]).double()
        self._sums = sums if self._sums is None else self._sums + sums
        valid = strip.truth != NO_CLASS
        true, predicted = strip.truth[valid], strip.logits.argmax(dim=0)[valid]
        k = self.counts.shape[1]
        for row, classes in enumerate((true, predicted, true[true == predicted])):
            self.counts[row] += torch.bincount(classes.long(), minlength=k)

    def loss(self) -> Tensor:
        """(1,) float32."""
        assert self._sums is not None
        return self._loss_fn.value(self._sums).float()
