# SPDX-License-Identifier: Apache-2.0
"""What a client trains that joins when the rounds are over, and algorithms as a run records them."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

import perada.algorithms as known
from perada.algorithms.base import Algorithm, AlgorithmWrapper, Broadcast, ClientStep, Stacks, TensorNames
from perada.algorithms.branches import RestOfWorld, pairs
from perada.algorithms.fedavg import Standalone
from perada.algorithms.het_lora import HetLoRA
from perada.algorithms.lora import FFALoRA
from perada.algorithms.perada import MTL, PerAda, PFedMe
from perada.algorithms.sharing import FedSim, PartialSharing
from perada.core.rounds import Phase
from perada.core.states import State


class Joining(AlgorithmWrapper):
    """One client's side of an algorithm: it sends nothing, and the server's state stays as it is.

    Args:
        base: What the client trains and keeps.
    """

    inference = "personal"
    sends_updates = False
    global_model = False
    unsent = frozenset({"personal", "local", "own"})
    theirs: tuple[str, ...] = ("check", "initial_client_state", "broadcast", "begin_round", "personal")
    """Methods that are the base's."""

    def __init__(self, base: Algorithm) -> None:
        self.base = base
        vars(self).update({name: getattr(base, name) for name in self.theirs})

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """Keep what the algorithm keeps, send nothing."""
        return self.base.end_round(trained, client_state, received, tensor_names)[0], {}


class OwnPart(Joining):
    """Of an algorithm whose clients share a part: the private part, at its rate, on the shared part as it is."""

    theirs = ("check", "initial_client_state", "broadcast", "personal")

    def __init__(self, base: PartialSharing) -> None:
        super().__init__(base)
        self._role = "personal" if isinstance(base, FedSim) else "own"  # a role without a rate has the local one

    def begin_round(self, client_state: Stacks, received: State, tensor_names: TensorNames) -> Stacks:
        """The private part; the shared one beside it, since running statistics change as images pass."""
        return {self._role: client_state["personal"], "local": received}

    def trainable_keys(self, role: str, phase: str, tensor_names: TensorNames, round: int) -> tuple[str, ...]:
        """The private part alone."""
        return tensor_names.parameters if role == self._role else ()

    def client_step(self, step: ClientStep) -> None:
        """A step on the private part."""
        step.descend(self._role, step.loss(step.states[self._role] | step.states["local"], stream=self._role))

    def end_round(
        self, trained: Stacks, client_state: Stacks, received: State, tensor_names: TensorNames
    ) -> tuple[Stacks, State]:
        """Keep the private part."""
        return {"personal": trained[self._role]}, {}


class Newcomer(Joining):
    """Of FedALT: an individual branch with B = 0, beside the mean of all clients' of the run."""

    theirs = ("begin_round", "personal")

    def initial_client_state(self, initial: State, tensor_names: TensorNames) -> Stacks:
        """As the base, from the others' mean A."""
        return self.base.initial_client_state(
            initial | {own.up: torch.zeros_like(initial[own.up]) for _, own in pairs(tensor_names)}, tensor_names
        )

    def broadcast(self, sending: Broadcast) -> State:
        """As the base, to one who has no part in the mean."""
        return self.base.broadcast(replace(sending, num_clients=0))


def joining(algorithm: Algorithm, phases: tuple[Phase, ...]) -> tuple[Joining, tuple[Phase, ...]]:
    """What a client trains that joins a finished run of ``algorithm``, and the phases of its rounds.

    PerAda's personal adapter, Ditto's and pFedMe's are trained on loss + λ/2 ||v − w||², without what would be sent.
    Where clients share a part, the other one is trained. Where clients have no model of their own, the global one is
    fine-tuned, as FedAvg+FT does. FFA-LoRA's A is frozen. With HetLoRA the client has the
    adapter's rank. All else trains as its clients did, and sends nothing.

    Raises:
        ValueError: If there are several global models, so that there is no one state to begin with.
    """
    if algorithm.modes > 1:
        raise ValueError(
            f"a client cannot join a run of {type(algorithm).__name__}, whose global models are averaged: there is no "
            "one state to begin with; let it take part in a run"
        )
    if isinstance(algorithm, HetLoRA):
        return joining(algorithm.base, phases)
    if isinstance(algorithm, FFALoRA):
        inner, phases = joining(algorithm.base, phases)
        return Joining(FFALoRA(inner)), phases
    tuning = algorithm.personalization()
    if tuning is not None:
        return Joining(tuning[0]), (tuning[1],)
    if isinstance(algorithm, PartialSharing):
        own = [phase for phase in phases if phase.name == "personal"]
        return OwnPart(algorithm), tuple(own or phases[:1])
    if isinstance(algorithm, RestOfWorld):
        return Newcomer(algorithm), phases
    step = type(algorithm).client_step
    if isinstance(algorithm, PerAda | PFedMe) and step in (PerAda.client_step, PFedMe.client_step):
        return Joining(MTL(algorithm.prox_strength)), phases
    return Joining(Standalone() if algorithm.inference == "global" else algorithm), phases


def algorithm_record(algorithm: Algorithm) -> dict[str, Any]:
    """An algorithm in plain types: its class, and the constructor's options that are plain or algorithms.

    >>> algorithm_record(MTL(0.5))
    {'class': 'MTL', 'options': {'prox_strength': 0.5}}
    """
    kind = type(algorithm)
    ours = getattr(known, kind.__name__, None) is kind
    held = {name: getattr(algorithm, name, None) for name in inspect.signature(kind).parameters}
    plain: dict[str, Any] = {name: own for name, own in held.items() if isinstance(own, bool | int | float | str)}
    plain |= {name: algorithm_record(value) for name, value in held.items() if isinstance(value, Algorithm)}
    return {"class": kind.__name__ if ours else f"{kind.__module__}.{kind.__qualname__}", "options": plain}


def algorithm_of(record: Mapping[str, Any]) -> Algorithm:
    """The algorithm that :func:`algorithm_record` describes.

    Only perada's own are made: a record comes from a file that anyone may have written, and names no code to be run.

    Raises:
        ValueError: If it is another one, or has other options.
    """
    kind = getattr(known, str(record["class"]), None)
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise ValueError(
            f"the run was trained with the algorithm {record['class']!r}, which is not perada's own; give it as "
            "algorithm="
        )
    try:
        own = {name: algorithm_of(one) if isinstance(one, Mapping) else one for name, one in record["options"].items()}
        made: Algorithm = kind(**own)
    except TypeError as error:
        raise ValueError(
            f"the run's algorithm {record['class']} cannot be made again ({error}); give algorithm="
        ) from None
    return made
