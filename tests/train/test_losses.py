"""Per-sample losses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hiresvis.train.losses import CrossEntropy

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
