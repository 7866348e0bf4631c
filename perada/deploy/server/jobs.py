# SPDX-License-Identifier: Apache-2.0
"""The server of a job without training: it gathers sites, makes one secure sum, and sends the sum back."""

import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from perada.core.states import State
from perada.deploy.jobs import TOTAL_NAME, Counts, DeployedJob, decode_counts
from perada.deploy.protocol import SUM_KINDS, Request, RequestKind, Response, max_message_size, pack, spec_of
from perada.deploy.server.progress import RoundRecord
from perada.deploy.server.rounds import TRANSIENT, ask_sites
from perada.deploy.sums.keys import SumTerms
from perada.deploy.sums.vector import check_cryptography
from perada.deploy.transport import Terms, Transport

PAUSE = 0.5
"""Seconds between two attempts."""

log = logging.getLogger("perada.deploy")


@dataclass(frozen=True)
class JobResult:
    """Result of a job.

    Attributes:
        run: Id of the run of the job.
        sites: Names of the sites in the sum.
        total: Sum (V,) of their vectors.
        rows: What the sites that allow it have sent of their own in the clear (R,), by name.
        missing: Codes of connected sites that are not in the sum, by name.
    """

    run: str
    sites: list[str]
    total: Counts
    rows: Mapping[str, Counts]
    missing: Mapping[str, str] = field(default_factory=dict)


class JobRun:
    """One run of a job over a transport. It keeps nothing: a run that is interrupted is started again.

    Args:
        job: The job.
        transport: Transport to the sites.
        terms: Terms of the run, of which ``min_sites`` and ``deadline`` count.

    Attributes:
        run: Id of the run.
        min_sites: Smallest number of sites: that of the terms, but at least that of the secure sum.

    Raises:
        ModuleNotFoundError: If the libraries of secure sums are missing.
    """

    def __init__(self, job: DeployedJob, transport: Transport, terms: Terms) -> None:
        check_cryptography()
        self.job = job
        self.min_sites = max(terms.min_sites, job.options.min_sites)
        self.transport = transport
        self.terms = terms
        self.run = secrets.token_hex(16)
        self._failed: dict[str, str] = {}
        transport.max_bytes = max_message_size({}) + 8 * (1 + job.size)

    def make_sum(self) -> JobResult:
        """Have the sites count, add up their vectors, and send the sum back to them.

        Raises:
            TimeoutError: If fewer than ``min_sites`` answered in time; it names the others.
            RejectionError: If too few sites remain at a step of the sum, or a site has spoiled it.
        """
        # It needs libraries that only secure sums need.
        from perada.deploy.server.summing import SecureSum

        counted = self._ask_to_count()
        secure_sum = SecureSum(self._ask_for_sum, self._sum_terms, counted, 1 + self.job.size)
        try:
            vector_sum = secure_sum.run()
        finally:
            self._failed |= secure_sum.failed
        sites = vector_sum.survivors
        total = decode_counts(vector_sum.total, len(sites))
        self._send_back(sites, total)
        rows = {}
        row_size = self.job.size if self.job.row_size is None else self.job.row_size
        for name in sites:
            row = counted[name][0].facts.get("row")
            if row is not None and len(row) == row_size:
                rows[name] = np.array(row, dtype=np.int64)
        missing = {name: code for name, code in self._failed.items() if name not in sites}
        return JobResult(self.run, sites, total, rows, missing)

    def _sum_terms(self, attempt: int) -> SumTerms:
        """Return the terms of an attempt at the sum."""
        return SumTerms(self.run, 0, self.job.digest, self.job.options, attempt, of=self.job.kind)

    def _make_request(self, kind: RequestKind, **fields: Any) -> Request:
        """Return a request, which is the same for all sites."""
        return Request(kind, self.run, self.job.digest, of=self.job.kind, **fields)

    def _ask_to_count(self) -> dict[str, tuple[Response, State]]:
        """Have all connected sites count, and wait until enough of them have.

        Raises:
            TimeoutError: If there are too few at the deadline.
        """
        message = pack(self._make_request("count"))
        end = time.monotonic() + self.terms.deadline
        counted: dict[str, tuple[Response, State]] = {}
        while True:
            connected = self.transport.names()
            pending = [name for name in connected if name not in counted and self._may_answer(name)]
            if not pending and len(counted) >= self.min_sites:
                return counted
            counted |= self._ask_once(dict.fromkeys(pending, message), {}, end)
            if time.monotonic() >= end:
                break
            if any(name not in counted for name in pending) or len(counted) < self.min_sites:
                time.sleep(min(PAUSE, max(0.0, end - time.monotonic())))
        if len(counted) >= self.min_sites:
            return counted
        names = ", ".join(f"{name} ({code})" for name, code in self._failed.items() if name not in counted)
        raise TimeoutError(
            f"{self.job.kind}: {len(counted)} of at least {self.min_sites} sites answered within the deadline of "
            f"{self.terms.deadline:g} s; missing: {names or 'no other site has connected'}. Start it again when they "
            "are back and have approved the recipe"
        )

    def _may_answer(self, name: str) -> bool:
        """Return whether a site has not failed for good."""
        return self._failed.get(name) in (None, *TRANSIENT)

    def _ask_once(
        self, messages: Mapping[str, bytes], expected: State, end: float
    ) -> dict[str, tuple[Response, State]]:
        """Send each site its message once, and return the responses; codes of failures are recorded."""
        if not messages:
            return {}
        specs = {name: spec_of(expected) for name in messages}
        record = RoundRecord(0)
        replies = ask_sites(self.transport, messages, len(messages), end - time.monotonic(), specs, record)
        for name, code in replies.failed.items():
            log.warning("%s: site %s: %s", self.job.kind, name, code, extra={"site": name})
        self._failed |= replies.failed
        for name in replies.responses:
            self._failed.pop(name, None)
        return replies.responses

    def _ask_for_sum(
        self,
        kind: RequestKind,
        attempt: int,
        contents: Mapping[str, dict[str, Any]],
        vector_size: int,
    ) -> dict[str, tuple[Response, State]]:
        """Request a step of the secure sum; an :class:`.AskStep`. Transient failures are retried."""
        from perada.deploy.server.summing import MASKED_VECTOR_NAME

        expected: State = {}
        if vector_size:
            expected[MASKED_VECTOR_NAME] = torch.zeros(vector_size, dtype=torch.uint64)
        end = time.monotonic() + self.terms.deadline / len(SUM_KINDS)
        messages = {}
        for name, content in contents.items():
            messages[name] = pack(self._make_request(kind, attempt=attempt, sums=content))
            self._failed.pop(name, None)
        answered: dict[str, tuple[Response, State]] = {}
        while True:
            pending = {name: messages[name] for name in messages if name not in answered and self._may_answer(name)}
            answered |= self._ask_once(pending, expected, end)
            if time.monotonic() >= end or all(name in answered or not self._may_answer(name) for name in messages):
                return answered
            time.sleep(min(PAUSE, max(0.0, end - time.monotonic())))

    def _send_back(self, sites: list[str], total: Counts) -> None:
        """Send the sum to the sites in it, so that each can compare itself with the others; failures do not matter."""
        request = self._make_request("compare", clients=len(sites))
        message = pack(request, {TOTAL_NAME: torch.from_numpy(total.view(np.uint64))})
        end = time.monotonic() + self.terms.deadline / len(SUM_KINDS)
        self._ask_once(dict.fromkeys(sites, message), {}, end)
