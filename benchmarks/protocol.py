# SPDX-License-Identifier: Apache-2.0
"""The differences between the authors' code and perada, in miniature: the table of docs/papers.md.

`python -m benchmarks.protocol` runs `perada compare paper/perada_protocol_mini`, and resumes where it was stopped.
Options of `perada compare` may follow. Differences in how a run is scored, and not in how it trains, are computed from
the runs of the rows "defaults" and "all together".
"""

import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.experiments import mean_and_spread
from perada.cli import main as perada
from perada.cli.runs import PeradaCLI
from perada.studies.compare.running import NO_PROGRESS_BAR
from perada.system.quiet import info_messages_disabled

COMPARISON = "paper/perada_protocol_mini"
OUTPUT = Path("perada_protocol_mini.json")
SCORE_NAMES = ("personal/local_test", "personal/global_test", "global/global_test")
HEAD = ("", "own images", "all clients' images", "global model")
READ_FROM = ("defaults", "all together")
"""Rows whose runs are also scored in other ways."""
OTHER_SCORES = {
    "I, weighted by test images": "personal/local_test_weighted",
    "J, clients that took part lately": "personal/local_test_recent",
}

Record = dict[str, Any]


def cell(values: Sequence[float]) -> str:
    """Return mean and sample standard deviation in %."""
    return mean_and_spread([100 * value for value in values])


def best_rounds(by_round: Sequence[dict[str, Any]]) -> float:
    """Return the mean over clients of each client's best score on its own test images in any of the rounds.

    >>> round(best_rounds([{"personal/local_test": [0.5, 0.9]}, {"personal/local_test": [0.7, 0.6]}]), 3)
    0.8
    """
    scores_RM = torch.tensor([row["personal/local_test"] for row in by_round], dtype=torch.float64)
    return float(scores_RM.max(0).values.mean())


def scored_every_round(record: Record) -> list[dict[str, Any]]:
    """Run a row's run again, and score every client after every round."""
    torch.set_num_threads(1)
    words = [*record["args"], "--trainer.check_val_every_n_epoch=1", NO_PROGRESS_BAR]
    with info_messages_disabled(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cli = PeradaCLI(words, run=False)
        cli.trainer.fit(cli.model, cli.datamodule)
    by_round: list[dict[str, Any]] = cli.loop.client_scores.by_round
    last_score = fmean(by_round[-1]["personal/local_test"])
    if abs(last_score - record["personal/local_test"]) > 1e-6:
        raise RuntimeError(f"scored every round, the run has {last_score}, and before {record['personal/local_test']}")
    return by_round


def table(records: Sequence[Record]) -> str:
    """Return the table as Markdown."""
    runs_of_variant: dict[str, list[Record]] = {}
    for record in records:
        if record["stage"] == "run":
            runs_of_variant.setdefault(record["varied"]["variant"], []).append(record)
    lines = ["| " + " | ".join(HEAD) + " |", "|---|---:|---:|---:|"]
    for name, runs in runs_of_variant.items():
        cells = [cell([run[score] for run in runs]) for score in SCORE_NAMES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        if name not in READ_FROM:
            continue
        best = cell([best_rounds(scored_every_round(run)) for run in runs])
        lines.append(f"| {name}, scored as C, each client's best round | {best} | | |")
        for title, score in OTHER_SCORES.items():
            lines.append(f"| {name}, scored as {title} | {cell([run[score] for run in runs])} | | |")
    return "\n".join(lines)


def main(words: list[str]) -> None:
    """Run the comparison, and print its table."""
    perada(["compare", COMPARISON, "--output", str(OUTPUT), *words])
    print(table(json.loads(OUTPUT.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main(sys.argv[1:])
