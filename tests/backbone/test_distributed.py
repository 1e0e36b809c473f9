"""Plans under DistributedDataParallel: two processes on the CPU train to the same bits with a plan as without, in the same setting."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("ddp_worker.py")
ROOT = WORKER.parents[2]


def _case(model: str, order: str, micro_batches: int = 1, **options: bool) -> dict[str, object]:
    return {"model": model, "order": order, "micro_batches": micro_batches, "options": options}


CASES = {
    "vit": _case("vit_tiny_patch16_224", "plan first"),
    "vit, accumulating": _case("vit_tiny_patch16_224", "plan last", 3),
    "resnet": _case("resnet18", "plan last"),
    "resnet, accumulating": _case("resnet18", "plan first", 2),
    "unused parameters looked for": _case("vit_tiny_patch16_224", "plan last", find_unused_parameters=True),
    "static graph": _case("vit_tiny_patch16_224", "plan first", static_graph=True),
    "gradients as views": _case("resnet18", "plan first", 2, gradient_as_bucket_view=True),
}


@pytest.fixture(scope="module")
def results(lab, tmp_path_factory) -> list[dict[str, dict[str, object]]]:
    """What both processes found, for all cases at once: starting them takes longer than a case."""
    folder = tmp_path_factory.mktemp("distributed")
    plans = {}
    for name in sorted({case["model"] for case in CASES.values()}):
        profile = lab.small_profile(name)
        plans[name] = (lab.mixed_plan(profile), lab.unit_modules(profile))
    (folder / "cases.pickle").write_bytes(pickle.dumps((CASES, plans)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    outputs = [(folder / f"output.{rank}").open("w") for rank in (0, 1)]
    workers = [
        subprocess.Popen([sys.executable, WORKER, str(rank), folder], env=environment, stdout=output, stderr=subprocess.STDOUT)
        for rank, output in enumerate(outputs)
    ]
    try:
        codes = [worker.wait(timeout=200) for worker in workers]
    finally:
        for worker, output in zip(workers, outputs, strict=True):
            worker.kill()
            output.close()
    assert codes == [0, 0], "\n".join((folder / f"output.{rank}").read_text() for rank in (0, 1))
    return [json.loads((folder / f"results.{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18"])
def test_the_plan_of_this_file_uses_every_tier(lab, name: str) -> None:
    """Kept outputs, passes, segments of several units at once and nested, and the host: what the tests below say holds for all of them."""
    segments = lab.mixed_plan(lab.small_profile(name))
    assert {segment.tier for segment in segments} == {"store", "recompute", "keep", "offload"}
    assert any(any(segment.passes) for segment in segments)
    assert any(segment.end - segment.start > 1 and not segment.passes for segment in segments)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_to_the_same_bits(results, case: str) -> None:
    """Parameters, buffers, gradients and random state after three steps, in both processes; their gradients agree."""
    for rank, found in enumerate(results):
        assert found[case] == {"different": [], "apart": []}, f"process {rank}"
