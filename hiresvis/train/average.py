"""A moving average of the weights, which is what is evaluated and kept.

Only what training changes is averaged: trained parameters and running statistics. timm's ModelEmaV3 copies the whole module, frozen parts
as well, and its copy would be a second model for the plan to hold; here the averaged values change places with the model's own for as
long as it is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hiresvis.errors import RunFolderError
from hiresvis.train.batches import running_statistics

_HORIZON_SHARE = 0.05  # of a run's steps: what the average looks back on
_LEAST_STEPS = 10


def decay_of(num_steps: int) -> float:
    """The decay whose average looks back on a twentieth of a run of so many optimizer steps.

    >>> decay_of(20), decay_of(2000), round(decay_of(200_000), 6)
    (0.9, 0.99, 0.9999)
    """
    return 1 - 1 / max(_LEAST_STEPS, round(num_steps * _HORIZON_SHARE))


class Average:
    """Exponential moving average of a model's trained parameters and running statistics, as they are now.

    The first updates weigh more: after `t` of them the decay is (1 + t) / (10 + t) at most, so that the average does not keep what the
    weights were before training.

    Args:
        model: with `requires_grad` as it is trained, on its device; `train_mode` was called.
        on_host: the average lives in host memory, at the price of a copy a step.

    Attributes:
        decay: of one optimizer step; `decay_of` the run's length, once that is known.
        num_updates: so far.
    """

    def __init__(self, model: nn.Module, *, on_host: bool = False) -> None:
        self.decay, self.num_updates = 1 - 1 / _LEAST_STEPS, 0
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._live: dict[str, Tensor] = {**trained, **running_statistics(model)}
        self._own = {name: tensor.detach().to("cpu" if on_host else tensor.device, copy=True) for name, tensor in self._live.items()}
        self._on_host = on_host and any(tensor.device.type != "cpu" for tensor in self._live.values())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The averaged values."""
        return tuple(self._own.values())

    @torch.no_grad()
    def update(self) -> None:
        """Takes in the weights after an optimizer step."""
        self.num_updates += 1
        weight = 1 - min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        if not self._on_host:
            torch._foreach_lerp_(list(self._own.values()), [tensor.detach() for tensor in self._live.values()], weight)
            return
        for name, own in self._own.items():
            own.lerp_(self._live[name].detach().to("cpu"), weight)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model holds the averaged values inside, its own again afterwards, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, own in self._own.items():
            live = self._live[name]
            if self._on_host:
                kept = live.detach().to("cpu", copy=True)
                live.copy_(own)
                own.copy_(kept)
            else:  # no copy: memory may be full
                live.data, own.data = own.data, live.data

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state dict with averaged values."""
        return {**model.state_dict(), **self._own}

    def state(self) -> dict[str, Any]:
        """JSON values to resume from, beside the tensors of `named`."""
        return {"num_updates": self.num_updates, "decay": self.decay}

    def named(self) -> Mapping[str, Tensor]:
        """The averaged values by name."""
        return self._own

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Puts back what `named` and `state` gave.

        Raises:
            RunFolderError: they are of a model with other trained parameters, or of none.
        """
        if tensors.keys() != self._own.keys():
            raise RunFolderError(
                "the snapshot's average is of other weights than this run trains: train.ema, model.freeze or model.adapt was changed. "
                "Resume with the run's own recipe, or start a new run folder."
            )
        for name, own in self._own.items():
            own.copy_(tensors[name])
        self.num_updates, self.decay = int(state["num_updates"]), float(state["decay"])
