# SPDX-License-Identifier: Apache-2.0
import math
from itertools import islice

import pytest
import torch
from torch.utils.data import TensorDataset

from perada.core.rounds import batch_indices, make_plan, sample_cohort
from perada.core.seeding import generator
from perada.data import FederatedData, FederatedDataModule, Phase

# The numbers of samples stand for images, and are larger than pixels.
pytestmark = pytest.mark.filterwarnings("ignore:the floating-point images of the training set:UserWarning")

SIZES = (7, 20, 3, 11, 20)
B = 4


def number_samples(sizes=SIZES):
    """Client m's sample i is the number 1000 m + i, so that a batch shows where each row comes from."""
    return [
        TensorDataset(1000.0 * client + torch.arange(size).view(-1, 1) + 0.5, torch.arange(size) % 3)
        for client, size in enumerate(sizes)
    ]


TWO_EPOCHS = (Phase(epochs=2),)


def datamodule(phases=TWO_EPOCHS, clients_per_round=None, batch_size=B, seed=5, **options):
    module = FederatedDataModule(FederatedData(train=number_samples()), batch_size=batch_size, **options)
    module.configure_rounds(seed=seed, clients_per_round=clients_per_round, phases=phases, image_config=None)
    return module


def stream(size, seed, round, client):
    """A client's samples, one after another, for ever."""
    source = generator(seed, "batches", round, client)
    while True:
        yield from torch.randperm(size, generator=source).tolist()


def rows_of(loader):
    """What each client is given: a list of batches, each a list of sample numbers."""
    seen = {}
    for batch in loader:
        for row, client in enumerate(batch.clients):
            real = batch.x[row, : batch.counts[row], 0] - 0.5
            assert (batch.x[row, batch.counts[row] :] == 0).all()
            assert (batch.y[row, batch.counts[row] :] == 0).all()
            assert (batch.y[row, : batch.counts[row]] == (real - 1000 * client) % 3).all()
            seen.setdefault(client, []).append((real - 1000 * client).int().tolist())
    return seen


@pytest.mark.every(5)
@pytest.mark.parametrize(
    "phases", [(Phase(epochs=2),), (Phase("a", epochs=1.5), Phase("b", steps=4)), (Phase(steps=1),)]
)
@pytest.mark.parametrize("batch_size", [1, 4, 11, 64, "full"])
def test_batches_are_cut_from_each_clients_stream(phases, batch_size):
    module = datamodule(phases, batch_size=batch_size)
    seen = rows_of(module.cohort_loader(module.plan(3)))
    for client, size in enumerate(SIZES):
        rows = size if batch_size == "full" else min(size, batch_size)
        steps = sum(phase.steps or math.ceil(phase.epochs * size / rows) for phase in phases)
        expected = iter(stream(size, 5, 3, client))
        assert seen[client] == [list(islice(expected, rows)) for _ in range(steps)]


def test_an_epoch_holds_every_sample_once_before_any_comes_again():
    seen = rows_of(datamodule().train_dataloader())
    for client, size in enumerate(SIZES):
        flat = [sample for batch in seen[client] for sample in batch]
        for epoch in range(2):
            assert sorted(flat[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_full_batches_are_the_whole_client_once_an_epoch():
    module = datamodule(batch_size="full")
    seen = rows_of(module.train_dataloader())
    assert {client: len(batches) for client, batches in seen.items()} == dict.fromkeys(range(5), 2)
    assert all(sorted(batch) == list(range(SIZES[client])) for client, batches in seen.items() for batch in batches)


def test_active_clients_are_a_prefix_and_the_longest_come_first():
    module = datamodule((Phase("a", epochs=2), Phase("b", epochs=1)))
    plan = module.plan(0)
    assert plan.clients == (1, 4, 3, 0, 2)
    assert plan.steps == ((10, 10, 6, 4, 2), (5, 5, 3, 2, 1))
    batches = list(module.train_dataloader())
    assert len(batches) == len(module.train_dataloader()) == 15
    for step, batch in enumerate(batches):
        assert batch.phase == int(step >= 10)
        within = step - 10 * batch.phase
        assert (batch.step, batch.round) == (within, 0)
        assert batch.clients == tuple(
            client for client, steps in zip(plan.clients, plan.steps[batch.phase], strict=True) if steps > within
        )
        assert batch.x.shape[:2] == batch.y.shape == (len(batch.clients), max(batch.counts))
        assert batch.counts == tuple(min(B, SIZES[client]) for client in batch.clients)


def test_plans_are_pure_and_differ_between_rounds_and_seeds():
    module = datamodule(clients_per_round=2)
    other = datamodule(clients_per_round=2, seed=6)
    plans = [module.plan(round) for round in range(20)]
    assert [module.plan(round) for round in reversed(range(20))] == plans[::-1]
    assert [other.plan(round).clients for round in range(20)] != [plan.clients for plan in plans]
    first = rows_of(module.cohort_loader(plans[3]))
    again = rows_of(module.cohort_loader(plans[3]))
    assert first == again
    assert rows_of(datamodule().cohort_loader(datamodule().plan(0))) != rows_of(
        datamodule().cohort_loader(datamodule().plan(1))
    )


def test_a_clients_batches_do_not_depend_on_who_else_is_in_the_cohort():
    module = datamodule()
    together = rows_of(module.cohort_loader(module.plan(2)))
    for client in range(5):
        assert rows_of(module.cohort_loader(module.plan_for([client], 2)))[client] == together[client]


def test_cohorts_are_uniform_without_replacement():
    drawn = [sample_cohort(0, round, 10, 3) for round in range(2000)]
    assert all(len(set(cohort)) == 3 for cohort in drawn)
    often = torch.bincount(torch.tensor(drawn).flatten(), minlength=10)
    # Each client is in 600 of 2,000 cohorts on average, with standard deviation sqrt(2000 · 0.3 · 0.7) = 20.5.
    assert ((often - 600).abs() < 4 * 20.5).all()


def test_the_global_random_stream_is_left_alone():
    before = torch.get_rng_state()
    list(datamodule(clients_per_round=2).train_dataloader())
    assert torch.equal(before, torch.get_rng_state())


def test_tenths_of_an_epoch_are_counted_exactly():
    # In floating point 0.1 · 30 / 1 is a little more than 3, which rounded up would be 4.
    assert [Phase(epochs=0.1).local_steps(size, 1) for size in (10, 30, 31)] == [1, 3, 4]


def test_public_stream_is_permutations():
    rows = batch_indices(10, 4, 5, 0, "public", 1)
    assert rows.shape == (5, 4)
    assert rows.flatten()[:10].sort().values.tolist() == rows.flatten()[10:].sort().values.tolist() == list(range(10))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 1, "steps": 2}, "leave one out"),
        ({"epochs": 0}, r"epochs .*got 0"),
        ({"epochs": float("nan")}, r"epochs .*got nan"),
        ({"steps": 1.5}, r"steps .*got 1.5"),
    ],
)
def test_phases_have_one_length(options, words):
    with pytest.raises(ValueError, match=words):
        Phase("local", **options)


def test_ties_in_size_are_ordered_by_id():
    assert make_plan(0, [3, 1, 2, 0], [5, 5, 5, 5], [Phase()], 2).clients == (0, 1, 2, 3)
