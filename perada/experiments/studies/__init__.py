# SPDX-License-Identifier: Apache-2.0
"""Small experiments of the papers in closed form or on made-up data: ``perada study NAME``."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches


def _fed_ensemble(args: Sequence[str]) -> None:
    from perada.experiments.studies.fed_ensemble import main

    main(args)


def _local_gd(args: Sequence[str]) -> None:
    from perada.experiments.studies.local_gd import main

    main(args)


STUDIES: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "fed-ensemble": (_fed_ensemble, "Fed-ensemble's toy regression: bias and variance against the number of modes"),
    "local-gd": (_local_gd, "what local gradient descent converges to with an overparametrised linear model"),
}
"""Studies by name: what runs one with its arguments, imported when it is run, and one line of help."""


def listing() -> str:
    """Usage and the studies, one a line."""
    width = max(map(len, STUDIES))
    rows = "\n".join(f"  {name:{width}}  {text}" for name, (_, text) in STUDIES.items())
    return f"usage: perada study NAME [options]\n\n{rows}\n\n`perada study NAME --help` tells a study's options."


def main(args: Sequence[str]) -> None:
    """Run ``perada study`` with these arguments: the name of a study and its options, or nothing for the list.

    Raises:
        ValueError: If there is no study of that name.
    """
    if not args or args[0] in ("-h", "--help"):
        print(listing())
        return
    name = args[0]
    if name not in STUDIES:
        close = get_close_matches(name, STUDIES, 1)
        hint = f"did you mean {close[0]!r}?" if close else "`perada study` lists the studies"
        raise ValueError(f"there is no study {name!r}; {hint}")
    STUDIES[name][0](args[1:])
