"""`hiresvis check`: the recipe, the whole data set and the model looked at, every finding at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hiresvis import assemble
from hiresvis.errors import DataError, Problem, RecipeError
from hiresvis.recipe import LoadedRecipe, Resolution


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `hiresvis check` prints."""

    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    details: Mapping[str, Any]

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
    for _ in assemble.draw_sample(loaded):
        pass
    errors: list[Problem] = []
    try:
        datasets = assemble.read_datasets(loaded, resolution)
        channels, scale = assemble.settle_pixels(loaded, resolution, datasets)
    except DataError as error:
        return CheckReport(error.problems, (), {})
    try:
        backbone = assemble.build_model(loaded, num_classes=len(datasets.classes), channels=channels)
        assemble.freeze_parts(loaded, resolution, backbone, torch.device("cpu"), norm="batch")
    except RecipeError as error:
        errors.extend(error.problems)
        backbone = None
    if backbone is None:
        return CheckReport(tuple(errors), datasets.findings, {})
    contract = assemble.make_contract(loaded, datasets.classes, channels, scale, backbone)
    report = assemble.check_data(loaded, datasets, contract, fast=fast)
    details = {key: value for key, value in report.to_json().items() if key not in ("errors", "warnings")}
    return CheckReport((*errors, *report.errors), report.warnings, details)
