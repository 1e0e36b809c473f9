"""Copies are the same bits or nothing, whatever happens to the files, the disk, or the processes at them."""

from __future__ import annotations

import ast
import multiprocessing
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hiresvis.data import cache as cache_module
from hiresvis.data.augment import make_augment
from hiresvis.data.cache import ImageCache, digest_of, file_state, from_entry, to_entry
from hiresvis.data.check import check_steps, finished
from hiresvis.data.contract import load_image
from hiresvis.data.loader import EvalLoader, TrainLoader
from hiresvis.data.regions import Region
from hiresvis.data.sources import Dataset, Datasets, Sample
from hiresvis.data.transforms import Pipeline, Preprocess, Scale
from hiresvis.errors import DataError

SIZE = (24, 32)
PREPROCESS = Preprocess(SIZE)
PIXELS = 10**6
ENTRY_BYTES = 64 + 24 * 32 * 3


@pytest.fixture
def paths(tmp_path: Path, save_image: Callable[..., Path]) -> list[Path]:
    """Eight different images of 48 x 60 px."""
    return [save_image(tmp_path / "data" / f"{index}.png", seed=index, size=(48, 60)) for index in range(8)]


@pytest.fixture
def cache(tmp_path: Path) -> ImageCache:
    return ImageCache(tmp_path / "cache", 10**9)


def entries(cache: ImageCache) -> list[Path]:
    return sorted(cache.folder.glob("objects/*/*"))


def load(cache: ImageCache, path: Path, preprocess: Preprocess = PREPROCESS) -> np.ndarray:
    return cache.load(path, preprocess, max_pixels=PIXELS)


def samples_of(paths: list[Path]) -> list[Sample]:
    return [Sample(path, 0, str(path)) for path in paths]


def plain(path: Path, preprocess: Preprocess = PREPROCESS) -> np.ndarray:
    return load_image(path, preprocess, max_pixels=PIXELS)


@contextmanager
def no_decoding(*, nor_reading: bool = True) -> Iterator[None]:
    """Inside, an image that is decoded, or a source that is read, fails the test."""

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("the source was used")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "load_image", refuse)
        if nor_reading:
            patch.setattr(cache_module, "digest_of", refuse)
        yield


def same(first: np.ndarray, second: np.ndarray) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


class TestHits:
    @pytest.mark.parametrize("packed", [False, True])
    def test_second_reading_gives_the_same_bits_without_the_source(self, cache: ImageCache, paths: list[Path], packed: bool) -> None:
        """From the copy alone, writable and in one piece as a decoded image is."""
        cache.packed = packed
        first = [load(cache, path) for path in paths]
        with no_decoding():
            second = [load(cache, path) for path in paths]
        for path, one, other in zip(paths, first, second, strict=True):
            assert same(one, plain(path))
            assert same(one, other)
            assert other.flags.writeable
            assert other.flags.c_contiguous

    def test_moved_and_copied_folders_hit(self, cache: ImageCache, paths: list[Path]) -> None:
        """The content decides: read once to be known, not decoded, and from then on not read."""
        expected = [load(cache, path) for path in paths]
        copied = paths[0].parent.with_name("copied")
        shutil.copytree(paths[0].parent, copied)
        moved = paths[0].parent.rename(paths[0].parent.with_name("moved"))
        for folder in (copied, moved):
            with no_decoding(nor_reading=False):
                found = [load(cache, folder / path.name) for path in paths]
            with no_decoding():
                found += [load(cache, folder / path.name) for path in paths]
            assert all(same(one, other) for one, other in zip(found, expected * 2, strict=True))
        assert len(entries(cache)) == len(paths)

    def test_changed_file_is_decoded_anew_even_under_its_old_times(
        self, cache: ImageCache, tmp_path: Path, picture: Callable[..., np.ndarray]
    ) -> None:
        """Same size, same time of modification, other pixels: as after a copy that keeps times."""
        path = tmp_path / "image.tif"
        write_tiff(path, picture(48, 60, seed=1))
        load(cache, path)
        before = path.stat()
        write_tiff(path, picture(48, 60, seed=2))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size
        assert same(load(cache, path), plain(path))

    def test_each_setting_has_its_own_copy(self, cache: ImageCache, paths: list[Path]) -> None:
        """Every field of the preprocessing, and the largest size allowed."""
        other = {
            "image_size": (20, 32),
            "fit": "letterbox",
            "background": (0, 0, 0),
            "in_chans": 3,
            "scale": Scale("range", 0, 200),
            "interpolation": "bicubic",
            "overlap": 0.5,
        }
        assert set(other) == {field.name for field in fields(Preprocess)}, "a new field has its case here"
        settings = [PREPROCESS, *(replace(PREPROCESS, **{name: value}) for name, value in other.items() if name != "in_chans")]
        found = [load(cache, paths[0], preprocess) for preprocess in settings]
        assert len(entries(cache)) == len(settings)
        assert all(same(array, plain(paths[0], preprocess)) for array, preprocess in zip(found, settings, strict=True))
        with no_decoding():
            assert all(same(load(cache, paths[0], preprocess), array) for array, preprocess in zip(found, settings, strict=True))
        with pytest.raises(DataError, match="max_pixels"):
            cache.load(paths[0], PREPROCESS, max_pixels=100)

    def test_each_region_has_its_own_copy(self, cache: ImageCache, paths: list[Path]) -> None:
        """Read back by the same place alone, bit for bit."""
        regions = [None, Region(0, 0, 30, 40), Region(5, 0, 30, 40), Region(0, 0, 40, 30)]
        found = [cache.load(paths[0], PREPROCESS, max_pixels=PIXELS, region=region) for region in regions]
        assert len(entries(cache)) == len(regions)
        with no_decoding():
            again = [cache.load(paths[0], PREPROCESS, max_pixels=PIXELS, region=region) for region in regions]
        for region, one, other in zip(regions, found, again, strict=True):
            assert same(one, load_image(paths[0], PREPROCESS, max_pixels=PIXELS, region=region))
            assert same(one, other)

    def test_large_files_are_not_read_to_be_known(
        self, cache: ImageCache, paths: list[Path], save_image: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of a slide of gigabytes a part is read: path, size and times tell it, and a changed one is another."""
        monkeypatch.setattr(cache_module, "_HASHED_BYTES", 100)
        monkeypatch.setattr(cache_module, "digest_of", lambda _: pytest.fail("the source was used"))
        first = load(cache, paths[0])
        with no_decoding():
            assert same(load(cache, paths[0]), first)
            assert cache.prepare(samples_of(paths), PREPROCESS, max_pixels=PIXELS, entry_bytes=ENTRY_BYTES) == 1
        save_image(paths[0], seed=99, size=(48, 60))
        assert same(load(cache, paths[0]), plain(paths[0]))

    def test_other_sources_and_libraries_read_no_old_copy(
        self, cache: ImageCache, paths: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What decodes is a part of the key, without a number that someone has to raise."""
        load(cache, paths[0])
        for changed in ({"sources": "other"}, {"cv2": "99"}):
            cache_module._settings.cache_clear()
            monkeypatch.setattr(cache_module, "surroundings", lambda changed=changed: changed)
            load(cache, paths[0])
        cache_module._settings.cache_clear()
        assert len(entries(cache)) == 3

    def test_every_module_that_decodes_is_in_the_key(self) -> None:
        """What `load_image` imports of this package's data folder, directly or through others, is hashed, but for what comes after it."""
        package = Path(cache_module.__file__).parents[1]
        found, left = set[str](), ["data/contract.py"]
        while left:
            found.add(name := left.pop())
            for node in ast.walk(ast.parse((package / name).read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hiresvis.data"):
                    names = [alias.name for alias in node.names] if node.module == "hiresvis.data" else [node.module.rpartition(".")[2]]
                    left += {f"data/{module}.py" for module in names} - {*found, "data/augment.py"}
        assert found == set(cache_module._SOURCES)

    def test_bad_file_is_the_same_error_with_a_cache_and_leaves_nothing(self, cache: ImageCache, paths: list[Path]) -> None:
        """Damaged, missing, a folder, other channels: named as without."""
        paths[0].write_bytes(paths[0].read_bytes()[:200])
        for path, preprocess in (
            (paths[0], PREPROCESS),
            (paths[0].with_name("missing.png"), PREPROCESS),
            (paths[0].parent, PREPROCESS),
            (paths[1], replace(PREPROCESS, in_chans=5)),
        ):
            with pytest.raises(DataError) as without:
                plain(path, preprocess)
            with pytest.raises(DataError) as with_cache:
                load(cache, path, preprocess)
            assert with_cache.value.problems == without.value.problems
        assert not entries(cache)


def write_tiff(path: Path, array: np.ndarray) -> None:
    """Uncompressed: the same size whatever the pixels."""
    import tifffile

    tifffile.imwrite(path, array, photometric="rgb")


class TestEntries:
    @given(
        shape=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5)),
        seed=st.integers(0, 2**32 - 1),
        floats=st.booleans(),
        grey=st.booleans(),
        packed=st.booleans(),
    )
    def test_every_array_comes_back(self, shape: tuple[int, int, int], seed: int, floats: bool, grey: bool, packed: bool) -> None:
        """Any size, number of channels and kind of numbers, noise or flat."""
        generator = np.random.default_rng(seed)
        bits = generator.integers(0, 256 if seed % 2 else 2, (*shape, 4), dtype=np.uint8)
        array = bits.view(np.float32)[..., 0] if floats else bits[..., 0]
        array = np.ascontiguousarray(np.repeat(array[..., :1], shape[2], axis=2) if grey else array)
        data = b"".join(to_entry(array, "name", packed=packed))
        found = from_entry(np.frombuffer(data, np.uint8).copy(), "name")
        assert found is not None
        assert same(found, array)

    def test_equal_channels_are_kept_once(self, picture: Callable[..., np.ndarray]) -> None:
        """A grey image for a model of three channels takes a third."""
        grey = np.repeat(picture(24, 32, 1), 3, axis=2)
        assert sum(map(len, to_entry(grey, "name", packed=False))) == 64 + 24 * 32

    @pytest.mark.parametrize("packed", [False, True])
    def test_every_cut_flip_and_wrong_name_is_a_miss(self, picture: Callable[..., np.ndarray], packed: bool) -> None:
        """Each length below the whole, each single bit, more at the end, zeros in place of a tail, another entry's bytes."""
        data = np.frombuffer(b"".join(to_entry(picture(3, 4), "name", packed=packed)), np.uint8)
        assert from_entry(data.copy(), "name") is not None
        assert from_entry(data.copy(), "other") is None
        assert from_entry(np.concatenate([data, data[:1]]), "name") is None
        for length in range(len(data)):
            assert from_entry(data[:length].copy(), "name") is None
            if data[length:].any():
                torn = data.copy()
                torn[length:] = 0
                assert from_entry(torn, "name") is None
        for position in range(len(data) * 8):
            flipped = data.copy()
            flipped[position // 8] ^= 1 << position % 8
            assert from_entry(flipped, "name") is None, position

    @pytest.mark.parametrize("packed", [False, True])
    def test_damaged_copy_is_never_seen_and_is_replaced(self, cache: ImageCache, paths: list[Path], packed: bool) -> None:
        """Cut, flipped, empty, a folder in its place: the pixels are the file's, and the next reading needs no decoding again."""
        cache.packed = packed
        expected = load(cache, paths[0])
        (entry,) = entries(cache)
        whole = entry.read_bytes()
        for damaged in (b"", whole[:40], whole[:64], whole[:-1], whole[:100] + b"\0" + whole[101:], whole + b"\0"):
            entry.write_bytes(damaged)
            assert same(load(cache, paths[0]), expected)
            assert entry.read_bytes() == whole
            with no_decoding():
                assert same(load(cache, paths[0]), expected)
        entry.unlink()
        entry.mkdir()
        assert same(load(cache, paths[0]), expected)


class TestSeveral:
    def test_processes_at_the_same_files_while_copies_vanish_and_tear(self, cache: ImageCache, paths: list[Path]) -> None:
        """Three processes read and write, this one removes and cuts: all pixels are right, and no half-written file stays."""
        context = multiprocessing.get_context("fork")
        expected = [plain(path) for path in paths]

        def work(seed: int) -> None:
            order = np.random.default_rng(seed).integers(0, len(paths), 150)
            wrong = [index for index in order if not same(load(cache, paths[index]), expected[index])]
            os._exit(len(wrong) > 0 or bool(cache.off))

        processes = [context.Process(target=work, args=(seed,)) for seed in range(3)]
        for process in processes:
            process.start()
        generator = np.random.default_rng(9)
        while any(process.is_alive() for process in processes):
            for entry in entries(cache):
                with suppress(FileNotFoundError):  # the others replace it
                    if entry.suffix != ".tmp" and generator.random() < 0.3:
                        entry.unlink() if generator.random() < 0.5 else os.truncate(entry, 50)
            time.sleep(0.001)
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0, 0, 0]
        assert not list(cache.folder.rglob("*.tmp"))

    def test_two_at_the_same_copy_do_not_meet(self, cache: ImageCache, paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        """Both have written before either takes its place: each has a file of its own."""
        both, replace_ = threading.Barrier(2, timeout=20), Path.replace

        def meet(path: Path, target: Path) -> Path:
            both.wait()
            return replace_(path, target)

        monkeypatch.setattr(Path, "replace", meet)
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda _: load(cache, paths[0]), range(2)))
        monkeypatch.undo()
        assert all(same(array, plain(paths[0])) for array in found)
        assert not cache.off
        assert len(entries(cache)) == 1

    def test_process_killed_while_writing_leaves_what_is_removed_later(self, cache: ImageCache, paths: list[Path]) -> None:
        """Its half-written file is never read, and goes once it is an hour old; that of a living process stays."""

        def work() -> None:
            Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
            load(cache, paths[0])

        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        (left,) = cache.folder.rglob("*.tmp")
        os.truncate(left, 1000)
        assert not [path for path in entries(cache) if path != left]
        cache.prepare(samples_of(paths), PREPROCESS, max_pixels=PIXELS, entry_bytes=ENTRY_BYTES)
        assert left.exists()
        os.utime(left, (0, time.time() - 7200))
        assert cache.prepare(samples_of(paths), PREPROCESS, max_pixels=PIXELS, entry_bytes=ENTRY_BYTES) == 0
        assert not left.exists()
        assert same(load(cache, paths[0]), plain(paths[0]))


class TestDisk:
    def test_disk_that_fills_up_turns_keeping_off_and_images_still_come(self, cache: ImageCache, paths: list[Path]) -> None:
        """The system cuts a write short (a real limit on file sizes): one reason, no torn file, and what was kept is still read."""
        load(cache, paths[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            found = [load(cache, path) for path in paths]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert all(same(array, plain(path)) for array, path in zip(found, paths, strict=True))
        assert "no space left on device" in cache.off
        assert len(entries(cache)) == 1
        with no_decoding():
            load(cache, paths[0])

    def test_folder_that_cannot_be_written_turns_keeping_off(self, tmp_path: Path, paths: list[Path]) -> None:
        """A file where the folder should be: errors of any kind are one notice."""
        (tmp_path / "file").write_text("")
        cache = ImageCache(tmp_path / "file" / "cache", 10**9)
        assert cache.prepare(samples_of(paths), PREPROCESS, max_pixels=PIXELS, entry_bytes=ENTRY_BYTES) == 0
        assert all(same(load(cache, path), plain(path)) for path in paths)
        assert "not a directory" in cache.off

    def test_some_of_the_disk_is_left_free(self, cache: ImageCache, paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        """Snapshots need it more."""
        monkeypatch.setattr(cache_module, "KEPT_FREE_BYTES", shutil.disk_usage(cache.folder.parent).total)
        load(cache, paths[0])
        assert "less than" in cache.off
        assert not entries(cache)

    def test_cap_is_kept_and_what_is_beyond_it_is_decoded(self, cache: ImageCache, paths: list[Path]) -> None:
        """Copies that are there stay: an epoch takes each image once, so those that came first are as good as any."""
        cache.cap_bytes = 3 * cache_module._UNIT_BYTES
        for _ in range(2):
            assert all(same(load(cache, path), plain(path)) for path in paths)
        assert len(entries(cache)) == 3
        assert cache.used_bytes() == cache.cap_bytes
        assert not cache.off

    def test_full_cache_makes_no_copy_and_no_link_to_one(
        self, cache: ImageCache, paths: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first that finds no room is the last that is packed, in any epoch, until a run readies the folder anew."""
        cache.cap_bytes = 3 * cache_module._UNIT_BYTES
        made: list[str] = []
        monkeypatch.setattr(cache_module, "to_entry", lambda array, name, **named: (made.append(name), to_entry(array, name, **named))[1])
        for _ in range(2):
            for path in paths:
                load(cache, path)
            for path in paths:
                cache.fill(path, PREPROCESS, plain(path), file_state(path), digest_of(path), max_pixels=PIXELS)
        assert len(made) == 4
        assert len(list(cache.folder.glob("refs/*/*"))) == len(entries(cache)) == 3
        cache.cap_bytes = 10**9
        cache.prepare(samples_of(paths), PREPROCESS, max_pixels=PIXELS, entry_bytes=ENTRY_BYTES)
        for path in paths:
            load(cache, path)
        assert len(list(cache.folder.glob("refs/*/*"))) == len(entries(cache)) == len(paths)

    def test_longest_unused_copies_of_other_files_make_room(self, cache: ImageCache, paths: list[Path]) -> None:
        """Those of the run itself stay, the oldest of the others go, and links that lead nowhere with them."""
        for age, path in enumerate(paths):
            load(cache, path)
            os.utime(newest := max(entries(cache), key=lambda entry: entry.stat().st_ctime_ns), (0, 1000.0 - age))
        assert newest in entries(cache)
        sizes = sum(entry.stat().st_size for entry in entries(cache))
        cache.cap_bytes = sizes
        own, others = paths[5:7], [path for path in paths if path not in paths[5:7]]
        new = [path.with_name(f"new{number}.png") for number in range(2)]
        present = cache.prepare(samples_of([*own, *new]), PREPROCESS, max_pixels=PIXELS, entry_bytes=ENTRY_BYTES)
        assert present == 2
        with no_decoding():
            for path in [*own, *others[:4]]:
                load(cache, path)  # 7, 4 were the oldest but for the run's own 6 and 5
        assert len(entries(cache)) == 6
        assert len(list(cache.folder.glob("refs/*/*"))) == 6
        assert cache.used_bytes() <= cache.cap_bytes + cache_module._UNIT_BYTES

    def test_copies_of_the_run_itself_stay_when_the_cap_is_too_small_for_it(self, cache: ImageCache, paths: list[Path]) -> None:
        """Else each start would trade what it has for what it lacks."""
        for path in paths[:4]:
            load(cache, path)
        cache.cap_bytes = 4 * ENTRY_BYTES
        assert cache.prepare(samples_of(paths), PREPROCESS, max_pixels=PIXELS, entry_bytes=ENTRY_BYTES) == 4
        assert len(entries(cache)) == 4

    def test_nothing_is_removed_where_there_is_room(self, cache: ImageCache, paths: list[Path]) -> None:
        """Another recipe's copies stay as long as both fit."""
        for path in paths:
            load(cache, path)
        assert cache.prepare(samples_of(paths[:2]), PREPROCESS, max_pixels=PIXELS, entry_bytes=ENTRY_BYTES) == 2
        assert len(entries(cache)) == len(paths)


class TestLoaders:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_epochs_with_copies_are_those_without_bit_for_bit(self, cache: ImageCache, paths: list[Path], workers: int) -> None:
        """Training with heavy augmentation and evaluation, filling the cache and reading from it."""
        samples = tuple(Sample(path, index % 2, str(path)) for index, path in enumerate(paths))
        pipeline = Pipeline(PREPROCESS, make_augment("heavy", image_size=SIZE))

        def items(used: ImageCache | None, workers: int) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
            options: dict[str, Any] = {"max_pixels": PIXELS, "workers": workers, "cache": used}
            found = []
            train = TrainLoader(samples, pipeline, batch=4, micro_batch=3, seed=5, **options)
            with closing(train), closing(EvalLoader(samples, PREPROCESS, batch=4, **options)) as evaluation:
                for epoch in range(2):
                    train.set_epoch(epoch)
                    found += [(item.images, item.indices) for item in (*train, *evaluation)]
            return found

        without = items(None, 0)
        for _ in range(2):
            found = items(cache, workers)
            assert len(found) == len(without)
            assert all(torch.equal(one[0], other[0]) and one[1] == other[1] for one, other in zip(found, without, strict=True))
        assert len(entries(cache)) == len(paths)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_loader_tells_once_that_keeping_was_turned_off(self, tmp_path: Path, paths: list[Path], workers: int) -> None:
        """From whichever process it happened in."""
        (tmp_path / "file").write_text("")
        samples = tuple(Sample(path, 0, str(path)) for path in paths)
        broken = ImageCache(tmp_path / "file", 10**9)
        with closing(EvalLoader(samples, PREPROCESS, max_pixels=PIXELS, batch=2, workers=workers, cache=broken)) as loader:
            assert sum(len(item.indices) for item in loader) == len(paths)
            assert len(loader.notes) == 1
            assert loader.notes[0].startswith("data.cache: nothing more is kept in")

    def test_check_keeps_what_it_decodes(self, cache: ImageCache, paths: list[Path], picture: Callable[..., np.ndarray]) -> None:
        """One decode for the check and for the first epoch; a bad file is found as without. A JPEG that training reads smaller is decoded
        in full by the check, and is not kept."""
        reduced = paths[0].with_name("reduced.jpg")
        Image.fromarray(picture(48, 64)).save(reduced)
        paths.append(reduced)
        paths[3].write_bytes(paths[3].read_bytes()[:300])
        samples = tuple(Sample(path, index % 2, str(path)) for index, path in enumerate(paths))
        datasets = Datasets(Dataset(samples[:6], ("a", "b")), Dataset(samples[6:], ("a", "b")), None, ("a", "b"))
        without = finished(check_steps(datasets, max_pixels=PIXELS, preprocess=PREPROCESS))
        found = finished(check_steps(datasets, max_pixels=PIXELS, preprocess=PREPROCESS, copies=cache))
        assert found == without
        assert len(found.errors) == 1
        with no_decoding():
            kept = [load(cache, path) for path in (*paths[:3], *paths[4:8])]
        assert all(same(array, plain(path)) for array, path in zip(kept, (*paths[:3], *paths[4:8]), strict=True))
        assert len(entries(cache)) == 7


def test_files_with_the_same_bytes_have_the_same_hash(paths: list[Path]) -> None:
    """And a file that cannot be read has none."""
    copied = shutil.copy(paths[0], paths[0].with_name("copy"))
    assert digest_of(paths[0]) == digest_of(Path(copied)) != digest_of(paths[1])
    assert digest_of(paths[0].with_name("missing")) is None
