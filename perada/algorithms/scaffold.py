# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD (Karimireddy et al., ICML 2020): FedAvg whose clients correct the drift of their local steps."""

from collections.abc import Mapping

import torch

from perada.algorithms.base import Algorithm, Broadcast, ClientStep, ServerStep, Stacks, TensorNames
from perada.core.checks import check_number
from perada.core.states import State, expand, partition, per_client

CONTROL = "control/"
"""FrozenTrunk of the names under which control variates travel beside the model."""


class Scaffold(Algorithm):
    """FedAvg with control variates, c_i of a client and c of the server (with their option II for c_i).

    A client takes y ← y − η_l (g(y) − c_i + c) in K steps from y = x, then c_i ← c_i − c + (x − y) / (K η_l). The
    server takes x ← x + η_g · mean(y − x) and c ← c + |S|/N · mean(c_i⁺ − c_i), over the clients S of a round. All c_i
    and c are 0 at first. A client receives and sends twice the size of its model.

    (x − y) / (K η_l) is, under SGD, the mean of the gradients that the steps were taken with. That mean is what is
    used, so that c_i is a mean gradient under momentum, Adam and weight decay too: with momentum 0.9, (x − y) / (K η_l)
    is ten times as long, and c_i diverges. Weights count in the mean of y, not in that of c_i. Running statistics of
    norms are averaged.

    Args:
        server_lr: η_g.
    """

    def __init__(self, server_lr: float = 1.0) -> None:
        check_number("server_lr", server_lr, gt=0, hint="1 takes the mean")
        self.server_lr = server_lr

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """c_i, zero at first."""
        return {"control": {key: torch.zeros_like(initial[key]) for key in tensor_names.parameters}}

    def broadcast(self, sending: Broadcast) -> State:
        """The model x, and c."""
        control = _control(sending.state, sending.global_state, sending.tensor_names)
        return expand(sending.global_state | control, len(sending.clients))

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """y, the sum of the gradients, and how many they are."""
        gradients = {key: torch.zeros_like(value) for key, value in client_state["control"].items()}
        example = next(iter(gradients.values()))
        local = partition(received, _names(tensor_names))[1]
        return {"local": local, "gradients": gradients, "steps": {"taken": example.new_zeros(len(example))}}

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """The model y alone."""
        return tensor_names.parameters if role == "local" else ()

    def client_step(self, step: ClientStep) -> None:
        """A corrected step, whose gradient is added to the sum."""
        local = step.states["local"]
        sums = step.states["gradients"]
        slope = {key: step.received[CONTROL + key] - own for key, own in step.client_state["control"].items()}
        step.descend("local", step.loss("local"), slope=slope)
        gradients = {key: own for key in sums if (own := local[key].grad) is not None}
        finite = [value.reshape(len(value), -1).isfinite().all(1) for value in gradients.values()]
        took_step = torch.stack(finite).all(0)  # in float16, steps of other clients are skipped
        for key, value in gradients.items():
            sums[key] += value.where(per_client(took_step, value), 0)
        step.states["steps"]["taken"] += took_step

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """Update c_i; send y, and c moved by the change of c_i."""
        steps = trained["steps"]["taken"]
        controls = {}
        moved = {}
        for key, before in client_state["control"].items():
            server = received[CONTROL + key]
            mean = trained["gradients"][key] / per_client(steps, before)
            controls[key] = (before - server + mean).where(per_client(steps > 0, before), before)
            moved[CONTROL + key] = server + (controls[key] - before)
        return {"control": controls}, trained["local"] | moved

    def server_step(self, server: ServerStep) -> State:
        """Move x along the mean change, and c by the mean change times the clients' share of the federation."""
        names = _names(server.tensor_names)
        clients = range(len(server.clients))
        old = server.previous
        average = server.mean(server.updates.part(clients, without=names), server.weights)
        uniform = torch.full_like(server.weights, 1 / len(clients))
        after = server.updates.part(clients, without=average.keys()).mean(uniform)
        before = _control(server.state, old, server.tensor_names)
        share = len(clients) / server.num_clients
        server.state["control"] = {key: value + share * (after[key] - value) for key, value in before.items()}
        return average | {
            key: old[key] + self.server_lr * (average[key] - old[key]) for key in server.tensor_names.parameters
        }


def _names(tensor_names: TensorNames) -> list[str]:
    return [CONTROL + key for key in tensor_names.parameters]


def _control(server_state: Mapping[str, State], global_state: State, tensor_names: TensorNames) -> State:
    """c, under the names that it travels by."""
    zeros = {CONTROL + key: torch.zeros_like(global_state[key]) for key in tensor_names.parameters}
    return server_state.get("control", zeros)
