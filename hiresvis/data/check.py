"""Looks at every file once and says everything that is wrong, before training starts.

Headers cannot show that a file is cut, so every image is decoded in full (in threads: the codecs let go of Python's lock). What was
found is remembered by path, size and time of change, so that a second check reads headers' worth of data, not gigabytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hiresvis.data.decode import Header, decode, probe
from hiresvis.data.sources import Dataset, Datasets, Sample
from hiresvis.data.transforms import Preprocess
from hiresvis.errors import DataError, Problem

CACHE_NAME = "check-2.json"  # a new number where files that were sound may be refused now
STRETCH_NOTED = 1.25
_HASH_BLOCK = 2**20


@dataclass(frozen=True, slots=True)
class DataReport:
    """Everything the check found.

    Attributes:
        errors: what keeps training from starting, in the order of the samples.
        warnings: what does not.
        duplicates: (path, path) of files with the same bytes in different splits; errors under --strict.
        splits: per split: counts of images, classes, formats, modes, bits, channels, EXIF rotations; sizes as [min, median, max]; what was
            passed over.
    """

    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    duplicates: tuple[tuple[str, str], ...]
    splits: Mapping[str, Mapping[str, Any]]

    def failures(self, *, strict: bool = False) -> tuple[Problem, ...]:
        """The errors, and with `strict` the duplicates as well."""
        if not strict:
            return self.errors
        return (
            *self.errors,
            *(Problem(f"has the same bytes as {second}, which is in another split", first) for first, second in self.duplicates),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "errors": [asdict(problem) for problem in self.errors],
            "warnings": [asdict(problem) for problem in self.warnings],
            "duplicates": [list(pair) for pair in self.duplicates],
            "splits": {name: dict(counts) for name, counts in self.splits.items()},
        }


@dataclass(frozen=True, slots=True)
class _Finding:
    """What one file was found to be. `key` tells whether the file changed since."""

    key: str
    header: Header | None = None
    error: str | None = None


@dataclass(slots=True)
class _Cache:
    """Findings by path, kept in one file of the cache folder; a file that cannot be read is an empty cache."""

    path: Path | None
    known: dict[str, _Finding] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path | None) -> _Cache:
        if folder is None:
            return cls(None)
        path = folder / CACHE_NAME
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
            known = {
                name: _Finding(row["key"], None if row["header"] is None else Header(**row["header"]), row["error"])
                for name, row in rows.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            known = {}
        return cls(path, known)

    def save(self) -> None:
        """Written whole or not at all; a cache that cannot be written is done without."""
        if self.path is None:
            return
        rows = {name: asdict(finding) for name, finding in self.known.items()}
        spare = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            spare.write_text(json.dumps(rows), encoding="utf-8")
            spare.replace(self.path)
        except OSError:
            with suppress(OSError):
                spare.unlink()


def check_datasets(
    datasets: Datasets,
    *,
    max_pixels: int,
    preprocess: Preprocess | None = None,
    bad_images: str = "error",
    fast: bool = False,
    cache_folder: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    threads: int | None = None,
) -> DataReport:
    """Checks all splits.

    Args:
        datasets: what `load_datasets` gave.
        max_pixels: larger images are errors.
        preprocess: with it, channels and number ranges are checked against the model's input, and sizes against its size.
        bad_images: with "skip", unreadable files of train are warnings; those of val and test are always errors.
        fast: headers alone, nothing is decoded; cut files pass unseen.
        cache_folder: where results are remembered; None: nowhere.
        progress: called with (files done, files in all).
        threads: that decode; None: one a core, 4 at most, for each holds an image.
    """
    cache = _Cache.load(cache_folder)
    samples = [sample for dataset in datasets.splits().values() for sample in dataset.samples]
    findings = _look_at_all(samples, cache, max_pixels, preprocess, fast, progress, threads or min(4, os.cpu_count() or 1))
    cache.save()
    errors: list[Problem] = []
    warnings: list[Problem] = list(datasets.findings)
    splits: dict[str, Mapping[str, Any]] = {}
    for name, dataset in datasets.splits().items():
        found = [findings[str(sample.path)] for sample in dataset.samples]
        bad = [_problem(sample, finding.error) for sample, finding in zip(dataset.samples, found, strict=True) if finding.error]
        (warnings if name == "train" and bad_images == "skip" else errors).extend(bad)
        splits[name] = _count(dataset, found, preprocess)
        warnings += _size_warnings(name, found, preprocess)
    duplicates, conflicts = _same_bytes(datasets)
    warnings += conflicts
    if duplicates:
        warnings.append(
            Problem(f"{len(duplicates)} pairs of files with the same bytes in two splits; the first: {' and '.join(duplicates[0])}")
        )
    return DataReport(tuple(errors), tuple(warnings), duplicates, splits)


def _problem(sample: Sample, error: str) -> Problem:
    return Problem(error, sample.row) if sample.row == str(sample.path) else Problem(f"{sample.path} {error}", sample.row)


def _look_at_all(
    samples: Sequence[Sample],
    cache: _Cache,
    max_pixels: int,
    preprocess: Preprocess | None,
    fast: bool,
    progress: Callable[[int, int], None] | None,
    threads: int,
) -> dict[str, _Finding]:
    rule = "" if preprocess is None else f"{preprocess.in_chans} {preprocess.scale} {preprocess.background}"
    findings: dict[str, _Finding] = {}

    def look(sample: Sample) -> _Finding:
        key = _change_key(sample.path, f"{max_pixels} {rule}")
        known = cache.known.get(str(sample.path.absolute()))
        if key is not None and known is not None and known.key == key:
            return known
        return _look(sample.path, key or "", max_pixels, preprocess, fast)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="check")
    try:
        for done, (sample, finding) in enumerate(zip(samples, pool.map(look, samples), strict=True), start=1):
            findings[str(sample.path)] = finding
            if finding.key and not (fast and finding.error is None):  # a header alone proves nothing good
                cache.known[str(sample.path.absolute())] = finding
            if progress is not None:
                progress(done, len(samples))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a stop does not wait for files that are still in line
    return findings


def _change_key(path: Path, rule: str) -> str | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return f"{status.st_size} {status.st_mtime_ns} {rule}"


def _look(path: Path, key: str, max_pixels: int, preprocess: Preprocess | None, fast: bool) -> _Finding:
    header = None
    try:
        header = probe(path, max_pixels)
        if preprocess is not None:
            preprocess.check_channels(header.channels)
        if not fast:
            array = decode(path, max_pixels=max_pixels, background=(255, 255, 255) if preprocess is None else preprocess.background)
            if preprocess is not None:
                preprocess.scale.check(array)
    except DataError as error:
        return _Finding(key, header, "; ".join(problem.message for problem in error.problems))
    return _Finding(key, header)


def _count(dataset: Dataset, findings: Sequence[_Finding], preprocess: Preprocess | None) -> dict[str, Any]:
    headers = [finding.header for finding in findings if finding.header is not None]
    shown = [header.shown_size for header in headers]
    counts: dict[str, Any] = {
        "images": len(dataset),
        "unreadable": sum(finding.error is not None for finding in findings),
        "classes": dataset.class_counts(),
        "formats": dict(sorted(Counter(header.format for header in headers).items())),
        "modes": dict(sorted(Counter(header.mode for header in headers).items())),
        "bits": {str(bits): count for bits, count in sorted(Counter(header.bits for header in headers).items())},
        "channels": {str(number): count for number, count in sorted(Counter(header.channels for header in headers).items())},
        "exif_rotated": sum(header.orientation != 1 for header in headers),
        "height": _spread_of([height for height, _ in shown]),
        "width": _spread_of([width for _, width in shown]),
        "skipped_extensions": dict(sorted(dataset.skipped_extensions.items())),
        "ignored": list(dataset.ignored),
    }
    if preprocess is not None:
        counts["share_kept"] = _spread_of([preprocess.share_kept(*size) for size in shown])
        counts["shrink"] = _spread_of([_shrink(preprocess, *size) for size in shown])
    return counts


def _spread_of(values: Sequence[float]) -> list[float]:
    """[min, median, max], or nothing."""
    return [min(values), statistics.median(values), max(values)] if values else []


def _shrink(preprocess: Preprocess, height: int, width: int) -> float:
    """Stored pixels to one of the model's, along the axis that loses more."""
    fitted = preprocess.fitted_size(height, width)
    return round(max(height / fitted[0], width / fitted[1]), 3)


def _size_warnings(split: str, findings: Sequence[_Finding], preprocess: Preprocess | None) -> list[Problem]:
    if preprocess is None or preprocess.fit != "resize":
        return []
    shown = [finding.header.shown_size for finding in findings if finding.header is not None]
    target = preprocess.image_size[0] / preprocess.image_size[1]
    stretched = [size for size in shown if not 1 / STRETCH_NOTED <= size[0] / size[1] / target <= STRETCH_NOTED]
    if not stretched:
        return []
    height, width = stretched[0]
    text = (
        f"{len(stretched)} of {len(shown)} images change their shape by more than a quarter, as {height} x {width} to "
        f"{preprocess.image_size[0]} x {preprocess.image_size[1]} (height x width); "
        "data.fit: letterbox keeps it, or give model.image_size as [height, width]"
    )
    return [Problem(text, key=f"data.{split}")]


def _same_bytes(datasets: Datasets) -> tuple[tuple[tuple[str, str], ...], list[Problem]]:
    """Pairs across splits, and warnings of the same bytes under two labels of one split. Only files of equal size are read."""
    by_size: dict[int, list[tuple[str, Sample]]] = defaultdict(list)
    for split, dataset in datasets.splits().items():
        for sample in dataset.samples:
            if sample.path.is_file():
                by_size[sample.path.stat().st_size].append((split, sample))
    pairs: list[tuple[str, str]] = []
    conflicts: list[Problem] = []
    for group in by_size.values():
        by_hash: dict[str, list[tuple[str, Sample]]] = defaultdict(list)
        for split, sample in group if len(group) > 1 else ():
            by_hash[_content_hash(sample.path)].append((split, sample))
        for same in by_hash.values():
            for position, (split, sample) in enumerate(same):
                for other_split, other in same[position + 1 :]:
                    if split != other_split:
                        pairs.append((str(sample.path), str(other.path)))
                    elif sample.label != other.label:
                        names = " and ".join(datasets.classes[label] for label in (sample.label, other.label) if label is not None)
                        conflicts.append(
                            Problem(f"the same bytes as {other.row} under another label ({names})", sample.row, f"data.{split}")
                        )
    return tuple(sorted(pairs)), conflicts


def _content_hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while block := file.read(_HASH_BLOCK):
                digest.update(block)
    except OSError:  # unreadable: reported as such; equal to nothing
        return str(path)
    return digest.hexdigest()
