# SPDX-License-Identifier: Apache-2.0
"""perada beside its peers: ``python -m benchmarks peers [--help]``."""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import machine_facts
from benchmarks.peers.measure import Measurement, missing_packages, run_process
from benchmarks.peers.prepare import prepare
from benchmarks.peers.scores import TOLERANCE, Score, score
from benchmarks.peers.tasks import FRAMEWORKS, TASK_FILE, TASKS, Task, quick_task, save_task_data, unsupported_reason
from benchmarks.timing import ratio
from perada.results.report import table
from perada.system.files import write_atomic

MEMORY_ROUNDS = 2
"""Rounds of the turn in which memory is sampled: after them a process has all that it needs."""


@dataclass(frozen=True)
class Outcome:
    """What came of one framework on one task.

    Attributes:
        framework: Its name.
        reason: Why there are no figures; empty if there are.
        turns: A process for each turn.
        peak_mb: Peak memory of a process with its children, in a turn of its own.
        score: Of what the last turn trained.
    """

    framework: str
    reason: str = ""
    turns: tuple[Measurement, ...] = ()
    peak_mb: float = 0.0
    score: Score | None = None


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        interpreters: The interpreter of each framework that is measured.
        turns: How often the frameworks take turns.
        threads: Threads of each.
    """

    interpreters: dict[str, str]
    turns: int
    threads: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the tasks, print a table after each, and write all figures as JSON."""
    options = _parser().parse_args(arguments)
    # What ends this process ends the one that it measures, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    interpreters = {}
    for framework in FRAMEWORKS:
        if framework == "perada" or framework in options.peers:
            interpreters[framework] = sys.executable if framework == "perada" else options.peer_python
    missing = {}
    for framework, python in interpreters.items():
        missing[framework] = missing_packages(python, framework)
        if missing[framework]:
            print(f"{framework} is left out: {missing[framework]}", flush=True)
    settings = Settings(interpreters, 1 if options.quick else options.turns, options.threads)
    results: list[dict[str, Any]] = []
    for name in options.task or TASKS:
        task = quick_task(TASKS[name]) if options.quick else TASKS[name]
        try:
            outcomes = measure_task(task, settings, missing)
        except KeyboardInterrupt:
            where = f"; the tasks before it are in {options.output}" if results else ""
            sys.exit(f"interrupted in the task {name}{where}")
        rows = rows_of(name, outcomes)
        print(f"\n{task.description}, {settings.threads} threads, {settings.turns} turns\n")
        print(markdown(rows), flush=True)
        for line in warnings_of(outcomes):
            print(f"\n{line}", flush=True)
        machine = machine_facts("cpu") | {"threads": settings.threads}
        results += [row | {"description": task.description, "turns": settings.turns} | machine for row in rows]
        # After each task, so that what is known stays if the process is ended.
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(options.output, json.dumps(results, indent=1, ensure_ascii=False).encode())


def measure_task(task: Task, settings: Settings, missing: dict[str, str]) -> list[Outcome]:
    """Run a task through all frameworks in turns.

    Args:
        task: The task.
        settings: How to measure.
        missing: Why a framework cannot be run at all, by its name; empty where it can.
    """
    reasons = {}
    for framework in settings.interpreters:
        reasons[framework] = missing[framework] or unsupported_reason(framework, task)
    turns: dict[str, list[Measurement]] = {framework: [] for framework in settings.interpreters}
    peaks: dict[str, float] = {}
    rounds = 1 + task.timed_rounds
    data = prepare(task, max(rounds, MEMORY_ROUNDS))
    with tempfile.TemporaryDirectory(prefix="peers") as folder_name:
        folder = Path(folder_name)
        save_task_data(data, folder / TASK_FILE)
        # The turn in which memory is sampled is not timed, and fills the caches of the disk.
        for turn in range(1 + settings.turns):
            for framework, python in settings.interpreters.items():
                if reasons[framework]:
                    continue
                try:
                    if turn == 0:
                        process = run_process(python, framework, folder, MEMORY_ROUNDS, settings.threads, True)
                        peaks[framework] = process.peak_mb
                    else:
                        turns[framework].append(run_process(python, framework, folder, rounds, settings.threads))
                except RuntimeError as error:
                    reasons[framework] = str(error)
    outcomes = []
    for framework, reason in reasons.items():
        if reason:
            outcomes.append(Outcome(framework, reason))
            continue
        processes = tuple(turns[framework])
        trained_score = score(data, processes[-1].training)
        outcomes.append(Outcome(framework, "", processes, peaks[framework], trained_score))
    return outcomes


def rows_of(task_name: str, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return a row of figures for each framework. Ratios are medians over the turns, to perada in the same turn."""
    seconds = {}
    for outcome in outcomes:
        seconds[outcome.framework] = [process.round_seconds for process in outcome.turns]
    rows = []
    for outcome in outcomes:
        row: dict[str, Any] = {"benchmark": "peers", "task": task_name, "framework": outcome.framework}
        if outcome.score is None:
            rows.append(row | {"reason": outcome.reason})
            continue
        row["round, s"] = _significant(statistics.median(seconds[outcome.framework]))
        if seconds.get("perada"):
            row["round / perada's"] = ratio(seconds[outcome.framework], seconds["perada"])
        row["peak, MB"] = round(outcome.peak_mb)
        starts = [process.seconds_to_first_round for process in outcome.turns]
        first_rounds = [process.first_round_seconds for process in outcome.turns]
        row["to the first round, s"] = _significant(statistics.median(starts))
        row["first round, s"] = _significant(statistics.median(first_rounds))
        row["loss"] = round(outcome.score.loss, 4)
        row["accuracy"] = round(outcome.score.accuracy, 3)
        row["rounds of each turn, s"] = [round(each, 4) for each in seconds[outcome.framework]]
        row["versions"] = outcome.turns[-1].training.versions
        rows.append(row)
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of a task. What could not be run has its reason below."""
    hidden = {"benchmark", "task", "reason", "rounds of each turn, s", "versions"}
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in hidden]
    cells = [[str(row.get(name, "–")) for name in columns] for row in rows]
    notes = [f"{row['framework']}: {row['reason']}" for row in rows if "reason" in row]
    return "\n\n".join([table(columns, cells), *notes])


def warnings_of(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a line for each framework whose loss is not perada's to three digits: it trained something else."""
    scores = {outcome.framework: outcome.score for outcome in outcomes if outcome.score is not None}
    reference = scores.get("perada")
    if reference is None:
        return []
    lines = []
    for framework, other in scores.items():
        difference = abs(other.loss - reference.loss) / reference.loss
        if difference > TOLERANCE:
            lines.append(f"{framework}'s loss differs from perada's by {difference:.1%}: do not compare their seconds")
    return lines


def _significant(value: float) -> float:
    """Return a number with three significant digits."""
    return float(f"{value:.3g}")


def _positive_integer(text: str) -> int:
    """Parse an integer >= 1."""
    # Not only int(): argparse would name this function in the message about a word.
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks peers",
        description="The same training through perada, pfl-research and Flower's simulation, each in its own process, "
        "in turns: seconds a round, peak memory of the process and its children, start, loss and accuracy.",
    )
    parser.add_argument("--task", nargs="+", choices=list(TASKS), help="By default all.")
    parser.add_argument(
        "--turns", type=_positive_integer, default=3, help="Processes of each framework that are timed (default: 3)."
    )
    parser.add_argument("--quick", action="store_true", help="Tiny models, one turn: shows that the peers run.")
    parser.add_argument("--peers", nargs="*", choices=FRAMEWORKS[1:], default=FRAMEWORKS[1:], help="By default both.")
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        metavar="PATH",
        help="Interpreter that has pfl, flwr[simulation], torch, timm and peft (default: this one).",
    )
    parser.add_argument("--threads", type=_positive_integer, default=os.cpu_count() or 1, help="By default all cores.")
    parser.add_argument("--output", type=Path, default=Path("lightning_logs/peers.json"))
    return parser


if __name__ == "__main__":
    main()
