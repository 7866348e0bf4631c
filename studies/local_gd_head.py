# SPDX-License-Identifier: Apache-2.0
"""Local-GD on the classification head of a frozen pretrained backbone (panels (h) and (i)).

The backbone is run once over all images. :func:`perada.finetune` then trains the head on the feature vectors that the
backbone feeds it.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import TensorDataset

from perada.api import finetune
from perada.core.seeding import derive_seed, generator
from perada.core.states import State
from perada.data import Digits, DominantClass, FashionMNIST, FederatedData
from perada.data.batches.transforms import prepare_images
from perada.data.partitions import Split
from perada.data.sets.base import ImageSet
from perada.models.backbones import build_backbone
from perada.server import Aggregation, Mean, ModifiedLocalGD, ServerRule
from perada.studies.local_gd_curves import Advance, Counts, Curves
from perada.studies.local_gd_linear import direction_distance
from perada.system.quiet import info_messages_disabled

WEIGHTS = {"fashion_mnist": "perada:digits_test_resnet", "digits": "perada:fashion_test_resnet"}
"""Shipped weights of a backbone that has not seen the images, trained on the other set."""


@dataclass(frozen=True)
class HeadSettings(Counts):
    """The head of a pretrained backbone, panels (h) and (i).

    Args:
        dataset: Images: ``fashion_mnist``, or ``digits``, which requires no files.
        root: Folder of Fashion-MNIST.
        download: Fetch Fashion-MNIST if it is missing.
        backbone: A timm name, or ``hf:`` and a transformers name or folder.
        pretrained: Its weights: a file, a folder or a shipped name; by default those shipped for the other set.
        image_size: Height and width in pixels of the backbone's input.
        nodes: Number of nodes M; half of the images of each are of one class.
        rounds: Communication rounds R.
        local_steps: Local steps L of a node in a round; the centralized head is trained R · L steps.
        batch_size: Images in a step.
        lr: Learning rate.
    """

    dataset: Literal["fashion_mnist", "digits"] = "fashion_mnist"
    root: str | None = None
    download: bool = False
    backbone: str = "test_resnet"
    pretrained: str | None = None
    image_size: int = 32
    nodes: int = 10
    rounds: int = 60
    local_steps: int = 60
    batch_size: int = 128
    lr: float = 0.01


@dataclass(frozen=True)
class Features:
    """The head's inputs for a set of images: (N, F) for the training split, (N', F) for the test split."""

    train_features: Tensor
    train_labels: Tensor
    test_features: Tensor
    test_labels: Tensor


class RecordingRule(ServerRule):
    """Another rule whose result in each round is kept in ``states``."""

    def __init__(self, rule: ServerRule) -> None:
        self.rule = rule
        self.weighted = rule.weighted
        self.states: list[State] = []

    def __call__(self, aggregation: Aggregation) -> State:
        """Aggregate, and keep the result."""
        state = self.rule(aggregation)
        self.states.append(state)
        return state


@dataclass(frozen=True)
class LabelledImages:
    """Images (N, 1, H, W) uint8, and labels (N,)."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class ImageSplits:
    """The two splits of an image set."""

    train_images: LabelledImages
    test_images: LabelledImages


def load_images(head_settings: HeadSettings) -> ImageSplits:
    """Load the images.

    Raises:
        FileNotFoundError: If Fashion-MNIST is missing.
    """
    data = Digits() if head_settings.dataset == "digits" else FashionMNIST(head_settings.root, head_settings.download)
    try:
        data.download()
        return ImageSplits(train_images=_load_split(data, train=True), test_images=_load_split(data, train=False))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; or choose --head.dataset=digits, which requires no files") from error


def _load_split(data: ImageSet, train: bool) -> LabelledImages:
    split = data.with_split(train)
    assert split.images is not None and split.labels is not None  # both sets fit into memory
    return LabelledImages(split.images, split.labels)


def extract_features(head_settings: HeadSettings) -> Features:
    """Run the frozen backbone over both splits.

    Raises:
        FileNotFoundError: If images or weights are missing.
    """
    weights = WEIGHTS[head_settings.dataset] if head_settings.pretrained is None else head_settings.pretrained
    backbone = build_backbone(head_settings.backbone, pretrained=weights, image_size=head_settings.image_size)
    head_inputs: list[Tensor] = []
    head = backbone.model.get_submodule(backbone.head)
    head.register_forward_pre_hook(lambda module, inputs: head_inputs.append(inputs[0].flatten(1)))

    def features_of(images: Tensor) -> Tensor:
        head_inputs.clear()
        with torch.no_grad():
            for chunk in torch.split(images, 512):
                backbone.model(prepare_images(chunk, backbone.image_config, head_settings.image_size))
        return torch.cat(head_inputs)

    splits = load_images(head_settings)
    return Features(
        train_features=features_of(splits.train_images.images),
        train_labels=splits.train_images.labels,
        test_features=features_of(splits.test_images.images),
        test_labels=splits.test_images.labels,
    )


def head_curves(head_settings: HeadSettings, seed: int, advance: Advance) -> Curves:
    """Train heads with Local-GD, Modified Local-GD and centralized, from the same initial weights.

    Returns:
        For each of ``plain`` and ``modified``, by round: ``…_central``, the distance in direction to the trained
        centralized head (weight and bias as one vector), and ``…_accuracy`` on the test images. With the same steps
        behind it: ``central_accuracy``. ``images`` of each node.
    """
    features = extract_features(head_settings)
    advance("features")
    node_rows = _rows_of_nodes(features.train_labels, head_settings.nodes, seed)
    all_rows = torch.cat(node_rows).sort()[0]
    network = _make_head(features, seed)
    paths = {}
    paths["plain"] = _train_head(network, features, node_rows, Mean(), head_settings, seed)
    advance("head, plain")
    paths["modified"] = _train_head(network, features, node_rows, ModifiedLocalGD(), head_settings, seed)
    advance("head, modified")
    paths["central"] = _train_head(network, features, [all_rows], Mean(), head_settings, seed)
    advance("head, central")

    central = _flatten_state(paths["central"][-1])
    curves: Curves = {"images": [float(len(rows)) for rows in node_rows]}
    for name, path in paths.items():
        curves[f"{name}_accuracy"] = [_head_accuracy(state, features) for state in path]
        if name != "central":
            curves[f"{name}_central"] = [direction_distance(_flatten_state(state), central).item() for state in path]
    return curves


def _rows_of_nodes(labels: Tensor, num_nodes: int, seed: int) -> list[Tensor]:
    """Return the training images of each node, half of which are of one class."""
    train = Split(labels.numpy(), np.arange(len(labels)))
    no_test_set = Split(train.labels[:0], train.index[:0])
    shares, _ = DominantClass(num_nodes).split(train, no_test_set, derive_seed(seed, "local-gd/nodes"))
    return [torch.as_tensor(rows) for rows in shares]


def _make_head(features: Features, seed: int) -> nn.Module:
    """Return a linear layer with torch's distribution of initial weights, drawn from the seed."""
    width = features.train_features.shape[1]
    layer = nn.Linear(width, _num_classes(features))
    random = generator(seed, "local-gd/head")
    with torch.no_grad():
        for tensor in layer.parameters():
            tensor.uniform_(-(width**-0.5), width**-0.5, generator=random)
    return nn.Sequential(nn.Flatten(), layer)


def _num_classes(features: Features) -> int:
    return int(features.train_labels.max()) + 1


def _train_head(
    network: nn.Module,
    features: Features,
    node_rows: list[Tensor],
    rule: ServerRule,
    head_settings: HeadSettings,
    seed: int,
) -> list[State]:
    """Return the head's state after each round, with one node for each entry of ``node_rows``."""
    images = features.train_features[..., None, None]  # feature vectors as images of one pixel
    recording = RecordingRule(rule)
    with info_messages_disabled():
        finetune(
            network,
            FederatedData([TensorDataset(images[rows], features.train_labels[rows]) for rows in node_rows]),
            adapter="head",
            algorithm="fedavg",
            server_rule=recording,
            num_classes=_num_classes(features),
            rounds=head_settings.rounds,
            local_steps=head_settings.local_steps,
            batch_size=head_settings.batch_size,
            lr_local=head_settings.lr,
            seed=seed,
            logger=False,
            enable_progress_bar=False,
        )
    return recording.states


def _flatten_state(state: State) -> Tensor:
    return parameters_to_vector(state.values()).double()


def _head_accuracy(state: State, features: Features) -> float:
    weight, bias = state.values()
    predicted = (features.test_features.to(weight.device) @ weight.T + bias).argmax(1).cpu()
    return (predicted == features.test_labels).double().mean().item()
