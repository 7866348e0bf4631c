# SPDX-License-Identifier: Apache-2.0
"""Server-side processing of the clients' updates: averaging and ensemble distillation, as functions of tensors."""

from perada.server.aggregate import Aggregation, Mean, ServerRule, Updates, client_weights, mean
from perada.server.distill import Distillation, DistillationRound, Distiller
from perada.server.low_rank import SVD, LoRAFair
from perada.server.robust import FLTrust, GeometricMedian, Krum, NormClipping
from perada.server.rules import (
    SERVER_RULES,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedYogi,
    Median,
    ModifiedLocalGD,
    TrimmedMean,
    make_rule,
)
from perada.server.sums import SecureSums

__all__ = [
    "SERVER_RULES",
    "SVD",
    "Aggregation",
    "Distillation",
    "DistillationRound",
    "Distiller",
    "FLTrust",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedYogi",
    "GeometricMedian",
    "Krum",
    "LoRAFair",
    "Mean",
    "Median",
    "ModifiedLocalGD",
    "NormClipping",
    "SecureSums",
    "ServerRule",
    "TrimmedMean",
    "Updates",
    "client_weights",
    "make_rule",
    "mean",
]
