"""Metrics, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hiresvis.train.metrics import HIGHER_IS_BETTER, METRICS, auto_metric, compute_metrics, is_better

# Labels 0 0 0 0 1 1; predicted 0 0 0 1 1 2. Class 3 does not occur at all.
SCORES = torch.tensor(
    [[0.7, 0.1, 0.1, 0.1], [0.6, 0.2, 0.1, 0.1], [0.5, 0.3, 0.1, 0.1], [0.3, 0.5, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1], [0.2, 0.1, 0.6, 0.1]]
)
TARGETS = torch.tensor([0, 0, 0, 0, 1, 1])


def test_metrics_are_those_worked_out_by_hand():
    """Accuracy 4/6; recalls 3/4 and 1/2 over the present classes; F1 6/7, 1/2, 0; AUROC and kappa by their definitions."""
    values = compute_metrics(SCORES, TARGETS)
    assert values["accuracy"] == pytest.approx(4 / 6)
    assert values["balanced_accuracy"] == pytest.approx((3 / 4 + 1 / 2) / 2)
    assert values["macro_f1"] == pytest.approx((6 / 7 + 1 / 2 + 0) / 3)
    # class 0: all 8 pairs in order; class 1: 0.7 beats all four, 0.1 ties with one of four
    assert values["auroc"] == pytest.approx((1.0 + (4 + 0.5) / 8) / 2)
    chance = (4 * 3 + 2 * 2) / 36
    assert values["kappa"] == pytest.approx((4 / 6 - chance) / (1 - chance))


def test_split_of_one_class_has_no_auroc_and_no_warning():
    """AUROC is NaN where no class has samples on both sides; the rest stays defined."""
    values = compute_metrics(SCORES[:3], TARGETS[:3])
    assert math.isnan(values["auroc"])
    assert (values["accuracy"], values["kappa"]) == (1.0, 0.0)


def test_imbalance_decides_the_metric_and_the_reason_has_the_ratio():
    """Above three to one the small classes must count as much as the large ones; empty classes do not decide."""
    assert auto_metric([30, 10, 0]) == ("accuracy", "the largest class is 3.0 times the smallest, at most 3")
    assert auto_metric([40, 10]) == ("balanced_accuracy", "the largest class is 4.0 times the smallest, above 3")


def test_every_metric_has_a_direction():
    """The table of directions covers the metrics."""
    assert set(HIGHER_IS_BETTER) == set(METRICS)


@pytest.mark.parametrize(
    ("value", "than", "better"),
    [(0.5, None, True), (0.6, 0.5, True), (0.5, 0.5, False), (math.nan, 0.1, False), (0.1, math.nan, True), (math.nan, math.nan, False)],
)
def test_ties_and_nan_do_not_replace_the_best(value, than, better):
    """The earlier epoch keeps a tie, NaN beats nothing."""
    assert is_better("accuracy", value, than) == better
