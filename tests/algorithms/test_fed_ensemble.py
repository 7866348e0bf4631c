# SPDX-License-Identifier: Apache-2.0
"""Fed-ensemble's schedule of modes, its prediction, and its options."""

from collections import Counter

import pytest
import torch
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import FedEnsemble
from perada.algorithms.ensembles import mode_schedule
from perada.core.states import unstack
from tests.options import sections

from .problems import CLASSES, CLIENTS, SIZES, assert_equal, distance, finetune, network, reference, task

MODES = {"modes": 3, "strata": 2}


def age(seed, age, clients, modes, strata):
    """Modes of each client in the rounds of an age, (rounds, clients)."""
    rounds = range(age * modes, (age + 1) * modes)
    return torch.stack([mode_schedule(seed, round, clients, modes, strata) for round in rounds])


@pytest.mark.parametrize(("clients", "modes", "strata"), [(13, 4, 3), (10, 5, 5), (7, 3, 1), (6, 2, 6), (5, 1, 2)])
def test_every_stratum_trains_every_mode_once_in_an_age(clients, modes, strata):
    ages = [age(4, number, clients, modes, strata) for number in range(12)]
    for given in ages:
        assert given.shape == (modes, clients)
        assert (given.sort(0).values == torch.arange(modes)[:, None]).all()
    # Clients of one stratum have the same modes in all rounds of all ages; the strata are of nearly equal size.
    columns = Counter(tuple(column.tolist()) for column in torch.cat(ages).T)
    if modes > 2:
        assert len(columns) == strata
        assert max(columns.values()) - min(columns.values()) <= 1


def test_ages_strata_and_seeds_draw_permutations_of_their_own():
    first = torch.stack([age(0, number, 8, 3, 2) for number in range(300)])  # (ages, rounds, clients)
    orders = Counter(tuple(column.tolist()) for column in first[:, :, 0])
    # Each of the 3! permutations is as likely: 50 of 300, with a standard deviation of 6.5.
    assert len(orders) == 6
    assert all(abs(count - 50) < 5 * 6.5 for count in orders.values())
    # Two strata agree by chance only, in one age of six.
    other = next(m for m in range(8) if (first[:, :, m] != first[:, :, 0]).any())
    agree = int((first[:, :, other] == first[:, :, 0]).all(1).sum())
    assert abs(agree - 50) < 5 * 6.5
    assert (mode_schedule(0, 5, 8, 3, 2) == mode_schedule(0, 5, 8, 3, 2)).all()
    assert not (age(1, 0, 8, 3, 2) == age(0, 0, 8, 3, 2)).all() or not (age(1, 1, 8, 3, 2) == age(0, 1, 8, 3, 2)).all()


@pytest.mark.slow
def test_strata_are_drawn_at_random():
    """Any two clients share a stratum with the probability of a random division in halves: 3 of 7."""
    together = 0
    for seed in range(300):
        given = torch.cat([age(seed, number, 8, 3, 2) for number in range(4)])
        together += int((given[:, 0] == given[:, 1]).all())
    assert abs(together - 300 * 3 / 7) < 5 * (300 * 3 / 7 * 4 / 7) ** 0.5


@pytest.mark.parametrize("problem", ["net-full", "net-adapter", "linear-head"])
def test_modes_start_apart(problem):
    modes = finetune(FedEnsemble(**MODES), problem, rounds=0).states("global")
    assert len(modes) == 3
    assert_equal(modes[0], reference(problem).initial, "the first mode is the model's own start")
    for i in range(3):
        for j in range(i):
            assert distance(modes[i], modes[j]) > 0.1


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_the_prediction_is_the_mean_of_the_modes_outputs(average):
    run = finetune(FedEnsemble(average=average, **MODES))
    ref = reference("net-full")
    x = ref.served.public_images(torch.arange(5))
    outputs = [torch.func.functional_call(ref.model.eval(), state, (x,)) for state in run.states("global")]
    for predicted in (run.global_model()(x), *(run.personal(m)(x) for m in CLIENTS)):
        if average == "logits":
            torch.testing.assert_close(predicted, sum(outputs) / 3)
        else:
            torch.testing.assert_close(predicted.softmax(1), sum(output.softmax(1) for output in outputs) / 3)


class Listener(FedEnsemble):
    """Notes what it is told of the clients' losses."""

    def broadcast(self, sending):
        self.heard = (sending.clients, unstack(sending.global_state), sending.losses)
        return super().broadcast(sending)


@pytest.mark.parametrize("engine", ["folded", "loop"])
def test_modes_are_compared_on_every_training_image_once(engine):
    """Whatever the batches: nine images in batches of four are not twelve."""
    algorithm = Listener(assignment="loss", **MODES)
    ref = reference("net-full")
    finetune(algorithm, engine=engine, rounds=1)
    clients, modes, losses = algorithm.heard
    expected = torch.tensor([[ref.loss(mode, m) for mode in modes] for m in clients])
    torch.testing.assert_close(losses, expected)
    assert (losses.std(1) > 0.01).all()


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_scores_of_the_modes_and_the_entropy(average):
    random = torch.Generator().manual_seed(5)
    test = [
        TensorDataset(
            torch.randn(n, 1, 6, 6, generator=random, dtype=torch.float64),
            torch.randint(CLASSES, (n,), generator=random),
        )
        for n in (7, 4, 1, 9)
    ]
    data = perada.FederatedData(task().train, test, num_classes=CLASSES)
    options = {"adapter": "full", "clients_per_round": 3, "batch_size": 4, "lr_local": 0.5, "rounds": 2}
    quiet = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    run = perada.finetune(
        network("net"), data, **sections(algorithm=FedEnsemble(average=average, **MODES), **options, **quiet)
    )
    x, y = (torch.cat([part.tensors[i] for part in test]) for i in (0, 1))
    model = reference("net-full").model.eval()
    outputs = [torch.func.functional_call(model, state, (x,)).detach() for state in run.states("global")]
    accuracies = [float((output.argmax(1) == y).double().mean()) for output in outputs]
    p = (sum(outputs) / 3).softmax(1) if average == "logits" else sum(output.softmax(1) for output in outputs) / 3
    scores = run.metrics["rounds"][-1]
    assert scores["global/best_mode"] == pytest.approx(max(accuracies))
    assert scores["global/worst_mode"] == pytest.approx(min(accuracies))
    assert max(accuracies) > min(accuracies)
    assert scores["global/global_test"] == pytest.approx(float((p.argmax(1) == y).double().mean()))
    assert scores["global/entropy"] == pytest.approx(float(-(p * p.log()).sum(1).mean()))
    assert len(SIZES) == len(run.metrics["clients"]["personal/local_test"])
