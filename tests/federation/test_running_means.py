# SPDX-License-Identifier: Apache-2.0
"""Updates that are added up chunk by chunk, where the server needs only their mean, against those that are kept."""

import copy

import pytest
import torch
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import Ditto, FedAvg, PFedMe, Scaffold
from perada.algorithms.base import AlgorithmWrapper
from perada.core.states import expand
from perada.server.aggregate import UpdateSums
from tests.federation.test_cohort import network

SIZES = (6, 9, 4, 12, 7)


CHUNKS = ((0, 2), (2, 3), (3, 5))


@pytest.mark.parametrize("chunks", [CHUNKS, (CHUNKS[2], CHUNKS[0], CHUNKS[1])], ids=["in order", "side by side"])
def test_sums_are_those_of_the_accepted_clients(chunks):
    """Chunks that train side by side end in any order: the longest clients are in the first one."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 3, 4, generator=random)
    weight[1, 0, 0] = float("nan")
    weight[4, 2, 1] = float("inf")
    sent = {"weight": weight, "mean": torch.randn(5, 2, generator=random), "count": torch.tensor([3, 9, 5, 2, 9])}
    received = {"weight": torch.randn(3, 4, generator=random), "mean": torch.zeros(2), "count": torch.tensor(1)}
    accepted = torch.tensor([True, False, True, True, False])

    sums = UpdateSums(SIZES, range(5), ["weight"])
    for start, stop in chunks:
        rows = {name: value[start:stop] for name, value in sent.items()}
        sums.add(rows, expand(received, stop - start), start, accepted[start:stop])
    updates = sums.means([0, 2, 3])

    total = 6 + 4 + 12
    for name in ("weight", "mean"):
        exact = (6 * sent[name][0].double() + 4 * sent[name][2].double() + 12 * sent[name][3].double()) / total
        assert torch.equal(updates.local_rows[name], exact.float().expand(3, *exact.shape))
        assert updates.local_rows[name].stride(0) == 0  # one tensor in memory
    assert updates.local_rows["count"].tolist() == [5, 5, 5]
    assert updates.num_clients == 3
    norms = (sent["weight"].double() - received["weight"].double()).flatten(1).norm(dim=1)
    torch.testing.assert_close(sums.change_norms()[[0, 2, 3]], norms[[0, 2, 3]], rtol=1e-14, atol=0)
    assert {name: value.shape for name, value in sums.example.items()} == {
        "weight": (3, 4),
        "mean": (2,),
        "count": (),
    }


def test_a_stand_in_is_left_out():
    """The stack of a rank without clients has the row of a client that another rank trains."""
    sums = UpdateSums([1.0, 1.0], [], ["weight"])
    sums.add({"weight": torch.ones(1, 3)}, {"weight": torch.zeros(1, 3)}, 0, torch.tensor([True]))
    assert sums.change_norms().tolist() == [0.0, 0.0]
    assert sums.means([0, 1]).local_rows["weight"].shape == (0, 3)


class Kept:
    """Keeps all updates: the algorithm does not state that it needs only their mean."""

    mean_is_enough = False


class KeptFedAvg(Kept, FedAvg):
    pass


class KeptDitto(Kept, Ditto):
    pass


class KeptPFedMe(Kept, PFedMe):
    pass


def images(client, broken=False):
    random = torch.Generator().manual_seed(client)
    x = torch.randn(SIZES[client], 2, 5, 5, generator=random)
    if broken:
        x[0] = 1e38  # finite, but its activations are not
    return TensorDataset(x, torch.randint(0, 3, (SIZES[client],), generator=random))


@pytest.mark.parametrize("algorithms", [(FedAvg, KeptFedAvg), (Ditto, KeptDitto), (PFedMe, KeptPFedMe)])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.every(2)
def test_added_and_kept_updates_give_the_same_states(algorithms, weighting, recwarn, one_thread):
    """With a norm's statistics and counter, and a client whose training breaks.

    With one thread: algorithms from elsewhere divide their products among cores, where perada's own train chunks side
    by side.
    """
    data = perada.FederatedData([images(client, broken=client == 3) for client in range(5)], test=[])
    torch.manual_seed(0)
    model = network().float()
    states = []
    for algorithm in algorithms:
        run = perada.finetune(
            copy.deepcopy(model),
            data,
            adapter="full",
            algorithm=algorithm(),
            rounds=2,
            batch_size=4,
            weighting=weighting,
            training=perada.Training(clients_per_chunk=2, lr_local=0.1, lr_personal=0.1),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        states.append(run.state("global"))
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    assert any("NaN" in str(warning.message) for warning in recwarn)


def test_a_server_step_of_ones_own_keeps_all_updates():
    class Median(FedAvg):
        def server_step(self, server):
            return {name: value.median(0).values for name, value in server.updates.gathered_all().items()}

    class Half(FedAvg):
        mean_is_enough = True

        def server_step(self, server):
            return server.mean(server.updates, server.weights)

    class Wrapped(AlgorithmWrapper):
        pass

    class MedianStep:
        def server_step(self, server):
            return Median.server_step(self, server)

    class Mixed(MedianStep, FedAvg):
        pass

    class WrappedAndMixed(MedianStep, AlgorithmWrapper):
        pass

    assert FedAvg().mean_is_enough
    assert not Median().mean_is_enough
    assert not Scaffold().mean_is_enough
    assert Half().mean_is_enough
    assert Wrapped(FedAvg()).mean_is_enough
    assert not Wrapped(Median()).mean_is_enough
    assert not Mixed().mean_is_enough
    assert not WrappedAndMixed(FedAvg()).mean_is_enough
