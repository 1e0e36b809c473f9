"""JPEG 2000, HEIC and AVIF: strict where their codecs can be, upright once, and by the stated rules of bits and channels."""

from __future__ import annotations

import io
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import imagecodecs
import numpy as np
import pillow_heif
import pytest
from PIL import Image, features

from hiresvis.data import heif
from hiresvis.data.decode import decode, probe
from hiresvis.data.regions import Region
from hiresvis.errors import DataError

LIMIT = 10**8
NAMES = ("x.jp2", "lossy.jp2", "x.j2k", "x.avif", "x.heic")


def save(path: Path, array: np.ndarray, **options: object) -> Path:
    """One of `NAMES`, by a real encoder; as near to lossless as it goes, but for lossy.jp2."""
    image = Image.fromarray(array)
    if path.suffix == ".avif" and array.ndim == 2:  # Pillow makes colours of it
        path.write_bytes(imagecodecs.avif_encode(array, level=100))
    elif path.suffix == ".heic":
        pillow_heif.from_pillow(image).save(path, quality=-1, chroma=444, matrix_coefficients=0, **options)
    elif path.suffix == ".avif":
        image.save(path, "AVIF", quality=100, subsampling="4:4:4", **options)
    elif path.name == "lossy.jp2":
        image.save(path, "JPEG2000", quality_mode="rates", quality_layers=[8], irreversible=True)
    else:
        image.save(path, "JPEG2000", no_jp2=path.suffix == ".j2k")
    return path


class TestDamage:
    @pytest.mark.parametrize("name", NAMES)
    def test_cut_file_is_an_error_wherever_it_is_cut(self, tmp_path: Path, picture: Callable[..., np.ndarray], name: str) -> None:
        """From the first bytes to the last one; the file stays as it was."""
        path = save(tmp_path / name, picture(96, 128))
        whole = path.read_bytes()
        assert decode(path, max_pixels=LIMIT).shape == (96, 128, 3)
        for length in (*np.linspace(20, len(whole) - 1, 25).astype(int), len(whole) - 2, len(whole) - 17):
            path.write_bytes(whole[:length])
            with pytest.raises(DataError, match=name):
                decode(path, max_pixels=LIMIT)
            assert len(path.read_bytes()) == length

    @pytest.mark.parametrize("name", NAMES)
    def test_damaged_boxes_are_errors_of_the_file_and_say_nothing_past_python(
        self, tmp_path: Path, picture: Callable[..., np.ndarray], name: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Bits flipped in the first 200 bytes: an image of the stated size, or a DataError with the path; never another error."""
        path = save(tmp_path / name, picture(64, 64))
        whole, refused = path.read_bytes(), []
        for seed in range(60):
            data, rng = bytearray(whole), np.random.default_rng(seed)
            for position in rng.integers(0, 200, 3):
                data[position] ^= 1 << int(rng.integers(8))
            path.write_bytes(data)
            try:
                assert decode(path, max_pixels=10**6).shape[:2] == probe(path, 10**6).shown_size
            except DataError as error:
                refused.append(error.problems[0].place)
        assert len(refused) > 15
        assert set(refused) == {str(path)}
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("name", ["x.jp2", "x.j2k"])
    def test_jpeg_2000_lacks_no_tile_that_it_claims(self, tmp_path: Path, picture: Callable[..., np.ndarray], name: str) -> None:
        """Smaller tiles than there are, or one that is gone: the codec would make black of the rest. The fuzz found it."""
        path = tmp_path / name
        Image.fromarray(picture(64, 96)).save(path, "JPEG2000", tile_size=(32, 32), no_jp2=name == "x.j2k")
        assert np.array_equal(decode(path, max_pixels=LIMIT), picture(64, 96))
        whole = path.read_bytes()
        start = whole.index(b"\xff\x4f\xff\x51")
        path.write_bytes(whole[: start + 24] + struct.pack(">II", 96, 1) + whole[start + 32 :])
        with pytest.raises(DataError, match="lacks 58 of the 64 tiles that it claims"):
            decode(path, max_pixels=LIMIT)
        part = whole.index(b"\xff\x90\x00\x0a\x00\x03")
        path.write_bytes(whole[:part] + whole[part + int.from_bytes(whole[part + 6 : part + 10], "big") :])
        with pytest.raises(DataError, match="lacks 1 of the 6 tiles that it claims"):
            decode(path, max_pixels=LIMIT)

    @pytest.mark.parametrize("name", NAMES)
    def test_claim_of_60000_px_is_refused_before_memory_is_taken(
        self, tmp_path: Path, picture: Callable[..., np.ndarray], name: str
    ) -> None:
        """Where each format keeps its size."""
        path = save(tmp_path / name, picture(64, 64))
        data = bytearray(path.read_bytes())
        if path.suffix in (".jp2", ".j2k"):
            start = data.index(b"\xff\x4f\xff\x51") + 8
            data[start : start + 8] = struct.pack(">II", 60_000, 60_000)
        else:
            start = data.index(b"ispe") + 8
            data[start : start + 8] = struct.pack(">II", 60_000, 60_000)
        path.write_bytes(data)
        tracemalloc.start()
        with pytest.raises(DataError, match=r"60000 x 60000 px = 3600M, above data\.max_pixels 100M|damaged"):
            decode(path, max_pixels=LIMIT)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**24


class TestPixels:
    @pytest.mark.parametrize("name", NAMES)
    def test_colours_and_grey_and_alpha(self, tmp_path: Path, picture: Callable[..., np.ndarray], name: str) -> None:
        """Red, green, blue in this order; grey stays one channel; alpha is laid on the background; the header tells the channels."""
        path, near = tmp_path / name, 40 if name == "lossy.jp2" else 3
        for array in (picture(64, 96), picture(64, 96, 1)[..., 0]):
            save(path, array)
            out = decode(path, max_pixels=LIMIT)
            assert out.shape == (64, 96, 1 if array.ndim == 2 else 3)
            assert np.abs(out.astype(int) - array.reshape(out.shape)).mean() < near
            assert (probe(path, LIMIT).channels, probe(path, LIMIT).bits) == (out.shape[2], 8)
        if path.suffix == ".j2k":  # has no place to say that a component is alpha
            return
        rgba = np.zeros((64, 64, 4), np.uint8)
        rgba[..., 0] = 200
        rgba[:, 32:, 3] = 255
        save(path, rgba)
        out = decode(path, max_pixels=LIMIT, background=(0, 0, 255))
        assert probe(path, LIMIT).channels == out.shape[2] == 3
        assert np.abs(out[32, 8].astype(int) - [0, 0, 255]).max() <= near
        assert np.abs(out[32, 56].astype(int) - [200, 0, 0]).max() <= near

    @pytest.mark.parametrize("orientation", range(1, 9))
    @pytest.mark.parametrize("name", ["x.avif", "x.heic"])
    def test_rotation_is_applied_once(
        self,
        tmp_path: Path,
        picture: Callable[..., np.ndarray],
        turned: Callable[..., tuple[np.ndarray, Image.Exif]],
        name: str,
        orientation: int,
    ) -> None:
        """Each of the eight ways, as the encoder writes them from EXIF: the picture is upright, and a region counts in it."""
        upright = picture(64, 96)
        stored, exif = turned(upright, orientation)
        path = save(tmp_path / name, stored, exif=exif.tobytes())
        assert probe(path, LIMIT).shown_size == (64, 96)
        out = decode(path, max_pixels=LIMIT)
        assert np.abs(out.astype(int) - upright).mean() < 3
        assert np.array_equal(decode(path, max_pixels=LIMIT, region=Region(10, 20, 30, 40)), out[20:60, 10:40])

    def test_10_and_12_bit_fill_the_range_of_16(self, tmp_path: Path) -> None:
        """White is 65535 and black 0, in AVIF, HEIC and JPEG 2000; the header tells the bits."""
        for bits in (10, 12):
            top = (1 << bits) - 1
            array = np.zeros((64, 64, 3), np.uint16)
            array[:, 16:32], array[:, 32:48], array[:, 48:] = top // 3, top // 2, top
            files = {
                "x.avif": imagecodecs.avif_encode(array, bitspersample=bits, level=100),
                "x.jp2": imagecodecs.jpeg2k_encode(array, bitspersample=bits, codecformat="jp2", reversible=True),
                "x.heic": self.deep_heic(array << (16 - bits), bits),
            }
            for name, data in files.items():
                (tmp_path / name).write_bytes(data)
                out = decode(tmp_path / name, max_pixels=LIMIT)
                assert (out.dtype, probe(tmp_path / name, LIMIT).bits) == (np.uint16, bits), name
                expected = array.astype(float) / top * 65535
                assert np.abs(out.astype(float) - expected).max() <= 65535 * (3 / top), name
                assert (out[:, 56].max(), out[:, 4].min()) == (65535, 0), name

    def deep_heic(self, array: np.ndarray, bits: int) -> bytes:
        out, before = io.BytesIO(), pillow_heif.options.SAVE_HDR_TO_12_BIT
        pillow_heif.options.SAVE_HDR_TO_12_BIT = bits == 12
        pillow_heif.from_bytes(mode="RGB;16", size=array.shape[1::-1], data=array.tobytes()).save(out, quality=-1, chroma=444)
        pillow_heif.options.SAVE_HDR_TO_12_BIT = before
        return out.getvalue()

    def test_jpeg_2000_of_few_and_of_16_bits(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """4 bit fill the range of 8, 16 bit keep their values, signed numbers become floats."""
        grey = picture(40, 60, 1)[..., 0]
        cases = [(grey >> 4, 4, (grey >> 4) * np.uint8(17)), (grey.astype(np.uint16) * 200, 16, grey.astype(np.uint16) * 200)]
        cases.append((grey.astype(np.int16) - 100, 16, grey.astype(np.float32) - 100))
        for array, bits, expected in cases:
            options = {"bitspersample": bits} if bits == 4 else {}
            (tmp_path / "x.jp2").write_bytes(imagecodecs.jpeg2k_encode(array, codecformat="jp2", reversible=True, **options))
            out = decode(tmp_path / "x.jp2", max_pixels=LIMIT)
            assert out.dtype == expected.dtype
            assert np.array_equal(out[..., 0], expected)

    def test_jpeg_2000_components_are_alpha_only_where_the_file_says_so(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """Four and five bands stay; ink and sYCC become RGB by the stated rules."""
        for count in (4, 5):
            (tmp_path / "x.jp2").write_bytes(imagecodecs.jpeg2k_encode(picture(40, 60, count), codecformat="j2k", reversible=True))
            assert np.array_equal(decode(tmp_path / "x.jp2", max_pixels=LIMIT), picture(40, 60, count))
            assert probe(tmp_path / "x.jp2", LIMIT).channels == count
        image = Image.fromarray(picture(40, 60))
        image.convert("YCbCr").save(tmp_path / "ycc.jp2")
        assert np.abs(decode(tmp_path / "ycc.jp2", max_pixels=LIMIT).astype(int) - picture(40, 60)).max() <= 3
        ink = np.zeros((40, 60, 4), np.uint8)
        ink[...] = (200, 30, 0, 55)
        Image.fromarray(ink, mode="CMYK").save(tmp_path / "ink.jp2")
        assert decode(tmp_path / "ink.jp2", max_pixels=LIMIT)[5, 5].tolist() == [43, 176, 200]
        assert probe(tmp_path / "ink.jp2", LIMIT).channels == 3

    def test_several_pictures_in_a_file_are_refused(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """None is picked in silence."""
        frames = [Image.fromarray(picture(64, 64, seed=seed)) for seed in range(3)]
        frames[0].save(tmp_path / "x.avif", save_all=True, append_images=frames[1:])
        many = pillow_heif.from_pillow(frames[0])
        many.add_from_pillow(frames[1])
        many.save(tmp_path / "x.heic")
        for name, message in (("x.avif", "animation of 3 pictures"), ("x.heic", "collection of 2 pictures")):
            with pytest.raises(DataError, match=message):
                decode(tmp_path / name, max_pixels=LIMIT)


def test_without_the_extra_the_error_says_what_the_file_is_and_what_to_install(
    tmp_path: Path, picture: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By contents, whatever the file is called."""
    save(tmp_path / "x.heic", picture(64, 64)).rename(tmp_path / "photo.jpg")
    save(tmp_path / "x.avif", picture(64, 64))
    monkeypatch.setattr(heif, "pillow_heif", None)
    monkeypatch.setattr(features, "check", lambda name: False)
    for name, kind in (("photo.jpg", "HEIC"), ("x.avif", "AVIF")):
        with pytest.raises(DataError, match=rf"{name}  is {kind}, which .*pip install 'hiresvis\[heic\]'"):
            probe(tmp_path / name, LIMIT)
