# SPDX-License-Identifier: Apache-2.0
"""The privacy of a run: its private rounds and the budget that they spend.

A checkpoint contains the costs of the rounds before it. Rounds that were begun later and lost in a crash have also used
noise, and a resumed run draws new noise for them, so both are counted: a journal records each round before it begins,
and no crash makes a ledger forget one.
"""

import re
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perada.core.checks import OptionError
from perada.core.ranks import Ranks
from perada.core.rounds import CohortBatch, RoundPlan, one_of
from perada.core.seeding import Streams, generator
from perada.core.states import State, as_matrix
from perada.privacy.account import Account, Budget
from perada.privacy.client_level import ClientLevel
from perada.privacy.clipping import noisy_mean
from perada.privacy.gradients import Query, SampleGradients
from perada.privacy.journal import JOURNAL, Journal, read_journals


class PrivateRound:
    """Losses of one round, or of the fine-tuning after the last, whose value is 0 and whose gradient is private.

    Args:
        account: Account with the noise of each client.
        gradients: Computes the sums of clipped gradients.
        seed: Seed of the run, from which the noise is derived in the test mode.
        plan: Plan of the round, with its clients.
        tuning: Whether this is the fine-tuning.

    Attributes:
        secure: Whether noise is drawn from a cryptographic generator. All other draws must then be unpredictable too,
            including dropout masks, which depend on an image's place in the batch.
    """

    def __init__(
        self,
        account: Account,
        gradients: SampleGradients,
        seed: int,
        plan: RoundPlan,
        tuning: bool = False,
    ) -> None:
        self.account = account
        self.gradients = gradients
        self.plan = plan
        self.secure = account.options.secure_rng
        query_plan = account.query_plan(tuning)
        self._planned_queries = query_plan.queries
        # Gradients are counted by phase, step, stream of batches, and first client of the chunk.
        self._num_queries: Counter[tuple[int, int, str, int]] = Counter()
        # Generators of the noise, one for each stream of batches and each client.
        self._noise: dict[str, list[torch.Generator]] = {}
        purpose = "tuning-noise" if tuning else "noise"
        if not self.secure:
            for stream in query_plan.streams:
                self._noise[stream] = [
                    generator(seed, f"{purpose}-{stream}", plan.round, client) for client in plan.clients
                ]

    def loss(
        self,
        stream: str,
        states: State,
        batch_of_role: dict[str, CohortBatch],
        client_slice: slice,
        dropout: Streams,
    ) -> Tensor:
        """Return losses (C,) of 0 whose gradients with respect to ``states`` are the noisy gradients of a batch.

        An algorithm can thus use them like an ordinary loss, without ever seeing a gradient that is not private.

        Args:
            stream: Name of the stream of batches.
            states: States (C, ...) of some clients.
            batch_of_role: The step's batches of these clients, by stream.
            client_slice: Which of the round's clients these are.
            dropout: Random streams of these clients.

        Raises:
            RuntimeError: If more gradients are computed than the ledgers count.
        """
        self._count_query(one_of(batch_of_role), stream, client_slice)
        batch = batch_of_role[stream]
        counts = batch.counts
        width = max(1, *counts)
        sums = self.gradients.sums(Query(states, batch.x[:, :width], batch.y[:, :width], counts, dropout))
        total = torch.zeros(len(counts), device=batch.x.device)
        for key, gradient in self._noisy_gradients(sums, stream, client_slice).items():
            # The derivative of this product with respect to the state is the noisy gradient.
            total = total + as_matrix(states[key] * gradient).sum(1)
        return total - total.detach()

    def _noisy_gradients(self, sums: State, stream: str, client_slice: slice) -> State:
        """Return the noisy gradients (C, ...) of the mean loss from the clipped sums.

        Args:
            sums: Sums (C, ...) of clipped gradients.
            stream: Name of the stream of batches.
            client_slice: Which of the round's clients these are.
        """
        account = self.account
        clients = self.plan.clients[client_slice]
        sigmas = [account.noise_multipliers[client] for client in clients]
        stds = [sigma * account.options.max_norm for sigma in sigmas]
        # Sums are divided by the expected number of images, since the actual one would reveal something about the data.
        expected_batch = [account.sizes[client] * account.rate(client) for client in clients]
        generators = None if self.secure else self._noise[stream][client_slice]
        return noisy_mean(sums, stds, expected_batch, generators)

    def _count_query(self, batch: CohortBatch, stream: str, client_slice: slice) -> None:
        """Count a gradient of a step; raise a RuntimeError if there are more than planned."""
        place = (batch.phase, batch.step, stream, client_slice.start)
        self._num_queries[place] += 1
        if self._num_queries[place] > self._planned_queries[batch.phase].get(stream, 0):
            raise RuntimeError(
                f"a local step asked for more gradients of {stream!r} than in the dry run, whose number the ledgers "
                "count; an algorithm must ask for the same number in every step"
            )


@dataclass
class Protection:
    """Protection of a run: private training of every client, and privacy of what clients send.

    Attributes:
        image_account: Account of the clients' images; None without ``privacy``.
        client_level: Client-level privacy; None without ``client_privacy``.
        journal: Journal in which rounds are recorded before they begin; it has no file in a run without checkpoints.
        counted: Ids of the rounds in the ledgers.
        run: Id of the run and of all runs that are resumed from it.
        last_journaled: Id of the newest entry of the journal; None if there is none.
    """

    image_account: Account | None = None
    client_level: ClientLevel | None = None
    journal: Journal = field(default_factory=lambda: Journal([]))
    counted: list[str] = field(default_factory=list)
    run: str = field(default_factory=lambda: secrets.token_hex(16))
    last_journaled: str | None = None

    @property
    def budgets(self) -> dict[str, Budget]:
        """Budgets by name: ``images`` and ``clients``, as far as they are protected."""
        budgets: dict[str, Budget] = {}
        if self.image_account is not None:
            budgets["images"] = self.image_account
        if self.client_level is not None:
            budgets["clients"] = self.client_level
        return budgets

    @property
    def private(self) -> bool:
        """Whether images or clients are protected."""
        return bool(self.budgets)

    def spend(self, plan: RoundPlan, ranks: Ranks, tuning: bool = False) -> None:
        """Count the cost of a round before anything in it is drawn. A collective: all ranks must call this.

        A round that was begun is counted even if it is not completed, since its noise was drawn. In the test mode noise
        is derived from the seed: a repeated round draws the same noise and is counted once.

        Args:
            plan: Plan with all clients of the round, or of the fine-tuning after the last round.
            ranks: The processes that share the work.
            tuning: Whether this is the fine-tuning.

        Raises:
            OSError: If the journal cannot be written.
        """
        if not self.private:
            return
        costs: dict[str, list[tuple[Any, ...]]] = {}
        for name, budget in self.budgets.items():
            # Plain tuples, since their text is part of ids, which are saved in checkpoints.
            costs[name] = [tuple(cost) for cost in budget.round_costs(plan, tuning)]
        if self._repeats_noise:
            kind = "tuning" if tuning else "round"
            round_id = f"{kind} {plan.round} {costs}"
        else:
            round_id = secrets.token_hex(16)
        # This is a collective: each rank drew another random id, and all use that of rank 0.
        round_id = ranks.gather(round_id)[0]
        entry = self._make_entry(round_id, plan.round) | costs
        if entry["id"] in self.counted:
            return
        if ranks.rank == 0 and not self._repeats_noise:
            self._write_entry(entry)
        # A barrier: no rank may begin the round before the entry is on disk.
        ranks.gather(None)
        self._count_entry(entry)

    def _make_entry(self, round_id: str, round: int) -> dict[str, Any]:
        """Return a journal entry for a round, without costs."""
        return {"id": round_id, "run": self.run, "round": round, "images": [], "clients": []}

    def _write_entry(self, entry: dict[str, Any]) -> None:
        """Write an entry to the journal before its costs are counted."""
        self.journal.write(entry)
        if self.journal.paths:
            self.last_journaled = entry["id"]

    def journal_in(self, path: Path, rounds_done: int) -> None:
        """Start a journal for a run that gets its first checkpoint, unless it has one already.

        Args:
            path: File of the journal.
            rounds_done: Number of completed rounds.
        """
        if self._repeats_noise or self.journal.paths or not self.private:
            return
        self.journal = Journal([path], self.journal.earlier_paths)
        entry = self._make_entry(secrets.token_hex(16), rounds_done)
        self._write_entry(entry)
        self.counted.append(entry["id"])

    def _count_entry(self, entry: dict[str, Any], lost: bool = False) -> None:
        """Add the costs of an entry of the journal to all budgets."""
        self.counted.append(entry["id"])
        for name, budget in self.budgets.items():
            budget.spend(entry[name], lost)

    def count_begun(self, journals: Iterable[Path], ranks: Ranks) -> list[int]:
        """Count the rounds that were begun after the checkpoint from which this run is resumed.

        A collective: all ranks must call this.

        Args:
            journals: Files with the entries of these rounds.
            ranks: The processes that share the work.

        Returns:
            Numbers of these rounds, ascending.

        Raises:
            ValueError: If the files lack the newest entry that the checkpoint knows of.
        """
        journals = list(journals)
        # A collective: all ranks use what rank 0 has read.
        entries = ranks.gather(read_journals(journals, self.run))[0]
        if self.last_journaled is not None and self.last_journaled not in entries:
            names = ", ".join(repr(str(path)) for path in journals)
            raise OptionError(
                f"privacy: the checkpoint's {JOURNAL} is missing or truncated (looked in {names}): rounds begun after "
                "the checkpoint could not be counted; put it next to the checkpoint, or start a new run",
                name="privacy",
            )
        missing = [entry for round_id, entry in entries.items() if round_id not in self.counted]
        for entry in missing:
            self._count_entry(entry, lost=True)
        return sorted(entry["round"] for entry in missing)

    @property
    def _secure_sections(self) -> dict[str, bool]:
        """Whether noise is drawn from a cryptographic generator, by section of the options."""
        return {budget.section: budget.options.secure_rng for budget in self.budgets.values()}

    @property
    def _repeats_noise(self) -> bool:
        """Whether a round that is trained again draws the same noise again."""
        return not any(self._secure_sections.values())

    @property
    def limited(self) -> bool:
        """Whether there is a limit that a client may reach."""
        return any(budget.limit is not None for budget in self.budgets.values())

    def affordable(self, clients: Sequence[int], tuning: bool = False) -> list[int]:
        """Return those of the clients that stay within every limit if they train once more, or are fine-tuned."""
        remaining = list(clients)
        for budget in self.budgets.values():
            remaining = budget.affordable(remaining, tuning)
        return remaining

    def metrics(self) -> dict[str, float]:
        """Return the ε spent so far, and ``privacy/test_mode`` if any noise is derived from the run's seed."""
        metrics: dict[str, float] = {}
        if self.image_account is not None:
            metrics |= self.image_account.metrics()
        if self.client_level is not None:
            metrics |= self.client_level.metrics()
        if not all(self._secure_sections.values()):
            metrics["privacy/test_mode"] = 1.0
        return metrics

    def epsilons(self, num_clients: int) -> dict[str, list[float]]:
        """Return the ε spent so far by each client, by name of the metric."""
        clients = range(num_clients)
        epsilons: dict[str, list[float]] = {}
        if self.image_account is not None:
            for ledger, values in self.image_account.epsilons(clients).items():
                epsilons[f"privacy/{ledger}_epsilon"] = values
        if self.client_level is not None:
            epsilons["privacy/client_epsilon"] = self.client_level.epsilons(clients)["server"]
        return epsilons

    def record(self, num_clients: int) -> dict[str, Any] | None:
        """Return options, noise and ε of each client in plain types; None if nothing is private."""
        record: dict[str, Any] = {}
        if self.image_account is not None:
            record["sample"] = self.image_account.record()
        if self.client_level is not None:
            record["client"] = self.client_level.record(num_clients)
        return record or None

    def state_dict(self) -> dict[str, Any]:
        """Return ledgers and journals, in plain types."""
        written = [path for path in (*self.journal.paths, *self.journal.earlier_paths) if path.exists()]
        return {
            "images": None if self.image_account is None else self.image_account.state_dict(),
            "clients": None if self.client_level is None else self.client_level.state_dict(),
            "secure_rng": self._secure_sections,
            "counted": list(self.counted),
            "run": self.run,
            "journaled": self.last_journaled,
            "journals": [str(path) for path in written],
            "folder": str(self.journal.paths[0].parent) if self.journal.paths else None,
        }

    def check_same_privacy(self, saved: dict[str, Any] | None) -> None:
        """Raise a ValueError if the privacy of a saved run differs from this run's.

        Args:
            saved: Result of :meth:`state_dict`; None for a run that was not private.
        """
        saved = saved or {"images": None, "clients": None}
        for name, section in (("images", "privacy"), ("clients", "client_privacy")):
            was_private = saved[name] is not None
            if was_private != (name in self.budgets):
                before = "with" if was_private else "without"
                now = "without" if was_private else "with"
                raise ValueError(
                    f"the checkpoint is from a run {before} {section}, but this run is {now}: the cost could not be "
                    f"accounted for; resume {before} {section}, or start a new run"
                )
        for section, is_secure in self._secure_sections.items():
            was_secure = saved["secure_rng"][section]
            if was_secure != is_secure:
                raise ValueError(
                    f"{section}: the checkpoint's noise was drawn with secure_rng={was_secure}, but this run has "
                    f"{is_secure}: the recorded description of the noise would be wrong for one part; resume with "
                    f"secure_rng={was_secure}, or start a new run"
                )

    def load_state_dict(self, saved: dict[str, Any] | None, rounds_done: int, tuned: bool) -> None:
        """Resume from what :meth:`state_dict` returned.

        Args:
            saved: The state; None for a run that was not private.
            rounds_done: Rounds that the run had trained.
            tuned: Whether it had also been fine-tuned.

        Raises:
            ValueError: If the run was private in another way, or would pass its target.
        """
        self.check_same_privacy(saved)
        if saved is None or not self.private:
            return
        self.counted = list(saved["counted"])
        self.last_journaled = saved["journaled"]
        self.run = str(saved["run"])
        if not re.fullmatch("[0-9a-f]{32}", self.run):  # it is written into files
            raise ValueError(f"the private run's id in the checkpoint, {self.run!r}, was not written by perada")
        for name, budget in self.budgets.items():
            budget.load_state_dict(saved[name], rounds_done, tuned)
