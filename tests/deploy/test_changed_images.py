# SPDX-License-Identifier: Apache-2.0
"""A site that starts again with other images does not go on with a run that has trained on the former ones."""

from dataclasses import replace

import pytest
import torch
from torch.utils.data import TensorDataset

from perada.deploy.protocol import read_header
from perada.deploy.site.file import read_site
from perada.deploy.state import RunState, read_state
from perada.privacy import ClientPrivacy, Privacy

from .parties import Parties
from .test_site_file import write
from .test_sites import only_client, other_run, train

PRIVATE = {"privacy": Privacy(noise_multiplier=1.0, delta=1e-3)}
OF_CLIENTS = {"client_privacy": ClientPrivacy(noise_multiplier=1.0, delta=1e-3)}


def other_images(images, labels):
    return images.flip(-1), labels


def other_labels(images, labels):
    return images, labels.roll(1)


def one_more(images, labels):
    return torch.cat([images, images[:1]]), torch.cat([labels, labels[:1]])


def restart_worker(deployment, change, part="train", allow=()):
    """The worker of the first site, whose data have changed since it ran."""
    datasets = list(getattr(deployment.whole, part))
    datasets[0] = TensorDataset(*change(*datasets[0].tensors))
    deployment.whole = replace(deployment.whole, **{part: datasets})
    worker = deployment.worker(0)
    worker.permissions.resume_allow = set(allow)
    return worker


def train_first_site(tiny, tmp_path, loop=None):
    """The parties of a run in which the first site has trained a round; its worker has ended."""
    deployment = Parties(tiny, tmp_path, "ditto", rounds=3, loop=loop or {})
    worker = deployment.worker(0)
    assert read_header(worker.answer(train(worker, 0), ""))["code"] == "ok"
    worker.store.close()
    return deployment


def code(worker, round):
    return read_header(worker.answer(train(worker, round), ""))["code"]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("change", "part", "message"),
    [
        (other_images, "train", "the site's training images differ from those"),
        (other_labels, "train", "the site's labels of the training images differ from those"),
        (one_more, "train", "the site's labels of the training images differ from those"),
        (other_images, "test", "the site's test images differ from those"),
    ],
)
def test_a_run_does_not_go_on_with_others(tiny, tmp_path, caplog, change, part, message):
    deployment = train_first_site(tiny, tmp_path)
    before = (tmp_path / "site0" / "state.safetensors").read_bytes()
    worker = restart_worker(deployment, change, part)
    assert code(worker, 1) == "other"
    assert message in caplog.text and "resume_allow: [images]" in caplog.text
    assert (tmp_path / "site0" / "state.safetensors").read_bytes() == before
    assert read_header(worker.answer(other_run(worker), ""))["code"] == "ok"  # a new run begins with what is there


def test_with_the_same_images_it_goes_on(tiny, tmp_path):
    deployment = train_first_site(tiny, tmp_path)
    assert code(restart_worker(deployment, lambda *tensors: [tensor.clone() for tensor in tensors]), 1) == "ok"


def test_the_site_can_accept_the_change(tiny, tmp_path, caplog):
    deployment = train_first_site(tiny, tmp_path)
    worker = restart_worker(deployment, other_images, allow=["images"])
    assert code(worker, 1) == "ok"
    assert "the run continues with the new ones, as resume_allow permits" in caplog.text
    state = read_state(tmp_path / "site0" / "state.safetensors")[0]
    assert state.training.fingerprint == only_client(worker).fingerprint
    worker.store.close()
    assert code(deployment.worker(0), 2) == "ok"  # accepted once: these are now the images of the run


@pytest.mark.every(4)
@pytest.mark.parametrize("loop", [PRIVATE, OF_CLIENTS], ids=["images", "clients"])
@pytest.mark.parametrize("allow", [(), ("images",)])
def test_a_private_run_never_goes_on_with_others(tiny, tmp_path, caplog, loop, allow):
    deployment = Parties(tiny, tmp_path, "fedavg", rounds=3, loop=loop)
    worker = deployment.worker(0)
    assert code(worker, 0) == "ok"
    worker.store.close()
    assert code(restart_worker(deployment, other_images, allow=allow), 1) == "other"
    assert "its noise and ledgers are tied to those" in caplog.text


def test_the_sites_file_says_what_is_accepted(tmp_path):
    assert read_site(write(tmp_path, "a")).resume_allow == ()
    assert read_site(write(tmp_path, "a", resume_allow=["images"])).resume_allow == ("images",)
    for wrong in (["clients"], "images"):
        with pytest.raises(ValueError, match="resume_allow"):
            read_site(write(tmp_path, "a", resume_allow=wrong))


def test_a_state_before_the_first_round_has_no_images():
    assert RunState("0" * 32).training.fingerprint == {}
