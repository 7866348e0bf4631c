# SPDX-License-Identifier: Apache-2.0
"""Rounds without a Trainer: a small federation on any device, whose data stay on the CPU until a batch is needed."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pytorch_lightning.utilities import move_data_to_device
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import Algorithm, TensorNames
from perada.core.rounds import AnyBatch, RoundPlan
from perada.core.states import State, get_state
from perada.engine import Engine
from perada.federation import Federation
from perada.federation.cohort import Cohort
from perada.federation.evaluation import EvaluationPass
from perada.federation.server import RoundReport
from perada.federation.settings import LocalTraining, Settings, Storage
from perada.models.adapted import find_tensor_names, insert_adapter
from perada.models.backbones import build_backbone
from perada.privacy import Privacy
from perada.privacy.account import Account, QueryPlan
from perada.privacy.dry_run_checks import plan_queries
from perada.privacy.protection import Protection
from perada.scores.metrics import make_metrics
from perada.server import Distillation
from perada.tasks import Classification
from tests.methods import make_method

from ..algorithms.problems import ADAPTER_OF, LORA, MERGING, network

CLASSES = 3
SIZES = (8, 5, 12, 3)
BATCH = 4
SMALL_NETWORKS = ("net", "linear", "group_net")
"""Networks of one channel in float64; others are backbones by name, for 32×32 images in float32."""


@dataclass
class Simulation:
    """A federation and its data.

    Attributes:
        federation: The federation.
        served: The data.
        device: Where it trains.
    """

    federation: Federation
    served: perada.FederatedDataModule
    device: torch.device

    def prepared(self, batches: Iterable[AnyBatch]) -> Iterator[AnyBatch]:
        """Yield batches on the device, prepared."""
        for batch in batches:
            yield self.served.prepare(move_data_to_device(batch, self.device))

    def load(self, plan: RoundPlan) -> Iterator[AnyBatch]:
        """Yield the batches of a plan's local steps."""
        return self.prepared(self.served.cohort_loader(plan))

    def begin_round(self, round: int) -> Cohort:
        """Begin a round as a Trainer does, so that updates are added up where only their mean is needed."""
        return self.federation.begin_round(
            self.served.shares(round), loader=self.load, train_sizes=self.served.train_sizes
        )

    def run_round(self, round: int) -> RoundReport:
        """Run a round from its begin to its end."""
        cohort = self.begin_round(round)
        for batch in self.load(cohort.plan):
            cohort.step(batch)
        return self.federation.end_round(self.served, self.load)

    def score(self) -> None:
        """Score all models on all test images."""
        evaluation = EvaluationPass(
            self.federation, make_metrics("accuracy", Classification(), CLASSES), range(self.federation.num_clients)
        )
        with torch.no_grad():
            for index, batch in enumerate(self.served.val_dataloader()):
                moved = self.served.transfer_batch_to_device(batch, self.device, 0)
                evaluation.step(self.served.prepare(moved), index)

    def personalize(self) -> None:
        """Fine-tune for every client, where the algorithm does so after the last round."""
        tuning = self.federation.settings.algorithm.personalization()
        if tuning is None:
            return
        _, phase = tuning
        plan = self.served.plan_for(range(self.federation.num_clients), self.federation.rounds_done, (phase,))
        account = self.federation.protection.image_account
        private = None if account is None else account.sampling(is_tuning=True)
        self.federation.personalize([plan], lambda plan: self.prepared(self.served.cohort_loader(plan, private)))


def simulate(
    algorithm: Any,
    backbone: str = "net",
    adapter: Any = "full",
    *,
    device: str = "cpu",
    train_backbone: Any = False,
    privacy: Privacy | None = None,
    training: LocalTraining | None = None,
    engine: Any = "auto",
    sizes: tuple[int, ...] = SIZES,
    epochs: float = 1,
    **settings: Any,
) -> Simulation:
    """Return a federation of four unequal clients before its first round.

    Args:
        algorithm: Name of a method, or an algorithm.
        backbone: A network of :data:`SMALL_NETWORKS`, or a backbone by name.
        adapter: Name of an adapter, or a PEFT configuration.
        device: Where it trains.
        train_backbone: Option of ``insert_adapter``.
        privacy: Privacy of the clients' images.
        training: Options of local training.
        engine: Name of the engine.
        sizes: Numbers of the clients' training images.
        epochs: Passes of a client over its images in a round.
        settings: Further fields of ``Settings``.
    """
    is_small = backbone in SMALL_NETWORKS
    shape = (1, 6, 6) if is_small else (3, 32, 32)
    dtype = torch.float64 if is_small else torch.float32
    random = torch.Generator().manual_seed(0)

    def images(count: int) -> torch.Tensor:
        return torch.rand(count, *shape, generator=random).to(dtype)

    def labelled(count: int) -> TensorDataset:
        return TensorDataset(images(count), torch.arange(count) % CLASSES)

    data = perada.FederatedData(
        [labelled(count) for count in sizes],
        [labelled(4) for _ in sizes],
        TensorDataset(images(6)),
        server_validation=labelled(3),
        num_classes=CLASSES,
    )
    served = perada.FederatedDataModule(data, batch_size=BATCH, flip=True)
    served.clients_per_chunk = settings.get("clients_per_chunk")
    algorithm = make_method(algorithm)
    phases = algorithm.phases(epochs, None)
    built = build_backbone(
        small_network(backbone) if is_small else backbone,
        CLASSES,
        pretrained=False,
        image_size=32 if backbone == "test_vit" else None,
    )
    adapted = insert_adapter(built, adapter, train_backbone=train_backbone)
    tensor_names = find_tensor_names(adapted.model, adapted.backbone.head)

    protection = None
    private_sampling = None
    if privacy is not None:
        initial = algorithm.initial(lambda index: get_state(adapted.model))
        queries = plan_queries(algorithm, tensor_names, initial, phases, len(sizes))
        account = Account(privacy, sizes, BATCH, queries, tuning_queries(algorithm, tensor_names, initial, len(sizes)))
        protection = Protection(image_account=account)
        private_sampling = account.sampling()
    served.configure_rounds(
        seed=0,
        clients_per_round=None,
        phases=phases,
        image_config=adapted.backbone.image_config,
        private=private_sampling,
    )

    model = adapted.model.to(device)
    training = training or LocalTraining("sgd", {"personal": 0.1, "local": 0.1}, momentum=0.9)
    options = {"distillation": Distillation(2, 4), "storage": Storage("device"), "privacy": privacy} | settings
    all_settings = Settings(
        algorithm=algorithm, training=training, weighting="uniform", phases=phases, seed=0, **options
    )
    federation = Federation(
        Engine(model, engine),
        tensor_names,
        lambda index: get_state(model),
        all_settings,
        len(sizes),
        protection=protection,
    )
    return Simulation(federation, served, torch.device(device))


def tuning_queries(algorithm: Algorithm, tensor_names: TensorNames, initial: State, clients: int) -> QueryPlan | None:
    """Return the gradients that the fine-tuning after the last round asks for; None if there is none."""
    tuning = algorithm.personalization()
    if tuning is None:
        return None
    tuned_algorithm, phase = tuning
    return plan_queries(tuned_algorithm, tensor_names, initial, (phase,), clients)


def small_network(kind: str) -> nn.Module:
    """Return one of :data:`SMALL_NETWORKS`, with dropout."""
    if kind != "group_net":
        return network(kind, dropout=0.2)
    # Private training takes no BatchNorm.
    model = network("net", dropout=0.2)
    model.norm = nn.GroupNorm(2, 4).double()
    return model


@dataclass(frozen=True)
class Case:
    """A method, what it trains, and the network.

    Attributes:
        method: Name of the method.
        backbone: The network, as of ``simulate``.
        adapter: Adapter of the network.
        train_backbone: Whether the backbone is trained, or merged into.
    """

    method: str
    backbone: str = "net"
    adapter: Any = "full"
    train_backbone: Any = False

    def __str__(self) -> str:
        return f"{self.method}-{self.backbone}"

    def simulate(self, **options: Any) -> Simulation:
        """Return the federation before its first round."""
        return simulate(self.method, self.backbone, self.adapter, train_backbone=self.train_backbone, **options)


def case_of(method: str, backbone: str = "net") -> Case:
    """Return the case in which a method can be run on a small network."""
    if method.endswith("_adapter"):
        return Case(method, backbone, LORA, train_backbone=True)
    if method in MERGING:
        return Case(method, backbone, LORA, train_backbone="merged")
    return Case(method, backbone, ADAPTER_OF.get(method, "full"))
