"""Evaluation against masks, and a segmenter that learns a few images by heart."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hiresvis.backbone.segmenter import build_segmenter
from hiresvis.data.transforms import Preprocess
from hiresvis.train.evaluate import evaluate
from hiresvis.train.mask_losses import NO_CLASS, MaskLoss
from hiresvis.train.metrics import mask_metrics
from hiresvis.train.step import TrainStep

PX = 64


def squares(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise with a bright square, and its mask; a row of no class."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 120, (count, PX, PX, 3), dtype=torch.uint8, generator=generator)
    masks = torch.zeros(count, PX, PX, dtype=torch.uint8)
    for number in range(count):
        top, left = torch.randint(0, PX - 24, (2,), generator=generator).tolist()
        images[number, top : top + 20, left : left + 24] += 120
        masks[number, top : top + 20, left : left + 24] = 1
    masks[:, 0] = NO_CLASS
    return images, masks


class Loader:
    """One batch, as an `EvalLoader` with masks gives it."""

    def __init__(self, images: torch.Tensor, masks: torch.Tensor) -> None:
        places = (Preprocess((PX, PX)).place(PX, PX),) * len(images)
        self.item = SimpleNamespace(
            images=images, indices=tuple(range(len(images))), places=places, truths=tuple(masks), num_windows=(), targets=None
        )

    def __iter__(self):
        return iter([self.item])

    def __len__(self) -> int:
        return 1


def make_step(model: torch.nn.Module) -> TrainStep:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def prepare(images: torch.Tensor) -> torch.Tensor:
        return images.permute(0, 3, 1, 2).float() / 128 - 1

    loss = MaskLoss("dice_ce", image_size=(PX, PX))
    return TrainStep(model, optimizer, loss, prepare=prepare, device=torch.device("cpu"), clip_grad=1.0)


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_eight_images_are_learnt_by_heart(name: str) -> None:
    """A ConvNet and a plain transformer from random weights: a loss near nothing, and nearly every pixel right at the images' own size."""
    images, masks = squares(8)
    step = make_step(build_segmenter(name, num_classes=2, image_size=(PX, PX), pretrained=False).model.train())
    first = last = 0.0
    for _ in range(50):
        for part in (slice(0, 5), slice(5, 8)):
            step.accumulate(images[part], masks[part], batch_images=8)
        last = step.apply().loss
        first = first or last
    assert first > 1
    assert last < 0.05
    found = evaluate(step, Loader(images, masks))
    assert found.metrics["miou"] > 0.95


def test_metrics_are_of_the_pixels_of_all_images_together() -> None:
    """Counted by hand from the logits at full resolution: intersection over union, Dice, accuracy; the loss is the images' mean."""
    images, masks = squares(3)
    masks[2] = NO_CLASS
    step = make_step(build_segmenter("test_resnet", num_classes=2, image_size=(PX, PX), pretrained=False).model.eval())
    found = evaluate(step, Loader(images, masks), name_of="image {}".format)
    outputs = step.predict(images)
    finer = torch.nn.functional.interpolate(outputs, size=(PX, PX), mode="bilinear", align_corners=False)
    assert found.losses.tolist() == pytest.approx(step.loss_fn.plain(outputs, masks).tolist(), rel=1e-4)
    assert found.losses[2] == 0
    valid, predicted = masks != NO_CLASS, finer.argmax(dim=1)
    ious, dices = [], []
    for label in (0, 1):
        true, said = (masks == label) & valid, (predicted == label) & valid
        ious.append(float((true & said).sum() / (true | said).sum()))
        dices.append(float(2 * (true & said).sum() / (true.sum() + said.sum())))
    assert found.metrics["miou"] == pytest.approx(sum(ious) / 2, abs=2e-3)  # a pixel on the border may fall to either by rounding
    assert found.metrics["dice"] == pytest.approx(sum(dices) / 2, abs=2e-3)
    assert found.metrics["pixel_accuracy"] == pytest.approx(float((masks == predicted)[valid].double().mean()), abs=2e-3)
    assert found.names == ("image 0", "image 1", "image 2")


def test_a_class_that_is_nowhere_counts_in_no_mean() -> None:
    """Neither as label nor as prediction; one that is only predicted counts as 0."""
    true, predicted, right = torch.tensor([10, 0, 0, 4]), torch.tensor([8, 0, 6, 0]), torch.tensor([8, 0, 0, 0])
    found = mask_metrics(true, predicted, right)
    assert found == {"miou": pytest.approx(0.8 / 3), "dice": pytest.approx(16 / 18 / 3), "pixel_accuracy": pytest.approx(8 / 14)}
