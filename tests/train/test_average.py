"""The moving average of the weights: what it holds, that it comes and goes without a trace, and that it is what is kept."""

from __future__ import annotations

import math
import signal

import pytest
import torch
from safetensors.torch import load_file

from hiresvis.errors import Interrupted, RunFolderError
from hiresvis.run.events import Evaluated, StepDone
from hiresvis.train.average import Average, decay_of
from hiresvis.train.evaluate import evaluate
from hiresvis.train.progress import RunLimits
from hiresvis.train.snapshot import load_snapshot


def averaging(small, model: str = "test_resnet", **options):
    step = small.make_step(model, **options)
    step.average = Average(step.model)
    step.average.decay = 0.5
    return step


def one_step(step, images: torch.Tensor) -> None:
    step.accumulate(images, torch.arange(len(images)) % 3, batch_images=len(images))
    step.apply()


def images(seed: int, count: int = 4) -> torch.Tensor:
    return torch.randint(0, 256, (count, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_it_is_the_average_by_its_formula_warmed_up(small):
    """Each update moves it by 1 - min(decay, (1 + t) / (10 + t)) towards the weights, running statistics included."""
    step = averaging(small)
    names = ["fc.weight", "layer1.0.bn1.running_var"]
    expected = {name: step.model.state_dict()[name].double().clone() for name in names}
    for number in range(1, 13):
        one_step(step, images(number))
        weight = 1 - min(0.5, (1 + number) / (10 + number))
        for name in names:
            expected[name] += weight * (step.model.state_dict()[name].double() - expected[name])
    found = step.average.weights(step.model)
    for name in names:
        assert torch.allclose(found[name].double(), expected[name], rtol=1e-5)
        assert not torch.equal(found[name], step.model.state_dict()[name])


@pytest.mark.parametrize("steps", [1, 100, 5000, 10**6])
def test_it_looks_back_on_a_twentieth_of_the_run(steps):
    """1 / (1 - decay) steps: a twentieth, and ten at least."""
    assert 1 / (1 - decay_of(steps)) == pytest.approx(max(10, steps / 20))


def test_the_model_has_it_inside_and_its_own_weights_afterwards_bit_for_bit(small):
    """Also where evaluation breaks off; layouts stay, and frozen parts are not copied."""
    step = small.make_step("test_resnet")
    step.model.to(memory_format=torch.channels_last)
    for parameter in step.model.layer1.parameters():
        parameter.requires_grad_(False)
    step.model.layer1.eval()
    step.average = Average(step.model)
    assert not any(name.startswith("layer1") for name in step.average.named())
    one_step(step, images(1))
    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    strides = {name: tensor.stride() for name, tensor in step.model.state_dict().items()}
    kept = step.average.weights(step.model)
    averaged = {name: tensor.clone() for name, tensor in kept.items()}
    with pytest.raises(ZeroDivisionError), step.as_evaluated():  # noqa: PT012 - it breaks off inside
        inside = step.model.state_dict()
        assert all(torch.equal(inside[name], averaged[name]) for name in averaged)
        assert {name: tensor.stride() for name, tensor in inside.items()} == strides
        raise ZeroDivisionError
    after = step.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not all(torch.equal(before[name], averaged[name]) for name in before)


def test_a_skipped_step_leaves_it_as_it_is(small):
    """A loss that is not finite changes neither the weights nor their average."""
    step = averaging(small)
    one_step(step, images(1))
    before = [tensor.clone() for tensor in step.average.tensors]
    step.prepare = lambda given: small.prepare(given) * math.nan
    one_step(step, images(2))
    assert step.average.num_updates == 1
    assert all(torch.equal(one, two) for one, two in zip(before, step.average.tensors, strict=True))


def test_what_is_evaluated_and_kept_is_the_average(small, tmp_path):
    """The best weights are the averaged ones, with the metrics that were told; the model goes on with its own."""
    step = averaging(small)
    trainer = small.make_trainer(tmp_path, step=step)
    told = [event for event in trainer.fit() if isinstance(event, Evaluated)]
    best, own = load_file(tmp_path / "weights" / "best.safetensors"), step.model.state_dict()
    assert best.keys() == own.keys()
    assert not torch.equal(best["fc.weight"], own["fc.weight"])
    step.average = None
    step.model.load_state_dict(best)
    loader = small.Images(9, batch=3, shuffle=False)
    assert evaluate(step, loader).loss in [event.loss for event in told]


@pytest.mark.parametrize("num_steps", [2, 4])
def test_a_resumed_run_has_the_same_average_bit_for_bit(small, tmp_path, num_steps):
    """Stopped in the first or the second epoch and resumed by new objects: weights, average and its count as if never stopped."""
    list(small.make_trainer(tmp_path / "whole", step=averaging(small)).fit())
    stopped, count = small.make_trainer(tmp_path / "parts", step=averaging(small)), 0
    with pytest.raises(Interrupted):  # noqa: PT012 - the loop is the statement
        for event in stopped.fit():
            count += isinstance(event, StepDone)
            if count == num_steps:
                stopped._stop.request(signal.SIGINT)
    resumed = small.make_trainer(tmp_path / "parts", step=averaging(small))
    resumed.restore(load_snapshot(tmp_path / "parts" / "snapshot"))
    list(resumed.fit())
    whole, parts = (load_snapshot(tmp_path / name / "snapshot") for name in ("whole", "parts"))
    assert whole.state["average"] == parts.state["average"] == {"num_updates": 6, "decay": 0.5}
    assert any(name.startswith("average/") for name in whole.tensors)
    assert all(torch.equal(tensor, parts.tensors[name]) for name, tensor in whole.tensors.items())


def test_a_snapshot_without_an_average_is_refused_by_a_run_that_has_one(small, tmp_path):
    """The message says what was changed and the way on."""
    list(small.make_trainer(tmp_path, limits=RunLimits(epochs=1)).fit())
    trainer = small.make_trainer(tmp_path, step=averaging(small, "test_vit"))
    with pytest.raises(RunFolderError, match=r"train\.ema, model\.freeze or model\.adapt was changed"):
        trainer.restore(load_snapshot(tmp_path / "snapshot"))
