# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD (Karimireddy et al., ICML 2020): FedAvg whose clients correct the drift of their local steps."""

from collections.abc import Mapping

import torch

from perada.algorithms.base import Algorithm, Broadcast, ClientStep, ServerStep, Stacks, TensorNames, moved_towards
from perada.core.checks import check_number
from perada.core.states import State, expand, per_client, without

CONTROL = "control/"
"""Prefix of the names under which control variates are sent with the model."""


class Scaffold(Algorithm):
    """FedAvg with control variates (their Algorithm 1, with option II for c_i).

    A control variate is a mean gradient: c_i that of client i, c that of all clients. Their difference is the direction
    in which client i drifts away from the others, and every local step takes it out of the gradient.

    ============ ================================================================================================
    x            the model of the server, sent to the clients
    y            the model of a client: starts from x, is trained, and sent back
    c            the server's control variate, sent beside x
    c_i          the client's control variate: kept; the client also sends c + (c_i⁺ − c_i)
    ============ ================================================================================================

    With the rates η_l of the clients and η_g of the server, all c_i and c being 0 at first:

    1. A client takes K steps y ← y − η_l (g(y) − c_i + c) from y = x.
    2. It sets c_i⁺ = c_i − c + (x − y) / (K η_l).
    3. The server sets x ← x + η_g · mean(y − x) and c ← c + |S|/N · mean(c_i⁺ − c_i), over the clients S of the round,
       which are |S| of N.

    A client receives and sends twice the size of its model.

    (x − y) / (K η_l) is, under SGD, the mean of the gradients that the steps were taken with. That mean is what is
    used, so that c_i is a mean gradient under momentum, Adam and weight decay too: with momentum 0.9, (x − y) / (K η_l)
    is ten times as long, and c_i diverges. Aggregation weights count in the mean of y, not in that of c_i. Running
    statistics of norms are averaged.

    Args:
        server_lr: η_g.
    """

    def __init__(self, server_lr: float = 1.0) -> None:
        check_number("server_lr", server_lr, gt=0, hint="1 takes the mean")
        self.server_lr = server_lr

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """Keep c_i, zero at first."""
        return {"control": {key: torch.zeros_like(initial[key]) for key in tensor_names.parameters}}

    def broadcast(self, sending: Broadcast) -> State:
        """Send x and c."""
        control = _server_control(sending.state, sending.global_state, sending.tensor_names)
        return expand(sending.global_state | control, len(sending.clients))

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Start from y = x, and sum up the gradients and the steps, which are counted per client (C,)."""
        model = without(received, _control_names(tensor_names))
        gradient_sums = {key: torch.zeros_like(control) for key, control in client_state["control"].items()}
        example = next(iter(gradient_sums.values()))
        num_steps = example.new_zeros(len(example))
        return {"local": model, "gradients": gradient_sums, "steps": {"taken": num_steps}}

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Train only y; the sums are not parameters."""
        if role == "local":
            return tensor_names.parameters
        return ()

    def client_step(self, step: ClientStep) -> None:
        """Take a corrected step, y ← y − η_l (g(y) − c_i + c), and add its gradient to the sum."""
        correction = {}
        for key, client_control in step.client_state["control"].items():
            correction[key] = step.received[CONTROL + key] - client_control
        step.descend("local", step.loss("local"), slope=correction)

        gradient_sums = step.states["gradients"]
        gradients = {}
        for key in gradient_sums:
            gradient = step.states["local"][key].grad
            if gradient is not None:
                gradients[key] = gradient
        # In float16 a client whose gradient overflowed has skipped the step, which then does not count in its mean.
        finite = [gradient.reshape(len(gradient), -1).isfinite().all(1) for gradient in gradients.values()]
        took_step = torch.stack(finite).all(0)
        for key, gradient in gradients.items():
            gradient_sums[key] += gradient.where(per_client(took_step, gradient), 0)
        step.states["steps"]["taken"] += took_step

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """Keep c_i⁺ = c_i − c + mean gradient; send y, and c + (c_i⁺ − c_i)."""
        num_steps = trained["steps"]["taken"]
        new_controls = {}
        moved_controls = {}
        for key, client_control in client_state["control"].items():
            server_control = received[CONTROL + key]
            mean_gradient = trained["gradients"][key] / per_client(num_steps, client_control)
            new_control = client_control - server_control + mean_gradient
            # A client that skipped every step has no mean, but 0/0.
            new_control = new_control.where(per_client(num_steps > 0, client_control), client_control)
            new_controls[key] = new_control
            moved_controls[CONTROL + key] = server_control + (new_control - client_control)
        return {"control": new_controls}, trained["local"] | moved_controls

    def server_step(self, server: ServerStep) -> State:
        """Move x along the mean change of y, and c by the mean change of c_i times |S|/N."""
        clients = range(len(server.clients))
        models = server.updates.part(clients, without=_control_names(server.tensor_names))
        average = server.mean(models, server.weights)

        # The server rule is for models. Control variates always have the plain mean, in which all clients count alike.
        uniform = torch.full_like(server.weights, 1 / len(clients))
        mean_control = server.updates.part(clients, without=average.keys()).mean(uniform)
        control = _server_control(server.state, server.previous, server.tensor_names)
        share = len(clients) / server.num_clients
        server.state["control"] = moved_towards(control, mean_control, share)

        mean_parameters = {key: average[key] for key in server.tensor_names.parameters}
        return average | moved_towards(server.previous, mean_parameters, self.server_lr)


def _control_names(tensor_names: TensorNames) -> list[str]:
    return [CONTROL + key for key in tensor_names.parameters]


def _server_control(server_state: Mapping[str, State], global_state: State, tensor_names: TensorNames) -> State:
    """Return c under the names with which it is sent; zero before the first round."""
    if "control" in server_state:
        return server_state["control"]
    return {CONTROL + key: torch.zeros_like(global_state[key]) for key in tensor_names.parameters}
