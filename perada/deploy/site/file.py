# SPDX-License-Identifier: Apache-2.0
"""``site.yaml``: what a site is called, where its images are, which recipes it approves and what may leave it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from perada.core.checks import check_choice, check_number, check_options, check_whole
from perada.deploy.protocol import SENDABLE

KEYS = ("name", "recipes", "data", "state", "socket", "may_send", "limits", "accelerator")
PLACES = ("root", "table")
"""Options of a data set that are paths, which are relative to the file."""


@dataclass(frozen=True)
class Limits:
    """What a site allows of all that is ever trained on its images, all runs and recipes together.

    Attributes:
        max_epsilon: Largest ε; None for that of one whole run of the recipe.
        delta: δ of that ε, whatever a recipe says.
        accountant: By which it is computed, whatever a recipe says: ``rdp`` or ``prv``, which report upper bounds.
        max_rounds: Rounds; None for no limit.
        max_runs: Runs, each of which leaves a personal adapter on the site's disk.

    Raises:
        ValueError: If one of them cannot be used.
    """

    max_epsilon: float | None = None
    delta: float = 1e-5
    accountant: str = "rdp"
    max_rounds: int | None = None
    max_runs: int = 100

    def __post_init__(self) -> None:
        check_number("max_epsilon", self.max_epsilon, above=0, optional=True)
        check_number("delta", self.delta, above=0, below=1, hint="less than 1 / number of images, such as 1e-5")
        check_choice("accountant", self.accountant, ("rdp", "prv"))
        check_whole("max_rounds", self.max_rounds, optional=True)
        check_whole("max_runs", self.max_runs)


class Approved(NamedTuple):
    """What a site wrote down of a recipe; empty where it did not."""

    sha256: str  # of the file, which is compared before anything of it is looked at
    digest: str  # of the file and the frozen weights


@dataclass(frozen=True)
class SiteFile:
    """A site, as its file says; paths are absolute.

    Attributes:
        name: What the site is called in its own log.
        recipes: Files of recipes, with what the site approves of each.
        data: Options of :class:`perada.data.Images` or :class:`perada.data.ImageTable`; or the section ``data`` of a
            recipe with ``dataset`` and ``partition``, and the number ``client`` of the site among its clients.
        state: Folder of its personal state and its ledgers.
        socket: Where the worker listens; None if it does not say.
        may_send: What may leave beside updates.
        limits: Of all that is ever trained here.
        accelerator: ``cpu``, ``gpu`` and so on.
    """

    name: str
    recipes: dict[Path, Approved]
    data: dict[str, Any]
    state: Path
    socket: Path | None = None
    may_send: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    accelerator: str = "auto"


def read_site(path: Path) -> SiteFile:
    """Read a site's file.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is not what it should be; the message names the entry.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} is not there; give the site's file, such as site.yaml")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} cannot be read: {' '.join(str(error).split())}; correct it") from None
    check_options(str(path), content, "{name: st-marys, recipes: [...], data: {...}}")
    for key in content:
        check_choice(f"{path}: entry", key, KEYS)
    home, name = path.absolute().parent, content.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,64}", name):
        raise ValueError(f"{path}: name={name!r} cannot be used; give up to 64 letters, digits, dots and dashes")
    if name == "CHANGE-ME":
        raise ValueError(
            f"{path}: name is still CHANGE-ME; give the name that the server registered for the site's key"
        )
    data, limits, may_send = content.get("data"), content.get("limits") or {}, content.get("may_send") or []
    check_options(f"{path}: data", data, "{root: images, layout: '{class}/*'}")
    check_options(f"{path}: limits", limits, "{max_epsilon: 8}")
    for key in limits:
        check_choice(f"{path}: limits", key, [each.name for each in fields(Limits)])
    try:
        limits = Limits(**{key: _number(value) for key, value in limits.items()})
    except ValueError as error:
        raise ValueError(f"{path}: limits: {error}") from None
    if not isinstance(may_send, list):
        raise ValueError(f"{path}: may_send={may_send!r} cannot be used; give a list of {', '.join(SENDABLE)}")
    for one in may_send:
        check_choice(f"{path}: may_send", one, SENDABLE)
    socket = content.get("socket")
    return SiteFile(
        name,
        _recipes(path, content.get("recipes")),
        {key: str(home / value) if key in PLACES else value for key, value in data.items()},
        home / str(content.get("state") or "state"),
        None if socket is None else home / str(socket),
        tuple(may_send),
        limits,
        str(content.get("accelerator") or "auto"),
    )


def _number(value: object) -> Any:  # noqa: ANN401  # what it is, if it is none
    """A number that YAML takes for a text, as it does 1e-5."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _recipes(path: Path, given: object) -> dict[Path, Approved]:
    """The recipes, and what is approved of them."""
    usage = "{recipe: FILE, sha256: …, digest: …}"
    if not isinstance(given, list) or not given:
        raise ValueError(f"{path}: recipes={given!r} cannot be used; list what is approved, as {usage}")
    found = {}
    for entry in given:
        if not isinstance(entry, Mapping) or not {"recipe"} <= set(entry) <= {"recipe", *Approved._fields}:
            raise ValueError(f"{path}: recipes: {entry!r} cannot be used; give {usage}")
        approved, file = Approved(*(entry.get(name) or "" for name in Approved._fields)), path.absolute().parent
        for name, value in approved._asdict().items():
            if not isinstance(value, str) or not re.fullmatch("([0-9a-f]{64})?", value):
                raise ValueError(
                    f"{path}: {name}={value!r} cannot be used; `perada deploy check` prints that of a recipe"
                )
        if approved.digest and not approved.sha256:
            raise ValueError(
                f"{path}: the digest of {str(entry['recipe'])!r} stands there without its sha256, by which the file is "
                "compared before it is read; `perada deploy check` prints both: leave the digest out for that"
            )
        file = file / str(entry["recipe"])
        if not file.is_file():
            raise FileNotFoundError(f"{path}: the recipe {str(file)!r} is not there; put it there, or correct the path")
        found[file] = approved
    return found
