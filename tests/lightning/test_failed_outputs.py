# SPDX-License-Identifier: Apache-2.0
"""Models whose outputs are NaN or infinite: they are named, and no mean over the others takes their place."""

import math
import warnings

import pytest
import torch
from pytorch_lightning import Callback
from torch import nn
from torch.utils.data import Subset, TensorDataset

import perada
from perada.algorithms import FedAvg, FedBE, FedEnsemble
from perada.data import FederatedData, FederatedDataModule
from perada.results.report import client_table
from perada.server import SecureSums
from perada.tasks import Classification, MultiLabel, Regression, Segmentation
from tests.options import sections

BRIGHT = 9.0
CLASSES = 3


class FailsOnBrightImages(nn.Module):
    """A linear network, whose outputs are not finite for images with a bright first pixel."""

    fails = True

    def __init__(self, per_pixel=False, value=math.nan):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Conv2d(3, CLASSES, 1) if per_pixel else nn.Linear(48, CLASSES)
        self.per_pixel = per_pixel
        self.value = value

    def forward(self, x):
        logits = self.head(x if self.per_pixel else x.flatten(1))
        if not self.fails:
            return logits
        is_bright = (x.amax((1, 2, 3)) == BRIGHT).view(-1, *[1] * (logits.dim() - 1))
        return torch.where(is_bright, self.value, logits)


TARGETS = {
    "classes": (Classification(), torch.arange(6) % CLASSES),
    "labels": (MultiLabel(), torch.tensor([[0.0, 1, 1], [1, 0, 0], [1, 1, 0]]).repeat(2, 1)),
    "masks": (Segmentation(), torch.arange(6).view(6, 1, 1).expand(6, 4, 4) % CLASSES),
    "numbers": (Regression(), torch.arange(18.0).view(6, 3)),
}


def federation(kind, bright=(1,), clients=3):
    """Clients of which some have two bright test images."""
    _, targets = TARGETS[kind]
    test = []
    for client in range(clients):
        images = torch.zeros(6, 3, 4, 4)
        if client in bright:
            images[:2, :, 0, 0] = BRIGHT
        test.append(TensorDataset(images, targets))
    train = [TensorDataset(torch.zeros(6, 3, 4, 4), targets) for _ in range(clients)]
    return FederatedData(train, test, client_names=["north", "south", "west"][:clients])


def fit(kind="classes", algorithm="fedavg", data=None, value=math.nan, rounds=2, **options):
    task, _ = TARGETS[kind]
    data = FederatedDataModule(data or federation(kind), batch_size=6, task=task)
    common = {"algorithm": algorithm, "rounds": rounds, "local_steps": 1, "lr_local": 0.01, "lr_personal": 0.01}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    network = FailsOnBrightImages(kind == "masks", value)
    return perada.finetune(network, data, **sections(adapter="full", **common | quiet | options))


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("algorithm", ["fedavg", "ditto"])
@pytest.mark.every_value
def test_the_models_are_named_and_means_are_nan(kind, value, algorithm):
    with pytest.warns(UserWarning, match=r"2 test images.*client 1 \('south'\), .*round 1"):
        run = fit(kind, algorithm, value=value)
    last = run.metrics["rounds"][-1]
    scores = [name for name in last if name.startswith(("personal/", "global/"))]
    assert len(scores) > 5
    for name in scores:
        assert math.isnan(last[name]), name
    own = run.metrics["clients"]["personal/local_test"]
    assert [math.isnan(score) for score in own] == [False, True, False]
    of_global = {"model": "global", "client": 1, "images": 2, "since": 1}
    if algorithm == "fedavg":
        assert run.metrics["failed_outputs"] == [of_global]
    else:
        # Each personal model runs on everyone's images.
        of_clients = [{"model": "personal", "client": client, "images": 2, "since": 1} for client in range(3)]
        assert run.metrics["failed_outputs"] == [*of_clients, of_global]
    assert run.metrics["predictions"]["global"] == {"failed_images": 2}
    # The scores before training are no mean over the others, either.
    assert "initial" not in run.metrics


def test_a_client_without_test_images_has_not_failed():
    data = federation("classes", bright=())
    data.test[1] = Subset(data.test[1], [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "client .* has no test images")
        run = fit(data=data)
    assert math.isnan(run.metrics["clients"]["personal/local_test"][1])
    assert run.metrics["rounds"][-1]["personal/local_test"] == pytest.approx(1 / 3, abs=1e-6)
    assert "failed_outputs" not in run.metrics


class FailsInRounds2And3(Callback):
    def on_train_epoch_start(self, trainer, module):
        FailsOnBrightImages.fails = trainer.current_epoch in (1, 2)


def test_a_model_is_named_once_with_the_round_in_which_it_failed_first(recwarn, monkeypatch):
    monkeypatch.setattr(FailsOnBrightImages, "fails", False)
    data = federation("classes", bright=(2,))
    run = fit(algorithm="ditto", data=data, rounds=4, global_test_clients=0, callbacks=[FailsInRounds2And3()])
    messages = [str(warning.message) for warning in recwarn if "NaN or infinite" in str(warning.message)]
    assert len(messages) == 1
    assert "the model of client 2 ('west') on 2 test images, since round 2" in messages[0]
    scores = [row["personal/local_test"] for row in run.metrics["rounds"]]
    assert [math.isnan(score) for score in scores] == [False, True, True, False]
    assert "failed_outputs" not in run.metrics


def test_the_table_of_clients_has_no_mean_over_the_others():
    with pytest.warns(UserWarning, match="NaN or infinite"):
        run = fit()
    means = run.metrics["rounds"][-1]
    *_, last_line = client_table(run.metrics["clients"], [6, 6, 6], means=means).splitlines()
    assert last_line.count("– ± –") == 2


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.filterwarnings("ignore:outputs are NaN or infinite")
def test_an_image_without_a_prediction_is_none_of_the_predictions(kind, tmp_path):
    run = fit(kind)
    images = federation(kind).test[1].tensors[0]
    with pytest.raises(ValueError, match=r"2 of 6 images \(image 0, image 1\).*broken={}"):
        run.predict(images, batch_size=4)
    broken = {}
    predictions = run.predict(images, batch_size=4, broken=broken)
    assert len(predictions.labels) == len(predictions.probabilities) == 4
    assert predictions.probabilities.isfinite().all()
    assert sorted(broken) == [0, 1]
    with pytest.raises(ValueError, match="all 2 images"):
        run.predict(images[:2], broken={})
    loaded = perada.Run.load(run.save(tmp_path / "run"), backbone=FailsOnBrightImages(kind == "masks"))
    assert loaded.metrics["failed_outputs"] == run.metrics["failed_outputs"]


class FailsWithALargeLogit(nn.Module):
    """A linear network whose outputs for a bright image fail if the logit of class 2 exceeds a limit.

    By default the limit is the first logit for the bright public image.
    """

    def __init__(self, value=math.nan, limit=None):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(48, CLASSES)
        if limit is None:
            limit = self.head(public_images()[:1].flatten(1))[0, 2].item()
        self.limit = limit
        self.value = value

    def forward(self, x):
        logits = self.head(x.flatten(1))
        is_bright = (x.amax((1, 2, 3)) == BRIGHT).unsqueeze(1)
        fails = is_bright & (logits[:, 2:] > self.limit + 1e-4)
        return torch.cat([torch.where(fails, self.value, logits[:, :1]), logits[:, 1:]], 1)


def public_images():
    """Grey images, of which two have a bright pixel."""
    images = torch.full((6, 3, 4, 4), 0.5)
    images[:2, :, 0, 0] = BRIGHT
    return images


def distil(network, algorithm="feddf", **options):
    """Distil on bright public images. Only client 1 has class 2, so that only its bias grows."""
    images = torch.zeros(6, 3, 4, 4)
    train = []
    for client in range(3):
        classes = torch.full((6,), 2) if client == 1 else torch.arange(6) % 2
        train.append(TensorDataset(images, classes))
    names = ["north", "south", "west"]
    data = FederatedData(train, train, TensorDataset(public_images()), num_classes=CLASSES, client_names=names)
    common = {"algorithm": algorithm, "rounds": 1, "local_steps": 1, "lr_local": 0.01, "distill_steps": 2}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    module = FederatedDataModule(data, batch_size=6, task=Classification())
    return perada.finetune(network, module, **sections(adapter="full", **common | quiet | options))


@pytest.mark.parametrize(
    ("value", "options"),
    [
        (math.nan, {}),
        (-math.inf, {"distill_guard": "predictions"}),
        (math.inf, {"secure_sums": SecureSums()}),
        (1e20, {"secure_sums": SecureSums()}),
    ],
)
def test_a_teacher_is_named_and_the_average_stays(value, options):
    with pytest.warns(UserWarning, match=r"round 1: .*client 1 \('south'\) on public"):
        run = distil(FailsWithALargeLogit(value), **options)
    undistilled = distil(FailsWithALargeLogit(value), distill_steps=0)
    for name, average in undistilled.state("global").items():
        torch.testing.assert_close(run.state("global")[name], average, rtol=0, atol=1e-6)


def test_a_teacher_that_is_no_clients_model_is_counted():
    with pytest.warns(UserWarning, match=r"client 1 \('south'\) and \d teachers"):
        distil(FailsWithALargeLogit(), FedBE(samples=9))


def test_a_private_run_does_not_name_the_teacher():
    privacy = {"noise_multiplier": 0.001, "delta": 1e-3}
    with pytest.warns(UserWarning, match="teacher on public") as caught:
        distil(FailsWithALargeLogit(), privacy=privacy)
    assert not any("south" in str(warning.message) for warning in caught)


class SpoilSecondMember(Callback):
    """Lets the outputs of one of the global models fail."""

    def on_validation_start(self, trainer, module):
        bias = module.federation.server.global_state["head.bias"]
        bias[1, 2] = 100.0


@pytest.mark.parametrize("average", ["logits", "probabilities"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_an_ensemble_has_no_score_if_a_member_has_none(average, value):
    algorithm = FedEnsemble(FedAvg(), modes=3, average=average)
    data = FederatedDataModule(federation("classes"), batch_size=6, task=Classification())
    options = {"algorithm": algorithm, "rounds": 1, "local_steps": 1, "callbacks": [SpoilSecondMember()]}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    with pytest.warns(UserWarning, match=r"global model.*2 test images of client 1 \('south'\), .*round 1"):
        run = perada.finetune(
            FailsWithALargeLogit(value, limit=50.0), data, **sections(adapter="full", **options | quiet)
        )
    last = run.metrics["rounds"][-1]
    for name in ("global/global_test", "personal/local_test", "global/best_mode", "global/worst_mode"):
        assert math.isnan(last[name]), name
    # Only one client has a bright image.
    scores = run.metrics["clients"]["personal/local_test"]
    assert [math.isnan(score) for score in scores] == [False, True, False]
