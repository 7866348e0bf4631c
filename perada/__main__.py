# SPDX-License-Identifier: Apache-2.0
"""Run the command line as ``python -m perada``, which also works if the script ``perada`` is not on the path."""

from perada.cli import entry_point

if __name__ == "__main__":
    entry_point()
