"""What a budget consists of: the limit, what is in use before the first step, and what is left free on purpose. No device is asked."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hiresvis.units import MIB, format_size

CUDA_BLOCK_BYTES = 512
CPU_BLOCK_BYTES = 64
CUDA_CONTEXT_BYTES = 600 * MIB
CPU_BUDGET_SHARE = 0.8
CUDA_BUDGET_SHARE = 0.95
RESERVE_BYTES, RESERVE_SHARE = 48 * MIB, 0.03  # oneDNN's scratch alone came to 2-4% of the live tensors


@dataclass(frozen=True, slots=True)
class Budget:
    """What the process may use, and what it uses before training starts.

    Attributes:
        total_bytes: the limit, everything included.
        baseline_bytes: in use besides weights and activations (interpreter, libraries, GPU context), before the first step.
        capacity_bytes: what the device has.
        others_bytes: what other processes use of it.
        reserve_bytes: stated share that the planner leaves free for what no count of tensors shows: kernels' scratch memory,
            fragmentation, decoding.
        why: one line for people.
    """

    total_bytes: int
    baseline_bytes: int
    capacity_bytes: int
    others_bytes: int
    reserve_bytes: int
    why: str


def reserve_of(limit_bytes: int) -> int:
    """What the planner leaves free of a limit."""
    return RESERVE_BYTES + int(limit_bytes * RESERVE_SHARE)


def budget_elsewhere(capacity_bytes: int, wanted: str | int | float, baseline_bytes: int, name: str) -> Budget:
    """A budget on a device that is not asked, such as a card of which only the name is known.

    Args:
        capacity_bytes: the device's memory, all of it free.
        wanted: "auto" (the usual share of a GPU's memory), bytes, or a share of the capacity (float in 0-1).
        baseline_bytes: in use there before the first step.
        name: of the device, for people.
    """
    if isinstance(wanted, int):
        limit, why = wanted, "given"
    else:
        share = CUDA_BUDGET_SHARE if isinstance(wanted, str) else wanted
        limit, why = int(capacity_bytes * share), f"{share:.0%} of the {format_size(capacity_bytes)} of {name}"
    return Budget(limit, baseline_bytes, capacity_bytes, 0, reserve_of(limit), why)


def num_cores() -> int:
    """Processor cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
