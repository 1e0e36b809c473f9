"""Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019) over the batch that the optimizer sees.

An image is mixed with the one before it in its batch, the first with the last, by numbers that follow from its own seed. So what a batch
holds does not depend on how it is cut into micro-batches, which at large sizes are of one or two images and could not be mixed within
themselves. The price is one more image read for each micro-batch that is not the whole batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cv2
import numpy as np

from hiresvis.data.labels import Target
from hiresvis.data.transforms import as_floats

_STREAM = 1  # beside the augmentation's own draws of the same seed


@dataclass(frozen=True, slots=True)
class Mixing:
    """What is mixed, and how strongly.

    Attributes:
        mixup: both parameters of the Beta distribution that shares are drawn from; 0: no mixup.
        cutmix: likewise; with both, each image draws which.
        num_classes: of labels that are class numbers, which become rows of shares; None: labels are rows already.
    """

    mixup: float
    cutmix: float
    num_classes: int | None

    def __bool__(self) -> bool:
        return bool(self.mixup or self.cutmix)

    def images(self, image: np.ndarray, other: np.ndarray, seed: int) -> tuple[np.ndarray, float]:
        """The mixed image (h, w, c), and the share of it that is `image`. Both come in the same size; neither is changed."""
        rng = np.random.default_rng([seed, _STREAM])
        if image.dtype != other.dtype:
            image, other = as_floats(image), as_floats(other)
        if self.cutmix and (not self.mixup or rng.random() < 0.5):
            return _with_box(image, other, rng.beta(self.cutmix, self.cutmix), rng)
        share = float(rng.beta(self.mixup, self.mixup))
        mixed = cv2.addWeighted(image, share, other, 1 - share, 0.0)
        return mixed.reshape(image.shape), share  # opencv drops the axis of a single channel

    def label(self, label: Target, other: Target, share: float) -> tuple[float, ...]:
        """The mixed label: shares of classes, or of the rows' values."""
        return tuple(share * one + (1 - share) * two for one, two in zip(self._row(label), self._row(other), strict=True))

    def _row(self, label: Target) -> tuple[float, ...]:
        if isinstance(label, tuple):
            return label
        assert label is not None, "training samples have labels"
        assert self.num_classes is not None, "labels are rows already"
        return tuple(float(number == label) for number in range(self.num_classes))


def _with_box(image: np.ndarray, other: np.ndarray, share: float, rng: np.random.Generator) -> tuple[np.ndarray, float]:
    """The image with a box of the other; the share is by the area that the box really takes, since the border may cut it."""
    height, width = image.shape[:2]
    side = math.sqrt(1 - share)
    box_height, box_width = int(height * side), int(width * side)
    y, x = int(rng.integers(height)), int(rng.integers(width))
    top, bottom = max(0, y - box_height // 2), min(height, y + (box_height + 1) // 2)
    left, right = max(0, x - box_width // 2), min(width, x + (box_width + 1) // 2)
    mixed = image.copy()
    mixed[top:bottom, left:right] = other[top:bottom, left:right]
    return mixed, 1 - (bottom - top) * (right - left) / (height * width)
