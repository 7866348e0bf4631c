# SPDX-License-Identifier: Apache-2.0
"""``python -m perada``: the program, where its script is not on the path."""

from perada.cli import entry_point

if __name__ == "__main__":
    entry_point()
