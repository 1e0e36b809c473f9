"""`hiresvis plan`: what fits and what it costs, on this machine or on a card of which only the name is known.

torch is imported only where the costs of the recipe's model are not on disk yet, or where this machine has to be asked.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path

from hiresvis import profiles
from hiresvis.errors import Problem, RecipeError
from hiresvis.ladder import explain, ladder_rows, refusal, with_eval_batch
from hiresvis.listing import Listing, look_at_data
from hiresvis.memory.budget import CPU_BLOCK_BYTES, CUDA_BLOCK_BYTES, CUDA_CONTEXT_BYTES, Budget, budget_elsewhere
from hiresvis.memory.cards import Card, find_card
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.peak import StepSetting
from hiresvis.memory.plan import NoPlan
from hiresvis.memory.search import Limits, Planner
from hiresvis.memory.timing import HOST_BYTES, measured_rates, priced_by, rates_of
from hiresvis.plan_report import PlanReport, make_report
from hiresvis.profiles import Entry, Facts, ProfileKey, Rules
from hiresvis.recipe import LoadedRecipe, Resolution
from hiresvis.recipe.schema import kind_of
from hiresvis.settle import Costs, complete, key_of, limits_of, remedies, settle_costs, snapshot_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """What is planned for.

    Attributes:
        device: for people.
        budget: what may be used there, given the costs.
        card: its data sheet; None: there is none.
        host_bytes: memory of the host that may hold what is offloaded.
        timed_as: the name under which times of this device are kept; None: a card that is not here.
    """

    device: str
    precision: str
    block: int
    rules: Rules
    budget: Callable[[MemoryProfile, Facts], Budget]
    card: Card | None = None
    host_bytes: int = HOST_BYTES
    timed_as: str | None = None


def plan(
    loaded: LoadedRecipe, *, gpu: str | None = None, budget: str | None = None, price: float | None = None, measure: bool = False
) -> PlanReport:
    """Predicts and plans; of the images, only headers are read, and nothing is run unless that is asked for.

    Args:
        gpu: a card's name; None: this machine.
        budget: instead of the recipe's, as a recipe writes it: 24GiB, 90%, auto. With a card, the recipe's budget (which is this
            machine's) does not count: without one here it is 95% of the card's memory.
        price: of the device per hour.
        measure: where no rates of this device are known, time a few forwards on it (not kept: what `fit` measures is).

    Raises:
        RecipeError: an unknown card, a budget that is none, or a model that cannot be planned.
        DoesNotFit: no allowed plan fits.
    """
    resolution = Resolution(loaded)
    listing = look_at_data(loaded, resolution)
    target = _card_target(loaded, gpu, budget) if gpu is not None else _target_here(loaded, budget)
    limits = limits_of(loaded, target.card, target.precision, target.host_bytes)
    costs, key = _costs(loaded, resolution, listing, target, limits)
    rates = None if target.card is None else rates_of(target.card, target.precision)
    seconds = None if target.timed_as is None else profiles.read_seconds(key, target.timed_as)
    if not seconds and rates is None and measure and target.timed_as is not None:
        from hiresvis.costing import time_here

        seconds = time_here(loaded, costs.profile, classes=listing.classes, channels=listing.channels, norm=costs.norm)
    if seconds:
        rates = measured_rates(costs.profile, seconds)
        limits = replace(limits, prices=priced_by(limits.prices, rates))
    eval_batch = loaded.recipe.train.eval_batch
    setting = StepSetting(
        accumulates=False,
        eval_batch=1 if isinstance(eval_batch, str) else eval_batch,
        baseline_bytes=costs.budget.baseline_bytes,
        reserve_bytes=costs.budget.reserve_bytes,
    )
    planner = Planner(costs.profile, costs.budget.total_bytes, setting, limits)
    candidate = planner.choose()
    if isinstance(candidate, NoPlan):
        raise refusal(costs.profile, candidate, limits, remedies(loaded, costs.profile, costs.facts.stride, candidate))
    if eval_batch == "auto":
        planner = with_eval_batch(planner, candidate)
        candidate = planner.score(candidate.segments, candidate.micro_batch)
    return make_report(
        planner,
        candidate,
        planner.plan(candidate, explain(planner, candidate)),
        ladder_rows(planner, planner.ladder(), candidate),
        rates=rates,
        device=target.device,
        num_train=listing.num_train,
        epochs=loaded.recipe.train.epochs,
        price_per_hour=price,
        snapshot_bytes=snapshot_bytes(costs.profile, average_on_host=costs.average_on_host),
        resized=len(loaded.recipe.train.resize or ()) > 1,
    )


def _costs(loaded: LoadedRecipe, resolution: Resolution, listing: Listing, target: _Target, limits: Limits) -> tuple[Costs, ProfileKey]:
    """The costs on this target, from disk or traced now, and what they are kept under."""
    keys: dict[str, ProfileKey] = {}

    @cache
    def trace() -> Callable[[ProfileKey], Entry]:
        from hiresvis.costing import tracer

        return tracer(loaded, resolution, classes=listing.classes, channels=listing.channels)

    def cost(norm: str) -> tuple[MemoryProfile, Facts]:
        key = keys[norm] = key_of(
            loaded,
            in_chans=listing.channels,
            num_classes=len(listing.classes),
            precision=target.precision,
            block=target.block,
            raw_image_bytes=math.prod(loaded.recipe.model.image_size) * listing.channels,
            rules=target.rules,
            norm=norm,
        )
        return complete(loaded, profiles.read_or_trace(key, lambda: trace()(key)))

    costs = settle_costs(loaded, resolution, loaded.recipe.model.norm, cost, target.budget, limits)
    return costs, keys[costs.norm]


def _card_target(loaded: LoadedRecipe, gpu: str, budget: str | None) -> _Target:
    """A card by name, which nobody asks: its data sheet, all of its memory free.

    Raises:
        RecipeError: no such card, a precision that it lacks, or a budget that is none.
    """
    card = find_card(gpu)
    wanted = loaded.recipe.memory.precision
    precision = card.auto_precision if wanted == "auto" else wanted
    limit = budget_elsewhere(card.memory_bytes, "auto" if budget is None else _parsed(budget), CUDA_CONTEXT_BYTES, card.name)
    return _Target(
        device=card.name,
        precision=precision,
        block=CUDA_BLOCK_BYTES,
        rules="cuda",
        budget=lambda *_: limit,
        card=card,
    )


def _target_here(loaded: LoadedRecipe, budget: str | None) -> _Target:
    """This machine."""
    wanted = loaded.recipe.memory.budget if budget is None else _parsed(budget)
    if isinstance(wanted, int) and "torch" not in sys.modules and _surely_without_gpu():
        return _cpu_target(loaded, wanted)
    import torch

    from hiresvis import assemble, costing, device

    here = device.pick_device()
    on_gpu = here.type == "cuda"
    precision = assemble.settle_precision(loaded, Resolution(loaded), here)
    return _Target(
        device=torch.cuda.get_device_name(here) if on_gpu else "CPU",
        precision=precision,
        block=device.block_bytes(here),
        rules="cuda" if on_gpu else "cpu",
        budget=lambda profile, _: device.budget(here, wanted, profile.weights + profile.buffers, elsewhere=True),
        card=costing.card_of(here),
        host_bytes=costing.free_host_bytes(),
        timed_as=costing.device_name(here),
    )


def _cpu_target(loaded: LoadedRecipe, limit_bytes: int) -> _Target:
    """The CPU, unasked: the size of a process with torch is what the process that traced had."""

    def limit(profile: MemoryProfile, facts: Facts) -> Budget:
        if facts.process_bytes is None:
            from hiresvis import device

            return device.budget(device.pick_device(), limit_bytes, profile.weights + profile.buffers, elsewhere=True)
        return budget_elsewhere(limit_bytes, limit_bytes, facts.process_bytes, "CPU")

    wanted = loaded.recipe.memory.precision
    precision = "fp32" if wanted == "auto" else wanted
    return _Target(device="CPU", precision=precision, block=CPU_BLOCK_BYTES, rules="cpu", budget=limit, timed_as=profiles.cpu_name())


def _parsed(budget: str) -> str | int | float:
    """A budget from the command line.

    Raises:
        RecipeError: it is none.
    """
    try:
        return kind_of("memory.budget").parse(budget)  # type: ignore[no-any-return]
    except ValueError as error:
        raise RecipeError([Problem(str(error), key="--budget")]) from error


def _surely_without_gpu() -> bool:
    """Whether torch would find no GPU here: it was built for none, or the system shows none. False: torch has to be asked."""
    try:
        version = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except (metadata.PackageNotFoundError, OSError):
        version = ""
    if all(re.search(rf"^{build}\b.*= None$", version, re.MULTILINE) for build in ("cuda", "hip")):
        return True
    devices = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")
    return sys.platform == "linux" and not any(Path(name).exists() for name in devices)
