# SPDX-License-Identifier: Apache-2.0
"""What a run was, in plain types: for ``run.json``, and for a checkpoint that is read without the data."""

from typing import Any

from perada.algorithms import Algorithm, ensemble_of
from perada.data import FederatedDataModule
from perada.lightning.module import FederatedClassifier


def run_info(
    module: FederatedClassifier, data: FederatedDataModule, algorithm: Algorithm, seed: int | None
) -> dict[str, Any]:
    """The facts of ``Run.info`` but for privacy; ``seed`` is None where noise would follow from it."""
    return {
        "backbone": module.backbone if isinstance(module.backbone, str) else None,
        "pretrained": module.pretrained,
        "num_classes": module.num_classes,
        "image_size": module.image_size if data.image_size is None else data.image_size,
        "built_for": module.image_size,
        "preprocessing": data.preprocessing.record(),
        "train_backbone": module.train_backbone,
        "algorithm": algorithm.kind,
        "average": ensemble_of(algorithm).average,
        "global_model": algorithm.global_model,
        "multilabel": module.multilabel,
        "classes": data.classes,
        "clients": data.client_names,
        "seed": seed,
    }
