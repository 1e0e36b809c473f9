"""Augmentation by torchvision.transforms.v2, where albumentations cannot be imported; what it lacks for the presets is here.

v2 draws from torch's own generator and averages images in as many threads as torch has, so both are set for each call and put back:
the result depends on (image, seed) alone. Not for several threads of one process at once.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

if TYPE_CHECKING:
    from hiresvis.data.augment import Apply, Strength

NO_CLASS = 255  # as in masks.IGNORED


class QuarterTurns(v2.Transform):
    """One of the eight arrangements of a square by flips and quarter turns."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        del flat_inputs
        return {"turns": _whole(4), "flip": _whole(2) == 1}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        out = torch.rot90(inpt, params["turns"], (-2, -1))
        return tv_tensors.wrap(out.flip(-1) if params["flip"] else out, like=inpt)


class ReflectedAffine(v2.Transform):
    """Zoom of each axis, shift, turn and shear about the middle; what lies outside is the image reflected (v2's is a flat colour)."""

    def __init__(self, zoom: Sequence[float], shift: float, degrees: float, shear_degrees: float) -> None:
        super().__init__()
        self.zoom, self.shift, self.degrees, self.shear_degrees = zoom, shift, degrees, shear_degrees

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        del flat_inputs
        turn = math.radians(_uniform(-self.degrees, self.degrees))
        shear_x, shear_y = (math.tan(math.radians(_uniform(-self.shear_degrees, self.shear_degrees))) for _ in range(2))
        rotation = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
        zoom = np.diag([_uniform(*self.zoom) for _ in range(2)])
        shift = [_uniform(-self.shift, self.shift) for _ in range(2)]
        return {"matrix": rotation @ np.array([[1, shear_x], [shear_y, 1]]) @ zoom, "shift": shift}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        # Where each pixel comes from, in the sampler's coordinates: -1 and 1 are the middles of the outermost pixels.
        sides = np.array([inpt.shape[-1], inpt.shape[-2]], float)
        half = np.maximum(sides - 1, 1) / 2
        inverse = np.linalg.inv(params["matrix"])
        origin = -inverse @ (np.array(params["shift"]) * sides)
        theta = np.concatenate([inverse * half / half[:, None], (origin / half)[:, None]], axis=1)
        image = inpt.as_subclass(Tensor).to(torch.float32)[None]
        grid = functional.affine_grid(torch.from_numpy(theta).to(torch.float32)[None], list(image.shape), align_corners=True)
        mode = "nearest" if isinstance(inpt, tv_tensors.Mask) else "bilinear"
        moved = functional.grid_sample(image, grid, mode=mode, padding_mode="reflection", align_corners=True)[0]
        return _as_it_was(moved, inpt)


class BrightnessContrast(v2.Transform):
    """image * contrast + brightness, of any number of channels (v2's takes 1 or 3)."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        del flat_inputs
        return {"contrast": 1 + _uniform(-self.limit, self.limit), "brightness": _uniform(-self.limit, self.limit)}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        if isinstance(inpt, tv_tensors.Mask):
            return inpt
        values = inpt.as_subclass(Tensor).to(torch.float32) * params["contrast"]
        return _as_it_was(values + params["brightness"] * _white(inpt), inpt)


class Noise(v2.Transform):
    """Gaussian noise of a standard deviation between two shares of white (v2's has one deviation)."""

    def __init__(self, deviation: Sequence[float]) -> None:
        super().__init__()
        self.deviation = deviation

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        del flat_inputs
        return {"deviation": _uniform(*self.deviation)}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        if isinstance(inpt, tv_tensors.Mask):
            return inpt
        noise = torch.randn(inpt.shape) * (params["deviation"] * _white(inpt))
        return _as_it_was(inpt.as_subclass(Tensor) + noise, inpt)


_OWN: Mapping[str, Any] = {kind.__name__: kind for kind in (QuarterTurns, ReflectedAffine, BrightnessContrast, Noise)}


def transform_names() -> list[str]:
    """Every transform that a list may name: those of v2, containers aside."""
    kinds = ((name, getattr(v2, name)) for name in dir(v2))
    return [name for name, kind in kinds if _is_transform(kind) and not {"transforms", "lambd"} & _arguments(kind)]


def _is_transform(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, v2.Transform) and kind is not v2.Transform


def _arguments(kind: Any) -> set[str]:
    return set(inspect.signature(kind).parameters)


def build(step: Mapping[str, Any]) -> Any:
    """The transform of one step. `p` is taken by every one, whether v2 gives it this argument or not."""
    kind = _OWN.get(step["name"]) or getattr(v2, step["name"])
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in step.items() if key != "name"}
    if isinstance(values.get("interpolation"), str):
        values["interpolation"] = InterpolationMode(values["interpolation"])
    if "fill" in _arguments(kind):
        usual = inspect.signature(kind).parameters["fill"].default
        values["fill"] = {tv_tensors.Mask: NO_CLASS, "others": values.get("fill", usual)}
    share = values.pop("p", None) if "p" not in _arguments(kind) else None
    transform = kind(**values)
    return transform if share is None else v2.RandomApply([transform], p=share)


def compose(steps: Sequence[Mapping[str, Any]]) -> Apply:
    """All steps as one function of (h, w, c), of a mask (h, w) or None, and of a seed."""
    transforms = [build(step) for step in steps]

    def apply(array: np.ndarray, mask: np.ndarray | None, seed: int) -> tuple[np.ndarray, np.ndarray | None]:
        image: Any = tv_tensors.Image(torch.from_numpy(array.copy()).permute(2, 0, 1))
        moved: Any = None if mask is None else tv_tensors.Mask(torch.from_numpy(mask.copy())[None])
        with _drawing_from(seed):
            for transform in transforms:
                if moved is None:
                    image = transform(image)
                else:
                    image, moved = transform(image, moved)
        values = image.as_subclass(Tensor)
        if values.is_floating_point():
            values = values.clamp(0, 1)  # resampling by curves and sharpening overshoot
        out: np.ndarray = values.permute(1, 2, 0).numpy()
        return out, None if moved is None else moved.as_subclass(Tensor)[0].numpy()

    return apply


def preset(strength: Strength | None, *, square: bool, colour: bool) -> list[dict[str, Any]]:
    """The steps of a preset; None: flips and turns alone. Saturation and value are factors here, where albumentations adds."""
    steps: list[dict[str, Any]] = (
        [{"name": "QuarterTurns"}] if square else [{"name": "RandomHorizontalFlip", "p": 0.5}, {"name": "RandomVerticalFlip", "p": 0.5}]
    )
    if strength is None:
        return steps
    affine = {"zoom": strength.zoom, "shift": strength.shift, "degrees": strength.degrees, "shear_degrees": strength.shear_degrees}
    steps.append({"name": "ReflectedAffine", **affine, "p": strength.affine_p})
    steps.append({"name": "BrightnessContrast", "limit": strength.light, "p": 0.5})
    if strength.strong:
        if colour:
            steps.append({"name": "ColorJitter", "hue": 10 / 180, "saturation": 25 / 255, "brightness": 10 / 255, "p": 0.4})
        steps.append({"name": "GaussianBlur", "kernel_size": 7, "sigma": [0.3, 1.2], "p": 0.2})
        steps.append({"name": "Noise", "deviation": [0.01, 0.05], "p": 0.2})
    return steps


@contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    """torch's generator and number of threads inside, both as they were afterwards. Generators of GPUs are not touched."""
    generator, threads = torch.default_generator, torch.get_num_threads()
    state = generator.get_state()
    generator.manual_seed(seed)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        generator.set_state(state)


def _uniform(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), dtype=torch.float64))


def _whole(below: int) -> int:
    return int(torch.randint(below, ()))


def _white(image: Tensor) -> float:
    return 1.0 if image.is_floating_point() else 255.0


def _as_it_was(values: Tensor, image: Tensor) -> Any:
    """Float values as the image's own type, within its range."""
    values = values.clamp_(0, _white(image))
    return tv_tensors.wrap(values if image.is_floating_point() else values.round_().to(image.dtype), like=image)
