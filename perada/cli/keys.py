# SPDX-License-Identifier: Apache-2.0
"""Names of options: the short ones of `perada.finetune`, what others call them, and the nearest to a wrong one."""

import inspect
import re
import sys
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Any

_SECTIONS = {
    "model": "backbone adapter adapter_options pretrained train_backbone lr_personal lr_local optimizer momentum "
    "weight_decay clip_norm lr_schedule engine clients_per_chunk channels_last cache_features torch_compile metric "
    "global_test_clients",
    "data": "image_size batch_size num_classes",
    "federated": "algorithm clients_per_round local_epochs local_steps weighting server_rule distillation client_store "
    "diagnostics resume_allow max_failures refuse_far",
}
SHORT = {name: f"{section}.{name}" for section, names in _SECTIONS.items() for name in names.split()}
SHORT |= {
    f"distill_{name}": f"federated.distillation.{name}"
    for name in ("steps", "batch_size", "temperature", "until_round", "validate_every", "share_steps")
}
SHORT |= {
    "lr_server": "federated.distillation.lr",
    "server_optimizer": "federated.distillation.optimizer",
    "prox_strength": "federated.algorithm.prox_strength",
    "rounds": "trainer.max_epochs",
    "eval_every": "trainer.check_val_every_n_epoch",
    "seed": "seed_everything",
}
"""The arguments of :func:`perada.finetune`, and the options that they are; recipes and command lines take both."""

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

_OF_THEIR_OWN = re.compile(r"federated\.(?=(client_)?privacy(\.|$))")
"""Before a section that stands beside ``federated``, whose loop takes it."""

_WRONG = (
    r"unrecognized arguments: (?:\S+ )*?(?P<dashes>--)(?P<key>[\w.-]+)[^\n]*",
    r"ambiguous option: (?P<dashes>--)(?P<key>[\w.-]+)[^\n]*",
    r"Group '(?P<group>[^']+)' does not accept option '(?P<key>[^']+)'",
    r"Subcommand '\w+' does not accept option '(?P<key>[^']+)'",
    r"Problem with given class_path '(?P<kind>[^']+)':\s+Option '(?P<key>[^']+)' is not accepted",
    r"Option '(?P<key>[^']+)' is not accepted",
)
"""How jsonargparse says that there is no such option."""


def with_proposal(message: str, known: Collection[str]) -> str:
    """An error of the parser; where it is about an option that there is not, with the nearest of the ``known`` ones.

    >>> with_proposal("unrecognized arguments: --lr 1", ["model.lr_local", "model.lr_personal", "model.optimizer"])
    'unrecognized arguments: --lr 1; did you mean --model.lr_local or --model.lr_personal?'
    """
    for form in _WRONG:
        if found := re.search(form, message):
            parts = found.groupdict()
            key, section = parts["key"], parts.get("group")
            if kind := parts.get("kind"):
                above = re.search(r'Parser key "([^"]+)"', message)
                section = above[1] if above else kind
                known = [f"{section}.{name}" for name in _arguments(kind)]
            near = nearest(f"{section}.{key}" if section else key, known)
            if not near:
                return message
            dashes = parts.get("dashes") or ""
            hint = f"; did you mean {' or '.join(dashes + name for name in near)}?"
            return message[: found.end()] + hint + message[found.end() :]
    return message


def nearest(key: str, known: Collection[str]) -> list[str]:
    """The options that a wrong ``key`` may stand for; none where nothing is near.

    >>> nearest("trainer.rounds", ["trainer.max_epochs", "trainer.max_steps"])
    ['trainer.max_epochs']
    >>> nearest("model.adaptr", ["model.adapter", "data.dataset"])
    ['model.adapter']
    """
    section, _, last = key.rpartition(".")
    last = last.replace("-", "_").lower()
    targets = ELSEWHERE.get(last) or ((SHORT[last],) if last in SHORT else ())
    there = [name for name in targets if name in known or name.rpartition(".")[0] in known]
    there += [name for name in known if name.rpartition(".")[2] == last and not there]
    if there:
        return [name for name in there if section and name.startswith(f"{section}.")] or there
    within = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    names = within | (SHORT if not section else {})
    if close := get_close_matches(last, names, 1):
        return [close[0] if close[0] in SHORT and not section else names[close[0]]]
    if not section and (close := get_close_matches(last, ELSEWHERE, 1, 0.8)):
        return nearest(close[0], known)
    leaves = {name.rpartition(".")[2]: name for name in known}
    if close := get_close_matches(key, known, 1, 0.75):
        return close
    return [leaves[name] for name in get_close_matches(last, leaves, 1, 0.8)]


def _arguments(path: str) -> Sequence[str]:
    """What a class that was imported takes."""
    module, _, name = path.rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)
    return [*inspect.signature(kind).parameters] if kind is not None else []


def full_words(words: Sequence[str]) -> list[str]:
    """Options of the command line by their full names, also those that ``--tune`` and ``--vary`` name, one or several.

    >>> full_words(["--rounds", "3", "--tune=lr_local+lr_personal=0.1,1"])
    ['--trainer.max_epochs', '3', '--tune=model.lr_local+model.lr_personal=0.1,1']
    >>> full_words(["--vary", "rounds=1,2", "data.seed=0,1", "--seeds", "0"])
    ['--vary', 'trainer.max_epochs=1,2', '--vary=data.seed=0,1', '--seeds', '0']
    """
    out: list[str] = []
    grid = ""
    for before, word in zip(["", *words], words, strict=False):
        option, equals, value = word.partition("=")
        name = option.removeprefix("--")
        if word.startswith("-"):
            grid = option if option in ("--tune", "--vary") else ""
        if grid == option and equals:
            word = f"{option}={_full_grid(value)}"
        elif grid and before == grid:
            word = _full_grid(word)
        elif grid and equals:  # a further one
            word = f"{grid}={_full_grid(word)}"
        elif option.startswith("--") and (full := _full(name)) != name:
            word = f"--{full}{equals}{value}"
        out.append(word)
    return out


def _full_grid(text: str) -> str:
    """[ALGORITHMS:]NAME+NAME=VALUES with full names."""
    named, equals, values = text.partition("=")
    before, colon, names = named.rpartition(":")
    return before + colon + "+".join(map(_full, names.split("+"))) + equals + values


def _full(name: str) -> str:
    """The full name of an option.

    >>> _full("rounds"), _full("federated.privacy.max_norm")
    ('trainer.max_epochs', 'privacy.max_norm')
    """
    return SHORT.get(name) or _OF_THEIR_OWN.sub("", name)


def full_names(content: dict[str, Any]) -> dict[str, Any]:
    """A recipe with the full names of options, and the classes that the names of algorithms and server rules stand for.

    Raises:
        ValueError: If an option is given by both its names, or beside a file for its section.

    >>> full_names({"rounds": 3, "trainer": {"devices": 1}})
    {'trainer': {'devices': 1, 'max_epochs': 3}}
    """
    out = {name: dict(value) if isinstance(value, dict) else value for name, value in content.items()}
    # An algorithm comes before its arguments.
    for name in sorted(SHORT.keys() & content.keys(), key=lambda name: SHORT[name].count(".")):
        *sections, last = SHORT[name].split(".")
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
            raise ValueError(f"{name} and {SHORT[name]} are the same option; give it once")
        inner[last] = value
    if isinstance(federated := out.get("federated"), dict):
        for name in ("privacy", "client_privacy"):
            own = federated.pop(name, None)
            if own is not None and out.get(name) is not None:
                raise ValueError(f"{name} and federated.{name} are the same section; give it once")
            out |= {} if own is None else {name: own}
        for role in ("algorithm", "server_rule"):
            if role in federated:
                federated[role] = _class(federated[role], role)
    return out


def _class(given: Any, role: str) -> Any:  # noqa: ANN401  # any YAML
    """An algorithm or a server rule by its class, where it is given by name."""
    from perada.algorithms import ALGORITHMS
    from perada.experiments.compare.entries import class_of
    from perada.server import SERVER_RULES

    made = {"class_path": given} if isinstance(given, str) else given
    if not isinstance(made, dict):
        return given
    name, own = made.get("class_path"), made.get("init_args") or {}
    if isinstance(own, dict) and isinstance(own.get("base"), str | dict):
        own = own | {"base": _class(own["base"], role)}
    if role == "algorithm" and name in ALGORITHMS:
        kind, told = class_of(name)
        return made | {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": told | own}
    if role == "server_rule" and name in SERVER_RULES:
        return made | {"class_path": SERVER_RULES[name].__name__}
    return made | ({"init_args": own} if own else {}) if isinstance(given, dict) else given
