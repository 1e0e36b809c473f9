"""Ways to adapt through the command line: low-rank adapters, and the head before everything."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hiresvis.backbone.build import build_backbone
from hiresvis.errors import Interrupted
from hiresvis.fit import fit
from hiresvis.recipe import load_recipe
from hiresvis.train.step import TrainStep

LORA = ("model.name=test_vit", "model.adapt=lora", "model.drop_path=0.2", "optim.warmup=0", "train.eval_batch=4")
LP_FT = ("model.adapt=lp_ft", "train.epochs=3", "optim.warmup=0", "train.eval_batch=4")


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> dict[str, Path]:
    """Weights to begin with, as a file, by model."""
    folder, found = tmp_path_factory.mktemp("weights"), {}
    for name in ("test_vit", "test_resnet"):
        model = build_backbone(name, num_classes=2, image_size=64, pretrained=False, seed=3).model
        found[name] = folder / f"{name}.safetensors"
        save_file(model.state_dict(), found[name])
    return found


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, folders, make_workshop, weights):
    """A finished run of adapters, whose averages are what is kept; no test changes it."""
    work = make_workshop(tmp_path_factory.mktemp("adapted"), folders)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    work.overrides = (*LORA, f"model.pretrained={weights['test_vit']}", "train.ema=true")
    work.done = work.fit(*work.overrides, "--ui", "plain")
    torch.set_num_threads(threads)
    return work


def stopped_at(work, name: str, epoch: int, step: int, *overrides: str) -> None:
    """A run that is asked to stop after a step."""
    recipe = load_recipe(work.recipe, [*overrides, f"log.dir={work.folder / 'runs' / name}"])
    with pytest.raises(Interrupted):  # noqa: PT012 - the loop is the statement
        for event in fit(recipe):
            if event.kind == "step_done" and (event.epoch, event.step) == (epoch, step):
                os.kill(os.getpid(), signal.SIGINT)


def assert_same_end(work, first: str, second: str) -> None:
    for file in ("best", "last"):
        one, other = (load_file(work.path(f"weights/{file}.safetensors", name)) for name in (first, second))
        assert list(one) == list(other)
        assert not [name for name in one if not torch.equal(one[name], other[name])]
    assert work.path("predictions.csv", first).read_text() == work.path("predictions.csv", second).read_text()
    scores = [
        [(row["epoch"], row["split"], row["loss"], row["metrics"]) for row in work.events("evaluated", name)] for name in (first, second)
    ]
    assert scores[0] == scores[1]


def test_weights_of_an_adapted_run_are_a_plain_model_s(adapted, weights):
    """The very names of timm's state dict; wide products and the head have moved, everything else has its bits."""
    start, end = load_file(weights["test_vit"]), load_file(adapted.path("weights/best.safetensors"))
    assert list(start) == list(end)
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    parts = {re.sub(r"^blocks\.\d+\.", "", name) for name in moved}
    assert parts == {"attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight", "head.weight", "head.bias"}
    ranks = [torch.linalg.matrix_rank(end[name] - start[name], atol=1e-5).item() for name in moved if name.startswith("blocks")]
    assert max(ranks) <= 8
    trained = r"4\d,\d{3} of them \(1\d\.\d%\) trained: the head, and adapters on 24 of 26 linear layers and convolutions"
    assert re.search(trained, adapted.done.err)


def test_every_command_gives_the_digits_of_fit_s_own_evaluation(adapted, tmp_path):
    """Epochs are evaluated with the adapters in place, evaluate and predict with the merged file: the same to the last digit; timm alone
    builds the exported weights to the same logits."""
    best = adapted.events("run_finished")[0]["best_epoch"]
    (val,) = [row for row in adapted.events("evaluated") if row["epoch"] == best and row["split"] == "val"]
    (test,) = [row for row in adapted.events("evaluated") if row["split"] == "test"]
    done = adapted("evaluate", adapted.path(""), "--json").json
    for split, told in (("val", val), ("test", test)):
        assert done[split].items() >= {"loss": told["loss"], **told["metrics"]}.items()
    predicted = adapted("predict", adapted.path(""), adapted.data / "val")
    rows = list(csv.DictReader(predicted.out.splitlines()))
    assert len(rows) == 9
    assert sum(Path(row["path"]).parent.name == row["label"] for row in rows) / 9 == pytest.approx(val["metrics"]["accuracy"])
    out = tmp_path / "exported"
    exported = adapted("export", adapted.path(""), "--to", "safetensors", "--out", out)
    assert exported.code == 0, exported.err
    assert "equal bit for bit" in exported.out
    assert json.loads((out / "config.json").read_text())["architecture"] == "test_vit"


def test_adapters_and_their_rate_are_told_and_written_down(adapted):
    """Rank and alpha are in the resolved recipe; the automatic rate and the missing layer decay have their reasons."""
    text = adapted.path("recipe.resolved.yaml").read_text()
    assert "  lora:\n    rank: 8  # default\n    alpha: 16.0  # default\n" in text
    assert "layer_decay: null  # auto: adapters" in text
    rule = "10 times the rate of fine-tuning a transformer without layer decay: 10 x 0.0001 x sqrt(6/64)"
    assert f"lr: 0.000306  # auto: adamw, low-rank adapters, {rule}\n" in text
    assert f'optim.lr=0.000306 reason="adamw, low-rank adapters, {rule}"' in adapted.done.err


def test_a_plan_changes_no_bit_of_an_adapted_run(workshop, weights):
    """Everything stored or every block recomputed, two micro-batches a step, in bf16, where frozen weights are cast anew each time."""
    for name, spacing in (("off", "off"), ("one", "1")):
        more = (f"model.pretrained={weights['test_vit']}", "memory.micro_batch=3", "memory.precision=bf16", "train.epochs=1")
        workshop.fit(*LORA, *more, f"memory.spacing={spacing}", name=name)
    assert workshop.read("plan.json", "off")["recompute_fraction"] == 0
    assert workshop.read("plan.json", "one")["recompute_fraction"] > 0.15
    assert_same_end(workshop, "off", "one")


def test_an_adapted_run_resumes_to_the_same_bits(adapted):
    """Stopped in the second epoch: adapters, unmerged, and their optimizer state come from the snapshot."""
    stopped_at(adapted, "stopped", 2, 1, *adapted.overrides)
    names = load_file(next(adapted.path("snapshot", "stopped").glob("tensors-*.safetensors")))
    assert sum(name.startswith("model/") and name.endswith(("lora_a", "lora_b")) for name in names) == 48
    adapted.fit(*adapted.overrides, "--resume", name="stopped")
    assert_same_end(adapted, "recipe", "stopped")
    done = adapted.fit(*adapted.overrides, "model.lora.rank=4", "--resume", name="stopped", ok=False)
    assert done.code == 6
    assert "model.lora.rank  the run was begun with 8, and this is 4; set it back: model.lora.rank=8" in done.err


def test_frozen_stages_of_an_adapted_run_keep_their_bits(workshop, weights):
    """freeze: 2 leaves the stem and two stages without adapters."""
    workshop.fit("model.adapt=lora", f"model.pretrained={weights['test_resnet']}", "model.freeze=2", "train.epochs=1")
    start, end = load_file(weights["test_resnet"]), load_file(workshop.path("weights/last.safetensors"))
    assert {name.split(".")[0] for name in start if not torch.equal(start[name], end[name])} == {"layer3", "layer4", "fc"}


def test_lp_ft_trains_the_head_before_everything(workshop, weights):
    """Each phase has its rate, announced with its reason; after the first, only the head has moved."""
    overrides = (*LP_FT, f"model.pretrained={weights['test_resnet']}", "optim.schedule=constant")
    done = workshop.fit(*overrides, "--ui", "plain")
    rates = [row["lr"] for row in workshop.events("step_done")]
    assert rates == [0.00153] * 3 + [0.000612] * 6
    assert 'model.lp_ft.head_lr=0.00153 reason="adamw, training the classifier alone: 0.005 x sqrt(6/64)"' in done.err
    rule = "adamw, fine-tuning all layers: 0.0005 x sqrt(6/64) x 4, for batch statistics and a run of 32 images"
    assert f'optim.lr=0.000612 reason="{rule}"' in done.err
    assert 'model.lp_ft.head_epochs=1 reason="20% of 3 epochs"' in done.err
    assert "epoch 1 trains the head alone (" in done.err
    assert "epoch 2: everything is trained from here on" in done.err
    again = workshop("evaluate", workshop.path(""), "--json").json
    best = workshop.events("run_finished")[0]["best_epoch"]
    (val,) = [row for row in workshop.events("evaluated") if row["epoch"] == best and row["split"] == "val"]
    assert again["val"].items() >= {"images": 9, "loss": val["loss"], **val["metrics"]}.items()

    stopped_at(workshop, "first", 1, 3, *overrides)
    start = load_file(weights["test_resnet"])
    snapshot = load_file(next(workshop.path("snapshot", "first").glob("tensors-*.safetensors")))
    assert {name for name in start if not torch.equal(start[name], snapshot[f"model/{name}"])} == {"fc.weight", "fc.bias"}
    stopped_at(workshop, "second", 2, 2, *overrides)
    for name in ("first", "second"):
        workshop.fit(*overrides, "--resume", name=name)
        assert_same_end(workshop, "recipe", name)


def test_a_longer_lp_ft_run_keeps_its_first_phase(workshop):
    """More epochs on resume, a fifth of which would be two, do not make the head's phase longer: it is as it was settled."""
    stopped_at(workshop, "recipe", 1, 2, *LP_FT)
    workshop.fit(*LP_FT[:1], "train.epochs=10", *LP_FT[2:], "--resume", "train.early_stop=null")
    assert "head_epochs: 1  # auto: 20% of 3 epochs" in workshop.path("recipe.resolved.yaml").read_text()
    texts = [row["text"] for row in workshop.events("notice") if "is trained" in row["text"]]
    assert [text.partition(" ")[2][:1] for text in texts] == ["1", "2"]


def test_memory_that_runs_out_in_the_first_phase_leaves_a_run_that_goes_on(workshop, monkeypatch):
    """The tighter plan that is written then is one for the whole run: its second phase, resumed, takes it."""
    real, calls = TrainStep.accumulate, list[int]()

    def accumulate(self, *args, **kwargs):
        if self.model.training and not self.model.layer1.training:  # the body in eval mode: the first phase
            calls.append(1)
            if len(calls) == 2:
                raise MemoryError("not enough memory: you tried to allocate 1 bytes")
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "accumulate", accumulate)
        stopped_at(workshop, "recipe", 2, 1, *LP_FT)
    assert any("memory ran out" in row["text"] for row in workshop.events("notice"))
    assert workshop.fit(*LP_FT, "--resume").code == 0
