"""One split in plain values: what `evaluate --json` prints and the last event of a run holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hiresvis.data.contract import Contract
from hiresvis.data.sources import Sample
from hiresvis.data.transforms import Scale
from hiresvis.device import StorageCounter
from hiresvis.results import class_result, split_result
from hiresvis.train.evaluate import Evaluation
from hiresvis.train.losses import make_loss
from hiresvis.train.metrics import compute_metrics

CONTRACT = Contract(
    classes=("a", "b"),
    image_size=(8, 8),
    fit="resize",
    background=(0, 0, 0),
    channels=3,
    scale=Scale(),
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    interpolation="bilinear",
    max_pixels=100,
)
NUM_IMAGES = 60


def made(task: str, **options: object) -> Evaluation:
    """Outputs better than chance, read by a loss of the task."""
    generator = torch.Generator().manual_seed(3)
    outputs = 4 * torch.randn(NUM_IMAGES, 2, generator=generator)
    targets = torch.arange(NUM_IMAGES) % 2
    outputs[torch.arange(NUM_IMAGES), targets] += 3
    if task != "classify":
        targets = torch.stack([targets, 1 - targets], dim=1).double()
    loss = make_loss({"classify": "cross_entropy", "multilabel": "bce", "regress": "mse"}[task], task=task, num_outputs=2, **options)  # type: ignore[arg-type]
    scores, names = loss.scores(outputs), tuple(map(str, range(NUM_IMAGES)))
    return Evaluation(task, 1.5, compute_metrics(task, scores, targets), names, targets, scores, loss.plain(outputs, targets), outputs)


def samples(size_of_group: int | None = None) -> list[Sample]:
    group = None if size_of_group is None else (lambda index: f"g{index // size_of_group}")
    return [Sample(Path(f"{i}.png"), 0, f"t.csv:{i}", None if group is None else group(i)) for i in range(NUM_IMAGES)]


def test_to_classify_the_calibration_error_stands_with_and_without_the_temperature():
    """Metrics are those of the scores; the error without is that of outputs as they are."""
    plain, cooled = made("classify"), made("classify", temperature=3.0)
    before = split_result(plain, CONTRACT, samples(), metric="accuracy")
    after = split_result(cooled, replace(CONTRACT, temperature=3.0), samples(), metric="accuracy")
    assert before["calibration"]["error"] == before["calibration"]["error_before"] == after["calibration"]["error_before"]
    assert after["calibration"]["error"] != before["calibration"]["error"]
    assert after["calibration"]["temperature"] == 3.0
    assert {name: after[name] for name in cooled.metrics} == cooled.metrics
    assert after["accuracy"] == before["accuracy"]
    assert (after["images"], after["loss"], after["intervals_by"]) == (NUM_IMAGES, 1.5, "image")
    assert set(after["intervals"]) == {"accuracy", "balanced_accuracy", "macro_f1", "kappa"}
    assert json.loads(json.dumps(after)) == after


def test_groups_widen_what_images_of_one_say_alike():
    """Where every image has a group they are what is drawn, and the result says so."""
    found = made("classify")
    found = replace(found, scores=found.scores.sort(dim=0).values, targets=found.targets.sort().values)
    by_image, by_group = (split_result(found, CONTRACT, samples(size), metric="auroc") for size in (None, 10))
    assert (by_image["intervals_by"], by_group["intervals_by"]) == ("image", "group")
    widths = [result["intervals"]["accuracy"][1] - result["intervals"]["accuracy"][0] for result in (by_image, by_group)]
    assert widths[1] > 1.5 * widths[0]
    assert "auroc" in by_group["intervals"]


def test_labels_are_counted_at_their_thresholds_beside_a_half():
    """The same scores with other thresholds: F1 and exact matches by hand, with their intervals; ranks need none."""
    found = made("multilabel")
    contract = replace(CONTRACT, task="multilabel", thresholds=(0.9, 0.2))
    result = split_result(found, contract, samples(), metric="map")
    assert {name: result[name] for name in found.metrics} == found.metrics
    taken, wanted = found.scores >= torch.tensor([0.9, 0.2]), found.targets.bool()
    f1 = [2 * int((taken & wanted)[:, i].sum()) / int(taken[:, i].sum() + wanted[:, i].sum()) for i in range(2)]
    told = result["at_thresholds"]
    assert told["macro_f1"] == pytest.approx(sum(f1) / 2)
    assert told["accuracy"] == pytest.approx((taken == wanted).all(dim=1).double().mean().item())
    assert told["macro_f1"] != result["macro_f1"]
    assert set(told["intervals"]) == {"macro_f1", "accuracy"}
    assert told["intervals"]["macro_f1"][0] < told["macro_f1"] < told["intervals"]["macro_f1"][1]
    assert "at_thresholds" not in split_result(found, replace(contract, thresholds=()), samples(), metric="map")


def test_values_have_metrics_and_intervals_alone():
    """Nothing is fitted to a regression."""
    found = made("regress", mean=(0.0, 0.0), std=(1.0, 1.0))
    result = split_result(found, replace(CONTRACT, task="regress", target_mean=(0.0, 0.0), target_std=(1.0, 1.0)), samples(), metric="mae")
    assert set(result) == {"images", "loss", "mae", "rmse", "r2", "intervals", "intervals_by"}
    assert set(result["intervals"]) == {"mae", "rmse", "r2"}


def test_classes_are_counted_one_by_one():
    """By hand: images, predictions and hits of each, every pair that occurs; a class without images is named, and divides nothing."""
    found = made("classify")
    scores = torch.cat([found.scores, torch.zeros(NUM_IMAGES, 1)], dim=1)
    result = class_result(replace(found, scores=scores), replace(CONTRACT, classes=("a", "b", "never")))
    chosen, pairs = found.scores.argmax(dim=1), {(row["label"], row["predicted"]): row["images"] for row in result["confusion"]}
    for place, name in enumerate("ab"):
        hits = int(((chosen == place) & (found.targets == place)).sum())
        assert (pairs[name, name], result["classes"][name]["images"]) == (hits, NUM_IMAGES // 2)
        assert result["classes"][name]["recall"] == hits / (NUM_IMAGES // 2)
        assert result["classes"][name]["precision"] == hits / int((chosen == place).sum())
    assert sum(pairs.values()) == NUM_IMAGES
    assert [*pairs.values()] == sorted(pairs.values(), reverse=True)
    assert result["absent"] == ["never"]
    assert result["classes"]["never"] == {"images": 0, "predicted": 0, "precision": None, "recall": None, "f1": None}
    f1 = [row["f1"] for row in result["classes"].values() if row["f1"] is not None]
    assert sum(f1) / 2 == pytest.approx(found.metrics["macro_f1"])
    assert json.loads(json.dumps(result)) == result


def test_thousands_of_classes_take_no_matrix():
    """Memory follows what there is, images and classes, and not the square of the classes; pairs of equal number stand in the classes'
    order."""
    count = 2000
    found = made("classify")
    scores = torch.zeros(NUM_IMAGES, count)
    scores[torch.arange(NUM_IMAGES), torch.arange(NUM_IMAGES) * 33] = 1
    targets = (torch.arange(NUM_IMAGES) * 33 + torch.arange(NUM_IMAGES) % 2) % count
    contract = replace(CONTRACT, classes=tuple(map(str, range(count))))
    with StorageCounter() as counter:
        result = class_result(replace(found, scores=scores, targets=targets), contract)
    assert counter.peak_bytes < 100 * (count + NUM_IMAGES)
    assert [(row["label"], row["predicted"]) for row in result["confusion"]] == [
        (str(33 * i + i % 2), str(33 * i)) for i in range(NUM_IMAGES)
    ]
    assert sum(row["recall"] == 1 for row in result["classes"].values()) == NUM_IMAGES // 2
    assert len(result["absent"]) == count - NUM_IMAGES


def test_labels_and_targets_are_counted_one_by_one():
    """Labels at the run's thresholds, or a half; targets each in its own units. Means over them are the split's metrics."""
    found = made("multilabel")
    plain = class_result(found, replace(CONTRACT, task="multilabel"))["classes"]
    assert sum(row["f1"] for row in plain.values()) / 2 == pytest.approx(found.metrics["macro_f1"])
    assert sum(row["average_precision"] for row in plain.values()) / 2 == pytest.approx(found.metrics["map"])
    fitted = replace(CONTRACT, task="multilabel", thresholds=(0.9, 0.2))
    at_thresholds = split_result(found, fitted, samples(), metric="map")["at_thresholds"]
    rows = class_result(found, fitted)["classes"].values()
    assert sum(row["f1"] for row in rows) / 2 == pytest.approx(at_thresholds["macro_f1"])
    values = made("regress", mean=(0.0, 0.0), std=(1.0, 1.0))
    targets = class_result(values, replace(CONTRACT, task="regress", target_mean=(0.0, 0.0), target_std=(1.0, 1.0)))["targets"]
    assert [*targets] == ["a", "b"]
    assert sum(row["mae"] for row in targets.values()) / 2 == pytest.approx(values.metrics["mae"])
