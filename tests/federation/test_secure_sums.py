# SPDX-License-Identifier: Apache-2.0
"""Rounds whose server sees sums alone: which algorithms can, and that they do what they do without."""

import pytest
import torch

from perada.algorithms import FedAvg, FedEnsemble, HetLoRA, PerAda
from perada.server import SecureSums
from tests.algorithms.problems import MERGING, OF_BRANCHES, OF_LORA, finetune
from tests.methods import NAMED

CANNOT = {"fedbe", "fedbe_no_kd", "fed_ensemble", "standalone", "het_lora", *MERGING}


def run(name, **options):
    problem = {}
    if (name if isinstance(name, str) else "") in OF_LORA or str(name).endswith("_adapter"):
        problem = {"problem": "net-backbone"}
    elif name in OF_BRANCHES:
        problem = {"problem": "net-branches"}
    return finetune(name, **{"rounds": 2, "clients_per_round": 3} | problem | options)


@pytest.mark.parametrize("name", sorted(set(NAMED) - CANNOT))
@pytest.mark.every(20)
def test_with_many_bits_the_results_are_those_without(name):
    one = run(name, secure_sums=SecureSums(fraction_bits=40))
    other = run(name)
    for key, value in one.state("global").items():
        if value.is_floating_point():  # counters are averaged
            torch.testing.assert_close(value, other.state("global")[key], rtol=1e-9, atol=1e-9, msg=key)


def test_distillation_is_by_the_mean_of_rounded_logits():
    """Of few bits the teachers' are those of SecureSums, whoever the student is."""
    options = {"weighting": "samples", "distill_steps": 3}
    fine, coarse = (run("perada", secure_sums={"fraction_bits": bits}, **options) for bits in (40, 10))
    plain = run("perada", **options)
    gaps = [
        max(float((a - b).abs().max()) for a, b in zip(parameters(plain), parameters(one), strict=True))
        for one in (fine, coarse)
    ]
    assert gaps[0] < 1e-8 < 1e-5 < gaps[1] < 0.05


def parameters(run):
    return [value for value in run.state("global").values() if value.is_floating_point()]


class Spy(PerAda):
    seen: list[bool]

    def server_step(self, server):
        rows = [server.updates.gathered(key) for key in server.updates.names]
        self.seen.append(all(torch.equal(row, value[0]) for value in rows for row in value))
        return super().server_step(server)


def test_the_servers_step_gets_to_see_the_mean_alone():
    spy = Spy()
    for secure in (SecureSums(), None):
        Spy.seen = []
        run(spy, secure_sums=secure)
        assert Spy.seen[-2:] == [secure is not None] * 2  # after trials at set-up


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        ("standalone", {}, "Standalone: its clients send nothing"),
        ("fedbe", {}, "FedBE: its server step is not a function of the mean of the clients' updates"),
        (FedEnsemble(modes=2, strata=2), {}, "FedEnsemble: its server step is not"),
        (FedEnsemble(modes=2, strata=2, assignment="loss"), {}, "FedEnsemble: it compares models"),
        (HetLoRA(FedAvg()), {"problem": "net-backbone"}, "HetLoRA: its server step is not"),
        ("fedavg", {"server_rule": "median"}, "the server rule Median: it inspects single updates"),
        ("fedavg", {"drop_outliers": True}, "drop_outliers=True: it compares single updates"),
        ("fedavg", {"clients_per_round": 2}, "clients_per_round=2: more than 0.666667 of them, and at least 3"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(delta|secure_rng).*:UserWarning")
def test_what_needs_more_than_sums_is_rejected(algorithm, options, message):
    with pytest.raises(ValueError, match=rf"secure_sums.*{message}"):
        run(algorithm, secure_sums=SecureSums(), **options)


def test_diagnostics_of_single_updates_are_rejected():
    with pytest.raises(ValueError, match=r"update_norms.*secure_sums"):
        run("fedavg", secure_sums=SecureSums(), diagnostics=["update_norms"])


def test_who_does_not_fit_is_left_out_and_too_few_are_void(monkeypatch):
    """Of four clients, three must be there at the end; more than one whose numbers are too large end the round."""
    huge = set()
    real = SecureSums.summable

    def summable(self, updates, shares, places):
        for place in huge:
            updates.local_rows[next(iter(updates.local_rows))][place] = 1e12
        return real(self, updates, shares, places)

    monkeypatch.setattr(SecureSums, "summable", summable)
    start = run("fedavg", rounds=0).state("global")
    for places, moves in (([], True), ([1], True), ([1, 2], False)):
        huge.clear()
        huge.update(places)
        result = run("fedavg", rounds=1, clients_per_round=4, secure_sums=SecureSums()).state("global")
        assert any(not torch.equal(result[key], start[key]) for key in start) == moves
        assert all(value.abs().max() < 1e6 for value in result.values())
