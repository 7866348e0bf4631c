# SPDX-License-Identifier: Apache-2.0
"""What a saved run says of its backbone, and who can read its files."""

import json

import pytest
import timm
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.utils.data import TensorDataset

import perada
from perada.data import FederatedData
from tests.options import sections

OPTIONS = {"rounds": 1, "local_steps": 1, "logger": False, "enable_progress_bar": False, "accelerator": "cpu"}


def images():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return FederatedData([TensorDataset(x, torch.arange(8) % 3)], num_classes=3)


@pytest.mark.parametrize(
    "adapter", ["residual", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lora", "head"))]
)
def test_a_saved_backbone_is_one_of_timm_and_of_perada(tmp_path, adapter):
    run = perada.finetune(
        "test_resnet", images(), **sections(adapter=adapter, algorithm="ditto", pretrained=False, **OPTIONS)
    )
    run.export(tmp_path)
    file = tmp_path / "backbone.safetensors"
    x = torch.randn(2, 3, 32, 32)
    plain = timm.create_model("test_resnet", num_classes=3, checkpoint_path=str(file))
    plain.load_state_dict(load_file(file), strict=True)
    peft = PeftModel.from_pretrained(plain, str(tmp_path / "client_0")).eval()
    with torch.no_grad():
        torch.testing.assert_close(peft(x), run.personal(0)(x), rtol=0, atol=1e-5)
    again = perada.finetune(
        "test_resnet", images(), **sections(adapter="head", algorithm="ditto", pretrained=str(file), **OPTIONS)
    )
    frozen = again.global_model().state_dict()
    assert torch.equal(frozen["conv1.0.weight"], load_file(file)["conv1.0.weight"])


def test_weights_from_a_file_go_with_the_run(tmp_path, monkeypatch):
    weights = timm.create_model("test_resnet", num_classes=3).state_dict()
    save_file(weights, tmp_path / "mine.safetensors")
    monkeypatch.chdir(tmp_path)
    run = perada.finetune(
        "test_resnet", images(), **sections(adapter="head", algorithm="ditto", pretrained="mine.safetensors", **OPTIONS)
    )
    run.export("run")
    (tmp_path / "mine.safetensors").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(perada.Run.load("../run").personal(0)(x), run.personal(0)(x))


def test_the_base_model_is_named(tmp_path):
    run = perada.finetune(
        "test_resnet", images(), **sections(adapter="head", algorithm="ditto", pretrained=False, **OPTIONS)
    )
    names = []
    for pretrained in (False, True):
        run.info["pretrained"] = pretrained
        run.export(tmp_path / str(pretrained))
        config = json.loads((tmp_path / str(pretrained) / "client_0" / "adapter_config.json").read_text())
        names.append(config["base_model_name_or_path"])
    assert names == ["test_resnet", f"{timm.get_pretrained_cfg('test_resnet').hf_hub_id}"]
