"""evaluate on what people have: some of the classes, others besides, tables and pictures."""

from __future__ import annotations

import shutil

import pytest
import torch
from PIL import Image

from hiresvis.train.step import TrainStep


def test_a_run_is_told_class_by_class(trained, tmp_path):
    """Rows of the table and pairs of the confusion are the split's images, counted once; text and picture hold the same."""
    told = trained("evaluate", trained.path(""), "--json").json["test"]
    assert sum(row["images"] for row in told["classes"].values()) == sum(pair["images"] for pair in told["confusion"]) == told["images"]
    right = sum(pair["images"] for pair in told["confusion"] if pair["label"] == pair["predicted"])
    assert right / told["images"] == pytest.approx(told["accuracy"])
    f1 = [row["f1"] for row in told["classes"].values() if row["f1"] is not None]
    assert sum(f1) / len(f1) == pytest.approx(told["macro_f1"])
    done = trained("evaluate", trained.path(""), "--plot", tmp_path / "confusion.png")
    assert done.code == 0, done.err
    assert f"test.accuracy {told['accuracy']}" in done.out
    for name, row in told["classes"].items():
        assert f"\n{name:6}  {row['images']:6}  {row['predicted']:9}  " in done.out
    assert "test, images of each label by what they are predicted as" in done.out
    with Image.open(tmp_path / "confusion.png") as image:
        assert min(image.size) > 300


def test_a_picture_that_the_task_has_not_is_refused_before_anything_is_evaluated(trained, tmp_path):
    """Exit 2 with nothing on standard output."""
    run = shutil.copytree(trained.path(""), tmp_path / "run")
    (run / "contract.json").write_text((run / "contract.json").read_text().replace('"classify"', '"regress"'))
    done = trained("evaluate", run, "--plot", tmp_path / "confusion.png")
    assert (done.code, done.out) == (2, "")
    assert "the run's task is regress; leave it out" in done.err


def test_data_may_have_some_of_the_classes_alone(trained, tmp_path):
    """Means are over those, and the others are named."""
    shutil.copytree(trained.data / "test" / "ok", tmp_path / "set" / "ok")
    done = trained("evaluate", trained.path(""), "--data", tmp_path / "set", "--json")
    assert done.code == 0, done.err
    found = done.json["data"]
    assert "data: no image of 1 of 2 classes (defect); means are over the others" in done.err
    assert found["absent"] == ["defect"]
    assert found["balanced_accuracy"] == found["classes"]["ok"]["recall"] == found["accuracy"]
    assert (found["classes"]["defect"]["recall"], found["auroc"]) == (None, None)
    assert trained("evaluate", trained.path(""), "--data", tmp_path / "set").code == 0


def test_classes_that_the_run_does_not_know_are_an_error_or_dropped(trained, tmp_path):
    """With their counts and the option; dropped, the figures are those of the other images, and it is said."""
    shutil.copytree(trained.data / "test", tmp_path / "set")
    shutil.copytree(trained.data / "test" / "ok", tmp_path / "set" / "strange")
    number = len([*(tmp_path / "set" / "strange").iterdir()])
    refused = trained("evaluate", trained.path(""), "--data", tmp_path / "set")
    assert refused.code == 3
    assert f"labels that train lacks: 'strange' ({number} images)" in refused.err
    assert "--unseen drop" in refused.err
    done = trained("evaluate", trained.path(""), "--data", tmp_path / "set", "--unseen", "drop", "--json")
    assert done.code == 0, done.err
    assert f"{number} images dropped, labels that train lacks: 'strange'" in done.err
    assert done.json["data"] == trained("evaluate", trained.path(""), "--json").json["test"]
    assert trained("evaluate", trained.path(""), "--unseen", "drop").code == 2


def test_memory_that_runs_out_begins_the_split_again_with_half(trained, monkeypatch):
    """The figures are the whole split's."""
    expected = trained("evaluate", trained.path(""), "--json").json
    real = TrainStep.predict

    def predict(step, batch):
        if len(batch) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(step, batch)

    monkeypatch.setattr(TrainStep, "predict", predict)
    done = trained("evaluate", trained.path(""), "--json")
    assert done.code == 0, done.err
    assert "the split begins again with 4 images at once" in done.err
    for split, result in done.json.items():
        assert result["loss"] == pytest.approx(expected[split]["loss"], rel=1e-5)
        assert result["classes"] == expected[split]["classes"]
    monkeypatch.setattr(TrainStep, "predict", lambda step, batch: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")))
    assert trained("evaluate", trained.path("")).code == 4
