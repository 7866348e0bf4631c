# SPDX-License-Identifier: Apache-2.0
"""`perada compare`: the grid, then the runs of the table."""

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt
from tqdm import tqdm

from perada.api import argument_texts, full_name
from perada.studies.compare.grid import Point, Sampler, inside, points, propose, ranged
from perada.studies.compare.plan import CHOSEN_BY, Job, MakeCLI, Plan, Row, words
from perada.studies.compare.results import (
    NO_POINT,
    Results,
    choose,
    curve_tables,
    grid_table,
    score,
    shown_score,
    summary,
)
from perada.studies.compare.running import CarryOut, Result, quiet, runner


class Comparison:
    """Runs what a plan asks for and is not in the file of results yet."""

    def __init__(self, plan: Plan, results: Results, carry_out: CarryOut) -> None:
        self.plan, self.results, self.carry_out = plan, results, carry_out
        self.began = time.monotonic()
        self.started = self.failed = 0
        self.total = sum(plan.count(row.algorithm) + len(plan.seeds) for row in plan.rows)

    def run(self) -> int:
        """Run the grid and the table; return how many runs failed."""
        plan, first = self.plan, self.plan.seeds[0]
        tuning = {
            row: [plan.job(row, first, "tune", point) for point in points(plan.grids[row.algorithm])]
            for row in plan.rows
        }
        self._run(job for jobs in tuning.values() for job in jobs)
        for number in range(plan.trials):  # one of each row at a time: a trial follows from those before
            for row, before in tuning.items():
                if ranged(plan.grids[row.algorithm]):
                    before.append(self._trial(row, number, before))
            self._run(jobs[-1] for row, jobs in tuning.items() if ranged(plan.grids[row.algorithm]))
        chosen = self._choose(tuning)
        final = [plan.job(row, seed, "run", point) for seed in plan.seeds for row, point in chosen.items()]
        self._run(final)
        self.results.arrange([*(job for jobs in tuning.values() for job in jobs), *final])
        return self.failed

    def _trial(self, row: Row, number: int, before: list[Job]) -> Job:
        """The next trial of a row: one that the file of results has, as long as there are any, or a new one."""
        seed, grid = self.plan.seeds[0], self.plan.grids[row.algorithm]
        for record in self.results.records:
            if record["stage"] == "tune" and inside(grid, record["point"]):
                job = self.plan.job(row, seed, "tune", record["point"])
                if job.args == record["args"] and all(job.point != one.point for one in before):
                    return job
        told = [(job.point, score(self.results.find(job))) for job in before]
        return self.plan.job(row, seed, "tune", propose(grid, told, number, self.plan.given.sampler, seed))

    def _choose(self, tuning: dict[Row, list[Job]]) -> dict[Row, Point]:
        """The best point of each row; a row without one is left out."""
        chosen: dict[Row, Point] = {}
        for row, jobs in tuning.items():
            best = choose([(job.point, self.results.find(job)) for job in jobs])
            if best is not None:
                chosen[row] = best[0]
                value = shown_score(best[1])
                print(f"{jobs[0].label}: {' '.join(words(best[0]))} chosen, validation score {value} %")
            elif not jobs:
                chosen[row] = {}
            else:
                self.total -= len(self.plan.seeds)
                self.failed += 1
                print(f"{jobs[0].label}: {NO_POINT}", file=sys.stderr)
        return chosen

    def _run(self, wanted: Iterable[Job]) -> None:
        """Run the jobs that have no results, and write each result as it comes."""
        pending = []
        for job in wanted:
            found = self.results.find(job)
            if found is None:
                pending.append(job)
            else:
                found |= vars(job)
                self.started += 1
        # The first run of each recipe, value and seed scores the initial model, if that was not done.
        first = {(job.recipe, *job.varied.items(), job.seed): job for job in reversed(pending) if job.stage == "run"}
        starts = [job for job in first.values() if not self.results.started(job)]
        if self.plan.given.jobs > 1:
            # Seed after seed, so that a comparison that is cut off has some of all rows. Within a seed the longest
            # first, so that no process has nothing to do at the end.
            seeds = self.plan.seeds
            pending.sort(key=lambda job: (seeds.index(job.seed), -self.results.seconds(job.label)))
        for number, result in self.carry_out([(job.args, job in starts) for job in pending]):
            if result is None:
                print(f"--- {self._progress(pending[number])}", flush=True)
            else:
                self._take(pending[number], result)

    def _take(self, job: Job, result: Result) -> None:
        """Record what came of a run."""
        if "failed" in result:
            self.failed += 1
            print(f"{job} failed: {result['failed']}", file=sys.stderr, flush=True)
        if "start" in result:
            start = {"stage": "start", "label": self.plan.start_label(job.recipe), "point": {}}
            self.results.add(vars(job) | start | result["start"])
        took = {"seconds": result["seconds"], "threads": self.plan.given.threads}
        self.results.add(vars(job) | took | result.get("run", result))

    def _progress(self, job: Job) -> str:
        """Which run of how many, the time since the start, and an estimate of what is left."""
        left = self.results.seconds() * (self.total - self.started) / self.plan.given.jobs
        self.started += 1
        about = f", about {tqdm.format_interval(left)} left" if left else ""
        return (
            f"{self.started}/{self.total} {job} ({tqdm.format_interval(time.monotonic() - self.began)} so far{about})"
        )


def main(parser: ArgumentParser, words: list[str], make_cli: MakeCLI) -> None:
    """Run ``perada compare``; ``words`` hold options for ``perada fit`` too. The status is 1 if a run failed."""
    _add_options(parser)
    own, overrides = _divide(words, parser)
    given = parser.parse_args(own)
    if given.output is not None and given.output.is_dir():
        raise IsADirectoryError(
            f"--output={given.output} is a folder; give a file, such as {given.output}/results.json"
        )
    results = Results(given.output)
    with quiet():
        plan = Plan(make_cli, given, overrides)
    results.check({recipe: digest for recipe, (_, digest) in plan.recipes.items()})
    counts = {name: plan.count(name) for name in plan.grids}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        print(f"Not every algorithm is given the same number of settings: {listed}", file=sys.stderr)
    with runner(make_cli, given.threads, given.jobs) as carry_out:
        failed = Comparison(plan, results, carry_out).run()
    tables = [grid_table(results.records)] if given.tune else []
    tables += [curve_tables(results.records), summary(results.records)]
    print("", *filter(None, tables), sep="\n\n")
    if failed:
        sys.exit(1)


def _divide(words: list[str], parser: ArgumentParser) -> tuple[list[str], list[str]]:
    """The words that the parser knows, and the options that it does not, each with what follows it."""
    known: list[str] = []
    other: list[str] = []
    part, option = known, ""
    for word in words:
        before, (name, equals, value) = option, word.partition("=")
        if word.startswith("-") and not word[1:2].isdigit():
            part, option = (known, name) if name in parser._option_string_actions else (other, "")
            word = word if part is known else f"--{full_name(name[2:])}{equals}{value}"
        elif before in ("--set", "--tune", "--variants", "--vary") and equals and part[-1] != before:  # a further one
            part.append(before)
        part.append(word)
    return known, other


def _add_options(parser: ArgumentParser) -> None:
    """Add the options of ``perada compare``.

    Attributes:
        recipes: Recipes or configuration files.
        algorithms: Instead of the recipes' own: all, names of `perada.finetune`, or classes of your own by their paths,
            such as mine.MyAlgorithm.
        paper: Each algorithm trains what its paper trains: PerAda the recipe's adapter, the others full models.
        seeds: Seeds.
        set: Value of an option of `perada fit` for some algorithms: ditto,perada:NAME=V. A+B=V gives two options the
            same value.
        tune: Values of options of `perada fit`. Each is first tried with the first seed, on images that the clients
            hold out, and the best is taken for the algorithm. A+B=V1,V2 gives two options the same value. With several
            --tune every combination is tried. ditto,perada:NAME=V1,V2 is for these algorithms only. NAME=lo..hi is a
            range, of which --trials settings are tried; it needs perada[tune].
        trials: Settings tried of each algorithm whose --tune has a range (default: 10).
        sampler: How settings are drawn from ranges: tpe or random.
        choose_by: Scores on the held-out images whose mean chooses (default: those of the personal models), such as
            global/global_test or personal/local_test_worst.
        variants: Rows by name, each with the options of `perada fit` that it changes:
            'mirrored={data.flip: true, data.crop_padding: 2}'. Without any it is one row, of what all runs have.
        vary: Values of an option of `perada fit`, in the same form, each of which makes a row of its own. With
            several --vary every combination is a row.
        jobs: Runs at once, each in its own process.
        threads: Threads of each run.
        output: JSON file of results; what it holds is not computed again.
    """
    values = {"action": "append", "default": [], "metavar": "NAME=V1,V2"}
    options: dict[str, dict[str, Any]] = {
        "recipes": {"nargs": "+"},
        "--algorithms": {"nargs": "+", "default": [], "metavar": "NAME"},
        "--paper": {"action": "store_true"},
        "--seeds": {"nargs": "+", "type": int, "default": [0]},
        "--set": values | {"metavar": "ALGORITHMS:NAME=V"},
        "--tune": values | {"metavar": "[ALGORITHMS:]NAME=V1,V2"},
        "--trials": {"type": PositiveInt},
        "--sampler": {"type": Sampler, "default": "tpe"},
        "--choose_by": {"nargs": "+", "default": list(CHOSEN_BY), "metavar": "SCORE"},
        "--variants": values | {"metavar": "NAME={OPTION: V}"},
        "--vary": values,
        "--jobs": {"type": PositiveInt, "default": 1},
        "--threads": {"type": PositiveInt, "default": 1},
        "--output": {"type": Path},
    }
    texts = argument_texts(_add_options)
    for name, option in options.items():
        parser.add_argument(name, help=texts[name.removeprefix("--")], **option)
