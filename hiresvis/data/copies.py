"""Files of a data set that are one: with the same bytes, or looking alike; within a split and across."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hiresvis.data.cache import digest_of
from hiresvis.data.census import place_of, shown_sizes
from hiresvis.data.findings import Finding
from hiresvis.data.folders import limited
from hiresvis.data.likeness import group_alike
from hiresvis.data.regions import Region
from hiresvis.data.sources import Sample
from hiresvis.errors import Problem

Row = tuple[str, Sample, Finding]  # of one split
GROUPS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Copies:
    """Files that are one: by their bytes, or by their looks.

    Attributes:
        members: (split, sample), in the order of the splits and of their samples.
    """

    members: tuple[tuple[str, Sample], ...]

    @property
    def across(self) -> bool:
        """Whether they are in more than one split, so that what is trained on is tested on."""
        return len({split for split, _ in self.members}) > 1

    def to_json(self) -> list[dict[str, str]]:
        """Plain JSON values."""
        return [{"split": split, **place_of(sample)} for split, sample in self.members]

    def __str__(self) -> str:
        """Two of them, one of each split where they are in two, and how many more there are."""
        (split, first), *others = self.members
        other = next((sample for name, sample in others if name != split), others[0][1])
        more = len(others) - 1
        return f"{first.title} and {other.title}" + (f" (and {more} more)" if more else "")


def same_bytes(rows: Sequence[Row], *, read: bool) -> tuple[Copies, ...]:
    """Samples with the same bytes; two regions of one file are two images. With `read`, files that were not decoded are read where
    others have their size."""
    groups: dict[tuple[bytes, Region | None], list[tuple[str, Sample]]] = defaultdict(list)
    by_size: dict[str, list[tuple[str, Sample]]] = defaultdict(list)
    for split, sample, finding in rows:
        if finding.digest is not None:
            groups[finding.digest, sample.region].append((split, sample))
        elif read and finding.key:
            by_size[finding.key.partition(" ")[0]].append((split, sample))
    digests: dict[Path, bytes | None] = {}
    for members in by_size.values():
        for split, sample in members if len(members) > 1 else ():
            if sample.path not in digests:
                digests[sample.path] = digest_of(sample.path)
            if (digest := digests[sample.path]) is not None:
                groups[digest, sample.region].append((split, sample))
    return tuple(Copies(tuple(members)) for members in groups.values() if len(members) > 1)


def regions_apart(rows: Sequence[Row]) -> list[Problem]:
    """Files that have regions in two splits: what surrounds a region may tell its neighbours."""
    where: dict[Path, set[str]] = defaultdict(set)
    for split, sample, _ in rows:
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


def look_alikes(rows: Sequence[Row], same: Sequence[Copies]) -> tuple[Copies, ...]:
    """Images that look alike. Of files with the same bytes the first of each split stands for all; regions of one file are not told, for
    they may well overlap."""
    spare = {id(sample) for copies in same for sample in _beside_the_first(copies)}
    chosen = [row for row in rows if row[2].look is not None and id(row[1]) not in spare]
    sizes = shown_sizes([sample for _, sample, _ in chosen], [finding for _, _, finding in chosen])
    groups = group_alike([finding.look.signature for _, _, finding in chosen if finding.look], [height / width for height, width in sizes])
    found = [Copies(tuple((chosen[index][0], chosen[index][1]) for index in group)) for group in groups]
    digests = {id(sample): finding.digest for _, sample, finding in chosen}
    return tuple(copies for copies in found if len({digests[id(sample)] for _, sample in copies.members}) > 1)


def _beside_the_first(copies: Copies) -> Iterator[Sample]:
    seen: set[str] = set()
    for split, sample in copies.members:
        if split in seen:
            yield sample
        seen.add(split)


def byte_warnings(same: Sequence[Copies], label_text: Callable[[Sample], str]) -> list[Problem]:
    across = [copies for copies in same if copies.across]
    within = [copies for copies in same if not copies.across]
    problems = []
    if across:
        text = f"{_counted(across)} with the same bytes in two splits, so that what is trained on is tested on: {_first(across)}"
        problems.append(Problem(text, key="data"))
    if within:
        problems.append(Problem(f"{_counted(within)} with the same bytes in one split: {_first(within)}", key="data"))
    conflicts = []
    for copies in same:
        labels = {sample.label: sample for _, sample in copies.members if sample.label is not None}
        if len(labels) > 1:
            first = copies.members[0][1]
            other = next((split, sample) for split, sample in copies.members if sample.label != first.label)
            names = " and ".join(label_text(sample) or "none" for sample in labels.values())
            conflicts.append(
                Problem(f"the same bytes as {other[1].row} under another label ({names})", first.row, f"data.{copies.members[0][0]}")
            )
    return [*problems, *limited(conflicts)]


def alike_notes(alike: Sequence[Copies]) -> list[Problem]:
    across = [copies for copies in alike if copies.across]
    within = [copies for copies in alike if not copies.across]
    notes = []
    if across:
        text = f"{_counted(across)} that look alike in two splits, as if saved anew or made larger or smaller: {_first(across)}"
        notes.append(Problem(f"{text}; where they show the same thing, keep them in one split (data.group)", key="data"))
    if within:
        notes.append(Problem(f"{_counted(within)} that look alike in one split: {_first(within)}", key="data"))
    return notes


def _counted(found: Sequence[Copies]) -> str:
    files = sum(len(copies.members) for copies in found)
    return f"{files} files in {len(found)} {'group' if len(found) == 1 else 'groups'}"


def _first(found: Sequence[Copies]) -> str:
    more = f"; --json of hiresvis check lists all {len(found)}" if len(found) > GROUPS_SHOWN else ""
    return "; ".join(str(copies) for copies in found[:GROUPS_SHOWN]) + more
