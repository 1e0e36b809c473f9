"""Small charts as inline SVG: no script, no outside file, colours by class so that the page's light and dark themes hold for them.

Drawn by hand and not by matplotlib: its SVG fixes colours and fonts, and one plot is larger than this whole page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 34  # px around the drawing area


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart. `style` is a class of the page: c1, c2, c3, c4, thin."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """Values to pixels, linear."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (min(max(value, self.low), self.high) - self.low) / ((self.high - self.low) or 1.0)
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values that cover low to high, about `count` of them, ends included.

    >>> ticks(0.13, 0.87)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def tick_text(value: float) -> str:
    """A tick's label.

    >>> tick_text(0.5), tick_text(2.0), tick_text(0.00002)
    ('0.5', '2', '2e-05')
    """
    return f"{value:.3g}"


def element(name: str, content: str | Markup = "", **attributes: object) -> Markup:
    """An SVG element, text escaped; `class_` and underscores are turned into attribute names."""
    parts = Markup(" ").join(
        Markup('{}="{}"').format(key.rstrip("_").replace("_", "-"), _short(value)) for key, value in attributes.items()
    )
    return Markup("<{0} {1}>{2}</{0}>").format(Markup(name), parts, content)


def _short(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def drawing(width: int, height: int, parts: Sequence[Markup], label: str) -> Markup:
    """The svg element around its parts, with a name for screen readers."""
    content = Markup("").join([element("title", label), *parts])
    return element("svg", content, viewBox=f"0 0 {width} {height}", role="img", class_="chart", xmlns="http://www.w3.org/2000/svg")


def frame(
    x: Scale, y: Scale, x_ticks: Sequence[float], y_ticks: Sequence[float], y_text: Callable[[float], str], x_label: str
) -> list[Markup]:
    """Grid lines and their labels."""
    parts = []
    for value in y_ticks:
        parts.append(element("line", x1=x.start, x2=x.end, y1=y(value), y2=y(value), class_="grid"))
        parts.append(element("text", y_text(value), x=x.start - 7, y=y(value) + 4, class_="tick end"))
    parts.extend(element("text", tick_text(value), x=x(value), y=y.start + 16, class_="tick mid") for value in x_ticks)
    if x_label:
        parts.append(element("text", x_label, x=(x.start + x.end) / 2, y=y.start + 30, class_="tick mid"))
    return parts


def line_chart(
    curves: Sequence[Curve],
    *,
    label: str,
    x_label: str = "epoch",
    mark: tuple[float, float, str] | None = None,
    width: int = 380,
    height: int = 230,
    y_text: Callable[[float], str] = tick_text,
) -> Markup:
    """Lines over epochs; `mark` is a point with words. Thin curves do not widen the scale by their outliers."""
    shown = [curve for curve in curves if curve.points]
    values = [y for curve in shown if curve.style != "thin" for _, y in curve.points] or [y for c in shown for _, y in c.points]
    places = [x for curve in shown for x, _ in curve.points]
    if not values:
        return Markup("")
    for curve in shown:
        if curve.style == "thin":
            ordered = sorted(y for _, y in curve.points)
            values += [ordered[int(0.02 * (len(ordered) - 1))], ordered[int(0.98 * (len(ordered) - 1))]]
    y_ticks = ticks(min(values), max(values), 4)
    last = max(1.0, *places)
    x_ticks = [tick for tick in ticks(0.0, last, 8) if tick <= last and tick == int(tick)]
    x = Scale(0.0, last, LEFT, width - RIGHT)
    y = Scale(y_ticks[0], y_ticks[-1], height - BOTTOM, TOP)
    parts = frame(x, y, x_ticks, y_ticks, y_text, x_label)
    for curve in shown:
        points = [(x(a), y(b)) for a, b in curve.points]
        if len(points) > 1:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
            parts.append(element("polyline", points=path, class_=f"line {curve.style}"))
        if curve.dots or len(points) == 1:
            parts.extend(element("circle", cx=a, cy=b, r=3, class_=f"dot {curve.style}") for a, b in points)
    if mark is not None:
        parts.extend(_mark(x(mark[0]), y(mark[1]), mark[2], width))
    return drawing(width, height, parts, label)


def _mark(x: float, y: float, text: str, width: int) -> list[Markup]:
    left = x > width * 0.6
    below = y < TOP + 18
    place = {"x": x - 9 if left else x + 9, "y": y + 18 if below else y - 9}
    return [
        element("circle", cx=x, cy=y, r=6, class_="ring"),
        element("text", text, **place, class_="marked end" if left else "marked"),
    ]


def hatch(name: str, style: str) -> Markup:
    """A pattern of slanted lines: carries meaning where colours are not told apart."""
    line = element("line", x1=0, y1=0, x2=0, y2=6, class_=style)
    return element("pattern", line, id=name, width=6, height=6, patternUnits="userSpaceOnUse", patternTransform="rotate(45)")
