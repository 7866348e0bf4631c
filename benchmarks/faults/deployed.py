# SPDX-License-Identifier: Apache-2.0
"""A small deployment in one process, whose server or one of whose sites has a disk that fails and heals."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytorch_lightning as pl
import torch

from benchmarks.faults.failing_disk import ERRORS, FailingDisk
from benchmarks.faults.labels import NUM_OUTPUTS, make_clients, make_network
from benchmarks.faults.outcomes import SURVIVED, Campaign, Verdict
from perada.algorithms import Ditto
from perada.core.states import State
from perada.data import FederatedDataModule
from perada.deploy.recipe import Recipe, ServerRecipe
from perada.deploy.server import coordinator
from perada.deploy.server.coordinator import Coordinator
from perada.deploy.server.progress import RunProgress
from perada.deploy.site.client import Client, single_client_data
from perada.deploy.site.file import Limits
from perada.deploy.site.worker import SiteWorker
from perada.deploy.state import SITE_STATE, SiteStore, read_state
from perada.deploy.transport import Failure, LocalTransport, Terms
from perada.federation import Training
from perada.lightning import FederatedLoop
from perada.lightning.module import FederatedClassifier
from perada.privacy import Privacy
from perada.server import Distillation
from perada.server.sums import SecureSums
from perada.tasks import Classification

NAMES = ("a", "b", "c")
"""Names of the sites."""
SERVER = "server"
MAY_SEND = ("sizes", "counts", "losses", "epsilon")
SECTIONS: dict[str, dict[str, Any]] = {
    "updates": {},
    "private updates": {"privacy": Privacy(noise_multiplier=1.0)},
    "secure sums": {"secure_sums": SecureSums()},
}
"""Options of the loop by the kind of run."""
UNTIL_END = "until the run ends"
LENGTHS = {"1 operation": 1, "6 operations": 6, UNTIL_END: 10**9}
"""Number of operations that fail, by name."""
QUICK_FIRST = 20
QUICK_STRIDE = 100
"""First operation and distance of the operations that a quick campaign tries."""
_RANDOM = ("private updates",)
"""Kinds of runs whose noise does not follow from the seed, so that only what was spent can be compared."""
_UNREPEATABLE = ("comm/", "deploy/seconds")
"""Prefixes of metrics that count repeated messages, or time."""


class SkippedWaits:
    """Replacement of the module ``time`` whose clock is advanced by ``sleep`` only, which returns at once."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Return the time in seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds


class RestartedSites(LocalTransport):
    """Workers that are ended when their disk fails, and started again until that succeeds."""

    def exchange(self, messages: Mapping[str, bytes], enough: int, deadline: float) -> dict[str, bytes | Failure]:
        """Have sites answer, and restart those whose disk failed."""
        replies = super().exchange(messages, enough, deadline)
        for name, reply in replies.items():
            if reply == Failure("disk"):
                self.workers[name] = _restarted(self.workers[name])
        return replies


def _restarted(worker: SiteWorker) -> SiteWorker:
    """Return a new worker with the folder of another one, which is ended."""
    worker.store.close()
    while True:
        try:
            store = SiteStore(worker.store.folder)
        except OSError:
            # A supervisor starts it once more.
            continue
        return SiteWorker(store, worker.clients, worker.permissions.may_send, party=worker.sums.party)


@dataclass(frozen=True)
class Result:
    """What a run leaves.

    Attributes:
        states: Tensors of the server and of the sites, by party and name; empty if they are random.
        history: Metrics of each round; empty if they are random.
        spent: Ledgers of all runs, and the number of rounds, by site.
    """

    states: dict[str, State]
    history: list[dict[str, float]]
    spent: dict[str, Any]

    def equals(self, other: "Result") -> bool:
        """Return whether another run left the same, bit by bit."""
        if (self.history, self.spent) != (other.history, other.spent) or self.states.keys() != other.states.keys():
            return False
        for party, state in self.states.items():
            others = other.states[party]
            if state.keys() != others.keys():
                return False
            if not all(torch.equal(value, others[key]) for key, value in state.items()):
                return False
        return True


class Deployment:
    """A server and three sites.

    Args:
        kind: Kind of run, a key of :data:`SECTIONS`.
        rounds: Number of rounds.
    """

    def __init__(self, kind: str, rounds: int = 2) -> None:
        self.kind = kind
        self.rounds = rounds
        self._data = make_clients()
        self._clients = {}
        for number, name in enumerate(NAMES):
            self._clients[name] = Client(self._recipe(number), Limits())

    def _options(self) -> tuple[bytes, FederatedClassifier, FederatedLoop, pl.Trainer]:
        """Return what the recipes of all parties have in common."""
        training = Training(local_steps=2, engine="loop", cache_features=False)
        module = FederatedClassifier(make_network(), adapter="full")
        loop = FederatedLoop(Ditto(), training=training, distillation=Distillation(steps=0), **SECTIONS[self.kind])
        trainer = pl.Trainer(
            max_epochs=self.rounds,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        return b"a recipe", module, loop, trainer

    def _recipe(self, number: int) -> Recipe:
        """Return the recipe at a site."""
        data = FederatedDataModule(single_client_data(self._data, number), batch_size=4, num_classes=NUM_OUTPUTS)
        return Recipe(*self._options(), data)

    def _server_recipe(self) -> ServerRecipe:
        """Return the recipe at the server."""
        data = FederatedDataModule(self._data, batch_size=4, num_classes=NUM_OUTPUTS)
        return ServerRecipe(
            *self._options(), data, num_classes=NUM_OUTPUTS, classes=None, loggers=(), task=Classification()
        )

    def workers(self, folder: Path) -> dict[str, SiteWorker]:
        """Return the workers of all sites, with their folders below ``folder``."""
        parties = self._parties()
        workers = {}
        for name, client in self._clients.items():
            clients = {client.recipe.digest: client}
            workers[name] = SiteWorker(SiteStore(folder / name), clients, MAY_SEND, party=parties.get(name))
        return workers

    def _parties(self) -> dict[str, Any]:
        """Return the sites as participants in secure sums; none if there are no such sums."""
        if "secure_sums" not in SECTIONS[self.kind]:
            return {}
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        from perada.deploy.sums.party import Party

        identities = {name: Ed25519PrivateKey.generate() for name in NAMES}
        public_keys = {name: key.public_key() for name, key in identities.items()}
        return {name: Party(name, identity, public_keys) for name, identity in identities.items()}

    def start(self, transport: LocalTransport, folder: Path, resume: bool = False) -> Coordinator:
        """Return the server, with its folder below ``folder``."""
        terms = Terms(min_sites=len(NAMES), deadline=600.0, resume=resume)
        return Coordinator(self._server_recipe(), transport, folder / SERVER, terms)

    def run(self, folder: Path, party: str, disk: FailingDisk, *, restarts: bool = False) -> Result:
        """Run all rounds with a disk of a party that fails. A run that ends with an error is resumed.

        Args:
            folder: Folder for all parties, each of which has its own below it.
            party: The server, or a site.
            disk: Its disk.
            restarts: Whether sites are restarted when their disk fails.

        Raises:
            AssertionError: If an error does not name the disk's folder in one line.
        """
        workers = self.workers(folder)
        transport = RestartedSites(workers) if restarts else LocalTransport(workers)
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(coordinator, "time", SkippedWaits()))
            stack.callback(lambda: _close(transport))
            try:
                with disk:
                    server = self.start(transport, folder)
                    stack.callback(server.close)
                    server.run()
            except OSError as error:
                _check_message(error, folder, party)
                stack.pop_all().close()
                return self._resume(folder, transport)
            return self._result(server, folder)

    def _resume(self, folder: Path, transport: LocalTransport) -> Result:
        """Resume a run whose disk has healed."""
        for name, worker in transport.workers.items():
            transport.workers[name] = _restarted(worker)
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(coordinator, "time", SkippedWaits()))
            stack.callback(lambda: _close(transport))
            has_begun = any((folder / SERVER).glob("*.safetensors"))
            server = self.start(transport, folder, resume=has_begun)
            stack.callback(server.close)
            server.run()
            return self._result(server, folder)

    def _result(self, server: Coordinator, folder: Path) -> Result:
        """Return what a run has left, from the files of the sites."""
        spent: dict[str, Any] = {}
        states = {SERVER: server.server.global_state}
        for name in NAMES:
            stored = read_state(folder / name / SITE_STATE)
            spent[name] = (stored.totals.rounds, stored.totals.ledger.state_dict())
            # The run of a survey or an evaluation has no state of training; these all train.
            assert stored.run_state is not None
            for role, state in (stored.run_state.training.client_state or {}).items():
                states[f"{name}/{role}"] = state
        if self.kind in _RANDOM:
            return Result({}, [], spent)
        return Result(states, _repeatable_history(server.progress), spent)


def _close(transport: LocalTransport) -> None:
    """Unlock the folders of all workers."""
    for worker in transport.workers.values():
        worker.store.close()


def _repeatable_history(progress: RunProgress) -> list[dict[str, float]]:
    """Return the metrics of each round that do not depend on repeated messages or on time."""
    history = []
    for row in progress.history:
        history.append({name: value for name, value in row.items() if not name.startswith(_UNREPEATABLE)})
    return history


def _check_message(error: OSError, folder: Path, party: str) -> None:
    """Raise an AssertionError unless an error that ends a run names what failed, in one line.

    The server's own disk is named by its path, and that of a site by the name of the site, since the server must not
    learn paths there.
    """
    expected = str(folder / SERVER) if party == SERVER else f"{party} (disk)"
    message = str(error)
    assert expected in message and "\n" not in message, message


class Undisturbed:
    """A run of a deployment with a disk that does not fail, to compare others with.

    Args:
        deployment: The deployment.
        party: The party whose operations are counted.
        folder: Folder for the runs.

    Attributes:
        num_operations: Number of operations that write to the party's disk.
        result: What the run left.
    """

    def __init__(self, deployment: Deployment, party: str, folder: Path) -> None:
        self.deployment = deployment
        self.party = party
        self._folder = folder
        with TemporaryDirectory(dir=folder) as name:
            disk = FailingDisk(Path(name, party))
            self.result = deployment.run(Path(name), party, disk)
        self.num_operations = disk.num_operations

    def judge(self, fault: "DiskFault", first: int) -> Verdict:
        """Return the outcome of a run in which operations fail after the first ones.

        Args:
            fault: What happens.
            first: Number of operations that do not fail.
        """
        description = f"operation {first}"
        with TemporaryDirectory(dir=self._folder) as name:
            disk = FailingDisk(Path(name, self.party), first, fault.count, ERRORS[fault.error])
            try:
                result = self.deployment.run(Path(name), self.party, disk, restarts=fault.restarts)
            except Exception as error:  # whatever a disk that fails may cause
                return Verdict(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", description)
            left = [path.name for path in Path(name).rglob("*.partial")]
        if not disk.has_failed:
            return Verdict("no operation failed", description)
        if left:
            return Verdict(f"left {left}", description)
        return Verdict(SURVIVED if result.equals(self.result) else "ended otherwise", description)


@dataclass(frozen=True)
class DiskFault:
    """How a disk fails.

    Attributes:
        error: Name of the error.
        length: For how long, a key of :data:`LENGTHS`.
        restarts: Whether sites are restarted when their disk fails.
    """

    error: str
    length: str
    restarts: bool = False

    @property
    def count(self) -> int:
        """Number of operations that fail."""
        return LENGTHS[self.length]


def try_disks(campaign: Campaign, folder: Path, quick: bool) -> None:
    """Have the disk of the server, or of a site, fail at each operation that writes, and then heal.

    The run must go on, or else end with one line that names what failed, and be resumed. It must then equal a run whose
    disk did not fail.

    Args:
        campaign: Where the verdicts are recorded.
        folder: Folder for the runs.
        quick: Whether to try a few of the operations only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    former_level = logging.root.manager.disable
    logging.disable()
    try:
        for kind in SECTIONS:
            deployment = Deployment(kind)
            for party in (NAMES[0], SERVER):
                undisturbed = Undisturbed(deployment, party, folder)
                operations = range(undisturbed.num_operations)
                if quick:
                    operations = operations[QUICK_FIRST::QUICK_STRIDE]
                _try_disk(campaign, undisturbed, operations)
    finally:
        logging.disable(former_level)


def lengths_of(party: str) -> list[str]:
    """Return for how long the disk of a party may fail in a run that must end as if it had not failed.

    Scores and secure sums are computed without a site whose disk fails until their deadline.
    """
    lengths = list(LENGTHS)
    if party != SERVER:
        lengths.remove(UNTIL_END)
    return lengths


def _try_disk(campaign: Campaign, undisturbed: Undisturbed, operations: Sequence[int]) -> None:
    """Have the disk of one party fail in all ways, from each of some operations on."""
    kind = undisturbed.deployment.kind
    is_site = undisturbed.party != SERVER
    faults = [DiskFault(error, length) for error in ERRORS for length in lengths_of(undisturbed.party)]
    if is_site and kind != "secure sums":
        # In a secure sum, a site that is restarted has lost its keys, so the sum is another one.
        faults += [DiskFault(error, length, restarts=True) for error in ERRORS for length in list(LENGTHS)[:-1]]
    for fault in faults:
        title = f"{fault.error} at a {'site' if is_site else 'server'}, {fault.length}, {kind}"
        if fault.restarts:
            title += ", site restarted"

        def judge(number: int, fault: DiskFault = fault) -> Verdict:
            return undisturbed.judge(fault, operations[number])

        campaign.try_all(title, len(operations), judge)
