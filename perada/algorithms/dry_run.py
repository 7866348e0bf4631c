# SPDX-License-Identifier: Apache-2.0
"""Rounds without images: an algorithm and a server rule are tried at set-up, before anything is computed."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from perada.algorithms.base import Algorithm, Broadcast, ServerStep, Stacks, TensorNames
from perada.core.checks import Options, check_choice
from perada.core.rounds import Phase
from perada.core.seeding import generator
from perada.core.states import State, clone, expand
from perada.server import Aggregation, Mean, ServerRule, Updates, client_weights

T = TypeVar("T")

LARGEST = 10**8
"""Numbers in the clients' states of a trial."""


def is_own(made: Options) -> bool:
    """Whether an algorithm or a rule, or one that it is made of, is of a class from outside perada."""
    parts = [part for part in vars(made).values() if isinstance(part, Options)]
    return not type(made).__module__.startswith("perada.") or any(map(is_own, parts))


def dry_run_rounds(
    algorithm: Algorithm,
    rule: ServerRule,
    tensor_names: TensorNames,
    initial: State,
    phases: Sequence[Phase],
    num_clients: int,
    clients: int,
    num_classes: int,
    multilabel: bool = False,
) -> None:
    """Go through two rounds of ``clients`` on made-up gradients, and look at all states that come out.

    Copies are tried, with fewer clients where those are large; where the rule refuses so few, the mean stands for it.

    Raises:
        ValueError: If something fails or does not fit, with the name of the method.
    """
    name, algorithm, rule = type(algorithm).__name__, copy.deepcopy(algorithm), copy.deepcopy(rule)
    check_choice(f"{name}.inference", algorithm.inference, ["personal", "global"])
    for phase in phases:
        if not isinstance(phase, Phase):
            raise _Refused(f"{name}.phases gives {phase!r}; give perada.data.Phase(name, epochs, steps)")
    some = tuple(range(max(2, min(clients, LARGEST // sum(value.numel() for value in initial.values())))))[:num_clients]
    first: Stacks = {}

    def checked_call(method: str, function: Callable[..., Any], *given: Any) -> Any:  # noqa: ANN401  # whatever it gives
        who = f"{name}.{method}"
        made = _tried(who, function, *given)
        if method == "initial_client_state":
            _check_stacks(who, made, made)
            first.update(made)
        elif method == "end_round":
            if not isinstance(made, tuple) or len(made) != 2:
                raise _Refused(f"{who} gives {type(made).__name__}; give what clients keep, and what they send")
            kept, update = made
            _check_stacks(f"{who}, in what clients keep,", kept, first, len(some))
            more = {key: value[0] for key, value in update.items() if key not in initial}  # for its own server_step
            _check_state(f"{who}, in what clients send,", update, initial | more, len(some), partial=True)
        elif method == "server_step":
            _check_state(who, made, initial, partial=True)
            _check_stacks(f"{who}, in server.state,", given[0].state, given[0].state)
        elif method == "broadcast":
            _check_state(who, made, made)
            more = {key: value.new_empty(value.shape[1:]) for key, value in made.items() if key not in initial}
            _check_state(who, made, initial | more, len(some), partial=True)
        elif method == "personal":
            _check_state(who, made, initial, len(some))
        return made

    try:
        rule.check(len(some))
    except ValueError:
        rule = Mean()
    given = tensor_names, initial, phases, num_clients, some, range(2), checked_call, num_classes
    turns = rounds_of(algorithm, _TriedRule(rule), *given, multilabel=multilabel)
    _, kept, global_state = list(turns)[-1]
    if algorithm.inference == "personal":
        checked_call("personal", algorithm.personal, kept, global_state)


def rounds_of(
    algorithm: Algorithm,
    rule: ServerRule,
    tensor_names: TensorNames,
    initial: State,
    phases: Sequence[Phase],
    num_clients: int,
    clients: tuple[int, ...],
    rounds: Iterable[int],
    call: Callable[..., Any] = lambda _, function, *given: function(*given),
    classes: int | None = None,
    changed: str = "",
    multilabel: bool = False,
) -> Iterator[tuple[State, Stacks, State]]:
    """What ``clients`` send and keep in each of ``rounds`` on made-up gradients, and the global state after it.

    ``call`` calls the algorithm's methods. See :class:`DryRunStep` for what follows it.
    """
    head = initial.get(f"{tensor_names.head_module}.weight")
    width = None if head is None else head.shape[1]
    global_state, server_state = initial, dict[str, State]()
    kept = {
        role: expand(state, len(clients))
        for role, state in call("initial_client_state", algorithm.initial_client_state, initial, tensor_names).items()
    }
    for round in rounds:
        given = Broadcast(global_state, tensor_names, round, clients, num_clients, 0, state=server_state)
        received = call("broadcast", algorithm.broadcast, given)
        opened = call("begin_round", algorithm.begin_round, kept, received, tensor_names)
        step = DryRunStep(algorithm, opened, kept, received, round, changed, classes, width, multilabel)
        for phase in phases:
            call("trainable_keys", step.begin, phase.name, tensor_names)
            call("client_step", algorithm.client_step, step)
            call("client_step", algorithm.client_step, step)
        kept, update = call("end_round", algorithm.end_round, step.finished(), kept, received, tensor_names)
        if update:
            updates, weights = Updates(clone(update)), client_weights("uniform", clients)  # a step may change them
            turn = round, clients, num_clients, tensor_names, 0, global_state, updates, weights, server_state, rule
            server = ServerStep(*turn, lambda student, *_, **__: student, partial(_predicted, classes or 2))
            global_state = global_state | call("server_step", algorithm.server_step, server)
            server_state = server.state
        yield update, kept, global_state


def _predicted(
    num_classes: int, previous: State, models: Mapping[str, Tensor], images: int, labelled: bool
) -> tuple[Tensor, Tensor | None]:
    """Made-up predictions (C, 1, K) on one image, and its labels."""
    found = torch.full((len(next(iter(models.values()))), 1, num_classes), 0.5)
    return found, torch.ones(1, num_classes) if labelled else None


def example_sent(algorithm: Algorithm, tensor_names: TensorNames, initial: State) -> State:
    """What a client sends in the first round, (1, ...), if it trains nothing."""
    kept = {role: expand(state, 1) for role, state in algorithm.initial_client_state(initial, tensor_names).items()}
    losses = torch.zeros(1, algorithm.modes) if algorithm.compares_models else None
    received = algorithm.broadcast(Broadcast(initial, tensor_names, 0, (0,), 1, 0, losses))
    return algorithm.end_round(algorithm.begin_round(kept, received, tensor_names), kept, received, tensor_names)[1]


class _Refused(ValueError):
    """What a trial has found."""


def _tried(who: str, function: Callable[..., T], *given: object) -> T:
    try:
        return function(*given)
    except _Refused:
        raise
    except Exception as error:  # whatever a class of the caller's own does
        reason = " ".join(str(error).split())[:200]
        raise _Refused(f"{who} fails in a round that is tried at set-up ({type(error).__name__}: {reason})") from error


class _TriedRule(ServerRule):
    """A rule whose results are looked at."""

    def __init__(self, rule: ServerRule) -> None:
        self.rule = rule

    def __call__(self, given: Aggregation) -> State:
        name = type(self.rule).__name__
        result: State = _tried(name, self.rule, given)
        _check_state(
            name,
            result,
            {key: given.previous.get(key, value[0]) for key, value in given.updates.gathered_all().items()},
        )
        _check_stacks(f"{name}, in given.state,", given.state, given.state)
        return result


def _check_stacks(who: str, found: object, expected: Mapping[str, State], clients: int | None = None) -> None:
    """Refuse what is not the states of certain roles."""
    if not isinstance(found, Mapping) or set(found) != set(expected):
        given = sorted(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
        raise _Refused(f"{who} gives {given} instead of states of the roles {sorted(expected)}")
    for role, state in found.items():
        _check_state(f"{who} gives {role!r}, which", state, state if clients is None else expected[role], clients)


def _check_state(who: str, found: object, expected: State, clients: int | None = None, partial: bool = False) -> None:
    """Refuse what is not tensors by name, with the shapes of ``expected`` behind an axis of ``clients``, if any."""
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise _Refused(f"{who} gives {type(found).__name__}; give tensors by name, {{name: tensor}}")
    for name, value in found.items():
        if name not in expected:
            raise _Refused(
                f"{who} gives {name!r}, and there is no trained tensor of that name; what else clients send goes into "
                "server.state (server.updates.part leaves names out of the mean)"
                if who.endswith("server_step")
                else f"{who} gives {name!r}, and there is no trained tensor of that name"
            )
        shape = (() if clients is None else (clients,)) + tuple(expected[name].shape)
        if tuple(value.shape) != shape or value.dtype != expected[name].dtype:
            wanted = f"{shape} of {expected[name].dtype}"
            raise _Refused(f"{who} gives {name!r} of shape {tuple(value.shape)} of {value.dtype} instead of {wanted}")
    missing = sorted(expected.keys() - found.keys())
    if missing and not partial:
        raise _Refused(f"{who} lacks {missing[0]!r}" + f" and {len(missing) - 1} more names" * (len(missing) > 1))


class DryRunStep:
    """Local steps without images, on made-up gradients; satisfies :class:`perada.algorithms.base.ClientStep`.

    It counts by stream the ``queries``, gradients that were asked for; those of ``changed`` are others than usual.
    There are logits of so many ``classes``; without a number they are refused. Representations are ``width`` wide.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        opened: Stacks,
        kept: Stacks,
        received: State,
        round: int = 0,
        changed: str = "",
        classes: int | None = None,
        width: int | None = None,
        multilabel: bool = False,
    ) -> None:
        self._width, self._multilabel = width, multilabel
        self.algorithm, self.kept, self.received, self.round = algorithm, kept, received, round
        self._changed, self._classes, self.phase, self.tensor_names = changed, classes, "", TensorNames((), ())
        self.states: Stacks = {role: clone(state) for role, state in opened.items()}
        self.queries: Counter[str] = Counter()

    def begin(self, phase: str, tensor_names: TensorNames) -> None:
        """Turn to a phase, and what it trains."""
        self.phase, self.tensor_names, self.states = phase, tensor_names, self.finished()
        for role, state in self.states.items():
            for key in self.algorithm.trainable_keys(role, phase, tensor_names, self.round):
                if key in state:
                    state[key].requires_grad_()

    def finished(self) -> Stacks:
        """What has come of the states, which are no longer trained."""
        return {role: {key: value.detach() for key, value in state.items()} for role, state in self.states.items()}

    def logits(self, states: str | State, stream: str | None = None) -> Tensor:
        """Made-up logits of two images."""
        if self._classes is None:
            raise no_logits(self.algorithm)
        return self.loss(states, stream).view(-1, 1, 1).expand(-1, 2, self._classes)

    def outputs(self, states: str | State, stream: str | None = None, training: bool = True) -> tuple[Tensor, Tensor]:
        """Made-up logits and representations of two images."""
        logits = self.logits(states, stream)
        return logits, 1 + logits[..., :1].expand(-1, -1, self._width or logits.shape[-1])

    def class_counts(self, classes: int) -> Tensor:
        """An image of each class."""
        if self._classes is None:
            raise no_logits(self.algorithm)
        return torch.ones(len(next(iter(self.received.values()))), classes)

    @property
    def labels(self) -> Tensor:
        """Both are of class 0, or have no label."""
        if self._classes is None:
            raise no_logits(self.algorithm)
        some = next(iter(self.received.values()))
        shape = (len(some), 2, self._classes) if self._multilabel else (len(some), 2)
        return torch.zeros(shape, dtype=torch.float32 if self._multilabel else torch.int64, device=some.device)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over both."""
        return values.mean(1)

    def loss(self, states: str | State | Tensor, stream: str | None = None) -> Tensor:
        """A loss of 0 with a made-up gradient, which depends on the states; of logits, their mean."""
        if isinstance(states, Tensor):
            return states.flatten(1).mean(1)
        if isinstance(states, str):
            stream, states = stream or states, self.states[states]
        stream = stream or next(iter(self.states))
        self.queries[stream] += 1
        purpose = f"rehearsal/{stream}" + "/changed" * (stream == self._changed)
        random = generator(0, purpose, self.round, self.queries[stream])
        asked = [value for _, value in sorted(states.items()) if value.requires_grad]
        slopes = [(torch.rand(value.shape, generator=random) - 0.5).to(value) for value in asked]
        terms = [(slope * value + value**2 / 2).flatten(1).sum(1) for slope, value in zip(slopes, asked, strict=True)]
        some = next(iter(states.values()))
        total = sum(terms, start=torch.zeros(len(some), device=some.device))
        return total - total.detach()

    def restart(self, role: str, start: State) -> None:
        """Set a role's trained parameters."""
        with torch.no_grad():
            for key, value in self.states[role].items():
                if value.requires_grad:
                    value.copy_(start[key])

    def descend(
        self,
        role: str | tuple[str, ...],
        loss: Tensor | None = None,
        *,
        pull: tuple[float, State] | None = None,
        slope: State | None = None,
    ) -> None:
        """A step of gradient descent at a rate of 0.1."""
        roles = (role,) if isinstance(role, str) else role
        leaves = [(key, v) for name in roles for key, v in self.states[name].items() if v.requires_grad]
        for _, leaf in leaves:
            leaf.grad = None
        clients = len(next(iter(self.received.values())))
        if loss is not None and loss.shape != (clients,):
            raise ValueError(f"the loss has shape {tuple(loss.shape)} instead of ({clients},), one value a client")
        if loss is not None:
            if not loss.requires_grad:
                raise ValueError(
                    f"the loss of step.descend({role!r}) depends on nothing that phase {self.phase!r} trains "
                    f"({type(self.algorithm).__name__}.trainable_keys); choose an adapter that trains it, "
                    "or skip the step"
                )
            loss.sum().backward()
        with torch.no_grad():
            for key, leaf in leaves:
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                gradient = gradient if pull is None else gradient + pull[0] * (leaf - pull[1][key])
                leaf.grad = gradient if slope is None else gradient + slope[key]
                leaf -= 0.1 * leaf.grad


def no_logits(algorithm: Algorithm) -> ValueError:
    """What is wrong with an algorithm that looks at outputs or labels themselves, where training is private."""
    return ValueError(
        f"privacy cannot be used with {algorithm.kind}: its local step reads the model's outputs on private "
        "images (step.logits, step.outputs), or their labels (step.labels, step.class_counts), which no noise covers; "
        "choose another algorithm, or client_privacy; in one of your own use step.loss, whose gradient is private"
    )


def no_counts(algorithm: Algorithm) -> ValueError:
    """What is wrong with an algorithm that needs to know the labels of all of a client's images."""
    return ValueError(
        f"algorithm {algorithm.kind} needs each client's number of images of each class, and images have "
        "several labels, or labels are not known before they are read; choose another algorithm"
    )
