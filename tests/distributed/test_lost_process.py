# SPDX-License-Identifier: Apache-2.0
"""A process that is killed ends the job with one clear line, and a checkpoint to go on from."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .job import run

ROOT = Path(__file__).parents[2]
DYING = [sys.executable, "-m", "tests.distributed.dying"]


def check_resumed(folder):
    """One process goes on from the last whole round, to what an undisturbed run gives."""
    (checkpoint,) = folder.rglob("last.ckpt")
    resumed = run("perada", rounds=4, ckpt_path=str(checkpoint))
    uninterrupted = run("perada", rounds=4)
    for role in ("global", "personal"):
        for left, right in zip(resumed.states(role), uninterrupted.states(role), strict=True):
            for key in left:
                torch.testing.assert_close(left[key], right[key], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_others_notice_when_they_wait_for_it(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    first, second = (
        subprocess.Popen(
            [*DYING, str(tmp_path), "0"],
            cwd=ROOT,
            env=os.environ | shared | {"LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    )
    second.communicate(timeout=200)
    _, said = first.communicate(timeout=30)
    assert first.returncode == 1
    last = said.strip().splitlines()[-1]
    check_resumed(tmp_path)
    assert "process 0 of 2 lost another process" in last
    assert "resume with ckpt_path=last" in last


@pytest.mark.slow
def test_the_process_that_started_it_does_not_train_on(tmp_path):
    done = subprocess.run([*DYING, str(tmp_path), "500"], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("perada: error: process 0 lost another process")
    assert "resume with ckpt_path=last" in last
