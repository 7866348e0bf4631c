# SPDX-License-Identifier: Apache-2.0
"""What is deprecated: one warning at each place of use, and none is left when its version has come."""

import math
import pkgutil
import re
import sys
import types
import warnings
from importlib import import_module
from importlib.metadata import version

import pytest
from packaging.version import Version

import perada
from perada.core.deprecation import GOING, deprecated, moved, renamed


@pytest.fixture(autouse=True)
def going():
    """What a test marks is of that test."""
    before = dict(GOING)
    yield GOING
    GOING.clear()
    GOING.update(before)


@deprecated("2.0.0", "new()")
def old(x, *, y=1):
    """Adds."""
    return x + y


@renamed("2.0.0", rate="lr", steps="rounds")
def train(*, lr=0.1, rounds=3):
    return lr, rounds


class Model:
    @deprecated("2.0.0", "Model.fit()")
    def learn(self):
        return self


def said(function):
    """Its value, and its warnings as they are shown by default: once a place."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        return function(), [(one.category, str(one.message), one.filename, one.lineno) for one in caught]


def test_a_function_works_and_warns_once_at_each_place():
    def use():
        first = [old(1, y=2) for _ in range(3)]
        return first, old(4)

    value, warned = said(use)
    assert value == ([3, 3, 3], 5)
    line = use.__code__.co_firstlineno
    text = "old() is deprecated and goes with perada 2.0.0; use new()"
    assert warned == [(FutureWarning, text, __file__, line + 1), (FutureWarning, text, __file__, line + 2)]
    assert (old.__name__, old.__doc__) == ("old", "Adds.")


def test_a_method_is_named_with_its_class():
    model = Model()
    value, [(_, text, *_)] = said(model.learn)
    assert value is model
    assert text == "Model.learn() is deprecated and goes with perada 2.0.0; use Model.fit()"


def test_a_keyword_that_was_renamed_is_taken_by_both_names():
    assert said(lambda: train(lr=0.5)) == ((0.5, 3), [])
    value, [(_, text, file, _)] = said(lambda: train(rate=0.5, rounds=7))
    assert (value, file) == ((0.5, 7), __file__)
    assert text == "train(rate=) is deprecated and goes with perada 2.0.0; use lr="
    assert said(lambda: train(rate=0.5, steps=7))[0] == (0.5, 7)
    with pytest.warns(FutureWarning), pytest.raises(TypeError, match=r"^train\(\) got rate= and lr=; give the second"):
        train(rate=0.5, lr=0.5)


def test_a_name_that_moved_is_found_where_it_was(monkeypatch):
    module = types.ModuleType("perada_former")
    module.__getattr__ = moved("perada_former", "2.0.0", {"tau": "math.tau"})
    monkeypatch.setitem(sys.modules, "perada_former", module)

    def use():
        from perada_former import tau

        return tau

    value, [(_, text, file, line)] = said(use)
    assert (value, file, line) == (math.tau, __file__, use.__code__.co_firstlineno + 1)
    assert text == "perada_former.tau is deprecated and goes with perada 2.0.0; use math.tau"
    with pytest.raises(AttributeError, match="module 'perada_former' has no attribute 'pi'"):
        _ = module.pi


def overdue(going, now):
    """What should be gone by now, also in the development of the version with which it goes."""
    return sorted(what for what, until in going.items() if Version(until).release <= Version(now).release)


def test_nothing_is_left_that_should_be_gone(going):
    for module in pkgutil.walk_packages(perada.__path__, "perada."):
        try:
            _ = module.name == "perada.__main__" or import_module(module.name)
        except ModuleNotFoundError as error:  # a library of an extra
            assert not error.name.startswith("perada")
    own = {what: until for what, until in going.items() if not what.startswith(("old", "train", "Model"))}
    assert overdue(own, version("perada")) == []
    assert [until for until in own.values() if not re.fullmatch(r"\d+\.0\.0", until)] == []  # as docs/api.md promises


def test_what_should_be_gone_is_seen():
    going = {"one": "2.0.0", "two": "3.0.0"}
    found = [overdue(going, now) for now in ("1.9.4", "2.0.0.dev1", "2.0.0", "3.1.0")]
    assert found == [[], ["one"], ["one"], ["one", "two"]]
