"""The processes that read images: tasks go in, micro-batches come out in the order of the tasks, with the same bits for any number."""

from __future__ import annotations

import math
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import parent_process
from multiprocessing.connection import wait
from typing import Any

import cv2
import torch
from torch.utils.data import DataLoader, Sampler

from hiresvis.data.micro_batch import ImageSource, Loaded, Task
from hiresvis.errors import DataError, EnvironmentFailed
from hiresvis.units import format_size

PREFETCH = 2  # micro-batches ready or in work per worker; more hides nothing and holds memory


@dataclass(slots=True)
class _TaskSampler(Sampler[Task]):
    """Hands the tasks of the current epoch to torch's loader, which keeps its workers from epoch to epoch."""

    tasks: list[Task] = field(default_factory=list)

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)


class Engine:
    """torch's DataLoader over tasks."""

    def __init__(self, source: ImageSource, *, workers: int, pin: bool, start_method: str | None, persistent: bool) -> None:
        self.workers, self.notes = workers, list[str]()
        self._source = source
        self._pin, self._start_method, self._persistent = pin, start_method, persistent
        self._image_bytes: int | None = None
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
        if not self.workers:
            return
        if self._image_bytes is None:
            preprocess = self._source.pipeline.preprocess
            values = math.prod(preprocess.image_size) * preprocess.in_chans
            self._image_bytes = values * self._source.value_bytes() + self._source.mask_bytes()
        micro_batch_bytes = max((len(task.indices) for task in tasks), default=0) * self._image_bytes
        possible, why = workers_within(self.workers, micro_batch_bytes, shared_memory_free_bytes())
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
            if result.note and result.note not in self.notes:
                self.notes.append(result.note)
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
    threading.Thread(target=_end_with_main, daemon=True).start()


def _end_with_main() -> None:
    """Ends this process once the main one is gone, however it went. torch's own watch compares the parent's number with the one at its
    start, and a main process that was killed before that would leave workers for good."""
    main = parent_process()
    assert main is not None
    wait([main.sentinel])
    os._exit(1)


def shared_memory_free_bytes() -> int | None:
    """Free bytes of /dev/shm, through which workers hand over images; None where there is none."""
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None


def workers_within(wanted: int, micro_batch_bytes: int, shm_free_bytes: int | None) -> tuple[int, str]:
    """As many of the wanted processes as free shared memory takes, and why they are fewer, if they are."""
    each = (PREFETCH + 1) * micro_batch_bytes
    possible = wanted if shm_free_bytes is None else min(wanted, int(0.8 * shm_free_bytes) // max(1, each))
    if possible == wanted:
        return wanted, ""
    assert shm_free_bytes is not None
    return possible, f"/dev/shm has {format_size(shm_free_bytes)} free and a worker needs {format_size(each)} of it; {wanted} would not fit"
