"""One micro-batch, in whatever process: from a task, which names samples and seeds, to pixels and labels.

Nothing here draws a number or holds a state that matters: the same task gives the same bits wherever it runs. The only thing kept from
task to task is the image whose windows are being read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from hiresvis.data.cache import ImageCache
from hiresvis.data.contract import load_image, load_window
from hiresvis.data.decode import OpenedImage, open_image
from hiresvis.data.labels import Target
from hiresvis.data.masks import IGNORED, Masks, mask_size, of_the_mask, size_problem
from hiresvis.data.mixing import Mixing
from hiresvis.data.regions import Place, Region, Size, whole
from hiresvis.data.sources import Sample
from hiresvis.data.survey import any_deep_images, most_pixels
from hiresvis.data.transforms import Pipeline, as_floats, sample_seed
from hiresvis.errors import DataError, Problem

_NO_LABEL = -1


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """What one forward and backward takes.

    Attributes:
        images: (b, h, w, c), uint8, or float32 in 0 to 1.
        targets: (b,) int64 class numbers, -1 where the label is not known; or (b, k) float64, the samples' tuples, or shares of
            classes where images are mixed; or, to train on masks, (b, h, w) uint8 class numbers, 255 for none.
        indices: positions in the loader's samples.
        batch_images: images really present in the whole batch that this is a part of (what the loss is divided by): under
            bad_images=skip unreadable files are left out of the count.
        closes_batch: this is the last part; the optimizer steps after it.
        batch_index: which batch of the epoch, from 0.
        num_windows: for each image, how many windows of the same sample there are in all, one after another (fit "tile" in
            evaluation); empty: every image is a sample.
        places: of the images, where outputs are maps (segment in evaluation).
        truths: of the masks, what each image shows of them, at the file's own size: (h, w) uint8; empty where they are not known.
    """

    images: Tensor
    targets: Tensor
    indices: tuple[int, ...]
    batch_images: int
    closes_batch: bool
    batch_index: int = 0
    num_windows: tuple[int, ...] = ()
    places: tuple[Place, ...] = ()
    truths: tuple[Tensor, ...] = ()

    def pin_memory(self) -> MicroBatch:
        """A copy in page-locked memory (called by torch's loader)."""
        return replace(self, images=self.images.pin_memory(), targets=self.targets.pin_memory())


@dataclass(frozen=True, slots=True)
class Task:
    """One micro-batch to make: which images, of which batch.

    Where an epoch has an image several times, its index at the second time is larger by the number of samples, and so on: each time is
    augmented and mixed by a seed of its own.
    """

    epoch: int
    batch_index: int
    indices: tuple[int, ...]
    batch_images: int
    closes_batch: bool
    windows: tuple[int, ...] = ()  # of evaluation: which window of each sample
    num_windows: tuple[int, ...] = ()  # as in MicroBatch
    partners: tuple[int, ...] = ()  # where images are mixed: what each is mixed with


@dataclass(frozen=True, slots=True)
class Loaded:
    """A task's result. `problems` are raised in the main process: an exception that crosses processes would arrive as a wall of text.
    `note` is for people: what the cache in this process has to say."""

    task: Task
    micro_batch: MicroBatch | None
    problems: tuple[Problem, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    note: str = ""

    def pin_memory(self) -> Loaded:
        return self if self.micro_batch is None else replace(self, micro_batch=self.micro_batch.pin_memory())


@dataclass(frozen=True, slots=True, eq=False)
class _One:
    """What was loaded of one image: (h, w, c); (h, w) of its mask; and where it lies in its file."""

    array: np.ndarray
    mask: np.ndarray | None = None
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Turns tasks into micro-batches; lives in the workers."""

    samples: tuple[Sample, ...]
    pipeline: Pipeline
    max_pixels: int
    seed: int
    skip: bool
    training: bool
    cache: ImageCache | None = None
    mixing: Mixing | None = None
    with_truth: bool = False  # evaluation hands masks on as they are
    held: _HeldImage = field(default_factory=lambda: _HeldImage())

    def __getitem__(self, task: Task) -> Loaded:
        loaded, kept, counts, problems, skipped = [], [], list[int](), [], []
        for place, index in enumerate(task.indices):
            sample = self._sample(index)
            try:
                masks = self.pipeline.masks
                loaded.append(_One(self._load(task, place)) if masks is None else self._load_with_mask(task, place, masks))
                kept.append(index)
                counts += task.num_windows[place : place + 1]
            except DataError as error:
                problems += [_at_row(problem, sample) for problem in error.problems]
                skipped.append((sample.title, error.reason))
        if problems and not self.skip:
            return Loaded(task, None, problems=tuple(problems))
        labels = [self._sample(index).label for index in kept]
        arrays = [one.array for one in loaded]
        if self.mixing and task.partners:
            mixed, labels, unread = self._mix(self.mixing, task, dict(zip(kept, arrays, strict=True)))
            if unread and not self.skip:
                return Loaded(task, None, problems=unread)
            arrays = mixed
        size = self.pipeline.preprocess.image_size
        images = stack(arrays, (*size, self.pipeline.preprocess.in_chans))
        if self.pipeline.masks is not None and self.training:
            targets = stack([one.mask for one in loaded if one.mask is not None], size)
        else:
            targets = _stack_targets(labels)
        indices = tuple(index % len(self.samples) for index in kept)
        batch = MicroBatch(images, targets, indices, task.batch_images, task.closes_batch, task.batch_index, tuple(counts))
        if self.pipeline.masks is not None and not self.training:
            truths = tuple(torch.from_numpy(one.mask) for one in loaded if one.mask is not None)
            batch = replace(batch, places=tuple(one.place for one in loaded if one.place is not None), truths=truths)
        return Loaded(task, batch, skipped=tuple(skipped), note=self.cache.off if self.cache else "")

    def _mix(
        self, mixing: Mixing, task: Task, images: Mapping[int, np.ndarray]
    ) -> tuple[list[np.ndarray], list[Target], tuple[Problem, ...]]:
        """The images mixed with their partners, rows of labels, and why partners cannot be read; who lacks one stays as it is.

        Args:
            images: those of the task that could be read, by index.
        """
        others, problems, mixed, rows = dict(images), list[Problem](), list[np.ndarray](), list[Target]()
        for partner in {*task.partners} - {*task.indices}:
            try:
                others[partner] = self._load_to_train(task, partner)
            except DataError as error:  # in its own micro-batch it is told as skipped
                problems += [_at_row(problem, self._sample(partner)) for problem in error.problems]
        for index, partner in zip(task.indices, task.partners, strict=True):
            if index not in images:
                continue
            array, share = images[index], 1.0
            if partner in others and partner != index:
                array, share = mixing.images(array, others[partner], sample_seed(self.seed, task.epoch, index))
            mixed.append(array)
            rows.append(mixing.label(self._sample(index).label, self._sample(partner).label, share))
        return mixed, rows, tuple(problems)

    def _load_to_train(self, task: Task, index: int) -> np.ndarray:
        seed = sample_seed(self.seed, task.epoch, index)
        return load_sample(self._sample(index), self.pipeline, max_pixels=self.max_pixels, seed=seed, cache=self.cache)

    def _sample(self, index: int) -> Sample:
        return self.samples[index % len(self.samples)]

    def _load(self, task: Task, place: int) -> np.ndarray:
        index, preprocess = task.indices[place], self.pipeline.preprocess
        sample = self._sample(index)
        if self.training:
            return self._load_to_train(task, index)
        if preprocess.fit != "tile":
            load = load_image if self.cache is None else self.cache.load
            return load(sample.path, preprocess, max_pixels=self.max_pixels, region=sample.region)
        image = self.held.open(sample, self.max_pixels, preprocess.background)
        array = load_window(image, preprocess, task.windows[place], sample.path)
        if task.windows[place] + 1 == preprocess.num_windows(*image.size):
            self.held.release()
        return array

    def _load_with_mask(self, task: Task, place: int, masks: Masks) -> _One:
        """An image and its mask: to train on, both alike; in evaluation the mask as its file has it, and where the image lies there."""
        index = task.indices[place]
        sample, preprocess = self._sample(index), self.pipeline.preprocess
        if self.training:
            seed = sample_seed(self.seed, task.epoch, index)
            return _One(*load_pair(sample, self.pipeline, max_pixels=self.max_pixels, seed=seed, cache=self.cache))
        number = task.windows[place] if preprocess.fit == "tile" else 0
        size = self.held.size_of(sample) or image_size(sample, self.max_pixels)
        where = preprocess.place(*size, number)
        truth = self.held.truth(sample, where, masks, self.max_pixels) if self.with_truth else None
        return _One(self._load(task, place), truth, where)

    def num_windows(self, sample: Sample) -> int:
        """Images that stand for a sample in evaluation; 1 where the file cannot be read, which loading will say."""
        if self.pipeline.preprocess.fit != "tile":
            return 1
        try:
            with open_image(sample.path, max_pixels=self.max_pixels, region=sample.region) as image:
                return self.pipeline.preprocess.num_windows(*image.size)
        except DataError:
            return 1

    def value_bytes(self) -> int:
        """Bytes of a value as it travels: floats for a number range and for deep images, as far as some headers tell."""
        if self.pipeline.preprocess.scale.kind == "range" or any_deep_images(self.samples, self.max_pixels):
            return 4
        return 1

    def mask_bytes(self) -> int:
        """Bytes of a mask as it travels: of the model's size, or in evaluation of the whole image's, as far as some headers tell."""
        if self.pipeline.masks is None or not (self.training or self.with_truth):
            return 0
        if self.training or self.pipeline.preprocess.in_windows:
            return math.prod(self.pipeline.preprocess.image_size)
        return most_pixels(self.samples, self.max_pixels)


class _HeldImage:
    """The image whose windows are being read, open between tasks. Never travels to another process."""

    def __init__(self) -> None:
        self._sample: Sample | None = None
        self._image: OpenedImage | None = None
        self._files = ExitStack()
        self._mask: tuple[Sample, np.ndarray] | None = None

    def __reduce__(self) -> tuple[type[_HeldImage], tuple[()]]:
        return _HeldImage, ()

    def open(self, sample: Sample, max_pixels: int, background: tuple[int, int, int]) -> OpenedImage:
        """The image of a sample; opened unless it is the one that is held.

        Raises:
            DataError: it cannot be opened.
        """
        if self._image is None or self._sample != sample:
            self._close()
            opened = open_image(sample.path, max_pixels=max_pixels, background=background, region=sample.region)
            self._sample, self._image = sample, self._files.enter_context(opened)
        return self._image

    def size_of(self, sample: Sample) -> Size | None:
        """(height, width) of the sample, where it is the one that is held."""
        return self._image.size if self._image is not None and self._sample == sample else None

    def truth(self, sample: Sample, where: Place, masks: Masks, max_pixels: int) -> np.ndarray:
        """(h, w) uint8 class numbers of the part of the image, at its own size; the mask is read once for all windows in turn.

        Raises:
            DataError: the mask cannot be read, or is of another size.
        """
        if where.part == whole(where.size):
            return read_mask(sample, masks, where.size, max_pixels=max_pixels)
        if self._mask is None or self._mask[0] != sample:
            self._mask = sample, read_mask(sample, masks, where.size, max_pixels=max_pixels)
        return np.ascontiguousarray(self._mask[1][where.part.slices])

    def release(self) -> None:
        """Closes the file and lets the pixels go, those of a mask as well."""
        self._close()
        self._mask = None

    def _close(self) -> None:
        self._sample = self._image = None
        self._files.close()


def load_sample(sample: Sample, pipeline: Pipeline, *, max_pixels: int, seed: int, cache: ImageCache | None = None) -> np.ndarray:
    """What training sees of a sample: (h, w, channels), decoded, preprocessed, augmented. The same seed gives the same bits anywhere.

    Args:
        cache: of what is the same each time; windows are not.

    Raises:
        DataError: with the path and the reason.
    """
    if cache is None or pipeline.preprocess.in_windows:
        array = load_image(sample.path, pipeline.preprocess, max_pixels=max_pixels, region=sample.region, seed=seed)
    else:
        array = cache.load(sample.path, pipeline.preprocess, max_pixels=max_pixels, region=sample.region)
    if pipeline.augment is None:
        return array
    with _blaming_augmentation(sample):
        return pipeline.augment(array, seed)


def load_pair(
    sample: Sample, pipeline: Pipeline, *, max_pixels: int, seed: int, cache: ImageCache | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """What training sees of a sample with a mask: the image as by `load_sample`, and (h, w) uint8 class numbers, moved alike.

    Raises:
        DataError: with the path and the reason.
    """
    assert pipeline.masks is not None
    preprocess = pipeline.preprocess
    size = image_size(sample, max_pixels)
    window = preprocess.random_window(*size, seed) if preprocess.in_windows else whole(size)
    mask = preprocess.fit_mask(read_mask(sample, pipeline.masks, size, max_pixels=max_pixels, window=window), IGNORED)
    array = load_sample(sample, replace(pipeline, augment=None), max_pixels=max_pixels, seed=seed, cache=cache)
    if pipeline.augment is None:
        return array, mask
    with _blaming_augmentation(sample):
        return pipeline.augment.with_mask(array, mask, seed)


def image_size(sample: Sample, max_pixels: int) -> Size:
    """(height, width) as shown, by the header.

    Raises:
        DataError: it cannot be read.
    """
    with open_image(sample.path, max_pixels=max_pixels, region=sample.region) as image:
        return image.size


def read_mask(sample: Sample, masks: Masks, size: Size, *, max_pixels: int, window: Region | None = None) -> np.ndarray:
    """(height, width) uint8 class numbers of an image of this size, or of a window of it; of the first class alone where there is no file.

    Raises:
        DataError: the mask cannot be read, or is of another size; at the image's path.
    """
    if sample.mask is None:
        return np.zeros(size if window is None else window.size, np.uint8)
    try:
        if (text := size_problem(mask_size(sample.mask, max_pixels=max_pixels), size)) is not None:
            raise DataError([Problem(text, str(sample.mask))])
        return masks.read(sample.mask, max_pixels=max_pixels, window=window)
    except DataError as error:
        raise of_the_mask(error, sample.path) from error


@contextmanager
def _blaming_augmentation(sample: Sample) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, cv2.error) as error:
        raise DataError([Problem(f"augmentation fails on it: {error}", str(sample.path), "data.augment")]) from error


def _at_row(problem: Problem, sample: Sample) -> Problem:
    """The problem of a file at the place that people look it up: the table's row, with the path."""
    if sample.row == str(sample.path):
        return problem
    return Problem(f"{sample.path} {problem.message}", sample.row, problem.key)


def _stack_targets(labels: Sequence[Target]) -> Tensor:
    """One tensor; values stay as exact as their table has them."""
    if labels and isinstance(labels[0], tuple):
        return torch.tensor(labels, dtype=torch.float64)
    return torch.tensor([_NO_LABEL if label is None else label for label in labels], dtype=torch.int64)


def stack(arrays: Sequence[np.ndarray], shape: tuple[int, ...]) -> Tensor:
    """One tensor, in a worker at once in the memory that the main process reads; 8-bit images join others as floats."""
    if len({array.dtype for array in arrays}) > 1:
        arrays = [as_floats(array) for array in arrays]
    return default_collate([torch.from_numpy(array) for array in arrays]) if arrays else torch.empty((0, *shape), dtype=torch.uint8)
