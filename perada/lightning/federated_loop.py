# SPDX-License-Identifier: Apache-2.0
"""The communication round as an epoch of Lightning's training loop."""

import errno
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from perada.algorithms import Algorithm, PerAda
from perada.core.checks import OptionError, check_choice, check_integer, check_number
from perada.core.interruption import raise_if_interrupted, watch_signals
from perada.core.ranks import Ranks
from perada.core.states import get_state
from perada.data import CohortBatch, EvalBatch, FederatedDataModule
from perada.data.batches.workers import lost_worker
from perada.federation.diagnostics import Diagnostic, check_diagnostics
from perada.federation.federation import Federation
from perada.federation.settings import Settings, Storage, StoreKind, lora_ranks
from perada.lightning import checkpoint as checkpoints
from perada.lightning import journals, run_folder, run_record, scoring
from perada.lightning.checks import with_diagnostics
from perada.lightning.module import FederatedClassifier
from perada.lightning.parts import Parts
from perada.lightning.round_warnings import Failures, check_anything_learned, check_failures, warn_of_round
from perada.lightning.run_fingerprint import (
    check_ranks_agree,
    check_same_run,
    cross_rank_fingerprint,
    run_fingerprint,
)
from perada.lightning.setup import set_up_rounds
from perada.lightning.trainer_setup import loss_scaler, set_up_trainer
from perada.privacy import ClientPrivacy, Privacy
from perada.privacy.options import test_mode
from perada.privacy.protection import Protection
from perada.results.restore import CHECKPOINT_FORMAT, CHECKPOINT_KEY, LAST, contents, find_clients, restoring, states_of
from perada.results.run import Run
from perada.server import Distillation, Mean, ServerRule, client_weights
from perada.server.aggregate import Weighting
from perada.server.sums import SecureSums

ON_THE_BAR = ("privacy/epsilon_max", "privacy/client_epsilon_max")
"""Metrics of a round that the progress bar shows."""
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


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
        secure_sums: Let the server see sums over clients alone (docs/secure_sums.md); it sees each update by default.
        client_store: Where clients' states are held: ``device``, ``host`` or ``disk``; ``auto`` chooses by their size.
        diagnostics: Measures of PerAda's theorems in each round, or true for all (docs/diagnostics.md).
        resume_allow: Options, such as ``lr_local``, that may be others than when the run began; ``clients`` for more
            clients, ``images`` for other images of the same clients.
        max_failures: End the run in an error once the clients' training failed more often; by default it continues.
            Not with ``privacy`` or ``client_privacy``, since who fails depends on the images.
        drop_outliers: Leave updates out that are more than 50 times as long as the median of the round's.
        seed: Seed that all randomness is derived from.

    Attributes:
        history: What every round measured: its number ``round``, its last optimiser ``step``, and its metrics by name.
        num_clients: M, known after set-up.
        measured: What is known of each client besides its last scores.
        config: What the ``config.yaml`` in the run's folder is to hold, where no command line writes one.

    Raises:
        ValueError: If an option cannot be used, or, at set-up, if model, data and algorithm do not fit one another.
    """

    def __init__(  # noqa: PLR0913  # one argument an option of recipes
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
        secure_sums: SecureSums | None = None,
        client_store: StoreKind = "auto",
        diagnostics: bool | list[Diagnostic] = False,
        resume_allow: list[str] | None = None,
        max_failures: int | None = None,
        drop_outliers: bool = False,
        seed: int = 0,
    ) -> None:
        self.algorithm, self.server_rule = algorithm or PerAda(), server_rule or Mean()
        self.clients_per_round, self.weighting, self.seed = clients_per_round, weighting, seed
        self.distillation = distillation or Distillation()
        self.privacy, self.client_privacy, self.secure_sums = privacy, client_privacy, secure_sums
        self.client_store = Storage(client_store)
        self.diagnostics, self.resume_allow = diagnostics, [] if resume_allow is None else resume_allow
        self.max_failures, self.drop_outliers = max_failures, drop_outliers
        check_integer("local_steps", local_steps, optional=True)
        check_number("local_epochs", local_epochs, gt=0, optional=True)
        self._check_options()
        self.phases = self.algorithm.phases(None if local_steps is not None else local_epochs, local_steps)
        self.history: list[dict[str, float]] = []
        self.num_clients = 0
        self.protection: Protection | None = None
        self.config: dict[str, Any] = {}
        self.measured = run_record.ClientScores()
        self._parts: Parts | None = None
        self._began = False
        self._clock = scoring.ScoringClock()
        self._failures: list[Failures] = []
        self._loaded: dict[str, Any] | None = None
        self._journals: list[Path] = []
        self._max_epochs: int | None = None

    def _check_options(self) -> None:
        """Refuse, by a ValueError, options that are out of range or do not fit one another."""
        check_integer("clients_per_round", self.clients_per_round, optional=True)
        check_integer("seed", self.seed, 0, le=None)
        check_integer("max_failures", self.max_failures, 0, optional=True, hint="no limit by default")
        check_choice("drop_outliers", self.drop_outliers, [False, True])
        check_diagnostics(self.diagnostics)
        client_weights(self.weighting, [1])
        if not isinstance(self.resume_allow, list | tuple):
            raise OptionError(
                f"resume_allow={self.resume_allow!r} cannot be used; give a list, such as ['lr_local']",
                name="resume_allow",
                value=self.resume_allow,
            )
        if not isinstance(self.algorithm, Algorithm):
            raise OptionError(
                f"algorithm={self.algorithm!r} is not an algorithm; give one, such as PerAda()",
                name="algorithm",
                value=self.algorithm,
            )
        if self.weighting == "samples" and not self.server_rule.weighted:
            rule = type(self.server_rule).__name__
            raise OptionError(
                f"weighting='samples' cannot be used with {rule}, which has no weights; choose 'uniform'",
                name="weighting",
                value="samples",
            )
        if self.max_failures is not None and (self.privacy is not None or self.client_privacy is not None):
            raise OptionError(
                f"max_failures={self.max_failures} cannot be used with privacy or client_privacy: whether the run ends "
                "would show whether a client's training failed, which depends on its images and which no ledger "
                "counts; leave it out",
                name="max_failures",
                value=self.max_failures,
            )
        if self.drop_outliers and self.client_privacy is not None:
            raise OptionError(
                "drop_outliers=True cannot be used with client_privacy, whose account is of all clients; leave it out",
                name="drop_outliers",
                value=True,
            )

    @property
    def test_mode(self) -> bool:
        """Whether the noise of a private run follows from the seed, which is then written nowhere."""
        return test_mode(self.privacy, self.client_privacy)

    @property
    def parts(self) -> Parts:
        """What the run is made of, known after set-up."""
        assert self._parts is not None
        return self._parts

    def settings_of(self, module: FederatedClassifier, **others: Any) -> Settings:
        """How the rounds go with a network that is built; ``others`` are fields in place of the loop's own options."""
        names = "algorithm distillation weighting phases seed clients_per_round privacy client_privacy secure_sums"
        options = {name: getattr(self, name) for name in names.split()}
        options |= {"rule": self.server_rule, "drop_outliers": self.drop_outliers}
        options |= {"training": module.training_options, "clients_per_chunk": module.clients_per_chunk}
        return Settings(**options | others)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that model, data and algorithm fit one another, and build the model."""
        watch_signals()
        data, module = trainer.datamodule, pl_module  # type: ignore[attr-defined]  # set by Lightning
        for given, kind in ((data, FederatedDataModule), (module, FederatedClassifier)):
            if not isinstance(given, kind):
                raise TypeError(f"FederatedLoop needs a {kind.__name__}, not {type(given).__name__}; give one")
        assert isinstance(module, FederatedClassifier)
        self._check_own(data, module, stage)
        set_up_trainer(trainer, FederatedLoop)
        module.build(data.num_classes, data.multilabel, self.seed, self.algorithm.merges_into_backbone)
        self.algorithm.check(module.tensor_names, data.num_clients)  # before anything else that asks the algorithm
        storage = run_folder.client_storage(self.client_store, self.clients_per_round, data.num_clients, trainer)
        settings = self.settings_of(module, storage=storage, loss_scaling=loss_scaler(trainer))
        sizes = [None] * data.num_clients if settings.private else data.train_sizes
        names = data.client_names or map(str, range(data.num_clients))
        ranks = lora_ranks(self.algorithm, module.tensor_names, get_state(module.model), names, sizes)
        settings = replace(settings, lora_ranks=ranks)
        parts = Parts(data, module, with_diagnostics(settings, self.diagnostics, data, module))
        self.protection = set_up_rounds(parts, stage, self.protection)
        self._parts, self.num_clients = parts, data.num_clients
        if stage == "fit":
            self._max_epochs = trainer.max_epochs

    def _check_own(self, data: FederatedDataModule, module: FederatedClassifier, stage: str) -> None:
        """Refuse a second fit, and what belongs to another loop."""
        if stage == "fit" and self._began:
            raise ValueError(
                "this FederatedLoop has been fitted, and rounds, noise and ledgers begin once; make a new "
                "FederatedLoop and FederatedClassifier, and resume from a checkpoint (ckpt_path)"
            )
        own = self._parts
        used = module.federation is not None if own is None else (own.data, own.module) != (data, module)
        if used:
            raise ValueError(
                "a FederatedLoop belongs to one FederatedClassifier and to one FederatedDataModule, and this one or "
                "its module was used with others; make new ones"
            )

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give every role its first state, or the one that was loaded."""
        module, fits = self.parts.module, trainer.state.fn == "fit" and not self._began
        if fits:
            self._leave_former(module)
        if module.federation is None:
            module.federation = self._federation(trainer)
        if self._loaded is not None:
            self._restore(self._loaded)
            self._loaded = None
        if fits:
            self._began = True
            journals.keep_journal(self.parts, self._journals)

    def _leave_former(self, module: FederatedClassifier) -> None:
        """Begin anew, but for a module whose states were loaded to be evaluated."""
        if self._loaded is None and module.federation is not None and module.federation.rounds_done:
            what = f"{module.federation.rounds_done} rounds of a checkpoint that was evaluated"
            raise ValueError(f"the FederatedClassifier holds {what}; give it to fit too, or make new objects")
        module.federation, self.history = None, []

    def _federation(self, trainer: pl.Trainer) -> Federation:
        """The federation of this process, which was set up as those of the others were."""
        parts, ranks = self.parts, Ranks(together=trainer.world_size > 1)
        done = self._loaded["federation"]["rounds_done"] if self._loaded else 0
        mine = cross_rank_fingerprint(parts, done)
        if ranks.size > 1:
            mine["data"] = (
                parts.data.fingerprint
            )  # takes a while for large data, and one process has nothing to compare
        check_ranks_agree(ranks, mine)
        given = parts.module.engine, parts.module.tensor_names, parts.module.initial_state
        return Federation(*given, parts.settings, self.num_clients, ranks, self.protection)

    def _restore(self, saved: dict[str, Any]) -> None:
        """Take over what a checkpoint holds."""
        with restoring():
            self.parts.federation.load_state_dict(saved["federation"])
            scoring.restore_scores(self.parts, saved)
        measured, self.history = saved["metrics"], saved["metrics"]["rounds"]
        self.measured.initial, self.measured.by_round = measured.get("initial", {}), measured.get("by_round", [])
        self._failures = [Failures(row.get("clients/drawn", 1), row.get("clients/failed", 0)) for row in self.history]

    on_validation_start = _begin
    on_test_start = _begin
    on_predict_start = _begin

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Initialise the states, and write the partition into the run's folder."""
        self._begin(trainer, pl_module)
        if not self.parts.can_afford_round(()):
            self._end_at_once(trainer, pl_module)
        self.measured.score_initial_models(self.parts)
        pl_module.train()  # the engine sets the mode of every pass; Lightning would warn of eval mode
        run_folder.log_history(trainer, self.history)
        run_folder.write_description(self.parts, self.config)

    def _end_at_once(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End a resumed run that has nothing left to train as it would have ended."""
        if self.parts.has_rounds_left():
            rank_zero_warn(
                f"privacy: after {self.parts.federation.rounds_done} rounds no client can afford another, and "
                "nothing more is trained; raise the limit (max_epsilon or target_epsilon) to train on"
            )
        trainer.limit_train_batches = 0
        self.on_train_end(trainer, pl_module)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, checkpoints.RoundCheckpoint) and callback.dirpath:
                trainer.save_checkpoint(Path(callback.dirpath) / LAST)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the round."""
        raise_if_interrupted()
        parts, module = self.parts, self.parts.module
        module.shifted = {}  # of the states that now change
        if trainer.max_epochs != self._max_epochs:
            raise ValueError(
                f"max_epochs was {self._max_epochs} at set-up and is {trainer.max_epochs} now: a callback changed the "
                "number of rounds, by which noise and learning rates were planned; leave it out"
            )
        shares = parts.data.shares(trainer.current_epoch)
        round, done = shares.plan.round, parts.federation.rounds_done
        if round != done:
            counted = "the Trainer has counted others; make a new one"
            raise ValueError(f"round {round + 1} cannot be trained after {done} rounds: {counted}")
        if parts.federation.protection.images is not None:
            parts.federation.protection.images.check_data(parts.data.train_sizes, parts.data.batch_size)
        factor = module.rate_factor(round, trainer.max_epochs or 0)
        with parts.precision():
            parts.federation.begin_round(shares, factor, parts.every_training_image)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: CohortBatch, batch_idx: int
    ) -> None:
        """Close the round after its last local step, and see whether another can follow."""
        raise_if_interrupted()
        if trainer.is_last_batch:
            self._close(trainer)
            plan = self.parts.data.plan(trainer.current_epoch)
            trainer.should_stop |= not self.parts.can_afford_round(plan.clients)
            if plan.round + 1 == trainer.max_epochs:
                scoring.fine_tune_clients(self.parts)

    def _close(self, trainer: pl.Trainer) -> None:
        """Close the round, and take note of it."""
        parts, plan = self.parts, self.parts.data.plan(trainer.current_epoch)
        with parts.precision():
            report = parts.federation.end_round(
                parts.data, lambda steps: parts.progress(steps, f"Distil {plan.round + 1}")
            )
        warn_of_round(plan.round, report, parts.settings)
        for name, value in {"round": float(plan.round), **report.metrics}.items():
            parts.module.log(name, value, on_step=False, on_epoch=True, batch_size=1, prog_bar=name in ON_THE_BAR)
        self.history.append({"round": plan.round, "step": trainer.global_step, **report.metrics})
        self._failures.append(Failures(len(plan.clients), len(report.broken)))
        check_failures(self._failures, self.max_failures)

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: EvalBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Measure the first batch that is scored."""
        raise_if_interrupted()
        self._clock.start(self.parts, batch_idx)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: EvalBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Say after the first batch how long all of them take."""
        batches = trainer.num_test_batches if trainer.state.fn == "test" else trainer.num_val_batches
        self._clock.stop(self.parts, batch_idx, sum(batches))

    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Score the shifts where that is asked for; the module then logs what there is."""
        when = self.parts.data.shifts_when
        if trainer.state.fn == "test" or (trainer.state.fn == "fit" and when == "evaluation"):
            scoring.score_shifts(self.parts)

    on_test_epoch_end = on_validation_epoch_end

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the scores to the round's record."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self.history:
            self.history[-1] |= self.parts.module.scores
            self.measured.record(self.parts, self.history)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Fine-tune also where training was stopped early, and score what came out where that was not done yet."""
        self._check_rounds(trainer)
        self.parts.federation.cohort = None  # of a round that was stopped in the middle, and counts as not begun
        scoring.finish(self.parts, self.history)
        self.measured.record(self.parts, self.history)
        self._warn_of_stale_models(trainer)
        if not self.parts.settings.private:  # else an error would show that every client failed, as no ledger counts
            check_anything_learned(self._failures)

    def _check_rounds(self, trainer: pl.Trainer) -> None:
        """Warn where Lightning ended training before all rounds were done, and nothing asked it to."""
        done = self.parts.federation.rounds_done
        max_epochs = trainer.max_epochs
        stopped = trainer.should_stop or trainer.limit_train_batches == 0
        if max_epochs is not None and done < max_epochs and not stopped:
            rank_zero_warn(
                f"{done} of {max_epochs} rounds were trained: a callback or a hook of the module ended a round before "
                "its last step; leave it out, or give max_epochs as many as are to be trained"
            )

    def _warn_of_stale_models(self, trainer: pl.Trainer) -> None:
        """Warn where clients end the run with models that were not trained for more than half of it."""
        parts = self.parts
        if not parts.federation.keeps_personal_models:
            return
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # a function of another module of Lightning's sets it
            return
        warning = parts.federation.participation.warning(parts.data.client_names, anonymous=parts.settings.private)
        if warning is not None:
            rank_zero_warn(warning)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Bring the clients' states to process 0, also where a run was resumed that had nothing left to train."""
        self.parts.federation.collect()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Have an error of the disk say where the run is and how to resume; those of writes do not even have a path.

        torch's error of a worker that died gets a note on the sample that the worker read.
        A program that SIGTERM ends says so by its status, as shells give it; Lightning leaves it at 0.
        """
        if isinstance(exception, SIGTERMException):
            exception.code = 128 + signal.SIGTERM
        if lost := lost_worker(exception):
            exception.add_note(str(lost))
        if isinstance(exception, OSError) and exception.errno in OF_THE_DISK:
            remedy = "fix this, and resume with ckpt_path=last, or train again if no round was saved"
            exception.strerror = f"{exception.strerror}; {remedy}"
            folders = (getattr(logger, "log_dir", None) for logger in trainer.loggers)
            exception.filename = exception.filename or next(filter(None, folders), trainer.default_root_dir)

    def outcome(self, module: FederatedClassifier) -> Run:
        """The run that a fit with this loop made: the models of clients and server, and what was measured."""
        parts = self.parts
        metrics = run_record.run_metrics(parts, self.history, self.measured)
        global_states, personal_of = states_of(parts.federation)
        return Run(parts.adapted, global_states, personal_of, self.num_clients, metrics, run_record.run_info(parts))

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the states of server and clients, and what they belong to."""
        parts = self.parts
        journals.keep_default_journal(parts)
        checkpoint[CHECKPOINT_KEY] = {
            "format": CHECKPOINT_FORMAT,
            "federation": parts.federation.state_dict(),
            "metrics": run_record.run_metrics(parts, self.history, self.measured),
            "step": self.history[-1]["step"] if self.history else 0,
            "scores": parts.module.scores,
            "shifted": parts.module.shifted,
            "info": run_record.run_info(parts),
            "data": parts.data.fingerprint,
        } | run_fingerprint(parts).state_dict()

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the saved states for the start of training, after checking that they belong to this model and data."""
        saved, fits = contents(checkpoint.get(CHECKPOINT_KEY)), trainer.state.fn == "fit"
        assert self.protection is not None
        self.protection.check_alike(saved["federation"].get("privacy"))
        check_same_run(saved, self.parts, fits, self.resume_allow)
        find_clients(saved["federation"], trainer.ckpt_path)
        self._loaded = checkpoints.remap_clients(saved, self.parts.data, self.resume_allow)
        self._journals = journals.find_journals(saved["federation"], str(trainer.ckpt_path))
        if fits:
            checkpoints.set_resume_point(
                checkpoint, saved["federation"]["rounds_done"], saved["step"], trainer.max_epochs or 0
            )
