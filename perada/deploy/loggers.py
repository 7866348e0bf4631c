# SPDX-License-Identifier: Apache-2.0
"""The loggers of a recipe in a deployed run, beside ``metrics.csv``."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence

from pytorch_lightning.loggers import Logger

log = logging.getLogger("perada.deploy")


class Loggers:
    """Hands metrics of rounds to loggers, by the names that a simulation's have.

    A logger that fails is named and left out from then on: rounds are not lost for it.

    Args:
        loggers: Of Lightning.
        history: Metrics of the rounds that there are already. Every start logs all rounds, so each is complete.
    """

    def __init__(self, loggers: Sequence[Logger] = (), history: Iterable[Mapping[str, float]] = ()) -> None:
        self._loggers = list(loggers)
        for row in history:
            self.log(row)

    def log(self, row: Mapping[str, float]) -> None:
        """Log metrics of the round ``row["round"]``, which is the step too; what is NaN is left out."""
        given = {name: value for name, value in row.items() if not math.isnan(value)} | {"epoch": row["round"]}
        self._each("log_metrics", given, step=int(row["round"]))
        self._each("save")

    def close(self) -> None:
        """Have all on disk."""
        self._each("finalize", "success")

    def _each(self, method: str, *given: object, **named: object) -> None:
        for logger in list(self._loggers):
            try:
                getattr(logger, method)(*given, **named)
            except Exception as error:  # a disk that is full, a service that is away
                log.warning("%s is left out: %s (%s)", type(logger).__name__, error, type(error).__name__)
                self._loggers.remove(logger)
