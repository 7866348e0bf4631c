# SPDX-License-Identifier: Apache-2.0
import functools
import hashlib
import re
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

from perada.cli import main
from perada.studies.pretrain import PretrainSettings, pretrain
from perada.studies.shapes import Shapes

WEIGHTS = Path(__file__).parents[2] / "perada" / "models" / "weights"


def rows_of(card: str) -> dict[str, str]:
    return dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", card, flags=re.MULTILINE))


@pytest.fixture
def run(fashion_root, tmp_path):
    def once(name, **changes):
        options = {"root": str(fashion_root), "epochs": 1, "batch_size": 40, "seed": 3} | changes
        return pretrain(PretrainSettings(output=tmp_path / name / "weights.safetensors", **options))

    return once


def test_timm_loads_the_file_whole(run):
    path = run("a")
    overlay = {"file": str(path), "num_classes": 10}
    model = timm.create_model("test_resnet", pretrained=True, num_classes=10, pretrained_cfg_overlay=overlay)
    saved = load_file(path)
    assert saved.keys() == model.state_dict().keys()
    assert saved["fc.weight"].shape == (10, 96)
    assert all(torch.equal(saved[key], value) for key, value in model.state_dict().items())
    assert saved["bn1.num_batches_tracked"] == 3  # 120 images, 40 a step


@pytest.mark.slow
def test_equal_seeds_write_equal_bytes(run):
    first, again, other = (run(name, seed=seed).read_bytes() for name, seed in (("a", 3), ("b", 3), ("c", 4)))
    assert first == again
    assert first != other


def test_no_draw_is_taken_from_the_global_stream(run):
    before = torch.random.get_rng_state()
    run("a")
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.slow
def test_training_learns(run):
    card = run("a", epochs=30, batch_size=20).with_suffix(".md").read_text()
    assert float(rows_of(card)["accuracy on the 40 test images"]) > 0.5  # chance is 0.1


def test_the_command_line_writes_the_file_and_its_card(fashion_root, tmp_path):
    output = tmp_path / "small.safetensors"
    main(["pretrain", f"--root={fashion_root}", "--epochs=1", "--batch_size=40", "--seed=5", f"--output={output}"])
    rows = rows_of(output.with_suffix(".md").read_text())
    assert rows["SHA-256"] == f"`{hashlib.sha256(output.read_bytes()).hexdigest()}`"
    assert rows["seed"] == "5"
    assert rows["size"] == f"{output.stat().st_size:,} bytes"
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|perada \S+", rows["commit"])
    assert {"--seed=5", "--epochs=1", "--batch_size=40", f"--output={output}"} <= set(
        rows["command"].strip("`").split()
    )
    assert "threads" in rows["machine"]


@pytest.mark.slow
def test_a_vision_transformer_is_pretrained_on_shapes(run, monkeypatch):
    monkeypatch.setattr("perada.studies.pretrain.Shapes", functools.partial(Shapes, 100, num_classes=4))
    options = {"dataset": "Shapes", "backbone": "test_vit", "batch_size": 25}
    adamw, sgd = (run(name, **options, optimizer=name, lr=0.001) for name in ("adamw", "sgd"))
    weights = load_file(adamw)
    assert weights["head.weight"].shape == (4, 64)
    assert weights["pos_embed"].shape == (1, 2 * 2 + 1, 64)  # 32×32 pixels, patches of 16, a class token
    assert not torch.equal(weights["head.weight"], load_file(sgd)["head.weight"])
    card = adamw.with_suffix(".md").read_text()
    assert "the 4 classes of perada's random shapes" in card
    assert "AdamW and weight decay 0.05" in card
    assert "--optimizer=adamw" in rows_of(card)["command"]
    assert 0 <= float(rows_of(card)["accuracy on the 10 test images"]) <= 1


def test_a_wrong_name_is_rejected_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"weights\.pth .*\.safetensors"):
        pretrain(PretrainSettings(output=tmp_path / "weights.pth"))


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "accuracy"), [("fashion_test_resnet", 0.88), ("shapes_test_vit", 0.95)])
def test_the_shipped_weights_are_those_of_their_card(name, accuracy):
    file = WEIGHTS / f"{name}.safetensors"
    rows = rows_of(file.with_suffix(".md").read_text())
    assert rows["SHA-256"] == f"`{hashlib.sha256(file.read_bytes()).hexdigest()}`"
    (measured,) = (value for row, value in rows.items() if row.startswith("accuracy on the"))
    assert float(measured) > accuracy
    assert re.fullmatch(r"[0-9a-f]{40}", rows["commit"])
    assert file.stat().st_size < 4e6
