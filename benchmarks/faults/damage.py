# SPDX-License-Identifier: Apache-2.0
"""Files in which a bit was flipped, or that were cut off: reading one names it, or gives what it gave before."""

import json
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import perada
from benchmarks.faults.job import Job
from benchmarks.faults.labels import LABELS
from benchmarks.faults.outcomes import HARMLESS, REPORTED, Campaign, Verdict
from perada.data import FromFile
from perada.data.partitions import Split
from perada.studies.compare.results import Results
from perada.studies.report.records import RunRecord, read_records
from perada.system.digests import sealed

Read = Callable[[Path, Job], Any]
"""Reads a file in a copy of an example's folder, given the job that wrote it."""
JOBS = tuple(Job("ditto", "disk", rounds=2, labels=labels) for labels in LABELS)
"""The jobs of the examples."""
VERSION = Path("lightning_logs/version_0")
FILES = {
    "checkpoint": VERSION / "checkpoints" / "last.ckpt",
    "run.json of a fit": VERSION / "run.json",
    "partition.json": Path("partition.json"),
    "results of compare": Path("compare.json"),
    "run.json": Path("saved/run.json"),
}
"""Files of an example, by kind."""
BIT_FLIPPED = "bit flipped"
CUT_OFF = "cut off"


@dataclass(frozen=True)
class Example:
    """A folder with the files of a run and of a comparison.

    Attributes:
        job: The job of the run.
        folder: The folder.
    """

    job: Job
    folder: Path


def make_examples(folder: Path) -> list[Example]:
    """Make an example of each job below a folder."""
    examples = []
    for job in JOBS:
        run = folder_of(job, folder)
        _make_files(job, run)
        examples.append(Example(job, run))
    return examples


def folder_of(job: Job, folder: Path) -> Path:
    """Return the folder of the example of a job, below the folder of all examples."""
    return folder / job.labels.replace(" ", "_")


def _make_files(job: Job, run: Path) -> None:
    """Make the files of an example."""
    trained = job.train(run)
    trained.save(run / "saved")
    trained.export(run / "exported")
    comparison = Results(run / FILES["results of compare"])
    comparison.records = [{"stage": "run", "args": [], "recipe": "r", "label": "a", "seed": 0, "global": 0.25}] * 2
    comparison.arrange([])
    (run / FILES["partition.json"]).write_text(json.dumps(sealed({"train": [[0, 2], [1]], "test": [[0], [1, 2]]})))


@dataclass(frozen=True)
class Target:
    """A kind of files to be damaged.

    Attributes:
        kind: The kind.
        pattern: Pattern of the files' paths below the folder of an example.
        read: Reads them.
    """

    kind: str
    pattern: str
    read: Read

    def files(self, folder: Path) -> list[Path]:
        """Return the files of this kind below a folder."""
        return sorted(path for path in folder.glob(self.pattern) if path.is_file())


def damage(campaign: Campaign, folder: Path, seed: int, bits: int, cuts: int) -> None:
    """Damage files of each kind.

    Args:
        campaign: Where the verdicts are recorded.
        folder: Folder for the files.
        seed: Seed of all draws.
        bits: Bits that are flipped, each in another copy.
        cuts: Places at which files are cut off.
    """
    examples = make_examples(folder)
    targets = [
        Target("checkpoint", str(FILES["checkpoint"]), _resume),
        Target("client files", str(VERSION / "clients" / "*.safetensors"), _resume),
        Target("saved run", "saved/**/*", _load_run),
        Target("adapter folders", "exported/**/*", _load_exported),
        Target("partition.json", str(FILES["partition.json"]), divide),
        Target("run.json of a fit", str(FILES["run.json of a fit"]), _read_run_folder),
        Target("results of compare", str(FILES["results of compare"]), _read_results),
    ]
    for target in targets:
        expected = [_comparable(target.read(example.folder, example.job)) for example in examples]
        for way, count in ((BIT_FLIPPED, bits), (CUT_OFF, cuts)):

            def judge(number: int, target: Target = target, way: str = way, expected: list[str] = expected) -> Verdict:
                random_source = random.Random(f"{target.kind}/{way}/{seed}/{number}")
                index = random_source.randrange(len(examples))
                example = examples[index]
                copy = folder / "copy"
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(example.folder, copy)
                files = target.files(copy)
                path = files[number % len(files)]
                place = _damage(path, way, random_source)
                outcome = _read_damaged(path, copy, lambda root: target.read(root, example.job), expected[index])
                return Verdict(outcome, f"{example.job.labels}, {path.relative_to(copy)}, {place}")

            campaign.try_all(f"{way}: {target.kind}", count, judge)


def _damage(path: Path, way: str, random_source: random.Random) -> str:
    """Damage a file at a random place, and return the place."""
    content = bytearray(path.read_bytes())
    byte = random_source.randrange(len(content))
    bit = random_source.randrange(8)
    if way == BIT_FLIPPED:
        content[byte] ^= 1 << bit
    else:
        del content[byte:]
    path.write_bytes(content)
    return f"byte {byte}, bit {bit}"


def _read_damaged(path: Path, root: Path, read: Callable[[Path], Any], expected: str) -> str:
    """Read a damaged file, and return the outcome."""

    def names_file(message: str) -> bool:
        return path.name in message or path.parent.name in message

    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        try:
            result = _comparable(read(root))
        except (ValueError, OSError) as error:
            message = str(error)
            return REPORTED if names_file(message) and "\n" not in message else f"names no file: {message[:200]}"
        except Exception as error:  # any other is a bug
            return f"raw {type(error).__name__}: {str(error)[:200]}"
    if any(names_file(str(warning.message)) for warning in caught_warnings):
        return REPORTED
    return HARMLESS if result == expected else "read without a word"


def _resume(root: Path, job: Job) -> perada.Run:
    """Resume a checkpoint after whose last round nothing is left to train."""
    (path,) = root.glob("lightning_logs/*/checkpoints/last.ckpt")
    return job.train(root, str(path), logger=False, enable_checkpointing=False)


def _load_run(root: Path, job: Job) -> perada.Run:
    return perada.Run.load(root / "saved", backbone=job.network())


def _load_exported(root: Path, job: Job) -> perada.Run:
    return perada.Run.load(root / "exported", backbone=job.network())


def _read_run_folder(root: Path, _: Job) -> list[RunRecord]:
    return read_records(root / VERSION)


def _read_results(root: Path, _: Job) -> list[dict[str, Any]]:
    return Results(root / FILES["results of compare"]).records


def divide(root: Path, _: Job) -> list[list[int]]:
    """Divide three images by ``partition.json``."""
    split = Split(np.zeros(3, dtype=np.int64), np.arange(3))
    train, test = FromFile(str(root / FILES["partition.json"])).split(split, split, 0)
    return [rows.tolist() for rows in (*train, *test)]


def _comparable(result: object) -> str:
    """Return the relevant parts of what was read, as text that can be compared."""
    if isinstance(result, perada.Run):
        personal = []
        for state in result.states("personal"):
            personal.append({key: value.tolist() for key, value in state.items()})
        shared = [value.tolist() for value in result.state("global").values()]
        return repr((personal, shared, result.metrics["clients"], result.info))
    if isinstance(result, list):
        without_folders = []
        for item in result:
            without_folders.append(replace(item, folder=Path()) if isinstance(item, RunRecord) else item)
        return repr(without_folders)
    return repr(result)
