# SPDX-License-Identifier: Apache-2.0
"""Where runs are made: in processes on this machine, or as jobs of a Slurm cluster."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveInt

from perada.core.checks import check_integer, invalid_option, without_effect
from perada.studies.compare.cluster import MOST_AT_ONCE, ClusterOptions, check_cluster, cluster_runner
from perada.studies.compare.configured import MakeCLI
from perada.studies.compare.running import CarryOut, task_runner
from perada.system.yaml_files import read_yaml

LAUNCHERS = ("local", "slurm")
OPTIONS_OF_JOBS = ("partition", "time", "gpus", "cpus", "array_parallelism")
"""Options of the command line for jobs of a cluster, which are also names in the file of ``--cluster``."""
FEWEST_MINUTES = 2
"""Slurm may end a job a minute early, and it is told a minute before."""


@dataclass(frozen=True)
class Launcher:
    """Where runs are made.

    Attributes:
        jobs: Runs at once.
        cluster: What each job asks a cluster for; None to make the runs on this machine.
        folder: Folder of the jobs, which the nodes share; None on this machine.
    """

    jobs: int
    cluster: ClusterOptions | None = None
    folder: Path | None = None

    @contextmanager
    def runner(self, make_cli: MakeCLI, threads: int, anonymous: bool) -> Iterator[CarryOut]:
        """Provide the function that makes runs.

        Args:
            make_cli: See :data:`~perada.studies.compare.configured.MakeCLI`.
            threads: Threads of each run.
            anonymous: Whether to leave out the names of clients.
        """
        if self.cluster is None or self.folder is None:
            with task_runner(make_cli, threads, self.jobs, anonymous) as carry_out:
                yield carry_out
            return
        with cluster_runner(make_cli, self.cluster, threads, anonymous, self.folder) as carry_out:
            yield carry_out


def read_launcher(arguments: Namespace, jobs: int | None, folder: Path | None) -> Launcher:
    """Return where a command makes its runs, and check that it can.

    Args:
        arguments: Options of the command, with those of :func:`add_launcher_options`.
        jobs: Value of ``--jobs``; None without one.
        folder: Folder of a cluster's jobs; None if the command was given no output.

    Raises:
        OptionError: If an option has no effect, or a value of it is invalid.
        ValueError: If jobs would have no shared folder, or Slurm rejects them.
    """
    command_line: dict[str, Any] = {}
    for name in OPTIONS_OF_JOBS:
        value = getattr(arguments, name)
        if value is not None:
            command_line[name] = value
    if arguments.launcher == "local":
        if arguments.cluster is not None:
            command_line["cluster"] = str(arguments.cluster)
        for name, value in command_line.items():
            raise without_effect(f"--{name}", value, "--launcher local", "add --launcher slurm")
        return Launcher(jobs or 1)
    if jobs is not None:
        raise without_effect("--jobs", jobs, "--launcher slurm", "use --array_parallelism")
    if folder is None:
        raise ValueError("--launcher slurm needs --output FILE, in a folder that the nodes of the cluster share")
    cluster = ClusterOptions() if arguments.cluster is None else read_cluster_file(arguments.cluster)
    cluster = replace(cluster, **command_line)
    _check_values(cluster)
    check_cluster(cluster, arguments.threads)
    return Launcher(cluster.array_parallelism or MOST_AT_ONCE, cluster, folder)


def read_cluster_file(path: Path) -> ClusterOptions:
    """Read the file of ``--cluster``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If an option has a value that is none of YAML's plain values.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"--cluster {str(path)!r} does not exist; name a YAML file, such as one with partition: NAME"
        )
    content = read_yaml(path, "partition: gpu")
    job_options = {name: content.pop(name) for name in OPTIONS_OF_JOBS if name in content}
    setup = content.pop("setup", [])
    if not isinstance(setup, list) or not all(isinstance(line, str) for line in setup):
        raise invalid_option(f"{path}: setup", setup, "a list of shell commands", "setup: [module load cuda]")
    for name, value in content.items():
        if not isinstance(value, str | int | float):
            raise invalid_option(f"{path}: {name}", value, "a text or a number, as for sbatch, or true")
    return ClusterOptions(**job_options, setup=tuple(setup), other_options=content)


def _check_values(cluster: ClusterOptions) -> None:
    """Raise an OptionError if a number is out of range; those of a file were not checked before."""
    check_integer("--time", cluster.time, ge=FEWEST_MINUTES)
    check_integer("--gpus", cluster.gpus, ge=0)
    for name in ("cpus", "array_parallelism"):
        value = getattr(cluster, name)
        if value is not None:
            check_integer(f"--{name}", value, ge=1)
    if cluster.partition is not None and not isinstance(cluster.partition, str):
        raise invalid_option("--partition", cluster.partition, "the name of a partition")


def add_launcher_options(parser: ArgumentParser) -> None:
    """Add the options that :func:`read_launcher` reads."""
    parser.add_argument(
        "--launcher",
        choices=list(LAUNCHERS),
        default="local",
        help=(
            "Where runs are made: local, in processes on this machine; or slurm, as jobs of the cluster that this "
            "machine is a login node of. Needs perada[cluster]."
        ),
    )
    parser.add_argument(
        "--partition", type=str | None, help="Slurm partition of the jobs (default: that of the cluster)."
    )
    parser.add_argument(
        "--time",
        type=PositiveInt,
        metavar="MINUTES",
        help=(
            "Minutes after which a Slurm job is requeued. Its run goes on from the last round "
            f"(default: {ClusterOptions.time})."
        ),
    )
    parser.add_argument("--gpus", type=PositiveInt, help="GPUs of a Slurm job (default: none).")
    parser.add_argument("--cpus", type=PositiveInt, help="Cores of a Slurm job (default: --threads).")
    parser.add_argument(
        "--array_parallelism",
        type=PositiveInt,
        help=f"Number of Slurm jobs at once (default: {MOST_AT_ONCE}).",
    )
    parser.add_argument(
        "--cluster",
        type=Path | None,
        metavar="FILE",
        help=(
            "YAML file with these options of Slurm jobs, any other options of sbatch, and setup, a list of shell "
            "commands to run first."
        ),
    )
