"""One file to one array, strictly: a damaged file is an error, never half an image.

Rules (each a test):
    size         against `max_pixels` from the header, before memory is taken
    rotation     EXIF and TIFF orientation applied
    grey         1 channel; 1 bit becomes 0 and 255; 16 bit stays uint16; other number types become float32, values kept
    palette      RGB, of its colours; one that makes all numbers one colour is an error
    alpha        laid on `background` (palette and colour-key transparency too); the alpha channel is gone
    CMYK         red = (255 - C)(255 - K) / 255, and so on; no colour profile is applied to any image
    TIFF         first series, highest resolution; 4 or more samples without alpha stay channels; white-is-zero is inverted;
                 pixels that are not finite are an error; rows, tiles and types that the tags claim have to be there
    JPEG         damage that the decoder notices is an error, inside TIFF too; decoded at 1/2, 1/4 or 1/8 (DCT scaling) where that
                 loses nothing that `draft_px` could show

JPEG by simplejpeg (libjpeg-turbo, strict; Pillow, as strict on cut files, stands in where it is missing), PNG and WebP by imagecodecs
(strict, and silent on stderr, which opencv is not), TIFF by tifffile. A returned array has the header's size, checked.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import BinaryIO

import cv2
import imagecodecs
import numpy as np
import tifffile

from hiresvis.data.header import Header, first_line, num_alpha, open_image_file, pillow_open, probe, read_header, reading_tiff, refuse
from hiresvis.errors import DataError

try:
    import simplejpeg
except ImportError:  # no wheel for this platform
    simplejpeg = None

__all__ = ["Header", "decode", "probe"]

_STRIP_ROWS = 256
_FAX_COMPRESSIONS = frozenset({2, 3, 4})
_PLAIN_COMPRESSIONS = frozenset({1, 5, 8, 32773, 32946, 34925, 50000})  # none, LZW, zlib, packbits, LZMA, Zstandard: of any bytes


def decode(
    path: Path,
    *,
    max_pixels: int,
    background: tuple[int, int, int] = (255, 255, 255),
    draft_px: tuple[int, int] | None = None,
) -> np.ndarray:
    """The whole image.

    Args:
        path: the file; its first bytes say what it is, not its extension.
        max_pixels: the most that is decoded; more is an error.
        background: RGB of 0 to 255, under transparent pixels.
        draft_px: (height, width), as shown, that the image will be reduced to; a JPEG may then come smaller, never below this size.

    Returns:
        (height, width, channels), uint8, uint16 or float32, contiguous.

    Raises:
        DataError: with the path and the reason.
    """
    with open_image_file(path) as file:
        header = read_header(file, path, max_pixels)
        file.seek(0)
        factor = 1
        if header.format == "TIFF":
            array = _decode_tiff(file, path, background, max_pixels)
        elif header.format == "JPEG":
            factor = _draft_factor(header, draft_px)
            array = _decode_jpeg(file, path, header, factor)
        elif header.format == "BMP":
            array = _decode_pillow(file, path)
        else:
            array = _decode_codec(file, path, header)
    expected = (header.height // factor, header.width // factor)
    if array.ndim != 3 or array.shape[:2] != expected:
        refuse(
            path,
            f"decodes to {' x '.join(str(size) for size in array.shape[1::-1])} px where its header says {header.width} x {header.height}",
        )
    if header.format != "TIFF":
        array = _lay_on_background(array, background)
    return _upright(array, header.orientation)


def _draft_factor(header: Header, draft_px: tuple[int, int] | None) -> int:
    """1, 2, 4 or 8: how much smaller a JPEG may be decoded without the detail that is left suffering.

    DCT scaling averages blocks exactly, so a draft that is a whole multiple of the target loses nothing. One that is not is averaged twice
    on different grids: 10% of the contrast of details of two pixels is lost at 1.1 times the target, 5% at 1.5, 2% at 2.5, so it has
    to be three times the target. Only factors that divide both axes count: a last row that stands for half a row would stretch the image.
    Finer steps exist in the library and are slower than a full decode.
    """
    if draft_px is None:
        return 1
    height, width = header.shown_size

    def suffices(size: int, target: int) -> bool:
        return size >= 3 * target or (size >= target and size % target == 0)

    fits = (
        factor
        for factor in (8, 4, 2)
        if height % factor == width % factor == 0 and suffices(height // factor, draft_px[0]) and suffices(width // factor, draft_px[1])
    )
    return next(fits, 1)


def _decode_jpeg(file: BinaryIO, path: Path, header: Header, factor: int) -> np.ndarray:
    if simplejpeg is None:
        return _decode_pillow(file, path, (header.width // factor, header.height // factor) if factor > 1 else None)
    colours = "GRAY" if header.mode == "L" else header.mode  # RGB or CMYK
    smallest = {"min_height": header.height // factor, "min_width": header.width // factor, "min_factor": factor}
    try:
        array = simplejpeg.decode_jpeg(file.read(), colours, **(smallest if factor > 1 else {}), strict=True)
    except ValueError as error:
        refuse(path, f"is a damaged JPEG: {first_line(error)}", error)
    return _cmyk_to_rgb(255 - array) if colours == "CMYK" else array  # ink is stored inverted, as Adobe began it


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
            return _through_palette(np.array(image), table, path)
        if image.mode not in ("L", "LA", "RGB", "RGBA"):
            image = image.convert("L" if image.mode == "1" else "RGB")
        array = np.array(image)
    except (DataError, MemoryError):
        raise
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and more on damaged files
        refuse(path, f"is damaged: {first_line(error)}", error)
    return array[..., None] if array.ndim == 2 else array


def _decode_tiff(file: BinaryIO, path: Path, background: tuple[int, int, int], max_pixels: int) -> np.ndarray:
    with reading_tiff(file, path) as tiff:
        series = tiff.series[0]
        page = series.keyframe
        _check_extents(tiff, series, path, max_pixels)
        _check_numbers(page, path)
        _check_jpeg_parts(tiff, series, path)
        array = series.asarray(maxworkers=1)  # threads of our own make the parallelism
        array = _channels_last(array, series.axes)
        array = _plain_numbers(array, path)
        photometric = int(page.photometric)
        if photometric == 0:  # white is zero
            array = _largest(array.dtype) - array
        elif photometric == 3:
            colours = np.asarray(page.colormap)
            if colours.shape != (3, 1 << int(page.bitspersample)) or array.shape[2] != 1:
                refuse(path, f"has a palette of shape {colours.shape} for {array.shape[2]} samples of {page.bitspersample} bits a pixel")
            table = colours if colours.max() < 256 else colours >> 8
            array = _through_palette(array[..., 0], table.astype(np.uint8).T, path)
        elif photometric == 5:
            array = _cmyk_to_rgb(array)
        elif photometric == 8 or (photometric == 6 and int(page.compression) not in (6, 7)):
            refuse(path, f"has the colour space {tifffile.PHOTOMETRIC(photometric).name}, which is not read; save it as RGB")
        if photometric != 5 and num_alpha(page):
            premultiplied = int(page.extrasamples[-1]) == 1
            array = _blend(array[..., :-1], array[..., -1:], background, premultiplied)
        return array


def _through_palette(numbers: np.ndarray, table: np.ndarray, path: Path) -> np.ndarray:
    """(height, width, 3) colours. A palette that was overwritten would turn the image blank without an error anywhere."""
    array = np.ascontiguousarray(table[numbers])
    if (array == array[0, 0]).all() and (numbers != numbers[0, 0]).any():
        refuse(path, f"has a damaged palette: all of its {len(np.unique(numbers))} numbers have the colour {array[0, 0].tolist()}")
    return array


def _check_extents(tiff: tifffile.TiffFile, series: tifffile.TiffPageSeries, path: Path, max_pixels: int) -> None:
    """All pixels that the header claims have their place in the file: what has none would come back as zeros, or grey."""
    size = tiff.filehandle.size
    for page in series.pages:
        frame = None if page is None else page.keyframe
        if page is None or frame is None:
            refuse(path, "lacks one of its pages")
        parts, tile = math.prod(frame.chunked), math.prod(frame.chunks)
        offsets, counts = page.dataoffsets, page.databytecounts
        missing = max(0, parts - len(offsets), parts - len(counts)) + sum(
            1
            for offset, count in zip(offsets, counts, strict=False)
            if int(offset) < 1 or int(count) < 1  # tags of a wrong type give floats
        )
        if missing:
            refuse(path, f"lacks {missing} of its {max(parts, len(offsets))} tiles or strips")
        if frame.is_tiled and tile > 4 * max_pixels:  # tiles may be larger than the image
            refuse(path, f"has tiles of {tile} values each, above 4 x data.max_pixels {max_pixels}; save it with smaller tiles")
        end = max(offset + count for offset, count in zip(offsets, counts, strict=False))
        if end > size:
            refuse(path, f"is cut: its pixels end at byte {end}, the file at {size}")
        if frame.is_contiguous and sum(counts) < frame.nbytes:
            refuse(path, f"holds {sum(counts)} bytes of pixels where its header claims {frame.nbytes}")


def _check_numbers(page: tifffile.TiffPage, path: Path) -> None:
    """Codecs of pictures know the type of their pixels (fax: one bit; JPEG and others: in the data), and it is what the tags say."""
    compression = int(page.compression)
    if compression in _FAX_COMPRESSIONS and int(page.bitspersample) != 1:
        refuse(path, f"is compressed as a fax and claims {page.bitspersample} bits a pixel, not 1")
    if compression not in _PLAIN_COMPRESSIONS | _FAX_COMPRESSIONS:
        part = next(page.segments(maxworkers=1))[0]
        if part is not None and part.dtype != page.dtype:
            refuse(path, f"holds {part.dtype} pixels where its header says {page.dtype}")


def _check_jpeg_parts(tiff: tifffile.TiffFile, series: tifffile.TiffPageSeries, path: Path) -> None:
    """JPEG inside TIFF is held to the same as JPEG alone; tifffile's decoder takes damage for grey. Costs the Huffman part again."""
    frame = series.keyframe
    samples = 1 if int(frame.planarconfig) == 2 else int(frame.samplesperpixel)
    if simplejpeg is None or int(frame.compression) != 7 or int(frame.bitspersample) != 8 or samples not in (1, 3, 4) or frame.jpegheader:
        return
    colours = "CMYK" if samples == 4 else "GRAY"
    for page in series.pages:
        assert page is not None
        tables = page.jpegtables
        for number, (offset, count) in enumerate(zip(page.dataoffsets, page.databytecounts, strict=False)):
            tiff.filehandle.seek(offset)
            data = tiff.filehandle.read(count)
            try:
                simplejpeg.decode_jpeg(tables[:-2] + data[2:] if tables else data, colours, min_factor=8, strict=True)
            except ValueError as error:
                refuse(path, f"holds a damaged JPEG as tile or strip {number}: {first_line(error)}", error)


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


def _plain_numbers(array: np.ndarray, path: Path) -> np.ndarray:
    """uint8, uint16 or float32."""
    if array.dtype == bool:
        return array.astype(np.uint8) * 255
    if array.dtype in (np.uint8, np.uint16):
        return array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype.kind not in "iuf":
        refuse(path, f"has pixels of type {array.dtype}, which are not read")
    array = array.astype(np.float32, copy=False)
    if not np.isfinite(array).all():
        bad = int(array.size - np.isfinite(array).sum())
        refuse(path, f"has {bad} values that are not finite (NaN or infinite); replace them")
    return array


def _largest(dtype: np.dtype) -> np.ndarray:
    """White: the type's largest value, 1 for floats."""
    return np.asarray(1.0 if dtype.kind == "f" else np.iinfo(dtype).max, dtype)


def _cmyk_to_rgb(array: np.ndarray) -> np.ndarray:
    top = float(_largest(array.dtype))
    out = np.empty((*array.shape[:2], 3), array.dtype)
    for row in range(0, len(array), _STRIP_ROWS):
        ink = array[row : row + _STRIP_ROWS].astype(np.float32)
        rgb = (top - ink[..., :3]) * (top - ink[..., 3:4]) / top
        out[row : row + _STRIP_ROWS] = rgb if out.dtype.kind == "f" else np.rint(rgb)
    return out


def _lay_on_background(array: np.ndarray, background: tuple[int, int, int]) -> np.ndarray:
    """Takes 2 and 4 channels as alpha at the end (what the codecs return); others pass."""
    if array.shape[2] in (1, 3):
        return array
    return _blend(array[..., :-1], array[..., -1:], background, premultiplied=False)


def _blend(colour: np.ndarray, alpha: np.ndarray, background: tuple[int, int, int], premultiplied: bool) -> np.ndarray:
    """Colour over background. Grey stays grey on a grey background and becomes RGB on a coloured one. Strips keep the memory small."""
    if colour.shape[2] == 1 and len(set(background)) > 1:
        colour = np.repeat(colour, 3, axis=2)
    top = float(_largest(colour.dtype))
    if alpha.min() == top:
        return np.ascontiguousarray(colour)
    shade = np.asarray(background[: colour.shape[2]], np.float32) / 255 * top
    if colour.shape[2] > 3:
        shade = np.full(colour.shape[2], np.mean(background) / 255 * top, np.float32)
    out = np.empty(colour.shape, colour.dtype)
    for row in range(0, len(colour), _STRIP_ROWS):
        strip = slice(row, row + _STRIP_ROWS)
        share = alpha[strip].astype(np.float32) / top
        front = colour[strip].astype(np.float32)
        mixed = (front if premultiplied else front * share) + shade * (1 - share)
        out[strip] = mixed if out.dtype.kind == "f" else np.rint(np.clip(mixed, 0, top))
    return out


def _upright(array: np.ndarray, orientation: int) -> np.ndarray:
    """EXIF orientation undone."""
    if orientation == 1:
        return np.ascontiguousarray(array)
    if orientation in (6, 8) and array.shape[2] <= 4:  # opencv turns several times faster than numpy, and drops a single channel
        turned = cv2.rotate(array, cv2.ROTATE_90_CLOCKWISE if orientation == 6 else cv2.ROTATE_90_COUNTERCLOCKWISE)
        return turned if turned.ndim == 3 else turned[..., None]
    if orientation >= 5:
        array = array.transpose(1, 0, 2)
    rows = -1 if orientation in (3, 4, 7, 8) else 1
    columns = -1 if orientation in (2, 3, 6, 7) else 1
    return np.ascontiguousarray(array[::rows, ::columns])
