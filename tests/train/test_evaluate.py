"""Evaluation of a split."""

from __future__ import annotations

import pytest
import torch

from hiresvis.train.evaluate import evaluate, evaluation_steps
from hiresvis.train.losses import CrossEntropy, Regression


def test_samples_are_in_order_with_name_target_scores_and_loss(small):
    """Each sample has its place; the mean of the losses is the loss, the share of right ones the accuracy."""
    step = small.make_step()
    loader = small.Images(7, batch=3, shuffle=False)
    result = evaluate(step, loader, name_of=lambda index: f"{index}.png")
    step.model.eval()
    scores = step.predict(loader.images).softmax(1)
    assert result.names == tuple(f"{index}.png" for index in range(7))
    assert torch.equal(result.targets, loader.targets)
    assert torch.allclose(result.scores, scores, rtol=1e-5)
    assert result.loss == pytest.approx(result.losses.mean().item())
    assert result.losses.tolist() == pytest.approx((-scores.log()[range(7), loader.targets]).tolist(), rel=1e-4)
    assert result.metrics["accuracy"] == pytest.approx((scores.argmax(1) == loader.targets).double().mean().item())


def test_evaluation_repeats_itself_and_leaves_no_trace(small):
    """Twice the same digits; modes, batch statistics, gradients and the random state are as before, frozen layers still in eval."""
    step = small.make_step("test_resnet")
    step.model.layer1.eval()
    modes = [module.training for module in step.model.modules()]
    state = {name: value.clone() for name, value in step.model.state_dict().items()}
    random_state = torch.get_rng_state()
    first, second = (evaluate(step, small.Images(7, batch=3, shuffle=False)) for _ in range(2))
    assert torch.equal(first.scores, second.scores)
    assert torch.equal(first.losses, second.losses)
    assert (first.loss, first.metrics) == (second.loss, second.metrics)
    assert [module.training for module in step.model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in step.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_evaluation_that_is_broken_off_puts_modes_back(small):
    """Closing the generator after one batch leaves the model in train mode."""
    step = small.make_step()
    steps = evaluation_steps(step, small.Images(7, batch=3, shuffle=False))
    assert next(steps) == (1, 3)
    assert not step.model.training
    steps.close()
    assert all(module.training for module in step.model.modules())


def test_the_training_loss_decides_how_outputs_are_read(small):
    """A regression's scores are its outputs in the targets' own units, its loss the training loss, its metrics those of regress."""
    step, loader = small.make_step(), small.Images(5, batch=2, shuffle=False)
    loader.targets = torch.stack([5000 + 300 * torch.arange(5.0), torch.arange(5.0) / 1000, torch.ones(5)], dim=1).double()
    step.loss_fn = Regression("l1", mean=(5600.0, 0.002, 0.0), std=(424.0, 0.0014, 1.0))
    result = evaluate(step, loader)
    step.model.eval()
    expected = step.predict(loader.images).double() * torch.tensor([424.0, 0.0014, 1.0]) + torch.tensor([5600.0, 0.002, 0.0])
    assert torch.allclose(result.scores, expected, rtol=1e-5)
    assert list(result.metrics) == ["mae", "rmse", "r2"]
    assert result.metrics["mae"] == pytest.approx((expected - loader.targets).abs().mean().item(), rel=1e-4)


def test_smoothing_is_left_out_of_an_evaluations_loss(small):
    """Runs with and without it can be compared."""
    plain, smooth = small.make_step(), small.make_step()
    smooth.loss_fn = CrossEntropy(label_smoothing=0.5)
    assert evaluate(plain, small.Images(4, batch=2)).loss == evaluate(smooth, small.Images(4, batch=2)).loss


def test_empty_split_is_refused(small):
    """There is no mean over nothing."""
    with pytest.raises(ValueError, match="split to evaluate is empty"):
        evaluate(small.make_step(), small.Images(0, batch=3, shuffle=False))


def test_flips_are_the_mean_of_an_image_and_its_mirror_image(small):
    """Of outputs, before anything is read of them; an image and its mirror image have the same bits."""
    step, images = small.make_step("test_resnet"), small.Images(4, batch=4).images
    step.model.eval()
    both = step.predict(images), step.predict(images.flip(2))
    assert not torch.equal(*both)
    assert torch.equal(step.predict_with_flips(images), (both[0] + both[1]) / 2)
    assert torch.equal(step.predict_with_flips(images), step.predict_with_flips(images.flip(2)))
    loader = small.Images(4, batch=4, shuffle=False)
    assert torch.equal(evaluate(step, loader, flips=True).outputs, step.predict_with_flips(loader.images))


def test_an_evaluation_is_read_again_with_a_temperature(small):
    """Scores and what is counted of them are those of outputs divided by it; losses compare runs and stay as they are."""
    result = evaluate(small.make_step(), small.Images(7, batch=3, shuffle=False))
    warm = result.read_by(CrossEntropy(temperature=2.0))
    assert torch.equal(warm.scores, (result.outputs / 2).softmax(1))
    assert torch.equal(result.read_by(CrossEntropy()).scores, result.scores)
    assert (warm.loss, warm.metrics["accuracy"]) == (result.loss, result.metrics["accuracy"])
    assert torch.equal(warm.losses, result.losses)
