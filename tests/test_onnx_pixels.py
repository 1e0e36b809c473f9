"""Resizing as matrix products gives the bytes that training saw, and an ONNX graph of it takes images of any size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch

from hiresvis.data.contract import Contract
from hiresvis.data.transforms import Scale
from hiresvis.errors import RecipeError
from hiresvis.onnx_graph import Graph, write_onnx
from hiresvis.onnx_pixels import BOUND_LEVELS, FitPixels, compare_pixels, refuse_fit

CONTRACT = Contract(
    classes=("a", "b"),
    image_size=(48, 64),
    fit="resize",
    background=(250, 100, 5),
    channels=3,
    scale=Scale(),
    mean=(0.3, 0.4, 0.5),
    std=(0.2, 0.3, 0.4),
    interpolation="bilinear",
    max_pixels=10**6,
)
SIZES = [(48, 64), (96, 128), (97, 131), (144, 192), (48, 200), (500, 333), (31, 40), (20, 300), (300, 20), (1, 1), (48, 65), (100, 137)]


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, channels), dtype=np.uint8)


@pytest.mark.parametrize("fit", ["resize", "letterbox"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_pixel_is_opencvs_within_one_level(fit, interpolation, size):
    """Shrinking, growing, one axis each way, padding: on noise, where each neighbour counts."""
    contract = replace(CONTRACT, fit=fit, interpolation=interpolation)
    found = compare_pixels(FitPixels(contract), [noise(*size)], contract)
    assert found.largest <= BOUND_LEVELS
    if size[0] >= 48 and size[1] >= 64:  # averaging alone
        assert found.share < 0.005


def test_another_number_of_channels_has_the_mean_of_the_background():
    """As the contract pads."""
    contract = replace(CONTRACT, channels=1, mean=(0.5,), std=(0.5,), fit="letterbox")
    assert compare_pixels(FitPixels(contract), [noise(30, 200, 1)], contract).largest <= BOUND_LEVELS


@pytest.mark.parametrize(("change", "dtype", "said"), [({"fit": "tile"}, "uint8", "in windows"), ({}, "float32", "more than 8 bits")])
def test_what_a_graph_cannot_take_in_is_refused(change, dtype, said):
    """With the way on."""
    with pytest.raises(RecipeError, match=said):
        refuse_fit(replace(CONTRACT, **change), dtype)


class Means(torch.nn.Module):
    """The mean of each channel, and of each quarter of the first: enough to see every pixel moved."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.stack([images[:, 0].mean(dim=(1, 2)), images[:, 1, :24, :32].mean(dim=(1, 2))], dim=1)


@pytest.mark.parametrize("fit", [pytest.param("resize", marks=pytest.mark.slow), "letterbox"])
def test_one_graph_takes_images_of_any_size_in_any_batch(tmp_path, fit):
    """Sizes that it was not made with, square and not, alone and three at once."""
    contract = replace(CONTRACT, fit=fit)
    graph = Graph(Means(), contract, fits=True).eval()
    batches = [torch.from_numpy(np.stack([noise(97, 131)] * 2)), torch.from_numpy(noise(200, 90)[None])]
    found = write_onnx(graph, batches, tmp_path / "model.onnx", {})
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    assert [str(side) for side in session.get_inputs()[0].shape] == ["batch", "height", "width", "3"]
    plain = Graph(Means(), contract).eval()
    for size in ((48, 64), (96, 128), (31, 40), (300, 301)):
        array = noise(*size)
        (given,) = session.run(["logits"], {"pixels": np.stack([array] * 3)})
        with torch.no_grad():
            wanted, _ = plain(torch.from_numpy(contract.preprocess()(array))[None])
        np.testing.assert_allclose(given, wanted.expand(3, -1), atol=5e-3)  # a level of 255 over a std of 0.2 is 0.02, of each value
    assert found.exporter in ("dynamo", "torchscript")
