# SPDX-License-Identifier: Apache-2.0
"""An estimate of the memory that the local steps of a round take."""

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from perada.core.seeding import Streams, seeded
from perada.core.states import State, expand, get_state, parameter_keys
from perada.engine.chunk_sizes import activation_bytes
from perada.engine.engine import Engine

OPTIMIZER_NUMBERS = {"sgd": 0, "adam": 2, "adamw": 2}
"""Numbers that an optimiser stores for each weight; SGD with momentum stores one."""
MOST_ROWS = 16
"""Number of images of a client with which activations are counted, at most."""
SMALL_IMAGE = 3 * 64 * 64
"""Number of values in an image up to which so many are used."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that the local steps of a round take at most.

    Attributes:
        weight_bytes: The network.
        state_bytes: The trained tensors of all clients that train at a time, their gradients and optimiser states.
        activation_bytes: What a step of these clients keeps for its backward pass.
        public_logit_bytes: Logits of the public images at the server.
    """

    weight_bytes: int
    state_bytes: int
    activation_bytes: int
    public_logit_bytes: int = 0

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, part.name) for part in fields(self))

    def describe(self, num_clients: int) -> str:
        """Return the estimate as a sentence.

        Args:
            num_clients: Number of clients that train at a time.

        >>> MemoryEstimate(3_000_000, 1_000_000, 8_000_000).describe(2)
        'memory of training: about 12 MB (network 3, activations of 2 clients 8, their states and optimisers 1)'
        """

        def megabytes(number: int) -> str:
            return f"{number / 1e6:,.0f}"

        parts = [
            f"network {megabytes(self.weight_bytes)}",
            f"activations of {num_clients} clients {megabytes(self.activation_bytes)}",
            f"their states and optimisers {megabytes(self.state_bytes)}",
        ]
        if self.public_logit_bytes:
            parts.append(f"public logits {megabytes(self.public_logit_bytes)}")
        return f"memory of training: about {megabytes(self.total)} MB ({', '.join(parts)})"


def optimizer_numbers(optimizer: str, momentum: float) -> int:
    """Return how many numbers an optimiser of local training stores for each weight.

    >>> optimizer_numbers("sgd", momentum=0.9), optimizer_numbers("adamw", momentum=0.0)
    (1, 2)
    """
    return OPTIMIZER_NUMBERS[optimizer] + (optimizer == "sgd" and momentum > 0)


def network_bytes(engine: Engine) -> int:
    """Return the bytes of a network's parameters and buffers, of which shared ones count once."""
    storages = {}
    for tensor in [*engine.model.parameters(), *engine.model.buffers()]:
        storage = tensor.untyped_storage()
        storages[StorageWeakRef(storage).cdata] = storage.nbytes()
    return sum(storages.values())


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of activations that a training pass keeps for its backward pass.

    Attributes:
        fixed: Bytes that do not depend on the number of images, such as matrices made of frozen convolutions.
        per_image: Bytes for each image.
    """

    fixed: int
    per_image: float

    def of(self, num_images: int) -> int:
        """Return the bytes of a pass of so many images."""
        return self.fixed + math.ceil(self.per_image * num_images)


def count_activations(engine: Engine, image: Tensor, batch_size: int) -> ActivationBytes | None:
    """Count the activations that a training pass keeps, in passes of a few images through the engine's own layers.

    Stacked layers may keep more or less than those of the single model. Where blocks are recomputed, activations are
    counted by shapes instead (:func:`.activation_bytes`).

    Args:
        engine: The engine.
        image: A prepared image (channels, height, width) on the model's device.
        batch_size: Images of a client in a step.

    Returns:
        The bytes; None if they cannot be counted.
    """
    if engine.is_recomputing:
        image_bytes = activation_bytes(engine.model, image, engine.recomputed)
        return None if image_bytes is None else ActivationBytes(0, image_bytes)
    # Of large images few show as much. BatchNorm rejects a single one.
    num_images = max(2, min(batch_size, MOST_ROWS if image.numel() <= SMALL_IMAGE else 2))
    try:
        bytes_of_one = _kept_bytes(engine, image, 1, num_images)
        bytes_of_two = _kept_bytes(engine, image, 2, num_images)
    except Exception:  # networks raise errors of any kind for images that they do not accept
        return None
    bytes_of_client = bytes_of_two - bytes_of_one
    return ActivationBytes(max(0, bytes_of_one - bytes_of_client), bytes_of_client / num_images)


def _kept_bytes(engine: Engine, image: Tensor, num_clients: int, num_images: int) -> int:
    """Return the bytes that a training pass of some clients with so many images each keeps."""
    trained = set(parameter_keys(engine.model))
    states: State = {}
    for key, value in expand(get_state(engine.model), num_clients).items():
        states[key] = value.clone().requires_grad_(key in trained)
    images = image.expand(num_clients, num_images, *image.shape).contiguous()
    own = set()
    for tensor in [*states.values(), images, *engine.model.parameters(), *engine.model.buffers()]:
        own.add(StorageWeakRef(tensor.untyped_storage()).cdata)
    # Holding the storages keeps their addresses unique.
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = StorageWeakRef(storage).cdata
        if address not in own:
            kept[address] = storage
        return tensor

    streams = Streams.derived(0, "memory", clients=range(num_clients))
    with torch.enable_grad(), seeded(0, "memory"), saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.logits(states, images, training=True, streams=streams)
    return sum(storage.nbytes() for storage in kept.values())
