"""Words, numbers and drawn characters that the views share. No rich here: the plain view starts without it."""

from __future__ import annotations

import math
import shlex
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hiresvis.run.events import Evaluated, LadderRow, PlanChosen, RunFinished, RunInterrupted, is_of
from hiresvis.ui.state import RunState
from hiresvis.units import GIB, format_duration, format_size


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What bars, curves and separators are drawn with."""

    done: str
    edge: str
    todo: str
    fill: str
    fill_parts: str  # eighths of a cell, "" for whole cells alone
    free: str
    limit: str
    over: str
    spark: str
    dot: str
    ellipsis: str
    mark: str
    rule: str
    encoding: str = "utf-8"

    def clean(self, text: str) -> str:
        """Text that this terminal can show: no control characters, nothing that its encoding lacks."""
        text = "".join(char if char.isprintable() else " " for char in text)
        if self.encoding == "utf-8":
            return text
        text = text.translate(_ASCII_TWINS)
        return text.encode(self.encoding, "backslashreplace").decode(self.encoding)


_ASCII_TWINS = str.maketrans({"·": "|", "×": "x", "…": "...", "→": "->", "–": "-", "—": "-", "\u2019": "'", "≤": "<=", "≥": ">="})
UNICODE = Glyphs("━", "╸", "─", "█", "▏▎▍▌▋▊▉", "·", "│", "▶", "▁▂▃▄▅▆▇█", "·", "…", "▸", "─")
ASCII = Glyphs("=", ">", "-", "#", "", ".", "|", ">", "_.-~=+*#", "|", "...", ">", "-", encoding="ascii")


def glyphs_for(encoding: str | None) -> Glyphs:
    """Unicode for a UTF-8 stream or one without an encoding (a string), ASCII drawing for any other."""
    name = (encoding or "utf-8").lower().replace("_", "-")
    if name in ("utf-8", "utf8", "utf-8-sig"):
        return UNICODE
    try:
        "".encode(name)
    except LookupError:
        name = "ascii"
    return Glyphs(**{**{key: getattr(ASCII, key) for key in Glyphs.__slots__}, "encoding": name})


def cell_width(text: str) -> int:
    """Terminal columns that the text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def shorten(text: str, width: int, ellipsis: str = "…") -> str:
    """The text in at most `width` columns, cut at the end.

    >>> shorten("stage0 spacing 1", 9)
    'stage0 s…'
    """
    if cell_width(text) <= width:
        return text
    room = width - len(ellipsis)
    if room <= 0:
        return ellipsis[: max(0, width)]
    cut = ""
    for char in text:
        if cell_width(cut + char) > room:
            break
        cut += char
    return cut + ellipsis


def pad(text: str, width: int, right: bool = False) -> str:
    """The text in `width` columns."""
    space = " " * (width - cell_width(text))
    return space + text if right else text + space


def progress_bar(share: float, width: int, glyphs: Glyphs) -> tuple[str, str]:
    """The done and the open part of a bar of `width` columns."""
    share = min(1.0, max(0.0, share))
    whole = int(share * width)
    edge = glyphs.edge if share > 0 and whole < width else ""
    return glyphs.done * whole + edge, glyphs.todo * (width - whole - len(edge))


def memory_bar(share: float, width: int, glyphs: Glyphs) -> str:
    """Use as a share of the budget: filled, then free, then the budget's mark; past it, a mark of its own.

    >>> memory_bar(0.5, 4, UNICODE), memory_bar(1.2, 4, UNICODE)
    ('██··│', '████▶')
    """
    if share > 1:
        return glyphs.fill * width + glyphs.over
    filled = max(0.0, share) * width
    whole = int(filled)
    part = int((filled - whole) * 8) if glyphs.fill_parts else 0
    bar = glyphs.fill * whole + (glyphs.fill_parts[part - 1] if part else "")
    return bar + glyphs.free * (width - len(bar)) + glyphs.limit


def sparkline(values: Sequence[float], width: int, glyphs: Glyphs) -> str:
    """The values' course in at most `width` characters, scaled between their lowest and highest mean.

    >>> sparkline([4, 3, 2, 1], 4, UNICODE)
    '█▆▃▁'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    count = min(width, len(finite))
    edges = [len(finite) * i // count for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    top = len(glyphs.spark) - 1
    return "".join(glyphs.spark[round((mean - low) / (high - low) * top) if high > low else 0] for mean in means)


def clock_time(seconds: float | None) -> str:
    """Time left, short and of steady width.

    >>> clock_time(250), clock_time(6725), clock_time(277200), clock_time(None)
    ('04:10', '1h52', '3d05h', '--:--')
    """
    if seconds is None or not math.isfinite(seconds):
        return "--:--"
    whole = round(seconds)
    if whole >= 48 * 3600:
        return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}"
    return f"{whole // 60:02d}:{whole % 60:02d}"


def number(value: float | None, digits: int = 3) -> str:
    """A loss or metric.

    >>> number(0.41234), number(123.4), number(None), number(float("nan")), number(0.00021)
    ('0.412', '123.4', '-', 'nan', '2.1e-04')
    """
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if 0 < abs(value) < 0.5 * 10**-digits:  # an error in the units of a small target
        return f"{value:.1e}"
    return f"{value:.{digits}f}" if abs(value) < 100 else f"{value:.1f}"


def seconds_text(seconds: float | None) -> str:
    """A step's time.

    >>> seconds_text(2.351), seconds_text(0.0841), seconds_text(None)
    ('2.35s', '84ms', '-')
    """
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.0f}ms" if seconds < 0.9995 else f"{seconds:.2f}s" if seconds < 100 else format_duration(seconds)


def percent(share: float | None) -> str:
    """A share for display.

    >>> percent(0.04), percent(0.108), percent(None)
    ('4%', '11%', '-')
    """
    return "-" if share is None else f"{100 * share:.0f}%"


def speed(images_per_second: float | None) -> str:
    """Images a second, two or three digits.

    >>> speed(6.83), speed(152.2), speed(None)
    ('6.8', '152', '-')
    """
    if images_per_second is None:
        return "-"
    return (
        f"{images_per_second:.0f}"
        if images_per_second >= 99.95
        else f"{images_per_second:.1f}"
        if images_per_second >= 0.95
        else f"{images_per_second:.2f}"
    )


def size_pair(used_bytes: int, limit_bytes: int) -> str:
    """Two sizes in the unit of the larger one.

    >>> size_pair(22441793126, 22 * 2**30), size_pair(300 * 2**20, 800 * 2**20)
    ('20.9 / 22.0 GiB', '300 / 800 MiB')
    """
    if max(used_bytes, limit_bytes) >= GIB:
        return f"{used_bytes / GIB:.1f} / {limit_bytes / GIB:.1f} GiB"
    return f"{used_bytes / 2**20:.0f} / {limit_bytes / 2**20:.0f} MiB"


def deviation(predicted_bytes: float, measured_bytes: float) -> str:
    """How far a prediction was off, in words.

    >>> deviation(104, 100), deviation(97, 100), deviation(1, 0)
    ('predicted 4.0% above measured', 'predicted 3.0% below measured', 'not measured')
    """
    if measured_bytes <= 0:
        return "not measured"
    share = predicted_bytes / measured_bytes - 1
    if abs(share) < 0.0005:
        return "predicted equals measured"
    return f"predicted {100 * abs(share):.1f}% {'above' if share > 0 else 'below'} measured"


def image_size_text(image_size: Sequence[int]) -> str:
    return "x".join(str(side) for side in image_size)


def interval_text(interval: Sequence[float] | None) -> str:
    """A metric's interval, to stand behind its value; nothing where there is none.

    >>> interval_text([0.8613, 0.902]), interval_text([-0.1, 0.2]), interval_text(None)
    (' (0.861-0.902)', ' (-0.100 to 0.200)', '')
    """
    if not interval:
        return ""
    low, high = interval
    return f" ({number(low)}{'-' if low >= 0 else ' to '}{number(high)})"


def metrics_text(metrics: Mapping[str, float], intervals: Mapping[str, Sequence[float]] | None = None) -> str:
    return "  ".join(f"{name} {number(value)}{interval_text((intervals or {}).get(name))}" for name, value in metrics.items())


def counts_text(counts: Mapping[str, int]) -> str:
    """Files by extension.

    >>> counts_text({".txt": 1, ".gif": 2})
    '2 .gif, 1 .txt'
    """
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def plan_text(plan: PlanChosen, dot: str) -> tuple[str, str]:
    """The plan's batch and its stages."""
    batch = f"micro {plan.micro_batch} x accum {plan.accumulation} = {plan.batch}"
    return batch, f" {dot} ".join(plan.stages) or "all stored"


def plan_peak_text(plan: PlanChosen) -> str:
    """The plan's peak against the budget, and what it costs."""
    peak = f"peak predicted {format_size(plan.predicted_peak_bytes)}"
    if plan.measured_peak_bytes is not None:
        peak += f", measured {format_size(plan.measured_peak_bytes)}"
    return f"{peak}, budget {format_size(plan.budget_bytes)}; recompute +{percent(plan.recompute_fraction)}"


def evaluated_text(event: Evaluated, train_loss: float | None) -> str:
    """One epoch's results; the deciding metric comes first and says so in words."""
    others = {name: value for name, value in event.metrics.items() if name != event.metric}
    parts = [f"{event.split} {event.metric} {number(event.value)}"]
    if event.split == "val":  # which decides; test is looked at once, by the best weights
        parts[0] += " (new best)" if event.is_best else f" (best {number(event.best_value)} @{event.best_epoch})"
    if train_loss is not None:
        parts.append(f"train loss {number(train_loss)}")
    parts.append(f"{event.split} loss {number(event.loss)}")
    if others:
        parts.append(metrics_text(others))
    return "  ".join(parts)


LADDER_COLUMNS = ("", "spacing", "micro", "predicted", "measured", "recompute", "img/s", "verdict")
_LADDER_RIGHT = (False, False, True, True, True, True, True, False)
_LADDER_DROP = (6, 5, 4, 3)  # first to go on a narrow terminal; marker, spacing, micro and verdict stay


def ladder_cells(row: LadderRow, glyphs: Glyphs) -> tuple[str, ...]:
    """One row of the ladder table, by LADDER_COLUMNS."""
    fits = row.micro_batch > 0
    return (
        glyphs.mark if row.verdict.startswith("chosen") else "",
        glyphs.clean(row.spacing),
        str(row.micro_batch) if fits else "none",
        format_size(row.predicted_peak_bytes) if row.predicted_peak_bytes else "-",
        format_size(row.measured_peak_bytes) if row.measured_peak_bytes is not None else "-",
        f"+{percent(row.recompute_fraction)}" if row.recompute_fraction else "0%",
        speed(row.images_per_second),
        glyphs.clean(row.verdict) or ("" if fits else "too large"),
    )


def ladder_table(rows: Sequence[LadderRow], glyphs: Glyphs, width: int | None = None) -> list[str]:
    """The ladder as aligned lines, header first; no line is wider than `width` columns."""
    table = [LADDER_COLUMNS, *(ladder_cells(row, glyphs) for row in rows)]
    spaces = {column: max(cell_width(cells[column]) for cells in table) for column in range(len(LADDER_COLUMNS))}
    if width is not None:
        spaces = _squeeze(spaces, width)
    lines = []
    for cells in table:
        parts = [pad(shorten(cells[column], space, glyphs.ellipsis), space, _LADDER_RIGHT[column]) for column, space in spaces.items()]
        line = "  ".join(parts).rstrip()
        lines.append(line if width is None else shorten(line, width, glyphs.ellipsis))
    return lines


def _squeeze(spaces: dict[int, int], width: int) -> dict[int, int]:
    """Column widths that fit: the two columns of words are cut to a bearable rest first, then columns of numbers go."""
    words = ((7, 24), (1, 20), (7, 16), (1, 12), (7, 8))  # column, down to

    def excess(given: dict[int, int]) -> int:
        return sum(given.values()) + 2 * (len(given) - 1) - width

    for column in _LADDER_DROP:
        if excess(spaces | {1: min(20, spaces[1]), 7: min(16, spaces[7])}) > 0:
            spaces = {key: space for key, space in spaces.items() if key != column}
    for column, least in words:
        spaces = spaces | {column: min(spaces[column], max(least, spaces[column] - max(0, excess(spaces))))}
    return spaces


def next_commands(run_dir: str, task: str) -> tuple[str, ...]:
    """What to type next, ready to be copied."""
    folder = shlex.quote(run_dir)
    export = () if task == "segment" else (f"hiresvis export {folder} --to onnx",)  # which refuses it
    predict = f"hiresvis predict {folder} IMAGE... --out predictions.csv"
    return (f"hiresvis evaluate {folder}", predict, *export, f"hiresvis report {folder}")


_REASONS = {"completed": "all epochs done", "early_stop": "stopped early: no better epoch came", "max_time": "the time allowed is used up"}


def final_lines(state: RunState, event: RunFinished) -> list[tuple[str, str]]:
    """The last screen as (label, text); the label is empty where the one above goes on."""
    reason = _REASONS.get(event.reason, event.reason)
    lines = [("done", f"{reason}; {event.epochs} epochs in {format_duration(event.seconds)}")]
    val, test = intervals_of(event, "val"), intervals_of(event, "test")
    best = f"{event.metric} {number(event.best_value, 4)}{interval_text(val.get(event.metric))} at epoch {event.best_epoch}"
    lines.append(("best", best if event.best_epoch else "no epoch was evaluated"))
    if event.test_metrics:
        lines.append(("test", metrics_text(event.test_metrics, test)))
    lines += [("peak" if i == 0 else "", text) for i, text in enumerate(peak_lines(state, event))]
    files = "no file" if not event.num_skipped else "1 file" if event.num_skipped == 1 else f"{event.num_skipped} files"
    lines.append(("skipped", f"{files}{' that could not be read: see train.log' if event.num_skipped else ''}"))
    if event.passed_over:
        lines.append(("", f"passed over by extension: {counts_text(event.passed_over)}"))
    return lines


def intervals_of(event: RunFinished | None, split: str) -> Mapping[str, Sequence[float]]:
    """The intervals of a split's metrics, by name, as far as they are known."""
    found = event.results.get(split, {}).get("intervals") if event else None
    ends = found.items() if isinstance(found, Mapping) else ()
    return {name: pair for name, pair in ends if is_of(pair, "tuple[int, int]")}


def peak_lines(state: RunState, event: RunFinished) -> list[str]:
    """Predicted against measured peak: of the process or card, then of counted storages where those were counted."""
    how = "resident size" if is_cpu(state) else "device allocator"
    rows = [(how, event.predicted_peak_bytes, event.measured_peak_bytes)]
    if event.counted_peak_bytes is not None and event.predicted_counted_bytes is not None:
        rows.append(("counted storages", event.predicted_counted_bytes, event.counted_peak_bytes))
    return [
        f"predicted {format_size(predicted)}, measured {format_size(measured) if measured > 0 else '-'}"
        f" ({name}): {deviation(predicted, measured)}"
        for name, predicted, measured in rows
    ]


def interrupted_lines(state: RunState, event: RunInterrupted) -> list[tuple[str, str]]:
    """The last screen of a run that was stopped; it says that the state was saved only where a snapshot of this very step came."""
    saved = state.snapshot is not None and (state.snapshot.epoch, state.snapshot.step) == (event.epoch, event.step)
    return [("stopped", f"{event.signal} at epoch {event.epoch}, step {event.step}{'; the state was saved' if saved else ''}")]


def is_cpu(state: RunState) -> bool:
    return state.started is None or state.started.device.lower().startswith("cpu")
