"""Runs a token-wise module in slices, forward and backward, so that its wide inner activations never exist whole.

A module is token-wise when each position's output depends on that position alone (a transformer's MLP, a ConvNeXt's
pointwise part): it consists of linear layers, 1x1 convolutions, element-wise activations and norms over channels. Then
only its input is kept, and backward runs slice after slice again. Sums over positions (weight gradients) are made slice
by slice, and kernels for fewer rows may add in another order, so numbers agree only closely: about 1e-6 of each gradient's
norm in fp32. Whatever mixes positions (a global statistic as in GRN, batch statistics) or draws random numbers does not
qualify; `why_not` says why.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from hiresvis.errors import first_line

SLICES = 8
_POINTWISE = (
    nn.Identity,
    nn.GELU,
    nn.ReLU,
    nn.ReLU6,
    nn.SiLU,
    nn.Sigmoid,
    nn.Hardswish,
    nn.Mish,
    nn.Tanh,
)


def why_not(module: nn.Module, shape: Sequence[int]) -> str | None:
    """Why the module cannot run in slices; None when it can. Its parts are looked at, then a copy is run both ways on a small input.

    Args:
        module: in the mode it is trained in.
        shape: of its input: (batch, ..., channels) for linear layers, (batch, channels, height, width) for 1x1 convolutions.
    """
    return parts_refuse(module) or _small_run_refuses(module, shape)


def _small_run_refuses(module: nn.Module, shape: Sequence[int]) -> str | None:
    """The proof: what comes of the parts of an input, put together, is what comes of the whole."""
    dim = dimension(module)
    if len(shape) < 3 or shape[dim] < SLICES:
        return f"an input of shape {tuple(shape)} has no {SLICES} slices"
    small = [2, *(8 for _ in shape[1:])]
    small[1 if dim == 2 else -1] = shape[1 if dim == 2 else -1]
    images = torch.rand(small, generator=torch.Generator().manual_seed(0))
    copied = copy.deepcopy(module).to("cpu", torch.float32)
    for parameter in copied.parameters():  # a model that is only traced may have any numbers
        nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            whole = copied(images)
            parts = torch.cat([copied(part) for part in images.split(1, dim)], dim)
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        return f"it does not take parts of its input ({first_line(error)})"
    if not isinstance(whole, torch.Tensor) or whole.shape != parts.shape or not torch.allclose(whole, parts, rtol=1e-3, atol=1e-4):
        return "its output at one position depends on others"
    return None


def parts_refuse(module: nn.Module) -> str | None:
    """Why its parts, by their kinds alone, speak against slices; None when they do not."""
    products = 0
    kinds = set()
    for leaf in module.modules():
        if any(True for _ in leaf.children()):
            continue
        if isinstance(leaf, nn.Linear):
            products += 1
            kinds.add("linear")
        elif isinstance(leaf, nn.Conv2d):
            if leaf.kernel_size != (1, 1) or leaf.stride != (1, 1) or leaf.padding not in ((0, 0), 0, "valid"):
                return f"a convolution of {leaf.kernel_size} mixes positions"
            products += 1
            kinds.add("convolution")
        elif isinstance(leaf, nn.Dropout):
            if leaf.p > 0 and leaf.training:
                return "dropout draws random numbers"
        elif isinstance(leaf, nn.LayerNorm):
            if len(leaf.normalized_shape) != 1:
                return "its norm spans positions"
        elif not isinstance(leaf, _POINTWISE) and any(True for _ in leaf.parameters(recurse=False)):
            return f"{type(leaf).__name__} may mix positions"
        elif not isinstance(leaf, _POINTWISE) and not _is_activation(leaf):
            return f"{type(leaf).__name__} is not known to work position by position"
    if products < 2 or len(kinds) != 1:
        return "it has no pair of linear layers or 1x1 convolutions"
    return None


def _is_activation(leaf: nn.Module) -> bool:
    """timm's own activations, without parameters."""
    return type(leaf).__module__.startswith("timm.layers.activations") and not list(leaf.parameters()) and not list(leaf.buffers())


def dimension(module: nn.Module) -> int:
    """The dimension of the input that is sliced: tokens or rows."""
    return 2 if any(isinstance(leaf, nn.Conv2d) for leaf in module.modules()) else 1


class _Anchor(torch.autograd.Function):
    """Keeps the input for `_Sliced`, before that does any work: a second run ends here."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Sliced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, run: Any, dim: int, anchor: Any, settings: tuple[Any, ...], *parameters: Any
    ) -> torch.Tensor:
        ctx.run, ctx.dim, ctx.anchor, ctx.settings, ctx.parameters = run, dim, anchor, settings, parameters
        out: torch.Tensor | None = None
        with _autocast(settings):
            for start, length in _parts(value.shape[dim]):
                part = run(value.narrow(dim, start, length))
                if out is None:
                    shape = (*value.shape[:-1], part.shape[-1]) if dim == 1 else (value.shape[0], part.shape[1], *value.shape[2:])
                    out = _empty(shape, part)
                out.narrow(dim, start, length).copy_(part)
                del part
        assert out is not None
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # the parts' own graphs end here
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (value,) = ctx.anchor.saved_tensors
        dim, wanted = ctx.dim, [parameter for parameter in ctx.parameters if parameter.requires_grad]
        needs_input = ctx.needs_input_grad[0]
        into = torch.empty_like(value) if needs_input else None
        sums: list[torch.Tensor | None] = [None] * len(wanted)
        for start, length in _parts(value.shape[dim]):
            part = value.narrow(dim, start, length).detach().requires_grad_(needs_input)
            with torch.enable_grad(), _autocast(ctx.settings):
                out = ctx.run(part)
            inputs = [*([part] if needs_input else []), *wanted]
            found = list(torch.autograd.grad(out, inputs, gradient.narrow(dim, start, length)))
            del out
            if into is not None:
                into.narrow(dim, start, length).copy_(found.pop(0))
            for index, more in enumerate(found):
                sums[index] = more if sums[index] is None else sums[index].add_(more)  # type: ignore[union-attr]
            del found, part
        given = iter(sums)
        return (into, None, None, None, None, *(next(given) if parameter.requires_grad else None for parameter in ctx.parameters))


def _parts(size: int) -> list[tuple[int, int]]:
    edges = [size * number // SLICES for number in range(SLICES + 1)]
    return [(start, end - start) for start, end in itertools.pairwise(edges) if end > start]


def _empty(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    if like.dim() == 4 and not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last):
        return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _settings(device_type: str) -> tuple[Any, ...]:
    return device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def _autocast(settings: tuple[Any, ...]) -> torch.autocast:
    # Without its cache: a copy of a weight made for one slice belongs to that slice's graph.
    device_type, enabled, dtype = settings
    return torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False)


def _hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def run_in_slices(module: nn.Module, run: Any, value: torch.Tensor) -> torch.Tensor:
    """The module's output for `value`, `run` being its own forward. Without gradients it is simply run."""
    if not torch.is_grad_enabled() or not value.requires_grad:
        return run(value)
    if any(_hooks(inner) for inner in module.modules() if inner is not module):
        raise RuntimeError(
            f"{type(module).__name__} runs in slices by its plan, and a hook on a module inside would see parts without gradients; put the "
            "hook on the whole, or plan with exact 'bitwise'"
        )
    parameters = list(module.parameters())
    anchored = _Anchor.apply(value)
    return _Sliced.apply(anchored, run, dimension(module), anchored.grad_fn, _settings(value.device.type), *parameters)
