# SPDX-License-Identifier: Apache-2.0
"""Files in which a bit has changed, or that were cut off: each is named when it is read, or reads as it was."""

import json
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import perada
from benchmarks.faults.job import Job, network
from benchmarks.faults.outcomes import Campaign
from perada.core.digests import sealed
from perada.data import FromFile
from perada.data.partitions import Split
from perada.studies.compare.results import Results
from perada.studies.report.records import RunRecord, read_records

Read = Callable[[Path], Any]
"""Reads a copy of the folder in which a file was damaged; what it gives is compared."""


TRAINED = Job("ditto", "disk", rounds=2)


VERSION = Path("lightning_logs/version_0")
FILES = {
    "checkpoint": VERSION / "checkpoints" / "last.ckpt",
    "run.json of a fit": VERSION / "run.json",
    "partition.json": Path("partition.json"),
    "results of compare": Path("compare.json"),
    "run.json": Path("saved/run.json"),
}
"""Where they are in an example."""


def example(run: Path) -> Path:
    """A folder with all that a run and a comparison leave; its path is returned."""
    TRAINED.train(run).save(run / "saved")
    comparison = Results(run / FILES["results of compare"])
    comparison.records = [{"stage": "run", "args": [], "recipe": "r", "label": "a", "seed": 0, "global": 0.25}] * 2
    comparison.arrange([])
    (run / "partition.json").write_text(json.dumps(sealed({"train": [[0, 2], [1]], "test": [[0], [1, 2]]})))
    return run


def damage(campaign: Campaign, folder: Path, seed: int, bits: int, cuts: int) -> None:
    """Flip ``bits`` bits in each kind of file, and cut files off at ``cuts`` places."""
    run = example(folder / "run")
    kinds: dict[str, tuple[list[Path], Read]] = {
        "checkpoint": ([run / FILES["checkpoint"]], _resumed),
        "client files": (sorted((run / VERSION / "clients").glob("*.safetensors")), _resumed),
        "adapter folders": (sorted(path for path in (run / "saved").rglob("*") if path.is_file()), _loaded),
        "partition.json": ([run / FILES["partition.json"]], divided),
        "run.json of a fit": ([run / FILES["run.json of a fit"]], lambda root: read_records(root / VERSION)),
        "results of compare": (
            [run / FILES["results of compare"]],
            lambda root: Results(root / FILES["results of compare"]).records,
        ),
    }
    for kind, (files, read) in kinds.items():
        expected = _shown(read(run))
        for how, count in (("bit flipped", bits), ("cut off", cuts)):
            judge = partial(_judged, (folder, run), files, how, read, expected, f"{kind}/{how}/{seed}")
            campaign.each(f"{how}: {kind}", count, judge)


def _judged(
    folders: tuple[Path, Path], files: list[Path], how: str, read: Read, expected: object, of: str, number: int
) -> tuple[str, str]:
    """Damage a file of a copy of the run, drawn by what it is ``of`` and a number."""
    folder, run = folders
    draw = random.Random(f"{of}/{number}")
    shutil.rmtree(folder / "copy", ignore_errors=True)
    copied = shutil.copytree(run, folder / "copy")
    path = copied / files[number % len(files)].relative_to(run)
    return _damaged(path, copied, how, draw, read, expected)


def _damaged(path: Path, root: Path, how: str, draw: random.Random, read: Read, expected: object) -> tuple[str, str]:
    content = bytearray(path.read_bytes())
    place, bit = draw.randrange(len(content)), draw.randrange(8)
    if how == "bit flipped":
        content[place] ^= 1 << bit
    path.write_bytes(content if how == "bit flipped" else content[:place])
    what = f"{path.relative_to(root)}, byte {place}, bit {bit}"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            shown = _shown(read(root))
        except (ValueError, OSError) as error:
            named = path.name in str(error) or path.parent.name in str(error)
            return ("named" if named and "\n" not in str(error) else f"names no file: {str(error)[:200]}"), what
        except Exception as error:  # what should not be
            return f"raw {type(error).__name__}: {str(error)[:200]}", what
    if any(path.name in str(one.message) or path.parent.name in str(one.message) for one in warned):
        return "named", what
    return ("harmless" if shown == expected else "read without a word"), what


def _resumed(root: Path) -> perada.Run:
    """What a checkpoint holds, after whose last round nothing is left to train."""
    (path,) = root.glob("lightning_logs/*/checkpoints/last.ckpt")
    return TRAINED.train(root, str(path), logger=False, enable_checkpointing=False)


def _loaded(root: Path) -> perada.Run:
    return perada.Run.load(root / "saved", backbone=network())


def divided(root: Path) -> list[list[int]]:
    """The clients of ``partition.json``."""
    split = Split(np.zeros(3, dtype=np.int64), np.arange(3))
    return [own.tolist() for part in FromFile(str(root / "partition.json")).split(split, split, 0) for own in part]


def _shown(read: object) -> object:
    """What counts of it, in types that can be compared."""
    if isinstance(read, perada.Run):
        states = [{key: value.tolist() for key, value in state.items()} for state in read.states("personal")]
        return repr((states, [v.tolist() for v in read.state("global").values()], read.metrics["clients"], read.info))
    if isinstance(read, list):
        return repr([replace(one, folder=Path()) if isinstance(one, RunRecord) else one for one in read])
    return repr(read)
