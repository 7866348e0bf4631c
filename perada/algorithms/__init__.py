# SPDX-License-Identifier: Apache-2.0
"""Federated algorithms, each a small file that says one client's math and the server's rule."""

from collections.abc import Callable
from difflib import get_close_matches

from perada.algorithms.base import Algorithm, ClientStep, ServerStep, Slot, Stacks
from perada.algorithms.ditto import Ditto
from perada.algorithms.fedavg import FedAvg, FedAvgFT
from perada.algorithms.perada import PerAda
from perada.algorithms.standalone import Standalone

__all__ = [
    "Algorithm",
    "ClientStep",
    "Ditto",
    "FedAvg",
    "FedAvgFT",
    "PerAda",
    "ServerStep",
    "Slot",
    "Stacks",
    "Standalone",
    "make_algorithm",
]

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "perada": PerAda,
    "perada_no_kd": lambda **options: PerAda(**options, distill=False),
    "ditto": Ditto,
    "fedavg": FedAvg,
    "fedavg_ft": FedAvgFT,
    "standalone": Standalone,
}


def make_algorithm(name: str | Algorithm, **options: float) -> Algorithm:
    """Return the algorithm called ``name`` (an :class:`Algorithm` is returned as it is).

    Raises:
        ValueError: If there is no such algorithm, or it does not take an option.

    >>> make_algorithm("perada", prox_strength=0.5).prox_strength
    0.5
    """
    if isinstance(name, Algorithm):
        return name
    if name not in ALGORITHMS:
        close = get_close_matches(name, ALGORITHMS, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(ALGORITHMS)}"
        raise ValueError(f"algorithm={name!r} is unknown; {hint}")
    try:
        return ALGORITHMS[name](**options)
    except TypeError as error:
        raise ValueError(f"algorithm={name!r} cannot be made with {options}: {error}") from None
