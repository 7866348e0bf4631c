# SPDX-License-Identifier: Apache-2.0
"""Messages of Lightning that are no news, and the seed, are silenced while perada trains, and only then."""

import logging
import warnings

import pytest
from pytorch_lightning import seed_everything
from pytorch_lightning.utilities.seed import isolate_rng

from perada.system.quiet import quiet, quiet_lightning, root_logger_kept

LOGGER = logging.getLogger("pytorch_lightning.utilities.rank_zero")
SILENCED_MESSAGES = [
    "Seed set to 7",
    "GPU available: False, used: False",
    "TPU available: False, using: 0 TPU cores",
    "HPU available: False, using: 0 HPUs",
    "Tip: try litlogger",
]
SHOWN_MESSAGES = ["GPU available: True (cuda), used: True", "The seed of the data is in the recipe"]
SILENCED_WARNING = "`isinstance(treespec, LeafSpec)` is deprecated, use something else"
SHOWN_WARNING = "another deprecation"


@pytest.fixture(autouse=True)
def _no_filters():
    """Start each test without filters, and restore those that there were."""
    filters_before = LOGGER.filters[:]
    LOGGER.filters[:] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield
    LOGGER.filters[:] = filters_before


def find_shown_messages():
    """Return those of the messages that the logger passes on."""
    shown = []
    for message in SILENCED_MESSAGES + SHOWN_MESSAGES:
        record = LOGGER.makeRecord(LOGGER.name, logging.INFO, "", 0, message, (), None)
        if LOGGER.filter(record):
            shown.append(message)
    return shown


def find_shown_warnings():
    """Return those of the two warnings that are shown."""
    with warnings.catch_warnings(record=True) as caught:
        # pytest turns warnings that no filter names into errors.
        warnings.filterwarnings("always", SHOWN_WARNING)
        warnings.warn(SILENCED_WARNING, FutureWarning, stacklevel=1)
        warnings.warn(SHOWN_WARNING, FutureWarning, stacklevel=1)
    return [str(warning.message) for warning in caught]


def test_messages_that_are_no_news_are_silenced_within_the_statement_only():
    with pytest.raises(KeyError), quiet(), quiet():
        assert find_shown_messages() == SHOWN_MESSAGES
        assert find_shown_warnings() == [SHOWN_WARNING]
        raise KeyError
    assert find_shown_messages() == SILENCED_MESSAGES + SHOWN_MESSAGES
    assert find_shown_warnings() == [SILENCED_WARNING, SHOWN_WARNING]


def test_lightnings_seed_is_not_logged(monkeypatch, caplog):
    monkeypatch.setenv("PL_GLOBAL_SEED", "")  # which seed_everything sets
    monkeypatch.setenv("PL_SEED_WORKERS", "")
    # A command that another test called in this process may have silenced the logger for good.
    monkeypatch.setattr(logging.getLogger("lightning_fabric.utilities.seed"), "filters", [])
    with caplog.at_level(logging.INFO, logger="lightning_fabric.utilities.seed"), isolate_rng():
        with quiet():
            seed_everything(7)
        assert caplog.messages == []
        seed_everything(7)
        assert caplog.messages == ["Seed set to 7"]


def test_what_was_silenced_before_stays_silenced():
    quiet_lightning()
    with quiet():
        pass
    assert find_shown_messages() == SHOWN_MESSAGES
    assert find_shown_warnings() == [SHOWN_WARNING]


def test_what_a_library_does_to_the_root_logger_is_undone():
    handler = logging.NullHandler()
    before = logging.root.handlers[:]
    level = logging.root.level
    logging.root.handlers[:] = [handler]
    try:
        with pytest.raises(KeyError), root_logger_kept():
            logging.basicConfig(level=logging.DEBUG, force=True)
            raise KeyError
        assert (logging.root.handlers, logging.root.level) == ([handler], level)
    finally:
        logging.root.handlers[:] = before
        logging.root.setLevel(level)
