# SPDX-License-Identifier: Apache-2.0
"""Runs whose clients are held in host memory or in files are those whose clients are on the device."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint


class Killer(pl.Callback):
    """Raises after the first step of a round."""

    def __init__(self, round):
        self.round = round

    def on_train_batch_end(self, trainer, *args):
        if trainer.current_epoch == self.round:
            raise RuntimeError("killed")


def fit(tiny, root, store="disk", rounds=4, **options):
    options = tiny.options | {"seed": 5, "default_root_dir": str(root), "client_store": store} | options
    return tiny.finetune(rounds=rounds, **options)


def run_folder(root, version=0):
    return Path(root) / "lightning_logs" / f"version_{version}"


def saved_in(root, version=0):
    return str(run_folder(root, version) / "checkpoints" / "last.ckpt")


def assert_same(run, expected):
    assert run.metrics == expected.metrics
    for client in range(5):
        wanted = expected.state("personal", client)
        assert [
            key for key, value in run.state("personal", client).items() if not torch.equal(value, wanted[key])
        ] == []
    assert all(torch.equal(value, expected.state("global")[key]) for key, value in run.state("global").items())


@pytest.mark.parametrize("algorithm", ["perada", "fedavg_ft", "apfl"])
@pytest.mark.slow
def test_results_do_not_depend_on_where_clients_are(tiny, tmp_path, algorithm):
    expected = fit(tiny, tmp_path / "device", "device", 3, algorithm=algorithm)
    for store in ("host", "disk", "auto"):
        assert_same(fit(tiny, tmp_path / store, store, 3, algorithm=algorithm), expected)
    assert_same(fit(tiny, tmp_path, "disk", 3, algorithm=algorithm, logger=False), expected)
    assert {path.parent.name for path in run_folder(tmp_path / "disk").rglob("*.safetensors")} == {
        "tuned" if algorithm == "fedavg_ft" else "clients"
    }
    assert not list(run_folder(tmp_path / "auto").rglob("*.safetensors"))


@pytest.mark.parametrize("algorithm", ["perada", "fedavg_ft"])
@pytest.mark.parametrize("after", ["disk", "host", "device"])
@pytest.mark.slow
def test_four_rounds_are_two_and_a_kill_and_two(tiny, tmp_path, after, algorithm):
    uninterrupted = fit(tiny, tmp_path / "whole", "device", algorithm=algorithm)
    before = "device" if after == "host" else "disk"
    with pytest.raises(RuntimeError, match="killed"):
        fit(tiny, tmp_path, before, callbacks=[Killer(2)], algorithm=algorithm)
    resumed = fit(tiny, tmp_path, after, ckpt_path=saved_in(tmp_path), algorithm=algorithm)
    assert_same(resumed, uninterrupted)
    shutil.rmtree(run_folder(tmp_path))  # the new run's folder stands alone
    assert_same(resumed, uninterrupted)
    assert_same(fit(tiny, tmp_path, after, ckpt_path=saved_in(tmp_path, 1), algorithm=algorithm), uninterrupted)


@pytest.mark.slow
def test_killed_while_it_stores_its_clients_a_run_goes_on_from_its_checkpoint(tiny, tmp_path):
    script = """
        import os, signal, sys
        from pathlib import Path
        from importlib.machinery import SourceFileLoader
        from perada.federation.store import DiskStore
        tests = Path(sys.argv[1])
        Tiny = SourceFileLoader("shared", str(tests / "conftest.py")).load_module().Tiny
        stores = SourceFileLoader("stores", str(tests / "lightning" / "test_client_stores.py")).load_module()
        write, written = DiskStore.write_row, []

        def killed(self, client, row):
            written.append(client)
            write(self, client, row)
            if len(written) == 5:  # the first of the third round's two
                os.kill(os.getpid(), signal.SIGKILL)

        DiskStore.write_row = killed
        stores.fit(Tiny(), sys.argv[2])
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), Path(__file__).parents[1], tmp_path]
    killed = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    uninterrupted = fit(tiny, tmp_path / "whole", "device")
    assert_same(fit(tiny, tmp_path, ckpt_path=saved_in(tmp_path)), uninterrupted)


@pytest.mark.slow
def test_checkpoints_hold_names_and_old_files_go(tiny, tmp_path):
    fit(tiny, tmp_path, rounds=6, clients_per_round=5)
    saved = torch.load(saved_in(tmp_path), weights_only=True)["perada"]["federation"]["clients"]
    files = {path.name for path in (run_folder(tmp_path) / "clients").iterdir()}
    assert set(saved) == {"header", "initial", "folder", "files"}
    assert set(saved["files"]) == set(range(5))
    assert set(saved["files"].values()) <= files
    assert len(files) == 2 * 5  # of this checkpoint and the one before


@pytest.mark.filterwarnings(
    "ignore:Be aware that when using `ckpt_path`:UserWarning"
)  # it was written by another callback
@pytest.mark.slow
def test_every_checkpoint_that_is_kept_can_be_gone_on_from(tiny, tmp_path):
    uninterrupted = fit(tiny, tmp_path / "whole", "device")
    fit(tiny, tmp_path, callbacks=[ModelCheckpoint(tmp_path / "all", "{epoch}", save_top_k=-1)])
    for epoch in range(4):
        assert_same(fit(tiny, tmp_path, ckpt_path=str(tmp_path / "all" / f"epoch={epoch}.ckpt")), uninterrupted)


def test_a_client_whose_file_is_gone_is_named_before_training(tiny, tmp_path):
    fit(tiny, tmp_path, rounds=1)
    for path in (run_folder(tmp_path) / "clients").iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"client \d, is missing"):
        fit(tiny, tmp_path, ckpt_path=saved_in(tmp_path))
