# SPDX-License-Identifier: Apache-2.0
"""The privacy of a site as a whole: the noise that it adds to secure sums, and what it allows of them."""

from perada.core.states import State
from perada.deploy.protocol import RefusalError
from perada.deploy.recipe import Recipe
from perada.deploy.site.budget import SiteBudget
from perada.deploy.site.file import Limits
from perada.deploy.state import SITE_LEDGER, RunState
from perada.privacy.accounting import Ledger
from perada.privacy.clipping import check_bound
from perada.privacy.rehearsal import check_client_level
from perada.server import Mean


class SiteLevel:
    """What a site adds in a recipe with ``client_privacy`` and ``secure_sums``, and its own account of it.

    The server is not trusted with the account: the site counts each vector that left under masks, in all runs together.

    Args:
        recipe: Whose network is built.
        limits: Of the site.

    Attributes:
        cost: Noise multiplier and sample rate of one sum, as ledgers have them.
        budget: What the site allows of itself as a whole.

    Raises:
        ValueError: If the recipe would show more than noisy sums, or its privacy cannot be kept.
    """

    def __init__(self, recipe: Recipe, limits: Limits) -> None:
        loop = recipe.loop
        check_client_level(loop.algorithm, Mean(), loop.weighting, bool(loop.distillation.steps))
        assert loop.secure_sums is not None
        self._least = loop.secure_sums.min_sites
        level = recipe.level(self._least)
        assert level is not None
        self.level, self.cost = level, (level.noise_multiplier, 1.0)
        self.budget = SiteBudget(limits, limits.max_site_epsilon, {self.cost: recipe.rounds})

    def affords(self, total: Ledger) -> bool:
        """Whether one more sum stays within the limit, where the ``total`` of all runs was spent."""
        return self.budget.affords(total.history(SITE_LEDGER), {self.cost: 1})

    def check_norm(self, norm: float) -> None:
        """Refuse an S of the server's that the noise would be lost in, or that the sum has no room for."""
        if self.level.options.clipping != "adaptive":
            return
        before, self.level.norm = self.level.norm, norm
        try:
            check_bound(norm)
            self.level.deviations(self._least)
        except ValueError as error:
            raise RefusalError(str(error)) from None
        finally:
            self.level.norm = before

    def part(self, state: RunState, sites: int) -> State:
        """The site's clipped change with its part of the noise, in whole numbers, for a sum over so many sites.

        The noise is drawn for this vector alone. A ValueError if the sum's grid is too coarse for it, or too small.
        """
        if self.level.options.clipping == "adaptive":
            self.level.norm = state.norm
        return self.level.part(state.update, state.shown, sites, state.round, state.client or 0)
