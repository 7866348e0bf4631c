# SPDX-License-Identifier: Apache-2.0
"""Algorithms by name, and the methods of papers, each an algorithm with arguments that has a recipe."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from perada.algorithms.base import Algorithm
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
from perada.algorithms.sharing import FedAlt, FedBN, FedPer, FedRep, FedSim, LGFedAvg
from perada.core.checks import OptionError, check_known, invalid_option
from perada.core.text import near_names
from perada.server.rules import SERVER_RULES
from perada.system.yaml_files import read_yaml

ALGORITHMS: dict[str, type[Algorithm]] = {
    "perada": PerAda,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "feddyn": FedDyn,
    "scaffold": Scaffold,
    "moon": Moon,
    "feddf": FedDF,
    "fedbe": FedBE,
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
    "fedalt": FedAlt,
    "fedsim": FedSim,
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
"""Every algorithm, by the name that `finetune`, recipes and command lines accept. None needs arguments."""
METHODS_FOLDER = Path(__file__).parents[1] / "recipes" / "method"


@dataclass(frozen=True)
class Method:
    """A method of a paper, by the name of its recipe ``method/NAME``.

    Attributes:
        name: Name of the recipe.
        algorithm: Name of its algorithm in :data:`ALGORITHMS`.
        options: Arguments of the algorithm that tell the method from others of the same algorithm. An argument that is
            an algorithm is given by its name.
        server_rule: Name of its rule in ``SERVER_RULES``; None for the mean.
        model: Section ``model`` of the recipe: what the paper trains.
    """

    name: str
    algorithm: str
    options: dict[str, Any]
    server_rule: str | None
    model: dict[str, Any]

    def make(self, **options: Any) -> Algorithm:
        """Return the method's algorithm, with further arguments."""
        arguments: dict[str, Any] = {}
        for name, value in self.options.items():
            is_algorithm = isinstance(value, str) and value in ALGORITHMS
            arguments[name] = make_algorithm(value) if is_algorithm else value
        return make_algorithm(self.algorithm, **arguments | options)

    def __str__(self) -> str:
        text = f"algorithm={self.algorithm!r}"
        settings = [f"{name}={value!r}" for name, value in self.options.items()]
        if self.server_rule is not None:
            settings.append(f"server_rule={self.server_rule!r}")
        if settings:
            text += " with " + " and ".join(settings)
        return text


@dataclass(frozen=True)
class _Recipe:
    """What the recipe of a method states.

    Attributes:
        algorithm: Name of the algorithm in :data:`ALGORITHMS`.
        arguments: The algorithm's arguments. One that is an algorithm is given by its name.
        server_rule: Name of the rule in ``SERVER_RULES``; None for the mean.
        model: Section ``model``.
    """

    algorithm: str
    arguments: dict[str, Any]
    server_rule: str | None
    model: dict[str, Any]


@cache
def methods() -> dict[str, Method]:
    """Return the methods of papers by name, sorted by their algorithms.

    >>> print(methods()["perada_no_kd"], methods()["flexlora"], sep="; ")
    algorithm='perada' with distill=False; algorithm='fedavg' with server_rule='svd'
    """
    recipes = {path.stem: _read_recipe(path) for path in sorted(METHODS_FOLDER.glob("*.yaml"))}
    order = list(ALGORITHMS)
    names = sorted(recipes, key=lambda name: order.index(recipes[name].algorithm))
    result = {}
    for name in names:
        recipe = recipes[name]
        same_algorithm = [recipes[other] for other in names if recipes[other].algorithm == recipe.algorithm]
        result[name] = Method(
            name=name,
            algorithm=recipe.algorithm,
            options=_distinguishing_arguments(recipe, same_algorithm),
            server_rule=recipe.server_rule,
            model=recipe.model,
        )
    return result


def _read_recipe(path: Path) -> _Recipe:
    """Read the recipe of a method, which names classes, with the names of these classes in perada."""
    names_by_class = {algorithm.__name__: name for name, algorithm in ALGORITHMS.items()}
    rules_by_class = {rule.__name__: name for name, rule in SERVER_RULES.items()}
    content = read_yaml(path)
    entry = content["federated"]["algorithm"]
    if isinstance(entry, str):
        entry = {"class_path": entry}
    arguments = {}
    for argument, value in entry.get("init_args", {}).items():
        is_algorithm = isinstance(value, str) and value in names_by_class
        arguments[argument] = names_by_class[value] if is_algorithm else value
    rule_class = content["federated"].get("server_rule")
    return _Recipe(
        algorithm=names_by_class[entry["class_path"]],
        arguments=arguments,
        server_rule=None if rule_class is None else rules_by_class[rule_class],
        model=content.get("model", {}),
    )


def distinct_methods() -> dict[str, Method]:
    """Return the methods that differ in algorithm, arguments or server rule, by name: the rows of a comparison.

    A recipe that changes only how an algorithm is trained is left out.
    """
    distinct: dict[str, Method] = {}
    for name, method in methods().items():
        contents = [(other.algorithm, other.options, other.server_rule) for other in distinct.values()]
        if (method.algorithm, method.options, method.server_rule) not in contents:
            distinct[name] = method
    return distinct


def _distinguishing_arguments(recipe: _Recipe, same_algorithm: Sequence[_Recipe]) -> dict[str, Any]:
    """Return the arguments of a recipe in which the recipes of its algorithm differ.

    Args:
        recipe: The recipe.
        same_algorithm: All recipes of the algorithm. An argument that one lacks has its default.
    """
    parameters = inspect.signature(ALGORITHMS[recipe.algorithm]).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    distinguishing = {}
    arguments = dict.fromkeys(chain.from_iterable(other.arguments for other in same_algorithm))
    for argument in arguments:
        value = recipe.arguments.get(argument, defaults[argument])
        differs = any(other.arguments.get(argument, defaults[argument]) != value for other in same_algorithm)
        if differs and value is not None:
            distinguishing[argument] = value
    return distinguishing


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
    if name in SERVER_RULES:
        raise OptionError(
            f"algorithm={name!r} is a server rule, not an algorithm; set server_rule={name!r} and algorithm='fedavg' "
            "or a different algorithm",
            name="algorithm",
            value=name,
        )
    if name not in ALGORITHMS:
        _check_method(name)
    check_known("algorithm", name, ALGORITHMS)
    signature = inspect.signature(ALGORITHMS[name])
    try:
        signature.bind(**options)
    except TypeError as error:
        option_names = ", ".join(signature.parameters) or "none at all"
        what = f"algorithm={name!r} does not accept the options {options}"
        raise ValueError(f"{what}: {error}; its options are {option_names}") from None
    # Outside of the try, so that a TypeError of the constructor itself is not taken for a wrong option.
    return ALGORITHMS[name](**options)


def _check_method(name: str) -> None:
    """Raise if a name that is not an algorithm is that of a method, or nearer to one than to an algorithm."""
    nearest = near_names(name, [*ALGORITHMS, *methods()])
    method = methods().get(name) or methods().get("".join(nearest))
    if method is not None and method.name not in ALGORITHMS:
        raise OptionError(
            f"algorithm={name!r} is unknown; the method {method.name!r} is {method}", name="algorithm", value=name
        )
