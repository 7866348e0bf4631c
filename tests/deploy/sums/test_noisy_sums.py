# SPDX-License-Identifier: Apache-2.0
"""Deployed runs with privacy of whole sites in secure sums: each site adds its noise, and keeps its own account."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from opacus.accountants import RDPAccountant
from scipy import stats

from perada.cli.deploy_check import format_site_privacy
from perada.cli.deploy_status import site_status
from perada.core.seeding import generator
from perada.deploy.protocol import Request, pack, read_header
from perada.deploy.site.file import Limits
from perada.deploy.state import SITE_LEDGER, read_state
from perada.deploy.sums.site import SiteRound
from perada.deploy.transport import Failure, LocalTransport
from perada.federation.cohort import Cohort
from perada.privacy import ClientPrivacy
from perada.privacy.client_level import ClientLevel
from perada.privacy.client_sums import VOTE, clip_to_grid, exact_change
from perada.server import SecureSums

from ..test_parity import assert_equal, normalized
from ..test_rounds import Troubled, equal, state
from .test_deployed_sums import FOUR, Liar, Stopped, asks, dying, parties
from .test_hostile_server import change_message

ALARM = 1e-6


@pytest.fixture
def _planted(monkeypatch):
    """Noise that follows from a seed, also at sites, where it never does."""
    monkeypatch.setattr(
        ClientLevel, "_noise_source", lambda level, round, client: generator(17, "planted", round, client), raising=True
    )


def noisy(tiny, tmp_path, algorithm="fedavg", *, privacy=None, loop=None, **options):
    arguments = {"noise_multiplier": 1.0, "delta": 1e-2, "max_norm": 0.1} | (privacy or {})
    return parties(
        tiny, tmp_path, algorithm, loop={"client_privacy": ClientPrivacy(**arguments)} | (loop or {}), **options
    )


def spent_by_site(workers):
    """Noisy sums that each site counted, by its noise multiplier, from the disks."""
    results = {}
    for name, worker in workers.items():
        total = read_state(worker.store.folder / "state.safetensors").totals.ledger.state_dict()
        results[name] = {sigma: steps for client, sigma, _, steps in total["rows"] if client == SITE_LEDGER}
    return results


ADAPTIVE = {"clipping": "adaptive", "count_noise": 2.0, "quantile": 0.7}


@pytest.mark.every(9)
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("fedavg", {}),
        ("ditto", {"privacy": ADAPTIVE}),
        ("perada_no_kd", {"net": normalized, "privacy": {"max_norm": 3.0}}),
        ("scaffold", {"loop": {"clients_per_round": 3, "seed": 5}, "sizes": FOUR}),
    ],
    ids=["fedavg", "adaptive", "running statistics", "drawn"],
)
@pytest.mark.usefixtures("_planted")
def test_a_deployed_run_equals_its_simulation(algorithm, options, tiny, tmp_path):
    loop, coordinator = assert_equal(noisy(tiny, tmp_path, algorithm, rounds=3, every=3, **options), min_sites=3)
    for row, expected in zip(coordinator.progress.history, loop.history, strict=True):
        for name in ("privacy/client_norm", "privacy/client_epsilon_max"):
            assert row[name] == expected[name]
    assert (row["privacy/client_norm"] != 0.1) == ("privacy" in options)


@pytest.mark.slow
@pytest.mark.parametrize("gone", [None, "mask", "confirm"])
def test_the_mean_has_the_planned_noise_whoever_goes(gone, tiny, tmp_path):
    """Of four sites three must be there. The noise is a thousand times as long as a change may be."""
    deployment = noisy(tiny, tmp_path, rounds=1, sizes=FOUR, privacy={"noise_multiplier": 1e3, "max_norm": 0.01})

    def lost(name, message, _):
        return Failure("malformed") if name == "site1" and gone and asks(message, gone) else None

    coordinator = deployment.coordinator(Troubled(deployment.workers(), lost), min_sites=3)
    before = state(coordinator)
    (record,) = coordinator.run().records
    inside = 3 if gone == "mask" else 4
    assert len(record.summed) == len(record.masked) == inside and not record.void
    after = coordinator.server.global_state
    moved = torch.cat([(value.double() - before[key].double()).flatten() for key, value in after.items()])
    std = 10.0 * math.sqrt(inside / 3) / inside
    assert len(moved) > 100
    assert ALARM < stats.chi2(len(moved)).cdf(float((moved / std).square().sum())) < 1 - ALARM


def masked_vectors(monkeypatch):
    """What each site is about to put under masks."""
    seen = []
    mask = SiteRound.mask

    def spying(self, sealed, vector):
        seen.append((self.name, torch.from_numpy(vector.view(np.int64).copy())))
        return mask(self, sealed, vector)

    monkeypatch.setattr(SiteRound, "mask", spying)
    return seen


def plain_vector(worker, bound):
    """The clipped change of what a site trained last, from its disk, without noise."""
    (client,) = worker.clients.values()
    summing = read_state(worker.store.folder / "state.safetensors").run_state.summing
    uninterrupted, _ = clip_to_grid(exact_change(summing.update, summing.received), bound, SecureSums())
    return torch.cat(
        [uninterrupted[key].flatten() for key in client.recipe.contents(0, client.public_images).example if key != VOTE]
    )


def test_the_noise_is_in_the_vector_before_its_masks(tiny, tmp_path, monkeypatch):
    deployment = noisy(tiny, tmp_path, rounds=1)
    seen = masked_vectors(monkeypatch)
    workers = deployment.workers()
    deployment.coordinator(LocalTransport(workers)).run()
    std = 0.1 / math.sqrt(3) * 2**24
    assert [name for name, _ in seen] == deployment.names
    for name, vector in seen:
        plain = plain_vector(workers[name], 0.1)
        noise = (vector[: len(plain)] - plain).double() / std
        assert plain.any() and (noise != 0).double().mean() > 0.99
        assert ALARM < stats.chi2(len(plain)).cdf(float(noise.square().sum())) < 1 - ALARM
        assert vector[len(plain) :].tolist() == [2**24]  # its weight, and neither logits nor losses


def test_what_a_site_sends_beside_is_its_size_alone(tiny, tmp_path):
    """No score and no loss, whatever it may send: no ledger counts them."""
    deployment = noisy(tiny, tmp_path, sizes=FOUR)
    transport = Liar(deployment.workers())
    progress = deployment.coordinator(transport).run()
    for _, kind, reply in transport.seen:
        header = read_header(reply)
        assert header["facts"].keys() <= ({"size", "tests", "labels"} if kind == "join" else set()), kind
        assert "adds" not in header["sums"]
    assert {read_header(reply)["code"] for *_, reply in transport.seen} == {"ok"}
    assert "evaluate" in {kind for _, kind, _ in transport.seen}  # so that sites have the last model
    assert not [name for row in progress.history for name in row if name.startswith(("train/", "personal/", "global/"))]


def test_a_site_whose_training_broke_adds_noise_alone_and_nobody_sees_it(tiny, tmp_path, monkeypatch):
    deployment = noisy(tiny, tmp_path, rounds=1, sizes=FOUR)
    real = Cohort.finish
    seen = masked_vectors(monkeypatch)

    def broken(self):
        trained = real(self)
        if self.plan.clients == (1,):
            trained.sent[next(iter(trained.sent))][:] = math.nan
            return replace(trained, accepted=torch.zeros(1, dtype=torch.bool))
        return trained

    monkeypatch.setattr(Cohort, "finish", broken)
    transport = Liar(workers := deployment.workers())
    (record,) = deployment.coordinator(transport).run().records
    assert record.summed == deployment.names and record.failed == {}
    replies = {name: read_header(reply) for name, kind, reply in transport.seen if kind == "train"}
    differ = [{key for key in one if one[key] != replies["site0"][key]} for one in replies.values()]
    assert all(results <= {"answers", "sums"} for results in differ)
    assert not plain_vector(workers["site1"], 0.1).any()
    vector = dict(seen)["site1"][:-1].double() / (0.1 / math.sqrt(3) * 2**24)
    assert ALARM < stats.chi2(len(vector)).cdf(float(vector.square().sum())) < 1 - ALARM


# The accounts.


def by_opacus(sums, z=1.0, delta=1e-2):
    accountant = RDPAccountant()
    for _ in range(sums):
        accountant.step(noise_multiplier=z, sample_rate=1.0)
    with np.errstate(divide="ignore"):
        return accountant.get_epsilon(delta) if sums else 0.0


def test_the_accounts_are_those_of_opacus_also_of_who_went_and_of_a_void_round(tiny, tmp_path):
    """Site 1 goes before its masks in round 0. In round 1 two do, after them: the sum is void, and has cost."""
    deployment = noisy(tiny, tmp_path, rounds=3, every=3, sizes=FOUR, privacy={"noise_multiplier": 2.0})

    def lost(name, message, _):
        first = name == "site1" and asks(message, "mask") and read_header(message)["round"] == 0
        second = name in ("site1", "site2") and asks(message, "reveal") and read_header(message)["round"] == 1
        return Failure("malformed") if first or second else None

    workers = deployment.workers()
    coordinator = deployment.coordinator(Troubled(workers, lost), min_sites=3)
    progress = coordinator.run()
    assert [bool(record.void) for record in progress.records] == [False, True, False]
    assert [len(record.masked) for record in progress.records] == [3, 4, 4]
    rounds = {"site0": 3, "site1": 2, "site2": 3, "site3": 3}
    level = coordinator.roster.client_level
    assert level.hidden and level.sums is not None
    assert spent_by_site(workers) == {name: {2.0: times} for name, times in rounds.items()}
    numbers = coordinator.roster.numbers
    result = level.epsilons([numbers[name] for name in rounds])["server"]
    assert result == pytest.approx([by_opacus(times, 2.0) for times in rounds.values()], rel=1e-12)
    shown = [row["privacy/client_epsilon_max"] for row in progress.history]
    assert shown == pytest.approx([by_opacus(times, 2.0) for times in (1, 2, 3)], rel=1e-12)
    assert progress.client_level == level.state_dict()


def test_a_site_stops_itself_when_one_whole_run_is_spent(tiny, tmp_path):
    """A server that begins anew gets no second budget, unless the site allows it."""
    deployment = noisy(tiny, tmp_path, sizes=FOUR)
    workers = deployment.workers()
    deployment.coordinator(LocalTransport(workers)).run()
    assert spent_by_site(workers) == {name: {1.0: 2} for name in deployment.names}
    again = noisy(tiny, tmp_path / "again", sizes=FOUR)
    again.identities = deployment.identities
    coordinator = again.coordinator(LocalTransport(workers), deadline=20.0)
    with pytest.raises(TimeoutError, match="exhausted"):
        coordinator.run()
    assert spent_by_site(workers) == {name: {1.0: 2} for name in deployment.names}
    for worker in workers.values():
        worker.store.close()
    shown = site_status(SimpleNamespace(name="site0", state=deployment.folder / "site0", limits=Limits()))
    epsilon = f"{by_opacus(2, delta=1e-5):.2f}"
    assert (
        f"The entire site, all runs together: ε {epsilon} (the limit is that of one complete run) at δ = 1e-05" in shown
    )
    assert "Single images, all runs together: ε ∞" in shown and "2 rounds had no privacy" in shown
    allowed = by_opacus(3, delta=1e-5)
    workers = deployment.workers(max_site_epsilon=allowed * 1.001)
    (client,) = workers["site0"].clients.values()
    assert "2 rounds spend ε ≤" in format_site_privacy(client)
    third = noisy(tiny, tmp_path / "third", sizes=FOUR)
    with pytest.raises(TimeoutError, match="exhausted"):
        third.coordinator(LocalTransport(workers), deadline=20.0).run()
    assert spent_by_site(workers) == {name: {1.0: 3} for name in deployment.names}  # one more, and not two


def test_a_budget_is_looked_at_again_before_a_vector_leaves(tiny, tmp_path):
    """Two runs are trained while there is room for one more sum, and both ask for it."""
    deployment = noisy(tiny, tmp_path, rounds=1, sizes=FOUR)
    workers = deployment.workers()

    def other_first(name, message, _):
        if asks(message, "shares") and not other.progress.done:
            other.run()

    other = noisy(tiny, tmp_path / "other", rounds=1, sizes=FOUR).coordinator(LocalTransport(workers))
    first = deployment.coordinator(Troubled(workers, other_first), min_sites=3).run().records[0]
    assert other.progress.records[0].summed == deployment.names
    assert first.summed == [] and first.void
    assert spent_by_site(workers) == {name: {1.0: 1} for name in deployment.names}


# Restarts.


@pytest.mark.slow
@pytest.mark.parametrize("step", ["mask", "confirm"])
def test_noise_is_drawn_for_one_vector_and_a_vector_leaves_once(step, tiny, tmp_path, monkeypatch):
    """A worker that dies before it has sent its vector is out; no second vector of the round is ever made for it."""
    deployment = noisy(tiny, tmp_path, sizes=FOUR)
    seen = masked_vectors(monkeypatch)
    workers = deployment.workers()
    first, second = deployment.coordinator(dying(deployment, workers, step), min_sites=3).run().records
    assert ("site1" in first.summed) == (step == "confirm") and second.summed == deployment.names
    vectors = [vector for name, vector in seen if name == "site1"]
    assert len(vectors) == spent_by_site(workers)["site1"][1.0] == (1 if step == "mask" else 2)


def test_a_vector_that_is_made_again_before_it_left_has_other_noise(tiny, tmp_path, monkeypatch):
    """The disk fails as the vector is about to leave. Nothing left, and the next attempt's noise is new."""
    deployment = noisy(tiny, tmp_path, rounds=1, sizes=FOUR)
    seen = masked_vectors(monkeypatch)
    workers = deployment.workers()
    book = workers["site1"].store
    failed = []
    commit = book.commit

    def fails(*arguments):
        if not failed and arguments[0].summing.update_round == 0:
            failed.append(True)
            raise OSError("no space")
        commit(*arguments)

    monkeypatch.setattr(book, "commit", fails)
    transport = Liar(workers)
    deployment.coordinator(transport, min_sites=3).run()
    sent = [read_header(reply)["code"] for name, kind, reply in transport.seen if (name, kind) == ("site1", "mask")]
    assert "ok" not in sent and spent_by_site(workers)["site1"] == {}
    assert len([vector for name, vector in seen if name == "site1"]) == 1


@pytest.mark.slow
def test_a_server_that_was_stopped_in_a_sum_resumes_to_the_same_sum(tiny, tmp_path, monkeypatch):
    deployment = noisy(tiny, tmp_path, rounds=1, sizes=FOUR, privacy=ADAPTIVE)
    seen = masked_vectors(monkeypatch)
    workers = deployment.workers()

    def stops(name, message, _):
        if asks(message, "confirm"):
            raise Stopped

    coordinator = deployment.coordinator(Troubled(workers, stops))
    with pytest.raises(Stopped):
        coordinator.run()
    coordinator.close()
    again = deployment.coordinator(LocalTransport(workers), resume=True)
    (record,) = again.run().records
    assert record.summed == deployment.names and len(seen) == 4
    total = torch.stack([vector for _, vector in seen]).sum(0)
    contents = again.recipe.contents(0, again.public_images)
    change = contents.decode(total.numpy().view(np.uint64), 4).mean
    start = again.recipe.template.initial
    expected = {key: (value.double() + change[key]).to(value.dtype) for key, value in start.items()}
    assert equal(state(again), expected)


# What is rejected.


def test_sites_that_are_told_different_norms_are_in_no_sum(tiny, tmp_path):
    """Of a site that clips to a larger norm than the others the noise would be too little."""
    deployment = noisy(tiny, tmp_path, rounds=1, sizes=FOUR, privacy=ADAPTIVE)

    def lie(name, message):
        return change_message(message, norm=50.0) if name == "site1" and asks(message, "train") else message

    record = deployment.coordinator(Liar(deployment.workers(), lie), min_sites=3).run().records[0]
    assert "site1" not in record.summed and len(record.summed) == 3


def with_norm(message, norm):
    return change_message(message, norm=norm) if asks(message, "train") else message


@pytest.mark.every(3)
@pytest.mark.parametrize("norm", [1e-9, 0.0, 1e12])
def test_a_norm_that_the_noise_is_lost_in_is_rejected_by_sites(norm, tiny, tmp_path):
    deployment = noisy(tiny, tmp_path, rounds=1, sizes=FOUR, privacy=ADAPTIVE)
    transport = Liar(deployment.workers(), lambda _, message: with_norm(message, norm))
    with pytest.raises(TimeoutError, match="malformed"):
        deployment.coordinator(transport, deadline=20.0).run()
    assert not any(kind == "mask" for _, kind, _ in transport.seen)


def test_what_a_fixed_norm_is_the_server_does_not_say(tiny, tmp_path, monkeypatch):
    deployment = noisy(tiny, tmp_path, rounds=1)
    seen = masked_vectors(monkeypatch)
    deployment.coordinator(Liar(workers := deployment.workers(), lambda _, message: with_norm(message, 1e6))).run()
    for name, vector in seen:
        plain = plain_vector(workers[name], 0.1)
        assert (vector[: len(plain)] - plain).double().std() < 0.1 * 2**24


@pytest.mark.parametrize("side", ["server", "site"])
@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        ("perada", {}, "PerAda with distillation: the teachers are single clients' updates"),
        ("fedavg", {"loop": {"weighting": "samples"}}, "weighting='samples'"),
        ("fedavg", {"privacy": {"clipping": "adaptive"}}, "requires count_noise in a deployment"),
        ("fedavg", {"privacy": {"max_norm": 1e-7}}, r"rounding requires at least 4; set secure_sums\.fraction_bits=27"),
    ],
)
def test_what_cannot_be_private_is_rejected_at_both_sides(side, algorithm, options, message, tiny, tmp_path):
    deployment = noisy(tiny, tmp_path, algorithm, **options)
    with pytest.raises(ValueError, match=message):
        deployment.worker(0) if side == "site" else deployment.coordinator(LocalTransport({}))


def test_a_limit_of_the_site_needs_a_recipe_that_keeps_it(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"max_site_epsilon=3\.0 .*without"):
        parties(tiny, tmp_path).worker(0, max_site_epsilon=3.0)


def test_an_order_with_a_norm_that_is_no_number_is_rejected():
    for norm in (-1.0, math.inf, math.nan, "1"):
        with pytest.raises((ValueError, TypeError)):
            Request("train", "0" * 32, "0" * 64, norm=norm)
    assert read_header(pack(Request("train", "0" * 32, "0" * 64)))["norm"] == 0.0
