# SPDX-License-Identifier: Apache-2.0
"""What the parser of recipes understands: both names of an option, classes by name and of one's own, and its help."""

import inspect
import re
import shutil
import sys
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from importlib import import_module, invalidate_caches
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml
from jsonargparse import Namespace, get_loader
from pytorch_lightning.cli import LightningArgumentParser

from perada.algorithms import ALGORITHMS
from perada.api import FULL_NAMES, full_name
from perada.cli.messages import subclasses
from perada.cli.recipes import recipe_files
from perada.compare.plan import spec_of, words_of
from perada.data import ImageSet, Partition
from perada.server import SERVER_RULES

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
    targets = ELSEWHERE.get(last) or ((FULL_NAMES[last],) if last in FULL_NAMES else ())
    there = [name for name in targets if name in known or name.rpartition(".")[0] in known]
    there += [name for name in known if name.rpartition(".")[2] == last and not there]
    if there:
        return [name for name in there if section and name.startswith(f"{section}.")] or there
    within = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    names = within | (FULL_NAMES if not section else {})
    if close := get_close_matches(last, names, 1):
        return [close[0] if close[0] in FULL_NAMES and not section else names[close[0]]]
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


def import_named(args: Sequence[str]) -> None:
    """Import the modules of the current folder that class paths in options, or in the recipes among them, name.

    Only where they are not installed, and nothing else: libraries try to import what may or may not be installed, and a
    file of that name would be run.

    Raises:
        ValueError: If one is there and cannot be imported.
    """
    here = str(Path.cwd())
    values = [value for word in args for value in (word, word.partition("=")[2])]
    for name in dict.fromkeys(name for value in values for name in _class_paths(_read(value) or value)):
        module, _, kind = name.rpartition(".")
        top = module.partition(".")[0]
        if top in sys.modules or find_spec(top) is not None or PathFinder.find_spec(top, [here]) is None:
            continue
        sys.path.append(here)
        try:
            invalidate_caches()
            import_module(module)
        except Exception as error:  # whatever the caller's code raises
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"{kind!r} cannot be imported from {top!r} in this folder: {reason}; fix it") from error
        finally:
            sys.path.remove(here)


def _class_paths(content: Any, key: str = "", seen: frozenset[str] = frozenset()) -> Iterator[str]:  # noqa: ANN401  # any YAML
    """What stands as a class_path, or looks like one, module.Class, also in the files that are named."""
    if isinstance(content, dict):
        for name, value in content.items():
            yield from _class_paths(value, str(name), seen)
    elif isinstance(content, list):
        for value in content:
            yield from _class_paths(value, "", seen)
    elif isinstance(content, str) and content.endswith((".yaml", ".yml", ".json")):
        if content not in seen and Path(content).is_file():
            yield from _class_paths(_read(Path(content).read_text(encoding="utf-8")), "", seen | {content})
    elif isinstance(content, str) and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", content):
        if key == "class_path" or content.rpartition(".")[2][0].isupper():
            yield content


def _read(text: str) -> Any:  # noqa: ANN401  # any YAML
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:  # the parser will say it
        return None


FIRST = (
    "config trainer.max_epochs model.backbone model.pretrained model.adapter data.dataset data.partition data.public "
    "data.image_size data.batch_size federated.algorithm federated.clients_per_round federated.local_epochs "
    "federated.local_steps model.lr_personal model.lr_local federated.distillation privacy client_privacy "
    "trainer.check_val_every_n_epoch trainer.accelerator trainer.devices trainer.precision trainer.default_root_dir "
    "seed_everything ckpt_path print_config"
).split()
"""The options that are shown first."""
LIGHTNING = {
    "trainer.max_epochs": "Communication rounds.",
    "trainer.check_val_every_n_epoch": "Rounds between two evaluations.",
    "trainer.accelerator": "auto, cpu, cuda or mps.",
    "trainer.devices": "Devices, which share the clients of a round.",
    "trainer.num_nodes": "Machines.",
    "trainer.precision": "32-true, bf16-mixed or 16-mixed.",
    "trainer.default_root_dir": "Folder in which lightning_logs is made; by default the current one.",
    "trainer.logger": "false for no run folder; or loggers by class, such as TensorBoardLogger.",
    "trainer.callbacks": "Callbacks by class, of Lightning or your own.",
    "trainer.enable_progress_bar": "Bars in a terminal, elsewhere a line for each round; or neither.",
    "trainer.enable_checkpointing": "Save the newest round.",
    "trainer.fast_dev_run": "Try a recipe: one local step, and nothing is written.",
    "trainer.deterministic": "Refuse operations that are not deterministic on a GPU.",
    "trainer.profiler": "simple, advanced or pytorch.",
    "config": "Recipe: its name (`perada ls`) or a file; several are laid over one another, the last on top.",
    "print_config": "Print the whole configuration, and run nothing.",
    "seed_everything": "Seed of all that is random in training.",
    "ckpt_path": "Checkpoint to resume from, or last for the newest.",
}
"""What Lightning's options are for here; its others are shown by ``--help=all`` alone."""
_CLASSES: dict[str, type] = {"data.dataset": ImageSet, "data.public": ImageSet, "data.partition": Partition}
_NAMES = {"federated.algorithm": [*ALGORITHMS], "federated.server_rule": [*SERVER_RULES]}
_GROUPS = {
    "Model": "model.",
    "Data": "data.",
    "Rounds": "federated.",
    "Trainer": "trainer.",
}
END = """\
Both names of an option can be used, on the command line and in recipes. NAME.CHILD sets an argument of a class:
--data.partition.alpha=0.1, --privacy.target_epsilon=3.
  --help WORD                the options with that word in their names, such as --help lr
  --help all                 every option, also those of Lightning's trainer that are seldom needed
  --data.partition.help NAME the arguments of a class, likewise for all options that take one"""


def explained(parser: ArgumentParser, asked: str) -> str:
    """The help of a parser: ``all``, what has a word in its name, or, where nothing is asked for, what most need.

    Raises:
        ValueError: If no option has that word in its name.
    """
    if asked == "all":
        return parser.format_help()
    known = {action.dest: action for action in parser._actions if action.help != SUPPRESS}
    known = {name: action for name, action in known.items() if _is_option(action)}
    if asked:
        found = [action for name, action in known.items() if asked in " ".join(_names(action))]
        if not found:
            raise ValueError(f"--help {asked}: no option has that in its name; --help all shows every option")
        return "\n".join(_lines(found))
    command = parser.prog.split()[-1]
    blocks = [f"usage: perada {command} --config RECIPE [--OPTION VALUE ...]", "-h, --help [WORD | all]"]
    first = [known.pop(name) for name in FIRST if name in known]
    blocks.append("\n".join(["Most used:", *_lines(first)]))
    for title, section in _GROUPS.items():
        own = [action for name, action in known.items() if name.startswith(section)]
        own = [action for action in own if section != "trainer." or action.dest in LIGHTNING]
        blocks.append("\n".join([f"{title}:", *_lines(own)]))
    return "\n\n".join([*blocks, END])


def _is_option(action: Action) -> bool:
    """Whether it sets something; links between options and the help of classes do not, and data.data is for Python."""
    sets = bool(action.option_strings) and action.option_strings[0].startswith("-")
    return sets and not action.dest.endswith(".help") and action.dest != "data.data"


def _names(action: Action) -> list[str]:
    """The names of an option, the short one first."""
    short = [f"--{name}" for name, full in FULL_NAMES.items() if full == action.dest]
    own = [name for name in action.option_strings if not name.endswith("+")]
    return [*short, *(name for name in own if name not in short)]


def _lines(actions: Iterable[Action]) -> list[str]:
    """Each option with its names, what it is, its values and its default."""
    out: list[str] = []
    width = min(shutil.get_terminal_size().columns, 120) - 2
    for action in actions:
        choice = action.metavar if isinstance(action.metavar, str) and action.metavar.startswith("{") else ""
        out.append(f"  {', '.join(_names(action))} {choice}".rstrip())
        said = LIGHTNING.get(action.dest) or " ".join((action.help or "").replace("``", "").split())
        if values := _values(action.dest):
            said += f" One of {', '.join(values)}, or a class of your own."
        if action.default not in (None, SUPPRESS, ""):
            said += f" (default: {action.default})"
        out += wrap(said, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return out


def _values(name: str) -> Sequence[str]:
    """The classes or names that an option takes."""
    if name in _CLASSES:
        found = {kind.__name__ for kind in subclasses(_CLASSES[name]) if kind.__module__.startswith("perada.")}
        return sorted(found)
    return _NAMES.get(name, [])
