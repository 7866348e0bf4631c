# SPDX-License-Identifier: Apache-2.0
"""From what was fitted to a :class:`~perada.results.run.Run`."""

from collections.abc import Callable

from perada.core.states import State, unstack
from perada.federation.federation import Federation
from perada.lightning import FederatedLoop
from perada.lightning.module import FederatedClassifier
from perada.lightning.results import metrics_of
from perada.lightning.run_info import run_info
from perada.lightning.steps import parts
from perada.results.run import Run


def states_of(federation: Federation) -> tuple[list[State], Callable[[int], State] | None]:
    """The global models, and what gives a client's own state; None where clients have none."""

    def personal(client: int) -> State:
        return unstack(federation.personal_states([client]))[0]

    return federation.global_models(), personal if federation.personalized else None


def outcome(module: FederatedClassifier, loop: FederatedLoop) -> Run:
    """What a fitted module and its loop hold."""
    assert module.adapted is not None and module.federation is not None
    federation = module.federation
    clients = loop.num_clients
    data = parts(module.trainer, module)[0]
    protection = federation.protection
    return Run(
        module.adapted,
        *states_of(federation),
        clients,
        metrics_of(module, data, loop.history, loop.measured),
        run_info(module, data, loop.algorithm, None if protection.test_mode else loop.seed),
    )
