"""The end of a run: the best weights evaluated on every split, each sample's result written down, and the report."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from safetensors.torch import load_file

from hiresvis import assemble
from hiresvis.backbone.lora import remove_adapters
from hiresvis.costing import Parts
from hiresvis.data.cache import ImageCache
from hiresvis.data.contract import Contract
from hiresvis.data.folders import IMAGE_EXTENSIONS
from hiresvis.data.loader import EvalLoader
from hiresvis.data.sources import Datasets, Sample
from hiresvis.errors import EnvironmentFailed, Interrupted, first_line
from hiresvis.predictions import predictions_text
from hiresvis.recipe import LoadedRecipe
from hiresvis.recipe.schema import loss_of
from hiresvis.recipe.tasks import METRICS
from hiresvis.results import reliability_of, split_result
from hiresvis.run import RunDirectory
from hiresvis.run.events import Evaluated, Event, Notice, RunFinished, RunInterrupted
from hiresvis.train.batches import fetch
from hiresvis.train.calibration import fit_scores
from hiresvis.train.evaluate import Evaluation, eval_mode
from hiresvis.train.features import Forward
from hiresvis.train.relief import Relief, evaluation_in_room
from hiresvis.train.snapshot import load_snapshot
from hiresvis.train.step import TrainStep
from hiresvis.train.stop import StopRequest
from hiresvis.train.trainer import Trainer
from hiresvis.training_statistics import STATISTICS, Described, Describer, size_of, summarise

_DESCRIBED, _FEWEST_DESCRIBED, _FORWARDS = 1000, 64, 10  # inputs at most, and at least; a tenth of those that were trained on
_FEWEST_IMAGES = 16


def command(loaded: LoadedRecipe, name: str, *options: str) -> str:
    """A hiresvis command with the run's recipe and overrides, to paste into a shell."""
    return shlex.join(["hiresvis", name, str(loaded.path), *loaded.overrides, *options])


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """What training leaves to do.

    Attributes:
        loaded, folder, stop, parts, step: of the run.
        metric: the one that decided which epoch is best.
        workers, cache: how images come.
        counted_bytes: the peak of tensors that the probe of the first plan counted; 0: not known.
    """

    loaded: LoadedRecipe
    folder: RunDirectory
    stop: StopRequest
    parts: Parts
    step: TrainStep
    metric: str
    workers: int
    cache: ImageCache | None
    counted_bytes: int

    def events(self, trainer: Trainer, relief: Relief) -> Iterator[Event]:
        """Training to its end, and then what is left to do.

        Raises:
            EnvironmentFailed: the best weights were never written.
            Interrupted: a stop was requested.
        """
        first, counted = relief.plan, self.counted_bytes
        fitted = Contract.read(self.folder.contract) != self.parts.contract  # by an earlier end of the run, to weights that may be replaced
        for event in trainer.fit():
            if not isinstance(event, RunFinished):
                if fitted and isinstance(event, Evaluated) and event.is_best:
                    try:
                        self.folder.write_json("contract.json", self.parts.contract.to_json())
                        fitted = False
                    except EnvironmentFailed as error:  # told, as all that a full disk does to a run; training goes on
                        yield Notice(level="error", text=f"{error}; it still has what was fitted to earlier weights, until the run's end")
                yield event
                continue
            relief.remove()
            self._refuse_end_without_weights(event.epochs)
            if relief.plan.eval_batch != first.eval_batch:
                trainer.best_evaluation = None  # `evaluate` will repeat the digits of the batch that is left
            results = yield from self._best(trainer, relief)
            yield from self._statistics(trainer, relief, event.epochs)
            finished = replace(
                event,
                time=0.0,
                test_metrics={name: results["test"][name] for name in METRICS[self.parts.contract.task]} if "test" in results else {},
                results=results,
                predicted_peak_bytes=relief.plan.predicted_peak_bytes,
                counted_peak_bytes=counted or None,
                predicted_counted_bytes=first.predicted_counted_bytes if counted else None,
                passed_over=_passed_over(self.parts.datasets),
            )
            yield finished  # recorded by now, so the report sees a finished run
            if self.loaded.recipe.log.report:
                yield from self._evidence()
                yield from self._report()

    def _refuse_end_without_weights(self, epochs: int) -> None:
        """A run that could write no best weights is no finished run.

        Raises:
            EnvironmentFailed: there are none on disk.
        """
        folder, loaded = self.folder, self.loaded
        if folder.best_weights.is_file():
            return
        if load_snapshot(folder.snapshot) is None:
            saved, way = "nothing else of it was saved either", "train again, with the same plan"
            again = command(loaded, "fit", "--resume")
        else:
            saved, way = "its snapshot is there", "train an epoch more from it"
            kept = [override for override in loaded.overrides if override.partition("=")[0].strip() != "train.epochs"]
            again = shlex.join(["hiresvis", "fit", str(loaded.path), *kept, f"train.epochs={epochs + 1}", "--resume"])
        raise EnvironmentFailed(
            f"{folder.best_weights}: the run came to its end, and its best weights were not written (the errors above say why) or were "
            f"removed; {saved}. Free some disk space, then {way}: {again}"
        )

    def _best(self, trainer: Trainer, relief: Relief) -> Generator[Event, None, dict[str, Any]]:
        """Fits how scores are read to the best weights' validation, evaluates them on test, and writes every sample's result.

        Returns:
            by split, see `split_result`.
        """
        datasets = self.parts.datasets
        self.step.average = None  # what it came to is in the file
        remove_adapters(self.step.model)  # the file has them merged; training is done
        self.step.model.load_state_dict(load_file(self.folder.best_weights))
        val, batch = trainer.best_evaluation, relief.plan.eval_batch
        if val is None:
            val = yield from self._evaluation(trainer, datasets.val.samples, relief)
        contract = yield from self._fitted_contract(val)
        self.step.loss_fn = assemble.contract_loss(contract, loss_of(self.loaded.recipe))
        results = {"val": val.read_by(self.step.loss_fn)}
        if datasets.test is not None:
            results["test"] = yield from self._evaluation(trainer, datasets.test.samples, relief)
            if relief.plan.eval_batch != batch:  # `evaluate` will take the batch that is left, for both
                results["val"] = yield from self._evaluation(trainer, datasets.val.samples, relief)
            found = results["test"]
            value, epoch = found.metrics[self.metric], trainer.progress.best_epoch
            yield Evaluated(
                epoch=epoch,
                split="test",
                loss=found.loss,
                metrics=dict(found.metrics),
                metric=self.metric,
                value=value,
                is_best=False,
                best_value=value,
                best_epoch=epoch,
            )
        self.folder.write_text("predictions.csv", predictions_text(results, contract.classes, contract.thresholds))
        self.folder.write_json("reliability.json", {name: reliability_of(found, contract) for name, found in results.items()})
        splits = datasets.splits()
        return {name: split_result(found, contract, splits[name].samples, metric=self.metric) for name, found in results.items()}

    def _fitted_contract(self, val: Evaluation) -> Generator[Event, None, Contract]:
        """The contract with temperature and thresholds of the best weights, which is the run's from now on."""
        fitted = fit_scores(val, self.parts.contract.classes)
        if fitted.told:
            yield Notice(level="info", text=fitted.told)
        contract = replace(self.parts.contract, temperature=fitted.temperature, thresholds=fitted.thresholds)
        self.folder.write_json("contract.json", contract.to_json())
        return contract

    def _statistics(self, trainer: Trainer, relief: Relief, epochs: int) -> Iterator[Event]:
        """What the training images look like to the best weights, for `predict` to hold others against. A run without it is finished all
        the same."""
        datasets, contract = self.parts.datasets, self.parts.contract
        trained = len(datasets.train) * epochs
        samples, others = (
            _drawn(split.samples, min(most, max(_FEWEST_DESCRIBED, trained * most // (_FORWARDS * _DESCRIBED))))
            for split, most in ((datasets.train, _DESCRIBED), (datasets.val, _DESCRIBED // 2))
        )
        text = f"{len(samples)} images of train and {len(others)} of val are looked at once more, by which predict will tell drift"
        yield Notice(level="info", text=text)
        try:
            train = yield from self._described(trainer, samples, relief)
            held_out = yield from self._described(trainer, others, relief)
            if len(train) < 2:
                yield Notice(level="warning", text=f"{len(train)} training images could be described; predict will tell no drift")
                return
            sizes = [size_of(samples[index], contract) for index in train]
            found = summarise([*train.values()], [*held_out.values()], sizes, contract)
            self.folder.write_json(STATISTICS, found.to_json())
        except Interrupted:
            raise
        except Exception as error:  # a worker that dies or memory that ends must not take a finished run along
            why = first_line(error)
            yield Notice(level="warning", text=f"no statistics of the training images ({why}); predict will tell no drift")

    def _described(self, trainer: Trainer, samples: Sequence[Sample], relief: Relief) -> Generator[Event, None, dict[int, Described]]:
        """Images by their position, as many as forwards of so many inputs take; a stop is heeded after each batch."""
        found, describer, inputs = dict[int, Described](), Describer(), 0
        batch, on_gpu = relief.plan.eval_batch, self.step.device.type == "cuda"
        options = {"workers": self.workers, "pin": on_gpu, "cache": self.cache, "bad_images": "skip", "with_truth": False}
        loader = EvalLoader.by(self.parts.contract, samples, batch=batch, **options)
        try:
            with eval_mode(self.step.model), Forward(self.step, most=batch) as forward:
                for item in fetch(loader):
                    if item.indices:
                        found.update(describer.add(item, forward(item.images)[1]))
                    inputs += len(item.indices)
                    if self.stop.requested:
                        yield from self._interrupted(trainer)
                    if inputs >= len(samples) and len(found) >= _FEWEST_IMAGES:  # of images in windows fewer do
                        break
        finally:
            loader.close()
        return found

    def _evaluation(self, trainer: Trainer, samples: Sequence[Sample], relief: Relief) -> Generator[Event, None, Evaluation]:
        """One split by the best weights; a stop is heeded after each batch."""
        batch, on_gpu = relief.plan.eval_batch, self.step.device.type == "cuda"
        loader = EvalLoader.by(self.parts.contract, samples, batch=batch, workers=self.workers, pin=on_gpu, cache=self.cache)
        steps = evaluation_in_room(self.step, loader, relief, name_of=lambda index: samples[index].title)
        try:
            while True:
                try:
                    told = next(steps)
                except StopIteration as done:
                    return done.value
                if isinstance(told, Event):
                    yield told
                if self.stop.requested:
                    steps.close()
                    yield from self._interrupted(trainer)
        finally:
            loader.close()

    def _interrupted(self, trainer: Trainer) -> Iterator[Event]:
        """Leaves after the last step, which is saved.

        Raises:
            Interrupted: always.
        """
        again, progress = command(self.loaded, "fit", "--resume"), trainer.progress
        # Between two epochs the progress is at the next one, which is not trained.
        epoch, at = (progress.epoch, progress.step) if progress.step else (progress.epoch - 1, progress.num_steps)
        yield RunInterrupted(signal=self.stop.signal_name, epoch=epoch, step=at, resume_command=again)
        raise Interrupted(
            f"stopped by {self.stop.signal_name} while the best weights were evaluated; training is done and saved; go on with: {again}",
            exit_code=self.stop.exit_code,
        )

    def _evidence(self) -> Iterator[Event]:
        """Pictures of where the evidence for the worst errors lies; without them the report shows the images alone."""
        contract, step = self.parts.contract, self.step
        if contract.task == "segment":  # its masks are such pictures
            return
        from hiresvis.evidence import Look, write_worst

        look = Look(step.model, contract, step.precision, step.device)
        samples = {name: split.samples for name, split in self.parts.datasets.splits().items()}
        try:
            left_out = write_worst(self.folder, look, samples, stop=lambda: self.stop.requested)
        except Exception as error:  # a picture must not end a finished run, whatever memory or a strange model does
            left_out = first_line(error)
        if left_out:
            yield Notice(level="info", text=f"the report has no maps of evidence of some of the worst errors: {left_out}")

    def _report(self) -> Iterator[Event]:
        """The page; one that cannot be written is told, and the run is finished all the same."""
        from hiresvis.ui.report import write_report

        try:
            path = write_report(self.folder.root)
        except Exception as error:  # the report is a view: its faults must not end a finished run
            yield Notice(level="warning", text=f"the report was not written ({error}); try: hiresvis report {self.folder.root}")
            return
        yield Notice(level="info", text=f"report: {path}")


def _drawn(samples: Sequence[Sample], count: int) -> list[Sample]:
    """So many of them, always the same, in a drawn order."""
    order = np.random.default_rng(0).permutation(len(samples))
    return [samples[int(index)] for index in order[:count]]


def passed_over_notices(datasets: Datasets) -> Iterator[Notice]:
    """Files that were taken for no images, by split: a whole folder of GIFs must not vanish in silence."""
    for name, split in datasets.splits().items():
        if split.skipped_extensions:
            counts = ", ".join(f"{count} {extension}" for extension, count in sorted(split.skipped_extensions.items()))
            text = f"data.{name}: files passed over by extension: {counts}; read are {' '.join(sorted(IMAGE_EXTENSIONS))}"
            yield Notice(level="warning", text=text)


def _passed_over(datasets: Datasets) -> dict[str, int]:
    """The same, all splits together."""
    return dict(sum((Counter(split.skipped_extensions) for split in datasets.splits().values()), Counter[str]()))
