"""Losses over masks: per image, in parts, without what is no class."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from hiresvis.train.mask_losses import NO_CLASS, MaskLoss

KINDS = ("dice_ce", "cross_entropy", "dice")
SIZE = (12, 10)


def masks(count: int, seed: int = 0) -> torch.Tensor:
    found = torch.randint(0, 3, (count, *SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    found[:, 0] = NO_CLASS
    return found


def logits(count: int, size: tuple[int, int] = SIZE, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def test_cross_entropy_is_torchs_over_the_pixels_that_count() -> None:
    """The mean over each image's labelled pixels, with smoothing and without."""
    outputs, targets = logits(3), masks(3)
    targets[1, :9] = NO_CLASS
    for smoothing in (0.0, 0.1):
        found = MaskLoss("cross_entropy", image_size=SIZE, label_smoothing=smoothing)(outputs, targets)
        wanted = [
            F.cross_entropy(one.detach()[None], target[None].long(), ignore_index=NO_CLASS, label_smoothing=smoothing)
            for one, target in zip(outputs, targets, strict=True)
        ]
        assert found.detach().tolist() == pytest.approx([value.item() for value in wanted], rel=1e-5)


def test_dice_by_hand() -> None:
    """Two classes there, of a third nothing: 1 less the mean of the two, over the pixels that count."""
    targets = torch.tensor([[[0, 1, NO_CLASS]]], dtype=torch.uint8)
    shares = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.6, 0.2], [0.0, 0.0, 1.0]])
    outputs = shares.clamp(min=1e-30).log().T[None, :, None, :]
    dice = [2 * 0.5 / (0.7 + 1), 2 * 0.6 / (0.85 + 1)]
    assert MaskLoss("dice", image_size=(1, 3))(outputs, targets).item() == pytest.approx(1 - sum(dice) / 2, rel=1e-5)
    entropy = -(math.log(0.5) + math.log(0.6)) / 2
    assert MaskLoss("dice_ce", image_size=(1, 3))(outputs, targets).item() == pytest.approx(1 - sum(dice) / 2 + entropy, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_a_batch_is_that_of_its_parts(kind: str) -> None:
    """Any cut into micro-batches adds up to the whole batch."""
    loss, targets = MaskLoss(kind, image_size=SIZE), masks(5)
    whole, parts = logits(5), logits(5)
    (loss(whole, targets).sum() / 5).backward()
    for cut in (slice(0, 2), slice(2, 3), slice(3, 5)):
        (loss(parts[cut], targets[cut]).sum() / 5).backward()
    assert torch.allclose(whole.grad, parts.grad, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_class_has_no_part_in_value_or_gradient(kind: str) -> None:
    """Outputs there may be anything; an image without any class costs nothing and moves nothing."""
    loss, targets, outputs = MaskLoss(kind, image_size=SIZE), masks(2), logits(2)
    targets[1] = NO_CLASS
    values = loss(outputs, targets)
    values.sum().backward()
    assert values[1].item() == 0
    assert not outputs.grad[1].any()
    assert not outputs.grad[0, :, 0].any()
    assert outputs.grad[0, :, 1:].any()
    changed = outputs.detach().clone()
    changed[:, :, 0] += 50
    assert torch.equal(loss(changed, targets), values)


@pytest.mark.parametrize("kind", KINDS)
def test_certain_and_right_is_nearly_nothing(kind: str) -> None:
    """The least value is 0, also where a class is missing from the image."""
    targets = masks(2)
    targets[0, 1:] = 1
    outputs = 40 * F.one_hot(targets.long().clamp(max=2), 3).permute(0, 3, 1, 2).float()
    assert MaskLoss(kind, image_size=SIZE)(outputs, targets).max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_strips_are_those_of_the_image(kind: str) -> None:
    """Evaluation adds strips up and gets what training's call gives of the whole."""
    loss, outputs, targets = MaskLoss(kind, image_size=SIZE), logits(2).detach(), masks(2)
    strips = [loss.sums(outputs[:, :, cut], targets[:, cut]).double() for cut in (slice(0, 1), slice(1, 7), slice(7, 12))]
    total = strips[0] + strips[1] + strips[2]
    assert loss.value(total).tolist() == pytest.approx(loss.plain(outputs, targets).tolist(), rel=1e-5)


def test_coarse_outputs_are_brought_to_the_masks_size() -> None:
    """By the bilinear interpolation that evaluation samples with."""
    outputs, targets = logits(2, (3, 5)), masks(2)
    loss = MaskLoss("dice_ce", image_size=SIZE)
    finer = F.interpolate(outputs, size=SIZE, mode="bilinear", align_corners=False)
    assert torch.equal(loss(outputs, targets), loss(finer, targets))
    assert loss.blank_targets(4).shape == (4, *SIZE)
