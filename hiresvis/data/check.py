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

from hiresvis.data.contract import examine, read_through
from hiresvis.data.decode import open_image
from hiresvis.data.header import Header
from hiresvis.data.regions import Region, named
from hiresvis.data.sources import Dataset, Datasets, Sample
from hiresvis.data.transforms import Preprocess
from hiresvis.errors import DataError, Problem

CACHE_NAME = "check-3.json"  # a new number where files that were sound may be refused now
STRETCH_NOTED = 1.25
KEPT_NOTED = 0.5
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
        found = [findings[sample.title] for sample in dataset.samples]
        bad = [_problem(sample, finding.error) for sample, finding in zip(dataset.samples, found, strict=True) if finding.error]
        (warnings if name == "train" and bad_images == "skip" else errors).extend(bad)
        shown = [_shown_size(sample, finding) for sample, finding in zip(dataset.samples, found, strict=True) if finding.header is not None]
        splits[name] = _count(dataset, found, shown, preprocess)
        warnings += _size_warnings(name, shown, preprocess)
    warnings += _regions_apart(datasets)
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
    """Findings by the samples' titles. The regions of a file are looked at together, since most formats are decoded for all at once."""
    rule = f"{max_pixels}" if preprocess is None else f"{max_pixels} {_reading_rule(preprocess)}"
    by_path: dict[Path, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_path[sample.path].append(sample)
    findings: dict[str, _Finding] = {}

    def look(together: Sequence[Sample]) -> list[_Finding]:
        key = _change_key(together[0].path, rule)
        known = [cache.known.get(_cache_name(sample)) for sample in together]
        if key is not None and all(finding is not None and finding.key == key for finding in known):
            return [finding for finding in known if finding is not None]
        return _look(together, key or "", max_pixels, preprocess, fast)

    pool, done = ThreadPoolExecutor(threads, thread_name_prefix="check"), 0
    try:
        for together, found in zip(by_path.values(), pool.map(look, by_path.values()), strict=True):
            for sample, finding in zip(together, found, strict=True):
                findings[sample.title] = finding
                if finding.key and not (fast and finding.error is None):  # a header alone proves nothing good
                    cache.known[_cache_name(sample)] = finding
                done += 1
                if progress is not None:
                    progress(done, len(samples))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a stop does not wait for files that are still in line
    return findings


def _cache_name(sample: Sample) -> str:
    return named(str(sample.path.absolute()), sample.region)


def _reading_rule(preprocess: Preprocess) -> str:
    """What decides what is read of a file and whether the model takes it."""
    parts = f"{preprocess.fit} {preprocess.image_size}" if preprocess.fit != "resize" else f"{preprocess.image_size}"
    return f"{preprocess.in_chans} {preprocess.scale} {preprocess.background} {parts}"


def _change_key(path: Path, rule: str) -> str | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return f"{status.st_size} {status.st_mtime_ns} {rule}"


def _look(together: Sequence[Sample], key: str, max_pixels: int, preprocess: Preprocess | None, fast: bool) -> list[_Finding]:
    """What samples of one file are found to be; a file that is read as a whole is read once, whatever the number of its regions."""
    path, findings = together[0].path, list[_Finding]()
    background = (255, 255, 255) if preprocess is None else preprocess.background
    read = False
    for sample in together:
        header, error = None, None
        try:
            with open_image(path, max_pixels=max_pixels, background=background, region=sample.region) as image:
                header = image.header
                if preprocess is not None:
                    examine(image, preprocess, path)
                if not fast and not read:
                    read_through(image, preprocess, path)
                    read = header.format != "TIFF"
        except DataError as found:
            error = "; ".join(problem.message for problem in found.problems)
        findings.append(_Finding(key, header, error))
    return findings


def _shown_size(sample: Sample, finding: _Finding) -> tuple[int, int]:
    """(height, width) of the sample: the region's, or the file's."""
    assert finding.header is not None
    return finding.header.shown_size if sample.region is None else sample.region.size


def _count(
    dataset: Dataset, findings: Sequence[_Finding], shown: Sequence[tuple[int, int]], preprocess: Preprocess | None
) -> dict[str, Any]:
    headers = [finding.header for finding in findings if finding.header is not None]
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
        if preprocess.fit == "tile":
            counts["windows"] = _spread_of([preprocess.num_windows(*size) for size in shown])
        counts["shrink"] = _spread_of([_shrink(preprocess, *size) for size in shown])
    return counts


def _spread_of(values: Sequence[float]) -> list[float]:
    """[min, median, max], or nothing."""
    return [min(values), statistics.median(values), max(values)] if values else []


def _shrink(preprocess: Preprocess, height: int, width: int) -> float:
    """Stored pixels to one of the model's, along the axis that loses more; windows keep every pixel as it is."""
    if preprocess.in_windows:
        return 1.0
    fitted = preprocess.fitted_size(height, width)
    return round(max(height / fitted[0], width / fitted[1]), 3)


def _size_warnings(split: str, shown: Sequence[tuple[int, int]], preprocess: Preprocess | None) -> list[Problem]:
    if preprocess is None or preprocess.fit not in ("resize", "crop"):
        return []
    wanted = f"{preprocess.image_size[0]} x {preprocess.image_size[1]}"
    if preprocess.fit == "crop":
        cut = [size for size in shown if preprocess.share_kept(*size) < KEPT_NOTED]
        if not cut:
            return []
        text = (
            f"{len(cut)} of {len(shown)} images lose more than half of their area to data.fit: crop, as {cut[0][0]} x {cut[0][1]}, of "
            f"which {wanted} (height x width) keeps {preprocess.share_kept(*cut[0]):.0%}; data.fit: tile sees all of it, resize all at once"
        )
        return [Problem(text, key=f"data.{split}")]
    target = preprocess.image_size[0] / preprocess.image_size[1]
    stretched = [size for size in shown if not 1 / STRETCH_NOTED <= size[0] / size[1] / target <= STRETCH_NOTED]
    if not stretched:
        return []
    height, width = stretched[0]
    text = (
        f"{len(stretched)} of {len(shown)} images change their shape by more than a quarter, as {height} x {width} to "
        f"{wanted} (height x width); data.fit: letterbox keeps it, or give model.image_size as [height, width]"
    )
    return [Problem(text, key=f"data.{split}")]


def _regions_apart(datasets: Datasets) -> list[Problem]:
    """Files that have regions in two splits: what surrounds a region may tell its neighbours."""
    where: dict[Path, set[str]] = defaultdict(set)
    for split, dataset in datasets.splits().items():
        for sample in dataset.samples:
            if sample.region is not None:
                where[sample.path].add(split)
    apart = [path for path, splits in where.items() if len(splits) > 1]
    if not apart:
        return []
    text = (
        f"{len(apart)} files have regions in more than one split; the first: {apart[0]} ({', '.join(sorted(where[apart[0]]))}); "
        "data.group with a column that names the file keeps them together"
    )
    return [Problem(text, key="data.region")]


def _same_bytes(datasets: Datasets) -> tuple[tuple[tuple[str, str], ...], list[Problem]]:
    """Pairs across splits, and warnings of the same bytes under two labels of one split. Only files of equal size are read;
    two regions of one file are two images."""
    by_size: dict[int, list[tuple[str, Sample]]] = defaultdict(list)
    for split, dataset in datasets.splits().items():
        for sample in dataset.samples:
            if sample.path.is_file():
                by_size[sample.path.stat().st_size].append((split, sample))
    pairs: list[tuple[str, str]] = []
    conflicts: list[Problem] = []
    for group in by_size.values():
        by_hash: dict[tuple[str, Region | None], list[tuple[str, Sample]]] = defaultdict(list)
        hashes: dict[Path, str] = {}
        for split, sample in group if len(group) > 1 else ():
            if sample.path not in hashes:
                hashes[sample.path] = _content_hash(sample.path)
            by_hash[hashes[sample.path], sample.region].append((split, sample))
        for same in by_hash.values():
            for position, (split, sample) in enumerate(same):
                for other_split, other in same[position + 1 :]:
                    if split != other_split:
                        pairs.append((sample.title, other.title))
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
