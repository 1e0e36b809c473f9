"""What a file says about itself, read without decoding a pixel: kind, size, mode, bits, orientation.

A file is refused here, before memory is taken for it, when it is no image, claims more pixels than allowed (more than four channels
count in proportion), or holds more than one picture. Files are judged by their first bytes, not by their extension. Pillow reads the
headers (its own pixel limit is switched off in favour of `max_pixels`), tifffile those of TIFF.
"""

from __future__ import annotations

import io
import logging
import os
import stat
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

import tifffile
from PIL import Image, UnidentifiedImageError

from hiresvis.errors import DataError, Problem

_PILLOW_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")  # a phone's MPO opens as JPEG and says MPO afterwards
_TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_KNOWN = "JPEG, PNG, WebP, TIFF or BMP"
_ORIENTATION = 274
_CHANNELS_PER_PIXEL = 4  # up to these, max_pixels counts pixels alone; a file with more takes memory in proportion, and counts so

# these report oddities of files through logging; without a handler Python would print them over the live view
for _library in ("tifffile", "imagecodecs"):
    logging.getLogger(_library).addHandler(logging.NullHandler())
_pillow_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Header:
    """One image's header.

    Attributes:
        width, height: pixels as stored; see `shown_size` for after the EXIF rotation.
        mode: Pillow's name of the mode, or tifffile's photometric name with the sample type (`minisblack uint16`).
        bits: per sample.
        orientation: EXIF, 1 to 8; 1 is upright.
        format: JPEG | PNG | WEBP | TIFF | BMP.
        channels: after decoding: palettes and CMYK give 3, alpha is laid on the background and gone.
    """

    width: int
    height: int
    mode: str
    bits: int
    orientation: int
    format: str
    channels: int

    @property
    def shown_size(self) -> tuple[int, int]:
        """(height, width) after the EXIF rotation."""
        return (self.width, self.height) if self.orientation >= 5 else (self.height, self.width)


def probe(path: Path, max_pixels: int) -> Header:
    """Reads the header alone.

    Raises:
        DataError: no such file, no image, or more than `max_pixels`; names the path and the reason.
    """
    with open_image_file(path) as file:
        return read_header(file, path, max_pixels)


def refuse(path: Path, reason: str, cause: BaseException | None = None) -> NoReturn:
    """Raises the DataError of one file."""
    raise DataError([Problem(reason, str(path))]) from cause


@contextmanager
def open_image_file(path: Path) -> Iterator[BinaryIO]:
    """The open file.

    Raises:
        DataError: it is missing, a broken link, a folder, a device, empty, or not readable.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        if os.path.islink(path):
            refuse(path, f"is a broken link to {os.readlink(path)}", error)
        refuse(path, "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}", error)
    if stat.S_ISDIR(status.st_mode):
        refuse(path, "is a folder, not an image")
    if not stat.S_ISREG(status.st_mode):
        refuse(path, "is not a regular file")
    if status.st_size == 0:
        refuse(path, "is empty (0 bytes)")
    try:
        file = path.open("rb")
    except OSError as error:
        refuse(path, f"cannot be read: {error.strerror}", error)
    with file:
        yield file


def read_header(file: BinaryIO, path: Path, max_pixels: int) -> Header:
    """The header of an open file; see `probe`. Leaves the position anywhere."""
    start = file.read(64)
    file.seek(0)
    header = _tiff_header(file, path, max_pixels) if start[:4] in _TIFF_MAGIC else _pillow_header(file, path, start)
    if header.width <= 0 or header.height <= 0:
        refuse(path, f"claims a size of {header.width} x {header.height} px")
    if header.width * header.height > max_pixels:
        claimed = header.width * header.height
        refuse(
            path,
            f"is {header.width} x {header.height} px = {_millions(claimed)}, above data.max_pixels {_millions(max_pixels)}; "
            "raise data.max_pixels, or shrink or cut the image",
        )
    return header


def _millions(pixels: int) -> str:
    return f"{pixels / 1e6:.0f}M" if pixels >= 10_000_000 else f"{pixels}"


def _pillow_header(file: BinaryIO, path: Path, start: bytes) -> Header:
    try:
        with pillow_open(file) as image:
            frames = 1 if image.format in ("JPEG", "MPO") else getattr(image, "n_frames", 1)
            orientation = _exif_orientation(image, file)
    except UnidentifiedImageError as error:
        refuse(path, f"is not a {_KNOWN} image: {_describe_start(start)}", error)
    except Exception as error:  # a damaged header can raise anything; whatever it is, the file is the reason
        refuse(path, f"has a damaged header: {first_line(error)}", error)
    if frames > 1:
        refuse(path, f"is an animation of {frames} pictures; save one as a still image")
    assert image.format is not None
    kind = "JPEG" if image.format == "MPO" else image.format
    bits = start[24] if kind == "PNG" else 1 if image.mode == "1" else 8
    # Pillow's mode hides what 16-bit PNG holds, so its own two bytes count
    channels = (3 if start[25] & 2 else 1) if kind == "PNG" else 1 if image.mode in ("1", "L", "LA") else 3
    return Header(image.width, image.height, image.mode, bits, orientation, kind, channels)


@contextmanager
def pillow_open(file: BinaryIO) -> Iterator[Image.Image]:
    """Pillow's image with its header read, its own pixel limit and its warnings off inside the block.

    The lock is there because both belong to the whole process, and `check` reads in threads.
    """
    with _pillow_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            yield Image.open(file, formats=_PILLOW_FORMATS)
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _exif_orientation(image: Image.Image, file: BinaryIO) -> int:
    """EXIF orientation without loading pixels (Pillow's getexif decodes a whole PNG to look behind its pixels)."""
    raw = image.info.get("exif")
    if raw is None and image.format == "PNG":
        raw = _png_exif(file)
    if not isinstance(raw, bytes):
        return 1
    exif = Image.Exif()
    try:
        exif.load(raw)
        value = exif.get(_ORIENTATION, 1)
    except Exception:  # EXIF is a side matter: a damaged block means no rotation, as in every viewer
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _png_exif(file: BinaryIO) -> bytes | None:
    """The eXIf chunk wherever it stands; skips over the pixels."""
    file.seek(8)
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind == b"eXIf":
            return file.read(length)
        if kind == b"IEND":
            return None
        file.seek(length + 4, io.SEEK_CUR)
    return None


def _tiff_header(file: BinaryIO, path: Path, max_pixels: int) -> Header:
    with reading_tiff(file, path) as tiff:
        series = tiff.series[0]
        sizes = dict(zip(series.axes, series.shape, strict=True))
        page = series.keyframe
        photometric = getattr(page.photometric, "name", str(page.photometric)).lower()
        mode = f"{photometric} {series.dtype}"
        tag = page.tags.get(_ORIENTATION)
        orientation = int(tag.value) if tag is not None and tag.value in range(1, 9) else 1
        stack = {axis: size for axis, size in sizes.items() if axis not in "YXSC" and size > 1}
        if stack or "Y" not in sizes or "X" not in sizes or (sizes.get("S", 1) > 1 and sizes.get("C", 1) > 1):
            refuse(path, f"is a stack of pictures (axes {series.axes}, shape {series.shape}); save one as a file of its own")
        samples = sizes.get("S", 1) * sizes.get("C", 1)
        counted = sizes["X"] * sizes["Y"] * samples // _CHANNELS_PER_PIXEL
        if samples > _CHANNELS_PER_PIXEL and counted > max_pixels:
            refuse(
                path,
                f"is {sizes['X']} x {sizes['Y']} px with {samples} channels, which count as {_millions(counted)} px of "
                f"{_CHANNELS_PER_PIXEL} channels, above data.max_pixels {_millions(max_pixels)}; "
                "raise data.max_pixels, or leave channels out",
            )
        channels = 3 if photometric in ("palette", "separated") else samples - num_alpha(page)
        return Header(sizes["X"], sizes["Y"], mode, int(page.bitspersample), orientation, "TIFF", channels)


def num_alpha(page: tifffile.TiffPage) -> int:
    """1 where the last sample is alpha (associated 1, unassociated 2); other extra samples are channels like any."""
    return 1 if page.extrasamples and int(page.extrasamples[-1]) in (1, 2) else 0


@contextmanager
def reading_tiff(file: BinaryIO, path: Path) -> Iterator[tifffile.TiffFile]:
    """The open TIFF; whatever goes wrong inside the block is the file's fault and leaves as DataError."""
    try:
        with tifffile.TiffFile(file) as tiff:
            if not len(tiff.pages):
                refuse(path, "is a TIFF without a picture")
            yield tiff
    except (DataError, MemoryError):
        raise
    except Exception as error:  # tifffile and the codecs raise anything on damaged files
        refuse(path, f"is damaged or of an unread kind: {first_line(error)}", error)


def _describe_start(start: bytes) -> str:
    if start.startswith((b"GIF8", b"\0\0\0\x0cjP", b"\xff\x4f\xff\x51")):
        return "it is GIF or JPEG 2000; convert it"
    if start[4:8] == b"ftyp":
        return "it is HEIC, AVIF or a film; convert it"
    text = start.decode("utf-8", errors="replace")
    if all(char.isprintable() or char.isspace() for char in text):
        return f"it holds text, {text.strip()[:30]!r}"
    return f"unknown or damaged, it starts with {start[:8].hex(' ')}"


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
