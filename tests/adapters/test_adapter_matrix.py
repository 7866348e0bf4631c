# SPDX-License-Identifier: Apache-2.0
"""What the page on adapters and backbones says is so."""

from pathlib import Path

import pytest

from benchmarks.adapter_matrix import ADAPTERS, BACKBONES, HEAVY, SMALL, cell

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
    """``{(backbone, adapter): cell of the page}``."""
    matrix = PAGE.read_text().partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in matrix.splitlines() if line.startswith("| ")]
    head, *body = [[one.strip() for one in row] for row in rows]
    return {(row[0], name): one for row in body for name, one in zip(head[1:], row[1:], strict=True)}


def as_said(verdict):
    """A number stands for a reason of a rejection; raw errors have it in bold."""
    return verdict if verdict in ("folded", "loop", "–") else "rejected" if verdict.isdigit() else "raw error"


def test_the_page_has_every_cell_and_no_raw_error():
    cells = said()
    assert set(cells) == {(backbone, adapter) for backbone in BACKBONES for adapter in ADAPTERS}
    assert "raw error" not in map(as_said, cells.values())


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
