"""Which model, at what size: the largest of a short list whose run fits the memory and an afternoon, by the planner's own figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hiresvis.errors import DoesNotFit
from hiresvis.memory.cards import find_card
from hiresvis.plan_report import PlanReport
from hiresvis.planning import plan
from hiresvis.recipe import LoadedRecipe
from hiresvis.recipe.draft import Line
from hiresvis.ui.text import speed
from hiresvis.units import format_duration, format_size

MOST_SECONDS = 4 * 3600  # of a run that is proposed
_LEAST_PX = 256  # below which a smaller image is no way to save time
_FITS_ALL = "its norms do not depend on the micro-batch, it takes any size of image, and its cost grows with the pixels alone"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model of timm that may be proposed, and from how many images on."""

    name: str
    least_images: int
    why: str


ON_GPU = (
    Candidate("convnext_base", 5000, f"a large network: {_FITS_ALL}"),
    Candidate("convnext_small", 1000, f"a network of middle size: {_FITS_ALL}"),
    Candidate("convnext_tiny", 0, f"a small network: {_FITS_ALL}"),
    Candidate("convnext_nano", 0, f"a very small network: {_FITS_ALL}"),
)
"""ConvNeXt (Liu et al., 2022), weights under Apache-2.0; ConvNeXt V2's are for research alone."""
ON_CPU = (
    Candidate("tf_efficientnet_lite0", 0, "made for processors: a small network of plain activations"),
    Candidate("mobilenetv3_small_100", 0, "a seventh of the arithmetic of tf_efficientnet_lite0"),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """What is proposed.

    Attributes:
        tried: every candidate that was planned, a line each.
    """

    name: str
    image_size: tuple[int, int]
    report: PlanReport
    why: str
    tried: tuple[str, ...]

    @property
    def figures(self) -> str:
        """The plan in a line."""
        return told(self.report)


def has_gpu(gpu: str | None) -> bool:
    """Whether training is to be on a GPU: the one named, or one that is here.

    Raises:
        RecipeError: no card of that name is known.
    """
    if gpu is not None:
        find_card(gpu)
        return True
    from hiresvis.device import pick_device

    return str(pick_device().type) == "cuda"


def choose(
    make: Callable[[str, tuple[int, int]], LoadedRecipe],
    candidates: Sequence[Candidate],
    image_size: tuple[int, int],
    num_train: int,
    *,
    may_shrink: bool,
    gpu: str | None,
    say: Callable[[str], None],
) -> Choice:
    """The largest candidate that the number of images speaks for and whose run fits; at half the image size where none does.

    Args:
        make: the recipe with a model and an image size.
        candidates: largest first.
        may_shrink: whether the size is ours to choose.
        gpu: as `plan` takes it.
        say: told what takes time before it starts.

    Raises:
        DoesNotFit: none fits, at no size.
        RecipeError: a given one cannot be planned.
    """
    able = [one for one in candidates if one.least_images <= num_train] or list(candidates)
    tried: list[str] = []
    found: list[Choice] = []
    refused: DoesNotFit | None = None
    for size in _sizes(image_size) if may_shrink else [image_size]:
        for one in able:
            what = f"{one.name} at {px_text(size)}"
            say(f"planning {what}")
            try:
                report = plan(make(one.name, size), gpu=gpu, measure=gpu is None)
            except DoesNotFit as error:
                tried.append(f"{what}: does not fit, needs {format_size(error.need_bytes)} of {format_size(error.budget_bytes)}")
                refused = error
                continue
            tried.append(f"{what}: {told(report)}")
            found.append(Choice(one.name, size, report, one.why, tuple(tried)))
            if run_is_short(report):
                return found[-1]
    if not found:
        assert refused is not None
        raise refused
    quickest = min(found, key=lambda choice: choice.report.run.seconds or 0.0)
    return Choice(quickest.name, quickest.image_size, quickest.report, quickest.why, tuple(tried))


def run_is_short(report: PlanReport) -> bool:
    """Whether a run may be proposed without a look for a shorter one; where its time is not known it may."""
    return report.run.seconds is None or report.run.seconds <= MOST_SECONDS


def _sizes(size: tuple[int, int]) -> list[tuple[int, int]]:
    """The size, and halves of it that are multiples of 32."""
    found = [size]
    while min(half := tuple(max(32, round(side / 64) * 32) for side in found[-1])) >= _LEAST_PX:
        found.append((half[0], half[1]))
    return found


def px_text(size: tuple[int, int]) -> str:
    """An image size in words: `1024 px`, `720 x 1280 px` (height first, as a recipe has it)."""
    return f"{size[0]} px" if size[0] == size[1] else f"{size[0]} x {size[1]} px"


def told(report: PlanReport) -> str:
    """A plan in a line: micro-batch, peak, speed, time."""
    plan, run = report.plan, report.run
    text = f"micro-batch {plan.micro_batch} x {plan.accumulation}, predicted peak {format_size(plan.predicted_peak_bytes)}"
    text += f" of {format_size(plan.budget_bytes)}"
    if run.images_per_second is not None:
        text += f", {speed(run.images_per_second)} images/s"
    return text if run.seconds is None else f"{text}, {format_duration(run.seconds)} for the run"


def weights_of(name: str) -> Line:
    """model.pretrained and why: timm's, unless its hub cannot be reached from here and an installed package ships them.

    Raises:
        RecipeError: timm has no such model.
    """
    from hiresvis.backbone import weights
    from hiresvis.backbone.build import weights_config

    cfg = weights_config(name)
    if not cfg.has_weights:
        return Line(False, f"timm has no weights for {name}: it starts from random ones")
    if weights.in_cache(cfg):
        return Line(True, "timm's weights, in the hub's cache already")
    why = weights.why_no_hub()
    if why is None:
        return Line(True, "timm's weights, fetched once from its hub")
    if (package := weights.package_for(name)) is not None:
        return Line(f"package:{package}", f"ImageNet weights of that package, since {why}; true: timm's, from the hub")
    ways = (
        "where training has no hub either: a file of weights (.safetensors, .pth), package:NAME of one that ships them, or false (random)"
    )
    return Line(True, f"timm's weights; no hub was reached when this was written ({why}); {ways}")
