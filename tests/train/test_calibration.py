"""Temperature and thresholds, by hand and against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiresvis.train.calibration import (
    LEAST_POSITIVES,
    at_thresholds,
    calibration_error,
    fit_scores,
    fit_temperature,
    fit_thresholds,
    reliability,
)
from hiresvis.train.evaluate import Evaluation
from hiresvis.train.metrics import compute_metrics

SEEDS = st.integers(0, 2**31)


def certain(num_right: int, num_wrong: int, size: float = 8.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two classes, always as sure of the first, which is right so often."""
    targets = torch.tensor([0] * num_right + [1] * num_wrong)
    return torch.tensor([[size, 0.0]]).repeat(len(targets), 1), targets


def test_the_temperature_makes_sureness_what_is_right():
    """Of outputs 8 and 0 of which three in four are right: sigmoid(8 / T) = 3/4, so T = 8 / ln 3; the error is gone."""
    outputs, targets = certain(75, 25)
    temperature, why = fit_temperature(outputs, targets)
    assert temperature == pytest.approx(8 / math.log(3), rel=1e-12)
    assert why == "the likeliest of 100 validation images"
    assert calibration_error(outputs.softmax(1), targets) == pytest.approx(0.25, abs=1e-3)
    assert calibration_error((outputs / temperature).softmax(1), targets) == pytest.approx(0, abs=1e-6)


@given(SEEDS, st.integers(2, 6), st.floats(0.2, 5.0))
def test_the_temperature_is_the_likeliest_and_undoes_a_scale(seed, num_classes, scale):
    """No other on a fine grid has a higher likelihood; outputs times a factor have that times the temperature; no prediction changes."""
    generator = torch.Generator().manual_seed(seed)
    outputs = 3 * torch.randn(400, num_classes, generator=generator, dtype=torch.float64)
    targets = torch.multinomial((outputs / 2).softmax(1), 1, generator=generator).flatten()
    temperature, _ = fit_temperature(outputs, targets)
    assert temperature > 1

    def loss(value: float) -> float:
        return torch.nn.functional.cross_entropy(outputs / value, targets).item()

    assert all(loss(temperature) <= loss(value) + 1e-12 for value in temperature * np.geomspace(0.3, 3, 41))
    again, why = fit_temperature(outputs * (scale / temperature), targets)
    assert "hardly" in why or again == pytest.approx(scale, rel=1e-9)
    assert torch.equal((outputs / temperature).argmax(1), outputs.argmax(1))


def test_a_temperature_without_evidence_is_kept_at_one():
    """All right: none is best. Few images: the likeliest is hardly likelier. As good as chance: no further than 20."""
    assert fit_temperature(*certain(50, 0))[0] == 1
    assert "all of 50 validation images are right" in fit_temperature(*certain(50, 0))[1]
    temperature, why = fit_temperature(*certain(3, 1, size=2.0))  # 2 / ln 3 would be 1.82
    assert (temperature, why) == (1, "kept: 1.82 fits 4 validation images hardly better")
    assert fit_temperature(*certain(300, 100, size=2.0))[0] == pytest.approx(2 / math.log(3))
    assert fit_temperature(*certain(50, 50))[0] == pytest.approx(20)


def test_a_temperature_at_its_bound_says_so():
    """Logits that hardly differ, and are right more often than not: colder still would be likelier."""
    targets = torch.arange(40) % 2
    outputs = torch.zeros(40, 2)
    outputs[torch.arange(40), torch.where(torch.arange(40) < 36, targets, 1 - targets)] = 0.01
    temperature, why = fit_temperature(outputs, targets)
    assert temperature == pytest.approx(0.05)
    assert why.startswith("as far as it may go, of 40 validation images")


def test_outputs_of_any_size_have_a_temperature():
    """Far beyond what an exponential holds, and where the first step of Newton's would leave the bracket."""
    for size in (1e-3, 1.0, 150.0, 1e6):
        temperature, _ = fit_temperature(*certain(900, 100, size=size))
        assert temperature == pytest.approx(min(20.0, max(0.05, size / math.log(9))))


def test_a_threshold_is_where_f1_is_highest_half_way_between_scores():
    """Twelve positives from 0.3 up, negatives below: 0.25 takes all of them and nothing else."""
    positive = torch.linspace(0.3, 0.9, 12)
    scores = torch.cat([positive, torch.tensor([0.2, 0.1, 0.05])])[:, None]
    targets = torch.tensor([1.0] * 12 + [0.0] * 3)[:, None]
    (threshold,) = fit_thresholds(scores, targets)
    assert threshold == pytest.approx(0.25)
    assert compute_metrics("multilabel", at_thresholds(scores, (threshold,)).double(), targets)["macro_f1"] == 1


def test_labels_with_few_positives_keep_a_half():
    """One fewer than ten; labels that all images have as well; and where a half is as good as any."""
    scores = torch.linspace(0.05, 0.45, 40)[:, None].repeat(1, 4)
    scores[:, 3] = torch.cat([torch.linspace(0.05, 0.3, 20), torch.linspace(0.6, 0.9, 20)])
    targets = torch.zeros(40, 4)
    targets[-(LEAST_POSITIVES - 1) :, 0] = 1
    targets[-LEAST_POSITIVES:, 1] = 1
    targets[:, 2] = 1
    targets[20:, 3] = 1
    first, second, third, fourth = fit_thresholds(scores, targets)
    assert (first, third, fourth) == (0.5, 0.5, 0.5)
    assert second < 0.45


@given(SEEDS, st.integers(1, 12))
def test_no_threshold_is_better_than_the_one_chosen(seed, steps):
    """Against all thresholds there are, on scores with ties; the choice does not hang on the order of the images."""
    rng = np.random.default_rng(seed)
    scores = np.round(rng.random(60) * steps) / steps
    targets = (rng.random(60) < 0.2 + 0.6 * scores).astype(float)
    found = torch.tensor(scores, dtype=torch.float32)[:, None], torch.tensor(targets)[:, None]
    (threshold,) = fit_thresholds(*found)

    def f1(value: float) -> float:
        taken = found[0].numpy()[:, 0] >= value
        return 2 * (taken * targets).sum() / (taken.sum() + targets.sum())

    if LEAST_POSITIVES <= targets.sum() < 60:
        assert f1(threshold) == max(f1(value) for value in np.linspace(0, 1, 12 * 11 * 10))
        assert threshold == 0.5 or f1(threshold) > f1(0.5)
    order = torch.tensor(rng.permutation(60))
    assert fit_thresholds(*(part[order] for part in found)) == (threshold,)


@given(seed=SEEDS, classes=st.integers(2, 5))
def test_a_reliability_diagram_has_the_calibration_error(seed, classes):
    """Its bins hold each prediction once, and their distances from the diagonal are the error that is told; borders of bins included."""
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.randn(40, classes, generator=generator) * 2).softmax(dim=1)
    scores[0] = torch.eye(classes)[0]  # as sure as can be
    scores[1] = torch.full((classes,), 1 / classes)
    targets = torch.randint(0, classes, (40,), generator=generator)
    best, predicted = scores.max(dim=1)
    bins = reliability(best, predicted == targets)
    assert sum(count for count, _, _ in bins) == 40
    assert all(right * count == pytest.approx(round(right * count)) for count, _, right in bins)
    error = sum(count / 40 * abs(score - right) for count, score, right in bins)
    assert error == pytest.approx(calibration_error(scores, targets), abs=1e-6)


def test_calibration_error_by_hand():
    """Two bins of fifteen: sureness 0.9 of which half is right, and 0.6 of which all is, weighed by their images."""
    scores = torch.tensor([[0.9, 0.1]] * 4 + [[0.6, 0.4]] * 2)
    assert calibration_error(scores, torch.tensor([0, 0, 1, 1, 0, 0])) == pytest.approx((4 * 0.4 + 2 * 0.4) / 6, abs=1e-6)


def evaluation(task: str, outputs: torch.Tensor, targets: torch.Tensor) -> Evaluation:
    scores = outputs.softmax(1) if task == "classify" else outputs.sigmoid() if task == "multilabel" else outputs
    return Evaluation(task, 0.0, {}, tuple(map(str, range(len(targets)))), targets, scores, outputs[:, 0], outputs)


def test_each_task_has_what_can_be_fitted_and_says_it_with_numbers():
    """A temperature with the calibration error before and with it, thresholds by name, nothing for values."""
    found = fit_scores(evaluation("classify", *certain(75, 25)), ("a", "b"))
    assert found.told.startswith(
        "temperature 7.282, the likeliest of 100 validation images; calibration error of validation 0.2497 before, 0.0"
    )
    outputs = torch.tensor([[2.0, -2.0]] * 12 + [[-1.0, -3.0]] * 12 + [[-3.0, -4.0]] * 12)
    targets = torch.tensor([[1.0, 1.0]] * 3 + [[1.0, 0.0]] * 21 + [[0.0, 0.0]] * 12)
    labels = fit_scores(evaluation("multilabel", outputs, targets), ("rust", "dent"))
    assert labels.thresholds == (pytest.approx((torch.tensor([-1.0, -3.0]).sigmoid().mean()).item()), 0.5)
    assert labels.told == (
        "thresholds of the highest F1 of validation: rust 0.158, dent 0.5; 1 with fewer than 10 images of validation keep 0.5"
    )
    assert fit_scores(evaluation("regress", outputs, targets), ("x", "y")).told == ""
