# SPDX-License-Identifier: Apache-2.0
"""From what was fitted to a :class:`~perada.results.run.Run`."""

from perada.core.states import unstack
from perada.lightning import FederatedLoop
from perada.lightning.module import FederatedClassifier
from perada.lightning.run_info import run_info
from perada.lightning.steps import parts
from perada.results.run import Run


def outcome(module: FederatedClassifier, loop: FederatedLoop) -> Run:
    """What a fitted module and its loop hold."""
    assert module.adapted is not None and module.federation is not None
    federation = module.federation
    clients = loop.num_clients
    data = parts(module.trainer, module)[0]
    protection = federation.protection
    spent = protection.epsilons(clients)
    return Run(
        module.adapted,
        federation.global_models(),
        (lambda client: unstack(federation.personal_states([client]))[0]) if federation.personalized else None,
        clients,
        {
            "rounds": loop.history,
            "clients": {name: scores.tolist() for name, scores in module.per_client.items()} | spent,
        }
        | ({"shifts": module.shifted["kinds"]} if module.shifted.get("kinds") else {}),
        run_info(module, data, loop.algorithm, None if protection.test_mode else loop.seed)
        | {"privacy": protection.record(clients)},
    )
