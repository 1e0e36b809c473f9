"""Evaluation of a split."""

from __future__ import annotations

import pytest
import torch

from hiresvis.train.evaluate import evaluate, evaluation_steps


def test_rows_are_in_order_with_path_label_prediction_score_and_loss(small):
    """Each sample has its row; the mean of the rows' losses is the loss, the share of right rows the accuracy."""
    step = small.make_step()
    loader = small.Images(7, batch=3, shuffle=False)
    result = evaluate(step, loader, name_of=lambda index: f"{index}.png")
    step.model.eval()
    scores = step.predict(loader.images).softmax(1)
    assert [row.path for row in result.rows] == [f"{index}.png" for index in range(7)]
    assert [row.label for row in result.rows] == loader.targets.tolist()
    assert [row.predicted for row in result.rows] == scores.argmax(1).tolist()
    assert [row.score for row in result.rows] == pytest.approx(scores.max(1).values.tolist(), rel=1e-5)
    assert result.loss == pytest.approx(sum(row.loss for row in result.rows) / 7)
    assert result.metrics["accuracy"] == pytest.approx(sum(row.label == row.predicted for row in result.rows) / 7)


def test_evaluation_repeats_itself_and_leaves_no_trace(small):
    """Twice the same digits; modes, batch statistics, gradients and the random state are as before, frozen layers still in eval."""
    step = small.make_step("test_resnet")
    step.model.layer1.eval()
    modes = [module.training for module in step.model.modules()]
    state = {name: value.clone() for name, value in step.model.state_dict().items()}
    random_state = torch.get_rng_state()
    first, second = (evaluate(step, small.Images(7, batch=3, shuffle=False)) for _ in range(2))
    assert first.rows == second.rows
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


def test_empty_split_is_refused(small):
    """There is no mean over nothing."""
    with pytest.raises(ValueError, match="split to evaluate is empty"):
        evaluate(small.make_step(), small.Images(0, batch=3, shuffle=False))
