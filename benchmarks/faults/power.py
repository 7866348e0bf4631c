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
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import perada
from benchmarks.faults.job import Job
from benchmarks.faults.outcomes import SURVIVED, Campaign, Verdict
from perada.federation.store import locate
from perada.lightning.checkpoint import AtomicCheckpointIO
from perada.results.restore import newest_intact
from perada.system.digests import digest_of

CALLS = ("fsync", "rename", "replace", "link", "unlink", "remove", "mkdir", "rmdir")
"""Functions of ``os`` that change names or sync."""


@dataclass(frozen=True)
class File:
    """A file as it is in memory."""

    inode: int
    content: bytes


Tree = dict[str, File | None]
"""By path below a folder a file, or None for a folder."""
Disk = dict[str, bytes | None]
"""By path below a folder the content of a file, or None for a folder."""


class Recorder:
    """Records what the disk may hold at each call that changes names or syncs, while ``with`` lasts.

    Args:
        folder: The folder that is recorded.

    Attributes:
        states: What a crash may leave, each once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.states: dict[tuple[Any, ...], Disk] = {}
        self._patches = ExitStack()
        self._lock = threading.RLock()  # files may be written by several threads
        tree = _read_tree(folder)
        self._synced = {file.inode: file.content for file in tree.values() if file is not None}
        """Content by inode that reached the disk."""
        self._trees: list[Tree] = [tree]
        """Names since a folder was synced, any of which the disk may have."""

    def __enter__(self) -> "Recorder":
        for name in CALLS:
            original = getattr(os, name)
            self._patches.enter_context(mock.patch.object(os, name, self._recording(name, original)))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        self._record()

    def _recording(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of ``os`` that records the disk before and after the call."""

        def call(*args: object, **options: object) -> object:
            with self._lock:
                self._record()
                result = original(*args, **options)
                if name == "fsync":
                    self._sync(os.fstat(args[0]).st_ino)
                self._record()
                return result

        return call

    def _sync(self, inode: int) -> None:
        for file in _read_tree(self.folder).values():
            if file is not None and file.inode == inode:
                self._synced[inode] = file.content
                return
        # A folder: the names before cannot come back.
        self._trees = self._trees[-1:]

    def _record(self) -> None:
        """Record all that the disk may hold now."""
        tree = _read_tree(self.folder)
        inodes = {file.inode for each in (tree, *self._trees) for file in each.values() if file is not None}
        # An inode without a name may be given to another file.
        self._synced = {inode: content for inode, content in self._synced.items() if inode in inodes}
        if _names_differ(tree, self._trees[-1]):
            self._trees.append(tree)
        for possible_tree in self._trees:
            disk: Disk = {}
            for path, file in possible_tree.items():
                disk[path] = None if file is None else self._synced.get(file.inode, b"")
            self.states.setdefault(tuple(sorted(disk.items(), key=lambda item: item[0])), disk)


def _names_differ(tree: Tree, earlier: Tree) -> bool:
    """Return whether paths, or the files that they stand for, are others than before."""
    if tree.keys() != earlier.keys():
        return True
    for path, file in earlier.items():
        new_file = tree[path]
        new_inode = 0 if new_file is None else new_file.inode
        if file is not None and file.inode != new_inode:
            return True
    return False


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


def _read_tree(folder: Path) -> Tree:
    """Return the files and folders below a folder."""
    tree: Tree = {}
    for path in folder.rglob("*"):
        try:
            file = None if path.is_dir() else File(path.stat().st_ino, path.read_bytes())
        except FileNotFoundError:  # it was deleted meanwhile
            continue
        tree[str(path.relative_to(folder))] = file
    return tree


@dataclass(frozen=True)
class Subject:
    """Something during which the power fails.

    Attributes:
        name: Name in the table.
        folder: The folder that it writes into.
        work: Does it.
        is_intact: Whether what a crash left can be read.
    """

    name: str
    folder: Path
    work: Callable[[], object]
    is_intact: Callable[[Path], bool]


def power(campaign: Campaign, folder: Path) -> None:
    """Cut the power at each moment of a ``Run.save`` over another, of rounds whose clients are in files, and so on.

    Args:
        campaign: Where the verdicts are recorded.
        folder: Folder for the files.
    """
    saved = folder / "saved"
    first = Job("ditto", "disk", rounds=1).train(folder, logger=False)
    second = Job("ditto", "disk", rounds=2).train(folder, logger=False)
    first.save(saved)
    possible_values = [_values(first), _values(second)]

    def is_one_of_both(copy: Path) -> bool:
        return _values(perada.Run.load(copy, backbone=Job().network())) in possible_values

    def save_checkpoints() -> None:
        for epoch in (1, 2):
            AtomicCheckpointIO().save_checkpoint({"epoch": epoch}, folder / "alone" / "last.ckpt")

    def train() -> None:
        Job("ditto", "disk").train(folder / "run")

    subjects = [
        Subject("Run.save over a run", saved, lambda: second.save(saved), is_one_of_both),
        Subject("rounds with checkpoints and client files", folder / "run", train, _is_resumable),
        Subject("checkpoints only", folder / "alone", save_checkpoints, _is_resumable),
    ]
    for subject in subjects:
        kind = f"power failure: {subject.name}"
        if campaign.verdicts.get(kind):  # all states come from one recording, so they are tried together
            continue
        subject.folder.mkdir(parents=True, exist_ok=True)
        outcomes = []
        for copy in crashes(subject.folder, subject.work, folder / "copy"):
            outcomes.append(_outcome_of(copy, subject.is_intact))
        for number, outcome in enumerate(outcomes):
            campaign.add(kind, number, Verdict(outcome, f"state {number}"))


def _outcome_of(copy: Path, is_intact: Callable[[Path], bool]) -> str:
    """Read what a crash left, and return the outcome."""
    try:
        return SURVIVED if is_intact(copy) else "reads as neither"
    except Exception as error:  # whatever a broken file raises
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _values(run: perada.Run) -> list[list[float]]:
    """Return the numbers of all personal states."""
    values = []
    for state in run.states("personal"):
        values += [value.flatten().tolist() for value in state.values()]
    return values


def _is_resumable(folder: Path) -> bool:
    """Return whether the newest checkpoint, if there is one, is intact and has its clients' files."""
    checkpoints = sorted(folder.rglob("last*.ckpt"))
    path = newest_intact(checkpoints)
    if path is None or path.name != "last.ckpt":  # the newest, if there is one, is not intact
        return not checkpoints
    content = torch.load(path, weights_only=True)
    if "perada" not in content:
        return "epoch" in content
    clients = locate(content["perada"]["federation"]["clients"], path)
    # The names of the files have their digests.
    return all(digest_of(Path(clients["folder"], name))[:32] in name for name in clients["files"].values())
