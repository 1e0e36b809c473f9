"""A finished run opened again: its model with the best weights, its contract, and what its scores are. evaluate, predict and export
begin here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hiresvis import assemble
from hiresvis.backbone.build import Backbone
from hiresvis.data.cache import ImageCache
from hiresvis.data.contract import Contract
from hiresvis.data.loader import EvalLoader
from hiresvis.data.sources import Sample
from hiresvis.device import pick_device
from hiresvis.errors import RunFolderError
from hiresvis.recipe import LoadedRecipe, Resolution, load_recipe
from hiresvis.run import RunDirectory
from hiresvis.train.step import TrainStep

_SHOWN = 300  # letters of what torch says of weights


@dataclass(frozen=True, slots=True)
class Trained:
    """A run with weights.

    Attributes:
        loaded: the resolved recipe.
        contract: the run's own preprocessing.
        backbone: the model with the best weights, fp32, on the CPU, in eval mode, no plan applied.
        plan: plan.json.
    """

    loaded: LoadedRecipe
    contract: Contract
    backbone: Backbone
    plan: dict[str, Any]

    @property
    def eval_batch(self) -> int:
        """Images of one forward in the run's evaluations: the same batch gives the same digits."""
        return int(self.plan["eval_batch"])

    @property
    def eval_bytes(self) -> int:
        """What a forward of so many images was predicted to take beside what is always there; 0: a run of an earlier release."""
        return int(self.plan.get("eval_bytes", 0))

    @property
    def metric(self) -> str:
        """The metric that decided which epoch is best, which the run has settled."""
        return self.loaded.recipe.train.metric


def open_run(folder: Path) -> Trained:
    """The best weights of a run in its own model, with its own preprocessing.

    Raises:
        RunFolderError: no run, or one without weights.
    """
    run = RunDirectory.open(folder)
    contract = Contract.read(run.contract)
    loaded = load_recipe(run.resolved)
    stored = _read_plan(run)
    if not run.best_weights.is_file():
        raise RunFolderError(f"{folder}: no best weights yet; let fit finish its first epoch (hiresvis fit ... --resume)")
    backbone = assemble.build_model(loaded, num_classes=len(contract.classes), channels=contract.channels, with_weights=False)
    try:
        backbone.model.load_state_dict(load_file(run.best_weights))
    except (OSError, SafetensorError, RuntimeError) as error:
        why = " ".join(str(error).split())[:_SHOWN]
        raise RunFolderError(
            f"{run.best_weights}: not the weights of this run's model ({why}); put them back as the run wrote them"
        ) from error
    backbone.model.eval()
    return Trained(loaded, contract, backbone, stored)


def _read_plan(run: RunDirectory) -> dict[str, Any]:
    """plan.json, of which the batch, the precision and the kind of batch statistics decide digits.

    Raises:
        RunFolderError: it has none of that.
    """
    stored = run.read_json("plan.json")
    kinds = {"eval_batch": int, "precision": str, "norm": str}
    wrong = [key for key, kind in kinds.items() if not isinstance(stored, dict) or not isinstance(stored.get(key), kind)]
    if wrong:
        raise RunFolderError(f"{run.plan} cannot be used: no {', '.join(wrong)} in it; put it back as the run wrote it")
    return dict(stored)


def scores(outputs: Tensor, contract: Contract) -> Tensor:
    """What predict writes and an exported graph gives, of outputs (b, k): probabilities by class, which to classify add up to 1, or
    values in the targets' own units. The contract alone decides."""
    return assemble.contract_loss(contract).scores(outputs)


def make_step(trained: Trained) -> TrainStep:
    """The run's step, on the device at hand, in evaluation mode: nothing is trained with it."""
    loaded = trained.loaded
    trainable = assemble.freeze_parts(loaded, Resolution(loaded), trained.backbone, norm=trained.plan["norm"])
    step = assemble.make_step(loaded, trainable, trained.contract, trained.plan["precision"], pick_device())
    step.model.eval()
    return step


def make_loader(
    trained: Trained, samples: Sequence[Sample], *, bad_images: str, cache: ImageCache | None = None, with_truth: bool = True
) -> EvalLoader:
    """A split, or images without labels, with the run's own batch, and as many of its workers as have a batch to load while another is
    computed."""
    wanted = trained.loaded.recipe.data.workers
    return EvalLoader.by(
        trained.contract,
        samples,
        batch=trained.eval_batch,
        workers=0 if isinstance(wanted, str) else min(wanted, max(0, -(-len(samples) // trained.eval_batch) - 1)),
        bad_images=bad_images,
        cache=cache,
        with_truth=with_truth,
    )


def allowed_root(trained: Trained, given: Path | None) -> Path | None:
    """A folder that manifests may name files below, besides their own."""
    own = trained.loaded.recipe.data.root
    return trained.loaded.resolve_path(own) if given is None and own is not None else given
