# SPDX-License-Identifier: Apache-2.0
"""How the rounds of a federation go, and what they need of the data."""

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from perada.algorithms import Algorithm, TensorNames
from perada.algorithms.base import Stacks
from perada.algorithms.branches import RestOfWorld
from perada.core.checks import OptionError, check_choice
from perada.core.rounds import AnyBatch, Phase, RoundPlan
from perada.core.states import State
from perada.engine.loss_scaling import MaskedAdam, MaskedSGD
from perada.federation.store import ClientStore, DiskStore
from perada.privacy.options import ClientPrivacy, Privacy, test_mode
from perada.server import Distillation, Mean, ServerRule
from perada.server.aggregate import Weighting
from perada.server.distill import ServerData
from perada.server.sums import SecureSums

ClientOptimizer = Literal["sgd", "adam", "adamw"]
StoreKind = Literal["auto", "device", "host", "disk"]
SHARE = 0.25
"""Share of the device's free memory, then of the host's memory, that ``auto`` lets client states take."""
Loader = Callable[[RoundPlan], Iterable[AnyBatch]]
"""Gives the prepared local steps of a plan."""


@dataclass(frozen=True)
class LocalTraining:
    """How clients train. The optimiser is started afresh each round and phase."""

    optimizer: ClientOptimizer
    lr: dict[str, float]  # by role; a role without one has that of ``local``
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None  # each client's gradient of each role is scaled down to at most this norm
    multilabel: bool = False  # binary cross-entropy per label instead of cross-entropy

    def make(self, role: str, leaves: list[Tensor], factor: float, masked: bool = False) -> torch.optim.Optimizer:
        """Optimiser of a role's leaves (C, ...), with ``factor`` of its rate; ``masked`` lets clients skip steps."""
        rate = self.lr.get(role, self.lr["local"]) * factor
        if self.optimizer == "sgd":
            kind = MaskedSGD if masked else torch.optim.SGD
            return kind(leaves, lr=rate, momentum=self.momentum, weight_decay=self.weight_decay)
        if masked:
            return MaskedAdam(leaves, rate, self.weight_decay, decoupled=self.optimizer == "adamw")
        plain = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return plain(leaves, lr=rate, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class Storage:
    """Where the clients' states are held: ``auto`` takes the first of device, host and disk in which all fit."""

    kind: StoreKind = "auto"
    folder: Path | None = None  # of the files; by default a temporary one
    prune: bool = True  # delete files that no checkpoint needs any more
    clients: int = 0  # at most so many are ever written

    def __post_init__(self) -> None:
        check_choice("client_store", self.kind, get_args(StoreKind))

    def open(self, initial: Stacks, name: str = "") -> ClientStore:
        """Make a store; ``name`` tells the folders of several apart."""
        kind = self.kind
        values = [value for state in initial.values() for value in state.values()]
        if kind == "auto":
            needed = self.clients * sum(value.numel() * value.element_size() for value in values)
            device = values[0].device if values else torch.device("cpu")
            kind = "host" if device.type == "cuda" else "device"
            if device.type == "cuda" and needed <= SHARE * torch.cuda.mem_get_info(device)[0]:
                kind = "device"
            elif needed > SHARE * host_memory():
                kind = "disk"
        if kind == "disk":
            return DiskStore(initial, self.folder and self.folder / name, self.prune)
        return ClientStore(initial, host=kind == "host")


def host_memory() -> int:
    """Bytes of memory that this machine has, or lets this process have."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such limit
        return total


class FederationData(ServerData, Protocol):
    """What a round needs of the data (:class:`perada.data.FederatedDataModule` has it)."""

    train_sizes: tuple[int, ...]

    @property
    def public_size(self) -> int:
        """Number of public images."""

    def test_batches(self, device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
        """Prepared images and labels that clients are evaluated on, each once."""


@dataclass(frozen=True)
class Settings:
    """How the rounds go, as was asked for."""

    algorithm: Algorithm
    training: LocalTraining
    distillation: Distillation
    weighting: Weighting
    phases: tuple[Phase, ...]
    seed: int
    clients_per_round: int | None = None  # drawn in each round; by default all
    clients_per_chunk: int | None = None  # in one forward and backward pass; by default all of the round's
    rule: ServerRule = field(default_factory=Mean)
    privacy: Privacy | None = None
    client_privacy: ClientPrivacy | None = None
    secure_sums: SecureSums | None = None
    storage: Storage = field(default_factory=Storage)
    loss_scaling: torch.amp.GradScaler | None = None  # in float16, its options
    drop_outliers: bool = False  # leave out updates much longer than the others
    diagnostics: tuple[str, ...] = ()  # of perada.federation.diagnostics, to be measured each round
    lora_ranks: tuple[int, ...] = ()  # of each client; empty where all have the adapter's

    @property
    def private(self) -> bool:
        """Whether any privacy was asked for."""
        return self.privacy is not None or self.client_privacy is not None

    @property
    def test_mode(self) -> bool:
        """Whether the noise of a private run follows from the seed, which is then written nowhere."""
        return test_mode(self.privacy, self.client_privacy)


def check_factors(settings: Settings, tensor_names: TensorNames, sent: Collection[str]) -> None:
    """Refuse, by a ValueError, a rule on LoRA's factors where clients do not send both of a layer.

    ``sent`` are the names that a client sends in the first round.
    """
    if settings.rule.needs_factors and (lack := without_factors(settings.algorithm, tensor_names, sent)):
        raise OptionError(
            f"server_rule={settings.rule.kind}: {lack}, or another rule", name="server_rule", value=settings.rule.kind
        )


def without_factors(algorithm: Algorithm, tensor_names: TensorNames, sent: Collection[str]) -> str:
    """Why there are no two factors of LoRA that clients send, and what to do; empty if there are."""
    if not tensor_names.factors:
        return (
            f"the adapter has none of LoRA's factors A and B: what is trained are {tensor_names.parameter_range}; "
            "choose adapter='lora', without DoRA, on linear layers and convolutions"
        )
    sends_both = any(pair.down in sent and pair.up in sent for pair in tensor_names.factors)
    name = algorithm.kind
    base = getattr(algorithm, "base", algorithm)
    if isinstance(base, RestOfWorld):
        return f"clients of {name} send means of factors that they moved, not factors; choose another algorithm"
    return "" if sends_both else f"clients of {name} do not send both A and B of a layer; choose another algorithm"


def lora_ranks(
    algorithm: Algorithm, tensor_names: TensorNames, initial: State, names: Iterable[str], sizes: Iterable[int | None]
) -> tuple[int, ...]:
    """What the algorithm says of clients' ranks of LoRA, by their numbers; nothing where all have the adapter's.

    The ``initial`` state is a model's. A ValueError if the algorithm cannot tell one, or what it says does not fit.
    """
    most = max((initial[pair.down].shape[0] for pair in tensor_names.factors), default=0)
    clients = enumerate(zip(names, sizes, strict=True))
    of_clients = [algorithm.lora_rank(number, name, size, most) for number, (name, size) in clients if most]
    ranks = tuple(rank for rank in of_clients if rank is not None)
    grouped = [pair.down for pair in tensor_names.factors if initial[pair.down].shape[0] != initial[pair.up].shape[1]]
    if ranks and grouped:
        raise ValueError(
            f"{type(algorithm).__name__} cuts LoRA to clients' ranks, and {grouped[0]!r} is of a grouped convolution, "
            "whose factors cannot be cut; leave it out (adapter_options: exclude_modules)"
        )
    return ranks


def check_rule(settings: Settings) -> None:
    """Refuse, by a ValueError, a server rule beside an algorithm that works on the plain mean alone."""
    algorithm = settings.algorithm
    rule = type(settings.rule)
    reasons = {
        "merges the exact mean of the clients' products B·A and would undo the rule; leave server_rule out, or choose "
        "algorithm='fedavg'": algorithm.merges_into_backbone,
        "takes a client's own part out of the mean of all branches, and the rule leaves no mean; leave server_rule "
        "out, or choose algorithm='feddpa'": isinstance(algorithm, RestOfWorld),
    }
    for reason, holds in reasons.items():
        if holds and rule is not Mean:
            raise OptionError(
                f"server_rule={rule.__name__} cannot be used with {type(algorithm).__name__}, which {reason}",
                name="server_rule",
                value=rule.__name__,
            )


def check_server_images(settings: Settings, public: int, labelled: int) -> None:
    """Refuse, by a ValueError, what needs images that the server has not; the numbers that it has are given."""
    rule = settings.rule
    algorithm = settings.algorithm
    distillation = settings.distillation
    lacking = ""
    if rule.needs == "public" and not public:
        lacking = "on public images, and there are none; give a public set (public=...)"
    if rule.needs == "labelled" and not labelled:
        lacking = (
            "on labelled images of the server, and there are none; give server_validation (or validation_fraction)"
        )
    if rule.needs and not algorithm.global_model:
        lacking = f"of what clients send, and the clients of {algorithm.kind} do not send whole models"
    if lacking:
        raise OptionError(
            f"server_rule={type(rule).__name__} looks at predictions {lacking}; choose another rule",
            name="server_rule",
            value=type(rule).__name__,
        )
    if algorithm.uses_distillation and distillation.steps and not public:
        raise ValueError(
            f"{type(algorithm).__name__} distils {distillation.steps} steps a round, but the data has no "
            "public set; give one (public=...) or set the number of distillation steps to 0"
        )
    if algorithm.uses_distillation and distillation.guard is not None and settings.training.multilabel:
        raise ValueError(
            f"distillation: guard={distillation.guard!r} counts predicted classes, and images here have several "
            "labels; leave the guard out, or set validate_every where the server has labelled images"
        )
    if algorithm.uses_distillation and distillation.validate_every and not labelled:
        raise OptionError(
            f"distillation: validate_every={distillation.validate_every} needs labelled images on the server, "
            "and the data has none; give server_validation (or validation_fraction), or set validate_every to 0",
            name="distillation: validate_every",
            value=distillation.validate_every,
        )


def check_distilled_batch_norm(settings: Settings, tensor_names: TensorNames, public: int) -> None:
    """Refuse, by a ValueError, steps of distillation on one image where a BatchNorm takes its statistics.

    ``public`` is the number of public images.
    """
    distillation = settings.distillation
    modes = (distillation.student_mode, distillation.teacher_mode)
    uses_statistics = modes != ("eval", "eval")
    if not (settings.algorithm.uses_distillation and distillation.steps and uses_statistics):
        return
    # Teachers in the mode "public" see the images of all steps together.
    one_image_at_once = distillation.batch_size == 1 and ("train" in modes or distillation.steps == 1)
    if not any(key.endswith("running_var") for key in tensor_names.keys):
        return
    if public == 1:
        cause = "the public set has 1 image"
    elif one_image_at_once:
        cause = "distillation: batch_size is 1"
    else:
        return
    raise ValueError(
        f"{cause}, and the adapter trains BatchNorm layers, which need at least 2 images in a batch; give more, set "
        "student_mode and teacher_mode of the distillation to 'eval', or choose an adapter without them (head, lora) "
        "or a backbone with LayerNorm"
    )
