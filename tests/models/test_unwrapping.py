# SPDX-License-Identifier: Apache-2.0
"""A run's network as the backbone of another run."""

import pytest
import torch
from torch.utils.data import TensorDataset

import perada
from perada.data import FederatedData
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.models.unwrapping import unwrapped
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
    options = {**OPTIONS, "algorithm": "fedavg", "adapter": adapter}
    run = perada.finetune(backbone, data(size), **sections(rounds=1, lr_local=0.1, **options))
    before, x = run.global_model(), torch.randn(2, 3, size, size)
    again = perada.finetune(before, data(size), **sections(rounds=0, **options))
    with torch.no_grad():
        torch.testing.assert_close(
            again.global_model()(x), before(x), rtol=0, atol=1e-4
        )  # a head that was not taken over would differ by 0.1
    trained = perada.finetune(before, data(size), **sections(rounds=1, lr_local=0.1, **options)).global_model()
    with torch.no_grad():
        assert (trained(x) - before(x)).abs().max() > 1e-3
    assert (
        build_backbone(before, 3).image_config == run.adapted().backbone.image_config
    )  # so that images are normalised alike


FORMER = [("test_resnet", "residual"), ("test_vit", "bottleneck"), ("test_vit", "prompt"), ("test_vit", "dual_lora")]


def with_former_adapter(backbone, adapter):
    """A network with the plain adapters that perada leaves in a trained network."""
    return unwrapped(insert_adapter(build_backbone(backbone, 3, pretrained=False), adapter).model)


def names_without_adapters(names):
    """Names of the network's own tensors as they are without adapters."""
    plain_names = [name for name in names if not any(part.startswith("perada_") for part in name.split("."))]
    return {name.replace("base_layer.", "") for name in plain_names}


@pytest.mark.parametrize(("backbone", "adapter"), FORMER)
def test_full_fine_tuning_trains_what_a_former_adapter_wraps_and_the_adapter_too(backbone, adapter):
    former = with_former_adapter(backbone, adapter)
    names = {name for name, _ in former.named_parameters()}
    assert any("base_layer" in name for name in names) and any("perada_" in name for name in names)
    full = insert_adapter(build_backbone(former, 3), "full")
    assert {name for name, p in full.model.named_parameters() if p.requires_grad} == names
    # And so with a new adapter on a backbone that is trained too.
    extended = insert_adapter(build_backbone(former, 3), "lora", train_backbone=True)
    frozen = {name for name, p in extended.model.named_parameters() if not p.requires_grad}
    assert {name for name in frozen if "original_module" not in name.split(".")} == set()


@pytest.mark.parametrize(("backbone", "adapter"), FORMER)
def test_the_last_blocks_are_those_of_the_network_without_adapters(backbone, adapter):
    plain = insert_adapter(build_backbone(backbone, 3, pretrained=False), "full", last_blocks=1)
    expected = {name for name, p in plain.model.named_parameters() if p.requires_grad}
    full = insert_adapter(build_backbone(with_former_adapter(backbone, adapter), 3), "full", last_blocks=1)
    trained = {name for name, p in full.model.named_parameters() if p.requires_grad}
    assert names_without_adapters(trained) == expected
    former = {name for name in trained if "perada_" in name}
    assert former and len(former) < sum("perada_" in name for name, _ in full.model.named_parameters())


def test_a_run_that_trains_a_former_adapter_is_saved_and_loaded(tmp_path):
    network = with_former_adapter("test_resnet", "residual")
    run = perada.finetune(
        network, data(32), **sections(rounds=3, lr_local=0.1, **OPTIONS | {"algorithm": "fedavg", "adapter": "full"})
    )
    before = network.state_dict()
    after = run.global_model().state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    # Norms of timm and adapters begin as zeros, behind which nothing moves in the first steps.
    for part in (".base_layer.weight", ".perada_added."):
        assert any(part in name for name in moved)
    run.save(tmp_path)
    loaded = perada.Run.load(tmp_path, backbone=network).global_model().state_dict()
    assert loaded.keys() == after.keys()
    assert all(torch.equal(loaded[name], after[name]) for name in after)
