"""FLOPs of one operator call, from the shapes of its arguments: multiply-adds times two.

Own rows instead of torch's counter, which counts the backward of grouped convolutions once per group. Operators that
are missing here move data or work element by element; against matrix products they do not count.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

aten = torch.ops.aten


def _matmul(a: torch.Tensor, b: torch.Tensor) -> int:
    return 2 * prod(a.shape) * b.shape[-1]


def _convolution(args: tuple[Any, ...], out: torch.Tensor) -> int:
    weight = args[1]
    positions = args[0] if args[6] else out  # a transposed convolution works once per input position
    return 2 * prod(weight.shape[1:]) * prod(positions.shape)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    *lead, rows, width = query.shape
    return 2 * prod(lead) * rows * key.shape[-2] * (width + value.shape[-1])


_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
}


# Operators that cost so much that keeping their output can be worth it.
PRODUCTS = {
    aten.convolution.default,
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    *_ATTENTION,
}


def forward_flops(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """FLOPs of one forward operator call (aten level); 0 for what is not a product."""
    if func is aten.convolution.default:
        return _convolution(args, out)
    if func in (aten.mm.default, aten.bmm.default):
        return _matmul(args[0], args[1])
    if func in (aten.addmm.default, aten.baddbmm.default):
        return _matmul(args[1], args[2])
    if func in _ATTENTION:
        return _attention(args[0], args[1], args[2])
    return 0
