"""Pixels become the model's input: size, range and channels by rule, augmentation by seed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiresvis.data.regions import Region
from hiresvis.data.transforms import Preprocess, Scale, resize, sample_seed
from hiresvis.errors import DataError


class TestResize:
    def test_shrinking_averages_areas(self) -> None:
        """A line one pixel wide in a checkered field keeps its share of light at a quarter of the size; nothing aliases."""
        array = np.zeros((64, 64, 3), np.uint8)
        array[::2, ::2] = 255
        array[1::2, 1::2] = 255
        assert np.unique(resize(array, 16, 16)).tolist() in ([127], [128])

    def test_axis_that_shrinks_is_averaged_while_the_other_grows(self) -> None:
        """Mixed changes do not fall back to interpolation along the shrinking axis."""
        array = np.zeros((64, 16, 1), np.float32)
        array[::4] = 1
        out = resize(array, 16, 32)
        assert out.shape == (16, 32, 1)
        assert np.allclose(out, 0.25)

    @pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 9])
    @pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
    def test_any_number_of_channels_keeps_shape_and_type(self, channels: int, dtype: Any) -> None:
        """opencv averages four at a time; the result is the same as channel by channel."""
        array = (np.random.default_rng(0).random((40, 50, channels)) * 200).astype(dtype)
        out = resize(array, 13, 21, "bicubic")
        assert out.shape == (13, 21, channels)
        assert out.dtype == dtype
        single = np.concatenate([resize(array[..., k : k + 1], 13, 21) for k in range(channels)], axis=2)
        assert np.allclose(out.astype(float), single, atol=1)


class TestPreprocess:
    def test_rectangles_stay_rectangles(self, picture: Callable[..., np.ndarray]) -> None:
        """image_size [72, 128] gives 72 rows and 128 columns, with both ends of the image in it."""
        array = picture(300, 500)
        array[:30] = 0
        array[-30:] = 255
        out = Preprocess((72, 128))(array)
        assert out.shape == (72, 128, 3)
        assert out[0].max() == 0
        assert out[-1].min() == 255

    @pytest.mark.parametrize(("size", "box"), [((100, 200), (16, 48, 0, 64)), ((200, 100), (0, 64, 16, 48)), ((64, 64), (0, 64, 0, 64))])
    def test_letterbox_keeps_the_shape_and_pads_in_the_middle(self, size: tuple[int, int], box: tuple[int, int, int, int]) -> None:
        """All of the image, in its own proportions, on the background colour."""
        out = Preprocess((64, 64), "letterbox", background=(10, 20, 30))(np.full((*size, 3), 200, np.uint8))
        top, bottom, left, right = box
        assert (out[top:bottom, left:right] == 200).all()
        outside = np.ones((64, 64), bool)
        outside[top:bottom, left:right] = False
        assert (out[outside] == (10, 20, 30)).all()

    def test_letterbox_pads_floats_on_their_own_scale(self) -> None:
        """16-bit images get the same background, as a share of 1."""
        out = Preprocess((8, 8), "letterbox", background=(255, 0, 51))(np.zeros((4, 8, 3), np.uint16))
        assert out.dtype == np.float32
        assert np.allclose(out[0, 0], (1, 0, 0.2))

    def test_8_bit_stays_bytes_and_16_bit_becomes_0_to_1(self) -> None:
        """By type: uint8 is not touched, 65535 is 1 and 0 is 0, nothing is cut."""
        assert Preprocess((4, 4))(np.full((4, 4, 3), 77, np.uint8)).dtype == np.uint8
        out = Preprocess((4, 4), in_chans=1)(np.array([0, 300, 32768, 65535], np.uint16).reshape(1, 4, 1).repeat(4, axis=0))
        assert np.allclose(out[0, :, 0], [0, 300 / 65535, 32768 / 65535, 1])

    def test_range_maps_low_to_0_and_high_to_1_in_every_type(self) -> None:
        """12-bit values in 16-bit files use the whole range."""
        rule = Scale("range", 100, 4100)
        for dtype in (np.uint16, np.float32):
            assert np.allclose(rule.apply(np.array([0, 100, 2100, 4100, 5000], dtype)), [0, 0, 0.5, 1, 1])
        assert np.allclose(Scale("range", 0, 100).apply(np.array([50, 200], np.uint8)), [0.5, 1])

    def test_floats_beyond_1_are_refused_with_the_setting(self) -> None:
        """They would be cut to white."""
        with pytest.raises(DataError, match=r"from 0 to 900, .*data\.scale: dtype.*percentile"):
            Preprocess((4, 4), in_chans=1)(np.array([0, 900], np.float32).reshape(1, 2, 1))

    def test_grey_is_repeated_to_three_channels(self, picture: Callable[..., np.ndarray]) -> None:
        """As the weights want it; a grey model keeps one."""
        array = picture(20, 20, 1)
        assert (Preprocess((8, 8))(array) == Preprocess((8, 8), in_chans=1)(array)).all()

    @pytest.mark.parametrize(("channels", "in_chans"), [(3, 1), (5, 3), (1, 4), (3, 5)])
    def test_other_channels_are_an_error_with_the_mend(self, channels: int, in_chans: int) -> None:
        """No channel is dropped or made up."""
        with pytest.raises(DataError, match=rf"has {channels} channels and the model takes {in_chans}; set data\.channels: {channels}"):
            Preprocess((8, 8), in_chans=in_chans)(np.zeros((8, 8, channels), np.uint8))


class TestWindows:
    def test_a_window_is_neither_enlarged_nor_reduced(self, picture: Callable[..., np.ndarray]) -> None:
        """Crop and tile pass a full window as it is and lay a smaller image in the middle of the background."""
        for fit in ("crop", "tile"):
            preprocess = Preprocess((32, 48), fit, background=(10, 20, 30))
            assert preprocess.draft_px is None
            assert np.array_equal(preprocess(picture(32, 48)), picture(32, 48))
            out = preprocess(picture(20, 48))
            assert np.array_equal(out[6:26], picture(20, 48))
            assert (out[:6] == (10, 20, 30)).all()
            assert (out[26:] == (10, 20, 30)).all()

    @given(
        height=st.integers(1, 200), width=st.integers(1, 200), size=st.tuples(st.integers(1, 64), st.integers(1, 64)),
        overlap=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 0.99]),
    )  # fmt: skip
    def test_windows_of_tile_cover_every_pixel_and_lie_inside(self, height: int, width: int, size: tuple[int, int], overlap: float) -> None:
        """Any image, window and overlap: no pixel is lost, none is padded but where the image is smaller, neighbours share enough."""
        preprocess = Preprocess(size, "tile", overlap=overlap)
        seen = np.zeros((height, width), bool)
        windows = [preprocess.window(height, width, number) for number in range(preprocess.num_windows(height, width))]
        for window in windows:
            assert window.fits((height, width))
            assert window.size == (min(height, size[0]), min(width, size[1]))
            seen[window.slices] = True
        assert seen.all()
        assert len(set(windows)) == len(windows)
        for axis, side in (("x", size[1]), ("y", size[0])):
            starts = sorted({getattr(window, axis) for window in windows})
            assert all(later - earlier <= max(1, side * (1 - overlap) + 1e-6) for earlier, later in pairwise(starts))

    def test_crop_takes_the_middle_and_says_what_it_keeps(self) -> None:
        """The window of evaluation, and the share of the area that is left: tile keeps all, and so do the whole fits."""
        crop = Preprocess((40, 60), "crop")
        assert crop.window(100, 100) == Region(20, 30, 60, 40)
        assert crop.num_windows(100, 100) == 1
        assert crop.share_kept(100, 100) == pytest.approx(0.24)
        assert crop.share_kept(30, 120) == pytest.approx(0.5)
        assert crop.share_kept(30, 50) == 1
        assert [Preprocess((40, 60), fit).share_kept(100, 100) for fit in ("resize", "letterbox", "tile")] == [1, 1, 1]

    def test_places_of_training_windows_follow_from_the_seed_and_reach_every_corner(self) -> None:
        """The same seed, the same place; many seeds, every place of a small image, borders included."""
        for fit in ("crop", "tile"):
            preprocess = Preprocess((8, 8), fit)
            places = [preprocess.random_window(12, 10, seed) for seed in range(400)]
            assert places == [preprocess.random_window(12, 10, seed) for seed in range(400)]
            assert {(place.x, place.y) for place in places} == {(x, y) for x in range(3) for y in range(5)}
            assert preprocess.random_window(5, 10, 3).size == (5, 8)


def test_sample_seeds_differ_by_run_epoch_and_sample() -> None:
    """No two samples of the first epochs share a seed, and the rule is fixed for ever."""
    seeds = {sample_seed(seed, epoch, index) for seed in range(3) for epoch in range(4) for index in range(100)}
    assert len(seeds) == 1200
    assert sample_seed(0, 0, 0) == sample_seed(0, 0, 0) < 2**63
