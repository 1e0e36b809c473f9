"""Optimizer, learning-rate rules and schedule."""

from __future__ import annotations

import pytest
import timm
import torch

from hiresvis.train.optim import auto_layer_decay, auto_lr, build_optimizer, build_schedule, is_transformer, warmup_steps


def _groups_of(model, optimizer):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: group for group in optimizer.param_groups for parameter in group["params"]}


def test_norms_and_biases_are_not_decayed():
    """Weight decay meets matrices alone, and not what the model excludes (position embedding)."""
    model = timm.create_model("test_vit", num_classes=3)
    groups = _groups_of(model, build_optimizer(model, name="adamw", lr=1e-3, weight_decay=0.05))
    assert groups["blocks.0.attn.qkv.weight"]["weight_decay"] == 0.05
    assert {groups[name]["weight_decay"] for name in ("blocks.0.attn.qkv.bias", "norm.weight", "pos_embed")} == {0.0}


def test_sgd_has_nesterov_momentum():
    """sgd is SGD with Nesterov momentum 0.9."""
    optimizer = build_optimizer(timm.create_model("test_resnet", num_classes=3), name="sgd", lr=0.1)
    assert isinstance(optimizer, torch.optim.SGD)
    assert {(group["momentum"], group["nesterov"]) for group in optimizer.param_groups} == {(0.9, True)}


def test_muon_leaves_vectors_and_both_ends_of_the_network_to_adamw():
    """After a step only matrices between the first layer and the classifier have Muon's one momentum; the others have AdamW's two."""
    model = timm.create_model("test_vit", num_classes=3)
    optimizer = build_optimizer(model, name="muon", lr=1e-3, layer_decay=0.75)
    model(torch.rand(2, 3, 160, 160)).sum().backward()
    optimizer.step()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_muon = {names[id(parameter)] for parameter, state in optimizer.state.items() if "exp_avg_sq" not in state}
    assert by_muon == {name for name, parameter in model.named_parameters() if name.startswith("blocks.") and parameter.ndim == 2}


def test_lion_steps_by_signs():
    """Every number of a weight moves by the learning rate, after its decay."""
    model = timm.create_model("test_resnet", num_classes=3)
    optimizer = build_optimizer(model, name="lion", lr=0.25, weight_decay=0.0)
    before = model.fc.weight.detach().clone()
    model(torch.rand(2, 3, 64, 64))[:, 0].sum().backward()
    optimizer.step()
    moved = (model.fc.weight.detach() - before).abs()
    assert torch.allclose(moved[0], torch.full_like(moved[0], 0.25))
    assert not moved[1:].any(), "without a gradient nothing moves"


def test_layer_decay_reaches_the_learning_rates_that_are_used():
    """The head trains at lr, the block below it at 0.75 lr, and so on, from construction on and at every step of the schedule."""
    model = timm.create_model("test_vit", num_classes=3)  # 6 blocks: stem, 6 layers, head
    optimizer = build_optimizer(model, name="adamw", lr=1e-3, layer_decay=0.75)
    groups = _groups_of(model, optimizer)
    schedule = build_schedule(lr=2e-3, schedule="cosine", warmup=0, steps=10)
    for set_lr in (lambda: 1e-3, lambda: schedule.apply(optimizer, 5)):
        lr = set_lr()
        assert groups["head.weight"]["lr"] == pytest.approx(lr)
        assert groups["blocks.5.attn.qkv.weight"]["lr"] == pytest.approx(0.75 * lr)
        assert groups["patch_embed.proj.weight"]["lr"] == pytest.approx(0.75**7 * lr)


def test_frozen_parameters_are_not_in_the_optimizer():
    """What requires no gradient takes no optimizer state; nothing left to train is an error."""
    model = timm.create_model("test_resnet", num_classes=3)
    model.conv1.requires_grad_(False)
    for layer_decay in (None, 0.9):
        assert not any(
            name.startswith("conv1.") for name in _groups_of(model, build_optimizer(model, name="sgd", lr=1, layer_decay=layer_decay))
        )
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing would be trained"):
        build_optimizer(model, name="sgd", lr=1)


def test_learning_rate_rule_follows_the_batch_and_gives_its_reason():
    """AdamW by the square root, SGD in proportion; a lone head gets more; the printed rule contains the numbers."""
    small, why = auto_lr("adamw", batch=16, pretrained=True)
    assert (small, auto_lr("adamw", batch=64, pretrained=True)[0]) == (2.5e-4, 5e-4)
    assert why == "adamw, fine-tuning all layers: 0.0005 x sqrt(16/64)"
    assert auto_lr("sgd", batch=16, pretrained=True)[0] == pytest.approx(auto_lr("sgd", batch=64, pretrained=True)[0] / 4)
    assert auto_lr("adamw", batch=16, pretrained=True, adapt="head")[0] == 10 * small
    assert auto_lr("muon", batch=16, pretrained=True)[0] == small
    assert auto_lr("lion", batch=16, pretrained=True) == (small / 5, "lion, fine-tuning all layers: 0.0001 x sqrt(16/64)")
    assert (
        auto_lr("adamw", batch=16, pretrained=True, transformer=True)[0] < auto_lr("adamw", batch=16, pretrained=True, layer_decay=0.75)[0]
    )


def test_a_short_run_with_batch_statistics_learns_faster():
    """Up to four times, by the root of the images it sees; a long one, SGD, adapters, a head, or random weights do not."""
    base = auto_lr("adamw", batch=16, pretrained=True)[0]
    short, why = auto_lr("adamw", batch=16, pretrained=True, images=5000)
    assert (short, why) == (
        2 * base,
        "adamw, fine-tuning all layers: 0.0005 x sqrt(16/64) x 2, for batch statistics and a run of 5000 images",
    )
    assert auto_lr("adamw", batch=16, pretrained=True, images=10)[0] == 4 * base
    assert auto_lr("adamw", batch=16, pretrained=True, images=10**6) == auto_lr("adamw", batch=16, pretrained=True)
    for other in ({"name": "sgd"}, {"adapt": "lora"}, {"adapt": "head"}, {"pretrained": False}, {"transformer": True}):
        setting = {"name": "adamw", "batch": 16, "pretrained": True, **other}
        assert auto_lr(**setting, images=10) == auto_lr(**setting)


@pytest.mark.parametrize(("name", "transformer", "full"), [("adamw", False, 5e-4), ("adamw", True, 1e-4), ("sgd", False, 0.01)])
def test_adapters_learn_at_ten_times_the_rate_of_everything(name, transformer, full):
    """Of a transformer's without layer decay, since they have none, pretrained or not; lp_ft trains everything at the rate of full."""
    lr, why = auto_lr(name, batch=64, pretrained=True, adapt="lora", transformer=transformer)
    assert lr == pytest.approx(10 * full)
    assert auto_lr(name, batch=64, pretrained=False, adapt="lora", transformer=transformer)[0] == lr
    assert why.startswith(f"{name}, low-rank adapters, 10 times the rate of fine-tuning ")
    assert why.endswith(f": 10 x {full:g} x {'sqrt(64/64)' if name == 'adamw' else '64/64'}")
    both = [auto_lr(name, batch=8, pretrained=True, adapt=adapt, transformer=transformer) for adapt in ("full", "lp_ft")]
    assert both[0] == both[1]


@pytest.mark.parametrize(("name", "value"), [("test_vit", 0.75), ("test_resnet", None), ("test_convnext", None), ("test_maxvit", None)])
def test_layer_decay_is_for_pretrained_plain_transformers(name, value):
    """0.75 for a ViT with weights; none for convnets and pyramids, nor without weights."""
    model = timm.create_model(name)
    assert is_transformer(model) == (value is not None)
    assert auto_layer_decay(model, pretrained=True)[0] == value
    assert auto_layer_decay(model, pretrained=False)[0] is None
    assert auto_layer_decay(model, adapt="lora") == (None, "adapters: the weights themselves do not move, and every adapter begins at zero")


def test_cosine_rises_then_falls_to_one_percent():
    """Warm-up never starts at zero, the peak is lr, the last step is at 1% of it, and later steps stay there."""
    schedule = build_schedule(lr=1.0, schedule="cosine", warmup="20%", steps=20)
    rates = [schedule.at(step) for step in range(20)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == schedule.at(50) == pytest.approx(0.01)


def test_step_schedule_falls_to_a_tenth_after_each_third():
    """Nine steps: three at the peak, three at a tenth, three at a hundredth; warm-up is on top of it."""
    schedule = build_schedule(lr=1.0, schedule="step", warmup=1, steps=9)
    assert [round(schedule.at(step), 9) for step in range(11)] == [0.5, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01, 0.01]


def test_plateau_schedule_is_lowered_after_each_two_epochs_without_a_better_metric():
    """Not before, not again in between, and no other schedule is."""
    plateau, cosine = (build_schedule(lr=1.0, schedule=kind, warmup=0, steps=9) for kind in ("plateau", "cosine"))
    assert [plateau.scale_after(epochs) for epochs in range(6)] == [1, 1, 0.3, 1, 0.3, 1]
    assert {cosine.scale_after(epochs) for epochs in range(6)} == {1.0}
    assert {plateau.at(step) for step in range(9)} == {1.0}


def test_constant_schedule_keeps_the_rate_after_warm_up():
    """constant: lr from the end of the warm-up on."""
    schedule = build_schedule(lr=1.0, schedule="constant", warmup=1, steps=5)
    assert [schedule.at(step) for step in range(5)] == [0.5, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("warmup", "count"), [("5%", 5), (0.05, 5), (7, 7), ("7", 7), (0, 0), (0.0, 0)])
def test_warm_up_is_a_share_or_a_number_of_steps(warmup, count):
    """5%, 0.05 and plain steps are understood."""
    assert warmup_steps(warmup, 100) == count


@pytest.mark.parametrize("warmup", [100, "100%", -1])
def test_warm_up_longer_than_the_run_is_refused(warmup):
    """The message has the number of steps on both sides."""
    with pytest.raises(ValueError, match="the run's 100 steps"):
        warmup_steps(warmup, 100)


def test_single_step_run_has_a_schedule():
    """A run of one step uses the full rate."""
    assert build_schedule(lr=1.0, schedule="cosine", warmup="5%", steps=1).at(0) == 1.0
