"""From maps of logits, one for each of the model's inputs, to whole images at their own size, strip by strip.

An input shows a whole image, reduced and perhaps padded, or a window of it. Each pixel of the image takes the logits at its place in the
map by bilinear interpolation, once from the map's stride to the image's own pixels; where windows overlap, the mean of theirs. Windows come
row by row, so rows above the one under way are finished: what is held is as high as a window, whatever the height of the image. A strip has
a few million values at most, since logits at full resolution are far larger than the image.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

STRIP_VALUES = 2**22


class Part(Protocol):
    """A rectangle of pixels."""

    @property
    def x(self) -> int: ...
    @property
    def y(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class Strip:
    """Some finished rows of an image.

    Attributes:
        index: of the sample.
        size: (height, width) of the image.
        top: the first row.
        logits: (k, rows, width) float32, on the CPU.
        truth: (rows, width) uint8 class numbers, 255 for none; None where they are not known.
    """

    index: int
    size: tuple[int, int]
    top: int
    logits: Tensor
    truth: Tensor | None

    @property
    def is_last(self) -> bool:
        """The image is complete with it."""
        return self.top + self.logits.shape[1] == self.size[0]


class MapJoin:
    """Takes a loader's items in their order; gives strips from top to bottom. An image of which a window is missing is never completed."""

    def __init__(self) -> None:
        self._band: _Band | None = None

    def add(self, item: Any, maps: Tensor) -> Iterator[Strip]:
        """The strips that this item finishes.

        Args:
            item: with images, indices, places, truths and num_windows, as of an `EvalLoader` with masks.
            maps: (b, k, h, w) logits of the item's images, on the CPU.
        """
        shown = tuple(item.images.shape[1:3])
        for row, (index, place) in enumerate(zip(item.indices, item.places, strict=True)):
            truth = item.truths[row] if item.truths else None
            sampled = _Sampled(maps[row], place, shown)
            if not item.num_windows or item.num_windows[row] == 1:
                for top, rows in _cuts(place.size, maps.shape[1]):
                    yield Strip(index, place.size, top, sampled.rows(top, rows), None if truth is None else truth[top : top + rows])
                continue
            if self._band is None or self._band.index != index:
                self._band = _Band(index, place.size, place.part.height, maps.shape[1], with_truth=truth is not None)
            self._band.seen += 1
            is_last = self._band.seen == item.num_windows[row]
            yield from self._band.add(place.part, sampled.rows(0, place.part.height), truth, is_last=is_last)


class _Band:
    """The sums of an image in windows, over the rows that the windows under way reach."""

    def __init__(self, index: int, size: tuple[int, int], height: int, num_classes: int, *, with_truth: bool) -> None:
        self.index, self.size, self.seen = index, size, 0
        self._top = 0
        self._sum = torch.zeros(num_classes, height, size[1])
        self._count = torch.zeros(height, size[1])
        self._truth = torch.zeros(height, size[1], dtype=torch.uint8) if with_truth else None

    def add(self, part: Part, logits: Tensor, truth: Tensor | None, *, is_last: bool) -> Iterator[Strip]:
        """Takes a window; gives the rows that no later one reaches."""
        yield from self._finish(part.y - self._top)
        columns = slice(part.x, part.x + part.width)
        self._sum[:, :, columns] += logits
        self._count[:, columns] += 1
        if self._truth is not None and truth is not None:
            self._truth[:, columns] = truth
        if is_last:
            yield from self._finish(self._sum.shape[1])

    def _finish(self, rows: int) -> Iterator[Strip]:
        """Gives the first rows and makes room for as many below."""
        for top, count in _cuts((rows, self.size[1]), self._sum.shape[0]):
            done = slice(top, top + count)
            logits = self._sum[:, done] / self._count[done]
            yield Strip(self.index, self.size, self._top + top, logits, None if self._truth is None else self._truth[done].clone())
        for values in (self._sum, self._count, self._truth) if rows else ():
            if values is not None:
                left = values[..., rows:, :].clone()
                values.zero_()
                values[..., : left.shape[-2], :] = left
        self._top += rows


def _cuts(size: tuple[int, int], num_classes: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of strips of an image of this size."""
    most = max(1, STRIP_VALUES // (num_classes * size[1]))
    for top in range(0, size[0], most):
        yield top, min(most, size[0] - top)


class _Sampled:
    """The map of one input, read at the pixels of the part of the image that the input shows.

    Args:
        values: (k, h, w) of the map.
        place: where the input lies in its image.
        shown: (height, width) of the input in its own pixels.
    """

    def __init__(self, values: Tensor, place: Any, shown: tuple[int, ...]) -> None:
        self._values = values
        part, content = place.part, place.content
        self._rows = _axis(part.height, content.y, content.height, values.shape[1], shown[0])
        self._columns = _axis(part.width, content.x, content.width, values.shape[2], shown[1])

    def rows(self, top: int, count: int) -> Tensor:
        """(k, count, width) from a row of the part on."""
        low, high, share = (one[top : top + count] for one in self._rows)
        lines = torch.lerp(self._values[:, low], self._values[:, high], share[:, None])
        low, high, share = self._columns
        return torch.lerp(lines[:, :, low], lines[:, :, high], share)


def _axis(length: int, start: int, extent: int, cells: int, shown: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each pixel of an axis the two cells of the map around it, and the share of the second.

    Args:
        length: pixels of the image. start, extent: the same in pixels of the input, of which there are `shown`. cells: of the map.
    """
    middles = start + (torch.arange(length, dtype=torch.float64) + 0.5) * (extent / length)
    at = (middles * (cells / shown) - 0.5).clamp(0, cells - 1)
    low = at.floor().long()
    return low, (low + 1).clamp(max=cells - 1), (at - low).float()
