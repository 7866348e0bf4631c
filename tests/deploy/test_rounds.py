# SPDX-License-Identifier: Apache-2.0
"""Rounds of a server whose sites are late, gone, hostile or new, and a server that was stopped."""

import csv
import math
import shutil

import pytest
import torch

from perada.deploy import state as kept
from perada.deploy.protocol import Response, digest_of_message, pack, read_header, spec_of, unpack
from perada.deploy.server import progress as records
from perada.deploy.site.file import Limits
from perada.deploy.transport import Failure, LocalTransport, Terms
from perada.privacy import ClientPrivacy
from perada.server.rules import Median

from .parties import Parties
from .test_sites import only_client


class Troubled(LocalTransport):
    """Sites in this process, of which some fail; ``trouble(name, message, number of the exchange)`` says how."""

    def __init__(self, workers, trouble=lambda *_: None):
        super().__init__(workers)
        self.trouble = trouble
        self.exchanges = 0
        self.asked = []

    def exchange(self, messages, enough, deadline):
        self.exchanges += 1
        if "train" in {read_header(message)["kind"] for message in messages.values()}:
            self.asked.append(list(messages))
        failing = {name: self.trouble(name, message, self.exchanges) for name, message in messages.items()}
        failing = {name: what for name, what in failing.items() if what is not None}
        rest = {name: message for name, message in messages.items() if name not in failing}
        return super().exchange(rest, enough, deadline) | failing


def trains(message, round=None):
    header = read_header(message)
    return header["kind"] == "train" and round in (None, header["round"])


def state(coordinator):
    return {key: value.clone() for key, value in coordinator.server.global_state.items()}


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_with_too_few_sites_a_round_ends_by_the_deadline_and_names_who_is_missing(tiny, tmp_path):
    parties = Parties(tiny, tmp_path)
    workers = parties.workers()
    gone = {"site1": Failure("unreachable"), "site2": Failure("late")}
    transport = Troubled(workers, lambda name, message, _: gone.get(name) if trains(message) else None)
    coordinator = parties.coordinator(transport, min_sites=2, deadline=2.0)
    with pytest.raises(
        TimeoutError,
        match=r"1 of at least 2 sites .* 2 s .*site1 \(unreachable\), site2",
    ):
        coordinator.run()
    assert coordinator.progress.done == 0
    coordinator.close()
    again = parties.coordinator(LocalTransport(workers), resume=True)
    again.run()
    for worker in workers.values():
        worker.store.close()
    plain = Parties(tiny, tmp_path / "plain").deployed()[0]
    assert equal(state(again), state(plain))


def test_a_straggler_is_skipped_for_a_round_and_comes_back(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=3, every=3)

    def delay_reply(name, message, _):
        return Failure("late") if name == "site2" and trains(message, 0) else None

    transport = Troubled(parties.workers(), delay_reply)
    coordinator = parties.coordinator(transport, min_sites=2, late="skip", sample=3)
    progress = coordinator.run()
    assert progress.records[0].failed == {"site2": "late"}
    assert "site2" not in progress.records[1].selected
    assert "site2" in progress.records[2].selected


def test_the_first_k_count(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=1)
    coordinator = parties.coordinator(LocalTransport(parties.workers()), min_sites=2, late="skip", sample=3)
    record = coordinator.run().records[0]
    assert (len(record.selected), len(record.answered)) == (3, 2)


FORGED = {  # of the header of an answer, zeros in the shapes that are expected, and the name of one of them
    "NaN": lambda header, good, name: pack(header, good | {name: good[name] * math.nan}),
    "header": lambda header, good, name: (2**32).to_bytes(8, "little") + b" " * 99,
    "large": lambda header, good, name: pack(header, good | {name: good[name] + 1e8}),
    "shape": lambda header, good, name: pack(header, good | {name: good[name][:1]}),
    "more": lambda header, good, name: pack(header, good | {"x": torch.zeros(1)}),
    "pickle": lambda header, good, name: b"\x80\x04N.",
    "another message": lambda header, good, name: pack(header | {"answers": "0" * 64}, good),
    "a fact": lambda header, good, name: pack(header | {"facts": {"path": "/data"}}, good),
    "a loss": lambda header, good, name: pack(header | {"facts": {"losses": {"local": "high"}}}, good),
    "a code": lambda header, good, name: pack(header | {"code": "patient 4711"}),
}
SLOW = [pytest.param(what, marks=pytest.mark.slow) for what in list(FORGED)[2:]]


@pytest.mark.parametrize("what", [*list(FORGED)[:2], *SLOW])
def test_what_a_hostile_site_sends_is_rejected_by_name_and_changes_nothing(what, tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=1)
    workers = parties.workers()

    def forged(name, message, _):
        if name != "site2" or not trains(message):
            return None
        spec = spec_of(coordinator.recipe.template.sent)
        good = {key: torch.zeros(shape) for key, (_, shape) in spec.items()}
        return FORGED[what](vars(Response("ok", digest_of_message(message))), good, next(iter(spec)))

    coordinator = parties.coordinator(Troubled(workers, forged), min_sites=2)
    assert coordinator.run().records[0].failed == {"site2": "malformed"}
    parties.folder = tmp_path / "honest"
    honest = parties.coordinator(Troubled({name: workers[name] for name in ("site0", "site1")}), min_sites=2)
    honest.run()
    assert equal(state(coordinator), state(honest))


def test_a_site_of_another_protocol_is_named_with_both_versions(tiny, tmp_path, caplog):
    """Whatever it answers, with whatever tensors."""
    parties = Parties(tiny, tmp_path, rounds=1)

    def later(name, message, _):
        header = vars(Response("ok", digest_of_message(message))) | {"protocol": 2, "code": "later"}
        return pack(header, {"later": torch.zeros(3)}) if name == "site2" and trains(message) else None

    record = parties.coordinator(Troubled(parties.workers(), later), min_sites=2).run().records[0]
    assert record.failed == {"site2": "protocol"}
    said = "site site2: protocol: the message uses protocol 2, but this side uses protocol 1; install the same"
    assert [line for line in caplog.messages if line.startswith(said)]


@pytest.mark.slow
def test_a_server_that_was_stopped_goes_on_to_the_same_bits(tiny, tmp_path, monkeypatch):
    """Stopped after sites have answered a round and before it is saved: they answer it again without training."""
    plain = Parties(tiny, tmp_path / "plain", "perada", rounds=3, every=3).deployed()[0]
    parties = Parties(tiny, tmp_path / "stopped", "perada", rounds=3, every=3)
    workers = parties.workers()
    first = parties.coordinator(LocalTransport(workers))

    real = kept.write_atomic
    calls = []

    def stopping(path, content, **options):
        calls.append(path.name)
        if calls.count(records.SERVER_STATE) == 4:  # each round is saved when it begins and when it ends
            raise Stopped
        real(path, content, **options)

    with monkeypatch.context() as patch:
        patch.setattr(kept, "write_atomic", stopping)
        with pytest.raises(Stopped):
            first.run()
    first.close()
    trained = {name: worker.store.current().training.num_rounds for name, worker in workers.items()}
    assert set(trained.values()) == {2}
    again = parties.coordinator(LocalTransport(workers), resume=True)
    assert again.progress.done == 1
    again.run()
    assert {worker.store.current().training.num_rounds for worker in workers.values()} == {3}
    assert equal(state(again), state(plain))
    keys = ("round", "train/local_loss", "personal/local_test")
    ours = again.progress.history
    theirs = plain.progress.history
    assert [[row.get(key) for key in keys] for row in ours] == [[row.get(key) for key in keys] for row in theirs]


class Stopped(BaseException):
    """The process ends here."""


def without_times(rows):
    """What `metrics.csv` holds, but for times."""
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(tiny, tmp_path_factory):
    """Two rounds of Ditto: the server's state, and its rows without times."""
    folder = tmp_path_factory.mktemp("plain")
    deployment = Parties(tiny, folder, "ditto")
    coordinator, workers = deployment.deployed()
    for worker in workers.values():
        worker.store.close()
    with (folder / "server" / "metrics.csv").open() as file:
        return state(coordinator), without_times(csv.DictReader(file))


PLACES = [(number, after) for number in range(1, 12) for after in (False, True)]


@pytest.mark.parametrize(
    "place", [one if one == (11, False) else pytest.param(one, marks=pytest.mark.slow) for one in PLACES]
)
def test_a_server_that_was_killed_at_any_file_goes_on_to_the_same_bits(
    place, uninterrupted, tiny, tmp_path, monkeypatch
):
    parties = Parties(tiny, tmp_path, "ditto")
    workers = parties.workers()
    real = kept.write_atomic
    calls = []

    def stopping(path, content, **options):
        calls.append(path)
        if len(calls) == place[0]:
            if place[1]:
                real(path, content, **options)
            raise Stopped
        real(path, content, **options)

    killed = parties.coordinator(LocalTransport(workers))
    with monkeypatch.context() as patch:
        for module in (kept, records):
            patch.setattr(module, "write_atomic", stopping)
        with pytest.raises(Stopped):
            killed.run()
    killed.close()
    again = parties.coordinator(LocalTransport(workers), resume=(tmp_path / "server" / records.SERVER_STATE).exists())
    again.run()
    assert equal(state(again), uninterrupted[0])
    assert {worker.store.totals.rounds for worker in workers.values()} == {2}
    with (tmp_path / "server" / records.METRICS).open() as file:
        assert without_times(csv.DictReader(file)) == uninterrupted[1]


@pytest.mark.slow
def test_a_server_from_an_older_copy_says_who_is_ahead(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, "ditto", rounds=3, every=3)
    workers = parties.workers()
    first = parties.coordinator(LocalTransport(workers))
    first._run_round()
    shutil.copytree(tmp_path / "server", tmp_path / "copy")
    first._run_round()
    first._run_round()
    first.close()
    shutil.rmtree(tmp_path / "server")
    shutil.move(tmp_path / "copy", tmp_path / "server")
    again = parties.coordinator(LocalTransport(workers), resume=True, deadline=1.0)
    with pytest.raises(TimeoutError, match=r"missing: site\d \(past\), site\d \(past\), site\d \(past\)"):
        again.run()
    assert {worker.store.totals.rounds for worker in workers.values()} == {3}


@pytest.mark.slow
def test_a_site_from_an_older_copy_takes_part_again(tiny, tmp_path):
    """From one of its whole folder: of a single older file is known that it is older, and it is rejected."""
    parties = Parties(tiny, tmp_path, "ditto", rounds=3, every=3)
    workers = parties.workers()
    transport = LocalTransport(workers)
    coordinator = parties.coordinator(transport)
    coordinator._run_round()
    shutil.copytree(tmp_path / "site0", tmp_path / "copy")
    coordinator._run_round()
    workers["site0"].store.close()
    shutil.rmtree(tmp_path / "site0")
    shutil.copytree(tmp_path / "copy", tmp_path / "site0")
    transport.workers["site0"] = workers["site0"] = parties.worker(0)
    coordinator.run()
    assert [len(record.answered) for record in coordinator.progress.records] == [3, 3, 3]
    assert workers["site0"].store.current().training.num_rounds == 2


def test_a_reply_may_have_the_bytes_of_the_recipes_arrays_and_no_more(tiny, tmp_path, monkeypatch):
    parties = Parties(tiny, tmp_path, rounds=1)
    workers = parties.workers()
    transport = LocalTransport(workers)
    coordinator = parties.coordinator(transport, min_sites=2)
    arrays = sum(value.numel() * value.element_size() for value in coordinator.recipe.template.sent.values())
    assert transport.max_bytes == arrays + 2**22 + 8  # and a table
    (client,) = workers["site0"].clients.values()
    arrays = sum(value.numel() * value.element_size() for value in client.recipe.template.initial.values())
    assert workers["site0"].max_bytes == arrays + 2**22 + 8
    real = workers["site1"].answer
    monkeypatch.setattr(
        workers["site1"], "answer", lambda *arguments: real(*arguments).ljust(transport.max_bytes + 1, b"\0")
    )
    result = transport.exchange({"site1": pack({})}, 1, 1.0)
    assert result == {"site1": Failure("malformed")}


def test_a_folder_is_not_overwritten_and_not_shared(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=1)
    coordinator, workers = parties.deployed()
    with pytest.raises(ValueError, match="already contains a run"):
        parties.coordinator(LocalTransport(workers))
    with pytest.raises(OSError, match="in use"):
        parties.coordinator(LocalTransport(workers), resume=True)
    coordinator.close()
    parties.rounds = 2
    with pytest.raises(ValueError, match="different recipe"):
        parties.coordinator(LocalTransport(workers), resume=True)


def test_sites_join_later_and_leave(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, "ditto", rounds=3, every=3)
    everyone = parties.workers()
    transport = Troubled({name: everyone[name] for name in ("site0", "site1")})
    coordinator = parties.coordinator(transport, min_sites=1)
    coordinator._run_round()
    transport.workers["site2"] = everyone["site2"]
    coordinator._run_round()
    del transport.workers["site0"]
    coordinator.run()
    assert transport.asked == [["site0", "site1"], ["site0", "site1", "site2"], ["site1", "site2"]]
    assert [member.joined for member in coordinator.progress.roster] == [0, 0, 1]


def test_a_site_whose_budget_is_spent_is_asked_no_more(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=3, every=3)
    workers = parties.workers()
    only_client(workers["site1"]).limits = Limits(max_rounds=1)
    coordinator = parties.coordinator(LocalTransport(workers), min_sites=2)
    progress = coordinator.run()
    assert [record.failed for record in progress.records] == [{}, {"site1": "exhausted"}, {}]
    assert progress.records[2].selected == ["site0", "site2"]


class Poisoned(LocalTransport):
    """site1 adds 1e5 to all that it sends; ``sent`` keeps what each had to send."""

    def __init__(self, workers, spec):
        super().__init__(workers)
        self.spec = spec
        self.sent = {}

    def exchange(self, messages, enough, deadline):
        result = super().exchange(messages, enough, deadline)
        for name, reply in result.items():
            if trains(messages[name]):
                header, self.sent[name] = unpack(reply, self.spec)
                if name == "site1":
                    result[name] = pack(header, {key: value + 1e5 for key, value in self.sent[name].items()})
        return result


@pytest.mark.every(2)
@pytest.mark.parametrize("given", [{"server_rule": Median()}, {"drop_outliers": True}])
def test_a_poisoned_site_moves_nothing_further_than_honest_ones(given, tiny, tmp_path):
    """Each number of the median of three lies between those of the two honest sites; without it, it is their mean."""
    parties = Parties(tiny, tmp_path, rounds=1, loop=given)
    transport = Poisoned(parties.workers(), spec_of(parties.coordinator(LocalTransport({})).recipe.template.sent))
    parties.folder = tmp_path / "again"
    coordinator = parties.coordinator(transport)
    record = coordinator.run().records[0]
    assert set(record.outliers) == {"site1"}
    for key, value in coordinator.server.global_state.items():
        honest = torch.stack([transport.sent["site0"][key], transport.sent["site2"][key]])
        assert ((value >= honest.amin(0)) & (value <= honest.amax(0))).all()
        if "drop_outliers" in given and value.is_floating_point():
            torch.testing.assert_close(value, honest.double().mean(0).to(value.dtype))


def test_privacy_of_whole_sites_counts_those_who_answered(tiny, tmp_path):
    privacy = ClientPrivacy(noise_multiplier=1.0, max_norm=1e-3, delta=1e-2, secure_rng=False)
    parties = Parties(tiny, tmp_path, rounds=2, every=2, loop={"client_privacy": privacy})

    def delay_reply(name, message, _):
        return Failure("late") if name == "site2" and trains(message, 1) else None

    coordinator = parties.coordinator(Troubled(parties.workers(), delay_reply), min_sites=2, deadline=4)
    before = state(coordinator)
    coordinator.run()
    assert coordinator.roster.client_level.options.secure_rng
    assert [len(coordinator.roster.client_level.ledgers.server.history(client)) for client in range(3)] == [1, 1, 1]
    assert [coordinator.roster.client_level.ledgers.server.history(client)[1.0, 1.0] for client in range(3)] == [
        2,
        2,
        1,
    ]
    moved = torch.cat([(value - before[key]).flatten() for key, value in coordinator.server.global_state.items()])
    # Two rounds' noise in the mean of 3 and of 2 sites; the clipped changes are at most 1e-3 long in all.
    expected = 1e-3 * math.sqrt(1 / 9 + 1 / 4)
    assert float(moved.std()) == pytest.approx(expected, rel=0.25)
    assert all(not any(name.startswith("train/") for name in row) for row in coordinator.progress.history)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_sites": 0}, r"min_sites .*got 0"),
        ({"min_sites": 3, "sample": 2}, r"sample .*got 2"),
        ({"deadline": 0}, r"deadline .*got 0"),
        ({"late": "never"}, r"late .*got 'never'"),
    ],
)
def test_terms_that_cannot_be_kept_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        Terms(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loop": {"max_failures": 3}}, "max_failures cannot be used in a deployment"),
        (
            {"loop": {"diagnostics": True}},
            "diagnostics cannot be used in a deployment: they need",
        ),
        (
            {"data": {"shifts": {"noise": ["gaussian_noise"]}}},
            "shifts cannot be used in a deployment: they are drawn",
        ),
    ],
)
def test_what_cannot_be_deployed_is_rejected_by_name(options, message, tiny, tmp_path):
    with pytest.raises(ValueError, match=message):
        Parties(tiny, tmp_path, **options).recipe()
