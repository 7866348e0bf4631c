# SPDX-License-Identifier: Apache-2.0
"""Run the benchmarks: ``python -m benchmarks [NAME ...] [--help]``."""

import argparse
import importlib
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

from perada.core.files import write_atomic
from perada.results.report import table

BENCHMARKS = {
    "machine": "limit",
    "same_states": "same_states",
    "round_resnet": "round",
    "round_vit": "round",
    "round_lite0": "round",
    "round_last_stage": "round",
    "limit": "limit",
    "round_profile": "round",
    "cohort_step": "cohort_step",
    "small_maps": "small_maps",
    "not_taken": "not_taken",
    "distillation": "server",
    "evaluation": "server",
    "groups": "server",
    "ranks": "ranks",
    "jobs": "jobs",
    "federation_size": "federation_size",
    "private_step": "private_step",
    "private_memory": "private_step",
    "privacy_audit": "privacy_audit",
    "privacy_trials": "privacy_trials",
    "few_shot": "few_shot",
    "growth": "growth",
    "attacks": "attacks",
    "deploy": "deploy",
    "secure_sums": "secure_sums",
}
"""The module of each, which is imported when it is run: some need packages that others do not.

The module has a function of that name. It takes the device, how often the ways take turns, and whether a glance is
enough; it yields rows of a table.
"""


def main() -> None:
    """Run what is named, print each result and a table, and write all of them as JSON."""
    if sys.argv[1:2] == ["faults"]:  # which has a seed, and an exit status of its own
        from benchmarks.faults.__main__ import main as faults

        faults(sys.argv[2:])
    if sys.argv[1:2] == ["peers"]:  # which runs processes of other interpreters
        from benchmarks.peers.__main__ import main as peers

        peers(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Speed, as ratios within one run, memory, the audit of the reported ε, accuracy under attack, and "
        "clients that join. `python -m benchmarks faults` puts faults into runs instead, and `python -m benchmarks "
        "peers` runs other frameworks beside perada.",
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
    results: list[dict[str, Any]] = []
    for name in given.names or BENCHMARKS:
        benchmark = getattr(importlib.import_module(f"benchmarks.{BENCHMARKS[name]}"), name)
        rows = []
        for result in benchmark(torch.device(given.device), 1 if given.quick else given.repeats, given.quick):
            row = {"benchmark": name} | result | about(given.device)
            print(json.dumps(row, ensure_ascii=False), flush=True)
            rows.append({key: str(value) for key, value in result.items() if not isinstance(value, dict)})
            results.append(row)
            # After each row, and never in part, so that what is known stays if the process is ended.
            given.output.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(given.output, json.dumps(results, indent=1).encode())
        columns = list(dict.fromkeys(key for row in rows for key in row))
        print(table(columns, [[row.get(key, "") for key in columns] for row in rows]), flush=True)


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
