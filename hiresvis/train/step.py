"""One optimizer step: forward and backward of micro-batches, then clip, step and clear.

The gradient of a batch is the sum over its micro-batches of (sum of per-sample losses) / (images in the whole batch). So the split,
even or uneven, changes nothing but the order of additions (in models without batch statistics).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hiresvis.backbone.lora import merged_state
from hiresvis.device import AUTOCAST_DTYPES
from hiresvis.train.average import Average
from hiresvis.train.batches import running_statistics
from hiresvis.train.losses import Loss
from hiresvis.train.state import pack_rng, unpack_rng

Precision = Literal["fp32", "bf16", "fp16"]
Prepare = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one optimizer step did.

    Attributes:
        grad_norm: the gradient's total 2-norm before clipping; may be non-finite.
        applied: False: the step was skipped, parameters and batch statistics are as before it.
        loss: the batch's mean loss.
        non_finite: positions within the batch, in the order of accumulation, of samples with a non-finite loss.
        scale_lowered: skipped because fp16 gradients overflowed while the loss scale could still go down: usual in the first steps.
    """

    grad_norm: float
    applied: bool
    loss: float = 0.0
    non_finite: tuple[int, ...] = ()
    scale_lowered: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StepMark:
    """The moment before a batch, as far as what changes in it is not kept anyway; see `TrainStep.mark`."""

    rng: tuple[dict[str, Tensor], dict[str, Any]]
    scaler: dict[str, Any]


class TrainStep:
    """Forward and backward of micro-batches, then one optimizer step.

    Args:
        model: in the mode that the caller has set; never switched here.
        optimizer: over the model's trainable parameters.
        loss_fn: outputs (b, k) float32 and targets, as the loader gives them, to per-sample losses (b,).
        prepare: images as the loader gives them, already on the device, to the model's input (b, c, h, w).
        device: where the model is.
        precision: fp32, or autocast to bf16 or fp16 (fp16 with a loss scaler).
        clip_grad: largest total 2-norm of the gradient; None: no clipping.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Loss,
        *,
        prepare: Prepare,
        device: torch.device,
        precision: Precision = "fp32",
        clip_grad: float | None = None,
    ) -> None:
        if precision not in AUTOCAST_DTYPES:
            raise ValueError(f"precision {precision!r} is not one of {', '.join(AUTOCAST_DTYPES)}")
        self.model, self.optimizer, self.loss_fn, self.prepare = model, optimizer, loss_fn, prepare
        self.device, self.precision, self.clip_grad = torch.device(device), precision, clip_grad
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self.average: Average | None = None  # of the weights; whoever wants one sets it
        self._losses: list[Tensor] = []  # per-sample losses of the batch so far, detached
        self._loss: Tensor | None = None  # their sum / batch_images
        self._statistics_before: list[Tensor] = []
        self._optimizer_runs = False  # True for good where it broke off

    def accumulate(self, images: Tensor, targets: Tensor, *, batch_images: int) -> Tensor:
        """Adds one micro-batch's gradient.

        Args:
            images: (b, h, w, c) as the loader gives them.
            targets: (b,) int64, or (b, k) float64.
            batch_images: images in the whole batch that the optimizer sees.

        Returns:
            The micro-batch's share of the batch's mean loss: a detached scalar on the device (no synchronisation).
        """
        if not self._losses:
            # A non-finite batch would poison the running statistics for good, even though its step is skipped.
            self._statistics_before = [buffer.clone() for buffer in self._statistics()]
        inputs = self._to_device(images)
        targets = targets.to(self.device, non_blocking=True)
        # The autocast weight cache lives as long as this context: leave it before backward, enter it anew for each micro-batch.
        with self._autocast():
            losses = self.loss_fn(self.model(inputs).float(), targets)
        del inputs
        loss = losses.sum() / batch_images
        self._losses.append(losses.detach())
        del losses
        self.scaler.scale(loss).backward()
        loss = loss.detach()
        self._loss = loss if self._loss is None else self._loss + loss
        return loss

    def apply(self) -> StepOutcome:
        """Clips and takes the optimizer step, or skips it when the loss or the gradient is not finite; clears the gradients.

        Reads the device once (loss and norm together).
        """
        assert self._loss is not None, "apply without accumulate"
        scale_before = self.scaler.get_scale()
        grads = [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
        if grads:
            self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros((), device=self.device)
        # float64 holds both exactly, and one read brings both.
        loss_value, norm_value = torch.stack([self._loss.double(), norm.double()]).tolist()
        applied = _is_finite(loss_value) and _is_finite(norm_value)
        non_finite: tuple[int, ...] = ()
        if applied and grads:
            if self.clip_grad is not None:
                torch.nn.utils.clip_grads_with_norm_(self._parameters(), self.clip_grad, norm)
            self._optimizer_runs = True
            self.scaler.step(self.optimizer)
            if self.average is not None:
                self.average.update()
            self._optimizer_runs = False
        elif not applied:
            non_finite = tuple((~torch.isfinite(torch.cat(self._losses))).nonzero().flatten().tolist())
            self._put_statistics_back()
        if grads:
            self.scaler.update()
        scale_lowered = not applied and _is_finite(loss_value) and self.scaler.is_enabled() and scale_before > 1.0
        self.discard()
        return StepOutcome(norm_value, applied, loss_value, non_finite, scale_lowered)

    def discard(self) -> None:
        """Forgets what was accumulated since the last step; the gradients' memory is given back."""
        self.optimizer.zero_grad(set_to_none=True)
        self._losses, self._loss, self._statistics_before = [], None, []

    def mark(self) -> StepMark:
        """What `take_back` needs to go back to this moment, which is before a batch's first micro-batch. Costs microseconds."""
        assert not self._losses, "in the middle of a batch"
        return StepMark(pack_rng(), dict(self.scaler.state_dict()))

    def take_back(self, mark: StepMark) -> bool:
        """Goes back to the mark after a batch broke off, at whatever operator: random state, batch statistics, loss scale, gradients.

        Returns:
            whether weights and optimizer are as they were. An optimizer that broke off may have changed some of them for good (fused
            kernels leave no trace by which to tell); then only a snapshot brings the run back.
        """
        if self._statistics_before:
            self._put_statistics_back()
        self.discard()
        unpack_rng(*mark.rng)
        if self.scaler.is_enabled():  # a new one: the old remembers that gradients were unscaled
            self.scaler = torch.amp.GradScaler(self.device.type)
            self.scaler.load_state_dict(mark.scaler)
        intact, self._optimizer_runs = not self._optimizer_runs, False
        return intact

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Outputs (b, k) float32 on the device, at the step's precision. The model's mode is the caller's."""
        inputs = self._to_device(images)
        with self._autocast():
            return self.model(inputs).float()

    def predict_with_flips(self, images: Tensor) -> Tensor:
        """The mean of `predict` for the images (b, h, w, c) and for their mirror images, left and right changed over; so an image and its
        mirror image have the same."""
        mirrored = self.predict(images.flip(2))
        return (self.predict(images) + (mirrored.flip(3) if mirrored.dim() == 4 else mirrored)) / 2  # maps are mirrored back

    def as_evaluated(self) -> AbstractContextManager[None]:
        """The model has the weights that are evaluated and kept: the averaged ones, where there is an average."""
        return nullcontext() if self.average is None else self.average.in_place()

    def evaluated_weights(self) -> dict[str, Tensor]:
        """The state dict of these weights, low-rank adapters merged: a plain model's."""
        return merged_state(self.model, self.model.state_dict() if self.average is None else self.average.weights(self.model))

    def state_dict(self) -> dict[str, Any]:
        """The loss scaler's state, plain numbers (empty unless fp16)."""
        return dict(self.scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back what `state_dict` gave. A state of another precision is left out: there is no scale to carry over."""
        if state and self.scaler.is_enabled():
            self.scaler.load_state_dict(state)

    def _autocast(self) -> torch.autocast:
        dtype = AUTOCAST_DTYPES[self.precision]
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def _to_device(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            return self.prepare(images.to(self.device, non_blocking=True))

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    def _statistics(self) -> list[Tensor]:
        return [*running_statistics(self.model, counters=True).values()]

    @torch.no_grad()
    def _put_statistics_back(self) -> None:
        for now, before in zip(self._statistics(), self._statistics_before, strict=True):
            now.copy_(before)


def _is_finite(value: float) -> bool:
    return value - value == 0.0
