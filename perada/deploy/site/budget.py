# SPDX-License-Identifier: Apache-2.0
"""How much ε a site allows over all runs and recipes: for single images, and for the site as a whole."""

import math
from collections import Counter

from perada.deploy.site.file import Limits
from perada.deploy.state import IMAGES_LEDGER, SITE_LEDGER
from perada.privacy.accounting import ROUNDING, History, Ledger, history_epsilon


def add_step_without_noise(ledger: Ledger, owner: int) -> None:
    """Record that something left the site without noise, which makes ε infinite.

    Args:
        ledger: What all runs have spent.
        owner: `IMAGES_LEDGER` or `SITE_LEDGER`.
    """
    ledger.add(owner, noise_multiplier=0.0, sample_rate=1.0, steps=1)


def steps_without_noise(history: History) -> int:
    """Return the number of steps without noise. A single one makes ε infinite, whatever the others cost."""
    return sum(steps for (noise_multiplier, _), steps in history.items() if noise_multiplier == 0)


def explain_image_epsilon(ledger: Ledger) -> str:
    """Return why the ε of a site's images is infinite according to the ledger of all its runs; "" if it is finite."""
    rounds = steps_without_noise(ledger.history(IMAGES_LEDGER))
    if not rounds:
        return ""
    trained = "1 round was" if rounds == 1 else f"{rounds} rounds were"
    return f"{trained} trained or surveyed here without privacy, so the ε of the site's images is infinite"


def explain_site_epsilon(ledger: Ledger) -> str:
    """Return why the ε of a site as a whole is infinite according to the ledger of all its runs; "" if it is finite."""
    count = steps_without_noise(ledger.history(SITE_LEDGER))
    if not count:
        return ""
    times = "once" if count == 1 else f"{count} times"
    return (
        f"the site has trained, scored or counted {times} with recipes without client_privacy and secure_sums, so it "
        "sent data without adding noise, and the ε of the entire site is infinite"
    )


class SiteBudget:
    """The largest ε that a site allows, computed with the site's δ and accountant, not the recipe's.

    If a site sets no ε, the limit is that of one whole run, and counts all that was ever spent with privacy: otherwise
    a server could start anew under another run's name. If a site sets one, every step counts: after a step without
    noise ε is infinite, and every request is rejected.

    Args:
        limits: Limits of the site, whose δ and accountant are used.
        max_epsilon: ε that the site sets; None if it sets none.
        planned: Noisy steps of one whole run, as {(σ, q): steps}.

    Attributes:
        max_epsilon: ε that the site sets; None if it sets none.
        limit: The largest ε.
    """

    def __init__(self, limits: Limits, max_epsilon: float | None, planned: History) -> None:
        self._limits = limits
        self.max_epsilon = max_epsilon
        self.limit = self.epsilon(planned) if max_epsilon is None else max_epsilon

    def epsilon(self, history: History) -> float:
        """Return the ε of noisy steps, as the limit counts it."""
        return history_epsilon(history, self._limits.delta, self._limits.accountant)

    def affords(self, spent: History, additional: History) -> bool:
        """Return whether additional steps stay within the limit.

        Steps without noise count only against a limit that the site sets. A site that sets none may train without
        privacy; its ε is reported as infinite from then on.

        Args:
            spent: Steps that were taken, as {(σ, q): steps}.
            additional: Steps that are to be taken.
        """
        history = Counter[tuple[float, float]]()
        for (noise_multiplier, rate), steps in spent.items():
            if noise_multiplier or self.max_epsilon is not None:
                history[noise_multiplier, rate] = steps
        history.update(additional)
        return self.limit == math.inf or self.epsilon(history) <= self.limit * ROUNDING
