# SPDX-License-Identifier: Apache-2.0
"""The Local-GD study against autograd loops, pseudo-inverses, a quadratic program and drawn test sets."""

import functools
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import nnls

from perada.cli import main
from perada.data import Digits
from perada.data.batches.transforms import prepare_images
from perada.models.backbones import build_backbone
from perada.server import ModifiedLocalGD
from perada.studies import local_gd, local_gd_curves, local_gd_head
from perada.studies import local_gd_linear as linear
from tests.rejections import rejects

NODES = 4
SAMPLES = 6


def pair(dimension=40, **options):
    return linear.regression(dimension, NODES, SAMPLES, **options), linear.classification(
        dimension, NODES, SAMPLES, **options
    )


def test_data_have_the_papers_variances():
    problem = linear.regression(400, 10, 50)
    noise = problem.y - torch.einsum("mnd,md->mn", problem.x, problem.truth)
    for values, variance in ((problem.x, 1.0), (problem.truth, 4.0), (noise, 0.04)):
        spread = 5 * variance * math.sqrt(2 / values.numel())  # five standard deviations of a sample variance
        assert values.square().mean().item() == pytest.approx(variance, abs=spread)
    assert (problem.truth[0] @ problem.truth[1]).abs() < 5 * 4 * math.sqrt(400)


def test_labels_are_the_sign_of_each_nodes_own_model():
    problem = linear.classification(300, 3, 20, noise=0.5)
    assert torch.equal(problem.y, torch.sign(torch.einsum("mnd,md->mn", problem.x, problem.truth)))
    differences = problem.truth[0] - problem.truth[1]
    assert differences.var().item() == pytest.approx(0.5, rel=5 * math.sqrt(2 / 300))


def squared(x, y, w, start):
    return (y - x @ w).square().sum() / 2


def exponential(x, y, w, start):
    return torch.exp(-y * (x @ w)).mean() + 0.3 / 2 * (w - start).square().sum()


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_local_steps_are_autograds(kind):
    problem = pair()[kind == "classification"]
    steps = 25
    lr = 0.01
    loss = squared if kind == "regression" else exponential
    local = (
        linear.regression_steps(problem, steps, lr)
        if kind == "regression"
        else linear.classification_steps(problem, steps, lr, 0.3)
    )
    w = torch.zeros(40, dtype=torch.float64)
    for k in range(1, 4):
        models = []
        for x, y in zip(problem.x, problem.y, strict=True):
            leaf = w.clone().requires_grad_()
            optimizer = torch.optim.SGD([leaf], lr=lr)
            for _ in range(steps):
                optimizer.zero_grad()
                loss(x, y, leaf, w).backward()
                optimizer.step()
            models.append(leaf.detach())
        w = sum(models) / NODES * k / (k + 1)
        path = linear.federate(local, 40, k, ModifiedLocalGD())
        torch.testing.assert_close(path[-1], w, rtol=1e-10, atol=1e-12)
    assert path.shape == (4, 40)


def unequal_nodes(alpha=0.4):
    """A division of 30 samples of dimension 40 among four nodes, and the samples of each node without padding."""
    problem = linear.dirichlet_classification(40, alpha, NODES, 30, seed=2)
    rows = [(x[:size], y[:size]) for x, y, size in zip(problem.x, problem.y, problem.sizes.tolist(), strict=True)]
    return problem, rows


def test_dirichlet_nodes_divide_the_samples_of_one_true_model():
    problem, rows = unequal_nodes()
    sizes = problem.sizes.tolist()
    assert sum(sizes) == 30
    assert max(sizes) == problem.x.shape[1]
    assert 1 <= min(sizes) < max(sizes)
    for x, y in rows:
        assert torch.equal(y, torch.sign(x @ problem.truth[0]))
    for x, y, size in zip(problem.x, problem.y, sizes, strict=True):
        assert not x[size:].any()
        assert not y[size:].any()
    everything = torch.cat([x for x, _ in rows])
    assert len(everything.unique(dim=0)) == 30
    other_alpha, _ = unequal_nodes(alpha=100.0)
    same_samples = torch.cat([x[:size] for x, size in zip(other_alpha.x, other_alpha.sizes, strict=True)])
    assert torch.equal(same_samples.sort(0)[0], everything.sort(0)[0])
    assert max(other_alpha.sizes.tolist()) < max(sizes)  # a large α is nearly even


def test_unequal_nodes_are_trained_as_by_a_plain_loop():
    problem, rows = unequal_nodes()
    w = torch.zeros(40, dtype=torch.float64)
    for _ in range(2):
        models = []
        for x, y in rows:
            model = w.clone()
            for _ in range(25):
                gradient = -(y * torch.exp(-y * (x @ model))) @ x / len(y) + 0.3 * (model - w)
                model = model - 0.01 * gradient
            models.append(model)
        w = sum(models) / NODES
    path = linear.federate(linear.classification_steps(problem, 25, 0.01, 0.3), 40, 2)
    torch.testing.assert_close(path[-1], w, rtol=1e-10, atol=1e-12)

    x = torch.cat([x for x, _ in rows])
    y = torch.cat([y for _, y in rows])
    central = torch.zeros(40, dtype=torch.float64)
    for _ in range(50):
        central = central + 0.01 * (y * torch.exp(-y * (x @ central))) @ x / len(y)
    torch.testing.assert_close(linear.centralized(problem, 50, 0.01, classify=True), central, rtol=1e-10, atol=1e-12)
    margins = y * (x @ linear.max_margin(problem))
    assert margins.min().item() == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_with_dirichlet_nodes_too_both_variants_turn_to_the_centralized_model():
    settings = local_gd_curves.DirichletSettings(
        alphas=(0.5,), nodes=5, samples=50, dimension=200, rounds=30, local_steps=100, lr=0.05, central_steps=3000
    )
    (curves,) = local_gd_curves.dirichlet_curves(settings, 0, lambda what: None).values()
    assert sum(curves["samples"]) == 50
    assert 0 < sum(curves["positive"]) < 50
    for name in ("plain", "modified"):
        distance = np.array(curves[f"{name}_central"])
        assert len(distance) == 30
        assert distance[-1] < 0.5 * distance[0]
    assert curves["plain_central"][-1] < curves["modified_central"][-1]


@pytest.mark.every(2)
@pytest.mark.parametrize("classify", [False, True])
def test_the_centralized_model_is_gradient_descent_on_all_data(classify):
    problem = pair()[classify]
    x = problem.x.reshape(-1, 40)
    y = problem.y.reshape(-1)
    leaf = torch.zeros(40, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([leaf], lr=0.01)
    for _ in range(50):
        optimizer.zero_grad()
        (torch.exp(-y * (x @ leaf)).mean() if classify else (y - x @ leaf).square().sum() / 2).backward()
        optimizer.step()
    torch.testing.assert_close(
        linear.centralized(problem, 50, 0.01, classify=classify), leaf.detach(), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("dimension", [15, 40])
@pytest.mark.parametrize("steps", [None, 7])
def test_the_closed_form_is_the_sum_of_powers(dimension, steps):
    problem = pair(dimension)[0]
    projections = []
    targets = []
    for x, y in zip(problem.x.numpy(), problem.y.numpy(), strict=True):
        inverse = np.linalg.pinv(x)
        contraction = np.eye(dimension) - 0.01 * x.T @ x
        projections.append(
            inverse @ x if steps is None else np.eye(dimension) - np.linalg.matrix_power(contraction, steps)
        )
        targets.append(projections[-1] @ inverse @ y)
    rest = np.eye(dimension) - np.mean(projections, 0)
    mean = np.mean(targets, 0)
    actual = linear.closed_form(problem, 6, steps, 0.01)
    for rounds in range(7):
        expected = sum((np.linalg.matrix_power(rest, k) @ mean for k in range(rounds)), np.zeros(dimension))
        np.testing.assert_allclose(actual[rounds].numpy(), expected, rtol=1e-9, atol=1e-11)


def check_regression(dimension, nodes, samples, steps, rounds, lr):
    """Relative distance to the limit's closed form, after the checks that hold for any number of steps."""
    problem = linear.regression(dimension, nodes, samples)
    path = linear.federate(linear.regression_steps(problem, steps, lr), dimension, rounds)
    exact = linear.closed_form(problem, rounds, steps, lr)
    assert ((path - exact).norm(dim=1)[1:] <= 1e-6 * exact.norm(dim=1)[1:]).all()
    away = (path - linear.least_norm(problem)).norm(dim=1)
    assert (away.diff() < 0).all()
    limit = linear.closed_form(problem, rounds)
    return ((path - limit).norm(dim=1)[1:] / limit.norm(dim=1)[1:]).max(), away[-1] / away[0]


@pytest.mark.every(3)
@pytest.mark.parametrize("steps", [1, 5, 200])
def test_local_gd_follows_the_closed_form_to_the_least_norm_solution(steps):
    limit, left = check_regression(120, 5, 8, steps, 60, 5e-3)
    projections = [np.linalg.pinv(x) @ x for x in linear.regression(120, 5, 8).x.numpy()]
    slowest = np.linalg.eigvalsh(np.mean(projections, 0))[-40]  # of the span of the 40 samples, which has rank 40
    assert left < ((1 - slowest) ** 60 if steps == 200 else 0.5)
    assert limit < 1e-6 if steps == 200 else limit > 1e-3


@pytest.mark.slow
def test_local_gd_follows_the_closed_form_at_the_papers_size():
    limit, left = check_regression(1500, 10, 50, 200, 200, 1e-4)
    assert limit < 1e-6
    assert left < 0.01


@pytest.mark.every(2)
@pytest.mark.parametrize("dimension", [15, 40])
def test_the_least_norm_solution_is_the_pseudo_inverses(dimension):
    problem = pair(dimension)[0]
    expected = np.linalg.pinv(problem.x.reshape(-1, dimension).numpy()) @ problem.y.reshape(-1).numpy()
    np.testing.assert_allclose(linear.least_norm(problem).numpy(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.every(2)
@pytest.mark.parametrize("dimension", [30, 100])
def test_the_machine_is_the_solution_of_its_quadratic_program(dimension):
    """Least distance programming (Lawson & Hanson, chapter 23): min ‖w‖ with Z w ≥ 1, by non-negative least squares."""
    problem = linear.classification(dimension, NODES, SAMPLES)
    signed = (problem.y.unsqueeze(-1) * problem.x).reshape(-1, dimension).numpy()
    count = len(signed)
    dual, _ = nnls(np.vstack([signed.T, np.ones(count)]), np.append(np.zeros(dimension), 1.0))
    residual = np.append(signed.T @ dual, dual.sum() - 1)
    expected = -residual[:-1] / residual[-1]
    np.testing.assert_allclose(linear.max_margin(problem).numpy(), expected, rtol=0, atol=1e-5 * abs(expected).max())


def test_classes_that_cannot_be_separated_are_rejected():
    problem = linear.classification(3, 4, 6, noise=3.0)
    with pytest.raises(ValueError, match="24 samples of dimension 3"):
        linear.max_margin(problem)


def test_distance_of_directions():
    one = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])
    expected = torch.tensor([0.0, math.sqrt(2), 2.0])
    torch.testing.assert_close(linear.direction_distance(one, torch.tensor([5.0, 0.0])), expected)
    assert linear.direction_distance(torch.zeros(2), one[0]).isnan()


@pytest.mark.slow
def test_expected_accuracy_is_that_of_many_samples():
    problem = linear.classification(20, 3, 5, noise=0.7)
    models = torch.stack([problem.truth[0], problem.truth.mean(0), torch.ones(20, dtype=torch.float64)])
    x = torch.randn(3, 40_000, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    right = (x @ models.T).sign() == torch.einsum("mnd,md->mn", x, problem.truth).sign().unsqueeze(-1)
    counted = right.double().mean((0, 1))
    assert linear.accuracy(models, problem.truth).tolist() == pytest.approx(
        counted.tolist(), abs=5 * 0.5 / 120_000**0.5
    )


def check_classification(dimension, nodes, settings):
    result = local_gd_curves.classification_at(dimension, nodes, settings, 0)
    for name in ("plain", "modified"):
        for target in ("svm", "central"):
            assert (np.diff(result[f"{name}_{target}"]) < 0).all()
    for target in ("svm", "central"):
        plain, modified = (np.array(result[f"{name}_{target}"]) for name in ("plain", "modified"))
        assert plain[0] == pytest.approx(modified[0], rel=1e-12)  # from w⁰ = 0, the first round only differs in length
        assert (plain[1:] < modified[1:]).all()
    return result


@pytest.mark.slow
def test_both_variants_turn_to_the_machine_and_the_modified_one_more_slowly():
    settings = local_gd_curves.ClassificationSettings(rounds=30, lr=0.05, central_steps=2000)
    near, far = (check_classification(d, local_gd_curves.Nodes(5, 10), settings) for d in (300, 100))
    assert near["plain_svm"][-1] < 0.4 * near["plain_svm"][0]
    for name in ("plain_svm", "plain_central", "modified_svm", "modified_central", "central_svm"):
        assert near[name][-1] < far[name][-1]


@pytest.mark.slow
def test_both_variants_turn_to_the_machine_at_the_papers_size():
    result = check_classification(1500, local_gd_curves.Nodes(), local_gd_curves.ClassificationSettings())
    assert result["modified_central"][-1] < 0.15 * result["modified_central"][0]


def test_rates_that_diverge_are_rejected():
    regression, classification = pair()
    limit = 2 / np.linalg.eigvalsh(regression.x.numpy() @ regression.x.numpy().transpose(0, 2, 1)).max()
    linear.regression_steps(regression, 1, 0.99 * limit)
    with pytest.raises(ValueError, match=r"lr=.* dimension 40"):
        linear.regression_steps(regression, 1, 1.01 * limit)
    with pytest.raises(ValueError, match=r"lr=1e\+200 .*dimension 40"):
        linear.federate(linear.classification_steps(classification, 3, 1e200, 1.0), 40, 1)


@pytest.fixture(scope="module")
def head():
    """Settings whose batch holds all images of a node, so that a step has nothing random; and their curves."""
    settings = local_gd_head.HeadSettings("digits", nodes=4, rounds=5, local_steps=6, batch_size=2000, lr=0.05)
    return settings, local_gd_head.head_curves(settings, 3, lambda what: None)


@pytest.mark.slow
def test_vectors_are_what_timm_gives_its_head(head):
    settings, _ = head
    model = build_backbone("test_resnet", pretrained="perada:fashion_test_resnet", image_size=32)
    actual = local_gd_head.extract_features(settings)
    images = prepare_images(Digits(False).images[:9], model.image_config, 32)
    with torch.no_grad():
        expected = model.model.forward_head(model.model.forward_features(images), pre_logits=True)
    torch.testing.assert_close(actual.test_features[:9], expected)
    assert torch.equal(actual.train_labels, Digits(True).labels)
    assert actual.train_features.shape == (1438, expected.shape[1])


def test_heads_are_trained_as_by_a_plain_loop(head, monkeypatch):
    """The nodes' shares are taken from the run; the rounds, the rule and the scores are not."""
    settings, curves = head
    seen = []
    monkeypatch.setattr(
        local_gd_head,
        "_train_head",
        lambda network, data, rows, *rest: seen.append((network, data, rows)) or [start(network)],
    )
    local_gd_head.head_curves(settings, 3, lambda what: None)
    network, data, shares = seen[0]
    counts = [torch.bincount(data.train_labels[rows], minlength=10).sort()[0] for rows in shares]
    assert [len(rows) for rows in shares] == curves["images"]
    assert all(abs(count[-1] / count.sum() - 0.5) < 0.01 for count in counts)
    (everything,) = seen[2][2]
    assert sorted(torch.cat(shares).tolist()) == everything.tolist()
    paths = {
        "plain": loop(network, data, shares, settings, lambda k: 1.0),
        "modified": loop(network, data, shares, settings, lambda k: k / (k + 1)),
        "central": loop(network, data, [everything], settings, lambda k: 1.0),
    }
    for name, path in paths.items():
        right = [(data.test_features @ w[:, :-1].T + w[:, -1]).argmax(1) == data.test_labels for w in path]
        assert curves[f"{name}_accuracy"] == pytest.approx([r.double().mean().item() for r in right], abs=1e-9)
        if name != "central":
            angles = [F.cosine_similarity(w.flatten(), paths["central"][-1].flatten(), 0).item() for w in path]
            expected = [math.sqrt(2 - 2 * min(cosine, 1)) for cosine in angles]
            assert curves[f"{name}_central"] == pytest.approx(expected, rel=1e-3)


def start(network):
    return {f"1.{name}": value.detach() for name, value in network[1].named_parameters()}


def loop(network, data, shares, settings, share):
    """Heads (K, F + 1), bias last, after each round of Local-GD pulled back to the start by 1 - share(round)."""
    x = torch.cat([data.train_features, torch.ones(len(data.train_features), 1)], 1)
    first = torch.cat([network[1].weight, network[1].bias[:, None]], 1).detach()
    w = first
    path = []
    for k in range(1, settings.rounds + 1):
        models = []
        for rows in shares:
            leaf = w.clone().requires_grad_()
            optimizer = torch.optim.SGD([leaf], lr=settings.lr)
            for _ in range(settings.local_steps):
                optimizer.zero_grad()
                F.cross_entropy(x[rows] @ leaf.T, data.train_labels[rows]).backward()
                optimizer.step()
            models.append(leaf.detach())
        w = (1 - share(k)) * first + share(k) * sum(models) / len(models)
        path.append(w)
    return path


@pytest.mark.slow
def test_the_quick_study_writes_its_numbers_and_its_figure(tmp_path, capsys):
    main(["study", "local-gd", f"--output={tmp_path / 'out'}", "--quick", "--seed=4"])
    written = json.loads((tmp_path / "out" / "local_gd.json").read_text())
    assert written["settings"]["seed"] == 4
    settings = written["settings"]["regression"]
    nodes = local_gd_curves.Nodes(**written["settings"]["nodes"])
    result = written["regression"]
    assert result["dimensions"]["dimension"] == settings["dimensions"]
    again = local_gd_curves.regression_at(30, nodes, local_gd_curves.RegressionSettings(**settings), 4)
    assert {name: curve[0] for name, curve in result["dimensions"].items()} == {"dimension": 30} | {
        name: curve[-1] for name, curve in again.items()
    }
    assert len(result["rounds"]["closed"]) == settings["rounds"] + 1
    assert max(result["rounds"]["closed"]) < 1e-6 * result["rounds"]["scale"][0]
    assert len(written["classification"]["rounds"]["plain_svm"]) == written["settings"]["classification"]["rounds"]
    assert len(written["head"]["plain_central"]) == written["settings"]["head"]["rounds"]
    alphas = written["settings"]["dirichlet"]["alphas"]
    assert list(written["dirichlet"]) == [f"{alpha:g}" for alpha in alphas] == ["0.5", "0.3"]
    for figure in ("local_gd.png", "local_gd_dirichlet.png"):
        assert (tmp_path / "out" / figure).read_bytes().startswith(b"\x89PNG")
    assert "classification: direction to the SVM" in capsys.readouterr().out


def test_options_are_read_by_name(tmp_path, monkeypatch):
    asked = {}
    take = functools.wraps(local_gd.study_local_steps)(lambda **options: asked.update(options))
    monkeypatch.setattr(local_gd, "study_local_steps", take)
    words = ["--regression.dimensions=[60,70]", "--head.dataset=digits", "--nodes.count=3"]
    main(["study", "local-gd", f"--output={tmp_path}", *words])
    assert asked["output"] == tmp_path
    assert asked["regression"] == local_gd_curves.RegressionSettings(dimensions=(60, 70))
    assert asked["head"] == local_gd_head.HeadSettings("digits")
    assert asked["nodes"].count == 3
    assert not asked["quick"]


def test_what_cannot_be_run_is_rejected_before_anything_is_computed(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file"):
        local_gd.study_local_steps(output=tmp_path / "file", quick=True)
    missing = local_gd_head.HeadSettings(root=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"FashionMNIST.*--head\.dataset=digits"):
        local_gd.study_local_steps(output=tmp_path / "out", head=missing)
    assert not (tmp_path / "out").exists()
    for make, name in (
        (local_gd_curves.RegressionSettings, "rounds"),
        (local_gd_curves.ClassificationSettings, "local_steps"),
        (local_gd_curves.Nodes, "samples"),
        (local_gd_head.HeadSettings, "nodes"),
        (local_gd_curves.DirichletSettings, "samples"),
    ):
        with pytest.raises(ValueError, match=rf"{make.__name__}: {name} .*0"):
            make(**{name: 0})
    with rejects("RegressionSettings: dimensions", 0):
        local_gd_curves.RegressionSettings(dimensions=())
    with pytest.raises(ValueError, match=r"DirichletSettings: alphas .*0\.0"):
        local_gd_curves.DirichletSettings(alphas=(0.5, 0.0))
