"""Outputs of a trained network together with what its classifier is given: features by which images can be told to be unlike others.

The features come out of the same forward, by a hook on the classifier, so nothing runs twice and no family of models needs code of its
own. Where memory runs out the batch is run in halves, and from then on in parts of that size: outputs of a network in evaluation do not
depend on what stands beside an image, but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hiresvis.device import capacity, is_out_of_memory, release
from hiresvis.errors import DoesNotFit, first_line
from hiresvis.train.step import TrainStep
from hiresvis.units import format_size


class Forward:
    """Outputs and pooled features of batches, on the CPU.

    Args:
        step: its model (in evaluation mode, which is the caller's matter) and precision are used.
        flips: as in `TrainStep.predict_with_flips`; features are those of the image as it is.
        most: images of one forward.
        say: told when memory ran out.

    Attributes:
        most: images of one forward, after what memory has shown.
    """

    def __init__(self, step: TrainStep, *, flips: bool = False, most: int, say: Callable[[str], None] = lambda _: None) -> None:
        assert most >= 1, most
        self.most = most
        self._step, self._say = step, say
        self._outputs_of = step.predict_with_flips if flips else step.predict
        self._features: Tensor | None = None
        classifier = classifier_of(step.model)
        self._hook = None if classifier is None else classifier.register_forward_pre_hook(self._keep)

    def __enter__(self) -> Forward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes the hook off the model."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(outputs as `TrainStep.predict` gives them, features (b, d) float32); d is 0 where the model has no classifier to ask.

        Raises:
            DoesNotFit: memory ran out for one image.
        """
        outputs, features, start = list[Tensor](), list[Tensor](), 0
        while start < len(images):
            part = images[start : start + self.most]
            try:
                outputs.append(self._outputs_of(part).cpu())
                features.append(self._taken(len(part)))
                start += len(part)
                continue
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error, self._step.device):
                    raise
                what = first_line(error)
            self._make_room(len(part), what)  # out here, where the error with its traceback is gone
        return torch.cat(outputs), torch.cat(features)

    def _make_room(self, images: int, what: str) -> None:
        self._features = None
        release()
        if images == 1:
            raise no_room_for_one(self._step.device, what)
        self.most = images // 2
        self._say(f"memory ran out ({what}); from here on {self.most} images at once")

    def _keep(self, classifier: nn.Module, given: tuple[Any, ...]) -> None:
        del classifier
        self._features = pooled(given[0])  # with flips, the image as it is comes last

    def _taken(self, images: int) -> Tensor:
        found, self._features = self._features, None
        return torch.empty(images, 0) if found is None else found.float().cpu()


def no_room_for_one(device: torch.device, what: str) -> DoesNotFit:
    """The error where memory ran out for a single image, which nothing smaller can stand for.

    Args:
        what: the system's own words.
    """
    total, others = capacity(device)
    text = f"A single image ran out of memory ({what}); of {format_size(total)} others use {format_size(others)}. Free some and start again"
    return DoesNotFit(text, need_bytes=total - others, budget_bytes=total - others, largest_part=("one image", total - others))


def classifier_of(model: Any) -> nn.Module | None:
    """The layer that makes outputs of features; of several (a distilled transformer) the first. A segmenter's is its decoder."""
    found = model.get_classifier() if hasattr(model, "get_classifier") else None
    if isinstance(found, tuple | list):
        found = found[0]
    return found if isinstance(found, nn.Module) else None


def num_features(model: Any) -> int | None:
    """How many `Forward` gives: the inputs of the classifier's first layer. None: no layer tells it."""
    classifier = classifier_of(model)
    if classifier is None:
        return 0
    layers = (getattr(layer, "in_features", getattr(layer, "in_channels", None)) for layer in classifier.modules())
    return next((width for width in layers if isinstance(width, int)), None)


@torch.no_grad()
def pooled(given: Any) -> Tensor:
    """(b, d) of what a classifier is given: the mean over places, or of several maps that of the coarsest, which comes first."""
    values: Tensor = given[0] if isinstance(given, tuple | list) else given
    if values.dim() == 4:
        return values.mean(dim=(2, 3))
    return values.mean(dim=1) if values.dim() == 3 else values
