"""Optimizer, learning rate and schedule: each `auto` here is a value with its reason. What is trained at all is in `freezing`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from timm.optim import create_optimizer_v2
from torch import nn
from torch.optim import Optimizer

from hiresvis.train.freezing import classifier_parameters

OptimizerName = Literal["adamw", "sgd", "lion", "muon"]
ScheduleName = Literal["cosine", "step", "plateau", "constant"]

# timm's name and options.
_OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "adamw": ("adamw", {"fused": True}),
    "sgd": ("sgd", {"fused": True, "momentum": 0.9}),
    "lion": ("lion", {"foreach": False}),
    "muon": ("nmuon", {"momentum": 0.95}),
}

# Learning rates at the reference batch of 64; how they follow the batch is in `auto_lr`.
_REFERENCE_BATCH = 64
_ADAMW_LR: Mapping[str, float] = {"full": 5e-4, "transformer": 1e-4, "scratch": 1e-3, "head": 5e-3}
_SGD_LR: Mapping[str, float] = {"full": 0.01, "transformer": 0.01, "scratch": 0.025, "head": 0.1}
_LORA_FACTOR = 10  # over fine-tuning all layers
# A run that sees few images has few steps to move the weights by, and bears longer ones where batch statistics follow them.
_SHORT_RUN_IMAGES, _SHORT_RUN_FACTOR = 20_000, 4.0
_CASES: Mapping[str, str] = {
    "full": "fine-tuning all layers",
    "transformer": "fine-tuning a transformer without layer decay",
    "scratch": "training from scratch",
    "head": "training the classifier alone",
}
_FLOOR = 0.01  # the cosine ends at this share of the learning rate
_STEP = 0.1  # what the step schedule multiplies by, after each third of the run (He et al. 2016: 30 and 60 of 90 epochs)
_LION_SHARE = 0.2  # of AdamW's learning rate: a step of signs is larger (the paper has a third to a tenth)
PLATEAU_EPOCHS, PLATEAU = 2, 0.3  # epochs without a better metric or loss after which the plateau schedule multiplies by this


def build_optimizer(
    model: nn.Module, *, name: OptimizerName, lr: float, weight_decay: float = 0.05, layer_decay: float | None = None
) -> Optimizer:
    """timm's optimizer over the parameters that require a gradient.

    AdamW; SGD with Nesterov momentum 0.9; Lion (Chen et al. 2023); Muon with Nesterov momentum 0.95 (Jordan et al. 2024), scaled to
    AdamW's step size (Liu et al. 2025), which leaves vectors, the first layer and the classifier to AdamW.

    Norms, biases and what the model names in `no_weight_decay` are not decayed. With layer_decay, a group's `lr_scale` is layer_decay to
    the power of its layer's distance from the head; `Schedule.apply` multiplies by it. The fused kernels are taken, on CPU as on CUDA:
    the foreach ones allocate temporaries as large as the trained parameters, and the optimizer step could become the peak.

    Raises:
        ValueError: an unknown name, or no parameter requires a gradient.
    """
    if name not in _OPTIMIZERS:
        raise ValueError(f"optimizer {name!r} is not one of {', '.join(_OPTIMIZERS)}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("no parameter of the model requires a gradient: nothing would be trained")
    timm_name, options = _OPTIMIZERS[name]
    if name == "muon":
        options = {**options, "fallback_list": _ends(model)}
    optimizer = create_optimizer_v2(model, opt=timm_name, lr=lr, weight_decay=weight_decay, layer_decay=layer_decay, **options)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)  # until the schedule sets it; timm's optimizers do not apply the scale
    return optimizer


def _ends(model: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of the first layer and the classifier, whose matrices Muon is not made for."""
    first = getattr(model, "pretrained_cfg", None) or {}
    layers = first.get("first_conv") or ()
    layers = (layers,) if isinstance(layers, str) else tuple(layers)
    stem = (name for name, _ in model.named_parameters() if name.startswith(tuple(f"{layer}." for layer in layers)))
    return (*classifier_parameters(model), *stem)


def is_transformer(model: nn.Module) -> bool:
    """Whether the model is a stack of equal attention blocks (ViT, DeiT, BEiT, EVA, ...). Pyramids such as Swin are not: their stages
    differ in width, and their fine-tuning recipes do not decay by layer or only a little."""
    blocks = getattr(model, "blocks", None)
    return isinstance(blocks, nn.ModuleList | nn.Sequential) and len(blocks) > 0 and all(hasattr(block, "attn") for block in blocks)


def auto_lr(
    name: OptimizerName,
    *,
    batch: int,
    pretrained: bool,
    adapt: str = "full",
    transformer: bool = False,
    layer_decay: float | None = None,
    images: int | None = None,
) -> tuple[float, str]:
    """A learning rate and its reason.

    AdamW scales with the square root of the batch (Malladi et al. 2022, "On the SDEs and scaling rules for adaptive gradient
    algorithms"), SGD linearly (Goyal et al. 2017). The bases at batch 64: AdamW 5e-4 for fine-tuning (with layer decay as in MAE and BEiT,
    He et al. 2022), 1e-4 where a transformer is fine-tuned without layer decay, 1e-3 from scratch (DeiT and ConvNeXt at their batches,
    rescaled); Lion a fifth of AdamW's, Muon the same, for it is scaled to AdamW's
    step size; SGD 0.01 for fine-tuning (the middle of the best range in Kornblith et al. 2019, "Do better ImageNet models transfer
    better?"), 0.1 per 256 from scratch (Goyal). A new linear classifier alone bears ten times more. So do adapters: over many sizes and
    ranks the best rate of LoRA is about ten times that of fine-tuning everything (Schulman et al. 2025, "LoRA Without Regret"); they have
    no layer decay, and a transformer's rate without one is what is multiplied.

    A network with batch statistics is fine-tuned at up to four times the rate where the run is short: a step of Adam moves a weight by
    about the learning rate whatever the gradient, so that the way it goes is as the rate times the root of the steps; and weights in front
    of a BatchNorm may grow without harm (Hoffer et al. 2018, "Norm matters"). ARCHITECTURE.md has the figures. SGD, whose steps grow with
    the gradient, and networks without batch statistics were not measured, and keep their rates.

    Args:
        batch: what the optimizer sees.
        adapt: "full" (also of the second phase of lp_ft), "head" (also of its first) or "lora".
        transformer: `is_transformer(model)`.
        images: that the run sees in all, where a trained BatchNorm takes statistics of its batches; None: there is none.
    """
    times = _LORA_FACTOR if adapt == "lora" else 1
    if adapt == "head":
        case = "head"
    elif not pretrained and adapt != "lora":
        case = "scratch"
    elif transformer and layer_decay is None:
        case = "transformer"
    else:
        case = "full"
    ratio = batch / _REFERENCE_BATCH
    if name == "sgd":
        base, factor, rule = _SGD_LR[case], ratio, f"{batch}/{_REFERENCE_BATCH}"
    else:
        base, factor, rule = _ADAMW_LR[case], math.sqrt(ratio), f"sqrt({batch}/{_REFERENCE_BATCH})"
        base *= _LION_SHARE if name == "lion" else 1.0
    short = 1.0
    if case == "full" and adapt != "lora" and name != "sgd" and images is not None:
        short = min(_SHORT_RUN_FACTOR, max(1.0, math.sqrt(_SHORT_RUN_IMAGES / images)))
    value = float(f"{times * base * factor * short:.3g}")  # what is printed is what is used
    if adapt == "lora":
        return value, f"{name}, low-rank adapters, {times} times the rate of {_CASES[case]}: {times} x {base:g} x {rule}"
    more = f" x {short:.3g}, for batch statistics and a run of {images} images" if short > 1 else ""
    return value, f"{name}, {_CASES[case]}: {base:g} x {rule}{more}"


def auto_layer_decay(model: nn.Module, *, pretrained: bool = True, adapt: str = "full") -> tuple[float | None, str]:
    """Layer-wise learning-rate decay and its reason: 0.75 for pretrained transformers (BEiT, Bao et al. 2022; MAE, He et al. 2022)."""
    if adapt == "lora":
        return None, "adapters: the weights themselves do not move, and every adapter begins at zero"
    if not pretrained:
        return None, "no pretrained layers to keep"
    if is_transformer(model):
        return 0.75, "pretrained transformer: early layers move less (BEiT, MAE)"
    return None, "not a plain transformer: all layers share the learning rate"


def warmup_steps(warmup: float | int | str, steps: int) -> int:
    """Optimizer steps of warm-up.

    Args:
        warmup: "5%" or a float below 1: a share of steps; an int (or a float of at least 1): steps.

    Raises:
        ValueError: negative, or not less than steps.
    """
    text = str(warmup).strip()
    if text.endswith("%"):
        count = round(float(text[:-1]) / 100 * steps)
    else:
        number = float(text)
        count = round(number * steps) if 0 < number < 1 else int(number)
    if not 0 <= count < max(steps, 1):
        raise ValueError(f"warmup {warmup} is {count} steps, not between 0 and the run's {steps} steps")
    return count


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate as a pure function of the optimizer step: nothing to save, nothing to get out of step on resume.

    Attributes:
        lr: the peak.
        kind: cosine (to 1% of lr at the last step); step (a tenth after each third of the run); plateau (a third, about, after two epochs
            without a better metric or loss: the trainer's matter, which knows the metric); or constant.
        warmup: steps of linear rise from lr / (warmup + 1).
        steps: that it is made for.
        before: the schedule of the run's first phase, whose steps come first; None: there is none.
    """

    lr: float
    kind: ScheduleName
    warmup: int
    steps: int
    before: Schedule | None = None

    @property
    def all_steps(self) -> int:
        """Of the run, its first phase included."""
        return self.steps + (self.before.all_steps if self.before else 0)

    def at(self, step: int) -> float:
        """The learning rate of the run's optimizer step `step`, from 0. Steps after the last one keep its rate."""
        if self.before is not None:
            if step < self.before.steps:
                return self.before.at(step)
            step -= self.before.steps
        if step < self.warmup:
            return self.lr * (step + 1) / (self.warmup + 1)
        if self.kind in ("constant", "plateau"):
            return self.lr
        if self.kind == "step":
            return self.lr * _STEP ** min(2, 3 * step // max(1, self.steps))
        done = min(1.0, (step - self.warmup) / max(1, self.steps - 1 - self.warmup))
        return self.lr * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))

    def scale_after(self, epochs_since_best: int) -> float:
        """What an epoch's result does to the learning rate from here on; `epochs_since_best` as it is after that epoch."""
        stands_still = epochs_since_best > 0 and epochs_since_best % PLATEAU_EPOCHS == 0
        return PLATEAU if self.kind == "plateau" and stands_still else 1.0

    def apply(self, optimizer: Optimizer, step: int, scale: float = 1.0) -> float:
        """Sets every group's learning rate (times its `lr_scale`) for this step and returns the one without that.

        Args:
            scale: of the whole run, below 1 after it had diverged, or stood still under the plateau schedule.
        """
        lr = self.at(step) * scale
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        return lr


def build_schedule(*, lr: float, schedule: ScheduleName, warmup: float | int | str, steps: int, before: Schedule | None = None) -> Schedule:
    """The schedule of `steps` optimizer steps, of a whole run or of what follows on `before`.

    Raises:
        ValueError: an unknown schedule, or a warm-up that does not fit in steps.
    """
    known = get_args(ScheduleName)
    if schedule not in known:
        raise ValueError(f"schedule {schedule!r} is not one of {', '.join(known)}")
    return Schedule(lr=lr, kind=schedule, warmup=warmup_steps(warmup, steps), steps=steps, before=before)
