# SPDX-License-Identifier: Apache-2.0
"""Federated algorithms, each a small class with one client's math and the server's step."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
from perada.algorithms.scaffold import Scaffold
from perada.algorithms.sharing import FedAlt, FedBN, FedPer, FedRep, FedSim, LGFedAvg, PartialSharing
from perada.core.checks import OptionError, check_known, invalid_option
from perada.server.rules import SERVER_RULES

__all__ = [
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

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "perada": PerAda,
    "perada_no_kd": partial(PerAda, distill=False),
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "feddyn": FedDyn,
    "scaffold": Scaffold,
    "moon": Moon,
    "feddf": FedDF,
    "fedbe": FedBE,
    "fedbe_no_kd": partial(FedBE, distill=False),
    "fed_ensemble": FedEnsemble,
    "fedavg_ft": FedAvgFT,
    "fedbabu": FedBABU,
    "standalone": Standalone,
    "mtl": MTL,
    "ditto": Ditto,
    "pfedme": PFedMe,
    "apfl": APFL,
    "fedbn": FedBN,
    "lg_fedavg": LGFedAvg,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedrod": FedROD,
    "fedalt_input": partial(FedAlt, "input"),
    "fedalt_output": partial(FedAlt, "output"),
    "fedalt_adapter": partial(FedAlt, "adapter"),
    "fedsim_input": partial(FedSim, "input"),
    "fedsim_output": partial(FedSim, "output"),
    "fedsim_adapter": partial(FedSim, "adapter"),
    "ffa_lora": FFALoRA,
    "fedsa_lora": FedSALoRA,
    "rolora": RoLoRA,
    "fedex_lora": FedExLoRA,
    "flora": FLoRA,
    "feddpa": FedDPA,
    "feddpa_f": FedDPAF,
    "fedalt_row": RestOfWorld,
    "het_lora": HetLoRA,
}


@dataclass(frozen=True)
class Variant:
    """A name for an algorithm with a certain server rule, or with algorithms as arguments.

    Attributes:
        base: Name of the other algorithm in :data:`ALGORITHMS`.
        server_rule: Name of the rule in ``SERVER_RULES``; None if it brings none.
        options: Arguments of the other algorithm that are algorithms, by their names in :data:`ALGORITHMS`.
    """

    base: str
    server_rule: str | None = None
    options: dict[str, str] = field(default_factory=dict)


VARIANTS: dict[str, Variant] = {
    "fed_ensemble_perada": Variant("fed_ensemble", options={"base": "perada"}),
    "modified_local_gd": Variant("fedavg", server_rule="modified_local_gd"),
    "flexlora": Variant("fedavg", server_rule="svd"),
    "lora_fair": Variant("fedavg", server_rule="lora_fair"),
}
ALGORITHM_NAMES = (*ALGORITHMS, *VARIANTS)
"""Every name that `finetune`, recipes and comparisons accept."""


def with_server_rule(name: str | Algorithm, server_rule: Any) -> tuple[str | Algorithm, Any]:  # noqa: ANN401  # or a rule
    """Resolve a name that stands for an algorithm with a server rule.

    Args:
        name: Of an algorithm, or an algorithm, which is returned as it is.
        server_rule: What was chosen: a rule or its name; ``"mean"``, the default, or None where none was.

    Returns:
        The algorithm or its name, and the rule: that of the name, if it has one.

    Raises:
        ValueError: If the name has a rule, and another one was chosen.

    >>> with_server_rule("flexlora", "mean"), with_server_rule("ditto", "mean")
    (('fedavg', 'svd'), ('ditto', 'mean'))
    """
    variant = VARIANTS.get(name) if isinstance(name, str) else None
    if variant is None or variant.server_rule is None:
        return name, server_rule
    if server_rule not in (None, "mean", variant.server_rule):
        raise OptionError(
            f"algorithm={name!r} implies server_rule={variant.server_rule!r}, but server_rule={server_rule!r} is set "
            f"too; leave server_rule out, or set algorithm={variant.base!r}",
            name="algorithm",
            value=name,
        )
    return variant.base, variant.server_rule


def make_algorithm(name: str | Algorithm, **options: Any) -> Algorithm:
    """Return the algorithm called ``name``; an :class:`Algorithm` is returned unchanged.

    Raises:
        ValueError: If there is no such algorithm, or it does not take an option.

    >>> make_algorithm("perada", prox_strength=0.5).prox_strength
    0.5
    """
    if isinstance(name, Algorithm):
        return name
    if not isinstance(name, str):
        raise invalid_option("algorithm", name, "a name such as 'perada' or an Algorithm")
    variant = VARIANTS.get(name)
    rule = variant.server_rule if variant else name
    if rule in SERVER_RULES:
        raise OptionError(
            f"algorithm={name!r} is a server rule, not an algorithm; set server_rule={rule!r} and algorithm='fedavg' "
            "or a different algorithm",
            name="algorithm",
            value=name,
        )
    if variant is not None:
        arguments: dict[str, Any] = {}
        for argument, inner_name in variant.options.items():
            arguments[argument] = make_algorithm(inner_name)
        return make_algorithm(variant.base, **arguments | options)
    check_known("algorithm", name, ALGORITHM_NAMES)
    try:
        return ALGORITHMS[name](**options)
    except TypeError as error:
        option_names = ", ".join(inspect.signature(ALGORITHMS[name]).parameters) or "none at all"
        what = f"algorithm={name!r} does not accept the options {options}"
        raise ValueError(f"{what}: {error}; its options are {option_names}") from None
