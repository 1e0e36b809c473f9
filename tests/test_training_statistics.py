"""What is kept of a training set, and how far single images and batches lie from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiresvis.data.contract import Contract
from hiresvis.data.transforms import Scale
from hiresvis.drift import Watch
from hiresvis.errors import DataError, RunFolderError
from hiresvis.run import RunDirectory
from hiresvis.training_statistics import STATISTICS, Described, Describer, TrainingStatistics, describe_pixels, summarise, usual_limit

CONTRACT = Contract(
    classes=("a", "b"),
    image_size=(64, 64),
    fit="resize",
    background=(0, 0, 0),
    channels=3,
    scale=Scale(),
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    interpolation="bilinear",
    max_pixels=10_000,
)
SIZES = [(64, 64), (128, 128)]
NUM_FEATURES = 40


def drawn(count: int, seed: int, *, shift: float = 0.0, dark: float = 0.0, features: int = NUM_FEATURES) -> list[Described]:
    """Images of one kind: correlated features with heavy columns, pixels as boards may have them."""
    rng = np.random.default_rng(seed)
    scale = np.random.default_rng(0).lognormal(0, 1, features)
    common = rng.normal(0, 1, (count, 1))
    values = np.maximum(0, (rng.normal(shift, 1, (count, features)) + 0.5 * common) * scale)
    bright = rng.normal(0.5 - dark, 0.08, (count, 1))
    pixels = np.concatenate(
        [bright + rng.normal(0, 0.02, (count, 3)), rng.normal(-1.5, 0.2, (count, 3)), rng.normal(-3, 0.2, (count, 1))], 1
    )
    return [Described(*pair) for pair in zip(pixels, values, strict=True)]


def again(kept: TrainingStatistics) -> TrainingStatistics:
    """Written and read; JSON that has no words for what is no number."""
    return TrainingStatistics.from_json(json.loads(json.dumps(kept.to_json(), allow_nan=False)), CONTRACT, NUM_FEATURES)


def watched(kept: TrainingStatistics, images: list[Described]) -> tuple[Watch, list[float]]:
    watch = Watch(kept, CONTRACT)
    return watch, [watch.add(f"{place}.png", SIZES[0], image) or 0.0 for place, image in enumerate(images)]


@pytest.mark.parametrize("held_out", [12, 100, 400])
def test_few_images_of_the_same_kind_are_far(held_out):
    """One in a hundred by each of two distances is what a limit means; with few held-out images it is not more, since the limit is wide."""
    rates = []
    for seed in range(16):
        kept = summarise(drawn(150, 3 * seed), drawn(held_out, 3 * seed + 1), SIZES, CONTRACT)
        rates += watched(kept, drawn(100, 3 * seed + 2))[1]
    share = np.mean(np.array(rates) > 1)
    assert 0.002 < share < 0.035, share


def test_a_batch_of_the_same_kind_is_no_difference_and_another_kind_is():
    """Eight batches of the same kind are told to be so; darker ones differ in brightness, others in features, with their medians."""
    kept = summarise(drawn(200, 0), drawn(80, 1), SIZES, CONTRACT)
    told = [[*watched(kept, drawn(60, seed))[0].lines("again")] for seed in range(10, 18)]
    assert not [line for lines in told for line in lines if "differs" in line]
    assert "drift: as a whole they do not differ from the training images (4 tests)" in told[0]
    darker = watched(kept, drawn(60, 5, dark=0.2))[0]
    (one,) = (one for one in darker.differences() if one.kind == "brightness")
    assert (one.median, one.usual) == (pytest.approx(0.3, abs=0.03), pytest.approx(0.5, abs=0.03))
    dark = [*darker.lines("evaluate RUN")]
    assert any(line.startswith(f"drift: as a whole the brightness differs: median {one.median:.3g}, in training") for line in dark), dark
    assert dark[-1].endswith("label some, and run evaluate RUN")
    other = watched(kept, drawn(60, 6, shift=3.0))
    assert np.mean(np.array(other[1]) > 1) > 0.9
    assert any("as a whole the distance of features differs" in line for line in other[0].lines(""))
    first = next(other[0].lines(""))
    assert first.startswith(f"drift: {sum(drift > 1 for drift in other[1])} of 60 images (")
    worst = int(np.argmax(other[1]))
    assert f"farthest: {worst}.png {other[1][worst]:.1f}, " in first


def test_of_many_images_a_difference_too_small_to_matter_is_not_told():
    """2,000 images a tenth of a deviation darker are significantly so; the distributions hardly lie apart."""
    kept = summarise(drawn(400, 0), drawn(100, 1), SIZES, CONTRACT)
    watch, _ = watched(kept, drawn(2000, 2, dark=0.02))
    assert min(one.p_value for one in watch.differences()) < 1e-3
    assert not any("differs" in line for line in watch.lines(""))


def test_few_predictions_are_not_compared_and_none_are_not_told():
    """Seven images say nothing of a batch."""
    kept = summarise(drawn(100, 0), drawn(50, 1), SIZES, CONTRACT)
    watch, _ = watched(kept, drawn(7, 2))
    assert watch.differences() == []
    assert len([*watch.lines("")]) == 1
    assert [*Watch(kept, CONTRACT).lines("")] == []


def test_another_scale_is_told_with_both():
    """Training's images had 1 to 2 stored pixels to one of the model's; 640 px are 10, in which things are of another size."""
    kept = summarise(drawn(100, 0), drawn(50, 1), SIZES, CONTRACT)
    watch = Watch(kept, CONTRACT)
    for place, image in enumerate(drawn(9, 2)):
        watch.add("", (640, 640) if place < 3 else (100, 100), image)
    lines = [*watch.lines("")]
    assert any("3 of 9 images have 10 stored pixels to one of the model's, and in training it was 1 to 2" in line for line in lines), lines


def test_features_that_are_no_numbers_have_no_drift():
    """A network that has diverged is its own error."""
    kept = summarise(drawn(100, 0), drawn(50, 1), SIZES, CONTRACT)
    image = drawn(1, 2)[0]
    assert Watch(kept, CONTRACT).add("", None, replace(image, features=image.features * np.nan)) is None


@pytest.mark.parametrize("count", [0, 1])
def test_without_held_out_images_pixels_alone_are_judged(count):
    """Features of images that were trained on are too close to say what is usual."""
    kept = summarise(drawn(100, 0), drawn(count, 1), SIZES, CONTRACT)
    assert kept.limits["features"] is None
    assert kept.limits["pixels"] is not None
    assert watched(kept, drawn(1, 2, dark=0.5))[1][0] > 1


def test_images_that_are_all_alike_and_a_model_without_features_are_judged_by_pixels():
    """No variance is no division by zero."""
    one = drawn(1, 0)[0]
    for features in (one.features, one.features[:0]):
        kept = summarise([replace(one, features=features)] * 5, [replace(one, features=features)] * 3, SIZES[:1], CONTRACT)
        assert len(kept.feature_mean) == 0
        assert watched(kept, [replace(one, features=features)])[1] == [pytest.approx(0, abs=1)]
        assert watched(kept, [replace(one, features=features, pixels=one.pixels - 0.5)])[1][0] > 1
        assert again(kept).limits == kept.limits


def test_statistics_come_back_from_their_file(tmp_path: Path):
    """The same drift within what is rounded away; and the file says in words' stead what people ask of a data set."""
    kept = summarise(drawn(700, 0), drawn(90, 1), SIZES, CONTRACT)
    run = RunDirectory(tmp_path)
    assert TrainingStatistics.read(run, CONTRACT, NUM_FEATURES) is None
    run.write_json(STATISTICS, kept.to_json())
    read = TrainingStatistics.read(run, CONTRACT, NUM_FEATURES)
    assert read is not None
    images = drawn(30, 2)
    assert watched(read, images)[1] == pytest.approx(watched(kept, images)[1], rel=1e-4)
    stored = json.loads((tmp_path / STATISTICS).read_text())
    assert (stored["images"], stored["held_out"], stored["sizes"]["height"]) == (700, 90, [64.0, 67.2, 96.0, 124.8, 128.0])
    assert [channel["brightness"]["mean"] for channel in stored["channels"]] == pytest.approx([0.5] * 3, abs=0.02)
    assert {len(values) for values in stored["compared"].values()} == {90, 500}


WHOLE = summarise(drawn(20, 0), drawn(9, 1), SIZES, CONTRACT).to_json()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"version": 2}, "version 2, and this release reads 1"),
        ({"features": {"mean": [1.0], "variance": []}}, r"means of \(1,\) features, and variances of \(0,\)"),
        ({"features": {"mean": [1.0] * 5, "variance": [1.0] * 5}}, "5 features, and this run's classifier is given 40"),
        ({"features": {"mean": [1.0] * 40, "variance": [1.0] * 39 + [0.0]}}, "features whose variances are not all above 0"),
        ({"features": {"mean": [1.0] * 40, "variance": [1.0] * 39 + [None]}}, "features whose variances are not all above 0"),
        ({"limits": {}}, "no statistics as a run writes them"),
        ({"limits": {"pixels": 0.0, "features": 1.0}}, "a limit of 0 for pixels, and it is above 0"),
        ({"limits": {"pixels": 1.0, "features": -2.5}}, "a limit of -2.5 for features"),
        ({"limits": {"pixels": "1", "features": 1.0}}, "no statistics as a run writes them"),
        ({"sizes": None}, "no statistics as a run writes them"),
        ({"sizes": {**WHOLE["sizes"], "shrink": None}}, "no statistics as a run writes them"),
        ({"sizes": {**WHOLE["sizes"], "shrink": [1.0]}}, "1 quantiles of shrink, and they are 5 numbers above 0"),
        ({"sizes": {**WHOLE["sizes"], "height": [0.0] * 5}}, "5 quantiles of height, and they are 5 numbers above 0"),
        ({"pixels": {"mean": [0.5], "covariance": [[1.0]]}}, r"pixels of \(1,\) and \(1, 1\) numbers, and images of 3 channels have 7"),
        ({"pixels": {"mean": [0.5] * 7, "covariance": [[0.0] * 7] * 7}}, "pixels whose mean and covariance are none"),
        ({"pixels": {"mean": [0.5] * 6 + [None], "covariance": np.eye(7).tolist()}}, "pixels whose mean and covariance are none"),
        ({"compared": {**WHOLE["compared"], "detail": [1.0, float("nan")]}}, "detail to compare with that are not finite"),
        (
            {"limits": {"pixels": 0, "features": 0}, "sizes": {**WHOLE["sizes"], "width": [1.0]}},
            "for pixels, .*for features, .* 1 quantiles of width",
        ),
    ],
)
def test_a_file_that_is_not_this_runs_is_refused_when_it_is_read(tmp_path: Path, damage, said):
    """Nobody is told a drift that is none, and nothing fails with the first image; all that is wrong is said at once."""
    run = RunDirectory(tmp_path)
    (tmp_path / STATISTICS).write_text(json.dumps({**WHOLE, **damage}))
    with pytest.raises(RunFolderError, match=f"cannot be used: .*{said}.*; put it back as the run wrote it"):
        TrainingStatistics.read(run, CONTRACT, NUM_FEATURES)


@given(st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)), st.sets(st.integers(0, 5)), st.sampled_from([np.nan, np.inf, -np.inf]))
def test_what_is_no_number_is_left_out_of_a_runs_own_file(pixels, features, held_out, value):
    """Half precision may overflow in any images: the file can be read again, and has limits of the others."""

    def spoilt(images, pixels, features):
        return [
            Described(image.pixels + (value if place in pixels else 0.0), image.features + (value if place in features else 0.0))
            for place, image in enumerate(images)
        ]

    train, others = spoilt(drawn(12, 0), pixels, features), spoilt(drawn(6, 1), {3}, held_out)
    if len(pixels) > 10:
        with pytest.raises(DataError, match=r"of 12 images of train have pixels that are numbers"):
            summarise(train, others, SIZES, CONTRACT)
        return
    kept = again(summarise(train, others, SIZES, CONTRACT))
    assert (kept.images, kept.held_out) == (12 - len(pixels), 5)
    assert len(kept.feature_mean) == (NUM_FEATURES if 12 - len(pixels | features) >= 2 else 0)
    assert kept.limits["pixels"] is not None
    assert (kept.limits["features"] is not None) == (len(kept.feature_mean) > 0 and 6 - len(held_out | {3}) >= 2)


def test_a_limit_is_that_of_normal_logarithms():
    """Of many distances near their 99th percentile; of few it is wider; of fewer than two there is none."""
    distances = np.random.default_rng(3).lognormal(0.3, 0.2, 100_000)
    exact = np.exp(0.3 + 2.3263 * 0.2)
    assert usual_limit(distances) == pytest.approx(exact, rel=0.01)
    few = [usual_limit(part) for part in distances[:20_000].reshape(2000, 10)]
    assert np.mean([(distances > limit).mean() for limit in few]) == pytest.approx(0.01, rel=0.2)
    assert usual_limit([1.0]) is usual_limit([]) is None


def test_pixels_are_read_alike_from_bytes_and_floats():
    """Brightness, contrast and detail by hand, of an image with a step in one channel; a small one and one of one pixel too."""
    image = np.zeros((4, 6, 3), np.uint8)
    image[:, 3:, 0] = 255
    found = Described(describe_pixels(image), np.empty(0))
    assert found.readings == pytest.approx({"brightness": 1 / 6, "contrast": 1 / 6, "detail": (1 / 3) / 5 / 2}, abs=1e-6)
    assert describe_pixels(image.astype(np.float32) / 255) == pytest.approx(found.pixels, abs=1e-6)
    assert np.isfinite(describe_pixels(image[:1, :1])).all()


def test_an_image_in_windows_is_described_when_its_last_has_come():
    """By the mean of its windows, whatever batches they come in."""
    rng, describer = np.random.default_rng(0), Describer()
    images, features = rng.integers(0, 256, (5, 8, 8, 3), dtype=np.uint8), torch.rand(5, 4)
    found = []
    for rows in ([0, 1], [2, 3, 4]):
        indices, counts = tuple((0, 1, 1, 1, 2)[row] for row in rows), tuple((1, 3, 3, 3, 1)[row] for row in rows)
        item = SimpleNamespace(images=torch.from_numpy(images[rows]), indices=indices, num_windows=counts, targets=torch.zeros(len(rows)))
        found.append([*describer.add(item, features[rows])])
    assert [[index for index, _ in part] for part in found] == [[0], [1, 2]]
    middle = found[1][0][1]
    assert middle.pixels == pytest.approx(np.mean([describe_pixels(image) for image in images[1:4]], axis=0))
    assert middle.features == pytest.approx(features[1:4].double().mean(dim=0).numpy())
