# SPDX-License-Identifier: Apache-2.0
"""Real sites: ``perada deploy site``, ``check``, ``status`` and ``export``, and a run among sites in this process."""

import hashlib
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import ArgumentParser

from perada.cli.deploy_status import (
    format_level,
    format_memory,
    format_privacy,
    format_rounds,
    format_sent,
    format_sums,
    measure_step,
    run_status,
    site_status,
)
from perada.cli.deployed_recipes import server_recipe, site_recipe
from perada.cli.inference import print_saved
from perada.cli.runs import REFUSALS
from perada.core.checks import check_installed
from perada.core.text import printable
from perada.deploy.exported import export_server_run, export_site_run
from perada.deploy.flower.certificates import ExpiryOf
from perada.deploy.flower.socket import Listener, supervised
from perada.deploy.monitoring import Monitoring, json_logs, stamp
from perada.deploy.server.coordinator import Coordinator
from perada.deploy.server.progress import RunProgress, read_progress
from perada.deploy.site.client import Client
from perada.deploy.site.file import Approved, SiteFile, read_site
from perada.deploy.site.split import image_split, remember
from perada.deploy.site.worker import SiteWorker
from perada.deploy.state import SiteStore, read_runs
from perada.deploy.sums.vector import check_cryptography
from perada.deploy.transport import LocalTransport, Terms, Transport
from perada.privacy.accounting import Ledger
from perada.results.clients import check_none_lost
from perada.results.run import Run

if TYPE_CHECKING:
    from perada.deploy.sums.party import Party

SITE = "File of the site, such as site.yaml."
LOG_FORMAT = "How log lines are written: text, or json for lines of JSON with run, round and site."


def site(parser: ArgumentParser, words: list[str]) -> None:
    """Serve a site: answer what comes through its socket, until it is stopped."""
    parser.add_argument("site", type=Path, help=SITE)
    parser.add_argument("--log-format", type=Literal["text", "json"], default="text", help=LOG_FORMAT)
    options = parser.parse_args(words)
    if options.log_format == "json":
        with json_logs(sys.stderr, REFUSALS):
            _serve_site(read_site(options.site), logging.getLogger("perada.deploy").info)
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    _serve_site(read_site(options.site), partial(print, flush=True))


def _serve_site(given: SiteFile, tell: Callable[[str], None]) -> None:
    if given.socket is None and not supervised():
        raise ValueError("the site's file names no socket; give one, such as socket: perada.sock")
    worker = make_worker(given)
    with Listener(given.socket, worker.most) as listener:
        tell(f"Site {given.name} listens at {given.socket}; Ctrl-C stops it.")
        listener.serve(worker.answer)


def check(parser: ArgumentParser, words: list[str]) -> None:
    """Try at a site what its recipes would do; nothing is sent and nothing is kept."""
    parser.add_argument("site", type=Path, help=SITE)
    given = read_site(parser.parse_args(words).site)
    total = _spent_before(given.state)
    for path, approved in given.recipes.items():
        client = make_client(path, given)
        tried = measure_step(client)
        data, sides, private = client.data, image_split(client.data), client.settings.privacy is not None
        names = ", ".join(data.classes) if data.classes else str(data.num_classes)
        here = Approved(hashlib.sha256(client.recipe.text).hexdigest(), client.recipe.digest)
        lines = [
            f"{path.name}: " + ("approved" if approved == here else "not approved: add this to the site's file"),
            f"sha256: {here.sha256}",
            f"digest: {here.digest}",
            f"{client.size} training images, {client.tests} test images; classes: {printable(names)}",
            *([f"the images have changed: {sides.changed}"] if sides and sides.changed else []),
            f"{client.recipe.rounds} rounds of {type(client.settings.algorithm).__name__}; a local step takes "
            f"{tried.seconds:.2f} s, and a round has {tried.steps}",
            f"memory: {format_memory(tried)}",
            f"sends {format_sent(client, given.may_send)}",
            "private training: " + (format_privacy(client, total) if private else "no"),
            "secure sums: " + format_sums(client, make_party(given)),
            *([] if client.level is None else ["the site as a whole: " + format_level(client.level, client, total)]),
        ]
        print("\n  ".join(lines))


def _spent_before(folder: Path) -> Ledger:
    """What the runs of a state folder have spent; nothing where this user may not read it."""
    total = Ledger()
    try:
        all_runs = read_runs(folder)[1]
    except PermissionError:
        return total
    if all_runs:
        total.load_state_dict(all_runs["total"])
    return total


def status(parser: ArgumentParser, words: list[str]) -> None:
    """Print how far a deployed run is, or what a site has trained and spent."""
    parser.add_argument("where", type=Path, help="Folder of a deployed run, or the file of a site.")
    where = parser.parse_args(words).where
    print(site_status(read_site(where)) if where.is_file() else run_status(read_progress(where)[0]))


def export(parser: ArgumentParser, words: list[str]) -> None:
    """Write the models of a site, or the global one of a deployed run, as `perada export` writes those of a fit."""
    parser.add_argument("where", type=Path, help="File of a site, or folder of a deployed run (with --recipe).")
    parser.add_argument("--recipe", default=None, help="Recipe of the run; by default the site's only one.")
    parser.add_argument("--run", default=None, help="Id of a former run of the site, as `perada deploy status` lists.")
    parser.add_argument("--output", type=Path, required=True, help="Folder for client_0 and global.")
    given = parser.parse_args(words)
    if given.output.is_file():
        raise NotADirectoryError(f"--output={given.output} is a file; give a folder")
    if given.where.is_file():
        run = _run_of_site(read_site(given.where), given.recipe, given.run)
    elif given.recipe is None:
        raise ValueError(f"{str(given.where)!r} does not hold the recipe; name it by --recipe")
    else:
        recipe = server_recipe(given.recipe)
        recipe.build(recipe.num_classes, recipe.multilabel)
        progress, states = read_progress(given.where)
        if progress.recipe != recipe.digest:
            raise ValueError(f"{given.recipe!r} is not the recipe of run {progress.run}; name that one by --recipe")
        run = export_server_run(recipe, progress, states)
    check_none_lost(given.output, run.info)
    print_saved(run, run.save(given.output))


def run_local(recipe: str, files: Sequence[Path], folder: Path, terms: Terms, watch: Monitoring) -> None:
    """Run a recipe among sites in this process."""
    sites = [read_site(path) for path in files]
    workers = {one.name: make_worker(one) for one in sites}
    try:
        run_rounds(recipe, LocalTransport(workers), folder, terms, watch)
    finally:
        for worker in workers.values():
            worker.book.close()


def run_rounds(recipe: str, transport: Transport, folder: Path, terms: Terms, watch: Monitoring) -> None:
    """Run a recipe, which is named as `perada fit` names it, over a transport."""
    transport, metrics = _with_metrics(transport, watch)
    coordinator = Coordinator(server_recipe(recipe, folder), transport, folder, terms)
    log, progress, in_json = logging.getLogger("perada.deploy"), coordinator.progress, watch.log_format == "json"
    stamp(log, lambda: {"run": progress.run, "round": progress.done})
    tell = log.info if in_json else partial(print, flush=True)
    tell(f"perada's run is {progress.run}; its state is in {folder}")
    try:
        with metrics(progress):
            coordinator.run()
    finally:
        coordinator.close()
    tell(f"all {progress.rounds} rounds are over" if in_json else format_rounds(progress))


def _with_metrics(
    transport: Transport, watch: Monitoring
) -> tuple[Transport, Callable[[RunProgress], AbstractContextManager[None]]]:
    """A transport that counts, and what serves the metrics of a run meanwhile, if they are asked for."""
    if not watch.metrics_port:
        return transport, lambda _: nullcontext()
    check_installed("metrics_port", "monitoring", "prometheus_client")
    from perada.deploy.server.metrics import CountingTransport, serving

    counted = CountingTransport(transport)
    expiry = ExpiryOf(watch.superlink) if watch.superlink else lambda: None
    return counted, lambda progress: serving(progress, counted, watch.metrics_port, watch.metrics_address, expiry)


def make_client(path: Path, given: SiteFile) -> Client:
    """A recipe with a site's data; a ValueError if it, or its frozen weights, are not those that were approved."""
    client, approved = Client(site_recipe(path, given), given.limits), given.recipes[path].digest
    if approved not in ("", client.recipe.digest):
        raise ValueError(
            f"{str(path)!r} has the digest {client.recipe.digest}, and the site approves {approved}: its file is the "
            "one that was approved, its frozen weights are not; put those there that were, or approve these"
        )
    return client


def make_worker(given: SiteFile) -> SiteWorker:
    """The worker of a site; a ValueError if a recipe is not approved, or cannot be used with the site's data."""
    clients = {}
    for path, approved in given.recipes.items():
        if not all(approved):
            raise ValueError(
                f"{str(path)!r} is not approved: the site's file does not say its sha256 and its digest; `perada "
                "deploy check` shows both, and what the recipe would do"
            )
        clients[approved.digest] = make_client(path, given)
    log, book = logging.getLogger(f"perada.site.{given.name}"), SiteStore(given.state)
    stamp(log, lambda: {"site": given.name})
    for client in clients.values():
        if sides := image_split(client.data):
            if sides.changed:
                log.warning("the site's images: %s", sides.changed)
            remember(given.state, sides)
    try:
        worker = SiteWorker(book, clients, given.may_send, log, make_party(given), given.resume_allow)
        stamp(log, lambda: {"site": given.name} | worker.about)
        return worker
    except (ValueError, OSError, ImportError):
        book.close()
        raise


def make_party(given: SiteFile) -> "Party | None":
    """The site among those that its file says it hides among; None if it says nobody."""
    if (hiding := given.secure_sums) is None:
        return None
    check_cryptography()
    from perada.deploy.sums.identity import read_identity, read_sites
    from perada.deploy.sums.party import Party

    return Party(given.name, read_identity(hiding.identity), read_sites(hiding.sites, hiding.authority))


def _run_of_site(given: SiteFile, name: str | None, run: str | None) -> Run:
    """One of a site's runs, by default the current one."""
    states = read_runs(given.state)[0]
    if run is not None and run not in [one.run for one in states]:
        raise ValueError(f"run={run!r} is not one of the site's runs; `perada deploy status` lists them")
    state = next((one for one in states if run in (None, one.run)), None)
    if state is None or not state.shared:
        remedy = "export when the run is over"
        # Whoever exports late, when the next run has begun, wants the one that is over.
        exportable = [former.run for former in states if former.shared]
        if exportable:
            remedy += f", or export a former run: --run {' or --run '.join(exportable)}"
        raise ValueError(f"site {given.name} was told no global state yet; {remedy}")
    path = Path(name).absolute() if name else next(iter(given.recipes))
    client = make_client(path, given)
    if client.recipe.digest != state.recipe:
        raise ValueError(f"{str(path)!r} is not the recipe of run {state.run}; name that one by --recipe")
    return export_site_run(client, state, given.name)
