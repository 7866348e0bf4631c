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


def said():
    """``{(backbone, adapter): cell of the page}``, from all of its tables."""
    cells = {}
    head = []
    for line in PAGE.read_text().partition("\n## Reasons")[0].splitlines():
        if not line.startswith("| "):
            continue
        first, *others = [cell.strip() for cell in line.strip("|").split("|")]
        if first == "backbone":
            head = others
            continue
        for name, text in zip(head, others, strict=True):
            assert (first, name) not in cells
            cells[first, name] = text
    return cells


def as_said(verdict):
    """A number stands for a reason of a rejection; raw errors have it in bold."""
    return verdict if verdict in ("folded", "loop", "–") else "rejected" if verdict.isdigit() else "raw error"


def test_the_page_has_every_cell_and_no_raw_error():
    cells = said()
    assert set(cells) == {(backbone, adapter) for backbone in BACKBONES for adapter in ADAPTERS}
    assert "raw error" not in map(as_said, cells.values())


def test_the_tables_are_written_as_the_page_has_them():
    """From the cells of the page: their verdicts and the texts of their reasons."""
    text = PAGE.read_text()
    reasons = dict(re.findall(r"^(\d+)\. `(.*)`$", text, re.MULTILINE))
    cells = {}
    for (backbone, adapter), cell_text in said().items():
        if cell_text != "–":
            is_rejected = cell_text in reasons
            verdict = "rejected" if is_rejected else cell_text
            cells[backbone, adapter] = Cell(verdict, reasons[cell_text] if is_rejected else "")
    written = page(dict(cells), "commit").partition("\n<!-- /generated -->")[0]
    assert written == text.partition("\n<!-- /generated -->")[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("backbone", "adapter", "verdict"),
    [pytest.param(*row, marks=[pytest.mark.slow] * (row[:2] not in QUICK)) for row in CELLS],
)
def test_small_networks(backbone, adapter, verdict):
    assert cell(backbone, ADAPTERS[adapter]).verdict == as_said(said()[backbone, adapter]) == verdict


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_cell_of_the_page(backbone):
    cells = said()
    for adapter in ADAPTERS:
        tried = backbone in SMALL or adapter not in HEAVY
        assert (cell(backbone, ADAPTERS[adapter]).verdict if tried else "–") == as_said(cells[backbone, adapter])
