# SPDX-License-Identifier: Apache-2.0
"""The campaign: ``python -m benchmarks faults [--quick] [--seed N]``."""

import argparse
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.faults.command_lines import try_command_lines
from benchmarks.faults.configurations import try_configurations
from benchmarks.faults.damage import damage
from benchmarks.faults.interruptions import interruptions
from benchmarks.faults.outcomes import Outcomes, report


def campaign(seed: int, quick: bool) -> list[Outcomes]:
    """Put all faults into small runs; ``quick`` tries a few of each."""
    with tempfile.TemporaryDirectory(prefix="perada-faults-") as name:
        folder = Path(name)
        found = interruptions(folder, seed, *((4, 6) if quick else (100, 120)))
        found += damage(folder / "damage", seed, *((12, 4) if quick else (200, 50)))
    found.append(try_configurations(seed, 60 if quick else 1000))
    found.append(try_command_lines(seed, 12 if quick else 250))
    return found


def main(words: list[str] | None = None) -> None:
    """Print the table; the exit status is 1 where something fell."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="A few faults of each kind, in some minutes.")
    parser.add_argument("--seed", type=int, default=0, help="What is tried follows from it.")
    given = parser.parse_args(words)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    begun = time.monotonic()
    found = campaign(given.seed, given.quick)
    print(report(found))
    print(f"seed {given.seed}, {time.monotonic() - begun:.0f} s")
    sys.exit(any(one.fallen for one in found))


if __name__ == "__main__":
    main()
