"""Parts of an image by their place: a region, the same region as the file stores it and on smaller copies, and rows of windows.

Places count in pixels of the image as it is shown, that is after the EXIF or TIFF orientation, from the upper left corner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Size = tuple[int, int]  # (height, width)
REGION_KEYS = ("region x", "region y", "region width", "region height")  # of a manifest's row, in the order of data.region


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of pixels. Its text, `x,y,width,height`, stands behind a file's name where samples are told apart."""

    x: int
    y: int
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.x},{self.y},{self.width},{self.height}"

    @property
    def size(self) -> Size:
        """(height, width)."""
        return self.height, self.width

    @property
    def slices(self) -> tuple[slice, slice]:
        """Rows and columns of an array (height, width, ...)."""
        return slice(self.y, self.y + self.height), slice(self.x, self.x + self.width)

    def fits(self, size: Size) -> bool:
        """Whether it has pixels and all of them are in an image of this size."""
        inside = self.x + self.width <= size[1] and self.y + self.height <= size[0]
        return inside and min(self.x, self.y) >= 0 and min(self.width, self.height) > 0

    def within(self, outer: Region) -> Region:
        """This region, whose place counts from the corner of `outer`, counted as `outer` is."""
        return Region(outer.x + self.x, outer.y + self.y, self.width, self.height)

    def as_stored(self, shown: Size, orientation: int) -> Region:
        """The pixels of the file that orientation 1 to 8 turns into this region of the image as shown."""
        x = shown[1] - self.x - self.width if orientation in (2, 3, 6, 7) else self.x
        y = shown[0] - self.y - self.height if orientation in (3, 4, 7, 8) else self.y
        return Region(y, x, self.height, self.width) if orientation >= 5 else Region(x, y, self.width, self.height)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one of the model's inputs lies in its image.

    Attributes:
        size: (height, width) of the image as shown.
        part: of the image, which the input shows.
        content: the same in the pixels of the input; what is around it is padding.
    """

    size: Size
    part: Region
    content: Region


def named(name: str, region: Region | None) -> str:
    """A file's name with its region, so that two samples of one file have two names."""
    return name if region is None else f"{name}[{region}]"


def region_problems(written: Mapping[str | None, str]) -> Iterator[str]:
    """What is wrong with the numbers of a row by themselves, given by column in the order of `REGION_KEYS`."""
    for (column, text), low in zip(written.items(), (0, 0, 1, 1), strict=False):
        try:
            number = whole_number(text)
        except ValueError:
            yield f"{text!r} in column {column!r} is not a whole number of pixels"
            continue
        if number < low:
            yield f"{number} in column {column!r} is below {low}"


def whole_number(text: str) -> int:
    """A number of pixels as tables write it: 512, also 512.0.

    Raises:
        ValueError: it is none.
    """
    number = float(text)
    if not number.is_integer() or "_" in text:
        raise ValueError(text)
    return int(number)


def whole(size: Size) -> Region:
    """All of an image of this size."""
    return Region(0, 0, size[1], size[0])


def choose_level(levels: Sequence[Size], region: Region, target: Size | None) -> tuple[int, Region]:
    """Which copy of an image to read so that reducing the region to `target` loses nothing: (number, region on that copy).

    Copies (a pyramid's levels, DCT scaling of a JPEG) are averages already. One on which the region is a whole multiple of the target,
    with its borders between pixels, loses nothing. Others are averaged twice on different grids: 10% of the contrast of details
    of two pixels is lost at 1.1 times the target, 5% at 1.5, 2% at 2.5, so such a copy has to have three times the target. Borders that
    fall inside a pixel of the copy are moved outward, by less than a third of a target pixel then.

    Args:
        levels: sizes, the image itself first.
        region: on the image itself.
        target: (height, width) that the region will be reduced to; None: no reduction.
    """
    found = (0, region)
    for number, level in enumerate(levels[1:] if target is not None else (), start=1):
        assert target is not None
        place, exact = _on_level(region, levels[0], level)
        suffices = all(
            size >= 3 * wanted or (exact and size >= wanted and size % wanted == 0) for size, wanted in zip(place.size, target, strict=True)
        )
        if suffices and place.height * place.width < found[1].height * found[1].width:
            found = (number, place)
    return found


def _on_level(region: Region, full: Size, level: Size) -> tuple[Region, bool]:
    """The region on a smaller copy, borders moved outward, and whether none had to be."""
    top, bottom, exact_rows = _ends(region.y, region.height, full[0], level[0])
    left, right, exact_columns = _ends(region.x, region.width, full[1], level[1])
    return Region(left, top, right - left, bottom - top), exact_rows and exact_columns


def _ends(start: int, length: int, full: int, level: int) -> tuple[int, int, bool]:
    low, before = divmod(start * level, full)
    high, behind = divmod((start + length) * level, full)
    return low, high + (behind > 0), before == behind == 0


def num_windows(length: int, window: int, overlap: float) -> int:
    """Windows side by side along one axis, so that every pixel is in one; an axis that is no longer than a window has one.

    >>> [num_windows(length, 100, 0.25) for length in (40, 100, 101, 175, 176)]
    [1, 1, 2, 2, 3]
    """
    return 1 if length <= window else -(-(length - window) // _stride(window, overlap)) + 1


def window_start(length: int, window: int, overlap: float, number: int) -> int:
    """Where window `number` of an axis begins. Two neighbours share at least `overlap` of a window; the last is moved inside.

    >>> [window_start(190, 100, 0.25, number) for number in range(3)]
    [0, 75, 90]
    """
    return min(number * _stride(window, overlap), max(0, length - window))


def _stride(window: int, overlap: float) -> int:
    return max(1, int(window * (1 - overlap) + 1e-6))  # 1 - 0.9 is a little below 0.1
