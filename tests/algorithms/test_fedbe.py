# SPDX-License-Identifier: Apache-2.0
"""The models that FedBE draws, by their moments, and the ensemble that it predicts with."""

import pytest
import torch

from perada.algorithms import FedBE, FFALoRA, ensembles
from perada.algorithms.ensembles import sample_models

from .problems import CLIENTS, LR_LOCAL, distance, finetune, reference

DRAWS = 20_000


def updates(clients=4):
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(clients, 3, 2, generator=random, dtype=torch.float64)
    weight[:, 0, 0] = 5.0  # what all clients agree on has no spread
    return {"weight": weight, "count": torch.arange(clients)}


def draw(sampler, weights, samples=DRAWS, seed=1):
    return sample_models(updates(), weights, sampler, samples, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "weights", [torch.full((4,), 0.25, dtype=torch.float64), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)]
)
def test_gaussian_samples_have_the_weighted_mean_and_variance_of_each_parameter(weights):
    stack = updates()["weight"]
    drawn = draw("gaussian", weights)["weight"]
    mean = sum(w * value for w, value in zip(weights, stack, strict=True))
    variance = sum(w * (value - mean) ** 2 for w, value in zip(weights, stack, strict=True))
    assert drawn.shape == (DRAWS, 3, 2)
    torch.testing.assert_close(drawn[:, 0, 0], torch.full((DRAWS,), 5.0, dtype=torch.float64))
    # Five standard errors of a mean, and of a variance of a Gaussian.
    assert ((drawn.mean(0) - mean).abs() <= 5 * (variance / DRAWS).sqrt() + 1e-9).all()
    assert ((drawn.var(0) - variance).abs() <= 5 * variance * (2 / DRAWS) ** 0.5 + 1e-9).all()
    # The Gaussian is diagonal: parameters are drawn apart.
    spread = drawn.flatten(1)[:, 1:]
    correlation = torch.corrcoef(spread.T) - torch.eye(5, dtype=torch.float64)
    assert correlation.abs().max() < 5 / DRAWS**0.5
    # And it is one: kurtosis 3, whose standard error is sqrt(24 / n).
    standard = (spread - spread.mean(0)) / spread.std(0)
    assert ((standard**4).mean(0) - 3).abs().max() < 5 * (24 / DRAWS) ** 0.5


def test_dirichlet_samples_are_convex_combinations_whose_shares_are_uniform_on_the_simplex():
    uniform = torch.full((4,), 0.25, dtype=torch.float64)
    drawn = draw("dirichlet", uniform)["weight"].flatten(1)[:, 1:]
    stack = updates()["weight"].flatten(1)[:, 1:]
    # Five entries of four clients: the shares can be solved for, with their sum as one more equation.
    ones = torch.ones(DRAWS, 1, dtype=torch.float64)
    system = torch.cat([stack, torch.ones(4, 1, dtype=torch.float64)], 1)
    shares = torch.linalg.lstsq(system.T, torch.cat([drawn, ones], 1).T).solution.T
    torch.testing.assert_close(shares @ stack, drawn)
    torch.testing.assert_close(shares.sum(1, keepdim=True), ones)
    assert shares.min() >= -1e-9
    # Dir(1, 1, 1, 1): each share is Beta(1, 3), with P(share > t) = (1 − t)³.
    for t in (0.1, 0.25, 0.5, 0.75):
        probability = (1 - t) ** 3
        error = (probability * (1 - probability) / DRAWS) ** 0.5
        assert ((shares > t).double().mean(0) - probability).abs().max() < 5 * error


@pytest.mark.parametrize("sampler", ["gaussian", "dirichlet"])
def test_samples_are_a_function_of_the_generator(sampler):
    uniform = torch.full((4,), 0.25, dtype=torch.float64)
    first, again, other = (draw(sampler, uniform, 3, seed)["weight"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])
    assert draw(sampler, uniform, 3)["count"].tolist() == [3, 3, 3]  # the largest counter, as in a mean


def test_without_distillation_the_prediction_is_the_mean_of_the_ensembles_probabilities():
    run = finetune(FedBE(distill=False, samples=0), rounds=1)
    ref = reference("net-full")
    sent = [ref.train(ref.initial, client_batches, LR_LOCAL) for client_batches in ref.rounds[0].values()]
    members = [*sent, ref.mean(sent)]
    x = ref.served.public_images(torch.arange(5))
    expected = sum(torch.func.functional_call(ref.model.eval(), state, (x,)).softmax(1) for state in members) / 4
    torch.testing.assert_close(run.global_model()(x).softmax(1), expected)
    torch.testing.assert_close(run.personal(CLIENTS[0])(x).softmax(1), expected)


@pytest.mark.parametrize("sampler", ["gaussian", "dirichlet"])
def test_sampled_teachers_change_the_student(sampler):
    with_samples = finetune(FedBE(sampler=sampler, samples=5), rounds=1).state("global")
    without = finetune(FedBE(sampler=sampler, samples=0), rounds=1).state("global")
    assert distance(with_samples, without) > 1e-4


class Watched(FedBE):
    """Notes what clients sent, and the standard deviations that models are drawn with."""

    def server_step(self, server):
        names = [name for name in server.updates.names if not name.startswith("square/")]
        self.sent = {name: server.updates.gathered(name).clone() for name in names}
        self.weights = server.weights.clone()
        return super().server_step(server)


@pytest.fixture
def spreads(monkeypatch):
    """Centers and standard deviations that models are drawn with, of each round."""
    noted = []
    plain = ensembles.draw_gaussian

    def noting(center, spread, *arguments):
        noted.append((center, spread))
        return plain(center, spread, *arguments)

    monkeypatch.setattr(ensembles, "draw_gaussian", noting)
    return noted


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_by_moments_models_are_drawn_with_the_clients_deviations(weighting, spreads):
    """Without having seen single models: the weighted deviation of each number, in a plain loop."""
    algorithm = Watched(distill=False, samples=2, moments=True)
    finetune(algorithm, rounds=2, weighting=weighting)
    center, spread = spreads[-1]
    assert len(spreads) == 2
    statistics = {name for name in center if name.endswith(("running_var", "num_batches_tracked"))}
    assert center.keys() - spread.keys() == statistics and len(statistics) == 2
    for name, value in spread.items():
        rows = algorithm.sent[name]
        shares = algorithm.weights.tolist()
        middle = sum(share * row for share, row in zip(shares, rows, strict=True))
        expected = sum(share * (row - middle) ** 2 for share, row in zip(shares, rows, strict=True)).sqrt()
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(center[name], middle, rtol=1e-12, atol=1e-12)


def test_secure_sums_of_few_bits_have_the_deviations_of_small_changes(spreads):
    """At this rate the deviations are 4e-5 in the median, and their squares less than a multiple of 2^-24."""
    for sums in (None, {}):
        finetune(FedBE(distill=False, samples=2, moments=True), rounds=1, lr_local=1e-3, secure_sums=sums)
    (_, exact), *_, (_, rounded) = spreads  # in between, a trial at set-up
    ones, others = (torch.cat([value.flatten() for value in spread.values()]) for spread in (exact, rounded))
    assert ones.median() ** 2 < 2**-28
    torch.testing.assert_close(others, ones, rtol=0.05, atol=0)


def test_no_squares_are_sent_of_what_is_frozen():
    sent = []
    trained = []
    for algorithm in (FedBE(moments=True), FFALoRA(FedBE(moments=True))):
        result = finetune(algorithm, "net-adapter", rounds=1).metrics["rounds"][0]
        sent.append(result["params/sent"])
        trained.append(result["params/trained"])
    of_a = trained[0] - trained[1]
    assert of_a > 0 and sent[0] - sent[1] == 2 * of_a


def test_by_moments_the_server_needs_sums_alone():
    options = {"rounds": 2, "distill_steps": 3}
    one = finetune(FedBE(samples=3, moments=True), secure_sums={"fraction_bits": 40}, **options).state("global")
    other = finetune(FedBE(samples=3, moments=True), **options).state("global")
    assert distance(one, other) < 1e-6
    with pytest.raises(ValueError, match="function of the mean"):
        finetune(FedBE(samples=3), secure_sums={"fraction_bits": 40}, **options)
    with pytest.raises(ValueError, match=r"sampler='dirichlet'.*moments=True"):
        FedBE("dirichlet", moments=True)
