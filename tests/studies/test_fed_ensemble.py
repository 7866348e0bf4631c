# SPDX-License-Identifier: Apache-2.0
"""Fed-ensemble's toy regression: its algebra, its variance, its command."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from perada.cli import main
from perada.studies import toy_regression
from perada.studies.fed_ensemble import study_modes
from perada.studies.toy_regression import (
    CLIENTS,
    FUNCTIONS,
    ModeSettings,
    Problem,
    basis,
    decompose,
    federated_round,
    local_gain,
    make_problem,
    train,
)

SMALL = ModeSettings(reruns=2, rounds=3, lr_decay=1.0, init_std=1.0)


def descend(weights, phi, y, lr, steps):
    """One client's gradient descent, by autograd."""
    weights = weights.clone().requires_grad_()
    for _ in range(steps):
        loss = 0.5 * torch.nn.functional.mse_loss(phi @ weights, y)
        (gradient,) = torch.autograd.grad(loss, weights)
        weights = (weights - lr * gradient).detach().requires_grad_()
    return weights.detach()


def test_the_basis_is_gaussian():
    x = torch.tensor([0.1, -0.4], dtype=torch.float64)
    centres = torch.tensor([0.0, 0.1, 0.3], dtype=torch.float64)
    plain = [[math.exp(-((a - b) ** 2) / (2 * 0.08**2)) for b in centres.tolist()] for a in x.tolist()]
    np.testing.assert_allclose(basis(x, centres).numpy(), plain, rtol=1e-12)


def test_the_data_have_the_papers_moments():
    problems = [make_problem(seed) for seed in range(400)]
    x, y = (torch.stack([getattr(problem, name) for problem in problems]) for name in ("x", "y"))
    assert x.shape == y.shape == (400, 50, 2)
    sine = torch.sin(2 * math.pi * x)
    off = y - sine
    assert x.abs().max() <= 1 and x.mean().abs() < 0.01 and abs(x.var() - 1 / 3) < 0.01
    # One amplitude a client, so the products of its two points have the amplitudes' variance in them.
    amplitude = (off.prod(-1) * sine.prod(-1)).mean() / sine.prod(-1).square().mean()
    noise = off.square().mean() - amplitude * sine.square().mean()
    assert amplitude == pytest.approx(0.2**2, rel=0.1)
    assert noise == pytest.approx(0.2**2, rel=0.1)
    assert problems[0].centres.shape == (FUNCTIONS,)
    assert not torch.equal(problems[0].centres, problems[1].centres)


@pytest.mark.parametrize("steps", [1, 7])
def test_local_training_is_gradient_descent(steps):
    problem = make_problem(1)
    phi = basis(problem.x, problem.centres)
    start = torch.randn(FUNCTIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gain = local_gain(phi, 0.1, steps)
    for client in range(5):
        plain = descend(start, phi[client], problem.y[client], 0.1, steps)
        moved = start - phi[client].mT @ gain[client] @ (phi[client] @ start - problem.y[client])
        torch.testing.assert_close(moved, plain, rtol=0, atol=1e-12)


def test_a_round_is_a_loop_over_clients():
    draw = torch.Generator().manual_seed(0)
    problem = make_problem(2)
    phi = basis(problem.x, problem.centres)
    modes = torch.randn(3, 4, FUNCTIONS, generator=draw, dtype=torch.float64)
    taken = torch.randint(3, (3, CLIENTS), generator=draw)  # nobody takes mode 3
    takes_part = torch.rand(3, CLIENTS, generator=draw) < 0.3
    result = federated_round(modes, taken, takes_part, phi, problem.y, local_gain(phi, 0.2, 3))
    plain = modes.clone()
    for rerun in range(3):
        for mode in range(4):
            had = [c for c in range(CLIENTS) if takes_part[rerun, c] and taken[rerun, c] == mode]
            sent = [descend(modes[rerun, mode], phi[c], problem.y[c], 0.2, 3) for c in had]
            if sent:
                plain[rerun, mode] = sum(sent) / len(sent)
    torch.testing.assert_close(result, plain, rtol=0, atol=1e-12)
    assert torch.equal(result[:, 3], modes[:, 3])


def test_training_follows_the_librarys_schedule(monkeypatch):
    calls = {}

    def recorded(seed, round, num_clients, modes, strata, real=toy_regression.mode_schedule):
        assert (num_clients, modes, strata) == (CLIENTS, 3, 7)
        calls[seed, round] = real(seed, round, num_clients, modes, strata)
        return calls[seed, round]

    monkeypatch.setattr(toy_regression, "mode_schedule", recorded)
    settings = replace(SMALL, ages=4, strata=7, lr_decay=0.5, init_std=0.0)
    problem = make_problem(0)
    result = train(problem, settings, 3)
    phi = basis(problem.x, problem.centres)
    seeds = list(dict.fromkeys(seed for seed, _ in calls))
    assert len(seeds) == 2 and len(calls) == 2 * 12  # re-runs have schedules of their own; an age is K rounds
    for rerun, seed in enumerate(seeds):
        weights = torch.zeros(3, FUNCTIONS, dtype=torch.float64)
        for round in range(12):
            lr = 0.1 if round < 10 else 0.05
            sent = [descend(weights[m], phi[c], problem.y[c], lr, 5) for c, m in enumerate(calls[seed, round])]
            for mode in range(3):
                had = [sent[c] for c, m in enumerate(calls[seed, round]) if m == mode]
                weights[mode] = sum(had) / len(had) if had else weights[mode]
        torch.testing.assert_close(result[rerun], weights, rtol=0, atol=1e-10)


def test_only_the_sampled_clients_train():
    problem = make_problem(0)
    settings = replace(SMALL, rounds=1, clients_per_round=1, reruns=4, init_std=0.0)
    phi = basis(problem.x, problem.centres)
    alone = torch.stack(
        [descend(torch.zeros(FUNCTIONS, dtype=torch.float64), phi[c], problem.y[c], 0.1, 5) for c in range(CLIENTS)]
    )
    distances = (train(problem, settings, 1) - alone).norm(dim=-1)
    assert distances.min(1).values.max() < 1e-10
    assert len(distances.argmin(1).unique()) > 1


@pytest.mark.slow
def test_bias_and_variance_split_the_error():
    draw = np.random.default_rng(0)
    truth = draw.normal(size=30)
    predictions = draw.normal(size=(12, 30)) + 0.5
    result = decompose(torch.from_numpy(predictions), torch.from_numpy(truth))
    assert result["squared_bias"] + result["variance"] == pytest.approx(np.mean((predictions - truth) ** 2))
    assert result["variance"] == pytest.approx(predictions.var(0).mean())
    assert result["bias"] == pytest.approx(np.sqrt(np.mean((predictions.mean(0) - truth) ** 2)))
    by_rerun = ((predictions - predictions.mean(0)) ** 2).mean(1)
    assert result["variance_se"] == pytest.approx(by_rerun.std(ddof=1) / np.sqrt(12))


def transfer(problem: Problem, rounds: int) -> np.ndarray:
    """What FedAvg of all clients with the small settings makes of the initial weights: their linear map."""
    phi = basis(problem.x, problem.centres).numpy()
    steps = [np.linalg.matrix_power(np.eye(FUNCTIONS) - 0.1 * f.T @ f / 2, 5) for f in phi]
    return np.linalg.matrix_power(np.mean(steps, axis=0), rounds)


@pytest.mark.slow
def test_one_modes_variance_is_that_of_its_initial_weights():
    problem = make_problem(0)
    weights = train(problem, replace(SMALL, reruns=200, rounds=20, init_std=0.5), 1)
    grid = basis(torch.linspace(-1, 1, 101, dtype=torch.float64), problem.centres)
    result = decompose(weights.mean(1) @ grid.mT, torch.zeros(101, dtype=torch.float64))
    exact = 0.25 * np.mean(np.sum((grid.numpy() @ transfer(problem, 20)) ** 2, axis=1))
    assert result["variance_se"] < 0.1 * exact
    assert abs(result["variance"] - exact) < 3 * result["variance_se"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A small study of K that each stratum's permutation trains in every round."""
    folder = tmp_path_factory.mktemp("study")
    return study_modes(output=folder, modes=[1, 2, 4], reruns=60, rounds=40, strata=10, init_std=0.5)


@pytest.mark.slow
def test_the_variance_falls_as_one_over_the_modes(rows):
    scaled = [row["modes"] * row["variance"] / rows[0]["variance"] for row in rows]
    errors = [row["variance_se"] / row["variance"] for row in rows]
    assert max(errors) < 0.1
    assert scaled == pytest.approx([1, 1, 1], abs=0.25)


@pytest.mark.slow
def test_the_bias_stays():
    problem = make_problem(0)
    x = torch.linspace(-1, 1, 101, dtype=torch.float64)
    grid = basis(x, problem.centres)
    truth = torch.sin(2 * math.pi * x)
    # Initial weights have mean zero and everything is linear in them: without them the bias is the one of many re-runs.
    settings = replace(SMALL, reruns=10, rounds=40, init_std=0.0)
    one, four = (decompose(train(problem, settings, k).mean(1) @ grid.mT, truth)["bias"] for k in (1, 4))
    short = replace(settings, rounds=10)
    undertrained = decompose(train(problem, short, 1).mean(1) @ grid.mT, truth)["bias"]
    assert four == pytest.approx(one, rel=0.05)
    assert undertrained > 1.2 * one


@pytest.mark.slow
def test_with_one_stratum_each_mode_is_fedavg_of_a_part_of_the_rounds():
    problem = make_problem(0)
    settings = replace(SMALL, strata=1, init_std=0.0)
    modes = train(problem, replace(settings, rounds=12), 4)
    fedavg = train(problem, replace(settings, rounds=3), 1)
    torch.testing.assert_close(modes, fedavg.expand(-1, 4, -1), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_equal_seeds_write_equal_files_and_leave_the_global_stream(tmp_path):
    before = torch.random.get_rng_state()
    written = {}
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        main(["study", "fed-ensemble", "--quick", f"--seed={seed}", f"--output={tmp_path / name}"])
        written[name] = [(tmp_path / name / f"fed_ensemble.{ending}").read_bytes() for ending in ("json", "png")]
    assert written["a"] == written["b"]
    assert written["a"][0] != written["c"][0] and written["a"][1] != written["c"][1]
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_command_prints_what_it_writes(tmp_path, capsys):
    main(["study", "fed-ensemble", "--quick", "--modes=[7]", f"--output={tmp_path / 'out'}"])
    output = capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "fed_ensemble.json").read_text())
    assert (written["settings"]["reruns"], written["settings"]["rounds"]) == (10, 20)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines() if line[:1] == "|"]
    assert [line[:2] for line in lines[2:]] == [["1", "20"], ["2", "20"], ["4", "20"]]
    for line, row in zip(lines[2:], written["rows"], strict=True):
        assert float(line[3]) == pytest.approx(row["squared_bias"], abs=5e-5)
        assert float(line[4].split()[0]) == pytest.approx(row["variance"], abs=5e-5)
    assert [line[-1] for line in lines[2:]] == ["0.0496", "0.0115", "–"]  # Table 1 of the paper has no K = 4


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--rounds=0", "rounds must be an integer >= 1, got 0"),
        ("--local_steps=0", "local_steps must be an integer >= 1, got 0"),
        ("--ages=0", "ages must be an integer >= 1 or None, got 0"),
        ("--reruns=1", "reruns must be an integer >= 2, got 1; one run has no variance"),
        ("--strata=51", "strata must be an integer >= 1 and <= 50, got 51; it is the number of clients"),
        (
            "--clients_per_round=0",
            "clients_per_round must be an integer >= 1 and <= 50, got 0; it is the number of clients",
        ),
        ("--lr_decay=1.5", "lr_decay must be a finite number > 0 and <= 1, got 1.5"),
        ("--init_std=-1", "init_std must be a finite number >= 0, got -1.0"),
        ("--modes=[2, 1]", "modes=[2, 1] cannot be compared; list distinct integers >= 1 in ascending order"),
        ("--modes=[0]", "modes=[0] cannot be compared; list distinct integers >= 1 in ascending order"),
        ("--lr=0", "lr=0.0 does not descend: on these data it must be above 0 and below 0.205"),
        ("--lr=3", "lr=3.0 does not descend: on these data it must be above 0 and below 0.205"),
    ],
)
def test_wrong_options_are_rejected(option, message, tmp_path):
    with pytest.raises(ValueError) as error:
        main(["study", "fed-ensemble", option, f"--output={tmp_path / 'out'}"])
    assert str(error.value) == message
    assert not (tmp_path / "out").exists()


def test_the_limit_of_the_learning_rate_is_where_descent_turns():
    phi = torch.tensor([[[2.0, 0.0]]], dtype=torch.float64)  # one point, Gram matrix 4: the limit is 1/2
    with pytest.raises(ValueError, match=r"below 0\.5$"):
        local_gain(phi, 0.5, 1)
    assert local_gain(phi, 0.49, 1).item() == pytest.approx(0.49)


def test_a_file_as_output_is_rejected(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file"):
        main(["study", "fed-ensemble", "--quick", f"--output={tmp_path / 'out'}"])
