# SPDX-License-Identifier: Apache-2.0
"""Private training as a whole against a plain loop, its noise against its law, and what does not change the result."""

import pytest
import torch
from scipy.stats import chi2
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import APFL, FedAlt, FedSim, PerAda, PFedMe
from perada.core.rounds import one_of
from perada.federation.chunk import Chunk
from tests.options import sections

from ..algorithms.problems import CLIENTS, PROX, QUIET, SIZES, assert_same, distance
from . import private_loop as plain
from .private_loop import BOUND, DISTILLED, SIGMA, train

WITHOUT_KD = PerAda(PROX, distill=False)
CASES = {
    "perada": (PerAda(PROX), plain.perada_distilled, DISTILLED),
    "perada-no-kd": (PerAda(PROX, distill=False), plain.ditto, {}),
    "ditto": ("ditto", plain.ditto, {"prox_strength": PROX}),
    "fedavg": ("fedavg", plain.fedavg, {}),
    "scaffold": ("scaffold", plain.scaffold, {}),
    "apfl": (APFL(alpha=0.3, lr_alpha=0.5), plain.apfl, {}),
    "pfedme": (PFedMe(prox_strength=2.0), plain.pfedme, {}),
    "fedalt-output": (FedAlt("output"), plain.fedalt_output, {}),
    "fedsim-output": (FedSim("output"), plain.fedsim_output, {}),
}


@pytest.fixture(autouse=True)
def _without_epsilon(monkeypatch):
    """No test of this file is about ε, which takes most of a small run's time."""
    monkeypatch.setattr("perada.privacy.accounting.history_epsilon", lambda *_: 0.0)


def private(sigma=0.0, **options):
    return {"noise_multiplier": sigma, "max_norm": BOUND, "delta": 1e-3, "secure_rng": False} | options


ENGINES = [
    pytest.param(
        case,
        sigma,
        engine,
        marks=[pytest.mark.slow] * (engine == "opacus" and (sigma == 0 or case not in ("perada", "pfedme"))),
    )
    for case in CASES
    for sigma in (0.0, SIGMA)
    for engine in ("folded", "opacus")
]


@pytest.mark.parametrize(("case", "sigma", "engine"), ENGINES)
@pytest.mark.every(9)
def test_three_rounds_equal_the_plain_loop(case, sigma, engine):
    algorithm, reference, options = CASES[case]
    run = train(algorithm, private(sigma, engine=engine), **options)
    w, personal, loop = plain.expected(reference, sigma)
    assert loop.clipped > 20
    assert loop.whole > 20
    assert_same(run.state("global"), w, "global")
    for m in CLIENTS:
        assert_same(run.state("personal", m), personal[m], f"client {m}")
    assert distance(w, loop.initial) > 0.1


@pytest.mark.parametrize("case", [case for case in CASES if case != "ditto"])
@pytest.mark.every(8)
def test_full_batches_without_bound_and_noise_are_ordinary_training(case):
    algorithm, _, options = CASES[case]
    options = options | {"batch_size": "full", "local_epochs": 4}
    run, ordinary = (train(algorithm, privacy, **options) for privacy in (private(max_norm=1e6), None))
    start = ordinary.state("global") if algorithm == "fedavg" else train(algorithm, None, rounds=0).state("global")
    assert_same(run.state("global"), ordinary.state("global"), "global")
    for m in CLIENTS:
        assert_same(run.state("personal", m), ordinary.state("personal", m), f"client {m}")
        assert distance(run.state("personal", m), start) > 0.1 or algorithm == "fedavg"


FEATURES = 36


def many_clients(number, **options):
    """Softmax regression, whose clients have from 3 to 14 images."""
    random = torch.Generator().manual_seed(5)
    sizes = [3 + client % 12 for client in range(number)]
    train = [
        TensorDataset(torch.randn(n, 1, 6, 6, generator=random, dtype=torch.float64), torch.arange(n) % 3)
        for n in sizes
    ]
    data = perada.FederatedData(train, num_classes=3)

    def run(algorithm, privacy, **more):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 3)).double()
        common = {"adapter": "full", "lr_personal": 0.5, "lr_local": 0.5, "distill_steps": 0} | QUIET
        return perada.finetune(net, data, **sections(algorithm=algorithm, privacy=privacy, **common | options | more))

    return sizes, run


def assert_standard_normal(z):
    """The sum of squares of independent standard normal numbers is chi-square; two-sided, 1 in 10 000."""
    low, high = chi2.ppf([5e-5, 1 - 5e-5], z.numel())
    assert low < float(z.square().sum()) < high
    assert abs(float(z.mean())) < 4 * z.numel() ** -0.5


def test_one_step_has_the_stated_noise():
    """Private minus noiseless step: −lr · N(0, (σ C)²) / n with full batches."""
    sizes, run = many_clients(40, rounds=1, local_steps=1, batch_size="full")
    bound = 0.3
    sigma = 1.7
    noisy, plainly = (run("standalone", private(s, max_norm=bound)) for s in (sigma, 0.0))
    rows = [
        torch.cat([(noisy.state("personal", m)[key] - value).flatten() for key, value in own.items()])
        / (-0.5 * sigma * bound / n)
        for m, n in enumerate(sizes)
        for own in [plainly.state("personal", m)]
    ]
    z = torch.stack(rows)
    assert z.shape == (40, 3 * FEATURES + 3)
    assert_standard_normal(z)
    for row in z:
        assert_standard_normal(row)


@pytest.mark.every(2)
@pytest.mark.parametrize("engine", ["folded", "opacus"])
def test_noise_is_independent_between_clients_roles_rounds_and_steps(monkeypatch, engine):
    """With a bound of 1e-6 and σ = 1e6 a step is its noise, with a standard deviation of 1 / (n q), to 1e-5."""
    moves = []
    step = Chunk.step

    def spy(self, batches):
        before = {role: {k: v.clone() for k, v in state.items()} for role, state in self.full.items()}
        step(self, batches)
        sizes = [SIZE_OF[client] for client in one_of(batches).clients]
        for role in ("personal", "local"):
            after = self.full[role]
            change = torch.cat([(after[k] - before[role][k]).flatten(1) for k in sorted(after)], 1)
            moves.append(change / -0.5 * torch.tensor([min(4, n) for n in sizes]).unsqueeze(1))

    monkeypatch.setattr(Chunk, "step", spy)
    SIZE_OF, run = many_clients(12, rounds=2, local_steps=2, batch_size=4, clients_per_round=10)
    run(PerAda(0.0, distill=False), private(1e6, max_norm=1e-6, engine=engine))
    z = torch.cat(moves)  # 2 rounds · 2 steps · 2 roles · 10 clients
    assert z.shape == (80, 3 * FEATURES + 3)
    assert_standard_normal(z)
    for row in z:
        assert_standard_normal(row)
    products = z @ z.T / z.shape[1] ** 0.5  # each is about standard normal, those of one noise used twice 10.5
    assert float(products.fill_diagonal_(0).abs().max()) < 6


def test_each_client_has_the_noise_that_was_calibrated_for_it(monkeypatch):
    """Black images have no gradient by the weights, so that a step is its noise."""
    monkeypatch.setattr("perada.privacy.account.calibrate", lambda target, delta, rate, *_: 1 + 2 * rate)
    sizes = [3, 6, 12, 24] * 6
    data = perada.FederatedData(
        [TensorDataset(torch.zeros(n, 1, 10, 10), torch.arange(n) % 3) for n in sizes], num_classes=3
    )
    layer = nn.Linear(100, 3, bias=False)
    options = {"adapter": "full", "lr_personal": 1.0, "batch_size": 4, "local_steps": 1, "clients_per_round": 16}
    privacy = {"noise_multiplier": None, "target_epsilon": 2.0, "delta": 1e-3, "max_norm": 0.5}
    run = perada.finetune(
        nn.Sequential(nn.Flatten(), layer),
        data,
        **sections(algorithm="standalone", rounds=1, privacy=privacy, **options | QUIET),
    )
    noise = run.info["privacy"]["sample"]["noise_multipliers"]
    took_part = 0
    assert noise[:4] == pytest.approx([3.0, 1 + 8 / 6, 1 + 8 / 12, 1 + 8 / 24])
    for client, (size, sigma) in enumerate(zip(sizes, noise, strict=True)):
        (value,) = run.state("personal", client).values()
        moved = (value - layer.weight.detach()).flatten().double() * min(4, size) / (0.5 * sigma)
        if moved.any():
            took_part += 1
            low, high = chi2.ppf([1e-8, 1 - 1e-8], moved.numel())  # of 300 numbers: 0.6 to 1.5 times as many
            assert low < float(moved.square().sum()) < high
    assert took_part == 16


@pytest.mark.parametrize(
    ("clipping", "engine"),
    [
        ("flat", "folded"),
        ("per_layer", "opacus"),
        pytest.param("flat", "opacus", marks=pytest.mark.slow),
        pytest.param("per_layer", "folded", marks=pytest.mark.slow),
    ],
)
def test_physical_batches_and_chunks_do_not_change_the_result(engine, clipping):
    options = {"engine": engine, "clipping": clipping}
    uninterrupted = train(WITHOUT_KD, private(SIGMA, **options), rounds=2)
    small = train(WITHOUT_KD, private(SIGMA, physical_batch_size=2, **options), rounds=2)
    chunks = train(WITHOUT_KD, private(SIGMA, **options), rounds=2, clients_per_chunk=2)
    for other in (small, chunks):
        assert_same(other.state("global"), uninterrupted.state("global"), "global")
        for m in CLIENTS:
            assert_same(other.state("personal", m), uninterrupted.state("personal", m), f"client {m}")


@pytest.mark.parametrize(
    ("clipping", "sigma"), [("flat", SIGMA), pytest.param("per_layer", 0.0, marks=pytest.mark.slow)]
)
def test_the_training_engine_does_not_change_the_result(clipping, sigma):
    """By layer without noise: Opacus rounds the norm of the layers' bounds, σ's unit, to single precision."""
    folded = train(PerAda(PROX), private(sigma, clipping=clipping), engine="folded", **DISTILLED)
    looped = train(PerAda(PROX), private(sigma, clipping=clipping), engine="loop", **DISTILLED)
    assert_same(looped.state("global"), folded.state("global"), "global")
    for m in CLIENTS:
        assert_same(looped.state("personal", m), folded.state("personal", m), f"client {m}")


@pytest.mark.slow
def test_chunks_do_not_change_dropout():
    options = {"dropout": 0.4, "momentum": 0.5}
    uninterrupted = train(PerAda(PROX, distill=False), private(SIGMA), **options)
    chunks = train(PerAda(PROX, distill=False), private(SIGMA), clients_per_chunk=1, **options)
    assert_same(chunks.state("global"), uninterrupted.state("global"), "global")
    without = train(PerAda(PROX, distill=False), private(SIGMA), momentum=0.5)
    assert distance(uninterrupted.state("global"), without.state("global")) > 0.01


@pytest.mark.parametrize("engine", ["folded", "opacus"])
@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
@pytest.mark.every(2)
def test_secure_draws_follow_from_no_seed(engine, sampling):
    """With full batches the noise alone differs, and it has the stated size."""
    sizes, run = many_clients(20, rounds=1, local_steps=1, batch_size="full")
    bound = 0.3
    sigma = 1.7
    privacy = private(sigma, max_norm=bound, secure_rng=True, engine=engine, sampling=sampling)
    first = run("standalone", privacy)
    second = run("standalone", privacy)
    rows = []
    for m, n in enumerate(sizes):
        ours = first.state("personal", m)
        theirs = second.state("personal", m)
        rows.append(torch.cat([(ours[key] - theirs[key]).flatten() for key in ours]) / (0.5 * sigma * bound / n))
    z = torch.stack(rows) / 2**0.5
    low, high = chi2.ppf([1e-9, 1 - 1e-9], z.numel())  # no seed can be fixed: 1 in 10⁹ runs fails
    assert low < float(z.square().sum()) < high


@pytest.mark.every(2)
@pytest.mark.parametrize("secure", [False, True])
def test_the_global_stream_of_random_numbers_stays_as_it_was(secure):
    net = plain.network(0.4)
    torch.manual_seed(123)
    before = torch.get_rng_state()
    train(PerAda(PROX), private(SIGMA, secure_rng=secure), net=net, **DISTILLED)
    assert torch.equal(torch.get_rng_state(), before)


def test_runs_repeat_and_depend_on_the_seed():
    first, again, other = (train("fedavg", private(SIGMA), seed=seed).state("global") for seed in (0, 0, 1))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert distance(first, other) > 0.1


def test_no_training_loss_is_reported():
    run = train("ditto", private(SIGMA))
    ordinary = train("ditto", None)
    assert [name for name in run.metrics["rounds"][-1] if name.startswith("train/")] == []
    assert {"train/personal_loss", "train/local_loss"} <= set(ordinary.metrics["rounds"][-1])
    assert len(SIZES) == run.num_clients
