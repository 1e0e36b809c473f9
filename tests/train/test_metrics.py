"""Metrics, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hiresvis.recipe import tasks
from hiresvis.train.metrics import HIGHER_IS_BETTER, METRICS, auto_metric, compute_metrics, is_better

# Labels 0 0 0 0 1 1; predicted 0 0 0 1 1 2. Class 3 does not occur at all.
SCORES = torch.tensor(
    [[0.7, 0.1, 0.1, 0.1], [0.6, 0.2, 0.1, 0.1], [0.5, 0.3, 0.1, 0.1], [0.3, 0.5, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1], [0.2, 0.1, 0.6, 0.1]]
)
TARGETS = torch.tensor([0, 0, 0, 0, 1, 1])


def test_metrics_are_those_worked_out_by_hand():
    """Accuracy 4/6; recalls 3/4 and 1/2 over the present classes; F1 6/7, 1/2, 0; AUROC and kappa by their definitions."""
    values = compute_metrics("classify", SCORES, TARGETS)
    assert values["accuracy"] == pytest.approx(4 / 6)
    assert values["balanced_accuracy"] == pytest.approx((3 / 4 + 1 / 2) / 2)
    assert values["macro_f1"] == pytest.approx((6 / 7 + 1 / 2 + 0) / 3)
    # class 0: all 8 pairs in order; class 1: 0.7 beats all four, 0.1 ties with one of four
    assert values["auroc"] == pytest.approx((1.0 + (4 + 0.5) / 8) / 2)
    # class 0 is ranked first; of class 1 the second comes with the last two of six, which tie
    assert values["map"] == pytest.approx((1.0 + (1 / 1 + 2 / 6) / 2) / 2)
    chance = (4 * 3 + 2 * 2) / 36
    assert values["kappa"] == pytest.approx((4 / 6 - chance) / (1 - chance))


def test_split_of_one_class_has_no_auroc_and_no_warning():
    """AUROC is NaN where no class has samples on both sides; the rest stays defined."""
    values = compute_metrics("classify", SCORES[:3], TARGETS[:3])
    assert math.isnan(values["auroc"])
    assert (values["accuracy"], values["kappa"]) == (1.0, 0.0)


def test_imbalance_decides_the_metric_and_the_reason_has_the_ratio():
    """Above three to one the small classes must count as much as the large ones; empty classes do not decide."""
    assert auto_metric("classify", [30, 10, 0]) == ("accuracy", "the largest class is 3.0 times the smallest, at most 3")
    assert auto_metric("classify", [40, 10]) == ("balanced_accuracy", "the largest class is 4.0 times the smallest, above 3")


# Three classes of five samples: the second has no sample, the third is on everywhere.
LABEL_SCORES = torch.tensor([[0.9, 0.1, 0.6], [0.8, 0.6, 0.7], [0.3, 0.2, 0.9], [0.7, 0.1, 0.8], [0.1, 0.1, 0.4]])
LABELS = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 0, 1], [1, 0, 1], [0, 0, 1]]).double()


def test_multilabel_metrics_are_those_worked_out_by_hand():
    """Average precision over classes with samples, AUROC over those with both sides, F1 over those that occur at all, exact matches."""
    values = compute_metrics("multilabel", LABEL_SCORES, LABELS)
    first = (1 / 1 + 2 / 3 + 3 / 4) / 3  # ranks 1, 3 and 4
    assert values["map"] == pytest.approx((first + 1.0) / 2)
    assert values["auroc"] == pytest.approx((2 + 1 + 1) / 6)  # of six pairs: 0.9 wins two, 0.7 and 0.3 one each
    assert values["macro_f1"] == pytest.approx((2 * 2 / (3 + 3) + 0 + 2 * 4 / (5 + 4)) / 3)
    assert values["accuracy"] == pytest.approx(2 / 5)  # the first and the fourth


def test_one_label_is_a_task_too_and_labels_without_samples_have_no_mean():
    """A single column is scored like any other; with no positive at all nothing is ranked, and no warning comes."""
    assert compute_metrics("multilabel", LABEL_SCORES[:, :1], LABELS[:, :1])["map"] == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)
    empty = compute_metrics("multilabel", LABEL_SCORES[:, :1] * 0.1, torch.zeros(5, 1))
    assert all(math.isnan(empty[name]) for name in ("map", "auroc", "macro_f1"))
    assert empty["accuracy"] == 1.0


def test_regression_metrics_are_means_over_targets():
    """Each target in its own units, with digits that float32 would lose."""
    targets = torch.tensor([[1e8 + 1, 0.0], [1e8 + 3, 1.0], [1e8 + 5, 2.0]], dtype=torch.float64)
    scores = targets + torch.tensor([[1.0, 0.0], [-1.0, 0.0], [2.0, 1.0]], dtype=torch.float64)
    values = compute_metrics("regress", scores, targets)
    assert values["mae"] == pytest.approx((4 / 3 + 1 / 3) / 2)
    assert values["rmse"] == pytest.approx((math.sqrt(6 / 3) + math.sqrt(1 / 3)) / 2)
    assert values["r2"] == pytest.approx(((1 - 6 / 8) + (1 - 1 / 2)) / 2)
    tiny = compute_metrics("regress", (scores - 1e8) * 1e-9, (targets - 1e8) * 1e-9)
    assert tiny["r2"] == pytest.approx(values["r2"])
    assert math.isnan(compute_metrics("regress", scores[:1], targets[:1])["r2"])


def test_recipes_offer_the_metrics_that_there_are():
    """By task, and with a direction for each; what auto chooses is among them."""
    assert {task: tuple(metrics) for task, metrics in METRICS.items()} == dict(tasks.METRICS)
    assert set(HIGHER_IS_BETTER) == {name for metrics in METRICS.values() for name in metrics}
    assert [name for name, higher in HIGHER_IS_BETTER.items() if not higher] == ["mae", "rmse"]
    assert all(auto_metric(task, [5, 5])[0] in METRICS[task] for task in METRICS)


def test_lower_errors_are_better():
    """The direction decides, not the number."""
    assert is_better("mae", 0.1, 0.2)
    assert not is_better("rmse", 0.2, 0.1)
    assert is_better("r2", 0.2, 0.1)


@pytest.mark.parametrize(
    ("value", "than", "better"),
    [(0.5, None, True), (0.6, 0.5, True), (0.5, 0.5, False), (math.nan, 0.1, False), (0.1, math.nan, True), (math.nan, math.nan, False)],
)
def test_ties_and_nan_do_not_replace_the_best(value, than, better):
    """The earlier epoch keeps a tie, NaN beats nothing."""
    assert is_better("accuracy", value, than) == better
