"""Evaluation of one split: the same code for the training loop and for the evaluate command, so that both give the same digits."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hiresvis.train.batches import fetch
from hiresvis.train.joining import WindowJoin
from hiresvis.train.losses import Loss
from hiresvis.train.mask_evaluation import PixelCounts, mask_steps
from hiresvis.train.metrics import compute_metrics, mask_metrics
from hiresvis.train.step import TrainStep


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Result of a split, sample by sample in the loader's order.

    Attributes:
        task: classify | multilabel | regress | segment.
        loss: mean per-sample loss.
        metrics: by name, see `metrics.METRICS`.
        names: of the samples.
        targets: (n,) int64 class numbers; multilabel: (n, k) of 0 and 1; regress: (n, k) in their own units.
        scores: (n, k): probabilities, or predicted values in the targets' units.
        losses: (n,) float32.
        outputs: (n, k) float32, of the network.
        pixels: of segment, which has them in place of targets, scores and outputs (all empty).
    """

    task: str
    loss: float
    metrics: Mapping[str, float]
    names: tuple[str, ...]
    targets: Tensor
    scores: Tensor
    losses: Tensor
    outputs: Tensor
    pixels: PixelCounts | None = None

    def read_by(self, loss: Loss) -> Evaluation:
        """The same outputs with scores as another loss reads them, and the metrics of those."""
        if self.pixels is not None:  # there is nothing to read in another way
            return self
        scores = loss.scores(self.outputs)
        return replace(self, scores=scores, metrics=compute_metrics(self.task, scores, self.targets))


def evaluate(step: TrainStep, loader: Any, *, name_of: Callable[[int], str] = str, flips: bool = False) -> Evaluation:
    """`evaluation_steps` run to its end."""
    steps = evaluation_steps(step, loader, name_of=name_of, flips=flips)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value


def evaluation_steps(
    step: TrainStep, loader: Any, *, name_of: Callable[[int], str] = str, flips: bool = False
) -> Generator[tuple[int, int], None, Evaluation]:
    """Evaluates a split batch by batch, in eval mode and with averaged weights where there are; modes, weights and the random state are
    put back.

    Losses are taken from float32 outputs (of an image in windows: their mean), without smoothing, so that runs can be compared; sums and
    metrics on the CPU over the whole split.

    Args:
        step: its model, precision and loss are used; nothing is trained.
        loader: yields items with images, targets and indices.
        name_of: a sample's index to its path.
        flips: each image is also seen mirrored, see `TrainStep.predict_with_flips`.

    Yields:
        (batches done, batches in all) after each batch.

    Returns:
        The evaluation.
    """
    evaluated = _against_masks if step.loss_fn.task == "segment" else _against_rows
    with eval_mode(step.model), step.as_evaluated():
        return (yield from evaluated(step, loader, name_of, flips=flips))


def _against_rows(
    step: TrainStep, loader: Any, name_of: Callable[[int], str], *, flips: bool
) -> Generator[tuple[int, int], None, Evaluation]:
    outputs_of: list[Tensor] = []
    targets_of: list[Tensor] = []
    indices: list[int] = []
    join, predict = WindowJoin(), step.predict_with_flips if flips else step.predict
    for done, item in enumerate(fetch(loader), start=1):
        complete, joined, labels = join.add(item, predict(item.images).cpu())
        outputs_of.append(joined)
        targets_of.append(labels)
        indices.extend(int(index) for index in complete)
        yield done, len(loader)
    if not indices:
        raise ValueError("the split to evaluate is empty")
    outputs, targets = torch.cat(outputs_of), torch.cat(targets_of).cpu()
    losses, scores = step.loss_fn.plain(outputs, targets), step.loss_fn.scores(outputs)
    task, names = step.loss_fn.task, tuple(name_of(index) for index in indices)
    metrics = compute_metrics(task, scores, targets)
    return Evaluation(task, float(losses.double().mean()), metrics, names, targets, scores, losses, outputs)


def _against_masks(
    step: TrainStep, loader: Any, name_of: Callable[[int], str], *, flips: bool
) -> Generator[tuple[int, int], None, Evaluation]:
    indices, losses, pixels = yield from mask_steps(step, loader, flips=flips)
    none, names = torch.empty(0), tuple(map(name_of, indices))
    return Evaluation("segment", float(losses.double().mean()), mask_metrics(*pixels.total()), names, none, none, losses, none, pixels)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards each module has its own earlier mode again (frozen layers stay in eval, the rest trains)."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
