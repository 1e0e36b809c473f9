"""Channels and number range, taken from the images when the recipe leaves them open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile

from hiresvis.data.regions import Region
from hiresvis.data.sources import Sample
from hiresvis.data.survey import any_deep_images, resolve_channels, resolve_scale
from hiresvis.data.transforms import Scale
from hiresvis.errors import DataError

LIMIT = 10**7


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., list[Sample]]:
    """write(arrays) -> samples: uint8 and uint16 of one or three channels as PNG, all else as TIFF."""

    def make(*arrays: np.ndarray) -> list[Sample]:
        samples = []
        for number, array in enumerate(arrays):
            png = array.dtype in (np.uint8, np.uint16) and (array.ndim == 2 or array.shape[2] == 3)
            path = tmp_path / f"{number}.{'png' if png else 'tif'}"
            if png:
                path.write_bytes(imagecodecs.png_encode(array))
            else:
                tifffile.imwrite(path, array, photometric="minisblack", planarconfig=None if array.ndim == 2 else "contig")
            samples.append(Sample(path, 0, str(path)))
        return samples

    return make


def ramp(low: float, high: float, dtype: type) -> np.ndarray:
    return np.linspace(low, high, 6400).reshape(80, 80).astype(dtype)


def test_grey_and_colour_become_three_channels_and_bands_stay(write: Callable[..., list[Sample]]) -> None:
    """What the weights want where it is possible, what the files hold otherwise."""
    grey, colour, bands = np.zeros((8, 8), np.uint8), np.zeros((8, 8, 3), np.uint8), np.zeros((8, 8, 5), np.uint8)
    assert resolve_channels(write(grey, colour), None, max_pixels=LIMIT)[0] == 3
    assert "grey" in resolve_channels(write(grey), None, max_pixels=LIMIT)[1]
    assert resolve_channels(write(bands, bands), None, max_pixels=LIMIT) == (5, "all 2 images looked at have 5 channels")
    assert resolve_channels(write(bands), 1, max_pixels=LIMIT) == (1, "given")
    with pytest.raises(DataError, match="3 channels in 1, 5 channels in 1"):
        resolve_channels(write(colour, bands), None, max_pixels=LIMIT)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (ramp(0, 255, np.uint8), Scale()),
        (ramp(0, 60_000, np.uint16), Scale()),
        (ramp(0, 1, np.float32), Scale()),
        (ramp(0, 4095, np.uint16), Scale("range", 0, 4095)),
        (ramp(-20, 800, np.float32), Scale("range", -20, 800)),
    ],
)
def test_auto_uses_the_types_range_only_where_images_use_it(write: Callable[..., list[Sample]], array: np.ndarray, expected: Scale) -> None:
    """12-bit values in 16-bit files and heights in floats get their own range, within a hundredth of it."""
    scale, why = resolve_scale(write(array), "auto", max_pixels=LIMIT)
    width = expected.high - expected.low
    assert scale.kind == expected.kind
    assert scale.low == pytest.approx(expected.low, abs=0.01 * width)
    assert scale.high == pytest.approx(expected.high, abs=0.01 * width)
    assert why


def test_percentile_is_one_range_for_all_and_the_same_each_time(write: Callable[..., list[Sample]]) -> None:
    """Outliers do not set it, images do not get their own."""
    outlier = ramp(0, 1000, np.uint16)
    outlier[0, 0] = 65535
    samples = write(outlier, ramp(1000, 2000, np.uint16))
    scale, why = resolve_scale(samples, "percentile", max_pixels=LIMIT)
    assert scale.low == pytest.approx(0, abs=10)
    assert scale.high == pytest.approx(2000, abs=10)
    assert "99.9" in why
    assert resolve_scale(samples, "percentile", max_pixels=LIMIT)[0] == scale


def test_given_rules_are_taken_as_they_are(write: Callable[..., list[Sample]]) -> None:
    """No image is opened for them."""
    missing = [Sample(Path("nowhere.png"), 0, "nowhere.png")]
    assert resolve_scale(missing, (10, 500), max_pixels=LIMIT) == (Scale("range", 10, 500), "given")
    assert resolve_scale(missing, "dtype", max_pixels=LIMIT) == (Scale(), "given")
    with pytest.raises(DataError, match="can be read"):
        resolve_scale(missing, "auto", max_pixels=LIMIT)


def test_8_bit_beside_16_bit_goes_by_type_and_flat_values_are_refused(write: Callable[..., list[Sample]]) -> None:
    """No common range exists for mixed files; one value alone has none either."""
    assert resolve_scale(write(ramp(0, 255, np.uint8), ramp(0, 4095, np.uint16)), "auto", max_pixels=LIMIT)[0] == Scale()
    with pytest.raises(DataError, match=r"all values looked at are 7"):
        resolve_scale(write(np.full((8, 8), 7, np.uint16)), "percentile", max_pixels=LIMIT)


def test_of_a_tiled_image_the_middle_is_enough(tmp_path: Path, write: Callable[..., list[Sample]]) -> None:
    """A slide above max_pixels has a number range all the same, and a region is measured for itself."""
    array = np.zeros((3000, 3000), np.uint16)
    array[476:2524, 476:2524] = ramp(1000, 5000, np.uint16)[:64, :64].repeat(32, axis=0).repeat(32, axis=1)
    tifffile.imwrite(tmp_path / "slide.tif", array, tile=(256, 256), compression="zlib")
    slide = Sample(tmp_path / "slide.tif", 0, "t.csv:2")
    scale, _ = resolve_scale([slide], "auto", max_pixels=2048 * 2048)
    assert scale.low >= 1000
    assert 4000 < scale.high <= 5000
    with pytest.raises(DataError, match="all values looked at are 0"):
        resolve_scale([replace(slide, region=Region(0, 0, 400, 400))], "percentile", max_pixels=2048 * 2048)


def test_depth_is_seen_in_headers(write: Callable[..., list[Sample]]) -> None:
    """Any of the images looked at; none that can be read is no depth."""
    shallow, deep = write(ramp(0, 255, np.uint8)), write(ramp(0, 255, np.uint8), ramp(0, 60_000, np.uint16))
    assert not any_deep_images(shallow[:1], LIMIT)
    assert any_deep_images(deep, LIMIT)
    assert not any_deep_images([Sample(Path("none.png"), 0, "")], LIMIT)
