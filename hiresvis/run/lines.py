"""Events as lines for train.log: what a person wants to find there weeks later."""

from __future__ import annotations

from collections.abc import Mapping

from hiresvis.run.events import (
    AutoResolved,
    EpochDone,
    EpochStarted,
    Evaluated,
    Event,
    LadderRow,
    Notice,
    PlanChosen,
    RunFinished,
    RunInterrupted,
    RunStarted,
)
from hiresvis.units import format_duration, format_size


def describe(event: Event) -> str:
    """The event in words; empty for those that are too many for a log (steps, snapshots).

    >>> describe(Notice(level="warning", text="skipped a.jpg: truncated"))
    'warning: skipped a.jpg: truncated'
    """
    match event:
        case RunStarted():
            again = f", resumed after epoch {event.resumed_from_epoch}" if event.resumed_from_epoch is not None else ""
            height, width = event.image_size
            return (
                f"run {event.run_name}: {event.model} at {width}x{height} px, {event.num_train} training and {event.num_val} validation "
                f"images, {event.outputs}, {event.epochs} epochs, batch {event.batch or 'auto'}, on {event.device}, "
                f"budget {format_size(event.budget_bytes)}{again}"
            )
        case AutoResolved():
            return f"{event.key} = {event.value}: {event.reason}"
        case Notice():
            return f"{event.level}: {event.text}"
        case LadderRow():
            measured = f", measured {format_size(event.measured_peak_bytes)}" if event.measured_peak_bytes is not None else ""
            return (
                f"ladder {event.rung}: spacing {event.spacing}, micro-batch {event.micro_batch}, "
                f"predicted {format_size(event.predicted_peak_bytes)}{measured}, recompute {event.recompute_fraction:.0%}  {event.verdict}"
            )
        case PlanChosen():
            return (
                f"plan: micro-batch {event.micro_batch} x {event.accumulation} = {event.batch}, {event.precision}, "
                f"{', '.join(event.stages)}; peak {format_size(event.predicted_peak_bytes)} predicted of "
                f"{format_size(event.budget_bytes)}: {event.why}"
            )
        case EpochStarted():
            return f"epoch {event.epoch}: {event.num_steps} steps" + (f", from step {event.first_step}" if event.first_step > 1 else "")
        case Evaluated():
            best = " (best)" if event.is_best else f" (best {_number(event.best_value)} at epoch {event.best_epoch})"
            return f"epoch {event.epoch}: {event.split} loss {event.loss:.4f}, {_numbers(event.metrics)}; {event.metric} decides{best}"
        case EpochDone():
            return (
                f"epoch {event.epoch}: training loss {event.train_loss:.4f}, lr {event.lr:.3g}, "
                f"{format_duration(event.seconds)}, {event.images_per_second:.2f} images/s"
            )
        case RunFinished():
            test = f"; test {_numbers(event.test_metrics)}" if event.test_metrics else ""
            return (
                f"finished ({event.reason}) after {event.epochs} epochs, {format_duration(event.seconds)}: "
                f"best {event.metric} {_number(event.best_value)} at epoch {event.best_epoch}{test}; peak "
                f"{format_size(event.predicted_peak_bytes)} predicted, {format_size(event.measured_peak_bytes)} measured"
            )
        case RunInterrupted():
            return f"interrupted ({event.signal}) in epoch {event.epoch}, step {event.step}; go on with: {event.resume_command}"
    return ""


def _numbers(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in metrics.items())


def _number(value: float) -> str:
    """Four decimals; an error in the units of a small target keeps its digits.

    >>> _number(0.97312), _number(0.0000213)
    ('0.9731', '2.13e-05')
    """
    return f"{value:.2e}" if 0 < abs(value) < 5e-4 else f"{value:.4f}"
