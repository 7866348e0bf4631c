# SPDX-License-Identifier: Apache-2.0
"""A site rejects, with the same words, the private recipes that the set-up of their simulation rejects."""

import pytest

from perada.algorithms import FedEnsemble
from perada.privacy import ClientPrivacy, Privacy
from perada.server import Distillation, Median, SecureSums

from .parties import Parties

OF_CLIENTS = {"client_privacy": ClientPrivacy(noise_multiplier=1.0, delta=1e-3)}
OF_IMAGES = {"privacy": Privacy(noise_multiplier=1.0, delta=1e-3)}
NOISY_SUMS = OF_CLIENTS | {"secure_sums": SecureSums(min_sites=3)}


def rejections(parties):
    """What the simulation and the site say."""
    said = []
    for set_up in (parties.simulated, lambda: parties.worker(0)):
        with pytest.raises(ValueError) as caught:
            set_up()
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("level", [OF_CLIENTS, OF_IMAGES, NOISY_SUMS], ids=["clients", "images", "noisy sums"])
def test_images_held_out_of_the_clients_to_choose_by(tiny, tmp_path, level):
    options = {"evaluate_on": "validation", "client_validation": 0.3}
    simulated, at_site = rejections(Parties(tiny, tmp_path, loop=level, data=options))
    assert "evaluate_on='validation' scores models on held-out private images" in simulated
    assert at_site == simulated


@pytest.mark.parametrize(("level", "message"), [(OF_CLIENTS, "set modes=1"), (OF_IMAGES, "compares models")])
def test_an_algorithm_that_compares_models_on_the_clients_images(tiny, tmp_path, level, message):
    algorithm = FedEnsemble(modes=2, assignment="loss")
    simulated, at_site = rejections(Parties(tiny, tmp_path, algorithm, loop=level))
    assert message in simulated
    assert at_site == simulated


@pytest.mark.parametrize(
    ("algorithm", "loop", "message"),
    [
        ("fedavg", {"weighting": "samples"}, "weighting='samples'"),
        ("fedavg", {"server_rule": Median()}, "the server rule Median"),
        ("feddf", {"distillation": Distillation(steps=2)}, "with distillation"),
        ("standalone", {}, "its clients send nothing"),
    ],
    ids=["weighting", "rule", "distillation", "sends"],
)
def test_what_is_made_of_more_than_the_noisy_mean(tiny, tmp_path, algorithm, loop, message):
    simulated, at_site = rejections(Parties(tiny, tmp_path / "clients", algorithm, loop=OF_CLIENTS | loop))
    assert message in simulated
    assert at_site == simulated
    # With secure sums there may be another reason first, which is the same one for both.
    simulated, at_site = rejections(Parties(tiny, tmp_path / "sums", algorithm, loop=NOISY_SUMS | loop))
    assert at_site == simulated


def test_numbers_of_images_in_a_run_with_privacy_of_images(tiny, tmp_path):
    simulated, at_site = rejections(Parties(tiny, tmp_path, loop=OF_IMAGES | {"weighting": "samples"}))
    assert "weighting='samples' reveals the clients' numbers of images without noise" in simulated
    assert at_site == simulated


def test_a_private_recipe_without_any_of_these_is_taken(tiny, tmp_path):
    for number, level in enumerate((OF_CLIENTS, OF_IMAGES, NOISY_SUMS)):
        assert Parties(tiny, tmp_path / str(number), loop=level).worker(0).clients
