# SPDX-License-Identifier: Apache-2.0
"""All that protects a run: privacy of single images, of whole clients, both, or neither."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from perada.privacy.client_level import ClientLevel
from perada.privacy.training import PrivateRound, PrivateTraining
from perada.rounds import RoundPlan


@dataclass(frozen=True)
class Protection:
    """What protects a run.

    Attributes:
        images: Private training of every client.
        clients: Privacy of what a client sends.
    """

    images: PrivateTraining | None = None
    clients: ClientLevel | None = None

    def open(self, plan: RoundPlan, device: torch.device, tuning: bool = False) -> PrivateRound | None:
        """Begin local training."""
        return None if self.images is None else self.images.open(plan, device, tuning)

    def spend(self, plan: RoundPlan, tuning: bool = False) -> None:
        """Write down what local training cost."""
        if self.images is not None:
            self.images.account.spend(plan, tuning)

    @property
    def _secure_rng(self) -> dict[str, bool]:
        """Of each section that there is, whether its noise is drawn from a cryptographic generator."""
        images = {} if self.images is None else {"privacy": self.images.account.options.secure_rng}
        return images | ({} if self.clients is None else {"client_privacy": self.clients.options.secure_rng})

    @property
    def test_mode(self) -> bool:
        """Whether any noise follows from the run's seed."""
        return not all(self._secure_rng.values())

    def metrics(self) -> dict[str, float]:
        """ε so far, and a mark where the noise follows from the run's seed."""
        images = {} if self.images is None else self.images.account.metrics()
        clients = {} if self.clients is None else self.clients.metrics()
        return images | clients | ({"privacy/test_mode": 1.0} if self.test_mode else {})

    def epsilons(self, num_clients: int) -> dict[str, list[float]]:
        """ε of each client so far, by the name of the metric."""
        result = {}
        if self.images is not None:
            result = {f"privacy/{name}_epsilon": values for name, values in self.images.account.epsilons().items()}
        if self.clients is not None:
            result["privacy/client_epsilon"] = list(self.clients.epsilons(range(num_clients)).values())
        return result

    def record(self, num_clients: int) -> dict[str, Any] | None:
        """Options, noise and ε of each client in plain types; ``None`` where nothing is private."""
        record: dict[str, Any] = {}
        if self.images is not None:
            record["sample"] = self.images.account.record()
        if self.clients is not None:
            record["client"] = {
                "options": asdict(self.clients.options),
                "noise_multiplier": self.clients.noise_multiplier,
                "epsilon": list(self.clients.epsilons(range(num_clients)).values()),
            }
        return record or None

    def state_dict(self) -> dict[str, Any]:
        """Ledgers, in plain types."""
        return {
            "images": None if self.images is None else self.images.account.state_dict(),
            "clients": None if self.clients is None else self.clients.state_dict(),
            "secure_rng": self._secure_rng,
        }

    def check_alike(self, saved: dict[str, Any] | None) -> None:
        """Compare how a run was private with how this one is.

        Args:
            saved: What :meth:`state_dict` gave; ``None`` for a run that was not private.

        Raises:
            ValueError: If it was in another way.
        """
        saved = saved or {"images": None, "clients": None}
        for name, own in (("images", self.images), ("clients", self.clients)):
            if (saved[name] is None) != (own is None):
                section = {"images": "privacy", "clients": "client_privacy"}[name]
                with_it, without = ("without", "with") if saved[name] is None else ("with", "without")
                raise ValueError(
                    f"the checkpoint is of a run {with_it} {section}, and this one is {without}: what it cost could "
                    f"not be accounted for; go on {with_it} {section}, or start anew"
                )
        secure = saved.get("secure_rng", dict.fromkeys(self._secure_rng, False))  # earlier versions did not say
        for section, here in self._secure_rng.items():
            there = secure[section]
            if there != here:
                raise ValueError(
                    f"{section}: the checkpoint's noise was drawn with secure_rng={there}, and here it is {here}: what "
                    f"is said of the noise would be wrong of one part; resume with secure_rng={there}, or start anew"
                )

    def load_state_dict(self, saved: dict[str, Any] | None, rounds_done: int, tuned: bool) -> None:
        """Go on from what :meth:`state_dict` gave.

        Args:
            saved: What it gave; ``None`` for a run that was not private.
            rounds_done: Rounds that it counts.
            tuned: Whether it counts a fine-tuning after them.

        Raises:
            ValueError: If what was trained so far was private in another way, or would pass its target.
        """
        self.check_alike(saved)
        if saved is None:
            return
        if self.images is not None:
            self.images.account.load_state_dict(saved["images"], rounds_done, tuned)
        if self.clients is not None:
            self.clients.load_state_dict(saved["clients"])
