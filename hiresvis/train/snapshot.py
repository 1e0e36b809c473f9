"""Snapshots and weight files on disk: tensors as safetensors, everything else as JSON, so loading never runs code from a file.

A snapshot folder has one commit point:

    state.json                    names the tensor file and its size, and holds the state
    tensors-<n>.safetensors       written under a new name and synced before state.json names it

`state.json` is replaced by one rename. So whatever moment the process or the machine dies at, it names a whole tensor file: the new one
or the previous one. Files that no state.json names are leftovers; the next save removes them. The price is room for two snapshots.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hiresvis.errors import EnvironmentFailed, RunFolderError
from hiresvis.units import format_size

_FORMAT = 1
_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was saved: tensors on the CPU, and JSON values."""

    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]


def save_snapshot(folder: Path, *, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Replaces the folder's snapshot in one instant; the previous one stays until the new one is whole and on the disk.

    Args:
        folder: made when missing.
        tensors: from any device; aliased and non-contiguous ones are allowed.
        state: JSON values.

    Raises:
        EnvironmentFailed: the disk is full or not writable; the previous snapshot is intact.
    """
    generation = _generation(folder) + 1
    tensor_path, temporary = folder / f"tensors-{generation}.safetensors", folder / f"{_STATE}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_tensors(tensor_path, tensors, {})
        commit = {"format": _FORMAT, "generation": generation, "tensors": tensor_path.name, "bytes": tensor_path.stat().st_size}
        _write_synced(temporary, json.dumps({**commit, "state": state}))
        _sync_folder(folder)
        os.replace(temporary, folder / _STATE)
        _sync_folder(folder)
    except (OSError, SafetensorError) as error:
        for leftover in (temporary, tensor_path):
            with suppress(OSError):
                leftover.unlink(missing_ok=True)
        kept = "the previous snapshot is kept" if (folder / _STATE).is_file() else "there is no earlier one"
        raise EnvironmentFailed(_disk_message("snapshot", folder, error, kept)) from error
    for path in folder.glob("tensors-*.safetensors"):
        if path != tensor_path:
            with suppress(OSError):  # a leftover costs room, not the run
                path.unlink()


def load_snapshot(folder: Path) -> Snapshot | None:
    """The folder's last whole snapshot, or None when none was ever finished.

    Raises:
        RunFolderError: files were changed or removed by something else.
    """
    commit = _read_commit(folder)
    if commit is None:
        return None
    path = folder / commit["tensors"]
    size = path.stat().st_size if path.is_file() else 0
    if size != commit["bytes"]:
        raise RunFolderError(
            f"{path}: {size} bytes, where {folder / _STATE} recorded {commit['bytes']}: the snapshot was changed after it was saved. "
            f"Put the file back, or remove {folder} and start again."
        )
    try:
        return Snapshot(load_file(path), commit["state"])
    except SafetensorError as error:
        raise RunFolderError(f"{path}: not readable as safetensors ({error}). Remove {folder} and start again.") from error


def save_weights(path: Path, weights: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> None:
    """Writes one safetensors file, whole or not at all.

    Raises:
        EnvironmentFailed: the disk is full or not writable; the previous file is intact.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_tensors(temporary, weights, metadata)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        kept = "an earlier file of this name is kept" if path.is_file() else "there is no earlier file of this name"
        raise EnvironmentFailed(_disk_message("weights", path, error, kept)) from error


def read_weights_metadata(path: Path) -> dict[str, str]:
    """What `save_weights` noted in the file; empty when there is no such file.

    Raises:
        RunFolderError: the file is not safetensors.
    """
    if not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except SafetensorError as error:
        raise RunFolderError(f"{path}: not readable as safetensors ({error}); move it away and resume again.") from error


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes and syncs. safetensors takes contiguous tensors that share no storage: tied weights are written once per name."""
    seen: set[int] = set()
    flat: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        address = tensor.untyped_storage().data_ptr()
        flat[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    save_file(flat, path, metadata=dict(metadata))
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Makes renames in the folder last; only POSIX can open a folder for that."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read_commit(folder: Path) -> dict[str, Any] | None:
    path = folder / _STATE
    try:
        commit = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise RunFolderError(f"{path}: not JSON ({error}); it was changed after it was saved. Remove {folder} and start again.") from error
    if not isinstance(commit, dict) or commit.get("format") != _FORMAT:
        raise RunFolderError(f"{path}: not a snapshot of format {_FORMAT}; it was written by another version. Start a new run folder.")
    return commit


def _generation(folder: Path) -> int:
    """The present snapshot's number, so that its successor gets another file name; 0 when there is none to protect."""
    try:
        commit = _read_commit(folder)
    except RunFolderError:
        return max((int(p.stem.partition("-")[2]) for p in folder.glob("tensors-*.safetensors") if p.stem[8:].isdigit()), default=0)
    return int(commit["generation"]) if commit else 0


def _disk_message(what: str, path: Path, error: Exception, kept: str) -> str:
    free = ""
    with suppress(OSError):
        place = path if path.is_dir() else path.parent
        usage = os.statvfs(place) if hasattr(os, "statvfs") else None
        free = f"; {format_size(usage.f_bavail * usage.f_frsize)} free" if usage else ""
    return f"{what} not saved to {path}: {error}{free}; {kept}. Free some disk space."
