# SPDX-License-Identifier: Apache-2.0
"""The number of clients that train at the same time on a processor."""

import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from perada.core.rounds import RoundPlan, busiest_lane
from perada.core.states import parameter_keys
from perada.engine.without_numbers import meta_copy

CACHE_BYTES = 48 * 2**20
"""Size of states, gradients and optimiser states of several clients that train together.

Fewer clients stay closer to the core, in smaller caches, but take more steps, each with the training loop's own time.
With 600,000 parameters on two cores, 4 to 16 clients (28 to 112 MB) took about as long, and 2 half as long again.
"""
COPIES_WHILE_TRAINED = 2
"""Numbers stored for each weight that is trained, besides itself: its gradient and its momentum."""

ACTIVATION_BYTES = 384 * 2**20
"""Size of the activations that a pass keeps for its backward pass, where the backbone is frozen.

Operations on small maps are short of work if few clients share them. Many clients take more memory, which is mapped
anew in each step. As counted by :func:`activation_bytes`; processes grow by half as much again. On two cores, a round
of ResNet-18 at 32×32 with residual adapters (20 clients × 64 images in a step) took about as long with 7 clients
(324 MB) as with all 20, and a fifth longer with 4. A round of ViT-S/16 with LoRA (8 clients × 8 images in a step) took
a tenth to a fifth less time with 1 client (413 MB) than with all 8.
"""
SIDE_BY_SIDE_BYTES = 2**30
"""Size of the activations of all chunks that train side by side, where the backbone is frozen.

On two cores, with a chunk on each, both of these rounds took a tenth less time than with one chunk on both.
"""
MAX_BUSIEST_LANE = 1.1
"""Work of the busiest thread, relative to the mean, up to which threads side by side gain time behind a frozen
backbone: otherwise a single chunk that uses all cores is as fast."""


def is_mostly_trained(model: nn.Module) -> bool:
    """Return whether most bytes of a model are trained, so that few clients should train at a time on a processor.

    A step then reads and writes all weights of each client, and its matrix products, one for each client, gain nothing
    from more clients. If most of the model is frozen, and shared by all clients, more clients in a pass are faster.
    """
    # parameter_keys leaves out weights that only the server merges into, which are frozen in local training.
    trained = set(parameter_keys(model))
    trained_bytes = 0
    frozen_bytes = 0
    for name, parameter in model.named_parameters():
        if name in trained:
            trained_bytes += parameter.nbytes
        else:
            frozen_bytes += parameter.nbytes
    return trained_bytes > frozen_bytes


def clients_in_cache(state_bytes: int, trained_bytes: int) -> int:
    """Return how many clients fit the processor's caches while they take their local steps, at least 1.

    Args:
        state_bytes: Bytes of all states that a client has in a round: of each model, if it trains several.
        trained_bytes: Bytes of the parameters that it trains in the same steps.
    """
    client_bytes = state_bytes + COPIES_WHILE_TRAINED * trained_bytes
    return max(1, CACHE_BYTES // max(1, client_bytes))


def activation_bytes(model: nn.Module, image: Tensor, recomputed: Collection[str] = ()) -> int | None:
    """Return the bytes of activations that a forward pass of the model keeps for its backward pass, for each image.

    Of blocks that run again in the backward pass, it keeps the inputs. While they run again, the activations of one
    block at a time are added, so those of the largest one are counted, too.

    Nothing is computed: the pass runs on tensors without numbers. The layers of the folded model, and kernels of other
    devices, may keep a little more or less.

    Args:
        model: The single model in which its trained parameters require gradients.
        image: A prepared image (channels, height, width).
        recomputed: Paths of the blocks that run again.

    Returns:
        The bytes; None if the model cannot run without numbers, for example because it reads some.
    """
    copied = meta_copy(model)
    if copied is None:
        return None
    counter = _ActivationCounter(copied)
    for path in recomputed:
        block = copied.get_submodule(path)
        block.register_forward_pre_hook(counter.enter_block)
        block.register_forward_hook(counter.leave_block)
    # Two of them: BatchNorm cannot train on a single image whose map is a single pixel.
    images = image.new_empty(2, *image.shape, device="meta")
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            saved_tensors_hooks(counter.count, lambda tensor: tensor),
        ):
            copied(images)
    except Exception:  # a network of the caller's own may do anything with its numbers
        return None
    return math.ceil(counter.num_bytes() / len(images))


class _ActivationCounter:
    """Counts the activations that a pass keeps.

    They are counted by storage, as several operations may keep the same ones. Holding the storages keeps their
    addresses unique.

    Args:
        model: The model, whose own tensors are not counted.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self._weights = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in tensors}
        self._kept: dict[int, torch.UntypedStorage] = {}
        # Activations within blocks that run again, one dictionary for each call of a block.
        self._of_blocks: list[dict[int, torch.UntypedStorage]] = []
        self._current = self._kept

    def count(self, tensor: Tensor) -> Tensor:
        """Count a tensor that is kept for the backward pass, and return it."""
        storage = tensor.untyped_storage()
        address = StorageWeakRef(storage).cdata
        if address not in self._weights:
            self._current[address] = storage
        return tensor

    def enter_block(self, block: nn.Module, inputs: tuple[object, ...]) -> None:
        """Begin a block that runs again."""
        self._current = {}
        self._of_blocks.append(self._current)

    def leave_block(self, block: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        """End a block that runs again: its inputs are kept if any activations in it are."""
        has_activations = bool(self._current)
        self._current = self._kept
        for tensor in inputs:
            if has_activations and isinstance(tensor, Tensor):
                self.count(tensor)

    def num_bytes(self) -> int:
        """Return the bytes of all that is kept, and of what the largest of the blocks adds when it runs again."""
        kept = sum(storage.nbytes() for storage in self._kept.values())
        largest = 0
        for storages in self._of_blocks:
            added = sum(storage.nbytes() for address, storage in storages.items() if address not in self._kept)
            largest = max(largest, added)
        return kept + largest


class Chunks(NamedTuple):
    """How a round's clients train on a processor.

    Attributes:
        clients_per_chunk: Number of clients that share a pass; None for all of a round.
        at_a_time: Number of such chunks that train side by side.
    """

    clients_per_chunk: int | None
    at_a_time: int = 1


def chunks_in_memory(client_bytes: int, num_clients: int, threads: int) -> Chunks:
    """Return how clients behind a frozen backbone are divided into chunks.

    Each thread trains a chunk if that keeps all of them busy and there is memory for it. All chunks are of about the
    same size.

    Args:
        client_bytes: Bytes that a local step of one client keeps for its backward pass.
        num_clients: Clients in a round.
        threads: Number of chunks that can train side by side.
    """
    most = max(1, ACTIVATION_BYTES // max(1, client_bytes))
    one_thread = Chunks(math.ceil(num_clients / math.ceil(num_clients / most)))
    most = min(most, SIDE_BY_SIDE_BYTES // max(1, threads * client_bytes))
    if threads == 1 or most == 0:
        return one_thread
    # A multiple of the number of threads, so that none waits for the others' last chunks.
    num_chunks = threads * math.ceil(num_clients / (threads * most))
    size = math.ceil(num_clients / num_chunks)
    equal_clients = RoundPlan(0, tuple(range(num_clients)), ((1,) * num_clients,), size, chunks_at_a_time=threads)
    if busiest_lane(equal_clients) > MAX_BUSIEST_LANE:
        return one_thread
    return Chunks(size, threads)
