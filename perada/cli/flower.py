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
from perada.cli.recipes import recipe_text
from perada.core.checks import check_integer
from perada.core.text import printable
from perada.deploy.flower.app import check_app_target, write_app
from perada.deploy.flower.keys import check_hosts, check_site_name, write_server_keys, write_site_keys
from perada.deploy.flower.running import Link, list_runs, run_app
from perada.deploy.monitoring import Monitoring, json_handler, json_logs, text_handler
from perada.deploy.protocol import JobKind
from perada.deploy.transport import Terms, Transport
from perada.system.files import check_new_files


def init_app(parser: ArgumentParser, words: list[str]) -> None:
    """Write the Flower app of a recipe, and the files that the operators of server and sites need with it."""
    parser.add_argument("recipe", help="Name of a recipe, as listed by `perada ls`, or a file.")
    parser.add_argument("folder", type=Path, help="Folder to write; it must not exist.")
    parser.add_argument("--name", type=str, default=None, help="Name of the app; by default the recipe's.")
    parser.add_argument(
        "--host", type=str, default="link.example.org", help="Name or address by which sites reach the server."
    )
    options = parser.parse_args(words)
    check_hosts([options.host])
    text = recipe_text(options.recipe)
    name = options.name or re.sub("[^a-z0-9-]+", "-", Path(options.recipe).stem.lower()).strip("-")
    # The folder is checked before the digest, for which the network is built.
    check_app_target(options.folder, name)
    digest = recipe_digest(options.recipe)
    write_app(options.folder, name, text, digest, options.host)
    print(f"Wrote {options.folder}; its README.md lists which files are for whom.\nSites approve the digest {digest}")


def recipe_digest(name: str) -> str:
    """Return the digest that sites approve, of the recipe's text and its frozen weights.

    Raises:
        ValueError: If no site could train the recipe with the privacy that it sets.
    """
    from perada.cli.deployed_jobs import job_recipe_digest, kind_of_recipe
    from perada.cli.deployed_recipes import server_recipe
    from perada.lightning.privacy_setup import check_trained_norms

    if kind_of_recipe(name) is not None:
        return job_recipe_digest(name)
    recipe = server_recipe(name)
    recipe.build(recipe.num_classes, recipe.task)
    if recipe.loop.privacy is not None:
        check_trained_norms(recipe.module)
    return recipe.digest


def keys_server(parser: ArgumentParser, words: list[str]) -> None:
    """Write the server's certificate, and the authority's, with which sites verify it."""
    parser.add_argument("folder", type=Path, help="Folder to write them to; created if it does not exist.")
    parser.add_argument(
        "--host", type=str, action="append", required=True, help="Name or address of the server; may be repeated."
    )
    parser.add_argument("--days", type=int, default=730, help="Validity of the certificate in days.")
    options = parser.parse_args(words)
    expires = write_server_keys(options.folder, options.host, options.days)
    print(
        f"Wrote {options.folder}: send ca.crt to the sites; ca.key and server.key stay here. server.pem expires on "
        f"{expires}"
    )


def keys_site(parser: ArgumentParser, words: list[str]) -> None:
    """Write a site's keys: one that the server registers, and one that identifies it to other sites in secure sums."""
    options = _parse_folder_and_name(parser, words, "Name of the site, such as st-marys.")
    # This module imports cryptography, whose absence the line above reports.
    from perada.deploy.sums.identity import private_key_file, public_key_file, write_identity

    folder = options.folder
    name = options.name
    # Both files are checked before the first key is written, so that no folder gets one key without the other.
    check_new_files(folder, [private_key_file(folder, name).name, public_key_file(folder, name).name])
    write_site_keys(folder, name)
    write_identity(folder, name)
    print(
        f"Wrote {folder}: send {name}.pub to the server, and {name}.id.pub to the other sites if the recipe has "
        f"secure_sums; {name}.key and {name}.id stay here"
    )


def keys_identity(parser: ArgumentParser, words: list[str]) -> None:
    """Write a key for secure sums only: for a site with its other key, or an authority that signs lists of sites."""
    options = _parse_folder_and_name(parser, words, "Name of the site, or of the authority.")
    # This module imports cryptography, whose absence the line above reports.
    from perada.deploy.sums.identity import write_identity

    folder = options.folder
    name = options.name
    check_site_name(name)
    write_identity(folder, name)
    print(f"Wrote {folder}: send {name}.id.pub to the sites; {name}.id stays here")


def _parse_folder_and_name(parser: ArgumentParser, words: list[str], name_help: str) -> Namespace:
    """Parse the options of a command that writes keys, which needs cryptography."""
    parser.add_argument("folder", type=Path, help="Folder to write them to; created if it does not exist.")
    parser.add_argument("--name", type=str, required=True, help=name_help)
    options = parser.parse_args(words)
    _require_cryptography()
    return options


def _require_cryptography() -> None:
    """Raise a ModuleNotFoundError if a library for keys is not installed."""
    # The import takes longer than the help of a command.
    from perada.deploy.sums.vector import check_cryptography

    check_cryptography()


def keys_sign(parser: ArgumentParser, words: list[str]) -> None:
    """Sign a list of sites as its authority, for sites whose files have the authority's key."""
    parser.add_argument("list", type=Path, help="File with one line per site, from their NAME.id.pub.")
    parser.add_argument("--identity", type=Path, required=True, help="The authority's key, such as NAME.id.")
    options = parser.parse_args(words)
    _require_cryptography()
    # This module imports cryptography, whose absence the line above reports.
    from perada.deploy.sums.identity import sign_sites

    signature_file = sign_sites(options.list, options.identity)
    print(f"Wrote {signature_file}: send it with {options.list} to the sites")


def node(parser: ArgumentParser, words: list[str]) -> None:
    """Run a site's SuperNode after tests of its connection, and end when it gives up, so that it can be restarted."""
    parser.add_argument("superlink", help="Address of the SuperLink, such as link.example.org:8000.")
    parser.add_argument(
        "--root-certificates", type=Path, required=True, help="Certificate of the server's authority: ca.crt."
    )
    parser.add_argument("--key", type=Path, required=True, help="The site's private key, such as keys/st-marys.key.")
    parser.add_argument(
        "--socket",
        type=Path,
        default=Path("/run/perada/site.sock"),
        help="Socket on which the site's worker listens.",
    )
    parser.add_argument(
        "--port", type=int, default=9094, help="Port of the loopback interface for the SuperNode's own processes."
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="Only test key, certificates, port, clock and registration; the exit status is 1 if a test fails.",
    )
    options = parser.parse_args(words)
    from perada.deploy.flower.node import Node, check_node, run_node

    supernode = Node(
        superlink=options.superlink,
        authority=options.root_certificates,
        key=options.key,
        socket=options.socket,
        port=options.port,
    )
    checks = check_node(supernode)
    for check in checks:
        if options.check or check.status != "pass":
            print(f"{check.status}  {printable(check.text)}", flush=True)
    if any(check.status == "fail" for check in checks):
        sys.exit(1)
    if not options.check:
        run_node(supernode)


def _add_link(parser: ArgumentParser, required: bool = False) -> None:
    """Add the options that name a SuperLink."""
    parser.add_argument(
        "--link",
        type=str,
        default="",
        required=required,
        help="Name of the SuperLink in Flower's configuration, or its address, such as link.example.org:8000.",
    )
    parser.add_argument(
        "--root-certificates",
        type=Path,
        default=None,
        help="Certificate of the authority that signed the SuperLink's, for an address: ca.crt.",
    )


def run(parser: ArgumentParser, words: list[str]) -> None:
    """Start an app on a SuperLink and show its output, or run a recipe among sites in this process (--local)."""
    parser.add_argument("app", help="The folder `app` that `perada deploy init` wrote; with --local, a recipe.")
    _add_link(parser)
    parser.add_argument(
        "--state",
        type=str,
        default="",
        metavar="PATH",
        help="Folder for the server's state, on the SuperLink's machine; by default in Flower's folder.",
    )
    parser.add_argument("--local", nargs="+", type=Path, default=[], help="Files of sites that run in this process.")
    parser.add_argument("--folder", type=Path, default=Path("deployed"), help="Folder of the run, with --local.")
    parser.add_argument(
        "--min-sites",
        type=int | None,
        default=None,
        help="Number of sites that must answer to close a round; by default 2, with --local 1.",
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=0,
        help="Number of sites to ask in a round; 0 for those that the recipe draws, or all.",
    )
    parser.add_argument(
        "--deadline", type=float, default=600.0, metavar="SECONDS", help="Seconds to wait for the replies of a round."
    )
    parser.add_argument(
        "--late",
        type=Literal["wait", "skip"],
        default="wait",
        help="Close a round when all asked sites have answered (wait), or after the first --min-sites (skip).",
    )
    parser.add_argument("--resume", action="store_true", help="Resume the interrupted run.")
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=0,
        help="Port for Prometheus metrics of the run, such as 9100, on the SuperLink's machine; 0 for none.",
    )
    parser.add_argument("--metrics-address", type=str, default="127.0.0.1", help="Address on which that port listens.")
    parser.add_argument(
        "--log-format",
        type=Literal["text", "json"],
        default="text",
        help="Format of log lines: text, or json for lines of JSON with run, round and site.",
    )
    options = parser.parse_args(words)
    min_sites = options.min_sites
    if min_sites is None:
        min_sites = 1 if options.local else 2
    terms = Terms(
        min_sites=min_sites,
        sample=options.sample,
        deadline=options.deadline,
        late=options.late,
        resume=options.resume,
        state=options.state,
    )
    monitoring = Monitoring(options.metrics_port, options.metrics_address, options.log_format)
    if not options.local:
        if not options.link:
            raise ValueError("the app has no target; set --link, or sites on this machine (--local)")
        with _json_logs_if_requested(monitoring):
            link = Link(options.link, options.root_certificates)
            sys.exit(run_app(Path(options.app), link, terms, monitoring))
    from perada.cli.deploy import run_local

    with _json_logs_if_requested(monitoring):
        run_local(options.app, options.local, options.folder, terms, monitoring)


def run_survey(parser: ArgumentParser, words: list[str]) -> None:
    """Have sites count their images, add the counts up, and print where the sites do not fit together."""
    _run_job(parser, words, "survey")


def run_evaluation(parser: ArgumentParser, words: list[str]) -> None:
    """Have sites score models on their test images, add their summaries up, and print pooled scores."""
    _run_job(parser, words, "evaluation")


def _run_job(parser: ArgumentParser, words: list[str], kind: JobKind) -> None:
    """Run a job without training over a SuperLink, or among sites in this process."""
    parser.add_argument(
        "app",
        help=f"The folder `app` that `perada deploy init` wrote for the {kind}; with --local, the {kind}'s recipe.",
    )
    _add_link(parser)
    parser.add_argument("--local", nargs="+", type=Path, default=[], help="Files of sites that run in this process.")
    parser.add_argument("--folder", type=Path, default=Path(f"{kind}s"), help="Folder for the result, with --local.")
    parser.add_argument(
        "--min-sites", type=int, default=3, help="Number of sites to wait for; at least that of the secure sum."
    )
    parser.add_argument(
        "--deadline", type=float, default=3600.0, metavar="SECONDS", help="Seconds to wait until sites have answered."
    )
    options = parser.parse_args(words)
    terms = Terms(min_sites=options.min_sites, deadline=options.deadline)
    if options.link:
        link = Link(options.link, options.root_certificates)
        sys.exit(run_app(Path(options.app), link, terms, Monitoring()))
    if not options.local:
        raise ValueError(f"the {kind} has no target; set --link, or sites on this machine (--local)")
    from perada.cli.deploy import run_local
    from perada.cli.deployed_jobs import JOB_SECTIONS, kind_of_recipe

    if kind_of_recipe(options.app) != kind:
        section = next(section for section, job_kind in JOB_SECTIONS.items() if job_kind == kind)
        raise ValueError(f"{options.app!r} has no section {section}; pass the recipe of a {kind} (docs/deploy.md)")
    run_local(options.app, options.local, options.folder, terms, Monitoring())


def runs(parser: ArgumentParser, words: list[str]) -> None:
    """Print the runs of a SuperLink with their status, or stop one."""
    _add_link(parser, required=True)
    parser.add_argument("--stop", type=str, default="", metavar="ID", help="Run to stop, by Flower's number.")
    options = parser.parse_args(words)
    if options.stop and not options.stop.isdecimal():
        raise ValueError(f"--stop={options.stop!r} is not the number of a run; `{parser.prog} --link …` prints them")
    sys.exit(list_runs(Link(options.link, options.root_certificates), options.stop))


def _json_logs_if_requested(monitoring: Monitoring) -> AbstractContextManager[None]:
    """Return a context in which logs, warnings and errors are lines of JSON, if requested."""
    if monitoring.log_format != "json":
        return nullcontext()
    from perada.cli.runs import USER_ERRORS

    return json_logs(sys.stdout, USER_ERRORS)


def serve(path: Path, transport: Transport, terms: Terms, state_folder: Path, monitoring: Monitoring) -> None:
    """Run a recipe over a transport. Called by the app at the server."""
    from perada.cli.deploy import run_rounds
    from perada.cli.runs import USER_ERRORS

    quiet_libraries()
    logging.getLogger("pytorch_lightning.utilities.rank_zero").setLevel(logging.WARNING)
    log = logging.getLogger("perada.deploy")
    log.setLevel(logging.INFO)
    in_json = monitoring.log_format == "json"
    # Flower shows the standard output to the user who started the run.
    log.addHandler(json_handler(sys.stdout) if in_json else text_handler(sys.stdout))
    # A library that adds a handler to the root logger would print each line a second time.
    log.propagate = False
    try:
        run_rounds(str(path), transport, state_folder, terms, monitoring)
    except USER_ERRORS as error:
        if in_json:
            log.error("%s", one_line(error))
        else:
            print(f"perada: error: {one_line(error)}", flush=True)
        # Flower prints a traceback of any error: it should be that of this line, and not of the cause.
        raise RuntimeError(one_line(error)) from None


def demo(parser: ArgumentParser, words: list[str]) -> None:
    """Run a federation of three sites on this machine, with TLS and authentication, and clean up."""
    parser.add_argument("--rounds", type=int, default=3, help="Communication rounds.")
    parser.add_argument("--secure-sums", action="store_true", help="Let the server see only sums over the sites.")
    options = parser.parse_args(words)
    check_integer("rounds", options.rounds)
    from perada.studies.deployment import run_demo

    sys.exit(run_demo(options.rounds, recipe_digest, secure_sums=options.secure_sums))
