# SPDX-License-Identifier: Apache-2.0
"""FedROD in its limits, and the class counts that it needs; its plain loop is in ``personal_references.py``."""

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import perada
from perada.algorithms import FedROD, TensorNames
from perada.core.rounds import PrivateSampling
from tests.options import sections
from tests.rejections import rejects

from .problems import CLASSES, CLIENTS, QUIET, assert_same, finetune, network, task


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["folded", "loop"])
def test_without_balance_the_global_model_is_that_of_fedavg(engine):
    run, plain = (finetune(one, engine=engine, dropout=0.4) for one in (FedROD(gamma=0.0), "fedavg"))
    assert_same(run.state("global"), plain.state("global"), "global")


def test_a_client_that_never_took_part_predicts_with_the_global_model():
    run = finetune("fedrod", rounds=1)
    (left_out,) = (
        m for m in CLIENTS if torch.equal(run.state("personal", m)["fc.bias"], run.state("global")["fc.bias"])
    )
    assert_same(run.state("personal", left_out), run.state("global"), "personal")


class Items(Dataset):
    """Read one by one."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        x, y = self.rows[index]
        return x, int(y)


@pytest.mark.parametrize("items", [False, True])
def test_class_counts(items):
    """Also of clients that lack the last class, and of a cohort in the order of its sizes."""
    labels = [[0, 0, 1], [2, 2, 2, 2, 1], [0]]
    sets = [TensorDataset(torch.randn(len(y), 1, 6, 6).double(), torch.tensor(y)) for y in labels]
    data = perada.FederatedData([Items(one) for one in sets] if items else sets, num_classes=4)
    served = perada.FederatedDataModule(data, batch_size=2)
    served.configure_rounds(seed=0, clients_per_round=3, phases=[perada.data.Phase(steps=3)])
    plan = served.plan(0)
    assert plan.clients == (1, 0, 2)
    for batch in served.cohort_loader(plan):
        assert batch.class_counts.tolist() == [[0, 1, 4], [2, 1, 0], [1, 0, 0]]
    for batches in served.cohort_loader(plan, PrivateSampling((("local",),))):
        assert batches["local"].class_counts is None  # labels are private too


def test_rejections():
    with rejects("gamma", -1):
        FedROD(gamma=-1)
    with pytest.raises(ValueError, match=r"head.*'fc\.bias'"):
        FedROD().check(TensorNames(("fc.bias",), ("fc.bias",), frozenset({"fc.bias"})), 3)
    with pytest.raises(ValueError, match=r"head.* none"):
        FedROD().check(TensorNames(("a.weight",), ("a.weight",)), 3)
    labels = torch.eye(CLASSES).double()
    labels[:, 0] = 1  # of which an image has several
    several = [TensorDataset(one[:][0], labels[one[:][1]]) for one in task().train]
    with pytest.raises(ValueError, match=r"FedROD.*per class"):
        perada.finetune(
            network("net"),
            perada.FederatedData(several),
            **sections(algorithm="fedrod", adapter="full", rounds=1, **QUIET),
        )
