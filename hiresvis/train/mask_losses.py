"""Losses over masks: cross entropy, soft Dice, or their sum, each taken image by image, so that a batch's micro-batches add up to it.

All are made of sums over pixels (`PixelSums`), which can be taken part by part of an image: training takes them of a whole input at once,
evaluation strip by strip of images of any size. Pixels of no class count nowhere; an image without any other has a loss of 0.

Dice of a class is 2 * (probability on its pixels) / (probability on all pixels + number of its pixels), as in V-Net (Milletari et al.
2016); the mean is over the classes that the image's mask shows. A class that is not there has no overlap to reach: what it takes is missing
from the others. What it does badly: a class of a few pixels weighs as much as the background, so Dice alone is noisy there, which is why
`auto` adds cross entropy (Isensee et al. 2021, nnU-Net).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

NO_CLASS = 255  # as the loader gives it


@dataclass(frozen=True, slots=True, eq=False)
class PixelSums:
    """Sums over pixels of b images: what a loss is made of.

    Attributes:
        cross_entropy: (b,).
        pixels: (b,), those of a class.
        overlap: (b, k), probability of each class on its own pixels. taken: (b, k), on all pixels. there: (b, k), pixels of each class.
    """

    cross_entropy: Tensor
    pixels: Tensor
    overlap: Tensor
    taken: Tensor
    there: Tensor

    def __add__(self, other: PixelSums) -> PixelSums:
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__slots__)
        return PixelSums(*(one + two for one, two in pairs))

    def double(self) -> PixelSums:
        """In float64, to be added up over many parts."""
        return PixelSums(*(getattr(self, name).double() for name in self.__slots__))


class MaskLoss:
    """A class for every pixel: outputs (b, k, h, w) of any size, brought to that of the targets (b, h, w) uint8 by bilinear interpolation.

    Args:
        kind: dice_ce | cross_entropy | dice.
        image_size: (height, width) of the targets that training gives.
        label_smoothing: of cross entropy: share of each target spread over all classes.
    """

    task = "segment"

    def __init__(self, kind: str, *, image_size: tuple[int, int], label_smoothing: float = 0.0) -> None:
        assert kind in ("dice_ce", "cross_entropy", "dice"), kind
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing {label_smoothing} is not in 0 <= value < 1")
        self.kind, self.image_size, self.label_smoothing = kind, image_size, label_smoothing

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.value(self.sums(_at_size_of(outputs, targets), targets, self.label_smoothing))

    def plain(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.value(self.sums(_at_size_of(outputs, targets), targets))

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(dim=1)

    def blank_targets(self, num_images: int) -> Tensor:
        return torch.zeros(num_images, *self.image_size, dtype=torch.uint8)

    def sums(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> PixelSums:
        """Sums over pixels of logits (b, k, h, w) at the targets' own size."""
        # Masks of a byte a value are kept for backward, not class numbers of eight; no kernel here is without a deterministic form.
        count = logits.shape[1]
        own = targets[:, None] == torch.arange(count, device=targets.device, dtype=torch.uint8)[:, None, None]
        valid = (targets != NO_CLASS)[:, None]
        logs = logits.log_softmax(dim=1)
        nothing = logs.new_zeros(())
        pixels = valid.sum(dim=(1, 2, 3)).to(logs.dtype)
        entropy = -torch.where(own, logs, nothing).sum(dim=(1, 2, 3))
        if smoothing:
            spread = -torch.where(valid, logs, nothing).sum(dim=(1, 2, 3)) / count
            entropy = entropy * (1 - smoothing) + spread * smoothing
        there = own.sum(dim=(2, 3)).to(logs.dtype)
        if self.kind == "cross_entropy":
            return PixelSums(entropy, pixels, torch.zeros_like(there), torch.zeros_like(there), there)
        shares = logs.exp()
        overlap, taken = (torch.where(mask, shares, nothing).sum(dim=(2, 3)) for mask in (own, valid))
        return PixelSums(entropy, pixels, overlap, taken, there)

    def value(self, sums: PixelSums) -> Tensor:
        """Losses (b,) of whole images."""
        entropy = sums.cross_entropy / sums.pixels.clamp(min=1)
        if self.kind == "cross_entropy":
            return entropy
        shown = sums.there > 0
        dice = 2 * sums.overlap / (sums.taken + sums.there).clamp(min=1e-6)
        missing = torch.where(shown, 1 - dice, torch.zeros_like(dice)).sum(dim=1) / shown.sum(dim=1).clamp(min=1)
        return missing if self.kind == "dice" else entropy + missing


def _at_size_of(outputs: Tensor, targets: Tensor) -> Tensor:
    size = targets.shape[-2:]
    return outputs if outputs.shape[-2:] == size else F.interpolate(outputs, size=size, mode="bilinear", align_corners=False)
