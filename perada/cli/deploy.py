# SPDX-License-Identifier: Apache-2.0
"""Real sites: ``perada deploy site``, ``check``, ``run``, ``status`` and ``export``."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser

from perada.cli.deployed_recipes import server_recipe, site_recipe
from perada.cli.site_check import shown_memory, shown_privacy, try_step
from perada.core.states import State, megabytes, unstack
from perada.core.text import printable
from perada.deploy.flower.socket import Listener, from_supervisor, supervised
from perada.deploy.protocol import LocalTransport, Transport
from perada.deploy.recipe import Recipe
from perada.deploy.server.coordinator import Coordinator
from perada.deploy.server.progress import Progress, Terms, read_progress
from perada.deploy.site.client import Client
from perada.deploy.site.data import image_split, remember
from perada.deploy.site.file import Approved, SiteFile, read_site
from perada.deploy.site.state import STATE, Book, read_state
from perada.deploy.site.worker import SiteWorker
from perada.privacy.accounting import Ledger
from perada.results.export import save_adapter
from perada.results.report import epsilon_text, table

SITE = "File of the site, such as site.yaml."


def site(parser: ArgumentParser, words: list[str]) -> None:
    """Serve a site: answer what comes through its socket, until it is stopped."""
    parser.add_argument("site", type=Path, help=SITE)
    given = read_site(parser.parse_args(words).site)
    if given.socket is None and not supervised():
        raise ValueError("the site's file names no socket; give one, such as socket: perada.sock")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    worker = worker_of(given)
    with from_supervisor(worker.most) or Listener(given.socket, worker.most) as listener:
        print(f"Site {given.name} listens at {given.socket}; Ctrl-C stops it.", flush=True)
        listener.serve(worker.answer)


def check(parser: ArgumentParser, words: list[str]) -> None:
    """Try at a site what its recipes would do; nothing is sent and nothing is kept."""
    parser.add_argument("site", type=Path, help=SITE)
    given = read_site(parser.parse_args(words).site)
    for path, approved in given.recipes.items():
        client = Client(site_recipe(path, given), given.limits)
        tried = try_step(client)
        data, sides = client.data, image_split(client.data)
        names = ", ".join(data.classes) if data.classes else str(data.num_classes)
        here = Approved(hashlib.sha256(client.recipe.text).hexdigest(), client.recipe.digest)
        if approved.digest not in ("", here.digest):
            raise ValueError(
                f"{str(path)!r} with these weights has the digest {here.digest}, and the site approves "
                f"{approved.digest}; ask the server for the recipe and weights that were approved, or approve these"
            )
        lines = [
            f"{path.name}: " + ("approved" if approved == here else "not approved: add this to the site's file"),
            f"  sha256: {here.sha256}",
            f"  digest: {here.digest}",
            f"  {client.size} training images, {client.tests} test images; classes: {printable(names)}",
            *([f"  the images have changed: {sides.changed}"] if sides and sides.changed else []),
            f"  {client.recipe.rounds} rounds of {type(client.settings.algorithm).__name__}; a local step takes "
            f"{tried.seconds:.2f} s, and a round has {tried.steps}",
            f"  memory: {shown_memory(tried)}",
            f"  sends {megabytes(client.recipe.template.sent):.3f} MB a round, and "
            f"{', '.join(given.may_send) or 'nothing'} beside",
        ]
        privacy = client.settings.privacy
        lines.append("  private training: " + ("no" if privacy is None else shown_privacy(client)))
        print("\n".join(lines))


def run(parser: ArgumentParser, words: list[str]) -> None:
    """Run a recipe among sites."""
    parser.add_argument("recipe", help="Recipe, as `perada ls` lists it, or a file.")
    parser.add_argument("--local", nargs="+", type=Path, required=True, help="Files of sites that run in this process.")
    parser.add_argument("--folder", type=Path, default=Path("deployed"), help="Of the run.")
    parser.add_argument("--min-sites", type=int, default=1, help="Sites that must answer, or a round is not closed.")
    parser.add_argument(
        "--sample", type=int | None, default=None, help="Sites asked in a round; else the recipe's number."
    )
    parser.add_argument("--deadline", type=float, default=600.0, help="Seconds that a round may take.")
    late = Literal["wait", "skip"]
    parser.add_argument(
        "--late", type=late, default="wait", help="Wait for all that were asked, or continue with the first."
    )
    parser.add_argument("--resume", action="store_true", help="Resume the run in the folder.")
    given = parser.parse_args(words)
    sites = [read_site(path) for path in given.local]
    workers = {one.name: worker_of(one) for one in sites}
    terms = Terms(given.min_sites, given.sample, given.deadline, given.late)
    try:
        coordinator = make_coordinator(given.recipe, LocalTransport(workers), given.folder, terms, given.resume)
        try:
            coordinator.run()
        finally:
            coordinator.close()
    finally:
        for worker in workers.values():
            worker.book.close()
    print(shown_rounds(coordinator.progress))
    print(f"Run folder: {given.folder}")


def status(parser: ArgumentParser, words: list[str]) -> None:
    """Print how far a deployed run is, or what a site has trained and spent."""
    parser.add_argument("where", type=Path, help="Folder of a deployed run, or the file of a site.")
    where = parser.parse_args(words).where
    if where.is_file():
        given = read_site(where)
        path = given.state / STATE
        if not path.is_file():
            print(f"Site {given.name} has trained nothing yet.")
            return
        state, header = read_state(path)
        former = [read_state(one)[0] for one in sorted((given.state / "runs").glob("*.safetensors"))]
        rows = [
            [one.run, one.transport or "–", one.recipe[:8], str(one.trained), str(one.round)]
            for one in [state, *(one for one in former if one.run != state.run)]
        ]
        print(f"Site {given.name}, the current run first:\n")
        print(table(["run", "transport's id", "recipe", "rounds trained", "last round"], rows) + "\n")
        total = Ledger()
        total.load_state_dict(header["total"])
        if total.history(0):
            limits = given.limits
            spent = epsilon_text(total.epsilon(0, limits.delta, limits.accountant))
            bare = sum(steps for (sigma, _), steps in total.history(0).items() if not sigma)
            without = f"; {bare} rounds had no privacy" if bare else ""
            most = "one whole run's" if limits.max_epsilon is None else f"{limits.max_epsilon:g}"
            print(
                f"All runs together: ε {spent} (the limit is {most}) at δ = {limits.delta:g}, by {limits.accountant}"
                f"{without}."
            )
        return
    progress, _ = read_progress(where)
    head = f"Run {progress.run}: {progress.done} of {progress.rounds} rounds"
    print(f"{head}\n\n{shown_rounds(progress)}\n\n{_sites(progress)}")


def export(parser: ArgumentParser, words: list[str]) -> None:
    """Write the adapter of a site, or the global one of a deployed run, as a PEFT folder."""
    parser.add_argument("where", type=Path, help="File of a site, or folder of a deployed run (with --recipe).")
    parser.add_argument("--recipe", default=None, help="Recipe of the run; by default the site's only one.")
    parser.add_argument("--run", default=None, help="Id of a former run of the site, as `perada deploy status` lists.")
    parser.add_argument("--output", type=Path, required=True, help="Folder for personal and global.")
    given = parser.parse_args(words)
    if given.where.is_file():
        recipe, models = _of_site(read_site(given.where), given.recipe, given.run)
        names: Sequence[str] | None = recipe.data.classes
    elif given.recipe is None:
        raise ValueError(f"{str(given.where)!r} does not hold the recipe; name it by --recipe")
    else:
        served = server_recipe(given.recipe)
        recipe, names = served.recipe, served.classes
        recipe.build(served.num_classes, served.multilabel)
        state = read_progress(given.where)[1]["global"]
        models = {"global": unstack(state) if _many(recipe) else [state]}
    assert recipe.module.adapted is not None
    written = []
    for name, states in models.items():
        for place, state in enumerate(states):
            folder = given.output / (name if len(states) == 1 else f"{name}_{place}")
            save_adapter(recipe.module.adapted, state, folder, classes=names)
            written.append(folder.name)
    print(f"Wrote {', '.join(written)} to {given.output}")


def worker_of(given: SiteFile) -> SiteWorker:
    """The worker of a site.

    Raises:
        ValueError: If a recipe is not the one that was approved, or cannot be used with the site's data.
    """
    clients = {}
    for path, approved in given.recipes.items():
        if not all(approved):
            raise ValueError(
                f"{str(path)!r} is not approved: the site's file does not say its sha256 and its digest; `perada "
                "deploy check` shows both, and what the recipe would do"
            )
        client = Client(site_recipe(path, given), given.limits)
        if client.recipe.digest != approved.digest:
            raise ValueError(
                f"{str(path)!r} has the digest {client.recipe.digest}, and the site approves {approved.digest}: its "
                "file is the one that was approved, its frozen weights are not; put those there that were"
            )
        clients[approved.digest] = client
    log, book = logging.getLogger(f"perada.site.{given.name}"), Book(given.state)
    for client in clients.values():
        if sides := image_split(client.data):
            if sides.changed:
                log.warning("the site's images: %s", sides.changed)
            remember(given.state, sides)
    return SiteWorker(book, clients, given.may_send, given.limits, log)


def make_coordinator(name: str, transport: Transport, folder: Path, terms: Terms, resume: bool = False) -> Coordinator:
    """The server of a recipe that is named as `perada fit` names it."""
    given = server_recipe(name, folder)
    return Coordinator(
        given.recipe,
        transport,
        folder,
        terms,
        public=given.public,
        num_classes=given.num_classes,
        multilabel=given.multilabel,
        classes=given.classes,
        resume=resume,
        loggers=given.loggers,
    )


def _many(recipe: Recipe) -> bool:
    state = recipe.template.initial
    own = recipe.module.initial_state(0)
    return any(state[key].dim() > own[key].dim() for key in own)


def _of_site(given: SiteFile, name: str | None, run: str | None) -> tuple[Recipe, dict[str, list[State]]]:
    """The site's personal model and the global one that it was last told, of its current run or another."""
    former = {path.stem: path for path in (given.state / "runs").glob("*.safetensors")}
    state = read_state(given.state / STATE)[0] if (given.state / STATE).is_file() else None
    if run is not None and (state is None or state.run != run):
        if run not in former:
            raise ValueError(f"run={run!r} is none of the site's; `perada deploy status` lists them")
        state = read_state(former[run])[0]
    if state is None or not state.shared:
        raise ValueError(f"site {given.name} was told no global state yet; export when the run is over")
    path = Path(name).absolute() if name else next(iter(given.recipes))
    client = Client(site_recipe(path, given))
    if client.recipe.digest != state.recipe:
        raise ValueError(f"{str(path)!r} is not the recipe of run {state.run}; name that one by --recipe")
    shared = {key: value.to(client.recipe.device) for key, value in state.shared.items()}
    models = {"global": unstack(shared) if _many(client.recipe) else [shared]}
    personal = client.personal(shared, state)
    return client.recipe, models | ({} if personal is None else {"personal": unstack(personal)})


def shown_rounds(progress: Progress) -> str:
    """The rounds of a deployed run as a table."""
    rows, outside = [], any(record.outside for record in progress.records)
    for record, row in zip(progress.records, progress.history, strict=True):
        failed = ", ".join(f"{name} ({code})" for name, code in record.failed.items())
        score = row.get("personal/local_test", float("nan"))
        rows.append(
            [
                str(record.round),
                f"{len(record.answered)}/{len(record.asked)}",
                failed or "–",
                *([", ".join(f"{name} ({why})" for name, why in record.outside.items()) or "–"] if outside else []),
                record.void or "–",
                f"{record.seconds:.1f}",
                f"{record.up + record.down:.2f}",
                "–" if score != score else f"{100 * score:.1f}",
            ]
        )
    columns = ["round", "answered", "missing", *(["outside"] if outside else []), "void", "s", "MB", "personal %"]
    return table(columns, rows)


def _sites(progress: Progress) -> str:
    """The roster as a table."""
    rows = [
        [
            member.name,
            "–" if member.size is None else str(member.size),
            str(member.rounds),
            member.left or "–",
            ", ".join(
                f"{name} {epsilon_text(float('inf') if one is None else one)}" for name, one in member.epsilon.items()
            )
            or "–",
        ]
        for member in progress.roster
    ]
    return table(["site", "images", "rounds", "left", "ε"], rows)
