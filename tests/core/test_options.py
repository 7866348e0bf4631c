# SPDX-License-Identifier: Apache-2.0
"""What algorithms and server rules say of themselves, which processes compare before they train together."""

import os
import subprocess
import sys

import perada.algorithms
import perada.server
from perada.algorithms import FedEnsemble, PerAda, PFedMe
from perada.core.checks import Options
from perada.server import SERVER_RULES, FedAdam, FedAvgM, Median, ModifiedLocalGD, TrimmedMean, make_rule
from tests.methods import NAMED, make_method

NESTED = [
    FedEnsemble(base=PerAda(2.0, distill=False), modes=2),
    FedEnsemble(PFedMe(beta=0.5)),
    ModifiedLocalGD(aggregate=FedAvgM(0.5, aggregate=TrimmedMean(0.2))),
    FedAdam(aggregate=Median()),
]


def test_what_is_shown_makes_the_same_again():
    for holder in (*map(make_method, NAMED), *map(make_rule, SERVER_RULES), *NESTED):
        again = eval(repr(holder), vars(perada.algorithms) | vars(perada.server))
        assert type(again) is type(holder)
        assert repr(vars(again)) == repr(vars(holder))


def test_nested_options_are_shown():
    assert repr(FedEnsemble(base=PerAda(1))) != repr(FedEnsemble(base=PerAda(2)))
    assert repr(FedAvgM(aggregate=TrimmedMean(0.1))) != repr(FedAvgM(aggregate=TrimmedMean(0.2)))
    changed = FedEnsemble(base=PerAda(1))
    changed.base.prox_strength = 2
    assert repr(changed) == repr(FedEnsemble(base=PerAda(2)))


class Own(Options):
    """Keeps its options under other names."""

    def __init__(self, names, function):
        self._names, self._function = frozenset(names), function


def test_every_process_shows_the_same():
    """Sets have another order in each process, and functions another place in memory."""
    shown = repr(Own("abcdefgh", len)), repr(Own("abcdefgh", test_nested_options_are_shown)), repr(Own("abc", max))
    assert len(set(shown)) == 3
    code = """
from perada.core.checks import Options
class Own(Options):
    def __init__(self, names, function):
        self._names, self._function = frozenset(names), function
def of_its_own(): pass
print(repr(Own("abcdefgh", of_its_own)))
"""
    printed = set()
    for seed in "12":
        command = [sys.executable, "-c", code]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        printed.add(ended.stdout)
    (same,) = printed
    assert "of_its_own" in same
