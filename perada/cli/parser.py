# SPDX-License-Identifier: Apache-2.0
"""What the parser of recipes understands: both names of an option, and classes by name and of one's own."""

import inspect
import re
import sys
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from importlib import import_module, invalidate_caches
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import Namespace, get_loader
from pytorch_lightning.cli import LightningArgumentParser

from perada.algorithms import ALGORITHMS
from perada.api import FULL_NAMES, full_name
from perada.cli.recipes import recipe_files
from perada.compare.plan import spec_of, words_of
from perada.server import SERVER_RULES

T = TypeVar("T")
BY_NAME = ("federated.algorithm", "federated.algorithm.base", "federated.server_rule")
"""Options that take a class by the name of an algorithm or a server rule."""
_ELSEWHERE = {
    "trainer.max_epochs": "num_rounds n_rounds max_rounds comm_rounds communication_rounds global_rounds global_epochs",
    "trainer.max_epochs federated.local_epochs": "epochs num_epochs n_epochs",
    "trainer.devices": "gpus num_gpus n_gpus",
    "trainer.accelerator": "device gpu",
    "trainer.default_root_dir": "output output_dir save_dir log_dir logdir",
    "model.lr_local model.lr_personal federated.distillation.lr": "lr learning_rate eta",
    "model.lr_local": "local_lr lr_l eta_l",
    "model.lr_personal": "personal_lr lr_p eta_p",
    "federated.distillation.lr": "server_lr lr_g",
    "federated.distillation.steps": "kd_steps server_steps",
    "federated.distillation.temperature": "temperature tau kd_temperature",
    "model.backbone": "net network arch architecture model_name",
    "model.adapter_options": "rank r lora_r lora_rank",
    "model.clip_norm privacy.max_norm": "clip gradient_clip grad_clip max_grad_norm clipping_norm",
    "data.partition.num_clients": "clients num_clients n_clients",
    "data.partition.alpha": "alpha dirichlet_alpha",
    "data.public": "public_data proxy proxy_data",
    "federated.clients_per_round": "participation sample_rate client_fraction frac sampled_clients",
    "federated.algorithm.prox_strength": "lambda lam lamda lmbda mu prox",
    "federated.server_rule": "aggregation aggregator",
    "privacy.noise_multiplier client_privacy.noise_multiplier": "sigma noise noise_scale",
    "privacy.target_epsilon client_privacy.target_epsilon": "epsilon eps",
    "privacy": "dp differential_privacy",
    "ckpt_path": "checkpoint resume resume_from",
}
ELSEWHERE = {name: tuple(targets.split()) for targets, names in _ELSEWHERE.items() for name in names.split()}
"""What options are called in papers and other programs, and which they may be here."""

_WRONG = (
    r"(?:unrecognized arguments|ambiguous option): (?:\S+ )*?(?P<dashes>--)(?P<key>[\w.-]+)[^\n]*",
    r"(?:Group '(?P<group>[^']+)'|Subcommand '\w+') does not accept option '(?P<key>[^']+)'",
    r"(?:Problem with given class_path '(?P<kind>[^']+)':\s+)?Option '(?P<key>[^']+)' is not accepted",
)
"""How jsonargparse says that there is no such option."""


def wrong_option(message: str) -> tuple[re.Match[str], str] | None:
    """Where an error of the parser says that there is no such option, and the option's full name."""
    for form in _WRONG:
        if found := re.search(form, message):
            parts = found.groupdict()
            above = re.search(r'Parser key "([^"]+)"', message) if parts.get("kind") else None
            section = above[1] if above else parts.get("group")
            return found, f"{section}.{parts['key']}" if section else parts["key"]
    return None


def with_proposal(message: str, known: Collection[str]) -> str:
    """An error of the parser; where it is about an option that there is not, with the nearest of the ``known`` ones.

    >>> with_proposal("unrecognized arguments: --lr 1", ["model.lr_local", "model.lr_personal", "model.optimizer"])
    'unrecognized arguments: --lr 1; did you mean --model.lr_local or --model.lr_personal?'
    """
    wrong = wrong_option(message)
    if wrong is None:
        return message
    found, key = wrong
    parts = found.groupdict()
    if kind := parts.get("kind"):
        module, _, name = kind.rpartition(".")
        taken = inspect.signature(getattr(sys.modules[module], name)).parameters
        known = [f"{key.rpartition('.')[0]}.{argument}" for argument in taken]
    near = [f"{parts.get('dashes') or ''}{name}" for name in nearest(key, known)]
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return message[: found.end()] + hint + message[found.end() :]


def nearest(key: str, known: Collection[str]) -> list[str]:
    """The options that a wrong ``key`` may stand for; none where nothing is near.

    >>> nearest("trainer.rounds", ["trainer.max_epochs", "trainer.max_steps"])
    ['trainer.max_epochs']
    >>> nearest("model.adaptr", ["model.adapter", "data.dataset"])
    ['model.adapter']
    """
    section, _, last = key.rpartition(".")
    called: dict[str, list[str]] = {}
    for name in known:
        called.setdefault(name.rpartition(".")[2], []).append(name)
    for word, targets in (ELSEWHERE | {short: (full,) for short, full in FULL_NAMES.items()}).items():
        if there := [name for name in targets if name in known or name.rpartition(".")[0] in known]:
            called[word] = there
    called |= {} if section else {name: [name] for name in FULL_NAMES}
    last = last.replace("-", "_").lower()
    word = last if last in called else "".join(get_close_matches(last, called, 1, 0.75))
    if not word:
        return get_close_matches(key, known, 1, 0.75)
    return [name for name in called[word] if section and name.startswith(f"{section}.")] or called[word]


class RecipeParser(LightningArgumentParser):
    """Reads recipes in which options have their short names, and algorithms and server rules theirs."""

    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Namespace:
        """Parse a recipe."""
        try:
            recipe = get_loader("yaml")(content)
        except yaml.YAMLError:  # the parser says it
            recipe = None
        if isinstance(recipe, dict) and (full := full_names(recipe)) != recipe:
            content = yaml.safe_dump(full, sort_keys=False, allow_unicode=True)
        parsed: Namespace = super().parse_string(content, *args, **kwargs)
        return parsed


def spelt_out(args: Sequence[str]) -> list[str]:
    """Options by their full names, with the files of recipes and the classes of algorithms and server rules.

    >>> spelt_out(["--rounds", "3", "--algorithm", "perada_no_kd"])[:3]
    ['--trainer.max_epochs', '3', '--federated.algorithm=perada.algorithms.perada.PerAda']
    """
    out: list[str] = []
    words = iter(args)
    for word in words:
        option, equals, value = ("--config", "", "") if word == "-c" else word.partition("=")
        name = full_name(option[2:])
        if not option.startswith("--"):
            out.append(word)
            continue
        if not equals and name in ("config", *BY_NAME):  # given as two words
            value = next(words, "")
        if name == "config" and value:
            out += [f"--config={path}" for path in recipe_files(value)]
        elif name in BY_NAME and value:
            named = by_name(value, name)
            out += words_of(name, named) if isinstance(named, dict) else [f"--{name}={value}"]
        else:
            out.append(f"--{name}{equals}{value}")
    return out


def full_names(content: dict[str, Any]) -> dict[str, Any]:
    """A recipe with the full names of options, and the classes that the names of algorithms and server rules stand for.

    Raises:
        ValueError: If an option is given by both its names, or beside a file for its section.

    >>> full_names({"rounds": 3, "trainer": {"devices": 1}})
    {'trainer': {'devices': 1, 'max_epochs': 3}}
    """
    out = {name: dict(value) if isinstance(value, dict) else value for name, value in content.items()}
    # An algorithm comes before its arguments.
    for name in sorted(FULL_NAMES.keys() & content.keys(), key=lambda name: FULL_NAMES[name].count(".")):
        *sections, last = FULL_NAMES[name].split(".")
        value = out.pop(name)
        inner: dict[str, Any] = out
        for section in sections:
            below: Any = inner.get(section) or {}
            if isinstance(below, str) and section != "algorithm":
                raise ValueError(f"{name} cannot be given beside {section}: {below}, a file; put it into that file")
            inner[section] = {"class_path": below} if isinstance(below, str) else dict(below)
            inner = inner[section]
        if sections[-1:] == ["algorithm"]:
            inner["init_args"] = inner = dict(inner.get("init_args") or {})
        if last in inner:
            raise ValueError(f"{name} and {FULL_NAMES[name]} are the same option; give it once")
        inner[last] = value
    if isinstance(federated := out.get("federated"), dict):
        for name in ("privacy", "client_privacy"):
            own = federated.pop(name, None)
            if own is not None and out.get(name) is not None:
                raise ValueError(f"{name} and federated.{name} are the same section; give it once")
            out |= {} if own is None else {name: own}
        for role in ("algorithm", "server_rule"):
            if role in federated:
                federated[role] = by_name(federated[role], f"federated.{role}")
    return out


def by_name(given: Any, option: str) -> Any:  # noqa: ANN401  # any YAML
    """An algorithm or a server rule by its class, where it is given by name; else what is given."""
    made = {"class_path": given} if isinstance(given, str) else given
    if not isinstance(made, dict):
        return given
    name, own = made.get("class_path"), made.get("init_args") or {}
    if isinstance(own, dict) and isinstance(own.get("base"), str | dict):
        own = own | {"base": by_name(own["base"], option)}
    if option != "federated.server_rule" and name in ALGORITHMS:
        spec = spec_of(name)
        return made | spec | {"init_args": spec["init_args"] | own}
    if option == "federated.server_rule" and name in SERVER_RULES:
        return made | {"class_path": SERVER_RULES[name].__name__}
    return made | ({"init_args": own} if own else {}) if isinstance(given, dict) else given


def with_own_classes(parse: Callable[[], T]) -> T:
    """What is parsed, with the classes that it names in modules of the current folder.

    Only a module in which a class was looked for in vain is imported from there, and nothing else: libraries try to
    import what may or may not be installed, and a file of that name would be run.

    Raises:
        ValueError: If one is there and cannot be imported.
    """
    here = str(Path.cwd())
    while True:
        try:
            return parse()
        except Exception as error:
            wrong = re.search(r"'((\w+)\.[\w.]+)':\s+No module named '\2'", str(error))
            if wrong is None or wrong[2] in sys.modules or PathFinder.find_spec(wrong[2], [here]) is None:
                raise
        module, _, kind = wrong[1].rpartition(".")
        sys.path.append(here)
        try:
            invalidate_caches()
            import_module(module)
        except Exception as error:  # whatever the caller's code raises
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(
                f"{kind!r} cannot be imported from {wrong[2]!r} in this folder: {reason}; fix it"
            ) from error
        finally:
            sys.path.remove(here)
