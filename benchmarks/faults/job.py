# SPDX-License-Identifier: Apache-2.0
"""A small run in a process of its own, which ends itself at the n-th operation on a file, or finds the disk full."""

import errno
import logging
import os
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import perada
import perada.api  # now, so that processes that are forked have it

OPERATIONS = ("open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir")
"""Events of Python's audit hooks at which a run may be killed, if they are on files below its folder."""


def clients() -> perada.FederatedData:
    """Three clients' images, and two of each for tests."""
    random = torch.Generator().manual_seed(0)

    def part(count: int) -> TensorDataset:
        return TensorDataset(torch.randn(count, 1, 4, 4, generator=random), torch.arange(count) % 3)

    return perada.FederatedData([part(count) for count in (6, 9, 5)], [part(3) for _ in range(3)])


def network() -> nn.Module:
    """Two layers, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 3))


def train(folder: Path, store: str, rounds: int, ckpt_path: str | None = None, **options: Any) -> perada.Run:
    """Train in ``folder``, or go on with the newest checkpoint there, or with one that is named."""
    if any(folder.glob("lightning_logs/*/checkpoints/*.ckpt")):
        ckpt_path = ckpt_path or "last"
    return perada.finetune(
        network(),
        clients(),
        adapter="full",
        algorithm="ditto",
        rounds=rounds,
        local_steps=2,
        batch_size=4,
        clients_per_round=2,
        client_store=store,  # type: ignore[arg-type]  # a word of the command line
        ckpt_path=ckpt_path,
        default_root_dir=folder,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def die_at(folder: Path, count: int) -> None:
    """Kill this process, as SIGKILL does, before the ``count``-th operation on a file below ``folder`` from now on."""
    left, root = count, str(folder)

    def step(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if event in OPERATIONS and any(isinstance(one, str) and one.startswith(root) for one in args):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), 9)

    sys.addaudithook(step)


def fill_at(folder: Path, count: int) -> None:
    """Let the disk be full from the ``count``-th file that is opened for writing below ``folder`` on."""
    left, root = count, str(folder)

    def step(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if event == "open" and str(args[0]).startswith(root) and isinstance(args[2], int) and args[2] & os.O_CREAT:
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), args[0])

    sys.addaudithook(step)


def run(folder: str, store: str, rounds: int, fault: str, count: int, errors: str) -> None:
    """Run with a fault, ``none``, ``kill`` or ``full``; an error is one line in the file ``errors``, with status 1."""
    logging.disable()
    warnings.simplefilter("ignore")
    root = Path(folder)
    with (
        open(os.devnull, "w") as nowhere,
        open(errors, "w") as said,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        if fault != "none":
            {"kill": die_at, "full": fill_at}[fault](root, count)
        try:
            train(root, store, rounds).save(root / "saved")
        except (ValueError, OSError) as error:
            said.write(str(error))
            said.flush()
            os._exit(1)
