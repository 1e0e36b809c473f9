"""The planner against timm's own gradient checkpointing: largest micro-batch in a budget, and recompute at the same micro-batch.

    python tools/bench_plans.py [MODEL ...] [--budget 24GiB] [--json FILE]

Both sides are counted alike: a whole training step on fake tensors (bf16 autocast by the CPU's rules, fp32 weights and AdamW
state), every live storage rounded up to 512 bytes. timm's column is its `set_grad_checkpointing()`. The planner's plans are
counted by applying them to such a step, too; its own prediction stands beside. Nothing is run on real tensors, so no GPU is
needed. The planner's limit of 2**31 elements a tensor is lifted here, for timm's side has none.

Largest micro-batch: in the budget less 1 GiB of reserve. `bitwise` and `close` are the recipe's values of `memory.exact`, each
with and without offload to host memory (64 GiB, 25 GB/s; compute at 45% of an RTX 4090's dense bf16 rate, which says how much of
a transfer hides). Recompute: at timm's largest micro-batch, FLOPs run again (waiting for the host counted as FLOPs of that rate)
over timm's, in the budget that timm needs for it, and in 1.5 times that.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from common import make_model, trace
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hiresvis.backbone.flops import forward_flops
from hiresvis.backbone.record import fake_copy
from hiresvis.backbone.segments import apply_segments
from hiresvis.device import StorageCounter
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.peak import StepSetting
from hiresvis.memory.prices import Host, Prices
from hiresvis.memory.search import Candidate, Limits, Planner
from hiresvis.units import GIB, MIB, parse_size

MODELS = (
    ("vit_small_patch16_224", 1024),
    ("vit_base_patch16_224", 1024),
    ("vit_large_patch16_224", 1024),
    ("vit_base_patch14_dinov2", 1036),
    ("eva02_base_patch14_224", 1036),
    ("swin_base_patch4_window7_224", 1024),
    ("maxvit_small_tf_224", 1024),
    ("convnext_tiny", 1024),
    ("convnext_base", 1024),
    ("convnext_base", 2048),
    ("convnextv2_base", 1024),
    ("resnet50", 1024),
    ("resnet50", 2048),
    ("efficientnet_b3", 1024),
    ("efficientnet_b3", 2048),
    ("tf_efficientnetv2_m", 1024),
)
RESERVE_BYTES = 1 * GIB
BLOCK_BYTES = 512
HOST = Host(total_bytes=64 * GIB, link_bytes_per_s=25e9, flops_per_s=0.45 * 165e12)
CLASSES = 1000


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


class _Flops(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.total += forward_flops(func, args, out)
        return out


def count_step(model: nn.Module, px: int, batch: int, prepare: Callable[[nn.Module], object], *, flops: bool = False) -> tuple[int, int]:
    """(highest live bytes, FLOPs) of a forward and backward on a fake copy of the model, weights included, optimizer states not."""
    mode, copy = fake_copy(model)
    prepare(copy)
    counter, counted = StorageCounter(BLOCK_BYTES), _Flops()
    counter.track([*copy.parameters(), *copy.buffers()])
    with mode, counter:
        images = torch.zeros(batch, 3, px, px)
        if flops:
            counted.__enter__()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = copy(images)
        loss = nn.functional.cross_entropy(logits.float(), torch.zeros(batch, dtype=torch.int64))
        loss.backward()
        if flops:
            counted.__exit__(None, None, None)
    return counter.peak_bytes, counted.total


def timm_flag(model: nn.Module) -> None:
    model.set_grad_checkpointing(True)  # type: ignore[operator]


def timm_none(model: nn.Module) -> None:
    del model


def largest_by_counting(model: nn.Module, px: int, room: int, prepare: Callable[[nn.Module], object]) -> tuple[int, int, float]:
    """(largest micro-batch, its counted bytes, bytes per image): two counts give a line, counts at its end settle it."""
    low, high = (count_step(model, px, batch, prepare)[0] for batch in (2, 4))
    slope = (high - low) / 2
    found = max(1, int((room - low + 2 * slope) / slope))
    found_bytes = count_step(model, px, found, prepare)[0]
    while found_bytes > room and found > 1:
        found -= 1
        found_bytes = count_step(model, px, found, prepare)[0]
    while True:
        more = count_step(model, px, found + 1, prepare)[0]
        if more > room:
            return found, found_bytes, slope
        found, found_bytes = found + 1, more


def apply(profile: MemoryProfile, candidate: Candidate) -> Callable[[nn.Module], object]:
    return lambda model: apply_segments(model, candidate.segments, [unit.modules for unit in profile.units])


def bench(name: str, px: int, budget: int) -> dict[str, object]:
    """One row: timm's and the planner's figures."""
    model = make_model(name, px, CLASSES)
    started = time.monotonic()
    profile = trace(model, name, px, CLASSES, precision="bf16", block=BLOCK_BYTES, channels_last=False, make_optimizer=adamw)
    trace_s = time.monotonic() - started
    capped = profile.max_batch
    profile = replace(profile, max_batch=Limits(batch=None).most)  # timm's side is not held to it either
    room = budget - RESERVE_BYTES - profile.optimizer_state
    none, _, none_slope = largest_by_counting(model, px, room, timm_none)
    flag, flag_bytes, flag_slope = largest_by_counting(model, px, room, timm_flag)
    row: dict[str, object] = {
        "model": name,
        "px": px,
        "none": none,
        "timm": flag,
        "none_mib": none_slope / MIB,
        "timm_mib": flag_slope / MIB,
        "trace_s": trace_s,
        "elements_cap": capped,
    }
    setting = StepSetting(accumulates=False, eval_batch=1)

    def planner(total: int, exact: str, host: Host | None, **limits: object) -> Planner:
        return Planner(profile, total, setting, Limits(**{"batch": None, "exact": exact, "prices": Prices(host=host), **limits}))  # type: ignore[arg-type]

    for exact in ("bitwise", "close"):
        for label, host in (("", None), ("+offload", HOST)):
            started = time.monotonic()
            found = planner(budget - RESERVE_BYTES, exact, host)
            micro = found.largest()
            row[exact + label] = micro
            row[f"{exact}{label} s"] = time.monotonic() - started
            candidate = found.anything(micro)
            if label and exact == "close":
                assert candidate is not None
                counted, _ = count_step(model, px, micro, apply(profile, candidate))
                row["counted / predicted"] = (counted + profile.optimizer_state) / candidate.peak.total_bytes
    plain, again = (count_step(model, px, flag, prepare, flops=True)[1] for prepare in (timm_none, timm_flag))
    timm_flops = (again - plain) / flag
    row["timm_recompute"] = timm_flops / profile.step_flops
    for factor in (1.0, 1.5):
        total = int((flag_bytes + profile.optimizer_state) * factor)
        for label, host in (("", None), ("+offload", HOST)):
            candidate = planner(total, "close", host, micro_batch=flag).best(flag)
            assert candidate is not None
            row[f"flops x{factor}{label}"] = (candidate.recomputed_flops + waiting(profile, candidate)) / timm_flops
    return row


def waiting(profile: MemoryProfile, candidate: Candidate) -> int:
    return sum(Prices(host=HOST).waiting(profile, segment) for segment in candidate.segments)


COLUMNS = ("bitwise", "bitwise+offload", "close", "close+offload")
SHARES = ("flops x1.0", "flops x1.0+offload", "flops x1.5", "flops x1.5+offload")


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(max(value, 1e-3)) for value in values) / len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="names from the table; all when none is given")
    parser.add_argument("--budget", default="24GiB")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = [(name, px) for name, px in MODELS if not options.models or name in options.models or f"{name}@{px}" in options.models]
    rows = []
    heads = " ".join(f"{head:>7}" for head in ("none", "timm", "bitwise", "+host", "close", "+host", "x1.0", "+host", "x1.5", "+host"))
    print(f"{'model @ px':<36} {heads}  counted  trace s")
    for name, px in chosen:
        row = bench(name, px, parse_size(options.budget))
        rows.append(row)
        sizes = " ".join(f"{row[column]:>7}" for column in ("none", "timm", *COLUMNS))
        shares = " ".join(f"{row[share]:>7.2f}" for share in SHARES)
        print(f"{name + ' @' + str(px):<36} {sizes} {shares} {row['counted / predicted']:>8.4f} {row['trace_s']:>8.1f}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    for column in COLUMNS:
        ratios = [row[column] / row["timm"] for row in rows]  # type: ignore[operator]
        print(f"largest micro-batch over timm's, {column}: geometric mean {geometric_mean(ratios):.2f}, least {min(ratios):.2f}")
    for share in SHARES:
        print(f"{share}: geometric mean {geometric_mean([row[share] for row in rows]):.2f}")  # type: ignore[misc]


if __name__ == "__main__":
    main()
