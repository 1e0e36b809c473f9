"""Room made after memory ran out: what a tighter plan is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hiresvis.device import is_out_of_memory
from hiresvis.memory.peak import StepSetting
from hiresvis.memory.search import Limits, Planner
from hiresvis.train.relief import Relief
from hiresvis.units import GIB, MIB

PX, BATCH = 64, 64


@pytest.fixture(scope="module")
def traced(small):
    """A small network and its costs."""
    step = small.make_step("test_resnet")
    return step, small.trace(step, "test_resnet", PX)


@pytest.mark.parametrize("baseline", [0, 300 * MIB])
@pytest.mark.parametrize("reserve", [1 * MIB, 50 * MIB, 400 * MIB])
def test_tighter_plan_needs_less_whatever_was_left_in_reserve(small, traced, reserve, baseline):
    """The finder may have raised or lowered them: what is compared is what the plan itself needs, and it falls each time."""
    step, profile = traced
    limits = Limits(batch=BATCH, micro_batch=None)
    planner = Planner(
        profile,
        GIB,
        StepSetting(accumulates=False, eval_batch=1, baseline_bytes=baseline, reserve_bytes=reserve),
        replace(limits, micro_batch=BATCH),
    )
    plan = planner.plan(planner.best(BATCH), "")
    loader = small.Images(BATCH, batch=BATCH)
    loader.set_micro_batch = lambda count: None
    relief = Relief(step=step, plan=plan, profile=profile, limits=limits, train_loader=loader)
    try:
        needs = [plan.predicted_peak_bytes - plan.parts["reserve"]]
        for _ in range(2):
            list(relief.training("epoch 1, step 1", "so much"))
            needs.append(relief.plan.predicted_peak_bytes - relief.plan.parts["reserve"])
    finally:
        relief.remove()
    assert needs[0] > needs[1] > needs[2]


def test_memory_of_the_host_is_not_the_gpus(small):
    """A plan for a GPU is not tightened because the host ran out while decoding."""
    host = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
    for error in (MemoryError(), host):
        assert is_out_of_memory(error, torch.device("cpu"))
        assert not is_out_of_memory(error, torch.device("cuda"))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"), torch.device("cuda"))
