# SPDX-License-Identifier: Apache-2.0
"""What clients train with: the network, the options of the run, and what is kept from round to round."""

from functools import cached_property

from perada.algorithms.base import TensorNames
from perada.engine.engine import Engine
from perada.engine.loss_scaling import KeptScales
from perada.federation.settings import Settings
from perada.privacy.gradients import SampleGradients
from perada.privacy.protection import Protection


class LocalTrainer:
    """The components with which clients train: all clients of a simulation, or the single client of a site.

    Nothing here depends on the server's state.

    Attributes:
        engine: Runs the states of several clients through the network.
        tensor_names: Names of the states' tensors.
        settings: Options of the run.
        protection: Privacy of the clients' images; by default none.
        scales: Loss scales, in float16.
        uses_global_random: Whether a step has drawn from a global random stream of torch, NumPy or Python, as the
            network of a caller may; None before the first step. Several threads would draw in an order that changes
            from run to run.
    """

    def __init__(
        self, engine: Engine, tensor_names: TensorNames, settings: Settings, protection: Protection | None = None
    ) -> None:
        self.engine = engine
        self.tensor_names = tensor_names
        self.settings = settings
        self.protection = protection or Protection()
        self.scales = KeptScales(settings.loss_scaling)
        self.uses_global_random: bool | None = None

    @cached_property
    def gradients(self) -> SampleGradients:
        """Computes the gradients of private training; created in the first round, when features may replace images."""
        assert self.protection.image_account is not None
        return SampleGradients(self.protection.image_account.options, self.engine, self.settings.training.task)
