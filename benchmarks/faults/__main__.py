# SPDX-License-Identifier: Apache-2.0
"""The campaign: ``python -m benchmarks faults [--quick] [--seed N] [--draws N] [--rows NAME ...] [--record FILE]``."""

import argparse
import datetime
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.command_lines import try_command_lines
from benchmarks.faults.configurations import try_configurations
from benchmarks.faults.damage import damage
from benchmarks.faults.determinism import determinism
from benchmarks.faults.hostile import hostile
from benchmarks.faults.interruptions import interruptions
from benchmarks.faults.outcomes import Campaign, report
from benchmarks.faults.power import power

DRAWS = 100
"""By default; the numbers of all other faults grow with it."""
QUICK = 4


def rows(campaign: Campaign, folder: Path, seed: int, draws: int, quick: bool) -> dict[str, Callable[[], None]]:
    """The parts of the campaign, by name."""
    return {
        "interruptions": lambda: interruptions(campaign, folder / "runs", seed, draws, quick),
        "power": lambda: power(campaign, folder / "power"),
        "damage": lambda: damage(campaign, folder / "damage", seed, *((12, 4) if quick else (2 * draws, draws // 2))),
        "hostile": lambda: hostile(campaign, folder / "hostile", seed, 3 * draws if quick else 2 * draws),
        "configurations": lambda: try_configurations(campaign, seed, 15 * draws if quick else 20 * draws),
        "determinism": lambda: determinism(campaign, folder / "same", seed, 1 if quick else max(1, draws // 5)),
        "command_lines": lambda: try_command_lines(campaign, seed, 3 * draws if quick else 5 * draws),
    }


def main(words: list[str] | None = None) -> None:
    """Print the table; the exit status is 1 where something fell."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="A few faults of each kind, in some minutes.")
    parser.add_argument("--seed", default="0", help="What is tried follows from it; `today` is another one each day.")
    parser.add_argument("--draws", type=int, help=f"Runs to be killed at random moments: {DRAWS}, or {QUICK} if quick.")
    parser.add_argument("--rows", nargs="+", help="Parts of the campaign; by default all.")
    parser.add_argument(
        "--record", type=Path, help="File of all that was tried: the same command with it resumes where it was stopped."
    )
    given = parser.parse_args(words)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    seed = int(f"{datetime.date.today():%Y%m%d}") if given.seed == "today" else int(given.seed)
    draws = given.draws or (QUICK if given.quick else DRAWS)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    about = {"seed": seed, "draws": draws, "quick": given.quick, "commit": commit}
    begun, campaign = time.monotonic(), Campaign(given.record, about)
    with tempfile.TemporaryDirectory(prefix="perada-faults-") as name:
        parts = rows(campaign, Path(name), seed, draws, given.quick)
        unknown = set(given.rows or ()) - parts.keys()
        if unknown:
            parser.error(f"--rows: {', '.join(sorted(unknown))} is unknown; choose of {', '.join(parts)}")
        for part in given.rows or parts:
            parts[part]()
    print(report(campaign.outcomes))
    print(f"seed {seed}, commit {commit}, {time.monotonic() - begun:.0f} s")
    sys.exit(any(one.fallen for one in campaign.outcomes))


if __name__ == "__main__":
    main()
