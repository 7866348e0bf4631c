# SPDX-License-Identifier: Apache-2.0
"""The recipe that a search hands over: complete, with a comment on each value that it chose."""

import inspect
from collections.abc import Mapping, Sequence
from pydoc import locate
from typing import Any

import yaml

from perada.api import OPTION_CLASSES
from perada.studies.compare.configured import ConfiguredRun
from perada.studies.compare.plan import NO_LOGGER

WIDTH = 110
ALWAYS_WRITTEN = {
    "seed_everything": 0,
    "trainer.max_epochs": None,
    "model.backbone": None,
    "model.pretrained": None,
    "model.adapter": None,
    "federated.algorithm": None,
    "training.lr_local": None,
    "training.lr_personal": None,
    "training.local_epochs": None,
    "evaluation.prediction": None,
}
"""Options that a reader looks for, which are written even where they are the defaults."""
SECTION_ORDER = ("seed_everything", "trainer", "model", "data", "federated", "training", "evaluation", "distillation")
LEFT_OUT = ("config", "ckpt_path", "weights_only")


def recipe_words(args: Sequence[str], prediction: str, evaluate_every: int) -> list[str]:
    """Return the options of a run of the last rung as those of a run of its own, with a folder for its results.

    Args:
        args: Options of ``perada fit`` of the run.
        prediction: What clients predict with, ``personal`` or ``both``.
        evaluate_every: Rounds from one evaluation to the next.
    """
    words = [word for word in args if word != NO_LOGGER]
    return [
        *words,
        f"--evaluation.prediction={prediction}",
        f"--trainer.check_val_every_n_epoch={evaluate_every}",
        "--seed_everything=0",
    ]


def format_recipe(cli: ConfiguredRun, comment_lines: Sequence[str], comments: Mapping[str, str]) -> str:
    """Return the text of a recipe with everything that a run was configured with, apart from defaults.

    Args:
        cli: The run.
        comment_lines: Lines of the comment at the top.
        comments: Comments by the full names of options, such as ``training.lr_local``. They stand above the option.
    """
    content = yaml.safe_load(cli.parser.dump(cli.config, skip_default=True))
    for name in LEFT_OUT:
        content.pop(name, None)
    for name, default in ALWAYS_WRITTEN.items():
        _set_option(content, name, cli.config.get(name, default))
    for name, section_class in OPTION_CLASSES.items():
        if isinstance(content.get(name), dict):
            content[name] = _without_defaults(content[name], section_class, keep=f"{name}.")
    content["data"] = _drop_default_arguments(content["data"])
    content["federated"] = _drop_default_arguments(content["federated"])

    lines = [f"# {line}".rstrip() for line in comment_lines]
    order = [*SECTION_ORDER, *sorted(set(content) - set(SECTION_ORDER))]
    for section in order:
        if content.get(section) not in (None, {}):
            text = yaml.safe_dump({section: content[section]}, sort_keys=False, allow_unicode=True, width=WIDTH)
            lines += _insert_comments(text.splitlines(), comments)
    return "\n".join([*lines, ""])


def _set_option(content: dict[str, Any], name: str, value: object) -> None:
    """Set an option by its full name, unless the content has it or the value is None."""
    *sections, last = name.split(".")
    for section in sections:
        content = content.setdefault(section, {})
    if value is not None and hasattr(value, "class_path"):
        value = yaml.safe_load(yaml.safe_dump({"class_path": value.class_path}))
    if value is not None:
        content.setdefault(last, value)


def _drop_default_arguments(value: Any) -> Any:  # noqa: ANN401  # the content of a recipe
    """Leave out the arguments of classes that are their defaults."""
    if isinstance(value, list):
        return [_drop_default_arguments(item) for item in value]
    if not isinstance(value, dict):
        return value
    shortened = {key: _drop_default_arguments(item) for key, item in value.items()}
    if isinstance(shortened.get("init_args"), dict):
        described_class = locate(str(shortened.get("class_path")))
        if isinstance(described_class, type):
            shortened["init_args"] = _without_defaults(shortened["init_args"], described_class)
        if not shortened["init_args"]:
            del shortened["init_args"]
    return shortened


def _without_defaults(options: Mapping[str, Any], described_class: type, keep: str = "") -> dict[str, Any]:
    """Leave out options that have the default of a class.

    Args:
        options: The options.
        described_class: The class.
        keep: Beginning of the full names of the options; those in :data:`ALWAYS_WRITTEN` are kept.
    """
    signature_parameters: dict[str, inspect.Parameter] = {}
    # A class may pass arguments on to the one that it extends.
    for ancestor in reversed(described_class.__mro__[:-1]):
        if "__init__" in vars(ancestor):
            signature_parameters.update(inspect.signature(ancestor).parameters)
    remaining = {}
    for name, value in options.items():
        is_default = name in signature_parameters and signature_parameters[name].default == value
        # 0 and False are equal.
        is_same_type = name in signature_parameters and type(signature_parameters[name].default) is type(value)
        if not (is_default and is_same_type) or (keep and f"{keep}{name}" in ALWAYS_WRITTEN):
            remaining[name] = value
    return remaining


def _insert_comments(lines: Sequence[str], comments: Mapping[str, str]) -> list[str]:
    """Put comments above the lines of their options.

    Args:
        lines: Lines of a YAML file in block style.
        comments: Comments by the full names of options; ``init_args`` is no part of a name.
    """
    commented = []
    section_path: list[tuple[int, str]] = []  # indentation and key of the sections above a line
    for line in lines:
        indent = len(line) - len(line.lstrip())
        key, colon, _ = line.strip().partition(":")
        if colon and not key.startswith(("-", '"', "'")):
            section_path = [entry for entry in section_path if entry[0] < indent]
            section_path.append((indent, key))
            name = ".".join(part for _, part in section_path if part != "init_args")
            if name in comments:
                commented.append(f"{' ' * indent}# {comments[name]}")
        commented.append(line)
    return commented
