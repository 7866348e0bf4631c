# SPDX-License-Identifier: Apache-2.0
"""The scores of predictions with both models on shifted test sets, recomputed by plain loops."""

from statistics import fmean, pstdev

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import TensorDataset

import perada
from perada.data import Corruptions, LabelShift
from tests.federation.test_both_models import is_typical_by_hand, predicted_by_hand, share_by_hand
from tests.lightning.test_shift_scores import SEED, Stripes, checkpoint, corrupted, network, stripes
from tests.options import sections

CLIENTS = 3
KINDS = ("brightness", "gaussian_noise")
SEVERITIES = (1, 3)


def darkened(count, seed, client):
    """Images of a client, of various brightness: on the whole darker than those of the clients before."""
    images, labels = stripes(count, seed)
    brightness = 0.4 + 0.6 * torch.rand(count, 1, 1, 1, generator=torch.Generator().manual_seed(seed))
    return (images * brightness * (1 - 0.2 * client)).to(torch.uint8), labels


def federation():
    train = [TensorDataset(*darkened(20, seed, client)) for client, seed in enumerate((0, 1, 2))]
    test = [TensorDataset(*darkened(6 + client, 10 + client, client)) for client in range(CLIENTS)]
    return perada.FederatedData(train, test)


def shifts():
    return {"dim": Corruptions([*KINDS], SEVERITIES), "others": LabelShift(), "new": Stripes()}


def run(given=None, when="end", prediction="both", **options):
    data = perada.FederatedDataModule(
        federation(), shifts=given or shifts(), shifts_when=when, batch_size=4, eval_batch_size=7
    )
    fixed = {
        "adapter": "full",
        "algorithm": "ditto",
        "lr_personal": 0.02,
        "lr_local": 0.02,
        "seed": SEED,
        "rounds": 2,
        "logger": False,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "prediction": prediction,
    }
    return perada.finetune(network(), data, **sections(**(fixed | options)))


def prepared(images):
    """Images as the models take them."""
    return (torch.stack([*images]).float() / 255 - 0.5) / 0.5


class PlainClient:
    """Predicts with both models of a client, by the rule of docs/prediction.md."""

    def __init__(self, found, client):
        self.run = found
        self.client = client
        images, labels = federation().train[client].tensors
        self.training_images = prepared(images)
        self.training_labels = labels
        self.share = share_by_hand(found, self.training_images, labels)

    def score(self, images, labels):
        """Return the accuracy on images, and the share of them that look typical."""
        x = prepared(images)
        is_typical = is_typical_by_hand(self.training_images, x)
        predicted = predicted_by_hand(self.run, self.client, is_typical, self.share, x, self.training_labels)
        right = predicted == torch.as_tensor(labels)
        return float(right.float().mean()), float(is_typical.float().mean())


def pooled():
    """All test images in order of client, with their labels and owners."""
    images, labels, owners = [], [], []
    for client, part in enumerate(federation().test):
        for image, label in part:
            images.append(image)
            labels.append(int(label))
            owners.append(client)
    return images, labels, owners


def test_scores_and_shares_are_those_of_a_plain_loop():
    found = run()
    last = found.metrics["rounds"][-1]
    of_clients = found.metrics["clients"]
    curves = found.metrics["shifts"]["dim"]
    images, labels, owners = pooled()
    clients = [PlainClient(found, client) for client in range(CLIENTS)]
    close = {"abs": 1e-6}

    scores_of_client = [[] for _ in clients]
    shares_of_client = [[] for _ in clients]
    for kind in KINDS:
        for index, severity in enumerate(SEVERITIES):
            changed = [corrupted(image, kind, severity, place) for place, image in enumerate(images)]
            results = [client.score(changed, labels) for client in clients]
            scores = [score for score, _ in results]
            shares = [share for _, share in results]
            assert curves[kind]["both"][index] == pytest.approx(fmean(scores), **close)
            assert curves[kind]["both_std"][index] == pytest.approx(pstdev(scores), **close)
            assert curves[kind]["typical"][index] == pytest.approx(fmean(shares), **close)
            for client in range(CLIENTS):
                scores_of_client[client].append(scores[client])
                shares_of_client[client].append(shares[client])
    expected = [fmean(scores) for scores in scores_of_client]
    assert of_clients["both/dim"] == pytest.approx(expected, **close)
    assert last["both/dim"] == pytest.approx(fmean(expected), **close)
    assert last["both/dim_std"] == pytest.approx(pstdev(expected), **close)
    expected_shares = [fmean(shares) for shares in shares_of_client]
    assert of_clients["typical/dim"] == pytest.approx(expected_shares, **close)
    assert last["typical/dim"] == pytest.approx(fmean(expected_shares), **close)
    assert all(0 < share < 1 for share in expected_shares)
    assert of_clients["both/dim"] != of_clients["personal/dim"]

    of_others = []
    for client in clients:
        rows = [row for row, owner in enumerate(owners) if owner != client.client]
        of_others.append(client.score([images[row] for row in rows], [labels[row] for row in rows]))
    assert of_clients["both/others"] == pytest.approx([score for score, _ in of_others], **close)
    assert of_clients["typical/others"] == pytest.approx([share for _, share in of_others], **close)
    of_new = [client.score(*stripes(13, 90)) for client in clients]
    assert of_clients["both/new"] == pytest.approx([score for score, _ in of_new], **close)
    assert of_clients["typical/new"] == pytest.approx([share for _, share in of_new], **close)
    assert 0 < last["typical/others"] < 1


def scores_on_shifts(found):
    """All scores on shifted test sets: of the last round, of the clients, and by kind and severity."""
    last = found.metrics["rounds"][-1]
    names = [name for name in last if name.removesuffix("_std").endswith(("/dim", "/others", "/new"))]
    clients = {name: found.metrics["clients"][name] for name in names if name in found.metrics["clients"]}
    return {name: last[name] for name in names}, clients, found.metrics["shifts"]


@pytest.mark.slow
def test_a_resumed_run_has_the_same_scores(tmp_path):
    run(rounds=1, logger=True, default_root_dir=str(tmp_path))
    resumed = run(ckpt_path=checkpoint(tmp_path))
    assert scores_on_shifts(resumed) == scores_on_shifts(run())


class StopAtOnce(pl.Callback):
    """Ends training before its first round."""

    def on_train_start(self, trainer, pl_module):
        trainer.should_stop = True


@pytest.mark.slow
def test_a_resumed_run_that_stops_at_once_is_scored_on_further_shifts(tmp_path):
    """The shifts are scored before any validation of this process."""
    run(rounds=1, logger=True, default_root_dir=str(tmp_path), given={"new": Stripes()})
    stopped = run(ckpt_path=checkpoint(tmp_path), given={"others": LabelShift()}, callbacks=[StopAtOnce()])
    uninterrupted = run(rounds=1, given={"others": LabelShift()})
    assert len(stopped.metrics["rounds"]) == 1
    for name in ("both/others", "typical/others"):
        assert stopped.metrics["clients"][name] == uninterrupted.metrics["clients"][name]


@pytest.mark.slow
def test_scores_of_every_evaluation():
    at_the_end = run(when="end")
    always = run(when="evaluation")
    assert ["both/others" in row for row in always.metrics["rounds"]] == [True, True]
    assert scores_on_shifts(always) == scores_on_shifts(at_the_end)


@pytest.mark.slow
def test_only_the_sample_runs_on_shifted_images():
    some = run(global_test_clients=1)
    uninterrupted = run()
    for name in ("both/dim", "typical/dim", "typical/others"):
        scored = [client for client, value in enumerate(some.metrics["clients"][name]) if value == value]
        assert len(scored) == 1
        expected = uninterrupted.metrics["clients"][name][scored[0]]
        assert some.metrics["clients"][name][scored[0]] == expected
        assert some.metrics["rounds"][-1][name] == expected
    nobody = run(global_test_clients=0)
    assert not [name for name in scores_on_shifts(nobody)[0] if name.startswith(("both/", "typical/"))]


@pytest.mark.slow
def test_other_scores_are_the_same_without():
    with_both = scores_on_shifts(run())
    without = scores_on_shifts(run(prediction="personal"))
    for found, expected in zip(with_both[:2], without[:2], strict=True):
        assert expected == {name: found[name] for name in expected}
        assert {name.partition("/")[0] for name in found.keys() - expected.keys()} == {"both", "typical"}
    assert with_both[2]["dim"]["brightness"].keys() - without[2]["dim"]["brightness"].keys() == {
        "both",
        "both_std",
        "typical",
    }


def test_clients_with_one_model_have_no_such_scores():
    found = run(algorithm="fedavg")
    assert "personal/dim" in found.metrics["rounds"][-1]
    assert not [name for name in scores_on_shifts(found)[0] if name.startswith(("both/", "typical/"))]
