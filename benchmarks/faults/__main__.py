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
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.command_lines import try_command_lines
from benchmarks.faults.configurations import try_configurations
from benchmarks.faults.damage import damage
from benchmarks.faults.deployed import try_disks
from benchmarks.faults.determinism import determinism
from benchmarks.faults.hostile import hostile
from benchmarks.faults.interruptions import interruptions
from benchmarks.faults.outcomes import Campaign, report
from benchmarks.faults.power import power

DRAWS = 100
"""Default number of runs that are killed at random moments; the numbers of all other faults grow with it."""
QUICK_DRAWS = 4


@dataclass(frozen=True)
class Counts:
    """Numbers of faults in the parts of a campaign."""

    bits: int
    cuts: int
    hostile: int
    configurations: int
    jobs: int
    command_lines: int


def counts_of(draws: int, quick: bool) -> Counts:
    """Return the numbers of faults for a number of draws."""
    if quick:
        return Counts(bits=12, cuts=4, hostile=3 * draws, configurations=15 * draws, jobs=1, command_lines=3 * draws)
    return Counts(
        bits=2 * draws,
        cuts=draws // 2,
        hostile=2 * draws,
        configurations=20 * draws,
        jobs=max(1, draws // 5),
        command_lines=5 * draws,
    )


def parts_of(campaign: Campaign, folder: Path, seed: int, draws: int, quick: bool) -> dict[str, Callable[[], None]]:
    """Return the parts of the campaign, by name."""
    counts = counts_of(draws, quick)
    return {
        "interruptions": lambda: interruptions(campaign, folder / "runs", seed, draws, quick),
        "power": lambda: power(campaign, folder / "power"),
        "disks": lambda: try_disks(campaign, folder / "disks", quick),
        "damage": lambda: damage(campaign, folder / "damage", seed, counts.bits, counts.cuts),
        "hostile": lambda: hostile(campaign, folder / "hostile", seed, counts.hostile),
        "configurations": lambda: try_configurations(campaign, seed, counts.configurations),
        "determinism": lambda: determinism(campaign, folder / "same", seed, counts.jobs),
        "command_lines": lambda: try_command_lines(campaign, seed, counts.command_lines),
    }


def main(words: list[str] | None = None) -> None:
    """Run the campaign, and print the table. The exit status is 1 if a fault failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="A few faults of each kind, in some minutes.")
    parser.add_argument("--seed", default="0", help="What is tried follows from it; `today` is another one each day.")
    parser.add_argument(
        "--draws", type=int, help=f"Runs to be killed at random moments: {DRAWS}, or {QUICK_DRAWS} if quick."
    )
    parser.add_argument("--rows", nargs="+", help="Parts of the campaign; by default all.")
    parser.add_argument(
        "--record", type=Path, help="File of all that was tried: the same command with it resumes where it was stopped."
    )
    options = parser.parse_args(words)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    seed = int(f"{datetime.date.today():%Y%m%d}") if options.seed == "today" else int(options.seed)
    draws = options.draws or (QUICK_DRAWS if options.quick else DRAWS)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    about = {"seed": seed, "draws": draws, "quick": options.quick, "commit": commit}
    started_at = time.monotonic()
    campaign = Campaign(options.record, about)
    with tempfile.TemporaryDirectory(prefix="perada-faults-") as name:
        parts = parts_of(campaign, Path(name), seed, draws, options.quick)
        unknown = set(options.rows or ()) - parts.keys()
        if unknown:
            parser.error(f"--rows: {', '.join(sorted(unknown))} is unknown; choose of {', '.join(parts)}")
        for part in options.rows or parts:
            parts[part]()
    print(report(campaign.outcomes))
    print(f"seed {seed}, commit {commit}, {time.monotonic() - started_at:.0f} s")
    sys.exit(any(outcomes.failures for outcomes in campaign.outcomes))


if __name__ == "__main__":
    main()
