"""One file to one array: strict, upright, and by one stated rule for every mode."""

from __future__ import annotations

import os
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image

from hiresvis.data import photos as photos_module
from hiresvis.data.decode import decode, probe
from hiresvis.errors import DataError

LIMIT = 10**8


def png_claiming(width: int, height: int) -> bytes:
    """A small PNG whose header claims any size; its pixels are a few bytes of zeros."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(10_000))) + chunk(b"IEND", b"")


class TestDamage:
    @pytest.mark.parametrize("share", [0.5, 0.99])
    @pytest.mark.parametrize("name", ["x.jpg", "progressive.jpg", "x.png", "x.webp", "x.bmp", "x.tif", "lzw.tif", "jpeg.tif"])
    def test_cut_file_is_an_error_and_never_half_an_image(
        self, tmp_path: Path, picture: Callable[..., np.ndarray], name: str, share: float
    ) -> None:
        """The header reads well, the full decode refuses, with the path; the user's file stays as it was."""
        path = tmp_path / name
        array = picture(96, 128)
        if name == "jpeg.tif":
            tifffile.imwrite(path, array, photometric="rgb", compression="jpeg", tile=(32, 32))
        else:
            options = {"progressive": True} if name.startswith("prog") else {"compression": "tiff_lzw"} if name.startswith("lzw") else {}
            Image.fromarray(array).save(path, **options)
        whole = path.read_bytes()
        assert decode(path, max_pixels=LIMIT).shape == (96, 128, 3)
        cut = whole[: int(len(whole) * share)]
        path.write_bytes(cut)
        with pytest.raises(DataError, match=name):
            decode(path, max_pixels=LIMIT)
        assert path.read_bytes() == cut

    def test_flipped_bits_in_a_png_are_an_error(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """Checksums are checked."""
        path = tmp_path / "x.png"
        Image.fromarray(picture(96, 128)).save(path)
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) // 2] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="damaged PNG"):
            decode(path, max_pixels=LIMIT)

    def test_damage_prints_nothing_past_python(
        self, tmp_path: Path, picture: Callable[..., np.ndarray], capfd: pytest.CaptureFixture[str]
    ) -> None:
        """The C libraries leave stderr alone."""
        for name in ("x.jpg", "x.png", "x.webp", "x.tif"):
            path = tmp_path / name
            Image.fromarray(picture(96, 128)).save(path)
            path.write_bytes(path.read_bytes()[:-300])
            with pytest.raises(DataError):
                decode(path, max_pixels=LIMIT)
        assert capfd.readouterr() == ("", "")

    def test_without_simplejpeg_cut_files_are_refused_as_well(
        self, tmp_path: Path, picture: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Pillow stands in, as strict, and gives nearly the same pixels and the same draft size."""
        path = tmp_path / "x.jpg"
        Image.fromarray(picture(208, 304)).save(path, quality=95, subsampling=0)
        first, first_draft = decode(path, max_pixels=LIMIT), decode(path, max_pixels=LIMIT, draft_px=(104, 152))
        monkeypatch.setattr(photos_module, "simplejpeg", None)
        second, second_draft = decode(path, max_pixels=LIMIT), decode(path, max_pixels=LIMIT, draft_px=(104, 152))
        assert np.abs(first.astype(int) - second).max() <= 3
        assert first_draft.shape == second_draft.shape == (104, 152, 3)
        path.write_bytes(path.read_bytes()[:-200])
        with pytest.raises(DataError, match="damaged"):
            decode(path, max_pixels=LIMIT)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("zero.jpg", "is empty"),
            ("text.jpg", "holds text, '<!DOCTYPE html>"),
            ("folder.jpg", "is a folder"),
            ("link.jpg", "is a broken link to .*gone.jpg"),
            ("none.jpg", "does not exist"),
            ("film.gif", "GIF"),
            ("noise.png", "unknown or damaged, it starts with 00 01"),
            ("pipe.jpg", "is not a regular file"),
        ],
    )
    def test_what_is_no_image_is_refused_with_the_reason(self, tmp_path: Path, name: str, message: str) -> None:
        """Zero bytes, text, a folder, a broken link, nothing at all, an unread format, rubbish, a pipe that would never end."""
        path = tmp_path / name
        contents = {
            "zero.jpg": b"",
            "text.jpg": b"<!DOCTYPE html><html>404",
            "film.gif": b"GIF89a" + bytes(40),
            "noise.png": bytes(range(99)),
        }
        if name in contents:
            path.write_bytes(contents[name])
        elif name == "folder.jpg":
            path.mkdir()
        elif name == "link.jpg":
            path.symlink_to(tmp_path / "gone.jpg")
        elif name == "pipe.jpg":
            os.mkfifo(path)
        for call in (lambda: probe(path, LIMIT), lambda: decode(path, max_pixels=LIMIT)):
            with pytest.raises(DataError, match=message) as caught:
                call()
            assert caught.value.problems[0].place == str(path)

    def test_contents_count_and_not_the_extension(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """A PNG called .jpg is read."""
        array = picture(20, 30)
        Image.fromarray(array).save(tmp_path / "x.jpg", format="PNG")
        assert np.array_equal(decode(tmp_path / "x.jpg", max_pixels=LIMIT), array)
        assert probe(tmp_path / "x.jpg", LIMIT).format == "PNG"

    def test_animation_and_stack_are_refused(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """More than one picture: none is picked in silence."""
        frames = [Image.fromarray(picture(20, 30, seed=seed)) for seed in range(3)]
        frames[0].save(tmp_path / "x.webp", save_all=True, append_images=frames[1:])
        tifffile.imwrite(tmp_path / "x.tif", np.zeros((5, 20, 30), np.uint8), photometric="minisblack")
        with pytest.raises(DataError, match="animation of 3 pictures"):
            decode(tmp_path / "x.webp", max_pixels=LIMIT)
        with pytest.raises(DataError, match=r"stack of pictures.*5, 20, 30"):
            decode(tmp_path / "x.tif", max_pixels=LIMIT)


def retag(path: Path, **values: object) -> None:
    """Changes tags of the first page in place."""
    with tifffile.TiffFile(path, mode="r+") as tiff:
        for name, value in values.items():
            tiff.pages[0].tags[name].overwrite(value)


class TestLies:
    """Headers that claim what the file does not hold. The fuzz found each of these."""

    @pytest.mark.parametrize(
        ("options", "tags", "message"),
        [
            ({"compression": "lzw"}, {"ImageLength": 192}, "lacks 1 of its 2 tiles or strips"),
            ({"compression": "lzw", "rowsperstrip": 96}, {"RowsPerStrip": 8}, "lacks 11 of its 12 tiles or strips"),
            ({}, {"ImageLength": 192, "RowsPerStrip": 192}, "holds 36864 bytes of pixels where its header claims 73728"),
            ({"compression": "jpeg", "tile": (32, 32)}, {"BitsPerSample": (16, 16, 16)}, "holds uint8 pixels where its header says uint16"),
            ({}, {"Compression": 3}, "is compressed as a fax and claims 8 bits a pixel"),
            ({"compression": "zlib", "tile": (32, 32)}, {"TileWidth": 65520, "TileLength": 65520}, r"tiles of 1\d+ values each, above 4 x"),
        ],
    )
    def test_tiff_is_held_to_what_it_claims(
        self, tmp_path: Path, picture: Callable[..., np.ndarray], options: dict[str, object], tags: dict[str, object], message: str
    ) -> None:
        """Rows, strips, tiles and types that are not there would come back black, grey or white without an error."""
        path = tmp_path / "x.tif"
        tifffile.imwrite(path, picture(96, 128), photometric="rgb", **options)
        assert decode(path, max_pixels=LIMIT).shape == (96, 128, 3)
        retag(path, **tags)
        with path.open("ab") as file:
            file.write(bytes(100_000))  # room for what is claimed, so that it is not found by the file's end
        with pytest.raises(DataError, match=message):
            decode(path, max_pixels=LIMIT)

    def test_places_of_strips_that_are_no_whole_numbers_are_refused(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """A tag of a wrong type reads as a fraction of a byte, and an image without bytes as zeros."""
        tifffile.imwrite(tmp_path / "x.tif", picture(96, 128), photometric="rgb", compression="zlib")
        with tifffile.TiffFile(tmp_path / "x.tif", mode="r+") as tiff:
            tiff.pages[0].tags["StripByteCounts"].overwrite(4e-320, dtype="d")
        with pytest.raises(DataError, match="lacks 1 of its 1 tiles or strips"):
            decode(tmp_path / "x.tif", max_pixels=LIMIT)

    def test_many_channels_count_toward_max_pixels(self, tmp_path: Path) -> None:
        """A small file that claims 60000 channels is refused before memory is taken; more than four are read within the limit."""
        path = tmp_path / "x.tif"
        tifffile.imwrite(path, np.zeros((96, 128, 8), np.uint8), photometric="minisblack", planarconfig="contig")
        assert decode(path, max_pixels=96 * 128 * 2).shape == (96, 128, 8)
        with pytest.raises(DataError, match=r"8 channels, which count as 24576 px of 4 channels, above data\.max_pixels 24575"):
            decode(path, max_pixels=96 * 128 * 2 - 1)
        retag(path, SamplesPerPixel=60_000)
        tracemalloc.start()
        with pytest.raises(DataError, match="60000 channels"):
            decode(path, max_pixels=10**6)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**20

    @pytest.mark.parametrize("samples", [1, 3, 4])
    def test_damage_of_a_jpeg_inside_tiff_is_an_error(self, tmp_path: Path, picture: Callable[..., np.ndarray], samples: int) -> None:
        """Held to the same as a JPEG alone: one tile in which a few bytes are gone names itself."""
        path = tmp_path / "x.tif"
        array = picture(96, 128, samples)
        photometric = {1: "minisblack", 3: "rgb", 4: "separated"}[samples]
        tifffile.imwrite(path, array[..., 0] if samples == 1 else array, photometric=photometric, compression="jpeg", tile=(64, 64))
        assert decode(path, max_pixels=LIMIT).shape == (96, 128, 1 if samples == 1 else 3)
        with tifffile.TiffFile(path) as tiff:
            start, length = tiff.pages[0].dataoffsets[2], tiff.pages[0].databytecounts[2]
        data = bytearray(path.read_bytes())
        data[start + length // 2 : start + length // 2 + 40] = b"\xff" * 40
        path.write_bytes(data)
        with pytest.raises(DataError, match="damaged JPEG as tile or strip 2"):
            decode(path, max_pixels=LIMIT)

    @pytest.mark.parametrize("name", ["x.tif", "x.bmp"])
    def test_palette_that_was_overwritten_is_an_error(self, tmp_path: Path, picture: Callable[..., np.ndarray], name: str) -> None:
        """All colours black: the numbers differ and the image would not."""
        Image.fromarray(picture(20, 30)).quantize(16).save(tmp_path / name)
        if name == "x.tif":
            retag(tmp_path / name, ColorMap=[0] * 768)
        else:
            data = bytearray((tmp_path / name).read_bytes())
            start = int.from_bytes(data[10:14], "little")
            data[54:start] = bytes(start - 54)
            (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=r"damaged palette: all of its \d+ numbers have the colour \[0, 0, 0\]"):
            decode(tmp_path / name, max_pixels=LIMIT)

    def test_palette_of_another_length_is_an_error(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """A palette for 256 colours does not go with 16-bit pixels."""
        Image.fromarray(picture(20, 30)).quantize(16).save(tmp_path / "x.tif")
        retag(tmp_path / "x.tif", BitsPerSample=16, ImageWidth=15)
        with pytest.raises(DataError, match=r"palette of shape \(3, 256\) for 1 samples of 16 bits"):
            decode(tmp_path / "x.tif", max_pixels=LIMIT)

    def test_cmyk_jpeg_is_read_as_strictly_as_any(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """A frame twice as high as what was stored: Pillow alone would give the rest in grey."""
        path = tmp_path / "x.jpg"
        Image.fromarray(picture(96, 128)).convert("CMYK").save(path)
        data = bytearray(path.read_bytes())
        frame = data.index(b"\xff\xc0")
        data[frame + 5 : frame + 7] = (192).to_bytes(2, "big")
        path.write_bytes(data)
        with pytest.raises(DataError, match="damaged JPEG"):
            decode(path, max_pixels=LIMIT)


class TestSize:
    @pytest.mark.parametrize("name", ["x.png", "x.jpg", "x.bmp", "x.tif", "tiled.tif", "x.webp"])
    def test_claim_of_60000_px_is_refused_before_memory_is_taken(
        self, tmp_path: Path, picture: Callable[..., np.ndarray], name: str
    ) -> None:
        """A small file of any format: the message gives size, limit and setting, and no array was made."""
        path, side, image = tmp_path / name, 60_000, Image.fromarray(picture(96, 128))
        if name == "x.png":
            path.write_bytes(png_claiming(side, side))
        elif name == "tiled.tif":
            tifffile.imwrite(path, picture(96, 128), photometric="rgb", compression="zlib", tile=(32, 32))
        else:
            image.save(path, **({"lossless": True} if name == "x.webp" else {}))
        data = bytearray(path.read_bytes())
        if name == "x.jpg":
            frame = data.index(b"\xff\xc0") + 5
            data[frame : frame + 4] = struct.pack(">HH", side, side)
        elif name == "x.bmp":
            data[18:26] = struct.pack("<II", side, side)
        elif name == "x.webp":  # the most that its 14 bits hold
            side = 16_383
            start = data.index(b"VP8L") + 9
            data[start : start + 4] = struct.pack("<I", (side - 1) | (side - 1) << 14)
        path.write_bytes(data)
        if name.endswith(".tif"):
            retag(path, ImageWidth=side, ImageLength=side)
        tracemalloc.start()
        claim = rf"{side} x {side} px = {side * side / 1e6:.0f}M, above data\.max_pixels 200M; raise data\.max_pixels"
        with pytest.raises(DataError, match=claim):
            decode(path, max_pixels=200_000_000)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**24

    def test_scan_above_pillows_error_limit_is_read(self, tmp_path: Path) -> None:
        """180 megapixels, which Pillow by itself refuses as a bomb; the last pixel is there."""
        array = np.zeros((13_420, 13_420), np.uint8)
        array[-1, -1] = 77
        (tmp_path / "scan.png").write_bytes(imagecodecs.png_encode(array, level=1))
        with pytest.raises(Image.DecompressionBombError):
            Image.open(tmp_path / "scan.png")
        out = decode(tmp_path / "scan.png", max_pixels=500_000_000)
        assert out.shape == (13_420, 13_420, 1)
        assert out[-1, -1, 0] == 77

    def test_image_above_pillows_limit_and_under_ours_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Pillow's own limit has no say, and is as before afterwards."""
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
        for name in ("x.png", "x.bmp", "x.jpg"):
            Image.new("RGB", (50, 40), (9, 8, 7)).save(tmp_path / name)
            assert decode(tmp_path / name, max_pixels=2000).shape == (40, 50, 3)
            with pytest.raises(DataError, match=r"50 x 40 px = 2000, above data\.max_pixels 1999"):
                decode(tmp_path / name, max_pixels=1999)
        assert Image.MAX_IMAGE_PIXELS == 100

    def test_tiff_is_measured_by_its_header_too(self, tmp_path: Path) -> None:
        """The limit holds for every format."""
        tifffile.imwrite(tmp_path / "x.tif", np.zeros((40, 50), np.uint16))
        with pytest.raises(DataError, match="max_pixels 1999"):
            decode(tmp_path / "x.tif", max_pixels=1999)

    @pytest.mark.parametrize(
        ("draft", "shape"),
        [
            ((104, 152), (104, 152)),
            ((52, 76), (52, 76)),
            ((52, 152), (104, 152)),
            ((26, 38), (26, 38)),
            ((8, 12), (26, 38)),
            ((8, 13), (52, 76)),
            ((53, 76), (208, 304)),
            ((100, 150), (208, 304)),
            ((300, 300), (208, 304)),
            (None, (208, 304)),
        ],
    )
    def test_draft_is_a_multiple_of_the_target_or_three_times_it(
        self, tmp_path: Path, picture: Callable[..., np.ndarray], draft: tuple[int, int] | None, shape: tuple[int, int]
    ) -> None:
        """A JPEG comes smaller only where the reduction to the target loses nothing by it, and never below the target."""
        Image.fromarray(picture(208, 304)).save(tmp_path / "x.jpg")
        assert decode(tmp_path / "x.jpg", max_pixels=LIMIT, draft_px=draft).shape[:2] == shape

    def test_draft_divides_both_axes(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """No last row stands for a part of a row: the proportions are exact."""
        Image.fromarray(picture(204, 302)).save(tmp_path / "x.jpg")
        assert decode(tmp_path / "x.jpg", max_pixels=LIMIT, draft_px=(20, 20)).shape == (102, 151, 3)

    def test_draft_counts_in_the_shown_orientation(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """A turned photo is measured as people see it."""
        exif = Image.Exif()
        exif[274] = 6
        Image.fromarray(picture(200, 400)).save(tmp_path / "x.jpg", exif=exif)
        assert decode(tmp_path / "x.jpg", max_pixels=LIMIT, draft_px=(200, 100)).shape == (200, 100, 3)
        assert decode(tmp_path / "x.jpg", max_pixels=LIMIT, draft_px=(100, 200)).shape == (400, 200, 3)


class TestOrientation:
    @pytest.mark.parametrize("orientation", range(1, 9))
    @pytest.mark.parametrize("name", ["x.jpg", "x.png", "x.webp", "x.tif"])
    def test_exif_rotation_is_applied(
        self,
        tmp_path: Path,
        picture: Callable[..., np.ndarray],
        turned: Callable[..., tuple[np.ndarray, Image.Exif]],
        name: str,
        orientation: int,
    ) -> None:
        """Each of the eight ways, in each format, as the standard's own picture of it says."""
        upright = picture(24, 40)
        stored, exif = turned(upright, orientation)
        options = {"quality": 100, "subsampling": 0} if name == "x.jpg" else {"lossless": True} if name == "x.webp" else {}
        Image.fromarray(stored).save(tmp_path / name, exif=exif, **options)
        header, array = probe(tmp_path / name, LIMIT), decode(tmp_path / name, max_pixels=LIMIT)
        assert header.orientation == orientation
        assert header.shown_size == (24, 40)
        assert array.flags.c_contiguous
        assert np.abs(array.astype(int) - upright).max() <= (12 if name == "x.jpg" else 0)

    def test_exif_behind_a_pngs_pixels_is_found(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """Some writers put the chunk last; the header still says it, without decoding."""
        exif = Image.Exif()
        exif[274] = 3
        array = picture(20, 30)
        Image.fromarray(array).save(tmp_path / "x.png")
        body = exif.tobytes().removeprefix(b"Exif\0\0")
        chunk = struct.pack(">I", len(body)) + b"eXIf" + body + struct.pack(">I", zlib.crc32(b"eXIf" + body))
        data = (tmp_path / "x.png").read_bytes()
        (tmp_path / "x.png").write_bytes(data[:-12] + chunk + data[-12:])
        assert np.array_equal(decode(tmp_path / "x.png", max_pixels=LIMIT), array[::-1, ::-1])

    def test_damaged_exif_means_no_rotation(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """A broken side block does not cost the image."""
        Image.fromarray(picture(20, 30)).save(tmp_path / "x.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
        assert decode(tmp_path / "x.jpg", max_pixels=LIMIT).shape == (20, 30, 3)


class TestModes:
    def test_grey_stays_one_channel(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """PNG, JPEG, TIFF and BMP."""
        grey = picture(20, 30, 1)[..., 0]
        for name in ("x.png", "x.jpg", "x.tif", "x.bmp"):
            Image.fromarray(grey).save(tmp_path / name)
            assert decode(tmp_path / name, max_pixels=LIMIT).shape == (20, 30, 1), name
            assert probe(tmp_path / name, LIMIT).channels == 1

    def test_one_bit_becomes_0_and_255(self, tmp_path: Path) -> None:
        """In each format that has it, white on black and black on white."""
        pixels = np.zeros((16, 24), bool)
        pixels[4:9, 5:20] = True
        image = Image.fromarray(pixels)
        image.save(tmp_path / "x.png")
        image.save(tmp_path / "x.bmp")
        image.save(tmp_path / "x.tif")
        image.save(tmp_path / "g4.tif", compression="group4")
        tifffile.imwrite(tmp_path / "white.tif", ~pixels, photometric="miniswhite")
        for name in ("x.png", "x.bmp", "x.tif", "g4.tif", "white.tif"):
            assert np.array_equal(decode(tmp_path / name, max_pixels=LIMIT)[..., 0], pixels * np.uint8(255)), name
            assert probe(tmp_path / name, LIMIT).bits == 1

    @pytest.mark.parametrize("channels", [1, 3])
    def test_16_bit_keeps_its_values(self, tmp_path: Path, channels: int) -> None:
        """PNG and TIFF, grey and RGB, both byte orders: uint16 as stored, nothing turned white."""
        array = np.random.default_rng(0).integers(0, 65536, (20, 30, channels), dtype=np.uint16)
        plain = array[..., 0].copy() if channels == 1 else array
        (tmp_path / "x.png").write_bytes(imagecodecs.png_encode(plain))
        photometric = "minisblack" if channels == 1 else "rgb"
        tifffile.imwrite(tmp_path / "x.tif", plain, photometric=photometric, compression="zlib", predictor=True)
        tifffile.imwrite(tmp_path / "big.tif", plain, photometric=photometric, byteorder=">")
        for name in ("x.png", "x.tif", "big.tif"):
            out = decode(tmp_path / name, max_pixels=LIMIT)
            assert out.dtype == np.uint16, name
            assert np.array_equal(out, array), name
            assert (probe(tmp_path / name, LIMIT).bits, probe(tmp_path / name, LIMIT).channels) == (16, channels)

    @pytest.mark.parametrize("dtype", ["float32", "float64", "int16", "uint32"])
    def test_other_numbers_become_float32_with_their_values(self, tmp_path: Path, dtype: str) -> None:
        """Floats and signed numbers are not scaled here."""
        array = (np.random.default_rng(0).random((20, 30)) * 3000).astype(dtype)
        tifffile.imwrite(tmp_path / "x.tif", array)
        out = decode(tmp_path / "x.tif", max_pixels=LIMIT)
        assert out.dtype == np.float32
        assert np.array_equal(out[..., 0], array.astype(np.float32))

    def test_values_that_are_not_finite_are_an_error(self, tmp_path: Path) -> None:
        """NaN would reach the loss."""
        array = np.zeros((20, 30), np.float32)
        array[3, 4:7] = np.nan
        tifffile.imwrite(tmp_path / "x.tif", array)
        with pytest.raises(DataError, match="3 values that are not finite"):
            decode(tmp_path / "x.tif", max_pixels=LIMIT)

    def test_alpha_is_laid_on_the_background(self, tmp_path: Path) -> None:
        """RGBA, LA, a palette with transparency and a colour key: the hidden colour never shows."""
        rgba = np.zeros((8, 8, 4), np.uint8)
        rgba[..., :3] = (200, 100, 50)
        rgba[:, 4:, 3] = 255
        rgba[:, 2:4, 3] = 128
        for name in ("x.png", "x.tif", "x.webp"):
            Image.fromarray(rgba).save(tmp_path / name, **({"lossless": True, "exact": True} if name == "x.webp" else {}))
            out = decode(tmp_path / name, max_pixels=LIMIT, background=(0, 0, 255))
            assert out.shape == (8, 8, 3)
            assert out[0, 0].tolist() == [0, 0, 255], name
            assert out[0, 7].tolist() == [200, 100, 50]
            assert np.abs(out[0, 3].astype(int) - [100, 50, 152]).max() <= 1
        Image.fromarray(rgba).convert("LA").save(tmp_path / "la.png")
        assert decode(tmp_path / "la.png", max_pixels=LIMIT)[0, 0].tolist() == [255]
        assert decode(tmp_path / "la.png", max_pixels=LIMIT, background=(0, 0, 255))[0, 0].tolist() == [0, 0, 255]
        palette = Image.fromarray(rgba[..., :3]).quantize(4)
        hidden = palette.getpixel((0, 0))
        palette.save(tmp_path / "p.png", transparency=hidden)
        assert decode(tmp_path / "p.png", max_pixels=LIMIT)[0, 0].tolist() == [255, 255, 255]
        Image.fromarray(rgba[..., :3]).save(tmp_path / "key.png", transparency=(200, 100, 50))
        assert decode(tmp_path / "key.png", max_pixels=LIMIT)[0, 0].tolist() == [255, 255, 255]

    def test_16_bit_alpha_is_blended_in_16_bit(self, tmp_path: Path) -> None:
        """The background is scaled to the type."""
        array = np.zeros((6, 6, 4), np.uint16)
        array[..., 0] = 40_000
        array[3:, :, 3] = 65535
        (tmp_path / "x.png").write_bytes(imagecodecs.png_encode(array))
        out = decode(tmp_path / "x.png", max_pixels=LIMIT)
        assert out[0, 0].tolist() == [65535] * 3
        assert out[5, 0].tolist() == [40_000, 0, 0]

    def test_premultiplied_alpha_is_not_multiplied_again(self, tmp_path: Path) -> None:
        """TIFF says which of the two it holds."""
        array = np.zeros((6, 6, 4), np.uint8)
        array[...] = (100, 0, 0, 128)
        for kind, red in (("assocalpha", 100 + 127), ("unassalpha", 50 + 127)):
            tifffile.imwrite(tmp_path / f"{kind}.tif", array, photometric="rgb", extrasamples=[kind])
            assert abs(int(decode(tmp_path / f"{kind}.tif", max_pixels=LIMIT)[0, 0, 0]) - red) <= 1

    def test_cmyk_follows_the_stated_rule(self, tmp_path: Path) -> None:
        """(255 - C)(255 - K) / 255, in TIFF and in JPEG as Adobe stores it."""
        ink = np.zeros((16, 16, 4), np.uint8)
        ink[...] = (200, 30, 0, 55)
        for name in ("x.tif", "x.jpg"):
            Image.fromarray(ink, mode="CMYK").save(tmp_path / name)
            out = decode(tmp_path / name, max_pixels=LIMIT)
            assert np.abs(out[8, 8].astype(int) - [55 * 200 / 255, 225 * 200 / 255, 200]).max() <= 3, name
            assert probe(tmp_path / name, LIMIT).channels == 3

    def test_palette_gives_its_colours(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """PNG, TIFF and BMP palettes, as Pillow reads them."""
        image = Image.fromarray(picture(20, 30)).quantize(16)
        for name in ("x.png", "x.tif", "x.bmp"):
            image.save(tmp_path / name)
            assert np.array_equal(decode(tmp_path / name, max_pixels=LIMIT), np.asarray(image.convert("RGB"))), name

    @pytest.mark.parametrize("planar", ["contig", "separate"])
    def test_more_channels_stay(self, tmp_path: Path, planar: str) -> None:
        """Five bands of a scene, in either layout of the file."""
        array = np.random.default_rng(0).integers(0, 65536, (20, 30, 5), dtype=np.uint16)
        stored = array if planar == "contig" else array.transpose(2, 0, 1)
        tifffile.imwrite(tmp_path / "x.tif", stored, photometric="minisblack", planarconfig=planar)
        assert np.array_equal(decode(tmp_path / "x.tif", max_pixels=LIMIT), array)
        assert probe(tmp_path / "x.tif", LIMIT).channels == 5

    def test_header_tells_the_channels_that_decoding_gives(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """Every mode that Pillow writes as PNG."""
        for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
            Image.fromarray(picture(20, 30)).convert(mode).save(tmp_path / "x.png")
            assert decode(tmp_path / "x.png", max_pixels=LIMIT).shape[2] == probe(tmp_path / "x.png", LIMIT).channels, mode

    def test_colours_come_in_the_order_red_green_blue(self, tmp_path: Path) -> None:
        """No decoder hands over its own order."""
        for name in ("x.png", "x.jpg", "x.webp", "x.bmp", "x.tif"):
            Image.new("RGB", (32, 32), (250, 120, 10)).save(tmp_path / name)
            assert np.abs(decode(tmp_path / name, max_pixels=LIMIT)[16, 16].astype(int) - [250, 120, 10]).max() <= 4, name
