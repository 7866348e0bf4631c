# SPDX-License-Identifier: Apache-2.0
"""Seconds of a round by number of processes: on a CPU of one thread each, on GPUs of one GPU each."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed

from benchmarks.round import RESNET, Turns


def ranks(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """ResNet-18 with residual adapters, 32×32, 8 clients a round; the processes are started by torchrun, in turn."""
    max_processes = torch.cuda.device_count() if device.type == "cuda" else os.cpu_count() or 1
    seconds_of_one_process = 0.0
    for processes in (1, 2, 4, 8):
        if processes > max_processes:
            break
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command += ["-m", "benchmarks.ranks", device.type, str(repeats), str(int(quick))]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        completed = subprocess.run(command, env=environment, capture_output=True, text=True)
        if completed.returncode:
            raise RuntimeError(f"{processes} processes ended with status {completed.returncode}: {completed.stderr}")
        seconds: dict[str, float] = json.loads(completed.stdout.splitlines()[-1])
        if processes == 1:
            seconds_of_one_process = seconds["round"]
        row = {"processes": processes, "one process / these": round(seconds_of_one_process / seconds["round"], 3)}
        for part, value in seconds.items():
            row[f"seconds, {part}"] = round(value, 3)
        yield row


def main(device: torch.device, repeats: int, quick: bool) -> None:
    """Run rounds in this process as one of several, and let the first one print the median seconds as JSON."""
    work = RESNET
    if quick:
        work = replace(RESNET, backbone="test_resnet", public=32, public_batch=16, batch=16)
    turns = Turns({}, device)
    work.finetune(work.data(), device, rounds=1 + repeats, callbacks=[turns])
    if int(os.environ["RANK"]) == 0:
        print(json.dumps({part: statistics.median(times) for part, times in turns.seconds["perada"].items()}))


if __name__ == "__main__":
    main(torch.device(sys.argv[1]), int(sys.argv[2]), bool(int(sys.argv[3])))
