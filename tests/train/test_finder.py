"""The finder on the CPU with a real model and real steps: what it returns ran, and it leaves no trace."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch

from hiresvis import device
from hiresvis.device import PeakMeter
from hiresvis.errors import DoesNotFit, Interrupted
from hiresvis.memory.budget import Budget
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.search import Limits
from hiresvis.run.events import LadderRow, Notice, PlanChosen
from hiresvis.train import finder as finder_module
from hiresvis.train.average import Average
from hiresvis.train.finder import Finder, MeasuredPeak
from hiresvis.train.freezing import TrainMode
from hiresvis.train.losses import CrossEntropy
from hiresvis.train.step import TrainStep
from hiresvis.train.stop import StopRequest
from hiresvis.units import MIB

MODEL, PX, BATCH = "test_resnet", 160, 64  # 6 MiB an image, 7 MiB of weights and state
IMAGE = ((PX, PX, 3), torch.uint8)
TIGHT = Limits(batch=48, micro_batch=48)  # what fits 24 stored and that many with recompute
SLACK_BYTES = 60 * MIB  # what a resident size may be off by in a process that has run other tests


@pytest.fixture(autouse=True, scope="module")
def _steady_resident_size(small) -> None:
    """Freed tensors leave the process, as in every run on the CPU; what libraries load at their first step is loaded."""
    device.return_memory_to_system()
    step = small.make_step(MODEL)
    for _ in range(2):
        step.accumulate(torch.zeros(16, PX, PX, 3, dtype=torch.uint8), torch.zeros(16, dtype=torch.int64), batch_images=16)
        step.apply()


@cache
def _profile(small) -> MemoryProfile:
    return small.trace(small.make_step(MODEL), MODEL, PX)


def _need(small, micro_batch: int) -> int:
    """Predicted bytes of this micro-batch, nothing recomputed, without a baseline."""
    from hiresvis.memory.peak import StepSetting, predict_peak
    from hiresvis.memory.plan import store_all

    profile = _profile(small)
    return predict_peak(profile, store_all(profile), micro_batch, StepSetting(accumulates=True, eval_batch=1)).total_bytes


class _Recording(Finder):
    """Remembers every size that ran and what it measured."""

    def probe(self, plan) -> MeasuredPeak:
        measured = super().probe(plan)
        self.probed = [*getattr(self, "probed", []), (plan, measured)]
        return measured


def _finder(small, step: TrainStep, room_bytes: int, *, hidden_bytes: int = 0, **kwargs: object) -> _Recording:
    """A finder with `room_bytes` above the process's present size; `hidden_bytes` of that size are kept from the planner."""
    device.release()
    in_use = device.in_use(step.device)
    weights = sum(tensor.nbytes for tensor in (*step.model.parameters(), *step.model.buffers()))
    budget = Budget(
        total_bytes=in_use - weights + room_bytes,
        baseline_bytes=in_use - weights - hidden_bytes,
        capacity_bytes=2**40,
        others_bytes=0,
        reserve_bytes=0,
        why="given",
    )
    given = {"limits": Limits(batch=BATCH), "eval_batch": 2, **kwargs}
    return _Recording(step=step, train_mode=TrainMode(step.model), profile=_profile(small), budget=budget, raw_image=IMAGE, **given)


def _everything(step: TrainStep) -> dict[str, object]:
    model = step.model
    return {
        "tensors": {name: (id(tensor), tensor.clone()) for name, tensor in (*model.named_parameters(), *model.named_buffers())},
        "gradients": [parameter.grad for parameter in model.parameters()],
        "modes": {name: module.training for name, module in model.named_modules()},
        "wrapped": [name for name, module in model.named_modules() if "forward" in module.__dict__],
        "optimizer": dict(step.optimizer.state),
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in step.optimizer.param_groups],
        "random": torch.get_rng_state(),
        "scaler": step.state_dict(),
    }


def _assert_untouched(before: dict[str, object], after: dict[str, object]) -> None:
    for name, (identity, value) in before["tensors"].items():
        assert after["tensors"][name][0] == identity, name
        assert torch.equal(after["tensors"][name][1], value), name
    assert torch.equal(before["random"], after["random"])
    assert all(gradient is None for gradient in after["gradients"])
    assert after["wrapped"] == []
    assert after["optimizer"] == {}
    for part in ("modes", "groups", "scaler"):
        assert before[part] == after[part], part


def _trained(step: TrainStep) -> list[torch.Tensor]:
    """Two steps from here on, with dropout drawing numbers."""
    images = torch.randint(0, 256, (6, PX, PX, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        step.accumulate(images, torch.arange(6) % 3, batch_images=6)
        step.apply()
    averaged = () if step.average is None else (*step.average.tensors, torch.tensor(step.average.num_updates))
    return [tensor.clone() for tensor in (*step.model.state_dict().values(), *averaged)]


@pytest.mark.parametrize("averaged", [False, True])
def test_finding_leaves_no_trace(small, averaged: bool) -> None:
    """Weights, statistics, their average, optimizer, modes, gradients and random state are bit for bit as before, and so is the training
    that follows."""
    untouched, step = small.make_step(MODEL), small.make_step(MODEL)
    for each in (step, untouched):
        each.model.layer1.eval()
        each.average = Average(each.model) if averaged else None
    random = torch.get_rng_state()
    before = _everything(step)
    finder = _finder(small, step, _need(small, 24) + SLACK_BYTES)
    list(finder.find())
    assert finder.found is not None
    _assert_untouched(before, _everything(step))
    torch.set_rng_state(random)
    after_finding = _trained(step)
    torch.set_rng_state(random)
    assert all(torch.equal(one, other) for one, other in zip(after_finding, _trained(untouched), strict=True))


@pytest.mark.parametrize("averaged", [False, True])
def test_what_is_returned_ran_within_the_budget(small, averaged: bool) -> None:
    """The found plan is the last that was probed, its measured peak is within the budget, its counted bytes within 2% of those predicted,
    and the events tell the same."""
    step = small.make_step(MODEL)
    if averaged:
        step.average = Average(step.model)
    finder = _finder(small, step, _need(small, 24) + SLACK_BYTES)
    if averaged:
        finder.profile = small.trace(step, MODEL, PX, ema=True)
        assert finder.profile.ema > 0.9 * sum(tensor.nbytes for tensor in step.average.tensors)
    events = list(finder.find())
    plan, measured = finder.probed[-1]
    assert finder.found.plan is plan
    assert finder.found.measured is measured
    assert measured.peak_bytes <= finder.budget.total_bytes
    assert measured.counted_bytes == pytest.approx(plan.predicted_counted_bytes, rel=0.02)
    assert 16 <= plan.micro_batch <= 64
    assert (plan.batch, plan.accumulation) == (BATCH, -(-BATCH // plan.micro_batch))
    chosen = events[-1]
    assert isinstance(chosen, PlanChosen)
    assert (chosen.micro_batch, chosen.measured_peak_bytes) == (plan.micro_batch, measured.peak_bytes)
    rows = [event for event in events if isinstance(event, LadderRow)]
    assert (rows[0].spacing, rows[-1].verdict, rows[-1].measured_peak_bytes) == ("off", "chosen", measured.peak_bytes)


def test_a_size_that_exceeds_the_budget_corrects_the_search(small) -> None:
    """Bytes that the planner was not told of: the first size runs above the budget, a line says so, a smaller one is returned."""
    finder = _finder(small, small.make_step(MODEL), _need(small, 32), hidden_bytes=200 * MIB)
    events = list(finder.find())
    (first, first_measured), (last, last_measured) = finder.probed[0], finder.probed[-1]
    assert 2 <= len(finder.probed) <= 3
    assert first_measured.peak_bytes > finder.budget.total_bytes
    assert last_measured.peak_bytes <= finder.budget.total_bytes
    assert last.predicted_counted_bytes < first.predicted_counted_bytes
    assert finder.found.plan is last
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert len(notices) == len(finder.probed) - 1
    assert f"micro-batch {first.micro_batch} used" in notices[0]
    assert "Planning again with" in notices[0]


class _Counted(_Recording):
    """A probe that runs its steps and measures what is predicted of tensors, beside a process that is smaller than the budget says; and
    more above a size, as kernels do that take other ways there. (What a test process has freed and uses again differs from run to run.)"""

    spare_bytes, most, more_bytes = 80 * MIB, 10**9, 0

    def probe(self, plan) -> MeasuredPeak:
        is_larger = plan.micro_batch > self.most
        peak = plan.predicted_counted_bytes + self.budget.baseline_bytes - self.spare_bytes + self.more_bytes * is_larger
        measured = replace(super().probe(plan), peak_bytes=peak)
        self.probed[-1] = (plan, measured)
        return replace(measured, trained=False) if is_larger else measured


def _counted(small) -> _Counted:
    finder = _finder(small, small.make_step(MODEL), _need(small, 32), hidden_bytes=-_Counted.spare_bytes, limits=Limits(batch=None))
    finder.__class__ = _Counted
    return finder


def test_a_baseline_that_was_too_high_is_seen_by_the_probe(small) -> None:
    """Bytes that the budget counted as in use and training uses again: the first size leaves them free, and a larger one is proved."""
    finder = _counted(small)
    events = list(finder.find())
    (first, first_measured), (last, last_measured) = finder.probed[0], finder.probed[-1]
    assert finder.budget.total_bytes - first_measured.peak_bytes >= finder.spare_bytes
    assert last.micro_batch > 1.15 * first.micro_batch
    assert 0 <= finder.budget.total_bytes - last_measured.peak_bytes < finder.spare_bytes // 4
    assert finder.found.plan is last
    assert last.parts["baseline"] < finder.budget.baseline_bytes
    assert sum(last.parts.values()) == last.predicted_peak_bytes
    assert any("less than was left for it" in event.text for event in events if isinstance(event, Notice))


@pytest.mark.parametrize(("more_bytes", "sizes"), [(40 * MIB, 3), (400 * MIB, 2)])
def test_between_a_size_that_ran_and_one_that_did_not_another_is_tried(small, more_bytes: int, sizes: int) -> None:
    """Where the larger size exceeds the budget by little, what it measured says how much less would fit; by much, the first it is."""
    finder = _counted(small)
    finder.most, finder.more_bytes = 45, more_bytes
    list(finder.find())
    tried = [plan.micro_batch for plan, _ in finder.probed]
    assert len(tried) == sizes
    assert finder.found.measured.peak_bytes <= finder.most_bytes
    found = finder.found.plan.micro_batch
    assert tried[0] < found < tried[1] if sizes == 3 else found == tried[0] < tried[1]


class _RunsOut(TrainStep):
    """Out of memory the first few times, as a device would be: in the middle of a step, with its tensors in the frame."""

    failures = 0
    eval_most = 10**9
    eval_extra = 0
    at_apply = False

    def accumulate(self, images, targets, *, batch_images):
        held = torch.zeros(1000)
        self.held = weakref.ref(held)
        if self.failures:
            self.failures -= 1
            super().accumulate(images[:1], targets[:1], batch_images=batch_images)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().accumulate(images, targets, batch_images=batch_images)

    def apply(self):
        if self.at_apply:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().apply()

    def predict(self, images):
        if len(images) > self.eval_most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        extra = torch.ones(len(images) * self.eval_extra, dtype=torch.uint8)
        out = super().predict(images)
        del extra
        return out


@pytest.fixture
def runs_out(small) -> Iterator[_RunsOut]:
    step = small.make_step(MODEL)
    step.__class__ = _RunsOut
    return step


@pytest.mark.parametrize("failures", [1, 2])
def test_out_of_memory_goes_down_and_holds_nothing(small, runs_out: _RunsOut, failures: int) -> None:
    """A plan that runs out is not tried again: one that needs less is, and is returned when it runs; the dead exception holds nothing."""
    runs_out.failures = failures
    before = _everything(runs_out)
    finder = _finder(small, runs_out, _need(small, 64) + SLACK_BYTES)
    events = list(finder.find())
    assert [measured.out_of_memory for _, measured in finder.probed] == [True] * failures + [False]
    needs = [plan.predicted_counted_bytes for plan, _ in finder.probed]
    assert needs == sorted(set(needs), reverse=True)
    assert finder.found.plan is finder.probed[-1][0]
    assert any(
        f"micro-batch {finder.probed[0][0].micro_batch} ran out of memory" in event.text for event in events if isinstance(event, Notice)
    )
    assert runs_out.held() is None
    _assert_untouched(before, _everything(runs_out))


def test_memory_of_a_failed_probe_is_given_back(small, runs_out: _RunsOut) -> None:
    """After a probe that ran out with a graph in being, no storage made in it is alive."""
    runs_out.failures = 1
    finder = _finder(small, runs_out, _need(small, 64) + SLACK_BYTES)
    plan = finder.planner(finder.limits, 0)
    plan = plan.plan(plan.choose(), "")
    device.release()
    in_use = device.in_use(runs_out.device)
    counter = device.StorageCounter()
    counter.track([*runs_out.model.parameters(), *runs_out.model.buffers()])
    resident = counter.live_bytes
    with counter:
        measured = finder.probe(plan)
    assert measured.out_of_memory
    assert counter.live_bytes - resident < 2**16  # scalars and constants at most
    assert device.in_use(runs_out.device) - in_use < SLACK_BYTES


@pytest.mark.parametrize("place", ["training", "optimizer step", "evaluation"])
def test_running_out_anywhere_is_seen_by_the_probe(small, runs_out: _RunsOut, place: str) -> None:
    """In training, in the optimizer's step or in evaluation: at most three sizes run, none is returned, and no trace is left."""
    runs_out.failures = 99 if place == "training" else 0
    runs_out.at_apply = place == "optimizer step"
    runs_out.eval_most = 0 if place == "evaluation" else 10**9
    before = _everything(runs_out)
    finder = _finder(small, runs_out, _need(small, 16) + 3 * SLACK_BYTES, limits=Limits(batch=16, micro_batch=16))
    with pytest.raises(DoesNotFit) as caught:
        list(finder.find())
    assert 1 <= len(finder.probed) <= 3
    assert all(measured.out_of_memory for _, measured in finder.probed)
    assert finder.found is None
    assert caught.value.exit_code == 4
    assert ("Evaluation does not fit: with a single image it ran out of memory" in str(caught.value)) == (place == "evaluation")
    _assert_untouched(before, _everything(runs_out))


def _assert_only_evaluation_gave_way(finder: _Recording, events: list) -> None:
    """Every size that ran is the same training plan, with half as many images in evaluation each time; only the last one fits."""
    plans = [plan for plan, _ in finder.probed]
    assert len({(plan.segments, plan.micro_batch, plan.batch) for plan in plans}) == 1
    assert all(later.eval_batch == plan.eval_batch // 2 for plan, later in itertools.pairwise(plans))
    assert [measured.fits(finder.most_bytes) for _, measured in finder.probed] == [False] * (len(plans) - 1) + [True]
    assert all(measured.trained for _, measured in finder.probed)
    assert finder.found.plan is plans[-1]
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert len(notices) == len(plans) - 1
    assert all(f"micro-batch {plans[0].micro_batch} of training fits and stays" in text for text in notices)


@pytest.mark.parametrize(("eval_batch", "sizes"), [(None, [16, 8, 4]), (6, [6, 3])], ids=["auto", "given"])
def test_evaluation_that_runs_out_lowers_its_own_batch(small, runs_out: _RunsOut, eval_batch: int | None, sizes: list[int]) -> None:
    """Half as many images each time, chosen or given, until they fit; the training plan is as predicted, and no trace is left."""
    runs_out.eval_most = 5
    before = _everything(runs_out)
    limits = Limits(batch=8, micro_batch=8)
    finder = _finder(small, runs_out, _need(small, 8) + 3 * SLACK_BYTES, limits=limits, eval_batch=eval_batch)
    events = list(finder.find())
    assert [plan.eval_batch for plan, _ in finder.probed] == sizes
    _assert_only_evaluation_gave_way(finder, events)
    _assert_untouched(before, _everything(runs_out))


def test_evaluation_above_the_budget_lowers_its_own_batch(small, runs_out: _RunsOut) -> None:
    """It runs, but above the budget that training keeps: fewer images are evaluated at once."""
    runs_out.eval_extra = 100 * MIB
    finder = _finder(small, runs_out, _need(small, 8) + 3 * SLACK_BYTES, limits=Limits(batch=8, micro_batch=8), eval_batch=8)
    events = list(finder.find())
    assert 1 <= finder.found.plan.eval_batch < 8
    assert not any(measured.out_of_memory for _, measured in finder.probed)
    _assert_only_evaluation_gave_way(finder, events)


def test_a_size_that_flushes_the_allocators_cache_is_too_large(small, monkeypatch) -> None:
    """It ran within the budget, but only because the cache was given back: a smaller one is taken, and the line says why."""

    class Flushing(PeakMeter):
        started = 0

        def start(self) -> None:
            super().start()
            Flushing.started += 1

        def num_retries(self) -> int:
            return 3 if Flushing.started == 1 else 0

    monkeypatch.setattr("hiresvis.train.finder.PeakMeter", Flushing)
    finder = _finder(small, small.make_step(MODEL), _need(small, 16) + SLACK_BYTES)
    events = list(finder.find())
    (first, measured), (last, _) = finder.probed[0], finder.probed[-1]
    assert (measured.num_retries, measured.out_of_memory, measured.trained) == (3, False, False)
    assert last.predicted_counted_bytes < first.predicted_counted_bytes
    assert finder.found.plan is last
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert f"micro-batch {first.micro_batch} ran only because the allocator gave its cache back 3 times" in notices[0]


def test_after_running_out_a_tenth_less_is_planned_above_the_baseline(small) -> None:
    """What is in use before the first step is no plan's doing, so it is not scaled: the room for the rest is nine tenths of the need."""
    finder = _finder(small, small.make_step(MODEL), _need(small, 16) + SLACK_BYTES)
    planner = finder.planner(finder.limits, 0)
    plan = planner.plan(planner.choose(), "")
    baseline = finder.budget.baseline_bytes
    above = plan.predicted_peak_bytes - baseline
    assert baseline > above
    reserve = finder._corrected(plan, MeasuredPeak(peak_bytes=0, base_bytes=0, out_of_memory=True), 0)
    assert finder.budget.total_bytes - reserve - baseline == above * 9 // 10


def test_nothing_fits_by_prediction(small) -> None:
    """No step runs; the error has the need, the budget, the largest part and the remedies it was given."""
    finder = _finder(small, small.make_step(MODEL), 3 * MIB, remedies=lambda answer: ("lower model.image_size to 32", "precision bf16"))
    with pytest.raises(DoesNotFit, match="Micro-batch 1 of test_resnet at 160x160 px does not fit") as caught:
        list(finder.find())
    error = caught.value
    assert not hasattr(finder, "probed")
    assert error.need_bytes > error.budget_bytes == finder.budget.total_bytes
    assert error.remedies == ("lower model.image_size to 32", "precision bf16")
    part, part_bytes = error.largest_part
    text = str(error)
    assert f"Largest part: {part}, " in text
    assert part_bytes < error.need_bytes
    assert "Ways out: lower model.image_size to 32; precision bf16." in text


def test_another_error_is_raised_and_leaves_no_trace(small, runs_out: _RunsOut, monkeypatch) -> None:
    """An error that is not about memory is not taken for an answer."""

    class Fails(CrossEntropy):
        def __call__(self, outputs, targets):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(runs_out, "loss_fn", Fails())
    before = _everything(runs_out)
    finder = _finder(small, runs_out, _need(small, 16) + SLACK_BYTES)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        list(finder.find())
    _assert_untouched(before, _everything(runs_out))


def test_a_stop_ends_the_search_without_a_trace(small) -> None:
    """A signal while a size runs: Interrupted after it, the model as before."""
    step, stop = small.make_step(MODEL), StopRequest()
    before = _everything(step)
    finder = _finder(small, step, _need(small, 16) + SLACK_BYTES, stop=stop)
    events = finder.find()
    assert isinstance(next(events), LadderRow)
    stop.request()
    with pytest.raises(Interrupted, match="nothing was trained"):
        list(events)
    assert finder.found is None
    _assert_untouched(before, _everything(step))


def test_a_pinned_micro_batch_runs_as_it_is(small) -> None:
    """memory.micro_batch 5 of a batch of 12: that size is probed, in three passes."""
    finder = _finder(small, small.make_step(MODEL), _need(small, 16) + SLACK_BYTES, limits=Limits(batch=12, micro_batch=5))
    list(finder.find())
    assert [(plan.micro_batch, plan.accumulation) for plan, _ in finder.probed] == [(5, 3)]
    assert "5 was given" in finder.found.plan.why


def test_the_evaluation_batch_does_not_raise_the_peak(small) -> None:
    """Left to choose, it is the largest up to 16 at which training stays the peak; a given one is kept."""
    finder = _finder(
        small, small.make_step(MODEL), _need(small, 16) + SLACK_BYTES, limits=Limits(batch=12, micro_batch=12), eval_batch=None
    )
    list(finder.find())
    assert finder.found.plan.eval_batch == 16
    finder = _finder(small, small.make_step(MODEL), _need(small, 16) + SLACK_BYTES, limits=Limits(batch=12, micro_batch=12), eval_batch=3)
    list(finder.find())
    assert finder.found.plan.eval_batch == 3


def test_units_are_timed_once_and_weigh_recompute(small, monkeypatch) -> None:
    """Every unit gets a pace; a finder that is given the times takes them and runs nothing for them."""
    step = small.make_step(MODEL)
    finder = _finder(small, step, _need(small, 24) + SLACK_BYTES, limits=TIGHT)
    list(finder.find())
    profile = _profile(small)
    assert finder.unit_seconds.keys() == {index for index, unit in enumerate(profile.units) if unit.modules}
    assert len(finder.limits.prices.pace) == len(profile.units)
    monkeypatch.setattr(finder_module, "time_units", lambda *_: pytest.fail("timed again"))
    again = _finder(small, small.make_step(MODEL), _need(small, 24) + SLACK_BYTES, limits=TIGHT, unit_seconds=finder.unit_seconds)
    list(again.find())
    assert again.limits == finder.limits


def test_a_pinned_spacing_is_not_timed(small, monkeypatch) -> None:
    """Where nothing is to be chosen no time is spent on weighing."""
    monkeypatch.setattr(finder_module, "time_units", lambda *_: pytest.fail("timed for nothing"))
    finder = _finder(small, small.make_step(MODEL), _need(small, 16) + SLACK_BYTES, limits=Limits(batch=8, spacing=1))
    list(finder.find())
    assert finder.found is not None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), ValueError("Expected more than 1 value per channel when training")])
def test_what_cannot_be_timed_is_weighed_by_flops(small, monkeypatch, error) -> None:
    """A forward that runs out of memory, or that cannot take a single image, is no reason not to look for the batch."""

    tried = []

    def fails(*_: object) -> None:
        tried.append(1)
        raise error

    monkeypatch.setattr(finder_module, "time_units", fails)
    finder = _finder(small, small.make_step(MODEL), _need(small, 24) + SLACK_BYTES, limits=TIGHT)
    list(finder.find())
    assert finder.found is not None
    assert finder.limits.prices.pace == ()
    assert tried


def test_a_given_evaluation_batch_that_alone_does_not_fit_is_halved_before_anything_runs(small) -> None:
    """Training fits, evaluation of so many does not: half as many are planned, and it is said with both numbers."""
    profile = _profile(small)
    room = _need(small, 4) + SLACK_BYTES
    too_many = 2
    while profile.weights + profile.buffers + profile.optimizer_state + profile.evaluation.at(too_many) <= room:
        too_many *= 2
    finder = _finder(small, small.make_step(MODEL), room, limits=Limits(batch=4, spacing="off"), eval_batch=too_many)
    events = list(finder.find())
    assert finder.found.plan.eval_batch <= too_many // 2
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert any(f"evaluation of {too_many} images" in text and f"{too_many // 2} at once" in text for text in notices)


def test_what_never_fits_is_refused_without_a_forward(small, monkeypatch) -> None:
    """Units are timed only where a plan fits by prediction."""
    monkeypatch.setattr(finder_module, "time_units", lambda *_: pytest.fail("timed for nothing"))
    with pytest.raises(DoesNotFit):
        list(_finder(small, small.make_step(MODEL), 0).find())
