# SPDX-License-Identifier: Apache-2.0
"""Models whose outputs are NaN or infinite for some images, so that they have no predictions and no scores."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from perada.core.text import abbreviated

REMEDY = (
    "lower the learning rate, train in a precision with a larger range (bf16-mixed or 32-true), or check these images "
    "and the network, which may divide by 0 or take the logarithm of 0"
)
"""What to do about outputs that are NaN or infinite."""


class FailedOutputsError(ValueError):
    """Raised at the end of a command whose models have outputs that are NaN or infinite."""


@dataclass(frozen=True)
class FailedOutputs:
    """The test images for which outputs of a model are NaN or infinite.

    Attributes:
        model: ``personal`` for the model of a client, whichever clients the images are of; ``global`` for the global
            model.
        client: The client whose model it is or, of the global model, whose images they are.
        images: Number of images.
        since: Number of rounds after which it was noticed first, without an evaluation without such outputs since.
    """

    model: Literal["personal", "global"]
    client: int
    images: int
    since: int

    def describe(self, client_names: Sequence[str] | None = None) -> str:
        """Describe model, images and round for a message.

        Args:
            client_names: Names of the clients.

        >>> FailedOutputs("global", 1, 1, 0).describe(["A", "B"])
        "the global model on 1 test image of client 1 ('B'), since before round 1"
        >>> FailedOutputs("personal", 0, 12, 3).describe()
        'the model of client 0 on 12 test images, since round 3'
        """
        client_label = _label_client(self.client, client_names)
        plural = "" if self.images == 1 else "s"
        count = f"{self.images} test image{plural}"
        first_round = f"round {self.since}" if self.since else "before round 1"
        if self.model == "global":
            return f"the global model on {count} of {client_label}, since {first_round}"
        return f"the model of {client_label} on {count}, since {first_round}"

    def record(self) -> dict[str, Any]:
        """Return the attributes as JSON."""
        return asdict(self)


def _label_client(client: int, client_names: Sequence[str] | None) -> str:
    """Return the number of a client, with its name if there are names."""
    if client_names is None:
        return f"client {client}"
    return f"client {client} ({client_names[client]!r})"


def failed_of_records(records: Sequence[Mapping[str, Any]]) -> list[FailedOutputs]:
    """Return what the entry ``failed_outputs`` of a run's metrics describes."""
    return [FailedOutputs(**record) for record in records]


def describe_failed(
    failed_outputs: Sequence[FailedOutputs], client_names: Sequence[str] | None, anonymous: bool = False
) -> str:
    """Return a message about outputs that are NaN or infinite.

    Args:
        failed_outputs: The models, at least one.
        client_names: Names of the clients.
        anonymous: Whether to say only how many there are: in a private run no log may name clients.
    """
    if anonymous:
        personal = [entry for entry in failed_outputs if entry.model == "personal"]
        whose = f"the models of {len(personal)} clients" if personal else "the global model"
    else:
        whose = abbreviated([entry.describe(client_names) for entry in failed_outputs])
    return f"outputs are NaN or infinite: {whose}. Such a model has no score, and means that include it are NaN"


def describe_failed_teachers(
    teachers: Sequence[int | None], client_names: Sequence[str] | None, anonymous: bool
) -> str:
    """Describe the teachers of a distillation whose outputs are NaN or infinite.

    Args:
        teachers: The client whose model each of them is; None for the model of no single client. At least one.
        client_names: Names of the clients.
        anonymous: Whether to say only how many there are: in a private run no log may name clients.

    >>> describe_failed_teachers([1, None, None], ["A", "B"], anonymous=False)
    "client 1 ('B') and 2 teachers that are no client's model"
    >>> describe_failed_teachers([0, 1], None, anonymous=True)
    '2 teachers'
    """
    if anonymous:
        return "a teacher" if len(teachers) == 1 else f"{len(teachers)} teachers"
    described = []
    for client in teachers:
        if client is not None:
            described.append(_label_client(client, client_names))
    num_others = teachers.count(None)
    parts = []
    if described:
        parts.append(abbreviated(described))
    if num_others == 1:
        parts.append("a teacher that is no client's model")
    elif num_others:
        parts.append(f"{num_others} teachers that are no client's model")
    return " and ".join(parts)


def dated(current: Sequence[FailedOutputs], earlier: Sequence[FailedOutputs]) -> list[FailedOutputs]:
    """Return the models found in an evaluation, with the round in which each was noticed first.

    Args:
        current: The models of this evaluation.
        earlier: Those of the evaluation before.
    """
    since = {(entry.model, entry.client): entry.since for entry in earlier}
    dated_entries = []
    for entry in current:
        first = since.get((entry.model, entry.client), entry.since)
        dated_entries.append(FailedOutputs(entry.model, entry.client, entry.images, first))
    return dated_entries
