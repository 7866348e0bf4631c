# SPDX-License-Identifier: Apache-2.0
"""Which images look like those that a client trained on, by statistics of what the frozen layers compute of them.

The statistics of an image are the mean of each channel over the positions of a map, and the logarithm of its standard
deviation: they tell devices, stains and exposures apart, and depend little on what an image shows. An image is typical
of a client if its distance to the k-th nearest training image of the client is not larger than almost all of those
between the training images themselves. Nothing is trained, and nothing leaves the client.

Sun et al., Out-of-distribution detection with deep nearest neighbors, ICML 2022, detect foreign images by such
distances, in the space of a network's last features.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from perada.core.checks import OptionError
from perada.core.states import State
from perada.engine.engine import Engine
from perada.engine.fold import fold
from perada.engine.frozen_trunk import FrozenTrunk, find_trunk

NEIGHBORS = 3
"""Distances are those to the k-th nearest training image. The nearest one may be of the same patient."""
TYPICAL_SHARE = 0.99
"""Share of the client's training images that are typical, each measured by the distances to the others."""
MIN_EXAMPLES = 10
"""Number of training images below which all images are typical: distances between a few would exclude too many."""
MAX_EXAMPLES = 300
"""Number of training images of a client that are kept for comparison, evenly spaced in its training set."""
MIN_IMAGES_FOR_PRODUCTS = 4
"""Number of images from which on a matrix product saves time in comparisons with the training images."""
CENTRAL_EXAMPLES = 48
"""Number of training images with which a few images are compared first. An image near enough to some of them is typical
whatever the others are, and their statistics stay in the caches."""
LEAST_DEVIATION = 1e-3
"""Added to the deviation of a channel before the logarithm, which would be infinite for a channel that is constant."""
LEAST_SCALE = 0.1
"""Lower limit of the scale of a statistic, as a share of the mean scale. One that hardly varies among training images
would make every other image foreign."""


@dataclass(frozen=True)
class ComparedMap:
    """A tensor whose statistics images are compared by: the output of a frozen layer, or the pixels.

    Attributes:
        layer_path: Path of the layer in the model; None for the pixels.
        position_axes: Axes of positions in the tensor (B, ...) of a batch. The other axes are images and channels.
        num_positions: Number of positions, of which a single one has no deviation.
    """

    layer_path: str | None
    position_axes: tuple[int, ...]
    num_positions: int

    @classmethod
    def of(cls, layer_path: str | None, shape: torch.Size, axes: tuple[int, ...]) -> "ComparedMap":
        """Return the map of a layer, given the shape (...) of its output for one image, and the axes of positions."""
        num_positions = math.prod(shape[axis - 1] for axis in axes)
        return cls(layer_path, axes, num_positions)


class ImageStatistics:
    """Computes statistics (B, D) of images (B, ...), with the frozen layers before all trained ones if there are any.

    Args:
        trunk: These layers; None to use the pixels.
        encode: Computes features (B, F) of images; None without a trunk.
    """

    def __init__(self, trunk: FrozenTrunk | None, encode: Callable[[Tensor], Tensor] | None) -> None:
        self.trunk = trunk
        self._encode = encode

    @classmethod
    def of(cls, engine: Engine, image: Tensor) -> "ImageStatistics":
        """Return the statistics for a model.

        Args:
            engine: The engine that runs the model.
            image: A prepared image (channels, height, width), or a text (L,), on the model's device.

        Raises:
            OptionError: If the inputs are texts, and no layer is frozen.
        """
        if engine.trunk is not None:
            return cls(engine.trunk, engine.features)
        trunk = find_trunk(engine.model, image)
        if trunk is not None:
            model = fold(engine.model, random_only=True, wrap=trunk.wrap).model
            return cls(trunk, partial(trunk.features, model))
        if not image.is_floating_point():
            raise OptionError(
                "prediction='both' compares texts by the outputs of frozen layers, and all layers of this model are "
                "trained; choose another adapter, or prediction='personal'",
                name="prediction",
                value="both",
            )
        return cls(None, None)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the statistics (B, D), in single precision, of images (B, ...) or of their features (B, F)."""
        with torch.no_grad():
            if self.trunk is None or self._encode is None:
                return statistics_of_map(x, _axes_after_channels(x.dim()))
            features = x if self.trunk.holds(x) else self._encode(x)
            layer_outputs: dict[str, Tensor] = {}
            for path, output in self.trunk.parts(features).items():
                layer_outputs[path] = output.view(-1, *self.trunk.shapes[path])
            return self.of_outputs(layer_outputs)

    def of_outputs(self, layer_outputs: Mapping[str, Tensor]) -> Tensor:
        """Compute the statistics (B, D) of images, given the outputs (B, ...) of the trunk's needed layers by path."""
        assert self.trunk is not None, "without frozen layers, images are compared by their pixels"
        statistics: list[Tensor] = []
        for path in self.trunk.needed:
            axes = _position_axes(self.trunk.shapes[path], self.trunk.image)
            # Sums in another order would have other last bits.
            output = layer_outputs[path].contiguous()
            statistics.append(statistics_of_map(output, axes))
        return torch.cat(statistics, 1)

    def compared_maps(self, image_shape: torch.Size) -> list[ComparedMap]:
        """Return the tensors whose statistics are computed, in their order, for images of a shape."""
        if self.trunk is None:
            return [ComparedMap.of(None, image_shape, _axes_after_channels(1 + len(image_shape)))]
        maps: list[ComparedMap] = []
        for path in self.trunk.needed:
            shape = self.trunk.shapes[path]
            maps.append(ComparedMap.of(path, shape, _position_axes(shape, self.trunk.image)))
        return maps


def _axes_after_channels(dims: int) -> tuple[int, ...]:
    """Return the axes of positions in a tensor (B, C, ...) with so many axes."""
    return tuple(range(2, dims))


def _position_axes(shape: torch.Size, image_shape: torch.Size) -> tuple[int, ...]:
    """Return the axes of positions in the output (B, ...) of a layer.

    Args:
        shape: Shape of the output for one image: a map (C, H, W) or (H, W, C), tokens (N, C), or a vector (C,).
        image_shape: Shape of an image, (channels, height, width), whose proportions the maps have.
    """
    if len(shape) == 2:
        return (1,)
    if len(shape) == 3 and len(image_shape) == 3:
        first, second, third = shape
        height, width = image_shape[1:]
        has_channels_first = second * width == third * height
        has_channels_last = first * width == second * height
        if has_channels_last and not has_channels_first:
            return (1, 2)
    return _axes_after_channels(1 + len(shape))


def statistics_of_map(output: Tensor, position_axes: tuple[int, ...]) -> Tensor:
    """Return the mean and the logarithm of the deviation of each channel, (B, 2 C), of a layer's output (B, ...).

    Only the values (B, C) if there is a single position, of which there is no deviation.

    Args:
        output: The output.
        position_axes: Its axes of positions.
    """
    last_axes = tuple(range(-len(position_axes), 0))
    maps = output.movedim(position_axes, last_axes).unsqueeze(-1).flatten(2)
    maps = maps.float()
    means = maps.mean(2)
    if maps.shape[2] == 1:
        return means
    # std() takes a multiple of the time on a CPU.
    variances = (maps - means.unsqueeze(2)).square().mean(2)
    deviations = variances.sqrt()
    return torch.cat([means, (deviations + LEAST_DEVIATION).log()], 1)


def _no_classes() -> Tensor:
    """Return the mask of known classes of a task without any."""
    return torch.zeros(0, dtype=torch.bool)


@dataclass(frozen=True)
class TypicalImages:
    """The training images of a client, for comparison with other images.

    Attributes:
        mean: Mean (D,) of each statistic over the training images.
        scale: Standard deviation (D,) of each statistic, by which distances are measured.
        examples: Statistics (R, D) of the training images, centred and scaled.
        threshold: Distance () up to which an image is typical.
        neighbors: The number k: the distance of an image is that to its k-th nearest example. 0 if the client has fewer
            than :data:`MIN_EXAMPLES` training images: all images are typical then.
        known_classes: Mask (K,) of the classes that the client knows, on the CPU (:meth:`.Task.known_classes`); without
            elements for a task of which each model knows everything.
    """

    mean: Tensor
    scale: Tensor
    examples: Tensor
    threshold: Tensor
    neighbors: int
    known_classes: Tensor = field(default_factory=_no_classes)

    @classmethod
    def of(cls, statistics: Tensor) -> "TypicalImages":
        """Return the images of a client, given their statistics (R, D), R > 0, as yet without known classes.

        >>> images = TypicalImages.of(torch.arange(12.0).unsqueeze(1))
        >>> images.contains(torch.tensor([[2.5], [30.0]])).tolist()
        [True, False]
        """
        mean = statistics.mean(0)
        scale = statistics.std(0, correction=0)
        least_scale = LEAST_SCALE * scale.mean()
        scale = scale.clamp(min=least_scale)
        # All training images are equal.
        scale = torch.where(scale > 0, scale, 1.0)
        examples = (statistics - mean) / scale
        if len(examples) < MIN_EXAMPLES:
            return cls(mean, scale, examples, statistics.new_zeros(()), neighbors=0)
        distances = _pairwise_distances(examples, examples)
        # An image must not be its own neighbor.
        distances.fill_diagonal_(torch.inf)
        distances_of_examples = distances.kthvalue(NEIGHBORS, 1).values
        threshold = distances_of_examples.quantile(TYPICAL_SHARE)
        return cls(mean, scale, examples, threshold, NEIGHBORS)

    def distances(self, statistics: Tensor) -> Tensor:
        """Return the distance (B,) of images with these statistics (B, D) to their k-th nearest example."""
        scaled = (statistics - self.mean) / self.scale
        return _pairwise_distances(scaled, self.examples).kthvalue(self.neighbors, 1).values

    def distance_ratios(self, statistics: Tensor) -> Tensor:
        """Return the distances (B,) of images, relative to the one up to which an image is typical.

        Args:
            statistics: Statistics (B, D) of the images.

        Returns:
            Above 1 for images that are not typical. 0 if all images are typical, and infinity for images that differ
            from training images that are all equal.
        """
        if self.neighbors == 0:
            return statistics.new_zeros(len(statistics))
        distances = self.distances(statistics)
        return torch.where(distances == 0, 0.0, distances / self.threshold)

    def contains(self, statistics: Tensor) -> Tensor:
        """Return a mask (B,) of the images that are typical, given their statistics (B, D)."""
        if self.neighbors == 0:
            return torch.ones(len(statistics), dtype=torch.bool, device=statistics.device)
        # Products take a tenth of the time of the distances, but not for a few images, and not on every GPU.
        if statistics.device.type != "cpu":
            return self._contains_exactly(statistics)
        if len(statistics) < MIN_IMAGES_FOR_PRODUCTS:
            if self._all_near_central_examples(statistics):
                return torch.ones(len(statistics), dtype=torch.bool)
            return self._contains_exactly(statistics)
        scaled = (statistics - self.mean) / self.scale
        near_examples = _near_examples(scaled, self.examples, self.threshold)
        is_typical = near_examples.surely.sum(1) >= self.neighbors
        is_undecided = ~is_typical & (near_examples.possibly.sum(1) >= self.neighbors)
        is_typical[is_undecided] = self._contains_exactly(statistics[is_undecided])
        return is_typical

    @cached_property
    def _central_examples(self) -> Tensor:
        """The :data:`CENTRAL_EXAMPLES` examples next to the mean, which are near to most other ones."""
        order = self.examples.square().sum(1).argsort()
        return self.examples[order[:CENTRAL_EXAMPLES]].contiguous()

    @cached_property
    def _threshold_as_number(self) -> float:
        return float(self.threshold)

    def _all_near_central_examples(self, statistics: Tensor) -> bool:
        """Return whether images, given their statistics (B, D), are typical by their distances to central examples.

        The distances are those of :meth:`distances` to the bit. If k of them are not above the threshold, nor is the
        one to the k-th nearest example.
        """
        scaled = (statistics - self.mean) / self.scale
        distances = _pairwise_distances(scaled, self._central_examples).kthvalue(self.neighbors, 1).values
        return all(distance <= self._threshold_as_number for distance in distances.tolist())

    def _contains_exactly(self, statistics: Tensor) -> Tensor:
        """Return the mask of :meth:`contains`, by distances."""
        return self.distances(statistics) <= self.threshold

    def to(self, device: torch.device) -> "TypicalImages":
        """Return the same on a device."""
        return TypicalImages(
            mean=self.mean.to(device),
            scale=self.scale.to(device),
            examples=self.examples.to(device),
            threshold=self.threshold.to(device),
            neighbors=self.neighbors,
            known_classes=self.known_classes,
        )

    def state(self, num_rows: int) -> State:
        """Return the attributes as tensors by name.

        Args:
            num_rows: Number of rows of ``examples``, at least R. The others are zero, so that the states of clients
                have the same shapes.
        """
        padding = self.examples.new_zeros(num_rows - len(self.examples), self.examples.shape[1])
        return {
            "mean": self.mean,
            "scale": self.scale,
            "examples": torch.cat([self.examples, padding]),
            "num_examples": torch.tensor(len(self.examples)),
            "threshold": self.threshold,
            "neighbors": torch.tensor(self.neighbors),
            "known_classes": self.known_classes,
        }

    @classmethod
    def from_state(cls, state: State) -> "TypicalImages":
        """Return what :meth:`state` describes."""
        return cls(
            mean=state["mean"],
            scale=state["scale"],
            examples=state["examples"][: int(state["num_examples"])],
            threshold=state["threshold"],
            neighbors=int(state["neighbors"]),
            known_classes=state["known_classes"].cpu(),
        )


def padded_states(state_of_client: Mapping[int, State]) -> dict[int, State]:
    """Return states of :meth:`TypicalImages.state` by client, padded to the same number of rows of ``examples``."""
    num_rows = max((len(state["examples"]) for state in state_of_client.values()), default=0)
    padded: dict[int, State] = {}
    for client, state in state_of_client.items():
        examples = state["examples"]
        padding = examples.new_zeros(num_rows - len(examples), examples.shape[1])
        padded[client] = state | {"examples": torch.cat([examples, padding])}
    return padded


@dataclass(frozen=True)
class _NearExamples:
    """Which examples are near which images.

    Attributes:
        surely: Mask (B, R) of the examples whose :func:`_pairwise_distances` are not above the threshold.
        possibly: Mask (B, R) that also has those of which rounding does not tell.
    """

    surely: Tensor
    possibly: Tensor


def _near_examples(images: Tensor, examples: Tensor, threshold: Tensor) -> _NearExamples:
    """Compare distances with a threshold by a matrix product, as far as its rounding and theirs permit.

    Args:
        images: Vectors (B, D) in single precision.
        examples: Vectors (R, D) in single precision.
        threshold: The threshold ().
    """
    images = images.double()
    examples = examples.double()
    squared_norms = images.square().sum(1, keepdim=True) + examples.square().sum(1)
    squared_distances = squared_norms - 2 * images @ examples.T
    squared_threshold = threshold.double().square()
    # Bounds of the rounding errors of sums over D terms: of the product, and of the distances in single precision.
    num_roundings = images.shape[1] + 4
    error_of_product = num_roundings * torch.finfo(torch.double).eps * squared_norms
    error_of_distances = num_roundings * torch.finfo(torch.float).eps * squared_threshold
    error = error_of_product + error_of_distances
    is_surely_near = squared_distances < squared_threshold - error
    is_possibly_near = squared_distances <= squared_threshold + error
    return _NearExamples(is_surely_near, is_possibly_near)


def _pairwise_distances(first: Tensor, second: Tensor) -> Tensor:
    """Return the Euclidean distances (B, R) of vectors (B, D) and (R, D).

    Not by a matrix product, whose last bits would depend on the other images.
    """
    return torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist")
