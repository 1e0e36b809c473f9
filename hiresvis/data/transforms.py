"""From decoded pixels to what the model takes: size, number range, channels; and augmentation for training.

Everything here is a pure function of its input (and a seed), so the same file gives the same array in training, evaluation and
prediction, in whatever process. Shrinking always averages areas: plain interpolation would alias away the small things that large
images are used for. With crop and tile the array is a window already, which is padded where the image is smaller and never resized.
Augmentation (augment.py) comes last, at the model's size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import cv2
import numpy as np

from hiresvis.data.augment import Augment
from hiresvis.data.regions import Place, Region, num_windows, whole, window_start
from hiresvis.errors import DataError

if TYPE_CHECKING:
    from hiresvis.data.masks import Masks

FITS = ("resize", "letterbox", "crop", "tile")
OVERLAP = 0.25  # of a window, with fit: tile
ENLARGING = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}
_WINDOW_STREAM = 1  # beside the sample's own stream, which augmentation draws from


@dataclass(frozen=True, slots=True)
class Scale:
    """How stored values become 0 to 1.

    kind "dtype": by the type's range: uint8 stays uint8 (divided by 255 on the device), uint16 is divided by 65535, floats have to be in
    0 to 1 already. kind "range": (value - low) / (high - low), cut to 0 and 1, for every type.
    """

    kind: str = "dtype"
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        assert self.kind in ("dtype", "range"), self.kind
        assert self.low < self.high, (self.low, self.high)

    def apply(self, array: np.ndarray) -> np.ndarray:
        """uint8 as it is, or float32 in 0 to 1."""
        if self.kind == "range":
            scaled = (array.astype(np.float32) - np.float32(self.low)) * np.float32(1 / (self.high - self.low))
            return np.clip(scaled, 0, 1, out=scaled)
        if array.dtype == np.uint8:
            return array
        if array.dtype == np.uint16:
            return array.astype(np.float32) * np.float32(1 / 65535)
        return np.clip(array, 0, 1)

    def check(self, array: np.ndarray) -> None:
        """Refuses floats outside 0 to 1 where the rule is the type's range.

        Raises:
            DataError: with the values and the setting that mends it.
        """
        if self.kind == "dtype" and array.dtype == np.float32 and (array.min() < 0 or array.max() > 1):
            raise DataError(
                f"has float values from {array.min():.6g} to {array.max():.6g}, which data.scale: dtype takes as 0 to 1; "
                "set data.scale to percentile or to [low, high]"
            )


@dataclass(frozen=True, slots=True)
class Preprocess:
    """The deterministic part, the same for training and prediction.

    Attributes:
        image_size: (height, width) of the result.
        fit: "resize" (the whole image, stretched to the size), "letterbox" (the whole image, its shape kept, padded in the middle), "crop"
            (a window of this size at full resolution: anywhere in training, else the middle) or "tile" (windows of this size: one anywhere
            in training, else as many as cover the image).
        background: RGB of the padding, 0 to 255; also laid under transparent pixels by the decoder.
        in_chans: channels of the result; one channel is repeated to three, other differences are errors.
        scale: number range.
        interpolation: for enlarging alone, "bilinear" or "bicubic".
        overlap: share of a window, 0 to below 1, that neighbours of fit "tile" have in common at least.
    """

    image_size: tuple[int, int]
    fit: str = "resize"
    background: tuple[int, int, int] = (255, 255, 255)
    in_chans: int = 3
    scale: Scale = field(default_factory=Scale)
    interpolation: str = "bilinear"
    overlap: float = OVERLAP

    def __post_init__(self) -> None:
        assert self.fit in FITS, self.fit
        assert self.interpolation in ENLARGING, self.interpolation
        assert 0 <= self.overlap < 1, self.overlap

    @property
    def in_windows(self) -> bool:
        """The model sees windows at full resolution, not the whole image reduced."""
        return self.fit in ("crop", "tile")

    @property
    def draft_px(self) -> tuple[int, int] | None:
        """(height, width) below which a draft decode must not go; None: nothing is reduced."""
        return None if self.in_windows else self.image_size

    def num_windows(self, height: int, width: int) -> int:
        """How many arrays stand for one image in evaluation and prediction."""
        return math.prod(self._grid(height, width))

    def window(self, height: int, width: int, number: int = 0) -> Region:
        """One of the windows of evaluation and prediction, row by row: the middle (crop), or the grid's (tile)."""
        tall, wide = (min(pair) for pair in zip((height, width), self.image_size, strict=True))
        if self.fit == "crop":
            return Region((width - wide) // 2, (height - tall) // 2, wide, tall)
        row, column = divmod(number, self._grid(height, width)[1])
        left = window_start(width, self.image_size[1], self.overlap, column)
        return Region(left, window_start(height, self.image_size[0], self.overlap, row), wide, tall)

    def random_window(self, height: int, width: int, seed: int) -> Region:
        """The window of one training sample: every place equally likely; the same seed gives the same place in any process."""
        tall, wide = (min(pair) for pair in zip((height, width), self.image_size, strict=True))
        rng = np.random.default_rng(np.random.SeedSequence([seed, _WINDOW_STREAM]))
        return Region(int(rng.integers(width - wide + 1)), int(rng.integers(height - tall + 1)), wide, tall)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of windows."""
        if self.fit != "tile":
            return 1, 1
        return num_windows(height, self.image_size[0], self.overlap), num_windows(width, self.image_size[1], self.overlap)

    def __call__(self, array: np.ndarray) -> np.ndarray:
        """(height, width, channels) of any size (with crop and tile: of a window) to (h, w, in_chans), uint8 or float32 in 0 to 1.

        Raises:
            DataError: the channels do not match the model, or floats are outside the range. The caller knows the file's name.
        """
        channels = array.shape[2]
        self.check_channels(channels)
        self.scale.check(array)
        height, width = self.fitted_size(*array.shape[:2])
        assert not self.in_windows or (height, width) == array.shape[:2], (array.shape, self.image_size)
        array = self.scale.apply(resize(array, height, width, self.interpolation))
        if channels != self.in_chans:
            array = np.repeat(array, self.in_chans, axis=2)
        return np.ascontiguousarray(self._pad(array))

    def check_channels(self, channels: int) -> None:
        """Refuses what cannot become the model's channels.

        Raises:
            DataError: with both numbers and the setting.
        """
        if channels != self.in_chans and not (channels == 1 and self.in_chans == 3):
            raise DataError(
                f"has {channels} channels and the model takes {self.in_chans}; set data.channels: {channels}, "
                f"or save the images with {self.in_chans}"
            )

    def fitted_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) that an image takes up in the result; with crop and tile, that a window of it does."""
        if self.fit == "resize":
            return self.image_size
        if self.in_windows:
            return min(height, self.image_size[0]), min(width, self.image_size[1])
        ratio = min(self.image_size[0] / height, self.image_size[1] / width)
        return tuple(max(1, min(limit, round(size * ratio))) for size, limit in zip((height, width), self.image_size, strict=True))  # type: ignore[return-value]

    def place(self, height: int, width: int, number: int = 0) -> Place:
        """Where one of the arrays that stand for an image lies in it."""
        part = self.window(height, width, number) if self.in_windows else whole((height, width))
        return Place((height, width), part, self._content(*self.fitted_size(*part.size)))

    def fit_mask(self, numbers: np.ndarray, blank: int) -> np.ndarray:
        """(height, width) of class numbers as `__call__` fits its image, by the nearest pixel; padding is `blank`."""
        tall, wide = self.fitted_size(*numbers.shape[:2])
        if numbers.shape[:2] != (tall, wide):
            numbers = cv2.resize(numbers, (wide, tall), interpolation=cv2.INTER_NEAREST_EXACT)
        if (tall, wide) == self.image_size:
            return np.ascontiguousarray(numbers)
        out = np.full(self.image_size, blank, numbers.dtype)
        out[self._content(tall, wide).slices] = numbers
        return out

    def share_kept(self, height: int, width: int) -> float:
        """Share of the image's area that the model sees in evaluation: less than 1 only with crop, which leaves out what is around."""
        if self.fit != "crop":
            return 1.0
        tall, wide = self.fitted_size(height, width)
        return tall * wide / (height * width)

    def _pad(self, array: np.ndarray) -> np.ndarray:
        if array.shape[:2] == self.image_size:
            return array
        colour = np.asarray(self.background if self.in_chans == 3 else [np.mean(self.background)] * self.in_chans, np.float32)
        shade = np.rint(colour) if array.dtype == np.uint8 else colour / 255
        out = np.empty((*self.image_size, self.in_chans), array.dtype)
        out[:] = shade.astype(array.dtype)
        out[self._content(*array.shape[:2]).slices] = array
        return out

    def _content(self, height: int, width: int) -> Region:
        """Where an array of this size stands, padding around it."""
        return Region((self.image_size[1] - width) // 2, (self.image_size[0] - height) // 2, width, height)


def resize(array: np.ndarray, height: int, width: int, interpolation: str = "bilinear") -> np.ndarray:
    """(height, width, channels) of the same type. An axis that shrinks is averaged by area, one that grows is interpolated."""
    smaller = (min(array.shape[0], height), min(array.shape[1], width))
    array = _resize(array, smaller, cv2.INTER_AREA)
    return _resize(array, (height, width), ENLARGING[interpolation])


def _resize(array: np.ndarray, size: tuple[int, int], method: int) -> np.ndarray:
    if array.shape[:2] == size:
        return array
    # opencv averages areas of up to 4 channels
    parts = [
        cv2.resize(np.ascontiguousarray(array[..., start : start + 4]), size[::-1], interpolation=method).reshape(*size, -1)
        for start in range(0, array.shape[2], 4)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Preprocess, then augment: what one training sample goes through after decoding (see `micro_batch.load_sample`); and its mask."""

    preprocess: Preprocess
    augment: Augment | None = None
    masks: Masks | None = None


def as_floats(array: np.ndarray) -> np.ndarray:
    """An image's values as float32 in 0 to 1, where bytes meet the floats of deep images."""
    return array.astype(np.float32) / np.float32(255) if array.dtype == np.uint8 else array


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """The seed of one sample in one epoch: nothing else (worker, order, start method) has a part in it."""
    return int(np.random.SeedSequence([seed, epoch, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))
