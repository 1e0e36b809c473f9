"""Finds the chain of a model by watching one forward pass.

A call of a module is opened into its children's calls when it does nothing itself: no operator runs between them, the
first child takes the call's input, each next one the output of the one before (the same tensor object), and the last
one's output is the call's. The root is always opened; operators between its children are *glue*, which is stored. So is
any module that runs numbered blocks one after another, whatever else it does (position terms made for all of an encoder's
blocks, a stage that reshapes before and after, branches of blocks side by side).
What cannot be opened, or is not worth it (a block, a pair of norm and convolution), is a unit. Units may take and return
several tensors, in tuples or lists: the first one stands for them all where two units are linked.

The bound: a module whose blocks are each used by several later ones (a dense block), or a module that runs several times,
is not opened at that point, so its units are large and little can be gained. Nothing here looks at attribute or class
names, but for the stage names that people read.
"""

from __future__ import annotations

import itertools
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
from torch.utils._pytree import tree_iter

from hiresvis.memory.costs import Kind

_STAGE_PATTERNS = (
    (re.compile(r"^(?:stages|layers|levels|blocks|stage)\.(\d+)\."), 0),
    (re.compile(r"^(?:stages|layers|levels)_(\d+)\."), 0),
    (re.compile(r"^(?:layer|stage)_?(\d+)\."), -1),
)
_FLAT_BLOCKS = re.compile(r"^(\w+)\.\d+$")
_BLOCK_OWNERS = 4  # modules with parameters of their own in the least block: two convolutions with their norms


@dataclass(frozen=True, slots=True)
class ChainUnit:
    """One unit: a module that runs once in a forward pass, with the modules that then change its output in place.

    Attributes:
        name: the first module's dotted name.
        modules: all of them, in call order ("bn1", "act1").
        stage: resolution level for people: stem, stage0, ..., blocks (one level), head.
        opens_segment: nothing changes the unit's inputs in place between its forward and its backward.
        linked: the unit's input is the very output of the unit before, with no operator between, and nothing changes its
            other inputs.
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
class _Operator:
    """One operator that ran between module calls."""

    inputs: list[torch.Tensor]


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a module while watching, with what happened inside it in order."""

    name: str
    module: nn.Module | None
    inputs: list[torch.Tensor]
    versions_before: list[int] = field(default_factory=list)
    output: Any = None
    events: list[_Call | _Operator] = field(default_factory=list)

    @property
    def calls(self) -> list[_Call]:
        return [event for event in self.events if isinstance(event, _Call)]

    @property
    def chain_input(self) -> torch.Tensor | None:
        return self.inputs[0] if self.inputs else None

    @property
    def outputs(self) -> list[torch.Tensor]:
        return tensors_in(self.output)

    @property
    def result(self) -> torch.Tensor | None:
        return handed_on(self.output, self.inputs)

    def is_unchanged(self, tensor: torch.Tensor) -> bool:
        """Whether nothing has written to this input since the call began; told once the forward is over."""
        return all(version == one._version for one, version in zip(self.inputs, self.versions_before, strict=True) if one is tensor)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in arguments or outputs, in order."""
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor)]


def first_tensor(value: Any) -> torch.Tensor | None:
    """The first tensor in arguments or outputs: the one that the chain hands along."""
    if isinstance(value, torch.Tensor):
        return value
    return next(iter(tensors_in(value)), None)


def handed_on(output: Any, inputs: Any) -> torch.Tensor | None:
    """The first tensor of an output that is none of the inputs handed through; where all are, the first."""
    outputs = tensors_in(output)
    given = set(map(id, tensors_in(inputs)))
    return next((tensor for tensor in outputs if id(tensor) not in given), outputs[0] if outputs else None)


class _Watch(TorchDispatchMode):
    """Records module calls and, between them, that operators ran."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.root = _Call("", None, [])
        self.open = [self.root]
        self.times_called: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if first_tensor(out) is not None:
            self.open[-1].events.append(_Operator(tensors_in(args)))
        return out

    def enter(self, module: nn.Module, args: Any) -> None:
        name = self.names.get(id(module))
        if name is None:
            return
        inputs = tensors_in(args)
        call = _Call(name, module, inputs, [tensor._version for tensor in inputs])
        self.open[-1].events.append(call)
        self.open.append(call)
        self.times_called[name] += 1

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.names.get(id(module)) is None:
            return
        call = self.open.pop()
        assert call.module is module, "module calls are not nested"
        call.output = output

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
    stages = _stages([group[0].name.removeprefix("body.") for group, _ in groups])  # a body with a head of another maker
    units = []
    for (group, linked), (stage, kind) in zip(groups, stages, strict=True):
        opens = all(group[0].is_unchanged(tensor) for tensor in group[0].inputs)
        units.append(ChainUnit(group[0].name, tuple(call.name for call in group), stage, kind, opens, linked))
    return Chain(tuple(units))


def _is_unit(call: _Call, times_called: Counter[str]) -> bool:
    """Whether the call can be run again by itself and does anything: it runs once, from tensors to tensors."""
    if call.chain_input is None or times_called[call.name] > 1 or call.result is None:
        return False
    return bool(_operators_inside(call))


def _operators_inside(call: _Call) -> int:
    return sum(_operators_inside(event) if isinstance(event, _Call) else 1 for event in call.events)


def _open(call: _Call, times_called: Counter[str]) -> list[_Call]:
    """The call itself, or its children's calls where it only passes a tensor along them or runs blocks one after another."""
    if not (_only_hands_on(call, times_called) and _worth_opening(call.calls)) and not _runs_blocks(call, times_called):
        return [call]
    return [found for child in call.calls for found in _open(child, times_called)]


def _only_hands_on(call: _Call, times_called: Counter[str]) -> bool:
    """Whether the call does nothing itself, and each child takes what the one before returned."""
    children = call.calls
    if not children or len(children) != len(call.events) or any(times_called[child.name] > 1 for child in children):
        return False
    tensor = call.chain_input
    for child in children:
        if child.chain_input is not tensor:
            return False
        tensor = first_tensor(child.output)
    return tensor is not None and tensor is first_tensor(call.output)


def _runs_blocks(call: _Call, times_called: Counter[str]) -> bool:
    """Whether two or more numbered blocks inside, at any depth, run one after another, each from what the one before returned
    and that nothing else takes."""
    if times_called[call.name] > 1:
        return False
    blocks = [child for child in call.calls if _is_block(child, times_called)]
    return (len(blocks) >= 2 and _is_line(call, blocks)) or any(_runs_blocks(child, times_called) for child in call.calls)


def _is_block(call: _Call, times_called: Counter[str]) -> bool:
    return call.name.rpartition(".")[2].isdigit() and _parameter_owners(call) >= _BLOCK_OWNERS and _is_unit(call, times_called)


def _is_line(call: _Call, blocks: list[_Call]) -> bool:
    """Whether the output of each block is the input of the next one alone."""
    for block, following in itertools.pairwise(blocks):
        made = {id(tensor) for tensor in block.outputs} - {id(tensor) for tensor in block.inputs}
        users = [event for event in call.events if made.intersection(map(id, event.inputs))]
        if users != [following]:
            return False
    return True


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
    order: list[_Call | None] = []  # None: an operator
    chosen = set(map(id, usable))

    def walk(call: _Call) -> None:
        for event in call.events:
            if not isinstance(event, _Call):
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
        before = groups[-1][0][-1].result if groups else None
        linked = not operator_between and before is not None and event.chain_input is before
        if any(event.result is tensor for tensor in event.inputs):
            if linked and event.output is event.chain_input:
                groups[-1][0].append(event)
            else:
                operator_between = True
            continue
        linked = linked and all(tensor is before or event.is_unchanged(tensor) for tensor in event.inputs)
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
