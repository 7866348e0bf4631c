# SPDX-License-Identifier: Apache-2.0
"""What tests of private runs share."""

import pytest


@pytest.fixture
def quick_epsilon(monkeypatch):
    """Each step's RDP is computed once in a session: the runs of these tests have few different ones."""
    from .private_loop import once

    monkeypatch.setattr("opacus.accountants.analysis.rdp._compute_rdp", once)
