# SPDX-License-Identifier: Apache-2.0
"""The estimate of the memory of a step, against what a pass keeps, and the choice of gradient checkpointing by it."""

import logging

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import TensorDataset

import perada
from perada.core.seeding import Streams, generator
from perada.core.states import expand, get_state, parameter_keys
from perada.engine import Engine
from perada.engine.memory_estimate import count_activations
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from tests.options import sections

CASES = [
    ("test_vit", "lora", 32),
    ("test_resnet", "full", 32),
    ("resnet18", "residual", 64),
    ("vit_tiny_patch16_224", "lora", 96),
    ("convnextv2_atto", "lora", 64),
]


def kept_bytes(model, side, clients, rows):
    """What a folded pass keeps, of storages that belong to none of its inputs."""
    states = {}
    for key, value in expand(get_state(model), clients).items():
        states[key] = value.clone().requires_grad_(key in parameter_keys(model))
    x = torch.randn(clients, rows, 3, side, side)
    inputs = {value.untyped_storage().data_ptr() for value in [x, *states.values(), *model.state_dict().values()]}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in inputs:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        streams = Streams.derived(0, "dropout", clients=range(clients))
        Engine(model, "folded").logits(states, x, training=True, streams=streams)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(
    ("name", "adapter", "side"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (number > 1)) for number, case in enumerate(CASES)],
)
def test_activations_are_those_of_a_larger_pass(name, adapter, side):
    model = insert_adapter(build_backbone(name, 5, pretrained=False, image_size=side), adapter).model
    clients, rows = 5, 12
    activations = count_activations(Engine(model, "folded"), torch.randn(3, side, side), rows)
    assert activations.of(clients * rows) == pytest.approx(kept_bytes(model, side, clients, rows), rel=0.15)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 48), nn.Linear(48, 12)

    def forward(self, x):
        return x + self.second(self.first(x).relu())


def train(checkpointing, layer=Block, **options):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 12), layer(), layer(), nn.Linear(12, 3))
    random = generator(0, "images")
    parts = [TensorDataset(torch.rand(6, 3, 4, 4, generator=random), torch.arange(6) % 3) for _ in range(2)]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    common = {"algorithm": "fedavg", "adapter": "full", "rounds": 1, "local_steps": 2, "batch_size": 3}
    data = perada.FederatedData(parts, num_classes=3, public=TensorDataset(torch.rand(4, 3, 4, 4, generator=random)))
    run = perada.finetune(network, data, **sections(checkpointing=checkpointing, **(common | quiet | options)))
    return run.state("global")


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO)
    return lambda: " ".join(message for message in caplog.messages if "checkpointing" in message or "memory" in message)


@pytest.fixture
def recomputed(monkeypatch):
    """A list with an entry for each call of a block that is recomputed."""
    calls = []
    checkpoint = perada.engine.recomputation.checkpoint

    def counted(*args, **options):
        calls.append(1)
        return checkpoint(*args, **options)

    monkeypatch.setattr("perada.engine.recomputation.checkpoint", counted)
    return calls


def test_checkpointing_is_off_where_the_memory_is_enough(log, recomputed):
    train("auto")
    assert not recomputed
    assert "memory of training: about 0 MB" in log()
    assert "checkpointing=auto" not in log()


@pytest.mark.parametrize("engine", ["folded", "loop"])
def test_checkpointing_is_on_where_it_is_not(log, recomputed, monkeypatch, engine):
    expected = train(False, engine=engine)
    monkeypatch.setattr("perada.lightning.memory.host_memory", lambda: 1000)
    found = train("auto", engine=engine)
    assert recomputed
    assert "checkpointing=auto: on" in log()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.fixture
def estimates(monkeypatch):
    """A list with the estimate of each run."""
    made = []
    make = perada.lightning.memory.estimate_memory

    def recorded(*args):
        made.append(make(*args))
        return made[-1]

    monkeypatch.setattr("perada.lightning.memory.estimate_memory", recorded)
    return made


@pytest.mark.parametrize("share", [0.98, 1.02])
def test_on_a_gpu_its_free_memory_decides(log, recomputed, estimates, monkeypatch, share):
    """A GPU that a test replaces has a little less or more than an estimate of 80 % of it; the machine is not asked."""
    train("auto")
    assert not recomputed
    free = round(share * estimates[-1].total / 0.8)
    second_gpu = torch.device("cuda", 1)
    asked = []

    def free_and_total(device):
        asked.append(device)
        return free, 80 * 10**9

    on_device = perada.lightning.memory.usable_bytes
    monkeypatch.setattr("perada.lightning.memory.usable_bytes", lambda device: on_device(second_gpu))
    monkeypatch.setattr("torch.cuda.mem_get_info", free_and_total)
    monkeypatch.setattr("perada.lightning.memory.host_memory", lambda: pytest.fail("the machine's memory was asked"))
    train("auto")
    assert asked == [second_gpu]
    assert bool(recomputed) == (share < 1)
    assert ("checkpointing=auto: on" in log()) == (share < 1)


@pytest.mark.parametrize(
    ("layer", "options", "reason"),
    [
        (nn.ReLU, {}, "Sequential"),
        (Block, {"privacy": perada.Privacy(noise_multiplier=1.0), "batch_size": 3}, "private gradients"),
    ],
)
def test_where_it_cannot_be_used_it_is_off(log, recomputed, monkeypatch, layer, options, reason):
    monkeypatch.setattr("perada.lightning.memory.host_memory", lambda: 1000)
    train("auto", layer, **options)
    assert not recomputed
    assert "checkpointing=auto: off" in log()
    assert reason in log()


def test_public_logits_and_optimisers_are_counted(estimates):
    """4 public images of 3 numbers in double precision, and Adam's two numbers beside gradient and weight."""
    state = train("auto", algorithm="perada", optimizer="adam", distill_batch_size=4)
    trained = sum(value.nbytes for value in state.values())
    (estimate,) = estimates
    assert estimate.public_logit_bytes == 4 * 3 * 8
    assert estimate.state_bytes % (2 * 4 * trained) == 0
    assert estimate.weight_bytes >= trained
