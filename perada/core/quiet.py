# SPDX-License-Identifier: Apache-2.0
"""Messages of Lightning that do not concern users: an advertisement, the seed, a deprecation of its own."""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_SPEAKERS = ("pytorch_lightning.utilities.rank_zero", "lightning_fabric.utilities.seed")


def _is_news(record: logging.LogRecord) -> bool:
    # The seed, since what noise may follow from is not for every terminal; and which devices are not there.
    return not re.search("litlogger|Seed set to|[GTHI]PU available: False", record.getMessage())


def quiet_lightning() -> None:
    """Silence them from now on."""
    # Lightning 2.6 itself uses what torch 2.15 deprecates.
    warnings.filterwarnings("ignore", r".*LeafSpec.* is deprecated", FutureWarning)
    for name in _SPEAKERS:
        logging.getLogger(name).addFilter(_is_news)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence them meanwhile; the caller's own filters stay as they are."""
    said = [one for one in map(logging.getLogger, _SPEAKERS) if _is_news not in one.filters]
    with warnings.catch_warnings():
        quiet_lightning()
        try:
            yield
        finally:
            for one in said:
                one.removeFilter(_is_news)
