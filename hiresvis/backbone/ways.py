"""Enumerates the ways to recompute one unit by itself, from the record of what happened in it, and works out their figures.

Backward asks for a unit's saved tensors in about the reverse order of their making. So a unit can be run again in several
*passes*: the first one fills only the last part of the saved tensors, and once those are used up the next pass, which ends
earlier, fills the part before. Only one part is alive at a time, whatever the unit looks like inside: the order of its
saved tensors is its inner chain. And the outputs of costly operators (*products*: matrix products, convolutions,
attention) can be *kept* from the forward, so that no pass runs them again (selective checkpointing).

The figures follow from two traces of the unit, one that keeps everything and one that drops everything, by exact
accounting of storages: what a pass holds is what the dropping forward holds at that moment, and the saved tensors of its
part. Candidates are chosen greedily (products by FLOPs per byte kept, borders by the peak they leave); no claim is made
that a better set of borders does not exist.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hiresvis.memory.costs import Affine, Highest, Recompute

MAX_PASSES = 5
MAX_KEPT_SETS = 5
_LEAST_GAIN = 0.04  # of the peak, below which another pass is not worth running
_FAR = 16  # candidates are chosen at a batch that is so many steps beyond the two that were traced
_LEAST_SHARE = 0.02  # of a unit's FLOPs, below which a product is not worth keeping


@dataclass(slots=True)
class Product:
    """A costly operator of a forward: its FLOPs, bytes read and written, the storages it made, whether they were changed later."""

    flops: int
    traffic: int
    outputs: tuple[int, ...]
    changed: bool = False


@dataclass(slots=True)
class Place:
    """One saved tensor: the moment it was saved, its storage, FLOPs, bytes moved and products done before."""

    moment: int
    storage: int | None
    flops: int
    traffic: int
    num_products: int


@dataclass(slots=True)
class Tape:
    """What happened in one unit at one batch size. Moments number the levels of the pass they belong to.

    Attributes:
        dropped: live bytes above those at entry, in a forward that keeps nothing.
        backward_first, backward_more: live bytes above those at the start of the unit's backward, everything stored.
        sizes: bytes of the storages made in the unit's forward.
        born, died: moments of the dropping forward at which a storage came and went.
        gone: moment of the backward at which a storage was gone.
        unpacked, released: moments of the backward at which a place was asked for, and let go.
        backward_flops, backward_traffic: of forwards that the unit's own backward runs (its sliced modules, once more).
        inputs: of what the unit is given, bytes, and the moment of the backward at which it was gone; what stays is not among them.
    """

    dropped: list[int] = field(default_factory=list)
    backward_first: list[int] = field(default_factory=list)
    backward_more: list[int] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    born: dict[int, int] = field(default_factory=dict)
    died: dict[int, int] = field(default_factory=dict)
    alive_at_backward: set[int] = field(default_factory=set)
    gone: dict[int, int] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)
    unpacked: dict[int, int] = field(default_factory=dict)
    released: dict[int, int] = field(default_factory=dict)
    products: list[Product] = field(default_factory=list)
    flops: int = 0
    backward_flops: int = 0
    backward_traffic: int = 0
    inputs: list[tuple[int, int]] = field(default_factory=list)
    output: int | None = None

    def signature(self) -> tuple[object, ...]:
        """Equal for units that behave alike; storages are numbered anew."""
        names = {number: index for index, number in enumerate(sorted(self.sizes))}
        return (
            tuple(self.dropped),
            tuple(self.backward_first),
            tuple(self.backward_more),
            tuple((names[n], self.sizes[n], self.born[n], self.died.get(n), n in self.alive_at_backward, self.gone.get(n)) for n in names),
            tuple((place.moment, names.get(place.storage), place.flops, place.traffic) for place in self.places),  # type: ignore[arg-type]
            tuple(sorted(self.unpacked.items())),
            tuple(sorted(self.released.items())),
            tuple((product.flops, tuple(names.get(n) for n in product.outputs), product.changed) for product in self.products),
            (tuple(self.inputs), names.get(self.output), self.backward_flops),  # type: ignore[arg-type]
        )


def flops_to_last_save(tape: Tape) -> int:
    """FLOPs of a second run, which ends with the last saved tensor; 0 when nothing is saved."""
    return tape.places[-1].flops if tape.places else 0


def ways_of(few: Tape, many: Tape, few_batch: int, many_batch: int, *, sliced: bool = False) -> tuple[Recompute, ...]:
    """The ways worth considering, the plain one first. Empty when the unit saves nothing or the traces differ in kind.

    Args:
        few, many: the unit at two batch sizes.
        sliced: its token-wise modules ran in slices; backward ran them once more, which the tapes count among the FLOPs of backward.
    """
    if not few.places or not _alike(few, many):
        return ()
    chosen = list(_candidates(_Replay(_far(few, many))))
    replays = (_Replay(few), _Replay(many))
    found = []
    for keep, borders in chosen:
        at_few, at_many = (replay.figures(keep, borders) for replay in replays)
        found.append(
            Recompute(
                keep=keep,
                passes=borders,
                sliced=sliced,
                kept=Affine.through(few_batch, at_few.kept, many_batch, at_many.kept),
                forward=Highest.through(few_batch, at_few.forward, many_batch, at_many.forward),
                backward_first=Highest.through(few_batch, at_few.backward_first, many_batch, at_many.backward_first),
                backward_more=Highest.through(few_batch, at_few.backward_more, many_batch, at_many.backward_more),
                flops=Affine.through(few_batch, at_few.flops + few.backward_flops, many_batch, at_many.flops + many.backward_flops),
                traffic=Affine.through(
                    few_batch, at_few.traffic + few.backward_traffic, many_batch, at_many.traffic + many.backward_traffic
                ),
            )
        )
    return tuple(found)


def _far(few: Tape, many: Tape) -> Tape:
    """The tape of a batch far beyond the traced ones, where activations and not weight gradients decide what helps."""

    def far(at_few: int, at_many: int) -> int:
        return at_many + _FAR * (at_many - at_few)

    def levels(at_few: list[int], at_many: list[int]) -> list[int]:
        return [far(a, b) for a, b in zip(at_few, at_many, strict=True)]

    return replace(
        many,
        dropped=levels(few.dropped, many.dropped),
        backward_first=levels(few.backward_first, many.backward_first),
        backward_more=levels(few.backward_more, many.backward_more),
        sizes={
            number: far(few.sizes[other], many.sizes[number]) for other, number in zip(sorted(few.sizes), sorted(many.sizes), strict=True)
        },
        inputs=[(far(size, other), gone) for (size, _), (other, gone) in zip(few.inputs, many.inputs, strict=True)],
    )


def _alike(few: Tape, many: Tape) -> bool:
    return (
        len(few.sizes) == len(many.sizes)
        and len(few.places) == len(many.places)
        and len(few.products) == len(many.products)
        and len(few.dropped) == len(many.dropped)
        and len(few.backward_first) == len(many.backward_first)
        and len(few.inputs) == len(many.inputs)
    )


@dataclass(slots=True)
class _Figures:
    kept: int
    forward: list[int]
    backward_first: list[int]
    backward_more: list[int]
    flops: int
    traffic: int


class _Replay:
    """Works out what a way of recomputing holds, moment by moment."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.last = len(tape.places)
        moments = len(tape.backward_first) + 1  # moment 0 is the start
        self.moments = moments
        # What backward holds besides this unit's saved tensors, all that it is given always there: a second run needs it.
        correction = np.zeros(moments, dtype=np.int64)
        for number in tape.alive_at_backward:
            gone = tape.gone.get(number)
            if gone is not None:
                correction[gone + 1 :] += tape.sizes[number]
        for size, gone in tape.inputs:
            correction[gone + 1 :] += size
        self.rest_first = np.concatenate(([0], tape.backward_first)) + correction
        self.rest_more = np.concatenate(([0], tape.backward_more)) + correction
        self.dropped = np.asarray(tape.dropped, dtype=np.int64)
        self.released = [tape.released.get(index, moments) for index in range(self.last)]  # by place
        self.latest: dict[int, int] = {}  # release of the last place that holds a storage
        for place, released in zip(tape.places, self.released, strict=True):
            if place.storage is not None:
                self.latest[place.storage] = max(self.latest.get(place.storage, 0), released)

    def kept_storages(self, keep: Sequence[int]) -> set[int]:
        return {number for index in keep for number in self.tape.products[index].outputs}

    def kept_bytes(self, keep: Sequence[int]) -> int:
        return sum(self.tape.sizes[number] for number in self.kept_storages(keep))

    def groups(self, borders: Sequence[int]) -> list[tuple[int, int]]:
        edges = [0, *borders, self.last]
        return list(itertools.pairwise(edges))

    def again(self, keep: Sequence[int], borders: Sequence[int]) -> tuple[int, int]:
        """FLOPs and bytes moved of all passes; what is kept is not run again."""
        flops = traffic = 0
        for _, end in self.groups(borders):
            place = self.tape.places[end - 1]
            skipped = [self.tape.products[index] for index in keep if index < place.num_products]
            flops += place.flops - sum(product.flops for product in skipped)
            traffic += place.traffic - sum(product.traffic for product in skipped)
        return flops, traffic

    def figures(self, keep: Sequence[int], borders: Sequence[int]) -> _Figures:
        kept = self.kept_storages(keep)
        forward = self.dropped.copy()
        for number in kept:
            if (died := self.tape.died.get(number)) is not None:
                forward[died:] += self.tape.sizes[number]
        first, more = (np.concatenate(self._backward(kept, borders, rest)).tolist() for rest in (self.rest_first, self.rest_more))
        return _Figures(self.kept_bytes(keep), forward.tolist(), first, more, *self.again(keep, borders))

    def peak(self, keep: Sequence[int], borders: Sequence[int]) -> int:
        """The highest level in backward, what is kept included."""
        levels = self._backward(self.kept_storages(keep), borders, self.rest_first)
        return max(int(part.max()) for part in levels) + self.kept_bytes(keep)

    def _backward(self, kept: set[int], borders: Sequence[int], rest: np.ndarray) -> list[np.ndarray]:
        """Levels of each pass, in the order in which they run, and of backward itself."""
        tape = self.tape
        held = np.zeros(self.moments, dtype=np.int64)  # recomputed saved tensors, by moment of the backward
        levels: list[np.ndarray] = []
        groups = self.groups(borders)
        passes = sorted((self._asked(group), group) for group in groups)
        for asked, (start, end) in passes:
            copies: dict[int, int] = {}  # what this pass makes again and backward holds, by the moment of its release
            for place, released in zip(tape.places[start:end], self.released[start:end], strict=True):
                if place.storage is not None and place.storage in tape.sizes and place.storage not in kept:
                    copies[place.storage] = max(copies.get(place.storage, 0), released)
            # A pass runs when the first of its saved tensors is asked for; what backward holds then stays beside it.
            beside = int(rest[asked] + held[asked])
            levels.append(self._pass(kept, start, end) + beside)
            for number, released in copies.items():
                until = max(released, tape.gone.get(number, released)) if released == self.latest[number] else released
                held[asked + 1 : until + 1] += tape.sizes[number]
        levels.append(rest + held)
        return levels

    def _asked(self, group: tuple[int, int]) -> int:
        moments = [self.tape.unpacked[index] for index in range(*group) if index in self.tape.unpacked]
        return min(moments, default=self.moments - 1)

    def _pass(self, kept: set[int], start: int, end: int) -> np.ndarray:
        """Live bytes of a second run up to saved tensor `end`, which keeps those from `start` on."""
        tape = self.tape
        levels = self.dropped[: tape.places[end - 1].moment].copy()
        for number in kept:
            levels[tape.born[number] : tape.died.get(number, len(levels))] -= tape.sizes[number]
        filled: set[int] = set()
        for place in tape.places[start:end]:
            made = place.storage
            if made is None or made not in tape.sizes or made in kept or made in filled:
                continue
            filled.add(made)
            if (died := tape.died.get(made)) is not None:
                levels[max(place.moment, died) :] += tape.sizes[made]
        return levels if len(levels) else np.zeros(1, dtype=np.int64)


def _candidates(replay: _Replay) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(kept products, borders) worth working out: the plain way, and per kept set one, two, ... passes while they help."""
    plain: tuple[int, ...] = ()
    seen = set()
    for keep in (plain, *_kept_sets(replay)):
        borders: tuple[int, ...] = ()
        peak = replay.peak(keep, borders)
        while True:
            if (keep, borders) not in seen:
                seen.add((keep, borders))
                yield keep, borders
            if len(borders) + 1 >= MAX_PASSES:
                break
            trials = [tuple(sorted((*borders, border))) for border in range(1, replay.last) if border not in borders]
            scored = [(replay.peak(keep, trial), replay.again(keep, trial), trial) for trial in trials]
            if not scored:
                break
            best = min(scored)
            if best[0] > peak * (1 - _LEAST_GAIN):
                break
            # Among borders nearly as good, the one that costs least.
            near = [found for found in scored if found[0] <= best[0] * 1.01]
            peak, _, borders = min(near, key=lambda found: (found[1], found[0]))


def _kept_sets(replay: _Replay) -> Iterator[tuple[int, ...]]:
    """Growing sets of products to keep, most FLOPs per byte first; those whose output a second run does not need are left out."""
    tape = replay.tape
    needed = tape.places[-1].num_products
    usable = []
    for index, product in enumerate(tape.products[:needed]):
        sizes = [tape.sizes.get(number) for number in product.outputs]
        if product.changed or None in sizes or tape.output in product.outputs or product.flops < _LEAST_SHARE * tape.flops:
            continue
        usable.append((product.flops / max(1, sum(size for size in sizes if size)), index))
    chosen: tuple[int, ...] = ()
    for _, index in sorted(usable, key=lambda item: (-item[0], item[1]))[:MAX_KEPT_SETS]:
        chosen = tuple(sorted((*chosen, index)))
        yield chosen
