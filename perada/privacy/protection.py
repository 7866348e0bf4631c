# SPDX-License-Identifier: Apache-2.0
"""The privacy of a run: its rounds, its ledgers, and what still may be spent."""

import re
import secrets
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perada.core.batches import CohortBatch, one_of
from perada.core.ranks import Ranks
from perada.core.rounds import PrivateSampling, RoundPlan
from perada.core.seeding import Streams, generator
from perada.core.states import State
from perada.engine.engine import Engine
from perada.privacy.account import Account
from perada.privacy.client_level import ClientLevel
from perada.privacy.gradients import NoisyGradients, Query, make_gradients
from perada.privacy.ledgers import JOURNAL, Journal, read_journals
from perada.privacy.sampling import expected_batch_size


class PrivateTraining:
    """Gives local steps losses whose value is 0 and whose gradient is private."""

    def __init__(self, account: Account, engine: Engine, multilabel: bool, seed: int) -> None:
        self.account, self.seed, self._engine, self._multilabel = account, seed, engine, multilabel

    @cached_property
    def gradients(self) -> NoisyGradients:
        """What answers queries; made when it is first asked, as by then features may stand for images."""
        return make_gradients(self.account.options, self._engine, self._multilabel)

    def sampling(self, tuning: bool = False) -> PrivateSampling:
        """How batches are drawn."""
        options, queries = self.account.options, self.account.training(tuning).queries
        return PrivateSampling(tuple(map(tuple, queries)), options.sampling, options.secure_rng)


class PrivateRound:
    """The noise of one round, or of the fine-tuning after the last: a stream for each client and stream of batches."""

    def __init__(self, training: PrivateTraining, plan: RoundPlan, tuning: bool) -> None:
        self.training, self.plan, self.tuning = training, plan, tuning
        self._queries = training.account.training(tuning).queries
        self._asked: Counter[tuple[int, str, int]] = Counter()
        self._noise: dict[str, list[torch.Generator]] = {}
        if not training.account.options.secure_rng:
            purpose = "tuning-noise" if tuning else "noise"
            for stream in {stream for asked in self._queries for stream in asked}:
                self._noise[stream] = [
                    generator(training.seed, f"{purpose}-{stream}", plan.round, client) for client in plan.clients
                ]

    @property
    def secure(self) -> bool:
        """Whether draws must be as unknown as the noise: also dropout's masks, which go by place in the batch."""
        return self.training.account.options.secure_rng

    def loss(
        self, stream: str, states: State, batches: dict[str, CohortBatch], rows: slice, dropout: Streams
    ) -> Tensor:
        """Losses (C,) that are 0, and whose gradient by ``states`` (C, ...) is the noisy one on a stream's batch.

        The clients are those of the round in ``rows``; ``dropout`` are their random streams. A RuntimeError if more
        gradients are asked for than the ledgers count.
        """
        account, batch = self.training.account, one_of(batches)
        self._asked[batch.step, stream, rows.start] += 1
        if self._asked[batch.step, stream, rows.start] > self._queries[batch.phase].get(stream, 0):
            raise RuntimeError(
                f"a local step asked for more gradients of {stream!r} than its rehearsal, which the ledgers count; an "
                "algorithm must ask for the same number in every step"
            )
        batch = batches[stream]
        clients, counts = self.plan.clients[rows], batch.counts[rows]
        width = max(1, *counts)
        noise = self._noise[stream][rows] if self._noise else None
        sigmas = [account.noise_multipliers[client] for client in clients]
        expected = [expected_batch_size(account.sizes[client], account.rate(client)) for client in clients]
        x, y = batch.x[rows, :width], batch.y[rows, :width]
        total = torch.zeros(len(counts), device=batch.x.device)
        query = Query(states, x, y, counts, dropout, noise, sigmas, expected)
        for key, value in self.training.gradients(query).items():
            total = total + (states[key] * value).flatten(1).sum(1)
        return total - total.detach()


@dataclass
class Protection:
    """What protects a run.

    Attributes:
        images: Private training of every client.
        clients: Privacy of what a client sends.
        journal: Where rounds are written down before they are trained; nowhere where there are no checkpoints.
        counted: The rounds in the ledgers, by an id of each.
        run: An id of this run and of all that are resumed from it.
        journaled: The id of what was written down last.
    """

    images: PrivateTraining | None = None
    clients: ClientLevel | None = None
    journal: Journal = field(default_factory=lambda: Journal([]))
    counted: list[str] = field(default_factory=list)
    run: str = field(default_factory=lambda: secrets.token_hex(16))
    journaled: str | None = None

    @property
    def private(self) -> bool:
        """Whether anything is protected."""
        return self.images is not None or self.clients is not None

    def open(self, plan: RoundPlan, tuning: bool = False) -> PrivateRound | None:
        """Begin local training."""
        return None if self.images is None else PrivateRound(self.images, plan, tuning)

    def spend(self, plan: RoundPlan, ranks: Ranks, tuning: bool = False) -> None:
        """Count what a round is going to cost, before anything of it is drawn; all ranks call it.

        A round that is begun is counted, whatever becomes of it: its noise has been drawn. Where all noise follows from
        the seed the same is drawn again, and the round is counted once. The plan is of all its clients, or of the
        fine-tuning after the last round. An OSError if it cannot be written down.
        """
        if not self.private:
            return
        costs = {
            "round": plan.round,
            "images": [] if self.images is None else self.images.account.cost(plan, tuning),
            "clients": [] if self.clients is None or tuning else list(plan.clients),
            "noise_multiplier": None if self.clients is None else self.clients.noise_multiplier,
        }
        name = f"{'tuning' if tuning else 'round'} {costs}" if self._repeats else secrets.token_hex(16)
        entry = {"id": ranks.gather(name)[0], "run": self.run} | costs
        if entry["id"] in self.counted:
            return
        if ranks.rank == 0 and not self._repeats:
            self._write(entry)
        ranks.gather(None)  # the others wait until it is on disk
        self._count(entry)

    def _write(self, entry: dict[str, Any]) -> None:
        lost = self.journal.write(entry)
        if self.journal.own:
            self.journaled = entry["id"]
        if lost:
            unaware = f"{', '.join(map(str, lost))} cannot be written: who resumes from there does not know of it"
            warnings.warn(f"privacy: {unaware}", stacklevel=2)

    def journal_in(self, path: Path, rounds_done: int) -> None:
        """Begin to write a journal where there was none, for a checkpoint that is written while rounds are left."""
        if self._repeats or self.journal.own or not self.private:
            return
        self.journal = Journal([path], self.journal.others)
        name, nothing = secrets.token_hex(16), dict[str, Any](images=[], clients=[], noise_multiplier=None)
        self._write({"id": name, "run": self.run, "round": rounds_done} | nothing)
        self.counted.append(name)

    def _count(self, entry: dict[str, Any], lost: bool = False) -> None:
        self.counted.append(entry["id"])
        if self.images is not None:
            self.images.account.spend(entry["images"], lost)
        if self.clients is not None:
            self.clients.spend(entry["clients"], entry["noise_multiplier"], lost)

    def count_begun(self, journals: Iterable[Path], ranks: Ranks) -> list[int]:
        """Count and give the rounds that were begun after the checkpoint of which this run is resumed.

        All ranks call it, with the files that hold them. A ValueError if what this run wrote itself is not in them.
        """
        journals = list(journals)
        known = ranks.gather(read_journals(journals, self.run))[0]
        if self.journaled is not None and self.journaled not in known:
            names = ", ".join(map(repr, map(str, journals)))
            raise ValueError(
                f"privacy: the checkpoint's {JOURNAL} is not there, or not whole (looked for it in {names}): rounds "
                "that were begun after the checkpoint could not be counted. Put it beside the checkpoint, or start anew"
            )
        missing = [entry for name, entry in known.items() if name not in self.counted]
        for entry in missing:
            self._count(entry, lost=True)
        return sorted(entry["round"] for entry in missing)

    @property
    def _secure_rng(self) -> dict[str, bool]:
        """Of each section that there is, whether its noise is drawn from a cryptographic generator."""
        images = {} if self.images is None else {"privacy": self.images.account.options.secure_rng}
        return images | ({} if self.clients is None else {"client_privacy": self.clients.options.secure_rng})

    @property
    def _repeats(self) -> bool:
        """Whether a round that is trained again draws all of its noise again."""
        return not any(self._secure_rng.values())

    @property
    def test_mode(self) -> bool:
        """Whether any noise follows from the run's seed."""
        return not all(self._secure_rng.values())

    @property
    def limited(self) -> bool:
        """Whether there is a limit that a client may reach."""
        images = None if self.images is None else self.images.account.options
        limits = [] if images is None else [images.max_epsilon, images.target_epsilon]
        return any(limit is not None for limit in [*limits, self.clients and self.clients.options.target_epsilon])

    def affordable(self, clients: Sequence[int], tuning: bool = False) -> list[int]:
        """Those of ``clients`` who stay within every limit if they train once more, or are fine-tuned."""
        able = list(clients) if self.images is None else self.images.account.affordable(clients, tuning)
        return able if self.clients is None or tuning else self.clients.affordable(able)

    def metrics(self) -> dict[str, float]:
        """ε so far, and a mark where the noise follows from the run's seed."""
        images = {} if self.images is None else self.images.account.metrics()
        clients = {} if self.clients is None else self.clients.metrics()
        return images | clients | ({"privacy/test_mode": 1.0} if self.test_mode else {})

    def epsilons(self, num_clients: int) -> dict[str, list[float]]:
        """ε of each client so far, by the name of the metric."""
        result = {}
        if self.images is not None:
            result = {f"privacy/{name}_epsilon": values for name, values in self.images.account.epsilons().items()}
        if self.clients is not None:
            result["privacy/client_epsilon"] = list(self.clients.epsilons(range(num_clients)).values())
        return result

    def record(self, num_clients: int) -> dict[str, Any] | None:
        """Options, noise and ε of each client in plain types; ``None`` where nothing is private."""
        record: dict[str, Any] = {}
        if self.images is not None:
            record["sample"] = self.images.account.record()
        if self.clients is not None:
            record["client"] = {
                "options": asdict(self.clients.options),
                "noise_multiplier": self.clients.least_noise,
                "epsilon": list(self.clients.epsilons(range(num_clients)).values()),
            }
        return record or None

    def state_dict(self) -> dict[str, Any]:
        """Ledgers, in plain types."""
        return {
            "images": None if self.images is None else self.images.account.state_dict(),
            "clients": None if self.clients is None else self.clients.state_dict(),
            "secure_rng": self._secure_rng,
            "counted": list(self.counted),
            "run": self.run,
            "journaled": self.journaled,
            "journals": [str(path) for path in (*self.journal.own, *self.journal.others) if path.exists()],
            "folder": str(self.journal.own[0].parent) if self.journal.own else None,
        }

    def check_alike(self, saved: dict[str, Any] | None) -> None:
        """Refuse the ``saved`` state, or ``None``, of a run that was private in another way than this one."""
        saved = saved or {"images": None, "clients": None}
        for name, section, own in (("images", "privacy", self.images), ("clients", "client_privacy", self.clients)):
            if (saved[name] is None) != (own is None):
                with_it, without = ("without", "with") if saved[name] is None else ("with", "without")
                raise ValueError(
                    f"the checkpoint is of a run {with_it} {section}, and this one is {without}: what it cost could "
                    f"not be accounted for; resume {with_it} {section}, or start anew"
                )
        if self.private and "folder" not in saved:
            raise ValueError("the checkpoint's ledgers are of an earlier perada; resume with that one, or start anew")
        for section, here in self._secure_rng.items():
            there = saved["secure_rng"][section]
            if there != here:
                raise ValueError(
                    f"{section}: the checkpoint's noise was drawn with secure_rng={there}, and here it is {here}: what "
                    f"is said of the noise would be wrong of one part; resume with secure_rng={there}, or start anew"
                )

    def load_state_dict(self, saved: dict[str, Any] | None, rounds_done: int, tuned: bool) -> None:
        """Resume from what :meth:`state_dict` gave, ``None`` for a run that was not private.

        ``saved`` counts ``rounds_done`` rounds and, if ``tuned``, a fine-tuning after them.

        Raises:
            ValueError: If what was trained so far was private in another way, or would pass its target.
        """
        self.check_alike(saved)
        if saved is None or not self.private:
            return
        self.counted, self.run, self.journaled = list(saved["counted"]), str(saved["run"]), saved["journaled"]
        if not re.fullmatch("[0-9a-f]{32}", self.run):  # it is written into files
            raise ValueError(f"the checkpoint's id of the private run is {self.run!r}, which perada did not write")
        if self.images is not None:
            self.images.account.load_state_dict(saved["images"], rounds_done, tuned)
        if self.clients is not None:
            self.clients.load_state_dict(saved["clients"], rounds_done)
