# SPDX-License-Identifier: Apache-2.0
"""Predictions of batches of images: by one network, or by the personal and the global model of a client together."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perada.core.states import State, images_dtype, set_state
from perada.engine.engine import Engine, classes_last
from perada.engine.fold import fold
from perada.engine.frozen_trunk import RecordedPass
from perada.federation.both_models import both_models_of_state
from perada.federation.typical_images import ComparedMap, ImageStatistics
from perada.models.usage import share_frozen
from perada.tasks import Task
from perada.tasks.base import Average


@dataclass(frozen=True)
class BatchOutputs:
    """What a predictor computes of B images, on the CPU.

    Attributes:
        logits: Logits (B, K), or (B, H, W, K) of pixels.
        typical: Mask (B,) of the images that look like the client's own; None if that was not asked.
    """

    logits: Tensor
    typical: Tensor | None = None


class Predictor(ABC):
    """Predicts batches of prepared images."""

    @abstractmethod
    def __call__(self, images: Tensor) -> BatchOutputs:
        """Return the outputs for images (B, channels, height, width), or texts (B, L), on the CPU."""


class NetworkPredictor(Predictor):
    """Predicts with one network.

    Args:
        network: Maps images to logits.
        task: What it predicts.
        device: Device of its passes.
    """

    def __init__(self, network: nn.Module, task: Task, device: torch.device) -> None:
        # The frozen layers of a folded model are faster.
        self._network = fold(network.to(device), random_only=True).model.eval()
        self._dtype = images_dtype(self._network)
        self._task = task
        self._device = device

    def __call__(self, images: Tensor) -> BatchOutputs:
        """Return the network's outputs."""
        logits = self._network(in_dtype(self._dtype, images).to(self._device)).cpu()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self._task.per_pixel:
            logits = classes_last(logits)
        return BatchOutputs(logits)


class BothModelsPredictor(Predictor):
    """Predicts with both models of a client. The frozen layers before the first adapter run once for both.

    A model that has no weight for any image of a batch does not run: the personal one for images of which none looks
    like the client's own, the global one for images that all do, of a client that relies on its personal model only.

    Args:
        network: The backbone with its adapter, in any state.
        personal_state: State of the client's personal model.
        global_states: States of the global model, or of the members of an ensemble.
        state_of_both: The client's :meth:`.BothModels.state`.
        task: What the models predict.
        average: Which outputs of an ensemble's members are averaged.
        example: A prepared image, for the shapes of the frozen layers' outputs.
        device: Device of the passes.

    Attributes:
        compared_maps: The tensors by whose statistics images are compared.
    """

    def __init__(
        self,
        network: nn.Module,
        personal_state: State,
        global_states: Sequence[State],
        state_of_both: State,
        task: Task,
        average: Average,
        example: Tensor,
        device: torch.device,
    ) -> None:
        adapted = copy.deepcopy(network).to(device).eval()
        self._task = task
        self._average = average
        self._device = device
        self._dtype = images_dtype(adapted)
        example = in_dtype(self._dtype, example).to(device)
        statistics = ImageStatistics.of(Engine(adapted, "loop"), example)
        self.compared_maps: list[ComparedMap] = statistics.compared_maps(example.shape)
        self._both = both_models_of_state(state_of_both, task, statistics, device)
        self._weights = self._both.weights([0], device)
        self._trunk = statistics.trunk
        # One network for each state: to call one with other tensors takes longer than the adapters of a small network.
        self._personal = self._copy_network(adapted, personal_state)
        self._members = [self._copy_network(adapted, state) for state in global_states]
        self._mixes = bool((self._weights.personal_shares < 1).any())
        # The model that the client's own images need in any case.
        self._first = self._members[0] if self._mixes else self._personal

    def _copy_network(self, adapted: nn.Module, state: State) -> nn.Module:
        """Return a copy of the network in a state, which shares the frozen parameters."""
        network = share_frozen(adapted)
        for parameter in network.parameters():
            if parameter.requires_grad:
                # In the memory format of states, so that the last bits are those of the run's scores.
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        set_state(network, state)
        wrap = None if self._trunk is None else self._trunk.wrap
        # The frozen layers of a folded model are faster.
        return fold(network, random_only=True, wrap=wrap).model.eval()

    def __call__(self, images: Tensor) -> BatchOutputs:
        """Return the outputs of both models together."""
        x = in_dtype(self._dtype, images).to(self._device)
        first_pass = None
        if self._trunk is None:
            statistics = self._both.statistics(x)
        else:
            first_pass = self._trunk.run(self._first, x)
            statistics = self._both.statistics.of_outputs(first_pass.outputs)
        is_typical = self._both.typical([0], statistics)[0]
        needs_personal = bool(is_typical.any())
        needs_shared = self._mixes or not needs_personal or not bool(is_typical.all())
        if needs_shared:
            members = torch.stack([self._logits_of_output(member, x, first_pass) for member in self._members])
            shared = self._task.ensemble(members, self._average)
        if needs_personal:
            personal = self._logits_of_output(self._personal, x, first_pass)
        # The weight of a model that did not run is 0, so any numbers can take its place.
        if not needs_shared:
            shared = personal
        if not needs_personal:
            personal = shared
        logits = self._both.logits(personal, shared, is_typical, self._weights)
        return BatchOutputs(logits.cpu(), is_typical.cpu())

    def _logits_of_output(self, network: nn.Module, x: Tensor, first_pass: RecordedPass | None) -> Tensor:
        """Return the logits of a network for a batch, with the classes last, in single precision at least.

        Args:
            network: The network.
            x: The images (B, ...).
            first_pass: The pass of the first network, with the outputs of the frozen layers; None if there are none.
        """
        if first_pass is None or self._trunk is None:
            output = network(x)
        elif network is self._first:
            output = first_pass.logits
        else:
            output = self._trunk.run_from(network, first_pass.outputs)
        logits = output.to(torch.promote_types(output.dtype, torch.float32))
        return classes_last(logits) if self._task.per_pixel else logits

    def distances(self, images: Tensor) -> Tensor:
        """Return the distance (B,) of images to the client's training images; see :class:`.TypicalImages`."""
        x = in_dtype(self._dtype, images).to(self._device)
        return self._both.typical_images[0].distances(self._both.statistics(x)).cpu()


def in_dtype_of(model: nn.Module, images: Tensor) -> Tensor:
    """Convert floating-point images to the dtype in which a model takes them."""
    return in_dtype(images_dtype(model), images)


def in_dtype(dtype: torch.dtype | None, images: Tensor) -> Tensor:
    """Convert floating-point images to a dtype (:func:`.images_dtype`); None to leave them as they are."""
    return images if dtype is None or not images.is_floating_point() else images.to(dtype)
