"""HEIC and AVIF: pictures in ISO boxes. Both need the extra `heic`: pillow-heif, and a Pillow that reads AVIF.

HEIC by pillow-heif (libheif): it refuses cut files and turns the picture as the file says (irot, imir), so nothing is left to turn and
the EXIF orientation, which says it once more, is not used. AVIF by imagecodecs (libavif, strict), its header by Pillow, which tells the
file's own rotation as an EXIF orientation and turns nothing: it is applied here like any. 10 and 12 bit are stretched over uint16's
whole range. Damage inside the pixels' codes shows in neither: both codecs carry on, as WebP's does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import imagecodecs
import numpy as np
from PIL import features

from hiresvis.data.colours import blend, stretch
from hiresvis.data.header import Header, refuse
from hiresvis.data.photos import exif_orientation, pillow_open
from hiresvis.errors import first_line

try:
    import pillow_heif
except ImportError:  # the extra
    pillow_heif = None  # type: ignore[assignment]

_INSTALL = "pip install 'hiresvis[heic]'"
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")


def kind_of(start: bytes) -> str | None:
    """AVIF or HEIC by the first 64 bytes of a file; None: neither."""
    if start[4:8] != b"ftyp":
        return None
    brands = {start[place : place + 4] for place in (8, *range(16, min(len(start), int.from_bytes(start[:4], "big")), 4))}
    if brands & {b"avif", b"avis"}:
        return "AVIF"
    return "HEIC" if brands.intersection(_HEIC_BRANDS) else None


def read_header(file: BinaryIO, path: Path, kind: str) -> Header:
    """The header of an open file.

    Raises:
        DataError: the extra is missing, the file is damaged, or it holds several pictures.
    """
    return _avif_header(file, path) if kind == "AVIF" else _heic_header(_open_heic(file, path))


def decode_pixels(file: BinaryIO, path: Path, header: Header, background: tuple[int, int, int]) -> np.ndarray:
    """(height, width, channels); see the rules in decode.py.

    Raises:
        DataError: it is damaged.
    """
    premultiplied = False
    try:
        if header.format == "AVIF":
            array = imagecodecs.avif_decode(file.read(), numthreads=1)
        else:
            image = _open_heic(file, path)
            array, premultiplied = np.array(image), image.premultiplied_alpha
    except MemoryError:
        raise
    except Exception as error:  # whatever the libraries raise means the file
        refuse(path, f"is a damaged {header.format}: {first_line(error)}", error)
    if (array.dtype == np.uint8) != (header.bits == 8):
        refuse(path, f"holds {array.dtype} pixels where its header says {header.bits} bits")
    array = stretch(array[..., None] if array.ndim == 2 else array, header.bits)
    return blend(array[..., :-1], array[..., -1:], background, premultiplied) if array.shape[2] in (2, 4) else array


def _avif_header(file: BinaryIO, path: Path) -> Header:
    if not features.check("avif"):
        refuse(path, f"is AVIF, which this Pillow does not read; {_INSTALL}", ImportError("a Pillow with AVIF"))
    head = file.read(2**16)
    file.seek(0)
    try:
        with pillow_open(file, ("AVIF",)) as image:
            frames = getattr(image, "n_frames", 1)
            orientation = exif_orientation(image, file)
    except Exception as error:  # a damaged header can raise anything; whatever it is, the file is the reason
        refuse(path, f"has a damaged AVIF header: {first_line(error)}", error)
    if frames > 1:
        refuse(path, f"is an animation of {frames} pictures; save one as a still image")
    # the codec's configuration: a byte of version, one of level, then tier, high bit depth, twelve bit
    place = head.find(b"av1C")
    flags = head[place + 6] if 0 <= place < len(head) - 6 else 0
    bits = (12 if flags & 0x20 else 10) if flags & 0x40 else 8
    return Header(image.width, image.height, image.mode, bits, orientation, "AVIF", 1 if image.mode in ("L", "LA") else 3)


def _open_heic(file: BinaryIO, path: Path) -> Any:
    if pillow_heif is None:
        refuse(path, f"is HEIC, which needs an extra package: {_INSTALL}", ImportError("pillow_heif"))
    file.seek(0)
    try:
        images = pillow_heif.open_heif(file, convert_hdr_to_8bit=False, hdr_to_16bit=False)
        count = len(images)
    except MemoryError:
        raise
    except Exception as error:  # libheif's errors come as ValueError, EOFError, SyntaxError, RuntimeError and OSError
        refuse(path, f"is a damaged HEIC: {first_line(error)}", error)
    if count != 1:
        refuse(path, f"is a collection of {count} pictures; save one as a file of its own")
    return images[0]


def _heic_header(image: Any) -> Header:
    width, height = image.size
    return Header(width, height, image.mode, image.info["bit_depth"], 1, "HEIC", 1 if image.mode[0] == "L" else 3)
