"""The contract's resizing as arithmetic that a graph can hold: bytes of any size to the model's size.

ONNX has a `Resize` that smooths when it shrinks, by a triangle twice as wide as a pixel; the contract averages areas (opencv's
`INTER_AREA`), which keeps small things sharper, so it is written out: an average over areas along one axis is a product with a matrix
whose row says how much of each source pixel lies under a target pixel, and an image takes two of them. The matrices are made in the graph,
from the sizes that come. An axis that grows has the rows of linear or cubic interpolation instead.

Held against opencv: whole factors and fractions alike give the same byte but where a sum lies on the border between two, which rounds the
other way; `BOUND_LEVELS` is what is let pass. Its linear interpolation counts in 11 bits, which moves a tenth of the values by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hiresvis.data.contract import Contract
from hiresvis.data.decode import decode
from hiresvis.data.sources import Sample
from hiresvis.errors import DataError, RecipeError

BOUND_LEVELS = 1  # of 255, by which a value may differ from opencv's
_CUBIC = -0.75  # opencv's
FITS = ("resize", "letterbox")


class FitPixels(nn.Module):
    """(batch, height, width, channels) bytes to (batch, *image_size, channels), whole numbers of 0 to 255 in float32.

    Args:
        contract: with fit resize or letterbox.
    """

    def __init__(self, contract: Contract) -> None:
        super().__init__()
        assert contract.fit in FITS, contract.fit
        self.size, self.keeps_shape, self.cubic = contract.image_size, contract.fit == "letterbox", contract.interpolation == "bicubic"
        colour = contract.background if contract.channels == 3 else [float(np.mean(contract.background))] * contract.channels
        self.register_buffer("shade", torch.tensor(np.rint(np.asarray(colour, np.float64)), dtype=torch.float32), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        rows, columns = (torch.arange(images.shape[axis], device=images.device).to(torch.float64) for axis in (1, 2))
        height, width = rows[-1] + 1, columns[-1] + 1
        tall, wide = (torch.full_like(height, float(side)) for side in self.size)
        if self.keeps_shape:
            ratio = torch.minimum(tall / height, wide / width)
            tall = torch.clamp(torch.minimum(tall, torch.round(height * ratio)), min=1.0)
            wide = torch.clamp(torch.minimum(wide, torch.round(width * ratio)), min=1.0)
        down, is_row = self._weights(rows, height, tall, self.size[0])
        across, is_column = self._weights(columns, width, wide, self.size[1])
        values = images.to(torch.float32)
        batch, channels = values.shape[0], values.shape[3]
        values = torch.matmul(down, values.flatten(2)).reshape(batch, self.size[0], -1, channels)
        values = torch.matmul(across, values)
        # opencv averages pairs of pixels in whole numbers, halves upwards; everything else rounds halves to even.
        pairs = (height == 2 * tall) & (width == 2 * wide)
        values = torch.where(pairs, torch.floor(values + 0.5), torch.round(values)).clamp(0.0, 255.0)
        inside = (is_row[:, None] & is_column[None, :])[None, :, :, None]
        return torch.where(inside, values, self.shade)

    def _weights(self, places: Tensor, had: Tensor, wanted: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """((side, had) of one axis, (side,) whether a target pixel is of the image and not of its padding)."""
        target = torch.arange(side, device=places.device).to(torch.float64) - torch.floor((side - wanted) / 2)
        inside = (target >= 0) & (target < wanted)
        step, source = had / wanted, places[None, :]
        begin = target[:, None] * step
        area = torch.clamp(torch.minimum(begin + step, source + 1) - torch.maximum(begin, source), min=0.0) / step
        centre = begin + step / 2 - 0.5
        grown = self._cubic(centre, source, had) if self.cubic else self._linear(centre, source, had)
        weights = torch.where(step >= 1, area, grown)
        return torch.where(inside[:, None], weights, torch.zeros_like(weights)).to(torch.float32), inside

    @staticmethod
    def _linear(centre: Tensor, source: Tensor, had: Tensor) -> Tensor:
        held = torch.minimum(torch.clamp(centre, min=0.0), had - 1)  # at the border its own pixel is repeated
        return torch.clamp(1 - (source - held).abs(), min=0.0)

    @staticmethod
    def _cubic(centre: Tensor, source: Tensor, had: Tensor) -> Tensor:
        first = torch.floor(centre)
        part = centre - first
        weights = torch.zeros_like(centre * source)
        for tap in (-1, 0, 1, 2):
            away = (tap - part).abs()
            near = ((_CUBIC + 2) * away - (_CUBIC + 3)) * away * away + 1
            far = ((_CUBIC * away - 5 * _CUBIC) * away + 8 * _CUBIC) * away - 4 * _CUBIC
            place = torch.minimum(torch.clamp(first + tap, min=0.0), had - 1)
            weights = weights + torch.where(away <= 1, near, far) * (source == place)
        return weights


def refuse_fit(contract: Contract, dtype: str) -> None:
    """What a graph does not take in by itself.

    Raises:
        RecipeError: windows, of which the contract says how many, or numbers that are no bytes.
    """
    if contract.fit not in FITS:
        raise RecipeError(
            f"--with-preprocessing: this run reads images in windows (data.fit: {contract.fit}), and how many depends on the image; "
            "cut them as contract.json says, and export without it"
        )
    if dtype != "uint8":
        raise RecipeError(
            "--with-preprocessing: the graph resizes bytes, and this run's images have more than 8 bits or a number range; make their "
            "pixels as contract.json says, and export without it"
        )


def raw_images(samples: Sequence[Sample], contract: Contract) -> Iterator[tuple[Sample, np.ndarray]]:
    """(sample, (height, width, channels) bytes) of those that can be read, decoded whole, with the model's number of channels."""
    for sample in samples:
        try:
            array = decode(sample.path, max_pixels=contract.max_pixels, background=contract.background, region=sample.region)
        except DataError:
            continue
        array = np.repeat(array, contract.channels, axis=2) if array.shape[2] == 1 < contract.channels else array
        if array.dtype == np.uint8 and array.shape[2] == contract.channels:
            yield sample, np.ascontiguousarray(array)


@dataclass(frozen=True, slots=True)
class PixelComparison:
    """Resizing in a graph against opencv's.

    Attributes:
        num_images: that were compared.
        largest: difference of a value, in levels of 255.
        share: of values that differ.
    """

    num_images: int
    largest: int
    share: float


def compare_pixels(fit: FitPixels, images: Sequence[np.ndarray], contract: Contract) -> PixelComparison:
    """The module's pixels and those that training made, of the same decoded images."""
    preprocess = contract.preprocess()
    largest, differing, total = 0, 0, 0
    for array in images:
        with torch.no_grad():
            given = fit(torch.from_numpy(array)[None])[0].numpy().astype(np.int16)
        away = np.abs(given - preprocess(array).astype(np.int16))
        largest, differing, total = max(largest, int(away.max())), differing + int((away > 0).sum()), total + away.size
    return PixelComparison(len(images), largest, differing / max(1, total))
