# SPDX-License-Identifier: Apache-2.0
"""A site's data: those of one client of a federation whose other clients are elsewhere."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.data import Subset

from perada.core.batches import AnyBatch, CohortBatch, EvalBatch, one_of
from perada.core.rounds import Phase, PrivateSampling, RoundPlan, active_steps, make_plan
from perada.core.states import send
from perada.data.batches.loaders import PrivateRoundBatches, RoundBatches, loader
from perada.data.batches.samples import MapStore, Samples
from perada.data.datamodule import FederatedDataModule
from perada.data.federated import FederatedData


def only(data: FederatedData, place: int) -> FederatedData:
    """The data of the client at ``place`` alone, without what the server has."""
    names = None if data.client_names is None else [data.client_names[place]]
    test = [data.test[place]] if len(data.test) else []
    return replace(data, train=[data.train[place]], test=test, public=None, server_validation=None, client_names=names)


class OneClient:
    """Serves the local steps of one client, which has the ``number`` that it has in the federation.

    Batches, augmentation and what datasets draw follow from the number, so they are those of a simulation.

    Args:
        data: The client's data, alone; its rounds are configured.
        number: Of the client.
    """

    def __init__(self, data: FederatedDataModule, number: int) -> None:
        data.setup()
        self.data, self.number, self.size = data, number, data.train_sizes[0]

    @property
    def tests(self) -> int:
        """Number of test images."""
        store = self.data.checked.test
        return 0 if store is None else store.sizes[0]

    def plan(self, round: int, phases: Sequence[Phase], lengths: Sequence[int] = ()) -> RoundPlan:
        """The client's part of a round, in which phases are as long as ``lengths`` say, at least.

        A ValueError if they are of another number of phases.
        """
        plan = make_plan(round, [self.number], {self.number: self.size}, phases, self.data.batch_size)  # type: ignore[arg-type]  # looked up only
        if not lengths:
            return plan
        longest = tuple(max(own, given) for own, given in zip(plan.lengths, lengths, strict=True))
        return replace(plan, lengths=longest)

    def batches(
        self, plan: RoundPlan, device: torch.device, private: PrivateSampling | None = None
    ) -> Iterator[AnyBatch]:
        """The prepared local steps of a plan."""
        store = self._numbered()
        given = store, plan, self.data.batch_size, self.data.preparation.seed
        whole = RoundBatches(*given) if private is None else PrivateRoundBatches(*given, private)
        # Others may take more steps: nothing is done then, and a site may say any number.
        own = Subset(whole, [place for place, (*_, active) in enumerate(active_steps(plan)) if active])
        for batch in loader(own, store, self.data.num_workers):
            yield self.data.prepare(_moved(batch, device))  # type: ignore[type-var]  # either kind

    def comparison(self, round: int, device: torch.device) -> Iterator[CohortBatch]:
        """All training images, each once, for a client that compares global models on them."""
        plan = self.plan(round, [Phase("compare", 1)])
        for batch in map(one_of, self.batches(plan, device)):
            left = self.size - batch.step * batch.counts[0]  # what fills the last batch was compared already
            yield batch._replace(counts=(min(batch.counts[0], left),))

    def test_batches(self, device: torch.device) -> Iterator[EvalBatch]:
        """The prepared images that the client is evaluated on, each once."""
        batches: Iterable[EvalBatch] = self.data.val_dataloader()  # type: ignore[assignment]  # or an empty list
        for batch in batches:
            yield self.data.prepare(batch._replace(x=send(batch.x, device), y=send(batch.y, device)))

    def _numbered(self) -> Samples:
        store = self.data.served(self.data.checked.train)
        if isinstance(store, MapStore):  # what its datasets draw depends on the number
            numbered = MapStore([], store.labelled, store.size)
            numbered.datasets, numbered.num_classes = {self.number: store.datasets[0]}, store.num_classes  # type: ignore[assignment]  # looked up only
            numbered.sizes = {self.number: self.size}  # type: ignore[assignment]
            return numbered
        return _Numbered(store, self.number)  # type: ignore[return-value]  # its sizes are looked up only


class _Numbered:
    """A store of one client, which has another number."""

    def __init__(self, store: Samples, number: int) -> None:
        self.store, self.sizes = store, {number: store.sizes[0]}

    def take(self, owners: Tensor, indices: Tensor, key: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """As the store's."""
        return self.store.take(torch.zeros_like(owners), indices, key)


def _moved(batch: AnyBatch, device: torch.device) -> AnyBatch:
    if isinstance(batch, dict):
        return {name: one._replace(x=send(one.x, device), y=send(one.y, device)) for name, one in batch.items()}
    return batch._replace(x=send(batch.x, device), y=send(batch.y, device))
