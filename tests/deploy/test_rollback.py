# SPDX-License-Identifier: Apache-2.0
"""Older copies of what a site keeps: whichever files are put back, it is noticed before anything leaves."""

import itertools
import os
import shutil
from dataclasses import replace

import pytest

from perada.cli.main import main
from perada.deploy.audit import HEAD, LOG, AuditLog, HighWaterMark, read_log
from perada.deploy.protocol import Request, pack, read_header
from perada.deploy.state import SITE_STATE, SiteStore, read_runs, read_state
from perada.deploy.transport import LocalTransport
from perada.server.sums import SecureSums
from perada.system.disk_errors import DiskError
from perada.system.files import LOCK

from .parties import Parties
from .test_sites import RUN, Stopped, code, fails_at, only_client, sending, train

OTHER_RUN = "cd" * 16


def files_of(folder):
    """The content of each file of a folder, by its name there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def put_back(folder, now, before, names):
    """The files as they are ``now``, but for those that are as they were ``before``."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in now.items():
        older = before.get(name) if name in names else content
        if older is not None:
            path = folder / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_bytes(older)


def rejection(folder):
    """What a worker that starts says of a folder, or of a run in it; empty if it accepts all."""
    book = None
    try:
        book = SiteStore(folder)
        for run in book.runs:
            book.load(run)
    except ValueError as error:
        return str(error)
    finally:
        if book is not None:
            book.close()
    return ""


def lines(files):
    return files[LOG].count(b"\n")


class Copying(LocalTransport):
    """Takes a copy of a site's folder whenever that site has answered."""

    def __init__(self, workers, name):
        super().__init__(workers)
        self.name = name
        self.copies = []

    def exchange(self, messages, enough, deadline):
        replies = super().exchange(messages, enough, deadline)
        if self.name in messages:
            kind = read_header(messages[self.name])["kind"]
            self.copies.append((kind, files_of(self.workers[self.name].store.folder)))
        return replies


def folders_of_sums(tiny, tmp_path):
    """Copies of a site's folder after each message of two rounds of secure sums, with the kinds of the messages."""
    deployment = Parties(tiny, tmp_path, rounds=2, loop={"secure_sums": SecureSums()})
    transport = Copying(deployment.workers(), "site0")
    deployment.coordinator(transport).run()
    for worker in transport.workers.values():
        worker.store.close()
    return deployment, transport.copies


def two_runs(tiny, tmp_path):
    """Copies of a site's folder while two runs take turns."""
    site = Parties(tiny, tmp_path, "ditto", rounds=3).worker(0)
    client = only_client(site)
    copies = []
    for round, run in itertools.product(range(2), (RUN, OTHER_RUN)):
        message = pack(Request("train", run, client.recipe.digest, round, clients=3), sending(client))
        for _ in range(2):  # the second time nothing is trained, and a line is written
            assert code(site.answer(message, ""), message) == "ok"
            copies.append(("train", files_of(site.store.folder)))
    site.store.close()
    return copies


def must_be_noticed(now, before, names, line_of_commit):
    """Whether files that were put back are to be noticed, from what they are rather than from what perada compares.

    ``line_of_commit`` is how many lines the log had when the state was last written.
    """
    changed = {name for name in now if now[name] != before.get(name)}
    names = changed & {*names}
    if names == changed or names <= {HEAD, LOCK}:  # the whole folder, or nothing that says what was sent or spent
        return False
    if names == {LOG, HEAD, LOCK}:  # lines that came after the last change of the state are in no file that is left
        return before.get(LOG, b"").count(b"\n") < line_of_commit
    return True


@pytest.mark.parametrize(
    "case", [lambda *arguments: folders_of_sums(*arguments)[1], two_runs], ids=["secure sums", "two runs"]
)
def test_any_files_that_are_put_back_are_noticed_but_all_together(case, tiny, tmp_path):
    """Each set of files, as after each of the messages. All files together are what no file can tell of."""
    unused = f"runs/{OTHER_RUN}.safetensors"  # of the run that is the current one again
    copies = [{name: one for name, one in files.items() if name != unused} for _, files in case(tiny, tmp_path)]
    now = copies[-1]
    line_of_commit = next(
        lines(earlier)
        for earlier, later in reversed([*itertools.pairwise(copies)])
        if earlier.get(SITE_STATE) != later[SITE_STATE]
    )
    # Many copies differ in few files, so the same folder would often be tried again.
    rejections = {}

    def cached_rejection_of(before, names):
        content = now | {name: before.get(name) for name in names}
        key = frozenset(content.items())
        if key not in rejections:
            rejections[key] = rejection_of(tmp_path, now, before, names)
        return rejections[key]

    assert cached_rejection_of(now, ()) == ""
    tried = 0
    for before in [{}, *copies[:-1]]:
        changed = [name for name in now if now[name] != before.get(name)]
        for count in range(1, len(changed) + 1):
            for names in itertools.combinations(changed, count):
                said = cached_rejection_of(before, names)
                if must_be_noticed(now, before, names, line_of_commit):
                    assert "restore " in said, (names, lines(now), said)
                    tried += 1
                elif HEAD not in names:
                    assert said == "", (names, said)
    assert tried > 100


def test_files_of_a_copy_that_went_on_by_itself_are_noticed(tiny, tmp_path):
    """Both have written as many lines and states since, so that only the lines themselves differ."""

    def after(folder, earlier, run, round):
        """The files of a site, which begins with those of an earlier one, after another message."""
        site = Parties(tiny, folder, "ditto", rounds=3).worker(0)
        store = site.store.folder
        site.store.close()
        put_back(store, earlier, {}, ())
        site = Parties(tiny, folder, "ditto", rounds=3).worker(0)
        client = only_client(site)
        message = pack(Request("train", run, client.recipe.digest, round, clients=3), sending(client))
        assert code(site.answer(message, ""), message) == "ok"
        site.store.close()
        return files_of(store)

    common = after(tmp_path / "first", {}, RUN, 0)
    now = after(tmp_path / "first", common, RUN, 1)
    other = after(tmp_path / "second", common, OTHER_RUN, 0)
    assert lines(now) == lines(other)
    others = [name for name in {**now, **other} if name != LOCK]
    put_back(tmp_path / "put-back", {**other, **now}, other, others)
    assert "restore " in rejection(tmp_path / "put-back")


def rejection_of(tmp_path, now, before, names):
    put_back(tmp_path / "put-back", now, before, names)
    return rejection(tmp_path / "put-back")


def test_a_state_that_is_put_back_before_the_masked_vector_sends_none(tiny, tmp_path):
    """With the worker running, and before it starts again: else the vector leaves twice, and the account forgets it."""
    deployment = Parties(tiny, tmp_path, rounds=1, loop={"secure_sums": SecureSums()})
    workers = deployment.workers()
    states = {name: [] for name in workers}
    replies = []

    class PutBack(LocalTransport):
        def exchange(self, messages, enough, deadline):
            kind = read_header(next(iter(messages.values())))["kind"]
            path = {name: worker.store.folder / SITE_STATE for name, worker in workers.items()}
            if kind == "confirm":  # all have sent their vectors
                for name in workers:
                    path[name].write_bytes(states[name][0])
                asked = {name: masks[name] for name in workers}
                replies.extend(super().exchange(asked, 3, 9.0).values())
            if kind == "mask":
                masks.update(messages)
                for name in workers:
                    states[name].append(path[name].read_bytes())
            return super().exchange(messages, enough, deadline)

    masks = {}
    deployment.coordinator(PutBack(workers)).run()
    assert [read_header(reply)["code"] for reply in replies] == ["failed"] * 3
    for worker in workers.values():
        worker.store.close()
        message = r"state\.safetensors is an older copy \(written once\), but .* line \d+ of audit\.jsonl .* 2 times"
        with pytest.raises(ValueError, match=message):
            SiteStore(worker.store.folder)


def test_scores_leave_once_although_the_state_is_put_back(tiny, tmp_path):
    """A server that has sites restored would have models of its own making scored, one after another."""
    site = Parties(tiny, tmp_path, "ditto", rounds=2).worker(0)
    site.answer(train(site), "")
    before = files_of(site.store.folder)
    client = only_client(site)
    shared = {f"shared/{key}": value for key, value in client.recipe.template.initial.items()}
    message = pack(Request("evaluate", RUN, client.recipe.digest, 1), shared)
    assert code(site.answer(message, ""), message) == "ok"
    site.store.close()
    (site.store.folder / SITE_STATE).write_bytes(before[SITE_STATE])
    with pytest.raises(ValueError, match=r"older copy.*line 2 of audit\.jsonl.* 2"):
        SiteStore(site.store.folder)
    with pytest.raises(ValueError, match="older copy"):
        main(["deploy", "audit", str(site.store.folder)])


def test_a_log_that_is_deleted_is_missed_also_if_nobody_joined_before(tiny, tmp_path):
    site = Parties(tiny, tmp_path, "ditto", rounds=3).worker(0)
    assert code(site.answer(message := train(site), ""), message) == "ok"  # the first line of all
    folder = site.store.folder
    site.store.close()
    for gone in ((LOG,), (HEAD,), (LOG, HEAD), (LOG, HEAD, LOCK)):
        files = files_of(folder)
        for name in gone:
            (folder / name).unlink()
        with pytest.raises(ValueError, match=rf"({LOG}|{HEAD})\b.*(is missing|were cut off)"):
            SiteStore(folder)
        with pytest.raises(ValueError, match=rf"({LOG}|{HEAD})\b.*(is missing|were cut off)"):
            main(["deploy", "audit", str(folder)])
        put_back(folder, files, {}, ())
    SiteStore(folder).close()


def test_a_log_that_is_deleted_before_anything_was_trained_is_missed(tiny, tmp_path):
    site = Parties(tiny, tmp_path, "ditto", rounds=3).worker(0)
    site.answer(pack(Request("join", RUN, only_client(site).recipe.digest)), "")
    site.store.close()
    for name in (LOG, HEAD):
        (site.store.folder / name).unlink()
    with pytest.raises(ValueError, match=rf"{LOG}: .*older copy.*{LOCK}.*line 1"):
        SiteStore(site.store.folder)


@pytest.mark.parametrize("how", ["deleted", "replaced", "emptied", "shortened"])
def test_nothing_leaves_once_the_log_was_touched_beside_a_running_worker(how, tiny, tmp_path):
    site = Parties(tiny, tmp_path, "ditto", rounds=3).worker(0)
    site.answer(train(site), "")
    older = files_of(site.store.folder)
    site.answer(train(site), "")
    log = site.store.folder / LOG
    if how == "deleted":
        log.unlink()
    elif how == "replaced":
        (tmp_path / "older").write_bytes(older[LOG])
        (tmp_path / "older").replace(log)
        (site.store.folder / HEAD).write_bytes(older[HEAD])
    else:
        log.write_bytes(b"" if how == "emptied" else older[LOG])
    for _ in range(2):
        with pytest.raises((OSError, ValueError), match=LOG):
            site.answer(train(site), "")


def test_a_former_run_that_is_put_back_is_not_continued(tiny, tmp_path):
    """Its state says which round's vector has left, and what the run's own ledger has spent."""
    copies = two_runs(tiny, tmp_path)
    folder = tmp_path / "put-back"
    former = f"runs/{RUN}.safetensors"
    now = copies[-1][1]
    before = next(files for _, files in copies if former in files)
    put_back(folder, now, before, [former])
    with pytest.raises(ValueError, match=rf"{RUN}\.safetensors'.*older copy.* 1"):
        SiteStore(folder)
    with pytest.raises(ValueError, match="older copy"):
        main(["deploy", "audit", str(folder)])
    put_back(folder, now, {}, [former])  # gone: nothing else is lost, but the run must not begin again
    book = SiteStore(folder)
    with pytest.raises(ValueError, match=rf"missing.*{RUN}"):
        book.load(RUN)
    assert book.runs == sorted([RUN, OTHER_RUN])
    (folder / former).write_bytes(before[former])  # while the worker runs
    with pytest.raises(ValueError, match="older copy"):
        book.load(RUN)
    (folder / former).write_bytes(now[former])
    assert book.load(RUN).training.round == 1
    assert {state.run for state in read_runs(folder)[0]} == {RUN, OTHER_RUN}


def test_runs_that_are_trained_in_turn_are_each_known_once(tmp_path):
    book = SiteStore(tmp_path)
    for number, run in enumerate([RUN, OTHER_RUN, RUN, OTHER_RUN, RUN]):
        state = book.load(run)
        assert state.training.num_rounds == number // 2
        state = replace(state, training=replace(state.training, num_rounds=state.training.num_rounds + 1))
        book.commit(state, replace(book.totals, rounds=number + 1))
    assert [(state.run, state.training.num_rounds) for state in read_runs(tmp_path)[0]] == [(RUN, 3), (OTHER_RUN, 2)]
    book.close()
    assert rejection(tmp_path) == ""


OPERATIONS = ("write", "pwrite", "fsync", "fdatasync", "replace", "ftruncate")


def test_a_kill_at_any_step_of_an_answer_is_no_false_alarm(tiny, tmp_path, monkeypatch):
    """Between the state, the line, its head and the lock file: the folder is accepted, and the reply comes again."""
    uninterrupted = Parties(tiny, tmp_path, "ditto", rounds=3).worker(0, may_send=())
    uninterrupted.answer(train(uninterrupted), "")
    before = files_of(uninterrupted.store.folder)
    client = only_client(uninterrupted)
    shared = {f"shared/{key}": value for key, value in client.recipe.template.initial.items()}
    message = pack(Request("evaluate", RUN, client.recipe.digest, 1), shared)  # takes no time, and is committed
    reply = uninterrupted.answer(message, "")
    uninterrupted.store.close()
    finished = False
    for stop in range(1, 60):
        folder = tmp_path / f"killed-{stop}"
        put_back(folder, before, {}, ())
        folder.chmod(0o700)
        site = type(uninterrupted)(SiteStore(folder), uninterrupted.clients, uninterrupted.permissions.may_send)
        calls = itertools.count(1)

        def stopping(name, _real, _calls=calls, _stop=stop):
            def called(*arguments, **options):
                if next(_calls) == _stop:
                    raise Stopped
                return _real(*arguments, **options)

            return called

        with monkeypatch.context() as patch:
            for name in OPERATIONS:
                patch.setattr(os, name, stopping(name, getattr(os, name)))
            try:
                site.answer(message, "")
                finished = True
            except Stopped:
                pass
        site.store.close()
        again = type(uninterrupted)(SiteStore(folder), uninterrupted.clients, uninterrupted.permissions.may_send)
        assert again.answer(message, "") == reply
        assert again.store.current().scoring.round == 1
        main(["deploy", "audit", str(folder)])
        again.store.close()
        if finished:
            break
    assert finished and stop > 8


def test_a_state_of_a_commit_that_failed_late_is_on_the_disk_before_it_counts(tiny, tmp_path, monkeypatch):
    """Its renaming may still be lost by a power failure, while its reply leaves when the message comes again."""
    site = Parties(tiny, tmp_path, "ditto", rounds=3).worker(0)
    site.answer(train(site), "")
    message = train(site, 1)
    with monkeypatch.context() as patch:
        patch.setattr("perada.system.files.sync", fails_at(1))  # of the folder, after the renaming
        with pytest.raises(DiskError, match="Input/output error"):
            site.answer(message, "")
    synced = []
    monkeypatch.setattr("perada.deploy.state.sync", synced.extend)
    assert code(site.answer(message, ""), message) == "ok"
    assert synced == [site.store.folder / SITE_STATE, site.store.folder]
    assert site.store.commits == 2
    site.store.close()
    assert rejection(site.store.folder) == ""


def test_the_number_in_log_and_state_counts_every_commit(tiny, tmp_path):
    _, copies = folders_of_sums(tiny, tmp_path)
    written = 0
    before = None
    for kind, files in copies:
        written += files.get(SITE_STATE) != before
        before = files.get(SITE_STATE)
        put_back(tmp_path / "copy", files, {}, ())
        assert read_log(tmp_path / "copy").entries[-1]["commits"] == written, kind
        if before is not None:
            assert read_state(tmp_path / "copy" / SITE_STATE).counters.commits == written
        assert HighWaterMark.unpack(files[LOCK]).commits == written
    assert written == 2 * 4  # a round's training, its vector, its scores and theirs


@pytest.mark.every(3)
@pytest.mark.parametrize("content", [b"", b"used\n", b"{", b'{"lines": 1}' + bytes(20), bytes(160), b"[1, 2]"])
def test_a_lock_file_that_is_lost_or_damaged_is_no_reason_to_reject(content, tiny, tmp_path):
    """It may hold a mixture after a power failure, and an operator may take it for a lock that was left."""
    site = Parties(tiny, tmp_path, "ditto", rounds=3).worker(0)
    site.answer(train(site), "")
    site.store.close()
    (site.store.folder / LOCK).write_bytes(content)
    assert rejection(site.store.folder) == ""


def test_after_an_older_state_was_accepted_the_next_copy_is_noticed_again(tiny, tmp_path):
    site = Parties(tiny, tmp_path, "ditto", rounds=3).worker(0)
    folder = site.store.folder
    site.answer(train(site), "")
    first = files_of(folder)
    site.answer(train(site, 1), "")
    site.store.close()
    (folder / SITE_STATE).write_bytes(first[SITE_STATE])
    main(["deploy", "audit", str(folder), "--begin"])
    again = Parties(tiny, tmp_path, "ditto", rounds=3).worker(0)
    for round in (1, 2):
        message = train(again, round)
        assert code(again.answer(message, ""), message) == "ok"
    again.store.close()
    (folder / SITE_STATE).write_bytes(first[SITE_STATE])
    assert (
        "is an older copy (written once), but according to line 3 of audit.jsonl it was written 3 times"
        in rejection(folder)
    )
    main(["deploy", "audit", str(folder), "--begin"])
    assert (folder / "audit-1.jsonl").exists() and (folder / "audit-2.jsonl").exists()
    SiteStore(folder).close()


def test_a_log_that_was_being_begun_can_be_begun_once_more(tiny, tmp_path, monkeypatch):
    """The process is killed after the new log is in place, before its head and the lock file are written."""
    site = Parties(tiny, tmp_path, "ditto", rounds=3).worker(0)
    for round in range(2):
        site.answer(train(site, round), "")
    site.store.close()
    folder = site.store.folder
    with monkeypatch.context() as patch:

        def stopped(*_):
            raise Stopped

        patch.setattr("perada.deploy.audit._write_head", stopped)
        with pytest.raises(Stopped):
            main(["deploy", "audit", str(folder), "--begin"])
    assert "were cut off" in rejection(folder)
    main(["deploy", "audit", str(folder), "--begin"])
    SiteStore(folder).close()
    former = [(folder / f"audit-{number}.jsonl").read_bytes().count(b"\n") for number in (1, 2)]
    assert former == [2, 1]


def test_a_log_without_counts_is_not_one_that_a_worker_wrote(tmp_path):
    tmp_path.chmod(0o700)
    log = AuditLog(tmp_path)
    log._append_entry({"trained": 0})
    log.close()
    with pytest.raises(ValueError, match=r"line 1 .*trained"):
        AuditLog(tmp_path)
