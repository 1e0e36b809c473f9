"""The training step."""

from __future__ import annotations

import weakref

import pytest
import torch


def _run_batch(step, loader):
    for item in loader:
        step.accumulate(item.images, item.targets, batch_images=item.batch_images)
        if item.closes_batch:
            return


def _gradients(step):
    return {name: parameter.grad.clone() for name, parameter in step.model.named_parameters()}


def _state(step):
    return {name: value.clone() for name, value in step.model.state_dict().items()}


@pytest.mark.parametrize("micro_batch", [1, 3, 7])
def test_uneven_accumulation_gives_the_full_batch_gradient(small, micro_batch):
    """Micro-batches of 1, 3+3+2 or 4+4 add up to the gradient of 8 images at once, in float64 to rounding."""
    full, split = (small.make_step(drop=False, dtype=torch.float64) for _ in range(2))
    _run_batch(full, small.Images(8, batch=8, dtype=torch.float64))
    _run_batch(split, small.Images(8, batch=8, micro_batch=micro_batch, dtype=torch.float64))
    expected, got = _gradients(full), _gradients(split)
    for name, gradient in expected.items():
        # The loss is taken in float32 from the logits: its rounding is what remains.
        assert torch.linalg.vector_norm(got[name] - gradient) <= 1e-6 * torch.linalg.vector_norm(gradient) + 1e-9, name


def test_loss_is_the_mean_over_the_batch_however_it_is_split(small):
    """The contributions of uneven micro-batches add up to the outcome's loss, the batch's mean."""
    step = small.make_step(drop=False)
    items = list(small.Images(8, batch=8, micro_batch=3))
    assert [len(item.targets) for item in items] == [2, 3, 3]
    shares = [step.accumulate(item.images, item.targets, batch_images=8) for item in items]
    logits = torch.cat([step.predict(item.images) for item in items])
    mean = torch.nn.functional.cross_entropy(logits, torch.cat([item.targets for item in items]))
    assert not any(share.requires_grad for share in shares)
    assert step.apply().loss == pytest.approx(mean.item(), rel=1e-5)


def test_nothing_of_the_graph_outlives_accumulate(small):
    """Logits and per-sample losses are freed when accumulate returns, so the next micro-batch does not pay for them."""
    alive = []

    def loss_fn(logits, targets):
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        alive.extend([weakref.ref(logits), weakref.ref(losses)])
        return losses

    step = small.make_step()
    step.loss_fn = loss_fn
    item = next(iter(small.Images(4, batch=4)))
    step.accumulate(item.images, item.targets, batch_images=4)
    assert [reference() for reference in alive] == [None, None]


def test_clipping_bounds_the_update_and_reports_the_norm_before_it(small):
    """With SGD's first step (no momentum yet, no decay), the update is at most lr * clip * (1 + momentum) long."""
    step = small.make_step(optimizer="sgd", lr=1.0, clip_grad=0.01)
    for group in step.optimizer.param_groups:
        group["weight_decay"] = 0.0
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    _run_batch(step, small.Images(8, batch=8))
    outcome = step.apply()
    moved = torch.nn.utils.get_total_norm([now.detach() - then for now, then in zip(step.model.parameters(), before, strict=True)])
    assert outcome.applied
    assert outcome.grad_norm > 0.1
    assert moved.item() == pytest.approx(0.01 * 1.9, rel=1e-3)  # Nesterov: gradient + 0.9 * buffer, and the buffer is the gradient
    assert all(parameter.grad is None for parameter in step.model.parameters())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_trains_float32_parameters(small, precision):
    """Autocast on the CPU: parameters and predictions stay float32 and the loss falls."""
    step = small.make_step(precision=precision, drop=False)
    losses = []
    for _ in range(4):
        _run_batch(step, small.Images(8, batch=8, micro_batch=4))
        losses.append(step.apply().loss)
    prediction = step.predict(small.Images(8, batch=8).images)
    assert losses[-1] < losses[0]
    assert {parameter.dtype for parameter in step.model.parameters()} == {torch.float32}
    assert prediction.dtype == torch.float32
    assert not prediction.requires_grad


def test_non_finite_batch_leaves_weights_statistics_and_optimizer_as_they_were(small):
    """A NaN image skips the step, names its position, and does not reach BatchNorm's running statistics."""
    step = small.make_step("test_resnet")
    images = small.Images(8, batch=8, micro_batch=4, shuffle=False, dtype=torch.float32)
    _run_batch(step, images)
    step.apply()
    before, optimizer_before = _state(step), step.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    images.images[5, 3, 3] = float("nan")
    _run_batch(step, images)
    outcome = step.apply()
    assert not outcome.applied
    assert set(outcome.non_finite) == {4, 5, 6, 7}  # batch statistics spread it over its micro-batch, and no further
    assert all(torch.equal(value, before[name]) for name, value in step.model.state_dict().items())
    assert torch.equal(step.optimizer.state_dict()["state"][0]["exp_avg"], optimizer_before)
    images.images[5, 3, 3] = 0.0
    _run_batch(step, images)
    assert step.apply().applied


def test_non_finite_sample_is_the_only_one_named_without_batch_statistics(small):
    """In a ViT one bad image spoils its own loss alone."""
    step = small.make_step()
    images = small.Images(8, batch=8, micro_batch=3, shuffle=False, dtype=torch.float32)
    images.images[5] = float("inf")
    _run_batch(step, images)
    assert step.apply().non_finite == (5,)


def test_fp16_overflow_lowers_the_scale_and_is_told_apart(small):
    """Overflow of scaled gradients is the scaler's normal search, not a non-finite loss."""
    step = small.make_step(precision="fp16")
    step.load_state_dict({**step.state_dict(), "scale": 2.0**120})
    _run_batch(step, small.Images(8, batch=8))
    outcome = step.apply()
    assert (outcome.applied, outcome.scale_lowered, outcome.non_finite) == (False, True, ())
    assert step.state_dict()["scale"] == 2.0**119


def test_discard_forgets_a_half_accumulated_batch(small):
    """After discard the next batch's gradient and loss are its own."""
    fresh, used = small.make_step(drop=False), small.make_step(drop=False)
    item = next(iter(small.Images(5, batch=5)))
    used.accumulate(item.images, item.targets, batch_images=5)
    used.discard()
    for step in (fresh, used):
        _run_batch(step, small.Images(8, batch=8))
    assert fresh.apply() == used.apply()


def test_unknown_precision_is_refused(small):
    """Only fp32, bf16 and fp16."""
    with pytest.raises(ValueError, match="'fp8' is not one of fp32, bf16, fp16"):
        small.make_step(precision="fp8")
