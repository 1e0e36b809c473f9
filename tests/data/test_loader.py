"""What a step sees depends on seed, epoch and batch alone, and bad files are said by name."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch

from hiresvis.data import workers as workers_module
from hiresvis.data.augment import make_augment
from hiresvis.data.loader import EvalLoader, TrainLoader
from hiresvis.data.micro_batch import MicroBatch
from hiresvis.data.sources import Sample, load_datasets
from hiresvis.data.transforms import Pipeline, Preprocess, Scale
from hiresvis.errors import DataError, EnvironmentFailed
from hiresvis.units import format_size

SIZE = (24, 32)
PREPROCESS = Preprocess(SIZE)


@pytest.fixture
def samples(tmp_path: Path, save_image: Callable[..., Path]) -> tuple[Sample, ...]:
    """Eleven different images of three classes."""
    paths = [save_image(tmp_path / f"{index:02d}.png", seed=index) for index in range(11)]
    return tuple(Sample(path, index % 3, f"t.csv:{index + 2}", None, path.name) for index, path in enumerate(paths))


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline(PREPROCESS, make_augment("heavy", image_size=SIZE))


@pytest.fixture
def make(samples: tuple[Sample, ...], pipeline: Pipeline) -> Iterator[Callable[..., TrainLoader]]:
    """make(**changes) -> TrainLoader, closed at the end."""
    made: list[TrainLoader] = []

    def build(which: tuple[Sample, ...] = samples, **changes: Any) -> TrainLoader:
        options: dict[str, Any] = {"max_pixels": 10**6, "batch": 4, "micro_batch": 3, "seed": 5, **changes}
        made.append(TrainLoader(which, pipeline, **options))
        return made[-1]

    yield build
    for loader in made:
        loader.close()


KILLED_EARLY = """
import multiprocessing, os, signal, sys, time
from hiresvis.data.workers import _start_worker

def work():
    time.sleep(1.0)  # the main process is gone by now
    _start_worker(0)
    time.sleep(600)

if __name__ == "__main__":
    worker = multiprocessing.get_context(sys.argv[1]).Process(target=work)
    worker.start()
    print(worker.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_ends_with_a_main_process_that_was_killed_before_it_began(tmp_path, method):
    """A kill between starting a worker and its first instruction leaves no process behind that holds memory for good."""
    script = tmp_path / "killed_early.py"
    script.write_text(KILLED_EARLY)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, str(script), method], stdout=subprocess.PIPE, text=True, env=environ) as started:
        pid = int(started.stdout.readline())
    assert started.returncode == -signal.SIGKILL
    for _ in range(300):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail(f"worker {pid} outlived its main process")


def same(first: list[MicroBatch], second: list[MicroBatch]) -> bool:
    """Bit for bit, everything."""
    return len(first) == len(second) and all(
        torch.equal(a.images, b.images)
        and torch.equal(a.targets, b.targets)
        and (a.indices, a.batch_images, a.closes_batch, a.batch_index) == (b.indices, b.batch_images, b.closes_batch, b.batch_index)
        for a, b in zip(first, second, strict=True)
    )


def epochs(loader: TrainLoader, *numbers: int) -> list[MicroBatch]:
    items: list[MicroBatch] = []
    for number in numbers:
        loader.set_epoch(number)
        items += loader
    return items


class TestOrder:
    def test_batches_are_cut_into_nearly_equal_parts(self, make: Callable[..., TrainLoader]) -> None:
        """11 images, batch 4, parts of at most 3: 2+2, 2+2, 3; the small last batch is kept and says its own size."""
        loader = make()
        items = list(loader)
        assert len(loader) == 3
        assert [len(item.indices) for item in items] == [2, 2, 2, 2, 3]
        assert [item.closes_batch for item in items] == [False, True, False, True, True]
        assert [item.batch_images for item in items] == [4, 4, 4, 4, 3]
        assert [item.batch_index for item in items] == [0, 0, 1, 1, 2]
        assert sorted(index for item in items for index in item.indices) == list(range(11))

    @pytest.mark.parametrize(("batch", "micro_batch", "parts"), [(5, 5, [5, 3, 3]), (5, 3, [3, 2, 3, 3]), (10, 4, [3, 3, 3, 2])])
    def test_the_last_image_is_not_left_alone(
        self, make: Callable[..., TrainLoader], batch: int, micro_batch: int, parts: list[int]
    ) -> None:
        """least 2: where one image would be left for the last batch, the last two share theirs; no part has more than micro_batch, the
        number of batches and the order of the images stay, and so does a batch that is taken up on resume."""
        loader, plain = (make(batch=batch, micro_batch=micro_batch, least=least) for least in (2, 1))
        items = epochs(loader, 3)
        assert [len(item.indices) for item in items] == parts
        assert len(loader) == len(plain) == items[-1].batch_index + 1
        assert [index for item in items for index in item.indices] == [index for item in epochs(plain, 3) for index in item.indices]
        last = [item for item in items if item.batch_index == len(loader) - 1]
        assert {item.batch_images for item in last} == {sum(len(item.indices) for item in last)}
        loader.set_epoch(3, first_batch=len(loader) - 1)
        assert same(last, list(loader))

    def test_items_hold_bytes_and_their_own_labels(self, make: Callable[..., TrainLoader], samples: tuple[Sample, ...]) -> None:
        """(b, h, w, c) uint8 and int64 targets, in step with the indices."""
        for item in make():
            assert item.images.shape == (len(item.indices), *SIZE, 3)
            assert item.images.dtype == torch.uint8
            assert item.targets.dtype == torch.int64
            assert item.targets.tolist() == [samples[index].label for index in item.indices]

    def test_epochs_differ_and_come_again(self, make: Callable[..., TrainLoader]) -> None:
        """Another epoch is another order and other augmentation; the same epoch is the same bits."""
        loader = make()
        first, second, again = epochs(loader, 0), epochs(loader, 1), epochs(loader, 0)
        assert same(first, again)
        assert [item.indices for item in first] != [item.indices for item in second]
        assert not same(first, epochs(make(seed=6), 0))

    def test_sample_is_augmented_anew_each_epoch(self, make: Callable[..., TrainLoader]) -> None:
        """The epoch is a part of every sample's seed, not of the order alone."""
        images = [
            {index: image for item in epochs(make(), number) for index, image in zip(item.indices, item.images, strict=True)}
            for number in (0, 1)
        ]
        assert sum(torch.equal(images[0][index], images[1][index]) for index in range(11)) < 4

    def test_size_of_parts_changes_no_pixel(self, make: Callable[..., TrainLoader]) -> None:
        """The order, the batches and every image stay when the micro-batch changes in the middle of a run."""
        loader = make()
        epochs(loader, 0)
        loader.set_micro_batch(1)
        single = epochs(loader, 1)
        whole = epochs(make(micro_batch=100), 1)
        assert [len(item.indices) for item in whole] == [4, 4, 3]
        assert torch.equal(torch.cat([item.images for item in single]), torch.cat([item.images for item in whole]))

    def test_resume_inside_an_epoch_continues_exactly(self, make: Callable[..., TrainLoader]) -> None:
        """From batch 2 on, the rest is what an uninterrupted epoch would have given."""
        whole = epochs(make(), 3)
        loader = make()
        loader.set_epoch(3, first_batch=1)
        assert same([item for item in whole if item.batch_index >= 1], list(loader))
        assert len(loader) == 3


class TestWorkers:
    @pytest.mark.parametrize(("workers", "method"), [(1, "fork"), (3, "fork"), (1, "spawn")])
    def test_workers_give_the_same_bits_as_none(self, make: Callable[..., TrainLoader], workers: int, method: str) -> None:
        """Two epochs with heavy augmentation, under fork and spawn, with workers kept between the epochs."""
        assert same(epochs(make(), 0, 1), epochs(make(workers=workers, start_method=method), 0, 1))

    def test_loader_leaves_the_global_random_state_alone(self, make: Callable[..., TrainLoader]) -> None:
        """Neither torch's nor numpy's numbers shift, with workers or without."""
        before = torch.get_rng_state(), pickle.dumps(np.random.get_state())
        list(make())
        list(make(workers=1))
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == pickle.dumps(np.random.get_state())

    def test_epoch_left_in_the_middle_does_not_disturb_the_next(self, make: Callable[..., TrainLoader]) -> None:
        """Work in flight from an abandoned epoch is thrown away."""
        loader = make(workers=2, micro_batch=1)
        loader.set_epoch(0)
        with closing(iter(loader)) as items:  # type: ignore[type-var]
            next(items)
        assert same(epochs(loader, 1), epochs(make(micro_batch=1), 1))

    def test_dead_worker_is_reported_with_the_files_and_the_ways_on(self, make: Callable[..., TrainLoader]) -> None:
        """Killed from outside, as for want of memory; the error comes with the batch that does not, not at some line before it."""
        loader = make(workers=1)
        epochs(loader, 0)
        loader.set_epoch(1)
        items = iter(loader)
        next(items)
        worker = loader._engine._loader._iterator._workers[0]
        os.kill(worker.pid, signal.SIGKILL)
        worker.join(10)
        with pytest.raises(EnvironmentFailed, match=r"worker process of the loader died \(SIGKILL\).*\.png.*data\.workers"):
            list(items)

    @pytest.mark.parametrize(("free_bytes", "workers"), [(40_000, 1), (20_000, 0), (10**9, 3), (None, 3)])
    def test_small_shared_memory_lowers_the_workers_before_the_first_batch(
        self, make: Callable[..., TrainLoader], monkeypatch: pytest.MonkeyPatch, free_bytes: int | None, workers: int
    ) -> None:
        """A number that was asked for would fail in mid epoch: it is lowered with the reason, and the bits stay."""
        monkeypatch.setattr(workers_module, "shared_memory_free_bytes", lambda: free_bytes)
        loader = make(workers=3)  # three images of 24 x 32 x 3 bytes, three at a time: 20.25 KiB a worker
        items = epochs(loader, 0, 1)
        iterator = loader._engine._loader._iterator
        assert len(getattr(iterator, "_workers", ())) == workers
        assert len(loader.notes) == (workers < 3)
        if workers < 3:
            reason = f"data.workers lowered from 3 to {workers}: /dev/shm has {format_size(free_bytes)} free and a worker needs 20.2 KiB"
            assert loader.notes[0].startswith(reason)
        assert same(items, epochs(make(), 0, 1))

    def test_evaluation_counts_its_own_batch(self, samples: tuple[Sample, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        """An evaluation batch may be larger than a micro-batch; floats take four bytes."""
        monkeypatch.setattr(workers_module, "shared_memory_free_bytes", lambda: 150_000)
        for preprocess, batch, workers in (
            (PREPROCESS, 2, 2),
            (PREPROCESS, 11, 1),
            (replace(PREPROCESS, scale=Scale("range", 0, 200)), 11, 0),
        ):
            with closing(EvalLoader(samples, preprocess, max_pixels=10**6, batch=batch, workers=2)) as loader:
                assert sum(len(item.indices) for item in loader) == 11
                assert loader._engine.workers == workers


class TestBadImages:
    @pytest.fixture
    def damaged(self, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
        """Sample 4 is cut in half."""
        samples[4].path.write_bytes(samples[4].path.read_bytes()[:300])
        return samples

    @pytest.mark.parametrize("workers", [0, 2])
    def test_bad_image_is_an_error_with_path_and_row(
        self, make: Callable[..., TrainLoader], damaged: tuple[Sample, ...], workers: int
    ) -> None:
        """The main process gets a DataError of one line, wherever the file was decoded."""
        with pytest.raises(DataError) as caught:
            list(make(damaged, workers=workers))
        (problem,) = caught.value.problems
        assert problem.place == "t.csv:6"
        assert problem.message.startswith(f"{damaged[4].path} is a damaged PNG")
        assert "Traceback" not in str(caught.value)

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("micro_batch", [1, 3])
    def test_skip_leaves_it_out_and_divides_by_what_is_there(
        self, make: Callable[..., TrainLoader], damaged: tuple[Sample, ...], workers: int, micro_batch: int
    ) -> None:
        """Its batch says 3 at every part, the others stay bit for bit, nothing takes its place, and it is listed once."""
        loader = make(damaged, bad_images="skip", workers=workers, micro_batch=micro_batch)
        for epoch in (0, 1):
            items = epochs(loader, epoch)
            assert sorted(index for item in items for index in item.indices) == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
            for number in range(len(loader)):
                parts = [item for item in items if item.batch_index == number]
                assert {item.batch_images for item in parts} == {sum(len(item.indices) for item in parts)}
                assert [item.closes_batch for item in parts] == [False] * (len(parts) - 1) + [True]
        assert [path for path, _ in loader.skipped] == [str(damaged[4].path)]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_part_that_skipping_leaves_with_one_image_is_cut_anew(
        self, make: Callable[..., TrainLoader], damaged: tuple[Sample, ...], workers: int
    ) -> None:
        """least 2: no part has one image, the same images come in the same order, bit for bit."""
        options = {"bad_images": "skip", "workers": workers}
        loader, plain = make(damaged, least=2, **options), make(damaged, **options)
        alone = 0
        for epoch in range(6):
            found, other = epochs(loader, epoch), epochs(plain, epoch)
            alone += sum(len(item.indices) == 1 for item in other)
            assert all(len(item.indices) > 1 for item in found)
            for number in range(len(loader)):
                parts, before = ([item for item in items if item.batch_index == number] for items in (found, other))
                assert [index for item in parts for index in item.indices] == [index for item in before for index in item.indices]
                assert torch.equal(torch.cat([item.images for item in parts]), torch.cat([item.images for item in before]))
                assert torch.equal(torch.cat([item.targets for item in parts]), torch.cat([item.targets for item in before]))
                assert {item.batch_images for item in parts} == {sum(len(item.indices) for item in parts)}
                assert [item.closes_batch for item in parts] == [False] * (len(parts) - 1) + [True]
        assert alone

    def test_a_single_readable_image_is_left_out_where_two_are_needed(
        self, make: Callable[..., TrainLoader], damaged: tuple[Sample, ...]
    ) -> None:
        """Its batch comes empty; where two cannot be had (micro_batch 1), it is kept."""
        items = list(make(damaged[3:5], bad_images="skip", batch=2, micro_batch=2, least=2))
        assert [(item.indices, item.batch_images, item.closes_batch, tuple(item.images.shape)) for item in items] == [
            ((), 0, True, (0, *SIZE, 3))
        ]
        (item,) = make(damaged[3:5], bad_images="skip", batch=2, micro_batch=1, least=2)
        assert (item.indices, item.batch_images) == ((0,), 1)

    def test_batch_without_a_readable_image_comes_empty(self, make: Callable[..., TrainLoader], damaged: tuple[Sample, ...]) -> None:
        """Batches keep their numbers: one empty item closes it."""
        items = list(make(damaged, bad_images="skip", batch=1, micro_batch=1))
        empty = [item for item in items if not item.indices]
        assert len(items) == 11
        assert [(item.batch_images, item.closes_batch, tuple(item.images.shape)) for item in empty] == [(0, True, (0, *SIZE, 3))]

    def test_evaluation_never_skips(self, damaged: tuple[Sample, ...]) -> None:
        """A bad file in val or test is an error."""
        with closing(EvalLoader(damaged, PREPROCESS, max_pixels=10**6, batch=2)) as loader, pytest.raises(DataError, match=r"t\.csv:6"):
            list(loader)

    def test_image_above_max_pixels_is_named_with_the_setting(self, make: Callable[..., TrainLoader]) -> None:
        """The limit reaches the workers."""
        with pytest.raises(DataError, match=r"max_pixels"):
            list(make(max_pixels=100, workers=1))


class TestEvaluation:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_evaluation_keeps_the_order_and_augments_nothing(self, samples: tuple[Sample, ...], workers: int) -> None:
        """Every sample once, as preprocessing alone gives it, whatever the batch."""
        with closing(EvalLoader(samples, PREPROCESS, max_pixels=10**6, batch=4, workers=workers)) as loader:
            first = list(loader)
            loader.set_batch(3)
            second = list(loader)
        assert [item.indices for item in first] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10)]
        assert all(item.closes_batch and item.batch_images == len(item.indices) for item in first)
        assert len(second) == len(loader) == 4
        assert torch.equal(torch.cat([item.images for item in first]), torch.cat([item.images for item in second]))

    def test_unlabelled_samples_have_target_minus_one(self, samples: tuple[Sample, ...]) -> None:
        """Prediction goes through the same loader."""
        blank = [replace(sample, label=None) for sample in samples[:2]]
        (item,) = EvalLoader(blank, PREPROCESS, max_pixels=10**6, batch=4)
        assert item.targets.tolist() == [-1, -1]

    def test_8_and_16_bit_images_share_a_batch_as_floats(self, tmp_path: Path, samples: tuple[Sample, ...]) -> None:
        """Both on the scale of 0 to 1."""
        deep = tmp_path / "deep.tif"
        tifffile.imwrite(deep, np.full((*SIZE, 3), 13107, np.uint16), photometric="rgb")
        mixed = [samples[0], replace(samples[1], file=deep)]
        (item,) = EvalLoader(mixed, PREPROCESS, max_pixels=10**6, batch=4)
        (alone,) = EvalLoader(mixed[:1], PREPROCESS, max_pixels=10**6, batch=4)
        assert item.images.dtype == torch.float32
        torch.testing.assert_close(item.images[0], alone.images[0] / 255)
        torch.testing.assert_close(item.images[1], torch.full_like(item.images[1], 0.2))


@pytest.mark.parametrize("workers", [0, 1])
def test_prediction_goes_on_past_files_that_cannot_be_read(samples: tuple[Sample, ...], workers: int) -> None:
    """Each is missing from its batch, which may be empty, and listed with its reason when that comes, once however often one iterates."""
    for index in (1, 4, 5, 6, 7):
        samples[index].path.write_bytes(b"")
    with closing(EvalLoader(samples, PREPROCESS, max_pixels=10**6, batch=4, workers=workers, bad_images="skip")) as loader:
        for _ in range(2):
            listed = [(item.indices, tuple(item.images.shape), len(loader.skipped)) for item in loader]
            assert listed == [((0, 2, 3), (3, *SIZE, 3), 1), ((), (0, *SIZE, 3), 5), ((8, 9, 10), (3, *SIZE, 3), 5)]
            assert loader.skipped == [(str(samples[index].path), "is empty (0 bytes)") for index in (1, 4, 5, 6, 7)]


@pytest.mark.parametrize("workers", [0, 1])
def test_tuples_travel_as_they_are_in_the_table(make_folders, workers: int) -> None:
    """One row of float64 for each image, with digits that float32 would lose; an epoch's rows belong to its images."""
    samples = load_datasets(make_folders("train", {"a": 4, "b": 3}), 0.3).train.samples
    labels = [(20240101.0 + index, 1 / (3 + index)) for index in range(len(samples))]
    labelled = [replace(sample, label=label) for sample, label in zip(samples, labels, strict=True)]
    preprocess = Preprocess((24, 32))
    loader = EvalLoader(labelled, preprocess, max_pixels=10**6, batch=2, workers=workers)
    items = list(loader)
    assert [tuple(row) for item in items for row in item.targets.tolist()] == labels
    assert items[0].targets.dtype == torch.float64
    loader.close()
    train = TrainLoader(labelled, Pipeline(preprocess), max_pixels=10**6, batch=3, micro_batch=2, seed=0)
    for item in train:
        assert [tuple(row) for row in item.targets.tolist()] == [labels[index] for index in item.indices]
