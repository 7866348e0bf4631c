# SPDX-License-Identifier: Apache-2.0
"""A server that lies to sites in secure sums: which of its messages they reject, and that it learns no update."""

import base64
import logging
import secrets
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from perada.deploy.protocol import Request, pack, read_header, unpack
from perada.deploy.server import summing
from perada.deploy.state import read_state
from perada.deploy.sums import keys, site
from perada.deploy.transport import LocalTransport
from perada.server.sums import SecureSums

from ..test_parity import normalized
from .test_deployed_sums import FOUR, Liar, asks, parties, updates


@pytest.fixture
def _believes(monkeypatch):
    """A server that lies leaves nobody out."""
    monkeypatch.setattr(summing, "consistent_adverts", dict)


def change_message(message, tensors=None, **header):
    """A message with other tensors or another header."""
    order = Request.read(read_header(message))
    from safetensors.torch import load

    content = load(message)
    return pack(replace(order, **header), tensors(content) if tensors else content)


def run(deployment, lie):
    transport = Liar(deployment.workers(may_send=("losses",)), lie)  # no scores, whose sums have the same steps
    coordinator = deployment.coordinator(transport)
    return coordinator.run(), transport


def assert_void(progress, caplog, reason):
    assert [record.summed for record in progress.records] == [[]] * len(progress.records)
    assert all(record.void.startswith("secure sum: ") for record in progress.records)
    assert reason in caplog.text


def shift_state(state):
    return {key: value + 1.0 if value.is_floating_point() else value for key, value in state.items()}


@pytest.mark.every(8)
@pytest.mark.parametrize(
    "change",
    [
        {"tensors": shift_state},  # a model of its own
        {"factor": 0.0},  # a learning rate at which the site returns what it was sent
        {"strides": {"0.weight": [9, 1, 3, 1]}},
        {"clients": 9},
    ],
    ids=["model", "rate", "layout", "sites"],
)
@pytest.mark.parametrize("told", [["site1"], ["site0", "site2", "site3"]], ids=["to one", "to all but one"])
@pytest.mark.usefixtures("_believes")
def test_sites_that_are_told_different_things_mask_nothing(change, told, deployment, caplog):
    def lie(name, message):
        return change_message(message, **change) if name in told and asks(message, "train") else message

    progress, transport = run(deployment, lie)
    assert_void(progress, caplog, "are for a different sum")
    assert not any(kind == "mask" for _, kind, _ in transport.seen)


def dead(state):
    """A model whose normalization, of which a site keeps its own, learns to let nothing pass, at a high rate."""
    result = {key: value.clone() for key, value in state.items()}
    result["0.weight"] *= 1e-5
    result["0.bias"].zero_()
    result["4.weight"] = torch.tensor([[5.0], [0.0], [0.0]]).expand(3, 36).contiguous()
    result["4.bias"] = torch.tensor([10.0, 0.0, 0.0])
    return result


@pytest.mark.slow
@pytest.mark.usefixtures("_believes")
def test_sites_that_were_told_different_things_once_are_in_no_later_sum(tiny, tmp_path, caplog):
    """By what they keep of that round all but one send back what they are sent, and the sum would be the one's update.

    In the first round nothing is summed; in the second all are told the same.
    """
    deployment = parties(tiny, tmp_path, "fedbn", sizes=FOUR, net=normalized)

    def lie(name, message):
        poisoned = asks(message, "train") and read_header(message)["round"] == 0 and name != "site3"
        return change_message(message, tensors=dead, factor=1e3) if poisoned else message

    workers = deployment.workers(may_send=())
    transport = Liar(workers, lie)
    coordinator = deployment.coordinator(transport)
    assert_void(coordinator.run(), caplog, "'site3' was sent something different in round 1")
    sent = updates(workers)
    start = coordinator.server.global_state
    moved = [float((one["0.weight"] - start["0.weight"]).abs().max()) for one in sent.values()]
    assert moved[:3] == [0.0] * 3 and moved[3] > 0.01  # the attack would have worked
    assert not any(kind == "mask" for _, kind, _ in transport.seen)


@pytest.mark.usefixtures("_believes")
def test_public_images_of_the_servers_choice_are_noticed(tiny, tmp_path, caplog):
    """A site with other public images has another digest of them; its logits would show its update."""
    deployment = parties(tiny, tmp_path, "perada", rounds=1)
    workers = deployment.workers()
    (client,) = workers["site1"].clients.values()
    images = client.public_images._public.images
    client.public_images._public.images = images + 0.01
    progress = deployment.coordinator(LocalTransport(workers)).run()
    assert_void(progress, caplog, "are for a different sum")


@pytest.mark.slow
def test_a_round_is_summed_once(deployment, caplog):
    """Of a second sum without one of the sites the difference would be its update."""
    workers = deployment.workers(may_send=())
    asked = []
    transport = Liar(workers, lambda name, message: asked.append((name, message)) or message)
    coordinator = deployment.coordinator(transport)
    coordinator.run()
    progress = coordinator.progress
    trained = next(message for name, message in asked if name == "site0" and asks(message, "train"))
    before = next(reply for name, kind, reply in transport.seen if (name, kind) == ("site0", "train"))
    assert workers["site0"].answer(trained, "liar") == before  # the same keys, whose steps were all taken
    for attempt in (0, 1, 5):
        for kind in ("keys", "mask"):
            order = Request(kind, progress.run, progress.recipe, 0, 0, 4, attempt=attempt, factor=1.0 + attempt)
            assert read_header(workers["site0"].answer(pack(order), "liar"))["code"] == "other"
    assert "was already sent under masks" in caplog.text


@pytest.mark.every(2)
@pytest.mark.parametrize("revealed", [False, True])
def test_not_after_a_restart_either(revealed, deployment, caplog):
    workers = deployment.workers()
    trained = []

    def stop(name, message):
        if name == "site0" and asks(message, "train"):
            trained.append(message)
        if not revealed and asks(message, "confirm"):
            raise InterruptedError
        return message

    coordinator = deployment.coordinator(Liar(workers, stop))
    try:
        coordinator.run()
    except InterruptedError:
        assert not revealed
    workers["site0"].store.close()
    worker = deployment.worker(0)
    assert read_header(worker.answer(trained[0], "liar"))["sums"] == {}  # no keys for another
    order = Request("keys", coordinator.progress.run, coordinator.progress.recipe, 0, 0, 4, attempt=1)
    assert read_header(worker.answer(pack(order), "liar"))["code"] == "other"
    assert "was already sent under masks" in caplog.text


@pytest.mark.every(2)
@pytest.mark.parametrize("restarts", [False, True])
def test_scores_leave_under_masks_once(restarts, deployment, caplog):
    """The difference of two sums of the same models' scores, with one site less, is what that site's images say."""
    workers = deployment.workers()
    asked = []
    transport = Liar(workers, lambda name, message: asked.append((name, message)) or message)
    coordinator = deployment.coordinator(transport)
    (row,) = coordinator.run().history
    assert "global/global_test" in row  # they left once
    if restarts:
        workers["site0"].store.close()
        workers["site0"] = deployment.worker(0)
    evaluated = next(message for name, message in asked if name == "site0" and asks(message, "evaluate"))
    if restarts:
        assert "advert" not in read_header(workers["site0"].answer(evaluated, "liar"))["sums"]  # no keys for another
    mask = next(message for name, message in asked if name == "site0" and read_header(message)["of"] == "scores")
    for attempt in (1, 2, 5):
        for kind in ("keys", "mask"):
            order = replace(Request.read(read_header(mask)), kind=kind, attempt=attempt, sums={})
            assert read_header(workers["site0"].answer(pack(order), "liar"))["code"] == "other"
    assert f"the vector of round {order.display_round} was already sent under masks" in caplog.text


def test_keys_are_made_once_for_an_attempt(deployment, caplog):
    """Two lists of one attempt would give two sets of masks; the answer to the training has the same keys always."""
    workers = deployment.workers()
    orders = []

    def keep(name, message):
        if asks(message, "shares") and name == "site0" and not orders:
            header = read_header(message)
            orders.extend(
                Request.read(header | {"kind": "keys", "sums": {}, "clients": clients, "attempt": attempt})
                for clients, attempt in ((4, 0), (5, 0), (4, 2), (4, 1))
            )
            adverts.extend(sums_of(workers["site0"].answer(trained[0], "liar")) for _ in range(2))
            codes.extend(read_header(workers["site0"].answer(pack(order), "liar"))["code"] for order in orders)
            adverts.append(sums_of(workers["site0"].answer(trained[0], "liar")))
        if asks(message, "train") and name == "site0":
            trained.append(message)
        return message

    def sums_of(reply):
        return read_header(reply)["sums"].get("advert")

    codes = []
    trained = []
    adverts = []
    deployment.coordinator(Liar(workers, keep)).run()
    assert codes == ["other", "other", "ok", "other"]
    assert adverts[0] == adverts[1] is not None and adverts[2] is None  # not beside those of a later attempt
    assert "keys for attempt 0 were requested again" in caplog.text


def test_a_step_out_of_its_turn_is_rejected_before_anything_is_computed(tiny, tmp_path, caplog):
    deployment = parties(tiny, tmp_path, "perada", rounds=1)
    workers = deployment.workers()
    codes = []

    def early(name, message):
        if asks(message, "shares") and not codes:
            mask = change_message(message, kind="mask", sums={"sealed": {}})
            codes.append(read_header(workers[name].answer(mask, "liar"))["code"])
        return message

    progress = deployment.coordinator(Liar(workers, early)).run()
    assert codes == ["other"] and "mask is not the next step" in caplog.text
    assert progress.records[0].summed == deployment.names


@pytest.mark.slow
def test_a_site_whose_training_broke_is_in_no_sum(deployment):
    """Where no image could be read its update is what the server sent: beside two such sites the third has no cover."""
    workers = deployment.workers()
    (client,) = workers["site1"].clients.values()
    train = client.train

    def reads_nothing(*arguments):
        result = train(*arguments)
        trained = replace(result.trained, accepted=torch.tensor([False]))
        return result._replace(trained=trained, failure="no image can be read")

    client.train = reads_nothing
    coordinator = deployment.coordinator(LocalTransport(workers))
    (record,) = coordinator.run().records
    assert record.failed == {"site1": "broken"} and record.summed == ["site0", "site2", "site3"]
    order = Request("keys", coordinator.progress.run, coordinator.progress.recipe, 0, 1, 4, attempt=1)
    assert read_header(workers["site1"].answer(pack(order), "liar"))["code"] == "other"


@pytest.mark.slow
def test_an_old_round_and_one_that_was_not_trained_are_rejected(tiny, tmp_path, caplog):
    deployment = parties(tiny, tmp_path, "fedavg", sizes=FOUR)
    coordinator, workers = deployment.deployed()
    for round in (0, 2):
        order = Request("keys", coordinator.progress.run, coordinator.progress.recipe, round, 0, 4)
        assert read_header(workers["site0"].answer(pack(order), "liar"))["code"] in ("other", "past")
    fresh = Request("keys", "f" * 32, coordinator.progress.recipe, 0, 0, 4)
    assert read_header(workers["site0"].answer(pack(fresh), "liar"))["code"] == "other"


@pytest.mark.slow
def test_a_message_of_an_old_sum_is_answered_by_nothing_new(tiny, tmp_path):
    """All messages of the first round come again in the second: replies of the first, or none."""
    deployment = parties(tiny, tmp_path, "fedavg", sizes=FOUR)
    workers = deployment.workers()
    kept = {}

    def keep(name, message):
        kept.setdefault((name, read_header(message)["kind"], read_header(message)["round"]), message)
        return message

    deployment.coordinator(Liar(workers, keep)).run()
    for (name, kind, round), message in kept.items():
        if kind in ("keys", "shares", "mask", "confirm", "reveal") and round == 0:
            assert read_header(workers[name].answer(message, "liar"))["code"] == "past"


def invented(made):
    """The list of sites' keys with one more, of the server's own."""
    from perada.deploy.sums.keys import SumTerms
    from perada.deploy.sums.site import SiteRound

    def lie(name, message):
        if not asks(message, "shares"):
            return message
        order = Request.read(read_header(message))
        terms = SumTerms(order.run, order.round, order.recipe, SecureSums())
        advert = SiteRound("invented", Ed25519PrivateKey.generate(), {}, terms).advertise()
        return change_message(message, sums={"adverts": [*order.sums["adverts"], vars(advert)]})

    return lie


def without(*gone):
    def lie(name, message):
        if not asks(message, "shares"):
            return message
        order = Request.read(read_header(message))
        return change_message(
            message, sums={"adverts": [one for one in order.sums["adverts"] if one["name"] not in gone]}
        )

    return lie


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (invented, "'invented' is not among the sites of site.yaml"),
        (lambda made: without("site2", "site3"), "2 sites are too few to hide among"),
        (lambda made: without("site0"), "the list has different keys for this site, or none"),
    ],
    ids=["invented", "two", "without"],
)
def test_lists_that_the_server_made_up_are_rejected_and_logged(lie, reason, tiny, tmp_path, caplog):
    made = parties(tiny, tmp_path, "fedavg", rounds=1, sizes=FOUR)
    with caplog.at_level(logging.WARNING):
        progress, _ = run(made, lie(made))
    assert reason in caplog.text
    if progress.records[0].summed:
        assert len(progress.records[0].summed) >= 3 and "site0" not in progress.records[0].summed
    else:
        assert_void(progress, caplog, reason)


@pytest.mark.parametrize("step", ["shares", "mask", "confirm", "reveal"])
@pytest.mark.parametrize(
    "sums",
    [{}, {"adverts": 1}, {"sealed": {"site1": 3}}, {"alive": [1, {}]}, {"signatures": []}],
    ids=lambda sums: "".join(sums),
)
@pytest.mark.every(7)
def test_what_makes_no_sense_is_rejected_and_the_worker_lives(step, sums, deployment):
    def lie(name, message):
        return change_message(message, sums=sums) if name == "site0" and asks(message, step) else message

    progress, transport = run(deployment, lie)
    codes = {read_header(reply)["code"] for name, kind, reply in transport.seen if (name, kind) == ("site0", step)}
    assert codes <= {"malformed", "other"}
    assert progress.records[0].summed


def test_no_reply_but_the_masked_one_holds_an_update_and_that_one_looks_random(tiny, tmp_path):
    """Bytes of what the server receives: no update, no part of one, no logits; nor after a look at the sites' disks."""
    deployment = parties(tiny, tmp_path, "perada", rounds=1)
    workers = deployment.workers(may_send=())
    transport = Liar(workers)
    deployment.coordinator(transport).run()
    masked = [reply for _, kind, reply in transport.seen if kind == "mask"]
    others = b"".join(reply for _, kind, reply in transport.seen if kind != "mask")
    (client,) = workers["site0"].clients.values()
    size = client.recipe.contents(0, client.public_images).size
    for worker in workers.values():
        stored = read_state(worker.store.folder / "state.safetensors").run_state
        for value in stored.summing.update.values():
            for row in value.flatten().split(4):  # of 16 bytes
                assert row.numpy().tobytes() not in others
        # The reply that is kept for a repeated request has none either, before keys are added to it.
        assert unpack(stored.training.reply, {}).tensors == {}
    vectors = [unpack(reply, {"masked": ("U64", (size,))})[1]["masked"] for reply in masked]
    assert len(vectors) == 3
    for vector in vectors:
        counts = torch.bincount(vector.view(torch.uint8).int(), minlength=256).double()
        chi = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
        assert 140 < chi < 390  # 255 ± 6 standard deviations
    facts = [read_header(reply)["facts"] for _, kind, reply in transport.seen if kind == "train"]
    assert facts == [{}] * 3


def test_no_secret_of_a_round_is_in_a_file_a_log_or_a_reply(tiny, tmp_path, monkeypatch, caplog):
    """Seeds, and all keys that are derived from them or agreed on; also of a site that is killed on the way."""
    deployment = parties(tiny, tmp_path, "perada", rounds=1, sizes=FOUR)
    result = []

    def noted(make):
        def noting(*arguments):
            result.append(make(*arguments))
            return result[-1]

        return noting

    monkeypatch.setattr(site, "secrets", SimpleNamespace(token_bytes=noted(secrets.token_bytes)))
    monkeypatch.setattr(keys, "derive_key", noted(keys.derive_key))
    workers = deployment.workers()

    def killed(name, message):
        if name == "site3" and asks(message, "confirm") and transport.workers[name] is workers[name]:
            workers[name].store.close()
            transport.workers[name] = deployment.worker(3)
        return message

    with caplog.at_level(logging.DEBUG):
        transport = Liar(workers, killed)
        assert deployment.coordinator(transport, min_sites=3).run().records[0].summed == deployment.names
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    files = b"".join([*files, *(reply for _, _, reply in transport.seen), caplog.text.encode()])
    assert len(result) > 4 * 3 + 4 * 3 * 2 and b"advert" in files  # three seeds a site, and keys for each pair
    for secret in result:
        for shown in (secret, secret.hex().encode(), base64.b64encode(secret), repr(secret).encode()):
            assert shown not in files
