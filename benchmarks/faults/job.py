# SPDX-License-Identifier: Apache-2.0
"""A small run in processes of its own, which ends itself at the n-th operation on a file, or finds the disk full."""

import errno
import logging
import os
import resource
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
from torch.utils.data import TensorDataset

import perada
import perada.api  # now, so that processes that are forked have it

OPERATIONS = ("open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir")
"""Events of Python's audit hooks at which a run may be killed, if they are on files below its folders."""
REFUSALS = {"full": errno.ENOSPC, "read-only": errno.EROFS}
PRIVATE: dict[str, dict[str, Any]] = {
    "none": {},
    "images": {"privacy": {"noise_multiplier": 1.0, "secure_rng": False}},
    "clients": {"client_privacy": {"noise_multiplier": 1.0, "secure_rng": False}},
}
"""With noise that follows from the seed, so that bits can be compared."""
ADAPTERS = {
    **dict.fromkeys(("fedalt_adapter", "fedsim_adapter"), "residual"),
    **dict.fromkeys(("ffa_lora", "fedsa_lora", "rolora", "het_lora", "fedex_lora", "flora"), "lora"),
    **dict.fromkeys(("feddpa", "feddpa_f", "fedalt_row"), "dual_lora"),
}
"""What is trained by algorithms that need an adapter of a kind; the others train all."""


@dataclass(frozen=True)
class Job:
    """What a run trains, and where."""

    algorithm: str = "ditto"
    store: str = "device"
    private: str = "none"
    processes: int = 1
    rounds: int = 3
    threads: int = 1
    double: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def train(self, folder: Path, ckpt_path: str | None = None, **more: Any) -> perada.Run:
        """Train in ``folder``, or go on with the newest checkpoint there, or with one that is named."""
        if any(folder.glob("lightning_logs/*/checkpoints/*.ckpt")):
            ckpt_path = ckpt_path or "last"
        options: dict[str, Any] = {
            "rounds": self.rounds,
            "local_steps": 2,
            "batch_size": 4,
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
        adapter, own = ADAPTERS.get(self.algorithm, "full"), dict[str, Any]()
        if adapter == "residual":  # the clients share the rest of the network
            own = {"adapter_options": {"target_modules": ["3"]}, "train_backbone": True}
        elif adapter != "full":
            own = {"adapter_options": {"r": 2, "target_modules": ["1"]}}
        return perada.finetune(
            network_of(self),
            clients(torch.float64 if self.double else torch.float32),
            algorithm=self.algorithm,
            adapter=adapter,
            **options | own | PRIVATE[self.private] | dict(self.options) | more,
        )


def clients(dtype: torch.dtype = torch.float32) -> perada.FederatedData:
    """Three clients' images, two or three of each for tests, and some public ones."""
    random = torch.Generator().manual_seed(0)

    def part(count: int) -> TensorDataset:
        return TensorDataset(torch.randn(count, 1, 4, 4, generator=random).to(dtype), torch.arange(count) % 3)

    public = TensorDataset(torch.randn(6, 1, 4, 4, generator=random).to(dtype))
    return perada.FederatedData([part(count) for count in (6, 9, 5)], [part(3) for _ in range(3)], public)


def network(convolution: bool = False) -> nn.Module:
    """A few layers, always the same."""
    torch.manual_seed(0)
    if convolution:
        layers = [nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(16, 3))
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 3))


def network_of(job: Job) -> nn.Module:
    """The network that a job trains."""
    return network(job.algorithm.endswith("_adapter")).to(torch.float64 if job.double else torch.float32)


def die_at(folders: tuple[str, ...], count: int) -> None:
    """Kill this process, as SIGKILL does, before the ``count``-th operation on a file below ``folders`` from now on."""
    left = count

    def step(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if event in OPERATIONS and any(isinstance(one, str) and one.startswith(folders) for one in args):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), 9)

    sys.addaudithook(step)


def refuse_at(folders: tuple[str, ...], count: int, error: int) -> None:
    """Let files be opened for writing below ``folders`` no more from the ``count``-th on, with an error's number."""
    left = count

    def step(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if event == "open" and str(args[0]).startswith(folders) and isinstance(args[2], int) and args[2] & os.O_CREAT:
            left -= 1
            if left < 0:
                raise OSError(error, os.strerror(error), args[0])

    sys.addaudithook(step)


def count_operations(folders: tuple[str, ...], path: Path) -> None:
    """Write to ``path``, a file elsewhere, how many operations on files below ``folders`` there have been."""
    counts, handle = {"open for writing": 0, "all": 0}, os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)

    def step(event: str, args: tuple[Any, ...]) -> None:
        if event in OPERATIONS and any(isinstance(one, str) and one.startswith(folders) for one in args):
            counts["all"] += 1
            if event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT:
                counts["open for writing"] += 1
            os.pwrite(handle, f"{counts['open for writing']:9} {counts['all']:9}".encode(), 0)

    sys.addaudithook(step)


@contextmanager
def silent() -> Iterator[None]:
    """Let nothing be printed."""
    logging.disable()
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def run(job: Job, folder: str, temporary: str, fault: str, count: int, rank: int, port: int, errors: str) -> None:
    """Run with a fault: ``none``, ``count``, ``kill``, ``full``, ``read-only``, or ``no room`` beyond ``count`` bytes.

    The file ``errors`` holds ``done`` at the end, or the message of an error, with status 1.
    """
    root = Path(folder)
    torch.set_num_threads(job.threads)
    tempfile.tempdir = temporary
    os.environ["TMPDIR"] = temporary
    if job.processes > 1:  # as torchrun starts them
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.processes, "LOCAL_WORLD_SIZE": job.processes}
        more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "faults", "GROUP_RANK": 0}
        os.environ |= {name: str(value) for name, value in (where | more).items()}
    with silent(), open(errors, "w") as said:
        folders = (folder, temporary)
        if fault == "count":
            count_operations(folders, Path(f"{errors}.count"))
        elif fault == "kill":
            die_at(folders, count)
        elif fault in REFUSALS:
            refuse_at(folders, count, REFUSALS[fault])
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        if fault == "no room":  # what is written, not only opened, is refused
            resource.setrlimit(resource.RLIMIT_FSIZE, (count, most))
        try:
            trained = job.train(root)
            trained.save(root / "saved")
        except (ValueError, OSError) as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            said.write(str(error))
            said.flush()
            os._exit(1)
        said.write("done")
