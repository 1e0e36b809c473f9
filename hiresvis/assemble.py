"""From a recipe to the parts of a run: data, contract, model, costs, budget. The only place besides `fit` that sees a whole recipe.

Each function settles the `auto` keys of its part and records value and reason in the resolution.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from hiresvis.backbone.build import Backbone, build_backbone
from hiresvis.data.check import DataReport, check_datasets
from hiresvis.data.contract import Contract, make_prepare, statistics_for
from hiresvis.data.decode import decode
from hiresvis.data.samples import draw_boards
from hiresvis.data.sources import Datasets, load_datasets
from hiresvis.data.survey import resolve_channels, resolve_scale
from hiresvis.data.transforms import Pipeline, Scale, make_augment
from hiresvis.errors import DataError, Problem, RecipeError
from hiresvis.recipe import LoadedRecipe, Resolution
from hiresvis.run.events import Notice
from hiresvis.train.freezing import TrainMode, freeze, freeze_norm, train_head_only
from hiresvis.train.losses import CrossEntropy
from hiresvis.train.optim import auto_layer_decay, build_optimizer, is_transformer
from hiresvis.train.step import TrainStep

SMALL_MICRO_BATCH = 8  # below this, batch statistics are a risk to quality
CACHE_FOLDER = "HIRESVIS_CACHE"


def cache_folder() -> Path:
    """Where results that can be made again are kept: HIRESVIS_CACHE, or the user's cache folder."""
    given = os.environ.get(CACHE_FOLDER)
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hiresvis"


def draw_sample(loaded: LoadedRecipe) -> Iterator[Notice]:
    """Draws the sample set that the recipe names, when the folder that holds data.train is missing."""
    if loaded.recipe.data.sample is None:
        return
    folder = loaded.resolve_path(loaded.recipe.data.train).parent
    if folder.exists():
        return
    yield Notice(level="info", text=f"{folder} is missing: drawing the sample set {loaded.recipe.data.sample} there (synthetic images)")
    draw_boards(folder)


def read_datasets(loaded: LoadedRecipe, resolution: Resolution) -> Datasets:
    """The splits of the recipe, classes settled.

    Raises:
        DataError: with everything found.
    """
    data = loaded.recipe.data
    found = load_datasets(
        loaded.resolve_path(data.train),
        loaded.resolve_path(data.val) if isinstance(data.val, str) else data.val,
        None if data.test is None else loaded.resolve_path(data.test),
        image_column=data.image,
        label_column=data.label,
        split_column=data.split,
        group_column=data.group,
        classes=None if data.classes == "auto" else data.classes,
        seed=loaded.recipe.train.seed,
        unseen=data.unseen,
    )
    if data.classes == "auto":
        resolution.set("data.classes", found.classes, "the classes of train, by name")
    return found


def settle_pixels(loaded: LoadedRecipe, resolution: Resolution, datasets: Datasets) -> tuple[int, Scale]:
    """Channels and number range of the images: (channels, scale)."""
    data = loaded.recipe.data
    samples = datasets.train.samples
    given = None if data.channels == "auto" else data.channels
    channels, why = resolve_channels(samples, given, max_pixels=data.max_pixels)
    if given is None:
        resolution.set("data.channels", channels, why)
    scale, why = resolve_scale(samples, data.scale, max_pixels=data.max_pixels, background=data.background)
    if data.scale == "auto":
        resolution.set("data.scale", (scale.low, scale.high) if scale.kind == "range" else "dtype", why)
    return channels, scale


def make_contract(loaded: LoadedRecipe, classes: tuple[str, ...], channels: int, scale: Scale, backbone: Backbone) -> Contract:
    """What evaluate, predict and export will read."""
    data = loaded.recipe.data
    mean, std = statistics_for(backbone.mean, backbone.std, channels)
    return Contract(
        classes=classes,
        image_size=loaded.recipe.model.image_size,
        fit=data.fit,
        background=data.background,
        channels=channels,
        scale=scale,
        mean=mean,
        std=std,
        interpolation=backbone.interpolation if backbone.interpolation in ("bilinear", "bicubic") else "bilinear",
        max_pixels=data.max_pixels,
    )


def check_data(
    loaded: LoadedRecipe,
    datasets: Datasets,
    contract: Contract | None,
    *,
    fast: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> DataReport:
    """Every file decoded once (results are remembered); without a contract nothing is held against the model's input."""
    data = loaded.recipe.data
    return check_datasets(
        datasets,
        max_pixels=data.max_pixels,
        preprocess=contract.preprocess() if contract else None,
        bad_images=data.bad_images,
        fast=fast,
        cache_folder=cache_folder(),
        progress=progress,
    )


def make_pipeline(loaded: LoadedRecipe, contract: Contract) -> Pipeline:
    """What a training image goes through after decoding.

    Raises:
        RecipeError: the augmentation cannot be built, placed at its line.
    """
    try:
        augment = make_augment(loaded.recipe.data.augment, image_size=contract.image_size, in_chans=contract.channels)
    except RecipeError as error:
        raise RecipeError([placed(loaded, problem) for problem in error.problems]) from None
    return Pipeline(contract.preprocess(), augment)


def raw_image(contract: Contract, datasets: Datasets, pipeline: Pipeline) -> tuple[tuple[int, int, int], torch.dtype]:
    """Shape (height, width, channels) and dtype of one image as the loader gives it, from the first that can be read.

    Decoders and augmentation have then run once, so what they keep is in the process's size before the budget is taken.
    """
    for sample in datasets.train.samples:
        try:
            array = pipeline(decode(sample.path, max_pixels=contract.max_pixels, background=contract.background), 0)
        except DataError:
            continue
        return array.shape, torch.from_numpy(array).dtype
    raise DataError("no image of train can be read; run hiresvis check")


def build_model(loaded: LoadedRecipe, *, num_classes: int, channels: int, with_weights: bool = True) -> Backbone:
    """The timm model of the recipe, problems placed at its lines.

    Args:
        with_weights: False where weights are loaded over it anyway, or none are needed.

    Raises:
        RecipeError: name, size or weights do not fit.
    """
    model = loaded.recipe.model
    weights = model.pretrained if with_weights else False
    if isinstance(weights, str) and not weights.startswith("package:"):
        weights = str(loaded.resolve_path(weights))
    try:
        return build_backbone(
            model.name,
            num_classes=num_classes,
            image_size=model.image_size,
            in_chans=channels,
            pretrained=weights,
            drop_path=None if isinstance(model.drop_path, str) else model.drop_path,
            seed=loaded.recipe.train.seed,
        )
    except RecipeError as error:
        raise RecipeError([placed(loaded, problem) for problem in error.problems]) from None


def placed(loaded: LoadedRecipe, problem: Problem) -> Problem:
    """The problem at its key's place in the recipe."""
    return replace(problem, place=loaded.place(problem.key)) if problem.key and not problem.place else problem


@dataclass(frozen=True, slots=True)
class Trainable:
    """The model with its frozen parts, and what is needed to trace and train it."""

    backbone: Backbone
    model: nn.Module
    train_mode: Callable[[], None]
    norm: str
    layer_decay: float | None


def freeze_parts(loaded: LoadedRecipe, resolution: Resolution, backbone: Backbone, *, norm: str) -> Trainable:
    """Applies adapt, freeze and the choice for batch statistics (batch | frozen)."""
    recipe, model = loaded.recipe, backbone.model
    try:
        if recipe.model.adapt == "head":
            train_head_only(model)
        freeze(model, recipe.model.freeze)
    except RecipeError as error:
        raise RecipeError([placed(loaded, problem) for problem in error.problems]) from None
    frozen_norm = freeze_norm(model) if norm == "frozen" else ()
    train_mode = TrainMode(model, frozen_norm=frozen_norm)
    channels_last = recipe.memory.channels_last
    if channels_last == "auto":
        channels_last = True
        resolution.set("memory.channels_last", True, "convolutions are fastest with channels innermost, and images arrive so")
    if channels_last:
        model.to(memory_format=torch.channels_last)  # on the CPU still: the trace works there; `make_step` moves it
    decay = recipe.optim.layer_decay
    if decay == "auto":
        decay, why = auto_layer_decay(model, pretrained=recipe.model.pretrained is not False)
        resolution.set("optim.layer_decay", decay, why)
    train_mode()
    return Trainable(backbone, model, train_mode, norm, decay)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a trainable part keeps batch statistics."""
    return any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) and any(parameter.requires_grad for parameter in module.parameters())
        for module in model.modules()
    )


def settle_precision(loaded: LoadedRecipe, resolution: Resolution, device: torch.device) -> str:
    """fp32, bf16 or fp16."""
    wanted = loaded.recipe.memory.precision
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        found, why = ("bf16", "the GPU has it") if bf16 else ("fp16", "the GPU has no bf16; losses are scaled")
    else:
        found, why = "fp32", "the CPU computes in it exactly as everywhere; bf16 can be asked for"
    resolution.set("memory.precision", found, why)
    return found


def make_optimizer(loaded: LoadedRecipe, model: nn.Module, layer_decay: float | None) -> torch.optim.Optimizer:
    """The recipe's optimizer; its learning rate is the schedule's matter."""
    optim = loaded.recipe.optim
    return build_optimizer(model, name=optim.name, lr=1e-3, weight_decay=optim.weight_decay, layer_decay=layer_decay)


def describe_model(trainable: Trainable) -> str:
    """One line for people: parameters in all and trained."""
    total = sum(parameter.numel() for parameter in trainable.model.parameters())
    trained = sum(parameter.numel() for parameter in trainable.model.parameters() if parameter.requires_grad)
    kind = "transformer" if is_transformer(trainable.model) else "network"
    return f"{trainable.backbone.name}: a {kind} of {total / 1e6:.1f} M parameters, {trained / 1e6:.1f} M trained"


def make_step(loaded: LoadedRecipe, trainable: Trainable, contract: Contract, precision: str, device: torch.device) -> TrainStep:
    """The training step of the recipe; the model moves to the device."""
    trainable.model.to(device)
    optim, channels_last = loaded.recipe.optim, loaded.recipe.memory.channels_last
    return TrainStep(
        trainable.model,
        make_optimizer(loaded, trainable.model, trainable.layer_decay),
        CrossEntropy(label_smoothing=optim.label_smoothing),
        prepare=make_prepare(contract, device, True if isinstance(channels_last, str) else channels_last),
        device=device,
        precision=precision,  # type: ignore[arg-type]
        clip_grad=optim.clip_grad,
    )
