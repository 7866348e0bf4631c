# SPDX-License-Identifier: Apache-2.0
"""What the page on adapters and backbones says is so."""

import re
from pathlib import Path

import pytest

from benchmarks.adapter_matrix import ADAPTERS, BACKBONES, HEAVY, SMALL, Cell, cell, page

PAGE = Path(__file__).parents[2] / "docs" / "adapter_matrix.md"
CELLS = [
    ("test_resnet", "residual", "folded"),
    ("test_resnet", "DoRA", "folded"),
    ("test_resnet", "LN tuning", "folded"),
    ("test_resnet", "BOFT", "loop"),
    ("test_resnet", "VeRA", "rejected"),
    ("test_convnext", "residual", "folded"),
    ("test_convnext", "lora", "folded"),
    ("test_convnext", "bias_norm", "folded"),
    ("test_convnext", "full", "loop"),
    ("test_efficientnet", "ia3", "folded"),
    ("test_vit", "VeRA", "folded"),
    ("test_vit", "FourierFT", "loop"),
    ("test_vit", "AdaLoRA", "rejected"),
]
QUICK = {
    ("test_resnet", "residual"),
    ("test_resnet", "VeRA"),
    ("test_convnext", "lora"),
    ("test_efficientnet", "ia3"),
    ("test_vit", "FourierFT"),
    ("test_vit", "AdaLoRA"),
}
"""Cells that are not slow: together they have each small backbone and each verdict."""


def sections():
    """The title of each section of the page, and its text."""
    _, *parts = PAGE.read_text().partition("\n<!-- /generated -->")[0].split("\n## ")
    return {title: text for title, _, text in (part.partition("\n") for part in parts)}


def rows(text):
    """Cells of the rows of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def said():
    """``{(backbone, adapter): (outcome, number of its reason)}``, from all sections on backbones."""
    cells = {}
    for title, text in sections().items():
        if title in ("By adapter", "Reasons"):
            continue
        sentence = re.search(r"^The same for (.*)\.$", text, re.MULTILINE)
        backbones = re.findall(r"`(\w+)`", sentence[1]) if sentence else [title]
        assert len(backbones) == 1 or title == f"{backbones[0]} and {len(backbones) - 1} more"
        for outcome, names in re.findall(r"^- \*\*([\w ]+)\*\*: (.*)$", text, re.MULTILINE):
            for name in names.split(", "):
                adapter, _, number = name.removesuffix(")").partition(" (")
                for backbone in backbones:
                    assert (backbone, adapter) not in cells
                    cells[backbone, adapter] = outcome, number
    return cells


def test_the_page_has_every_cell_and_no_raw_error():
    cells = said()
    assert set(cells) == {(backbone, adapter) for backbone in BACKBONES for adapter in ADAPTERS}
    for outcome, number in cells.values():
        assert outcome in ("folded", "loop", "rejected", "not tested")
        assert number.isdigit() == (outcome == "rejected")  # raw errors have a number in bold


def test_adapters_have_as_many_backbones_as_the_sections_say():
    cells = said()
    for adapter, *counts in rows(sections()["By adapter"]):
        outcomes = [cells[backbone, adapter][0] for backbone in BACKBONES]
        assert [int(count) for count in counts] == [
            outcomes.count(outcome) for outcome in ("folded", "loop", "rejected", "not tested")
        ]


def test_the_tables_are_written_as_the_page_has_them():
    """From the cells of the page: their outcomes and the texts of their reasons."""
    # Another table follows, with reasons of its own.
    text = PAGE.read_text().partition("\n<!-- /generated -->")[0]
    reasons = dict(re.findall(r"^(\d+)\. `(.*)`$", text, re.MULTILINE))
    outcomes = said()
    cells = {}
    for backbone in BACKBONES:
        for adapter in ADAPTERS:
            outcome, number = outcomes[backbone, adapter]
            if outcome != "not tested":
                cells[backbone, adapter] = Cell(outcome, reasons.get(number, ""))
    written = page(cells, "commit").partition("\n<!-- /generated -->")[0]
    assert written == text


def test_backbones_that_differ_in_one_adapter_have_sections_of_their_own():
    cells = {
        ("first", "lora"): Cell("folded"),
        ("first", "head"): Cell("rejected", "backbone 'first' has none"),
        ("second", "lora"): Cell("folded"),
        ("second", "head"): Cell("rejected", "backbone 'second' has none"),
        ("third", "lora"): Cell("folded"),
        ("third", "head"): Cell("raw error", "KeyError: 'x'"),
    }
    written = page(cells, "commit")
    assert "## first and 1 more\n\nThe same for `first`, `second`.\n" in written
    assert "head (1)" in written and "1. `backbone … has none`" in written
    assert "## third\n" in written and "head (**2**)" in written


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("backbone", "adapter", "verdict"),
    [pytest.param(*row, marks=[pytest.mark.slow] * (row[:2] not in QUICK)) for row in CELLS],
)
def test_small_networks(backbone, adapter, verdict):
    assert cell(backbone, ADAPTERS[adapter]).verdict == said()[backbone, adapter][0] == verdict


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_cell_of_the_page(backbone):
    cells = said()
    for adapter in ADAPTERS:
        tried = backbone in SMALL or adapter not in HEAVY
        assert (cell(backbone, ADAPTERS[adapter]).verdict if tried else "not tested") == cells[backbone, adapter][0]
