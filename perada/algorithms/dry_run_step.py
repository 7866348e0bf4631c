# SPDX-License-Identifier: Apache-2.0
"""Local steps without images, which dry runs take on made-up gradients."""

from collections import Counter

import torch
from torch import Tensor

from perada.algorithms.base import Algorithm, Stacks, TensorNames
from perada.algorithms.client_steps import add_terms, no_logits
from perada.core.seeding import generator
from perada.core.states import State, clone, device_of, stack_size
from perada.tasks import DEFAULT_TASK, Task

LEARNING_RATE = 0.1
"""Learning rate of the local steps."""


class DryRunStep:
    """Local steps without images, on made-up gradients (a :class:`perada.algorithms.base.ClientStep`).

    Args:
        algorithm: The algorithm, which determines the trained parameters.
        opened: States (C, ...) that the round begins with, by role.
        client_state: States (C, ...) that the clients kept, by role.
        received: States (C, ...) that the server sent.
        round: Number of the round.
        changed: As in :class:`DryRun`.
        num_classes: Number of classes; None to raise if logits or labels are read.
        width: Width of the representations; None for the number of classes.
        task: What the clients learn.

    Attributes:
        queries: Number of gradients that were computed, by stream.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        opened: Stacks,
        client_state: Stacks,
        received: State,
        *,
        round: int = 0,
        changed: str = "",
        num_classes: int | None = None,
        width: int | None = None,
        task: Task = DEFAULT_TASK,
    ) -> None:
        self.algorithm = algorithm
        self.client_state = client_state
        self.received = received
        self.round = round
        self.phase = ""
        self.tensor_names = TensorNames((), ())
        self.states: Stacks = {role: clone(state) for role, state in opened.items()}
        self.queries: Counter[str] = Counter()
        self._changed = changed
        self._num_classes = num_classes
        self._width = width
        self._task = task

    @property
    def _num_clients(self) -> int:
        """Number C of clients."""
        return stack_size(self.received)

    def begin(self, phase: str, tensor_names: TensorNames) -> None:
        """Begin a phase, after which the tensors that it trains require gradients."""
        self.phase = phase
        self.tensor_names = tensor_names
        self.states = self.finished()
        for role, state in self.states.items():
            for key in self.algorithm.trainable_keys(role, phase, tensor_names, self.round):
                if key in state:
                    state[key].requires_grad_()

    def finished(self) -> Stacks:
        """Return the current states, without gradients."""
        states: Stacks = {}
        for role, state in self.states.items():
            states[role] = {key: value.detach() for key, value in state.items()}
        return states

    def logits(self, states: str | State, stream: str | None = None) -> Tensor:
        """Return made-up logits (C, 2, K) of two images."""
        if self._num_classes is None:
            raise no_logits(self.algorithm)
        # All logits of a client are its made-up loss, so that they have a gradient.
        losses = self.loss(states, stream)
        return losses.view(-1, 1, 1).expand(-1, 2, self._num_classes)

    def outputs(self, states: str | State, stream: str | None = None, training: bool = True) -> tuple[Tensor, Tensor]:
        """Return made-up logits (C, 2, K) and representations (C, 2, F) of two images."""
        logits = self.logits(states, stream)
        width = self._width or logits.shape[-1]
        # They are not zero, since an algorithm may divide by their length.
        representations = 1 + logits[..., :1].expand(-1, -1, width)
        return logits, representations

    def class_counts(self, num_classes: int) -> Tensor:
        """Return counts of one image of each class."""
        if self._num_classes is None:
            raise no_logits(self.algorithm)
        return torch.ones(self._num_clients, num_classes)

    @property
    def labels(self) -> Tensor:
        """Labels of the two images: both of class 0, or without a label."""
        if self._num_classes is None:
            raise no_logits(self.algorithm)
        device = device_of(self.received)
        return self._task.blank_targets((self._num_clients, 2), self._num_classes, device)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the two images."""
        return values.mean(1)

    def loss(self, states: str | State | Tensor, stream: str | None = None) -> Tensor:
        """Return a loss (C,) of 0 with a made-up gradient that depends on the states; for logits, return their mean."""
        if isinstance(states, Tensor):
            return states.flatten(1).mean(1)
        if isinstance(states, str):
            stream = stream or states
            states = self.states[states]
        stream = stream or next(iter(self.states))
        self.queries[stream] += 1
        random = self._make_generator(stream)
        total = torch.zeros(self._num_clients, device=device_of(states))
        # Names are sorted, so that a tensor's made-up gradient does not depend on the order in which an algorithm lists
        # them.
        for _, value in sorted(states.items()):
            if value.requires_grad:
                slope = (torch.rand(value.shape, generator=random) - 0.5).to(value)
                # The square makes the gradient depend on the state at which it is computed, like real ones.
                terms = slope * value + value**2 / 2
                total = total + terms.flatten(1).sum(1)
        # The value is zero, but the gradient is that of the total.
        return total - total.detach()

    def _make_generator(self, stream: str) -> torch.Generator:
        """Return the random numbers of a stream's latest gradient, which differ in the stream that is changed."""
        purpose = f"rehearsal/{stream}"
        if stream == self._changed:
            purpose += "/changed"
        return generator(0, purpose, self.round, self.queries[stream])

    def restart(self, role: str, start: State) -> None:
        """Set a role's trained parameters to those of ``start`` (C, ...)."""
        with torch.no_grad():
            for key, leaf in self._trained_leaves(role).items():
                leaf.copy_(start[key])

    def descend(
        self,
        role: str | tuple[str, ...],
        loss: Tensor | None = None,
        *,
        pull: tuple[float, State] | None = None,
        slope: State | None = None,
    ) -> None:
        """Take a step of gradient descent; see :meth:`.ClientStep.descend`."""
        roles = (role,) if isinstance(role, str) else role
        leaves_of_roles = [self._trained_leaves(name) for name in roles]
        for leaves in leaves_of_roles:
            for leaf in leaves.values():
                leaf.grad = None
        if loss is not None:
            self._check_loss(role, loss)
            loss.sum().backward()
        for leaves in leaves_of_roles:
            add_terms(leaves, pull, slope)
            _take_descent_step(leaves)

    def _trained_leaves(self, role: str) -> State:
        """Return what the phase trains in a role, (C, ...)."""
        return {key: value for key, value in self.states[role].items() if value.requires_grad}

    def _check_loss(self, role: str | tuple[str, ...], loss: Tensor) -> None:
        """Raise a ValueError unless a loss has one value per client, and depends on what the phase trains."""
        if loss.shape != (self._num_clients,):
            raise ValueError(
                f"the loss has shape {tuple(loss.shape)} instead of ({self._num_clients},), one value per client"
            )
        if not loss.requires_grad:
            raise ValueError(
                f"the loss of step.descend({role!r}) does not depend on any parameter that phase {self.phase!r} "
                f"trains ({type(self.algorithm).__name__}.trainable_keys); choose an adapter that trains one, or "
                "skip the step"
            )


def _take_descent_step(leaves: State) -> None:
    """Take a step of gradient descent on all parameters that have a gradient."""
    with torch.no_grad():
        for leaf in leaves.values():
            if leaf.grad is not None:
                leaf -= LEARNING_RATE * leaf.grad
