"""Snapshots and weight files on disk: tensors as safetensors, everything else as JSON, so loading never runs code from a file.

A snapshot folder has one commit point:

    state.json                    names the tensor file, its size and its checksum, and holds the state
    tensors-<n>.safetensors       written under a new name and synced before state.json names it
    previous.json                 the state.json before, whose tensor file is kept too

`state.json` is replaced by one rename. So whatever moment the process or the machine dies at, it names a whole tensor file: the new one
or the previous one. Should the disk lose or change the newest all the same, the previous one is taken, and said so. Files that neither
names are leftovers; the next save removes them. The price is room for three snapshots.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hiresvis.errors import EnvironmentFailed, RunFolderError
from hiresvis.run.files import sync
from hiresvis.units import format_size

_FORMAT = 2
_STATE, _PREVIOUS = "state.json", "previous.json"
_HASH_BLOCK = 2**22


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was saved: tensors on the CPU, and JSON values. `note` says why it is not the newest, where it is not."""

    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]
    note: str = ""


def save_snapshot(
    folder: Path,
    *,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    worth_keeping: Callable[[Mapping[str, Any]], bool] = lambda _: True,
) -> None:
    """Replaces the folder's snapshot in one instant; the previous one stays until the new one is whole and on the disk.

    Args:
        folder: made when missing.
        tensors: from any device; aliased and non-contiguous ones are allowed.
        state: JSON values.
        worth_keeping: whether the state that is replaced shall be the previous one; where not, the previous one stays as it is.

    Raises:
        EnvironmentFailed: the disk is full or not writable; the previous snapshot is intact.
    """
    generation = _generation(folder) + 1
    tensor_path, temporary = folder / f"tensors-{generation}.safetensors", folder / f"{_STATE}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_tensors(tensor_path, tensors, {})
        own = {"tensors": tensor_path.name, "bytes": tensor_path.stat().st_size, "checksum": _checksum(tensor_path)}
        commit = {"format": _FORMAT, "generation": generation, **own, "state_checksum": _digest(state), "state": state}
        _write_synced(temporary, json.dumps(commit))
        _keep_as_previous(folder, worth_keeping)
        sync(folder)
        os.replace(temporary, folder / _STATE)
    except (OSError, SafetensorError) as error:
        for leftover in (temporary, tensor_path):
            with suppress(OSError):
                leftover.unlink(missing_ok=True)
        kept = "the previous snapshot is kept" if (folder / _STATE).is_file() else "there is no earlier one"
        raise EnvironmentFailed(_disk_message("snapshot", folder, error, kept)) from error
    sync(folder)
    named = {tensor_path.name, _tensors_of(folder / _PREVIOUS)}
    for path in folder.glob("tensors-*.safetensors"):
        if path.name not in named:
            with suppress(OSError):  # a leftover costs room, not the run
                path.unlink()


def load_snapshot(folder: Path, *, accept: Callable[[Mapping[str, Any]], bool] = lambda _: True) -> Snapshot | None:
    """The folder's last whole snapshot, or None when none was ever finished.

    Args:
        accept: whether a state will do; where the newest does not, the one before it is taken.

    Raises:
        RunFolderError: files were changed or removed by something else, and there is no other; or they are of another version.
    """
    damage: list[_Damaged] = []
    passed_over = False
    for name in (_STATE, _PREVIOUS):
        try:
            commit = _read_commit(folder / name)
            if commit is None:
                continue
            if not accept(commit["state"]):
                passed_over = True
                continue
            note = f"{damage[0]}: the snapshot before it is taken" if damage else ""
            return Snapshot(_read_tensors(folder, name, commit), commit["state"], note)
        except _Damaged as error:
            damage.append(error)
    if damage and not passed_over:
        weights = folder.parent / "weights" / "last.safetensors"
        way = f"; or begin a new run from its weights: log.dir=NEW_FOLDER model.pretrained={weights}" if weights.is_file() else ""
        raise RunFolderError(f"{damage[0]}, and no other snapshot is whole. Put the files back{way or ', or start again'}.")
    return None


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
        sync(path.parent)
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


class _Damaged(Exception):
    """What is wrong with one of a snapshot's files; another may stand in for it."""


def _read_commit(path: Path) -> dict[str, Any] | None:
    changed = "it was changed after it was saved"
    try:
        commit = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _Damaged(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise _Damaged(f"{path}: not JSON ({error}); {changed}") from error
    if not isinstance(commit, dict) or "format" not in commit:
        raise _Damaged(f"{path}: not a snapshot's; {changed}")
    if commit["format"] not in (1, _FORMAT):
        raise RunFolderError(
            f"{path}: a snapshot of format {commit['format']}, and this release reads up to {_FORMAT}; resume with the release that wrote "
            "it, or start a new run folder."
        )
    if not all(isinstance(commit.get(key), kind) for key, kind in (("tensors", str), ("bytes", int), ("generation", int), ("state", dict))):
        raise _Damaged(f"{path}: lacks a part; {changed}")
    if commit["format"] > 1 and commit.get("state_checksum") != _digest(commit["state"]):
        raise _Damaged(f"{path}: other values than were saved; {changed}")
    return commit


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(state).encode(), digest_size=16).hexdigest()


def _read_tensors(folder: Path, name: str, commit: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that a commit names, held against what it says of them (checksums came with format 2)."""
    path = folder / Path(commit["tensors"]).name  # never outside of the folder
    size = path.stat().st_size if path.is_file() else 0
    if size != commit["bytes"]:
        recorded = f"{folder / name} recorded {commit['bytes']}"
        raise _Damaged(f"{path}: {size} bytes, where {recorded}: the snapshot was changed after it was saved")
    if "checksum" in commit and _checksum(path) != commit["checksum"]:
        raise _Damaged(f"{path}: other bytes than {folder / name} recorded: the snapshot was changed after it was saved")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _Damaged(f"{path}: not readable as safetensors ({error})") from error


def _checksum(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _keep_as_previous(folder: Path, worth_keeping: Callable[[Mapping[str, Any]], bool]) -> None:
    """state.json under a second name, unless it is not whole or not worth it: then the earlier previous one stays."""
    try:
        commit = _read_commit(folder / _STATE)
        if commit is None or (not worth_keeping(commit["state"]) and (folder / _PREVIOUS).is_file()):
            return
    except (_Damaged, RunFolderError):
        return
    temporary = folder / f"{_PREVIOUS}.tmp"
    shutil.copyfile(folder / _STATE, temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, folder / _PREVIOUS)


def _tensors_of(path: Path) -> str:
    try:
        commit = _read_commit(path)
    except (_Damaged, RunFolderError):
        return ""
    return commit["tensors"] if commit else ""


def _generation(folder: Path) -> int:
    """The highest number in use, so that no file that something names is written over."""
    return max((int(p.stem.partition("-")[2]) for p in folder.glob("tensors-*.safetensors") if p.stem[8:].isdigit()), default=0)


def _disk_message(what: str, path: Path, error: Exception, kept: str) -> str:
    free = ""
    with suppress(OSError):
        place = path if path.is_dir() else path.parent
        usage = os.statvfs(place) if hasattr(os, "statvfs") else None
        free = f"; {format_size(usage.f_bavail * usage.f_frsize)} free" if usage else ""
    return f"{what} not saved to {path}: {error}{free}; {kept}. Free some disk space."
