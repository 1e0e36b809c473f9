"""Regions keep their place: turned as the image is, on smaller copies, and in names."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiresvis.data.decode import upright
from hiresvis.data.regions import Region, choose_level, named, region_problems, whole

SIZE = (40, 30)


@given(
    orientation=st.integers(1, 8), corner=st.tuples(st.integers(0, 20), st.integers(0, 20)), size=st.tuples(*[st.integers(1, 10)] * 2)
)  # fmt: skip
def test_a_region_as_stored_is_the_region_as_shown(orientation: int, corner: tuple[int, int], size: tuple[int, int]) -> None:
    """Cut first and turned then, or turned first and cut then: the same pixels, in all eight ways."""
    stored = np.arange(SIZE[0] * SIZE[1]).reshape(*SIZE, 1).astype(np.int32)
    shown = upright(stored, orientation)
    region = Region(*corner, *size)
    if not region.fits(shown.shape[:2]):
        return
    place = region.as_stored(shown.shape[:2], orientation)
    assert np.array_equal(upright(stored[place.slices], orientation), shown[region.slices])


@pytest.mark.parametrize(
    ("region", "fits"),
    [
        (Region(0, 0, 30, 40), True),
        (Region(0, 0, 31, 40), False),
        (Region(29, 39, 1, 1), True),
        (Region(30, 0, 1, 1), False),
        (Region(-1, 0, 5, 5), False),
        (Region(3, 3, 0, 5), False),
    ],
)
def test_a_region_lies_inside_or_does_not(region: Region, fits: bool) -> None:
    """To the last pixel, and with pixels at all."""
    assert region.fits(SIZE) is fits


LEVELS = [(8000, 6000), (4000, 3000), (2000, 1500), (500, 375)]


@pytest.mark.parametrize(
    ("region", "target", "level", "place"),
    [
        (whole(LEVELS[0]), None, 0, whole(LEVELS[0])),
        (whole(LEVELS[0]), (500, 375), 3, whole(LEVELS[3])),  # a whole multiple of the target, and the smallest that is
        (whole(LEVELS[0]), (400, 300), 2, whole(LEVELS[2])),  # five times; the next would be a quarter above it
        (whole(LEVELS[0]), (999, 700), 1, whole(LEVELS[1])),  # twice is not enough, four times is
        (whole(LEVELS[0]), (9000, 6000), 0, whole(LEVELS[0])),
        (Region(400, 800, 4000, 4000), (250, 250), 3, Region(25, 50, 250, 250)),  # the target itself, on whole pixels
        (Region(401, 800, 4000, 4000), (1000, 1000), 0, Region(401, 800, 4000, 4000)),  # not on whole pixels, and not three times
        (Region(401, 803, 4000, 4000), (300, 300), 2, Region(100, 200, 1001, 1001)),  # three times: borders move outward
        (Region(0, 0, 100, 8000), (100, 2000), 0, Region(0, 0, 100, 8000)),  # each axis counts
    ],
)
def test_the_smallest_copy_that_loses_nothing_is_read(region: Region, target: tuple[int, int] | None, level: int, place: Region) -> None:
    """A whole multiple of the target or three times it, on both axes, as for drafts of a JPEG."""
    assert choose_level(LEVELS, region, target) == (level, place)


@given(
    region=st.tuples(st.integers(0, 900), st.integers(0, 900), st.integers(1, 100), st.integers(1, 100)), level=st.integers(1, 999),
    target=st.integers(1, 40),
)  # fmt: skip
def test_a_copys_region_holds_all_of_the_region(region: tuple[int, int, int, int], level: int, target: int) -> None:
    """Whatever the scale: within the copy, no border inside the region, and none more than a pixel of the copy outside."""
    part = Region(*region)
    number, place = choose_level([(1000, 1000), (level, level)], part, (target, target))
    assert place.fits((level, level) if number else (1000, 1000))
    scale = 1000 / level if number else 1.0
    for start, length, small, extent in ((part.x, part.width, place.x, place.width), (part.y, part.height, place.y, place.height)):
        assert small * scale <= start + 1e-6
        assert start - small * scale < scale
        assert (small + extent) * scale >= start + length - 1e-6
        assert (small + extent) * scale - start - length < scale


def test_names_tell_regions_apart() -> None:
    """A file without a region keeps its own name."""
    assert named("a/b.tif", None) == "a/b.tif"
    assert named("a/b.tif", Region(1, 2, 3, 4)) == "a/b.tif[1,2,3,4]"


def test_numbers_of_a_row_are_held_to_be_pixels() -> None:
    """Whole numbers, also as spreadsheets write them; corners from 0, sides from 1; every wrong one is told."""
    assert not list(region_problems({"x": "0", "y": "3.0", "w": "1", "h": "20"}))
    found = list(region_problems({"x": "-1", "y": "1.5", "w": "0", "h": "nan"}))
    assert found == [
        "-1 in column 'x' is below 0",
        "'1.5' in column 'y' is not a whole number of pixels",
        "0 in column 'w' is below 1",
        "'nan' in column 'h' is not a whole number of pixels",
    ]
