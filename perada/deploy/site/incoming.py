# SPDX-License-Identifier: Apache-2.0
"""A message from the server, and what the handlers of requests share."""

import math
from dataclasses import dataclass, replace
from typing import Any

from perada.core.states import State, laid_out
from perada.deploy.protocol import (
    RejectionError,
    Request,
    Response,
    ResponseCode,
    digest_of_message,
    pack,
)
from perada.deploy.site.client import Client


@dataclass(frozen=True)
class Incoming:
    """A message from the server.

    Attributes:
        content: The message.
        digest: Its digest, which a reply repeats.
        request: What its header requests.
    """

    content: bytes
    digest: str
    request: Request


def factors_to_cut(client: Client, request: Request) -> tuple[Any, ...]:
    """Return the LoRA factors that are cut to the site's rank; none if it has the adapter's."""
    return tuple(client.module.tensor_names.factors) if request.rank else ()


def lay_out(state: State, request: Request) -> State:
    """Return a state with the strides of the server's memory, on which rounding depends.

    Raises:
        RejectionError: If it cannot have them.
    """
    try:
        return laid_out(state, request.strides)
    except ValueError as error:
        raise RejectionError(str(error)) from None


def digest_for_all_sites(request: Request, tensors: State) -> str:
    """Return a digest of the server's message, without the site's own number."""
    return digest_of_message(pack(replace(request, client=0), tensors))


def pack_response(code: ResponseCode, message_digest: str, facts: dict[str, Any] | None = None) -> bytes:
    """Return a reply without tensors."""
    return pack(Response(code, message_digest, facts or {}))


def finite_or_none(value: float) -> float | None:
    """Return a number as replies and logs have it: None if it is infinite or NaN."""
    return value if math.isfinite(value) else None
