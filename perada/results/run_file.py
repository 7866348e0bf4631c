# SPDX-License-Identifier: Apache-2.0
"""A run's folder: its file ``run.json``, and files that come into it together. Nothing large is imported."""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perada.core.checks import OptionError, check_integer
from perada.core.digests import SUMS_FILE, WrongFormat, check_format, check_sealed, digest_of, sealed
from perada.core.files import check_links, locked, sync, write_atomic

STAGE, READY = ".perada-saving", ".perada-saved"
"""Folders within the folder: of what is being written, and of what has been written in full and is to be moved."""


@contextmanager
def together(folder: Path) -> Iterator[Path]:
    """Give a folder to write into; at the end its files take their places in ``folder``, in which others stay.

    Until the last of them is written nothing in ``folder`` has changed. From then on the new ones count: if moving them
    is interrupted, :func:`finish` completes it. Files are locked meanwhile, by which those of a living process can be
    told from what one that was killed left behind. An OSError of the disk, such as that it is full, names the folder
    and says which of both is the case; a BlockingIOError that another process writes there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finish(folder)
    stage = folder / STAGE
    with ExitStack() as held:
        try:
            stage.mkdir()
            alone = held.enter_context(locked(stage)) and stage.is_dir()
        except FileExistsError:
            alone = False
        if not alone:
            what = f"another process is writing a run into {str(folder)!r}; wait until it has ended"
            raise BlockingIOError(errno.EAGAIN, f"{what}, or give another folder")
        try:
            yield stage
            sync([stage, *stage.rglob("*")])
            stage.rename(folder / READY)
        except BaseException as error:
            shutil.rmtree(stage, ignore_errors=True)
            if not isinstance(error, OSError) or error.errno is None:
                raise
            reason = error.strerror if error.filename is None else error
            what = f"{str(folder)!r} could not be written, and was not changed"
            raise OSError(error.errno, f"{what} ({reason})") from error
        try:
            sync([folder])
            _move(folder)
        except OSError as error:
            what = f"{str(folder)!r} was written, but not all files are in their places: load it, or write it again"
            raise OSError(error.errno, f"{what} ({error})") from error


def finish(folder: Path) -> None:
    """Put in place what was written in full before whoever wrote it was killed, and delete what was not.

    What a living process writes is left to it; while it moves files, it is waited for. A ValueError if this would move
    files out of the folder or into it, since links lead there.
    """
    with locked(folder / READY, wait=True):
        _move(folder)
    with locked(folder / STAGE) as alone:
        if alone and (folder / STAGE).is_dir():
            shutil.rmtree(folder / STAGE)


def _move(folder: Path) -> None:
    ready, changed = folder / READY, {folder}
    moved = [] if ready.is_symlink() else sorted(ready.rglob("*"))
    new = {path for path in moved if path.parent == ready and path.is_dir() and not os.path.lexists(folder / path.name)}
    places = {path: folder / path.relative_to(ready) for path in moved if new.isdisjoint(path.parents)}
    folders = [target for path, target in places.items() if path not in new and path.is_dir()]
    for path in (ready, folder / STAGE, *moved, *folders):
        if path.is_symlink():
            raise ValueError(
                f"{str(path)!r} is a link to {str(path.resolve())!r}, and files of the run would be moved there; "
                "delete the link, or save the run into another folder"
            )
    for target in folders:
        target.mkdir(exist_ok=True)
        changed.add(target)
    for path, target in places.items():
        if target not in changed:  # a file, or a folder that is not there yet
            path.replace(target)
    if ready.is_dir():
        sync(changed)  # before the last trace of what is to be moved goes
        with suppress(FileNotFoundError):  # somebody deletes the folder meanwhile
            shutil.rmtree(ready)


RUN_FILE = "run.json"
FORMAT = 1
_OWN = re.compile(r"run\.json|(adapter_config|config)\.json|\w+\.safetensors|SHA256SUMS|(client|global)(_\d+)?")
"""What perada reads in a folder."""
_IN_FOLDER = re.compile(r"(\w+/)?\w+\.safetensors")
_MOST = 10**7
"""Clients, classes or models of a run at most, so that a broken file does not fill the memory."""


DATA_INDEPENDENT_METRICS = ("epoch", "step", "round", "params/", "comm/", "privacy/", "server/")
"""Metrics, or the first parts of their names, in which clients' images have no part that a ledger does not count.

Private training may stop by them, and they are what is published of a private run.
"""


def published(info: Mapping[str, Any], metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``Run.info`` and ``Run.metrics`` of a private run without what follows from clients' images beside the ledgers.

    Scores, losses and diagnostics are left out, those of a client that joined too.
    """
    info = dict(info)
    if "joined" in info:
        info["joined"] = [record | {"before": None, "after": None} for record in info["joined"]]
    rounds = [
        {name: value for name, value in row.items() if name.startswith(_independent_in(row))}
        for row in metrics["rounds"]
    ]
    clients = {name: values for name, values in metrics["clients"].items() if name.startswith("privacy/")}
    return info, {"rounds": rounds, "clients": clients}


def _independent_in(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Those of :data:`DATA_INDEPENDENT_METRICS` that are independent in a round of a simulation, or of a deployment.

    A deployment measures the bytes that came, and counts the parameters of those that answered. A site whose training
    broke sends a short reply, and whether it does depends on its images.
    """
    if not any(name.startswith("deploy/") for name in row):
        return DATA_INDEPENDENT_METRICS
    return tuple(start for start in DATA_INDEPENDENT_METRICS if start not in ("params/", "comm/"))


@dataclass
class RunFile:
    """What the file holds.

    Attributes:
        num_clients: M.
        info: What the run was (:class:`perada.Run`).
        metrics: How it went.
        global_models: States that the global model averages.
        shared: Whether clients have no states of their own.
        in_checkpoints: Whether the states are in the folder's checkpoints: what a fit leaves.
        train_sizes: Training images of each client, of a fit.
        command: What was typed, word by word.
        files: Digests of the tensors' files, by their paths in the folder.
    """

    num_clients: int
    info: dict[str, Any]
    metrics: dict[str, Any]
    global_models: int = 1
    shared: bool = False
    in_checkpoints: bool = False
    train_sizes: list[int] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Look at what a file held that anyone may have written; whoever shows the privacy checks that."""
        info, clients = self.info, self.num_clients
        counts = {"num_clients": clients, "global_models": self.global_models, "num_classes": info["num_classes"]}
        for name, number in counts.items():
            check_integer(name, number, le=_MOST)
        check_integer("built_for", info["built_for"], optional=True)
        check_list(info.get("lora_ranks", []), None, kind=int)
        for rank in info.get("lora_ranks", []):
            check_integer("a rank", rank)
        for key, count in (("classes", info["num_classes"]), ("clients", clients)):
            if info.get(key) is not None:
                check_list(info[key], count, kind=str)
        joined = [record["client"] for record in info.get("joined", [])]
        absent = [*info.get("forgotten", []), *info.get("elsewhere", [])]
        for number in (*joined, *absent, *info.get("own_adapters", [])):
            check_integer("client", number, 0, le=clients - 1)
        check_list([info.get("adapter_of", ""), *(info.get("training") or {}).keys()], None, kind=str)
        needed = "backbone pretrained image_size preprocessing training train_backbone global_model"
        missing = set(needed.split()) - set(info)
        if missing or not all(map(_IN_FOLDER.fullmatch, self.files)):
            raise KeyError(f"info lacks {sorted(missing)}, or files names what is not a file of a saved run")
        check_list([row["round"] for row in self.metrics["rounds"]], None, kind=int)
        check_list([[*row.values()] for row in self.metrics["rounds"]], None, None)
        scores = [*self.metrics["clients"].values(), *self.metrics.get("initial", {}).values()]
        for row in self.metrics.get("by_round", []):
            check_list([row["round"]], 1, kind=int)
            scores.append(row["personal/local_test"])
        scores += [self.metrics["global/local_test"]] if "global/local_test" in self.metrics else []
        check_list(scores, None, clients)
        check_list(self.metrics.get("test_images", [0] * clients), clients, kind=int)
        check_list(self.train_sizes or [0] * clients, clients, kind=int)
        check_list(self.command, None, kind=str)


def check_list(values: Any, length: int | None, *inner: int | None, kind: Any = int | float) -> None:  # noqa: ANN401
    """Refuse, by a TypeError, what is not a list of so many (None: any) values, or of lists that are as ``inner``.

    Those of ``kind`` int are counts.
    """
    if not isinstance(values, list) or length not in (None, len(values)):
        raise TypeError(f"{str(values)[:40]!r} is not a list of {length or 'any length'}")
    for value in values:
        if inner:
            check_list(value, *inner, kind=kind)
        elif not isinstance(value, kind) or (kind is int and value < 0):
            raise TypeError(f"{str(value)[:40]!r} is not what may stand there")


@contextmanager
def naming(what: Path | str, remedy: str = "take a copy that is whole, save it again, or delete it") -> Iterator[None]:
    """Name a file that does not hold what perada writes, by a ValueError; anyone may have written it."""
    said = f"{str(what)!r} is broken" if isinstance(what, Path) else what
    try:
        yield
    except WrongFormat:
        raise
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        # An option's error says what is wrong; of Python's own the type does ("KeyError: 'rounds'").
        reason = str(error) if isinstance(error, OptionError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{said} ({reason}); {remedy}") from error


def write_run(folder: Path, content: RunFile) -> None:
    """Write the file into ``folder``, where it stands in full or not at all."""
    write_json(folder / RUN_FILE, {"format": FORMAT} | vars(content))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file, whole or not at all: NaN becomes null, infinity a word, and a list of numbers is one line.

    Its first entry is a digest of the others (:func:`perada.core.digests.sealed`).
    """
    text = json.dumps(sealed(_replace(content, _to_json)), indent=2, allow_nan=False)
    # No string of JSON holds a line break, so that only what is between values is taken out.
    text = re.sub(r"\[[^\[\]{}]*\]", lambda found: re.sub(r"\n *", " ", found[0]), text)
    write_atomic(path, text.encode() + b"\n", durable=False)


def read_run(folder: Path) -> RunFile:
    """Read the file in ``folder``.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is not what :func:`write_run` wrote, or the folder has links to what is outside.
    """
    path = folder / RUN_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{str(folder)!r} holds no run: it has no {RUN_FILE}; give one that Run.save wrote")
    check_links(folder, _OWN)
    with naming(path):
        content = dict(check_sealed(json.loads(path.read_text(encoding="utf-8"))))
        check_format(path, content.pop("format"), FORMAT)
        read = RunFile(**content)
        read.metrics = numbers_of(read.metrics)
        if read.info.get("privacy"):
            read.info["privacy"] = _replace(read.info["privacy"], _from_json)
        read.check()
    return read


def holds_adapters(folder: Path) -> bool:
    """Whether a folder has a run's adapters as PEFT folders, and not in checkpoints."""
    return (folder / RUN_FILE).is_file() and not read_run(folder).in_checkpoints


def check_files(folder: Path, files: Mapping[str, str]) -> None:
    """Compare a run's files of tensors with their digests in ``run.json``; a missing one is named where it is read.

    Raises:
        ValueError: If a file is not the run's, or the digests beside it are missing.
    """
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            continue
        if path.parent != folder and not (path.parent / SUMS_FILE).is_file():
            raise ValueError(f"{str(path.parent)!r} lacks {SUMS_FILE}; copy the whole folder")
        if digest_of(path) != digest:
            raise ValueError(
                f"{str(path)!r} was changed or damaged since it was written, or is of another run, as {RUN_FILE} "
                "shows; take a copy of the folder that is whole, or save the run again"
            )


def _replace(content: Any, change: Callable[[Any], Any]) -> Any:  # noqa: ANN401  # any JSON
    """Apply ``change`` to the values within dictionaries and lists."""
    if isinstance(content, dict):
        return {key: _replace(value, change) for key, value in content.items()}
    if isinstance(content, list):
        return [_replace(value, change) for value in content]
    return change(content)


def _to_json(value: Any) -> Any:  # noqa: ANN401  # a number, a word, None
    """JSON has no NaN, which becomes null, and no infinity, which becomes a word that ``float`` reads."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else str(value)


def numbers_of(content: Any) -> Any:  # noqa: ANN401  # any JSON
    """What :func:`write_json` made of metrics as they were: null is NaN, and a word may be infinity."""
    return _replace(content, lambda value: math.nan if value is None else _from_json(value))


def _from_json(value: Any) -> Any:  # noqa: ANN401  # a number, a word, None
    return float(value) if value in ("inf", "-inf") else value
