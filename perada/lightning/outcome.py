# SPDX-License-Identifier: Apache-2.0
"""From what was fitted to a :class:`~perada.results.run.Run`."""

from perada.algorithms import ensemble_of
from perada.core.states import unstack
from perada.lightning import FederatedLoop
from perada.lightning.module import FederatedClassifier
from perada.lightning.steps import parts
from perada.results.run import Run


def outcome(module: FederatedClassifier, loop: FederatedLoop) -> Run:
    """What a fitted module and its loop hold."""
    assert module.adapted is not None and module.federation is not None
    federation = module.federation
    clients = loop.num_clients
    data = parts(module.trainer, module)[0]
    resized = data.image_size
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
        {
            "backbone": module.backbone if isinstance(module.backbone, str) else None,
            "pretrained": module.pretrained,
            "num_classes": module.num_classes,
            "image_size": module.image_size if resized is None else resized,
            "built_for": module.image_size,
            "train_backbone": module.train_backbone,
            "algorithm": loop.algorithm.kind,
            "average": ensemble_of(loop.algorithm).average,
            "global_model": loop.algorithm.global_model,
            "multilabel": module.multilabel,
            "classes": data.classes,
            "clients": data.client_names,
            "seed": None if protection.test_mode else loop.seed,  # from which the noise would follow
            "privacy": protection.record(clients),
        },
    )
