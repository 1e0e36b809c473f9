"""Chains made by hand: units and profiles with defaults that are easy to add up."""

from __future__ import annotations

from hiresvis.memory.costs import Affine, Highest, MemoryProfile, Recompute, UnitCosts


def line(slope: int) -> Affine:
    return Affine(0, slope)


def peak(slope: int) -> Highest:
    return Highest((Affine(0, slope),))


def unit(index: int, **changes: object) -> UnitCosts:
    """A unit that keeps its input (boundary `index`, 10 bytes an image) and 100 bytes an image inside; 7 bytes of gradients."""
    values = {
        "name": f"u{index}",
        "modules": (f"u{index}",),
        "stage": "stage0",
        "kind": "block",
        "recomputable": True,
        "opens_segment": True,
        "input_id": index,
        "output_id": index + 1,
        "input": line(10),
        "output": line(10),
        "saves": (index,),
        "interior": line(100),
        "cast": 0,
        "held": (index,),
        "forward_stored": peak(130),
        "forward_dropped": peak(60),
        "backward_first": peak(20),
        "backward_more": peak(25),
        "input_gradient": True,
        "parameters": 7,
        "parameter_gradients": 7,
        "flops": line(1000),
        "traffic": line(0),
        "sliceable": (),
        "ways": (),
        **changes,
    }
    values.setdefault("flops_to_save", values["flops"])
    return UnitCosts(**values)


def way(*, keep: tuple[int, ...] = (), passes: tuple[int, ...] = (), **changes: object) -> Recompute:
    """A way to recompute a unit of `unit`: its 100 bytes inside and what its backward adds, all its FLOPs."""
    values = {
        "kept": line(0),
        "forward": peak(60),
        "backward_first": peak(130),
        "backward_more": peak(135),
        "flops": line(1000),
        "traffic": line(0),
        **changes,
    }
    return Recompute(keep=keep, passes=passes, sliced=False, **values)


def profile(*units: UnitCosts, **changes: object) -> MemoryProfile:
    values = {
        "model": "hand",
        "image_size": (8, 8),
        "precision": "fp32",
        "units": units,
        "boundaries": tuple(line(10) for _ in range(len(units) + 1)),
        "raw_image": line(3),
        "weights": 1000,
        "buffers": 50,
        "gradients": 7 * len(units),
        "optimizer": "adamw",
        "optimizer_state": 2000,
        "optimizer_temporaries": 5,
        "ema": 0,
        "evaluation": peak(40),
        "block_size": 1,
        "max_batch": 1000,
        "versions": {},
        **changes,
    }
    return MemoryProfile(**values)
