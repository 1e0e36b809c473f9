"""Whether images that a run predicts are like those that it was trained on: each by itself, and all of them together.

An image's drift is its distance in units of the limit that 1 of 100 images of the same kind would exceed (see `training_statistics`). A
batch is compared by Kolmogorov and Smirnov's two-sample test on the features' distances, brightness, contrast and detail, with
Bonferroni's correction for their number; a difference is told only where the cumulated distributions also lie apart by `LEAST_GAP`, since
of enough images any difference is significant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import nlargest
from math import isfinite
from statistics import median

from hiresvis.data.census import shrink
from hiresvis.data.contract import Contract
from hiresvis.data.regions import Size
from hiresvis.training_statistics import EXCEEDED_BY, READINGS, Described, TrainingStatistics

ALPHA = 0.01  # of all comparisons of a batch together
LEAST_GAP = 0.2
FEWEST = 8  # images, of which a batch is compared
_SHOWN = 3
_DEVIATIONS = 3  # of the number of far images that chance gives, above which they are too many
_BEYOND = 1.1  # of the largest and the smallest scale in training, what is another scale


@dataclass(frozen=True, slots=True)
class Difference:
    """A batch against the training set, in one kind of value.

    Attributes:
        kind: features (distances), brightness, contrast or detail.
        p_value: of the test, before any correction.
        gap: the largest distance between the two cumulated distributions, 0 to 1.
        median, usual: of the batch, and of the training set.
    """

    kind: str
    p_value: float
    gap: float
    median: float
    usual: float


@dataclass(slots=True, eq=False)
class Watch:
    """Takes the images of a prediction one by one.

    Args:
        statistics, contract: of the run.
    """

    statistics: TrainingStatistics
    contract: Contract
    _drifts: list[tuple[float, str]] = field(default_factory=list)  # beyond the limit
    _values: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in ("features", *READINGS)})
    _num_images: int = 0
    _scales: Counter[float] = field(default_factory=Counter)

    def add(self, title: str, size: Size | None, image: Described) -> float | None:
        """The image's drift; None where it cannot be told, since its features are no numbers.

        Args:
            size: (height, width) of the image, where it is known.
        """
        distances = self.statistics.distances(image)
        drift = self.statistics.drift(distances)
        if not isfinite(drift):
            return None
        self._num_images += 1
        if drift > 1:
            self._drifts.append((drift, title))
        for kind, value in {"features": distances.features, **image.readings}.items():
            self._values[kind].append(value)
        if size is not None:
            self._scales[shrink(self.contract.preprocess(), *size)] += 1
        return drift

    def differences(self) -> list[Difference]:
        """The comparisons of all images so far; none of fewer than `FEWEST`, and of what the training set says too little of."""
        from scipy.stats import ks_2samp

        found = []
        for kind, values in self._values.items():
            usual = self.statistics.compared[kind]
            if min(len(values), len(usual)) >= FEWEST:
                test = ks_2samp(values, usual)
                found.append(Difference(kind, float(test.pvalue), float(test.statistic), median(values), median(usual)))
        return found

    def lines(self, again: str) -> Iterator[str]:
        """What to tell people at the end.

        Args:
            again: the command that measures on images with labels.
        """
        count, far = self._num_images, len(self._drifts)
        if not count:
            return
        usual = f"{1 - EXCEEDED_BY:.0%} of images like those of training"
        by_chance = 2 * EXCEEDED_BY * count  # two distances, each with its limit
        worst = ", ".join(f"{title} {drift:.1f}" for drift, title in nlargest(_SHOWN, self._drifts))
        text = f"drift: {far} of {count} images ({far / count:.0%}) lie farther from the training images than {usual} (drift above 1"
        yield f"{text}; by chance up to {by_chance:.0f}){f'; farthest: {worst}' if worst else ''}"
        compared = self.differences()
        told = [one for one in compared if one.p_value * len(compared) < ALPHA and one.gap >= LEAST_GAP]
        for one in told:
            what = "distance of features" if one.kind == "features" else one.kind
            yield (
                f"drift: as a whole the {what} differs: median {one.median:.3g}, in training {one.usual:.3g} "
                f"(gap {one.gap:.2f} of 1, p {min(1.0, one.p_value * len(compared)):.1g} of {len(compared)} tests)"
            )
        scale = self._other_scale()
        if scale:
            yield scale
        if told or scale or far > by_chance + _DEVIATIONS * by_chance**0.5 + 1:
            yield f"drift: what was measured in training need not hold for these images: look at the farthest, label some, and run {again}"
        elif compared:
            yield f"drift: as a whole they do not differ from the training images ({len(compared)} tests)"

    def _other_scale(self) -> str:
        """Images that are reduced more or less than any in training: what they show comes in another size."""
        if not self.statistics.sizes["shrink"]:
            return ""
        low, *_, high = self.statistics.sizes["shrink"]
        others = {scale: number for scale, number in self._scales.items() if not low / _BEYOND <= scale <= high * _BEYOND}
        if not others:
            return ""
        usual = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        ends = f"{min(others):g}" if len(others) == 1 else f"{min(others):g} to {max(others):g}"
        return (
            f"drift: {sum(others.values())} of {self._num_images} images have {ends} stored pixels to one of the model's, and in training "
            f"it was {usual}: the same thing is of another size in them"
        )
