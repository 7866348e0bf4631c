# SPDX-License-Identifier: Apache-2.0
"""Who has spent what: the noisy steps of each client."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
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
