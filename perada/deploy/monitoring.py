# SPDX-License-Identifier: Apache-2.0
"""How a deployment is watched: its options, and logs as lines of JSON that say which run, round and site."""

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, Literal, Self, TextIO

from perada.core.checks import check_choice, check_whole

ABOUT = ("run", "round", "site")
"""What each line says beside its message; null where it is about none."""
_COLOUR = re.compile("\x1b\\[[0-9;]*m")


@dataclass(frozen=True)
class Monitoring:
    """How a run is watched.

    Args:
        metrics_port: Where Prometheus finds the metrics; 0 for nowhere.
        metrics_address: Of the interface that listens.
        log_format: ``text``, or ``json`` for lines of JSON.

    Raises:
        ValueError: If an option cannot be used.
    """

    metrics_port: int = 0
    metrics_address: str = "127.0.0.1"
    log_format: Literal["text", "json"] = "text"

    def __post_init__(self) -> None:
        check_whole("metrics_port", self.metrics_port, 0, most=65535)
        check_choice("log_format", self.log_format, ("text", "json"))

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """The options among those that Flower hands on."""
        return cls(**{each.name: config[each.name] for each in fields(cls) if each.name in config})


class JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name, None) for name in ABOUT}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class Stamp(logging.Filter):
    """Writes onto each record of a logger what it is about, unless the record says that itself."""

    def __init__(self, read: Callable[[], Mapping[str, object]]) -> None:
        super().__init__()
        self._read = read

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record through."""
        for name, value in self._read().items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


def stamp(logger: logging.Logger, read: Callable[[], Mapping[str, object]]) -> None:
    """Have the records of a logger say what they are about, as ``read`` tells when they are made."""
    for former in [one for one in logger.filters if isinstance(one, Stamp)]:
        logger.removeFilter(former)
    logger.addFilter(Stamp(read))


def json_handler(stream: TextIO) -> logging.Handler:
    """Writes lines of JSON."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    return handler


@contextmanager
def json_logs(stream: TextIO, known: tuple[type[Exception], ...]) -> Iterator[None]:
    """Have all that is logged, warned of, and the error that ends the program, written as lines of JSON.

    Args:
        stream: Where to.
        known: Errors of which the message suffices. They are a ``SystemExit`` then.
    """
    before = logging.root.handlers[:], logging.root.level
    logging.basicConfig(level=logging.INFO, handlers=[json_handler(stream)], force=True)
    logging.captureWarnings(True)
    for name in ("pytorch_lightning", "lightning_fabric"):  # they have handlers of their own
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    try:
        yield
    except known as error:
        logging.getLogger("perada.deploy").error("%s", " ".join(str(error).split()))
        sys.exit(1)
    finally:
        logging.captureWarnings(False)
        logging.root.handlers[:], level = before
        logging.root.setLevel(level)


def as_json_line(text: str) -> str:
    """A line of another program as a line of JSON; one that is one already stays as it is."""
    plain = _COLOUR.sub("", text.rstrip("\n"))
    record = logging.LogRecord("flwr", logging.INFO, "", 0, "%s", (plain,), None)
    return plain if text.startswith("{") else JsonLines().format(record)
