# SPDX-License-Identifier: Apache-2.0
"""How often an algorithm looks at a batch, found out before anything is trained."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from perada.algorithms.base import Algorithm, Broadcast, Slot, Stacks
from perada.rounds import Phase
from perada.states import State, clone, expand

Queries = tuple[dict[str, int], ...]
"""For each phase, how often one local step asks for a gradient, by the stream whose batch it is of."""


def rehearse(algorithm: Algorithm, slot: Slot, initial: State, phases: Sequence[Phase], num_clients: int) -> Queries:
    """Go through one local step of every phase without images, and count the gradients it asks for.

    Args:
        algorithm: The algorithm.
        slot: Names of the trained tensors.
        initial: The first global state.
        phases: The phases of local training.
        num_clients: Clients M of the federation.

    Returns:
        ``{stream: gradients asked for}`` of each phase.

    Raises:
        ValueError: If a step asks for what private training cannot give.
    """
    kept = {role: expand(state, 1) for role, state in algorithm.kept(initial, slot).items()}
    received = algorithm.broadcast(Broadcast(initial, slot, 0, (0,), num_clients, 0))
    counts = []
    for phase in phases:
        opened = {role: clone(state) for role, state in algorithm.open(kept, received, slot).items()}
        for role, state in opened.items():
            for key in algorithm.trained(role, phase.name, slot):
                if key in state:
                    state[key].requires_grad_()
        step = _Rehearsal(algorithm, opened, kept, received, phase.name)
        algorithm.client_step(step)
        counts.append(dict(step.queries))
    return tuple(counts)


class _Rehearsal:
    """A local step without images; satisfies :class:`perada.algorithms.base.ClientStep`."""

    def __init__(self, algorithm: Algorithm, states: Stacks, kept: Stacks, received: State, phase: str) -> None:
        self.algorithm, self.states, self.kept, self.received, self.phase = algorithm, states, kept, received, phase
        self.round = 0
        self.queries: Counter[str] = Counter()

    def logits(self, states: str | State, stream: str | None = None) -> Tensor:
        raise no_logits(self.algorithm)

    def loss(self, states: str | State, stream: str | None = None) -> Tensor:
        if isinstance(states, str):
            stream, states = stream or states, self.states[states]
        self.queries[stream or next(iter(self.states))] += 1
        asked = [value.flatten(1).sum(1) for value in states.values() if value.requires_grad]
        return 0 * sum(asked, start=torch.zeros(1, device=next(iter(states.values())).device))

    def restart(self, role: str, start: State) -> None:
        """Nothing is trained."""

    def descend(
        self,
        role: str | tuple[str, ...],
        loss: Tensor | None = None,
        *,
        pull: tuple[float, State] | None = None,
        slope: State | None = None,
    ) -> None:
        """Nothing is trained."""


def no_logits(algorithm: Algorithm) -> ValueError:
    """What is wrong with an algorithm that looks at the outputs themselves."""
    return ValueError(
        f"privacy cannot be used with {type(algorithm).__name__}: its local step reads the model's outputs on private "
        "images (step.logits), which no noise covers; use step.loss, whose gradient is private"
    )
