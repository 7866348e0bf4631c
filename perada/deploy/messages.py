# SPDX-License-Identifier: Apache-2.0
"""What the server asks of a site and what a site answers, but for the tensors. Nothing here needs torch."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from perada.core.text import printable

Kind = Literal["join", "train", "tune", "evaluate"]
"""Say who you are; train a round; fine-tune after the last one; score the models."""
Code = Literal[
    "ok",
    "unapproved",  # the recipe's digest is not on the site's list
    "exhausted",  # the site's budget of ε or of rounds is spent
    "past",  # the round is over for the site
    "future",  # the recipe has fewer rounds
    "other",  # another message came for this round before, or the site has another number in this run
    "busy",  # the site works on another message
    "broken",  # its training became NaN or infinite, or a sample could not be read
    "malformed",  # the message is not what the recipe asks for
    "failed",  # anything else; the site's log says what
]
SENDABLE = ("sizes", "counts", "scores", "losses", "epsilon")
"""What a site may be allowed to send beside updates."""
ROUNDS, CLIENTS, STEPS, IMAGES = 10**6, 10**6, 10**6, 10**12
"""Numbers above these are refused."""


class Malformed(ValueError):
    """What came is not a message that could be meant; the text is for the log of who found it, on one line."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


@dataclass(frozen=True)
class Order:
    """What the server asks of a site.

    Attributes:
        kind: What is to be done.
        run: Id of the federation's run, which stays when it is resumed.
        recipe: Digest of the recipe and the frozen weights.
        round: Counted from 0.
        client: The site's number in the run.
        clients: Number of sites in the run.
        factor: Of the learning rates.
        lengths: Steps of each phase of the round's longest site; empty if they are not known.
        plain: Whether the server's tensors are laid out row by row, or else as the network's: last bits depend on it.
    """

    kind: Kind
    run: str
    recipe: str
    round: int = 0
    client: int = 0
    clients: int = 1
    factor: float = 1.0
    lengths: tuple[int, ...] = ()
    plain: bool = False

    @classmethod
    def read(cls, header: Mapping[str, Any]) -> "Order":
        """The order of a message's header.

        Raises:
            Malformed: If it is none.
        """
        if set(header) != set(cls.__dataclass_fields__):
            raise Malformed(f"an order has {sorted(header)}")
        lengths = header["lengths"]
        if not isinstance(lengths, list) or len(lengths) > 16:
            raise Malformed(f"lengths={str(lengths)[:80]}")
        order = cls(**{**header, "lengths": tuple(lengths)})
        if order.kind not in get_args(Kind):
            raise Malformed(f"kind={str(order.kind)[:80]}")
        for name, size in (("run", 32), ("recipe", 64)):
            value = getattr(order, name)
            if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{size}}}", value):
                raise Malformed(f"{name}={str(value)[:80]}")
        _whole("round", order.round, ROUNDS)
        _whole("clients", order.clients, CLIENTS)
        _whole("client", order.client, order.clients - 1)
        for length in order.lengths:
            _whole("a length", length, STEPS)
        _whole("all lengths", sum(order.lengths), STEPS)
        _number("factor", order.factor, 0, 1e6)
        if not isinstance(order.plain, bool):
            raise Malformed(f"plain={str(order.plain)[:80]}")
        return order

    def header(self) -> dict[str, Any]:
        """In plain types."""
        return asdict(self)


@dataclass(frozen=True)
class Answer:
    """What a site answers.

    Attributes:
        code: ``ok``, or why not.
        answers: Digest of the message that it answers.
        facts: What the site allows: ``size`` (training images), ``tests`` (test images), ``labels`` (a digest of the
            classes), ``losses`` by role, ``counts`` (right predictions and all) and ``scores`` (by metric) of the
            ``personal`` and the ``global`` model, and ``epsilon`` by ledger.
    """

    code: Code
    answers: str
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, header: Mapping[str, Any], answers: str) -> "Answer":
        """The answer of a reply's header to the message with the digest ``answers``.

        Raises:
            Malformed: If it is none, or answers another message.
        """
        if set(header) != {"code", "answers", "facts"} or not isinstance(header["facts"], dict):
            raise Malformed(f"an answer has {sorted(header)}")
        if header["code"] not in get_args(Code):
            raise Malformed(f"code={str(header['code'])[:80]}")
        if header["answers"] != answers:
            raise Malformed("it answers another message")
        for name, value in header["facts"].items():
            _fact(name, value)
        return cls(**header)

    def header(self) -> dict[str, Any]:
        """In plain types."""
        return asdict(self)


def _fact(name: str, value: object) -> None:
    """Refuse what no site of perada's sends."""
    if name in ("size", "tests"):
        _whole(name, value, IMAGES)
    elif name == "labels":
        if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
            raise Malformed(f"labels={str(value)[:80]}")
    elif name in ("losses", "epsilon") and isinstance(value, dict):
        _numbers(name, value, absent=name == "epsilon")
    elif name in ("counts", "scores") and isinstance(value, dict) and set(value) <= {"personal", "global"}:
        for model, found in value.items():
            if name == "scores" and isinstance(found, dict):
                _numbers(f"scores of {model}", found)
            elif name == "counts" and isinstance(found, list) and len(found) == 2:
                _whole("all predictions", found[1], IMAGES, least=1)
                _whole("right predictions", found[0], found[1])
            else:
                raise Malformed(f"{name} of {model}")
    else:
        raise Malformed(f"a fact {str(name)[:80]!r}")


def _numbers(name: str, values: Mapping[str, object], absent: bool = True) -> None:
    """Refuse what is not a few finite numbers by name; None, if it may be ``absent``, for what is none, or infinite."""
    if len(values) > 64:
        raise Malformed(f"{name} has {len(values)} entries")
    for key, value in values.items():
        if not re.fullmatch(r"[\w.-]{1,64}", key):
            raise Malformed(f"{name} has an entry {key[:80]!r}")
        if value is not None or not absent:
            _number(name, value, -1e12, 1e12)


def _whole(name: str, value: object, most: int, least: int = 0) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Malformed(f"{name}={str(value)[:80]}")


def _number(name: str, value: object, least: float, most: float) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not math.isfinite(float(str(value))) or not least <= float(str(value)) <= most:
        raise Malformed(f"{name}={str(value)[:80]}")
