# SPDX-License-Identifier: Apache-2.0
"""Base of algorithms, server rules and partitions, which hold options."""

import inspect
import re


class Options:
    """Something made from options, whose ``repr`` names the class and all of them and is the same in every process.

    The options are the constructor's arguments, with the values that they have now. Of a class that does not keep each
    under its own name, everything that the object holds is shown.
    """

    def __repr__(self) -> str:
        held, taken = vars(self), inspect.signature(type(self)).parameters
        names = taken if taken.keys() <= held.keys() else held
        return f"{type(self).__name__}({', '.join(f'{name}={_shown(held[name])}' for name in names)})"


def _shown(value: object) -> str:
    ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
    return re.sub(r" at 0x[0-9a-f]+", "", repr(ordered))  # addresses, of functions and the like, are a process's own
