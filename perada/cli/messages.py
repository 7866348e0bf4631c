# SPDX-License-Identifier: Apache-2.0
"""Formatting of errors and warnings, and filters for messages of libraries."""

import sys
import warnings
from typing import Any

from perada.cli.parser_errors import plain
from perada.core.text import printable
from perada.system.quiet import quiet_lightning


def one_line(error: Exception) -> str:
    """Return an error's message on one line, without control characters and without jsonargparse's internals."""
    return printable(" ".join(plain(str(error)).splitlines()))


def quiet_libraries() -> None:
    """Silence messages of libraries that do not concern users of recipes."""
    quiet_lightning()
    # LightningCLI 2.6 uses a method and an option of jsonargparse by their former names.
    deprecated = r"\s*(By default only one JsonargparseDeprecationWarning|.*instantiate_classes|skip_none parameter)"
    warnings.filterwarnings("ignore", deprecated, DeprecationWarning)


def short_warnings() -> None:
    """From now on, print warnings for users as one line, without the location in the code."""
    show_other = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if issubclass(category, UserWarning):
            print(f"perada: warning: {printable(' '.join(str(message).split()))}", file=sys.stderr)
        else:
            show_other(message, category, *args, **kwargs)

    warnings.showwarning = show
