# SPDX-License-Identifier: Apache-2.0
"""What the command line says, and what it leaves out."""

import logging
import re
import warnings
from collections.abc import Iterator
from difflib import get_close_matches

from perada.algorithms import Algorithm
from perada.data import ImageSet, Partition
from perada.server import ServerRule


def one_line(error: Exception) -> str:
    """An error's message on one line, without what jsonargparse tells of its own working."""
    noise = ("Does not validate against any of", "Subtypes:", "Errors:", "Given value", "Expected a <class 'NoneType'>")
    lines = [line.strip().removeprefix("- ") for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith(noise))
    wrong = re.search(r"Expected a dot import path string: (\w+)", text)
    if wrong:
        key = re.search(r'Parser key "([^"]+)"', text)
        bases: list[type] = [Algorithm, ServerRule, Partition, ImageSet]
        names = sorted({kind.__name__ for base in bases for kind in _subclasses(base)})
        close = get_close_matches(wrong[1], names, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known classes are {', '.join(names)}"
        return f"{key[1] if key else 'the configuration'}: there is no class {wrong[1]!r}; {hint}"
    return text


def _subclasses(base: type) -> Iterator[type]:
    known: list[type] = type.__subclasses__(base)
    for kind in known:
        if not kind.__name__.startswith("_") and not getattr(kind, "__abstractmethods__", None):
            yield kind
        yield from _subclasses(kind)


def quiet_lightning() -> None:
    """Leave out what Lightning says that is no news to whoever runs a recipe."""
    # Lightning 2.6 itself uses what torch 2.15 deprecates.
    warnings.filterwarnings("ignore", r".*LeafSpec.* is deprecated", FutureWarning)
    logging.getLogger("pytorch_lightning.utilities.rank_zero").addFilter(
        lambda record: "litlogger" not in record.getMessage()
    )
    # What noise may follow from is not for every terminal.
    logging.getLogger("lightning_fabric.utilities.seed").addFilter(
        lambda record: "Seed set to" not in record.getMessage()
    )
