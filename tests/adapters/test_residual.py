# SPDX-License-Identifier: Apache-2.0
"""The residual adapter: the paper's counts, placement and arithmetic."""

import pytest
import timm
import torch
from torch import nn

from perada.adapters import ResidualConfig
from perada.adapters.residual import ResidualLayer
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone


def adapted(name, classes, **options):
    return insert_adapter(build_backbone(name, classes, pretrained=False), "residual", **options).model


@pytest.mark.parametrize(
    ("name", "classes", "count"),
    [
        ("resnet18", 10, 1_413_258),  # the paper's 1.41 M
        ("resnet18", 65, 1_441_473),  # 1.44 M
        ("resnet34", 65, 2_578_625),  # 2.57 M
    ],
)
def test_number_of_trained_parameters(name, classes, count):
    model = adapted(name, classes)
    assert sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) == count


def test_count_by_hand():
    # Four adapters at each width: a 1x1 convolution and a norm. Norms of the network: the stem's and four a width.
    widths = (64, 128, 256, 512)
    adapters = sum(4 * (width**2 + 2 * width) for width in widths)
    norms = 2 * 64 + sum(4 * 2 * width for width in widths)
    assert adapters + norms + 512 * 10 + 10 == 1_413_258


def test_shortcut_norms_stay_frozen():
    model = adapted("resnet18", 10)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not any("downsample" in name for name in trained)
    assert "bn1.modules_to_save.default.weight" in trained
    assert "layer4.1.bn2.modules_to_save.default.bias" in trained


def test_bottleneck_blocks_are_adapted_after_their_3x3_convolution():
    model = adapted("resnet50", 10)
    places = [name for name, module in model.named_modules() if isinstance(module, ResidualLayer)]
    assert len(places) == 3 + 4 + 6 + 3
    assert all(name.endswith(".conv2") for name in places)
    assert model.get_parameter("layer1.0.bn3.modules_to_save.default.weight").requires_grad


def test_efficientnet_is_adapted_after_the_last_pointwise_convolution_of_each_block():
    """Widths by hand from Lite0's definition (Tan & Le 2019, table 1, without expansion in the first block)."""
    model = adapted("tf_efficientnet_lite0", 10)
    places = [name for name, module in model.named_modules() if isinstance(module, ResidualLayer)]
    assert [name.rpartition(".")[2] for name in places] == ["conv_pw"] + ["conv_pwl"] * 15
    widths = [16] + [24] * 2 + [40] * 2 + [80] * 3 + [112] * 3 + [192] * 4 + [320]
    counts = [
        sum(one.numel() for one in model.get_submodule(place).perada_residual_project.parameters()) for place in places
    ]
    assert counts == [width**2 for width in widths]


def test_layer_computes_what_the_paper_says():
    torch.manual_seed(0)
    base = nn.Conv2d(3, 4, 3, bias=False)
    layer = ResidualLayer(base, "default", ResidualConfig(dropout=0.0, init_std=1.0)).train()
    x = base(torch.randn(5, 3, 6, 6))
    normal = (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), keepdim=True, unbiased=False) + 1e-5).sqrt()
    weight = layer.perada_residual_project["default"].weight[:, :, 0, 0]
    expected = x + torch.einsum("oc,bchw->bohw", weight, normal)
    layer.base_layer = nn.Identity()
    assert torch.allclose(layer(x), expected, atol=1e-5)


def test_initial_weights():
    model = adapted("resnet18", 10)
    weights = [p for name, p in model.named_parameters() if "perada_residual_project" in name]
    drawn = torch.cat([weight.detach().flatten() for weight in weights])
    # 1.4 million draws: the standard deviation is known to about one part in 1,700.
    assert abs(drawn.std().item() - 0.01) < 5e-5
    assert abs(drawn.mean().item()) < 5e-5
    dropouts = [m.p for name, m in model.named_modules() if name.endswith("perada_residual_dropout.default")]
    assert dropouts == [0.3] * 16


def test_targets_of_the_users_choice():
    built = build_backbone(timm.create_model("test_resnet", num_classes=5), 5)
    model = insert_adapter(built, ResidualConfig(target_modules=r"layer1\.0\.conv\d", train_norms=False)).model
    assert [n for n, m in model.named_modules() if isinstance(m, ResidualLayer)] == ["layer1.0.conv1", "layer1.0.conv2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 1.0}, r"dropout .*got 1\.0"),
        ({"norm": "layer"}, r"norm .*got 'layer'"),
        ({"init_std": -1.0}, r"init_std .*got -1\.0"),
    ],
)
def test_bad_values_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ResidualConfig(**options)
