# SPDX-License-Identifier: Apache-2.0
"""Requests and responses between a server and its sites, and how they are encoded.

A message is a safetensors file whose metadata hold a header in JSON; nothing in it is ever unpickled. Before a tensor
is made, the length of the message and of its table are checked, and names, dtypes and shapes are compared with those
that are expected. Torch is imported only where tensors are made, so that a process that passes bytes on needs none.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, get_args

from perada.core.checks import check_choice, check_integer, check_number
from perada.core.text import printable
from perada.system.tensor_tables import SIZE_BYTES, table_size, tensors_begin, with_size

if TYPE_CHECKING:
    from torch import Tensor

    from perada.core.states import State

PROTOCOL = 1
"""Version of the messages, which each of them names. A change that the other side would not understand raises it."""
RequestKind = Literal[
    "join",
    "train",
    "tune",
    "evaluate",
    "count",
    "compare",
    "keys",
    "shares",
    "hold",
    "open",
    "mask",
    "confirm",
    "reveal",
]
"""Join the run; train a round; fine-tune after the last round; score the models; make the vector of a job without
training; compare it with the sum over sites; take a step of a secure sum."""
JobKind = Literal["survey", "evaluation"]
"""A job without training: one secure sum of a vector of integers from each site (:mod:`perada.deploy.jobs`)."""
JOB_KINDS = get_args(JobKind)
Summand = Literal["update", "scores", "survey", "evaluation"]
"""What the sites add up in a secure sum: updates of a round, scores of its models, or the vectors of a job."""
SUM_KINDS = ("keys", "shares", "hold", "open", "mask", "confirm", "reveal")
"""The steps of a secure sum in their order; ``open`` only where sites disagree."""
ResponseCode = Literal[
    "ok",
    "unapproved",  # the recipe's digest is not on the site's list
    "exhausted",  # the site's budget of ε or of rounds is spent
    "past",  # the site has finished the round
    "future",  # the recipe has fewer rounds
    "other",  # another message came for this round before, or the site has another number in this run
    "broken",  # training became NaN or infinite, or a sample could not be read
    "malformed",  # the message is not what the recipe requires
    "protocol",  # the message is of another version of the protocol
    "failed",  # anything else; the reason is in the site's log
]
MAY_SEND = ("sizes", "counts", "scores", "losses", "epsilon", "survey")
"""What a site may allow to be sent beside updates."""
MAX_ROUNDS = 10**6
MAX_CLIENTS = 10**6
MAX_STEPS = 10**6
MAX_IMAGES = 10**12
MAX_MODELS = 1000
MAX_RANK = 10**6
MAX_ENTRIES = 64
"""Largest number of entries of a dictionary in a response."""
MAX_SUMMANDS = 2**16
"""Largest number of sums of a metric in a response."""
MAX_SUM = 1e30
"""Largest magnitude of such a sum."""
MAX_DIMENSIONS = 16
"""Largest number of dimensions of a tensor."""
MAX_TABLE_BYTES = 2**22
"""Largest size of the table of a message's tensors, with its header."""
MAX_MAGNITUDE = 1e6
"""Largest magnitude of a floating-point number in a tensor."""
MAX_COUNT = 2**40
"""Largest value of an integer in a tensor."""
SCORED_MODELS = ("both", "global", "personal")
"""What a site scores: its personal model, the global one, and predictions with both models."""
_SECTION = "perada"
"""Key of the header among the metadata of the safetensors file."""
Spec = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype, as safetensors names it, and shape of each tensor that is expected."""


class RejectionError(ValueError):
    """Raised if a message is malformed or not allowed.

    Only the code is sent to the other side. The text, a single line, is for the log of the side that rejects it.

    Args:
        text: Reason, truncated to 300 characters.
        code: Code sent to the other side.
    """

    def __init__(self, text: str, code: ResponseCode = "malformed") -> None:
        super().__init__(printable(text[:300]))
        self.code: ResponseCode = code


def display_round(request_kind: RequestKind, round: int, summand: Summand = "update") -> int:
    """Return the round of a message as users count it, from 1.

    Messages carry the number of finished rounds. Those sent after a round, to score or fine-tune its models or to add
    up their scores, already include it; all others are one behind.

    >>> display_round("train", 0), display_round("evaluate", 1), display_round("mask", 1, "scores")
    (1, 1, 1)
    """
    is_after_round = request_kind in ("evaluate", "tune") or summand == "scores"
    return round if is_after_round else round + 1


@dataclass(frozen=True)
class Header:
    """Header of a message; subclasses check their fields when they are made."""

    protocol: int = field(default=PROTOCOL, kw_only=True)

    @classmethod
    def read(cls, header: Mapping[str, Any]) -> Self:
        """Make a header of decoded JSON.

        Raises:
            RejectionError: If the message is of another protocol, or a field is missing, unknown or out of range.
        """
        # The version is checked first, since fields of another version cannot be judged.
        protocol = header.get("protocol")
        if type(protocol) is not int or protocol != PROTOCOL:
            raise RejectionError(
                f"the message uses protocol {protocol}, but this side uses protocol {PROTOCOL}; install the same "
                "release of perada on the server and at its sites",
                "protocol",
            )
        try:
            return cls(**header)
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise RejectionError(str(error)) from None


@dataclass(frozen=True)
class Request(Header):
    """A request of the server to a site.

    Args:
        kind: What is requested.
        run: Id of the federation's run, which stays the same when it is resumed.
        recipe: Digest of the recipe and the frozen weights.
        round: Number of rounds before it. A request about the models after a round counts that round too.
        client: The site's number in the run.
        clients: Number of sites in the run.
        factor: Factor of the learning rates.
        strides: Strides of tensors that are not contiguous, by name.
        models: Number of models of an ensemble that is sent to be scored, as ``members``; 0 if none is.
        norm: The round's clipping norm S, where sites clip their changes and the norm adapts.
        rank: Rank of the site's LoRA, to which tensors are cut when they are sent; 0 for that of the adapter.
        attempt: Attempt at the secure sum of the round.
        of: What the secure sum adds up.
        sums: Content of a step of the secure sum.
    """

    kind: RequestKind
    run: str
    recipe: str
    round: int = 0
    client: int = 0
    clients: int = 1
    factor: float = 1.0
    strides: dict[str, list[int]] = field(default_factory=dict)
    models: int = 0
    norm: float = 0.0
    rank: int = 0
    attempt: int = 0
    of: Summand = "update"
    sums: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(RequestKind))
        _check_hexadecimal("run", self.run, 32)
        _check_hexadecimal("recipe", self.recipe, 64)
        check_integer("round", self.round, 0, le=MAX_ROUNDS)
        check_integer("clients", self.clients, 0, le=MAX_CLIENTS)
        check_integer("models", self.models, 0, le=MAX_MODELS)
        check_integer("rank", self.rank, 0, le=MAX_RANK)
        check_integer("attempt", self.attempt, 0, le=MAX_ROUNDS)
        check_integer("client", self.client, 0, le=self.clients - 1)
        check_number("factor", self.factor, ge=0, le=1e6)
        check_number("norm", self.norm, ge=0, le=1e200)
        _check_dictionary("strides", self.strides)
        for key, strides in self.strides.items():
            if not isinstance(strides, list) or len(strides) > MAX_DIMENSIONS:
                raise ValueError(f"strides of {key!r} must be a list of at most {MAX_DIMENSIONS} numbers")
            for stride in strides:
                check_integer(f"a stride of {key!r}", stride, 0, le=MAX_COUNT)
        check_choice("of", self.of, get_args(Summand))
        _check_dictionary("sums", self.sums)

    @property
    def job(self) -> JobKind | None:
        """The job without training that the request is about; None if it is about a training run."""
        if self.of == "survey" or self.of == "evaluation":
            return self.of
        return None

    @property
    def sums_scores(self) -> bool:
        """Whether the secure sum adds up scores, and not updates."""
        return self.of == "scores"

    @property
    def display_round(self) -> int:
        """The round as users count it, from 1: the one that is trained, or whose models are scored."""
        return display_round(self.kind, self.round, self.of)

    def __str__(self) -> str:
        details = f" ({self.of}, attempt {self.attempt + 1})" if self.kind in SUM_KINDS else ""
        if self.kind in ("count", "compare"):
            details = f" ({self.of})"
        if self.of in JOB_KINDS:
            return f"{self.kind}{details}"
        return f"{self.kind}{details}, round {self.display_round}"


@dataclass(frozen=True)
class Response(Header):
    """A site's response.

    Attributes:
        code: ``ok``, or why not.
        answers: Digest of the request that it answers.
        facts: What the site allows to be sent: ``size`` (training images), ``tests`` (test images), ``labels`` (a
            digest of the classes), ``losses`` by role, ``counts`` (correct and all predictions), ``sums`` (lists of
            numbers by metric, from which its score is computed) and ``scores`` (by metric) of each of the
            :data:`SCORED_MODELS`, ``failed_models`` (those of them whose outputs are NaN or infinite for a test image),
            ``typical`` (share of the test images that look like the site's training images), ``epsilon`` by ledger,
            and ``row`` (the site's vector of a job without training).
        sums: Content of a step of a secure sum.
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
            _check_fact(name, value)


def _check_fact(name: str, value: Any) -> None:  # noqa: ANN401  # anything that a site sends
    """Check one of the facts of a response."""
    if name in ("size", "tests"):
        check_integer(name, value, 0, le=MAX_IMAGES)
    elif name == "labels":
        _check_hexadecimal(name, value, 64)
    elif name == "losses":
        _check_numbers(value, optional=False)
    elif name == "epsilon":
        # ε is never negative, and a record with such an ε could not be read again.
        _check_numbers(value, optional=True, least=0)
    elif name == "failed_models":
        if not value or not isinstance(value, list) or [each for each in SCORED_MODELS if each in value] != value:
            raise ValueError(
                f"failed_models must list some of {', '.join(SCORED_MODELS)}, in this order; got {value!r}"
            )
    elif name == "typical":
        check_number(name, value, ge=0, le=1)
    elif name == "row":
        _check_row(value)
    elif name in ("scores", "sums", "counts") and set(value) <= {*SCORED_MODELS}:
        for value_of_model in value.values():
            _check_fact_of_model(name, value_of_model)
    else:
        raise ValueError(f"unknown fact {name!r}")


def _check_row(row: object) -> None:
    """Check a site's vector of a job without training, which noise may have made negative."""
    if not isinstance(row, list) or len(row) > MAX_SUMMANDS:
        raise ValueError(f"row must be a list of at most {MAX_SUMMANDS} integers")
    for count in row:
        check_integer("a count of the row", count, -MAX_COUNT, le=MAX_COUNT)


def _check_fact_of_model(name: str, value: Any) -> None:  # noqa: ANN401  # anything that a site sends
    """Check one of the facts of a response about one of the site's models."""
    if name == "scores":
        _check_numbers(value, optional=True)
    elif name == "sums":
        _check_sums(value)
    else:
        correct, total = value
        check_integer("all predictions", total, le=MAX_IMAGES)
        check_integer("correct predictions", correct, 0, le=total)


def _check_hexadecimal(name: str, value: object, digits: int) -> None:
    if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
        raise ValueError(f"{name} must have {digits} hexadecimal digits, got {value!r}")


def _check_dictionary(name: str, value: object) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a dictionary, got {value!r}")


def _check_numbers(numbers_by_name: Mapping[str, object], optional: bool, least: float = -1e12) -> None:
    """Check a dictionary of at most `MAX_ENTRIES` finite numbers; with ``optional`` None is allowed."""
    check_integer("the number of entries", len(numbers_by_name), 0, le=MAX_ENTRIES)
    for key, value in numbers_by_name.items():
        _check_entry_name(key)
        check_number(key, value, ge=least, le=1e12, optional=optional)


def _check_sums(sums_of_metrics: Mapping[str, object]) -> None:
    """Check a dictionary of at most `MAX_ENTRIES` lists of at most `MAX_SUMMANDS` finite numbers."""
    check_integer("the number of entries", len(sums_of_metrics), 0, le=MAX_ENTRIES)
    for name, sums in sums_of_metrics.items():
        _check_entry_name(name)
        if not isinstance(sums, list) or len(sums) > MAX_SUMMANDS:
            raise ValueError(f"the sums of {name!r} must be a list of at most {MAX_SUMMANDS} numbers")
        for value in sums:
            check_number(f"a sum of {name!r}", value, ge=-MAX_SUM, le=MAX_SUM)


def _check_entry_name(name: str) -> None:
    if not re.fullmatch(r"[\w.-]{1,64}", name):
        raise ValueError(f"invalid entry name {name!r}")


def digest_of_message(message: bytes) -> str:
    """Return the SHA-256 of a message, by which a response names the request that it answers."""
    return hashlib.sha256(message).hexdigest()


def canonical(content: object) -> bytes:
    """Encode a JSON value; the bytes do not depend on the order of its entries.

    Raises:
        ValueError: If a number is NaN or infinite.
    """
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def pack(header: Header | Mapping[str, Any], tensors: "Mapping[str, Tensor] | None" = None) -> bytes:
    """Encode a message.

    Args:
        header: A header, or a dictionary of JSON values.
        tensors: Tensors by name.

    >>> read_header(pack({"code": "ok"}))
    {'code': 'ok'}
    """
    content = header if isinstance(header, Mapping) else vars(header)
    text = canonical(content).decode()
    if not tensors:
        # This is what safetensors would write, without the import of torch that it needs.
        table = json.dumps({"__metadata__": {_SECTION: text}}).encode()
        return with_size(table)
    from safetensors.torch import save

    # safetensors rejects tensors that share memory, as those of two roles may; a single tensor needs no copy.
    copy = len(tensors) > 1
    saveable = {name: value.detach().to("cpu", copy=copy).contiguous() for name, value in tensors.items()}
    return bytes(save(saveable, {_SECTION: text}))


def read_header(message: bytes, max_table_bytes: int = MAX_TABLE_BYTES) -> dict[str, Any]:
    """Return the header of a message; its tensors are not checked.

    Raises:
        RejectionError: If it is not a message, or its table is larger than ``max_table_bytes``.
    """
    header, _ = _read_table(message, max_table_bytes)
    return header


def tensor_sizes(message: bytes) -> dict[str, int]:
    """Return the size in bytes of each tensor of a message.

    Raises:
        RejectionError: If it is not a message.
    """
    _, table = _read_table(message)
    sizes = {}
    try:
        for name, entry in table.items():
            begin, end = entry["data_offsets"]
            sizes[name] = end - begin
    except (KeyError, TypeError, ValueError) as error:
        raise RejectionError(f"a tensor is not described ({error!r})") from None
    return sizes


def spec_of(state: "State") -> Spec:
    """Return the ``expected`` argument of :func:`unpack` for tensors like these."""
    # safetensors has no public table of its names of dtypes (0.6).
    from safetensors.torch import _TYPES

    names = {dtype: name for name, dtype in _TYPES.items()}
    return {key: (names[value.dtype], tuple(value.shape)) for key, value in state.items()}


def max_message_size(state: "State") -> int:
    """Return the largest size in bytes of a message with tensors like these."""
    return 8 + MAX_TABLE_BYTES + sum(value.nbytes for value in state.values())


class Message(NamedTuple):
    """A decoded message.

    Attributes:
        header: Its header, as JSON.
        tensors: Its tensors, by name.
    """

    header: dict[str, Any]
    tensors: "State"


def unpack(message: bytes, expected_tensors: Spec) -> Message:
    """Decode a message that has exactly the tensors of ``expected_tensors``.

    Raises:
        RejectionError: If it is not a message, has other tensors, or a value is not finite or out of range.
    """
    header, table = _read_table(message)
    try:
        received = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in table.items()}
    except (KeyError, TypeError) as error:
        raise RejectionError(f"a tensor is not described ({error!r})") from None
    if received != expected_tensors:
        name = min(name for name in {*received, *expected_tensors} if received.get(name) != expected_tensors.get(name))
        raise RejectionError(f"the tensor {name[:80]!r} is {received.get(name)}, expected {expected_tensors.get(name)}")
    if not expected_tensors:
        return Message(header, {})
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        state: State = load(message)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise RejectionError(f"it is not a safetensors file ({error})") from None
    for name, value in state.items():
        _check_range(name, value, dtype=expected_tensors[name][0])
    return Message(header, {name: state[name] for name in expected_tensors})


def _check_range(name: str, value: "Tensor", dtype: str) -> None:
    """Raise if a tensor has values that are not finite or too large."""
    if dtype == "U64" or not value.numel():  # masked numbers, which are uniform
        return
    lower = -MAX_MAGNITUDE if value.is_floating_point() else 0
    upper = MAX_MAGNITUDE if value.is_floating_point() else MAX_COUNT
    smallest = float(value.min())
    largest = float(value.max())
    # With a NaN among the values both are NaN, and no comparison holds.
    if not lower <= smallest <= largest <= upper:
        raise RejectionError(f"the tensor {name!r} has values from {smallest} to {largest}")


def _read_table(message: bytes, max_table_bytes: int = MAX_TABLE_BYTES) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the header of a message, and the table of its tensors."""
    size = table_size(message)
    if len(message) < SIZE_BYTES or size > min(max_table_bytes, len(message) - SIZE_BYTES):
        raise RejectionError(f"the table claims {size} bytes in a message of {len(message)}")
    try:
        table = json.loads(message[SIZE_BYTES : tensors_begin(message)])
        text = table.pop("__metadata__")[_SECTION]
        header = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise RejectionError(f"its table cannot be read ({type(error).__name__})") from None
    if not isinstance(header, dict):
        raise RejectionError("its header is not a dictionary")
    return header, table


def _reject_constant(name: str) -> None:
    """Reject ``NaN`` and ``Infinity``, which Python's JSON reads although they are not JSON."""
    raise ValueError(f"{name} is not valid JSON")
