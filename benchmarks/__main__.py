# SPDX-License-Identifier: Apache-2.0
"""Run the benchmarks: ``python -m benchmarks [NAME ...] [--help]``."""

import argparse
import importlib
import json
import logging
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine_facts
from perada.core.checks import OptionError, check_known
from perada.results.report import table
from perada.system.files import write_atomic

BENCHMARKS = {
    "machine": "limit",
    "same_states": "same_states",
    "round_resnet": "round",
    "round_vit": "round",
    "round_lite0": "round",
    "round_last_stage": "round",
    "limit": "limit",
    "round_profile": "round",
    "roofline": "roofline",
    "cohort_step": "cohort_step",
    "small_maps": "small_maps",
    "not_taken": "not_taken",
    "distillation": "server",
    "evaluation": "server",
    "groups": "server",
    "ranks": "ranks",
    "jobs": "jobs",
    "federation_size": "federation_size",
    "checkpointing": "checkpointing",
    "backbone_memory": "backbone_memory",
    "start_up": "start_up",
    "private_step": "private_step",
    "private_memory": "private_step",
    "private_rates": "private_rates",
    "privacy_audit": "privacy_audit",
    "privacy_trials": "privacy_trials",
    "prediction_detectors": "prediction_rules",
    "prediction_weights": "prediction_rules",
    "prediction_rules": "prediction_rules",
    "prediction_cost": "prediction_cost",
    "defaults": "defaults",
    "first_rates": "first_rates",
    "advice_aa": "verdicts",
    "advice_known": "verdicts",
    "choice_known": "choices",
    "choice_folders": "own_folders",
    "first_adapters": "own_folders",
    "few_shot": "few_shot",
    "rare_classes": "rare_labels",
    "unknown_labels": "rare_labels",
    "rotation_angle": "scanner_tasks",
    "segmentation": "scanner_tasks",
    "growth": "growth",
    "attacks": "attacks",
    "deploy": "deploy",
    "secure_sums": "secure_sums",
}
"""The module of each benchmark, which is imported when it is run, since some need packages that others do not.

The module has a function of the benchmark's name. Its arguments are the device, the number of turns and whether the run
is a quick one; it yields the rows of a table.
"""


def main() -> None:
    """Run benchmarks, print each result and a table of them, and write all results as JSON."""
    if sys.argv[1:2] == ["faults"]:
        # It has other options, and ends the process with its own status.
        from benchmarks.faults.__main__ import main as faults

        faults(sys.argv[2:])
    if sys.argv[1:2] == ["peers"]:
        # It has other options, and runs processes of other interpreters.
        from benchmarks.peers.__main__ import main as peers

        peers(sys.argv[2:])
        return
    names = textwrap.fill(", ".join(BENCHMARKS), 78, initial_indent="  ", subsequent_indent="  ")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        # The list of names keeps its line breaks.
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"names:\n{names}",
        description="Speed, as ratios within one run, memory, the audit of the reported ε, accuracy under\nattack, "
        "clients that join, rules of prediction, and options of tasks. `python -m benchmarks\nfaults` puts faults into "
        "runs instead, and `python -m benchmarks peers` runs other\nframeworks beside perada.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="Benchmarks to run, see below; by default all.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--repeats", type=int, default=7, help="Turns that the ways take; the median ratio is reported."
    )
    parser.add_argument("--quick", action="store_true", help="Tiny models, one turn: shows that the benchmarks run.")
    parser.add_argument("--output", type=Path, default=Path("lightning_logs/benchmarks.json"))
    options = parser.parse_args()
    for name in options.names:
        try:
            check_known("NAME", name, BENCHMARKS)
        except OptionError as error:
            parser.error(str(error))
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec.` is deprecated", FutureWarning)  # in Lightning
    repeats = 1 if options.quick else options.repeats
    options.output.parent.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    for name in options.names or BENCHMARKS:
        benchmark = getattr(importlib.import_module(f"benchmarks.{BENCHMARKS[name]}"), name)
        rows: list[dict[str, str]] = []
        for row in benchmark(torch.device(options.device), repeats, options.quick):
            result = {"benchmark": name} | row | machine_facts(options.device)
            print(json.dumps(result, ensure_ascii=False), flush=True)
            results.append(result)
            # After each row, and never in part: an interrupted process leaves the rows that it has computed.
            write_atomic(options.output, json.dumps(results, indent=1).encode())
            rows.append({column: str(value) for column, value in row.items() if not isinstance(value, dict)})
        columns = list(dict.fromkeys(column for row in rows for column in row))
        cells = [[row.get(column, "") for column in columns] for row in rows]
        print(table(columns, cells), flush=True)


if __name__ == "__main__":
    main()
