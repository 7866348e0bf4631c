# SPDX-License-Identifier: Apache-2.0
"""Sites that predict with both of their models: scores and exported models are those of the simulation."""

import logging
import math

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import FedAvg, HetLoRA
from perada.cli import deploy
from perada.cli.main import main
from perada.core.checks import OptionError
from perada.deploy.exported import export_site_run
from perada.deploy.protocol import Response
from perada.deploy.scores import mean_scores, score_summands, scores_of_sums, summand_names
from perada.deploy.state import read_state
from perada.deploy.sums.vector import SumResult
from perada.deploy.transport import LocalTransport
from perada.privacy import ClientPrivacy, Privacy
from perada.scores.metrics import make_metrics
from perada.server.sums import SecureSums
from perada.tasks import Classification

from .parties import Parties
from .test_parity import assert_equal, normalized

SIZES = (19, 5, 24, 17, 30)
ANSWER = "0" * 64
# FedBN needs a network with normalisation.
OF_ALGORITHM = {"fedbn": {"net": normalized}}


def images_of(client, size, num_foreign=0):
    """Images bright above, below or in the middle. Client 3 has other labels of them, some test images look foreign."""
    random = torch.Generator().manual_seed(client + 10 * size)
    # Mostly one of them, so that the global model is right often enough for weights below 1.
    pattern = torch.tensor([0, 0, 1, 0, 0, 2]).repeat(size)[:size]
    images = torch.rand(size, 1, 8, 8, generator=random)
    for row in range(size):
        start = (0, 4, 2)[pattern[row]]
        images[row, 0, start : start + 4] += 3
    images[:num_foreign] += 2
    labels = (pattern + 1) % 3 if client == 3 else pattern
    return TensorDataset(images, labels)


def parties(tiny, tmp_path, algorithm="ditto", loop=(), **options):
    """A recipe that predicts with both models."""
    evaluation = {"prediction": "both", "local_epochs": 4} | dict(loop)
    deployment = Parties(tiny, tmp_path, algorithm, sizes=SIZES, loop=evaluation, **options)
    deployment.whole.train = [images_of(client, size) for client, size in enumerate(SIZES)]
    deployment.whole.test = [images_of(client, 9, num_foreign=1 + client) for client in range(len(SIZES))]
    return deployment


def of_both(row):
    """The scores that a round has by predictions with both models on sites' own images."""
    return {name: value for name, value in row.items() if name.startswith(("both/local_test", "typical/local"))}


CASES = {
    "ditto": ("ditto", {}),
    "perada": ("perada", {}),
    "tuned at the end": ("fedavg_ft", {"rounds": 3}),
    "frozen layers": ("ditto", {"module": {"adapter": "head"}}),
    "fixed weight": ("ditto", {"loop": {"personal_share": 0.3}}),
    "several metrics": ("ditto", {"loop": {"metric": ["accuracy", "ece", "f1_per_class"]}}),
    "ranks": (HetLoRA(FedAvg(), [3, 1, 2, 1, 3]), {"module": {"adapter": "lora"}}),
}


@pytest.mark.every(9)
@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_the_simulation(case, tiny, tmp_path):
    algorithm, options = CASES[case]
    loop, coordinator = assert_equal(parties(tiny, tmp_path, algorithm, **options))
    names = set()
    for expected, found in zip(loop.history, coordinator.progress.history, strict=True):
        scores = of_both(expected)
        assert of_both(found) == scores
        names |= scores.keys()
    assert {"both/local_test", "both/local_test_weighted", "both/local_test_recent", "typical/local_test"} <= names
    assert 0 < found["typical/local_test"] < 1
    # As of personal models, no site has the images of others.
    assert not any(name.startswith(("both/global_test", "personal/global_test")) for name in found)


@pytest.mark.every(3)
@pytest.mark.parametrize(("algorithm", "prediction"), [("fedavg", "both"), ("fedbn", "both"), ("ditto", "personal")])
def test_other_runs_have_no_such_scores(algorithm, prediction, tiny, tmp_path):
    deployment = parties(tiny, tmp_path, algorithm, loop={"prediction": prediction}, **OF_ALGORITHM.get(algorithm, {}))
    coordinator, workers = deployment.deployed()
    assert not any(of_both(row) for row in coordinator.progress.history)
    (client,) = workers["site0"].clients.values()
    state = read_state(workers["site0"].store.folder / "state.safetensors").run_state
    assert client.state_of_both(state.scoring.global_state, state) is None


@pytest.mark.parametrize(
    ("algorithm", "prediction", "has_line"),
    [("fedavg", "both", True), ("fedbn", "both", True), ("fedavg", "personal", False), ("fedavg_ft", "both", False)],
)
def test_server_and_sites_say_that_the_prediction_has_no_effect(
    algorithm, prediction, has_line, tiny, tmp_path, caplog
):
    deployment = parties(tiny, tmp_path, algorithm, loop={"prediction": prediction}, **OF_ALGORITHM.get(algorithm, {}))
    caplog.set_level(logging.INFO, "perada")
    deployment.worker(0)
    deployment.coordinator(LocalTransport({}))
    lines = [record for record in caplog.records if "prediction='both' has no effect with" in record.getMessage()]
    assert [record.name for record in lines] == (["perada.site", "perada.deploy"] if has_line else [])


@pytest.mark.every(3)
@pytest.mark.parametrize("may_send", [["scores"], ["counts"], ["sizes", "losses"]])
def test_a_site_sends_only_what_it_may(may_send, tiny, tmp_path):
    deployment = parties(tiny, tmp_path)
    loop, _ = deployment.simulated()
    workers = deployment.workers(may_send=may_send)
    coordinator = deployment.coordinator(LocalTransport(workers))
    coordinator.run()
    found = of_both(coordinator.progress.history[-1])
    if not {"scores", "counts"} & {*may_send}:
        assert not found
        return
    expected = of_both(loop.history[-1])
    if "counts" not in may_send:
        # A mean over images needs their numbers.
        del expected["both/local_test_weighted"]
    assert found == pytest.approx(expected, abs=1e-6)


def test_secure_sums_have_the_means(tiny, tmp_path):
    deployment = parties(tiny, tmp_path, "perada", loop={"secure_sums": SecureSums()})
    loop, coordinator = assert_equal(deployment)
    found = of_both(coordinator.progress.history[-1])
    statistics = ("both/local_test", "both/local_test_std", "both/local_test_weighted", "typical/local_test")
    # Sums are in multiples of 2^-24.
    assert found == pytest.approx({name: loop.history[-1][name] for name in statistics}, abs=1e-5)


@pytest.mark.parametrize(
    "privacy", [{"privacy": Privacy(noise_multiplier=1.0)}, {"client_privacy": ClientPrivacy(noise_multiplier=1.0)}]
)
def test_private_recipes_are_rejected_by_the_server_and_by_sites(privacy, tiny, tmp_path):
    deployment = parties(tiny, tmp_path, "fedavg_ft", loop=privacy)
    message = f"prediction='both' is not supported with {next(iter(privacy))}.*no ledger"
    with pytest.raises(OptionError, match=message):
        deployment.worker(0)
    with pytest.raises(OptionError, match=message):
        deployment.coordinator(LocalTransport({}))


@pytest.mark.parametrize("algorithm", ["ditto", pytest.param("fedavg_ft", marks=pytest.mark.slow)])
def test_a_sites_exported_run_predicts_as_the_simulation(algorithm, tiny, tmp_path):
    deployment = parties(tiny, tmp_path, algorithm, rounds=3)
    loop, module = deployment.simulated()
    simulated = loop.outcome(module)
    _, workers = deployment.deployed()
    images, _ = deployment.whole.test[2].tensors
    masks = []
    for number, name in enumerate(deployment.names):
        (client,) = workers[name].clients.values()
        state = read_state(workers[name].store.folder / "state.safetensors").run_state
        run = export_site_run(client, state, name)
        assert run.predicts_with_both
        loaded = perada.Run.load(run.save(tmp_path / f"saved{number}"), backbone=tiny.net())
        expected = simulated.predict(images, number)
        for site_run in (run, loaded):
            found = site_run.predict(images, name)
            assert torch.equal(found.probabilities, expected.probabilities)
            assert torch.equal(found.typical, expected.typical)
        masks.append(expected.typical)
    is_typical = torch.cat(masks)
    assert is_typical.any() and not is_typical.all()


def test_statistics_stay_at_the_site(tiny, tmp_path):
    deployment = parties(tiny, tmp_path)
    _, workers = deployment.deployed()
    folder = workers["site2"].store.folder
    (client,) = workers["site2"].clients.values()
    state = read_state(folder / "state.safetensors").run_state
    names = set(client.state_of_both(state.scoring.global_state, state))
    of_images = {"mean", "scale", "examples", "num_examples", "threshold", "neighbors"}
    assert names == of_images | {"known_classes", "personal_share"}
    log = (folder / "audit.jsonl").read_text()
    assert '"typical"' in log
    assert not any(f'"{name}"' in log for name in names)


def rounded_mean(values, fraction_bits):
    """Mean of what sites round to multiples of 2^-fraction_bits."""
    return sum(round(value * 2**fraction_bits) for value in values) / 2**fraction_bits / len(values)


@pytest.mark.parametrize("fraction_bits", [16, 24])
@pytest.mark.parametrize("spread", [0.0, 1e-5, 1e-3, 0.1])
@pytest.mark.parametrize("center", [0.9, 1 / 3, 300.1])
def test_rounding_in_secure_sums_changes_the_deviation_over_sites_by_no_more_than_documented(
    fraction_bits, spread, center
):
    """The bound of docs/secure_sums.md, for scores of seven sites, or errors of a regression."""
    scores = [center + spread * place / 3 for place in range(-3, 4)]
    metrics = make_metrics(["accuracy"], Classification(), 3)
    facts = [{"tests": 1, "scores": {"personal": {"accuracy": score}}} for score in scores]
    summands = [score_summands(metrics, site_facts) for site_facts in facts]
    means = {name: rounded_mean([each[name] for each in summands], fraction_bits) for name in summands[0]}
    found = scores_of_sums(metrics, {}, SumResult({}, None, means, {}))
    bound = math.sqrt((1 + 2 * abs(center)) * 2 ** -(fraction_bits + 1))
    assert found["personal/local_test_std"] == pytest.approx(np.std(scores), abs=bound)
    assert found["personal/local_test"] == pytest.approx(center, abs=2 ** -(fraction_bits + 1))


FACTS = [
    {"tests": 4, "typical": 0.5, "counts": {"personal": [3, 4], "global": [1, 4], "both": [2, 4]}},
    {"tests": 10, "typical": 1.0, "counts": {"personal": [9, 10], "global": [5, 10], "both": [8, 10]}},
]


def summed(facts, with_both=True):
    """Scores of a sum of what sites add, without masks."""
    metrics = make_metrics(["accuracy"], Classification(), 3)
    names = summand_names(metrics, {}, with_both)
    summands = [score_summands(metrics, site_facts, with_both=with_both) for site_facts in facts]
    assert all(set(each) <= set(names) for each in summands)
    totals, means = {}, {}
    for name in names:
        values = [each[name] for each in summands if name in each]
        if values:
            totals[name] = math.fsum(values)
            means[name] = totals[name] / len(values)
    return scores_of_sums(metrics, {}, SumResult({}, None, means, totals), with_both=with_both)


def averaged(facts, with_both=True):
    return mean_scores(make_metrics(["accuracy"], Classification(), 3), facts, with_both=with_both)


@pytest.mark.parametrize("scores_of", [summed, averaged])
def test_means_over_sites_by_hand(scores_of):
    scores = scores_of(FACTS)
    assert scores["both/local_test"] == pytest.approx((0.5 + 0.8) / 2)
    assert scores["both/local_test_std"] == pytest.approx(0.15)
    assert scores["both/local_test_weighted"] == pytest.approx(10 / 14)
    assert scores["typical/local_test"] == pytest.approx(0.75)
    assert scores["personal/local_test"] == pytest.approx((0.75 + 0.9) / 2)


@pytest.mark.parametrize("scores_of", [summed, averaged])
def test_a_recipe_without_both_ignores_what_a_site_claims(scores_of):
    assert not of_both(scores_of(FACTS, with_both=False))


@pytest.mark.parametrize("scores_of", [summed, averaged])
def test_outputs_that_are_not_finite_leave_no_mean(scores_of):
    """At the second site, the global model fails on images that are not typical."""
    counts = {"personal": [9, 10]}
    failed = {"tests": 10, "typical": 0.5, "counts": counts, "failed_models": ["both", "global"]}
    scores = scores_of([FACTS[0], failed])
    assert math.isnan(scores["both/local_test"]) and math.isnan(scores["both/local_test_weighted"])
    assert scores["personal/local_test"] == pytest.approx((0.75 + 0.9) / 2)
    assert scores["typical/local_test"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "facts",
    [
        {"typical": 1.5},
        {"typical": "all"},
        {"typical": None},
        {"failed_models": ["global", "both"]},
        {"failed_models": ["both", "both"]},
        {"failed_models": ["other"]},
        {"failed_models": "both"},
        {"failed_models": []},
        {"counts": {"other": [1, 2]}},
    ],
)
def test_impossible_facts_are_rejected(facts):
    with pytest.raises(ValueError):
        Response("ok", ANSWER, facts)


@pytest.mark.parametrize(
    "facts",
    [{"typical": 0}, {"typical": 1.0}, {"failed_models": ["both", "global", "personal"]}, {"counts": {"both": [1, 2]}}],
)
def test_possible_facts_are_accepted(facts):
    assert Response("ok", ANSWER, facts).facts == facts


@pytest.mark.parametrize("options", [[], ["--prediction=personal"]], ids=["default", "personal"])
def test_a_site_exports_its_models_without_statistics_of_its_images(options, tiny, tmp_path, monkeypatch, capsys):
    deployment = parties(tiny, tmp_path)
    _, workers = deployment.deployed()
    (client,) = workers["site2"].clients.values()
    state = read_state(workers["site2"].store.folder / "state.safetensors").run_state
    site_run = export_site_run(client, state, "site2")
    monkeypatch.setattr(deploy, "read_site", lambda path: path)
    monkeypatch.setattr(deploy, "_run_of_site", lambda *_: site_run)
    site_file = tmp_path / "site.yaml"
    site_file.touch()
    out = tmp_path / "out"
    main(["deploy", "export", str(site_file), "--output", str(out), *options])
    with_statistics = options != ["--prediction=personal"]
    files = {path.name for path in (out / "client_0").iterdir()}
    assert ("typical.safetensors" in files) == with_statistics
    assert "adapter_model.safetensors" in files
    assert ("statistics of up to 300 training images" in capsys.readouterr().out) == with_statistics
