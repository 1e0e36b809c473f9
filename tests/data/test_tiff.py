"""TIFF read in parts: the same pixels as the whole, the same strictness, and memory for what is read alone."""

from __future__ import annotations

import io
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image

from hiresvis.data.contract import examine, read_through
from hiresvis.data.decode import decode, open_image, probe
from hiresvis.data.regions import Region
from hiresvis.data.transforms import Preprocess
from hiresvis.errors import DataError

LIMIT = 10**8
ROOT = Path(__file__).resolve().parents[2]


def halved(array: np.ndarray) -> np.ndarray:
    """Averages of 2 x 2."""
    height, width = (side // 2 for side in array.shape[:2])
    return np.rint(array[: 2 * height, : 2 * width].reshape(height, 2, width, 2, -1).mean(axis=(1, 3))).astype(array.dtype)


def write_pyramid(path: Path, array: np.ndarray, levels: int, *, kind: str = "subifds", **options: Any) -> list[np.ndarray]:
    """A pyramid as OME writers (SubIFDs), GDAL and libvips (pages) or Aperio's scanners (svs) lay it out; its levels."""
    made = [array]
    for _ in range(levels - 1):
        made.append(halved(made[-1]))
    settings: dict[str, Any] = {"photometric": "rgb", "tile": (32, 32), "compression": "zlib", "metadata": None, **options}
    with tifffile.TiffWriter(path) as writer:
        if kind == "svs":
            writer.write(array, description="Aperio Image Library v11.2.1", **settings)
            writer.write(array[::7, ::7].copy(), photometric="rgb", metadata=None)  # the thumbnail that stands between
        else:
            writer.write(array, subifds=levels - 1 if kind == "subifds" else None, **settings)
        for level in made[1:]:
            writer.write(level, subfiletype=0 if kind == "svs" else 1, **settings)
        if kind == "svs":
            writer.write(array[:50, :40].copy(), photometric="rgb", subfiletype=1, metadata=None)  # the label
    return made


def kinds(picture: Callable[..., np.ndarray]) -> Iterator[tuple[str, np.ndarray, dict[str, Any]]]:
    """Every layout of samples that is read."""
    rgb, five = picture(100, 130), picture(100, 130, 5)
    deep = rgb.astype(np.uint16) * 211
    tiles = {"tile": (32, 48)}
    for name, layout in (("tiles", tiles), ("strips", {"rowsperstrip": 7}), ("one strip", {"rowsperstrip": 100})):
        yield f"plain {name}", rgb, {"photometric": "rgb", **layout}
        yield f"zlib {name}", deep, {"photometric": "rgb", "compression": "zlib", "predictor": True, **layout}
        yield f"big-endian {name}", deep, {"photometric": "rgb", "byteorder": ">", **layout}
        yield f"grey {name}", deep[..., 0], {"photometric": "minisblack", "compression": "lzw", **layout}
        yield f"white is zero {name}", rgb[..., 0], {"photometric": "miniswhite", **layout}
        yield f"bits {name}", rgb[..., 0] > 128, {"photometric": "minisblack", "compression": "packbits", **layout}
        yield f"float {name}", rgb[..., 0] / np.float32(255), {"photometric": "minisblack", "compression": "zlib", **layout}
        yield f"planar {name}", five.transpose(2, 0, 1), {"photometric": "minisblack", "planarconfig": "separate", **layout}
        yield f"bands {name}", five, {"photometric": "minisblack", "planarconfig": "contig", "compression": "zstd", **layout}
        yield f"alpha {name}", picture(100, 130, 4), {"photometric": "rgb", "extrasamples": ["unassalpha"], **layout}
        yield f"cmyk {name}", picture(100, 130, 4), {"photometric": "separated", **layout}
    for tables in ((64, 64), (16, 112)):
        yield f"jpeg {tables}", rgb, {"photometric": "rgb", "compression": "jpeg", "tile": tables}
        yield f"ycbcr {tables}", rgb, {"photometric": "ycbcr", "compression": "jpeg", "tile": tables}
        yield f"jpeg2000 {tables}", rgb, {"photometric": "rgb", "compression": "jpeg2000", "tile": tables}
    yield "channels as pages", five.transpose(2, 0, 1), {"photometric": "minisblack", "metadata": {"axes": "CYX"}}


REGIONS = (
    Region(0, 0, 130, 100),
    Region(31, 47, 2, 2),
    Region(32, 48, 48, 32),
    Region(5, 3, 120, 90),
    Region(129, 99, 1, 1),
    Region(0, 40, 130, 1),
)


class TestParts:
    def test_a_region_is_the_same_part_of_the_whole(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """Every layout of samples, tiles and strips, and regions across their borders: the very pixels of the whole decode."""
        for name, array, options in kinds(picture):
            path = tmp_path / f"{name.replace(' ', '-')}.tif"
            tifffile.imwrite(path, array, **options)
            whole = decode(path, max_pixels=LIMIT)
            for region in REGIONS:
                part = decode(path, max_pixels=LIMIT, region=region)
                assert part.dtype == whole.dtype, name
                assert np.array_equal(part, whole[region.slices]), (name, region)

    @pytest.mark.parametrize("compression", ["group4", "group3", "tiff_ccitt"])
    def test_regions_of_faxes(self, tmp_path: Path, compression: str) -> None:
        """Bits that come as bytes."""
        pixels = np.random.default_rng(0).random((60, 80)) > 0.7
        Image.fromarray(pixels).save(tmp_path / "x.tif", compression=compression, strip_size=200)
        whole = decode(tmp_path / "x.tif", max_pixels=LIMIT)
        assert np.array_equal(decode(tmp_path / "x.tif", max_pixels=LIMIT, region=Region(9, 11, 50, 40)), whole[11:51, 9:59])

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_places_count_in_the_image_as_shown(self, tmp_path: Path, picture: Callable[..., np.ndarray], orientation: int) -> None:
        """A turned TIFF and a turned photo: the region of the upright image, whatever way it is stored."""
        tifffile.imwrite(tmp_path / "x.tif", picture(60, 80), photometric="rgb", tile=(32, 32), extratags=[(274, 3, 1, orientation, True)])
        exif = Image.Exif()
        exif[274] = orientation
        Image.fromarray(picture(60, 80)).save(tmp_path / "x.png", exif=exif)
        region = Region(7, 11, 30, 20)
        for name in ("x.tif", "x.png"):
            whole = decode(tmp_path / name, max_pixels=LIMIT)
            assert np.array_equal(decode(tmp_path / name, max_pixels=LIMIT, region=region), whole[region.slices])

    def test_a_window_of_a_palette_may_be_of_one_colour(self, tmp_path: Path) -> None:
        """Two numbers of one colour are no damage; a palette of nothing but black is, in a part as in the whole."""
        table = np.zeros((3, 256), np.uint16)
        table[:, 3] = 40_000
        numbers = np.zeros((64, 64), np.uint8)
        numbers[0, 5], numbers[40:, 40:] = 9, 3
        tifffile.imwrite(tmp_path / "x.tif", numbers, photometric="palette", colormap=table, tile=(16, 16))
        assert (decode(tmp_path / "x.tif", max_pixels=LIMIT, region=Region(0, 0, 16, 16)) == 0).all()
        tifffile.imwrite(tmp_path / "black.tif", numbers, photometric="palette", colormap=table * 0, tile=(16, 16))
        with pytest.raises(DataError, match="damaged palette"):
            decode(tmp_path / "black.tif", max_pixels=LIMIT, region=Region(0, 0, 16, 16))

    def test_only_the_parts_that_a_region_touches_are_read(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """Three of twelve tiles are overwritten and three lie behind a cut: regions without them are whole, regions with them errors."""
        path = tmp_path / "x.tif"
        for options in ({"compression": "zlib"}, {"compression": "jpeg"}, {"compression": "jpeg2000"}):
            tifffile.imwrite(path, picture(96, 128), photometric="rgb", tile=(32, 32), **options)
            sound = decode(path, max_pixels=LIMIT)
            with tifffile.TiffFile(path) as tiff:
                offsets, counts = tiff.pages[0].dataoffsets, tiff.pages[0].databytecounts
            data = bytearray(path.read_bytes())
            data[offsets[5] + 20 : offsets[5] + counts[5] - 2] = b"\xff" * (counts[5] - 22)
            path.write_bytes(data[: offsets[10] + 9] if offsets[10] > offsets[0] else data)
            good, bad, cut = Region(64, 0, 64, 64), Region(40, 40, 10, 10), Region(64, 64, 32, 32)
            assert np.array_equal(decode(path, max_pixels=LIMIT, region=good), sound[good.slices])
            for region, message in ((bad, "damaged"), (cut, "is cut: its pixels end at byte")):
                with pytest.raises(DataError, match=message):
                    decode(path, max_pixels=LIMIT, region=region)

    @pytest.mark.parametrize("tile", [(64, 64), (32, 96)])
    def test_damage_that_tifffile_forgives_is_an_error_in_a_part_too(
        self, tmp_path: Path, picture: Callable[..., np.ndarray], tile: tuple[int, int]
    ) -> None:
        """Some bytes of one JPEG tile, which its own decoder makes grey of; tables in the file's head or in the tile."""
        path = tmp_path / "x.tif"
        tifffile.imwrite(path, picture(128, 192), photometric="rgb", compression="jpeg", tile=tile)
        with tifffile.TiffFile(path) as tiff:
            start, length = tiff.pages[0].dataoffsets[2], tiff.pages[0].databytecounts[2]
        sound, forgiven, refused = path.read_bytes(), 0, 0
        top, left = 2 * tile[1] // 192 * tile[0], 2 * tile[1] % 192
        for number in range(12):
            data = bytearray(sound)
            place = start + length // 3 + number * length // 24
            data[place : place + 40] = b"\xff\x00" * 20
            path.write_bytes(data)
            try:
                tifffile.imread(path)
            except imagecodecs.Jpeg8Error:
                continue
            forgiven += 1
            try:
                decode(path, max_pixels=LIMIT, region=Region(left + 3, top + 3, 9, 9))
            except DataError as error:
                refused += "holds a damaged JPEG as tile or strip 2" in str(error)
        assert refused == forgiven >= 6
        assert decode(path, max_pixels=LIMIT, region=Region(0, 0, tile[1], tile[0])).shape[:2] == tile

    def test_a_size_of_parts_that_is_no_number_is_the_files_fault(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """Before anything is read: the fuzz found it."""
        path = tmp_path / "x.tif"
        tifffile.imwrite(path, picture(96, 128), photometric="rgb", compression="zlib", tile=(64, 64))
        with tifffile.TiffFile(path) as tiff:
            entry = tiff.pages[0].tags["TileLength"].offset
        data = bytearray(path.read_bytes())
        data[entry + 4] = 2
        path.write_bytes(data)
        for region in (None, Region(0, 0, 9, 9)):
            with pytest.raises(DataError, match="is damaged or of an unread kind"):
                decode(path, max_pixels=LIMIT, region=region)

    def test_parts_without_a_place_and_parts_of_another_type_are_errors(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """What tifffile would fill with zeros or force into the stated type, where it is read."""
        path = tmp_path / "x.tif"
        tifffile.imwrite(path, picture(96, 128), photometric="rgb", tile=(32, 32), compression="zlib")
        with tifffile.TiffFile(path, mode="r+") as tiff:
            offsets = list(tiff.pages[0].dataoffsets)
            offsets[6] = 0
            tiff.pages[0].tags["TileOffsets"].overwrite(offsets)
        assert decode(path, max_pixels=LIMIT, region=Region(0, 0, 64, 64)).shape == (64, 64, 3)
        with pytest.raises(DataError, match="lacks 1 of its 12 tiles or strips"):
            decode(path, max_pixels=LIMIT, region=Region(65, 33, 5, 5))
        tifffile.imwrite(path, picture(96, 128), photometric="rgb", tile=(32, 32), compression="jpeg")
        with tifffile.TiffFile(path, mode="r+") as tiff:
            tiff.pages[0].tags["BitsPerSample"].overwrite((16, 16, 16))
        with pytest.raises(DataError, match="holds uint8 pixels where its header says uint16"):
            decode(path, max_pixels=LIMIT, region=Region(0, 0, 64, 64))
        tifffile.imwrite(path, picture(96, 128), photometric="rgb", rowsperstrip=16)
        with tifffile.TiffFile(path, mode="r+") as tiff:
            counts = list(tiff.pages[0].databytecounts)
            tiff.pages[0].tags["StripByteCounts"].overwrite([*counts[:2], counts[2] // 2, *counts[3:]])
        assert decode(path, max_pixels=LIMIT, region=Region(0, 0, 64, 32)).shape == (32, 64, 3)
        with pytest.raises(DataError, match="corrupted strip"):
            decode(path, max_pixels=LIMIT, region=Region(0, 30, 64, 9))


class TestPyramids:
    @pytest.mark.parametrize("kind", ["subifds", "pages", "svs"])
    @pytest.mark.parametrize("compression", ["zlib", "jpeg"])
    def test_the_smallest_level_that_loses_nothing_is_read(
        self, tmp_path: Path, picture: Callable[..., np.ndarray], kind: str, compression: str
    ) -> None:
        """By the rule of JPEG's drafts: a whole multiple of the target, or three times it; the header stays that of the full image."""
        path = tmp_path / ("x.svs" if kind == "svs" else "x.tif")
        levels = write_pyramid(path, picture(384, 512), 3, kind=kind, compression=compression)
        assert probe(path, LIMIT).shown_size == (384, 512)
        for target, number in (((96, 128), 2), ((32, 40), 2), ((48, 64), 2), ((64, 85), 1), ((100, 100), 0), ((384, 512), 0), (None, 0)):
            array = decode(path, max_pixels=LIMIT, draft_px=target)
            assert array.shape == levels[number].shape, target
            with tifffile.TiffFile(path) as tiff:
                assert np.array_equal(array, tiff.series[0].levels[number].asarray())

    def test_a_region_of_a_level_is_the_same_place(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """On whole pixels of the level exactly, else with its borders moved outward; turned images too."""
        for orientation in (1, 6, 3):
            path = tmp_path / f"{orientation}.tif"
            tags = [(274, 3, 1, orientation, True)]
            levels = write_pyramid(path, picture(400, 640), 3, extratags=tags)
            upright = [np.rot90(level, {1: 0, 6: -1, 3: 2}[orientation]) for level in levels]
            exact = decode(path, max_pixels=LIMIT, region=Region(40, 80, 200, 160), draft_px=(40, 50))
            assert np.array_equal(exact, upright[2][20:60, 10:60])
            outward = decode(path, max_pixels=LIMIT, region=Region(41, 82, 200, 160), draft_px=(12, 12))
            assert np.array_equal(outward, upright[2][20:61, 10:61])

    def test_a_level_of_another_cut_is_none(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """A reduced page of other proportions is a label, whatever it calls itself."""
        for size in ((128, 100), (100, 128), (256, 128), (128, 128)):
            with tifffile.TiffWriter(tmp_path / "x.svs") as writer:
                writer.write(picture(256, 256), photometric="rgb", tile=(32, 32), description="Aperio Image", metadata=None)
                writer.write(picture(50, 50), photometric="rgb", metadata=None)
                writer.write(picture(*size), photometric="rgb", tile=(32, 32), metadata=None)
            with tifffile.TiffFile(tmp_path / "x.svs") as tiff:
                assert len(tiff.series[0].levels) == 2
            read = decode(tmp_path / "x.svs", max_pixels=LIMIT, draft_px=(20, 20)).shape[:2]
            assert read == (size if size == (128, 128) else (256, 256))

    def test_damage_in_the_level_that_is_read_is_an_error_and_elsewhere_none(
        self, tmp_path: Path, picture: Callable[..., np.ndarray]
    ) -> None:
        """Each level is held to the same as a plain file."""
        path = tmp_path / "x.tif"
        write_pyramid(path, picture(256, 256), 3)
        with tifffile.TiffFile(path) as tiff:
            start = tiff.series[0].levels[2].pages[0].dataoffsets[1]
        data = bytearray(path.read_bytes())
        data[start + 10 : start + 60] = bytes(50)
        path.write_bytes(data)
        assert decode(path, max_pixels=LIMIT, draft_px=(128, 128)).shape == (128, 128, 3)
        with pytest.raises(DataError, match=r"x\.tif"):
            decode(path, max_pixels=LIMIT, draft_px=(64, 64))


class TestMaxPixels:
    def test_what_is_read_counts_and_is_known_from_the_header(self, tmp_path: Path, picture: Callable[..., np.ndarray]) -> None:
        """A level, a region or a window within the limit is fine where the whole is not; the refusal comes before a pixel is decoded."""
        pyramid, tiles, strips, plain = (tmp_path / f"{name}.tif" for name in ("pyramid", "tiles", "strips", "plain"))
        write_pyramid(pyramid, picture(256, 256), 3)
        tifffile.imwrite(tiles, picture(256, 256), photometric="rgb", tile=(32, 32))
        tifffile.imwrite(strips, picture(256, 256), photometric="rgb", rowsperstrip=8)
        tifffile.imwrite(plain, picture(256, 256), photometric="rgb", rowsperstrip=256)
        limit, region = 64 * 64, Region(10, 20, 60, 60)
        assert decode(pyramid, max_pixels=limit, draft_px=(64, 64)).shape == (64, 64, 3)
        for path in (pyramid, tiles, strips):
            assert decode(path, max_pixels=limit, region=region).shape == (60, 60, 3)
        expected = {
            ("resize", pyramid): True, ("resize", tiles): False, ("resize", strips): False, ("resize", plain): False,
            ("tile", pyramid): True, ("tile", tiles): True, ("tile", strips): False, ("tile", plain): False,
        }  # fmt: skip
        for (fit, path), fine in expected.items():
            with open_image(path, max_pixels=limit) as image:
                preprocess = Preprocess((64, 64), fit)
                if fine:
                    examine(image, preprocess, path)
                else:
                    with pytest.raises(DataError, match=r"is 256 x 256 px = 65536, above data\.max_pixels 4096"):
                        examine(image, preprocess, path)
        with pytest.raises(DataError, match=r"has a region of 65 x 65 px = 4225, above data\.max_pixels 4096"):
            decode(tiles, max_pixels=limit, region=Region(0, 0, 65, 65))
        with pytest.raises(DataError, match=r"is 256 x 256 px = 65536, above"):
            decode(plain, max_pixels=limit, region=region)

    @pytest.mark.parametrize(("tags", "kind"), [({"TileWidth": 3008, "TileLength": 3008}, "tiles"), ({"RowsPerStrip": 2048}, "strips")])
    def test_parts_larger_than_the_limit_are_refused(self, tmp_path: Path, tags: dict[str, int], kind: str) -> None:
        """A region takes the memory of the tiles that it touches."""
        layout = {"tile": (32, 32)} if kind == "tiles" else {"rowsperstrip": 8}
        tifffile.imwrite(tmp_path / "x.tif", np.zeros((4096, 4096), np.uint8), photometric="minisblack", compression="zlib", **layout)
        with tifffile.TiffFile(tmp_path / "x.tif", mode="r+") as tiff:
            for name, value in tags.items():
                tiff.pages[0].tags[name].overwrite(value)
        with pytest.raises(DataError, match=rf"has {kind} of \d+ values each, above 4 x data\.max_pixels 1000000"):
            decode(tmp_path / "x.tif", max_pixels=10**6, region=Region(0, 0, 9, 9))


def test_a_large_pyramid_takes_memory_for_what_is_read(tmp_path: Path) -> None:
    """8000 x 8000 px are 183 MiB: a level for resize, a region and a window each stay below 16, and the check below 64."""
    side, tile = 8000, 256
    block = np.full((tile, tile, 3), 77, np.uint8)
    with tifffile.TiffWriter(tmp_path / "x.tif", bigtiff=True) as writer:
        for number, length in enumerate((side, side // 2, side // 4, side // 8)):
            count = (-(-length // tile)) ** 2
            tiles = (block for _ in range(count))
            shape, kind = (length, length, 3), {"subfiletype": 1} if number else {"subifds": 3}
            writer.write(
                tiles, shape=shape, dtype=np.uint8, photometric="rgb", tile=(tile, tile), compression="zlib", metadata=None, **kind
            )

    def peak(read: Callable[[], object]) -> float:
        tracemalloc.start()
        read()
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top / 2**20

    path = tmp_path / "x.tif"
    resize, tiled = Preprocess((256, 256)), Preprocess((1024, 1024), "tile")
    assert peak(lambda: decode(path, max_pixels=LIMIT, draft_px=(256, 256))) < 16
    assert peak(lambda: decode(path, max_pixels=LIMIT, region=Region(3000, 5000, 1024, 1024))) < 16
    for preprocess in (resize, tiled):
        with open_image(path, max_pixels=LIMIT) as image:
            if preprocess is tiled:
                assert peak(lambda image=image: image.read_window(tiled.window(*image.size, 17))) < 16
            assert peak(lambda image=image, preprocess=preprocess: read_through(image, preprocess, path)) < 64


def test_large_slides_are_read_in_a_small_process(tmp_path: Path) -> None:
    """20000 x 20000 px, 1.1 GiB: header, level and windows in a process whose address space has room for 400 MiB more."""
    side, tile = 20_000, 512
    out = io.BytesIO()
    with tifffile.TiffWriter(out) as writer:
        for number, length in enumerate((side, side // 4, side // 16)):
            empty = (np.zeros((tile, tile, 3), np.uint8) for _ in range((-(-length // tile)) ** 2))
            shape, kind = (length, length, 3), {"subfiletype": 1} if number else {"subifds": 2}
            writer.write(
                empty, shape=shape, dtype=np.uint8, photometric="rgb", tile=(tile, tile), compression="zlib", metadata=None, **kind
            )
    (tmp_path / "x.tif").write_bytes(out.getvalue())
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from hiresvis.data.decode import decode, open_image\n"
        "from hiresvis.data.regions import Region\n"
        "used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 400 * 2**20,) * 2)\n"
        "path = Path(sys.argv[1])\n"
        "with open_image(path, max_pixels=500_000_000) as image:\n"
        "    print(image.read((1024, 1024)).shape, image.read_window(Region(18_000, 100, 2000, 2000)).shape)\n"
        "print(decode(path, max_pixels=500_000_000, region=Region(5, 5, 4000, 4000), draft_px=(256, 256)).shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "x.tif")], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:2] == ["(5000, 5000, 3) (2000, 2000, 3)", "(1001, 1001, 3)"], done.stderr
