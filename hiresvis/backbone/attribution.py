"""Where in an image the evidence for an output lies: Grad-CAM (Selvaraju et al. 2017) on the last map that the output follows from.

- Cell by cell (HiResCAM, Draelos and Carin 2020), where a head takes a map or patch tokens: each cell gets the sum over its channels of
  activation times gradient. Behind average pooling and one linear layer that is what the cell adds to the output, exactly, and the same as
  Grad-CAM; an attention pool weighs each cell by itself.
- Grad-CAM itself, where a class token is pooled: it has all of its evidence by then, and the other tokens no gradient. So the tokens are
  those that the last block takes. Their gradients come through one softmax and differ in sign from patch to patch, so their mean over
  patches is taken, times the activation less what all patches have in common, which says nothing of a place.

Either way the graph begins there: what is held is little more than an evaluation of the same images, by a head or a block. Gradients need
no attention weights, which fused attention never makes; rollout (Abnar and Zuidema 2020) would have to run the attention of all blocks
again, and knows no class. A map has the model's stride and says no more than that; where a cell sees around itself, what it sees there is
told at the cell.
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
        if not isinstance(features, Tensor) or features.dim() not in (3, 4):
            raise ValueError("its features are no single map")
        taken = [features if features.requires_grad else features.detach().requires_grad_(), *cut]
        with torch.enable_grad():
            outputs = network.forward_head(taken[0].clone()).float()  # a head may write to what it takes
            totals = [one(outputs).sum() * _SCALE for one in asked]
            found = [torch.autograd.grad(total, taken, retain_graph=True, allow_unused=True) for total in totals]
        return torch.stack([_cells(model, [one.detach().float() for one in taken], gradients, images) for gradients in found])


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


def _cells(model: nn.Module, taken: Sequence[Tensor], gradients: Sequence[Tensor | None], images: Tensor) -> Tensor:
    """(b, rows, columns) of what cells contribute.

    Args:
        taken: what the head takes, then, of a transformer, what the last block takes.

    Raises:
        ValueError: tokens that are no grid of the image, or none that has a gradient.
    """
    for number, (values, raw) in enumerate(zip(taken, gradients, strict=True)):
        if raw is None:
            continue
        gradient = raw.float() / _SCALE
        if values.dim() == 4:
            dim = -1 if _channels_last(model, values) else 1
        else:
            rows, columns = _grid(model, values.shape[1], images.shape[-2:])
            values, gradient = (one[:, -rows * columns :].unflatten(1, (rows, columns)) for one in (values, gradient))
            dim = -1
        if not gradient.any():
            continue
        if number:
            values, gradient = values - values.mean(dim=(1, 2), keepdim=True), gradient.mean(dim=(1, 2), keepdim=True)
        return (values * gradient).sum(dim=dim)
    raise ValueError("no cell of its last map has a part in the outputs")


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
