"""Batches in a fixed order: what a step sees depends on (seed, epoch, batch) alone, not on workers, start method or resume.

A batch of the optimizer is cut into micro-batches of nearly equal size (`part_sizes`), and each micro-batch is decoded as one task in
one worker process (or here, with workers=0). The order and every sample's seed are drawn in the main process and travel with the task,
so worker processes hold no random state. Images travel as bytes, channels last; the device makes numbers of them
(`contract.make_prepare`).
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from hiresvis.data.micro_batch import ImageSource, Loaded, MicroBatch, Task, stack
from hiresvis.data.sources import Sample
from hiresvis.data.transforms import Pipeline, Preprocess
from hiresvis.errors import DataError, EnvironmentFailed
from hiresvis.units import format_size

PREFETCH = 2  # micro-batches ready or in work per worker; more hides nothing and holds memory


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
        seed: of order and augmentation.
        workers: processes; 0 decodes here. An epoch whose images do not fit into /dev/shm gets fewer, which `notes` tells.
        bad_images: "error" or "skip".
        pin: page-locked memory, for GPUs.
        start_method: fork, spawn or forkserver; None: the platform's own.
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
        workers: int = 0,
        bad_images: str = "error",
        pin: bool = False,
        start_method: str | None = None,
    ) -> None:
        assert bad_images in ("error", "skip"), bad_images
        assert batch >= 1, batch
        self.samples = tuple(samples)
        self.batch = batch
        self._least = min(least, batch)
        self.skipped: list[tuple[str, str]] = []
        self._seed = seed
        self._skip = bad_images == "skip"
        self._epoch, self._first_batch = 0, 0
        self.set_micro_batch(micro_batch)
        source = ImageSource(self.samples, pipeline, max_pixels, seed, self._skip, training=True)
        self._engine = _Engine(source, workers=workers, pin=pin, start_method=start_method, persistent=True)

    def __len__(self) -> int:
        return len(batch_sizes(len(self.samples), self.batch, self._least))

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Chooses the epoch that the next iteration gives, from `first_batch` on (resume inside an epoch)."""
        self._epoch, self._first_batch = epoch, first_batch

    def set_micro_batch(self, micro_batch: int) -> None:
        """Changes the size of the parts; batches, order and seeds stay as they are."""
        assert micro_batch >= 1, micro_batch
        self.micro_batch = micro_batch

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
        """Lines for people: fewer workers than were asked for, and why."""
        return self._engine.notes

    def _tasks(self) -> list[Task]:
        order = np.random.default_rng(np.random.SeedSequence([self._seed, self._epoch])).permutation(len(self.samples))
        tasks, start = [], 0
        for number, size in enumerate(batch_sizes(len(self.samples), self.batch, self._least)):
            parts = part_sizes(size, self.micro_batch)
            for position, count in enumerate(parts):
                if number >= self._first_batch:
                    members = tuple(int(index) for index in order[start : start + count])
                    tasks.append(Task(self._epoch, number, members, size, position == len(parts) - 1))
                start += count
        return tasks

    def _whole_batches(self, results: Iterator[Loaded]) -> Iterator[MicroBatch]:
        known = {path for path, _ in self.skipped}
        parts: list[MicroBatch] = []
        for result in results:
            self.skipped += [(path, reason) for path, reason in result.skipped if path not in known]
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
    ) -> None:
        assert bad_images in ("error", "skip"), bad_images
        self.samples = tuple(samples)
        self.skipped: list[tuple[str, str]] = []
        self.set_batch(batch)
        self._source = ImageSource(self.samples, Pipeline(preprocess), max_pixels, 0, bad_images == "skip", training=False)
        self._windows: tuple[int, ...] | None = None
        self._iteration = 0
        self._engine = _Engine(self._source, workers=workers, pin=pin, start_method=start_method, persistent=False)

    def __len__(self) -> int:
        return -(-sum(self._num_windows()) // self.batch)

    def set_batch(self, batch: int) -> None:
        """Changes the batch (evaluation ran out of memory); results do not depend on it."""
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


@dataclass(slots=True)
class _TaskSampler(Sampler[Task]):
    """Hands the tasks of the current epoch to torch's loader, which keeps its workers from epoch to epoch."""

    tasks: list[Task] = field(default_factory=list)

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)


class _Engine:
    """torch's DataLoader over tasks."""

    def __init__(self, source: ImageSource, *, workers: int, pin: bool, start_method: str | None, persistent: bool) -> None:
        self.workers, self.notes = workers, list[str]()
        self._source = source
        self._pin, self._start_method, self._persistent = pin, start_method, persistent
        self._value_bytes: int | None = None
        self._sampler = _TaskSampler()
        self._loader = self._make_loader()

    def _make_loader(self) -> DataLoader[Loaded]:
        options: dict[str, Any] = {}
        if self.workers:
            options = {"prefetch_factor": PREFETCH, "persistent_workers": self._persistent, "multiprocessing_context": self._start_method}
        with _no_advice_on_workers():
            return DataLoader(
                self._source,  # type: ignore[arg-type]
                sampler=self._sampler,
                batch_size=None,
                num_workers=self.workers,
                collate_fn=_identity,
                pin_memory=self._pin,
                worker_init_fn=_start_worker,
                generator=torch.Generator(),  # torch draws a base seed an epoch from it, instead of from the global state that runs record
                **options,
            )

    def _keep_within_shared_memory(self, tasks: list[Task]) -> None:
        """Fewer workers where these tasks would fill /dev/shm: a worker that finds it full fails in mid epoch."""
        preprocess = self._source.pipeline.preprocess
        if not self.workers:
            return
        if self._value_bytes is None:
            self._value_bytes = self._source.value_bytes()
        values = max((len(task.indices) for task in tasks), default=0) * math.prod(preprocess.image_size) * preprocess.in_chans
        micro_batch_bytes = values * self._value_bytes
        possible, why = _workers_within(self.workers, micro_batch_bytes, shared_memory_free_bytes())
        if possible < self.workers:
            self.close()
            self.notes.append(f"data.workers lowered from {self.workers} to {possible}: {why}")
            self.workers = possible
            self._loader = self._make_loader()

    def run(self, tasks: list[Task]) -> Iterator[Loaded]:
        """The results in the order of the tasks.

        Raises:
            DataError: a file, in the main process.
            EnvironmentFailed: a worker process died; names the files it may have been at.
        """
        self._keep_within_shared_memory(tasks)
        self._sampler.tasks = tasks
        with _no_advice_on_workers(), _child_signals_kept():
            results = iter(self._loader)
        for task in tasks:
            try:
                result = next(results)
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                raise EnvironmentFailed(self._death_notice(task, results)) from error
            assert result.task == task
            if result.problems:
                raise DataError(result.problems)
            yield result

    def close(self) -> None:
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None

    def _death_notice(self, task: Task, results: Any) -> str:
        paths = list(dict.fromkeys(self._source.samples[index].title for index in task.indices))
        files = ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
        codes = [code for worker in getattr(results, "_workers", ()) if (code := worker.exitcode) not in (None, 0)]
        cause = ", ".join(signal.Signals(-code).name if code < 0 else f"exit code {code}" for code in codes) or "no exit code"
        return (
            f"A worker process of the loader died ({cause}). The batch waited for was {task.batch_index} of epoch {task.epoch}: {files}. "
            "SIGKILL mostly means out of memory, SIGBUS a full /dev/shm: lower data.workers; with 0 an error shows itself."
        )


@contextmanager
def _child_signals_kept() -> Iterator[None]:
    """torch installs a SIGCHLD handler that raises in the main thread at whatever line it is when a worker dies, the optimizer's step
    included. Without it, the death shows where it belongs: at the next batch that does not come, within five seconds."""
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) is not handler:
        signal.signal(signal.SIGCHLD, handler)


@contextmanager
def _no_advice_on_workers() -> Iterator[None]:
    """torch warns of more workers than cores each time; a number that the user gave is the user's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        yield


def _identity(result: Loaded) -> Loaded:
    return result


def _start_worker(worker: int) -> None:
    """Ctrl-C reaches the whole process group, and the main process decides what it means; SIGTERM ends a worker, whatever the main
    process does with its own."""
    del worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    cv2.setNumThreads(0)


def shared_memory_free_bytes() -> int | None:
    """Free bytes of /dev/shm, through which workers hand over images; None where there is none."""
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None


def auto_workers(num_cpus: int, *, on_gpu: bool, micro_batch_bytes: int, shm_free_bytes: int | None = None) -> tuple[int, str]:
    """How many loader processes, and why.

    Args:
        num_cpus: that this process may use.
        on_gpu: training runs on a GPU. On the CPU the model takes the cores itself, and decoding beside it gains little.
        micro_batch_bytes: of one micro-batch of images as it travels.
        shm_free_bytes: free shared memory, None where it is no limit.
    """
    if on_gpu:
        wanted = max(1, min(8, num_cpus - 1))
        why = f"{num_cpus} cores, one left for the training loop, 8 at most"
    else:
        wanted = min(2, num_cpus // 4)
        why = f"the model itself uses the {num_cpus} cores" + (f"; {wanted} decode beside it" if wanted else "")
    possible, reason = _workers_within(wanted, micro_batch_bytes, shm_free_bytes)
    return possible, reason or why


def _workers_within(wanted: int, micro_batch_bytes: int, shm_free_bytes: int | None) -> tuple[int, str]:
    """As many of the wanted processes as free shared memory takes, and why they are fewer, if they are."""
    each = (PREFETCH + 1) * micro_batch_bytes
    possible = wanted if shm_free_bytes is None else min(wanted, int(0.8 * shm_free_bytes) // max(1, each))
    if possible == wanted:
        return wanted, ""
    assert shm_free_bytes is not None
    return possible, f"/dev/shm has {format_size(shm_free_bytes)} free and a worker needs {format_size(each)} of it; {wanted} would not fit"
