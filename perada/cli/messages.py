# SPDX-License-Identifier: Apache-2.0
"""How errors and warnings are shown, and which ones of libraries are not."""

import sys
import warnings
from typing import Any

from perada.cli.parser_errors import plain
from perada.core.quiet import quiet_lightning
from perada.core.text import printable


def one_line(error: Exception) -> str:
    """An error's message on one line, without control characters and without what jsonargparse says of its workings."""
    return printable(" ".join(plain(str(error)).splitlines()))


def quiet_libraries() -> None:
    """Silence messages of libraries that do not concern users of recipes."""
    quiet_lightning()
    # LightningCLI calls a method and gives an option of jsonargparse by their former names.
    former = r"\s*(By default only one JsonargparseDeprecationWarning|.*instantiate_classes|skip_none parameter)"
    warnings.filterwarnings("ignore", former, DeprecationWarning)


def short_warnings() -> None:
    """From now on, show what users are warned of as one line, without the place in the code that found it."""
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, UserWarning):
            print(f"perada: warning: {printable(' '.join(str(message).split()))}", file=sys.stderr)
        else:
            shown(message, category, *place, **more)

    warnings.showwarning = show
