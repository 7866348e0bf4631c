# SPDX-License-Identifier: Apache-2.0
"""What the adapter slot accepts, and the one line it says to what it rejects."""

import peft
import pytest
import timm
import torch
from torch import nn

from perada.adapters import BottleneckConfig, SelectiveConfig
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.mark.parametrize(
    ("backbone", "adapter", "options", "message"),
    [
        ("net", "adaptor", {}, r"adapter 'adaptor' is unknown; choose one of residual, "),
        ("resnet", "residual", {"drop": 0.1}, r"'residual'.*'drop'"),
        (
            "resnet",
            "full",
            {"r": 4},
            r"'full'.*'r'.*last_blocks.*adapter_options",
        ),
        ("vit", "residual", {}, r"'residual'.*'test_vit'.*VisionTransformer"),
        ("resnet", "bottleneck", {}, r"'bottleneck'.*'ResNet'"),
        (
            "net",
            peft.VeraConfig(),
            {},
            r"VeraConfig.*'OwnNet'",
        ),
        (
            "resnet",
            "lora",
            {"target_modules": ["nothing"]},
            r"'lora' finds nothing to adapt in backbone 'ResNet': target_modules=\{'nothing'\} matches none",
        ),
        ("resnet", "residual", {"target_modules": ["act1"]}, r"'act1'.*ReLU"),
        ("vit", "bottleneck", {"target_modules": ["norm1"]}, r"'blocks\.0\.norm1'.*LayerNorm"),
        (
            "resnet",
            "lora",
            {"bias": "all"},
            r"would train 'conv1\.1\.running_mean' \(\d+ such tensors\).* would not save it",
        ),
        (
            "net",
            peft.LoraConfig(),
            {"r": 3},
            r"adapter_options.*'r'.*PeftConfig",
        ),
        ("vit", peft.PromptTuningConfig(num_virtual_tokens=2), {}, "PromptTuningConfig cannot train"),
        ("vit", "lora", {"r": "abc"}, r"adapter_options: r .*got 'abc'"),
        ("vit", "lora", {"r": True}, r"adapter_options: r .*got True"),
        (
            "vit",
            "lora",
            {"lora_alpha": "16"},
            r"adapter_options: lora_alpha .*got '16'",
        ),
        ("vit", "lora", {"target_modules": 3}, r"target_modules .*got 3"),
        (
            "resnet",
            "residual",
            {"train_norms": "yes"},
            r"train_norms .*got 'yes'",
        ),
        ("resnet", "head", {"last_blocks": 1}, r"'head'.*'last_blocks'"),
        ("resnet", "full", {"last_blocks": 5}, r"last_blocks=5, .*ResNet .*4 blocks"),
        ("vit", "lora", {"last_blocks": 0}, r"last_blocks .*got 0"),
        ("vit", "bottleneck", {"last_blocks": 1.0}, r"last_blocks .*got 1\.0"),
        ("resnet", "lora", {"last_blocks": True}, r"last_blocks .*got True"),
        ("net", "full", {"last_blocks": 1}, r"last_blocks=1.*OwnNet"),
        (
            "vit",
            "lora",
            {"last_blocks": 1, "target_modules": ["qkv"]},
            "both specify which layers to adapt; set only one",
        ),
        ("net", SelectiveConfig(modules=["gone"]), {}, r"modules='gone'.*OwnNet"),
    ],
)
def test_rejections(make_backbone, backbone, adapter, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        insert_adapter(make_backbone(backbone), adapter, **options)
    assert "\n" not in str(caught.value)


def test_adapter_of_the_wrong_type(make_backbone):
    with pytest.raises(TypeError, match=r"adapter must be one of .*, got 3"):
        insert_adapter(make_backbone("net"), 3)


def test_a_second_adapter_is_rejected(make_backbone):
    built = make_backbone("net")
    adapted = insert_adapter(built, "head")
    with pytest.raises(ValueError, match="'OwnNet' already"):
        insert_adapter(built, "head")
    for rejected in (
        lambda: adapted.peft_model.add_adapter("other", SelectiveConfig(modules=["fc"])),
        lambda: adapted.peft_model.base_model.disable_adapter_layers(),
        lambda: adapted.peft_model.delete_adapter("default"),
    ):
        with pytest.raises(ValueError, match=r"PERADA_SELECTIVE trains the network's own parameters in place"):
            rejected()


def test_a_head_that_peft_would_confuse_is_the_only_one_that_is_trained():
    net = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 2))
    net = nn.Sequential(net, nn.ReLU(), nn.Identity(), nn.Linear(2, 2))
    model = insert_adapter(build_backbone(net, 2), "lora", target_modules=["0.0.0"]).model
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        "0.0.0.lora_A.default.weight",
        "0.0.0.lora_B.default.weight",
        "3.modules_to_save.default.weight",
        "3.modules_to_save.default.bias",
    ]
    model = insert_adapter(build_backbone(net, 2), "head").model
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["3.weight", "3.bias"]


def test_a_config_of_the_users_own_is_not_changed(make_backbone):
    config = peft.LoraConfig(r=2, inference_mode=True)
    adapted = insert_adapter(make_backbone("vit"), config)
    assert config.modules_to_save is None
    assert config.inference_mode
    assert adapted.config.modules_to_save == ["head"]
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in adapted.model.named_parameters()
        if parameter.requires_grad and name.startswith("blocks.0.")
    }
    assert shapes == {
        "blocks.0.attn.qkv.lora_A.default.weight": (2, 64),
        "blocks.0.attn.qkv.lora_B.default.weight": (192, 2),
        "blocks.0.attn.proj.lora_A.default.weight": (2, 64),
        "blocks.0.attn.proj.lora_B.default.weight": (64, 2),
    }


def test_number_of_bottleneck_parameters():
    model = insert_adapter(build_backbone("test_vit", 10, pretrained=False), "bottleneck", reduction=8).model
    # Six blocks of width 64: down 64 -> 8 and up 8 -> 64, both with bias; and the head.
    count = 6 * (64 * 8 + 8 + 8 * 64 + 64) + 64 * 10 + 10
    assert sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) == count


def test_full_trains_everything_and_its_statistics(tmp_path, make_backbone):
    adapted = insert_adapter(make_backbone("resnet"), "full")
    assert all(parameter.requires_grad for parameter in adapted.model.parameters())
    saved = peft.get_peft_model_state_dict(adapted.peft_model)
    assert {key.removeprefix("base_model.model.") for key in saved} == set(adapted.model.state_dict())


def test_a_file_that_lacks_tensors_is_rejected(tmp_path, make_backbone):
    adapted = insert_adapter(make_backbone("net"), "head")
    adapted.peft_model.save_pretrained(tmp_path, save_embedding_layers=False)
    partial = {"base_model.model.fc.bias": torch.zeros(5)}
    with pytest.raises(ValueError, match=r"1 of 2 tensors.*'base_model\.model\.fc\.weight'"):
        peft.set_peft_model_state_dict(adapted.peft_model, partial)


def test_ia3_scales_values_keys_and_feedforward(make_backbone):
    model = insert_adapter(make_backbone("hf"), "ia3").model
    scaled = {name.split(".ia3_l")[0] for name, p in model.named_parameters() if p.requires_grad and "ia3_l" in name}
    parts = ("attention.k_proj", "attention.v_proj", "mlp.fc2")
    assert scaled == {f"vit.layers.{layer}.{part}" for layer in (0, 1) for part in parts}


def test_torchvision_resnets_are_known():
    torchvision = pytest.importorskip("torchvision")
    model = insert_adapter(build_backbone(torchvision.models.resnet18(num_classes=10), 10), "residual").model
    assert sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) == 1_413_258


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": 0}, r"reduction .*got 0"),
        ({"bottleneck_dim": 0}, r"bottleneck_dim .*got 0"),
        ({"activation": "relu6"}, r"activation .*got 'relu6'"),
        ({"dropout": -0.1}, r"dropout .*got -0\.1"),
        ({"placement": "both"}, r"placement .*got 'both'"),
    ],
)
def test_bad_bottlenecks_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        BottleneckConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"select": ["norms"]}, r"select .*got \['norms'\]"), ({}, r"both empty")],
)
def test_bad_selections_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        SelectiveConfig(**options)


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups")
def test_grouped_convolutions_and_lora():
    built = build_backbone(timm.create_model("tf_efficientnet_lite0", num_classes=5), 5)
    with pytest.raises(ValueError, match=r"'lora'.*'EfficientNet': .*group"):
        insert_adapter(built, "lora", target_modules=["conv_dw"])
