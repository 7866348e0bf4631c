# SPDX-License-Identifier: Apache-2.0
"""`perada fit` on two nodes of a real Slurm, by srun, and its restart after SIGUSR1."""

import os
import shutil
import signal
import stat
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from perada.lightning.trainer_setup import _requeue_job
from perada.results.restore import CHECKPOINT_KEY
from tests import recipes
from tests.slurm_cluster import missing_programs, running_cluster

needs_slurm = pytest.mark.skipif(
    bool(missing_programs()),
    reason=f"Slurm is not installed (apt-get install slurm-wlm munge): no {', '.join(missing_programs())}",
)

CALLBACK = '''
import time
from pathlib import Path
import pytorch_lightning as pl

class Pace(pl.Callback):
    """Takes the seconds in the file "pace" for each round."""

    def on_train_epoch_start(self, trainer, pl_module):
        time.sleep(float(Path("pace").read_text()))
'''
RECIPE = recipes.recipe(
    trainer={"max_epochs": 4, "callbacks": [{"class_path": "mine.Pace"}]},
    data={"public_fraction": 0.2},
    distillation={"steps": 2, "batch_size": 4},
)
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --partition=all --time=10
#SBATCH --signal=USR1@90 --requeue --open-mode=append --output=log.txt
srun {python} -m perada fit --config slow.yaml \\
    --trainer.devices=1 --trainer.num_nodes=2 \\
    ${{SLURM_RESTART_COUNT:+--ckpt_path last}}
"""
WAIT_SECONDS = 300


@pytest.fixture(scope="module")
def slurm():
    # The names of the nodes are no addresses, as they are on a cluster.
    with running_cluster({"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}) as cluster:
        yield cluster


@pytest.fixture
def folders():
    made = []
    for _ in range(2):
        folder = Path(tempfile.mkdtemp(prefix="perada-slurm-"))
        (folder / "slow.yaml").write_text(yaml.safe_dump(RECIPE))
        (folder / "mine.py").write_text(CALLBACK)
        (folder / "pace").write_text("0")
        (folder / "job.sh").write_text(SCRIPT.format(python=sys.executable))
        made.append(folder)
    yield made
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)


def submit(slurm, folder):
    """Submit the job of a folder, and return its id."""
    return slurm.run("sbatch", "--parsable", f"--chdir={folder}", str(folder / "job.sh")).strip()


def wait_for(is_true, folder):
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_true():
        log = folder / "log.txt"
        assert time.monotonic() < deadline, log.read_text()[-3000:] if log.is_file() else "no log"
        time.sleep(0.2)


def has_ended(slurm, job):
    # A job that is being requeued is completing first.
    return slurm.run("squeue", "-h", "-j", job, "-o", "%T", check=False).strip() == ""


def tensors_in(content, prefix=""):
    """Return the tensors of nested dictionaries and lists by their paths."""
    if isinstance(content, torch.Tensor):
        return {prefix: content}
    found = {}
    entries = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in entries:
        if isinstance(value, dict | list | tuple | torch.Tensor):
            found |= tensors_in(value, f"{prefix}/{key}")
    return found


def models_of(folder):
    """Return the states of server and clients after the last round of the newest run, by their names."""
    paths = sorted(folder.glob("lightning_logs/version_*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
    if not paths:
        return {}
    checkpoint = torch.load(paths[-1], weights_only=True)
    assert checkpoint[CHECKPOINT_KEY]["federation"]["rounds_done"] == RECIPE["trainer"]["max_epochs"]
    return tensors_in(checkpoint[CHECKPOINT_KEY]["federation"])


@needs_slurm
@pytest.mark.slow
def test_a_run_on_two_nodes_that_is_told_to_end_goes_on_to_the_same_models(slurm, folders):
    undisturbed, disturbed = folders
    job = submit(slurm, undisturbed)
    wait_for(lambda: has_ended(slurm, job), undisturbed)
    assert len(models_of(undisturbed)) >= 3, (undisturbed / "log.txt").read_text()[-3000:]

    (disturbed / "pace").write_text("4")
    job = submit(slurm, disturbed)
    wait_for(lambda: any(disturbed.glob("lightning_logs/*/checkpoints/last.ckpt")), disturbed)
    slurm.run("scancel", "--signal=USR1", job)
    wait_for(lambda: "Restarts=1" in slurm.run("scontrol", "show", "job", job), disturbed)
    (disturbed / "pace").write_text("0")
    wait_for(lambda: has_ended(slurm, job), disturbed)

    log = (disturbed / "log.txt").read_text()
    assert len(list(disturbed.glob("lightning_logs/version_*"))) == 2, log[-3000:]
    models = models_of(disturbed)
    for name, tensor in models_of(undisturbed).items():
        assert torch.equal(models[name], tensor), name
    assert not list(disturbed.rglob("hpc_ckpt*"))


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({"SLURM_JOB_ID": "7"}, "7"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, "7_2"),
    ],
)
def test_the_first_process_requeues_the_job_and_the_others_do_not(tmp_path, monkeypatch, variables, job):
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for is_first in (False, True):
        _requeue_job(SimpleNamespace(is_global_zero=is_first), signal.SIGUSR1, None)
    assert (tmp_path / "asked").read_text() == f"requeue {job}\n"


def test_a_job_that_slurm_does_not_requeue_is_told_with_the_way_out(tmp_path, monkeypatch):
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\necho Job is not requeueable >&2; exit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.warns(UserWarning, match=r"7 .*not requeueable.*--ckpt_path last"):
        _requeue_job(SimpleNamespace(is_global_zero=True), signal.SIGUSR1, None)
