# SPDX-License-Identifier: Apache-2.0
"""Class-balanced sampling against plain loops, and in runs, deployments and processes."""

import bisect
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import perada
from perada.core.checks import OptionError
from perada.core.rounds import Phase, RoundPlan, balanced_indices
from perada.core.seeding import generator
from perada.data import FederatedData, FederatedDataModule
from perada.data.batches.round_batches import RoundBatches
from perada.data.batches.samples import MapStore, TensorStore
from perada.deploy.site.client import with_client_index
from perada.tasks import MultiLabel
from tests.rejections import rejects

# The second client has no images of class 1.
LABELS = ([0] * 17 + [1] * 2 + [2], [2] * 3 + [0] * 9)


def client_data(labels, seed=0):
    random = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(len(labels), 1, 4, 4, generator=random), torch.tensor(labels))


def federated():
    return FederatedData([client_data(labels, seed) for seed, labels in enumerate(LABELS)], num_classes=3)


def drawn_by_loop(labels, rows, seed, ids):
    """The class of a row is that in whose share of [0, 1) its first number lies; likewise the image of the class."""
    members = {}
    for index, label in enumerate(labels):
        members.setdefault(label, []).append(index)
    classes = [members[label] for label in sorted(members)]
    drawn = []
    for first, second in torch.rand(rows, 2, dtype=torch.float64, generator=generator(seed, "batches", *ids)).tolist():
        of_class = classes[bisect.bisect([k / len(classes) for k in range(len(classes))], first) - 1]
        drawn.append(of_class[bisect.bisect([k / len(of_class) for k in range(len(of_class))], second) - 1])
    return drawn


@pytest.mark.parametrize("labels", [*LABELS, [1, 1, 1], [5, 0, 5, 5]], ids=len)
@pytest.mark.parametrize("batch_size", [4, 100, "full"])
def test_a_plain_loop_draws_the_same(labels, batch_size):
    drawn = balanced_indices(torch.tensor(labels), batch_size, 7, 3, "batches", 2, 1)
    rows = len(labels) if batch_size == "full" else min(batch_size, len(labels))
    assert drawn.shape == (7, rows)
    assert drawn.flatten().tolist() == drawn_by_loop(labels, 7 * rows, 3, (2, 1))
    longer = balanced_indices(torch.tensor(labels), batch_size, 9, 3, "batches", 2, 1)
    assert torch.equal(longer[:7], drawn)


@pytest.mark.parametrize("labels", LABELS, ids=len)
def test_classes_are_equally_likely_and_so_are_the_images_of_a_class(labels):
    rows = 60_000
    drawn = balanced_indices(torch.tensor(labels), 6, rows // 6, 0, "batches", 0, 0).flatten().tolist()
    sizes = Counter(labels)
    counts = Counter(drawn)
    for index, label in enumerate(labels):
        share = 1 / (len(sizes) * sizes[label])
        standard_deviation = (rows * share * (1 - share)) ** 0.5
        assert abs(counts[index] - rows * share) < 5 * standard_deviation


class OneByOne(Dataset):
    """A client whose images are read one by one, and whose labels are declared."""

    def __init__(self, dataset):
        self.dataset = dataset
        self.targets = dataset.tensors[1]

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        image, label = self.dataset[index]
        return image, int(label)


def module(kind=None, **options):
    data = federated()
    if kind is not None:
        data = FederatedData([kind(dataset) for dataset in data.train], num_classes=3)
    served = FederatedDataModule(data, batch_size=4, sampling="balanced", **options)
    served.configure_rounds(seed=5, clients_per_round=None, phases=[Phase("first", 2), Phase("second", steps=3)])
    return served


def rows_of(batches, client):
    rows = []
    for batch in batches:
        if client in batch.clients:
            place = batch.clients.index(client)
            rows.append((batch.x[place, : batch.counts[place]], batch.y[place, : batch.counts[place]]))
    return rows


def assert_same_rows(first, second):
    assert len(first) == len(second) > 0
    for (images, labels), (other_images, other_labels) in zip(first, second, strict=True):
        assert torch.equal(images, other_images)
        assert torch.equal(labels, other_labels)


def test_batches_depend_on_seed_round_and_client_and_their_number_on_neither():
    served = module()
    plan = served.plan(2)
    together = list(served.cohort_loader(plan))
    uniform = FederatedDataModule(federated(), batch_size=4)
    uniform.configure_rounds(seed=5, clients_per_round=None, phases=[Phase("first", 2), Phase("second", steps=3)])
    assert [(batch.clients, batch.counts) for batch in together] == [
        (batch.clients, batch.counts) for batch in uniform.cohort_loader(uniform.plan(2))
    ]
    for client, labels in enumerate(LABELS):
        by_itself = list(served.cohort_loader(served.plan_for([client], 2)))
        assert_same_rows(rows_of(together, client), rows_of(by_itself, client))
        expected = balanced_indices(torch.tensor(labels), 4, len(by_itself), 5, "balanced", 2, client)
        for (_, results), indices in zip(rows_of(together, client), expected, strict=True):
            assert results.tolist() == torch.tensor(labels)[indices].tolist()
    other_round = list(served.cohort_loader(served.plan(3)))
    assert not torch.equal(other_round[0].y, together[0].y)
    full_pass = served.cohort_loader(served.plan_for([0], 2, [Phase("compare", 1)]), each_image_once=True)
    assert sorted(torch.cat([labels for _, labels in rows_of(full_pass, 0)]).tolist()) == sorted(LABELS[0])


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_images_that_are_read_one_by_one_are_drawn_alike(workers):
    served = module()
    one_by_one = module(OneByOne, num_workers=workers)
    assert isinstance(served.checked.train, TensorStore)
    assert isinstance(one_by_one.checked.train, MapStore)
    for client in range(2):
        assert_same_rows(
            rows_of(served.cohort_loader(served.plan(0)), client),
            rows_of(one_by_one.cohort_loader(one_by_one.plan(0)), client),
        )


@pytest.mark.parametrize("kind", [None, OneByOne])
def test_a_site_draws_as_its_client_in_the_simulation(kind):
    served = module(kind)
    simulated = rows_of(served.cohort_loader(served.plan(1)), 1)
    train = federated().train[1]
    site = FederatedDataModule(
        FederatedData([train if kind is None else kind(train)], num_classes=3), batch_size=4, sampling="balanced"
    )
    site.setup()
    store = with_client_index(site.checked.train, 1)
    plan = RoundPlan(1, (1,), tuple((steps[1],) for steps in served.plan(1).steps))
    assert served.plan(1).clients == (0, 1)
    assert_same_rows(simulated, rows_of(RoundBatches(store, plan, 4, 5, sampling="balanced"), 1))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def fit(rounds=2, **options):
    data = FederatedDataModule(federated(), batch_size=4, sampling=options.pop("sampling", "balanced"))
    return perada.finetune(
        network(), data, **{"adapter": "full", "algorithm": "fedavg", "rounds": rounds, "lr_local": 0.1,
        "training": {"momentum": 0.0}, "logger": False} | options,
    )  # fmt: skip


@pytest.mark.parametrize("engine", ["folded", "loop"])
def test_both_engines_train_as_a_plain_loop_does(engine):
    run = fit(rounds=1, training={"momentum": 0.0, "engine": engine})
    weights = []
    for client, labels in enumerate(LABELS):
        model = network()
        images, targets = federated().train[client].tensors
        steps = -(-len(labels) // 4)
        for indices in balanced_indices(targets, 4, steps, 0, "balanced", 0, client):
            model.zero_grad()
            F.cross_entropy(model(images[indices]), targets[indices]).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        weights.append(model[1].weight.detach())
    torch.testing.assert_close(run.global_model()[1].weight, (weights[0] + weights[1]) / 2)


def test_a_run_resumes_bit_by_bit_and_only_with_the_same_sampling(tmp_path):
    logs = {"logger": True, "default_root_dir": str(tmp_path / "first")}
    fit(rounds=1, **logs)
    (checkpoint,) = (tmp_path / "first").rglob("last.ckpt")
    resumed = fit(ckpt_path=str(checkpoint), logger=True, default_root_dir=str(tmp_path / "second"))
    uninterrupted = fit()
    assert torch.equal(resumed.global_model()[1].weight, uninterrupted.global_model()[1].weight)
    with pytest.raises(ValueError, match=r"sampling='balanced'.*'uniform'"):
        fit(ckpt_path=str(checkpoint), sampling="uniform", default_root_dir=str(tmp_path / "third"))


def test_balanced_sampling_is_rejected_with_the_privacy_of_images_only():
    with pytest.raises(OptionError, match="sampling='balanced'"):
        fit(privacy={"noise_multiplier": 1.0})
    run = fit(client_privacy={"noise_multiplier": 1.0, "delta": 0.1}, clients_per_round=1)
    assert run.info["training"]["sampling"] == "balanced"


class Undeclared(OneByOne):
    """A client whose labels are known only once its images are read, of which there are too many."""

    def __init__(self, dataset):
        super().__init__(dataset)
        del self.targets


def test_data_without_one_known_class_for_each_image_are_rejected(monkeypatch):
    with rejects("sampling", "weighted"):
        FederatedDataModule(federated(), sampling="weighted")
    several = FederatedData([TensorDataset(torch.rand(4, 1, 4, 4), torch.eye(4)[:, :3].float())])
    with pytest.raises(OptionError, match="several labels"):
        FederatedDataModule(several, sampling="balanced", task=MultiLabel()).setup()
    monkeypatch.setattr("perada.data.labels.SCAN_LIMIT", 5)
    unread = FederatedData([Undeclared(client_data(LABELS[0]))], num_classes=3)
    with pytest.raises(OptionError, match="sampling='uniform'"):
        FederatedDataModule(unread, sampling="balanced").setup()
