# SPDX-License-Identifier: Apache-2.0
"""FedRep (Collins et al., ICML 2021)."""

from perada.algorithms.fedalt import FedAlt
from perada.core.checks import check_number


class FedRep(FedAlt):
    """Private heads on a shared body (their Algorithm 1), which is FedAlt with the output split.

    In each round a client trains its head with the body frozen, then the body with the head frozen. The server
    averages the bodies.

    Args:
        head_epochs: Epochs on the head in each round. Default: as long as on the body. With 0 this is FedAvg of the
            body under each client's initial head.
    """

    def __init__(self, head_epochs: float | None = None) -> None:
        check_number("head_epochs", head_epochs, least=0, optional=True)
        super().__init__("output", head_epochs)
        self.head_epochs = head_epochs
