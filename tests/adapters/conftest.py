# SPDX-License-Identifier: Apache-2.0
"""The small backbones that every adapter is tried on."""

import pytest
import timm
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from perada.models.backbones import build_backbone

CLASSES = 5
SIZE = 32


class OwnNet(nn.Module):
    """A user's network: one BatchNorm, a parameter owned by the root, and a bias-free convolution."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.conv = nn.Conv2d(3, 8, 3, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.fc(torch.relu(self.norm(self.conv(x)) * self.scale).mean((2, 3)))


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory):
    """A tiny transformers ViT on disk."""
    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=SIZE,
        patch_size=8,
        num_labels=3,
    )
    ViTForImageClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture
def make_backbone(hf_folder):
    """Build a backbone by its short name; every call gives the same weights."""

    def make(name):
        torch.manual_seed(1)
        if name == "resnet":
            # Otherwise the last norm of each block starts at zero, and adapters before it get no gradient.
            return build_backbone(timm.create_model("test_resnet", num_classes=CLASSES, zero_init_last=False), CLASSES)
        if name == "vit":
            return build_backbone("test_vit", CLASSES, pretrained=False, image_size=SIZE)
        if name == "hf":
            return build_backbone(f"hf:{hf_folder}", CLASSES)
        return build_backbone(OwnNet(), CLASSES)

    return make
