"""Training state to tensors and JSON values, and back: optimizer and random generators."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from hiresvis.errors import RunFolderError


def pack_optimizer(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors named `<parameter index>/<state name>`, and the rest as JSON values, the optimizer's kind among them."""
    packed = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for index, entry in packed["state"].items():
        for name, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"{index}/{name}"] = value
            else:
                values.setdefault(str(index), {})[name] = value
    return tensors, {"kind": type(optimizer).__name__, "values": values, "param_groups": packed["param_groups"]}


def unpack_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor], packed: Mapping[str, Any]) -> None:
    """Puts back what `pack_optimizer` took.

    State as large as its parameter gets the parameter's memory layout: files hold contiguous tensors, and the fused kernels read
    parameter and state (channels-last weights, say) by position.

    Raises:
        RunFolderError: the optimizer is of another kind, or holds other parameters.
    """
    now = type(optimizer).__name__
    was = packed.get("kind", "AdamW" if any("betas" in group for group in packed["param_groups"]) else "SGD")
    if was != now:
        raise RunFolderError(
            f"the snapshot's optimizer is {was}, this run's is {now}: optim.name was changed. "
            "Resume with the run's own recipe, or start a new run folder."
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Any]] = {int(index): dict(entry) for index, entry in packed["values"].items()}
    for key, value in tensors.items():
        index, _, name = key.partition("/")
        parameter = parameters[int(index)] if int(index) < len(parameters) else value
        if value.shape == parameter.shape and value.ndim:
            value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        state.setdefault(int(index), {})[name] = value
    groups = [{key: tuple(v) if key == "betas" else v for key, v in group.items()} for group in packed["param_groups"]]
    try:
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (ValueError, KeyError) as error:
        raise RunFolderError(
            f"the snapshot's optimizer does not fit this run's ({error}): freeze, adapt, layer_decay or optim.name were changed. "
            "Resume with the run's own recipe, or start a new run folder."
        ) from error


def pack_rng() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The random states of torch (CPU, and each CUDA device in use), numpy and Python."""
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors.update({f"cuda/{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())})
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, internal, gauss = random.getstate()
    numpy_state = {"kind": str(kind), "position": int(position), "has_gauss": int(has_gauss), "cached": float(cached)}
    tensors["numpy"] = torch.from_numpy(np.asarray(keys, dtype=np.int64))
    return tensors, {"numpy": numpy_state, "python": {"version": version, "internal": list(internal), "gauss": gauss}}


def unpack_rng(tensors: Mapping[str, Tensor], packed: Mapping[str, Any]) -> None:
    """Puts back what `pack_rng` took. CUDA states of devices that are not here are left out."""
    torch.set_rng_state(tensors["cpu"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if (state := tensors.get(f"cuda/{index}")) is not None:
                torch.cuda.set_rng_state(state, index)
    values = packed["numpy"]
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state((values["kind"], keys, values["position"], values["has_gauss"], values["cached"]))
    python = packed["python"]
    random.setstate((python["version"], tuple(python["internal"]), python["gauss"]))


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under `prefix/name`."""
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those named `prefix/...`, by the rest of their names."""
    return {name[len(prefix) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}/")}
