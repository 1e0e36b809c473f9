"""Holds out a share of the training data: stratified, whole groups only, and the same files for the same seed everywhere.

What is kept even on both sides are *strata*: the classes (classify, multilabel) or tenths of the first target (regress). Images of one
stratum each are drawn stratum by stratum. Where an image may have several, they are dealt out by iterative stratification (Sechidis,
Tsoumakas, Vlahavas: On the Stratification of Multi-label Data, ECML PKDD 2011): the rarest label first, each of its images to the side
that lacks more of it. With groups it is a greedy version of stratified group sampling: groups in a seeded order, large ones first, each
taken when that brings the held-out counts nearer to their shares. Neither is optimal: with few large groups the share can miss by half
a group, and labels that always come together cannot be parted.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np

from hiresvis.data.folders import Entry, Scan
from hiresvis.data.labels import name_counts, names_in
from hiresvis.errors import DataError, Problem

MAX_BINS = 10  # of the first target
_NONE = ""  # the stratum of images with none of the classes

Strata = Sequence[tuple[str, ...]]  # of each image, in the order of names


def split_fraction(scan: Scan, fraction: float, *, task: str, seed: int, place: str) -> tuple[Scan, Scan, list[str]]:
    """(train, held out, lines to report). Order within each is that of `scan`; the choice depends on names, labels and seed alone.

    Raises:
        DataError: the share is not between 0 and 1, or nothing can be held out.
    """
    if not 0 < fraction < 1:
        raise DataError([Problem(f"{fraction} is not a share between 0 and 1; write 0.15, or a path", key="data.val")])
    ordered = sorted(scan.entries, key=lambda entry: entry.name)
    strata = _bins(ordered, fraction) if task == "regress" else _classes(ordered)
    grouped = any(entry.group is not None for entry in ordered)
    if grouped:
        held = _hold_groups(ordered, strata, fraction, seed)
    elif task == "multilabel":
        held = _hold_by_labels(ordered, strata, fraction, seed)
    elif task == "regress":
        held = _hold_by_bin(ordered, strata, fraction, seed)
    else:
        held = _hold_by_class(ordered, strata, fraction, seed)
    if not held:
        count = len({entry.group for entry in ordered}) if grouped else len(ordered)
        what = f"{count} {'groups' if grouped else 'images'}"
        what += "" if task == "regress" else f" of {len(name_counts(scan))} classes"
        sides = "" if task == "regress" else " and leave every class in train"
        raise DataError([Problem(f"{what} cannot give a validation share of {fraction:g}{sides}; give data.val a path", place, "data.val")])
    train, val = _parted(scan, held)
    notes = []
    if task != "regress":
        absent = sorted(name_counts(train).keys() - name_counts(val).keys())
        if absent:
            notes.append(f"too few {'groups' if grouped else 'images'} to validate these classes: {', '.join(absent)}")
    got = len(val.entries) / len(ordered)
    if grouped and abs(got - fraction) > 0.25 * fraction:
        notes.append(f"whole groups give a share of {got:.3f} where {fraction:g} was asked")
    return train, val, notes


def split_as_before(scan: Scan, held: Collection[str], place: str) -> tuple[Scan, Scan]:
    """(train, held out) by the names that an earlier start held out.

    Raises:
        DataError: some of them are not there any more.
    """
    gone = sorted(set(held).difference(entry.name for entry in scan.entries))
    if gone:
        text = f"{len(gone)} of the {len(held)} images that the run holds out for validation are not there any more, the first: {gone[0]}"
        raise DataError([Problem(f"{text}; put them back, or give other data", place, "data.val")])
    return _parted(scan, set(held))


def _parted(scan: Scan, held: set[str]) -> tuple[Scan, Scan]:
    train = tuple(entry for entry in scan.entries if entry.name not in held)
    return replace(scan, entries=train), Scan(tuple(entry for entry in scan.entries if entry.name in held), scan.folders)


def _classes(ordered: Sequence[Entry]) -> Strata:
    names = {label: names_in(label) or (_NONE,) for label in {entry.label for entry in ordered}}
    return [names[entry.label] for entry in ordered]


def _rng(seed: int, name: str) -> np.random.Generator:
    """One stream for each name: a class that is added or removed leaves the choice in the others as it was."""
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))


def _bins(ordered: Sequence[Entry], fraction: float) -> Strata:
    """Equal parts of the images by their first target, of a size that a held-out image of each can come from."""
    num_bins = max(1, min(MAX_BINS, int(len(ordered) * min(fraction, 0.5))))
    values = [entry.label[0] for entry in ordered if isinstance(entry.label, tuple)]
    found: list[tuple[str, ...]] = [()] * len(ordered)
    for rank, position in enumerate(np.argsort(np.asarray(values, dtype=np.float64), kind="stable").tolist()):
        found[position] = (f"bin {rank * num_bins // len(ordered)}",)
    return found


def _wanted(count: int, fraction: float) -> int:
    """How many of a stratum's images to hold out: its share, at least one where it has two, and never all."""
    return min(max(1, round(count * fraction)), count - 1) if count > 1 else 0


def _members(ordered: Sequence[Entry], strata: Strata) -> dict[str, list[str]]:
    """Names by stratum, where each image has one."""
    members: dict[str, list[str]] = defaultdict(list)
    for entry, (stratum,) in zip(ordered, strata, strict=True):
        members[stratum].append(entry.name)
    return members


def _draw(names: Sequence[str], count: int, seed: int, stratum: str) -> Iterator[str]:
    return (names[position] for position in _rng(seed, stratum).permutation(len(names))[:count])


def _hold_by_class(ordered: Sequence[Entry], strata: Strata, fraction: float, seed: int) -> set[str]:
    """Names to hold out: the share of each class, at least one where the class has two."""
    held: set[str] = set()
    for stratum, names in _members(ordered, strata).items():
        held.update(_draw(names, _wanted(len(names), fraction), seed, stratum))
    return held


def _hold_by_bin(ordered: Sequence[Entry], strata: Strata, fraction: float, seed: int) -> set[str]:
    """Names to hold out: the share of all, and of each bin to within one image; what is rounded in one bin counts in the next."""
    held: set[str] = set()
    passed, wanted = 0, _wanted(len(ordered), fraction)
    for stratum, names in sorted(_members(ordered, strata).items()):
        before, passed = passed, passed + len(names)
        count = round(wanted * passed / len(ordered)) - round(wanted * before / len(ordered))
        held.update(_draw(names, count, seed, stratum))
    return held


def _hold_by_labels(ordered: Sequence[Entry], strata: Strata, fraction: float, seed: int) -> set[str]:
    """Names to hold out, where an image may have several strata: iterative stratification into two parts.

    Each image is dealt once, and the number of its labels is all the work it makes.
    """
    images: dict[str, list[int]] = defaultdict(list)
    for position in _rng(seed, "labels").permutation(len(ordered)).tolist():
        for label in strata[position]:
            images[label].append(position)
    left = {label: len(positions) for label, positions in images.items()}  # not dealt yet
    lacks = {label: [count - _wanted(count, fraction), _wanted(count, fraction)] for label, count in left.items()}
    lacks_in_all = [len(ordered) - _wanted(len(ordered), fraction), _wanted(len(ordered), fraction)]
    dealt: set[int] = set()
    held: set[int] = set()
    while left:
        rarest = min(left, key=lambda label: (left[label], label))
        for position in images[rarest]:
            if position in dealt:
                continue
            dealt.add(position)
            train, val = zip(lacks[rarest], lacks_in_all, strict=True)
            side = int(val > train)
            lacks_in_all[side] -= 1
            for label in strata[position]:
                lacks[label][side] -= 1
                left[label] -= 1
            if side:
                held.add(position)
        del left[rarest]
    for positions in images.values():
        if held.issuperset(positions):  # drawn away from train by the other labels of its images
            held.difference_update(positions)
    return {ordered[position].name for position in held}


def _hold_groups(ordered: Sequence[Entry], strata: Strata, fraction: float, seed: int) -> set[str]:
    """Names to hold out, by whole groups; no group is taken that would leave train without one of its strata."""
    members: dict[str | None, list[int]] = defaultdict(list)
    for position, entry in enumerate(ordered):
        members[entry.group].append(position)
    keys = sorted(members, key=str)
    shuffled = [keys[position] for position in _rng(seed, "groups").permutation(len(keys))]
    shuffled.sort(key=lambda key: -len(members[key]))
    total = Counter(stratum for found in strata for stratum in found)
    taken = Counter[str]()
    held: list[int] = []
    nearest: tuple[float, str | None] | None = None
    for key in shuffled:
        inside = Counter(stratum for position in members[key] for stratum in strata[position])
        if any(total[stratum] - taken[stratum] <= count for stratum, count in inside.items()):
            continue
        # How much farther from their shares the strata of this group would be, in squares of what each has.
        farther = sum(
            ((taken[stratum] + count - fraction * total[stratum]) ** 2 - (taken[stratum] - fraction * total[stratum]) ** 2)
            / total[stratum] ** 2
            for stratum, count in inside.items()
        )
        if farther < 0:
            taken += inside
            held += members[key]
        elif nearest is None or farther < nearest[0]:
            nearest = (farther, key)
    if not held and nearest is not None:
        held = members[nearest[1]]
    return {ordered[position].name for position in held}
