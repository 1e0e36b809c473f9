"""The search against a mixed-integer program over the same options, whose lower bound holds for every plan made of them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from hiresvis.memory.peak import StepSetting, predict_peak, resident_bytes
from hiresvis.memory.plan import store_all
from hiresvis.memory.prices import Prices
from hiresvis.memory.program import Option, Program
from hiresvis.memory.search import FREEDOMS, Limits, Planner

BATCH = 16
NESTED = dict(FREEDOMS)["nested"]


def _lower_bound(program: Program, room: int) -> float:
    """The least cost by a mixed-integer program: one variable per option; chosen options form a path through the chain, and at each
    unit what earlier options keep and this one needs is within the room."""
    options: list[tuple[int, int, Option]] = [(start, bit, option) for (start, bit), found in program.options.items() for option in found]
    count = len(program.profile.units)
    states = [(position, bit) for position in range(count + 1) for bit in (0, 1)]
    path = sparse.lil_matrix((len(states) + 1, len(options)))
    within = sparse.lil_matrix((count, len(options)))
    for number, (start, bit, option) in enumerate(options):
        path[states.index((start, bit)), number] += 1
        end = (option.segment.end, int(option.closing_kept))
        if option.segment.end < count:
            path[states.index(end), number] -= 1
        else:
            path[len(states), number] = 1
        within[start, number] = option.need / room
        for position in range(option.segment.end, count):
            within[position, number] = option.added / room
    inflow = np.zeros(len(states) + 1)
    inflow[states.index((0, 1))] = 1
    inflow[len(states)] = 1
    used = [row for row in range(len(states) + 1) if path.getrow(row).nnz or inflow[row]]
    costs = np.array([float(option.cost) for _, _, option in options])
    scale = costs.max()
    answer = milp(
        costs / scale,
        constraints=[
            LinearConstraint(path.tocsr()[used], inflow[used], inflow[used]),
            LinearConstraint(within.tocsr(), -np.inf, 1 - program.images / room),
        ],
        integrality=np.ones(len(options)),
        bounds=Bounds(0, 1),
        options={"time_limit": 60, "mip_rel_gap": 0.002},
    )
    assert answer.status in (0, 1), answer.message
    return float(answer.mip_dual_bound) * scale


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18", "convnext_atto"])
@pytest.mark.parametrize("share", [0.1, 0.4])
def test_the_search_is_within_two_percent_of_a_lower_bound(lab, name: str, share: float) -> None:
    """On real chains with kept outputs, passes and nested segments, a tenth and two fifths of the way from the least that fits to all
    stored."""
    profile = lab.large_profile(name)
    setting = StepSetting(accumulates=False, eval_batch=0)
    stored = predict_peak(profile, store_all(profile), BATCH, setting).total_bytes
    resident = resident_bytes(profile, setting, BATCH)
    least = Planner(profile, 0, setting, Limits(batch=BATCH, exact="bitwise")).refusal(BATCH).need_bytes
    budget = int(least + share * (stored - least))
    candidate = Planner(profile, budget, setting, Limits(batch=BATCH, micro_batch=BATCH, exact="bitwise")).best(BATCH)
    assert candidate is not None
    room = budget - resident
    bound = _lower_bound(Program(profile, BATCH, room, setting, NESTED, Prices()), room)
    assert bound > 0
    assert candidate.cost <= 1.02 * bound
