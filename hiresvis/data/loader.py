"""Batches in a fixed order: what a step sees depends on (seed, epoch, batch) alone, not on workers, start method or resume.

A batch of the optimizer is cut into micro-batches of nearly equal size (`part_sizes`), and each micro-batch is decoded as one task in
one worker process (or here, with workers=0). The order and every sample's seed are drawn in the main process and travel with the task,
so worker processes hold no random state. Images travel as bytes, channels last; the device makes numbers of them
(`contract.make_prepare`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hiresvis.data.balance import balanced_order
from hiresvis.data.cache import ImageCache
from hiresvis.data.contract import Contract
from hiresvis.data.masks import Masks
from hiresvis.data.micro_batch import ImageSource, Loaded, MicroBatch, Task, stack
from hiresvis.data.mixing import Mixing
from hiresvis.data.sources import Sample
from hiresvis.data.transforms import Pipeline, Preprocess
from hiresvis.data.workers import Engine


def batch_sizes(num_samples: int, batch: int, least: int = 1) -> tuple[int, ...]:
    """Images of each batch of an epoch. The last one has what is left; where that is less than `least`, the last two share theirs.

    >>> batch_sizes(11, 4), batch_sizes(9, 4), batch_sizes(9, 4, 2)
    ((4, 4, 3), (4, 4, 1), (4, 3, 2))
    """
    sizes = [min(batch, num_samples - start) for start in range(0, num_samples, batch)]
    if len(sizes) > 1 and sizes[-1] < least:
        both = sizes[-2] + sizes[-1]
        sizes[-2:] = [both - both // 2, both // 2]
    return tuple(sizes)


def part_sizes(images: int, micro_batch: int) -> tuple[int, ...]:
    """Images of each micro-batch of a batch: as few parts as there have to be, as even as can be.

    >>> part_sizes(9, 8), part_sizes(7, 3)
    ((5, 4), (3, 2, 2))
    """
    parts = -(-images // micro_batch)
    return tuple(images // parts + (position < images % parts) for position in range(parts))


class TrainLoader:
    """Seeded, shuffled micro-batches of one epoch after another.

    `len()` is the number of batches in a whole epoch; the last, smaller batch is kept (see `batch_sizes`). With bad_images="skip" an
    unreadable file is left out and listed in `skipped`: its batch is smaller by one and nothing takes its place. All parts of a batch are
    then held until the last is decoded, because the true size of the batch has to be known at its first part. A batch without one readable
    image (or with fewer than `least`) comes as one empty micro-batch (no indices, batch_images 0), so that batches keep their numbers.

    Args:
        samples: with labels.
        pipeline: preprocessing and augmentation.
        max_pixels: larger images are refused.
        batch: images a step of the optimizer sees.
        micro_batch: the most images in one part.
        least: the fewest that a part should have (batch statistics need more than one image); kept wherever batch and micro_batch allow.
        balanced: an epoch has as many images of each class, large ones in part and small ones several times (`balance.balanced_order`).
        seed: of order and augmentation.
        workers: processes; 0 decodes here. An epoch whose images do not fit into /dev/shm gets fewer, which `notes` tells.
        bad_images: "error" or "skip".
        pin: page-locked memory, for GPUs.
        start_method: fork, spawn or forkserver; None: the platform's own.
        cache: where decoded images are kept; None: they are decoded each time.
        mixing: of images within a batch, and of their labels; None or empty: none.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        pipeline: Pipeline,
        *,
        max_pixels: int,
        batch: int,
        micro_batch: int,
        seed: int,
        least: int = 1,
        balanced: bool = False,
        workers: int = 0,
        bad_images: str = "error",
        pin: bool = False,
        start_method: str | None = None,
        cache: ImageCache | None = None,
        mixing: Mixing | None = None,
    ) -> None:
        assert bad_images in ("error", "skip"), bad_images
        assert batch >= 1, batch
        self._mixes = bool(mixing)
        self.samples = tuple(samples)
        self.batch = batch
        self._least = min(least, batch)
        self._labels = np.array([sample.label for sample in self.samples]) if balanced else None
        self.skipped: list[tuple[str, str]] = []
        self._seed = seed
        self._skip = bad_images == "skip"
        self._epoch, self._first_batch = 0, 0
        self.set_micro_batch(micro_batch)
        self._source = ImageSource(self.samples, pipeline, max_pixels, seed, self._skip, training=True, cache=cache, mixing=mixing)
        self._workers, self._pin, self._start_method = workers, pin, start_method
        self._engine = self._make_engine()

    def __len__(self) -> int:
        return len(batch_sizes(len(self.samples), self.batch, self._least))

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Chooses the epoch that the next iteration gives, from `first_batch` on (resume inside an epoch)."""
        self._epoch, self._first_batch = epoch, first_batch

    def set_micro_batch(self, micro_batch: int) -> None:
        """Changes the size of the parts; batches, order and seeds stay as they are."""
        assert micro_batch >= 1, micro_batch
        self.micro_batch = micro_batch

    def set_pipeline(self, pipeline: Pipeline) -> None:
        """Images of another size from the next iteration on; order and seeds stay. Workers hold the old one, and end."""
        self._engine.close()
        self._source = replace(self._source, pipeline=pipeline)
        self._engine = self._make_engine()

    def __iter__(self) -> Iterator[MicroBatch]:
        """The epoch's micro-batches.

        Raises:
            DataError: an unreadable file, with path and row (bad_images="error").
            EnvironmentFailed: a worker process died.
        """
        results = self._engine.run(self._tasks())
        return self._whole_batches(results) if self._skip else (result.micro_batch for result in results if result.micro_batch is not None)

    def close(self) -> None:
        """Ends the worker processes."""
        self._engine.close()

    @property
    def notes(self) -> list[str]:
        """Lines for people: fewer workers than were asked for, a cache that was turned off, and why."""
        return self._engine.notes

    def _make_engine(self) -> Engine:
        return Engine(self._source, workers=self._workers, pin=self._pin, start_method=self._start_method, persistent=True)

    def _tasks(self) -> list[Task]:
        rng = np.random.default_rng(np.random.SeedSequence([self._seed, self._epoch]))
        order = rng.permutation(len(self.samples)) if self._labels is None else balanced_order(self._labels, rng)
        tasks, start = [], 0
        for number, size in enumerate(batch_sizes(len(self.samples), self.batch, self._least)):
            parts, first = part_sizes(size, self.micro_batch), start
            for position, count in enumerate(parts):
                if number >= self._first_batch:
                    members = tuple(int(index) for index in order[start : start + count])
                    partners = tuple(int(order[first + (at - 1) % size]) for at in range(start - first, start - first + count))
                    task = Task(self._epoch, number, members, size, position == len(parts) - 1)
                    tasks.append(replace(task, partners=partners) if self._mixes else task)
                start += count
        return tasks

    def _whole_batches(self, results: Iterator[Loaded]) -> Iterator[MicroBatch]:
        known = {path for path, _ in self.skipped}
        parts: list[MicroBatch] = []
        for result in results:
            for path, reason in result.skipped:
                if path not in known:  # in a balanced epoch it may come again
                    known.add(path)
                    self.skipped.append((path, reason))
            if result.micro_batch is not None:
                parts.append(result.micro_batch)
            if result.task.closes_batch:
                parts = self._recut(parts)
                present = sum(len(part.indices) for part in parts)
                while parts:
                    part = parts.pop(0)
                    yield replace(part, batch_images=present, closes_batch=not parts)

    def _recut(self, parts: list[MicroBatch]) -> list[MicroBatch]:
        """The parts of a batch without those that lost every image; cut anew where one has fewer than `least` left."""
        kept, least = [part for part in parts if part.indices], min(self._least, self.micro_batch)
        if all(len(part.indices) >= least for part in kept):
            return kept or parts[:1]
        first, shape = parts[0], tuple(parts[0].images.shape[1:])
        arrays = [image for part in kept for image in part.images.numpy()]
        targets = torch.cat([part.targets for part in kept])
        indices = [index for part in kept for index in part.indices]
        if len(indices) < least:
            arrays, targets, indices = [], targets[:0], []
        cut: list[MicroBatch] = []
        start = 0
        for count in part_sizes(len(indices), self.micro_batch) or (0,):
            chosen = slice(start, start + count)
            images = stack(arrays[chosen], shape)
            cut.append(replace(first, images=images, targets=targets[chosen].clone(), indices=tuple(indices[chosen])))
            start += count
        return cut


class EvalLoader:
    """All samples once, in their order, without augmentation. Each item is a batch of its own.

    Unreadable files are errors; with bad_images="skip" (for prediction alone) each is missing from its batch, which may then be empty, and
    is listed in `skipped` as (title, reason) when its batch comes, in windows once for each that could not be read.

    With fit "tile" a sample is as many images as it has windows, one after another and across items (`train.joining` brings them
    together), and the batch counts windows. Held at once are the batches on their way, and in each process that loads one open image: of
    a tiled TIFF its file, of anything else its pixels, decoded once there however many batches its windows fill.

    With `masks` (segment) each item tells where its images lie in their files, and, `with_truth`, what the masks say there.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        preprocess: Preprocess,
        *,
        max_pixels: int,
        batch: int,
        workers: int = 0,
        bad_images: str = "error",
        pin: bool = False,
        start_method: str | None = None,
        cache: ImageCache | None = None,
        masks: Masks | None = None,
        with_truth: bool = True,
    ) -> None:
        assert bad_images in ("error", "skip"), bad_images
        self.samples = tuple(samples)
        self.skipped: list[tuple[str, str]] = []
        self.set_batch(batch)
        pipeline, skip = Pipeline(preprocess, masks=masks), bad_images == "skip"
        self._source = ImageSource(self.samples, pipeline, max_pixels, 0, skip, training=False, cache=cache, with_truth=with_truth)
        self._windows: tuple[int, ...] | None = None
        self._iteration = 0
        self._engine = Engine(self._source, workers=workers, pin=pin, start_method=start_method, persistent=False)

    @classmethod
    def by(cls, contract: Contract, samples: Sequence[Sample], **options: Any) -> EvalLoader:
        """Samples read as a contract says; the options are those of the class besides."""
        return cls(samples, contract.preprocess(), max_pixels=contract.max_pixels, masks=contract.masks(), **options)

    def __len__(self) -> int:
        return -(-sum(self._num_windows()) // self.batch)

    def set_batch(self, batch: int) -> None:
        """Changes the batch (evaluation ran out of memory); results then differ by rounding, for kernels may sum in another order."""
        assert batch >= 1, batch
        self.batch = batch

    def __iter__(self) -> Iterator[MicroBatch]:
        """As `TrainLoader`."""
        self._iteration += 1
        mine = self._iteration
        self._source.held.release()
        self.skipped.clear()
        try:
            for result in self._engine.run(self._tasks()):
                self.skipped += result.skipped
                if result.micro_batch is not None:
                    yield result.micro_batch
        finally:
            if mine == self._iteration:  # one that was left early may be closed late, when another has begun
                self._source.held.release()

    def close(self) -> None:
        """Ends the worker processes."""
        self._engine.close()

    @property
    def notes(self) -> list[str]:
        """As `TrainLoader`."""
        return self._engine.notes

    def _num_windows(self) -> tuple[int, ...]:
        """Of each sample; known from the headers, which are read once."""
        if self._windows is None:
            self._windows = tuple(map(self._source.num_windows, self.samples))
        return self._windows

    def _tasks(self) -> list[Task]:
        counts = self._num_windows()
        rows = [(index, number) for index, count in enumerate(counts) for number in range(count)]
        tasks = []
        for place, start in enumerate(range(0, len(rows), self.batch)):
            indices, windows = zip(*rows[start : start + self.batch], strict=True)
            totals = tuple(counts[index] for index in indices) if len(rows) > len(counts) else ()
            tasks.append(Task(0, place, indices, len(indices), True, windows, totals))
        return tasks
