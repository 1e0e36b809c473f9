"""A timm model for segmentation: its body with a decoder of our own behind it, in place of its head.

The body runs by timm's `forward_intermediates`, which calls the model's own stages and blocks one after another: the planner sees them as
it sees them in a classifier, and the maps that the decoder takes are outputs that later units use. Which maps those are is found by
running the model once without memory: the last one of each stride from 4 to 32. What the maps do not depend on (heads, last norms, a
stage behind the last map) is taken away, so that every parameter that is left is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hiresvis.backbone import weights
from hiresvis.backbone.build import Backbone, NotInitialising, build_backbone, layers_of
from hiresvis.backbone.decoder import Decoder
from hiresvis.backbone.record import fake_copy
from hiresvis.errors import Problem, RecipeError, first_line

BODY = "body"
_STRIDES = (3, 40)  # of maps that a decoder gains from: 4 to 32, or what a model has in their place
_BEHIND = 1_000_000  # the decoder's layer, behind all others


class Segmenter(nn.Module):
    """Images (b, c, h, w) to logits (b, num_classes, h / s, w / s), where s is the finest map's stride, 4 as a rule.

    Args:
        body: a timm model without a classifier.
        indices: of the maps of its `forward_intermediates`, in their order.
        decoder: takes those maps, the last one first.
    """

    def __init__(self, body: nn.Module, indices: Sequence[int], decoder: Decoder) -> None:
        super().__init__()
        self.body, self.decoder = body, decoder
        self.indices = tuple(indices)

    def forward(self, images: Tensor) -> Tensor:
        maps = _maps(self.body, images, self.indices)
        logits: Tensor = self.decoder(maps[::-1])
        return logits

    # What timm's models are asked for, so that freezing, optimizer and layer decay need not know this one.

    @property
    def blocks(self) -> Any:
        """The body's, by which a plain transformer is known."""
        return getattr(self.body, "blocks", None)

    def get_classifier(self) -> nn.Module:
        """What is new for each data set: the decoder."""
        return self.decoder

    def no_weight_decay(self) -> set[str]:
        """Parameters that the body does not want decayed."""
        names = self.body.no_weight_decay() if hasattr(self.body, "no_weight_decay") else ()
        return {f"{BODY}.{name}" for name in names}

    def group_matcher(self, coarse: bool = False) -> Callable[[str], tuple[int, ...]]:
        """A parameter's layer by its name: the body's own, then the decoder."""
        layers = layers_of(self.body, coarse=coarse)

        def layer(name: str) -> tuple[int, ...]:
            return (layers.get(name.removeprefix(f"{BODY}."), _BEHIND),) if name.startswith(f"{BODY}.") else (_BEHIND,)

        return layer


@dataclass(frozen=True, slots=True)
class _Map:
    index: int
    channels: int
    size: tuple[int, int]


def build_segmenter(
    name: str,
    *,
    num_classes: int,
    image_size: tuple[int, int],
    pretrained: bool | str = True,
    seed: int = 0,
    initialise: bool = True,
    **how: Any,
) -> Backbone:
    """As `build_backbone`, with a decoder for `num_classes` on the body's feature maps.

    Args:
        pretrained: as there; a file may also hold the weights of a run of this task, decoder included.

    Raises:
        RecipeError: as `build_backbone`; or the model gives no feature maps.
    """
    own = _own_state(pretrained)
    source: bool | str = False if own else pretrained
    built = build_backbone(name, num_classes=0, image_size=image_size, pretrained=source, seed=seed, initialise=initialise, **how)
    maps = feature_maps(name, built.model, image_size, in_chans=len(built.mean))
    with torch.random.fork_rng(devices=[]), nullcontext() if initialise else NotInitialising():
        torch.default_generator.manual_seed(seed + 1)
        decoder = Decoder([one.channels for one in reversed(maps)], num_classes)
    model = Segmenter(built.model, [one.index for one in maps], decoder).train()
    _drop_unused(model, image_size, in_chans=len(built.mean))
    notes = built.notes
    if own is not None:
        if different := weights.differences(model, own, str(pretrained)):
            raise RecipeError(different)
        model.load_state_dict(own)
        notes = (f"weights from {pretrained}",)
    strides = ", ".join(f"{image_size[0] // one.size[0]}" for one in maps)
    return replace(built, model=model, notes=(*notes, f"a decoder for {num_classes} classes on feature maps of stride {strides}"))


def _own_state(pretrained: bool | str) -> dict[str, Tensor] | None:
    """The weights of a whole segmenter, where a file holds them."""
    if isinstance(pretrained, bool) or pretrained.startswith("package:"):
        return None
    state = weights.read_state(Path(pretrained))
    return state if any(key.startswith(f"{BODY}.") for key in state) else None


def _maps(body: Any, images: Tensor, indices: Sequence[int] | None) -> list[Tensor]:
    """The body's maps, (b, c, h, w) each. A plain transformer's are normalised by the last norm that its weights come with."""
    norm = {"norm": True} if is_plain(body) else {}
    maps: list[Tensor] = body.forward_intermediates(images, indices=indices, output_fmt="NCHW", intermediates_only=True, **norm)
    return maps


def is_plain(body: nn.Module) -> bool:
    """Whether the body is a stack of equal attention blocks with a norm behind them."""
    blocks = getattr(body, "blocks", None)
    return isinstance(blocks, nn.ModuleList | nn.Sequential) and all(hasattr(block, "attn") for block in blocks) and hasattr(body, "norm")


def feature_maps(name: str, body: nn.Module, image_size: tuple[int, int], in_chans: int) -> list[_Map]:
    """The last map of each stride from 4 to 32, finest first; of a plain transformer its last.

    Raises:
        RecipeError: there is none.
    """
    refusal = "; task segment needs them. ConvNeXt, ResNet, EfficientNet, Swin and ViT give maps, among most others"
    if not hasattr(body, "forward_intermediates"):
        raise RecipeError([Problem(f"{name} gives no feature maps{refusal}", key="model.name")])
    mode, fake = fake_copy(body)
    try:
        with mode, torch.no_grad():
            maps = _maps(fake, torch.zeros(2, in_chans, *image_size), None)
    except Exception as error:  # timm's models refuse in their own ways
        raise RecipeError([Problem(f"{name} gives no feature maps ({first_line(error)}){refusal}", key="model.name")]) from error
    last = {tuple(one.shape[-2:]): _Map(index, one.shape[1], (one.shape[-2], one.shape[-1])) for index, one in enumerate(maps)}
    least, most = _STRIDES
    found = [one for one in last.values() if least <= image_size[0] / one.size[0] <= most]
    if not found:
        strides = ", ".join(f"{image_size[0] / size[0]:g}" for size in last)
        raise RecipeError([Problem(f"{name} gives feature maps of stride {strides} alone, none from 4 to 32{refusal}", key="model.name")])
    return sorted(found, key=lambda one: one.index)


def _drop_unused(model: Segmenter, image_size: tuple[int, int], in_chans: int) -> None:
    """Takes away the body's modules that never run. What runs, and the logits do not depend on it, is frozen."""
    mode, fake = fake_copy(model)
    ran: set[str] = set()
    for name, module in fake.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: ran.add(name))
    with mode:
        fake(torch.zeros(2, in_chans, *image_size)).sum().backward()
    unused = {name for name, parameter in fake.named_parameters() if parameter.grad is None}
    _take_away(model.body, f"{BODY}.", unused, ran)
    for name, parameter in model.named_parameters():
        if name in unused:
            parameter.requires_grad_(False)


def _take_away(module: nn.Module, prefix: str, unused: set[str], ran: set[str]) -> None:
    for name, child in list(module.named_children()):
        inside = [f"{prefix}{name}.{own}" for own, _ in child.named_parameters()]
        named = f"{prefix}{name}"
        if inside and unused.issuperset(inside) and not any(one == named or one.startswith(f"{named}.") for one in ran):
            setattr(module, name, nn.Identity())
        else:
            _take_away(child, f"{named}.", unused, ran)
