# SPDX-License-Identifier: Apache-2.0
"""A run from a checkpoint alone, without the data that it was trained on."""

from pathlib import Path
from typing import Any

import torch

from perada.algorithms import Algorithm
from perada.federation.federation import Federation
from perada.federation.settings import Settings
from perada.federation.store import Storage
from perada.lightning.checkpoint import find_checkpoint, find_clients
from perada.lightning.federated_loop import CHECKPOINT_KEY
from perada.lightning.module import FederatedClassifier
from perada.lightning.outcome import states_of
from perada.lightning.untrusted import contents, plain_data
from perada.results.run import Run
from perada.server import Distillation


def restored(module: FederatedClassifier, algorithm: Algorithm, path: Path) -> Run:
    """The run whose checkpoint is at ``path``, as it was when that was written.

    Args:
        module: A new one, made of the run's options.
        algorithm: The run's, with its options.
        path: The checkpoint.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError: If it cannot be read, an earlier perada wrote it, or module and algorithm are not the run's.
    """
    found = find_checkpoint(str(path), path.parent)
    with plain_data(found):
        saved = torch.load(path, map_location="cpu", weights_only=True).get(CHECKPOINT_KEY, {})
    if saved:
        contents(saved)
    if "privacy" not in saved.get("info", {}):
        raise ValueError(
            f"{str(path)!r} does not say what the run was, and so another program or an earlier perada wrote it; train "
            "it again"
        )
    info, belongs = saved["info"], saved["belongs"]
    if info["backbone"] is None:
        raise ValueError(
            f"{str(path)!r} is of a run with a network of your own, which is not in it; save what perada.finetune "
            "returned with Run.save"
        )
    seed = info["seed"]
    module.build(info["num_classes"], info["multilabel"], 0 if seed is None else seed)
    trained = {key: list(module.model.state_dict()[key].shape) for key in module.slot.keys}
    for what, saved_value, here in (
        ("algorithm", belongs["algorithm"], algorithm.kind),
        ("trained tensors", belongs["trained tensors"], trained),
        ("frozen weights", belongs["frozen weights"], module.frozen_digest),
    ):
        if saved_value != here:
            if what == "frozen weights" and seed is None:
                raise ValueError(
                    f"{str(path)!r} is of a private run in test mode, and its frozen weights follow from its seed, "
                    "which is not written; save what perada.finetune returned with Run.save, or begin with pretrained "
                    "weights"
                )
            raise ValueError(
                f"{str(path)!r} has other {what} than its config.yaml gives; put the run's own config.yaml beside its "
                "checkpoints, and its weights where it names them"
            )
    clients = belongs["number of clients"]
    held = Storage(clients=clients)
    settings = Settings(algorithm, module.training_options, Distillation(steps=0), "uniform", (), 0, storage=held)
    module.federation = Federation(module.engine, module.slot, module.initial_state, settings, clients)
    states = saved["federation"]
    find_clients(states, path)
    with plain_data(found):
        module.federation.load_state_dict(states | {"privacy": None})
    assert module.adapted is not None
    measured = saved.get("measured", {})
    kept: dict[str, Any] = {
        "rounds": saved["history"],
        "clients": _of_clients(saved["per_client"], info["privacy"] or {}),
        "per_class": {name: scores.tolist() for name, scores in saved.get("per_class", {}).items()},
        "shifts": saved["shifted"].get("kinds"),
        **{name: measured.get(name) for name in ("initial", "by_round", "partition")},
        **measured.get("details", {}),
    }
    metrics = {name: value for name, value in kept.items() if value or name in ("rounds", "clients")}
    return Run(module.adapted, *states_of(module.federation), clients, metrics, info)


def _of_clients(scores: dict[str, torch.Tensor], privacy: dict[str, Any]) -> dict[str, list[float]]:
    """The scores and the ε of each client, by the name of the metric."""
    found = {name: values.tolist() for name, values in scores.items()}
    if "sample" in privacy:
        found |= {f"privacy/{ledger}_epsilon": privacy["sample"][ledger] for ledger in ("server", "release")}
    return found | ({"privacy/client_epsilon": privacy["client"]["epsilon"]} if "client" in privacy else {})
