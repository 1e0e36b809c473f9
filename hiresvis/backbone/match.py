"""Whether a plan belongs to a model: the same parameters, the same ones trained, and the libraries that it was made with."""

from __future__ import annotations

import hashlib

import timm
import torch
from torch import nn

from hiresvis.backbone.compiled import refuse_wrappers
from hiresvis.backbone.segments import is_planned
from hiresvis.memory.plan import CheckpointPlan

FINGERPRINT = "model"  # its name among a plan's versions


def fingerprint(model: nn.Module) -> str:
    """What a plan depends on in a model's parameters: names, shapes, types, and which are trained."""
    rows = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()[:8]
    return f"{total} parameters in {len(rows)} tensors, {trained} of them trained ({digest})"


def planned_already(model: nn.Module) -> str | None:
    """The name of a module that a plan has taken over, if there is one."""
    return next((name for name, module in model.named_modules() if is_planned(module)), None)


def check_plan(model: nn.Module, plan: CheckpointPlan) -> None:
    """That a plan was made for this model and with these libraries.

    Raises:
        ValueError: it was not, or a plan is applied already; what differs is named.
    """
    refuse_wrappers(model)
    taken = planned_already(model)
    if taken is not None:
        raise ValueError(f"a plan is applied already (at {taken!r}); remove it first")
    for name, version in (("torch", torch.__version__), ("timm", timm.__version__)):
        planned = plan.versions.get(name)
        if planned is not None and _release(planned) != _release(version):
            raise ValueError(
                f"the plan was made with {name} {planned}, and this is {name} {version}: what a unit saves can differ. Plan again"
            )
    planned, found = plan.versions.get(FINGERPRINT), fingerprint(model)
    if planned is not None and planned != found:
        inside = next((name for name, part in model.named_children() if fingerprint(part) == planned), None)
        if inside is not None:
            raise ValueError(f"the plan is for the model inside this {type(model).__name__}; apply it to that: model.{inside}")
        raise ValueError(
            f"the plan is for another model, or for other trained parameters: it was made for {plan.model} with {planned}, "
            f"and this {type(model).__name__} has {found}. Plan again"
        )


def _release(version: str) -> str:
    """Without the build: 2.14.1+cu130 and 2.14.1+cpu are one release."""
    return version.partition("+")[0]
