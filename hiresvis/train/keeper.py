"""A run's files: the snapshot to resume from, and the best and the last weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hiresvis.errors import RunFolderError
from hiresvis.run.directory import forget_results
from hiresvis.train.progress import Progress
from hiresvis.train.snapshot import Snapshot, load_snapshot, read_weights_metadata, save_snapshot, save_weights
from hiresvis.train.state import pack_optimizer, pack_rng, unpack_optimizer, unpack_rng, with_prefix, without_prefix
from hiresvis.train.step import TrainStep


class Keeper:
    """Saves and restores one run.

    Args:
        step: its model, optimizer, loss scaler and average are what is saved.
        run_dir: `snapshot/` and `weights/` are written there.
    """

    def __init__(self, step: TrainStep, run_dir: Path) -> None:
        self.snapshot_dir = run_dir / "snapshot"
        self._step, self._run_dir = step, run_dir
        self._best, self._last = run_dir / "weights" / "best.safetensors", run_dir / "weights" / "last.safetensors"

    def save(self, progress: Progress) -> None:
        """Saves everything that the next step depends on.

        Raises:
            EnvironmentFailed: not saved; the previous snapshot is intact.
        """
        optimizer, optimizer_state = pack_optimizer(self._step.optimizer)
        rng, rng_state = pack_rng()
        model = self._step.model.state_dict()
        average = self._step.average
        averaged = {} if average is None else with_prefix("average", average.named())
        tensors = {**with_prefix("model", model), **with_prefix("optimizer", optimizer), **with_prefix("rng", rng), **averaged}
        state = {
            "progress": asdict(progress),
            "optimizer": optimizer_state,
            "scaler": self._step.state_dict(),
            "average": None if average is None else average.state(),
            "rng": rng_state,
            "sound": progress.trend.is_sound and not progress.non_finite_in_a_row,
            "versions": {name: version(name) for name in ("torch", "timm")},
        }
        save_snapshot(self.snapshot_dir, tensors=tensors, state=state, worth_keeping=_is_sound)

    def load_newest(self) -> Snapshot | None:
        """The newest snapshot that is whole; None where there is none.

        Raises:
            RunFolderError: the files were changed by something else.
        """
        return load_snapshot(self.snapshot_dir)

    def load_sound(self) -> Snapshot | None:
        """The newest snapshot from before training went wrong; None where there is none.

        Raises:
            RunFolderError: the files were changed by something else.
        """
        return load_snapshot(self.snapshot_dir, accept=_is_sound)

    def restore(self, snapshot: Snapshot, *, metric: str, num_steps: int) -> Progress:
        """Puts model, optimizer, scaler and average back (the random state waits for `restore_rng`) and returns where the run was.

        Raises:
            RunFolderError: the snapshot is of another model, optimizer or number of steps an epoch.
        """
        state = snapshot.state
        progress = Progress.from_json(state["progress"])
        if progress.num_steps != num_steps:
            raise RunFolderError(
                f"the snapshot was made with {progress.num_steps} optimizer steps an epoch, this run has {num_steps}: train.batch or the "
                "training set was changed. Resume with the run's own recipe and data, or start a new run folder."
            )
        try:
            self._step.model.load_state_dict(without_prefix("model", snapshot.tensors))
        except RuntimeError as error:
            raise RunFolderError(
                f"the snapshot is of another model: {error}\nResume with the run's own recipe, or start a new run folder."
            ) from error
        unpack_optimizer(self._step.optimizer, without_prefix("optimizer", snapshot.tensors), state["optimizer"])
        self._step.load_state_dict(state["scaler"])
        if self._step.average is not None:
            self._step.average.load(without_prefix("average", snapshot.tensors), state.get("average") or {})
        if progress.metric != metric:  # values of another metric do not compare
            progress.metric, progress.epochs_since_best = metric, 0
        self._adopt_best(progress)
        return progress

    @staticmethod
    def restore_rng(snapshot: Snapshot) -> None:
        """Puts the random state back."""
        unpack_rng(without_prefix("rng", snapshot.tensors), snapshot.state["rng"])

    def save_best(self, progress: Progress, value: float, loss: float) -> None:
        """Writes the best weights, adapters merged, with the epoch, the value that they are the best by, and the loss of validation. What
        the folder tells of earlier ones goes first, so that whatever ends the process in between, nothing is told of weights that it is
        not of.

        Raises:
            EnvironmentFailed: not written; earlier best weights are intact.
        """
        forget_results(self._run_dir)
        note = {"epoch": str(progress.epoch), "metric": progress.metric, "value": repr(value), "loss": repr(loss)}
        save_weights(self._best, self._step.evaluated_weights(), metadata=note)

    def save_last(self, progress: Progress) -> None:
        """Writes the present weights (averaged, where there is an average), adapters merged.

        Raises:
            EnvironmentFailed: not written; earlier last weights are intact.
        """
        save_weights(self._last, self._step.evaluated_weights(), metadata={"epoch": str(progress.epoch)})

    def _adopt_best(self, progress: Progress) -> None:
        """The file is the truth about best weights: it can be newer than the snapshot (killed in between) or gone."""
        note = read_weights_metadata(self._best)
        if note.get("metric") == progress.metric:
            progress.best_value, progress.best_epoch = float(note["value"]), int(note["epoch"])
            progress.best_loss = float(note["loss"]) if "loss" in note else None
        else:
            progress.best_value, progress.best_epoch, progress.best_loss = None, 0, None


def _is_sound(state: Mapping[str, Any]) -> bool:
    """Whether a snapshot is from before training went wrong."""
    return bool(state.get("sound", True))
