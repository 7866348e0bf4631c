# SPDX-License-Identifier: Apache-2.0
"""What the command line says, and what it leaves out."""

import re
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jsonargparse import ArgumentParser

from perada.cli.options import facts
from perada.core.quiet import quiet_lightning
from perada.core.text import near_names, printable

_NOISE = ("Does not validate against any of", "Subtypes:", "Errors:", "Given value", "Expected a <class 'NoneType'>")
_PATH = r"(?:Expected a path but (\S+) either not accessible or invalid\n)?"


def hint(wrong: str, known: Iterable[str], otherwise: str) -> str:
    """What may have been meant by a word that is not among the ``known`` ones."""
    close = near_names(wrong, known)
    return f"did you mean {close[0]!r}?" if close else otherwise


def one_line(error: Exception) -> str:
    """An error's message on one line, without control characters and without what jsonargparse says of its workings."""
    lines = [line.strip().removeprefix("- ") for line in str(error).splitlines()]
    shifts = [line for line in lines if line.startswith("shifts: ")]  # what else they might have been says nothing
    text = "\n".join(shifts[:1] or [line for line in lines if line and not line.startswith(_NOISE)])
    for said, plain in _PLAIN.items():
        text = re.sub(said, plain, text)
    return printable(" ".join(text.splitlines()))


def _unknown(found: re.Match[str]) -> str:
    """What may be meant by a class that there is not, of those that its option takes."""
    from perada.algorithms import Algorithm
    from perada.data import ImageSet, Partition
    from perada.server import ServerRule

    own = "a class of your own by its path, such as mine.MyClass"
    option = re.match(r"[\w.]+", found.string)
    names = facts()["recipe_options"].get(option[0]) if option else None
    if not names:
        return f"there is no class {found[2]!r}; give {own}"
    bases: list[type] = [Algorithm, ServerRule, Partition, ImageSet]
    # Of algorithms and server rules the classes can be named too, beside the names that are listed.
    classes = [kind.__name__ for base in bases for kind in subclasses(base)]
    meant = hint(found[2], [*names, *classes], f"choose one of {', '.join(names)}, or give {own}")
    return f"there is no class {found[2]!r}; {meant}"


def _abstract(found: re.Match[str]) -> str:
    """No object of a class can be made: it is a base of others, or lacks methods, by name where it can be found."""
    path = found[2] or found[1] or "the class"
    module, _, name = path.rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)
    if isinstance(kind, type) and (known := sorted({own.__name__ for own in subclasses(kind)})):
        return f"{path} is a base class, of which no object can be made; name one of its subclasses: {', '.join(known)}"
    missing = sorted(getattr(kind, "__abstractmethods__", ())) or ["that are abstract"]
    return f"{path} lacks methods ({', '.join(missing)}) that its base class asks for; add them"


def _unquoted(found: re.Match[str]) -> str:
    """YAML read a word as something else than a text."""
    value = found[1]
    if value in ("True", "False"):
        kind = "yes, no, on, off, true and false as truth values"
    elif value == "None":
        kind = "null and ~ as nothing"
    elif re.match(r"[-+.\d]", value):
        kind = "it as a number or a date"
    else:
        return f"{value} cannot be used; give a value of type str"
    return f'{value} is not a text: YAML reads {kind}. Put quotes around it, such as ["1", "no"]'


_PLAIN: dict[str, str | Callable[[re.Match[str]], str]] = {
    r'Parser key "([^"]+)"( element \d+)?:': r"\1:",
    r"(?s)Expected a path but (\S+\.(?:ya?ml|json)) .*": r"\1 cannot be read; give a file that is there, or a class",
    rf"{_PATH}Import path does not correspond to (.*)": r"\1 is not \2; give one",
    rf"(?s){_PATH}Expected an instantiatable class, but (?:(\S+) )?is abstract.*": _abstract,
    rf"{_PATH}Expected a dot import path string: (\w+)": _unknown,
    rf"{_PATH}Problem with given class_path '[^']+':\n(No module named .*)": (
        r"\2; it must be in the current folder, on PYTHONPATH, or installed"
    ),
    rf"{_PATH}Problem with given class_path '[^']+':\n(module '[^']+' has no attribute )": r"\2",
    _PATH[:-1]: "",
    r"Problem with given class_path '(.*)':": r"\1:",
    r"Expected a typing\.Literal\[(.*)\]\. Got value: (.*)": r"\2 is unknown; choose one of \1",
    r"(?:Expected a <class 'str'>\n)?Expected a <class 'str'>\. Got value: (.*)": _unquoted,
    r"Expected a <class '(.*)'>\. Got value: (.*)": r"\2 cannot be used; give a value of type \1",
    r"Expected a <class '(.*)'>$": r"give a value of type \1",
    r"Not of type \w+: (.*) does not conform to restriction v(.*)": r"\1 cannot be used; give a number \2",
}
"""What jsonargparse says, and how we say it."""


class OptionError(ArgumentError):
    """A value of an option has a wrong type.

    Attributes:
        option: Full name of the option.
    """

    def __init__(self, option: str, message: str) -> None:
        super().__init__(None, message)
        self.option = option


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "dict": "a mapping, {NAME: VALUE}",
    "list": "a list",
    "NoneType": "",
}
"""What values of a type are called; null, by which an option is left out, is not said."""


def wrong_type(message: str, typed: Mapping[str, str]) -> OptionError | None:
    r"""Say of a value of a wrong type what it must be; None where a message of the parser is about something else.

    Args:
        message: The parser's, in which the outer option comes first.
        typed: By full name: an option as it was typed.

    >>> message = "Parser key \"model.lr_local\":\n  Expected a <class 'float'>. Got value: fast"
    >>> str(wrong_type(message, {"model.lr_local": "--lr_local"}))
    "--lr_local: must be a number, got 'fast'"
    """
    keys = re.findall(r'Parser key "([^"]+)"', message)
    if not keys:
        return None
    innermost = message[message.rindex("Parser key") :]
    value = re.search(r"(?:Got value|Given value): (.*)", innermost)
    if value is None:
        return None
    expected = re.findall(r"Expected a (.*?)(?:\. Got value.*)?$", innermost[: value.end()], re.MULTILINE)
    kinds: list[str] = []
    for kind in expected:
        choice = re.fullmatch(r"typing\.Literal\[(.*)\]", kind)
        of_class = re.fullmatch(r"<class '(\w+)'>", kind)
        if choice:
            kinds.append(f"one of {choice[1]}" if "," in choice[1] else choice[1])
        elif of_class and of_class[1] in _KINDS:
            kinds.append(_KINDS[of_class[1]])
        else:
            return None
    kinds = list(dict.fromkeys(filter(None, kinds)))
    if not kinds or "class_path" in innermost:
        return None
    option = ".".join(keys)
    name = next((f"{typed[key]}{option[len(key) :]}" for key in (option, keys[0]) if key in typed), option)
    return OptionError(option, f"{name}: must be {', or '.join(kinds)}, got {value[1]!r}")


def of_options(message: str, parser: ArgumentParser) -> str:
    """An error of a command's parser, with options as they are typed, and the nearest to one that there is not."""
    typed = {
        action.dest: (action.option_strings or [str(action.metavar or action.dest).upper()])[-1]
        for action in parser._actions
    }
    type_error = wrong_type(message, typed)
    if type_error is not None:
        return str(type_error)
    if missing := re.fullmatch(r"the following arguments are required: (.*)", message, re.DOTALL):
        names = ", ".join(typed.get(name, name) for name in missing[1].split(", "))
        return f"the following arguments are required: {names}; `{parser.prog} --help` explains them"
    wrong = re.search(r"unrecognized arguments: (?:[^-]\S* )*(--?[\w.-]+)?", message)
    if not wrong or "did you mean" in message:
        return message
    close = near_names(wrong[1] or "", [name for name in typed.values() if name.startswith("--")])
    return f"{message}; " + (f"did you mean {close[0]}?" if close else f"`{parser.prog} --help` lists the options")


def subclasses(base: type) -> Iterator[type]:
    """Every class below ``base`` that can be made, but for private ones."""
    known: list[type] = type.__subclasses__(base)
    for kind in known:
        if not kind.__name__.startswith("_") and not getattr(kind, "__abstractmethods__", None):
            yield kind
        yield from subclasses(kind)


def quiet_libraries() -> None:
    """Silence messages of libraries that do not concern users of recipes."""
    quiet_lightning()
    # LightningCLI calls a method and gives an option of jsonargparse by their former names.
    former = r"\s*(By default only one JsonargparseDeprecationWarning|.*instantiate_classes|skip_none parameter)"
    warnings.filterwarnings("ignore", former, DeprecationWarning)


def short_warnings() -> None:
    """From now on, show what users are warned of as one line, without the place in the code that found it."""
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, UserWarning):
            print(f"perada: warning: {printable(' '.join(str(message).split()))}", file=sys.stderr)
        else:
            shown(message, category, *place, **more)

    warnings.showwarning = show
