# SPDX-License-Identifier: Apache-2.0
"""The communication round as an epoch of Lightning's training loop."""

import hashlib
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities import move_data_to_device
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from tqdm.auto import tqdm

from perada.algorithms import Algorithm, PerAda
from perada.data import CohortBatch, FederatedDataModule, RoundPlan
from perada.federation import Federation, Settings
from perada.module import FederatedClassifier
from perada.server import Distillation, client_weights
from perada.server.aggregate import Weighting
from perada.states import get_state, trained_keys

T = TypeVar("T")
CHECKPOINT_KEY = "perada"
"""Where the loop keeps its tensors in a checkpoint."""


class FederatedLoop(pl.Callback):
    """Runs one communication round in each epoch.

    A round opens with the epoch: the server samples clients and sends them the global state. The epoch's training steps
    are the clients' local steps. The round closes after the last one, before validation: clients store what they keep,
    the server aggregates what they sent, and distils.

    Args:
        algorithm: What clients train, keep and send, and the server's rule; PerAda by default.
        clients_per_round: Clients sampled in a round; all of them by default.
        local_epochs: Passes over its own data that a sampled client makes in a round.
        local_steps: Local steps instead of epochs.
        weighting: ``uniform``, or ``samples`` for each client's share of the round's images.
        distillation: How the server distils, where the algorithm does.
        seed: Seed that all randomness is derived from.

    Attributes:
        history: What every round measured: its number ``round``, its last optimiser ``step``, and its metrics by name.
        num_clients: M, known after set-up.
        arguments: Lines for the ``config.yaml`` in the run's folder, where no command line writes one.

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
        self.arguments: list[str] = []
        self._step = 0
        self._loaded: dict[str, Any] | None = None
        self._weights = ""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that model, data and algorithm fit one another, and build the model."""
        data, module = _parts(trainer, pl_module)
        check_trainer(trainer)
        self.num_clients = data.num_clients
        module.build(data.num_classes, data.multilabel, self.seed)
        assert module.adapted is not None
        data.configure_rounds(
            seed=self.seed,
            clients_per_round=self.clients_per_round,
            phases=self.phases,
            image=module.adapted.backbone.image,
        )
        _check_images(data, module)
        if self.algorithm.distills and self.distillation.steps and not data.public_size:
            raise ValueError(
                f"{type(self.algorithm).__name__} distils {self.distillation.steps} steps a round, but the data has no "
                "public set; give one (public=...) or set the number of distillation steps to 0"
            )
        if self.algorithm.distills and self.distillation.validate_every and not data.validation_size:
            raise ValueError(
                f"distillation: validate_every={self.distillation.validate_every} needs labelled images on the server, "
                "and the data has none; give server_validation (or validation_fraction), or set validate_every to 0"
            )
        if stage == "fit" and not data.val_dataloader():
            trainer.limit_val_batches = 0  # nothing to evaluate on; Lightning would warn of it
        _check_batch_norm(data, module)
        if stage == "fit":
            trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]  # every round has its own clients and number of steps

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give every role its first state, or the one that was loaded."""
        _, module = _parts(trainer, pl_module)
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
        elif module.federation.settings.algorithm is not self.algorithm:
            raise ValueError(
                "the FederatedClassifier was trained by another FederatedLoop, whose adapters it holds; make a new one"
            )
        if self._loaded is not None:
            module.federation.load_state_dict(self._loaded["federation"])
            self.history, self._step = self._loaded["history"], self._loaded["step"]
            module.scores, module.per_client = self._loaded["scores"], self._loaded["per_client"]
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
            folder = Path(trainer.log_dir)
            for logger in trainer.loggers:
                if isinstance(logger, CSVLogger):
                    for record in self.history:  # of the rounds before a resumed one, so that the folder holds them all
                        values = {name: value for name, value in record.items() if name not in ("round", "step")}
                        logger.log_metrics({"epoch": record["round"], **values}, step=int(record["step"]) - 1)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "partition.json").write_text(json.dumps(data.partition_dict()))
            if self.arguments:
                (folder / "config.yaml").write_text("\n".join(self.arguments) + "\n", encoding="utf-8")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the round."""
        data, module = _parts(trainer, pl_module)
        plan = data.plan(trainer.current_epoch)
        module.cohort = _federation(module).open(plan, module.rate_factor(plan.round, trainer.max_epochs or 0))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: CohortBatch, batch_idx: int
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
        if report.diverged:
            rank_zero_warn(
                f"round {round}: the distillation became NaN or infinite; the round goes on with the clients' average. "
                "Lower its learning rate (lr_server)."
            )
        module.log_dict(report.metrics, on_step=False, on_epoch=True, batch_size=1)
        self._step = trainer.global_step
        self.history.append({"round": round, "step": self._step, **report.metrics})
        if round + 1 == trainer.max_epochs:
            self._finetune(trainer, data, module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the scores to the round's record."""
        _, module = _parts(trainer, pl_module)
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self.history:
            self.history[-1] |= module.scores

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Fine-tune also where training was stopped early, and score what came out where that was not done yet."""
        data, module = _parts(trainer, pl_module)
        module.cohort = None  # of a round that was stopped in the middle, and counts as not begun
        tuned = self._finetune(trainer, data, module)
        scored = self._score(trainer, data, module) if tuned or not self._is_scored() else False
        if tuned or scored:
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, ModelCheckpoint) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
                    newest = callback.last_model_path or ("" if callback.monitor else callback.best_model_path)
                    if newest:
                        trainer.save_checkpoint(newest, callback.save_weights_only)

    def _is_scored(self) -> bool:
        """Whether the last round was evaluated (also where there is none)."""
        return not self.history or any(name.startswith("personal/") for name in self.history[-1])

    def _score(self, trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier) -> bool:
        """Evaluate outside of Lightning's validation, and log it; return whether there was anything to evaluate."""
        batches, limit = data.val_dataloader(), trainer.limit_val_batches
        count = int(len(batches) * limit) if isinstance(limit, float) else min(len(batches), limit)
        if not count:
            return False
        module.on_validation_epoch_start()
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            for index, batch in enumerate(islice(batches, count)):
                module.validation_step(data.prepare(move_data_to_device(batch, module.device)), index)
        module.score()
        if self.history:
            self.history[-1] |= module.scores
        round = self.history[-1]["round"] if self.history else 0
        for logger in trainer.loggers:
            logger.log_metrics({"epoch": round, **module.scores}, step=max(0, trainer.global_step - 1))
        return True

    def _finetune(self, trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier) -> bool:
        """Let every client fine-tune the global state, where the algorithm ends so and it was not done yet."""
        federation, tuning = _federation(module), self.algorithm.finetuning()
        if tuning is None or federation.finetuned or not federation.rounds_done:
            return False
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
        return True

    @staticmethod
    def _progress(trainer: pl.Trainer, steps: Iterable[T], description: str) -> Iterable[T]:
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
            "step": self._step,
            "scores": module.scores,
            "per_client": module.per_client,
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
                difference = _difference(saved["belongs"].get(name), value)
                raise ValueError(
                    f"the checkpoint belongs to another run: its {name} {difference}; go on with the configuration "
                    "that wrote it"
                )
        self._loaded = saved
        if trainer.state.fn == "fit":
            if "loops" not in checkpoint:
                raise ValueError(
                    "the checkpoint was saved with save_weights_only=True, which leaves out how far training was; it "
                    "can be evaluated, and training can go on from one that was saved without"
                )
            rounds = saved["federation"]["rounds_done"]
            if rounds > (trainer.max_epochs or 0) >= 0:
                raise ValueError(
                    f"the checkpoint has {rounds} rounds behind it, more than max_epochs={trainer.max_epochs} asks "
                    f"for; give at least {rounds}"
                )
            _to_round_boundary(checkpoint["loops"]["fit_loop"], rounds, saved["step"])

    def _belongs(self, data: FederatedDataModule, module: FederatedClassifier) -> dict[str, Any]:
        """What a checkpoint must have in common with the run that loads it."""
        assert module.adapted is not None
        model = module.model.state_dict()
        if not self._weights:
            self._weights = _frozen_digest(module.model)
        partition = hashlib.sha256(json.dumps(data.partition_dict(), sort_keys=True).encode()).hexdigest()[:16]
        return {
            "backbone": module.adapted.backbone.name,
            "adapter": type(module.adapted.config).__name__,
            "algorithm": type(self.algorithm).__name__,
            "seed": self.seed,
            "number of classes": data.num_classes,
            "number of clients": data.num_clients,
            "clients' numbers of images": list(data.train_sizes),
            "partition of the data": partition,
            "trained tensors": {key: list(model[key].shape) for key in module.slot.keys},
            "frozen weights": self._weights,
        }


def check_trainer(trainer: pl.Trainer) -> None:
    """Refuse what federated rounds cannot do.

    Raises:
        ValueError: If the trainer is set to it.
    """
    if trainer.world_size > 1:
        raise ValueError(
            f"devices={trainer.num_devices} and num_nodes={trainer.num_nodes} cannot be used: clients are trained on "
            "one device; give devices=1"
        )
    check_precision(trainer.precision)
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} cannot be used: a batch is one local step of "
            "every client; give a larger batch_size"
        )
    if trainer.gradient_clip_val:
        raise ValueError(
            f"gradient_clip_val={trainer.gradient_clip_val} cannot be used: it does not know the clients; give "
            "clip_norm to the FederatedClassifier, which clips each client's gradient"
        )
    if trainer.val_check_interval not in (None, 1.0) or trainer.check_val_every_n_epoch is None:
        raise ValueError(
            f"val_check_interval={trainer.val_check_interval} cannot be used: models are there only between rounds; "
            "give check_val_every_n_epoch, the number of rounds between two evaluations"
        )
    if trainer.max_steps != -1 and not trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning
        raise ValueError(
            f"max_steps={trainer.max_steps} cannot be used: it would stop within a round; give max_epochs, the number "
            "of rounds"
        )


def check_precision(precision: object) -> None:
    """Refuse what Lightning can set but rounds do not support, also where it would be replaced on a CPU.

    Raises:
        ValueError: If so.
    """
    if str(precision) not in ("None", "32", "32-true", "bf16-mixed"):
        reason = "clients' losses are not scaled" if str(precision).startswith("16") else "it casts whole models"
        raise ValueError(f"precision={precision!r} cannot be used: {reason}; give 'bf16-mixed' or '32-true'")


def _check_images(data: FederatedDataModule, module: FederatedClassifier) -> None:
    """Send one training image through the model.

    Raises:
        ValueError: If it does not pass, or what comes out are not the logits of the classes.
    """
    batch = data.prepare(next(iter(data.cohort_loader(data.plan_for([0], 0)))))
    x = batch.x[0, :1].to(next(module.model.parameters()).device)
    assert module.adapted is not None
    what = (
        f"images of shape {tuple(x.shape[1:])} and type {x.dtype} do not fit backbone {module.adapted.backbone.name!r}"
    )
    try:
        with torch.no_grad():
            logits = module.model.eval()(x)
    except Exception as error:  # every layer refuses in its own way
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{what}: {reason}; set image_size, or convert the images") from error
    if tuple(logits.shape) != (1, data.num_classes):
        raise ValueError(
            f"{what}: what comes out has shape {tuple(logits.shape)} instead of (1, {data.num_classes}); choose "
            "another backbone"
        )


def _to_round_boundary(loop: dict[str, Any], rounds: int, step: int) -> None:
    """Let the saved state of Lightning's loop say that ``rounds`` rounds are over and the next has not begun.

    A checkpoint written within a round, or between its end and the end of its epoch, is thereby one of the end of the
    last whole round.
    """
    for count in ("total", "current"):
        loop["epoch_progress"][count] = dict.fromkeys(loop["epoch_progress"][count], rounds)
        batches = loop["epoch_loop.batch_progress"]
        batches[count] = dict.fromkeys(batches[count], step if count == "total" else 0)
        steps = loop["epoch_loop.manual_optimization.optim_step_progress"]
        steps[count] = dict.fromkeys(steps[count], step if count == "total" else 0)
    batches["is_last_batch"] = False
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] = step


def _frozen_digest(model: torch.nn.Module) -> str:
    """Hash of all that is not trained."""
    trained, digest = set(trained_keys(model)), hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        if key not in trained:
            digest.update(key.encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _difference(saved: object, here: object) -> str:
    """Say how two values differ, of dictionaries and lists only the first place."""
    if isinstance(saved, dict) and isinstance(here, dict):
        for key in {**saved, **here}:
            if saved.get(key) != here.get(key):
                return f"have {key!r} of shape {saved.get(key)}, here it is {here.get(key)}"
    return f"is {_short(saved)}, here it is {_short(here)}"


def _check_batch_norm(data: FederatedDataModule, module: FederatedClassifier) -> None:
    """Refuse batches of one image where a BatchNorm is trained: it has no batch to take statistics of.

    Raises:
        ValueError: If a client has one image only, or batches are that small.
    """
    if not any(key.endswith("running_var") for key in module.slot.keys):
        return
    smallest = min(range(data.num_clients), key=lambda client: data.train_sizes[client])
    if data.batch_size == 1 or data.train_sizes[smallest] == 1:
        what = "batch_size is 1" if data.batch_size == 1 else f"client {smallest} has 1 training image"
        raise ValueError(
            f"{what}, and the adapter trains BatchNorm layers, which need at least 2 images in a batch; give more, or "
            "choose an adapter without them (head, lora) or a backbone with LayerNorm"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _warn_broken(when: str, clients: list[int], consequence: str) -> None:
    names = ", ".join(map(str, clients))
    rank_zero_warn(
        f"{when}: the loss of client {names} became NaN or infinite; {consequence}. Lower the learning rate or check "
        "its images."
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
