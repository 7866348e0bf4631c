# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of secure sums."""

import pytest


@pytest.fixture
def deployment(tiny, tmp_path):
    """Four sites and a recipe of FedAvg with one round, whose updates are summed."""
    from .test_deployed_sums import FOUR, parties

    return parties(tiny, tmp_path, "fedavg", rounds=1, sizes=FOUR)
