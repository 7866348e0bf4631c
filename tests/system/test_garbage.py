# SPDX-License-Identifier: Apache-2.0
"""When the garbage collector is paused, and what it skips."""

import gc

import pytest

from perada.system.garbage import collection_paused, objects_frozen


@pytest.fixture(autouse=True)
def collector_as_it_was():
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_afterwards_as_it_was_before(enabled):
    (gc.enable if enabled else gc.disable)()
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled() == enabled
    with pytest.raises(ImportError), collection_paused():
        raise ImportError
    assert gc.isenabled() == enabled


def test_objects_are_handed_back_also_after_an_error():
    before = gc.get_freeze_count()
    with pytest.raises(ValueError, match="ended"), objects_frozen():
        assert gc.get_freeze_count() > before + 1000
        raise ValueError("ended")
    assert gc.get_freeze_count() == 0
