# SPDX-License-Identifier: Apache-2.0
"""Federated algorithms, each a small class with one client's math and the server's step."""

from perada.algorithms.base import Algorithm, Broadcast, ClientStep, ServerStep, Stacks, TensorNames
from perada.algorithms.branches import FedDPA, FedDPAF, RestOfWorld
from perada.algorithms.ensembles import FedBE, FedEnsemble
from perada.algorithms.fedavg import FedAvg, FedAvgFT, FedBABU, FedDF, FedDyn, FedProx, Standalone
from perada.algorithms.fedrod import FedROD
from perada.algorithms.het_lora import HetLoRA
from perada.algorithms.lora import FedSALoRA, FFALoRA, RoLoRA
from perada.algorithms.merging import FedExLoRA, FLoRA
from perada.algorithms.moon import Moon
from perada.algorithms.perada import APFL, MTL, Ditto, PerAda, PFedMe
from perada.algorithms.registry import ALGORITHMS, make_algorithm
from perada.algorithms.scaffold import Scaffold
from perada.algorithms.sharing import FedAlt, FedBN, FedPer, FedRep, FedSim, LGFedAvg, PartialSharing

__all__ = [
    "ALGORITHMS",
    "APFL",
    "MTL",
    "Algorithm",
    "Broadcast",
    "ClientStep",
    "Ditto",
    "FFALoRA",
    "FLoRA",
    "FedAlt",
    "FedAvg",
    "FedAvgFT",
    "FedBABU",
    "FedBE",
    "FedBN",
    "FedDF",
    "FedDPA",
    "FedDPAF",
    "FedDyn",
    "FedEnsemble",
    "FedExLoRA",
    "FedPer",
    "FedProx",
    "FedROD",
    "FedRep",
    "FedSALoRA",
    "FedSim",
    "HetLoRA",
    "LGFedAvg",
    "Moon",
    "PFedMe",
    "PartialSharing",
    "PerAda",
    "RestOfWorld",
    "RoLoRA",
    "Scaffold",
    "ServerStep",
    "Stacks",
    "Standalone",
    "TensorNames",
    "make_algorithm",
]
