# SPDX-License-Identifier: Apache-2.0
"""Runs as jobs of a Slurm cluster, by submitit."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from perada.core.checks import check_installed, check_known, invalid_option
from perada.studies.compare.configured import MakeCLI
from perada.studies.compare.node import check_code, code_versions
from perada.studies.compare.running import NO_PROGRESS_BAR, CarryOut, Event, Result, RunTask, attempt

PROGRAMS = ("sbatch", "srun", "squeue", "sinfo", "scancel")
"""Programs of Slurm that are called, by perada or by submitit."""
MOST_JOBS_OF_ARRAY = 1000
"""Slurm accepts no larger array unless its MaxArraySize was changed."""
MOST_AT_ONCE = 256
"""Jobs at once by default."""
POLL_SECONDS = 2.0
"""Seconds between two looks at the jobs, at first."""
LONGEST_POLL_SECONDS = 30.0
"""Seconds between two looks at jobs of which none has started or ended for a while; each look asks Slurm once."""
RESULT_SECONDS = 60.0
"""Seconds for which a shared file system may hide the result of a job that has ended."""
SIGNAL_SECONDS = 60
"""Seconds before the end of its time at which a job is told to end and start again. Slurm may be a minute early."""
MOST_TIMEOUTS = 10_000
"""Times that a job may start again. A run that gets no further fails before that, see :class:`NodeRun`."""
ALIVE = frozenset(
    "PENDING CONFIGURING RUNNING COMPLETING REQUEUED RESIZING SUSPENDED STOPPED SIGNALING STAGE_OUT".split()
)
"""States of jobs that may still have a result."""
WITHOUT_RESULT = frozenset("CANCELLED TIMEOUT NODE_FAIL OUT_OF_MEMORY PREEMPTED DEADLINE BOOT_FAIL".split())
"""States of jobs that were killed."""
GONE = "GONE"
"""State of a job that Slurm does not know, or does not know any more."""


@dataclass(frozen=True)
class ClusterOptions:
    """What each job asks the cluster for.

    Attributes:
        partition: Partition; None for the default one.
        time: Minutes after which a job ends and starts again, and its run goes on.
        gpus: GPUs of a job.
        cpus: Cores of a job; None for as many as the run has threads.
        array_parallelism: Jobs at once; None for :data:`MOST_AT_ONCE`.
        setup: Lines of shell that a job runs first, such as ``module load cuda``.
        other_options: Further options of ``sbatch`` by name, without the dashes.
    """

    partition: str | None = None
    time: int = 60
    gpus: int = 0
    cpus: int | None = None
    array_parallelism: int | None = None
    setup: tuple[str, ...] = ()
    other_options: Mapping[str, Any] = field(default_factory=dict)

    def sbatch_words(self, threads: int) -> list[str]:
        """Return what determines whether Slurm accepts a job, as options of ``sbatch``."""
        options = {"time": self.time, "cpus-per-task": self.cpus or threads, **self.other_options}
        if self.partition is not None:
            options["partition"] = self.partition
        if self.gpus:
            options["gpus-per-node"] = self.gpus
        words = []
        for name, value in options.items():
            option = f"--{name.replace('_', '-')}"
            words.append(option if value is True else f"{option}={value}")
        return words

    def submitit_parameters(self, threads: int) -> dict[str, Any]:
        """Return the parameters of submitit's ``SlurmExecutor``."""
        # Libraries read the first variable as they are imported; the second is set as for runs on one machine.
        environment = [f"export OMP_NUM_THREADS={threads} PYTHONSAFEPATH=1"]
        executor_options: dict[str, Any] = {
            "job_name": "perada",
            "time": self.time,
            "cpus_per_task": self.cpus or threads,
            "array_parallelism": self.array_parallelism or MOST_AT_ONCE,
            "signal_delay_s": SIGNAL_SECONDS,
            "setup": [*self.setup, *environment],
            # Slurm starts a job again whose node fails, unless the cluster's default is changed.
            "additional_parameters": {"requeue": True, **self.other_options},
        }
        if self.partition is not None:
            executor_options["partition"] = self.partition
        if self.gpus:
            executor_options["gpus_per_node"] = self.gpus
        return executor_options


def check_cluster(options: ClusterOptions, threads: int) -> None:
    """Check, before anything is run, that Slurm would accept the jobs.

    Args:
        options: What each job asks for.
        threads: Threads of each run.

    Raises:
        ModuleNotFoundError: If submitit is not installed.
        FileNotFoundError: If a program of Slurm is not found.
        ValueError: If there is no such partition, or Slurm rejects an option.
        ConnectionError: If Slurm does not answer.
    """
    check_installed("--launcher slurm", "cluster", "submitit")
    for program in PROGRAMS:
        if shutil.which(program) is None:
            raise FileNotFoundError(
                f"--launcher slurm: {program!r} of Slurm is not found; start the command on a login node of the "
                "cluster, or leave --launcher out"
            )
    if options.cpus is not None and options.cpus < threads:
        raise invalid_option("--cpus", options.cpus, f"at least {threads}, the number of --threads")
    _check_partition(options)
    answer = _run_command("sbatch", "--test-only", *options.sbatch_words(threads), "--wrap=true")
    if answer.returncode:
        reason = " ".join(answer.stderr.split())
        rejected_options = " ".join(options.sbatch_words(threads))
        raise ValueError(
            f"--launcher slurm: Slurm rejects a job with {rejected_options} ({reason}); change these options"
        )


def _check_partition(options: ClusterOptions) -> None:
    """Raise a ValueError if there is no such partition, or its jobs may not be as long."""
    answer = _run_command("sinfo", "--noheader", "--format=%R|%l|%a")
    if answer.returncode:
        reason = " ".join(answer.stderr.split())
        raise ConnectionError(f"--launcher slurm: Slurm does not answer ({reason}); try again when `sinfo` does")
    longest_minutes = {}
    for line in answer.stdout.splitlines():
        name, limit, _ = line.split("|")
        longest_minutes[name.strip()] = _parse_minutes(limit)
    if options.partition is None:
        return
    for name in options.partition.split(","):  # Slurm takes the first of several that has room
        check_known("--partition", name, longest_minutes)
        limit_of_partition = longest_minutes[name]
        if limit_of_partition is not None and options.time > limit_of_partition:
            raise invalid_option(
                "--time", options.time, f"at most {limit_of_partition} minutes, the limit of partition {name!r}"
            )


def _parse_minutes(limit: str) -> int | None:
    """Return the minutes of a time limit as Slurm prints it; None for no limit.

    >>> _parse_minutes("30:00"), _parse_minutes("2:00:00"), _parse_minutes("1-12:00:00"), _parse_minutes("infinite")
    (30, 120, 2160, None)
    """
    days, _, clock = limit.rpartition("-")
    numbers = clock.split(":")
    if not all(number.isdigit() for number in (*numbers, days or "0")):
        return None
    seconds = 0
    for number in numbers:
        seconds = 60 * seconds + int(number)
    return int(days or 0) * 24 * 60 + seconds // 60


def _run_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)


class NodeRun:
    """A run as a job: called on the node, and called again there when the job starts again.

    Args:
        make_cli: See :data:`~perada.studies.compare.configured.MakeCLI`.
        task: The run.
        threads: Its threads.
        anonymous: Whether to leave out the names of clients.
        minutes: Time of a job.
        versions: Versions on the machine that submits it (:func:`~perada.studies.compare.node.code_versions`).
    """

    def __init__(
        self,
        make_cli: MakeCLI,
        task: RunTask,
        threads: int,
        anonymous: bool,
        minutes: int,
        versions: Mapping[str, str],
    ) -> None:
        self.make_cli = make_cli
        self.task = task
        self.threads = threads
        self.anonymous = anonymous
        self.minutes = minutes
        self.versions = versions
        self._started_at = 0.0

    def __call__(self) -> Result:
        """Make the run, and return its result."""
        self._started_at = time.time()
        # Lightning would set up a run of all tasks of the job, and requeue the job by itself.
        os.environ.pop("SLURM_NTASKS", None)
        try:
            check_code(self.versions)
        except ValueError as error:
            return {"failed": f"{type(error).__name__}: {error}", "seconds": 0.0}
        return attempt(self.make_cli, self.task, self.threads, self.anonymous)

    def checkpoint(self) -> Any:  # noqa: ANN401  # submitit's DelayedSubmission
        """Return what submitit runs when the job starts again. Submitit calls this at the end of the job's time.

        Raises:
            TimeoutError: If a whole job was not enough for one round.
        """
        from submitit.helpers import DelayedSubmission

        is_timeout = time.time() - self._started_at > 30 * self.minutes  # half of the time
        kept_round = self.task.kept_round
        has_saved = kept_round is not None and kept_round.is_file() and kept_round.stat().st_mtime > self._started_at
        if is_timeout and not has_saved:
            raise TimeoutError(
                f"no round was finished within --time {self.minutes} (minutes), so that the run would never end; allow "
                "more time"
            )
        return DelayedSubmission(self)


class ClusterJob(Protocol):
    """A job of submitit."""

    job_id: str
    paths: Any

    def result(self) -> Result:
        """Return the result of a job that has one."""


class Scheduler(Protocol):
    """Tells the states of jobs, and ends jobs."""

    def states(self, jobs: Sequence[ClusterJob]) -> dict[str, str] | None:
        """Return the states of jobs by their ids, without those that are not known; None if there is no answer."""

    def cancel(self, jobs: Sequence[ClusterJob]) -> None:
        """End jobs."""


class Slurm:
    """Asks ``squeue``, which answers also where a cluster keeps no accounts for ``sacct``, submitit's source."""

    def states(self, jobs: Sequence[ClusterJob]) -> dict[str, str] | None:
        """Return the states of jobs by their ids, without those that are not known; None if there is no answer."""
        ids = sorted({job.job_id.partition("_")[0] for job in jobs})
        answer = _run_command(
            "squeue", "--noheader", "--states=all", "--array", "--format=%i %T", f"--jobs={','.join(ids)}"
        )
        if answer.returncode:
            # Jobs that ended some minutes ago are forgotten.
            return {} if "Invalid job id" in answer.stderr else None
        states = {}
        for line in answer.stdout.splitlines():
            job_id, state = line.split()
            states[job_id] = state
        return states

    def cancel(self, jobs: Sequence[ClusterJob]) -> None:
        """End jobs."""
        if jobs:
            _run_command("scancel", *(job.job_id for job in jobs))


class Waiting(NamedTuple):
    """A job without a result.

    Attributes:
        job: The job.
        task: Its run.
        ended_at: When it was first seen to have ended; None if it has not.
    """

    job: ClusterJob
    task: RunTask
    ended_at: float | None = None


class ClusterRunner:
    """Makes runs as jobs, an array for each call; see :data:`~perada.studies.compare.running.CarryOut`.

    The folder has a file for each run that was submitted and whose result was not yet taken over. After this program
    was killed, another one with the same runs takes over their jobs.

    Args:
        make_cli: See :data:`~perada.studies.compare.configured.MakeCLI`.
        options: What each job asks for.
        threads: Threads of each run.
        anonymous: Whether to leave out the names of clients.
        folder: Folder of the jobs, which all nodes share.
        executor: Executor of submitit.
        scheduler: Tells the states of its jobs.
    """

    def __init__(
        self,
        make_cli: MakeCLI,
        options: ClusterOptions,
        threads: int,
        anonymous: bool,
        folder: Path,
        executor: Any,  # noqa: ANN401  # of submitit, which is optional
        scheduler: Scheduler,
    ) -> None:
        self.make_cli = make_cli
        self.options = options
        self.threads = threads
        self.anonymous = anonymous
        self.folder = folder
        self.executor = executor
        self.scheduler = scheduler
        self.versions = code_versions()
        self._waiting: dict[int, Waiting] = {}

    def __call__(self, tasks: Sequence[RunTask]) -> Generator[Event]:
        """Submit runs, and yield starts and results as they come."""
        for start in range(0, len(tasks), MOST_JOBS_OF_ARRAY):
            yield from self._run_array(tasks[start : start + MOST_JOBS_OF_ARRAY], start)

    def cancel(self) -> None:
        """End all jobs that have no result."""
        self.scheduler.cancel([waiting.job for waiting in self._waiting.values()])

    def _run_array(self, tasks: Sequence[RunTask], first_number: int) -> Generator[Event]:
        keys = [self._key_of(task) for task in tasks]
        jobs = self._find_or_submit(tasks, keys)
        self._waiting = {}
        for index, (job, task) in enumerate(zip(jobs, tasks, strict=True)):
            self._waiting[index] = Waiting(job, task)
        started = set()
        seconds_to_next = POLL_SECONDS
        while self._waiting:
            results, running = self._poll_jobs()
            for index in [*running, *results]:
                if index not in started:
                    started.add(index)
                    yield Event(first_number + index, None)
            for index, result in results.items():
                job = self._waiting.pop(index).job
                yield Event(first_number + index, result)
                self._clean_up(keys[index], job, result)
            seconds_to_next = POLL_SECONDS if results else min(1.2 * seconds_to_next, LONGEST_POLL_SECONDS)
            if self._waiting:
                time.sleep(seconds_to_next)

    def _poll_jobs(self) -> tuple[dict[int, Result], list[int]]:
        """Return the results that have come, and which jobs run."""
        states = self.scheduler.states([waiting.job for waiting in self._waiting.values()])
        results: dict[int, Result] = {}
        running = []
        for index, waiting in list(self._waiting.items()):
            if waiting.job.paths.result_pickle.is_file():
                results[index] = _read_result(waiting.job)
            elif states is not None:
                state = states.get(waiting.job.job_id, GONE)
                if state == "RUNNING":
                    running.append(index)
                failure = self._failure_of(index, state)
                if failure:
                    results[index] = {"failed": failure, "seconds": 0.0}
        return results, running

    def _failure_of(self, index: int, job_state: str) -> str:
        """Return why a job in some state will have no result; empty if it may have one."""
        job, task, ended_at = self._waiting[index]
        if job_state in ALIVE:
            self._waiting[index] = Waiting(job, task)
            if job_state == "PENDING" and task.end_by is not None and time.time() > task.end_by:
                self.scheduler.cancel([job])
                return f"the time for all runs was over before Slurm started its job {job.job_id}; allow more"
            return ""
        if ended_at is None:
            ended_at = time.monotonic()
            self._waiting[index] = Waiting(job, task, ended_at)
        may_be_hidden = job_state not in WITHOUT_RESULT and time.monotonic() - ended_at <= RESULT_SECONDS
        return "" if may_be_hidden else self._why_without_result(job, job_state)

    def _why_without_result(self, job: ClusterJob, job_state: str) -> str:
        log = job.paths.stderr
        if not log.is_file() and job_state not in WITHOUT_RESULT:
            return (
                f"its job {job.job_id} ended ({job_state}) and left no log in {str(log.parent)!r}; the nodes must "
                "share this folder with the machine that starts the command: choose such a folder with --output"
            )
        text = f"its job {job.job_id} was ended by Slurm ({job_state}) before the run was done"
        if log.is_file():
            text += f"; its log is {str(log)!r}"
        return text

    def _find_or_submit(self, tasks: Sequence[RunTask], keys: Sequence[str]) -> list[ClusterJob]:
        """Return a job for each run: that of an earlier program if it goes on or has a result, or a new one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        job_of_index = self._find_jobs(keys)
        new = [index for index in range(len(tasks)) if index not in job_of_index]
        runs = [self._node_run(tasks[index], keys[index]) for index in new]
        if runs:
            with self.executor.batch():
                submitted = [self.executor.submit(run) for run in runs]
            for index, job in zip(new, submitted, strict=True):
                job_of_index[index] = job
                self._file_of_job(keys[index]).write_text(job.job_id, encoding="utf-8")
            first_id = submitted[0].job_id.partition("_")[0]
            print(f"{len(runs)} jobs submitted ({first_id}); their logs are in {self.folder}", flush=True)
        if len(job_of_index) > len(new):
            print(f"{len(job_of_index) - len(new)} jobs of an earlier command are waited for", flush=True)
        return [job_of_index[index] for index in range(len(tasks))]

    def _find_jobs(self, keys: Sequence[str]) -> dict[int, ClusterJob]:
        """Return the jobs of an earlier program that go on or have succeeded, by the number of their run."""
        found: dict[int, ClusterJob] = {}
        for index, key in enumerate(keys):
            with suppress(FileNotFoundError):
                job_id = self._file_of_job(key).read_text(encoding="utf-8")
                found[index] = self.executor.job_class(folder=self.executor.folder, job_id=job_id)
        if not found:
            return {}
        states = self.scheduler.states(list(found.values()))
        if states is None:
            raise ConnectionError(
                "Slurm does not tell whether the jobs of an earlier command still run; try again when `squeue` answers"
            )
        kept = {}
        for index, job in found.items():
            if job.paths.result_pickle.is_file():
                goes_on = "failed" not in _read_result(job)  # a command repeats what failed
            else:
                goes_on = states.get(job.job_id, GONE) in ALIVE
            if goes_on:
                kept[index] = job
        return kept

    def _node_run(self, task: RunTask, key: str) -> NodeRun:
        """Return what a job runs."""
        # The nodes must find all files from their own root folder.
        folder = self.folder.absolute()
        task = task._replace(
            args=[*task.args, NO_PROGRESS_BAR], kept_round=folder / f"{key}.ckpt", data_folder=folder / "data"
        )
        return NodeRun(self.make_cli, task, self.threads, self.anonymous, self.options.time, self.versions)

    def _key_of(self, task: RunTask) -> str:
        """Return a name for what determines the result of a run."""
        last_round = None if task.segment is None else task.segment.last_round
        content = [list(task.args), task.scores_start, last_round, task.recipe_digest, self.threads, self.anonymous]
        return sha256(json.dumps([*content, self.versions]).encode()).hexdigest()[:16]

    def _file_of_job(self, key: str) -> Path:
        return self.folder / f"{key}.job"

    def _clean_up(self, key: str, job: ClusterJob, result: Result) -> None:
        """Delete the files of a job whose result was taken over, but not the log of a failed one."""
        self._file_of_job(key).unlink(missing_ok=True)
        for path in (job.paths.result_pickle, job.paths.submitted_pickle):
            path.unlink(missing_ok=True)
        if "failed" not in result:
            for path in (job.paths.stdout, job.paths.stderr, self.folder / f"{key}.ckpt"):
                path.unlink(missing_ok=True)


def _read_result(job: ClusterJob) -> Result:
    """Return the result of a job; the last line of the traceback if it ended with an error."""
    from submitit.core.utils import FailedJobError, UncompletedJobError

    try:
        return job.result()
    except (FailedJobError, UncompletedJobError) as error:
        lines = str(error).split("-" * 22)[1:2] or [str(error)]
        reason = lines[0].strip().splitlines()[-1]
        return {"failed": f"{reason} (its log is {str(job.paths.stderr)!r})", "seconds": 0.0}


@contextmanager
def cluster_runner(
    make_cli: MakeCLI, options: ClusterOptions, threads: int, anonymous: bool, folder: Path
) -> Iterator[CarryOut]:
    """Provide the function that runs tasks as jobs of Slurm. The jobs end if the ``with`` statement ends with an error.

    Args:
        make_cli: See :data:`~perada.studies.compare.configured.MakeCLI`.
        options: What each job asks for.
        threads: Threads of each run.
        anonymous: Whether to leave out the names of clients.
        folder: Folder of the jobs, which all nodes share.
    """
    import submitit

    executor = submitit.SlurmExecutor(folder=folder.absolute() / "logs", max_num_timeout=MOST_TIMEOUTS)
    executor.update_parameters(**options.submitit_parameters(threads))
    runner = ClusterRunner(make_cli, options, threads, anonymous, folder, executor, Slurm())
    try:
        yield runner
    except BaseException:
        runner.cancel()
        raise
    # Logs of failed jobs stay.
    for pattern in ("*_submission.sh", ".submission_file_*.sh"):
        for path in executor.folder.glob(pattern):
            path.unlink()
