# SPDX-License-Identifier: Apache-2.0
"""Real sites: ``perada deploy site``, ``check``, ``status`` and ``export``, and a run among sites in this process."""

import hashlib
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from jsonargparse import ArgumentParser

from perada.cli.deployed_recipes import server_recipe, site_recipe
from perada.cli.runs import REFUSALS
from perada.core.checks import check_installed
from perada.core.states import State, megabytes, to_device, unstack
from perada.core.text import printable
from perada.deploy.flower.socket import Listener, supervised
from perada.deploy.monitoring import Monitoring, json_logs, stamp
from perada.deploy.protocol import Order
from perada.deploy.recipe import Recipe
from perada.deploy.server.coordinator import Coordinator
from perada.deploy.site.client import Client
from perada.deploy.site.file import Approved, Limits, SiteFile, read_site
from perada.deploy.site.level import SiteLevel
from perada.deploy.site.split import image_split, remember
from perada.deploy.site.worker import SiteWorker
from perada.deploy.state import IMAGES, WHOLE, Book, Progress, RunState, read_progress, read_runs
from perada.deploy.sums.vector import check_cryptography
from perada.deploy.transport import LocalTransport, Terms, Transport
from perada.privacy.accounting import Ledger
from perada.results.export import PeftFolders
from perada.results.report import epsilon_text, table

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
    worker = worker_of(given)
    with Listener(given.socket, worker.most) as listener:
        tell(f"Site {given.name} listens at {given.socket}; Ctrl-C stops it.")
        listener.serve(worker.answer)


def check(parser: ArgumentParser, words: list[str]) -> None:
    """Try at a site what its recipes would do; nothing is sent and nothing is kept."""
    parser.add_argument("site", type=Path, help=SITE)
    given = read_site(parser.parse_args(words).site)
    for path, approved in given.recipes.items():
        client = client_of(path, given)
        tried = try_step(client)
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
            f"memory: {shown_memory(tried)}",
            f"sends {shown_sent(client, given.may_send)}",
            "private training: " + (shown_privacy(client) if private else "no"),
            "secure sums: " + shown_sums(client, party_of(given)),
            *([] if client.level is None else ["the site as a whole: " + shown_level(client.level, client)]),
        ]
        print("\n  ".join(lines))


def status(parser: ArgumentParser, words: list[str]) -> None:
    """Print how far a deployed run is, or what a site has trained and spent."""
    parser.add_argument("where", type=Path, help="Folder of a deployed run, or the file of a site.")
    where = parser.parse_args(words).where
    print(_site_status(read_site(where)) if where.is_file() else _run_status(read_progress(where)[0]))


def export(parser: ArgumentParser, words: list[str]) -> None:
    """Write the adapter of a site, or the global one of a deployed run, as a PEFT folder."""
    parser.add_argument("where", type=Path, help="File of a site, or folder of a deployed run (with --recipe).")
    parser.add_argument("--recipe", default=None, help="Recipe of the run; by default the site's only one.")
    parser.add_argument("--run", default=None, help="Id of a former run of the site, as `perada deploy status` lists.")
    parser.add_argument("--output", type=Path, required=True, help="Folder for personal and global.")
    given, rank = parser.parse_args(words), None
    if given.where.is_file():
        recipe, models, rank = _of_site(read_site(given.where), given.recipe, given.run)
        names: Sequence[str] | None = recipe.data.classes
    elif given.recipe is None:
        raise ValueError(f"{str(given.where)!r} does not hold the recipe; name it by --recipe")
    else:
        recipe = server_recipe(given.recipe)
        names = recipe.classes
        recipe.build(recipe.num_classes, recipe.multilabel)
        models = {"global": _models(recipe, read_progress(given.where)[1]["global"])}
    assert recipe.module.adapted is not None
    folders, written = PeftFolders(recipe.module.adapted), []
    for name, states in models.items():
        for place, state in enumerate(states):
            folder = given.output / (name if len(states) == 1 else f"{name}_{place}")
            folders.save(state, folder, names, rank if name == "personal" else None)
            written.append(folder.name)
    print(f"Wrote {', '.join(written)} to {given.output}")


def run_local(recipe: str, files: Sequence[Path], folder: Path, terms: Terms, watch: Monitoring) -> None:
    """Run a recipe among sites in this process."""
    sites = [read_site(path) for path in files]
    workers = {one.name: worker_of(one) for one in sites}
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
    tell(f"all {progress.rounds} rounds are over" if in_json else shown_rounds(progress))


def _with_metrics(
    transport: Transport, watch: Monitoring
) -> tuple[Transport, Callable[[Progress], AbstractContextManager[None]]]:
    """A transport that counts, and what serves the metrics of a run meanwhile, if they are asked for."""
    if not watch.metrics_port:
        return transport, lambda _: nullcontext()
    check_installed("metrics_port", "monitoring", "prometheus_client")
    from perada.deploy.server.metrics import Counted, serving

    counted = Counted(transport)
    return counted, lambda progress: serving(progress, counted, watch.metrics_port, watch.metrics_address)


def client_of(path: Path, given: SiteFile) -> Client:
    """A recipe with a site's data; a ValueError if it, or its frozen weights, are not those that were approved."""
    client, approved = Client(site_recipe(path, given), given.limits), given.recipes[path].digest
    if approved not in ("", client.recipe.digest):
        raise ValueError(
            f"{str(path)!r} has the digest {client.recipe.digest}, and the site approves {approved}: its file is the "
            "one that was approved, its frozen weights are not; put those there that were, or approve these"
        )
    return client


def worker_of(given: SiteFile) -> SiteWorker:
    """The worker of a site; a ValueError if a recipe is not approved, or cannot be used with the site's data."""
    clients = {}
    for path, approved in given.recipes.items():
        if not all(approved):
            raise ValueError(
                f"{str(path)!r} is not approved: the site's file does not say its sha256 and its digest; `perada "
                "deploy check` shows both, and what the recipe would do"
            )
        clients[approved.digest] = client_of(path, given)
    log, book = logging.getLogger(f"perada.site.{given.name}"), Book(given.state)
    stamp(log, lambda: {"site": given.name})
    for client in clients.values():
        if sides := image_split(client.data):
            if sides.changed:
                log.warning("the site's images: %s", sides.changed)
            remember(given.state, sides)
    try:
        worker = SiteWorker(book, clients, given.may_send, log, party_of(given))
        stamp(log, lambda: {"site": given.name} | worker.about)
        return worker
    except (ValueError, OSError, ImportError):
        book.close()
        raise


def party_of(given: SiteFile) -> "Party | None":
    """The site among those that its file says it hides among; None if it says nobody."""
    if (hiding := given.secure_sums) is None:
        return None
    check_cryptography()
    from perada.deploy.sums.identity import read_identity, read_sites
    from perada.deploy.sums.party import Party

    return Party(given.name, read_identity(hiding.identity), read_sites(hiding.sites, hiding.authority))


class Tried(NamedTuple):
    """One local step of a client."""

    seconds: float
    steps: int  # of a round
    memory: float  # peak of the process during the step, GB
    device_memory: float | None  # peak on the GPU, GB; None on a CPU


def try_step(client: Client) -> Tried:
    """Take one local step from the first state; nothing of it is kept."""
    order, device = Order("train", "0" * 32, "0" * 64), client.recipe.device
    protection, plan, cuda = client.protection(None, 0), client.plan(order), device.type == "cuda"
    sampling = None if protection.images is None else protection.images.sampling()
    first = next(client.batches(plan, sampling))
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.monotonic()
    client.train(order, client.recipe.template.sending, RunState(order.run), protection, only_step=first)
    if cuda:
        torch.cuda.synchronize(device)
    seconds, unit = time.monotonic() - begin, 1 if sys.platform == "darwin" else 1024  # bytes there
    memory = getrusage(RUSAGE_SELF).ru_maxrss * unit / 1e9
    there = torch.cuda.max_memory_allocated(device) / 1e9 if cuda else None
    return Tried(seconds, sum(own[0] for own in plan.steps), memory, there)


def shown_memory(tried: Tried) -> str:
    """What a step needs, in words."""
    here = f"{tried.memory:.2f} GB"
    return here if tried.device_memory is None else f"{here}, and {tried.device_memory:.2f} GB on the GPU"


def shown_sent(client: Client, may_send: Sequence[str]) -> str:
    """What leaves a site in a round, in words."""
    recipe = client.recipe
    if client.settings.secure_sums is None:
        size = max(megabytes(recipe.sent(round)) for round in range(2))
        return f"{size:.3f} MB a round, and {', '.join(may_send) or 'nothing'} beside"
    numbers = max(recipe.contents(round, client.images).size for round in range(2))
    summed = [one for one in may_send if one in ("counts", "scores", "losses") and client.level is None]
    added = ", ".join(summed) or "no scores"
    beside = ", ".join(one for one in may_send if one in ("sizes", "epsilon")) or "nothing"
    vector = f"{numbers:,} numbers ({8 * numbers / 1e6:.3f} MB) a round"
    return f"{vector} and {added}, all under masks, and {beside} beside"


def shown_sums(client: Client, party: "Party | None") -> str:
    """Among whom a site's updates are hidden."""
    secure = client.settings.secure_sums
    if secure is None:
        return "no: the server reads the site's updates"
    if party is None:
        return "asked for, and the site's file does not say among whom: add its section secure_sums"
    others = f"{secure.min_sites - 1} of {len(party.peers)} others: {', '.join(sorted(party.peers))}"
    few = "" if len(party.peers) + 1 >= secure.min_sites else "; too few, and no sum will be made"
    return f"yes: hidden among at least {others}{few}"


def shown_level(level: SiteLevel, client: Client) -> str:
    """What a whole run spends of the site as a whole, and its limit."""
    limits, rounds = client.limits, client.recipe.rounds
    spent = epsilon_text(level.budget.epsilon({level.cost: rounds}))
    hidden = f"noise of its own in each sum; {rounds} rounds spend ε ≤ {spent} {shown_measure(limits)}"
    return f"{hidden}, also against the server; {shown_limit(limits.max_site_epsilon)}"


def shown_privacy(client: Client) -> str:
    """What a whole run spends at the site, if it takes part in every round, and the site's limit."""
    limits, rounds = client.limits, client.recipe.rounds
    spent = f"ε ≤ {epsilon_text(client.budget.epsilon(client.planned))} {shown_measure(limits)}"
    return f"yes: a run of {rounds} rounds spends {spent}; {shown_limit(limits.max_epsilon)}"


def shown_measure(limits: Limits) -> str:
    """How a site counts ε."""
    return f"at δ = {limits.delta:g}, by {limits.accountant}"


def shown_limit(own: float | None) -> str:
    """The largest ε that a site allows, where ``own`` is the one that it gives."""
    return "that is its limit over all runs" if own is None else f"its limit over all runs is {own:g}"


def _models(recipe: Recipe, state: State) -> list[State]:
    """The global models of a state that may be a stack of several."""
    own = recipe.module.initial_state(0)
    return unstack(state) if any(state[key].dim() > own[key].dim() for key in own) else [state]


def _of_site(given: SiteFile, name: str | None, run: str | None) -> tuple[Recipe, dict[str, list[State]], int | None]:
    """The site's personal model, the global one that it was last told, and its rank of LoRA, of one of its runs."""
    states = read_runs(given.state)[0]
    if run is not None and run not in [one.run for one in states]:
        raise ValueError(f"run={run!r} is not one of the site's runs; `perada deploy status` lists them")
    state = next((one for one in states if run in (None, one.run)), None)
    if state is None or not state.shared:
        raise ValueError(f"site {given.name} was told no global state yet; export when the run is over")
    path = Path(name).absolute() if name else next(iter(given.recipes))
    client = client_of(path, given)
    if client.recipe.digest != state.recipe:
        raise ValueError(f"{str(path)!r} is not the recipe of run {state.run}; name that one by --recipe")
    shared = to_device(state.shared, client.recipe.device)
    personal = client.personal(shared, state)
    own = {} if personal is None else {"personal": unstack(personal)}
    return client.recipe, {"global": _models(client.recipe, shared), **own}, state.rank or None


def _site_status(given: SiteFile) -> str:
    states, all_runs = read_runs(given.state)
    if not states:
        return f"Site {given.name} has trained nothing yet."
    titles = ["run", "transport's id", "recipe", "rounds trained", "last round"]
    rows = [[one.run, one.transport or "–", one.recipe[:8], str(one.trained), str(one.round)] for one in states]
    if any(one.summed >= 0 for one in states):
        titles.append("last under masks")
        rows = [[*row, str(one.summed) if one.summed >= 0 else "–"] for row, one in zip(rows, states, strict=True)]
    text = f"Site {given.name}, the current run first:\n\n{table(titles, rows)}"
    total, limits = Ledger(), given.limits
    total.load_state_dict(all_runs["total"])

    def spent(whose: str, owner: int, own: float | None) -> str:
        found = epsilon_text(total.epsilon(owner, limits.delta, limits.accountant))
        most = "one whole run's" if own is None else f"{own:g}"
        return f"\n\n{whose}: ε {found} (the limit is {most}) {shown_measure(limits)}"

    whole = bool(total.history(WHOLE))
    if whole:
        text += spent("The site as a whole, all noisy sums together", WHOLE, limits.max_site_epsilon) + "."
    if not total.history(IMAGES):
        return text
    bare = sum(steps for (sigma, _), steps in total.history(IMAGES).items() if not sigma)
    without = f"; {bare} rounds had no privacy" if bare else ""
    whose = "Single images, all runs together" if whole else "All runs together"
    return f"{text}{spent(whose, IMAGES, limits.max_epsilon)}{without}."


def _run_status(progress: Progress) -> str:
    rows = []
    for member in progress.roster:
        spent = {name: float("inf") if one is None else one for name, one in member.epsilon.items()}
        epsilons = ", ".join(f"{name} {epsilon_text(one)}" for name, one in spent.items())
        size = "–" if member.size is None else str(member.size)
        rows.append([member.name, size, str(member.rounds), member.left or "–", epsilons or "–"])
    sites = table(["site", "images", "rounds", "left", "ε"], rows)
    return f"Run {progress.run}: {progress.done} of {progress.rounds} rounds\n\n{shown_rounds(progress)}\n\n{sites}"


def shown_rounds(progress: Progress) -> str:
    """The rounds of a deployed run as a table."""
    rows, summed = [], any(record.summed for record in progress.records)
    for record, row in zip(progress.records, progress.history, strict=True):
        missing, outside = (
            ", ".join(f"{name} ({why})" for name, why in found.items()) or "–"
            for found in (record.failed, record.outside)
        )
        score = row.get("personal/local_test", float("nan"))
        answered, traffic = f"{len(record.answered)}/{len(record.asked)}", f"{record.up + record.down:.2f}"
        shown = "–" if score != score else f"{100 * score:.1f}"
        inside = [", ".join(record.summed) or "–"] if summed else []
        told = [missing, outside, record.void or "–", f"{record.seconds:.1f}", traffic, shown]
        rows.append([str(record.round), answered, *inside, *told])
    sums = ["in the sum"] if summed else []
    return table(["round", "answered", *sums, "missing", "outside", "void", "s", "MB", "personal %"], rows)
