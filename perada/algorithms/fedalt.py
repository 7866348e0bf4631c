# SPDX-License-Identifier: Apache-2.0
"""FedAlt (Pillutla et al., ICML 2022)."""

from perada.algorithms.base import ClientStep, Slot
from perada.algorithms.fedsim import FedSim, Split, whole_loss
from perada.core.checks import check_number
from perada.core.rounds import Phase


class FedAlt(FedSim):
    """The private part v is trained with the shared part u frozen, then u with v frozen (their Algorithm 2).

    v is trained at the rate of the personal role, u at that of the local role. Running statistics of norms follow every
    training pass.

    Args:
        split: What is private, as in :class:`FedSim`.
        personal_epochs: Epochs on v in each round. Default: as long as on u; 0 leaves v as it is.
    """

    def __init__(self, split: Split = "output", personal_epochs: float | None = None) -> None:
        super().__init__(split)
        check_number("personal_epochs", personal_epochs, least=0, optional=True)
        self.personal_epochs = personal_epochs

    def phases(self, epochs: float | None, steps: int | None) -> tuple[Phase, ...]:
        """First v, then u."""
        own, second = self.personal_epochs, Phase("local", epochs, steps)
        if own == 0:
            return (second,)
        return (Phase("personal", epochs, steps) if own is None else Phase("personal", own), second)

    def trained(self, role: str, phase: str, slot: Slot) -> tuple[str, ...]:
        """Each phase trains the role it is named after."""
        return slot.parameters if role == phase else ()

    def client_step(self, step: ClientStep) -> None:
        """A step on the part whose turn it is."""
        step.descend(step.phase, whole_loss(step))
