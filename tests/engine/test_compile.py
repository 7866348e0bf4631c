# SPDX-License-Identifier: Apache-2.0
"""torch.compile: the same results, and no more compilations than there are kinds of passes."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.data import TensorDataset

import perada
from perada.core.seeding import Streams, generator
from perada.core.states import expand, get_state, parameter_keys
from perada.data import FederatedData
from perada.engine import Engine
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone

CLIENTS = 3
ROWS = 4
SIDE = 32
CLASSES = 5


def model(name, adapter):
    torch.manual_seed(0)
    if name == "small":
        layers = [nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.AdaptiveAvgPool2d(2)]
        return insert_adapter(
            build_backbone(nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, CLASSES)), CLASSES), adapter
        ).model
    backbone = build_backbone(name, CLASSES, pretrained=False, image_size=SIDE if "vit" in name else None)
    return insert_adapter(backbone, adapter).model


def step(engine, model, x, streams):
    states = {key: value.clone().requires_grad_(key in parameter_keys(model)) for key, value in x[1].items()}
    logits = engine.logits(states, x[0], training=True, streams=streams)
    (logits.square().mean((1, 2)).sum()).backward()
    return logits.detach(), {key: value.grad if value.requires_grad else value for key, value in states.items()}


# Raised within torch (the second by 2.11), which hides them unless warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "adapter", "kind"),
    [
        pytest.param("small", "full", "folded", marks=pytest.mark.slow),
        pytest.param("small", "full", "loop", marks=pytest.mark.slow),
        pytest.param("test_vit", "lora", "folded", marks=pytest.mark.slow),
        pytest.param("test_vit", "lora", "loop", marks=pytest.mark.slow),
        pytest.param("test_resnet", "residual", "folded", marks=pytest.mark.slow),
        pytest.param("test_resnet", "residual", "loop", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_step_is_the_eager_one_and_is_compiled_once(name, adapter, kind):
    torch.compiler.reset()
    net = model(name, adapter).double()  # in float32 rounding may take a value to the other side of a ReLU
    counter = CompileCounterWithBackend("aot_eager")
    eager = Engine(net, kind)
    compiled = Engine(net, kind, compile={"backend": counter, "fullgraph": True})
    states = {key: value.clone() for key, value in expand(get_state(net), CLIENTS).items()}
    for number in range(3):
        x = torch.randn(CLIENTS, ROWS, 3, SIDE, SIDE, generator=generator(number, "x"), dtype=torch.float64)
        streams = Streams.derived(0, "d", number, clients=range(CLIENTS))
        logits, gradients = step(eager, net, (x, states), streams)
        got, result = step(compiled, net, (x, states), streams)
        torch.testing.assert_close(got, logits, rtol=1e-9, atol=1e-12)
        for key, value in gradients.items():
            torch.testing.assert_close(result[key], value, rtol=1e-9, atol=1e-12)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_run_through_the_compiler():
    """PerAda with distillation, BatchNorm and dropout; clients of equal size, so that few shapes are compiled."""
    torch.compiler.reset()
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    network = nn.Sequential(*layers, nn.Linear(16, CLASSES))

    def images(n, seed):
        return torch.randn(n, 1, 8, 8, generator=generator(seed, "i"))

    train = [TensorDataset(images(12, seed), torch.arange(12) % CLASSES) for seed in range(3)]
    test = [TensorDataset(images(5, 9), torch.arange(5))] * 3
    runs = [
        perada.finetune(
            network,
            FederatedData(train, test, TensorDataset(images(8, 10))),
            adapter="full",
            rounds=2,
            batch_size=4,
            distillation={"steps": 3, "batch_size": 4, "optimizer": "sgd"},
            training={"torch_compile": compiled},
            logger=False,
            enable_progress_bar=False,
        )
        for compiled in (False, True)
    ]
    for role, client in (("global", None), ("personal", 0), ("personal", 2)):
        for key, value in runs[0].state(role, client).items():
            torch.testing.assert_close(runs[1].state(role, client)[key], value, rtol=1e-4, atol=1e-5)
