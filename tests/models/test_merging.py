# SPDX-License-Identifier: Apache-2.0
"""Merged networks are compared with a tolerance that follows their precision, whatever the scale of their outputs."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from perada.models.merging import WrongMergeError, check_merged


class Fixed(nn.Module):
    """A linear network that takes images of one dtype only, so that double precision cannot decide."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 3, dtype=dtype)

    def forward(self, x):
        if x.dtype != self.dtype:
            raise TypeError(f"images of {x.dtype}")
        return self.fc(x)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.bfloat16, 2**-6), (torch.float16, 2**-9), (torch.float32, 1e-4)]
)
def test_rounding_of_a_network_with_a_fixed_dtype_is_no_wrong_merge(dtype, rounding, scale):
    model = Fixed(dtype)
    model.dtype = dtype
    with torch.no_grad():
        model.fc.weight.mul_(scale)
        model.fc.bias.mul_(scale)
    rounded = copy.deepcopy(model)
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        rounded.fc.weight.mul_(1 + rounding)
        wrong.fc.weight.mul_(1.25)
    peft_model = get_peft_model(nn.Sequential(nn.Linear(6, 3)), LoraConfig(target_modules=["0"]))
    x = torch.randn(4, 6, dtype=dtype)
    check_merged(peft_model, rounded, model, x)
    with pytest.raises(WrongMergeError, match="different outputs"):
        check_merged(peft_model, wrong, model, x)
