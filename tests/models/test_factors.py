# SPDX-License-Identifier: Apache-2.0
"""The slot knows LoRA's factors."""

import pytest
import torch

from perada.lightning.module import FederatedClassifier


def slot_of(backbone, **options):
    module = FederatedClassifier(backbone, "lora", options, False)
    module.build(4, False, 0)
    return module


@pytest.mark.parametrize("backbone", ["test_vit", "test_resnet"])
def test_factors_and_their_scale_are_what_peft_merges(backbone):
    module = slot_of(backbone, r=2, lora_alpha=6)
    state = module.model.state_dict()
    assert module.slot.factors
    for down, up, scale in module.slot.factors:
        assert {down, up} <= set(module.slot.parameters)
        layer = module.model.get_submodule(down.split(".lora_A.")[0])
        torch.nn.init.normal_(layer.lora_B["default"].weight)
        merged = layer.get_delta_weight("default")
        product = state[up].flatten(1) @ state[down].flatten(1)
        torch.testing.assert_close(scale * product.view_as(merged), merged)
        assert scale == 3


def test_dora_has_no_factors():
    assert slot_of("test_vit", r=2, use_dora=True).slot.factors == ()
