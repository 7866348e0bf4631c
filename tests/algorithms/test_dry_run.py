# SPDX-License-Identifier: Apache-2.0
"""Algorithms and rules of somebody else's are tried at set-up: what does not fit is rejected in one line."""

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F

from perada.algorithms import Algorithm, FedEnsemble, FedROD
from perada.algorithms.dry_run import is_foreign
from perada.server import Mean, ServerRule
from perada.server.rules import FedAvgM
from tests.methods import NAMED, make_method

from .problems import finetune


class Own(Algorithm):
    """Keeps a state of its own at clients and at the server."""

    inference = "personal"

    def initial_client_state(self, initial, tensor_names):
        return {
            "personal": initial,
            "drift": {name: torch.zeros_like(initial[name]) for name in tensor_names.parameters},
        }

    def begin_round(self, kept, received, tensor_names):
        return {"local": received, "personal": kept["personal"]}

    def client_step(self, step):
        step.descend("local", step.loss("local"), slope=step.client_state["drift"])
        step.descend("personal", step.loss("personal"), pull=(0.1, step.received))

    def end_round(self, trained, kept, received, tensor_names):
        drift = {name: trained["local"][name] - received[name] for name in tensor_names.parameters}
        return {"personal": trained["personal"], "drift": drift}, trained["local"]

    def server_step(self, server):
        result = server.mean(server.updates, server.weights)
        server.state["rounds"] = {"count": torch.tensor(float(server.round))}
        return result


class Rule(ServerRule):
    """A mean that remembers itself."""

    def __call__(self, aggregation):
        aggregation.state["last"] = {
            name: value.mean(0) for name, value in aggregation.updates.gathered_all().items() if value.dim() > 1
        }
        return Mean()(aggregation)


class Rounds(pl.Callback):
    begun = False

    def on_train_epoch_start(self, trainer, pl_module):
        self.begun = True


def rejection_message(algorithm="fedavg", **options):
    rounds = Rounds()
    with pytest.raises(ValueError) as error:
        finetune(algorithm, "net-full", rounds=1, callbacks=[rounds], **options)
    assert not rounds.begun
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_fits_is_trained_and_left_as_it_was():
    algorithm = Own()
    rule = Rule()
    run = finetune(algorithm, "net-full", rounds=2, server_rule=rule)
    assert len(run.metrics["rounds"]) == 2
    assert vars(algorithm) == vars(Own())
    assert vars(rule) == {}


def test_options_of_distillation_may_be_given_by_name():
    class Distils(Algorithm):
        def server_step(self, server):
            average = server.mean(server.updates, server.weights)
            return server.distill(average, teachers=server.updates, average_from=0.5)

    run = finetune(Distils(), "net-full", rounds=1)
    assert len(run.metrics["rounds"]) == 1


def test_only_classes_from_elsewhere_are_tried():
    assert not any(is_foreign(make_method(name)) for name in NAMED)
    assert not is_foreign(FedAvgM())
    assert is_foreign(Own())
    assert is_foreign(FedEnsemble(base=Own()))
    assert is_foreign(FedAvgM(aggregate=Rule()))


class Prototypes(Algorithm):
    """Sends each class's sum of representations, made with labels; its loss is made by hand."""

    def begin_round(self, kept, received, tensor_names):
        return {"local": received, "sums": {"seen": torch.zeros_like(received["fc.weight"])}}  # (C, K, F)

    def trainable_keys(self, role, phase, tensor_names, round):
        return tensor_names.parameters if role == "local" else ()

    def client_step(self, step):
        logits, z = step.outputs("local")
        hot = F.one_hot(step.labels, logits.shape[-1]).to(z)
        step.states["sums"]["seen"] += step.mean(hot.unsqueeze(-1) * z.detach().unsqueeze(-2))
        step.descend("local", step.mean(-(logits.log_softmax(-1) * hot).sum(-1)))

    def end_round(self, trained, kept, received, tensor_names):
        return {}, trained["local"] | {"own/seen": trained["sums"]["seen"]}

    def server_step(self, server):
        server.state["own"] = {"seen": server.updates.gathered("own/seen").mean(0)}
        rest = server.updates.part(range(len(server.clients)), without={"own/seen"})
        return server.mean(rest, server.weights)


@pytest.mark.every(2)
@pytest.mark.parametrize("engine", ["folded", "loop"])
def test_a_loss_made_of_labels_is_the_tasks(engine):
    """Also of clients whose images do not fill a batch: those have padding."""
    run, plain = (finetune(one, engine=engine) for one in (Prototypes(), "fedavg"))
    for key, value in run.state("global").items():
        torch.testing.assert_close(value, plain.state("global")[key], rtol=1e-9, atol=1e-11)


def test_representations_in_a_trial_are_as_wide_as_the_heads_input():
    class Mine(FedROD):
        pass

    run, plain = (finetune(one, rounds=1) for one in (Mine(), FedROD()))  # 4 features, 3 classes
    for key, value in run.state("global").items():
        assert torch.equal(value, plain.state("global")[key])


def make_changed_algorithm(**methods):
    return type("Changed", (Own,), methods)()


def send(change):
    """An algorithm that sends something else."""

    def end_round(self, trained, kept, received, tensor_names):
        kept, sent = Own.end_round(self, trained, kept, received, tensor_names)
        return kept, change(sent)

    return make_changed_algorithm(end_round=end_round)


def keep(change):
    def end_round(self, trained, kept, received, tensor_names):
        kept, sent = Own.end_round(self, trained, kept, received, tensor_names)
        return change(kept), sent

    return make_changed_algorithm(end_round=end_round)


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (
            make_changed_algorithm(inference="personel"),
            "Changed.inference must be one of 'personal', 'global', got 'personel'",
        ),
        (
            make_changed_algorithm(initial_client_state=lambda self, initial, tensor_names: {"drift": torch.zeros(3)}),
            "for role 'drift' returned a tensor of shape (3,); return tensors by name",
        ),
        (
            make_changed_algorithm(initial_client_state=lambda self, initial, tensor_names: None),
            "Changed.initial_client_state returned None; return states by role, {role: {name: tensor}}",
        ),
        (
            make_changed_algorithm(broadcast=lambda self, sending: None),
            "Changed.broadcast returned None; return tensors by name, {name: tensor}",
        ),
        (
            make_changed_algorithm(begin_round=lambda self, kept, received, tensor_names: None),
            "Changed.begin_round returned None; return states by role, {role: {name: tensor}}",
        ),
        (
            make_changed_algorithm(begin_round=lambda self, kept, received, tensor_names: received),
            "Changed.begin_round for role 'conv.weight' returned a tensor of shape (2, 4, ",
        ),
        (keep(lambda kept: None), "Changed.end_round (client states) returned None; return states by role"),
        (send(lambda sent: None), "Changed.end_round (updates) returned None; return tensors by name"),
        (
            make_changed_algorithm(initial_client_state=lambda self, initial, tensor_names: {"drift": initial}),
            "Changed.begin_round fails .* (KeyError: 'personal')",
        ),
        (
            make_changed_algorithm(begin_round=lambda self, kept, received, tensor_names: {"locl": received}),
            "Changed.client_step fails .* (KeyError: 'local')",
        ),
        (
            make_changed_algorithm(client_step=lambda self, step: step.descend("local", step.loss("local").mean())),
            r"Changed.client_step fails .* the loss has shape () instead of (2,), one value per client",
        ),
        (
            make_changed_algorithm(client_step=lambda self, step: step.descend("local", pull=(1.0, {}))),
            "Changed.client_step fails in the dry run at set-up (KeyError: 'conv.weight')",
        ),
        (
            make_changed_algorithm(end_round=lambda self, trained, *rest: trained["local"]),
            "; return a pair of what clients keep",
        ),
        (
            send(lambda sent: sent | {"tau": torch.ones(2)}),
            "Changed.server_step returned 'tau', which is not the name of a trained tensor",
        ),
        (
            send(lambda sent: {name: value[:1] for name, value in sent.items()}),
            "(updates) returned 'conv.weight' with shape (1, ",
        ),
        (
            send(lambda sent: {name: value.float() for name, value in sent.items()}),
            "and float32 instead of (2, 4, ",
        ),
        (
            keep(lambda kept: {"drift": kept["drift"]}),
            "returned ['drift'] instead of states for the roles 'drift', 'personal'",
        ),
        (keep(lambda kept: kept | {"drift": {}}), "for role 'drift' lacks 'conv.bias' and "),
        (
            make_changed_algorithm(server_step=lambda self, server: None),
            "Changed.server_step returned None; return tensors by name",
        ),
        (
            make_changed_algorithm(server_step=lambda self, server: {"c": torch.ones(1)}),
            "Changed.server_step returned 'c', which is not",
        ),
        (
            make_changed_algorithm(personal=lambda self, kept, w: w),
            "Changed.personal returned 'conv.weight' with shape (4, 1, 3, 3)",
        ),
        (
            make_changed_algorithm(phases=lambda self, epochs, steps: ("train",)),
            "Changed.phases returned 'train'; return perada.data.Phase(",
        ),
        (
            make_changed_algorithm(
                client_step=lambda self, step: step.descend("local", step.mean(step.labels.double()))
            ),
            "does not depend on any parameter that phase 'train' trains (Changed.trainable_keys)",
        ),
    ],
)
def test_an_algorithm_that_does_not_fit_is_rejected_before_the_first_round(algorithm, words):
    message = rejection_message(algorithm, clients_per_round=2)
    for part in words.split(" .* "):
        assert part in message


def rule(result=lambda aggregate, aggregation: aggregate, remember=lambda aggregation: None):
    def call(self, aggregation):
        remember(aggregation)
        return result(Mean()(aggregation), aggregation)

    return type("Wrong", (ServerRule,), {"__call__": call})()


def no_state(value):
    def remember(aggregation):
        aggregation.state["n"] = value

    return remember


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (rule(lambda aggregate, aggregation: None), "Wrong returned None; return tensors by name, {name: tensor}"),
        (rule(lambda aggregate, aggregation: {"fc.bias": aggregate["fc.bias"]}), "Wrong lacks 'conv.bias' and "),
        (
            rule(lambda aggregate, aggregation: aggregate | {"oops": torch.zeros(3)}),
            "Wrong returned 'oops', which is not the name of a trained tensor",
        ),
        (
            rule(lambda aggregate, aggregation: aggregation.updates.gathered_all()),
            "with shape (2, 4, 1, 3, 3) and float64 instead of (4, 1, 3, 3)",
        ),
        (rule(lambda aggregate, aggregation: {k: v.float() for k, v in aggregate.items()}), "and float32 instead of"),
        (
            rule(lambda aggregate, aggregation: aggregate["absent"]),
            "Wrong fails in the dry run at set-up (KeyError: 'absent')",
        ),
        (rule(remember=no_state(1)), "Wrong (aggregation.state) for role 'n' returned 1; return tensors by name"),
        (
            rule(remember=no_state(torch.zeros(3))),
            "for role 'n' returned a tensor of shape (3,); return tensors by name",
        ),
        (rule(remember=no_state({"a": [1, 2]})), "for role 'n' returned {'a': [1, 2]}; return tensors by name"),
    ],
)
def test_a_rule_that_does_not_fit_is_rejected_before_the_first_round(wrong, message):
    assert message in rejection_message(server_rule=wrong, clients_per_round=2)


def test_a_rules_state_may_be_replaced_whole():
    seen = []

    def remember(aggregation):
        seen.append(dict(aggregation.state))
        aggregation.state = {"count": {"n": torch.tensor(float(aggregation.round + 1))}}

    finetune("fedavg", "net-full", rounds=3, server_rule=rule(remember=remember))
    assert [{name: part["n"].item() for name, part in state.items()} for state in seen[-3:]] == [
        {},
        {"count": 1},
        {"count": 2},
    ]
