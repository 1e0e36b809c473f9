"""TIFF by tifffile: whole pictures, levels of a pyramid, and regions of which only the tiles or strips that they touch are read.

tifffile fills what a file lacks and its JPEG decoder forgives damage, so all that is read is checked first: places, lengths, types, and
JPEG once more by a strict decoder. Where a region is read, the parts it touches are held to the same as those of a whole picture.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tifffile

from hiresvis.data import photos
from hiresvis.data.colours import blend, cmyk_to_rgb, largest, plain_numbers, through_palette
from hiresvis.data.header import ORIENTATION_TAG, Header, millions, refuse, refuse_too_large
from hiresvis.data.regions import Region, Size, whole
from hiresvis.errors import DataError, first_line

Page = Any  # tifffile.TiffPage, or TiffFrame, which is one without tags of its own
MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_CHANNELS_PER_PIXEL = 4  # up to these, max_pixels counts pixels alone; a file with more takes memory in proportion, and counts so
_FAX_COMPRESSIONS = frozenset({2, 3, 4})
_PLAIN_COMPRESSIONS = frozenset({1, 5, 8, 32773, 32946, 34925, 50000})  # none, LZW, zlib, packbits, LZMA, Zstandard: of any bytes

# these report oddities of files through logging; without a handler Python would print them over the live view
for _library in ("tifffile", "imagecodecs"):
    logging.getLogger(_library).addHandler(logging.NullHandler())


class Tiff:
    """An open TIFF: the first series, with the levels that tifffile finds for it (SubIFDs, reduced pages, Aperio's SVS).

    Attributes:
        header: of the full resolution.
        levels: sizes as stored, the full resolution first; levels of another shape than it are left out.
        tiled: it is kept in tiles, so that windows are read by themselves.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._path = path
        with _blaming(path):
            self._tiff = tifffile.TiffFile(file)
            if not len(self._tiff.pages):
                refuse(path, "is a TIFF without a picture")
            series = self._tiff.series[0]
            self.header = _header(series, path)
            self._series = [series, *(level for level in series.levels[1:] if _same_picture(series, level))]
            self.levels = [_size(level) for level in self._series]
            self.tiled = bool(series.keyframe.is_tiled) and _has_plain_pages(series)
            self._counted = max(1.0, self._samples(series) / _CHANNELS_PER_PIXEL)

    def check_size(self, level: int, region: Region, max_pixels: int) -> None:
        """What would be read against `max_pixels`: of the region the pixels; of a file in one piece, or of unusual layout, all of it.

        Raises:
            DataError: it is too much.
        """
        with _blaming(self._path):
            self._check_size(level, region, max_pixels)

    def _check_size(self, level: int, region: Region, max_pixels: int) -> None:
        series, size = self._series[level], self.levels[level]
        in_parts = region != whole(size) and _has_plain_pages(series)
        height, width = region.size if in_parts and math.prod(series.keyframe.chunked) > series.keyframe.shaped[0] else size
        what = "is" if level == 0 and (height, width) == size else "would be read as" if (height, width) == size else "has a region of"
        refuse_too_large(self._path, width, height, max_pixels, what)
        counted = int(height * width * self._counted)
        if counted > max_pixels:
            refuse(
                self._path,
                f"{what} {width} x {height} px with {self._samples(series)} channels, which count as {millions(counted)} px of "
                f"{_CHANNELS_PER_PIXEL} channels, above data.max_pixels {millions(max_pixels)}; "
                "raise data.max_pixels, or leave channels out",
            )
        part = _part_values(series.keyframe)
        if part > 4 * max_pixels and (in_parts or series.keyframe.is_tiled):  # tiles may be larger than the image
            kind = "tiles" if series.keyframe.is_tiled else "strips"
            refuse(self._path, f"has {kind} of {part} values each, above 4 x data.max_pixels {max_pixels}; save it with smaller {kind}")

    def read(self, level: int, region: Region, background: tuple[int, int, int], max_pixels: int) -> np.ndarray:
        """(height, width, channels) of a region of a level, as stored; see the rules in decode.py.

        Raises:
            DataError: what is read is damaged, or more than `max_pixels`.
        """
        self.check_size(level, region, max_pixels)
        with _blaming(self._path):
            series, size = self._series[level], self.levels[level]
            if region == whole(size) or not _has_plain_pages(series):
                array = self._read_whole(series)[region.slices]
            else:
                array = np.concatenate([self._read_part(page, region) for page in series.pages if page is not None], axis=2)
            array = plain_numbers(array, self._path)
            return _in_colour(array, series.keyframe, self._path, background, is_whole=region == whole(size))

    def _read_whole(self, series: tifffile.TiffPageSeries) -> np.ndarray:
        for page in series.pages:
            if page is None or page.keyframe is None:
                refuse(self._path, "lacks one of its pages")
            frame = page.keyframe
            numbers = range(max(math.prod(frame.chunked), min(len(page.dataoffsets), len(page.databytecounts))))
            _check_places(page, numbers, self._tiff.filehandle.size, self._path)
            if frame.is_contiguous and sum(page.databytecounts) < frame.nbytes:
                refuse(self._path, f"holds {sum(page.databytecounts)} bytes of pixels where its header claims {frame.nbytes}")
            _check_numbers(frame, self._path)
            if _is_strict_jpeg(frame):
                deque(self._checked_parts(page, numbers), maxlen=0)
        array = series.asarray(maxworkers=1)  # threads of our own make the parallelism
        return _channels_last(array, series.axes)

    def _read_part(self, page: Page, region: Region) -> np.ndarray:
        """(height, width, samples) of one page, from the tiles or strips that the region touches."""
        frame = page.keyframe
        planes, _, _, _, samples = frame.shaped
        numbers = _parts_touched(frame, region)
        _check_places(page, numbers, self._tiff.filehandle.size, self._path)
        fax = int(frame.compression) in _FAX_COMPRESSIONS
        if fax:
            _check_numbers(frame, self._path)
        out = np.empty((planes, *region.size, samples), frame.dtype)
        for number, data in self._checked_parts(page, numbers):
            part, (plane, _, top, left, _), _ = frame.decode(data, number, jpegtables=page.jpegtables, jpegheader=frame.jpegheader)
            assert part is not None, "it has its bytes"
            if part.dtype != frame.dtype and not fax:  # whose bits come as bytes of 0 and 1
                refuse(self._path, f"holds {part.dtype} pixels where its header says {frame.dtype}")
            above, before = max(region.y - top, 0), max(region.x - left, 0)
            part = part[0, above : region.y + region.height - top, before : region.x + region.width - left]
            row, column = max(top - region.y, 0), max(left - region.x, 0)
            out[plane, row : row + part.shape[0], column : column + part.shape[1]] = part
        return np.ascontiguousarray(out.transpose(1, 2, 0, 3)).reshape(*region.size, planes * samples)

    def _checked_parts(self, page: Page, numbers: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """(number, bytes) of tiles or strips. JPEG is held to the same as JPEG alone, at the cost of its Huffman part."""
        frame, tables = page.keyframe, page.jpegtables
        strict = _is_strict_jpeg(frame)
        samples = 1 if int(frame.planarconfig) == 2 else int(frame.samplesperpixel)
        for number in numbers:
            self._tiff.filehandle.seek(page.dataoffsets[number])
            data = self._tiff.filehandle.read(page.databytecounts[number])
            if strict:
                jpeg = tables[:-2] + data[2:] if tables else data
                damage = photos.jpeg_damage(jpeg, "CMYK" if samples == 4 else "GRAY")
                if damage is not None:
                    refuse(self._path, f"holds a damaged JPEG as tile or strip {number}: {damage}")
            yield number, data

    @staticmethod
    def _samples(series: tifffile.TiffPageSeries) -> int:
        return math.prod(size for axis, size in zip(series.axes, series.shape, strict=True) if axis in "SC")


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Whatever goes wrong inside the block is the file's fault and leaves as DataError."""
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Exception as error:  # tifffile and the codecs raise anything on damaged files
        refuse(path, f"is damaged or of an unread kind: {first_line(error)}", error)


def _header(series: tifffile.TiffPageSeries, path: Path) -> Header:
    sizes = dict(zip(series.axes, series.shape, strict=True))
    page = series.keyframe
    photometric = getattr(page.photometric, "name", str(page.photometric)).lower()
    tag = page.tags.get(ORIENTATION_TAG)
    orientation = int(tag.value) if tag is not None and tag.value in range(1, 9) else 1
    stack = {axis: size for axis, size in sizes.items() if axis not in "YXSC" and size > 1}
    if stack or "Y" not in sizes or "X" not in sizes or (sizes.get("S", 1) > 1 and sizes.get("C", 1) > 1):
        refuse(path, f"is a stack of pictures (axes {series.axes}, shape {series.shape}); save one as a file of its own")
    samples = sizes.get("S", 1) * sizes.get("C", 1)
    channels = 3 if photometric in ("palette", "separated") else samples - _num_alpha(page)
    return Header(sizes["X"], sizes["Y"], f"{photometric} {series.dtype}", int(page.bitspersample), orientation, "TIFF", channels)


def _size(series: tifffile.TiffPageSeries) -> Size:
    sizes = dict(zip(series.axes, series.shape, strict=True))
    return sizes["Y"], sizes["X"]


def _same_picture(full: tifffile.TiffPageSeries, level: tifffile.TiffPageSeries) -> bool:
    """A smaller copy in the same proportions, to a pixel of it, with the same samples: no label or thumbnail of another cut."""
    if full.axes != level.axes or full.dtype != level.dtype or full.keyframe.photometric != level.keyframe.photometric:
        return False
    (height, width), (level_height, level_width) = _size(full), _size(level)
    unscaled = [axis for axis in full.axes if axis not in "YX"]
    same = all(full.shape[full.axes.index(axis)] == level.shape[level.axes.index(axis)] for axis in unscaled)
    return same and level_height < height and abs(level_height * width - level_width * height) <= max(height, width)


def _has_plain_pages(series: tifffile.TiffPageSeries) -> bool:
    """Each page holds what its tags say, side by side: no frame without its own tags, no volume, no slide scanner's strips."""
    frame = series.keyframe
    pages = series.pages
    return (
        all(page is not None and page.keyframe is not None for page in pages)
        and len(pages) * math.prod(frame.shaped) == math.prod(series.shape)
        and frame.shaped[1] == 1
        and frame.jpegheader is None
    )


def _part_values(frame: tifffile.TiffPage) -> int:
    """Values of one tile, or of one strip as high as it can be."""
    if frame.is_tiled:
        return math.prod(frame.chunks)
    return min(int(frame.rowsperstrip), int(frame.imagelength)) * math.prod(frame.chunks[1:])


def _parts_touched(frame: tifffile.TiffPage, region: Region) -> list[int]:
    """Numbers of the tiles or strips in which the region has pixels, of every plane."""
    height = int(frame.tilelength if frame.is_tiled else frame.rowsperstrip)
    width = int(frame.tilewidth if frame.is_tiled else frame.imagewidth)
    planes, _, length, across, _ = frame.shaped
    rows, columns = -(-length // height), -(-across // width)
    return [
        (plane * rows + row) * columns + column
        for plane in range(planes)
        for row in range(region.y // height, -(-(region.y + region.height) // height))
        for column in range(region.x // width, -(-(region.x + region.width) // width))
    ]


def _check_places(page: Page, numbers: Iterable[int], file_bytes: int, path: Path) -> None:
    """Tiles or strips have their place in the file: what has none would come back as zeros, or grey."""
    offsets, counts = page.dataoffsets, page.databytecounts
    known = min(len(offsets), len(counts))
    wanted = list(numbers)
    # tags of a wrong type give floats
    missing = sum(1 for number in wanted if number >= known or int(offsets[number]) < 1 or int(counts[number]) < 1)
    if missing:
        refuse(path, f"lacks {missing} of its {max(math.prod(page.keyframe.chunked), len(offsets))} tiles or strips")
    end = max(offsets[number] + counts[number] for number in wanted)
    if end > file_bytes:
        refuse(path, f"is cut: its pixels end at byte {end}, the file at {file_bytes}")


def _check_numbers(page: tifffile.TiffPage, path: Path) -> None:
    """Codecs of pictures know the type of their pixels (fax: one bit; JPEG and others: in the data), and it is what the tags say."""
    compression = int(page.compression)
    if compression in _FAX_COMPRESSIONS and int(page.bitspersample) != 1:
        refuse(path, f"is compressed as a fax and claims {page.bitspersample} bits a pixel, not 1")
    if compression not in _PLAIN_COMPRESSIONS | _FAX_COMPRESSIONS:
        part = next(page.segments(maxworkers=1))[0]
        if part is not None and part.dtype != page.dtype:
            refuse(path, f"holds {part.dtype} pixels where its header says {page.dtype}")


def _is_strict_jpeg(frame: tifffile.TiffPage) -> bool:
    """JPEG that the strict decoder reads; others are left to tifffile's."""
    samples = 1 if int(frame.planarconfig) == 2 else int(frame.samplesperpixel)
    kind = int(frame.compression) == 7 and int(frame.bitspersample) == 8 and not frame.jpegheader
    return kind and samples in (1, 3, 4)


def _num_alpha(page: tifffile.TiffPage) -> int:
    """1 where the last sample is alpha (associated 1, unassociated 2); other extra samples are channels like any."""
    return 1 if page.extrasamples and int(page.extrasamples[-1]) in (1, 2) else 0


def _in_colour(array: np.ndarray, page: tifffile.TiffPage, path: Path, background: tuple[int, int, int], *, is_whole: bool) -> np.ndarray:
    """Samples to channels."""
    photometric = int(page.photometric)
    if photometric == 0:  # white is zero
        array = largest(array.dtype) - array
    elif photometric == 3:
        colours = np.asarray(page.colormap)
        if colours.shape != (3, 1 << int(page.bitspersample)) or array.shape[2] != 1:
            refuse(path, f"has a palette of shape {colours.shape} for {array.shape[2]} samples of {page.bitspersample} bits a pixel")
        table = (colours if colours.max() < 256 else colours >> 8).astype(np.uint8).T
        # A window may well be of one colour under two numbers; there only a palette without any colours is damaged.
        if is_whole or (table == table[0]).all():
            array = through_palette(array[..., 0], table, path)
        else:
            array = np.ascontiguousarray(table[array[..., 0]])
    elif photometric == 5:
        array = cmyk_to_rgb(array)
    elif photometric == 8 or (photometric == 6 and int(page.compression) not in (6, 7)):
        refuse(path, f"has the colour space {tifffile.PHOTOMETRIC(photometric).name}, which is not read; save it as RGB")
    if photometric != 5 and _num_alpha(page):
        array = blend(array[..., :-1], array[..., -1:], background, premultiplied=int(page.extrasamples[-1]) == 1)
    return array


def _channels_last(array: np.ndarray, axes: str) -> np.ndarray:
    """(height, width, channels) of any order of axes with other axes of length 1."""
    for position in reversed(range(len(axes))):
        if axes[position] not in "YXSC":
            array, axes = array.squeeze(position), axes[:position] + axes[position + 1 :]
    for axis in "SC":
        if axes.count(axis) and len(axes) > 3 and array.shape[axes.index(axis)] == 1:
            array, axes = array.squeeze(axes.index(axis)), axes.replace(axis, "")
    channel = next((axis for axis in "SC" if axis in axes), None)
    if channel is None:
        array, axes, channel = array[..., None], axes + "S", "S"
    return np.ascontiguousarray(array.transpose([axes.index("Y"), axes.index("X"), axes.index(channel)]))
