# SPDX-License-Identifier: Apache-2.0
"""Training of a client that joins a run after its last round, and the record of a run's algorithm."""

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
from perada.algorithms.specs import class_path_of
from perada.core.rounds import Phase
from perada.core.states import State


class Joining(ClientSideWrapper):
    """The client's side of another algorithm, without anything that is sent: the server's state does not change.

    The client receives, trains, keeps and predicts with the same states as in the base.

    Args:
        base: The other algorithm.

    Attributes:
        global_model: Whether the run's global model, which does not change, is scored, too: only where the client
            predicts with both models.
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
        """Keep the states of the base; send nothing."""
        new_client_state, _ = self.base.end_round(trained, client_state, received, tensor_names)
        return new_client_state, {}


class JoiningPrivatePart(Joining):
    """Training of the private part with a frozen shared part, for algorithms whose clients share a part.

    Args:
        base: The algorithm of the run.
    """

    def __init__(self, base: PartialSharing) -> None:
        super().__init__(base)
        # FedSim and its subclasses train the private part with the learning rate of the personal role. Others use that
        # of the local role, which is also that of a role without one.
        self._role = "personal" if isinstance(base, FedSim) else "own"

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """Train the private part. The shared part is included, since each pass changes its running statistics."""
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
        """Keep the private part; send nothing."""
        return {"personal": trained[self._role]}, {}


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


def joining(algorithm: Algorithm, phases: tuple[Phase, ...]) -> tuple[Joining, tuple[Phase, ...]]:
    """Return the algorithm with which a client joins a finished run, and the phases of its rounds.

    - PerAda, Ditto, pFedMe: the personal adapter is trained on loss + λ/2 ||v − w||², without the part that is sent.
    - If clients share a part, the private part is trained.
    - If clients have no personal model, the global one is fine-tuned, as in FedAvg+FT.
    - FFA-LoRA: as its base, with A frozen. HetLoRA: as its base, with the adapter's rank.
    - Any other algorithm trains like the clients of the run, and sends nothing.

    Args:
        algorithm: Algorithm of the run.
        phases: Phases of the run's rounds.

    Raises:
        ValueError: If the run has several global models, and so no single state to start from.
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
        private_phases = tuple(phase for phase in phases if phase.name == "personal")
        return JoiningPrivatePart(algorithm), private_phases or phases[:1]
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
    """Return a description of an algorithm in plain types: its class, and the options that are plain or algorithms.

    >>> algorithm_record(MTL(0.5))
    {'class': 'MTL', 'options': {'prox_strength': 0.5}}
    """
    algorithm_class = type(algorithm)
    class_name = algorithm_class.__name__
    if getattr(algorithms, class_name, None) is not algorithm_class:
        # Classes from outside perada are recorded with their module.
        class_name = class_path_of(algorithm_class)
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
    """Re-create an algorithm from its record.

    Only perada's algorithms are created: a record comes from a file that may be from anyone, so it must not choose code
    to run.

    Args:
        record: Result of :func:`algorithm_record`.

    Raises:
        ValueError: If the class is not one of perada's algorithms, or does not have these options.
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
