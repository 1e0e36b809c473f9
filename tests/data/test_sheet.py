"""The contact sheet shows what the loader gives: real pixels, real draws, in one page that holds all."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile

from hiresvis.data.augment import make_augment
from hiresvis.data.micro_batch import load_sample
from hiresvis.data.sheet import DRAWS, MOST_IMAGES, SIDE_PX, show_images
from hiresvis.data.sources import load_datasets
from hiresvis.data.transforms import Pipeline, Preprocess, Scale, sample_seed
from hiresvis.ui.sheet import render_sheet


def pixels(uri: str) -> np.ndarray:
    """A picture of the page, RGB or grey."""
    data = np.frombuffer(base64.b64decode(uri.partition(",")[2]), np.uint8)
    array = cv2.imdecode(data, cv2.IMREAD_UNCHANGED)
    assert array is not None
    return array if array.ndim == 2 else array[..., ::-1]


def test_pictures_are_what_training_gets(make_folders: Callable[..., Path]) -> None:
    """Whole image, middle, and the draws of the first epochs, by class, three of each."""
    datasets = load_datasets(make_folders("train", {"a": 5, "b": 2}), make_folders("val", {"a": 1, "b": 1}))
    pipeline = Pipeline(Preprocess((96, 128)), make_augment("light", image_size=(96, 128)))
    images = list(show_images(datasets.train, pipeline, max_pixels=10**6, seed=3))
    assert [(image.label, image.name) for image in images] == [
        ("a", "a/000.png"), ("a", "a/001.png"), ("a", "a/003.png"), ("b", "b/000.png"), ("b", "b/001.png")
    ]  # fmt: skip
    position = next(number for number, sample in enumerate(datasets.train.samples) if sample.name == "a/003.png")
    plain = pipeline.preprocess(cv2.imread(str(datasets.train.samples[position].path))[..., ::-1])
    assert np.abs(pixels(images[2].whole).astype(int) - plain).mean() < 8
    assert pipeline.augment is not None
    for epoch, draw in enumerate(images[2].draws, start=1):
        assert np.abs(pixels(draw).astype(int) - pipeline.augment(plain, sample_seed(3, epoch, position))).mean() < 8
    assert len(images[2].draws) == DRAWS


@pytest.mark.parametrize(("dtype", "channels", "shape"), [(np.uint8, 1, 2), (np.uint16, 1, 2), (np.uint16, 3, 3), (np.float32, 5, 3)])
def test_grey_deep_and_many_channels_can_be_seen(tmp_path: Path, dtype: Any, channels: int, shape: int) -> None:
    """16 bits and floats by their scale; of five channels the first three; large ones reduced, the middle pixel for pixel."""
    for split in ("train", "val"):
        for label in "ab":
            (tmp_path / split / label).mkdir(parents=True)
            ramp = np.linspace(0, 4000 if dtype == np.uint16 else 1 if dtype == np.float32 else 255, 700)
            array = np.tile(ramp[None, :, None], (600, 1, channels)).astype(dtype)
            kind = {"photometric": "rgb" if channels == 3 else "minisblack", "planarconfig": "contig"}
            options = {} if channels == 1 else kind
            tifffile.imwrite(tmp_path / split / label / "x.tif", array[..., 0] if channels == 1 else array, **options)
    scale = Scale("range", 0, 4000) if dtype == np.uint16 else Scale()
    pipeline = Pipeline(Preprocess((600, 700), in_chans=channels, scale=scale))
    image, _ = show_images(load_datasets(tmp_path / "train", tmp_path / "val").train, pipeline, max_pixels=10**6, seed=0)
    whole, detail = pixels(image.whole), pixels(image.detail)
    assert whole.ndim == shape
    assert max(whole.shape[:2]) == SIDE_PX
    assert (int(whole[90, 2].max()), int(whole[90, -3].min())) == (pytest.approx(2, abs=8), pytest.approx(253, abs=8))
    assert detail.shape == whole.shape
    assert int(detail[90, -1].max()) - int(detail[90, 0].min()) == pytest.approx(255 * SIDE_PX / 700, abs=8)


def test_windows_are_shown_where_training_takes_them(make_folders: Callable[..., Path]) -> None:
    """With data.fit: crop each epoch sees another part at full resolution, and so does the sheet, also where nothing is augmented."""
    datasets = load_datasets(make_folders("train", {"a": 1, "b": 1}), make_folders("val", {"a": 1, "b": 1}))
    pipeline = Pipeline(Preprocess((8, 8), "crop"))
    image, _ = show_images(datasets.train, pipeline, max_pixels=10**6, seed=5)
    sample = datasets.train.samples[0]
    for epoch, draw in enumerate(image.draws, start=1):
        window = load_sample(sample, pipeline, max_pixels=10**6, seed=sample_seed(5, epoch, 0))
        assert np.abs(pixels(draw).mean(axis=2) - window.mean(axis=2)).mean() < 12  # colours are stored at half the size
    assert len(set(image.draws)) == DRAWS


def test_page_is_small_escaped_and_whole(make_folders: Callable[..., Path]) -> None:
    """Eighty classes with names that are HTML: a part is shown and said so, nothing is fetched, a few MB."""
    names = {f"<i>{number:02d}&": 2 for number in range(80)}
    datasets = load_datasets(make_folders("train", names), make_folders("val", {"<i>00&": 1}))
    cut = datasets.train.samples[0].path
    cut.write_bytes(cut.read_bytes()[:100])
    pipeline = Pipeline(Preprocess((256, 256)), make_augment("heavy", image_size=(256, 256)))
    images = list(show_images(datasets.train, pipeline, max_pixels=10**6, seed=0))
    assert len(images) == MOST_IMAGES
    page = render_sheet("<b>.yaml", {"augment": "heavy & more"}, images, 80)
    assert len(page) < 5e6
    assert f"{MOST_IMAGES} of 80 classes are shown" in page
    assert "&lt;i&gt;01&amp;/000.png" in page
    assert "<i>" not in page
    assert "not shown: is a damaged PNG" in page or "not shown: has a damaged header" in page
    assert set(re.findall(r'src="(.{10})', page)) == {"data:image"}
    assert "http" not in page
