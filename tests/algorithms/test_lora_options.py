# SPDX-License-Identifier: Apache-2.0
"""PEFT's options of LoRA under methods about its factors: exported adapters in plain PEFT, and what PEFT would add."""

from collections import OrderedDict

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import nn

import perada
from perada.algorithms import HetLoRA
from tests.options import sections

from .problems import CLASSES, CLIENTS, QUIET, task

METHODS = ("fedavg", "ffa_lora", "rolora", "fedsa_lora", "fedex_lora", "flora", HetLoRA(ranks=[3, 1]))
ADAPTERS = {
    "stabilised": {"use_rslora": True},
    "patterns": {"rank_pattern": {"sub.layer": 3}, "alpha_pattern": {"^layer$": 5}},
    "patterns that end alike": {"r": 1, "rank_pattern": {"sub.layer": 4}, "target_modules": ["layer"]},
    "expression": {"target_modules": r"(sub\.)?layer"},
    "dropout": {"lora_dropout": 0.1},
    "orthogonal": {"init_lora_weights": "orthogonal", "target_modules": ["layer"]},
    "gaussian": {"init_lora_weights": "gaussian"},
    "biases": {"bias": "all"},
    "biases of B": {"lora_bias": True},
    "a layer whole": {"target_modules": ["conv"], "modules_to_save": ["turn"]},
}


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        sub = nn.Sequential(OrderedDict(layer=nn.Linear(64, 6)))
        layers = {
            "conv": nn.Conv2d(1, 4, 3),
            "bend": nn.Tanh(),
            "flat": nn.Flatten(),
            "sub": sub,
            "turn": nn.Linear(6, 6),
        }
        layers |= {"layer": nn.Linear(6, 5), "last": nn.Tanh(), "fc": nn.Linear(5, CLASSES)}
        return nn.Sequential(OrderedDict(layers)).double()


def run(algorithm, adapter, **options):
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ["conv", "layer"]} | ADAPTERS[adapter])
    common = {"rounds": 2, "batch_size": 4, "local_steps": 2, "lr_local": 0.2, "adapter": config}
    return perada.finetune(network(), task(), **sections(algorithm=algorithm, **common | QUIET | options))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.filterwarnings("ignore:.*none of its clients has a LoRA rank above:UserWarning")
@pytest.mark.every(200)
def test_plain_peft_loads_it(adapter, method, tmp_path):
    result = run(method, adapter)
    x = task().public[:][0]
    result.export(tmp_path)
    for m in CLIENTS:
        folder = tmp_path / f"client_{m}"
        plain = network()
        if (folder / "backbone.safetensors").exists():
            plain.load_state_dict(load_file(folder / "backbone.safetensors"))
        model = PeftModel.from_pretrained(plain, str(folder)).eval()
        torch.testing.assert_close(model(x), result.personal(m)(x), rtol=1e-9, atol=1e-11)
    again = perada.Run.load(tmp_path, backbone=network())
    assert torch.equal(again.personal(1)(x), result.personal(1)(x))


def products(state, adapter):
    """What PEFT adds to each weight, and the weight."""
    model = PeftModel(network(), LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ["conv", "layer"]} | adapter))
    tensors = model.get_base_model().state_dict()
    for key, value in state.items():
        if "modules_to_save" not in key and key in tensors:
            tensors[key].copy_(value)
    return {
        name: (layer.get_delta_weight("default").detach(), layer.get_base_layer().weight.detach())
        for name, layer in model.get_base_model().named_modules()
        if isinstance(layer, LoraLayer)
    }


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [name for name in ADAPTERS if name not in ("dropout", "a layer whole")])
def test_means_are_of_what_peft_adds(adapter):
    """In one round, of what clients train by themselves from the same state."""
    alone = run("standalone", adapter, rounds=1, lr_personal=0.2)
    clients = [products(alone.state("personal", m), ADAPTERS[adapter]) for m in CLIENTS]
    means = {name: sum(client[name][0] for client in clients) / len(clients) for name in clients[0]}
    by_name = run("fedavg", adapter, rounds=1, diagnostics=["lora_residual"])
    lost = products(by_name.state("global"), ADAPTERS[adapter])
    off = sum(float((value - lost[name][0]).square().sum()) for name, value in means.items())
    norm = sum(float(value.square().sum()) for value in means.values())
    assert by_name.metrics["rounds"][0]["updates/lora_residual"] == pytest.approx((off / norm) ** 0.5, rel=1e-9)
    cut = products(run("fedavg", adapter, rounds=1, server_rule="svd").state("global"), ADAPTERS[adapter])
    exact = [
        products(run(name, adapter, rounds=1).state("global"), ADAPTERS[adapter]) for name in ("fedex_lora", "flora")
    ]
    for name, value in means.items():
        rank = alone.state("personal", 0)[f"{name}.lora_A.default.weight"].shape[0]
        u, values, vt = torch.linalg.svd(value.flatten(1), full_matrices=False)
        torch.testing.assert_close(cut[name][0].flatten(1), (u * values)[:, :rank] @ vt[:rank], rtol=1e-9, atol=1e-12)
        for other in exact:
            torch.testing.assert_close(sum(other[name]), value + clients[0][name][1], rtol=1e-9, atol=1e-12)
