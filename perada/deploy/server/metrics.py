# SPDX-License-Identifier: Apache-2.0
"""Metrics of a deployed run for Prometheus, read from the server's state whenever they are requested.

Rounds, seconds, scores and ε continue after the server was restarted. Replies and bytes are those since its start.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import get_args

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from perada.deploy.protocol import RejectionError, ResponseCode, read_header
from perada.deploy.server.progress import SCORE_PREFIXES, RoundRecord, RunProgress
from perada.deploy.transport import Failure, Transport


class CountingTransport:
    """A transport that counts replies and bytes.

    Args:
        transport: Transport that carries the messages.

    Attributes:
        replies: Number of replies by site and code.
        bytes: Number of bytes by site and direction.
        connected: Sites that were connected when the server last checked.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.replies: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.connected: list[str] = []

    @property
    def max_bytes(self) -> int:
        """Largest size of a reply."""
        return self._transport.max_bytes

    @max_bytes.setter
    def max_bytes(self, max_bytes: int) -> None:
        self._transport.max_bytes = max_bytes

    def names(self) -> list[str]:
        """Return the registered names of the sites that are connected now."""
        self.connected = self._transport.names()
        return self.connected

    def exchange(self, messages: Mapping[str, bytes], enough: int, deadline: float) -> dict[str, bytes | Failure]:
        """Send each site its message; see :meth:`.Transport.exchange`."""
        for name, message in messages.items():
            self.bytes[name, "down"] += len(message)
        replies = self._transport.exchange(messages, enough, deadline)
        for name, reply in replies.items():
            self.replies[name, _code_of(reply)] += 1
            self.bytes[name, "up"] += 0 if isinstance(reply, Failure) else len(reply)
        return replies


def _code_of(reply: bytes | Failure) -> str:
    """Return the code of a reply. An unknown one becomes ``malformed``: a site must not make up labels."""
    if isinstance(reply, Failure):
        return reply.code
    try:
        code = str(read_header(reply).get("code"))
    except RejectionError:
        return "malformed"
    return code if code in get_args(ResponseCode) else "malformed"


class RunMetrics(Collector):
    """The metrics of a run.

    Args:
        progress: Progress of the run.
        transport: Transport of the run.
        expiry: Returns when the SuperLink's certificate expires, in seconds since 1970; None if unknown.
    """

    def __init__(self, progress: RunProgress, transport: CountingTransport, expiry: Callable[[], float | None]) -> None:
        self._progress = progress
        self._transport = transport
        self._expiry = expiry

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics as they are now."""
        progress = self._progress
        # Another thread may be in a round: lists and dictionaries are copied before they are iterated over.
        records = list(progress.records)
        yield InfoMetricFamily("perada_run", "The run", {"run": progress.run, "recipe": progress.recipe})
        yield GaugeMetricFamily("perada_rounds_planned", "Number of rounds in the recipe", progress.rounds)
        yield GaugeMetricFamily("perada_rounds_done", "Number of finished rounds", progress.done)
        num_void = sum(bool(record.void) for record in records)
        yield GaugeMetricFamily("perada_rounds_void", "Number of rounds that left the model unchanged", num_void)
        seconds = math.fsum(record.seconds for record in records)
        yield SummaryMetricFamily("perada_round_seconds", "Duration of rounds in seconds", len(records), seconds)
        last_seconds = records[-1].seconds if records else math.nan
        yield GaugeMetricFamily("perada_last_round_seconds", "Duration of the last round in seconds", last_seconds)
        expiry = self._expiry()
        if expiry is not None:
            description = "Expiry time of the certificate that the SuperLink presents, in seconds since 1970"
            yield GaugeMetricFamily("perada_superlink_certificate_expiry_timestamp_seconds", description, expiry)
        yield from self._of_transport()
        yield from self._of_sites(records)
        yield from self._of_history()

    def _of_transport(self) -> Iterator[Metric]:
        """Yield the metrics of the messages to and from the sites."""
        replies = CounterMetricFamily(
            "perada_replies", "Number of replies, or of failures in their place", labels=["site", "code"]
        )
        for site_and_code, count in self._transport.replies.copy().items():
            replies.add_metric(site_and_code, count)
        yield replies
        bytes_ = CounterMetricFamily(
            "perada_bytes", "Bytes received from sites (up) and sent to them (down)", labels=["site", "direction"]
        )
        for site_and_direction, count in self._transport.bytes.copy().items():
            bytes_.add_metric(site_and_direction, count)
        yield bytes_

    def _of_sites(self, records: list[RoundRecord]) -> Iterator[Metric]:
        """Yield the metrics of each site."""
        members = list(self._progress.roster)
        connected = set(self._transport.connected)
        in_last_round: set[str] = set()
        if records:
            in_last_round = set(records[-1].used)
        is_connected = GaugeMetricFamily("perada_site_connected", "1 if the site is connected", labels=["site"])
        for name in sorted({member.name for member in members} | connected):
            is_connected.add_metric([name], name in connected)
        is_in_last_round = GaugeMetricFamily(
            "perada_site_in_last_round", "1 if the last round includes the site's answer", labels=["site"]
        )
        rounds = GaugeMetricFamily(
            "perada_site_rounds", "Number of rounds that include the site's answer", labels=["site"]
        )
        epsilon = GaugeMetricFamily("perada_epsilon", "ε spent, as reported by the site", labels=["site", "ledger"])
        for member in members:
            is_in_last_round.add_metric([member.name], member.name in in_last_round)
            rounds.add_metric([member.name], member.rounds)
            for ledger, value in dict(member.epsilon).items():
                epsilon.add_metric([member.name, ledger], math.inf if value is None else value)
        yield from (is_connected, is_in_last_round, rounds, epsilon)

    def _of_history(self) -> Iterator[Metric]:
        """Yield the last score of each name, and the ε of the run."""
        latest: dict[str, float] = {}
        for row in list(self._progress.history):
            for name, value in row.copy().items():
                # A score that has become NaN has no latest number.
                if name.startswith(SCORE_PREFIXES) or not math.isnan(value):
                    latest[name] = value
        scores = GaugeMetricFamily("perada_score", "Latest scores, named as in the table of rounds", labels=["name"])
        epsilon = GaugeMetricFamily("perada_run_epsilon", "ε of the run, named as in metrics.csv", labels=["name"])
        for name, value in latest.items():
            if name.startswith(SCORE_PREFIXES):
                scores.add_metric([name], value)
            elif name.startswith("privacy/") and "epsilon" in name:
                epsilon.add_metric([name], value)
        yield from (scores, epsilon)


@contextmanager
def serving(
    progress: RunProgress,
    transport: CountingTransport,
    port: int,
    address: str,
    expiry: Callable[[], float | None] = lambda: None,
) -> Iterator[None]:
    """Serve the metrics of a run at a port, in a thread.

    Args:
        progress: Progress of the run.
        transport: Transport of the run.
        port: Port to listen at.
        address: Address of the interface to listen at.
        expiry: See :class:`RunMetrics`.

    Raises:
        OSError: If the port is not available.
    """
    registry = CollectorRegistry()
    registry.register(RunMetrics(progress, transport, expiry))
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        raise OSError(
            f"metrics_port={port} at {address!r} is not available ({error}); choose a different one"
        ) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
