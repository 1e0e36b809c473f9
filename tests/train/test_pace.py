"""Units timed on the device at hand: which, how often, and what one image's forward takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hiresvis.train.losses import CrossEntropy
from hiresvis.train.pace import MOST_SECONDS, REPEATS, time_units
from hiresvis.train.step import TrainStep

UNITS = ((), ("0", "1"), ("2",))


class _Takes(nn.Module):
    """Moves a clock on by so many seconds at each call, and counts the calls."""

    def __init__(self, clock: list[float], seconds: list[float]) -> None:
        super().__init__()
        self.clock, self.seconds, self.calls = clock, seconds, 0
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.clock[0] += self.seconds[min(self.calls, len(self.seconds) - 1)]
        self.calls += 1
        return value + self.weight


def _timed(*seconds: list[float]) -> tuple[dict[int, float], list[int]]:
    """Times of units 1 and 2 over modules that take so long, two images at once, and how often each module ran."""
    clock = [0.0]
    model = nn.Sequential(*(_Takes(clock, each) for each in seconds))
    step = TrainStep(model, torch.optim.SGD(model.parameters()), CrossEntropy(), prepare=lambda images: images, device=torch.device("cpu"))
    found = time_units(step, UNITS, torch.zeros(2, 4, 4, 3), clock=lambda: clock[0])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return found, [module.calls for module in model]


def test_the_least_of_the_warm_runs_counts():
    """The first run warms up and says nothing; of the others the quickest does; a unit takes as long as its modules together."""
    found, calls = _timed([9e-3, 0.2, 0.1, 0.3], [9e-3, 0.4, 0.5, 0.6], [0.0, 0.1])
    assert found == {1: pytest.approx(0.6 / 2), 2: pytest.approx(0.1 / 2)}
    assert calls == [1 + REPEATS] * 3


@pytest.mark.parametrize(("seconds", "runs"), [(MOST_SECONDS, 1), (MOST_SECONDS / 2 - 0.1, 1 + 2), (MOST_SECONDS / 100, 1 + REPEATS)])
def test_a_slow_model_is_not_timed_for_long(seconds, runs):
    """A forward as long as all repeats may take is run once, and that one counts; a quicker one as often as there is time for."""
    found, calls = _timed([0.0], [seconds], [0.0])
    assert found[1] == pytest.approx(seconds / 2)
    assert calls == [runs] * 3


def test_an_error_leaves_no_hook():
    """Memory that runs out in the middle ends the timing; the model keeps nothing of it."""
    model = nn.Sequential(nn.Identity(), nn.Identity(), nn.Linear(3, 3))
    model[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    step = TrainStep(model, torch.optim.SGD(model.parameters()), CrossEntropy(), prepare=lambda images: images, device=torch.device("cpu"))
    with pytest.raises(torch.OutOfMemoryError):
        time_units(step, UNITS, torch.zeros(2, 4, 4, 3))
    assert not model[0]._forward_pre_hooks
    assert not model[1]._forward_hooks
    assert len(model[2]._forward_pre_hooks) == 1
