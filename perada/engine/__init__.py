# SPDX-License-Identifier: Apache-2.0
"""Many states through one model, and what their training needs."""

from perada.engine.engine import Engine, EngineName

__all__ = ["Engine", "EngineName"]
