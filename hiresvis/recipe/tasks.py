"""What belongs to each task: its losses and its metrics. The first loss is the one that `auto` means."""

from __future__ import annotations

from collections.abc import Mapping

LOSSES: Mapping[str, tuple[str, ...]] = {
    "classify": ("cross_entropy",),
    "multilabel": ("bce",),
    "regress": ("huber", "mse", "l1"),
}
METRICS: Mapping[str, tuple[str, ...]] = {
    "classify": ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "kappa"),
    "multilabel": ("map", "auroc", "macro_f1", "accuracy"),
    "regress": ("mae", "rmse", "r2"),
}
TASKS = tuple(METRICS)


def words_of(table: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Every word of a table once, in its order.

    >>> words_of({"a": ("x", "y"), "b": ("y", "z")})
    ('x', 'y', 'z')
    """
    return tuple(dict.fromkeys(word for words in table.values() for word in words))
