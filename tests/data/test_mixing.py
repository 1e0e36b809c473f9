"""Mixed images and labels follow from seeds alone, whatever the micro-batch, and shares are those of the pixels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from hiresvis.data.augment import make_augment
from hiresvis.data.loader import TrainLoader
from hiresvis.data.mixing import Mixing
from hiresvis.data.sources import Sample
from hiresvis.data.transforms import Pipeline, Preprocess
from hiresvis.errors import DataError

SIZE = (24, 32)
BOTH = Mixing(0.4, 1.0, 3)


@pytest.fixture
def samples(tmp_path: Path, save_image: Callable[..., Path]) -> tuple[Sample, ...]:
    """Eleven different images of three classes."""
    paths = [save_image(tmp_path / f"{index:02d}.png", seed=index) for index in range(11)]
    return tuple(Sample(path, index % 3, f"t.csv:{index + 2}", None, path.name) for index, path in enumerate(paths))


def epoch(samples, mixing: Mixing | None, *, number: int = 1, first: int = 0, augment: str = "none", **options):
    """{index: (image, target)} and the indices of each batch."""
    pipeline = Pipeline(Preprocess(SIZE), make_augment(augment, image_size=SIZE))
    loader = TrainLoader(samples, pipeline, **{"max_pixels": 10**6, "batch": 4, "micro_batch": 3, "seed": 5, "mixing": mixing, **options})
    seen, batches = {}, {}
    with closing(loader):
        loader.set_epoch(number, first)
        for item in loader:
            batches.setdefault(item.batch_index, []).extend(item.indices)
            for image, target, index in zip(item.images, item.targets, item.indices, strict=True):
                seen[index] = (image.clone(), target.clone())
    return seen, batches


@pytest.mark.parametrize("options", [{"micro_batch": 1}, {"micro_batch": 4}, {"workers": 2}, {"workers": 1, "micro_batch": 2}])
def test_a_mixed_batch_is_the_same_however_it_is_cut_and_read(samples, options):
    """Micro-batches of one image are mixed as whole batches are, in any number of processes."""
    plain, mixed = (epoch(samples, BOTH, augment="standard", **given)[0] for given in ({}, options))
    assert plain.keys() == mixed.keys()
    assert all(torch.equal(plain[index][part], mixed[index][part]) for index in plain for part in (0, 1))


def test_a_resumed_epoch_is_mixed_as_the_whole_one(samples):
    """From the second batch on the images are those of the epoch that began at the first."""
    whole, (rest, batches) = epoch(samples, BOTH)[0], epoch(samples, BOTH, first=1)
    assert sorted(batches) == [1, 2]
    assert all(torch.equal(whole[index][part], rest[index][part]) for index in rest for part in (0, 1))


def test_an_image_is_mixed_with_the_one_before_it_in_its_batch_by_the_share_of_its_label(samples):
    """Pixels and labels have the same share, and nothing comes from another batch."""
    (plain, _), (mixed, batches) = epoch(samples, None), epoch(samples, Mixing(1.0, 0.0, 3))
    shares = []
    for members in batches.values():
        for place, index in enumerate(members):
            before = members[place - 1]
            (image, target), own, other = mixed[index], plain[index][0].double(), plain[before][0].double()
            assert float(target.sum()) == pytest.approx(1)
            if samples[index].label != samples[before].label:
                share = float(target[samples[index].label])
                assert float(target[samples[before].label]) == pytest.approx(1 - share)
                assert torch.allclose(image.double(), share * own + (1 - share) * other, atol=0.51), "rounded to a whole number"
                shares.append(share)
    assert len(set(shares)) > 5, "each image has its own share"


def test_cutmix_shares_labels_by_the_pixels_that_were_taken(picture):
    """The share is what the box leaves, at the border too; the images that came in are as they were."""
    mixing, one, two = Mixing(0.0, 1.0, 2), np.zeros((24, 32, 1), np.uint8), np.full((24, 32, 1), 200, np.uint8)
    shares = []
    for seed in range(200):
        mixed, share = mixing.images(one, two, seed)
        assert share == pytest.approx(float((mixed == 0).mean()))
        assert mixed.shape == one.shape
        shares.append(share)
    assert not one.any()
    assert (two == 200).all()
    assert 0.5 < np.mean(shares) < 0.75, "half by Beta(1, 1), and more where the border cuts the box"


def test_mixup_shares_are_those_of_the_beta_distribution(picture):
    """Beta(a, a) has mean 1/2 and variance 1 / (8 a + 4)."""
    image = picture(4, 4)
    shares = [Mixing(0.3, 0.0, 2).images(image, image, seed)[1] for seed in range(4000)]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.03)
    assert np.var(shares) == pytest.approx(1 / (8 * 0.3 + 4), abs=0.01)


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("kinds", [(np.uint8, np.uint8), (np.float32, np.float32), (np.uint8, np.float32)])
def test_bytes_and_floats_of_any_channels_are_mixed(picture, channels, kinds):
    """Bytes stay bytes; a deep image beside an 8-bit one makes both floats in 0 to 1, as in a batch."""
    arrays = [picture(24, 32, channels, seed) for seed in (1, 2)]
    given = [array if kind is np.uint8 else array.astype(np.float32) / 255 for array, kind in zip(arrays, kinds, strict=True)]
    mixed, share = Mixing(1.0, 0.0, None).images(*given, seed=3)
    expected = share * arrays[0] + (1 - share) * arrays[1].astype(np.float64)
    assert mixed.dtype == (np.uint8 if set(kinds) == {np.uint8} else np.float32)
    assert np.allclose(mixed if mixed.dtype == np.uint8 else mixed * 255.0, expected, atol=0.51)


def test_rows_of_labels_are_mixed_as_they_are():
    """Several classes, or numbers, mix value by value."""
    assert Mixing(1.0, 0.0, None).label((1.0, 0.0), (0.0, 5.0), 0.75) == (0.75, 1.25)


def test_a_partner_that_cannot_be_read_leaves_the_image_as_it_is_or_ends_the_run(samples):
    """With bad_images skip its neighbour is not mixed, and it is told once; else its error names it."""
    plain, batches = epoch(samples, None)
    members = next(members for members in batches.values() if 4 in members)
    samples[4].path.write_bytes(samples[4].path.read_bytes()[:60])
    mixed, _ = epoch(samples, Mixing(1.0, 0.0, 3), bad_images="skip", micro_batch=1)
    after = members[(members.index(4) + 1) % len(members)]
    assert 4 not in mixed
    assert torch.equal(mixed[after][0], plain[after][0])
    assert mixed[after][1].tolist() == [float(samples[after].label == number) for number in range(3)]
    with pytest.raises(DataError, match=r"04\.png"):
        epoch(samples, Mixing(1.0, 0.0, 3))
