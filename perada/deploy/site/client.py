# SPDX-License-Identifier: Apache-2.0
"""One client's side of a recipe at its site: it trains, fine-tunes and scores on its own images."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from perada.algorithms import Algorithm, Broadcast, Stacks
from perada.core.rounds import AnyBatch, Phase, PrivateSampling, RoundPlan, make_plan, one_of
from perada.core.states import State, cut_ranks, expand, to_device
from perada.data.batches.samples import EvalBatches, MapStore, RoundBatches, Samples, loader, make_store
from perada.data.federated import FederatedData
from perada.data.fingerprints import Fingerprint, fingerprint_of
from perada.deploy.protocol import RefusalError, Request
from perada.deploy.recipe import Recipe, first_kept, labels_digest
from perada.deploy.site.budget import SiteBudget
from perada.deploy.site.file import Limits
from perada.deploy.site.level import SiteLevel
from perada.deploy.state import IMAGES_LEDGER, RunState
from perada.deploy.sums.vector import Uint64Vector
from perada.engine.engine import compare, ensemble
from perada.federation.cohort import Cohort, Site, Trained
from perada.federation.scores import Scores
from perada.federation.settings import Settings
from perada.lightning.parts import Parts
from perada.lightning.setup import check_first, check_private, configure_rounds, protect
from perada.privacy.account import Row
from perada.privacy.accounting import Ledger, Ledgers, check_delta_covers
from perada.privacy.protection import Protection
from perada.server import Distillation, Mean
from perada.server.aggregate import double

SamplesT = TypeVar("SamplesT", bound=Samples)
ValueT = TypeVar("ValueT")
EMPTY: Dataset[Any] = TensorDataset(torch.empty(0))
"""What stands for the data of clients that a site knows nothing of."""


class Client:
    """A recipe with the data of one site.

    Args:
        recipe: With the site's data alone.
        limits: Of the site.

    Attributes:
        planned: Noisy steps of one whole run, as {(σ, q): steps}: all rounds that the recipe's own limits leave room
            for, and the fine-tuning; empty without privacy.
        budget: What the site allows of its images.

    Raises:
        ValueError: If data, network and recipe do not fit one another, or the recipe's privacy cannot be kept.
    """

    def __init__(self, recipe: Recipe, limits: Limits) -> None:
        self.recipe, self.module, self.data, self.limits = recipe, recipe.module, recipe.data, limits
        self.data.setup()
        if self.data.num_clients != 1:
            raise ValueError(f"a site has the data of one client, and these are of {self.data.num_clients}; name one")
        if limits.max_epsilon is not None and recipe.loop.privacy is None:
            raise ValueError(
                f"max_epsilon={limits.max_epsilon} of the site cannot be kept by a recipe without privacy, which shows "
                "its images without noise; approve a recipe with privacy, or leave the limit out"
            )
        if recipe.loop.privacy is not None and limits.delta >= 1 / self.size:
            raise ValueError(
                f"limits: delta={limits.delta} is not below 1 / {self.size}, the site's training images: it allows to "
                "show one image in full; give less"
            )
        if limits.max_site_epsilon is not None and not recipe.noisy:
            raise ValueError(
                f"max_site_epsilon={limits.max_site_epsilon} of the site cannot be kept by a recipe without "
                "client_privacy and secure_sums; approve one that has both, or leave the limit out"
            )
        self._check_deltas_of_sites()
        recipe.build(self.data.num_classes, self.data.multilabel)
        # What needs the server's images or other clients is the server's.
        alone = {"clients_per_round": None, "client_privacy": None, "rule": Mean(), "weighting": "uniform"}
        self.settings: Settings = recipe.settings(distillation=Distillation(steps=0), **alone)
        parts = Parts(self.data, self.module, self.settings)
        with recipe.context():
            self._protection = protection = protect(parts, recipe.rounds)
            self._noise = [] if protection.images is None else list(protection.images.noise_multipliers)
            configure_rounds(parts, protection)
            # As a simulation of the recipe: with its own rule, weighting and privacy of whole clients.
            simulated = Parts(self.data, self.module, recipe.settings(clients_per_round=None))
            check_private(simulated)
            self._check_public_images()
            check_first(simulated, self.data.trial_batch([0]), fits=True)
        self.level = SiteLevel(recipe, limits) if recipe.noisy else None
        self._site = Site(self.module.engine, self.module.slot, self.settings, protection)
        self.images, self._public = recipe.public_images(), (-1, "")
        self.planned = self._planned()
        self.budget = SiteBudget(limits, limits.max_epsilon, self.planned)

    def _check_deltas_of_sites(self) -> None:
        """Refuse, by a ValueError, a δ with which one of the sites of a sum could be shown in full.

        A site does not know how many sites there are. With secure sums it knows that there may be as few as
        ``min_sites``, and does not leave this to the server, against which the noise is meant to hold.
        """
        recipe = self.recipe
        client_privacy = recipe.loop.client_privacy
        sums = recipe.loop.secure_sums
        if client_privacy is None or sums is None:
            return
        for section, delta in (("client_privacy", client_privacy.delta), ("limits", self.limits.delta)):
            check_delta_covers(section, delta, sums.min_sites, "sites of a secure sum (min_sites)")

    def _check_public_images(self) -> None:
        """Refuse, by a ValueError, a private recipe whose public set holds images of the site.

        Only the site can compare them: nobody else has its images.
        """
        public, loop = self.recipe.public, self.recipe.loop
        private = loop.privacy is not None or loop.client_privacy is not None
        if private and public is not None:
            store = make_store([public], labelled=False)
            replace(self.data.checked, public=store).check_overlap()

    def _planned(self) -> Counter[tuple[float, float]]:
        account, tuned = self.protection(None, 0).images, self.settings.algorithm.personalization() is not None
        if account is None:
            return Counter()
        for kind, times in (("train", self.recipe.rounds), ("tune", int(tuned))):
            order = Request(kind, "0" * 32, "0" * 64)  # type: ignore[arg-type]  # one of two
            costs = account.cost(self.plan(order), kind == "tune") if times else []
            for _ in range(times):
                if not account.affordable([0], tuning=kind == "tune"):
                    break
                account.spend(costs)
        return Counter(account.ledgers.release.history(0))

    @property
    def size(self) -> int:
        """Training images."""
        return self.data.train_sizes[0]

    @property
    def tests(self) -> int:
        """Test images."""
        store = self.data.checked.test
        return 0 if store is None else store.sizes[0]

    @property
    def labels(self) -> str:
        """A digest of the classes, in their order: sites of one federation have the same."""
        return labels_digest(self.data.num_classes, self.data.multilabel, self.data.classes)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Hashes of the site's images and labels, which stay there: a run goes on with the same ones only."""
        return fingerprint_of(self.data.checked, None, self.data.evaluate_on)

    def protection(self, account: dict[str, Any] | None, rounds_done: int) -> Protection:
        """The ledgers of a run that has trained so many rounds, of which ``account`` is the state; one run at a time.

        Every round is planned for: with fewer, the site spends less than its target.
        """
        made = self._protection
        if made.images is not None:
            ledgers, noise = Ledgers().state_dict(), self._noise
            new = {"ledgers": ledgers, "lost": ledgers, "noise_multipliers": noise, "least_noise": noise}
            own = made.images
            own.load_state_dict(account or new | {"sampling": own.options.sampling}, rounds_done)
        return made

    def plan(self, order: Request, phases: Sequence[Phase] = ()) -> RoundPlan:
        """The site's steps, by default of all phases of the order.

        Ledgers know the site as client 0, and what is private does not follow from its number. All else does: batches,
        augmentation and what datasets draw are those of a simulation.
        """
        number = 0 if self.settings.privacy is not None else order.client
        usual = [self._tuning()[1]] if order.kind == "tune" else self.settings.phases
        sizes = numbered_list(self.size, number, filler=0)
        return make_plan(order.round, [number], sizes, phases or usual, self.data.batch_size)

    def batches(self, plan: RoundPlan, private: PrivateSampling | None = None) -> Iterator[AnyBatch]:
        """The prepared local steps of a plan."""
        data, device = self.data, self.recipe.device
        store = numbered(data.served(data.checked.train), plan.clients[0])
        batches = RoundBatches(store, plan, data.batch_size, data.prepare.seed, private)
        for batch in loader(batches, store, data.num_workers):
            yield data.prepare(data.transfer_batch_to_device(batch, device, 0))

    def test_batches(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The site's prepared test images with their labels, as a simulation gives them to the client of a number."""
        data, device = self.data, self.recipe.device
        if data.checked.test is None:
            return
        store = numbered(data.served(data.checked.test), number)
        batches = EvalBatches(store, data.eval_batch_size, data.prepare.seed)
        for batch in loader(batches, store, data.num_workers):
            prepared = data.prepare(data.transfer_batch_to_device(batch, device, 0))
            yield prepared.x, prepared.y

    def costs(self, order: Request, protection: Protection, total: Ledger) -> list[Row] | None:
        """What training will spend; None if the recipe's limits in this run, or the site's in all, leave no room."""
        account, tuning = protection.images, order.kind == "tune"
        if account is None:
            return []
        if not account.affordable([0], tuning=tuning):
            return None
        costs = account.cost(self.plan(order), tuning=tuning)
        more = Counter[tuple[float, float]]()
        for _, sigma, rate, steps, _ in costs:
            more[sigma, rate] += steps
        return costs if self.budget.affords(total.history(IMAGES_LEDGER), more) else None

    def train(
        self, order: Request, given: State, state: RunState, protection: Protection, only_step: AnyBatch | None = None
    ) -> tuple[Trained, dict[str, float], str]:
        """Train a round, or fine-tune, from what the server sent, or take one step; the ledgers are not touched.

        Returns:
            What came of it; losses by role, none where training is private; why a sample could not be read, or "".
        """
        plan, tuning = self.plan(order), order.kind == "tune"
        with self.recipe.context():
            if tuning:
                start = to_device(given, self.recipe.device)
                tuned = self._tuning()[0]
                kept, received = first_kept(tuned.kept(start, self.module.slot)), self._sent(tuned, order, start)
            else:
                kept, received = self._kept(state), self._received(order, given)
            cohort = Cohort(self._site, plan, kept, received, order.factor, tuning)
            sampling = None if protection.images is None else protection.images.sampling(tuning)
            for batch in self.batches(plan, sampling) if only_step is None else [only_step]:
                cohort.step(batch)
            trained = cohort.close()
        shown = self.recipe.loop.privacy is None and self.recipe.loop.client_privacy is None
        losses = {role: float(loss[0]) for role, loss in cohort.mean_losses().items()} if shown else {}
        finite = {role: loss for role, loss in losses.items() if math.isfinite(loss)}
        return trained, finite, next(iter(cohort.failed.values()), "")

    def digest_of_public(self, round: int) -> str:
        """A digest of the public images that the sum of a round has logits of; "" if it has none."""
        recipe, images = self.recipe, self.images
        if not recipe.distils(round):
            return ""
        if not images.public_size:
            raise RefusalError("the recipe distils, and has no public images here", "other")
        if self._public[0] != round:
            self._public = round, images.digest(images.used(recipe.loop.distillation, round))
        return self._public[1]

    def part_of_sum(self, state: RunState, sites: int, told: Collection[str]) -> Uint64Vector:
        """The site's vector for the sum of its round over so many sites, with those of its losses that are ``told``.

        Raises:
            Refused: If a number is too large for the sum.
        """
        recipe, round, loop, logits = self.recipe, state.round, self.recipe.loop, None
        if recipe.distils(round):
            model = expand(to_device(recipe.template.initial | state.shown | state.update, recipe.device), 1)
            batches = recipe.teacher_batches(round, self.images)

            def read(rows: Tensor) -> Tensor:
                return self.images.public_images(rows, recipe.device)

            with recipe.context():
                parts = batches.logits(self.module.engine, model, read)
                logits = torch.cat([double(part)[0] for part in parts])
        weight = 1.0 if loop.weighting == "uniform" else float(self.size)
        try:
            losses = {role: loss for role, loss in state.losses.items() if role in told}
            sent = state.update if self.level is None else self.level.part(state, sites)
            return recipe.contents(round, self.images).vector(sent, weight, logits, losses, sites)
        except ValueError as error:
            raise RefusalError(str(error), "broken") from None

    def scores_of_sum(self, state: RunState, sites: int, told: Collection[str]) -> Uint64Vector:
        """The site's vector for a sum of scores over so many sites, with those that are ``told``."""
        numbers = {name: number for name, number in state.numbers.items() if name in told}
        return self.recipe.contents_of_scores().vector({}, 1.0, None, numbers, sites)

    def score(self, order: Request, shared: State, members: State, state: RunState) -> dict[str, Scores]:
        """The ``personal`` model, where there is one, and the ``global`` one on the site's test images."""
        settings, module = self.settings, self.module
        shared = to_device(shared, self.recipe.device)
        models = {}
        personal = self.personal(shared, state)
        if personal is not None:
            models["personal"] = personal
        if settings.algorithm.global_model:
            held = {"members": to_device(members, self.recipe.device)} if members else {}
            models["global"] = settings.algorithm.members(shared, held)
        found = {name: Scores(module.metrics, module.multilabel) for name in models}
        average = settings.algorithm.average
        with torch.no_grad(), self.recipe.context():
            for x, y in self.test_batches(order.client):
                for name, states in models.items():
                    logits = ensemble(module.engine.shared_logits(states, x), average, module.multilabel)
                    found[name].update(logits.unsqueeze(0), y)
        return found

    def personal(self, shared: State, state: RunState) -> State | None:
        """The state (1, ...) that the site predicts with; None where that is the global one."""
        algorithm, device, rank = self.settings.algorithm, self.recipe.device, state.rank
        if state.tuned is not None:
            own = self._tuning()[0].personal(_to(state.tuned, device), shared)
        elif algorithm.inference == "personal":
            own = algorithm.personal(self._kept(state), shared)
        elif rank:
            own = expand(shared, 1)
        else:
            return None
        return cut_ranks(own, self.module.slot.factors, torch.tensor([rank])) if rank else own

    def _tuning(self) -> tuple[Algorithm, Phase]:
        tuning = self.settings.algorithm.personalization()
        assert tuning is not None
        return tuning

    def _kept(self, state: RunState) -> Stacks:
        if state.kept is not None:
            return _to(state.kept, self.recipe.device)
        return first_kept(self.settings.algorithm.kept(self.recipe.template.initial, self.module.slot))

    def _received(self, order: Request, given: State) -> State:
        """What the client received, (1, ...); of several global models it chooses its own."""
        algorithm = self.settings.algorithm
        if not algorithm.compares:
            return expand(to_device(given, self.recipe.device), 1)
        shared = to_device(given, self.recipe.device)
        batches = []
        for batch in map(one_of, self.batches(self.plan(order, [Phase("compare", 1)]))):
            left = self.size - batch.step * batch.counts[0]  # what fills the last batch was compared already
            batches.append(batch._replace(counts=(min(batch.counts[0], left),)))
        losses = compare(self.module.engine, algorithm.members(shared, {}), batches, 1, self.module.multilabel)
        return self._sent(algorithm, order, shared, losses)

    def _sent(self, algorithm: Algorithm, order: Request, shared: State, losses: Tensor | None = None) -> State:
        """What the server would send the site in an algorithm, (1, ...)."""
        given = order.round, (order.client,), order.clients, self.settings.seed, losses
        ranks = (order.rank,) if order.rank else ()
        return algorithm.broadcast(Broadcast(shared, self.module.slot, *given, lora_ranks=ranks))


def _to(stacks: Stacks, device: torch.device) -> Stacks:
    return {role: to_device(state, device) for role, state in stacks.items()}


def single_client_data(data: FederatedData, place: int) -> FederatedData:
    """The data of the client at ``place`` alone, without what the server has."""
    names = None if data.client_names is None else [data.client_names[place]]
    test = [data.test[place]] if len(data.test) else []
    return replace(data, train=[data.train[place]], test=test, public=None, server_validation=None, client_names=names)


def numbered(store: SamplesT, number: int) -> SamplesT:
    """A store of one client, in which it has the ``number`` that it has in the federation.

    What is drawn for a client goes by its number. The clients before it are there without samples.
    """
    made = copy(store)
    made.sizes = tuple(numbered_list(store.sizes[0], number, filler=0))
    made.starts = torch.zeros(number + 1, dtype=torch.int64)
    made.class_counts = None if store.class_counts is None else store.class_counts.expand(number + 1, -1)
    if isinstance(made, MapStore):
        made.datasets = numbered_list(made.datasets[0], number, filler=EMPTY)
    return made


def numbered_list(value: ValueT, number: int, filler: ValueT) -> list[ValueT]:
    """A list with the ``value`` at the place ``number``, which is the last, and the ``filler`` before it."""
    return [filler] * number + [value]
