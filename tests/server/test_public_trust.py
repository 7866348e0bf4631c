# SPDX-License-Identifier: Apache-2.0
"""Rounds with the rule that looks at predictions on public images, against a plain computation of the same round."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import FedAvg
from perada.server import NormClipping, PublicTrust

CLIENTS, CLASSES, SENT = 5, 3, {}


class Noted(FedAvg):
    """Notes what the clients send; the first sends the reverse of its change, ten times as long."""

    def close(self, trained, kept, received, slot):
        kept, update = super().close(trained, kept, received, slot)
        update = {key: value.clone() for key, value in update.items()}
        for key in slot.parameters:
            update[key][0] -= 11 * (update[key][0] - received[key][0])
        SENT.update({key: value.detach().clone() for key, value in update.items()} | {"before": received})
        return kept, update


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def data(public=True):
    """Clients with all classes, each of which lights another part of the image."""
    random = torch.Generator().manual_seed(0)

    def part(n):
        y = torch.arange(n) % CLASSES
        x = torch.randn(n, 1, 3, 4, generator=random)
        x[torch.arange(n), 0, y] += 2
        return TensorDataset(x, y)

    images = TensorDataset(part(20).tensors[0]) if public else None
    return perada.FederatedData([part(12) for _ in range(CLIENTS)], [part(6) for _ in range(CLIENTS)], images)


def finetune(algorithm, rule, given=None, **options):
    options = {"rounds": 1, "batch_size": 4, "local_epochs": 2, "lr_local": 0.1, "adapter": "full"} | options
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return perada.finetune(network(), given or data(), algorithm=algorithm, server_rule=rule, **options, **quiet)


def probabilities(state, images):
    net = network()
    net.load_state_dict(state)
    return net(images).softmax(-1).detach().double().numpy().ravel()


@pytest.mark.filterwarnings("ignore:round 0. client 0 sent")
def test_a_round_is_the_plain_computation():
    run = finetune(Noted(), PublicTrust(1000))  # all 20 public images
    before = {key: value[0] for key, value in SENT.pop("before").items()}
    images = data().public.tensors[0]
    start = probabilities(before, images)
    rows = [{key: value[client] for key, value in SENT.items()} for client in range(CLIENTS)]
    moved = np.stack([probabilities(row, images) - start for row in rows])
    most = np.median(moved, 0)
    trust = np.maximum(0, moved @ most / np.linalg.norm(moved, axis=1) / np.linalg.norm(most))
    assert trust[0] == 0 and (trust[1:] > 0.5).all()
    changes = np.stack([np.concatenate([(row[key] - before[key]).double().ravel() for key in row]) for row in rows])
    norms = np.linalg.norm(changes, axis=1)
    shortened = changes * np.minimum(1, np.median(norms) / norms)[:, None]
    expected = np.concatenate([before[key].double().ravel() for key in rows[0]]) + trust @ shortened / trust.sum()
    found = np.concatenate([run.state("global")[key].double().ravel() for key in rows[0]])
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore:round")
def test_the_hostile_client_does_no_harm():
    scores = {
        name: finetune(Noted(), rule, rounds=4).metrics["rounds"][-1]["global/global_test"]
        for name, rule in (("mean", "mean"), ("trust", "public_trust"))
    }
    honest = finetune("fedavg", "mean", rounds=4).metrics["rounds"][-1]["global/global_test"]
    assert scores["trust"] > honest - 0.1 > scores["mean"]


def test_it_is_refused_where_it_cannot_work():
    with pytest.raises(ValueError, match="server_rule=PublicTrust looks at predictions on public images, and the data"):
        finetune("fedavg", "public_trust", data(public=False))
    with pytest.raises(ValueError, match="NormClipping looks at predictions on public images, and the data has no"):
        finetune("fedavg", NormClipping(aggregate=PublicTrust()), data(public=False))
    with pytest.raises(ValueError, match=r"the clients of FedRep.* do not send whole models; choose another rule"):
        finetune("fedrep", "public_trust")
    with pytest.raises(ValueError, match="images=0 cannot be used"):
        PublicTrust(0)
    with pytest.raises(ValueError, match="client_privacy"):
        finetune("fedavg", "public_trust", client_privacy={"noise_multiplier": 1.0})
