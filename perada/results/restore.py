# SPDX-License-Identifier: Apache-2.0
"""What a run's folder or a checkpoint holds, without the data that it was trained on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from perada.algorithms import Algorithm
from perada.algorithms.joining import algorithm_of
from perada.core.states import State, unstack
from perada.engine.engine import Engine
from perada.federation.cohort import LocalTraining
from perada.federation.federation import Federation
from perada.federation.settings import Settings
from perada.federation.store import Storage
from perada.models.adapted import make_slot
from perada.models.backbones import AdaptedModel, Backbone, build_backbone
from perada.models.spec import ModelSpec, frozen_digest
from perada.results.checkpoints import (
    CHECKPOINT_KEY,
    check_whole_file,
    contents,
    find_clients,
    newest_whole,
    plain_data,
)
from perada.results.export import BACKBONE_FILE, own_weights
from perada.server import Distillation


class Restored(NamedTuple):
    """What a :class:`perada.Run` is made of."""

    adapted: AdaptedModel
    global_states: list[State]
    personal_state: Callable[[int], State] | None
    num_clients: int
    metrics: dict[str, Any]
    info: dict[str, Any]


def states_of(federation: Federation) -> tuple[list[State], Callable[[int], State] | None]:
    """The global models, and what gives a client's own state; None where clients have none."""

    def personal(client: int) -> State:
        return unstack(federation.personal_states([client]))[0]

    return federation.global_models(), personal if federation.personalized else None


def checkpoint_in(path: Path) -> Path | None:
    """A checkpoint file itself, or the newest whole one of a run's folder; None if there is none."""
    return path if path.is_file() else newest_whole((path / "checkpoints").rglob("*.ckpt"))


def restored(path: Path, algorithm: Algorithm | None = None, backbone: nn.Module | None = None) -> Restored:
    """The run whose checkpoint is at ``path``, as it was when that was written.

    Args:
        path: The checkpoint.
        algorithm: The run's, where it is not perada's own.
        backbone: The network, where the run was made with one of the caller's own.

    Raises:
        ValueError: If it cannot be read, or what was given is not the run's.
    """
    check_whole_file(path)
    with plain_data(str(path)):
        saved = contents(torch.load(path, map_location="cpu", weights_only=True).get(CHECKPOINT_KEY))
        info, belongs = saved["info"], saved["belongs"]
        algorithm = algorithm_of(info["training"]["algorithm"]) if algorithm is None else algorithm
        spec = _spec(path, info, backbone)
    adapted = spec.build()
    slot = make_slot(adapted.model, adapted.backbone.head)
    trained = {key: list(adapted.model.state_dict()[key].shape) for key in slot.keys}
    for what, remedy, here in (
        ("algorithm", "give the run's own as algorithm=", algorithm.kind),
        ("trained tensors", "give the run's own network as backbone=, and its weights where it names them", trained),
        ("frozen weights", "put the run's weights where it names them", frozen_digest(adapted.model)),
    ):
        if belongs.get(what) != here:
            if what == "frozen weights" and info["seed"] is None:
                raise ValueError(
                    f"{str(path)!r} is of a private run in test mode, and its frozen weights follow from its seed, "
                    "which is not written; save what perada.finetune returned with Run.save, or begin with pretrained "
                    "weights"
                )
            raise ValueError(f"{str(path)!r} was written with other {what}; {remedy}")
    with plain_data(str(path)):
        federation = _federation(path, saved, spec, adapted, algorithm)
        metrics = _metrics(saved)
    return Restored(adapted, *states_of(federation), federation.num_clients, metrics, info)


def _spec(path: Path, info: dict[str, Any], backbone: nn.Module | None) -> ModelSpec:
    """What the network of a run was built from."""
    if info["backbone"] is None and backbone is None:
        raise ValueError(
            f"{str(path)!r} is of a run with a network of your own, which is not in it; give one of the same class as "
            "backbone=, or save what perada.finetune returned with Run.save"
        )
    if info["adapter"] is None:
        raise ValueError(
            f"{str(path)!r} is of a run with a PEFT configuration of your own, which is not in it; save what "
            "perada.finetune returned with Run.save"
        )
    return ModelSpec(
        info["backbone"] if backbone is None else backbone,
        info["num_classes"],
        info["pretrained"],
        info["built_for"],
        info["adapter"],
        info["train_backbone"],
        info["adapter_options"],
        0 if info["seed"] is None else info["seed"],
    )


def _federation(
    path: Path, saved: dict[str, Any], spec: ModelSpec, adapted: AdaptedModel, algorithm: Algorithm
) -> Federation:
    """The states of server and clients, for none of whom anything will be trained."""
    clients, training = saved["belongs"]["number of clients"], LocalTraining("sgd", {"local": 0.0})
    settings = Settings(algorithm, training, Distillation(steps=0), "uniform", (), 0, storage=Storage(clients=clients))
    federation = Federation(
        Engine(adapted.model, "loop"),
        make_slot(adapted.model, adapted.backbone.head),
        lambda index: spec.initial_state(adapted, index),
        settings,
        clients,
    )
    find_clients(saved["federation"], path)
    federation.load_state_dict(saved["federation"] | {"privacy": None})
    return federation


def _metrics(saved: dict[str, Any]) -> dict[str, Any]:
    """``Run.metrics`` as of the checkpoint."""
    measured, privacy = saved["measured"], saved["info"]["privacy"] or {}
    clients = {name: values.tolist() for name, values in saved["per_client"].items()}
    if "sample" in privacy:
        clients |= {f"privacy/{ledger}_epsilon": privacy["sample"][ledger] for ledger in ("server", "release")}
    if "client" in privacy:
        clients["privacy/client_epsilon"] = privacy["client"]["epsilon"]
    kept: dict[str, Any] = {
        "rounds": saved["history"],
        "clients": clients,
        "per_class": {name: scores.tolist() for name, scores in saved["per_class"].items()},
        "shifts": saved["shifted"].get("kinds"),
        **{name: measured.get(name) for name in ("initial", "by_round", "partition")},
        **measured.get("details", {}),
    }
    return {name: value for name, value in kept.items() if value or name in ("rounds", "clients")}


def rebuilt(folder: Path, info: dict[str, Any], backbone: nn.Module | None) -> Backbone:
    """The backbone of the run in ``folder``, without adapter; ``backbone`` where it was one of the caller's own.

    Raises:
        FileNotFoundError: If its weights are missing.
        ValueError: If it was one of the caller's own, which was not given.
    """
    if info["backbone"] is None and backbone is None:
        raise ValueError(
            f"the run in {str(folder)!r} was made with a network of your own; pass one of the same class as backbone="
        )
    random = not info["pretrained"] or info["backbone"] is None
    if random and not (folder / BACKBONE_FILE).is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} has no {BACKBONE_FILE}, the frozen weights that its adapters were trained on; copy "
            "the whole folder"
        )
    within = (folder / BACKBONE_FILE).is_file() and own_weights(info)
    pretrained = False if within else info["pretrained"]
    network = info["backbone"] if backbone is None else backbone
    size = info["built_for"] if "built_for" in info else info["image_size"]  # runs of before have one size
    return build_backbone(network, info["num_classes"], pretrained=pretrained, image_size=size)
