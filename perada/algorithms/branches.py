# SPDX-License-Identifier: Apache-2.0
"""Algorithms on two LoRA branches in one network (``adapter="dual_lora"``): FedDPA and FedALT.

g names the shared branch and p the private one: a layer gives W·x + s·B_g·A_g·x + s·B_p·A_p·x.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from perada.algorithms.base import Algorithm, Broadcast, ClientStep, ServerStep, Stacks, TensorNames
from perada.algorithms.fedavg import FedAvg
from perada.core.checks import check_number
from perada.core.rounds import Phase
from perada.core.states import Factors, State, expand, partition, per_client


def check_branches(name: str, tensor_names: TensorNames) -> None:
    """Refuse, by a ValueError with the algorithm's ``name``, a model without the factors of two branches."""
    if not tensor_names.factors and tensor_names.private:
        raise ValueError(f"algorithm {name} needs both factors of its branches; leave out what freezes one (FFALoRA)")
    if not tensor_names.private:
        raise ValueError(
            f"algorithm {name} is about the shared and the private branch of LoRA, and there are none in what is "
            f"trained, {tensor_names.parameter_range}; choose adapter='dual_lora'"
        )


def check_weighted(name: str, tensor_names: TensorNames) -> None:
    """The same, and refuse a gate, which would weight the branches a second time."""
    check_branches(name, tensor_names)
    if tensor_names.private - twins(tensor_names).keys():
        raise ValueError(
            f"algorithm {name} weights the branches itself, and the adapter has a gate that does; choose gate=False "
            "(adapter_options)"
        )


def pairs(tensor_names: TensorNames) -> list[tuple[Factors, Factors]]:
    """The factors of the shared and of the private branch of each layer."""
    shared, private = (
        [pair for pair in tensor_names.factors if pair.up in names]
        for names in (tensor_names.shared, tensor_names.private)
    )
    return list(zip(shared, private, strict=True))


def twins(tensor_names: TensorNames) -> dict[str, str]:
    """Names of the shared branch by those of the private one, but for a gate."""
    return {own: name for g, p in pairs(tensor_names) for own, name in ((p.down, g.down), (p.up, g.up))}


WEIGHT = "weight"
OF = "/weight"
"""The role of the branches' weights, a number for each B, and what stands behind the name of a B there."""


class _Weighted(Algorithm):
    """The branches weighted by numbers: (1 − α)·s·B_g·A_g·x + α·s·B_p·A_p·x.

    Args:
        weight: α.
    """

    inference = "personal"
    unsent = frozenset({"personal"})

    def __init__(self, weight: float = 0.5) -> None:
        check_number("weight", weight, ge=0, le=1, hint="0 is the global branch, 1 the client's own")
        self.weight = weight

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Refuse an adapter without branches, and one whose gate would weight them a second time."""
        check_weighted(type(self).__name__, tensor_names)

    def weights(self, initial: State, tensor_names: TensorNames) -> State:
        """1 − α for each B of the shared branch, α for each of the private one."""
        shares = [
            (pair.up, alpha) for g, p in pairs(tensor_names) for pair, alpha in ((g, 1 - self.weight), (p, self.weight))
        ]
        return {key + OF: initial[key].new_tensor(share) for key, share in shares}

    def personal(self, client_state: Stacks, global_state: State) -> State:
        """Both branches, weighted."""
        own_branch = client_state["personal"]
        return weighted(expand(global_state, len(next(iter(own_branch.values())))) | own_branch, client_state[WEIGHT])


def weighted(states: State, weights: State) -> State:
    """A stack (C, ...) with each client's B times its weight (C,)."""
    weight_of = {key.removesuffix(OF): weight for key, weight in weights.items()}
    return states | {key: per_client(weight, states[key]) * states[key] for key, weight in weight_of.items()}


def _zeros(state: Mapping[str, Tensor], keys: frozenset[str]) -> State:
    return {key: torch.zeros_like(value) for key, value in state.items() if key in keys}


class FedDPA(_Weighted):
    """A global LoRA and a client's own one, trained in every round (FedDPA-T: Yang et al., NeurIPS 2024).

    A client trains the global branch alone, from what it received, and sends it; the server takes the mean. It trains
    its own branch in the network with both, (1 − α)·global + α·own, where the global one stays as it was received. Both
    take their steps on the same minibatches. The head belongs to both: the global one is averaged, and a client trains
    and keeps one of its own. A client predicts with its own branch and the newest global one.

    The paper weights each test input by its likeness to training inputs. Here α is the same for all inputs, in training
    and afterwards.

    Args:
        weight: α.
    """

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """The own branch and head, and the weights."""
        return {"personal": partition(initial, tensor_names.shared)[1], WEIGHT: self.weights(initial, tensor_names)}

    def broadcast(self, sending: Broadcast) -> State:
        """The global branch and head."""
        return expand(partition(sending.global_state, sending.tensor_names.private)[1], len(sending.clients))

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Both models, the weights, the global branch as it was received, and zeros in place of the own one."""
        beside = {
            "shared": partition(received, tensor_names.shared)[0],
            "absent": _zeros(client_state["personal"], tensor_names.private),
        }
        return client_state | {"local": received} | beside

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Both models."""
        return tensor_names.parameters if role in ("personal", "local") else ()

    def client_step(self, step: ClientStep) -> None:
        """A step on the own branch beside the received one, and one on the global branch alone."""
        both_branches = weighted(step.states["shared"] | step.states["personal"], step.states[WEIGHT])
        step.descend("personal", step.loss(both_branches, stream="personal"))
        step.descend("local", step.loss(step.states["local"] | step.states["absent"], stream="local"))

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """Keep the own branch, send the global one."""
        return {"personal": trained["personal"], WEIGHT: trained[WEIGHT]}, trained["local"]


class FedDPAF(FedAvg):
    """A global LoRA first, then a client's own one (FedDPA-F: Yang et al., NeurIPS 2024).

    The rounds are FedAvg of the global branch and the head. After the last one every client trains a branch of its own,
    alone, that starts as a copy of the global one. It predicts with (1 − α)·global + α·own, with the same α for all
    inputs; see :class:`FedDPA`.

    Args:
        weight: α.
        finetune_epochs: Epochs on the own branch and head, above 0.
    """

    def __init__(self, weight: float = 0.5, finetune_epochs: float = 1) -> None:
        check_number("finetune_epochs", finetune_epochs, gt=0, hint="FedAvg does not fine-tune")
        self.weight = weight
        self.finetune_epochs = finetune_epochs
        self._own = OwnBranch(weight)

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Refuse an adapter without branches, or with a gate."""
        check_weighted(type(self).__name__, tensor_names)

    def broadcast(self, sending: Broadcast) -> State:
        """The global branch and head."""
        return expand(partition(sending.global_state, sending.tensor_names.private)[1], len(sending.clients))

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """What was received, with zeros in place of the own branch."""
        return {
            "local": received
            | {own_branch: torch.zeros_like(received[name]) for own_branch, name in twins(tensor_names).items()}
        }

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """All but the private branch, which is zero."""
        return tuple(key for key in tensor_names.parameters if key not in tensor_names.private)

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """Send what was trained."""
        return {}, partition(trained["local"], tensor_names.private)[1]

    def personalization(self) -> tuple[Algorithm, Phase]:
        """The own branch, from the global one."""
        return self._own, Phase("personalize", self.finetune_epochs)


class OwnBranch(_Weighted):
    """What clients of :class:`FedDPAF` train after the last round.

    Args:
        weight: α.
    """

    roles = ("personal",)
    sends_updates = False
    global_model = False

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """The whole model, in which the private branch is a copy of the shared one, and the weights."""
        copied = {own_branch: initial[name] for own_branch, name in twins(tensor_names).items()}
        return {"personal": initial | copied, WEIGHT: self.weights(initial, tensor_names)}

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """The own branch, and zeros in place of the global one."""
        own_branch = partition(client_state["personal"], tensor_names.shared)[1]
        return {"personal": own_branch, "absent": _zeros(client_state["personal"], tensor_names.shared)}

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """The own branch and head."""
        return tensor_names.parameters if role == "personal" else ()

    def client_step(self, step: ClientStep) -> None:
        """A step on the own branch alone."""
        step.descend("personal", step.loss(step.states["personal"] | step.states["absent"], stream="personal"))

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """Keep the own branch beside the global one."""
        return {"personal": client_state["personal"] | trained["personal"], WEIGHT: client_state[WEIGHT]}, {}


SHARE = "row/share"
"""1 / (M − 1), which travels with what a client receives; 0 for a client that is not one of the M."""


class RestOfWorld(Algorithm):
    """An individual LoRA beside the mean of everybody else's (FedALT: Bian et al., AAAI 2026, arXiv 2503.11880).

    A client's individual branch, the private one, is never overwritten: the client goes on with it, and sends it. Its
    rest-of-world (RoW) branch, the shared one, has the means of the others' factors, (sum − own) / (M − 1) over all M
    clients, and is frozen in local training. The mixer is the adapter's gate (``adapter_options: {gate: true}``);
    without it both branches count in full. Gate, head and all else that is trained stay at the client.

    The server holds v̄, the mean of all M individual branches under their own names, and moves it by the mean change of
    a round's clients; weights do not count. A client makes its RoW branch v̄ + (v̄ − own) / (M − 1) of it, so that the
    server sends the same to all. It predicts with the RoW branch of the last round that it took part in, for which its
    mixer was trained. A client that was not drawn counts as it last was. The paper has all clients in every round.
    Server rules other than the mean are refused: they would leave no mean to take one's own part out of. Where
    ``client_privacy`` clipped a change, or ``drop_outliers`` left it out, v̄ lacks it, and the client takes it out all
    the same.
    """

    inference = "personal"
    roles = ("personal",)
    global_model = False

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Refuse an adapter without branches, and a client without others."""
        check_branches(type(self).__name__, tensor_names)
        if num_clients < 2:
            raise ValueError(
                "algorithm RestOfWorld needs the branches of other clients, and there is one client; give the data of "
                "more, or choose algorithm='standalone'"
            )

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """The individual branch, gate and head, and the RoW branch."""
        branch_of_others, individual_branch = partition(initial, tensor_names.shared)
        return {"personal": individual_branch, "others": branch_of_others}

    def broadcast(self, sending: Broadcast) -> State:
        """v̄, and what a client's own part in it is."""
        mean = {key: sending.global_state[key] for key in twins(sending.tensor_names)}
        example = next(iter(mean.values()))
        others = sending.num_clients - 1
        return expand(mean | {SHARE: example.new_tensor(1 / others if others > 0 else 0.0)}, len(sending.clients))

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """The individual branch and all else, and the RoW branch."""
        own_branch = client_state["personal"]
        others = {}
        for key, name in twins(tensor_names).items():
            mean = received[key]
            share = per_client(received[SHARE], received[key])
            others[name] = mean + share * (mean - own_branch[key])
        return {"personal": own_branch, "others": others}

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """All but the RoW branch."""
        return tensor_names.parameters if role == "personal" else ()

    def client_step(self, step: ClientStep) -> None:
        """A step on the individual branch and all else."""
        both_branches = step.states["others"] | step.states["personal"]
        step.descend("personal", step.loss(both_branches, stream="personal"))

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """Keep all; send v̄ moved by the change of the individual branch."""
        before = client_state["personal"]
        after = trained["personal"]
        return trained, {key: received[key] + (after[key] - before[key]) for key in twins(tensor_names)}

    def server_step(self, server: ServerStep) -> State:
        """Move v̄ by the mean change, times the clients' share of the federation."""
        share = len(server.clients) / server.num_clients
        old = server.previous
        average = server.mean(server.updates, torch.full_like(server.weights, 1 / len(server.clients)))
        return {key: old[key] + share * (value - old[key]) for key, value in average.items()}

    def personal(self, client_state: Stacks, global_state: State) -> State:
        """Both branches, and all else."""
        return client_state["others"] | client_state["personal"]
