# SPDX-License-Identifier: Apache-2.0
"""The card of an exported adapter: what the Hub reads of it, what it says, and its three lines of code."""

import re
from functools import cache

import pytest
import torch
from huggingface_hub import ModelCard
from torch.utils.data import TensorDataset

import perada
from perada.data import FederatedData
from tests.options import sections

OPTIONS = {"rounds": 1, "local_steps": 1, "logger": False, "enable_progress_bar": False, "accelerator": "cpu"}


def federation(classes, client_names, train=(8, 6), test=(4, 5)):
    generator = torch.Generator().manual_seed(0)

    def part(count):
        x = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
        return TensorDataset(x, torch.arange(count) % 3)

    sets = [part(count) for count in train], [part(count) for count in test]
    return FederatedData(*sets, classes=classes, client_names=client_names)


def finetuned(adapter="residual", pretrained=False, backbone="test_resnet", **options):
    data = federation(["benign", "a`<script>", "other"], ["north", "south"])
    arguments = OPTIONS | {"adapter": adapter, "algorithm": "ditto", "pretrained": pretrained} | options
    return perada.finetune(backbone, data, **sections(**arguments))


@cache
def plain_run():
    """The run of ``finetuned()`` for all tests that change nothing of it."""
    return finetuned()


def test_the_card_says_what_the_run_was(tmp_path):
    run = plain_run()
    run.export(tmp_path, license="mit")
    card = ModelCard.load(tmp_path / "client_1" / "README.md")
    fields = card.data.to_dict()
    assert {name: fields[name] for name in ("library_name", "license", "pipeline_tag")} == {
        "library_name": "peft",
        "license": "mit",
        "pipeline_tag": "image-classification",
    }
    assert "base_model" not in fields  # its weights are random
    assert card.text.strip().startswith("<!-- written by perada -->")  # and nothing of another header
    score = 100 * run.metrics["clients"]["personal/local_test"][1]
    for text in (
        "# The adapter of client `south`",
        "3 classes: `benign`, `a''script'`, `other`",
        "the client's own 6 training images and, through the global adapter, on 14 training images of 2 clients",
        f"- accuracy on the client's own test images: {score:.2f} %",
    ):
        assert text in card.text
    assert "More Information Needed" not in card.text
    whole = (tmp_path / "global" / "README.md").read_text()
    assert f"{100 * run.metrics['rounds'][-1]['global/global_test']:.2f} %" in whole


LETTERS = ("\n", "\r", "\x1b", "\u202e", "\u2028", "\x00", "`", "<", ">")


def test_no_name_can_write_markdown_html_or_control_characters_into_the_card(tmp_path):
    """Names of clients and classes come from folders and tables, which anyone may have written."""
    classes = [f"{start}{letter}# b" for start, letter in zip("abcdefghi", LETTERS, strict=True)]
    clients = [f"{start}{letter}# outh" for start, letter in zip("nopqrstuv", LETTERS, strict=True)]
    data = federation(classes, clients, train=(3,) * len(clients), test=(3,) * len(clients))
    run = perada.finetune(
        "test_resnet", data, **sections(adapter="residual", algorithm="ditto", pretrained=False, **OPTIONS)
    )
    run.export(tmp_path)
    shown = ["'" if letter in "`<>" else "?" for letter in LETTERS]
    shown_classes = ", ".join(f"`{start}{mark}# b`" for start, mark in zip("abcdefghi", shown, strict=True))
    for client, (start, mark) in enumerate(zip("nopqrstuv", shown, strict=True)):
        text = (tmp_path / f"client_{client}" / "README.md").read_bytes().decode()
        assert f"# The adapter of client `{start}{mark}# outh`" in text.splitlines()
        assert shown_classes in text
        written = text[text.index("# The adapter") :].replace("\n", "")
        assert all(character.isprintable() for character in written)


def test_the_base_model_is_in_the_header_where_its_weights_are_the_hubs(tmp_path):
    run = finetuned()
    run.info["pretrained"] = True
    run.export(tmp_path)
    assert ModelCard.load(tmp_path / "global" / "README.md").data.to_dict()["base_model"].startswith("timm/test_resnet")


@pytest.mark.parametrize(
    ("adapter", "pretrained"),
    [
        ("residual", False),
        pytest.param("lora", False, marks=pytest.mark.slow),
        ("head", "perada:fashion_test_resnet"),
    ],
)
def test_the_three_lines_of_the_card_load_the_model(tmp_path, monkeypatch, adapter, pretrained):
    run = plain_run() if (adapter, pretrained) == ("residual", False) else finetuned(adapter, pretrained)
    run.export(tmp_path)
    lines = re.search(r"```python\n(.*?)\n```", (tmp_path / "client_1" / "README.md").read_text(), re.DOTALL)[1]
    assert len(lines.splitlines()) == 3
    monkeypatch.chdir(tmp_path / "client_1")
    loaded = {}
    x = torch.randn(2, 3, 32, 32)
    exec(lines, loaded)  # what the card tells readers to run
    with torch.no_grad():
        torch.testing.assert_close(loaded["model"](x), run.personal("south")(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("pretrained", [False, "perada:shapes_test_vit"])
def test_the_card_builds_a_transformer_for_the_size_of_its_images(tmp_path, monkeypatch, pretrained):
    """timm's own size of it is 160: positions of another size would be interpolated, and logits others."""
    run = finetuned("lora", pretrained, backbone="test_vit", image_size=32)
    run.export(tmp_path)
    lines = re.search(r"```python\n(.*?)\n```", (tmp_path / "global" / "README.md").read_text(), re.DOTALL)[1]
    monkeypatch.chdir(tmp_path / "global")
    loaded = {}
    x = torch.randn(2, 3, 32, 32)
    exec(lines, loaded)
    with torch.no_grad():
        torch.testing.assert_close(loaded["model"](x), run.global_model()(x), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_what_somebody_wrote_stays(tmp_path):
    run = finetuned()
    run.export(tmp_path)
    path = tmp_path / "client_0" / "README.md"
    path.write_text(path.read_text() + "\n## Mine\n\nNote.\n")
    run.export(tmp_path, license="mit")
    text = path.read_text()
    assert text.count("Note.") == 1
    assert text.count("# The adapter of client `north`") == 1
    assert ModelCard.load(path).data["license"] == "mit"
    run.export(tmp_path)
    assert ModelCard.load(path).data["license"] == "mit"


@pytest.mark.slow
def test_a_trained_backbone_is_in_the_adapters_own_folder(tmp_path, monkeypatch):
    run = finetuned(train_backbone=True)
    run.export(tmp_path)
    monkeypatch.chdir(tmp_path / "client_1")
    loaded = {}
    x = torch.randn(2, 3, 32, 32)
    exec(re.search(r"```python\n(.*?)\n```", (tmp_path / "client_1" / "README.md").read_text(), re.DOTALL)[1], loaded)
    with torch.no_grad():
        torch.testing.assert_close(loaded["model"](x), run.personal("south")(x), rtol=0, atol=1e-5)
