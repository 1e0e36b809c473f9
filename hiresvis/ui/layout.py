"""The live view as lines of styled spans: a pure function of the state and the terminal's width. No rich here either.

A terminal of 100 columns or more: the whole picture. 60 to 99: three lines. Below 60: one. No line is ever wider than asked, which is one
column less than the terminal has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hiresvis.run.events import Evaluated
from hiresvis.ui.state import RunState
from hiresvis.ui.text import (
    Glyphs,
    cell_width,
    clock_time,
    image_size_text,
    is_cpu,
    ladder_table,
    memory_bar,
    number,
    percent,
    plan_text,
    progress_bar,
    seconds_text,
    shorten,
    size_pair,
    sparkline,
    speed,
)
from hiresvis.units import GIB, format_size

FULL_COLUMNS, SHORT_COLUMNS = 100, 60  # of the terminal
LABEL, VALUE, TITLE, MODEL = "dim", "", "bold", "bold"
TRAIN, VAL, GOOD, WARN, BAD, QUIET = "cyan", "magenta", "green", "yellow", "bold red", "dim"
TIGHT_SHARE = 0.97  # of the budget: from here on the memory bar warns

Span = tuple[str, str]
Line = list[Span]


@dataclass(frozen=True, slots=True)
class Item:
    """A piece of a line. The highest `drop` goes first when the line is too long; 0 stays."""

    spans: tuple[Span, ...]
    drop: int = 0

    @property
    def width(self) -> int:
        return sum(cell_width(text) for text, _ in self.spans)


def item(label: str, value: str, drop: int = 0, style: str = VALUE) -> Item:
    """A label and its value."""
    spans = ((f"{label} ", LABEL), (value, style)) if label else ((value, style),)
    return Item(spans, drop)


def join(items: Sequence[Item], width: int, glyphs: Glyphs, gap: int = 3) -> Line:
    """The items in one line of at most `width` columns."""
    kept = [one for one in items if one.width]
    while sum(one.width for one in kept) + gap * (len(kept) - 1) > width:
        droppable = max(kept, key=lambda one: one.drop, default=None)
        if droppable is None or droppable.drop == 0:
            break
        kept.remove(droppable)
    line: Line = []
    for one in kept:
        if line:
            line.append((" " * gap, ""))
        line.extend(one.spans)
    return crop(line, width, glyphs)


def crop(line: Line, width: int, glyphs: Glyphs) -> Line:
    """The line cut to `width` columns."""
    cut: Line = []
    for text, style in line:
        room = width - line_width(cut)
        if cell_width(text) > room:
            return [*cut, (shorten(text, room, glyphs.ellipsis), style)]
        cut.append((text, style))
    return cut


def line_width(line: Line) -> int:
    return sum(cell_width(text) for text, _ in line)


def line_text(line: Line) -> str:
    return "".join(text for text, _ in line)


def live_lines(state: RunState, width: int, now: float, glyphs: Glyphs, stop_signal: str = "") -> list[Line]:
    """The live area.

    Args:
        state: the run so far.
        width: columns to use: those of the terminal less one, since a full row wraps on some.
        now: seconds on the clock of the events' times.
        glyphs: what this terminal can draw.
        stop_signal: the one that has asked the run to stop, while it has not yet.

    Returns:
        Lines no wider than `width`; none before the run has begun.
    """
    if state.phase in ("finished", "interrupted") or (state.started is None and state.phase == "start"):
        return []
    lines = _running_lines(state, width, now, glyphs)
    if stop_signal:
        how = "the step is finished and saved first" if state.phase == "train" else "ends at the next safe point"
        again = "" if stop_signal == "SIGUSR1" else "; Ctrl-C again ends at once"  # after a mere warning the next signal asks, no more
        lines.append(crop([("stop  ", LABEL), (f"{stop_signal}: {how}{again}", WARN)], width, glyphs))
    return lines


def _running_lines(state: RunState, width: int, now: float, glyphs: Glyphs) -> list[Line]:
    if state.phase in ("start", "find"):
        return _finding_lines(state, width, glyphs)
    if width + 1 >= FULL_COLUMNS:
        lines = [
            [],  # a blank line between what lasts and what moves
            _header(state, width, glyphs, _epoch_text(state)),
            _progress_line(state, width, glyphs),
            _loss_line(state, width, glyphs),
            _memory_line(state, width, glyphs),
            _plan_line(state, width, glyphs),
            _data_line(state, width, now, glyphs),
        ]
        return lines[:1] + [line for line in lines[1:] if line]
    if width + 1 >= SHORT_COLUMNS:
        return [_short_progress(state, width, glyphs), _short_loss(state, width, glyphs), _short_memory(state, width, glyphs)]
    return [_one_line(state, width, glyphs)]


def _epoch_text(state: RunState) -> str:
    return f"epoch {state.epoch_number}/{state.num_epochs}" if state.num_epochs else f"epoch {state.epoch_number}"


def _header(state: RunState, width: int, glyphs: Glyphs, right: str) -> Line:
    items = [Item((("hiresvis fit", TITLE),), 3)]
    if state.started:
        model = f"{glyphs.clean(state.started.model)} {image_size_text(state.started.image_size)}"
        items += [Item(((model, MODEL),), 1), item("run", glyphs.clean(state.started.run_name), 2)]
    left = join(items, width - cell_width(right) - 2, glyphs, gap=2)
    return [*left, (" " * (width - line_width(left) - cell_width(right)), ""), (right, TITLE)]


def _finding_lines(state: RunState, width: int, glyphs: Glyphs) -> list[Line]:
    finding = state.phase == "find"
    if width + 1 < SHORT_COLUMNS:
        if not state.ladder:
            return [join([item("", "preparing")], width, glyphs)]
        row = state.ladder[-1]
        size = format_size(row.measured_peak_bytes or row.predicted_peak_bytes)
        items = [item("finding batch", f"micro {row.micro_batch}"), item("spacing", glyphs.clean(row.spacing), 1), item("", size, 2)]
        return [join(items, width, glyphs, gap=2)]
    lines = [_header(state, width, glyphs, "finding the batch" if finding else "preparing")]
    if finding and state.started:
        wanted = f", up to {state.started.batch}," if state.started.batch else ""
        goal = f"largest micro-batch{wanted} with a peak under {format_size(state.started.budget_bytes)}"
        lines.append(crop([("plan  ", LABEL), (goal, VALUE)], width, glyphs))
    return lines + (ladder_lines(state, width, glyphs) if finding else [])


def ladder_lines(state: RunState, width: int, glyphs: Glyphs) -> list[Line]:
    """The ladder table, its chosen row marked by a sign and by weight."""
    head, *rows = ladder_table(state.ladder, glyphs, width)
    lines: list[Line] = [[(head, LABEL)]]
    for text, row in zip(rows, state.ladder, strict=True):
        verdict = row.verdict.lower()
        refused = row.micro_batch == 0 or verdict.startswith(("too large", "out of memory"))
        lines.append([(text, "bold green" if verdict.startswith("chosen") else QUIET if refused else VALUE)])
    return lines


def _progress(state: RunState) -> tuple[str, int, int, str]:
    """Label, done, total and style of the running bar."""
    if state.evaluation:
        return "val", state.evaluation.step, state.evaluation.num_steps, VAL
    return "train", state.steps_done, state.num_steps, TRAIN


def _bar(done: int, total: int, width: int, style: str, glyphs: Glyphs) -> tuple[Span, Span]:
    filled, todo = progress_bar(done / total if total else 0.0, width, glyphs)
    return (filled, style), (todo, QUIET)


def _progress_line(state: RunState, width: int, glyphs: Glyphs) -> Line:
    label, done, total, style = _progress(state)
    count = f"{done}/{total}"
    tail = [item("", count)]
    if not state.evaluation:
        tail.append(Item((("epoch ", LABEL), (clock_time(state.epoch_seconds_left), VALUE), (" left", LABEL))))
    tail.append(Item((("run ", LABEL), (clock_time(state.run_seconds_left), VALUE), (" left", LABEL))))
    bar_width = min(48, max(8, width - 6 - 1 - sum(one.width + 3 for one in tail)))
    line: Line = [(f"{label:<6}", LABEL), *_bar(done, total, bar_width, style, glyphs), (" ", "")]
    return crop(line + join(tail, width, glyphs), width, glyphs)


def _val_item(val: Evaluated, drop: int, glyphs: Glyphs) -> Item:
    text = f"{number(val.value)} (best {number(val.best_value)} @{val.best_epoch})"
    return item(f"val {glyphs.clean(val.metric)}", text, drop, GOOD if val.is_best else VALUE)


def _loss_item(state: RunState, glyphs: Glyphs, curve: int, label: str = "loss ") -> Item:
    spark = sparkline(state.smooth_losses.values, curve, glyphs)
    return Item(((label, LABEL), (number(state.smooth_loss), VALUE), (f" {spark}" if spark else "", TRAIN)))


def _loss_line(state: RunState, width: int, glyphs: Glyphs) -> Line:
    items = [_loss_item(state, glyphs, 16, "loss  ")]
    if state.step:
        items += [item("lr", f"{state.step.lr:.1e}", 1), item("grad", f"{state.step.grad_norm:.2g}", 2)]
    if state.val:
        items.append(_val_item(state.val, 0, glyphs))
        items.append(item("val loss", number(state.val.loss), 3))
    return join(items, width, glyphs)


def _memory_style(used: int, limit: int) -> tuple[str, str]:
    """Colour, and the word that says the same."""
    share = used / limit if limit else 0.0
    return (BAD, "over budget") if share > 1 else (WARN, "tight") if share >= TIGHT_SHARE else (GOOD, "")


def _memory_line(state: RunState, width: int, glyphs: Glyphs) -> Line:
    plan, started = state.plan, state.started
    budget = plan.budget_bytes if plan else started.budget_bytes if started else 0
    if not budget:
        return []
    used = state.memory_bytes
    style, word = _memory_style(used, budget)
    line: Line = [("mem   ", LABEL), (memory_bar(used / budget, 24, glyphs), style), (" ", "")]
    items = [item("", f"{size_pair(used, budget)} budget")]
    if word:
        items.append(item("", word, 0, style))
    unit, digits = (GIB, 1) if budget >= GIB else (2**20, 0)
    if started and started.capacity_bytes:
        place = "machine" if is_cpu(state) else "card"
        items.append(item("", f"({place} {started.capacity_bytes / unit:.{digits}f})", 2, QUIET))
    if plan:
        items.append(item("predicted peak", format_size(plan.predicted_peak_bytes), 1))
    if started and started.others_bytes:
        items.append(item("others", f"{started.others_bytes / unit:.{digits}f}", 3))
    return crop(line + join(items, width - line_width(line), glyphs), width, glyphs)


def _plan_line(state: RunState, width: int, glyphs: Glyphs) -> Line:
    if state.plan is None:
        return []
    batch, stages = plan_text(state.plan, glyphs.dot)
    precision = glyphs.clean(state.plan.precision)
    # The stages are the only part without a bound: they give way before the precision does.
    room = max(12, width - 6 - cell_width(batch) - 6 - cell_width(precision))
    stages = shorten(glyphs.clean(stages), room, glyphs.ellipsis)
    return join([Item((("plan  ", LABEL), (batch, VALUE))), item("", stages), item("", precision, 1)], width, glyphs)


def _counts(state: RunState, drop: int) -> list[Item]:
    if state.step is None:
        return []
    skipped, non_finite = state.step.num_skipped, state.step.num_non_finite
    return [
        item("skipped", str(skipped), 0 if skipped else drop, WARN if skipped else VALUE),
        item("non-finite", str(non_finite), 0 if non_finite else drop + 1, BAD if non_finite else VALUE),
    ]


def _data_line(state: RunState, width: int, now: float, glyphs: Glyphs) -> Line:
    items = [
        Item((("data  ", LABEL), ("wait ", LABEL), (percent(state.data_wait_share), VALUE))),
        Item(((speed(state.images_per_second), VALUE), (" img/s", LABEL))),
        item("step", seconds_text(state.step_seconds), 1),
        *_counts(state, 3),
    ]
    if state.snapshot:
        age = max(0.0, now - state.snapshot.time)
        items.append(item("snapshot", f"{_age(age)} ago", 2))
    return join(items, width, glyphs)


def _age(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds < 90 else f"{seconds / 60:.0f}min" if seconds < 5400 else f"{seconds / 3600:.1f}h"


def _short_progress(state: RunState, width: int, glyphs: Glyphs) -> Line:
    label, done, total, style = _progress(state)
    tail = [
        item("", f"{done}/{total}"),
        item("", "" if state.evaluation else clock_time(state.epoch_seconds_left), 2),
        item("run", clock_time(state.run_seconds_left), 1),
    ]
    head = f"{_epoch_text(state)} {label} "
    room = width - len(head) - 1 - sum(one.width + 2 for one in tail)
    line: Line = [(head, TITLE), *_bar(done, total, min(30, max(6, room)), style, glyphs), (" ", "")]
    return crop(line + join(tail, width - line_width(line), glyphs, gap=2), width, glyphs)


def _short_loss(state: RunState, width: int, glyphs: Glyphs) -> Line:
    items = [_loss_item(state, glyphs, 8)]
    if state.val:
        items.append(_val_item(state.val, 0, glyphs))
    if state.step:
        items.append(item("lr", f"{state.step.lr:.1e}", 1))
    return join(items, width, glyphs, gap=2)


def _short_memory(state: RunState, width: int, glyphs: Glyphs) -> Line:
    budget = state.plan.budget_bytes if state.plan else state.started.budget_bytes if state.started else 0
    style, word = _memory_style(state.memory_bytes, budget)
    bar = memory_bar(state.memory_bytes / budget, 10, glyphs) if budget else ""
    items = [Item((("mem ", LABEL), (bar, style), (f" {size_pair(state.memory_bytes, budget)}", VALUE)))]
    if word:
        items.append(item("", word, 0, style))
    items.append(Item(((speed(state.images_per_second), VALUE), (" img/s", LABEL)), 1))
    items.append(item("wait", percent(state.data_wait_share), 2))
    return join([*items, *_counts(state, 3)], width, glyphs, gap=2)


def _one_line(state: RunState, width: int, glyphs: Glyphs) -> Line:
    label, done, total, style = _progress(state)
    items = [
        item("", f"{state.epoch_number}/{state.num_epochs or '?'}", 0, TITLE),
        Item(((f"{label} {done}/{total}", style),)),
        item("loss", number(state.smooth_loss), 1),
    ]
    if state.val:
        items.append(item(glyphs.clean(state.val.metric), number(state.val.best_value), 3))
    items.append(item("run", clock_time(state.run_seconds_left), 2))
    return join(items, width, glyphs, gap=2)
