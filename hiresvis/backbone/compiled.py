"""`torch.compile` beside a plan: block by block (`block.compile()`) before the plan is applied, and with whole recompute only.

A compiled module is one operator to a plan. It is run again as a whole, and what it saves is the compiler's choice: a trace of the
module says neither how many tensors that are nor in which order, so passes, kept outputs and slices have nothing to hold on to.
Bits are those of the compiled model without a plan; the memory of compiled blocks is measured by a probe, not predicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.plan import Segment


def compiled_inside(module: nn.Module) -> bool:
    """Whether the module or a part of it is compiled."""
    return any(part._compiled_call_impl is not None for part in module.modules())


def refuse_wrappers(model: nn.Module) -> None:
    """`torch.compile(module)` puts another module around one, under other names and out of a plan's reach.

    Raises:
        ValueError: the model is such a wrapper, or has one.
    """
    found = next((name for name, module in model.named_modules() if "_orig_mod" in module._modules), None)
    if found is not None:
        which = f"{found!r} is" if found else "the model is"
        raise ValueError(f"{which} wrapped by torch.compile; compile in place instead, block by block: block.compile()")


def refuse_compiled_around(model: nn.Module, names: Iterable[str]) -> None:
    """A plan works between modules, so nothing that holds its units may be compiled as one.

    Raises:
        ValueError: something is.
    """
    around = {name[:end] for name in names for end, char in enumerate(name) if char == "."} | {""}
    for name in sorted(around):
        if model.get_submodule(name)._compiled_call_impl is not None:
            which = f"{name!r} is" if name else "the model is"
            raise ValueError(f"{which} compiled as a whole, and a plan works between its parts; compile block by block: block.compile()")


def refuse_finer(segment: Segment, units: Iterable[tuple[str, nn.Module]]) -> None:
    """Passes, kept outputs and slices of what is compiled.

    Raises:
        ValueError: the segment has such.
    """
    if not (segment.keep or any(segment.passes) or segment.slices):
        return
    found = next((name for name, module in units if compiled_inside(module)), None)
    if found is not None:
        raise ValueError(
            f"{found!r} is compiled, and the plan keeps outputs within it, or runs it in passes or slices; "
            "plan again with the model compiled already: such units are then run again as a whole"
        )


def without_finer_ways(profile: MemoryProfile, model: nn.Module) -> MemoryProfile:
    """The costs of a model of which some blocks are compiled: those are stored or run again as a whole."""
    units = tuple(
        replace(unit, ways=tuple(way for way in unit.ways if not (way.keep or way.passes or way.sliced)), sliceable=())
        if any(compiled_inside(model.get_submodule(name)) for name in unit.modules)
        else unit
        for unit in profile.units
    )
    return replace(profile, units=units)
