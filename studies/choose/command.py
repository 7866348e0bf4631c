# SPDX-License-Identifier: Apache-2.0
"""The command: checks, the search, and the files that it leaves."""

import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveInt
from pytorch_lightning.accelerators import CPUAccelerator

from perada.algorithms.specs import class_path_of
from perada.lightning.trainer_setup import available_cores
from perada.results.report import unit_of
from perada.studies.choose.budget import CANDIDATES, SearchPlan, num_draws_for, parse_duration
from perada.studies.choose.candidates import (
    METHODS,
    PROX_STRENGTH,
    PULLED,
    SHARED_ONLY,
    WITH_PUBLIC_IMAGES,
    WITHOUT_PUBLIC_IMAGES,
    Candidate,
    cheapest_first,
    check_adapter_of_recipe,
    fitting_adapters,
    make_candidates,
    make_levels,
)
from perada.studies.choose.page import PAGE, ImageCounts, compared, write_search_page
from perada.studies.choose.recipe_file import format_recipe, recipe_words
from perada.studies.choose.search import MethodSearch, Search, SearchOptions, SearchState, name_pattern
from perada.studies.choose.summary import expected_score, goal_text, interval_text, row_of
from perada.studies.choose.trials import GOALS, HeldOutScores, lead
from perada.studies.compare.command import split_words
from perada.studies.compare.comparison import CRITERIA, MEAN
from perada.studies.compare.configured import ConfiguredRun, MakeCLI
from perada.studies.compare.entries import entry_of
from perada.studies.compare.grid import HOLD_OUT, VALIDATE
from perada.studies.compare.launcher import Launcher, add_launcher_options, read_launcher
from perada.studies.compare.plan import SELECTION_SCORES, Plan, arguments_of_algorithm
from perada.studies.compare.results import Results
from perada.studies.compare.running import NO_PROGRESS_BAR
from perada.system.files import check_output_folder
from perada.system.quiet import info_messages_disabled

RESULTS = "results.json"
STATE = "search.json"
JOBS = "jobs"
"""Folder of a cluster's jobs in that of the search."""
BEST = "best.yaml"
MOST_JOBS = 8
"""Most runs at once that are the default: each takes memory for its own copy of the images and of the network."""
BOTH = "--evaluation.prediction=both"


def main(parser: ArgumentParser, words: list[str], make_cli: MakeCLI) -> None:
    """Run ``perada choose``. The exit status is 1 if nothing could be chosen.

    Args:
        parser: Parser of the command.
        words: Words of the command line; options that the parser does not know are for ``perada fit``.
        make_cli: See :data:`~perada.studies.compare.configured.MakeCLI`.
    """
    _add_options(parser)
    split = split_words(words, parser)
    parsed = parser.parse_args(split.of_compare)
    overrides = [*split.of_fit, NO_PROGRESS_BAR]
    budget = parse_duration(parsed.budget)
    folder = parsed.output
    _check_folder(folder)
    launcher = read_launcher(parsed, parsed.jobs, folder / JOBS)
    if launcher.cluster is not None and launcher.cluster.array_parallelism is None:
        raise ValueError(
            "--launcher slurm needs --array_parallelism: how much fits into the budget depends on how many jobs run at "
            "once; choose a number that the cluster usually starts"
        )
    with info_messages_disabled(), warnings.catch_warnings():
        # A warning of every run would hide the progress.
        warnings.simplefilter("once")
        cli = make_cli(["--config", parsed.recipe, *overrides])
        _check_recipe(cli)
        if launcher.cluster is None:
            launcher = Launcher(parsed.jobs or _default_jobs(cli, parsed.threads))
        options = SearchOptions(
            recipe=parsed.recipe,
            goal=parsed.goal,
            budget=budget,
            seeds=tuple(dict.fromkeys(parsed.seeds)),
            jobs=launcher.jobs,
            threads=parsed.threads,
            anonymous=parsed.anonymous,
        )
        _search_and_write(make_cli, cli, options, launcher, folder, overrides)


def _default_jobs(cli: ConfiguredRun, threads: int) -> int:
    """Return how many runs the cores of this machine can do at once; one on a GPU, which each run can fill."""
    if not isinstance(cli.trainer.accelerator, CPUAccelerator):
        return 1
    return max(1, min(MOST_JOBS, available_cores() // threads))


def _search_and_write(
    make_cli: MakeCLI,
    cli: ConfiguredRun,
    options: SearchOptions,
    launcher: Launcher,
    folder: Path,
    overrides: Sequence[str],
) -> None:
    """Search, and write the files; also if the search is interrupted.

    Args:
        make_cli: See :data:`~perada.studies.compare.configured.MakeCLI`.
        cli: The recipe's run, which is checked.
        options: What is asked for.
        launcher: Where trials are run.
        folder: Folder of the search.
        overrides: Options of ``perada fit``.
    """
    results = Results(folder / RESULTS)
    fixed_options = {
        "recipe": options.recipe,
        "goal": options.goal,
        "seeds": list(options.seeds),
        "options": list(overrides),
        "anonymous": options.anonymous,
    }
    state = SearchState(folder / STATE, fixed_options)
    counts = _count_images(make_cli, cli, options, overrides)
    methods, reasons = _find_methods(make_cli, cli, options, overrides)
    plan = SearchPlan(
        methods=tuple(methods),
        num_candidates=CANDIDATES[0],
        num_draws=num_draws_for(counts.held_out),
        num_finalists=len(methods),
        seeds=options.seeds,
        rounds=cli.trainer.max_epochs or 0,
    )
    for method_search in methods.values():
        results.check({name: recipe.digest for name, recipe in method_search.plan.recipes.items()})
    folder.mkdir(parents=True, exist_ok=True)
    with launcher.runner(make_cli, options.threads, options.anonymous) as carry_out:
        search = Search(
            options=options,
            methods=methods,
            largest_plan=plan,
            results=results,
            search_state=state,
            carry_out=carry_out,
            names=cli.datamodule.client_names or (),
        )
        search.failed_methods |= reasons
        try:
            search.run()
        except (KeyboardInterrupt, SystemExit):
            _hand_over(make_cli, search, folder, counts, interrupted=True)
            raise
    _hand_over(make_cli, search, folder, counts, interrupted=False)
    if search.is_largest or options.anonymous:
        # The trials' checkpoints hold models and names of clients. With a larger budget, a search goes on from them.
        shutil.rmtree(folder / "trials", ignore_errors=True)


def _check_folder(folder: Path) -> None:
    """Raise if the folder of the search cannot be written, or has files of others."""
    check_output_folder("--output", folder)
    if not folder.is_dir() or (folder / STATE).is_file():
        return
    # A search that was killed before its first result has only submitted jobs.
    if any(path.name != JOBS for path in folder.iterdir()):
        raise FileExistsError(
            f"--output {str(folder)!r} has files but no search ({STATE}); name a folder that does not exist yet"
        )


def _check_recipe(cli: ConfiguredRun) -> None:
    """Raise a ValueError for a recipe for which nothing can be chosen."""
    loop = cli.loop
    if loop.privacy is not None or loop.client_privacy is not None:
        section = "privacy" if loop.privacy is not None else "client_privacy"
        raise ValueError(
            f"{section} is set: every trial would spend privacy of the same images, and choosing by held-out private "
            "images spends more, which no ledger counts; choose on public images or without this section "
            f"(--{section}=null) if those who own the images allow it, and add the section to the recipe that is chosen"
        )
    rounds = cli.trainer.max_epochs
    if rounds is None or rounds < 1:
        raise ValueError(f"trainer.max_epochs={rounds} sets no number of rounds; set it, for example to 30")
    # This reads the images.
    cli.datamodule.setup()
    if cli.datamodule.num_clients < 2:
        raise ValueError(
            "there is one client, so there is nothing to choose: a federation has at least two; check how the images "
            "name their clients with `perada data inspect`"
        )
    if not _test_sizes(cli):
        raise ValueError("there are no test images, without which no verdict is possible; see data.dataset.test_share")


def _count_images(
    make_cli: MakeCLI, cli: ConfiguredRun, options: SearchOptions, overrides: Sequence[str]
) -> ImageCounts:
    """Return the numbers of images; raises if clients cannot hold out images."""
    trial = make_cli(["--config", options.recipe, HOLD_OUT, *overrides, VALIDATE])
    trial.datamodule.setup()
    return ImageCounts(
        num_clients=cli.datamodule.num_clients,
        train=sum(cli.datamodule.train_sizes),
        held_out=sum(_test_sizes(trial)),
        test=sum(_test_sizes(cli)),
    )


def _test_sizes(cli: ConfiguredRun) -> Sequence[int]:
    """Return the numbers of the clients' test images, or of those that they hold out; empty if there are none."""
    test = cli.datamodule.checked.test
    return test.sizes if test is not None and any(test.sizes) else ()


def _find_methods(
    make_cli: MakeCLI, cli: ConfiguredRun, options: SearchOptions, overrides: Sequence[str]
) -> tuple[dict[str, MethodSearch], dict[str, str]]:
    """Return what is tried of each method that fits, and the reasons why others do not."""
    has_public_images = cli.datamodule.checked.public is not None
    methods: dict[str, MethodSearch] = {}
    reasons: dict[str, str] = {}
    for method in METHODS:
        if method in WITHOUT_PUBLIC_IMAGES and has_public_images:
            continue
        if method in WITH_PUBLIC_IMAGES and not has_public_images:
            if method == "feddf":
                reasons[method] = "there are no public images (data.public)"
            continue
        try:
            methods[method] = _prepare_method(make_cli, cli, method, options, overrides)
        except ValueError as error:
            reasons[method] = " ".join(str(error).split())
    if len(methods) < 2:
        raise ValueError(
            f"fewer than two methods fit: {'; '.join(f'{name}: {text}' for name, text in reasons.items())}"
        )
    return methods, reasons


def _prepare_method(
    make_cli: MakeCLI, cli: ConfiguredRun, method: str, options: SearchOptions, overrides: Sequence[str]
) -> MethodSearch:
    """Return what is tried of a method, whose settings all train the same images.

    Raises:
        ValueError: If the method does not fit the recipe.
    """
    compare_options = Namespace(  # type: ignore[no-untyped-call]  # jsonargparse's
        recipes=[options.recipe],
        algorithms=[method],
        paper=False,
        seeds=list(options.seeds),
        redivide=False,
        set=_keep_strength(cli, method),
        tune=[],
        tune_seeds=[],
        trials=None,
        sampler="tpe",
        choose_by=list(SELECTION_SCORES),
        variants=[],
        vary=[],
    )
    plan = Plan(make_cli, compare_options, [*overrides, BOTH])
    row = plan.rows[0]
    method_cli = make_cli(plan.job(row, 0, "run", {}).args)
    adapters = fitting_adapters(method_cli, cli.datamodule)
    candidates: list[Candidate] = make_candidates(method, method_cli, adapters, CANDIDATES[0])
    reason = ""
    try:
        check_adapter_of_recipe(method_cli, cli.datamodule)
    except ValueError as error:
        if not adapters:
            raise
        reason = " ".join(str(error).split())
        # Its first setting has the cheapest adapter that it can train.
        candidates[0] = Candidate(method, 0, cheapest_first(adapters)[0].point())
    levels = make_levels(method, method_cli, adapters, own_fits=not reason, drawn=candidates)
    for level in levels:
        candidates += [candidate for candidate in level.candidates if candidate.number >= len(candidates)]
    epochs = method_cli.loop.training.epochs_per_round
    return MethodSearch(plan, row, candidates, epochs, levels, why_other_adapter=reason)


def _keep_strength(cli: ConfiguredRun, method: str) -> list[str]:
    """Return words by which a method has λ of the recipe's algorithm, if both pull personal models to a shared one."""
    class_paths = [entry_of(name).class_path for name in PULLED]
    is_pulled = class_path_of(type(cli.loop.algorithm)) in class_paths
    strength = arguments_of_algorithm(cli).get("prox_strength")
    if method not in PULLED or not is_pulled or strength is None:
        return []
    return [f"{method}:{PROX_STRENGTH}={strength}"]


def _hand_over(make_cli: MakeCLI, search: Search, folder: Path, image_counts: ImageCounts, interrupted: bool) -> None:
    """Write the recipes and the page, and print the advice."""
    print()
    chosen = search.chosen
    if chosen is None:
        if not interrupted:
            raise ValueError("every setting of every method failed; the reasons are above, and in results.json")
        print("Nothing was chosen: the search had not scored a setting of every method.", file=sys.stderr)
        return
    _write_recipe(make_cli, search, folder / BEST, chosen)
    for scores in search.best_of_method.values():
        if scores.candidate in search.finalists:
            _write_recipe(make_cli, search, folder / "recipes" / f"{scores.candidate.method}.yaml", scores)
    shown = write_search_page(folder, search, image_counts, interrupted)
    print(f"{shown}\n\nRecipe: {folder / BEST}; run it with: perada fit --config {folder / BEST}")
    print(f"Page with everything that was tried, and a paragraph for an e-mail: {folder / PAGE}")


def _write_recipe(make_cli: MakeCLI, search: Search, path: Path, held_out: HeldOutScores) -> None:
    """Write the recipe of a setting."""
    method_search = search.methods[held_out.candidate.method]
    assert search.plan is not None
    rounds = search.plan.rounds
    job = method_search.final_job(held_out.candidate, search.options.seeds[0], rounds)
    words = recipe_words([word for word in job.args if word != NO_PROGRESS_BAR], held_out.way, min(5, rounds))
    text = format_recipe(make_cli(words), _format_header(search, held_out), _comment_options(search, held_out))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    names = [name for name in search.names if name_pattern(name).search(text)]
    if names and search.options.anonymous:
        warnings.warn(
            f"{str(path)!r} has the names of {len(names)} clients, or a path with them, since the recipe has; read it "
            "before you pass it on",
            stacklevel=2,
        )


def _format_header(search: Search, held_out: HeldOutScores) -> list[str]:
    """Return the comment at the top of a recipe."""
    method = METHODS[held_out.candidate.method]
    lines = [
        f"{held_out.candidate.method}, chosen for {search.options.recipe} by `perada choose`: {method.sentence}",
    ]
    if held_out is not search.chosen:
        name = held_out.candidate.method
        lines[0] = f"{name}, tuned for {search.options.recipe} by `perada choose`: {method.sentence}"
    comparison = compared(search.results.records)
    row = None if comparison is None else row_of(comparison, held_out.candidate.method, held_out.way)
    if comparison is not None and row is not None:
        for criterion in comparison.criteria:
            interval = expected_score(comparison, row, criterion)
            lines.append(f"Expected on {CRITERIA[criterion]}: {interval_text(comparison, interval)}.")
        seeds = ", ".join(map(str, comparison.seeds))
        scored = f"means over the seeds {seeds}" if len(comparison.seeds) > 1 else f"of seed {seeds}"
        lines.append(f"These scores are {scored}, on the test images.")
    else:
        lines.append("Chosen on held-out images, and not yet scored on test images.")
    lines.append("Paths are relative to the folder in which the search was started.")
    return lines


def _comment_options(search: Search, held_out: HeldOutScores) -> dict[str, str]:
    """Return the comments on the options that were chosen, and on those that were kept."""
    plan = search.plan
    assert plan is not None
    unit = unit_of(search.results.records[0])
    others = [other for other in search.best_of_method.values() if other is not held_out]
    reason = f"best of {len(plan.methods)} methods on held-out images, by {goal_text(search.options.goal)}"
    if held_out is not search.chosen:
        reason = "one of the methods that were tried"
    elif others:
        second = max(others, key=lambda other: other.merit)
        difference = lead(held_out, second)
        reason += (
            f": {unit.text(held_out.mean)}, {unit.number(difference.mean)} ± {unit.number(difference.standard_error)} "
            f"(standard error) ahead of {second.candidate.method}"
        )
    if plan.num_levels:
        settings = _describe_levels(search, held_out)
    elif plan.num_candidates == 1:
        settings = "as in the original recipe: there was no time to try others"
    else:
        settings = f"best of {plan.num_candidates} settings of this method on held-out images"
    if plan.num_candidates > 1 and not plan.num_levels and not held_out.candidate.point:
        settings += ": that of the original recipe"
    rounds_text = f"rounds, {_origin_of('trainer.max_epochs', search)}"
    if plan.rounds < search.largest_plan.rounds:
        rounds_text = f"rounds that fit into the budget; the original recipe has {search.largest_plan.rounds}"
    comments = {
        "seed_everything": "seed of training; any other is as good",
        "trainer.max_epochs": rounds_text,
        "model.backbone": f"the network, {_origin_of('model.backbone', search)}",
        "model.adapter": f"what is trained; {settings}",
        "federated.algorithm": reason,
        "training.lr_local": f"for the adapter that is sent to the server; {settings}",
        "training.lr_personal": f"for the adapter that stays with the client; {settings}",
        "evaluation.prediction": _explain_prediction(held_out),
        "data": "images, clients and batches, as in the original recipe",
        "data.public_fraction": "the server's share; real sites need data.public instead (docs/deploy.md)",
    }
    if "federated.algorithm.prox_strength" in held_out.candidate.point:
        comments["federated.algorithm.prox_strength"] = f"λ, the pull to the shared model; {settings}"
    return comments


def _describe_levels(search: Search, held_out: HeldOutScores) -> str:
    """Return which adapters were tried of a method, for a comment."""
    levels = search.methods[held_out.candidate.method].levels
    tried = search.tried_levels(held_out.candidate.method)
    text = f"best on held-out images of {tried[0].title}"
    if len(tried) > 1:
        text = f"best on held-out images of {', '.join(level.title for level in tried)}"
    if len(tried) < len(levels):
        text += "; there was no time for dearer adapters"
    return text


def _origin_of(option: str, search: Search) -> str:
    """Return where an option that is not chosen comes from."""
    for word in search.state.fixed_options["options"]:
        if word.startswith(f"--{option}"):
            return "as on the command line"
    return "as in the original recipe"


def _explain_prediction(held_out: HeldOutScores) -> str:
    """Return why a recipe predicts as it does."""
    if held_out.candidate.method in SHARED_ONLY:
        return "the clients of this method have no models of their own, and predict with the shared one"
    if held_out.way == "both":
        return (
            "the client's own model for images like its own, with the shared one for others: its own model for all "
            "images is not clearly better on held-out ones"
        )
    return "the client's own model for all images: at least as good on held-out images as both models"


def _add_options(parser: ArgumentParser) -> None:
    """Add the options of ``perada choose``."""
    parser.add_argument("recipe", metavar="RECIPE", help="Recipe or configuration file, such as that of `perada init`.")
    parser.add_argument(
        "--budget",
        type=str,
        default="30m",
        metavar="TIME",
        help="Time for everything: 90s, 30m or 2h. What fits into it is measured and printed first.",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("choice"),
        metavar="FOLDER",
        help="Folder for best.yaml, choice.md and the results. The same command goes on there.",
    )
    parser.add_argument(
        "--goal",
        choices=list(GOALS),
        default=MEAN,
        help=(
            "What the choice shall be good at: own, each client's own images; all, those of all clients; or mean, the "
            "mean of both scores."
        ),
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0, 1, 2], help="Seeds of the last rung, which gives the verdict."
    )
    parser.add_argument(
        "--jobs",
        type=PositiveInt,
        help=(
            "Number of concurrent runs, each in its own process. By default one on a GPU; on a CPU as many as its "
            f"cores allow with --threads each, at most {MOST_JOBS}."
        ),
    )
    parser.add_argument("--threads", type=PositiveInt, default=1, help="Threads per run.")
    add_launcher_options(parser)
    parser.add_argument(
        "--anonymous", action="store_true", help="Write and print numbers instead of the names of clients."
    )
