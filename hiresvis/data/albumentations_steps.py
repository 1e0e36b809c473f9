"""Augmentation by albumentations. Only `augment` imports this module, and only when it is used: importing it takes the library's time."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # it asks the network for a newer release on import otherwise

import albumentations
import cv2
import numpy as np

if TYPE_CHECKING:
    from hiresvis.data.augment import Apply, Strength

NO_CLASS = 255  # as in masks.IGNORED


def transform_names() -> list[str]:
    """Every transform that a list may name."""
    kinds = ((name, getattr(albumentations, name)) for name in dir(albumentations))
    return [
        name
        for name, kind in kinds
        if inspect.isclass(kind) and issubclass(kind, albumentations.BasicTransform) and not inspect.isabstract(kind)
    ]


def build(step: Mapping[str, Any]) -> Any:
    """The transform of one step. Those that resize average areas where they shrink, which is not their default."""
    kind = getattr(albumentations, step["name"])
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in step.items() if key != "name"}
    if "area_for_downscale" in inspect.signature(kind).parameters:
        values.setdefault("area_for_downscale", "image")
    if {"fill_mask", "border_mode"} <= set(inspect.signature(kind).parameters):
        values.setdefault("fill_mask", NO_CLASS)  # of what comes from outside of the image
    return kind(**values)


def compose(steps: Sequence[Mapping[str, Any]]) -> Apply:
    """All steps as one function of (h, w, c), of a mask (h, w) or None, and of a seed."""
    transforms = [build(step) for step in steps]
    composed = albumentations.Compose(transforms)

    def apply(array: np.ndarray, mask: np.ndarray | None, seed: int) -> tuple[np.ndarray, np.ndarray | None]:
        # Each its own: Compose gives all the same seed, so that of two flips either both or none would happen.
        for transform, own in zip(transforms, np.random.SeedSequence(seed).generate_state(len(transforms), np.uint64), strict=True):
            transform.set_random_seed(int(own))
        if mask is None:
            return composed(image=array)["image"], None
        out = composed(image=array, mask=mask)
        return out["image"], out["mask"]

    return apply


def preset(strength: Strength | None, *, square: bool, colour: bool) -> list[dict[str, Any]]:
    """The steps of a preset; None: flips and turns alone."""
    steps: list[dict[str, Any]] = (
        [{"name": "D4", "p": 1.0}] if square else [{"name": "HorizontalFlip", "p": 0.5}, {"name": "VerticalFlip", "p": 0.5}]
    )
    if strength is None:
        return steps
    steps.append(
        {
            "name": "Affine",
            "scale": list(strength.zoom),
            "translate_percent": [-strength.shift, strength.shift],
            "rotate": [-strength.degrees, strength.degrees],
            "shear": [-strength.shear_degrees, strength.shear_degrees],
            "border_mode": cv2.BORDER_REFLECT_101,
            "p": strength.affine_p,
        }
    )
    steps.append({"name": "RandomBrightnessContrast", "brightness_limit": strength.light, "contrast_limit": strength.light, "p": 0.5})
    if strength.strong:
        if colour:
            steps.append({"name": "HueSaturationValue", "hue_shift_limit": 10, "sat_shift_limit": 25, "val_shift_limit": 10, "p": 0.4})
        steps.append({"name": "GaussianBlur", "blur_limit": 0, "sigma_limit": [0.3, 1.2], "p": 0.2})
        steps.append({"name": "GaussNoise", "std_range": [0.01, 0.05], "p": 0.2})
    return steps
