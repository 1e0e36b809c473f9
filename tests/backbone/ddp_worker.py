"""One of two processes that train under DistributedDataParallel, with a plan and without, and write down what differs.

Run by `test_distributed.py`: RANK, the folder in which both meet, and where the cases stand.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
import traceback
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hiresvis.backbone.segments import apply_segments

STEPS = 3
IMAGES = 2


def train(lab: Any, case: dict[str, Any], plan: tuple[Any, Any] | None, rank: int) -> dict[str, torch.Tensor]:
    """Three AdamW steps of this process's images; everything that they leave."""
    model = lab.narrow(case["model"])
    if case["options"].get("find_unused_parameters"):
        model.unused = nn.Linear(2, 2)
    px, _ = lab.SMALL[case["model"]]
    if plan and case["order"] == "plan first":
        apply_segments(model, *plan)
    wrapped = DistributedDataParallel(model, **case["options"])
    if plan and case["order"] == "plan last":
        apply_segments(wrapped.module, *plan)
    optimizer = lab.make_optimizer(wrapped)
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(10 + rank)  # each process draws its own paths
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        for last in range(case["micro_batches"], 0, -1):
            images = torch.randn(IMAGES, 3, px, px, generator=generator).to(memory_format=torch.channels_last)
            with ExitStack() as stack:
                if last > 1:
                    stack.enter_context(wrapped.no_sync())
                nn.functional.cross_entropy(wrapped(images), torch.arange(IMAGES)).backward()
        optimizer.step()
    left = {name: value.clone() for name, value in model.state_dict().items()}
    left |= {f"gradient of {name}": parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {**left, "random state": torch.get_rng_state()}


def told(lab: Any, case: dict[str, Any], plan: tuple[Any, Any], rank: int) -> dict[str, Any]:
    """What differs between the run without the plan and the one with it; whether the processes agree."""
    bare, planned = train(lab, case, None, rank), train(lab, case, plan, rank)
    apart = []
    for name, value in planned.items():
        if name.startswith("gradient of "):
            other = value.clone()
            dist.broadcast(other, 0)
            if not torch.equal(other, value):
                apart.append(name)
    return {"different": [name for name, value in bare.items() if not torch.equal(value, planned[name])], "apart": apart}


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("lab", Path(__file__).with_name("lab.py"))
    lab = importlib.util.module_from_spec(spec)
    sys.modules["lab"] = lab
    spec.loader.exec_module(lab)
    cases, plans = pickle.loads((folder / "cases.pickle").read_bytes())
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    results = {}
    for name, case in cases.items():
        try:
            results[name] = told(lab, case, plans[case["model"]], rank)
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
    (folder / f"results.{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
