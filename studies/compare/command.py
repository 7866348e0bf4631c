# SPDX-License-Identifier: Apache-2.0
"""`perada compare`: the grid, then the runs of the table."""

import sys
import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt
from tqdm import tqdm

from perada.results.report import unit_of
from perada.studies.compare.comparison import Comparison, NotComparableError
from perada.studies.compare.configured import MakeCLI
from perada.studies.compare.figures import draw_figures, save_figure
from perada.studies.compare.grid import Observation, Point, Sampler, has_range, inside, points, propose
from perada.studies.compare.launcher import add_launcher_options, read_launcher
from perada.studies.compare.plan import SELECTION_SCORES, Job, Plan, Row, words
from perada.studies.compare.results import NO_POINT, GridTrial, Record, Results, choose_trial, mean_score, score_text
from perada.studies.compare.running import CarryOut, Result, RunTask
from perada.studies.compare.tables import curve_tables, grid_table, summary
from perada.studies.compare.verdict import verdict
from perada.studies.drawing import check_drawing
from perada.system.files import check_output_file, check_output_folder
from perada.system.quiet import info_messages_disabled

REPEATABLE_OPTIONS = ("--set", "--tune", "--variants", "--vary")


class ComparisonRunner:
    """Executes the runs of a plan that are missing in the file of results.

    Args:
        plan: The runs.
        results: Results of earlier commands; each new result is added.
        carry_out: See :func:`perada.studies.compare.running.task_runner`.
        jobs: Runs at once.
    """

    def __init__(self, plan: Plan, results: Results, carry_out: CarryOut, jobs: int) -> None:
        self.plan = plan
        self.results = results
        self.carry_out = carry_out
        self.jobs = jobs
        self.started_at = time.monotonic()
        self.num_started = 0
        self.num_failed = 0
        self.num_runs = 0
        for row in plan.rows:
            self.num_runs += plan.count(row.algorithm) * len(plan.tune_seeds) + len(plan.seeds)

    def run(self) -> int:
        """Run the grid and the table, and return how many runs failed."""
        tuning_jobs = self._run_grid()
        chosen_points = self._choose_points(tuning_jobs)
        final_jobs = []
        for seed in self.plan.seeds:
            for row, point in chosen_points.items():
                final_jobs.append(self.plan.job(row, seed, "run", point))
        self._run_jobs(final_jobs)
        self.results.arrange([*_all_jobs(tuning_jobs), *final_jobs])
        return self.num_failed

    def _run_grid(self) -> dict[Row, list[Job]]:
        """Run the grid with each of its seeds, and return the runs of each row."""
        plan = self.plan
        jobs_of_row: dict[Row, list[Job]] = {}
        for row in plan.rows:
            jobs_of_row[row] = []
            for point in points(plan.grids[row.algorithm]):
                jobs_of_row[row] += self._jobs_of_trial(row, point)
        self._run_jobs(_all_jobs(jobs_of_row))

        # A trial of a range depends on those before it, so the rows have one trial each at a time.
        rows_with_range = [row for row in plan.rows if has_range(plan.grids[row.algorithm])]
        for number in range(plan.trials):
            next_jobs = []
            for row in rows_with_range:
                point = self._next_point(row, number, jobs_of_row[row])
                jobs_of_trial = self._jobs_of_trial(row, point)
                jobs_of_row[row] += jobs_of_trial
                next_jobs += jobs_of_trial
            self._run_jobs(next_jobs)
        return jobs_of_row

    def _jobs_of_trial(self, row: Row, point: Point) -> list[Job]:
        """Return the runs that try a point of the grid: one with each seed."""
        return [self.plan.job(row, seed, "tune", point) for seed in self.plan.tune_seeds]

    def _next_point(self, row: Row, number: int, earlier_jobs: list[Job]) -> Point:
        """Return what the next trial of a row tries: a point from the file of results, or a new one."""
        seed = self.plan.tune_seeds[0]
        grid = self.plan.grids[row.algorithm]
        earlier_points = [job.point for job in earlier_jobs]
        for record in self.results.records:
            if record["stage"] == "tune" and inside(grid, record["point"]):
                job = self.plan.job(row, seed, "tune", record["point"])
                if job.args == record["args"] and job.point not in earlier_points:
                    return job.point
        observations = []
        for trial in self._trials_of_row(earlier_jobs):
            observations.append(Observation(trial.point, mean_score(trial.records)))
        return propose(grid, observations, number, self.plan.options.sampler, seed)

    def _trials_of_row(self, jobs: Sequence[Job]) -> list[GridTrial]:
        """Return the trials of a row with their results, in the order of its runs."""
        num_seeds = len(self.plan.tune_seeds)
        trials = []
        for start in range(0, len(jobs), num_seeds):
            jobs_of_trial = jobs[start : start + num_seeds]
            records = [self.results.find(job) for job in jobs_of_trial]
            trials.append(GridTrial(jobs_of_trial[0].point, records))
        return trials

    def _choose_points(self, jobs_of_row: dict[Row, list[Job]]) -> dict[Row, Point]:
        """Return the best point of each row, an empty one without a grid; a row whose trials all failed is left out."""
        chosen_points: dict[Row, Point] = {}
        for row, jobs in jobs_of_row.items():
            if not jobs:
                chosen_points[row] = {}
                continue
            best = choose_trial(self._trials_of_row(jobs))
            if best is None:
                self.num_runs -= len(self.plan.seeds)
                self.num_failed += 1
                print(f"{jobs[0].label}: {NO_POINT}", file=sys.stderr)
                continue
            chosen_points[row] = best.point
            values = " ".join(words(best.point))
            records = [record for record in best.records if record is not None]
            unit = unit_of(records[0]).symbol
            print(f"{jobs[0].label}: {values} chosen, validation score {score_text(records)}{unit}")
        return chosen_points

    def _run_jobs(self, jobs: Iterable[Job]) -> None:
        """Execute the runs without results, and write each result when it is available."""
        pending = []
        for job in jobs:
            record = self.results.find(job)
            if record is None:
                pending.append(job)
            else:
                record |= vars(job)  # its label or options may differ from those of the earlier command
                if self.plan.options.anonymous:
                    record["client_names"] = None
                self.num_started += 1
                self._count_failed_outputs(job, record)
        jobs_with_start = self._jobs_with_start(pending)
        if self.jobs > 1:
            # Jobs are sorted by seed, so that a comparison that is cut off has some of all rows. Within a seed the
            # longest first, so that no process has nothing to do at the end.
            seeds = [*self.plan.tune_seeds, *self.plan.seeds]
            pending.sort(key=lambda job: (seeds.index(job.seed), -self.results.seconds(job.label)))
        tasks = [RunTask(job.args, job in jobs_with_start, recipe_digest=job.digest) for job in pending]
        for number, result in self.carry_out(tasks):
            if result is None:
                print(f"--- {self._count_progress(pending[number])}", flush=True)
            else:
                self._record_result(pending[number], result)

    def _jobs_with_start(self, pending: Sequence[Job]) -> list[Job]:
        """Return the jobs that also score the initial model: the first of each recipe, varied value and seed."""
        first_jobs: dict[Hashable, Job] = {}
        for job in pending:
            if job.stage == "run":
                first_jobs.setdefault((job.recipe, *job.varied.items(), job.seed), job)
        return [job for job in first_jobs.values() if not self.results.has_start(job)]

    def _record_result(self, job: Job, result: Result) -> None:
        """Add the result of a run."""
        if "failed" in result:
            self.num_failed += 1
            print(f"{job} failed: {result['failed']}", file=sys.stderr, flush=True)
        if "start" in result:
            start = {"stage": "start", "label": self.plan.start_label(job.recipe), "point": {}}
            self.results.add(vars(job) | start | result["start"])
        self._count_failed_outputs(job, result.get("run", {}))
        resources = {"seconds": result["seconds"], "threads": self.plan.options.threads}
        self.results.add(vars(job) | resources | result.get("run", result))

    def _count_failed_outputs(self, job: Job, record: Record) -> None:
        """Count a run of the table as failed if outputs of its models are NaN or infinite. It stays in the table.

        In a grid such a run is an expected result: the point is not chosen.
        """
        if job.stage == "run" and "failed_outputs" in record:
            self.num_failed += 1
            print(f"{job}: {record['failed_outputs']}", file=sys.stderr, flush=True)

    def _count_progress(self, job: Job) -> str:
        """Count a starting run, and return its number, the number of runs, and the elapsed and remaining time."""
        num_remaining = self.num_runs - self.num_started
        seconds_remaining = self.results.seconds() * max(1, num_remaining / self.jobs)
        self.num_started += 1
        times = f"{tqdm.format_interval(time.monotonic() - self.started_at)} so far"
        if seconds_remaining:
            times += f", about {tqdm.format_interval(seconds_remaining)} left"
        return f"{self.num_started}/{self.num_runs} {job} ({times})"


def _all_jobs(jobs_of_row: dict[Row, list[Job]]) -> list[Job]:
    """Return the jobs of all rows."""
    return [job for jobs in jobs_of_row.values() for job in jobs]


def main(parser: ArgumentParser, words: list[str], make_cli: MakeCLI) -> None:
    """Run ``perada compare``. The exit status is 1 if a run failed.

    Args:
        parser: Parser of the command.
        words: Words of the command line; options that the parser does not know are for ``perada fit``.
        make_cli: See :data:`~perada.studies.compare.configured.MakeCLI`.
    """
    _add_options(parser)
    split = split_words(words, parser)
    options = parser.parse_args(split.of_compare)
    if options.output is not None:
        check_output_file("--output", options.output, "results.json")
    if options.figures is not None:
        check_output_folder("--figures", options.figures)
        check_drawing("--figures")
    launcher = read_launcher(options, options.jobs, options.output and options.output.with_suffix(".jobs"))
    results = Results(options.output)
    with info_messages_disabled():
        plan = Plan(make_cli, options, split.of_fit)
    results.check({name: recipe.digest for name, recipe in plan.recipes.items()})
    counts = {name: plan.count(name) for name in plan.grids}
    if len(set(counts.values())) > 1:
        counts_text = ", ".join(f"{name} {count}" for name, count in counts.items())
        print(f"Algorithms differ in their number of settings: {counts_text}", file=sys.stderr)
    with launcher.runner(make_cli, options.threads, options.anonymous) as carry_out:
        num_failed = ComparisonRunner(plan, results, carry_out, launcher.jobs).run()
    tables = [curve_tables(results.records), summary(results.records), verdict(results.records)]
    if options.tune:
        tables.insert(0, grid_table(results.records))
    print("", *(text for text in tables if text), sep="\n\n")
    if options.figures is not None:
        _write_figures(results.records, options.figures)
    if num_failed:
        sys.exit(1)


def _write_figures(records: Sequence[Record], folder: Path) -> None:
    """Draw the figures that a comparison has the scores for, and print their names or why there are none."""
    try:
        comparison = Comparison(records)
    except NotComparableError as error:
        print(f"\nNo figures: {error}", file=sys.stderr)
        return
    figures = draw_figures(comparison)
    for name, figure in figures.items():
        save_figure(figure, folder / name)
    print(f"\nFigures in {folder}: {', '.join(figures)}")


@dataclass
class SplitWords:
    """Words of the command line for ``perada compare``, and those for ``perada fit``."""

    of_compare: list[str] = field(default_factory=list)
    of_fit: list[str] = field(default_factory=list)


def split_words(words: list[str], parser: ArgumentParser) -> SplitWords:
    """Split words into the options that the parser knows and the others, each with the values that follow it."""
    split = SplitWords()
    destination = split.of_compare
    option = ""
    for word in words:
        name, equals, _ = word.partition("=")
        is_option = word.startswith("-") and not word[1:2].isdigit()  # -1 is a value
        if not is_option:
            # A repeatable option takes further values: --tune A=1 B=2.
            if option in REPEATABLE_OPTIONS and equals and destination[-1] != option:
                destination.append(option)
            destination.append(word)
        elif name in parser._option_string_actions:
            option = name
            destination = split.of_compare
            destination.append(word)
        else:
            option = ""
            destination = split.of_fit
            destination.append(word)
    return split


def _add_options(parser: ArgumentParser) -> None:
    """Add the options of ``perada compare``."""
    parser.add_argument(
        "recipes",
        nargs="+",
        metavar="RECIPE",
        help=(
            "Recipes or configuration files. To find the method and settings that suit your images within a budget of "
            "time, use `perada choose`."
        ),
    )
    parser.add_argument(
        "--algorithms",
        nargs="+",
        default=[],
        metavar="NAME",
        help=(
            "Algorithms to run in place of the recipes': all, methods of `perada ls method`, or paths of custom "
            "classes, such as mine.MyAlgorithm."
        ),
    )
    parser.add_argument(
        "--paper",
        action="store_true",
        help="Train what each algorithm's paper trains: PerAda the recipe's adapter, the others full models.",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="Seeds; every row is run once with each.")
    parser.add_argument(
        "--redivide",
        action="store_true",
        help="Divide the images among the clients anew with each seed: data.seed is the run's seed.",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="ALGORITHMS:NAME=V",
        help=(
            "Value of an option of `perada fit` for some of the algorithms: ditto,perada:NAME=V. A+B=V sets two "
            "options to the same value."
        ),
    )
    parser.add_argument(
        "--tune",
        action="append",
        default=[],
        metavar="[ALGORITHMS:]NAME=V1,V2",
        help=(
            "Values of options of `perada fit`. Each is first evaluated with --tune_seeds, on images that the "
            "clients hold out, and the best is used for the algorithm. A+B=V1,V2 sets two options to the same value. "
            "With several --tune all combinations are evaluated. ditto,perada:NAME=V1,V2 is for these algorithms "
            "only. NAME=lo..hi is a range, from which --trials settings are drawn; it requires perada[tune]."
        ),
    )
    parser.add_argument(
        "--tune_seeds",
        nargs="+",
        type=int,
        default=[],
        help="Seeds with which --tune tries each setting, which is judged by its mean score (default: the first seed).",
    )
    parser.add_argument(
        "--trials", type=PositiveInt, help="Number of settings per algorithm whose --tune has a range (default: 10)."
    )
    parser.add_argument("--sampler", type=Sampler, default="tpe", help="How settings are drawn from ranges.")
    parser.add_argument(
        "--choose_by",
        nargs="+",
        default=list(SELECTION_SCORES),
        metavar="SCORE",
        help=(
            "Scores on the held-out images by whose mean settings are chosen, such as global/global_test or "
            "personal/local_test_worst. By default those of the clients' predictions on own and on all images."
        ),
    )
    parser.add_argument(
        "--variants",
        action="append",
        default=[],
        metavar="NAME={OPTION: V}",
        help=(
            "Rows by name, each with the options of `perada fit` that it changes: 'mirrored={data.flip: true, "
            "data.crop_padding: 2}'. By default there is one row, without changes."
        ),
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="NAME=V1,V2",
        help=(
            "Values of an option of `perada fit`, in the same form, each of which makes a separate row. With several "
            "--vary every combination is a row."
        ),
    )
    parser.add_argument(
        "--jobs", type=PositiveInt, help="Number of concurrent runs, each in its own process (default: 1)."
    )
    parser.add_argument("--threads", type=PositiveInt, default=1, help="Threads per run.")
    add_launcher_options(parser)
    parser.add_argument(
        "--figures",
        type=Path,
        metavar="FOLDER",
        help=(
            "Folder for figures: rows at home against abroad with intervals, and a line for each client from training "
            "alone, or else from the first row, to the best row. Needs perada[studies]."
        ),
    )
    parser.add_argument("--output", type=Path, help="JSON file of results; runs that it contains are not repeated.")
    parser.add_argument(
        "--anonymous",
        action="store_true",
        help="Write and print numbers instead of the names of clients; reasons of failed runs may still name files.",
    )
