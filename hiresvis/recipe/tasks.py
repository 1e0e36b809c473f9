"""What belongs to each task: its losses, its metrics, its ways to balance classes. The first loss is the one that `auto` means."""

from __future__ import annotations

from collections.abc import Mapping

LOSSES: Mapping[str, tuple[str, ...]] = {
    "classify": ("cross_entropy", "focal", "bce"),
    "multilabel": ("bce", "asl", "focal"),
    "regress": ("huber", "mse", "l1"),
    "segment": ("dice_ce", "cross_entropy", "dice"),
}
METRICS: Mapping[str, tuple[str, ...]] = {
    "classify": ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "map", "kappa"),
    "multilabel": ("map", "auroc", "macro_f1", "accuracy"),
    "regress": ("mae", "rmse", "r2"),
    "segment": ("miou", "dice", "pixel_accuracy"),
}
BALANCES: Mapping[str, tuple[str, ...]] = {
    "classify": ("weights", "sampler", "focal"),
    "multilabel": ("weights", "focal"),  # an image has several labels, so an order that balances one unbalances another
}
"""Beside none, which every task has."""
TASKS = tuple(METRICS)


def auto_loss(task: str, balance: str) -> tuple[str, str]:
    """The loss that `optim.loss: auto` means, and why.

    >>> auto_loss("classify", "none")
    ('cross_entropy', 'the task is classify')
    """
    return ("focal", "data.balance is focal") if balance == "focal" else (LOSSES[task][0], f"the task is {task}")


def words_of(table: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Every word of a table once, in its order.

    >>> words_of({"a": ("x", "y"), "b": ("y", "z")})
    ('x', 'y', 'z')
    """
    return tuple(dict.fromkeys(word for words in table.values() for word in words))
