# SPDX-License-Identifier: Apache-2.0
"""What the server does with the clients' updates: averaging and ensemble distillation, as functions of tensors."""

from perada.server.aggregate import client_weights, mean
from perada.server.distill import Distillation, distillation_loss, ensemble_logits

__all__ = ["Distillation", "client_weights", "distillation_loss", "ensemble_logits", "mean"]
