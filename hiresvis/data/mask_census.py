"""Every mask of a data set looked at once: what values it holds, and whether it belongs to its image.

Values are counted as they are stored, whatever the classes are, so one look tells which classes there are and what is wrong with a mask,
and holds for the next start too (`findings.FindingStore`). Pixels are counted in whole masks, at their own size.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hiresvis.data.findings import Finding, FindingStore, Kind
from hiresvis.data.folders import limited
from hiresvis.data.header import is_of_the_file
from hiresvis.data.masks import Masks, mask_size, read_values, size_problem
from hiresvis.data.regions import Size
from hiresvis.data.sources import Dataset, Sample
from hiresvis.data.threads import in_threads, key_of, question
from hiresvis.errors import DataError, Problem

_SOURCES = ("data/masks.py", "data/mask_census.py")


@dataclass(frozen=True, slots=True)
class MaskFinding:
    """What one mask was found to be.

    Attributes:
        key: tells whether the file or what reads it changed since; empty where that is not to be remembered.
        size: (height, width) as shown; None where it cannot be read.
        counts: pixels by value; None where it was not decoded.
        error: what is wrong with the file, None for nothing.
    """

    key: str
    size: Size | None = None
    counts: Mapping[int, int] | None = None
    error: str | None = None


def _cells(finding: MaskFinding) -> tuple[object, ...]:
    error = None if finding.error is None else finding.error.encode("utf-8", "backslashreplace").decode()
    counts = None if finding.counts is None else list(finding.counts.items())
    return json.dumps([finding.size, counts]), error


def _finding(key: str, held: str, error: str | None) -> MaskFinding:
    size, counts = json.loads(held)
    return MaskFinding(key, None if size is None else (size[0], size[1]), None if counts is None else dict(map(tuple, counts)), error)


MASKS = Kind("masks", "held TEXT, error TEXT", _cells, _finding)


def look_at_masks(
    paths: Iterable[Path],
    *,
    max_pixels: int,
    cache_folder: Path | None,
    fast: bool = False,
    may_decode: Callable[[], bool] = lambda: True,
    threads: int | None = None,
) -> Iterator[tuple[Path, MaskFinding]]:
    """What each mask file is found to be, as it comes: those that are remembered first.

    Args:
        paths: of masks; each is looked at once.
        max_pixels: larger ones are refused.
        cache_folder: where results are remembered; None: nowhere.
        fast: headers alone.
        may_decode: asked before each; where it says no, the header has to do.
        threads: that decode; None: one a core, 4 at most.
    """
    files = {os.path.abspath(path): path for path in paths}
    asked = question([max_pixels], _SOURCES)
    keys = {name: key_of(name, asked) for name in files}
    store = FindingStore(cache_folder, MASKS)

    def look(name: str) -> MaskFinding:
        return _look(files[name], keys[name], max_pixels, decoded=not fast and may_decode())

    try:
        known = store.read(keys)
        yield from ((files[name], finding) for name, finding in known.items())
        for name, finding in in_threads(look, [name for name in files if name not in known], threads):
            if finding.key and (finding.error is not None or finding.counts is not None):
                store.add(name, finding)
            yield files[name], finding
    finally:
        store.close()


def _look(path: Path, key: str, max_pixels: int, *, decoded: bool) -> MaskFinding:
    try:
        if not decoded:
            return MaskFinding(key, mask_size(path, max_pixels=max_pixels))
        array = read_values(path, max_pixels=max_pixels)
    except DataError as error:
        return MaskFinding(key if is_of_the_file(error) else "", error=error.reason)
    counts = np.bincount(array.reshape(-1))
    present = np.flatnonzero(counts)
    return MaskFinding(key, (array.shape[0], array.shape[1]), dict(zip(present.tolist(), counts[present].tolist(), strict=True)))


def values_held(paths: Sequence[Path], *, ignore: int | None, max_pixels: int, cache_folder: Path | None) -> set[int]:
    """The values in these masks but for the ignored one. Masks that cannot be read are the check's business, unless none can.

    Raises:
        DataError: none can be read.
    """
    found, problems = set[int](), list[Problem]()
    for path, finding in look_at_masks(paths, max_pixels=max_pixels, cache_folder=cache_folder):
        found.update(finding.counts or ())
        if finding.error is not None:
            problems.append(Problem(finding.error, str(path)))
    if paths and len(problems) == len(set(paths)):
        raise DataError(limited(sorted(problems, key=lambda problem: problem.place)))
    return found - {ignore}


def mask_problems(dataset: Dataset, images: Sequence[Finding], masks: Mapping[Path, MaskFinding], meaning: Masks) -> list[Problem]:
    """What is wrong with the masks of a split, at the images' rows."""
    problems = []
    for sample, image in zip(dataset.samples, images, strict=True):
        if sample.mask is None:
            continue
        finding = masks[sample.mask]
        for text in _wrong(finding, image, meaning):
            message = f"has a mask, {sample.mask}, that {text}"
            at_row = sample.row != str(sample.path)
            problems.append(Problem(f"{sample.path} {message}" if at_row else message, sample.row))
    return problems


def _wrong(finding: MaskFinding, image: Finding, meaning: Masks) -> Iterator[str]:
    if finding.error is not None:
        yield finding.error
        return
    if image.header is not None and finding.size is not None and (text := size_problem(finding.size, image.header.shown_size)):
        yield text
    strange = sorted(set(finding.counts or ()) - {*meaning.values, meaning.ignore})
    if strange:
        yield meaning.strange(strange)


def count_masks(dataset: Dataset, images: Sequence[Finding], masks: Mapping[Path, MaskFinding], meaning: Masks) -> dict[str, Any]:
    """Of a split: images that show each class, pixels of each class and of none, and images without a mask file, for check's report."""
    showing, pixels, missing = Counter[int](), Counter[int](), 0
    for sample, image in zip(dataset.samples, images, strict=True):
        if sample.mask is None:
            missing += 1
            height, width = (0, 0) if image.header is None else image.header.shown_size
            counts: Mapping[int, int] = {meaning.values[0]: height * width}
        else:
            counts = masks[sample.mask].counts or {}
        showing.update(counts.keys())
        pixels.update(counts)
    named = list(zip(dataset.classes, meaning.values, strict=True))
    return {
        "classes": {name: showing[value] for name, value in named},
        "pixels": {name: pixels[value] for name, value in named},
        "ignored_pixels": 0 if meaning.ignore is None else pixels[meaning.ignore],
        "without_mask": missing,
    }


def sample_masks(samples: Iterable[Sample]) -> list[Path]:
    """The mask files of samples."""
    return [sample.mask for sample in samples if sample.mask is not None]
