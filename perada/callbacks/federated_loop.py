# SPDX-License-Identifier: Apache-2.0
"""The communication round as an epoch of Lightning's training loop."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import move_data_to_device
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from tqdm.auto import tqdm

from perada.algorithms import Algorithm, PerAda
from perada.data import CohortBatch, FederatedDataModule, RoundPlan
from perada.federation import Federation, Settings
from perada.module import FederatedClassifier
from perada.server import Distillation, client_weights
from perada.server.aggregate import Weighting
from perada.states import get_state

CHECKPOINT_KEY = "perada"
"""Where the loop keeps its tensors in a checkpoint."""


class FederatedLoop(pl.Callback):
    """Runs one communication round in each epoch.

    A round opens with the epoch: the server samples clients and sends them the global state. The epoch's training steps
    are the clients' local steps. The round closes after the last one, before validation: clients store what they keep, the
    server aggregates what they sent, and distils.

    Args:
        algorithm: What clients train, keep and send, and the server's rule; PerAda by default.
        clients_per_round: Clients sampled in a round; all of them by default.
        local_epochs: Passes over its own data that a sampled client makes in a round.
        local_steps: Local steps instead of epochs.
        weighting: ``uniform``, or ``samples`` for each client's share of the round's images.
        distillation: How the server distils, where the algorithm does.
        seed: Seed that all randomness is derived from.

    Raises:
        ValueError: If an option cannot be used, or, at set-up, if model, data and algorithm do not fit one another.
    """

    def __init__(
        self,
        algorithm: Algorithm | None = None,
        clients_per_round: int | None = None,
        local_epochs: float = 1,
        local_steps: int | None = None,
        weighting: Weighting = "uniform",
        distillation: Distillation | None = None,
        seed: int = 0,
    ) -> None:
        client_weights(weighting, [1])
        self.algorithm = algorithm or PerAda()
        self.clients_per_round, self.weighting, self.seed = clients_per_round, weighting, seed
        self.distillation = distillation or Distillation()
        self.phases = self.algorithm.phases(None if local_steps is not None else local_epochs, local_steps)
        self.history: list[dict[str, float]] = []
        self.num_clients = 0
        self._loaded: dict[str, Any] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that model, data and algorithm fit one another, and build the model."""
        data, module = _parts(trainer, pl_module)
        if trainer.world_size > 1:
            raise ValueError(
                f"devices={trainer.world_size} cannot be used: clients are trained on one device; give devices=1"
            )
        if str(trainer.precision).startswith("16"):
            raise ValueError(
                f"precision={trainer.precision!r} cannot be used: clients' losses are not scaled; give 'bf16-mixed' or '32-true'"
            )
        self.num_clients = data.num_clients
        module.build(data.num_classes, data.multilabel, self.seed)
        assert module.adapted is not None
        data.configure_rounds(
            seed=self.seed,
            clients_per_round=self.clients_per_round,
            phases=self.phases,
            image=module.adapted.backbone.image,
        )
        if self.algorithm.distills and self.distillation.steps and not data.public_size:
            raise ValueError(
                f"{type(self.algorithm).__name__} distils {self.distillation.steps} steps a round, but the data has no public "
                "set; give one (public=...) or set the number of distillation steps to 0"
            )
        if stage == "fit":
            trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]  # every round has its own clients and number of steps

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give every role its first state, or the one that was loaded."""
        data, module = _parts(trainer, pl_module)
        if module.federation is None:
            settings = Settings(
                self.algorithm,
                module.training_options,
                self.distillation,
                self.weighting,
                self.phases,
                self.seed,
                module.clients_per_chunk,
            )
            module.federation = Federation(module.engine, module.slot, get_state(module.model), settings)
        if self._loaded is not None:
            module.federation.load_state_dict(self._loaded["federation"])
            self.history = self._loaded["history"]
            self._loaded = None

    on_validation_start = _begin
    on_test_start = _begin
    on_predict_start = _begin

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Initialise the states, and write the partition into the run's folder."""
        self._begin(trainer, pl_module)
        data, module = _parts(trainer, pl_module)
        module.train()  # the engine sets the mode of every pass; Lightning would warn of a frozen backbone in eval mode
        if trainer.loggers and trainer.log_dir and not trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning
            path = Path(trainer.log_dir) / "partition.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(data.partition_dict()))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the round."""
        data, module = _parts(trainer, pl_module)
        plan = data.plan(trainer.current_epoch)
        module.cohort = _federation(module).open(plan, module.rate_factor(plan.round, trainer.max_epochs or 0))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: CohortBatch, batch_idx: int
    ) -> None:
        """Close the round after its last local step."""
        if not trainer.is_last_batch:
            return
        data, module = _parts(trainer, pl_module)
        assert module.cohort is not None
        cohort, module.cohort = module.cohort, None
        round = cohort.plan.round
        with trainer.precision_plugin.forward_context():
            report = _federation(module).close(
                cohort, data, lambda steps: self._progress(trainer, steps, f"Distil {round}")
            )
        if report.broken:
            _warn_broken(
                f"round {round}", report.broken, "its adapter stays as it was and the round goes on without it"
            )
        module.log_dict(report.metrics, on_step=False, on_epoch=True, batch_size=1)
        self.history.append({"round": round, **report.metrics})
        if round + 1 == trainer.max_epochs:
            self._finetune(trainer, data, module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the scores to the round's record."""
        _, module = _parts(trainer, pl_module)
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self.history:
            self.history[-1] |= module.scores

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Fine-tune also where training was stopped early."""
        self._finetune(trainer, *_parts(trainer, pl_module))

    def _finetune(self, trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier) -> None:
        """Let every client fine-tune the global state, where the algorithm ends so and it was not done yet."""
        federation, tuning = _federation(module), self.algorithm.finetuning()
        if tuning is None or federation.finetuned:
            return
        size = self.clients_per_round or data.num_clients
        ordered = sorted(range(data.num_clients), key=lambda client: -data.train_sizes[client])
        groups = [ordered[start : start + size] for start in range(0, data.num_clients, size)]
        plans = [data.plan_for(group, trainer.max_epochs or 0, [tuning[1]]) for group in groups]

        def loader(plan: RoundPlan) -> Iterable[CohortBatch]:
            for batch in data.cohort_loader(plan):
                yield data.prepare(move_data_to_device(batch, module.device))

        with trainer.precision_plugin.forward_context():
            broken = federation.finetune(self._progress(trainer, plans, "Fine-tune"), loader)
        if broken:
            _warn_broken("fine-tuning", broken, "it keeps the global adapter")

    @staticmethod
    def _progress(trainer: pl.Trainer, steps: Any, description: str) -> Any:
        bar = trainer.progress_bar_callback
        return tqdm(steps, desc=description, leave=False, disable=not getattr(bar, "is_enabled", False))

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the states of server and clients, and what they belong to."""
        data, module = _parts(trainer, pl_module)
        checkpoint[CHECKPOINT_KEY] = {
            "federation": _federation(module).state_dict(),
            "history": self.history,
            "belongs": self._belongs(data, module),
        }

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the saved states for the start of training, after checking that they belong to this model and data."""
        saved = checkpoint.get(CHECKPOINT_KEY)
        if saved is None:
            raise ValueError(
                "the checkpoint was not written by perada: it holds no federation; give one of a perada run"
            )
        for name, value in self._belongs(*_parts(trainer, pl_module)).items():
            if saved["belongs"].get(name) != value:
                raise ValueError(
                    f"the checkpoint belongs to another run: its {name} is {_short(saved['belongs'].get(name))}, here it is "
                    f"{_short(value)}; resume with the configuration that wrote it"
                )
        self._loaded = saved

    def _belongs(self, data: FederatedDataModule, module: FederatedClassifier) -> dict[str, Any]:
        """What a checkpoint must have in common with the run that loads it."""
        assert module.adapted is not None
        model = module.model.state_dict()
        return {
            "backbone": module.adapted.backbone.name,
            "algorithm": type(self.algorithm).__name__,
            "seed": self.seed,
            "number of clients": data.num_clients,
            "clients' numbers of images": list(data.train_sizes),
            "trained tensors": {key: list(model[key].shape) for key in module.slot.keys},
        }


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _warn_broken(when: str, clients: list[int], consequence: str) -> None:
    names = ", ".join(map(str, clients))
    rank_zero_warn(
        f"{when}: the loss of client {names} became NaN or infinite; {consequence}. Lower the learning rate or check its images."
    )


def _federation(module: FederatedClassifier) -> Federation:
    assert module.federation is not None
    return module.federation


def _parts(trainer: pl.Trainer, module: pl.LightningModule) -> tuple[FederatedDataModule, FederatedClassifier]:
    """The datamodule and the module, checked.

    Raises:
        TypeError: If either is not perada's.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]  # set by Lightning
    if not isinstance(data, FederatedDataModule):
        raise TypeError(f"FederatedLoop needs a FederatedDataModule, not {type(data).__name__}; pass it as datamodule=")
    if not isinstance(module, FederatedClassifier):
        raise TypeError(f"FederatedLoop needs a FederatedClassifier, not {type(module).__name__}")
    return data, module
