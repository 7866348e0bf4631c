# SPDX-License-Identifier: Apache-2.0
"""Run many states through one model, and train them."""

from perada.engine.engine import Engine, EngineName

__all__ = ["Engine", "EngineName"]
