# SPDX-License-Identifier: Apache-2.0
"""The plan of `perada compare`, without its runs."""

import pytest

from perada.cli import main
from perada.studies.compare.command import ComparisonRunner


class Planned(Exception):
    """Raised where the runs would begin."""


def plan_of(monkeypatch, *words):
    """Return what `perada compare` would run with these words."""
    plans = []

    def stop(runner):
        plans.append(runner.plan)
        raise Planned

    monkeypatch.setattr(ComparisonRunner, "run", stop)
    with pytest.raises(Planned):
        main(["compare", *words])
    (plan,) = plans
    return plan
