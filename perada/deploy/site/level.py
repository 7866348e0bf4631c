# SPDX-License-Identifier: Apache-2.0
"""The privacy of a site as a whole: the noise that it adds to secure sums, and its budget for them."""

from perada.core.states import State
from perada.deploy.protocol import RejectionError
from perada.deploy.recipe import Recipe
from perada.deploy.site.budget import SiteBudget, explain_site_epsilon
from perada.deploy.site.file import Limits
from perada.deploy.state import SITE_LEDGER, RunState
from perada.privacy.accounting import Ledger
from perada.privacy.clipping import check_bound


class SitePrivacy:
    """Noise of a site in a recipe with ``client_privacy`` and ``secure_sums``, and the site's own account of it.

    The server is not trusted with the account: the site counts each vector that it sent under masks, in all runs.

    Args:
        recipe: Recipe whose network is built.
        limits: Limits of the site.

    Attributes:
        client_level: Clipping and noise.
        cost: Noise multiplier and sample rate of one sum, as ledgers count them.
        budget: What the site allows to be spent for the site as a whole.

    Raises:
        ValueError: If the recipe would reveal more than noisy sums, or its privacy cannot be kept.
    """

    def __init__(self, recipe: Recipe, limits: Limits) -> None:
        loop = recipe.loop
        assert loop.secure_sums is not None
        self._min_sites = loop.secure_sums.min_sites
        client_level = recipe.level(self._min_sites)
        assert client_level is not None
        self.client_level = client_level
        self.cost = (client_level.noise_multiplier, 1.0)
        self.budget = SiteBudget(limits, limits.max_site_epsilon, {self.cost: recipe.rounds})

    def affords(self, ledger: Ledger) -> bool:
        """Return whether one more sum stays within the limit.

        Args:
            ledger: What all runs have spent.
        """
        return self.budget.affords(ledger.history(SITE_LEDGER), {self.cost: 1})

    def check_budget(self, ledger: Ledger) -> None:
        """Check that the site as a whole has budget left for another sum.

        Args:
            ledger: What all runs of the site have spent.

        Raises:
            RejectionError: If it has none.
        """
        if self.affords(ledger):
            return
        reason = explain_site_epsilon(ledger)
        if reason and self.budget.max_epsilon is not None:
            raise RejectionError(f"max_site_epsilon={self.budget.max_epsilon:g} cannot be met: {reason}", "exhausted")
        raise RejectionError(
            "another noisy sum would exceed the largest ε of the entire site, over all runs (max_site_epsilon; by "
            "default that of one complete run)",
            "exhausted",
        )

    def check_norm(self, norm: float) -> None:
        """Check a clipping norm that the server has sent.

        Raises:
            RejectionError: If the noise would be lost in it, or the sum has no room for it.
        """
        if self.client_level.options.clipping != "adaptive":
            return
        previous_norm = self.client_level.norm
        self.client_level.norm = norm
        try:
            check_bound(norm)
            self.client_level.contribution_noise(self._min_sites)
        except ValueError as error:
            raise RejectionError(str(error)) from None
        finally:
            self.client_level.norm = previous_norm

    def noisy_change(self, run_state: RunState, num_sites: int) -> State:
        """Return the site's clipped change with its share of the noise, in integers.

        The noise is drawn for this vector only.

        Args:
            run_state: The site's state in the run.
            num_sites: Number of sites in the sum.

        Raises:
            ValueError: If the sum's fixed point is too coarse for the noise, or has no room for it.
        """
        summing = run_state.summing
        if self.client_level.options.clipping == "adaptive":
            self.client_level.norm = summing.norm
        return self.client_level.contribution(
            summing.update, summing.received, num_sites, run_state.training.round, run_state.client or 0
        )
