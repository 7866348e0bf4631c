# SPDX-License-Identifier: Apache-2.0
"""Adapters on a backbone that is trained too."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.utils.data import TensorDataset

import perada
from perada.models.adapted import find_tensor_names, insert_adapter
from perada.models.backbones import build_backbone
from tests.options import sections

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
BACKBONES = [("test_resnet", "residual"), ("test_resnet", "lora"), ("test_vit", "lora"), ("test_vit", "bottleneck")]


@pytest.mark.parametrize(("backbone", "adapter"), BACKBONES)
def test_everything_is_trained_but_peft_s_copies(backbone, adapter):
    plain = build_backbone(backbone, 4, pretrained=False).model
    num_parameters = sum(p.numel() for p in plain.parameters())
    adapted = insert_adapter(build_backbone(backbone, 4, pretrained=False), adapter, train_backbone=True)
    tensor_names = find_tensor_names(adapted.model, adapted.backbone.head)
    sizes = {name: p.numel() for name, p in adapted.model.named_parameters() if p.requires_grad}
    added = sum(size for name, size in sizes.items() if name in tensor_names.adapter)
    frozen = insert_adapter(build_backbone(backbone, 4, pretrained=False), adapter)
    names = {name for name, p in frozen.model.named_parameters() if p.requires_grad}
    assert added == sum(size for name, size in sizes.items() if name in names and "modules_to_save" not in name)
    assert added > 0
    assert sum(sizes.values()) == num_parameters + added


def test_an_adapter_that_adds_nothing_is_rejected():
    for adapter in ("full", "head", "bias_norm"):
        with pytest.raises(ValueError, match=rf"'{adapter}'.*train_backbone=True"):
            insert_adapter(build_backbone("test_resnet", 4, pretrained=False), adapter, train_backbone=True)


@pytest.mark.parametrize(
    "algorithm",
    ["fedsim_adapter", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedalt_adapter", "perada_no_kd"))],
)
def test_what_is_saved_predicts_what_was_trained(algorithm, tmp_path):
    random = torch.Generator().manual_seed(0)
    train = [TensorDataset(torch.randn(6, 3, 16, 16, generator=random), torch.arange(6) % 4) for _ in range(3)]
    run = perada.finetune(
        "test_resnet",
        perada.FederatedData(train),
        **sections(
            pretrained=False,
            adapter="residual",
            train_backbone=True,
            algorithm=algorithm,
            rounds=2,
            clients_per_round=2,
            batch_size=3,
            **QUIET,
        ),
    )
    states = [run.state("personal", m) for m in range(3)]
    key = "layer1.0.conv1.base_layer.weight"
    shared = algorithm != "perada_no_kd"
    assert all(torch.equal(state[key], states[0][key]) for state in states) == shared
    assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0] if "perada_residual" in name)
    run.export(tmp_path)
    x = torch.randn(2, 3, 16, 16, generator=random)
    back = perada.Run.load(tmp_path)
    for m in range(3):
        assert torch.equal(back.personal(m)(x), run.personal(m)(x))
    # With PEFT alone: the backbone's weights, then the adapter.
    tensors = load_file(tmp_path / "backbone.safetensors") | load_file(tmp_path / "client_1" / "backbone.safetensors")
    network = build_backbone("test_resnet", 4, pretrained=False).model
    assert network.load_state_dict(tensors, strict=False).unexpected_keys == []
    plain = PeftModel.from_pretrained(network, str(tmp_path / "client_1")).eval()
    torch.testing.assert_close(plain(x), run.personal(1)(x))
    (tmp_path / "client_1" / "backbone.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"backbone\.safetensors' is missing"):
        perada.Run.load(tmp_path)
