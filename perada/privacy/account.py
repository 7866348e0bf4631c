# SPDX-License-Identifier: Apache-2.0
"""What a run costs each client: its noise, its ledgers, and whether it can afford another round."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, NamedTuple

from perada.core.checks import OptionError
from perada.core.rounds import BatchSize, PrivateSampling, RoundPlan, rows_per_batch, sampling_rate
from perada.privacy.accounting import ROUNDING, Ledgers, calibrate, check_opacus, history_epsilon
from perada.privacy.options import ClientPrivacy, Privacy
from perada.privacy.rehearsal import Training
from perada.privacy.sampling import passes

Cost = tuple[float, float, int, bool]
"""Noise multiplier, sample rate, steps, and whether anything that is sent depends on them."""
Row = tuple[int, float, float, int, bool]
"""A client, and a cost of it."""
Planned = Callable[[int], Sequence[int]]
"""Gives, from a round on, in how many of the planned ones each client takes part."""


class Budget(ABC):
    """What was spent by one section of a run's options, and what still may be.

    Attributes:
        section: Name of the section.
        options: What is asked for.
        limit: The ε that no client may pass.
        ledgers: What was spent.
        lost: What of it no plan knew of: rounds that a crash took, or that another run trained.
    """

    section: str

    def __init__(self, options: Privacy | ClientPrivacy, planned: Planned | None) -> None:
        check_opacus()
        self.options, self._planned = options, planned
        limits = (options.max_epsilon, options.target_epsilon)
        self.limit = min((given for given in limits if given is not None), default=None)
        self.ledgers, self.lost = Ledgers(), Ledgers()

    @abstractmethod
    def costs(self, client: int, tuning: bool = False) -> list[Cost]:
        """What a client spends in a round, or in the fine-tuning after the last."""

    def cost(self, plan: RoundPlan, tuning: bool = False) -> list[Row]:
        """What the clients of ``plan`` will spend."""
        return [(client, *cost) for client in plan.clients for cost in self.costs(client, tuning)]

    def spend(self, rows: Iterable[Row], lost: bool = False) -> None:
        """Write down what :meth:`cost` gave; ``lost`` if it is not among the planned rounds."""
        for client, sigma, rate, steps, sent in rows:
            for ledgers in (self.ledgers, self.lost) if lost else (self.ledgers,):
                ledgers.add(client, sigma, rate, steps, sent=sent)

    def affordable(self, clients: Sequence[int], tuning: bool = False) -> list[int]:
        """Those of ``clients`` who stay within every limit if they train once more, or are fine-tuned.

        A target can be passed where a run is resumed: with other options, or fine-tuning again after an early stop.
        """
        if self.limit is None:
            return list(clients)
        return [
            client
            for client in clients
            if not self.costs(client, tuning) or self._after(client, not tuning, tuning) <= self.limit * ROUNDING
        ]

    def check_planned(self, known: bool) -> None:
        """Refuse, by a ValueError, to calibrate where the number of rounds is not known."""
        if not known:
            raise OptionError(
                f"{self.section}: target_epsilon={self.options.target_epsilon} needs a number of rounds to be "
                "calibrated for; give max_epochs (rounds), or noise_multiplier",
                name=f"{self.section}: target_epsilon",
                value=self.options.target_epsilon,
            )

    def _counted(self, sent: bool) -> bool:
        """Whether the ledger that limits refer to counts it."""
        return sent or self.options.ledger == "release"

    def _history(self, ledgers: Ledgers, client: int) -> Counter[tuple[float, float]]:
        """What the ledger that limits refer to says of a client."""
        return Counter((ledgers.release if self.options.ledger == "release" else ledgers.server).history(client))

    def _after(self, client: int, rounds: int, tunings: int, by_plan: bool = False) -> float:
        """ε of the client if it trains so often more; ``by_plan`` without what was lost."""
        history = self._history(self.ledgers, client)
        if by_plan:
            history -= self._history(self.lost, client)
        for tuning, times in ((False, rounds), (True, tunings)):
            for sigma, rate, steps, sent in self.costs(client, tuning):
                if self._counted(sent):
                    history[sigma, rate] += times * steps
        return history_epsilon(history, self.options.delta, self.options.accountant)

    def epsilons(self, clients: Iterable[int]) -> dict[str, list[float]]:
        """ε so far of each of ``clients``, by ledger."""
        options = self.options
        return {
            name: list(ledger.epsilons(options.delta, options.accountant, clients).values())
            for name, ledger in vars(self.ledgers).items()
        }

    def planned_epsilons(self, num_clients: int) -> dict[str, list[float]]:
        """ε of each client by ledger after all planned rounds and the fine-tuning; empty where rounds are open.

        Limits are not looked at: a client that reaches ``max_epsilon`` trains less.
        """
        rounds = self._left(0)
        if not rounds:
            return {}
        options = self.options
        epsilons: dict[str, list[float]] = {"server": [], "release": []}
        for ledger, values in epsilons.items():
            for client in range(num_clients):
                history = Counter[tuple[float, float]]()
                for tuning, times in ((False, rounds[client]), (True, 1)):
                    for sigma, rate, steps, sent in self.costs(client, tuning):
                        if sent or ledger == "release":
                            history[sigma, rate] += times * steps
                # Counts of zero, of clients that are never drawn, are no steps.
                values.append(history_epsilon(+history, options.delta, options.accountant))
        return epsilons

    def state_dict(self) -> dict[str, Any]:
        """Ledgers in plain types."""
        return {"ledgers": self.ledgers.state_dict(), "lost": self.lost.state_dict()}

    def load_state_dict(self, state: dict[str, Any], rounds_done: int = 0, tuned: bool = False) -> None:
        """Resume from what :meth:`state_dict` gave after ``rounds_done`` rounds, or the fine-tuning that follows.

        A ValueError if the rounds that are now planned would pass the target.
        """
        ledgers, lost = Ledgers(), Ledgers()
        ledgers.load_state_dict(state["ledgers"])
        lost.load_state_dict(state["lost"])
        self.ledgers, self.lost = ledgers, lost
        target = self.options.target_epsilon
        for client, rounds in enumerate(self._left(rounds_done) if target is not None else ()):
            epsilon = self._after(client, rounds, not tuned, by_plan=True)
            if epsilon > (target or 0) * ROUNDING:
                raise ValueError(
                    f"{self.section}: the noise was calibrated to target_epsilon={target} for another plan: with the "
                    f"rounds planned now client {client} would come to ε = {epsilon:.2f}; train no further, or give a "
                    "higher target_epsilon"
                )

    def _left(self, rounds_done: int) -> Sequence[int]:
        """In how many of the rounds that are left each client takes part."""
        return () if self._planned is None else self._planned(rounds_done)


class _Entry(NamedTuple):
    """Steps of one client: ``looks`` gradients of one batch each, which cost as one with σ / √looks."""

    looks: int
    steps: int
    sent: bool


class Account(Budget):
    """The privacy of every client's images.

    A step that asks for K gradients of one batch is one draw of the batch and K releases. The releases compose to one
    with the noise multiplier σ / √K, as Gaussian mechanisms do (Dong, Roth and Su 2022, corollary 2), and it is this
    one that the draw amplifies.

    ``sizes`` are the training images of each of M clients, ``rounds`` and ``tuning`` what each trains in a round and
    after the last. ``noise_multipliers`` are the σ of each client. A ValueError if one cannot keep within the options.
    """

    section = "privacy"
    options: Privacy

    def __init__(
        self,
        options: Privacy,
        sizes: Sequence[int],
        batch_size: BatchSize,
        rounds: Training,
        tuning: Training | None = None,
        planned: Planned | None = None,
    ) -> None:
        super().__init__(options, planned)
        self.options, self.sizes, self.batch_size = options, tuple(sizes), batch_size
        self.rounds, self.tuning = rounds, tuning or Training((), ())
        self._steps = cache(self._entries)
        everything = [*self._steps(self.sizes[0], False), *self._steps(self.sizes[0], True)]
        if self.limit is not None and not any(self._counted(entry.sent) for entry in everything):
            raise OptionError(
                "privacy: ledger='server' cannot limit an algorithm whose clients send nothing; choose "
                "ledger='release'",
                name="privacy: ledger",
                value="server",
            )
        sigma = options.noise_multiplier
        self.noise_multipliers = self._calibrated() if sigma is None else [float(sigma)] * len(self.sizes)
        self.least_noise = list(self.noise_multipliers)  # that each ever had, also before a run was resumed
        self._check_first_round()

    def training(self, tuning: bool) -> Training:
        """What is trained in a round, or after the last one."""
        return self.tuning if tuning else self.rounds

    def sampling(self, tuning: bool = False) -> PrivateSampling:
        """How batches are drawn."""
        queries = self.training(tuning).queries
        return PrivateSampling(tuple(map(tuple, queries)), self.options.sampling, self.options.secure_rng)

    def rate(self, client: int) -> float:
        """Probability q of an image of the client to be in a batch."""
        return sampling_rate(self.sizes[client], self.batch_size)

    def check_data(self, sizes: Sequence[int], batch_size: BatchSize) -> None:
        """Refuse data other than those that the account was made for."""
        if tuple(sizes) != self.sizes or batch_size != self.batch_size:
            raise OptionError(
                f"privacy: the data have batch_size={batch_size} and {sum(sizes)} images, and the ledgers count with "
                f"batch_size={self.batch_size} and {sum(self.sizes)}; do not change them while a run is under way",
                name="privacy",
            )

    def cost(self, plan: RoundPlan, tuning: bool = False) -> list[Row]:
        """As of :class:`Budget`; a ValueError if the clients take other steps than the ledgers count."""
        counted = tuple(
            tuple(phase.local_steps(self.sizes[client], self.batch_size) for client in plan.clients)
            for phase in self.training(tuning).phases
        )
        if plan.steps != counted:
            raise OptionError(
                f"privacy: round {plan.round + 1} has {plan.steps} steps of its clients by phase, and the ledgers "
                f"count {counted}; do not use the data module for another run meanwhile",
                name="privacy",
            )
        return super().cost(plan, tuning)

    def metrics(self) -> dict[str, float]:
        """Mean, std and maximum of ε over clients in both ledgers; ``epsilon`` alone is the release's."""
        result: dict[str, float] = {}
        for name, ledger in vars(self.ledgers).items():
            summary = ledger.summary(self.options.delta, self.options.accountant, range(len(self.sizes)))
            result |= {f"privacy/{name}_epsilon_{part}": value for part, value in summary.items()}
        release = {f"privacy/epsilon_{part}": result[f"privacy/release_epsilon_{part}"] for part in ("mean", "max")}
        return result | release

    def record(self) -> dict[str, Any]:
        """Options, noise and ε of each client, in plain types, for reports and model cards."""
        clients = range(len(self.sizes))
        noise = {"noise_multipliers": self.least_noise, "sample_rates": list(map(self._counted_rate, clients))}
        return {"options": asdict(self.options)} | noise | self.epsilons(clients)

    def state_dict(self) -> dict[str, Any]:
        """Ledgers and noise in plain types."""
        noise = {"noise_multipliers": list(self.noise_multipliers), "least_noise": list(self.least_noise)}
        return super().state_dict() | {"sampling": self.options.sampling} | noise

    def load_state_dict(self, state: dict[str, Any], rounds_done: int = 0, tuned: bool = False) -> None:
        """As of :class:`Budget`; a calibrated σ stays what it was. Batches must be drawn as they were before."""
        before = state["sampling"]
        if before != self.options.sampling:
            raise OptionError(
                f"privacy: the checkpoint's batches were drawn with sampling={before!r}, and here it is "
                f"{self.options.sampling!r}: ε would be of two kinds of neighbours at once; resume with "
                f"sampling={before!r}, or start anew",
                name="privacy",
            )
        if self.options.target_epsilon is not None:
            self.noise_multipliers = list(state["noise_multipliers"])
        self.least_noise = [min(pair) for pair in zip(self.noise_multipliers, state["least_noise"], strict=True)]
        super().load_state_dict(state, rounds_done, tuned)

    def _left(self, rounds_done: int) -> Sequence[int]:
        return super()._left(rounds_done) or [0] * len(self.sizes)

    def _entries(self, size: int, tuning: bool) -> tuple[_Entry, ...]:
        """What a client with ``size`` images trains at once."""
        training = self.training(tuning)
        steps = [phase.local_steps(size, self.batch_size) for phase in training.phases]
        asked_in = list(zip(steps, training.queries, strict=True))
        sent = {stream: not tuning and stream not in training.unsent for asked in training.queries for stream in asked}
        if self.options.sampling == "shuffle":  # a stream continues from one of its phases to the next
            rows = rows_per_batch(size, self.batch_size)
            looks = {stream: max(asked.get(stream, 0) for asked in training.queries) for stream in sent}
            taken = {stream: sum(own for own, asked in asked_in if stream in asked) for stream in sent}
            return tuple(_Entry(looks[stream], passes(size, rows, taken[stream]), sent[stream]) for stream in sent)
        return tuple(_Entry(looks, own, sent[stream]) for own, asked in asked_in for stream, looks in asked.items())

    def costs(self, client: int, tuning: bool = False) -> list[Cost]:
        """As of :class:`Budget`."""
        return [
            (self.noise_multipliers[client] / looks**0.5, self._counted_rate(client), steps, sent)
            for looks, steps, sent in self._steps(self.sizes[client], tuning)
        ]

    def _counted_rate(self, client: int) -> float:
        """The rate at which the client's steps are counted: shuffling earns no amplification."""
        return self.rate(client) if self.options.sampling == "poisson" else 1.0

    def _calibrated(self) -> list[float]:
        """σ of each client for the target."""
        target, options = self.options.target_epsilon, self.options
        assert target is not None
        self.check_planned(self._planned is not None)
        planned, once, result = self._left(0), cache(calibrate), []  # clients of one size mostly have one plan
        for client, size in enumerate(self.sizes):
            entries = [entry for entry in self._steps(size, False) if self._counted(entry.sent)]
            after = [entry for entry in self._steps(size, True) if self._counted(entry.sent)]
            looks = max(entry.looks for entry in entries + after)  # where they differ, the noise is a little more
            steps = max(1, planned[client]) * sum(e.steps for e in entries) + sum(e.steps for e in after)
            try:
                sigma = once(target, options.delta, self._counted_rate(client), steps, options.accountant)
            except ValueError as error:
                raise OptionError(f"privacy: client {client} ({size} images): {error}", name="privacy") from error
            result.append(sigma * looks**0.5)
        return result

    def _check_first_round(self) -> None:
        """Name the clients who could not even train once."""
        clients = range(len(self.sizes))
        unable = sorted({*clients} - {*self.affordable(clients)})
        if unable:
            named = [f"{one} ({self.sizes[one]} images, ε = {self._after(one, 1, 0):.2f})" for one in unable[:5]]
            raise OptionError(
                f"privacy: {len(unable)} of {len(clients)} clients would pass max_epsilon={self.options.max_epsilon} "
                f"in their first round: client {', '.join(named)}; give more noise (noise_multiplier), smaller batches "
                "or fewer local steps, or leave them out",
                name="privacy",
            )
