"""Bootstrap intervals, against closed forms and torchmetrics."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hiresvis.recipe.tasks import METRICS
from hiresvis.train.intervals import _TALLIES, RANKED, intervals, told_with_interval
from hiresvis.train.metrics import compute_metrics

Z = NormalDist().inv_cdf(0.975)


def predictions(task: str, num_images: int, num_outputs: int, seed: int, steps: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Better than chance, with ties among the scores."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(num_images, num_outputs, generator=generator)
    if task == "classify":
        targets = torch.randint(0, num_outputs, (num_images,), generator=generator)
        scores = (2 * noise * steps).round() / steps + torch.eye(num_outputs)[targets]
        return scores / scores.sum(1, keepdim=True).clamp(min=1e-3), targets
    if task == "multilabel":
        targets = (noise < 0.3).double()
        rough = (targets.float() + 2 * torch.rand(num_images, num_outputs, generator=generator)) / 3
        return (rough * steps).round() / steps, targets
    targets = noise.double() * 1e3 + 1e6
    return targets + torch.randn(num_images, num_outputs, generator=generator) * 200, targets


def right_and_wrong(num_right: int, num_wrong: int) -> tuple[torch.Tensor, torch.Tensor]:
    targets = torch.tensor([0] * num_right + [1] * num_wrong)
    return torch.tensor([[0.9, 0.1]]).repeat(len(targets), 1), targets


@pytest.mark.parametrize("num_right", [340, 200, 388])
def test_the_interval_of_accuracy_is_the_closed_form(num_right):
    """Of 400 images: within 0.006 of Wilson's interval and of the normal one, from which it differs by their own difference."""
    found = intervals("classify", *right_and_wrong(num_right, 400 - num_right), names=("accuracy",))["accuracy"]
    share, n = num_right / 400, 400
    half = Z * math.sqrt(share * (1 - share) / n)
    middle, wilson = (share + Z**2 / (2 * n)) / (1 + Z**2 / n), Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n * n)) / (1 + Z**2 / n)
    assert found == pytest.approx((middle - wilson, middle + wilson), abs=0.006)
    assert found == pytest.approx((share - half, share + half), abs=0.004)


def test_the_interval_of_an_error_is_the_closed_form():
    """The mean absolute error of 400 images: a normal interval by the deviation of the errors."""
    scores, targets = predictions("regress", 400, 1, seed=0)
    errors = (scores - targets).abs()
    half = Z * errors.std().item() / math.sqrt(400)
    low, high = intervals("regress", scores, targets, names=("mae",))["mae"]
    assert (low, high) == pytest.approx((errors.mean().item() - half, errors.mean().item() + half), abs=half / 10)


def test_images_of_a_group_are_one_draw():
    """Each of 80 images five times over: by image the interval looks sqrt(5) times as sure, by group it is that of the 80."""
    scores, targets = right_and_wrong(60, 20)
    once = intervals("classify", scores, targets, names=("accuracy",))["accuracy"]
    groups = [f"patient {number}" for number in range(80) for _ in range(5)]
    many = scores.repeat_interleave(5, 0), targets.repeat_interleave(5)
    grouped = intervals("classify", *many, names=("accuracy",), groups=groups)["accuracy"]
    assert grouped == pytest.approx(once)
    low, high = intervals("classify", *many, names=("accuracy",))["accuracy"]
    assert (high - low) * math.sqrt(5) == pytest.approx(grouped[1] - grouped[0], rel=0.1)


@given(st.sampled_from(sorted(METRICS)), st.integers(2, 40), st.integers(2, 5), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_counting_every_image_once_gives_the_metrics(task, num_images, num_outputs, seed):
    """All metrics as formulas of counts, with ties and absent classes: those that are told, to float32's digits; counting each image twice
    changes none; counting one twice is having it twice."""
    if task not in _TALLIES:
        return
    scores, targets = predictions(task, num_images, num_outputs, seed, steps=4)
    names = METRICS[task]
    counts = np.ones((num_images, 3))
    counts[:, 1], counts[0, 2] = 2, 2
    found = _TALLIES[task](scores.double().numpy(), targets.numpy(), names)(counts)
    metrics = compute_metrics(task, scores, targets)
    more = compute_metrics(task, torch.cat([scores, scores[:1]]), torch.cat([targets, targets[:1]]))
    for name in names:
        told = [metrics[name], metrics[name], more[name]]
        assert found[name] == pytest.approx(told, rel=1e-5, abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize("task", ["classify", "multilabel", "regress"])
def test_intervals_hold_the_metric_and_come_again(task):
    """Of every metric of the task; the same digits each time, narrower for more images; nothing random outside is touched."""
    names = METRICS[task]
    small, large = (predictions(task, count, 3, seed=1) for count in (100, 1600))
    before = np.random.get_state()[1].copy()
    found = intervals(task, *small, names=names)
    assert np.array_equal(before, np.random.get_state()[1])
    assert intervals(task, *small, names=names) == found
    narrower = intervals(task, *large, names=names)
    metrics = compute_metrics(task, *small)
    for name in names:
        assert found[name][0] < metrics[name] < found[name][1]
        assert narrower[name][1] - narrower[name][0] < 0.5 * (found[name][1] - found[name][0])


def test_what_cannot_be_drawn_has_no_interval():
    """One image, one group; a metric that most draws do not have; ranks of more than a million scores, where the others are told."""
    scores, targets = right_and_wrong(5, 0)
    assert intervals("classify", scores[:1], targets[:1], names=("accuracy",)) == {}
    assert intervals("classify", scores, targets, names=("accuracy",), groups=["a"] * 5) == {}
    assert intervals("classify", scores, targets, names=("accuracy", "auroc")) == {"accuracy": (1.0, 1.0)}
    many = predictions("classify", 2000, 600, seed=2)
    assert set(intervals("classify", *many, names=("accuracy", "auroc"))) == {"accuracy"}


def test_ranks_are_told_where_they_decide():
    """They cost a pass for each class; the others always have their interval."""
    assert told_with_interval("multilabel", "map") == ("map", "macro_f1", "accuracy")
    assert told_with_interval("multilabel", "accuracy") == ("macro_f1", "accuracy")
    assert set(told_with_interval("classify", "kappa")) == set(METRICS["classify"]) - set(RANKED)
    assert told_with_interval("regress", "mae") == METRICS["regress"]
