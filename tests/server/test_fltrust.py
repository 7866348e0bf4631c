# SPDX-License-Identifier: Apache-2.0
"""Rounds with the rule that looks at predictions, against a plain computation of the same round."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import FedAvg
from perada.server import FLTrust, NormClipping
from tests.options import sections
from tests.rejections import rejects

CLIENTS = 5
CLASSES = 3
SENT = {}


class Noted(FedAvg):
    """Notes what the clients send; the first sends the reverse of its change, ten times as long."""

    def end_round(self, trained, kept, received, tensor_names):
        kept, update = super().end_round(trained, kept, received, tensor_names)
        update = {key: value.clone() for key, value in update.items()}
        for key in tensor_names.parameters:
            update[key][0] -= 11 * (update[key][0] - received[key][0])
        SENT.update({key: value.detach().clone() for key, value in update.items()} | {"before": received})
        return kept, update


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def data(server=True):
    """Clients with all classes, each of which lights another part of the image."""
    random = torch.Generator().manual_seed(0)

    def part(n):
        y = torch.arange(n) % CLASSES
        x = torch.randn(n, 1, 3, 4, generator=random)
        x[torch.arange(n), 0, y] += 2
        return TensorDataset(x, y)

    public, known = (TensorDataset(part(20).tensors[0]), part(18)) if server else (None, None)
    return perada.FederatedData([part(12) for _ in range(CLIENTS)], [part(6) for _ in range(CLIENTS)], public, known)


def finetune(algorithm, rule, given=None, **options):
    options = {"rounds": 1, "batch_size": 4, "local_epochs": 2, "lr_local": 0.1, "adapter": "full"} | options
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return perada.finetune(
        network(), given or data(), **sections(algorithm=algorithm, server_rule=rule, **options, **quiet)
    )


def probabilities(state, images):
    net = network()
    net.load_state_dict(state)
    return net(images).softmax(-1).detach().double().numpy().ravel()


@pytest.mark.every(2)
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.filterwarnings("ignore:round 1. client 0 sent")
def test_a_round_is_the_plain_computation(labels):
    run = finetune(Noted(), FLTrust(labels, 1000))  # all images
    before = {key: value[0] for key, value in SENT.pop("before").items()}
    server = data()
    images, y = server.server_validation.tensors if labels else (*server.public.tensors, None)
    start = probabilities(before, images)
    rows = [{key: value[client] for key, value in SENT.items()} for client in range(CLIENTS)]
    moved = np.stack([probabilities(row, images) - start for row in rows])
    towards = np.median(moved, 0) if y is None else np.eye(CLASSES)[y].ravel() - start
    trust = np.maximum(0, moved @ towards / np.linalg.norm(moved, axis=1) / np.linalg.norm(towards))
    assert trust[0] == 0 and (trust[1:] > 0.1).all()
    changes = np.stack([np.concatenate([(row[key] - before[key]).double().ravel() for key in row]) for row in rows])
    norms = np.linalg.norm(changes, axis=1)
    shortened = changes * np.minimum(1, np.median(norms) / norms)[:, None]
    expected = np.concatenate([before[key].double().ravel() for key in rows[0]]) + trust @ shortened / trust.sum()
    actual = np.concatenate([run.state("global")[key].double().ravel() for key in rows[0]])
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore:round")
def test_the_hostile_client_does_no_harm():
    scores = {
        name: finetune(Noted(), rule, rounds=4).metrics["rounds"][-1]["global/global_test"]
        for name, rule in (("mean", "mean"), ("trust", "fltrust"))
    }
    honest = finetune("fedavg", "mean", rounds=4).metrics["rounds"][-1]["global/global_test"]
    assert scores["trust"] > honest - 0.1 > scores["mean"]


def test_the_first_labelled_images_are_looked_at():
    SENT.clear()
    one = finetune(Noted(), FLTrust(images=7)).state("global")
    given = data()
    given.server_validation = TensorDataset(*(part[:7] for part in given.server_validation.tensors))
    other = finetune(Noted(), FLTrust(), given).state("global")
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_it_is_rejected_where_it_cannot_work():
    with pytest.raises(ValueError, match=r"FLTrust.*labelled images"):
        finetune("fedavg", "fltrust", data(server=False))
    with pytest.raises(ValueError, match=r"NormClipping.*public images"):
        finetune("fedavg", NormClipping(aggregate=FLTrust(labels=False)), data(server=False))
    with pytest.raises(ValueError, match=r"FedRep.*complete models"):
        finetune("fedrep", "fltrust")
    with rejects("images", 0):
        FLTrust(images=0)
    with rejects("labels", "no"):
        FLTrust("no")
    with pytest.raises(ValueError, match="client_privacy"):
        finetune("fedavg", "fltrust", client_privacy={"noise_multiplier": 1.0})
