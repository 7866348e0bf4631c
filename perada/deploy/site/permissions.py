# SPDX-License-Identifier: Apache-2.0
"""What a site allows: what may leave it, and on which images its runs may continue."""

import logging
from dataclasses import dataclass
from typing import Any

from perada.data.fingerprints import changed_content
from perada.deploy.protocol import (
    RejectionError,
)
from perada.deploy.site.client import Client
from perada.deploy.state import RunState


@dataclass
class Permissions:
    """What a site allows.

    Attributes:
        may_send: What of :data:`perada.deploy.protocol.MAY_SEND` may leave the site in addition to updates.
        resume_allow: ``images`` allows a run without privacy to continue with other images than it has trained on.
    """

    may_send: set[str]
    resume_allow: set[str]

    def allowed_facts(self, fact_kind: str, facts: dict[str, Any]) -> dict[str, Any]:
        """Return facts of a kind if they may leave the site."""
        return facts if fact_kind in self.may_send else {}

    def check_images(self, client: Client, run_state: RunState, log: logging.Logger) -> None:
        """Check that a run continues on the images and labels that it has trained on here.

        Its personal state depends on them, and so do the ledgers and the noise of a private run.

        Raises:
            RejectionError: If they have changed, and the run is private or the site does not allow it.
        """
        trained_fingerprint = run_state.training.fingerprint
        changed = changed_content(trained_fingerprint, client.fingerprint) if trained_fingerprint else None
        if changed is None:
            return
        loop = client.recipe.loop
        difference = f"the site's {changed} differ from those that run {run_state.run} has trained on here"
        if loop.privacy is not None or loop.client_privacy is not None:
            raise RejectionError(
                f"{difference}, and its noise and ledgers are tied to those; restore them, or take part in a new run",
                "other",
            )
        if "images" not in self.resume_allow:
            remedy = "restore them, or accept the change with resume_allow: [images] in the site's file"
            raise RejectionError(f"{difference}; {remedy}", "other")
        log.warning("%s; the run continues with the new ones, as resume_allow permits", difference)
