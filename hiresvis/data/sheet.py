"""Pictures of what the model will be given: a few images of each class after preprocessing, and some draws of their augmentation."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import cv2
import numpy as np

from hiresvis.data.labels import Target
from hiresvis.data.masks import IGNORED, PALETTE
from hiresvis.data.micro_batch import load_pair, load_sample
from hiresvis.data.sources import Dataset, Sample
from hiresvis.data.transforms import Pipeline, resize, sample_seed
from hiresvis.errors import DataError

SIDE_PX = 224  # of one picture
MOST_IMAGES = 36  # about 3 MB, with five pictures each
IMAGES_PER_CLASS = 3
IMAGES_OF_RANGE = 12  # of a regression
DRAWS = 3
_QUALITY = 80


@dataclass(frozen=True, slots=True)
class Shown:
    """One image of train.

    Attributes:
        label: its class, or classes, or targets.
        name: as its source names it.
        whole: all of it, reduced. detail: the middle, pixel for pixel. draws: whole, augmented. Each is a JPEG data URI.
        error: why there are no pictures.
    """

    label: str
    name: str
    whole: str = ""
    detail: str = ""
    draws: tuple[str, ...] = ()
    error: str = ""


def show_images(dataset: Dataset, pipeline: Pipeline, *, max_pixels: int, seed: int) -> Iterator[Shown]:
    """A few images of each class, of each combination of classes, or over the range of the first target, by the pipeline of training.

    Args:
        dataset: the training split.
        pipeline: preprocessing and augmentation.
        max_pixels: larger images are refused.
        seed: of the run; the draws are those of the first epochs.
    """
    for position in _chosen(dataset):
        sample = dataset.samples[position]
        yield _show(sample, position, dataset.label_text(sample) or "none", pipeline, max_pixels, seed)


def _chosen(dataset: Dataset) -> list[int]:
    """Positions to show, in the order of labels."""
    if dataset.task == "segment":
        count = min(IMAGES_OF_RANGE, len(dataset))
        return [number * len(dataset) // count for number in range(count)]
    if dataset.task == "regress":
        ranked = [position for _, position in sorted((values, position) for position, values in enumerate(dataset.values()))]
        return sorted({ranked[number * (len(ranked) - 1) // (IMAGES_OF_RANGE - 1)] for number in range(IMAGES_OF_RANGE)}, key=ranked.index)
    positions: dict[Target, list[int]] = {}
    for position, sample in enumerate(dataset.samples):
        positions.setdefault(sample.label, []).append(position)
    labels = sorted(positions, key=lambda label: (label,) if isinstance(label, int) else label or ())
    each = max(1, min(IMAGES_PER_CLASS, MOST_IMAGES // max(1, len(labels))))
    chosen: list[int] = []
    for label in labels[:MOST_IMAGES]:
        own = positions[label]
        chosen += sorted({own[number * len(own) // each] for number in range(each)})
    return chosen


def _show(sample: Sample, position: int, label: str, pipeline: Pipeline, max_pixels: int, seed: int) -> Shown:
    seeds = [sample_seed(seed, epoch, position) for epoch in range(1, DRAWS + 1)]
    augment = pipeline.augment
    if pipeline.masks is not None:
        return _show_masked(sample, label, pipeline, max_pixels, seeds)
    try:
        array = load_sample(sample, Pipeline(pipeline.preprocess), max_pixels=max_pixels, seed=seeds[0])
        if pipeline.preprocess.in_windows:  # at another place in each epoch
            draws = [load_sample(sample, pipeline, max_pixels=max_pixels, seed=own) for own in seeds]
        else:
            draws = [augment(array, own) for own in seeds] if augment is not None else []
    except DataError as error:
        return Shown(label, sample.name, error=error.reason)
    whole = _reduced(array)
    top, left = ((size - shown) // 2 for size, shown in zip(array.shape[:2], whole.shape[:2], strict=True))
    detail = array[top : top + whole.shape[0], left : left + whole.shape[1]]
    return Shown(label, sample.name, _uri(whole), _uri(detail), tuple(_uri(_reduced(draw)) for draw in draws))


def _show_masked(sample: Sample, label: str, pipeline: Pipeline, max_pixels: int, seeds: Sequence[int]) -> Shown:
    """The image as it is, its middle under its mask's colours, and draws of both; ignored pixels are white."""
    try:
        array, mask = load_pair(sample, replace(pipeline, augment=None), max_pixels=max_pixels, seed=seeds[0])
        draws = [load_pair(sample, pipeline, max_pixels=max_pixels, seed=own) for own in seeds]
    except DataError as error:
        return Shown(label, sample.name, error=error.reason)
    whole = _reduced(array)
    top, left = ((size - shown) // 2 for size, shown in zip(array.shape[:2], whole.shape[:2], strict=True))
    middle = (slice(top, top + whole.shape[0]), slice(left, left + whole.shape[1]))
    drawn = tuple(_uri(_reduced(_tinted(*draw))) for draw in draws)
    return Shown(label, sample.name, _uri(whole), _uri(_tinted(array, mask)[middle]), drawn)


def _tinted(array: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """(h, w, 3) uint8, half image and half the classes' colours; the first class keeps the image's."""
    pixels = array if array.dtype == np.uint8 else np.rint(array * 255).astype(np.uint8)
    grey = np.repeat(pixels[..., :1], 3, axis=2) if pixels.shape[2] < 3 else pixels[..., :3]
    colours = PALETTE.copy()
    colours[IGNORED] = 255
    return np.where((mask == 0)[..., None], grey, grey // 2 + colours[mask] // 2).astype(np.uint8)


def _reduced(array: np.ndarray) -> np.ndarray:
    """At most SIDE_PX a side, its shape kept; nothing is enlarged."""
    factor = min(1.0, SIDE_PX / max(array.shape[:2]))
    return resize(array, *(max(1, round(size * factor)) for size in array.shape[:2]))


def _uri(array: np.ndarray) -> str:
    """uint8 or float32 in 0 to 1 as a JPEG; of two channels the first is shown, of more than three the first three."""
    pixels = array if array.dtype == np.uint8 else np.rint(array * 255).astype(np.uint8)
    colours = pixels[..., 0] if pixels.shape[2] < 3 else cv2.cvtColor(np.ascontiguousarray(pixels[..., :3]), cv2.COLOR_RGB2BGR)
    _, data = cv2.imencode(".jpg", colours, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
    return "data:image/jpeg;base64," + base64.b64encode(data.tobytes()).decode("ascii")
