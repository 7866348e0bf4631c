# SPDX-License-Identifier: Apache-2.0
"""The names of tensors know LoRA's factors."""

import pytest
import torch
from peft import BdLoraConfig, KasaConfig, LoraConfig, MontecloraConfig, VeloraConfig

from perada.lightning.module import FederatedClassifier
from perada.tasks import Classification


def slot_of(backbone, adapter="lora", **options):
    module = FederatedClassifier(backbone, adapter, options, False)
    module.build(4, Classification(), 0)
    return module


@pytest.mark.parametrize("backbone", ["test_vit", "test_resnet"])
def test_factors_and_their_scale_are_what_peft_merges(backbone):
    module = slot_of(backbone, r=2, lora_alpha=6)
    state = module.model.state_dict()
    assert module.tensor_names.factors
    for down, up, scale, _ in module.tensor_names.factors:
        assert {down, up} <= set(module.tensor_names.parameters)
        layer = module.model.get_submodule(down.split(".lora_A.")[0])
        torch.nn.init.normal_(layer.lora_B["default"].weight)
        merged = layer.get_delta_weight("default")
        product = state[up].flatten(1) @ state[down].flatten(1)
        torch.testing.assert_close(scale * product.view_as(merged), merged)
        assert scale == 3


class Texts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.look, self.layer, self.fc = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(self.layer(self.look(x).mean(1)))


@pytest.mark.parametrize(
    ("backbone", "options"),
    [
        ("test_vit", {"use_dora": True}),
        ("test_vit", {"target_modules": ["qkv"], "use_bdlora": BdLoraConfig(["qkv"], nblocks=2)}),
        ("test_vit", {"target_modules": ["qkv"], "kasa_config": KasaConfig()}),
        ("test_vit", {"target_modules": ["proj"], "target_parameters": ["mlp.fc1.weight"]}),
        (Texts(), {"target_modules": ["look", "layer"]}),
    ],
)
@pytest.mark.filterwarnings("ignore:engine='auto' falls back to the per-client loop:UserWarning")
def test_what_is_not_a_product_alone_has_no_factors(backbone, options):
    """Also where other layers have plain ones: a method about factors would then treat some of them otherwise."""
    assert slot_of(backbone, LoraConfig(r=2, **options)).tensor_names.factors == ()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        *(({"init_lora_weights": one}, f"'{one}'.*'gaussian'") for one in ("pissa", "pissa_niter_4", "olora", "mica")),
        ({"megatron_config": {"a": 1}, "megatron_core": "beside.core"}, "megatron_config=.*'beside.core'"),
        ({"velora_config": VeloraConfig()}, "velora_config=Velora.*leave velora_config out"),
        ({"monteclora_config": MontecloraConfig()}, "monteclora_config=Monte.*leave monteclora_config out"),
    ],
)
def test_what_no_state_holds_is_rejected(option, message):
    with pytest.raises(ValueError, match=message):
        slot_of("test_vit", LoraConfig(r=2, **option))
