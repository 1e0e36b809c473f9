"""Where in an image the evidence for an output lies: HiResCAM (Draelos and Carin 2020, *Use HiResCAM instead of Grad-CAM for faithful
explanations of convolutional neural networks*) on the last feature map.

Each cell of the map gets the sum over its channels of activation times gradient. With global average pooling and one linear layer that is
what the cell adds to the output, exactly, and the same as Grad-CAM. Grad-CAM averages the gradient over all cells first, which
holds for such heads alone; an attention layer weighs each cell by itself.

- ConvNets and pyramids: the map that timm's `forward_head` takes. All before it runs without a graph.
- Plain transformers: the patch tokens that the last block takes. What it gives is too late: a class token that is pooled has all its
  evidence by then, and patches have no gradient. Gradients need no attention weights, which fused attention never makes; rollout (Abnar and
  Zuidema 2020) would have to run each block's attention again, and knows no class.

So backward runs through a head, or the last block and the head: what is held is little more than an evaluation of the same images. A map
has the model's stride and says no more than that; where evidence arises outside of its cell, in what a cell sees around it, it is told at
the cell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hiresvis.backbone.segments import without_plan

Asked = Callable[[Tensor], Tensor]  # of outputs (b, k), the number (b,) whose evidence is wanted
_MOST_PREFIXES = 16  # class token, distillation token, registers
_SCALE = 1024.0  # of gradients, so that in half precision they are not lost; of a map, shares alone matter


def log_odds(target: int) -> Asked:
    """Of a class against all others: the softmax's own scale, on which a sure network still has a gradient."""

    def asked(outputs: Tensor) -> Tensor:
        others = torch.cat([outputs[:, :target], outputs[:, target + 1 :]], dim=1)
        return outputs[:, target] - others.logsumexp(dim=1) if others.shape[1] else outputs[:, target]

    return asked


def output(target: int) -> Asked:
    """One output as it is: a label's log odds, or a value."""
    return lambda outputs: outputs[:, target]


def contributions(model: nn.Module, images: Tensor, asked: Sequence[Asked]) -> Tensor:
    """What each cell of the last feature map adds to what is asked, or takes from it.

    Weights, buffers, gradients, modes, a plan that is applied and the random state are as before; the model should be in eval mode. An
    autocast that is around stays on.

    Args:
        model: a timm classifier.
        images: (b, c, h, w) as the model takes them.
        asked: of the model's outputs in float32.

    Returns:
        (len(asked), b, rows, columns) float32, on the images' device, in units of their own.

    Raises:
        ValueError: the model has no such map; the text says what it has.
    """
    if not (hasattr(model, "forward_features") and hasattr(model, "forward_head")):
        raise ValueError(f"{type(model).__name__} does not tell its features from its head")
    network: Any = model
    with without_plan(model), torch.random.fork_rng(devices=[]), torch.no_grad():
        with _cut_before(_last_block(model)) as cut:
            features = network.forward_features(images)
            leaf, after = (cut[0], features) if cut else _leaf_of(features)
        with torch.enable_grad():
            outputs = network.forward_head(after).float()
            totals = [one(outputs).sum() * _SCALE for one in asked]
            found = [torch.autograd.grad(total, leaf, retain_graph=True, allow_unused=True)[0] for total in totals]
        if any(gradient is None for gradient in found):
            raise ValueError("its outputs do not follow from its last map alone")
        return torch.stack([_cells(model, leaf.detach().float(), gradient.float() / _SCALE, images) for gradient in found])


def grown(contribution: Tensor, size: tuple[int, int]) -> Tensor:
    """A contribution (rows, columns) between the middles of its cells: (height, width), in the same units."""
    return functional.interpolate(contribution[None, None].float(), size, mode="bilinear", align_corners=False)[0, 0]


def shares(contribution: Tensor, *, signed: bool = False) -> Tensor:
    """Each place's contribution as a share of the largest, 0 to 1: what speaks for it alone, and 0 all over where nothing does.

    Args:
        signed: what speaks against it counts alike, as for a value that is neither good nor bad.
    """
    wanted = contribution.abs() if signed else contribution.clamp(min=0)
    most = wanted.max()
    return wanted / most if most > 0 else torch.zeros_like(wanted)


def attribute(model: nn.Module, images: Tensor, asked: Asked) -> Tensor:
    """Maps (b, h, w) in 0 to 1, of the images' own size, of what speaks for it; see `contributions`."""
    cells = contributions(model, images, [asked])[0]
    return torch.stack([shares(grown(one, (images.shape[-2], images.shape[-1]))) for one in cells])


def _leaf_of(features: Any) -> tuple[Tensor, Tensor]:
    """The features as the beginning of a graph, and a copy for a head that may write to it."""
    if not isinstance(features, Tensor) or features.dim() not in (3, 4):
        raise ValueError("its features are no single map")
    leaf = features.detach().requires_grad_()
    with torch.enable_grad():
        return leaf, leaf.clone()


def _last_block(model: nn.Module) -> nn.Module | None:
    """The last of a model's numbered blocks."""
    found: nn.Module | None = None
    for name in ("blocks", "stages", "layers"):
        found = getattr(model, name, None)
        if isinstance(found, nn.ModuleList | nn.Sequential) and len(found):
            break
    else:
        return None
    while True:
        inner = found if isinstance(found, nn.ModuleList | nn.Sequential) else getattr(found, "blocks", None)
        if not (isinstance(inner, nn.ModuleList | nn.Sequential) and len(inner)):
            return found
        found = inner[-1]


@contextmanager
def _cut_before(block: nn.Module | None) -> Iterator[list[Tensor]]:
    """The graph begins at the tokens (b, n, c) that the block takes, which come in the list; a block of something else is left alone."""
    cut: list[Tensor] = []

    def begin(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not args or not isinstance(args[0], Tensor) or args[0].dim() != 3:
            return None
        cut[:] = [args[0].detach().requires_grad_()]
        torch.set_grad_enabled(True)
        return (cut[0].clone(), *args[1:])

    handle = None if block is None else block.register_forward_pre_hook(begin)
    try:
        yield cut
    finally:
        torch.set_grad_enabled(False)
        if handle is not None:
            handle.remove()


def _cells(model: nn.Module, features: Tensor, gradient: Tensor, images: Tensor) -> Tensor:
    """(b, rows, columns) of activation times gradient, summed over channels.

    Raises:
        ValueError: tokens that are no grid of the image, or none that has a gradient.
    """
    if features.dim() == 4:
        dim = -1 if _channels_last(model, features) else 1
    else:
        rows, columns = _grid(model, features.shape[1], images.shape[-2:])
        features, gradient = (one[:, -rows * columns :].unflatten(1, (rows, columns)) for one in (features, gradient))
        dim = -1
    if not gradient.any():
        raise ValueError("no cell of its last map has a part in the outputs")
    return (features * gradient).sum(dim=dim)


def _channels_last(model: nn.Module, features: Tensor) -> bool:
    if getattr(model, "output_fmt", "NCHW") == "NHWC":
        return True
    width = getattr(model, "num_features", None)
    return features.shape[-1] == width and features.shape[1] != width


def _grid(model: nn.Module, tokens: int, size: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of the patches, which stand behind whatever other tokens there are."""
    embed, info = getattr(model, "patch_embed", None), getattr(model, "feature_info", None)
    grids = [tuple(getattr(embed, "grid_size", None) or ())]
    if isinstance(info, list) and info and "reduction" in info[-1]:
        grids += [tuple(rounded(side / info[-1]["reduction"]) for side in size) for rounded in (math.ceil, math.floor)]
    for grid in grids:
        if len(grid) == 2 and 0 <= tokens - grid[0] * grid[1] <= _MOST_PREFIXES:
            return grid[0], grid[1]
    raise ValueError(f"its {tokens} tokens are no grid of the image")
