"""From what a codec gives to channels, by stated rules: palettes, transparency, inks, number types."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hiresvis.data.header import refuse

_STRIP_ROWS = 256


def stretch(array: np.ndarray, bits: int) -> np.ndarray:
    """Values of 0 to 2**bits - 1 over the whole range of uint8 (up to 8 bits) or uint16: what the file calls white stays white."""
    if bits in (8, 16):
        return array
    top, kind = (255, np.uint8) if bits < 8 else (65535, np.uint16)
    table = np.rint(np.arange(1 << bits, dtype=np.float64) * (top / ((1 << bits) - 1))).astype(kind)
    return table[np.minimum(array, len(table) - 1)]


def through_palette(numbers: np.ndarray, table: np.ndarray, path: Path) -> np.ndarray:
    """(height, width, 3) colours. A palette that was overwritten would turn the image blank without an error anywhere."""
    array = np.ascontiguousarray(table[numbers])
    if (array == array[0, 0]).all() and (numbers != numbers[0, 0]).any():
        refuse(path, f"has a damaged palette: all of its {len(np.unique(numbers))} numbers have the colour {array[0, 0].tolist()}")
    return array


def plain_numbers(array: np.ndarray, path: Path) -> np.ndarray:
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


def largest(dtype: np.dtype) -> np.ndarray:
    """White: the type's largest value, 1 for floats."""
    return np.asarray(1.0 if dtype.kind == "f" else np.iinfo(dtype).max, dtype)


def cmyk_to_rgb(array: np.ndarray) -> np.ndarray:
    """(top - C)(top - K) / top, and so on; no colour profile."""
    top = float(largest(array.dtype))
    out = np.empty((*array.shape[:2], 3), array.dtype)
    for row in range(0, len(array), _STRIP_ROWS):
        ink = array[row : row + _STRIP_ROWS].astype(np.float32)
        rgb = (top - ink[..., :3]) * (top - ink[..., 3:4]) / top
        out[row : row + _STRIP_ROWS] = rgb if out.dtype.kind == "f" else np.rint(rgb)
    return out


def blend(colour: np.ndarray, alpha: np.ndarray, background: tuple[int, int, int], premultiplied: bool) -> np.ndarray:
    """Colour over background. Grey stays grey on a grey background and becomes RGB on a coloured one. Strips keep the memory small."""
    if colour.shape[2] == 1 and len(set(background)) > 1:
        colour = np.repeat(colour, 3, axis=2)
    top = float(largest(colour.dtype))
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
