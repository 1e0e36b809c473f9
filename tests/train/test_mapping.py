"""Maps of inputs brought back to whole images: the right pixel, the right mean, and never much at once."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hiresvis.data.transforms import Preprocess
from hiresvis.train import mapping
from hiresvis.train.mapping import MapJoin

K = 3


def items(preprocess: Preprocess, sizes: list[tuple[int, int]], batch: int, masks: list[np.ndarray] | None = None) -> list[SimpleNamespace]:
    """What a loader gives of images of these sizes, in batches across images."""
    rows = []
    for index, size in enumerate(sizes):
        count = preprocess.num_windows(*size)
        rows += [(index, preprocess.place(*size, number), count) for number in range(count)]
    found = []
    for start in range(0, len(rows), batch):
        indices, places, counts = zip(*rows[start : start + batch], strict=True)
        truths = (
            () if masks is None else tuple(torch.from_numpy(masks[i][p.part.slices].copy()) for i, p in zip(indices, places, strict=True))
        )
        images = torch.zeros(len(indices), *preprocess.image_size, 3)
        found.append(SimpleNamespace(images=images, indices=indices, places=places, num_windows=counts, truths=truths))
    return found


def joined(join: MapJoin, loaded: list[SimpleNamespace], maps: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """(k, height, width) of each image, its strips held to come whole, in order and once."""
    strips: dict[int, list[mapping.Strip]] = {}
    for item, outputs in zip(loaded, maps, strict=True):
        for strip in join.add(item, outputs):
            before = strips.setdefault(strip.index, [])
            assert strip.top == sum(one.logits.shape[1] for one in before)
            assert not any(one.is_last for one in before)
            before.append(strip)
    assert all(found[-1].is_last for found in strips.values())
    return {index: torch.cat([strip.logits for strip in found], dim=1) for index, found in strips.items()}


@pytest.mark.parametrize("values", [2**22, 200, 1])
def test_a_resized_image_is_interpolated_once_to_its_own_size(monkeypatch: pytest.MonkeyPatch, values: int) -> None:
    """As torch's bilinear interpolation gives it, larger and smaller, in strips of whatever height."""
    monkeypatch.setattr(mapping, "STRIP_VALUES", values)
    sizes = [(37, 53), (9, 70), (16, 16)]
    loaded = items(Preprocess((16, 16)), sizes, 2)
    maps = [torch.randn(len(item.indices), K, 4, 4) for item in loaded]
    found = joined(MapJoin(), loaded, maps)
    for number, size in enumerate(sizes):
        wanted = F.interpolate(torch.cat(maps)[number][None], size=size, mode="bilinear", align_corners=False)[0]
        assert torch.allclose(found[number], wanted, atol=1e-5)


def test_of_a_letterboxed_image_the_padding_is_left_out() -> None:
    """A map that is a ramp over the input is a ramp over the part that the image takes up."""
    preprocess = Preprocess((64, 64), "letterbox")
    loaded = items(preprocess, [(40, 160)], 1)
    rows = torch.arange(64.0) + 0.5  # the input's pixels, at stride 1
    maps = [rows[None, None, :, None].expand(1, K, 64, 64)]
    found = joined(MapJoin(), loaded, maps)[0]
    content = preprocess.place(40, 160).content
    wanted = content.y + (torch.arange(40) + 0.5) * content.height / 40
    inside = (wanted > 1) & (wanted < 63)
    assert torch.allclose(found[0, inside, 0], wanted[inside], atol=1e-4)


@pytest.mark.parametrize("batch", [1, 3, 100])
@pytest.mark.parametrize("size", [(70, 50), (33, 90), (20, 20), (32, 32), (32, 33)])
def test_windows_are_averaged_where_they_overlap(size: tuple[int, int], batch: int) -> None:
    """Each pixel is the mean over the windows that show it, whatever the batch; a smaller image is one window without its padding."""
    preprocess = Preprocess((32, 32), "tile")
    loaded = items(preprocess, [size, (70, 50), size], batch)
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(sum(len(item.indices) for item in loaded), K, 32, 32, generator=generator)
    maps = list(flat.split([len(item.indices) for item in loaded]))
    found = joined(MapJoin(), loaded, maps)
    total, count = torch.zeros(K, *size), torch.zeros(*size)
    for number in range(preprocess.num_windows(*size)):
        place = preprocess.place(*size, number)
        total[(slice(None), *place.part.slices)] += flat[number][(slice(None), *place.content.slices)]
        count[place.part.slices] += 1
    assert torch.allclose(found[0], total / count, atol=1e-5)
    assert found[2].shape == (K, *size)


def test_truths_of_windows_come_together_to_the_mask() -> None:
    """Row by row beside the logits that they belong to."""
    preprocess, mask = Preprocess((32, 32), "tile"), np.random.default_rng(0).integers(0, 3, (75, 61), dtype=np.uint8)
    loaded, join = items(preprocess, [(75, 61)], 2, [mask]), MapJoin()
    strips = [strip for item in loaded for strip in join.add(item, torch.zeros(len(item.indices), K, 8, 8))]
    assert torch.cat([strip.truth for strip in strips]).tolist() == mask.tolist()
    assert max(strip.logits.shape[1] for strip in strips) <= 32


def test_an_image_with_a_missing_window_is_never_completed() -> None:
    """And the next image is whole all the same."""
    preprocess = Preprocess((32, 32), "tile")
    first, second = items(preprocess, [(70, 50), (70, 50)], 6)
    keep = [0, 1, 3, 4, 5]
    broken = SimpleNamespace(
        images=first.images[keep],
        **{name: tuple(getattr(first, name)[row] for row in keep) for name in ("indices", "places", "num_windows")},
        truths=(),
    )
    join = MapJoin()
    strips = [strip for item in (broken, second) for strip in join.add(item, torch.zeros(len(item.indices), K, 8, 8))]
    assert [strip.index for strip in strips if strip.is_last] == [1]
