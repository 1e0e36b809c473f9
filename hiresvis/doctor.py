"""`hiresvis doctor`: what this machine has, what is missing and how to get it, whether plans hold here, and a whole run in small.

A plan is proved on a model by real steps: with it and without it, bit for bit. The plans tried are the ones of the least
memory and one in between, so that every tier that the model has room for is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hiresvis.backbone.build import build_backbone, weights_config
from hiresvis.backbone.trace import trace_costs
from hiresvis.device import pick_device
from hiresvis.errors import HiresvisError, Problem, RecipeError
from hiresvis.machine import Finding, findings
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.peak import StepSetting
from hiresvis.memory.plan import store_all
from hiresvis.memory.search import Candidate, Limits, Planner
from hiresvis.rehearsal import rehearse
from hiresvis.units import format_size
from hiresvis.verify import verify_plan

_TRUE_SHARE = 0.02  # by which a plan's live tensors may miss; within 1% on all that was tried
SELF_TEST = "test_resnet"  # timm's smallest with batch statistics
_PLANNED = 64  # images that plans are made for, so that activations rule; two of them are run
_CLASSES = 4


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `hiresvis doctor` prints."""

    findings: tuple[Finding, ...]

    @property
    def failed(self) -> bool:
        """Whether something does not work that has to; a missing extra is no such thing."""
        return any(finding.failed for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Plain values: `failed`, and `findings` with subject, text, mend and failed."""
        return {"failed": self.failed, "findings": [asdict(finding) for finding in self.findings]}

    def lines(self) -> list[str]:
        """Text for a terminal."""
        width = max(len(finding.subject) for finding in self.findings)
        lines = []
        for finding in self.findings:
            mark = "FAILED  " if finding.failed else ""
            lines.append(f"{finding.subject.ljust(width)}  {mark}{finding.text}")
            lines += [f"{'':{width}}  {finding.mend}"] if finding.mend else []
        return lines


def doctor(*, verify: str | None = None, image_size: int | None = None, progress: Callable[[str], None] = lambda _: None) -> Diagnosis:
    """Looks at the machine, and proves plans on a model.

    Args:
        verify: a timm model to prove plans on, by itself; None: the machine, and a small model of our choice.
        image_size: of the model in px; None: its own.
        progress: told what takes time before it starts.

    Raises:
        RecipeError: no such model, a size that it does not take, or one that cannot be planned.
    """
    if verify is not None:
        return Diagnosis(tuple(_proofs(verify, image_size, progress)))
    found = [*findings()]
    found += _proofs(SELF_TEST, image_size, progress)
    found += _rehearsed(progress)
    return Diagnosis(tuple(found))


def _rehearsed(progress: Callable[[str], None]) -> Iterator[Finding]:
    """A small run, and how far the plan was from what was measured in it."""
    progress("a whole run in small: drawing images, planning, training, evaluating")
    try:
        found = rehearse()
    except HiresvisError as error:
        yield Finding("small run", str(error), "please report it with these lines, where they do not say what to do", failed=True)
        return
    text = f"{found.num_steps} steps of {found.micro_batch} images on {found.device}: {found.images_per_second:.3g} images/s"
    yield Finding("small run", f"{text}, {found.waiting:.0%} of it waiting for images; {found.seconds:.0f} s in all, report included")
    if found.predicted_counted_bytes and found.counted_bytes:
        off = found.counted_bytes / found.predicted_counted_bytes - 1
        predicted, counted = format_size(found.predicted_counted_bytes), format_size(found.counted_bytes)
        peaks = f"{format_size(found.predicted_peak_bytes)} predicted, {format_size(found.measured_peak_bytes)} measured, reserve included"
        text = f"live tensors at the peak {predicted} predicted, {counted} counted ({off:+.1%}); in all {peaks}"
        mend = f"above the {_TRUE_SHARE:.0%} that plans are held to: please report it with these lines" if abs(off) > _TRUE_SHARE else ""
        yield Finding("planner", text, mend, failed=bool(mend))


def _proofs(name: str, image_size: int | None, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Plans proved on a model by real steps, each a finding.

    Raises:
        RecipeError: see `doctor`.
    """
    size = image_size or max(weights_config(name).input_size[-2:])
    progress(f"building and tracing {name} at {size} px")
    model = build_backbone(name, num_classes=_CLASSES, image_size=size, pretrained=False).model
    try:
        profile = _trace(name, model, size)
    except ValueError as error:
        raise RecipeError([Problem(str(error))]) from error
    seen: set[object] = set()
    for label, planner, candidate in _tries(profile):
        if candidate.segments in seen or candidate.segments == store_all(profile):
            continue
        seen.add(candidate.segments)
        plan = planner.plan(candidate, "")
        tiers = sorted({segment.tier for segment in plan.segments} - {"store"})
        progress(f"three steps with and without the plan of {label}")
        subject = f"{name} {size} px"
        what = f"{label} ({', '.join(tiers)}{', nested' if any(one.nested for one in plan.segments) else ''}): "
        try:
            found = verify_plan(model, plan, device=pick_device())
        except (HiresvisError, RuntimeError) as error:
            yield Finding(subject, f"{what}{error}", "please report it with this line", failed=True)
            continue
        yield Finding(subject, f"{what}{found}")
    if not seen:
        yield Finding(f"{name} {size} px", "no unit can be run again: nothing to prove")


def _tries(profile: MemoryProfile) -> Iterator[tuple[str, Planner, Candidate]]:
    """The plan of the least memory, bit for bit and with slices, and the cheapest one half-way to everything stored."""
    setting = StepSetting(accumulates=False, eval_batch=1)
    for exact in ("bitwise", "close"):
        limits = Limits(batch=_PLANNED, micro_batch=_PLANNED, exact=exact)
        least = Planner(profile, 1, setting, limits).refusal(_PLANNED).need_bytes
        stored = Planner(profile, 1 << 60, setting, limits).score(store_all(profile), _PLANNED).peak.total_bytes
        for label, budget in (("least memory", least), ("half-way to everything stored", (least + stored) // 2)):
            planner = Planner(profile, budget, setting, limits)
            candidate = planner.best(_PLANNED)
            if candidate is not None and (exact == "bitwise" or any(segment.slices for segment in candidate.segments)):
                yield f"{label}, {exact}", planner, candidate


def _trace(name: str, model: torch.nn.Module, size: int) -> MemoryProfile:
    return trace_costs(
        model,
        name=name,
        image_size=(size, size),
        in_chans=3,
        num_classes=_CLASSES,
        precision="fp32",
        channels_last=False,
        block=64,
        raw_image_bytes=0,
        make_optimizer=lambda fake: torch.optim.SGD([p for p in fake.parameters() if p.requires_grad], lr=0.1),
        optimizer_name="sgd",
    )[1]
