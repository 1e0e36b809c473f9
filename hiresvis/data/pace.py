"""How fast images come from disk, and what follows: how many processes read them, and whether copies are worth their space."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import cv2
import numpy as np

from hiresvis.data.augment import Augment
from hiresvis.data.cache import KEPT_FREE_BYTES, from_entry, to_entry
from hiresvis.data.contract import load_image
from hiresvis.data.sources import Sample
from hiresvis.data.transforms import Preprocess
from hiresvis.data.workers import workers_within
from hiresvis.errors import DataError
from hiresvis.units import GIB, MIB, format_size

_SAMPLES = 5  # that are timed
_SPARE = 1.3  # processes share caches and memory with each other and with the training loop
_MOST_UNMEASURED = 8
_QUICK_SECONDS = 0.002  # what is decoded within this is no one's bottleneck
_TIMES_AS_FAST = 3  # a copy has to be read, to be worth its space
_PACKS_WELL = 4  # times smaller: then packed copies are as quick as plain ones, for less has to be read
_SHARE_OF_FREE = 4  # the cache takes this part of what is free
_LEAST_SHARE = 0.1  # of the images that have to fit


@dataclass(frozen=True, slots=True)
class Copy:
    """One image as the cache would hold it: its size, and the time that reading takes once the bytes are in memory."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Pace:
    """Medians over a few images.

    Attributes:
        load_seconds: from the file to what `load_image` gives, on one core.
        plain, packed: the copy that the cache would keep.
        image: one of them, (h, w, c).
    """

    load_seconds: float
    plain: Copy
    packed: Copy
    image: np.ndarray


def measure(samples: Sequence[Sample], preprocess: Preprocess, *, max_pixels: int) -> Pace | None:
    """Times a few images from all over the samples; None where none of them can be read."""
    chosen = [samples[position * len(samples) // _SAMPLES] for position in range(min(_SAMPLES, len(samples)))]
    loads, image = list[float](), None
    copies: dict[bool, list[Copy]] = {False: [], True: []}
    with _one_thread():
        for sample in chosen:
            began = time.perf_counter()
            try:
                image = load_image(sample.path, preprocess, max_pixels=max_pixels, region=sample.region, seed=0)
            except DataError:
                continue
            loads.append(time.perf_counter() - began)
            for packed, found in copies.items():
                found.append(_copy(image, packed))
    if image is None:
        return None
    return Pace(statistics.median(loads), _median(copies[False]), _median(copies[True]), image)


def _copy(image: np.ndarray, packed: bool) -> Copy:
    data = np.frombuffer(b"".join(to_entry(image, "", packed=packed)), np.uint8)
    return Copy(len(data), _seconds(lambda: from_entry(data.copy(), "")))


def _median(copies: Sequence[Copy]) -> Copy:
    return Copy(int(statistics.median(copy.num_bytes for copy in copies)), statistics.median(copy.seconds for copy in copies))


def augment_seconds(augment: Augment | None, image: np.ndarray) -> float:
    """Of one image, on one core; the mean over different seeds, since not every step is applied each time."""
    if augment is None:
        return 0.0
    with _one_thread():
        return statistics.mean(_seconds(partial(augment, image, seed)) for seed in range(2 * _SAMPLES))


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


class _one_thread:
    """opencv as it runs in a worker."""

    def __enter__(self) -> None:
        self.threads = cv2.getNumThreads()
        cv2.setNumThreads(0)

    def __exit__(self, *_: object) -> None:
        cv2.setNumThreads(self.threads)


def auto_workers(
    num_cpus: int,
    *,
    on_gpu: bool,
    micro_batch_bytes: int,
    sample_seconds: float | None = None,
    step_seconds: float | None = None,
    shm_free_bytes: int | None = None,
) -> tuple[int, str]:
    """How many loader processes, and why: as many as keep the device busy, where the cores are there.

    Args:
        num_cpus: that this process may use.
        on_gpu: training runs on a GPU. On the CPU the model takes the cores itself, and decoding beside it gains little.
        micro_batch_bytes: of one micro-batch of images as it travels.
        sample_seconds: that one image takes to load and augment, step_seconds: to train on; None: not measured.
        shm_free_bytes: free shared memory, None where it is no limit.
    """
    most = max(1, num_cpus - 1) if on_gpu else min(2, num_cpus // 4)
    limit = f"{num_cpus} cores, one left for the training loop" if on_gpu else f"the model itself uses the {num_cpus} cores"
    if not sample_seconds or not step_seconds:
        wanted, why = min(most, _MOST_UNMEASURED), limit
    else:
        needed = max(1, math.ceil(_SPARE * sample_seconds / step_seconds))
        wanted = min(most, needed)
        why = f"an image takes {_ms(sample_seconds)} to load and augment and {_ms(step_seconds)} to train on: {needed} would keep up"
        why += f"; {limit}" if needed > most else ""
    possible, reason = workers_within(wanted, micro_batch_bytes, shm_free_bytes)
    return possible, reason or why


def choose_packed(pace: Pace, num_images: int, cap_bytes: int) -> bool:
    """Whether copies are packed: where that makes them all fit, or them that small."""
    return num_images * pace.plain.num_bytes > cap_bytes or pace.packed.num_bytes * _PACKS_WELL <= pace.plain.num_bytes


def auto_cache(pace: Pace | None, num_images: int, free_bytes: int) -> tuple[int, str]:
    """The most that copies may take (0: none are kept), and why.

    Args:
        free_bytes: of the disk, with what the cache holds already.
    """
    if pace is None:
        return 0, "off: no image could be read to tell what copies are worth"
    if pace.load_seconds < _QUICK_SECONDS:
        return 0, f"off: an image is decoded within {_ms(_QUICK_SECONDS)}"
    cap = max(0, min(free_bytes // _SHARE_OF_FREE, free_bytes - KEPT_FREE_BYTES))
    cap -= cap % (GIB if cap >= GIB else MIB)
    packed = choose_packed(pace, num_images, cap)
    copy = pace.packed if packed else pace.plain
    times = f"{_ms(pace.load_seconds)} to decode, {_ms(copy.seconds)} to read back"
    if pace.load_seconds < _TIMES_AS_FAST * copy.seconds:
        return 0, f"off: an image takes {times}"
    total = num_images * copy.num_bytes
    if cap < _LEAST_SHARE * total:
        return 0, f"off: copies of {num_images:,} images take {format_size(total)}, and the disk has {format_size(free_bytes)} free"
    kind = "packed images" if packed else "images"
    held = f"{format_size(total)} of {format_size(cap)}" if total <= cap else f"{cap / total:.0%} of them in {format_size(cap)}"
    return cap, f"on: {num_images:,} {kind} of {format_size(copy.num_bytes)}, {held}; {times}"


def _ms(seconds: float) -> str:
    """Milliseconds, to two digits.

    >>> _ms(0.00123), _ms(0.1234)
    ('1.2 ms', '123 ms')
    """
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"
