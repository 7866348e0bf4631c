# SPDX-License-Identifier: Apache-2.0
"""A site's audit log: what a line holds, that nothing leaves before it, and that whoever touches the log is noticed."""

import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from perada.cli.main import main
from perada.deploy.audit import HEAD, LOG, AuditLog, read_log
from perada.deploy.protocol import Request, Response, digest_of_message, pack, read_header
from perada.deploy.state import SiteStore
from perada.deploy.transport import LocalTransport
from perada.privacy.accounting import history_epsilon
from perada.server.sums import SecureSums
from tests.forked import FORKS, forked

from .parties import Parties
from .test_sites import RUN, Canaries, Stopped, code, only_client, private, train

ORDER = Request("train", RUN, "cd" * 32)


def lines_of(folder):
    return (folder / LOG).read_bytes().splitlines()


def verified(folder):
    """The entries, by a plain reading of the file: each digest is that of the rest, and names the one before."""
    entries = []
    last = "0" * 64
    for number, line in enumerate(lines_of(folder), 1):
        entry = json.loads(line)
        rest = {name: value for name, value in entry.items() if name != "sha256"}
        digest = hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        assert (entry["number"], entry["previous"], entry["sha256"]) == (number, last, digest)
        last = digest
        entries.append(entry)
    assert json.loads((folder / HEAD).read_bytes()) == {"lines": len(entries), "last": last}
    return entries


def message(place):
    return pack(Request("train", RUN, "cd" * 32, place))


def note(log, place):
    reply = pack(Response("ok", digest_of_message(message(place))))
    log.append(message(place), reply, trained=0, commits=0, spent=lambda order: None)


def write_log(folder, count):
    """A log of so many lines."""
    folder.mkdir(exist_ok=True)
    log = AuditLog(folder)
    for place in range(count):
        note(log, place)
    log.close()
    return folder


def test_each_reply_has_a_line_that_says_what_left(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, "ditto", rounds=3)
    site = parties.worker(0, may_send=("sizes", "counts", "losses"))
    client = only_client(site)
    shared = {f"shared/{key}": value for key, value in client.recipe.template.initial.items()}
    asked = [pack(Request("join", RUN, client.recipe.digest)), train(site), train(site)]
    asked += [pack(Request("evaluate", RUN, client.recipe.digest, 1), shared), train(site, 7), b"no message"]
    replies = [site.answer(message, "flower-7") for message in asked]
    entries = verified(site.store.folder)
    assert [entry["answered"] for entry in entries] == ["ok", "ok", "ok", "ok", "future", "malformed"]
    assert [entry["request"]["message"] for entry in entries] == [hashlib.sha256(one).hexdigest() for one in asked]
    kinds = [(entry["request"].get("kind"), entry["run"], entry["round"]) for entry in entries]
    assert kinds == [
        (kind, RUN, n) for kind, n in zip(("join", *["train"] * 2, "evaluate", "train"), (0, 0, 0, 1, 7), strict=True)
    ] + [(None, None, None)]
    facts = [entry["left"]["facts"] for entry in entries]
    assert facts[0] == ["labels", "size", "tests"] and facts[1] == facts[2] == ["losses.local", "losses.personal"]
    assert facts[3:] == [["counts.global", "counts.personal", "tests"], [], []]
    sent = {key: value.nbytes for key, value in client.recipe.template.sent.items()}
    assert [entry["left"]["tensors"] for entry in entries] == [{}, sent, sent, {}, {}, {}]
    assert [entry["left"]["bytes"] for entry in entries] == [len(reply) for reply in replies]
    assert [entry["trained"] for entry in entries] == [0, 1, 1, 1, 1, 1]
    assert [entry["commits"] for entry in entries] == [0, 1, 1, 2, 2, 2]  # a repeated message changes nothing
    assert not any("epsilon" in entry or entry["left"].get("masks") for entry in entries)


def test_a_private_sites_lines_say_what_was_spent(tiny, tmp_path):
    site = private(tiny, tmp_path).worker(0, may_send=(), delta=1e-4)
    for round in range(2):
        site.answer(train(site, round), "")
    spent = [entry["epsilon"] for entry in verified(site.store.folder)]
    ledger = site.store.totals.ledger.history(0)
    ((key, steps),) = ledger.items()
    expected = [{"spent": history_epsilon({key: steps * n // 2}, 1e-4, "rdp"), "delta": 1e-4} for n in (1, 2)]
    assert spent == [pytest.approx(one) for one in expected]


def test_the_log_holds_no_image_no_path_and_no_number_of_the_sites(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, "fedavg")
    images = Canaries(False)
    parties.whole = replace(parties.whole, train=[images] * 3, test=[images] * 3, public=None)
    site = parties.worker(0)
    reply = site.answer(pack(Request("join", RUN, only_client(site).recipe.digest)), "")
    site.answer(train(site), "\x1b[2Jcanary")
    images.broken = True
    site.answer(train(site, 1), "")
    text = (site.store.folder / LOG).read_text()
    facts = read_header(reply)["facts"]
    assert facts["labels"] not in text and f'"size":{facts["size"]}' not in text
    for mark in ("canary", "4711", str(tmp_path), "\x1b", "png"):
        assert mark not in text
    assert [entry["answered"] for entry in verified(site.store.folder)] == ["ok", "ok", "broken"]
    for name in (LOG, HEAD):
        assert stat.S_IMODE((site.store.folder / name).stat().st_mode) == 0o600


def test_a_line_is_on_the_disk_before_the_reply_leaves(tiny, tmp_path, monkeypatch):
    site = Parties(tiny, tmp_path, "ditto").worker(0)
    synced = []
    real = os.fsync
    log = site.store.folder / LOG

    def fsync(file):
        if os.fstat(file).st_ino == log.stat().st_ino:
            synced.append(len(log.read_bytes().splitlines()))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    for round in range(2):
        site.answer(train(site, round), "")
        assert synced == list(range(1, round + 2)) and len(verified(site.store.folder)) == round + 1


def swapped(found):
    return [*found[:3], found[4], found[3], *found[5:]]


def other(line, wrong=b'"failed"'):
    return line.replace(b'"ok"', wrong)


TOUCHED = {
    "removed": (
        lambda found: found[:3] + found[4:],
        "line 4 does not follow .*: a line was removed, moved or inserted",
    ),
    "first removed": (lambda found: found[1:], "line 1 does not follow the previous line"),
    "changed": (
        lambda found: [*found[:3], other(found[3]), *found[4:]],
        "line 4 was changed: its sha256 does not match",
    ),
    "spaced": (lambda found: [*found[:3], other(found[3], b' "ok"'), *found[4:]], "line 4 was changed"),
    "last changed": (lambda found: [*found[:-1], other(found[-1])], "line 7 was changed"),
    "reordered": (swapped, "line 4 does not follow the previous line"),
    "twice": (lambda found: found[:4] + found[3:], "line 5 does not follow the previous line"),
    "cut off": (lambda found: found[:-1], "it ends after line 6 but had 7: lines were cut off"),
    "cut off in the middle": (
        lambda found: [*found[:-1], found[-1][:50]],
        "it ends after line 6 but had 7: lines were",
    ),
    "all": (lambda found: [], "it ends after line 0 but had 7: lines were cut off"),
}


@pytest.mark.parametrize("how", TOUCHED)
def test_a_log_that_was_touched_is_found(how, tmp_path, capsys):
    (touch, finds), folder = TOUCHED[how], write_log(tmp_path / "state", 7)
    main(["deploy", "audit", str(folder)])
    output = capsys.readouterr().out
    assert "7 lines" in output and verified(folder)[-1]["sha256"] in output
    (folder / LOG).write_bytes(b"".join(touch((folder / LOG).read_bytes().splitlines(keepends=True))))
    with pytest.raises(ValueError, match=finds) as error:
        main(["deploy", "audit", str(folder)])
    assert "\n" not in str(error.value) and "--begin" in str(error.value)
    with pytest.raises(ValueError, match=finds):  # nor does a worker write behind it
        SiteStore(folder)


def test_lines_that_were_written_anew_are_found_by_the_head_and_by_a_hash_that_was_noted(tmp_path, capsys):
    folder = write_log(tmp_path / "state", 4)
    other = write_log(tmp_path / "other", 4)
    noted = verified(folder)[1]["sha256"]
    main(["deploy", "audit", str(folder), "--noted", noted])
    shutil.copy(other / LOG, folder / LOG)
    with pytest.raises(ValueError, match=rf"line 4 .*{HEAD}"):
        main(["deploy", "audit", str(folder)])
    shutil.copy(other / HEAD, folder / HEAD)  # whoever may write the disk
    main(["deploy", "audit", str(folder)])
    with pytest.raises(ValueError, match="no line has the noted SHA-256 '" + noted):
        main(["deploy", "audit", str(folder), "--noted", noted])
    (folder / HEAD).unlink()
    with pytest.raises(ValueError, match=rf"{HEAD}.* missing"):
        main(["deploy", "audit", str(folder)])
    (folder / HEAD).write_text("{")
    with pytest.raises(ValueError, match=rf"{HEAD}.*{LOG}.* damaged"):
        main(["deploy", "audit", str(folder)])


@pytest.mark.slow
def test_the_program_ends_with_status_1_and_one_line(tmp_path, capsys):
    folder = write_log(tmp_path / "state", 3)
    main(["deploy", "audit", str(folder), "--json"])
    assert capsys.readouterr().out == (folder / LOG).read_text()
    (folder / LOG).write_bytes(b"".join(line + b"\n" for line in lines_of(folder)[1:]))
    words = [sys.executable, "-c", "from perada.cli import entry_point; entry_point()", "deploy", "audit", str(folder)]
    found = subprocess.run([*words, "--json"], capture_output=True, text=True, check=False)
    assert found.returncode == 1 and found.stderr.count("\n") == 1
    assert found.stderr.startswith(f"perada: error: {LOG}: line 1 does not follow")


@pytest.mark.parametrize("size", [1, 40, -1])
def test_a_torn_line_stays_and_the_next_one_says_so(size, tmp_path, monkeypatch):
    """The process ends, or the disk is full, after ``size`` bytes of a line."""
    folder = write_log(tmp_path / "state", 2)
    before = (folder / LOG).read_bytes()
    real = os.write

    def torn(file, data):
        real(file, data[:size])
        raise Stopped

    log = AuditLog(folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", torn)
        with pytest.raises(Stopped):
            note(log, 2)
    left = (folder / LOG).read_bytes()[len(before) :]
    assert 0 < len(left) and not left.endswith(b"\n")
    main(["deploy", "audit", str(folder)])  # as it is, it is whole: the line was not answered
    note(log, 2)
    log.close()
    now = (folder / LOG).read_bytes()
    assert now.startswith(before + left + b"~\n")
    found = read_log(folder)
    assert found.entries[2]["torn"] == {"bytes": len(left) + 1, "sha256": hashlib.sha256(left + b"~").hexdigest()}
    assert [entry["number"] for entry in found.entries] == [1, 2, 3, 4] and not found.torn
    main(["deploy", "audit", str(folder)])
    (folder / LOG).write_bytes(now.replace(left + b"~\n", b""))
    with pytest.raises(ValueError, match=r"line 3 .*before"):
        main(["deploy", "audit", str(folder)])


@pytest.mark.slow
def test_whatever_step_of_a_line_is_the_last_the_chain_is_whole(tmp_path, monkeypatch):
    """Also where the repair itself is interrupted."""
    calls = []

    def counting(real, stop):
        def called(*arguments):
            calls.append(real)
            if len(calls) == stop:
                if real.__name__ == "write":
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                raise Stopped
            return real(*arguments)

        return called

    steps = 0
    for first in range(1, 16):
        for second in (0, 1, 2, 3, 4):
            folder = write_log(tmp_path / f"{first}-{second}", 2)
            for stop in filter(None, (first, second)):
                with monkeypatch.context() as patch:
                    calls.clear()
                    for name in ("write", "fsync", "replace"):
                        patch.setattr(os, name, counting(getattr(os, name), stop))
                    try:
                        log = AuditLog(folder)
                        note(log, 2)
                        log.close()
                    except Stopped:
                        steps = first if stop == first and not second else steps
                main(["deploy", "audit", str(folder)])
            log = AuditLog(folder)
            note(log, 9)
            log.close()
            main(["deploy", "audit", str(folder)])
            entries = read_log(folder).entries
            assert entries[-1]["round"] == 9 and len(entries) >= 3
    assert 4 <= steps < 15


def append_for_ever(folder, pipe):
    """Append lines to a site's log, and write a byte to the pipe after each."""
    log = AuditLog(folder)
    for place in itertools.count():
        note(log, place)
        os.write(pipe, b".")


@FORKS
def test_sigkill_at_any_moment_leaves_every_answered_line(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    answered = 0
    draw = [0.013 * (7 * turn % 11) for turn in range(8)]
    for wait in draw:
        reading, writing = os.pipe()
        process = forked(append_for_ever, folder, writing)
        os.close(writing)
        with open(reading, "rb", buffering=0) as pipe:
            answered += len(pipe.read(1))
            time.sleep(wait)
            process.kill()
            process.join()
            answered += len(pipe.readall())
        assert process.exitcode == -signal.SIGKILL
        main(["deploy", "audit", str(folder), "--json"])
        entries = read_log(folder).entries
        replies = [entry for entry in entries if "request" in entry]
        assert answered <= len(replies) <= answered + len(draw)
    assert all(later["previous"] == before["sha256"] for before, later in pairwise(entries))


def trained_and_copied(tiny, tmp_path):
    """The state folder of a site that trained three rounds; ``copy`` has it as it was after the first."""
    site = Parties(tiny, tmp_path, "ditto", rounds=3).worker(0)
    folder = site.store.folder
    site.answer(train(site), "")
    shutil.copytree(folder, tmp_path / "copy")
    for round in (1, 2):
        site.answer(train(site, round), "")
    site.store.close()
    return folder


def test_a_state_that_was_put_back_alone_is_found(tiny, tmp_path):
    """It would have forgotten what was spent."""
    folder = trained_and_copied(tiny, tmp_path)
    shutil.copy(tmp_path / "copy" / "state.safetensors", folder)
    for find in (lambda: SiteStore(folder), lambda: main(["deploy", "audit", str(folder)])):
        said = (
            r"state\.safetensors is an older copy \(written once\), but according to line 3 of audit\.jsonl .* 3 times"
        )
        with pytest.raises(ValueError, match=said):
            find()
    main(["deploy", "audit", str(folder), "--begin"])
    assert (folder / "audit-1.jsonl").read_bytes().count(b"\n") == 3
    (begun,) = verified(folder)
    assert begun["begun"]["file"] == hashlib.sha256((folder / "audit-1.jsonl").read_bytes()).hexdigest()
    assert begun["begun"]["head"][0] == 3 and begun["trained"] == 1
    again = Parties(tiny, tmp_path, "ditto", rounds=3).worker(0)
    assert code(again.answer(train(again, 1), ""), train(again, 1)) == "ok"
    main(["deploy", "audit", str(folder)])


def test_a_log_that_was_put_back_or_taken_away_is_found(tiny, tmp_path):
    folder = trained_and_copied(tiny, tmp_path)
    for name in (LOG, HEAD):
        shutil.copy(tmp_path / "copy" / name, folder)
    with pytest.raises(ValueError, match=r"state .*line 2\b"):
        SiteStore(folder)
    for name in (LOG, HEAD):
        (folder / name).unlink()
    with pytest.raises(ValueError, match=rf"{LOG}: .*missing.*{HEAD}"):
        main(["deploy", "audit", str(folder)])


def test_a_folder_without_a_log_is_not_said_to_be_whole(tiny, tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match=f"no {LOG}"):
        main(["deploy", "audit", str(tmp_path)])
    assert capsys.readouterr().out == ""
    site = Parties(tiny, tmp_path, "ditto").worker(0)
    main(["deploy", "audit", str(site.store.folder)])  # a worker that was asked nothing yet has begun one
    assert "0 lines" in capsys.readouterr().out


def test_a_log_is_not_begun_anew_beside_a_worker(tiny, tmp_path):
    site = Parties(tiny, tmp_path, "ditto").worker(0)
    with pytest.raises(OSError, match="in use"):
        main(["deploy", "audit", str(site.store.folder), "--begin"])


def test_a_log_is_shown_as_a_table(tiny, tmp_path, capsys):
    parties = Parties(tiny, tmp_path, "ditto", rounds=1)
    site = parties.worker(0)
    parties.names, parties.sizes = parties.names[:1], parties.sizes[:1]
    parties.coordinator(LocalTransport({"site0": site}), min_sites=1).run()
    main(["deploy", "audit", str(site.store.folder)])
    output = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines() if line.startswith("|")][
        2:
    ]
    assert [(row[0], row[4], row[6]) for row in rows] == [
        ("1", "join", "ok"),
        ("2", "train", "ok"),
        ("3", "evaluate", "ok"),
    ]
    assert "counts.personal" in rows[2][7] and re.match(r"\d+ tensors", rows[1][7])


def test_what_leaves_under_masks_is_told_from_what_leaves_in_the_clear(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=1, loop={"secure_sums": SecureSums()})
    _, workers = parties.deployed()
    entries = verified(workers["site0"].store.folder)
    left = {(entry["request"]["kind"], entry["request"].get("of")): entry["left"] for entry in entries}
    masked = {key for key, one in left.items() if one["masks"]}
    assert masked == {("mask", "update"), ("mask", "scores")}
    for key, one in left.items():
        assert list(one["tensors"]) == (["masked"] if key in masked else [])
    assert left["train", None]["sums"] == ["advert"] and left["reveal", "update"]["sums"] == ["gone", "own"]
    assert left["train", None]["facts"] == left["evaluate", None]["facts"] == []


def test_noisy_sums_say_what_the_site_as_a_whole_has_spent(tiny, tmp_path):
    from .sums.test_noisy_sums import by_opacus, noisy

    deployment = noisy(tiny, tmp_path, rounds=2, every=2, privacy={"noise_multiplier": 2.0})
    _, workers = deployment.deployed()
    entries = [entry for entry in verified(workers["site0"].store.folder) if "epsilon" in entry]
    assert [entry["request"]["kind"] for entry in entries] == ["train", "mask", "train", "mask"]
    client = only_client(workers["site0"])
    expected = [by_opacus(sums, 2.0, client.limits.delta) for sums in (0, 1, 1, 2)]
    assert [entry["epsilon"]["site"] for entry in entries] == pytest.approx(expected, rel=1e-12)
    assert {*entries[0]["epsilon"]} == {"site", "delta"}
