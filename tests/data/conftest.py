"""Small images and folders of them, made by the tests that need them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")


def _picture(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Smooth colour with some noise: (height, width, channels) uint8, every part of it different."""
    rows, columns = np.mgrid[0:height, 0:width]
    planes = [(rows * (2 + k) + columns * (3 - k) + 40 * k + 13 * seed) % 256 for k in range(channels)]
    noise = np.random.default_rng(seed).integers(-6, 7, (height, width, channels))
    return np.clip(np.stack(planes, axis=2) + noise, 0, 255).astype(np.uint8)


@pytest.fixture
def picture() -> Callable[..., np.ndarray]:
    return _picture


@pytest.fixture
def turned() -> Callable[..., tuple[np.ndarray, Image.Exif]]:
    """turned(upright, orientation) -> the pixels as a camera held so stores them, and the EXIF that says it."""

    def turn(upright: np.ndarray, orientation: int) -> tuple[np.ndarray, Image.Exif]:
        stored = {
            1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1],
            5: upright.transpose(1, 0, 2), 6: np.rot90(upright, 1), 7: upright[::-1, ::-1].transpose(1, 0, 2), 8: np.rot90(upright, -1),
        }[orientation]  # fmt: skip
        exif = Image.Exif()
        exif[274] = orientation
        return np.ascontiguousarray(stored), exif

    return turn


@pytest.fixture
def save_image() -> Callable[..., Path]:
    """save_image(path, seed=0, size=(24, 32), **options of Pillow) -> path, folders made."""

    def save(path: Path, seed: int = 0, size: tuple[int, int] = (24, 32), **options: object) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(_picture(*size, seed=seed)).save(path, **options)
        return path

    return save


@pytest.fixture
def make_folders(tmp_path: Path, save_image: Callable[..., Path]) -> Callable[..., Path]:
    """make_folders("train", {"a": 3, "b": 2}) -> class folders with so many different PNG files each."""

    def make(name: str, counts: Mapping[str, int], suffix: str = ".png") -> Path:
        root = tmp_path / name
        root.mkdir(parents=True, exist_ok=True)
        for number, (label, count) in enumerate(counts.items()):
            (root / label).mkdir(exist_ok=True)
            for index in range(count):
                seed = index + 100 * number + 1000 * (sum(name.encode()) % 97)
                save_image(root / label / f"{index:03d}{suffix}", seed=seed)
        return root

    return make
