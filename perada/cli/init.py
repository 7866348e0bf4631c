# SPDX-License-Identifier: Apache-2.0
"""`perada init`: four questions, and a recipe with comments that `perada fit` runs as it stands."""

import csv
import json
import sys
from difflib import get_close_matches
from pathlib import Path

from jsonargparse import ArgumentParser

from perada.core.checks import check_number, check_whole
from perada.core.files import writing

SUFFIXES = {".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp", ".gif"}
TABLES = {".csv", ".tsv", ".parquet"}
QUESTIONS = {
    "images": "Your images, a folder or a table; empty for the handwritten digits that come with perada",
    "algorithm": "Algorithm: perada and ditto give every client a model, fedavg gives all of them one",
    "rounds": "Communication rounds",
    "epsilon": "Privacy: the ε that training may cost each image, such as 8; empty for none",
}
DEFAULTS = {"images": "", "algorithm": "perada", "rounds": "30", "epsilon": ""}


def init(parser: ArgumentParser, words: list[str]) -> None:
    """Ask what no option says, and write the recipe."""
    for name, question in QUESTIONS.items():
        parser.add_argument(f"--{name}", type=str, help=f"{question}. (default: {DEFAULTS[name] or 'none'})")
    parser.add_argument("--output", type=Path, default=Path("recipe.yaml"), help="File to write.")
    parser.add_argument("--yes", action="store_true", help="Ask nothing: what no option says has its default.")
    parser.add_argument("--force", action="store_true", help="Overwrite an existing file.")
    given = parser.parse_args(words)
    if given.output.exists() and not given.force:
        raise FileExistsError(f"{str(given.output)!r} exists already; choose another --output or add --force")
    if not given.yes and not sys.stdin.isatty() and any(given[name] is None for name in QUESTIONS):
        raise ValueError("there is no terminal to ask in: add --yes, and options for what is not to be the default")
    answers = {name: given[name] if given[name] is not None else _ask(name, given.yes) for name in QUESTIONS}
    text = recipe(**answers)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    with writing(given.output):
        given.output.write_text(text, encoding="utf-8")
    print(f"Wrote {given.output}; run it with: perada fit --config {given.output}")


def _ask(name: str, silent: bool) -> str:
    """An answer, or the default."""
    default = DEFAULTS[name]
    return default if silent else input(f"{QUESTIONS[name]} [{default}]: ").strip() or default


def recipe(images: str, algorithm: str, rounds: str, epsilon: str) -> str:
    """A recipe by the answers to the questions, each a text as it was typed.

    Raises:
        ValueError: If an answer cannot be used.
        FileNotFoundError: If the images are not there.
    """
    from perada.algorithms import ALGORITHMS, make_algorithm

    if algorithm not in ALGORITHMS:
        close = get_close_matches(algorithm, ALGORITHMS, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(ALGORITHMS)}"
        raise ValueError(f"algorithm={algorithm!r} is unknown; {hint}")
    check_whole("rounds", int(rounds) if rounds.isdigit() else rounds, 1)
    if epsilon:
        check_number("epsilon", _number(epsilon), above=0, hint="or nothing for no privacy")
    distils = make_algorithm(algorithm).distills
    lines = [
        f"# {algorithm} on {images or 'handwritten digits'}, as `perada init` wrote it.",
        "# All settings are starting points.",
        "# `perada fit --help` explains every option; `perada data inspect --config THIS_FILE` looks at the images.",
        f"algorithm: {algorithm}",
        f"rounds: {rounds}",
        f"eval_every: {min(5, int(rounds))}  # rounds between two evaluations",
        "seed: 0",
        "model:",
        *(
            ["  backbone: resnet18  # any of timm, here with ImageNet weights from the hub"]
            if images
            else [
                "  backbone: test_resnet",
                "  pretrained: perada:fashion_test_resnet  # weights that come with perada",
            ]
        ),
        # DP-SGD refuses BatchNorm that is trained, as a ResNet's other adapters have it.
        f"  adapter: {'head' if epsilon else 'residual'}  # what is trained; the backbone itself is frozen",
        "  lr_local: 0.01  # of what is sent to the server",
        "  lr_personal: 0.01  # of what stays with the client",
        "data:",
        *(f"  {line}" for line in _data(images)),
        *(["  public_fraction: 0.1  # for the server, which distils on it without labels"] if distils else []),
        f"  image_size: {224 if images else 32}",
        f"  batch_size: {32 if images else 16}",
        "federated:",
        "  local_epochs: 1  # passes of each client over its images in a round",
    ]
    if distils:
        lines += ["  distillation: {steps: 50, batch_size: 64, lr: 0.0001}"]
    if epsilon:
        lines += [
            "privacy:  # DP-SGD: the noise is chosen so that all rounds cost each image this ε",
            f"  target_epsilon: {epsilon}",
            "  delta: 1.0e-5  # below 1 / images of a client",
            "  max_norm: 1.0",
        ]
    return "\n".join([*lines, ""])


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _data(images: str) -> list[str]:
    """The set of images and how it is divided, as lines of YAML."""
    drawn = "  init_args: {num_clients: 20, alpha: 0.3}  # the smaller alpha, the more unequal the clients"
    if not images:
        return ["dataset: Digits", "partition:", "  class_path: Dirichlet", drawn]
    path = Path(images)
    if not path.exists():
        raise FileNotFoundError(
            f"images={images!r} is not there; give a folder or a table ({', '.join(sorted(TABLES))})"
        )
    own = ["partition: {class_path: ByDomain, init_args: {column: client}}  # each client has its own"]
    other = ["partition:  # the images say no clients, so they are divided at random", "  class_path: Dirichlet"]
    other.append(drawn.replace("20", "10"))
    where = json.dumps(images, ensure_ascii=False)  # in YAML, too
    if path.suffix.lower() in TABLES:
        known = path.suffix.lower() == ".parquet" or "client" in _header(path)
        return ["dataset:", "  class_path: ImageTable", f"  init_args: {{table: {where}}}", *(own if known else other)]
    files = (file.relative_to(path) for file in sorted(path.rglob("*")) if file.suffix.lower() in SUFFIXES)
    first = next(files, None)
    if first is None or len(first.parts) < 2:
        raise ValueError(f"images={images!r} holds no folders with images: give one with folders of clients or classes")
    layout = "{client}/{class}/*" if len(first.parts) > 2 else "{class}/*"
    init_args = f"  init_args: {{root: {where}, layout: '{layout}'}}"
    return ["dataset:", "  class_path: Images", init_args, *(own if len(first.parts) > 2 else other)]


def _header(path: Path) -> list[str]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return next(csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ","), [])
