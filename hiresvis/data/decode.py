"""One file, or a part of it, to one array, strictly: a damaged file is an error, never half an image.

Rules (each a test):
    size         against `max_pixels` before memory is taken: from the header; of a TIFF in parts, what is read (a level, a region)
    rotation     EXIF and TIFF orientation applied, and the rotation that HEIC and AVIF state; places count in the image as shown
    grey         1 channel; 1 bit becomes 0 and 255; 16 bit stays uint16; other number types become float32, values kept
    10, 12 bit   of HEIC and AVIF, and whatever JPEG 2000 states: stretched over the whole range of uint8 or uint16
    palette      RGB, of its colours; one that makes all numbers one colour is an error
    alpha        laid on `background` (palette and colour-key transparency too); the alpha channel is gone
    CMYK         red = (255 - C)(255 - K) / 255, and so on; no colour profile is applied to any image
    TIFF         first series; 4 or more samples without alpha stay channels; white-is-zero is inverted; pixels that are not finite are
                 an error; rows, tiles and types that the tags claim have to be there, of a region those that it touches
    JPEG 2000    alpha only where the file says so; sYCC becomes RGB; components of differing sizes and palettes are refused
    JPEG         damage that the decoder notices is an error, inside TIFF too
    reduction    a JPEG is decoded at 1/2, 1/4 or 1/8 (DCT scaling) and a pyramid read at a lower level where that loses nothing that
                 `draft_px` could show (regions.choose_level)

Files are judged by their first bytes, not by their extension. A returned array has the size that the header says, checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import cv2
import numpy as np

from hiresvis.data import heif, jpeg2000, photos
from hiresvis.data.header import Header, open_image_file, refuse, refuse_too_large
from hiresvis.data.regions import Region, Size, choose_level, whole
from hiresvis.data.tiff import MAGIC as TIFF_MAGIC
from hiresvis.data.tiff import Tiff

WHITE = (255, 255, 255)


def probe(path: Path, max_pixels: int) -> Header:
    """Reads the header alone.

    Raises:
        DataError: no such file, no image, or more than `max_pixels` (but of TIFF, of which a part may be read: see
            `OpenedImage.check_size`); names the path and the reason.
    """
    with open_image(path, max_pixels=max_pixels) as image:
        return image.header


def decode(
    path: Path,
    *,
    max_pixels: int,
    background: tuple[int, int, int] = WHITE,
    draft_px: Size | None = None,
    region: Region | None = None,
) -> np.ndarray:
    """The whole image, or a region of it.

    Args:
        path: the file; its first bytes say what it is, not its extension.
        max_pixels: the most that is decoded; more is an error.
        background: RGB of 0 to 255, under transparent pixels.
        draft_px: (height, width), as shown, that it will be reduced to; it may then come smaller, never below this size.
        region: pixels of the image as shown.

    Returns:
        (height, width, channels), uint8, uint16 or float32, contiguous.

    Raises:
        DataError: with the path and the reason.
    """
    with open_image(path, max_pixels=max_pixels, background=background, region=region) as image:
        return image.read(draft_px)


@contextmanager
def open_image(
    path: Path, *, max_pixels: int, background: tuple[int, int, int] = WHITE, region: Region | None = None
) -> Iterator[OpenedImage]:
    """The image with its header read.

    Raises:
        DataError: no such file, no image, too large, or the region is not in it.
    """
    with open_image_file(path) as file:
        yield OpenedImage(file, path, max_pixels, background, region)


class OpenedImage:
    """An open file, or a region of it, of which the whole or windows are read.

    A tiled TIFF is read window by window. Anything else is decoded once, when the first window is asked for, and kept.

    Attributes:
        header: of the file.
        size: (height, width) as shown, of the region where there is one.
        tiled: windows are read by themselves.
    """

    def __init__(self, file: BinaryIO, path: Path, max_pixels: int, background: tuple[int, int, int], region: Region | None) -> None:
        self._file, self._path, self._max_pixels, self._background = file, path, max_pixels, background
        start = file.read(64)
        file.seek(0)
        self._tiff = Tiff(file, path) if start[:4] in TIFF_MAGIC else None
        self.header = self._tiff.header if self._tiff is not None else _read_header(file, path, start)
        height, width = shown = self.header.shown_size
        if width <= 0 or height <= 0:
            refuse(path, f"claims a size of {self.header.width} x {self.header.height} px")
        if self._tiff is None:
            refuse_too_large(path, self.header.width, self.header.height, max_pixels)
        if region is not None and not region.fits(shown):
            refuse(
                path,
                f"has {width} x {height} px, and the region x {region.x}, y {region.y}, {region.width} x {region.height} px "
                "is not inside of that",
            )
        self._part = whole(shown) if region is None else region
        self.size = self._part.size
        self.tiled = self._tiff is not None and self._tiff.tiled
        self._kept: np.ndarray | None = None

    def check_size(self, draft_px: Size | None = None, window: Size | None = None) -> None:
        """Whether what `read` (or `read_window`, of windows of this size) takes is within `max_pixels`; decodes nothing.

        Raises:
            DataError: it is not.
        """
        if self._tiff is None:
            return
        part, levels = self._part.as_stored(self.header.shown_size, self.header.orientation), self._tiff.levels
        level, place = choose_level(levels, part, _as_stored(draft_px, self.header))
        if window is not None and self.tiled:
            height, width = (min(sides) for sides in zip(self.size, window, strict=True))
            place = Region(part.x, part.y, *((height, width) if self.header.orientation >= 5 else (width, height)))
        self._tiff.check_size(level, place, self._max_pixels)

    def read(self, draft_px: Size | None = None, *, lent: bool = False) -> np.ndarray:
        """The whole, or the region; see `decode`, and for `lent` `photos.decode_pixels`."""
        return self._decode(self._part, draft_px, lent)

    def read_window(self, window: Region) -> np.ndarray:
        """A window at full resolution; its place counts from the corner of the region."""
        if self.tiled:
            return self._decode(window.within(self._part), None)
        if self._kept is None:
            self._kept = self._decode(self._part, None)
        return np.ascontiguousarray(self._kept[window.slices])

    def is_reduced(self, draft_px: Size | None) -> bool:
        """Whether `read` takes a smaller copy than the file's own pixels."""
        stored, levels = self._part.as_stored(self.header.shown_size, self.header.orientation), self._levels()
        return choose_level(levels, stored, _as_stored(draft_px, self.header))[0] > 0

    def _levels(self) -> Sequence[Size]:
        return photos.draft_sizes(self.header) if self._tiff is None else self._tiff.levels

    def _decode(self, part: Region, draft_px: Size | None, lent: bool = False) -> np.ndarray:
        header = self.header
        stored = part.as_stored(header.shown_size, header.orientation)
        levels = self._levels()
        number, place = choose_level(levels, stored, _as_stored(draft_px, header))
        if self._tiff is not None:
            array, expected = self._tiff.read(number, place, self._background, self._max_pixels), place.size
        else:
            array, expected = self._decode_whole(header.height // levels[number][0], lent), levels[number]
        if array.ndim != 3 or array.shape[:2] != expected:
            size = " x ".join(str(side) for side in array.shape[1::-1])
            refuse(self._path, f"decodes to {size} px where its header says {header.width} x {header.height}")
        return upright(array if self._tiff is not None else array[place.slices], header.orientation)

    def _decode_whole(self, factor: int, lent: bool) -> np.ndarray:
        self._file.seek(0)
        if self.header.format == "JPEG2000":
            return jpeg2000.decode_pixels(self._file, self._path, self._background)
        if self.header.format in ("HEIC", "AVIF"):
            return heif.decode_pixels(self._file, self._path, self.header, self._background)
        return photos.decode_pixels(self._file, self._path, self.header, factor, self._background, lent=lent)


def _read_header(file: BinaryIO, path: Path, start: bytes) -> Header:
    if start.startswith(jpeg2000.STARTS):
        return jpeg2000.read_header(file, path)
    kind = heif.kind_of(start)
    return photos.read_header(file, path, start) if kind is None else heif.read_header(file, path, kind)


def _as_stored(size: Size | None, header: Header) -> Size | None:
    return size[::-1] if size is not None and header.orientation >= 5 else size


def upright(array: np.ndarray, orientation: int) -> np.ndarray:
    """EXIF orientation undone."""
    if orientation == 1:
        return np.ascontiguousarray(array)
    if orientation in (6, 8) and array.shape[2] <= 4:  # opencv turns several times faster than numpy, and drops a single channel
        turned = cv2.rotate(np.ascontiguousarray(array), cv2.ROTATE_90_CLOCKWISE if orientation == 6 else cv2.ROTATE_90_COUNTERCLOCKWISE)
        return turned if turned.ndim == 3 else turned[..., None]
    if orientation >= 5:
        array = array.transpose(1, 0, 2)
    rows = -1 if orientation in (3, 4, 7, 8) else 1
    columns = -1 if orientation in (2, 3, 6, 7) else 1
    return np.ascontiguousarray(array[::rows, ::columns])
