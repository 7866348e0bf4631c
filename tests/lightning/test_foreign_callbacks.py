# SPDX-License-Identifier: Apache-2.0
"""Lightning's callbacks: each one works in federated rounds or is rejected at set-up, and all rounds are run."""

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks as lightning

from perada.data import FederatedDataModule
from perada.federation import Training
from perada.lightning import FederatedClassifier, FederatedLoop


class OwnAverage(lightning.WeightAveraging):
    """One of somebody's own."""


class OwnFinetuning(lightning.BaseFinetuning):
    """One of somebody's own."""


REJECTED = {
    "BackboneFinetuning": lambda: lightning.BackboneFinetuning(),
    "BaseFinetuning": lambda: lightning.BaseFinetuning(),
    "BatchSizeFinder": lambda: lightning.BatchSizeFinder(),
    "EMAWeightAveraging": lambda: lightning.EMAWeightAveraging(),
    "GradientAccumulationScheduler": lambda: lightning.GradientAccumulationScheduler({1: 2}),
    "LearningRateFinder": lambda: lightning.LearningRateFinder(),
    "LearningRateMonitor": lambda: lightning.LearningRateMonitor(),
    "ModelPruning": lambda: lightning.ModelPruning("l1_unstructured", amount=0.5),
    "SpikeDetection": lambda: lightning.SpikeDetection(),
    "StochasticWeightAveraging": lambda: lightning.StochasticWeightAveraging(1e-2, swa_epoch_start=1),
    "WeightAveraging": lambda: lightning.WeightAveraging(),
    "OwnAverage": OwnAverage,
    "OwnFinetuning": OwnFinetuning,
}
ACCEPTED = {
    "BasePredictionWriter": lambda path: lightning.BasePredictionWriter("epoch"),
    "Callback": lambda path: pl.Callback(),
    "Checkpoint": lambda path: lightning.Checkpoint(),
    "DeviceStatsMonitor": lambda path: lightning.DeviceStatsMonitor(),
    "EarlyStopping": lambda path: lightning.EarlyStopping("personal/local_test", patience=9),
    "LambdaCallback": lambda path: lightning.LambdaCallback(on_train_start=lambda trainer, module: None),
    "ModelCheckpoint": lambda path: lightning.ModelCheckpoint(path / "saved"),
    "ModelSummary": lambda path: lightning.ModelSummary(),
    "OnExceptionCheckpoint": lambda path: lightning.OnExceptionCheckpoint(path),
    "RichModelSummary": lambda path: lightning.RichModelSummary(),
    "ThroughputMonitor": lambda path: lightning.ThroughputMonitor(lambda batch: 4),
    "Timer": lambda path: lightning.Timer(),
}
BARS = {"ProgressBar", "RichProgressBar", "TQDMProgressBar"}


def test_every_callback_of_lightning_is_looked_at():
    ours = {"OwnAverage", "OwnFinetuning"}
    assert set(lightning.__all__) == (set(REJECTED) | set(ACCEPTED) | BARS) - ours


def finetune(tiny, callback, **options):
    common = tiny.options | {"rounds": 3, "local_steps": 1, "distill_steps": 1, "enable_checkpointing": None}
    return tiny.finetune(callbacks=callback, **common | options)


@pytest.mark.parametrize("name", REJECTED)
def test_what_acts_on_weights_is_rejected_with_a_remedy(tiny, name):
    with pytest.raises(ValueError, match=rf"^{name} .*[;,] .*\w") as caught:
        finetune(tiny, REJECTED[name](), logger=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", REJECTED)
def test_it_is_rejected_before_its_own_set_up(tiny, name):
    loop = FederatedLoop(training=Training(local_steps=1))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_epochs=3, callbacks=[REJECTED[name](), loop], **quiet)
    module = FederatedClassifier(tiny.net(), adapter="full")
    with pytest.raises(ValueError, match=rf"^{name}"):
        trainer.fit(module, datamodule=FederatedDataModule(tiny.data(), batch_size=4))


@pytest.mark.every(12)
@pytest.mark.filterwarnings("ignore:When using the `ThroughputMonitor`")
@pytest.mark.filterwarnings(r"ignore:.*\.fit\(ckpt_path=")
@pytest.mark.parametrize("name", ACCEPTED)
def test_the_others_train_the_rounds_asked_for(tiny, tmp_path, name):
    expected = finetune(tiny, None, logger=False)
    run = finetune(tiny, ACCEPTED[name](tmp_path), default_root_dir=str(tmp_path))
    assert [record["round"] for record in run.metrics["rounds"]] == [0, 1, 2]
    for key, value in expected.state("global").items():
        assert torch.equal(run.state("global")[key], value)


@pytest.mark.filterwarnings(r"ignore:.*\.fit\(ckpt_path=")
def test_an_exception_checkpoint_needs_no_logger(tiny, tmp_path):
    assert len(finetune(tiny, lightning.OnExceptionCheckpoint(tmp_path), logger=False).metrics["rounds"]) == 3


class Lengthens(pl.Callback):
    """Asks for another round, as SWA does, whose class is not the only one that could."""

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.fit_loop.max_epochs += 1


def test_a_callback_cannot_add_rounds(tiny):
    with pytest.raises(ValueError, match=r"max_epochs .*3 .*4"):
        finetune(tiny, Lengthens(), logger=False)


class Skips(FederatedClassifier):
    """Ends each round before its first step, which Lightning takes -1 for."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1


def test_rounds_that_were_not_trained_are_warned_of(tiny):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_epochs=1, callbacks=[FederatedLoop(training=Training(local_steps=1))], **quiet)
    data = FederatedDataModule(tiny.data(test=False), batch_size=4)
    with pytest.warns(UserWarning, match=r"^0 of 1 rounds"):
        trainer.fit(Skips(tiny.net(), adapter="full"), datamodule=data)


def test_a_round_less_because_something_stopped_it_is_no_warning(tiny):
    stops = lightning.EarlyStopping("personal/local_test", mode="max", stopping_threshold=-1.0)
    assert len(finetune(tiny, stops, logger=False).metrics["rounds"]) == 1
