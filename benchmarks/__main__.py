# SPDX-License-Identifier: Apache-2.0
"""Run the benchmarks: ``python -m benchmarks [NAME ...] [--help]``."""

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.attacks import attacks
from benchmarks.cohort_step import cohort_step
from benchmarks.deploy import deploy
from benchmarks.federation_size import federation_size
from benchmarks.few_shot import few_shot
from benchmarks.growth import growth
from benchmarks.limit import limit, machine
from benchmarks.not_taken import not_taken
from benchmarks.privacy_audit import privacy_audit
from benchmarks.privacy_trials import privacy_trials
from benchmarks.private_step import private_memory, private_step
from benchmarks.ranks import ranks
from benchmarks.round import round_last_stage, round_lite0, round_profile, round_resnet, round_vit
from benchmarks.secure_sums import secure_sums
from benchmarks.server import distillation, evaluation, groups
from benchmarks.small_maps import small_maps
from perada.results.report import table

BENCHMARKS = {
    "machine": machine,
    "round_resnet": round_resnet,
    "round_vit": round_vit,
    "round_lite0": round_lite0,
    "round_last_stage": round_last_stage,
    "limit": limit,
    "round_profile": round_profile,
    "cohort_step": cohort_step,
    "small_maps": small_maps,
    "not_taken": not_taken,
    "distillation": distillation,
    "evaluation": evaluation,
    "groups": groups,
    "ranks": ranks,
    "federation_size": federation_size,
    "private_step": private_step,
    "private_memory": private_memory,
    "privacy_audit": privacy_audit,
    "privacy_trials": privacy_trials,
    "few_shot": few_shot,
    "growth": growth,
    "attacks": attacks,
    "deploy": deploy,
    "secure_sums": secure_sums,
}
"""Each takes the device, how often the ways take turns, and whether a glance is enough; it yields rows of a table."""


def main() -> None:
    """Run what is named, print each result and a table, and write all of them as JSON."""
    if sys.argv[1:2] == ["faults"]:  # which has a seed, and an exit status of its own
        from benchmarks.faults.__main__ import main as faults

        faults(sys.argv[2:])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Speed, as ratios within one run, memory, the audit of the reported ε, accuracy under attack, and "
        "clients that join. `python -m benchmarks faults` puts faults into runs instead.",
    )
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], help="By default all.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--repeats", type=int, default=7, help="Turns that the ways take; the median ratio is reported."
    )
    parser.add_argument("--quick", action="store_true", help="Tiny models, one turn: shows that the benchmarks run.")
    parser.add_argument("--output", type=Path, default=Path("lightning_logs/benchmarks.json"))
    given = parser.parse_args()
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec.` is deprecated", FutureWarning)  # in Lightning
    results = []
    for name in given.names or BENCHMARKS:
        own = []
        for result in BENCHMARKS[name](torch.device(given.device), 1 if given.quick else given.repeats, given.quick):
            row = {"benchmark": name} | result | about(given.device)
            print(json.dumps(row, ensure_ascii=False), flush=True)
            own.append({key: str(value) for key, value in result.items() if not isinstance(value, dict)})
            results.append(row)
        columns = list(dict.fromkeys(key for row in own for key in row))
        print(table(columns, [[row.get(key, "") for key in columns] for row in own]), flush=True)
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(results, indent=1))


def about(device: str) -> dict[str, Any]:
    """What a figure depends on; the load is the number of threads that wanted to run in the last minute."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "machine": torch.cuda.get_device_name()
        if device == "cuda"
        else f"{platform.machine()}, {os.cpu_count()} cores",
        "instructions": " ".join([torch.backends.cpu.get_cpu_capability(), *units()]),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
    }


def units() -> list[str]:
    """The processor's units for narrow numbers, by the names that the kernel gives them."""
    known = Path("/proc/cpuinfo")
    flags = set(known.read_text().split()) if known.is_file() else set()
    return sorted(flags & {"avx512_bf16", "avx512_fp16", "avx_vnni", "amx_bf16", "amx_int8", "amx_tile", "bf16"})


if __name__ == "__main__":
    main()
