# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of deployments: the server's waiting for sites takes no time."""

import pytest

collect_ignore = ["stub_app"]
"""The app of the tests is Flower's to run: it imports what need not be installed."""


class SkippedWaits:
    """Replacement of the module ``time`` whose clock advances only by the seconds of ``sleep``, which returns at once.

    A deadline thus ends after the same number of attempts as in a real run, however busy the machine is.
    """

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture(autouse=True)
def _server_does_not_wait(monkeypatch):
    """Skip the coordinator's pauses between two attempts: the sites of these tests answer at once, or never."""
    from perada.deploy.server import coordinator

    monkeypatch.setattr(coordinator, "time", SkippedWaits())
