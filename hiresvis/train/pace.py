"""Times the forward of each unit of the chain on the device at hand, so that the planner weighs recompute by what it takes there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

REPEATS = 3
MOST_SECONDS = 5.0  # of all repeats together


class Predicts(Protocol):
    """A model on its device, and how it is run without gradients; a `TrainStep` is one."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def device(self) -> torch.device: ...

    def predict(self, images: torch.Tensor, /) -> Any: ...


def time_units(
    step: Predicts, unit_modules: Sequence[tuple[str, ...]], images: torch.Tensor, *, clock: Callable[[], float] = time.perf_counter
) -> dict[int, float]:
    """Seconds of one image's forward by the unit's index: the least of a few runs after one that warms up.

    Runs forwards without gradients, in the mode that the model is in. Statistics and random state move on; putting them back is
    the caller's.

    Args:
        unit_modules: of each unit, the modules that are called one after another; empty: it is not timed.
        images: as `predict` takes them; of a `TrainStep` (b, h, w, c) as the loader gives them.
    """
    on_gpu = step.device.type == "cuda"

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize(step.device)
        return clock()

    started: dict[int, float] = {}
    taken: dict[int, float] = {}

    def begin(index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            started[index] = now()

        return hook

    def end(index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            seconds = (now() - started[index]) / len(images)
            taken[index] = min(taken.get(index, seconds), seconds)

        return hook

    modules = dict(step.model.named_modules())
    handles = []
    for index, names in enumerate(unit_modules):
        if names:
            handles.append(modules[names[0]].register_forward_pre_hook(begin(index)))
            handles.append(modules[names[-1]].register_forward_hook(end(index)))
    try:
        began = clock()
        step.predict(images)
        if (first := clock() - began) < MOST_SECONDS:  # else that one has to do
            taken.clear()
            for _ in range(max(1, min(REPEATS, int(MOST_SECONDS / max(first, 1e-9))))):
                step.predict(images)
    finally:
        for handle in handles:
            handle.remove()
    return taken
