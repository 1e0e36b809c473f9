"""The model card of an exported run: README.md as the Hugging Face hub reads it, made from the run's own files.

Between the dashes stands YAML that programs read (library, task, metrics); below, what people need: how to load it, how pixels are made,
what it was trained on, what it scored and how far that can be believed, and what that does not say. No licence is named: whose it is to
give is not known here; that of the weights it began with is told where timm states one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiresvis import __version__
from hiresvis.backbone.build import weights_config
from hiresvis.data.contract import Contract
from hiresvis.recipe.tasks import METRICS
from hiresvis.run import RunDirectory
from hiresvis.run.directory import read_events
from hiresvis.run.events import Evaluated, RunFinished, RunStarted
from hiresvis.train.snapshot import read_weights_metadata
from hiresvis.trained import Trained
from hiresvis.ui.text import interval_text
from hiresvis.units import format_duration

CARD = "README.md"
LOCAL_DIR_SINCE = "1.0.16"  # of timm: `local-dir:` names
_PIPELINES = {"classify": "image-classification", "multilabel": "image-classification"}  # the hub knows none for numbers
_TAGS = {"classify": "image-classification", "multilabel": "multi-label-image-classification", "regress": "image-regression"}
_SPLITS = {"val": "validation", "test": "test"}
_MOST_CLASSES = 200


def model_card(run: Path, trained: Trained) -> str:
    """The card's text.

    Args:
        run: its folder.

    Raises:
        RunFolderError: its events cannot be read.
    """
    story = _story(RunDirectory.open(run))
    results = story.results
    parts = [
        _front_matter(run.name, trained, results),
        f"# {run.absolute().name}\n",
        _about(trained),
        "## Use\n",
        _use(trained),
        "## Pixels\n",
        _pixels(trained),
        "## Outputs\n",
        _outputs(trained),
        "## Training\n",
        _training(trained, story),
        "## Results\n",
        _results(trained, story),
        "## Limits\n",
        _limits(trained, results),
    ]
    return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class _Story:
    """What a run's events say of its best weights.

    Attributes:
        finished: None: the run goes on, or was stopped, since its last start.
        best: the validation in training that chose the weights; None: not known.
    """

    started: RunStarted | None
    finished: RunFinished | None
    best: Evaluated | None

    @property
    def results(self) -> Mapping[str, Mapping[str, Any]]:
        """By split, as `evaluate --json`; of a run that has not ended that one validation, without intervals."""
        if self.finished is not None:
            return self.finished.results
        if self.best is None or self.started is None:
            return {}
        return {"val": {"images": self.started.num_val, "loss": self.best.loss, **self.best.metrics}}


def _story(run: RunDirectory) -> _Story:
    """Events are held against what the weights' own file says, since a run may have ended, gone on and found better ones.

    Raises:
        RunFolderError: its events cannot be read.
    """
    started: RunStarted | None = None
    finished: RunFinished | None = None
    best: Evaluated | None = None
    note = read_weights_metadata(run.best_weights)
    for event in read_events(run.events):
        if isinstance(event, RunStarted):
            started, finished = event, None
        elif isinstance(event, RunFinished):
            finished = event
        elif isinstance(event, Evaluated) and event.split == "val":
            known = (str(event.epoch), event.metric, repr(event.value)) == tuple(note.get(key) for key in ("epoch", "metric", "value"))
            best = event if known else best
    return _Story(started, finished, best)


def _front_matter(name: str, trained: Trained, results: Mapping[str, Mapping[str, Any]]) -> str:
    task = trained.contract.task
    fields: dict[str, Any] = {"library_name": "timm", "tags": [_TAGS[task], "timm", "hiresvis"]}
    if task in _PIPELINES:
        fields["pipeline_tag"] = _PIPELINES[task]
    cfg = weights_config(trained.backbone.name)
    if trained.loaded.recipe.model.pretrained is True and cfg.hf_hub_id:
        fields["base_model"] = cfg.hf_hub_id.partition("@")[0]
    fields["metrics"] = list(METRICS[task])
    rows = [
        {
            "task": {"type": _PIPELINES.get(task, _TAGS[task])},
            "dataset": {"name": f"{_SPLITS[split]} images of the run", "type": "imagefolder", "split": split},
            "metrics": [
                {"type": metric, "value": value, "name": f"{metric}, {found['images']} images{interval_text(_interval(found, metric))}"}
                for metric, value in _metrics(task, found)
            ],
        }
        for split, found in results.items()
    ]
    if rows:
        fields["model-index"] = [{"name": name, "results": rows}]
    # JSON is YAML, and leaves no text to be read as something else.
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items()]
    return "\n".join(["---", *lines, "---\n"])


def _metrics(task: str, found: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a split by name, without those that are none."""
    for metric in METRICS[task]:
        if isinstance(value := found.get(metric), int | float) and math.isfinite(value):
            yield metric, float(value)


def _interval(found: Mapping[str, Any], metric: str) -> Sequence[float] | None:
    ends: Sequence[float] | None = found.get("intervals", {}).get(metric)
    return ends


def _about(trained: Trained) -> str:
    contract, model = trained.contract, trained.backbone.model
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    height, width = contract.image_size
    what = {
        "classify": "tells which one of {0} classes an image is of",
        "multilabel": "tells which of {0} labels apply to an image",
        "regress": "estimates {0} numbers from an image",
    }[contract.task].format(len(contract.classes))
    names = ", ".join(map(_code, contract.classes[:_MOST_CLASSES]))
    more = f" and {len(contract.classes) - _MOST_CLASSES} more, in config.json" if len(contract.classes) > _MOST_CLASSES else ""
    return (
        f"{_code(trained.backbone.name)} of timm, {parameters:.1f} million parameters, at {width} x {height} px (width x height), "
        f"fine-tuned with hiresvis {__version__}. It {what}, in this order: {names}{more}.\n"
    )


def _code(text: str) -> str:
    """A name as code, which Markdown leaves as it is."""
    fence = "``" if "`" in text else "`"
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def _use(trained: Trained) -> str:
    return (
        "```python\n"
        "import timm\n\n"
        f"# timm {LOCAL_DIR_SINCE} or newer; on the hub hf-hub:NAME\n"
        'model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()\n'
        "logits = model(pixels)  # (batch, channels, height, width), made as said below\n"
        "```\n\n"
        "An older timm builds it from the two files:\n\n"
        "```python\n"
        "import json, timm\n"
        "from safetensors.torch import load_file\n\n"
        'config = json.load(open("config.json"))\n'
        'model = timm.create_model(config["architecture"], num_classes=config["num_classes"], **config["model_args"]).eval()\n'
        'model.load_state_dict(load_file("model.safetensors"))\n'
        "```\n"
    )


def _pixels(trained: Trained) -> str:
    contract = trained.contract
    height, width = contract.image_size
    fit = {
        "resize": f"The whole image becomes {width} x {height} px, whatever its shape",
        "letterbox": f"The image keeps its shape inside {width} x {height} px, in the middle of the background {contract.background}",
        "crop": f"The middle of the image, {width} x {height} px at full resolution, is what the model sees",
        "tile": f"Windows of {width} x {height} px at full resolution cover the image, {contract.overlap:.0%} of each shared; the mean of "
        "their logits is the image's",
    }[contract.fit]
    sizes = "" if contract.fit in ("crop", "tile") else ": sides that shrink by averaging areas (opencv's `INTER_AREA`), others "
    scale = "bytes are divided by 255, 16 bits by 65535"
    if contract.scale.kind == "range":
        scale = f"values become (value - {contract.scale.low:g}) / {contract.scale.high - contract.scale.low:g}, cut to 0 and 1"
    return (
        f"1. Decode, turn upright by EXIF, lay transparency on {contract.background}; {contract.channels} channels, grey repeated.\n"
        f"2. {fit}{f'{sizes}{contract.interpolation}' if sizes else ''}.\n"
        f"3. {scale[:1].upper()}{scale[1:]}.\n"
        f"4. Subtract the mean {_numbers(contract.mean)} and divide by {_numbers(contract.std)}, channel by channel.\n\n"
        "`contract.json` has all of it exactly. timm's own transforms (`config.json`) come near, and smooth more when they shrink.\n"
    )


def _numbers(values: Sequence[float]) -> str:
    return f"({', '.join(f'{value:.6g}' for value in values)})"


def _outputs(trained: Trained) -> str:
    contract = trained.contract
    if contract.task == "regress":
        rows = zip(contract.classes, contract.target_mean, contract.target_std, strict=True)
        return "".join(f"- {_code(name)} is logit x {std:.6g} + {mean:.6g}\n" for name, mean, std in rows)
    if contract.task == "classify" and contract == contract.unfitted:
        return "Probabilities are the softmax of logits.\n"
    if contract.task == "classify":
        return f"Probabilities are the softmax of logits / {contract.temperature:.4g}, a temperature fitted to the validation images.\n"
    told = ", ".join(f"{_code(name)} {value:.3g}" for name, value in zip(contract.classes, contract.thresholds, strict=False))
    fitted = f" A label applies from its own threshold on, fitted to the validation images: {told}." if told else " It applies from 0.5 on."
    return f"Each label's probability is the sigmoid of its logit.{fitted}\n"


def _training(trained: Trained, story: _Story) -> str:
    recipe, started, finished = trained.loaded.recipe, story.started, story.finished
    cfg = weights_config(trained.backbone.name)
    source = recipe.model.pretrained
    if source is False:
        begun = "random weights"
    elif source is True:
        begun = f"timm's weights {_code(str(cfg.hf_hub_id or cfg.url))}" + (f", which timm gives as {cfg.license}" if cfg.license else "")
    else:
        begun = f"the weights of {_code(str(source).rpartition('/')[2])}"
    lines = [f"begun from {begun}"]
    if started is not None:
        lines.append(f"{started.num_train} training images, {started.num_val} for validation, which chose {_chosen(trained.contract)}")
    if finished is not None:
        device = started.device if started is not None else "one device"
        took = f" in {format_duration(finished.seconds)}" if finished.seconds else ""
        lines.append(f"{finished.epochs} epochs{took} on {device}; the weights are of epoch {finished.best_epoch}")
    else:
        lines.append("the run has not ended: these are the best weights so far" + (f", of epoch {story.best.epoch}" if story.best else ""))
    optim = recipe.optim
    lines.append(f"{optim.name}, learning rate {optim.lr:.3g}" if isinstance(optim.lr, float) else optim.name)
    lines[-1] += (
        f", batch {recipe.train.batch}, augmentation {recipe.data.augment if isinstance(recipe.data.augment, str) else 'by a list'}"
    )
    lines[-1] += f", trained: {recipe.model.adapt}"
    return "".join(f"- {line}\n" for line in lines)


def _chosen(contract: Contract) -> str:
    """What validation has decided."""
    fitted = {"classify": "the temperature", "multilabel": "the thresholds"}.get(contract.task)
    return "the epoch" if fitted is None or contract == contract.unfitted else f"the epoch and {fitted}"


def _results(trained: Trained, story: _Story) -> str:
    """A table of the splits; the metric that decided stands first."""
    results = story.results
    if not results:
        return "None: the run has not ended. `hiresvis evaluate RUN` measures it.\n"
    names = [trained.metric, *(name for name in METRICS[trained.contract.task] if name != trained.metric)]
    head = ["", *(f"{_SPLITS[split]}, {found['images']} images" for split, found in results.items())]
    rows = [head, ["---"] * len(head)]
    for name in names:
        numbers = {split: dict(_metrics(trained.contract.task, found)).get(name) for split, found in results.items()}
        cells = [
            "-" if (value := numbers[split]) is None else f"{value:.4g}{interval_text(_interval(found, name))}"
            for split, found in results.items()
        ]
        rows.append([name, *cells])
    by = "groups" if any(found.get("intervals_by") == "group" for found in results.values()) else "images"
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    if story.finished is None:
        at = ", labels at 0.5" if trained.contract.task == "multilabel" else ""
        told = f"The run has not ended: this is the validation in training that chose the weights{at}. `hiresvis evaluate RUN` tells more"
    else:
        told = f"In brackets: 95% intervals over draws of the {by}. `{trained.metric}` of validation chose the weights"
    return f"{table}\n{told}.\n"


def _limits(trained: Trained, results: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["The numbers hold for images like those of the run: the same source, camera and preparation. Others were not measured."]
    if results and "test" not in results:
        lines.append("There is no result of a test split: the validation images chose the weights, so their numbers are on the high side.")
    if (smallest := min((int(found["images"]) for found in results.values()), default=0)) and smallest < 100:
        known = any(found.get("intervals") for found in results.values())
        lines.append(f"{smallest} images are few{': the intervals above are what that leaves open' if known else ''}.")
    calibration = next((found["calibration"]["error"] for found in reversed(list(results.values())) if "calibration" in found), None)
    if calibration is not None:
        lines.append(f"Probabilities are off by {calibration:.3f} in the mean (calibration error) where that was measured.")
    if trained.contract.task != "regress":
        lines.append("An image of none of the classes still gets scores; nothing tells it apart.")
    return "".join(f"- {line}\n" for line in lines)
