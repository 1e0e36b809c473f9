"""Maps of evidence: what they add up to, where they lie, and that a look changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hiresvis.backbone.attribution import attribute, contributions, log_odds, output
from hiresvis.backbone.segments import apply_segments, is_planned
from hiresvis.device import StorageCounter

PX, CLASSES = 64, 4


def images(count: int = 2, px: int = PX) -> Tensor:
    return torch.randn(count, 3, px, px, generator=torch.Generator().manual_seed(1))


def kept(model: nn.Module) -> dict[str, Any]:
    """All that a look could change."""
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "trained": [p.requires_grad for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "hooks": [len(module._forward_pre_hooks) for module in model.modules()],
        "random": torch.get_rng_state(),
        "grad mode": torch.is_grad_enabled(),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(("name", "px"), [("resnet18", 64), ("swin_tiny_patch4_window7_224", 56)])
def test_cells_add_up_to_the_output_where_the_head_is_linear(lab: Any, name: str, px: int) -> None:
    """Behind average pooling and one linear layer, the cells' contributions and the bias are the logit, channels first or last."""
    model = lab.narrow(name).eval()
    cells = contributions(model, images(px=px), [output(1), output(3)])
    assert cells.shape == (2, 2, 2, 2)
    with torch.no_grad():
        logits = model(images(px=px))
    classifier: Any = model.get_classifier()
    bias = classifier.bias.detach()[[1, 3]]
    torch.testing.assert_close(cells.sum(dim=(2, 3)).T + bias, logits[:, [1, 3]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_patch_tokens_have_the_gradient_of_the_whole_network(lab: Any, pool: str) -> None:
    """A plain transformer's cells are those of a graph over everything: at what its head takes, or, where that is the class token alone,
    Grad-CAM at what its last block takes. Tokens that are no patch are no cells."""
    model: Any = lab.make_model("vit_tiny_patch16_224", global_pool=pool).eval()
    cells = contributions(model, images(), [log_odds(2)])[0]
    taken: list[Tensor] = []
    model.blocks[-1].register_forward_pre_hook(lambda _, args: taken.append(args[0]))
    model.blocks[-1].register_forward_hook(lambda _, args, out: taken.append(out))
    gradients = torch.autograd.grad(log_odds(2)(model(images())).sum(), taken)
    tokens, gradient = ((one[:, 1:].detach()) for one in (taken[pool == "avg"], gradients[pool == "avg"]))
    if pool == "token":
        assert not gradients[1][:, 1:].any(), "the class token has all of it by then"
        tokens, gradient = tokens - tokens.mean(dim=1, keepdim=True), gradient.mean(dim=1, keepdim=True)
    wanted = (tokens * gradient).sum(dim=2).unflatten(1, (4, 4))
    torch.testing.assert_close(cells, wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_a_look_changes_nothing(lab: Any, name: str) -> None:
    """Weights, statistics, gradients, modes, hooks and random state are as before, also where some parts are frozen."""
    model, px = lab.narrow(name), 56 if name.startswith("swin") else PX
    model(images(px=px)).sum().backward()
    model.eval()
    next(model.parameters()).requires_grad_(False)
    before = kept(model)
    contributions(model, images(px=px), [log_odds(0)])
    assert same(kept(model), before)


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_a_plan_that_is_applied_makes_no_difference_and_stays(lab: Any, name: str) -> None:
    """Cells are the same bits under every plan, and the plan is applied afterwards as before."""
    model, profile = lab.make_model(name).eval(), lab.small_profile(name)
    wanted = contributions(model, images(), [log_odds(1)])
    for segments in (lab.five_plans(profile)["1"], lab.five_plans(profile)["4"], lab.mixed_plan(profile)):
        handle = apply_segments(model, segments, lab.unit_modules(profile))
        planned = [is_planned(module) for module in model.modules()]
        assert any(planned)
        assert torch.equal(contributions(model, images(), [log_odds(1)]), wanted)
        assert [is_planned(module) for module in model.modules()] == planned
        model(images()).sum().backward()
        handle.remove()
        assert not any(map(is_planned, model.modules()))


@pytest.mark.parametrize(("name", "more", "kwargs"), [("resnet18", 1.1, {}), ("vit_tiny_patch16_224", 2.0, {"depth": 12})])
def test_a_look_holds_little_more_than_an_evaluation(lab: Any, name: str, more: float, kwargs: dict[str, int]) -> None:
    """The peak is within a tenth of a forward's without gradients for a pyramid, of one block's graph more for a transformer."""
    model = lab.narrow(name, **kwargs).eval()

    def peak(work: Callable[[], object]) -> int:
        counter = StorageCounter(64)
        with counter:
            work()
        return int(counter.peak_bytes)

    def evaluate() -> None:
        with torch.no_grad():
            model(images(32))

    most = peak(lambda: contributions(model, images(32), [log_odds(1), log_odds(2)]))
    whole = peak(lambda: model(images(32)).sum().backward())
    assert most < more * peak(evaluate)
    assert most < whole / 2


class Bright(nn.Module):
    """Says how bright the image is: a map of 4 px and a linear head, as timm's models are asked for them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, CLASSES)
        nn.init.constant_(self.head.weight, 1.0)
        with torch.no_grad():
            self.head.weight[0] *= -1

    def forward_features(self, pixels: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(pixels, 4)

    def forward_head(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.head(features.mean(dim=(2, 3)))
        return outputs


def test_a_map_is_strongest_where_the_evidence_is() -> None:
    """Maps have the images' size and go from 0 to 1; a spot is where it is, and speaks for one class and not for the other."""
    spot = torch.zeros(2, 3, 32, 48)
    spot[0, :, 8:12, 40:44] = 1.0
    spot[1, :, 20:24, 4:8] = 1.0
    maps = attribute(Bright(), spot, log_odds(1))
    assert maps.shape == (2, 32, 48)
    assert maps.amin() == 0
    assert maps.amax() == 1
    for one, (row, column) in zip(maps, ((10, 42), (22, 6)), strict=True):
        top, left = divmod(int(one.argmax()), 48)
        assert abs(top - row) <= 2
        assert abs(left - column) <= 2
        assert one.sum() < 0.1 * one.numel()
    assert not attribute(Bright(), spot, log_odds(0)).any(), "the spot speaks against it, and nothing for it"


def test_a_sure_network_still_has_a_gradient() -> None:
    """Log odds do not flatten where a probability is 1 in every digit."""
    outputs = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
    assert outputs.softmax(dim=1)[0, 0] == 1
    (gradient,) = torch.autograd.grad(log_odds(0)(outputs).sum(), outputs)
    torch.testing.assert_close(gradient, torch.tensor([[1.0, -0.5, -0.5]]))


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_half_precision_gives_the_map_of_full_precision(lab: Any, precision: torch.dtype) -> None:
    """Under autocast the cells are those in fp32 to the precision's digits; small gradients are not lost."""
    model = lab.make_model("vit_tiny_patch16_224").eval()
    full = contributions(model, images(), [log_odds(1)])
    with torch.autocast("cpu", dtype=precision):
        half = contributions(model, images(), [log_odds(1)])
    assert half.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(full.flatten(), half.flatten(), dim=0) > 0.99


def test_a_model_without_a_map_says_what_it_lacks() -> None:
    """No head to tell apart, tokens that are no grid, outputs that do not follow from the map: each a reason, not a wrong map."""
    with pytest.raises(ValueError, match="does not tell its features from its head"):
        contributions(nn.Linear(2, 2), images(), [output(0)])
    odd = Bright()
    odd.forward_features = lambda pixels: pixels.flatten(2).transpose(1, 2)[:, :7]  # type: ignore[method-assign]
    odd.forward_head = lambda features: features.mean(dim=1)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="7 tokens are no grid"):
        contributions(odd, images(), [output(0)])
    blind = copy.deepcopy(Bright())
    blind.head.weight.data.zero_()
    with pytest.raises(ValueError, match="no cell of its last map"):
        contributions(blind, images(), [output(0)])
