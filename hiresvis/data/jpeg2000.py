"""JPEG 2000, as a bare code stream (.j2k) or in boxes (.jp2), by imagecodecs (OpenJPEG): cut files are errors there as in Pillow.

The code stream's own header is read here, because Pillow hides how many bits a sample has and reads no more than four components. A
component is alpha only where a channel definition says so; other ones beyond the colours stay channels, as bands in TIFF do.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import imagecodecs
import numpy as np

from hiresvis.data.colours import blend, cmyk_to_rgb, plain_numbers, stretch
from hiresvis.data.header import Header, refuse
from hiresvis.errors import first_line

_STREAM = b"\xff\x4f\xff\x51"
STARTS = (b"\0\0\0\x0cjP  \r\n\x87\n", _STREAM)
_CMYK = 12  # of the colour box's enumerated spaces; sYCC becomes RGB in the codec
_MOST_COMPONENTS, _MOST_TILES = 16384, 65535  # of the standard
_TILE_PART, _END = 0xFF90, 0xFFD9  # markers


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the boxes and the code stream's size marker say. `alpha` is the number of the alpha component; None: none."""

    width: int
    height: int
    components: int
    bits: int
    colours: int
    alpha: int | None


def read_header(file: BinaryIO, path: Path) -> Header:
    """The header of an open file.

    Raises:
        DataError: it is damaged, or of a kind that is not read.
    """
    facts = _facts(file, path)
    gone = facts.alpha is not None
    channels = 3 if facts.colours == _CMYK else facts.components - gone
    mode = f"{facts.components} x {facts.bits} bit"
    return Header(facts.width, facts.height, mode, facts.bits, 1, "JPEG2000", channels)


def decode_pixels(file: BinaryIO, path: Path, background: tuple[int, int, int]) -> np.ndarray:
    """(height, width, channels); see the rules in decode.py.

    Raises:
        DataError: it is damaged.
    """
    facts = _facts(file, path)
    file.seek(0)
    try:
        array = imagecodecs.jpeg2k_decode(file.read(), numthreads=1)
    except MemoryError:
        raise
    except Exception as error:  # the codec's own error and ValueError; all mean the file
        refuse(path, f"is a damaged JPEG 2000: {first_line(error)}", error)
    array = array[..., None] if array.ndim == 2 else array
    if array.shape[2] != facts.components:
        refuse(path, f"holds {array.shape[2]} components where its header says {facts.components}")
    array = stretch(array, facts.bits) if array.dtype.kind == "u" and facts.bits <= 16 else plain_numbers(array, path)
    if facts.colours == _CMYK:
        return cmyk_to_rgb(array)
    if facts.alpha is not None:
        array = blend(array[..., :-1], array[..., -1:], background, premultiplied=False)
    return array


def _facts(file: BinaryIO, path: Path) -> _Facts:
    try:
        return _read_facts(file, path)
    except struct.error as error:
        refuse(path, "has a damaged header: the file ends inside it", error)


def _read_facts(file: BinaryIO, path: Path) -> _Facts:
    colours, alpha, first = 0, None, file.read(4)
    file.seek(0)
    if first != _STREAM:
        for kind, length in _boxes(file, path):
            start = file.tell()
            if kind == b"colr":
                method, _, _, space = struct.unpack(">BBBI", file.read(7))
                colours = space if method == 1 else colours
            elif kind == b"cdef":
                (count,) = struct.unpack(">H", file.read(2))
                for _ in range(count):
                    number, what, _ = struct.unpack(">HHH", file.read(6))
                    alpha = number if what in (1, 2) else alpha
            elif kind == b"pclr":
                refuse(path, "is a JPEG 2000 with a palette, which is not read; save it in its colours")
            file.seek(start + length)
    magic, _, _, *sizes = struct.unpack(">4sHH8I", file.read(40))
    if magic != _STREAM:
        refuse(path, "is a damaged JPEG 2000: no code stream where its boxes end")
    (components,) = struct.unpack(">H", file.read(2))
    if not 1 <= components <= _MOST_COMPONENTS:
        refuse(path, f"is a damaged JPEG 2000: it claims {components} components")
    parts = struct.unpack(f">{3 * components}B", file.read(3 * components))
    if len(set(parts[0::3])) > 1 or set(parts[1::3]) | set(parts[2::3]) != {1}:
        refuse(path, "is a JPEG 2000 whose components differ in size or bits, which is not read; save them alike")
    if alpha is not None and alpha != components - 1:
        refuse(path, f"is a JPEG 2000 whose alpha is component {alpha} of {components}; save it as the last")
    if colours == _CMYK and components != 4:
        refuse(path, f"is a damaged JPEG 2000: it claims CMYK with {components} components")
    width, height = sizes[0] - sizes[2], sizes[1] - sizes[3]
    _check_tiles(file, path, sizes)
    return _Facts(width, height, components, (parts[0] & 0x7F) + 1, colours, alpha)


def _boxes(file: BinaryIO, path: Path) -> Iterator[tuple[bytes, int]]:
    """(kind, length of what is in it) of each box up to the code stream, whose first byte is where the file then stands."""
    while True:
        length, kind = struct.unpack(">I4s", file.read(8))
        rest = length - 8
        if length == 1:
            rest = struct.unpack(">Q", file.read(8))[0] - 16
        if kind == b"jp2c":
            return
        if kind == b"jp2h":  # holds the boxes that matter
            continue
        if rest < 0:
            refuse(path, f"is a damaged JPEG 2000: a box of {length} bytes")
        yield kind, rest


def _check_tiles(file: BinaryIO, path: Path, sizes: Sequence[int]) -> None:
    """Every tile that the size marker claims has its part in the code stream; the codec makes black of one that has none.

    Args:
        file: behind the size marker's segment.
        sizes: of the image, its corner, a tile and the first tile's corner, x and y each.
    """
    width, height, _, _, tile_width, tile_height, left, top = sizes
    if min(tile_width, tile_height) < 1:
        refuse(path, f"is a damaged JPEG 2000: it claims tiles of {tile_width} x {tile_height} px")
    claimed = -(-(width - left) // tile_width) * -(-(height - top) // tile_height)
    seen = set[int]()
    while len(head := file.read(12)) >= 4:
        marker, length, tile, part_bytes = struct.unpack(">HHHI", head[:10].ljust(10, b"\0"))
        if marker == _TILE_PART:
            seen.add(tile)
        if marker == _END or (marker == _TILE_PART and part_bytes == 0):  # the last part may run to the end
            break
        step = part_bytes if marker == _TILE_PART else length + 2
        if step < 2:
            refuse(path, f"is a damaged JPEG 2000: a part of {step} bytes")
        file.seek(step - len(head), io.SEEK_CUR)
    missing = claimed - len(seen & set(range(claimed))) if claimed <= _MOST_TILES else claimed
    if missing:
        refuse(path, f"is a damaged JPEG 2000: it lacks {missing} of the {claimed} tiles that it claims")
