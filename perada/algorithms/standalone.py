# SPDX-License-Identifier: Apache-2.0
"""Standalone: every client trains alone."""

from perada.algorithms.base import Algorithm, ClientStep


class Standalone(Algorithm):
    """Clients train and keep their personal state. They send nothing, and the global state stays as it began."""

    inference = "personal"
    roles = ("personal",)
    sends = False
    global_model = False
    unsent = frozenset({"personal"})

    def client_step(self, step: ClientStep) -> None:
        """A step on the client's own loss."""
        step.descend("personal", step.loss("personal"))
