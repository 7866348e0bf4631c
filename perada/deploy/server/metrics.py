# SPDX-License-Identifier: Apache-2.0
"""Metrics of a deployed run for Prometheus. They are read from what the server keeps, when somebody asks.

Rounds, seconds, scores and ε go on after the server was started again. Replies and bytes are those since its start.
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

from perada.deploy.protocol import RefusalError, ResponseCode, read_header
from perada.deploy.server.progress import RunProgress
from perada.deploy.transport import Failure, Transport

SCORES = ("personal/", "global/")
"""Beginnings of the names of scores, among the metrics of a round."""


class CountingTransport:
    """A transport that counts what passes through it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.replies: Counter[tuple[str, str]] = Counter()  # by site and code
        self.bytes: Counter[tuple[str, str]] = Counter()  # by site and direction
        self.connected: list[str] = []  # when the server looked last

    @property
    def most(self) -> int:
        """Bytes that a reply may have."""
        return self._transport.most

    @most.setter
    def most(self, most: int) -> None:
        self._transport.most = most

    def names(self) -> list[str]:
        """Registered names of the sites that are connected now."""
        self.connected = self._transport.names()
        return self.connected

    def exchange(self, messages: Mapping[str, bytes], enough: int, deadline: float) -> dict[str, bytes | Failure]:
        """Send each site its message, as :class:`.Transport` says."""
        for name, message in messages.items():
            self.bytes[name, "down"] += len(message)
        found = self._transport.exchange(messages, enough, deadline)
        for name, reply in found.items():
            self.replies[name, _code(reply)] += 1
            self.bytes[name, "up"] += 0 if isinstance(reply, Failure) else len(reply)
        return found


def _code(reply: bytes | Failure) -> str:
    """What a reply says; a site that says something else has no label of its own."""
    if isinstance(reply, Failure):
        return reply.code
    try:
        code = str(read_header(reply).get("code"))
    except RefusalError:
        return "malformed"
    return code if code in get_args(ResponseCode) else "malformed"


class RunMetrics(Collector):
    """The metrics of a run.

    Args:
        progress: How far it is.
        transport: What carries its messages.
        expiry: Gives when the SuperLink's certificate expires, in seconds since 1970, or None where that is not known.
    """

    def __init__(self, progress: RunProgress, transport: CountingTransport, expiry: Callable[[], float | None]) -> None:
        self._progress, self._transport, self._expiry = progress, transport, expiry

    def collect(self) -> Iterator[Metric]:
        """All of them as they are now. Another thread may be in a round: lists and dictionaries are copied first."""
        progress, records = self._progress, list(self._progress.records)
        yield InfoMetricFamily("perada_run", "The run", {"run": progress.run, "recipe": progress.recipe})
        yield GaugeMetricFamily("perada_rounds_planned", "Rounds of the recipe", progress.rounds)
        yield GaugeMetricFamily("perada_rounds_done", "Rounds that are over", progress.done)
        void = sum(bool(record.void) for record in records)
        yield GaugeMetricFamily("perada_rounds_void", "Rounds that left the model as it was", void)
        spent = math.fsum(record.seconds for record in records)
        yield SummaryMetricFamily("perada_round_seconds", "Seconds of rounds", len(records), spent)
        last = records[-1].seconds if records else math.nan
        yield GaugeMetricFamily("perada_last_round_seconds", "Seconds of the last round", last)
        expiry = self._expiry()
        if expiry is not None:
            about = "When the certificate expires that the SuperLink presents, in seconds since 1970"
            yield GaugeMetricFamily("perada_superlink_certificate_expiry_timestamp_seconds", about, expiry)
        yield from self._of_transport()
        yield from self._of_sites()
        yield from self._of_history()

    def _of_transport(self) -> Iterator[Metric]:
        replies = CounterMetricFamily("perada_replies", "Replies, or what came instead", labels=["site", "code"])
        for site_and_code, count in self._transport.replies.copy().items():
            replies.add_metric(site_and_code, count)
        yield replies
        bytes_ = CounterMetricFamily("perada_bytes", "Bytes from sites (up) and to them", labels=["site", "direction"])
        for site_and_direction, count in self._transport.bytes.copy().items():
            bytes_.add_metric(site_and_direction, count)
        yield bytes_

    def _of_sites(self) -> Iterator[Metric]:
        members, last = list(self._progress.roster), [*self._progress.records][-1:]
        connected, counted = {*self._transport.connected}, {name for one in last for name in one.summed or one.answered}
        there = GaugeMetricFamily("perada_site_connected", "1 if it is connected", labels=["site"])
        for name in sorted({member.name for member in members} | connected):
            there.add_metric([name], name in connected)
        inside = GaugeMetricFamily("perada_site_in_last_round", "1 if its answer is in it", labels=["site"])
        rounds = GaugeMetricFamily("perada_site_rounds", "Rounds with its answer", labels=["site"])
        epsilon = GaugeMetricFamily("perada_epsilon", "ε that a site says it spent", labels=["site", "ledger"])
        for member in members:
            inside.add_metric([member.name], member.name in counted)
            rounds.add_metric([member.name], member.rounds)
            for ledger, value in dict(member.epsilon).items():
                epsilon.add_metric([member.name, ledger], math.inf if value is None else value)
        yield from (there, inside, rounds, epsilon)

    def _of_history(self) -> Iterator[Metric]:
        """The last score of each name, and the ε of the run."""
        latest: dict[str, float] = {}
        for row in list(self._progress.history):
            latest |= {name: value for name, value in row.copy().items() if not math.isnan(value)}
        scores = GaugeMetricFamily("perada_score", "Scores, as the table of rounds names them", labels=["name"])
        epsilon = GaugeMetricFamily("perada_run_epsilon", "ε of the run, as metrics.csv names it", labels=["name"])
        for name, value in latest.items():
            if name.startswith(SCORES):
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
    """Serve the metrics of a run at a port, in a thread, until the end; an OSError if the port cannot be had."""
    registry = CollectorRegistry()
    registry.register(RunMetrics(progress, transport, expiry))
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        raise OSError(f"metrics_port={port} at {address!r} cannot be had ({error}); give another") from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
