# SPDX-License-Identifier: Apache-2.0
"""A run's network as the backbone of another run."""

import pytest
import torch
from torch.utils.data import TensorDataset

import perada
from perada.data import FederatedData
from perada.models.backbones import build_backbone
from tests.options import sections

ADAPTERS = [
    ("test_resnet", "residual"),
    ("test_resnet", "lora"),
    ("test_resnet", "bias_norm"),
    ("test_vit", "bottleneck"),
]
OPTIONS = {"local_steps": 1, "logger": False, "enable_progress_bar": False, "accelerator": "cpu", "pretrained": False}


def data(size):
    images = torch.randint(0, 256, (8, 3, size, size), dtype=torch.uint8)
    return FederatedData([TensorDataset(images, torch.arange(8) % 3)], num_classes=3)


@pytest.mark.parametrize(
    ("backbone", "adapter"), [ADAPTERS[0], *(pytest.param(*names, marks=pytest.mark.slow) for names in ADAPTERS[1:])]
)
@pytest.mark.slow
def test_another_run_begins_with_the_same_logits_and_trains(backbone, adapter):
    size = 32 if backbone == "test_resnet" else 160
    own = {**OPTIONS, "algorithm": "fedavg", "adapter": adapter}
    run = perada.finetune(backbone, data(size), **sections(rounds=1, lr_local=0.1, **own))
    before, x = run.global_model(), torch.randn(2, 3, size, size)
    again = perada.finetune(before, data(size), **sections(rounds=0, **own))
    with torch.no_grad():
        torch.testing.assert_close(
            again.global_model()(x), before(x), rtol=0, atol=1e-4
        )  # a head that was not taken over would differ by 0.1
    trained = perada.finetune(before, data(size), **sections(rounds=1, lr_local=0.1, **own)).global_model()
    with torch.no_grad():
        assert (trained(x) - before(x)).abs().max() > 1e-3
    assert build_backbone(before, 3).image == run.adapted().backbone.image  # so that images are normalised alike
