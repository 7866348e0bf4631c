# SPDX-License-Identifier: Apache-2.0
"""The blocks of a network, which gradient checkpointing recomputes."""

import pytest
import timm
import torchvision
from torch import nn

from perada.adapters.added import BLOCK, BLOCK_PART, plain_name
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.models.blocks import repeated_blocks
from tests.rejections import rejects


def known_blocks(model):
    """The innermost modules whose names are those of blocks in the families that adapters know."""
    names = [name for name, _ in model.named_modules() if BLOCK.fullmatch(name) and not BLOCK_PART.fullmatch(name)]
    return [name for name in names if not any(other.startswith(f"{name}.") for other in names)]


@pytest.mark.parametrize(
    "name",
    [
        "test_vit",
        "test_convnext",
        "resnet18",
        "regnety_002",
        pytest.param("resnet50", marks=pytest.mark.slow),
        pytest.param("densenet121", marks=pytest.mark.slow),
        pytest.param("swin_tiny_patch4_window7_224", marks=pytest.mark.slow),
        pytest.param("eva02_tiny_patch14_224", marks=pytest.mark.slow),
    ],
)
def test_blocks_are_those_that_adapters_know_by_name(name):
    model = timm.create_model(name)
    assert list(repeated_blocks(model, name)) == known_blocks(model)


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("mobilenet_v2", "InvertedResidual", 17),
        ("efficientnet_b0", "MBConv", 16),  # and not the squeeze-and-excitation layers in lists of these
        ("convnext_tiny", "CNBlock", 18),
        ("swin_t", "SwinTransformerBlock", 12),
        ("vit_b_16", "EncoderBlock", 12),
    ],
)
@pytest.mark.every(2)
def test_blocks_of_torchvision(name, kind, count):
    model = getattr(torchvision.models, name)()
    blocks = [model.get_submodule(path) for path in repeated_blocks(model, name)]
    assert [type(block).__name__ for block in blocks] == [kind] * count


@pytest.mark.parametrize(
    ("name", "adapter"),
    [("test_vit", "lora"), ("test_vit", "prompt"), ("test_resnet", "residual"), ("test_vit", "full")],
)
def test_an_adapter_changes_no_choice(name, adapter):
    """Prompts wrap blocks, and the others layers in them."""
    plain = timm.create_model(name)
    adapted = insert_adapter(build_backbone(name, 4, pretrained=False), adapter).model
    found = [plain_name(path) for path in repeated_blocks(adapted, name)]
    assert found == list(repeated_blocks(plain, name))
    # The wrapper of a block, and not the block in it, runs again.
    assert not any("base_layer" in path for path in repeated_blocks(adapted, name))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)


class Attributes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first_block = Block()
        self.second_block = Block()
        self.head = nn.Linear(4, 4)


class Stage(nn.Module):
    """Its blocks are most of it; a norm and a layer that makes smaller maps come after them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.smaller = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("model", "paths"),
    [
        (Attributes(), ("first_block", "second_block")),
        (nn.Sequential(Stage(), Stage()), ("0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1")),
        (nn.Sequential(nn.Sequential(Block()), nn.Sequential(Block()), nn.Linear(4, 4)), ("0.0", "1.0")),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 3),
            ("layers.0", "layers.1", "layers.2"),
        ),
    ],
)
def test_blocks_of_networks_of_ones_own(model, paths):
    assert repeated_blocks(model, "own") == paths


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),  # blocks of one layer each
        nn.Sequential(Block(), nn.Linear(4, 4)),  # not repeated
    ],
)
def test_networks_without_blocks_are_named(model):
    with rejects("checkpointing", True, "'own'"):
        repeated_blocks(model, "own")
