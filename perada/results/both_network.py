# SPDX-License-Identifier: Apache-2.0
"""The prediction with both models of a client as a single network, for formats of other programs."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from perada.core.states import State
from perada.engine.engine import classes_last
from perada.federation.both_models import Weights, logits_of_both
from perada.federation.typical_images import ComparedMap, statistics_of_map
from perada.results.models import Ensemble
from perada.tasks import Task


class BothModelsNetwork(nn.Module):
    """Predicts with the personal and the global model of a client, by operators that exporters know.

    The frozen layers by whose outputs images are compared are part of both models. The personal model takes their
    outputs from the global one, so that they run once.

    Args:
        personal: The client's personal model, which is changed.
        shared_model: The global model, or an :class:`.Ensemble` of them, which is changed.
        state_of_both: The client's :meth:`.BothModels.state`.
        compared_maps: The tensors by whose statistics images are compared.
        task: What the models predict.
    """

    mean: Tensor
    scale: Tensor
    examples: Tensor
    threshold: Tensor
    personal_share: Tensor
    known_classes: Tensor

    def __init__(
        self,
        personal: nn.Module,
        shared_model: nn.Module,
        state_of_both: State,
        compared_maps: Sequence[ComparedMap],
        task: Task,
    ) -> None:
        super().__init__()
        members = list(shared_model.members) if isinstance(shared_model, Ensemble) else [shared_model]
        for model in (*members[1:], personal):
            _share_equal_tensors(model, members[0])
        self.personal = personal
        self.shared = shared_model
        self._compared_maps = tuple(compared_maps)
        self._task = task
        self._neighbors = int(state_of_both["neighbors"])
        num_examples = int(state_of_both["num_examples"])
        self.register_buffer("mean", state_of_both["mean"])
        self.register_buffer("scale", state_of_both["scale"])
        self.register_buffer("examples", state_of_both["examples"][:num_examples])
        self.register_buffer("threshold", state_of_both["threshold"])
        self.register_buffer("personal_share", state_of_both["personal_share"].float())
        self.register_buffer("known_classes", state_of_both["known_classes"])
        # Outputs of frozen layers in the current pass, by path.
        self._outputs: dict[str, Tensor] = {}
        for compared in self._compared_maps:
            if compared.layer_path is not None:
                members[0].get_submodule(compared.layer_path).register_forward_hook(
                    partial(self._record_output, compared.layer_path)
                )
                personal.get_submodule(compared.layer_path).register_forward_hook(
                    partial(self._repeat_output, compared.layer_path)
                )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Map images (B, ...) to logits, (B, K) or (B, K, H, W), and a mask (B,) of those typical of the client."""
        shared = self.shared(images)
        statistics: list[Tensor] = []
        for compared in self._compared_maps:
            output = images if compared.layer_path is None else self._outputs[compared.layer_path]
            statistics.append(statistics_of_map(output, compared.position_axes))
        personal = self.personal(images)
        self._outputs.clear()
        is_typical = self._contains_statistics(torch.cat(statistics, 1))
        weights = Weights(self.personal_share, self.known_classes)
        if not self._task.per_pixel:
            return logits_of_both(self._task, personal, shared, is_typical, weights), is_typical
        # Tasks have the classes last, and networks do not.
        personal = classes_last(personal)
        shared = classes_last(shared)
        logits = logits_of_both(self._task, personal, shared, is_typical, weights)
        return logits.movedim(-1, 1), is_typical

    def _contains_statistics(self, statistics: Tensor) -> Tensor:
        """Return a mask (B,) of typical images, given their statistics (B, D), as :class:`.TypicalImages` does."""
        if self._neighbors == 0:
            return torch.ones_like(statistics[:, 0], dtype=torch.bool)
        scaled = (statistics - self.mean) / self.scale
        # ONNX has neither the distances of PyTorch nor the k-th smallest value.
        differences = scaled.unsqueeze(1) - self.examples
        distances = differences.square().sum(2).sqrt()
        nearest = distances.topk(self._neighbors, dim=1, largest=False).values
        return nearest.amax(1) <= self.threshold

    def _record_output(self, layer_path: str, module: nn.Module, inputs: object, output: Tensor) -> None:
        """Keep the output of a layer of the global model, as a hook of its forward pass."""
        # A copy, since a model may change the output in place.
        self._outputs[layer_path] = output.clone()

    def _repeat_output(self, layer_path: str, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        """Return the output of the same layer of the global model, as a hook of the personal model."""
        return self._outputs[layer_path].clone()


def _share_equal_tensors(model: nn.Module, other: nn.Module) -> None:
    """Replace the parameters of a model that another one has under the same name, so that a file holds them once."""
    for path, module in model.named_modules():
        other_module = other.get_submodule(path)
        for name, parameter in module.named_parameters(recurse=False):
            other_parameter = other_module.get_parameter(name)
            if torch.equal(parameter, other_parameter):
                setattr(module, name, other_parameter)
