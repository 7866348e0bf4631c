# SPDX-License-Identifier: Apache-2.0
"""Disks that are full, read-only, broken or gone for a while: nothing is forgotten, and all goes on once they heal."""

import errno
import json
import logging
import os
import threading
from itertools import pairwise

import pytest
import torch

from benchmarks.faults.deployed import SECTIONS, SERVER, Deployment, DiskFault, Undisturbed, lengths_of
from benchmarks.faults.failing_disk import ERRORS, FailingDisk
from benchmarks.faults.outcomes import SURVIVED
from perada.cli.main import main
from perada.deploy.audit import HEAD, LOG, AuditLog
from perada.deploy.flower import app, keys
from perada.deploy.flower.socket import Listener, ask_worker
from perada.deploy.protocol import Request, pack, read_header
from perada.deploy.server import coordinator as coordinator_module
from perada.deploy.server.waits import SiteWaits, next_wait
from perada.deploy.site.worker import SiteWorker
from perada.deploy.state import SITE_STATE, SiteStore, read_state
from perada.deploy.sums.identity import write_identity
from perada.deploy.sums.site import SiteRound
from perada.deploy.transport import Failure, LocalTransport
from perada.server.sums import SecureSums
from perada.system.disk_errors import DiskError
from perada.system.files import LOCK, FolderLock, open_atomic, write_atomic

from .parties import Parties
from .test_audit import lines_of, note, verified, write_log
from .test_rollback import files_of, put_back, rejection
from .test_sites import RUN, code, only_client, train


@pytest.fixture
def site(tiny, tmp_path):
    return Parties(tiny, tmp_path, "ditto", rounds=3).worker(0, may_send=())


def answer_until_healed(site, message, disk, attempts=40):
    """Send a message again and again, and return the reply and the errors before it."""
    errors = []
    for _ in range(attempts):
        try:
            return site.answer(message, ""), errors
        except DiskError as error:
            errors.append(str(error))
            assert disk.has_failed
    raise AssertionError(errors)


# The audit log and its head


@pytest.mark.parametrize("behind", [1, 2, 5])
def test_any_number_of_lines_after_the_head_is_accepted_and_the_head_is_written_again(behind, tmp_path):
    folder = write_log(tmp_path / "state", 6)
    last = json.loads(lines_of(folder)[5 - behind])["sha256"]
    (folder / HEAD).write_text(json.dumps({"lines": 6 - behind, "last": last}))
    main(["deploy", "audit", str(folder)])
    log = AuditLog(folder)
    assert len(verified(folder)) == 6
    note(log, 6)
    log.close()
    assert len(verified(folder)) == 7


def test_a_head_that_cannot_be_written_for_many_requests_stops_no_site(site, monkeypatch):
    """The lines can be written all the while, as to a file that has a block left."""
    folder = site.store.folder
    site.answer(train(site), "")
    real = os.replace

    def full(source, target, **options):
        if str(target).endswith(HEAD):
            raise OSError(errno.ENOSPC, "No space left on device", str(source), None, str(target))
        return real(source, target, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        for _ in range(5):
            with pytest.raises(DiskError, match=r"audit\.head'.*No space left"):
                site.answer(train(site, 1), "")
    assert len(lines_of(folder)) == 2  # no line is written behind one that the head lacks
    assert code(site.answer(train(site, 1), ""), train(site, 1)) == "ok"
    assert [entry["round"] for entry in verified(folder)] == [0, 1, 1]
    site.store.close()
    assert rejection(folder) == ""


def test_an_older_head_is_noticed_by_the_lock_file_and_by_a_running_worker(site):
    folder = site.store.folder
    for round in range(2):
        site.answer(train(site, round), "")
        if round == 0:
            older = (folder / HEAD).read_bytes()
    newest = (folder / HEAD).read_bytes()
    (folder / HEAD).write_bytes(older)
    site.store.audit.close()
    with pytest.raises(ValueError, match=r"audit\.head .*older copy.*1 lines"):
        site.answer(train(site, 1), "")
    site.store.close()
    assert "audit.head is an older copy: it records 1 lines, but lock records line 2" in rejection(folder)
    with pytest.raises(ValueError, match=r"audit\.head .*older copy"):
        main(["deploy", "audit", str(folder)])
    (folder / HEAD).write_bytes(newest)
    assert rejection(folder) == ""


def test_lines_after_the_head_that_were_cut_off_are_noticed(site):
    """An older head does not hide that lines are missing: the state and the lock file know of them."""
    folder = site.store.folder
    copies = []
    for round in range(3):
        site.answer(train(site, round), "")
        copies.append(files_of(folder))
    site.store.close()
    put_back(folder, copies[2], copies[0], [HEAD, LOG])
    assert "restore" in rejection(folder)
    put_back(folder, copies[2], copies[0], [HEAD, LOG, LOCK])
    assert "restore" in rejection(folder)
    (folder / LOG).write_bytes(copies[2][LOG].replace(b'"ok"', b'"xx"', 1))
    assert "was changed" in rejection(folder)


def test_lines_are_on_the_disk_before_the_head_that_is_repaired(tmp_path, monkeypatch):
    folder = write_log(tmp_path / "state", 3)
    older = json.loads(lines_of(folder)[0])["sha256"]
    (folder / HEAD).write_text(json.dumps({"lines": 1, "last": older}))
    events = []
    fsync = os.fsync
    replace = os.replace

    def recording_fsync(file):
        events.append(os.readlink(f"/proc/self/fd/{file}").rpartition("/")[2])
        fsync(file)

    def recording_replace(source, target):
        events.append(f"replace {os.path.basename(target)}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    AuditLog(folder).close()
    assert events.index(LOG) < events.index(f"replace {HEAD}")


# A site


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("error", ERRORS)
def test_a_site_goes_on_whatever_write_of_an_answer_fails(error, count, site, tmp_path):
    """Every operation of a message that is committed, logged and answered; scores that may not leave take no time."""
    site.answer(train(site), "")
    before = files_of(site.store.folder)
    client = only_client(site)
    shared = {f"shared/{key}": value for key, value in client.recipe.template.initial.items()}
    message = pack(Request("evaluate", RUN, client.recipe.digest, 1), shared)
    site.store.close()
    folder = tmp_path / "tried"

    def answered(first, count):
        put_back(folder, before, {}, ())
        folder.chmod(0o700)
        again = SiteWorker(SiteStore(folder), site.clients, site.permissions.may_send)
        with FailingDisk(folder, first, count, ERRORS[error]) as disk:
            reply, errors = answer_until_healed(again, message, disk)
        again.store.close()
        for text in errors:
            assert str(folder) in text and os.strerror(ERRORS[error]) in text and "; " in text and "\n" not in text
        main(["deploy", "audit", str(folder)])
        assert not list(folder.glob(".*"))
        return disk, reply, errors, read_state(folder / SITE_STATE)

    undisturbed, reply, errors, stored = answered(0, 0)
    assert not errors and undisturbed.num_operations > 12
    for first in range(undisturbed.num_operations):
        disk, tried_reply, errors, tried = answered(first, count)
        assert disk.has_failed and tried_reply == reply
        assert tried.counters.commits == stored.counters.commits
        assert tried.totals.ledger.state_dict() == stored.totals.ledger.state_dict()
    assert errors  # the last operation, too, must succeed before the reply leaves


def test_a_full_disk_is_one_sentence_at_the_site_and_one_word_for_the_server(site, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    message = train(site)
    with Listener(tmp_path / "s.sock") as listener:
        thread = threading.Thread(target=listener.serve, args=(site.answer,))
        thread.start()
        with FailingDisk(site.store.folder, 0, 10**6, errno.EROFS):
            assert ask_worker(tmp_path / "s.sock", message, "4711", 30) == Failure("disk")
        problems = [record for record in caplog.records if record.levelno >= logging.WARNING]
        reply = ask_worker(tmp_path / "s.sock", message, "4711", 30)
        listener.close()
        thread.join()
    (problem,) = problems
    assert problem.exc_info is None and problem.levelno == logging.ERROR
    messages = problem.getMessage()
    for word in ("run 4711", SITE_STATE, "Read-only file system", "writable again", "the server asks again"):
        assert word in messages
    assert "\n" not in messages
    assert read_header(reply)["code"] == "ok"


@pytest.mark.parametrize("has_empty_folder", [True, False])
def test_a_disk_that_is_unmounted_is_named_and_nothing_is_written_in_its_place(has_empty_folder, site, tmp_path):
    site.answer(train(site), "")
    folder = site.store.folder
    folder.rename(tmp_path / "unmounted")
    if has_empty_folder:
        folder.mkdir(mode=0o700)
    with pytest.raises(DiskError, match="mount its disk"):
        site.answer(train(site, 1), "")
    if has_empty_folder:
        assert not list(folder.iterdir())
        folder.rmdir()
    (tmp_path / "unmounted").rename(folder)
    assert code(site.answer(train(site, 1), ""), train(site, 1)) == "ok"
    site.store.close()
    assert rejection(folder) == ""


def test_a_site_does_not_train_again_before_there_is_room_for_the_result(site, monkeypatch):
    trained = []
    client = only_client(site)
    real = client.train

    def counted(*arguments, **options):
        trained.append(True)
        return real(*arguments, **options)

    monkeypatch.setattr(client, "train", counted)
    with FailingDisk(site.store.folder, 0, 10**6, errno.ENOSPC):
        for _ in range(3):
            with pytest.raises(DiskError, match=r"state\.safetensors' cannot be written"):
                site.answer(train(site), "")
    assert len(trained) == 1
    assert code(site.answer(train(site), ""), train(site)) == "ok"
    assert len(trained) == 2 and site.store.totals.rounds == 1


@pytest.mark.parametrize("moment", [0, *(pytest.param(moment, marks=pytest.mark.slow) for moment in (4, 7))])
def test_a_masked_vector_whose_commit_failed_is_committed_before_it_leaves(moment, tiny, tmp_path, monkeypatch):
    """Before the state is renamed, after it, and in the audit log. The vector is masked once, and leaves in the end."""
    masked = []
    real = SiteRound.mask

    def mask(self, *arguments):
        masked.append(self.name)
        return real(self, *arguments)

    monkeypatch.setattr(SiteRound, "mask", mask)
    parties = Parties(tiny, tmp_path, rounds=1, loop={"secure_sums": SecureSums()})
    workers = parties.workers()
    store = workers["site0"].store
    failures = []

    class Full(LocalTransport):
        def exchange(self, messages, enough, deadline):
            kind = read_header(next(iter(messages.values())))["kind"]
            if kind != "mask" or failures:
                return super().exchange(messages, enough, deadline)
            with FailingDisk(store.folder, moment, 1, errno.EIO) as disk:
                replies = super().exchange(messages, enough, deadline)
            assert disk.has_failed
            failures.append(replies["site0"])
            return replies

    coordinator = parties.coordinator(Full(workers))
    coordinator.run()
    assert failures == [Failure("disk")]
    assert coordinator.progress.records[0].summed == ["site0", "site1", "site2"]
    assert masked.count("site0") == 2  # the update and the scores
    assert store.current().summing.update_round == 0
    undisturbed, _ = Parties(tiny, tmp_path / "other", rounds=1, loop={"secure_sums": SecureSums()}).deployed()
    expected = undisturbed.server.global_state
    assert all(torch.equal(value, expected[key]) for key, value in coordinator.server.global_state.items())


# The server


@pytest.mark.parametrize("error", ERRORS)
def test_the_servers_run_goes_on_when_its_disk_heals(error, tiny, tmp_path, caplog):
    """The first operation, one in the middle of a round, and one at its end."""
    parties = Parties(tiny, tmp_path, rounds=1)
    workers = parties.workers(may_send=())
    with FailingDisk(tmp_path / SERVER, 20, 6, ERRORS[error]) as disk:
        coordinator = parties.coordinator(LocalTransport(workers))
        progress = coordinator.run()
    assert disk.is_healed and progress.done == progress.scored == 1
    problems = [record for record in caplog.records if record.levelno >= logging.ERROR]
    (problem,) = problems
    assert problem.exc_info is None
    for word in (str(tmp_path / SERVER), os.strerror(ERRORS[error]), "; the run waits for it, for at most 60 s"):
        assert word in problem.getMessage()


def test_a_servers_disk_that_does_not_heal_ends_the_run_with_one_line_and_it_is_resumed(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=2)
    workers = parties.workers()
    coordinator = parties.coordinator(LocalTransport(workers))
    with FailingDisk(tmp_path / SERVER, 30, 10**6, errno.ENOSPC), pytest.raises(OSError, match="No space") as raised:
        coordinator.run()
    assert "\n" not in str(raised.value) and str(raised.value).endswith("free space on its disk; then resume the run")
    coordinator.close()
    resumed = parties.coordinator(LocalTransport(workers), resume=True)
    resumed.run()
    undisturbed, _ = Parties(tiny, tmp_path / "other", rounds=2).deployed()
    expected = undisturbed.server.global_state
    assert all(torch.equal(value, expected[key]) for key, value in resumed.server.global_state.items())


def test_a_folder_of_the_server_that_is_unmounted_is_not_written_anew(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=1)
    coordinator = parties.coordinator(LocalTransport(parties.workers()))
    (tmp_path / SERVER).rename(tmp_path / "unmounted")
    (tmp_path / SERVER).mkdir(mode=0o700)
    with pytest.raises(OSError, match="mounted"):
        coordinator.run()
    assert not list((tmp_path / SERVER).iterdir())


@pytest.mark.parametrize("resume", [False, True])
def test_a_server_that_cannot_start_unlocks_its_folder(resume, tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=1)
    (tmp_path / SERVER).mkdir(mode=0o700)
    if resume:
        (tmp_path / SERVER / "server.safetensors").write_bytes(b"damaged")
    try:
        parties.coordinator(LocalTransport({}), resume=True)
    except (ValueError, OSError):
        FolderLock(tmp_path / SERVER, "server").close()
    else:
        raise AssertionError


def test_vectors_that_a_server_received_before_its_disk_failed_are_counted_after_a_restart(tiny, tmp_path):
    """The site has lost its keys meanwhile, so that it cannot send its vector again."""
    parties = Parties(tiny, tmp_path, rounds=1, loop={"secure_sums": SecureSums()})
    workers = parties.workers()
    disk = FailingDisk(tmp_path / SERVER, 0, 10**6, errno.ENOSPC)

    class FullAfterMasks(LocalTransport):
        def exchange(self, messages, enough, deadline):
            replies = super().exchange(messages, enough, deadline)
            if read_header(next(iter(messages.values())))["kind"] == "mask":
                disk.__enter__()
            return replies

    coordinator = parties.coordinator(FullAfterMasks(workers))
    try:
        with pytest.raises(OSError, match="No space left"):
            coordinator.run()
    finally:
        disk.__exit__()
    coordinator.close()
    workers["site0"].store.close()
    workers["site0"] = parties.worker(0)
    resumed = parties.coordinator(LocalTransport(workers), resume=True)
    resumed.run()
    (record,) = resumed.progress.records
    assert record.masked == ["site0", "site1", "site2"] and record.void


def test_a_site_whose_disk_failed_is_asked_at_once_for_something_new(tiny, tmp_path):
    """Otherwise it would begin to train when the others have ended."""
    asked = []

    class Recording(LocalTransport):
        def exchange(self, messages, enough, deadline):
            asked.append((read_header(next(iter(messages.values())))["kind"], len(messages)))
            return super().exchange(messages, enough, deadline)

    parties = Parties(tiny, tmp_path, rounds=1)
    coordinator = parties.coordinator(Recording(parties.workers(may_send=())))
    coordinator._run_round()
    for _ in range(5):
        coordinator._waits.note_failure("site1", coordinator_module.time.monotonic())
    coordinator._evaluate_sites()
    assert asked == [("join", 3), ("train", 3), ("evaluate", 3)]


def test_waits_grow_twofold_up_to_a_limit_that_leaves_twenty_attempts():
    waits = []
    wait = None
    for _ in range(9):
        wait = next_wait(wait, 600.0)
        waits.append(wait)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert next_wait(4.0, 60.0) == 3.0 and next_wait(4.0, 1.0) == 0.5
    sites = SiteWaits(600.0)
    assert sites.due(["a", "b"], 10.0) == ["a", "b"]
    assert sites.note_failure("a", 10.0) == 0.5 and sites.note_failure("a", 10.5) == 1.0
    assert sites.due(["a", "b"], 11.0) == ["b"] and sites.next_due(["a"], 11.0) == 11.5
    assert sites.due(["a"], 11.5) == ["a"]
    sites.note_answer("a")
    assert sites.due(["a"], 10.6) == ["a"] and sites.note_failure("a", 20.0) == 0.5


def test_a_site_whose_disk_fails_is_asked_again_after_growing_waits(tiny, tmp_path, caplog):
    parties = Parties(tiny, tmp_path, rounds=1)
    workers = parties.workers(may_send=())
    clock = coordinator_module.time
    asked = []

    class Full(LocalTransport):
        def exchange(self, messages, enough, deadline):
            replies = super().exchange(messages, enough, deadline)
            if "site1" in messages and read_header(messages["site1"])["kind"] == "train":
                asked.append(clock.monotonic())
                if len(asked) < 5:
                    replies["site1"] = Failure("disk")
            return replies

    progress = parties.coordinator(Full(workers), deadline=600.0).run()
    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert len(asked) == 5
    for pause, at_least in zip(pauses, (0.5, 1, 2, 4), strict=True):
        assert at_least <= pause <= at_least + 0.51
    assert progress.records[0].failed == {} and len(progress.records[0].answered) == 3
    said = [record.getMessage() for record in caplog.records if "cannot use its disk" in record.getMessage()]
    assert len(said) == 4 and all("site1" in line for line in said)


def test_a_site_whose_disk_fails_when_it_joins_gets_the_number_of_its_name(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=1)
    failures = []

    class Full(LocalTransport):
        def exchange(self, messages, enough, deadline):
            replies = super().exchange(messages, enough, deadline)
            if "site0" in messages and len(failures) < 3:
                failures.append(True)
                replies["site0"] = Failure("disk")
            return replies

    progress = parties.coordinator(Full(parties.workers())).run()
    assert [member.name for member in progress.roster] == parties.names


# Whole runs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disks")
    kept = {}

    def find(kind, party):
        if (kind, party) not in kept:
            kept[kind, party] = Undisturbed(Deployment(kind), party, folder)
        return kept[kind, party]

    return find


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("party", "length"), [(party, length) for party in ("a", SERVER) for length in lengths_of(party)]
)
@pytest.mark.parametrize("kind", SECTIONS)
def test_a_run_ends_as_if_its_disks_had_not_failed(kind, party, error, length, undisturbed):
    """A sample of the operations; ``python -m benchmarks faults --rows disks`` tries all of them."""
    result = undisturbed(kind, party)
    for first in range(3, result.num_operations, result.num_operations // 3):
        verdict = result.judge(DiskFault(error, length), first)
        assert verdict.outcome == SURVIVED, verdict


# Files


def test_a_file_is_never_missing_on_a_file_system_without_links(tmp_path, monkeypatch):
    """It is copied, so that a disk that fails before the new file is in place leaves the former one."""
    path = tmp_path / "x"
    former = tmp_path / "former"
    write_atomic(path, b"first", private=True)

    def no_links(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "link", no_links)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        with pytest.raises(OSError, match="Input/output error"):
            write_atomic(path, b"second", private=True, backup_path=former)
    assert path.read_bytes() == b"first"
    write_atomic(path, b"second", private=True, backup_path=former)
    assert (path.read_bytes(), former.read_bytes()) == (b"second", b"first")
    assert former.stat().st_mode & 0o777 == 0o600


def test_the_first_error_of_a_disk_names_the_file(tmp_path):
    with (
        FailingDisk(tmp_path, 0, 10**6, errno.EROFS),
        pytest.raises(OSError, match=r"Read-only.*'.*/x'$"),
        open_atomic(tmp_path / "x") as file,
    ):
        file.write(b"")


def test_a_lock_file_is_written_in_full_on_a_disk_that_takes_few_bytes_at_a_time(tmp_path, monkeypatch):
    lock = FolderLock(tmp_path / "state", "worker")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, offset: real(file, content[:7], offset))
    lock.write(b"0123456789" * 3)
    assert lock.read() == b"0123456789" * 3
    lock.close()


@pytest.mark.parametrize("make", ["site keys", "server keys", "identity", "app"])
def test_keys_and_apps_that_could_not_be_written_can_be_written_once_there_is_room(make, tmp_path):
    pytest.importorskip("flwr")
    folder = tmp_path / "made"
    makers = {
        "site keys": lambda: keys.write_site_keys(folder, "a"),
        "server keys": lambda: keys.write_server_keys(folder, ["localhost"]),
        "identity": lambda: write_identity(folder, "a"),
        "app": lambda: app.write_app(folder, "app", "a: recipe", "d" * 64, "localhost"),
    }
    with FailingDisk(tmp_path) as counting:
        makers[make]()
    for first in range(0, counting.num_operations, 3):
        folder = tmp_path / f"made-{first}"
        with FailingDisk(folder, first, 1, errno.ENOSPC) as disk:
            try:
                makers[make]()
            except OSError as error:
                assert str(folder) in str(error)
        if disk.has_failed and not any(folder.glob("*")):
            makers[make]()
        assert all(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "__init__.py")
