# SPDX-License-Identifier: Apache-2.0
"""A small run in processes of its own, which ends itself at the n-th operation on a file, or finds the disk full."""

import errno
import logging
import os
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import perada
import perada.api  # now, so that processes that are forked have it
from benchmarks.faults.labels import DEFAULT_LABELS, make_data, make_network
from perada.algorithms.registry import methods

OPERATIONS = ("open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir")
"""Events of Python's audit hooks at which a run may be killed, if they are on files below its folders."""
WRITE_ERRORS = {"full": errno.ENOSPC, "read-only": errno.EROFS}
PRIVATE: dict[str, dict[str, Any]] = {
    "none": {},
    "images": {"privacy": {"noise_multiplier": 1.0, "secure_rng": False}},
    "clients": {"client_privacy": {"noise_multiplier": 1.0, "secure_rng": False}},
}
"""With noise that follows from the seed, so that bits can be compared."""
ADAPTERS = {
    **dict.fromkeys(("fedalt_adapter", "fedsim_adapter"), "residual"),
    **dict.fromkeys(("ffa_lora", "fedsa_lora", "rolora", "het_lora", "fedex_lora", "flora"), "lora"),
    **dict.fromkeys(("flexlora", "lora_fair"), "lora"),
    **dict.fromkeys(("feddpa", "feddpa_f", "fedalt_row"), "dual_lora"),
}
"""What is trained by methods that need an adapter of a kind; the others train all."""
UNEXPECTED = "unexpected "
"""Begins the message of a job that ended with an error that is no rejection."""


@dataclass(frozen=True)
class Job:
    """A run to be tried.

    Attributes:
        algorithm: Name of a method, which is an algorithm with some arguments and a server rule.
        store: Where the clients' states are.
        private: Kind of privacy, a key of :data:`PRIVATE`.
        processes: Number of processes.
        rounds: Number of rounds.
        threads: Threads of a process.
        double: Whether to compute in float64.
        labels: Kind of labels, a key of :data:`benchmarks.faults.labels.LABELS`.
        options: Further options of :func:`perada.finetune`.
    """

    algorithm: str = "ditto"
    store: str = "device"
    private: str = "none"
    processes: int = 1
    rounds: int = 3
    threads: int = 1
    double: bool = False
    labels: str = DEFAULT_LABELS
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Type of images and weights."""
        return torch.float64 if self.double else torch.float32

    def network(self) -> nn.Module:
        """Return the network that is trained, with its first weights."""
        return make_network(self.labels, convolution=self.algorithm.endswith("_adapter")).to(self.dtype)

    def train(self, folder: Path, ckpt_path: str | None = None, **more: Any) -> perada.Run:
        """Train in a folder, or resume a checkpoint: the newest in the folder, unless one is given.

        Args:
            folder: The folder.
            ckpt_path: A checkpoint.
            **more: Options of :func:`perada.finetune` that replace the job's.
        """
        if any(folder.glob("lightning_logs/*/checkpoints/*.ckpt")):
            ckpt_path = ckpt_path or "last"
        options: dict[str, Any] = {
            "rounds": self.rounds,
            "local_steps": 2,
            "clients_per_round": 2,
            "distillation": {"steps": 2, "batch_size": 4},
            "client_store": self.store,
            "devices": self.processes,
            "ckpt_path": ckpt_path,
            "default_root_dir": folder,
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        method = methods()[self.algorithm]
        adapter = ADAPTERS.get(self.algorithm, "full")
        adapter_options: dict[str, Any] = {}
        if adapter == "residual":  # the clients share the rest of the network
            adapter_options = {"adapter_options": {"target_modules": ["3"]}, "train_backbone": True}
        elif adapter != "full":
            adapter_options = {"adapter_options": {"r": 2, "target_modules": ["1"]}}
        return perada.finetune(
            self.network(),
            make_data(self.labels, self.private != "none", dtype=self.dtype),
            algorithm=method.make(),
            server_rule=method.server_rule or "mean",
            adapter=adapter,
            **options | adapter_options | PRIVATE[self.private] | dict(self.options) | more,
        )


def die_at(folders: tuple[str, ...], count: int) -> None:
    """Kill this process with SIGKILL at an operation on a file below ``folders``, after ``count`` operations."""
    remaining = count

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal remaining
        if _is_operation(event, arguments, folders):
            remaining -= 1
            if remaining < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _is_operation(event: str, arguments: tuple[Any, ...], folders: tuple[str, ...]) -> bool:
    """Return whether an audited event is an operation on a file below ``folders``."""
    if event not in OPERATIONS:
        return False
    return any(isinstance(path, str) and path.startswith(folders) for path in arguments)


def _creates_file(event: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether an audited event opens a file for writing."""
    return event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & os.O_CREAT)


def fail_opening_after(folders: tuple[str, ...], count: int, error: int) -> None:
    """Raise an error when a file below ``folders`` is opened for writing, after ``count`` files were opened."""
    remaining = count

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal remaining
        if _creates_file(event, arguments) and str(arguments[0]).startswith(folders):
            remaining -= 1
            if remaining < 0:
                raise OSError(error, os.strerror(error), arguments[0])

    sys.addaudithook(hook)


def count_operations(folders: tuple[str, ...], path: Path) -> None:
    """Write to ``path``, a file elsewhere, the numbers of files opened for writing and of all operations so far."""
    num_opened = 0
    num_operations = 0
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal num_opened, num_operations
        if _is_operation(event, arguments, folders):
            num_operations += 1
            num_opened += _creates_file(event, arguments)
            os.pwrite(handle, f"{num_opened:9} {num_operations:9}".encode(), 0)

    sys.addaudithook(hook)


@contextmanager
def silent() -> Iterator[None]:
    """Suppress all output."""
    logging.disable()
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def run(job: Job, folder: str, temporary: str, fault: str, count: int, rank: int, port: int, errors: str) -> None:
    """Run a job with a fault. The exit status is 1 after an error.

    Args:
        job: The job.
        folder: Its folder.
        temporary: Folder for temporary files.
        fault: ``none``, ``count``, ``kill``, ``full``, ``read-only``, or ``no room``.
        count: Operations before the fault; with ``no room`` the largest size of a file, in bytes.
        rank: Rank of this process.
        port: Port of the process of rank 0.
        errors: File for the message: ``done``, or an error, after :data:`UNEXPECTED` if it is no rejection.
    """
    root = Path(folder)
    torch.set_num_threads(job.threads)
    tempfile.tempdir = temporary
    os.environ["TMPDIR"] = temporary
    if job.processes > 1:  # as torchrun starts them
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": job.processes,
            "LOCAL_WORLD_SIZE": job.processes,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "faults",
            "GROUP_RANK": 0,
        }
        os.environ |= {name: str(value) for name, value in variables.items()}
    with silent(), open(errors, "w") as message_file:
        folders = (folder, temporary)
        if fault == "count":
            count_operations(folders, Path(f"{errors}.count"))
        elif fault == "kill":
            die_at(folders, count)
        elif fault in WRITE_ERRORS:
            fail_opening_after(folders, count, WRITE_ERRORS[fault])
        _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if fault == "no room":  # a write fails, and not only an open
            resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard_limit))
        try:
            trained = job.train(root)
            trained.save(root / "saved")
        except (ValueError, OSError) as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard_limit, hard_limit))
            message_file.write(str(error))
            message_file.flush()
            os._exit(1)
        except Exception as error:
            message_file.write(f"{UNEXPECTED}{type(error).__name__}: {error}")
            raise
        message_file.write("done")
