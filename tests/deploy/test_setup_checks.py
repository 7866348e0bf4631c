# SPDX-License-Identifier: Apache-2.0
"""The set-up checks have one order: of two faults of a recipe, simulation, server and site report the same one."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from peft import LoraConfig

from perada.deploy.transport import LocalTransport
from perada.privacy import ClientPrivacy, Privacy
from perada.server import SVD, Distillation, Median, SecureSums, TrimmedMean

from .parties import Parties
from .test_parity import normalized

SUMS = {"secure_sums": SecureSums(min_sites=3)}
OF_CLIENTS = {"client_privacy": ClientPrivacy(noise_multiplier=1.0, delta=1e-3)}
OF_IMAGES = {"privacy": Privacy(noise_multiplier=1.0, delta=1e-3)}
BOTH_MODELS = {"prediction": "both"}
BY_SIZE = {"weighting": "samples"}
VALIDATED = {"data": {"evaluate_on": "validation", "client_validation": 0.3}}
MIXED = {"data": {"mixup": 0.2}}
LORA = {"adapter": LoraConfig(r=2, target_modules=["0"], init_lora_weights=True)}
SINGLE_IMAGES = {"distillation": Distillation(steps=2, batch_size=1, student_mode="train")}


@dataclass
class Recipe:
    """A recipe with faults.

    Attributes:
        loop: Options of the loop.
        algorithm: Name of the algorithm.
        others: Other options of ``Parties``.
        has_public: Whether the server has public images.
    """

    loop: dict[str, Any]
    algorithm: str = "fedavg"
    others: dict[str, Any] = field(default_factory=dict)
    has_public: bool = True

    def messages(self, tiny, folder, names):
        """The errors of some set-ups by name."""
        parties = Parties(tiny, folder, self.algorithm, loop=self.loop, **self.others)
        if not self.has_public:
            parties.whole.public = None
        return {name: message_of(set_ups(parties)[name]) for name in names}


def set_ups(parties):
    """How a simulation, a server and a site set up the run."""
    return {
        "simulation": parties.simulated,
        "server": lambda: parties.coordinator(LocalTransport({})),
        "site": lambda: parties.worker(0),
    }


def message_of(set_up):
    """The error of a set-up."""
    with pytest.raises(ValueError) as caught:
        set_up()
    return str(caught.value)


EVERYWHERE = ("simulation", "server", "site")
# For each pair: a recipe with two faults, words about the first one, the recipe without the first one, words about the
# second one, and who can find both.
PAIRS = {
    "algorithm and sums": (
        Recipe(SUMS | {"server_rule": Median()}, "fedbn"),
        "FedBN has nothing to keep",
        Recipe(SUMS | {"server_rule": Median()}),
        "server rule Median",
        EVERYWHERE,
    ),
    "weighting and prediction": (
        Recipe(OF_IMAGES | BY_SIZE | BOTH_MODELS),
        "weighting='samples'",
        Recipe(OF_IMAGES | BOTH_MODELS),
        "prediction='both'",
        EVERYWHERE,
    ),
    "size of rounds and sums": (
        Recipe(SUMS | {"server_rule": TrimmedMean(0.1)}),
        "trim=0.1 drops none of 3 clients",
        Recipe(SUMS | {"server_rule": TrimmedMean(0.4)}),
        "server rule TrimmedMean",
        ("simulation", "server"),
    ),
    "factors and sums": (
        Recipe(SUMS | {"server_rule": SVD()}),
        "no LoRA factors",
        Recipe(SUMS | {"server_rule": SVD()}, others={"module": LORA}),
        "secure_sums does not support the server rule SVD",
        EVERYWHERE,
    ),
    "rule and sums": (
        Recipe(SUMS | {"server_rule": Median()}, "fedex_lora", {"module": LORA | {"train_backbone": "merged"}}),
        "FedExLoRA does not support server_rule=Median",
        Recipe(SUMS, "fedex_lora", {"module": LORA | {"train_backbone": "merged"}}),
        "secure_sums does not support FedExLoRA",
        EVERYWHERE,
    ),
    "public images and statistics": (
        Recipe(SINGLE_IMAGES, "feddf", {"net": normalized}, has_public=False),
        "no public set",
        Recipe(SINGLE_IMAGES, "feddf", {"net": normalized}),
        "batch_size is 1",
        ("simulation", "server"),
    ),
    "sums and client privacy": (
        Recipe(SUMS | OF_CLIENTS, "standalone"),
        "secure_sums does not support Standalone",
        Recipe(OF_CLIENTS, "standalone"),
        "client_privacy does not support Standalone",
        EVERYWHERE,
    ),
    "client privacy and prediction": (
        Recipe(OF_CLIENTS | BY_SIZE | BOTH_MODELS),
        "client_privacy does not support weighting",
        Recipe(OF_CLIENTS | BOTH_MODELS),
        "prediction='both'",
        EVERYWHERE,
    ),
    "options and data": (
        Recipe(OF_IMAGES | BY_SIZE, others=VALIDATED),
        "weighting='samples'",
        Recipe(OF_IMAGES, others=VALIDATED),
        "evaluate_on='validation'",
        ("simulation", "site"),
    ),
    "data and first images": (
        Recipe(OF_IMAGES, others=MIXED | {"net": normalized}),
        "mixup",
        Recipe(OF_IMAGES, others={"net": normalized}),
        "BatchNorm",
        ("simulation", "site"),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_earlier_of_two_faults_is_reported_wherever_it_can_be_found(name, tiny, tmp_path):
    with_both, first_words, with_second, second_words, places = PAIRS[name]
    for recipe, words in ((with_both, first_words), (with_second, second_words)):
        messages = recipe.messages(tiny, tmp_path, places)
        assert {place for place in places if words not in messages[place]} == set(), messages
        # The server names the option of the deployment, min_sites, before the same message.
        assert len({message.removeprefix("min_sites=3: ") for message in messages.values()}) == 1


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("section", ["client_privacy", "secure_sums"])
def test_an_option_that_was_changed_after_the_loop_was_created_is_checked_at_set_up(
    section, place, tiny, tmp_path, monkeypatch
):
    parties = Parties(tiny, tmp_path, loop=SUMS if section == "secure_sums" else OF_CLIENTS)
    loop = parties.loop()
    loop.drop_outliers = True
    monkeypatch.setattr(parties, "loop", lambda: loop)
    assert f"{section} does not support drop_outliers=True" in message_of(set_ups(parties)[place])


def test_an_option_that_only_the_loop_knows_is_checked_at_set_up(tiny, tmp_path, monkeypatch):
    parties = Parties(tiny, tmp_path, loop=OF_IMAGES)
    loop = parties.loop()
    loop.max_failures = 2
    monkeypatch.setattr(parties, "loop", lambda: loop)
    assert "max_failures=2 is not supported with privacy" in message_of(parties.simulated)
