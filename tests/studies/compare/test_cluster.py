# SPDX-License-Identifier: Apache-2.0
"""Runs as jobs of a cluster: submitting, waiting, taking over, and what a run on a node checks."""

import json
import os
import pickle
import shutil
import signal
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
import yaml

from perada.cli import main
from perada.cli.runs import build_compared
from perada.results.restore import states_of as federation_states
from perada.studies.compare import cluster, node
from perada.studies.compare.cluster import ClusterOptions, ClusterRunner, NodeRun, Slurm
from perada.studies.compare.launcher import read_cluster_file
from perada.studies.compare.node import code_versions
from perada.studies.compare.running import RunTask, attempt
from perada.system.yaml_files import YamlFileError
from tests import recipes
from tests.rejections import raises_naming, rejects

pytestmark = pytest.mark.usefixtures("no_waiting")
submitit = pytest.importorskip("submitit")

DISTILLING = {"federated": {"clients_per_round": 2}, "distillation": {"steps": 1, "batch_size": 4}}
TINY = yaml.safe_dump(recipes.recipe(data={"public_fraction": 0.2}, **DISTILLING))


@pytest.fixture
def no_waiting(monkeypatch):
    monkeypatch.setattr(cluster, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(cluster, "RESULT_SECONDS", 0.0)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return "tiny.yaml"


class StubJob:
    """In place of a job of submitit: its files are written by the test."""

    def __init__(self, folder, job_id):
        self.job_id = job_id
        names = ("result_pickle", "submitted_pickle", "stdout", "stderr")
        self.paths = SimpleNamespace(**{name: Path(folder, f"{job_id}.{name}") for name in names})

    def end(self, result):
        """Write the result and the log."""
        self.paths.result_pickle.write_bytes(pickle.dumps(result))
        self.paths.stderr.write_text("log")

    def result(self):
        return pickle.loads(self.paths.result_pickle.read_bytes())


class StubCluster:
    """In place of an executor of submitit and of Slurm.

    Attributes:
        arrays: Ids of the jobs of each submission.
        submitted: Jobs by id.
        states_now: States of jobs by id; None if it does not answer.
        cancelled: Ids of jobs that were cancelled.
    """

    job_class = StubJob

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.arrays = []
        self.submitted = {}
        self.states_now = {}
        self.cancelled = []

    @contextmanager
    def batch(self):
        self.arrays.append([])
        yield

    def submit(self, run):
        array = self.arrays[-1]
        job = StubJob(self.folder, f"{len(self.arrays)}_{len(array)}")
        array.append(job.job_id)
        self.submitted[job.job_id] = (run, job)
        self.states_now[job.job_id] = "PENDING"
        return job

    def end(self, job_id, result=None):
        """End a job; without a result it leaves no file."""
        if result is not None:
            self.submitted[job_id][1].end(result)
        self.states_now.pop(job_id)

    def states(self, jobs):
        if self.states_now is None:
            return None
        return {job.job_id: self.states_now[job.job_id] for job in jobs if job.job_id in self.states_now}

    def cancel(self, jobs):
        self.cancelled += [job.job_id for job in jobs]


@pytest.fixture
def stub(tmp_path):
    return StubCluster(tmp_path / "jobs" / "logs")


def runner_of(stub, **options):
    return ClusterRunner(build_compared, ClusterOptions(**options), 1, False, stub.folder.parent, stub, stub)


def tasks_of(*names):
    return [RunTask([name], scores_start=False) for name in names]


def test_results_come_as_jobs_end_each_after_its_start(stub):
    events = runner_of(stub)(tasks_of("a", "b", "c"))
    # The generator submits, and waits for the first job to start.
    stub_states = iter([{"1_1": "RUNNING"}, {}])

    def advance(seconds):
        for job_id in next(stub_states, ()):
            stub.states_now[job_id] = "RUNNING"
            return
        for number, job_id in enumerate(("1_2", "1_0", "1_1")):
            if job_id in stub.states_now:
                stub.end(job_id, {"run": number})
                return

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.time, "sleep", advance)
        seen = list(events)
    assert [(event.number, event.result) for event in seen] == [
        (1, None),
        (2, None),
        (2, {"run": 0}),
        (0, None),
        (0, {"run": 1}),
        (1, {"run": 2}),
    ]
    assert stub.arrays == [["1_0", "1_1", "1_2"]]
    left = [path.name for path in stub.folder.parent.rglob("*") if path.is_file()]
    assert left == []


@pytest.mark.parametrize("state", ["CANCELLED", "OUT_OF_MEMORY", "NODE_FAIL"])
def test_a_killed_job_is_a_failed_run_that_names_its_job_and_log(stub, state):
    events = runner_of(stub)(tasks_of("a"))

    def kill(seconds):
        stub.states_now["1_0"] = state
        stub.submitted["1_0"][1].paths.stderr.write_text("Killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.time, "sleep", kill)
        _, (_, result) = list(events)
    log = stub.folder / "1_0.stderr"
    for fact in (state, "1_0", str(log)):
        assert fact in result["failed"]
    assert log.is_file()


def test_a_job_without_a_log_names_the_folder_that_the_nodes_do_not_share(stub):
    events = runner_of(stub)(tasks_of("a"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.time, "sleep", lambda seconds: stub.states_now.update({"1_0": "FAILED"}))
        _, (_, result) = list(events)
    assert str(stub.folder) in result["failed"] and "--output" in result["failed"]


def test_waiting_survives_a_controller_that_does_not_answer(stub):
    events = runner_of(stub)(tasks_of("a"))
    looks = []

    def advance(seconds):
        looks.append(stub.states_now)
        stub.states_now = None
        if len(looks) == 3:
            stub.states_now = {"1_0": "RUNNING"}
            stub.end("1_0", {"run": 1})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.time, "sleep", advance)
        assert [result for _, result in events] == [None, {"run": 1}]
    assert len(looks) == 3


def test_a_second_command_takes_over_the_jobs_of_one_that_was_killed(stub):
    events = runner_of(stub)(tasks_of("a", "b", "c"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.time, "sleep", lambda seconds: stub.states_now.update({"1_2": "RUNNING"}))
        next(events)
    events.close()
    stub.end("1_0", {"run": 0})  # ended meanwhile
    stub.states_now["1_1"] = "CANCELLED"  # without a result
    with pytest.MonkeyPatch.context() as patch:

        def end_all(seconds):
            for job_id in ("1_2", "2_0"):
                if job_id in stub.states_now:
                    stub.end(job_id, {"run": job_id})

        patch.setattr(cluster.time, "sleep", end_all)
        results = {number: result for number, result in runner_of(stub)(tasks_of("a", "b", "c")) if result}
    assert results == {0: {"run": 0}, 1: {"run": "2_0"}, 2: {"run": "1_2"}}


def test_a_second_command_repeats_a_run_that_failed_meanwhile(stub):
    events = runner_of(stub)(tasks_of("a"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.time, "sleep", lambda seconds: stub.states_now.update({"1_0": "RUNNING"}))
        next(events)
    events.close()
    stub.end("1_0", {"failed": "the disk was full"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.time, "sleep", lambda seconds: stub.end("2_0", {"run": 2}))
        assert [result for _, result in runner_of(stub)(tasks_of("a"))] == [None, {"run": 2}]


def test_a_job_that_does_not_start_in_the_time_of_a_search_is_cancelled(stub):
    task = RunTask(["a"], False, end_by=time.time() - 1)
    _, (_, result) = list(runner_of(stub)([task]))
    assert "1_0" in result["failed"] and "allow more" in result["failed"]
    assert stub.cancelled == ["1_0"]


def test_jobs_of_other_code_are_not_taken_over(stub, monkeypatch):
    for versions in ({"perada": "1"}, {"perada": "2"}):
        monkeypatch.setattr(cluster, "code_versions", lambda versions=versions: versions)
        events = runner_of(stub)(tasks_of("a"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                cluster.time, "sleep", lambda seconds: stub.states_now.update({stub.arrays[-1][0]: "RUNNING"})
            )
            next(events)
        events.close()
    assert stub.arrays == [["1_0"], ["2_0"]]


def test_many_runs_are_several_arrays(stub, monkeypatch):
    monkeypatch.setattr(cluster, "MOST_JOBS_OF_ARRAY", 2)

    def end_all(seconds):
        for job_id in list(stub.states_now):
            stub.end(job_id, {"run": job_id})

    monkeypatch.setattr(cluster.time, "sleep", end_all)
    events = list(runner_of(stub)(tasks_of("a", "b", "c")))
    assert stub.arrays == [["1_0", "1_1"], ["2_0"]]
    assert {number: result["run"] for number, result in events if result} == {0: "1_0", 1: "1_1", 2: "2_0"}


def test_only_jobs_without_a_result_are_cancelled(stub, monkeypatch):
    runner = runner_of(stub)
    monkeypatch.setattr(cluster.time, "sleep", lambda seconds: stub.end("1_1", {"run": 1}))
    for _, result in runner(tasks_of("a", "b")):
        if result is not None:
            break
    runner.cancel()
    assert stub.cancelled == ["1_0"]


def test_states_are_read_from_squeue(tmp_path, monkeypatch):
    jobs = [StubJob(tmp_path, job_id) for job_id in ("7_0", "7_11", "8")]
    write_program(tmp_path, monkeypatch, "squeue", 'echo "$@" > asked; printf "7_0 RUNNING\\n7_11 TIMEOUT\\n"')
    assert Slurm().states(jobs) == {"7_0": "RUNNING", "7_11": "TIMEOUT"}
    assert "--jobs=7,8" in (tmp_path / "asked").read_text()
    write_program(tmp_path, monkeypatch, "squeue", "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")
    assert Slurm().states(jobs) == {}
    write_program(tmp_path, monkeypatch, "squeue", "echo Unable to contact slurm controller >&2; exit 1")
    assert Slurm().states(jobs) is None


def write_program(folder, monkeypatch, name, script):
    """Write a program that is found before others."""
    monkeypatch.chdir(folder)
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    (programs / name).write_text(f"#!/bin/sh\n{script}\n")
    (programs / name).chmod(0o755)
    if str(programs) not in os.environ["PATH"]:
        monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def login_node(recipe, tmp_path, monkeypatch):
    """Programs of a Slurm with the partitions gpu, up to two hours, and cpu."""
    for name in ("srun", "squeue", "scancel"):
        write_program(tmp_path, monkeypatch, name, "exit 1")
    write_program(tmp_path, monkeypatch, "sinfo", 'printf "gpu|2:00:00|up\\ncpu|infinite|up\\n"')
    write_program(tmp_path, monkeypatch, "sbatch", 'echo "$@" >> asked')


COMMAND = ("compare", "tiny.yaml", "--algorithms", "fedavg")
SLURM = (*COMMAND, "--launcher", "slurm", "--output", "results.json")


@pytest.mark.parametrize(
    ("option", "value"), [("partition", "gpu"), ("time", 30), ("gpus", 1), ("cpus", 2), ("array_parallelism", 3)]
)
def test_options_of_jobs_are_rejected_without_a_cluster(recipe, option, value):
    with rejects(f"--{option}", value, "--launcher"):
        main([*COMMAND, f"--{option}={value}"])


def test_a_file_of_options_is_rejected_without_a_cluster(recipe, tmp_path):
    (tmp_path / "jobs.yaml").write_text("partition: gpu")
    with rejects("--cluster", "jobs.yaml", "--launcher"):
        main([*COMMAND, "--cluster=jobs.yaml"])


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--jobs", "2"], ["--jobs", "--array_parallelism"]),
        (["--partition", "gpus"], ["--partition", "gpus", "gpu"]),
        (["--partition", "gpu,cqu"], ["--partition", "cqu", "cpu"]),
        (["--partition", "gpu", "--time", "300"], ["--time", 300, 120, "gpu"]),
        (["--time", "1"], ["--time", 1]),
        (["--cpus", "2", "--threads", "4"], ["--cpus", 2, "--threads"]),
        (["--cluster", "none.yaml"], ["--cluster", "none.yaml"]),
    ],
)
def test_options_that_cannot_be_are_rejected_before_anything_is_run(login_node, words, facts):
    with raises_naming((ValueError, FileNotFoundError), *facts):
        main([*SLURM, *words])


def test_results_in_memory_cannot_be_shared_with_nodes(login_node):
    with raises_naming(ValueError, "--launcher", "--output"):
        main([*COMMAND, "--launcher", "slurm"])


def test_a_search_must_know_how_many_jobs_run_at_once(login_node):
    with raises_naming(ValueError, "--array_parallelism", "budget"):
        main(["choose", "tiny.yaml", "--launcher", "slurm", "--output", "choice"])


def test_a_search_that_had_only_submitted_jobs_goes_on(login_node, tmp_path):
    (tmp_path / "choice" / "jobs").mkdir(parents=True)
    with raises_naming(ValueError, "--array_parallelism"):  # after the check of the folder
        main(["choose", "tiny.yaml", "--launcher", "slurm", "--output", "choice"])
    (tmp_path / "choice" / "notes.txt").touch()
    with raises_naming(FileExistsError, "--output", "choice"):
        main(["choose", "tiny.yaml", "--launcher", "slurm", "--output", "choice"])


def test_what_slurm_rejects_is_told_with_its_reason(login_node, tmp_path, monkeypatch):
    write_program(tmp_path, monkeypatch, "sbatch", "echo allocation failure: Invalid account >&2; exit 1")
    (tmp_path / "jobs.yaml").write_text("account: nobody\n")
    with raises_naming(ValueError, "Invalid account", "--account=nobody"):
        main([*SLURM, "--cluster=jobs.yaml"])


def test_a_slurm_that_does_not_answer_is_told(login_node, tmp_path, monkeypatch):
    write_program(tmp_path, monkeypatch, "sinfo", "echo Unable to contact slurm controller >&2; exit 1")
    with raises_naming(ConnectionError, "Unable to contact slurm controller", "sinfo"):
        main([*SLURM])


def test_a_machine_without_slurm_is_told(recipe, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with raises_naming(FileNotFoundError, "sbatch", "login node"):
        main([*SLURM])


def test_submitit_is_named_where_it_is_not_installed(recipe, monkeypatch):
    monkeypatch.setattr("perada.core.checks.find_spec", lambda name: None)
    with raises_naming(ModuleNotFoundError, "submitit", "pip install 'perada[cluster]'"):
        main([*SLURM])


def test_a_file_has_any_options_of_sbatch_and_the_command_line_prevails(login_node, tmp_path, monkeypatch):
    (tmp_path / "jobs.yaml").write_text(
        "partition: gpu\ntime: 90\narray_parallelism: 7\naccount: lab\nsetup: [module load cuda]\n"
    )
    options = read_cluster_file(Path("jobs.yaml"))
    parameters = options.submitit_parameters(threads=2)
    assert (parameters["partition"], parameters["time"], parameters["cpus_per_task"]) == ("gpu", 90, 2)
    assert parameters["array_parallelism"] == 7
    assert parameters["additional_parameters"] == {"requeue": True, "account": "lab"}
    assert parameters["setup"][0] == "module load cuda"
    write_program(tmp_path, monkeypatch, "sbatch", 'echo "$@" >> asked; exit 1')
    with raises_naming(ValueError, "--time=30"):
        main([*SLURM, "--cluster=jobs.yaml", "--time=30"])
    asked = (tmp_path / "asked").read_text()
    assert "--test-only" in asked
    for word in ("--account=lab", "--partition=gpu", "--time=30", "--cpus-per-task=1"):
        assert word in asked


@pytest.mark.parametrize(
    ("content", "facts"),
    [("setup: module load cuda", ["setup"]), ("account: [a, b]", ["account"]), ("time: soon", ["--time", "soon"])],
)
def test_values_that_a_file_cannot_have(login_node, tmp_path, content, facts):
    (tmp_path / "jobs.yaml").write_text(content)
    with raises_naming((ValueError, YamlFileError), *facts):
        main([*SLURM, "--cluster=jobs.yaml"])


def test_jobs_get_threads_and_memory_as_sbatch_reads_them(tmp_path):
    """The script that submitit writes, whose signal and requeue the checkpoints depend on."""
    executor = submitit.SlurmExecutor.__new__(submitit.SlurmExecutor)
    parameters = ClusterOptions(gpus=1, other_options={"mem": "8G"}).submitit_parameters(threads=4)
    text = submitit.slurm.slurm._make_sbatch_string(command="true", folder=tmp_path, **parameters)
    del executor
    for line in ("--requeue", "--mem=8G", "--cpus-per-task=4", "--gpus-per-node=1", "--time=60", "--open-mode=append"):
        assert f"#SBATCH {line}" in text
    assert "export OMP_NUM_THREADS=4" in text
    assert f"--signal=USR2@{cluster.SIGNAL_SECONDS}" in text


def never_called(args):
    raise AssertionError("the run began")


def test_a_node_with_other_code_makes_no_run():
    versions = code_versions() | {"torch": "0.1"}
    run = NodeRun(never_called, RunTask(["a"], False), 1, False, 60, versions)
    failed = run()["failed"]
    assert "torch" in failed and "0.1" in failed


def test_a_changed_source_is_other_code(tmp_path, monkeypatch):
    before = code_versions()
    copy = tmp_path / "perada"
    # The links lead to packages that belong to it.
    shutil.copytree(node.package_folder(), copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(node, "package_folder", lambda: copy)
    assert code_versions() == before
    with (copy / "studies" / "compare" / "node.py").open("a") as file:
        file.write("# edited")
    assert code_versions()["perada"] != before["perada"]
    assert code_versions()["torch"] == before["torch"]


@pytest.mark.parametrize(("minutes_ago", "saved", "goes_on"), [(50, True, True), (50, False, False), (1, False, True)])
def test_a_run_starts_again_unless_a_whole_job_was_not_enough_for_a_round(tmp_path, minutes_ago, saved, goes_on):
    """A job that is pre-empted early has saved nothing, and starts again nevertheless."""
    kept_round = tmp_path / "round.ckpt"
    run = NodeRun(never_called, RunTask(["a"], False, kept_round=kept_round), 1, False, 60, {})
    run._started_at = time.time() - 60 * minutes_ago
    if saved:
        kept_round.touch()
    if goes_on:
        assert run.checkpoint().function is run
    else:
        with raises_naming(TimeoutError, "--time", 60):
            run.checkpoint()


class Killed(SystemExit):
    """Raised where a job is told to end."""


class EndOfJob(pl.Callback):
    """Ends a run in the middle of a round."""

    def __init__(self, round):
        self.round = round

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == self.round:
            raise Killed


def ended_in(round, args):
    """Build a run that is ended in a round."""
    cli = build_compared(args)
    cli.trainer.callbacks.append(EndOfJob(round))
    return cli


def without_times(result):
    times = ("seconds", "seconds_per_round", "seconds_of_rounds")
    return {name: value for name, value in result["run"].items() if name not in times}


@pytest.fixture
def restored_signals():
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def kept(made, args):
    """Build a run, and keep it, so that its models can be compared."""
    cli = build_compared(args)
    made.append(cli)
    return cli


def states_of(cli):
    """Return the tensors of all global and personal states of a run."""
    global_states, personal_of = federation_states(cli.loop.context.federation)
    states = [*global_states]
    if personal_of is not None:
        states += [personal_of(client) for client in range(cli.loop.num_clients)]
    return states


@pytest.mark.usefixtures("restored_signals")
def test_a_run_goes_on_from_its_last_round_to_the_bit(recipe, tmp_path):
    args = ["--config", recipe, "--trainer.logger=false", "--trainer.max_epochs=3"]
    args += ["--trainer.check_val_every_n_epoch=1", "--trainer.enable_progress_bar=false"]
    runs = []
    whole = attempt(partial(kept, runs), RunTask(args, True), threads=1)
    kept_round = tmp_path / "round.ckpt"
    task = RunTask(args, True, kept_round=kept_round)
    for round in (1, 2):
        with pytest.raises(Killed):
            attempt(partial(ended_in, round), task, threads=1)
        assert kept_round.is_file()
    resumed = attempt(partial(kept, runs), task, threads=1)
    assert whole["run"]["history"][0]["round"] == 1  # scored after every round
    assert without_times(resumed) == without_times(whole)
    assert resumed["start"] == whole["start"]
    states, resumed_states = map(states_of, runs)
    assert len(states) >= 4  # the global model and those of three clients
    for state, resumed_state in zip(states, resumed_states, strict=True):
        assert state.keys() == resumed_state.keys()
        for name, tensor in state.items():
            assert torch.equal(tensor, resumed_state[name])


@pytest.mark.usefixtures("restored_signals")
def test_a_damaged_round_is_not_gone_on_from(recipe, tmp_path):
    args = ["--config", recipe, "--trainer.logger=false", "--trainer.enable_progress_bar=false"]
    kept_round = tmp_path / "round.ckpt"
    kept_round.write_bytes(b"half of a file")
    result = attempt(build_compared, RunTask(args, False, kept_round=kept_round), threads=1)
    assert "failed" not in result


def test_runs_with_other_images_are_rejected_on_a_node(recipe, tmp_path):
    args = ["--config", recipe, "--trainer.logger=false", "--trainer.enable_progress_bar=false"]
    task = RunTask(args, False, data_folder=tmp_path / "data")
    assert "failed" not in attempt(build_compared, task, threads=1)
    (record,) = (tmp_path / "data").iterdir()
    content = json.loads(record.read_text())
    content["digests"]["train"] = "0" * 16
    content["node"] = "alpha"
    record.write_text(json.dumps(content))
    failed = attempt(build_compared, task, threads=1)["failed"]
    for fact in ("training images", "alpha", str(record)):
        assert fact in failed


def test_an_edited_recipe_is_rejected_on_a_node(recipe):
    task = RunTask(["--config", recipe, "--trainer.logger=false"], False, recipe_digest="0" * 12)
    failed = attempt(build_compared, task, threads=1)["failed"]
    assert recipe in failed and "--output" in failed


class LocalJobs:
    """The states of jobs of submitit's LocalExecutor, which are processes of this machine."""

    def states(self, jobs):
        return {job.job_id: "RUNNING" for job in jobs if not job.done()}

    def cancel(self, jobs):
        for job in jobs:
            job.cancel()


@pytest.mark.slow
def test_jobs_of_submitit_give_what_processes_of_this_machine_give(recipe, tmp_path):
    args = ["--config", recipe, "--trainer.logger=false"]
    local = attempt(build_compared, RunTask([*args, "--trainer.enable_progress_bar=false"], False), threads=1)
    executor = submitit.LocalExecutor(tmp_path / "jobs" / "logs")
    executor.update_parameters(timeout_min=5)
    runner = ClusterRunner(build_compared, ClusterOptions(), 1, False, tmp_path / "jobs", executor, LocalJobs())
    tasks = [RunTask(args, False), RunTask([*args, "--seed_everything=nothing"], False)]
    results = {number: result for number, result in runner(tasks) if result is not None}
    assert without_times(results[0]) == without_times(local)
    assert "seed_everything" in results[1]["failed"]
