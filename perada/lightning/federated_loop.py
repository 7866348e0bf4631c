# SPDX-License-Identifier: Apache-2.0
"""The communication round as an epoch of Lightning's training loop."""

from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from perada.algorithms import Algorithm, PerAda
from perada.core.ranks import Distributed, Ranks
from perada.data import CohortBatch, FederatedDataModule
from perada.engine.loss_scaling import LossScaling
from perada.federation.diagnostics import Diagnostic, check_asked
from perada.federation.federation import Federation
from perada.federation.settings import Settings
from perada.federation.store import Storage, StoreKind
from perada.lightning.checkpoint import RoundCheckpoint, belonging, check_saved, described, grown, resume
from perada.lightning.checks import (
    check_alone,
    check_fresh,
    check_next,
    check_not_evaluated,
    check_robust,
    check_rounds,
    check_weighting,
    with_diagnostics,
)
from perada.lightning.module import FederatedClassifier
from perada.lightning.results import Measured, class_counts, metrics_of, run_info
from perada.lightning.run_folder import (
    journal_rounds_to_come,
    journals_of,
    keep_journal,
    log_history,
    storage,
    write_description,
)
from perada.lightning.scoring import finish, personalize, restore_shifts, score_shifts
from perada.lightning.setup import set_up_rounds, set_up_trainer
from perada.lightning.steps import (
    Failures,
    anyone_left,
    compared,
    exhausted,
    explain,
    federation_of,
    parts,
    progress,
    warn_report,
)
from perada.lightning.strategies import check_alike, options_here
from perada.privacy import ClientPrivacy, Privacy
from perada.privacy.options import test_mode
from perada.privacy.protection import Protection
from perada.results.restore import CHECKPOINT_KEY, contents, find_clients, restoring, states_of
from perada.results.run import Run
from perada.server import Distillation, Mean, ServerRule
from perada.server.aggregate import Weighting

ON_THE_BAR = ("privacy/epsilon_max", "privacy/client_epsilon_max")
"""Metrics of a round that the progress bar shows."""


class FederatedLoop(pl.Callback):
    """Runs one communication round in each epoch.

    A round opens with the epoch: the server samples clients and sends them the global state. The epoch's training steps
    are the clients' local steps. The round closes after the last one, before validation: clients store what they keep,
    the server aggregates what they sent, and distils.

    A loop belongs to one module, one data module and one fit: rounds, derived randomness and ledgers begin once. Before
    and after it the same objects may be validated, tested and asked for predictions. Another fit takes new ones, and
    resumes from a checkpoint (``ckpt_path``).

    Args:
        algorithm: What clients train, keep and send, and the server's rule; PerAda by default.
        clients_per_round: Clients sampled in a round; all of them by default.
        local_epochs: Passes over its own data that a sampled client makes in a round.
        local_steps: Local steps instead of epochs.
        weighting: ``uniform``, or ``samples`` for each client's share of the round's images.
        server_rule: How the server aggregates what clients sent; the weighted mean by default.
        distillation: How the server distils, where the algorithm does.
        privacy: Differential privacy of the clients' images in all that they train; none by default.
        client_privacy: Differential privacy of whole clients in what they send; none by default.
        client_store: Where clients' states are held: ``device``, ``host`` or ``disk``; ``auto`` chooses by their size.
        diagnostics: Measures of PerAda's theorems in each round, or true for all (docs/diagnostics.md).
        resume_allow: Options, such as ``lr_local``, that may be others than when the run began; ``clients`` for more.
        max_failures: End the run in an error once the clients' training failed more often; by default it continues.
        refuse_far: Leave updates out that are more than 50 times as long as the median of the round's.
        seed: Seed that all randomness is derived from.

    Attributes:
        history: What every round measured: its number ``round``, its last optimiser ``step``, and its metrics by name.
        num_clients: M, known after set-up.
        settings: How the rounds go, known after set-up.
        measured: What is known of each client besides its last scores.
        config: What the ``config.yaml`` in the run's folder is to hold, where no command line writes one.

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
        server_rule: ServerRule | None = None,
        distillation: Distillation | None = None,
        privacy: Privacy | None = None,
        client_privacy: ClientPrivacy | None = None,
        client_store: StoreKind = "auto",
        diagnostics: bool | list[Diagnostic] = False,
        resume_allow: list[str] | None = None,
        max_failures: int | None = None,
        refuse_far: bool = False,
        seed: int = 0,
    ) -> None:
        check_rounds(clients_per_round, local_epochs, local_steps, seed, resume_allow)
        check_robust(max_failures, refuse_far, client_privacy)
        self.server_rule = server_rule or Mean()
        check_weighting(weighting, self.server_rule)
        self.algorithm = algorithm or PerAda()
        if not isinstance(self.algorithm, Algorithm):
            raise ValueError(f"algorithm={algorithm!r} is not an algorithm; give one, such as PerAda()")
        self.clients_per_round, self.weighting, self.seed = clients_per_round, weighting, seed
        self.distillation = distillation or Distillation()
        self.privacy, self.client_privacy = privacy, client_privacy
        self.client_store = Storage(client_store)
        check_asked(diagnostics)
        self.diagnostics, self.resume_allow = diagnostics, resume_allow or []
        self.max_failures, self.refuse_far, self._failures = max_failures, refuse_far, Failures(max_failures)
        self.phases = self.algorithm.phases(None if local_steps is not None else local_epochs, local_steps)
        self.history: list[dict[str, float]] = []
        self.num_clients = 0
        self.settings: Settings | None = None
        self.protection: Protection | None = None
        self.config: dict[str, Any] = {}
        self.measured = Measured()
        self._module: FederatedClassifier | None = None
        self._data: FederatedDataModule | None = None
        self._began, self._step = False, 0
        self._loaded: dict[str, Any] | None = None
        self._journals: list[Path] = []

    @property
    def test_mode(self) -> bool:
        """Whether the noise of a private run follows from the seed, which is then written nowhere."""
        return test_mode(self.privacy, self.client_privacy)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that model, data and algorithm fit one another, and build the model."""
        data, module = parts(trainer, pl_module)
        check_fresh(stage == "fit" and self._began, (self._module, self._data), (module, data))
        check_alone(trainer, FederatedLoop)
        set_up_trainer(trainer)
        self.num_clients = data.num_clients
        module.build(data.num_classes, data.multilabel, self.seed)
        self.settings = with_diagnostics(self._settings(trainer, module), self.diagnostics, data)
        self.protection = set_up_rounds(self.settings, trainer, data, module, stage, self.protection)

    def _settings(self, trainer: pl.Trainer, module: FederatedClassifier) -> Settings:
        """How the rounds go, made once for all that need to know."""
        return Settings(
            self.algorithm,
            module.training_options,
            self.distillation,
            self.weighting,
            self.phases,
            self.seed,
            self.clients_per_round,
            module.clients_per_chunk,
            self.server_rule,
            self.privacy,
            self.client_privacy,
            storage(self.client_store, self.clients_per_round or self.num_clients, self.num_clients, trainer),
            LossScaling.of(getattr(trainer.precision_plugin, "scaler", None)),
            self.refuse_far,
        )

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give every role its first state, or the one that was loaded."""
        data, module = parts(trainer, pl_module)
        fits = trainer.state.fn == "fit" and not self._began
        if fits:
            check_not_evaluated(module, self._loaded is not None)
            module.federation, self.history = None, []
        if module.federation is None:
            module.federation = self._federation(trainer, data, module)
            self._module, self._data = module, data
        if self._loaded is not None:
            self._restore(data, module, self._loaded)
            self._loaded = None
        if fits:
            self._began = True
            keep_journal(trainer, module.federation, self._journals)

    def _federation(self, trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier) -> Federation:
        """The states of server and clients, all initial, after checking that all processes train the same."""
        settings, clients = self.settings, self.num_clients
        assert settings is not None
        ranks = Distributed() if trainer.world_size > 1 else Ranks()
        done = self._loaded["federation"]["rounds_done"] if self._loaded else 0
        check_alike(ranks, belonging(settings, data, module, self.test_mode))
        check_alike(ranks, options_here(settings, trainer, data, module, done))
        initial = module.initial_state
        return Federation(module.engine, module.slot, initial, settings, clients, ranks, self.protection)

    def _restore(self, data: FederatedDataModule, module: FederatedClassifier, saved: dict[str, Any]) -> None:
        """Continue where a checkpoint ended."""
        restoring()(federation_of(module).load_state_dict)(saved["federation"])
        self.history, self._step = saved["history"], saved["step"]
        self._failures = Failures(self.max_failures, self.history)
        module.scores, module.per_client = saved["scores"], saved["per_client"]
        module.per_class = saved["per_class"]
        module.details = self.measured.load_state_dict(saved["measured"])
        restore_shifts(data, module, saved["shifted"])

    on_validation_start = _begin
    on_test_start = _begin
    on_predict_start = _begin

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Initialise the states, and write the partition into the run's folder."""
        self._begin(trainer, pl_module)
        data, module = parts(trainer, pl_module)
        if exhausted(trainer, federation_of(module)):
            self._finish(trainer, module)
        self.measured.begin(trainer, data, module)
        module.train()  # the engine sets the mode of every pass; Lightning would warn of a frozen backbone in eval mode
        log_history(trainer, self.history)
        write_description(trainer, data.partition_dict(), self.config)

    def _finish(self, trainer: pl.Trainer, module: FederatedClassifier) -> None:
        """End a resumed run that has nothing to train, as it would have ended."""
        trainer.limit_train_batches = 0
        self.on_train_end(trainer, module)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, RoundCheckpoint) and callback.dirpath:
                trainer.save_checkpoint(Path(callback.dirpath) / "last.ckpt")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the round."""
        data, module = parts(trainer, pl_module)
        module.shifted = {}  # of the states that now change
        shares, federation = data.shares(trainer.current_epoch), federation_of(module)
        check_next(shares.plan.round, federation, data)
        factor = module.rate_factor(shares.plan.round, trainer.max_epochs or 0)
        with trainer.precision_plugin.forward_context():
            federation.open(shares, factor, partial(compared, trainer, data, module))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: CohortBatch, batch_idx: int
    ) -> None:
        """Close the round after its last local step."""
        if trainer.is_last_batch:
            self._close(trainer, *parts(trainer, pl_module))

    def _close(self, trainer: pl.Trainer, data: FederatedDataModule, module: FederatedClassifier) -> None:
        """Close the round, take note of it, and see whether another can follow."""
        federation, plan = federation_of(module), data.plan(trainer.current_epoch)
        with trainer.precision_plugin.forward_context():
            report = federation.close(data, lambda steps: progress(trainer, steps, f"Distil {plan.round}"))
        warn_report(plan.round, report, self.server_rule, self.algorithm, self.refuse_far)
        for name, value in {"round": float(plan.round), **report.metrics}.items():
            module.log(name, value, on_step=False, on_epoch=True, batch_size=1, prog_bar=name in ON_THE_BAR)
        self._step = trainer.global_step
        self.history.append({"round": plan.round, "step": self._step, **report.metrics})
        self._failures.add(len(plan.clients), len(report.broken))
        trainer.should_stop |= not anyone_left(federation, plan.clients)
        if plan.round + 1 == trainer.max_epochs:
            personalize(trainer, data, module)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Score the shifts where that is asked for; the module then logs what there is."""
        data, module = parts(trainer, pl_module)
        if trainer.state.fn == "test" or (trainer.state.fn == "fit" and data.shifts_when == "evaluation"):
            score_shifts(trainer, data, module)

    on_test_epoch_end = on_validation_epoch_end
    on_exception = explain

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the scores to the round's record."""
        data, module = parts(trainer, pl_module)
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self.history:
            self.history[-1] |= module.scores
            self.measured.write(trainer, data, module, self.algorithm, self.history)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Fine-tune also where training was stopped early, and score what came out where that was not done yet."""
        data, module = parts(trainer, pl_module)
        federation_of(module).cohort = None  # of a round that was stopped in the middle, and counts as not begun
        finish(trainer, data, module, self.history)
        self.measured.write(trainer, data, module, self.algorithm, self.history)
        self._failures.check_any_result()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Bring the clients' states to process 0, also where a run was resumed that had nothing left to train."""
        federation_of(parts(trainer, pl_module)[1]).collect()

    def outcome(self, module: FederatedClassifier) -> Run:
        """The run that a fit with this loop made: the models of clients and server, and what was measured."""
        assert module.adapted is not None
        data, seed = parts(module.trainer, module)[0], None if self.test_mode else self.seed
        metrics = metrics_of(module, data, self.history, self.measured)
        states = states_of(federation_of(module))
        return Run(module.adapted, *states, self.num_clients, metrics, run_info(module, data, self.algorithm, seed))

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the states of server and clients, and what they belong to."""
        data, module = parts(trainer, pl_module)
        assert self.settings is not None
        journal_rounds_to_come(trainer, federation_of(module))
        checkpoint[CHECKPOINT_KEY] = {
            "federation": federation_of(module).state_dict(),
            "history": self.history,
            "step": self._step,
            "scores": module.scores,
            "per_client": module.per_client,
            "measured": self.measured.state_dict() | dict(details=module.details, partition=class_counts(module, data)),
            "per_class": module.per_class,
            "shifted": module.shifted,
            "info": run_info(module, data, self.algorithm, None if self.test_mode else self.seed),
        } | described(self.settings, data, module, self.test_mode)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the saved states for the start of training, after checking that they belong to this model and data."""
        saved = contents(checkpoint.get(CHECKPOINT_KEY))
        assert self.protection is not None and self.settings is not None
        self.protection.check_alike(saved["federation"].get("privacy"))
        here = described(self.settings, *parts(trainer, pl_module), self.test_mode)
        check_saved(saved, here, self.test_mode, trainer.state.fn == "fit", self.resume_allow)
        find_clients(saved["federation"], trainer.ckpt_path)
        self._loaded = grown(saved, parts(trainer, pl_module)[0], self.resume_allow)
        self._journals = journals_of(saved["federation"], str(trainer.ckpt_path))
        if trainer.state.fn == "fit":
            resume(checkpoint, saved["federation"]["rounds_done"], saved["step"], trainer.max_epochs or 0)
