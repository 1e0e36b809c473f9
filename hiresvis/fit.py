"""`hiresvis fit`: everything composed into one stream of events.

Recipe and data are checked, the model is built and traced, the batch found on the device,
the model trained, the best weights evaluated, the report written. Every event is recorded in the run folder before the
caller sees it, so a view that fails can lose nothing.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from hiresvis import assemble, profiles
from hiresvis.batch_statistics import least_images, lone_image_check, small_batch_notices, takes_batch_statistics
from hiresvis.costing import Parts, device_name, make_parts
from hiresvis.data.augment import usable_library
from hiresvis.data.balance import sampling, weighing
from hiresvis.data.contract import Contract
from hiresvis.data.loader import EvalLoader, TrainLoader
from hiresvis.device import PeakMeter, is_out_of_memory, machine, pick_device, return_memory_to_system
from hiresvis.errors import EnvironmentFailed, RunFolderError, first_line
from hiresvis.finish import Finish, command, passed_over_notices
from hiresvis.ladder import other_micro_batch, plan_chosen
from hiresvis.memory.plan import CheckpointPlan
from hiresvis.memory.search import Limits
from hiresvis.own_data import fingerprints, keep_data, read_held_out, refuse_other_data
from hiresvis.precheck import check_before_training
from hiresvis.recipe import LoadedRecipe, Resolution
from hiresvis.recipe.changes import adopt, changes, read_resolved, refuse_changes
from hiresvis.recipe.resolve import Entry
from hiresvis.recipe.tasks import auto_loss
from hiresvis.resizing import phases_json, phases_of
from hiresvis.resume import (
    eval_bytes,
    measured_json,
    plan_json,
    read_plan,
    refuse_other_augmentation,
    refuse_other_classes,
    refuse_other_contract,
    refuse_other_plan,
    too_little_memory,
)
from hiresvis.run import RunDirectory
from hiresvis.run.directory import refuse_existing
from hiresvis.run.events import AutoResolved, Event, Notice, RunStarted
from hiresvis.run.hold import Hold
from hiresvis.settle import disk_bytes, remedies, settle_ema
from hiresvis.supply import Supply, settle_cache, settle_workers, tell_supply
from hiresvis.trackers import Trackers
from hiresvis.train.average import Average, decay_of
from hiresvis.train.finder import Finder, Found
from hiresvis.train.metrics import auto_metric
from hiresvis.train.optim import Schedule, auto_lr, build_schedule, is_transformer
from hiresvis.train.phases import HeadFirst
from hiresvis.train.progress import RunLimits
from hiresvis.train.relief import Relief
from hiresvis.train.sizes import SizePhase, Sizes
from hiresvis.train.snapshot import Snapshot, load_snapshot
from hiresvis.train.step import TrainStep
from hiresvis.train.stop import StopRequest
from hiresvis.train.trainer import Trainer

_ROLLBACKS = 2  # of a run that diverges, before it stops


def fit(
    loaded: LoadedRecipe, *, resume: bool = False, dry_run: bool = False, on_stop: Callable[[str], None] | None = None
) -> Iterator[Event]:
    """Check, plan, probe, train, report.

    Args:
        loaded: the recipe with its overrides.
        resume: go on with the run in the run folder: its plan, its snapshot.
        dry_run: stop before the first training step; no run folder is made.
        on_stop: called with a signal's name at the moment it asks for a stop, from its handler.

    Yields:
        What happens; each event is in the run folder already.

    Raises:
        HiresvisError: by kind, see `hiresvis.errors`.
    """
    if not resume and not dry_run:
        refuse_existing(loaded.run_dir)
    with StopRequest(on_stop) as stop, Hold() as hold:
        run = _Run(loaded, stop, hold)
        try:
            for event in run.resumed() if resume else run.new(dry_run=dry_run):
                stamped = event if event.time else replace(event, time=time.time())
                yield from run.told(stamped)
                for notice in run.track(stamped):
                    yield from run.told(replace(notice, time=time.time()))
        finally:
            for notice in run.trackers.close():  # nobody listens any more
                run.record(replace(notice, time=time.time()))


@dataclass(slots=True)
class _Run:
    """One fit under way: its parts as they come into being."""

    loaded: LoadedRecipe
    stop: StopRequest
    hold: Hold
    folder: RunDirectory | None = None
    early: list[Event] = field(default_factory=list)  # events before the run folder exists
    resolution: Resolution = field(init=False)
    device: torch.device = field(init=False)
    trackers: Trackers = field(init=False)
    supply: Supply = field(default_factory=Supply)
    head_epochs: int = 0  # of the head alone, before everything is trained
    num_autos_told: int = 0
    record_failed: bool = False
    tracking: bool = False

    def __post_init__(self) -> None:
        self.resolution = Resolution(self.loaded)
        self.device = pick_device()
        self.trackers = Trackers(self.loaded.recipe.log.to, self.loaded.run_dir)

    def told(self, event: Event) -> Iterator[Event]:
        """The event, which is in the run folder by then; and that the folder failed, once."""
        lost = self.record(event)
        yield event
        if lost:
            yield replace(lost, time=time.time())

    def record(self, event: Event) -> Notice | None:
        """Writes the event to the run folder; a disk that fails is told once, and the run goes on."""
        if self.folder is None:
            self.early.append(event)
            return None
        try:
            self.folder.record(event)
        except EnvironmentFailed as error:
            told, self.record_failed = self.record_failed, True
            return None if told else Notice(level="error", text=f"{error}; training goes on, its log has gaps")
        return None

    def track(self, event: Event) -> Iterator[Notice]:
        """Hands the event to the trackers of `log.to`, which open with the run folder."""
        if self.folder is None:
            return
        if not self.tracking:
            self.tracking = True
            yield from self.trackers.start({entry.key: entry.value for entry in self.resolution.entries})
        yield from self.trackers.record(event)

    def new(self, *, dry_run: bool) -> Iterator[Event]:
        """A run from the start."""
        self._settle_machine()
        self.head_epochs, why = assemble.head_epochs(self.loaded)
        if why:
            self.resolution.set("model.lp_ft.head_epochs", self.head_epochs, why)
        yield from assemble.draw_sample(self.loaded)
        parts = yield from self._parts(norm=None)
        step = yield from self._step(parts)
        yield self._started(parts, batch=parts.limits.batch, resumed_from_epoch=None)
        yield from self._autos()
        found = yield from self._find(parts, step, parts.limits)
        plan = found.plan
        yield from small_batch_notices(self.loaded, parts, plan)
        self._settle_plan(plan)
        settled = self._settle_training(parts, plan, found.measured.images_per_second)
        yield from self._autos()
        phases = phases_of(self.loaded, parts, plan, None)
        if dry_run:
            yield Notice(level="info", text="dry run: nothing is trained")
            return
        self.folder = RunDirectory.create(
            self.loaded.run_dir, self.loaded.text, need_bytes=disk_bytes(parts.profile, average_on_host=parts.average_on_host)
        )
        self.hold.take(self.folder.events)
        self.folder.write_text("recipe.resolved.yaml", self.resolution.text())
        self.folder.write_json("contract.json", parts.contract.to_json())
        stored = {**plan_json(parts, plan), **measured_json(plan, found.measured, found.ladder), "data": fingerprints(parts.datasets)}
        stored["sizes"] = phases_json(phases)
        stored["machine"] = machine(self.device, device_name(self.device))
        self.folder.write_json("plan.json", stored)
        keep_data(self.folder, parts.datasets)
        for event in self.early:
            self.folder.record(event)
        yield from self._train(parts, step, plan, settled, stored, phases)

    def resumed(self) -> Iterator[Event]:
        """The run in the folder goes on with its own plan."""
        self.folder = RunDirectory.open(self.loaded.run_dir)
        self.hold.take(self.folder.events)
        stored, plan = read_plan(self.folder)
        snapshot = load_snapshot(self.folder.snapshot)
        if snapshot is not None and snapshot.note:
            yield Notice(level="warning", text=snapshot.note)
        if snapshot is None and self.folder.best_weights.is_file():
            raise RunFolderError(
                f"{self.folder.snapshot}: gone, and weights show that epochs were trained. Put it back; or begin a new run from the "
                f"weights: log.dir=NEW_FOLDER model.pretrained={self.folder.best_weights}"
            )
        if snapshot is None:
            yield Notice(level="info", text="the run was stopped before its first snapshot: it begins again, with its own plan")
        epochs_done = int(snapshot.state["progress"]["epoch"]) - 1 if snapshot else 0
        if (wanted := self.loaded.recipe.train.epochs) < epochs_done:
            raise RunFolderError(
                f"{self.folder.root}: {epochs_done} epochs are trained, and train.epochs is {wanted}; give at least {epochs_done}, or "
                "begin another run: log.dir=NEW_FOLDER"
            )
        before = Contract.read(self.folder.contract)
        own = read_resolved(self.folder.resolved)
        changed = changes(own, self.loaded)
        refuse_changes(changed, self.loaded, self.folder.root)
        if self.loaded.recipe.train.ema == "auto":  # by the schedule, which may have been changed since
            self._keep_average(bool(own["train.ema"].value))
        self._settle_machine()
        if self.loaded.recipe.model.lp_ft is not None:
            self.head_epochs = int(own["model.lp_ft.head_epochs"].value)
        held_out = read_held_out(self.folder)
        parts = yield from self._parts(norm=stored["norm"], before=before, data_before=stored.get("data", {}), held_out=held_out)
        refuse_other_plan(plan, parts, self.folder)
        refuse_other_augmentation(stored.get("augmented_by"), parts.pipeline.augment, self.folder.root)
        step = yield from self._step(parts)
        yield self._started(parts, batch=plan.batch, resumed_from_epoch=epochs_done)
        if (shortage := too_little_memory(stored, parts)) is None:
            yield plan_chosen(replace(plan, why="the run's own plan"), stored["measured"]["resident_peak_bytes"])
        else:
            yield Notice(level="warning", text=shortage)
            found = yield from self._find(parts, step, replace(parts.limits, batch=plan.batch, micro_batch=None, most=plan.micro_batch))
            if found.plan.micro_batch != plan.micro_batch:
                yield Notice(level="warning", text=other_micro_batch(plan.micro_batch, found.plan))
            plan = found.plan
            stored = {**stored, **plan_json(parts, plan), **measured_json(plan, found.measured, found.ladder)}
            stored["sizes"] = [{**row, "plan": None} for row in stored.get("sizes", ())]  # planned again likewise
            changed = [replace(change, effect="taken") if change.key == "memory.budget" else change for change in changed]
        self._settle_plan(plan)
        settled = self._settle_training(parts, plan, stored["measured"].get("images_per_second"), own)
        for change in changed:
            yield Notice(level="warning" if change.effect == "none" else "info", text=str(change))
        adopt(own, changed, self.loaded, self.resolution)
        self.folder.write_text("recipe.resolved.yaml", self.resolution.text())
        phases = phases_of(self.loaded, parts, plan, stored.get("sizes"))
        stored["sizes"] = phases_json(phases)
        if shortage is not None:
            self.folder.write_json("plan.json", stored)
        yield from self._train(parts, step, plan, settled, stored, phases, snapshot)

    def _keep_average(self, averaged: bool) -> None:
        """The weights are averaged as the run has begun."""
        recipe = self.loaded.recipe
        train = recipe.train.model_copy(update={"ema": averaged})
        self.loaded = replace(self.loaded, recipe=recipe.model_copy(update={"train": train}))
        self.resolution.set("train.ema", averaged, "as the run was begun")

    def _step(self, parts: Parts) -> Generator[Event, None, TrainStep]:
        """The training step; says what is done about classes of unequal size."""
        train, balance = parts.datasets.train, self.loaded.recipe.data.balance
        weights, said = weighing(train) if balance == "weights" else ((), sampling(train) if balance == "sampler" else "")
        if said:
            yield Notice(level="info", text=f"data.balance {balance}: {said}")
        step = assemble.make_step(self.loaded, parts.trainable, parts.contract, parts.precision, self.device, weights=weights)
        if settle_ema(self.loaded)[0]:
            step.average = Average(step.model, on_host=parts.average_on_host)
        return step

    def _find(self, parts: Parts, step: TrainStep, limits: Limits) -> Generator[Event, None, Found]:
        """The plan that runs on this device."""
        recipe = self.loaded.recipe
        finder = Finder(
            step=step,
            train_mode=parts.trainable.train_mode,
            profile=parts.profile,
            budget=parts.budget,
            limits=limits,
            raw_image=parts.raw_image,
            eval_batch=None if recipe.train.eval_batch == "auto" else recipe.train.eval_batch,
            remedies=lambda answer: remedies(self.loaded, parts.profile, parts.trainable.backbone.stride, answer),
            check=lone_image_check(self.loaded, parts),
            stop=self.stop,
            unit_seconds=profiles.read_seconds(parts.key, device_name(self.device)),
        )
        yield from finder.find()
        assert finder.found is not None
        if finder.unit_seconds:
            profiles.write_seconds(parts.key, device_name(self.device), finder.unit_seconds)
        return finder.found

    def _settle_machine(self) -> None:
        recipe = self.loaded.recipe
        assemble.refuse_budget(self.loaded, self.device)
        if self.device.type == "cpu":
            return_memory_to_system()
        if recipe.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(recipe.train.seed)
        np.random.seed(recipe.train.seed)  # nothing of ours draws from these two, but what an augmentation does is its own matter
        random.seed(recipe.train.seed)
        self.resolution.set("train.strategy", "single", "started as one process")
        if recipe.train.ema == "auto":
            self.resolution.set("train.ema", *settle_ema(self.loaded))
        if recipe.optim.loss == "auto":
            self.resolution.set("optim.loss", *auto_loss(recipe.task, recipe.data.balance))
        if recipe.model.drop_path == "auto":
            self.resolution.set("model.drop_path", "auto", "the model's own rate, which timm sets")

    def _autos(self) -> Iterator[AutoResolved]:
        """Tells each auto once."""
        found = self.resolution.autos
        for entry in found[self.num_autos_told :]:
            yield AutoResolved(key=entry.key, value=_short(entry.value), reason=entry.why)
        self.num_autos_told = len(found)

    def _parts(
        self,
        *,
        norm: str | None,
        before: Contract | None = None,
        data_before: Mapping[str, Any] | None = None,
        held_out: Collection[str] | None = None,
    ) -> Generator[Event, None, Parts]:
        """Data, contract, model and costs; told as they come."""
        loaded = self.loaded
        datasets = assemble.read_datasets(loaded, self.resolution, held_out=held_out)
        if before is not None:
            refuse_other_classes(before, datasets.classes, loaded.run_dir)
        if self.folder is not None:
            refuse_other_data(self.folder, data_before or {}, datasets)
        yield from passed_over_notices(datasets)
        if isinstance(loaded.recipe.train.batch, int):
            assemble.refuse_warmup(loaded, len(datasets.train), loaded.recipe.train.batch, self.head_epochs)
        if before is None:
            channels, scale = assemble.settle_pixels(loaded, self.resolution, datasets)
        else:
            channels, scale = before.channels, before.scale
        backbone = assemble.build_model(loaded, num_classes=len(datasets.classes), channels=channels)
        for note in backbone.notes:
            yield Notice(level="info", text=note)
        contract = assemble.make_contract(loaded, datasets, channels, scale, backbone)
        if before is not None:
            refuse_other_contract(before, contract, loaded.run_dir)
        self.supply = settle_cache(loaded, self.resolution, datasets, contract)
        if before is None:
            yield from check_before_training(loaded, self.resolution, datasets, contract, copies=self.supply.cache, stop=self.stop)
        parts = make_parts(loaded, self.resolution, datasets, contract, backbone, self.device, norm=norm)
        yield Notice(level="info", text=assemble.describe_model(parts.trainable))
        if parts.pipeline.augment is not None and (why := usable_library()[1]):
            yield Notice(level="warning", text=f"augmentation by {parts.pipeline.augment.made_by}, since {why}")
        return parts

    def _started(self, parts: Parts, *, batch: int | None, resumed_from_epoch: int | None) -> RunStarted:
        recipe = self.loaded.recipe
        return RunStarted(
            run_name=self.loaded.run_dir.name,
            run_dir=str(self.loaded.run_dir),
            model=recipe.model.name,
            image_size=parts.contract.image_size,
            task=recipe.task,
            classes=parts.contract.classes,
            num_train=len(parts.datasets.train),
            num_val=len(parts.datasets.val),
            epochs=recipe.train.epochs,
            batch=batch,
            device=str(self.device),
            budget_bytes=parts.budget.total_bytes,
            capacity_bytes=parts.budget.capacity_bytes,
            others_bytes=parts.budget.others_bytes,
            resumed_from_epoch=resumed_from_epoch,
        )

    def _settle_plan(self, plan: CheckpointPlan) -> None:
        recipe, resolution = self.loaded.recipe, self.resolution
        if recipe.memory.micro_batch == "auto":
            resolution.set("memory.micro_batch", plan.micro_batch, plan.why)
        if recipe.memory.spacing == "auto":
            resolution.set("memory.spacing", "auto", f"{'; '.join(plan.stages)} (plan.json has every unit)")
        if recipe.train.batch == "auto":
            resolution.set("train.batch", plan.batch, "the largest that fits at once")
        if recipe.train.eval_batch == "auto":
            resolution.set("train.eval_batch", plan.eval_batch, "as many as do not raise the peak")
        elif recipe.train.eval_batch != plan.eval_batch:
            resolution.set("train.eval_batch", plan.eval_batch, f"{recipe.train.eval_batch} were given, and so many did not fit")

    def _settle_training(
        self, parts: Parts, plan: CheckpointPlan, images_per_second: float | None, own: Mapping[str, Entry] | None = None
    ) -> _Settled:
        """Learning rate and its schedule, metric and workers.

        Args:
            own: the resolved recipe of the run that goes on; an automatic rate stays as it was begun, whatever the number of epochs now.

        Raises:
            RecipeError: a warm-up longer than the run.
        """
        recipe, resolution, model, batch = self.loaded.recipe, self.resolution, parts.trainable.model, plan.batch
        lr, lp_ft = recipe.optim.lr, recipe.model.lp_ft
        images = len(parts.datasets.train)
        if lr == "auto" and own is not None and own["optim.lr"].origin == "auto":
            lr = float(own["optim.lr"].value)
            resolution.set("optim.lr", lr, own["optim.lr"].why)
        elif lr == "auto":
            lr, why = auto_lr(
                recipe.optim.name,
                batch=batch,
                pretrained=recipe.model.pretrained is not False,
                adapt=recipe.model.adapt,
                transformer=is_transformer(model),
                layer_decay=parts.trainable.layer_decay,
                images=images * max(1, recipe.train.epochs - self.head_epochs) if takes_batch_statistics(parts) else None,
            )
            resolution.set("optim.lr", lr, why)
        head_lr = None if lp_ft is None else lp_ft.head_lr
        if head_lr == "auto":
            head_lr, why = auto_lr(recipe.optim.name, batch=batch, pretrained=recipe.model.pretrained is not False, adapt="head")
            resolution.set("model.lp_ft.head_lr", head_lr, why)
        metric = recipe.train.metric
        if metric == "auto":
            metric, why = auto_metric(recipe.task, list(parts.datasets.train.class_counts().values()))
            resolution.set("train.metric", metric, why)
        workers = settle_workers(
            self.loaded,
            resolution,
            self.supply,
            augment=parts.pipeline.augment,
            on_gpu=self.device.type == "cuda",
            micro_batch_bytes=parts.profile.raw_image.slope * plan.micro_batch,
            images_per_second=images_per_second,
            reads=1 + 1 / plan.micro_batch if assemble.make_mixing(self.loaded, parts.contract) and plan.accumulation > 1 else 1.0,
        )
        assemble.refuse_warmup(self.loaded, images, batch, self.head_epochs)
        head_steps, steps = assemble.phase_steps(self.loaded, images, batch, self.head_epochs)
        schedule = None
        for rate, count in ((head_lr, head_steps), (lr, steps)):
            if rate is not None:
                warmup = recipe.optim.warmup if count else 0
                schedule = build_schedule(lr=float(rate), schedule=recipe.optim.schedule, warmup=warmup, steps=count, before=schedule)
        assert schedule is not None
        return _Settled(schedule, metric, workers)

    def _train(
        self,
        parts: Parts,
        step: TrainStep,
        plan: CheckpointPlan,
        settled: _Settled,
        stored: dict[str, Any],
        phases: Sequence[SizePhase],
        snapshot: Snapshot | None = None,
    ) -> Iterator[Event]:
        """Training itself, with the plan applied; then the best weights' evaluation and the report.

        Args:
            stored: what plan.json holds.
            phases: of image sizes; empty: there is one.
        """
        recipe, folder = self.loaded.recipe, self.folder
        assert folder is not None
        data, samples = recipe.data, parts.datasets
        on_gpu = self.device.type == "cuda"
        train_loader = TrainLoader(
            samples.train.samples,
            parts.pipeline,
            max_pixels=data.max_pixels,
            batch=plan.batch,
            micro_batch=plan.micro_batch,
            seed=recipe.train.seed,
            least=least_images(parts),
            balanced=data.balance == "sampler",
            workers=settled.workers,
            bad_images=data.bad_images,
            pin=on_gpu,
            cache=self.supply.cache,
            mixing=assemble.make_mixing(self.loaded, parts.contract),
        )
        val_loader = EvalLoader.by(
            parts.contract, samples.val.samples, batch=plan.eval_batch, workers=settled.workers, pin=on_gpu, cache=self.supply.cache
        )
        head_first, check = None, lambda now: lone_image_check(self.loaded, parts)(now)
        if self.head_epochs:
            check = lone_image_check(self.loaded, parts)  # now, while everything is trained
            head_first = HeadFirst(
                parts.trainable.model, self.head_epochs, train_mode=parts.trainable.train_mode, frozen_norm=parts.trainable.frozen_norm
            )
        meter = PeakMeter(self.device)
        meter.start()
        relief = Relief(
            step=step,
            plan=plan,
            profile=parts.profile,
            limits=parts.limits,
            train_loader=train_loader,
            changed=lambda now: self._write_plan(parts, now, stored),
            check=check,
            replan=recipe.memory.on_oom == "replan",
            resume_command=command(self.loaded, "fit", "--resume"),
        )
        trainer = Trainer(
            step=step,
            train_loader=train_loader,
            val_loader=val_loader,
            schedule=settled.schedule,
            train_mode=parts.trainable.train_mode,
            head_first=head_first,
            sizes=Sizes(phases, relief, train_loader) if phases else None,
            limits=RunLimits(
                epochs=recipe.train.epochs,
                early_stop=recipe.train.early_stop.patience if recipe.train.early_stop else None,
                max_time=recipe.train.max_time,
                save_every=recipe.train.save_every,
                rollbacks=_ROLLBACKS if recipe.train.on_divergence == "rollback" else 0,
            ),
            metric=settled.metric,
            run_dir=folder.root,
            stop=self.stop,
            relief=relief,
            memory_bytes=meter.peak_bytes,
            name_of=lambda index: samples.train.samples[index].title,
            val_name_of=lambda index: samples.val.samples[index].title,
            predicted_peak_bytes=plan.predicted_peak_bytes,
            resume_command=command(self.loaded, "fit", "--resume"),
        )
        try:
            if step.average is not None:
                step.average.decay = decay_of(settled.schedule.all_steps)
            if snapshot is not None:
                trainer.restore(snapshot)
            if step.average is not None:
                where = ", in host memory" if parts.average_on_host else ""
                text = f"the weights' average over about {1 / (1 - step.average.decay):.0f} steps is what is evaluated and kept{where}"
                yield Notice(level="info", text=text)
            finish = Finish(
                loaded=self.loaded,
                folder=folder,
                stop=self.stop,
                parts=parts,
                step=step,
                metric=settled.metric,
                workers=settled.workers,
                cache=self.supply.cache,
                counted_bytes=int(stored["measured"]["counted_peak_bytes"]),
            )
            events = finish.events(trainer, relief)
            yield from tell_supply(events, train_loader, val_loader, workers=settled.workers, cached=self.supply.cache is not None)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise relief.refusal(f"Memory ran out outside of training steps ({first_line(error)})") from error
        finally:
            relief.remove()
            train_loader.close()
            val_loader.close()

    def _write_plan(self, parts: Parts, plan: CheckpointPlan, stored: dict[str, Any]) -> None:
        """A plan that came into being in training: plan.json, and what the recipe's autos are now.

        Raises:
            EnvironmentFailed: not written.
        """
        assert self.folder is not None
        if plan.image_size != parts.contract.image_size:  # of smaller images, see `resizing`
            for row in stored["sizes"]:
                if tuple(row["image_size"]) == plan.image_size:
                    row["plan"] = plan.to_json()
            if plan.eval_batch != stored["eval_batch"]:  # evaluation is always at the last size
                last = replace(CheckpointPlan.from_json(stored["checkpoint_plan"]), eval_batch=plan.eval_batch)
                stored |= {
                    "eval_batch": plan.eval_batch,
                    "eval_bytes": eval_bytes(parts, plan.eval_batch),
                    "checkpoint_plan": last.to_json(),
                }
                self._settle_plan(last)
        else:
            stored |= plan_json(parts, plan)
            stored["measured"] = {**stored["measured"], "of_an_earlier_plan": True}
            self._settle_plan(plan)
        self.folder.write_json("plan.json", stored)
        self.folder.write_text("recipe.resolved.yaml", self.resolution.text())


@dataclass(frozen=True, slots=True)
class _Settled:
    schedule: Schedule
    metric: str
    workers: int


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
