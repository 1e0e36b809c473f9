"""LP-FT (Kumar et al. 2022, *Fine-Tuning can Distort Pretrained Features and Underperform Out-of-Distribution*): the head first, then all.

A new head's gradients are noise, and fine-tuning everything from the first step on lets them change features that were good. So the head
alone is trained for the first epochs, and everything after that, each with a learning rate and a warm-up of its own.

One optimizer holds all that is ever trained: a parameter that has no gradient gets no step, no decay and no state, so that the body's state
comes into being with its first step. The plan is made for the second phase; the first saves nothing of the body, and needs less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from hiresvis.train.freezing import TrainMode, classifier_parameters

HEAD_SHARE = 0.2  # of the epochs; in the paper the head is trained to its end, and is cheap


def auto_head_epochs(epochs: int) -> tuple[int, str]:
    """Epochs of the head alone, and the reason.

    >>> auto_head_epochs(20), auto_head_epochs(2)
    ((4, '20% of 20 epochs'), (1, 'one at least, of 2 epochs'))
    """
    share = round(HEAD_SHARE * epochs)
    return (share, f"{HEAD_SHARE:.0%} of {epochs} epochs") if share else (1, f"one at least, of {epochs} epochs")


class HeadFirst:
    """Takes all but the classifier out of training for the first epochs.

    Args:
        model: with `requires_grad` as in the second phase.
        epochs: of the first phase.
        train_mode: puts the model in train mode as the second phase has it.
        frozen_norm: names of layers whose batch statistics stay in both phases.

    Attributes:
        epochs: of the first phase.
    """

    def __init__(self, model: nn.Module, epochs: int, *, train_mode: Callable[[], None], frozen_norm: Iterable[str] = ()) -> None:
        head = frozenset(classifier_parameters(model))
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.epochs = epochs
        self._body = [parameter for name, parameter in trained.items() if name not in head]
        self._count = sum(parameter.numel() for parameter in trained.values())
        self._head_count = self._count - sum(parameter.numel() for parameter in self._body)
        self._both = train_mode
        self._set(False)
        self._head_alone = TrainMode(model, frozen_norm=frozen_norm)  # the body in eval mode: features without drop-path, statistics kept
        self._set(True)

    def train_mode(self, epoch: int) -> None:
        """The model as this epoch trains it: what has a gradient, and every module's mode."""
        alone = epoch <= self.epochs
        self._set(not alone)
        (self._head_alone if alone else self._both)()

    def begins(self, epoch: int) -> str:
        """For people, what is trained from this epoch on; empty where it is what was trained before."""
        if epoch == 1:
            upto = "epoch 1 trains" if self.epochs == 1 else f"epochs 1 to {self.epochs} train"
            return f"{upto} the head alone ({self._head_count:,} of {self._count:,} parameters), then everything is trained"
        return f"epoch {epoch}: everything is trained from here on" if epoch == self.epochs + 1 else ""

    def _set(self, requires_grad: bool) -> None:
        for parameter in self._body:
            parameter.requires_grad_(requires_grad)
