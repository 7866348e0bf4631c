# SPDX-License-Identifier: Apache-2.0
"""The communication round as an epoch of Lightning's training loop."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from perada.algorithms import Algorithm, PerAda
from perada.core.checks import OptionError, check_integer, check_type, use_plain_numbers
from perada.core.ranks import Ranks
from perada.core.states import get_state
from perada.core.text import value_text
from perada.data import CohortBatch, EvalBatch, FederatedDataModule
from perada.data.batches.workers import lost_worker
from perada.federation.federation import Federation
from perada.federation.options import Evaluation, Training
from perada.federation.outliers import check_drop_outliers
from perada.federation.settings import Settings, Storage, StoreKind, lora_ranks
from perada.federation.setup_checks import check_run
from perada.lightning import journals, run_folder, run_record, scoring
from perada.lightning.checkpoint import RoundCheckpoint, remap_clients, set_resume_point
from perada.lightning.checks import with_diagnostics
from perada.lightning.exact_log import log_exactly
from perada.lightning.module import FederatedClassifier
from perada.lightning.round_warnings import (
    Failures,
    check_anything_learned,
    check_failures,
    warn_of_failed_outputs,
    warn_of_round,
)
from perada.lightning.run_context import PassedChecks, RunContext
from perada.lightning.run_fingerprint import (
    check_ranks_agree,
    check_resume_allow,
    check_same_run,
    cross_rank_fingerprint,
    run_fingerprint,
)
from perada.lightning.setup import set_up_rounds, setup_of_run
from perada.lightning.trainer_attributes import datamodule_of, is_dev_run
from perada.lightning.trainer_setup import loss_scaler, set_up_trainer
from perada.lightning.typical_images import prepare_both_models, states_of_both
from perada.privacy import ClientPrivacy, Privacy
from perada.privacy.options import test_mode
from perada.privacy.protection import Protection
from perada.results.restore import CHECKPOINT_FORMAT, CHECKPOINT_KEY, LAST, contents, find_clients, restoring, states_of
from perada.results.run import Run
from perada.server import Distillation, Mean, ServerRule, client_weights
from perada.server.aggregate import Weighting
from perada.server.sums import SecureSums
from perada.system.disk_errors import DISK_ERRORS
from perada.system.interruption import raise_if_interrupted, watch_signals

PROGRESS_METRICS = ("privacy/epsilon_max", "privacy/client_epsilon_max")
"""Metrics of a round that progress bars and lines display."""


class FederatedLoop(pl.Callback):
    """Runs one communication round in each epoch.

    A round opens with the epoch: the server samples clients and sends them the global state. The epoch's training steps
    are the clients' local steps. The round closes after the last one, before validation: clients store what they keep,
    the server aggregates what they sent, and distils.

    A loop belongs to one module, one data module and one fit: rounds, derived randomness and ledgers begin once. Before
    and after it the same objects may be validated, tested and used for predictions. Another fit takes new ones, and
    resumes from a checkpoint (``ckpt_path``).

    Args:
        algorithm: Algorithm of clients and server: what they train, keep and send; PerAda by default.
        clients_per_round: Clients sampled in a round; all of them by default.
        training: Options of local training.
        weighting: ``uniform``, or ``samples`` for each client's share of the round's images.
        server_rule: Rule with which the server aggregates updates; the weighted mean by default.
        distillation: Options of the server's distillation, for algorithms that use it.
        evaluation: Options of evaluation.
        privacy: Differential privacy of the clients' images in all training; none by default.
        client_privacy: Differential privacy of entire clients in what they send; none by default.
        secure_sums: Let the server see only sums over clients (docs/secure_sums.md); it sees each update by default.
        client_store: Storage of clients' states: ``device``, ``host`` or ``disk``; ``auto`` chooses by their size.
        resume_allow: Options, such as ``training.lr_local``, that may differ from those with which the run began;
            ``clients`` allows more clients, ``images`` different images of the same clients.
        max_failures: Maximum number of failed client trainings; more end the run in an error. Unlimited by default.
            Not with ``privacy`` or ``client_privacy``, since failures depend on the images.
        drop_outliers: Drop updates whose norm is more than 50 times the round's median.
        seed: Seed that all randomness is derived from.

    Attributes:
        history: Each round's number ``round``, its last optimiser ``step``, and its metrics by name.
        num_clients: Number of clients M, known after set-up.
        client_scores: Scores of each client besides its last ones.
        config: Content of ``config.yaml`` in the run's folder, where no command line writes it.
        command: The command line, word by word; empty without one.

    Raises:
        ValueError: If an option cannot be used, or, at set-up, if model, data and algorithm do not fit one another.

    >>> from perada.algorithms import make_algorithm
    >>> FederatedLoop(make_algorithm("ditto", prox_strength=0.5), clients_per_round=2).clients_per_round
    2
    """

    def __init__(  # noqa: PLR0913  # each argument is an option of recipes
        self,
        algorithm: Algorithm | None = None,
        clients_per_round: int | None = None,
        training: Training | None = None,
        weighting: Weighting = "uniform",
        server_rule: ServerRule | None = None,
        distillation: Distillation | None = None,
        evaluation: Evaluation | None = None,
        privacy: Privacy | None = None,
        client_privacy: ClientPrivacy | None = None,
        secure_sums: SecureSums | None = None,
        client_store: StoreKind = "auto",
        resume_allow: list[str] | None = None,
        max_failures: int | None = None,
        drop_outliers: bool = False,
        seed: int = 0,
    ) -> None:
        check_type("server_rule", server_rule, ServerRule, "Median()")
        check_type("training", training, Training, "Training(lr_local=0.1)")
        check_type("distillation", distillation, Distillation, "Distillation(steps=10)")
        check_type("evaluation", evaluation, Evaluation, "Evaluation(metric='auroc')")
        check_type("privacy", privacy, Privacy, "Privacy(target_epsilon=3)")
        check_type("client_privacy", client_privacy, ClientPrivacy, "ClientPrivacy(target_epsilon=3)")
        check_type("secure_sums", secure_sums, SecureSums, "SecureSums()")
        self.algorithm = PerAda() if algorithm is None else algorithm
        self.server_rule = server_rule or Mean()
        self.clients_per_round = clients_per_round
        self.weighting = weighting
        self.seed = seed
        self.training = training or Training()
        self.distillation = distillation or Distillation()
        self.evaluation = evaluation or Evaluation()
        self.privacy = privacy
        self.client_privacy = client_privacy
        self.secure_sums = secure_sums
        self.client_store = Storage(client_store)
        self.resume_allow = [] if resume_allow is None else resume_allow
        self.max_failures = max_failures
        self.drop_outliers = drop_outliers
        use_plain_numbers(self)
        self._check_options()
        self.phases = self.algorithm.phases(self.training.epochs_per_round, self.training.local_steps)
        self.history: list[dict[str, float]] = []
        self.num_clients = 0
        self.protection: Protection | None = None
        self.config: dict[str, Any] = {}
        self.command: list[str] = []
        self.client_scores = run_record.EarlierScores()
        self._context: RunContext | None = None
        self._passed_checks = PassedChecks()
        self._fit_began = False
        self._clock = scoring.ScoringClock()
        self._failures: list[Failures] = []
        # A loaded checkpoint waits here until the federation exists and takes its states.
        self._checkpoint: dict[str, Any] | None = None
        # The privacy journals of the runs that this one is resumed from.
        self._earlier_journals: list[Path] = []
        self._planned_max_epochs: int | None = None

    def _check_options(self) -> None:
        """Raise an OptionError for options that are out of range or exclude one another."""
        check_integer("clients_per_round", self.clients_per_round, optional=True)
        check_integer("seed", self.seed, 0, le=None)
        check_integer("max_failures", self.max_failures, 0, optional=True, hint="by default there is no limit")
        check_drop_outliers(self.drop_outliers, self.client_privacy, self.secure_sums)
        client_weights(self.weighting, [1])
        check_resume_allow(self.resume_allow)
        if not isinstance(self.algorithm, Algorithm):
            raise OptionError(
                f"algorithm={value_text(self.algorithm)} is not an algorithm; pass an Algorithm object, such as "
                "PerAda()",
                name="algorithm",
                value=self.algorithm,
            )
        if self.weighting == "samples" and not self.server_rule.weighted:
            rule = type(self.server_rule).__name__
            raise OptionError(
                f"{rule} does not support weighting='samples': it ignores weights; choose weighting='uniform'",
                name="weighting",
                value="samples",
            )
        if self.max_failures is not None and (self.privacy is not None or self.client_privacy is not None):
            raise OptionError(
                f"max_failures={self.max_failures} is not supported with privacy or client_privacy: ending the run "
                "would reveal that a client's training failed, which depends on its images and which no ledger "
                "counts; leave max_failures out",
                name="max_failures",
                value=self.max_failures,
            )

    @property
    def test_mode(self) -> bool:
        """Whether the noise of a private run follows from the seed, which is then never written to disk."""
        return test_mode(self.privacy, self.client_privacy)

    @property
    def context(self) -> RunContext:
        """Data, module and settings of the run, available after set-up."""
        assert self._context is not None
        return self._context

    def settings_of(self, module: FederatedClassifier, **changes: Any) -> Settings:
        """Return the settings of the rounds.

        Args:
            module: The module, whose network is built.
            changes: Fields of the settings that replace the loop's own options.
        """
        settings = Settings(
            algorithm=self.algorithm,
            training=self.training.local_training(module.task),
            distillation=self.distillation,
            weighting=self.weighting,
            phases=self.phases,
            seed=self.seed,
            clients_per_round=self.clients_per_round,
            clients_per_chunk=self.training.clients_per_chunk,
            rule=self.server_rule,
            privacy=self.privacy,
            client_privacy=self.client_privacy,
            secure_sums=self.secure_sums,
            drop_outliers=self.drop_outliers,
        )
        return replace(settings, **changes)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Build the model, and check that model, data and algorithm are compatible."""
        watch_signals()
        if stage == "fit" and torch.is_inference_mode_enabled():
            raise RuntimeError("training needs gradients, which torch.inference_mode() disables; train outside of it")
        data = datamodule_of(trainer)
        if not isinstance(data, FederatedDataModule):
            raise TypeError(
                f"FederatedLoop requires a FederatedDataModule, got {value_text(data)}; pass one as datamodule"
            )
        if not isinstance(pl_module, FederatedClassifier):
            raise TypeError(
                f"FederatedLoop requires a FederatedClassifier, got {value_text(pl_module)}; pass one as the model"
            )
        module = pl_module
        self._check_unused(data, module, stage)
        # They may have been changed since the loop was created.
        self._check_options()
        if stage == "fit":
            run_folder.check_run_folder(trainer)
        set_up_trainer(trainer, FederatedLoop)
        module.build(
            data.num_classes,
            data.task,
            self.seed,
            classes=data.classes,
            merges=self.algorithm.merges_into_backbone,
            training=self.training,
            evaluation=self.evaluation,
        )
        # The checks must precede every other call of the algorithm.
        check_run(setup_of_run(data, module, self.settings_of(module)))
        settings = self._complete_settings(trainer, data, module)
        settings = with_diagnostics(settings, self.evaluation.diagnostics, data, module)
        context = RunContext(data, module, settings, self._passed_checks)
        self.protection = set_up_rounds(context, stage, self.protection)
        self._context = context
        self.num_clients = data.num_clients
        if stage == "fit":
            self._planned_max_epochs = trainer.max_epochs

    def _check_unused(self, data: FederatedDataModule, module: FederatedClassifier, stage: str) -> None:
        """Raise a ValueError for a second fit, and for a module or data that another loop has used."""
        if stage == "fit" and self._fit_began:
            raise ValueError(
                "this FederatedLoop has already been fitted, and its rounds, noise and ledgers cannot start again; "
                "create a new FederatedLoop and FederatedClassifier, and resume from a checkpoint (ckpt_path)"
            )
        if self._context is None:
            used_elsewhere = module.federation is not None
        else:
            used_elsewhere = self._context.data is not data or self._context.module is not module
        if used_elsewhere:
            raise ValueError(
                "a FederatedLoop belongs to one FederatedClassifier and one FederatedDataModule, but this loop or its "
                "module was already used with others; create new objects"
            )

    def _complete_settings(
        self,
        trainer: pl.Trainer,
        data: FederatedDataModule,
        module: FederatedClassifier,
    ) -> Settings:
        """Return the settings completed from trainer and data."""
        storage = run_folder.client_storage(self.client_store, self.clients_per_round, data.num_clients, trainer)
        settings = self.settings_of(module, storage=storage, loss_scaling=loss_scaler(trainer))
        # Ranks may follow from numbers of images, which are secret in a private run.
        sizes = [None] * data.num_clients if settings.private else data.train_sizes
        names = data.client_names or map(str, range(data.num_clients))
        ranks = lora_ranks(self.algorithm, module.tensor_names, get_state(module.model), names, sizes)
        return replace(settings, lora_ranks=ranks)

    def _create_federation(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Create the states of server and clients, or take over those of a loaded checkpoint.

        Lightning loads a checkpoint after ``setup`` and before the first hook of a stage, so this is where both are
        known.
        """
        module = self.context.module
        begins_fit = trainer.state.fn == "fit" and not self._fit_began
        if begins_fit:
            self._discard_states_of_evaluation(module)
        if module.federation is None:
            module.federation = self._make_federation(trainer)
        if self._checkpoint is not None:
            self._restore_checkpoint(self._checkpoint)
            self._checkpoint = None
        if begins_fit:
            self._fit_began = True
            journals.keep_journal(self.context, self._earlier_journals)
        else:
            # The models are evaluated next.
            prepare_both_models(self.context)

    def _discard_states_of_evaluation(self, module: FederatedClassifier) -> None:
        """Start a fit with new states, and raise a ValueError if that would discard the rounds of a checkpoint."""
        federation = module.federation
        if self._checkpoint is None and federation is not None and federation.rounds_done:
            raise ValueError(
                f"the FederatedClassifier holds {federation.rounds_done} rounds of a checkpoint that was evaluated; "
                "pass that checkpoint to fit too, or create new objects"
            )
        module.federation = None
        self.history = []

    def _make_federation(self, trainer: pl.Trainer) -> Federation:
        """Create the federation of this process, after comparing its options with those of the other processes."""
        context = self.context
        ranks = Ranks(together=trainer.world_size > 1)
        rounds_done = 0
        if self._checkpoint is not None:
            rounds_done = self._checkpoint["federation"]["rounds_done"]
        fingerprint = cross_rank_fingerprint(context, rounds_done)
        if ranks.size > 1:
            # The fingerprint is only computed here: it takes a while for large data, and a single process has nothing
            # to compare.
            fingerprint["data"] = context.data.fingerprint
        check_ranks_agree(ranks, fingerprint)
        return Federation(
            context.module.engine,
            context.module.tensor_names,
            context.module.initial_state,
            context.settings,
            self.num_clients,
            ranks,
            self.protection,
        )

    def _restore_checkpoint(self, saved: dict[str, Any]) -> None:
        """Take over the content of a checkpoint."""
        with restoring():
            self.context.federation.load_state_dict(saved["federation"])
            scoring.restore_scores(self.context, saved)
        metrics = saved["metrics"]
        self.history = metrics["rounds"]
        self.client_scores.initial = metrics.get("initial", {})
        self.client_scores.by_round = metrics.get("by_round", [])
        self._failures = []
        for record in self.history:
            # A round without failures has neither metric: any number of drawn clients above 0 stands for it.
            drawn = record.get("clients/drawn", 1)
            self._failures.append(Failures(drawn, record.get("clients/failed", 0)))

    on_validation_start = _create_federation
    on_test_start = _create_federation
    on_predict_start = _create_federation

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Create the states, score the initial models, and start the run's folder."""
        self._create_federation(trainer, pl_module)
        context = self.context
        if not context.can_afford_round(()):
            self._finish_without_training(trainer, pl_module)
        self.client_scores.score_initial_models(context)
        # The engine sets the mode of every pass; Lightning (2.6.6) warns of modules in eval mode when training starts.
        pl_module.train()
        run_folder.log_history(trainer, self.history)
        run_folder.write_description(context, self.config)

    def _finish_without_training(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End a resumed run with nothing left to train in the same way as the original run.

        Without batches Lightning skips ``on_train_end`` and its checkpoint callbacks.
        """
        if self.context.has_rounds_left():
            options = self.context.settings.privacy_options
            rank_zero_warn(
                f"{options}: after {self.context.federation.rounds_done} rounds no client can afford another, so "
                "training has ended; raise the limit (max_epsilon or target_epsilon) to continue"
            )
        trainer.limit_train_batches = 0
        self.on_train_end(trainer, pl_module)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, RoundCheckpoint) and callback.dirpath:
                trainer.save_checkpoint(Path(callback.dirpath) / LAST)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the round."""
        raise_if_interrupted()
        context = self.context
        federation = context.federation
        context.results.shifted = None  # scores of the states that now change
        if trainer.max_epochs != self._planned_max_epochs:
            raise ValueError(
                f"max_epochs was {self._planned_max_epochs} at set-up and is {trainer.max_epochs} now: a callback "
                "changed the number of rounds, for which noise and learning rates were planned; leave that callback "
                "out"
            )
        shares = context.data.shares(trainer.current_epoch)
        round = shares.plan.round
        if round != federation.rounds_done:
            raise ValueError(
                f"round {round + 1} cannot be trained after {federation.rounds_done} rounds: the Trainer's own count "
                "differs; create a new Trainer"
            )
        images = federation.protection.image_account
        if images is not None:
            images.check_data(context.data.train_sizes, context.data.batch_size)
        rate_factor = self.training.rate_factor(round, trainer.max_epochs or 0)
        with context.precision():
            federation.begin_round(shares, rate_factor, context.every_training_image, context.data.train_sizes)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: CohortBatch,
        batch_idx: int,
    ) -> None:
        """Close the round after its last local step, and stop training if no client can afford another.

        Lightning validates after this hook and before ``on_train_epoch_end``: the models that it scores are those of
        the closed round, fine-tuned if it was the last.
        """
        raise_if_interrupted()
        if trainer.is_last_batch:
            self._end_round(trainer)
            plan = self.context.data.plan(trainer.current_epoch)
            if not self.context.can_afford_round(plan.clients):
                trainer.should_stop = True
            if plan.round + 1 == trainer.max_epochs:
                scoring.fine_tune_clients(self.context)

    def _end_round(self, trainer: pl.Trainer) -> None:
        """Close the round, and log and record its metrics. A collective."""
        context = self.context
        plan = context.data.plan(trainer.current_epoch)
        with context.precision():
            report = context.federation.end_round(
                context.data,
                context.local_steps,
                lambda steps: context.progress_bar(steps, f"Distil {plan.round + 1}"),
            )
        warn_of_round(plan.round, report, context.settings, context.data.client_names)
        for name, value in {"round": float(plan.round), **report.metrics}.items():
            # All processes log the same values, those of all clients.
            log_exactly(context.module, name, value, prog_bar=name in PROGRESS_METRICS)
        self.history.append({"round": plan.round, "step": trainer.global_step, **report.metrics})
        self._failures.append(Failures(len(plan.clients), len(report.broken_clients)))
        check_failures(self._failures, self.max_failures)

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: EvalBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Start the clock before the first batch that is scored."""
        raise_if_interrupted()
        self._clock.start(self.context, batch_idx)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: EvalBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Log after the first batch how long all of them will take."""
        batches = trainer.num_test_batches if trainer.state.fn == "test" else trainer.num_val_batches
        self._clock.stop(self.context, batch_idx, sum(batches))

    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Score the shifted test sets if they are due.

        Lightning calls this hook before the module's, which then logs these scores with its own.
        """
        is_due_in_fit = trainer.state.fn == "fit" and self.context.data.shifts_when == "evaluation"
        if trainer.state.fn == "test" or is_due_in_fit:
            scoring.score_shifts(self.context)

    on_test_epoch_end = on_validation_epoch_end

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn of models without scores, and add the scores to the round's record."""
        if not trainer.sanity_checking:
            warn_of_failed_outputs(self.context)
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self.history:
            self.history[-1] |= self.context.results.scores
            self._write_record()

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn of models without scores."""
        warn_of_failed_outputs(self.context)

    def _write_record(self) -> None:
        """Record the clients' scores of the last round, and write ``run.json``."""
        self.client_scores.record(self.context, self.history)
        run_record.write_run_file(self.context, self.history, self.client_scores, self.command)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Fine-tune and score if training was stopped before that, and warn of what went wrong in the run."""
        self._warn_of_missing_rounds(trainer)
        # A round that was stopped before its last step counts as not begun.
        self.context.federation.cohort = None
        scoring.finish(self.context, self.history)
        self._write_record()
        self._warn_of_stale_models(trainer)
        # In a private run the error would show that every client failed, which no ledger counts.
        if not self.context.settings.private:
            check_anything_learned(self._failures)

    def _warn_of_missing_rounds(self, trainer: pl.Trainer) -> None:
        """Warn if Lightning ended training before all rounds were done although nothing requested it."""
        rounds_done = self.context.federation.rounds_done
        max_epochs = trainer.max_epochs
        was_stopped = trainer.should_stop or trainer.limit_train_batches == 0
        if max_epochs is not None and rounds_done < max_epochs and not was_stopped:
            rank_zero_warn(
                f"{rounds_done} of {max_epochs} rounds were trained: a callback or a hook of the module ended a round "
                "before its last step; leave it out, or set max_epochs to the number of rounds to train"
            )

    def _warn_of_stale_models(self, trainer: pl.Trainer) -> None:
        """Warn if clients end the run with models that were not trained in more than half of its rounds."""
        federation = self.context.federation
        if not federation.keeps_personal_models:
            return
        if is_dev_run(trainer):
            return
        warning = federation.participation.warning(
            self.context.data.client_names, anonymous=self.context.settings.private
        )
        if warning is not None:
            rank_zero_warn(warning)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather the clients' states on rank 0. A collective.

        Lightning calls this hook also where a resumed run had nothing left to train.
        """
        self.context.federation.collect()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Add to an exception what the user needs to know.

        A disk error gets a file name and how to resume: errors of writes have no path. torch's error about a worker
        that died gets a note on the sample that it was reading. SIGTERM ends the program with the status that shells
        give it; Lightning (2.6.6) leaves it at 0.
        """
        if isinstance(exception, SIGTERMException):
            exception.code = 128 + signal.SIGTERM
        worker = lost_worker(exception)
        if worker is not None:
            exception.add_note(str(worker))
        if isinstance(exception, OSError) and exception.errno in DISK_ERRORS:
            remedy = "fix this, and resume with ckpt_path=last, or train again if no round was saved"
            exception.strerror = f"{exception.strerror}; {remedy}"
            if not exception.filename:
                folders = [getattr(logger, "log_dir", None) for logger in trainer.loggers]
                exception.filename = next(filter(None, folders), trainer.default_root_dir)

    def outcome(self, module: FederatedClassifier) -> Run:
        """Return the run of a fit with this loop: the models of clients and server, and the measurements."""
        context = self.context
        metrics = run_record.run_metrics(context, self.history, self.client_scores)
        global_states, personal_of = states_of(context.federation)
        info = run_record.run_info(context)
        states = states_of_both(context)
        return Run(context.adapted, global_states, personal_of, self.num_clients, metrics, info, states.get)

    def on_save_checkpoint(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        """Save the states of server and clients, and what identifies their run."""
        context = self.context
        journals.keep_default_journal(context)
        shifted = context.results.shifted
        checkpoint[CHECKPOINT_KEY] = {
            "format": CHECKPOINT_FORMAT,
            "federation": context.federation.state_dict(),
            "metrics": run_record.run_metrics(context, self.history, self.client_scores),
            "step": self.history[-1]["step"] if self.history else 0,
            "scores": context.results.scores,
            "shifted": {} if shifted is None else shifted.state_dict(),
            # These states are kept from the last evaluation for predictions without the training images. A resumed run
            # does not read them.
            "states of both": states_of_both(context),
            "info": run_record.run_info(context),
            "data": context.data.fingerprint,
            **run_fingerprint(context).state_dict(),
        }

    def on_load_checkpoint(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        """Check that a checkpoint belongs to this run, and keep its states until the federation exists."""
        trains = trainer.state.fn == "fit"
        saved = contents(checkpoint.get(CHECKPOINT_KEY))
        federation = saved["federation"]
        assert self.protection is not None
        self.protection.check_same_privacy(federation.get("privacy"))
        check_same_run(saved, self.context, trains, self.resume_allow)
        find_clients(federation, trainer.ckpt_path)
        self._checkpoint = remap_clients(saved, self.context.data, self.resume_allow)
        self._earlier_journals = journals.find_journals(federation, str(trainer.ckpt_path))
        if trains:
            set_resume_point(checkpoint, federation["rounds_done"], saved["step"], trainer.max_epochs or 0)
