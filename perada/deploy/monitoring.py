# SPDX-License-Identifier: Apache-2.0
"""How a deployment is watched: its options, and logs as lines of JSON that say which run, round and site."""

import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, Literal, Self, TextIO

from perada.core.checks import check_choice, check_whole

ABOUT = ("run", "round", "site")
"""What each line says beside its message; null where it is about none."""
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_FLOWER_RECORD = re.compile(
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) *(\d{4}-\d\d-\d\d [\d:,]+)? ?: *(?P<message>.*)"
)
"""First line of a record in Flower's log, with the time that is there if FLWR_LOG_LEVEL is DEBUG."""
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Monitoring:
    """How a run is watched.

    Args:
        metrics_port: Where Prometheus finds the metrics; 0 for nowhere.
        metrics_address: Of the interface that listens.
        log_format: ``text``, or ``json`` for lines of JSON.
        superlink: Address of the SuperLink, whose certificate is among the metrics; empty for none.

    Raises:
        ValueError: If an option cannot be used.
    """

    metrics_port: int = 0
    metrics_address: str = "127.0.0.1"
    log_format: Literal["text", "json"] = "text"
    superlink: str = ""

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
        elif record.exc_text:  # of another program
            line["exception"] = record.exc_text
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

    An error is a ``SystemExit`` then, so that no traceback is printed between the lines.

    Args:
        stream: Where to.
        known: Errors of which the message suffices; of others the line has the traceback.
    """
    handlers, level = logging.root.handlers[:], logging.root.level
    excepthook = threading.excepthook
    log = logging.getLogger("perada.deploy")
    logging.basicConfig(level=logging.INFO, handlers=[json_handler(stream)], force=True)
    logging.captureWarnings(True)
    threading.excepthook = _log_error_of_thread
    for name in ("pytorch_lightning", "lightning_fabric"):  # they have handlers of their own
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    try:
        yield
    except known as error:
        log.error("%s", " ".join(str(error).split()))
        sys.exit(1)
    except Exception as error:
        log.exception("%s: %s", type(error).__name__, " ".join(str(error).split()))
        sys.exit(1)
    finally:
        threading.excepthook = excepthook
        logging.captureWarnings(False)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


def _log_error_of_thread(error: threading.ExceptHookArgs) -> None:
    if error.exc_value is None or isinstance(error.exc_value, SystemExit):
        return
    thread = "a thread" if error.thread is None else f"the thread {error.thread.name!r}"
    about = (error.exc_type, error.exc_value, error.exc_traceback)
    logging.getLogger("perada.deploy").error("%s ended by an error: %r", thread, error.exc_value, exc_info=about)


class TextLines:
    """Lines of another program as they are."""

    def feed(self, text: str) -> list[str]:
        """What is to be printed once a line has come."""
        return [text.rstrip()]

    def flush(self) -> list[str]:
        """What is to be printed if no other line comes for now."""
        return []


class FlowerLines(TextLines):
    """Lines of Flower's programs as lines of JSON, one for each record of its log.

    A record keeps its level. A traceback, and the further lines of a message, belong to the record before them, so they
    are held back until the next record comes, or until :meth:`flush`. Lines that are JSON already stay as they are.
    """

    def __init__(self) -> None:
        self._level = logging.INFO
        self._message: list[str] = []
        self._traceback: list[str] = []

    def feed(self, text: str) -> list[str]:
        """The lines of JSON that are complete now that another line has come."""
        line = _COLOUR.sub("", text.rstrip())
        if _is_json(line):
            return [*self.flush(), line]
        if record := _FLOWER_RECORD.fullmatch(line):
            done = self.flush()
            self._level = logging.getLevelNamesMapping()[record["level"]]
            self._message = [record["message"]]
            return done
        if line.startswith(_TRACEBACK) and not self._traceback:
            done = [] if self._message and self._level >= logging.ERROR else self.flush()
            self._level = max(self._level, logging.ERROR) if self._message else logging.ERROR
            self._traceback = [line]
            return done
        if self._traceback:
            self._traceback.append(line)
            return []
        if self._message and (not line or line[0].isspace() or self._level >= logging.WARNING):
            self._message.append(line)
            return []
        done = self.flush()
        if line:
            self._level = logging.INFO
            self._message = [line]
        return [*done, *self.flush()]

    def flush(self) -> list[str]:
        """The record that is held back, if there is one."""
        if not self._message and not self._traceback:
            return []
        traceback = "\n".join(self._traceback).rstrip()
        message = "\n".join(self._message).strip() or _error_of(traceback)
        record = logging.LogRecord("flwr", self._level, "", 0, "%s", (message,), None)
        record.exc_text = traceback or None
        self._message, self._traceback = [], []
        return [JsonLines().format(record)]


def _error_of(traceback: str) -> str:
    """What stands at the end of a traceback, such as ``ValueError: no room``, after the last indented line."""
    lines = traceback.split("\n")
    frames = [place for place, line in enumerate(lines) if line.startswith("  ")]
    return "\n".join(lines[frames[-1] + 1 :] if frames else lines).strip()


def _is_json(line: str) -> bool:
    """Whether a line is a JSON object, as those are that perada writes at the server."""
    if not line.startswith("{"):
        return False
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def as_json_line(text: str) -> str:
    """A line of another program as a line of JSON; one that is one already stays as it is.

    >>> json.loads(as_json_line("WARNING :   the disk is nearly full"))["level"]
    'WARNING'
    """
    lines = FlowerLines()
    return "\n".join([*lines.feed(text), *lines.flush()])
