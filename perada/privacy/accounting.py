# SPDX-License-Identifier: Apache-2.0
"""The cost of private training: each client's history of noisy steps, and its epsilon by Opacus's accountants.

The noise multiplier σ is the standard deviation of the noise divided by the sensitivity of the sum. The sample rate q
is the probability that an image is in a step's batch. Two data sets are neighbours if one has one image more.

A rate below 1 claims amplification by subsampling, which is proven for Poisson sampling only. If a client goes through
its images in shuffled order, each image is used once per pass, and a pass is counted as one step at rate 1.0. The
neighbouring data set is then the one in which an image's gradient is left out and all others stay in their batches.
"""

import importlib
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from statistics import fmean, pstdev
from typing import Any

from perada.core.checks import OptionError, check_choice, check_installed, check_integer, check_number
from perada.core.text import quoted
from perada.system.quiet import root_logger_kept

ACCOUNTANTS = ("rdp", "prv")
"""Ways to compute ε from the steps taken: Rényi differential privacy, and privacy random variables."""
LARGEST_TARGET = 50
"""The largest ε for which noise is calibrated.

It is far above any useful protection: the best attack is certain to 22 digits. ``prv`` takes seconds for it, and would
take minutes for 1000.
"""
History = Mapping[tuple[float, float], int]
"""Number of steps by noise multiplier and sample rate."""
ROUNDING = 1 + 1e-9
"""Tolerance for floating-point sums against a limit that is met exactly."""


def check_opacus() -> None:
    """Raise a ModuleNotFoundError if Opacus is not installed."""
    check_installed("differential privacy", "privacy", "opacus")


def import_opacus() -> None:
    """Import Opacus, which takes seconds, without its change of the root logger (opacus 1.6).

    This must come before any ``from opacus import``.
    """
    check_opacus()
    with root_logger_kept():
        importlib.import_module("opacus")


def history_epsilon(history: History, delta: float, accountant: str = "rdp") -> float:
    """Return the ε of a history of noisy steps at ``delta``, by one of Opacus's accountants.

    - ``rdp``: Rényi differential privacy (Mironov et al. 2019), converted by theorem 21 of Balle et al. 2020; the upper
      bound that is usually reported. Its orders end at 63, so it is never below
      (log(1 / delta) − log 63) / 62 + log(62 / 63), which is 0.10 at delta = 1e-5.
    - ``prv``: numerical composition (Gopi et al. 2021); its upper bound, which is closer to the true value.

    Args:
        history: Number of steps, ``{(noise multiplier, sample rate): steps}``.
        delta: δ.
        accountant: ``rdp`` or ``prv``.

    Returns:
        ε ≥ 0; 0.0 without any step, and infinity if a step has no noise.

    Raises:
        ValueError: If a number is out of range.

    >>> round(history_epsilon({(1.0, 0.1): 40}, delta=1e-5), 2)
    5.39
    """
    check_delta(delta)
    check_choice("accountant", accountant, ACCOUNTANTS)
    # Steps are sorted, so that the floating-point sum does not depend on which came first.
    segments = [(sigma, rate, steps) for (sigma, rate), steps in sorted(history.items()) if steps]
    for sigma, rate, steps in segments:
        check_step(sigma, rate, steps)
    if not segments:
        return 0.0
    smallest_sigma = segments[0][0]
    if smallest_sigma == 0:
        return math.inf
    # For a large δ the conversion from Rényi divergences is negative, but ε is at least 0.
    return max(0.0, _compute_epsilon(tuple(segments), delta, accountant))


def calibrate(target_epsilon: float, delta: float, sample_rate: float, steps: int, accountant: str = "rdp") -> float:
    """Return the smallest noise multiplier, up to a tolerance, with which the planned steps stay within a budget.

    The ε of the result is in [target − tolerance, target], with a tolerance of 0.01 or 1 % of the target, whichever is
    smaller. It is lower only if the accountant's bound jumps.

    Args:
        target_epsilon: The budget ε.
        delta: δ.
        sample_rate: Probability that an image is in a batch.
        steps: Number of steps, or of shuffled passes at rate 1, of all rounds together.
        accountant: ``rdp`` or ``prv``.

    Raises:
        ValueError: If no noise brings the accountant's bound down to the target, if the target is above
            ``LARGEST_TARGET``, or if a number is out of range.

    >>> round(calibrate(3.0, delta=1e-5, sample_rate=0.1, steps=40), 1)
    1.4
    """
    check_target_epsilon("target_epsilon", target_epsilon)
    check_step(1.0, sample_rate, steps)
    if not steps:
        raise ValueError("the plan has no steps, so any noise would satisfy it; pass the steps of all rounds together")
    tolerance = min(0.01, target_epsilon / 100)

    def epsilon_of(noise_multiplier: float) -> float:
        return history_epsilon({(noise_multiplier, sample_rate): steps}, delta, accountant)

    # Bisection with the start values of Opacus's get_noise_multiplier, which computes all orders in each step and does
    # not terminate if the accountant's bound jumps by more than the tolerance. `high` always stays within the budget.
    low = 0.0
    high = 20.0
    epsilon_of_high = epsilon_of(high)
    # NaN compares false, so that it continues the search.
    while not epsilon_of_high <= target_epsilon:
        high = 2 * high
        if high > 1e6:
            raise OptionError(
                f"target_epsilon={target_epsilon} at delta={delta} is below what the {accountant} accountant can "
                "certify with any noise; raise the target, or use 'prv', whose bound is tighter than that of 'rdp'",
                name="target_epsilon",
                value=target_epsilon,
            )
        epsilon_of_high = epsilon_of(high)
    while target_epsilon - epsilon_of_high > tolerance and high - low > 1e-6 * high:
        middle = (low + high) / 2
        epsilon = epsilon_of(middle)
        if epsilon <= target_epsilon:
            high = middle
            epsilon_of_high = epsilon
        else:
            low = middle
    return high


# Results are cached, since the histories of clients that did not take part in a round are the same in the next one.
@lru_cache(maxsize=100_000)
def _compute_epsilon(segments: tuple[tuple[float, float, int], ...], delta: float, accountant: str) -> float:
    """Return the ε of a sequence of (noise multiplier, sample rate, steps) by Opacus."""
    import_opacus()
    from opacus.accountants import create_accountant

    with warnings.catch_warnings():
        # At q = 1, log(1 − q) is −inf as it should be. Other orders may be tighter, but every order gives a bound.
        warnings.filterwarnings("ignore", "divide by zero encountered in log", RuntimeWarning)
        warnings.filterwarnings("ignore", "Optimal order is the (largest|smallest) alpha", UserWarning)
        if accountant == "rdp":
            return _rdp_epsilon(segments, delta)
        opacus = create_accountant(mechanism=accountant)
        opacus.history = list(segments)
        try:
            return float(opacus.get_epsilon(delta=delta))
        except RuntimeError:
            # For such a large δ, the grid of `prv` has no ε (opacus 1.5: "Cannot compute epsilon"). The bound of `rdp`
            # also holds, and is 0 or close to it.
            return _rdp_epsilon(segments, delta)


def _rdp_epsilon(segments: tuple[tuple[float, float, int], ...], delta: float) -> float:
    """Return the minimum of ε over Opacus's orders, like its accountant, but in a tenth of the time.

    (α − 1) times the divergence of order α is the logarithm of a moment, so it is convex in α, and so is (α − 1) times
    the term that the conversion adds. Therefore ε decreases up to its minimum and increases from there, and few orders
    must be computed. The ε of every order is a valid bound in any case.
    """
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis import rdp

    orders = RDPAccountant.DEFAULT_ALPHAS

    @cache
    def epsilon(index: int) -> float:
        order = orders[index]
        divergence = 0.0
        # sum() rounds differently from Opacus since Python 3.12.
        for sigma, rate, steps in segments:
            divergence += steps * _step_rdp(sigma, rate, order)
        return float(rdp.get_privacy_spent(orders=[order], rdp=[divergence], delta=delta)[0])

    # Bisection by the sign of the difference between neighbouring orders.
    low = 0
    high = len(orders) - 1
    while low < high:
        middle = (low + high) // 2
        if epsilon(middle) > epsilon(middle + 1):
            low = middle + 1
        else:
            high = middle
    return epsilon(low)


@cache
def _step_rdp(sigma: float, rate: float, order: float) -> float:
    """Return the Rényi divergence of an order for one step."""
    from opacus.accountants.analysis import rdp

    return float(rdp.compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=float(order)))


def check_delta(delta: float, section: str = "") -> None:
    """Raise a ValueError if δ is not between 0 and 1.

    Args:
        delta: δ.
        section: Prefix of the option's name in the message.
    """
    check_number(f"{section}delta", delta, gt=0, lt=1, hint="use less than 1 / number of images, such as 1e-5")


def check_target_epsilon(name: str, target_epsilon: float | None, optional: bool = False) -> None:
    """Raise a ValueError if noise cannot be calibrated for a target ε.

    Args:
        name: Name of the option.
        target_epsilon: The target.
        optional: Whether None is accepted.
    """
    hint = f"typical budgets are 1 to 10, and more than {LARGEST_TARGET} protects nobody; or set noise_multiplier"
    check_number(name, target_epsilon, gt=0, le=LARGEST_TARGET, optional=optional, hint=hint)


def check_delta_covers(section: str, delta: float, count: int, what: str) -> None:
    """Raise a ValueError if δ would allow a mechanism to publish one of ``count`` records in full.

    Such a mechanism publishes a random record, so each is published with probability 1 / count.

    Args:
        section: Section of the options, for the message.
        delta: δ.
        count: Number of records.
        what: Name of the counted quantity, such as "images of client 3", for the message.

    Raises:
        ValueError: If delta is not below 1 / count.
    """
    if delta >= 1 / count:
        raise OptionError(
            f"{section}: delta={delta} must be below 1 / {count}, the number of {what}: otherwise publishing one of "
            f"them in full would count as private; choose a smaller delta, such as {1 / (10 * count):.0e}",
            name=f"{section}: delta",
            value=delta,
        )


def check_step(sigma: float, rate: float, steps: int) -> None:
    """Raise a ValueError if a noise multiplier, sample rate or number of steps is out of range."""
    check_number("noise_multiplier", sigma, ge=0, hint="typical values are 0.5 to 5")
    check_number("sample_rate", rate, gt=0, le=1, hint="it is batch size / number of images")
    check_integer("steps", steps, 0, hint="count every step, including empty batches")


class Ledger:
    """The number of noisy steps of each client, by noise multiplier and sample rate.

    Counts are stored per setting rather than per step, so long runs are cheap to account for.

    >>> ledger = Ledger()
    >>> ledger.add(3, noise_multiplier=1.0, sample_rate=0.1, steps=10)
    >>> ledger.add(3, noise_multiplier=1.0, sample_rate=0.1, steps=5)
    >>> ledger.history(3)
    {(1.0, 0.1): 15}
    """

    def __init__(self) -> None:
        self._clients: dict[int, Counter[tuple[float, float]]] = {}

    def add(self, client: int, noise_multiplier: float, sample_rate: float, steps: int) -> None:
        """Count steps of a client. After a step without noise, its ε is infinite.

        Args:
            client: Number of the client.
            noise_multiplier: σ of the steps.
            sample_rate: Sample rate q in (0, 1]; 1 for shuffled passes.
            steps: Number of steps, including those with empty batches, or of passes.

        Raises:
            ValueError: If a number is out of range.
        """
        check_step(noise_multiplier, sample_rate, steps)
        if steps:
            history = self._clients.setdefault(client, Counter())
            history[float(noise_multiplier), float(sample_rate)] += steps

    def history(self, client: int) -> dict[tuple[float, float], int]:
        """Return the steps of a client, ``{(noise multiplier, sample rate): steps}``; empty if it took none."""
        return dict(self._clients.get(client, {}))

    def epsilon(self, client: int, delta: float, accountant: str = "rdp") -> float:
        """Return the ε that a client has spent so far; see :func:`history_epsilon`."""
        return history_epsilon(self.history(client), delta, accountant)

    def epsilons(self, delta: float, accountant: str = "rdp", clients: Iterable[int] | None = None) -> dict[int, float]:
        """Return the ε of each client, which is 0.0 without steps; by default of all clients with steps, in order."""
        if clients is None:
            clients = sorted(self._clients)
        epsilons: dict[int, float] = {}
        epsilon_of_history: dict[frozenset[tuple[tuple[float, float], int]], float] = {}
        for client in clients:
            # Clients of the same size mostly have the same history.
            history = frozenset(self.history(client).items())
            if history not in epsilon_of_history:
                epsilon_of_history[history] = history_epsilon(dict(history), delta, accountant)
            epsilons[client] = epsilon_of_history[history]
        return epsilons

    def summary(self, delta: float, accountant: str = "rdp", clients: Sequence[int] | None = None) -> dict[str, float]:
        """Return ``mean``, ``std`` (of the population of clients) and ``max`` of :meth:`epsilons`; 0.0 without clients.

        If one ε is infinite, so are the mean and the maximum, and the std is NaN.
        """
        values = list(self.epsilons(delta, accountant, clients).values())
        if not values:
            values = [0.0]
        std = math.nan
        if all(map(math.isfinite, values)):
            std = pstdev(values)
        return {"mean": fmean(values), "std": std, "max": max(values)}

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger in plain types for a checkpoint: ``{"rows": [[client, σ, q, steps], ...]}``."""
        rows = []
        for client, history in sorted(self._clients.items()):
            for (sigma, rate), steps in sorted(history.items()):
                rows.append([client, sigma, rate, steps])
        return {"rows": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the ledger by a copy of a saved one; after an error, it is unchanged.

        Args:
            state: Result of :meth:`state_dict`.

        Raises:
            ValueError: If :meth:`state_dict` did not return this.
        """
        if "rows" not in state:
            raise ValueError(
                f"the state of a ledger must have the key 'rows' only, got {quoted(sorted(state))}; load what "
                "Ledger.state_dict() returned"
            )
        loaded = Ledger()
        for client, sigma, rate, steps in state["rows"]:
            loaded.add(client, sigma, rate, steps)
        self._clients = loaded._clients


class Ledgers:
    """The two ledgers of a run, since both adapters of a client are trained on the same images.

    Distillation on public images follows from what was sent, and costs nothing.

    Attributes:
        server: What the server sees: only training on which something sent depends, that of the local adapter.
        release: What is seen once all of the client's adapters are released: all training, composed, also that of the
            personal adapter.

    >>> ledgers = Ledgers()
    >>> ledgers.add(0, noise_multiplier=1.0, sample_rate=0.1, steps=10, sent=True)
    >>> ledgers.add(0, noise_multiplier=1.0, sample_rate=0.1, steps=30, sent=False)
    >>> ledgers.server.history(0), ledgers.release.history(0)
    ({(1.0, 0.1): 10}, {(1.0, 0.1): 40})
    """

    def __init__(self) -> None:
        self.server = Ledger()
        self.release = Ledger()

    def add(self, client: int, noise_multiplier: float, sample_rate: float, steps: int, *, sent: bool) -> None:
        """Count steps as in :meth:`Ledger.add`; ``sent`` if anything that the client sends depends on them."""
        self.release.add(client, noise_multiplier, sample_rate, steps)
        if sent:
            self.server.add(client, noise_multiplier, sample_rate, steps)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of both in lists and numbers."""
        return {"server": self.server.state_dict(), "release": self.release.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace both by what :meth:`state_dict` returned; an error changes nothing.

        Raises:
            ValueError: If :meth:`state_dict` did not return this.
        """
        if set(state) != {"server", "release"}:
            raise ValueError(
                f"the ledgers must be server and release, got {quoted(sorted(state))}; load what "
                "Ledgers.state_dict() returned"
            )
        server = Ledger()
        server.load_state_dict(state["server"])
        release = Ledger()
        release.load_state_dict(state["release"])
        self.server = server
        self.release = release


def ledgers_by_name(ledgers: Ledgers) -> dict[str, Ledger]:
    """Return both ledgers of a run by name."""
    return {"server": ledgers.server, "release": ledgers.release}
