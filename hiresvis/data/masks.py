"""Masks: a class number for every pixel of an image, in a file of the image's own size.

A mask is a PNG or TIFF of one channel, of up to 8 or 16 bits, or a PNG with a palette, whose colours do not count: the stored value is
what says the class. Nothing is stretched (1 bit is 0 and 1 here, where an image of it would be 0 and 255). Colours, transparency, floats
and lossy formats are refused. Values become class numbers of one byte, 0 to 254 in the order of the classes; 255 stands for no class:
the ignored value, and the padding around an image.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import imagecodecs
import numpy as np

from hiresvis.data.decode import open_image, upright
from hiresvis.data.header import Header, refuse
from hiresvis.data.photos import pillow_open
from hiresvis.data.regions import Region, Size
from hiresvis.errors import DataError, Problem, first_line

IGNORED = 255  # the class number of what is no class
_SHOWN = 8  # values in a message
_FORMATS = "save it as PNG of one channel (8 or 16 bits) or with a palette, each pixel's value its class"


def _colours() -> np.ndarray:
    """(256, 3) uint8: neighbours apart, the first black."""
    others = [
        colorsys.hsv_to_rgb(number * 0.618034 % 1, 0.65 + 0.35 * (number // 8 % 2), 1 - 0.3 * (number // 4 % 2)) for number in range(1, 256)
    ]
    return np.rint(np.array([(0.0, 0.0, 0.0), *others]) * 255).astype(np.uint8)


PALETTE = _colours()  # of class numbers and values, for people


@dataclass(frozen=True, slots=True)
class Masks:
    """What the values of mask files mean.

    Attributes:
        values: of the classes, in their order.
        ignore: the value of pixels that count nowhere; None: there is none.
    """

    values: tuple[int, ...]
    ignore: int | None

    def read(self, path: Path, *, max_pixels: int, window: Region | None = None) -> np.ndarray:
        """(height, width) uint8 class numbers of a mask as shown, or of a window of it.

        Raises:
            DataError: it cannot be read, or holds a value that is no class; with the path and the reason.
        """
        array = read_values(path, max_pixels=max_pixels, window=window)
        numbers = self._table()[array]
        unknown = (numbers == IGNORED) if self.ignore is None else (numbers == IGNORED) & (array != self.ignore)
        if unknown.any():
            refuse(path, self.strange(np.unique(array[unknown]).tolist()))
        return numbers

    def strange(self, values: Sequence[int]) -> str:
        """What is wrong with a mask that holds these values."""
        known = ", ".join(map(str, self.values[:_SHOWN])) + (", ..." if len(self.values) > _SHOWN else "")
        several = "values" if len(values) > 1 else "value"
        ignored = "" if self.ignore is None else f", and {self.ignore} is ignored"
        found = ", ".join(map(str, values[:_SHOWN])) + (f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else "")
        return f"holds the {several} {found}, and the classes are {known}{ignored}; add them to data.classes, or mend the mask"

    def _table(self) -> np.ndarray:
        return _table(self.values)


@lru_cache(maxsize=8)
def _table(values: tuple[int, ...]) -> np.ndarray:
    table = np.full(2**16, IGNORED, np.uint8)
    table[list(values)] = np.arange(len(values), dtype=np.uint8)
    return table


def values_of(classes: Sequence[str], ignore: int | None) -> tuple[int, ...]:
    """The pixel values of named classes: where all names are whole numbers these, else 0, 1, 2 and so on without the ignored one.

    >>> values_of(("board", "defect"), 255), values_of(("0", "255"), None), values_of(("wall", "door"), 0)
    ((0, 1), (0, 255), (1, 2))
    """
    if all(name.isdecimal() and int(name) < 2**16 for name in classes):
        return tuple(map(int, classes))
    return tuple(value for value in range(len(classes) + 1) if value != ignore)[: len(classes)]


def read_values(path: Path, *, max_pixels: int, window: Region | None = None) -> np.ndarray:
    """(height, width), uint8 or uint16: the values as they are stored, turned as the file says. Of a tiled TIFF a window alone is read.

    Raises:
        DataError: it is no mask, is damaged, or is larger than allowed.
    """
    with open_image(path, max_pixels=max_pixels) as image:
        header = image.header
        _refuse_pictures(path, header)
        if header.format == "TIFF":
            array = image.read() if window is None else image.read_window(window)
            if array.dtype not in (np.uint8, np.uint16):
                refuse(path, f"holds {array.dtype} values, and a mask holds whole numbers of 8 or 16 bits; {_FORMATS}")
            return array[..., 0] // 255 if header.bits == 1 else array[..., 0]
    array = upright(_stored_png(path, header)[..., None], header.orientation)[..., 0]
    return array if window is None else np.ascontiguousarray(array[window.slices])


def mask_size(path: Path, *, max_pixels: int) -> Size:
    """(height, width) as shown, by the header alone.

    Raises:
        DataError: it is no mask.
    """
    with open_image(path, max_pixels=max_pixels) as image:
        _refuse_pictures(path, image.header)
        return image.size


def size_problem(mask: Size, image: Size) -> str | None:
    """What is wrong with a mask of another size than its image's."""
    if mask == image:
        return None
    return (
        f"is {mask[1]} x {mask[0]} px where the image is shown with {image[1]} x {image[0]} px (width x height); "
        "a mask has its image's size after the EXIF rotation"
    )


def of_the_mask(error: DataError, image: Path) -> DataError:
    """The refusal of a mask as one of its image, which is what a row is."""
    return DataError([Problem(f"has a mask, {problem.place}, that {problem.message}", str(image)) for problem in error.problems])


def _refuse_pictures(path: Path, header: Header) -> None:
    if header.format not in ("PNG", "TIFF"):
        lossy = ", which changes values" if header.format == "JPEG" else ""
        refuse(path, f"is a {header.format} file{lossy}; {_FORMATS}")
    palette = header.mode == "P" and header.format == "PNG"
    if header.channels != 1 and not palette:
        refuse(path, f"holds colours ({header.mode}), and a mask holds one class number a pixel; {_FORMATS}")
    if header.format == "PNG" and header.mode in ("LA", "RGBA", "PA"):
        refuse(path, f"holds transparency ({header.mode}), and a mask holds one class number a pixel; {_FORMATS}")
    if header.format == "TIFF" and not header.mode.startswith("minisblack"):
        refuse(path, f"is a TIFF of kind {header.mode}, and a mask's values count from 0 as black; {_FORMATS}")


def _stored_png(path: Path, header: Header) -> np.ndarray:
    data = path.read_bytes()
    try:
        array = imagecodecs.png_decode(data)  # strict, unlike Pillow
        if header.mode == "P":  # expanded to colours here; Pillow keeps the numbers
            with path.open("rb") as file, pillow_open(file) as image:
                image.load()
            return np.asarray(image)
    except MemoryError:
        raise
    except Exception as error:  # the codecs' own errors, OSError, ValueError; all mean the file
        refuse(path, f"is a damaged PNG: {first_line(error)}", error)
    if array.ndim == 3:  # a colour key, which a mask has no use for
        array = array[..., 0]
    return array // np.uint8(255 // (2**header.bits - 1)) if header.bits < 8 else array
