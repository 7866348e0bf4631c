# SPDX-License-Identifier: Apache-2.0
"""How many clients train together on a processor."""

import pytest
import torch
from torch import nn

from perada.core.states import Merged
from perada.engine.chunk_sizes import Chunks, activation_bytes, chunks_in_memory, clients_in_cache, is_mostly_trained
from perada.lightning import setup

from ..algorithms.problems import finetune
from ..methods import make_method


def network(frozen, trained):
    """Two layers with so many weights."""
    model = nn.Sequential(nn.Linear(frozen, 1, bias=False), nn.Linear(trained, 1, bias=False))
    model[0].requires_grad_(False)
    return model


def test_as_many_as_fit_train_together():
    # 48 MB hold the weight, gradient and momentum of 2^20 numbers of 4 bytes 4 times, and those of 3 · 2^20 once.
    for numbers, clients in ((2**20, 4), (2**18, 16), (3 * 2**20, 1), (2**24, 1)):
        assert clients_in_cache(4 * numbers, 4 * numbers) == clients
    # Two models trained in the same steps take twice the room, one after the other less.
    assert clients_in_cache(8 * 2**19, 8 * 2**19) == 4
    assert clients_in_cache(8 * 2**19, 4 * 2**19) == 6


def test_few_train_together_only_where_most_is_trained():
    assert is_mostly_trained(network(1, 2**18))
    assert not is_mostly_trained(network(2**20, 2**18))


def test_weights_that_the_server_merges_into_are_frozen():
    model = network(2**20, 2**18)
    model[0].weight = Merged(torch.zeros(1, 2**20))
    assert not is_mostly_trained(model)


def test_activations_are_counted_once_for_each_image():
    hidden = nn.Linear(16, 32)
    model = nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(32, 3))
    image = torch.zeros(1, 4, 4)
    # The hidden layer keeps its 16 inputs; ReLU and the last layer keep the same 32 numbers of 4 bytes.
    assert activation_bytes(model, image) == 4 * (16 + 32)
    # With a frozen hidden layer there is no backward pass before the last one.
    hidden.requires_grad_(False)
    assert activation_bytes(model, image) == 4 * 32


def test_of_recomputed_blocks_the_inputs_and_the_largest_are_counted():
    def block(hidden):
        return nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 8))

    blocks = [block(8), block(64), block(16)]
    model = nn.Sequential(nn.Flatten(), *blocks, nn.Linear(8, 3))
    image = torch.zeros(1, 2, 4)
    # Each block and the head keep 8 inputs. The second block adds 64 numbers, which ReLU and its last layer keep.
    assert activation_bytes(model, image, ["1", "2", "3"]) == 4 * (4 * 8 + 64)
    assert activation_bytes(model, image) == 4 * (4 * 8 + 8 + 64 + 16)
    # Nothing is kept of a frozen block before all that is trained.
    blocks[0].requires_grad_(False)
    assert activation_bytes(model, image, ["1", "2", "3"]) == 4 * (3 * 8 + 64)


def test_counting_activations_changes_nothing():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(2, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert activation_bytes(model, torch.zeros(1, 3, 3)) > 0
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class ReadsNumbers(nn.Module):
    """Needs the numbers of its input."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x.flatten(1)) if x.sum() > 0 else self.fc(x.flatten(1) * 2)


def test_activations_of_a_network_that_reads_numbers_are_unknown():
    assert activation_bytes(ReadsNumbers(), torch.ones(1, 2, 2)) is None


def test_clients_behind_a_frozen_backbone_are_divided_evenly():
    for client_bytes, clients, expected in (
        (96 * 2**20, 20, 4),  # 4 of 96 MB fit 384 MB: 5 chunks
        (48 * 2**20, 20, 7),  # 8 fit: 3 chunks of 7, 7 and 6
        (2**31, 20, 1),  # not even one fits
        (2**10, 20, 20),
    ):
        assert chunks_in_memory(client_bytes, clients, threads=1) == (expected, 1)


@pytest.mark.parametrize(
    ("megabytes", "clients", "threads", "expected"),
    [
        (48, 20, 2, (5, 2)),  # 8 fit 384 MB: 4 chunks of 5, two for each thread
        (413, 8, 2, (1, 2)),  # 2 fit 1 GB
        (600, 8, 2, (1, 1)),  # 2 do not fit
        (1, 8, 4, (2, 4)),
        (1, 7, 2, (7, 1)),  # 4 and 3: one thread would wait for a seventh of the other's time
        (1, 20, 8, (20, 1)),  # some threads would have 3 clients, others 2
        (48, 20, 16, (7, 1)),
        (1, 21, 2, (11, 2)),  # 11 and 10
    ],
)
def test_threads_train_side_by_side_where_all_are_busy(megabytes, clients, threads, expected):
    assert chunks_in_memory(megabytes * 2**20, clients, threads) == expected


def test_frozen_runs_count_images_and_models_of_a_step(monkeypatch):
    counted = {}
    for algorithm in ("fedavg", "ditto"):
        monkeypatch.setattr(setup, "is_mostly_trained", lambda model: False)
        monkeypatch.setattr(setup, "activation_bytes", lambda model, image, recomputed: 10)

        def chunks_in_memory(client_bytes, clients, threads, key=algorithm):
            counted[key] = (client_bytes, clients)
            return Chunks(1)

        monkeypatch.setattr(setup, "chunks_in_memory", chunks_in_memory)
        finetune(make_method(algorithm), rounds=1)
    (client_bytes, clients), both = counted["fedavg"], counted["ditto"]
    assert both == (2 * client_bytes, clients)


@pytest.mark.parametrize(
    ("algorithm", "models", "trained"),
    [
        ("fedavg", 1, 1.0),
        ("ditto", 2, 2.0),
        ("perada", 2, 2.0),
        ("fedsim_output", 1, 1.0),  # two roles that have different parts of one model
        ("fedrep", 1, None),  # the same, one after the other: the body is larger than the head
    ],
)
def test_a_run_counts_what_its_clients_have_and_what_they_train_at_a_time(algorithm, models, trained, monkeypatch):
    counted = []
    monkeypatch.setattr(setup, "clients_in_cache", lambda *sizes: counted.append(sizes) or 1)
    run = finetune(make_method(algorithm), rounds=1)
    state = run.state("global") if algorithm in ("fedavg", "ditto", "perada") else run.state("personal", 0)
    model_bytes = sum(value.nbytes for value in state.values())
    parameters = [name for name in state if "running" not in name and "num_batches" not in name]
    ((state_bytes, trained_bytes),) = counted
    assert state_bytes == models * model_bytes
    if trained:
        assert trained_bytes == trained * sum(state[name].nbytes for name in parameters)
    else:
        assert model_bytes / 2 < trained_bytes < model_bytes
