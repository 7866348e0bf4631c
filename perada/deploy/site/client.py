# SPDX-License-Identifier: Apache-2.0
"""A client at its site: it trains, fine-tunes and scores the models of a recipe on its own images."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from perada.algorithms import Algorithm, Broadcast, Stacks
from perada.core.rounds import AnyBatch, Phase, PrivateSampling, RoundPlan, make_plan, one_of
from perada.core.states import State, cut_ranks, double, expand, to_device
from perada.data.batches.loaders import loader
from perada.data.batches.round_batches import EvalBatches, RoundBatches
from perada.data.batches.samples import PUBLIC_SET, MapStore, Samples, make_store
from perada.data.federated import FederatedData
from perada.data.fingerprints import Fingerprint, fingerprint_of
from perada.deploy.protocol import RejectionError, Request
from perada.deploy.recipe import Recipe, initial_stacks, labels_digest
from perada.deploy.scores import claimed_name
from perada.deploy.site.budget import SiteBudget
from perada.deploy.site.file import Limits
from perada.deploy.site.level import SitePrivacy
from perada.deploy.state import IMAGES_LEDGER, RunState, SummingState
from perada.deploy.sums.vector import Uint64Vector
from perada.engine.engine import losses_of_members
from perada.federation.both_models import (
    BothModels,
    Examples,
    personal_share_of,
    statistics_for,
    typical_images_of,
)
from perada.federation.chunk import LocalRound
from perada.federation.cohort import ClientResults, Cohort
from perada.federation.local_trainer import LocalTrainer
from perada.federation.settings import Settings
from perada.federation.setup_checks import check_run
from perada.federation.typical_images import MAX_EXAMPLES
from perada.lightning.privacy_setup import check_private, plan_privacy
from perada.lightning.run_context import RunContext
from perada.lightning.setup import check_first_batch, configure_rounds, setup_of_run
from perada.privacy.account import Account, StepCost
from perada.privacy.accounting import Ledger, Ledgers, check_delta_covers
from perada.privacy.options import privacy_options
from perada.privacy.protection import Protection
from perada.scores.accumulation import Scores
from perada.server import Distillation, Mean

SamplesT = TypeVar("SamplesT", bound=Samples)
ValueT = TypeVar("ValueT")
EMPTY: Dataset[Any] = TensorDataset(torch.empty(0))
"""Placeholder for the data of other clients, which a site cannot see."""


class TrainingResult(NamedTuple):
    """Result of a site's training.

    Attributes:
        trained: Results of the client (the client axis has length 1).
        losses: Finite losses by role; empty where training is private.
        failure: Why a sample could not be read; "" if all could.
    """

    trained: ClientResults
    losses: dict[str, float]
    failure: str


@dataclass(frozen=True)
class SiteScores:
    """Scores of a site's models on its own test images.

    Attributes:
        models: Scores of the ``personal`` and the ``global`` model, and of predictions with ``both``, as far as there
            are any.
        typical: Share of the test images that look like the site's training images; None without predictions with both
            models, or without test images.
    """

    models: dict[str, Scores]
    typical: float | None


class Client:
    """A recipe with the data of one site.

    Args:
        recipe: Recipe with the site's data only.
        limits: Limits of the site.

    Attributes:
        planned: Numbers of noisy steps of one complete run by (σ, q): those of all rounds that the recipe's own limits
            allow, and of the fine-tuning; empty without privacy.
        budget: Privacy budget of the site's images.
        site_privacy: The noise that the site adds to secure sums; None if the recipe adds none.
        images: The public images.

    Raises:
        ValueError: If data, network and recipe do not match, or the recipe's privacy cannot be provided.
    """

    def __init__(self, recipe: Recipe, limits: Limits) -> None:
        self.recipe = recipe
        self.module = recipe.module
        self.data = recipe.data
        self.limits = limits
        self.data.setup()
        self._check_limits()
        self._check_site_deltas()
        recipe.build(self.data.num_classes, self.data.task)
        # Options that only the server uses require its images or other clients, and are left out.
        self.settings: Settings = recipe.settings(
            distillation=Distillation(steps=0),
            clients_per_round=None,
            client_privacy=None,
            rule=Mean(),
            weighting="uniform",
        )
        context = RunContext(self.data, self.module, self.settings)
        # Checks are those of a simulation of the recipe, with its rule, weighting and client-level privacy.
        simulated = RunContext(self.data, self.module, recipe.settings(clients_per_round=None))
        self._check_options(simulated.settings)
        with recipe.context():
            check_private(simulated)
            self._check_public_images()
            self._protection = plan_privacy(context, recipe.rounds)
            account = self._protection.image_account
            self._noise_multipliers = [] if account is None else list(account.noise_multipliers)
            configure_rounds(context, self._protection)
            check_first_batch(simulated, self.data.first_batch([0]), trains=True)
        self.site_privacy = SitePrivacy(recipe, limits) if recipe.noisy else None
        self._trainer = LocalTrainer(self.module.engine, self.module.tensor_names, self.settings, self._protection)
        self.public_images = recipe.public_images()
        # Digest of the public images of the last round, by the round.
        self._public_digests: dict[int, str] = {}
        # What is typical of the site's training images, without the weight of the personal model. The draws of random
        # datasets depend on the site's number in a run, by which this is stored.
        self._typical_images: dict[int, BothModels] = {}
        self.planned = self._plan_steps()
        self.budget = SiteBudget(limits, limits.max_epsilon, self.planned)

    def _check_limits(self) -> None:
        """Check that the site's limits suit the recipe and the number of images.

        Raises:
            ValueError: If they do not.
        """
        recipe = self.recipe
        limits = self.limits
        if self.data.num_clients != 1:
            raise ValueError(
                f"a site has the data of one client, but these are of {self.data.num_clients}; set client to one of "
                "them"
            )
        if limits.max_epsilon is not None and recipe.loop.privacy is None:
            raise ValueError(
                f"max_epsilon={limits.max_epsilon} of the site cannot be met by a recipe without privacy, which "
                "reveals its images without noise; approve a recipe with privacy, or remove the limit"
            )
        if recipe.loop.privacy is not None and limits.delta >= 1 / self.size:
            raise ValueError(
                f"limits: delta={limits.delta} must be below 1 / {self.size}, the number of training images, or an "
                "image could be revealed in full; choose a smaller delta"
            )
        if limits.max_site_epsilon is not None and not recipe.noisy:
            raise ValueError(
                f"max_site_epsilon={limits.max_site_epsilon} of the site cannot be met by a recipe without "
                "client_privacy and secure_sums; approve one that has both, or remove the limit"
            )

    def _check_site_deltas(self) -> None:
        """Raise if a δ allows one of the sites of a sum to be revealed in full.

        The number of sites is unknown at a site. With secure sums there may be as few as ``min_sites``. The site checks
        this itself, since the noise is meant to protect it against the server, too.

        Raises:
            ValueError: If a δ is not below 1 / ``min_sites``.
        """
        client_privacy = self.recipe.loop.client_privacy
        secure_sums = self.recipe.loop.secure_sums
        if client_privacy is None or secure_sums is None:
            return
        for section, delta in (("client_privacy", client_privacy.delta), ("limits", self.limits.delta)):
            check_delta_covers(section, delta, secure_sums.min_sites, "sites of a secure sum (min_sites)")

    def _check_options(self, settings: Settings) -> None:
        """Run the checks of a run's options, as far as a site can.

        Args:
            settings: Options of a simulation of the recipe.

        Raises:
            ValueError: If the model or other options do not support one.
        """
        simulated = setup_of_run(self.data, self.module, settings)
        # How many sites there are, and what the server has, is known only to the server.
        site_run = replace(simulated, num_clients=None, fewest_clients=None, num_public=None, num_labelled=None)
        check_run(site_run)

    def _check_public_images(self) -> None:
        """Check that the public set of a private recipe contains no image of the site, which only the site can do.

        Raises:
            ValueError: If it contains one.
        """
        # The site's own settings lack client_privacy, which the server or the secure sums provide.
        options = privacy_options(self.recipe.loop.privacy, self.recipe.loop.client_privacy)
        public = self.recipe.public
        if options and public is not None:
            store = make_store([public], labelled=False, owner=PUBLIC_SET)
            replace(self.data.checked, public=store).check_overlap(options)

    def _plan_steps(self) -> Counter[tuple[float, float]]:
        """Return the noisy steps of one complete run, as far as the recipe's own limits allow them."""
        account = self.protection(None, 0).image_account
        if account is None:
            return Counter()
        self._plan_phase(account, "train", self.recipe.rounds)
        if self.settings.algorithm.personalization() is not None:
            self._plan_phase(account, "tune", 1)
        return Counter(account.ledgers.release.history(0))

    def _plan_phase(self, account: Account, request_kind: Literal["train", "tune"], times: int) -> None:
        """Spend the cost of rounds of one kind, or of as many of them as are affordable."""
        if not times:
            return
        tuning = request_kind == "tune"
        costs = account.round_costs(self.plan(Request(request_kind, "0" * 32, "0" * 64)), tuning)
        for _ in range(times):
            if not account.affordable([0], is_tuning=tuning):
                break
            account.spend(costs)

    @property
    def size(self) -> int:
        """Number of training images."""
        return self.data.train_sizes[0]

    @property
    def test_size(self) -> int:
        """Number of test images."""
        store = self.data.checked.test
        return 0 if store is None else store.sizes[0]

    @property
    def labels(self) -> str:
        """Digest of the classes in their order: sites of one federation have the same."""
        return labels_digest(self.data.num_classes, self.data.task, self.data.classes)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Hashes of the site's images and labels, which never leave it: a run continues only with the same ones."""
        return fingerprint_of(self.data.checked, None, self.data.evaluate_on)

    def protection(self, account: dict[str, Any] | None, rounds_done: int) -> Protection:
        """Return the noise and ledgers of a run. There is a single object, so only one run can use it at a time.

        Noise is planned for all rounds of the recipe: with fewer, the site spends less than its target.

        Args:
            account: State of the run's ledgers; None for a new run.
            rounds_done: Number of rounds that the run has trained.
        """
        images = self._protection.image_account
        if images is not None:
            empty_ledgers = Ledgers().state_dict()
            new_account = {
                "ledgers": empty_ledgers,
                "lost": empty_ledgers,
                "noise_multipliers": self._noise_multipliers,
                "least_noise": self._noise_multipliers,
                "sampling": images.options.sampling,
            }
            images.load_state_dict(account or new_account, rounds_done)
        return self._protection

    def plan(self, request: Request, phases: Sequence[Phase] = ()) -> RoundPlan:
        """Return the site's steps.

        In ledgers the site is client 0, and private draws do not depend on its number. All other draws do: batches,
        augmentation and random datasets are those of a simulation.

        Args:
            request: Request to train, or to fine-tune.
            phases: Phases of the round; by default all those of the request.
        """
        number = 0 if self.settings.privacy is not None else request.client
        if phases:
            planned_phases = phases
        elif request.kind == "tune":
            tuning_phase = self._tuning_phase()
            planned_phases = [tuning_phase]
        else:
            planned_phases = self.settings.phases
        sizes = pad_to_index(self.size, number, filler=0)
        return make_plan(request.round, [number], sizes, planned_phases, self.data.batch_size)

    def batches(
        self, plan: RoundPlan, private: PrivateSampling | None = None, *, each_image_once: bool = False
    ) -> Iterator[AnyBatch]:
        """Yield the prepared local steps of a plan.

        Args:
            plan: The plan, of this client only.
            private: How batches are drawn in private training.
            each_image_once: Whether a pass has each image once and unmixed, whatever the recipe's options ``sampling``,
                ``mixup`` and ``cutmix``.
        """
        data = self.data
        prepare = data.prepare.without_mixing() if each_image_once else data.prepare
        sampling = "uniform" if each_image_once else data.sampling
        store = with_client_index(data.samples_of(data.checked.train), plan.clients[0])
        batches = RoundBatches(store, plan, data.batch_size, data.prepare.seed, private, sampling)
        for batch in loader(batches, store, data.num_workers):
            yield prepare(data.transfer_batch_to_device(batch, self.recipe.device, 0))

    def test_batches(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the site's prepared test images and labels, as a simulation prepares them for client ``number``."""
        data = self.data
        if data.checked.test is None:
            return
        store = with_client_index(data.samples_of(data.checked.test), number)
        batches = EvalBatches(store, data.eval_batch_size, data.prepare.seed)
        for batch in loader(batches, store, data.num_workers):
            prepared = data.prepare(data.transfer_batch_to_device(batch, self.recipe.device, 0))
            yield prepared.x, prepared.y

    def costs(self, request: Request, protection: Protection, ledger: Ledger) -> list[StepCost] | None:
        """Return the privacy cost of training.

        Args:
            request: Request to train, or to fine-tune.
            protection: Noise and ledgers of the run.
            ledger: What all runs have spent.

        Returns:
            The steps; None if the recipe's limits in this run, or the site's limits in all runs, leave no room.
        """
        account = protection.image_account
        if account is None:
            return []
        tuning = request.kind == "tune"
        if not account.affordable([0], is_tuning=tuning):
            return None
        costs = account.round_costs(self.plan(request), is_tuning=tuning)
        steps_by_noise = Counter[tuple[float, float]]()
        for cost in costs:
            steps_by_noise[cost.noise_multiplier, cost.sample_rate] += cost.steps
        spent = ledger.history(IMAGES_LEDGER)
        if not self.budget.affords(spent, steps_by_noise):
            return None
        return costs

    def train(
        self,
        request: Request,
        received: State,
        run_state: RunState,
        protection: Protection,
        only_step: AnyBatch | None = None,
    ) -> TrainingResult:
        """Train a round, or fine-tune. The ledgers are not changed.

        Args:
            request: Request of the server.
            received: What the server sent.
            run_state: The site's state in the run.
            protection: Noise and ledgers of the run.
            only_step: A single step to take in place of the planned ones.
        """
        plan = self.plan(request)
        tuning = request.kind == "tune"
        with self.recipe.context():
            if tuning:
                algorithm = self._tuning_algorithm()
                shared = to_device(received, self.recipe.device)
                client_state = initial_stacks(algorithm.initial_client_state(shared, self.module.tensor_names))
                start = self._state_sent_to_site(algorithm, request, shared)
            else:
                client_state = self._client_state(run_state)
                start = self._starting_state(request, received)
            cohort = Cohort(
                LocalRound.begin(self._trainer, plan, client_state, start, factor=request.factor, tuning=tuning)
            )
            sampling = None if protection.image_account is None else protection.image_account.sampling(tuning)
            batches = self.batches(plan, sampling) if only_step is None else [only_step]
            for batch in batches:
                cohort.step(batch)
            trained = cohort.finish()
        losses: dict[str, float] = {}
        is_private = self.recipe.loop.privacy is not None or self.recipe.loop.client_privacy is not None
        if not is_private:
            for role, loss in trained.losses.items():
                if math.isfinite(float(loss[0])):
                    losses[role] = float(loss[0])
        return TrainingResult(trained, losses, failure=next(iter(trained.failed.values()), ""))

    def public_images_digest(self, round: int) -> str:
        """Return a digest of the public images whose logits are in the sum of a round; "" if there are none.

        Raises:
            RejectionError: If the recipe distils, and the site has no public images.
        """
        recipe = self.recipe
        if not recipe.distils(round):
            return ""
        if not self.public_images.public_size:
            raise RejectionError("the recipe distils, but has no public images here", "other")
        if round not in self._public_digests:
            indices = self.public_images.used(recipe.loop.distillation, round)
            self._public_digests = {round: self.public_images.digest(indices)}
        return self._public_digests[round]

    def update_vector(self, run_state: RunState, num_sites: int, shared_metric_names: Collection[str]) -> Uint64Vector:
        """Return the site's vector for the sum of its last round.

        Args:
            run_state: The site's state in the run.
            num_sites: Number of sites in the sum.
            shared_metric_names: Names of the losses that may be added up.

        Raises:
            RejectionError: If a number is too large for the sum.
        """
        recipe = self.recipe
        round = run_state.training.round
        summing = run_state.summing
        logits = self._public_logits(round, summing) if recipe.distils(round) else None
        weight = 1.0 if recipe.loop.weighting == "uniform" else float(self.size)
        losses = {role: loss for role, loss in summing.losses.items() if role in shared_metric_names}
        try:
            if self.site_privacy is None:
                summand = summing.update
            else:
                summand = self.site_privacy.noisy_change(run_state, num_sites)
            return recipe.contents(round, self.public_images).vector(summand, weight, logits, losses, num_sites)
        except ValueError as error:
            raise RejectionError(str(error), "broken") from None

    def _public_logits(self, round: int, summing: SummingState) -> Tensor:
        """Return the logits (images, ..., classes) of the site's update on the public images of a round."""
        recipe = self.recipe
        state = recipe.template.initial | summing.received | summing.update
        model = expand(to_device(state, recipe.device), 1)
        batches = recipe.teacher_batches(round, self.public_images)

        def read_images(indices: Tensor) -> Tensor:
            return self.public_images.public_images(indices, recipe.device)

        with recipe.context():
            parts = batches.logits(self.module.engine, model, read_images, self.module.task)
            logits = [double(part)[0] for part in parts]
        return torch.cat(logits)

    def scores_vector(self, run_state: RunState, num_sites: int, shared_metric_names: Collection[str]) -> Uint64Vector:
        """Return the site's vector for a sum of scores, with those that may be added up."""
        metrics = {}
        for name, value in run_state.scoring.metrics.items():
            if claimed_name(name) in shared_metric_names:
                metrics[name] = value
        return self.recipe.contents_of_scores().vector({}, 1.0, None, metrics, num_sites)

    def score(self, request: Request, shared: State, members: State, run_state: RunState) -> SiteScores:
        """Score the models, as far as they exist, on the site's test images.

        Args:
            request: Request of the server.
            shared: The global state.
            members: The global models of an ensemble (models, ...); empty for none.
            run_state: The site's state in the run.
        """
        algorithm = self.settings.algorithm
        module = self.module
        shared = to_device(shared, self.recipe.device)
        models = {}
        personal = self.personal(shared, run_state)
        if personal is not None:
            models["personal"] = personal
        if algorithm.global_model:
            server_states = {"members": to_device(members, self.recipe.device)} if members else {}
            models["global"] = algorithm.members(shared, server_states)
        scores = {name: Scores(module.metrics, module.task) for name in models}
        both_models: BothModels | None = None
        if self.recipe.predicts_with_both and models.keys() == {"personal", "global"}:
            both_models = self._both_models(request.client, models["global"])
            scores["both"] = Scores(module.metrics, module.task)
        masks_of_batches: list[Tensor] = []
        with torch.no_grad(), self.recipe.context():
            for x, y in self.test_batches(request.client):
                logits = {name: self._compute_logits(states, x) for name, states in models.items()}
                if both_models is not None:
                    is_typical = both_models.typical([0], both_models.statistics(x))[0]
                    weights = both_models.weights([0], x.device)
                    logits["both"] = both_models.logits(logits["personal"], logits["global"], is_typical, weights)
                    masks_of_batches.append(is_typical)
                for name, logits_of_model in logits.items():
                    scores[name].update(logits_of_model.unsqueeze(0), y)
        typical: float | None = None
        if masks_of_batches:
            typical = float(torch.cat(masks_of_batches).double().mean())
        return SiteScores(scores, typical)

    def _compute_logits(self, states: State, x: Tensor) -> Tensor:
        """Return the logits (B, K) of a model, or of the members (models, ...) of an ensemble, for images (B, ...)."""
        logits_of_members = self.module.engine.shared_logits(states, x)
        return self.module.task.ensemble(logits_of_members, self.settings.algorithm.average)

    def _both_models(self, number: int, members: State) -> BothModels:
        """Return the prediction with both models of this site, whose number in it is 0.

        Args:
            number: The site's number in the run.
            members: States (models, ...) of the global model, which determine the weight of the personal one.
        """
        task = self.module.task
        with torch.no_grad(), self.recipe.context():
            if number not in self._typical_images:
                statistics = statistics_for(self.module.engine, self._iterate_examples(number))
                num_classes = self.data.num_classes
                typical_images = typical_images_of(statistics, self._iterate_examples(number), task, num_classes)
                self._typical_images[number] = BothModels(task, statistics, {0: typical_images}, personal_shares={})
            share = self.module.evaluation.personal_share
            if share is None:
                share = personal_share_of(self._iterate_examples(number), partial(self._compute_logits, members), task)
        return replace(self._typical_images[number], personal_shares={0: share})

    def _iterate_examples(self, number: int) -> Examples:
        """Yield the training images that others are compared with, as a simulation does for client ``number``."""
        data = self.data
        store = with_client_index(data.samples_of(data.checked.train), number)
        return data.examples_in(store, number, MAX_EXAMPLES, self.recipe.device)

    def state_of_both(self, shared: State, run_state: RunState) -> State | None:
        """Return what the site needs to predict with both of its models (:meth:`.BothModels.state`).

        Args:
            shared: The global state.
            run_state: The site's state in the run.

        Returns:
            None if the recipe does not ask for it, or if the site has only one model so far.
        """
        if not self.recipe.predicts_with_both or self.personal(shared, run_state) is None:
            return None
        members = self.settings.algorithm.members(shared, {})
        return self._both_models(run_state.client or 0, members).state(0)

    def personal(self, shared: State, run_state: RunState) -> State | None:
        """Return the state (1, ...) that the site predicts with; None if it is the global one."""
        algorithm = self.settings.algorithm
        if run_state.training.tuned_state is not None:
            tuning = self._tuning_algorithm()
            personal = tuning.personal(_move_stacks(run_state.training.tuned_state, self.recipe.device), shared)
        elif algorithm.inference == "personal":
            personal = algorithm.personal(self._client_state(run_state), shared)
        elif run_state.rank:
            # The site predicts with the global model, cut to its rank.
            personal = expand(shared, 1)
        else:
            return None
        if not run_state.rank:
            return personal
        return cut_ranks(personal, self.module.tensor_names.factors, torch.tensor([run_state.rank]))

    def _tuning_algorithm(self) -> Algorithm:
        """Return the algorithm of the fine-tuning after the last round."""
        tuning = self.settings.algorithm.personalization()
        assert tuning is not None
        return tuning[0]

    def _tuning_phase(self) -> Phase:
        """Return the phase of the fine-tuning after the last round."""
        tuning = self.settings.algorithm.personalization()
        assert tuning is not None
        return tuning[1]

    def _client_state(self, run_state: RunState) -> Stacks:
        """Return the state that the client has kept, (1, ...) by role."""
        if run_state.training.client_state is not None:
            return _move_stacks(run_state.training.client_state, self.recipe.device)
        return initial_stacks(
            self.settings.algorithm.initial_client_state(self.recipe.template.initial, self.module.tensor_names)
        )

    def _starting_state(self, request: Request, received: State) -> State:
        """Return the state that the client starts from, (1, ...); of several global models it chooses its own."""
        algorithm = self.settings.algorithm
        shared = to_device(received, self.recipe.device)
        if not algorithm.compares_models:
            return expand(shared, 1)
        batches = []
        for batch in map(one_of, self.batches(self.plan(request, [Phase("compare", 1)]), each_image_once=True)):
            # The last batch is filled with images that were compared already.
            num_new = self.size - batch.step * batch.counts[0]
            batches.append(batch._replace(counts=(min(batch.counts[0], num_new),)))
        losses = losses_of_members(self.module.engine, algorithm.members(shared, {}), batches, 1, self.module.task)
        return self._state_sent_to_site(algorithm, request, shared, losses)

    def _state_sent_to_site(
        self, algorithm: Algorithm, request: Request, shared: State, losses: Tensor | None = None
    ) -> State:
        """Return the state that the server would send the site in an algorithm, (1, ...)."""
        return algorithm.broadcast(
            Broadcast(
                shared,
                self.module.tensor_names,
                request.round,
                (request.client,),
                request.clients,
                self.settings.seed,
                losses,
                lora_ranks=(request.rank,) if request.rank else (),
            )
        )


def _move_stacks(stacks: Stacks, device: torch.device) -> Stacks:
    """Return the states of all roles on a device."""
    return {role: to_device(state, device) for role, state in stacks.items()}


def single_client_data(data: FederatedData, index: int) -> FederatedData:
    """Return the data of one client, without those of the server."""
    return replace(
        data,
        train=[data.train[index]],
        test=[data.test[index]] if len(data.test) else [],
        public=None,
        server_validation=None,
        client_names=None if data.client_names is None else [data.client_names[index]],
    )


def with_client_index(store: SamplesT, index: int) -> SamplesT:
    """Return a store of one client, in which the client has its index in the federation.

    Random draws for a client depend on its index. The clients before it have no samples.
    """
    indexed = copy(store)
    indexed.sizes = tuple(pad_to_index(store.sizes[0], index, filler=0))
    indexed.starts = torch.zeros(index + 1, dtype=torch.int64)
    if store.class_counts is not None:
        indexed.class_counts = store.class_counts.expand(index + 1, -1)
    if isinstance(indexed, MapStore):
        indexed.datasets = pad_to_index(indexed.datasets[0], index, filler=EMPTY)
        indexed.known_labels = pad_to_index(indexed.known_labels[0], index, filler=None)
    return indexed


def pad_to_index(value: ValueT, index: int, filler: ValueT) -> list[ValueT]:
    """Return a list with ``value`` at ``index``, its last element, and ``filler`` before it."""
    return [filler] * index + [value]
