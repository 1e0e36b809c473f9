"""Predicted against measured peak of real training steps on the CPU: many models, five plans each.

    python tools/bench_peaks.py [MODEL ...] [--resident] [--json FILE]

Each plan is applied to the model on real tensors; one SGD step runs at the plan's micro-batch while every live storage is
counted (rounded up to 64 bytes). Plans: everything stored, spacing 1 everywhere, and the planner's cheapest in 70%, 45% and 30%
of the stored peak (in the least that fits, where that is more). No file is read and no weight loaded.

With --resident two steps run at a micro-batch of 4 in a fresh process for each plan, and its resident size is measured from outside
(`tools/resident.py`). Predicted is the least budget that the plan fits: what is resident before the first step, the predicted
storages, and the stated reserve.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import make_model, trace
from resident import least_budget, measure_resident
from torch import nn

from hiresvis.backbone.segments import apply_segments
from hiresvis.device import StorageCounter
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.peak import StepSetting, predict_peak
from hiresvis.memory.plan import Segment, store_all, uniform
from hiresvis.memory.search import Limits, Planner

MODELS = (
    ("vit_small_patch16_224", 384),
    ("vit_base_patch16_224", 256),
    ("vit_base_patch14_dinov2", 224),
    ("eva02_small_patch14_224", 224),
    ("swin_tiny_patch4_window7_224", 224),
    ("maxvit_tiny_tf_224", 224),
    ("convnext_tiny", 384),
    ("convnext_base", 224),
    ("convnextv2_tiny", 224),
    ("resnet50", 384),
    ("efficientnet_b3", 320),
    ("tf_efficientnetv2_s", 256),
    ("tf_efficientnet_lite0", 512),
    ("resnet18", 512),
)
BATCH = 3
RESIDENT_BATCH = 4
BLOCK_BYTES = 64
CLASSES = 10


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, fused=True)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, px: int, batch: int) -> None:
    """One step on random images; the gradients are let go afterwards."""
    images = torch.rand(batch, 3, px, px).to(memory_format=torch.channels_last)
    losses = nn.functional.cross_entropy(model(images).float(), torch.zeros(batch, dtype=torch.int64), reduction="none")
    del images
    (losses.sum() / batch).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def measure(model: nn.Module, profile: MemoryProfile, segments: tuple[Segment, ...], px: int) -> int:
    """Highest live bytes of one real step, weights included."""
    model = copy.deepcopy(model).to(memory_format=torch.channels_last)
    optimizer = sgd(model)
    handle = apply_segments(model, segments, [unit.modules for unit in profile.units])
    counter = StorageCounter(BLOCK_BYTES)
    counter.track([*model.parameters(), *model.buffers()])
    with counter:
        take_step(model, optimizer, px, BATCH)
    handle.remove()
    return counter.peak_bytes


def plans(profile: MemoryProfile, setting: StepSetting, batch: int) -> dict[str, tuple[Segment, ...]]:
    stored = predict_peak(profile, store_all(profile), batch, setting).total_bytes
    found = {"off": store_all(profile), "1": uniform(profile, 1)}
    least = Planner(profile, 0, setting, Limits(batch=batch)).refusal(batch).need_bytes
    for share in (0.7, 0.45, 0.3):
        candidate = Planner(profile, max(int(share * stored), least), setting, Limits(batch=batch, micro_batch=batch)).best(batch)
        assert candidate is not None
        found[f"{share:.0%}"] = candidate.segments
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="names from the list; all when none is given")
    parser.add_argument("--resident", action="store_true", help="measure the resident size of a fresh process for each plan")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    setting = StepSetting(accumulates=False, eval_batch=0)
    batch = RESIDENT_BATCH if options.resident else BATCH
    rows = []
    for name, px in MODELS:
        if options.models and name not in options.models:
            continue
        model = make_model(name, px, CLASSES)
        profile = trace(model, name, px, CLASSES, precision="fp32", block=BLOCK_BYTES, channels_last=True, make_optimizer=sgd)
        for label, segments in plans(profile, setting, batch).items():
            predicted = predict_peak(profile, segments, batch, setting).counted_bytes
            row: dict[str, Any] = {"model": name, "px": px, "plan": label, "predicted": predicted}
            if options.resident:
                found = measure_resident(name, px, batch, segments, [unit.modules for unit in profile.units])
                row |= {**asdict(found), "counted": predicted, "predicted": least_budget(found.baseline_bytes, predicted)}
                row["measured"] = max(found.high_water_bytes, found.sampled_bytes)
            else:
                row["measured"] = measure(model, profile, segments, px)
            rows.append(row)
        shown = "  ".join(f"{row['plan']} {row['predicted'] / row['measured'] - 1:+.2%}" for row in rows if row["model"] == name)
        print(f"{name + ' @' + str(px):<36} {shown}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    models = len({row["model"] for row in rows})
    print(f"{len(rows)} plans of {models} models: median {statistics.median(errors):.2%}, worst {max(errors):.2%}")


if __name__ == "__main__":
    main()
