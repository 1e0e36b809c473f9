"""Taking micro-batches from a loader without touching the training's random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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


@contextmanager
def _random_state_kept() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
