# SPDX-License-Identifier: Apache-2.0
"""Run the benchmarks: ``python -m benchmarks [NAME ...] [--help]``."""

import argparse
import json
import platform
from pathlib import Path

import torch

from benchmarks.cohort_step import cohort_step
from benchmarks.privacy_audit import privacy_audit
from benchmarks.private_step import private_memory, private_step
from benchmarks.server import distillation, evaluation
from perada.report import table

BENCHMARKS = {
    "cohort_step": cohort_step,
    "distillation": distillation,
    "evaluation": evaluation,
    "private_step": private_step,
    "private_memory": private_memory,
    "privacy_audit": privacy_audit,
}


def main() -> None:
    """Run what is named, print each result and a table, and write all of them as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Speed, as ratios within one run, memory, and the audit of the reported ε.",
    )
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], help="By default all.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=15, help="Interleaved pairs; the median ratio is reported.")
    parser.add_argument("--output", type=Path, default=Path("lightning_logs/benchmarks.json"))
    given = parser.parse_args()
    machine = torch.cuda.get_device_name() if given.device == "cuda" else f"{platform.machine()} CPU"
    results = []
    for name in given.names or BENCHMARKS:
        own = []
        for result in BENCHMARKS[name](torch.device(given.device), given.repeats):
            about = {
                "benchmark": name,
                "machine": machine,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            }
            print(json.dumps(result | about, ensure_ascii=False), flush=True)
            own.append({key: str(value) for key, value in result.items() if not isinstance(value, dict)})
            results.append(result | about)
        print(table(list(own[0]), [list(row.values()) for row in own]))
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
