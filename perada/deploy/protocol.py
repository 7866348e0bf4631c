# SPDX-License-Identifier: Apache-2.0
"""The protocol between a server and its sites: orders and answers, their bytes, and what carries them.

A message is a safetensors file whose metadata hold a header in JSON; nothing in it is ever unpickled. It is checked
before any of its tensors is made: its length, that of its table, and the names, number formats and shapes against those
that are expected. Torch is imported where tensors are made, so that a process that only passes bytes on needs none.
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from perada.core.text import printable

if TYPE_CHECKING:
    from torch import Tensor

    from perada.core.states import State

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


TABLE = 2**22
"""Bytes that the table of a message's tensors, with its header, may take."""
MAGNITUDE = 1e6
"""A number of a larger size is refused."""
COUNT = 2**40
"""A counter above it is refused."""
SECTION = "perada"
Spec = dict[str, tuple[str, tuple[int, ...]]]
"""Number format, as safetensors call it, and shape of each tensor that is expected."""


def digest(message: bytes) -> str:
    """By which an answer names the message that it answers."""
    return hashlib.sha256(message).hexdigest()


def pack(header: Mapping[str, Any], tensors: "Mapping[str, Tensor] | None" = None) -> bytes:
    """A message of a header in plain types, and of tensors.

    >>> header_of(pack({"code": "ok"}))
    {'code': 'ok'}
    """
    text = json.dumps(header, allow_nan=False, sort_keys=True, separators=(",", ":"))
    if not tensors:
        table = json.dumps({"__metadata__": {SECTION: text}}).encode()
        return len(table).to_bytes(8, "little") + table
    from safetensors.torch import save
    from torch import contiguous_format

    # Copies, since safetensors refuses tensors that share memory, as those of two roles may.
    ready = {
        name: value.detach().to("cpu", copy=True, memory_format=contiguous_format) for name, value in tensors.items()
    }
    return bytes(save(ready, {SECTION: text}))


def header_of(message: bytes, most: int = TABLE) -> dict[str, Any]:
    """The header of a message, whose tensors are not looked at.

    Args:
        message: As it came.
        most: Bytes that its table may have; a party's own files may have more than a message.

    Raises:
        Malformed: If the message is none.
    """
    return _parts(message, most)[0]


def table_of(message: bytes) -> dict[str, Any]:
    """What a message says of its tensors, unchecked; Malformed if it is not a message."""
    return _parts(message)[1]


def spec_of(state: "State") -> Spec:
    """What :func:`unpack` expects of a state like this one."""
    from safetensors.torch import _TYPES

    formats = {dtype: name for name, dtype in _TYPES.items()}
    return {key: (formats[value.dtype], tuple(value.shape)) for key, value in state.items()}


def largest(expected: Spec) -> int:
    """Bytes that a message with these tensors may have.

    >>> largest({"a": ("F32", (2, 3)), "b": ("BOOL", ())}) - largest({})
    25
    """
    return 8 + TABLE + sum(math.prod(shape) * _width(kind) for kind, shape in expected.values())


def _width(kind: str) -> int:
    """Bytes of a number in a format such as ``BF16`` or ``F8_E4M3``."""
    bits = re.search(r"\d+", kind)
    return 1 if bits is None else int(bits[0]) // 8


def unpack(message: bytes, expected: Spec) -> tuple[dict[str, Any], "State"]:
    """Header and tensors of a message that has exactly the ``expected`` tensors.

    Raises:
        Malformed: If the message is none, has other tensors, or a value is not finite or out of all proportion.
    """
    header, table = _parts(message)
    found = {}
    for name, entry in table.items():
        try:
            found[name] = str(entry["dtype"]), tuple(entry["shape"])
        except (KeyError, TypeError) as error:
            raise Malformed(f"the tensor {name[:80]!r} is not described ({error!r})") from None
    if found != expected:
        names = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise Malformed(f"the tensor {names[0][:80]!r} is {found.get(names[0])}, not {expected.get(names[0])}")
    if not expected:
        return header, {}
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        state: State = load(message)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise Malformed(f"it is not a safetensors file ({error})") from None
    for name, value in state.items():
        _check_values(name, value)
    return header, {name: state[name] for name in expected}


def _parts(message: bytes, most: int = TABLE) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header, and the table of tensors."""
    size = int.from_bytes(message[:8], "little")
    if len(message) < 8 or size > min(most, len(message) - 8):
        raise Malformed(f"the table is said to have {size} bytes of {len(message)}")
    try:
        table = json.loads(message[8 : 8 + size])
        header = json.loads(table.pop("__metadata__")[SECTION], parse_constant=_refuse)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise Malformed(f"its table cannot be read ({type(error).__name__})") from None
    if not isinstance(header, dict):
        raise Malformed("its header is not a dictionary")
    return header, table


def _refuse(word: str) -> float:
    raise ValueError(word)


def _check_values(name: str, value: "Tensor") -> None:
    """Refuse NaN, infinities, and numbers that no training gives."""
    if not value.numel():
        return
    if value.is_floating_point():
        largest = float(value.abs().max())  # of NaN, NaN
        if not largest <= MAGNITUDE:
            raise Malformed(f"the tensor {name[:80]!r} has a value of size {largest}")
    elif int(value.min()) < 0 or int(value.max()) > COUNT:
        raise Malformed(f"the counter {name[:80]!r} is out of range")


@dataclass(frozen=True)
class Failure:
    """What came instead of a reply: ``unreachable``, ``late``, ``crashed``, ``refused`` or ``malformed``."""

    code: str  # never a text of the site's


class Transport(Protocol):
    """Carries messages to sites by their registered names.

    Attributes:
        most: Bytes that a reply may have; a longer one is ``malformed``.
    """

    most: int

    def names(self) -> list[str]:
        """Registered names of the sites that are connected now."""

    def exchange(self, messages: Mapping[str, bytes], enough: int, deadline: float) -> dict[str, bytes | Failure]:
        """Send each site its message; return when ``enough`` replies came or ``deadline`` seconds passed.

        Sites that did not answer are ``Failure("late")``.
        """


class Worker(Protocol):
    """Answers a site's messages (:class:`perada.deploy.site.worker.SiteWorker`)."""

    def answer(self, message: bytes, run: str) -> bytes:
        """The reply to a message."""


class LocalTransport:
    """Carries messages to workers in this process, one after another, for dry runs and tests.

    Args:
        workers: By name.

    Attributes:
        most: Bytes that a reply may have.
    """

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self.workers, self.most = dict(workers), sys.maxsize

    def names(self) -> list[str]:
        """The names of the workers."""
        return list(self.workers)

    def exchange(self, messages: Mapping[str, bytes], enough: int, deadline: float) -> dict[str, bytes | Failure]:
        """Have each site answer in turn, until ``enough`` did or ``deadline`` seconds passed."""
        found: dict[str, bytes | Failure] = {}
        end, answered = monotonic() + deadline, 0
        for name, message in messages.items():
            if answered >= enough or monotonic() > end:
                found[name] = Failure("late")
            elif name not in self.workers:
                found[name] = Failure("unreachable")
            else:
                reply = self.workers[name].answer(message, "local")
                found[name] = reply if len(reply) <= self.most else Failure("malformed")
                answered += 1
        return found
