"""`hiresvis export`: a run's best weights for use elsewhere, the preprocessing contract beside them, and proof that they compute the same.

    --to safetensors    model.safetensors and config.json, in timm's own layout, and a model card; built again by timm alone and compared
                        bit for bit
    --to onnx           model.onnx; run by onnxruntime on validation images and compared with torch; on request with the contract's resizing
                        in it, and beside it a copy of 8-bit weights

Weights are fp32 whatever the run's precision, and no plan is part of them. A folder takes its name when it is whole and compared.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiresvis import __version__
from hiresvis.backbone.portable import CONFIG, WEIGHTS, rebuild, timm_config
from hiresvis.card import CARD, model_card
from hiresvis.data.contract import Contract, load_image
from hiresvis.data.decode import probe
from hiresvis.data.loader import EvalLoader
from hiresvis.data.sources import Sample
from hiresvis.errors import DataError, HiresvisError, RecipeError
from hiresvis.export_folder import whole_folder
from hiresvis.onnx_graph import INPUT, OPSET, OUTPUTS, Graph, need_onnx, write_int8, write_onnx
from hiresvis.onnx_pixels import BOUND_LEVELS, compare_pixels, raw_images, refuse_fit
from hiresvis.own_data import own_datasets
from hiresvis.run.files import json_text
from hiresvis.train.snapshot import save_weights
from hiresvis.trained import Trained, open_run
from hiresvis.units import format_size

CONTRACT, ONNX, INT8 = "contract.json", "model.onnx", "model.int8.onnx"
_OURS = frozenset({CONTRACT, CONFIG, WEIGHTS, CARD, ONNX, INT8, f"{ONNX}.data"})
_COMPARED, _BATCH = 20, 2  # images of val, spread over it, and how many at a time
_COMPARED_INT8 = 200  # images on which 8 bits are compared: a changed class is rare
_HELD_BYTES = 1 << 30  # of images to compare on, which several graphs see; fewer are compared where they are larger


@dataclass(frozen=True, slots=True)
class Exported:
    """What `hiresvis export` prints.

    Attributes:
        folder: where the files are.
        files: names and bytes.
        facts: by name: of ONNX input, outputs, classes, opset and exporter, of safetensors model; of both compared.
    """

    folder: str
    files: dict[str, int]
    facts: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain values: folder, files with bytes, and the facts."""
        return {"folder": self.folder, "files": self.files, **self.facts}

    def lines(self) -> list[str]:
        """Text for a terminal."""
        told = [("file", f"{Path(self.folder) / name} ({format_size(size)})") for name, size in self.files.items()]
        if model := self.facts.get("model"):
            told.append(("model", ", ".join(f"{key} {value}" for key, value in model.items())))
        if taken := self.facts.get("input"):
            what = "resized and normalised" if "preprocessing" in self.facts else "normalised"
            told.append(("input", f"{taken['name']} {_shape(taken['shape'])} {taken['dtype']} ({taken['why']}); {what} by the graph"))
            told += [("output", f"{name} {_shape(shape)}") for name, shape in self.facts["outputs"].items()]
            told.append(("graph", f"opset {self.facts['opset']}, by torch's {self.facts['exporter']} exporter"))
        compared = self.facts["compared"]
        text = f"with {compared['with']} on {compared['images']} images of {compared['source']}: "
        if "bound" in compared:
            text += f"logits differ by up to {compared['largest_difference']['logits']:.2g} (bound {compared['bound']['logits']:.2g}), "
            text += f"same class on {compared['same_class']}" if "same_class" in compared else "values in the targets' own units"
        else:
            text += "equal bit for bit"
        told.append(("compared", text))
        if pixels := self.facts.get("preprocessing"):
            text = f"{pixels['images']} whole images: pixels differ from training's by {pixels['largest_level']} of 255 at most, "
            text += f"{pixels['share']:.2%} of them at all; scores from predict's by up to {pixels['scores']:.2g}"
            told.append(("resizing", text + (f", same class on {pixels['same_class']}" if "same_class" in pixels else "")))
        if small := self.facts.get("int8"):
            text = f"{small['images']} images: scores differ from fp32's by up to {small['largest']:.2g}, {small['mean']:.2g} in the mean"
            told.append(("int8", text + (f"; {small['changed']} predictions changed" if "changed" in small else "")))
        return [f"{name:8}  {line}" for name, line in told]


def export(
    run: Path,
    *,
    to: str,
    out: Path | None = None,
    pixels: str = "auto",
    with_preprocessing: bool = False,
    int8: bool = False,
    force: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Writes the export of a run.

    Args:
        run: a run folder.
        to: "safetensors" or "onnx".
        out: the folder to make; RUN/export/<to> where None.
        pixels: what the ONNX graph takes: "uint8", "float32" (0 to 1), or "auto": bytes, unless the contract has a number range or
            images of val have more than 8 bits.
        with_preprocessing: the graph takes bytes of any size and resizes them by the contract.
        int8: a second graph beside the first, of 8-bit weights.
        force: replace an export that is there.
        say: told what takes time before it starts, and what was not as it should be.

    Raises:
        RecipeError: bytes are asked for, and the contract has a number range; or a graph cannot do what the contract asks for.
        RunFolderError: no run, one without weights, or something at `out` already.
        MissingExtra: --to onnx without its packages.
        EnvironmentFailed: the disk.
        HiresvisError: what was written does not compute what the run's model does; nothing is left at `out`.
    """
    if to == "onnx":
        need_onnx()
    elif with_preprocessing or int8:
        raise RecipeError("--with-preprocessing and --int8 are of a graph, and weights for timm are none; give --to onnx")
    trained = open_run(run)
    if trained.contract.task == "segment":
        raise RecipeError(
            f"{run}: a run of task segment is not exported by this release: timm alone cannot build its decoder, and no graph was held "
            f"against it yet. Its weights are {run / 'weights' / 'best.safetensors'}; hiresvis predict writes masks"
        )
    if pixels == "uint8" and trained.contract.scale.kind == "range":
        low, high = trained.contract.scale.low, trained.contract.scale.high
        raise RecipeError(f"--pixels uint8: this run's images have a number range, {low:g} to {high:g}, which becomes 0 to 1; use float32")
    out = run / "export" / to if out is None else out
    with whole_folder(out, ours=_OURS, force=force) as stage:
        samples = _val_samples(run, trained, say)
        contract = json_text(trained.contract.to_json(), indent=2) + "\n"
        (stage / CONTRACT).write_text(contract, encoding="utf-8")
        if to == "onnx":
            facts = _write_onnx(trained, samples, stage, pixels, say, with_preprocessing=with_preprocessing, int8=int8)
        else:
            facts = _write_safetensors(trained, samples, stage, say)
            (stage / CARD).write_text(model_card(run, trained), encoding="utf-8")
        files = {path.name: path.stat().st_size for path in sorted(stage.iterdir())}
    return Exported(str(out), files, facts)


def _write_safetensors(trained: Trained, samples: list[Sample], stage: Path, say: Callable[[str], None]) -> dict[str, Any]:
    contract, model = trained.contract, trained.backbone.model
    config = timm_config(
        trained.backbone,
        classes=contract.classes,
        image_size=contract.image_size,
        mean=contract.mean,
        std=contract.std,
        interpolation=contract.interpolation,
    )
    (stage / CONFIG).write_text(json_text(config, indent=2) + "\n", encoding="utf-8")
    metadata = {"config": json_text(config), "contract": json_text(contract.to_json()), "hiresvis": __version__}
    save_weights(stage / WEIGHTS, model.state_dict(), metadata={"format": "pt", **metadata})
    shutil.copymode(stage / CONFIG, stage / WEIGHTS)  # safetensors gives a file to its owner alone; this one is to be handed on
    batches, source = _batches(trained, samples, "float32", say)
    own, again = Graph(model, contract), Graph(rebuild(stage), contract)
    with torch.no_grad():
        same = all(torch.equal(again(pixels)[0], own(pixels)[0]) for pixels in batches)
    if not same:
        raise HiresvisError(f"what timm builds from {CONFIG} gives other logits than the run's model; nothing is written")
    return {
        "model": {"architecture": config["architecture"], "num_classes": config["num_classes"], **config["model_args"]},
        "compared": {"with": "the run's model", "images": sum(map(len, batches)), "source": source},
    }


def _write_onnx(
    trained: Trained,
    samples: list[Sample],
    stage: Path,
    pixels: str,
    say: Callable[[str], None],
    *,
    with_preprocessing: bool,
    int8: bool,
) -> dict[str, Any]:
    contract = trained.contract
    dtype, why = _pixel_type(trained, samples) if pixels == "auto" else (pixels, "given")
    shape = ["batch", *contract.image_size, contract.channels]
    raw: list[tuple[Sample, np.ndarray]] = []
    if with_preprocessing:
        refuse_fit(contract, dtype)
        shape = ["batch", "height", "width", contract.channels]
        raw = _held(raw_images(_spread(samples, _COMPARED), contract), lambda pair: pair[1].nbytes)
        batches, source = _whole(array for _, array in raw), "val"
        if not raw:
            source = "random pixels"
            batches = [torch.randint(0, 256, (_BATCH, *(side + 17 for side in contract.image_size), contract.channels), dtype=torch.uint8)]
    else:
        batches, source = _batches(trained, samples, dtype, say)
    facts = {
        "input": {"name": INPUT, "shape": shape, "dtype": dtype, "why": why},
        "outputs": {name: ["batch", len(contract.classes)] for name in OUTPUTS},
        "classes": list(contract.classes),
        "opset": OPSET,
    }
    metadata = {"contract": contract.to_json(), "model": trained.backbone.name, "hiresvis": __version__, **facts}
    texts = {key: value if isinstance(value, str) else json_text(value) for key, value in metadata.items()}
    say(f"exporting {trained.backbone.name} and comparing it on {sum(map(len, batches))} images")
    graph = Graph(trained.backbone.model, contract, fits=with_preprocessing).eval()
    if raw:
        facts["preprocessing"] = _preprocessing(graph, raw, contract)
    found = write_onnx(graph, batches, stage / ONNX, texts)
    compared = {
        "with": "torch on the CPU, fp32",
        "images": found.num_images,
        "source": source,
        "largest_difference": dict(found.differences),
        "bound": dict(found.bounds),
        **({} if contract.task == "regress" else {"same_class": found.num_agreeing}),
    }
    if int8:
        many = batches if source != "val" else _one_by_one(samples, contract, dtype, whole=with_preprocessing)
        small = write_int8(stage / ONNX, stage / INT8, many, contract)
        changed = {} if contract.task == "regress" else {"changed": small.num_changed}
        facts["int8"] = {"images": small.num_images, "largest": small.largest, "mean": small.mean, **changed}
    return {**facts, "exporter": found.exporter, "compared": compared}


def _whole(raw: Iterable[np.ndarray]) -> list[Tensor]:
    """Images of their own sizes, each a batch but for the first: two of one size, since a batch of one tells an exporter nothing. Where no
    other has the first one's size it stands there twice."""
    batches = [torch.from_numpy(array)[None] for array in raw]
    if not batches:
        return []
    first, *others = batches
    mate = next((number for number, other in enumerate(others) if other.shape == first.shape), None)
    return [torch.cat([first, first if mate is None else others.pop(mate)]), *others]


def _preprocessing(graph: Graph, raw: Sequence[tuple[Sample, np.ndarray]], contract: Contract) -> dict[str, Any]:
    """How far the graph's own resizing is from training's: in pixels of the same decoded images, and in the scores that predict gives,
    which decodes large JPEGs at a part of their size.

    Raises:
        HiresvisError: in a pixel by more than the bound.
    """
    assert graph.fit is not None
    pixels = compare_pixels(graph.fit, [array for _, array in raw], contract)
    if pixels.largest > BOUND_LEVELS:
        raise HiresvisError(
            f"--with-preprocessing: the graph's resizing differs from training's by {pixels.largest} of 255, above {BOUND_LEVELS} "
            f"({pixels.share:.2%} of values differ); export without it, and make the pixels as contract.json says"
        )
    plain, preprocess = Graph(graph.model, contract).eval(), contract.preprocess()
    largest, agreeing = 0.0, 0
    for sample, array in raw:
        read = load_image(sample.path, preprocess, max_pixels=contract.max_pixels, region=sample.region)
        with torch.no_grad():
            mine, theirs = (one(torch.from_numpy(value)[None])[1] for one, value in ((graph, array), (plain, read)))
        largest, agreeing = max(largest, float((mine - theirs).abs().max())), agreeing + int(mine.argmax() == theirs.argmax())
    same = {"same_class": agreeing} if contract.task == "classify" else {}
    return {"images": len(raw), "largest_level": pixels.largest, "share": pixels.share, "scores": largest, **same}


def _held(found: Iterable[Any], bytes_of: Callable[[Any], int]) -> list[Any]:
    """As many as `_HELD_BYTES` have room for, and the first in any case."""
    held, held_bytes = list[Any](), 0
    for one in found:
        held_bytes += bytes_of(one)
        if held and held_bytes > _HELD_BYTES:
            break
        held.append(one)
    return held


def _one_by_one(samples: list[Sample], contract: Contract, dtype: str, *, whole: bool) -> Iterator[Tensor]:
    """Batches of `_COMPARED_INT8` images spread over val, each read when it is asked for.

    Args:
        whole: an image of its own size each, for a graph that resizes.
    """
    spread = _spread(samples, _COMPARED_INT8)
    if whole:
        yield from (torch.from_numpy(array)[None] for _, array in raw_images(spread, contract))
        return
    with closing(EvalLoader.by(contract, spread, batch=_BATCH, bad_images="skip")) as loader:
        yield from _pixels(loader, dtype, _COMPARED_INT8)


def _pixels(loader: EvalLoader, dtype: str, most: int) -> Iterator[Tensor]:
    """Batches of the first so many inputs: of images in windows there can be hundreds of one."""
    return (_as_type(item.images, dtype) for item in islice(loader, most // _BATCH) if item.indices)


def _spread(samples: list[Sample], most: int) -> list[Sample]:
    return [samples[position * len(samples) // most] for position in range(most)] if len(samples) > most else samples


def _val_samples(run: Path, trained: Trained, say: Callable[[str], None]) -> list[Sample]:
    """The run's validation images; none where its data is gone."""
    try:
        return list(own_datasets(run, trained.loaded).val.samples)
    except DataError as error:
        say(f"the run's validation images cannot be had ({error.problems[0]}); random pixels are compared instead")
        return []


def _pixel_type(trained: Trained, samples: list[Sample]) -> tuple[str, str]:
    """(dtype, why) of the graph's input."""
    contract = trained.contract
    if contract.scale.kind == "range":
        return "float32", "the contract maps values from its own range to 0 to 1"
    deep = 0
    for sample in samples:
        with suppress(DataError):
            deep += probe(sample.path, contract.max_pixels).bits > 8
    if deep:
        return "float32", f"{deep} of {len(samples)} images of val have more than 8 bits; bytes are divided by 255"
    return "uint8", f"all {len(samples)} images of val have 8 bits" if samples else "the contract takes bytes as they are"


def _batches(trained: Trained, samples: list[Sample], dtype: str, say: Callable[[str], None]) -> tuple[list[Tensor], str]:
    """Pixels to compare on, the first batch of two or more: images of val spread over it, or random ones."""
    contract = trained.contract
    with closing(EvalLoader.by(contract, _spread(samples, _COMPARED), batch=_BATCH, bad_images="skip")) as loader:
        found = _held(_pixels(loader, dtype, _COMPARED), lambda pixels: pixels.nbytes)
    if not found:
        if samples:
            say(f"no image of val can be read ({loader.skipped[0][0]}  {loader.skipped[0][1]}); random pixels are compared instead")
        shape = (_BATCH, *contract.image_size, contract.channels)
        bytes_ = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        return [_as_type(bytes_, dtype)], "random pixels"
    if len(found[0]) < _BATCH:
        found[0] = found[0].repeat(_BATCH, 1, 1, 1)
    return found, "val"


def _as_type(images: Tensor, dtype: str) -> Tensor:
    """Bytes or 0 to 1, whatever the loader gave."""
    if dtype == "uint8":
        return images if images.dtype == torch.uint8 else (images * 255).round().to(torch.uint8)
    return images.float() / 255 if images.dtype == torch.uint8 else images


def _shape(sizes: list[Any]) -> str:
    return f"({', '.join(map(str, sizes))})"
