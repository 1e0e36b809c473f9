"""Every model module of timm's registry under the planner: planned or not, exact or not, and at what peak.

    python tools/bench_families.py [MODULE ...] [--shard 1/4] [--json FILE]

One small model of each module, at the smallest image size that it takes of 128 px and more, with drop-path and dropout on where
its constructor knows them. A row of the table:

- units of the chain, and the share of what a step saves that lies in units which can be recomputed;
- peak: counted storages of a step of 64 images on fake tensors, weights aside, with the tightest plan that keeps every bit, over
  the same with everything stored; and the counted peak over the predicted one;
- for each tier that keeps every bit (units recomputed one by one; segments as long as the chain allows; kept outputs; passes;
  nested segments; offload) three optimizer steps with it and without it from the same seed: loss, gradients, parameters, buffers,
  optimizer state and random state, bit for bit, and how often each unit ran forward: once where stored, twice where recomputed,
  once more for each further pass or level of nesting;
- slices: the largest difference of a gradient after one step, over its norm (under 1e-5), where it is more than rounding's own;
- timm: the same comparison with the model's own `set_grad_checkpointing()`.

Rows are appended to FILE as JSON lines; modules that stand in it already are not run again, so an interrupted run goes on where it
was. The Markdown table of all rows is printed at the end.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import DropPath
from timm.models import _registry
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hiresvis.backbone.chain import ChainUnit, find_chain
from hiresvis.backbone.input_size import fit_input
from hiresvis.backbone.record import fake_copy
from hiresvis.backbone.segments import apply_segments
from hiresvis.backbone.trace import trace_costs
from hiresvis.catalog import recomputable_share
from hiresvis.device import StorageCounter
from hiresvis.errors import RecipeError
from hiresvis.memory.costs import MemoryProfile, Recompute, UnitCosts
from hiresvis.memory.peak import StepSetting, predict_peak
from hiresvis.memory.plan import NoPlan, Segment, store_all, uniform
from hiresvis.memory.search import Limits, Planner
from hiresvis.verify import Training, count_forwards, first_difference

CLASSES = 4
STEPS = 3
IMAGES = 2
COUNTED_IMAGES = 64
SIZES = (128, 160, 192, 224, 240, 256, 288, 299, 320, 384, 448, 512)
BITWISE = ("recompute", "segments", "keep", "passes", "nested", "offload")
DROPS = ("drop_path_rate", "drop_rate", "proj_drop_rate", "attn_drop_rate")
DROP_RATE = 0.1
CLOSE = 1e-5
ROUNDING = 4.0


@dataclass(frozen=True)
class Family:
    """A module of timm.models with the model that stands for it.

    Attributes:
        px: the smallest of SIZES that it takes.
        kwargs: what makes it smaller, where the smallest of its module is large.
    """

    module: str
    model: str
    px: int = 128
    kwargs: Mapping[str, Any] = field(default_factory=dict)


# The model of each module with the fewest parameters, those made for timm's own tests aside. A module that is not here (another
# release of timm) has it found.
FAMILIES = {
    family.module: family
    for family in (
        Family("beit", "beit_base_patch16_224", 128, {"depth": 3}),
        Family("byoanet", "halonet_h1", 256),
        Family("byobnet", "mobileone_s1"),
        Family("cait", "cait_xxs24_224"),
        Family("coat", "coat_tiny"),
        Family("convit", "convit_tiny"),
        Family("convmixer", "convmixer_768_32", 224),
        Family("convnext", "convnext_zepto_rms"),
        Family("cpubone", "cpubone_nano"),
        Family("crossvit", "crossvit_tiny_240", 240),
        Family("csatv2", "csatv2"),
        Family("cspnet", "cs3darknet_focus_s"),
        Family("cspnext", "cspnext_tiny"),
        Family("davit", "davit_tiny"),
        Family("deepseek_vit", "deepseek_vit_412m", 224, {"depth": 2}),
        Family("deit", "deit_tiny_patch16_224"),
        Family("densenet", "densenet121"),
        Family("dla", "dla46x_c"),
        Family("dpn", "dpn48b"),
        Family("edgenext", "edgenext_xx_small"),
        Family("efficientformer", "efficientformer_l1", 224),
        Family("efficientformer_v2", "efficientformerv2_s0"),
        Family("efficientnet", "mobilenetv2_035"),
        Family("efficientvim", "efficientvim_m1"),
        Family("efficientvit_mit", "efficientvit_b0"),
        Family("efficientvit_msra", "efficientvit_m0"),
        Family("eva", "vit_tiny_patch16_dinov3_qkvb"),
        Family("fasternet", "fasternet_t0"),
        Family("fastvit", "fastvit_t8"),
        Family("focalnet", "focalnet_tiny_srf"),
        Family("gcvit", "gcvit_xxtiny"),
        Family("gemma4_vit", "gemma4_vit_167m", 128, {"depth": 3}),
        Family("ghostnet", "ghostnet_050"),
        Family("hardcorenas", "hardcorenas_b"),
        Family("hgnet", "hgnetv2_b0"),
        Family("hiera", "hiera_tiny_224"),
        Family("hieradet_sam2", "sam2_hiera_tiny"),
        Family("hrnet", "hrnet_w18_small"),
        Family("iformer", "iformer_t"),
        Family("inception_next", "inception_next_atto"),
        Family("inception_resnet_v2", "inception_resnet_v2"),
        Family("inception_v3", "inception_v3"),
        Family("inception_v4", "inception_v4"),
        Family("lcnetv2", "lcnetv2_small"),
        Family("levit", "levit_128s"),
        Family("lowformer", "lowformer_b0"),
        Family("mambaout", "mambaout_femto"),
        Family("maxxvit", "maxvit_pico_rw_256"),
        Family("metaformer", "poolformerv2_s12"),
        Family("mlp_mixer", "gmlp_ti16_224"),
        Family("mobilenetv3", "mobilenetv3_small_050"),
        Family("mobilenetv5", "mobilenetv5_base"),
        Family("mobilevit", "mobilevit_xxs"),
        Family("mvitv2", "mvitv2_tiny"),
        Family("naflexvit", "naflexvit_base_patch16_parfac_gap", 128, {"depth": 3}),
        Family("nasnet", "nasnetalarge"),
        Family("nest", "nest_tiny", 224),
        Family("nextvit", "nextvit_small"),
        Family("nfnet", "nf_regnet_b0"),
        Family("pit", "pit_ti_224"),
        Family("pnasnet", "pnasnet5large"),
        Family("pvt_v2", "pvt_v2_b0"),
        Family("qwen3_vit", "qwen3_vit_88m", 128, {"depth": 3}),
        Family("rdnet", "rdnet_tiny"),
        Family("regnet", "regnetx_002"),
        Family("repghost", "repghostnet_050"),
        Family("repvit", "repvit_m1"),
        Family("res2net", "res2next50"),
        Family("resnest", "resnest14d"),
        Family("resnet", "resnet10t"),
        Family("resnetv2", "resnetv2_18"),
        Family("rexnet", "rexnet_100"),
        Family("selecsls", "selecsls42"),
        Family("senet", "legacy_seresnet18"),
        Family("sequencer", "sequencer2d_s", 224, {"layers": (1, 1, 2, 1)}),
        Family("shvit", "shvit_s1"),
        Family("sknet", "skresnet18"),
        Family("starnet", "starnet_s050"),
        Family("swiftformer", "swiftformer_xs"),
        Family("swin_transformer", "swin_tiny_patch4_window7_224"),
        Family("swin_transformer_v2", "swinv2_tiny_window16_256"),
        Family("swin_transformer_v2_cr", "swinv2_cr_tiny_224"),
        Family("tiny_vit", "tiny_vit_5m_224"),
        Family("tnt", "tnt_s_legacy_patch16_224"),
        Family("tresnet", "tresnet_m"),
        Family("twins", "twins_svt_small"),
        Family("vgg", "vgg11_bn"),
        Family("visformer", "visformer_tiny"),
        Family("vision_transformer", "vit_tiny_patch16_224"),
        Family("vision_transformer_hybrid", "vit_tiny_r_s16_p8_224"),
        Family("vision_transformer_relpos", "vit_srelpos_small_patch16_224"),
        Family("vision_transformer_sam", "samvit_base_patch16_224", 128, {"depth": 3}),
        Family("vitamin", "vitamin_small_224"),
        Family("volo", "volo_d1_224"),
        Family("vovnet", "ese_vovnet19b_slim_dw"),
        Family("xception", "legacy_xception"),
        Family("xception_aligned", "xception41p"),
        Family("xcit", "xcit_nano_12_p8_224"),
    )
}


def modules() -> list[str]:
    """All model modules of this release of timm."""
    return sorted(_registry._module_to_models)


def family_of(module: str) -> Family:
    """The module's representative."""
    if module in FAMILIES:
        return FAMILIES[module]
    sizes = {}
    for name in sorted(_registry._module_to_models[module]):
        if not name.startswith("test_"):
            with torch.device("meta"):
                sizes[name] = sum(parameter.numel() for parameter in timm.create_model(name).parameters())
    name = min(sizes, key=lambda name: sizes[name])
    for px in SIZES:
        try:
            fit_input(name, (px, px))
        except RecipeError:
            continue
        return Family(module, name, px)
    raise ValueError(f"{name} takes none of {SIZES} px")


def build(family: Family) -> nn.Module:
    """The seeded model in training mode with every kind of dropout that its constructor knows, built for the size where it has to be.

    Dropout is on in the first half of the network alone: what draws random numbers cannot run in slices, and the second half shows that.
    """
    kwargs: dict[str, Any] = {"num_classes": CLASSES, **family.kwargs}
    last: Exception | None = None
    for more in ({"img_size": (family.px, family.px)}, *({name: DROP_RATE} for name in DROPS)):
        try:
            with torch.device("meta"):
                timm.create_model(family.model, **kwargs, **more)
        except (TypeError, AssertionError) as error:  # no such argument
            last = error
            continue
        kwargs |= more
    torch.manual_seed(0)
    try:
        model = timm.create_model(family.model, **kwargs).train()
    except TypeError:
        raise last or ValueError(family.model) from None
    drops = [module for module in model.modules() if isinstance(module, nn.Dropout) and module.p]
    for index, module in enumerate(drops):
        if module.inplace or index >= len(drops) // 2:  # in place after a softmax, TNT cannot be trained at all
            module.p = 0.0
    return model


def random_parts(model: nn.Module) -> list[str]:
    """The kinds of randomness that are on."""
    found = {
        "drop-path": any(isinstance(module, DropPath) and module.drop_prob for module in model.modules()),
        "dropout": any(isinstance(module, nn.Dropout) and module.p for module in model.modules()),
    }
    return [name for name, there in found.items() if there]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Without state, so that a step's storages are those of forward and backward."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


def trace(family: Family, model: nn.Module) -> MemoryProfile:
    """The model's costs in fp32."""
    return trace_costs(
        model,
        name=family.model,
        image_size=(family.px, family.px),
        in_chans=3,
        num_classes=CLASSES,
        precision="fp32",
        channels_last=False,
        block=64,
        raw_image_bytes=0,
        make_optimizer=sgd,
        optimizer_name="sgd",
    )[1]


def _each(profile: MemoryProfile, choose: Callable[[UnitCosts], Recompute | None]) -> tuple[Segment, ...]:
    """Each unit by itself in the way that is chosen for it; stored where there is none."""
    segments = []
    for index, unit in enumerate(profile.units):
        way = choose(unit)
        if way is None:
            segments.append(Segment(index, index + 1))
            continue
        tier = "chunk" if way.sliced else "keep" if way.keep else "recompute"
        segments.append(Segment(index, index + 1, tier, (way.passes,), way.keep, unit.sliceable if way.sliced else ()))
    return tuple(segments)


def _joins(unit: UnitCosts | ChainUnit) -> bool:
    """Whether a segment may go on over this unit."""
    return unit.linked if isinstance(unit, ChainUnit) else unit.recomputable and bool(unit.modules)


def _runs(units: Sequence[UnitCosts] | Sequence[ChainUnit], length: int | None) -> Iterator[tuple[int, int]]:
    """Segments of up to that many units (None: as many as the chain allows), and single units that cannot be recomputed."""
    index = 0
    while index < len(units):
        end = index + 1
        if units[index].opens_segment:
            while end < len(units) and _joins(units[end]) and (length is None or (end - index < length and units[end].opens_segment)):
                end += 1
        yield index, end
        index = end


def longest(units: Sequence[UnitCosts] | Sequence[ChainUnit]) -> tuple[Segment, ...]:
    """Segments as long as the chain allows."""
    return tuple(Segment(start, end, "recompute" if units[start].opens_segment else "store") for start, end in _runs(units, None))


def _nested(profile: MemoryProfile, length: int) -> tuple[Segment, ...]:
    segments = []
    for start, end in _runs(profile.units, length):
        units = profile.units[start:end]
        if not all(unit.ways for unit in units):
            segments += [Segment(index, index + 1) for index in range(start, end)]
            continue
        passes = tuple(max((way.passes for way in unit.ways if not way.keep and not way.sliced), key=len) for unit in units)
        segments.append(Segment(start, end, "recompute", passes))
    return tuple(segments)


def plans_of(profile: MemoryProfile) -> dict[str, tuple[Segment, ...]]:
    """A plan for each tier that the profile has something for."""

    def plain(unit: UnitCosts) -> list[Recompute]:
        return [way for way in unit.ways if not way.sliced]

    found = {
        "recompute": uniform(profile, 1),
        "segments": longest(profile.units),
        "keep": _each(profile, lambda unit: max(plain(unit), key=lambda way: (len(way.keep), len(way.passes)), default=None)),
        "passes": _each(profile, lambda unit: max(plain(unit), key=lambda way: (len(way.passes), -len(way.keep)), default=None)),
        "nested": _nested(profile, 3),
    }
    found["offload"] = tuple(segment if segment.tier == "store" else replace(segment, tier="offload") for segment in _nested(profile, 2))
    found["slices"] = _each(profile, lambda unit: next((way for way in reversed(unit.ways) if way.sliced), None))
    uses: dict[str, Callable[[Segment], bool]] = {
        "segments": lambda segment: segment.end - segment.start > 1,
        "keep": lambda segment: bool(segment.keep),
        "passes": lambda segment: any(segment.passes),
        "nested": lambda segment: len(segment.passes) > 1,
    }
    return {
        name: segments
        for name, segments in found.items()
        if any(uses.get(name, lambda segment: segment.tier != "store")(segment) for segment in segments)
    }


def expected_forwards(units: Sequence[UnitCosts] | Sequence[ChainUnit], segments: Sequence[Segment]) -> dict[str, int]:
    """How often a plan says that each unit runs forward in a step, by the name of its first module."""
    expected = {}
    for segment in segments:
        for index in range(segment.start, segment.end):
            unit = units[index]
            times = 1
            if segment.tier != "store":
                passes = len(segment.passes[index - segment.start]) + 1 if segment.passes else 1
                # In a nest the first second run goes through all units, and is the last unit's own.
                times += passes + (1 if segment.passes and index < segment.end - 1 else 0)
            if unit.modules:
                expected[unit.modules[0]] = times
    return expected


def train(model: nn.Module, px: int, steps: int) -> dict[str, torch.Tensor]:
    """What the last of some steps leaves."""
    training = Training(model, "fp32")
    left: dict[str, torch.Tensor] = {}
    for step in range(1, steps + 1):
        left = training.step(torch.rand(IMAGES, 3, px, px, generator=torch.Generator().manual_seed(step)), step)
    return left


def check(
    model: nn.Module,
    bare: Mapping[str, torch.Tensor],
    units: Sequence[UnitCosts] | Sequence[ChainUnit],
    px: int,
    segments: Sequence[Segment],
) -> str:
    """Trains a copy with the plan. "exact", or what differs, or what ran more or less often than the plan says."""
    copied = copy.deepcopy(model)
    names = [unit.modules for unit in units]
    apply_segments(copied, segments, names)
    counts = count_forwards(copied, names)
    try:
        after = train(copied, px, STEPS)
    except RuntimeError as error:
        return f"fails: {str(error).splitlines()[0]}"
    difference = first_difference(bare, after)
    if difference is not None:
        return f"the {difference[0]} differs: {difference[1]}"
    expected = expected_forwards(units, segments)
    trained = {name: any(True for _ in copied.get_submodule(name).parameters()) for name in expected}
    for name, times in expected.items():
        # What is saved nothing of, such as a last pooling, need not run again.
        if counts[name] > STEPS * times or (counts[name] < STEPS * times and trained[name]):
            return f"{name} ran {counts[name]} times in {STEPS} steps, not {STEPS * times}"
    return "exact"


def gradients(model: nn.Module, px: int) -> dict[str, torch.Tensor]:
    """Of one step's loss, in double precision whatever the model's."""
    dtype = next(model.parameters()).dtype
    torch.manual_seed(0)
    logits = model(torch.rand(IMAGES, 3, px, px, generator=torch.Generator().manual_seed(1)).to(dtype))
    logits = logits[0] if isinstance(logits, (tuple, list)) else logits
    nn.functional.cross_entropy(logits, torch.arange(IMAGES) % CLASSES).backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters() if parameter.grad is not None}


def without_dropout(model: nn.Module) -> nn.Module:
    """A copy that draws no random numbers: in fp64 they would be others."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, DropPath):
            module.drop_prob = 0.0
    return plain


def closeness(plain: nn.Module, profile: MemoryProfile, px: int, segments: Sequence[Segment]) -> float:
    """The largest difference of a gradient with the plan, over its norm, where it is more than rounding does without any plan.

    What has no digits in fp32 has none to compare: of a bias before a batch norm, or of attention's keys, all of the gradient is
    rounding. So a difference counts where it is above ROUNDING times that of the unplanned fp32 gradient from the one in fp64, and above
    fp32's epsilon of the norm of all gradients together.
    """
    planned, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    apply_segments(planned, segments, [unit.modules for unit in profile.units])
    before, after, true = (gradients(one, px) for one in (plain, planned, exact))
    worst = 0.0
    least = torch.finfo(torch.float32).eps * float(torch.stack([value.norm() for value in before.values()]).norm())
    for name, value in before.items():
        difference = float((value - after[name]).norm())
        if difference > least and difference > ROUNDING * float((value - true[name]).norm()):
            worst = max(worst, difference / max(float(value.norm()), 1e-300))
    return worst


def check_timm(model: nn.Module, bare: Mapping[str, torch.Tensor], px: int) -> str:
    """The same with timm's own flag."""
    copied = copy.deepcopy(model)
    try:
        copied.set_grad_checkpointing(True)  # type: ignore[operator]
        after = train(copied, px, STEPS)
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        return f"refuses: {(str(error).splitlines() or [''])[0] or type(error).__name__}"
    difference = first_difference(bare, after)
    return "exact" if difference is None else f"the {difference[0]} differs: {difference[1]}"


def count_peak(model: nn.Module, profile: MemoryProfile, segments: Sequence[Segment]) -> int:
    """Highest live bytes of forward and backward on fake tensors, weights included."""
    mode, fake = fake_copy(model)
    apply_segments(fake, segments, [unit.modules for unit in profile.units])
    counter = StorageCounter(profile.block_size)
    counter.track([*fake.parameters(), *fake.buffers()])
    with mode, counter:
        logits = fake(torch.zeros(COUNTED_IMAGES, 3, *profile.image_size))
        logits = logits[0] if isinstance(logits, (tuple, list)) else logits
        nn.functional.cross_entropy(logits, torch.zeros(COUNTED_IMAGES, dtype=torch.int64)).backward()
    return counter.peak_bytes


def tightest(profile: MemoryProfile) -> tuple[Segment, ...]:
    """The plan of the least need that keeps every bit, at the counted number of images."""
    limits = Limits(batch=COUNTED_IMAGES, micro_batch=COUNTED_IMAGES, exact="bitwise")
    setting = StepSetting(accumulates=False, eval_batch=0)
    least = Planner(profile, 1, setting, limits).choose()
    assert isinstance(least, NoPlan)
    found = Planner(profile, least.need_bytes, setting, limits).choose()
    assert not isinstance(found, NoPlan)
    return found.segments


@dataclass
class Row:
    """One line of the table; `refused` is the reason where nothing is planned."""

    module: str
    model: str
    px: int
    parameters: int = 0
    random: list[str] = field(default_factory=list)
    refused: str = ""
    units: int = 0
    recomputable: float = 0.0
    peak: float = 1.0
    predicted: float = 1.0
    tiers: dict[str, str] = field(default_factory=dict)
    slices: float | None = None
    timm: str = ""
    trace_s: float = 0.0
    seconds: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether every tier gave the bits and the forwards that it should, and slices came close."""
        return bool(self.tiers) and set(self.tiers.values()) == {"exact"} and (self.slices is None or self.slices < CLOSE)


def run(family: Family, *, tiers: Sequence[str] = (*BITWISE, "slices", "timm", "peak")) -> Row:
    """The row of one module."""
    started = time.monotonic()
    model = build(family)
    row = Row(family.module, family.model, family.px, sum(parameter.numel() for parameter in model.parameters()), random_parts(model))
    try:
        profile = trace(family, model)
    except (AssertionError, RuntimeError, ValueError) as error:
        row.refused = (str(error).splitlines() or [type(error).__name__])[0]
        return row
    row.trace_s = time.monotonic() - started
    row.units, row.recomputable = len(profile.units), recomputable_share(profile)
    found = plans_of(profile)
    if "recompute" not in found:
        row.refused = "no unit can be run again"
        return row
    if "peak" in tiers:
        least = tightest(profile)
        resident = profile.weights + profile.buffers
        stored, planned = (count_peak(model, profile, segments) for segments in (store_all(profile), least))
        row.peak = (planned - resident) / (stored - resident)
        setting = StepSetting(accumulates=False, eval_batch=0)
        row.predicted = planned / predict_peak(profile, least, COUNTED_IMAGES, setting).counted_bytes
    bare = train(copy.deepcopy(model), family.px, STEPS)
    row.tiers = {name: check(model, bare, profile.units, family.px, found[name]) for name in BITWISE if name in found and name in tiers}
    if "slices" in found and "slices" in tiers:
        plain = without_dropout(model)
        sliced = trace(family, plain)
        row.slices = closeness(plain, sliced, family.px, plans_of(sliced)["slices"])
    if "timm" in tiers:
        row.timm = check_timm(model, bare, family.px)
    row.seconds = time.monotonic() - started
    return row


def quick(family: Family) -> dict[str, str]:
    """The first two tiers by the chain alone: untraced, and so in a second or two."""
    model = build(family)
    mode, fake = fake_copy(model)
    with mode:
        images = torch.zeros(IMAGES, 3, family.px, family.px)
        units = find_chain(fake, lambda: fake(images)).units
    single = tuple(Segment(index, index + 1, "recompute" if unit.opens_segment else "store") for index, unit in enumerate(units))
    bare = train(copy.deepcopy(model), family.px, STEPS)
    plans = {"recompute": single, "segments": longest(units)}
    return {name: check(model, bare, units, family.px, segments) for name, segments in plans.items()}


def shard(names: Sequence[str], text: str) -> list[str]:
    """The part "2/4" of the names; parts differ by one name at most and together are all."""
    number, of = (int(part) for part in text.split("/"))
    if not 1 <= number <= of:
        raise ValueError(f"shard {text}: give i/n with i from 1 to n")
    return list(names[number - 1 :: of])


def table(rows: Sequence[Row]) -> str:
    """Markdown, with the totals below."""
    lines = ["| module | model @ px | units | in units | peak | counted / predicted | random | exact | slices | timm's flag |"]
    lines.append("|" + "---|" * 10)
    for row in sorted(rows, key=lambda row: row.module):
        where = f"`{row.model}` @ {row.px}"
        if row.refused:
            lines.append(f"| {row.module} | {where} | refused: {row.refused} |" + " |" * 7)
            continue
        wrong = "; ".join(f"{name}: {told}" for name, told in row.tiers.items() if told != "exact")
        slices = "-" if row.slices is None else f"{row.slices:.0e}"
        cells = [row.module, where, str(row.units), f"{row.recomputable:.0%}", f"{row.peak:.2f}", f"{row.predicted:.3f}"]
        cells += [", ".join(row.random) or "-", wrong or ", ".join(row.tiers), slices, row.timm]
        lines.append("| " + " | ".join(cells) + " |")
    planned = [row for row in rows if not row.refused]
    lines.append("")
    lines.append(
        f"{len(rows)} modules: {len(planned)} planned, {len(rows) - len(planned)} refused; {sum(row.exact for row in planned)} exact in "
        f"every tier; timm's flag: {sum(row.timm == 'exact' for row in rows)} exact, "
        f"{sum(row.timm.startswith('refuses') for row in rows)} refused, {sum(' differs' in row.timm for row in rows)} different"
    )
    return "\n".join(lines)


def read(path: Path | None) -> list[Row]:
    """The rows of a file of JSON lines."""
    if path is None or not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", help="of timm.models; all when none is given")
    parser.add_argument("--shard", default="1/1", help="i/n: every n-th module from the i-th")
    parser.add_argument("--json", type=Path, help="JSON lines to append to, and to go on from")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = read(options.json)
    done = {row.module for row in rows}
    for module in shard(options.modules or modules(), options.shard):
        if module in done:
            continue
        row = run(family_of(module))
        rows.append(row)
        said = f"refused: {row.refused}" if row.refused else "exact" if row.exact else f"{row.tiers} {row.slices}"
        print(f"{module:<24} {row.seconds:6.1f} s (trace {row.trace_s:.1f})  peak {row.peak:.2f}  {said}", file=sys.stderr, flush=True)
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
