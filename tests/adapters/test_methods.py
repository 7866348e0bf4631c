# SPDX-License-Identifier: Apache-2.0
"""Every adapter on every kind of backbone that it fits: a new method adds rows to ``TABLE``."""

import subprocess
import sys

import peft
import pytest
import torch
from torch import nn

from perada.adapters import ResidualConfig
from perada.core.states import get_state, train_mode, trained_keys
from perada.models.adapted import insert_adapter
from perada.models.configurations import ADAPTERS

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

OWN = {"target_modules": ["conv"]}
# Backbone, adapter, options, leaf modules that may own a trained parameter, does it start as the plain backbone.
TABLE = [
    ("resnet", "residual", {"init_std": 0.0}, {"Conv2d", "BatchNorm2d", "Linear"}, True),
    ("resnet", "residual", {"norm": "group", "train_norms": False}, {"Conv2d", "GroupNorm", "Linear"}, False),
    ("resnet", "residual", {"norm": "none", "train_norms": False}, {"Conv2d", "Linear"}, False),
    ("net", "residual", OWN, {"Conv2d", "BatchNorm2d", "Linear"}, False),
    ("vit", "bottleneck", {}, {"Linear"}, True),
    ("vit", "bottleneck", {"placement": "houlsby", "bottleneck_dim": 3, "activation": "relu"}, {"Linear"}, True),
    ("hf", "bottleneck", {"placement": "houlsby"}, {"Linear"}, True),
    ("vit", "prompt", {}, {"Prompts", "Linear"}, False),
    ("vit", "prompt", {"deep": False, "last_blocks": 2, "dropout": 0.2}, {"Prompts", "Linear"}, False),
    ("hf", "prompt", {"tokens": 3}, {"Prompts", "Linear"}, False),
    ("hf", "prompt", {"tokens": 3, "deep": False}, {"Prompts", "Linear"}, False),
    ("resnet", "lora", {"r": 2}, {"Conv2d", "Linear"}, True),
    ("vit", "lora", {}, {"Linear"}, True),
    ("hf", "lora", {}, {"Linear"}, True),
    ("net", "lora", OWN, {"Conv2d", "Linear"}, True),
    ("resnet", "dual_lora", {"r": 2}, {"Conv2d", "Linear"}, True),
    ("vit", "dual_lora", {"gate": True}, {"Linear"}, True),
    ("hf", "dual_lora", {}, {"Linear"}, True),
    ("net", "dual_lora", OWN, {"Conv2d", "Linear"}, True),
    ("resnet", "ia3", {}, {"ParameterDict", "Linear"}, True),
    ("vit", "ia3", {}, {"ParameterDict", "Linear"}, True),
    ("hf", "ia3", {}, {"ParameterDict", "Linear"}, True),
    ("net", "ia3", OWN, {"ParameterDict", "Linear"}, True),
    ("resnet", "residual", {"last_blocks": 2}, {"Conv2d", "BatchNorm2d", "Linear"}, False),
    ("vit", "bottleneck", {"last_blocks": 1, "placement": "houlsby"}, {"Linear"}, True),
    ("hf", "lora", {"last_blocks": 1}, {"Linear"}, True),
    ("resnet", "full", {"last_blocks": 1}, {"Conv2d", "BatchNorm2d", "Linear"}, True),
    ("vit", "bias_norm", {"last_blocks": 3}, {"LayerNorm", "Linear"}, True),
    *((backbone, "head", {}, {"Linear"}, True) for backbone in ("resnet", "vit", "hf", "net")),
    ("resnet", "bias_norm", {}, {"BatchNorm2d", "Linear"}, True),
    ("vit", "bias_norm", {}, {"Conv2d", "LayerNorm", "Linear"}, True),
    ("hf", "bias_norm", {}, {"Conv2d", "LayerNorm", "Linear"}, True),
    ("net", "bias_norm", {}, {"BatchNorm2d", "Linear"}, True),
    ("resnet", "full", {}, {"Conv2d", "BatchNorm2d", "Linear"}, True),
    ("vit", "full", {}, {"Conv2d", "LayerNorm", "Linear", "VisionTransformer"}, True),
    ("hf", "full", {}, {"Conv2d", "LayerNorm", "Linear", "ViTEmbeddings"}, True),
    ("net", "full", {}, {"Conv2d", "BatchNorm2d", "Linear", "OwnNet"}, True),
]
NAMES = [f"{backbone}-{adapter}-{number}" for number, (backbone, adapter, *_) in enumerate(TABLE)]
each_row = pytest.mark.parametrize(("backbone", "adapter", "options", "owners", "starts_plain"), TABLE, ids=NAMES)
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def randomise(model):
    """Give every trained tensor values that differ from any start value."""
    state = model.state_dict()
    for key in trained_keys(model):
        value = state[key]
        value.copy_(0.05 + torch.rand(value.shape) * 0.2 if value.is_floating_point() else torch.full_like(value, 7))


def test_the_table_holds_every_adapter():
    assert {row[1] for row in TABLE} == set(ADAPTERS)


@each_row
def test_owners_of_trained_parameters(make_backbone, backbone, adapter, options, owners, starts_plain):
    built = make_backbone(backbone)
    model = insert_adapter(built, adapter, **options).model
    found = {
        type(module).__name__
        for module in model.modules()
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    }
    assert found == owners
    assert all(p.requires_grad for name, p in model.named_parameters() if name.startswith(f"{built.head}.")) or all(
        p.requires_grad for p in model.get_submodule(f"{built.head}.modules_to_save").parameters()
    )


@each_row
@pytest.mark.every(5)
def test_start(make_backbone, backbone, adapter, options, owners, starts_plain):
    plain = make_backbone(backbone).model.eval()(IMAGES)
    adapted = insert_adapter(make_backbone(backbone), adapter, **options).model.eval()(IMAGES)
    assert torch.equal(plain, adapted) == starts_plain
    assert adapted.shape == (4, 5)


@pytest.mark.every(3)
@each_row
def test_gradient_reaches_every_trained_parameter(make_backbone, backbone, adapter, options, owners, starts_plain):
    model = insert_adapter(make_backbone(backbone), adapter, **options).model
    randomise(model)
    train_mode(model)
    nn.functional.cross_entropy(model(IMAGES), torch.tensor([0, 1, 2, 3])).backward()
    dead = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (parameter.grad is None or not parameter.grad.any())
    ]
    # Softmax over keys does not see a constant added to all of them, so a key's bias never has a gradient.
    assert [name for name in dead if not name.endswith("k_proj.bias")] == []
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)


@each_row
@pytest.mark.every(5)
def test_save_and_load(tmp_path, make_backbone, backbone, adapter, options, owners, starts_plain):
    adapted = insert_adapter(make_backbone(backbone), adapter, **options)
    randomise(adapted.model)
    state, logits = get_state(adapted.model), adapted.model.eval()(IMAGES)
    adapted.peft_model.save_pretrained(tmp_path, save_embedding_layers=False)

    loaded = peft.PeftModel.from_pretrained(make_backbone(backbone).model, tmp_path).get_base_model()
    assert torch.equal(loaded.eval()(IMAGES), logits)
    found = loaded.state_dict()
    assert [key for key in state if not torch.equal(found[key], state[key])] == []

    again = peft.PeftModel.from_pretrained(make_backbone(backbone).model, tmp_path, is_trainable=True).get_base_model()
    assert trained_keys(again) == tuple(state)


@pytest.mark.slow
def test_a_user_loads_it_with_peft_alone(tmp_path, make_backbone):
    adapters = ["residual", "full"]
    logits = []
    for adapter in adapters:
        adapted = insert_adapter(make_backbone("resnet"), adapter)
        randomise(adapted.model)
        adapted.peft_model.save_pretrained(tmp_path / adapter, save_embedding_layers=False)
        logits.append(adapted.model.eval()(IMAGES).detach())
    torch.save((make_backbone("resnet").model.state_dict(), IMAGES, logits), tmp_path / "case.pt")
    script = f"""
import peft, timm, torch
import perada
weights, images, logits = torch.load({str(tmp_path / "case.pt")!r})
for adapter, expected in zip({adapters!r}, logits):
    model = timm.create_model("test_resnet", num_classes=5)
    model.load_state_dict(weights)
    model = peft.PeftModel.from_pretrained(model, {str(tmp_path)!r} + "/" + adapter)
    assert torch.equal(model(images), expected)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_two_named_adapters_in_one_model(make_backbone):
    model = peft.get_peft_model(make_backbone("resnet").model, ResidualConfig(modules_to_save=["fc"]), "personal")
    model.add_adapter("global", ResidualConfig(modules_to_save=["fc"]))
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".global." in name:
                parameter.add_(0.1)
    personal = model(IMAGES)
    model.set_adapter("global")
    assert not torch.allclose(personal, model(IMAGES))
    model.set_adapter("personal")
    model.delete_adapter("global")
    assert torch.equal(personal, model(IMAGES))


@pytest.mark.parametrize(("backbone", "adapter"), [("resnet", "residual"), ("vit", "bottleneck"), ("vit", "prompt")])
def test_disabled_is_the_plain_backbone(make_backbone, backbone, adapter):
    adapted = insert_adapter(make_backbone(backbone), adapter)
    randomise(adapted.model)
    adapted.model.eval()
    with adapted.peft_model.disable_adapter():
        assert torch.equal(adapted.model(IMAGES), make_backbone(backbone).model(IMAGES))


def test_import_under_another_name_is_rejected():
    done = subprocess.run([sys.executable, "-c", "import adapters"], capture_output=True, text=True)
    assert "import perada.adapters, not 'adapters'" in done.stderr
