# SPDX-License-Identifier: Apache-2.0
"""The round in Lightning's loop: resuming, stopping, evaluating, logging."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.utilities.exceptions import MisconfigurationException

import perada
from perada.algorithms import make_algorithm
from perada.api import make_trainer
from perada.federation import Training
from perada.lightning import FederatedLoop, PredictionFile, RoundProgressBar
from perada.server import Distillation
from tests.options import sections
from tests.rejections import rejects


class Killer(pl.Callback):
    """Raises in a round, at its start or after one of its steps."""

    def __init__(self, round, step=None):
        self.round = round
        self.step = step

    def on_train_epoch_start(self, trainer, pl_module):
        if (trainer.current_epoch, None) == (self.round, self.step):
            raise RuntimeError("killed")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (self.round, self.step):
            raise RuntimeError("killed")


class Recorder(pl.Callback):
    """Notes which rounds were opened."""

    def __init__(self):
        self.rounds = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.rounds.append(trainer.current_epoch)


def build(tiny, root, algorithm="perada", rounds=4, callbacks=(), data=None, **trainer):
    """Trainer, module, data and loop of a run with partial participation, dropout, momentum and a cosine schedule."""
    distillation = Distillation(steps=3, batch_size=4)
    training = Training(lr_personal=0.1, lr_local=0.1, momentum=0.9, lr_schedule="cosine")
    options = {"clients_per_round": 2, "training": training, "distillation": distillation, "seed": 5}
    loop = FederatedLoop(make_algorithm(algorithm), **options)
    module = perada.FederatedClassifier(tiny.net(), "full")
    trainer = make_trainer(
        loop,
        rounds,
        callbacks=list(callbacks),
        **({"accelerator": "cpu", "enable_progress_bar": False, "default_root_dir": str(root)} | trainer),
    )
    return trainer, module, data or perada.FederatedDataModule(tiny.data(), batch_size=4), loop


def fit(*args, ckpt_path=None, **kwargs):
    trainer, module, data, loop = build(*args, **kwargs)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return loop.outcome(module)


def run_folder(root, version=0):
    return Path(root) / "lightning_logs" / f"version_{version}"


def all_states(run):
    return [run.state("global"), *(run.state("personal", client) for client in range(run.num_clients))]


def assert_bit_equal(run, expected):
    for got, wanted in zip(all_states(run), all_states(expected), strict=True):
        assert got.keys() == wanted.keys()
        assert [key for key in got if not torch.equal(got[key], wanted[key])] == []


def rows(folder):
    """The metrics of each round in metrics.csv."""
    rounds = {}
    with (folder / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            rounds.setdefault(int(row["epoch"]), {}).update({k: float(v) for k, v in row.items() if v})
    return rounds


@pytest.mark.parametrize(
    ("algorithm", "checkpoint", "step", "every"),
    [
        ("perada", None, None, 1),
        ("perada", None, 1, 2),
        ("fedavg_ft", None, 0, 1),
        ("standalone", ModelCheckpoint, None, 1),
        ("perada", ModelCheckpoint, 0, 2),  # saved when validation ends, which is before the epoch ends
    ],
)
@pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")  # Lightning's own checkpoint says so
@pytest.mark.every(6)
def test_four_rounds_are_two_and_a_kill_and_two(tiny, tmp_path, algorithm, checkpoint, step, every):
    def callbacks():
        return [checkpoint()] if checkpoint else []

    options = {"algorithm": algorithm, "check_val_every_n_epoch": every}
    uninterrupted = fit(tiny, tmp_path / "whole", callbacks=callbacks(), **options)
    with pytest.raises(RuntimeError, match="killed"):
        fit(tiny, tmp_path / "killed", callbacks=[*callbacks(), Killer(2, step)], **options)
    saved = max(
        (run_folder(tmp_path / "killed") / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns
    )
    recorder = Recorder()
    resumed = fit(tiny, tmp_path / "killed", callbacks=[*callbacks(), recorder], ckpt_path=str(saved), **options)
    assert recorder.rounds == [2, 3]
    assert_bit_equal(resumed, uninterrupted)
    assert resumed.metrics == uninterrupted.metrics
    assert [record["round"] for record in resumed.metrics["rounds"]] == [0, 1, 2, 3]
    folders = run_folder(tmp_path / "whole"), run_folder(tmp_path / "killed", 1)
    partitions = [json.loads((folder / "partition.json").read_text()) for folder in folders]
    assert partitions[0] == partitions[1]
    logged = [rows(folder) for folder in folders]
    assert logged[1].keys() == {0, 1, 2, 3}
    # The rounds before the interruption come from the checkpoint, the others from the logger.
    assert logged[1] == logged[0]
    for record in uninterrupted.metrics["rounds"]:
        assert {name: value for name, value in record.items() if name != "step"}.items() <= logged[0][
            record["round"]
        ].items()


@pytest.mark.slow
def test_a_checkpoint_from_within_a_round_begins_the_round_anew(tiny, tmp_path):
    uninterrupted = fit(tiny, tmp_path / "whole")
    trainer, module, data, _ = build(tiny, tmp_path, callbacks=[Killer(2, 0)])
    with pytest.raises(RuntimeError, match="killed"):
        trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "within.ckpt")
    resumed = fit(tiny, tmp_path, ckpt_path=str(tmp_path / "within.ckpt"))
    assert_bit_equal(resumed, uninterrupted)
    assert resumed.metrics == uninterrupted.metrics


@pytest.mark.slow
def test_after_sigkill_the_last_whole_round_is_on_disk(tiny, tmp_path):
    script = """
        import os, signal, sys
        from pathlib import Path
        from importlib.machinery import SourceFileLoader
        tests = Path(sys.argv[1])
        Tiny = SourceFileLoader("shared", str(tests / "conftest.py")).load_module().Tiny
        loop_tests = SourceFileLoader("loop_tests", str(tests / "lightning" / "test_federated_loop.py")).load_module()

        class Sigkill(loop_tests.pl.Callback):
            def on_train_batch_end(self, trainer, *args):
                if trainer.current_epoch == 2:
                    os.kill(os.getpid(), signal.SIGKILL)

        loop_tests.fit(Tiny(), sys.argv[2], callbacks=[Sigkill()])
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), Path(__file__).parents[1], tmp_path]
    killed = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    saved = run_folder(tmp_path) / "checkpoints" / "last.ckpt"
    uninterrupted = fit(tiny, tmp_path / "whole")
    resumed = fit(tiny, tmp_path, ckpt_path=str(saved))
    assert_bit_equal(resumed, uninterrupted)
    assert resumed.metrics == uninterrupted.metrics


def test_a_finished_run_can_go_on(tiny, tmp_path):
    fit(tiny, tmp_path, algorithm="fedavg_ft", rounds=2)
    saved = run_folder(tmp_path) / "checkpoints" / "last.ckpt"
    same = fit(tiny, tmp_path, algorithm="fedavg_ft", rounds=2, ckpt_path=str(saved))
    assert len(same.metrics["rounds"]) == 2
    assert set(same.metrics["clients"]) == {"personal/local_test", "personal/global_test", "last_round"}
    longer = fit(tiny, tmp_path, algorithm="fedavg_ft", rounds=3, ckpt_path=str(saved))
    assert [record["round"] for record in longer.metrics["rounds"]] == [0, 1, 2]
    assert not torch.equal(longer.state("personal", 0)["7.weight"], same.state("personal", 0)["7.weight"])


def test_checkpoint_holds_safe_types_and_no_backbone(tiny, tmp_path):
    data = perada.FederatedDataModule(tiny.data(), batch_size=4)
    run = tiny.finetune(data, adapter="head", rounds=1, default_root_dir=str(tmp_path))
    saved = torch.load(run_folder(tmp_path) / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["state_dict"] == {}
    assert saved["perada"]["federation"]["global"].keys() == {"7.weight", "7.bias"}
    assert len(saved["perada"]["federation"]["clients"]["rows"]) == 2
    assert run.metrics["rounds"] == saved["perada"]["metrics"]["rounds"]


def strip_weights(path):
    content = torch.load(path, weights_only=True)
    torch.save({key: value for key, value in content.items() if key != "loops"}, path)


def strip_perada(path):
    content = torch.load(path, weights_only=True)
    torch.save({key: value for key, value in content.items() if key != "perada"}, path)


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tiny, new: setattr(new[3], "seed", 6), "its seed is 5, here 6"),
        (lambda tiny, new: setattr(new[3], "algorithm", perada.make_algorithm("ditto")), "algorithm is 'PerAda', here"),
        (lambda tiny, new: setattr(new[1], "backbone", torch.nn.Flatten()), "has no nn.Linear"),
        (lambda tiny, new: setattr(new[1], "backbone", tiny.net(seed=1)), "its frozen weights is"),
        (lambda tiny, new: setattr(new[1], "adapter", "bias_norm"), "trained tensors have '0.weight' of shape"),
        (lambda tiny, new: setattr(new[1], "adapter", "head"), "trained tensors have '0.weight' of shape"),
        (
            lambda tiny, new: setattr(new[0].fit_loop, "max_epochs", 0),
            "max_epochs=0",
        ),
        ({"sizes": (9, 5, 14, 7)}, "its number of clients is 5, here 4"),
        ({"sizes": (9, 5, 14, 20, 7)}, r"numbers of images is \[9, 5, 14, 7, 20\], here \[9, 5, 14, 20, 7\]"),
        (strip_weights, "save_weights_only=True"),
        (strip_perada, "not written by perada"),
    ],
)
def test_a_checkpoint_of_something_else_is_rejected_with_the_difference(tiny, tmp_path, change, message):
    trained = "head" if "frozen" in message else "full"
    trainer, module, data, _ = build(tiny, tmp_path, rounds=1)
    module.adapter = trained
    trainer.fit(module, data)
    saved = run_folder(tmp_path) / "checkpoints" / "last.ckpt"
    other = perada.FederatedDataModule(tiny.data(**change), batch_size=4) if isinstance(change, dict) else None
    new = build(tiny, tmp_path, rounds=2, data=other)
    new[1].adapter = trained
    if change in (strip_weights, strip_perada):
        change(saved)
    elif callable(change):
        change(tiny, new)
    with pytest.raises(ValueError, match=message) as error:
        new[0].fit(new[1], new[2], ckpt_path=str(saved))
    assert "\n" not in str(error.value)


def test_another_partition_of_the_same_sizes_is_rejected(tiny, tmp_path):
    def data(seed):
        return perada.FederatedDataModule(
            dataset=perada.data.Digits(), partition=perada.data.IID(5), train_limit=50, test_limit=10, seed=seed
        )

    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    options = {"adapter": "head", "algorithm": "fedavg", "accelerator": "cpu", "default_root_dir": str(tmp_path)}
    options["enable_progress_bar"] = False
    perada.finetune(net, data(0), **sections(rounds=1, **options))
    with pytest.raises(ValueError, match=r"partition .*'[0-9a-f]{16}',"):
        perada.finetune(net, data(1), **sections(rounds=2, ckpt_path="last", **options))


def accuracy(model, dataset):
    x, y = dataset.tensors
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def test_early_stopping_still_fine_tunes_scores_and_saves(tiny, tmp_path):
    stop = EarlyStopping("personal/local_test", mode="max", stopping_threshold=0.0)
    run = fit(tiny, tmp_path, algorithm="fedavg_ft", callbacks=[stop])
    assert [record["round"] for record in run.metrics["rounds"]] == [0]
    states = all_states(run)
    assert all(not torch.equal(states[0]["7.weight"], state["7.weight"]) for state in states[1:])
    test = tiny.data().test
    expected = [accuracy(run.personal(client), test[client]) for client in range(5)]
    assert run.metrics["clients"]["personal/local_test"] == pytest.approx(expected)
    assert run.metrics["rounds"][0]["personal/local_test"] == pytest.approx(sum(expected) / 5)
    assert rows(run_folder(tmp_path))[0]["personal/local_test"] == pytest.approx(sum(expected) / 5)
    trainer, module, data, loop = build(tiny, tmp_path, algorithm="fedavg_ft", callbacks=[stop], logger=False)
    trainer.validate(module, data, ckpt_path=run_folder(tmp_path) / "checkpoints" / "last.ckpt", verbose=False)
    assert_bit_equal(loop.outcome(module), run)


class StopAfterFirstRound(pl.Callback):
    """Ends training once the first round's checkpoint is written, so that clients fine-tune after it."""

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = True


@pytest.mark.parametrize("test", [True, False])
def test_what_is_fine_tuned_after_an_early_stop_is_in_the_checkpoint(tiny, tmp_path, test):
    """Also without test images, where nothing is scored after the fine-tuning."""
    data = perada.FederatedDataModule(tiny.data(test=test), batch_size=4)
    run = fit(tiny, tmp_path, algorithm="fedavg_ft", callbacks=[StopAfterFirstRound()], data=data)
    saved = torch.load(run_folder(tmp_path) / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["perada"]["federation"]["tuned"] is not None
    path = str(run_folder(tmp_path) / "checkpoints" / "last.ckpt")
    resumed = fit(tiny, tmp_path / "resumed", algorithm="fedavg_ft", rounds=1, data=data, ckpt_path=path)
    assert_bit_equal(resumed, run)


def test_fine_tuning_after_an_early_stop_leaves_a_best_checkpoint_as_it_was(tiny, tmp_path):
    """One that a metric has chosen is of the round that it names, and says so to whoever reads it later."""
    best = ModelCheckpoint(tmp_path / "best", monitor="global/global_test", mode="max", save_on_train_epoch_end=False)
    contents = []

    class Keep(StopAfterFirstRound):
        def on_train_epoch_end(self, trainer, pl_module):
            super().on_train_epoch_end(trainer, pl_module)
            contents.append(Path(best.best_model_path).read_bytes())

    fit(tiny, tmp_path, algorithm="fedavg_ft", callbacks=[best, Keep()])
    assert contents == [Path(best.best_model_path).read_bytes()]


def test_rounds_between_evaluations_and_one_at_the_end(tiny, tmp_path):
    run = fit(tiny, tmp_path, check_val_every_n_epoch=3)
    scored = [record["round"] for record in run.metrics["rounds"] if "global/global_test" in record]
    assert scored == [2, 3]
    x = torch.cat([part.tensors[0] for part in tiny.data().test])
    y = torch.cat([part.tensors[1] for part in tiny.data().test])
    final = accuracy(run.global_model(), torch.utils.data.TensorDataset(x, y))
    assert rows(run_folder(tmp_path))[3]["global/global_test"] == pytest.approx(final)
    assert "global/global_test" not in rows(run_folder(tmp_path))[0]
    saved = torch.load(run_folder(tmp_path) / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["perada"]["metrics"]["rounds"] == run.metrics["rounds"]


@pytest.mark.slow
def test_a_round_stopped_in_the_middle_counts_as_not_begun(tiny, tmp_path):
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop |= (trainer.current_epoch, batch_idx) == (1, 1)

    trainer, module, data, loop = build(tiny, tmp_path, callbacks=[Stop()])
    trainer.fit(module, data)
    stopped = loop.outcome(module)
    trainer, module, data, loop = build(tiny, tmp_path, callbacks=[Killer(1)])
    with pytest.raises(RuntimeError, match="killed"):
        trainer.fit(module, data)
    assert_bit_equal(stopped, loop.outcome(module))
    saved = run_folder(tmp_path) / "checkpoints" / "last.ckpt"
    assert_bit_equal(fit(tiny, tmp_path, ckpt_path=str(saved)), fit(tiny, tmp_path / "whole"))


def test_metrics_are_logged_every_round(tiny, tmp_path):
    run = fit(tiny, tmp_path, rounds=2)
    state = run.state("global")
    size = sum(value.numel() * value.element_size() for value in state.values()) / 1e6
    numbers = sum(value.numel() for value in state.values())
    for round, values in rows(run_folder(tmp_path)).items():
        assert values["comm/up_mb"] == pytest.approx(2 * size)
        assert values["comm/down_mb"] == pytest.approx(2 * size)
        assert values["params/sent"] == numbers
        assert values["params/trained"] == 2 * numbers
        assert run.metrics["rounds"][round] == pytest.approx(
            {"round": round}
            | {key: value for key, value in values.items() if key != "epoch"}
            | {"step": values["step"] + 1}
        )
    names = {"personal/local_test", "personal/global_test"}
    assert {*names, *(f"{name}_std" for name in names), "global/global_test"} <= values.keys()
    per_client = run.metrics["clients"]["personal/local_test"]
    assert values["personal/local_test_std"] == pytest.approx(torch.tensor(per_client).std(correction=0).item())


def test_fast_dev_run_takes_one_step_and_writes_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = fit(tiny, tmp_path, fast_dev_run=True)
    assert [record["step"] for record in run.metrics["rounds"]] == [1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_limit_train_batches_shortens_every_round(tiny, tmp_path):
    run = fit(tiny, tmp_path, rounds=2, limit_train_batches=2)
    assert [record["step"] for record in run.metrics["rounds"]] == [2, 4]
    assert not torch.equal(run.state("global")["7.weight"], fit(tiny, tmp_path, rounds=2).state("global")["7.weight"])


def test_limit_val_batches_zero_evaluates_nothing(tiny, tmp_path):
    run = fit(tiny, tmp_path, rounds=1, limit_val_batches=0)
    assert set(run.metrics["clients"]) == {"last_round"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 2, "strategy": "ddp"}, r"strategy=DDPStrategy.*2 devices"),
        ({"precision": "16-true"}, "precision='16-true'.*bf16-mixed"),
        ({"precision": "bf16-true"}, "precision='bf16-true'"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2.*batch_size"),
        ({"gradient_clip_val": 1.0}, "gradient_clip_val=1.0.*clip_norm"),
        ({"val_check_interval": 0.5}, "val_check_interval=0.5.*check_val_every_n_epoch"),
        ({"max_steps": 7}, "max_steps=7.*max_epochs"),
    ],
)
def test_trainer_options_without_meaning_are_rejected(tiny, tmp_path, options, message):
    with pytest.raises(ValueError, match=message) as error:
        fit(tiny, tmp_path, logger=False, **options)
    assert "\n" not in str(error.value)


def test_a_plain_trainer_is_checked_at_set_up(tiny):
    _, module, data, loop = build(tiny, ".", logger=False)
    plain = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(callbacks=[loop], max_epochs=1, max_steps=3, **plain)
    with rejects("max_steps", 3):
        trainer.fit(module, data)
    trainer = pl.Trainer(callbacks=[loop], max_epochs=1, gradient_clip_val=1.0, **plain)
    with pytest.raises(MisconfigurationException, match="clipping"):
        trainer.fit(module, data)


def distance(state, other):
    """Euclidean distance of two states."""
    return sum(float((state[key].double() - other[key].double()).square().sum()) for key in state) ** 0.5


@pytest.mark.slow
def test_bf16_mixed_keeps_states_in_float32(tiny, tmp_path):
    """What a state differs by from one in float32 is small against the way that training has moved it."""
    half = fit(tiny, tmp_path, rounds=1, precision="bf16-mixed")
    single = fit(tiny, tmp_path, rounds=1)
    initial = tiny.net().state_dict()
    for got, expected in zip(all_states(half), all_states(single), strict=True):
        assert {value.dtype for value in got.values()} == {torch.float32}
        assert distance(got, expected) <= 0.1 * distance(expected, initial)
    assert distance(single.state("global"), initial) > 0.1
    assert not torch.equal(half.state("global")["7.weight"], single.state("global")["7.weight"])


@pytest.mark.slow
def test_validate_before_fit_scores_the_initial_model(tiny, tmp_path):
    trainer, module, data, loop = build(tiny, tmp_path, rounds=2)
    (scores,) = trainer.validate(module, data, verbose=False)
    x = torch.cat([part.tensors[0] for part in tiny.data().test])
    y = torch.cat([part.tensors[1] for part in tiny.data().test])
    everything = torch.utils.data.TensorDataset(x, y)
    assert scores["global/global_test"] == pytest.approx(accuracy(tiny.net().eval(), everything))
    trainer.fit(module, data)
    assert_bit_equal(loop.outcome(module), fit(tiny, tmp_path / "alone", rounds=2))
    (tested,) = trainer.test(module, data, verbose=False)
    assert tested["global/global_test"] == pytest.approx(accuracy(loop.outcome(module).global_model(), everything))


def test_predict_returns_the_owners_logits(tiny, tmp_path):
    trainer, module, data, loop = build(tiny, tmp_path, rounds=1)
    trainer.fit(module, data)
    batches = trainer.predict(module, data)
    run = loop.outcome(module)
    owner, personal = (torch.cat([batch[name] for batch in batches]) for name in ("owner", "personal"))
    assert owner.tolist() == [client for client in range(5) for _ in range(6)]
    for client, part in enumerate(tiny.data().test):
        expected = run.personal(client)(part.tensors[0])
        torch.testing.assert_close(personal[owner == client], expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.every(2)
@pytest.mark.parametrize("returned", [None, False])
def test_predictions_are_written_whether_or_not_they_are_returned(tiny, tmp_path, returned):
    trainer, module, data, _ = build(tiny, tmp_path, rounds=1)
    trainer.fit(module, data)
    trainer.callbacks.append(PredictionFile())
    batches = trainer.predict(module, data)
    for path in tmp_path.rglob("predictions.csv"):
        path.unlink()
    trainer.predict(module, data, return_predictions=returned)
    (path,) = tmp_path.rglob("predictions.csv")
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    assert [int(row["image"]) for row in rows] == list(range(30))
    for column, name in (("client", "owner"), ("label", "y"), ("personal", "personal"), ("global", "global")):
        expected = torch.cat([batch[name] for batch in batches])
        expected = expected.argmax(-1) if expected.dim() > 1 else expected
        assert [int(row[column]) for row in rows] == expected.tolist()


def scaled(image):
    """An image whose smallest and largest values are black and white."""
    return 255 * (image - image.min()) / (image.max() - image.min())


def test_pictures_show_the_first_right_and_wrong_predictions_of_each_client(tiny, tmp_path):
    trainer, module, data, _ = build(tiny, tmp_path, rounds=1)
    trainer.fit(module, data)
    trainer.callbacks.append(PredictionFile())
    trainer.predict(module, data)
    (path,) = tmp_path.rglob("predictions.csv")
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    expected = set()
    for client in range(5):
        own = [row for row in rows if row["client"] == str(client)]
        for is_right in (True, False):
            expected.update([row["image"] for row in own if (row["personal"] == row["label"]) == is_right][:3])
    assert {row["image"] for row in rows if row["example_picture"]} == expected
    assert 0 < len(expected) < 30
    images = torch.cat([part.tensors[0] for part in tiny.data().test])
    for row in rows:
        if row["example_picture"]:
            pixels = torch.from_numpy(np.array(Image.open(path.parent / row["example_picture"]), dtype=np.float32))
            assert (pixels - scaled(images[int(row["image"]), 0])).abs().max() <= 0.51
    public = sorted((path.parent / "predictions" / "public").iterdir())
    assert [int(file.stem) for file in public] == [0, 1, 3, 4, 6, 7, 9, 10]  # 8 of 12, evenly spread
    (images,) = tiny.data().public.tensors
    for file in public:
        pixels = torch.from_numpy(np.array(Image.open(file), dtype=np.float32))
        assert (pixels - scaled(images[int(file.stem), 0])).abs().max() <= 0.51


@pytest.mark.filterwarnings("ignore:the floating-point images of:UserWarning")
def test_a_client_whose_loss_is_nan_is_named_and_left_out(tiny, tmp_path):
    data = tiny.data()
    data.train[1].tensors[0][:] = 3e38
    arguments = tiny.options | {"clients_per_round": None, "rounds": 1, "logger": False}
    with pytest.warns(UserWarning, match=r"round 1: .*client 1 .*NaN"):
        run = tiny.finetune(data, **arguments)
    start = tiny.finetune(**arguments | {"rounds": 0})
    assert torch.equal(run.state("personal", 1)["7.weight"], start.state("personal", 1)["7.weight"])
    assert not torch.equal(run.state("personal", 0)["7.weight"], start.state("personal", 0)["7.weight"])
    assert all(value.isfinite().all() for value in run.state("global").values())


def test_a_module_of_another_loop_is_rejected(tiny, tmp_path):
    trainer, module, data, _ = build(tiny, tmp_path, rounds=1)
    trainer.fit(module, data)
    other, _, _, _ = build(tiny, tmp_path, algorithm="ditto", rounds=1)
    with pytest.raises(ValueError, match="new objects"):
        other.fit(module, data)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`:UserWarning")
def test_module_and_data_must_be_peradas(tiny):
    trainer, module, _, _ = build(tiny, ".", logger=False)
    with pytest.raises(TypeError, match="FederatedDataModule"):
        trainer.fit(module, torch.utils.data.DataLoader([0]))


def test_distilling_needs_a_public_set(tiny, tmp_path):
    data = perada.FederatedDataModule(tiny.data(public=False))
    with pytest.raises(ValueError, match=r"PerAda.*3 steps.*no public set"):
        fit(tiny, tmp_path, data=data)
    fit(tiny, tmp_path, data=data, algorithm="ditto", rounds=1)


@pytest.mark.slow
def test_progress_bar_counts_rounds(tiny, tmp_path, capsys):
    run = fit(tiny, tmp_path, rounds=2, enable_progress_bar=True, callbacks=[RoundProgressBar()])
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert "Round 1/2" in text
    assert "Round 2/2" in text
    assert "Distil 1" in text
    assert "Epoch" not in text
    accuracy = 100 * run.metrics["rounds"][-1]["personal/local_test"]
    assert f"own images {accuracy:.2f} %" in text
    assert "personal/" not in text


CHANGES = [
    ({"lr_local": 0.02}, "training.lr_local=0.1, but this run has 0.02"),
    ({"batch_size": 3}, "batch_size="),
    ({"algorithm_options": {"prox_strength": 9.0}}, "algorithm='PerAda(prox_strength=1.0"),
    ({"local_steps": 3}, "training.local_steps=None, but this run has 3"),
    ({"distill_lr": 0.5}, "distillation.lr="),
    ({"momentum": 0.3}, "training.momentum="),
]


@pytest.mark.parametrize(("changed", "message"), CHANGES, ids=lambda value: str(value)[:30])
@pytest.mark.every(6)
def test_a_run_is_not_resumed_with_other_options_but_for_those_that_are_allowed(tiny, tmp_path, changed, message):
    options = tiny.options | {"lr_local": 0.1, "logger": True, "default_root_dir": str(tmp_path)}
    tiny.finetune(**options | {"rounds": 1})
    saved = str(run_folder(tmp_path) / "checkpoints" / "last.ckpt")
    options |= changed | {"ckpt_path": saved, "rounds": 2}
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        tiny.finetune(**options)
    (name,) = re.findall(r"resume_allow=\['(.*)'\]", str(error.value))
    resumed = tiny.finetune(**options, resume_allow=[name])
    assert [row["round"] for row in resumed.metrics["rounds"]] == [0, 1]
