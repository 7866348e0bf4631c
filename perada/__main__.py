# SPDX-License-Identifier: Apache-2.0
"""Run the command line as ``python -m perada``, which also works if the script ``perada`` is not on the path."""

import os
import sys

# With -m, Python looks into the current folder first. Its files must not be run in place of libraries: it may be the
# folder of a run that somebody else wrote. It stays if perada itself is imported from there.
_HERE = os.getcwd()
_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if sys.path[:1] == [_HERE] and os.path.realpath(_HERE) != os.path.realpath(_PACKAGE_PARENT):
    del sys.path[0]

# The rule that imports come first would have this one look into the unsafe path.
from perada.cli import entry_point  # noqa: E402

if __name__ == "__main__":
    entry_point()
