# SPDX-License-Identifier: Apache-2.0
"""The folded engine against the loop over clients, and both against the plain model."""

import pytest
import timm
import torch
from torch import nn
from torch.func import functional_call
from transformers import ViTConfig, ViTForImageClassification

from perada.backbones import build_backbone, insert_adapter
from perada.engine import Engine
from perada.seeding import generator
from perada.states import get_state, parameter_keys, stack, train_mode

CLIENTS, ROWS = 3, 5
COUNTS = (5, 3, 4)


def backbone(name, tmp_path):
    if name == "hf_vit":
        config = ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            image_size=16,
            patch_size=4,
            num_labels=4,
        )
        ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
        return build_backbone(f"hf:{tmp_path / 'vit'}", 4, pretrained=str(tmp_path / "vit")), 16
    if name == "vit":
        return build_backbone("test_vit", 4, pretrained=False, image_size=32), 32
    if name == "module":
        model = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)
        )
        return build_backbone(model, 4), 16
    model = timm.create_model("resnet18" if name == "resnet18" else "test_resnet", num_classes=4, zero_init_last=False)
    built = build_backbone(model, 4)
    return built, 32


CASES = [
    ("resnet18", "residual"),
    ("resnet", "residual"),
    ("resnet", "lora"),
    ("resnet", "head"),
    ("resnet", "bias_norm"),
    ("resnet", "full"),
    ("vit", "lora"),
    ("vit", "bottleneck"),
    ("vit", "bias_norm"),
    ("vit", "full"),
    ("hf_vit", "lora"),
    ("hf_vit", "bottleneck"),
    ("hf_vit", "full"),
    ("module", "full"),
    ("module", "bias_norm"),
]


def random_states(model, clients):
    """Different states with tensors that make every layer count."""
    states = []
    for client in range(clients):
        state = get_state(model)
        random = generator(0, "test", client)
        for key, value in state.items():
            if value.is_floating_point():
                noise = torch.randn(value.shape, generator=random)
                state[key] = value + (0.1 * noise.abs() if "running_var" in key else 0.1 * noise)
        states.append(state)
    return states


def leaves(model, states):
    trained = set(parameter_keys(model))
    return {k: v.clone().requires_grad_(k in trained) for k, v in stack(states).items()}


@pytest.mark.parametrize(("name", "adapter"), CASES)
def test_folded_equals_plain_model_run_client_by_client(name, adapter, tmp_path):
    built, size = backbone(name, tmp_path)
    options = {"dropout": 0.0} if adapter == "residual" else {}
    model = insert_adapter(built, adapter, **options).model
    states = random_states(model, CLIENTS)
    x = torch.randn(CLIENTS, ROWS, 3, size, size, generator=generator(0, "x"))
    engine = Engine(model, "folded")
    stacked = leaves(model, states)
    logits = engine.logits(stacked, x, training=True, counts=COUNTS)
    real = torch.arange(ROWS) < torch.tensor(COUNTS)[:, None]
    logits[real].square().sum().backward()
    for client, count in enumerate(COUNTS):
        plain = leaves(model, [states[client]])
        train_mode(model)
        alone = {k: v[0] for k, v in plain.items()}
        expected = functional_call(model, alone, (x[client, :count],))
        torch.testing.assert_close(logits[client, :count], expected, rtol=1e-4, atol=1e-5)
        expected.square().sum().backward()
        largest = max(value.grad.norm() for value in plain.values() if value.grad is not None)
        for key in plain:
            if stacked[key].grad is not None:
                gradient = plain[key].grad[0]
                error = (stacked[key].grad[client] - gradient).norm()
                # Attention does not depend on the keys' bias: its gradient is rounding error of the others.
                assert error < 1e-3 * gradient.norm() + 1e-6 * largest, (client, key, error / gradient.norm())
            else:
                torch.testing.assert_close(stacked[key][client], plain[key][0], rtol=1e-4, atol=1e-5)
