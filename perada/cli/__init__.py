# SPDX-License-Identifier: Apache-2.0
"""The program `perada`."""

from perada.cli.main import entry_point, main

__all__ = ["entry_point", "main"]
