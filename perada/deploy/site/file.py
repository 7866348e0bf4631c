# SPDX-License-Identifier: Apache-2.0
"""``site.yaml``: what a site is called, where its images are, which recipes it approves and what may leave it."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from perada.core.checks import check_choice, check_number, check_options, check_whole
from perada.core.yaml_files import read_yaml
from perada.deploy.protocol import MAY_SEND

PLACES = ("root", "table")
"""Options of a data set that are paths, which are relative to the file."""


@dataclass(frozen=True)
class Limits:
    """What a site allows of all that is ever trained on its images, all runs and recipes together."""

    max_epsilon: float | None = None  # the largest ε; None for that of one whole run of the recipe
    delta: float = 1e-5  # of that ε, whatever a recipe says
    accountant: str = "rdp"  # by which it is computed, whatever a recipe says: rdp or prv, which report upper bounds
    max_rounds: int | None = None
    max_runs: int = 100  # each leaves a personal adapter on the site's disk
    max_site_epsilon: float | None = None  # of the site as a whole; None for that of one whole run of the recipe

    def __post_init__(self) -> None:
        check_number("max_epsilon", self.max_epsilon, above=0, optional=True)
        check_number("max_site_epsilon", self.max_site_epsilon, above=0, optional=True)
        check_number("delta", self.delta, above=0, below=1, hint="less than 1 / number of images, such as 1e-5")
        check_choice("accountant", self.accountant, ("rdp", "prv"))
        check_whole("max_rounds", self.max_rounds, optional=True)
        check_whole("max_runs", self.max_runs)


@dataclass(frozen=True)
class SecureSumsSection:
    """Among whom a site hides in secure sums; paths are absolute."""

    identity: Path  # its key, which no other process must read
    sites: Path  # list of the sites' public keys
    authority: str | None = None  # public key of who must have signed the list; None for a list of the site's own


class Approved(NamedTuple):
    """What a site wrote down of a recipe; empty where it did not."""

    sha256: str  # of the file, which is compared before anything of it is looked at
    digest: str  # of the file and the frozen weights


@dataclass(frozen=True)
class SiteFile:
    """A site, as its file says; paths are absolute.

    ``data`` are options of :class:`perada.data.Images` or :class:`perada.data.ImageTable`; or the section ``data`` of a
    recipe with ``dataset`` and ``partition``, and the number ``client`` of the site among its clients.
    """

    name: str  # what it is called in its own log
    recipes: dict[Path, Approved]
    data: dict[str, Any]
    state: Path  # folder of its personal state and its ledgers
    socket: Path | None = None  # where the worker listens; None if it does not say
    may_send: tuple[str, ...] = ()  # what may leave beside updates
    limits: Limits = field(default_factory=Limits)
    accelerator: str = "auto"
    secure_sums: SecureSumsSection | None = None  # None where it hides among nobody
    resume_allow: tuple[str, ...] = ()  # ``images`` if a run without privacy may go on with other ones


def read_site(path: Path) -> SiteFile:
    """Read a site's file.

    Raises:
        FileNotFoundError: If it, or a recipe, is not there.
        ValueError: If it is not what it should be; the message names the entry.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r} is not there; give the site's file, such as site.yaml")
    content = read_yaml(path, "name: st-marys")
    try:
        return _site(path.absolute().parent, content)
    except ValueError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None


def _site(home: Path, content: dict[str, Any]) -> SiteFile:
    check_options("entries", content, "{name: st-marys, recipes: [...], data: {...}}")
    for key in content:
        check_choice("entry", key, [each.name for each in fields(SiteFile)])
    name, data, limits = content.get("name"), content.get("data"), content.get("limits") or {}
    _check_text("name", name, r"[\w.-]{1,64}", "give up to 64 letters, digits, dots and dashes")
    if name == "CHANGE-ME":
        raise ValueError("name is still CHANGE-ME; give the name that the server registered for the site's key")
    check_options("data", data, "{root: images, layout: '{class}/*'}")
    check_options("limits", limits, "{max_epsilon: 8}")
    for key in limits:
        check_choice("limits", key, [each.name for each in fields(Limits)])
    may_send, recipes, socket = content.get("may_send") or [], content.get("recipes"), content.get("socket")
    if not isinstance(may_send, list):
        raise ValueError(f"may_send={may_send!r} cannot be used; give a list of {', '.join(MAY_SEND)}")
    for one in may_send:
        check_choice("may_send", one, MAY_SEND)
    resume_allow = content.get("resume_allow") or []
    if not isinstance(resume_allow, list):
        raise ValueError(f"resume_allow={resume_allow!r} cannot be used; give [images], or leave it out")
    for one in resume_allow:
        check_choice("resume_allow", one, ("images",))
    if not isinstance(recipes, list) or not recipes:
        raise ValueError(f"recipes={recipes!r} cannot be used; list what is approved, with recipe, sha256 and digest")
    return SiteFile(
        str(name),
        dict(_recipe(home, entry) for entry in recipes),
        {key: str(home / value) if key in PLACES else value for key, value in content["data"].items()},
        home / str(content.get("state") or "state"),
        None if socket is None else home / str(socket),
        tuple(may_send),
        Limits(**{key: _number(value) for key, value in limits.items()}),
        str(content.get("accelerator") or "auto"),
        _hiding(home, content.get("secure_sums")),
        tuple(resume_allow),
    )


def _hiding(home: Path, given: object) -> SecureSumsSection | None:
    if given is None:
        return None
    check_options("secure_sums", given, "{identity: st-marys.id, sites: sites.txt}")
    assert isinstance(given, dict)
    for key in given:
        check_choice("secure_sums", key, [each.name for each in fields(SecureSumsSection)])
    for key in ("identity", "sites"):
        if not isinstance(given.get(key), str):
            raise ValueError(f"secure_sums: {key} is not said; give a path, such as {{{key}: …}}")
    authority = given.get("authority")
    return SecureSumsSection(
        home / given["identity"], home / given["sites"], None if authority is None else str(authority)
    )


def _recipe(home: Path, entry: object) -> tuple[Path, Approved]:
    if not isinstance(entry, Mapping) or not {"recipe"} <= set(entry) <= {"recipe", *Approved._fields}:
        raise ValueError(f"recipes: {entry!r} cannot be used; give {{recipe: FILE, sha256: …, digest: …}}")
    approved = Approved(*(entry.get(name) or "" for name in Approved._fields))
    for name, value in approved._asdict().items():
        _check_text(name, value, "([0-9a-f]{64})?", "`perada deploy check` prints that of a recipe")
    if approved.digest and not approved.sha256:
        raise ValueError(
            f"the digest of {str(entry['recipe'])!r} stands there without its sha256, by which the file is compared "
            "before it is read; `perada deploy check` prints both: leave the digest out for that"
        )
    file = home / str(entry["recipe"])
    if not file.is_file():
        raise FileNotFoundError(f"the recipe {str(file)!r} is not there; put it there, or correct the path")
    return file, approved


def _check_text(name: str, value: object, pattern: str, remedy: str) -> None:
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise ValueError(f"{name}={value!r} cannot be used; {remedy}")


def _number(value: object) -> Any:  # noqa: ANN401  # what it is, if it is none
    """A number that YAML takes for a text, as it does 1e-5."""
    with suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value
