# SPDX-License-Identifier: Apache-2.0
"""Messages over Flower's Grid, on a grid made of dictionaries; real processes are in `test_flower_sites.py`."""

import logging
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'perada[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from perada.deploy.flower import app
from perada.deploy.flower.app import FlowerTransport, client_app, pack_payload, unpack_payload
from perada.deploy.transport import FAILURE_CODES, Failure


@pytest.fixture(autouse=True)
def _a_task_of_flowers(monkeypatch):
    """Messages say which process made them."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Grid:
    """Takes messages, and has for each site a list of what it does with the next ones: a reply, or None for silence."""

    def __init__(self, does, nodes=None):
        self.does = does
        self.node_ids = {site: 100 + number for number, site in enumerate(does)}
        self.nodes = nodes or [node(site, 100 + number) for number, site in enumerate(does)]
        self.sent = []
        self.replies = {}

    def get_nodes(self):
        return self.nodes

    def push_messages(self, messages):
        for message in messages:
            site = next(site for site, number in self.node_ids.items() if number == message.metadata.dst_node_id)
            number = f"message {len(self.sent)}"
            self.sent.append((site, unpack_payload(message.content, 100), message.metadata.ttl))
            self.replies[number] = (site, self.does[site].pop(0))
            yield number

    def pull_messages(self, ids):
        for number in ids:
            site, reply = self.replies.get(number, (None, None))
            if reply is not None:
                del self.replies[number]
                yield answer(number, reply, self.node_ids[site])


def node(name, number, key=b"key"):
    return SimpleNamespace(name=name, node_id=number, public_key=key, last_activated_at="noon")


def answer(number, reply, source):
    metadata = Metadata(1, "", source, 1, number, "", time.time(), 10.0, "train")
    if isinstance(reply, Error):
        return make_message(metadata=metadata, error=reply)
    return make_message(metadata=metadata, content=reply if isinstance(reply, RecordDict) else pack_payload(reply))


def carried(grid):
    return FlowerTransport(grid, poll_interval=0.01, max_bytes=100)


def test_each_site_gets_its_message_and_the_replies_come_by_name():
    grid = Grid({"a": [b"A"], "b": [b"B"]})
    assert carried(grid).exchange({"b": b"to b", "a": b"to a"}, 2, 5) == {"b": b"B", "a": b"A"}
    assert [(site, message) for site, message, _ in grid.sent] == [("b", b"to b"), ("a", b"to a")]


def test_it_returns_with_enough_replies_and_the_rest_is_late():
    grid = Grid({"a": [b"A"], "b": [None], "c": [b"C"]})
    began = time.monotonic()
    results = carried(grid).exchange(dict.fromkeys("abc", b"m"), 2, 60)
    assert results == {"a": b"A", "b": Failure("late"), "c": b"C"}
    assert time.monotonic() - began < 5


def test_it_returns_at_the_deadline_and_messages_expire_with_it():
    grid = Grid({"a": [None]})
    began = time.monotonic()
    assert carried(grid).exchange({"a": b"m"}, 1, 0.3) == {"a": Failure("late")}
    assert 0.3 <= time.monotonic() - began < 1
    assert 0 < grid.sent[0][2] <= 0.3


def test_replies_to_messages_of_before_do_not_put_the_deadline_off():
    """Each of them was waited for as long as the first."""
    grid = Grid({"a": [None], **{name: [None] for name in "bcdef"}})
    deployment = carried(grid)
    deployment.exchange(dict.fromkeys("bcdef", b"before"), 1, 0.01)
    deployment._pending = [replace(sent, expires=sent.expires + 60) for sent in deployment._pending]
    stop = threading.Event()

    def disturb():
        for sent in list(deployment._pending):
            stop.wait(0.05)
            sent.reply = b"of before"
            deployment._arrived.set()

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    begin = time.monotonic()
    assert deployment.exchange({"a": b"m"}, 1, 0.3) == {"a": Failure("late")}
    took = time.monotonic() - begin
    stop.set()
    thread.join()
    assert 0.25 < took < 2


def test_what_a_killed_supernode_took_with_it_is_sent_again(monkeypatch):
    monkeypatch.setattr(app, "NODE_CHECK_INTERVAL", 0.05)
    grid = Grid({"a": [None, b"A"], "b": [b"B"]})
    threading.Timer(0.3, lambda: setattr(grid.nodes[0], "last_activated_at", "one o'clock")).start()
    assert carried(grid).exchange(dict.fromkeys("ab", b"m"), 2, 60) == {"a": b"A", "b": b"B"}
    assert [site for site, _, _ in grid.sent] == ["a", "b", "a"]


def test_a_supernode_that_is_away_keeps_its_message(monkeypatch):
    monkeypatch.setattr(app, "NODE_CHECK_INTERVAL", 0.05)
    grid = Grid({"a": [None], "b": [b"B"]})
    threading.Timer(0.2, lambda: grid.nodes.pop(0)).start()
    assert carried(grid).exchange(dict.fromkeys("ab", b"m"), 2, 0.8) == {"a": Failure("late"), "b": b"B"}
    assert [site for site, _, _ in grid.sent] == ["a", "b"]


def test_flowers_codes_are_ours_and_its_texts_are_not_read(caplog):
    caplog.set_level(logging.DEBUG)
    for name, ours in {
        "LOAD_CLIENT_APP_EXCEPTION": "crashed",
        "CLIENT_APP_RAISED_EXCEPTION": "crashed",
        "MESSAGE_UNAVAILABLE": "unreachable",
        "REPLY_MESSAGE_UNAVAILABLE": "late",
        "NODE_UNAVAILABLE": "unreachable",
        "MOD_FAILED_PRECONDITION": "rejected",
        "INVALID_FAB": "rejected",
        "CLIENT_APP_CRASHED": "crashed",
        "UNKNOWN": "crashed",
    }.items():
        grid = Grid({"a": [Error(getattr(ErrorCode, name), "patient 4711 has no image")]})
        grid.node_ids["a"] = 100
        assert carried(grid).exchange({"a": b"m"}, 1, 5) == {"a": Failure(ours)}, name
    assert "4711" not in caplog.text


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"payload": ConfigRecord({"payload": b"x"})}),
        RecordDict({"payload": ArrayRecord({"another": Array("uint8", (2,), "perada.bytes", b"\0x")})}),
        *(
            RecordDict({"payload": ArrayRecord({"payload": Array("uint8", (len(data),), kind, data)})})
            for kind, data in (("perada.bytes", b""), ("perada.bytes", b"\x63"), ("numpy.ndarray", b"\0x"))
        ),
        pack_payload(b"x" * 101),
    ],
)
def test_what_is_no_reply_is_malformed(content):
    assert carried(Grid({"a": [content]})).exchange({"a": b"m"}, 1, 5) == {"a": Failure("malformed")}


def test_bytes_and_codes_come_through_a_message():
    for payload in (b"", b"x" * 100, *map(Failure, FAILURE_CODES)):
        assert unpack_payload(pack_payload(payload), 100) == payload


def test_a_reply_of_another_node_is_malformed():
    grid = Grid({"a": [b"A"], "b": []})
    grid.push_messages = lambda messages: [grid.replies.setdefault("message 0", ("b", b"B")) and "message 0"]
    assert carried(grid).exchange({"a": b"m"}, 1, 5) == {"a": Failure("malformed")}


def test_names_are_those_of_registered_keys_and_each_is_one_sites(caplog):
    nodes = [node("b", 1), node("a", 2), node("", 3), node("c", 4, b""), node("twice", 5), node("twice", 6)]
    grid = Grid({"a": [], "b": [], "twice": []}, nodes)
    carrier = carried(grid)
    assert carrier.names() == carrier.names() == ["a", "b"]
    unnamed, keyless, twice = [record.getMessage() for record in caplog.records]  # each said once
    assert unnamed.startswith("SuperNode 3 is ignored because it has no name; register its key again")
    assert keyless.startswith("SuperNode 4 is ignored because it has no key; start it with --auth")
    assert twice.startswith("'twice' is registered for 2 keys and is ignored")
    assert carrier.exchange({"twice": b"m", "gone": b"m"}, 2, 5) == dict.fromkeys(
        ["twice", "gone"], Failure("unreachable")
    )
    assert grid.sent == []


def test_a_site_at_work_gets_the_next_message_when_it_is_done(monkeypatch):
    grid = Grid({"a": [None, b"second"], "b": [b"B", b"B"]})
    carrier = carried(grid)
    assert carrier.exchange({"a": b"round 0", "b": b"round 0"}, 1, 60)["a"] == Failure("late")
    assert carrier.exchange({"a": b"round 1", "b": b"round 1"}, 2, 0.2) == {"a": Failure("late"), "b": b"B"}
    assert [message for site, message, _ in grid.sent if site == "a"] == [b"round 0"]  # nothing is queued behind it
    grid.replies["message 0"] = ("a", b"stale")
    assert carrier.exchange({"a": b"round 2"}, 1, 5) == {"a": b"second"}
    assert [message for site, message, _ in grid.sent if site == "a"] == [b"round 0", b"round 2"]


def test_a_site_at_work_on_the_same_message_is_waited_for():
    grid = Grid({"a": [None], "b": [b"B", b"B"]})
    carrier = carried(grid)
    carrier.exchange({"a": b"round 0", "b": b"round 0"}, 1, 60)
    grid.replies["message 0"] = ("a", b"A")
    assert carrier.exchange({"a": b"round 0", "b": b"round 0"}, 2, 5) == {"a": b"A", "b": b"B"}
    assert [site for site, _, _ in grid.sent] == ["a", "b", "b"]


def test_a_site_whose_message_expired_is_asked_again():
    grid = Grid({"a": [None, b"A"]})
    carrier = carried(grid)
    assert carrier.exchange({"a": b"round 0"}, 1, 0.1) == {"a": Failure("late")}
    assert carrier.exchange({"a": b"round 1"}, 1, 5) == {"a": b"A"}


def test_a_reply_that_does_not_come_whole_keeps_nobody_waiting():
    """As when a site's process ends while it hands its reply on."""
    grid = Grid({"a": [b"A"], "b": [b"B"]})
    never = threading.Event()
    pull = grid.pull_messages

    def hangs(ids):
        if ids == ["message 0"]:
            never.wait(60)
        yield from pull(ids)

    grid.pull_messages = hangs
    try:
        assert carried(grid).exchange({"a": b"m", "b": b"m"}, 2, 0.5) == {"a": Failure("late"), "b": b"B"}
    finally:
        never.set()


def test_a_superlink_that_fails_is_unreachable():
    def fails(ids):
        raise OSError("connection refused")

    grid = Grid({"a": [b"A"]})
    grid.pull_messages = fails
    assert carried(grid).exchange({"a": b"m"}, 1, 5) == {"a": Failure("unreachable")}


def test_what_the_superlink_does_not_take_is_unreachable():
    for taken in ([], [None]):
        grid = Grid({"a": []})
        grid.push_messages = lambda messages, taken=taken: taken
        assert carried(grid).exchange({"a": b"m"}, 1, 5) == {"a": Failure("unreachable")}


def question(payload, ttl=5.0):
    message = make_message(metadata=Metadata(1, "", 1, 2, "", "", time.time(), ttl, "train"), content=payload)
    message.metadata.__dict__["_message_id"] = "m"
    return message


def ask_site(message, **config):
    context = Context(run_id=7, node_id=2, node_config=config, state=RecordDict(), run_config={})
    reply = client_app()(message, context)
    assert not reply.has_error()
    return unpack_payload(reply.content, 100)


def test_the_client_app_passes_on_what_it_gets(monkeypatch):
    seen = []
    monkeypatch.setattr("perada.deploy.flower.app.ask_worker", lambda *arguments: seen.append(arguments) or b"answer")
    assert ask_site(question(pack_payload(b"message")), socket="/run/site.sock") == b"answer"
    (path, message, run, deadline, _) = seen[0]
    assert (path, message, run) == ("/run/site.sock", b"message", "7")
    assert 4 < deadline <= 5


def test_whatever_fails_in_the_client_app_leaves_as_a_code(monkeypatch):
    assert ask_site(question(pack_payload(b"m"))) == Failure("unreachable")
    assert ask_site(question(pack_payload(b"m")), socket=3) == Failure("unreachable")
    assert ask_site(question(RecordDict()), socket="/nowhere/site.sock") == Failure("malformed")
    assert ask_site(question(pack_payload(b"m")), socket="/nowhere/site.sock") == Failure("unreachable")

    def fails(*arguments):
        raise RuntimeError("patient 4711 has no image")

    monkeypatch.setattr("perada.deploy.flower.app.ask_worker", fails)
    assert ask_site(question(pack_payload(b"m")), socket="/run/site.sock") == Failure("crashed")


def test_the_client_app_starts_without_torch():
    code = "import sys; import perada.deploy.flower.app as one; one.client_app(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
