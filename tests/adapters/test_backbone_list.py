# SPDX-License-Identifier: Apache-2.0
"""The networks that people fine-tune run as the page on adapters says."""

import re
from pathlib import Path

import pytest
import timm
import torch
from peft import PeftModel

from benchmarks.backbone_list import (
    CLASSES,
    COLUMNS,
    NETWORKS,
    START,
    Finding,
    cells,
    find,
    forms_of,
    label,
    section,
    with_section,
)
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.models.usage import check_usage

PAGE = Path(__file__).parents[2] / "docs" / "adapter_matrix.md"
ONE_EACH = {
    "DINOv2": "lora",
    "DINOv2 with registers": "bottleneck",
    "DINOv3": "lora",
    "SigLIP 2": "bottleneck",
    "CLIP": "bias_norm",
    "BiomedCLIP": "head",
    "MAE": "bias_norm",
    "ViT": "lora",
    "Swin V2": "bottleneck",
    "ConvNeXt V2": "residual",
    "EVA-02": "bottleneck",
    "BEiT v2": "lora",
    "MobileNetV4": "head",
    "EfficientViT": "head",
}
"""An adapter for each network of which not all cells are quick."""


def said():
    """The findings of the page."""
    text = START + PAGE.read_text(encoding="utf-8").partition(START)[2]
    reasons = dict(re.findall(r"^(\d+)\. `(.*)`$", text, re.MULTILINE))
    names = {(name, label(name, form)): (name, form) for name in NETWORKS for form in forms_of(name)}
    findings = {}
    for line in text.splitlines():
        words = [word.strip() for word in line.strip("|").split("|")]
        if tuple(words[:2]) not in names:
            continue
        for column, word in zip(COLUMNS, words[2:], strict=True):
            if word != "–":
                verdict, _, number = word.removesuffix(")").partition(" (")
                findings[*names[tuple(words[:2])], column] = Finding(verdict, reasons.get(number, ""))
    return findings


def test_the_page_has_every_cell_as_it_is_written():
    findings = said()
    assert list(findings) == list(cells())
    for finding in findings.values():
        assert finding.verdict in ("folded", "loop", "rejected")
        assert bool(finding.why) == (finding.verdict == "rejected")
    assert with_section(PAGE.read_text(encoding="utf-8"), section(findings)) == PAGE.read_text(encoding="utf-8")


def test_every_network_has_adapters():
    findings = said()
    for name, form, column in cells():
        if column in ("lora", "head", "bias_norm") and findings[name, form, column].verdict == "rejected":
            # Only where transformers has no classifier; the reason names another form.
            assert form == "hf"
            assert "has no image classifier in transformers; choose timm's" in findings[name, form, column].why


@pytest.mark.parametrize("name", NETWORKS)
def test_one_adapter_of_each_is_used_and_read_by_peft(name, tmp_path):
    network = NETWORKS[name]
    options = {"img_size": network.side} if network.sized else {}
    torch.manual_seed(0)
    plain = timm.create_model(network.timm, num_classes=CLASSES, **network.small, **options).eval()
    adapted = insert_adapter(build_backbone(plain, CLASSES), ONE_EACH[name])
    images = torch.rand(2, 3, network.side, network.side)
    assert check_usage(adapted, images).problem is None
    with torch.no_grad():
        for parameter in adapted.model.parameters():
            if parameter.requires_grad:
                parameter += 0.01
    adapted.peft_model.save_pretrained(tmp_path)
    expected = adapted.model.eval()(images)
    torch.testing.assert_close(PeftModel.from_pretrained(plain, tmp_path).eval()(images), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "form", "column"), list(cells()))
def test_every_cell_of_the_page(name, form, column):
    if form == "open_clip":
        pytest.importorskip("open_clip", reason="needs the extra open-clip")
    assert find(name, form, column).verdict == said()[name, form, column].verdict
