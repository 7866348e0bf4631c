# SPDX-License-Identifier: Apache-2.0
"""What an algorithm that is written outside perada states of itself: factors, rules, objective, privacy, newcomers."""

import pytest

import perada
from perada.algorithms import MTL, Algorithm, Ditto, FedAvg, FFALoRA, HetLoRA, PerAda
from perada.algorithms.base import AlgorithmWrapper
from perada.algorithms.newcomers import Joining, joining
from perada.core.checks import OptionError
from perada.core.rounds import Phase
from perada.privacy.dry_run_checks import check_client_level
from perada.server.rules import Mean

from .problems import finetune

PHASES = (Phase("train", 1.0, None), Phase("more", None, 3))


class Shifted(FedAvg):
    """Clients send something else than factors, of which the server needs the plain mean, and squares beside it."""

    instead_of_factors = "sums of factors"
    needs_plain_mean = "counts on the mean; leave server_rule out"

    def beyond_client_privacy(self):
        return "Shifted: its clients send squares, too; choose FedAvg"

    def joining(self, phases):
        return MTL(0.25), phases[1:]


class Pulled(Algorithm):
    """Ditto, without being a subclass of it."""

    inference = "personal"
    roles = ("personal", "local")
    personal_pull = 0.3

    def client_step(self, step):
        step.descend("personal", step.loss("personal"), pull=(self.personal_pull, step.received))
        step.descend("local", step.loss("local"))


def test_a_rule_that_combines_factors_is_rejected_if_clients_send_none():
    with pytest.raises(OptionError, match=r"Shifted.*factors"):
        finetune(Shifted(), "net-adapter", rounds=1, server_rule="svd")


def test_a_rule_is_rejected_with_the_reason_that_the_algorithm_states():
    with pytest.raises(OptionError, match=r"Shifted.*server_rule=Median"):
        finetune(Shifted(), rounds=1, server_rule="median")


def test_the_gradient_of_the_stated_objective_is_measured():
    """The same as that of Ditto, whose steps are the same."""
    runs = {}
    for name, algorithm in (("own", Pulled()), ("ditto", Ditto(0.3)), ("fedavg", FedAvg())):
        runs[name] = finetune(algorithm, rounds=1, evaluation={"diagnostics": ["gradient_norms"]}).metrics["rounds"][-1]
    for name in ("theory/personal_gradient", "theory/personal_gradient_std"):
        assert runs["own"][name] == pytest.approx(runs["ditto"][name], rel=1e-12) and runs["own"][name] > 0
        assert name not in runs["fedavg"]


def test_what_client_level_privacy_does_not_cover_is_rejected_also_of_a_wrapped_algorithm():
    for algorithm in (Shifted(), FFALoRA(Shifted()), HetLoRA(FFALoRA(Shifted())).base):
        with pytest.raises(ValueError, match=r"Shifted.*squares"):
            check_client_level(algorithm, Mean(), "uniform", distills=False)
    check_client_level(FedAvg(), Mean(), "uniform", distills=False)


def test_a_client_joins_as_the_algorithm_states():
    for algorithm in (Shifted(), HetLoRA(Shifted())):
        chosen, phases = joining(algorithm, PHASES)
        assert type(chosen) is Joining and phases == PHASES[1:]
        assert isinstance(chosen.base, MTL) and chosen.base.prox_strength == 0.25
    frozen, phases = joining(FFALoRA(Shifted()), PHASES)
    assert isinstance(frozen.base, FFALoRA) and isinstance(frozen.base.base.base, MTL) and phases == PHASES[1:]


class OtherStep(PerAda):
    """PerAda with another step, which a newcomer takes as well."""

    def client_step(self, step):
        step.descend("personal", step.loss("personal"))


def test_a_client_joins_as_before_where_nothing_is_stated():
    algorithm = OtherStep()
    chosen, phases = joining(algorithm, PHASES)
    assert chosen.base is algorithm and phases == PHASES
    wrapper = AlgorithmWrapper(Shifted())
    chosen, _ = joining(wrapper, PHASES)
    assert isinstance(chosen.base, perada.algorithms.Standalone)  # clients predict with the global model


class Kept(AlgorithmWrapper):
    """A wrapper that sets one attribute in its class."""

    needs_class_counts = True
    average = "probabilities"


def test_a_wrapper_keeps_the_attributes_that_its_class_sets_and_copies_the_others():
    wrapper = Kept(Shifted())
    assert (wrapper.needs_class_counts, wrapper.average) == (True, "probabilities")
    assert (wrapper.instead_of_factors, wrapper.needs_plain_mean) == ("sums of factors", Shifted.needs_plain_mean)
    assert type(wrapper.base).needs_class_counts is False
