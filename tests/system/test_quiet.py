# SPDX-License-Identifier: Apache-2.0
"""What Lightning says that is no news is left out while perada trains, and only then."""

import logging
import warnings

import pytest

from perada.system.quiet import quiet, quiet_lightning, root_logger_kept

LEAF = "`isinstance(treespec, LeafSpec)` is deprecated, use something else"
SPEAKER = logging.getLogger("pytorch_lightning.utilities.rank_zero")


@pytest.fixture(autouse=True)
def fresh():
    """Nobody has left anything out in this process before, and nothing stays left out."""
    filters, SPEAKER.filters[:] = [*SPEAKER.filters], []
    yield
    SPEAKER.filters[:] = filters


def said():
    """How many of two messages and two warnings are shown, in this order."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.filterwarnings("always", "other")
        for text in (LEAF, "other"):
            warnings.warn(text, FutureWarning, stacklevel=1)
    return [
        *(bool(SPEAKER.filter(SPEAKER.makeRecord("", 20, "", 0, text, (), None))) for text in ("try litlogger", "GPU")),
        *(text in [str(one.message) for one in shown] for text in (LEAF, "other")),
    ]


def test_meanwhile_and_no_longer():
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with pytest.raises(KeyError), quiet(), quiet():
            assert said() == [False, True, False, True]
            raise KeyError
        assert said() == [True] * 4


def test_it_stays_left_out_where_it_was():
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        quiet_lightning()
        with quiet():
            pass
        assert said() == [False, True, False, True]


def test_what_a_library_does_to_the_root_logger_is_undone():
    handler = logging.NullHandler()
    before, level = logging.root.handlers[:], logging.root.level
    logging.root.handlers[:] = [handler]
    try:
        with pytest.raises(KeyError), root_logger_kept():
            logging.basicConfig(level=logging.DEBUG, force=True)
            raise KeyError
        assert (logging.root.handlers, logging.root.level) == ([handler], level)
    finally:
        logging.root.handlers[:] = before
        logging.root.setLevel(level)
