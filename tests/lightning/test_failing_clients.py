# SPDX-License-Identifier: Apache-2.0
"""Clients whose samples cannot be read or whose updates are far: they are named, and the round goes on without them."""

import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from pytorch_lightning import Callback
from torch.utils.data import Dataset, Subset
from torchvision.datasets import ImageFolder

import perada
from perada.algorithms import FedAvg
from perada.core.rounds import one_of
from perada.privacy import ClientPrivacy, Privacy
from tests.options import sections


class Own(Dataset):
    """A client's samples, read one by one, of which one goes wrong once it is told to."""

    def __init__(self, base, bad=None, what=None):
        self.base = base
        self.bad = bad
        self.what = what
        self.targets = base.tensors[1]
        # In shared memory, since processes that read samples live through all rounds.
        self._after = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def after(self):
        return int(self._after)

    @after.setter
    def after(self, rounds):
        self._after.fill_(rounds)

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        image, label = self.base[index]
        if index != self.bad or self.after > 0:
            return image, int(label)
        if isinstance(self.what, Exception):
            raise self.what
        return self.what(image, int(label))


class Later(Callback):
    """Lets the sample go wrong from a round on."""

    def __init__(self, dataset, round):
        self.dataset = dataset
        self.round = round

    def on_train_epoch_start(self, trainer, module):
        self.dataset.after = self.round - trainer.current_epoch


def federation(tiny, what, bad=2):
    data = tiny.data(sizes=(9, 5, 7), public=False)
    data.train[:] = [Own(part) for part in data.train]
    data.train[1] = Own(data.train[1].base, bad, what)
    data.train[1].after = 9
    return data


def fit(tiny, data, rounds=3, net=None, **options):
    settings = tiny.options | {"adapter": "head", "algorithm": "ditto", "logger": False, "distill_steps": None}
    settings |= {"distill_batch_size": None, "clients_per_round": None, "enable_checkpointing": False}
    return perada.finetune(net or tiny.net(), data, **sections(rounds=rounds, **(settings | options)))


FAULTS = {
    "exception": (
        KeyError("gone"),
        r"client 1, sample 2, cannot be read \(KeyError: 'gone'\): fix it or leave it out",
    ),
    "nan": (lambda x, y: (x * torch.nan, y), "client 1, sample 2, is an image with NaN or infinity"),
    "label": (lambda x, y: (x, 7), r"client 1 has the label 7, outside 0\.\.2"),
    "shape": (lambda x, y: (x[:, :4], y), r"client 1: an image is float32 of shape \(1, 4, 8\)"),
    "word": (lambda x, y: ("image", y), r"client 1, sample 2: "),
}


@pytest.mark.every(8)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_sample_that_goes_wrong_in_round_2_costs_its_client_that_round(tiny, fault, workers):
    """As if it had not been drawn in that round: the mean is of the two others, and its own adapter stays."""
    what, message = FAULTS[fault]
    seen = {}

    class Watched(FedAvg):
        def server_step(self, step):
            seen[step.round] = set(step.clients)
            return super().server_step(step)

    data = perada.FederatedDataModule(federation(tiny, what), batch_size=4, num_workers=workers)
    later = Later(data.data.train[1], 2)
    with pytest.warns(UserWarning, match=f"round 3: {message}"):
        run = fit(tiny, data, algorithm=Watched(), callbacks=[later], batch_size=None)
    assert seen == {0: {0, 1, 2}, 1: {0, 1, 2}, 2: {0, 2}}
    record = run.metrics["rounds"][2]
    assert (record["clients/drawn"], record["clients/failed"]) == (3, 1)
    assert "clients/failed" not in run.metrics["rounds"][1]
    assert all(value.isfinite().all() for value in run.state("global").values())


def test_at_set_up_the_sample_is_named(tiny):
    data = federation(tiny, OSError("image file is truncated"), bad=0)
    data.train[1].after = 0
    message = r"1 image cannot be read \(client 1: the training set: sample 0, cannot be read \(OSError: image file"
    with pytest.raises(ValueError, match=message):
        fit(tiny, data)


def test_a_truncated_file_is_named_with_its_path(tmp_path):
    """Of torchvision's own folder, which does not say where it is."""
    for client in (0, 1):
        for number in range(6):
            path = tmp_path / f"{client}" / f"class{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(noise).save(path)
    broken = tmp_path / "1" / "class1" / "3.png"
    broken.write_bytes(broken.read_bytes()[:900])
    data = perada.FederatedData([ImageFolder(str(tmp_path / str(client))) for client in (0, 1)])
    with pytest.raises(ValueError, match=r"sample 4 \('.*1/class1/3\.png'\), .*OSError"):
        perada.FederatedDataModule(data).setup()


@pytest.mark.slow
def test_with_privacy_the_client_has_taken_part(tiny):
    """Its ledger counts the round, as if nothing had happened; the sample that is no sample is in no batch."""
    privacy = Privacy(noise_multiplier=1.0, secure_rng=False)
    uninterrupted = fit(tiny, federation(tiny, None, bad=None), privacy=privacy)
    data = federation(tiny, RuntimeError("gone"))
    drawn = []

    class Counting(Later):
        def on_train_batch_start(self, trainer, module, batch, index):
            drawn.append(one_of(batch).counts[1] if len(one_of(batch).counts) > 1 else None)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = fit(tiny, data, privacy=privacy, callbacks=[Counting(data.train[1], 0)])
    assert not [warning for warning in caught if "client" in str(warning.message)]  # no log says whose image it is
    assert run.info["privacy"]["sample"]["release"] == uninterrupted.info["privacy"]["sample"]["release"]
    assert not any("clients/failed" in record for record in run.metrics["rounds"])


@pytest.mark.every(2)
@pytest.mark.parametrize("algorithm", ["ditto", "fedavg_ft"])
@pytest.mark.filterwarnings("ignore:.*cannot be read", "ignore:privacy. delta")
def test_with_privacy_a_sample_that_cannot_be_read_is_as_one_without_a_gradient(tiny, algorithm):
    """The client neither stays at its initial state, which would show it, nor counts as failed."""
    privacy = Privacy(noise_multiplier=1.0, secure_rng=False)
    runs = []

    class Spoilt(torch.nn.Module):
        def forward(self, x):
            return torch.where((x == 77).flatten(1).all(1).view(-1, 1, 1, 1), torch.nan, x)

    def net():  # without dropout, whose masks go by an image's place in the batch
        return torch.nn.Sequential(Spoilt(), *(part for part in tiny.net() if type(part) is not torch.nn.Dropout))

    for what in (OSError("cut short"), lambda x, y: (torch.full_like(x, 77), y)):
        data = federation(tiny, what)
        options = {"callbacks": [Later(data.train[1], 0)], "algorithm": algorithm, "net": net()}
        runs.append(fit(tiny, data, privacy=privacy, **options))
    start = fit(tiny, federation(tiny, None), 0, net=net(), algorithm=algorithm).state("global")
    for key, value in runs[0].state("personal", 1).items():
        assert not torch.equal(value, start[key])
        for other in runs[1:]:
            torch.testing.assert_close(other.state("personal", 1)[key], value)
            torch.testing.assert_close(other.state("global")[key], runs[0].state("global")[key])


def test_too_many_failures_end_the_run(tiny):
    data = federation(tiny, RuntimeError("gone"))
    with (
        pytest.warns(UserWarning, match="client 1, sample 2"),
        pytest.raises(ValueError, match=r"max_failures=1: .*2 times in 2 rounds"),
    ):
        fit(tiny, data, max_failures=1, callbacks=[Later(data.train[1], 0)])


@pytest.mark.every(2)
@pytest.mark.parametrize("section", ["privacy", "client_privacy"])
def test_a_private_run_ends_alike_whether_or_not_clients_fail(tiny, section):
    """Neither an error nor a warning shows whose training failed: it depends on images, and no ledger counts it."""
    level = {section: {"noise_multiplier": 1.0, "max_norm": 1e-3, "delta": 1e-3}}
    rounds = []
    for spoilt in (0, 1, 3):
        data = federation(tiny, None, bad=None)
        for part in data.train[:spoilt]:
            part.bad, part.what, part.after = 2, lambda x, y: (torch.full_like(x, 3e38), y), 9
        later = [Later(part, 0) for part in data.train]
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            run = fit(tiny, data, rounds=2, algorithm="fedavg", local_epochs=2, callbacks=later, **level)
        rounds.append([sorted(row) for row in run.metrics["rounds"]])
    assert rounds[0] == rounds[1] == rounds[2]
    with pytest.raises(ValueError, match=r"max_failures=0 .*privacy or client_privacy"):
        fit(tiny, tiny.data(sizes=(9, 5, 7)), max_failures=0, **level)


@pytest.mark.filterwarnings("ignore:round .*became NaN:UserWarning")
@pytest.mark.filterwarnings("ignore:the floating-point images of")
def test_a_run_in_which_every_client_fails_does_not_end_well(tiny):
    data = tiny.data(sizes=(9, 5, 7), public=False)
    for part in data.train:
        part.tensors[0].fill_(3e38)
    with pytest.raises(ValueError, match="all 2 rounds"):
        fit(tiny, data, rounds=2)
    data.train[2] = tiny.data(sizes=(9, 5, 7)).train[2]
    assert fit(tiny, data, rounds=2).num_clients == 3


def test_images_of_tensors_that_are_nan_are_all_named_at_set_up_or_left_out(tiny):
    data, clean = (tiny.data(sizes=(9, 5, 7), public=False) for _ in range(2))
    data.test[1].tensors[0][4] = torch.inf
    data.train[2].tensors[0][6] = torch.nan
    with pytest.raises(ValueError, match=r"2 images .*client 2: the training set: image 6.*client 1: the test set: im"):
        fit(tiny, data)
    clean.train[2] = Subset(clean.train[2], range(6))
    clean.test[1] = Subset(clean.test[1], [0, 1, 2, 3, 5])
    with pytest.warns(UserWarning, match=r"2 images .*read"):
        run = fit(tiny, perada.FederatedDataModule(data, batch_size=4, on_broken="skip"), batch_size=None)
    expected = fit(tiny, perada.FederatedDataModule(clean, batch_size=4), batch_size=None)
    assert run.metrics["clients"] == expected.metrics["clients"]
    for key, value in expected.state("personal", 2).items():
        assert torch.equal(run.state("personal", 2)[key], value)


class Scaled(FedAvg):
    """FedAvg whose client 3 sends ten thousand times its change."""

    def broadcast(self, given):
        self.clients = given.clients
        return super().broadcast(given)

    def end_round(self, trained, kept, received, tensor_names):
        kept, sent = super().end_round(trained, kept, received, tensor_names)
        place = self.clients.index(3)
        for key in tensor_names.parameters:
            sent[key] = sent[key].clone()
            sent[key][place] = received[key][place] + 1e4 * (sent[key][place] - received[key][place])
        return kept, sent


def test_a_far_update_is_left_out_if_asked(tiny):
    """What is left is the mean of the others, computed by hand of what they sent alone."""
    data = tiny.data(sizes=(8, 8, 8, 8), public=False)
    options = {"rounds": 1, "local_steps": 2, "batch_size": "full", "momentum": 0.0}
    with pytest.warns(UserWarning, match=r"client 3 .* times .*drop_outliers"):
        kept = fit(tiny, data, algorithm=Scaled(), **options).state("global")
    with pytest.warns(UserWarning, match=r"client 3 .*dropped \(drop_outliers\)"):
        actual = fit(tiny, data, algorithm=Scaled(), drop_outliers=True, **options).state("global")
    others = perada.FederatedData(data.train[:3], data.test[:3])
    expected = fit(tiny, others, algorithm="fedavg", **options).state("global")
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-5, atol=1e-6)
    assert max(float((kept[key] - value).abs().max()) for key, value in expected.items()) > 1


def test_options_of_failures_are_checked(tiny):
    for options, message in (
        ({"max_failures": -1}, r"max_failures .*got -1"),
        ({"drop_outliers": "yes"}, r"drop_outliers .*got 'yes'"),
        (
            {"drop_outliers": True, "client_privacy": ClientPrivacy(1.0)},
            r"client_privacy.*drop_outliers=True",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            fit(tiny, tiny.data(), algorithm="fedavg", **options)
