# SPDX-License-Identifier: Apache-2.0
"""What `mkdocs.yml` asks for beside Markdown: where the site's pages are, and how docstrings become Markdown."""

import re
from inspect import getdoc
from pathlib import Path

from griffe import Alias, AliasResolutionError, Extension, Module, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import perada

ROOT = Path(__file__).parents[1]
PAGES = (
    "*.md",
    "LICENSE",
    "docs/**/*.md",
    "docs/**/*.png",
    "docs/*.svg",
    "docs/tutorials/*.ipynb",
    "docs/example_report/*.html",
    "docs/example_report/*.csv",
    "recipes/**/*.yaml",
    "perada/models/weights/*.md",
)

# Pages of these packages show what they hand on, under that name. Others show each object in its own module only.
FACES = {f"perada.{name}" for name in ("algorithms", "data", "lightning", "privacy", "server")}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Lay the site out as the repository is, so that a link between two files is right in both."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    paths = sorted(path.relative_to(ROOT).as_posix() for pattern in PAGES for path in ROOT.glob(pattern))
    return Files([*theme, *(File(path, str(ROOT), config.site_dir, config.use_directory_urls) for path in paths)])


class Docstrings(Extension):
    """Turns the Sphinx roles of our docstrings into links, and doctests into blocks of code."""

    def on_package(self, *, pkg: Object, **_: object) -> None:
        """Rewrite the docstrings of a package that has been read."""
        seen: set[str] = set()
        todo: list[Object | Alias] = [pkg]
        while todo:
            found = todo.pop()
            if isinstance(found, Alias) or found.path in seen:
                continue
            seen.add(found.path)
            if isinstance(found, Module) and found.path not in FACES:
                found.exports = None
            todo += found.members.values()
            if found.path == "perada.api.finetune":  # which adds what classes say of their options
                found.docstring.value = getdoc(perada.finetune)
            if found.docstring:
                found.docstring.value = markdown(found.docstring.value, found)


def markdown(text: str, of: Object) -> str:
    """A docstring with its roles as links and its doctests as fenced blocks."""

    def link(match: re.Match[str]) -> str:
        shown = match[2].removeprefix("~") if match[2][0] != "~" else match[2].rpartition(".")[2]
        target = resolve(match[2].removeprefix("~"), of)
        return f"[`{shown}`][{target}]" if target else f"`{shown}`"

    text = re.sub(r":(\w+):`([^`]+)`", link, text)
    return re.sub(r"(?:^ *>>> .*\n?(?:^ *\S.*\n?)*\n?)+", fenced, text, flags=re.MULTILINE)


def resolve(name: str, of: Object) -> str | None:
    """Path of what a name means where it stands; None for what is another package's."""
    absolute = name.startswith(f"{of.package.name}.")
    scope, within = (of.package, name.partition(".")[2]) if absolute else (of, name)
    try:
        while scope is not None and within.split(".")[0] not in scope.all_members:
            scope = scope.parent
        found = scope and scope[within]
        while found and not found.has_docstring:  # an attribute that its class explains
            found = found.parent
        return found and found.canonical_path if shown(found) else None
    except AliasResolutionError:
        return None
    except KeyError:
        raise PluginError(f"the docstring of {of.path} names {name}, which does not exist") from None


def shown(found: Object | None) -> bool:
    """Whether a page of the reference shows an object."""
    while found and found.parent and not isinstance(found.parent, Module):
        found = found.parent
    face = found.package.modules.get(found.path.split(".")[1]) if found else None
    return face is None or face.path not in FACES or found.name in (face.exports or ())


def fenced(match: re.Match[str]) -> str:
    """A doctest as a fenced block with its indentation."""
    indent = re.match(r" *", match[0])[0]
    return f"\n{indent}```pycon\n{match[0].rstrip()}\n{indent}```\n"
