# SPDX-License-Identifier: Apache-2.0
"""The networks as a user of any framework would write them, and local training by a plain loop."""

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.tasks import NUM_CLASSES, PROX_STRENGTH, State, Task

BLOCK_CONVOLUTION = re.compile(r"layer\d+\.\d+\.conv\d+")
"""Convolutions that a residual adapter follows, if they are of 3×3 pixels."""
HEAD = "fc."
"""How names of the head's tensors begin, in the networks that FedRep trains."""
LORA_TARGETS = r".*attn\.(qkv|proj)"


class FedAvgCNN(nn.Module):
    """The default network of PFLlib and FL-bench: two convolutions, two linear layers, 582,026 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2))
        self.conv2 = nn.Sequential(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2))
        self.fc1 = nn.Sequential(nn.Linear(1024, 512), nn.ReLU())
        self.fc = nn.Linear(512, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of images (B, 1, 28, 28)."""
        features = self.conv2(self.conv1(x)).flatten(1)
        return self.fc(self.fc1(features))


class ResidualAdapter(nn.Module):
    """A convolution, and behind it ``x + project(norm(x))``: what a peer's user writes for residual adapters."""

    def __init__(self, base_layer: nn.Conv2d) -> None:
        super().__init__()
        channels = base_layer.out_channels
        self.base_layer = base_layer
        self.norm = nn.BatchNorm2d(channels)
        self.project = nn.Conv2d(channels, channels, kernel_size=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the adapted output of the convolution."""
        x = self.base_layer(x)
        return x + self.project(self.norm(x))


def build_network(task: Task) -> nn.Module:
    """Return a task's network with its adapters. Only what is trained requires gradients."""
    if task.network == "fedavg_cnn":
        return FedAvgCNN()
    import timm  # FedAvgCNN does without it, and it takes seconds

    options = {"img_size": task.side} if "vit" in task.network else {}
    network = timm.create_model(task.network, num_classes=NUM_CLASSES, **options)
    if task.adapter == "residual":
        _add_residual_adapters(network)
    elif task.adapter == "lora":
        network = _with_lora(network)
    return network


def _add_residual_adapters(network: nn.Module) -> None:
    """Put adapters behind convolutions; train them, the head, and all norms but those of shortcuts."""
    network.requires_grad_(False)
    convolutions = []
    for name, module in network.named_modules():
        if BLOCK_CONVOLUTION.fullmatch(name) and module.kernel_size == (3, 3):
            convolutions.append((name, module))
        if isinstance(module, nn.BatchNorm2d) and "downsample" not in name:
            module.requires_grad_(True)
    for name, convolution in convolutions:
        parent_name, _, attribute = name.rpartition(".")
        adapter = ResidualAdapter(convolution)
        setattr(network.get_submodule(parent_name), attribute, adapter)
    network.get_submodule("fc").requires_grad_(True)


def _with_lora(network: nn.Module) -> nn.Module:
    """Return the network with PEFT's LoRA in its attention layers; its head is trained, too."""
    import peft

    config = peft.LoraConfig(target_modules=LORA_TARGETS, modules_to_save=["head"])
    return peft.get_peft_model(network, config).get_base_model()


def train_mode(network: nn.Module) -> None:
    """Put a network in training mode, but frozen norms with running statistics in evaluation mode."""
    network.train()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d) and not module.weight.requires_grad:
            module.eval()


def trained_state(network: nn.Module) -> State:
    """Return copies of the trained parameters, and of the running statistics of trained norms."""
    state = {}
    for module_name, module in network.named_modules():
        is_trained = False
        for name, parameter in module.named_parameters(module_name, recurse=False):
            if parameter.requires_grad:
                state[name] = parameter.detach().clone()
                is_trained = True
        if not is_trained:
            continue
        for name, buffer in module.named_buffers(module_name, recurse=False):
            if buffer.is_floating_point():
                state[name] = buffer.clone()
    return state


def head_of(state: State) -> State:
    """Return the tensors of the head."""
    return {name: value for name, value in state.items() if name.startswith(HEAD)}


def body_of(state: State) -> State:
    """Return the tensors of the body."""
    return {name: value for name, value in state.items() if not name.startswith(HEAD)}


def train_head_then_body(
    network: nn.Module, start: State, batches: Sequence[tuple[Tensor, Tensor]], lr: float
) -> State:
    """Return a client's state after FedRep's steps: on the head with the first half of the batches, then on the body.

    Args:
        network: The network to train in.
        start: The body that the client received, and its own head.
        batches: Images and labels of each step.
        lr: Learning rate.
    """
    half = len(batches) // 2
    with_new_head = train_client(network, start, batches[:half], lr, part="head")
    return train_client(network, with_new_head, batches[half:], lr, part="body")


def train_client(
    network: nn.Module,
    start: State,
    batches: Iterable[tuple[Tensor, Tensor]],
    lr: float,
    anchor: State | None = None,
    part: Literal["all", "head", "body"] = "all",
) -> State:
    """Return a client's state after a step of SGD on each batch.

    Args:
        network: The network to train in.
        start: The trained part of the network before the first step.
        batches: Images and labels of each step.
        lr: Learning rate.
        anchor: State that Ditto's personal model is pulled towards.
        part: What is trained, while the rest is frozen.
    """
    network.load_state_dict(start, strict=False)
    train_mode(network)
    trainable = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    trained = {"all": trainable, "head": head_of(trainable), "body": body_of(trainable)}[part]
    for name, parameter in trainable.items():
        parameter.requires_grad_(name in trained)
    optimizer = torch.optim.SGD(trained.values(), lr=lr)
    for x, y in batches:
        loss = F.cross_entropy(network(x), y)
        if anchor is not None:
            distance = torch.zeros(())
            for name, parameter in trained.items():
                distance = distance + (parameter - anchor[name]).square().sum()
            loss = loss + PROX_STRENGTH / 2 * distance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for parameter in trainable.values():
        parameter.requires_grad_()
    return trained_state(network)
