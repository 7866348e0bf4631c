# SPDX-License-Identifier: Apache-2.0
"""The address of the repository, and everything that follows from it.

``python .ci/publishing.py https://example.org/perada`` sets it: the line ``repository`` of ``[tool.perada]`` in
``pyproject.toml``, and ``CITATION.cff``. The distributions (links of the long description, addresses of the project)
and the site (link to the repository, "edit this page") read that line when they are built.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LINE = re.compile(r'^repository = "(.*)"', re.MULTILINE)
_CITED = re.compile(r"^repository-code: .*\n", re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)\s]+)\)")
_PICTURE_ENDINGS = (".svg", ".png")


def address_of(tree: Path = ROOT) -> str:
    """Return the address of the repository without a slash at its end; empty as long as there is none."""
    project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))
    address: str = project["tool"]["perada"]["repository"]
    return address.rstrip("/")


def set_address(address: str, tree: Path = ROOT) -> None:
    """Write the address into ``pyproject.toml`` and ``CITATION.cff``.

    Raises:
        ValueError: If it is not an address of a page.
    """
    if not re.fullmatch(r"https://[^\s\"/]+/[^\s\"]+", address):
        raise ValueError(f"the repository's address must begin with https:// and have a path, got {address!r}")
    project = tree / "pyproject.toml"
    project.write_text(_LINE.sub(f'repository = "{address}"', project.read_text(encoding="utf-8")), encoding="utf-8")
    citation = tree / "CITATION.cff"
    text = _CITED.sub("", citation.read_text(encoding="utf-8"))
    citation.write_text(text.replace("type: software\n", f"type: software\nrepository-code: {address}\n"), "utf-8")


def long_description(readme: str, address: str, version: str) -> str:
    """Return ``README.md`` for an index of packages, which has none of the files that it links to.

    Links to files become those of the released version in the repository. Without an address they become plain text,
    and pictures are left out.
    """
    if not address:
        text = re.sub(rf"!\[[^\]]*{_LINK.pattern}\n?", "", readme)
        return re.sub(rf"\[((?:[^\[\]]|\[[^\]]*\])*){_LINK.pattern}", r"\1", text)

    def absolute(match: re.Match[str]) -> str:
        path, _, anchor = match[1].partition("#")
        view = "raw" if path.endswith(_PICTURE_ENDINGS) else "blob"
        return f"]({address}/{view}/v{version}/{path}{'#' if anchor else ''}{anchor})"

    return _LINK.sub(absolute, readme)


def project_urls(address: str) -> str:
    """Return the section ``[project.urls]``; empty without an address."""
    if not address:
        return ""
    urls = {
        "Repository": address,
        "Documentation": f"{address}/blob/main/docs/index.md",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    lines = [f'{name} = "{url}"' for name, url in urls.items()]
    return "\n".join(["[project.urls]", *lines, "", ""])


def prepare(tree: Path) -> None:
    """Write the long description and the addresses of the project into a copy of the source tree."""
    address = address_of(tree)
    project = tree / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    version = tomllib.loads(text)["project"]["version"]
    readme = tree / "README.md"
    readme.write_text(long_description(readme.read_text(encoding="utf-8"), address, version), encoding="utf-8")
    if "\n[project.urls]" not in text:
        marker = "[project.optional-dependencies]"
        project.write_text(text.replace(marker, project_urls(address) + marker), encoding="utf-8")


if __name__ == "__main__":
    set_address(sys.argv[1])
