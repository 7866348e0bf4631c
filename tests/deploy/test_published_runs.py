# SPDX-License-Identifier: Apache-2.0
"""What a deployed run shows and publishes of sites: their ε in full, and nothing that follows from images beside it."""

import math
from types import SimpleNamespace

import pytest

from perada.deploy import exported
from perada.deploy.exported import export_server_run
from perada.deploy.protocol import Response, digest_of_message, pack, read_header
from perada.deploy.transport import LocalTransport
from perada.privacy import ClientPrivacy, Privacy
from perada.results.run_file import published
from perada.server import SecureSums
from perada.studies.report.records import read_records

from .parties import Parties
from .test_hostile_sites import Lying, broken, lie_of

OF_IMAGES = {"privacy": Privacy(noise_multiplier=1.0, delta=1e-3)}
OF_CLIENTS = {"client_privacy": ClientPrivacy(noise_multiplier=1.0, delta=1e-3)}


@pytest.fixture(autouse=True)
def _no_image_set(monkeypatch):
    """The tests' recipe has no set of images that the server could read the preprocessing from."""
    monkeypatch.setattr(exported, "_preprocessing_of_server", lambda recipe: SimpleNamespace(record=dict))


def server_run(coordinator):
    return export_server_run(coordinator.recipe, coordinator.progress, coordinator.server.state_dict())


def own_epsilon(worker, ledger):
    """What the site's own ledger says."""
    client, (run,) = next(iter(worker.clients.values())), worker.store.runs
    state = worker.store.load(run)
    return client.protection(state.training.account, state.training.num_rounds).image_account.epsilons([0])[ledger][0]


def test_the_epsilon_of_sites_that_do_not_tell_it_is_infinite_in_the_metrics(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, loop=OF_IMAGES)
    workers = {name: parties.worker(place, ("epsilon",) if place else ()) for place, name in enumerate(parties.names)}
    coordinator = parties.coordinator(LocalTransport(workers))
    for row in coordinator.run().history:
        for ledger in ("server", "release"):
            assert row[f"privacy/{ledger}_epsilon_mean"] == row[f"privacy/{ledger}_epsilon_max"] == math.inf
    shown = server_run(coordinator).info["privacy"]["sample"]["server"]
    assert [math.isinf(value) for value in shown] == [True, False, False]


@pytest.mark.every(2)
@pytest.mark.parametrize("level", [OF_IMAGES, OF_CLIENTS], ids=["images", "clients"])
def test_a_page_on_a_private_deployment_has_no_scores_whatever_sites_send(level, tiny, tmp_path):
    parties = Parties(tiny, tmp_path, loop=level)
    workers = parties.workers(may_send=("counts", "scores"))
    parties.coordinator(LocalTransport(workers)).run()
    (record,) = read_records(tmp_path / "server")
    assert not math.isnan(record.last("global/global_test"))
    assert record.private
    assert math.isnan(record.published().last("global/global_test"))


def test_whose_training_broke_is_not_seen_in_what_is_published(tiny, tmp_path):
    rows = {}
    for name, lie in {"whole": lambda who, what, reply, _: reply, "broken": broken("site1")}.items():
        parties = Parties(tiny, tmp_path / name, loop=OF_CLIENTS)
        coordinator = parties.coordinator(Lying(parties.workers(may_send=()), lie), min_sites=2)
        coordinator.run()
        run = server_run(coordinator)
        rows[name] = published(run.info, run.metrics)[1]["rounds"]
    # By the clipping norm and the ε nobody sees it: noise is added to the sum, of which no row shows anything.
    assert rows["whole"] == rows["broken"]
    assert [row["round"] for row in rows["whole"]] == [0, 1]


def test_the_fine_tuning_is_in_the_epsilon_that_the_server_shows(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, "fedavg_ft", loop=OF_IMAGES)
    workers = parties.workers(may_send=("epsilon",))
    coordinator = parties.coordinator(LocalTransport(workers))
    progress = coordinator.run()
    sample = server_run(coordinator).info["privacy"]["sample"]
    for ledger in ("server", "release"):
        expected = {name: own_epsilon(worker, ledger) for name, worker in workers.items()}
        names = [member.name for member in progress.roster]
        assert sample[ledger] == [pytest.approx(expected[name]) for name in names]
        assert progress.history[-1][f"privacy/{ledger}_epsilon_max"] == pytest.approx(max(expected.values()))
    assert min(sample["release"]) > max(0, min(sample["server"]))


@pytest.mark.every(2)
@pytest.mark.parametrize(("code", "known"), [("failed", False), ("exhausted", True)])
def test_a_site_that_may_have_tuned_has_no_known_epsilon(code, known, tiny, tmp_path):
    parties = Parties(tiny, tmp_path, "fedavg_ft", loop=OF_IMAGES)
    workers = parties.workers(may_send=("epsilon",))

    def lie(who, what, reply, message):
        return pack(Response(code, digest_of_message(message))) if (who, what) == ("site1", "tune") else reply

    coordinator = parties.coordinator(Lying(workers, lie), min_sites=2)
    progress = coordinator.run()
    spent = {member.name: member.spent("release") for member in progress.roster}
    assert math.isfinite(spent["site1"]) == known
    assert math.isfinite(spent["site0"]) and math.isfinite(spent["site2"])


@pytest.mark.slow
def test_the_epsilon_of_a_site_whose_training_broke_is_unknown_until_it_says_it_again(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=3, loop=OF_IMAGES)
    workers = parties.workers(may_send=("epsilon",))

    def lie(who, what, reply, message):
        order = read_header(message)
        breaks = what == "train" and (who, order["round"]) in [("site1", 0), ("site2", 2)]
        return pack(Response("broken", digest_of_message(message))) if breaks else reply

    progress = parties.coordinator(Lying(workers, lie), min_sites=2).run()
    spent = {member.name: member.spent("server") for member in progress.roster}
    assert spent["site1"] == pytest.approx(own_epsilon(workers["site1"], "server"))
    assert spent["site2"] == math.inf
    assert [math.isinf(row["privacy/server_epsilon_max"]) for row in progress.history] == [True, False, True]


@pytest.mark.slow
def test_a_negative_epsilon_is_malformed(tiny, tmp_path):
    parties = Parties(tiny, tmp_path, rounds=1, loop=OF_IMAGES)
    workers = parties.workers(may_send=("epsilon",))
    lie = lie_of("site1", "train", epsilon={"server": -1.0, "release": -1.0})
    progress = parties.coordinator(Lying(workers, lie), min_sites=2).run()
    assert progress.records[0].failed == {"site1": "malformed"}


@pytest.mark.parametrize("place", ["recipe", "limits"])
def test_a_site_rejects_a_delta_that_shows_one_of_the_sites_of_a_sum(place, tiny, tmp_path):
    delta = 0.34 if place == "recipe" else 1e-3
    level = ClientPrivacy(noise_multiplier=1.0, delta=delta)
    parties = Parties(tiny, tmp_path, loop={"client_privacy": level, "secure_sums": SecureSums(min_sites=3)})
    section = "client_privacy" if place == "recipe" else "limits"
    limits = {"delta": 0.34} if place == "limits" else {}
    with pytest.raises(ValueError, match=rf"{section}: delta=0\.34 .*1 / 3,"):
        parties.worker(0, **limits)
    assert Parties(tiny, tmp_path / "other", loop=parties.options["loop"] | OF_CLIENTS).worker(0, delta=1e-3)
