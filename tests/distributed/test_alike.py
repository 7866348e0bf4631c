# SPDX-License-Identifier: Apache-2.0
"""Processes that were given different options do not begin: they would wait for each other for ever, or disagree."""

import pytest

from perada.core.ranks import Ranks
from perada.lightning import federated_loop
from perada.lightning.run_fingerprint import check_ranks_agree

from .job import run


class Another(Ranks):
    """Beside this process, one that says something else."""

    def __init__(self, other):
        self.other = other

    def gather(self, value):
        return [value, self.other]


def fingerprint_of_options(monkeypatch, **options):
    """What a process with these options tells the others."""
    results = []
    monkeypatch.setattr(federated_loop, "check_ranks_agree", lambda ranks, mine: results.append(mine))
    run("perada", **{"rounds": 1} | options)
    return results[0]


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ({"rounds": 2}, "number of rounds"),
        ({"weight_decay": 0.1}, r"training\.weight_decay"),
        ({"lr_schedule": "cosine"}, r"training\.lr_schedule"),
        ({"prox_strength": 2.0}, "algorithm"),
        ({"distill_steps": 4}, "distillation"),
        ({"local_steps": 2}, r"training\.local_steps"),
        ({"clients_per_round": 2}, "clients_per_round"),
        ({"check_val_every_n_epoch": 2}, "check_val_every_n_epoch"),
        ({"global_test_clients": 2}, "global_test_clients"),
    ],
)
@pytest.mark.every(2)
def test_another_option_is_named(monkeypatch, option, name):
    mine = fingerprint_of_options(monkeypatch)
    other = fingerprint_of_options(monkeypatch, **option)
    check_ranks_agree(Another(fingerprint_of_options(monkeypatch)), mine)
    with pytest.raises(ValueError, match=rf"process 1 .*process 0 .*{name}"):
        check_ranks_agree(Another(other), mine)
