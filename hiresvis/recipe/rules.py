"""Rules between keys: values that are each allowed and contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

from hiresvis.recipe.quantities import dump_share
from hiresvis.recipe.schema import Recipe, size_phases
from hiresvis.recipe.tasks import BALANCES, LOSSES, METRICS
from hiresvis.recipe.values import either, shown


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """One contradiction: the key to change, what is wrong with it, and the other keys it depends on."""

    key: str
    message: str
    others: tuple[str, ...] = ()


def broken_rules(recipe: Recipe, given: Set[str]) -> Iterator[BrokenRule]:
    """Every contradiction.

    Args:
        recipe: values that are valid one by one; refused ones stand at their defaults.
        given: dotted keys that were given, so that a rule speaks only of what someone wrote.
    """
    yield from _manifest_columns(recipe, given)
    yield from _splits(recipe, given)
    yield from _task(recipe)
    yield from _adapt(recipe)
    yield from _sizes(recipe)
    data = recipe.data
    if data.fit != "tile" and dump_share(data.overlap) != type(data).model_fields["overlap"].default:
        message = f"{dump_share(data.overlap)} beside data.fit: {data.fit}, which has no neighbours; delete it, or set data.fit: tile"
        yield BrokenRule("data.overlap", message, ("data.fit",))
    micro_batch, batch = recipe.memory.micro_batch, recipe.train.batch
    for name in ("mixup", "cutmix"):
        if batch == 1 and (strength := getattr(recipe.optim, name)):
            message = f"{strength:g} mixes an image with another of its batch, and train.batch is 1; give a larger batch, or 0 here"
            yield BrokenRule(f"optim.{name}", message, ("train.batch",))
    if isinstance(micro_batch, int) and isinstance(batch, int) and micro_batch > batch:
        message = f"{micro_batch} is above train.batch, {batch}; give at most {batch}, or a larger batch"
        yield BrokenRule("memory.micro_batch", message, ("train.batch",))


def _adapt(recipe: Recipe) -> Iterator[BrokenRule]:
    """Keys of one way to adapt beside another, and phases that do not fit in the run."""
    model, epochs = recipe.model, recipe.train.epochs
    if model.adapt == "head" and model.freeze != "none":
        message = f"{model.freeze} beside adapt: head, which trains nothing but the head; delete one of the two"
        yield BrokenRule("model.freeze", message, ("model.adapt",))
    for way in ("lp_ft", "lora"):
        if way != model.adapt and getattr(model, way) is not None:
            yield BrokenRule(f"model.{way}", f"given beside adapt: {model.adapt}; delete it, or set adapt: {way}", ("model.adapt",))
    if model.adapt != "lp_ft" or model.lp_ft is None:
        return
    if epochs == 1:
        yield BrokenRule("train.epochs", "1 beside model.adapt: lp_ft, which has two phases; give at least 2", ("model.adapt",))
    elif isinstance(model.lp_ft.head_epochs, int) and model.lp_ft.head_epochs >= epochs:
        message = f"{model.lp_ft.head_epochs} of train.epochs: {epochs} leaves none to train everything in; give at most {epochs - 1}"
        yield BrokenRule("model.lp_ft.head_epochs", message, ("train.epochs",))


def _sizes(recipe: Recipe) -> Iterator[BrokenRule]:
    """Image sizes that training goes through, beside the one that counts."""
    steps, model, fit = recipe.train.resize, recipe.model, recipe.data.fit
    if steps is None:
        return
    if steps[-1][1] != model.image_size:
        last, wanted = (shown(side[0] if side[0] == side[1] else list(side)) for side in (steps[-1][1], model.image_size))
        message = f"ends at {last}, and model.image_size is {wanted}, at which the run is planned and evaluated; end with {wanted}"
        yield BrokenRule("train.resize", message, ("model.image_size",))
    if fit not in ("resize", "letterbox"):
        message = f"makes whole images smaller, and data.fit: {fit} takes windows of full resolution; delete it, or write fit: resize"
        yield BrokenRule("train.resize", message, ("data.fit",))
    if recipe.task == "segment":
        yield BrokenRule("train.resize", "is not there yet for task segment; delete it", ("task",))
    begins = [first for first, _ in size_phases(recipe)]
    if begins[-1] > recipe.train.epochs or len(set(begins)) < len(begins):
        message = f"begins its sizes in epochs {shown(begins)} of {recipe.train.epochs}, and one of them has none; give more epochs"
        yield BrokenRule("train.resize", f"{message}, or fewer sizes", ("train.epochs",))


def _is_manifest(value: Any) -> bool:
    return isinstance(value, str) and value.lower().endswith((".csv", ".tsv", ".parquet"))


def _manifest_columns(recipe: Recipe, given: Set[str]) -> Iterator[BrokenRule]:
    data = recipe.data
    if not any(_is_manifest(value) for value in (data.train, data.val, data.test)):
        for column in ("image", "label", "split", "group", "region"):
            name = getattr(data, column)
            if f"data.{column}" in given and name != type(data).model_fields[column].default:
                name = ", ".join(name) if isinstance(name, tuple) else name
                what = f"{name} names a manifest column, and data.train ({data.train}) is no .csv, .tsv or .parquet"
                yield BrokenRule(f"data.{column}", f"{what}; give one, or delete this key", ("data.train", "data.val", "data.test"))
        if data.root is not None and "data.root" in given:
            what = f"{data.root} bounds the paths of manifests, and data.train ({data.train}) is no .csv, .tsv or .parquet"
            yield BrokenRule("data.root", f"{what}; give one, or delete this key", ("data.train", "data.val", "data.test"))
        return
    columns: dict[str, str] = {}
    for column in ("image", "label", "split", "group", "region"):
        value = getattr(data, column)
        for name in value if isinstance(value, tuple) else (value,):
            if name is not None and name in columns:
                yield BrokenRule(f"data.{column}", f"{name} is also the column of data.{columns[name]}; give each its own")
            elif name is not None:
                columns[name] = column


def _splits(recipe: Recipe, given: Set[str]) -> Iterator[BrokenRule]:
    data = recipe.data
    for name in ("val", "test"):
        path = getattr(data, name)
        if f"data.{name}" not in given or not isinstance(path, str):
            continue
        if data.split is not None and _is_manifest(data.train):
            message = f"{path} beside data.split, whose column {data.split} names the {name} rows; delete one of the two"
            yield BrokenRule(f"data.{name}", message, ("data.split", "data.train"))
        elif path == data.train:
            message = f"{path} is data.train as well; give other images{', or a share such as 0.15' * (name == 'val')}"
            yield BrokenRule(f"data.{name}", message, ("data.train",))


def _task(recipe: Recipe) -> Iterator[BrokenRule]:
    """Values that belong to another task. The resolved recipe gives every key, so only values count here, not what was given."""
    task, data, optim = recipe.task, recipe.data, recipe.optim
    for key, value, table in (("optim.loss", optim.loss, LOSSES), ("train.metric", recipe.train.metric, METRICS)):
        if value != "auto" and value not in table[task]:
            owners = either([name for name, words in table.items() if value in words])
            message = f"{value} belongs to task {owners}, and the task is {task}; write {either(['auto', *table[task]])}"
            yield BrokenRule(key, message, ("task",))
    if data.balance not in ("none", *BALANCES.get(task, ())):
        message = f"{data.balance} is not for task {task}; write {either(['none', *BALANCES.get(task, ())])}"
        yield BrokenRule("data.balance", message, ("task",))
    elif data.balance == "focal" and optim.loss not in ("auto", "focal"):
        message = f"{optim.loss} beside data.balance: focal, which is a loss itself; write auto, or another data.balance"
        yield BrokenRule("optim.loss", message, ("data.balance",))
    if task == "classify" and isinstance(data.label, tuple):
        message = f"{shown(list(data.label))} is a list of columns, and an image of task classify has one class; give one column"
        yield BrokenRule("data.label", message, ("task",))
    if task == "regress" and data.classes != "auto":
        yield BrokenRule("data.classes", "the task is regress, which has no classes; delete this key", ("task",))
    if task == "regress" and optim.label_smoothing:
        message = f"{optim.label_smoothing:g} spreads a label over classes, and task regress has none; delete this key"
        yield BrokenRule("optim.label_smoothing", message, ("task",))
    if task == "regress" and optim.cutmix:
        message = f"{optim.cutmix:g} shares out labels by area, and the numbers of task regress are of the whole image; write mixup, or 0"
        yield BrokenRule("optim.cutmix", message, ("task",))
    yield from _segment(recipe)
    for name in ("train", "val", "test") if task in ("multilabel", "regress") else ():
        path = getattr(data, name)
        if isinstance(path, str) and not _is_manifest(path):
            message = f"{path} is no .csv, .tsv or .parquet; class folders give one class an image, and the task is {task}"
            yield BrokenRule(f"data.{name}", message, ("task",))


def _segment(recipe: Recipe) -> Iterator[BrokenRule]:
    """What masks cannot have, and what only they have."""
    data, default = recipe.data, type(recipe.data).model_fields["ignore_index"].default
    if recipe.task != "segment":
        if data.ignore_index != default:
            yield BrokenRule(
                "data.ignore_index", f"only masks have ignored pixels, and the task is {recipe.task}; delete this key", ("task",)
            )
        return
    if isinstance(data.label, tuple):
        message = f"{shown(list(data.label))} is a list of columns, and an image of task segment has one mask; give one column"
        yield BrokenRule("data.label", message, ("task",))
    if data.fit == "crop":
        message = "crop looks at a window of each image, and a mask is wanted of all of it; write tile, which trains on the same windows"
        yield BrokenRule("data.fit", message, ("task",))
    if data.region is not None:
        yield BrokenRule("data.region", "is not there yet for task segment; cut images and masks, or delete this key", ("task",))
    if isinstance(data.classes, tuple) and all(map(str.isdecimal, data.classes)) and str(data.ignore_index) in data.classes:
        message = f"{data.ignore_index} is a class of data.classes; write null, or a value that is no class"
        yield BrokenRule("data.ignore_index", message, ("data.classes",))
    for name in ("mixup", "cutmix"):
        if value := getattr(recipe.optim, name):
            yield BrokenRule(
                f"optim.{name}", f"{value:g} mixes labels of whole images, and the task is segment; delete this key", ("task",)
            )
    if recipe.optim.loss == "dice" and recipe.optim.label_smoothing:
        message = f"{recipe.optim.label_smoothing:g} is for cross entropy, and optim.loss is dice; delete this key, or write dice_ce"
        yield BrokenRule("optim.label_smoothing", message, ("optim.loss",))
