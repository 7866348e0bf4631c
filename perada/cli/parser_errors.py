# SPDX-License-Identifier: Apache-2.0
"""Converts jsonargparse's errors (4.53) to :class:`~perada.core.checks.OptionError` and plain messages.

These errors have no attributes, only text. No other file reads that text.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass

from jsonargparse import ArgumentParser

from perada.cli.options import LINKED_SECTIONS, propose_options, stored_commands
from perada.core.checks import OptionError
from perada.core.text import abbreviated, near_names

OWN_CLASS = "the path of a custom class, such as mine.MyClass"
_NOISE = ("Does not validate against any of", "Subtypes:", "Errors:", "Given value", "Expected a <class 'NoneType'>")
_PATH = r"(?:Expected a path but (\S+) either not accessible or invalid\n)?"
_UNKNOWN_OPTION_FORMS = (
    r"(?:unrecognized arguments|ambiguous option): (?:\S+ )*?(?P<dashes>--)(?P<key>[\w.-]+)[^\n]*",
    r"(?:Group '(?P<group>[^']+)'|Subcommand '\w+') does not accept option '(?P<key>[^']+)'",
    r"(?:Problem with given class_path '(?P<kind>[^']+)':\s+)?Option '(?P<key>[^']+)' is not accepted",
)
_NO_MODULE_FORM = r"Problem with given class_path '(?P<path>[\w.]+)':\s+No module named '(?P<module>[\w.]+)'"
_NO_ATTRIBUTE_FORM = (
    r"Problem with given class_path '(?P<path>[\w.]+)':\s+module '(?P<module>[\w.]+)' has no attribute '(?P<name>\w+)'"
)


def option_error(message: str, typed: Mapping[str, str], option_names: list[str]) -> OptionError | None:
    """Convert a message about an option; None if it is about something else.

    Args:
        message: Message of the parser.
        typed: Options as they were typed, by full name.
        option_names: Full names of all options.
    """
    return (
        missing_value(message, typed)
        or unknown_option(message, option_names)
        or wrong_type(message, typed)
        or wrong_class(message, typed)
        or wrong_flag(message)
    )


def missing_value(message: str, typed: Mapping[str, str]) -> OptionError | None:
    """Return the error of an option without a value; None if a message is about something else.

    >>> str(missing_value("argument --training.lr_local: expected one argument", {"training.lr_local": "--lr_local"}))
    '--lr_local: a value is missing; write --lr_local VALUE'
    """
    match = re.match(r"argument (?:-\w/)?--([\w.-]+): expected (?:one|at least one|\d+) argument", message)
    if match is None:
        return None
    name = typed.get(match[1], f"--{match[1]}")
    remedy = f"write {name} VALUE"
    return OptionError(f"{name}: a value is missing; {remedy}", name=match[1], remedy=remedy)


def wrong_flag(message: str) -> OptionError | None:
    """Return the error of a value of ``--print_config``; None if a message is about something else.

    >>> wrong_flag('Invalid option "foo" for --print_config').value
    'foo'
    """
    match = re.fullmatch(r'Invalid option "(?P<value>.*)" for (?P<option>--\w+)', message)
    if match is None:
        return None
    option = match["option"]
    value = match["value"]
    remedy = "must be skip_default, skip_unset or both with a comma between"
    message = f"{option}: {remedy}, got {value!r}; {option} prints all"
    return OptionError(message, name=option.removeprefix("--"), value=value, remedy=remedy)


def rejected_option(error: BaseException) -> OptionError | None:
    """Return the error of a class of perada that jsonargparse has wrapped; None if there is none."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OptionError):
        cause = cause.__cause__ or cause.__context__
    return cause


def unknown_option(message: str, option_names: list[str]) -> OptionError | None:
    """Return the error of an unknown option, with proposals; None if a message is about something else.

    >>> str(unknown_option("unrecognized arguments: --lr 1", ["training.lr_local", "training.lr_personal"]))
    'unrecognized arguments: --lr 1; did you mean --training.lr_local or --training.lr_personal?'
    """
    match = _find_unknown_option(message)
    if match is None:
        return None
    parts = match.groupdict()
    class_path = parts.get("kind")
    if class_path:
        return _unknown_class_option(class_path, parts["key"], _find_keys(message), text=message[: match.end()])
    key = parts["key"]
    if parts.get("group"):
        key = f"{parts['group']}.{key}"
    dashes = parts.get("dashes") or ""
    proposals = [f"{dashes}{name}" for name in propose_options(key, option_names)]
    remedy = ""
    if proposals:
        remedy = f"did you mean {' or '.join(proposals)}?"
    elif dashes:
        remedy = "`perada fit --help` lists the options"
    return _with_remedy(message[: match.end()], key, remedy)


def _find_unknown_option(message: str) -> re.Match[str] | None:
    """Find the part of a message that is about an unknown option."""
    for form in _UNKNOWN_OPTION_FORMS:
        match = re.search(form, message)
        if match is not None:
            return match
    return None


def _unknown_class_option(class_path: str, argument: str, keys: Sequence[str], text: str) -> OptionError:
    """Return the error of an argument that a class does not have, with proposals.

    Args:
        class_path: Path of the class.
        argument: The unknown argument.
        keys: Options that the message is about; empty if it names none.
        text: The message of the parser.
    """
    module, _, class_name = class_path.rpartition(".")
    arguments = inspect.signature(getattr(sys.modules[module], class_name)).parameters
    option = argument
    if keys:
        # An option that takes one of several types repeats the message for each of them.
        place = ".".join(dict.fromkeys(keys))
        option = f"{place}.{argument}"
        text = f"{place}: {class_path}: Option {argument!r} is not accepted"
    prefix = option.rpartition(".")[0]
    proposals = propose_options(option, [f"{prefix}.{name}" for name in arguments])
    if proposals:
        remedy = f"did you mean {' or '.join(proposals)}?"
    elif arguments:
        remedy = f"its options are {', '.join(arguments)}"
    else:
        remedy = "it has no options"
    return _with_remedy(text, option, remedy)


def _with_remedy(text: str, option: str, remedy: str) -> OptionError:
    """Return an error with a remedy, which may be empty."""
    if remedy:
        text = f"{text}; {remedy}"
    return OptionError(text, name=option, remedy=remedy)


def missing_module(message: str) -> tuple[str, str] | None:
    """Return the path of a class and its missing module; None if a message is about something else."""
    match = re.search(_NO_MODULE_FORM, message)
    if match is None:
        return None
    return match["path"], match["module"]


_TYPE_TEXTS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "dict": "a mapping, {NAME: VALUE}",
    "list": "a list",
    "NoneType": "",
}
"""Descriptions of the values of a type; null, which leaves an option out, is not mentioned."""


def wrong_type(message: str, typed: Mapping[str, str]) -> OptionError | None:
    r"""Return the error of a value of the wrong type; None if a message is about something else.

    Args:
        message: Message of the parser, in which the outer option comes first.
        typed: Options as they were typed, by full name.

    >>> message = "Parser key \"training.lr_local\":\n  Expected a <class 'float'>. Got value: fast"
    >>> str(wrong_type(message, {"training.lr_local": "--lr_local"}))
    "--lr_local: must be a number, got 'fast'"
    """
    keys = _find_keys(message)
    if not keys:
        return None
    innermost = _innermost_message(message)
    value_line = re.search(r"(?:Got value|Given value): (.*)", innermost)
    if value_line is None or "class_path" in innermost:
        return None
    value = value_line[1]
    class_option = re.fullmatch(r"NestedArg\(key='(?P<argument>[\w.]+)', val=.*\)", value)
    if class_option and len(keys) == 1:
        return _option_without_class(keys[0], class_option["argument"], value, typed)
    texts = _expected_types(innermost[: value_line.end()])
    if not texts:
        return None
    remedy = f"must be {', or '.join(texts)}"
    return OptionError(
        f"{_as_typed(keys, typed)}: {remedy}, got {value!r}", name=".".join(keys), value=value, remedy=remedy
    )


def _innermost_message(message: str) -> str:
    """Return the part of a message about the innermost of the options that it names."""
    return message[message.rindex("Parser key") :]


def _as_typed(keys: Sequence[str], typed: Mapping[str, str]) -> str:
    """Return an option as the user typed it, or its full name.

    Args:
        keys: The option, followed by those of its class, from outside in.
        typed: Options as they were typed, by full name.
    """
    option = ".".join(keys)
    if option in typed:
        return typed[option]
    outer = keys[0]
    if outer in typed:
        return typed[outer] + option.removeprefix(outer)
    return option


def _option_without_class(key: str, argument: str, value: str, typed: Mapping[str, str]) -> OptionError:
    """Return the error of an argument of a class that was not set.

    Args:
        key: Option that takes the class.
        argument: The argument.
        value: Its value, as the parser prints it.
        typed: Options as they were typed, by full name.
    """
    option = f"{key}.{argument}"
    name = typed.get(option, option)
    class_option = name.removesuffix(f".{argument}")
    remedy = f"set the class of {class_option} first, with {class_option}=CLASS"
    text = f"{name}: is an option of a class, but no class is set; {remedy}"
    return OptionError(text, name=option, value=value, remedy=remedy)


def _expected_types(message: str) -> list[str]:
    """Describe the types that a message expects; nothing if one of them cannot be described."""
    texts: list[str] = []
    for type_text in re.findall(r"Expected a (.*?)(?:\. Got value.*)?$", message, re.MULTILINE):
        literal = re.fullmatch(r"typing\.Literal\[(.*)\]", type_text)
        builtin = re.fullmatch(r"<class '(\w+)'>", type_text)
        if literal:
            texts.append(f"one of {literal[1]}" if "," in literal[1] else literal[1])
        elif builtin and builtin[1] in _TYPE_TEXTS:
            texts.append(_TYPE_TEXTS[builtin[1]])
        else:
            return []
    # A dictionary keeps the order, and each text once.
    return list(dict.fromkeys(text for text in texts if text))


def _find_keys(message: str) -> list[str]:
    """Return the option that a message is about, followed by those of its class, from outside in."""
    keys = re.findall(r'Parser key "([^"]+)"', message)
    return [_without_link(key) for key in keys]


def _without_link(key: str) -> str:
    """Return the option that the user set, in place of the loop's argument to which it is linked."""
    option = key.removeprefix("federated.")
    return option if option.partition(".")[0] in LINKED_SECTIONS else key


def wrong_class(message: str, typed: Mapping[str, str]) -> OptionError | None:
    """Return the error of a value that should be a class; None if a message is about something else.

    Args:
        message: Message of the parser.
        typed: Options as they were typed, by full name.
    """
    error = _wrong_class(message)
    if error is None or error.name not in typed:
        return error
    text = typed[error.name] + str(error).removeprefix(error.name)
    return OptionError(text, name=error.name, value=error.value, remedy=error.remedy)


def _wrong_class(message: str) -> OptionError | None:
    """Return the error with options by their full names; None if a message is about something else."""
    keys = _find_keys(message)
    if not keys:
        return None
    option = ".".join(keys)
    innermost = _innermost_message(message)
    value_line = re.search(r"Given value: (.*)", innermost)
    value = value_line[1] if value_line else ""
    error = _no_module(option, innermost) or _no_attribute(option, innermost) or _no_subclass(option, value, innermost)
    if error is not None:
        return error
    if "Expected an instantiatable class" in innermost:
        return _base_class(option, value, innermost)
    no_class = re.search(r"Expected a dot import path string: (.+)", innermost)
    if no_class is not None:
        return _no_such_class(option, no_class[1], innermost)
    if "Not a valid subclass of" in innermost:
        return _no_such_class(option, value, innermost)
    return None


def _no_module(option: str, message: str) -> OptionError | None:
    """Return the error of a class in a missing module, or of a missing file; None for another message."""
    match = re.search(_NO_MODULE_FORM, message)
    if match is None:
        return None
    path = match["path"]
    if path.endswith((".yaml", ".yml", ".json")):
        return _class_error(option, path, f"{path} cannot be read", "use an existing file, or a class")
    remedy = "it must be in the current folder, on PYTHONPATH, or installed"
    return _class_error(option, path, f"No module named {match['module']!r}", remedy)


def _no_attribute(option: str, message: str) -> OptionError | None:
    """Return the error of a class that its module does not have, with a proposal; None for another message."""
    match = re.search(_NO_ATTRIBUTE_FORM, message)
    if match is None:
        return None
    module = match["module"]
    name = match["name"]
    remedy = f"use {OWN_CLASS}"
    proposals = near_names(name, vars(sys.modules[module]))
    if proposals:
        remedy = f"did you mean {module}.{proposals[0]}?"
    return _class_error(option, match["path"], f"module {module!r} has no attribute {name!r}", remedy)


def _no_subclass(option: str, value: str, message: str) -> OptionError | None:
    """Return the error of a class that is not of the accepted type; None for another message."""
    match = re.search(r"Import path (?:(\S+) )?does not correspond to (a subclass of \w+)", message)
    if match is None:
        return None
    return _class_error(option, value, f"{match[1] or value} is not {match[2]}", "use one")


def _class_error(option: str, value: object, problem: str, remedy: str) -> OptionError:
    """Return the error of an option whose value is not an accepted class."""
    return OptionError(f"{option}: {problem}; {remedy}", name=option, value=value, remedy=remedy)


def _base_class(option: str, value: str, message: str) -> OptionError | None:
    """Return the error of an abstract base class, with its subclasses; None if a class lacks methods."""
    class_name = value.rpartition(".")[2]
    bases = [base for base in _find_classes(_accepted_types(message)) if base.__name__ == class_name]
    names = _accepted_classes(option, bases[:1]) if bases else []
    if not names:
        return None
    remedy = f"name one of its subclasses: {', '.join(names)}"
    return _class_error(option, value, f"{value} is an abstract base class", remedy)


def _accepted_types(message: str) -> str:
    """Return the types that an option accepts, as the parser prints them."""
    types = re.search(r"Subtypes: \[(.*)\]", message)
    return types[1] if types else ""


def _accepted_classes(option: str, bases: Iterable[type]) -> list[str]:
    """Return the classes that an option accepts: those in its help, or those that the packages of its bases export."""
    values_of_options = stored_commands()["recipe_options"]
    names = values_of_options.get(option) or values_of_options.get(option.removesuffix(".base"))
    if names:
        return names
    exported: set[str] = set()
    for base in bases:
        package = sys.modules.get(base.__module__.rpartition(".")[0])
        exported |= {subclass.__name__ for subclass in subclasses(base)} & set(getattr(package, "__all__", ()))
    return sorted(exported)


def _no_such_class(option: str, value: str, message: str) -> OptionError:
    """Return the error of a value that is not a class, with the classes that the option accepts."""
    accepted = _accepted_types(message)
    bases = _find_classes(accepted)
    if option == "data.data":
        return _class_error(option, value, "accepts only Python objects", "choose images with data.dataset")
    mappings = [base for base in bases if is_dataclass(base)]
    if mappings:
        names = [field.name for field in fields(mappings[0])]
        remedy = f"its options are {', '.join(names)}"
        problem = f"must be a mapping of options, {{NAME: VALUE}}, got {value!r}"
        return _class_error(option, value, problem, remedy)
    names = _accepted_classes(option, bases)
    proposals = _near_classes(value, names, bases)
    if proposals:
        remedy = f"did you mean {proposals[0]!r}?"
    elif names:
        remedy = f"choose one of {_list_choices(names, accepted)}, or use {OWN_CLASS}"
    else:
        remedy = f"use {OWN_CLASS}"
    return _class_error(option, value, f"there is no class {value!r}", remedy)


def _near_classes(value: str, names: Sequence[str], bases: Iterable[type]) -> list[str]:
    """Return names that a value that is not a class may mean, nearest first.

    Args:
        value: The value.
        names: Names that the option accepts.
        bases: Classes that it accepts, with their subclasses.
    """
    # Algorithms and server rules can be given by their classes too, beside the short names in the help.
    class_paths: set[str] = set()
    for base in bases:
        class_paths |= {subclass.__name__ for subclass in subclasses(base)}
    proposals = near_names(value, [*names, *sorted(class_paths)])
    if not proposals and len(value) > 1:
        # A word such as csv for CSVLogger.
        proposals = [name for name in sorted(class_paths) if name.lower().startswith(value.lower())]
    return proposals


def _list_choices(names: Sequence[str], accepted: str) -> str:
    """List what an option accepts beside a custom class.

    Args:
        names: Names of classes.
        accepted: The types that the option accepts, as the parser prints them.
    """
    choices = [abbreviated(names, 50)]
    if "list[" in accepted or "Iterable[" in accepted:
        choices.append("a list of them")
    if "'bool'" in accepted:
        choices.append("true or false")
    return ", ".join(choices)


def _find_classes(types: str) -> list[type]:
    """Return the classes, except Python's own, whose paths are in a text."""
    named_classes: list[type] = []
    for path in dict.fromkeys(re.findall(r"\w+(?:\.\w+)+", types)):
        module, _, name = path.rpartition(".")
        value = getattr(sys.modules.get(module), name, None)
        if isinstance(value, type) and not module.startswith("collections"):
            named_classes.append(value)
    return named_classes


def subclasses(parent: type) -> Iterator[type]:
    """Yield all subclasses of a class that are neither abstract nor private."""
    direct_subclasses: list[type] = type.__subclasses__(parent)
    for subclass in direct_subclasses:
        if not subclass.__name__.startswith("_") and not getattr(subclass, "__abstractmethods__", None):
            yield subclass
        yield from subclasses(subclass)


def of_options(message: str, parser: ArgumentParser) -> str:
    """Return an error of a command's parser with options as they are typed, and a proposal for an unknown one."""
    typed = {}
    for action in parser._actions:
        positional_name = str(action.metavar or action.dest).upper()
        typed[action.dest] = action.option_strings[-1] if action.option_strings else positional_name
    type_error = missing_value(message, {}) or wrong_type(message, typed)
    if type_error is not None:
        return str(type_error)
    return (
        _wrong_choice(message, typed)
        or _missing_arguments(message, typed, parser.prog)
        or _unknown_word(message, typed, parser.prog)
        or message
    )


def _wrong_choice(message: str, typed: Mapping[str, str]) -> str:
    """Return the message about a value that is not among the choices of an option; empty for another message."""
    match = re.fullmatch(r"argument (\S+): invalid choice: (.*) \(choose from (.*)\)", message, re.DOTALL)
    if match is None:
        return ""
    return f"{typed.get(match[1], match[1])}: must be one of {match[3]}, got {match[2]}"


def _missing_arguments(message: str, typed: Mapping[str, str], program: str) -> str:
    """Return the message about required arguments that are missing; empty for another message."""
    match = re.fullmatch(r"the following arguments are required: (.*)", message, re.DOTALL)
    if match is None:
        return ""
    names = ", ".join(typed.get(name, name) for name in match[1].split(", "))
    return f"the following arguments are required: {names}; `{program} --help` explains them"


def _unknown_word(message: str, typed: Mapping[str, str], program: str) -> str:
    """Return the message about an unknown word, with a proposal if it is an option; empty for another message."""
    match = re.search(r"unrecognized arguments: (?:[^-]\S* )*(--?[\w.-]+)?", message)
    if match is None or "did you mean" in message:
        return ""
    proposals = near_names(match[1] or "", [name for name in typed.values() if name.startswith("--")])
    remedy = f"did you mean {proposals[0]}?" if proposals else f"`{program} --help` lists the options"
    return f"{message}; {remedy}"


def _explain_abstract_class(match: re.Match[str]) -> str:
    """Return the message about a class that cannot be instantiated, since it is abstract or lacks methods."""
    path = match[2] or match[1] or "the class"
    module, _, name = path.rpartition(".")
    abstract_class = getattr(sys.modules.get(module), name, None)
    if isinstance(abstract_class, type):
        names = sorted({subclass.__name__ for subclass in subclasses(abstract_class)})
        if names:
            return f"{path} is an abstract base class; name one of its subclasses: {', '.join(names)}"
    missing = sorted(getattr(abstract_class, "__abstractmethods__", ())) or ["that are abstract"]
    return f"{path} lacks methods ({', '.join(missing)}) that its base class requires; add them"


def _explain_unquoted_word(match: re.Match[str]) -> str:
    """Return the message about a word that YAML did not read as a string."""
    value = match[1]
    if value in ("True", "False"):
        kind = "yes, no, on, off, true and false as Booleans"
    elif value == "None":
        kind = "null and ~ as nothing"
    elif re.match(r"[-+.\d]", value):
        kind = "it as a number or a date"
    else:
        return f"must be a string, got {value}"
    return f'{value} is not a string: YAML reads {kind}; put it in quotes, as in ["1", "no"]'


_PLAIN: dict[str, str | Callable[[re.Match[str]], str]] = {
    r'Parser key "([^"]+)"( element \d+)?:': r"\1:",
    r"Key must be a string, got: (.*?)\.?$": r"\1 is no name of an option; write decimals with a point, as in 0.01",
    r"(?s)Expected a path but (\S+\.(?:ya?ml|json)) .*": r"\1 cannot be read; use an existing file, or a class",
    rf"{_PATH}Import path does not correspond to (.*)": r"\1 is not \2; use one",
    rf"(?s){_PATH}Expected an instantiatable class, but (?:(\S+) )?is abstract.*": _explain_abstract_class,
    rf"{_PATH}Problem with given class_path '[^']+':\n(No module named .*)": (
        r"\2; it must be in the current folder, on PYTHONPATH, or installed"
    ),
    rf"{_PATH}Problem with given class_path '[^']+':\n(module '[^']+' has no attribute )": r"\2",
    _PATH[:-1]: "",
    r"Problem with given class_path '(.*)':": r"\1:",
    r"Expected a typing\.Literal\[(.*)\]\. Got value: (.*)": r"must be one of \1, got \2",
    r"(?:Expected a <class 'str'>\n)?Expected a <class 'str'>\. Got value: (.*)": _explain_unquoted_word,
    r"Expected a <class '(.*)'>\. Got value: (.*)": r"must be of type \1, got \2",
    r"Expected a <class '(.*)'>$": r"must be of type \1",
    r"Not of type \w+: (.*) does not conform to restriction v(.*)": r"must be a number \2, got \1",
}
"""Messages of jsonargparse, and what replaces them."""


def plain(message: str) -> str:
    """Return an error's message without the parser's internals."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    # An error within `shifts` is one line; what else the value might have been does not help.
    relevant = [line for line in lines if line.startswith("shifts: ")][:1]
    if not relevant:
        relevant = [line for line in lines if line and not line.startswith(_NOISE)]
    text = "\n".join(relevant)
    for pattern, replacement in _PLAIN.items():
        text = re.sub(pattern, replacement, text)
    return text
