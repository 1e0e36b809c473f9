"""Around a batch: taking it from a loader without touching the training's random state, and the statistics that layers take of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def fetch(loader: Any) -> Iterator[Any]:
    """The loader's items. torch's DataLoader draws its base seed from the global generator each time it is iterated: a run that was resumed
    in mid-epoch, or evaluated once more, would then draw other dropout masks than one that was not. Here the generator is put back."""
    with _random_state_kept():
        items = iter(loader)
    while True:
        with _random_state_kept():
            item = next(items, None)
        if item is None:
            return
        yield item


def running_statistics(model: nn.Module, *, counters: bool = False) -> dict[str, Tensor]:
    """Buffers by name that a forward in train mode changes (BatchNorm's, EvoNorm's), of the modules that are in train mode.

    Args:
        counters: of batches seen as well, which are whole numbers.
    """
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        if module.training
        for name, buffer in module.named_buffers(recurse=False)
        if name.startswith("running_") or (counters and name == "num_batches_tracked")
    }


@contextmanager
def _random_state_kept() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
