# SPDX-License-Identifier: Apache-2.0
"""What the server does with the clients' updates: averaging and ensemble distillation, as functions of tensors."""

from perada.server.aggregate import Updates, client_weights, mean
from perada.server.distill import Distillation, distillation_loss, ensemble_logits
from perada.server.rules import (
    SERVER_RULES,
    Aggregation,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedYogi,
    Mean,
    Median,
    ModifiedLocalGD,
    ServerRule,
    TrimmedMean,
    make_rule,
)

__all__ = [
    "SERVER_RULES",
    "Aggregation",
    "Distillation",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedYogi",
    "Mean",
    "Median",
    "ModifiedLocalGD",
    "ServerRule",
    "TrimmedMean",
    "Updates",
    "client_weights",
    "distillation_loss",
    "ensemble_logits",
    "make_rule",
    "mean",
]
