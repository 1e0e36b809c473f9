"""One result for an image that was shown to the model in windows: the mean of its windows' logits.

The mean is taken before any softmax, sigmoid or metric, so it means the same for every task whose output is one row of numbers an image:
classes, labels or values. Sums are kept in float64 and in the windows' order, so the result depends on neither the batch nor the number
of worker processes. Only the sum of the image under way is held, whatever the number of its windows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WindowJoin:
    """Takes a loader's items in their order; gives back images that are complete. One of which a window is missing never is."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._seen = 0
        self._index = -1

    def add(self, item: Any, logits: Tensor) -> tuple[tuple[int, ...], Tensor, Tensor]:
        """(indices, logits, targets) of the samples that this item completes, in their order; possibly none.

        Args:
            item: with indices, targets and `num_windows`; where that is empty or missing, every row is a sample and passes unchanged.
            logits: one row for each of the item's images, on the CPU.
        """
        counts = getattr(item, "num_windows", ())
        if not counts:
            return tuple(item.indices), logits, item.targets
        rows, joined = [], []
        for row, count in enumerate(counts):
            if count == 1:
                rows.append(row)
                joined.append(logits[row])
                continue
            if item.indices[row] != self._index:
                self._sum, self._seen, self._index = None, 0, item.indices[row]
            value = logits[row].to(torch.float64)
            self._sum = value if self._sum is None else self._sum + value
            self._seen += 1
            if self._seen == count:
                rows.append(row)
                joined.append((self._sum / count).to(logits.dtype))
                self._sum, self._seen = None, 0
        stacked = torch.stack(joined) if joined else logits[:0]
        return tuple(item.indices[row] for row in rows), stacked, item.targets[rows]
