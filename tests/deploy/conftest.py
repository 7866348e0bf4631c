# SPDX-License-Identifier: Apache-2.0
"""What the tests of deployments share: a server that waits for sites does not make a test wait."""

import pytest

collect_ignore = ["stub_app"]
"""The app of the tests is Flower's to run: it imports what need not be installed."""


class SkippedWaits:
    """Stands for the module ``time``: its clock goes on by what is slept and by nothing else, and nobody sleeps.

    So deadlines end as they do in a real run, with the same number of attempts, however busy the machine is.
    """

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture(autouse=True)
def _server_does_not_wait(monkeypatch):
    """The coordinator sleeps between two attempts; sites of this process answer at once, or never."""
    from perada.deploy.server import coordinator

    monkeypatch.setattr(coordinator, "time", SkippedWaits())
