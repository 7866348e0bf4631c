# SPDX-License-Identifier: Apache-2.0
"""Comparisons on a real Slurm: two nodes on this machine, each with its own daemon (tests/slurm_cluster.py).

What one machine cannot show: file systems that show a file late on another machine, clocks that differ, and GPUs.
"""

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml

from tests import recipes
from tests.slurm_cluster import missing_programs, running_cluster

submitit = pytest.importorskip("submitit")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing_programs()),
        reason=f"Slurm is not installed (apt-get install slurm-wlm munge): no {', '.join(missing_programs())}",
    ),
]

CALLBACK = '''
import socket, time
from pathlib import Path
import pytorch_lightning as pl

class Pace(pl.Callback):
    """Takes the seconds in the file "pace" for each round, and fails if there is a file "broken"."""

    def on_train_epoch_start(self, trainer, pl_module):
        time.sleep(float(Path("pace").read_text()))
        if Path("broken").exists():
            raise RuntimeError("this node is broken")
'''
RECIPE = recipes.recipe(
    trainer={"max_epochs": 4, "callbacks": [{"class_path": "mine.Pace"}]},
    data={"public_fraction": 0.2},
    # Enough for scores that differ between rows and seeds.
    training={"local_steps": 10},
    federated={"clients_per_round": 2},
    distillation={"steps": 1, "batch_size": 4},
)
TIMES = ("sha256", "seconds", "seconds_per_round")
SEARCH_TIMES = (*TIMES, "seconds_of_rounds")
WAIT_SECONDS = 200


@pytest.fixture(scope="module")
def slurm():
    with running_cluster() as cluster:
        yield cluster


def make_folder(user="root"):
    """Create a folder with the recipe, which a user may write and all may read."""
    folder = Path(tempfile.mkdtemp(prefix="perada-slurm-"))
    (folder / "slow.yaml").write_text(yaml.safe_dump(RECIPE))
    (folder / "mine.py").write_text(CALLBACK)
    (folder / "pace").write_text("0")
    folder.chmod(0o755)
    if os.getuid() == 0:
        account = pwd.getpwnam(user)
        for path in (folder, *folder.iterdir()):
            os.chown(path, account.pw_uid, account.pw_gid)
    return folder


@pytest.fixture
def folder():
    folder = make_folder()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def command(*words, python=sys.executable):
    return [python, "-m", "perada", "compare", "slow.yaml", "--algorithms", "fedavg", "perada", *words]


def on_slurm(output="results.json", partition="all", python=sys.executable):
    return command("--launcher", "slurm", "--output", output, "--partition", partition, python=python)


PROCESSES: list[subprocess.Popen[str]] = []
"""Commands that were started in a test."""


def start(slurm, folder, words, variables=None, **options):
    """Start a command in a folder."""
    environment = slurm.environment | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | (variables or {})
    process = subprocess.Popen(
        words, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    PROCESSES.append(process)
    return process


@pytest.fixture(autouse=True)
def nothing_left(slurm):
    """End what a test that failed has left, so that the next one has both nodes."""
    yield
    while PROCESSES:
        process = PROCESSES.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()
    slurm.cancel_all()


def finish(process, status=0):
    """Wait for a command, and return what it prints."""
    output, errors = process.communicate(timeout=400)
    assert process.returncode == status, f"{output}\n{errors}"
    return output + errors


def results_of(folder, name="results.json"):
    """Return the records of a file without times, by stage, label and seed."""
    records = {}
    for record in json.loads((folder / name).read_text()):
        key = (record["stage"], record["label"], record["seed"])
        records[key] = {name: value for name, value in record.items() if name not in TIMES}
    return records


@pytest.fixture(scope="module")
def undisturbed(slurm):
    """The results of this machine, by which those of the cluster are judged."""
    folder = make_folder()
    finish(start(slurm, folder, command("--output", "results.json", "--seeds", "0", "1")))
    records = results_of(folder)
    shutil.rmtree(folder)
    return records


def of_seed(records, seed):
    return {key: record for key, record in records.items() if key[2] == seed}


def wait_for(is_true, what):
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_true():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.2)


def running_jobs(slurm):
    """Return the nodes of the jobs that run, by their ids."""
    lines = slurm.run("squeue", "-h", "--array", "-t", "RUNNING", "-o", "%i %N").split("\n")
    return dict(line.split() for line in lines if line)


def wait_for_rounds(folder, count, output="results"):
    """Wait until so many runs have saved a round."""
    wait_for(lambda: len(list((folder / f"{output}.jobs").glob("*.ckpt"))) >= count, "a saved round")


def test_an_array_gives_what_this_machine_gives(slurm, folder, undisturbed):
    output = finish(start(slurm, folder, [*on_slurm(), "--seeds", "0", "1", "--array_parallelism", "2"]))
    assert "4 jobs submitted" in output
    assert results_of(folder) == undisturbed
    # What is left can be compared with by later commands.
    assert [path.parent.name for path in (folder / "results.jobs").rglob("*") if path.is_file()] == ["data"]


def test_a_partition_that_does_not_exist_is_rejected(slurm, folder):
    output = finish(start(slurm, folder, on_slurm(partition="lonk")), status=1)
    assert "lonk" in output and "long" in output
    assert not (folder / "results.jobs").exists()


def test_what_failed_is_repeated_and_the_rest_is_not(slurm, folder, undisturbed):
    finish(start(slurm, folder, [*on_slurm(), "--seeds", "0"]))
    (folder / "broken").touch()
    output = finish(start(slurm, folder, [*on_slurm(), "--seeds", "0", "1"]), status=1)
    assert "2 jobs submitted" in output and "this node is broken" in output
    assert of_seed(results_of(folder), 0) == of_seed(undisturbed, 0)
    (folder / "broken").unlink()
    output = finish(start(slurm, folder, [*on_slurm(), "--seeds", "0", "1"]))
    assert "2 jobs submitted" in output
    assert results_of(folder) == undisturbed


def test_a_cancelled_job_is_a_failed_run(slurm, folder, undisturbed):
    (folder / "pace").write_text("3")
    process = start(slurm, folder, [*on_slurm(), "--seeds", "0"])
    wait_for_rounds(folder, 2)
    first = sorted(running_jobs(slurm))[0]
    slurm.run("scancel", first)
    output = finish(process, status=1)
    assert "CANCELLED" in output and first in output
    (folder / "pace").write_text("0")
    assert "1 jobs submitted" in finish(start(slurm, folder, [*on_slurm(), "--seeds", "0"]))
    assert results_of(folder) == of_seed(undisturbed, 0)


def test_ctrl_c_cancels_the_jobs(slurm, folder):
    (folder / "pace").write_text("60")
    process = start(slurm, folder, [*on_slurm(), "--seeds", "0"])
    wait_for(lambda: len(running_jobs(slurm)) == 2, "two running jobs")
    process.send_signal(signal.SIGINT)
    finish(process, status=130)
    wait_for(lambda: not slurm.run("squeue", "-h"), "the end of the jobs")


def test_after_a_kill_the_same_command_takes_over_its_jobs(slurm, folder, undisturbed):
    (folder / "pace").write_text("4")
    process = start(slurm, folder, [*on_slurm(), "--seeds", "0"])
    wait_for_rounds(folder, 2)
    process.kill()
    process.communicate()
    before = set(running_jobs(slurm))
    assert len(before) == 2
    output = finish(start(slurm, folder, [*on_slurm(), "--seeds", "0"]))
    assert "2 jobs of an earlier command" in output and "submitted" not in output
    assert results_of(folder) == of_seed(undisturbed, 0)


def test_a_pre_empted_run_goes_on_from_its_last_round(slurm, folder, undisturbed):
    (folder / "pace").write_text("3")
    process = start(slurm, folder, [*on_slurm(), "--seeds", "0"])
    wait_for_rounds(folder, 2)
    for job in running_jobs(slurm):
        slurm.run("scancel", "--signal=TERM", job)  # as before pre-emption
        slurm.run("scontrol", "requeue", job)
    (folder / "pace").write_text("0")
    finish(process)
    assert results_of(folder) == of_seed(undisturbed, 0)


def test_a_run_that_is_told_to_end_requeues_itself(slurm, folder, undisturbed):
    """By the signal that Slurm sends before the end of a job's time."""
    (folder / "pace").write_text("3")
    process = start(slurm, folder, [*on_slurm(), "--seeds", "0"])
    wait_for_rounds(folder, 2)
    jobs = running_jobs(slurm)
    for job in jobs:
        slurm.run("scancel", "--signal=USR2", job)
    wait_for(lambda: not running_jobs(slurm), "the end of the jobs")
    (folder / "pace").write_text("0")
    finish(process)
    assert results_of(folder) == of_seed(undisturbed, 0)


def test_a_run_longer_than_the_time_of_a_job(slurm, folder, undisturbed):
    """Slurm looks at times once a minute, and starts a requeued job after two, so this takes minutes."""
    # The signal comes one to two minutes after the start: after the first round and before the last.
    (folder / "pace").write_text("30")
    process = start(slurm, folder, [*on_slurm(), "--seeds", "0", "--time", "3"])
    wait_for(lambda: len(running_jobs(slurm)) == 2, "two running jobs")
    jobs = sorted(running_jobs(slurm))
    for job in jobs:
        wait_for(lambda job=job: "Restarts=1" in slurm.run("scontrol", "show", "job", job), f"the end of {job}")
    assert len(list((folder / "results.jobs").glob("*.ckpt"))) == 2
    (folder / "pace").write_text("0")
    finish(process)
    assert results_of(folder) == of_seed(undisturbed, 0)


def test_runs_of_a_lost_node_go_on_elsewhere(slurm, folder, undisturbed):
    (folder / "pace").write_text("4")
    process = start(slurm, folder, [*on_slurm(), "--seeds", "0", "1"])
    try:
        wait_for_rounds(folder, 4)
        assert set(running_jobs(slurm).values()) == {"alpha", "beta"}
        slurm.kill_node("beta")
        (folder / "pace").write_text("0")
        finish(process)
    finally:
        slurm.resume_node("beta")
    assert results_of(folder) == undisturbed


def find_python(options, variables):
    """Return a Python with which another user can import perada; None if there is none."""
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            words = [python, "-c", "import perada.cli"]
            subprocess.run(words, env=os.environ | variables, cwd="/", check=True, capture_output=True, **options)
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    return None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can run a command as two users")
def test_two_users_at_once(slurm, undisturbed):
    account = pwd.getpwnam("nobody")
    as_nobody = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    packages = [str(Path(submitit.__file__).parents[1]), str(Path(__file__).parents[3])]
    variables = {"PYTHONPATH": os.pathsep.join(packages), "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    python = find_python(as_nobody, variables)
    if python is None:
        pytest.skip("another user can run no Python that has perada's packages")
    folders = {user: make_folder(user) for user in ("root", "nobody")}
    processes = [
        start(slurm, folders["root"], [*on_slurm(), "--seeds", "0"]),
        start(slurm, folders["nobody"], [*on_slurm(python=python), "--seeds", "0"], variables, **as_nobody),
    ]
    wait_for(lambda: len(set(slurm.run("squeue", "-h", "-o", "%u").split())) == 2, "jobs of two users")
    for process in processes:
        finish(process)
    for user, folder in folders.items():
        assert results_of(folder) == of_seed(undisturbed, 0)
        assert {path.owner() for path in folder.rglob("*")} == {user}
        shutil.rmtree(folder)


def choose(*words):
    """Return the words of a search among all methods, of which each that has a second row has the same images."""
    search = ["choose", "slow.yaml", "--budget", "3m", "--seeds", "0", "--trainer.callbacks=null"]
    return [sys.executable, "-m", "perada", *search, *words]


def trials_of(folder, name):
    """Return the records of the trials that a search has finished, without times, by what was run."""
    trials = {}
    for record in json.loads((folder / name / "results.json").read_text()):
        if "failed" in record:
            # The budget was spent before Slurm started the job.
            continue
        # The same setting may be tried with several numbers of rounds.
        tried = json.dumps([record["point"], record["varied"]], sort_keys=True)
        key = (record["stage"], record["label"], record["seed"], tried)
        trials[key] = {name: value for name, value in record.items() if name not in SEARCH_TIMES}
    return trials


def test_a_search_runs_its_trials_as_jobs(slurm, folder):
    on_cluster = ["--launcher", "slurm", "--array_parallelism", "2", "--partition", "all", "--output", "cluster"]
    output = finish(start(slurm, folder, choose(*on_cluster)))
    assert "jobs submitted" in output
    finish(start(slurm, folder, choose("--output", "machine")))
    cluster, machine = trials_of(folder, "cluster"), trials_of(folder, "machine")
    # How many trials fit into the budget depends on the time that they take.
    common = cluster.keys() & machine.keys()
    assert len({label for _, label, _, _ in common}) > 2
    for key in common:
        differing = {name for name in cluster[key] if cluster[key][name] != machine[key].get(name)}
        assert not differing, (key, [(name, cluster[key][name], machine[key].get(name)) for name in differing])
    assert (folder / "cluster" / "best.yaml").is_file()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can hide a folder from a node")
def test_a_node_without_the_folder_is_told_from_a_run_that_fails(slurm, folder):
    slurm.stop_node("beta")
    hide = f'mount -t tmpfs none {folder} && exec "$@"'
    try:
        slurm.start_node("beta", ["unshare", "--mount", "sh", "-c", hide, "sh"])
        output = finish(start(slurm, folder, [*on_slurm(partition="long"), "--seeds", "0"]), status=1)
    finally:
        slurm.stop_node("beta")
        slurm.start_node("beta")
    assert str(folder / "results.jobs") in output and "share" in output
