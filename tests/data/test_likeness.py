"""Images that look alike are found among many, and images of different things are not."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hiresvis.data.likeness import SIDE, Look, LookInParts, group_alike, look_at
from hiresvis.data.regions import Region
from hiresvis.data.transforms import Scale, resize


def scene(seed: int, size: tuple[int, int] = (240, 320), channels: int = 3) -> np.ndarray:
    """Smooth shapes of random colours, each seed another picture."""
    rng = np.random.default_rng(seed)
    return resize(rng.integers(0, 256, (6, 8, channels), dtype=np.uint8), *size, "bicubic")


def as_jpeg(array: np.ndarray, quality: int) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "JPEG", quality=quality)
    return np.array(Image.open(file))


def groups(arrays: list[np.ndarray]) -> list[tuple[int, ...]]:
    looks = [look_at(array, Scale()) for array in arrays]
    return group_alike([look.signature for look in looks], [array.shape[0] / array.shape[1] for array in arrays])


SAVED_ANEW: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "quality 40": lambda array: as_jpeg(array, 40),
    "quality 90": lambda array: as_jpeg(array, 90),
    "half the size": lambda array: resize(array, 120, 160),
    "nine tenths": lambda array: resize(array, 216, 288),
    "twice the size": lambda array: resize(array, 480, 640),
    "smaller and worse": lambda array: as_jpeg(resize(array, 180, 240), 60),
}


@pytest.mark.parametrize("how", SAVED_ANEW)
def test_images_saved_anew_are_found(how: str) -> None:
    """Each of sixty scenes with its own copy, and with no other."""
    originals = [scene(seed) for seed in range(60)]
    assert groups([*originals, *map(SAVED_ANEW[how], originals)]) == [(number, 60 + number) for number in range(60)]


OTHERWISE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "another shape": lambda array: resize(array, 240, 360),
    "other colours": lambda array: array[..., ::-1],
    "upside down": lambda array: array[::-1],
    "much brighter": lambda array: (array.astype(np.float32) * 0.5 + 120).astype(np.uint8),
}


@pytest.mark.parametrize("how", OTHERWISE)
def test_images_that_were_changed_are_not_alike(how: str) -> None:
    """The guards: shape, colour, levels, arrangement."""
    originals = [scene(seed) for seed in range(40)]
    assert groups([*originals, *map(OTHERWISE[how], originals)]) == []


def test_one_frame_common_to_all_makes_nothing_alike() -> None:
    """As of retinas: a dark rim and a bright disc in all, and in each a faint picture of its own. A copy is found all the same."""
    rows, columns = np.mgrid[-1:1:240j, -1:1:320j]
    disc = np.where(rows**2 + columns**2 < 0.8, 150, 5)[..., None]
    arrays = [np.clip(disc + (scene(seed).astype(int) - 128) // 6, 0, 255).astype(np.uint8) for seed in range(200)]
    assert groups([*arrays, as_jpeg(arrays[7], 75)]) == [(7, 200)]


def test_blank_images_are_alike_to_nothing() -> None:
    """White pages, pages with noise, and pages under the same faint light from one side."""
    rng = np.random.default_rng(0)
    light = np.linspace(0, 4, 80).astype(np.uint8)[None, :, None]
    for shade in (np.uint8(0), light):
        pages = [np.full((100, 80, 3), 250, np.uint8) - shade - rng.integers(0, 3, (100, 80, 3), dtype=np.uint8) for _ in range(3)]
        assert groups(pages) == []


@pytest.mark.parametrize(("dtype", "channels"), [(np.uint8, 1), (np.uint16, 1), (np.uint16, 3), (np.float32, 2), (np.float32, 5)])
def test_look_is_the_same_in_every_type(dtype: Any, channels: int) -> None:
    """Of any number of channels; numbers are read by the scale, so that 12 bits in 16 are no dark picture."""
    plain = scene(3, channels=channels)
    expected = np.frombuffer(look_at(plain, Scale()).signature, np.uint8).astype(int)
    assert len(expected) == SIDE * SIDE + 12
    deep = plain if dtype == np.uint8 else (plain / np.float32(255) * (4095 if dtype == np.uint16 else 1)).astype(dtype)
    look = look_at(deep, Scale("range", 0, 4095) if dtype == np.uint16 else Scale())
    assert np.abs(np.frombuffer(look.signature, np.uint8).astype(int) - expected).max() <= 2
    assert look.spread == pytest.approx(look_at(plain, Scale()).spread, abs=0.02)


def in_parts(array: np.ndarray, scale: Scale, side: int) -> Look:
    look = LookInParts(array.shape[:2], scale)
    for top in range(0, array.shape[0], side):
        for left in range(0, array.shape[1], side):
            part = array[top : top + side, left : left + side]
            look.add(Region(left, top, part.shape[1], part.shape[0]), part)
    return look.look()


@pytest.mark.parametrize("size", [(640, 512), (1301, 977), (258, 2111)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_parts_look_like_the_whole(size: tuple[int, int], dtype: Any) -> None:
    """Whatever is left for the last ones; and a copy saved anew is found, though one was read in parts and the other whole."""
    arrays = [scene(seed, size) if dtype == np.uint8 else scene(seed, size).astype(np.uint16) * 16 for seed in range(20)]
    scale = Scale() if dtype == np.uint8 else Scale("range", 0, 4095)
    looks = [in_parts(array, scale, 256) for array in arrays]
    for look, array in zip(looks, arrays, strict=True):
        known = look_at(array, scale)
        levels = (np.frombuffer(one.signature, np.uint8).astype(int) for one in (look, known))
        assert np.abs(next(levels) - next(levels)).max() <= 2
        assert look.spread == pytest.approx(known.spread, abs=0.01)
    anew = [look_at(as_jpeg(resize(scene(seed, size), size[0] // 2, size[1] // 2), 60), Scale()) for seed in range(20)]
    found = group_alike([look.signature for look in (*looks, *anew)], [size[0] / size[1]] * 40)
    assert found == [(number, 20 + number) for number in range(20)]


def test_one_colour_in_parts_has_no_contrast_and_a_speck_next_to_none() -> None:
    """As in one piece, also where each part is of one colour by itself."""
    array = np.full((300, 600, 1), 30, np.uint8)
    assert in_parts(array, Scale(), 64).spread == 0
    array[130, 130] = 255
    assert 0 < in_parts(array, Scale(), 64).spread <= 0.02
    array[:, 320:] = 200
    assert in_parts(array, Scale(), 64).spread > 0.5


def test_one_colour_has_no_contrast_and_a_speck_next_to_none() -> None:
    """A single other pixel makes an image that is nearly blank, not one of one colour."""
    array = np.full((3000, 2000, 1), 30, np.uint8)
    assert look_at(array, Scale()).spread == 0
    array[1501, 1001] = 255
    assert 0 < look_at(array, Scale()).spread <= 0.02


@pytest.mark.parametrize("kind", ["all different", "one frame", "few kinds"])
def test_the_work_grows_with_the_number_and_not_its_square(kind: str) -> None:
    """24,000 signatures, 1,000 with a copy: seconds, where all pairs would be 288 million; thousands of copies cost no more."""
    rng, number = np.random.default_rng(0), 24_000
    base = rng.normal(128, 30, (number, SIDE * SIDE))
    if kind == "one frame":
        base = rng.normal(128, 60, SIDE * SIDE) + base / 5
    elif kind == "few kinds":
        base = base[rng.integers(0, 10, number)]
    base[-1000:] = base[:1000] + rng.normal(0, 0.4, (1000, SIDE * SIDE))
    looks = [np.append(row, [row.mean()] * 12) for row in base]
    signatures = [Look(np.clip(np.rint(look), 0, 255).astype(np.uint8).tobytes(), 1.0).signature for look in looks]
    begun = time.process_time()
    found = group_alike(signatures, [1.0] * number)
    assert time.process_time() - begun < 20
    if kind == "few kinds":
        assert sorted(map(len, found))[0] > 1000
        assert len(found) == 10
    else:
        assert set(found) <= {(index, number - 1000 + index) for index in range(1000)}
        assert len(found) > 990
