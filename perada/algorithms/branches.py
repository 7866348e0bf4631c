# SPDX-License-Identifier: Apache-2.0
"""Algorithms on two LoRA branches in one network (``adapter="dual_lora"``): FedDPA and FedALT.

g names the shared branch and p the private one: a layer gives W·x + s·B_g·A_g·x + s·B_p·A_p·x.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from perada.algorithms.base import Algorithm, Broadcast, ClientStep, ServerStep, Stacks, TensorNames, moved_towards
from perada.algorithms.fedavg import FedAvg
from perada.core.checks import check_number
from perada.core.rounds import Phase
from perada.core.states import Factors, State, expand, per_client, select, stack_size, without


def check_branches(name: str, tensor_names: TensorNames) -> None:
    """Raise if the model lacks the two branches that the algorithm ``name`` requires."""
    if not tensor_names.factors and tensor_names.private:
        raise ValueError(
            f"algorithm {name} requires both factors of its branches; remove the wrapper that freezes one (FFALoRA)"
        )
    if not tensor_names.private:
        raise ValueError(
            f"algorithm {name} requires the shared and private branches of dual LoRA, but the trained parameters "
            f"contain none ({tensor_names.parameter_range}); choose adapter='dual_lora'"
        )


def check_branches_without_gate(name: str, tensor_names: TensorNames) -> None:
    """Raise if there are no branches for the algorithm ``name``, or if a gate already weights them."""
    check_branches(name, tensor_names)
    gates = tensor_names.private - shared_name_of(tensor_names).keys()
    if gates:
        raise ValueError(
            f"algorithm {name} weights the branches itself, but the adapter's gate does so too; set gate=False "
            "(adapter_options)"
        )


def branch_pairs(tensor_names: TensorNames) -> list[tuple[Factors, Factors]]:
    """Return the factors of the shared and of the private branch of each layer."""
    shared = [pair for pair in tensor_names.factors if pair.up in tensor_names.shared]
    private = [pair for pair in tensor_names.factors if pair.up in tensor_names.private]
    return list(zip(shared, private, strict=True))


def shared_name_of(tensor_names: TensorNames) -> dict[str, str]:
    """Return the factors of the shared branch, by the names of the same factors of the private one."""
    shared_names = {}
    for shared, private in branch_pairs(tensor_names):
        shared_names[private.down] = shared.down
        shared_names[private.up] = shared.up
    return shared_names


WEIGHT = "weight"
"""The role of the branches' weights: a number for each B."""
WEIGHT_SUFFIX = "/weight"
"""Suffix of the names in that role, after the name of a B."""


class _WeightedBranches(Algorithm):
    """Two branches weighted by a number: (1 − α)·s·B_g·A_g·x + α·s·B_p·A_p·x.

    Args:
        weight: α.
    """

    inference = "personal"
    unsent = frozenset({"personal"})

    def __init__(self, weight: float = 0.5) -> None:
        check_number("weight", weight, ge=0, le=1, hint="0 is the global branch, 1 the client's")
        self.weight = weight

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise if the adapter has no branches, or a gate that would weight them a second time."""
        check_branches_without_gate(type(self).__name__, tensor_names)

    def branch_weights(self, initial: State, tensor_names: TensorNames) -> State:
        """Return 1 − α for each B of the shared branch, and α for each of the private one."""
        weights = {}
        for shared, private in branch_pairs(tensor_names):
            weights[shared.up + WEIGHT_SUFFIX] = initial[shared.up].new_tensor(1 - self.weight)
            weights[private.up + WEIGHT_SUFFIX] = initial[private.up].new_tensor(self.weight)
        return weights

    def personal(self, client_state: Stacks, global_state: State) -> State:
        """Predict with both branches, weighted."""
        private = client_state["personal"]
        both_branches = expand(global_state, stack_size(private)) | private
        return weighted(both_branches, client_state[WEIGHT])


def weighted(states: State, weights: State) -> State:
    """Return a stack (C, ...) with each client's B times its weight (C,)."""
    result = dict(states)
    for name, weight in weights.items():
        key = name.removesuffix(WEIGHT_SUFFIX)
        result[key] = per_client(weight, states[key]) * states[key]
    return result


def _zeros(state: Mapping[str, Tensor], keys: frozenset[str]) -> State:
    return {key: torch.zeros_like(value) for key, value in state.items() if key in keys}


def _expand_without_private(sending: Broadcast) -> State:
    """Send the shared branch and the head, but not the private branch."""
    shared = without(sending.global_state, sending.tensor_names.private)
    return expand(shared, len(sending.clients))


class FedDPA(_WeightedBranches):
    """A global and a personal LoRA, both trained in every round (FedDPA-T: Yang et al., NeurIPS 2024).

    ============ ================================================================================================
    global       the shared branch, received; trained without the private one (role ``local``), sent, and averaged
    own          the private branch and a head, kept; trained in the network with both (role ``personal``)
    ============ ================================================================================================

    In the network with both, (1 − α)·global + α·own, the global branch stays as it was received. Both steps are taken
    on the same minibatches. The head belongs to both branches: the global one is averaged, and a client trains and
    keeps one of its own. A client predicts with its own branch and the newest global one.

    The paper weights each test input by its likeness to training inputs. Here α is the same for all inputs, in training
    and afterwards.

    Args:
        weight: α.
    """

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """Keep the personal branch and head, and the weights."""
        own_branch = without(initial, tensor_names.shared)
        return {"personal": own_branch, WEIGHT: self.branch_weights(initial, tensor_names)}

    def broadcast(self, sending: Broadcast) -> State:
        """Send the global branch and head."""
        return _expand_without_private(sending)

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Train the personal and the global model, each completed by frozen tensors.

        ``shared`` is the global branch as it was received, beside the own one. ``absent`` are zeros in place of the own
        branch, beside the global one.
        """
        received_branch = select(received, tensor_names.shared)
        return {
            "personal": client_state["personal"],
            WEIGHT: client_state[WEIGHT],
            "local": received,
            "shared": received_branch,
            "absent": _zeros(client_state["personal"], tensor_names.private),
        }

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Train both models, without the tensors that complete them."""
        if role in ("personal", "local"):
            return tensor_names.parameters
        return ()

    def client_step(self, step: ClientStep) -> None:
        """Take a step on the personal branch with the received one, and one on the global branch only."""
        both_branches = weighted(step.states["shared"] | step.states["personal"], step.states[WEIGHT])
        step.descend("personal", step.loss(both_branches, stream="personal"))
        global_model = step.states["local"] | step.states["absent"]
        step.descend("local", step.loss(global_model, stream="local"))

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep the personal branch and the weights, send the global branch."""
        return {"personal": trained["personal"], WEIGHT: trained[WEIGHT]}, trained["local"]


class FedDPAF(FedAvg):
    """First a global LoRA, then a personal one for each client (FedDPA-F: Yang et al., NeurIPS 2024).

    The rounds are FedAvg of the global branch and the head: clients keep nothing. After the last round every client
    trains a branch of its own, without the global one, of which it starts as a copy. It predicts with
    (1 − α)·global + α·own, with the same α for all inputs; see :class:`FedDPA`.

    Args:
        weight: α.
        finetune_epochs: Epochs on the own branch and head, above 0.
    """

    def __init__(self, weight: float = 0.5, finetune_epochs: float = 1) -> None:
        check_number("finetune_epochs", finetune_epochs, gt=0, hint="FedAvg does not fine-tune")
        self.weight = weight
        self.finetune_epochs = finetune_epochs
        # Made here so that an unusable weight is rejected at once.
        self._own_branch = OwnBranch(weight)

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise if the adapter has no branches, or a gate."""
        check_branches_without_gate(type(self).__name__, tensor_names)

    def broadcast(self, sending: Broadcast) -> State:
        """Send the global branch and head."""
        return _expand_without_private(sending)

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Train the received state, with zeros in place of the personal branch."""
        absent = {}
        for private_name, shared_name in shared_name_of(tensor_names).items():
            absent[private_name] = torch.zeros_like(received[shared_name])
        return {"local": received | absent}

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Train all but the private branch, which stays zero."""
        return tuple(key for key in tensor_names.parameters if key not in tensor_names.private)

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep nothing, send what was trained."""
        update = without(trained["local"], tensor_names.private)
        return {}, update

    def personalization(self) -> tuple[Algorithm, Phase]:
        """Train the personal branch, from the global one."""
        return self._own_branch, Phase("personalize", self.finetune_epochs)


class OwnBranch(_WeightedBranches):
    """The fine-tuning of :class:`FedDPAF`'s clients after the last round.

    Args:
        weight: α.
    """

    roles = ("personal",)
    sends_updates = False
    global_model = False

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """Keep the complete model, in which the private branch is a copy of the shared one, and the weights."""
        copied = {}
        for private_name, shared_name in shared_name_of(tensor_names).items():
            copied[private_name] = initial[shared_name]
        return {"personal": initial | copied, WEIGHT: self.branch_weights(initial, tensor_names)}

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Train the personal branch, with zeros in place of the global one."""
        own_branch = without(client_state["personal"], tensor_names.shared)
        return {"personal": own_branch, "absent": _zeros(client_state["personal"], tensor_names.shared)}

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Train the personal branch and head."""
        if role == "personal":
            return tensor_names.parameters
        return ()

    def client_step(self, step: ClientStep) -> None:
        """Take a step on the personal branch, without the global one."""
        own_model = step.states["personal"] | step.states["absent"]
        step.descend("personal", step.loss(own_model, stream="personal"))

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep the personal branch together with the global one; send nothing."""
        return {"personal": client_state["personal"] | trained["personal"], WEIGHT: client_state[WEIGHT]}, {}


SHARE = "row/share"
"""1 / (M − 1), which travels with what a client receives; 0 for a client that is not one of the M."""


class RestOfWorld(Algorithm):
    """An individual LoRA and the mean of all others' (FedALT: Bian et al., AAAI 2026, arXiv 2503.11880).

    A client keeps two branches:

    - its individual branch, the private one, which is trained, never overwritten, and sent;
    - its rest-of-world (RoW) branch, the shared one, which has the means of the others' factors,
      (sum − own) / (M − 1) over all M clients, and is frozen in local training.

    The mixer is the adapter's gate (``adapter_options: {gate: true}``); without it both branches count in full. Gate,
    head and all else that is trained stay at the client.

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
        """Raise if the adapter has no branches, or there is only one client."""
        check_branches(type(self).__name__, tensor_names)
        if num_clients < 2:
            raise ValueError(
                "algorithm RestOfWorld requires the branches of other clients, but there is only one client; add "
                "clients, or choose algorithm='standalone'"
            )

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """Keep the individual branch, gate and head, and the RoW branch."""
        row_branch = select(initial, tensor_names.shared)
        individual = without(initial, tensor_names.shared)
        return {"personal": individual, "others": row_branch}

    def broadcast(self, sending: Broadcast) -> State:
        """Send v̄, and 1 / (M − 1)."""
        mean = {key: sending.global_state[key] for key in shared_name_of(sending.tensor_names)}
        example = next(iter(mean.values()))
        num_others = sending.num_clients - 1
        share = 1 / num_others if num_others > 0 else 0.0
        return expand(mean | {SHARE: example.new_tensor(share)}, len(sending.clients))

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Train the individual branch and all else, with the RoW branch v̄ + (v̄ − own) / (M − 1)."""
        individual = client_state["personal"]
        row_branch = {}
        for private_name, shared_name in shared_name_of(tensor_names).items():
            mean = received[private_name]
            share = per_client(received[SHARE], mean)
            row_branch[shared_name] = mean + share * (mean - individual[private_name])
        return {"personal": individual, "others": row_branch}

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Train all but the RoW branch."""
        if role == "personal":
            return tensor_names.parameters
        return ()

    def client_step(self, step: ClientStep) -> None:
        """Take a step on the individual branch and all else."""
        both_branches = step.states["others"] | step.states["personal"]
        step.descend("personal", step.loss(both_branches, stream="personal"))

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep both branches; send v̄ moved by the change of the individual one."""
        before = client_state["personal"]
        after = trained["personal"]
        moved = {key: received[key] + (after[key] - before[key]) for key in shared_name_of(tensor_names)}
        return trained, moved

    def server_step(self, server: ServerStep) -> State:
        """Move v̄ by the mean change of the round's clients, times their share of the federation."""
        num_clients = len(server.clients)
        uniform = torch.full_like(server.weights, 1 / num_clients)
        average = server.mean(server.updates, uniform)
        return moved_towards(server.previous, average, num_clients / server.num_clients)

    def personal(self, client_state: Stacks, global_state: State) -> State:
        """Predict with both branches, and all else."""
        return client_state["others"] | client_state["personal"]
