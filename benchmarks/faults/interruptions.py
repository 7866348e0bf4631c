# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed, at random moments and at each operation on a file, and runs whose disk is full."""

import multiprocessing
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import perada
from benchmarks.faults.job import network, run
from benchmarks.faults.outcomes import Outcomes
from perada.core.states import State
from perada.results.record import rounds_of_csv

ROUNDS = 3
STORES = ("device", "disk")
TOGETHER = 2
"""Processes at a time."""
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["benchmarks.faults.job"])


def interruptions(folder: Path, seed: int, moments: int, operations: int) -> list[Outcomes]:
    """Kill runs at ``moments`` random times and before ``operations`` operations on files, and fill their disk.

    Each is resumed where it stopped, with its own command. Then states, scores and ``metrics.csv`` are compared with
    those of a run that was left alone: states and scores bit by bit, the table to six digits.
    """
    draw = random.Random(seed)
    expected, seconds = {}, {}
    for store in STORES:
        _finished(folder / f"first_{store}", store)  # starts the server that forks
        begun = time.monotonic()
        whole = _finished(folder / f"whole_{store}", store)
        seconds[store] = time.monotonic() - begun
        expected[store] = _content(whole)
    cases = []
    for number in range(moments):
        store = STORES[number % 2]
        cases.append(("SIGKILL at a random moment", store, "moment", draw.uniform(0.05, 1.0) * seconds[store]))
    for fault, kind, last in (("SIGKILL at an operation on a file", "kill", 140), ("full disk", "full", 60)):
        places = draw.sample(range(last), min(last, operations if kind == "kill" else max(2, operations // 3)))
        cases += [(fault, STORES[place % 2], kind, place) for place in places]
    found = {name: Outcomes(name) for name, *_ in cases}

    def try_one(number: int) -> tuple[str, str, str]:
        name, store, kind, when = cases[number]
        return name, *_interrupted(folder / f"run{number}", store, kind, when, expected[store])

    with ThreadPoolExecutor(TOGETHER) as pool:
        for name, outcome, what in pool.map(try_one, range(len(cases))):
            found[name].add(outcome, what)
    return list(found.values())


def _interrupted(folder: Path, store: str, kind: str, when: float, expected: object) -> tuple[str, str]:
    """Interrupt a run, resume it, and compare what came out."""
    what = f"{store}, {when:.2f}"
    status, said = _job(
        folder, store, "none" if kind == "moment" else kind, int(when), when if kind == "moment" else None
    )
    if kind == "full" and status and (str(folder) not in said or "No space left" not in said or "\n" in said):
        return f"does not say in one line where the disk is full: {said[-300:]!r}", what
    status, said = _job(folder, store, "none")
    if status:
        return f"was not resumed: {said[-300:]!r}", what
    partial = [path.name for path in folder.rglob("*.partial")]
    if partial:
        return f"left {partial}", what
    return ("held" if _equal(_content(folder), expected) else "ended otherwise"), what


def _job(folder: Path, store: str, fault: str, count: int = 0, seconds: float | None = None) -> tuple[int | None, str]:
    """Run in a process of its own, which is killed after some ``seconds``; return its status, and what it said."""
    folder.mkdir(parents=True, exist_ok=True)
    errors = folder.with_suffix(".txt")
    process = PROCESSES.Process(target=run, args=(str(folder), store, ROUNDS, fault, count, str(errors)))
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    return process.exitcode, errors.read_text() if errors.exists() else ""


def _finished(folder: Path, store: str) -> Path:
    status, said = _job(folder, store, "none")
    if status:
        raise RuntimeError(f"a run that nobody interrupts failed: {said}")
    return folder


def _content(folder: Path) -> tuple[list[State], dict[str, list[float]], list[dict[str, str]]]:
    """States and scores of what was saved, and the rounds that the newest ``metrics.csv`` has."""
    saved = perada.Run.load(folder / "saved", backbone=network())
    tables = sorted(folder.glob("lightning_logs/*/metrics.csv"), key=lambda path: int(path.parent.name.split("_")[1]))
    # A resumed run writes a round's training and its scores into one row, and in more digits.
    rows = [{name: f"{value:.6g}" for name, value in row.items()} for row in rounds_of_csv(tables[-1])]
    return saved.states("global") + saved.states("personal"), saved.metrics["clients"], rows


def _equal(found: tuple[list[State], dict[str, list[float]], list[dict[str, str]]], expected: object) -> bool:
    assert isinstance(expected, tuple)
    states = all(
        torch.equal(value, other[key])
        for state, other in zip(found[0], expected[0], strict=True)
        for key, value in state.items()
    )
    return states and found[1] == expected[1] and found[2] == expected[2]
