"""Classes of unequal size: weights for the loss, and orders in which classes come equally often. No pixel is read.

Weights and draws follow from the training labels alone, so a resumed run has them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hiresvis.data.sources import Dataset

MOST_POSITIVE = 20.0  # of a label's weight: with more, the one image in a batch that has the label would be most of its gradient


def class_weights(counts: Sequence[int]) -> tuple[float, ...]:
    """For each class a weight in inverse proportion to its images, so that every class has the same part in the loss.

    The mean over the images is 1, which leaves the learning rate its meaning: n / (classes * images of the class). A class without images
    has 1.

    >>> class_weights([90, 10, 0])
    (0.5555555555555556, 5.0, 1.0)
    """
    present = sum(count > 0 for count in counts)
    return tuple(sum(counts) / (present * count) if count else 1.0 for count in counts)


def positive_weights(counts: Sequence[int], num_images: int) -> tuple[float, ...]:
    """For each label the weight of an image that has it against one that has not: images without over images with it, at most
    `MOST_POSITIVE` and at least the inverse. A label that all images have, or none, has 1.

    >>> positive_weights([50, 20, 1, 0], 100)
    (1.0, 4.0, 20.0, 1.0)
    """
    ratios = [(num_images - count) / count if 0 < count < num_images else 1.0 for count in counts]
    return tuple(min(max(ratio, 1 / MOST_POSITIVE), MOST_POSITIVE) for ratio in ratios)


def balanced_order(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """As many draws as there are samples, in which every class comes equally often, give or take one.

    Of the draws of a class each sample has the same number, give or take one: small classes come around several times, of large ones
    another part comes each epoch. Drawn so, rather than sample by sample with a probability, no class is met more often by chance.

    Args:
        labels: (n,) class numbers.

    Returns:
        (n,) positions; the second time that one comes it is larger by n, the third by 2n, and so on.
    """
    classes = np.unique(labels)
    share, rest = divmod(len(labels), len(classes))
    more = set(rng.permutation(classes)[:rest].tolist())
    drawn = []
    for label in classes.tolist():
        members = np.flatnonzero(labels == label)
        rounds, left = divmod(share + (label in more), len(members))
        drawn += [members + time * len(labels) for time in range(rounds)]
        drawn.append(rng.permutation(members)[:left] + rounds * len(labels))
    return rng.permutation(np.concatenate(drawn))


def weighing(train: Dataset) -> tuple[tuple[float, ...], str]:
    """Weights of the loss for the classes of a training set, and in words what they do."""
    counts = train.class_counts()
    if train.task == "classify":
        weights = class_weights(list(counts.values()))
        return weights, f"a sample's loss is weighed by its class, {_ends(weights, counts)}; the mean over train is 1"
    weights = positive_weights(list(counts.values()), len(train))
    cut = sum(weight == MOST_POSITIVE for weight in weights)
    limit = f"; {cut} of {len(weights)} are cut at {MOST_POSITIVE:g}" if cut else ""
    return weights, f"a label that an image has is weighed, {_ends(weights, counts)}, against one that it has not{limit}"


def sampling(train: Dataset) -> str:
    """What an order by `balanced_order` does with a training set, in words."""
    counts = {name: count for name, count in train.class_counts().items() if count}
    share = len(train) / len(counts)
    few, many = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    return (
        f"an epoch of {len(train)} images has {share:.4g} of each class: those of {few} come {share / counts[few]:.3g} times, of {many} "
        f"comes {share / counts[many]:.0%}"
    )


def _ends(weights: Sequence[float], counts: Mapping[str, int]) -> str:
    """The smallest and the largest weight of the classes that have images, by name."""
    by_name = {name: weight for (name, count), weight in zip(counts.items(), weights, strict=True) if count}
    low, high = min(by_name, key=by_name.__getitem__), max(by_name, key=by_name.__getitem__)
    return f"{by_name[low]:.3g} ({low}) to {by_name[high]:.3g} ({high})"
