# SPDX-License-Identifier: Apache-2.0
"""A real Slurm on this machine, with two nodes in two partitions, for tests of `--launcher slurm`.

Everything is in one temporary folder: configuration, key, sockets and logs. A Slurm that the machine has is left alone.
"""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "sinfo", "scontrol", "scancel", "srun")
"""Programs of Debian's packages munge and slurm-wlm."""
EXTRA_PATHS = ("/usr/sbin", "/opt/slurm/bin")
"""Folders beside those of PATH that may have the programs: daemons, and srun where it is kept out of PATH."""
START_SECONDS = 30
NODES = ("alpha", "beta")
PARTITIONS = {"short": "alpha", "long": "beta"}
"""The partitions, with the node of each. The first is the default."""


def search_path() -> str:
    """Return the folders in which the programs are looked for."""
    return os.pathsep.join([os.environ["PATH"], *EXTRA_PATHS])


def missing_programs() -> list[str]:
    """Return the programs that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]


class SlurmCluster:
    """A running Slurm.

    Args:
        folder: Its folder.

    Attributes:
        environment: Environment of programs that use it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": search_path()}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start munge, the controller and the nodes, and wait until the nodes are idle."""
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        (self.folder / "slurm.conf").write_text(self._configuration())
        files = {"key-file": key, "socket": self.folder / "munge.socket", "pid-file": self.folder / "munge.pid"}
        files |= {"log-file": self.folder / "munge.log", "seed-file": self.folder / "munge.seed"}
        self._start("munged", "--foreground", *(f"--{name}={path}" for name, path in files.items()))
        self._wait_for(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._start("slurmctld", "-D")
        for node in NODES:
            self.start_node(node)

    def start_node(self, node: str, command: Sequence[str] = ()) -> None:
        """Start the daemon of a node, and wait until it is idle.

        Args:
            node: Its name.
            command: Words before those of the daemon, such as ``unshare``.
        """
        self._start(f"slurmd {node}", "-D", "-N", node, command=command)
        self._wait_for(lambda: "idle" in self.run("sinfo", "-h", "-n", node, "-o", "%t", check=False), f"node {node}")

    def stop_node(self, node: str) -> None:
        """End the daemon of a node without jobs."""
        daemon = self._daemons.pop(f"slurmd {node}")
        daemon.terminate()
        daemon.wait()

    def kill_node(self, node: str) -> None:
        """Kill the daemon of a node and its jobs, as if the machine lost power, and let the controller know."""
        daemon = self._daemons.pop(f"slurmd {node}")
        daemon.kill()
        daemon.wait()
        for pid in self._steps_of(node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost power")

    def resume_node(self, node: str) -> None:
        """Let a node take jobs again."""
        self.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        self.start_node(node)

    def run(self, *words: str, check: bool = True) -> str:
        """Run one of Slurm's programs, and return what it prints."""
        result = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False)
        if check and result.returncode:
            raise RuntimeError(f"{' '.join(words)}: {result.stderr}")
        return result.stdout

    def cancel_all(self) -> None:
        """End all jobs, and wait until they have ended."""
        jobs = self.run("squeue", "-h", "-o", "%A", check=False).split()
        if jobs:
            self.run("scancel", *sorted(set(jobs)), check=False)
        self._wait_for(lambda: not self.run("squeue", "-h", check=False), "an empty queue")

    def stop(self) -> None:
        """End all jobs and daemons."""
        with suppress(RuntimeError):  # a node that is down has jobs that do not end
            self.cancel_all()
        for name in reversed(self._daemons):
            self._daemons[name].terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def log(self, name: str) -> str:
        """Return the end of the log of a daemon."""
        return "\n".join((self.folder / f"{name}.log").read_text(errors="replace").splitlines()[-15:])

    def _start(self, name: str, *arguments: str, command: Sequence[str] = ()) -> None:
        program = shutil.which(name.partition(" ")[0], path=search_path())
        assert program is not None
        with (self.folder / f"{name}.out").open("wb") as output:
            self._daemons[name] = subprocess.Popen(
                [*command, program, *arguments], env=self.environment, stdout=output, stderr=output
            )

    def _wait_for(self, is_ready, name: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not is_ready():
            if time.monotonic() > deadline:
                outputs = [path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.out")]
                raise RuntimeError(f"waited in vain for {name}: {' '.join(outputs)}")
            time.sleep(0.2)

    def _steps_of(self, node: str) -> list[int]:
        """Return the processes of jobs on a node. Slurm's own come first: they would tell the controller of the end."""
        jobs = self.run("squeue", "-h", "-w", node, "-t", "RUNNING,COMPLETING", "-o", "%A").split()
        titles = tuple(f"slurmstepd: [{job}.".encode() for job in jobs)
        daemons = []
        others = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                title = (folder / "cmdline").read_bytes()
                environment = (folder / "environ").read_bytes()
            except OSError:
                continue
            if str(self.folder).encode() not in environment + title:
                continue  # of another Slurm
            if title.startswith(titles):
                daemons.append(int(folder.name))
            elif f"SLURMD_NODENAME={node}\0".encode() in environment:
                others.append(int(folder.name))
        return [*daemons, *others]

    def _configuration(self) -> str:
        hardware = self.run("slurmd", "-C")
        memory = re.search(r"RealMemory=(\d+)", hardware)
        assert memory is not None
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        ports = _free_ports(1 + len(NODES))
        lines = [
            "ClusterName=tests",
            f"SlurmctldHost={socket.gethostname()}(127.0.0.1)",
            f"SlurmctldPort={ports[0]}",
            f"SlurmUser={user}",
            f"SlurmdUser={user}",
            "AuthType=auth/munge",
            f"AuthInfo=socket={self.folder / 'munge.socket'}",
            f"StateSaveLocation={self.folder / 'state'}",
            f"SlurmdSpoolDir={self.folder / 'spool-%n'}",
            f"SlurmctldPidFile={self.folder / 'slurmctld.pid'}",
            f"SlurmdPidFile={self.folder / 'slurmd-%n.pid'}",
            f"SlurmctldLogFile={self.folder / 'slurmctld.log'}",
            f"SlurmdLogFile={self.folder / 'slurmd-%n.log'}",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            # Without memory, so that a job does not take a whole node.
            "SelectTypeParameters=CR_CPU",
            "AccountingStorageType=accounting_storage/none",
            "JobAcctGatherType=jobacct_gather/none",
            "ReturnToService=2",
            # Tests do not wait for what protects a real cluster.
            "KillWait=3",
            "MinJobAge=300",
            "SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2",
        ]
        for node, port in zip(NODES, ports[1:], strict=True):
            lines.append(
                f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=2 "
                f"RealMemory={int(memory[1]) * 9 // 10} State=UNKNOWN"
            )
        for number, (partition, node) in enumerate(PARTITIONS.items()):
            default = "YES" if number == 0 else "NO"
            lines.append(f"PartitionName={partition} Nodes={node} Default={default} MaxTime=60 State=UP")
        lines.append(f"PartitionName=all Nodes={','.join(NODES)} Default=NO MaxTime=60 State=UP")
        return "\n".join(lines) + "\n"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [opened.getsockname()[1] for opened in sockets]
    finally:
        for opened in sockets:
            opened.close()


@contextmanager
def running_cluster(environment: Mapping[str, str] | None = None) -> Iterator[SlurmCluster]:
    """Start a Slurm, and stop it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    (folder / "state").mkdir()
    cluster = SlurmCluster(folder)
    cluster.environment.update(environment or {})
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def measure_parts() -> Iterator[tuple[str, float]]:
    """Yield the parts of a cluster's overhead that docs/scaling.md has, with their seconds."""
    import submitit

    from perada.studies.compare.cluster import Slurm

    with running_cluster() as cluster:
        os.environ |= cluster.environment
        executor = submitit.SlurmExecutor(folder=cluster.folder / "logs")
        executor.update_parameters(time=60, array_parallelism=256)
        started_at = time.perf_counter()
        with executor.batch():
            jobs = [executor.submit(time.sleep, 60) for _ in range(1000)]
        yield "submission of 1,000 runs as an array", time.perf_counter() - started_at
        scheduler = Slurm()
        started_at = time.perf_counter()
        states = scheduler.states(jobs)
        assert states is not None and len(states) == len(jobs)
        yield "one look at 1,000 jobs", time.perf_counter() - started_at
        started_at = time.perf_counter()
        scheduler.cancel(jobs)
        yield "cancellation of 1,000 jobs", time.perf_counter() - started_at
    # The first start fills the cache of files.
    for _ in range(2):
        before = os.times()
        subprocess.run([sys.executable, "-c", "import perada.cli.runs, perada.studies.compare.command"], check=True)
        after = os.times()
    spent = after.children_user - before.children_user + after.children_system - before.children_system
    yield "program start on a node: imports, in CPU time", spent


if __name__ == "__main__":
    for part, seconds in measure_parts():
        print(f"{part}: {seconds:.2f} s")
