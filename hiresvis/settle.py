"""What a recipe asks of the planner: its limits, the key of its traced costs, batch statistics, and what would help when nothing fits.

No torch here: with costs on disk a plan is made without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from hiresvis.errors import RecipeError
from hiresvis.ladder import missing_stages, ways_out
from hiresvis.memory.budget import Budget
from hiresvis.memory.cards import Card
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.peak import StepSetting
from hiresvis.memory.plan import NoPlan
from hiresvis.memory.prices import Prices
from hiresvis.memory.search import Limits, Planner
from hiresvis.memory.timing import HOST_BYTES, host_of, rates_of
from hiresvis.profiles import Entry, Facts, ProfileKey, Rules
from hiresvis.recipe import LoadedRecipe, Resolution
from hiresvis.recipe.schema import loss_of
from hiresvis.units import MIB

SMALL_MICRO_BATCH = 8  # below this, batch statistics are a risk to quality
_AVERAGE_SHARE = 0.05  # of the budget: an average of the weights that takes more is kept by the host, for a copy a step


def limits_of(loaded: LoadedRecipe, card: Card | None, precision: str, host_bytes: int = HOST_BYTES) -> Limits:
    """What the recipe asks of the search.

    Args:
        card: what is planned for; None: not known, so nothing is offloaded, and only FLOPs count as time.
        precision: bf16, fp16 or fp32.
        host_bytes: memory of the host that may be used.

    Raises:
        RecipeError: the card has no such arithmetic.
    """
    memory, train = loaded.recipe.memory, loaded.recipe.train
    limits = Limits(
        batch=None if train.batch == "auto" else train.batch,
        micro_batch=None if memory.micro_batch == "auto" else memory.micro_batch,
        spacing=memory.spacing,
        goal=memory.goal,
        exact=memory.exact,
    )
    return limits if card is None else limits_on(limits, card, precision, host_bytes)


def limits_on(limits: Limits, card: Card, precision: str, host_bytes: int = HOST_BYTES) -> Limits:
    """The limits with what a card's data sheet adds: how it weighs memory traffic, and the host behind it."""
    host, rates = host_of(card, precision, host_bytes), rates_of(card, precision)
    return replace(limits, prices=Prices(host=host, flops_per_byte=rates.flops_per_byte))


def key_of(
    loaded: LoadedRecipe, *, in_chans: int, num_classes: int, precision: str, block: int, raw_image_bytes: int, rules: Rules, norm: str
) -> ProfileKey:
    """Everything that decides the costs of the recipe's model, with batch statistics kept or frozen (`norm`)."""
    recipe, optim = loaded.recipe, loaded.recipe.optim
    channels_last = recipe.memory.channels_last
    mask_loss, mask_bytes = "", 0
    if recipe.task == "segment":
        mask_loss = loss_of(recipe)
        mask_bytes = math.prod(recipe.model.image_size)  # class numbers of a byte travel with the pixels
    return ProfileKey(
        model=recipe.model.name,
        image_size=recipe.model.image_size,
        in_chans=in_chans,
        num_classes=num_classes,
        precision=precision,
        channels_last=True if channels_last == "auto" else channels_last,
        block=block,
        raw_image_bytes=raw_image_bytes + mask_bytes,
        optimizer=optim.name,
        clip_grad=optim.clip_grad,
        freeze=recipe.model.freeze,
        adapt="full" if recipe.model.adapt == "lp_ft" else recipe.model.adapt,  # the second phase, which needs the most
        norm=norm,
        drop_path=recipe.model.drop_path,
        rules=rules,
        lora_rank=None if recipe.model.lora is None else recipe.model.lora.rank,
        ema=settle_ema(loaded)[0],
        groups=""
        if optim.name in ("adamw", "sgd")
        else f"{optim.layer_decay} {optim.weight_decay > 0} {recipe.model.pretrained is not False}",
        resize=" ".join(f"{height}x{width}" for _, (height, width) in recipe.train.resize or ()),
        mask_loss=mask_loss,
        label_smoothing=optim.label_smoothing if mask_loss else 0.0,
    )


def settle_ema(loaded: LoadedRecipe) -> tuple[bool, str]:
    """Whether the weights are averaged, and why.

    An average of the last weights does what a falling learning rate does (Morales-Brotons et al. 2024, "Exponential moving average of
    weights in deep learning: dynamics and benefits"); beside the cosine it costs memory for little.
    """
    ema, schedule = loaded.recipe.train.ema, loaded.recipe.optim.schedule
    if ema != "auto":
        return bool(ema), "given"
    if schedule == "constant":
        return True, "a learning rate that never falls leaves noise in the weights, which an average takes out"
    return False, f"the {schedule} schedule brings the weights to rest by itself"


def complete(loaded: LoadedRecipe, entry: Entry) -> tuple[MemoryProfile, Facts]:
    """Profile and facts of an entry.

    Raises:
        RecipeError: it says why the model has no profile.
    """
    if entry.profile is None:
        raise RecipeError([loaded.problem("model.name", entry.refusal)])
    return entry.profile, entry.facts


def snapshot_bytes(profile: MemoryProfile, *, average_on_host: bool = False) -> int:
    """One snapshot on disk: weights, their average and the optimizer's state."""
    average = profile.gradients + profile.buffers if average_on_host else profile.ema
    return profile.weights + profile.buffers + average + profile.optimizer_state


def disk_bytes(profile: MemoryProfile, *, average_on_host: bool = False) -> int:
    """What a run may write: two snapshots while one replaces the other, two files of weights, and its tables."""
    return 2 * snapshot_bytes(profile, average_on_host=average_on_host) + 2 * (profile.weights + profile.buffers) + 64 * MIB


@dataclass(frozen=True, slots=True)
class Costs:
    """What the planner needs: the profile, what is known of the model besides, how batch statistics are kept, and the budget.

    `average_on_host`: the average of the weights takes a good part of the budget, and lives in the host's memory.
    """

    profile: MemoryProfile
    facts: Facts
    norm: str
    budget: Budget
    average_on_host: bool


def settle_costs(
    loaded: LoadedRecipe,
    resolution: Resolution,
    norm: str,
    cost: Callable[[str], tuple[MemoryProfile, Facts]],
    budget: Callable[[MemoryProfile, Facts], Budget],
    limits: Limits,
) -> Costs:
    """Costs and budget; under norm auto, batch statistics are frozen when the micro-batch that fits is too small for them.

    Args:
        norm: auto, batch or frozen.
        cost: the costs under batch statistics of the micro-batch ("batch") or of the weights ("frozen").
        budget: what may be used, given the costs.

    Raises:
        RecipeError: a spacing names stages that the model lacks.
    """
    first = "batch" if norm == "auto" else norm
    profile, facts = cost(first)
    check_stages(loaded, profile)
    limit = budget(profile, facts)
    on_host = limits.prices.host is not None and profile.ema > _AVERAGE_SHARE * limit.total_bytes
    if on_host:
        profile = replace(profile, ema=0)
    if norm == "auto":
        norm, why = _auto_norm(loaded, profile, facts, limit, limits)
        resolution.set("model.norm", norm, why)
    if norm != first:
        profile, facts = cost(norm)
        profile = replace(profile, ema=0) if on_host else profile
    return Costs(profile, facts, norm, limit, on_host)


def _auto_norm(loaded: LoadedRecipe, profile: MemoryProfile, facts: Facts, limit: Budget, limits: Limits) -> tuple[str, str]:
    """Batch statistics of the micro-batch or of the weights, and why; the costs are those of the former."""
    if loaded.recipe.model.pretrained is False:
        return "batch", "random weights have no statistics to keep"
    if not facts.batch_norm:
        return "batch", "no trained layer keeps batch statistics"
    setting = StepSetting(accumulates=False, eval_batch=1, baseline_bytes=limit.baseline_bytes, reserve_bytes=limit.reserve_bytes)
    answer = Planner(profile, limit.total_bytes, setting, limits).choose()
    micro = answer.micro_batch
    if not isinstance(answer, NoPlan) and micro >= SMALL_MICRO_BATCH:
        return "batch", f"micro-batch {micro} is large enough for batch statistics"
    return (
        "frozen",
        f"micro-batch {micro} is below {SMALL_MICRO_BATCH}: statistics of so few images are noise; those of the weights are kept",
    )


def check_stages(loaded: LoadedRecipe, profile: MemoryProfile) -> None:
    """A spacing by stage names stages that the model has.

    Raises:
        RecipeError: it names others.
    """
    missing = missing_stages(profile, loaded.recipe.memory.spacing)
    if missing:
        raise RecipeError([loaded.problem("memory.spacing", missing)])


def remedies(loaded: LoadedRecipe, profile: MemoryProfile, stride: int, answer: NoPlan) -> tuple[str, ...]:
    """What would help when nothing fits, in the recipe's words."""
    return ways_out(profile, stride, answer, may_freeze=loaded.recipe.model.freeze == "none")
