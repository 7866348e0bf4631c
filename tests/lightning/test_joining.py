# SPDX-License-Identifier: Apache-2.0
"""A client that joins a finished run: what it trains, what stays as it is, what is rejected."""

import copy
import math

import pytest
import torch
from opacus.accountants import RDPAccountant
from torch.utils.data import TensorDataset

import perada
from perada.core.rounds import Phase
from perada.data import FederatedData, FederatedDataModule
from perada.privacy import Privacy
from perada.tasks import Classification
from tests.federation.test_both_models import is_typical_by_hand, mixed_by_hand, share_by_hand
from tests.options import sections

# A few steps on few images may make a model worse, which is warned of, and tested below.
pytestmark = pytest.mark.filterwarnings("ignore:client .* its personal model is worse:UserWarning")

SIZE = 10


def slow(*names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def newcomer(size=SIZE, test=6, **options):
    random = torch.Generator().manual_seed(7)
    y = torch.arange(size + test) % 3
    x = torch.randn(size + test, 1, 8, 8, generator=random) + y.view(-1, 1, 1, 1)
    parts = TensorDataset(x[:size], y[:size]), TensorDataset(x[size:], y[size:])
    return FederatedData([parts[0]], [parts[1]] if test else [], **options)


def network(tiny):
    """Without dropout, which a plain loop would have to draw alike."""
    return torch.nn.Sequential(*(layer for layer in tiny.net() if not isinstance(layer, torch.nn.Dropout)))


def finished(tiny, algorithm="perada", **options):
    settings = tiny.options | {"rounds": 2, "logger": False, "local_steps": 3, "momentum": 0.0}
    if algorithm not in ("perada", "feddf"):
        settings |= {"distill_steps": None, "distill_batch_size": None}
    return perada.finetune(
        network(tiny), tiny.data(public=algorithm == "perada"), **sections(**settings | options, algorithm=algorithm)
    )


def batches(rounds, steps, size=SIZE, batch=4):
    """The client's batches, as any client 0 of so many images has them."""
    data = FederatedDataModule(newcomer(size), batch_size=batch)
    data.configure_rounds(seed=0, clients_per_round=None, phases=[Phase(steps=steps)])
    for round in range(rounds):
        for item in data.cohort_loader(data.plan_for([0], round)):
            yield item.x[0], item.y[0]


@pytest.mark.parametrize("algorithm", ["perada", *slow("ditto", "mtl", "pfedme")])
def test_the_client_minimises_its_loss_and_the_pull_towards_the_global_state(tiny, algorithm):
    run = finished(tiny, algorithm, prox_strength=0.7)
    joined = perada.personalize(run, newcomer(), "late", rounds=3, accelerator="cpu")
    model = copy.deepcopy(run.global_model()).train()
    anchor = [parameter.detach().clone() for parameter in model.parameters()]
    for x, y in batches(3, steps=3):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient, at in zip(model.parameters(), gradients, anchor, strict=True):
                parameter -= 0.1 * (gradient + 0.7 * (parameter - at))
    actual = joined.state("personal", "late")
    expected = dict(model.named_parameters())
    moved = max(float((actual[key] - run.state("global")[key]).abs().max()) for key in expected)
    assert moved > 1e-2
    for key, value in expected.items():
        assert torch.allclose(actual[key], value, rtol=0, atol=1e-6)


def test_no_one_else_changes(tiny):
    run = finished(tiny)
    before = [run.state("global"), *run.states("personal")]
    joined = perada.personalize(run, newcomer(), "late", accelerator="cpu")
    assert (run.num_clients, joined.num_clients) == (5, 6)
    after = [joined.state("global"), *joined.states("personal")[:5]]
    for now in (after, [run.state("global"), *run.states("personal")]):
        for one, other in zip(before, now, strict=True):
            assert all(torch.equal(one[key], other[key]) for key in one)
    assert run.info["clients"] is None
    assert joined.info["clients"] == ["0", "1", "2", "3", "4", "late"]


def accuracy(model, part):
    x, y = part.tensors
    return float((model(x).argmax(1) == y).float().mean())


@pytest.mark.slow
def test_the_scores_are_those_of_the_models(tiny):
    run = finished(tiny)
    data = newcomer()
    joined = perada.personalize(run, data, "late", rounds=8, accelerator="cpu")
    record = joined.info["joined"][-1]
    assert record["before"] == pytest.approx(accuracy(run.global_model(), data.test[0]), abs=1e-6)
    assert record["after"] == pytest.approx(accuracy(joined.personal("late"), data.test[0]), abs=1e-6)
    assert joined.metrics["clients"]["personal/local_test"][5] == record["after"]
    assert (record["client"], record["images"], record["rounds"], record["steps"]) == (5, SIZE, 8, 24)


@pytest.mark.slow
def test_a_model_that_became_worse_is_warned_of_with_both_scores(tiny):
    """The client learns other labels of its images than those that it is tested on, which the global model knows."""
    run = finished(tiny)
    data = newcomer()
    x, _ = data.test[0].tensors
    right = TensorDataset(x, run.global_model()(x).argmax(1))
    images = FederatedData([TensorDataset(x, (right.tensors[1] + 1) % 3)], [right], num_classes=3)
    with pytest.warns(UserWarning, match=r"client 'late': .*6 test images, .* % after 100"):
        joined = perada.personalize(run, images, "late", rounds=8, accelerator="cpu")
    record = joined.info["joined"][-1]
    assert record["before"] == 1 and record["after"] < 1


def test_a_client_without_test_images_has_no_scores(tiny):
    record = perada.personalize(finished(tiny), newcomer(test=0), "late", rounds=1, accelerator="cpu").info["joined"][
        -1
    ]
    assert record["before"] is record["after"] is None


@pytest.mark.slow
def test_the_rounds_are_those_that_a_client_took_part_in(tiny):
    run = finished(tiny, rounds=4)  # two of five clients in a round
    assert perada.personalize(run, newcomer(), "late", accelerator="cpu").info["joined"][-1]["rounds"] == 2


def test_without_personal_models_the_global_one_is_fine_tuned(tiny):
    run = finished(tiny, "fedavg")
    joined = perada.personalize(run, newcomer(), "late", accelerator="cpu")
    model = copy.deepcopy(run.global_model()).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(1, steps=3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    result = joined.state("personal", "late")
    assert all(torch.allclose(result[key], value, rtol=0, atol=1e-6) for key, value in model.named_parameters())
    assert torch.equal(joined.state("personal", 2)["6.weight"], run.state("global")["6.weight"])


@pytest.mark.parametrize("sampling", ["uniform", "balanced"])
def test_the_client_trains_the_task_of_the_run_on_mixed_images(tiny, sampling):
    task = Classification(label_smoothing=0.3, class_weights=[1.0, 3.0, 0.5])
    data = FederatedDataModule(tiny.data(), batch_size=4, mixup=0.8, sampling=sampling, task=task)
    run = perada.finetune(
        network(tiny), data, adapter="full", algorithm="fedavg", rounds=1, local_steps=3, lr_local=0.1, lr_personal=0.1,
        training={"momentum": 0.0}, accelerator="cpu", logger=False,
    )  # fmt: skip
    joined = perada.personalize(run, newcomer(), "late", accelerator="cpu")

    mixed = FederatedDataModule(newcomer(), batch_size=4, mixup=0.8, sampling=sampling, task=task)
    mixed.configure_rounds(seed=0, clients_per_round=None, phases=[Phase(steps=3)])
    model = copy.deepcopy(run.global_model()).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in mixed.cohort_loader(mixed.plan_for([0], 0)):
        x, y = mixed.prepare(batch)[1:3]
        losses = torch.nn.functional.cross_entropy(
            model(x[0]), y[0], weight=torch.tensor(task.class_weights), label_smoothing=0.3, reduction="none"
        )
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    result = joined.state("personal", "late")
    assert all(torch.allclose(result[key], value, rtol=0, atol=1e-6) for key, value in model.named_parameters())


@pytest.mark.parametrize("algorithm", ["fedrep", *slow("lg_fedavg", "fedsim_output")])
def test_where_a_part_is_shared_the_other_is_trained(tiny, algorithm):
    run = finished(tiny, algorithm)
    joined = perada.personalize(run, newcomer(), "late", rounds=1, accelerator="cpu")
    start = run.state("global")
    result = joined.state("personal", "late")
    one_client = run.state("personal", 0)
    private = {key for key in start if not torch.equal(one_client[key], start[key])}
    assert private and private < set(start)
    assert {key for key in start if not torch.equal(result[key], start[key])} == private


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["apfl", *slow("standalone", "fedavg_ft")])
def test_other_algorithms_train_a_model_of_the_clients_own(tiny, algorithm):
    run = finished(tiny, algorithm)
    joined = perada.personalize(run, newcomer(), "late", rounds=20, accelerator="cpu")
    record = joined.info["joined"][-1]
    assert record["after"] > 0.6  # of three classes


def test_a_private_run_protects_the_newcomer_alike(tiny):
    privacy = Privacy(noise_multiplier=2.0, delta=1e-3, max_norm=0.5)
    run = finished(tiny, "perada", privacy=privacy, distill_steps=0, distill_batch_size=None)
    joined = perada.personalize(run, newcomer(20), "late", rounds=5, accelerator="cpu")
    sample = joined.info["privacy"]["sample"]
    assert sample["noise_multipliers"] == [2.0] * 6
    assert sample["sample_rates"][5] == pytest.approx(4 / 20)
    assert sample["server"][5] == 0
    accountant = RDPAccountant()
    accountant.history = [(2.0, 4 / 20, 5 * 3)]
    assert sample["release"][5] == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-3)
    assert joined.metrics["clients"]["privacy/release_epsilon"][5] == sample["release"][5]
    assert sample["release"][:5] == run.info["privacy"]["sample"]["release"]


def test_privacy_that_cannot_be_kept_is_rejected(tiny):
    privacy = Privacy(noise_multiplier=1.0, delta=1e-3, max_epsilon=20.0)
    run = finished(tiny, "ditto", privacy=privacy)
    with pytest.raises(ValueError, match=r"exceed max_epsilon=20\.0"):
        perada.personalize(run, newcomer(4), "late", local_steps=500, accelerator="cpu")


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": ["a", "b", "cat"]}, r"the data: class='cat' is unknown; choose one of a, b, c"),
        ({"num_classes": 4}, r"the data have 4 classes without names, but the run has 3"),
        ({"name": "late"}, None),
        ({"name": "2"}, "name='2' is empty or already"),
        ({"name": None}, r"the client has no name; pass one"),
    ],
)
def test_what_does_not_fit_is_one_line(tiny, options, message):
    run = finished(tiny)
    run.info["classes"] = ["a", "b", "c"]
    name = options.pop("name", "late")
    if message is None:
        run = perada.personalize(run, newcomer(), name, rounds=1, accelerator="cpu")
        message = r"name='late' is empty or already the name or number of a client of the run"
    with pytest.raises(ValueError, match=message) as error:
        perada.personalize(run, newcomer(**options), name, rounds=1, accelerator="cpu")
    assert "\n" not in str(error.value)


def test_classes_are_found_by_name(tiny):
    run = finished(tiny)
    data = newcomer()
    run.info["classes"] = ["a", "b", "c"]
    plain = perada.personalize(run, data, "late", rounds=1, accelerator="cpu")
    turned = [TensorDataset(part.tensors[0], (part.tensors[1] + 2) % 3) for part in (data.train[0], data.test[0])]
    named = FederatedData([turned[0]], [turned[1]], classes=["b", "c", "a"], client_names=["late"])
    other = perada.personalize(run, named, rounds=1, accelerator="cpu")
    one = plain.state("personal", "late")
    two = other.state("personal", "late")
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.filterwarnings("ignore:labels are unknown in more than half:UserWarning")
def test_labels_that_the_newcomer_lacks_are_unknown():
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (16, 3), generator=random).float()
    images = torch.randint(0, 256, (16, 3, 8, 8), generator=random, dtype=torch.uint8)
    hospitals = [TensorDataset(images[:8], labels[:8]), TensorDataset(images[8:], labels[8:])]
    data = FederatedData(hospitals, hospitals, classes=["edema", "fracture", "nodule"])
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3))
    options = {"adapter": "full", "algorithm": "ditto", "accelerator": "cpu", "logger": False}
    run = perada.finetune(network, data, pretrained=False, rounds=1, local_steps=2, **options)

    # In the order of its own table, which has no column for nodules; and with a column that is unknown.
    two_labels = TensorDataset(images, labels[:, [1, 0]])
    unknown = labels.clone()
    unknown[:, 2] = float("nan")
    lacking = FederatedData([two_labels], [two_labels], classes=["fracture", "edema"])
    complete = FederatedData([TensorDataset(images, unknown)], [TensorDataset(images, unknown)], classes=data.classes)
    joined = [perada.personalize(run, of_one, "late", rounds=1, accelerator="cpu") for of_one in (lacking, complete)]
    states = [result.state("personal", "late") for result in joined]
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key])
    records = [result.info["joined"][-1] for result in joined]
    assert records[0]["after"] == records[1]["after"]


@pytest.mark.slow
def test_one_client_is_taken_from_several_by_name(tiny):
    run = finished(tiny)
    one = newcomer()
    several = FederatedData([tiny.data().train[0], one.train[0]], [], client_names=["far", "late"])
    chosen, alone = (perada.personalize(run, data, "late", rounds=1, accelerator="cpu") for data in (several, one))
    assert torch.equal(chosen.state("personal", 5)["0.weight"], alone.state("personal", 5)["0.weight"])
    with pytest.raises(ValueError, match=r"2 clients, .*'x'.*far, late"):
        perada.personalize(run, several, "x")
    with pytest.raises(ValueError, match=r"2 clients, .*far, late"):
        perada.personalize(run, several)


@pytest.mark.parametrize(
    ("algorithm", "fixed_share", "size"),
    [("perada", None, 30), pytest.param("fedavg", 0.3, 12, marks=pytest.mark.slow)],
)
def test_a_newcomer_predicts_with_both_models(tiny, tmp_path, algorithm, fixed_share, size):
    evaluation = {"prediction": "both", "personal_share": fixed_share}
    run = perada.Run.load(
        finished(tiny, algorithm, evaluation=evaluation).save(tmp_path / "run"), backbone=network(tiny)
    )
    data = newcomer(size)
    joined = perada.personalize(run, data, "late", rounds=1, accelerator="cpu")
    joined.add_client(tmp_path / "run", "late")
    joined.save(tmp_path / "whole")

    training_images, training_labels = data.train[0].tensors
    test_images, test_labels = data.test[0].tensors
    images = torch.cat([test_images, test_images + 3])
    is_typical = is_typical_by_hand(training_images, images)
    assert is_typical.any() and not is_typical.all()
    share = fixed_share
    if share is None:
        share = share_by_hand(run, training_images, training_labels)
        assert 0.5 < share <= 1
    with torch.no_grad():
        personal = joined.personal("late")(images).softmax(1)
        shared = run.global_model()(images).softmax(1)
    mixture = mixed_by_hand(personal, shared, share, training_labels)
    expected = torch.where(is_typical.unsqueeze(1), mixture, shared)
    folders = (tmp_path / "run", tmp_path / "whole")
    for predicting in (joined, *(perada.Run.load(folder, backbone=network(tiny)) for folder in folders)):
        actual = predicting.predict(images, "late")
        assert actual.typical.tolist() == is_typical.tolist()
        torch.testing.assert_close(actual.probabilities, expected)
        assert torch.equal(predicting.predict(images, 4).probabilities, run.predict(images, 4).probabilities)

    scores = joined.metrics["clients"]
    if algorithm == "fedavg":
        assert "both/local_test" not in scores
        return
    right = expected[: len(test_images)].argmax(1) == test_labels
    assert scores["both/local_test"][5] == pytest.approx(float(right.float().mean()), abs=1e-6)
    assert scores["typical/local_test"][5] == pytest.approx(float(is_typical[: len(test_images)].double().mean()))
    # It has none of the others' images.
    assert math.isnan(scores["both/global_test"][5]) and not math.isnan(scores["both/global_test"][4])
    without_test_images = perada.personalize(run, newcomer(size, test=0), "late", rounds=1, accelerator="cpu")
    assert without_test_images.predict(images, "late").typical is not None


def test_a_newcomers_folder_of_adapters_has_its_statistics(tiny, tmp_path):
    folder = finished(tiny, "ditto", evaluation={"prediction": "both"}).export(tmp_path / "run")
    run = perada.Run.load(folder, backbone=network(tiny))
    joined = perada.personalize(run, newcomer(), "late", rounds=1, accelerator="cpu")
    images, _ = newcomer().test[0].tensors
    images = torch.cat([images, images + 3])
    joined.add_client(folder, "late")
    joined.export(tmp_path / "whole")
    expected = joined.predict(images, "late")
    assert expected.typical.any() and not expected.typical.all()
    for written in (folder, tmp_path / "whole"):
        loaded = perada.Run.load(written, backbone=network(tiny))
        actual = loaded.predict(images, "late")
        assert torch.equal(actual.typical, expected.typical)
        assert torch.equal(actual.probabilities, expected.probabilities)
        # The others are what they were.
        assert torch.equal(loaded.predict(images, 0).probabilities, run.predict(images, 0).probabilities)


def test_an_ensemble_cannot_be_joined(tiny):
    run = finished(tiny, "fed_ensemble", algorithm_options={"modes": 2})
    with pytest.raises(ValueError, match="averaged"):
        perada.personalize(run, newcomer(), "late")


def test_a_network_of_another_class_is_not_made_from_a_record(tiny):
    run = finished(tiny)
    run.info["training"]["algorithm"] = {"class": "os.system", "options": {}}
    with pytest.raises(ValueError, match=r"'os\.system'"):
        perada.personalize(run, newcomer(), "late")
