# SPDX-License-Identifier: Apache-2.0
"""``perada study fed-ensemble-plane``: the loss on the plane through three modes (Fed-ensemble, Figure 3).

K small convolutional networks are trained by :class:`perada.algorithms.FedEnsemble` on images divided at random. Three
of them span a plane in the space of all weights. The study computes the training loss at points of that plane, and
along the three lines between the modes.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jsonargparse import ArgumentParser
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import TensorDataset
from tqdm import tqdm

from perada.api import finetune
from perada.core.checks import check_number
from perada.core.seeding import derive_seed, seeded
from perada.core.states import State
from perada.data import IID, FederatedData
from perada.data.partitions import Split
from perada.results.report import table
from perada.studies.drawing import check_output, new_figure, write
from perada.studies.local_gd_curves import Counts
from perada.studies.local_gd_head import HeadSettings, load_images
from perada.system.quiet import info_messages_disabled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IN_PLANE = 3
"""Modes that span the plane."""


@dataclass(frozen=True)
class PlaneSettings(Counts):
    """Training, and the points at which the loss is computed.

    Args:
        dataset: Images: ``fashion_mnist``, or ``digits``, which requires no files.
        root: Folder of Fashion-MNIST.
        download: Fetch Fashion-MNIST if it is missing.
        train_images: Training images used, the first ones; the loss is their mean.
        channels: Output channels of the first convolution; the second has twice as many.
        clients: Clients, all of which take part in every round.
        modes: K, of which the first three span the plane.
        rounds: Communication rounds.
        local_steps: Steps of a client in a round.
        batch_size: Images in a step.
        lr: Learning rate, multiplied by 0.99 every 10 rounds.
        grid: Points of the plane along each side.
        line: Points of a line between two modes, both included.
        margin: Margin of the plane around the modes, as a share of their extent.
    """

    dataset: Literal["fashion_mnist", "digits"] = "fashion_mnist"
    root: str | None = None
    download: bool = False
    train_images: int = 2000
    channels: int = 8
    clients: int = 20
    modes: int = 5
    rounds: int = 40
    local_steps: int = 10
    batch_size: int = 32
    lr: float = 0.1
    grid: int = 17
    line: int = 17
    margin: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.modes < IN_PLANE:
            raise ValueError(
                f"modes must be an integer >= {IN_PLANE}, the number that spans the plane, got {self.modes}"
            )
        if min(self.grid, self.line) < 2:
            raise ValueError(f"grid and line must be integers >= 2, got {self.grid} and {self.line}")
        check_number("margin", self.margin, ge=0)


QUICK = PlaneSettings("digits", train_images=400, clients=6, modes=3, rounds=20, grid=5, line=5)
"""Settings of ``--quick``."""


@dataclass(frozen=True)
class Plane:
    """The plane w = origin + x · across + y · up, of weights (P,) in a space of P parameters.

    ``across`` and ``up`` are orthogonal and of length 1, so that distances in the plane are distances of weights.
    """

    origin: Tensor
    across: Tensor
    up: Tensor

    def point(self, x: float, y: float) -> Tensor:
        """Return the weights (P,) at two coordinates."""
        return self.origin + x * self.across + y * self.up

    def coordinates(self, weights: Tensor) -> tuple[float, float]:
        """Return the coordinates of weights (P,), or of their projection if they lie outside the plane."""
        offset = weights - self.origin
        return (offset @ self.across).item(), (offset @ self.up).item()


def plane_through(first: Tensor, second: Tensor, third: Tensor) -> Plane:
    """Return the plane through three points (P,), with the second on the horizontal axis (Gram-Schmidt).

    Raises:
        ValueError: If the points lie on one line.
    """
    across = second - first
    across = across / across.norm()
    to_third = third - first
    up = to_third - (to_third @ across) * across
    if not up.norm() > 1e-6 * to_third.norm():
        raise ValueError("the three modes are collinear and span no plane; train for more rounds")
    return Plane(first, across, up / up.norm())


def loss_at(network: nn.Module, weights: Tensor, like: State, images: Tensor, labels: Tensor) -> float:
    """Return the mean cross-entropy of a network whose parameters are a flat vector.

    Args:
        network: The network.
        weights: Its parameters, one after another (P,).
        like: Parameters by name, whose order and shapes the vector has.
        images: (N, C, H, W).
        labels: (N,).
    """
    parameters = {}
    begin = 0
    for name, tensor in like.items():
        values = weights[begin : begin + tensor.numel()]
        parameters[name] = values.view_as(tensor).to(tensor.dtype)
        begin += tensor.numel()
    total = 0.0
    with torch.no_grad():
        for chunk, targets in zip(images.split(2000), labels.split(2000), strict=True):
            logits = functional_call(network, parameters, (chunk,))
            total += F.cross_entropy(logits, targets, reduction="sum").item()
    return total / len(labels)


def barrier(losses: Sequence[float]) -> float:
    """Return how far the loss along a line rises above the straight line between the losses of its ends.

    >>> barrier([1.0, 4.0, 2.0])
    2.5
    """
    shares = np.linspace(0, 1, len(losses))
    straight = (1 - shares) * losses[0] + shares * losses[-1]
    return float((np.asarray(losses) - straight).max())


def convolutional_network(channels: int, height: int, width: int, num_classes: int) -> nn.Sequential:
    """Return a network of two convolutions, as the paper uses for MNIST, without BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * (height // 4) * (width // 4), num_classes),
    )


def train_modes(network: nn.Module, images: Tensor, labels: Tensor, settings: PlaneSettings, seed: int) -> list[State]:
    """Train the modes on clients whose images are divided at random; return the parameters of each."""
    index = np.arange(len(labels))
    no_test_set = Split(labels.numpy()[:0], index[:0])
    seed_of_division = derive_seed(seed, "fed-ensemble-plane/clients")
    shares, _ = IID(settings.clients).split(Split(labels.numpy(), index), no_test_set, seed_of_division)
    clients = []
    for share in shares:
        rows = torch.as_tensor(share)
        clients.append(TensorDataset(images[rows], labels[rows]))
    with info_messages_disabled():
        run = finetune(
            network,
            FederatedData(clients),
            adapter="full",
            pretrained=False,
            algorithm="fed_ensemble",
            algorithm_options={"modes": settings.modes},
            num_classes=int(labels.max()) + 1,
            rounds=settings.rounds,
            local_steps=settings.local_steps,
            batch_size=settings.batch_size,
            lr_local=settings.lr,
            training={"lr_schedule": "exponential"},
            seed=seed,
            logger=False,
            enable_progress_bar=False,
        )
    return run.states("global")


def study_plane_of_modes(
    *,
    output: Path,
    seed: int = 0,
    settings: PlaneSettings = PlaneSettings(),
    quick: bool = False,
) -> dict[str, Any]:
    """Training loss on the plane through three modes of Fed-ensemble, and along the lines between them.

    Args:
        output: Folder to write fed_ensemble_plane.json and fed_ensemble_plane.png to.
        seed: Seed of all draws.
        settings: Training, and the points of the plane.
        quick: A few short rounds on the digits and a coarse grid; overrides other options.

    Returns:
        ``settings``, ``seconds``; ``x``, ``y`` and ``loss`` by row of the grid; ``coordinates`` of the modes;
        ``mode_loss``; ``accuracy`` of each mode and of the ``ensemble`` on the test images; and for each pair of modes
        ``distance``, ``losses`` of the line and ``barrier``.

    Raises:
        ValueError: If an option cannot be used.
        FileExistsError: If ``output`` is a file.
        FileNotFoundError: If images are missing.
        ModuleNotFoundError: If matplotlib is not installed.
    """
    if quick:
        settings = QUICK
    check_output(output)
    started_at = time.perf_counter()
    source = HeadSettings(settings.dataset, settings.root, settings.download)
    splits = load_images(source)
    images = splits.train_images.images[: settings.train_images] / 255.0
    labels = splits.train_images.labels[: settings.train_images]
    height, width = images.shape[-2:]
    num_classes = int(splits.train_images.labels.max()) + 1
    with seeded(seed, "fed-ensemble-plane/network"):
        network = convolutional_network(settings.channels, height, width, num_classes)
    modes = train_modes(network, images, labels, settings, seed)

    points = [torch.cat([tensor.flatten().double() for tensor in mode.values()]) for mode in modes]
    plane = plane_through(*points[:IN_PLANE])
    coordinates = [plane.coordinates(point) for point in points[:IN_PLANE]]
    x_axis = _axis_coordinates([x for x, _ in coordinates], settings)
    y_axis = _axis_coordinates([y for _, y in coordinates], settings)
    grid = []
    with tqdm(total=settings.grid**2, desc="points of the plane", dynamic_ncols=True) as bar:
        for y in y_axis:
            row = []
            for x in x_axis:
                row.append(loss_at(network, plane.point(x, y), modes[0], images, labels))
                bar.update()
            grid.append(row)

    pairs = []
    for first, second in combinations(range(IN_PLANE), 2):
        losses = []
        for share in np.linspace(0, 1, settings.line):
            weights = (1 - share) * points[first] + share * points[second]
            losses.append(loss_at(network, weights, modes[0], images, labels))
        distance = (points[first] - points[second]).norm().item()
        pairs.append({"modes": [first, second], "distance": distance, "losses": losses, "barrier": barrier(losses)})

    accuracies = _compute_accuracies(network, modes, splits.test_images.images / 255.0, splits.test_images.labels)
    result = {
        "settings": {"seed": seed, **asdict(settings)},
        "seconds": round(time.perf_counter() - started_at, 1),
        "x": x_axis,
        "y": y_axis,
        "loss": grid,
        "coordinates": coordinates,
        "mode_loss": [loss_at(network, point, modes[0], images, labels) for point in points],
        "accuracy": accuracies.modes,
        "ensemble": accuracies.ensemble,
        "pairs": pairs,
    }
    print(summarize_plane(result))
    write(output, "fed_ensemble_plane", json.dumps(result), {"fed_ensemble_plane": draw_plane(result)})
    return result


def _axis_coordinates(coordinates_of_modes: Sequence[float], settings: PlaneSettings) -> list[float]:
    """Return the coordinates of the grid along one axis, from below the smallest value to above the largest."""
    extent = settings.margin * (max(coordinates_of_modes) - min(coordinates_of_modes))
    axis: list[float] = np.linspace(
        min(coordinates_of_modes) - extent, max(coordinates_of_modes) + extent, settings.grid
    ).tolist()
    return axis


@dataclass(frozen=True)
class Accuracies:
    """Accuracy of each mode, and of the mean of their logits."""

    modes: list[float]
    ensemble: float


def _compute_accuracies(network: nn.Module, modes: Sequence[State], images: Tensor, labels: Tensor) -> Accuracies:
    """Return the accuracies on images (N, C, H, W) with labels (N,)."""
    with torch.no_grad():
        logits = torch.stack([functional_call(network, mode, (images,)) for mode in modes])  # (K, N, classes)

    def accuracy(logits: Tensor) -> float:
        return (logits.argmax(1) == labels).double().mean().item()

    return Accuracies([accuracy(logits_of_mode) for logits_of_mode in logits], accuracy(logits.mean(0)))


def summarize_plane(plane_result: dict[str, Any]) -> str:
    """Return a table of the three lines between modes, and the accuracies."""
    rows = []
    for pair in plane_result["pairs"]:
        losses = pair["losses"]
        numbers = [pair["distance"], losses[0], max(losses), losses[-1], pair["barrier"]]
        first, second = pair["modes"]
        rows.append([f"{first} – {second}", *(f"{number:.3f}" for number in numbers)])
    header = ["modes", "distance", "loss of the first", "largest between", "loss of the second", "barrier"]
    accuracies = ", ".join(f"{100 * accuracy:.1f}" for accuracy in plane_result["accuracy"])
    mean_accuracy = 100 * plane_result["ensemble"]
    return f"{table(header, rows)}\n\nTest accuracy in %: modes {accuracies}; their mean {mean_accuracy:.1f}"


def draw_plane(plane_result: dict[str, Any]) -> "Figure":
    """Draw the logarithm of the loss on the plane, with the modes, and the loss along the lines."""
    figure = new_figure(9.4, 4.0)
    plane, lines = figure.subplots(1, 2)
    contours = plane.contourf(
        plane_result["x"], plane_result["y"], np.log10(plane_result["loss"]), levels=20, cmap="viridis"
    )
    figure.colorbar(contours, ax=plane, label="log₁₀ of the training loss")
    for mode, (x, y) in enumerate(plane_result["coordinates"]):
        plane.plot(x, y, "o", color="white", markeredgecolor="black")
        plane.annotate(f"mode {mode}", (x, y), xytext=(6, 6), textcoords="offset points", color="white")
    plane.set(title="plane through three modes", xlabel="distance", ylabel="distance", aspect="equal")
    for pair in plane_result["pairs"]:
        first, second = pair["modes"]
        lines.plot(np.linspace(0, 1, len(pair["losses"])), pair["losses"], label=f"mode {first} to mode {second}")
    lines.set(title="on the line between two modes", xlabel="share of the second mode", ylabel="training loss")
    lines.legend(fontsize="small", loc="lower center")
    return figure


def main(parser: ArgumentParser, words: list[str]) -> None:
    """Run ``perada study fed-ensemble-plane``."""
    parser.add_function_arguments(study_plane_of_modes, as_group=False, skip={"quick"})
    parser.add_argument("--quick", action="store_true", help="A few short rounds on the digits and a coarse grid.")
    study_plane_of_modes(**parser.instantiate(parser.parse_args(words)))
