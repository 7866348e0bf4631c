# SPDX-License-Identifier: Apache-2.0
"""Adapters in the last blocks only: which tensors are trained, by the names that the networks are known to have."""

import pytest
from transformers import ResNetConfig, ResNetForImageClassification

from perada.adapters import ResidualConfig
from perada.adapters.added import modules_from_last_blocks
from perada.core.states import trained_keys
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone

# Backbone, number of blocks, what the names of trained tensors may start with (behind the blocks there is the head).
CASES = [
    ("resnet18", 1, ("layer4.1.", "fc.")),
    ("resnet18", 3, ("layer3.1.", "layer4.0.", "layer4.1.", "fc.")),
    ("tf_efficientnet_lite0", 1, ("blocks.6.0.", "conv_head.", "bn2.", "classifier.")),
    ("tf_efficientnet_lite0", 5, ("blocks.5.", "blocks.6.", "conv_head.", "bn2.", "classifier.")),
    ("test_vit", 2, ("blocks.4.", "blocks.5.", "norm.", "head.")),
]
METHODS = {
    "resnet18": ("residual", "lora", "full", "bias_norm"),
    "tf_efficientnet_lite0": ("residual", "lora", "full", "bias_norm"),
    "test_vit": ("bottleneck", "prompt", "lora", "ia3", "full", "bias_norm"),
}


@pytest.mark.parametrize(
    ("name", "count", "starts", "method"),
    [
        pytest.param(*case, method, marks=[pytest.mark.slow] * (case[1] == 1 or method in ("lora", "bias_norm")))
        for case in CASES
        for method in METHODS[case[0]]
    ],
)
def test_what_is_trained(name, count, starts, method):
    adapted = insert_adapter(build_backbone(name, 7, pretrained=False), method, last_blocks=count)
    everywhere = insert_adapter(build_backbone(name, 7, pretrained=False), method)
    kept = set(trained_keys(adapted.model))
    if (name, method) == ("tf_efficientnet_lite0", "residual"):  # PEFT would find the final norm's name in each block
        starts = tuple(start for start in starts if start != "bn2.")
    assert kept == {key for key in trained_keys(everywhere.model) if key.startswith(starts)}
    if method == "full":
        state = adapted.model.state_dict()
        assert kept == {key for key in state if key.startswith(starts)}


@pytest.mark.parametrize(
    ("method", "options"), [("lora", {"last_blocks": 2}), (ResidualConfig(last_blocks=2), {})], ids=["name", "config"]
)
def test_a_trained_backbone_is_trained_there_alone(method, options):
    backbone = build_backbone("resnet18", 7, pretrained=False)
    adapted = insert_adapter(backbone, method, train_backbone=True, **options)
    trained = {name for name, parameter in adapted.model.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[0] for name in trained} == {"layer4", "fc"}
    assert "layer4.0.conv1.base_layer.weight" in trained
    assert "layer4.0.downsample.1.weight" in trained


def test_a_block_of_a_resnet_of_transformers_is_not_one_of_its_convolutions():
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
    names = modules_from_last_blocks(ResNetForImageClassification(config), 1)
    starts = ("resnet.encoder.stages.1.layers.1", "resnet.pooler", "classifier")
    assert {name for name in names if not name.startswith(starts)} == set()
    assert "resnet.encoder.stages.1.layers.1.layer.0" in names


def test_all_of_the_network_is_reached_by_default():
    model = build_backbone("test_vit", 7, pretrained=False).model
    assert modules_from_last_blocks(model, None) == {name for name, _ in model.named_modules()}
