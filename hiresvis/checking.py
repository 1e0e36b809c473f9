"""`hiresvis check`: the recipe, the whole data set and the model looked at, every finding at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hiresvis import assemble
from hiresvis.data.contract import Contract
from hiresvis.errors import DataError, Problem, RecipeError
from hiresvis.recipe import LoadedRecipe, Resolution


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `hiresvis check` prints."""

    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    details: Mapping[str, Any]
    exit_code: int = DataError.exit_code  # where there are errors

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **self.details,
            "errors": [asdict(problem) for problem in self.errors],
            "warnings": [asdict(problem) for problem in self.warnings],
        }

    def lines(self) -> list[str]:
        """Text for a terminal: errors, warnings, then what was found per split."""
        lines = [f"error    {problem}" for problem in self.errors]
        lines += [f"warning  {problem}" for problem in self.warnings]
        for name, counts in self.details.get("splits", {}).items():
            lines.append(f"{name}: " + ", ".join(f"{key} {_short_counts(value)}" for key, value in counts.items() if value))
        return [*lines, f"{len(self.errors)} errors, {len(self.warnings)} warnings"]


def _short_counts(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}:{_short_counts(count)}" for key, count in value.items())
    return " to ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def check(loaded: LoadedRecipe, *, fast: bool = False) -> CheckReport:
    """Recipe, whole data set decoded once, model built: every finding at once."""
    resolution = Resolution(loaded)
    drawn = tuple(Problem(event.text) for event in assemble.draw_sample(loaded))
    try:
        datasets = assemble.read_datasets(loaded, resolution)
        channels, scale = assemble.settle_pixels(loaded, resolution, datasets)
    except DataError as error:
        return CheckReport(error.problems, (), {})
    contract: Contract | None = None
    refused: tuple[Problem, ...] = ()
    try:
        backbone = assemble.build_model(loaded, num_classes=len(datasets.classes), channels=channels)
        assemble.freeze_parts(loaded, resolution, backbone, norm="batch")
        contract = assemble.make_contract(loaded, datasets.classes, channels, scale, backbone)
        assemble.make_pipeline(loaded, contract)
    except RecipeError as error:
        refused = error.problems
    report = assemble.check_data(loaded, datasets, contract, fast=fast)
    details = {key: value for key, value in report.to_json().items() if key not in ("errors", "warnings")}
    code = RecipeError.exit_code if refused else DataError.exit_code
    return CheckReport((*refused, *report.errors), (*drawn, *report.warnings), details, code)
