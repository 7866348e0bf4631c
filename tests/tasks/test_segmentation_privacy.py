# SPDX-License-Identifier: Apache-2.0
"""Segmentation with privacy: clients clipped in secure sums, and which networks can be trained privately."""

import copy

import pytest
import torch
from torch.nn import functional as F

import perada
from perada.core.checks import OptionError
from perada.data import FederatedDataModule
from perada.data.batches.transforms import prepare_images
from perada.tasks import Segmentation
from tests.masks import UNet, dice_loss, hospitals

OPTIONS = {"pretrained": False, "rounds": 1, "local_steps": 1, "lr_local": 0.1, "seed": 1}
PRIVACY = {"noise_multiplier": 1.0, "delta": 1e-3}


def test_clients_are_clipped_as_a_whole_in_secure_sums():
    """With nearly no noise, the update is the mean of the clients' clipped changes, by a plain loop."""
    torch.manual_seed(0)
    network = UNet()
    data = hospitals()
    run = perada.finetune(
        network,
        FederatedDataModule(data, batch_size="full", task=Segmentation("both")),
        algorithm="fedavg",
        adapter="full",
        client_privacy={"noise_multiplier": 1e-5, "max_norm": 0.05, "delta": 0.01},
        secure_sums={},
        **OPTIONS,
    )
    total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in network.named_parameters()}
    for dataset in data.train:
        images, masks = dataset.tensors
        model = copy.deepcopy(network)
        logits = model(prepare_images(images))
        loss = F.cross_entropy(logits, masks.long()) + dice_loss(logits, masks)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        change = [-0.1 * gradient.double() for gradient in gradients]
        norm = torch.cat([part.flatten() for part in change]).norm()
        assert norm > 0.05
        for name, part in zip(total, change, strict=True):
            total[name] += part * 0.05 / norm
    trained = dict(run.global_model().named_parameters())
    for name, before in network.named_parameters():
        torch.testing.assert_close((trained[name] - before).double(), total[name] / 3, rtol=1e-2, atol=2e-6)


@pytest.mark.slow
def test_a_named_network_whose_decoder_has_group_norm_is_trained_privately():
    pytest.importorskip("segmentation_models_pytorch")
    run = perada.finetune(
        "smp:fpn-resnet18", hospitals(2), algorithm="fedavg", adapter="lora", privacy=PRIVACY, **OPTIONS
    )
    assert run.metrics["clients"]["privacy/release_epsilon"][0] > 0


@pytest.mark.slow
def test_a_decoder_without_norm_is_trained_privately():
    smp = pytest.importorskip("segmentation_models_pytorch")
    torch.manual_seed(0)
    network = smp.Unet("resnet18", encoder_weights=None, classes=3, decoder_use_norm=False)
    adapter = {"modules_to_save": ["decoder"], "target_modules": ["layer4.1.conv2"]}
    run = perada.finetune(
        network,
        hospitals(2),
        algorithm="fedavg",
        adapter="lora",
        adapter_options=adapter,
        privacy=PRIVACY,
        **OPTIONS,
    )
    assert run.metrics["clients"]["privacy/release_epsilon"][0] > 0


def test_a_decoder_with_batch_norm_is_rejected_with_networks_that_can_be_trained():
    pytest.importorskip("segmentation_models_pytorch")
    expected = r"BatchNorm.*'smp:fpn-ENCODER'.*decoder_use_norm=False"
    with pytest.raises(OptionError, match=expected):
        perada.finetune("smp:unet-resnet18", hospitals(2), algorithm="fedavg", privacy=PRIVACY, **OPTIONS)
