# SPDX-License-Identifier: Apache-2.0
"""How much ε a site allows, all runs and recipes together: of its images, and of the site as a whole."""

import math
from collections import Counter

from perada.deploy.site.file import Limits
from perada.deploy.state import IMAGES_LEDGER, SITE_LEDGER
from perada.privacy.accounting import ROUNDING, History, Ledger, history_epsilon

WITHOUT_NOISE = (0.0, 1.0)
"""Noise multiplier and sample rate of what leaves a site without noise, as ledgers have them."""


def steps_without_noise(history: History) -> int:
    """How many steps of a history had no noise. If there is one, ε is infinite, whatever the others cost."""
    return sum(steps for (noise_multiplier, _), steps in history.items() if noise_multiplier == 0)


def explain_image_epsilon(total: Ledger) -> str:
    """Why the ε of a site's images is infinite, from the ledger of all its runs; empty if it is not."""
    rounds = steps_without_noise(total.history(IMAGES_LEDGER))
    if not rounds:
        return ""
    trained = "1 round was" if rounds == 1 else f"{rounds} rounds were"
    return f"{trained} trained here without privacy, so the ε of the site's images is infinite"


def explain_site_epsilon(total: Ledger) -> str:
    """Why the ε of a site as a whole is infinite, from the ledger of all its runs; empty if it is not."""
    count = steps_without_noise(total.history(SITE_LEDGER))
    if not count:
        return ""
    times = "once" if count == 1 else f"{count} times"
    return (
        f"the site has trained or scored {times} by recipes without client_privacy and secure_sums, so what left it "
        "had no noise of its own, and the ε of the site as a whole is infinite"
    )


class SiteBudget:
    """The largest ε that a site allows, in the measure of its own limits, whatever a recipe says.

    A site that gives no ε has that of one whole run, of all that was ever spent with privacy: else a server would begin
    anew under another run's name. A site that gives one keeps it, or refuses: after a step without noise ε is infinite.

    Args:
        limits: Of the site, whose δ and accountant count.
        own: The ε that it gives; None if it gives none.
        planned: Noisy steps of one whole run, as {(σ, q): steps}.

    Attributes:
        own: The ε that the site gives.
        limit: The largest ε.
    """

    def __init__(self, limits: Limits, own: float | None, planned: History) -> None:
        self._limits, self.own = limits, own
        self.limit = self.epsilon(planned) if own is None else own

    def epsilon(self, history: History) -> float:
        """ε of noisy steps, as the limit counts it."""
        return history_epsilon(history, self._limits.delta, self._limits.accountant)

    def affords(self, spent: History, more: History) -> bool:
        """Whether ``more`` steps than those that were ``spent`` stay within the limit.

        Steps without noise count against a limit that the site gives. Beside that of one whole run they are left out: a
        site that gives none may train without privacy, and its ε is reported as infinite from then on.
        """
        history = Counter({key: steps for key, steps in spent.items() if key[0] or self.own is not None})
        history.update(more)
        return self.limit == math.inf or self.epsilon(history) <= self.limit * ROUNDING
