# SPDX-License-Identifier: Apache-2.0
"""Commands for real sites over Flower: ``perada deploy init``, ``keys``, ``run`` and ``demo``."""

import logging
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser, Namespace

from perada.cli.messages import one_line, quiet_libraries
from perada.cli.recipes import whole
from perada.core.checks import check_whole
from perada.deploy.flower.app import check_target, write_app
from perada.deploy.flower.keys import check_hosts, check_site_name, write_server_keys, write_site_keys
from perada.deploy.flower.running import Link, run_app
from perada.deploy.monitoring import Monitoring, json_handler, json_logs
from perada.deploy.transport import Terms, Transport


def init(parser: ArgumentParser, words: list[str]) -> None:
    """Write the Flower app of a recipe, and what the persons at the server and at the sites need beside it."""
    parser.add_argument("recipe", help="Name of a recipe, as `perada ls` lists it, or a file.")
    parser.add_argument("folder", type=Path, help="Folder to write; it must not be there.")
    parser.add_argument("--name", type=str, default=None, help="Name of the app; by default the recipe's.")
    parser.add_argument(
        "--host", type=str, default="link.example.org", help="Name or address by which sites reach the server."
    )
    given = parser.parse_args(words)
    check_hosts([given.host])
    text = whole(given.recipe)
    name = given.name or re.sub("[^a-z0-9-]+", "-", Path(given.recipe).stem.lower()).strip("-")
    check_target(given.folder, name)
    digest = recipe_digest(given.recipe)
    write_app(given.folder, name, text, digest, given.host)
    print(f"Wrote {given.folder}; its README.md says what is for whom.\nSites approve the digest {digest}")


def recipe_digest(name: str) -> str:
    """What sites approve: of the recipe's text and of the weights that it freezes.

    A ValueError if no site could train it privately as it asks for.
    """
    from perada.cli.deployed_recipes import server_recipe
    from perada.lightning.setup import check_trained_norms

    recipe = server_recipe(name)
    recipe.build(recipe.num_classes, recipe.multilabel)
    if recipe.loop.privacy is not None:
        check_trained_norms(recipe.module)
    return recipe.digest


def keys_server(parser: ArgumentParser, words: list[str]) -> None:
    """Write the server's certificate, and the authority's, by which sites know it."""
    parser.add_argument("folder", type=Path, help="Folder for them; made if it is not there.")
    parser.add_argument(
        "--host", type=str, action="append", required=True, help="Name or address of the server; may be repeated."
    )
    parser.add_argument("--days", type=int, default=730, help="How long the certificate is valid.")
    given = parser.parse_args(words)
    last = write_server_keys(given.folder, given.host, given.days)
    print(
        f"Wrote {given.folder}: send ca.crt to the sites; ca.key and server.key stay here. server.pem expires on {last}"
    )


def keys_site(parser: ArgumentParser, words: list[str]) -> None:
    """Write a site's keys: one that the server registers, and one by which other sites know it in secure sums."""
    given = _folder_and_name(parser, words, "Name of the site, such as st-marys.")
    write_site_keys(given.folder, given.name)
    from perada.deploy.sums.identity import write_identity

    write_identity(given.folder, given.name)
    name = given.name
    print(
        f"Wrote {given.folder}: send {name}.pub to the server, and {name}.id.pub to the other sites if the recipe has "
        f"secure_sums; {name}.key and {name}.id stay here"
    )


def keys_identity(parser: ArgumentParser, words: list[str]) -> None:
    """Write a key for secure sums alone: of a site that has its other key, or of who signs lists of sites."""
    given = _folder_and_name(parser, words, "Name of the site, or of the authority.")
    from perada.deploy.sums.identity import write_identity

    check_site_name(given.name)
    write_identity(given.folder, given.name)
    print(f"Wrote {given.folder}: send {given.name}.id.pub to the sites; {given.name}.id stays here")


def _folder_and_name(parser: ArgumentParser, words: list[str], about: str) -> Namespace:
    from perada.deploy.sums.vector import check_cryptography

    parser.add_argument("folder", type=Path, help="Folder for them; made if it is not there.")
    parser.add_argument("--name", type=str, required=True, help=about)
    given = parser.parse_args(words)
    check_cryptography()
    return given


def keys_sign(parser: ArgumentParser, words: list[str]) -> None:
    """Sign a list of sites as its authority, for sites that name the authority's key in their files."""
    parser.add_argument("list", type=Path, help="The sites' lines, one after another, as in their NAME.id.pub.")
    parser.add_argument("--identity", type=Path, required=True, help="The authority's key, such as NAME.id.")
    given = parser.parse_args(words)
    from perada.deploy.sums.vector import check_cryptography

    check_cryptography()
    from perada.deploy.sums.identity import sign_sites

    print(f"Wrote {sign_sites(given.list, given.identity)}: send it with {given.list} to the sites")


def run(parser: ArgumentParser, words: list[str]) -> None:
    """Start an app on a SuperLink and show what it prints, or run a recipe among sites in this process (--local)."""
    parser.add_argument("app", help="The folder `app` that `perada deploy init` wrote; with --local, a recipe.")
    text = "Name of the SuperLink in Flower's configuration, or its address, such as link.example.org:8000."
    parser.add_argument("--link", type=str, default="", help=text)
    text = "Certificate of the authority that signed the SuperLink's, for an address: ca.crt."
    parser.add_argument("--root-certificates", type=Path, default=None, help=text)
    text = "Folder for the server's state, on the SuperLink's machine; by default in Flower's own folder."
    parser.add_argument("--state", type=str, default="", help=text)
    parser.add_argument("--local", nargs="+", type=Path, default=[], help="Files of sites that run in this process.")
    parser.add_argument("--folder", type=Path, default=Path("deployed"), help="Of the run, with --local.")
    text = "Sites that must answer, or a round is not closed; by default 2, with --local 1."
    parser.add_argument("--min-sites", type=int | None, default=None, help=text)
    text = "Sites that a round asks; 0 for those that the recipe draws, or all."
    parser.add_argument("--sample", type=int, default=0, help=text)
    parser.add_argument("--deadline", type=float, default=600.0, help="Seconds that a round waits for replies.")
    text = "Close a round when all who were asked have answered (wait), or with the first --min-sites (skip)."
    parser.add_argument("--late", type=Literal["wait", "skip"], default="wait", help=text)
    parser.add_argument("--resume", action="store_true", help="Resume the run that was interrupted.")
    text = "Port at which Prometheus finds metrics of the run, such as 9100, on the SuperLink's machine; 0 for none."
    parser.add_argument("--metrics-port", type=int, default=0, help=text)
    parser.add_argument("--metrics-address", type=str, default="127.0.0.1", help="Where that port listens.")
    text = "How log lines are written: text, or json for lines of JSON with run, round and site."
    parser.add_argument("--log-format", type=Literal["text", "json"], default="text", help=text)
    given = parser.parse_args(words)
    least = (1 if given.local else 2) if given.min_sites is None else given.min_sites
    terms = Terms(least, given.sample, given.deadline, given.late, given.resume, given.state)
    watch = Monitoring(given.metrics_port, given.metrics_address, given.log_format)
    if not given.local:
        if not given.link:
            raise ValueError("where the app is to run is not said; give --link, or sites of this machine (--local)")
        with _logs(watch):
            sys.exit(run_app(Path(given.app), Link(given.link, given.root_certificates), terms, watch))
    from perada.cli.deploy import run_local

    with _logs(watch):
        run_local(given.app, given.local, given.folder, terms, watch)


def _logs(watch: Monitoring) -> AbstractContextManager[None]:
    """What writes logs, warnings and errors as lines of JSON, if these are asked for."""
    if watch.log_format != "json":
        return nullcontext()
    from perada.cli.runs import REFUSALS

    return json_logs(sys.stdout, REFUSALS)


def serve(path: Path, transport: Transport, terms: Terms, state: Path, watch: Monitoring) -> None:
    """Run a recipe over a transport: what the app at the server calls."""
    from perada.cli.deploy import run_rounds
    from perada.cli.runs import REFUSALS

    quiet_libraries()
    logging.getLogger("pytorch_lightning.utilities.rank_zero").setLevel(logging.WARNING)
    log, in_json = logging.getLogger("perada.deploy"), watch.log_format == "json"
    log.setLevel(logging.INFO)
    # What is on the standard output Flower shows to whom started the run.
    log.addHandler(json_handler(sys.stdout) if in_json else logging.StreamHandler(sys.stdout))
    try:
        run_rounds(str(path), transport, state, terms, watch)
    except REFUSALS as error:
        if in_json:
            log.error("%s", one_line(error))
        else:
            print(f"perada: error: {one_line(error)}", flush=True)
        # Flower shows a traceback of whatever is raised: of this line, and not of how it came to it.
        raise RuntimeError(one_line(error)) from None


def demo(parser: ArgumentParser, words: list[str]) -> None:
    """Run a federation of three sites on this machine, with TLS and authentication, and leave nothing."""
    parser.add_argument("--rounds", type=int, default=3, help="Rounds.")
    parser.add_argument("--secure-sums", action="store_true", help="Let the server see sums over the sites alone.")
    given = parser.parse_args(words)
    check_whole("rounds", given.rounds)
    from perada.studies.deployment import run_demo

    sys.exit(run_demo(given.rounds, recipe_digest, secure_sums=given.secure_sums))
