"""From a recipe to the parts of a run: data, contract, model, costs, budget. The only place besides `fit` that sees a whole recipe.

Each function settles the `auto` keys of its part and records value and reason in the resolution.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from hiresvis.backbone.build import Backbone, build_backbone
from hiresvis.backbone.match import fingerprint
from hiresvis.backbone.segmenter import build_segmenter
from hiresvis.data.augment import Augment, make_augment
from hiresvis.data.cache import ImageCache
from hiresvis.data.check import DataReport, check_steps
from hiresvis.data.contract import Contract, make_prepare, statistics_for
from hiresvis.data.masks import Masks, values_of
from hiresvis.data.micro_batch import load_pair, load_sample
from hiresvis.data.mixing import Mixing
from hiresvis.data.samples import draw_boards
from hiresvis.data.sources import Datasets
from hiresvis.data.survey import resolve_channels, resolve_scale
from hiresvis.data.transforms import Pipeline, Preprocess, Scale
from hiresvis.device import refuse_budget as device_refuses
from hiresvis.errors import DataError, Problem, RecipeError
from hiresvis.listing import read_datasets as read_datasets  # part of this module, apart for callers that must not import torch
from hiresvis.profiles import cache_folder
from hiresvis.recipe import LoadedRecipe, Resolution
from hiresvis.recipe.schema import loss_of
from hiresvis.recipe.tasks import LOSSES
from hiresvis.run.events import Notice
from hiresvis.train.freezing import TrainMode, freeze, freeze_norm, train_adapters, train_head_only
from hiresvis.train.losses import Loss, make_loss
from hiresvis.train.optim import auto_layer_decay, build_optimizer, is_transformer, warmup_steps
from hiresvis.train.phases import auto_head_epochs
from hiresvis.train.step import TrainStep


def draw_sample(loaded: LoadedRecipe) -> Iterator[Notice]:
    """Draws the sample set that the recipe names, when the folder that holds data.train is missing."""
    if loaded.recipe.data.sample is None:
        return
    folder = loaded.resolve_path(loaded.recipe.data.train).parent
    if folder.exists():
        return
    yield Notice(level="info", text=f"{folder} is missing: drawing the sample set {loaded.recipe.data.sample} there (synthetic images)")
    draw_boards(folder)


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


def make_contract(loaded: LoadedRecipe, datasets: Datasets, channels: int, scale: Scale, backbone: Backbone) -> Contract:
    """What evaluate, predict and export will read."""
    data = loaded.recipe.data
    mean, std = statistics_for(backbone.mean, backbone.std, channels)
    target_mean, target_std = datasets.train.target_scale()
    return Contract(
        task=loaded.recipe.task,
        classes=datasets.classes,
        target_mean=target_mean,
        target_std=target_std,
        ignore_index=data.ignore_index if loaded.recipe.task == "segment" else None,
        image_size=loaded.recipe.model.image_size,
        fit=data.fit,
        background=data.background,
        channels=channels,
        scale=scale,
        mean=mean,
        std=std,
        interpolation=backbone.interpolation if backbone.interpolation in ("bilinear", "bicubic") else "bilinear",
        max_pixels=data.max_pixels,
        overlap=data.overlap,
    )


def check_data(
    loaded: LoadedRecipe,
    datasets: Datasets,
    preprocess: Preprocess | None,
    *,
    fast: bool = False,
    seconds: float | None = None,
    copies: ImageCache | None = None,
) -> Generator[tuple[int, int], None, DataReport]:
    """Every file decoded once (results are remembered), yielding (files done, files in all); see `check_steps`.

    Args:
        preprocess: without it nothing is held against the model's input.
        fast: headers alone.
        seconds: a limit on decoding.
        copies: keeps what was decoded for the training that follows.
    """
    data = loaded.recipe.data
    return check_steps(
        datasets,
        max_pixels=data.max_pixels,
        preprocess=preprocess,
        bad_images=data.bad_images,
        fast=fast,
        seconds=seconds,
        cache_folder=cache_folder(),
        copies=copies,
        masks=make_masks(loaded, datasets),
    )


def make_masks(loaded: LoadedRecipe, datasets: Datasets) -> Masks | None:
    """What the values in masks mean; None for other tasks than segment."""
    ignore = loaded.recipe.data.ignore_index
    return Masks(values_of(datasets.classes, ignore), ignore) if loaded.recipe.task == "segment" else None


def make_pipeline(loaded: LoadedRecipe, contract: Contract) -> Pipeline:
    """What a training image goes through after decoding.

    Raises:
        RecipeError: the augmentation cannot be built, placed at its line.
    """
    return Pipeline(contract.preprocess(), make_augmentation(loaded, contract.channels), contract.masks())


def make_augmentation(loaded: LoadedRecipe, channels: int) -> Augment | None:
    """The recipe's augmentation.

    Raises:
        RecipeError: it cannot be built, placed at its line.
    """
    with _placing(loaded):
        return make_augment(loaded.recipe.data.augment, image_size=loaded.recipe.model.image_size, in_chans=channels)


def make_mixing(loaded: LoadedRecipe, contract: Contract) -> Mixing:
    """How the images of a batch are mixed."""
    optim = loaded.recipe.optim
    return Mixing(optim.mixup, optim.cutmix, len(contract.classes) if contract.task == "classify" else None)


def refuse_budget(loaded: LoadedRecipe, device: torch.device) -> None:
    """A budget above what the device has.

    Raises:
        RecipeError: so it is.
    """
    with _placing(loaded):
        device_refuses(device, loaded.recipe.memory.budget)


def head_epochs(loaded: LoadedRecipe) -> tuple[int, str]:
    """Epochs in which the head alone is trained before everything is, and why so many, where that is not given."""
    lp_ft = loaded.recipe.model.lp_ft
    if lp_ft is None:
        return 0, ""
    return auto_head_epochs(loaded.recipe.train.epochs) if lp_ft.head_epochs == "auto" else (int(lp_ft.head_epochs), "")


def refuse_warmup(loaded: LoadedRecipe, num_train: int, batch: int, epochs_of_head: int) -> None:
    """A warm-up that is not shorter than the run, or one of its phases.

    Args:
        epochs_of_head: `head_epochs`, or as a run that is resumed has settled them.

    Raises:
        RecipeError: so it is.
    """
    try:
        for steps in filter(None, phase_steps(loaded, num_train, batch, epochs_of_head)):
            warmup_steps(loaded.recipe.optim.warmup, steps)
    except ValueError as error:
        raise RecipeError([loaded.problem("optim.warmup", str(error))]) from error


def phase_steps(loaded: LoadedRecipe, num_train: int, batch: int, epochs_of_head: int) -> tuple[int, int]:
    """Optimizer steps of the head alone, and of what follows."""
    steps, epochs = -(-num_train // batch), loaded.recipe.train.epochs
    return steps * epochs_of_head, steps * max(0, epochs - epochs_of_head)


def raw_image(contract: Contract, datasets: Datasets, pipeline: Pipeline) -> tuple[tuple[int, int, int], torch.dtype]:
    """Shape (height, width, channels) and dtype of one image as the loader gives it, from the first that can be read.

    Decoders and augmentation have then run once, so what they keep is in the process's size before the budget is taken.
    """
    for sample in datasets.train.samples:
        try:
            if pipeline.masks is None:
                array = load_sample(sample, pipeline, max_pixels=contract.max_pixels, seed=0)
            else:
                array, _ = load_pair(sample, pipeline, max_pixels=contract.max_pixels, seed=0)
        except DataError:
            continue
        return array.shape, torch.from_numpy(array).dtype
    raise DataError("no image of train can be read; run hiresvis check")


def build_model(loaded: LoadedRecipe, *, num_classes: int, channels: int, with_weights: bool = True, initialise: bool = True) -> Backbone:
    """The timm model of the recipe, problems placed at its lines.

    Args:
        with_weights: False where weights are loaded over it anyway, or none are needed.
        initialise: False where even random ones are not needed.

    Raises:
        RecipeError: name, size or weights do not fit.
    """
    model = loaded.recipe.model
    weights = model.pretrained if with_weights else False
    if isinstance(weights, str) and not weights.startswith("package:"):
        weights = str(loaded.resolve_path(weights))
    with _placing(loaded):
        build = build_segmenter if loaded.recipe.task == "segment" else build_backbone
        return build(
            model.name,
            num_classes=num_classes,
            image_size=model.image_size,
            in_chans=channels,
            pretrained=weights,
            drop_path=None if isinstance(model.drop_path, str) else model.drop_path,
            seed=loaded.recipe.train.seed,
            initialise=initialise,
            other_sizes=[size for _, size in (loaded.recipe.train.resize or ())[:-1]],
        )


@contextmanager
def _placing(loaded: LoadedRecipe) -> Iterator[None]:
    """Puts a refusal at its key's place in the recipe."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError([placed(loaded, problem) for problem in error.problems]) from None


def placed(loaded: LoadedRecipe, problem: Problem) -> Problem:
    """The problem at its key's place in the recipe."""
    return replace(problem, place=loaded.place(problem.key)) if problem.key and not problem.place else problem


@dataclass(frozen=True, slots=True)
class Trainable:
    """The model with its frozen parts, and what is needed to trace and train it.

    Attributes:
        fingerprint: of what plans depend on; the first phase of lp_ft takes more out of training, and has the same plan.
        adapted: names of the layers that have low-rank adapters.
        frozen_norm: names of the layers whose batch statistics stay.
    """

    backbone: Backbone
    model: nn.Module
    train_mode: Callable[[], None]
    norm: str
    layer_decay: float | None
    fingerprint: str
    adapted: tuple[str, ...] = ()
    frozen_norm: tuple[str, ...] = ()


def freeze_parts(loaded: LoadedRecipe, resolution: Resolution, backbone: Backbone, *, norm: str) -> Trainable:
    """Applies adapt, freeze and the choice for batch statistics (batch | frozen). Of lp_ft, the second phase."""
    recipe, model, lora = loaded.recipe, backbone.model, loaded.recipe.model.lora
    adapted: tuple[str, ...] = ()
    with _placing(loaded):
        if recipe.model.adapt == "head":
            train_head_only(model)
        frozen = freeze(model, recipe.model.freeze)
        if lora is not None:
            adapted = train_adapters(
                model,
                rank=lora.rank,
                alpha=lora.alpha,
                frozen=frozen,
                image_size=recipe.model.image_size,
                in_chans=backbone.arguments["in_chans"],
                seed=recipe.train.seed,
            )
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
        decay, why = auto_layer_decay(model, pretrained=recipe.model.pretrained is not False, adapt=recipe.model.adapt)
        resolution.set("optim.layer_decay", decay, why)
    train_mode()
    return Trainable(backbone, model, train_mode, norm, decay, fingerprint(model), adapted, tuple(frozen_norm))


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
    text = f"{trainable.backbone.name}: a {kind} of {total / 1e6:.1f} M parameters, "
    if not trainable.adapted:
        return f"{text}{trained / 1e6:.1f} M trained"
    layers = sum(isinstance(module, nn.Linear | nn.Conv2d) for module in trainable.model.modules())
    where = f"the head, and adapters on {len(trainable.adapted)} of {layers} linear layers and convolutions"
    return f"{text}{trained:,} of them ({trained / total:.1%}) trained: {where}"


def contract_loss(contract: Contract, name: str = "auto", *, label_smoothing: float = 0.0, weights: Sequence[float] = ()) -> Loss:
    """A loss over the contract's outputs, which it reads as the contract says. Plain losses are the same for all losses of classes and
    labels, and the training loss itself for numbers and masks."""
    return make_loss(
        LOSSES[contract.task][0] if name == "auto" else name,
        task=contract.task,
        num_outputs=len(contract.classes),
        label_smoothing=label_smoothing,
        weights=weights,
        temperature=contract.temperature,
        mean=contract.target_mean,
        std=contract.target_std,
        mask_size=contract.image_size,
    )


def make_step(
    loaded: LoadedRecipe,
    trainable: Trainable,
    contract: Contract,
    precision: str,
    device: torch.device,
    *,
    weights: Sequence[float] = (),
) -> TrainStep:
    """The training step of the recipe; the model moves to the device.

    Args:
        weights: of classes or labels, see `data.balance`.
    """
    trainable.model.to(device)
    optim, channels_last = loaded.recipe.optim, loaded.recipe.memory.channels_last
    loss = contract_loss(contract, loss_of(loaded.recipe), label_smoothing=optim.label_smoothing, weights=weights)
    return TrainStep(
        trainable.model,
        make_optimizer(loaded, trainable.model, trainable.layer_decay),
        loss,
        prepare=make_prepare(contract, device, True if isinstance(channels_last, str) else channels_last),
        device=device,
        precision=precision,  # type: ignore[arg-type]
        clip_grad=optim.clip_grad,
    )
