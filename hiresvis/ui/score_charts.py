"""Drawings of what scores are worth: how often a prediction of so much sureness is right, and what a threshold gains and costs."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from hiresvis.ui.svg import BOTTOM, LEFT, RIGHT, TOP, Scale, drawing, element, frame, tick_text

WIDTH, HEIGHT = 380, 260
_SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_RADII = 3.0, 9.0  # px, of a bin with hardly any predictions and of one with all

Bin = tuple[int, float, float]  # predictions, mean score, share that is right


def _scales() -> tuple[Scale, Scale]:
    return Scale(0.0, 1.0, LEFT, WIDTH - RIGHT), Scale(0.0, 1.0, HEIGHT - BOTTOM, TOP)


def reliability_chart(after: Sequence[Bin], before: Sequence[Bin], words: str) -> Markup:
    """Share that is right over the mean score of each bin; on the dashed line scores say the truth. Dots are larger with more predictions.

    Args:
        after: as scores are read. before: without the temperature; may be empty.
        words: what a dot counts.
    """
    x, y = _scales()
    parts = frame(x, y, _SHARES, _SHARES, tick_text, "mean score")
    parts.append(element("line", x1=x.start, y1=y.start, x2=x.end, y2=y.end, class_="border"))
    for bins, style in ((before, "c2"), (after, "c1")):
        total = sum(count for count, _, _ in bins) or 1
        points = " ".join(f"{x(score):.1f},{y(right):.1f}" for _, score, right in bins)
        if len(bins) > 1:
            parts.append(element("polyline", points=points, class_=f"line {style}"))
        for count, score, right in bins:
            told = f"{count} of {total} {words}: mean score {score:.3f}, {right:.3f} right"
            radius = _RADII[0] + (_RADII[1] - _RADII[0]) * (count / total) ** 0.5
            parts.append(element("circle", element("title", told), cx=x(score), cy=y(right), r=radius, class_=f"dot {style}"))
    return drawing(WIDTH, HEIGHT, parts, "Share that is right by mean score")


def threshold_chart(name: str, points: Sequence[tuple[float, float, float]], threshold: float | None) -> Markup:
    """Precision and recall over the threshold at which a class is predicted.

    Args:
        points: (threshold, precision, recall), the lowest first.
        threshold: the one in use, which is marked.
    """
    x, y = _scales()
    parts = frame(x, y, _SHARES, _SHARES, tick_text, "threshold")
    if threshold is not None:
        parts.append(element("line", x1=x(threshold), x2=x(threshold), y1=y.start, y2=y.end, class_="capacity"))
        left = threshold > 0.8
        place = x(threshold) - 5 if left else x(threshold) + 5
        parts.append(element("text", f"{threshold:.3g}", x=place, y=y.start - 6, class_=f"marked{' end' if left else ''}"))
    for column, style in ((1, "c1"), (2, "c2")):
        path = " ".join(f"{x(point[0]):.1f},{y(point[column]):.1f}" for point in points)
        parts.append(element("polyline", points=path, class_=f"line {style}"))
    return drawing(WIDTH, HEIGHT, parts, f"{name}: precision and recall by threshold")
