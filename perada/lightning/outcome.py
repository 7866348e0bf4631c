# SPDX-License-Identifier: Apache-2.0
"""From what was fitted to a :class:`~perada.results.run.Run`."""

from perada.lightning import FederatedLoop
from perada.lightning.module import FederatedClassifier
from perada.lightning.results import metrics_of
from perada.lightning.run_info import run_info
from perada.lightning.steps import parts
from perada.results.restore import states_of
from perada.results.run import Run


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
