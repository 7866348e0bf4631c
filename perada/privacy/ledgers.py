# SPDX-License-Identifier: Apache-2.0
"""Ledgers of what clients spent, and the journal of private rounds, written before they are trained.

A checkpoint knows the rounds up to its own. What was begun after it, and was lost with the process, has been drawn from
the generator all the same: whoever resumes draws again, and both are counted. No crash makes a ledger forget a round.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from perada.privacy.accounting import check_step, history_epsilon


class Ledger:
    """How often each client took a noisy step, by noise multiplier and sample rate.

    Counts are kept per setting rather than per step, so runs that alternate stay cheap to account for.

    >>> ledger = Ledger()
    >>> ledger.add(3, noise_multiplier=1.0, sample_rate=0.1, steps=10)
    >>> ledger.add(3, noise_multiplier=1.0, sample_rate=0.1, steps=5)
    >>> ledger.history(3)
    {(1.0, 0.1): 15}
    """

    def __init__(self) -> None:
        self._clients: dict[int, Counter[tuple[float, float]]] = {}

    def add(self, client: int, noise_multiplier: float, sample_rate: float, steps: int) -> None:
        """Count steps, empty batches included, at the rate q in (0, 1], or shuffled passes at the rate 1.

        After a step whose σ is 0 the client's epsilon is infinite. A number out of its range is a ValueError.
        """
        check_step(noise_multiplier, sample_rate, steps)
        if steps:
            self._clients.setdefault(client, Counter())[float(noise_multiplier), float(sample_rate)] += steps

    def history(self, client: int) -> dict[tuple[float, float], int]:
        """A copy of ``{(noise multiplier, sample rate): steps}`` of one client; empty if it took no step."""
        return dict(self._clients.get(client, {}))

    def epsilon(self, client: int, delta: float, accountant: str = "rdp") -> float:
        """Epsilon of one client so far, by :func:`history_epsilon`."""
        return history_epsilon(self.history(client), delta, accountant)

    def epsilons(self, delta: float, accountant: str = "rdp", clients: Sequence[int] | None = None) -> dict[int, float]:
        """Epsilon of each of ``clients``, 0.0 for one without a step; by default of those who took a step, in order."""
        clients = sorted(self._clients) if clients is None else clients
        histories = {client: frozenset(self.history(client).items()) for client in clients}
        # Clients of one size mostly have one history.
        known = {history: history_epsilon(dict(history), delta, accountant) for history in set(histories.values())}
        return {client: known[history] for client, history in histories.items()}

    def summary(self, delta: float, accountant: str = "rdp", clients: Sequence[int] | None = None) -> dict[str, float]:
        """``mean``, ``std`` (of the clients as a population) and ``max`` of :meth:`epsilons`; 0.0 without clients.

        Where one epsilon is infinite, so are the mean and the maximum, and the std is not a number.
        """
        values = list(self.epsilons(delta, accountant, clients).values()) or [0.0]
        std = pstdev(values) if all(map(math.isfinite, values)) else math.nan
        return {"mean": fmean(values), "std": std, "max": max(values)}

    def state_dict(self) -> dict[str, Any]:
        """A copy in lists and numbers only, for a checkpoint: ``{"rows": [[client, σ, q, steps], ...]}``."""
        rows = [
            [client, sigma, rate, steps]
            for client, history in sorted(self._clients.items())
            for (sigma, rate), steps in sorted(history.items())
        ]
        return {"rows": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace everything by a copy of what :meth:`state_dict` gave; a ValueError changes nothing."""
        if "rows" not in state:
            raise ValueError(f"a ledger has no 'rows' but {sorted(state)}; load what Ledger.state_dict() gave")
        fresh = Ledger()
        for row in state["rows"]:
            fresh.add(*row)
        self._clients = fresh._clients


class Ledgers:
    """The two accounts of a run, because both adapters of a client read the same images.

    - ``server``: what the server sees. Only training counts on which something sent depends: the local adapter's.
    - ``release``: what is seen once the client is released whole. All its training counts, composed, the personal
      adapter's too.

    Distillation on public images follows from what was sent, and costs nothing.

    >>> ledgers = Ledgers()
    >>> ledgers.add(0, noise_multiplier=1.0, sample_rate=0.1, steps=10, sent=True)
    >>> ledgers.add(0, noise_multiplier=1.0, sample_rate=0.1, steps=30, sent=False)
    >>> ledgers.server.history(0), ledgers.release.history(0)
    ({(1.0, 0.1): 10}, {(1.0, 0.1): 40})
    """

    def __init__(self) -> None:
        self.server, self.release = Ledger(), Ledger()

    def add(self, client: int, noise_multiplier: float, sample_rate: float, steps: int, *, sent: bool) -> None:
        """Count steps as in :meth:`Ledger.add`; ``sent`` if anything that the client sends depends on them."""
        self.release.add(client, noise_multiplier, sample_rate, steps)
        if sent:
            self.server.add(client, noise_multiplier, sample_rate, steps)

    def state_dict(self) -> dict[str, Any]:
        """A copy of both in lists and numbers only."""
        return {"server": self.server.state_dict(), "release": self.release.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace both by what :meth:`state_dict` gave; a ValueError changes nothing."""
        if set(state) != {"server", "release"}:
            raise ValueError(f"the ledgers are {sorted(state)}, not server and release; load a Ledgers.state_dict()")
        server, release = Ledger(), Ledger()
        server.load_state_dict(state["server"])
        release.load_state_dict(state["release"])
        self.server, self.release = server, release


JOURNAL = "privacy_ledger.jsonl"
"""Name of the file, beside the checkpoints."""
FIELDS = frozenset({"id", "run", "round", "images", "clients", "noise_multiplier"})
"""What a line says: of which run it is, and the costs of a round by client."""
CUT = b" #cut"
"""Put behind a line that a crash cut off."""


def _no_link(path: str, flags: int) -> int:
    """Open a file; with ``OSError`` if a symbolic link stands in its place."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


class Journal:
    """Files with a line of JSON for every round that was begun.

    Those of this run, ``own``, must be writable; ``others``, of the runs that it is resumed from, are to know of its
    rounds too.
    """

    def __init__(self, own: Iterable[Path], others: Iterable[Path] = ()) -> None:
        self.own = list(dict.fromkeys(path.absolute() for path in own))
        self.others = [path for path in dict.fromkeys(path.absolute() for path in others) if path not in self.own]

    def write(self, entry: dict[str, Any]) -> list[Path]:
        """Add an entry to every file, and give those of ``others`` that could not be written; it is then on disk.

        An OSError if one of ``own`` cannot be written.
        """
        lost = []
        for path in (*self.own, *self.others):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "ab+", opener=_no_link) as file:
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
                lost.append(path)
        return lost


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
                raise ValueError(
                    f"privacy: line {number} of {str(path)!r} is damaged, so that it cannot be known what was spent; "
                    "restore the file from a copy, or start anew"
                ) from error
            if entry["run"] == run:
                found[entry["id"]] = entry
    return found
