"""Windows at full resolution through the loader: the same bits whoever decodes, one decode an image, and a bound on what is held."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from hiresvis.data import photos
from hiresvis.data import workers as workers_module
from hiresvis.data.augment import make_augment
from hiresvis.data.contract import load_image
from hiresvis.data.loader import EvalLoader, MicroBatch, TrainLoader
from hiresvis.data.regions import Region
from hiresvis.data.sources import Sample
from hiresvis.data.transforms import Pipeline, Preprocess
from hiresvis.errors import DataError

SIZE = (24, 32)
LIMIT = 10**6
TILE = Preprocess(SIZE, "tile")
SIDES = [(60, 70), (24, 32), (20, 90), (100, 40), (10, 10), (48, 64), (61, 71)]


@pytest.fixture
def pictures(picture: Callable[..., np.ndarray]) -> list[np.ndarray]:
    return [picture(*sides, seed=seed) for seed, sides in enumerate(SIDES)]


@pytest.fixture
def samples(tmp_path: Path, pictures: list[np.ndarray]) -> tuple[Sample, ...]:
    """PNGs and tiled TIFFs by turns, larger and smaller than a window."""
    found = []
    for index, array in enumerate(pictures):
        path = tmp_path / f"{index}.{'tif' if index % 2 else 'png'}"
        if index % 2:
            tifffile.imwrite(path, array, photometric="rgb", tile=(16, 16), compression="zlib")
        else:
            Image.fromarray(array).save(path)
        found.append(Sample(path, index % 3, f"t.csv:{index + 2}", None, path.name))
    return tuple(found)


def read(loader: TrainLoader | EvalLoader) -> list[MicroBatch]:
    with closing(loader):
        return list(loader)


def same(first: list[MicroBatch], second: list[MicroBatch]) -> bool:
    return [(item.indices, item.num_windows) for item in first] == [(item.indices, item.num_windows) for item in second] and all(
        torch.equal(a.images, b.images) for a, b in zip(first, second, strict=True)
    )


class TestTraining:
    @pytest.mark.parametrize("fit", ["crop", "tile"])
    def test_windows_are_the_same_bits_for_any_number_of_workers(self, samples: tuple[Sample, ...], fit: str) -> None:
        """Two epochs, augmentation on, 0, 1 and 3 processes; another epoch is other windows."""
        pipeline = Pipeline(Preprocess(SIZE, fit), make_augment("heavy", image_size=SIZE))
        found = []
        for workers in (0, 1, 3):
            with closing(TrainLoader(samples, pipeline, max_pixels=LIMIT, batch=4, micro_batch=2, seed=5, workers=workers)) as loader:
                found.append([])
                for epoch in (0, 1):
                    loader.set_epoch(epoch)
                    found[-1].append(list(loader))
        assert all(same(found[0][epoch], other[epoch]) for other in found[1:] for epoch in (0, 1))
        assert not same(*found[0])

    def test_a_training_window_is_a_part_of_the_image_at_full_resolution(
        self, samples: tuple[Sample, ...], pictures: list[np.ndarray]
    ) -> None:
        """Somewhere in it, unchanged; of a small image all of it, in the middle of the background."""
        crop = Preprocess(SIZE, "crop")
        for item in read(TrainLoader(samples, Pipeline(crop), max_pixels=LIMIT, batch=7, micro_batch=7, seed=1)):
            for index, image in zip(item.indices, item.images.numpy(), strict=True):
                height, width = pictures[index].shape[:2]
                places = [(top, left) for top in range(max(1, height - 23)) for left in range(max(1, width - 31))]
                assert any(np.array_equal(image, crop(pictures[index][top : top + 24, left : left + 32])) for top, left in places), index

    def test_a_region_is_all_that_is_seen_of_its_file(self, samples: tuple[Sample, ...], pictures: list[np.ndarray]) -> None:
        """Whole, in the middle, anywhere and in tiles: pixels of the region alone, of a PNG and of a tiled TIFF."""
        region = Region(5, 3, 34, 40)
        for index in (0, 3):
            part = pictures[index][region.slices]
            sample = replace(samples[index], region=region)
            whole = load_image(sample.path, Preprocess((40, 34)), max_pixels=LIMIT, region=region)
            assert np.array_equal(whole, part)
            assert np.array_equal(load_image(sample.path, Preprocess(SIZE, "crop"), max_pixels=LIMIT, region=region), part[8:32, 1:33])
            (item,) = read(EvalLoader([sample], TILE, max_pixels=LIMIT, batch=9))
            assert [tuple(window.shape) for window in item.images] == [(24, 32, 3)] * 4
            assert np.array_equal(item.images[3].numpy(), part[16:40, 2:34])
            for seed in range(30):
                window = load_image(sample.path, TILE, max_pixels=LIMIT, region=region, seed=seed)
                assert any(np.array_equal(window, part[top : top + 24, left : left + 32]) for top in range(17) for left in range(3))


class TestEvaluation:
    @pytest.mark.parametrize("workers", [0, 1, 3])
    @pytest.mark.parametrize("batch", [1, 4, 100])
    def test_every_window_of_every_image_comes_once_and_in_order(
        self, samples: tuple[Sample, ...], pictures: list[np.ndarray], workers: int, batch: int
    ) -> None:
        """The batch counts windows; each is the image's own pixels, and an image's windows stand together across batches."""
        loader = EvalLoader(samples, TILE, max_pixels=LIMIT, batch=batch, workers=workers)
        items = read(loader)
        expected = [
            (index, TILE(array[TILE.window(*array.shape[:2], number).slices]))
            for index, array in enumerate(pictures)
            for number in range(TILE.num_windows(*array.shape[:2]))
        ]
        assert len(loader) == len(items) == -(-len(expected) // batch)
        assert all(len(item.indices) == batch for item in items[:-1])
        images = [(index, image) for item in items for index, image in zip(item.indices, item.images.numpy(), strict=True)]
        assert [index for index, _ in images] == [index for index, _ in expected]
        assert all(np.array_equal(image, wanted) for (_, image), (_, wanted) in zip(images, expected, strict=True))
        counts = [TILE.num_windows(*array.shape[:2]) for array in pictures]
        assert all(item.num_windows == tuple(counts[index] for index in item.indices) for item in items)

    @pytest.mark.parametrize("fit", ["crop", "resize"])
    def test_other_fits_are_one_image_a_sample(self, samples: tuple[Sample, ...], pictures: list[np.ndarray], fit: str) -> None:
        """Crop takes the middle."""
        (item,) = read(EvalLoader(samples, Preprocess(SIZE, fit), max_pixels=LIMIT, batch=7))
        assert (item.indices, item.num_windows) == (tuple(range(7)), ())
        if fit == "crop":
            assert np.array_equal(item.images[0].numpy(), pictures[0][18:42, 19:51])

    def test_an_image_is_decoded_once_and_a_tiled_one_in_its_tiles(
        self, samples: tuple[Sample, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However many batches its windows fill; of the tiled file no more than the tiles of one window at a time."""
        decoded: list[object] = []
        whole = photos.decode_pixels
        monkeypatch.setattr(photos, "decode_pixels", lambda *given, **named: (decoded.append(given[1].name), whole(*given, **named))[1])
        as_whole = tifffile.TiffPageSeries.asarray
        monkeypatch.setattr(
            tifffile.TiffPageSeries, "asarray", lambda series, **options: (decoded.append(series.shape), as_whole(series, **options))[1]
        )
        read(EvalLoader(samples, TILE, max_pixels=LIMIT, batch=2))
        assert decoded == ["0.png", (24, 32, 3), "2.png", "4.png", "6.png"]  # the second has the size of a window

    def test_many_windows_take_the_memory_of_a_batch(self, tmp_path: Path) -> None:
        """A tiled image of 4096 px, 48 MiB, in 3249 windows of 96 px, four at a time: less than 4 MiB beside the list of tasks."""
        rng = np.random.default_rng(0)
        tiles = (rng.integers(0, 255, (256, 256, 3), np.uint8) for _ in range(256))
        path = tmp_path / "x.tif"
        tifffile.imwrite(path, tiles, shape=(4096, 4096, 3), dtype=np.uint8, photometric="rgb", tile=(256, 256))
        loader = EvalLoader([Sample(path, 0, "x")], Preprocess((96, 96), "tile"), max_pixels=10**8, batch=4)
        seen = 0
        with closing(loader):
            items = iter(loader)
            seen += len(next(items).indices)
            tracemalloc.start()
            for item in items:
                seen += len(item.indices)
                if seen > 400:
                    break
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            items.close()  # type: ignore[attr-defined]
        assert sum(loader._num_windows()) == 3249
        assert peak < 4 * 2**20

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_bad_file_is_named_at_its_place(self, samples: tuple[Sample, ...], workers: int) -> None:
        """One that cannot be opened counts as one window, and one that is cut fails where it is read."""
        samples[3].path.write_bytes(samples[3].path.read_bytes()[:-400])
        with pytest.raises(DataError, match=r"t\.csv:5 .*3\.tif"):
            read(EvalLoader(samples, TILE, max_pixels=LIMIT, batch=4, workers=workers))
        samples[3].path.write_bytes(b"nothing")
        with pytest.raises(DataError, match=r"t\.csv:5 .*3\.tif is not a"):
            read(EvalLoader(samples, TILE, max_pixels=LIMIT, batch=4, workers=workers))

    def test_the_open_image_stays_at_home(self, samples: tuple[Sample, ...]) -> None:
        """A loader in the middle of an image can be sent to another process, which opens its own; left early, it closes its file."""
        loader = EvalLoader(samples, TILE, max_pixels=LIMIT, batch=1)
        items = iter(loader)
        next(items)
        held = loader._source.held
        assert held._image is not None
        file = held._image._file
        assert pickle.loads(pickle.dumps(held))._image is None
        items.close()  # type: ignore[attr-defined]
        assert held._image is None
        assert file.closed


def test_an_evaluation_that_begins_again_keeps_its_own_image(samples: tuple[Sample, ...]) -> None:
    """Memory may run out in the middle: the one that was left does not close the image of the one that goes on."""
    with closing(EvalLoader(samples, TILE, max_pixels=LIMIT, batch=2)) as loader:
        whole = list(loader)
        left, again = iter(loader), iter(loader)
        next(left)
        items = [next(again)]
        image = loader._source.held._image
        assert image is not None
        left.close()  # type: ignore[attr-defined]
        assert loader._source.held._image is image
        assert same(whole, [*items, *again])


def test_deep_images_count_four_bytes_in_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bit under data.scale: dtype travel as floats, so the workers that /dev/shm takes are fewer than of bytes."""
    made = {"shallow": np.zeros((24, 32, 3), np.uint8), "deep": np.zeros((24, 32, 3), np.uint16)}
    for name, array in made.items():
        tifffile.imwrite(tmp_path / f"{name}.tif", array, photometric="rgb")
    monkeypatch.setattr(workers_module, "shared_memory_free_bytes", lambda: 100_000)  # 3 x 4 x 2304 bytes are 27 kB a worker of bytes
    for name, workers in (("shallow", 2), ("deep", 0)):
        samples = [Sample(tmp_path / f"{name}.tif", 0, name)] * 4
        with closing(EvalLoader(samples, Preprocess(SIZE), max_pixels=LIMIT, batch=4, workers=2)) as loader:
            (item,) = loader
            assert item.images.dtype == (torch.uint8 if name == "shallow" else torch.float32)
            assert loader._engine.workers == workers
