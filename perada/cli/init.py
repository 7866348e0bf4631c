# SPDX-License-Identifier: Apache-2.0
"""`perada init`: four questions, and a recipe with comments that `perada fit` runs as it stands."""

import json
import sys
from pathlib import Path
from typing import Any

import jinja2
import yaml
from jsonargparse import ArgumentParser

from perada.cli.data import TABLES, kind_of
from perada.core.checks import check_number, check_whole
from perada.core.files import writing
from perada.data import ImageTable
from perada.data.sets.folders import list_images, proposal

QUESTIONS = {
    "images": ("Your images, a folder or a table; empty for the handwritten digits that come with perada", ""),
    "algorithm": ("Algorithm: perada and ditto give every client a model, fedavg gives all of them one", "perada"),
    "rounds": ("Communication rounds", "30"),
    "epsilon": ("Privacy: the ε that training may cost each image, such as 8; empty for none", ""),
}


def init(parser: ArgumentParser, words: list[str]) -> None:
    """Ask what no option says, and write the recipe."""
    for name, (question, default) in QUESTIONS.items():
        parser.add_argument(f"--{name}", type=str, help=f"{question}. (default: {default or 'none'})")
    parser.add_argument("--output", type=Path, default=Path("recipe.yaml"), help="File to write.")
    parser.add_argument("--yes", action="store_true", help="Ask nothing: what no option says has its default.")
    parser.add_argument("--force", action="store_true", help="Overwrite an existing file.")
    given = parser.parse_args(words)
    if given.output.exists() and not given.force:
        raise FileExistsError(f"{str(given.output)!r} exists already; choose another --output or add --force")
    if not given.yes and not sys.stdin.isatty() and any(given[name] is None for name in QUESTIONS):
        raise ValueError("there is no terminal to ask in: add --yes, and options for what is not to be the default")
    answers = {}
    for name, (question, default) in QUESTIONS.items():
        asks = given[name] is None and not given.yes
        answer = input(f"{question} [{default}]: ").strip() or default if asks else given[name]
        answers[name] = default if answer is None else answer
    text = recipe(**answers)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    with writing(given.output):
        given.output.write_text(text, encoding="utf-8")
    print(f"Wrote {given.output}; run it with: perada fit --config {given.output}")


def recipe(images: str, algorithm: str, rounds: str, epsilon: str) -> str:
    """A recipe by the answers to the questions, each a text as it was typed.

    Raises:
        ValueError: If an answer cannot be used.
        FileNotFoundError: If the images are not there.
    """
    from perada.algorithms import make_algorithm

    distils = make_algorithm(algorithm).distills
    check_whole("rounds", yaml.safe_load(rounds))
    if epsilon:
        check_number("epsilon", yaml.safe_load(epsilon), above=0, hint="or nothing for no privacy")
    template = (Path(__file__).parent / "recipe.yaml.jinja").read_text(encoding="utf-8")
    made = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True).from_string(template)
    answers = {"images": images, "algorithm": algorithm, "rounds": int(rounds), "epsilon": epsilon}
    return made.render(answers | (_about(images) if images else {}), distils=distils)


def _about(images: str) -> dict[str, Any]:
    """How images are read, and whether they say which client each belongs to."""
    kind = kind_of(images)
    if kind is None or not Path(images).exists():
        raise FileNotFoundError(f"images={images!r} is not there; give a folder or a table ({', '.join(TABLES)})")
    if kind is ImageTable:
        options, clients = {"table": images}, "client" in ImageTable(images).listed[0]
    else:
        layout = proposal(list_images(Path(images))[0])
        if not layout:
            raise ValueError(f"images={images!r} holds no folders of clients or classes; give one that does")
        options, clients = {"root": images, "layout": layout}, "{client}" in layout
    return {"kind": kind.__name__, "options": json.dumps(options, ensure_ascii=False), "clients": clients}
