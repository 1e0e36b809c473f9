"""The recipe: a closed set of sections and keys, with their defaults and what each may hold.

Values arrive here as YAML gave them and leave in the form the program works with: sizes in bytes, times in seconds,
`image_size` as (height, width). A value whose feature comes with a later release is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hiresvis.recipe import quantities, structures, values
from hiresvis.recipe.tasks import BALANCES, LOSSES, METRICS, TASKS, auto_loss, words_of

Auto = Literal["auto"]


def _key(default: Any, description: str) -> Any:
    """A key with its default as a recipe would write it; the default is read like any given value."""
    return Field(default=default, validate_default=True, description=description)


class Section(BaseModel):
    """Base of all sections: unknown keys are refused and nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Data(Section):
    """Where the images are and how they are read."""

    train: Annotated[str, values.text()] = Field(
        description="Class folders, or a manifest: .csv, .tsv or .parquet; segment: a folder of images/ and masks/, or a manifest."
    )
    val: Annotated[str | float, quantities.path_or_share()] = _key(
        0.15, "Like train; or the share of the training images to hold out: stratified, by group, seeded."
    )
    test: Annotated[str | None, values.text(nullable=True)] = _key(None, "Like train; used once, at the end.")
    root: Annotated[str | None, values.text(nullable=True)] = _key(
        None, "A folder that manifests may name images below, besides their own; paths that leave both are refused."
    )
    image: Annotated[str, values.text()] = _key("path", "Manifest column with the image paths.")
    label: Annotated[str | tuple[str, ...], structures.text_or_names()] = _key(
        "label",
        "Manifest column with the class name; multilabel: one column of names such as a|b, or a list of columns of 0 and 1; "
        "regress: one column of numbers, or a list of them; segment: the mask's path, empty where there is only the first class.",
    )
    split: Annotated[str | None, values.text(nullable=True)] = _key(None, "Manifest column that says train, val or test.")
    group: Annotated[str | None, values.text(nullable=True)] = _key(
        None, "Manifest column with the patient, slide or site: never on both sides of a split."
    )
    region: Annotated[tuple[str, str, str, str] | None, structures.columns("x", "y", "width", "height")] = _key(
        None, "Manifest columns with x, y, width and height of the part of the image that a row means, in its own pixels as shown."
    )
    classes: Annotated[Auto | tuple[str, ...], structures.names(word="auto")] = _key(
        "auto",
        "Class names in order; auto: those of train, sorted, or the columns of data.label. Saved with the model. Segment: in the order of "
        "the masks' values 0, 1, 2 (names that are all whole numbers are the values); auto: classes.txt, or the values found in train.",
    )
    ignore_index: Annotated[int | None, values.whole(low=0, high=65535, nullable=True)] = _key(
        255, "Segment: the mask value of pixels that count nowhere; null: none."
    )
    channels: Annotated[Auto | int, values.whole("auto", low=1)] = _key("auto", "Channels the model sees; auto: from the images.")
    scale: Annotated[str | tuple[float, float], structures.scale()] = _key(
        "auto", "How pixel values become 0..1: by type, by percentile, or [lo, hi]. Recorded, and reused by predict."
    )
    fit: Annotated[Literal["resize", "letterbox", "crop", "tile"], values.choice("resize", "letterbox", "crop", "tile")] = _key(
        "resize",
        "How an image meets image_size: resize (the whole), letterbox (its shape kept, padded), or windows of full resolution: crop (one), "
        "tile (one in training, in evaluation all, their logits averaged).",
    )
    overlap: Annotated[float, quantities.share(below=1)] = _key("25%", "With fit: tile, the share of a window that neighbours share.")
    background: Annotated[tuple[int, int, int], structures.colour()] = _key(
        "white", "Colour under transparent pixels and around images that do not fill image_size."
    )
    bad_images: Annotated[Literal["error", "skip"], values.choice("error", "skip", later=("quarantine",))] = _key(
        "error", "What an unreadable training image does: ends the run, or is left out and counted."
    )
    check: Annotated[Literal["auto", "full", "headers"], values.choice("auto", "full", "headers")] = _key(
        "auto", "What fit does before training: decodes every image once (full), in ten minutes at most (auto), or reads headers alone."
    )
    unseen: Annotated[Literal["error", "drop"], values.choice("error", "drop")] = _key(
        "error", "What a validation or test label that train lacks does: ends the run, or its images are left out."
    )
    max_pixels: Annotated[int, quantities.pixels()] = _key("500M", "Larger images are refused before memory is taken.")
    balance: Annotated[str, values.choice("none", *words_of(BALANCES))] = _key(
        "none",
        "What makes up for classes of unequal size: weights of the loss, inverse to a class's images; sampler, an order in which classes "
        "come equally often (classify); or focal, the loss of that name.",
    )
    augment: Annotated[str | tuple[dict[str, Any], ...], structures.augment()] = _key(
        "standard",
        "Strength, or a list of albumentations (where missing, torchvision's): [{name: HorizontalFlip, p: 0.5}].",
    )
    workers: Annotated[Auto | int, values.whole("auto", low=0)] = _key("auto", "Loader processes; 0: none, in the main process.")
    cache: Annotated[Literal["auto", "off"] | int, quantities.cache()] = _key(
        "auto", "Decoded, resized copies under the cache folder, read back bit for bit: off, or the most they may take (20GiB)."
    )
    sample: Annotated[
        Literal["boards"] | None, values.only(None, also="boards", refusal="is not a sample set; write boards, or null for none")
    ] = _key(None, "A sample set to draw when the folder that holds train is missing.")


class Lora(Section):
    """Low-rank adapters, with adapt: lora."""

    rank: Annotated[int, values.whole(low=1)] = _key(
        8, "Rows of an adapter's first matrix; a small layer takes fewer, so that no adapter has more numbers than its layer's weight."
    )
    alpha: Annotated[float, values.real(above=0)] = _key(16, "An adapter's output is multiplied by alpha / rank.")


class LpFt(Section):
    """The head first and then everything, with adapt: lp_ft."""

    head_epochs: Annotated[Auto | int, values.whole("auto", low=1)] = _key(
        "auto", "Epochs of the head alone, the first of train.epochs; auto: a fifth of them, one at least."
    )
    head_lr: Annotated[Auto | float, values.real("auto", above=0)] = _key(
        "auto", "Learning rate of the head alone; optim.lr is what follows."
    )


class Model(Section):
    """The network and what of it is trained."""

    name: Annotated[str, values.text()] = Field(description="A timm model, such as convnextv2_base.")
    pretrained: Annotated[bool | str, values.pretrained()] = _key(True, "timm's weights (true), none, a file, or package:NAME.")
    init_from: Annotated[None, values.only(None, refusal="is not there yet; today: pretrained takes a file of weights")] = _key(
        None, "A run folder or weights with other classes: new head, reported."
    )
    image_size: Annotated[tuple[int, int], structures.image_size()] = _key(1024, "Pixels: one number for a square, or [height, width].")
    adapt: Annotated[Literal["full", "head", "lp_ft", "lora"], values.choice("full", "head", "lp_ft", "lora")] = _key(
        "full", "What is trained: everything, the head alone, the head first and then everything, or the head and low-rank adapters."
    )
    lp_ft: LpFt | None = _key(None, "With adapt: lp_ft, its two phases; else null.")
    lora: Lora | None = _key(None, "With adapt: lora, its adapters; else null.")
    freeze: Annotated[Literal["none", "stem"] | int, values.whole("none", "stem", low=1)] = _key(
        "none", "What is not trained: nothing, the stem, or the stem and the first n stages."
    )
    norm: Annotated[Literal["auto", "batch", "frozen"], values.choice("auto", "batch", "frozen")] = _key(
        "auto", "BatchNorm statistics: of the micro-batch, or frozen; auto: frozen below micro-batch 8."
    )
    drop_path: Annotated[Auto | float, values.real("auto", low=0, below=1)] = _key("auto", "Stochastic depth.")

    @model_validator(mode="before")
    @classmethod
    def _with_own_section(cls, raw: Any) -> Any:
        """The way that adapt names has its section, at its defaults where it is not given."""
        way = raw.get("adapt") if isinstance(raw, dict) else None
        return {**raw, way: {}} if way in ("lp_ft", "lora") and raw.get(way) is None else raw


class Memory(Section):
    """What may be used, and how it is spent."""

    budget: Annotated[Auto | int | float, quantities.budget()] = _key("auto", "Memory for the run: auto, a size (22GiB), or a share (90%).")
    micro_batch: Annotated[Auto | int, values.whole("auto", low=1)] = _key("auto", "Images at once; auto: the most that fit.")
    spacing: Annotated[Literal["auto", "off"] | int | dict[str, int], structures.spacing()] = _key(
        "auto", "Blocks between checkpoints: for all stages, by stage, or off: everything stored."
    )
    goal: Annotated[Literal["largest", "fastest"], values.choice("largest", "fastest")] = _key(
        "largest", "The largest micro-batch up to train.batch and then least recompute; or the fastest plan."
    )
    exact: Annotated[Literal["bitwise", "close"], values.choice("bitwise", "close")] = _key(
        "close", "Which ways to save memory are allowed: those that change no bit, or also those within rounding."
    )
    precision: Annotated[Literal["auto", "bf16", "fp16", "fp32"], values.choice("auto", "bf16", "fp16", "fp32")] = _key(
        "auto", "auto: bf16 where the device has it, else fp16 with a scaler, else fp32."
    )
    channels_last: Annotated[Auto | bool, values.flag("auto")] = _key("auto", "Memory order of images inside the network.")
    compile: Annotated[bool, values.flag(only=False, later=("true",))] = _key(False, "torch.compile.")
    on_oom: Annotated[Literal["replan", "stop"], values.choice("replan", "stop")] = _key(
        "replan", "What running out of memory in training does: a tighter plan and the same batch again, or the end, which can be resumed."
    )


class Optim(Section):
    """How the weights move."""

    name: Annotated[Literal["adamw", "sgd", "lion", "muon"], values.choice("adamw", "sgd", "lion", "muon")] = _key(
        "adamw", "The optimizer; muon steps matrices, and leaves the rest to AdamW."
    )
    lr: Annotated[Auto | float, values.real("auto", above=0)] = _key("auto", "Learning rate at its highest.")
    weight_decay: Annotated[float, values.real(low=0)] = _key(0.05, "Weight decay; none on biases and norms.")
    layer_decay: Annotated[Auto | float | None, values.real("auto", above=0, high=1, nullable=True)] = _key(
        "auto", "Factor on the learning rate for each layer further from the head; null: none."
    )
    schedule: Annotated[Literal["cosine", "step", "plateau", "constant"], values.choice("cosine", "step", "plateau", "constant")] = _key(
        "cosine",
        "Learning rate after the warmup: cosine to 1%; step, a tenth after each third of the run; plateau, times 0.3 after two epochs "
        "without a better metric or a lower validation loss; constant.",
    )
    warmup: Annotated[float | int, quantities.warmup()] = _key("5%", "Rising learning rate: a share of all steps, or a number of steps.")
    clip_grad: Annotated[float | None, values.real(above=0, nullable=True)] = _key(1.0, "Largest norm of the gradient; null: no limit.")
    loss: Annotated[str, values.choice("auto", *words_of(LOSSES))] = _key(
        "auto", "The loss; auto: cross_entropy to classify, bce for multilabel, huber to regress, dice_ce to segment."
    )
    label_smoothing: Annotated[float, values.real(low=0, below=1)] = _key(0.0, "Share of the target spread over all classes.")
    mixup: Annotated[float, values.real(low=0)] = _key(
        0.0, "Mixup: images of a batch are blended by shares drawn from Beta(mixup, mixup), their labels likewise; 0: none."
    )
    cutmix: Annotated[float, values.real(low=0)] = _key(
        0.0, "CutMix: a box of an image comes from another of its batch, labels by area; beside mixup, each image draws which."
    )


class EarlyStop(Section):
    """When training ends before its last epoch."""

    patience: Annotated[int, values.whole(low=1)] = _key(
        5, "Epochs without a better metric or a lower validation loss before the run ends."
    )


class Keep(Section):
    """How many weights are kept."""

    best: Annotated[int, values.only(1, refusal="is not there yet; today: 1")] = _key(1, "Best weights by the metric; today one.")
    last: Annotated[int, values.only(1, refusal="is not there yet; today: 1")] = _key(1, "Last snapshots; today one.")


class Train(Section):
    """How long, how many at a time, and when to stop."""

    epochs: Annotated[int, values.whole(low=1)] = _key(20, "Passes over the training images.")
    batch: Annotated[Auto | int, values.whole("auto", low=1)] = _key(
        16, "Images an optimizer step sees, kept by accumulation; auto: the largest that fits at once."
    )
    eval_batch: Annotated[Auto | int, values.whole("auto", low=1)] = _key("auto", "Images at once in evaluation.")
    seed: Annotated[int, values.whole(low=0, high=2**32 - 1)] = _key(
        0, "Decides the split, the order, the augmentation and the new weights."
    )
    deterministic: Annotated[bool, values.flag()] = _key(False, "Only deterministic kernels; slower.")
    ema: Annotated[Auto | bool, values.flag("auto")] = _key(
        "auto", "Moving average of the weights, evaluated and kept in their place; auto: with a constant learning rate."
    )
    early_stop: EarlyStop | None = _key(EarlyStop(), "null: every epoch is trained.")
    metric: Annotated[str, values.choice("auto", *words_of(METRICS))] = _key(
        "auto", "The metric that decides which epoch is best; auto: from the task."
    )
    resize: Annotated[tuple[tuple[float, tuple[int, int]], ...] | None, structures.size_steps()] = _key(
        None,
        "Smaller images first: [[0, 512], [60%, 1024]], by share of the epochs; the last is model.image_size, which evaluation has always.",
    )
    max_time: Annotated[float | None, quantities.duration(nullable=True)] = _key(
        None, "The run ends in order after this time, such as 3h45m."
    )
    on_divergence: Annotated[Literal["rollback", "stop"], values.choice("rollback", "stop")] = _key(
        "rollback",
        "What steps that are not finite, several in a row, or a loss that runs away do: back to a snapshot with a lower learning rate, "
        "twice at most, or the end with advice.",
    )
    keep: Keep = _key(Keep(), "How many weights are kept.")
    save_every: Annotated[float, quantities.duration()] = _key("10min", "Time between snapshots.")
    strategy: Annotated[Literal["auto", "single"], values.choice("auto", "single", later=("ddp", "fsdp"))] = _key(
        "auto", "Devices: one today."
    )


class Log(Section):
    """Where a run is written and shown."""

    dir: Annotated[str, values.run_folder()] = _key("runs/{name}", "The run folder; {name} is the recipe's file name.")
    ui: Annotated[Literal["auto", "rich", "plain", "json", "off"], values.choice("auto", "rich", "plain", "json", "off")] = _key(
        "auto", "The live view."
    )
    to: Annotated[tuple[str, ...], structures.some_of("csv", "jsonl", "tensorboard", "wandb", "mlflow")] = _key(
        ["csv", "jsonl"], "Where metrics go besides the view: tensorboard, wandb, mlflow; csv and jsonl always are written."
    )
    report: Annotated[bool, values.flag()] = _key(True, "Write report.html at the end.")


class Recipe(Section):
    """A hiresvis recipe."""

    version: Annotated[int, values.only(1, refusal="is not a version of the recipe format that this release reads; write 1")] = _key(
        1, "Version of the recipe format."
    )
    task: Annotated[str, values.choice(*TASKS)] = Field(
        description="What is learnt: one class an image, any number of them, numbers, or a class for every pixel."
    )
    data: Data = Field(description="Where the images are and how they are read.")
    model: Model = Field(description="The network and what of it is trained.")
    memory: Memory = _key(Memory(), "What may be used, and how it is spent.")
    optim: Optim = _key(Optim(), "How the weights move.")
    train: Train = _key(Train(), "How long, how many at a time, and when to stop.")
    log: Log = _key(Log(), "Where a run is written and shown.")


def loss_of(recipe: Recipe) -> str:
    """The loss that a recipe trains with; auto by the task and the balance of classes."""
    return auto_loss(recipe.task, recipe.data.balance)[0] if recipe.optim.loss == "auto" else recipe.optim.loss


def size_phases(recipe: Recipe) -> tuple[tuple[int, tuple[int, int]], ...]:
    """The first epoch, from 1, of each image size that is trained at, with the size; empty without `train.resize`."""
    return tuple((1 + round(begin * recipe.train.epochs), size) for begin, size in recipe.train.resize or ())


def section_of(annotation: Any) -> type[Section] | None:
    """The section a field holds (also one that may be null), or None for a plain value."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def keys_of(section: type[Section] = Recipe, prefix: str = "") -> tuple[str, ...]:
    """Dotted names of all keys that hold a value, in the schema's order.

    >>> keys_of(Log, "log.")
    ('log.dir', 'log.ui', 'log.to', 'log.report')
    """
    found: list[str] = []
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        found += keys_of(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return tuple(found)


def kind_of(key: str) -> values.Kind:
    """How the value of a dotted key is read and written.

    Raises:
        ValueError: the schema has no such key, or it is a section.
    """
    section: type[Section] | None = Recipe
    *sections, last = key.split(".")
    for name in sections:
        section = section_of(section.model_fields[name].annotation) if section and name in section.model_fields else None
    field = section.model_fields.get(last) if section else None
    for extra in field.metadata if field else ():
        if isinstance(extra, values.Kind):
            return extra
    raise ValueError(f"the recipe has no key {key!r}")


def recipe_json_schema() -> dict[str, Any]:
    """The JSON schema (2020-12) that an editor checks a recipe with while it is written."""
    schema = Recipe.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "hiresvis recipe"}
