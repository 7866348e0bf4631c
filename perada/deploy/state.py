# SPDX-License-Identifier: Apache-2.0
"""The files in which each party keeps its state, and the state of a site.

A file holds nested values and tensors, and is written all at once. That of the server is described in
:mod:`perada.deploy.server.progress`.

PyTorch is imported only where tensors are read or written, since that takes seconds and ``perada deploy status`` needs
none.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from perada.deploy.audit import (
    EMPTY_TIP,
    LOG,
    OLD_STATE_REMEDY,
    STATE,
    AuditLog,
    HighWaterMark,
    LogContent,
    SavedCounters,
    Tip,
    check_chain,
    check_state,
    read_log,
)
from perada.deploy.protocol import RejectionError, Request, pack, read_header
from perada.privacy.accounting import Ledger
from perada.system.digests import WrongFormat, check_format
from perada.system.disk_errors import naming_disk
from perada.system.files import LOCK, FolderLock, check_space, sync, write_atomic
from perada.system.tensor_tables import SIZE_BYTES, table_size

if TYPE_CHECKING:
    from perada.algorithms import Stacks
    from perada.core.states import State

IMAGES_LEDGER = 0
"""Client number in a site's ledger under which the ε of single images is counted."""
SITE_LEDGER = 1
"""Client number in a site's ledger under which the ε of the site as a whole is counted."""
SITE_STATE = STATE
SITE_FORMAT = 9
FORMER_RUNS = "runs"
"""Subfolder of the state folder with the states of former runs."""
ContentT = TypeVar("ContentT")


def write_nested(path: Path, content: Mapping[str, object], version: int) -> None:
    """Write nested values to a file that only its owner may read.

    Args:
        path: The file.
        content: Dictionaries, lists and dataclasses of numbers, texts, bytes and tensors.
        version: Version of the file's format.
    """
    write_atomic(path, pack_nested(content, version), private=True)


def pack_nested(content: Mapping[str, object], version: int) -> bytes:
    """Return the content of a file with nested values; see :func:`write_nested`."""
    import numpy as np
    import torch

    from perada.core.states import strides_of

    tensors: State = {}

    def to_json(value: object) -> object:
        """Return a value of a type that JSON lacks as one of its types."""
        name = str(len(tensors))
        if isinstance(value, torch.Tensor):
            tensors[name] = value
            # The file stores contiguous tensors, but the last bits of a convolution depend on its weight's strides.
            return {"$tensor": name, "strides": strides_of({name: value}).get(name)}
        if isinstance(value, bytes):
            # torch warns of buffers that cannot be written to, so the bytes become a bytearray.
            tensors[name] = torch.from_numpy(np.frombuffer(bytearray(value), np.uint8))
            return {"$bytes": name}
        return vars(value)

    header = {"format": version, "kept": json.dumps(content, default=to_json)}
    return pack(header, tensors)


def read_nested(path: Path, version: int, build: Callable[..., ContentT], *, with_tensors: bool = True) -> ContentT:
    """Read a file that :func:`write_nested` wrote.

    Args:
        path: The file.
        version: Version that its format must have.
        build: Makes the result of the dictionary that was written, which it gets as keywords.
        with_tensors: Whether to read tensors and bytes; otherwise they are None, and PyTorch is not imported.

    Raises:
        ValueError: If the file is damaged, or has another version.
    """
    file_content = path.read_bytes()
    try:
        # The header of a local file may be larger than that of a message.
        header = read_header(file_content, len(file_content))
        check_format(path, header["format"], version)
        from_json = _tensor_reader(file_content) if with_tensors else _without_tensors
        return build(**json.loads(header["kept"], object_hook=from_json))
    except WrongFormat:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise ValueError(
            f"{str(path)!r} is damaged ({type(error).__name__}: {error}); restore it from a backup: nothing else "
            "records what was trained and spent"
        ) from error


def _tensor_reader(file_content: bytes) -> Callable[[dict[str, Any]], Any]:
    """Return a function that replaces the names of tensors and bytes in JSON by those of a file."""
    from safetensors.torch import load

    from perada.core.states import laid_out

    tensors = load(file_content)

    def from_json(entry: dict[str, Any]) -> Any:  # noqa: ANN401  # what was written
        match list(entry.items()):
            case [("$tensor", name), ("strides", None)]:
                return tensors[name]
            case [("$tensor", name), ("strides", strides)]:
                return laid_out({name: tensors[name]}, {name: strides})[name]
            case [("$bytes", name)]:
                return tensors[name].numpy().tobytes()
        return entry

    return from_json


def _without_tensors(entry: dict[str, Any]) -> Any:  # noqa: ANN401  # what was written
    """Replace the names of tensors and bytes in JSON by None."""
    return None if entry.keys() & {"$tensor", "$bytes"} else entry


@dataclass(frozen=True)
class TrainingState:
    """A site's training in a run.

    Attributes:
        round: The last round that was trained, or one more than there are after the fine-tuning; -1 before the first.
        num_rounds: How many rounds were trained.
        request_digest: Digest of the last request to train.
        reply: Response to it, which is sent again if the request is repeated.
        account: State of the run's ledgers; None if training is not private.
        client_state: What the client keeps, (1, ...) by role; None before the first round.
        tuned_state: The same after the fine-tuning; None before it.
        fingerprint: Fingerprint of the images trained on; empty before the first round.
    """

    round: int = -1
    num_rounds: int = 0
    request_digest: str = ""
    reply: bytes = b""
    account: dict[str, Any] | None = None
    client_state: "Stacks | None" = None
    tuned_state: "Stacks | None" = None
    fingerprint: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OwnScores:
    """Scores of a site's models on its own test images, for the site itself.

    Attributes:
        num_images: Number of test images; 0 before the first scoring.
        scores: Scores by the name of the model (``personal``, ``global``, ``both``) and then of the metric; None for
            one that is NaN or infinite.
        has_classes: Whether the scores are shares, and not in the unit of predicted numbers.
    """

    num_images: int = 0
    scores: dict[str, dict[str, float | None]] = field(default_factory=dict)
    has_classes: bool = True


@dataclass(frozen=True)
class ScoringState:
    """A site's scoring in a run.

    Attributes:
        round: The last round after which models were scored; -1 before the first.
        request_digest: Digest of the request to score them.
        reply: Response to it, which is sent again if the request is repeated.
        models_digest: Digest of the models, without what differs between sites.
        metrics: Scores to be added up in a secure sum; empty if they are not.
        global_state: The global state that was scored last; empty before the site was sent one.
        own: Scores of the same models, which never leave the site from here.
    """

    round: int = -1
    request_digest: str = ""
    reply: bytes = b""
    models_digest: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    global_state: "State" = field(default_factory=dict)
    own: OwnScores = field(default_factory=OwnScores)


@dataclass(frozen=True)
class SummingState:
    """A site's secure sums in a run.

    Attributes:
        update: Update of the last round, to be added up; empty if there is none.
        received: What the server sent to be trained.
        norm: Clipping norm S of the round, where sites clip and the norm adapts.
        losses: Losses of the round by role, to be added up.
        heard: Digest of what the server sent in each round.
        update_round: The last round whose update was sent under masks; -1 before the first.
        scores_round: The last round after which scores were sent under masks; -1 before the first.
    """

    update: "State" = field(default_factory=dict)
    received: "State" = field(default_factory=dict)
    norm: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)
    heard: dict[str, str] = field(default_factory=dict)
    update_round: int = -1
    scores_round: int = -1


@dataclass(frozen=True)
class RunState:
    """What a site keeps of a run.

    Attributes:
        run: Id of the run.
        recipe: Digest of its recipe; empty before it is known.
        client: The site's number in the run; None before it is known.
        transport_run: What the transport called the run last, such as Flower's id.
        rank: Rank of the site's LoRA; 0 for that of the adapter.
        training: How far training is.
        scoring: How far scoring is.
        summing: What secure sums need.
    """

    run: str
    recipe: str = ""
    client: int | None = None
    transport_run: str = ""
    rank: int = 0
    training: TrainingState = field(default_factory=TrainingState)
    scoring: ScoringState = field(default_factory=ScoringState)
    summing: SummingState = field(default_factory=SummingState)


@dataclass(frozen=True)
class JobRecord:
    """What a site keeps of a job without training.

    Attributes:
        kind: Kind of the job, as in :data:`.JobKind`.
        recipe: Digest of its recipe.
        vector: The site's vector, with its noise, which is drawn once.
        patients: Digests of the patients that were counted; empty if changes of them do not matter.
        is_masked: Whether the vector has left the site under masks, which happens once.
        is_open: Whether it has left the site in the clear.
    """

    kind: str
    recipe: str
    vector: list[int]
    patients: bytes = b""
    is_masked: bool = False
    is_open: bool = False

    @property
    def has_left(self) -> bool:
        """Whether the vector has left the site."""
        return self.is_masked or self.is_open


@dataclass(frozen=True)
class SiteTotals:
    """What all runs at a site have trained and spent.

    Attributes:
        ledger: What was spent. As client `IMAGES_LEDGER` that of single images, in which a round without privacy is one
            step without noise. As client `SITE_LEDGER` that of the site as a whole, in which a noisy secure sum is a
            step, and a training or scoring of which something leaves without the site's noise is a step without noise.
        rounds: Number of rounds that were trained.
        sampling: How private batches were drawn; None before the first.
        jobs: Jobs without training, by the id of their run.
    """

    ledger: Ledger = field(default_factory=Ledger)
    rounds: int = 0
    sampling: str | None = None
    jobs: Mapping[str, JobRecord] = field(default_factory=dict)


class StoredSite(NamedTuple):
    """Content of a site's file: a run, what all runs have spent, and the counters that reveal an older copy.

    The run is None at a site that has never trained, and has only answered jobs without training.
    """

    run_state: RunState | None
    totals: SiteTotals
    counters: SavedCounters


class SiteStore:
    """The state folder of a site.

    ``state.safetensors`` holds the run that was trained last, and what all runs have spent. Each change is a single
    rename: after a crash the file is the one before it or the one after. ``runs/`` has the former runs.

    Changes are counted. The count is in the state, in each line of the audit log and in the folder's lock file, so that
    an older copy of one of them is noticed when the folder is opened, and while it is open. The state also has the
    count of each former run, whose file might be replaced by an older copy as well.

    Args:
        folder: State folder. It is created for its owner only, and locked.

    Attributes:
        totals: What all runs have trained and spent.
        commits: How often the state was written.
        audit: Log of what leaves the site.

    Raises:
        OSError: If another worker uses the folder, other users may write to it, or it cannot be read or written.
        ValueError: If its file or the audit log is damaged, an older copy, or missing while there are former runs.
    """

    def __init__(self, folder: Path) -> None:
        with naming_disk(folder):
            self._lock = FolderLock(folder, "worker")
        self.folder = folder
        self.totals = SiteTotals()
        self.commits = 0
        # The largest count that this process tried to write; None before the first.
        self._attempted: int | None = None
        # The log's tip when the state was last written.
        self._tip = EMPTY_TIP
        self._run: str | None = None
        # Count of each former run's file.
        self._former_commits: dict[str, int] = {}
        # Size of the last state, if it could not be written.
        self._unwritten_bytes = 0
        try:
            with naming_disk(folder):
                self._check_and_open()
        except (ValueError, OSError):
            self.close()
            raise

    def _check_and_open(self) -> None:
        """Compare the files of the folder, and open the audit log."""
        self.current()
        log = read_log(self.folder)
        check_chain(log)
        counters = SavedCounters(self.commits, self._tip, self.totals.rounds, self._former_commits)
        check_state(log, counters, HighWaterMark.unpack(self._lock.read()))
        check_former(self.folder, counters)
        self.audit = AuditLog(self.folder)

    def close(self) -> None:
        """Close the audit log and unlock the folder."""
        if hasattr(self, "audit"):
            self.audit.close()
        self._lock.close()

    def check_disk(self) -> None:
        """Check, before anything is computed, that what will be computed can be written, as far as this is known.

        What an earlier failure of the disk left of the audit log is repaired. If the state could not be written, there
        must be room for one of that size.

        Raises:
            DiskError: If the folder is gone, or cannot be written.
            ValueError: If the audit log is not the one that this process wrote.
        """
        self._lock.check_in_place()
        with naming_disk(self.folder):
            self.audit.ensure_open()
            if self._unwritten_bytes:
                check_space(self.folder / SITE_STATE, self._unwritten_bytes)
                self._unwritten_bytes = 0

    def current(self) -> RunState | None:
        """Read the run that was trained last, and adopt its totals.

        Returns:
            Its state; None if there is none.

        Raises:
            DiskError: If the file cannot be read.
            ValueError: If the file is damaged or missing, or not the one that this process read or wrote last.
        """
        self._lock.check_in_place()
        with naming_disk(self.folder / SITE_STATE):
            return self._read_current()

    def _read_current(self) -> RunState | None:
        """Read the run that was trained last; see :meth:`current`."""
        path = self.folder / SITE_STATE
        try:
            stored = read_state(path)
        except FileNotFoundError:
            check_not_lost(self.folder, max(self.commits, HighWaterMark.unpack(self._lock.read()).commits))
            return None
        commits = stored.counters.commits
        if self._attempted is not None and not self.commits <= commits <= self._attempted:
            raise ValueError(
                f"{str(path)!r} was replaced while this worker was running: it is number {commits} of the states "
                f"written, but the worker's is number {self.commits}; restore the worker's, or stop the worker and "
                "restore the newest copy of the entire folder"
            )
        if self._attempted is not None and commits > self.commits:
            # A commit failed after its rename. From now on the new file counts, so that it must not be lost again.
            sync([path, self.folder])
            self._unwritten_bytes = 0
        self.totals = stored.totals
        self.commits = commits
        self._attempted = commits
        self._tip = stored.counters.tip
        self._run = None if stored.run_state is None else stored.run_state.run
        self._former_commits = dict(stored.counters.former_commits)
        return stored.run_state

    def load(self, run: str) -> RunState:
        """Return the state of a run; a new one if the site has none.

        Raises:
            DiskError: If a file cannot be read.
            ValueError: If its file is damaged or another run's.
            RejectionError: If its file is missing, or an older copy.
        """
        current = self.current()
        if current is not None and current.run == run:
            return current
        path = former_file(self.folder, run)
        if run not in self._former_commits:
            return RunState(run)
        with naming_disk(path):
            try:
                stored = read_state(path)
            except FileNotFoundError:
                raise RejectionError(
                    f"{str(path)!r} is missing, so run {run} cannot be continued; restore it from a backup", "other"
                ) from None
        if stored.run_state is None or stored.run_state.run != run:
            stored_run = None if stored.run_state is None else stored.run_state.run
            raise ValueError(f"{str(path)!r} contains run {stored_run} instead; restore it from a backup")
        if stored.counters.commits != self._former_commits[run]:
            raise RejectionError(_older_copy_message(path, stored.counters.commits, self._former_commits[run]), "other")
        return stored.run_state

    @property
    def is_new(self) -> bool:
        """Whether nothing was ever trained or answered here."""
        return not self.commits and not self.audit.tip.lines

    @property
    def runs(self) -> list[str]:
        """Ids of all runs that the site has trained in."""
        runs = set(self._former_commits)
        if self._run is not None:
            runs.add(self._run)
        return sorted(runs)

    def commit(self, run_state: RunState, totals: SiteTotals) -> None:
        """Write the state of a run and the totals in one step.

        Raises:
            DiskError: If they cannot be written. The file is then the one before, or this one.
        """
        self._lock.check_in_place()
        former_commits = {run: commits for run, commits in self._former_commits.items() if run != run_state.run}
        former_path = None
        if self._run is not None and self._run != run_state.run:
            # Another run begins, or goes on: the file of the last one is put aside.
            with naming_disk(self.folder):
                (self.folder / FORMER_RUNS).mkdir(exist_ok=True, mode=0o700)
            former_path = former_file(self.folder, self._run)
            former_commits[self._run] = self.commits
        self._write(run_state, totals, former_commits, former_path)

    def commit_totals(self, totals: SiteTotals) -> None:
        """Write the totals in one step, with the run that was trained last as it is.

        Raises:
            DiskError: If they cannot be written. The file is then the one before, or this one.
        """
        self._write(self.current(), totals, self._former_commits, former_path=None)

    def _write(
        self,
        run_state: RunState | None,
        totals: SiteTotals,
        former_commits: Mapping[str, int],
        former_path: Path | None,
    ) -> None:
        """Write the state and count the change.

        Args:
            run_state: The run to be kept as the current one.
            totals: What all runs have spent.
            former_commits: Count of each former run's file.
            former_path: Where the present file is put aside; None to replace it.
        """
        commits = self.commits + 1
        tip = self.audit.tip
        content = {
            "state": run_state,
            "total": totals.ledger.state_dict(),
            "rounds": totals.rounds,
            "sampling": totals.sampling,
            "jobs": dict(totals.jobs),
            "commits": commits,
            "audit": list(tip),
            "former": former_commits,
        }
        # The write may fail after the rename, so the attempt is noted first: current() then accepts either file.
        self._attempted = commits
        file_content = pack_nested(content, SITE_FORMAT)
        self._unwritten_bytes = len(file_content)
        path = self.folder / SITE_STATE
        with naming_disk(path):
            write_atomic(path, file_content, private=True, backup_path=former_path)
        self._unwritten_bytes = 0
        self.totals = totals
        self.commits = commits
        self._tip = tip
        self._run = None if run_state is None else run_state.run
        self._former_commits = dict(former_commits)

    def log(self, message: bytes, reply: bytes, spent: Callable[[Request], object]) -> None:
        """Write a reply to the audit log before it leaves; see :meth:`.AuditLog.append`.

        Raises:
            DiskError: If it cannot be written. The reply must not leave then.
            ValueError: If the log is not the one that this process wrote, likewise.
        """
        self._lock.check_in_place()
        with naming_disk(self.folder / LOG):
            self.audit.append(message, reply, trained=self.totals.rounds, commits=self.commits, spent=spent)
            # Last: a lock file that is behind the log is no error, and one that is ahead of it is.
            self._lock.write(HighWaterMark(self.audit.tip, self.commits).pack())


def check_not_lost(folder: Path, commits: int) -> None:
    """Raise if a folder without a state used to have one.

    Args:
        folder: State folder.
        commits: How often a state was written according to other files.

    Raises:
        ValueError: If one was written before.
    """
    if commits or (folder / FORMER_RUNS).exists():
        raise ValueError(
            f"{str(folder)!r} has lost its {SITE_STATE}, which records what was spent on these images; restore it from "
            "a backup"
        )


def former_file(folder: Path, run: str) -> Path:
    """Return the path of the state of a former run."""
    return folder / FORMER_RUNS / f"{run}.safetensors"


def check_former(folder: Path, counters: SavedCounters) -> None:
    """Raise if the state or the file of a former run is an older copy.

    A missing file of a former run is accepted: that run cannot be continued, and the totals include what it spent.

    Args:
        folder: State folder.
        counters: Number of writes and log position in the state.

    Raises:
        ValueError: If one is; the message names it and the remedy.
    """
    for path in sorted((folder / FORMER_RUNS).glob("*.safetensors")):
        commits = _read_commits(path)
        if commits > counters.commits:
            raise ValueError(
                f"{SITE_STATE} is an older copy: it is number {counters.commits} of the states written, but "
                f"{str(path)!r} is number {commits}, so everything spent and sent since is forgotten; "
                f"{OLD_STATE_REMEDY}"
            )
        if path.stem in counters.former_commits and commits != counters.former_commits[path.stem]:
            raise ValueError(_older_copy_message(path, commits, counters.former_commits[path.stem]))


def _older_copy_message(path: Path, commits: int, expected_commits: int) -> str:
    """Return the text of the error for a state that was replaced by an older copy."""
    return (
        f"{str(path)!r} is an older copy: it is number {commits} of the states written, but number "
        f"{expected_commits} was set aside; restore that one, or remove the file if the run is over"
    )


def _read_commits(path: Path) -> int:
    """Return the number of state writes recorded in a file, without reading its tensors."""
    try:
        with path.open("rb") as file:
            size = file.read(SIZE_BYTES)
            table = file.read(table_size(size))
            header = read_header(size + table, path.stat().st_size)
        check_format(path, header["format"], SITE_FORMAT)
        return int(json.loads(header["kept"])["commits"])
    except WrongFormat:
        raise
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(
            f"{str(path)!r} is damaged ({type(error).__name__}: {error}); restore it from a backup"
        ) from error


def read_state(path: Path, *, with_tensors: bool = True) -> StoredSite:
    """Read a site's file.

    Args:
        path: The file.
        with_tensors: Whether to read tensors and bytes; otherwise they are None.

    Raises:
        ValueError: If it is damaged.
    """
    return read_nested(path, SITE_FORMAT, _build_stored, with_tensors=with_tensors)


def _build_stored(
    *,
    state: dict[str, Any] | None,
    total: dict[str, Any],
    rounds: int,
    sampling: str | None,
    jobs: dict[str, dict[str, Any]],
    commits: int,
    audit: list[Any],
    former: dict[str, int],
) -> StoredSite:
    """Build the content of a site's file from the values in it."""
    ledger = Ledger()
    ledger.load_state_dict(total)
    job_records = {run: JobRecord(**record) for run, record in jobs.items()}
    return StoredSite(
        None if state is None else _build_run(state),
        SiteTotals(ledger, rounds, sampling, job_records),
        SavedCounters(commits, Tip(*audit), rounds, former),
    )


def _build_run(state: dict[str, Any]) -> RunState:
    """Build the state of a run from the values in a site's file."""
    scoring = state["scoring"]
    parts = {
        "training": TrainingState(**state["training"]),
        "scoring": ScoringState(**(scoring | {"own": OwnScores(**scoring["own"])})),
        "summing": SummingState(**state["summing"]),
    }
    return RunState(**(state | parts))


def read_saved_counters(folder: Path) -> SavedCounters:
    """Return the counters of the state in a folder; the defaults if there is none.

    Raises:
        ValueError: If the state is damaged.
    """
    path = folder / SITE_STATE
    return read_state(path).counters if path.is_file() else SavedCounters()


def read_mark(folder: Path) -> HighWaterMark:
    """Return the furthest point that the lock file in a folder has recorded."""
    path = folder / LOCK
    return HighWaterMark.unpack(path.read_bytes() if path.is_file() else b"")


def read_witnesses(folder: Path) -> tuple[LogContent, SavedCounters, HighWaterMark]:
    """Read the log and the counters of the state and the lock file, without comparing them.

    A worker may write to them meanwhile.
    """
    while True:
        # The lock file is written last, so that its content was in the two others before.
        mark = read_mark(folder)
        counters = read_saved_counters(folder)
        log = read_log(folder)
        if read_saved_counters(folder) == counters:
            return log, counters, mark


def read_runs(folder: Path, *, with_tensors: bool = True) -> tuple[list[RunState], SiteTotals]:
    """Return the runs of a site, the current one first, and what all runs have spent.

    Args:
        folder: State folder of the site.
        with_tensors: Whether to read tensors and bytes; otherwise they are None.
    """
    path = folder / SITE_STATE
    if not path.is_file():
        return [], SiteTotals()
    stored = read_state(path, with_tensors=with_tensors)
    states = [] if stored.run_state is None else [stored.run_state]
    for run in sorted(stored.counters.former_commits):
        former_path = former_file(folder, run)
        if former_path.is_file():
            former = read_state(former_path, with_tensors=with_tensors).run_state
            if former is not None:
                states.append(former)
    return states, stored.totals
