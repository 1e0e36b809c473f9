"""Outputs with the features they were made of, in as many parts as memory takes."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

from hiresvis.backbone.build import build_backbone
from hiresvis.backbone.segmenter import build_segmenter
from hiresvis.errors import DoesNotFit
from hiresvis.train.features import Forward, num_features, pooled

MODELS = {"test_resnet": 64, "test_vit": 160, "test_efficientnet": 64}


class Step:
    """What `Forward` asks of a TrainStep."""

    device = torch.device("cpu")

    def __init__(self, model: nn.Module, most: int = 100) -> None:
        self.model, self.most, self.sizes = model.eval(), most, list[int]()

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        self.sizes.append(len(images))
        if len(images) > self.most:
            self.model(images[:1])  # memory may run out behind the classifier
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.model(images)

    def predict_with_flips(self, images: Tensor) -> Tensor:
        mirrored = self.predict(images.flip(3))
        return (self.predict(images) + mirrored) / 2


@pytest.mark.parametrize("name", MODELS)
def test_features_are_what_the_classifier_is_given(name):
    """timm's own pooled features, from the forward that made the outputs; with flips those of the image as it is."""
    model = timm.create_model(name, num_classes=3)
    images = torch.rand(3, 3, MODELS[name], MODELS[name], generator=torch.Generator().manual_seed(1))
    step = Step(model)
    with torch.no_grad():
        wanted = model.forward_head(model.forward_features(images), pre_logits=True)
        outputs = model(images)
    with Forward(step, most=8) as forward:
        found = forward(images)
    assert torch.equal(found[0], outputs)
    torch.testing.assert_close(found[1], wanted.reshape(3, -1))
    assert step.sizes == [3]
    with Forward(step, flips=True, most=8) as forward:
        torch.testing.assert_close(forward(images)[1], found[1])
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_batch_that_does_not_fit_is_run_in_halves_from_then_on():
    """The rows are those of the whole batch, each with its own features; it is told once, and the next batch does not try again."""
    model, said = timm.create_model("test_resnet", num_classes=3), list[str]()
    images = torch.rand(9, 3, 64, 64)
    with Forward(Step(model), most=16) as forward:
        whole = forward(images)
    step = Step(model, most=3)
    with Forward(step, most=16, say=said.append) as forward:
        parts = forward(images)
        again = forward(images[:5])
    for one, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(again[1], whole[1][:5])
    assert step.sizes == [9, 4, 2, 2, 2, 2, 1, 2, 2, 1]
    assert said == [
        "memory ran out (CUDA out of memory. Tried to allocate 2.00 GiB); from here on 4 images at once",
        "memory ran out (CUDA out of memory. Tried to allocate 2.00 GiB); from here on 2 images at once",
    ]


def test_one_image_too_many_is_refused_with_the_memory_there_is():
    """Nothing smaller can be tried; other errors are not taken for it."""
    model = timm.create_model("test_resnet", num_classes=3)
    with (
        Forward(Step(model, most=0), most=2) as forward,
        pytest.raises(DoesNotFit, match=r"A single image ran out of memory \(CUDA out of"),
    ):
        forward(torch.rand(2, 3, 64, 64))
    with Forward(Step(model), most=2) as forward, pytest.raises(RuntimeError, match="size"):
        forward(torch.rand(2, 5, 64, 64))


@pytest.mark.parametrize("segment", [False, True])
@pytest.mark.parametrize("name", [*MODELS, "test_convnext"])
def test_the_number_of_features_is_known_before_any_image(name, segment):
    """As many as a forward gives, whether one layer makes outputs of them or a decoder of several maps."""
    size, images = (MODELS.get(name, 96),) * 2, torch.rand(1, 3, *(MODELS.get(name, 96),) * 2)
    build = build_segmenter if segment else build_backbone
    model = build(name, num_classes=3, image_size=size, pretrained=False).model
    with Forward(Step(model), most=2) as forward:
        assert forward(images)[1].shape[1] == num_features(model) > 0
    assert num_features(nn.Flatten()) == 0


def test_a_model_without_a_classifier_has_outputs_alone():
    """No features are no fault."""
    with Forward(Step(nn.Flatten()), most=2) as forward:
        outputs, features = forward(torch.rand(3, 2, 2))
    assert (outputs.shape, features.shape) == ((3, 4), (3, 0))


def test_features_are_pooled_whatever_shape_they_come_in():
    """Maps by their places, tokens by their number, of several maps the first."""
    maps = torch.arange(16.0).reshape(1, 2, 2, 4)
    assert pooled(maps).tolist() == [[3.5, 11.5]]
    assert pooled([maps, maps[:, :1]]).tolist() == [[3.5, 11.5]]
    assert pooled(maps[0]).tolist() == [[2.0, 3.0, 4.0, 5.0], [10.0, 11.0, 12.0, 13.0]]
    assert pooled(maps[0, 0]).tolist() == maps[0, 0].tolist()
