"""Looks at every file once and says everything that is wrong, before training starts.

Headers cannot show that a file is cut, so every image is decoded in full (in threads: the codecs let go of Python's lock); what the
image looks like and a digest of its bytes are taken along. What was found is remembered by the file's state, the question and what
decodes, as copies are (cache.py), so that a second check asks the file system, and reads no image; a refusal that the machine is the
reason of is not remembered. Where there is a time limit, files are taken in a random order until it is reached, the
rest by their headers, and the next check goes on from there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from hiresvis.data.cache import ImageCache, digest_of, file_state
from hiresvis.data.census import class_notes, count, image_warnings, shown_sizes
from hiresvis.data.contract import examine, hold_to_range, read_through, reads_the_same
from hiresvis.data.copies import Copies, Row, alike_notes, byte_warnings, look_alikes, regions_apart, same_bytes
from hiresvis.data.decode import WHITE, OpenedImage, decode, open_image
from hiresvis.data.findings import CACHE_NAME, IMAGES, Finding, FindingStore
from hiresvis.data.header import is_of_the_file
from hiresvis.data.likeness import Look, LookInParts, look_at
from hiresvis.data.mask_census import MaskFinding, count_masks, look_at_masks, mask_problems, sample_masks
from hiresvis.data.masks import Masks
from hiresvis.data.regions import named
from hiresvis.data.sources import Datasets, Sample
from hiresvis.data.threads import in_threads, key_of, question
from hiresvis.data.transforms import Preprocess, Scale
from hiresvis.errors import DataError, Problem
from hiresvis.profiles import CACHE_FOLDER
from hiresvis.units import format_duration

_SOURCES = ("data/check.py", "data/likeness.py")  # what a finding says besides what decoding gives


@dataclass(frozen=True, slots=True)
class DataReport:
    """Everything the check found.

    Attributes:
        errors: what keeps training from starting, in the order of the samples.
        warnings: what does not, and should be looked into; errors under --strict.
        notes: what may be as it should be.
        same_bytes: files with the same bytes. look_alikes: images that look alike, one of each set of equal bytes.
        splits: see `census.count`.
        num_images: files in all, one name once. num_decoded: of them, those decoded now or before; others by their headers alone.
    """

    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    notes: tuple[Problem, ...]
    same_bytes: tuple[Copies, ...]
    look_alikes: tuple[Copies, ...]
    splits: Mapping[str, Mapping[str, Any]]
    num_images: int
    num_decoded: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "errors": [asdict(problem) for problem in self.errors],
            "warnings": [asdict(problem) for problem in self.warnings],
            "notes": [asdict(problem) for problem in self.notes],
            "checked": {"images": self.num_images, "decoded": self.num_decoded},
            "same_bytes": [copies.to_json() for copies in self.same_bytes],
            "look_alikes": [copies.to_json() for copies in self.look_alikes],
            "splits": {name: dict(counts) for name, counts in self.splits.items()},
        }


def finished(steps: Generator[tuple[int, int], None, DataReport], progress: Callable[[int, int], None] | None = None) -> DataReport:
    """The report of `check_steps` run to its end; `progress` is called with (files done, files in all)."""
    while True:
        try:
            done, total = next(steps)
        except StopIteration as end:
            report: DataReport = end.value
            return report
        if progress is not None:
            progress(done, total)


def check_steps(
    datasets: Datasets,
    *,
    max_pixels: int,
    preprocess: Preprocess | None = None,
    bad_images: str = "error",
    fast: bool = False,
    seconds: float | None = None,
    cache_folder: Path | None = None,
    threads: int | None = None,
    copies: ImageCache | None = None,
    masks: Masks | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[tuple[int, int], None, DataReport]:
    """Checks all splits, file by file; one that is closed in between keeps what it has found in the cache.

    Args:
        datasets: what `load_datasets` gave.
        max_pixels: larger images are errors.
        preprocess: with it, channels and number ranges are checked against the model's input, and sizes against its size.
        bad_images: with "skip", unreadable files of train are warnings; those of val and test are always errors.
        fast: headers alone, nothing is decoded; cut files pass unseen.
        seconds: no further file is decoded after this time; None: all are.
        cache_folder: where results are remembered; None: nowhere.
        threads: that decode; None: one a core, 4 at most, for each holds an image.
        copies: with `preprocess`: keeps what was decoded for the training that follows.
        masks: segment: what the values in masks mean; masks are then looked at too, after the images.
        clock: seconds that only go forward.

    Yields:
        (files done, files in all).

    Returns:
        The report.
    """
    files: dict[str, list[Sample]] = {}
    for sample in {_name(sample): sample for dataset in datasets.splits().values() for sample in dataset.samples}.values():
        files.setdefault(os.path.abspath(sample.file), []).append(sample)
    mask_files = sample_masks(sample for dataset in datasets.splits().values() for sample in dataset.samples)
    total = sum(map(len, files.values())) + len(set(mask_files))
    looker = _Looker(max_pixels, preprocess, copies)
    asked = question([max_pixels, "" if preprocess is None else _reading_rule(preprocess)], _SOURCES)
    findings: dict[str, Finding] = {}
    store = FindingStore(cache_folder, IMAGES)
    try:
        keys = {path: key_of(path, asked) for path in files}
        findings.update(store.read({_name(sample): keys[path] for path, samples in files.items() for sample in samples}))
        yield len(findings), total
        left = [path for path, samples in files.items() if any(_name(sample) not in findings for sample in samples)]
        if seconds is not None:
            left = [left[position] for position in np.random.default_rng(0).permutation(len(left))]
        deadline = None if seconds is None else clock() + seconds

        def look(path: str) -> list[Finding]:
            decoded = not fast and (deadline is None or clock() < deadline)
            return looker.look(files[path], keys[path], decoded=decoded)

        for path, found in in_threads(look, left, threads):
            for sample, finding in zip(files[path], found, strict=True):
                findings[_name(sample)] = finding
                if finding.key and finding.decoded:  # a header alone proves nothing good
                    store.add(_name(sample), finding)
            yield len(findings), total
    finally:
        store.close()
    found_masks: dict[Path, MaskFinding] = {}
    in_time = (lambda: True) if deadline is None else lambda: clock() < deadline
    for mask, mask_finding in look_at_masks(
        mask_files, max_pixels=max_pixels, cache_folder=cache_folder, fast=fast, may_decode=in_time, threads=threads
    ):
        found_masks[mask] = mask_finding
        yield len(findings) + len(found_masks), total
    report = _report(datasets, findings, preprocess, bad_images, fast, found_masks, masks)
    return replace(report, notes=(_not_kept(cache_folder, store.off), *report.notes)) if cache_folder and store.off else report


def _not_kept(folder: Path, why: str) -> Problem:
    text = f"cannot be written ({why}): what was found is not kept, and the next check decodes these images again"
    return Problem(f"{text}; mend or remove it, or set {CACHE_FOLDER} to another folder", str(folder / CACHE_NAME))


def _name(sample: Sample) -> str:
    """What a sample is remembered by."""
    return named(os.path.abspath(sample.file), sample.region)


@dataclass(frozen=True, slots=True)
class _Looker:
    """Looks at one file."""

    max_pixels: int
    preprocess: Preprocess | None
    copies: ImageCache | None

    def look(self, together: Sequence[Sample], key: str, *, decoded: bool) -> list[Finding]:
        """What samples of one file are found to be; a file that is read as a whole is read once, whatever the number of its regions."""
        path, preprocess, findings = together[0].path, self.preprocess, list[Finding]()
        background = WHITE if preprocess is None else preprocess.background
        state, digest = file_state(path), digest_of(path) if decoded else None
        whole = cache(partial(decode, path, max_pixels=self.max_pixels, background=background))
        for sample in together:
            header, look = None, None
            try:
                with open_image(path, max_pixels=self.max_pixels, background=background, region=sample.region) as image:
                    header = image.header
                    if preprocess is not None:
                        examine(image, preprocess, path)
                    if decoded:
                        array, look = self._read(image, sample, whole)
                        if self.copies is not None and preprocess is not None and array is not None and reads_the_same(image, preprocess):
                            self.copies.fill(path, preprocess, array, state, digest, max_pixels=self.max_pixels, region=sample.region)
                findings.append(Finding(key, header, None, digest, look))
            except DataError as error:
                findings.append(Finding(key if is_of_the_file(error) else "", header, error.reason))
        return findings

    def _read(self, image: OpenedImage, sample: Sample, whole: Callable[[], np.ndarray]) -> tuple[np.ndarray | None, Look]:
        """All pixels of a sample, where they are read as one, and what it looks like.

        Args:
            whole: decodes the file, at its first call.
        """
        scale = Scale() if self.preprocess is None else self.preprocess.scale
        if image.header.format == "TIFF" or sample.region is None:
            parts = LookInParts(image.size, scale)
            array = read_through(image, self.preprocess, sample.path, parts.add)
            return array, parts.look() if array is None else look_at(array, scale)
        array = np.ascontiguousarray(whole()[sample.region.slices])
        hold_to_range(array, self.preprocess, sample.path)
        return array, look_at(array, scale)


def _reading_rule(preprocess: Preprocess) -> str:
    """What decides what is read of a file and whether the model takes it."""
    parts = f"{preprocess.fit} {preprocess.image_size}" if preprocess.fit != "resize" else f"{preprocess.image_size}"
    return f"{preprocess.in_chans} {preprocess.scale} {preprocess.background} {parts}"


def _report(
    datasets: Datasets,
    findings: Mapping[str, Finding],
    preprocess: Preprocess | None,
    bad_images: str,
    fast: bool,
    found_masks: Mapping[Path, MaskFinding],
    masks: Masks | None,
) -> DataReport:
    errors: list[Problem] = []
    warnings: list[Problem] = list(datasets.findings)
    splits: dict[str, Mapping[str, Any]] = {}
    rows: list[Row] = []
    for name, dataset in datasets.splits().items():
        found = [findings[_name(sample)] for sample in dataset.samples]
        rows += [(name, sample, finding) for sample, finding in zip(dataset.samples, found, strict=True)]
        bad = [_problem(sample, finding.error) for sample, finding in zip(dataset.samples, found, strict=True) if finding.error]
        splits[name] = count(dataset, found, preprocess)
        if masks is not None:
            bad += mask_problems(dataset, found, found_masks, masks)
            splits[name] = {**splits[name], **count_masks(dataset, found, found_masks, masks)}
        (warnings if name == "train" and bad_images == "skip" else errors).extend(bad)
        warnings += image_warnings(name, splits[name], shown_sizes(dataset.samples, found), preprocess)
    same = same_bytes(rows, read=fast)
    alike = look_alikes(rows, same)
    warnings += [*regions_apart(rows), *byte_warnings(same, datasets.train.label_text)]
    notes = [*alike_notes(alike), *class_notes(splits, datasets.train.task)]
    num_decoded = sum(finding.decoded for finding in findings.values())
    return DataReport(tuple(errors), tuple(warnings), tuple(notes), same, alike, splits, len(findings), num_decoded)


def partly_decoded(report: DataReport, seconds: float) -> str:
    """What to say where the time was not enough; empty where it was."""
    if report.num_decoded == report.num_images:
        return ""
    return (
        f"{report.num_decoded} of {report.num_images} images were decoded in the {format_duration(seconds)} that data.check: auto takes, "
        "and of the others the headers read; the next start goes on from there, hiresvis check or data.check: full decodes all. A damaged "
        "file among the others ends training where it is met, and the run can be resumed (data.bad_images: skip leaves it out)"
    )


def _problem(sample: Sample, error: str) -> Problem:
    return Problem(error, sample.row) if sample.row == str(sample.path) else Problem(f"{sample.path} {error}", sample.row)
