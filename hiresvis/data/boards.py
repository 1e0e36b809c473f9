"""Draws one inspection image like a printed circuit board, with or without defects of 8 to 25 pixels.

The board is first a map of materials, in which a defect is a change of material, so its mask is exact; the camera comes after: colours,
uneven light, blur, the weave of the laminate, noise. Every length is in pixels whatever the image's size: a larger image shows more
board, not larger defects. What it does badly: nothing is routed, traces lead nowhere, and each kind of defect is an idea of the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import cv2
import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]

KINDS = ("open", "short", "mousebite", "spur", "pinhole", "copper")
MASK, TRACE, PAD, HOLE, SILK = range(5)  # materials: solder mask alone, copper under it, bare copper, drilled hole, print
_BLOCK_PX = 256  # side of the parts that a board is laid out from, about
_APART_PX = 28  # least distance between two defects
_VISIBLE_PX = 24  # a defect changes at least this many pixels, or it is placed anew


@dataclass(frozen=True, slots=True)
class Style:
    """What all images of one production lot share."""

    palette: Pixels  # (5, 3) uint8, BGR of each material
    pitch: int  # pixels from trace to trace
    width: int  # pixels of a trace
    blur: float  # sigma in pixels
    noise: float  # standard deviation in grey levels


@dataclass(frozen=True, slots=True)
class Board:
    """One drawn image.

    Attributes:
        image: (size, size, 3) uint8, BGR.
        mask: (size, size) uint8, 255 where a defect changed the material.
        kinds: one entry per defect.
    """

    image: Pixels
    mask: Pixels
    kinds: tuple[str, ...]


@dataclass(slots=True)
class _Layout:
    """The material map while it is being drawn, and where its straight traces run (for the defects)."""

    material: Pixels
    style: Style
    traces: list[tuple[float, float, float, float, int]] = field(default_factory=list)  # x0, y0, x1, y1, pixels to the neighbour (0: none)


def draw_style(rng: np.random.Generator) -> Style:
    """A production lot: colour of the mask, fineness of the traces, sharpness and noise of the camera."""
    mask = np.array([(62, 98, 34), (110, 70, 26), (52, 86, 52), (84, 84, 40)][rng.integers(4)]) + rng.integers(-8, 9, 3)
    trace = mask * 1.25 + 58
    pad = np.array([(120, 190, 215), (196, 202, 206)][rng.integers(2)]) + rng.integers(-8, 9, 3)
    palette = np.clip(np.stack([mask, trace, pad, np.full(3, 22), np.full(3, 226)]), 0, 255).astype(np.uint8)
    width = int(rng.integers(12, 16))
    return Style(palette, width + int(rng.integers(14, 18)), width, float(rng.uniform(0.6, 1.1)), float(rng.uniform(4.0, 7.0)))


def draw_board(size_px: int, style: Style, num_defects: int, rng: np.random.Generator) -> Board:
    """Draw one board; the same arguments and generator state give the same bytes.

    Layout, defects and camera have streams of their own: with no defects, the same board is drawn and photographed alike.
    """
    laying, breaking, taking = rng.spawn(3)
    layout = _Layout(np.zeros((size_px, size_px), np.uint8), style)
    for y0, y1 in pairwise(_edges(size_px, laying)):
        for x0, x1 in pairwise(_edges(size_px, laying)):
            part = _PARTS[laying.choice(len(_PARTS), p=_SHARES)]
            part(layout, int(x0) + 6, int(y0) + 6, int(x1) - 6, int(y1) - 6, laying)
    before = layout.material.copy()
    kinds = _add_defects(layout, num_defects, breaking)
    return Board(_photograph(layout, taking), cv2.compare(before, layout.material, cv2.CMP_NE), kinds)


def _edges(size_px: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Borders of the blocks along one side, out of step from row to row."""
    num = max(1, round(size_px / _BLOCK_PX))
    edges = np.linspace(0, size_px, num + 1)
    edges[1:-1] += rng.uniform(-0.2, 0.2, num - 1) * _BLOCK_PX
    return edges.astype(np.int64)


# --- parts of a board --------------------------------------------------------------------------------------------------------------


def _bus(layout: _Layout, x0: int, y0: int, x1: int, y1: int, rng: np.random.Generator) -> None:
    """Parallel traces with a common step to the side, ending in vias or pads."""
    pitch, width = layout.style.pitch, layout.style.width
    upright = bool(rng.integers(2))
    length, across = (y1 - y0, x1 - x0) if upright else (x1 - x0, y1 - y0)
    shift = int(rng.integers(-2, 3)) * pitch
    num = (across - abs(shift) - pitch) // pitch
    if num < 2 or length < 2 * abs(shift) + 5 * pitch:
        shift, num = 0, max(1, (across - pitch) // pitch)
    start = pitch // 2 + width + max(0, -shift) + np.arange(num) * pitch
    inset = rng.integers(0, 3, (num, 2)) * pitch
    bend = int(rng.integers(2 * pitch + width, max(2 * pitch + width + 1, length - abs(shift) - 2 * pitch)))
    along = np.stack([width + inset[:, 0], np.full(num, bend), np.full(num, bend + abs(shift)), length - width - inset[:, 1]], axis=1)
    side = np.stack([start, start, start + shift, start + shift], axis=1)
    points = np.stack([side, along] if upright else [along, side], axis=-1) + np.array([x0, y0])
    cv2.polylines(layout.material, list(points.astype(np.int32)), False, TRACE, width)
    lengths = np.abs(np.diff(points, axis=1)).sum(axis=2)
    for index, (row, long) in enumerate(zip(points.tolist(), (lengths > 3 * pitch).tolist(), strict=True)):
        gap = pitch if index + 1 < num else 0
        layout.traces += [(*row[a], *row[a + 1], gap) for a in (0, 2) if long[a]]
        for end in (row[0], row[3]):
            cv2.circle(layout.material, end, width - 1, PAD, -1)
            cv2.circle(layout.material, end, width // 3, HOLE, -1)


def _chip(layout: _Layout, x0: int, y0: int, x1: int, y1: int, rng: np.random.Generator) -> None:
    """A chip's footprint: four rows of pads, short traces leading out, a printed outline."""
    width, pitch = layout.style.width, layout.style.pitch
    inset = int(rng.integers(40, 56))
    left, top, right, bottom = x0 + inset, y0 + inset, x1 - inset, y1 - inset
    cv2.rectangle(layout.material, (left + 18, top + 18), (right - 18, bottom - 18), SILK, 2)
    cv2.circle(layout.material, (left + 30, top + 30), 5, SILK, -1)
    out = inset - 18
    for x in range(left + pitch, right - pitch + 1, pitch):
        for edge, sign in ((top, -1), (bottom, 1)):
            _pin(layout, x, edge, 0, sign, out, width)
    for y in range(top + pitch, bottom - pitch + 1, pitch):
        for edge, sign in ((left, -1), (right, 1)):
            _pin(layout, edge, y, sign, 0, out, width)


def _pin(layout: _Layout, x: int, y: int, dx: int, dy: int, out: int, width: int) -> None:
    cv2.line(layout.material, (x, y), (x + dx * out, y + dy * out), TRACE, width)
    half, deep = width // 2 + 1, 12
    cv2.rectangle(
        layout.material,
        (x - half - abs(dx) * deep, y - half - abs(dy) * deep),
        (x + half + abs(dx) * deep, y + half + abs(dy) * deep),
        PAD,
        -1,
    )


def _ball_grid(layout: _Layout, x0: int, y0: int, x1: int, y1: int, rng: np.random.Generator) -> None:
    """Round pads in a grid, each with a via beside it."""
    step, radius = int(rng.integers(34, 40)), int(rng.integers(8, 11))
    for y in range(y0 + step, y1 - step + 1, step):
        for x in range(x0 + step, x1 - step + 1, step):
            via = (x + step // 2, y + step // 2)
            cv2.line(layout.material, (x, y), via, TRACE, 5)
            cv2.circle(layout.material, (x, y), radius, PAD, -1)
            cv2.circle(layout.material, via, 6, PAD, -1)
            cv2.circle(layout.material, via, 3, HOLE, -1)


def _passives(layout: _Layout, x0: int, y0: int, x1: int, y1: int, rng: np.random.Generator) -> None:
    """Pairs of pads between traces, with printed outlines and names."""
    width, step = layout.style.width, 56
    for row, y in enumerate(range(y0 + 30, y1 - 24, step)):
        x = x0 + 30
        while x + 60 < x1:
            cv2.line(layout.material, (x - 20, y), (x + 60, y), TRACE, width)
            layout.traces.append((x - 20, y, x - 10, y, 0))
            for left in (x, x + 28):
                cv2.rectangle(layout.material, (left, y - 11), (left + 14, y + 11), PAD, -1)
            cv2.rectangle(layout.material, (x - 5, y - 16), (x + 47, y + 16), SILK, 1)
            cv2.putText(layout.material, f"R{rng.integers(100)}", (x, y - 19), cv2.FONT_HERSHEY_PLAIN, 0.8, SILK, 1)
            x += 88 + int(rng.integers(0, 3)) * 12
        if row % 2:
            cv2.line(layout.material, (x0 + 4, y + step // 2), (x1 - 4, y + step // 2), TRACE, width)
            layout.traces.append((x0 + 4, y + step // 2, x1 - 4, y + step // 2, 0))


def _pour(layout: _Layout, x0: int, y0: int, x1: int, y1: int, rng: np.random.Generator) -> None:
    """A hatched copper area: fine regular texture, with vias."""
    step, width = int(rng.integers(18, 25)), int(rng.integers(6, 9))
    for offset in range(0, x1 - x0 + 1, step):
        cv2.line(layout.material, (x0 + offset, y0), (x0 + offset, y1), TRACE, width)
    for offset in range(0, y1 - y0 + 1, step):
        cv2.line(layout.material, (x0, y0 + offset), (x1, y0 + offset), TRACE, width)
    for _ in range(6):
        center = (int(rng.integers(x0 + 12, x1 - 12)), int(rng.integers(y0 + 12, y1 - 12)))
        cv2.circle(layout.material, center, 10, PAD, -1)
        cv2.circle(layout.material, center, 4, HOLE, -1)


_Part = Callable[[_Layout, int, int, int, int, np.random.Generator], None]
_PARTS: tuple[_Part, ...] = (_bus, _chip, _ball_grid, _passives, _pour)
_SHARES = (0.60, 0.12, 0.08, 0.12, 0.08)


# --- defects -----------------------------------------------------------------------------------------------------------------------


def _add_defects(layout: _Layout, num: int, rng: np.random.Generator) -> tuple[str, ...]:
    """Place defects of two to five kinds, in turn, apart from one another."""
    kinds: list[str] = []
    spots: list[tuple[float, float]] = []
    some = rng.permutation(len(KINDS))[: int(rng.integers(2, 6))]
    for _ in range(num * 20):
        if len(kinds) == num or not layout.traces:
            break
        kind = KINDS[some[len(kinds) % len(some)]]
        x, y, nx, ny, gap = _spot(layout, kind, rng)
        if any((x - a) ** 2 + (y - b) ** 2 < _APART_PX**2 for a, b in spots):
            continue
        if _place(layout, kind, x, y, nx, ny, gap, rng):
            kinds.append(kind)
            spots.append((x, y))
    return tuple(kinds)


def _spot(layout: _Layout, kind: str, rng: np.random.Generator) -> tuple[float, float, float, float, int]:
    """A point on a trace, the unit normal there (towards the neighbouring trace), and the distance to the neighbour."""
    x0, y0, x1, y1, gap = layout.traces[rng.integers(len(layout.traces))]
    share = rng.uniform(0.15, 0.85)
    length = float(np.hypot(x1 - x0, y1 - y0))
    nx, ny = abs(y1 - y0) / length, abs(x1 - x0) / length
    x, y = x0 + (x1 - x0) * share, y0 + (y1 - y0) * share
    if kind == "copper":
        x, y = rng.uniform(16, layout.material.shape[1] - 16), rng.uniform(16, layout.material.shape[0] - 16)
    return float(x), float(y), float(nx), float(ny), gap


def _place(layout: _Layout, kind: str, x: float, y: float, nx: float, ny: float, gap: int, rng: np.random.Generator) -> bool:
    """Draw one defect; undone, and False, where it would hardly show."""
    width = layout.style.width
    reach = 40
    left, top = max(0, int(x) - reach), max(0, int(y) - reach)
    window = layout.material[top : int(y) + reach, left : int(x) + reach]
    before = window.copy()
    if kind == "short" and not gap:
        return False
    if kind == "copper" and layout.material[int(y) - 14 : int(y) + 15, int(x) - 14 : int(x) + 15].any():
        return False  # copper in the open, clear of everything else
    edge = (x + nx * width * 0.5, y + ny * width * 0.5)
    if kind == "open":
        half = rng.uniform(5.0, 8.0)
        corners = [
            (x + sx * nx * width - sy * ny * half, y + sx * ny * width + sy * nx * half) for sx, sy in ((-1, -1), (-1, 1), (1, 1), (1, -1))
        ]
        jitter = rng.uniform(-1.5, 1.5, (4, 2))
        cv2.fillPoly(layout.material, [np.rint(np.array(corners) + jitter).astype(np.int32)], MASK)
    elif kind == "short":
        cv2.line(layout.material, (round(x), round(y)), (round(x + nx * gap), round(y + ny * gap)), PAD, int(rng.integers(8, 12)))
    elif kind == "mousebite":
        _blob(layout.material, *edge, rng.uniform(0.55, 0.75) * width, MASK, rng)
    elif kind == "spur":
        _blob(layout.material, edge[0] + nx * 2, edge[1] + ny * 2, rng.uniform(0.55, 0.75) * width, TRACE, rng)
    elif kind == "pinhole":
        _blob(layout.material, x, y, rng.uniform(0.34, 0.44) * width, HOLE, rng)
    else:
        _blob(layout.material, x, y, rng.uniform(6.0, 10.0), PAD, rng)
    if np.count_nonzero(before != window) >= _VISIBLE_PX:
        return True
    window[:] = before
    return False


def _blob(material: Pixels, x: float, y: float, radius: float, value: int, rng: np.random.Generator) -> None:
    """A ragged spot."""
    angles = np.linspace(0, 2 * np.pi, 9)[:-1]
    reach = radius * rng.uniform(0.75, 1.2, 8)
    points = np.stack([x + reach * np.cos(angles), y + reach * np.sin(angles)], axis=1)
    cv2.fillPoly(material, [np.rint(points).astype(np.int32)], value)


# --- the camera --------------------------------------------------------------------------------------------------------------------


def _photograph(layout: _Layout, rng: np.random.Generator) -> Pixels:
    """Colours, blur, uneven light, weave and noise, in integers of 8 bits throughout for speed."""
    style, size = layout.style, layout.material.shape[0]
    table = np.zeros((1, 256, 3), np.uint8)
    table[0, : len(style.palette)] = style.palette
    image = cv2.LUT(cv2.merge([layout.material] * 3), table)
    image = cv2.GaussianBlur(image, (5, 5), style.blur)
    light = rng.uniform(0.72, 1.0, (4, 4)) * 255
    field_of_light = cv2.resize(light.astype(np.uint8), (size, size), interpolation=cv2.INTER_CUBIC)
    image = cv2.multiply(image, cv2.merge([field_of_light] * 3), scale=1 / 235)
    # Gaussian noise by table from random bytes, the weave of the laminate added to it; 128 is none.
    levels = np.clip(np.rint(_gaussian_levels() * style.noise) + 128, 0, 255).astype(np.uint8)
    grain = cv2.LUT(np.frombuffer(rng.bytes(size * size), np.uint8).reshape(size, size), levels)
    weave = np.rint(2.5 * np.sin(np.arange(size) * (2 * np.pi / 13)) + 2.5).astype(np.uint8)
    grain = cv2.add(grain, cv2.min(weave[None, :].repeat(size, 0), weave[:, None].repeat(size, 1)))
    grain3 = cv2.merge([grain] * 3)
    return cv2.subtract(cv2.add(image, cv2.subtract(grain3, 128)), cv2.subtract(128, grain3))


def _gaussian_levels() -> NDArray[np.float64]:
    """Standard normal quantiles of the 256 byte values, by the logistic approximation of Tocher (1963), exact to 0.02."""
    share = (np.arange(256) + 0.5) / 256
    return np.log(share / (1 - share)) / 1.702
