# SPDX-License-Identifier: Apache-2.0
"""Clients that come and go: ``perada personalize RUN --data ...``, ``perada forget RUN --client NAME``."""

import sys
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from perada.cli.data import SOURCE, Source, add_options, division_of, division_of_recipe, kind_of
from perada.cli.inference import RUN, open_run
from perada.data import Images
from perada.data.partitions.division import Division
from perada.lightning.joining import check_name, personalize
from perada.results.clients import NOT_UNDONE, check_none_lost, forget
from perada.results.report import TEST_MODE, epsilon_text, percent
from perada.results.run import Run
from perada.results.run_file import holds_adapters

_DATA = f"{SOURCE} Or a recipe, whose data are of the client alone or name it among others. Also called --images."


def join(parser: ArgumentParser, words: list[str]) -> None:
    """Train a model for a new client of a finished run, and write it beside the others or with them elsewhere."""
    parser.add_argument("run", type=Path, help=RUN)
    parser.add_argument("--data", required=True, help=_DATA)
    parser.add_argument("--client", type=str, default=None, help="What the client is called; else as the data say.")
    parser.add_argument(
        "--output", type=Path, default=None, help="Folder for the run with the client; by default RUN, if it is saved."
    )
    parser.add_argument("--rounds", type=int, default=None, help="Rounds; by default those of a client of the run.")
    parser.add_argument("--local_steps", type=int, default=None, help="Local steps in a round, instead of the run's.")
    parser.add_argument("--batch_size", type=int, default=None, help="Images in a step, instead of the run's.")
    parser.add_argument("--lr", type=float, default=None, help="Learning rate, instead of the run's.")
    parser.add_argument("--seed", type=int, default=0, help="Of batches and dropout.")
    parser.add_argument("--accelerator", type=str, default=None, help="cpu, gpu; by default a GPU if there is one.")
    words, kind = _source(words)
    if kind is not None:
        add_options(parser, kind, "images")
    if kind is Images:
        parser.set_defaults({"images.layout": "{class}/*"})
    given = vars(parser.parse_args(words))
    path, source, output = given.pop("run"), given.pop("data"), given.pop("output")
    options = {name: given.pop(name) for name in ("rounds", "local_steps", "batch_size", "lr", "seed", "accelerator")}
    name, own = given.pop("client"), given.pop("images", None)
    saved = holds_adapters(path)
    if output is None and not saved and path.is_dir():
        raise ValueError(f"{str(path)!r} is a run folder of `perada fit`, which is left as it is; give --output FOLDER")
    if output is not None and output.is_file():
        raise NotADirectoryError(f"--output={output} is a file; give a folder")
    run = open_run(path)
    check_name(run, name)
    if output is not None and output.absolute() != path.absolute():
        check_none_lost(output, run.info)
    images = division_of_recipe(["--config", source]) if kind is None else _read_as(run, kind, source, vars(own))
    data = images.share_out()
    joined = personalize(run, data, name, **options, progress=sys.stderr.isatty())
    client = joined.num_clients - 1
    folder = joined.add_client(path, client) if output is None else joined.save(output)
    print(_said(joined, client, folder))


def leave(parser: ArgumentParser, words: list[str]) -> None:
    """Remove a client from a saved run, and say what that does not undo."""
    parser.add_argument("run", type=Path, help="Folder that Run.save, `perada export` or `perada personalize` wrote.")
    parser.add_argument("--client", type=str, required=True, help="Name or number of the client.")
    given = parser.parse_args(words)
    number = forget(given.run, given.client)
    print(f"Removed client {given.client} from {given.run}: client_{number}, its name and its scores. {NOT_UNDONE}")


def _source(words: list[str]) -> tuple[list[str], type[Source] | None]:
    """The words with ``--data`` in the place of ``--images``, and what it names: images, or (None) a recipe."""
    words = [f"--data{word[8:]}" if word.partition("=")[0] == "--images" else word for word in words]
    places = [place for place, word in enumerate(words) if word.partition("=")[0] == "--data"]
    if len(places) > 1:
        raise ValueError("--images and --data are the same option; give it once")
    after = "".join(words[place + 1] for place in places if place + 1 < len(words))
    value = "".join(words[place].partition("=")[2] or after for place in places)
    return words, kind_of(value) if value else Images


def _read_as(run: Run, kind: type[Source], source: str, options: dict[str, Any]) -> Division:
    """The images of a source, by client where clients are known, read as the run's own were."""
    known = run.preprocessing
    size = max(known.resize[0][:2]) if known.resize else known.shape[-1]
    white = known.full_scale if options["full_scale"] is None else options["full_scale"]
    read = {"size": size, "gray": options["gray"] or known.channels == 1, "full_scale": white}
    return division_of(source, kind, options | read)


def _said(run: Run, client: int, folder: Path) -> str:
    """What came of it."""
    told = run.info["joined"][-1]
    scores = "no test images"
    if told["after"] is not None:
        scores = f"{percent(told['before'])} % before, {percent(told['after'])} % after on its own test images"
    rounds = f"{told['rounds']} round{'s' * (told['rounds'] > 1)} of {told['algorithm']} ({told['steps']} steps)"
    lines = [
        f"Client {told['name']} ({told['images']} images): {scores}.",
        f"Trained for {rounds}. The global adapter and the other clients stay as they are.",
    ]
    privacy = run.info.get("privacy") or {}
    if "sample" in privacy:
        sample = privacy["sample"]
        lines.append(
            f"Privacy of its images at δ = {sample['options']['delta']:g}: ε {epsilon_text(sample['release'][client])} "
            f"(release ledger; noise multiplier {sample['noise_multipliers'][client]:.4g}; nothing was sent)."
        )
        if not sample["options"]["secure_rng"]:
            lines.append(TEST_MODE)
    return "\n".join([*lines, f"Wrote client_{client} to {folder}"])
