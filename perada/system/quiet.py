# SPDX-License-Identifier: Apache-2.0
"""Filters for messages of libraries: irrelevant ones of Lightning, or all informational ones."""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = ("pytorch_lightning.utilities.rank_zero", "lightning_fabric.utilities.seed")


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a log message of Lightning is relevant for users."""
    # The seed must not be logged, since noise may be derived from it. The other messages are an advertisement, and
    # accelerators that the machine lacks.
    return not re.search("litlogger|Seed set to|[GTHI]PU available: False", record.getMessage())


def quiet_lightning() -> None:
    """Silence Lightning's advertisement, its seed and its own deprecations from now on."""
    # Lightning 2.6 itself uses what torch 2.15 deprecates.
    warnings.filterwarnings("ignore", r".*LeafSpec.* is deprecated", FutureWarning)
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_news)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the messages of :func:`quiet_lightning` within the ``with`` statement; other filters are unchanged."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    unfiltered = [logger for logger in loggers if _is_news not in logger.filters]
    with warnings.catch_warnings():
        quiet_lightning()
        try:
            yield
        finally:
            for logger in unfiltered:
                logger.removeFilter(_is_news)


@contextmanager
def root_logger_kept() -> Iterator[None]:
    """Undo changes of the root logger within the ``with`` statement, such as those of libraries that are imported.

    A library that calls ``logging.basicConfig`` adds a handler. It prints messages of loggers with their own handler a
    second time, and makes a later ``logging.basicConfig`` of the user's program ineffective.
    """
    handlers = logging.root.handlers[:]
    level = logging.root.level
    try:
        yield
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


@contextmanager
def info_messages_disabled() -> Iterator[None]:
    """Silence informational log messages, such as those of Lightning about each trainer, but not warnings."""
    level_before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(level_before)
