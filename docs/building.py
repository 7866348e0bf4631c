# SPDX-License-Identifier: Apache-2.0
"""What `mkdocs.yml` asks for beside Markdown: where pages are, and how notebooks and docstrings become Markdown."""

import re
import tomllib
from pathlib import Path

from griffe import Alias, AliasResolutionError, Extension, Module, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[1]
PAGES = (
    "*.md",
    "LICENSE",
    "docs/**/*.md",
    "docs/**/*.png",
    "docs/*.svg",
    "docs/site.css",
    "docs/example_report/*.html",
    "docs/example_report/*.csv",
    "recipes/**/*.yaml",
    "perada/models/weights/*.md",
)

NOTEBOOKS = "docs/tutorials/*.ipynb"
# The site begins with a page of its own, and the README, which is for readers of the repository, is a page like others.
DESTINATIONS = {"docs/home.md": "index.html", "README.md": "README/index.html"}

# Pages of these packages show what they hand on, under that name. Others show each object in its own module only.
FACES = {
    f"perada.{name}"
    for name in (
        "algorithms",
        "data",
        "engine",
        "lightning",
        "privacy",
        "server",
        "tasks",
    )
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Link to the repository and to the source of each page, once the repository has an address."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    address = project["tool"]["perada"]["repository"].rstrip("/")
    if address:
        config.repo_url = address
        config.edit_uri = "edit/main/"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Lay the site out as the repository is, so that a link between two files is right in both."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    pages = []
    for path in sorted(
        path.relative_to(ROOT).as_posix()
        for pattern in PAGES
        for path in ROOT.glob(pattern)
    ):
        destination = DESTINATIONS.get(path)
        pages.append(
            File(
                path,
                str(ROOT),
                config.site_dir,
                config.use_directory_urls,
                dest_uri=destination,
            )
        )
    notebooks = []
    for notebook in sorted(ROOT.glob(NOTEBOOKS)):
        notebooks += convert_notebook(notebook, config)
    return Files([*theme, *pages, *notebooks])


class NotebookPage(File):
    """A notebook that is a page of the site, so that links to the notebook lead to the page."""

    def is_documentation_page(self) -> bool:
        """Return True, which MkDocs otherwise does for Markdown only."""
        return True


def convert_notebook(path: Path, config: MkDocsConfig) -> list[File]:
    """Return the page of a notebook, the images that it shows, and the notebook itself to download."""
    uri = path.relative_to(ROOT).as_posix()
    folder = f"{path.stem}_files"
    resources = {"unique_key": path.stem, "output_files_dir": folder}
    text, resources = MarkdownExporter().from_filename(
        str(path), resources=resources
    )
    title, _, rest = text.partition("\n")
    download = f"[Download the notebook]({folder}/{path.name})"
    page = NotebookPage(uri, str(ROOT), config.site_dir, config.use_directory_urls)
    # The exporter describes an image by its format.
    page.content_string = f"{title}\n\n{download}\n{rest.replace('![png](', '![Output of this cell](')}"

    parent = Path(uri).parent
    files = [
        page,
        File.generated(
            config, (parent / folder / path.name).as_posix(), abs_src_path=str(path)
        ),
    ]
    for name, content in resources["outputs"].items():
        files.append(
            File.generated(config, (parent / name).as_posix(), content=content)
        )
    return files


class Docstrings(Extension):
    """Turns the Sphinx roles of our docstrings into links, and doctests into blocks of code."""

    def on_package(self, *, pkg: Object, **_: object) -> None:
        """Rewrite the docstrings of a package that has been read."""
        seen: set[str] = set()
        todo: list[Object | Alias] = [pkg]
        while todo:
            documented = todo.pop()
            if isinstance(documented, Alias) or documented.path in seen:
                continue
            seen.add(documented.path)
            if isinstance(documented, Module) and documented.path not in FACES:
                documented.exports = None
            todo += documented.members.values()
            if documented.docstring:
                documented.docstring.value = markdown(
                    documented.docstring.value, documented
                )


def markdown(text: str, of: Object) -> str:
    """Return a docstring with its roles as links and its doctests as fenced blocks."""

    def link(match: re.Match[str]) -> str:
        name = match[2].removeprefix("~")
        # As in Sphinx, only the last part of a name with a tilde is shown.
        text = name.rpartition(".")[2] if match[2].startswith("~") else name
        target = resolve(name, of)
        return f"[`{text}`][{target}]" if target else f"`{text}`"

    text = re.sub(r":(\w+):`([^`]+)`", link, text)
    return re.sub(
        r"(?:^ *>>> .*\n?(?:^ *\S.*\n?)*\n?)+", fenced, text, flags=re.MULTILINE
    )


def resolve(name: str, of: Object) -> str | None:
    """Return the path of the object that a docstring names; None for an object of another package."""
    absolute = name.startswith(f"{of.package.name}.")
    scope, within = (of.package, name.partition(".")[2]) if absolute else (of, name)
    try:
        while scope is not None and within.split(".")[0] not in scope.all_members:
            scope = scope.parent
        target = scope and scope[within]
        # The class of an attribute without a docstring explains it.
        while target and not target.has_docstring:
            target = target.parent
        if not has_page(target):
            return None
        return target and target.canonical_path
    except AliasResolutionError:
        return None
    except KeyError:
        raise PluginError(
            f"the docstring of {of.path} names {name}, which does not exist"
        ) from None


def has_page(target: Object | None) -> bool:
    """Return whether a page of the reference shows an object."""
    while target and target.parent and not isinstance(target.parent, Module):
        target = target.parent
    face = target.package.modules.get(target.path.split(".")[1]) if target else None
    return (
        face is None
        or face.path not in FACES
        or target.name in (face.exports or ())
    )


def fenced(match: re.Match[str]) -> str:
    """Return a doctest as a fenced block with its indentation."""
    indent = re.match(r" *", match[0])[0]
    return f"\n{indent}```pycon\n{match[0].rstrip()}\n{indent}```\n"
