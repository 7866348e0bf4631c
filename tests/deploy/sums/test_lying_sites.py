# SPDX-License-Identifier: Apache-2.0
"""Sites that lie in secure sums: they spoil a sum or void a round, and neither stop nor steer the run."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from perada.deploy.protocol import pack, read_header
from perada.deploy.sums.keys import sign
from perada.deploy.sums.party import Party
from perada.deploy.transport import LocalTransport

from .test_deployed_sums import FOUR, asks, mean_of, parties, updates

ONE = 1 << 24
"""One, in the whole numbers of a vector."""


class Lies(LocalTransport):
    """The answers of ``site0`` to one kind of message say what ``lie`` makes of what it says."""

    def __init__(self, workers, kind, lie):
        super().__init__(workers)
        self.kind = kind
        self.lie = lie

    def exchange(self, messages, enough, deadline):
        result = super().exchange(messages, enough, deadline)
        if "site0" in result and asks(messages["site0"], self.kind):
            header = read_header(result["site0"])
            if header["code"] == "ok":
                result["site0"] = pack(header | {"sums": self.lie(header["sums"])})
        return result


def adds(worker, change, of="update_vector"):
    """Have a site add what ``change`` makes of its vector and of what it is to hold, in its first sum."""
    (client,) = worker.clients.values()
    make = getattr(client, of)
    contents = client.recipe.contents_of_scores()
    if of == "update_vector":
        contents = client.recipe.contents(0, client.public_images)
    honest = []

    def changed_vector(*arguments):
        vector = make(*arguments)
        if not honest:
            honest.append(vector.copy())
            change(vector, contents)
        return vector

    setattr(client, of, changed_vector)


def number(value):
    return np.uint64(int(value * ONE) % 2**64)


def place_of(contents, name=""):
    """Where a vector has the count of a number, or the weight."""
    start = contents.size - 1 - 2 * len(contents.metric_names)
    return start + (1 + len(contents.metric_names) + contents.metric_names.index(name) if name else 0)


def huge(vector, contents):
    vector[: place_of(contents)] = number(2.0**36)


def weight(value):
    def change(vector, contents):
        vector[place_of(contents)] = number(value)

    return change


def noise(vector, _):
    vector[:] = np.random.default_rng(0).integers(0, 2**64, len(vector), np.uint64)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.every(20)
@pytest.mark.parametrize(
    "change", [huge, weight(-34), weight(-50), weight(0.5), noise], ids=["huge", "none", "negative", "half", "noise"]
)
def test_a_sum_that_cannot_be_is_void_and_the_run_goes_on(change, weighting, tiny, tmp_path):
    """Else the next model is one that no site takes, or a random one."""
    deployment = parties(tiny, tmp_path, "fedavg", sizes=FOUR, loop={"weighting": weighting})
    workers = deployment.workers()
    adds(workers["site0"], change)
    coordinator = deployment.coordinator(LocalTransport(workers))
    first = coordinator.server.global_state
    before = {key: value.clone() for key, value in first.items()}
    coordinator._run_round()
    for key, value in coordinator.server.global_state.items():
        assert torch.equal(value, before[key])
    one, two = coordinator.run().records
    assert one.void.startswith("secure sum: ") and one.summed == []
    assert not two.void and two.summed == deployment.names


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own/accuracy", "square/accuracy", "weighted/accuracy", "own/tests", "global/right"])
def test_counts_of_scores_that_add_up_to_none_stop_nothing(name, deployment):
    workers = deployment.workers()

    def none(vector, contents):
        vector[place_of(contents, name)] = number(-3)

    adds(workers["site0"], none, "scores_vector")
    (row,) = deployment.coordinator(LocalTransport(workers)).run().history
    score = "global/global_test" if name == "global/right" else "personal/local_test"
    assert score not in row or "own/accuracy" not in name
    assert len([key for key in row if key.startswith(("personal", "global"))]) >= 1


def advert(change):
    """Other keys, which the site has signed."""

    def lie(identity, sums):
        from perada.deploy.sums.keys import Advert

        made = replace(Advert(**sums["advert"]), **change)
        return {"advert": vars(replace(made, signature=sign(identity, "advert", made.statement())))}

    return lie


LOW = "00" * 32
"""A point of X25519 with which every exchange gives zero."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{"masks": LOW}, {"shares": LOW}, {"shares": "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"}],
)
def test_keys_that_nobody_can_use_put_the_site_alone_out_of_the_round(change, deployment, caplog):
    """With them in the list no other site could mask: one site would void each round."""
    workers = deployment.workers()
    transport = Lies(workers, "train", lambda sums: advert(change)(deployment.identities[0], sums))
    (record,) = deployment.coordinator(transport).run().records
    assert record.summed == deployment.names[1:] and not record.void
    assert "site site0: malformed content in a secure sum: a public key cannot be used" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"terms": "0" * 64}, {"heard": f"0:{'0' * 64} "}], ids="".join)
def test_a_site_that_says_it_was_told_other_things_is_alone(change, deployment, caplog):
    """With its keys in the list each site would reject it, in all rounds."""
    transport = Lies(deployment.workers(), "train", lambda sums: advert(change)(deployment.identities[0], sums))
    (record,) = deployment.coordinator(transport).run().records
    assert record.summed == deployment.names[1:] and not record.void
    assert "excluding site0: sent something different from most sites" in caplog.text


def test_a_site_with_other_public_images_is_alone(tiny, tmp_path, caplog):
    deployment = parties(tiny, tmp_path, "perada", rounds=1, sizes=FOUR)
    workers = deployment.workers()
    (client,) = workers["site1"].clients.values()
    client.public_images._public.images = client.public_images._public.images + 0.01
    (record,) = deployment.coordinator(LocalTransport(workers)).run().records
    assert record.summed == ["site0", "site2", "site3"] and "excluding site1" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("change", [str.upper, lambda key: f" {key}", lambda key: key[:-2]])
def test_a_key_has_one_form(change, deployment, caplog):

    def lie(sums):
        return {"advert": sums["advert"] | {"masks": change(sums["advert"]["masks"])}}

    (record,) = deployment.coordinator(Lies(deployment.workers(), "train", lie)).run().records
    assert record.summed == deployment.names[1:] and "is malformed" in caplog.text


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "lie",
    [
        lambda sealed: {name: text for name, text in sealed.items() if name != "site3"},
        lambda sealed: dict.fromkeys(sealed, "00"),
        lambda sealed: dict.fromkeys(sealed, "00" * 10**6),
        lambda sealed: sealed | {str(place): "" for place in range(10**4)},
    ],
    ids=["not for all", "short", "long", "for strangers"],
)
def test_shares_that_are_not_for_all_others_put_the_site_alone_out_of_the_round(lie, deployment):
    """A site without a share adds no mask of the pair, and the other one's stays in the sum."""
    workers = deployment.workers()
    transport = Lies(workers, "shares", lambda sums: {"sealed": lie(sums["sealed"])})
    coordinator = deployment.coordinator(transport)
    (record,) = coordinator.run().records
    assert record.summed == deployment.names[1:] and not record.void
    expected = mean_of(updates(workers), deployment.names[1:])
    for key, value in coordinator.server.global_state.items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("signature", ["00" * 10**6, "00" * 64, None, 3, ["00"]])
def test_a_signature_that_is_none_stops_nobody(signature, deployment):
    transport = Lies(deployment.workers(), "confirm", lambda _: {"signature": signature})
    (record,) = deployment.coordinator(transport).run().records
    assert record.summed == deployment.names and not record.void


def test_a_site_does_not_hide_behind_itself(tiny, tmp_path):
    deployment = parties(tiny, tmp_path)
    with pytest.raises(ValueError, match=r"'site0'.*'another'"):
        Party("site0", deployment.identities[0], deployment.sites | {"another": deployment.identities[0].public_key()})
