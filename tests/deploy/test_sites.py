# SPDX-License-Identifier: Apache-2.0
"""A site: what it answers, what it rejects, what is on its disk after a crash, and what never leaves it."""

import logging
import os
import re
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from perada.deploy.protocol import (
    RejectionError,
    Request,
    Response,
    digest_of_message,
    pack,
    read_header,
    spec_of,
    unpack,
)
from perada.deploy.site.client import Client, single_client_data
from perada.deploy.site.file import Limits
from perada.deploy.state import SiteStore, read_state
from perada.deploy.transport import Failure, LocalTransport
from perada.privacy import ClientPrivacy, Privacy
from perada.privacy.accounting import history_epsilon
from perada.system.disk_errors import DiskError
from perada.system.files import sync
from perada.tasks import Classification

from .parties import Parties

RUN = "ab" * 16


@pytest.fixture
def site(tiny, tmp_path):
    return Parties(tiny, tmp_path, "ditto", rounds=3).worker(0)


def only_client(worker):
    (client,) = worker.clients.values()
    return client


def train(worker, round=0, kind="train", shift=0.0, **options):
    """A message that asks for a round; ``shift`` makes another state of it."""
    client = only_client(worker)
    order = Request(kind, RUN, client.recipe.digest, round, **{"client": 0, "clients": 3} | options)
    state = {key: value + shift if value.is_floating_point() else value for key, value in sending(client).items()}
    return pack(order, state)


def sending(client):
    return client.recipe.template.received


def code(reply, message):
    answer = Response.read(read_header(reply))
    assert answer.answers == digest_of_message(message)
    return answer.code


def state_bytes(worker):
    path = worker.store.folder / "state.safetensors"
    return path.read_bytes() if path.exists() else None


def without_log_position(state):
    """A state's bytes without how far the audit log was, whose lines hold the time."""
    return re.sub(rb'audit[\\": ]+\[\d+, [\\"]+[0-9a-f]{64}', b"", state)


def test_a_repeated_message_gets_the_same_reply_and_trains_nothing(site):
    message = train(site)
    first = site.answer(message, "x")
    assert code(first, message) == "ok"
    before = state_bytes(site)
    assert site.answer(message, "y") == first
    assert state_bytes(site) == before


def test_rounds_of_the_past_and_the_future_are_rejected(site):
    for message, expected in [(train(site, 0), "ok"), (train(site, 2, client=1), "other"), (train(site, 2), "ok")]:
        assert code(site.answer(message, ""), message) == expected
    before = state_bytes(site)
    for message, expected in [
        (train(site, 1), "past"),
        (train(site, 3), "future"),
        (train(site, 2, shift=0.5), "other"),
        (train(site, 3, kind="tune"), "other"),  # Ditto has no fine-tuning
    ]:
        assert code(site.answer(message, ""), message) == expected
    assert state_bytes(site) == before


def test_a_recipe_that_is_not_approved_is_rejected(site):
    client = only_client(site)
    message = pack(Request("train", RUN, "0" * 64), sending(client))
    assert code(site.answer(message, ""), message) == "unapproved"
    assert state_bytes(site) is None


def hostile(client):
    """Messages that no server sends."""
    good = vars(Request("train", RUN, client.recipe.digest, clients=3))
    state = sending(client)
    name = next(iter(state))
    yield "nothing", b""
    yield "pickle", b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."
    yield "huge table", (2**32).to_bytes(8, "little") + b"{}" * 100
    yield "cut off", pack(good, state)[:-1]
    yield "more at the end", pack(good, state) + b"\0"
    yield "deep", (100_000).to_bytes(8, "little") + b"[" * 100_000
    yield "NaN", pack(good, state | {name: state[name] * torch.nan})
    yield "infinite", pack(good, state | {name: state[name] + torch.inf})
    yield "too large", pack(good, state | {name: state[name] + 1e9})
    yield "shape", pack(good, state | {name: state[name][..., :1]})
    yield "dtype", pack(good, state | {name: state[name].double()})
    yield "another tensor", pack(good, state | {"more": torch.zeros(1)})
    yield "a tensor is missing", pack(good, {key: value for key, value in state.items() if key != name})
    yield "another kind", pack(good | {"kind": "delete"}, state)
    yield "a path for a run", pack(good | {"run": "../../etc/passwd"}, state)
    yield "a number of another type", pack(good | {"round": 0.5}, state)
    yield "true for a number", pack(good | {"round": True}, state)
    yield "one entry more", pack(good | {"code": "import os"}, state)
    yield "not a number", pack(good, state).replace(b'\\"factor\\":1.0', b'\\"factor\\":NaN')


def test_hostile_messages_are_rejected_and_nothing_changes(site):
    client = only_client(site)
    for name, message in hostile(client):
        assert code(site.answer(message, ""), message) == "malformed", name
    assert state_bytes(site) is None


@pytest.mark.parametrize("named", [2, 0, None, "1", True, 1.0])
def test_another_protocol_is_rejected_before_anything_else_is_read(site, caplog, named):
    """By its code, whatever else a later version may have in its messages."""
    order = vars(Request("train", RUN, only_client(site).recipe.digest)) | {
        "protocol": named,
        "kind": "later",
        "new": 1,
    }
    message = pack({key: value for key, value in order.items() if key != "protocol" or value is not None})
    assert code(site.answer(message, ""), message) == "protocol"
    (said,) = (record.getMessage() for record in caplog.records if record.name.startswith("perada"))
    assert f"uses protocol {named}, but this side uses protocol 1; install the same release" in said
    assert state_bytes(site) is None
    assert read_header(site.answer(train(site), ""))["protocol"] == 1


def test_what_the_server_sends_cannot_write_lines_into_the_sites_log(site, caplog):
    forged = "\x1b[2J\nround 1: all is well"
    client = only_client(site)
    for header in ({"kind": forged}, {"run": forged}, {"models": forged}, {"round": forged}, {"strides": forged}):
        site.answer(pack(vars(Request("train", RUN, client.recipe.digest)) | header), forged)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("perada")]
    assert len(messages) == 5 and all("all is well" in line and line.isprintable() for line in messages)


class Stopped(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_crash_leaves_the_old_state_or_the_new_one(first, tiny, tmp_path, monkeypatch):
    """Before and after each of the file operations of a commit, in a first round and in a later one."""
    parties = Parties(tiny, tmp_path, "ditto", rounds=3)
    worker = parties.worker(0)
    messages = [train(worker), train(worker, 1)]
    replies = [worker.answer(message, "") for message in messages]
    final = state_bytes(worker)
    worker.store.close()
    where = {"open": "builtins.open", "fsync": "os.fsync", "replace": "os.replace", "sync": "perada.system.files.sync"}
    real = {"open": open, "fsync": os.fsync, "replace": os.replace, "sync": sync}
    places = [("open", False), *((name, after) for name in list(where)[1:] for after in (False, True))]
    for name, after in places:
        folder = tmp_path / f"{name}{after}"
        client = only_client(worker)
        book = SiteStore(folder)
        site = type(worker)(book, worker.clients, worker.permissions.may_send)
        if not first:
            assert site.answer(messages[0], "") == replies[0]
        before = state_bytes(site)

        def stopping(*args, _real=real[name], _after=after, **kwargs):
            if _after:
                _real(*args, **kwargs)
            raise Stopped

        with monkeypatch.context() as patch:
            patch.setattr(where[name], stopping)
            with pytest.raises(Stopped):
                site.answer(messages[0 if first else 1], "")
        left = state_bytes(site)
        new = name == "sync" or (name == "replace" and after)
        assert (left != before) == new, (name, after)
        book.close()
        again = type(worker)(SiteStore(folder), {client.recipe.digest: client}, worker.permissions.may_send)
        for message, reply in zip(messages, replies, strict=True):
            if message is messages[0] and not first:
                continue
            assert again.answer(message, "") == reply
        assert without_log_position(state_bytes(again)) == without_log_position(final) != final
        again.store.close()


class Canaries(Dataset):
    """Images that hold a mark, and of which one cannot be read."""

    MARK = b"canary-image-77"
    targets = (0, 1, 2, 0)

    def __init__(self, broken):
        self.broken = broken

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if self.broken and index == 3:
            raise RuntimeError("canary: patient 4711 has no image at /data/4711.png")
        image = torch.zeros(1, 8, 8, dtype=torch.uint8)
        image.view(-1)[: len(self.MARK)] = torch.frombuffer(bytearray(self.MARK), dtype=torch.uint8)
        return image, self.targets[index]


def test_neither_images_nor_texts_of_errors_leave_a_site(tiny, tmp_path, caplog):
    parties = Parties(tiny, tmp_path, "fedavg")
    images = Canaries(False)
    parties.whole = replace(parties.whole, train=[images] * 3, test=[images] * 3, public=None)
    site = parties.worker(0)
    replies = []
    client = only_client(site)
    shared = {f"shared/{key}": value for key, value in client.recipe.template.initial.items()}
    asked = [train(site), pack(Request("evaluate", RUN, client.recipe.digest, 1), shared)]
    asked.append(pack(Request("join", RUN, client.recipe.digest)))
    replies = [site.answer(message, "") for message in asked]
    images.broken = True
    failing = train(site, 1)
    with caplog.at_level(logging.WARNING):
        replies.append(site.answer(failing, ""))
    assert code(replies[-1], failing) == "broken"
    assert "patient 4711" in caplog.text  # the site's own log says it
    for reply in replies:
        for mark in (Canaries.MARK, b"canary", b"4711", b"Traceback", str(tmp_path).encode()):
            assert mark not in reply


def test_the_server_of_a_private_run_does_not_learn_that_an_image_cannot_be_read(tiny, tmp_path, caplog):
    parties = private(tiny, tmp_path)
    images = Canaries(False)
    parties.whole = replace(parties.whole, train=[images] * 3, test=[images] * 3, public=None)
    site = parties.worker(0)
    other = parties.worker(1)
    start = only_client(site).recipe.template.initial
    images.broken = True
    for one in (site, other):  # it is in every batch: there are as many images as a batch has
        message = train(one)
        with caplog.at_level(logging.WARNING):
            reply = one.answer(message, "")
        assert code(reply, message) == "ok"
        state = one.store.load(RUN)
        for kept in state.training.client_state["personal"], unpack(reply, spec_of(start))[1]:
            assert not any(torch.equal(value.flatten(), start[key].flatten()) for key, value in kept.items())
    assert "patient 4711" in caplog.text and "it was left out of all batches" in caplog.text


def test_nothing_leaves_beside_updates_unless_the_site_says_so(tiny, tmp_path):
    site = Parties(tiny, tmp_path, "ditto").worker(0, may_send=())
    client = only_client(site)
    shared = {f"shared/{key}": value for key, value in client.recipe.template.initial.items()}
    for kind, tensors in (("join", None), ("evaluate", shared)):
        message = pack(Request(kind, RUN, client.recipe.digest), tensors)
        facts = read_header(site.answer(message, ""))["facts"]
        assert set(facts) <= {"labels"}
    assert read_header(site.answer(train(site), ""))["facts"] == {}


def private(tiny, tmp_path, **options):
    privacy = Privacy(noise_multiplier=1.0, max_norm=1.0, delta=1e-3, secure_rng=False, **options)
    return Parties(tiny, tmp_path, "ditto", rounds=4, loop={"privacy": privacy})


@pytest.mark.parametrize("section", ["privacy", "client_privacy"])
def test_a_site_rejects_a_public_set_that_holds_its_images(tiny, tmp_path, section):
    """The server has no client's images to compare with, so each site looks for its own, tested or trained on."""
    options = {"noise_multiplier": 1.0, "delta": 1e-3}
    level = Privacy(**options) if section == "privacy" else ClientPrivacy(**options)
    parties = Parties(tiny, tmp_path, "fedavg", loop={section: level})
    assert Client(parties.recipe(0), Limits()).size == 9
    for part, kind in ((parties.whole.train, "image"), (parties.whole.test, "test image")):
        copies = part[1].tensors[0][2:3]
        parties.whole.public = TensorDataset(torch.cat([255 - copies, copies]))
        Client(parties.recipe(0), Limits())  # which cannot know
        with pytest.raises(ValueError, match=rf"privacy: {kind} 2 of client 0 .*image 1 of the public set"):
            Client(parties.recipe(1), Limits())
    Client(Parties(tiny, tmp_path, "fedavg").recipe(1), Limits())  # which promises nothing


def test_a_delta_is_compared_with_the_number_of_sites(tiny, tmp_path):
    level = ClientPrivacy(noise_multiplier=1.0, delta=0.34)
    parties = Parties(tiny, tmp_path, "fedavg", loop={"client_privacy": level})
    with pytest.raises(ValueError, match=r"client_privacy: delta=0\.34 .*1 / 3,"):
        parties.coordinator(LocalTransport({}))
    two = parties.coordinator(LocalTransport({}), min_sites=2)
    labels = {"labels": "a" * 64}
    for number, admitted in ((0, True), (1, True), (2, False)):
        two.roster.admit({f"site{number}": Response("ok", "0" * 64, labels)}, {})
        assert (f"site{number}" in two.roster.numbers) == admitted
    assert "must be below 1 / 3, the number of sites with this one" in two.roster.outside["site2"]
    two.close()


def test_a_private_site_keeps_one_ledger_entry_a_round_and_stops_itself(tiny, tmp_path):
    worker = private(tiny, tmp_path).worker(0, may_send=("losses", "epsilon", "sizes"))
    sigma = 1.0
    rate = 4 / 9
    delta = 1e-3
    steps = 2 * 5  # roles; batches of 4 in two passes through 9 images
    spent = [history_epsilon({(sigma, rate): steps * rounds}, delta, "rdp") for rounds in range(1, 4)]
    replies = []
    for round in range(2):
        message = train(worker, round)
        reply = worker.answer(message, "")
        assert worker.answer(message, "") == reply
        facts = read_header(reply)["facts"]
        assert set(facts) == {"epsilon"}  # no loss
        assert facts["epsilon"]["release"] == pytest.approx(spent[round])
        replies.append(reply)
    assert worker.store.totals.ledger.history(0) == {(sigma, rate): 2 * steps}
    folder = worker.store.folder
    worker.store.close()
    limited = private(tiny, tmp_path).worker(0, max_epsilon=(spent[1] + spent[2]) / 2, delta=delta)
    assert limited.store.folder == folder
    for run in (RUN, "cd" * 16):  # nor does another run begin at zero
        client = only_client(limited)
        message = pack(Request("train", run, client.recipe.digest, 2, clients=3), sending(client))
        assert code(limited.answer(message, ""), message) == "exhausted"
    assert limited.store.totals.ledger.history(0) == {(sigma, rate): 2 * steps}


@pytest.mark.parametrize("own", [None, 1e6])
def test_the_recipes_own_limit_stops_a_site(tiny, tmp_path, own):
    """Also one that would allow more."""
    two = history_epsilon({(1.0, 4 / 9): 2 * 10}, 1e-3, "rdp")
    worker = private(tiny, tmp_path, max_epsilon=two * 1.01).worker(0, max_epsilon=own)
    messages = [train(worker, round) for round in range(3)]
    assert [code(worker.answer(message, ""), message) for message in messages] == ["ok", "ok", "exhausted"]


def test_noise_does_not_follow_from_what_the_server_knows(tiny, tmp_path):
    """The recipe asks for the test mode, whose noise follows from the seed; the site does not take it."""
    sent = []
    for name in ("a", "b"):
        worker = private(tiny, tmp_path / name).worker(0)
        message = train(worker)
        sent.append(unpack(worker.answer(message, ""), spec_of(only_client(worker).recipe.template.sent))[1])
    assert all(not torch.equal(sent[0][key], sent[1][key]) for key in sent[0] if sent[0][key].is_floating_point())


def other_run(worker, round=0):
    client = only_client(worker)
    order = Request("train", "cd" * 16, client.recipe.digest, round, clients=3)
    return pack(order, sending(client))


def test_a_server_that_begins_anew_under_another_name_gets_no_second_budget(tiny, tmp_path):
    one = history_epsilon({(1.0, 4 / 9): 10}, 1e-3, "rdp")
    parties = private(tiny, tmp_path, max_epsilon=one * 1.01)
    worker = parties.worker(0)
    asked = [train(worker), train(worker, 1), other_run(worker)]
    assert [code(worker.answer(message, ""), message) for message in asked] == ["ok", "exhausted", "exhausted"]
    assert worker.store.totals.ledger.history(0) == {(1.0, 4 / 9): 10}
    worker.store.close()
    generous = parties.worker(0, max_epsilon=history_epsilon({(1.0, 4 / 9): 40}, 1e-5, "rdp"))
    assert code(generous.answer(asked[2], ""), asked[2]) == "ok"  # the site's own word counts


def test_a_delta_that_shows_an_image_is_rejected(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"limits: delta=0\.2 .*1 / 9,"):
        private(tiny, tmp_path).worker(0, delta=0.2)


def test_without_any_limit_a_site_trains_one_whole_run_and_no_more(tiny, tmp_path):
    """Whatever the server calls its runs: here 4 rounds are planned, and 15 runs are begun."""
    worker = private(tiny, tmp_path).worker(0)
    digest = only_client(worker).recipe.digest
    codes = []
    for run in range(15):
        order = Request("train", f"{run:032x}", digest, 0, clients=3)
        message = pack(order, sending(only_client(worker)))
        codes.append(code(worker.answer(message, ""), message))
    assert codes == ["ok"] * 4 + ["exhausted"] * 11
    assert worker.store.totals.ledger.history(0) == {(1.0, 4 / 9): 4 * 10}


@pytest.mark.parametrize(("accountant", "own"), [pytest.param("prv", "rdp", marks=pytest.mark.slow), ("rdp", "prv")])
def test_a_limit_is_measured_as_the_site_says_whatever_the_recipe_says(tiny, tmp_path, accountant, own):
    privacy = Privacy(noise_multiplier=4.0, delta=0.1, accountant=accountant)
    parties = Parties(tiny, tmp_path, "ditto", rounds=6, loop={"privacy": privacy})
    worker = parties.worker(0, max_epsilon=2.3, delta=1e-4, accountant=own)
    spent = {
        (accountant, delta): [
            history_epsilon({(4.0, 4 / 9): 10 * rounds}, delta, accountant) for rounds in (1, 2, 3, 4)
        ]
        for accountant, delta in (("rdp", 1e-4), ("prv", 1e-4), ("rdp", 1e-5))
    }
    rounds = {terms: sum(epsilon <= 2.3 for epsilon in spent[terms]) for terms in spent}
    assert rounds == {("rdp", 1e-4): 2, ("prv", 1e-4): 3, ("rdp", 1e-5): 1}  # so that they are told apart
    allowed = rounds[own, 1e-4]
    asked = [train(worker, round) for round in range(allowed + 1)]
    assert [code(worker.answer(message, ""), message) for message in asked] == ["ok"] * allowed + ["exhausted"]


def test_each_run_has_ledgers_of_its_own(tiny, tmp_path):
    """What runs that take turns report; the site's own total has them all."""
    worker = private(tiny, tmp_path).worker(0, may_send=("epsilon",))
    spent = [history_epsilon({(1.0, 4 / 9): 10 * rounds}, 1e-3, "rdp") for rounds in (1, 2)]
    for message, expected in (
        (train(worker), 0),
        (train(worker, 1), 1),
        (other_run(worker), 0),
        (other_run(worker, 1), 1),
    ):
        facts = read_header(worker.answer(message, ""))["facts"]
        assert facts["epsilon"]["release"] == pytest.approx(spent[expected])
    assert worker.store.totals.ledger.history(0) == {(1.0, 4 / 9): 40}


def test_what_was_trained_without_privacy_is_in_the_ledger(tiny, tmp_path):
    """A private recipe with a limit of the site's own finds images that were shown without noise."""
    bare = Parties(tiny, tmp_path, "ditto", rounds=4).worker(0)
    message = train(bare)
    assert code(bare.answer(message, ""), message) == "ok"
    assert bare.store.totals.ledger.epsilon(0, 1e-5) == float("inf")
    bare.store.close()
    limited = private(tiny, tmp_path).worker(0, max_epsilon=1e6)
    message = other_run(limited)
    assert code(limited.answer(message, ""), message) == "exhausted"
    limited.store.close()
    free = private(tiny, tmp_path, max_epsilon=1e3).worker(0)  # its limit is of what was trained with privacy
    assert code(free.answer(message, ""), message) == "ok"


def test_a_limit_of_rounds_is_of_all_runs_together(tiny, tmp_path):
    worker = Parties(tiny, tmp_path, rounds=3).worker(0, max_rounds=2)
    asked = [train(worker), other_run(worker), train(worker, 1), other_run(worker, 1)]
    codes = ["ok", "ok", "exhausted", "exhausted"]
    assert [code(worker.answer(message, ""), message) for message in asked] == codes


def test_the_digest_covers_frozen_weights_and_text(tiny, tmp_path):
    """All 256 bits: a server that makes both recipes needs the square root of the number of digests."""

    def digest(text=b"a recipe", add=None):
        recipe = Parties(tiny, tmp_path, net=tiny.net, module={"adapter": "head"}).recipe()
        recipe.text = text
        recipe.data.setup()
        recipe.build(3, Classification())
        if add is not None:
            trained = {key for key, value in recipe.module.model.named_parameters() if value.requires_grad}
            frozen = [value for key, value in recipe.module.model.named_parameters() if key not in trained]
            frozen[add].data.view(-1)[-1] += 1e-6
        assert re.fullmatch("[0-9a-f]{64}", recipe.module.frozen_digest)
        return recipe.digest

    result = [digest(), digest(text=b"another"), digest(add=0), digest(add=-1)]
    assert len(set(result)) == 4
    assert result[0] == digest()


def test_batches_drawn_in_two_ways_are_not_in_one_ledger(tiny, tmp_path):
    """Shuffled passes count with other neighbours than Poisson samples."""
    for sampling, expected in (("poisson", "ok"), ("shuffle", "exhausted")):
        worker = private(tiny, tmp_path, sampling=sampling).worker(0, max_epsilon=1e6)
        message = other_run(worker) if sampling == "shuffle" else train(worker)
        assert code(worker.answer(message, ""), message) == expected
        worker.store.close()


def test_fine_tuning_comes_after_the_last_round_alone(tiny, tmp_path):
    worker = Parties(tiny, tmp_path, "fedavg_ft", rounds=2).worker(0)
    rounds = [train(worker), train(worker, 1)]
    initial = only_client(worker).recipe.template.initial
    early, last = (
        pack(Request("tune", RUN, only_client(worker).recipe.digest, round, 0, 3), initial) for round in (1, 2)
    )
    codes = [code(worker.answer(message, ""), message) for message in (rounds[0], early, rounds[1], last)]
    assert codes == ["ok", "other", "ok", "ok"]


def test_a_limit_of_runs(tiny, tmp_path):
    worker = Parties(tiny, tmp_path, rounds=3).worker(0, max_runs=1)
    asked = [train(worker), other_run(worker), train(worker, 1)]
    assert [code(worker.answer(message, ""), message) for message in asked] == ["ok", "exhausted", "ok"]
    assert not (worker.store.folder / "runs").exists()


def test_a_site_scores_one_state_a_round(site):
    """A server that tried many on the test images would learn their labels."""
    client = only_client(site)
    initial = client.recipe.template.initial

    def evaluation(round, shift=0.0):
        shared = {
            f"shared/{key}": value + shift if value.is_floating_point() else value for key, value in initial.items()
        }
        return pack(Request("evaluate", RUN, client.recipe.digest, round), shared)

    untrained = evaluation(1)
    assert code(site.answer(untrained, ""), untrained) == "other"
    assert state_bytes(site) is None  # nor does a server fill the disk with states to be scored
    site.answer(train(site), "")
    asked = [evaluation(1), evaluation(1), evaluation(1, 0.5), evaluation(0), evaluation(2, 0.5)]
    replies = [site.answer(message, "") for message in asked]
    codes = [code(reply, message) for reply, message in zip(replies, asked, strict=True)]
    assert codes == ["ok", "ok", "other", "past", "ok"]
    # The last one that was scored, so that a run that is stopped can be exported.
    kept = site.store.current().scoring.global_state
    assert all(kept[key].equal(value + 0.5) for key, value in initial.items() if value.is_floating_point())
    last = evaluation(3)
    assert code(site.answer(last, ""), last) == "ok"
    assert all(site.store.current().scoring.global_state[key].equal(value) for key, value in initial.items())
    assert replies[0] == replies[1]
    assert "counts" in read_header(replies[0])["facts"]


def test_a_disk_that_is_full_changes_nothing(site, monkeypatch):
    messages = [train(site), train(site, 1)]
    site.answer(messages[0], "")
    before = state_bytes(site)

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):  # not even "failed" leaves without a line in the log
                site.answer(messages[1], "")
            assert LocalTransport({"a": site}).exchange({"a": messages[1]}, 1, 9.0) == {"a": Failure("disk")}
    assert state_bytes(site) == before
    names = sorted(path.name for path in site.store.folder.iterdir())
    assert names == ["audit.head", "audit.jsonl", "lock", "state.safetensors"]
    assert code(site.answer(messages[1], ""), messages[1]) == "ok"


def test_a_disk_that_fails_after_the_renaming_mixes_up_no_runs(site, monkeypatch):
    first = train(site)
    other = other_run(site)
    reply = site.answer(first, "")
    with monkeypatch.context() as patch:
        patch.setattr("perada.system.files.sync", fails_at(2))
        with pytest.raises(DiskError, match="Input/output error"):
            site.answer(other, "")
    again = other_run(site, 1)
    assert code(site.answer(again, ""), again) == "ok"
    assert site.answer(first, "") == reply


def fails_at(number):
    """Fails at the n-th call."""
    calls = []

    def called(folder):
        calls.append(folder)
        if len(calls) == number:
            raise OSError(5, "Input/output error")

    return called


def test_the_account_of_another_run_is_not_taken_for_that_of_a_run(site):
    site.answer(train(site), "")
    first = site.store.current().run
    site.answer(other_run(site), "")
    former = site.store.folder / "runs" / f"{first}.safetensors"
    former.write_bytes((site.store.folder / "state.safetensors").read_bytes())
    with pytest.raises(ValueError, match=rf"{first}\.safetensors'.*{'cd' * 16}"):
        site.store.load(first)


def test_a_ledger_that_was_taken_away_is_missed(site):
    for message in (train(site), other_run(site)):
        site.answer(message, "")
    site.store.close()
    (site.store.folder / "state.safetensors").unlink()
    for _ in range(2):  # and the folder is free again
        with pytest.raises(ValueError, match=r"lost its state\.safetensors"):
            SiteStore(site.store.folder)
    (site.store.folder / "lock").unlink()
    with pytest.raises(ValueError, match=r"lost its state\.safetensors"):
        SiteStore(site.store.folder)


def test_a_state_folder_that_others_can_write_to_is_rejected(tmp_path):
    tmp_path.chmod(0o702)
    with pytest.raises(OSError, match="chmod 700"):
        SiteStore(tmp_path)


def test_what_a_crash_left_of_a_file_is_not_written_into(site, tmp_path):
    """It may be another's: a link of theirs would show them the personal adapter."""
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"")
    theirs.chmod(0o666)
    os.link(theirs, site.store.folder / ".state.safetensors.partial")
    message = train(site)
    assert code(site.answer(message, ""), message) == "ok"
    assert theirs.read_bytes() == b""
    assert stat.S_IMODE((site.store.folder / "state.safetensors").stat().st_mode) == 0o600


@pytest.mark.parametrize("client_privacy", [None, ClientPrivacy(noise_multiplier=1.0, delta=1e-2, max_norm=0.1)])
def test_a_limit_rejects_recipes_without_privacy_before_anything_leaves(client_privacy, tiny, tmp_path):
    """Noise for sites as a whole, added by the server, does not protect single images from it."""
    with pytest.raises(ValueError, match=r"max_epsilon=1 .*without privacy"):
        Parties(tiny, tmp_path, loop={"client_privacy": client_privacy}).worker(0, max_epsilon=1)
    assert not (tmp_path / "site0" / "audit.jsonl").exists()


def test_a_folder_has_one_worker(site):
    with pytest.raises(OSError, match="in use"):
        SiteStore(site.store.folder)


def test_a_damaged_state_is_named(site):
    site.answer(train(site), "")
    path = site.store.folder / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is damaged"):
        read_state(path)
    message = train(site, 1)
    assert code(site.answer(message, ""), message) == "failed"


def test_runs_that_take_turns_keep_their_states(site):
    """A second run begins with a personal state of its own; the first goes on with its own."""
    client = only_client(site)
    first = train(site)
    reply = site.answer(first, "")
    other = pack(Request("train", "cd" * 16, client.recipe.digest, clients=3), sending(client))
    assert code(site.answer(other, ""), other) == "ok"
    assert site.answer(first, "") == reply


def test_a_worker_answers_one_message_at_a_time(site):
    message = train(site)
    with site._answering, ThreadPoolExecutor(2) as pool:
        replies = [pool.submit(site.answer, message, "") for _ in range(2)]
        time.sleep(0.3)
        assert not any(reply.done() for reply in replies)
        site._answering.release()
        first, second = (reply.result() for reply in replies)
        site._answering.acquire()
    assert first == second and code(first, message) == "ok"
    assert site.store.totals.rounds == 1


def test_one_client_of_many_is_served_as_in_a_simulation(tiny):
    data = tiny.data(sizes=(9, 5))
    own = single_client_data(data, 1)
    assert len(own.train) == 1 and isinstance(own.train[0], TensorDataset)
    assert own.train[0] is data.train[1] and own.public is None


def test_a_message_is_what_it_was(site):
    state = {"a": torch.randn(2, 3).bfloat16(), "b": torch.tensor(7), "c": torch.zeros(0, 2)}
    header, result = unpack(pack({"x": [1, "y"]}, state), spec_of(state))
    assert header == {"x": [1, "y"]}
    assert result.keys() == state.keys()
    assert all(torch.equal(result[key], state[key]) and result[key].dtype == state[key].dtype for key in state)
    with pytest.raises(RejectionError, match="tensor 'a'"):
        unpack(pack({}, state), spec_of(state | {"a": torch.zeros(2, 3)}))
    assert LocalTransport({"one": site}).names() == ["one"]
