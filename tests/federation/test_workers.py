# SPDX-License-Identifier: Apache-2.0
"""Chunks that train side by side in threads, against the same chunks one after another."""

import copy
import random
import threading
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import perada
from perada.algorithms import APFL, Ditto, FedAvg, FedAvgFT, FedRep, PerAda, PFedMe, Scaffold
from perada.core.rounds import Phase, RoundPlan, batch_places
from perada.data import FederatedData, FederatedDataModule
from perada.data.batches.round_batches import RoundBatches
from perada.engine.engine import Engine
from perada.federation.cohort import Cohort
from perada.federation.global_streams import GlobalStreams
from perada.federation.settings import LocalTraining, Settings
from perada.federation.workers import MAX_QUEUED, SameThread, WorkerThread, trains_side_by_side, workers_of
from perada.privacy import ClientPrivacy, Privacy
from perada.server import Distillation

CPU = torch.device("cpu")


class Network(nn.Module):
    """Notes the threads in which it runs, for all of its copies."""

    threads: ClassVar = set()

    def __init__(self, dropout=0.0, draw=None):
        super().__init__()
        self.draw = draw
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(36, 3)
        self.dropout = dropout

    def forward(self, x):
        self.threads.add(threading.get_ident())
        features = self.norm(self.conv(x)).relu().flatten(1)
        # Unlike a layer's, this dropout draws from the global generator.
        features = F.dropout(features, self.dropout, self.training)
        if self.draw is not None and self.training:
            features = features * self.draw(self)
        return self.fc(self.drop(features))


def train_clients(algorithm, dropout=0.0, rounds=2, draw=None, local_steps=None, network=None, **options):
    """The final states of six clients of unequal sizes, in chunks of one or two."""
    Network.threads.clear()
    clients = []
    for size in (5, 8, 3, 8, 8, 6):
        images = torch.Generator().manual_seed(size)
        x = torch.randn(size, 2, 5, 5, generator=images)
        clients.append(TensorDataset(x, torch.randint(0, 3, (size,), generator=images)))
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    run = perada.finetune(
        copy.deepcopy(network) or Network(dropout, draw),
        perada.FederatedData(clients, test=[]),
        adapter="full",
        algorithm=algorithm,
        rounds=rounds,
        batch_size=4,
        training=perada.Training(
            clients_per_chunk=options.pop("clients_per_chunk", 1),
            lr_local=0.1,
            lr_personal=0.1,
            **({} if local_steps is None else {"local_steps": local_steps}),
        ),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **options,
    )
    states = {f"global {name}": value for name, value in run.state("global").items()}
    for client in range(6):
        states |= {f"{client} {name}": value for name, value in run.state("personal", client).items()}
    return states


def other_threads():
    """The threads that the network has run in, without this one, which tries it at set-up and scores it."""
    return Network.threads - {threading.get_ident()}


def assert_equal(states, others):
    assert states.keys() == others.keys()
    for name, value in states.items():
        assert torch.equal(value, others[name]), name


@pytest.mark.parametrize("algorithm", [FedAvg, Ditto, APFL, FedRep, PFedMe, Scaffold, lambda: PerAda(distill=False)])
@pytest.mark.parametrize("clients_per_chunk", [1, 2])
@pytest.mark.every(3)
def test_threads_change_no_result(algorithm, clients_per_chunk, two_threads):
    """Compared to the same run with a single thread, to the last bit, with dropout from the clients' streams."""
    states = train_clients(algorithm(), clients_per_chunk=clients_per_chunk)
    assert len(other_threads()) >= 2  # new ones in each round
    torch.set_num_threads(1)
    assert_equal(states, train_clients(algorithm(), clients_per_chunk=clients_per_chunk))
    assert not other_threads()


def test_the_chunks_of_one_round_train_in_two_threads(two_threads):
    """In several rounds there would be as many threads even if each had a single one."""
    train_clients(FedAvg(), rounds=1)
    assert len(other_threads()) == 2


class FrozenNetwork(Network):
    """Most of its weights are frozen by ``bias_norm``."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 2, 21, padding=10)

    def forward(self, x):
        return super().forward(self.first(x))


def trained_behind_a_frozen_backbone(sizes, options):
    """The global state after one round of clients of these sizes, and the number of threads besides this one."""
    Network.threads.clear()
    clients = []
    for client, size in enumerate(sizes):
        random = torch.Generator().manual_seed(client)
        x = torch.randn(size, 2, 5, 5, generator=random)
        clients.append(TensorDataset(x, torch.randint(0, 3, (size,), generator=random)))
    torch.manual_seed(0)
    run = perada.finetune(
        FrozenNetwork(),
        perada.FederatedData(clients, test=[]),
        adapter="bias_norm",
        algorithm=FedAvg(),
        rounds=1,
        batch_size=4,
        training=perada.Training(lr_local=0.1, local_epochs=5, **options),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    return run.state("global"), len(other_threads())


def test_chunks_behind_a_frozen_backbone_train_side_by_side(two_threads):
    """Two chunks of two clients, against one chunk of all four, whose products are divided otherwise."""
    state, threads = trained_behind_a_frozen_backbone((8, 8, 8, 8), {})
    assert threads == 2
    torch.set_num_threads(1)
    expected, threads = trained_behind_a_frozen_backbone((8, 8, 8, 8), {})
    assert threads == 0
    torch.testing.assert_close(state, expected)


@pytest.mark.every(3)
@pytest.mark.parametrize("algorithm", [Ditto, FedAvg, lambda: PerAda(distill=False)])
def test_threads_train_in_the_precision_of_the_run(algorithm, two_threads):
    """Autocast is a setting of each thread: states are those of one thread in bfloat16, not in single precision."""
    states = train_clients(algorithm(), precision="bf16-mixed")
    assert len(other_threads()) >= 2
    torch.set_num_threads(1)
    assert_equal(states, train_clients(algorithm(), precision="bf16-mixed"))
    single = train_clients(algorithm())
    assert not all(torch.equal(states[name], value) for name, value in single.items())


def test_a_task_runs_under_the_autocast_of_the_call_that_submits_it(two_threads):
    worker = WorkerThread(Engine(Network()))
    dtypes = []

    def multiply():
        dtypes.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)

    worker.submit(multiply)
    with torch.autocast("cpu", torch.bfloat16):
        worker.submit(multiply)
        with torch.autocast("cpu", enabled=False):
            worker.submit(multiply)
    worker.finish()
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32]


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((40, 4, 4, 4), {}),  # one thread would train for most of the round
        ((8, 8, 8), {}),
        ((8, 8, 8, 8), {"clients_per_chunk": 2}),  # bounds the memory
        ((8, 8, 8, 8), {"engine": "loop"}),
    ],
)
def test_passes_behind_a_frozen_backbone_are_divided_among_cores(sizes, options, two_threads):
    assert trained_behind_a_frozen_backbone(sizes, options)[1] == 0


def test_batches_of_chunks_that_train_at_a_time_come_in_turns():
    """Both threads have something to do until the last step, however many steps a client takes."""
    steps = (9, 9, 5, 4, 4, 3, 1, 1)
    plan = RoundPlan(0, tuple(range(8)), (steps, steps), clients_per_chunk=1, chunks_at_a_time=2)
    places = list(batch_places(plan))
    assert len(places) == plan.num_batches == 2 * sum(steps)
    # No chunk is served twice in a row: there is always another one.
    starts = [place.start for place in places]
    for before, after in pairwise(starts[:-2]):
        assert before != after
    of_clients = {client: [] for client in range(8)}
    for place in places:
        of_clients[place.start].append((place.phase, place.step))
    for client, taken in of_clients.items():
        assert taken == [(phase, step) for phase in (0, 1) for step in range(steps[client])]


def test_a_network_that_draws_from_the_global_generator_stays_in_one_thread(two_threads):
    assert_equal(train_clients(FedAvg(), dropout=0.2, rounds=1), train_clients(FedAvg(), dropout=0.2, rounds=1))
    assert len(other_threads()) == 1


class Raise(pl.Callback):
    """Changes an attribute of the network when a round begins."""

    def __init__(self, round, name, value):
        self.round = round
        self.name = name
        self.value = value

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.round:
            for module in pl_module.modules():
                if isinstance(module, Network):
                    setattr(module, self.name, self.value)


def draw_from_python(network):
    return 0.5 + random.random()


def draw_from_numpy(network):
    return float(np.random.uniform(0.5, 1.5))


def draw_from_the_fifth_call(network):
    """Each thread's copy of the network counts its calls."""
    network.calls = getattr(network, "calls", 0) + 1
    return float(torch.rand(())) if network.calls > 4 else 1.0


LATE_DRAWS = {
    "dropout from the second round": {"callbacks": [Raise(1, "dropout", 0.3)]},
    "Python, from the second round": {"callbacks": [Raise(1, "draw", draw_from_python)]},
    "NumPy, from the second round": {"callbacks": [Raise(1, "draw", draw_from_numpy)]},
    "Python, always": {"draw": draw_from_python},
    "NumPy, always": {"draw": draw_from_numpy},
}


def trained_in_order(monkeypatch, *args, **options):
    """The same, with each step after the one before, in one thread from the first step of the run."""
    with monkeypatch.context() as patch:
        patch.setattr(GlobalStreams, "are_unchanged", lambda streams: False)
        states = train_clients(*args, **options)
    assert len(other_threads()) <= options.get("rounds", 2) + 1
    return states


@pytest.mark.parametrize("case", LATE_DRAWS)
def test_draws_that_begin_late_are_drawn_in_order(case, two_threads, monkeypatch):
    """In whatever round a network begins to draw from a global stream, and from whichever: as in one thread."""
    options = LATE_DRAWS[case] | {"rounds": 2}
    expected = trained_in_order(monkeypatch, FedAvg(), **options)
    assert_equal(train_clients(FedAvg(), **options), expected)
    assert len(other_threads()) >= (2 if "callbacks" in options else 1)


def test_draws_that_begin_within_a_round_are_drawn_in_order(two_threads, monkeypatch):
    options = {"draw": draw_from_the_fifth_call, "rounds": 1, "local_steps": 8}
    expected = trained_in_order(monkeypatch, FedAvg(), **options)
    assert_equal(train_clients(FedAvg(), **options), expected)


def test_draws_that_begin_in_the_fine_tuning_are_drawn_in_order(two_threads, monkeypatch):
    class RaiseLater(pl.Callback):
        """Raises the rate within the last round, whose threads have copies of the network already."""

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx > 0:
                Raise(0, "dropout", 0.3).on_train_epoch_start(trainer, pl_module)

    def options():
        return {"rounds": 1, "callbacks": [RaiseLater()]}

    expected = trained_in_order(monkeypatch, FedAvgFT(), **options())
    assert_equal(train_clients(FedAvgFT(), **options()), expected)


def test_a_round_that_is_trained_again_ends_as_the_first_time(two_threads, monkeypatch):
    """To the last bit, if the network does not draw after all."""
    states = train_clients(Ditto())
    answers = iter([True])
    monkeypatch.setattr(Cohort, "drew_side_by_side", lambda cohort: next(answers, False))
    assert_equal(states, train_clients(Ditto()))
    assert next(answers, None) is None


@pytest.mark.parametrize(
    "options",
    [
        {"privacy": {"noise_multiplier": 1.0, "secure_rng": False}},
        {"client_privacy": {"noise_multiplier": 1.0, "secure_rng": False}},
    ],
    ids=["images", "clients"],
)
def test_two_threads_change_no_private_result(options, two_threads):
    """With privacy of images, the chunks train one after another; with that of clients, in threads."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(50, 3))
    states = train_clients(FedAvg(), rounds=1, network=network, **options)
    torch.set_num_threads(1)
    assert_equal(states, train_clients(FedAvg(), rounds=1, network=network, **options))


def test_private_gradients_and_loss_scales_are_made_for_one_chunk_after_another():
    engine = Engine(Network())
    settings = Settings(FedAvg(), LocalTraining("sgd", {"local": 0.1}), Distillation(0), "uniform", (Phase(),), 0)
    assert trains_side_by_side(engine, settings)
    assert trains_side_by_side(engine, replace(settings, client_privacy=ClientPrivacy(noise_multiplier=1.0)))
    assert not trains_side_by_side(engine, replace(settings, privacy=Privacy(noise_multiplier=1.0)))
    assert not trains_side_by_side(engine, replace(settings, loss_scaling=torch.amp.GradScaler("cpu")))


def test_an_algorithm_from_elsewhere_stays_in_one_thread(two_threads):
    class Own(FedAvg):
        pass

    train_clients(Own())
    assert not other_threads()


def test_workers_leave_the_number_of_threads_and_use_one_each(two_threads):
    workers = workers_of(Engine(Network()), 3, CPU)
    assert len(workers) == 2
    assert torch.get_num_threads() == 2
    counts = []
    for worker in workers:
        worker.submit(lambda: counts.append(torch.get_num_threads()))
        worker.finish()
    assert counts == [1, 1]
    modules = {id(module) for module in workers[0].engine.runs.modules()}
    assert modules.isdisjoint(id(module) for module in workers[1].engine.runs.modules())
    for name, parameter in workers[0].engine.model.named_parameters():
        assert parameter is workers[1].engine.model.get_parameter(name)


def test_a_single_chunk_or_what_cannot_be_copied_stays_in_one_thread(two_threads):
    network = Network()
    assert isinstance(workers_of(Engine(network), 1, CPU)[0], SameThread)
    network.lock = threading.Lock()
    assert isinstance(workers_of(Engine(network), 3, CPU)[0], SameThread)


def test_an_error_comes_back_and_nothing_after_it_runs(two_threads):
    worker = WorkerThread(Engine(Network()))
    done = []
    begin = threading.Event()
    worker.submit(begin.wait)
    worker.submit(lambda: 1 / 0)
    worker.submit(lambda: done.append("after the error"))
    begin.set()
    with pytest.raises(ZeroDivisionError):
        worker.finish()
    assert done == []


def test_tasks_wait_for_the_thread(two_threads):
    """No more than a few batches are in memory, however slow the thread is."""
    worker = WorkerThread(Engine(Network()))
    begin = threading.Event()
    done = []
    for number in range(MAX_QUEUED):
        worker.submit(lambda number=number: done.append(number) if begin.wait(30) else None)
    threading.Timer(0.1, begin.set).start()
    worker.submit(lambda: done.append("last"))
    assert begin.is_set()  # there was no room before
    worker.finish()
    assert done == [*range(MAX_QUEUED), "last"]


class CountingThreads(Dataset):
    """Images of one client, which are read one by one, and record how many threads an operation could use."""

    def __init__(self, broken_item=None):
        self.broken_item = broken_item
        self.threads = []

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.threads.append(torch.get_num_threads())
        if index == self.broken_item:
            raise KeyboardInterrupt
        return torch.zeros(2, 5, 5), 0


@pytest.mark.parametrize(("at_a_time", "expected"), [(1, 2), (2, 1)])
def test_batches_are_read_on_one_core_beside_chunks_that_train_on_all(two_threads, at_a_time, expected):
    clients = [CountingThreads(), CountingThreads()]
    sources = FederatedDataModule(FederatedData(clients, num_classes=1, test=[]), batch_size=4)
    sources.setup()
    plan = RoundPlan(0, (0, 1), ((2, 2),), clients_per_chunk=1, chunks_at_a_time=at_a_time)
    batches = RoundBatches(sources.checked.train, plan, 4, 0)
    for client in clients:
        client.threads.clear()
    for step in range(len(batches)):
        batches[step]
        assert torch.get_num_threads() == 2
    for client in clients:
        assert client.threads == [expected] * 8


def test_an_interruption_while_a_batch_is_read_leaves_the_number_of_threads(two_threads):
    client = CountingThreads()
    sources = FederatedDataModule(FederatedData([client], num_classes=1, test=[]), batch_size=8)
    sources.setup()
    plan = RoundPlan(0, (0,), ((1,),), clients_per_chunk=1, chunks_at_a_time=2)
    batches = RoundBatches(sources.checked.train, plan, 8, 0)
    client.broken_item = 3
    with pytest.raises(KeyboardInterrupt):
        batches[0]
    assert client.threads[-1] == 1
    assert torch.get_num_threads() == 2
