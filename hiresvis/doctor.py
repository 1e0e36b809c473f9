"""`hiresvis doctor`: what this machine has, what is missing and how to get it, and whether plans hold here.

A plan is proved on a model by real steps: with it and without it, bit for bit. The plans tried are the ones of the least
memory and one in between, so that every tier that the model has room for is run.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

from hiresvis import __version__, profiles
from hiresvis.backbone.build import build_backbone, weights_config
from hiresvis.backbone.trace import trace_costs
from hiresvis.costing import card_of
from hiresvis.data.workers import shared_memory_free_bytes
from hiresvis.device import capacity, pick_device
from hiresvis.errors import HiresvisError, Problem, RecipeError
from hiresvis.memory.budget import num_cores
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.peak import StepSetting
from hiresvis.memory.plan import store_all
from hiresvis.memory.search import Candidate, Limits, Planner
from hiresvis.units import format_size
from hiresvis.verify import verify_plan

SELF_TEST = "test_resnet"  # timm's smallest with batch statistics
_PLANNED = 64  # images that plans are made for, so that activations rule; two of them are run
_CLASSES = 4
_REQUIREMENT = re.compile(r"^([A-Za-z0-9_.-]+)[^;]*(?:;.*extra\s*==\s*['\"]([\w-]+)['\"])?")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, and what to do where it is not well."""

    subject: str
    text: str
    mend: str = ""
    failed: bool = False


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
    found = [_software(), *_packages(), _device(), *_folders()]
    found += _proofs(SELF_TEST, image_size, progress)
    return Diagnosis(tuple(found))


def _software() -> Finding:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return Finding("hiresvis", f"{__version__}, Python {platform.python_version()}, {system}")


def _packages() -> Iterator[Finding]:
    """What the installation asks for and has, and the extras that are not there."""
    extras: dict[str, list[str]] = {}
    own: list[str] = []
    missing: list[str] = []
    for requirement in metadata.requires("hiresvis") or ():
        match = _REQUIREMENT.match(requirement)
        assert match is not None
        name, extra = match[1], match[2]
        version = _version(name)
        if extra is None:
            (own if version else missing).append(f"{name} {version}" if version else name)
        elif version is None:
            extras.setdefault(extra, []).append(name)
    yield Finding("packages", ", ".join(own))
    if missing:
        yield Finding("packages", f"missing: {', '.join(missing)}", "pip install hiresvis brings them", failed=True)
    for extra, names in sorted(extras.items()):
        if extra not in ("dev", "bench"):
            yield Finding(f"extra {extra}", f"not there: {', '.join(names)}", f"pip install 'hiresvis[{extra}]'")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _device() -> Finding:
    device = pick_device()
    total, others = capacity(device)
    memory = f"{format_size(total - others)} free of {format_size(total)}"
    if device.type == "cpu":
        built = "" if torch.version.cuda is None else f"; torch was built for CUDA {torch.version.cuda} and finds no GPU"
        return Finding("device", f"CPU, {num_cores()} cores, {memory}{built}")
    card = card_of(device)
    known = "rates known" if card else "no rates known: images/s are measured, not estimated"
    half = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return Finding("device", f"{torch.cuda.get_device_name(device)}, {memory}, {half}; {known}")


def _folders() -> Iterator[Finding]:
    folder = profiles.cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".doctor-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        yield Finding(
            "cache", f"{folder} cannot be written ({error.strerror}): costs are traced at every plan", f"set {profiles.CACHE_FOLDER}"
        )
    else:
        files = [path for path in folder.rglob("*") if path.is_file()]
        yield Finding("cache", f"{folder}, {len(files)} files, {format_size(sum(path.stat().st_size for path in files))}")
    free = shared_memory_free_bytes()
    if free is not None:
        yield Finding("shared memory", f"{format_size(free)} free, for the loader's workers")


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
