# SPDX-License-Identifier: Apache-2.0
"""Sites that lie in well-formed answers, and what comes of it for the server and the others."""

import json
import random

import pytest
import torch
from safetensors.torch import load

from perada.algorithms import FedEnsemble
from perada.algorithms.ensembles import MODE
from perada.deploy.protocol import Response, digest_of_message, pack, read_header, spec_of
from perada.deploy.server.progress import RoundRecord
from perada.deploy.server.rounds import ask_sites
from perada.deploy.transport import Failure
from perada.federation.cohort import Cohort

from .parties import Parties
from .test_rounds import Troubled, equal, state


class Lying(Troubled):
    """``lie(name, kind, reply, message)`` gives what arrives in the place of a reply."""

    def __init__(self, workers, lie):
        super().__init__(workers)
        self.lie = lie

    def exchange(self, messages, enough, deadline):
        result = super().exchange(messages, enough, deadline)
        for name, reply in result.items():
            if not isinstance(reply, Failure):
                result[name] = self.lie(name, read_header(messages[name])["kind"], reply, messages[name])
        return result


def with_facts(reply, **facts):
    header = read_header(reply)
    return pack(header | {"facts": header["facts"] | facts}, load(reply))


def lie_of(name, kind, **facts):
    """A lie of one site in its answers of one kind."""
    return lambda who, what, reply, _: with_facts(reply, **facts) if (who, what) == (name, kind) else reply


def broken(*names):
    """Sites that say at once that their training broke."""

    def answer(who, what, reply, message):
        if who in names and what == "train":
            return pack(Response("broken", digest_of_message(message)))
        return reply

    return answer


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "facts", [{"losses": {"local": None}}, {"losses": {"local": 1e400}}, {"counts": {"x": [1, 1]}}]
)
def test_a_fact_that_cannot_be_is_malformed_and_the_run_goes_on(facts, tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=1)
    text = json.dumps(facts)  # Infinity and null travel as words

    def lie(who, what, reply, _):
        if (who, what) != ("site1", "train"):
            return reply
        mark = b'\\"facts\\":{}'
        quiet = pack(read_header(reply) | {"facts": {}}, load(reply))
        assert mark in quiet
        changed = quiet.replace(mark, b'\\"facts\\":' + text.replace('"', '\\"').encode())
        size = int.from_bytes(quiet[:8], "little") + len(changed) - len(quiet)
        return size.to_bytes(8, "little") + changed[8:]

    progress = parties.coordinator(Lying(parties.workers(), lie), min_sites=2).run()
    assert progress.records[0].failed == {"site1": "malformed"}


def test_scores_on_no_images_are_malformed(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=1)

    def lie(who, what, reply, _):
        return with_facts(reply, counts={"global": [0, 0]}) if what == "evaluate" else reply

    progress = parties.coordinator(Lying(parties.workers(), lie)).run()
    assert progress.done == 1
    assert "global/global_test" not in progress.history[0]


@pytest.mark.every(2)
@pytest.mark.parametrize("size", [0, 10**12])
def test_who_says_a_size_that_cannot_be_is_not_let_in(size, tiny, tmp_path, caplog):
    parties = Parties(tiny, tmp_path, rounds=1)
    coordinator = parties.coordinator(Lying(parties.workers(), lie_of("site1", "join", size=size)), min_sites=2)
    assert coordinator.run().records[0].answered == ["site0", "site2"]
    assert f"site site1 cannot join: it reports an impossible number of images, {size}" in caplog.text


@pytest.mark.slow
def test_a_site_that_says_many_images_costs_the_others_no_step(tiny, tmp_path, monkeypatch):
    """They train the same bits in the same steps: only random transforms and dropout know how many others take."""
    honest = Parties(tiny, tmp_path / "honest", rounds=1).deployed()[0]
    parties = Parties(tiny, tmp_path / "lying", rounds=1)
    coordinator = parties.coordinator(Lying(parties.workers(), lie_of("site1", "join", size=10**5)))
    steps = []
    real = Cohort.step
    monkeypatch.setattr(Cohort, "step", lambda self, batch: steps.append(batch) or real(self, batch))
    coordinator.run()
    assert coordinator.progress.records[0].answered == parties.names
    assert len(steps) == 5 + 3 + 7  # two passes through 9, 5 and 14 images, by 4
    assert equal(state(coordinator), state(honest))


def test_who_breaks_at_once_does_not_take_the_place_of_an_answer(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=1)
    first = (
        parties.coordinator(Troubled(parties.workers()), min_sites=2, sample=3, late="skip")
        .run()
        .records[0]
        .selected[0]
    )
    parties.folder = tmp_path / "again"
    coordinator = parties.coordinator(Lying(parties.workers(), broken(first)), min_sites=2, sample=3, late="skip")
    (record,) = coordinator.run().records
    assert record.failed == {first: "broken"}
    assert {first, *record.answered} == set(parties.names)


def test_a_round_in_which_all_break_is_void(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=1)
    coordinator = parties.coordinator(Lying(parties.workers(), broken(*parties.names)), late="skip")
    before = state(coordinator)
    (record,) = coordinator.run().records
    assert record.void == "all broke"
    assert equal(state(coordinator), before)


def test_more_sites_than_the_recipe_asks_are_rejected_at_once(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, loop={"clients_per_round": 2})
    with pytest.raises(ValueError, match=r"min_sites=3.* 2 sites"):
        parties.coordinator(Troubled({}), min_sites=3)
    assert parties.coordinator(Troubled({}), min_sites=3, sample=3).terms.sample == 3


def test_what_a_site_says_cannot_write_lines_into_the_servers_log(tiny, tmp_path, caplog):
    parties = Parties(tiny, tmp_path, rounds=1)
    forged = "\x1b[2J\nround 1: all is well"

    def lie(who, what, reply, _):
        return pack(read_header(reply) | {"code": forged}) if who == "site1" else reply

    parties.coordinator(Lying(parties.workers(), lie), min_sites=2).run()
    messages = [record.getMessage() for record in caplog.records if "all is well" in record.getMessage()]
    assert messages and all(line.isprintable() for line in messages)


def test_no_change_of_a_reply_stops_the_server(tiny, tmp_path):
    """Words of the header are replaced, numbers, places and bytes; each reply is taken, or its sender is named."""
    parties = Parties(tiny, tmp_path, rounds=1)
    worker = parties.worker(0)
    seen = []
    transport = Lying({"site0": worker}, lambda who, what, reply, message: seen.append((what, message, reply)) or reply)
    coordinator = parties.coordinator(transport, min_sites=1)
    coordinator.run()
    drawn = random.Random(0)
    codes = set()
    words = [b"null", b"true", b"-1", b"1e999", b"[]", b"{}", b'\\"\\"', b"9" * 5000, b"[" * 3000, b"\\ud800", b"\xff"]
    for _ in range(300):
        what, message, reply = drawn.choice(seen)
        changed = bytearray(reply)
        size = int.from_bytes(reply[:8], "little")
        for _ in range(drawn.randint(1, 3)):
            place = drawn.randrange(8, 8 + size)
            if drawn.random() < 0.5:
                changed[place : place + drawn.randint(0, 9)] = drawn.choice(words)
                changed[:8] = (size + len(changed) - len(reply)).to_bytes(8, "little")
            else:
                changed[drawn.randrange(len(changed))] = drawn.randrange(256)
        expected = spec_of(coordinator.recipe.template.sent) if what == "train" else {}
        transport.lie = lambda *_, changed=bytes(changed): changed
        transport.trouble = lambda *_, reply=reply: reply  # the worker is not asked
        replies = ask_sites(transport, {"site0": message}, 1, 60.0, {"site0": expected}, RoundRecord(0))
        assert len(replies.responses) + len(replies.failed) == 1
        codes |= set(replies.failed.values())
    assert "malformed" in codes


@pytest.mark.every(3)
@pytest.mark.parametrize("number", [1, 2, 99, 2**40, -1, -99])
def test_a_mode_that_the_run_does_not_have_is_malformed_and_the_run_goes_on(number, tiny, tmp_path):
    """It would be an index into the models of the ensemble."""
    parties = Parties(tiny, tmp_path, FedEnsemble(modes=2), rounds=2)

    def lie(who, what, reply, _):
        if (who, what) != ("site1", "train"):
            return reply
        sent = load(reply)
        sent[MODE] = torch.full_like(sent[MODE], number)
        return pack(read_header(reply), sent)

    progress = parties.coordinator(Lying(parties.workers(), lie), min_sites=2).run()
    assert progress.done == 2
    failed = {} if number == 1 else {"site1": "malformed"}  # 1 is a mode of this run
    assert [record.failed for record in progress.records] == [failed] * 2
