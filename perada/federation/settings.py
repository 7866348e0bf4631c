# SPDX-License-Identifier: Apache-2.0
"""The options of a federation's rounds, their checks, and the interface of the data that rounds require."""

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from perada.algorithms import Algorithm, TensorNames
from perada.algorithms.base import Stacks
from perada.core.checks import OptionError, check_choice
from perada.core.rounds import AnyBatch, Phase, RoundPlan
from perada.core.states import State
from perada.engine.loss_scaling import MaskedAdam, MaskedSGD
from perada.federation.store import ClientStore, DiskStore
from perada.privacy.options import ClientPrivacy, Privacy, privacy_options, test_mode
from perada.server import Distillation, Mean, ServerRule
from perada.server.aggregate import Weighting
from perada.server.distill import ServerData
from perada.server.sums import SecureSums
from perada.tasks import Classification, Task

ClientOptimizer = Literal["sgd", "adam", "adamw"]
StoreKind = Literal["auto", "device", "host", "disk"]
MEMORY_SHARE = 0.25
"""Share of the device's free memory, and of the host's memory, that ``auto`` uses for the clients' states."""
Loader = Callable[[RoundPlan], Iterable[AnyBatch]]
"""Function of a plan that returns the prepared batches of its local steps."""


@dataclass(frozen=True)
class LocalTraining:
    """Options of local training. The optimiser is reset in each round and phase.

    Attributes:
        optimizer: ``sgd``, ``adam`` or ``adamw``.
        lr: Learning rate of each role. A role without one has that of ``local``.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of all optimisers.
        clip_norm: Maximum norm of a client's gradient of a role, to which longer ones are scaled down; None for none.
        task: What is learnt, which computes the loss of an image.
    """

    optimizer: ClientOptimizer
    lr: dict[str, float]
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    task: Task = field(default_factory=Classification)

    def make(self, role: str, leaves: list[Tensor], factor: float, *, masked: bool = False) -> torch.optim.Optimizer:
        """Create the optimiser of a role.

        Args:
            role: Name of the role.
            leaves: Tensors (C, ...) that it trains.
            factor: Factor of the role's learning rate.
            masked: Whether some clients may skip a step, as in float16.
        """
        lr = self.lr.get(role, self.lr["local"]) * factor
        if self.optimizer == "sgd":
            sgd = MaskedSGD if masked else torch.optim.SGD
            return sgd(leaves, lr=lr, momentum=self.momentum, weight_decay=self.weight_decay)
        if masked:
            return MaskedAdam(leaves, lr, self.weight_decay, decoupled=self.optimizer == "adamw")
        adam = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return adam(leaves, lr=lr, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class Storage:
    """Options for the storage of the clients' states.

    Attributes:
        kind: ``device``, ``host`` or ``disk``; ``auto`` for the first of these in which the states fit.
        folder: Folder of the files; by default a temporary one.
        prune: Whether to delete files that no checkpoint needs any more.
        num_clients: Maximum number of clients whose states are stored, for the choice of ``auto``.
    """

    kind: StoreKind = "auto"
    folder: Path | None = None
    prune: bool = True
    num_clients: int = 0

    def __post_init__(self) -> None:
        check_choice("client_store", self.kind, get_args(StoreKind))

    def open(self, initial: Stacks, name: str = "") -> ClientStore:
        """Create a store.

        Args:
            initial: States that a client keeps at first, by role and without a client axis.
            name: Name of the store's folder in :attr:`folder`, if there are several stores.
        """
        kind = self.kind
        if kind == "auto":
            kind = self._first_that_fits(initial)
        if kind == "disk":
            folder = None if self.folder is None else self.folder / name
            return DiskStore(initial, folder, self.prune)
        return ClientStore(initial, host=kind == "host")

    def _first_that_fits(self, initial: Stacks) -> StoreKind:
        """Choose the fastest storage in which the states of all clients fit."""
        device = torch.device("cpu")
        bytes_per_client = 0
        for state in initial.values():
            for value in state.values():
                device = value.device
                bytes_per_client += value.nbytes
        needed = self.num_clients * bytes_per_client
        on_gpu = device.type == "cuda"
        if on_gpu:
            free_memory = torch.cuda.mem_get_info(device)[0]
            if needed <= MEMORY_SHARE * free_memory:
                return "device"
        if needed > MEMORY_SHARE * host_memory():
            return "disk"
        # Without a GPU the device's memory is that of the host.
        return "host" if on_gpu else "device"


def host_memory() -> int:
    """Return the memory in bytes that this process may use: that of the machine, or the limit of its container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        # There is no limit: no such file, or the word "max" in it.
        return total


class FederationData(ServerData, Protocol):
    """The part of :class:`perada.data.FederatedDataModule` that a round requires.

    Attributes:
        train_sizes: Number of training images of each client.
    """

    train_sizes: tuple[int, ...]

    @property
    def public_size(self) -> int:
        """Number of public images."""

    def test_batches(self, device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield batches of the prepared test images and labels, each image once."""


@dataclass(frozen=True)
class Settings:
    """Options of a run's rounds.

    Attributes:
        algorithm: The algorithm.
        training: Options of local training.
        distillation: Options of the server's distillation.
        weighting: Weights of the clients: ``uniform``, or ``samples`` for their numbers of training images.
        phases: Phases of a round of local training.
        seed: Seed of everything random that is not secret.
        clients_per_round: Number of clients that are drawn for each round; None for all.
        clients_per_chunk: Number of clients that train together; None to choose it at set-up.
        rule: The server rule.
        privacy: Sample-level privacy, of the clients' images; None without it.
        client_privacy: Client-level privacy; None without it.
        secure_sums: Options of secure sums of the clients' updates; None without them.
        storage: Options for the storage of the clients' states.
        loss_scaling: Options of the loss scales in float16; None in other precisions.
        drop_outliers: Whether updates that are much longer than the others are left out.
        diagnostics: Names of the :mod:`perada.federation.diagnostics` that are measured each round.
        lora_ranks: LoRA rank of each client; empty if all have the adapter's rank.
    """

    algorithm: Algorithm
    training: LocalTraining
    distillation: Distillation
    weighting: Weighting
    phases: tuple[Phase, ...]
    seed: int
    clients_per_round: int | None = None
    clients_per_chunk: int | None = None
    rule: ServerRule = field(default_factory=Mean)
    privacy: Privacy | None = None
    client_privacy: ClientPrivacy | None = None
    secure_sums: SecureSums | None = None
    storage: Storage = field(default_factory=Storage)
    loss_scaling: torch.amp.GradScaler | None = None
    drop_outliers: bool = False
    diagnostics: tuple[str, ...] = ()
    lora_ranks: tuple[int, ...] = ()

    @property
    def private(self) -> bool:
        """Whether any privacy was requested."""
        return self.privacy is not None or self.client_privacy is not None

    @property
    def has_personal_models(self) -> bool:
        """Whether clients predict with personal models, at least after a final fine-tuning."""
        return (
            self.algorithm.inference == "personal"
            or self.algorithm.personalization() is not None
            or bool(self.lora_ranks)
        )

    @property
    def privacy_options(self) -> str:
        """The options that request privacy, for messages (:func:`.privacy_options`)."""
        return privacy_options(self.privacy, self.client_privacy)

    @property
    def test_mode(self) -> bool:
        """Whether the noise of a private run is derived from the seed, which is then never written to disk."""
        return test_mode(self.privacy, self.client_privacy)


def check_sent_factors(settings: Settings, tensor_names: TensorNames, sent: Collection[str]) -> None:
    """Raise a ValueError if the server rule requires LoRA factors but clients do not send both factors of a layer.

    Args:
        settings: Options of the run.
        tensor_names: Names of the model's tensors.
        sent: Names of the tensors that a client sends in the first round.
    """
    rule = settings.rule
    if not rule.needs_factors:
        return
    reason = without_factors(settings.algorithm, tensor_names, sent)
    if reason:
        raise OptionError(
            f"server_rule={rule.kind}: {reason}, or a different rule", name="server_rule", value=rule.kind
        )


def without_factors(algorithm: Algorithm, tensor_names: TensorNames, sent: Collection[str]) -> str:
    """Return the reason why clients do not send both LoRA factors of any layer, with a remedy; empty if they do.

    Args:
        algorithm: The algorithm.
        tensor_names: Names of the model's tensors.
        sent: Names of the tensors that a client sends.
    """
    if not tensor_names.factors:
        return (
            f"the adapter has no LoRA factors A and B: the trained parameters are {tensor_names.parameter_range}; "
            "choose adapter='lora', without DoRA, on linear layers and convolutions"
        )
    name = algorithm.kind
    if algorithm.instead_of_factors:
        return f"clients of {name} send {algorithm.instead_of_factors}, not factors; choose a different algorithm"
    if any(pair.down in sent and pair.up in sent for pair in tensor_names.factors):
        return ""
    return f"clients of {name} do not send both A and B of a layer; choose a different algorithm"


def lora_ranks(
    algorithm: Algorithm,
    tensor_names: TensorNames,
    initial: State,
    client_names: Iterable[str],
    num_images: Iterable[int | None],
) -> tuple[int, ...]:
    """Return the LoRA rank of each client, in the order of the clients; empty if all have the adapter's rank.

    Args:
        algorithm: The algorithm, which chooses the ranks.
        tensor_names: Names of the model's tensors.
        initial: State of the model, for the adapter's rank.
        client_names: Name of each client.
        num_images: Number of training images of each client; None if it must stay unknown.

    Raises:
        ValueError: If the algorithm cannot determine a rank, or its ranks do not fit the adapter.
    """
    adapter_rank = max((initial[pair.down].shape[0] for pair in tensor_names.factors), default=0)
    if not adapter_rank:
        return ()
    lora_ranks: tuple[int, ...] = ()
    for number, (name, size) in enumerate(zip(client_names, num_images, strict=True)):
        rank = algorithm.lora_rank(number, name, size, adapter_rank)
        if rank is not None:
            lora_ranks += (rank,)
    grouped = [pair.down for pair in tensor_names.factors if initial[pair.down].shape[0] != initial[pair.up].shape[1]]
    if lora_ranks and grouped:
        raise ValueError(
            f"{type(algorithm).__name__} cuts LoRA to clients' ranks, but {grouped[0]!r} belongs to a grouped "
            "convolution, whose factors cannot be cut; exclude that layer (adapter_options: exclude_modules)"
        )
    return lora_ranks


def check_rule(settings: Settings) -> None:
    """Raise a ValueError if a server rule is used with an algorithm that requires the plain mean."""
    algorithm = settings.algorithm
    rule_name = type(settings.rule).__name__
    if type(settings.rule) is Mean:
        return
    if algorithm.merges_into_backbone:
        reason = (
            "merges the exact mean of the clients' products B·A and would undo the rule; leave server_rule out, or "
            "choose algorithm='fedavg'"
        )
    elif algorithm.needs_plain_mean:
        reason = algorithm.needs_plain_mean
    else:
        return
    raise OptionError(
        f"{type(algorithm).__name__} does not support server_rule={rule_name}: it {reason}",
        name="server_rule",
        value=rule_name,
    )


def check_average(settings: Settings) -> None:
    """Raise an OptionError if ensembles average probabilities, and the task does not define how."""
    blank_logits = torch.zeros(2, 1, 2)
    settings.training.task.ensemble(blank_logits, settings.algorithm.average)


def check_server_images(settings: Settings, num_public_images: int, labelled: int) -> None:
    """Raise a ValueError if an option requires images that the server does not have.

    Args:
        settings: Options of the run.
        num_public_images: Number of public images.
        labelled: Number of labelled images of the server.
    """
    rule = settings.rule
    algorithm = settings.algorithm
    distillation = settings.distillation
    lacking = ""
    if rule.needs == "public" and not num_public_images:
        lacking = "on public images, but the data has none; provide a public set (public=...)"
    if rule.needs == "labelled" and not labelled:
        lacking = (
            "on labelled images of the server, but the data has none; provide server_validation (or "
            "validation_fraction)"
        )
    if rule.needs and settings.training.task.per_pixel:
        lacking = f"for images, but the labels are {settings.training.task.labels_per_image}"
    if rule.needs and not algorithm.global_model:
        lacking = f"of the clients' models, but the clients of {algorithm.kind} do not send complete models"
    has_classes = settings.training.task.has_classes
    if rule.needs and not has_classes:
        lacking = "of classes, but the models predict numbers"
    if lacking:
        raise OptionError(
            f"server_rule={type(rule).__name__} uses predictions {lacking}; choose a different rule",
            name="server_rule",
            value=type(rule).__name__,
        )
    if algorithm.uses_distillation and distillation.steps and not num_public_images:
        raise ValueError(
            f"{type(algorithm).__name__} distils {distillation.steps} steps per round, but the data has no public "
            "set; provide one (public=...) or set distillation.steps=0"
        )
    if algorithm.uses_distillation and distillation.guard is not None and not settings.training.task.exclusive:
        remedy = "leave guard out"
        if has_classes:
            remedy += ", or set validate_every if the server has labelled images"
        raise ValueError(
            f"distillation: guard={distillation.guard!r} counts the classes that are predicted for images, but the "
            f"labels are {settings.training.task.labels_per_image}; {remedy}"
        )
    if algorithm.uses_distillation and distillation.validate_every:
        _check_validation(distillation.validate_every, has_classes, labelled)


def _check_validation(validate_every: int, has_classes: bool, labelled: int) -> None:
    """Raise an OptionError if the best state of distillation cannot be selected by the server's labelled images."""
    problem = ""
    if not has_classes:
        problem = "selects the state of the best accuracy, but the models predict numbers; leave validate_every out"
    elif not labelled:
        problem = (
            "requires labelled images on the server, but the data has none; provide server_validation (or "
            "validation_fraction), or set validate_every to 0"
        )
    if problem:
        raise OptionError(
            f"distillation: validate_every={validate_every} {problem}",
            name="distillation: validate_every",
            value=validate_every,
        )


def check_distilled_batch_norm(settings: Settings, tensor_names: TensorNames, num_public_images: int) -> None:
    """Raise a ValueError if distillation runs BatchNorm layers on single images, which have no statistics.

    Args:
        settings: Options of the run.
        tensor_names: Names of the model's tensors.
        num_public_images: Number of public images.
    """
    distillation = settings.distillation
    modes = (distillation.student_mode, distillation.teacher_mode)
    uses_statistics = modes != ("eval", "eval")
    if not (settings.algorithm.uses_distillation and distillation.steps and uses_statistics):
        return
    # In the mode "public", a teacher's batch consists of the images of all steps.
    one_image_at_once = distillation.batch_size == 1 and ("train" in modes or distillation.steps == 1)
    if not any(key.endswith("running_var") for key in tensor_names.keys):
        return
    if num_public_images == 1:
        cause = "the public set has 1 image"
    elif one_image_at_once:
        cause = "distillation: batch_size is 1"
    else:
        return
    raise ValueError(
        f"{cause}, but the adapter trains BatchNorm layers, which require at least 2 images per batch; use more "
        "images, set student_mode and teacher_mode of the distillation to 'eval', or use an adapter without BatchNorm "
        "(head, lora) or a backbone with LayerNorm"
    )
