# SPDX-License-Identifier: Apache-2.0
"""Which models run on which test images, and what comes out."""

import logging
import threading

import pytest
import torch
from torch.utils.data import TensorDataset

import perada
from perada.api import make_trainer
from perada.core.ranks import Ranks
from perada.core.rounds import EvalBatch
from perada.federation import Evaluation, Training, evaluation
from perada.federation.evaluation import EvaluationPass, own_logits, sample_clients
from perada.lightning import FederatedLoop
from perada.scores.metrics import make_metrics
from perada.tasks import Classification


def unequal(tiny):
    """Test sets of 1 to 13 images, one of them empty."""
    data = tiny.data()
    data.test = [
        TensorDataset(*(t[:n] for t in part.tensors)) for part, n in zip(data.train, (3, 0, 13, 1, 8), strict=True)
    ]
    return data


def fit(tiny, algorithm="ditto", evaluation=None, **options):
    training = Training(lr_personal=0.5, lr_local=0.5, local_steps=3)
    made = perada.algorithms.make_algorithm(algorithm)
    loop = FederatedLoop(made, training=training, evaluation=Evaluation(**(evaluation or {})))
    module = perada.FederatedClassifier(tiny.net(), "full")
    trainer = make_trainer(loop, 1, accelerator="cpu", enable_progress_bar=False, logger=False)
    trainer.fit(module, datamodule=perada.FederatedDataModule(unequal(tiny), **({"eval_batch_size": 7} | options)))
    return trainer, module, loop.outcome(module)


def images(tiny):
    """All test images, labels and owners, in order of client."""
    parts = [part.tensors for part in unequal(tiny).test]
    owner = torch.arange(5).repeat_interleave(torch.tensor([len(x) for x, _ in parts]))
    return EvalBatch(*(torch.cat(values) for values in zip(*parts, strict=True)), owner)


def test_each_image_runs_through_its_owners_model(tiny, monkeypatch):
    _, module, run = fit(tiny)
    batch = images(tiny)
    seen = []
    engine = module.federation.engine
    run_all = engine.logits
    for rows in (slice(None), slice(2, 19), slice(16, 17)):
        part = EvalBatch(*(values[rows] for values in batch))
        with monkeypatch.context() as patch:
            patch.setattr(engine, "logits", lambda states, x: seen.append(x.shape[:2].numel()) or run_all(states, x))
            actual = own_logits(module.federation, part)
        assert len(part.x) <= sum(seen) < 2 * len(part.x)
        seen.clear()
        for logits, image, owner in zip(actual, part.x, part.owner.tolist(), strict=True):
            with torch.no_grad():
                expected = run.personal(owner)(image[None])[0]
            torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("metric", ["accuracy", "auroc"])
def test_a_sample_of_clients_has_the_scores_of_all(tiny, metric):
    _, _, whole = fit(tiny, evaluation={"metric": metric})
    _, _, some = fit(tiny, evaluation={"metric": metric, "global_test_clients": 2})
    expected = whole.metrics["clients"]
    actual = some.metrics["clients"]
    local = (actual["personal/local_test"], expected["personal/local_test"])
    assert local[0] == pytest.approx(local[1], nan_ok=True, abs=1e-6)
    assert len({value for value in local[0] if value == value}) > 1
    sampled = sample_clients(5, 2, 0)
    values = [actual["personal/global_test"][client] for client in sampled]
    assert values == [expected["personal/global_test"][client] for client in sampled]
    missing = [value for client, value in enumerate(actual["personal/global_test"]) if client not in sampled]
    assert all(value != value for value in missing)
    last = some.metrics["rounds"][-1]
    assert last["personal/global_test"] == pytest.approx(sum(values) / 2)
    assert last["personal/global_test_std"] == pytest.approx(abs(values[0] - values[1]) / 2, abs=1e-6)
    for name in ("personal/local_test", "personal/local_test_std", "global/global_test"):
        assert last[name] == pytest.approx(whole.metrics["rounds"][-1][name], abs=1e-6)


def test_beyond_a_limit_of_forward_passes_some_models_are_drawn_by_default(tiny, monkeypatch, caplog):
    """5 models on 25 images are 125 forward passes: one less leaves those of four models."""
    monkeypatch.setattr(evaluation, "MIN_EVERYWHERE", 1)
    monkeypatch.setattr(evaluation, "EVERYWHERE_LIMIT", 125)
    with caplog.at_level(logging.INFO):
        _, _, whole = fit(tiny)
        assert "forward passes" not in caplog.text
        monkeypatch.setattr(evaluation, "EVERYWHERE_LIMIT", 124)
        _, _, by_default = fit(tiny)
        assert caplog.text.count("5 personal models on all 25 test images would take 125 forward passes") == 1
        assert "those of 4 clients" in caplog.text and "global_test_clients=5" in caplog.text
        caplog.clear()
        _, _, requested = fit(tiny, evaluation={"global_test_clients": 4})
        _, _, brought_back = fit(tiny, evaluation={"global_test_clients": 5})
        fit(tiny, "fedavg")
        assert "forward passes" not in caplog.text
    scores = [run.metrics["clients"]["personal/global_test"] for run in (by_default, requested, brought_back, whole)]
    assert str(scores[0]) == str(scores[1])
    assert sum(value != value for value in scores[0]) == 1
    assert scores[2] == scores[3]


@pytest.mark.parametrize(
    ("clients", "images", "requested", "count"),
    [
        (1_000, 10_000, None, 1_000),
        (1_000, 10_001, None, 999),
        (100_000, 2_000_000, None, 10),
        (9, 2_000_000, None, 9),
        (100_000, 2_000_000, 70_000, 70_000),
        (5, 0, None, 5),
        (5, 3, 9, 5),
        (5, 3, 0, 0),
    ],
)
def test_as_many_models_run_on_all_images_as_stay_below_the_limit(clients, images, requested, count):
    assert evaluation.count_everywhere(clients, images, requested) == count


def test_with_no_sample_each_model_is_scored_at_home_only(tiny):
    _, _, run = fit(tiny, evaluation={"global_test_clients": 0})
    assert "personal/global_test" not in run.metrics["rounds"][-1]
    assert set(run.metrics["clients"]) == {"personal/local_test", "last_round"}
    _, _, whole = fit(tiny)
    local = whole.metrics["clients"]["personal/local_test"]
    assert run.metrics["clients"]["personal/local_test"] == pytest.approx(local, nan_ok=True)


def test_where_clients_share_the_global_model_all_are_scored(tiny):
    _, _, run = fit(tiny, "fedavg", {"global_test_clients": 2})
    scores = run.metrics["clients"]["personal/global_test"]
    assert len(scores) == 5
    assert set(scores) == {run.metrics["rounds"][-1]["global/global_test"]}


def test_the_sample_is_drawn_from_the_seed():
    samples = [sample_clients(100, 7, seed) for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]
    assert all(len(set(sample)) == 7 for sample in samples)


def test_predictions_are_those_of_the_owners_model(tiny):
    trainer, module, run = fit(tiny)
    batch = images(tiny)
    result = trainer.predict(module, datamodule=trainer.datamodule)
    personal, shared = (torch.cat([part[name] for part in result]) for name in ("personal", "global"))
    with torch.no_grad():
        for place, owner in enumerate(batch.owner.tolist()):
            torch.testing.assert_close(personal[place], run.personal(owner)(batch.x[place : place + 1])[0])
        torch.testing.assert_close(shared, run.global_model()(batch.x))


class Threads(Ranks):
    """Two ranks that are threads of this process."""

    def __init__(self, rank, shared):
        self.rank = rank
        self.size = 2
        self.shared = shared

    def gather(self, value):
        self.shared["barrier"].wait()
        self.shared[self.rank] = value
        self.shared["barrier"].wait()
        return [self.shared[0], self.shared[1]]

    def sum_(self, tensors):
        for tensor in tensors:
            one, two = self.gather(tensor.clone())
            tensor.copy_(one + two)


@pytest.mark.parametrize("everywhere", [[0, 1, 2, 3, 4], [1, 4], [2], []])
@pytest.mark.parametrize(("algorithm", "metric"), [("ditto", "accuracy"), ("ditto", "auroc"), ("fedavg", "accuracy")])
@pytest.mark.every(5)
def test_two_processes_find_what_one_does(tiny, algorithm, metric, everywhere):
    _, module, _ = fit(tiny, algorithm)
    federation = module.federation
    batch = images(tiny)
    batches = [EvalBatch(*parts) for parts in zip(*(values.split(7) for values in batch), strict=True)]

    def counted(ranks):
        federation.ranks = ranks
        evaluation = EvaluationPass(federation, make_metrics(metric, Classification(), 3), everywhere)
        for index, part in enumerate(batches):
            evaluation.step(part, index)
        return evaluation

    alone = counted(Ranks())
    (scores, per_client), details = alone.result(), alone.details()
    shared = {"barrier": threading.Barrier(2)}
    results = []

    class Own:
        """The federation as one of the ranks sees it at the end."""

        def __init__(self, ranks):
            self.ranks, self.personalized = ranks, federation.personalized
            self.protection = federation.protection

    def finish(evaluation, ranks):
        evaluation.federation = Own(ranks)
        results.append((*evaluation.result(), evaluation.details()))

    every = [Threads(rank, shared) for rank in range(2)]
    threads = [threading.Thread(target=finish, args=(counted(ranks), ranks)) for ranks in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    for own_scores, own_clients, own_details in results:
        for name, tally in details["predictions"].items():
            confidence = own_details["predictions"][name]["calibration"].pop("confidence")
            assert confidence == pytest.approx(tally["calibration"]["confidence"])
            assert own_details["predictions"][name]["calibration"].items() <= tally["calibration"].items()
            assert own_details["predictions"][name]["confusion"] == tally["confusion"]
        assert own_details.get("global/local_test") == pytest.approx(details.get("global/local_test"), nan_ok=True)
        assert own_scores == pytest.approx(scores, nan_ok=True)
        assert own_clients.keys() == per_client.keys()
        for name, values in own_clients.items():
            torch.testing.assert_close(values, per_client[name], equal_nan=True)


@pytest.fixture
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.every(3)
@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("metric", ["accuracy", "auroc"])
@pytest.mark.parametrize("algorithm", ["ditto", "fedavg", "fed_ensemble"])
def test_evaluation_where_torchs_default_is_double_precision(tiny, algorithm, metric):
    trainer, module, _ = fit(tiny, algorithm, {"metric": metric})
    double = module.results.scores
    per_client = module.results.per_client
    torch.set_default_dtype(torch.float32)
    trainer.validate(module, datamodule=trainer.datamodule, verbose=False)
    assert module.results.scores == pytest.approx(double, abs=1e-6, nan_ok=True)
    for name, values in module.results.per_client.items():
        torch.testing.assert_close(values, per_client[name], equal_nan=True, check_dtype=False)
