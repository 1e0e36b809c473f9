"""Every error that hiresvis raises on purpose, and the exit code each one ends the command with.

    HiresvisError                 1  a fault of ours
    ├── RecipeError               2  the recipe, or an override of it
    ├── DataError                 3  the user's files
    ├── DoesNotFit                4  no plan fits the budget
    ├── TrainingFailed            5  the numbers went wrong
    ├── EnvironmentFailed         6  disk, hub, driver, a missing extra
    │   ├── HubUnreachable
    │   ├── MissingExtra
    │   └── RunFolderError
    └── Interrupted             130  SIGINT (143: SIGTERM), after the state was saved

A message states the place, the value against the constraint, and the remedy. No other module defines exceptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class HiresvisError(Exception):
    """Root of the tree."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding at one place: `recipe.yaml:14:3  optim.lr  -1 is below 0; give a positive number`."""

    message: str
    place: str = ""
    key: str = ""

    def __str__(self) -> str:
        return "  ".join(part for part in (self.place, self.key, self.message) if part)


def _aligned(problems: Sequence[Problem]) -> list[str]:
    """One line a problem; where they name keys, places and keys stand in columns."""
    if not any(problem.key for problem in problems):
        return [str(problem) for problem in problems]
    place = max(len(problem.place) for problem in problems)
    key = max(len(problem.key) for problem in problems)
    return [f"{problem.place:{place}}   {problem.key:{key}}  {problem.message}".lstrip() for problem in problems]


class _WithProblems(HiresvisError):
    """An error that carries every finding at once."""

    def __init__(self, problems: Sequence[Problem] | str) -> None:
        found = (Problem(problems),) if isinstance(problems, str) else tuple(problems)
        assert found, "an error without a finding"
        self.problems: tuple[Problem, ...] = found
        super().__init__("\n".join(_aligned(found)))


class RecipeError(_WithProblems):
    """The recipe cannot be used; holds all problems found, in file order."""

    exit_code = 2


class DataError(_WithProblems):
    """The data cannot be used; holds all problems found."""

    exit_code = 3

    @property
    def reason(self) -> str:
        """What is wrong, without the places: for a row that names its file itself."""
        return "; ".join(problem.message for problem in self.problems)


class DoesNotFit(HiresvisError):
    """No allowed plan fits the budget. The numbers are attributes as well as text."""

    exit_code = 4

    def __init__(
        self,
        message: str,
        *,
        need_bytes: int,
        budget_bytes: int,
        largest_part: tuple[str, int],
        remedies: Sequence[str] = (),
    ) -> None:
        self.need_bytes = need_bytes
        self.budget_bytes = budget_bytes
        self.largest_part = largest_part
        self.remedies = tuple(remedies)
        super().__init__(message)


class TrainingFailed(HiresvisError):
    """Training cannot go on: non-finite numbers, several steps in a row."""

    exit_code = 5


class EnvironmentFailed(HiresvisError):
    """The machine lacks something: disk space, a writable folder, a driver."""

    exit_code = 6


class HubUnreachable(EnvironmentFailed):
    """Pretrained weights could not be fetched; the message names the ways on."""


class MissingExtra(EnvironmentFailed):
    """An optional package is needed; the message gives the install command."""


class RunFolderError(EnvironmentFailed):
    """The run folder exists already, cannot be written, or is not a run folder."""


class Interrupted(HiresvisError):
    """The user stopped the run (SIGINT 130, SIGTERM 143); the state was saved first."""

    def __init__(self, message: str, *, exit_code: int = 130) -> None:
        self.exit_code = exit_code
        super().__init__(message)


def first_line(error: BaseException) -> str:
    """What a library said, short: its first line, or the kind of error where it said nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
