# SPDX-License-Identifier: Apache-2.0
"""Who is left out of a secure sum that a site spoils: the site that lied, and no other one by its word."""

import secrets

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from perada.deploy.protocol import pack, read_header
from perada.deploy.state import read_state
from perada.deploy.sums import site
from perada.deploy.sums.keys import SiteClaims
from perada.deploy.sums.party import Party
from perada.deploy.transport import Failure, LocalTransport

from ..test_rounds import Troubled
from .test_deployed_sums import FOUR, asks, mean_of, parties, updates
from .test_lying_sites import advert

FIVE = (9, 5, 14, 7, 6)
SIX = (9, 5, 14, 7, 6, 8)


class Lie(LocalTransport):
    """Answers of one site to one kind of message say what ``lie`` makes of what it says, in each round and attempt."""

    def __init__(self, workers, lies):
        super().__init__(workers)
        self.lies = lies
        self.asked = []

    def exchange(self, messages, enough, deadline):
        result = super().exchange(messages, enough, deadline)
        self.asked += [(name, read_header(message)["kind"]) for name, message in messages.items()]
        for (name, kind), lie in self.lies.items():
            if name in result and asks(messages[name], kind) and read_header(result[name])["code"] == "ok":
                header = read_header(result[name])
                result[name] = pack(header | {"sums": lie(header["sums"])})
        return result


def random_texts(names=None):
    """Random bytes in the place of shares that are sealed, for the sites of these names or for all."""

    def lie(sums):
        sealed = {
            name: secrets.token_bytes(48).hex() if names is None or name in names else text
            for name, text in sums["sealed"].items()
        }
        return {**sums, "sealed": sealed}

    return lie


def random_shares(sums):
    return {kind: {name: secrets.token_bytes(16).hex() for name in shares} for kind, shares in sums.items()}


def other_commitments(sums):
    return {**sums, "commitments": {name: [secrets.token_hex(32)] * 2 for name in sums["commitments"]}}


def accuses(*names):
    return lambda _: {"objects": list(names)}


def run(deployment, lies, **terms):
    transport = Lie(deployment.workers(may_send=()), lies)
    coordinator = deployment.coordinator(transport, **terms)
    return coordinator.run().records, transport, coordinator


def assert_mean_of(coordinator, workers, names):
    expected = mean_of(updates(workers), names)
    for key, value in coordinator.server.global_state.items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "lie",
    [random_texts(), random_texts(["site2"]), other_commitments],
    ids=["for all", "for one", "bound to others"],
)
def test_who_deals_what_does_not_open_is_left_out_and_named(lie, tiny, tmp_path, caplog):
    """For one: the site that gets it is not shut out; it says so, and is right."""
    deployment = parties(tiny, tmp_path, "fedavg", sizes=FOUR)
    records, transport, coordinator = run(deployment, {("site0", "shares"): lie})
    for record in records:
        assert record.summed == deployment.names[1:] and not record.void
        assert record.failed == {"site0": "lied"}
    assert "site site0 lied: the shares that it sealed for 'site" in caplog.text
    assert_mean_of(coordinator, transport.workers, deployment.names[1:])
    # Proven once, it is in no later sum of the run, and needs no second attempt there.
    assert transport.asked.count(("site1", "shares")) == 3


@pytest.mark.every(2)
@pytest.mark.parametrize("accused", [["site1"], ["site1", "site2", "site3"]], ids=["one", "all"])
def test_who_accuses_without_reason_is_left_out_itself(accused, deployment, caplog):
    """The accused open what they dealt, and mask nothing with those keys."""
    (record,), transport, coordinator = run(deployment, {("site0", "hold"): accuses(*accused)})
    assert record.summed == deployment.names[1:] and not record.void and record.failed == {"site0": "lied"}
    assert "site site0 lied: it claims that the shares of 'site1' do not open, but they do" in caplog.text
    assert_mean_of(coordinator, transport.workers, deployment.names[1:])


@pytest.mark.slow
def test_a_site_that_deals_badly_and_accuses_is_the_only_one_that_is_left_out(deployment):
    lies = {("site0", "shares"): random_texts(["site3"]), ("site0", "hold"): accuses("site1")}
    (record,), *_ = run(deployment, lies)
    assert record.summed == deployment.names[1:] and record.failed == {"site0": "lied"}


@pytest.mark.slow
def test_an_accused_site_that_opens_another_key_is_left_out(deployment, caplog):
    lies = {
        ("site0", "shares"): random_texts(["site1"]),
        ("site0", "open"): lambda _: {"seals": secrets.token_bytes(16).hex()},
    }
    (record,), *_ = run(deployment, lies)
    assert record.summed == deployment.names[1:] and record.failed == {"site0": "lied"}


@pytest.mark.slow
@pytest.mark.parametrize("silent", [{}, {"seals": "00"}, {"seals": 3}])
def test_an_accused_site_that_opens_nothing_is_left_out_but_not_proven_to_lie(silent, deployment):
    lies = {("site0", "shares"): random_texts(["site1"]), ("site0", "open"): lambda _: silent}
    (record,), _, coordinator = run(deployment, lies)
    assert record.summed == deployment.names[1:] and "site0" in record.failed
    assert not any(member.lie for member in coordinator.progress.roster)


@pytest.mark.slow
def test_an_honest_site_that_goes_while_it_is_accused_is_not_proven_to_lie(tiny, tmp_path):
    deployment = parties(tiny, tmp_path, "fedavg", rounds=1, sizes=SIX)
    transport = Lie(deployment.workers(), {("site0", "hold"): accuses("site1", "site2")})
    exchange = transport.exchange

    def goes(messages, enough, deadline):
        result = exchange(messages, enough, deadline)
        return result | {
            name: Failure("malformed") for name in result if name == "site1" and asks(messages[name], "open")
        }

    transport.exchange = goes
    coordinator = deployment.coordinator(transport)
    (record,) = coordinator.run().records
    assert record.summed == ["site2", "site3", "site4", "site5"]
    assert {member.name for member in coordinator.progress.roster if member.lie} == {"site0"}


@pytest.mark.slow
def test_random_shares_at_the_end_spoil_nothing_and_are_named(tiny, tmp_path, caplog):
    deployment = parties(tiny, tmp_path, "fedavg", sizes=FOUR)
    (first, second), transport, coordinator = run(deployment, {("site0", "reveal"): random_shares})
    assert first.summed == deployment.names and first.failed == {"site0": "lied"} and not first.void
    assert second.summed == deployment.names[1:] and second.failed == {"site0": "lied"} and not second.void
    assert "site site0 lied: it revealed a different share of 'site0' than it was dealt" in caplog.text
    assert_mean_of(coordinator, transport.workers, deployment.names[1:])


@pytest.mark.slow
def test_random_shares_where_all_are_needed_end_the_run_with_a_name(tiny, tmp_path):
    """Of three sites each is needed: the first round is void, and no site trains for a second one."""
    deployment = parties(tiny, tmp_path, "fedavg", rounds=3)
    transport = Lie(deployment.workers(), {("site0", "reveal"): random_shares})
    coordinator = deployment.coordinator(transport)
    with pytest.raises(TimeoutError, match=r"round 2: .*3 sites.*site0"):
        coordinator.run()
    (record,) = coordinator.progress.records
    assert "site0 lied" in record.void and record.failed == {"site0": "lied"}
    assert transport.asked.count(("site1", "train")) == 1
    coordinator.close()
    again = deployment.coordinator(LocalTransport(transport.workers), resume=True)  # the site was mended
    assert [bool(record.summed) for record in again.run().records] == [False, True, True]


def test_a_site_that_reveals_a_part_is_named(deployment, caplog):
    def lie(sums):
        return {"own": {name: text for name, text in sums["own"].items() if name == "site0"}, "gone": {}}

    (record,), *_ = run(deployment, {("site0", "reveal"): lie})
    assert record.summed == deployment.names and record.failed == {"site0": "malformed"}


@pytest.mark.every(2)
@pytest.mark.parametrize("wrong", [1, 4])
def test_shares_of_another_secret_are_proven_by_what_their_dealer_signed(wrong, monkeypatch, deployment, caplog):
    """With one wrong share other sets of shares give the secret. With all wrong ones the round is void, and named."""
    split = site.split
    splits = []

    def deals(secret, threshold, sites):
        shares = split(secret, threshold, sites)
        splits.append(secret)
        if len(splits) == 1:  # the own mask of the first site that is asked
            shares[:wrong] = [secrets.token_bytes(16) for _ in shares[:wrong]]
        return shares

    monkeypatch.setattr(site, "split", deals)
    (record,), *_ = run(deployment, {})
    if wrong == 1:
        assert record.summed == deployment.names and not record.void
    else:
        assert "the shares that 'site0' dealt do not match its secret" in record.void
        assert record.failed == {"site0": "lied"}


@pytest.mark.slow
def test_keys_that_are_signed_by_nobody_put_out_their_site(tiny, tmp_path, caplog):
    """Every other site rejects a list that has them: one site would void each round."""
    deployment = parties(tiny, tmp_path, "fedavg", sizes=FOUR)

    def lie(sums):
        return {"advert": sums["advert"] | {"signature": "00" * 64}}

    records, *_ = run(deployment, {("site0", "train"): lie})
    for record in records:
        assert record.summed == deployment.names[1:] and record.failed == {"site0": "malformed"}


@pytest.mark.slow
def test_a_site_with_an_identity_that_others_do_not_know_puts_out_no_other(tiny, tmp_path, caplog):
    deployment = parties(tiny, tmp_path, "fedavg", sizes=FOUR)
    workers = deployment.workers()
    peers = {name: key for name, key in deployment.sites.items() if name != "site0"}
    workers["site0"].sums.party = Party("site0", Ed25519PrivateKey.generate(), peers)
    for record in deployment.coordinator(LocalTransport(workers)).run().records:
        assert record.summed == deployment.names[1:] and record.failed == {"site0": "disputed"}
    assert "site site0 is excluded: its keys were rejected by site1, site2, site3" in caplog.text
    assert "the keys of 'site0' are not signed by it" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("accused", [["site1"], ["site1", "site2", "site3"]], ids=["one", "all"])
def test_a_site_that_alone_does_not_accept_others_is_left_out(accused, tiny, tmp_path):
    """As one whose list of sites is an old one, or that lies: all sites see the same keys."""
    deployment = parties(tiny, tmp_path, "fedavg", sizes=FOUR)
    records, *_ = run(deployment, {("site0", "shares"): accuses(*accused)})
    for record in records:
        assert record.summed == deployment.names[1:] and record.failed == {"site0": "disputed"}


def test_two_of_five_that_reject_an_honest_site_are_left_out_themselves(tiny, tmp_path):
    """Half of the other four are not most of them."""
    deployment = parties(tiny, tmp_path, "fedavg", rounds=1, sizes=FIVE)
    lies = {(liar, "shares"): accuses("site2") for liar in ("site0", "site1")}
    (record,), transport, coordinator = run(deployment, lies)
    assert record.summed == ["site2", "site3", "site4"] and not record.void
    assert set(record.failed) == {"site0", "site1"}
    assert_mean_of(coordinator, transport.workers, ["site2", "site3", "site4"])


@pytest.mark.slow
@pytest.mark.parametrize("lie", [accuses(), accuses("nobody"), accuses("site0"), lambda _: {"objects": 3}])
@pytest.mark.parametrize("step", ["shares", "hold"])
def test_objections_to_nobody_stop_nothing(lie, step, deployment):
    (record,), *_ = run(deployment, {("site0", step): lie})
    assert {*deployment.names[1:]} <= {*record.summed} and not record.void


@pytest.mark.slow
def test_liars_that_take_turns_are_found_one_after_the_other(tiny, tmp_path):
    """Four of them, in four attempts: each that shows who lies is no failure."""
    deployment = parties(tiny, tmp_path, "fedavg", rounds=1, sizes=(*SIX, 7))

    def in_turn(place):
        attempts = []

        def lie(sums):
            attempts.append(sums)
            return random_texts()(sums) if len(attempts) == place + 1 else sums

        return lie

    (record,), *_ = run(deployment, {(f"site{place}", "shares"): in_turn(place) for place in range(4)})
    assert record.summed == ["site4", "site5", "site6"]
    assert record.failed == dict.fromkeys(deployment.names[:4], "lied")


@pytest.mark.slow
def test_a_signature_that_is_another_sites_is_named(deployment):
    (record,), *_ = run(deployment, {("site0", "confirm"): lambda _: {"signature": "00" * 64}})
    assert record.summed == deployment.names and record.failed == {"site0": "lied"}


@pytest.mark.slow
def test_what_the_server_told_is_what_sites_say_of_it(tiny, tmp_path):
    deployment = parties(tiny, tmp_path, "perada", rounds=1)
    coordinator, workers = deployment.deployed()
    for worker in workers.values():
        received = read_state(worker.store.folder / "state.safetensors").run_state.summing.heard
        assert received == coordinator.progress.sent_digests


@pytest.mark.slow
@pytest.mark.parametrize("liar", ["site0", "site5"])
def test_a_site_does_not_put_out_the_other_one_with_which_it_was_alone_in_a_round(liar, tiny, tmp_path):
    """It says of that round another thing than the other one does, and nobody else was there but the server."""
    deployment = parties(tiny, tmp_path, "fedavg", rounds=1, sizes=SIX)
    coordinator = deployment.coordinator(LocalTransport(deployment.workers(may_send=())))
    other = "site3"
    true = "a" * 64
    false = "b" * 64
    coordinator.progress.sent_digests["9"] = true  # a round of those two alone
    transport = coordinator.transport

    for name, worker in transport.workers.items():
        if name in (liar, other):
            message = {"9": true if name == other else false}
            worker.sums._make_claims = lambda request, run_state, message=message: SiteClaims((), message)
    (record,) = coordinator.run().records
    assert record.summed == [name for name in deployment.names if name != liar]


@pytest.mark.slow
def test_opening_what_was_dealt_ends_the_attempt_for_the_site(deployment, caplog):
    """A server that invents disputes gets both secrets of a site, and no vector under masks made of them."""
    workers = deployment.workers()
    codes = []

    def invents(name, message, _):
        if name == "site0" and asks(message, "mask") and not codes:
            order = read_header(message)
            opened = workers[name].answer(pack(order | {"kind": "open", "sums": {}}), "liar")
            codes.append(read_header(opened)["code"])
            for kind in ("mask", "open"):
                sums = order["sums"] if kind == "mask" else {"again": 1}
                reply = workers[name].answer(pack(order | {"kind": kind, "sums": sums}), "liar")
                codes.append(read_header(reply)["code"])

    coordinator = deployment.coordinator(Troubled(workers, invents))
    (record,) = coordinator.run().records
    assert codes == ["ok", "other", "other"]
    assert record.summed == deployment.names[1:]


@pytest.mark.every(2)
@pytest.mark.parametrize("step", ["confirm", "reveal"])
def test_what_was_dealt_is_not_opened_once_it_masks_a_vector(step, deployment):
    workers = deployment.workers()
    replies = []

    def asks_late(name, message, _):
        if asks(message, step):
            order = read_header(message) | {"kind": "open", "sums": {}}
            replies.append(read_header(workers[name].answer(pack(order), "liar")))

    deployment.coordinator(Troubled(workers, asks_late)).run()
    assert len(replies) >= 4
    for reply in replies:
        assert reply["code"] == "other" and reply["sums"] == {}


def test_keys_in_the_list_have_one_form(deployment):

    def lie(sums):
        return advert({"seals": "00" * 32})(deployment.identities[0], sums)

    (record,), *_ = run(deployment, {("site0", "train"): lie})
    assert record.summed == deployment.names[1:] and record.failed == {"site0": "malformed"}
