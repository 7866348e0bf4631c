# SPDX-License-Identifier: Apache-2.0
"""Local training of a cohort against one ``torch.optim`` run per client."""

import copy
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from perada.algorithms import Ditto, FedAvg, PerAda, Standalone
from perada.core.rounds import CohortBatch, Phase, RoundPlan
from perada.core.states import expand, get_state
from perada.engine import Engine
from perada.engine.engine import client_losses, client_means
from perada.federation.chunk import LocalRound
from perada.federation.cohort import Cohort
from perada.federation.local_trainer import LocalTrainer
from perada.federation.settings import LocalTraining, Settings
from perada.federation.workers import SameThread
from perada.models.adapted import find_tensor_names
from perada.server import Distillation
from perada.tasks import Classification, MultiLabel
from tests.chunks import in_chunks
from tests.label_kinds import task_of

STEPS = (5, 3, 3, 1)
COUNTS = (6, 4, 6, 5)
CLASSES = 3
CLIENTS = tuple(range(10, 10 + len(STEPS)))
PHASES = (Phase(),)


def network(dropout=0.0):
    layers = {
        "conv": nn.Conv2d(2, 5, 3),
        "norm": nn.BatchNorm2d(5),
        "act": nn.ReLU(),
        "pool": nn.AdaptiveAvgPool2d(2),
        "flat": nn.Flatten(),
        "drop": nn.Dropout(dropout),
        "fc": nn.Linear(20, CLASSES),
    }
    return nn.Sequential(OrderedDict(layers)).double()


def batches(multilabel=False):
    """The cohort batches of a round; client i has COUNTS[i] rows in each, for STEPS[i] steps."""
    random = torch.Generator().manual_seed(7)
    created = []
    for step in range(STEPS[0]):
        active = sum(count > step for count in STEPS)
        width = max(COUNTS[:active])
        x = torch.randn(active, width, 2, 5, 5, generator=random, dtype=torch.float64)
        y = torch.randint(0, CLASSES, (active, width), generator=random)
        if multilabel:
            y = torch.randint(0, 2, (active, width, CLASSES), generator=random).float()
        created.append(CohortBatch(CLIENTS[:active], x, y, COUNTS[:active], 0, step))
    return created


def site(model, training, algorithm, engine="folded", phases=PHASES, seed=0, **options):
    settings = Settings(algorithm, training, Distillation(0), "uniform", phases, seed, **options)
    return LocalTrainer(Engine(model, engine), find_tensor_names(model, "fc"), settings)


def cohort(model, training, algorithm=None, engine="folded", factor=1.0, chunk=None, **options):
    algorithm = algorithm or FedAvg()
    initial = get_state(model)
    kept = {
        role: expand(state, 4)
        for role, state in algorithm.initial_client_state(initial, find_tensor_names(model, "fc")).items()
    }
    plan = RoundPlan(3, CLIENTS, (STEPS,), chunk)
    trainer = site(model, training, algorithm, engine, **options)
    return Cohort(LocalRound.begin(trainer, plan, kept, expand(initial, 4), factor=factor))


def rates(lr):
    return {"local": lr, "personal": lr}


OPTIMIZERS = [
    ("sgd", {"momentum": 0.9, "weight_decay": 0.1}, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1)),
    ("sgd", {}, lambda p: torch.optim.SGD(p, 0.1)),
    ("adam", {"weight_decay": 0.1}, lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1)),
    ("adamw", {"weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1)),
]


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("engine", "chunk"), [("folded", None), ("folded", 3), ("loop", 1)])
@pytest.mark.parametrize(("name", "options", "make"), OPTIMIZERS, ids=["momentum", "sgd", "adam", "adamw"])
@pytest.mark.every(10)
def test_each_client_trains_as_if_alone(name, options, make, engine, chunk, clip, multilabel):
    model = network()
    clip_norm = (0.3 if multilabel else 1.0) if clip else None
    training = LocalTraining(name, rates(0.2), clip_norm=clip_norm, task=task_of(multilabel), **options)
    running = cohort(model, training, engine=engine, chunk=chunk, factor=0.5)
    for batch in in_chunks(batches(multilabel), chunk or len(CLIENTS)):
        running.step(batch)
    results = running.finish()
    updates = results.sent
    finite = results.finite
    assert finite.all()
    clipped = 0
    for row, (steps, count) in enumerate(zip(STEPS, COUNTS, strict=True)):
        alone = copy.deepcopy(model).train()
        optimizer = make(alone.parameters())
        losses = []
        for batch in batches(multilabel)[:steps]:
            out = alone(batch.x[row, :count])
            y = batch.y[row, :count]
            loss = F.binary_cross_entropy_with_logits(out, y.double()) if multilabel else F.cross_entropy(out, y)
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            if clip_norm is not None:
                clipped += torch.nn.utils.clip_grad_norm_(alone.parameters(), clip_norm) > clip_norm
            optimizer.step()
        for key, value in get_state(alone).items():
            # A gradient that is zero but for rounding gets a step of full size from Adam: the bias before a BatchNorm.
            if not (key == "conv.bias" and name.startswith("adam")):
                torch.testing.assert_close(updates[key][row], value, rtol=1e-7, atol=1e-9, msg=f"client {row}: {key}")
        assert results.losses["local"][row].item() == pytest.approx(sum(losses) / steps, rel=1e-5)
    if clip_norm is not None:
        assert 0 < clipped < sum(STEPS)  # some are clipped, some not: clients do not share a norm


@pytest.mark.every(7)
@pytest.mark.parametrize("engine", ["folded", "loop"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_broken_client_does_not_touch_the_others(optimizer, clip_norm, engine):
    def train(broken):
        running = cohort(model, LocalTraining(optimizer, rates(0.05), clip_norm=clip_norm), Ditto(), engine)
        for batch in batches():
            if broken and batch.step == 1:
                batch.x[1, 0] = float("nan")
            running.step(batch)
        return running.finish()

    model = network(dropout=0.3)
    dirty = train(broken=True)
    clean = train(broken=False)
    assert dirty.finite.tolist() == [True, False, True, True]
    assert clean.finite.all()
    for one, other in ((dirty.sent, clean.sent), (dirty.client_state["personal"], clean.client_state["personal"])):
        for key in one:
            assert torch.equal(one[key][dirty.finite], other[key][dirty.finite])
    assert dirty.sent["fc.weight"][1].isnan().any()


def test_a_client_whose_loss_was_infinite_once_is_broken_though_its_state_is_finite():
    """An infinite constant that is added to a loss leaves its gradient as it is."""

    class InfiniteAtFirst(FedAvg):
        def client_step(self, step):
            loss = step.loss("local")
            if len(loss) == len(CLIENTS):  # only in the first step all train
                loss = loss + torch.tensor([0, 0, float("inf"), 0])
            step.descend("local", loss)

    running = cohort(network(), LocalTraining("sgd", rates(0.1)), InfiniteAtFirst())
    for batch in batches():
        running.step(batch)
    results = running.finish()
    assert all(value.isfinite().all() for value in results.sent.values())
    assert results.finite.tolist() == [True, True, False, True]


def test_dropout_of_a_client_does_not_depend_on_its_cohort():
    """The first two clients alone get what they get among four, in any chunks and in the loop."""
    model = network(dropout=0.5)
    training = LocalTraining("sgd", rates(0.1))
    results = []
    for options in ({}, {"chunk": 2}, {"engine": "loop", "chunk": 1}, {"seed": 1}):
        running = cohort(model, training, Standalone(), **options)
        for batch in in_chunks(batches(), options.get("chunk", len(CLIENTS))):
            running.step(batch)
        results.append(running.finish().client_state["personal"])
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value)
        torch.testing.assert_close(results[2][key], value)
    assert not torch.allclose(results[3]["fc.weight"], results[0]["fc.weight"])
    kept = {"personal": expand(get_state(model), 2)}
    plan = RoundPlan(3, CLIENTS[:2], (STEPS[:2],))
    small = Cohort(LocalRound.begin(site(model, training, Standalone()), plan, kept, expand(get_state(model), 2)))
    for batch in batches():
        n = min(2, len(batch.clients))
        small.step(batch._replace(clients=batch.clients[:n], x=batch.x[:n], y=batch.y[:n], counts=batch.counts[:n]))
    for key, value in small.finish().client_state["personal"].items():
        torch.testing.assert_close(value, results[0][key][:2])


def test_a_chunk_that_has_finished_trains_no_more():
    running = cohort(network(), LocalTraining("sgd", rates(0.1)), chunk=2)
    parts = in_chunks(batches(), 2)
    for batch in parts:
        running.step(batch)
    with pytest.raises(ValueError, match=r"\(10, 11\)"):
        running.step(parts[0])


class LateWorker(SameThread):
    """Runs its tasks at the end of the round, like a thread on a busy core."""

    def __init__(self, engine):
        super().__init__(engine)
        self._tasks = []

    def submit(self, task):
        self._tasks.append(task)

    def finish(self):
        for task in self._tasks:
            task()


class RecordingSums:
    def __init__(self):
        self.starts = []

    def add(self, sent, received, start, accepted):
        assert len(sent["fc.bias"]) == len(received["fc.bias"]) == len(accepted) == 2
        self.starts.append(start)


@pytest.mark.parametrize("late", [[], [0], [1], [0, 1]])
def test_updates_are_added_in_the_order_of_chunks_whichever_thread_ends_first(late):
    """A sum of floating-point numbers depends on their order, and the same seed must give the same bits."""
    running = cohort(network(), LocalTraining("sgd", rates(0.1)), chunk=2)
    running.sums = RecordingSums()
    engine = running.local_round.trainer.engine
    running._chunk_workers = [LateWorker(engine) if place in late else SameThread(engine) for place in (0, 1)]
    first_of_chunks = [batch for batch in in_chunks(batches(), 2) if batch.step == 0]
    for batch in first_of_chunks:
        running.step(batch)
    assert running.sums.starts == []

    running.finish()
    assert running.sums.starts == [0, 2]


def test_dropout_of_one_role_is_not_that_of_another():
    """Both train from the same state on the same batch, and nothing pulls one to the other."""
    model = network(dropout=0.5)
    running = cohort(model, LocalTraining("sgd", rates(0.1)), PerAda(0.0, distill=False))
    running.step(batches()[0])
    results = running.finish()
    kept = results.client_state
    sent = results.sent
    assert not torch.allclose(kept["personal"]["fc.weight"], sent["fc.weight"])


def test_every_phase_starts_its_optimisers_and_all_clients_anew():
    class TwoPhases(FedAvg):
        """First the head, then the rest."""

        def trainable_keys(self, role, phase, tensor_names, round):
            return tuple(key for key in tensor_names.parameters if (key in tensor_names.head) == (phase == "head"))

    model = network()
    phases = (Phase("head"), Phase("body"))
    steps = ((3, 1), (2, 2))
    training = LocalTraining("sgd", rates(0.1), momentum=0.9)
    opened = site(model, training, TwoPhases(), phases=phases)
    running = Cohort(LocalRound.begin(opened, RoundPlan(0, (0, 1), steps), {}, expand(get_state(model), 2)))
    alone = [copy.deepcopy(model).train() for _ in range(2)]
    for phase in range(2):
        optimizers = [
            torch.optim.SGD(
                [p for n, p in m.named_parameters() if n.startswith("fc") == (phase == 0)], 0.1, momentum=0.9
            )
            for m in alone
        ]
        for step in range(steps[phase][0]):
            active = sum(count > step for count in steps[phase])
            x = torch.randn(active, 4, 2, 5, 5, dtype=torch.float64)
            y = torch.randint(0, CLASSES, (active, 4))
            running.step(CohortBatch(tuple(range(active)), x, y, (4,) * active, phase, step))
            for m in range(active):
                alone[m].zero_grad()
                F.cross_entropy(alone[m](x[m]), y[m]).backward()
                optimizers[m].step()
    updates = running.finish().sent
    for row, module in enumerate(alone):
        for key, value in get_state(module).items():
            torch.testing.assert_close(updates[key][row], value, rtol=1e-8, atol=1e-10)


def test_means_over_real_rows_of_values_of_any_shape():
    values = torch.randn(2, 4, 3, 5)
    values[1, 2:] = torch.nan  # padding
    for counts in ((4, 2), (4, 1)):
        result = client_means(values[..., 0, 0], counts), client_means(values, counts)
        for m, count in enumerate(counts):
            assert result[0][m] == pytest.approx(float(values[m, :count, 0, 0].mean()))
            torch.testing.assert_close(result[1][m], values[m, :count].mean(0))


def test_losses_are_means_over_real_rows():
    logits = torch.randn(2, 4, 3)
    y = torch.randint(0, 3, (2, 4))
    labels = torch.randint(0, 2, (2, 4, 3)).float()
    ragged = client_losses(logits, y, (4, 2), Classification())
    torch.testing.assert_close(ragged[0], F.cross_entropy(logits[0], y[0]))
    torch.testing.assert_close(ragged[1], F.cross_entropy(logits[1, :2], y[1, :2]))
    several = client_losses(logits, labels, (4, 3), MultiLabel())
    torch.testing.assert_close(several[1], F.binary_cross_entropy_with_logits(logits[1, :3], labels[1, :3]))
