"""Masks: what is read of which file, what is refused with its mend, and that image and mask go the same way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from hiresvis.data.augment import make_augment, usable_library
from hiresvis.data.check import check_steps, finished
from hiresvis.data.loader import EvalLoader, TrainLoader
from hiresvis.data.mask_census import look_at_masks, values_held
from hiresvis.data.masks import IGNORED, Masks, read_values, values_of
from hiresvis.data.micro_batch import ImageSource, load_pair
from hiresvis.data.sources import Datasets, load_dataset, load_datasets
from hiresvis.data.transforms import Pipeline, Preprocess
from hiresvis.errors import DataError

LIMIT = 10**6
VALUES = np.arange(6 * 8, dtype=np.uint8).reshape(6, 8) % 3
MASKS = Masks((0, 1, 2), 255)
COLOURS = np.array([[20, 20, 20], [230, 20, 20], [20, 230, 20]], np.uint8)


def save(path: Path, mask: np.ndarray, mode: str | None = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(mask)
    if mode == "P":
        image.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200])
    elif mode is not None:
        image = image.convert(mode)
    image.save(path, **options)
    return path


def coloured(mask: np.ndarray) -> np.ndarray:
    """An image that shows its mask."""
    return COLOURS[np.where(mask == 255, 0, mask)]


def shown_by(array: np.ndarray) -> np.ndarray:
    """The classes that such an image shows, whatever was done to its colours; 255 where two are mixed."""
    bright = array.astype(int) > 128
    classes = np.where(bright[..., 0], 1, np.where(bright[..., 1], 2, 0))
    pure = (np.abs(array.astype(int) - COLOURS[classes]).max(axis=2)) < 3
    return np.where(pure, classes, 255).astype(np.uint8)


def blocks(height: int, width: int, seed: int = 0, side: int = 16) -> np.ndarray:
    grid = np.random.default_rng(seed).integers(0, 3, (-(-height // side), -(-width // side)), dtype=np.uint8)
    return np.kron(grid, np.ones((side, side), np.uint8))[:height, :width]


@pytest.fixture
def pairs(tmp_path: Path) -> Callable[..., Path]:
    """pairs({"a": mask, ...}) -> a folder of images/ that show their masks, and masks/."""

    def make(masks: dict[str, np.ndarray], name: str = "train") -> Path:
        for stem, mask in masks.items():
            save(tmp_path / name / "images" / f"{stem}.png", coloured(mask))
            save(tmp_path / name / "masks" / f"{stem}.png", mask)
        return tmp_path / name

    return make


def load(train: Path, val: Path | float = 0.25, **options: Any) -> Datasets:
    read = lambda masks: values_held(masks, ignore=255, max_pixels=LIMIT, cache_folder=None)  # noqa: E731
    return load_datasets(train, val, task="segment", read_mask_values=read, **options)


class TestReading:
    @pytest.mark.parametrize(
        ("kind", "suffix"),
        [("grey", ".png"), ("palette", ".png"), ("16 bit", ".png"), ("tiff", ".tif"), ("1 bit", ".png"), ("4 bit", ".png")],
    )
    def test_the_stored_values_are_the_classes_in_every_kind_of_file(self, tmp_path: Path, kind: str, suffix: str) -> None:
        """Palettes' colours do not count, nothing is stretched, and 16 bits keep their values."""
        path, wanted = tmp_path / f"mask{suffix}", VALUES
        if kind == "palette":
            save(path, VALUES, "P")
        elif kind == "16 bit":
            wanted = VALUES.astype(np.uint16) * 300
            save(path, wanted)
        elif kind == "tiff":
            tifffile.imwrite(path, VALUES)
        elif kind == "1 bit":
            wanted = VALUES % 2
            Image.fromarray(wanted.astype(bool)).save(path)
        else:
            save(path, VALUES, "P" if kind == "4 bit" else None, **({"bits": 4} if kind == "4 bit" else {}))
        assert read_values(path, max_pixels=LIMIT).tolist() == wanted.tolist()

    def test_a_mask_is_turned_as_its_file_says(self, tmp_path: Path, turned: Callable[..., Any]) -> None:
        """As its image is."""
        for orientation in range(1, 9):
            stored, exif = turned(VALUES[..., None], orientation)
            save(tmp_path / "mask.png", stored[..., 0], exif=exif)
            assert read_values(tmp_path / "mask.png", max_pixels=LIMIT).tolist() == VALUES.tolist(), orientation

    @pytest.mark.parametrize(
        ("mode", "suffix", "message"),
        [
            ("RGB", ".png", r"holds colours \(RGB\), and a mask holds one class number a pixel; save it as PNG of one channel"),
            ("LA", ".png", r"holds transparency \(LA\)"),
            ("L", ".jpg", r"is a JPEG file, which changes values; save it as PNG"),
            ("L", ".bmp", r"is a BMP file; save it as PNG"),
        ],
    )
    def test_what_cannot_be_a_mask_is_refused_with_the_mend(self, tmp_path: Path, mode: str, suffix: str, message: str) -> None:
        """Colours, transparency and lossy files are named as what they are."""
        path = save(tmp_path / f"mask{suffix}", VALUES, mode)
        with pytest.raises(DataError, match=message):
            read_values(path, max_pixels=LIMIT)

    @pytest.mark.parametrize("mode", [None, "P"])
    def test_a_cut_mask_is_damaged_not_half_a_mask(self, tmp_path: Path, mode: str | None) -> None:
        """Also one with a palette, which Pillow alone would let pass with its last bytes gone."""
        path = save(tmp_path / "mask.png", blocks(200, 200), mode)
        path.write_bytes(path.read_bytes()[:-14])
        with pytest.raises(DataError, match="damaged PNG"):
            read_values(path, max_pixels=LIMIT)

    def test_values_become_class_numbers_and_others_are_named(self, tmp_path: Path) -> None:
        """In the order of the classes; the ignored value is none; a value that is no class is an error with the file and the value."""
        path = save(tmp_path / "mask.png", np.array([[0, 200], [255, 0]], np.uint8))
        assert Masks((200, 0), 255).read(path, max_pixels=LIMIT).tolist() == [[1, 0], [IGNORED, 1]]
        with pytest.raises(DataError, match=r"mask\.png.*holds the value 200, and the classes are 0, 1, 2, and 255 is ignored"):
            MASKS.read(path, max_pixels=LIMIT)
        with pytest.raises(DataError, match=r"holds the value 255, and the classes are 0, 200; add"):
            Masks((0, 200), None).read(path, max_pixels=LIMIT)

    def test_names_that_are_numbers_are_the_values(self) -> None:
        """Others count from 0, past the ignored value."""
        assert values_of(("0", "255"), None) == (0, 255)
        assert values_of(("a", "1"), 255) == (0, 1)
        assert values_of(("a", "b", "c"), 1) == (0, 2, 3)


class TestSources:
    def test_images_and_masks_are_paired_by_stem_and_classes_are_the_values_found(self, pairs: Callable[..., Path]) -> None:
        """At any depth; the ignored value is no class; each split finds its own masks."""
        mask = blocks(32, 32)
        mask[0, 0] = 255
        root = pairs({"a": mask, "deep/b": blocks(32, 32, 1), "c": blocks(32, 32, 2), "d": blocks(32, 32, 3)})
        found = load(root)
        assert found.classes == ("0", "1", "2")
        assert len(found.train) == 3
        assert all(sample.mask is not None and sample.mask.stem == sample.path.stem for sample in found.train.samples)

    def test_a_file_of_names_is_in_the_order_of_the_values(self, pairs: Callable[..., Path]) -> None:
        """classes.txt names the values; the recipe's own list goes before it."""
        root = pairs({stem: blocks(32, 32, number) for number, stem in enumerate("abcd")})
        (root / "classes.txt").write_text("ground\nroof\ntree\n", encoding="utf-8")
        assert load(root).classes == ("ground", "roof", "tree")
        assert load(root, classes=("x", "y", "z")).classes == ("x", "y", "z")

    def test_every_image_without_a_mask_is_told_at_once(self, pairs: Callable[..., Path]) -> None:
        """By name, with where the mask should be; so are two images of one stem."""
        root = pairs({stem: VALUES for stem in "abcd"})
        (root / "masks" / "b.png").unlink()
        (root / "masks" / "c.png").unlink()
        save(root / "images" / "d.bmp", coloured(VALUES))
        with pytest.raises(DataError) as error:
            load(root)
        text = str(error.value)
        assert "b.png  has no mask; expected masks/b.png" in text
        assert "c.png  has no mask; expected masks/c.png" in text
        assert "images/d.bmp and images/d.png would share a mask" in text

    @pytest.mark.parametrize(("value", "message"), [(0, "the masks hold the value 0 alone"), (255, "no mask holds a class")])
    def test_one_class_is_nothing_to_learn(self, pairs: Callable[..., Path], value: int, message: str) -> None:
        """A mask of 0 and 255 with 255 ignored is the case that people meet: the message says what is ignored."""
        mask = np.full((8, 8), value, np.uint8)
        mask[0] = 255
        with pytest.raises(DataError, match=f"{message}.*data.ignore_index says which value is ignored"):
            load(pairs({stem: mask for stem in "abcd"}))

    def test_a_table_names_masks_and_an_empty_cell_is_the_first_class(self, pairs: Callable[..., Path]) -> None:
        """Paths start at the table's folder; a mask that is not there is told with its row, a null too."""
        root = pairs({"a": blocks(32, 32), "b": blocks(32, 32, 1)})
        rows = "path,mask\nimages/a.png,masks/a.png\nimages/b.png,\n"
        (root / "t.csv").write_text(rows, encoding="utf-8")
        found = load_dataset(root / "t.csv", task="segment", classes=("0", "1", "2"), label_column="mask")
        assert [sample.mask for sample in found.samples] == [root / "masks" / "a.png", None]
        (root / "t.csv").write_text(rows.replace("masks/a", "masks/x").replace("b.png,", "b.png,nan"), encoding="utf-8")
        with pytest.raises(DataError, match=r"t\.csv:2.*no such mask: .*masks/x\.png[\s\S]*t\.csv:3.*no mask in column 'mask' \(NaN\)"):
            load_dataset(root / "t.csv", task="segment", classes=("0", "1", "2"), label_column="mask")

    def test_other_masks_are_other_data(self, pairs: Callable[..., Path]) -> None:
        """The fingerprint that a resume is held against tells masks apart by name."""
        root = pairs({"a": VALUES, "b": VALUES})
        prints = []
        for name in ("a", "b"):
            (root / "t.csv").write_text(f"path,mask\nimages/a.png,masks/{name}.png\n", encoding="utf-8")
            prints.append(load_dataset(root / "t.csv", task="segment", classes=("0", "1"), label_column="mask").fingerprint())
        assert prints[0] != prints[1]


class TestCheck:
    def test_counts_of_pixels_and_images_by_class(self, pairs: Callable[..., Path], tmp_path: Path) -> None:
        """By split, the ignored pixels apart; a second check reads no mask again and finds the same."""
        first = np.zeros((10, 10), np.uint8)
        first[:3], first[3] = 1, 255
        second = np.full((10, 10), 2, np.uint8)
        train = pairs({"a": first, "b": second, "c": first})
        val = pairs({"d": first}, "val")
        report = None
        for _ in range(2):
            report = finished(check_steps(load(train, val), max_pixels=LIMIT, cache_folder=tmp_path / "cache", masks=MASKS))
            assert report.errors == ()
            assert report.splits["train"]["pixels"] == {"0": 120, "1": 60, "2": 100}
            assert report.splits["train"]["classes"] == {"0": 2, "1": 2, "2": 1}
            assert report.splits["train"]["ignored_pixels"] == 20
            assert report.splits["val"]["classes"] == {"0": 1, "1": 1, "2": 0}
        mask = train / "masks" / "a.png"
        ((_, found),) = look_at_masks([mask], max_pixels=LIMIT, cache_folder=tmp_path / "cache", may_decode=lambda: False)
        assert found.counts == {0: 60, 1: 30, 255: 10}

    def test_every_fault_of_a_mask_is_told_with_file_and_numbers(self, pairs: Callable[..., Path], tmp_path: Path) -> None:
        """Another size, a strange value, colours and damage, all in one report; with bad_images skip they are warnings in train."""
        train = pairs({stem: blocks(32, 48, number) for number, stem in enumerate("abcdef")})
        save(train / "masks" / "a.png", blocks(48, 32))
        save(train / "masks" / "b.png", np.full((32, 48), 7, np.uint8))
        save(train / "masks" / "c.png", coloured(blocks(32, 48)))
        (train / "masks" / "d.png").write_bytes((train / "masks" / "d.png").read_bytes()[:60])
        datasets = load(train, pairs({"g": blocks(32, 48)}, "val"), classes=("0", "1", "2"))
        report = finished(check_steps(datasets, max_pixels=LIMIT, masks=MASKS))
        text = "\n".join(map(str, report.errors))
        assert "a.png, that is 32 x 48 px where the image is shown with 48 x 32 px (width x height)" in text
        assert "b.png, that holds the value 7, and the classes are 0, 1, 2, and 255 is ignored" in text
        assert "c.png, that holds colours (RGB)" in text
        assert "d.png, that is a damaged PNG" in text
        assert len(report.errors) == 4
        assert all(problem.place.startswith(str(train / "images")) for problem in report.errors)
        assert finished(check_steps(datasets, max_pixels=LIMIT, masks=MASKS, bad_images="skip")).errors == ()
        fast = "\n".join(map(str, finished(check_steps(datasets, max_pixels=LIMIT, masks=MASKS, fast=True)).errors))
        assert "a.png, that is 32 x 48 px" in fast
        assert "holds the value" not in fast

    def test_the_size_is_that_of_the_image_as_shown(self, pairs: Callable[..., Path], turned: Callable[..., Any]) -> None:
        """A photo that EXIF turns wants a mask of the turned size."""
        mask = blocks(32, 48)
        train = pairs({"a": mask, "b": mask})
        stored, exif = turned(coloured(mask), 6)
        save(train / "images" / "a.png", stored, exif=exif)
        datasets = load(train, pairs({"g": mask}, "val"), classes=("0", "1", "2"))
        assert finished(check_steps(datasets, max_pixels=LIMIT, masks=MASKS)).errors == ()
        sample = next(sample for sample in datasets.train.samples if sample.path.stem == "a")
        array, loaded = load_pair(sample, Pipeline(Preprocess((32, 48)), None, MASKS), max_pixels=LIMIT, seed=0)
        assert (shown_by(array) == loaded).all()


@pytest.fixture
def no_albumentations(monkeypatch: pytest.MonkeyPatch):
    """Importing albumentations fails, as where it is not installed."""
    import sys

    monkeypatch.setitem(sys.modules, "albumentations", None)
    monkeypatch.delitem(sys.modules, "hiresvis.data.albumentations_steps", raising=False)
    usable_library.cache_clear()
    yield
    usable_library.cache_clear()


class TestAlike:
    @pytest.mark.parametrize("fit", ["resize", "letterbox", "tile"])
    @pytest.mark.parametrize("size", [(64, 64), (48, 80)])
    def test_image_and_mask_go_the_same_way(self, pairs: Callable[..., Path], fit: str, size: tuple[int, int]) -> None:
        """Resized, padded or cut, and turned by augmentation: where a pixel shows one class, the mask says it; padding is no class."""
        root = pairs({"a": blocks(150, 110), "b": blocks(40, 200, 1), "c": blocks(64, 64, 2), "d": blocks(64, 64, 3)})
        samples = load(root, pairs({"e": blocks(64, 64)}, "val")).train.samples
        preprocess = Preprocess(size, fit, background=(128, 128, 128))
        pipeline = Pipeline(preprocess, make_augment("light", image_size=size), MASKS)
        for sample in samples:
            for seed in range(6):
                array, mask = load_pair(sample, pipeline, max_pixels=LIMIT, seed=seed)
                assert array.shape[:2] == mask.shape == size
                shown = shown_by(array)
                certain = (shown != 255) & (mask != IGNORED)
                assert (shown[certain] == mask[certain]).mean() > 0.995, (sample.name, seed)
                assert certain.mean() > 0.6 * (mask != IGNORED).mean()
                assert (shown[mask == IGNORED] == 255).all()  # grey: padding and nothing else

    @pytest.mark.parametrize("library", ["albumentations", "torchvision"])
    @pytest.mark.parametrize("strength", ["standard", "heavy"])
    def test_presets_of_both_libraries_move_the_mask_with_the_image(
        self, request: pytest.FixtureRequest, library: str, strength: str
    ) -> None:
        """Colours change the image alone; the mask holds no value that it did not hold; the image is the same without a mask."""
        if library == "torchvision":
            request.getfixturevalue("no_albumentations")
        augment = make_augment(strength, image_size=(96, 96))
        assert augment is not None
        assert augment.library == library
        mask = np.where(blocks(96, 96, 5, side=32) == 2, 2, 0).astype(np.uint8)  # a mixture of the two would be a class of its own
        moved_any = False
        for seed in range(12):
            array, moved = augment.with_mask(coloured(mask), mask, seed)
            assert set(np.unique(moved)) <= {0, 2}
            channels = array.astype(int)
            guess = np.where(channels[..., 0] > channels[..., 1] + 70, 1, np.where(channels[..., 1] > channels[..., 0] + 70, 2, 0))
            assert (guess == moved).mean() > 0.9, seed
            moved_any |= bool((moved != mask).any())
            assert (array == augment(coloured(mask), seed)).all()
        assert moved_any

    def test_what_comes_from_outside_is_no_class(self) -> None:
        """A step of the user's with a flat border: the mask does not take it for class 0."""
        step = {"name": "Affine", "translate_percent": [0.5, 0.5], "border_mode": 0, "p": 1.0}
        augment = make_augment([step], image_size=(32, 32))
        assert augment is not None
        _, moved = augment.with_mask(np.zeros((32, 32, 3), np.uint8), np.ones((32, 32), np.uint8), 0)
        assert (moved[:15] == IGNORED).all()
        assert (moved[17:, 17:] == 1).all()


class TestLoaders:
    def test_training_gives_class_numbers_beside_pixels_whatever_the_workers(self, pairs: Callable[..., Path]) -> None:
        """(b, h, w) bytes, the same in another process; an unreadable mask leaves its image out where that is asked."""
        root = pairs({stem: blocks(64, 64, number) for number, stem in enumerate("abcdef")})
        samples = load(root, pairs({"g": blocks(64, 64)}, "val")).train.samples
        pipeline = Pipeline(Preprocess((32, 32)), make_augment("standard", image_size=(32, 32)), MASKS)
        found = []
        for workers in (0, 1):
            loader = TrainLoader(samples, pipeline, max_pixels=LIMIT, batch=4, micro_batch=3, seed=1, workers=workers)
            found.append([(item.images.clone(), item.targets.clone()) for item in loader])
            loader.close()
        assert all(torch.equal(one, two) for pair in zip(*found, strict=True) for one, two in zip(*pair, strict=True))
        assert [tuple(targets.shape) for _, targets in found[0]] == [(2, 32, 32)] * 3
        assert found[0][0][1].dtype == torch.uint8
        save(root / "masks" / "c.png", coloured(blocks(64, 64)))
        loader = TrainLoader(samples, pipeline, max_pixels=LIMIT, batch=6, micro_batch=4, seed=1, bad_images="skip")
        items = list(loader)
        assert [item.batch_images for item in items] == [5, 5]
        assert sum(len(item.targets) for item in items) == 5
        assert "holds colours" in loader.skipped[0][1]

    def test_masks_count_in_shared_memory(self, pairs: Callable[..., Path]) -> None:
        """A byte a pixel: of the model's size in training and in windows, of the largest image where evaluation hands masks on whole."""
        samples = load(pairs({"a": blocks(40, 30), "b": blocks(70, 50, 1)}), pairs({"g": VALUES}, "val")).train.samples
        for fit, training, wanted in (("resize", True, 32 * 32), ("tile", False, 32 * 32), ("resize", False, 70 * 50)):
            pipeline = Pipeline(Preprocess((32, 32), fit), None, MASKS)
            assert ImageSource(samples, pipeline, LIMIT, 0, False, training, with_truth=True).mask_bytes() == wanted
        assert ImageSource(samples, pipeline, LIMIT, 0, False, False).mask_bytes() == 0

    @pytest.mark.parametrize("fit", ["letterbox", "tile"])
    def test_evaluation_gives_masks_as_they_are_and_places(self, pairs: Callable[..., Path], fit: str) -> None:
        """The parts that inputs show cover the image, and each truth is the mask's own pixels there."""
        mask = blocks(70, 50)
        root = pairs({"a": mask, "b": blocks(20, 20, 1)})
        samples = load(root, pairs({"g": mask}, "val")).train.samples
        loader = EvalLoader(samples, Preprocess((32, 32), fit), max_pixels=LIMIT, batch=3, masks=MASKS)
        covered = np.zeros((70, 50), bool)
        for item in loader:
            for index, place, truth in zip(item.indices, item.places, item.truths, strict=True):
                if samples[index].path.stem == "a":
                    assert place.size == (70, 50)
                    assert truth.tolist() == mask[place.part.slices].tolist()
                    covered[place.part.slices] = True
        assert covered.all()
