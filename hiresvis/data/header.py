"""What a file says about itself, read without decoding a pixel: kind, size, mode, bits, orientation; and how a file is refused.

The kinds' own readers (photos.py, tiff.py, jpeg2000.py, heif.py) make a `Header` each; decode.py picks the reader by the first bytes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from hiresvis.errors import DataError, Problem

ORIENTATION_TAG = 274


@dataclass(frozen=True, slots=True)
class Header:
    """One image's header.

    Attributes:
        width, height: pixels as stored; see `shown_size` for after the EXIF rotation.
        mode: Pillow's name of the mode, or tifffile's photometric name with the sample type (`minisblack uint16`).
        bits: per sample.
        orientation: EXIF, 1 to 8; 1 is upright. What a decoder turns by itself (HEIC) says 1.
        format: JPEG | PNG | WEBP | TIFF | BMP | JPEG2000 | AVIF | HEIC.
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


def refuse(path: Path, reason: str, cause: BaseException | None = None) -> NoReturn:
    """Raises the DataError of one file."""
    raise DataError([Problem(reason, str(path))]) from cause


def is_of_the_file(error: DataError) -> bool:
    """Whether a refusal says something of the file: not where a package is missing, or the system did not let it be read.

    Decoders raise OSError for damage too; what the system refuses has a number.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ImportError) or (isinstance(cause, OSError) and cause.errno is not None):
            return False
        cause = cause.__cause__
    return True


def refuse_too_large(path: Path, width: int, height: int, max_pixels: int, what: str = "is") -> None:
    """More pixels than allowed.

    Raises:
        DataError: so it is, with size, limit and setting.
    """
    if width * height > max_pixels:
        refuse(
            path,
            f"{what} {width} x {height} px = {millions(width * height)}, above data.max_pixels {millions(max_pixels)}; "
            "raise data.max_pixels, or shrink or cut the image",
        )


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


def millions(pixels: int) -> str:
    """A count of pixels as messages give it."""
    return f"{pixels / 1e6:.0f}M" if pixels >= 10_000_000 else f"{pixels}"
