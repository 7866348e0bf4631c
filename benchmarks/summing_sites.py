# SPDX-License-Identifier: Apache-2.0
"""Sites in this process that add up vectors, in a secure sum or in the clear: what they send, and what it takes."""

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
from perada.deploy.protocol import Request, RequestKind, Response, digest, pack, read_header, spec_of, unpack
from perada.deploy.server.summing import MASKED, SecureSum
from perada.deploy.sums import site
from perada.deploy.sums.keys import SiteClaims, SumTerms
from perada.deploy.sums.party import Party
from perada.deploy.sums.progress import MAX_HEARD_ROUNDS
from perada.deploy.sums.vector import Contents, Uint64Vector
from perada.server.sums import SecureSums

RUN, RECIPE, OPTIONS = "a" * 32, "b" * 64, SecureSums()
ROUND = MAX_HEARD_ROUNDS
"""A round so late that a site says as much of former ones as it ever does."""


@dataclass
class Costs:
    """What a round took: megabytes of all sites together, bytes by message, seconds by step at the server and a site.

    The seconds are the processor's, which other work on the machine prolongs less than those of a clock.
    """

    up: float = 0.0
    down: float = 0.0
    server: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sites: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    messages: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    _last: float = 0.0

    def lap(self, step: str | None = None, at_site: bool = False) -> None:
        """Count the time since the last call as that of a step at the server or ``at_site``, or nowhere."""
        now = time.process_time()
        if step and at_site:
            self.sites[step].append(now - self._last)
        elif step:
            self.server[step] += now - self._last
        self._last = time.process_time()

    def apart(self, step: str, began: float, ended: float) -> None:
        """Count a part of a site's step as another one, and what has come after it nowhere."""
        self.sites[step].append(ended - began)
        self._last += time.process_time() - began

    def of_site(self) -> dict[str, float]:
        """Seconds of each step at one site, in the median."""
        return {step: statistics.median(seconds) for step, seconds in self.sites.items()}


class Federation:
    """So many sites that agree to hide among one another."""

    def __init__(self, sites: int) -> None:
        self.names = [f"site{place:03}" for place in range(sites)]
        self.identities = {name: Ed25519PrivateKey.generate() for name in self.names}
        self.public = {name: identity.public_key() for name, identity in self.identities.items()}

    def plain(self, numbers: int, sending: int) -> Costs:
        """A round in which sites send float32, of which ``sending`` do, and whose mean the server takes as they come.

        The state of the first stands for those of the others.
        """
        costs, total, first = Costs(), torch.zeros(numbers, dtype=torch.float64), b""
        for place, name in enumerate(self.names):
            state = state_of(place, numbers)
            costs.lap()
            message = pack(self.order("train", name), state)
            costs.lap("model")
            if place < sending:
                unpack(message, spec_of(state))
                answers = digest(message)
                costs.lap("model", at_site=True)
                reply = pack(Response("ok", answers), state)
                costs.lap("send", at_site=True)
                first = first or reply
            else:
                reply = first
            costs.lap()
            found = unpack(reply, spec_of(state))[1]
            costs.lap("receive")
            total += found["w"]
            costs.lap("mean")
            costs.up, costs.down = costs.up + len(reply) / 1e6, costs.down + len(message) / 1e6
        costs.lap()
        (total / len(self.names)).float()
        costs.lap("mean")
        return costs

    def secure(self, numbers: int, masking: int, gone: int) -> Costs:
        """A round of a secure sum of the states, of which ``masking`` are masked, without the last ``gone`` ones.

        Raises:
            RuntimeError: If all vectors were masked and the sum is not that of the vectors.
        """
        made = _Round(self, numbers, masking, self.names[len(self.names) - gone :])
        return made.run()

    def order(self, kind: RequestKind, name: str, **given: Any) -> Request:
        """What the server asks of a site."""
        return Request(kind, RUN, RECIPE, ROUND, self.names.index(name), len(self.names), **given)


class _Round:
    """A secure sum among sites, by the messages and functions of a deployment."""

    def __init__(self, federation: Federation, numbers: int, masking: int, gone: list[str]) -> None:
        self.federation, self.masking, self.gone, self.costs = federation, masking, gone, Costs()
        self.contents = Contents(OPTIONS, state_of(0, numbers))
        identities, public = federation.identities, federation.public
        self.parties = {name: Party(name, identities[name], public) for name in federation.names}
        self.own = SiteClaims(heard={str(round): digest(str(round).encode()) for round in range(MAX_HEARD_ROUNDS)})
        self.expected, self.step = np.zeros(self.contents.size, np.uint64), "keys"
        self.first: tuple[int, tuple[Response, State]] | None = None  # bytes of the first masked vector, and itself

    def run(self) -> Costs:
        """Train nothing, and add up."""
        costs, federation, example = self.costs, self.federation, self.contents.example
        trained = {}
        for name, party in self.parties.items():
            costs.lap()
            message = pack(federation.order("train", name), example)
            costs.lap("model")
            unpack(message, spec_of(example))
            answers = digest(message)
            costs.lap("model", at_site=True)
            reply = pack(Response("ok", answers, sums=party.offer_keys(terms("c" * 64), self.own, begin=True)))
            costs.lap("keys", at_site=True)
            costs.messages["keys up"].append(len(reply) - len(pack(Response("ok", answers))))
            costs.lap()
            trained[name] = Response.read(read_header(reply)), dict[str, torch.Tensor]()
            costs.lap("keys")
            costs.up, costs.down = costs.up + len(reply) / 1e6, costs.down + len(message) / 1e6
        made = SecureSum(self._ask, lambda attempt: terms("", attempt), trained, self.contents.size)
        there, total = made.run()
        costs.lap("unmask")
        if self.masking < len(federation.names):  # a vector that stood for others left no sum
            total = self.expected
            total[-1] = len(there) << OPTIONS.fraction_bits
            costs.server["receive"] *= len(there) / self.masking  # nor had it to be received again
        elif not np.array_equal(total, self.expected):
            raise RuntimeError("the secure sum is not the sum of the vectors")
        costs.lap()
        self.contents.decode(total, len(there))
        costs.lap("mean")
        return costs

    def _ask(
        self, kind: RequestKind, attempt: int, said: Mapping[str, dict[str, Any]], numbers: int, /
    ) -> dict[str, tuple[Response, State]]:
        """As :class:`.AskStep`."""
        costs, found = self.costs, {}
        spec = spec_of({MASKED: torch.empty(numbers, dtype=torch.uint64)} if numbers else {})
        costs.lap(self.step)
        for place, (name, sums) in enumerate(said.items()):
            costs.lap()
            message = pack(self.federation.order(kind, name, attempt=attempt, sums=sums))
            costs.lap(kind)
            costs.down += len(message) / 1e6
            costs.messages[f"{kind} down"].append(len(message))
            if kind == "mask" and name in self.gone:
                continue
            if kind == "mask" and place >= self.masking and self.first:
                self._pass_over(name, message)
                size, found[name] = self.first
            else:
                reply = self._answer(name, message, place)
                size = len(reply)
                header, tensors = unpack(reply, spec)
                found[name] = Response.read(header), tensors
                costs.lap("receive" if kind == "mask" else kind)
                if kind == "mask" and place == 0:
                    self.first = size, found[name]
            costs.up += size / 1e6
            costs.messages[f"{kind} up"].append(size)
        costs.lap()
        self.step = "unmask" if kind == "reveal" else kind
        return found

    def _answer(self, name: str, message: bytes, place: int) -> bytes:
        """A step of a site, as its worker takes it."""
        costs, order = self.costs, Request.read(read_header(message))
        state = state_of(place, self.contents.size - 1) if order.kind == "mask" else {}

        def vector(sites: int, _: Collection[str]) -> Uint64Vector:
            began = time.process_time()
            made = self.contents.vector(state, 1.0, None, {}, sites)
            ended = time.process_time()
            self.expected += made
            costs.apart("fixed point", began, ended)
            return made

        costs.lap()
        order = Request.read(read_header(message))
        said, masked = self.parties[name].step(order, terms("c" * 64), self.own, vector)
        answer = Response("ok", digest(message), sums=said)
        if masked is None:
            reply = pack(answer)
            costs.lap(order.kind, at_site=True)
        else:
            costs.lap(order.kind, at_site=True)
            reply = pack(answer, {MASKED: torch.from_numpy(masked)})
            costs.lap("send", at_site=True)
        return reply

    def _pass_over(self, name: str, message: bytes) -> None:
        """Let a site take the step of the masks without any, since the vector of another one stands for its own."""
        zeros = np.broadcast_to(np.uint64(0), self.contents.size)
        with patch.object(site, "add_streams", lambda *_: None):
            self.parties[name].step(Request.read(read_header(message)), terms("c" * 64), self.own, lambda *_: zeros)


def terms(given: str, attempt: int = 0) -> SumTerms:
    """Of the sum, as a site knows them that was ``given`` something, or as the server does."""
    return SumTerms(RUN, ROUND, RECIPE, OPTIONS, attempt, given)


def state_of(place: int, numbers: int) -> State:
    """What a site sends."""
    return {"w": torch.randn(numbers, generator=torch.Generator().manual_seed(place))}
