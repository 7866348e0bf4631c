# SPDX-License-Identifier: Apache-2.0
"""The privacy cost of a run for each client: noise, ledgers, and whether another round is affordable."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from perada.core.checks import OptionError
from perada.core.rounds import BatchSize, Phase, PrivateSampling, RoundPlan, rows_per_batch, sampling_rate
from perada.privacy.accounting import ROUNDING, Ledgers, calibrate, check_opacus, history_epsilon, ledgers_by_name
from perada.privacy.options import ClientPrivacy, LedgerName, Privacy
from perada.privacy.sampling import passes

CountRemainingRounds = Callable[[int], Sequence[int]]
"""Function of a round that returns in how many of the planned rounds, from that one on, each client takes part."""


@dataclass(frozen=True)
class QueryPlan:
    """The gradients that local training computes.

    Attributes:
        phases: Phases of local training.
        queries: For each phase, the number of gradients that one local step computes, by stream of batches.
        unsent: Streams on which nothing that a client sends depends.
    """

    phases: tuple[Phase, ...]
    queries: tuple[dict[str, int], ...]
    unsent: frozenset[str] = frozenset()

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of all streams, in the order of their first use."""
        return tuple(dict.fromkeys(chain.from_iterable(self.queries)))


class StepCost(NamedTuple):
    """What equal noisy steps of one client cost.

    Attributes:
        client: Number of the client.
        noise_multiplier: σ of each step.
        sample_rate: Probability that an image is in a step's batch.
        steps: Number of steps.
        sent: Whether anything that the client sends depends on them.
    """

    client: int
    noise_multiplier: float
    sample_rate: float
    steps: int
    sent: bool


class Budget(ABC):
    """The budget of one section of a run's options: what has been spent and what remains.

    Args:
        privacy: The section.
        planned: In how many of the planned rounds each client takes part; None if their number is not fixed.

    Attributes:
        section: Name of the section.
        options: The section.
        limit: The ε that no client may exceed; None for no limit.
        ledgers: Ledgers of the privacy costs so far.
        lost: The part of them that was not planned: rounds that were lost in a crash, or trained by another run.
    """

    section: str

    def __init__(self, privacy: Privacy | ClientPrivacy, planned: CountRemainingRounds | None) -> None:
        check_opacus()
        self.options = privacy
        self._planned = planned
        limits = [limit for limit in (privacy.max_epsilon, privacy.target_epsilon) if limit is not None]
        self.limit = min(limits, default=None)
        self.ledgers = Ledgers()
        self.lost = Ledgers()

    @abstractmethod
    def costs(self, client: int, is_tuning: bool = False) -> list[StepCost]:
        """Return the cost of a round, or of the fine-tuning after the last, for one client."""

    def round_costs(self, plan: RoundPlan, is_tuning: bool = False) -> list[StepCost]:
        """Return the costs of a round for all its clients."""
        costs: list[StepCost] = []
        for client in plan.clients:
            costs += self.costs(client, is_tuning)
        return costs

    def spend(self, costs: Iterable[Sequence[Any]], lost: bool = False) -> None:
        """Count the costs of a round.

        Args:
            costs: Result of :meth:`round_costs`, which may have been written to JSON and read again.
            lost: Whether the round was not planned.
        """
        for client, sigma, rate, steps, sent in costs:
            self.ledgers.add(client, sigma, rate, steps, sent=sent)
            if lost:
                self.lost.add(client, sigma, rate, steps, sent=sent)

    def affordable(self, clients: Sequence[int], is_tuning: bool = False) -> list[int]:
        """Return those of the clients that stay within the limit if they train once more, or are fine-tuned.

        Even a run with calibrated noise can reach the limit, if it was resumed with other options or is fine-tuned
        again after an early stop.
        """
        if self.limit is None:
            return list(clients)
        rounds = 0 if is_tuning else 1
        tunings = 1 if is_tuning else 0
        affordable = []
        for client in clients:
            is_free = not self.costs(client, is_tuning)
            # Calibrated noise reaches the target exactly, up to rounding.
            if is_free or self._epsilon_after(client, rounds, tunings) <= self.limit * ROUNDING:
                affordable.append(client)
        return affordable

    def check_planned(self, is_planned: bool) -> None:
        """Raise a ValueError if noise must be calibrated but the number of rounds is unknown."""
        if not is_planned:
            raise OptionError(
                f"{self.section}: target_epsilon={self.options.target_epsilon} requires a known number of rounds to "
                "calibrate the noise; set max_epochs (rounds), or noise_multiplier",
                name=f"{self.section}: target_epsilon",
                value=self.options.target_epsilon,
            )

    def _is_limited(self, sent: bool) -> bool:
        """Return whether steps are counted in the ledger that the limit refers to.

        Args:
            sent: Whether anything that a client sends depends on them.
        """
        return sent or self.options.ledger == "release"

    def _history_of_client(self, ledgers: Ledgers, client: int) -> Counter[tuple[float, float]]:
        """Return a client's number of steps by noise and rate, from the ledger that the limit refers to."""
        ledger = ledgers.release if self.options.ledger == "release" else ledgers.server
        return Counter(ledger.history(client))

    def _planned_history(
        self,
        client: int,
        rounds: int,
        tunings: int,
        ledger: LedgerName,
    ) -> Counter[tuple[float, float]]:
        """Return the number of steps by noise and rate that a ledger would count for a client.

        Args:
            client: Number of the client.
            rounds: Number of rounds in which the client takes part.
            tunings: Number of fine-tunings, 0 or 1.
            ledger: Name of the ledger.
        """
        history = Counter[tuple[float, float]]()
        for is_tuning, times in ((False, rounds), (True, tunings)):
            for cost in self.costs(client, is_tuning):
                if cost.sent or ledger == "release":
                    history[cost.noise_multiplier, cost.sample_rate] += times * cost.steps
        return history

    def _epsilon_after(self, client: int, rounds: int, tunings: int, by_plan: bool = False) -> float:
        """Return the ε of a client after more rounds and fine-tunings.

        Args:
            client: Number of the client.
            rounds: Number of further rounds in which the client takes part.
            tunings: Number of fine-tunings, 0 or 1.
            by_plan: Whether to leave out the costs that were not planned (:attr:`lost`).
        """
        options = self.options
        history = self._history_of_client(self.ledgers, client)
        if by_plan:
            history -= self._history_of_client(self.lost, client)
        history.update(self._planned_history(client, rounds, tunings, options.ledger))
        return history_epsilon(history, options.delta, options.accountant)

    def epsilons(self, client_ids: Iterable[int]) -> dict[str, list[float]]:
        """Return the ε that each client has spent so far, by ledger."""
        epsilons = {}
        for name, ledger in ledgers_by_name(self.ledgers).items():
            epsilon_of_client = ledger.epsilons(self.options.delta, self.options.accountant, client_ids)
            epsilons[name] = list(epsilon_of_client.values())
        return epsilons

    def planned_epsilons(self, num_clients: int) -> dict[str, list[float]]:
        """Return the ε of each client after all planned rounds and the fine-tuning, by ledger.

        It is empty if the number of rounds is not fixed. Limits are ignored: a client that reaches ``max_epsilon`` will
        train less.
        """
        if self._planned is None:
            return {}
        rounds = self._planned(0)
        options = self.options
        epsilons: dict[str, list[float]] = {}
        ledgers: tuple[LedgerName, ...] = ("server", "release")
        for ledger in ledgers:
            epsilons[ledger] = []
            for client in range(num_clients):
                history = self._planned_history(client, rounds[client], 1, ledger)
                epsilons[ledger].append(history_epsilon(history, options.delta, options.accountant))
        return epsilons

    def state_dict(self) -> dict[str, Any]:
        """Return the ledgers in plain types."""
        return {"ledgers": self.ledgers.state_dict(), "lost": self.lost.state_dict()}

    def load_state_dict(self, state: dict[str, Any], rounds_done: int = 0, tuned: bool = False) -> None:
        """Restore the state of a run that is resumed.

        Args:
            state: Result of :meth:`state_dict`.
            rounds_done: Number of rounds that the run has completed.
            tuned: Whether it has also been fine-tuned.

        Raises:
            ValueError: If the rounds that are planned now would exceed the target.
        """
        ledgers = Ledgers()
        ledgers.load_state_dict(state["ledgers"])
        lost = Ledgers()
        lost.load_state_dict(state["lost"])
        self.ledgers = ledgers
        self.lost = lost
        target = self.options.target_epsilon
        if target is None or self._planned is None:
            return
        for client, rounds in enumerate(self._planned(rounds_done)):
            tunings = 0 if tuned else 1
            epsilon = self._epsilon_after(client, rounds, tunings, by_plan=True)
            if epsilon > target * ROUNDING:
                raise ValueError(
                    f"{self.section}: the noise was calibrated to target_epsilon={target} for a different plan: with "
                    f"the rounds now planned, client {client} would reach ε = {epsilon:.2f}; stop training, or raise "
                    "target_epsilon"
                )


@dataclass(frozen=True)
class _PhaseSteps:
    """Steps of one client on one stream of batches: in a phase of training or, if batches are shuffled, in all phases.

    Attributes:
        queries: Number of gradients of one batch that a step computes. Together they cost as much as one with
            σ / √queries.
        steps: Number of steps, or of shuffled passes.
        sent: Whether anything that the client sends depends on them.
    """

    queries: int
    steps: int
    sent: bool


class Account(Budget):
    """The privacy of every client's images.

    A step that computes K gradients of one batch draws the batch once and makes K releases. As Gaussian mechanisms,
    these compose to one release with the noise multiplier σ / √K (Dong, Roth and Su 2022, corollary 2), to which the
    amplification by the draw applies.

    Args:
        privacy: The section ``privacy``.
        sizes: Numbers of training images of the M clients.
        batch_size: Images in a batch.
        round_queries: Training of each client in a round.
        tuning_queries: Training of each client after the last round; None without fine-tuning.
        planned: In how many of the planned rounds each client takes part; None if their number is not fixed.

    Attributes:
        noise_multipliers: σ of each client.
        least_noise: The smallest σ that each client ever had, including before the run was resumed.

    Raises:
        ValueError: If the options cannot be met for a client.
    """

    section = "privacy"
    options: Privacy

    def __init__(
        self,
        privacy: Privacy,
        sizes: Sequence[int],
        batch_size: BatchSize,
        round_queries: QueryPlan,
        tuning_queries: QueryPlan | None = None,
        planned: CountRemainingRounds | None = None,
    ) -> None:
        super().__init__(privacy, planned)
        self.sizes = tuple(sizes)
        self.batch_size = batch_size
        self._round_queries = round_queries
        self._tuning_queries = tuning_queries or QueryPlan((), ())
        # Clients of the same size take the same steps.
        self._steps = cache(self._count_steps)
        all_steps = [*self._steps(self.sizes[0], False), *self._steps(self.sizes[0], True)]
        if self.limit is not None and not any(self._is_limited(steps.sent) for steps in all_steps):
            raise OptionError(
                "privacy: ledger='server' sets no limit on an algorithm whose clients send nothing; choose "
                "ledger='release'",
                name="privacy: ledger",
                value="server",
            )
        if privacy.target_epsilon is not None:
            self.noise_multipliers = self._calibrate_noise(privacy.target_epsilon)
        else:
            # The options require one of the two.
            assert privacy.noise_multiplier is not None
            self.noise_multipliers = [float(privacy.noise_multiplier)] * len(self.sizes)
        self.least_noise = list(self.noise_multipliers)
        self._check_first_round()

    def query_plan(self, is_tuning: bool) -> QueryPlan:
        """Return the query plan of a round, or of the fine-tuning after the last round."""
        if is_tuning:
            return self._tuning_queries
        return self._round_queries

    def sampling(self, is_tuning: bool = False) -> PrivateSampling:
        """Return the description of how batches are drawn in a round, or in the fine-tuning after the last round."""
        streams = tuple(tuple(queries) for queries in self.query_plan(is_tuning).queries)
        return PrivateSampling(streams, self.options.sampling, self.options.secure_rng)

    def rate(self, client: int) -> float:
        """Return the probability that an image of a client is in a batch."""
        return sampling_rate(self.sizes[client], self.batch_size)

    def check_data(self, sizes: Sequence[int], batch_size: BatchSize) -> None:
        """Raise a ValueError if the data differ from those that the account was created for."""
        if tuple(sizes) != self.sizes or batch_size != self.batch_size:
            raise OptionError(
                f"privacy: the data have batch_size={batch_size} and {sum(sizes)} images, but the ledgers assume "
                f"batch_size={self.batch_size} and {sum(self.sizes)}; do not change the data during a run",
                name="privacy",
            )

    def round_costs(self, plan: RoundPlan, is_tuning: bool = False) -> list[StepCost]:
        """Return the costs of a round for all its clients.

        Raises:
            ValueError: If the clients take other steps than the ledgers count.
        """
        counted = []
        for phase in self.query_plan(is_tuning).phases:
            counted.append(tuple(phase.local_steps(self.sizes[client], self.batch_size) for client in plan.clients))
        if plan.steps != tuple(counted):
            raise OptionError(
                f"privacy: round {plan.round + 1} has {plan.steps} client steps by phase, but the ledgers count "
                f"{tuple(counted)}; do not use the data module for another run at the same time",
                name="privacy",
            )
        return super().round_costs(plan, is_tuning)

    def costs(self, client: int, is_tuning: bool = False) -> list[StepCost]:
        """Return the cost of a round, or of the fine-tuning after the last, for one client."""
        rate = self._accounted_rate(client)
        costs = []
        for entry in self._steps(self.sizes[client], is_tuning):
            sigma = self.noise_multipliers[client] / entry.queries**0.5
            costs.append(StepCost(client, sigma, rate, entry.steps, entry.sent))
        return costs

    def metrics(self) -> dict[str, float]:
        """Return mean, std and maximum of the clients' ε by ledger; ``privacy/epsilon`` is that of the release."""
        result: dict[str, float] = {}
        for name, ledger in ledgers_by_name(self.ledgers).items():
            summary = ledger.summary(self.options.delta, self.options.accountant, range(len(self.sizes)))
            for statistic, value in summary.items():
                result[f"privacy/{name}_epsilon_{statistic}"] = value
        for statistic in ("mean", "max"):
            result[f"privacy/epsilon_{statistic}"] = result[f"privacy/release_epsilon_{statistic}"]
        return result

    def record(self) -> dict[str, Any]:
        """Return options, noise and ε of each client, in plain types, for reports and model cards."""
        clients = range(len(self.sizes))
        record: dict[str, Any] = {
            "options": asdict(self.options),
            "noise_multipliers": self.least_noise,
            "sample_rates": [self._accounted_rate(client) for client in clients],
        }
        return record | self.epsilons(clients)

    def state_dict(self) -> dict[str, Any]:
        """Return ledgers and noise in plain types."""
        return super().state_dict() | {
            "sampling": self.options.sampling,
            "noise_multipliers": list(self.noise_multipliers),
            "least_noise": list(self.least_noise),
        }

    def load_state_dict(self, state: dict[str, Any], rounds_done: int = 0, tuned: bool = False) -> None:
        """Restore a state like :meth:`Budget.load_state_dict`; a calibrated σ keeps its value.

        Raises:
            ValueError: As :meth:`Budget.load_state_dict` does, and if batches were drawn in another way before.
        """
        before = state["sampling"]
        if before != self.options.sampling:
            raise OptionError(
                f"privacy: the checkpoint's batches were drawn with sampling={before!r}, but this run has "
                f"{self.options.sampling!r}: ε would mix two neighbouring relations; resume with sampling={before!r}, "
                "or start a new run",
                name="privacy",
            )
        if self.options.target_epsilon is not None:
            self.noise_multipliers = list(state["noise_multipliers"])
        self.least_noise = [min(pair) for pair in zip(self.noise_multipliers, state["least_noise"], strict=True)]
        super().load_state_dict(state, rounds_done, tuned)

    def _count_steps(self, num_images: int, is_tuning: bool) -> tuple[_PhaseSteps, ...]:
        """Return the noisy steps that a client with ``num_images`` images takes in a round, or in the fine-tuning."""
        plan = self.query_plan(is_tuning)
        is_sent = {stream: not is_tuning and stream not in plan.unsent for stream in plan.streams}
        if self.options.sampling == "shuffle":
            return self._shuffled_steps(num_images, plan, is_sent)
        return self._sampled_steps(num_images, plan, is_sent)

    def _shuffled_steps(self, num_images: int, plan: QueryPlan, is_sent: Mapping[str, bool]) -> tuple[_PhaseSteps, ...]:
        """Return the passes over shuffled images that each stream begins, each counted as a step."""
        batch_rows = rows_per_batch(num_images, self.batch_size)
        counted = []
        for stream, sent in is_sent.items():
            # A stream continues from one of its phases to the next, so its passes are counted over all of them.
            num_steps = 0
            most_queries = 0
            for phase, queries in zip(plan.phases, plan.queries, strict=True):
                if stream in queries:
                    num_steps += phase.local_steps(num_images, self.batch_size)
                    most_queries = max(most_queries, queries[stream])
            # A pass may extend over several phases, so each is charged with the most queries that any of them makes.
            num_passes = passes(num_images, batch_rows, num_steps)
            counted.append(_PhaseSteps(queries=most_queries, steps=num_passes, sent=sent))
        return tuple(counted)

    def _sampled_steps(self, num_images: int, plan: QueryPlan, is_sent: Mapping[str, bool]) -> tuple[_PhaseSteps, ...]:
        """Return the steps on independently drawn batches, by phase and stream."""
        counted = []
        for phase, queries in zip(plan.phases, plan.queries, strict=True):
            num_steps = phase.local_steps(num_images, self.batch_size)
            for stream, count in queries.items():
                counted.append(_PhaseSteps(queries=count, steps=num_steps, sent=is_sent[stream]))
        return tuple(counted)

    def _accounted_rate(self, client: int) -> float:
        """Return the sample rate with which a client's steps are counted."""
        if self.options.sampling == "poisson":
            return self.rate(client)
        # There is no amplification by shuffling.
        return 1.0

    def _calibrate_noise(self, target_epsilon: float) -> list[float]:
        """Return the σ of each client with which the planned rounds spend the target ε."""
        options = self.options
        self.check_planned(self._planned is not None)
        assert self._planned is not None
        rounds = self._planned(0)
        # Clients of the same size mostly have the same plan.
        calibrate_once = cache(calibrate)
        result = []
        for client, size in enumerate(self.sizes):
            in_round = [entry for entry in self._steps(size, False) if self._is_limited(entry.sent)]
            in_tuning = [entry for entry in self._steps(size, True) if self._is_limited(entry.sent)]
            # All steps are counted with the largest number of queries; if they differ, there is slightly more noise.
            queries = max(entry.queries for entry in in_round + in_tuning)
            steps_of_rounds = max(1, rounds[client]) * sum(entry.steps for entry in in_round)
            steps = steps_of_rounds + sum(entry.steps for entry in in_tuning)
            rate = self._accounted_rate(client)
            try:
                sigma = calibrate_once(target_epsilon, options.delta, rate, steps, options.accountant)
            except ValueError as error:
                raise OptionError(f"privacy: client {client} ({size} images): {error}", name="privacy") from error
            result.append(sigma * queries**0.5)
        return result

    def _check_first_round(self) -> None:
        """Raise a ValueError if some clients cannot afford a single round."""
        clients = range(len(self.sizes))
        unable = sorted({*clients} - {*self.affordable(clients)})
        if not unable:
            return
        examples = []
        for client in unable[:5]:
            epsilon = self._epsilon_after(client, rounds=1, tunings=0)
            examples.append(f"{client} ({self.sizes[client]} images, ε = {epsilon:.2f})")
        raise OptionError(
            f"privacy: {len(unable)} of {len(clients)} clients would exceed max_epsilon={self.options.max_epsilon} in "
            f"their first round: client {', '.join(examples)}; increase the noise (noise_multiplier), use smaller "
            "batches or fewer local steps, or leave these clients out",
            name="privacy",
        )
