# SPDX-License-Identifier: Apache-2.0
"""Monitoring of a deployment: its options, and logs as lines of JSON with run, round and site."""

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

from perada.core.checks import check_choice, check_integer
from perada.core.text import printable_json, printable_lines

CONTEXT_FIELDS = ("run", "round", "site")
"""Fields of each line that identify the subject of its message; null without one."""
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_FLOWER_RECORD = re.compile(
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) *(\d{4}-\d\d-\d\d [\d:,]+)? ?: *(?P<message>.*)"
)
"""First line of a record in Flower's log; it has a time if FLWR_LOG_LEVEL is DEBUG (flwr 1.41)."""
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Monitoring:
    """How a run is monitored.

    Args:
        metrics_port: Port at which Prometheus finds the metrics; 0 for no metrics.
        metrics_address: Address of the interface that listens.
        log_format: ``text``, or ``json`` for lines of JSON.
        superlink: Address of the SuperLink, whose certificate is among the metrics; empty for none.

    Raises:
        ValueError: If an option is invalid.
    """

    metrics_port: int = 0
    metrics_address: str = "127.0.0.1"
    log_format: Literal["text", "json"] = "text"
    superlink: str = ""

    def __post_init__(self) -> None:
        check_integer("metrics_port", self.metrics_port, 0, le=65535)
        check_choice("log_format", self.log_format, ("text", "json"))

    @classmethod
    def of(cls, run_config: Mapping[str, Any]) -> Self:
        """Select the options from those that Flower passes on."""
        return cls(**{each.name: run_config[each.name] for each in fields(cls) if each.name in run_config})

    def certificate_expiry(self) -> Callable[[], float | None]:
        """Return what looks up when the SuperLink's certificate expires, in seconds since 1970; None without one."""
        if not self.superlink:
            return lambda: None
        from perada.deploy.flower.certificates import ExpiryOf

        return ExpiryOf(self.superlink)


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON, with these fields and no others.

    Neither python-json-logger, which adds every attribute that a library puts on its records and writes microseconds,
    nor structlog, which is a second way to log beside that of Lightning and Flower, would be less code.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name, None) for name in CONTEXT_FIELDS}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        elif record.exc_text:  # a traceback of another program
            line["exception"] = record.exc_text
        return printable_json(json.dumps(line, ensure_ascii=False))


class PlainLines(logging.Formatter):
    """Formats a record as text without control characters, since names in it may come from anyone."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, and the lines of its traceback."""
        return printable_lines(super().format(record))


class Stamp(logging.Filter):
    """Adds context to each record of a logger, unless the record has its own.

    Args:
        read_context: Returns the context when a record is made.
    """

    def __init__(self, read_context: Callable[[], Mapping[str, object]]) -> None:
        super().__init__()
        self._read_context = read_context

    def filter(self, record: logging.LogRecord) -> bool:
        """Accept every record."""
        for name, value in self._read_context().items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


def stamp(logger: logging.Logger, read_context: Callable[[], Mapping[str, object]]) -> None:
    """Add context to the records of a logger, replacing any context added before."""
    stamps = [stamp_filter for stamp_filter in logger.filters if isinstance(stamp_filter, Stamp)]
    for stamp_filter in stamps:
        logger.removeFilter(stamp_filter)
    logger.addFilter(Stamp(read_context))


def text_handler(stream: TextIO, line_format: str = "%(message)s") -> logging.Handler:
    """Return a handler that writes lines of text."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PlainLines(line_format))
    return handler


def json_handler(stream: TextIO) -> logging.Handler:
    """Return a handler that writes lines of JSON."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    return handler


@contextmanager
def json_logs(stream: TextIO, user_errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Write logs, warnings, and the error that ends the program as lines of JSON.

    The error becomes a ``SystemExit``, so that no traceback is printed between the lines.

    Args:
        stream: Stream for the lines.
        user_errors: Errors whose message suffices; lines of other errors have a traceback.
    """
    handlers = logging.root.handlers[:]
    level = logging.root.level
    excepthook = threading.excepthook
    log = logging.getLogger("perada.deploy")
    logging.basicConfig(level=logging.INFO, handlers=[json_handler(stream)], force=True)
    logging.captureWarnings(True)
    threading.excepthook = _log_error_of_thread
    # Lightning's loggers have their own handlers, and do not propagate (2.6).
    for name in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    try:
        yield
    except user_errors as error:
        log.error("%s", " ".join(str(error).split()))
        sys.exit(1)
    except Exception as error:  # a fault of perada: the log gets its traceback
        log.exception("%s: %s", type(error).__name__, " ".join(str(error).split()))
        sys.exit(1)
    finally:
        threading.excepthook = excepthook
        logging.captureWarnings(False)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


def _log_error_of_thread(crash: threading.ExceptHookArgs) -> None:
    """Log an error that ended a thread (``threading.excepthook``)."""
    if crash.exc_value is None or isinstance(crash.exc_value, SystemExit):
        return
    thread = "a thread" if crash.thread is None else f"the thread {crash.thread.name!r}"
    exc_info = (crash.exc_type, crash.exc_value, crash.exc_traceback)
    logging.getLogger("perada.deploy").error("%s failed: %r", thread, crash.exc_value, exc_info=exc_info)


class TextLines:
    """Passes on the lines of another program without control characters, such as Flower's codes of colours."""

    def feed(self, text: str) -> list[str]:
        """Add a line, and return the lines that can be printed now."""
        return [printable_lines(_COLOUR.sub("", text.rstrip()))]

    def flush(self) -> list[str]:
        """Return the lines held back, once no more are expected for now."""
        return []


class FlowerLines(TextLines):
    """Converts lines of Flower's programs to lines of JSON, one for each record of its log.

    A record keeps its level. A traceback and further lines of a message belong to the record before them, so a record
    is held back until the next one comes, or until :meth:`flush`. Lines that are JSON already are passed on unchanged.
    """

    def __init__(self) -> None:
        self._level = logging.INFO
        self._message: list[str] = []
        self._traceback: list[str] = []

    def feed(self, text: str) -> list[str]:
        """Add a line, and return the lines of JSON that are complete now."""
        line = _COLOUR.sub("", text.rstrip())
        if _is_json(line):
            return [*self.flush(), printable_json(line)]
        record = _FLOWER_RECORD.fullmatch(line)
        if record is not None:
            complete = self.flush()
            self._level = logging.getLevelNamesMapping()[record["level"]]
            self._message = [record["message"]]
            return complete
        if line.startswith(_TRACEBACK) and not self._traceback:
            # It belongs to an error that was logged just before; otherwise it is a record itself.
            complete = []
            if not self._message or self._level < logging.ERROR:
                complete = self.flush()
                self._level = logging.ERROR
            self._traceback = [line]
            return complete
        if self._traceback:
            self._traceback.append(line)
            return []
        if self._message and (not line or line[0].isspace() or self._level >= logging.WARNING):
            self._message.append(line)
            return []
        complete = self.flush()
        if line:
            self._level = logging.INFO
            self._message = [line]
        return [*complete, *self.flush()]

    def flush(self) -> list[str]:
        """Return the record held back, if there is one."""
        if not self._message and not self._traceback:
            return []
        traceback = "\n".join(self._traceback).rstrip()
        message = "\n".join(self._message).strip() or _error_of(traceback)
        record = logging.LogRecord("flwr", self._level, "", 0, "%s", (message,), None)
        record.exc_text = traceback or None
        self._message = []
        self._traceback = []
        return [JsonLines().format(record)]


def _error_of(traceback: str) -> str:
    """Return the error at the end of a traceback, such as ``ValueError: no room``, after the last indented line."""
    lines = traceback.split("\n")
    begin = 0
    for number, line in enumerate(lines):
        if line.startswith("  "):
            begin = number + 1
    return "\n".join(lines[begin:]).strip()


def _is_json(line: str) -> bool:
    """Return whether a line is a JSON object, like those that perada writes at the server."""
    if not line.startswith("{"):
        return False
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def as_json_line(text: str) -> str:
    """Convert a line of another program to a line of JSON; one that is JSON already is returned unchanged.

    >>> json.loads(as_json_line("WARNING :   the disk is nearly full"))["level"]
    'WARNING'
    """
    lines = FlowerLines()
    return "\n".join([*lines.feed(text), *lines.flush()])
