"""Budgets that bind: what gives way first, what never changes, and the refusal below the floor."""

from __future__ import annotations

import re
from typing import Any

from hiresvis.memory.budget import RESERVE_BYTES, RESERVE_SHARE

MIB = 2**20
LARGE = ("model.image_size=384", "train.batch=16")


def enough(plan: dict[str, Any]) -> int:
    """The smallest budget that this plan fits: the stated reserve follows the budget, and these plans were made under a large one."""
    return with_reserve(plan["predicted_peak_bytes"] - plan["parts"]["reserve"])


def with_reserve(need: int) -> int:
    """The smallest budget that holds a need and the reserve stated for it."""
    return int((need + RESERVE_BYTES) / (1 - RESERVE_SHARE)) + 1


def tensors(plan: dict[str, Any]) -> int:
    """What a plan needs above what the process takes before its first step."""
    need: int = plan["predicted_peak_bytes"] - plan["parts"]["reserve"] - plan["parts"]["baseline"]
    return need


def test_a_tight_budget_is_kept_by_the_probe_and_by_training(workshop, start):
    """What is stored gives way first, then the micro-batch, the batch never; neither the probe nor training goes over the budget.

    Each run is a process of its own: this one is several times larger than these tensors, and its size drifts by as much.
    """
    setting = ("model.image_size=256", "train.batch=16")
    stored = workshop.plan(*setting).json
    plans = [stored]  # under lower and lower budgets, until the batch no longer fits at once
    while plans[-1]["micro_batch"] == 16:
        room = tensors(stored) * (100 - 6 * len(plans)) // 100
        plans.append(workshop.plan(*setting, f"memory.budget={with_reserve(stored['parts']['baseline'] + room)}B").json)
    *_, least, halved = plans
    assert halved["micro_batch"] < 16 <= halved["micro_batch"] * halved["accumulation"]
    assert [plan["batch"] for plan in plans] == [16] * len(plans)

    def run(name: str, budget: int) -> dict[str, Any]:
        folder = workshop.folder / "runs" / name
        done = start("fit", workshop.recipe, *setting, "train.epochs=1", f"memory.budget={budget}B", f"log.dir={folder}").finish()
        assert done.code == 0, done.err
        plan = workshop.read("plan.json", name)
        (finished,) = workshop.events("run_finished", name)
        assert (plan["budget_bytes"], plan["batch"]) == (budget, 16)
        assert plan["predicted_peak_bytes"] <= budget
        assert plan["measured"]["resident_peak_bytes"] <= budget
        assert finished["measured_peak_bytes"] <= budget
        assert {row["num_images"] for row in workshop.events("step_done", name)} == {16}
        return plan

    ample = run("ample", 4 * 2**30)
    size = ample["parts"]["baseline"] + 4 * MIB  # one process is not quite as large as the next
    tight = run("tight", with_reserve(size + tensors(least)))
    shares = [sum(unit["decision"] == "store" for unit in plan["units"]) / len(plan["units"]) for plan in (ample, tight)]
    assert 1 == shares[0] > shares[1]
    assert (ample["stages"], ample["recompute_fraction"]) == (["all stored"], 0)
    assert "spacing" in tight["stages"][0]
    assert tight["recompute_fraction"] > 0
    assert [ample["micro_batch"], tight["micro_batch"]] == [16, 16]


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
    """More than there is: exit 2, placed, with both numbers."""
    done = workshop.fit("memory.budget=9999TiB", ok=False)
    assert done.code == 2
    told = r"memory\.budget +[\d.]+ [TP]iB is above the [\d.]+ [GT]iB that the \w+ device has; lower it or use auto"
    assert re.search(told, done.err), done.err
