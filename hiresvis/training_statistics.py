"""What `fit` keeps of its training set, so that others can be held against it: sizes, brightness, contrast, detail, and features.

Two distances tell how far an image lies from it, each over what the network saw of the image (all of its windows together):

- of pixels: brightness and contrast of each channel, and detail (steps between neighbouring pixels), by Mahalanobis' distance with a
  covariance that is drawn toward its diagonal by a fixed share (after Ledoit and Wolf 2004);
- of features: what the classifier is given, by the diagonal Mahalanobis distance with variances drawn toward their mean (after Lee et al.
  2018, one normal distribution for all classes). Features of images that were trained on lie closer than those of any others, so which
  distances are usual is taken from validation.

They are told in units of a limit, which 1 of 100 images of the same kind would exceed: the prediction bound of a normal distribution of
their logarithms, which is wide where few images tell it. What neither sees: a change that leaves pixels and features alike, and images
that lie between those of training.

statistics.json lies beside contract.json and is not part of it: that one decides pixels and is compared key by key, read by people and put
into graphs; this one is some 50 kB of numbers that decide nothing, and a run without it predicts all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hiresvis.data.census import shrink
from hiresvis.data.contract import Contract, examine
from hiresvis.data.decode import open_image
from hiresvis.data.regions import Size
from hiresvis.data.sources import Sample
from hiresvis.errors import DataError, RunFolderError
from hiresvis.run import RunDirectory
from hiresvis.train.joining import WindowJoin

STATISTICS = "statistics.json"
VERSION = 1
EXCEEDED_BY = 0.01  # the share of images like those of training that lie beyond a limit
QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
SIZES = ("height", "width", "shrink")
READINGS = ("brightness", "contrast", "detail")
_LINES = 256  # rows and columns of an image that are looked at
_DARK = 1 / 255  # below it contrast and detail are rounding
_PIXEL_SHARE, _FEATURE_SHARE = 0.3, 0.1  # of the diagonal, and of the mean variance
_LEAST_VARIANCE = 1e-4  # of pixels: where images are all alike, a hundredth is a difference
_ALIKE = 1e-10  # of the mean square: variances below it are rounding
_KEPT = 500  # values of a kind, to compare batches with
_LARGEST = 700.0  # whose exponential is a float


class Distances(NamedTuple):
    """Root mean squares of an image's deviations; features 0 where there are none."""

    pixels: float
    features: float


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """One image as the network saw it.

    Attributes:
        pixels: (2 c + 1,): of each channel the mean, then of each the logarithm of the deviation, then the logarithm of the detail.
        features: (d,) pooled; empty where the model has none to ask for.
    """

    pixels: np.ndarray
    features: np.ndarray

    @property
    def readings(self) -> dict[str, float]:
        """Brightness, contrast and detail, over all channels, 0 to 1."""
        channels = len(self.pixels) // 2
        contrast, detail = np.exp(self.pixels[channels:-1]).mean() - _DARK, np.exp(self.pixels[-1]) - _DARK
        return dict(zip(READINGS, map(float, (self.pixels[:channels].mean(), contrast, detail)), strict=True))


class Describer:
    """Takes a loader's items with their features; gives each image when its last window has come."""

    def __init__(self) -> None:
        self._join = WindowJoin()

    def add(self, item: Any, features: Tensor) -> Iterator[tuple[int, Described]]:
        """(index of the sample, its description) of the images that the item completes.

        Args:
            features: (b, d) of the item's images.
        """
        if not len(item.images):
            return
        pixels = np.stack([describe_pixels(image) for image in item.images.numpy()])
        indices, rows, _ = self._join.add(item, torch.cat([torch.from_numpy(pixels), features.double()], dim=1))
        for index, row in zip(indices, rows.numpy(), strict=True):
            yield index, Described(row[: pixels.shape[1]], row[pixels.shape[1] :])


def describe_pixels(image: np.ndarray) -> np.ndarray:
    """`Described.pixels` of (h, w, c), bytes or 0 to 1; by some of its rows and columns, which take a few ms."""
    unit = 255.0 if image.dtype == np.uint8 else 1.0
    height, width = (max(1, size // _LINES) for size in image.shape[:2])
    rows, columns = (_planes(part) for part in (image[::height], image[:, ::width]))
    steps = [np.abs(np.diff(sum(planes), axis=axis)) / len(planes) for planes, axis in ((rows, 1), (columns, 0))]
    detail = np.mean([step.mean(dtype=np.float64) if step.size else 0.0 for step in steps]) / unit
    brightness = [plane.mean(dtype=np.float64) / unit for plane in rows]
    contrast = [plane.std(dtype=np.float64) / unit for plane in rows]
    return np.array([*brightness, *np.log([value + _DARK for value in (*contrast, detail)])])


def _planes(part: np.ndarray) -> list[np.ndarray]:
    """Its channels one by one, which sums over them are many times faster of."""
    return [np.ascontiguousarray(part[..., channel], np.float32) for channel in range(part.shape[2])]


def size_of(sample: Sample, contract: Contract) -> Size:
    """(height, width) of a sample, by its header.

    Raises:
        DataError: the run's model cannot take it.
    """
    with open_image(sample.path, max_pixels=contract.max_pixels, region=sample.region) as image:
        examine(image, contract.preprocess(), sample.path)
        return image.size


@dataclass(frozen=True, slots=True, eq=False)
class TrainingStatistics:
    """What is kept of a training set.

    Attributes:
        images: of train that were looked at. held_out: of validation.
        sizes: of train's images, quantiles of height, width, and shrink (stored pixels to one of the model's).
        channels: for each, of brightness and contrast (deviation within an image): mean, std and quantiles over train's images.
        pixel_mean, pixel_covariance: of `Described.pixels`, (p,) and (p, p), the covariance shrunk.
        feature_mean, feature_variance: (d,), the variance shrunk; empty where there are no features.
        limits: by kind of distance; None: too few images tell it.
        compared: by kind sorted values that batches are compared with: distances of held-out images' features, and readings of all.
    """

    images: int
    held_out: int
    sizes: Mapping[str, Sequence[float]]
    channels: Sequence[Mapping[str, Any]]
    pixel_mean: np.ndarray
    pixel_covariance: np.ndarray
    feature_mean: np.ndarray
    feature_variance: np.ndarray
    limits: Mapping[str, float | None]
    compared: Mapping[str, Sequence[float]]

    def distances(self, image: Described) -> Distances:
        """How far an image lies from the training set."""
        away = image.pixels - self.pixel_mean
        pixels = max(0.0, float(away @ np.linalg.solve(self.pixel_covariance, away)) / len(away))
        if not len(self.feature_mean):
            return Distances(pixels**0.5, 0.0)
        away = image.features - self.feature_mean
        return Distances(pixels**0.5, float(np.mean(away * away / self.feature_variance)) ** 0.5)

    def drift(self, distances: Distances) -> float:
        """The larger of both in units of its limit, NaN where one is; 0 where no limit is known."""
        known = ((distance, self.limits[kind]) for kind, distance in distances._asdict().items())
        return float(np.max([0.0, *(distance / limit for distance, limit in known if limit is not None)]))  # Python's would lose a NaN

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "version": VERSION,
            "images": self.images,
            "held_out": self.held_out,
            "quantiles": QUANTILES,
            "sizes": dict(self.sizes),
            "channels": list(self.channels),
            "limits": dict(self.limits),
            "pixels": {"mean": _short(self.pixel_mean), "covariance": [_short(row) for row in self.pixel_covariance]},
            "features": {"mean": _short(self.feature_mean), "variance": _short(self.feature_variance)},
            "compared": {kind: _short(values) for kind, values in self.compared.items()},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], contract: Contract, num_features: int | None) -> TrainingStatistics:
        """What `to_json` wrote.

        Args:
            contract: of the run.
            num_features: of its model, see `features.num_features`.

        Raises:
            ValueError: another version, numbers that do not belong together, or not to this run; says all of it.
        """
        if values.get("version") != VERSION:
            raise ValueError(f"version {values.get('version')}, and this release reads {VERSION}")
        pixels, features = (
            {name: np.asarray(numbers, np.float64) for name, numbers in values[key].items()} for key in ("pixels", "features")
        )
        found = cls(
            images=int(values["images"]),
            held_out=int(values["held_out"]),
            sizes={name: list(map(float, values["sizes"][name])) for name in SIZES},
            channels=values["channels"],
            pixel_mean=pixels["mean"],
            pixel_covariance=pixels["covariance"],
            feature_mean=features["mean"],
            feature_variance=features["variance"],
            limits={kind: values["limits"][kind] for kind in Distances._fields},
            compared={kind: list(map(float, values["compared"][kind])) for kind in ("features", *READINGS)},
        )
        if faults := [*found._faults(contract, num_features)]:
            raise ValueError("; ".join(faults))
        return found

    def _faults(self, contract: Contract, num_features: int | None) -> Iterator[str]:
        """Why images cannot be held against it."""
        readings, width = 2 * contract.channels + 1, self.feature_mean.size
        if self.pixel_mean.shape != (readings,) or self.pixel_covariance.shape != (readings, readings):
            shapes = f"{self.pixel_mean.shape} and {self.pixel_covariance.shape}"
            yield f"pixels of {shapes} numbers, and images of {contract.channels} channels have {readings}"
        elif not (np.isfinite(self.pixel_mean).all() and _is_covariance(self.pixel_covariance)):
            yield "pixels whose mean and covariance are none"
        if self.feature_mean.shape != (width,) or self.feature_variance.shape != (width,):
            yield f"means of {self.feature_mean.shape} features, and variances of {self.feature_variance.shape}"
        elif width and num_features is not None and width != num_features:
            yield f"{width} features, and this run's classifier is given {num_features}"
        elif not (np.isfinite(self.feature_mean).all() and np.isfinite(self.feature_variance).all() and (self.feature_variance > 0).all()):
            yield "features whose variances are not all above 0, or not finite"
        for kind, limit in self.limits.items():
            if limit is not None and not 0 < limit < np.inf:
                yield f"a limit of {limit:g} for {kind}, and it is above 0"
        for name, quantiles in self.sizes.items():
            if quantiles and not (len(quantiles) == len(QUANTILES) and np.isfinite(quantiles).all() and min(quantiles) > 0):
                yield f"{len(quantiles)} quantiles of {name}, and they are {len(QUANTILES)} numbers above 0"
        yield from (f"{kind} to compare with that are not finite" for kind, kept in self.compared.items() if not np.isfinite(kept).all())

    @classmethod
    def read(cls, run: RunDirectory, contract: Contract, num_features: int | None) -> TrainingStatistics | None:
        """A run's own; None where it has none, as one of an earlier release.

        Args:
            contract, num_features: see `from_json`.

        Raises:
            RunFolderError: the file is damaged, of another version, or of another run.
        """
        if not run.path(STATISTICS).exists():
            return None
        stored = run.read_json(STATISTICS)
        try:
            return cls.from_json(stored, contract, num_features)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            why = "no statistics as a run writes them" if not isinstance(error, ValueError) else str(error)
            raise RunFolderError(f"{run.path(STATISTICS)} cannot be used: {why}; put it back as the run wrote it") from error


def summarise(train: Sequence[Described], held_out: Sequence[Described], sizes: Sequence[Size], contract: Contract) -> TrainingStatistics:
    """The statistics of a training set.

    Args:
        train: images of train, two or more.
        held_out: images of validation, described by the same weights; possibly none.
        sizes: (height, width) of train's images.

    Raises:
        DataError: fewer than two images of train have pixels that are numbers.
    """
    num_images = len(train)
    train, held_out = ([image for image in images if np.isfinite(image.pixels).all()] for images in (train, held_out))
    if len(train) < 2:
        raise DataError(f"{len(train)} of {num_images} images of train have pixels that are numbers, and two are needed")
    pixels, features = (np.stack([getattr(image, name) for image in train]) for name in ("pixels", "features"))
    features = features[np.isfinite(features).all(axis=1)]  # half precision may overflow in one image
    covariance = np.atleast_2d(np.cov(pixels.T))
    diagonal = np.diag(np.diag(covariance))
    covariance = (1 - _PIXEL_SHARE) * covariance + _PIXEL_SHARE * diagonal + _LEAST_VARIANCE * np.eye(len(covariance))
    if len(features) < 2 or not features.size or not features.var(axis=0, ddof=1).mean() > _ALIKE * np.mean(features**2):
        features = np.empty((2, 0))
    variance = features.var(axis=0, ddof=1)
    variance = (1 - _FEATURE_SHARE) * variance + _FEATURE_SHARE * variance.sum() / max(1, variance.size)
    preprocess, contrast = contract.preprocess(), np.exp(pixels[:, contract.channels : -1]) - _DARK
    shrinks = [shrink(preprocess, *size) for size in sizes]
    heights, widths = zip(*sizes, strict=True) if sizes else ((), ())
    found = TrainingStatistics(
        images=len(train),
        held_out=len(held_out),
        sizes={name: _quantiles(values) for name, values in zip(SIZES, (heights, widths, shrinks), strict=True)},
        channels=[
            {"brightness": _summary(pixels[:, channel]), "contrast": _summary(contrast[:, channel])} for channel in range(contract.channels)
        ],
        pixel_mean=pixels.mean(axis=0),
        pixel_covariance=covariance,
        feature_mean=features.mean(axis=0),
        feature_variance=variance,
        limits=dict.fromkeys(Distances._fields),
        compared={},
    )
    everyone = [*train, *held_out]  # pixels of images that were trained on are as good as any
    of_pixels = [found.distances(image).pixels for image in everyone]
    of_features = [found.distances(image).features for image in held_out if np.isfinite(image.features).all()] if variance.size else []
    readings = [image.readings for image in everyone]
    return replace(
        found,
        limits={"pixels": usual_limit(of_pixels), "features": usual_limit(of_features)},
        compared={"features": _thinned(of_features), **{kind: _thinned([row[kind] for row in readings]) for kind in READINGS}},
    )


def usual_limit(distances: Sequence[float]) -> float | None:
    """The distance that one more image of the same kind exceeds with a probability of `EXCEEDED_BY`, if logarithms of distances are
    normally distributed; where enough were seen, not below the quantile among them. None of fewer than two."""
    from scipy.special import stdtrit

    count = len(distances)
    if count < 2 or not np.isfinite(distances).all():
        return None
    logs = np.log(np.maximum(distances, 1e-12))
    reach = float(stdtrit(count - 1, 1 - EXCEEDED_BY)) * logs.std(ddof=1) * (1 + 1 / count) ** 0.5
    bound = float(np.exp(min(logs.mean() + reach, _LARGEST)))
    return max(bound, float(np.quantile(distances, 1 - EXCEEDED_BY))) if count * EXCEEDED_BY >= 1 else bound


def _is_covariance(matrix: np.ndarray) -> bool:
    """Finite and positive definite, by its lower half."""
    try:
        np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return False
    return bool(np.isfinite(matrix).all())


def _thinned(values: Sequence[float]) -> list[float]:
    """Sorted, and of many every so-manyth."""
    ordered = sorted(values)
    return ordered if len(ordered) <= _KEPT else [float(value) for value in np.quantile(ordered, np.linspace(0, 1, _KEPT))]


def _summary(values: np.ndarray) -> dict[str, Any]:
    return {
        **{name: _short([value])[0] for name, value in (("mean", values.mean()), ("std", values.std()))},
        "quantiles": _quantiles(values),
    }


def _quantiles(values: Sequence[float] | np.ndarray) -> list[float]:
    return _short(np.quantile(values, QUANTILES)) if len(values) else []


def _short(values: Sequence[float] | np.ndarray) -> list[float]:
    """Seven digits: what float32 features have."""
    return [float(f"{value:.7g}") for value in values]
