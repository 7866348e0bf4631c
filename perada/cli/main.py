# SPDX-License-Identifier: Apache-2.0
"""The tree of commands. A command is imported when it is run, so that the program starts quickly."""

import os
import signal
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from jsonargparse import ArgumentParser

from perada.cli.early_checks import check_early
from perada.cli.help_format import new_parser
from perada.cli.messages import one_line, quiet_libraries, short_warnings
from perada.cli.options import check_recipe, check_sections, command_hint, help_text, reject_unknown_options
from perada.cli.parser_errors import of_options
from perada.cli.recipes import (
    descriptions,
    find_recipe,
    is_comparison,
    overview,
    recipe_files,
    recipe_names,
    recipe_text,
)
from perada.cli.streams import guard_streams, restart_in_utf8_mode
from perada.system.files import check_output_folder, writing
from perada.system.garbage import collection_paused, objects_frozen
from perada.system.interruption import Terminated, received_signal, watch_signals

if TYPE_CHECKING:
    from perada.studies.report.records import RunRecord

Tree = dict[str, tuple["str | Tree", str]]
"""For each name, a command as ``module:function`` of perada, or a tree of commands, and one line of help."""

STUDIES: Tree = {
    "fed-ensemble": ("studies.fed_ensemble:main", "Bias and variance of Fed-ensemble's toy regression by modes."),
    "fed-ensemble-plane": ("studies.fed_ensemble_plane:main", "Training loss on the plane through three modes."),
    "local-gd": ("studies.local_gd:main", "Limits of local gradient descent, for linear models and a head."),
}
CLIENTS: Tree = {
    "add": ("cli.inference:add_client", "Train a model for a new client; the models of the others are unchanged."),
    "remove": ("cli.inference:remove_client", "Remove a client's model; prints what the removal does not undo."),
}
DATA: Tree = {
    "inspect": ("cli.data:inspect", "Print how images are interpreted, and what is wrong with them."),
    "survey": (
        "cli.survey:survey_clients",
        "Count the images of each client, and say where clients do not fit together.",
    ),
}
KEYS: Tree = {
    "server": ("cli.flower:keys_server", "Write the server's certificate, and the one with which sites verify it."),
    "site": ("cli.flower:keys_site", "Write a site's keys: one for the server, one for other sites."),
    "identity": ("cli.flower:keys_identity", "Write a key for secure sums only: a site's, or an authority's."),
    "sign": ("cli.flower:keys_sign", "Sign a list of sites as its authority."),
}
DEPLOY: Tree = {
    "init": ("cli.flower:init_app", "Write the Flower app of a recipe, unit files and a README."),
    "keys": (KEYS, "Write keys and certificates."),
    "check": ("cli.deploy:check_deployment", "Dry-run a site's recipes; nothing is sent."),
    "site": ("cli.deploy:site", "Serve a site: train its approved recipes on its images."),
    "node": ("cli.flower:node", "Test a site's connection and run its SuperNode."),
    "run": ("cli.flower:run", "Start an app on a SuperLink and follow it, or run a recipe with local sites."),
    "survey": (
        "cli.flower:run_survey",
        "Have sites count their images before training, and say where they do not fit.",
    ),
    "evaluate": (
        "cli.flower:run_evaluation",
        "Have sites score existing models on their test images, without training.",
    ),
    "runs": ("cli.flower:runs", "List the runs of a SuperLink, or stop one."),
    "status": ("cli.deploy_status:status", "Print the progress of a deployed run, or what a site has trained."),
    "audit": ("cli.audit:audit", "Print what left a site, and check that its log is intact."),
    "export": ("cli.deploy:export_deployment", "Write the adapter of a site, or of a deployed run, as a PEFT folder."),
    "demo": ("cli.flower:demo", "Run three sites on this machine, with TLS and authentication."),
}
COMMANDS: Tree = {
    "fit": ("cli.main:run_subcommand", "Train, for example: perada fit --config quickstart."),
    "test": ("cli.main:run_subcommand", "Score the models of a checkpoint, also on shifted test sets."),
    "evaluate": (
        "cli.evaluate:evaluate_models",
        "Score runs and weights at every client, with intervals, without training.",
    ),
    "predict": ("cli.main:predict_with_run", "Predict your own images with a run, or the test images of a recipe."),
    "check": ("cli.runs:print_problems", "Report every error and warning that a run would raise, without training."),
    "doctor": ("cli.doctor:doctor", "Print versions and facts about the machine for a bug report, and check them."),
    "ls": ("cli.main:ls", "List the shipped recipes, or describe some of them."),
    "cp": ("cli.main:cp", "Copy a shipped recipe for editing."),
    "init": ("cli.init:init", "Ask five questions and write a recipe."),
    "completion": ("cli.completion:completion", "Print a shell script that completes commands and options."),
    "schema": ("cli.parser:schema", "Print a JSON schema of recipes, for editors."),
    "compare": (
        "cli.runs:compare",
        "Run recipes or algorithms, and print one table; accepts options of `perada fit` too.",
    ),
    "choose": (
        "cli.runs:choose",
        "Find the method and settings that suit your images, within a budget of time; accepts options of `perada fit`.",
    ),
    "export": ("cli.inference:export", "Write the adapters of a run as PEFT folders."),
    "push": ("cli.inference:push", "Upload one adapter of a saved run to the Hugging Face Hub."),
    "clients": (CLIENTS, "Add a client to a finished run, or remove one."),
    "report": ("cli.main:report", "Print the metrics of runs as tables, or write a report page."),
    "pretrain": ("studies.pretrain:main", "Train a small backbone on small grey images."),
    "deploy": (DEPLOY, "Run a recipe across real sites."),
    "data": (DATA, "Inspect images before training."),
    "study": (STUDIES, "Repeat a small experiment of a paper."),
}
"""All commands. A command is called with its parser, to which it adds its options, and with its words."""


_RUN = "a run: a folder written by `perada fit`, `perada export` or Run.save, or a checkpoint in one"
_SITE = "the site's file, such as site.yaml"
EXISTING = {
    "export": _RUN,
    "push": _RUN,
    "clients add": _RUN,
    "clients remove": _RUN,
    "predict": _RUN,
    "deploy site": _SITE,
    "deploy check": _SITE,
    "deploy status": f"{_SITE}, or the folder of a deployed run",
    "deploy audit": f"{_SITE}, or the site's state folder",
}
"""Description of the path that must exist, for commands whose first word is one."""


SIGPIPE_STATUS = 128 + 13
"""Exit status of shells for a program whose output is no longer read. Windows has no SIGPIPE."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the program.

    Args:
        args: Words after ``perada``; by default those of the command line.
    """
    words = sys.argv[1:] if args is None else list(args)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if words in (["--version"], ["version"]):
        from importlib.metadata import version

        from perada.cli.doctor import versions

        print(f"perada {version('perada')}\n{versions()}")
        return
    description = "Personalized, parameter-efficient federated fine-tuning of pretrained vision models."
    _run_command(words, COMMANDS, description, "perada")


def _run_command(words: list[str], entry: str | Tree, description: str, prog: str) -> None:
    """Run the command that the words begin with, or print the available commands.

    Args:
        words: Words that follow those of the entry.
        entry: Command or tree of commands.
        description: One line of help.
        prog: The words of the entry, with the program's name.
    """
    parser = new_parser(prog, description)
    if words == ["help"] and not Path("help").exists():
        words = ["--help"]
    if isinstance(entry, str):
        command = prog.removeprefix("perada ")
        stored_help = help_text(command, words)
        if stored_help is not None:
            print(stored_help)
            raise SystemExit(0)
        _check_before_import(command, words)
        module, _, function = entry.partition(":")
        with collection_paused():
            run_command = getattr(import_module(f"perada.{module}"), function)
        try:
            with objects_frozen():
                run_command(parser, words)
        except ArgumentError as error:
            raise ArgumentError(None, of_options(str(error), parser)) from error
    elif words and words[0] in entry:
        below, line = entry[words[0]]
        _run_command(words[1:], below, line, f"{prog} {words[0]}")
    elif words and not words[0].startswith("-"):
        proposal = command_hint(words[0], [*entry, "help", "version"] if entry is COMMANDS else entry, prog)
        raise ValueError(f"there is no command {words[0]!r}; {proposal}")
    else:
        text = f"`{prog.replace('perada', 'perada help')} COMMAND` shows the options of a command."
        commands = parser.add_subcommands(required=False, title="commands", metavar="COMMAND", description=text)
        for name, (_, line) in entry.items():
            commands.add_subcommand(name, ArgumentParser(), help=line)
        try:
            parser.parse_args(words)
        except ArgumentError as error:
            raise ArgumentError(None, f"{error}; `{prog} --help` lists the commands") from error
        parser.print_help()


def _check_before_import(command: str, words: list[str]) -> None:
    """Reject unknown options and missing or damaged files before anything slow is imported."""
    reject_unknown_options(command, words)
    first_words = list(takewhile(lambda word: not word.startswith("-"), words))
    if command in EXISTING and first_words and not Path(first_words[0]).exists():
        raise FileNotFoundError(f"{first_words[0]!r} does not exist; pass {EXISTING[command]}")
    check_early(command, words)
    if command in ("compare", "choose", "check"):
        for word in (*first_words, *recipe_names(words)):
            for path in find_recipe(word):
                check_sections(path)


def run_subcommand(parser: ArgumentParser, words: list[str]) -> None:
    """Run a subcommand of LightningCLI, whose parser reads the words."""
    if not words:
        raise ValueError(f"no recipe; use {parser.prog} --config RECIPE, with one of those that `perada ls` lists")
    if not words[0].startswith("-"):
        folder = Path(words[0]) / "config.yaml"
        recipe = f"{folder} --ckpt_path {folder.parent}/checkpoints/last.ckpt" if folder.is_file() else words[0]
        raise ValueError(f"{words[0]!r} is not an option; use {parser.prog} --config {recipe}")
    for name in recipe_names(words):
        # A recipe that does not exist is rejected before anything slow is imported.
        for path in recipe_files(name):
            check_recipe(path)
    with collection_paused():
        from perada.cli.runs import PeradaCLI

    with objects_frozen():
        PeradaCLI([parser.prog.split()[-1], *words], command=[*parser.prog.split(), *words])


def predict_with_run(parser: ArgumentParser, words: list[str]) -> None:
    """Predict images with a run named first or, through LightningCLI, the test images of a recipe."""
    needs_help = not words or {"-h", "--help"} & set(words)
    names_run = words and not words[0].startswith("-")
    if needs_help or names_run or any(word.startswith("--images") for word in words):
        with collection_paused():
            from perada.cli.inference import predict as predict_images

        predict_images(parser, words)
    else:
        run_subcommand(parser, words)


def ls(parser: ArgumentParser, words: list[str]) -> None:
    """Print an overview of the shipped recipes, or the full descriptions of some."""
    parser.add_argument(
        "prefix",
        nargs="?",
        metavar="PREFIX",
        help="data, method, privacy or paper, or the beginning of names, such as cifar10 or cifar10_vit/ditto: "
        "describe only these recipes.",
    )
    prefix = parser.parse_args(words).prefix
    print(overview() if prefix is None else descriptions(prefix))


def cp(parser: ArgumentParser, words: list[str]) -> None:
    """Copy a recipe."""
    parser.add_argument("name", help="Name of a recipe, as listed by `perada ls`.")
    parser.add_argument("destination", help="File or folder to copy it to; a new folder ends in /.")
    parser.add_argument("--force", action="store_true", help="Overwrite an existing file.")
    options = parser.parse_args(words)
    text = recipe_text(options.name)
    target = Path(options.destination)
    # A path ends in "/" only if a folder is meant, which need not exist yet.
    if target.is_dir() or options.destination.endswith("/"):
        target = target / Path(options.name).with_suffix(".yaml").name
    check_output_folder("destination", target.parent)
    if target.exists() and not options.force:
        raise FileExistsError(f"{str(target)!r} already exists; choose a different destination or add --force")
    target.parent.mkdir(parents=True, exist_ok=True)
    with writing(target):
        target.write_text(text, encoding="utf-8")
    use = "compare" if is_comparison(target) else "fit --config"
    print(f"Copied {options.name} to {target}; run it with: perada {use} {target}")


def report(parser: ArgumentParser, words: list[str]) -> None:
    """Print the rounds of runs, or write a report page."""
    _add_report_options(parser)
    options = parser.parse_args(words)
    output: Path | None = options.output
    if output is None and (options.open or options.watch):
        first_run: Path = options.runs[0]
        if first_run.is_file():
            raise ValueError(f"{str(first_run)!r} is a file; add --output, the folder of the page")
        output = first_run / "report"
    _check_pictures(options.pictures, output, watched=options.watch)
    _check_baselines(options.baselines, options.runs, output, watched=options.watch)
    if output is None:
        _print_tables(options.runs)
        return
    from perada.studies.report.page import check_page, with_pictures, write_page
    from perada.studies.report.records import SCORES_LEFT_OUT, lack_scores, read_records
    from perada.studies.report.watch import check_watched, watch, write_waiting_page

    check_page(output)
    page = output / "index.html"
    if options.watch:
        for path in options.runs:
            check_watched(path)
        print(f"Page: {page}", flush=True)
        if options.open:
            write_waiting_page(output)
            _open_in_browser(page)
        watch(options.runs, output, options.scores)
        return
    records = [record for path in options.runs for record in read_records(path)]
    if options.pictures is not None:
        records = [with_pictures(records, options.scores, options.pictures)]
    if len(records) == 1:
        records = [_with_baselines(records[0], options.baselines, options.scores)]
    if lack_scores(records, options.scores):
        print(SCORES_LEFT_OUT)
    # Drawing takes seconds, and the path is known before.
    print(f"Page: {page}", flush=True)
    write_page(output, records, options.scores)
    if options.open:
        _open_in_browser(page)


def _print_tables(runs: Sequence[Path]) -> None:
    """Print runs and comparisons as tables, with their paths if there are several."""
    blocks = []
    for path in runs:
        if len(runs) > 1:
            blocks.append(str(path))
        blocks.append(_format_tables(path))
    print("\n\n".join(blocks))


def _add_report_options(parser: ArgumentParser) -> None:
    """Add the options of ``perada report``."""
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="Run folders, such as lightning_logs/version_0, folders of Run.save, or JSON files of `perada compare`.",
    )
    parser.add_argument("--output", type=Path, help="Folder for a page, index.html, with its figures and tables.")
    parser.add_argument(
        "--open",
        action="store_true",
        help="Open the page in a browser. Without --output it is written to the folder report of the first run.",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="Follow runs that are under way: update the page after each round until they are finished or Ctrl-C is "
        "pressed. The open page reloads itself. Without --output it is written to the folder report of the first run.",
    )
    parser.add_argument(
        "--scores",
        type=bool,
        default=None,
        help="Include scores and losses in the page. By default only for runs without privacy, since privacy "
        "accounting does not cover them.",
    )
    parser.add_argument(
        "--pictures",
        type=Path,
        help="Folder of `perada predict --config`: the page shows some test images with their true and predicted "
        "classes or masks, test images that look foreign to their clients, and public images. By default it shows no "
        "images.",
    )
    parser.add_argument(
        "--baselines",
        nargs="?",
        const=TRAIN_BASELINES,
        metavar="FILE",
        help="Compare the run with each client training alone, and with one shared model (FedAvg), from a JSON file of "
        "`perada compare`. Without FILE both are trained with the run's configuration and seed, unless the run's "
        "folder has them already.",
    )


def _check_pictures(pictures: Path | None, output: Path | None, *, watched: bool) -> None:
    """Raise a ValueError if there are pictures, but no page of a finished run to show them on."""
    if pictures is None:
        return
    if output is None:
        raise ValueError("--pictures needs --output, the folder of the page")
    if watched:
        raise ValueError(
            "--pictures cannot be combined with --watch, since masks are predicted after the last round; "
            "leave --watch out"
        )


TRAIN_BASELINES = "train"
"""Value of ``--baselines`` without a file."""


def _check_baselines(baselines: str | None, runs: Sequence[Path], output: Path | None, *, watched: bool) -> None:
    """Raise a ValueError if there are baselines, but no page of a single finished run to show them on."""
    if baselines is None:
        return
    if output is None:
        raise ValueError("--baselines needs --output, the folder of the page")
    if watched:
        raise ValueError(
            "--baselines cannot be combined with --watch, since they are compared after the last round; "
            "leave --watch out"
        )
    if len(runs) != 1 or not runs[0].is_dir():
        raise ValueError("--baselines needs the folder of a single run; to show several runs, name their folders")


def _with_baselines(run_record: "RunRecord", baselines: str | None, requested: bool | None) -> "RunRecord":
    """Return the record of a run with its baselines, which are trained if ``--baselines`` names no file.

    Without ``--baselines`` they are those that were trained before, if there are any.
    """
    from perada.studies.report.baselines import ALGORITHMS, BASELINES_FILE, read_baselines

    trained_file = run_record.folder / BASELINES_FILE
    if baselines is None and not trained_file.is_file():
        return run_record
    if run_record.private and not requested:
        if baselines is None:
            return run_record
        raise ValueError(
            "--baselines compares scores, but the run is private and its ε does not cover them; add --scores=true, or "
            "leave --baselines out"
        )
    if not run_record.scores_of_clients:
        raise ValueError("--baselines needs a run with scores of its clients, and this one has none; let it finish")
    file = trained_file
    if baselines == TRAIN_BASELINES:
        config = run_record.folder / "config.yaml"
        if not config.is_file():
            raise ValueError(
                f"--baselines needs {str(config)!r} to train with, which does not exist; pass a file of "
                "`perada compare --output`"
            )
        compare_words = [
            str(config),
            "--algorithms",
            *ALGORITHMS,
            "--seeds",
            str(run_record.seed),
            "--output",
            str(file),
        ]
        main(["compare", *compare_words])  # repeats no run that the file has
    elif baselines is not None:
        file = Path(baselines)
    return replace(run_record, baselines=read_baselines(file, run_record))


def _open_in_browser(page: Path) -> None:
    """Open a page in the default browser."""
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        print("No browser could be started; open the page yourself.")


def _format_tables(path: Path) -> str:
    """Format a run or a comparison as tables."""
    if path.is_dir() or not path.exists():
        from perada.studies.report.records import run_report

        return run_report(path)
    from perada.studies.compare.results import Results
    from perada.studies.compare.tables import curve_tables, summary

    try:
        records = Results(path).records
        tables = [curve_tables(records), summary(records)]
        return "\n\n".join(text for text in tables if text)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{str(path)!r} is not a file of `perada compare` ({error!r}); choose a different file"
        ) from error


def entry_point() -> None:
    """Run the ``perada`` program, which prints errors and warnings as one line each.

    With ``PERADA_DEBUG=1`` tracebacks are printed. A run that is ended by Ctrl-C or SIGTERM prints how to resume it,
    and exits with the status of shells for these signals, 130 or 143. A run whose output cannot be written is finished
    all the same. If the program that reads the output ended first, as in ``perada ls | head``, the exit status is that
    of shells for SIGPIPE, 141; after another error, such as a full disk, it is 1.
    """
    restart_in_utf8_mode()
    streams = guard_streams()
    status: int | str | None = None
    try:
        _run_program()
    except SystemExit as end:
        status = end.code
    streams.flush()
    if not status and streams.pipe_was_closed:
        status = SIGPIPE_STATUS
    if not status and streams.output_error is not None:
        reason = streams.output_error.strerror
        status = f"perada: error: standard output cannot be written: {reason}; redirect it to another file"
    if status:
        sys.exit(status)


def _run_program() -> None:
    """Run the command, and end with a line for an error or a signal."""
    quiet_libraries()
    if not os.environ.get("PERADA_DEBUG"):
        short_warnings()
    if sys.argv[1:2] != ["deploy"]:  # its services have their own handlers
        watch_signals(terminate=True)
    try:
        main()
    except (KeyboardInterrupt, SystemExit) as end:
        # Lightning 2.6 raises a SystemExit for both signals, of its own class after SIGTERM.
        terminated = isinstance(end, Terminated) or type(end).__name__ == "SIGTERMException"
        interrupted = KeyboardInterrupt in (type(end), type(end.__context__))
        if terminated:
            _end_by(signal.SIGTERM)
        elif interrupted or received_signal() is not None:
            _end_by(received_signal() or signal.SIGINT)
        raise
    except Exception as error:
        # A signal to all processes of a run also ends loader workers, which is no error of the run.
        ended_by = received_signal(error)
        if ended_by is not None:
            _end_by(ended_by)
        # The class is compared by name, since an import of Lightning would take seconds.
        is_lightnings = type(error).__name__ == "MisconfigurationException"
        is_user_error = is_lightnings or isinstance(
            error, ValueError | TypeError | OSError | ImportError | ArgumentError
        )
        if os.environ.get("PERADA_DEBUG") or not is_user_error:
            raise
        sys.exit(f"perada: error: {one_line(error)}")


def _end_by(signum: signal.Signals) -> NoReturn:
    """Print how to resume, and exit with the shells' status for a program ended by a signal."""
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)
    cause = "terminated" if signum == signal.SIGTERM else "interrupted"
    remedy = "--ckpt_path last after the last finished round" if sys.argv[1:2] == ["fit"] else "the same command"
    print(f"perada: {cause}; resume with {remedy}", file=sys.stderr)
    sys.exit(128 + signum)
