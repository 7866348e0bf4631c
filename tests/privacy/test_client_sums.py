# SPDX-License-Identifier: Apache-2.0
"""Privacy of whole clients in secure sums, against whole numbers of Python's, closed forms and Opacus's accountant."""

import json
import math
from fractions import Fraction
from typing import ClassVar

import numpy as np
import pytest
import torch
from opacus.accountants import RDPAccountant
from scipy import integrate, stats
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import FedAvg
from perada.core.rounds import sample_cohort
from perada.core.seeding import generator
from perada.privacy import ClientPrivacy
from perada.privacy.client_level import ClientLevel, noisy_share, split_noise
from perada.privacy.client_sums import MAX_DRAW, MIN_GRID_STEPS, VOTE, clip_to_grid, exact_change, integer_noise
from perada.privacy.sampling import secure_noise
from perada.results.cards import check_record, privacy_card
from perada.server import SecureSums, Updates
from tests.options import sections
from tests.rejections import rejects

from ..algorithms.problems import QUIET, finetune
from .test_client_level import ALARM, COUNTER, SHAPES, change, problem

SUMS = SecureSums()
UNIT = 2.0**-24


def level_of(z=1.0, clients=5, secure_rng=False, sums=SUMS, seed=4, **options):
    return ClientLevel(ClientPrivacy(z, secure_rng=secure_rng, **options), seed, clients, secure_sums=sums)


@pytest.mark.parametrize(("length", "vote"), [(0.5, 0.5), (1.0, 0.5), (1.0 + 2**-20, -0.5), (3.0, -0.5)])
def test_a_change_of_just_the_norm_counts_as_short(length, vote):
    """In a secure sum as without one (Andrew et al. 2021, section 2.2: b = 1 if the norm is at most S)."""
    sums = SecureSums(min_sites=3)
    level = ClientLevel(ClientPrivacy(0.0, clipping="adaptive", max_norm=1.0), 0, 3, secure_sums=sums)
    contributed = level.contribution({"w": torch.tensor([length])}, {"w": torch.zeros(1)}, 3, 0, 0)
    assert contributed[VOTE] == sums.to_integers(torch.tensor(vote), 3)
    assert noisy_share(torch.tensor([length], dtype=torch.float64), 1.0, 0.0, None) == vote + 0.5


def test_a_grid_must_be_fine_enough_for_the_largest_round():
    """Of all clients, of whom each adds less noise the more there are, and not of the fewest sites of a sum."""
    sums = SecureSums(min_sites=3, fraction_bits=8)
    ClientLevel(ClientPrivacy(1.0), 0, 1000, secure_sums=sums)
    with pytest.raises(ValueError, match="one of 100000 clients"):
        ClientLevel(ClientPrivacy(1.0), 0, 100_000, secure_sums=sums)


def of_client(stack, client):
    return {key: value[client] for key, value in stack.items()}


def integers(clipped):
    return [int(value) for key in clipped for value in clipped[key].flatten()]


# A change is never longer than S.


@pytest.mark.parametrize("bits", [8, 24, 40])
def test_the_norm_of_what_is_added_is_at_most_s(bits):
    """In exact arithmetic; also where a change is as long as S but for the last bit, or all in single precision."""
    sums = SecureSums(fraction_bits=bits)
    source = torch.Generator().manual_seed(bits)
    close = 0
    for trial in range(72):
        numbers = (1, 7, 2000)[trial % 3]
        kind = (torch.float32, torch.float64)[trial % 2]
        delta = torch.randn(numbers, generator=source, dtype=kind).double() * 10.0 ** (trial % 5 - 2)
        bound = (0.7, 1.0, 3.3)[trial % 3]
        if trial % 4 == 0:  # of length S as far as floating-point numbers can say
            delta = delta / torch.linalg.vector_norm(delta) * bound
        clipped, norm = clip_to_grid({"a": delta[:3], "b": delta[3:]}, bound, sums)
        length = sum(value**2 for value in integers(clipped))
        assert length <= Fraction(bound) ** 2 * 4**bits
        assert norm == pytest.approx(math.sqrt(math.fsum(float(one) ** 2 for one in delta)), rel=1e-12)
        close += length > (Fraction(bound) ** 2 * 4**bits) * Fraction(9, 10)
    assert close > 10  # and not less than it need be


def test_numbers_are_rounded_towards_zero():
    """Rounded to the nearest, 0.75 of a multiple would become one, and the norm a third longer than S."""
    delta = torch.tensor([0.75, -0.75, 2.75, -2.75, 5.0, -0.25]).double() * UNIT
    clipped, norm = clip_to_grid({"w": delta}, float(torch.linalg.vector_norm(delta)) * 2, SUMS)
    assert clipped["w"].tolist() == [0, 0, 2, -2, 5, 0]
    many = torch.full((40_000,), 0.75 * UNIT).double()
    assert not clip_to_grid({"w": many}, 0.75 * UNIT * 200, SUMS)[0]["w"].any()
    assert norm > 0


def test_clipping_equals_a_plain_loop():
    updates, received = problem()
    shortened = 0
    for client in range(5):
        uninterrupted, _ = clip_to_grid(
            exact_change(of_client(updates, client), of_client(received, client)), 1.5, SUMS
        )
        delta = change(updates, received, client)
        norm = math.sqrt(math.fsum(float(value) ** 2 for value in delta))
        shortened += norm > 1.5
        expected = [math.trunc(float(value) * min(1.0, 1.5 / norm) * 2**24) for value in delta]
        actual = integers({key: uninterrupted[key] for key in SHAPES})
        assert max(abs(one - other) for one, other in zip(actual, expected, strict=True)) <= 1  # by the margin
    assert 0 < shortened < 5


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300])
def test_who_is_not_finite_adds_noise_alone(bad):
    updates, received = problem()
    updates["scale"][2] = bad
    clipped, norm = clip_to_grid(exact_change(of_client(updates, 2), of_client(received, 2)), 1.5, SUMS)
    assert not any(integers(clipped)) and math.isnan(norm)
    level = level_of(clipping="adaptive", count_noise=2.0)
    part = level.contribution(of_client(updates, 2), of_client(received, 2), 5, 0, 2)
    same = level.contribution(of_client(received, 2), of_client(received, 2), 5, 0, 2)
    assert all(torch.equal(part[key], same[key]) for key in SHAPES)
    assert int(same[VOTE]) - int(part[VOTE]) == 2**23  # who did not move votes that S is large enough


# The sum has the noise that is counted, whoever goes.


@pytest.mark.parametrize("gone", [0, 3])
@pytest.mark.parametrize("secure", [False, True])
def test_the_sum_has_the_planned_noise_also_without_those_who_went(gone, secure):
    """Of ten clients seven must be there: their noise is z S, and that of all ten √(10/7) times as much."""
    clients = 10
    values = 20_000
    z = 3.0
    bound = 0.5
    level = level_of(z, clients, max_norm=bound, secure_rng=secure)
    sums = SecureSums()
    assert sums.least(clients) == 7
    state = {"w": torch.zeros(values)}
    parts = [level.contribution(state, state, clients, 0, client)["w"] for client in range(clients - gone)]
    total = sums.real(torch.stack(parts).sum(0))
    std = z * bound * math.sqrt((clients - gone) / 7)
    alarm = 1e-7 if secure else ALARM  # the cryptographic generator has no seed
    assert alarm < stats.chi2(values).cdf(float((total / std).square().sum())) < 1 - alarm
    assert stats.kstest(total.numpy() / std, "norm").pvalue > alarm
    correlations = np.corrcoef(torch.stack(parts).double().numpy())[~np.eye(len(parts), dtype=bool)]
    assert np.abs(correlations).max() < 6 / math.sqrt(values)


def rounded_gaussian(sigma, reach):
    """Probabilities of a rounded Gaussian at −reach … reach."""
    places = np.arange(-reach, reach + 1)
    return stats.norm.cdf((places + 0.5) / sigma) - stats.norm.cdf((places - 0.5) / sigma)


def sum_of_two(sigma, reach):
    one = rounded_gaussian(sigma, reach)
    return np.convolve(one, one)[reach : 3 * reach + 1]


def post_processed(sigma, reach):
    """Probabilities of N(0, 2σ²) plus a uniform number on [−1/2, 1/2], rounded: the density of N + U + U' at k."""
    deviation = sigma * math.sqrt(2)

    def at(k):
        def triangle(x):
            return (1 - abs(x)) * stats.norm.pdf(k - x, scale=deviation)

        return integrate.quad(triangle, -1, 0, epsabs=1e-15)[0] + integrate.quad(triangle, 0, 1, epsabs=1e-15)[0]

    return np.array([at(k) for k in range(-reach, reach + 1)])


@pytest.mark.parametrize(("sigma", "apart"), [(MIN_GRID_STEPS, False), (1.5, False), (0.5, True), (0.3, True)])
def test_a_sum_of_rounded_gaussians_is_a_gaussian_after_post_processing(sigma, apart):
    """By the argument in `client_sums` they differ by 2 exp(−π²σ²) at most, which is seen where σ is small."""
    reach = max(8, int(12 * sigma))
    difference = np.abs(sum_of_two(sigma, reach) - post_processed(sigma, reach)).max()
    assert difference < 2 * math.exp(-(math.pi**2) * sigma**2) + 1e-13
    assert (difference > 1e-3) == apart


def delta_of(probabilities, shift, epsilon):
    """δ of a mechanism on whole numbers at ε, both ways round."""
    wide = np.pad(probabilities, shift)
    one = wide
    other = np.roll(wide, shift)
    return max(np.maximum(a - math.exp(epsilon) * b, 0).sum() for a, b in ((one, other), (other, one)))


def analytic(sigma, shift, epsilon):
    """δ of the Gaussian mechanism (Balle and Wang, ICML 2018, theorem 8)."""
    ratio = shift / sigma
    one, other = (stats.norm.cdf(sign * ratio / 2 - epsilon / ratio) for sign in (1, -1))
    return one - math.exp(epsilon) * other


@pytest.mark.parametrize("shift", [3, 6, 11])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_the_sum_costs_no_more_than_the_gaussian_of_its_variance(shift, epsilon):
    probabilities = sum_of_two(MIN_GRID_STEPS, 120)
    spent = delta_of(probabilities, shift, epsilon)
    allowed = analytic(MIN_GRID_STEPS * math.sqrt(2), shift, epsilon)
    assert 0.9 * allowed < spent <= allowed + 1e-14


def test_no_draw_is_as_far_from_zero_as_a_sum_has_room_for():
    """Box and Muller with 53 bits: the smallest u is 2^-53. Half the sum of four."""
    assert 4 / 2 * math.sqrt(-2 * math.log(2.0**-53)) < MAX_DRAW
    assert secure_noise(torch.empty(10**5, dtype=torch.float64)).abs().max() < MAX_DRAW
    assert not integer_noise(torch.Size([5]), 0.0, None).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_norm": 1e-7},
            r"the change of one of 5 clients has the standard deviation 5e-08, 0\.839 .*rounding requires at least 4",
        ),
        ({"max_norm": 1e-7}, r"set secure_sums\.fraction_bits=27 or more"),
        (
            {"max_norm": 1e12},
            r"may reach 1e\+13, but fraction_bits=24 only leaves room below 5\.5e\+10; use fewer bits",
        ),
        ({"clipping": "adaptive", "count_noise": 1e10, "z": 1.0}, r"the vote of one of 5 clients may reach 9e\+10"),
    ],
)
def test_a_grid_that_is_too_coarse_or_too_small_is_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        level_of(**options)
    level_of(max_norm=1e-7, sums=SecureSums(fraction_bits=27))
    with pytest.raises(ValueError, match="at least 4"):
        level_of(max_norm=1e-7, sums=SecureSums(fraction_bits=26))
    level_of(z=0.0, max_norm=1e-7)


# A round's arithmetic.


@pytest.mark.parametrize("clipping", ["fixed", "adaptive"])
def test_rounds_equal_a_plain_loop_in_whole_numbers(clipping):
    """Sums, noise, votes and S by hand, from the seed's generators, for five clients of whom four must be there."""
    options = {"max_norm": 2.0}
    if clipping == "adaptive":
        options |= {"clipping": clipping, "count_noise": 2.0, "quantile": 0.8, "clip_lr": 0.5}
    level = level_of(**options)
    norm = 2.0
    clients = (7, 3, 0, 9, 4)
    noise = split_noise(1.0, 2.0) if clipping == "adaptive" else 1.0
    for number in range(4):
        updates, received = problem(number)
        result = level.mean_change(Updates(updates), received, number, clients)
        names = sorted([*SHAPES, *([VOTE] if clipping == "adaptive" else [])])
        totals = {}
        for place, client in enumerate(clients):
            source = generator(4, "client privacy", number, client)
            clipped, length = clip_to_grid(
                exact_change(of_client(updates, place), of_client(received, place)), norm, SUMS
            )
            clipped[VOTE] = torch.tensor(2**23 if length <= norm else -(2**23))
            for key in names:
                drawn = torch.randn(clipped[key].shape, generator=source, dtype=torch.float64)
                deviation = (2.0 if key == VOTE else norm * noise) / math.sqrt(4) * 2**24
                own = [int(one) + round(d * deviation) for one, d in pairs(clipped[key], drawn)]
                totals[key] = [a + b for a, b in zip(totals.get(key, [0] * len(own)), own, strict=True)]
        assert sorted(result) == names
        for key in names:
            assert result[key].flatten().tolist() == [total / 2**24 / 5 for total in totals[key]], key
        moved = level.apply_mean_change(of_client(received, 0), result, 5)
        for key in SHAPES:
            assert torch.equal(moved[key], received[key][0] + result[key])
        assert moved.keys() == received.keys() and moved[COUNTER] == 7
        if clipping == "adaptive":
            norm *= math.exp(-0.5 * (0.5 + totals[VOTE][0] / 2**24 / 5 - 0.8))
        assert level.norm == pytest.approx(norm, rel=1e-12)
    assert (norm == 2.0) == (clipping == "fixed")


def pairs(clipped, drawn):
    return zip(clipped.flatten().tolist(), drawn.flatten().tolist(), strict=True)


def test_s_stays_where_the_sum_has_room():
    level = level_of(clipping="adaptive", count_noise=2.0, max_norm=1e-6)
    for _ in range(200):
        level.apply_mean_change({"w": torch.zeros(1)}, {VOTE: torch.tensor(0.5)}, 5)  # all are short
    units = level.norm * split_noise(1.0, 2.0) / math.sqrt(4) * 2**24
    assert MIN_GRID_STEPS <= units < MIN_GRID_STEPS * 1.2
    level.contribution_noise(5)


@pytest.mark.slow
def test_a_run_with_many_bits_and_no_noise_is_that_without_secure_sums():
    arguments = {"rounds": 2, "clients_per_round": 4, "client_privacy": {"noise_multiplier": 0.0, "max_norm": 0.3}}
    for algorithm in ("ditto", "feddyn"):
        one, other = (finetune(algorithm, secure_sums=sums, **arguments) for sums in ({"fraction_bits": 40}, None))
        start = finetune(algorithm, rounds=0).state("global")
        for key, value in one.state("global").items():
            torch.testing.assert_close(value, other.state("global")[key], rtol=1e-9, atol=1e-9, msg=key)
        assert any(not torch.equal(value, start[key]) for key, value in one.state("global").items())


class Spy(FedAvg):
    seen: ClassVar = []

    def server_step(self, server):
        self.seen.append((server.previous, {key: server.updates.gathered(key).clone() for key in server.updates.names}))
        return super().server_step(server)


def test_the_servers_step_sees_the_mean_alone_with_all_of_the_noise():
    """No client has a gradient. Of four, three must be there: the sum's noise is √(4/3) z S, in multiples of 2^-24."""
    clients = 4
    values = 20_000
    z = 3.0
    bound = 0.5
    dark = TensorDataset(torch.zeros(3, 1, 1, values // 2, dtype=torch.float64), torch.arange(3) % 2)
    Spy.seen.clear()
    run = perada.finetune(
        nn.Sequential(nn.Flatten(), nn.Linear(values // 2, 2, bias=False)).double(),
        perada.FederatedData([dark] * clients, num_classes=2),
        **sections(
            adapter="full",
            algorithm=Spy(),
            rounds=1,
            client_privacy={"noise_multiplier": z, "max_norm": bound, "delta": 1e-3},
            secure_sums={},
            **QUIET,
        ),
    )
    *_, (received, updates) = Spy.seen  # after what the trial at set-up has seen
    (key,) = updates
    assert len(updates[key]) == clients and all(torch.equal(updates[key][0], row) for row in updates[key])
    assert torch.equal(run.state("global")[key], updates[key][0])
    noise = (updates[key][0] - received[key]).flatten() * clients
    assert (noise * 2**24 - (noise * 2**24).round()).abs().max() < 1e-3
    statistic = float((noise / (z * bound * math.sqrt(4 / 3))).square().sum())
    assert 1e-6 < stats.chi2(values).cdf(statistic) < 1 - 1e-6


@pytest.mark.filterwarnings("ignore:.*delta.*:UserWarning")
def test_a_round_with_too_few_clients_is_void_and_counted(monkeypatch):
    arguments = {"rounds": 1, "clients_per_round": 3, "client_privacy": {"noise_multiplier": 2.0}, "secure_sums": {}}
    start = finetune("fedavg", rounds=0).state("global")
    monkeypatch.setattr(SecureSums, "least", lambda self, clients: clients + 1)
    run = finetune("fedavg", **arguments)
    assert all(torch.equal(value, start[key]) for key, value in run.state("global").items())
    assert sum(epsilon > 0 for epsilon in run.info["privacy"]["client"]["epsilon"]) == 3


def test_epsilon_equals_opacus_and_the_card_says_against_whom():
    arguments = {"rounds": 3, "clients_per_round": 3, "client_privacy": {"noise_multiplier": 2.0, "delta": 1e-3}}
    run = finetune("fedavg", secure_sums={}, **arguments)
    record = run.info["privacy"]["client"]
    cohorts = [sample_cohort(0, round, 4, 3) for round in range(3)]
    rounds = [sum(client in cohort for cohort in cohorts) for client in range(4)]
    for spent, times in zip(record["epsilon"], rounds, strict=True):
        opacus = RDPAccountant()
        for _ in range(times):
            opacus.step(noise_multiplier=2.0, sample_rate=1.0)
        with np.errstate(divide="ignore"):
            assert spent == pytest.approx(opacus.get_epsilon(1e-3) if times else 0.0, rel=1e-12)
    assert record["sums"] == {"min_sites": 3, "threshold": 2 / 3}
    assert "It also protects against the server" in privacy_card(run.info["privacy"], None)
    check_record(run.info["privacy"], 4)
    record["sums"]["threshold"] = 0.1
    with rejects("secure_sums: threshold", 0.1):
        check_record(run.info["privacy"], 4)


def test_a_run_that_was_once_without_sums_does_not_hold_against_the_server():
    plain = level_of(sums=None)
    hidden = level_of()
    for first, then, holds in (
        (hidden, level_of(), True),
        (plain, level_of(), False),
        (hidden, level_of(sums=None), False),
    ):
        then.load_state_dict(json.loads(json.dumps(first.state_dict())))
        again = level_of()
        again.load_state_dict(then.state_dict())
        assert again.hidden == holds and ("sums" in again.record(2)) == holds


@pytest.mark.filterwarnings("ignore:.*delta.*:UserWarning")
@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        ("perada", {}, "the teachers are single clients' updates"),
        ("fedavg", {"weighting": "samples"}, "weighting='samples'"),
        ("fedavg", {"clients_per_round": 2}, "clients_per_round=2: more than"),
        ("fedavg", {"client_privacy": {"noise_multiplier": 1.0, "max_norm": 1e-7}}, "rounding requires at least 4"),
    ],
)
def test_what_cannot_be_private_in_sums_is_rejected(algorithm, options, message):
    with pytest.raises(ValueError, match=message):
        finetune(algorithm, **{"secure_sums": {}, "client_privacy": {"noise_multiplier": 1.0}} | options)
