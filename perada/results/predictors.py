# SPDX-License-Identifier: Apache-2.0
"""Predictions of batches of images: by one network, or by the personal and the global model of a client together."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perada.core.states import State, images_dtype, stack, to_device
from perada.engine.engine import Engine, classes_last
from perada.engine.fold import fold
from perada.federation.both_models import both_models_of_state
from perada.federation.typical_images import ComparedMap, ImageStatistics
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
        self._task = task
        self._device = device

    def __call__(self, images: Tensor) -> BatchOutputs:
        """Return the network's outputs."""
        logits = self._network(in_dtype_of(self._network, images).to(self._device)).cpu()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self._task.per_pixel:
            logits = classes_last(logits)
        return BatchOutputs(logits)


class BothModelsPredictor(Predictor):
    """Predicts with both models of a client. The frozen layers before the first adapter run once for both.

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
        self._network = copy.deepcopy(network).to(device)
        self._task = task
        self._average = average
        self._device = device
        self._engine = Engine(self._network, "loop", per_pixel=task.per_pixel)
        example = in_dtype_of(self._network, example).to(device)
        self._engine.find_trunk(example)
        statistics = ImageStatistics.of(self._engine, example)
        self.compared_maps: list[ComparedMap] = statistics.compared_maps(example.shape)
        self._both = both_models_of_state(state_of_both, task, statistics, device)
        self._members = to_device(stack([personal_state, *global_states]), device)

    def __call__(self, images: Tensor) -> BatchOutputs:
        """Return the outputs of both models together."""
        x = in_dtype_of(self._network, images).to(self._device)
        if self._engine.trunk is not None:
            x = self._engine.features(x)
        logits_of_members = self._engine.shared_logits(self._members, x)
        shared = self._task.ensemble(logits_of_members[1:], self._average)
        is_typical = self._both.typical([0], self._both.statistics(x))[0]
        weights = self._both.weights([0], self._device)
        logits = self._both.logits(logits_of_members[0], shared, is_typical, weights)
        return BatchOutputs(logits.cpu(), is_typical.cpu())

    def distances(self, images: Tensor) -> Tensor:
        """Return the distance (B,) of images to the client's training images; see :class:`.TypicalImages`."""
        x = in_dtype_of(self._network, images).to(self._device)
        return self._both.typical_images[0].distances(self._both.statistics(x)).cpu()


def in_dtype_of(model: nn.Module, images: Tensor) -> Tensor:
    """Convert floating-point images to the dtype in which a model takes them."""
    dtype = images_dtype(model)
    return images if dtype is None or not images.is_floating_point() else images.to(dtype)
