"""A backbone with a decoder: the planner sees its units, predicts its peak and keeps its bits; what it is built of, and what is refused."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from hiresvis.backbone.build import layers_of
from hiresvis.backbone.record import TracedLoss
from hiresvis.backbone.segmenter import Segmenter, build_segmenter, feature_maps
from hiresvis.backbone.segments import apply_segments
from hiresvis.errors import RecipeError
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.peak import StepSetting, predict_peak
from hiresvis.memory.plan import Segment, uniform
from hiresvis.train.freezing import classifier_parameters, freeze
from hiresvis.train.mask_losses import NO_CLASS, MaskLoss
from hiresvis.train.optim import is_transformer

PX = 96
NAMES = ("test_convnext", "test_vit")  # a pyramid and a plain transformer
LOSS = MaskLoss("dice_ce", image_size=(PX, PX))
TOLERANCE = 0.01


@cache
def built(name: str) -> torch.nn.Module:
    backbone = build_segmenter(name, num_classes=3, image_size=(PX, PX), pretrained=False, drop_path=0.2)
    return backbone.model.to(memory_format=torch.channels_last)


@cache
def traced(lab, name: str) -> MemoryProfile:
    return lab.trace(built(name), (PX, PX), loss=TracedLoss(LOSS, LOSS.blank_targets))[1]


def plans(lab, profile: MemoryProfile) -> dict[str, tuple[Segment, ...]]:
    return {
        "off": tuple(Segment(index, index + 1) for index in range(len(profile.units))),
        "1": uniform(profile, 1),
        "2": uniform(profile, 2),
        "mixed": lab.mixed_plan(profile),
        "mixed otherwise": lab.mixed_plan(profile, shift=3),
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_chain_has_the_bodys_blocks_and_three_units_of_the_decoder(lab, name: str) -> None:
    """Blocks are units with their stages, as in a classifier, and the decoder's parts come last, each free to be recomputed."""
    units = [unit for unit in traced(lab, name).units if unit.kind != "glue"]
    stages = {unit.stage for unit in units if unit.kind == "block"}
    assert stages == ({"blocks"} if name == "test_vit" else {"stage0", "stage1", "stage2", "stage3"})
    decoder = [unit for unit in units if unit.name.startswith("decoder.")]
    parts = ["decoder.scales"] if name == "test_vit" else []
    assert [unit.name for unit in decoder] == [*parts, "decoder.pyramid", "decoder.fuse", "decoder.classify"]
    assert {unit.stage for unit in decoder} == {"head"}
    assert all(unit.opens_segment and unit.ways for unit in decoder[:-1])


@pytest.mark.parametrize("name", NAMES)
def test_the_predicted_peak_is_the_counted_one(lab, name: str) -> None:
    """For five plans over every tier, accumulating or not, the loss over all pixels included: within 1%."""
    profile, loss = traced(lab, name), TracedLoss(LOSS, LOSS.blank_targets)
    for plan, segments in plans(lab, profile).items():
        measured = lab.measure_steps(built(name), profile, segments, 5, fake=False, loss=loss)
        for kind in ("single", "accumulated"):
            setting = StepSetting(accumulates=kind == "accumulated", eval_batch=0)
            predicted = predict_peak(profile, segments, 5, setting).counted_bytes
            difference = predicted / getattr(measured, kind) - 1
            assert abs(difference) <= TOLERANCE, f"{plan}, {kind}: {difference:+.2%}"


def train(lab, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Two AdamW steps of two micro-batches: everything that they leave."""
    optimizer = lab.make_optimizer(model)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(7)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        for _ in range(2):
            images = torch.randn(2, 3, PX, PX, generator=generator).to(memory_format=torch.channels_last)
            masks = torch.randint(0, 3, (2, PX, PX), dtype=torch.uint8, generator=generator)
            masks[:, :10] = NO_CLASS
            (LOSS(model(images), masks).sum() / 4).backward()
        optimizer.step()
    left = {name: value.clone() for name, value in model.state_dict().items()}
    left |= {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**left, "random state": torch.get_rng_state()}


@pytest.mark.parametrize("name", NAMES)
def test_a_planned_segmenter_trains_to_the_same_bits(lab, name: str) -> None:
    """Weights, gradients, statistics and random state after two accumulated steps, for plans over every tier; all that is left trains."""
    profile = traced(lab, name)
    bare = train(lab, copy.deepcopy(built(name)))
    assert {f"gradient of {parameter}" for parameter, _ in built(name).named_parameters()} <= bare.keys()
    for plan in ("2", "mixed", "mixed otherwise"):
        model = copy.deepcopy(built(name))
        apply_segments(model, plans(lab, profile)[plan], lab.unit_modules(profile))
        planned = train(lab, model)
        assert [key for key, value in bare.items() if not torch.equal(value, planned[key])] == []


@pytest.mark.parametrize(("name", "size"), [("test_resnet", (90, 122)), ("test_convnext", (64, 96)), ("test_vit", (96, 128))])
def test_logits_have_a_quarter_of_the_images_side(name: str, size: tuple[int, int]) -> None:
    """Also of sides that no stride divides, in a rectangle, and of a plain transformer, whose map is sixteen times coarser."""
    model = build_segmenter(name, num_classes=3, image_size=size, pretrained=False).model
    with torch.no_grad():
        logits = model(torch.zeros(2, 3, *size))
    assert logits.shape == (2, 3, -(-size[0] // 4), -(-size[1] // 4))


def test_layers_of_the_body_come_before_the_decoder() -> None:
    """Freezing counts the body's stages, the decoder is what a head alone would train, and a transformer is known as one."""
    model = copy.deepcopy(built("test_convnext"))
    layers = layers_of(model, coarse=True)
    assert layers["body.stem.0.weight"] == 0
    assert {layer for name, layer in layers.items() if name.startswith("decoder.")} == {max(layers.values())}
    assert set(classifier_parameters(model)) == {name for name in layers if name.startswith("decoder.")}
    frozen = freeze(model, 1)
    assert "body.stages.0.blocks.0.conv_dw.weight" in frozen
    assert not any(name.startswith(("body.stages.1", "decoder")) for name in frozen)
    assert is_transformer(built("test_vit"))
    assert not is_transformer(model)


def test_the_weights_of_a_run_begin_another(tmp_path: Path) -> None:
    """A file with body and decoder loads as a whole; one for other classes is refused key by key."""
    file = tmp_path / "best.safetensors"
    save_file({name: (value + 1).contiguous() for name, value in built("test_convnext").state_dict().items()}, file)
    again = build_segmenter("test_convnext", num_classes=3, image_size=(PX, PX), pretrained=str(file)).model
    assert all(torch.equal(value, built("test_convnext").state_dict()[name] + 1) for name, value in again.state_dict().items())
    with pytest.raises(RecipeError, match=r"decoder\.classify\.weight has shape \(3, 128, 1, 1\); the model's is \(5, 128, 1, 1\)"):
        build_segmenter("test_convnext", num_classes=5, image_size=(PX, PX), pretrained=str(file))


def test_a_model_without_feature_maps_is_refused() -> None:
    """A body without timm's way to them, or whose maps are too coarse, is named, with kinds of models that will do."""
    with pytest.raises(RecipeError, match=r"toy gives no feature maps; task segment needs them\. ConvNeXt"):
        feature_maps("toy", torch.nn.Conv2d(3, 8, 3), (64, 64), 3)
    body = timm.create_model("test_vit", num_classes=0, img_size=128, patch_size=64)
    with pytest.raises(RecipeError, match=r"coarse gives feature maps of stride 64 alone, none from 4 to 32"):
        feature_maps("coarse", body, (128, 128), 3)


def test_what_the_maps_do_not_need_is_taken_away() -> None:
    """Heads and last norms of a classifier leave no parameter behind that nothing trains, and its weights' names stay."""
    model = built("test_convnext")
    assert isinstance(model, Segmenter)
    assert not [name for name in model.body.state_dict() if name.startswith("head")]
    assert all(parameter.requires_grad for parameter in model.parameters())
