"""The preprocessing contract: the one description of classes and pixels that training writes and evaluate, predict and export read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiresvis.data.decode import OpenedImage, open_image
from hiresvis.data.masks import Masks, values_of
from hiresvis.data.regions import Region, Size
from hiresvis.data.transforms import OVERLAP, Preprocess, Scale
from hiresvis.errors import DataError, Problem, RunFolderError

VERSION = 1
_BLOCK_PX = 2048  # a whole number of tiles of any usual size


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """All that turns a file into the model's input and its output into names. Written as contract.json; read back, it gives the same bits.

    Attributes:
        task: classify or segment (scores are the softmax of outputs / temperature), multilabel (the sigmoid of each) or regress (see
            target_mean).
        classes: names in the order of the outputs; to regress, those of the targets.
        target_mean, target_std: to regress, one a target: value = output * std + mean.
        temperature: to classify: outputs are divided by it before the softmax; fitted to val at the end of a run, 1 until then.
        thresholds: of multilabel, one a class: predicted are those whose score is at least theirs; fitted likewise, empty (0.5) until then.
        ignore_index: to segment, the value of pixels in masks that count nowhere.
        image_size: (height, width).
        fit: "resize", "letterbox", "crop" or "tile".
        background: RGB, 0 to 255, under transparent pixels and around letterboxed images.
        channels: of the model's input.
        scale: number range.
        mean, std: one a channel, for values of 0 to 1.
        interpolation: for enlarging; shrinking averages areas.
        max_pixels: larger images are refused.
        overlap: share of a window, with fit "tile".
        version: of this format.
    """

    classes: tuple[str, ...]
    image_size: tuple[int, int]
    fit: str
    background: tuple[int, int, int]
    channels: int
    scale: Scale
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    max_pixels: int
    overlap: float = OVERLAP
    task: str = "classify"
    target_mean: tuple[float, ...] = ()
    target_std: tuple[float, ...] = ()
    temperature: float = 1.0
    thresholds: tuple[float, ...] = ()
    ignore_index: int | None = None
    version: int = VERSION

    def __post_init__(self) -> None:
        assert len(self.mean) == len(self.std) == self.channels, (self.mean, self.std, self.channels)
        scaled = len(self.classes) if self.task == "regress" else 0
        assert len(self.target_mean) == len(self.target_std) == scaled, (self.task, self.target_mean, self.target_std)
        assert self.temperature > 0, self.temperature
        assert self.temperature == 1 or self.task == "classify", (self.task, self.temperature)
        assert len(self.thresholds) in ((0, len(self.classes)) if self.task == "multilabel" else (0,)), (self.task, self.thresholds)

    @property
    def unfitted(self) -> Contract:
        """Without what the end of a run fits: what a contract is before, and what two runs of the same preprocessing share."""
        return replace(self, temperature=1.0, thresholds=())

    def preprocess(self) -> Preprocess:
        """The deterministic pixel part."""
        return Preprocess(self.image_size, self.fit, self.background, self.channels, self.scale, self.interpolation, self.overlap)

    def masks(self) -> Masks | None:
        """What the values in masks mean; None for other tasks than segment."""
        return Masks(values_of(self.classes, self.ignore_index), self.ignore_index) if self.task == "segment" else None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Contract:
        """The contract that `to_json` wrote.

        Raises:
            ValueError: another version, or keys that do not belong.
        """
        if values.get("version") != VERSION:
            raise ValueError(f"version {values.get('version')} and this release reads {VERSION}; use the release that wrote it")
        names = {item.name for item in fields(cls)}
        missing = {item.name for item in fields(cls) if item.default is MISSING} - set(values)  # what has a default came later
        if missing or set(values) - names:
            raise ValueError(f"keys differ: missing {sorted(missing)}, unknown {sorted(set(values) - names)}")
        plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        return cls(**{**plain, "scale": Scale(**values["scale"])})

    @classmethod
    def read(cls, path: Path) -> Contract:
        """The contract of a run.

        Raises:
            RunFolderError: the file is missing, is not JSON, or is of another version.
        """
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise RunFolderError(f"{path} is missing; {path.parent} is not the folder of a finished run") from error
        except (OSError, ValueError, TypeError, AssertionError) as error:
            raise RunFolderError(f"{path} cannot be read: {error}") from error


def load_image(path: Path, preprocess: Preprocess, *, max_pixels: int, region: Region | None = None, seed: int | None = None) -> np.ndarray:
    """One file, or a region of it, to (h, w, channels), uint8 or float32 in 0 to 1. The one way in, but for the windows of fit "tile".

    Args:
        seed: with crop and tile, of the place of the window; None: in the middle (crop alone).

    Raises:
        DataError: with the path and the reason.
    """
    with open_image(path, max_pixels=max_pixels, background=preprocess.background, region=region) as image:
        if not preprocess.in_windows:
            array = image.read(preprocess.draft_px, lent=True)
            found = _preprocessed(preprocess, array, path)
            return found.copy() if np.may_share_memory(found, array) else found  # an image of the model's own size passes as it is
        if seed is not None:
            return _preprocessed(preprocess, image.read_window(preprocess.random_window(*image.size, seed)), path)
        assert preprocess.fit == "crop", "an image in tiles is many arrays"
        return load_window(image, preprocess, 0, path)


def load_window(image: OpenedImage, preprocess: Preprocess, number: int, path: Path) -> np.ndarray:
    """One of `preprocess.num_windows` windows of an open image, as `load_image`.

    Raises:
        DataError: with the path and the reason.
    """
    return _preprocessed(preprocess, image.read_window(preprocess.window(*image.size, number)), path)


def examine(image: OpenedImage, preprocess: Preprocess, path: Path) -> None:
    """Whether the model can take the image, by its header: channels, and the size of what would be read.

    Raises:
        DataError: it cannot, with the path.
    """
    with _naming(path):
        preprocess.check_channels(image.header.channels)
    image.check_size(preprocess.draft_px, preprocess.image_size if preprocess.in_windows else None)


def read_through(
    image: OpenedImage, preprocess: Preprocess | None, path: Path, on_part: Callable[[Region, np.ndarray], None] | None = None
) -> np.ndarray | None:
    """Decodes all that may be read of the image, one part after another, and holds it to the model's number range, where that is known.

    Args:
        on_part: called with each part and its place where there are several.

    Returns:
        the pixels, where they are read as one.

    Raises:
        DataError: damage, or values outside the range, with the path.
    """
    if preprocess is None or not (image.tiled and preprocess.in_windows):
        # A JPEG in full: its draft would show less of what is wrong with it. Of a pyramid the level that will be read.
        array = image.read(preprocess.draft_px if preprocess is not None and image.header.format == "TIFF" else None)
        hold_to_range(array, preprocess, path)
        return array
    places = _blocks(image.size)  # a random window may be anywhere
    for place in places:
        array = image.read_window(place)
        hold_to_range(array, preprocess, path)
        if on_part is not None and len(places) > 1:
            on_part(place, array)
    return array if len(places) == 1 else None


def hold_to_range(array: np.ndarray, preprocess: Preprocess | None, path: Path) -> None:
    """Whether the values are within the model's number range, where that is known.

    Raises:
        DataError: they are not, with the path.
    """
    if preprocess is not None:
        with _naming(path):
            preprocess.scale.check(array)


def reads_the_same(image: OpenedImage, preprocess: Preprocess) -> bool:
    """Whether what `read_through` returns is what `load_image` preprocesses: not where that takes windows or a JPEG's draft."""
    return not preprocess.in_windows and (image.header.format == "TIFF" or not image.is_reduced(preprocess.draft_px))


def _blocks(size: Size) -> list[Region]:
    height, width = size
    return [
        Region(left, top, min(_BLOCK_PX, width - left), min(_BLOCK_PX, height - top))
        for top in range(0, height, _BLOCK_PX)
        for left in range(0, width, _BLOCK_PX)
    ]


def _preprocessed(preprocess: Preprocess, array: np.ndarray, path: Path) -> np.ndarray:
    with _naming(path):
        return preprocess(array)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Preprocessing does not know the file that it refuses."""
    try:
        yield
    except DataError as error:
        raise DataError([Problem(problem.message, str(path), problem.key) for problem in error.problems]) from error


def make_prepare(contract: Contract, device: torch.device, channels_last: bool) -> Callable[[Tensor], Tensor]:
    """What the device does with a batch that arrives as bytes.

    Returns:
        a function from (b, h, w, c) uint8 or float32 in 0 to 1, on any device, to (b, c, h, w) float32 on `device`, normalised with
        the contract's mean and std, in channels-last memory or not.
    """
    mean = torch.tensor(contract.mean, dtype=torch.float32, device=device)
    std = torch.tensor(contract.std, dtype=torch.float32, device=device)
    factor, offset = (1 / std).view(-1, 1, 1), (-mean / std).view(-1, 1, 1)
    layout = torch.channels_last if channels_last else torch.contiguous_format

    @torch.no_grad()
    def prepare(images: Tensor) -> Tensor:
        moved = images.to(device, non_blocking=True).permute(0, 3, 1, 2).contiguous(memory_format=layout)  # while it is still bytes
        values = moved.to(torch.float32, copy=True)
        return values.mul_(factor / 255 if images.dtype == torch.uint8 else factor).add_(offset)

    return prepare


def statistics_for(mean: Sequence[float], std: Sequence[float], channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std for another number of channels than the weights were made with: their average, for each."""
    if len(mean) == channels:
        return tuple(mean), tuple(std)
    return (sum(mean) / len(mean),) * channels, (sum(std) / len(std),) * channels
