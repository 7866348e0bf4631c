# SPDX-License-Identifier: Apache-2.0
"""Standard streams that lose no result: what they cannot encode is spelt in ASCII, and a failed write raises nothing.

A run may take days, and what it prints last is often all that is missing when a pipe is closed or a disk full.
"""

import codecs
import io
import locale
import os
import signal
import subprocess
import sys
import unicodedata
from typing import Any, TextIO

ASCII_FORMS = {
    "±": "+-",
    "−": "-",
    "–": "-",
    "—": "-",
    "→": "->",
    "←": "<-",
    "⇒": "=>",
    "…": "...",
    "×": "x",
    "·": "*",
    "≤": "<=",
    "≥": ">=",
    "≠": "!=",
    "≈": "~",
    "∞": "inf",
    "√": "sqrt",
    "°": " degrees",
    "“": '"',
    "”": '"',
    "„": '"',
    "‘": "'",
    "’": "'",
    "•": "*",
    "✓": "yes",
    "│": "|",
    "─": "-",
}
"""Symbols of tables and messages, and what replaces them where an encoding lacks them."""
ERRORS = "perada.ascii_forms"
"""Name of the error handler, as ``errors`` of a stream."""


def ascii_form(letter: str) -> str:
    r"""Spell a character in ASCII: a symbol as people type it, a Greek letter by its name, any other as an escape.

    Letters of names are not replaced by similar ones, since two clients might then have the same name.

    >>> ascii_form("±"), ascii_form("σ"), ascii_form("ń")
    ('+-', 'sigma', '\\u0144')
    """
    if letter in ASCII_FORMS:
        return ASCII_FORMS[letter]
    words = unicodedata.name(letter, "").split()
    if words[:3] == ["GREEK", "SMALL", "LETTER"] and len(words) == 4:
        return words[3].lower()
    # This replaces superscripts, subscripts and kinds of spaces.
    compatible = unicodedata.normalize("NFKC", letter)
    if compatible.isascii():
        return compatible
    return letter.encode("ascii", "backslashreplace").decode("ascii")


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that a stream cannot encode; an error handler of :mod:`codecs`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    unencodable = error.object[error.start : error.end]
    return "".join(map(ascii_form, unencodable)), error.end


class _TolerantFile(io.FileIO):
    """A file descriptor whose first failed write sends it, and everything later, to the null device.

    Attributes:
        error: The error of that write; None if there was none.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.error: OSError | None = None

    def write(self, buffer: Any) -> int:  # noqa: ANN401  # any buffer of bytes, a type that Python names from 3.12 on
        """Write bytes."""
        try:
            return super().write(buffer) or 0
        except OSError as error:
            self.error = error
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(memoryview(buffer))


class StandardStreams:
    """The standard streams of this process, which are guarded from now on.

    A stream that was closed before the program started is opened on the null device. Otherwise the next file that is
    opened would get its descriptor, and with it whatever a library prints.
    """

    def __init__(self) -> None:
        codecs.register_error(ERRORS, _replace_unencodable)
        self._output_was_closed = sys.stdout is None
        _open_closed_descriptors()
        if sys.stdin is None:
            sys.stdin = open(0, encoding="utf-8", closefd=False)
        self._output = _TolerantFile(1)
        self._errors = _TolerantFile(2)
        sys.stdout = _make_tolerant(sys.stdout, self._output)
        sys.stderr = _make_tolerant(sys.stderr, self._errors)

    def flush(self) -> None:
        """Write what is in the buffers."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()

    @property
    def pipe_was_closed(self) -> bool:
        """Whether the program that reads the output, or the messages, ended first, as in ``perada ls | head``."""
        return any(isinstance(file.error, BrokenPipeError) for file in (self._output, self._errors))

    @property
    def output_error(self) -> OSError | None:
        """The first error of a write to standard output; None if there was none."""
        return self._output.error

    @property
    def output_is_lost(self) -> bool:
        """Whether standard output goes nowhere."""
        sys.stdout.flush()
        return self._output_was_closed or self._output.error is not None


_streams: StandardStreams | None = None


def guard_streams() -> StandardStreams:
    """Guard the standard streams of this process; only the first call changes them."""
    global _streams
    if _streams is None:
        _streams = StandardStreams()
    return _streams


def output_is_lost() -> bool:
    """Return whether nobody sees what is printed to standard output; False if the streams are not guarded."""
    return _streams is not None and _streams.output_is_lost


def _open_closed_descriptors() -> None:
    """Open the null device on the descriptors of standard streams that are closed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The system takes the lowest free descriptor, which is this one.
            os.open(os.devnull, os.O_RDWR)


def _make_tolerant(stream: TextIO | None, file: _TolerantFile) -> TextIO:
    """Return a stream like the given one that replaces what it cannot encode, and writes to a tolerant file.

    Args:
        stream: Standard output or standard error; None if it was closed.
        file: The tolerant file with the stream's descriptor.
    """
    if stream is None:
        return io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8", errors=ERRORS)
    if not isinstance(stream, io.TextIOWrapper):
        # It is a notebook's or a test's, which this process must not replace.
        return stream
    raw = getattr(stream.buffer, "raw", stream.buffer)
    if type(raw) is not io.FileIO or raw.fileno() != file.fileno():
        # It is a console of Windows, which is no file, or a stream that a test has replaced.
        stream.reconfigure(errors=ERRORS)
        return stream
    stream.flush()
    # With python -u there is no buffer.
    buffer = file if stream.buffer is raw else io.BufferedWriter(file)
    return io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors=ERRORS,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def restart_in_utf8_mode() -> None:
    """Run the same command again with Python's UTF-8 mode, unless it is on or the locale has UTF-8 anyway.

    In the locale C, and on Windows, Python would otherwise read recipes and names of files, and libraries would write
    tables, in an encoding without most letters. The output keeps its encoding.
    """
    encoding = codecs.lookup(locale.getpreferredencoding(False)).name
    if sys.flags.utf8_mode or encoding == "utf-8":
        return
    if sys.stdout is not None:
        os.environ.setdefault("PYTHONIOENCODING", f"{sys.stdout.encoding}:backslashreplace")
    command = [sys.executable, "-X", "utf8=1", *sys.orig_argv[1:]]
    if os.name == "posix":
        os.execv(sys.executable, command)
    # On Windows execv would leave the terminal to the next command. Ctrl-C reaches the other process too, which ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(subprocess.call(command))
