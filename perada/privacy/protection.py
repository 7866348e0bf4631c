# SPDX-License-Identifier: Apache-2.0
"""The privacy of a run: its rounds, its ledgers, and the journal of rounds, written before they are trained.

A checkpoint knows the rounds up to its own. What was begun after it, and was lost with the process, has been drawn from
the generator all the same: whoever resumes draws again, and both are counted. No crash makes a ledger forget a round.
"""

import json
import os
import re
import secrets
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perada.core.checks import OptionError
from perada.core.files import opener
from perada.core.ranks import Ranks
from perada.core.rounds import CohortBatch, RoundPlan, one_of
from perada.core.seeding import Streams, generator
from perada.core.states import State
from perada.privacy.account import Account, Budget
from perada.privacy.client_level import ClientLevel
from perada.privacy.gradients import Query, SampleGradients

JOURNAL = "privacy_ledger.jsonl"
"""Name of the file, beside the checkpoints."""
FIELDS = frozenset({"id", "run", "round", "images", "clients"})
"""What a line says: of which run it is, and the costs of a round by client."""
CUT = b" #cut"
"""Put behind a line that a crash cut off."""


class Journal:
    """Files with a line of JSON for every round that was begun.

    Those of this run, ``own``, must be writable; ``others``, of the runs that it is resumed from, are to know of its
    rounds too.
    """

    def __init__(self, own: Iterable[Path], others: Iterable[Path] = ()) -> None:
        self.own = list(dict.fromkeys(path.absolute() for path in own))
        self.others = [path for path in dict.fromkeys(path.absolute() for path in others) if path not in self.own]

    def write(self, entry: dict[str, Any]) -> None:
        """Add an entry to every file; it is then on disk. An OSError if one of ``own`` cannot be written."""
        for path in (*self.own, *self.others):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "ab+", opener=opener()) as file:
                    file.seek(max(0, file.tell() - 1))
                    cut = file.read() not in (b"", b"\n")  # by a crash
                    file.write((CUT + b"\n") * cut + json.dumps(entry).encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                if path in self.own:
                    raise OSError(
                        f"privacy: the round cannot be written down in {str(path)!r} ({error}), and is not begun; make "
                        "room or give another folder"
                    ) from error
                unaware = "cannot be written: who resumes from there does not know of the round"
                warnings.warn(f"privacy: {str(path)!r} {unaware}", stacklevel=2)


def read_journals(paths: Iterable[Path], run: str) -> dict[str, dict[str, Any]]:
    """The entries of one run, and of those resumed from it, by their ``id``; a line that was cut off was never begun.

    A ValueError if a whole line of a file is not an entry.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() and not path.is_symlink() else []
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n") or line.endswith(CUT + b"\n"):
                continue
            try:
                entry = json.loads(line)
                if not FIELDS <= set(entry):
                    raise TypeError(entry)
            except (ValueError, TypeError) as error:
                raise OptionError(
                    f"privacy: line {number} of {str(path)!r} is damaged, so that it cannot be known what was spent; "
                    "restore the file from a copy, or start anew",
                    name="privacy",
                ) from error
            if entry["run"] == run:
                found[entry["id"]] = entry
    return found


class PrivateRound:
    """Losses of one round, or of the fine-tuning after the last, whose value is 0 and whose gradient is private.

    The noise has a stream for each client and stream of batches. With a ``secure`` generator draws must be as unknown
    as the noise: also dropout's masks, which go by place in the batch.
    """

    def __init__(
        self, account: Account, gradients: SampleGradients, seed: int, plan: RoundPlan, tuning: bool = False
    ) -> None:
        self.account, self.gradients, self.plan, self.secure = account, gradients, plan, account.options.secure_rng
        self._queries = account.training(tuning).queries
        self._asked: Counter[tuple[int, int, str, int]] = Counter()
        purpose = "tuning-noise" if tuning else "noise"
        self._noise = {
            stream: [generator(seed, f"{purpose}-{stream}", plan.round, client) for client in plan.clients]
            for stream in ({stream for asked in self._queries for stream in asked} if not self.secure else ())
        }

    def loss(
        self, stream: str, states: State, batches: dict[str, CohortBatch], rows: slice, dropout: Streams
    ) -> Tensor:
        """Losses (C,) that are 0, and whose gradient by ``states`` (C, ...) is the noisy one on a stream's batch.

        The clients are those of the round in ``rows``; ``dropout`` are their random streams. A RuntimeError if more
        gradients are asked for than the ledgers count.
        """
        account, batch = self.account, one_of(batches)
        place = batch.phase, batch.step, stream, rows.start
        self._asked[place] += 1
        if self._asked[place] > self._queries[batch.phase].get(stream, 0):
            raise RuntimeError(
                f"a local step asked for more gradients of {stream!r} than its rehearsal, which the ledgers count; an "
                "algorithm must ask for the same number in every step"
            )
        batch = batches[stream]
        clients, counts = self.plan.clients[rows], batch.counts[rows]
        width = max(1, *counts)
        noise = self._noise[stream][rows] if self._noise else None
        sigmas = [account.noise_multipliers[client] for client in clients]
        expected = [account.sizes[client] * account.rate(client) for client in clients]  # not what was drawn
        x, y = batch.x[rows, :width], batch.y[rows, :width]
        total = torch.zeros(len(counts), device=batch.x.device)
        query = Query(states, x, y, counts, dropout, noise, sigmas, expected)
        for key, value in self.gradients(query).items():
            total = total + (states[key] * value).flatten(1).sum(1)
        return total - total.detach()


@dataclass
class Protection:
    """What protects a run.

    Private training of every client, and privacy of what clients send. There is no journal without checkpoints.
    """

    images: Account | None = None
    clients: ClientLevel | None = None
    journal: Journal = field(default_factory=lambda: Journal([]))
    counted: list[str] = field(default_factory=list)  # the rounds in the ledgers, by an id of each
    run: str = field(default_factory=lambda: secrets.token_hex(16))  # an id, also of all that are resumed from it
    journaled: str | None = None  # the id of what was written down last

    @property
    def budgets(self) -> dict[str, Budget]:
        """What was spent on images, and on whole clients, where that is protected."""
        given: dict[str, Budget | None] = {"images": self.images, "clients": self.clients}
        return {name: budget for name, budget in given.items() if budget is not None}

    @property
    def private(self) -> bool:
        """Whether anything is protected."""
        return bool(self.budgets)

    def spend(self, plan: RoundPlan, ranks: Ranks, tuning: bool = False) -> None:
        """Count what a round is going to cost, before anything of it is drawn; all ranks call it.

        A round that is begun is counted, whatever becomes of it: its noise has been drawn. Where all noise follows from
        the seed the same is drawn again, and the round is counted once. The plan is of all its clients, or of the
        fine-tuning after the last round. An OSError if it cannot be written down.
        """
        if not self.private:
            return
        costs = {name: budget.cost(plan, tuning) for name, budget in self.budgets.items()}
        kind = "tuning" if tuning else "round"
        name = f"{kind} {plan.round} {costs}" if self._repeats else secrets.token_hex(16)
        entry = self._entry(ranks.gather(name)[0], plan.round) | costs
        if entry["id"] in self.counted:
            return
        if ranks.rank == 0 and not self._repeats:
            self._write(entry)
        ranks.gather(None)  # the others wait until it is on disk
        self._count(entry)

    def _entry(self, name: str, round: int) -> dict[str, Any]:
        """A line of the journal of a round that costs nothing."""
        return {"id": name, "run": self.run, "round": round, "images": [], "clients": []}

    def _write(self, entry: dict[str, Any]) -> None:
        self.journal.write(entry)
        if self.journal.own:
            self.journaled = entry["id"]

    def journal_in(self, path: Path, rounds_done: int) -> None:
        """Begin to write a journal where there was none, for a checkpoint that is written while rounds are left."""
        if self._repeats or self.journal.own or not self.private:
            return
        self.journal = Journal([path], self.journal.others)
        entry = self._entry(secrets.token_hex(16), rounds_done)
        self._write(entry)
        self.counted.append(entry["id"])

    def _count(self, entry: dict[str, Any], lost: bool = False) -> None:
        self.counted.append(entry["id"])
        for name, budget in self.budgets.items():
            budget.spend(entry[name], lost)

    def count_begun(self, journals: Iterable[Path], ranks: Ranks) -> list[int]:
        """Count and give the rounds that were begun after the checkpoint of which this run is resumed.

        All ranks call it, with the files that hold them. A ValueError if what this run wrote itself is not in them.
        """
        journals = list(journals)
        known = ranks.gather(read_journals(journals, self.run))[0]
        if self.journaled is not None and self.journaled not in known:
            names = ", ".join(map(repr, map(str, journals)))
            raise OptionError(
                f"privacy: the checkpoint's {JOURNAL} is not there, or not whole (looked for it in {names}): rounds "
                "that were begun after the checkpoint could not be counted. Put it beside the checkpoint, or start "
                "anew",
                name="privacy",
            )
        missing = [entry for name, entry in known.items() if name not in self.counted]
        for entry in missing:
            self._count(entry, lost=True)
        return sorted(entry["round"] for entry in missing)

    @property
    def _secure_rng(self) -> dict[str, bool]:
        """Of each section that there is, whether its noise is drawn from a cryptographic generator."""
        return {budget.section: budget.options.secure_rng for budget in self.budgets.values()}

    @property
    def _repeats(self) -> bool:
        """Whether a round that is trained again draws all of its noise again."""
        return not any(self._secure_rng.values())

    @property
    def limited(self) -> bool:
        """Whether there is a limit that a client may reach."""
        return any(budget.limit is not None for budget in self.budgets.values())

    def affordable(self, clients: Sequence[int], tuning: bool = False) -> list[int]:
        """Those of ``clients`` who stay within every limit if they train once more, or are fine-tuned."""
        able = list(clients)
        for budget in self.budgets.values():
            able = budget.affordable(able, tuning)
        return able

    def metrics(self) -> dict[str, float]:
        """ε so far, and a mark where the noise follows from the run's seed."""
        found = {} if all(self._secure_rng.values()) else {"privacy/test_mode": 1.0}
        images = {} if self.images is None else self.images.metrics()
        return images | ({} if self.clients is None else self.clients.metrics()) | found

    def epsilons(self, num_clients: int) -> dict[str, list[float]]:
        """ε of each client so far, by the name of the metric."""
        images = {} if self.images is None else self.images.epsilons(range(num_clients))
        found = {f"privacy/{name}_epsilon": values for name, values in images.items()}
        if self.clients is not None:
            found["privacy/client_epsilon"] = self.clients.epsilons(range(num_clients))["server"]
        return found

    def record(self, num_clients: int) -> dict[str, Any] | None:
        """Options, noise and ε of each client in plain types; ``None`` where nothing is private."""
        images = {} if self.images is None else {"sample": self.images.record()}
        return (images if self.clients is None else images | {"client": self.clients.record(num_clients)}) or None

    def state_dict(self) -> dict[str, Any]:
        """Ledgers, in plain types."""
        return {
            "images": None,
            "clients": None,
            **{name: budget.state_dict() for name, budget in self.budgets.items()},
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
        for name, section in (("images", "privacy"), ("clients", "client_privacy")):
            if (saved[name] is None) != (name not in self.budgets):
                with_it, without = ("without", "with") if saved[name] is None else ("with", "without")
                raise ValueError(
                    f"the checkpoint is of a run {with_it} {section}, and this one is {without}: what it cost could "
                    f"not be accounted for; resume {with_it} {section}, or start anew"
                )
        for section, here in self._secure_rng.items():
            there = saved["secure_rng"][section]
            if there != here:
                raise ValueError(
                    f"{section}: the checkpoint's noise was drawn with secure_rng={there}, and here it is {here}: what "
                    f"is said of the noise would be wrong of one part; resume with secure_rng={there}, or start anew"
                )

    def load_state_dict(self, saved: dict[str, Any] | None, rounds_done: int, tuned: bool) -> None:
        """Resume from what :meth:`state_dict` gave, ``None`` for a run that was not private.

        ``saved`` counts ``rounds_done`` rounds and, if ``tuned``, a fine-tuning after them. A ValueError if what was
        trained so far was private in another way, or would pass its target.
        """
        self.check_alike(saved)
        if saved is None or not self.private:
            return
        self.counted, self.run, self.journaled = list(saved["counted"]), str(saved["run"]), saved["journaled"]
        if not re.fullmatch("[0-9a-f]{32}", self.run):  # it is written into files
            raise ValueError(f"the checkpoint's id of the private run is {self.run!r}, which perada did not write")
        for name, budget in self.budgets.items():
            budget.load_state_dict(saved[name], rounds_done, tuned)
