# SPDX-License-Identifier: Apache-2.0
"""Sites in this process that add vectors, in a secure sum or in the clear: their messages and costs."""

import statistics
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from perada.core.states import State
from perada.deploy.protocol import Request, RequestKind, Response, digest_of_message, pack, read_header, spec_of, unpack
from perada.deploy.server.summing import MASKED_VECTOR_NAME, SecureSum
from perada.deploy.sums import site
from perada.deploy.sums.keys import SiteClaims, SumTerms
from perada.deploy.sums.party import Party
from perada.deploy.sums.progress import MAX_HEARD_ROUNDS
from perada.deploy.sums.vector import Contents, Uint64Vector
from perada.server.sums import SecureSums

RUN = "a" * 32
RECIPE = "b" * 64
TASK = "c" * 64
"""Digest of the server's request, as a site knows it."""
OPTIONS = SecureSums()
ROUND = MAX_HEARD_ROUNDS
"""A round so late that a site's claims on earlier ones are as long as they can be."""


@dataclass
class Costs:
    """What a round took.

    Seconds are the processor's, which other work on the machine prolongs less than those of a clock.

    Attributes:
        up, down: Megabytes of all sites together.
        server: Seconds by step at the server.
        sites: Seconds by step, of each site.
        messages: Bytes by kind of message, of each site.
    """

    up: float = 0.0
    down: float = 0.0
    server: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sites: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    messages: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    _last: float = 0.0

    def lap(self, step: str | None = None, at_site: bool = False) -> None:
        """Count the time since the last call.

        Args:
            step: The step that it is counted for; None if it is not counted.
            at_site: Whether the step is a site's, or else the server's.
        """
        now = time.process_time()
        if step and at_site:
            self.sites[step].append(now - self._last)
        elif step:
            self.server[step] += now - self._last
        self._last = time.process_time()

    def exclude(self, step: str, started_at: float, ended_at: float) -> None:
        """Count a part of a site's step as another step, and do not count what came after it."""
        self.sites[step].append(ended_at - started_at)
        self._last += time.process_time() - started_at

    def of_site(self) -> dict[str, float]:
        """Return the median seconds of each step at one site."""
        return {step: statistics.median(seconds) for step, seconds in self.sites.items()}


class Federation:
    """Sites that accept one another in secure sums.

    Args:
        sites: Number of sites.
    """

    def __init__(self, sites: int) -> None:
        self.names = [f"site{number:03}" for number in range(sites)]
        self.identities = {name: Ed25519PrivateKey.generate() for name in self.names}
        self.public = {name: identity.public_key() for name, identity in self.identities.items()}

    def plain(self, numbers: int, sending: int) -> Costs:
        """Return the costs of a round without a secure sum, in which the server adds the float32 states as they come.

        Args:
            numbers: Numbers of a state.
            sending: Sites that really send; the reply of the first stands for those of the others.
        """
        costs = Costs()
        total = torch.zeros(numbers, dtype=torch.float64)
        first_reply = b""
        for number, name in enumerate(self.names):
            state = state_of(number, numbers)
            costs.lap()
            message = pack(self.request("train", name), state)
            costs.lap("model")
            if number < sending:
                unpack(message, spec_of(state))
                request_digest = digest_of_message(message)
                costs.lap("model", at_site=True)
                reply = pack(Response("ok", request_digest), state)
                costs.lap("send", at_site=True)
                first_reply = first_reply or reply
            else:
                reply = first_reply
            costs.lap()
            _, tensors = unpack(reply, spec_of(state))
            costs.lap("receive")
            total += tensors["w"]
            costs.lap("mean")
            costs.up += len(reply) / 1e6
            costs.down += len(message) / 1e6
        costs.lap()
        (total / len(self.names)).float()
        costs.lap("mean")
        return costs

    def secure(self, numbers: int, masking: int, dropped: int) -> Costs:
        """Return the costs of a round with a secure sum of the states.

        Args:
            numbers: Numbers of a state.
            masking: Sites that really mask their vectors; the vector of the first stands for those of the others.
            dropped: Sites, the last ones, that drop out before they send their vectors.

        Raises:
            RuntimeError: If all vectors were masked and the sum is not that of the vectors.
        """
        return _Round(self, numbers, masking, self.names[len(self.names) - dropped :]).run()

    def request(self, kind: RequestKind, name: str, **fields: Any) -> Request:
        """Return the server's request to a site."""
        return Request(kind, RUN, RECIPE, ROUND, self.names.index(name), len(self.names), **fields)


@dataclass(frozen=True)
class Reply:
    """A site's response with its tensors, and the bytes of the message."""

    response: Response
    tensors: State
    size: int


class _Round:
    """A secure sum among sites, by the messages and functions of a deployment."""

    def __init__(self, federation: Federation, numbers: int, masking: int, dropped: list[str]) -> None:
        self.federation = federation
        self.masking = masking
        self.dropped = dropped
        self.costs = Costs()
        self.contents = Contents(OPTIONS, state_of(0, numbers))
        self.parties: dict[str, Party] = {}
        for name in federation.names:
            self.parties[name] = Party(name, federation.identities[name], federation.public)
        digests = {str(number): digest_of_message(str(number).encode()) for number in range(MAX_HEARD_ROUNDS)}
        self.claims = SiteClaims(received_digests=digests)
        self.expected = np.zeros(self.contents.size, np.uint64)
        self.step = "keys"
        self.first_masked: Reply | None = None

    def run(self) -> Costs:
        """Train nothing, add the states, and return the costs."""
        costs = self.costs
        federation = self.federation
        example = self.contents.example
        trained = {}
        for name, party in self.parties.items():
            costs.lap()
            message = pack(federation.request("train", name), example)
            costs.lap("model")
            unpack(message, spec_of(example))
            request_digest = digest_of_message(message)
            costs.lap("model", at_site=True)
            keys = party.offer_keys(terms(TASK), self.claims, begin=True)
            reply = pack(Response("ok", request_digest, sums=keys))
            costs.lap("keys", at_site=True)
            costs.messages["keys up"].append(len(reply) - len(pack(Response("ok", request_digest))))
            costs.lap()
            no_tensors: State = {}
            trained[name] = Response.read(read_header(reply)), no_tensors
            costs.lap("keys")
            costs.up += len(reply) / 1e6
            costs.down += len(message) / 1e6
        secure_sum = SecureSum(self._ask, lambda attempt: terms("", attempt), trained, self.contents.size)
        vector_sum = secure_sum.run()
        total = vector_sum.total
        num_survivors = len(vector_sum.survivors)
        costs.lap("unmask")
        if self.masking < len(federation.names):
            # A vector that stood for others left no sum, and was received only once.
            total = self.expected
            total[-1] = num_survivors << OPTIONS.fraction_bits
            costs.server["receive"] *= num_survivors / self.masking
        elif not np.array_equal(total, self.expected):
            raise RuntimeError("the secure sum is not the sum of the vectors")
        costs.lap()
        self.contents.decode(total, num_survivors)
        costs.lap("mean")
        return costs

    def _ask(
        self, kind: RequestKind, attempt: int, sums_of_site: Mapping[str, dict[str, Any]], numbers: int, /
    ) -> dict[str, tuple[Response, State]]:
        """Ask the sites for a step, as :class:`.AskStep`."""
        costs = self.costs
        responses = {}
        spec = spec_of({MASKED_VECTOR_NAME: torch.empty(numbers, dtype=torch.uint64)} if numbers else {})
        costs.lap(self.step)
        for number, (name, sums) in enumerate(sums_of_site.items()):
            costs.lap()
            message = pack(self.federation.request(kind, name, attempt=attempt, sums=sums))
            costs.lap(kind)
            costs.down += len(message) / 1e6
            costs.messages[f"{kind} down"].append(len(message))
            if kind == "mask" and name in self.dropped:
                continue
            if kind == "mask" and number >= self.masking and self.first_masked is not None:
                self._skip_mask(name, message)
                reply = self.first_masked
            else:
                reply_bytes = self._take_step(name, message, number)
                header, tensors = unpack(reply_bytes, spec)
                reply = Reply(Response.read(header), tensors, len(reply_bytes))
                costs.lap("receive" if kind == "mask" else kind)
                if kind == "mask" and number == 0:
                    self.first_masked = reply
            responses[name] = (reply.response, reply.tensors)
            costs.up += reply.size / 1e6
            costs.messages[f"{kind} up"].append(reply.size)
        costs.lap()
        self.step = "unmask" if kind == "reveal" else kind
        return responses

    def _take_step(self, name: str, message: bytes, number: int) -> bytes:
        """Return a site's reply to a request, made as its worker does."""
        costs = self.costs
        is_mask = Request.read(read_header(message)).kind == "mask"
        state = state_of(number, self.contents.size - 1) if is_mask else {}

        def vector(sites: int, _: Collection[str]) -> Uint64Vector:
            started_at = time.process_time()
            site_vector = self.contents.vector(state, 1.0, None, {}, sites)
            ended_at = time.process_time()
            self.expected += site_vector
            costs.exclude("fixed point", started_at, ended_at)
            return site_vector

        costs.lap()
        request = Request.read(read_header(message))
        step_reply = self.parties[name].step(request, terms(TASK), self.claims, vector)
        response = Response("ok", digest_of_message(message), sums=step_reply.content)
        if step_reply.masked_vector is None:
            reply = pack(response)
            costs.lap(request.kind, at_site=True)
        else:
            costs.lap(request.kind, at_site=True)
            reply = pack(response, {MASKED_VECTOR_NAME: torch.from_numpy(step_reply.masked_vector)})
            costs.lap("send", at_site=True)
        return reply

    def _skip_mask(self, name: str, message: bytes) -> None:
        """Let a site take the step of the masks without adding any, since another site's vector stands for its own."""
        zeros = np.broadcast_to(np.uint64(0), self.contents.size)
        with patch.object(site, "add_streams", lambda *_: None):
            self.parties[name].step(Request.read(read_header(message)), terms(TASK), self.claims, lambda *_: zeros)


def terms(task: str, attempt: int = 0) -> SumTerms:
    """Return the terms of the sum, as a site knows them, or with an empty ``task`` as the server does."""
    return SumTerms(RUN, ROUND, RECIPE, OPTIONS, attempt, task)


def state_of(number: int, numbers: int) -> State:
    """Return the state that a site sends."""
    return {"w": torch.randn(numbers, generator=torch.Generator().manual_seed(number))}
