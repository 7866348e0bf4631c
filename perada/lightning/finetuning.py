# SPDX-License-Identifier: Apache-2.0
"""What follows the last round: the clients' fine-tuning, where the algorithm ends so, and the last scores."""

from itertools import islice
from typing import TYPE_CHECKING

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from perada.data import FederatedDataModule
from perada.lightning.module import FederatedClassifier
from perada.lightning.steps import federation_of, prepared, progress, warn_broken

if TYPE_CHECKING:
    from perada.lightning.federated_loop import FederatedLoop


def finetune(
    loop: "FederatedLoop", trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier
) -> bool:
    """Let every client fine-tune the global state, where the algorithm ends so and it was not done yet."""
    federation, tuning = federation_of(module), loop.algorithm.personalization()
    if tuning is None or federation.finetuned or not federation.rounds_done:
        return False
    size = loop.clients_per_round or data.num_clients
    images = federation.settings.protection.images
    able = federation.settings.protection.affordable(range(data.num_clients), tuning=True)
    if len(able) < data.num_clients:
        missing = sorted({*range(data.num_clients)} - {*able})
        rank_zero_warn(f"privacy: client {', '.join(map(str, missing))} cannot afford the fine-tuning")
    ordered = sorted(able, key=lambda client: -data.train_sizes[client])
    groups = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    sampling = None if images is None else images.sampling(tuning=True)
    plans = [data.plan_for(group, federation.rounds_done, [tuning[1]]) for group in groups]
    with trainer.precision_plugin.forward_context():
        broken = federation.finetune(
            progress(trainer, plans, "Fine-tune"), lambda plan: prepared(data, module, plan, sampling)
        )
    if broken:
        warn_broken("fine-tuning", broken, "it keeps the global adapter")
    return True


def is_scored(loop: "FederatedLoop") -> bool:
    """Whether the last round was evaluated (also where there is none)."""
    return not loop.history or any(name.startswith("personal/") for name in loop.history[-1])


def score(loop: "FederatedLoop", trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier) -> bool:
    """Evaluate outside of Lightning's validation, and log it; return whether there was anything to evaluate."""
    batches, limit = data.val_dataloader(), trainer.limit_val_batches
    count = int(len(batches) * limit) if isinstance(limit, float) else min(len(batches), limit)
    if not count:
        return False
    module.on_validation_epoch_start()
    with torch.no_grad(), trainer.precision_plugin.forward_context():
        for index, batch in enumerate(islice(batches, count)):
            module.validation_step(data.prepare(data.transfer_batch_to_device(batch, module.device, 0)), index)
    module.score()
    if loop.history:
        loop.history[-1] |= module.scores
    round = loop.history[-1]["round"] if loop.history else 0
    for logger in trainer.loggers:
        logger.log_metrics({"epoch": round, **module.scores}, step=max(0, trainer.global_step - 1))
    return True
