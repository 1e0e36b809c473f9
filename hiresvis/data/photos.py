"""JPEG, PNG, WebP and BMP: their headers by Pillow, their pixels by strict decoders.

JPEG by simplejpeg (libjpeg-turbo, strict; Pillow, as strict on cut files, stands in where it is missing), PNG and WebP by imagecodecs
(strict, and silent on stderr, which opencv is not).
"""

from __future__ import annotations

import io
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import imagecodecs
import numpy as np
from PIL import Image, UnidentifiedImageError

from hiresvis.data.colours import blend, cmyk_to_rgb, through_palette
from hiresvis.data.header import ORIENTATION_TAG, Header, refuse
from hiresvis.errors import DataError, first_line
from hiresvis.units import MIB

try:
    import simplejpeg
except ImportError:  # no wheel for this platform
    simplejpeg = None

_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")  # a phone's MPO opens as JPEG and says MPO afterwards
_KNOWN = "JPEG, PNG, WebP, TIFF, BMP, JPEG 2000, HEIC or AVIF"
_LENT_BYTES = 64 * MIB  # of a thread; fresh memory for each image costs 7 of 94 ms at 12 megapixels (its pages are zeroed every time)
_pillow_lock = threading.Lock()


def read_header(file: BinaryIO, path: Path, start: bytes) -> Header:
    """The header of an open file, whose first 64 bytes are `start`.

    Raises:
        DataError: it is none of these formats, damaged, or an animation.
    """
    try:
        with pillow_open(file) as image:
            frames = 1 if image.format in ("JPEG", "MPO") else getattr(image, "n_frames", 1)
            orientation = exif_orientation(image, file)
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
def pillow_open(file: BinaryIO, formats: tuple[str, ...] = _FORMATS) -> Iterator[Image.Image]:
    """Pillow's image with its header read, its own pixel limit and its warnings off inside the block.

    The lock is there because both belong to the whole process, and `check` reads in threads.
    """
    with _pillow_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            yield Image.open(file, formats=formats)
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def exif_orientation(image: Image.Image, file: BinaryIO) -> int:
    """EXIF orientation without loading pixels (Pillow's getexif decodes a whole PNG to look behind its pixels)."""
    raw = image.info.get("exif")
    if raw is None and image.format == "PNG":
        raw = _png_exif(file)
    if not isinstance(raw, bytes):
        return 1
    exif = Image.Exif()
    try:
        exif.load(raw)
        value = exif.get(ORIENTATION_TAG, 1)
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


def decode_pixels(
    file: BinaryIO, path: Path, header: Header, factor: int, background: tuple[int, int, int], *, lent: bool = False
) -> np.ndarray:
    """(height, width, channels) of the image, or of a JPEG at 1 / factor of its size.

    Args:
        lent: the array may lie in memory that this thread's next lent image is decoded into, and has to be done with by then.

    Raises:
        DataError: it is damaged.
    """
    if header.format == "JPEG":
        array = _decode_jpeg(file, path, header, factor, lent)
    elif header.format == "BMP":
        array = _decode_pillow(file, path)
    else:
        array = _decode_codec(file, path, header)
    if array.shape[2] in (2, 4):  # what these codecs give with an alpha channel
        array = blend(array[..., :-1], array[..., -1:], background, premultiplied=False)
    return array


def draft_sizes(header: Header) -> list[tuple[int, int]]:
    """(height, width) of the copies that the decoder can make as cheaply, the image itself first: a JPEG's DCT scaling.

    Only factors that divide both axes: a last row that stands for half a row would stretch the image. Finer steps exist in the library
    and are slower than a full decode.
    """
    factors = [factor for factor in (1, 2, 4, 8) if header.height % factor == header.width % factor == 0]
    return [(header.height // factor, header.width // factor) for factor in (factors if header.format == "JPEG" else [1])]


class _Lender(threading.local):
    """Memory that one thread decodes into again and again."""

    memory = np.empty(0, np.uint8)

    def lend(self, num_bytes: int) -> np.ndarray | None:
        """(num_bytes,) uint8; None where that is too much to be held on to."""
        if num_bytes > _LENT_BYTES:
            return None
        if len(self.memory) < num_bytes:
            self.memory = np.empty(num_bytes, np.uint8)
        return self.memory[:num_bytes]


_lender = _Lender()


def _decode_jpeg(file: BinaryIO, path: Path, header: Header, factor: int, lent: bool) -> np.ndarray:
    if simplejpeg is None:
        return _decode_pillow(file, path, (header.width // factor, header.height // factor) if factor > 1 else None)
    colours = "GRAY" if header.mode == "L" else header.mode  # RGB or CMYK
    height, width = header.height // factor, header.width // factor
    smallest = {"min_height": height, "min_width": width, "min_factor": factor} if factor > 1 else {}
    memory = _lender.lend(height * width * {"GRAY": 1, "RGB": 3, "CMYK": 4}[colours]) if lent else None
    try:
        array = simplejpeg.decode_jpeg(file.read(), colours, **smallest, strict=True, buffer=memory)
    except ValueError as error:
        refuse(path, f"is a damaged JPEG: {first_line(error)}", error)
    return cmyk_to_rgb(255 - array) if colours == "CMYK" else array  # ink is stored inverted, as Adobe began it


def jpeg_damage(data: bytes, colours: str) -> str | None:
    """What a strict decode at an eighth of the size says against a JPEG; None: nothing, or there is no strict decoder."""
    if simplejpeg is None:
        return None
    try:
        simplejpeg.decode_jpeg(data, colours, min_factor=8, strict=True)
    except ValueError as error:
        return first_line(error)
    return None


def _decode_codec(file: BinaryIO, path: Path, header: Header) -> np.ndarray:
    """PNG and WebP; palettes come expanded, transparency of any kind as an alpha channel."""
    codec = imagecodecs.png_decode if header.format == "PNG" else imagecodecs.webp_decode
    try:
        array = codec(file.read())
    except MemoryError:
        raise
    except Exception as error:  # the codecs' own errors and ValueError; all mean the file
        refuse(path, f"is a damaged {header.format}: {first_line(error)}", error)
    return array[..., None] if array.ndim == 2 else array


def _decode_pillow(file: BinaryIO, path: Path, draft: tuple[int, int] | None = None) -> np.ndarray:
    """BMP, and JPEG without simplejpeg. Sizes were checked already, and neither kind checks again inside `load`."""
    try:
        with pillow_open(file) as image:
            pass
        if draft is not None:
            image.draft(image.mode, draft)
        image.load()
        if image.mode == "P" and image.palette is not None:
            table = np.frombuffer(image.palette.tobytes(), np.uint8).reshape(-1, len(image.palette.mode))
            return through_palette(np.array(image), table, path)
        if image.mode not in ("L", "LA", "RGB", "RGBA"):
            image = image.convert("L" if image.mode == "1" else "RGB")
        array = np.array(image)
    except (DataError, MemoryError):
        raise
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and more on damaged files
        refuse(path, f"is damaged: {first_line(error)}", error)
    return array[..., None] if array.ndim == 2 else array


def _describe_start(start: bytes) -> str:
    if start.startswith(b"GIF8"):
        return "it is GIF; convert it"
    if start[4:8] == b"ftyp":
        return "it is a film; save one of its pictures"
    text = start.decode("utf-8", errors="replace")
    if all(char.isprintable() or char.isspace() for char in text):
        return f"it holds text, {text.strip()[:30]!r}"
    return f"unknown or damaged, it starts with {start[:8].hex(' ')}"
