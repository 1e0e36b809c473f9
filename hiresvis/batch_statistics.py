"""What a plan's micro-batches mean for layers that take statistics of them: too few images are told of, a lone one may be refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hiresvis import assemble
from hiresvis.costing import Parts
from hiresvis.data.loader import batch_sizes, part_sizes
from hiresvis.errors import DoesNotFit
from hiresvis.memory.plan import CheckpointPlan
from hiresvis.recipe import LoadedRecipe
from hiresvis.run.events import Notice
from hiresvis.settle import SMALL_MICRO_BATCH
from hiresvis.train.freezing import needs_two_images

_WITH_STATISTICS = 2  # images that a micro-batch should have at least where batch statistics are taken of it


def takes_batch_statistics(parts: Parts) -> bool:
    """Whether training takes statistics of its micro-batches."""
    return parts.trainable.norm == "batch" and assemble.has_batch_norm(parts.trainable.model)


def least_images(parts: Parts) -> int:
    """Images that a micro-batch should have at least, where batches can be split so."""
    return _WITH_STATISTICS if takes_batch_statistics(parts) else 1


def lone_image_check(loaded: LoadedRecipe, parts: Parts) -> Callable[[CheckpointPlan], None]:
    """What to hold plans against, where a micro-batch of one image cannot be trained on. Puts the model into train mode.

    The smallest image that is trained on decides: its maps are the first to be a single pixel.
    """
    if takes_batch_statistics(parts):
        parts.trainable.train_mode()
        smallest = (loaded.recipe.train.resize or ((0.0, parts.contract.image_size),))[0][1]
        if needs_two_images(parts.trainable.model, smallest, parts.contract.channels):
            return lambda plan: _refuse_lone_images(parts, plan, smallest)
    return lambda plan: None


def _refuse_lone_images(parts: Parts, plan: CheckpointPlan, size: tuple[int, int]) -> None:
    """A plan under which an image would stand alone in a micro-batch.

    Raises:
        DoesNotFit: there is such an image.
    """
    images = len(parts.datasets.train)
    if min(min(part_sizes(size, plan.micro_batch)) for size in batch_sizes(images, plan.batch, _WITH_STATISTICS)) > 1:
        return
    height, width = size
    raise DoesNotFit(
        f"{plan.model} at {height}x{width} px takes batch statistics of a map of a single pixel, which it cannot of one image at a "
        f"time; {images} images in batches of {plan.batch} and micro-batches of at most {plan.micro_batch} leave one alone. "
        "Ways out: model.norm frozen (the statistics of the weights are kept); a micro-batch of 3 or more (memory.budget, "
        "memory.micro_batch, train.batch).",
        need_bytes=plan.predicted_peak_bytes,
        budget_bytes=plan.budget_bytes,
        largest_part=plan.largest_part,
    )


def small_batch_notices(loaded: LoadedRecipe, parts: Parts, plan: CheckpointPlan) -> Iterator[Notice]:
    """Batch statistics of few images: the user decides, and is told what would make them more."""
    if plan.micro_batch < SMALL_MICRO_BATCH and takes_batch_statistics(parts):
        text = f"BatchNorm takes its statistics from micro-batches of {plan.micro_batch}; below {SMALL_MICRO_BATCH} they are noise: "
        if loaded.recipe.memory.micro_batch != "auto":
            text += "raise memory.micro_batch"
        else:
            text += "raise train.batch" if plan.micro_batch == plan.batch else "raise memory.budget"
        kept = "" if loaded.recipe.model.pretrained is False else ", or set model.norm frozen to keep those of the weights"
        yield Notice(level="warning", text=text + kept)
