"""Finds the chain of a model by watching one forward pass.

A call of a module is opened into its children's calls when it does nothing itself: no operator runs between them, the
first child takes the call's input, each next one the output of the one before (the same tensor object), and the last
one's output is the call's. The root is always opened; operators between its children are *glue*, which is stored.
What cannot be opened, or is not worth it (a block, a pair of norm and convolution), is a unit.

The bound: a model that runs its modules in parallel branches, or one module several times, is not opened at that point,
so its units are large and little can be gained. Nothing here looks at attribute or class names, but for the stage names
that people read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from hiresvis.memory.costs import Kind

_STAGE_PATTERNS = (
    (re.compile(r"^(?:stages|layers|levels|blocks|stage)\.(\d+)\."), 0),
    (re.compile(r"^(?:stages|layers|levels)_(\d+)\."), 0),
    (re.compile(r"^(?:layer|stage)_?(\d+)\."), -1),
)
_FLAT_BLOCKS = re.compile(r"^(\w+)\.\d+$")


@dataclass(frozen=True, slots=True)
class ChainUnit:
    """One unit: a module that runs once in a forward pass, with the modules that then change its output in place.

    Attributes:
        name: the first module's dotted name.
        modules: all of them, in call order ("bn1", "act1").
        stage: resolution level for people: stem, stage0, ..., blocks (one level), head.
        opens_segment: nothing changes the unit's input in place between its forward and its backward.
        linked: the unit's input is the very output of the unit before, with no operator between.
    """

    name: str
    modules: tuple[str, ...]
    stage: str
    kind: Kind
    opens_segment: bool
    linked: bool


@dataclass(frozen=True, slots=True)
class Chain:
    """The units in call order. A model with fewer than two is no chain, and nothing can be planned."""

    units: tuple[ChainUnit, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(unit.name for unit in self.units)


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a module while watching, with what happened inside it in order."""

    name: str
    module: nn.Module | None
    chain_input: torch.Tensor | None
    version_before: int = 0
    version_after: int = 0
    output: Any = None
    events: list[_Call | None] = field(default_factory=list)  # None: an operator

    @property
    def calls(self) -> list[_Call]:
        return [event for event in self.events if event is not None]


def first_tensor(value: Any) -> torch.Tensor | None:
    """The first tensor in arguments or outputs: the one that the chain hands along."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (tuple, list)):
        for item in value:
            found = first_tensor(item)
            if found is not None:
                return found
    return None


class _Watch(TorchDispatchMode):
    """Records module calls and, between them, that operators ran."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.root = _Call("", None, None)
        self.open = [self.root]
        self.times_called: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if first_tensor(out) is not None:
            self.open[-1].events.append(None)
        return out

    def enter(self, module: nn.Module, args: Any) -> None:
        name = self.names.get(id(module))
        if name is None:
            return
        tensor = first_tensor(args)
        call = _Call(name, module, tensor, 0 if tensor is None else tensor._version)
        self.open[-1].events.append(call)
        self.open.append(call)
        self.times_called[name] += 1

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.names.get(id(module)) is None:
            return
        call = self.open.pop()
        assert call.module is module, "module calls are not nested"
        call.output = output
        if call.chain_input is not None:
            call.version_after = call.chain_input._version

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = [register_module_forward_pre_hook(self.enter), register_module_forward_hook(self.leave)]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()


def find_chain(model: nn.Module, run: Callable[[], Any]) -> Chain:
    """The chain of `model`, from watching `run()`, which calls the model once in training mode.

    Run it on fake tensors: the chain is then found without memory or time.
    """
    watch = _Watch(model)
    with watch.watching():
        run()
    (root,) = [call for call in watch.root.calls if call.module is model]
    found: list[_Call] = []
    for call in root.calls:
        found.extend(_open(call, watch.times_called))
    usable = [call for call in found if _is_unit(call, watch.times_called)]
    groups = _groups(root, usable)
    stages = _stages([group[0].name for group, _ in groups])
    units = []
    for (group, linked), (stage, kind) in zip(groups, stages, strict=True):
        tensor = group[0].chain_input
        assert tensor is not None
        opens = group[0].version_before == tensor._version
        units.append(ChainUnit(group[0].name, tuple(call.name for call in group), stage, kind, opens, linked))
    return Chain(tuple(units))


def _is_unit(call: _Call, times_called: Counter[str]) -> bool:
    """Whether the call can be run again by itself and does anything: it runs once, from tensor to tensor."""
    if call.chain_input is None or times_called[call.name] > 1 or not isinstance(call.output, torch.Tensor):
        return False
    return bool(_operators_inside(call))


def _operators_inside(call: _Call) -> int:
    return sum(1 if event is None else _operators_inside(event) for event in call.events)


def _open(call: _Call, times_called: Counter[str]) -> list[_Call]:
    """The call itself, or its children's calls where it only passes a tensor along them."""
    children = call.calls
    if not children or len(children) != len(call.events) or any(times_called[child.name] > 1 for child in children):
        return [call]
    tensor = call.chain_input
    for child in children:
        if child.chain_input is not tensor:
            return [call]
        tensor = first_tensor(child.output)
    if tensor is None or tensor is not first_tensor(call.output) or not _worth_opening(children):
        return [call]
    return [found for child in children for found in _open(child, times_called)]


def _worth_opening(children: list[_Call]) -> bool:
    """A container of blocks is opened; a norm with its convolution stays one unit."""
    owners = [_parameter_owners(child) for child in children]
    return any(count >= 2 for count in owners) or (sum(owners) > 2 * max(1, max(owners)) and _is_sequence(children))


def _is_sequence(children: list[_Call]) -> bool:
    """Children numbered by their container (nn.Sequential), rather than the named parts of one block."""
    return all(child.name.rpartition(".")[2].isdigit() for child in children)


def _parameter_owners(call: _Call) -> int:
    assert call.module is not None
    return sum(1 for module in call.module.modules() if any(True for _ in module.parameters(recurse=False)))


def _groups(root: _Call, usable: list[_Call]) -> list[tuple[list[_Call], bool]]:
    """The calls of each unit, and whether the unit before hands it its input directly.

    Directly means: the same tensor object, and no operator between. A module that returns its input, changed in place,
    joins the unit that made it; where there is none it stays glue.
    """
    order: list[_Call | None] = []
    chosen = set(map(id, usable))

    def walk(call: _Call) -> None:
        for event in call.events:
            if event is None:
                order.append(None)
            elif id(event) in chosen:
                order.append(event)
            else:
                walk(event)

    walk(root)
    groups: list[tuple[list[_Call], bool]] = []
    operator_between = True
    for event in order:
        if event is None:
            operator_between = True
            continue
        linked = bool(groups) and not operator_between and event.chain_input is groups[-1][0][-1].output
        if event.output is event.chain_input:
            if linked:
                groups[-1][0].append(event)
            else:
                operator_between = True
            continue
        groups.append(([event], linked))
        operator_between = False
    return groups


def _stages(names: list[str]) -> list[tuple[str, Kind]]:
    """Stage and kind of each unit from its name; units before the first stage are the stem, after the last the head."""
    stages: list[str | None] = []
    flat = Counter(match[1] for name in names if (match := _FLAT_BLOCKS.match(name)))
    for name in names:
        stage = None
        for pattern, offset in _STAGE_PATTERNS:
            if match := pattern.match(name):
                stage = f"stage{int(match[1]) + offset}"
                break
        flat_match = _FLAT_BLOCKS.match(name)
        if stage is None and flat_match and flat[flat_match[1]] > 1:
            stage = flat_match[1]
        stages.append(stage)
    known = [index for index, stage in enumerate(stages) if stage is not None]
    first, last = (known[0], known[-1]) if known else (len(names), -1)
    result: list[tuple[str, Kind]] = []
    for index, (name, stage) in enumerate(zip(names, stages, strict=True)):
        if stage is not None:
            result.append((stage, "downsample" if "downsample" in name or "patch_merg" in name else "block"))
        elif index < first:
            result.append(("stem", "stem"))
        elif index > last:
            result.append(("head", "norm" if "norm" in name else "head"))
        else:  # between stages: a transition belongs to the stage it leads to
            following = next(candidate for candidate in stages[index:] if candidate is not None)
            result.append((following, "downsample"))
    return result
