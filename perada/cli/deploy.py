# SPDX-License-Identifier: Apache-2.0
"""Real sites: ``perada deploy site``, ``check`` and ``export``, and a run among sites in this process."""

import hashlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import ArgumentParser

from perada.cli.deploy_check import (
    format_mask_values,
    format_memory,
    format_privacy,
    format_sent,
    format_site_privacy,
    format_sums,
    measure_step,
)
from perada.cli.deploy_status import format_rounds
from perada.cli.deployed_jobs import describe_job, is_site_job, kind_of_recipe, make_site_job, run_job
from perada.cli.deployed_recipes import server_recipe, site_recipe
from perada.cli.inference import print_saved
from perada.cli.runs import USER_ERRORS
from perada.core.checks import check_installed
from perada.core.text import printable
from perada.deploy.exported import export_server_run, export_site_run
from perada.deploy.monitoring import Monitoring, json_logs, stamp, text_handler
from perada.deploy.server.coordinator import Coordinator
from perada.deploy.server.progress import RunProgress, read_saved_run
from perada.deploy.site.client import Client
from perada.deploy.site.endpoint import check_endpoint, open_endpoint
from perada.deploy.site.file import Approved, SiteFile, read_site
from perada.deploy.site.split import image_split, save_split
from perada.deploy.site.worker import SiteWorker
from perada.deploy.state import RunState, SiteStore, read_runs
from perada.deploy.sums.vector import check_cryptography
from perada.deploy.transport import LocalTransport, Terms, Transport
from perada.federation.both_models import without_both_models
from perada.federation.typical_images import MAX_EXAMPLES
from perada.privacy.accounting import Ledger
from perada.results.clients import check_none_lost
from perada.results.run import Run
from perada.results.run_file import TYPICAL_FILE
from perada.system.disk_errors import naming_disk
from perada.system.files import check_output_folder

if TYPE_CHECKING:
    from perada.deploy.server.metrics import CountingTransport
    from perada.deploy.sums.party import Party

SITE_HELP = "File of the site, such as site.yaml."
LOG_FORMAT_HELP = "Format of log lines: text, or json for lines of JSON with run, round and site."


def site(parser: ArgumentParser, words: list[str]) -> None:
    """Serve a site: answer requests that arrive at its socket, until it is stopped."""
    parser.add_argument("site", type=Path, help=SITE_HELP)
    parser.add_argument("--log-format", type=Literal["text", "json"], default="text", help=LOG_FORMAT_HELP)
    options = parser.parse_args(words)
    if options.log_format == "json":
        with json_logs(sys.stderr, USER_ERRORS):
            _serve_site(read_site(options.site), logging.getLogger("perada.deploy").info)
        return
    handler = text_handler(sys.stderr, "%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    _serve_site(read_site(options.site), partial(print, flush=True))


def _serve_site(site_file: SiteFile, tell: Callable[[str], None]) -> None:
    """Answer requests at a site's socket; ``tell`` prints or logs a line."""
    check_endpoint(site_file)
    worker = make_worker(site_file)
    with open_endpoint(site_file, worker.max_bytes) as endpoint:
        tell(f"Site {site_file.name} listens on {site_file.socket}; Ctrl-C stops it.")
        endpoint.serve(worker.answer)


def check_deployment(parser: ArgumentParser, words: list[str]) -> None:
    """Dry-run a site's recipes; nothing is sent and nothing is kept."""
    parser.add_argument("site", type=Path, help=SITE_HELP)
    site_file = read_site(parser.parse_args(words).site)
    ledger = _read_ledger(site_file.state)
    for path in site_file.recipes:
        print("\n  ".join(map(printable, _describe_recipe(path, site_file, ledger))))


def _describe_recipe(path: Path, site_file: SiteFile, ledger: Ledger) -> list[str]:
    """Return lines on what a recipe would do at a site whose runs have spent the budget in ``ledger``."""
    if is_site_job(path, site_file):
        return describe_job(path, site_file)
    client = make_client(path, site_file)
    cost = measure_step(client)
    digests = Approved(hashlib.sha256(client.recipe.text).hexdigest(), client.recipe.digest)
    approval = "not approved: add this to the site's file"
    if site_file.recipes[path] == digests:
        approval = "approved"
    data = client.data
    classes = ", ".join(data.classes) if data.classes else str(data.num_classes)
    lines = [
        f"{path.name}: {approval}",
        f"sha256: {digests.sha256}",
        f"digest: {digests.digest}",
        f"{client.size} training images, {client.test_size} test images; classes: {printable(classes)}",
    ]
    mask_values = format_mask_values(data)
    if mask_values:
        lines.append(f"values in the masks: {mask_values}")
    split = image_split(data)
    if split is not None and split.changed:
        lines.append(f"the images have changed: {split.changed}")
    algorithm = type(client.settings.algorithm).__name__
    private = "no" if client.settings.privacy is None else format_privacy(client, ledger)
    lines += [
        f"{client.recipe.rounds} rounds of {algorithm}; a local step takes {cost.seconds:.2f} s, and a round has "
        f"{cost.num_steps}",
        f"memory: {format_memory(cost)}",
        f"sends {format_sent(client, site_file.may_send)}",
        f"private training: {private}",
        f"secure sums: {format_sums(client, make_party(site_file))}",
    ]
    if client.site_privacy is not None:
        lines.append(f"the entire site: {format_site_privacy(client, ledger)}")
    no_effect = without_both_models(client.settings, client.recipe.loop.evaluation.prediction)
    if no_effect is not None:
        lines.append(no_effect)
    return lines


def _read_ledger(folder: Path) -> Ledger:
    """Return the budget that the runs of a state folder have spent; nothing if this user may not read it."""
    try:
        _, totals = read_runs(folder)
    except PermissionError:
        return Ledger()
    return totals.ledger


def export_deployment(parser: ArgumentParser, words: list[str]) -> None:
    """Write the models of a site, or the global one of a deployed run, in the format of `perada export`."""
    parser.add_argument(
        "where", type=Path, metavar="PATH", help="File of a site, or folder of a deployed run (with --recipe)."
    )
    parser.add_argument("--recipe", default=None, help="Recipe of the run; by default the site's with its digest.")
    parser.add_argument(
        "--run", default=None, metavar="ID", help="Earlier run of the site, as listed by `perada deploy status`."
    )
    parser.add_argument("--output", type=Path, required=True, help="Folder for client_0 and global.")
    parser.add_argument(
        "--prediction",
        choices=("personal", "both"),
        default=None,
        help="Models with which the site predicts; by default those of the recipe's option evaluation.prediction. both "
        "writes statistics of the site's training images, too.",
    )
    options = parser.parse_args(words)
    check_output_folder("--output", options.output)
    if options.where.is_file():
        run = _run_of_site(read_site(options.where), options.recipe, options.run)
    else:
        run = _run_of_server(options.where, options.recipe)
    check_none_lost(options.output, run.info)
    print_saved(run, run.export(options.output, prediction=options.prediction))
    statistics = options.output / "client_0" / TYPICAL_FILE
    if statistics.is_file():
        print(
            f"{statistics} has statistics of up to {MAX_EXAMPLES} training images; to give the models away without it, "
            "export with --prediction personal"
        )


def _run_of_site(site_file: SiteFile, recipe: str | None, run: str | None) -> Run:
    """Return one of a site's runs, by default the current one.

    Args:
        site_file: Content of the site's file.
        recipe: Recipe of the run; None for the approved one with the run's digest.
        run: Id of the run.

    Raises:
        ValueError: If there is no such run, the site has not received a global state in it, or its recipe is not one
            of the site's file.
    """
    states, _ = read_runs(site_file.state)
    selected = [state for state in states if run in (None, state.run)]
    if run is not None and not selected:
        raise ValueError(
            f"run={run!r} is not one of the site's runs; `perada deploy status` with the site's file lists them"
        )
    if not selected or not selected[0].scoring.global_state:
        remedy = "export after its first evaluation (check_val_every_n_epoch), or after its end"
        # A user who exports late, when the next run has begun, wants the one that is over.
        exportable = [state.run for state in states if state.scoring.global_state]
        if exportable:
            remedy += f", or export an earlier run: --run {' or --run '.join(exportable)}"
        raise ValueError(f"site {site_file.name} has not received a global state yet; {remedy}")
    state = selected[0]
    path = _recipe_of(site_file, state) if recipe is None else Path(recipe).absolute()
    if path not in site_file.recipes:
        names = ", ".join(str(each) for each in site_file.recipes)
        raise ValueError(f"{str(path)!r} is not a recipe of the site's file, which has {names}; pass one of them")
    client = make_client(path, site_file)
    if client.recipe.digest != state.recipe:
        raise ValueError(f"{str(path)!r} is not the recipe of run {state.run}; pass that recipe with --recipe")
    if state.scoring.round < client.recipe.rounds:
        warnings.warn(
            f"run {state.run} is not over: the global model is that of round {state.scoring.round} of "
            f"{client.recipe.rounds}, after which it was scored last",
            stacklevel=2,
        )
    return export_site_run(client, state, site_file.name)


def _recipe_of(site_file: SiteFile, run_state: RunState) -> Path:
    """Return the file of the approved recipe of a run, or the only one of the site's file.

    Raises:
        ValueError: If there are several, and none has the run's digest.
    """
    for path, approved in site_file.recipes.items():
        if approved.digest == run_state.recipe:
            return path
    if len(site_file.recipes) == 1:
        return next(iter(site_file.recipes))
    raise ValueError(
        f"no recipe of the site's file has the digest {run_state.recipe} of run {run_state.run}; "
        "add that recipe to the file"
    )


def _run_of_server(folder: Path, name: str | None) -> Run:
    """Return the run in the server's state folder, with its recipe's name."""
    if name is None:
        raise ValueError(f"{str(folder)!r} does not contain the recipe; pass it with --recipe")
    recipe = server_recipe(name)
    recipe.build(recipe.num_classes, recipe.task)
    saved_run = read_saved_run(folder)
    progress = saved_run.progress
    if progress.recipe != recipe.digest:
        raise ValueError(f"{name!r} is not the recipe of run {progress.run}; pass that recipe with --recipe")
    return export_server_run(recipe, progress, saved_run.states)


def run_local(recipe: str, site_paths: Sequence[Path], folder: Path, terms: Terms, monitoring: Monitoring) -> None:
    """Run a recipe among sites in this process.

    Args:
        recipe: Name of the recipe.
        site_paths: Files of the sites.
        folder: State folder of the server.
        terms: Terms of the run.
        monitoring: How the run is monitored.
    """
    site_files = [read_site(path) for path in site_paths]
    workers = {}
    with ExitStack() as stores:
        for site_file in site_files:
            worker = make_worker(site_file)
            stores.callback(worker.store.close)
            workers[site_file.name] = worker
        run_rounds(recipe, LocalTransport(workers), folder, terms, monitoring)


def run_rounds(recipe: str, transport: Transport, folder: Path, terms: Terms, monitoring: Monitoring) -> None:
    """Run a recipe, specified as for `perada fit`, or a job without training, over a transport."""
    if kind_of_recipe(recipe) is not None:
        print(run_job(recipe, transport, folder, terms), flush=True)
        return
    counting = _counting_transport(transport, monitoring)
    coordinator = Coordinator(server_recipe(recipe, folder), counting or transport, folder, terms)
    progress = coordinator.progress
    log = logging.getLogger("perada.deploy")
    stamp(log, lambda: {"run": progress.run, "round": progress.done})
    in_json = monitoring.log_format == "json"
    tell = log.info if in_json else partial(print, flush=True)
    tell(f"perada's run is {progress.run}; its state is in {folder}")
    try:
        with _serve_metrics(progress, counting, monitoring):
            coordinator.run()
    finally:
        coordinator.close()
    tell(f"all {progress.rounds} rounds are done" if in_json else format_rounds(progress))


def _counting_transport(transport: Transport, monitoring: Monitoring) -> "CountingTransport | None":
    """Return a transport that counts messages for the metrics of a run; None if no metrics are requested."""
    if not monitoring.metrics_port:
        return None
    check_installed("metrics_port", "monitoring", "prometheus_client")
    from perada.deploy.server.metrics import CountingTransport

    return CountingTransport(transport)


def _serve_metrics(
    progress: RunProgress, counting: "CountingTransport | None", monitoring: Monitoring
) -> AbstractContextManager[None]:
    """Return a context in which the metrics of a run are served, if they are requested."""
    if counting is None:
        return nullcontext()
    from perada.deploy.server.metrics import serving

    return serving(
        progress, counting, monitoring.metrics_port, monitoring.metrics_address, monitoring.certificate_expiry()
    )


def make_client(path: Path, site_file: SiteFile) -> Client:
    """Build a recipe with a site's data.

    Raises:
        ValueError: If its frozen weights are not those that were approved.
    """
    client = Client(site_recipe(path, site_file), site_file.limits)
    approved = site_file.recipes[path].digest
    if approved not in ("", client.recipe.digest):
        raise ValueError(
            f"{str(path)!r} has the digest {client.recipe.digest}, but the site approves {approved}: the recipe file "
            "is the approved one, but its frozen weights are not; restore the approved weights, or approve these"
        )
    return client


def make_worker(site_file: SiteFile) -> SiteWorker:
    """Build the worker of a site.

    Raises:
        ValueError: If a recipe is not approved, or cannot be used with the site's data.
    """
    clients = {}
    jobs = {}
    for path, approved in site_file.recipes.items():
        if not all(approved):
            raise ValueError(
                f"{str(path)!r} is not approved: the site's file lacks its sha256 and digest; `perada deploy check` "
                "with the site's file prints both, and what the recipe would do"
            )
        if is_site_job(path, site_file):
            jobs[approved.digest] = make_site_job(path, site_file)
        else:
            clients[approved.digest] = make_client(path, site_file)
    log = logging.getLogger(f"perada.site.{site_file.name}")
    store = SiteStore(site_file.state)
    try:
        stamp(log, lambda: {"site": site_file.name})
        if store.is_new:
            # The folder at which a disk is mounted is empty without the disk.
            log.info(
                "%s is new: nothing was spent on these images yet. If this site has trained before, stop it, and mount "
                "the disk of this folder",
                site_file.state,
            )
        _save_splits(site_file, clients.values(), log)
        party = make_party(site_file)
        worker = SiteWorker(store, clients, site_file.may_send, log, party, site_file.resume_allow, jobs)
    except (ValueError, OSError, ImportError):
        store.close()
        raise
    stamp(log, lambda: {"site": site_file.name} | worker.log_context)
    return worker


def _save_splits(site_file: SiteFile, site_clients: Iterable[Client], log: logging.Logger) -> None:
    """Save how the images of each recipe are split, and log what has changed since the last start.

    Raises:
        DiskError: If the splits cannot be saved.
    """
    for client in site_clients:
        split = image_split(client.data)
        if split is None:
            continue
        if split.changed:
            log.warning("the site's images: %s", split.changed)
        with naming_disk(site_file.state):
            save_split(site_file.state, split)


def make_party(site_file: SiteFile) -> "Party | None":
    """Build the site's side of secure sums; None if its file lists no sites to hide among."""
    section = site_file.secure_sums
    if section is None:
        return None
    check_cryptography()
    from perada.deploy.sums.identity import read_identity, read_sites
    from perada.deploy.sums.party import Party

    return Party(
        name=site_file.name,
        identity=read_identity(section.identity),
        peers=read_sites(section.sites, section.authority),
    )
