"""Budgets that bind: what gives way first, what never changes, and the refusal below the floor."""

from __future__ import annotations

import re
from typing import Any

from hiresvis.device import RESERVE_BYTES, RESERVE_SHARE

MIB = 2**20
LARGE = ("model.image_size=384", "train.batch=16")


def enough(plan: dict[str, Any]) -> int:
    """The smallest budget that this plan fits: the stated reserve follows the budget, and these plans were made under a large one."""
    need = plan["predicted_peak_bytes"] - plan["parts"]["reserve"]
    return int((need + RESERVE_BYTES) / (1 - RESERVE_SHARE)) + 1


def test_a_tight_budget_is_kept_by_the_probe_and_by_training(workshop):
    """The batch is never given up; neither the probe nor training goes over the budget."""
    stored = workshop.plan(*LARGE).json
    tight = workshop.plan(*LARGE, "memory.spacing=1", "memory.micro_batch=16").json
    assert stored["recompute_fraction"] == 0
    assert stored["micro_batch"] == 16
    room = enough(stored) - enough(tight)
    assert room > 30 * MIB
    budget = enough(stored) - room // 2
    workshop.fit(*LARGE, f"memory.budget={budget}B", "train.epochs=1")
    plan = workshop.read("plan.json")
    assert plan["budget_bytes"] == budget
    # What gives way is tested on predictions: this process is several times larger than these tensors, and its size drifts by as much.
    assert plan["batch"] == 16
    assert plan["measured"]["resident_peak_bytes"] <= budget
    (finished,) = workshop.events("run_finished")
    assert finished["measured_peak_bytes"] <= budget
    assert {row["num_images"] for row in workshop.events("step_done")} == {16}


def test_lower_budgets_give_up_stored_units_first_then_the_micro_batch(workshop):
    """Step by step the recompute share rises, then the micro-batch falls; predicted peaks stay under; the batch is the same."""
    common = ("model.name=test_efficientnet", "model.image_size=512", "train.batch=8")
    first = workshop.plan(*common).json
    fixed = first["parts"]["baseline"]
    need = enough(first) - fixed
    shares, micros = [first["recompute_fraction"]], [first["micro_batch"]]
    for percent in (85, 65, 50, 38, 28):
        budget = fixed + need * percent // 100
        found = workshop.plan(*common, f"memory.budget={budget}B").json
        assert found["predicted_peak_bytes"] <= budget
        assert found["batch"] == 8
        assert found["micro_batch"] * found["accumulation"] >= 8
        shares.append(found["recompute_fraction"])
        micros.append(found["micro_batch"])
    whole = micros.count(8)
    assert whole >= 3
    assert 0 == shares[0] < shares[1] < shares[whole - 1]
    assert shares[:whole] == sorted(shares[:whole])
    assert micros == sorted(micros, reverse=True)
    assert micros[-1] < 8


def assert_refused(done) -> None:
    """Exit 4, and a message with the need, the budget, the largest part and ways out with their estimates."""
    assert (done.code, done.out) == (4, "")
    text = done.err.splitlines()[-1]
    size = r"[\d.]+ [MG]iB"
    assert re.search(rf"Micro-batch 1 of \S+ at \d+x\d+ px does not fit: predicted peak {size}, budget {size}", text), text
    assert re.search(rf"Largest part: [\w ]+, {size}", text)
    assert "memory.budget" in text
    assert re.search(rf"model\.image_size \d+ \(about {size}\)|memory\.precision bf16 \(about {size}\)", text)


def test_below_the_floor_fit_ends_with_4_before_anything_is_written(workshop):
    """fit refuses what plan refuses, in the same words, and makes no run folder; a size that it proposes fits."""
    common = ("model.image_size=1024", "train.batch=2")
    floor = workshop.plan(*common, "memory.spacing=1", "memory.micro_batch=1").json
    moving = floor["parts"]["saved"] + floor["parts"]["interior"]
    budget = enough(floor) - moving // 2
    planned = workshop.plan(*common, f"memory.budget={budget}B")
    assert_refused(planned)
    done = workshop.fit(*common, f"memory.budget={budget}B", ok=False)
    assert_refused(done)
    assert not workshop.path("").exists()
    proposed = re.search(r"model\.image_size (\d+)", planned.err)
    assert proposed
    smaller = workshop.plan(common[1], f"model.image_size={proposed[1]}", f"memory.budget={budget}B")
    assert smaller.code == 0, smaller.err


def test_a_pinned_size_that_does_not_fit_is_refused_not_changed(workshop):
    """memory.micro_batch and memory.spacing are the user's word: exit 4 rather than another size."""
    first = workshop.plan(*LARGE).json
    need = enough(first) - first["parts"]["baseline"]
    budget = first["parts"]["baseline"] + need // 2
    done = workshop.fit(*LARGE, f"memory.budget={budget}B", "memory.spacing=off", "memory.micro_batch=16", ok=False)
    assert done.code == 4
    assert "memory.spacing off" in done.err
    assert "Micro-batch 16" in done.err


def test_batch_auto_is_the_largest_that_fits(workshop):
    """The optimizer's batch is then the micro-batch, and one more image would not have fitted."""
    common = ("model.image_size=256", "memory.spacing=off")
    eight = workshop.plan(*common, "train.batch=8").json
    budget = enough(eight)
    found = workshop.plan(*common, "train.batch=auto", f"memory.budget={budget + MIB}B").json
    assert found["batch"] == found["micro_batch"] == 8
    over = workshop.plan(*common, "train.batch=9", "memory.micro_batch=9", f"memory.budget={budget + MIB}B")
    assert over.code == 4


def test_a_budget_above_the_machine_is_the_machine_s_matter(workshop):
    """More than there is: exit 6, with both numbers."""
    done = workshop.fit("memory.budget=9999TiB", ok=False)
    assert done.code == 6
    assert re.search(r"memory\.budget is [\d.]+ [TP]iB, but the \w+ device has [\d.]+ [GT]iB; lower it or use auto", done.err), done.err
