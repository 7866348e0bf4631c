# SPDX-License-Identifier: Apache-2.0
"""What a run was, in plain types: for ``run.json``, and for a checkpoint that is read without the data."""

import math
from dataclasses import asdict
from typing import Any

from perada.algorithms import Algorithm, ensemble_of
from perada.algorithms.joining import algorithm_record
from perada.data import FederatedDataModule
from perada.lightning.module import FederatedClassifier


def run_info(
    module: FederatedClassifier, data: FederatedDataModule, algorithm: Algorithm, seed: int | None
) -> dict[str, Any]:
    """The facts of ``Run.info``; ``seed`` is None where noise would follow from it."""
    assert module.federation is not None
    return {
        "backbone": module.backbone if isinstance(module.backbone, str) else None,
        "pretrained": module.pretrained,
        "num_classes": module.num_classes,
        "image_size": module.image_size if data.image_size is None else data.image_size,
        "built_for": module.image_size,
        "preprocessing": data.preprocessing.record(),
        "train_backbone": module.train_backbone,
        "adapter": module.adapter if isinstance(module.adapter, str) else None,
        "adapter_options": module.adapter_options,
        "algorithm": algorithm.kind,
        "average": ensemble_of(algorithm).average,
        "global_model": algorithm.global_model,
        "multilabel": module.multilabel,
        "classes": data.classes,
        "clients": data.client_names,
        "seed": seed,
        "training": _training(module, data, algorithm),
        "privacy": module.federation.protection.record(data.num_clients),
    }


def _training(module: FederatedClassifier, data: FederatedDataModule, algorithm: Algorithm) -> dict[str, Any]:
    """How the clients trained: what a client does that joins later."""
    assert module.federation is not None
    settings, (padding, flip) = module.federation.settings, data.augmentation
    options = ("optimizer", "momentum", "weight_decay", "lr_schedule", "lr_gamma", "lr_every", "metric")
    return {
        "algorithm": algorithm_record(algorithm),
        "phases": [asdict(phase) for phase in settings.phases],
        "rounds": module.federation.rounds_done,
        "num_clients": module.federation.num_clients,
        "clients_per_round": settings.clients_per_round,
        "images": list(data.train_sizes),
        "batch_size": data.batch_size,
        "crop_padding": padding,
        "flip": flip,
        **{f"lr_{role}": rate for role, rate in module.lr.items()},
        **{name: getattr(module, name) for name in options},
        "clip_norm": None if module.clip_norm == math.inf else module.clip_norm,
    }
