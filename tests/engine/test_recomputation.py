# SPDX-License-Identifier: Apache-2.0
"""Gradient checkpointing: the same gradients to the bit, with less memory."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import TensorDataset
from transformers import ViTConfig, ViTForImageClassification

import perada
from perada.algorithms.registry import methods
from perada.core.seeding import Streams, generator, seeded
from perada.core.states import expand, get_state, parameter_keys
from perada.engine import Engine
from perada.engine.recomputation import RecomputedBlock
from perada.models.adapted import insert_adapter
from perada.models.backbones import build_backbone
from perada.models.blocks import repeated_blocks
from tests.net import arguments_of
from tests.options import sections
from tests.rejections import rejects

CLIENTS = 3
ROWS = 4
SIDE = 32
CLASSES = 5
COUNTS = (4, 3, 4)


class Block(nn.Module):
    """A residual block with BatchNorm and dropout, as a layer and as a function that draws from torch's stream."""

    def __init__(self, momentum=0.1):
        super().__init__()
        self.first = nn.Conv2d(6, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6, momentum=momentum)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        y = self.drop(self.norm(self.first(x)).relu_())
        return x + F.dropout(self.second(y), 0.1, self.training)


class Normed(nn.Module):
    """A block whose power iteration changes buffers in each pass, and its output with them."""

    def __init__(self):
        super().__init__()
        self.first = spectral_norm(nn.Conv2d(6, 6, 3, padding=1))
        self.second = nn.Conv2d(6, 6, 1)

    def forward(self, x):
        return x + self.second(self.first(x).relu())


class Dense(nn.Module):
    """A block on the outputs of all former ones, a list that the network extends after the call."""

    def __init__(self, inputs):
        super().__init__()
        self.first = nn.Conv2d(6 * inputs, 8, 1)
        self.second = nn.Conv2d(8, 6, 3, padding=1)

    def forward(self, features):
        return self.second(self.first(torch.cat(features, 1)).relu())


class DenseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Dense(1), Dense(2), Dense(3)])

    def forward(self, x):
        features = [x]
        for block in self.blocks:
            features.append(block(features))
        return features[-1]


def own_network(*blocks, classes=CLASSES):
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, classes)]
    return nn.Sequential(nn.Conv2d(3, 6, 3, stride=4), *blocks, *head)


def model(name, adapter, options, folder):
    torch.manual_seed(0)
    if name == "hf_vit":
        config = ViTConfig(
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=24,
            image_size=SIDE,
            patch_size=8,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            num_labels=CLASSES,
        )
        ViTForImageClassification(config).save_pretrained(folder / "vit")
        backbone = build_backbone(f"hf:{folder / 'vit'}", CLASSES, pretrained=str(folder / "vit"))
    elif name == "own":
        backbone = build_backbone(own_network(Block(), Block(momentum=None), Block()), CLASSES)
    elif name == "spectral":
        backbone = build_backbone(own_network(Normed(), Normed()), CLASSES)
    elif name == "dense":
        backbone = build_backbone(own_network(DenseNet()), CLASSES)
    elif name == "twice":
        block = Block()
        backbone = build_backbone(own_network(block, Block(), block), CLASSES)
    else:
        backbone = build_backbone(name, CLASSES, pretrained=False, image_size=SIDE if "vit" in name else None)
    return insert_adapter(backbone, adapter, **options).model.double()


def leaves(net, seed=0):
    """States (C, ...) that differ between clients and from the network's own tensors."""
    trained = set(parameter_keys(net))
    states = {}
    for key, value in expand(get_state(net), CLIENTS).items():
        states[key] = value.clone()
        if key in trained:
            noise = torch.randn(value.shape, generator=generator(seed, "state"), dtype=value.dtype)
            states[key] = (states[key] + 0.1 * noise).requires_grad_()
    return states


def images(seed=0):
    return torch.randn(CLIENTS, ROWS, 3, SIDE, SIDE, generator=generator(seed, "x"), dtype=torch.float64)


def run(engine, states, seed=0, counts=COUNTS, x=None, training=True):
    streams = Streams.derived(0, "dropout", seed, clients=range(CLIENTS))
    with seeded(seed, "test"):
        return engine.logits(
            states, images(seed) if x is None else x, training=training, counts=counts, streams=streams
        )


def results(logits, *stacks):
    """What a pass has changed: logits, gradients and buffers."""
    result = [logits.detach()]
    for states in stacks:
        result += [value.grad if value.requires_grad else value for value in states.values()]
    return result


def assert_same_bits(expected, found):
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


CASES = [
    ("own", "full", {}, ("folded", "loop")),
    ("test_vit", "lora", {"lora_dropout": 0.2}, ("folded", "loop")),
    ("hf_vit", "lora", {"lora_dropout": 0.2}, ("folded", "loop")),
    ("test_resnet", "residual", {"dropout": 0.2}, ("folded",)),
    ("twice", "full", {}, ("folded",)),
    ("dense", "full", {}, ("folded",)),
    ("spectral", "full", {}, ("loop",)),
    ("test_vit", "prompt", {}, ("folded",)),
    ("test_vit", "lora", {"use_dora": True, "lora_dropout": 0.2}, ("folded",)),
    ("test_vit", "ia3", {}, ("folded",)),
    ("test_vit", "full", {}, ("folded",)),
    ("test_resnet", "full", {}, ("folded", "loop")),
    ("test_resnet", "lora", {"lora_dropout": 0.2}, ("folded", "loop")),
    ("tf_efficientnet_lite0", "residual", {}, ("folded", "loop")),
    ("test_convnext", "full", {}, ("loop",)),
    ("regnety_002", "bias_norm", {}, ("folded", "loop")),
]
QUICK = 8


@pytest.mark.parametrize(
    ("name", "adapter", "options", "kind"),
    [
        pytest.param(name, adapter, options, kind, marks=[pytest.mark.slow] if number >= QUICK else [])
        for number, (name, adapter, options, kinds) in enumerate(CASES)
        for kind in kinds
    ],
)
def test_gradients_and_statistics_are_those_of_a_plain_pass(name, adapter, options, kind, tmp_path):
    """Two passes come before the backward pass, the second in another mode with other clients' tensors and streams."""
    found = []
    for recomputes in (False, True):
        net = model(name, adapter, options, tmp_path)
        engine = Engine(net, kind, recomputed=repeated_blocks(net, name) if recomputes else ())
        states = leaves(net)
        others = leaves(net, seed=1)
        logits = run(engine, states)
        other_logits = run(engine, others, seed=1, counts=None, training=False)
        (logits.square().sum() + other_logits.square().sum()).backward()
        found.append([*results(logits, states, others), other_logits.detach()])
    assert_same_bits(*found)


@pytest.mark.parametrize("kind", ["folded", "loop"])
def test_the_network_stays_as_it_is(kind, tmp_path):
    net = model("own", "full", {}, tmp_path)
    modules = list(net.modules())
    tensors = {key: value.clone() for key, value in net.state_dict().items()}
    engine = Engine(net, kind, recomputed=repeated_blocks(net, "own"))
    run(engine, leaves(net)).sum().backward()
    assert sum(isinstance(module, RecomputedBlock) for module in engine.runs.modules()) == 3
    assert list(net.modules()) == modules
    assert all(torch.equal(tensors[key], value) for key, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    # Nor does it stay in the mode of the pass, whose block may have run last.
    engine.runs.eval()
    assert not any(module.training for module in engine.runs.modules())


def test_a_pass_without_gradients_records_nothing(tmp_path, monkeypatch):
    net = model("own", "full", {}, tmp_path)
    engine = Engine(net, recomputed=repeated_blocks(net, "own"))
    monkeypatch.setattr("perada.engine.recomputation.checkpoint", None)
    with torch.no_grad():
        expected = run(Engine(net), leaves(net), training=False)
        assert torch.equal(run(engine, leaves(net), training=False), expected)


def test_features_replace_images_in_recomputed_blocks(tmp_path):
    """The first adapted block begins with constant layers, whose outputs are cut from the features of its own pass."""
    net = model("test_vit", "lora", {"last_blocks": 2, "lora_dropout": 0.2}, tmp_path)
    found = []
    for blocks in ((), repeated_blocks(net, "test_vit")):
        engine = Engine(net, recomputed=blocks)
        assert engine.find_trunk(images()[0, 0]) is not None
        features = [engine.features(images(seed).flatten(0, 1)).unflatten(0, (CLIENTS, ROWS)) for seed in (0, 1)]
        states = leaves(net)
        logits = run(engine, states, x=features[0])
        run(engine, leaves(net), seed=1)
        run(engine, leaves(net), seed=1, x=features[1][:, :2], counts=None)
        logits.square().sum().backward()
        found.append(results(logits, states))
    assert_same_bits(*found)


def test_attention_in_half_precision_is_that_of_the_pass(tmp_path):
    """Under autocast perada computes attention by itself, and in the backward pass it must do so again."""
    net = model("test_vit", "lora", {}, tmp_path).float()
    found = []
    for blocks in ((), repeated_blocks(net, "test_vit")):
        engine = Engine(net, recomputed=blocks)
        states = leaves(net)
        with torch.autocast("cpu", torch.bfloat16):
            logits = run(engine, states, x=images().float())
        logits.square().sum().backward()
        found.append(results(logits, states))
    assert_same_bits(*found)


@pytest.mark.parametrize(("name", "kind"), [("own", "folded"), ("spectral", "loop")])
def test_gradients_are_computed_twice_from_one_pass(name, kind, tmp_path):
    """The second time, too, blocks begin with the buffers of the pass."""
    found = []
    for recomputes in (False, True):
        net = model(name, "full", {}, tmp_path)
        states = leaves(net)
        engine = Engine(net, kind, recomputed=repeated_blocks(net, name) if recomputes else ())
        logits = run(engine, states)
        logits.square().sum().backward(retain_graph=True)
        logits.sum().backward()
        found.append(results(logits, states))
    assert_same_bits(*found)


@pytest.mark.parametrize("kind", ["folded", "loop"])
def test_only_the_inputs_of_blocks_are_saved(kind):
    """Each of N blocks has two linear layers: a plain pass saves the inputs of both, else those of blocks."""
    blocks = 6
    width = 16
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(blocks)]
    net = nn.Sequential(*layers, nn.Linear(width, CLASSES)).double()
    x = torch.randn(CLIENTS, ROWS, width, dtype=torch.float64, generator=generator(0, "x"))

    def saved_numbers(recomputed):
        states = leaves(net)
        weights = {value.untyped_storage()._cdata for value in states.values()}
        storages = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                storages[storage._cdata] = storage
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            logits = Engine(net, kind, recomputed=recomputed).logits(states, x, training=True)
        assert logits.requires_grad
        return sum(storage.nbytes() for storage in storages.values()) // 8

    # The clients' first inputs are views of the same images.
    inputs = CLIENTS * ROWS * width
    assert saved_numbers(()) == (2 * blocks + 1) * inputs
    assert saved_numbers([str(block) for block in range(blocks)]) == (blocks + 1) * inputs


def test_a_tensor_that_changes_before_the_backward_pass_is_an_error(tmp_path):
    net = model("own", "full", {}, tmp_path)
    engine = Engine(net, recomputed=repeated_blocks(net, "own"))
    states = leaves(net)
    logits = run(engine, states)
    with torch.no_grad():
        states["2.first.bias"].add_(1)
    with pytest.raises(RuntimeError, match=r"'bias' of shape \(3, 6\)"):
        logits.sum().backward()


def finetune(backbone, double=True, **options):
    """Train for two rounds of two steps in double precision, and return the states of all models."""
    dtype = torch.float64 if double else torch.float32
    random_images = generator(0, "images")

    def part(count):
        pixels = torch.randn(count, 3, SIDE, SIDE, generator=random_images, dtype=dtype)
        return TensorDataset(pixels, torch.arange(count) % 4)

    public = TensorDataset(part(8).tensors[0])
    settings = {
        "rounds": 2,
        "local_steps": 2,
        "batch_size": 6,
        "momentum": 0.9,
        "distill_steps": 2,
        "distill_batch_size": 4,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "pretrained": False,
    }
    data = perada.FederatedData([part(count) for count in (12, 6, 9)], public=public, num_classes=4)
    trained = perada.finetune(backbone, data, **sections(**settings | options))
    states = trained.states("global")
    if trained.personalized:
        states = states + trained.states("personal")
    return states


@pytest.fixture
def num_recomputed(monkeypatch):
    """A list with an entry for each call of a block that is recomputed."""
    calls = []
    checkpoint = perada.engine.recomputation.checkpoint

    def counted(*args, **options):
        calls.append(1)
        return checkpoint(*args, **options)

    monkeypatch.setattr("perada.engine.recomputation.checkpoint", counted)
    return calls


def assert_same_run(num_recomputed, train):
    """Compare the final states of a run with and without checkpointing."""
    expected = train(checkpointing=False)
    assert not num_recomputed
    result = train(checkpointing=True)
    assert num_recomputed
    for one, other in zip(expected, result, strict=True):
        assert_same_bits(list(one.values()), list(other.values()))


def test_a_run_ends_with_the_same_bits(num_recomputed):
    def train(checkpointing):
        torch.manual_seed(0)
        network = own_network(Block(), Block(momentum=None), classes=4).double()
        return finetune(network, rounds=1, adapter="full", algorithm="ditto", checkpointing=checkpointing)

    assert_same_run(num_recomputed, train)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not use")
@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize("algorithm", list(methods()))
def test_all_algorithms_train_to_the_same_bits(algorithm, engine, num_recomputed):
    """BatchNorm and dropout are in the network, which is in double precision."""
    method = methods()[algorithm]
    arguments = arguments_of(algorithm) | {"algorithm": method.make(), "server_rule": method.server_rule or "mean"}
    if arguments["adapter"] == "residual":
        arguments["adapter_options"] = {"dropout": 0.2, "init_std": 0.05}

    def train(checkpointing):
        torch.manual_seed(0)
        network = build_backbone("test_resnet", 4, pretrained=False).model.double()
        return finetune(network, engine=engine, checkpointing=checkpointing, **arguments)

    assert_same_run(num_recomputed, train)


def test_networks_without_repeated_blocks_are_rejected():
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    with rejects("checkpointing", True, "Sequential"):
        finetune(network, adapter="full", checkpointing=True)


def test_compiled_passes_are_rejected():
    with rejects("checkpointing", True, "torch_compile"):
        perada.Training(checkpointing=True, torch_compile={"dynamic": False})


@pytest.mark.parametrize("value", ["always", 2, None])
def test_other_values_are_rejected(value):
    with rejects("checkpointing", value):
        perada.Training(checkpointing=value)


@pytest.mark.parametrize("engine", ["folded", "loop"])
def test_private_gradients_are_rejected(engine):
    privacy = {"noise_multiplier": 1.0, "max_norm": 1.0, "secure_rng": False}
    with rejects("checkpointing", True, "physical_batch_size"):
        finetune("test_vit", False, adapter="lora", privacy=privacy, engine=engine, checkpointing=True, image_size=SIDE)


class NumpyNoise(Block):
    def forward(self, x):
        return super().forward(x) * float(np.random.rand())


class PythonNoise(Block):
    def forward(self, x):
        return super().forward(x) * random.random()


class InPlace(Block):
    """It changes its input, which the block before it returns."""

    def forward(self, x):
        return super().forward(x.mul_(2))


class Counting(Block):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x * self.calls)


@pytest.mark.parametrize("block", [NumpyNoise, PythonNoise, InPlace, Counting])
def test_blocks_that_compute_something_else_again_are_rejected(block):
    torch.manual_seed(0)
    with rejects("checkpointing", True, "Sequential"):
        finetune(
            own_network(Block(), block(), block(), classes=4).double(),
            adapter="full",
            engine="loop",
            checkpointing=True,
        )
