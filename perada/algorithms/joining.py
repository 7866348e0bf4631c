# SPDX-License-Identifier: Apache-2.0
"""Training of a client that joins after the last round, and a run's record of its algorithm."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

import perada.algorithms as algorithms
from perada.algorithms.base import Algorithm, Broadcast, ClientSideWrapper, ClientStep, Stacks, TensorNames
from perada.algorithms.branches import RestOfWorld, branch_pairs
from perada.algorithms.fedavg import Standalone
from perada.algorithms.het_lora import HetLoRA
from perada.algorithms.lora import FFALoRA
from perada.algorithms.perada import MTL, PerAda, PFedMe
from perada.algorithms.sharing import FedSim, PartialSharing
from perada.core.rounds import Phase
from perada.core.states import State


class Joining(ClientSideWrapper):
    """The client side of another algorithm: it sends nothing, and the server's state is unchanged.

    What the client receives, trains, keeps and predicts with is the base's. All else is that of an algorithm whose
    clients send nothing.

    Args:
        base: The other algorithm.
    """

    inference = "personal"
    sends_updates = False
    global_model = False
    unsent = frozenset({"personal", "local", "own"})

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep what clients of the base keep, send nothing."""
        new_client_state, _ = self.base.end_round(trained, client_state, received, tensor_names)
        return new_client_state, {}


class JoiningPrivatePart(Joining):
    """Training of the private part on a fixed shared part, for algorithms whose clients share a part.

    Args:
        base: The algorithm.
    """

    def __init__(self, base: PartialSharing) -> None:
        super().__init__(base)
        # FedSim and its subclasses train the private part at the rate of the personal role, others at that of the
        # local one, which a role without a rate has.
        self._role = "personal" if isinstance(base, FedSim) else "own"

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Train the private part; the shared one is included because its running statistics change with each pass."""
        return {self._role: client_state["personal"], "local": received}

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """Train only the private part."""
        if role == self._role:
            return tensor_names.parameters
        return ()

    def client_step(self, step: ClientStep) -> None:
        """Take a step on the private part."""
        model = step.states[self._role] | step.states["local"]
        step.descend(self._role, step.loss(model, stream=self._role))

    def end_round(
        self,
        trained: Stacks,
        client_state: Stacks,
        received: State,
        tensor_names: TensorNames,
    ) -> tuple[Stacks, State]:
        """Keep the private part, send nothing."""
        return {"personal": trained[self._role]}, {}


class JoiningRestOfWorld(Joining):
    """Joining for FedALT: an individual branch that starts with B = 0, with the mean of all the run's clients.

    Args:
        base: FedALT.
    """

    def check(self, tensor_names: TensorNames, num_clients: int) -> None:
        """Accept a single client, which the base rejects: the other clients are those of the run."""

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """Start from the others' mean A, and B = 0."""
        zeros = {private.up: torch.zeros_like(initial[private.up]) for _, private in branch_pairs(tensor_names)}
        return self.base.initial_client_state(initial | zeros, tensor_names)

    def broadcast(self, sending: Broadcast) -> State:
        """Send what the base sends to a client that has no part in the mean."""
        return self.base.broadcast(replace(sending, num_clients=0))


def joining(algorithm: Algorithm, phases: tuple[Phase, ...]) -> tuple[Joining, tuple[Phase, ...]]:
    """Choose the algorithm, and the phases of its rounds, for a client that joins a finished run of ``algorithm``.

    PerAda's personal adapter, Ditto's and pFedMe's are trained on loss + λ/2 ||v − w||², without what would be sent.
    Where clients share a part, the other one is trained. Where clients have no model of their own, the global one is
    fine-tuned, as FedAvg+FT does. FFA-LoRA's A is frozen. With HetLoRA the client has the
    adapter's rank. All else trains as its clients did, and sends nothing.

    Args:
        algorithm: Algorithm of the run.
        phases: Phases of the run's rounds.

    Raises:
        ValueError: If there are several global models, so that there is no one state to begin with.
    """
    if algorithm.modes > 1:
        raise ValueError(
            f"a client cannot join a run of {type(algorithm).__name__}, whose global models are averaged: there is no "
            "single state to start from; include the client in a new run instead"
        )
    if isinstance(algorithm, HetLoRA):
        return joining(algorithm.base, phases)
    if isinstance(algorithm, FFALoRA):
        base, phases = joining(algorithm.base, phases)
        return Joining(FFALoRA(base)), phases
    tuning = algorithm.personalization()
    if tuning is not None:
        tuned, phase = tuning
        return Joining(tuned), (phase,)
    if isinstance(algorithm, PartialSharing):
        # FedAlt and FedRep have a phase for the private part. Others have one phase for both.
        of_private_part = tuple(phase for phase in phases if phase.name == "personal")
        return JoiningPrivatePart(algorithm), of_private_part or phases[:1]
    if isinstance(algorithm, RestOfWorld):
        return JoiningRestOfWorld(algorithm), phases
    client_step = type(algorithm).client_step
    # A subclass that overrides the step trains something else, and continues with that.
    if isinstance(algorithm, PerAda | PFedMe) and client_step in (PerAda.client_step, PFedMe.client_step):
        return Joining(MTL(algorithm.prox_strength)), phases
    if algorithm.inference == "global":
        return Joining(Standalone()), phases
    return Joining(algorithm), phases


def algorithm_record(algorithm: Algorithm) -> dict[str, Any]:
    """Describe an algorithm in plain types: its class, and those constructor options that are plain or algorithms.

    >>> algorithm_record(MTL(0.5))
    {'class': 'MTL', 'options': {'prox_strength': 0.5}}
    """
    algorithm_class = type(algorithm)
    class_name = algorithm_class.__name__
    if getattr(algorithms, class_name, None) is not algorithm_class:
        # Not one of perada's own: anyone's class is named with its module.
        class_name = f"{algorithm_class.__module__}.{algorithm_class.__qualname__}"
    options: dict[str, Any] = {}
    wrapped: dict[str, Any] = {}
    for name in inspect.signature(algorithm_class).parameters:
        value = getattr(algorithm, name, None)
        if isinstance(value, bool | int | float | str):
            options[name] = value
        elif isinstance(value, Algorithm):
            wrapped[name] = algorithm_record(value)
    return {"class": class_name, "options": options | wrapped}


def algorithm_of(record: Mapping[str, Any]) -> Algorithm:
    """Re-create the algorithm that :func:`algorithm_record` described.

    Only perada's own are made: a record comes from a file that anyone may have written, and names no code to be run.

    Raises:
        ValueError: If it is another one, or has other options.
    """
    algorithm_class = getattr(algorithms, str(record["class"]), None)
    if not (isinstance(algorithm_class, type) and issubclass(algorithm_class, Algorithm)):
        raise ValueError(
            f"the run was trained with the algorithm {record['class']!r}, which does not ship with perada; pass it as "
            "algorithm="
        )
    options = {}
    try:
        for name, value in record["options"].items():
            options[name] = algorithm_of(value) if isinstance(value, Mapping) else value
        algorithm: Algorithm = algorithm_class(**options)
    except TypeError as error:
        raise ValueError(
            f"the run's algorithm {record['class']} cannot be re-created ({error}); pass algorithm="
        ) from None
    return algorithm
