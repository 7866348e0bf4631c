# SPDX-License-Identifier: Apache-2.0
"""A run's folder: its file ``run.json``, and atomic updates of its files. Nothing large is imported."""

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
from types import UnionType
from typing import Any, Literal, get_args

from perada.core.checks import OptionError, check_choice, check_integer
from perada.core.text import plain_number, quoted
from perada.system.digests import SUMS_FILE, WrongFormat, check_format, check_sealed, digest_of, sealed
from perada.system.files import check_links, locked, sync, write_atomic

STAGE = ".perada-saving"
"""Subfolder with the files that are being written."""
READY = ".perada-saved"
"""Subfolder with files that are complete and are to be moved into the folder."""


@contextmanager
def together(folder: Path) -> Iterator[Path]:
    """Provide a folder to write into, whose files are moved into ``folder`` at the end. Other files there are kept.

    Nothing in ``folder`` changes before all files are written. If the process is killed while they are moved,
    :func:`finish_interrupted_move` completes the move. A lock distinguishes the files of a running process from those
    that a killed process left behind.

    Raises:
        BlockingIOError: If another process is writing to the folder.
        OSError: If the disk fails, for example because it is full. The message names the folder and states whether it
            was changed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finish_interrupted_move(folder)
    stage = folder / STAGE
    with ExitStack() as locks:
        try:
            stage.mkdir()
            # Another process may take the folder for a killed one's, and delete it, before the lock is held.
            is_exclusive = locks.enter_context(locked(stage)) and stage.is_dir()
        except FileExistsError:
            is_exclusive = False
        if not is_exclusive:
            problem = f"another process is writing a run into {str(folder)!r}"
            raise BlockingIOError(errno.EAGAIN, f"{problem}; wait until it has finished, or choose a different folder")
        try:
            yield stage
            sync([stage, *stage.rglob("*")])
            stage.rename(folder / READY)
        except BaseException as error:
            shutil.rmtree(stage, ignore_errors=True)
            if not isinstance(error, OSError) or error.errno is None:
                raise
            # With a file name, the error's text names it and includes strerror.
            reason = error.strerror if error.filename is None else str(error)
            raise OSError(error.errno, f"{str(folder)!r} could not be written and is unchanged ({reason})") from error
        try:
            sync([folder])
            _move_ready_files(folder)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{str(folder)!r} was written, but not all files are in place: load it, or write it again ({error})",
            ) from error


def finish_interrupted_move(folder: Path) -> None:
    """Complete the move of files that a killed process had written completely, and delete its incomplete files.

    Files that a running process is writing are not touched. If it is moving files, this waits for it.

    Raises:
        ValueError: If links would move files out of the folder or into it.
    """
    with locked(folder / READY, wait=True):
        _move_ready_files(folder)
    with locked(folder / STAGE) as is_exclusive:
        if is_exclusive and (folder / STAGE).is_dir():
            shutil.rmtree(folder / STAGE)


def _move_ready_files(folder: Path) -> None:
    """Move the files in :data:`READY` into the folder, and delete :data:`READY`."""
    ready = folder / READY
    # A link would be followed. It is rejected below.
    sources = []
    if not ready.is_symlink():
        sources = sorted(ready.rglob("*"))
    # A folder that does not exist yet is moved as a whole.
    new_folders = set()
    for path in sources:
        if path.parent == ready and path.is_dir() and not os.path.lexists(folder / path.name):
            new_folders.add(path)
    targets = {path: folder / path.relative_to(ready) for path in sources if new_folders.isdisjoint(path.parents)}
    existing_folders = [target for path, target in targets.items() if path not in new_folders and path.is_dir()]
    for path in (ready, folder / STAGE, *sources, *existing_folders):
        if path.is_symlink():
            raise ValueError(
                f"{str(path)!r} is a link to {str(path.resolve())!r}, so files of the run would be moved there; delete "
                "the link, or save the run to a different folder"
            )
    changed = {folder}
    for target in existing_folders:
        target.mkdir(exist_ok=True)
        changed.add(target)
    for path, target in targets.items():
        if target not in changed:  # a file, or a new folder
            path.replace(target)
    if ready.is_dir():
        # The moves must be on the disk before READY, from which they could be repeated, is deleted.
        sync(changed)
        with suppress(FileNotFoundError):  # another process may delete it at the same time
            shutil.rmtree(ready)


RUN_FILE = "run.json"
FORMAT = 2
_READ_FILES = re.compile(r"run\.json|(adapter_config|config)\.json|\w+\.safetensors|SHA256SUMS|(client|global)(_\d+)?")
"""Names of files and subfolders that perada reads in a folder."""
_TENSORS_FILE = re.compile(r"(\w+/)?\w+\.safetensors|adapter_config\.json")
GLOBAL = "global"
"""Kind of the states of the global models; their rows are numbered from 0."""
PERSONAL = "personal"
"""Kind of the states of the clients."""
FIXED = "fixed"
"""Kind of the adapter's tensors that are not trained, such as random projections, in one row."""
TYPICAL = "typical"
"""Kind of what clients need to predict with both models (:meth:`.BothModels.state`)."""
TYPICAL_FILE = f"{TYPICAL}.safetensors"
"""File beside an exported adapter, with what its client needs to predict with both models."""
STATE_FILE = re.compile(rf"({GLOBAL}|{PERSONAL}|{FIXED}|{TYPICAL})(_\d+)?\.safetensors")
"""Names of the files of states: ``personal.safetensors``, and ``personal_2.safetensors`` etc. if there are several."""
_DIGEST = re.compile("[0-9a-f]{64}")
Layout = Literal["checkpoints", "states", "adapters"]
"""Where a run's states are.

They are in the checkpoints of a fit, in the files of states that ``Run.save`` writes, or in the PEFT folders that
``Run.export`` writes.
"""
_MAX_COUNT = 10**7
"""Largest number of clients, classes or models of a run, so that a broken file does not fill the memory."""
_REQUIRED_INFO = {
    "backbone",
    "pretrained",
    "image_size",
    "preprocessing",
    "training",
    "train_backbone",
    "global_model",
    "task",
}
TEXT_HEAD_OPTIONS = {"templates", "class_names", "train_logit_scale", "train_features"}
"""Options of a head from class names, all of which a run records."""


COUNTED_METRICS = frozenset(
    {"params/trained", "params/sent", "comm/up_mb", "comm/down_mb"},
)
"""Numbers of parameters and bytes of a round. A deployment counts those of the sites that replied."""
DATA_INDEPENDENT_METRICS = COUNTED_METRICS | {
    "epoch",
    "step",
    "round",
    "server/skipped_steps",
    "server/distilled",
    "privacy/test_mode",
    "privacy/client_norm",
    "privacy/client_epsilon_max",
    "privacy/epsilon_mean",
    "privacy/epsilon_max",
    *(f"privacy/{ledger}_epsilon_{part}" for ledger in ("release", "server") for part in ("mean", "std", "max")),
}
"""Metrics of a round that do not depend on clients' images beyond what the ledgers account for.

Private training may stop by them, and only they are published of a private run. They are listed in full: a metric of a
callback, or of a custom algorithm, may begin like one of them.
"""
CLIENT_EPSILONS = frozenset({"privacy/release_epsilon", "privacy/server_epsilon", "privacy/client_epsilon"})
"""The ε of each client, which is published of a private run."""


def published(info: Mapping[str, Any], metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``Run.info`` and ``Run.metrics`` of a private run with :data:`DATA_INDEPENDENT_METRICS` only.

    Scores, losses and diagnostics are left out, also those of clients that joined.
    """
    info = dict(info)
    if "joined" in info:
        info["joined"] = [record | {"before": None, "after": None} for record in info["joined"]]
    rounds = []
    for row in metrics["rounds"]:
        names = _data_independent_names(row)
        rounds.append({name: value for name, value in row.items() if name in names})
    clients = {name: values for name, values in metrics["clients"].items() if name in CLIENT_EPSILONS}
    return info, {"rounds": rounds, "clients": clients}


def _data_independent_names(metrics: Mapping[str, Any]) -> frozenset[str]:
    """Return those of :data:`DATA_INDEPENDENT_METRICS` that hold for a round, which may be of a deployment.

    A deployment measures the received bytes, and counts the parameters of the sites that replied. A site whose training
    fails sends a short reply, and whether it fails depends on its images.
    """
    if any(name.startswith("deploy/") for name in metrics):
        return DATA_INDEPENDENT_METRICS - COUNTED_METRICS
    return DATA_INDEPENDENT_METRICS


@dataclass(frozen=True)
class StateRows:
    """The rows of one file of states.

    Attributes:
        rows: Number of the client, or of the global model, of each row.
        sha256: Digest of each row; empty to skip the check.
    """

    rows: list[int]
    sha256: list[str] = field(default_factory=list)


StateIndex = dict[str, StateRows]
"""Rows of all files of states by their names."""


def kind_of(name: str) -> str:
    """Return the kind of the states in a file.

    >>> kind_of("personal_2.safetensors")
    'personal'
    """
    return name.removesuffix(".safetensors").partition("_")[0]


@dataclass
class RunFile:
    """The content of ``run.json``.

    Attributes:
        num_clients: Number of clients M.
        info: See :class:`perada.Run`.
        metrics: See :class:`perada.Run`.
        global_models: Number of states that the global model averages.
        shared: Whether clients have no personal states.
        layout: Where the states are.
        states: Rows of the files of states, by file.
        train_sizes: Training images of each client, for a fit.
        command: The command line, word by word.
        files: Digests of the other files of tensors and of the adapter's configuration, by their paths in the folder.
    """

    num_clients: int
    info: dict[str, Any]
    metrics: dict[str, Any]
    global_models: int = 1
    shared: bool = False
    layout: Layout = "adapters"
    states: StateIndex = field(default_factory=dict)
    train_sizes: list[int] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Validate the content of an untrusted file.

        The privacy record is checked where it is shown, by :func:`perada.results.cards.check_record`.

        Raises:
            ValueError, KeyError or TypeError: If the content is invalid.
        """
        self._check_info()
        self._check_metrics()
        if not isinstance(self.files, dict):
            raise TypeError("files is not a mapping of paths to digests")
        check_list([*self.files.values()], None, value_type=str)
        if not all(_TENSORS_FILE.fullmatch(name) for name in self.files):
            raise KeyError("files has a name that does not belong to a saved run")
        if self.layout not in get_args(Layout):
            raise ValueError(f"layout must be one of {', '.join(get_args(Layout))}, got {str(self.layout)[:40]!r}")
        self._check_states()
        check_list(self.train_sizes or [0] * self.num_clients, self.num_clients, value_type=int)
        check_list(self.command, None, value_type=str)

    def _check_states(self) -> None:
        num_rows = {GLOBAL: self.global_models, PERSONAL: self.num_clients, FIXED: 1, TYPICAL: self.num_clients}
        seen: dict[str, set[int]] = {kind: set() for kind in num_rows}
        for name, part in self.states.items():
            if STATE_FILE.fullmatch(name) is None:
                raise KeyError(f"states has {name[:40]!r}, which is not the name of a file of states")
            kind = kind_of(name)
            check_list(part.rows, None, value_type=int)
            for number in part.rows:
                check_integer(f"a row of {name}", number, 0, le=num_rows[kind] - 1)
            if len({*part.rows} - seen[kind]) < len(part.rows):
                raise ValueError(f"{name} has a row twice, or one of another file")
            seen[kind].update(part.rows)
            check_list(part.sha256, len(part.rows) if part.sha256 else None, value_type=str)
            if not all(_DIGEST.fullmatch(digest) for digest in part.sha256):
                raise ValueError(f"{name} has a digest that is not a SHA-256")

    def _check_info(self) -> None:
        info = self.info
        check_integer("num_clients", self.num_clients, le=_MAX_COUNT)
        check_integer("global_models", self.global_models, le=_MAX_COUNT)
        check_integer("num_classes", info["num_classes"], le=_MAX_COUNT)
        check_integer("built_for", info["built_for"], optional=True)
        check_list(info.get("lora_ranks", []), None, value_type=int)
        for rank in info.get("lora_ranks", []):
            check_integer("a rank", rank)
        if info.get("text_head") is not None:
            text_head = info["text_head"]
            if set(text_head) != TEXT_HEAD_OPTIONS:
                raise KeyError(f"text_head has the options {quoted(sorted(text_head))[:200]}")
            check_list(text_head["class_names"], info["num_classes"], value_type=str)
            check_list(text_head["templates"], None, value_type=str)
            check_list([text_head["train_logit_scale"], text_head["train_features"]], 2, value_type=bool)
        if info.get("classes") is not None:
            check_list(info["classes"], info["num_classes"], value_type=str)
        if info.get("clients") is not None:
            check_list(info["clients"], self.num_clients, value_type=str)
        numbers = [record["client"] for record in info.get("joined", [])]
        for name in ("forgotten", "elsewhere", "own_adapters"):
            numbers += info.get(name, [])
        for number in numbers:
            check_integer("client", number, 0, le=self.num_clients - 1)
        check_list([info.get("adapter_of", ""), *(info.get("training") or {}).keys()], None, value_type=str)
        task = info.get("task") or {}
        check_list([task.get("class_path", ""), task.get("default_metric", "")], 2, value_type=str)
        check_list([task.get(name, True) for name in ("has_classes", "exclusive", "per_pixel")], 3, value_type=bool)
        if not isinstance(task.get("init_args", {}), dict):
            raise TypeError("the options of the task are not a mapping")
        missing = _REQUIRED_INFO - set(info)
        if missing:
            raise KeyError(f"info lacks {quoted(sorted(missing))}")

    def _check_metrics(self) -> None:
        metrics = self.metrics
        check_list([row["round"] for row in metrics["rounds"]], None, value_type=int)
        check_list([[*row.values()] for row in metrics["rounds"]], None, None)
        scores_of_clients = [*metrics["clients"].values(), *metrics.get("initial", {}).values()]
        for row in metrics.get("by_round", []):
            check_list([row["round"]], 1, value_type=int)
            scores_of_clients.append(row["personal/local_test"])
        if "global/local_test" in metrics:
            scores_of_clients.append(metrics["global/local_test"])
        check_list(scores_of_clients, None, self.num_clients)
        check_list(metrics.get("test_images", [0] * self.num_clients), self.num_clients, value_type=int)
        for entry in metrics.get("failed_outputs", []):
            check_choice("failed_outputs: model", entry["model"], ("personal", "global"))
            check_integer("failed_outputs: client", entry["client"], 0, le=self.num_clients - 1)
            check_integer("failed_outputs: images", entry["images"])
            check_integer("failed_outputs: since", entry["since"], 0)


@dataclass(frozen=True)
class FileDifference:
    """A value of a folder's files that is not what the run expects."""

    name: str
    actual: object
    expected: object


def first_difference(actual: Mapping[str, object], expected_values: Mapping[str, object]) -> FileDifference | None:
    """Return the first name whose values differ, or that only one side has; None if all are equal.

    >>> first_difference({"a": 1}, {"a": 1, "b": 2})
    FileDifference(name='b', actual='missing', expected=2)
    """
    for name in {**expected_values, **actual}:
        actual_value = actual.get(name, "missing")
        expected_value = expected_values.get(name, "missing")
        if actual_value != expected_value:
            return FileDifference(name, actual_value, expected_value)
    return None


def check_list(
    values: object, length: int | None, *inner: int | None, value_type: type | UnionType = int | float
) -> None:
    """Check a list, which may hold further lists.

    Args:
        values: The list.
        length: Its length; None for any.
        *inner: The length of the lists in it, of the lists in these, and so on.
        value_type: Type of the values. Values of type int must not be negative.

    Raises:
        TypeError: If it is not such a list.
    """
    if not isinstance(values, list) or length not in (None, len(values)):
        raise TypeError(f"{str(values)[:40]!r} is not a list of {length or 'any length'}")
    for value in values:
        if inner:
            check_list(value, *inner, value_type=value_type)
        elif not isinstance(value, value_type) or (value_type is int and isinstance(value, int) and value < 0):
            raise TypeError(f"{str(value)[:40]!r} is not a valid value there")


@contextmanager
def naming(subject: Path | str, remedy: str = "restore an intact copy, save it again, or delete it") -> Iterator[None]:
    """Turn errors caused by a broken or untrusted file into a ValueError that names it.

    Args:
        subject: The file, or the beginning of the message.
        remedy: What to do, for the end of the message.
    """
    problem = f"{str(subject)!r} is broken" if isinstance(subject, Path) else subject
    try:
        yield
    except WrongFormat:
        raise
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        # The message of an OptionError is complete; others need their type ("KeyError: 'rounds'").
        reason = str(error) if isinstance(error, OptionError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{problem} ({reason}); {remedy}") from error


def write_run(folder: Path, run_file: RunFile) -> None:
    """Write ``run.json`` into a folder, completely or not at all."""
    states = {name: vars(part) for name, part in run_file.states.items()}
    write_json(folder / RUN_FILE, {"format": FORMAT} | vars(run_file) | {"states": states})


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, completely or not at all.

    NaN becomes null, infinity a string, and a list of numbers is on one line. The first entry is a digest of the others
    (:func:`perada.system.digests.sealed`).
    """
    text = json.dumps(sealed(_replace_values(content, _to_json)), indent=2, allow_nan=False)
    # JSON strings have no line breaks, so only line breaks between values are removed.
    text = re.sub(r"\[[^\[\]{}]*\]", lambda match: re.sub(r"\n *", " ", match[0]), text)
    write_atomic(path, text.encode() + b"\n", durable=False)


def read_run(folder: Path) -> RunFile:
    """Read ``run.json`` in a folder.

    Raises:
        FileNotFoundError: If it does not exist.
        ValueError: If it was not written by :func:`write_run`, or the folder has links that lead out of it.
    """
    path = folder / RUN_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{str(folder)!r} contains no run: it has no {RUN_FILE}; pass one written by Run.save")
    check_links(folder, _READ_FILES)
    with naming(path):
        content = check_sealed(json.loads(path.read_text(encoding="utf-8")))
        if not isinstance(content, dict):
            raise ValueError("it has no entries")
        check_format(path, content.pop("format"), FORMAT)
        states = {name: StateRows(**part) for name, part in content.pop("states").items()}
        run_file = RunFile(**content, states=states)
        run_file.metrics = numbers_of(run_file.metrics)
        if run_file.info.get("privacy"):
            run_file.info["privacy"] = _replace_values(run_file.info["privacy"], _from_json)
        run_file.check()
    return run_file


def layout_of(path: Path) -> Layout:
    """Return where the states of a run are, given its folder or one of its checkpoints."""
    if not (path / RUN_FILE).is_file():
        return "checkpoints"
    return read_run(path).layout


def check_files(folder: Path, files: Mapping[str, str]) -> None:
    """Compare a run's files with their digests in ``run.json``.

    Missing files are skipped: they are reported when they are read.

    Raises:
        ValueError: If a file is not the run's, or the digests beside it are missing.
    """
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            continue
        if path.parent != folder and not (path.parent / SUMS_FILE).is_file():
            raise ValueError(f"{str(path.parent)!r} has no {SUMS_FILE}; copy the entire folder")
        if digest_of(path) != digest:
            raise ValueError(
                f"{str(path)!r} was changed or damaged since it was written, or belongs to a different run, according "
                f"to {RUN_FILE}; restore an intact copy of the folder, or save the run again"
            )


def _replace_values(content: Any, change: Callable[[Any], Any]) -> Any:  # noqa: ANN401  # any JSON
    """Apply ``change`` to the values within dictionaries and lists."""
    if isinstance(content, dict):
        return {key: _replace_values(value, change) for key, value in content.items()}
    if isinstance(content, list):
        return [_replace_values(value, change) for value in content]
    return change(content)


def _to_json(value: Any) -> Any:  # noqa: ANN401  # a number, a word, None
    """Replace values that JSON lacks: NaN by null, and infinity by a string that ``float`` reads."""
    value = plain_number(value)
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else str(value)


def numbers_of(content: Any) -> Any:  # noqa: ANN401  # any JSON
    """Restore the numbers of metrics that :func:`write_json` wrote: null is NaN, and strings may be infinity."""
    return _replace_values(content, lambda value: math.nan if value is None else _from_json(value))


def _from_json(value: Any) -> Any:  # noqa: ANN401  # a number, a word, None
    return float(value) if value in ("inf", "-inf") else value
