# SPDX-License-Identifier: Apache-2.0
"""Files of a stranger: values that do not belong there, under a digest that fits, and links out of the folder.

Each is refused in one line, or read as harmless; nothing is run, and nothing outside the folder is read, written or
moved.
"""

import json
import os
import random
import resource
import shutil
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import perada
from benchmarks.faults.configurations import limited
from benchmarks.faults.damage import FILES, Read, divided, example
from benchmarks.faults.job import Job, network
from benchmarks.faults.outcomes import Campaign
from perada.cli.main import _tables
from perada.core.digests import KEY, sealed, write_sums
from perada.lightning.checkpoint import AtomicCheckpointIO
from perada.results.clients import forget
from perada.studies.report.page import write_page
from perada.studies.report.records import read_records

SCRIPT, SECRET = "<script>alert(1)</script>", "a secret of somebody else"
SECONDS, MEBIBYTES = 60, 1500
"""What reading a small file may take."""


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, (self.path, "w")


def hostile(campaign: Campaign, folder: Path, seed: int, draws: int) -> None:
    """Change values in ``draws`` files of each kind, and put links in the place of as many files and folders."""
    run, outside = example(folder / "run"), folder / "outside"
    outside.mkdir()
    (outside / "secret").write_text(SECRET)
    watch = Watch(outside)
    places: dict[str, tuple[Path, Read]] = {
        "run.json": (FILES["run.json"], _loaded),
        "run.json of a fit": (FILES["run.json of a fit"], _reported),
        "partition.json": (Path("partition.json"), divided),
        "results of compare": (Path("compare.json"), _compared),
        "adapter_config.json": (Path("saved/global/adapter_config.json"), _loaded),
        "checkpoints": (FILES["checkpoint"], _resumed),
    }
    for kind, (place, read) in places.items():
        change = partial(_changed, place=place, outside=outside)
        campaign.each(
            f"hostile values: {kind}", draws, partial(_tried, run, watch, change, read, f"values/{kind}/{seed}")
        )
    for name, use in {"Run.load": _loaded, "Run.save": _saved_over, "perada forget": _forgotten}.items():
        change = partial(_linked, outside=outside)
        campaign.each(
            f"links out of the folder: {name}", draws, partial(_tried, run, watch, change, use, f"{name}/{seed}")
        )


class Watch:
    """What is opened below a folder, and what it holds."""

    def __init__(self, folder: Path) -> None:
        self.root, self.on, self.seen = os.path.realpath(folder), False, list[str]()
        self.before = self._content()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and event in ("open", "os.rename", "os.remove", "shutil.move", "os.link", "os.system", "exec"):
            follows = event == "open" and not (args[2] or 0) & os.O_NOFOLLOW
            for one in args[:2]:
                if isinstance(one, str | os.PathLike) and self._leads(follows, os.fspath(one)):
                    self.seen.append(f"{event} {os.path.basename(os.fspath(one))}")

    def _leads(self, follows: bool, path: str | bytes) -> bool:
        """Whether a path is of the folder; only what opens a file ``follows`` a link at its end, if it may."""
        folder, name = os.path.split(os.fsdecode(path))
        real = os.path.realpath(path) if follows else os.path.join(os.path.realpath(folder), name)
        return os.fsdecode(real).startswith(self.root)

    def _content(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in Path(self.root).rglob("*") if path.is_file()}

    def start(self) -> None:
        """Listen from now on."""
        self.seen, self.on = [], True

    def stop(self) -> str | None:
        """What happened in the folder meanwhile, if anything did."""
        self.on = False
        if (now := self._content()) != self.before:
            shutil.rmtree(self.root)
            for path, content in self.before.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            return f"changed what is outside: {sorted(path.name for path in now)}"
        return f"opened what is outside: {self.seen[0]}" if self.seen else None


def _tried(run: Path, watch: Watch, change: Callable[..., str], read: Read, of: str, number: int) -> tuple[str, str]:
    draw = random.Random(f"{of}/{number}")
    copied = run.with_name("copy")
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(run, copied)
    what = change(draw, copied)
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    watch.start()
    with warnings.catch_warnings(), limited(SECONDS):
        warnings.simplefilter("ignore")
        try:
            found = read(copied)
            outcome = found if isinstance(found, str) else "harmless"
        except TimeoutError:
            outcome = f"took more than {SECONDS} s"
        except (ValueError, OSError) as error:
            outcome = "named" if "\n" not in str(error) else f"several lines: {str(error)[:150]!r}"
        except Exception as error:  # what should not be
            outcome = f"raw {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    outcome = watch.stop() or outcome
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size) / 1024
    if grown > MEBIBYTES:
        outcome = f"took {grown:.0f} MiB"
    if (run.parent / "owned").exists():
        (run.parent / "owned").unlink()
        outcome = "ran what the file holds"
    return outcome, what


def _values(outside: Path, depth: int = 500) -> tuple[Any, ...]:
    """What a stranger may write; among it lists within lists."""
    deep: list[Any] = []
    for _ in range(depth):
        deep = [deep]
    secret = outside / "secret"
    return (
        10**12, -1, 10**30, 1e308, float("nan"), "", "x" * 10**6, SCRIPT, "=1+1", f"../../{outside.name}/secret",
        str(secret), str(outside), f"hf:{outside}", f"local-dir:{outside}", None, True, [], {}, [0] * 10**5, deep,
        {"../x": 1}, "\ud800", "client_0/../../x", 0,
    )  # fmt: skip


def _changed(draw: random.Random, root: Path, place: Path, outside: Path) -> str:
    """Put a value somewhere into a file, with a digest that fits."""
    path = root / place
    if path.suffix == ".ckpt":
        content = torch.load(path, weights_only=True)
        values = (
            *_values(outside, depth=50),
            torch.zeros(0),
            torch.full((3, 3), torch.nan),
            Runs(str(root.parent / "owned")),
        )
        where = _put(draw, content["perada"] if draw.random() < 0.9 else content, values)
        AtomicCheckpointIO().save_checkpoint(content, path)
        return where
    content = json.loads(path.read_text())
    whole = content if isinstance(content, list) else [content]
    had = [record.pop(KEY, None) is not None for record in whole]
    where = _put(draw, content, _values(outside))
    for number, record in enumerate(whole):
        if isinstance(record, dict) and had[number]:
            whole[number] = sealed(record)
    path.write_text(json.dumps(content if isinstance(content, list) else whole[0]))
    if place.name == "adapter_config.json":
        for folder in (path.parent, *path.parent.parent.glob("client_*")):
            if folder != path.parent:
                shutil.copyfile(path, folder / path.name)
            names = [line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()]
            write_sums(folder, names)
    return where


def _put(draw: random.Random, content: dict[str, Any] | list[Any], values: tuple[Any, ...]) -> str:
    """Replace something at a random depth, or a name, or add an entry; say what."""
    at, where = content, ""
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = draw.choice(keys)
        below = at[key]
        where += f"/{key}"
        if not isinstance(below, dict | list) or not below or draw.random() < 0.3:
            break
        at = below
    value = draw.choice(values)
    at[key] = value
    return f"{where} = {repr(value)[:60]}"


def _linked(draw: random.Random, root: Path, outside: Path) -> str:
    """Put a link to what is outside in the place of a file or a folder, or of one that perada makes."""
    saved = root / "saved"
    made = [saved / name for name in (".perada-saved", ".perada-saving", ".run.json.partial", "client_0/.x.partial")]
    path = draw.choice([*sorted(saved.rglob("*")), *made * 5])
    target = outside if path.is_dir() or path in made[:2] else outside / "secret"
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    if path != made[0] and draw.random() < 0.3:  # as if the run before had been killed while its files were moved
        shutil.copytree(root.with_name("run") / "saved", saved / ".perada-saved")
    return f"{path.relative_to(root)} -> {target.name}"


def _loaded(root: Path) -> None:
    run = perada.Run.load(root / "saved", backbone=network())
    run.states("personal")
    run.personal(0)


def _saved_over(root: Path) -> str | None:
    run = perada.Run.load(root.with_name("run") / "saved", backbone=network())
    run.save(root / "saved")
    found = [path for path in (root / "saved").rglob("*") if path.is_file() and not path.is_symlink()]
    return "copied a secret" if any(SECRET.encode() in path.read_bytes() for path in found) else None


def _forgotten(root: Path) -> None:
    forget(root / "saved", 1)


def _reported(root: Path) -> str | None:
    _tables(root / FILES["run.json of a fit"].parent)
    text = write_page(root / "page", read_records(root / FILES["run.json of a fit"].parent)).read_text()
    return "put a script into the page" if SCRIPT in text else None


def _resumed(root: Path) -> None:
    Job("ditto", "disk", rounds=3).train(
        root, str(root / FILES["checkpoint"]), logger=False, enable_checkpointing=False
    )


def _compared(root: Path) -> None:
    _tables(root / FILES["results of compare"])
