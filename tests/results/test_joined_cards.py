# SPDX-License-Identifier: Apache-2.0
"""What the cards of a private run say once a client has joined."""

import pytest
import torch
from torch.utils.data import TensorDataset

import perada
from perada.data import FederatedData
from perada.results.cards import privacy_card, privacy_lines
from perada.studies.report.records import RunRecord
from perada.studies.report.sections import sections

from .test_model_card import finetuned


def personalized_run(**options):
    run = finetuned("head", batch_size=4, **options)
    x = torch.randint(0, 256, (10, 3, 32, 32), dtype=torch.uint8)
    data = FederatedData([TensorDataset(x, torch.arange(10) % 3)], num_classes=3)
    return perada.personalize(run, data, "late", local_steps=1, batch_size=2, accelerator="cpu")


@pytest.fixture(scope="module")
def by_image():
    return personalized_run(privacy={"noise_multiplier": 1.0, "delta": 1e-3})


@pytest.mark.slow
def test_who_only_joined_does_not_count_among_those_who_sent(by_image, tmp_path):
    sample = by_image.info["privacy"]["sample"]
    server = sample["server"]
    rates = sample["sample_rates"]
    assert server[2] == 0 < min(server[:2])
    by_image.export(tmp_path)
    card = (tmp_path / "global" / "README.md").read_text()
    assert f"{sum(server[:2]) / 2:.2f} ±" in card
    low, high = sorted(f"{rate:.4g}" for rate in rates[:2])
    assert f"with probability {low} to {high} " in card
    assert f"ε {sum(server[:2]) / 2:.2f} ±" in privacy_lines(by_image.info["privacy"], joined={2})
    assert "If its images took part in earlier rounds" in (tmp_path / "client_2" / "README.md").read_text()
    assert "If its images took part in earlier rounds" not in (tmp_path / "client_1" / "README.md").read_text()


def test_who_shares_the_global_adapter_is_not_called_unprotected(tmp_path):
    options = {"noise_multiplier": 1.0, "max_norm": 1.0, "delta": 1e-3}
    run = personalized_run(algorithm="fedavg", client_privacy=options)
    folder = run.export(tmp_path)
    assert run.own_clients() == {2}
    cards = [(folder / f"client_{client}" / "README.md").read_text() for client in range(3)]
    assert ["it does not protect that client as a whole" in card for card in cards] == [False, False, True]
    again = perada.Run.load(folder)
    assert again.own_clients() == {2}
    assert privacy_card(again.info["privacy"], None, joined={2}) in cards[0]


def test_the_page_of_a_private_run_says_that_it_is_not_covered(by_image, tmp_path):
    record = RunRecord("it", tmp_path, by_image.info, scores_of_clients={"personal/local_test": [0.5] * 3})
    intros = {section.key: section.intro for section in sections(record)}
    assert "This page itself is not covered" in intros["privacy"]
