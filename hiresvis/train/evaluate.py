"""Evaluation of one split: the same code for the training loop and for the evaluate command, so that both give the same digits."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hiresvis.train.batches import fetch
from hiresvis.train.joining import WindowJoin
from hiresvis.train.losses import CrossEntropy
from hiresvis.train.metrics import compute_metrics
from hiresvis.train.step import LossFn, TrainStep


@dataclass(frozen=True, slots=True)
class Row:
    """One sample's result. label and predicted are class numbers; score is the predicted class's probability."""

    path: str
    label: int
    predicted: int
    score: float
    loss: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of a split.

    Attributes:
        loss: mean per-sample loss.
        metrics: by name, see `metrics.METRICS`.
        rows: one per sample, in the loader's order.
        scores: (n, classes) float32 probabilities, CPU.
    """

    loss: float
    metrics: Mapping[str, float]
    rows: tuple[Row, ...]
    scores: Tensor


def evaluate(step: TrainStep, loader: Any, *, name_of: Callable[[int], str] = str, loss_fn: LossFn | None = None) -> Evaluation:
    """`evaluation_steps` run to its end."""
    steps = evaluation_steps(step, loader, name_of=name_of, loss_fn=loss_fn)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value


def evaluation_steps(
    step: TrainStep, loader: Any, *, name_of: Callable[[int], str] = str, loss_fn: LossFn | None = None
) -> Generator[tuple[int, int], None, Evaluation]:
    """Evaluates a split batch by batch, in eval mode; every module's mode and the random state are put back.

    Losses are taken in float32 from the logits (of an image in windows: their mean), sums and metrics on the CPU over the whole split.

    Args:
        step: its model and precision are used; nothing is trained.
        loader: yields items with images, targets and indices.
        name_of: a sample's index to its path.
        loss_fn: per-sample loss; plain cross entropy where None (no smoothing, no class weights: comparable between runs).

    Yields:
        (batches done, batches in all) after each batch.

    Returns:
        The evaluation.
    """
    loss_fn = CrossEntropy() if loss_fn is None else loss_fn
    logits_of: list[Tensor] = []
    targets_of: list[Tensor] = []
    indices: list[int] = []
    join = WindowJoin()
    with eval_mode(step.model):
        for done, item in enumerate(fetch(loader), start=1):
            complete, joined, labels = join.add(item, step.predict(item.images).cpu())
            logits_of.append(joined)
            targets_of.append(labels)
            indices.extend(int(index) for index in complete)
            yield done, len(loader)
    if not indices:
        raise ValueError("the split to evaluate is empty")
    logits, targets = torch.cat(logits_of), torch.cat(targets_of).cpu()
    losses = loss_fn(logits, targets)
    scores = logits.softmax(dim=1)
    best, predicted = scores.max(dim=1)
    columns = zip(indices, targets.tolist(), predicted.tolist(), best.tolist(), losses.tolist(), strict=True)
    rows = tuple(Row(name_of(index), label, chosen, score, loss) for index, label, chosen, score, loss in columns)
    return Evaluation(float(losses.double().mean()), compute_metrics(scores, targets), rows, scores)


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
