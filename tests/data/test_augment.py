"""Augmentation: a function of image and seed, by either library; mistakes in lists are found before training."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hiresvis.data.augment import AUGMENTS, Augment, make_augment, usable_library
from hiresvis.errors import RecipeError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def no_albumentations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Importing albumentations fails, as where it is not installed."""
    monkeypatch.setitem(sys.modules, "albumentations", None)
    monkeypatch.delitem(sys.modules, "hiresvis.data.albumentations_steps", raising=False)
    usable_library.cache_clear()
    yield
    usable_library.cache_clear()


@pytest.fixture(params=["albumentations", "torchvision"])
def library(request: pytest.FixtureRequest) -> str:
    """Both, the second because the first cannot be imported."""
    if request.param == "torchvision":
        request.getfixturevalue("no_albumentations")
    return str(request.param)


def made(name: str | list[dict[str, Any]], size: tuple[int, int] = (64, 64), channels: int = 3) -> Augment:
    augment = make_augment(name, image_size=size, in_chans=channels)
    assert augment is not None
    return augment


@pytest.mark.parametrize("name", ["light", "standard", "heavy"])
@pytest.mark.parametrize("size", [(64, 64), (48, 80)])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_presets_keep_shape_type_and_range(
    library: str, picture: Callable[..., np.ndarray], name: str, size: tuple[int, int], channels: int
) -> None:
    """Squares and rectangles, bytes and floats, any channels."""
    augment = made(name, size, channels)
    assert augment.library == library
    for array in (picture(*size, channels), picture(*size, channels).astype(np.float32) / 255):
        for seed in range(8):
            out = augment(array, seed)
            assert out.shape == array.shape
            assert out.dtype == array.dtype
            assert out.min() >= 0
            assert out.max() <= (255 if out.dtype == np.uint8 else 1)


def test_none_is_nothing(library: str) -> None:
    """`augment: none` and an empty list leave the pixels to preprocessing alone."""
    assert make_augment("none", image_size=(64, 64)) is None
    assert make_augment([], image_size=(64, 64)) is None


@pytest.mark.parametrize(("size", "arrangements"), [((32, 32), 8), ((32, 48), 4)])
def test_light_moves_pixels_and_changes_none(
    library: str, picture: Callable[..., np.ndarray], size: tuple[int, int], arrangements: int
) -> None:
    """Flips and quarter turns, each drawn on its own: the same values, all arrangements that keep the shape."""
    augment, array = made("light", size), picture(*size)
    outs = [augment(array, seed) for seed in range(60)]
    assert len({out.tobytes() for out in outs}) == arrangements
    assert all(np.array_equal(np.sort(out, axis=None), np.sort(array, axis=None)) for out in outs)


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_seed_alone_decides(library: str, picture: Callable[..., np.ndarray], channels: int) -> None:
    """Same seed, same bits: after other calls, in a copy that went through pickle, with other random states; other seeds differ."""
    augment, array = made("heavy", channels=channels), picture(64, 64, channels)
    first = [augment(array, seed) for seed in range(12)]
    copy = pickle.loads(pickle.dumps(augment))
    np.random.seed(1)
    torch.manual_seed(1)
    again = [copy(array, seed) for seed in reversed(range(12))][::-1]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({out.tobytes() for out in first}) > 8


def run(augment: Augment, array: np.ndarray, threads: int) -> list[bytes]:
    torch.set_num_threads(threads)
    return [augment(array, seed).tobytes() for seed in range(6)]


def test_other_processes_and_threads_give_the_same_bits(no_albumentations: None) -> None:
    """A spawned process that could import albumentations, and one thread or two: sums over the image are taken in one order."""
    steps: list[dict[str, Any]] = [
        {"name": "ColorJitter", "contrast": 0.5},
        {"name": "RandomResizedCrop", "size": [700, 900]},
        {"name": "GaussianNoise"},
    ]
    before, array = torch.get_num_threads(), np.random.default_rng(0).random((700, 900, 3), dtype=np.float32)
    try:
        for augment in (made("heavy", (700, 900)), made(steps, (700, 900))):
            here = run(augment, array, 2)
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                assert pool.submit(run, augment, array, 1).result() == here
    finally:
        torch.set_num_threads(before)


def test_random_state_and_threads_are_left_as_they_were(library: str, picture: Callable[..., np.ndarray]) -> None:
    """Training draws from the same generators (dropout), whatever augments in its process."""
    torch.manual_seed(5)
    np.random.seed(5)
    before, numpy_before, threads = torch.get_rng_state(), np.random.get_state()[1].copy(), torch.get_num_threads()  # type: ignore[index]
    made("heavy")(picture(64, 64), 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)  # type: ignore[index]
    assert torch.get_num_threads() == threads


def test_input_is_left_as_it_was(library: str, picture: Callable[..., np.ndarray]) -> None:
    """Augmentation writes to its own memory, and reads what may not be written."""
    array = picture(64, 64)
    array.flags.writeable = False
    before, augment = array.copy(), made("heavy")
    for seed in range(10):
        augment(array, seed)
    assert np.array_equal(array, before)


def test_presets_of_both_libraries_have_the_same_ranges(picture: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many draws on a grey ramp, `standard` shifts brightness and moves edges as far with the one as with the other."""
    ramp = np.repeat(np.linspace(60, 180, 96).astype(np.uint8)[None, :, None], 96, axis=0)
    spread = {}
    for name in ("albumentations", "torchvision"):
        if name == "torchvision":
            monkeypatch.setitem(sys.modules, "albumentations", None)
            monkeypatch.delitem(sys.modules, "hiresvis.data.albumentations_steps", raising=False)
        usable_library.cache_clear()
        augment = made("standard", (96, 96), 1)
        assert augment.library == name
        outs = np.stack([augment(ramp, seed) for seed in range(300)]).astype(float)
        means = outs.mean(axis=(1, 2, 3)) - ramp.mean()
        spread[name] = (means.min(), means.max(), np.mean(np.abs(means) < 1))
    usable_library.cache_clear()
    low, high, still = zip(*spread.values(), strict=True)
    # x * [0.85, 1.15] + [-0.15, 0.15] * 255 about a mean of 120: at most 56 either way, half of the images untouched
    assert all(-57 < value < -40 for value in low), low
    assert all(40 < value < 57 for value in high), high
    assert all(0.4 < value < 0.62 for value in still), still


def test_affine_map_of_torchvision_keeps_the_middle_and_reflects_outside(no_albumentations: None) -> None:
    """No shift and a turn: the centre stays, values stay within the image's, and no flat colour comes in at the corners."""
    from hiresvis.data.torchvision_steps import compose

    array = np.full((65, 65, 2), 90, np.uint8)
    array[32, 32] = 250
    turned = compose([{"name": "ReflectedAffine", "zoom": [1, 1], "shift": 0, "degrees": 20, "shear_degrees": 0}])(array, None, 1)[0]
    assert turned[32, 32].tolist() == [250, 250]
    assert turned.min() == 90
    wide = np.zeros((40, 80, 1), np.float32)
    wide[:, 40:] = 1
    still = compose([{"name": "ReflectedAffine", "zoom": [1, 1], "shift": 0, "degrees": 0, "shear_degrees": 0}])(wide, None, 1)[0]
    assert np.abs(still - wide).max() < 1e-4
    half = compose([{"name": "ReflectedAffine", "zoom": [0.5, 0.5], "shift": 0, "degrees": 0, "shear_degrees": 0}])(wide, None, 1)[0]
    assert np.allclose(half[:, 21:39].mean(), 0, atol=1e-4)  # the reflection of the left half lies left of it: dark next to dark
    assert np.allclose(half[:, 41:59].mean(), 1, atol=1e-4)


LISTS: dict[str, Any] = {
    "albumentations": {
        "list": [{"name": "HorizontalFlip", "p": 1.0}, {"name": "RandomResizedCrop", "size": [32, 48], "p": 0}],
        "mistakes": [{"name": "HorizontalFlp"}, {"name": "VerticalFlip", "probability": 1}, {"name": "GaussianBlur", "blur_limit": "x"}],
        "near": "albumentations has no transform HorizontalFlp; did you mean HorizontalFlip?",
        "unfit": [{"name": "RandomCrop", "height": 16, "width": 16}, {"name": "Normalize"}],
    },
    "torchvision": {
        "list": [{"name": "RandomHorizontalFlip", "p": 1.0}, {"name": "RandomResizedCrop", "size": [32, 48], "p": 0}],
        "mistakes": [
            {"name": "HorizontalFlip"},
            {"name": "RandomVerticalFlip", "probability": 1},
            {"name": "GaussianBlur", "kernel_size": 4},
        ],
        "near": "did you mean RandomHorizontalFlip?. It stands in here, since albumentations cannot be imported (ModuleNotFoundError",
        "unfit": [{"name": "RandomCrop", "size": [16, 16]}, {"name": "Normalize", "mean": [0.5], "std": [0.5]}],
    },
}


def test_list_of_transforms_is_applied(library: str, picture: Callable[..., np.ndarray]) -> None:
    """Names and arguments as the library has them; `p` is taken by every transform."""
    augment = made(LISTS[library]["list"], (32, 48))
    assert np.array_equal(augment(picture(32, 48), 0), picture(32, 48)[:, ::-1])


def test_mistakes_in_a_list_are_reported_at_once(library: str) -> None:
    """An unknown name with a suggestion, an unknown argument, a wrong value, an entry without a name."""
    with pytest.raises(RecipeError) as caught:
        make_augment([*LISTS[library]["mistakes"], {"p": 1}], image_size=(32, 32))
    assert [problem.key for problem in caught.value.problems] == [f"data.augment[{index}]" for index in range(4)]
    assert LISTS[library]["near"] in caught.value.problems[0].message
    assert "'probability'" in caught.value.problems[1].message
    assert caught.value.problems[2].message.startswith("GaussianBlur: ")


@pytest.mark.parametrize("position", [0, 1])
def test_step_that_changes_size_or_type_is_refused_before_training(library: str, position: int) -> None:
    """The model's size comes from model.image_size and its numbers from the contract."""
    with pytest.raises(RecipeError, match=r"keeps the size and type|fails on a"):
        make_augment([LISTS[library]["unfit"][position]], image_size=(32, 32))


def test_crops_that_shrink_average_areas(library: str) -> None:
    """Lines in every fourth row are grey at a quarter of the size in both libraries; plain interpolation would miss them all."""
    step = {"name": "RandomResizedCrop", "size": [32, 32], "scale": [1, 1], "ratio": [1, 1]}
    augment = Augment([step], library)  # type: ignore[arg-type]
    array = np.zeros((128, 128, 1), np.uint8)
    array[::4] = 255
    out = augment(array, 0)[4:-4, 4:-4]
    assert out.min() > 60
    assert out.max() < 68


def test_every_preset_of_the_recipe_can_be_made(library: str) -> None:
    """And says which library with which release made it."""
    for name in AUGMENTS[1:]:
        assert made(name).made_by.split()[0] == library
        assert made(name).made_by.split()[1][0].isdigit()


def test_a_process_without_albumentations_augments_and_says_why() -> None:
    """The import is blocked from the start of a fresh process."""
    code = (
        "import sys; sys.modules['albumentations'] = None\n"
        "import numpy as np\n"
        "from hiresvis.data.augment import make_augment, usable_library\n"
        "augment = make_augment('standard', image_size=(32, 32))\n"
        "print(augment.library, augment(np.zeros((32, 32, 3), np.uint8), 0).shape, usable_library()[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("torchvision (32, 32, 3) albumentations cannot be imported (ModuleNotFoundError: ")
