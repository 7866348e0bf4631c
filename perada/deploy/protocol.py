# SPDX-License-Identifier: Apache-2.0
"""The protocol between a server and its sites: orders and answers, and their bytes.

A message is a safetensors file whose metadata hold a header in JSON; nothing in it is ever unpickled. It is checked
before any of its tensors is made: its length, that of its table, and the names, number formats and shapes against those
that are expected. Torch is imported where tensors are made, so that a process that only passes bytes on needs none.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from perada.core.checks import check_choice, check_number, check_whole
from perada.core.text import printable

if TYPE_CHECKING:
    from torch import Tensor

    from perada.core.states import State

PROTOCOL = 1
"""Version of the messages, which each of them names. A change that the other side would not understand raises it."""
RequestKind = Literal[
    "join", "train", "tune", "evaluate", "keys", "shares", "hold", "open", "mask", "confirm", "reveal"
]
"""Say who you are; train a round; fine-tune after the last one; score the models; the steps of a secure sum."""
SUM_KINDS = ("keys", "shares", "hold", "open", "mask", "confirm", "reveal")
"""Kinds of the steps of a secure sum, in their order; ``open`` only where sites disagree."""
ResponseCode = Literal[
    "ok",
    "unapproved",  # the recipe's digest is not on the site's list
    "exhausted",  # the site's budget of ε or of rounds is spent
    "past",  # the round is over for the site
    "future",  # the recipe has fewer rounds
    "other",  # another message came for this round before, or the site has another number in this run
    "broken",  # its training became NaN or infinite, or a sample could not be read
    "malformed",  # the message is not what the recipe asks for
    "protocol",  # the message is of another version of the protocol
    "failed",  # anything else; the site's log says what
]
MAY_SEND = ("sizes", "counts", "scores", "losses", "epsilon")
"""What a site may be allowed to send beside updates."""
ROUNDS, CLIENTS, STEPS, IMAGES, MODELS, RANKS, ENTRIES = 10**6, 10**6, 10**6, 10**12, 1000, 10**6, 64
"""Numbers above these are refused."""
DIMENSIONS = 16
"""Dimensions that a tensor may have."""
TABLE = 2**22
"""Bytes that the table of a message's tensors, with its header, may take."""
MAGNITUDE, COUNT = 1e6, 2**40
"""A number of a larger size, or a counter above it, is refused."""
SECTION = "perada"
Spec = dict[str, tuple[str, tuple[int, ...]]]
"""Number format, as safetensors call it, and shape of each tensor that is expected."""


class RefusalError(ValueError):
    """What came is not a message that could be meant, or a site does not do what it asks.

    The other side learns the code alone; the text is for the log of who refused, on one line.
    """

    def __init__(self, text: str, code: ResponseCode = "malformed") -> None:
        super().__init__(printable(text[:300]))
        self.code: ResponseCode = code


def refuse(refused: bool, text: str, code: ResponseCode = "malformed") -> None:
    """Raise :class:`RefusalError` if something is to be refused."""
    if refused:
        raise RefusalError(text, code)


def display_round(kind: str, round: int, of: str = "update") -> int:
    """The round of a message as people count it, from 1.

    Messages and files have the number of rounds before it. A message about models after a round (to score or fine-tune
    them, or to add up their scores) comes when that round is over, and so has the number that people give the round.

    >>> display_round("train", 0), display_round("evaluate", 1), display_round("mask", 1, "scores")
    (1, 1, 1)
    """
    after = kind in ("evaluate", "tune") or of == "scores"
    return round if after else round + 1


@dataclass(frozen=True)
class Header:
    """What a message says beside its tensors; the fields are checked when it is made."""

    protocol: int = field(default=PROTOCOL, kw_only=True)

    @classmethod
    def read(cls, header: Mapping[str, Any]) -> Self:
        """The one that a header was made of; Refused if there is none, or first if its protocol is another."""
        found = header.get("protocol")
        refuse(
            type(found) is not int or found != PROTOCOL,
            f"the message is of protocol {found}, and this side speaks protocol {PROTOCOL}; install the same release "
            "of perada at the server and at its sites",
            "protocol",
        )
        try:
            return cls(**header)
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise RefusalError(str(error)) from None


@dataclass(frozen=True)
class Request(Header):
    """What the server asks of a site."""

    kind: RequestKind
    run: str  # id of the federation's run, which stays when it is resumed
    recipe: str  # digest of the recipe and the frozen weights
    round: int = 0  # rounds before it; of what comes after a round, that one is among them
    client: int = 0  # the site's number in the run
    clients: int = 1  # number of sites in the run
    factor: float = 1.0  # of the learning rates
    strides: dict[str, list[int]] = field(default_factory=dict)  # of tensors that are not laid out row by row
    models: int = 0  # of the ensemble that is sent to be scored, as "members"; 0 if none is
    norm: float = 0.0  # S of the round, where sites clip their changes and it moves
    rank: int = 0  # of the site's LoRA, to which what travels in a round is cut; 0 for that of the adapter
    attempt: int = 0  # at the secure sum of the round
    of: Literal["update", "scores"] = "update"  # what is added up
    sums: dict[str, Any] = field(default_factory=dict)  # what other sites say in a step of it

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(RequestKind))
        _check_hexadecimal("run", self.run, 32)
        _check_hexadecimal("recipe", self.recipe, 64)
        limits = {"round": ROUNDS, "clients": CLIENTS, "models": MODELS, "rank": RANKS, "attempt": ROUNDS}
        for name, most in limits.items():
            check_whole(name, getattr(self, name), 0, most=most)
        check_whole("client", self.client, 0, most=self.clients - 1)
        check_number("factor", self.factor, least=0, most=1e6)
        check_number("norm", self.norm, least=0, most=1e200)
        _check_dictionary("strides", self.strides)
        for key, strides in self.strides.items():
            if not isinstance(strides, list) or len(strides) > DIMENSIONS:
                raise ValueError(f"strides of {key!r} are not a list of up to {DIMENSIONS} numbers")
            for stride in strides:
                check_whole(f"a stride of {key!r}", stride, 0, most=COUNT)
        check_choice("of", self.of, ("update", "scores"))
        _check_dictionary("sums", self.sums)

    @property
    def display_round(self) -> int:
        """The round as people count it, from 1: the one that is trained, or the one whose models are scored."""
        return display_round(self.kind, self.round, self.of)

    def __str__(self) -> str:
        sums = f" ({self.of}, attempt {self.attempt + 1})" if self.kind in SUM_KINDS else ""
        return f"{self.kind}{sums}, round {self.display_round}"


@dataclass(frozen=True)
class Response(Header):
    """What a site answers.

    Attributes:
        code: ``ok``, or why not.
        answers: Digest of the message that it answers.
        facts: What the site allows: ``size`` (training images), ``tests`` (test images), ``labels`` (a digest of the
            classes), ``losses`` by role, ``counts`` (right predictions and all) and ``scores`` (by metric) of the
            ``personal`` and the ``global`` model, and ``epsilon`` by ledger.
        sums: What the site says in a step of a secure sum.
    """

    code: ResponseCode
    answers: str
    facts: dict[str, Any] = field(default_factory=dict)
    sums: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("code", self.code, get_args(ResponseCode))
        _check_hexadecimal("answers", self.answers, 64)
        _check_dictionary("sums", self.sums)
        for name, value in self.facts.items():
            if name in ("size", "tests"):
                check_whole(name, value, 0, most=IMAGES)
            elif name == "labels":
                _check_hexadecimal(name, value, 64)
            elif name == "losses":
                _check_numbers(value, optional=False)
            elif name == "epsilon":
                # Nobody spends less than nothing, and a record with such an ε could not be read again.
                _check_numbers(value, optional=True, least=0)
            elif name in ("counts", "scores") and set(value) <= {"personal", "global"}:
                for found in value.values():
                    if name == "scores":
                        _check_numbers(found, optional=True)
                    else:
                        right, total = found
                        check_whole("all predictions", total, most=IMAGES)
                        check_whole("right predictions", right, 0, most=total)
            else:
                raise ValueError(f"a fact {name!r}")


def _check_hexadecimal(name: str, value: object, digits: int) -> None:
    if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
        raise ValueError(f"{name}={value!r} has not {digits} hexadecimal digits")


def _check_dictionary(name: str, value: object) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name}={value!r} is no dictionary")


def _check_numbers(values: Mapping[str, object], optional: bool, least: float = -1e12) -> None:
    """Refuse what is not a few finite numbers by name; None, if ``optional``, stands for what is none, or infinite."""
    check_whole("the number of entries", len(values), 0, most=ENTRIES)
    for key, value in values.items():
        if not re.fullmatch(r"[\w.-]{1,64}", key):
            raise ValueError(f"an entry {key!r}")
        check_number(key, value, least=least, most=1e12, optional=optional)


def digest(message: bytes) -> str:
    """By which an answer names the message that it answers."""
    return hashlib.sha256(message).hexdigest()


def canonical(content: object) -> bytes:
    """The bytes of a JSON value, the same whatever the order of its entries; a ValueError of NaN and infinity."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def pack(header: Header | Mapping[str, Any], tensors: "Mapping[str, Tensor] | None" = None) -> bytes:
    """A message of a header, which is of plain types, and of tensors.

    >>> read_header(pack({"code": "ok"}))
    {'code': 'ok'}
    """
    plain = header if isinstance(header, Mapping) else vars(header)
    text = canonical(plain).decode()
    if not tensors:
        table = json.dumps({"__metadata__": {SECTION: text}}).encode()
        return len(table).to_bytes(8, "little") + table
    from safetensors.torch import save

    # Copies, where there are several, since safetensors refuses tensors that share memory, as those of two roles may.
    several = len(tensors) > 1
    ready = {name: value.detach().to("cpu", copy=several).contiguous() for name, value in tensors.items()}
    return bytes(save(ready, {SECTION: text}))


def read_header(message: bytes, most: int = TABLE) -> dict[str, Any]:
    """The header of a message whose table has ``most`` bytes, if it is one; its tensors are not looked at."""
    return _parts(message, most)[0]


def tensor_sizes(message: bytes) -> dict[str, int]:
    """Bytes of each tensor of a message, by name; Refused if it is none."""
    try:
        offsets = {name: entry["data_offsets"] for name, entry in _parts(message)[1].items()}
        return {name: end - begin for name, (begin, end) in offsets.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise RefusalError(f"a tensor is not described ({error!r})") from None


def spec_of(state: "State") -> Spec:
    """What :func:`unpack` expects of a state like this one."""
    from safetensors.torch import _TYPES

    formats = {dtype: name for name, dtype in _TYPES.items()}
    return {key: (formats[value.dtype], tuple(value.shape)) for key, value in state.items()}


def max_message_size(state: "State") -> int:
    """Bytes that a message with these tensors may have."""
    return 8 + TABLE + sum(value.nbytes for value in state.values())


def unpack(message: bytes, expected: Spec) -> tuple[dict[str, Any], "State"]:
    """Header and tensors of a message that has exactly the ``expected`` tensors.

    Raises:
        Refused: If the message is none, has other tensors, or a value is not finite or out of all proportion.
    """
    header, table = _parts(message)
    try:
        found = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in table.items()}
    except (KeyError, TypeError) as error:
        raise RefusalError(f"a tensor is not described ({error!r})") from None
    if found != expected:
        name = min(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise RefusalError(f"the tensor {name[:80]!r} is {found.get(name)}, not {expected.get(name)}")
    if not expected:
        return header, {}
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        state: State = load(message)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise RefusalError(f"it is not a safetensors file ({error})") from None
    for name, value in state.items():
        if expected[name][0] == "U64":  # numbers under masks, which may be any
            continue
        least, most = (-MAGNITUDE, MAGNITUDE) if value.is_floating_point() else (0, COUNT)
        # Of NaN, least and largest are NaN.
        if value.numel() and not least <= float(value.min()) <= float(value.max()) <= most:
            raise RefusalError(f"the tensor {name!r} has values from {float(value.min())} to {float(value.max())}")
    return header, {name: state[name] for name in expected}


def _parts(message: bytes, most: int = TABLE) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header, and the table of tensors."""
    size = int.from_bytes(message[:8], "little")
    if len(message) < 8 or size > min(most, len(message) - 8):
        raise RefusalError(f"the table is said to have {size} bytes of {len(message)}")
    try:
        table = json.loads(message[8 : 8 + size])
        # NaN and infinity are a KeyError
        header = json.loads(table.pop("__metadata__")[SECTION], parse_constant=dict[str, float]().__getitem__)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise RefusalError(f"its table cannot be read ({type(error).__name__})") from None
    if not isinstance(header, dict):
        raise RefusalError("its header is not a dictionary")
    return header, table
