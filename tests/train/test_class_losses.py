"""The forms of cross entropy, by hand and against those who published them."""

from __future__ import annotations

import math

import pytest
import timm.loss
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torchvision.ops import sigmoid_focal_loss

from hiresvis.recipe.tasks import LOSSES
from hiresvis.train.class_losses import ANY_CLASSES, ONE_CLASS
from hiresvis.train.losses import BinaryCrossEntropy, CrossEntropy, make_loss

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 0.5], [-3.0, 4.0, 1.0]])
TARGETS = torch.tensor([0, 2, 0])
LABELS = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]], dtype=torch.float64)


def test_recipes_offer_the_forms_that_there_are():
    """Each of them, and no other."""
    assert set(LOSSES["classify"]) == set(ONE_CLASS)
    assert set(LOSSES["multilabel"]) == set(ANY_CLASSES)


def test_focal_loss_is_cross_entropy_times_the_square_of_what_is_missing():
    """At p = 3/4 it is a sixteenth of the cross entropy, at an even third 4/9 of it."""
    outputs = torch.tensor([[math.log(3.0), 0.0]])
    assert CrossEntropy("focal")(outputs, torch.tensor([0])).item() == pytest.approx(math.log(4 / 3) / 16)
    assert CrossEntropy("focal")(outputs, torch.tensor([1])).item() == pytest.approx(math.log(4) * 9 / 16)
    assert CrossEntropy("focal")(LOGITS, TARGETS)[1].item() == pytest.approx(math.log(3) * 4 / 9)


def test_one_against_rest_is_timms():
    """With label smoothing too; the mean over the classes."""
    for smoothing in (0.0, 0.1):
        ours = CrossEntropy("bce", label_smoothing=smoothing)(LOGITS, TARGETS).mean()
        assert ours.item() == pytest.approx(timm.loss.BinaryCrossEntropy(smoothing=smoothing)(LOGITS, TARGETS).item())


def test_focal_loss_of_labels_is_torchvisions():
    """Without its alpha."""
    by_torchvision = sigmoid_focal_loss(LOGITS, LABELS.float(), alpha=-1, gamma=2.0)
    assert torch.allclose(BinaryCrossEntropy(3, "focal")(LOGITS, LABELS), by_torchvision.mean(dim=1))


def test_asymmetric_loss_is_timms_and_leaves_easy_negatives_alone():
    """By its own numbers: gamma 0 and 4, margin 0.05; a negative below the margin has neither loss nor gradient."""
    theirs = timm.loss.AsymmetricLossMultiLabel(gamma_neg=4, gamma_pos=0, clip=0.05, reduction="none")(LOGITS, LABELS.float())
    assert torch.allclose(BinaryCrossEntropy(3, "asl")(LOGITS, LABELS), theirs.mean(dim=1), rtol=1e-5)
    outputs = torch.tensor([[math.log(0.04 / 0.96), math.log(0.8 / 0.2)]], requires_grad=True)
    loss = BinaryCrossEntropy(2, "asl")(outputs, torch.zeros(1, 2))
    loss.sum().backward()
    assert loss.item() == pytest.approx(-(0.75**4) * math.log(0.25) / 2)
    assert outputs.grad is not None
    assert outputs.grad[0, 0].item() == 0
    assert outputs.grad[0, 1].item() > 0


@pytest.mark.parametrize("kind", ONE_CLASS)
@pytest.mark.parametrize("weights", [(), (0.5, 2.0, 4.0)])
def test_shares_of_classes_mean_what_class_numbers_do(kind, weights):
    """A whole share is the class itself, smoothed and weighed alike; a mixed image has its share of each class's loss where nothing else is
    between."""
    loss = CrossEntropy(kind, label_smoothing=0.1, weights=weights)
    rows = F.one_hot(TARGETS, 3).double()
    assert torch.allclose(loss(LOGITS, rows), loss(LOGITS, TARGETS))
    plain = CrossEntropy(kind)
    mixed = plain(LOGITS, 0.3 * rows + 0.7 * F.one_hot(torch.tensor([1, 1, 1]), 3))
    assert torch.allclose(mixed, 0.3 * plain(LOGITS, TARGETS) + 0.7 * plain(LOGITS, torch.tensor([1, 1, 1])), rtol=1e-5)


@pytest.mark.parametrize("kind", ONE_CLASS)
def test_class_weights_multiply_each_samples_loss(kind):
    """By the weight of its class; of a mixed image by its share of both. Sums are not divided by weights."""
    weighed, plain = CrossEntropy(kind, weights=(0.5, 2.0, 4.0)), CrossEntropy(kind)
    assert torch.allclose(weighed(LOGITS, TARGETS), plain(LOGITS, TARGETS) * torch.tensor([0.5, 4.0, 0.5]))
    half = torch.tensor([[0.5, 0.0, 0.5]] * 3, dtype=torch.float64)
    assert torch.allclose(weighed(LOGITS, half), plain(LOGITS, half) * 2.25)


@pytest.mark.parametrize("kind", ANY_CLASSES)
def test_weights_of_labels_fall_on_positives_alone(kind):
    """Each class by itself; what an image has not weighs what it did."""
    weights = (3.0, 0.5, 1.0)
    weighed, plain = (ANY_CLASSES[kind](LOGITS, LABELS.float(), given) for given in (torch.tensor(weights), None))
    assert torch.allclose(weighed, plain * torch.where(LABELS > 0, torch.tensor(weights), 1.0))
    assert torch.allclose(BinaryCrossEntropy(3, kind, weights=weights)(LOGITS, LABELS), weighed.mean(dim=1))


@pytest.mark.parametrize(("task", "name"), [(task, name) for task in ("classify", "multilabel") for name in LOSSES[task]])
def test_validation_losses_compare_runs_of_any_loss(task, name):
    """(Binary) cross entropy without smoothing or weights, whichever is trained; scores are read alike."""
    loss = make_loss(name, task=task, num_outputs=3, label_smoothing=0.2, weights=(1.0, 2.0, 3.0))
    first = make_loss(LOSSES[task][0], task=task, num_outputs=3)
    targets = TARGETS if task == "classify" else LABELS
    assert torch.equal(loss.plain(LOGITS, targets), first(LOGITS, targets))
    assert torch.equal(loss.scores(LOGITS), first.scores(LOGITS))


@pytest.mark.parametrize(("task", "name"), [(task, name) for task in ("classify", "multilabel") for name in LOSSES[task]])
@given(size=st.floats(30.0, 1e4), right=st.booleans())
def test_sure_outputs_have_finite_losses_and_gradients(task, name, size, right):
    """Near nothing where they are right, and a way back where they are wrong, however far: no logarithm of a rounded probability."""
    outputs = torch.tensor([[size, -size]], requires_grad=True)
    on = 0 if right else 1
    targets = torch.tensor([on]) if task == "classify" else F.one_hot(torch.tensor([on]), 2).double()
    loss = make_loss(name, task=task, num_outputs=2)(outputs, targets)
    loss.sum().backward()
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()
    assert loss.item() < 1e-9 if right else loss.item() > 10
    assert right or outputs.grad[0, 1] < 0


def gradients_of(step, loader):
    """The gradients of the loader's first batch."""
    for item in loader:
        step.accumulate(item.images, item.targets, batch_images=item.batch_images)
        if item.closes_batch:
            return {name: parameter.grad.clone() for name, parameter in step.model.named_parameters()}
    raise AssertionError("no batch")


@pytest.mark.parametrize("kind", ONE_CLASS)
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_micro_batches_change_no_gradient_with_weights(small, kind, micro_batch):
    """The batch's loss is divided by its images, whatever each weighs: uneven parts add up to the whole batch's gradient."""
    whole, parts = (small.make_step(drop=False) for _ in range(2))
    for step in (whole, parts):
        step.loss_fn = CrossEntropy(kind, label_smoothing=0.1, weights=(0.2, 1.0, 5.0))
    expected = gradients_of(whole, small.Images(8, batch=8))
    for name, gradient in gradients_of(parts, small.Images(8, batch=8, micro_batch=micro_batch)).items():
        difference = torch.linalg.vector_norm(gradient - expected[name])
        assert difference <= 1e-5 * torch.linalg.vector_norm(expected[name]) + 1e-8, name


@pytest.mark.parametrize(("task", "name"), [(task, name) for task, names in LOSSES.items() if task != "segment" for name in names])
def test_eight_images_are_learnt_by_heart(small, task, name):
    """By each loss to nearly nothing: what it pulls towards is what was asked for."""
    step = small.make_step(drop=False, lr=2e-3)
    images = small.Images(8, batch=8, shuffle=False)
    if task == "multilabel":
        images.targets = torch.tensor([[i % 2, i // 2 % 2, i // 4] for i in range(8)]).double()
    elif task == "regress":
        images.targets = torch.tensor([[i, -i, (i * 5) % 8] for i in range(8)]).double()
    step.loss_fn = make_loss(name, task=task, num_outputs=3, mean=(3.5, -3.5, 3.5), std=(2.3, 2.3, 2.3))
    for number in range(150):
        gradients_of(step, images)
        if step.apply().loss < 0.02:
            return
        for group in step.optimizer.param_groups:
            group["lr"] *= 1.0 if number < 80 else 0.95  # l1, which is not smooth at its end, gets there by smaller steps
    pytest.fail(f"{name} of {task} is still above 0.02 after 150 steps")
