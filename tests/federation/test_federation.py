# SPDX-License-Identifier: Apache-2.0
"""Rounds: broken clients, fine-tuning, what is saved, what is counted, what is scored."""

import math
import re
from collections import OrderedDict

import pytest
import torch
from sklearn.metrics import accuracy_score
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.api import make_trainer
from perada.core.states import get_state
from perada.data import Phase
from perada.engine import Engine
from perada.federation import Federation
from perada.federation.settings import LocalTraining, Settings
from perada.lightning import FederatedLoop
from perada.models.adapted import find_tensor_names
from perada.server import Distillation
from tests.methods import make_method
from tests.options import sections


@pytest.fixture(autouse=True)
def _unnoticed_at_set_up(monkeypatch):
    """Clients break by images that become NaN later: those that are so at set-up are rejected there."""
    monkeypatch.setattr("perada.data.broken_images._find_broken", lambda *_: {})


SIZES = (8, 5, 12, 3)
CLASSES = 3
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}


def network():
    torch.manual_seed(0)
    layers = {
        "conv": nn.Conv2d(1, 4, 3),
        "norm": nn.BatchNorm2d(4),
        "act": nn.ReLU(),
        "pool": nn.AdaptiveAvgPool2d(2),
        "flat": nn.Flatten(),
        "fc": nn.Linear(16, CLASSES),
    }
    return nn.Sequential(OrderedDict(layers)).double()


def task(broken=(), sizes=SIZES, test=False, validation=False):
    random = torch.Generator().manual_seed(1)

    def images(n):
        return torch.randn(n, 1, 6, 6, generator=random, dtype=torch.float64)

    train = [TensorDataset(images(n), torch.arange(n) % CLASSES) for n in SIZES][: len(sizes)]
    for client in broken:
        train[client].tensors[0][1, 0, 2, 2] = float("nan")
    public = TensorDataset(images(6))
    tests = [TensorDataset(images(n), torch.arange(n) % CLASSES) for n in (7, 4, 0, 9)] if test else []
    labelled = TensorDataset(images(9), torch.arange(9) % CLASSES) if validation else None
    return perada.FederatedData(train, tests, public, labelled, num_classes=CLASSES)


def finetune(data, algorithm="perada", rounds=1, **options):
    common = {"adapter": "full", "batch_size": 4, "lr_personal": 0.1, "lr_local": 0.1, "distill_steps": 2}
    return perada.finetune(network(), data, **sections(algorithm=algorithm, rounds=rounds, **common | options, **QUIET))


def equal(left, right):
    return all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.every(3)
@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize("algorithm", ["perada", "fedavg"])
def test_a_broken_client_is_named_and_left_out(algorithm, engine):
    start = finetune(task(), algorithm, rounds=0)
    with pytest.warns(UserWarning, match=r"round 1: .*client 3 .*NaN"):
        run = finetune(task(broken=[3]), algorithm, engine=engine)
    clean = finetune(task(), algorithm, engine=engine)
    without = finetune(task(sizes=SIZES[:3]), algorithm, engine=engine)
    for key, value in run.state("global").items():
        torch.testing.assert_close(value, without.state("global")[key])
    assert not equal(run.state("global"), clean.state("global"))
    if algorithm == "perada":
        assert equal(run.state("personal", 3), start.state("personal", 3))
        assert all(equal(run.state("personal", m), clean.state("personal", m)) for m in range(3))
    assert math.isfinite(run.metrics["rounds"][0]["train/local_loss"])


def test_rounds_go_on_without_the_broken_client():
    with pytest.warns(UserWarning) as caught:
        run = finetune(task(broken=[1]), "ditto", rounds=3)
    named = [re.match(r"round (\d): the loss of client ([\d, ]+) became", str(w.message)) for w in caught]
    assert [match.groups() for match in named if match] == [("1", "1"), ("2", "1"), ("3", "1")]
    assert all(value.isfinite().all() for m in range(4) for value in run.state("personal", m).values())
    assert not equal(run.state("global"), finetune(task(), rounds=0).state("global"))


def test_nothing_changes_where_all_clients_break():
    federated, served = federation("perada", task(broken=range(4)))
    before = {key: value.clone() for key, value in federated.global_state.items()}
    assert sorted(run_round(federated, served, 0).broken_clients) == [0, 1, 2, 3]
    assert equal(federated.global_state, before)
    assert not federated.store.local.written


def test_a_client_that_breaks_in_fine_tuning_keeps_the_global_state():
    with pytest.warns(UserWarning, match=r"client 3 .*NaN") as caught:
        run = finetune(task(broken=[3]), "fedavg_ft", rounds=2)
    assert any("fine-tuning: " in str(warning.message) for warning in caught)
    assert equal(run.state("personal", 3), run.state("global"))
    assert not equal(run.state("personal", 0), run.state("global"))


def federation(algorithm, data, **options):
    """A federation without Lightning."""
    served = perada.FederatedDataModule(data, batch_size=4)
    served.configure_rounds(seed=0, clients_per_round=None, phases=[Phase()])
    model = network()
    settings = Settings(
        make_method(algorithm),
        LocalTraining("sgd", {"personal": 0.1, "local": 0.1}),
        options.pop("distillation", Distillation(2, 4)),
        "uniform",
        (Phase(),),
        seed=0,
    )
    return Federation(
        Engine(model), find_tensor_names(model, "fc"), lambda index: get_state(model), settings, 4
    ), served


def run_round(federated, served, round):
    cohort = federated.begin_round(served.shares(round))
    for batch in served.cohort_loader(cohort.plan):
        cohort.step(batch)
    return federated.end_round(served, served.cohort_loader)


def tune(federated, served, round):
    plan = served.plan_for(range(4), round, [federated.settings.algorithm.personalization()[1]])
    return federated.personalize([plan], served.cohort_loader)[0]


def test_a_saved_federation_goes_on_where_it_was(tmp_path):
    one, served = federation("perada", task())
    run_round(one, served, 0)
    torch.save(one.state_dict(), tmp_path / "federation.pt")
    other, _ = federation("perada", task())
    other.load_state_dict(torch.load(tmp_path / "federation.pt", weights_only=True))
    run_round(one, served, 1)
    run_round(other, served, 1)
    assert other.rounds_done == 2
    assert equal(one.global_state, other.global_state)
    assert equal(one.personal_states(range(4)), other.personal_states(range(4)))


def test_a_saved_federation_remembers_who_fine_tuned_and_who_broke(tmp_path):
    one, served = federation("fedavg_ft", task(broken=[1]))
    run_round(one, served, 0)
    assert tune(one, served, 1) == [1]
    torch.save(one.state_dict(), tmp_path / "federation.pt")
    other, _ = federation("fedavg_ft", task())
    assert not (other.tuned is not None)
    other.load_state_dict(torch.load(tmp_path / "federation.pt", weights_only=True))
    assert other.tuned is not None
    assert equal(one.personal_states(range(4)), other.personal_states(range(4)))
    assert equal({k: v[1] for k, v in other.personal_states(range(4)).items()}, one.global_state)


def test_what_another_algorithm_fine_tuned_is_rejected():
    one, _ = federation("perada", task())
    with pytest.raises(ValueError, match=r"fine-tuned.*PerAda"):
        one.load_state_dict(one.state_dict() | {"tuned": {"../x": 1}})


def test_rounds_after_fine_tuning_go_on_from_the_global_state():
    """A run of two rounds that is later taken to three is a run of three rounds."""
    extended, served = federation("fedavg_ft", task())
    straight, _ = federation("fedavg_ft", task())
    for round in range(2):
        run_round(extended, served, round)
        run_round(straight, served, round)
    tune(extended, served, 2)
    assert extended.personalized
    for one in (extended, straight):
        run_round(one, served, 2)
        assert not one.personalized
        tune(one, served, 3)
    assert equal(extended.global_state, straight.global_state)
    assert equal(extended.personal_states(range(4)), straight.personal_states(range(4)))


def test_parameters_and_megabytes_are_counted():
    model = network()
    parameters = sum(p.numel() for p in model.parameters())
    state = 8 * parameters + 8 * (4 + 4 + 1)  # doubles, and the statistics and counter of the norm
    for name, trained, sent in (("perada", 2, 1), ("fedavg", 1, 1), ("standalone", 1, 0)):
        federated, served = federation(name, task())
        metrics = run_round(federated, served, 0).metrics
        assert metrics["params/trained"] == trained * parameters
        assert metrics["params/sent"] == sent * parameters
        assert metrics["comm/up_mb"] == pytest.approx(sent * 4 * state / 1e6)
        assert metrics["comm/down_mb"] == pytest.approx(sent * 4 * state / 1e6)


def test_validation_on_the_server_keeps_the_better_of_average_and_student():
    """A student that learns far too fast is worse than the average, which then stays."""
    wild = Distillation(3, 4, lr=1e3, optimizer="sgd", validate_every=1)
    guarded, served = federation("perada", task(validation=True), distillation=wild)
    plain, _ = federation("perada_no_kd", task())
    run_round(guarded, served, 0)
    run_round(plain, served, 0)

    def right(state):
        model = network().eval()
        model.load_state_dict(state)
        x, y = task(validation=True).server_validation.tensors
        return int((model(x).argmax(1) == y).sum())

    assert right(guarded.global_state) >= right(plain.global_state)
    free, _ = federation("perada", task(), distillation=Distillation(3, 4, lr=1e3, optimizer="sgd"))
    run_round(free, served, 0)
    assert not equal(free.global_state, plain.global_state)


def test_validation_without_labelled_images_is_rejected():
    loop = FederatedLoop(distillation=Distillation(2, 4, validate_every=1))
    trainer = make_trainer(loop, 1, **QUIET)
    module = perada.FederatedClassifier(network(), "full")
    with pytest.raises(ValueError, match=r"validate_every=1 .*labelled images"):
        trainer.fit(module, datamodule=perada.FederatedDataModule(task()))


def test_no_distillation_after_its_last_round():
    two = finetune(task(), rounds=2, distill_until_round=1, distill_lr=0.1)
    federated, served = federation("perada", task(), distillation=Distillation(2, 128, lr=0.1))
    run_round(federated, served, 0)
    federated.settings.algorithm.uses_distillation = False
    run_round(federated, served, 1)
    assert equal(federated.global_state, two.state("global"))
    assert not equal(federated.global_state, finetune(task(), rounds=2, distill_lr=0.1).state("global"))


@pytest.mark.every(4)
@pytest.mark.parametrize("algorithm", ["perada", "fedavg", "fedavg_ft", "standalone"])
def test_scores_are_those_of_the_models_that_come_out(algorithm):
    data = task(test=True)
    run = finetune(data, algorithm, rounds=2)
    x, y = (torch.cat([part.tensors[i] for part in data.test]) for i in range(2))

    def score(model, x, y):
        return accuracy_score(y, model(x).argmax(1))

    personal = [run.personal(m) for m in range(4)]
    everywhere = [score(model, x, y) for model in personal]
    own = [score(model, *data.test[m].tensors) for m, model in enumerate(personal) if len(data.test[m])]
    last = run.metrics["rounds"][-1]
    assert last["personal/global_test"] == pytest.approx(sum(everywhere) / 4, abs=1e-6)
    assert last["personal/local_test"] == pytest.approx(sum(own) / 3, abs=1e-6)
    spread = torch.tensor(own).std(correction=0).item()
    assert last["personal/local_test_std"] == pytest.approx(spread, abs=1e-6)
    if algorithm == "standalone":
        assert "global/global_test" not in last
    else:
        assert last["global/global_test"] == pytest.approx(score(run.global_model(), x, y), abs=1e-6)
