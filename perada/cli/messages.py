# SPDX-License-Identifier: Apache-2.0
"""What the command line says, and what it leaves out."""

import logging
import re
import warnings
from collections.abc import Iterator
from difflib import get_close_matches

from perada.core.text import printable

_NOISE = ("Does not validate against any of", "Subtypes:", "Errors:", "Given value", "Expected a <class 'NoneType'>")
_PLAIN = {
    r'Parser key "([^"]+)"( element \d+)?:': r"\1:",
    r"Expected a typing\.Literal\[(.*)\]\. Got value: (.*)": r"\2 is unknown; choose one of \1",
    r"Expected a <class '(.*)'>\. Got value: (.*)": r"\2 cannot be used; give a value of type \1",
    r"Expected a <class '(.*)'>$": r"give a value of type \1",
    r"Problem with given class_path '(.*)':": r"\1:",
    r"Not of type \w+: (.*) does not conform to restriction v(.*)": r"\1 cannot be used; give a number \2",
}
"""What jsonargparse says, and how we say it."""


def one_line(error: Exception) -> str:
    """An error's message on one line, without control characters and without what jsonargparse says of its workings."""
    lines = [line.strip().removeprefix("- ") for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(_NOISE)]
    for said, plain in _PLAIN.items():
        lines = [re.sub(said, plain, line) for line in lines]
    text = " ".join(lines)
    wrong = re.search(r"Expected a dot import path string: (\w+)", text)
    if wrong:
        from perada.algorithms import Algorithm
        from perada.data import ImageSet, Partition
        from perada.server import ServerRule

        bases: list[type] = [Algorithm, ServerRule, Partition, ImageSet]
        names = sorted({kind.__name__ for base in bases for kind in _subclasses(base)})
        close = get_close_matches(wrong[1], names, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"known classes are {', '.join(names)}"
        text = f"{text.partition(':')[0]}: there is no class {wrong[1]!r}; {hint}"
    return printable(text)


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
    rank_zero = logging.getLogger("pytorch_lightning.utilities.rank_zero")
    rank_zero.addFilter(lambda record: "litlogger" not in record.getMessage())
    # What noise may follow from is not for every terminal.
    seed = logging.getLogger("lightning_fabric.utilities.seed")
    seed.addFilter(lambda record: "Seed set to" not in record.getMessage())
