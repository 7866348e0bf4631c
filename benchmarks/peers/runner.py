# SPDX-License-Identifier: Apache-2.0
"""The process of one framework: ``python -m benchmarks.peers.runner FRAMEWORK FOLDER ROUNDS THREADS``."""

import importlib
import os
import sys
import traceback
from pathlib import Path

import torch

from benchmarks.peers.tasks import RESULT_FILE, TASK_FILE, load_task_data


def main() -> None:
    """Train the task of a folder, and write what came of it into the folder."""
    framework, folder_name, rounds, threads = sys.argv[1:]
    folder = Path(folder_name)
    module = importlib.import_module(f"benchmarks.peers.run_{framework}")
    training = module.run(load_task_data(folder / TASK_FILE), int(rounds), int(threads), folder)
    torch.save(vars(training), folder / RESULT_FILE)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        # Threads of Flower's server would keep a failed process alive for ever.
        sys.stderr.flush()
        os._exit(1)
