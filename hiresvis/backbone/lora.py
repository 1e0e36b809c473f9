"""Low-rank adapters: LoRA (Hu et al. 2021, *LoRA: Low-Rank Adaptation of Large Language Models*), on linear layers and 1x1 convolutions.

A layer with weight W trains `W + alpha/rank * B A` with W fixed: A has `rank` rows and begins random, B begins at zero, so that training
begins with the weights' own outputs. Gradients and optimizer state are those of A and B alone, and no gradient of W is computed. Inputs are
saved all the same, since A needs them: what LoRA saves is weights' memory, not activations'.

In training mode the two thin products run beside the wide one. In eval mode W and its update are added up first and one product runs: the
very numbers that a plain layer with the merged weight gives, bit for bit. So what is evaluated is what `merged_state` writes, and nothing
that reads those weights needs to know of adapters.

A layer is changed in place, to a class of its own: names, parameters and hooks stay, `lora_a` and `lora_b` come beside `weight`. Left out
are subclasses (their forward is their own), and layers whose weight the model uses without calling them (the qkv of BEiT and EVA, which
add a bias of their own): a forward on fake tensors tells.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hiresvis.backbone.record import fake_copy

PARTS = ("lora_a", "lora_b")  # what an adapter adds to its layer's parameters


class _Adapter(nn.Module):
    """What both kinds of layers share; beside one of torch's own, which brings `weight` (out, in, ...) and `bias`."""

    weight: nn.Parameter
    lora_a: nn.Parameter  # (rank, in, ...)
    lora_b: nn.Parameter  # (out, rank, ...)
    scale: float

    def merged(self) -> Tensor:
        """The weight of a plain layer that computes the same."""
        return _merge(self.weight, self.lora_a, self.lora_b, self.scale)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={len(self.lora_a)}, scale={self.scale:g}"


def _merge(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """The sum, of the weight's shape and strides."""
    with torch.autocast(weight.device.type, enabled=False):  # sums of weights are made in the weights' own precision
        flat = torch.addmm(weight.flatten(1), lora_b.flatten(1), lora_a.flatten(1), alpha=scale)
    # The memory order of a 1x1 kernel is told by its strides alone, and a convolution may choose its kernel by it.
    return flat.as_strided(weight.shape, weight.stride())


class LoraLinear(_Adapter, nn.Linear):
    """A linear layer with an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return functional.linear(input, self.merged(), self.bias)
        wide = super().forward(input)
        thin = functional.linear(input, self.lora_a) * self.scale
        # In one operator, so that the update by itself, as wide as the output, is never there.
        return torch.addmm(wide.flatten(0, -2), thin.flatten(0, -2), self.lora_b.t()).view(wide.shape)


class LoraConv2d(_Adapter, nn.Conv2d):
    """A 1x1 convolution with an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return self._conv_forward(input, self.merged(), self.bias)
        inner = functional.conv2d(input, self.lora_a, stride=self.stride)
        return super().forward(input) + functional.conv2d(inner * self.scale, self.lora_b)


_KINDS: dict[type[nn.Module], type[_Adapter]] = {nn.Linear: LoraLinear, nn.Conv2d: LoraConv2d}


def add_adapters(
    model: nn.Module, *, rank: int, alpha: float, image_size: tuple[int, int], in_chans: int, without: Collection[str] = (), seed: int = 0
) -> tuple[str, ...]:
    """Gives adapters to the model's linear layers and 1x1 convolutions; a layer that has one keeps it.

    A layer's rank is at most the one at which its adapter has as many numbers as its weight; `alpha` is divided by the layer's own.

    Args:
        image_size: (height, width) in px; with in_chans, what a forward takes.
        without: names of parameters whose layers stay as they are.
        seed: of the random halves; the global random state is not touched.

    Returns:
        The names of the layers that have adapters now.
    """
    called = _called(model, [name for name, layer in model.named_modules() if _fits(layer)], image_size, in_chans)
    generator = torch.Generator().manual_seed(seed)
    for name, layer in model.named_modules():
        if name in called and f"{name}.weight" not in without:
            _adapt(layer, rank, alpha, generator)
    return tuple(name for name, layer in model.named_modules() if isinstance(layer, _Adapter))


def adapters(model: nn.Module) -> Iterator[tuple[str, _Adapter]]:
    """The layers with adapters, by name; one that has two names comes twice, as it does in a state dict."""
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, _Adapter):
            yield name, layer


def merged_state(model: nn.Module, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The state dict of the plain model that computes the same: adapters are added to their weights. Without adapters, the model's own.

    Args:
        state: values to take instead of the model's own, by the same names; adapters may be on another device than weights.
    """
    merged = dict(model.state_dict() if state is None else state)
    with torch.no_grad():
        for name, layer in adapters(model):
            weight = merged[f"{name}.weight"]
            lora_a, lora_b = (merged.pop(f"{name}.{part}").to(weight.device) for part in PARTS)
            merged[f"{name}.weight"] = _merge(weight, lora_a, lora_b, layer.scale)
    return merged


def remove_adapters(model: nn.Module) -> None:
    """The model is a plain one again, with the weights beneath the adapters."""
    kinds = {adapted: plain for plain, adapted in _KINDS.items()}
    for layer in model.modules():
        if isinstance(layer, _Adapter):
            del layer.lora_a, layer.lora_b, layer.scale
            layer.__class__ = kinds[type(layer)]


def _fits(layer: nn.Module) -> bool:
    if type(layer) is nn.Conv2d:
        return layer.kernel_size == (1, 1) and layer.groups == 1 and layer.padding in ((0, 0), "valid")
    return type(layer) is nn.Linear


def _called(model: nn.Module, names: Collection[str], image_size: tuple[int, int], in_chans: int) -> set[str]:
    """Those of the modules that a forward calls."""
    mode, fake = fake_copy(model)
    found: set[str] = set()

    def note(name: str) -> Any:
        return lambda *_: found.add(name)

    for name in names:
        fake.get_submodule(name).register_forward_pre_hook(note(name))
    with mode, torch.no_grad():
        fake(torch.zeros(2, in_chans, *image_size))
    return found


def _adapt(layer: nn.Module, rank: int, alpha: float, generator: torch.Generator) -> None:
    weight = layer.weight
    num_out, num_in = weight.shape[:2]
    own = max(1, min(rank, num_out * num_in // (num_out + num_in)))
    ones = (1,) * (weight.dim() - 2)
    first = torch.empty(own, num_in, *ones).uniform_(-1, 1, generator=generator) / math.sqrt(num_in)  # as torch begins a linear layer
    layer.__class__ = _KINDS[type(layer)]
    layer.lora_a = nn.Parameter(first.to(weight.device, weight.dtype))
    layer.lora_b = nn.Parameter(weight.new_zeros(num_out, own, *ones))
    layer.scale = alpha / own
