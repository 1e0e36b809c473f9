"""Augmentation for training, at the model's size: presets and lists of steps, applied by albumentations or by torchvision.

albumentations (2.0.8, the last release under MIT) is the default, and no longer maintained: where it cannot be imported, presets of the
same ranges come from torchvision.transforms.v2, and lists name its transforms. The two give other bits of the same seed, so a run is
bound to the one that it was begun with (`Augment.made_by`). Either is a pure function of (image, seed), in whatever process.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from typing import Any, Literal, Protocol, cast

import numpy as np

from hiresvis.errors import Problem, RecipeError

AUGMENTS = ("none", "light", "standard", "heavy")
Library = Literal["albumentations", "torchvision"]
_EXAMPLES: Mapping[Library, str] = {
    "albumentations": "{name: HorizontalFlip, p: 0.5}",
    "torchvision": "{name: RandomHorizontalFlip, p: 0.5}",
}


@dataclass(frozen=True, slots=True)
class Strength:
    """The ranges of a preset beyond flips and turns, whichever library draws from them.

    Attributes:
        affine_p: how often the image is moved, turned and sheared.
        zoom: smallest and largest factor, of each axis on its own.
        shift: largest move as a share of the side.
        degrees: largest turn. shear_degrees: likewise.
        light: largest change of brightness and of contrast, as a share; half of all images get one.
        strong: colour, blur and noise as well.
    """

    affine_p: float
    zoom: tuple[float, float]
    shift: float
    degrees: float
    shear_degrees: float
    light: float
    strong: bool


STRENGTHS = {
    "standard": Strength(0.3, (0.95, 1.05), 0.02, 5, 0, 0.15, False),
    "heavy": Strength(0.6, (0.8, 1.2), 0.06, 20, 5, 0.3, True),
}


Apply = Callable[[np.ndarray, np.ndarray | None, int], tuple[np.ndarray, np.ndarray | None]]


class _Backend(Protocol):
    """What the module of a library provides."""

    def transform_names(self) -> list[str]:
        """Every transform that a list may name."""

    def build(self, step: Mapping[str, Any]) -> Any:
        """The transform of one step; raises whatever the library raises on a wrong argument."""

    def compose(self, steps: Sequence[Mapping[str, Any]]) -> Apply:
        """All steps as one function of (h, w, c), of a mask (h, w) uint8 or None, and of a seed: both, moved alike."""

    def preset(self, strength: Strength | None, *, square: bool, colour: bool) -> list[dict[str, Any]]:
        """The steps of a preset; None: flips and turns alone."""


class Augment:
    """Steps behind one call. Holds plain values, so it travels to worker processes; the transforms are built where they run."""

    def __init__(self, steps: Sequence[Mapping[str, Any]], library: Library = "albumentations") -> None:
        self.steps = tuple(dict(step) for step in steps)
        self.library = library
        self._apply: Apply | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"steps": self.steps, "library": self.library, "_apply": None}

    @property
    def made_by(self) -> str:
        """The library with its release: `albumentations 2.0.8`."""
        return f"{self.library} {metadata.version(self.library)}"

    def __call__(self, array: np.ndarray, seed: int) -> np.ndarray:
        """(h, w, c) uint8, or float32 in 0 to 1, to the same shape and type."""
        return self._applied(array, None, seed)[0]

    def with_mask(self, array: np.ndarray, mask: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """The image as by a call, and its mask (h, w) uint8 moved alike: by the nearest pixel, and what comes from outside is no class."""
        image, moved = self._applied(array, mask, seed)
        assert moved is not None
        return image, np.ascontiguousarray(moved.reshape(moved.shape[:2]))

    def _applied(self, array: np.ndarray, mask: np.ndarray | None, seed: int) -> tuple[np.ndarray, np.ndarray | None]:
        if self._apply is None:
            self._apply = _backend(self.library).compose(self.steps)
        out, moved = self._apply(array, mask, seed)
        return np.ascontiguousarray(out.reshape(*out.shape[:2], -1)), moved


@cache
def usable_library() -> tuple[Library, str]:
    """The library that augments in this process, and, where it is the second choice, why."""
    try:
        _backend("albumentations").transform_names()
    except Exception as error:  # what is missing raises ImportError; what is installed in part, anything
        return "torchvision", f"albumentations cannot be imported ({type(error).__name__}: {error})"
    return "albumentations", ""


def _backend(library: Library) -> _Backend:
    return cast(_Backend, import_module(f"hiresvis.data.{library}_steps"))


def make_augment(augment: str | Sequence[Mapping[str, Any]], *, image_size: tuple[int, int], in_chans: int = 3) -> Augment | None:
    """The augmentation of a recipe, tried once on an empty image so that mistakes show before training.

    Args:
        augment: "none" | "light" (flips and quarter turns: pixels move, none changes) | "standard" (and a mild affine map, brightness and
            contrast) | "heavy" (stronger, and colour, blur, noise), or a list of what the library has: `{name: HorizontalFlip, p: 0.5}`.
        image_size: (height, width); quarter turns need a square, rectangles get half turns.
        in_chans: colour changes need three channels.

    Raises:
        RecipeError: an unknown name, a wrong argument, or a transform that changes the image's shape or type.
    """
    if augment == "none" or not augment:
        return None
    library, _ = usable_library()  # imported before the loader forks: once, instead of in every worker
    if isinstance(augment, str):
        assert augment in AUGMENTS, augment
        square, colour = image_size[0] == image_size[1], in_chans == 3
        return Augment(_backend(library).preset(STRENGTHS.get(augment), square=square, colour=colour), library)
    steps = [dict(step) if isinstance(step, Mapping) else step for step in augment]
    problems = [problem for position, step in enumerate(steps) for problem in _check_step(step, position)]
    if problems:
        raise RecipeError(problems)
    _try_steps(steps, image_size, in_chans)
    return Augment(steps, library)


def _check_step(step: Any, position: int) -> list[Problem]:
    key = f"data.augment[{position}]"
    library, why = usable_library()
    backend = _backend(library)
    if not isinstance(step, Mapping) or not isinstance(step.get("name"), str):
        return [Problem(f"{step!r} has no name; write {_EXAMPLES[library]}", key=key)]
    name, names = step["name"], backend.transform_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        instead = f". It stands in here, since {why}" if why else ""
        return [Problem(f"{library} has no transform {name}{hint}{instead}", key=key)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # albumentations warns of an unknown argument and goes on without it
            backend.build(step)
    except Exception as error:  # each transform checks its arguments in its own way; all of it is about this step
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return [Problem(f"{name}: {'; '.join(lines[:4]) or type(error).__name__}", key=key)]
    return []


def _try_steps(steps: Sequence[Mapping[str, Any]], image_size: tuple[int, int], in_chans: int) -> None:
    """Each step alone, always applied, on images of both types at the true size (a crop may be one that gives this size)."""
    shape = (*image_size, in_chans)
    problems = []
    for position, step in enumerate(steps):
        one = Augment([{**step, "p": 1.0}], usable_library()[0])
        for dtype in (np.uint8, np.float32):
            image = np.full(shape, 100 if dtype == np.uint8 else 0.4, dtype)
            try:
                out = one(image, 0)
            except Exception as error:  # a transform that cannot take such an image says so in its own way
                problems.append(Problem(f"{step['name']} fails on a {shape} {image.dtype} image: {error}", key=f"data.augment[{position}]"))
                break
            if out.shape != shape or out.dtype != dtype:
                problems.append(
                    Problem(
                        f"{step['name']} turns {shape} {image.dtype} into {out.shape} {out.dtype}; "
                        "a step keeps the size and type (model.image_size sets the size)",
                        key=f"data.augment[{position}]",
                    )
                )
                break
    if problems:
        raise RecipeError(problems)
