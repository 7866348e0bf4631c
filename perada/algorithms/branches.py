# SPDX-License-Identifier: Apache-2.0
"""Algorithms on two LoRA branches in one network (``adapter="dual_lora"``): FedDPA and FedALT.

The index g marks the shared branch and p the private one: a layer computes W·x + s·B_g·A_g·x + s·B_p·A_p·x.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from perada.algorithms.base import Algorithm, Broadcast, ClientStep, ServerStep, Stacks, TensorNames, moved_towards
from perada.algorithms.fedavg import FedAvg
from perada.algorithms.newcomers import Joining
from perada.core.checks import check_number
from perada.core.rounds import Phase
from perada.core.states import Factors, State, expand, per_client, select, stack_size, without


def check_branches(name: str, tensor_names: TensorNames) -> None:
    """Raise a ValueError if the model lacks the two branches that the algorithm ``name`` requires."""
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
    """Raise a ValueError if the model lacks the two branches, or has a gate that weights them already."""
    check_branches(name, tensor_names)
    # The tensors of a gate are private, but are no factors of a branch.
    gates = tensor_names.private - shared_name_of(tensor_names).keys()
    if gates:
        raise ValueError(
            f"algorithm {name} weights the branches itself, but the adapter's gate does so too; set gate=False "
            "(adapter_options)"
        )


def branch_pairs(tensor_names: TensorNames) -> list[tuple[Factors, Factors]]:
    """Return for each layer the names of the shared branch's factors and those of the private branch's."""
    shared = [pair for pair in tensor_names.factors if pair.up in tensor_names.shared]
    private = [pair for pair in tensor_names.factors if pair.up in tensor_names.private]
    return list(zip(shared, private, strict=True))


def shared_name_of(tensor_names: TensorNames) -> dict[str, str]:
    """Map the name of each private factor to that of the shared factor of the same layer and shape."""
    shared_names = {}
    for shared, private in branch_pairs(tensor_names):
        shared_names[private.down] = shared.down
        shared_names[private.up] = shared.up
    return shared_names


WEIGHT = "weight"
"""Role of the branches' weights, which hold one number for each B."""
WEIGHT_SUFFIX = "/weight"
"""Suffix that turns the name of a B into that of its weight."""


class _WeightedBranches(Algorithm):
    """Base class for branches with fixed weights: (1 − α)·s·B_g·A_g·x + α·s·B_p·A_p·x.

    Args:
        weight: Weight α of the private branch, from 0 to 1.
    """

    inference = "personal"
    unsent = frozenset({"personal"})

    def __init__(self, weight: float = 0.5) -> None:
        check_number("weight", weight, ge=0, le=1, hint="0 is the global branch, 1 the client's")
        self.weight = weight

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise a ValueError if the adapter has no branches, or a gate that would weight them a second time."""
        check_branches_without_gate(type(self).__name__, tensor_names)

    def branch_weights(self, initial: State, tensor_names: TensorNames) -> State:
        """Return 1 − α for each B of the shared branch and α for each B of the private one, under weight names."""
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
    """Multiply the B of each branch by its weight; this weights the branch, since its output is linear in B.

    Args:
        states: States (C, ...) of C clients.
        weights: Weights (C,), by the name of a B with :data:`WEIGHT_SUFFIX`.
    """
    result = dict(states)
    for name, weight in weights.items():
        key = name.removesuffix(WEIGHT_SUFFIX)
        result[key] = per_client(weight, states[key]) * states[key]
    return result


def _make_zeros(state: Mapping[str, Tensor], keys: frozenset[str]) -> State:
    """Return zeros in the shapes of those tensors of a state whose names are among ``keys``."""
    return {key: torch.zeros_like(value) for key, value in state.items() if key in keys}


def _expand_without_private(sending: Broadcast) -> State:
    """Return the global state without the private branch, once for each client: the shared branch and the head."""
    shared = without(sending.global_state, sending.tensor_names.private)
    return expand(shared, len(sending.clients))


class FedDPA(_WeightedBranches):
    """A global and a personal LoRA, both trained in every round (FedDPA-T: Yang et al., NeurIPS 2024).

    ============ ================================================================================================
    global       the shared branch, received; trained without the private one (role ``local``), sent, and averaged
    personal     the private branch and a head, kept; trained in the network with both (role ``personal``)
    ============ ================================================================================================

    In the network with both branches, (1 − α)·global + α·personal, the global branch stays as it was received. Both
    steps are taken on the same minibatches. Each branch has its own head: the global head is averaged, the personal one
    is trained and kept by the client. A client predicts with its personal branch and the newest global one.

    The paper weights the branches for each test input by its similarity to training inputs. Here α is the same for all
    inputs, in training and afterwards.

    The paper's heads are frozen. Source: [Yang et al., NeurIPS 2024](https://arxiv.org/abs/2403.19211).

    Args:
        weight: Weight α of the personal branch, from 0 to 1.
    """

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """Keep the personal branch and head, and the branches' weights."""
        personal = without(initial, tensor_names.shared)
        return {"personal": personal, WEIGHT: self.branch_weights(initial, tensor_names)}

    def broadcast(self, sending: Broadcast) -> State:
        """Send the global branch and the global head."""
        return _expand_without_private(sending)

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Train the personal and the global model.

        Each is completed by frozen tensors: the personal model by ``shared``, the global branch as it was received, and
        the global model by ``absent``, zeros in place of the personal branch.
        """
        received_branch = select(received, tensor_names.shared)
        return {
            "personal": client_state["personal"],
            WEIGHT: client_state[WEIGHT],
            "local": received,
            "shared": received_branch,
            "absent": _make_zeros(client_state["personal"], tensor_names.private),
        }

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Train both models, but not the tensors that complete them."""
        if role in ("personal", "local"):
            return tensor_names.parameters
        return ()

    def client_step(self, step: ClientStep) -> None:
        """Take one step on the personal branch next to the received one, and one on the global branch by itself."""
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
        """Keep the personal branch and the weights; send the global branch."""
        return {"personal": trained["personal"], WEIGHT: trained[WEIGHT]}, trained["local"]


class FedDPAF(FedAvg):
    """First a global LoRA, then a personal one for each client (FedDPA-F: Yang et al., NeurIPS 2024).

    The rounds are FedAvg of the global branch and the head: clients keep nothing. After the last round every client
    trains a personal branch by itself, which starts as a copy of the global one. It predicts with
    (1 − α)·global + α·personal, with the same α for all inputs; see :class:`FedDPA`.

    Source: [Yang et al., NeurIPS 2024](https://arxiv.org/abs/2403.19211).

    Args:
        weight: Weight α of the personal branch, from 0 to 1.
        finetune_epochs: Epochs of training of the personal branch and head, > 0.
    """

    def __init__(self, weight: float = 0.5, finetune_epochs: float = 1) -> None:
        check_number("finetune_epochs", finetune_epochs, gt=0, hint="FedAvg does not fine-tune")
        self.weight = weight
        self.finetune_epochs = finetune_epochs
        # OwnBranch is created here, so that an invalid weight is rejected before the rounds.
        self._personalization = OwnBranch(weight)

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise a ValueError if the adapter has no branches, or has a gate."""
        check_branches_without_gate(type(self).__name__, tensor_names)

    def broadcast(self, sending: Broadcast) -> State:
        """Send the global branch and the global head."""
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
        """Return the training of the personal branch, which starts from the global one."""
        return self._personalization, Phase("personalize", self.finetune_epochs)


class OwnBranch(_WeightedBranches):
    """Fine-tuning of the clients of :class:`FedDPAF` after the last round.

    Args:
        weight: Weight α of the personal branch, from 0 to 1.
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
        personal = without(client_state["personal"], tensor_names.shared)
        return {"personal": personal, "absent": _make_zeros(client_state["personal"], tensor_names.shared)}

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Train the personal branch and the head."""
        if role == "personal":
            return tensor_names.parameters
        return ()

    def client_step(self, step: ClientStep) -> None:
        """Take a step on the personal branch, without the global one."""
        personal_model = step.states["personal"] | step.states["absent"]
        step.descend("personal", step.loss(personal_model, stream="personal"))

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep the trained personal branch and the unchanged global one; send nothing."""
        return {"personal": client_state["personal"] | trained["personal"], WEIGHT: client_state[WEIGHT]}, {}


SHARE = "row/share"
"""Name under which clients receive 1 / (M − 1), or 0 if there is only one client."""


class RestOfWorld(Algorithm):
    """An individual LoRA and the mean of all others (FedALT: Bian et al., AAAI 2026, arXiv 2503.11880).

    A client keeps two branches:

    - its individual branch v, the private one, which is trained, sent, and never overwritten;
    - its rest-of-world (RoW) branch, the shared one, which is the mean of the other clients' factors,
      (Σ v_m − v) / (M − 1) over all M clients, and is frozen in local training.

    The mixer is the adapter's gate (``adapter_options: {gate: true}``); without it both branches have weight 1. The
    gate, the head and all other trained tensors stay at the client.

    The server stores v̄, the mean of all M individual branches, and moves it by the mean change of a round's clients,
    with equal weights. Every client receives the same v̄ and computes its RoW branch from it as v̄ + (v̄ − v) / (M − 1).
    A client predicts with the RoW branch of the last round that it took part in, for which its mixer was trained. In
    the paper all clients take part in every round; here a client that was not drawn stays in v̄ as it last was.

    Server rules other than the mean are rejected: a client can remove its own part from a mean only. If
    ``client_privacy`` clipped its change, or ``drop_outliers`` left it out, v̄ lacks some of what the client removes.

    Its name is ``fedalt_row``, since FedAlt is another method. The paper has no head. Source: [Bian et al., AAAI
    2026](https://arxiv.org/abs/2503.11880).
    """

    inference = "personal"
    roles = ("personal",)
    global_model = False
    instead_of_factors = "shifted means of factors"
    needs_plain_mean = (
        "subtracts a client's share from the mean of all branches, which the rule does not provide; leave "
        "server_rule out, or choose algorithm='feddpa'"
    )

    def joining(self, phases: tuple[Phase, ...]) -> tuple[Algorithm, tuple[Phase, ...]]:
        """Train an individual branch beside the mean of the other clients."""
        return JoiningRestOfWorld(self), phases

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Raise a ValueError if the adapter has no branches, or if there is only one client."""
        check_branches(type(self).__name__, tensor_names)
        if num_clients < 2:
            raise ValueError(
                "algorithm RestOfWorld requires the branches of other clients, but there is only one client; add "
                "clients, or choose algorithm='standalone'"
            )

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """Keep the individual branch with the gate and the head, and the RoW branch."""
        row_branch = select(initial, tensor_names.shared)
        individual = without(initial, tensor_names.shared)
        return {"personal": individual, "others": row_branch}

    def broadcast(self, sending: Broadcast) -> State:
        """Send v̄, and 1 / (M − 1)."""
        mean = {key: sending.global_state[key] for key in shared_name_of(sending.tensor_names)}
        # The share has the dtype and device of the other tensors.
        example = next(iter(mean.values()))
        num_others = sending.num_clients - 1
        share = 1 / num_others if num_others > 0 else 0.0
        return expand(mean | {SHARE: example.new_tensor(share)}, len(sending.clients))

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Train all tensors but the RoW branch, which becomes v̄ + (v̄ − v) / (M − 1)."""
        individual = client_state["personal"]
        row_branch = {}
        for private_name, shared_name in shared_name_of(tensor_names).items():
            mean = received[private_name]
            share = per_client(received[SHARE], mean)
            row_branch[shared_name] = mean + share * (mean - individual[private_name])
        return {"personal": individual, "others": row_branch}

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Train all tensors but the RoW branch."""
        if role == "personal":
            return tensor_names.parameters
        return ()

    def client_step(self, step: ClientStep) -> None:
        """Take a step on all tensors but the RoW branch."""
        both_branches = step.states["others"] | step.states["personal"]
        step.descend("personal", step.loss(both_branches, stream="personal"))

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep both branches; send v̄ moved by the change of the individual branch."""
        before = client_state["personal"]
        after = trained["personal"]
        moved = {key: received[key] + (after[key] - before[key]) for key in shared_name_of(tensor_names)}
        return trained, moved

    def server_step(self, server: ServerStep) -> State:
        """Move v̄ by the mean change of the round's clients, times their share of all clients.

        This keeps v̄ the mean of the individual branches of all clients, of which the others did not change.
        """
        num_clients = len(server.clients)
        # Whatever the weights of the round are: RoW branches are computed from a mean with equal weights.
        uniform = torch.full_like(server.weights, 1 / num_clients)
        average = server.mean(server.updates, uniform)
        return moved_towards(server.previous, average, num_clients / server.num_clients)

    def personal(self, client_state: Stacks, global_state: State) -> State:
        """Predict with both branches and the client's other tensors."""
        return client_state["others"] | client_state["personal"]


class JoiningRestOfWorld(Joining):
    """Joining for FedALT: an individual branch that starts with B = 0, next to the mean of all clients of the run.

    Args:
        base: FedALT.
    """

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Accept a single client, which the base rejects: the other clients are those of the run."""

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """Start from the mean A of the other clients, and B = 0."""
        zeros = {private.up: torch.zeros_like(initial[private.up]) for _, private in branch_pairs(tensor_names)}
        return self.base.initial_client_state(initial | zeros, tensor_names)

    def broadcast(self, sending: Broadcast) -> State:
        """Send the states that the base sends to a client that is not part of the mean."""
        return self.base.broadcast(replace(sending, num_clients=0))
