"""Holds out a share of the training data: stratified by class, whole groups only, and the same files for the same seed everywhere.

With groups this is a greedy version of stratified group sampling: groups in a seeded order, large ones first, each taken when that
brings the held-out class counts nearer to their targets. It is not optimal; with few large groups the share can miss by half a group.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hiresvis.data.folders import Entry, Scan
from hiresvis.errors import DataError, Problem


def split_fraction(scan: Scan, fraction: float, classes: Sequence[str], *, seed: int, place: str) -> tuple[Scan, Scan, list[str]]:
    """(train, held out, lines to report). Order within each is that of `scan`; the choice depends on names, labels and seed alone.

    Raises:
        DataError: the share is not between 0 and 1, or nothing can be held out.
    """
    if not 0 < fraction < 1:
        raise DataError([Problem(f"{fraction} is not a share between 0 and 1; write 0.15, or a path", key="data.val")])
    ordered = sorted(scan.entries, key=lambda entry: entry.name)
    grouped = any(entry.group is not None for entry in ordered)
    held = _hold_groups(ordered, fraction, seed) if grouped else _hold_samples(ordered, fraction, classes, seed)
    if not held:
        count = len({entry.group for entry in ordered}) if grouped else len(ordered)
        what = f"{count} {'groups' if grouped else 'images'}"
        reason = f"{what} cannot give a validation share of {fraction:g} and leave every class in train; give data.val a path"
        raise DataError([Problem(reason, place, "data.val")])
    train = tuple(entry for entry in scan.entries if entry.name not in held)
    val = tuple(entry for entry in scan.entries if entry.name in held)
    notes = []
    absent = sorted({entry.label or "" for entry in train} - {entry.label or "" for entry in val})
    if absent:
        notes.append(f"too few {'groups' if grouped else 'images'} to validate these classes: {', '.join(absent)}")
    got = len(val) / len(ordered)
    if grouped and abs(got - fraction) > 0.25 * fraction:
        notes.append(f"whole groups give a share of {got:.3f} where {fraction:g} was asked")
    return replace(scan, entries=train), Scan(val, scan.folders), notes


def _rng(seed: int, name: str) -> np.random.Generator:
    """One stream for each name: a class that is added or removed leaves the choice in the others as it was."""
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))


def _hold_samples(ordered: Sequence[Entry], fraction: float, classes: Sequence[str], seed: int) -> set[str]:
    """Names to hold out: the share of each class, at least one where the class has two."""
    by_class: dict[str | None, list[str]] = defaultdict(list)
    for entry in ordered:
        by_class[entry.label].append(entry.name)
    held: set[str] = set()
    for label in classes:
        names = by_class[label]
        count = min(max(1, round(len(names) * fraction)), len(names) - 1) if len(names) > 1 else 0
        held.update(names[position] for position in _rng(seed, label).permutation(len(names))[:count])
    return held


def _hold_groups(ordered: Sequence[Entry], fraction: float, seed: int) -> set[str]:
    """Names to hold out, by whole groups; no group is taken that would leave train without one of its classes."""
    members: dict[str | None, list[Entry]] = defaultdict(list)
    for entry in ordered:
        members[entry.group].append(entry)
    keys = sorted(members, key=str)
    shuffled = [keys[position] for position in _rng(seed, "groups").permutation(len(keys))]
    shuffled.sort(key=lambda key: -len(members[key]))
    total = Counter(entry.label for entry in ordered)
    left, taken = Counter(total), Counter[str | None]()
    held: set[str] = set()
    nearest: tuple[float, str | None] | None = None

    def distance(counts: Counter[str | None]) -> float:
        return sum(((counts[label] - fraction * size) / size) ** 2 for label, size in total.items())

    for key in shuffled:
        inside = Counter(entry.label for entry in members[key])
        if any(left[label] <= count for label, count in inside.items()):
            continue
        after = distance(taken + inside)
        if after < distance(taken):
            taken += inside
            left -= inside
            held.update(entry.name for entry in members[key])
        elif nearest is None or after < nearest[0]:
            nearest = (after, key)
    if not held and nearest is not None:
        held.update(entry.name for entry in members[nearest[1]])
    return held
