# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD (Karimireddy et al., ICML 2020): FedAvg whose clients correct the drift of their local steps."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from perada.algorithms.base import Algorithm, Broadcast, ClientStep, ServerStep, Stacks, TensorNames, moved_towards
from perada.core.checks import check_number
from perada.core.states import State, expand, per_client, select, without

CONTROL = "control/"
"""Prefix of the names under which control variates are sent with the model."""


class Scaffold(Algorithm):
    """FedAvg with control variates (their Algorithm 1, with option II for c_i).

    A control variate is a mean gradient: c_i is that of client i, c that of all clients. Their difference is the
    direction in which client i drifts away from the others, and every local step removes it from the gradient.

    ============ ================================================================================================
    x            the model of the server, sent to the clients
    y            the model of a client: starts from x, is trained, and sent back
    c            the server's control variate, sent with x
    c_i          the client's control variate: kept; the client also sends c + (c_i⁺ − c_i)
    ============ ================================================================================================

    With the learning rates η_l of the clients and η_g of the server, and all c_i and c initially 0:

    1. A client takes K steps y ← y − η_l (g(y) − c_i + c) from y = x.
    2. It sets c_i⁺ = c_i − c + (x − y) / (K η_l).
    3. The server sets x ← x + η_g · mean(y − x) and c ← c + |S|/N · mean(c_i⁺ − c_i), over the clients S of the round
       out of all N clients.

    A client receives and sends twice the size of its model.

    With SGD, (x − y) / (K η_l) is the mean gradient of the steps. That mean is computed directly, so that c_i is a mean
    gradient with momentum, Adam and weight decay too: with momentum 0.9, (x − y) / (K η_l) is ten times as long, and
    c_i diverges. Aggregation weights are used in the mean of y, but not in that of c_i. Running statistics of norms are
    averaged.

    Source: [Karimireddy et al., ICML 2020](https://arxiv.org/abs/1910.06378).

    Args:
        server_lr: Learning rate η_g of the server.
    """

    def __init__(self, server_lr: float = 1.0) -> None:
        check_number("server_lr", server_lr, gt=0, hint="1 takes the mean")
        self.server_lr = server_lr

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """Keep c_i, which is initially zero."""
        control = {}
        for key in tensor_names.parameters:
            control[key] = torch.zeros_like(initial[key])
        return {"control": control}

    def broadcast(self, sending: Broadcast) -> State:
        """Send x and c."""
        control = _server_control(sending.state, sending.global_state, sending.tensor_names)
        message = sending.global_state | control
        return expand(message, len(sending.clients))

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Start from y = x, with sums of gradients (C, ...) and numbers of steps (C,) that are zero."""
        model = without(received, _control_names(tensor_names))
        gradient_sums = {}
        for key, client_control in client_state["control"].items():
            gradient_sums[key] = torch.zeros_like(client_control)
        example = next(iter(gradient_sums.values()))
        num_steps = example.new_zeros(len(example))
        return {"local": model, "gradients": gradient_sums, "steps": {"taken": num_steps}}

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Train only y, since the sums are not parameters."""
        if role == "local":
            return tensor_names.parameters
        return ()

    def client_step(self, step: ClientStep) -> None:
        """Take a corrected step, y ← y − η_l (g(y) − c_i + c), and add its gradient to the sum."""
        # The step adds the slope c − c_i to the gradient g(y).
        correction = {}
        for key, client_control in step.client_state["control"].items():
            server_control = step.received[CONTROL + key]
            correction[key] = server_control - client_control
        loss = step.loss("local")
        step.descend("local", loss, slope=correction)

        gradient_sums = step.states["gradients"]
        gradients = {}
        for key in gradient_sums:
            gradient = step.states["local"][key].grad
            if gradient is not None:
                gradients[key] = gradient
        # In float16 a client whose gradient overflowed has skipped the step, which is then left out of its mean.
        took_step = _clients_with_finite(gradients.values())
        for key, gradient in gradients.items():
            mask = per_client(took_step, gradient)
            gradient_sums[key] += gradient.where(mask, 0)
        step.states["steps"]["taken"] += took_step

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep c_i⁺ = c_i − c + mean gradient; send y and c + (c_i⁺ − c_i)."""
        num_steps = trained["steps"]["taken"]
        new_controls = {}
        moved_controls = {}
        for key, client_control in client_state["control"].items():
            server_control = received[CONTROL + key]
            gradient_sum = trained["gradients"][key]
            mean_gradient = gradient_sum / per_client(num_steps, client_control)
            new_control = client_control - server_control + mean_gradient
            # The mean gradient of a client that skipped every step is 0/0, so it keeps c_i.
            took_any_step = per_client(num_steps > 0, client_control)
            new_control = new_control.where(took_any_step, client_control)
            new_controls[key] = new_control
            change = new_control - client_control
            moved_controls[CONTROL + key] = server_control + change
        update = trained["local"] | moved_controls
        return {"control": new_controls}, update

    def server_step(self, server: ServerStep) -> State:
        """Move x by the mean change of y times η_g, and c by the mean change of c_i times |S|/N."""
        num_clients = len(server.clients)
        clients = range(num_clients)
        models = server.updates.part(clients, without=_control_names(server.tensor_names))
        average = server.mean(models, server.weights)

        # The server rule aggregates models only. Control variates are always averaged with equal weights.
        controls = server.updates.part(clients, without=average.keys())
        uniform = torch.full_like(server.weights, 1 / num_clients)
        mean_control = controls.mean(uniform)
        # Clients sent c + (c_i⁺ − c_i), so moving c towards the mean of that adds the mean of c_i⁺ − c_i.
        control = _server_control(server.state, server.previous, server.tensor_names)
        participation = num_clients / server.num_clients
        server.state["control"] = moved_towards(control, mean_control, participation)

        mean_parameters = select(average, server.tensor_names.parameters)
        parameters = moved_towards(server.previous, mean_parameters, self.server_lr)
        return average | parameters


def _control_names(tensor_names: TensorNames) -> list[str]:
    """Return the names under which control variates are sent."""
    return [CONTROL + key for key in tensor_names.parameters]


def _clients_with_finite(gradients: Iterable[Tensor]) -> Tensor:
    """Return a mask (C,) of the clients whose gradients (C, ...) are all finite."""
    finite_by_tensor = []
    for gradient in gradients:
        by_client = gradient.reshape(len(gradient), -1)
        finite_by_tensor.append(by_client.isfinite().all(1))
    return torch.stack(finite_by_tensor).all(0)


def _server_control(server_state: Mapping[str, State], global_state: State, tensor_names: TensorNames) -> State:
    """Return c under the names with which it is sent; zero before the first round."""
    if "control" in server_state:
        return server_state["control"]
    control = {}
    for key in tensor_names.parameters:
        control[CONTROL + key] = torch.zeros_like(global_state[key])
    return control
