# SPDX-License-Identifier: Apache-2.0
"""How much ε a site allows, all runs and recipes together: of its images, and of the site as a whole."""

import math
from collections import Counter

from perada.deploy.site.file import Limits
from perada.privacy.accounting import ROUNDING, History, history_epsilon


class SiteBudget:
    """The largest ε that a site allows, in the measure of its own limits, whatever a recipe says.

    A site that gives no ε has that of one whole run, of all that was ever spent with privacy: else a server would begin
    anew under another run's name.

    Args:
        limits: Of the site, whose δ and accountant count.
        own: The ε that it gives; None if it gives none.
        planned: Noisy steps of one whole run, as {(σ, q): steps}.

    Attributes:
        limit: The largest ε.
    """

    def __init__(self, limits: Limits, own: float | None, planned: History) -> None:
        self._limits, self._own = limits, own
        self.limit = self.epsilon(planned) if own is None else own

    def epsilon(self, history: History) -> float:
        """ε of noisy steps, as the limit counts it."""
        return history_epsilon(history, self._limits.delta, self._limits.accountant)

    def affords(self, spent: History, more: History) -> bool:
        """Whether ``more`` steps than those that were ``spent`` stay within the limit."""
        history = Counter({key: steps for key, steps in spent.items() if key[0] or self._own is not None})
        history.update(more)
        return self.limit == math.inf or self.epsilon(history) <= self.limit * ROUNDING
