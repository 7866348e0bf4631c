# SPDX-License-Identifier: Apache-2.0
"""Client-level privacy against plain loops, closed forms, scipy and Opacus's accountant."""

import json
import math
from itertools import product
from typing import ClassVar

import numpy as np
import pytest
import torch
from opacus.accountants import RDPAccountant
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import (
    FedAvg,
    FedBE,
    FedEnsemble,
    FedExLoRA,
    FFALoRA,
    FLoRA,
    PerAda,
    Scaffold,
    ServerStep,
    TensorNames,
    make_algorithm,
)
from perada.core.rounds import RoundPlan
from perada.core.states import expand
from perada.privacy import ClientPrivacy, clipping
from perada.privacy.client_level import (
    ClientLevel,
    clip_updates,
    floor_variances,
    noisy_share,
    noisy_updates,
    split_noise,
)
from perada.privacy.dry_run_checks import check_client_level
from perada.server import Updates, client_weights
from perada.server.rules import SERVER_RULES, FedAvgM, Mean, Median, ServerRule, TrimmedMean, make_rule
from tests.methods import NAMED, make_method
from tests.options import sections
from tests.rejections import rejects

from ..algorithms.problems import MERGING, QUIET

SHAPES = {"head.weight": (4, 3), "norm.running_var": (3,), "scale": ()}
COUNTER = "norm.num_batches_tracked"
ALARM = 1e-4  # chance of a false alarm of a statistical test; a std that is 3 % off is seen, at 20 000 values


def random(seed):
    return torch.Generator().manual_seed(seed)


def problem(seed=0, clients=5, spread=3.0):
    """What C clients received, the same for all, and updates at distances from 1/spread² to spread² of it."""
    source = random(seed)
    received = {key: torch.randn(shape, generator=source, dtype=torch.float64) for key, shape in SHAPES.items()}
    received = expand(received | {COUNTER: torch.tensor(7)}, clients)
    sizes = spread ** torch.linspace(-2, 2, clients, dtype=torch.float64)
    updates = {COUNTER: torch.arange(clients)}
    for key, shape in SHAPES.items():
        change = torch.randn(clients, *shape, generator=source, dtype=torch.float64)
        updates[key] = received[key] + change * sizes.view(-1, *[1] * len(shape))
    return updates, received


def change(updates, received, client):
    """One client's change as a flat numpy vector."""
    return np.concatenate([(updates[key][client] - received[key][client]).numpy().ravel() for key in SHAPES])


def flat_sum(clipped):
    return np.concatenate([clipped[key].sum(0).numpy().ravel() for key in SHAPES])


def sources(clients, seed=0):
    return [random(1000 * seed + client) for client in range(clients)]


def test_clipping_equals_a_plain_loop():
    updates, received = problem()
    clipped, norms = clip_updates(updates, received, 1.5)
    assert set(clipped) == set(SHAPES)
    shortened = 0
    for client in range(5):
        delta = change(updates, received, client)
        norm = math.sqrt(sum(float(value) ** 2 for value in delta))
        assert norms[client].item() == pytest.approx(norm, rel=1e-12)
        shortened += norm > 1.5
        expected = delta * (1.5 / norm if norm > 1.5 else 1.0)
        actual = np.concatenate([clipped[key][client].numpy().ravel() for key in SHAPES])
        assert actual == pytest.approx(expected, rel=1e-12)
    assert 0 < shortened < 5


def test_a_client_moves_the_sum_by_the_norm_at_most():
    """Taking a client out moves the sum by S at most; exchanging it for another one by 2 S, and by more than S."""
    largest_out = largest_exchanged = 0.0
    for seed in range(200):
        updates, received = problem(seed, clients=4)
        other = {key: value.clone() for key, value in updates.items()}
        absent = {key: value.clone() for key, value in updates.items()}
        client = seed % 4
        for key in SHAPES:
            absent[key][client] = received[key][client]
            far = torch.randn(SHAPES[key], generator=random(seed + 7), dtype=torch.float64)
            other[key][client] = received[key][client] - 5 * (updates[key][client] - received[key][client]) + far
        sums = [flat_sum(clip_updates(u, received, 0.8)[0]) for u in (updates, absent, other)]
        largest_out = max(largest_out, np.linalg.norm(sums[0] - sums[1]))
        largest_exchanged = max(largest_exchanged, np.linalg.norm(sums[0] - sums[2]))
    assert 0.79 < largest_out <= 0.8 * (1 + 1e-12)
    assert 1.4 < largest_exchanged <= 1.6 * (1 + 1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_client_that_is_not_finite_sends_no_change(bad):
    updates, received = problem()
    updates["scale"][2] = bad
    clipped, norms = clip_updates(updates, received, 1.5)
    assert all(not clipped[key][2].any() for key in SHAPES)
    assert norms.isnan().tolist() == [client == 2 for client in range(5)]
    noisy = privatize(updates, received, 1.5, 1.0, sources(5))
    alone = {
        key: torch.where(torch.arange(5).view(-1, *[1] * (v.dim() - 1)) == 2, received[key], v)
        for key, v in updates.items()
    }
    for key, value in privatize(alone, received, 1.5, 1.0, sources(5)).items():
        torch.testing.assert_close(noisy[key], value, rtol=0, atol=0)


def test_a_change_too_large_for_its_number_format_is_no_change():
    received = {"w": torch.tensor([[-3e38], [0.0]])}
    clipped, _ = clip_updates({"w": torch.tensor([[3e38], [3e38]])}, received, 2.0)
    assert clipped["w"].flatten().tolist() == [0.0, pytest.approx(2.0, rel=1e-6)]


def test_without_noise_and_clipping_only_counters_change():
    updates, received = problem()
    result = privatize(updates, received, 1e6, 0.0, sources(5))
    assert list(result) == list(updates)
    for key in SHAPES:
        torch.testing.assert_close(result[key], updates[key], rtol=1e-12, atol=1e-12)
    assert result[COUNTER].tolist() == [7] * 5


def privatize(updates, received, max_norm, noise_multiplier, generators):
    """One round's updates with a share of the noise in each row, so that their sum has all of it."""
    clipped, norms = clip_updates(updates, received, max_norm)
    return noisy_updates(updates, received, clipped, max_norm * noise_multiplier / math.sqrt(len(norms)), generators)


def count_round(level, updates, received, round, clients):
    """A round, counted and made private."""
    level.spend(level.round_costs(RoundPlan(round, tuple(clients), ())))
    return level.privatized(Updates(updates), received, round, clients)


def test_a_target_needs_a_number_of_rounds():
    with pytest.raises(ValueError, match="target_epsilon=3"):
        ClientLevel(ClientPrivacy(target_epsilon=3.0), 0, 5, rounds=0)


@pytest.mark.parametrize("later", [0.5, 2.0])
def test_the_record_states_the_least_noise_of_any_round(later):
    level = ClientLevel(ClientPrivacy(1.0), 0, 5)
    received = {"w": torch.zeros(5, 2)}
    count_round(level, received, received, 0, range(5))
    level.noise_multiplier = later
    assert level.record(5)["noise_multiplier"] == min(1.0, later)


def noise_of(result, received, clipped):
    return {key: result[key] - received[key] - clipped[key] for key in clipped}


@pytest.mark.parametrize("secure", [False, True])
def test_the_sum_has_the_stated_noise(secure, monkeypatch):
    """The variances of the summed noise and of a share follow their chi-square distributions, with a fixed seed."""
    if secure:  # the cryptographic source has no seed: a stand-in, which records how it was called
        source = random(11)
        calls = []

        def stand_in(like):
            calls.append((tuple(like.shape), like.dtype))
            return torch.randn(like.shape, dtype=torch.float64, generator=source)

        monkeypatch.setattr(clipping, "secure_noise", stand_in)
    clients = 8
    values = 20_000
    std = 0.5 * 3.0
    received = {"w": torch.zeros(clients, values, dtype=torch.float64)}
    updates = {"w": torch.randn(clients, values, generator=random(5), dtype=torch.float64)}
    clipped, _ = clip_updates(updates, received, 0.5)
    result = privatize(updates, received, 0.5, 3.0, None if secure else sources(clients, 3))
    noise = noise_of(result, received, clipped)["w"]
    for sample, expected in [(noise.sum(0), std), (noise[3], std / math.sqrt(clients))]:
        statistic = float((sample / expected).square().sum())
        assert ALARM < stats.chi2(values).cdf(statistic) < 1 - ALARM
        assert stats.kstest(sample.numpy() / expected, "norm").pvalue > ALARM
    correlations = np.corrcoef(noise.numpy())[~np.eye(clients, dtype=bool)]
    assert np.abs(correlations).max() < 4.5 / math.sqrt(values)
    if secure:
        assert calls == [((values,), torch.float64)] * clients


def test_real_secure_noise_has_no_seed():
    updates, received = problem()
    first, second = (privatize(updates, received, 1.0, 1.0, None) for _ in range(2))
    assert all(bool((first[key] != second[key]).all()) for key in SHAPES)
    drawn = [count_round(ClientLevel(ClientPrivacy(1.0), 0, 5), updates, received, 0, range(5)) for _ in range(2)]
    assert all(bool((drawn[0][key] != drawn[1][key]).all()) for key in SHAPES)


@pytest.mark.parametrize("count_noise", [0.4, 2.0, 50.0])
def test_split_noise_solves_its_equation(count_noise):
    noise = split_noise(0.7, count_noise)
    assert 1 / noise**2 + 1 / (2 * count_noise) ** 2 == pytest.approx(1 / 0.7**2, rel=1e-12)
    assert noise > 0.7


def test_both_queries_together_cost_the_total():
    """Two Gaussian queries in one round compose to the one that the ledger counts (Rényi costs add up)."""
    z = 1.2
    count_noise = 2.0
    rounds = 9
    two = RDPAccountant()
    one = RDPAccountant()
    for _ in range(rounds):
        two.step(noise_multiplier=split_noise(z, count_noise), sample_rate=1.0)
        two.step(noise_multiplier=2 * count_noise, sample_rate=1.0)  # a vote is ±1/2
        one.step(noise_multiplier=z, sample_rate=1.0)
    with np.errstate(divide="ignore"):
        assert two.get_epsilon(1e-5) == pytest.approx(one.get_epsilon(1e-5), rel=1e-9)


def test_too_little_count_noise_is_rejected():
    for count_noise in (0.5, 0.2, 0.0):
        with pytest.raises(ValueError, match=r"count_noise=.*more than 0\.5 .*clipping='fixed'"):
            split_noise(1.0, count_noise)
    adaptive = ClientPrivacy(1.0, clipping="adaptive")
    ClientLevel(adaptive, 0, num_clients=11)  # σ_b is a twentieth of the clients
    with rejects("count_noise", 0.5):
        ClientLevel(adaptive, 0, num_clients=10)
    ClientLevel(ClientPrivacy(1.0), 0, num_clients=1)


def test_noisy_share():
    norms = torch.tensor([0.1, 1.0, 1.1, math.nan, 9.0], dtype=torch.float64)
    assert noisy_share(norms, 1.0, 0.0, None) == pytest.approx((2 + 0.5) / 5)
    source = random(3)
    shares = np.array([noisy_share(norms, 1.0, 1.5, source) for _ in range(4000)])
    deviations = (shares - 0.5) * 5 / 1.5  # two short, two long, one absent
    assert ALARM < stats.chi2(4000).cdf((deviations**2).sum()) < 1 - ALARM


def test_the_norm_follows_the_quantile():
    """Clients' norms are log-normal: S ends near the quantile of that distribution, from above and from below."""
    source = random(1)
    target = float(stats.lognorm(0.5, scale=4.0).ppf(0.3))
    for start in (0.05, 300.0):
        norm = start
        late = []
        for step in range(300):
            norms = (0.5 * torch.randn(100, generator=source, dtype=torch.float64)).exp() * 4.0
            norm *= math.exp(-0.2 * (noisy_share(norms, norm, 5.0, source) - 0.3))
            late += [norm] * (step >= 200)
        assert np.mean(late) == pytest.approx(target, rel=0.03)


def test_adaptive_rounds_equal_a_plain_loop():
    """Without noise: S by hand from the norms that a plain loop finds."""
    level = ClientLevel(ClientPrivacy(0.0, clipping="adaptive", max_norm=2.0, quantile=0.8, clip_lr=0.5), 0, 5)
    norm = 2.0
    for round in range(6):
        updates, received = problem(round)
        result = count_round(level, updates, received, round, range(5))
        lengths = [np.linalg.norm(change(updates, received, client)) for client in range(5)]
        for client, length in enumerate(lengths):
            expected = change(updates, received, client) * min(1, norm / length)
            assert change(result, received, client) == pytest.approx(expected, rel=1e-12)
        norm *= math.exp(-0.5 * (sum(length <= norm for length in lengths) / 5 - 0.8))
        assert level.norm == pytest.approx(norm, rel=1e-12)
    assert norm != 2.0
    assert level.metrics() == {"privacy/client_norm": level.norm, "privacy/client_epsilon_max": math.inf}


def test_the_noise_of_the_count_is_drawn_anew_unless_it_is_a_test():
    """Of 8 clients of one length half of S all are short, so that S moves by the noise of the count alone."""
    received = {"w": torch.zeros(8, 4, dtype=torch.float64)}
    updates = {"w": received["w"] + 0.25}
    norms = {}
    for secure in (True, False):
        options = ClientPrivacy(1.0, clipping="adaptive", count_noise=2.0, secure_rng=secure)
        levels = [ClientLevel(options, 4, 8) for _ in range(2)]
        for level in levels:
            count_round(level, updates, received, 0, range(8))
        norms[secure] = [level.norm for level in levels]
    assert norms[False][0] == norms[False][1]
    assert norms[True][0] != norms[True][1]


def test_the_change_is_not_rounded_before_the_noise_is_in_it():
    """Near 10⁵ the places of float32 are 1/128 apart, and the clipped change is less than half of that."""
    values = 40_000
    rate = 0.05
    std = 0.05
    received = {"w": torch.full((1, values), 1e5)}
    updates = {"w": received["w"] + 0.0625}
    bound = rate * 0.0625 * values**0.5
    noisy = privatize(updates, received, bound, std / bound, None)["w"] - received["w"]
    assert float(noisy.double().mean()) == pytest.approx(rate * 0.0625, abs=6 * std / values**0.5)


def test_adaptive_noise_is_the_larger_one():
    """The updates' noise is that of z_Δ, not of z."""
    clients = 16
    values = 20_000
    received = {"w": torch.zeros(clients, values, dtype=torch.float64)}
    options = ClientPrivacy(1.0, clipping="adaptive", count_noise=0.6, max_norm=0.5, secure_rng=False)
    result = count_round(ClientLevel(options, 4, clients), received, received, 0, range(clients))
    std = 0.5 * (1 - 1 / 1.2**2) ** -0.5
    statistic = float((result["w"].sum(0) / std).square().sum())
    assert ALARM < stats.chi2(values).cdf(statistic) < 1 - ALARM


def test_epsilon_equals_opacus_on_the_same_history():
    level = ClientLevel(ClientPrivacy(2.0, delta=1e-4), 0, 2)
    updates, received = problem(clients=2)
    for round, clients in enumerate([(0, 1), (0, 2), (1, 0)]):
        count_round(level, updates, received, round, clients)
    expected = {}
    for client, rounds in {0: 3, 1: 2, 2: 1}.items():
        opacus = RDPAccountant()
        for _ in range(rounds):
            opacus.step(noise_multiplier=2.0, sample_rate=1.0)
        with np.errstate(divide="ignore"):
            expected[client] = opacus.get_epsilon(1e-4)
    spent = level.epsilons([0, 1, 2, 9])["server"]
    assert spent == pytest.approx([*expected.values(), 0.0], rel=1e-12)
    assert level.metrics()["privacy/client_epsilon_max"] == spent[0]


def test_noise_depends_on_seed_round_and_client_alone():
    updates, received = problem()

    def noise(seed=0, round=0, clients=range(5)):
        options = ClientPrivacy(1.0, secure_rng=False)
        result = count_round(ClientLevel(options, seed, 5), updates, received, round, clients)
        return noise_of(result, received, clip_updates(updates, received, 1.0)[0])["head.weight"]

    assert torch.equal(noise(), noise())
    assert not (noise() == noise(seed=1)).any()
    assert not (noise() == noise(round=1)).any()
    moved = noise(clients=[4, 3, 2, 1, 0])
    torch.testing.assert_close(moved.flip(0), noise(), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_going_on_from_a_checkpoint():
    options = ClientPrivacy(1.0, clipping="adaptive", count_noise=1.0, secure_rng=False)
    straight, first = (ClientLevel(options, 3, 5) for _ in range(2))
    uninterrupted_counts = [count_round(straight, *problem(round), round, range(5)) for round in range(4)]
    for round in range(2):
        count_round(first, *problem(round), round, range(5))
    resumed = ClientLevel(options, 3, 5)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for round in (2, 3):
        for key, value in count_round(resumed, *problem(round), round, range(5)).items():
            assert torch.equal(value, uninterrupted_counts[round][key])
    assert resumed.state_dict() == straight.state_dict()
    assert resumed.norm != options.max_norm
    uninterrupted_counts = first.state_dict()
    less = [
        {name: value for name, value in uninterrupted_counts.items() if name != part} for part in uninterrupted_counts
    ]
    for state in [*less, uninterrupted_counts | {"other": {}}]:
        with pytest.raises(ValueError, match=r"\[.*\], got"):
            resumed.load_state_dict(state)
    with pytest.raises(ValueError, match="server and release"):
        resumed.load_state_dict(uninterrupted_counts | {"norm": 9.0, "ledgers": {}})
    assert resumed.state_dict() == straight.state_dict()


def test_what_cannot_be_used_is_rejected():
    updates, received = problem()
    with rejects("max_norm", 0.0):
        clip_updates(updates, received, 0.0)
    with pytest.raises(ValueError, match="'scale' is sent"):
        clip_updates(updates, {key: v for key, v in received.items() if key != "scale"}, 1.0)
    half = {"w": torch.zeros(2, 3, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match=r"bfloat16.*float32"):
        clip_updates(half, half, 1.0)
    counters = {COUNTER: torch.arange(5)}
    with pytest.raises(ValueError, match="no floating-point"):
        clip_updates(counters, counters, 1.0)
    with rejects("std", -0.4472135954999579):
        privatize(updates, received, 1.0, -1.0, None)
    with pytest.raises(ValueError, match="clients, 5"):
        privatize(updates, received, 1.0, 1.0, sources(4))
    with pytest.raises(ValueError, match="two clients"):
        privatize(updates, received, 1.0, 1.0, [random(0)] * 5)


def test_variances_stay_at_least_zero():
    state = {"n.running_var": torch.tensor([-1.0, 2.0]), "n.weight": torch.tensor([-1.0]), COUNTER: torch.tensor(3)}
    assert {key: value.tolist() for key, value in floor_variances(state).items()} == {
        "n.running_var": [0.0, 2.0],
        "n.weight": [-1.0],
        COUNTER: 3,
    }


def test_noise_leaves_no_negative_variance_in_a_model():
    """A network normalises by its square root: a model with a negative one predicts NaN."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16, 2))
    parts = [TensorDataset(torch.randn(8, 1, 6, 6), torch.arange(8) % 2) for _ in range(4)]
    options = {"adapter": "full", "algorithm": "fedavg", "rounds": 1, "local_steps": 1, "batch_size": 4, **QUIET}
    level = ClientPrivacy(noise_multiplier=50.0, max_norm=1.0, secure_rng=False)
    run = perada.finetune(net, perada.FederatedData(parts, parts), **sections(client_privacy=level, **options))
    variances = run.state("global")["1.running_var"]
    assert (variances == 0).any()  # noise of 12 on variances of 1: some were below
    assert (variances >= 0).all()
    assert run.global_model()(torch.randn(2, 1, 6, 6)).isfinite().all()


# Every algorithm and every rule: it passes the check if and only if the server's step is a function of the mean.

TENSOR_NAMES = TensorNames(
    ("a", "b", "mean"), ("a", "b"), frozenset({"b"}), frozenset({"mean"}), frozenset({"a"}), frozenset({"a"})
)


def server_step(algorithm, rule, updates, distils):
    """The next global state, the server's tensors and the global models from ``updates`` of six clients."""

    def distill(student, teachers, average_from=None, previous=None, clients_of_teachers=None):
        rows = teachers.gathered_all() if isinstance(teachers, Updates) else teachers
        bent = {key: value + rows[key].tanh().mean(0) for key, value in student.items()}
        return bent if distils else student

    previous = {key: torch.full((3,), 0.3, dtype=torch.float64) for key in TENSOR_NAMES.keys}
    updates = dict(updates)
    if isinstance(algorithm, FedEnsemble):
        previous, updates["mode"] = expand(previous, 1), torch.zeros(6, dtype=torch.long)
    if isinstance(algorithm, Scaffold):
        updates |= {f"control/{key}": updates[key].flip(1) for key in TENSOR_NAMES.parameters}
    weights = client_weights("uniform", [1] * 6)
    turn = 0, tuple(range(6)), 9, TENSOR_NAMES, 0, previous, Updates(updates), weights, {}

    def predict(previous, models, *_):
        rows = models.gathered_all() if isinstance(models, Updates) else models
        return rows["a"][:, None].softmax(-1), torch.eye(3)[:1]

    step = ServerStep(*turn, rule, distill, predict)
    state = algorithm.server_step(step)
    members = algorithm.members(previous | state, step.state)
    tensors = [state, *(step.state[name] for name in sorted(step.state)), members]
    return [tensor for part in tensors for _, tensor in sorted(part.items())]


def only_the_mean_counts(algorithm, rule, distils):
    """Whether two sets of updates with the same mean lead to the same, in everything that the server has afterwards."""
    a, b = (
        {key: torch.randn(6, 3, generator=random(s), dtype=torch.float64) for key in TENSOR_NAMES.keys} for s in (1, 2)
    )
    b = {key: value - value.mean(0) + a[key].mean(0) for key, value in b.items()}
    results = [server_step(algorithm, rule, updates, distils) for updates in (a, b)]
    same_shapes = len(results[0]) == len(results[1])
    return same_shapes and all(
        torch.allclose(one, other, rtol=1e-9, atol=1e-9) for one, other in zip(*results, strict=True)
    )


def accepted(algorithm, rule, distils):
    try:
        check_client_level(algorithm, rule, "uniform", distils)
    except ValueError as error:
        assert "client_privacy does not support" in str(error)
        return False
    return True


def test_algorithms_pass_if_only_the_mean_counts():
    """Beside that: what a client keeps follows from its own images and from what it received, which is private.

    So taking one client out changes the others only through what they receive. That holds of each algorithm's `close`:
    - FedDyn's clients move their h by their own unclipped change, and the server its h by the sum of the noisy rows.
    - Scaffold's clients move their c_i by their own gradients, and send c with its change: clipped together with θ's.
    - MTL's clients keep v_m as trained, and send v̄ with its change: clipped like any other, relative to v̄.
    - pFedMe keeps θ, PerAda, Ditto and APFL their personal states (APFL also α), FedBN, LG-FedAvg, FedPer, FedRep,
      FedAlt and FedSim their part; none of them is sent.
    - FedAvg with fine-tuning sends nothing after the last round.
    - FedSA-LoRA's clients keep their B and head. FFA-LoRA and HetLoRA keep what their base does, RoLoRA nothing.
    - FedDPA's clients keep their own branch and head. RestOfWorld's keep all that they train, and send v̄ as MTL's do.
    """
    for name in NAMED.keys() - {"standalone", *MERGING}:
        algorithm = make_method(name, modes=1) if name == "fed_ensemble" else make_method(name)
        for rule, distils in product((Mean(), FedAvgM()), (False, True)):
            expected = only_the_mean_counts(algorithm, rule, distils)
            assert accepted(algorithm, rule, distils) == expected, (name, rule, distils)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", [name for name in SERVER_RULES if not make_rule(name).needs_factors])
def test_rules_pass_if_only_the_mean_counts(name):
    rule = TrimmedMean(0.2) if name == "trimmed_mean" else make_rule(name)
    assert accepted(FedAvg(), rule, False) == only_the_mean_counts(FedAvg(), rule, False)
    assert not accepted(FedAvg(), FedAvgM(aggregate=Median()), False)


def test_what_is_not_private_is_rejected_with_a_remedy():
    cases = [
        (FedAvg(), "samples", "weighting='samples'.*choose weighting='uniform'"),
        (
            PerAda(),
            "uniform",
            r"PerAda.*distill=False.*distillation.steps=0",
        ),
        (FedBE(moments=True), "uniform", r"FedBE.*moments=True.*FedAvg"),
        (FFALoRA(FedBE(moments=True, distill=False)), "uniform", r"FedBE\(moments=True\)"),
        (FedBE(distill=False), "uniform", "single clients' updates and models drawn from them; choose FedAvg"),
        (
            FFALoRA(FedBE(distill=False)),
            "uniform",
            r"FedBE.*distill=False",
        ),
        (FFALoRA(PerAda()), "uniform", r"teachers"),
        (FedExLoRA(), "uniform", r"merges the products B·A.*choose FedAvg, or FFALoRA, or protect single images"),
        (FLoRA(), "uniform", "merges the products B·A"),
        (FedEnsemble(FedExLoRA(), modes=1), "uniform", "merges the products B·A"),
        (FedEnsemble(modes=3), "uniform", r"FedEnsemble\(modes=3\).*set modes=1"),
        (FedEnsemble(PerAda(), modes=1), "uniform", r"teachers"),
        (make_algorithm("standalone"), "uniform", "send nothing; leave client_privacy out"),
    ]
    for algorithm, weighting, message in cases:
        with pytest.raises(ValueError, match=message):
            check_client_level(algorithm, Mean(), weighting, True)
    with pytest.raises(ValueError, match=r"Median.*'mean'"):
        check_client_level(FedAvg(), Median(), "uniform", False)
    check_client_level(PerAda(), Mean(), "uniform", False)


class Krum(ServerRule):
    """The update that is closest to the others (Blanchard et al., NeurIPS 2017): one client's, and hardly any noise."""

    def __call__(self, aggregation):
        rows = torch.cat([value.flatten(1) for value in aggregation.updates.gathered_all().values()], 1)
        chosen = int(torch.cdist(rows, rows).sum(1).argmin())
        return {key: value[chosen] for key, value in aggregation.updates.gathered_all().items()}


class ClaimingKrum(Krum):
    function_of_mean = True


class KrumForTheMean(Mean):
    def __call__(self, aggregation):
        return Krum()(aggregation)


class KrumAfterMomentum(FedAvgM):
    def _aggregate_inner(self, aggregation):
        return Krum()(aggregation)


class Late(Mean):
    """The mean, but in the third round."""

    def __call__(self, aggregation):
        return Krum()(aggregation) if aggregation.round > 1 else super().__call__(aggregation)


class Half(ServerRule):
    """A function of the mean that says so."""

    function_of_mean = True

    def __call__(self, aggregation):
        mean = Mean()(aggregation)
        return {key: (aggregation.previous[key] + value) / 2 for key, value in mean.items()}


class Unsaid(Half):
    """A function of the mean that does not say so."""

    function_of_mean = False


class Failing(Half):
    def __call__(self, aggregation):
        return {"head": aggregation.updates.gathered("head").mean(0)}


@pytest.mark.parametrize("make", [Krum, ClaimingKrum, KrumForTheMean, KrumAfterMomentum, Late, Unsaid])
def test_a_rule_of_ones_own_is_rejected_unless_it_says_and_shows_that_it_takes_the_mean_alone(make):
    assert not accepted(FedAvg(), make(), False)
    assert not accepted(FedAvg(), FedAvgM(aggregate=make()), False)


def test_a_rule_of_ones_own_on_the_mean():
    assert accepted(FedAvg(), Half(), False)
    assert accepted(FedAvg(), FedAvgM(aggregate=Half()), False)
    with pytest.raises(ValueError, match=r"Failing .*KeyError: 'head'"):
        check_client_level(FedAvg(), Failing(), "uniform", False)


class TakesOneClient(FedAvg):
    """Reads single rows in its own server step, which no attribute tells."""

    seen: ClassVar = []

    def server_step(self, server):
        self.seen.append((server.previous, {key: server.updates.gathered(key).clone() for key in server.updates.names}))
        return {key: server.updates.gathered(key)[0] for key in server.updates.names}


@pytest.mark.parametrize("options", [{}, {"clipping": "adaptive", "count_noise": 9.0}], ids=["fixed", "adaptive"])
def test_the_servers_step_sees_the_noisy_mean_in_every_row(options):
    """And that has the noise z · S / C, not the z · S / √C of a row. No client has a gradient."""
    clients = 4
    values = 20_000
    z = 3.0
    bound = 0.5
    dark = TensorDataset(torch.zeros(3, 1, 1, values // 2), torch.arange(3) % 2)
    TakesOneClient.seen.clear()
    run = perada.finetune(
        nn.Sequential(nn.Flatten(), nn.Linear(values // 2, 2, bias=False)),
        perada.FederatedData([dark] * clients, num_classes=2),
        **sections(
            adapter="full",
            algorithm=TakesOneClient(),
            rounds=1,
            client_privacy={
                "noise_multiplier": z,
                "max_norm": bound,
                "delta": 1e-3,
                **options,
            },
            **QUIET,
        ),
    )
    *_, (received, updates) = TakesOneClient.seen  # after what the trial at set-up has seen
    (key,) = updates
    assert len(updates[key]) == clients
    assert all(torch.equal(updates[key][0], row) for row in updates[key])
    assert torch.equal(run.state("global")[key], updates[key][0])
    std = bound / clients * (split_noise(z, 9.0) if options else z)
    noise = (updates[key][0] - received[key]).flatten() / std
    statistic = float(noise.square().sum())
    assert 1e-6 < stats.chi2(values).cdf(statistic) < 1 - 1e-6
