"""Images that an export is compared on: however many and large they are, few of them are in memory."""

from __future__ import annotations

import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hiresvis import export
from hiresvis.data.contract import Contract
from hiresvis.data.sources import Sample
from hiresvis.data.transforms import Scale

SIDE_PX, COUNT = 400, 30
IMAGE_BYTES = SIDE_PX * SIDE_PX * 3
CONTRACT = Contract(
    classes=("a", "b"),
    image_size=(SIDE_PX, SIDE_PX),
    fit="resize",
    background=(0, 0, 0),
    channels=3,
    scale=Scale(),
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    interpolation="bilinear",
    max_pixels=10**6,
)


@pytest.fixture
def samples(tmp_path: Path) -> list[Sample]:
    for number in range(COUNT):
        Image.fromarray(np.full((SIDE_PX, SIDE_PX, 3), number, np.uint8)).save(tmp_path / f"{number}.png")
    return [Sample(tmp_path / f"{number}.png", 0, "") for number in range(COUNT)]


@pytest.mark.parametrize("whole", [True, False])
def test_images_to_compare_8_bits_on_come_one_batch_at_a_time(samples: list[Sample], whole: bool) -> None:
    """Each image once and in order, without the others being held, whole as well as resized."""
    seen, alive = list[int](), list[Any]()
    tracemalloc.start()  # which knows of NumPy's memory, and not of torch's
    for pixels in export._one_by_one(samples, CONTRACT, "uint8", whole=whole):
        alive.append(weakref.ref(pixels))
        assert sum(one() is not None for one in alive) <= 2
        assert pixels.dtype == torch.uint8
        seen += pixels[:, 0, 0, 0].tolist()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seen == list(range(COUNT))
    assert peak < COUNT / 3 * IMAGE_BYTES


def test_what_is_held_is_bounded_by_bytes(samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer images where they are larger, and one in any case."""
    for held_bytes, count in ((3.5 * IMAGE_BYTES, 3), (IMAGE_BYTES - 1, 1), (100 * IMAGE_BYTES, COUNT)):
        monkeypatch.setattr(export, "_HELD_BYTES", held_bytes)
        read = iter(export.raw_images(samples, CONTRACT))
        assert len(export._held(read, lambda pair: pair[1].nbytes)) == count
        assert len(list(read)) == max(0, COUNT - count - 1), "no more are read than it takes to know"
