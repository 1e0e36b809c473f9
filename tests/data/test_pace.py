"""Workers and copies follow from what was measured, and say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from hiresvis.data.augment import make_augment
from hiresvis.data.contract import load_image
from hiresvis.data.pace import Copy, Pace, augment_seconds, auto_cache, auto_workers, choose_packed, measure
from hiresvis.data.sources import Sample
from hiresvis.data.transforms import Preprocess
from hiresvis.units import GIB, MIB

IMAGE = np.zeros((2, 2, 3), np.uint8)


def pace(load_ms: float = 100, plain: tuple[float, float] = (3, 1), packed: tuple[float, float] = (2, 4)) -> Pace:
    """Sizes in MiB, times in milliseconds."""
    copies = (Copy(int(size * MIB), ms / 1e3) for size, ms in (plain, packed))
    return Pace(load_ms / 1e3, *copies, IMAGE)


class TestWorkers:
    @pytest.mark.parametrize(
        ("arguments", "workers", "words"),
        [
            # not measured: by the cores
            ({"num_cpus": 16, "on_gpu": True}, 8, "16 cores"),
            ({"num_cpus": 2, "on_gpu": True}, 1, "2 cores"),
            ({"num_cpus": 2, "on_gpu": False}, 0, "the model itself uses the 2 cores"),
            # measured: 110 ms to load against 50 ms of training, a third to spare
            ({"num_cpus": 16, "on_gpu": True, "sample_seconds": 0.11, "step_seconds": 0.05}, 3, "110 ms to load and augment and 50 ms"),
            ({"num_cpus": 64, "on_gpu": True, "sample_seconds": 0.11, "step_seconds": 0.01}, 15, "15 would keep up"),
            ({"num_cpus": 8, "on_gpu": True, "sample_seconds": 0.11, "step_seconds": 0.01}, 7, "15 would keep up; 8 cores, one left"),
            ({"num_cpus": 16, "on_gpu": True, "sample_seconds": 0.002, "step_seconds": 0.4}, 1, "1 would keep up"),
            # on the CPU the model takes the cores, however slow decoding is
            ({"num_cpus": 2, "on_gpu": False, "sample_seconds": 0.1, "step_seconds": 0.01}, 0, "the model itself uses the 2 cores"),
            ({"num_cpus": 16, "on_gpu": False, "sample_seconds": 0.1, "step_seconds": 0.01}, 2, "13 would keep up; the model itself"),
            ({"num_cpus": 16, "on_gpu": False, "sample_seconds": 0.1, "step_seconds": 4.0}, 1, "1 would keep up"),
            # /dev/shm is the last word
            ({"num_cpus": 16, "on_gpu": True, "micro_batch_bytes": 10**7, "shm_free_bytes": 64 * MIB}, 1, "/dev/shm has 64.0 MiB"),
            ({"num_cpus": 16, "on_gpu": True, "micro_batch_bytes": 10**8, "shm_free_bytes": 64 * MIB}, 0, "/dev/shm"),
        ],
    )
    def test_number_of_workers_comes_with_its_reason(self, arguments: dict[str, Any], workers: int, words: str) -> None:
        """What an image takes to come and to train on, cores, the device and a small /dev/shm decide."""
        found, why = auto_workers(**{"micro_batch_bytes": 10**6, **arguments})
        assert found == workers
        assert words in why


class TestCopies:
    @pytest.mark.parametrize(
        ("found", "num_images", "free_gib", "cap_gib", "why"),
        [
            (pace(), 1240, 80, 20, "on: 1,240 images of 3.0 MiB, 3.6 GiB of 20.0 GiB; 100 ms to decode, 1.0 ms to read back"),
            (pace(), 8000, 80, 20, "on: 8,000 packed images of 2.0 MiB, 15.6 GiB of 20.0 GiB; 100 ms to decode, 4.0 ms to read back"),
            (pace(packed=(0.5, 1)), 10, 80, 20, "on: 10 packed images of 512.0 KiB"),
            (pace(), 20480, 80, 20, "on: 20,480 packed images of 2.0 MiB, 50% of them in 20.0 GiB"),
            (pace(), 10**6, 80, 0, "off: copies of 1,000,000 images take 1.9 TiB, and the disk has 80.0 GiB free"),
            (pace(), 100, 2, 0, "off: copies of 100 images take 200.0 MiB, and the disk has 2.0 GiB free"),
            (pace(load_ms=1.9), 100, 80, 0, "off: an image is decoded within 2.0 ms"),
            (pace(load_ms=2.9), 100, 80, 0, "off: an image takes 2.9 ms to decode, 1.0 ms to read back"),
            (None, 100, 80, 0, "off: no image could be read"),
        ],
    )
    def test_copies_are_kept_where_they_are_worth_their_space(
        self, found: Pace | None, num_images: int, free_gib: int, cap_gib: int, why: str
    ) -> None:
        """A quarter of the free disk at most; off where decoding is as quick or the disk is too small; the numbers are in the reason."""
        cap, said = auto_cache(found, num_images, free_gib * GIB)
        assert cap == cap_gib * GIB
        assert said.startswith(why)

    def test_copies_are_packed_where_that_makes_them_fit_or_tiny(self) -> None:
        """Else plain ones are quicker."""
        assert not choose_packed(pace(), 10, 30 * MIB)
        assert choose_packed(pace(), 11, 30 * MIB)
        assert choose_packed(pace(packed=(0.75, 1)), 10, 30 * MIB)


class TestMeasuring:
    def test_measures_what_it_loads_and_leaves_the_threads(self, tmp_path: Path, save_image: Callable[..., Path]) -> None:
        """Sizes are those of real entries; a damaged file is passed over; opencv has its threads again."""
        threads = cv2.getNumThreads()
        preprocess = Preprocess((24, 32))
        samples = [Sample(save_image(tmp_path / f"{seed}.png", seed=seed, size=(200, 300)), 0, "") for seed in range(7)]
        samples[0].path.write_bytes(b"no image")
        found = measure(samples, preprocess, max_pixels=10**6)
        assert found is not None
        assert found.plain.num_bytes == 64 + 24 * 32 * 3
        assert 64 < found.packed.num_bytes < found.plain.num_bytes
        assert found.load_seconds > found.plain.seconds > 0
        assert any(np.array_equal(found.image, load_image(sample.path, preprocess, max_pixels=10**6)) for sample in samples[1:])
        assert augment_seconds(make_augment("heavy", image_size=(24, 32)), found.image) > 0
        assert augment_seconds(None, found.image) == 0
        assert cv2.getNumThreads() == threads
        assert measure(samples[:1], preprocess, max_pixels=10**6) is None
