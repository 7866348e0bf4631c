# SPDX-License-Identifier: Apache-2.0
"""Power failures: what a disk may hold when a machine stops while files are written, and whether it can be read.

What was not synced may be lost. Names in folders reach a disk in the order in which they were given, as file systems
with a journal promise; a file's content is there if it was synced, and else may be empty.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import perada
from benchmarks.faults.job import Job, network
from benchmarks.faults.outcomes import Campaign
from perada.core.digests import digest_of
from perada.federation.store import locate
from perada.lightning.checkpoint import AtomicCheckpointIO
from perada.results.restore import newest_intact

CALLS = ("fsync", "rename", "replace", "link", "unlink", "remove", "mkdir", "rmdir")
Tree = dict[str, tuple[int, bytes] | None]
"""By path below a folder the inode and content of a file, or None for a folder."""
Disk = dict[str, bytes | None]


class Recorder:
    """The states of a folder at each call that changes names or syncs, while ``with`` lasts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stack, self.lock = folder, ExitStack(), threading.RLock()
        self.synced = {inode: content for inode, content in filter(None, _tree(folder).values())}
        self.names: list[Tree] = [_tree(folder)]  # since a folder was synced
        self.states: dict[tuple[Any, ...], Disk] = {}

    def __enter__(self) -> "Recorder":
        for name in CALLS:
            real = getattr(os, name)
            self.stack.enter_context(mock.patch.object(os, name, self._recording(name, real)))
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()
        self._note()

    def _recording(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object, **options: object) -> object:
            with self.lock:
                self._note()
                result = real(*args, **options)
                if name == "fsync":
                    self._sync(os.fstat(args[0]).st_ino)
                self._note()
                return result

        return call

    def _sync(self, inode: int) -> None:
        own = {found[0]: found[1] for found in _tree(self.folder).values() if found is not None}
        if inode in own:
            self.synced[inode] = own[inode]
        else:
            self.names = self.names[-1:]  # the names before cannot come back

    def _note(self) -> None:
        """Note all that the disk may hold now."""
        now = _tree(self.folder)
        here = {found[0] for tree in (now, *self.names) for found in tree.values() if found is not None}
        self.synced = {inode: content for inode, content in self.synced.items() if inode in here}
        if now.keys() != self.names[-1].keys() or any(
            found is not None and found[0] != (now[path] or (0,))[0] for path, found in self.names[-1].items()
        ):
            self.names.append(now)
        for tree in self.names:
            disk = {path: None if found is None else self.synced.get(found[0], b"") for path, found in tree.items()}
            self.states.setdefault(tuple(sorted(disk.items(), key=lambda item: item[0])), disk)


def crashes(folder: Path, work: Callable[[], object], copy: Path) -> Iterator[Path]:
    """Do ``work``, which writes into ``folder``, and give a ``copy`` of the folder for all that a crash may leave."""
    with Recorder(folder) as recorder:
        work()
    for disk in recorder.states.values():
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir(parents=True)
        for path, content in sorted(disk.items()):
            if content is None:
                (copy / path).mkdir(parents=True, exist_ok=True)
            else:
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                (copy / path).write_bytes(content)
        yield copy


def _tree(folder: Path) -> Tree:
    """All that is below a folder now."""
    found: Tree = {}
    for path in folder.rglob("*"):
        try:
            found[str(path.relative_to(folder))] = None if path.is_dir() else (path.stat().st_ino, path.read_bytes())
        except FileNotFoundError:  # gone meanwhile
            continue
    return found


def power(campaign: Campaign, folder: Path) -> None:
    """Cut the power at each moment of a ``Run.save`` over another, of rounds whose clients are in files, and so on."""
    saved = folder / "saved"
    first, second = (Job("ditto", "disk", rounds=rounds).train(folder, logger=False) for rounds in (1, 2))
    first.save(saved)
    allowed = [_values(first), _values(second)]
    subjects: dict[str, tuple[Path, Callable[[], object], Callable[[Path], bool]]] = {
        "Run.save over a run": (
            saved,
            lambda: second.save(saved),
            lambda path: _values(perada.Run.load(path, backbone=network())) in allowed,
        ),
        "rounds with checkpoints and client files": (
            folder / "run",
            lambda: Job("ditto", "disk").train(folder / "run"),
            _resumable,
        ),
        "checkpoints alone": (
            folder / "alone",
            lambda: [
                AtomicCheckpointIO().save_checkpoint({"epoch": n}, folder / "alone" / "last.ckpt") for n in (1, 2)
            ],
            _resumable,
        ),
    }
    for name, (place, work, judge) in subjects.items():
        kind = f"power failure: {name}"
        if campaign.found.get(kind):  # all states come of one recording
            continue
        place.mkdir(parents=True, exist_ok=True)
        judged = [_judged(state, judge) for state in crashes(place, work, folder / "copy")]
        for number, outcome in enumerate(judged):
            campaign.add(kind, number, outcome, f"state {number}")


def _judged(state: Path, judge: Callable[[Path], bool]) -> str:
    try:
        return "held" if judge(state) else "reads as neither"
    except Exception as error:  # whatever a broken file gives
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _values(run: perada.Run) -> list[list[float]]:
    return [value.flatten().tolist() for state in run.states("personal") for value in state.values()]


def _resumable(folder: Path) -> bool:
    """Whether the newest checkpoint, if there is one, is whole and has its clients' files."""
    found = sorted(folder.rglob("last*.ckpt"))
    path = newest_intact(found)
    if path is None or path.name != "last.ckpt":  # a newer one is there, and not whole
        return not found
    content = torch.load(path, weights_only=True)
    if "perada" not in content:
        return "epoch" in content
    clients = locate(content["perada"]["federation"]["clients"], path)
    return all(digest_of(Path(clients["folder"], name))[:32] in name for name in clients["files"].values())
