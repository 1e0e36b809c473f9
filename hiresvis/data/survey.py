"""What the images themselves decide, by a sample of their headers and values: channels and number range, and what `new` tells of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hiresvis.data.decode import open_image, probe
from hiresvis.data.header import Header
from hiresvis.data.regions import Region
from hiresvis.data.sources import Sample
from hiresvis.data.transforms import Scale
from hiresvis.errors import DataError, Problem

NUM_HEADERS = 64
NUM_IMAGES = 16
_MIDDLE_PX = 2048
_VALUES_PER_IMAGE = 100_000
_PERCENTILES = (0.1, 99.9)


def resolve_channels(samples: Sequence[Sample], channels: int | None, *, max_pixels: int) -> tuple[int, str]:
    """Channels of the model's input, and why.

    Args:
        samples: of train.
        channels: as given; None: from the headers of up to 64 images spread over the samples.
        max_pixels: larger images are left out here; the check reports them.

    Raises:
        DataError: images of different channels that cannot be brought together.
    """
    if channels is not None:
        return channels, "given"
    counts = Counter(header.channels for _, header in _headers(samples, max_pixels))
    if set(counts) <= {1, 3}:
        what = "grey images are repeated to three channels, as the weights want them" if counts[1] else "colour images"
        return 3, what
    if len(counts) == 1:
        found = next(iter(counts))
        return found, f"all {counts[found]} images looked at have {found} channels"
    text = ", ".join(f"{number} channels in {count}" for number, count in sorted(counts.items()))
    raise DataError([Problem(f"images of different channels: {text}; save them alike", key="data.channels")])


def resolve_scale(
    samples: Sequence[Sample], scale: str | Sequence[float], *, max_pixels: int, background: tuple[int, int, int] = (255, 255, 255)
) -> tuple[Scale, str]:
    """The number range for the contract, and why.

    Args:
        samples: of train; the same samples give the same range.
        scale: "auto" | "dtype" | "percentile" | (low, high). percentile: from the 0.1th to the 99.9th percentile of all values in up to
            16 images, one range for the whole data set. auto: the type's range for 8-bit images, for 16-bit ones that use a quarter of it
            or more, and for floats within 0 to 1; the percentiles otherwise.
        max_pixels: as in `decode`.
        background: under transparent pixels.

    Raises:
        DataError: no readable image to measure, or all values alike.
    """
    if not isinstance(scale, str):
        low, high = scale
        return Scale("range", float(low), float(high)), "given"
    if scale == "dtype":
        return Scale(), "given"
    headers = _headers(samples, max_pixels)
    deep = [sample for sample, header in headers if header.bits > 8]
    if scale == "auto" and not deep:
        return Scale(), "8-bit images"
    if scale == "auto" and len(deep) < len(headers):
        return Scale(), f"{len(deep)} of {len(headers)} images looked at have more than 8 bits; each by its own type"
    values, dtypes = _values(deep if scale == "auto" else [sample for sample, _ in headers], max_pixels, background)
    low, high = (float(value) for value in np.percentile(values, _PERCENTILES))
    if scale == "auto" and dtypes == {"uint16"} and high >= 65535 / 4:
        return Scale(), f"16-bit images with values up to {high:.0f} of 65535"
    if scale == "auto" and dtypes == {"float32"} and values.min() >= 0 and values.max() <= 1:
        return Scale(), "float images within 0 to 1"
    if not low < high:
        raise DataError(
            [Problem(f"all values looked at are {low:g}; the images are empty, or give data.scale as [low, high]", key="data.scale")]
        )
    return Scale("range", low, high), f"percentiles {_PERCENTILES[0]} and {_PERCENTILES[1]} of {' and '.join(sorted(dtypes))} values"


def any_deep_images(samples: Sequence[Sample], max_pixels: int) -> bool:
    """Whether some of up to 64 images spread over the samples have more than 8 bits a value."""
    try:
        return any(header.bits > 8 for _, header in _headers(samples, max_pixels))
    except DataError:  # none can be read: whoever reads them says so
        return False


def most_pixels(samples: Sequence[Sample], max_pixels: int) -> int:
    """Pixels of the largest of up to 64 images spread over the samples; 0 where none can be read."""
    try:
        return max(header.width * header.height for _, header in _headers(samples, max_pixels))
    except DataError:
        return 0


@dataclass(frozen=True, slots=True)
class Look:
    """What the headers of some images say.

    Attributes:
        sizes: (height, width) of each as shown; of a region its own.
        formats: JPEG, PNG, ...: how many.
        bits: per sample: how many.
        num_refused: that could not be read.
    """

    sizes: tuple[tuple[int, int], ...]
    formats: Mapping[str, int]
    bits: Mapping[int, int]
    num_refused: int


def look_at(samples: Sequence[Sample], max_pixels: int) -> Look:
    """Up to 64 images spread over the samples; no pixel is decoded.

    Raises:
        DataError: none of them can be read.
    """
    found = _headers(samples, max_pixels)
    sizes = tuple(header.shown_size if sample.region is None else sample.region.size for sample, header in found)
    formats, bits = Counter(header.format for _, header in found), Counter(header.bits for _, header in found)
    return Look(sizes, formats, bits, min(NUM_HEADERS, len(samples)) - len(found))


def _headers(samples: Sequence[Sample], max_pixels: int) -> list[tuple[Sample, Header]]:
    """Headers of samples spread evenly over the list; unreadable files are the check's business."""
    found, refused = [], []
    for sample in _spread(samples, NUM_HEADERS):
        try:
            found.append((sample, probe(sample.path, max_pixels)))
        except DataError as error:
            refused.append(error)
    if not found:
        text = f"none of {len(refused)} images looked at can be read; hiresvis check gives all reasons. The first: {refused[0]}"
        raise DataError(text)
    return found


def _spread(samples: Sequence[Sample], limit: int) -> list[Sample]:
    if len(samples) <= limit:
        return list(samples)
    return [samples[position * len(samples) // limit] for position in range(limit)]


def _middle(size: tuple[int, int]) -> Region:
    """At most 2048 px a side: of what is read in parts there is no need to read more."""
    height, width = (min(side, _MIDDLE_PX) for side in size)
    return Region((size[1] - width) // 2, (size[0] - height) // 2, width, height)


def _values(samples: Sequence[Sample], max_pixels: int, background: tuple[int, int, int]) -> tuple[np.ndarray, set[str]]:
    """Values of some images, evenly picked, and their types."""
    parts, dtypes = [], set()
    for sample in _spread(samples, NUM_IMAGES):
        try:
            with open_image(sample.path, max_pixels=max_pixels, background=background, region=sample.region) as image:
                array = image.read_window(_middle(image.size)) if image.tiled else image.read()
        except DataError:
            continue
        flat = array.reshape(-1)
        parts.append(flat[:: max(1, flat.size // _VALUES_PER_IMAGE)].astype(np.float32))
        dtypes.add(str(array.dtype))
    if not parts:
        raise DataError("no image to take data.scale from can be read; run the check command for the reasons")
    return np.concatenate(parts), dtypes
