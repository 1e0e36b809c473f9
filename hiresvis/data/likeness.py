"""Images that look alike: the same picture saved again, at another quality or another size, however large the set.

Of each decoded image 268 bytes are kept: grey levels of 16 x 16 areas, and of each quarter the means of three channels. Of all images
together the average is taken off first, as far as there are enough of them: retinas share their dark rim and boards from one camera
their frame, and what is left is the image's own. Its hash are 128 bits, whether each of 8 x 8 areas is darker than the next to the right
and the next below. Two images are compared where 16 bits in a row agree, within a window where thousands share them, so the work grows
with the number of images and not with its square. They are alike when size, colour and the levels agree.

Bounds: pictures that are turned, mirrored or cut otherwise are not found. A region is compared as the image that it is.
Of images that are blank at 16 x 16, or that differ from the average of all by no more than what saving them again does, nothing can be
said, and nothing is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hiresvis.data.regions import Region, Size
from hiresvis.data.transforms import Scale, resize

SIDE = 16
BLANK_SPREAD = 0.02  # of the range from black to white
_SAMPLED_VALUES = 250_000
_TRIMMED = (0.25, 99.75)  # percentiles between which a blank image has hardly any contrast: a speck of dust does not count
_CELL_PX = 4  # of an image read in parts: what is averaged at once
_WINDOW = 48
_CHUNK = 50_000
# Measured on panels and photos saved again (JPEG quality 40 to 95, sizes 0.5 to 1.1): correlation 0.99 and more, levels within 0.10 of
# their deviation, at most 6 bits in 64; images of different things: correlation 0.86 and less.
_MOST_BITS = 24
_CORRELATION = 0.98
_LEVELS_OFF = 0.15  # of the image's own deviation
_COLOUR_OFF = 8
_ASPECT_OFF = 1.03
_LEAST_DEVIATION = 3.0
_IMAGES_FOR_AVERAGE = 64  # at this many, half of the average is taken off


@dataclass(frozen=True, slots=True)
class Look:
    """What a decoded image looks like.

    Attributes:
        signature: 16 x 16 grey levels, then of each quarter the means of three channels (fewer are repeated), as bytes.
        spread: contrast as a share of the range from black to white, outliers aside; 0 for one colour.
    """

    signature: bytes
    spread: float


def look_at(array: np.ndarray, scale: Scale) -> Look:
    """The look of an image (height, width, channels) of any of the decoder's types; `scale` says what is black and what is white."""
    step = _step(array.shape[:2])
    spread = _spread(_levels(array[::step, ::step], scale), bool((array == array[0, 0]).all()))
    return Look(_signature(_levels(resize(array, SIDE, SIDE), scale)), spread)


class LookInParts:
    """The look of an image that is read in parts, which are let go.

    Args:
        size: (height, width) of the whole.
    """

    def __init__(self, size: Size, scale: Scale) -> None:
        self._size, self._scale, self._step = size, scale, _step(size)
        self._sums: list[np.ndarray] = []  # by channel, of the pixels in each of 16 x 16 areas
        self._sampled: list[np.ndarray] = []
        self._first: np.ndarray | None = None
        self._one_colour = True

    def add(self, place: Region, array: np.ndarray) -> None:
        """One part (height, width, channels) and where it is."""
        channels = array.shape[2]
        if self._first is None:
            self._first, self._sums = array[0, 0].copy(), [np.zeros((SIDE, SIDE)) for _ in range(channels)]
        self._one_colour = self._one_colour and bool((array == self._first).all())
        sampled = _levels(array[-place.y % self._step :: self._step, -place.x % self._step :: self._step], self._scale)
        self._sampled.append(sampled.reshape(-1, 1, channels))
        cells = _levels(resize(array, -(-place.height // _CELL_PX), -(-place.width // _CELL_PX)), self._scale)
        rows = _shares(place.y, place.height, cells.shape[0], self._size[0])
        columns = _shares(place.x, place.width, cells.shape[1], self._size[1])
        for channel, sums in enumerate(self._sums):
            sums += rows @ cells[..., channel] @ columns.T

    def look(self) -> Look:
        """Of all parts together."""
        areas = np.stack(self._sums, axis=2) * (SIDE * SIDE / (self._size[0] * self._size[1]))
        return Look(_signature(areas), _spread(np.concatenate(self._sampled), self._one_colour))


def _shares(start: int, length: int, cells: int, side: int) -> np.ndarray:
    """(16, cells): how many pixels of each of the cells of `length` px from `start` are in each sixteenth of an axis."""
    ends = np.arange(SIDE + 1)[:, None] * (side / SIDE)
    borders = start + np.arange(cells + 1) * (length / cells)
    return np.clip(np.minimum(ends[1:], borders[1:]) - np.maximum(ends[:-1], borders[:-1]), 0, None).astype(np.float32)


def _step(size: Size) -> int:
    return max(1, int((size[0] * size[1] / _SAMPLED_VALUES) ** 0.5))


def _spread(sampled: np.ndarray, one_colour: bool) -> float:
    low, high = np.percentile(sampled, _TRIMMED, axis=(0, 1))
    spread = float((high - low).max()) / 255
    if spread == 0:  # of one colour, or with a few other pixels
        spread = 0.0 if one_colour else BLANK_SPREAD / 2
    return round(spread, 4)


def _signature(areas: np.ndarray) -> bytes:
    quarters = areas.reshape(2, SIDE // 2, 2, SIDE // 2, -1).mean(axis=(1, 3))
    colours = quarters[..., np.arange(3) % min(3, quarters.shape[2])]
    return np.rint(np.concatenate([areas.mean(axis=2).ravel(), colours.ravel()])).astype(np.uint8).tobytes()


def _levels(array: np.ndarray, scale: Scale) -> np.ndarray:
    """float32, 0 to 255."""
    levels = scale.apply(np.ascontiguousarray(array))
    return levels.astype(np.float32) if levels.dtype == np.uint8 else levels * np.float32(255)


def group_alike(signatures: Sequence[bytes], aspects: Sequence[float]) -> list[tuple[int, ...]]:
    """Positions of images that look alike, directly or through others; in groups, each in order, the groups by their first.

    Args:
        signatures: of `look_at`.
        aspects: height / width of each, as shown.
    """
    if len(signatures) < 2:
        return []
    table = np.frombuffer(b"".join(signatures), np.uint8).reshape(len(signatures), -1)
    images = _Images(table[:, : SIDE * SIDE], table[:, SIDE * SIDE :].astype(np.int16), np.log(np.asarray(aspects, np.float32)))
    members: dict[int, list[int]] = {}
    for index, leader in enumerate(images.leaders().tolist()):
        members.setdefault(leader, []).append(index)
    return [tuple(group) for group in members.values() if len(group) > 1]


class _Images:
    """Signatures of one set, and the pairs among them."""

    def __init__(self, areas: np.ndarray, colours: np.ndarray, log_aspects: np.ndarray) -> None:
        number = len(areas)
        share = number / (number + _IMAGES_FOR_AVERAGE)
        self.areas, self.colours, self.log_aspects = areas, colours, log_aspects
        self.common = (areas.mean(axis=0, dtype=np.float64) * share).astype(np.float32)
        chunks = [self._bits(slice(start, start + _CHUNK)) for start in range(0, number, _CHUNK)]
        self.words = np.concatenate([words for words, _ in chunks])  # (n, 8) uint16
        self.deviations = np.concatenate([deviations for _, deviations in chunks])

    def _own(self, chosen: slice | np.ndarray) -> np.ndarray:
        return self.areas[chosen].astype(np.float32) - self.common

    def _bits(self, chosen: slice) -> tuple[np.ndarray, np.ndarray]:
        own = self._own(chosen)
        half = SIDE // 2
        blocks = own.reshape(-1, half, 2, half, 2).mean(axis=(2, 4))
        darker = np.stack([np.roll(blocks, -1, axis) > blocks for axis in (2, 1)], axis=1)
        return np.packbits(darker.reshape(len(own), -1), axis=1).view(np.uint16), own.std(axis=1)

    def leaders(self) -> np.ndarray:
        """For each image the first of its group."""
        leaders = np.arange(len(self.areas))
        for left, right in self._candidates():
            apart = leaders[left] != leaders[right]  # pairs of one group need no second look: thousands of copies cost no more than one
            for one, other in self._alike(left[apart], right[apart]):
                first, second = sorted((_leader_of(leaders, one), _leader_of(leaders, other)))
                leaders[second] = first
            while (leaders != (shorter := leaders[leaders])).any():
                leaders = shorter
        return leaders

    def _candidates(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Pairs with 16 bits in common: all of them, or where many share the same, those of nearly the same brightness."""
        usable = np.flatnonzero(self.deviations >= _LEAST_DEVIATION)
        brightness = self.areas[usable].mean(axis=1)
        for band in range(self.words.shape[1]):
            words = self.words[usable, band]
            order = np.lexsort((brightness, words))
            ordered, words = usable[order], words[order]
            for distance in range(1, min(_WINDOW, len(ordered) - 1) + 1):
                same = np.flatnonzero(words[distance:] == words[:-distance])
                if not len(same):
                    break
                yield ordered[same], ordered[same + distance]

    def _alike(self, left: np.ndarray, right: np.ndarray) -> Iterator[tuple[int, int]]:
        near = np.abs(self.log_aspects[left] - self.log_aspects[right]) <= np.log(_ASPECT_OFF)
        near &= (np.abs(self.colours[left] - self.colours[right]) <= _COLOUR_OFF).all(axis=1)
        left, right = left[near], right[near]
        near = np.unpackbits((self.words[left] ^ self.words[right]).view(np.uint8), axis=1).sum(axis=1) <= _MOST_BITS
        left, right = left[near], right[near]
        for start in range(0, len(left), _CHUNK):
            first, second = left[start : start + _CHUNK], right[start : start + _CHUNK]
            own, other = self._own(first), self._own(second)
            deviation = np.minimum(self.deviations[first], self.deviations[second])
            centred = own - own.mean(axis=1, keepdims=True), other - other.mean(axis=1, keepdims=True)
            correlation = (centred[0] * centred[1]).mean(axis=1) / (self.deviations[first] * self.deviations[second])
            alike = (correlation >= _CORRELATION) & (np.abs(own - other).mean(axis=1) <= _LEVELS_OFF * deviation)
            yield from zip(first[alike].tolist(), second[alike].tolist(), strict=True)


def _leader_of(leaders: np.ndarray, index: int) -> int:
    while leaders[index] != index:
        index = int(leaders[index])
    return index
