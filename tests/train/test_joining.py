"""An image in windows has one result: the mean of their logits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hiresvis.train.evaluate import evaluate
from hiresvis.train.joining import WindowJoin


def item(indices: list[int], counts: list[int]) -> SimpleNamespace:
    return SimpleNamespace(indices=tuple(indices), targets=torch.tensor(indices) * 10, num_windows=tuple(counts))


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 100])
def test_an_images_windows_become_their_mean_whatever_the_batch(batch: int) -> None:
    """Images of one to seven windows, cut anywhere into batches: each once, in order, with its own target, the same bits."""
    counts = [1, 4, 1, 1, 7, 2]
    rows = [(index, count) for index, count in enumerate(counts) for _ in range(count)]
    logits = torch.randn(len(rows), 3, generator=torch.Generator().manual_seed(0))
    join, indices, joined, targets = WindowJoin(), list[int](), [], []
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        found, values, labels = join.add(
            item([index for index, _ in part], [count for _, count in part]), logits[start : start + len(part)]
        )
        assert len(found) == len(values) == len(labels)
        indices += found
        joined.append(values)
        targets.append(labels)
    assert indices == list(range(6))
    assert torch.cat(targets).tolist() == [0, 10, 20, 30, 40, 50]
    start = 0
    for index, count in enumerate(counts):
        window = logits[start : start + count]
        expected = window[0] if count == 1 else (window.double().cumsum(0)[-1] / count).float()
        assert torch.equal(torch.cat(joined)[index], expected)
        start += count


@pytest.mark.parametrize("batch", [1, 2, 100])
@pytest.mark.parametrize("missing", [{0}, {1}, {2}, {0, 1}, {0, 1, 2}])
def test_an_image_without_all_of_its_windows_is_none_and_leaves_the_next_as_it_is(missing: set[int], batch: int) -> None:
    """Whichever could not be read: the image does not come, and nothing of it is in the mean of another."""
    rows = [(5, 3) for window in range(3) if window not in missing] + [(6, 3)] * 3
    logits = torch.randn(len(rows), 2, generator=torch.Generator().manual_seed(0))
    join, found, values = WindowJoin(), list[int](), []
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        indices, joined, _ = join.add(item([index for index, _ in part], [count for _, count in part]), logits[start : start + batch])
        found += indices
        values.append(joined)
    assert found == [6]
    assert torch.equal(torch.cat(values)[0], (logits[-3:].double().cumsum(0)[-1] / 3).float())


def test_samples_of_one_image_pass_unchanged() -> None:
    """Whole images keep their very tensors."""
    given, logits = item([3, 4], []), torch.randn(2, 3)
    indices, joined, targets = WindowJoin().add(given, logits)
    assert indices == (3, 4)
    assert joined is logits
    assert targets is given.targets


def test_loss_and_metrics_come_from_the_joined_logits(small) -> None:
    """A split in windows has a row an image, and the loss of the mean, not the mean of the losses."""
    step = small.make_step()
    images = small.Images(6, batch=6, shuffle=False)
    logits = (step.model.eval(), step.predict(images.images))[1]
    windows = SimpleNamespace(
        images=images.images, targets=torch.tensor([1, 1, 1, 0, 0, 0]), indices=(0, 0, 0, 1, 1, 1), num_windows=(3,) * 6
    )

    class Loader:
        def __iter__(self):
            return iter([windows])

        def __len__(self) -> int:
            return 1

    result = evaluate(step, Loader())
    joined = torch.stack([logits[:3].double().mean(0), logits[3:].double().mean(0)]).float()
    assert result.targets.tolist() == [1, 0]
    assert result.loss == pytest.approx(float(torch.nn.functional.cross_entropy(joined, torch.tensor([1, 0]))), rel=1e-5)
    assert result.scores.shape[0] == 2
