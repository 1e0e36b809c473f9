"""Per-sample losses."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from hiresvis.recipe.tasks import LOSSES
from hiresvis.train.losses import BinaryCrossEntropy, CrossEntropy, Regression, make_loss

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 0.5]])
TARGETS = torch.tensor([0, 2])


def test_losses_are_per_sample_and_their_mean_is_torchs():
    """One value per sample; the mean equals torch's own with the same smoothing."""
    losses = CrossEntropy(label_smoothing=0.1)(LOGITS, TARGETS)
    assert losses.shape == (2,)
    assert losses.mean().item() == pytest.approx(F.cross_entropy(LOGITS, TARGETS, label_smoothing=0.1).item())


def test_smoothing_outside_its_range_is_refused():
    """1 would leave nothing of the label."""
    with pytest.raises(ValueError, match=r"label_smoothing 1.0 is not in 0 <= value < 1"):
        CrossEntropy(label_smoothing=1.0)


ALL = [(task, name) for task, names in LOSSES.items() if task != "segment" for name in names]


@pytest.mark.parametrize(("task", "name"), ALL)
def test_every_loss_of_a_recipe_can_be_had_and_takes_its_own_targets(task, name):
    """One finite value a sample, of the task that the recipe lists it under; scores are of the outputs' shape."""
    loss = make_loss(name, task=task, num_outputs=3, mean=(1.0, 2.0, 3.0), std=(1.0, 1.0, 1.0))
    losses = loss(torch.randn(4, 3), loss.blank_targets(4))
    assert losses.shape == loss.plain(torch.randn(4, 3), loss.blank_targets(4)).shape == (4,)
    assert losses.isfinite().all()
    assert loss.scores(torch.randn(4, 3)).shape == (4, 3)
    assert loss.task == task


def test_binary_cross_entropy_takes_each_class_by_itself():
    """The mean over classes of each one's own loss; smoothing moves both answers towards a half; scores need not sum to 1."""
    outputs, targets = torch.tensor([[2.0, -1.0]]), torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    by_hand = [math.log1p(math.exp(-2.0)), math.log1p(math.exp(1.0))]
    assert BinaryCrossEntropy(2)(outputs, targets).tolist() == pytest.approx([sum(by_hand) / 2])
    smooth = BinaryCrossEntropy(2, label_smoothing=0.2)
    assert smooth(outputs, targets).item() == pytest.approx(F.binary_cross_entropy_with_logits(outputs, torch.full((1, 2), 0.9)).item())
    assert smooth.plain(outputs, targets).tolist() == pytest.approx([sum(by_hand) / 2])
    assert smooth.scores(outputs).tolist() == [pytest.approx([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(1))])]


@pytest.mark.parametrize(("name", "by_hand"), [("mse", (0.25 + 9.0) / 2), ("l1", (0.5 + 3.0) / 2), ("huber", (0.125 + 2.5) / 2)])
def test_regression_losses_are_of_scaled_targets(name, by_hand):
    """Targets are moved to mean 0 and deviation 1, whatever their units; scores undo it to the targets' own digits."""
    mean, std = (20240000.0, 0.001), (10.0, 0.0005)
    targets = torch.tensor([[20240115.0, 0.003]], dtype=torch.float64)  # 11.5 and 4 deviations off
    loss = Regression(name, mean, std)
    assert loss(torch.tensor([[11.0, 1.0]]), targets).tolist() == pytest.approx([by_hand])
    assert loss.scores(torch.tensor([[11.5, 4.0]])).tolist() == [pytest.approx([20240115.0, 0.003], rel=1e-12)]
