"""Cards by name, and what their data sheets have to agree with."""

from __future__ import annotations

import pytest

from hiresvis.errors import RecipeError
from hiresvis.memory.cards import CARDS, PCIE_3, PCIE_4, PCIE_5, find_card
from hiresvis.units import GIB


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("rtx-4070_ti", "RTX 4070 Ti"),
        ("a100 80gb", "A100-80GB"),
        ("mi3", "MI300X"),
        ("m2", "M2 Ultra 128GB"),
        ("A10", "A10"),  # although two others begin so
        ("l4", "L4"),
        ("H100", "H100"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_card_is_found_by_what_people_and_drivers_call_it(text, name):
    """Case, spaces, dashes, makers and forms do not matter; the beginning of one name is enough, and a whole name is that card."""
    assert find_card(text).name == name


@pytest.mark.parametrize(("text", "names"), [("a100", "A100-40GB or A100-80GB"), ("rtx 50", "RTX 5080 or RTX 5090")])
def test_a_beginning_of_several_names_is_told_with_all_of_them(text, names):
    """An ambiguous name is refused as a fault of the command line."""
    with pytest.raises(RecipeError, match=f"could be .*{names}; give one of them") as caught:
        find_card(text)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("RTX 4900", "RTX 4090"),
        ("B300", "B200"),
        ("L40", "L40S"),
        ("RTX 4070", "RTX 4070 Ti"),
        ("RTX 3080 12GB", "RTX 3080"),
        ("RTX 4090 Laptop GPU", "RTX 4090"),
    ],
)
def test_an_unknown_card_is_told_with_those_near_it(text, near):
    """Siblings, other amounts of memory and other forms of a card are other cards; every known one is listed."""
    with pytest.raises(RecipeError, match="near it are") as caught:
        find_card(text)
    message = str(caught.value)
    assert near in message.partition("Known:")[0]
    assert all(card.name in message.partition("Known:")[2] for card in CARDS)


def test_nothing_is_no_card():
    """The empty name begins every name, and means none."""
    with pytest.raises(RecipeError, match="not known"):
        find_card(" ")


def test_each_card_is_found_by_its_own_name():
    """No name hides another."""
    assert [find_card(card.name) for card in CARDS] == list(CARDS)
    assert len({card.name for card in CARDS}) == len(CARDS)


def test_figures_are_plausible():
    """Units are right: bytes, FLOPs and bytes per second, in the ranges that cards have; half precision is never slower."""
    for card in CARDS:
        assert 8 * GIB < card.memory_bytes < 200 * GIB
        assert 5e12 < card.fp32_flops <= card.fp16_flops < 3e15
        assert card.bf16_flops in (0, card.fp16_flops)
        assert 2e11 < card.memory_bytes_per_s < 1e13
        assert card.link_bytes_per_s == 0 or PCIE_3 <= card.link_bytes_per_s < card.memory_bytes_per_s
        assert card.note


def test_a_generation_of_cards_shares_its_link():
    """PCIe 3 before Ampere, 4 with it, 5 since Hopper and the RTX 50 series."""
    assert {find_card(name).link_bytes_per_s for name in ("T4", "V100-32GB")} == {PCIE_3}
    assert {find_card(name).link_bytes_per_s for name in ("A100-80GB", "RTX 3090", "RTX 4090", "L40S")} == {PCIE_4}
    assert {find_card(name).link_bytes_per_s for name in ("H100", "H200", "B200", "RTX 5090", "MI300X")} == {PCIE_5}


def test_cards_without_bf16_say_so():
    """Their own precision is fp16, and asking for bf16 names what to give instead."""
    for name in ("T4", "V100-16GB"):
        assert find_card(name).auto_precision == "fp16"
        with pytest.raises(RecipeError, match=f"{name} has no bf16; give fp16, fp32 or auto"):
            find_card(name).flops_per_s("bf16")
    assert find_card("A10").auto_precision == "bf16"
