"""Memory that runs out in mid-training: room is made, the same batch is done again, and no bit of the result is another."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from hiresvis.errors import DoesNotFit
from hiresvis.fit import fit
from hiresvis.recipe import load_recipe

SETTING = ("model.drop_path=0.1", "memory.budget=2GiB", "train.metric=accuracy", "train.seed=3")
FORWARD = 15  # convolutions of test_resnet's forward
DISARMING = ("epoch_done", "run_finished")  # what follows reads and writes files
MESSAGE = "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."


class Shortage(TorchDispatchMode):
    """Fails at chosen calls of operators, counted while `armed`, as an allocation would.

    Attributes:
        numbers: of the calls that fail; each fails once. seen: the names of all calls counted.
    """

    def __init__(self, numbers: set[int], only: str = "") -> None:
        super().__init__()
        self.numbers, self.only = numbers, only
        self.armed, self.seen, self.failed = False, list[str](), list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.armed and any(name in str(func) for name in self.only.split("|")):
            self.seen.append(str(func))
            if len(self.seen) - 1 in self.numbers:
                self.failed.append(str(func))
                raise RuntimeError(MESSAGE)
        return func(*args, **(kwargs or {}))


def run(recipe: Path, folder: Path, shortage: Shortage, *overrides: str, resume: bool = False) -> list[Any]:
    """A fit in this process, under the shortage while epochs are trained and evaluated."""
    events = []
    with shortage:
        for event in fit(load_recipe(recipe, [f"log.dir={folder}", "log.report=false", *SETTING, *overrides]), resume=resume):
            events.append(event)
            shortage.armed = event.kind == "epoch_started" or (shortage.armed and event.kind not in DISARMING)
    return events


def load_plan(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "plan.json").read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {f"{name} {key}": value for name in ("best", "last") for key, value in load_file(folder / f"weights/{name}.safetensors").items()}


def assert_same(folder: Path, other: Path) -> None:
    ours, theirs = weights(folder), weights(other)
    assert ours.keys() == theirs.keys()
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, folders: Path, make_workshop: Callable[..., Any]) -> tuple[Any, Path, list[str]]:
    """The recipe, a run that never ran out, and the operators that it called."""
    torch.set_num_threads(1)
    work = make_workshop(tmp_path_factory.mktemp("straight"), folders)
    counted = Shortage(set())
    run(work.recipe, work.folder / "straight", counted)
    return work, work.folder / "straight", counted.seen


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_run_that_ran_out_at_any_operator_ends_with_the_same_bits(straight, tmp_path, seed):
    """Forward, backward, optimizer, evaluation, writing weights: wherever one of the run's operators fails, the end is the same."""
    work, expected, calls = straight
    shortage = Shortage({random.Random(seed).randrange(len(calls))})
    events = run(work.recipe, tmp_path / "run", shortage)
    assert len(shortage.failed) == 1
    assert events[-1].kind == "run_finished"
    assert_same(tmp_path / "run", expected)


def test_running_out_in_small_images_tightens_their_plan_alone(straight, tmp_path):
    """With `train.resize` the plan of the size at hand gives way, at the same bits; the other's stays, in plan.json as well."""
    work, *_ = straight
    steps = "train.resize=[[0, 32], [50%, 64]]"
    run(work.recipe, tmp_path / "straight", Shortage(set()), steps)
    events = run(work.recipe, tmp_path / "run", Shortage({7}, only="aten.convolution.default"), steps)
    assert any(event.kind == "notice" and "epoch 1, step 1: memory ran out" in event.text for event in events)
    assert_same(tmp_path / "run", tmp_path / "straight")
    before, after = load_plan(tmp_path / "straight"), load_plan(tmp_path / "run")
    assert (after["eval_batch"], before["eval_batch"]) == (16, 16)
    key = "predicted_counted_bytes"  # of tensors alone: the two runs began in a process of another size
    assert after["sizes"][0]["plan"][key] < before["sizes"][0]["plan"][key]
    assert after["checkpoint_plan"][key] == before["checkpoint_plan"][key]


def test_evaluation_that_runs_out_between_small_images_stays_small(straight, tmp_path):
    """Half a batch of evaluation is the run's from then on: in plan.json, at the larger images, and for `evaluate`."""
    work, *_ = straight
    shortage = Shortage({3}, only="aten.adaptive_avg_pool2d|aten.mean")
    events = run(work.recipe, tmp_path / "run", shortage, "train.resize=[[0, 32], [50%, 64]]")
    assert any(event.kind == "notice" and "evaluation ran out of memory" in event.text for event in events)
    stored = load_plan(tmp_path / "run")
    assert stored["eval_batch"] == stored["checkpoint_plan"]["eval_batch"] == 8
    assert "eval_batch: 8" in (tmp_path / "run" / "recipe.resolved.yaml").read_text()
    assert not stored["measured"].get("of_an_earlier_plan")


@pytest.mark.parametrize(
    ("operator", "number", "said"),
    [
        ("aten.convolution.default", 7, "epoch 1, step 1: memory ran out"),
        ("aten.convolution_backward", 7, "epoch 1, step 1: memory ran out"),
        ("aten._fused_adamw_", 3, "the optimizer broke off half way: going back to the last snapshot"),  # between two groups
        ("aten.adaptive_avg_pool2d|aten.mean", 3, "evaluation ran out of memory"),
    ],
    ids=["forward", "backward", "optimizer", "evaluation"],
)
def test_each_part_of_a_step_is_done_again_exactly(straight, tmp_path, operator, number, said):
    """Where the first, the last and the middle of a step fail: the same weights, a notice, and a plan that needs less in plan.json."""
    work, expected, calls = straight
    assert calls[: calls.index("aten.convolution_backward.default")].count("aten.convolution.default") == FORWARD
    shortage = Shortage({number}, only=operator)
    events = run(work.recipe, tmp_path / "run", shortage)
    assert len(shortage.failed) == 1
    assert any(event.kind == "notice" and said in event.text for event in events)
    assert_same(tmp_path / "run", expected)
    plans = [event for event in events if event.kind == "plan_chosen"]
    stored = json.loads((tmp_path / "run" / "plan.json").read_text())
    if said.startswith("evaluation"):
        assert (len(plans), stored["eval_batch"]) == (1, 8)
    else:
        assert plans[1].predicted_peak_bytes < plans[0].predicted_peak_bytes
        assert stored["measured"]["of_an_earlier_plan"]
        assert stored["predicted_peak_bytes"] == stored["checkpoint_plan"]["predicted_peak_bytes"] == plans[1].predicted_peak_bytes
        assert "memory ran out" in stored["why"]


def test_second_run_of_a_segment_is_done_again_exactly(straight, tmp_path):
    """Memory runs out where backward recomputes; one image at a time and a pinned spacing leave no other plan, so the same is tried."""
    work, _, _ = straight
    setting = ("memory.spacing=1", "train.batch=1", "model.norm=frozen", "train.epochs=1")
    run(work.recipe, tmp_path / "expected", Shortage(set()), *setting)
    shortage = Shortage({FORWARD + 2}, only="aten.convolution.default")
    events = run(work.recipe, tmp_path / "run", shortage, *setting)
    assert len(shortage.failed) == 1
    assert any("there is no tighter plan, and the batch is done again" in event.text for event in events if event.kind == "notice")
    assert_same(tmp_path / "run", tmp_path / "expected")


def test_micro_batch_is_halved_where_nothing_is_left_to_tighten(straight, tmp_path):
    """Pinned spacing leaves no tighter plan: half the images at once, the batch stays, and a resumed run keeps to it."""
    work, _, _ = straight
    setting = ("memory.spacing=1", "train.epochs=1")
    events = run(work.recipe, tmp_path / "run", Shortage({40}), *setting)
    assert [(event.micro_batch, event.accumulation, event.batch) for event in events if event.kind == "plan_chosen"] == [
        (6, 1, 6),
        (3, 2, 6),
    ]
    assert any("micro-batch 6 leaves no plan that fits: 3 from here on" in event.text for event in events if event.kind == "notice")
    assert [event.num_images for event in events if event.kind == "step_done"] == [6, 6, 4]
    again = run(work.recipe, tmp_path / "run", Shortage(set()), *setting[:1], "train.epochs=2", resume=True)
    assert [event.micro_batch for event in again if event.kind == "plan_chosen"] == [3]


def test_one_time_too_many_within_an_hour_ends_the_run_with_numbers(straight, tmp_path):
    """A machine that is simply too small is told so, with the plan's numbers and the way on; the run can be resumed."""
    work, _, _ = straight
    shortage = Shortage(set(range(10**6)), only="aten.convolution_backward")
    with pytest.raises(DoesNotFit, match=r"Memory ran out 5 times within an hour, the last at epoch 1, step 1 .*--resume"):
        run(work.recipe, tmp_path / "run", shortage)
    assert len(shortage.failed) == 5
    run(work.recipe, tmp_path / "run", Shortage(set()), resume=True)
    assert load_plan(tmp_path / "run")["micro_batch"] < 6


def test_run_that_may_not_plan_again_ends_the_first_time(straight, tmp_path):
    """memory.on_oom: stop. What is saved can be resumed, and ends as if nothing had been."""
    work, expected, _ = straight
    with pytest.raises(DoesNotFit, match=r"epoch 2, step 2 .* and memory\.on_oom is stop"):
        run(work.recipe, tmp_path / "run", Shortage({4 * FORWARD}, only="aten.convolution_backward"), "memory.on_oom=stop")
    run(work.recipe, tmp_path / "run", Shortage(set()), "memory.on_oom=stop", resume=True)
    assert_same(tmp_path / "run", expected)


def test_resume_with_less_memory_plans_again_with_the_same_batch(straight, tmp_path):
    """A run that goes on where only a part of the memory is left: told, planned and proved anew, and no bit of it is another."""
    work, expected, _ = straight
    folder = tmp_path / "run"
    with pytest.raises(DoesNotFit):
        run(work.recipe, folder, Shortage({4 * FORWARD}, only="aten.convolution_backward"), "memory.on_oom=stop")
    peak = load_plan(folder)["measured"]["resident_peak_bytes"]
    stored = load_plan(folder)
    stored["measured"]["resident_peak_bytes"] = 4 * peak  # as if it came from a larger machine
    (folder / "plan.json").write_text(json.dumps(stored))
    events = run(work.recipe, folder, Shortage(set()), "memory.on_oom=stop", resume=True)
    assert any("planning again, with the same batch" in event.text for event in events if event.kind == "notice")
    assert load_plan(folder)["measured"]["resident_peak_bytes"] < 2 * peak
    assert_same(folder, expected)
