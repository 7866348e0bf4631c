# SPDX-License-Identifier: Apache-2.0
"""Where adapters go in networks of many families, and what is rejected: against counts that are published."""

import peft
import pytest
import timm
import torch
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.adapters import register
from perada.data import FederatedData
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from tests.options import sections


def adapted(name, adapter, **options):
    return insert_adapter(build_backbone(name, 3, pretrained=False), adapter, **options).model


def wrapped(model, kind=nn.Module):
    """Names of the layers with an adapter around them."""
    ends = ".base_layer"
    return [path.removesuffix(ends) for path, m in model.named_modules() if path.endswith(ends) and isinstance(m, kind)]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnetv2_50", 3 + 4 + 6 + 3),  # blocks (He et al. 2016, Table 1)
        ("densenet121", 6 + 12 + 24 + 16),  # dense layers (Huang et al. 2017, Table 1)
        ("regnetx_002", 1 + 1 + 4 + 7),  # blocks of RegNetX-200MF (Radosavovic et al. 2020)
        ("convnext_atto", 2 + 2 + 6 + 2),  # blocks
    ],
)
def test_residual_has_one_adapter_a_block(name, count):
    model = adapted(name, "residual")
    assert len(wrapped(model, nn.Conv2d)) == count
    model.eval()(torch.randn(1, 3, 64, 64))


@pytest.mark.parametrize(("name", "count"), [("regnetx_002", 13), ("densenet121", 58)])
def test_their_blocks_are_counted(name, count):
    with pytest.raises(ValueError, match=rf"last_blocks={count + 1}.* {count} blocks"):
        adapted(name, "bias_norm", last_blocks=count + 1)


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("mixer_s32_224", nn.Linear, 8 * 4),  # two for tokens and two for channels in each of 8 blocks
        ("regnetx_002", nn.Conv2d, 13 * 2 + 4),  # 1x1 before and behind each 3x3 in groups, four shortcuts
    ],
)
def test_lora_in_a_family_it_does_not_know(name, kind, count):
    model = adapted(name, "lora")
    assert len(wrapped(model, kind)) == count
    assert all(
        layer.groups == 1 for path, layer in model.named_modules() if isinstance(layer, nn.Conv2d) and "lora" in path
    )


class Ends(nn.Module):
    """Names that end alike: PEFT takes "mix" for the end of "deep.mix" too."""

    def __init__(self):
        super().__init__()
        self.stem, self.mix = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
        self.deep = nn.Sequential()
        self.deep.add_module("mix", nn.Conv2d(4, 4, 3, groups=4))
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self.deep(self.mix(self.stem(x))).mean((2, 3)))


@pytest.mark.parametrize("adapter", ["lora", "ia3", peft.LoHaConfig()])
def test_only_the_layers_that_were_chosen(adapter):
    assert wrapped(insert_adapter(build_backbone(Ends(), 3), adapter).model) == ["mix"]


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.attn = nn.Conv2d(3, 8, 8, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp, self.fc = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.fc(self.mlp(x + self.attn(x, x, x)[0]).mean(1))


def test_torch_attention_is_adapted_as_a_whole():
    assert wrapped(insert_adapter(build_backbone(Attends(), 3), "lora").model) == [
        "attn",
        "attn.base_layer.out_proj",
        "mlp",
    ]
    assert wrapped(insert_adapter(build_backbone(Attends(), 3), "ia3").model) == ["mlp"]
    # The attention reads the weight of this layer, but does not call it.
    with pytest.raises(ValueError, match=r"'attn' of backbone 'Attends'.*MultiheadAtt"):
        insert_adapter(build_backbone(Attends(), 3), peft.LoraConfig(target_modules=["out_proj"]))


def test_ln_tuning_takes_every_norm():
    network = timm.create_model("test_resnet", num_classes=3)
    norms = [path for path, module in network.named_modules() if isinstance(module, nn.BatchNorm2d)]
    model = insert_adapter(build_backbone(network, 3), peft.LNTuningConfig()).model
    assert wrapped(model) == norms


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (peft.AdaLoraConfig(total_step=10), "AdaLoraConfig is not supported"),
        (peft.FourierFTConfig(), r"FourierFTConfig.*'regnetx_002'"),
        (
            peft.FourierFTConfig(target_modules=["s1.b1.conv1.conv"]),
            r"'FourierFTConfig'.*'regnetx_002'",
        ),
        (
            peft.VeraConfig(target_modules=["s1.b1.conv1.conv"]),
            r"'VeraConfig'.*'regnetx_002'",
        ),
    ],
)
def test_rejections(adapter, message):
    with pytest.raises(ValueError, match=message) as caught:
        adapted("regnetx_002", adapter)
    assert "\n" not in str(caught.value)


def finetune(network, adapter, **options):
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8, generator=random)
    part = TensorDataset(images, torch.arange(6) % 3)
    common = {"algorithm": "fedavg", "rounds": 1, "local_steps": 1, "batch_size": 3, "accelerator": "cpu"}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return perada.finetune(
        network, FederatedData([part, part]), **sections(adapter=adapter, **common, **quiet, **options)
    )


def residual_network():
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=3, zero_init_last=False)


@pytest.mark.filterwarnings(
    "ignore:engine='auto' falls back to the per-client loop", "ignore:Setting boft_n_butterfly_factor"
)
@pytest.mark.parametrize("adapter", [peft.LoraConfig(use_dora=True), peft.BOFTConfig()])
@pytest.mark.every(2)
def test_adapters_that_need_contiguous_tensors_get_them(adapter):
    assert finetune(residual_network(), adapter).state("global")
    with pytest.raises(ValueError, match=r"adapter \(\w+\) .*channels_last: false"):
        finetune(residual_network(), adapter, channels_last=True)


def test_images_that_do_not_fit_are_not_the_adapters_fault():
    network = nn.Sequential(nn.Flatten(), nn.Linear(7, 7), nn.Linear(7, 3))
    with pytest.raises(ValueError, match=r"\(3, 32, 32\).*float32"):
        finetune(network, "lora")


@pytest.mark.slow
def test_a_compiled_network_is_taken_as_it_was_before():
    plain, compiled = residual_network(), torch.compile(residual_network())
    one, other = (finetune(network, "head").state("global") for network in (plain, compiled))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_the_head_of_mobilenet_has_a_twin():
    options = {"pretrained": False, "image_size": 32, "engine": "folded", "num_classes": 3}
    assert finetune("mobilenetv3_small_050", "head", **options).state("global").keys() == {
        "classifier.weight",
        "classifier.bias",
    }


def test_a_name_of_another_method_is_not_registered():
    with pytest.raises(ValueError, match=r"'LORA'.*LoraConfig"):
        register("LORA", peft.VeraConfig, peft.VeraModel)
